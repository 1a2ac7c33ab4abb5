//! The bytes of an empty image, and the first cluster and the refcounts of one whose clusters are known beforehand.
//!
//! Layout of an empty image, in clusters: header, refcount table, refcount blocks, L1 table. Refcount blocks cover exactly what
//! is there, themselves included; every cluster has refcount 1. Everything the image does not list as a part
//! is zero, so the L1 table (up to 32 MiB) costs nothing but the file's length.

mod header;
mod refcounts;
#[cfg(test)]
mod tests;

use thiserror::Error;
use vmstrata_types::{ClusterBits, HostOffset};

use self::header::encode_header;
pub use self::refcounts::Refcounts;
use crate::extension::MAX_BACKING_FORMAT_LEN;
use crate::feature::{Autoclear, Compatible, CompressionType, Incompatible};
use crate::geometry::{ENTRY_LEN, Geometry, MIN_EXTENDED};
use crate::header::{EncodeError, Header, MAX_L1_ENTRIES, V2_LEN, V3_LEN, field};
use crate::refcount::RefcountOrder;
use crate::snapshot_info::{LayerRecord, SnapshotInfoError};

/// The smallest clusters in which stock tools name features.
const MIN_NAMED: ClusterBits = ClusterBits::from_size(8192).expect("a power of two");

/// What a new image is to be.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CreateOptions {
    /// 2 or 3.
    pub version: u32,
    /// Size of a cluster.
    pub cluster_bits: ClusterBits,
    /// Extended L2 entries: version 3 and clusters of 16 KiB or more only.
    pub subclusters: bool,
    /// Size of the disk in bytes.
    pub size: u64,
    /// Width of refcounts; version 2 has only 16 bits.
    pub refcount_order: RefcountOrder,
    /// The backing file, if any.
    pub backing: Option<NewBacking>,
    /// Allow refcount updates to be postponed; version 3 only.
    pub lazy_refcounts: bool,
    /// How compressed clusters will be compressed; version 2 has only zlib.
    pub compression_type: CompressionType,
    /// Name feature bits in the image for older tools; only in version 3 and in clusters of 8 KiB or more,
    /// which have room for it and for whatever else may come.
    pub feature_names: bool,
    /// Leave room in the header for a link to an index ([`crate::index::IndexLink`]), so that one can be added by
    /// writing a single sector; only in version 3, and where header and name leave that much of the first cluster.
    pub index_room: bool,
    /// What to say of the backing file: which snapshot it is, or whose.
    pub record: Option<LayerRecord>,
}

impl CreateOptions {
    /// An empty disk of `size` bytes as every tool makes it: version 3, 64 KiB clusters, 16-bit refcounts.
    pub fn new(size: u64) -> Self {
        Self {
            version: 3,
            cluster_bits: ClusterBits::DEFAULT,
            subclusters: false,
            size,
            refcount_order: RefcountOrder::DEFAULT,
            backing: None,
            lazy_refcounts: false,
            compression_type: CompressionType::Zlib,
            feature_names: true,
            index_room: false,
            record: None,
        }
    }
}

impl CreateOptions {
    /// The shape of its tables.
    fn geometry(&self) -> Geometry {
        if self.subclusters {
            Geometry::extended(self.cluster_bits)
        } else {
            Geometry::new(self.cluster_bits)
        }
    }
}

/// A backing file for a new image.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NewBacking {
    /// Name as it will be stored: absolute, or relative to the new image's directory.
    pub name: Vec<u8>,
    /// Format, so that no one has to guess it from the (guest-controlled) content.
    pub format: Option<String>,
}

/// Why an image cannot be made as asked.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum CreateError {
    /// Neither 2 nor 3.
    #[error("there is no qcow2 version {0}")]
    Version(u32),
    /// Version 2 has no such feature.
    #[error("version 2 images cannot have {feature}")]
    NeedsVersion3 {
        /// The feature, in words.
        feature: &'static str,
    },
    /// A subcluster has a sector at least.
    #[error("clusters of {cluster_size} bytes are too small for subclusters: {} bytes is the least", MIN_EXTENDED.size())]
    TooSmallForSubclusters {
        /// Bytes of a cluster.
        cluster_size: u64,
    },
    /// The L1 table would be larger than anyone reads.
    #[error("a disk of {size} bytes is too large for {cluster_size}-byte clusters, which reach {max} bytes")]
    TooLarge {
        /// Bytes asked for.
        size: u64,
        /// Bytes of a cluster.
        cluster_size: u64,
        /// The most bytes this cluster size reaches.
        max: u64,
    },
    /// Stock tools refuse longer ones.
    #[error("{0:?} is no backing format name: 1 to {MAX_BACKING_FORMAT_LEN} bytes, none of them zero")]
    BackingFormat(String),
    /// A part of a snapshot's record that cannot be stored.
    #[error(transparent)]
    Snapshot(#[from] SnapshotInfoError),
    /// The header does not fit.
    #[error(transparent)]
    Header(#[from] EncodeError),
}

/// An empty image, ready to be written.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NewImage {
    /// Its header.
    pub header: Header,
    /// Bytes to write and where, each starting on a cluster boundary: the header last, so that a file cut off
    /// in the making is no qcow2 image. All other bytes of the file are zero.
    pub parts: Vec<(HostOffset, Vec<u8>)>,
    /// Length of the file in bytes.
    pub file_len: u64,
}

/// What of refcounts is written at once: a block of most file systems.
const COUNTS_PIECE: usize = 4096;

/// Lays out an empty image.
///
/// # Errors
/// Options that the format or QEMU's limits do not allow.
pub fn new_image(options: &CreateOptions) -> Result<NewImage, CreateError> {
    check(options)?;
    let bits = options.cluster_bits;
    let l1 = (options.geometry().l1_entries(options.size) * ENTRY_LEN).div_ceil(bits.size());
    let refcounts = Refcounts::for_clusters(bits, options.refcount_order, 1, 1 + l1);
    let end = 1 + refcounts.clusters() + l1;
    let at = |cluster: u64| HostOffset::new(cluster << bits.get());
    let mut header = header(options, &Places { l1: at(end - l1), refcounts });
    let first_cluster = encode_header(&mut header, options)?;
    let clusters: Vec<Vec<u8>> = refcounts.bytes(bits, |cluster| u64::from(cluster < end)).collect();
    let (table, blocks) = clusters.split_at(refcounts.table as usize);
    let parts = vec![
        (at(refcounts.first), without_tail(table.concat())),
        (at(refcounts.first + refcounts.table), without_tail(blocks.concat())),
        (HostOffset::ZERO, first_cluster),
    ];
    Ok(NewImage { header, parts, file_len: at(end).get() })
}

/// What is beyond takes no space: it counts clusters that the file does not have yet.
fn without_tail(mut counts: Vec<u8>) -> Vec<u8> {
    let used = counts.iter().rposition(|byte| *byte != 0).map_or(0, |last| last + 1);
    counts.truncate(used.next_multiple_of(COUNTS_PIECE));
    counts
}

fn check(options: &CreateOptions) -> Result<(), CreateError> {
    if !(2..=3).contains(&options.version) {
        return Err(CreateError::Version(options.version));
    }
    if options.version == 2 {
        let feature = if options.refcount_order != RefcountOrder::DEFAULT {
            Some("refcounts of other than 16 bits")
        } else if options.lazy_refcounts {
            Some("lazy refcounts")
        } else if options.compression_type != CompressionType::Zlib {
            Some("a compression type other than zlib")
        } else if options.subclusters {
            Some("subclusters")
        } else {
            None
        };
        if let Some(feature) = feature {
            return Err(CreateError::NeedsVersion3 { feature });
        }
    }
    if options.subclusters && options.cluster_bits < MIN_EXTENDED {
        return Err(CreateError::TooSmallForSubclusters { cluster_size: options.cluster_bits.size() });
    }
    let max = options.geometry().l2_span() * u64::from(MAX_L1_ENTRIES);
    if options.size > max {
        let (size, cluster_size) = (options.size, options.cluster_bits.size());
        return Err(CreateError::TooLarge { size, cluster_size, max });
    }
    let format = options.backing.as_ref().and_then(|backing| backing.format.as_ref());
    let unusable =
        |name: &&String| !(1..=MAX_BACKING_FORMAT_LEN).contains(&name.len()) || name.contains('\0');
    format.filter(unusable).map_or(Ok(()), |name| Err(CreateError::BackingFormat(name.clone())))
}

/// The largest disk, in bytes, that clusters of this size can map: 128 GiB for 512 B, 2 EiB for 2 MiB.
pub const fn max_size(cluster_bits: ClusterBits) -> u64 {
    Geometry::new(cluster_bits).l2_span() * MAX_L1_ENTRIES as u64
}

/// Where the tables of an image lie.
#[derive(Clone, Copy, Debug)]
pub struct Places {
    /// The L1 table, which an image without L1 entries does not have.
    pub l1: HostOffset,
    /// Refcount table and blocks.
    pub refcounts: Refcounts,
}

/// The whole first cluster of an image whose tables lie at these places; the image's writer says what is in them.
///
/// # Errors
/// As [`new_image`].
pub fn first_cluster(options: &CreateOptions, places: &Places) -> Result<Vec<u8>, CreateError> {
    check(options)?;
    let mut cluster = encode_header(&mut header(options, places), options)?;
    cluster.resize(options.cluster_bits.size() as usize, 0);
    Ok(cluster)
}

fn header(options: &CreateOptions, places: &Places) -> Header {
    let header_length = if options.version == 2 { V2_LEN } else { V3_LEN };
    let zstd = options.compression_type != CompressionType::Zlib;
    let l1_size = options.geometry().l1_entries(options.size) as u32;
    let mut incompatible = if zstd { Incompatible::COMPRESSION_TYPE } else { Incompatible::empty() };
    incompatible.set(Incompatible::EXTENDED_L2, options.subclusters);
    Header {
        version: options.version,
        backing_file: None,
        cluster_bits: options.cluster_bits,
        size: options.size,
        crypt_method: 0,
        l1_size,
        l1_table_offset: if l1_size == 0 { HostOffset::ZERO } else { places.l1 },
        refcount_table_offset: places.refcounts.table_at(options.cluster_bits),
        refcount_table_clusters: u32::try_from(places.refcounts.table)
            .expect("within the format's limit on file sizes"),
        snapshot_count: 0,
        snapshots_offset: HostOffset::ZERO,
        incompatible,
        compatible: if options.lazy_refcounts { Compatible::LAZY_REFCOUNTS } else { Compatible::empty() },
        autoclear: Autoclear::empty(),
        refcount_order: options.refcount_order,
        header_length,
        compression_type: options.compression_type,
        additional: vec![0; u64::from(header_length).saturating_sub(field::ADDITIONAL) as usize],
    }
}
