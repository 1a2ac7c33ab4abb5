//! A small image with everything in it, to be broken in one place at a time.
//!
//! Clusters of 4 KiB: header, refcount table, refcount block, L1 table, snapshot table, the snapshot's L1
//! table, bitmap directory, bitmap table. The header has a backing file, every extension that matters, and one
//! that nobody knows.

use vmstrata_qcow2::bitmap::{Bitmap, BitmapsExtension};
use vmstrata_qcow2::create::{CreateOptions, NewBacking, new_image};
use vmstrata_qcow2::extension::{Extension, FeatureKind, FeatureNames};
use vmstrata_qcow2::header::field;
use vmstrata_qcow2::snapshot::{self, Snapshot};
use vmstrata_qcow2::{Extensions, Header, ParseError};
use vmstrata_types::{ClusterBits, HostOffset};

pub(crate) const CLUSTER: u64 = 4096;
pub(crate) const SNAPSHOTS: u64 = 4 * CLUSTER;
pub(crate) const SNAPSHOT_L1: u64 = 5 * CLUSTER;
pub(crate) const DIRECTORY: u64 = 6 * CLUSTER;
pub(crate) const BITMAP_TABLE: u64 = 7 * CLUSTER;
pub(crate) const FILE_LEN: u64 = 8 * CLUSTER;
pub(crate) const SIZE: u64 = 4 << 20;

/// First extension of the version 3 image: the backing format. Data 8 bytes later.
pub(crate) const FORMAT: u64 = 112;
/// Second: the feature names (one name).
pub(crate) const NAMES: u64 = FORMAT + 16;
/// Third: bitmaps.
pub(crate) const BITMAPS: u64 = NAMES + 8 + 48;
/// Fourth: unknown to everyone, four bytes.
pub(crate) const UNKNOWN: u64 = BITMAPS + 8 + 24;
/// The end mark.
pub(crate) const END: u64 = UNKNOWN + 16;
/// The backing file's name, `base.qcow2`.
pub(crate) const NAME: u64 = END + 8;

/// A file's bytes.
#[derive(Clone)]
pub(crate) struct File {
    pub(crate) bytes: Vec<u8>,
}

impl File {
    pub(crate) fn put(&mut self, at: u64, bytes: &[u8]) {
        self.bytes[at as usize..][..bytes.len()].copy_from_slice(bytes);
    }

    pub(crate) fn u16(&mut self, at: u64, value: u16) {
        self.put(at, &value.to_be_bytes());
    }

    pub(crate) fn u32(&mut self, at: u64, value: u32) {
        self.put(at, &value.to_be_bytes());
    }

    pub(crate) fn u64(&mut self, at: u64, value: u64) {
        self.put(at, &value.to_be_bytes());
    }

    pub(crate) fn cut(&mut self, len: u64) {
        self.bytes.truncate(len as usize);
    }

    /// What is at `at`, all of it to the end of the file.
    fn from(&self, at: HostOffset) -> &[u8] {
        &self.bytes[at.get() as usize..]
    }
}

/// All that can be parsed of a file.
#[derive(Debug)]
pub(crate) struct Parsed {
    pub(crate) header: Header,
    pub(crate) name: Option<Vec<u8>>,
    pub(crate) extensions: Extensions,
    pub(crate) snapshots: Vec<Snapshot>,
    pub(crate) bitmaps: Vec<Bitmap>,
}

/// Parses everything, in the order the engine does.
pub(crate) fn parse(file: &File) -> Result<Parsed, ParseError> {
    let len = file.bytes.len() as u64;
    let header = Header::parse(&file.bytes, len)?;
    let name = header.backing_name(&file.bytes)?.map(<[u8]>::to_vec);
    let extensions = header.extensions(&file.bytes)?;
    let mut snapshots = Vec::new();
    if header.snapshot_count > 0 {
        snapshots = snapshot::parse_table(file.from(header.snapshots_offset), &header, len)?;
    }
    let mut bitmaps = Vec::new();
    if let Some(data) = extensions.bitmaps() {
        let extension = BitmapsExtension::parse(data, BITMAPS + 8, &header, len)?;
        bitmaps = extension.parse_directory(file.from(extension.directory_offset), &header, len)?;
    }
    Ok(Parsed { header, name, extensions, snapshots, bitmaps })
}

/// A version 3 image with everything in it.
pub(crate) fn version_3() -> File {
    let mut options = CreateOptions::new(SIZE);
    options.cluster_bits = ClusterBits::new(12).unwrap();
    let image = new_image(&options).unwrap();
    let mut file = File { bytes: vec![0; FILE_LEN as usize] };
    for (at, bytes) in &image.parts[..2] {
        file.put(at.get(), bytes);
    }
    let names = FeatureNames::new([(FeatureKind::Incompatible, 40, "time travel")]);
    let mut bitmaps = [0; 24];
    bitmaps[3] = 1;
    bitmaps[8..16].copy_from_slice(&32u64.to_be_bytes());
    bitmaps[16..].copy_from_slice(&DIRECTORY.to_be_bytes());
    let extensions = Extensions {
        items: vec![
            Extension::BackingFormat("qcow2".into()),
            Extension::FeatureNames(names),
            Extension::Bitmaps(bitmaps.to_vec()),
            Extension::Unknown { magic: 0x5354_5241, data: b"mine".to_vec() },
        ],
    };
    file.put(0, &image.header.encode(&extensions, Some(b"base.qcow2")).unwrap());
    file.u64(field::AUTOCLEAR, 1);
    put_refcounts(&mut file);
    put_snapshot(&mut file);
    put_bitmap(&mut file);
    file
}

/// A version 2 image with a backing file.
pub(crate) fn version_2() -> File {
    let mut options = CreateOptions::new(SIZE);
    options.version = 2;
    options.cluster_bits = ClusterBits::new(12).unwrap();
    options.backing = Some(NewBacking { name: b"base.qcow2".to_vec(), format: Some("qcow2".into()) });
    let image = new_image(&options).unwrap();
    let mut file = File { bytes: vec![0; image.file_len as usize] };
    for (at, bytes) in &image.parts {
        file.put(at.get(), bytes);
    }
    file
}

/// Every cluster is used once.
fn put_refcounts(file: &mut File) {
    for cluster in 0..FILE_LEN / CLUSTER {
        file.u16(2 * CLUSTER + 2 * cluster, 1);
    }
}

fn put_snapshot(file: &mut File) {
    file.u32(field::SNAPSHOT_COUNT, 1);
    file.u64(field::SNAPSHOTS_OFFSET, SNAPSHOTS);
    file.u64(SNAPSHOTS, SNAPSHOT_L1);
    file.u32(SNAPSHOTS + 8, 2);
    file.u16(SNAPSHOTS + 12, 1);
    file.u16(SNAPSHOTS + 14, 6);
    file.u32(SNAPSHOTS + 36, 16);
    file.u64(SNAPSHOTS + 48, SIZE);
    file.put(SNAPSHOTS + 56, b"1before");
}

fn put_bitmap(file: &mut File) {
    file.u64(DIRECTORY, BITMAP_TABLE);
    file.u32(DIRECTORY + 8, 1);
    file.u32(DIRECTORY + 12, 2);
    file.put(DIRECTORY + 16, &[1, 16]);
    file.u16(DIRECTORY + 18, 6);
    file.put(DIRECTORY + 24, b"backup");
}
