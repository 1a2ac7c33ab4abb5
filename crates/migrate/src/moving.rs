//! The steps of a move, and what is decided between them.

use std::fmt;
use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::Duration;

use vmstrata_disk::merge::{CollectOptions, MergeFault, Orphan, collect};
use vmstrata_disk::snapshot::{
    MOVE_LABEL, SnapshotInfo, frozen_path, move_holds, note_left, now_ns, rename_backing,
};
use vmstrata_disk::{
    Disk, Extent, Format, LocalFiles, NewHome, OpenOptions, Opener as _, Role, directory_of, own_clusters,
    probe_layer, remove_second_name,
};
use vmstrata_store::{FileId, Gate, Planted};
use vmstrata_types::GuestRange;

use crate::chain::{Plan, PlannedLayer, check_room, names_of};
use crate::copy::{LayerCopy, Source, Unreadable, Whole, allocated, digest_at, flush_directory, flush_file};
use crate::error::{Error, Result};
use crate::follow::Order;
use crate::journal::{Copied, Journal, forget_moved, half_moved, note_moved};
use crate::requests::{Observed, Requests};
use crate::schedule::Growth;

/// Files, and bytes of them, that are flushed and read back together.
const BATCH: usize = 64;
const BATCH_BYTES: u64 = 256 << 20;
/// At the same time.
const ABREAST: usize = 8;
/// So many layers may be changed while they are copied, or snapshots be taken just before the disk stands on another.
const CHANGED_MAX: u32 = 64;

/// How a disk moves.
#[derive(Clone, Debug)]
pub struct MoveOptions {
    /// The target: a directory.
    pub to: PathBuf,
    /// For how long the source files are kept.
    pub keep: Duration,
    /// How the disk is opened.
    pub open: OpenOptions,
    /// What of a layer cannot be read becomes zeros, and is told by [`Report::unreadable`]; else it is an error.
    pub skip_unreadable: bool,
    /// So many bytes may be left when the guest begins to write to the target.
    pub rest: u64,
    /// In which order the chunks of a layer are copied. Layers are copied from the lowest up.
    pub order: Order,
}

impl MoveOptions {
    /// For how long source files are kept, unless said otherwise.
    pub const KEEP: Duration = Duration::from_secs(600);
    /// The longest.
    pub const KEEP_MAX: Duration = Duration::from_secs(366 * 86_400);

    /// To a directory, as is usual.
    pub fn new(to: PathBuf, open: OpenOptions) -> Self {
        let order = Order::Sequential;
        Self { to, keep: Self::KEEP, open, skip_unreadable: false, rest: 64 << 20, order }
    }
}

/// Where a move is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// The guest writes where it did; layers are copied.
    Copying,
    /// The guest writes to the target; what it had written last is copied.
    Rest,
    /// The disk needs its old directory no more.
    Whole,
}

/// What there is to say of a move.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Report {
    /// Where it is.
    pub phase: Phase,
    /// The disk's old path, and its new one.
    pub from: PathBuf,
    /// See there.
    pub to: PathBuf,
    /// Bytes that are left to be copied, about, with those that the guest is going to write meanwhile.
    pub left_bytes: u64,
    /// When the source files go, in ns since 1970; only of a disk that is whole.
    pub kept_until_ns: Option<u64>,
    /// Names of states that are in its history for the sake of the move only.
    pub froze: Vec<String>,
    /// Bytes a second that the guest may write at most, for the sake of the move.
    pub slowed_to: Option<u64>,
    /// Whether it is a raw image at its new path, without history.
    pub is_flat: bool,
    /// What could not be read, and was passed over.
    pub unreadable: Vec<Unreadable>,
}

/// Copies that threads of their own flush, compare and name while the next ones are made.
#[derive(Debug)]
struct Finishing {
    /// Each with the name that its copy gets.
    layers: Vec<(PlannedLayer, PathBuf)>,
    sent: u64,
    thread: Option<JoinHandle<Vec<Result<Whole>>>>,
}

/// Nobody else may find copies that are still being named.
impl Drop for Finishing {
    fn drop(&mut self) {
        let _ = self.thread.take().map(JoinHandle::join);
    }
}

impl Finishing {
    /// Of copies, each with what its copy stands on.
    fn begin(copies: Vec<Copy>) -> Self {
        let layers = copies.iter().map(|(layer, copy, _)| (layer.clone(), copy.to.clone())).collect();
        let sent = copies.iter().map(|(layer, copy, _)| copy.sent.min(layer.bytes)).sum();
        Self { layers, sent, thread: Some(thread::spawn(|| finish_all(copies))) }
    }

    fn end(mut self) -> Vec<(PlannedLayer, PathBuf, Result<Whole>)> {
        let joined = self.thread.take().expect("it ends once").join();
        let results = joined.unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        std::mem::take(&mut self.layers)
            .into_iter()
            .zip(results)
            .map(|((layer, to), result)| (layer, to, result))
            .collect()
    }
}

/// A copy, and what it stands on.
type Copy = (PlannedLayer, LayerCopy, Option<(PathBuf, Format)>);

fn finish_all(mut copies: Vec<Copy>) -> Vec<Result<Whole>> {
    let each = copies.len().div_ceil(ABREAST);
    thread::scope(|scope| {
        let part = |copies: &mut [Copy]| -> Vec<Result<Whole>> { copies.iter_mut().map(finish).collect() };
        let parts: Vec<_> = copies.chunks_mut(each).map(|copies| scope.spawn(move || part(copies))).collect();
        let joined = parts.into_iter().map(|part| part.join());
        joined.flat_map(|part| part.unwrap_or_else(|panic| std::panic::resume_unwind(panic))).collect()
    })
}

fn finish((_, copy, below): &mut Copy) -> Result<Whole> {
    let whole = copy.finish()?;
    copy.name(|part| match below {
        Some((below, format)) => Ok(rename_backing(part, below, *format)?),
        None => Ok(false),
    })?;
    Ok(whole)
}

/// A move under way, of either kind. Dropped, it can be gone on with.
pub trait Move: fmt::Debug + Send {
    /// Where it is.
    fn phase(&self) -> Phase;

    /// What there is to say of it.
    fn report(&self) -> Report;

    /// Does what comes next, writing about `most` bytes. Returns the bytes written to the target.
    ///
    /// # Errors
    /// Whatever stands in the way; the disk is sound.
    fn step(&mut self, most: u64) -> Result<u64>;

    /// What the guest does meanwhile.
    fn requests(&self) -> &Requests;
}

/// A move to another directory. What failed can be tried again.
#[derive(Debug)]
pub struct Moving {
    disk: Arc<Disk>,
    open: OpenOptions,
    /// The disk's new path, and the directory of that.
    to: PathBuf,
    directory: PathBuf,
    journal: Journal,
    /// What is left, as of which generation of the disk's layers.
    plan: (u64, Plan),
    current: Option<(PlannedLayer, LayerCopy)>,
    /// Read, and not yet flushed.
    read: Vec<(PlannedLayer, LayerCopy)>,
    /// Being flushed, compared and named.
    finishing: Option<Finishing>,
    /// See [`MoveOptions`].
    skips: bool,
    rest: u64,
    order: Order,
    observed: Observed,
    /// Bytes of the layer that was frozen last.
    frozen_bytes: Option<u64>,
    /// Bytes written by this process.
    sent: u64,
    growth: Growth,
    /// See [`CHANGED_MAX`].
    changed: u32,
}

impl Moving {
    /// Begins to move a disk in use, or goes on with that.
    ///
    /// # Errors
    /// A disk that cannot be moved, a target that is no directory of its own, has not the room, or has other files of these names.
    pub fn begin(disk: &Arc<Disk>, options: &MoveOptions) -> Result<Self> {
        let from = absolute(disk.path())?;
        let refused = |why: &str| Error::refused(&from, &options.to, why);
        if options.keep > MoveOptions::KEEP_MAX {
            return Err(refused("source files are kept for 366 days at most"));
        }
        let directory = options.to.canonicalize().map_err(|error| refused(&error.to_string()))?;
        if !directory.is_dir() {
            return Err(refused("that is no directory"));
        }
        if directory.parent().is_none() {
            return Err(refused("that is the host's root directory"));
        }
        if let Some(moving) = Self::resume(disk, &options.open)? {
            return match moving.phase() {
                _ if moving.directory == directory => {
                    Ok(Self { skips: options.skip_unreadable, order: options.order, ..moving })
                }
                Phase::Whole => {
                    moving.leave_source()?;
                    Self::begin(disk, options)
                }
                _ => Err(refused(&format!(
                    "it is on its way to {}: let it get there first",
                    moving.directory.display()
                ))),
            };
        }
        if directory_of(&from).canonicalize().is_ok_and(|old| old == directory) {
            return Err(refused("it is there"));
        }
        if disk.is_read_only() {
            return Err(refused("it is read-only"));
        }
        if disk.format() == Format::Raw {
            return Err(refused("it is raw: take a snapshot of it with --convert-raw first"));
        }
        let to = directory.join(from.file_name().ok_or_else(|| refused("its path names no file"))?);
        let journal = match Journal::find(&to)? {
            Some(journal) if journal.from == from => Some(journal),
            Some(journal) => {
                return Err(refused(&format!("{} is on its way there", journal.from.display())));
            }
            None if to.symlink_metadata().is_ok() => return Err(Error::Exists { path: to }),
            None => None,
        };
        let plan = Plan::with_generation(disk, &directory)?;
        let is_copied = |layer: &PlannedLayer| {
            let known = journal.as_ref().is_some_and(|journal| journal.copied.contains_key(&layer.from));
            known || is_likely_there(layer, &directory)
        };
        check_room(&plan.1, &directory, is_copied)?;
        undo_half_switch(disk, &from)?;
        let journal = journal.map_or_else(|| Journal::begin(&from, &to, options.keep.as_secs()), Ok)?;
        tracing::info!(disk = %from.display(), to = %to.display(), bytes = plan.1.bytes(), "moves");
        let mut moving = Self::new(disk, &options.open, (to, directory), journal);
        (moving.plan, moving.rest, moving.skips) = (plan, options.rest, options.skip_unreadable);
        moving.order = options.order;
        moving.growth = Growth::since(0, allocated(disk.path()));
        moving.forget_changed();
        Ok(moving)
    }

    /// The move that brought a disk to its path, while the source files are kept.
    ///
    /// # Errors
    /// A journal that cannot be read.
    pub fn resume(disk: &Arc<Disk>, open: &OpenOptions) -> Result<Option<Self>> {
        let to = absolute(disk.path())?;
        let Some(journal) = Journal::find(&to)? else { return Ok(None) };
        let directory =
            directory_of(&to).canonicalize().map_err(Error::of_file(&to, "find its directory"))?;
        let mut moving = Self::new(disk, open, (to, directory), journal);
        moving.look()?;
        moving.forget_changed();
        Ok(Some(moving))
    }

    /// Copies again what is another file than was copied by an earlier process, or before a merge, what stands on it, and what does not
    /// stand on the copy of what is below. Copies are made from the lowest layer up. Returns whether it forgot a copy.
    fn forget_changed(&mut self) -> bool {
        if self.journal.whole_ns.is_some() {
            return false;
        }
        let is_copied = |layer: &&PlannedLayer| {
            let copied = self.journal.copied.get(&layer.from).filter(|copied| copied.is_of(&layer.from));
            copied.is_some_and(|copied| self.can_be(layer, &copied.to).unwrap_or(false))
        };
        let first = self.plan.1.layers.iter().take_while(is_copied).count();
        let mut forgets = false;
        for layer in &self.plan.1.layers[first..] {
            if self.journal.copied.remove(&layer.from).is_some() {
                forgets = true;
                tracing::info!(layer = %layer.from.display(), "has changed since it was copied, or what it stands on: it is copied again");
            }
        }
        forgets
    }

    fn new(
        disk: &Arc<Disk>,
        open: &OpenOptions,
        (to, directory): (PathBuf, PathBuf),
        mut journal: Journal,
    ) -> Self {
        // Once the disk is whole, its layers at the target go their own way.
        if journal.whole_ns.is_none() {
            let is_there =
                |copied: &Copied| fs::metadata(&copied.to).is_ok_and(|about| about.len() == copied.len);
            journal.copied.retain(|_, copied| is_there(copied));
        }
        Self {
            disk: Arc::clone(disk),
            open: open.clone(),
            to,
            directory,
            journal,
            plan: (u64::MAX, Plan::default()),
            current: None,
            read: Vec::new(),
            finishing: None,
            skips: false,
            rest: 0,
            order: Order::Sequential,
            observed: Observed::of(disk),
            frozen_bytes: None,
            sent: 0,
            growth: Growth::default(),
            changed: 0,
        }
    }

    /// Looks at the disk's layers, if they are others by now.
    fn look(&mut self) -> Result<()> {
        if self.plan.0 != self.disk.generation() {
            self.plan = Plan::with_generation(&self.disk, &self.directory)?;
        }
        Ok(())
    }
}

impl Move for Moving {
    fn phase(&self) -> Phase {
        match self.journal.whole_ns {
            Some(_) => Phase::Whole,
            None if self.disk.path() == self.to => Phase::Rest,
            None => Phase::Copying,
        }
    }

    fn report(&self) -> Report {
        let is_left = |layer: &&PlannedLayer| !self.journal.copied.contains_key(&layer.from);
        let layers: u64 = self.plan.1.layers.iter().filter(is_left).map(|layer| layer.bytes).sum();
        let read = self.current.iter().chain(&self.read).map(|(layer, copy)| copy.sent.min(layer.bytes));
        let done = read.chain(self.finishing.iter().map(|finishing| finishing.sent)).sum();
        let left = layers.saturating_sub(done);
        let active = if self.phase() == Phase::Copying { allocated(self.disk.path()) } else { 0 };
        Report {
            phase: self.phase(),
            from: self.journal.from.clone(),
            to: self.to.clone(),
            left_bytes: self.growth.foreseen(self.sent, left, active, self.rest, self.frozen_bytes),
            kept_until_ns: self
                .journal
                .whole_ns
                .map(|time| time.saturating_add(self.journal.keep_s.saturating_mul(1_000_000_000))),
            froze: self.journal.froze.clone(),
            slowed_to: None,
            is_flat: false,
            unreadable: self.unreadable(),
        }
    }

    fn step(&mut self, most: u64) -> Result<u64> {
        self.observed.begin();
        if self.phase() == Phase::Rest && !self.journal.has_switched {
            flush_directory(&directory_of(&self.journal.from))?;
            self.journal.add_switched()?;
        }
        if let Some((layer, mut copy)) = self.current.take() {
            self.follow(&mut copy);
            // A copy that is given up here is found again by its file.
            let bytes = copy.go_on(most)?;
            self.sent += bytes;
            if copy.is_read() {
                self.read.push((layer, copy));
            } else {
                self.current = Some((layer, copy));
            }
            return Ok(bytes);
        }
        self.look()?;
        let batch: u64 = self.read.iter().map(|(_, copy)| copy.sent).sum();
        let next = self.next_layer();
        if self.read.len() >= BATCH || batch >= BATCH_BYTES || next.is_none() && !self.read.is_empty() {
            self.end_finishing()?;
            self.begin_finishing();
        } else if let Some(layer) = next {
            let begun = self.begin_layer(layer);
            begun.or_else(|error| self.unless_changed(error))?;
        } else if self.finishing.is_some() {
            self.end_finishing()?;
        } else {
            match self.phase() {
                Phase::Copying if self.is_much_left() => self.freeze()?,
                Phase::Copying => self.switch()?,
                Phase::Rest => self.stand()?,
                Phase::Whole => {}
            }
        }
        Ok(0)
    }

    fn requests(&self) -> &Requests {
        &self.observed.requests
    }
}

impl Moving {
    /// Shows a copy where in its layer the guest's requests are. Places that cannot be found say nothing.
    fn follow(&self, copy: &mut LayerCopy) {
        if self.order == Order::Sequential {
            return;
        }
        let places = self.observed.requests.take_places();
        let layers = if places.is_empty() { Vec::new() } else { self.disk.layers() };
        for (kind, range) in places {
            let first = GuestRange::new(range.start, range.len.min(1));
            let found = self.disk.extents_by_place(first, 1);
            let Ok([Extent { layer: Some(layer), host: Some(host), .. }]) = found.as_deref() else {
                continue;
            };
            if layers.get(layer.index()).is_some_and(|layer| layer.path == copy.from) {
                copy.guest(kind, host.get(), range.len);
            }
        }
    }

    fn next_layer(&self) -> Option<PlannedLayer> {
        let is_read = |layer: &PlannedLayer| {
            let finishing = self.finishing.iter().flat_map(|finishing| &finishing.layers);
            let mut read = self.read.iter().map(|(layer, _)| layer).chain(finishing.map(|(layer, _)| layer));
            read.any(|other| other.from == layer.from)
        };
        let is_left =
            |layer: &&PlannedLayer| !self.journal.copied.contains_key(&layer.from) && !is_read(layer);
        self.plan.1.layers.iter().find(is_left).cloned()
    }

    fn begin_layer(&mut self, layer: PlannedLayer) -> Result<()> {
        let mut digest = None;
        for to in names_of(&layer.from, &self.directory) {
            if self.read.iter().any(|(_, copy)| copy.to == to) || self.is_finishing(&to) {
                continue;
            }
            let Ok(there) = to.symlink_metadata() else {
                let copy = LayerCopy::begin(&layer.from, &to, (self.order, self.skips))?;
                self.current = Some((layer, copy));
                return Ok(());
            };
            // Of another name, another directory's layer, or somebody's.
            let about =
                fs::metadata(&layer.from).map_err(Error::of_file(&layer.from, "examine the layer"))?;
            let is_like = there.is_file() && there.len() == about.len() && !self.has_copied(&to);
            if !is_like || !self.can_be(&layer, &to)? {
                continue;
            }
            if digest.is_none() {
                digest = Some(digest_at(&layer.from)?);
            }
            let there = digest_at(&to)?;
            if digest.as_ref() == Some(&there) {
                tracing::info!(layer = %to.display(), "is there already");
                // A move that was killed, or whoever made it, may not have flushed it.
                flush_file(&to)?;
                let (source, unreadable) = (Some(Source::of(&about)), Vec::new());
                let copied = Copied { to, len: about.len(), digest: there, source, unreadable };
                return self.journal.add_copied(vec![(layer.from, copied, 0)]);
            }
        }
        unreachable!("there are names without end")
    }

    /// Whether a file at the target may take the place of a layer if it has the same bytes: it stands on the copy of what the layer
    /// stands on, and nobody writes it.
    fn can_be(&self, layer: &PlannedLayer, to: &Path) -> Result<bool> {
        let gate = Gate::unrestricted();
        if LocalFiles.open(to, Role::Frozen, &gate).is_err() {
            return Ok(false);
        }
        let Some((below, _)) = &layer.below else { return Ok(true) };
        let wanted = self.copy_of(below, &self.read);
        let found = probe_layer(to, Some(layer.format))?.backing_path;
        let is_there = |found: &PathBuf| {
            directory_of(found).canonicalize().is_ok_and(|directory| directory == self.directory)
        };
        Ok(found.is_some_and(|found| found.file_name() == wanted.file_name() && is_there(&found)))
    }

    /// Whether a copy that is being named gets that name.
    fn is_finishing(&self, to: &Path) -> bool {
        self.finishing.iter().flat_map(|finishing| &finishing.layers).any(|(_, named)| named == to)
    }

    /// Whether this move made the file.
    fn has_copied(&self, path: &Path) -> bool {
        self.journal.copied.values().any(|copied| copied.to == path)
    }

    /// The copy of a layer, or the layer itself where it lies at the target.
    fn copy_of(&self, layer: &Path, read: &[(PlannedLayer, LayerCopy)]) -> PathBuf {
        let copied = self.journal.copied.get(layer).map(|copied| copied.to.clone());
        let reading = || read.iter().find(|(other, _)| other.from == layer).map(|(_, copy)| copy.to.clone());
        let finishing = || {
            let mut layers = self.finishing.iter().flat_map(|finishing| &finishing.layers);
            layers.find(|(other, _)| other.from == layer).map(|(_, to)| to.clone())
        };
        copied.or_else(reading).or_else(finishing).unwrap_or_else(|| layer.to_owned())
    }

    fn unreadable(&self) -> Vec<Unreadable> {
        let of = |(layer, copied): (&PathBuf, &Copied)| {
            let bad = |&(offset, len): &(u64, u64)| Unreadable { file: layer.clone(), offset, len };
            copied.unreadable.iter().map(bad).collect::<Vec<_>>()
        };
        self.journal.copied.iter().flat_map(of).collect()
    }

    /// Has the copies that were read flushed, compared and named.
    fn begin_finishing(&mut self) {
        let read = std::mem::take(&mut self.read);
        let below: Vec<_> = read
            .iter()
            .map(|(layer, _)| {
                layer.below.as_ref().map(|(below, format)| (self.copy_of(below, &read), *format))
            })
            .collect();
        let copies = read.into_iter().zip(below).map(|((layer, copy), below)| (layer, copy, below)).collect();
        self.finishing = Some(Finishing::begin(copies));
    }

    /// Waits for them, and notes them.
    fn end_finishing(&mut self) -> Result<()> {
        let Some(finishing) = self.finishing.take() else { return Ok(()) };
        let (mut done, mut failed) = (Vec::new(), None);
        for (layer, to, result) in finishing.end() {
            match result {
                Ok(Whole { digest, len, sent, source, unreadable }) => {
                    let unreadable = unreadable.iter().map(|bad| (bad.offset, bad.len)).collect();
                    done.push((
                        layer.from,
                        Copied { to, len, digest, source: Some(source), unreadable },
                        sent,
                    ));
                }
                // Such as by a job that gives old layers their indexes: it is read again.
                Err(Error::Changed { layer }) if self.changed < CHANGED_MAX => {
                    self.changed += 1;
                    tracing::info!(layer = %layer.display(), "was changed while it was copied: it is copied again");
                }
                Err(error) => failed = failed.or(Some(error)),
            }
        }
        flush_directory(&self.directory)?;
        self.journal.add_copied(done)?;
        failed.map_or(Ok(()), Err)
    }

    /// Whether freezing what takes the writes, and copying it, leaves less.
    fn is_much_left(&self) -> bool {
        let left = allocated(self.disk.path());
        left > self.rest && self.frozen_bytes.is_none_or(|before| left < before / 2)
    }

    /// A state that is made for the sake of the move; the journal has it.
    fn state(&mut self) -> Result<SnapshotInfo> {
        let info = new_state();
        self.journal.add_froze(&info.name)?;
        Ok(info)
    }

    fn freeze(&mut self) -> Result<()> {
        let info = self.state()?;
        let taken = self.disk.snapshot(&info)?;
        self.frozen_bytes = Some(allocated(&taken.layer));
        self.growth = Growth::since(self.sent, 0);
        Ok(())
    }

    /// Has the guest write to the target from now on.
    fn switch(&mut self) -> Result<()> {
        let from = self.journal.from.clone();
        check_room(&self.plan.1, &self.directory, |layer| self.journal.copied.contains_key(&layer.from))?;
        let info = self.state()?;
        let frozen = frozen_path(&from, &info.name, Format::Qcow2).expect("it names a file");
        let old = directory_of(&from);
        let mut options = self.open.clone();
        options.allow_backing.push(old.clone());
        let home = NewHome { overlay: self.to.clone(), frozen: frozen.clone(), options };
        // First: a process that is killed after that leaves what the next move must find, wherever that goes.
        note_moved(&from, &self.to)?;
        let made = fs::hard_link(&from, &frozen)
            .map_err(Error::of_file(&frozen, "give the disk's file another name"))
            .and_then(|()| flush_directory(&old))
            .and_then(|()| Ok(home.make(&self.disk, &info)?));
        let switched = made.and_then(|()| {
            self.disk.move_to(&home, || {
                fs::remove_file(&from).map_err(Error::of_file(&from, "remove the disk's old name"))?;
                if Planted::LateRemoval.is_there() { Ok(()) } else { flush_directory(&old) }
            })
        });
        match switched {
            Ok(pause) => {
                // What fails is counted: the layer then goes without an index.
                let _ = self.disk.finalize();
                // Of an earlier move from there.
                forget_moved(&self.to);
                tracing::info!(disk = %self.to.display(), from = %from.display(), pause_us = pause.as_micros(), "writes go there from now on");
                Ok(())
            }
            Err(error) => {
                // While the overlay is there, what it stands on says that it is not the disk.
                if from.symlink_metadata().is_ok() {
                    // If this fails, the next move does it.
                    if let Err(undo) = undo_half_switch(&self.disk, &from) {
                        tracing::warn!(disk = %from.display(), %error, "the disk was not switched, and what the switch made is still there");
                        return Err(undo);
                    }
                }
                self.unless_changed(error)
            }
        }
    }

    /// A snapshot that was taken meanwhile is no error, nor is a layer whose file a merge has removed: the disk's layers are looked at again.
    fn unless_changed(&mut self, error: Error) -> Result<()> {
        let is_change = match &error {
            Error::Disk(error) if matches!(error.fault(), Some(MergeFault::LayersChanged)) => true,
            error => error.is_missing_file() && self.disk.generation() != self.plan.0,
        };
        if !is_change || self.changed == CHANGED_MAX {
            return Err(error);
        }
        self.changed += 1;
        Ok(())
    }

    /// Has what lies at the target stand on the copies alone.
    fn stand(&mut self) -> Result<()> {
        if let Some((layer, from)) = self.plan.1.stands_elsewhere.clone()
            && !Planted::HastyWhole.is_there()
        {
            let format = self.plan.1.layers.iter().find(|layer| layer.from == from).map(|layer| layer.format);
            let copy = self.journal.copied.get(&from).expect("all are copied");
            let rebased =
                self.disk.rebase(&layer, Some(&from), (&copy.to, format.expect("it is to be copied")));
            return match rebased {
                // A layer that changed while it was copied, and was merged away since: what stands on its copy has no base.
                Err(error) if error.is_missing_file() && self.forget_changed() => Ok(()),
                rebased => rebased.or_else(|error| self.unless_changed(error.into())),
            };
        }
        for (layer, copied) in &self.journal.copied {
            move_holds(layer, &copied.to)?;
        }
        self.journal.add_whole(now_ns())?;
        tracing::info!(disk = %self.to.display(), "has moved");
        Ok(())
    }

    /// Removes the source files in the disk's old directory that nobody else needs. Returns all of them, with the reason why one stays.
    ///
    /// # Errors
    /// A directory that cannot be read. It can be tried again.
    ///
    /// # Panics
    /// Before the disk is whole.
    pub fn let_go(self) -> Result<Vec<Orphan>> {
        let from = self.journal.from.clone();
        let open = OpenOptions { read_only: true, ..self.open.clone() };
        self.leave_source()?;
        Ok(collect(&from, &CollectOptions { open, ..CollectOptions::default() })?)
    }

    /// Leaves the source files where they are: `vmstrata gc` of the old path removes them.
    ///
    /// # Errors
    /// A journal that cannot be removed.
    pub fn leave_source(self) -> Result<()> {
        assert_eq!(self.phase(), Phase::Whole, "the disk needs them");
        let mut left: Vec<(u64, PathBuf)> = Vec::new();
        for from in self.journal.copied.keys() {
            use std::os::unix::fs::MetadataExt as _;
            let modified = fs::metadata(from)
                .map_or(0, |about| about.mtime() as u64 * 1_000_000_000 + about.mtime_nsec() as u64);
            left.push((modified, from.clone()));
        }
        left.sort();
        let newest_first: Vec<PathBuf> = left.into_iter().rev().map(|(_, path)| path).collect();
        note_left(&self.journal.from, &newest_first);
        self.journal.remove()
    }
}

/// Whether the target has a file like the layer.
fn is_likely_there(layer: &PlannedLayer, to: &Path) -> bool {
    let there = to.join(layer.from.file_name().unwrap_or_default());
    let len = |path: &Path| fs::metadata(path).ok().map(|about| about.len());
    len(&there).is_some() && len(&there) == len(&layer.from)
}

/// Takes back what a switch left that did not come to its end: the old path is the disk still.
pub(crate) fn undo_half_switch(disk: &Disk, from: &Path) -> Result<()> {
    let Some(to) = half_moved(from)? else {
        forget_moved(from);
        return Ok(());
    };
    let to = &*to;
    let action = "remove what a killed move left";
    if to.symlink_metadata().is_ok() {
        // It must be the overlay that nobody ever wrote to.
        let mut is_empty = true;
        own_clusters(to, &Gate::unrestricted(), |_| is_empty = false)?;
        if !is_empty {
            return Err(Error::Exists { path: to.to_owned() });
        }
        fs::remove_file(to).map_err(Error::of_file(to, action))?;
    }
    // Also where an earlier try removed it: after a power failure it would be back, and no note would name it.
    flush_directory(&directory_of(to))?;
    // Snapshots may have been taken since: the second name may be that of a layer by now.
    let chain: Vec<PathBuf> = disk.layers().into_iter().map(|layer| layer.path).collect();
    let files: Vec<FileId> = chain.iter().filter_map(|path| FileId::at(path)).collect();
    let entries = fs::read_dir(directory_of(from)).map_err(Error::of_file(from, "read its directory"))?;
    for entry in entries.flatten() {
        let path = entry.path();
        let is_ours = entry.file_name().to_string_lossy().contains(".move-");
        if is_ours && !chain.contains(&path) && FileId::at(&path).is_some_and(|file| files.contains(&file)) {
            remove_second_name(&path).map_err(Error::of_file(&path, action))?;
        }
    }
    flush_directory(&directory_of(from))?;
    forget_moved(from);
    Ok(())
}

pub(crate) fn remove_if_there(path: &Path) -> Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != ErrorKind::NotFound => {
            Err(Error::of_file(path, "remove what a switch left")(error))
        }
        _ => Ok(()),
    }
}

/// A state that is made for the sake of a move.
pub(crate) fn new_state() -> SnapshotInfo {
    let taken_ns = now_ns();
    let labels = vec![(MOVE_LABEL.to_owned(), String::new())];
    SnapshotInfo { name: format!("move-{taken_ns}"), taken_ns, labels, ..SnapshotInfo::default() }
}

pub(crate) fn absolute(path: &Path) -> Result<PathBuf> {
    std::path::absolute(path).map_err(Error::of_file(path, "find its directory"))
}
