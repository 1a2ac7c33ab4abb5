//! A disk in use moves to a flat copy of it: a raw file, a block device, or an export of any NBD server. Its history stays behind. Or it goes
//! back from there to its history.
//!
//! ```text
//!   all      what the disk reads is written to the copy, while the guest goes on
//!   passes   what was written meanwhile is copied; again while that halves what is left
//!   slowed   where it does not, the guest's writes are slowed: to half of the rate of the copy, then to a quarter, and so on
//!   switch   writes are held; what is left is copied, flushed and read back; from then on the guest writes to the copy
//! ```
//!
//! What was written is known from the layers above a state that was frozen ([`leave`]), or from the watch on a raw image ([`back`]).
//!
//! After a kill the copy holds some of the disk's bytes. The next run compares all of it with the disk and sends what differs, so it
//! needs no record of what the killed run had sent.

mod back;
mod copy;
mod leave;

use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use vmstrata_disk::snapshot::now_ns;
use vmstrata_disk::{Disk, Pace};
use vmstrata_nbd::Uri;
use vmstrata_types::{GuestOffset, GuestRange};

use crate::copy::{Unreadable, allocated};
use crate::error::{Error, Result};
use crate::follow::{Order, Scheduler};
use crate::moving::{Move, Phase, Report};
use crate::requests::{Observed, Requests};
use copy::{Copy, How, PART, PIECE};

pub use back::{BackOptions, is_way_back};
pub use leave::FlatOptions;

/// Bytes that are flushed and read back together.
const BATCH: u64 = 256 << 20;
/// What is known to be zeros is zeroed by so much in one step.
const ZERO_STEP: u64 = 1 << 30;
/// Extents that are looked at in one step.
const EXTENTS: usize = 4096;
/// See [`Scheduler`].
const CHUNK: u64 = 1 << 20;
/// For how long copying what is left may hold writes, as planned.
const HELD: Duration = Duration::from_millis(4);
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

/// What is copied, and how the disk goes on in the copy.
trait Way: fmt::Debug + Send {
    /// What the first pass copies, and about how many bytes that are.
    fn all(&mut self) -> Result<(Arc<Disk>, u64)>;

    /// Bytes that were written since the last pass began.
    fn left(&self) -> Result<u64>;

    /// What the next pass copies: what was written since the last one, which copied `state`, began.
    fn again(&mut self, state: &Disk) -> Result<(Arc<Disk>, Vec<GuestRange>)>;

    /// Copies what was written since the last pass, which copied `state`, began, and has the guest write to the copy. Returns what could not be
    /// read; `None` if another pass is needed first.
    fn switch(&mut self, state: &Disk, skips: bool) -> Result<Option<Vec<Unreadable>>>;

    /// Names of states that are there for the sake of the move only.
    fn froze(&self) -> Vec<String>;

    /// Whether the copy is a raw image.
    fn is_flat(&self) -> bool;
}

/// See the module documentation. After an error it is dropped, and begun again.
#[derive(Debug)]
pub struct FlatMove {
    disk: Arc<Disk>,
    from: PathBuf,
    to: PathBuf,
    size: u64,
    phase: Phase,
    way: Box<dyn Way>,
    /// `None` once it is the disk's.
    copy: Option<Copy>,
    /// Of the first pass.
    how: How,
    order: Order,
    observed: Observed,
    /// `None` until the first begins.
    pass: Option<Pass>,
    /// Bytes a second that were copied in the last pass that tells.
    rate: u64,
    /// Bytes a second that the guest may write.
    pace: Option<u64>,
    skips: bool,
    /// What could not be read, and was passed over.
    unreadable: Vec<Unreadable>,
    /// When the disk was whole, in ns since 1970.
    whole_ns: Option<u64>,
}

impl Drop for FlatMove {
    fn drop(&mut self) {
        self.let_run();
    }
}

/// What is copied before what was written meanwhile is looked at again.
#[derive(Debug)]
struct Pass {
    number: u32,
    how: How,
    /// What is copied.
    state: Arc<Disk>,
    /// The first one looks at all of the disk, from here on, before it copies.
    next: Option<GuestOffset>,
    /// What it has found to be zeros.
    zeros: Vec<GuestRange>,
    /// What it reads.
    left: Scheduler,
    /// Bytes that it began with, as far as they were counted then.
    bytes: u64,
    done: u64,
    began: Instant,
}

impl Pass {
    /// Over all of a state, of about so many bytes.
    fn of_all((state, bytes): (Arc<Disk>, u64), how: How, order: Order) -> Self {
        let (left, next) = (Scheduler::new(order, CHUNK, []), Some(GuestOffset::ZERO));
        let (zeros, began) = (Vec::new(), Instant::now());
        Self { number: 0, how, state, next, zeros, left, bytes, done: 0, began }
    }

    /// Over ranges of a state.
    fn of_ranges(number: u32, (state, ranges): (Arc<Disk>, Vec<GuestRange>), order: Order) -> Self {
        let bytes = bytes_of(&ranges);
        let left = Scheduler::new(order, CHUNK, ranges);
        let (zeros, began) = (Vec::new(), Instant::now());
        Self { number, how: How::AGAIN, state, next: None, zeros, left, bytes, done: 0, began }
    }

    /// Looks at the next extents of the first pass. Returns whether there were any.
    fn look(&mut self, copy: &Copy) -> Result<bool> {
        let (How { compares, zeroes }, size) = (self.how, self.state.size());
        let Some(next) = self.next.take().filter(|next| next.get() < size) else { return Ok(false) };
        let rest = GuestRange::new(next, size - next.get());
        let extents = self.state.extents(rest, EXTENTS)?;
        self.next = extents.last().map(|last| last.range.end());
        for extent in extents {
            match extent.kind.reads_zero() {
                false => self.left.add(extent.range),
                // Where the copy has a hole, too, there is nothing to compare.
                true if compares => copy.held(extent.range).for_each(|range| self.left.add(range)),
                true if zeroes => self.zeros.push(extent.range),
                true => {}
            }
        }
        Ok(true)
    }

    /// The next bytes that are zeroed.
    fn next_zeros(&mut self) -> Option<GuestRange> {
        let last = self.zeros.last_mut()?;
        let part = GuestRange::new(last.start, last.len.min(ZERO_STEP));
        *last = GuestRange::new(part.end(), last.len - part.len);
        if last.len == 0 {
            self.zeros.pop();
        }
        Some(part)
    }

    /// The next bytes that are read: about so many, in parts that are read at the same time.
    fn next_parts(&mut self, most: u64) -> Vec<GuestRange> {
        let (mut parts, mut read) = (Vec::new(), 0);
        while read < most
            && let Some(next) = self.left.next((most - read).max(PIECE as u64).min(PART))
        {
            read += next.range.len;
            parts.push(next.range);
        }
        self.done += read;
        parts
    }
}

impl FlatMove {
    fn new(
        (disk, from, to): (&Arc<Disk>, PathBuf, PathBuf),
        way: Box<dyn Way>,
        copy: Copy,
        (how, order, skips): (How, Order, bool),
    ) -> Self {
        Self {
            disk: Arc::clone(disk),
            from,
            to,
            size: disk.size(),
            phase: Phase::Copying,
            way,
            copy: Some(copy),
            how,
            order,
            observed: Observed::of(disk),
            pass: None,
            rate: 0,
            pace: None,
            skips,
            unreadable: Vec::new(),
            whole_ns: None,
        }
    }

    fn refused(&self, why: &str) -> Error {
        Error::refused(&self.from, &self.to, why)
    }

    /// Decides what comes after a pass.
    fn end_pass(&mut self) -> Result<()> {
        let Some(Pass { number, bytes, done, began, .. }) = self.pass else { return Ok(()) };
        let left = self.way.left()?;
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
        self.pass = Some(Pass::of_ranges(number + 1, self.way.again(&state)?, self.order));
        Ok(())
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

    /// Has the guest write to the copy from now on.
    fn switch(&mut self) -> Result<()> {
        let Some(Pass { state, .. }) = &self.pass else { return Ok(()) };
        let state = Arc::clone(state);
        let Some(unreadable) = self.way.switch(&state, self.skips)? else { return self.next_pass() };
        self.let_run();
        (self.phase, self.whole_ns, self.pass) = (Phase::Whole, Some(now_ns()), None);
        let passed_over = self.copy.take().map(|copy| copy.taken.unreadable);
        self.unreadable = passed_over.into_iter().flatten().chain(unreadable).collect();
        Ok(())
    }
}

impl Move for FlatMove {
    fn phase(&self) -> Phase {
        self.phase
    }

    fn report(&self) -> Report {
        let is_flat = self.way.is_flat();
        Report {
            phase: self.phase,
            from: self.from.clone(),
            to: self.to.clone(),
            left_bytes: match &self.pass {
                _ if self.phase == Phase::Whole => 0,
                Some(pass) => pass.bytes.saturating_sub(pass.done),
                None => self.disk.layers().iter().map(|layer| allocated(&layer.path)).sum(),
            },
            // Nothing of a flat copy is kept for the disk that went back from it.
            kept_until_ns: self.whole_ns.filter(|_| !is_flat),
            froze: self.way.froze(),
            slowed_to: self.pace,
            is_flat,
            unreadable: self
                .copy
                .iter()
                .flat_map(|copy| &copy.taken.unreadable)
                .chain(&self.unreadable)
                .cloned()
                .collect(),
        }
    }

    fn step(&mut self, most: u64) -> Result<u64> {
        if self.phase == Phase::Whole {
            return Ok(0);
        }
        self.observed.begin();
        if self.disk.size() != self.size {
            return Err(self.refused("its size has changed since the move began: begin again"));
        }
        let (Some(pass), Some(copy)) = (&mut self.pass, &mut self.copy) else {
            self.pass = Some(Pass::of_all(self.way.all()?, self.how, self.order));
            return Ok(0);
        };
        if copy.taken.bytes >= BATCH {
            copy.finish()?;
        }
        if let Some(zeros) = pass.next_zeros() {
            return copy.take_zeros(zeros);
        }
        if pass.look(copy)? {
            return Ok(0);
        }
        for (kind, range) in self.observed.requests.take_places() {
            pass.left.guest(kind, range, true);
        }
        let parts = pass.next_parts(most);
        let is_over = parts.is_empty();
        let written = copy.take(&pass.state, parts, pass.how)?;
        if is_over {
            copy.finish()?;
            self.end_pass()?;
        }
        Ok(written)
    }

    fn requests(&self) -> &Requests {
        &self.observed.requests
    }
}

fn bytes_of(ranges: &[GuestRange]) -> u64 {
    ranges.iter().map(|range| range.len).sum()
}
