//! Rebases a disk onto another state. Its content does not change; its file keeps only what differs from that state.
//!
//! ```text
//!    disk ──► v1 ──► ···          what differs between disk and v2, byte by byte, is copied into
//!               \                 the draft; what v2 has at the same place is not
//!    draft ──► v2
//! ```

use std::path::{Path, PathBuf};
use std::sync::Arc;

use vmstrata_disk::{
    CreateOptions, Disk, Error, Format, OpenOptions, Resources, Result, create, directory_of,
};
use vmstrata_store::Segment;
use vmstrata_types::{GuestOffset, GuestRange};

use crate::Watch;
use crate::diff::{Diff, DiffKind, DiffOptions};
use crate::fault::BackupFault;

/// Bytes that are copied at a time.
const PIECE: u64 = 1 << 20;

/// How to rebase.
#[derive(Clone, Debug, Default)]
pub struct RebaseOptions {
    /// Directories, beside those of the disk and its new base, in which backing files may lie.
    pub allow_backing: Vec<PathBuf>,
    /// Make an overlay without subclusters.
    pub no_subclusters: bool,
}

impl RebaseOptions {
    fn diff(&self, old: &Path, new: &Path, resources: &Arc<Resources>) -> Result<Diff> {
        let format = Some(Format::Qcow2);
        let options = DiffOptions {
            allow_backing: self.allow_backing.clone(),
            format,
            old_format: format,
            allocation: false,
        };
        Diff::open(old, new, &options, resources)
    }
}

/// Bytes of `disk` that differ from `onto`: what it would store on that.
///
/// # Errors
/// A file that cannot be read; states that have no layer in common.
pub fn foresee_rebase(
    (disk, onto): (&Path, &Path),
    options: &RebaseOptions,
    resources: &Arc<Resources>,
    watch: Watch<'_>,
) -> Result<u64> {
    let diff = options.diff(onto, disk, resources)?;
    let mut bytes = 0;
    for extent in diff.changed_bytes()? {
        let extent = extent?;
        bytes += if extent.kind == DiffKind::Data { extent.range.len } else { 0 };
        go_on(watch, extent.range.end(), diff.new_size())?;
    }
    Ok(bytes)
}

/// Makes `draft` an overlay on `onto` that reads as `disk`, flushed and compared. Returns the bytes that were copied.
///
/// # Errors
/// As [`foresee_rebase`]; a draft that is there already, or that cannot be written. It may be left.
pub fn rebase(
    (disk, onto): (&Path, &Path),
    draft: &Path,
    options: &RebaseOptions,
    resources: &Arc<Resources>,
    watch: Watch<'_>,
) -> Result<u64> {
    let diff = options.diff(onto, disk, resources)?;
    let made = CreateOptions::overlay(onto.to_owned(), diff.new_size(), !options.no_subclusters);
    create(draft, &made)?;
    let open = |path: &Path, read_only| {
        let mut allow_backing = options.allow_backing.clone();
        allow_backing.extend([disk, onto].map(directory_of));
        let open =
            OpenOptions { read_only, allow_backing, format: Some(Format::Qcow2), ..OpenOptions::default() };
        Disk::open(path, &open, resources)
    };
    let (from, to) = (open(disk, true)?, open(draft, false)?);
    let copied = copy(&diff, &from, &to, watch);
    // Whatever came of it, its file is let go of.
    let closed = to.close();
    let copied = copied?;
    closed?;
    drop((from, to));
    let differs = options.diff(disk, draft, resources)?.changed_bytes()?.next().transpose()?;
    match differs {
        Some(extent) => {
            Err(Error::from(BackupFault::ReadsOtherwise { at: extent.range.start }).in_file(draft))
        }
        None => Ok(copied),
    }
}

fn copy(diff: &Diff, from: &Disk, to: &Disk, watch: Watch<'_>) -> Result<u64> {
    let (mut copied, mut piece) = (0, vec![0; PIECE as usize]);
    for extent in diff.changed_bytes()? {
        let extent = extent?;
        match extent.kind {
            DiffKind::Zero => to.write_zeroes(extent.range, true)?,
            DiffKind::Data => {
                for at in (0..extent.range.len).step_by(PIECE as usize) {
                    let at_disk = GuestOffset::new(extent.range.start.get() + at);
                    let len = (extent.range.len - at).min(PIECE);
                    let piece = [Segment::from_mut(&mut piece[..len as usize])];
                    from.read(at_disk, &piece)?;
                    to.write(at_disk, &piece)?;
                    copied += len;
                    go_on(watch, GuestRange::new(at_disk, len).end(), diff.new_size())?;
                }
            }
        }
    }
    to.flush()?;
    Ok(copied)
}

fn go_on(watch: Watch<'_>, done: GuestOffset, total: u64) -> Result<()> {
    if watch(done.get(), total) { Ok(()) } else { Err(BackupFault::Stopped.into()) }
}
