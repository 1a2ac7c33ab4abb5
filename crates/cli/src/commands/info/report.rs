//! The report of `info` as data: the fields of `qemu-img info --output=json` where they mean the same, and the chain.

use serde::Serialize;
use vmstrata_disk::{Format, LayerHead};
use vmstrata_qcow2::bitmap::{Bitmap, BitmapFlags};
use vmstrata_qcow2::header::Header;
use vmstrata_qcow2::snapshot::Snapshot;
use vmstrata_qcow2::{Compatible, CompressionType, Incompatible};
use vmstrata_types::path_to_text;

/// An image and its chain.
#[derive(Debug, Serialize)]
pub struct Report {
    /// The active layer.
    #[serde(flatten)]
    pub active: Layer,
    /// All layers together.
    pub chain: Chain,
    /// Every layer, active first, where asked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub layers: Option<Vec<Layer>>,
    /// The base, when it is another layer than the active one; for the text only.
    #[serde(skip)]
    pub base: Option<Layer>,
}

/// What the layers sum up to.
#[derive(Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct Chain {
    /// How many there are.
    pub layers: usize,
    /// Bytes that all files take on the host.
    pub actual_size: u64,
    /// The distinct cluster sizes, ascending.
    pub cluster_sizes: Vec<u64>,
}

/// One layer.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct Layer {
    /// Its number, counted from the base, where that is known.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub layer: Option<usize>,
    /// Its file.
    pub filename: String,
    /// raw or qcow2.
    pub format: &'static str,
    /// Bytes the guest sees.
    pub virtual_size: u64,
    /// Bytes the file takes on the host.
    pub actual_size: u64,
    /// Bytes per cluster; a raw file has none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cluster_size: Option<u64>,
    /// Whether refcounts are to be rebuilt before writing.
    pub dirty_flag: bool,
    /// The backing file's name as stored.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub backing_filename: Option<String>,
    /// Where that is.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub full_backing_filename: Option<String>,
    /// The backing file's format as stored.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub backing_filename_format: Option<String>,
    /// Internal snapshots.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub snapshots: Vec<SnapshotInfo>,
    /// What only qcow2 has.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub format_specific: Option<FormatSpecific>,
}

/// An internal snapshot.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct SnapshotInfo {
    /// Unique in the image.
    pub id: String,
    /// What the user called it.
    pub name: String,
    /// Bytes of memory saved with it.
    pub vm_state_size: u64,
    /// When it was made, in seconds since 1970.
    pub date_sec: u32,
    /// The rest of that time.
    pub date_nsec: u32,
    /// For how long the guest had run then.
    pub vm_clock_sec: u64,
    /// The rest of that time.
    pub vm_clock_nsec: u64,
    /// Instructions that the guest had run then, where QEMU counted them.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub icount: Option<u64>,
    /// Bytes of the disk then.
    pub disk_size: u64,
}

/// Wrapper that qemu-img puts around the details of a format.
#[derive(Clone, Debug, Serialize)]
pub struct FormatSpecific {
    /// Always qcow2.
    #[serde(rename = "type")]
    pub kind: &'static str,
    /// The details.
    pub data: Features,
}

/// The features of a qcow2 header.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct Features {
    /// 0.10 for version 2, 1.1 for version 3.
    pub compat: &'static str,
    /// How compressed clusters are compressed.
    pub compression_type: &'static str,
    /// Whether refcounts may be updated late; version 2 cannot say.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub lazy_refcounts: Option<bool>,
    /// Bits per reference count.
    pub refcount_bits: u32,
    /// Whether the image is marked corrupt; version 2 cannot say.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub corrupt: Option<bool>,
    /// Whether L2 entries have subclusters; version 2 cannot say.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub extended_l2: Option<bool>,
    /// Persistent bitmaps.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub bitmaps: Vec<BitmapInfo>,
}

/// A persistent bitmap.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct BitmapInfo {
    /// `in-use` (not to be trusted), `auto` (follows writes).
    pub flags: Vec<&'static str>,
    /// Its name.
    pub name: String,
    /// Bytes of the disk for each bit.
    pub granularity: u64,
}

impl Report {
    /// The report on `chain`, which is base first and not empty; `list` asks for every layer.
    pub fn new(chain: &[LayerHead], list: bool) -> Self {
        let (active, below) = chain.split_last().expect("a chain has an active layer");
        let layers =
            list.then(|| chain.iter().enumerate().rev().map(|(at, head)| Layer::new(at, head)).collect());
        Self {
            active: Layer::new(below.len(), active),
            chain: Chain::new(chain),
            layers,
            base: below.first().map(|base| Layer::new(0, base)),
        }
    }
}

impl Chain {
    fn new(chain: &[LayerHead]) -> Self {
        let headers = chain.iter().filter_map(|head| head.header.as_ref());
        let mut cluster_sizes: Vec<u64> = headers.map(|header| header.cluster_bits.size()).collect();
        cluster_sizes.sort_unstable();
        cluster_sizes.dedup();
        Self {
            layers: chain.len(),
            actual_size: chain.iter().map(|head| head.allocated_bytes).sum(),
            cluster_sizes,
        }
    }
}

impl Layer {
    /// The only layer of its chain, as far as was looked.
    pub fn of_alone(head: &LayerHead) -> Self {
        Self { layer: None, ..Self::new(0, head) }
    }

    fn new(layer: usize, head: &LayerHead) -> Self {
        let header = head.header.as_ref();
        let dirty = header.is_some_and(|header| header.incompatible.contains(Incompatible::DIRTY));
        Self {
            layer: Some(layer),
            filename: path_to_text(&head.path),
            format: match head.format {
                Format::Raw => "raw",
                Format::Qcow2 => "qcow2",
            },
            virtual_size: head.virtual_size,
            actual_size: head.allocated_bytes,
            cluster_size: header.map(|header| header.cluster_bits.size()),
            dirty_flag: dirty,
            backing_filename: head.backing_name.as_ref().map(|name| name.to_string_lossy().into_owned()),
            full_backing_filename: head.backing_path.as_deref().map(path_to_text),
            backing_filename_format: head.backing_format.clone(),
            snapshots: head.snapshots.iter().map(SnapshotInfo::new).collect(),
            format_specific: header
                .map(|header| FormatSpecific { kind: "qcow2", data: Features::new(header, &head.bitmaps) }),
        }
    }
}

impl SnapshotInfo {
    fn new(snapshot: &Snapshot) -> Self {
        Self {
            id: snapshot.id.clone(),
            name: snapshot.name.clone(),
            vm_state_size: snapshot.vm_state_size,
            date_sec: snapshot.date_sec,
            date_nsec: snapshot.date_nsec,
            vm_clock_sec: snapshot.vm_clock_ns / 1_000_000_000,
            vm_clock_nsec: snapshot.vm_clock_ns % 1_000_000_000,
            icount: snapshot.icount,
            disk_size: snapshot.disk_size,
        }
    }
}

impl Features {
    fn new(header: &Header, bitmaps: &[Bitmap]) -> Self {
        let in_version_3 = |value: bool| (header.version >= 3).then_some(value);
        Self {
            compat: if header.version >= 3 { "1.1" } else { "0.10" },
            compression_type: match header.compression_type {
                CompressionType::Zlib => "zlib",
                CompressionType::Zstd => "zstd",
            },
            lazy_refcounts: in_version_3(header.compatible.contains(Compatible::LAZY_REFCOUNTS)),
            refcount_bits: header.refcount_order.width_bits(),
            corrupt: in_version_3(header.incompatible.contains(Incompatible::CORRUPT)),
            extended_l2: in_version_3(header.incompatible.contains(Incompatible::EXTENDED_L2)),
            bitmaps: bitmaps.iter().map(BitmapInfo::new).collect(),
        }
    }
}

impl BitmapInfo {
    fn new(bitmap: &Bitmap) -> Self {
        let named = [(BitmapFlags::IN_USE, "in-use"), (BitmapFlags::AUTO, "auto")];
        let flags = named.into_iter().filter(|(flag, _)| bitmap.flags.contains(*flag));
        Self {
            flags: flags.map(|(_, name)| name).collect(),
            name: bitmap.name.clone(),
            granularity: 1 << bitmap.granularity_bits,
        }
    }
}
