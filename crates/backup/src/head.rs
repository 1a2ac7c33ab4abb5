//! What every qcow2 file that is written whole has: its first cluster and its refcount structures.

use std::ffi::OsString;
use std::os::unix::ffi::OsStrExt as _;

use vmstrata_disk::Result;
use vmstrata_qcow2::create::{self, Places, Refcounts, max_size};
use vmstrata_qcow2::{CompressionType, CreateOptions, EntryFormat, Geometry, NewBacking, RefcountOrder};
use vmstrata_types::{ClusterBits, HostOffset};

/// Clusters are no smaller than this: tables of smaller ones cost more than they save.
const CLUSTER_MIN: ClusterBits = ClusterBits::new(12).expect("a cluster size");
pub(crate) const REFCOUNTS: RefcountOrder = RefcountOrder::DEFAULT;

/// The image that is written.
#[derive(Clone, Debug)]
pub(crate) struct Shape {
    pub(crate) bits: ClusterBits,
    pub(crate) subclusters: bool,
    pub(crate) size: u64,
    pub(crate) backing: Option<NewBacking>,
    pub(crate) compression: Option<CompressionType>,
    /// As [`CreateOptions::index_room`].
    pub(crate) index_room: bool,
}

impl Shape {
    /// Of a backup, on top of another one if that has a name.
    pub(crate) fn of_backup(
        bits: ClusterBits,
        size: u64,
        backing_name: Option<&OsString>,
        compression: Option<CompressionType>,
    ) -> Self {
        let backing = backing_name
            .map(|name| NewBacking { name: name.as_bytes().to_vec(), format: Some("qcow2".to_owned()) });
        Self { bits, subclusters: false, size, backing, compression, index_room: false }
    }

    pub(crate) fn geometry(&self) -> Geometry {
        if self.subclusters { Geometry::extended(self.bits) } else { Geometry::new(self.bits) }
    }

    pub(crate) fn entries(&self) -> EntryFormat {
        if self.subclusters { EntryFormat::extended(self.bits) } else { EntryFormat::new(3, self.bits) }
    }
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
    let options = CreateOptions {
        cluster_bits: shape.bits,
        subclusters: shape.subclusters,
        backing: shape.backing.clone(),
        compression_type: shape.compression.unwrap_or(CompressionType::Zlib),
        index_room: shape.index_room,
        ..CreateOptions::new(shape.size)
    };
    Ok(create::first_cluster(&options, places)?)
}

/// Refuses a shape that the format does not allow.
///
/// # Errors
/// That.
pub(crate) fn check(shape: &Shape) -> Result<()> {
    let places = Places { l1: HostOffset::new(shape.bits.size()), refcounts: refcounts(shape.bits, 2, 2) };
    first_cluster(shape, &places).map(drop)
}

/// As [`Refcounts::for_clusters`].
pub(crate) fn refcounts(bits: ClusterBits, first: u64, others: u64) -> Refcounts {
    Refcounts::for_clusters(bits, REFCOUNTS, first, others)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clusters_grow_with_the_disk() {
        assert_eq!(cluster_bits(ClusterBits::MIN, 1 << 30).get(), 12);
        assert_eq!(cluster_bits(ClusterBits::DEFAULT, 1 << 30), ClusterBits::DEFAULT);
        assert_eq!(cluster_bits(ClusterBits::MIN, 9 << 40).get(), 13);
    }
}
