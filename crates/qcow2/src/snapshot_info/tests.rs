use super::*;

fn info(name: &str) -> SnapshotInfo {
    SnapshotInfo { name: name.to_owned(), taken_ns: 1_732_233_600_123_456_789, ..SnapshotInfo::default() }
}

fn full() -> SnapshotInfo {
    SnapshotInfo {
        labels: vec![("job".to_owned(), "nightly ü".to_owned()), ("a/b".to_owned(), String::new())],
        group: Some("g-1".to_owned()),
        origin: Some("web.qcow2".to_owned()),
        ..info("mon")
    }
}

#[test]
fn the_bytes_are_those_of_the_documentation() {
    let bytes =
        SnapshotInfo { labels: vec![("k".to_owned(), "v".to_owned())], ..info("mon") }.encode().unwrap();
    assert_eq!(bytes[..8], [1, 0, 0, 0, 3, 0, 0, 1]);
    assert_eq!(bytes[8..16], 1_732_233_600_123_456_789u64.to_be_bytes());
    assert_eq!(bytes[16..20], [0xc1, 0x32, 0xe0, 0xac]);
    assert_eq!(bytes[20..], *b"mon\x01\x01kv");
}

#[test]
fn what_was_encoded_is_read_back() {
    for info in [info("x"), full(), SnapshotInfo { taken_ns: u64::MAX, ..info(&"n".repeat(MAX_NAME_LEN)) }] {
        assert_eq!(SnapshotInfo::parse(&info.encode().unwrap()).unwrap(), info);
    }
}

#[test]
fn names_that_could_leave_the_directory_or_the_line_are_refused() {
    let long = "x".repeat(MAX_NAME_LEN + 1);
    for name in ["", ".", "..", "a/b", "../x", "-f", "a b", "a\n", "ü", "a@b", "a\0", "a:b", &long] {
        assert_eq!(info(name).encode(), Err(SnapshotInfoError::Name(name.to_owned())), "{name:?}");
        assert!(!is_snapshot_name(name));
    }
    for name in ["a", "A.b-c_d", "2026-11-21T23.40.00Z", "_"] {
        assert!(is_snapshot_name(name) && info(name).encode().is_ok());
    }
}

#[test]
fn every_limit_holds_at_its_edge() {
    let label = |key: usize, value: usize| ("k".repeat(key), "v".repeat(value));
    let labelled = |labels| SnapshotInfo { labels, ..info("x") };
    labelled(vec![label(MAX_KEY_LEN, MAX_VALUE_LEN)]).encode().unwrap();
    let key = labelled(vec![label(MAX_KEY_LEN + 1, 0)]).encode();
    assert!(matches!(key, Err(SnapshotInfoError::Key(_))));
    let value = labelled(vec![label(1, MAX_VALUE_LEN + 1)]).encode();
    assert!(matches!(value, Err(SnapshotInfoError::Value { .. })));
    let numbered = |count: usize| (0..count).map(|n| (format!("k{n}"), String::new())).collect();
    labelled(numbered(MAX_LABELS)).encode().unwrap();
    assert_eq!(
        labelled(numbered(MAX_LABELS + 1)).encode(),
        Err(SnapshotInfoError::TooManyLabels(MAX_LABELS + 1))
    );
    // 20 of the header, 1 of the name, and records of 2 and their text: 2048 exactly, then one more.
    let mut labels: Vec<_> = (0..7).map(|n| (n.to_string(), "v".repeat(255))).collect();
    labels.push(("7".to_owned(), "v".repeat(MAX_LEN - 21 - 7 * 258 - 3)));
    assert_eq!(labelled(labels.clone()).encode().unwrap().len(), MAX_LEN);
    labels[7].1.push('v');
    assert_eq!(labelled(labels).encode(), Err(SnapshotInfoError::TooLong(MAX_LEN + 1)));
}

#[test]
fn labels_that_cannot_be_shown_or_told_apart_are_refused() {
    let labelled = |labels: &[(&str, &str)]| {
        let labels = labels.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect();
        SnapshotInfo { labels, ..info("x") }.encode()
    };
    assert_eq!(labelled(&[("a", "1"), ("a", "2")]), Err(SnapshotInfoError::KeyTwice("a".to_owned())));
    for key in ["", "a b", "a=b", "ü", "\x1b"] {
        assert!(matches!(labelled(&[(key, "")]), Err(SnapshotInfoError::Key(_))), "{key:?}");
    }
    assert!(matches!(labelled(&[("a", "\x1b[2J")]), Err(SnapshotInfoError::Value { .. })));
    for (group, origin) in [(Some("a b"), None), (Some(""), None), (None, Some("")), (None, Some("\n"))] {
        let owned = |text: Option<&str>| text.map(str::to_owned);
        SnapshotInfo { group: owned(group), origin: owned(origin), ..info("x") }.encode().unwrap_err();
    }
}

#[test]
fn every_flipped_bit_and_every_cut_is_noticed() {
    let bytes = full().encode().unwrap();
    for bit in 0..bytes.len() * 8 {
        let mut damaged = bytes.clone();
        damaged[bit / 8] ^= 1 << (bit % 8);
        SnapshotInfo::parse(&damaged).unwrap_err();
    }
    for len in 0..bytes.len() {
        SnapshotInfo::parse(&bytes[..len]).unwrap_err();
    }
    let mut longer = bytes;
    longer.push(0);
    SnapshotInfo::parse(&longer).unwrap_err();
}

/// `bytes` with a checksum that matches.
fn sealed(mut bytes: Vec<u8>) -> Vec<u8> {
    bytes[CRC_AT..FIXED].fill(0);
    let crc = crc32c::crc32c(&bytes);
    bytes[CRC_AT..FIXED].copy_from_slice(&crc.to_be_bytes());
    bytes
}

#[test]
fn hostile_records_with_a_valid_checksum_are_refused() {
    let bytes = full().encode().unwrap();
    assert_eq!(SnapshotInfo::parse(&sealed(bytes.clone())).unwrap(), full());
    let edits: [(usize, u8); 8] = [(1, 1), (3, 1), (4, 0), (4, 255), (5, 200), (6, 255), (7, 3), (20, b'/')];
    for (at, value) in edits {
        let mut hostile = bytes.clone();
        hostile[at] = value;
        SnapshotInfo::parse(&sealed(hostile)).unwrap_err();
    }
    let mut not_text = bytes.clone();
    not_text[26] = 0xff;
    assert_eq!(
        SnapshotInfo::parse(&sealed(not_text)),
        Err(SnapshotInfoError::Damaged("its text is not UTF-8"))
    );
    let mut trailing = bytes.clone();
    trailing.push(0);
    assert_eq!(
        SnapshotInfo::parse(&sealed(trailing)),
        Err(SnapshotInfoError::Damaged("bytes follow the last label"))
    );
    let mut later = bytes;
    later[0] = 2;
    assert_eq!(SnapshotInfo::parse(&later), Err(SnapshotInfoError::Version(2)));
}

/// Whose disk it is has a record of its own, which is no snapshot's.
#[test]
fn a_record_without_a_name_says_whose_the_layers_are() {
    let record = LayerRecord::Foreign("golden.qcow2".to_owned());
    let bytes = record.encode().unwrap();
    assert_eq!(LayerRecord::parse(&bytes).unwrap(), record);
    assert_eq!(SnapshotInfo::parse(&bytes), Err(SnapshotInfoError::Name(String::new())));
    let named = LayerRecord::Snapshot(full());
    assert_eq!(LayerRecord::parse(&named.encode().unwrap()).unwrap(), named);
    for disk in ["", "\n", &"x".repeat(MAX_ORIGIN_LEN + 1)] {
        LayerRecord::Foreign(disk.to_owned()).encode().unwrap_err();
    }
}

proptest::proptest! {
    #[test]
    fn whatever_is_read_is_what_would_be_written(
        edits in proptest::collection::vec((0..80usize, proptest::num::u8::ANY), 0..6),
        cut in 20..80usize,
    ) {
        let mut bytes = full().encode().unwrap();
        bytes.truncate(cut);
        for (at, value) in edits {
            if let Some(byte) = bytes.get_mut(at) {
                *byte = value;
            }
        }
        let bytes = sealed(bytes);
        if let Ok(info) = SnapshotInfo::parse(&bytes) {
            proptest::prop_assert_eq!(info.encode().unwrap(), bytes);
        }
    }
}
