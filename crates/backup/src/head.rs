//! What every qcow2 file of a backup has: its first cluster and its refcount structures.

use std::ffi::OsString;
use std::os::unix::ffi::OsStrExt as _;

use vmstrata_disk::Result;
use vmstrata_qcow2::create::max_size;
use vmstrata_qcow2::geometry::ENTRY_LEN;
use vmstrata_qcow2::{
    CompressionType, CreateError, CreateOptions, Extensions, NewBacking, RefcountOrder, new_image, refcount,
};
use vmstrata_types::{ClusterBits, HostOffset};

/// Clusters are no smaller than this: tables of smaller ones cost more than they save.
const CLUSTER_MIN: ClusterBits = ClusterBits::new(12).expect("a cluster size");
const REFCOUNTS: RefcountOrder = RefcountOrder::DEFAULT;

/// The image that a backup is.
#[derive(Clone, Debug)]
pub(crate) struct Shape {
    pub(crate) bits: ClusterBits,
    pub(crate) size: u64,
    pub(crate) backing_name: Option<OsString>,
    pub(crate) compression: Option<CompressionType>,
}

/// Where its tables lie.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Places {
    pub(crate) l1: HostOffset,
    pub(crate) refcounts: Refcounts,
}

/// The clusters of a backup of a disk that has these: at least 4 KiB, and large enough to map it.
pub(crate) fn cluster_bits(of_disk: ClusterBits, size: u64) -> ClusterBits {
    let start = of_disk.max(CLUSTER_MIN).get();
    let fits = (start..).map_while(ClusterBits::new).find(|bits| max_size(*bits) >= size);
    fits.unwrap_or(ClusterBits::MAX)
}

/// The whole first cluster.
///
/// # Errors
/// A size or a backing name that the format does not allow.
pub(crate) fn first_cluster(shape: &Shape, places: &Places) -> Result<Vec<u8>> {
    let backing = shape
        .backing_name
        .as_ref()
        .map(|name| NewBacking { name: name.as_bytes().to_vec(), format: Some("qcow2".to_owned()) });
    let image = new_image(&CreateOptions {
        cluster_bits: shape.bits,
        backing,
        compression_type: shape.compression.unwrap_or(CompressionType::Zlib),
        ..CreateOptions::new(shape.size)
    })?;
    let mut header = image.header;
    let (_, bytes) = image.parts.last().expect("the header comes last");
    let end = header.extensions_end().min(bytes.len());
    let extensions = Extensions::parse(bytes, header.header_length as usize, end)?;
    if header.l1_size > 0 {
        header.l1_table_offset = places.l1;
    }
    header.refcount_table_offset = places.refcounts.table_at(shape.bits);
    header.refcount_table_clusters =
        u32::try_from(places.refcounts.table).expect("within the format's limit on file sizes");
    let name = shape.backing_name.as_ref().map(|name| name.as_bytes());
    let mut cluster = header.encode(&extensions, name).map_err(CreateError::from)?;
    cluster.resize(shape.bits.size() as usize, 0);
    Ok(cluster)
}

/// Refcount table and blocks: one run of clusters, the table first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Refcounts {
    /// First cluster.
    pub(crate) first: u64,
    /// Clusters of the table.
    pub(crate) table: u64,
    /// Blocks.
    pub(crate) blocks: u64,
}

impl Refcounts {
    /// As many as count themselves, which begin at cluster `first`, and `others` clusters.
    pub(crate) fn for_clusters(bits: ClusterBits, first: u64, others: u64) -> Self {
        let per_block = REFCOUNTS.entries_per_block(bits) as u64;
        let mut found = Self { first, table: 1, blocks: 1 };
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
    pub(crate) fn clusters(&self) -> u64 {
        self.table + self.blocks
    }

    fn table_at(&self, bits: ClusterBits) -> HostOffset {
        HostOffset::new(self.first << bits.get())
    }

    /// Table and blocks, cluster by cluster; `count` gives the refcount of each cluster of the file.
    pub(crate) fn bytes(
        &self,
        bits: ClusterBits,
        count: impl Fn(u64) -> u64,
    ) -> impl Iterator<Item = Vec<u8>> {
        let Self { first, table, blocks } = *self;
        let per_cluster = bits.size() / ENTRY_LEN;
        let tables = (0..table).map(move |cluster| {
            let entries = cluster * per_cluster..((cluster + 1) * per_cluster).min(blocks);
            let mut bytes = Vec::with_capacity(bits.size() as usize);
            for block in entries {
                let at = HostOffset::new((first + table + block) << bits.get());
                bytes.extend(refcount::encode_table_entry(Some(at), bits).to_be_bytes());
            }
            bytes.resize(bits.size() as usize, 0);
            bytes
        });
        let per_block = REFCOUNTS.entries_per_block(bits);
        let blocks = (0..blocks).map(move |block| {
            let mut bytes = vec![0; bits.size() as usize];
            for index in 0..per_block {
                let counted = count(block * per_block as u64 + index as u64);
                REFCOUNTS
                    .set(&mut bytes, index, counted)
                    .expect("fewer than 65,536 compressed clusters in one");
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
            let found = Refcounts::for_clusters(bits, 1, others);
            assert!(found.blocks * 2048 >= others + found.clusters(), "{others}: {found:?}");
            assert!(found.table * 512 >= found.blocks, "{others}: {found:?}");
            assert!((found.blocks - 1) * 2048 < others + found.clusters(), "{others}: none too many");
        }
    }

    #[test]
    fn clusters_grow_with_the_disk() {
        assert_eq!(cluster_bits(ClusterBits::MIN, 1 << 30).get(), 12);
        assert_eq!(cluster_bits(ClusterBits::DEFAULT, 1 << 30), ClusterBits::DEFAULT);
        assert_eq!(cluster_bits(ClusterBits::MIN, 9 << 40).get(), 13);
    }
}
