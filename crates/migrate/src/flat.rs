//! A disk in use moves to a flat copy of it: a raw file, a block device, or an export of any NBD server. Its history stays behind.
//!
//! ```text
//!   all      the disk is frozen, and what it reads is written to the target, while the guest goes on
//!   passes   what takes the writes is frozen, and what it has is copied; again while that halves what is left
//!   slowed   where it does not, the guest's writes are slowed: to half of the rate of the copy, then to a quarter, and so on
//!   switch   writes are held; what is left is copied, flushed and read back; from then on the guest writes to the target
//! ```
//!
//! The layers above a state say what was written since. So a pass copies the state that was frozen for it, never a later one.
//!
//! After a kill the target holds some of the disk's bytes. The next run compares the whole target with the disk and sends what differs, so
//! it needs no record of what the killed run had sent.

use std::fs;
use std::io;
use std::num::NonZeroU64;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::channel;
use std::thread;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use rustix::fs::Advice;
use vmstrata_disk::snapshot::{frozen_path, note_left};
use vmstrata_disk::{
    Disk, FlatHome, Format, LayerInfo, OpenOptions, Opened, Opener as _, Pace, Role, directory_of,
    own_clusters,
};
use vmstrata_nbd::{Files, Uri};
use vmstrata_store::{FileId, Gate, LocalFile, Segment, Store, is_zero, on_threads};
use vmstrata_types::{GuestOffset, GuestRange, HostOffset};

use crate::copy::{Unreadable, allocated, flush_directory, read_around};
use crate::error::{Error, Result};
use crate::journal::{Sending, forget_moved, note_moved};
use crate::moving::{Move, Phase, Report, absolute, new_state, undo_half_switch};

/// Bytes that are read and written at a time.
const PART: u64 = 256 << 10;
/// Parts that are under way at the same time.
const ABREAST: usize = 8;
/// Of these bytes, each piece is zeroed at the target rather than written if it is all zeros.
const PIECE: usize = 64 << 10;
/// Bytes that are flushed and read back together.
const BATCH: u64 = 256 << 20;
/// So much is looked at in one step, where nothing is to be written.
const LOOK: u64 = 64 << 20;
/// The same of what is known to be zeros.
const ZERO_STEP: u64 = 1 << 30;
/// Extents that are asked for at a time.
const EXTENTS: usize = 4096;
/// For how long copying what is left may hold writes, as planned.
const HELD: Duration = Duration::from_millis(4);
/// A target that takes longer than this is given up, and the guest goes on.
const HELD_MAX: Duration = Duration::from_secs(1);
/// So little is left at a switch in any case.
const LEFT_MIN: u64 = 256 << 10;
/// Bytes of a pass from which its rate is taken.
const RATE_BYTES: u64 = 1 << 20;
/// Writes of a guest are not slowed below this, in bytes a second.
const PACE_MIN: u64 = 256 << 10;
/// After so many passes the disk is said to be in the way.
const PASSES_MAX: u32 = 64;

/// Whether `to` is a flat target: an address, a device, or a file with the name of a raw image.
pub fn is_flat(to: &Path) -> bool {
    use std::os::unix::fs::FileTypeExt as _;
    let is_device = || fs::metadata(to).is_ok_and(|about| about.file_type().is_block_device());
    let is_raw = || to.extension().is_some_and(|end| end == "raw" || end == "img") && !to.is_dir();
    Uri::is_meant(to) || is_device() || is_raw()
}

/// How a disk moves to a flat copy.
#[derive(Clone, Debug)]
pub struct FlatOptions {
    /// The target.
    pub to: PathBuf,
    /// How the disk is opened.
    pub open: OpenOptions,
    /// A device or an export may have something on it, which is lost.
    pub overwrite: bool,
    /// As in [`crate::MoveOptions`].
    pub skip_unreadable: bool,
}

/// See the module documentation. After an error it is dropped, and begun again.
#[derive(Debug)]
pub struct FlatMove {
    disk: Arc<Disk>,
    open: OpenOptions,
    from: PathBuf,
    to: PathBuf,
    size: u64,
    phase: Phase,
    /// The target, until it is the disk's.
    target: Option<Opened>,
    copy: Copy,
    note: Sending,
    /// Of the first pass.
    how: How,
    /// `None` until the first begins.
    pass: Option<Pass>,
    /// Bytes a second that were copied in the last pass that tells.
    rate: u64,
    /// Bytes a second that the guest may write.
    pace: Option<u64>,
}

impl Drop for FlatMove {
    fn drop(&mut self) {
        self.let_run();
    }
}

/// What is copied before what takes the writes is frozen again.
#[derive(Debug)]
struct Pass {
    number: u32,
    how: How,
    /// The state that is copied: what lies above it is not.
    state: Arc<Disk>,
    /// The first one has all of the disk, from here on.
    next: Option<GuestOffset>,
    /// What it has found, the last bytes first.
    wanted: Vec<Wanted>,
    /// Bytes that it began with, as far as they were counted then, and those that are done.
    bytes: u64,
    done: u64,
    began: Instant,
}

/// How bytes come to the copy.
#[derive(Clone, Copy, Debug)]
struct How {
    /// Only what differs is sent.
    compares: bool,
    /// Zeros are written: the copy may have something else there.
    zeroes: bool,
}

impl How {
    /// What was written since the pass before.
    const AGAIN: Self = Self { compares: false, zeroes: true };
}

#[derive(Clone, Copy, Debug)]
struct Wanted {
    range: GuestRange,
    reads_zero: bool,
}

impl Pass {
    /// Over all of a state.
    fn of_all(state: Arc<Disk>, how: How) -> Self {
        let bytes = state.layers().iter().map(|layer| allocated(&layer.path)).sum();
        let (next, began) = (Some(GuestOffset::ZERO), Instant::now());
        Self { number: 0, how, state, next, wanted: Vec::new(), bytes, done: 0, began }
    }

    /// Over what its newest layers have.
    fn of_layers(number: u32, state: Arc<Disk>, layers: &[PathBuf]) -> Result<Self> {
        let mut own = Vec::new();
        for layer in layers {
            own_clusters(layer, &Gate::unrestricted(), |cluster| own.push(cluster.range))?;
        }
        own.sort_by_key(|range| range.start);
        // Each byte once: what is written twice does not read as the first time.
        let mut ranges: Vec<GuestRange> = Vec::new();
        for range in own {
            match ranges.last_mut() {
                Some(last) if range.start <= last.end() => {
                    last.len = last.len.max(range.end() - last.start);
                }
                _ => ranges.push(range),
            }
        }
        let wanted: Vec<Wanted> =
            ranges.into_iter().rev().map(|range| Wanted { range, reads_zero: false }).collect();
        let bytes = wanted.iter().map(|wanted| wanted.range.len).sum();
        Ok(Self { number, how: How::AGAIN, state, next: None, wanted, bytes, done: 0, began: Instant::now() })
    }

    /// The next bytes of the pass: at most so many, if they must be read.
    fn next(&mut self, most: u64) -> Result<Option<Wanted>> {
        let How { compares, zeroes } = self.how;
        let size = self.state.size();
        while self.wanted.is_empty() {
            let Some(next) = self.next.filter(|next| next.get() < size) else { return Ok(None) };
            let rest = GuestRange::new(next, size - next.get());
            let extents = self.state.extents(rest, EXTENTS)?;
            self.next = extents.last().map(|last| last.range.end());
            let wanted = extents
                .into_iter()
                .map(|extent| Wanted { range: extent.range, reads_zero: extent.kind.reads_zero() })
                .filter(|wanted| zeroes || !wanted.reads_zero);
            self.wanted.extend(wanted);
            self.wanted.reverse();
        }
        let wanted = self.wanted.last_mut().expect("it is not empty");
        let Wanted { range, reads_zero } = *wanted;
        let most = if reads_zero && !compares { ZERO_STEP } else { most };
        let part = GuestRange::new(range.start, range.len.min(most));
        wanted.range = GuestRange::new(part.end(), range.len - part.len);
        if wanted.range.len == 0 {
            self.wanted.pop();
        }
        if !reads_zero {
            self.done += part.len;
        }
        Ok(Some(Wanted { range: part, reads_zero }))
    }
}

/// The copy, and what was written to it and not yet read back.
#[derive(Debug)]
struct Copy {
    store: Arc<dyn Store>,
    name: PathBuf,
    /// What of the disk cannot be read is passed over.
    skips: bool,
    taken: Taken,
}

/// What was done to a copy.
#[derive(Debug, Default)]
struct Taken {
    written: Vec<(GuestRange, blake3::Hash)>,
    bytes: u64,
    unreadable: Vec<Unreadable>,
}

impl Taken {
    fn add(&mut self, other: Self) {
        self.written.extend(other.written);
        self.bytes += other.bytes;
        self.unreadable.extend(other.unreadable);
    }
}

/// Does something with each of these, several at the same time, and returns what became of it on each thread.
fn abreast<T: Send, R: Send + Default>(
    parts: Vec<T>,
    work: impl Fn(T, &mut R) -> Result<()> + Sync,
) -> Result<Vec<R>> {
    let threads = parts.len().min(ABREAST);
    let left = Mutex::new(parts.into_iter());
    let on_thread = || {
        let mut done = R::default();
        while let Some(part) = { left.lock().next() } {
            work(part, &mut done)?;
        }
        Ok(done)
    };
    on_threads(threads, on_thread).into_iter().collect()
}

impl Copy {
    fn new(store: &Arc<dyn Store>, name: &Path, skips: bool) -> Self {
        Self { store: Arc::clone(store), name: name.to_owned(), skips, taken: Taken::default() }
    }

    /// Brings parts of the disk to the copy. Returns the bytes written.
    fn take(&mut self, disk: &Disk, parts: Vec<Wanted>, how: How) -> Result<u64> {
        let before = self.taken.bytes;
        let each = |Wanted { range, reads_zero }: Wanted, taken: &mut Taken| {
            if reads_zero && !how.compares {
                return self.zero(range, taken);
            }
            self.take_part(disk, range, how, taken)
        };
        let all = abreast(parts, each)?;
        all.into_iter().for_each(|taken| self.taken.add(taken));
        Ok(self.taken.bytes - before)
    }

    fn take_part(
        &self,
        disk: &Disk,
        range: GuestRange,
        How { compares, zeroes }: How,
        taken: &mut Taken,
    ) -> Result<()> {
        let mut bytes = vec![0; range.len as usize];
        let read = |into: &mut [u8], at| disk.read(GuestOffset::new(at), &[Segment::from_mut(into)]);
        if self.skips {
            taken.unreadable.extend(read_around(disk.path(), &mut bytes, range.start.get(), read));
        } else {
            read(&mut bytes, range.start.get())?;
        }
        let mut old = Vec::new();
        if compares {
            old.resize(bytes.len(), 0);
            self.read(&mut old, range)?;
        }
        let mut done = 0;
        while done < bytes.len() {
            let piece = |at: usize| {
                let piece = at..(at + PIECE).min(bytes.len());
                match is_zero(&bytes[piece.clone()]) {
                    _ if compares && old[piece.clone()] == bytes[piece.clone()] => Piece::Same,
                    true => Piece::Zero,
                    false => Piece::Data,
                }
            };
            let (what, mut end) = (piece(done), done);
            while end < bytes.len() && piece(end) == what {
                end = (end + PIECE).min(bytes.len());
            }
            let at = range.start + done as u64;
            match what {
                Piece::Data => self.write(&bytes[done..end], at, taken)?,
                Piece::Zero if zeroes => self.zero(GuestRange::new(at, (end - done) as u64), taken)?,
                Piece::Zero | Piece::Same => {}
            }
            done = end;
        }
        Ok(())
    }

    fn write(&self, bytes: &[u8], at: GuestOffset, taken: &mut Taken) -> Result<()> {
        let wrote = self.store.write_all(bytes, HostOffset::new(at.get()));
        wrote.map_err(Error::at_offset(&self.name, "write the copy", at.get()))?;
        taken.written.push((GuestRange::new(at, bytes.len() as u64), blake3::hash(bytes)));
        taken.bytes += bytes.len() as u64;
        Ok(())
    }

    /// Zeros a range. That is not read back: where it is not the host's or the server's doing, it was written.
    fn zero(&self, range: GuestRange, taken: &mut Taken) -> Result<()> {
        if self.store.punch_hole(HostOffset::new(range.start.get()), range.len).is_ok() {
            return Ok(());
        }
        let zeros = vec![0; PART.min(range.len) as usize];
        let mut done = 0;
        while done < range.len {
            let part = PART.min(range.len - done);
            self.write(&zeros[..part as usize], range.start + done, taken)?;
            done += part;
        }
        Ok(())
    }

    /// Reads from the copy's storage: what is in memory proves nothing.
    fn read(&self, into: &mut [u8], range: GuestRange) -> Result<()> {
        let at = range.start.get();
        if let Some(file) = self.store.local().and_then(LocalFile::raw) {
            let _ = rustix::fs::fadvise(file, at, NonZeroU64::new(range.len), Advice::DontNeed);
        }
        let read = self.store.read_exact(into, HostOffset::new(at));
        read.map_err(Error::at_offset(&self.name, "read the copy", at))
    }

    /// Brings what was written to stable storage, and makes sure that it reads so.
    fn finish(&mut self) -> Result<()> {
        self.store.flush().map_err(Error::of_file(&self.name, "flush the copy"))?;
        self.taken.bytes = 0;
        let written = std::mem::take(&mut self.taken.written);
        let each = |(range, digest): (GuestRange, blake3::Hash), bytes: &mut Vec<u8>| {
            bytes.resize(range.len as usize, 0);
            self.read(bytes, range)?;
            if blake3::hash(bytes) != digest {
                return Err(Error::Untrue { copy: self.name.clone(), offset: range.start.get() });
            }
            Ok(())
        };
        abreast(written, each).map(drop)
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Piece {
    Data,
    Zero,
    /// The copy has it.
    Same,
}

impl FlatMove {
    /// Begins to move a disk in use, or goes on with that.
    ///
    /// # Errors
    /// A disk that cannot be moved; a target that is too small, in use, or may have something on it.
    pub fn begin(disk: &Arc<Disk>, options: &FlatOptions) -> Result<Self> {
        let from = absolute(disk.path())?;
        let to = if Uri::is_meant(&options.to) { options.to.clone() } else { absolute(&options.to)? };
        let refused = |why: &str| Error::Refused { disk: from.clone(), to: to.clone(), why: why.to_owned() };
        if disk.is_read_only() {
            return Err(refused("it is read-only"));
        }
        if disk.format() == Format::Raw {
            return Err(refused("it is flat already: take a snapshot of it with --convert-raw first"));
        }
        if disk.layers().iter().any(|layer| vmstrata_disk::is_published(&layer.path)) {
            return Err(refused("it is a tiered disk: `vmstrata tier detach` makes it an ordinary one"));
        }
        let size = disk.size();
        let note = Sending::find(&from)?;
        let is_begun = note.as_ref().is_some_and(|note| note.to == to);
        let is_new = !Uri::is_meant(&to) && to.symlink_metadata().is_err();
        let is_file = is_new || fs::metadata(&to).is_ok_and(|about| about.is_file());
        if !is_new && !is_begun {
            if is_file {
                return Err(Error::Exists { path: to });
            }
            if !options.overwrite {
                return Err(refused("everything on it would be overwritten: say so with --yes"));
            }
        }
        undo_half_switch(disk, &from)?;
        if is_new {
            let made = fs::File::options().write(true).create_new(true).open(&to).and_then(|file| {
                vmstrata_disk::copy_access(&from, &file).map_err(io::Error::other)?;
                file.set_len(size)?;
                file.sync_all()
            });
            made.map_err(Error::of_file(&to, "make the copy"))?;
            flush_directory(&directory_of(&to))?;
        }
        let cache = Role::Active(options.open.cache);
        let target = Files::new(Arc::clone(&options.open.opener)).open(&to, cache, &Gate::unrestricted())?;
        let len = target.store.len().map_err(Error::of_file(&to, "find its size"))?;
        if len < size {
            return Err(Error::NoRoom { to, free: len, needed: size });
        }
        if len > size && is_file {
            return Err(Error::Exists { path: to });
        }
        let note = match note {
            Some(note) if is_begun => note,
            _ => Sending::begin(&from, &to)?,
        };
        tracing::info!(disk = %from.display(), to = %to.display(), goes_on = is_begun, "moves to a flat copy");
        Ok(Self {
            disk: Arc::clone(disk),
            open: options.open.clone(),
            size,
            phase: Phase::Copying,
            copy: Copy::new(&target.store, &to, options.skip_unreadable),
            from,
            to,
            target: Some(target),
            note,
            how: How { compares: is_begun && !is_new, zeroes: !is_new },
            pass: None,
            rate: 0,
            pace: None,
        })
    }
}

impl Move for FlatMove {
    fn phase(&self) -> Phase {
        self.phase
    }

    fn report(&self) -> Report {
        Report {
            phase: self.phase,
            from: self.from.clone(),
            to: self.to.clone(),
            left_bytes: match &self.pass {
                _ if self.phase == Phase::Whole => 0,
                Some(pass) => pass.bytes.saturating_sub(pass.done),
                None => self.disk.layers().iter().map(|layer| allocated(&layer.path)).sum(),
            },
            kept_until_ns: None,
            froze: self.note.froze.clone(),
            slowed_to: self.pace,
            is_flat: true,
            unreadable: self.copy.taken.unreadable.clone(),
        }
    }

    fn step(&mut self, most: u64) -> Result<u64> {
        if self.phase == Phase::Whole {
            return Ok(0);
        }
        if self.disk.size() != self.size {
            return Err(self.refused("its size has changed since the move began: begin again"));
        }
        let Some(pass) = &mut self.pass else {
            self.freeze()?;
            self.pass = Some(Pass::of_all(self.newest_state()?, self.how));
            return Ok(0);
        };
        if self.copy.taken.bytes >= BATCH {
            self.copy.finish()?;
        }
        let (mut parts, mut read, mut looked, how) = (Vec::new(), 0, 0, pass.how);
        let mut is_over = false;
        while read < most && looked < LOOK && !is_over {
            match pass.next((most - read).max(PIECE as u64).min(PART))? {
                Some(part) => {
                    looked += part.range.len;
                    read += if part.reads_zero && !how.compares { 0 } else { part.range.len };
                    parts.push(part);
                }
                None => is_over = true,
            }
        }
        let written = self.copy.take(&pass.state, parts, how)?;
        if is_over {
            self.copy.finish()?;
            self.end_pass()?;
        }
        Ok(written)
    }
}

impl FlatMove {
    fn refused(&self, why: &str) -> Error {
        Error::Refused { disk: self.from.clone(), to: self.to.clone(), why: why.to_owned() }
    }

    /// Decides what comes after a pass.
    fn end_pass(&mut self) -> Result<()> {
        let Some(Pass { number, bytes, done, began, .. }) = self.pass else { return Ok(()) };
        let left = bytes_of(&self.disk.own_ranges()?);
        let took = began.elapsed().max(Duration::from_millis(1));
        // Scattered bytes are copied more slowly than those of the first pass; a pass of few bytes tells nothing.
        if done >= RATE_BYTES || self.rate == 0 {
            self.rate = (done as f64 / took.as_secs_f64()) as u64;
        }
        let most = ((self.rate as f64 * HELD.as_secs_f64()) as u64).max(LEFT_MIN);
        if left <= most {
            return self.switch();
        }
        if number >= PASSES_MAX {
            let why = "it is written to faster than it can be copied, however much its writes are slowed";
            return Err(self.refused(why));
        }
        // What the first pass leaves is not what the guest writes while little is copied.
        if number > 0 && left > bytes / 2 {
            self.slow();
        }
        self.next_pass()
    }

    fn next_pass(&mut self) -> Result<()> {
        let Some(Pass { number, state, .. }) = self.pass.take() else { return Ok(()) };
        self.freeze()?;
        let next = self.newest_state()?;
        // Others may have taken snapshots, too.
        let mut layers: Vec<PathBuf> = next.layers().into_iter().map(|layer| layer.path).collect();
        let file = FileId::at(state.path());
        let at = layers.iter().position(|layer| FileId::at(layer) == file);
        layers.drain(..=at.ok_or_else(|| self.refused("its layers were merged meanwhile: begin again"))?);
        self.pass = Some(Pass::of_layers(number + 1, next, &layers)?);
        Ok(())
    }

    /// The state below what takes the writes. Its tables are in its files.
    fn newest_state(&self) -> Result<Arc<Disk>> {
        let (_, layers) = self.disk.whole_layers();
        let newest = newest_frozen(layers).ok_or_else(|| self.refused("it has no frozen layer"))?;
        Ok(self.disk.open_state(&newest)?)
    }

    /// Slows the guest's writes to half of what the copy does, and to half of that with each time.
    fn slow(&mut self) {
        let pace = (self.pace.unwrap_or(self.rate) / 2).max(PACE_MIN);
        self.pace = Some(pace);
        self.disk.pace(Pace::BytesPerSecond(pace));
        tracing::info!(disk = %self.from.display(), bytes_per_second = pace, "its writes are slowed, so that its move ends");
    }

    fn let_run(&mut self) {
        if self.pace.take().is_some() {
            self.disk.pace(Pace::Free);
        }
    }

    /// Freezes what takes the writes.
    fn freeze(&mut self) -> Result<()> {
        let info = new_state();
        self.note.add_froze(&info.name)?;
        self.disk.snapshot(&info)?;
        Ok(())
    }

    /// Has the guest write to the target from now on.
    fn switch(&mut self) -> Result<()> {
        let Some(target) = self.target.take() else { return Err(self.refused("begin again")) };
        let identity = target.identity;
        let mut newest_first: Vec<PathBuf> =
            self.disk.layers().into_iter().rev().map(|layer| layer.path).collect();
        let left = frozen_path(&self.from, &new_state().name, Format::Qcow2).expect("it names a file");
        newest_first[0].clone_from(&left);
        let options = OpenOptions { format: Some(Format::Raw), ..self.open.clone() };
        let home = FlatHome { path: self.to.clone(), options, copy: target };
        let (disk, copy) = (Arc::clone(&self.disk), Copy::new(&self.copy.store, &self.to, self.copy.skips));
        let mut unreadable = Vec::new();
        // While the old path is there, the note says nothing.
        note_moved(&self.from, &self.to, true)?;
        let switched = self.disk.leave_chain(home, || {
            if newest_frozen(disk.layers()).as_deref() != self.pass.as_ref().map(|pass| pass.state.path()) {
                return Err(Error::Changed { layer: self.from.clone() });
            }
            unreadable = copy_last(disk, copy)?;
            // Else it would speak of the next disk that has the name.
            self.note.remove()?;
            fs::rename(&self.from, &left).map_err(Error::of_file(&self.from, "rename what the disk was"))?;
            flush_directory(&directory_of(&self.from))
        });
        if switched.is_err() && self.from.symlink_metadata().is_ok() {
            forget_moved(&self.from);
        }
        if let Err(Error::Changed { .. }) = switched {
            // A snapshot was taken meanwhile: its layer must be copied, too.
            self.target = Some(Opened { store: Arc::clone(&self.copy.store), identity });
            return self.next_pass();
        }
        self.let_run();
        switched?;
        self.phase = Phase::Whole;
        self.copy.taken.unreadable.append(&mut unreadable);
        note_left(&self.from, &newest_first);
        Ok(())
    }
}

/// The layer below the one that takes the writes.
fn newest_frozen(layers: Vec<LayerInfo>) -> Option<PathBuf> {
    layers.into_iter().rev().nth(1).map(|layer| layer.path)
}

fn bytes_of(ranges: &[GuestRange]) -> u64 {
    ranges.iter().map(|range| range.len).sum()
}

/// Copies what the active layer has, while writes are held. Returns what cannot be read of it. A target that takes too long is left to its
/// thread, which keeps it locked.
fn copy_last(disk: Arc<Disk>, mut copy: Copy) -> Result<Vec<Unreadable>> {
    let target = copy.name.clone();
    let (done, result) = channel();
    let copied = move || {
        let part = |range: GuestRange, from| {
            let start = range.start + from;
            let range = GuestRange::new(start, PART.min(range.end() - start));
            Wanted { range, reads_zero: false }
        };
        let parts =
            |range: GuestRange| (0..range.len).step_by(PART as usize).map(move |from| part(range, from));
        copy.take(&disk, disk.own_ranges()?.into_iter().flat_map(parts).collect(), How::AGAIN)?;
        copy.finish()?;
        Ok(copy.taken.unreadable)
    };
    thread::spawn(move || {
        let _ = done.send(copied());
    });
    let slow = |_| Err(Error::Slow { target, after: HELD_MAX });
    result.recv_timeout(HELD_MAX).unwrap_or_else(slow)
}
