//! Making a disk from a full backup and the incremental ones on top of it.
//!
//! Nothing is taken on trust: each file is compared with its manifest as a whole, each manifest with the one before
//! it, and each region of each file once more while it is laid over what the older files had there. The disk gets its
//! name when all of that was right.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use vmstrata_disk::create::reserve;
use vmstrata_disk::{Error, Resources, Result};
use vmstrata_qcow2::CompressionType;
use vmstrata_store::is_zero;
use vmstrata_types::{ClusterBits, GuestOffset};

use crate::REGION_BYTES;
use crate::content::Content;
use crate::diff::DiffKind;
use crate::fault::BackupFault;
use crate::head::Shape;
use crate::manifest::Manifest;
use crate::packed::{PackedFile, PackedRegion};
use crate::pipeline::{Crew, in_order};
use crate::plan::Planned;
use crate::raw_disk::{RawDisk, is_device, open_device, store_of};
use crate::region::Region;
use crate::verify::check_file;
use crate::{BackupReport, Watch};

/// What a disk is restored as.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum RestoreFormat {
    /// An image.
    #[default]
    Qcow2,
    /// Its bytes, in a file or on a block device.
    Raw,
}

/// How to restore.
#[derive(Clone, Debug, Default)]
pub struct RestoreOptions {
    /// As what.
    pub format: RestoreFormat,
    /// Replace what is at the target.
    pub replace: bool,
    /// Compress the disk's clusters.
    pub compression: Option<CompressionType>,
    /// Bytes of the disk laid out per second at most.
    pub bytes_per_second: Option<u64>,
    /// Threads; 0 for as many as suit the host.
    pub threads: usize,
}

/// Makes `target` from backups: `files` are a full one and the incremental ones on top of it, oldest first.
///
/// # Errors
/// A file that is damaged, or does not build upon the one before it; a target that is there already (unless it is to
/// be replaced) or cannot be written. A file is then unchanged; a block device, which is written in
/// place, is unchanged only if the backups are not sound.
pub fn restore(
    files: &[PathBuf],
    target: &Path,
    options: &RestoreOptions,
    resources: &Arc<Resources>,
    watch: Watch<'_>,
) -> Result<BackupReport> {
    let started = Instant::now();
    check_target(target, options).map_err(|fault| Error::from(fault).in_file(target))?;
    let manifests = read_chain(files)?;
    let mut done = 0;
    // Half of the work: the regions are the other half.
    let file_bytes = manifests.iter().fold(0, |sum: u64, manifest| sum.saturating_add(manifest.file.bytes));
    for (path, manifest) in files.iter().zip(&manifests) {
        check_file(path, manifest, &mut |read| watch(done + read, file_bytes.saturating_mul(2)))?;
        done += manifest.file.bytes;
    }
    let open = |(path, manifest): (&PathBuf, Manifest)| Content::open(path, manifest, resources);
    let layers = files.iter().zip(manifests).map(open).collect::<Result<Vec<Content>>>()?;
    let newest = layers.last().ok_or(BackupFault::Nothing)?;
    let shape = Shape::of_backup(newest.plan.bits(), newest.size(), None, options.compression);
    let mut starts: Vec<u64> = layers.iter().flat_map(Content::regions).collect();
    starts.sort_unstable();
    starts.dedup();
    let written = write_disk(&layers, &shape, &starts, target, options, watch);
    let stored_bytes = written.map_err(|error| error.in_file(target))?;
    Ok(BackupReport { manifest: newest.manifest.clone(), stored_bytes, took: started.elapsed() })
}

fn check_target(target: &Path, options: &RestoreOptions) -> Result<(), BackupFault> {
    match (options.format, is_device(target)) {
        (RestoreFormat::Qcow2, true) => Err(BackupFault::ImageOnDevice),
        (RestoreFormat::Raw, _) if options.compression.is_some() => Err(BackupFault::CompressedRaw),
        (RestoreFormat::Raw, true) if !options.replace => Err(BackupFault::DeviceNotReplaced),
        _ => Ok(()),
    }
}

/// Reads the manifests and makes sure that each backup builds upon the one before it.
fn read_chain(files: &[PathBuf]) -> Result<Vec<Manifest>> {
    let read = files.iter().map(|path| Manifest::of(path));
    let manifests = read.collect::<Result<Vec<_>>>()?;
    for (number, (path, manifest)) in files.iter().zip(&manifests).enumerate() {
        let fault = match (&manifest.builds_on, number.checked_sub(1)) {
            (None, None) => continue,
            (None, Some(_)) => BackupFault::NotIncremental,
            (Some(link), None) => BackupFault::NotFull { file: PathBuf::from(&link.file) },
            (Some(link), Some(below)) => match link.manifest_sha256 {
                Some(sum) if sum == manifests[below].sha256 => continue,
                Some(_) => BackupFault::OtherChain { other: files[below].clone() },
                None => BackupFault::Unlinked,
            },
        };
        return Err(Error::from(fault).in_file(path));
    }
    Ok(manifests)
}

/// Writes the disk to its target; the bytes stored in it.
fn write_disk(
    layers: &[Content],
    shape: &Shape,
    starts: &[u64],
    target: &Path,
    options: &RestoreOptions,
    watch: &mut dyn FnMut(u64, u64) -> bool,
) -> Result<u64> {
    if is_device(target) {
        let device = open_device(target, shape.size)?;
        let to = Restored::Raw(RawDisk::new(&device, shape.size, true));
        return lay_out(layers, shape, starts, to, options, watch);
    }
    let (_replaced, draft) = reserve(target, options.replace)?;
    let file = store_of(&draft, target)?;
    let to = match options.format {
        RestoreFormat::Qcow2 => Restored::Packed(Box::new(PackedFile::new(&draft.file, shape))),
        RestoreFormat::Raw => Restored::Raw(RawDisk::new(&file, shape.size, false)),
    };
    let stored = lay_out(layers, shape, starts, to, options, watch)?;
    draft.publish(target, options.replace)?;
    Ok(stored)
}

/// Where the disk goes.
enum Restored<'a> {
    Packed(Box<PackedFile<'a>>),
    Raw(RawDisk<'a>),
}

/// Lays all regions over each other, in order; the bytes stored.
fn lay_out(
    layers: &[Content],
    shape: &Shape,
    starts: &[u64],
    mut to: Restored<'_>,
    options: &RestoreOptions,
    watch: &mut dyn FnMut(u64, u64) -> bool,
) -> Result<u64> {
    let crew = Crew::new(options.threads, options.bytes_per_second);
    let (mut stored, mut laid, all) = (0, 0, starts.len() as u64);
    let jobs = starts.iter().copied().map(GuestOffset::new);
    let lay = |start| {
        crew.wait(REGION_BYTES);
        PackedRegion::new(lay_over(layers, start, shape.size, shape.bits)?, shape)
    };
    in_order(&crew, jobs, lay, |region| {
        if let Some(region) = region {
            match &mut to {
                Restored::Packed(file) => file.put(&region)?,
                Restored::Raw(disk) => disk.put(region.region())?,
            }
            stored += region.data_bytes();
            laid += 1;
        }
        // The first half was reading the files as a whole.
        if watch(all + laid, all * 2) { Ok(()) } else { Err(BackupFault::Stopped.into()) }
    })?;
    match to {
        Restored::Packed(file) => file.finish(shape.size)?,
        Restored::Raw(disk) => disk.finish()?,
    }
    Ok(stored)
}

/// What the disk has in a region: the newest version of each byte, and zeros past the end of a layer that was shorter.
fn lay_over(layers: &[Content], start: GuestOffset, size: u64, bits: ClusterBits) -> Result<Region> {
    let mut bytes = vec![0; REGION_BYTES as usize];
    for layer in layers {
        let end = layer.size().saturating_sub(start.get()).min(REGION_BYTES) as usize;
        bytes[end..].fill(0);
        let region = layer.region(start)?;
        for (at, data) in region.stored() {
            let from = (at - start) as usize;
            let to = (from + layer.plan.bits().size() as usize).min(end);
            match data {
                Some(data) => bytes[from..to].copy_from_slice(&data[..to - from]),
                None => bytes[from..to].fill(0),
            }
        }
    }
    let end = size.saturating_sub(start.get()).min(REGION_BYTES) as usize;
    let mut clusters = Vec::new();
    let mut data = Vec::new();
    for (number, cluster) in bytes.chunks(bits.size() as usize).enumerate() {
        let at = start + ((number as u64) << bits.get());
        if number << bits.get() < end && !is_zero(cluster) {
            clusters.push(Planned { at, kind: DiffKind::Data });
            data.extend_from_slice(cluster);
        }
    }
    Ok(Region::new(clusters, data, bits))
}
