//! Edges that must be accepted; what must be refused is the corpus in `tests/broken`.

use vmstrata_types::{ClusterBits, HostOffset};

use super::*;
use crate::create::{CreateOptions, new_image};
use crate::entry::HOST_OFFSET_LIMIT;
use crate::extension::{Extension, Extensions};

fn plain() -> Header {
    new_image(&CreateOptions::new(1 << 30)).unwrap().header
}

/// The header's bytes, padded to a cluster.
fn cluster(header: &Header) -> Vec<u8> {
    let mut bytes = header.encode(&Extensions::default(), None).unwrap();
    bytes.resize(header.cluster_bits.size() as usize, 0);
    bytes
}

fn reparse(header: &Header, file_len: u64) -> Header {
    Header::parse(&cluster(header), file_len).unwrap_or_else(|error| panic!("{error}"))
}

#[test]
fn the_magic_alone_tells_the_format() {
    assert!(is_qcow2(b"QFI\xfb"));
    assert!(is_qcow2(&cluster(&plain())));
    assert!(!is_qcow2(b"QFI"));
    assert!(!is_qcow2(b"QFI\xfa\0\0\0\x03"));
}

#[test]
fn no_more_bytes_than_the_header_are_needed() {
    let header = plain();
    let bytes = cluster(&header);
    assert_eq!(Header::parse(&bytes[..112], 1 << 20), Ok(header));
    let kind = crate::ParseErrorKind::Truncated { needed: 112, have: 111 };
    assert_eq!(Header::parse(&bytes[..111], 1 << 20).unwrap_err().kind, kind);
}

#[test]
fn any_header_length_from_104_to_a_cluster_is_read() {
    // 105 to 111 are no multiples of 8; QEMU opens those as well.
    for len in [104, 105, 108, 111, 112, 120, 1000, 4096] {
        let options =
            CreateOptions { cluster_bits: ClusterBits::new(12).unwrap(), ..CreateOptions::new(1 << 20) };
        let mut header = new_image(&options).unwrap().header;
        header.header_length = len;
        header.additional = (field::ADDITIONAL..len.into()).map(|at| at as u8).collect();
        let mut bytes = header.encode_fields(0, 0);
        assert_eq!(bytes.len(), len as usize);
        bytes.resize(4096, 0);
        assert_eq!(Header::parse(&bytes, 1 << 20), Ok(header), "length {len}");
    }
}

#[test]
fn tables_may_reach_past_the_end_of_the_file_but_not_of_all_files() {
    let mut header = plain();
    let end = header.l1_table_offset.get() + u64::from(header.l1_size) * 8;
    for len in [end, end - 1, 0] {
        assert_eq!(reparse(&header, len), header);
    }
    header.l1_table_offset = HostOffset::new(HOST_OFFSET_LIMIT);
    assert!(Header::parse(&cluster(&header), u64::MAX).is_err());
}

#[test]
fn tables_may_touch_and_be_as_large_as_allowed() {
    let mut header = plain();
    header.refcount_table_clusters = 128;
    header.l1_table_offset = HostOffset::new(129 << 16);
    header.l1_size = MAX_L1_ENTRIES;
    header.snapshots_offset = header.l1_table_offset + (32 << 20);
    header.snapshot_count = MAX_SNAPSHOTS;
    assert_eq!(reparse(&header, 1 << 40), header);
    // The other way round.
    header.l1_table_offset = HostOffset::new(1 << 16);
    header.refcount_table_offset = header.l1_table_offset + (32 << 20);
    header.snapshots_offset = HostOffset::new(1 << 30);
    assert_eq!(reparse(&header, 1 << 40), header);
    assert_eq!(header.refcount_table_entries() as u64, MAX_REFCOUNT_TABLE_BYTES / 8);
}

#[test]
fn an_l1_table_larger_than_the_disk_is_no_fault() {
    // With room for a VM state behind the disk's end.
    let mut header = plain();
    header.l1_size = 1000;
    assert_eq!(reparse(&header, 1 << 20), header);
}

#[test]
fn bits_that_only_make_writing_unsafe_are_reported() {
    let mut header = plain();
    header.incompatible = Incompatible::DIRTY | Incompatible::CORRUPT;
    header.compatible = Compatible::from_bits_retain(u64::MAX);
    header.autoclear = Autoclear::from_bits_retain(1 << 40 | 1);
    let again = reparse(&header, 1 << 20);
    assert_eq!(again, header);
    assert!(
        again.compatible.contains(Compatible::LAZY_REFCOUNTS) && again.autoclear.contains(Autoclear::BITMAPS)
    );
}

#[test]
fn version_2_ignores_what_lies_where_version_3_has_fields() {
    let options = CreateOptions { version: 2, ..CreateOptions::new(1 << 20) };
    let header = new_image(&options).unwrap().header;
    let mut bytes = cluster(&header);
    bytes[72..112].fill(0xff);
    assert_eq!(Header::parse(&bytes, 1 << 20), Ok(header));
}

#[test]
fn a_name_may_fill_the_cluster_to_its_end() {
    let name = vec![b'n'; MAX_BACKING_NAME_LEN as usize];
    let mut bytes = cluster(&plain());
    let start = bytes.len() - name.len();
    bytes[start..].copy_from_slice(&name);
    bytes[8..16].copy_from_slice(&(start as u64).to_be_bytes());
    bytes[16..20].copy_from_slice(&MAX_BACKING_NAME_LEN.to_be_bytes());
    let header = Header::parse(&bytes, 1 << 20).unwrap();
    assert_eq!(header.backing_name(&bytes).unwrap(), Some(&name[..]));
    assert_eq!(header.extensions_end(), start);
    // The first byte after the header is as good.
    bytes[8..16].copy_from_slice(&112u64.to_be_bytes());
    assert_eq!(Header::parse(&bytes, 1 << 20).unwrap().backing_file.unwrap().offset, HostOffset::new(112));
    assert!(header.backing_name(&bytes[..bytes.len() - 1]).is_err());
}

#[test]
fn an_empty_name_is_no_backing_file() {
    let mut bytes = cluster(&plain());
    bytes[8..16].copy_from_slice(&512u64.to_be_bytes());
    let header = Header::parse(&bytes, 1 << 20).unwrap();
    assert_eq!(header.backing_file, None);
    assert_eq!(header.backing_name(&bytes), Ok(None));
}

#[test]
fn a_cluster_is_filled_to_its_last_byte_and_no_further() {
    let mut header = plain();
    header.cluster_bits = ClusterBits::new(11).unwrap();
    // 112 bytes of header, 8 + 904 of extension, 8 of end mark: 1016 are left.
    let extensions = Extensions { items: vec![Extension::Unknown { magic: 9, data: vec![1; 904] }] };
    assert_eq!(header.encode(&extensions, Some(&[b'n'; 1016])).unwrap().len(), 2048);
    let error = EncodeError::DoesNotFit { needed: 2049, have: 2048 };
    assert_eq!(header.encode(&extensions, Some(&[b'n'; 1017])), Err(error));
}

#[test]
#[should_panic(expected = "header_length is what the version says")]
fn a_header_at_odds_with_itself_is_not_written() {
    let mut header = plain();
    header.header_length = 104;
    let _ = header.encode(&Extensions::default(), None);
}
