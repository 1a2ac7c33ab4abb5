//! Comparing a backup with its manifest.

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::FileExt as _;
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use vmstrata_disk::{IoContext as _, Resources, Result};
use vmstrata_qcow2::Header;
use vmstrata_qcow2::create::{Places, Refcounts};
use vmstrata_store::open_named;
use vmstrata_types::{ClusterBits, GuestOffset};

use crate::REGION_BYTES;
use crate::content::Content;
use crate::fault::BackupFault;
use crate::head::{REFCOUNTS, Shape, first_cluster};
use crate::manifest::Manifest;
use crate::pipeline::{Crew, in_order};
use crate::target::sum_of;
use crate::{BackupReport, Watch};

/// Verifies the backup at `path`: every byte of its file, and what it stores of the disk.
///
/// What it builds upon is not looked at.
///
/// # Errors
/// A file or manifest that cannot be read, is damaged, or does not match the other.
pub fn verify(path: &Path, resources: &Arc<Resources>, watch: Watch<'_>) -> Result<BackupReport> {
    let started = Instant::now();
    let manifest = Manifest::of(path)?;
    let regions = manifest.regions.len() as u64;
    let total = manifest.file.bytes.saturating_add(regions * REGION_BYTES);
    check_file(path, &manifest, &mut |done| watch(done, total))?;
    let file_bytes = manifest.file.bytes;
    let content = Content::open(path, manifest, resources)?;
    let mut stored_bytes = 0;
    let mut done = file_bytes;
    let regions = content.regions().into_iter().map(GuestOffset::new);
    in_order(
        &Crew::new(0, None),
        regions,
        |start| content.region(start),
        |region| {
            if let Some(region) = region {
                stored_bytes += region.data.len() as u64;
                done += REGION_BYTES;
            }
            if watch(done, total) { Ok(()) } else { Err(BackupFault::Stopped.into()) }
        },
    )?;
    Ok(BackupReport { manifest: content.manifest, stored_bytes, took: started.elapsed() })
}

/// Compares a file with its length and checksum. One that `qemu-img rebase -u` has given another backing file, which is there,
/// must match behind the header that it was made with.
///
/// # Errors
/// A file that cannot be read or does not match; [`BackupFault::Stopped`] when `watch` says so.
pub(crate) fn check_file(path: &Path, manifest: &Manifest, watch: &mut dyn FnMut(u64) -> bool) -> Result<()> {
    let mut check = || -> Result<()> {
        let file = open_named(path).while_trying("open the backup")?;
        let found = file.metadata().while_trying("examine the backup")?.len();
        let expected = manifest.file.bytes;
        if found != expected {
            return Err(BackupFault::Length { found, expected }.into());
        }
        let mut sum = |start: &[u8]| {
            sum_of(&file, start, |done| if watch(done) { Ok(()) } else { Err(BackupFault::Stopped.into()) })
        };
        if sum(&[])? == manifest.file {
            return Ok(());
        }
        match rebased_header(path, &file, manifest) {
            Some((name, header)) if sum(&header)? == manifest.file => {
                tracing::info!(file = %path.display(), backing = %name.display(), "the backup was rebased: all but its header matches");
                Ok(())
            }
            _ => Err(BackupFault::FileSum.into()),
        }
    };
    check().map_err(|error| error.in_file(path))
}

/// Of a backup whose backing file has another name than the manifest says: that name, and the first cluster that the backup was
/// made with, by what the manifest says and where its tables lie.
fn rebased_header(path: &Path, file: &File, manifest: &Manifest) -> Option<(OsString, Vec<u8>)> {
    let link = manifest.builds_on.as_ref()?;
    let bits = ClusterBits::new(manifest.cluster_bytes.checked_ilog2()?)?;
    let mut found = vec![0; usize::try_from(bits.size().min(manifest.file.bytes)).ok()?];
    file.read_exact_at(&mut found, 0).ok()?;
    let header = Header::parse(&found, manifest.file.bytes).ok()?;
    let name = header.backing_name(&found).ok()??;
    let plain = OsStr::from_bytes(name.strip_prefix(b"file:").unwrap_or(name));
    let (name, is_there) = (OsStr::from_bytes(name).to_owned(), path.parent()?.join(plain).is_file());
    if name == link.file || !is_there {
        return None;
    }
    let shape = Shape::of_backup(bits, manifest.disk_bytes, Some(&link.file), Some(header.compression_type));
    let refcounts = Refcounts {
        order: REFCOUNTS,
        first: header.refcount_table_offset.get() >> bits.get(),
        table: header.refcount_table_clusters.into(),
        blocks: 0,
    };
    Some((name, first_cluster(&shape, &Places { l1: header.l1_table_offset, refcounts }).ok()?))
}
