use super::*;
use crate::create::{CreateOptions, new_image};

const FILE_LEN: u64 = 1 << 20;

fn header(count: u32) -> Header {
    let mut header = new_image(&CreateOptions::new(7 << 20)).unwrap().header;
    header.snapshot_count = count;
    header.snapshots_offset = HostOffset::new(0x5_0000);
    header
}

/// An entry with an L1 table of one entry at 0x60000, ID `7` and name `nightly`, then `extra` in between.
fn entry(extra: &[u8]) -> Vec<u8> {
    let mut bytes = vec![0; MIN_ENTRY_LEN];
    bytes[..8].copy_from_slice(&0x6_0000u64.to_be_bytes());
    bytes[8..12].copy_from_slice(&1u32.to_be_bytes());
    bytes[12..16].copy_from_slice(&[0, 1, 0, 7]);
    bytes[16..20].copy_from_slice(&1_700_000_000u32.to_be_bytes());
    bytes[32..36].copy_from_slice(&111u32.to_be_bytes());
    bytes[36..40].copy_from_slice(&(extra.len() as u32).to_be_bytes());
    bytes.extend_from_slice(extra);
    bytes.extend_from_slice(b"7nightly");
    bytes.resize(pad8(bytes.len()), 0);
    bytes
}

fn parse_one(bytes: &[u8]) -> Snapshot {
    parse_table(bytes, &header(1), FILE_LEN).unwrap().remove(0)
}

#[test]
fn no_snapshots_need_no_bytes() {
    assert_eq!(parse_table(&[], &header(0), FILE_LEN), Ok(Vec::new()));
}

#[test]
fn an_entry_without_extra_data_has_the_disks_size_of_today() {
    let found = parse_one(&entry(&[]));
    assert_eq!((found.id.as_str(), found.name.as_str()), ("7", "nightly"));
    assert_eq!((found.l1_table_offset, found.l1_size), (HostOffset::new(0x6_0000), 1));
    assert_eq!((found.vm_state_size, found.disk_size), (111, 7 << 20));
    assert_eq!((found.date_sec, found.entry_len), (1_700_000_000, 48));
}

/// Eight bytes of extra data hold the size of the VM state, sixteen the size of the disk as well.
#[test]
fn extra_data_overrides_field_by_field() {
    let [state, disk, count] = [222u64, 5 << 20, 9].map(u64::to_be_bytes);
    let sizes = |extra: &[u8]| {
        let found = parse_one(&entry(extra));
        assert_eq!(found.name, "nightly");
        (found.vm_state_size, found.disk_size)
    };
    assert_eq!(sizes(&state[..7]), (111, 7 << 20));
    assert_eq!(sizes(&state), (222, 7 << 20));
    assert_eq!(sizes(&[state, disk].concat()[..15]), (222, 7 << 20));
    assert_eq!(sizes(&[state, disk].concat()), (222, 5 << 20));
    assert_eq!(sizes(&[state, disk, count].concat()), (222, 5 << 20));
    assert_eq!(sizes(&[&[state, disk].concat()[..], &[0; 1008]].concat()), (222, 5 << 20));
}

#[test]
fn entries_follow_each_other_at_multiples_of_eight() {
    let table = [entry(&[1; 3]), entry(&[]), entry(&[0; 16])].concat();
    let found = parse_table(&table, &header(3), FILE_LEN).unwrap();
    assert_eq!(found.iter().map(|one| one.entry_len).collect::<Vec<_>>(), [56, 48, 64]);
    assert!(found.iter().all(|one| one.name == "nightly"));
    let kind = ParseErrorKind::Truncated { needed: 40, have: 0 };
    let error = ParseError::new("snapshot table entry", 0x5_0000 + 168, kind);
    assert_eq!(parse_table(&table, &header(4), FILE_LEN), Err(error));
}

/// The last entry's padding may be missing at the end of the file.
#[test]
fn the_last_entry_may_end_with_its_name() {
    let mut bytes = entry(&[0; 3]);
    bytes.truncate(51);
    assert_eq!(parse_one(&bytes).name, "nightly");
    bytes.truncate(50);
    let kind = ParseErrorKind::Truncated { needed: 51, have: 50 };
    let error = ParseError::new("snapshot table entry", 0x5_0000, kind);
    assert_eq!(parse_table(&bytes, &header(1), FILE_LEN), Err(error));
}

#[test]
fn an_l1_table_may_end_with_the_file_and_be_as_large_as_allowed() {
    let bytes = entry(&[]);
    assert!(parse_table(&bytes, &header(1), 0x6_0008).is_ok());
    let kind = ParseErrorKind::PastEndOfFile { end: 0x6_0008, file_len: 0x6_0007 };
    let error = ParseError::new("snapshot l1_table_offset", 0x5_0000, kind);
    assert_eq!(parse_table(&bytes, &header(1), 0x6_0007), Err(error));
    let mut large = bytes.clone();
    large[8..12].copy_from_slice(&MAX_L1_ENTRIES.to_be_bytes());
    assert!(parse_table(&large, &header(1), 1 << 30).is_ok());
}

#[test]
fn an_empty_disk_has_an_empty_l1_table_anywhere() {
    let mut bytes = entry(&[]);
    bytes[..12].fill(0);
    assert_eq!(parse_one(&bytes).l1_size, 0);
}

#[test]
fn names_that_are_no_text_are_shown_as_well_as_can_be() {
    let mut bytes = entry(&[]);
    bytes[41] = 0xff;
    assert_eq!(parse_one(&bytes).name, "\u{fffd}ightly");
}
