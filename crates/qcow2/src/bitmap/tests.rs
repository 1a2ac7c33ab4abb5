use super::*;
use crate::create::{CreateOptions, new_image};

const FILE_LEN: u64 = 0x8_0000;

fn header() -> Header {
    new_image(&CreateOptions::new(1 << 30)).unwrap().header
}

fn extension(count: u32, len: u64, offset: u64) -> Vec<u8> {
    let mut data = count.to_be_bytes().to_vec();
    data.extend_from_slice(&[0; 4]);
    data.extend_from_slice(&len.to_be_bytes());
    data.extend_from_slice(&offset.to_be_bytes());
    data
}

/// An entry with a table of `table_size` entries at 0x60000.
fn entry(table_size: u32, granularity_bits: u8, extra: &[u8], name: &[u8]) -> Vec<u8> {
    let mut bytes = 0x6_0000u64.to_be_bytes().to_vec();
    bytes.extend_from_slice(&table_size.to_be_bytes());
    bytes.extend_from_slice(&3u32.to_be_bytes());
    bytes.extend_from_slice(&[DIRTY_TRACKING, granularity_bits]);
    bytes.extend_from_slice(&(name.len() as u16).to_be_bytes());
    bytes.extend_from_slice(&(extra.len() as u32).to_be_bytes());
    bytes.extend_from_slice(extra);
    bytes.extend_from_slice(name);
    bytes.resize(pad8(bytes.len()), 0);
    bytes
}

fn directory(count: u32, bytes: &[u8], file_len: u64) -> Result<Vec<Bitmap>, ParseError> {
    let (directory_len, directory_offset) = (bytes.len() as u64, HostOffset::new(0x5_0000));
    BitmapsExtension { count, directory_len, directory_offset }.parse_directory(bytes, &header(), file_len)
}

#[test]
fn the_largest_and_smallest_directories_are_accepted() {
    let parse = |data: &[u8], file_len| BitmapsExtension::parse(data, 0, &header(), file_len);
    let smallest = parse(&extension(1, 24, 0x5_0000), 0x5_0018).unwrap();
    assert_eq!((smallest.count, smallest.directory_len), (1, 24));
    assert_eq!(smallest.directory_offset, HostOffset::new(0x5_0000));
    assert!(parse(&extension(1, 24, 0x5_0000), 0x5_0017).is_err());
    assert!(parse(&extension(MAX_BITMAPS, MAX_DIRECTORY_LEN, 0x5_0000), 1 << 30).is_ok());
    assert!(parse(&extension(MAX_BITMAPS, MAX_DIRECTORY_LEN + 1, 0x5_0000), 1 << 30).is_err());
    assert!(parse(&extension(2, 47, 0x5_0000), 1 << 30).is_err());
}

#[test]
fn entries_follow_each_other_padded() {
    let bytes =
        [entry(1, 16, b"", b"a"), entry(2, 9, b"xyz", b"second"), entry(3, 31, b"", b"12345678")].concat();
    let found = directory(3, &bytes, FILE_LEN).unwrap();
    let seen: Vec<_> =
        found.iter().map(|one| (one.table_size, one.granularity_bits, one.name.as_str())).collect();
    assert_eq!(seen, [(1, 16, "a"), (2, 9, "second"), (3, 31, "12345678")]);
    assert_eq!(found[0].flags, BitmapFlags::IN_USE | BitmapFlags::AUTO);
    assert_eq!((found[0].kind, found[0].table_offset), (DIRTY_TRACKING, HostOffset::new(0x6_0000)));
    let kind = ParseErrorKind::Truncated { needed: 24, have: 0 };
    let error = ParseError::new("bitmap directory entry", 0x5_0000 + bytes.len() as u64, kind);
    assert_eq!(directory(4, &bytes, FILE_LEN), Err(error));
}

#[test]
fn names_tables_and_granularities_are_accepted_up_to_their_limits() {
    let name = vec![b'n'; MAX_NAME_LEN.into()];
    assert!(directory(1, &entry(1, 16, b"", &name), FILE_LEN).is_ok());
    let most = (MAX_BITMAP_LEN >> 16) as u32;
    assert!(directory(1, &entry(most, 16, b"", b"a"), 0x6_0000 + u64::from(most) * 8).is_ok());
    assert!(directory(1, &entry(most, 16, b"", b"a"), 0x6_0000 + u64::from(most) * 8 - 1).is_err());
    assert!(directory(1, &entry(most + 1, 16, b"", b"a"), 1 << 40).is_err());
    for (bits, good) in [(8, false), (9, true), (31, true), (32, false)] {
        assert_eq!(directory(1, &entry(1, bits, b"", b"a"), FILE_LEN).is_ok(), good, "2^{bits}");
    }
}

#[test]
fn an_entry_cut_within_its_padding_is_cut_short() {
    let mut bytes = entry(1, 16, b"", b"a");
    bytes.truncate(31);
    let kind = ParseErrorKind::Truncated { needed: 32, have: 31 };
    assert_eq!(
        directory(1, &bytes, FILE_LEN),
        Err(ParseError::new("bitmap directory entry", 0x5_0000, kind))
    );
}

#[test]
fn table_entries_hold_a_cluster_or_say_all_zeros_or_all_ones() {
    let bits = ClusterBits::DEFAULT;
    assert_eq!(decode_table_entry(0, bits), Ok(None));
    assert_eq!(decode_table_entry(1, bits), Ok(None));
    assert_eq!(decode_table_entry(0x6_0000, bits), Ok(Some(HostOffset::new(0x6_0000))));
    for (raw, wrong) in
        [(0x6_0001, 1), (2, 2), (0x100, 0x100), (1 << 56, 1 << 56), (0x6_0000 | 1 << 63, 1 << 63)]
    {
        assert_eq!(decode_table_entry(raw, bits), Err(EntryError::Reserved { raw, bits: wrong }), "{raw:#x}");
    }
    let error = EntryError::Misaligned { raw: 0x6_0200, offset: HostOffset::new(0x6_0200) };
    assert_eq!(decode_table_entry(0x6_0200, bits), Err(error));
}
