//! Refcount table and blocks of an image whose clusters are known beforehand.

use vmstrata_types::{ClusterBits, HostOffset};

use crate::geometry::ENTRY_LEN;
use crate::refcount::{RefcountOrder, encode_table_entry};

/// Refcount table and blocks: one run of clusters, the table first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Refcounts {
    /// Width of a refcount.
    pub order: RefcountOrder,
    /// First cluster.
    pub first: u64,
    /// Clusters of the table.
    pub table: u64,
    /// Blocks.
    pub blocks: u64,
}

impl Refcounts {
    /// As many as count themselves, which begin at cluster `first`, and `others` clusters.
    pub fn for_clusters(bits: ClusterBits, order: RefcountOrder, first: u64, others: u64) -> Self {
        let per_block = order.entries_per_block(bits) as u64;
        let mut found = Self { order, first, table: 1, blocks: 1 };
        loop {
            let blocks = (others + found.clusters()).div_ceil(per_block);
            let table = (blocks * ENTRY_LEN).div_ceil(bits.size());
            if (table, blocks) == (found.table, found.blocks) {
                return found;
            }
            (found.table, found.blocks) = (table, blocks);
        }
    }

    /// Clusters of table and blocks.
    pub fn clusters(&self) -> u64 {
        self.table + self.blocks
    }

    /// Where the table begins.
    pub fn table_at(&self, bits: ClusterBits) -> HostOffset {
        HostOffset::new(self.first << bits.get())
    }

    /// Table and blocks, cluster by cluster; `count` gives the refcount of each cluster of the file.
    ///
    /// # Panics
    /// When a refcount is too large for its width.
    pub fn bytes(&self, bits: ClusterBits, count: impl Fn(u64) -> u64) -> impl Iterator<Item = Vec<u8>> {
        let Self { order, first, table, blocks } = *self;
        let per_cluster = bits.size() / ENTRY_LEN;
        let tables = (0..table).map(move |cluster| {
            let entries = cluster * per_cluster..((cluster + 1) * per_cluster).min(blocks);
            let mut bytes = Vec::with_capacity(bits.size() as usize);
            for block in entries {
                let at = HostOffset::new((first + table + block) << bits.get());
                bytes.extend(encode_table_entry(Some(at), bits).to_be_bytes());
            }
            bytes.resize(bits.size() as usize, 0);
            bytes
        });
        let per_block = order.entries_per_block(bits);
        let blocks = (0..blocks).map(move |block| {
            let mut bytes = vec![0; bits.size() as usize];
            for index in 0..per_block {
                let counted = count(block * per_block as u64 + index as u64);
                order.set(&mut bytes, index, counted).expect("a refcount within its width");
            }
            bytes
        });
        tables.chain(blocks)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refcounts_count_themselves() {
        let bits = ClusterBits::new(12).expect("a cluster size");
        for others in [1, 2045, 2046, 2047, 1 << 20, 1 << 24] {
            let found = Refcounts::for_clusters(bits, RefcountOrder::DEFAULT, 1, others);
            assert!(found.blocks * 2048 >= others + found.clusters(), "{others}: {found:?}");
            assert!(found.table * 512 >= found.blocks, "{others}: {found:?}");
            assert!((found.blocks - 1) * 2048 < others + found.clusters(), "{others}: none too many");
        }
    }
}
