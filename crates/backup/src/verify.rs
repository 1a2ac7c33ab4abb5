//! Comparing a backup with its manifest.

use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use vmstrata_disk::{IoContext as _, Resources, Result};
use vmstrata_store::open_named;

use vmstrata_types::GuestOffset;

use crate::REGION_BYTES;
use crate::content::Content;
use crate::fault::BackupFault;
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

/// Compares a file with its length and checksum.
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
        let sum = sum_of(&file, |done| if watch(done) { Ok(()) } else { Err(BackupFault::Stopped.into()) })?;
        if sum == manifest.file { Ok(()) } else { Err(BackupFault::FileSum.into()) }
    };
    check().map_err(|error| error.in_file(path))
}
