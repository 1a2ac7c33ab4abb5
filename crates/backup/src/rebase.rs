//! Rebases a disk onto another state. Its content does not change; its file keeps only what differs from that state.
//!
//! ```text
//!    disk ──► v1 ──► ···          what differs between disk and v2, byte by byte, is copied into
//!               \                 the draft; what v2 has at the same place is not
//!    draft ──► v2
//! ```
//!
//! [`Rebase`] does so step by step, of a frozen layer of a disk in use as well.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use vmstrata_disk::{
    CreateOptions, Disk, Error, Format, LocalFiles, OpenOptions, Opener, Resources, Result, create_on,
    directory_of, probe_layer, published_below,
};
use vmstrata_store::Segment;
use vmstrata_types::GuestRange;

use crate::Watch;
use crate::diff::{ChangedBytes, Diff, DiffExtent, DiffKind, DiffOptions, Looked};
use crate::fault::BackupFault;

/// Bytes that are copied at a time, at most and at least: slower than that, clusters would be copied in pieces.
const PIECE: u64 = 1 << 20;
const SHARE: u64 = 128 << 10;

/// How to rebase.
#[derive(Clone, Debug)]
pub struct RebaseOptions {
    /// Directories, beside those of the disk and its new base, in which backing files may lie.
    pub allow_backing: Vec<PathBuf>,
    /// Make an overlay without subclusters.
    pub no_subclusters: bool,
    /// What opens the new base, as the resources do.
    pub opener: Arc<dyn Opener>,
}

impl Default for RebaseOptions {
    fn default() -> Self {
        Self { allow_backing: Vec::new(), no_subclusters: false, opener: Arc::new(LocalFiles) }
    }
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

/// The published layer that is the backing file of the disk at `path`. Refuses disks that cannot be rebased.
///
/// # Errors
/// Another backing file, or none; internal snapshots or bitmaps, which a rebase would drop; as [`published_below`].
pub fn rebased_from(path: &Path, options: &OpenOptions) -> Result<PathBuf> {
    let refused = |fault: BackupFault| Error::from(fault).in_file(path);
    let newest = published_below(path, options)?;
    let top = probe_layer(path, Some(Format::Qcow2))?;
    let newest = newest.filter(|newest| top.backing_path.as_ref() == Some(newest));
    match newest {
        None => Err(refused(BackupFault::NotOnBase)),
        Some(_) if !top.snapshots.is_empty() => Err(refused(BackupFault::WouldLose("internal snapshots"))),
        Some(_) if !top.bitmaps.is_empty() => Err(refused(BackupFault::WouldLose("bitmaps"))),
        Some(newest) => Ok(newest),
    }
}

/// A rebase under way. Dropped early, it leaves an unfinished draft.
#[derive(Debug)]
pub struct Rebase {
    options: RebaseOptions,
    resources: Arc<Resources>,
    size: u64,
    changed: ChangedBytes,
    stage: Stage,
    /// Bytes of the disk that this stage has passed.
    at: u64,
}

#[derive(Debug)]
enum Stage {
    /// Nothing is written: what would be is counted.
    Counting,
    Copying {
        draft: Draft,
        /// What is copied next.
        rest: Option<DiffExtent>,
        piece: Vec<u8>,
    },
    /// The draft is compared with the disk.
    Comparing(PathBuf),
    Done,
}

/// The new image, which is closed whatever comes of it.
#[derive(Debug)]
struct Draft {
    path: PathBuf,
    disk: Arc<Disk>,
}

impl Drop for Draft {
    fn drop(&mut self) {
        if let Err(error) = self.disk.close() {
            tracing::warn!(draft = %self.path.display(), %error, "was not closed clean");
        }
    }
}

impl Rebase {
    /// Begins to count the bytes of `disk` that differ from `onto`: what it would store on that.
    ///
    /// # Errors
    /// A file that cannot be read; states that have no layer in common.
    pub fn foresee(
        (disk, onto): (&Path, &Path),
        options: &RebaseOptions,
        resources: &Arc<Resources>,
    ) -> Result<Self> {
        let diff = options.diff(onto, disk, resources)?;
        Ok(Self {
            options: options.clone(),
            resources: Arc::clone(resources),
            size: diff.new_size(),
            changed: diff.changed_bytes()?,
            stage: Stage::Counting,
            at: 0,
        })
    }

    /// Begins to make `draft` an overlay on `onto` that reads as `disk`. The file `disk` must not change meanwhile.
    ///
    /// # Errors
    /// As [`Rebase::foresee`]; a draft that is there already, or that cannot be written. It may be left.
    pub fn begin(
        (disk, onto): (&Path, &Path),
        draft: &Path,
        options: &RebaseOptions,
        resources: &Arc<Resources>,
    ) -> Result<Self> {
        let rebase = Self::foresee((disk, onto), options, resources)?;
        let made = CreateOptions::overlay(onto.to_owned(), rebase.size, !options.no_subclusters);
        create_on(draft, &made, &*options.opener)?;
        let mut allow_backing = options.allow_backing.clone();
        allow_backing.push(directory_of(onto));
        let open = OpenOptions { allow_backing, format: Some(Format::Qcow2), ..OpenOptions::default() };
        let draft = Draft { path: draft.to_owned(), disk: Disk::open(draft, &open, resources)? };
        let piece = vec![0; PIECE as usize];
        Ok(Self { stage: Stage::Copying { draft, rest: None, piece }, ..rebase })
    }

    /// Bytes of the disk that are left to pass.
    pub fn left(&self) -> u64 {
        let stages = match self.stage {
            Stage::Copying { .. } => 2,
            Stage::Counting | Stage::Comparing(_) => 1,
            Stage::Done => 0,
        };
        (self.size * stages).saturating_sub(self.at)
    }

    /// Whether the draft is whole: flushed, closed, and found to read as the disk.
    pub fn is_done(&self) -> bool {
        matches!(self.stage, Stage::Done)
    }

    /// Does what comes next, copying about `most` bytes. Returns those that were copied, or would be.
    ///
    /// # Errors
    /// A state that cannot be read; a draft that cannot be written, or [reads otherwise](BackupFault::ReadsOtherwise).
    pub fn step(&mut self, most: u64) -> Result<u64> {
        if let Stage::Copying { draft, rest, piece } = &mut self.stage
            && let Some(extent) = rest.take()
        {
            let (copied, left) = copy(self.changed.new_state(), draft, extent, &mut piece[..], most)?;
            *rest = left;
            return Ok(copied);
        }
        if self.is_done() {
            return Ok(0);
        }
        match self.changed.look()? {
            Looked::UpTo(at) => self.at = at.get(),
            Looked::Changed(extent) => return self.found(extent),
            Looked::End => self.end_stage()?,
        }
        Ok(0)
    }

    fn found(&mut self, extent: DiffExtent) -> Result<u64> {
        match &mut self.stage {
            Stage::Copying { rest, .. } => *rest = Some(extent),
            Stage::Counting if extent.kind == DiffKind::Data => return Ok(extent.range.len),
            Stage::Comparing(draft) => {
                let fault = BackupFault::ReadsOtherwise { at: extent.range.start };
                return Err(Error::from(fault).in_file(&*draft));
            }
            Stage::Counting | Stage::Done => {}
        }
        Ok(0)
    }

    fn end_stage(&mut self) -> Result<()> {
        let Stage::Copying { draft, .. } = std::mem::replace(&mut self.stage, Stage::Done) else {
            return Ok(());
        };
        draft.disk.flush()?;
        draft.disk.close()?;
        let path = draft.path.clone();
        drop(draft);
        let diff = self.options.diff(self.changed.new_state().path(), &path, &self.resources)?;
        (self.changed, self.stage, self.at) = (diff.changed_bytes()?, Stage::Comparing(path), 0);
        Ok(())
    }

    /// Takes all steps that are left. Returns the bytes that were copied, or would be.
    ///
    /// # Errors
    /// As [`Rebase::step`]; [`BackupFault::Stopped`].
    pub fn run(mut self, watch: Watch<'_>) -> Result<u64> {
        let (mut copied, total) = (0, self.left());
        while !self.is_done() {
            copied += self.step(PIECE)?;
            if !watch(total - self.left(), total) {
                return Err(BackupFault::Stopped.into());
            }
        }
        Ok(copied)
    }
}

/// Copies the start of an extent. Returns the bytes copied, and the rest of the extent.
fn copy(
    from: &Disk,
    to: &Draft,
    extent: DiffExtent,
    piece: &mut [u8],
    most: u64,
) -> Result<(u64, Option<DiffExtent>)> {
    let range = extent.range;
    if extent.kind == DiffKind::Zero {
        to.disk.write_zeroes(range, true)?;
        return Ok((0, None));
    }
    let len = range.len.min(most.clamp(SHARE, piece.len() as u64));
    let segments = [Segment::from_mut(&mut piece[..len as usize])];
    from.read(range.start, &segments)?;
    to.disk.write(range.start, &segments)?;
    let left = GuestRange::new(range.start + len, range.len - len);
    Ok((len, (left.len > 0).then_some(DiffExtent { range: left, ..extent })))
}
