use super::*;

fn record(magic: u32, data: &[u8]) -> Vec<u8> {
    let mut out = [magic.to_be_bytes(), (data.len() as u32).to_be_bytes()].concat();
    out.extend_from_slice(data);
    out.resize(pad8(out.len()), 0);
    out
}

fn parse(bytes: &[u8]) -> Result<Extensions, ParseError> {
    Extensions::parse(bytes, 0, bytes.len())
}

#[test]
fn every_type_is_told_apart_and_kept_in_order() {
    let bytes = [
        record(0x1234_5678, b"mine"),
        record(magic::BACKING_FORMAT, b"qcow2"),
        record(magic::BITMAPS, &[1; 24]),
        record(magic::ENCRYPTION_HEADER, &[2; 16]),
        record(magic::EXTERNAL_DATA_NAME, b"data.raw"),
        record(magic::FEATURE_NAMES, &[0; 48]),
        record(0x1234_5678, b""),
        vec![0; 8],
    ]
    .concat();
    let found = parse(&bytes).unwrap();
    assert_eq!(found.items[0], Extension::Unknown { magic: 0x1234_5678, data: b"mine".to_vec() });
    assert_eq!(found.backing_format(), Some("qcow2"));
    assert_eq!(found.bitmaps(), Some(&[1; 24][..]));
    assert_eq!(found.items[3], Extension::EncryptionHeader(vec![2; 16]));
    assert_eq!(found.items[4], Extension::ExternalDataName(b"data.raw".to_vec()));
    assert!(found.feature_names().is_some());
    assert_eq!(found.items.len(), 7);
    assert_eq!(found.encode(), bytes);
    assert_eq!(found.encoded_len(), bytes.len());
}

#[test]
fn an_empty_list_has_nothing_in_it() {
    let none = Extensions::default();
    assert_eq!(parse(&none.encode()), Ok(none.clone()));
    assert_eq!((none.backing_format(), none.bitmaps(), none.feature_names()), (None, None, None));
    assert_eq!(none.encode(), [0; 8]);
}

#[test]
fn what_follows_the_end_mark_is_not_read() {
    let bytes = [vec![0; 8], record(magic::BACKING_FORMAT, b"raw")].concat();
    assert_eq!(parse(&bytes), Ok(Extensions::default()));
}

#[test]
fn the_list_may_end_where_the_room_does() {
    let bytes = record(magic::BACKING_FORMAT, b"raw");
    assert_eq!(parse(&bytes).unwrap().backing_format(), Some("raw"));
    // An empty record takes just its type and length.
    let empty = parse(&[bytes.clone(), record(7, b"")].concat()).unwrap();
    assert_eq!(empty.items[1], Extension::Unknown { magic: 7, data: Vec::new() });
    // Too little room for another record's type and length.
    let bytes = [bytes, vec![0xff; 7]].concat();
    assert_eq!(parse(&bytes).unwrap().items.len(), 1);
    assert_eq!(Extensions::parse(&bytes, 20, 10), Ok(Extensions::default()));
}

#[test]
fn a_record_may_end_in_the_middle_of_its_padding() {
    let mut bytes = record(magic::BACKING_FORMAT, b"qcow2");
    bytes.truncate(13);
    assert_eq!(parse(&bytes).unwrap().backing_format(), Some("qcow2"));
}

#[test]
fn a_length_past_the_end_is_refused_where_it_stands() {
    for len in [9, 0x7fff_ffff, u32::MAX - 7, u32::MAX] {
        let mut bytes = [record(7, b"12345678"), record(8, b"12345678")].concat();
        bytes[20..24].copy_from_slice(&len.to_be_bytes());
        let kind = ParseErrorKind::OutOfRange { value: len.into(), min: 0, max: 8 };
        assert_eq!(parse(&bytes), Err(ParseError::new("header extension length", 20, kind)));
    }
}

#[test]
fn missing_bytes_are_reported_with_what_is_needed() {
    let kind = ParseErrorKind::Truncated { needed: 200, have: 100 };
    let error = ParseError::new("header extensions", 72, kind);
    assert_eq!(Extensions::parse(&[0; 100], 72, 200), Err(error));
}

#[test]
fn of_a_known_type_the_last_counts() {
    for magic in [magic::BACKING_FORMAT, magic::BITMAPS, magic::FEATURE_NAMES] {
        let (first, last) = (record(magic, b"a"), record(magic, b"b"));
        assert_eq!(parse(&[first, last.clone()].concat()), parse(&last));
    }
}

#[test]
fn a_backing_format_ends_at_a_zero_byte_and_an_empty_one_names_none() {
    let format = |data: &[u8]| parse(&record(magic::BACKING_FORMAT, data)).unwrap();
    assert_eq!(format(b"qcow2\0").backing_format(), Some("qcow2"));
    assert_eq!(format(b"").backing_format(), None);
    assert_eq!(format(b"\0raw").backing_format(), None);
}

#[test]
fn a_backing_format_is_short_text() {
    let refused = |data: &[u8]| parse(&record(magic::BACKING_FORMAT, data)).unwrap_err();
    let kind = ParseErrorKind::OutOfRange { value: 16, min: 0, max: 15 };
    assert_eq!(refused(b"0123456789abcdef").kind, kind);
    assert_eq!(refused(b"\xff").kind, ParseErrorKind::NotUtf8);
    assert_eq!(refused(b"\xff").offset, 8);
}

#[test]
fn feature_names_are_found_by_kind_and_bit() {
    let names = FeatureNames::known();
    let name = |kind, bit| names.name(kind, bit).map(Cow::into_owned);
    assert_eq!(name(FeatureKind::Incompatible, 4).as_deref(), Some("extended L2 entries"));
    assert_eq!(name(FeatureKind::Compatible, 0).as_deref(), Some("lazy refcounts"));
    assert_eq!(name(FeatureKind::Autoclear, 1).as_deref(), Some("raw external data"));
    assert_eq!(name(FeatureKind::Autoclear, 63), None);
}

#[test]
fn hostile_feature_names_cannot_break_a_terminal() {
    let long = "x".repeat(60);
    let names = FeatureNames::new([
        (FeatureKind::Incompatible, 9, "a\x1b[2Jb"),
        (FeatureKind::Incompatible, 10, &long),
    ]);
    assert_eq!(names.name(FeatureKind::Incompatible, 9).unwrap(), "a?[2Jb");
    assert_eq!(names.name(FeatureKind::Incompatible, 10).unwrap(), "x".repeat(46));
    let cut = FeatureNames(vec![0, 9, b'a']);
    assert_eq!(cut.name(FeatureKind::Incompatible, 9), None);
}
