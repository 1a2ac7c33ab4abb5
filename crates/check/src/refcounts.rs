//! The refcounts as the image has them: the refcount table and which clusters its blocks say "one" of.
//!
//! Place in the data flow: loaded first, because the copied flags of table entries are checked against it while
//! the entries are counted. The blocks themselves are read a second time by [`super::compare`]; keeping a bit per
//! cluster instead of a refcount bounds memory to the file's own refcount blocks divided by their width.

use std::collections::BTreeMap;
use std::sync::Arc;

use vmstrata_qcow2::entry::EntryError;
use vmstrata_qcow2::refcount::{self, TABLE_RESERVED};
use vmstrata_types::{ClusterBits, HostOffset};

use crate::Phase;
use crate::error::{IoContext as _, Result};
use crate::image::Image;
use crate::read::for_each_cluster;
use vmstrata_qcow2::entry::words;

/// What the image says of its refcounts.
#[derive(Debug)]
pub(crate) struct DiskRefcounts {
    /// Raw entries of the refcount table, without the zeros at its end.
    pub(crate) table: Vec<u64>,
    /// Base-2 logarithm of the clusters a block covers.
    pub(crate) block_bits: u32,
    /// `[block][cluster]`: refcount is one. `None` where there is no block, or none of its refcounts is one.
    ones: Vec<Option<Arc<[u64]>>>,
}

/// Where the block of a table entry lies, reserved bits or not; `None` without one, or when it is off a cluster
/// boundary and so of no use.
pub(crate) fn block_of(raw: u64, bits: ClusterBits) -> Option<HostOffset> {
    let offset = HostOffset::new(raw & !TABLE_RESERVED);
    (offset != HostOffset::ZERO && offset.is_aligned(bits)).then_some(offset)
}

impl DiskRefcounts {
    /// Reads the table and all blocks.
    ///
    /// # Errors
    /// Whatever the store reports.
    pub(crate) fn load(image: &Image<'_>) -> Result<Self> {
        let header = &image.header;
        let at = header.refcount_table_offset;
        let mut bytes = vec![0; header.refcount_table_entries() * 8];
        image
            .store
            .read_padded(&mut bytes, at)
            .while_trying("read the refcount table")
            .map_err(|e| e.at(at))?;
        let mut table: Vec<u64> = words(&bytes).collect();
        let used = table.iter().rposition(|&raw| raw != 0).map_or(0, |last| last + 1);
        table.truncate(used);
        let block_bits = header.refcount_order.entries_per_block_bits(image.bits());
        let mut disk = Self { table, block_bits, ones: vec![None; used] };
        disk.load_ones(image)?;
        Ok(disk)
    }

    fn load_ones(&mut self, image: &Image<'_>) -> Result<()> {
        let blocks = self.blocks_below(image, self.table.len());
        let offsets: Vec<u64> = blocks.keys().copied().collect();
        let order = image.header.refcount_order;
        let entries = 1usize << self.block_bits;
        let loaded =
            for_each_cluster(image, Phase::Refcounts, &offsets, Vec::new, |found, number, block| {
                if block.iter().all(|&byte| byte == 0) {
                    return;
                }
                let mut ones = vec![0u64; entries.div_ceil(64)];
                (0..entries).filter(|&index| order.get(block, index) == 1).for_each(|index| {
                    ones[index / 64] |= 1 << (index % 64);
                });
                found.push((offsets[number], Arc::<[u64]>::from(ones)));
            })?;
        for (offset, ones) in loaded.into_iter().flatten() {
            for &index in &blocks[&offset] {
                self.ones[index] = Some(Arc::clone(&ones));
            }
        }
        Ok(())
    }

    /// The distinct blocks in the file that the first `entries` table entries lead to, and by which entries.
    pub(crate) fn blocks_below(&self, image: &Image<'_>, entries: usize) -> BTreeMap<u64, Vec<usize>> {
        let mut blocks: BTreeMap<u64, Vec<usize>> = BTreeMap::new();
        for (index, &raw) in self.table.iter().take(entries).enumerate() {
            if let Some(block) = block_of(raw, image.bits()).filter(|block| block.get() < image.file_len) {
                blocks.entry(block.get()).or_default().push(index);
            }
        }
        blocks
    }

    /// Whether the image says that `cluster` has a refcount of one.
    pub(crate) fn is_one(&self, cluster: u64) -> bool {
        let block = usize::try_from(cluster >> self.block_bits).unwrap_or(usize::MAX);
        let within = (cluster & ((1 << self.block_bits) - 1)) as usize;
        self.ones
            .get(block)
            .and_then(Option::as_ref)
            .is_some_and(|ones| ones[within / 64] >> (within % 64) & 1 == 1)
    }

    /// What is wrong with the table entry at `index` by itself.
    pub(crate) fn entry_error(&self, index: usize, bits: ClusterBits) -> Option<EntryError> {
        refcount::decode_table_entry(self.table[index], bits).err()
    }
}
