//! The job that drops layers: a loop of `select -> Action -> apply`, for files and for running disks alike. How it is done is in
//! `merging`.

mod ending;
mod files;

use std::path::{Path, PathBuf};
use std::sync::Arc;

use vmstrata_types::GuestRange;

use crate::disk::{Disk, Running};
use crate::error::{Error, Result};
use crate::merging::copier::{Copier, WINDOW, Way};
use crate::merging::remove::{self, Dropped};
use crate::merging::stream::Progress;
pub use crate::merging::{
    CollectOptions, Direction, Forecast, Going, Kept, LayerRef, MergeFault, MergeOptions, MergeRange, Merged,
    Orphan, Removal, Selection, all_of, available_bytes, collect, disks_with_orphans, noted_in, orphans,
    ranges_of,
};
use crate::refs::{ChainFile, allocated_bytes};
use crate::resources::Resources;
use files::Files;

/// Bytes copied before they are brought to stable storage: what a crash makes a later attempt copy again.
const CHECKPOINT: u64 = 64 << 20;

/// What comes next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// Copy up what the target needs of this range.
    Copy(GuestRange),
    /// Bring what was copied to stable storage.
    Commit,
    /// Make the layer below the dropped ones the backing file of the target.
    Relink,
    /// Make the indices of the layers from the target up anew.
    Index,
    /// Remove the dropped layers' files.
    Remove,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    Copying,
    Indexing,
    Removing,
    Done,
}

/// The job; see the module documentation. Dropped early it leaves a sound chain, in which nothing is leaked.
#[derive(Debug)]
pub struct Merge {
    options: MergeOptions,
    chain: Vec<ChainFile>,
    range: MergeRange,
    /// The files that go.
    dropped: Vec<Dropped>,
    /// Present until the target is done with. Goes before the host: its files are locked by that.
    copier: Option<Copier>,
    host: Host,
    stage: Stage,
    /// Bytes that one action copies at most.
    most: u64,
    /// Whether the last action copied less than its range for that.
    is_within_action: bool,
    uncommitted: u64,
    space: Space,
    merged: Merged,
}

/// What the layers took of the host's storage when the job began, to tell what it frees.
#[derive(Debug)]
struct Space {
    /// From the base on; but not the active layer of a running disk, which guests write.
    layers: Vec<PathBuf>,
    bytes: u64,
    /// Whether what is copied goes to that one.
    copies_into_active: bool,
}

impl Space {
    fn of(chain: &[ChainFile], range: MergeRange, host: &Host) -> Self {
        let active = chain.len() - 1;
        let (end, copies_into_active) = match host {
            Host::Files(_) => (chain.len(), false),
            Host::Running(_) => (active, range.target().index() == active),
        };
        let chain = &chain[range.first.index()..end];
        // As they were found: to open the target may have written to it.
        let bytes = chain.iter().map(|link| link.allocated_bytes).sum();
        Self { layers: chain.iter().map(|link| link.path.clone()).collect(), bytes, copies_into_active }
    }

    /// Counts these, too, which are still there.
    fn add(&mut self, layers: impl Iterator<Item = PathBuf>) {
        let layers: Vec<_> = layers.collect();
        self.bytes += allocated(&layers);
        self.layers.extend(layers);
    }

    /// Bytes that are free now and were not at the beginning, when `copied` were copied.
    fn freed(&self, copied: u64) -> u64 {
        let grown = if self.copies_into_active { copied } else { 0 };
        self.bytes.saturating_sub(allocated(&self.layers) + grown)
    }
}

fn allocated(layers: &[PathBuf]) -> u64 {
    layers.iter().map(|path| allocated_bytes(path)).sum()
}

/// Where the disk is.
#[derive(Debug)]
enum Host {
    /// In files that no process serves.
    Files(Files),
    /// In this process, which serves it.
    Running(Box<Running>),
}

impl Host {
    /// Returns once no request can still see what was replaced.
    fn wait(&self, way: &Way) -> Result<()> {
        match self {
            Self::Files(_) => Ok(()),
            Self::Running(running) => running.wait(way),
        }
    }
}

impl Merge {
    /// Makes everything ready to drop the layers in `range` from the chain of `disk`, which no server serves. Nothing is
    /// written yet, but that a disk that was not closed is opened and closed, and that the target's index falls.
    ///
    /// # Errors
    /// A disk or a target that is in use; layers that are not there; a header without room; a chain that cannot be read.
    pub fn new(
        disk: &Path,
        range: MergeRange,
        options: &MergeOptions,
        resources: &Arc<Resources>,
    ) -> Result<Self> {
        let (files, chain, copier) = Files::begin(disk, range, options, resources)?;
        Ok(Self::with(Host::Files(files), chain, copier, range, options))
    }

    /// As [`Merge::new`], for a disk that goes on being used meanwhile. How its files are looked at, the disk knows.
    ///
    /// # Errors
    /// As [`Merge::new`]; also while another merge of the disk runs, or another disk in use stands on the target.
    pub fn of_disk(disk: &Arc<Disk>, range: MergeRange, options: &MergeOptions) -> Result<Self> {
        let options = MergeOptions { open: disk.options(), ..options.clone() };
        let (running, chain, copier) = Running::begin(disk, range, &options)?;
        Ok(Self::with(Host::Running(Box::new(running)), chain, copier, range, &options))
    }

    fn with(
        host: Host,
        chain: Vec<ChainFile>,
        copier: Copier,
        range: MergeRange,
        options: &MergeOptions,
    ) -> Self {
        let mut dropped = remove::dropped(&chain, range);
        let space = Space::of(&chain, range, &host);
        let is_commit = matches!(copier.way, Way::Commit(_));
        if is_commit {
            // The base stays, under another name.
            dropped.pop();
        }
        Self {
            options: options.clone(),
            chain,
            range,
            dropped,
            copier: Some(copier),
            host,
            stage: Stage::Copying,
            most: u64::MAX,
            is_within_action: false,
            uncommitted: 0,
            space,
            merged: Merged { is_commit, ..Merged::default() },
        }
    }

    /// How many actions there are, about.
    pub fn total(&self) -> u64 {
        let size = self.copier.as_ref().map_or(0, |copier| copier.target.size());
        size.div_ceil(WINDOW) + 3
    }

    /// Bounds the bytes that one action copies, rounded up to whole clusters. The next action copies the rest of the range.
    pub fn copy_at_most(&mut self, bytes: u64) {
        self.most = bytes;
    }

    /// Whether the last action left a part of its range to the next.
    pub fn is_within_action(&self) -> bool {
        self.is_within_action
    }

    /// Decides what comes next; `None` when all is done.
    pub fn select(&self) -> Option<Action> {
        match self.stage {
            Stage::Copying if self.uncommitted >= CHECKPOINT => Some(Action::Commit),
            Stage::Copying => {
                let window = self.copier.as_ref().and_then(Copier::window);
                Some(window.map_or(Action::Relink, Action::Copy))
            }
            Stage::Indexing => Some(Action::Index),
            Stage::Removing => Some(Action::Remove),
            Stage::Done => None,
        }
    }

    /// Carries it out; returns the bytes copied.
    ///
    /// # Errors
    /// A layer that cannot be read, a host that is full or cannot write or flush. The chain is sound, and the job is over.
    ///
    /// # Panics
    /// With an action that [`Merge::select`] did not choose.
    pub fn apply(&mut self, action: Action) -> Result<u64> {
        self.is_within_action = false;
        match action {
            Action::Copy(range) => return self.copy(range),
            Action::Commit => {
                let target = &self.copier().target;
                target.changes.commit(&**target)?;
                self.uncommitted = 0;
            }
            Action::Relink => {
                if !self.merged.is_commit {
                    // A hold may have been placed while it was copied.
                    let refused = self.range.refuse_held(&self.chain, &self.options);
                    refused.map_err(|fault| Error::from(fault).in_file(self.disk().0))?;
                }
                let mut copier = self.copier.take().expect("copying comes first");
                self.stage = Stage::Done;
                if !self.merged.is_commit {
                    self.tell_of_target();
                }
                self.announce(copier.target.identity.file);
                let relinked = match &mut self.host {
                    Host::Files(_) => copier.finalize(|_| Ok(())).and_then(|()| copier.relink()),
                    Host::Running(running) => running.relink(&mut copier),
                };
                relinked.inspect_err(|_| copier.leave(|way| self.host.wait(way)))?;
                if let Way::Commit(commit) = &copier.way {
                    self.took_place(commit, copier.target.identity.file);
                }
                self.stage = Stage::Indexing;
            }
            Action::Index => self.index(),
            Action::Remove => {
                self.remove();
                self.stage = Stage::Done;
            }
        }
        Ok(0)
    }

    fn copier(&self) -> &Copier {
        self.copier.as_ref().expect("copying comes first")
    }

    fn copy(&mut self, range: GuestRange) -> Result<u64> {
        let copier = self.copier();
        copier.room.check()?;
        let Progress { bytes, to } = match (&copier.layers, &self.host) {
            (Some(layers), _) => copier.copy(layers, range, self.most)?,
            (None, Host::Running(running)) => running.stream_range(copier, range, self.most)?,
            (None, Host::Files(_)) => unreachable!("files have a target of their own"),
        };
        self.copier.as_mut().expect("just used").go_on_at(to);
        self.is_within_action = to < range.end();
        self.uncommitted += bytes;
        self.merged.copied_bytes += bytes;
        Ok(bytes)
    }

    /// Not an error if it cannot be: a chain without an index opens slower.
    fn index(&mut self) {
        let indexed = match &mut self.host {
            Host::Files(files) => files.index(&self.chain),
            Host::Running(running) => running.index(),
        };
        let is_done = indexed.unwrap_or_else(|error| {
            tracing::warn!(%error, "the chain gets no index");
            true
        });
        if is_done {
            self.stage = Stage::Removing;
        }
    }

    /// Takes all steps that are left.
    ///
    /// # Errors
    /// As [`Merge::apply`].
    pub fn run(mut self) -> Result<Merged> {
        while let Some(action) = self.select() {
            self.apply(action)?;
        }
        Ok(std::mem::take(&mut self.merged))
    }

    /// Bytes that there were to copy when it began; 0 when that is done.
    pub fn demand(&self) -> u64 {
        self.copier.as_ref().map_or(0, |copier| copier.room.demand())
    }

    /// What it has done so far.
    pub fn merged(&self) -> &Merged {
        &self.merged
    }
}

impl Drop for Merge {
    fn drop(&mut self) {
        if let Some(mut copier) = self.copier.take() {
            copier.leave(|way| self.host.wait(way));
        }
    }
}
