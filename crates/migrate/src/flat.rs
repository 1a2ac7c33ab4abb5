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
use crate::moving::{Move, Phase, Report};
use copy::{Copy, How, PART, PIECE, Wanted};

pub use back::{BackOptions, is_way_back};
pub use leave::FlatOptions;

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
    /// The first one has all of the disk, from here on.
    next: Option<GuestOffset>,
    /// What it has found, the last bytes first.
    wanted: Vec<Wanted>,
    /// Bytes that it began with, as far as they were counted then, and those that are done.
    bytes: u64,
    done: u64,
    began: Instant,
}

impl Pass {
    /// Over all of a state, of about so many bytes.
    fn of_all((state, bytes): (Arc<Disk>, u64), how: How) -> Self {
        let (next, began) = (Some(GuestOffset::ZERO), Instant::now());
        Self { number: 0, how, state, next, wanted: Vec::new(), bytes, done: 0, began }
    }

    /// Over ranges of a state.
    fn of_ranges(number: u32, (state, ranges): (Arc<Disk>, Vec<GuestRange>)) -> Self {
        let bytes = bytes_of(&ranges);
        let wanted = ranges.into_iter().rev().map(|range| Wanted { range, reads_zero: false }).collect();
        Self { number, how: How::AGAIN, state, next: None, wanted, bytes, done: 0, began: Instant::now() }
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

impl FlatMove {
    fn new(
        (disk, from, to): (&Arc<Disk>, PathBuf, PathBuf),
        way: Box<dyn Way>,
        copy: Copy,
        (how, skips): (How, bool),
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
        self.pass = Some(Pass::of_ranges(number + 1, self.way.again(&state)?));
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
        if self.disk.size() != self.size {
            return Err(self.refused("its size has changed since the move began: begin again"));
        }
        let (Some(pass), Some(copy)) = (&mut self.pass, &mut self.copy) else {
            self.pass = Some(Pass::of_all(self.way.all()?, self.how));
            return Ok(0);
        };
        if copy.taken.bytes >= BATCH {
            copy.finish()?;
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
        let written = copy.take(&pass.state, parts, how)?;
        if is_over {
            copy.finish()?;
            self.end_pass()?;
        }
        Ok(written)
    }
}

fn bytes_of(ranges: &[GuestRange]) -> u64 {
    ranges.iter().map(|range| range.len).sum()
}
