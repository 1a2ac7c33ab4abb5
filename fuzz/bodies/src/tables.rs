//! Entries of all tables: what is understood is written back as it was found.

use vmstrata_qcow2::bitmap::{self, BitmapsExtension};
use vmstrata_qcow2::entry::{COPIED, ZERO_FLAG};
use vmstrata_qcow2::geometry::MIN_EXTENDED;
use vmstrata_qcow2::{
    CreateOptions, EntryFormat, Header, RawEntry, RefcountOrder, new_image, refcount, snapshot,
};
use vmstrata_types::{ClusterBits, HostOffset};

/// Bytes before the entries: version, cluster bits, refcount order, count of snapshots.
const PREFIX: usize = 4;
const FILE_LEN: u64 = 1 << 40;

/// Decodes what follows the first four bytes of `data` as each kind of table there is.
///
/// # Panics
/// When an entry or a refcount does not survive being written.
pub fn qcow2_tables(data: &[u8]) {
    let Some((&[version, bits, order, snapshots], table)) = data.split_first_chunk::<PREFIX>() else {
        return;
    };
    let span = ClusterBits::MAX.get() - ClusterBits::MIN.get() + 1;
    let bits = ClusterBits::new(ClusterBits::MIN.get() + u32::from(bits) % span).expect("in range");
    let version = 2 + u32::from(version) % 2;
    let (words, _) = table.as_chunks();
    words.iter().for_each(|word| entries(u64::from_be_bytes(*word), EntryFormat::new(version, bits), bits));
    if bits >= MIN_EXTENDED {
        let format = EntryFormat::extended(bits);
        format.raw_entries(table).for_each(|raw| l2_entry(raw, format));
    }
    refcounts(table, RefcountOrder::new(u32::from(order) % 7).expect("in range"));
    let header = header(bits, snapshots);
    let found = snapshot::parse_table(table, &header, FILE_LEN);
    if let Ok(found) = found {
        assert_eq!(found.len(), usize::from(snapshots));
        assert!(found.iter().map(|snapshot| snapshot.entry_len).sum::<usize>() < table.len() + 8);
    }
    bitmaps(table, &header);
}

fn entries(raw: u64, format: EntryFormat, bits: ClusterBits) {
    // A COPIED flag that says nothing is not kept.
    let is_kept = |encoded| encoded == raw || encoded == raw & !COPIED;
    if let Ok(entry) = format.l1(raw) {
        let encoded = format.encode_l1(entry);
        assert!(is_kept(encoded) && format.l1(encoded) == Ok(entry), "{raw:#x}: {entry:?}");
    }
    l2_entry(RawEntry::standard(raw), format);
    if let Ok(block) = refcount::decode_table_entry(raw, bits) {
        assert_eq!(refcount::encode_table_entry(block, bits), raw);
    }
    if let Ok(Some(cluster)) = bitmap::decode_table_entry(raw, bits) {
        assert!(cluster.is_aligned(bits) && cluster != HostOffset::ZERO);
    }
}

/// Flags that say nothing are not kept.
fn l2_entry(raw: RawEntry, format: EntryFormat) {
    if let Ok(entry) = format.l2(raw) {
        let encoded = format.encode_l2(entry);
        let flags = COPIED | if format.is_extended() { ZERO_FLAG } else { 0 };
        let is_kept = raw.word & !encoded.word & !flags == 0 && encoded.word & !raw.word == 0;
        let is_same = is_kept && encoded.subclusters == raw.subclusters;
        assert!(is_same && format.l2(encoded) == Ok(entry), "{raw}: {entry:?}");
    }
}

fn refcounts(block: &[u8], order: RefcountOrder) {
    let block = &block[..block.len() & !7];
    let count = block.len() * 8 / order.width_bits() as usize;
    let mut copy = vec![0xa5; block.len()];
    for index in 0..count {
        let value = order.get(block, index);
        assert!(value <= order.max());
        order.set(&mut copy, index, value).expect("it came from such a place");
    }
    assert_eq!(copy, block);
}

fn header(bits: ClusterBits, snapshots: u8) -> Header {
    let options = CreateOptions { cluster_bits: bits, ..CreateOptions::new(1 << 20) };
    let header = new_image(&options).expect("an ordinary image").header;
    Header { snapshot_count: snapshots.into(), snapshots_offset: HostOffset::new(1 << 30), ..header }
}

fn bitmaps(data: &[u8], header: &Header) {
    let Some((extension, directory)) = data.split_at_checked(24) else { return };
    let Ok(extension) = BitmapsExtension::parse(extension, 0, header, FILE_LEN) else { return };
    if let Ok(found) = extension.parse_directory(directory, header, FILE_LEN) {
        assert_eq!(found.len(), extension.count as usize);
        assert!(extension.directory_len <= directory.len() as u64);
    }
}
