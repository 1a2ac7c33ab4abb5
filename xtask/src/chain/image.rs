//! Writes one qcow2 file in one pass: data first, the tables that lead to it last.
//!
//! The layout is what `qemu-img` makes plus the clusters a guest would have written: header, refcount table,
//! refcount blocks, L1 table, then L2 tables and data, all of refcount 1, each table allocated in full.
//! Version 3, 16-bit refcounts, no internal snapshots. Source: qcow2.txt, sections "Header", "Cluster
//! mapping" and "Host cluster management".

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use flate2::{Compress, Compression, FlushCompress, Status};

use super::batch::Batch;

const MAGIC: &[u8; 4] = b"QFI\xfb";
const HEADER_LEN: u32 = 104;
const EXTENSION_BACKING_FORMAT: u32 = 0xe279_2aca;
const REFCOUNT_ORDER_16: u32 = 4;
/// QCOW_OFLAG_COPIED: the cluster's refcount is exactly one.
const COPIED: u64 = 1 << 63;
const COMPRESSED: u64 = 1 << 62;

/// What a layer lies on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Backing {
    /// The name as it stands in the header, relative to the file's own directory or absolute.
    pub name: String,
    /// `qcow2` or `raw`, or nothing: readers then probe.
    pub format: Option<&'static str>,
}

/// The shape of a file that is to be written.
#[derive(Clone, Debug)]
pub struct Shape {
    /// Bytes of the disk.
    pub size: u64,
    /// Bytes of a cluster, a power of two from 512 to 2 MiB.
    pub cluster_size: u64,
    /// The layer below.
    pub backing: Option<Backing>,
}

/// One cluster's content.
pub trait Content: Sync {
    /// Fills `buf`, one cluster long, with what the layer holds for `cluster`.
    ///
    /// # Errors
    /// When the content cannot be produced, for example read.
    fn fill(&self, cluster: u64, buf: &mut [u8]) -> Result<()>;

    /// Whether this cluster is to be stored compressed, if that makes it smaller.
    fn compress(&self, _cluster: u64) -> bool {
        false
    }
}

/// Content of an overlay that holds nothing.
pub struct Empty;

impl Content for Empty {
    fn fill(&self, _cluster: u64, _buf: &mut [u8]) -> Result<()> {
        Ok(())
    }
}

/// Writes the file at `path`, replacing it, with `clusters` (ascending) filled from `content`.
///
/// # Errors
/// When the shape is not possible in qcow2, or writing fails.
pub fn write(path: &Path, shape: &Shape, clusters: &[u64], content: &dyn Content) -> Result<()> {
    let mut image = Image::new(path, shape, clusters)?;
    image.write_data(clusters, content)?;
    image.write_tables()?;
    image.write_header(shape).with_context(|| format!("header of {}", path.display()))
}

struct Image {
    file: File,
    size: u64,
    cluster_size: u64,
    refcount_table_clusters: u64,
    refcount_blocks: u64,
    l1: Vec<u64>,
    l1_clusters: u64,
    /// Tables in use, by their place in `l1`, with their entries.
    l2: Vec<(usize, Vec<u64>)>,
    /// Host cluster index where data starts.
    data_start: u64,
    refcounts: Vec<u16>,
}

impl Image {
    fn new(path: &Path, shape: &Shape, clusters: &[u64]) -> Result<Self> {
        let size = shape.cluster_size;
        ensure!(size.is_power_of_two() && (512..=2 << 20).contains(&size), "no qcow2 cluster size: {size}");
        ensure!(clusters.is_sorted(), "clusters are written in ascending order");
        let entries = size / 8;
        let l1_len = shape.size.div_ceil(size * entries).max(1) as usize;
        ensure!(l1_len * 8 <= 32 << 20, "the L1 table of {} bytes would pass 32 MiB", shape.size);
        let mut l2: Vec<(usize, Vec<u64>)> = Vec::new();
        for cluster in clusters {
            let table = (cluster / entries) as usize;
            if l2.last().is_none_or(|(last, _)| *last != table) {
                l2.push((table, vec![0; entries as usize]));
            }
        }
        let l1_clusters = (l1_len as u64 * 8).div_ceil(size);
        let payload = 1 + l1_clusters + l2.len() as u64 + clusters.len() as u64;
        let (refcount_table_clusters, refcount_blocks) = refcount_clusters(payload, size);
        let data_start = 1 + refcount_table_clusters + refcount_blocks + l1_clusters + l2.len() as u64;
        let file = File::create(path).with_context(|| format!("cannot create {}", path.display()))?;
        Ok(Self {
            file,
            size: shape.size,
            cluster_size: size,
            refcount_table_clusters,
            refcount_blocks,
            l1: vec![0; l1_len],
            l1_clusters,
            l2,
            data_start,
            refcounts: vec![1; data_start as usize],
        })
    }

    fn l1_start(&self) -> u64 {
        1 + self.refcount_table_clusters + self.refcount_blocks
    }

    /// Plain clusters come first, each on its own host cluster; compressed ones follow, packed.
    fn write_data(&mut self, clusters: &[u64], content: &dyn Content) -> Result<()> {
        let mut entries = Vec::with_capacity(clusters.len());
        let mut batch = Batch::new(self.file.try_clone()?, self.data_start * self.cluster_size);
        let mut packed = Vec::new();
        for &cluster in clusters {
            let buf = batch.reserve(self.cluster_size as usize)?;
            content.fill(cluster, buf)?;
            let end = self.size - cluster * self.cluster_size;
            if end < self.cluster_size {
                buf[end as usize..].fill(0);
            }
            match content.compress(cluster).then(|| deflate(buf)).flatten() {
                Some(deflated) => {
                    batch.take_back(self.cluster_size as usize);
                    packed.push((cluster, deflated));
                }
                None => {
                    entries.push((cluster, COPIED | (batch.end() - self.cluster_size)));
                    self.refcounts.push(1);
                }
            }
        }
        for (cluster, deflated) in packed {
            entries.push((cluster, self.compressed_descriptor(batch.end(), deflated.len() as u64)));
            batch.reserve(deflated.len())?.copy_from_slice(&deflated);
        }
        let end = batch.finish()?.next_multiple_of(self.cluster_size);
        self.file.set_len(end)?;
        entries.sort_unstable();
        self.map(&entries);
        Ok(())
    }

    /// qcow2.txt "Compressed Clusters Descriptor": host offset below bit x, then additional 512-byte sectors.
    fn compressed_descriptor(&mut self, host: u64, len: u64) -> u64 {
        let offset_bits = 62 - (self.cluster_size.trailing_zeros() - 8);
        let sectors = (host + len - 1) / 512 - host / 512;
        let last = ((host + len - 1) / self.cluster_size) as usize;
        if self.refcounts.len() <= last {
            self.refcounts.resize(last + 1, 0);
        }
        let first = (host / self.cluster_size) as usize;
        self.refcounts[first..=last].iter_mut().for_each(|count| *count += 1);
        COMPRESSED | (sectors << offset_bits) | host
    }

    fn map(&mut self, entries: &[(u64, u64)]) {
        let per_table = self.cluster_size / 8;
        let mut table = 0;
        for (cluster, entry) in entries {
            while self.l2[table].0 as u64 != cluster / per_table {
                table += 1;
            }
            self.l2[table].1[(cluster % per_table) as usize] = *entry;
        }
    }

    fn write_tables(&mut self) -> Result<()> {
        let l2_start = self.l1_start() + self.l1_clusters;
        for (position, (index, table)) in self.l2.iter().enumerate() {
            let host = (l2_start + position as u64) * self.cluster_size;
            self.l1[*index] = COPIED | host;
            self.file.write_all_at(&big_endian(table), host)?;
        }
        self.file.write_all_at(&big_endian(&self.l1), self.l1_start() * self.cluster_size)?;
        let blocks_start = 1 + self.refcount_table_clusters;
        let blocks: Vec<u64> =
            (0..self.refcount_blocks).map(|block| (blocks_start + block) * self.cluster_size).collect();
        self.file.write_all_at(&big_endian(&blocks), self.cluster_size)?;
        let counts: Vec<u8> = self.refcounts.iter().flat_map(|count| count.to_be_bytes()).collect();
        ensure!(counts.len() as u64 <= self.refcount_blocks * self.cluster_size, "refcount blocks too few");
        self.file.write_all_at(&counts, blocks_start * self.cluster_size)?;
        Ok(())
    }

    fn write_header(&self, shape: &Shape) -> Result<()> {
        let mut extensions = Vec::new();
        if let Some(format) = shape.backing.as_ref().and_then(|backing| backing.format) {
            extensions.extend(EXTENSION_BACKING_FORMAT.to_be_bytes());
            extensions.extend((format.len() as u32).to_be_bytes());
            extensions.extend(format.as_bytes());
            extensions.resize(extensions.len().next_multiple_of(8), 0);
        }
        extensions.extend([0; 8]);
        let name = shape.backing.as_ref().map_or("", |backing| &backing.name);
        let name_at = if name.is_empty() { 0 } else { u64::from(HEADER_LEN) + extensions.len() as u64 };
        ensure!(name.len() <= 1023, "a backing name has at most 1023 bytes");

        let mut header = Vec::with_capacity(self.cluster_size as usize);
        header.extend(MAGIC);
        header.extend(3u32.to_be_bytes());
        header.extend(name_at.to_be_bytes());
        header.extend((name.len() as u32).to_be_bytes());
        header.extend(self.cluster_size.trailing_zeros().to_be_bytes());
        header.extend(self.size.to_be_bytes());
        header.extend(0u32.to_be_bytes()); // no encryption
        header.extend((self.l1.len() as u32).to_be_bytes());
        header.extend((self.l1_start() * self.cluster_size).to_be_bytes());
        header.extend(self.cluster_size.to_be_bytes()); // the refcount table is cluster 1
        header.extend((self.refcount_table_clusters as u32).to_be_bytes());
        header.extend([0; 12]); // no internal snapshots
        header.extend([0; 24]); // no incompatible, compatible or autoclear features
        header.extend(REFCOUNT_ORDER_16.to_be_bytes());
        header.extend(HEADER_LEN.to_be_bytes());
        header.extend(extensions);
        header.extend(name.as_bytes());
        ensure!(header.len() as u64 <= self.cluster_size, "header and backing name must fit one cluster");
        self.file.write_all_at(&header, 0)?;
        Ok(())
    }
}

/// Clusters of the refcount table and of refcount blocks so that they cover `payload` and themselves.
fn refcount_clusters(payload: u64, cluster_size: u64) -> (u64, u64) {
    let (mut table, mut blocks) = (1, 1);
    loop {
        let needed_blocks = (payload + table + blocks).div_ceil(cluster_size / 2);
        let needed_table = needed_blocks.div_ceil(cluster_size / 8);
        if (needed_table, needed_blocks) == (table, blocks) {
            return (table, blocks);
        }
        (table, blocks) = (needed_table.max(table), needed_blocks.max(blocks));
    }
}

fn big_endian(words: &[u64]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_be_bytes()).collect()
}

/// Raw deflate with the 4 KiB window that qcow2 asks for, or `None` when it would not save a sector.
fn deflate(cluster: &[u8]) -> Option<Vec<u8>> {
    let mut out = vec![0; cluster.len() - 512];
    let mut state = Compress::new_with_window_bits(Compression::fast(), false, 12);
    match state.compress(cluster, &mut out, FlushCompress::Finish) {
        Ok(Status::StreamEnd) => {
            out.truncate(state.total_out() as usize);
            Some(out)
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refcounts_cover_themselves() {
        for (payload, size) in [(1, 512), (255, 512), (257, 512), (8_000_000, 512), (65_536, 65_536)] {
            let (table, blocks) = refcount_clusters(payload, size);
            assert!(blocks * (size / 2) >= payload + table + blocks, "{payload} clusters of {size}");
            assert!(table * (size / 8) >= blocks, "{payload} clusters of {size}");
        }
    }

    #[test]
    fn a_name_that_does_not_fit_the_header_cluster_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let backing = Some(Backing { name: "x".repeat(500), format: None });
        let shape = Shape { size: 1 << 20, cluster_size: 512, backing };
        let error = write(&dir.path().join("long.qcow2"), &shape, &[], &Empty).unwrap_err();
        assert!(format!("{error:#}").contains("must fit one cluster"), "{error:#}");
    }
}
