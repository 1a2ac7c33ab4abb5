//! Disks in use that move from one directory to another, and back, on storage that fails now and then.
//!
//! ```text
//!   begin ──► step, step, ... ──► whole: stands alone? ──► let go of the source, leave it, or go back
//!     ▲         │ fails, is given up, or dies       └────► a flat copy ──► back to its history
//!     └─────────┘
//! ```
//!
//! Invariants: whichever of its two paths somebody knows leads to one disk, by the rule of the product; a move that fails goes on once the
//! storage does not fail any more; a disk that is whole needs nothing of its old directory.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use vmstrata_disk::merge::MergeFault;
use vmstrata_disk::snapshot::list;
use vmstrata_disk::{Disk, ErrorKind, Format, OpenOptions};
use vmstrata_migrate::follow::Order;
use vmstrata_migrate::{
    BackOptions, Error, FlatMove, FlatOptions, Move, MoveOptions, Moving, Phase, is_way_back, moved_to,
    source_directory,
};
use vmstrata_store::FileError;

use crate::faults::FAULTS;
use crate::kernel::inside;
use crate::life::{Book, DISK, DISKS, FLAT, OTHER};
use crate::random::Random;
use crate::shared::Kind;
use crate::tasks::TASKS;

/// Moves of a life, at most.
const MOVES_MAX: u64 = 4;
/// Calls of a move that fail, before the storage works again.
const FAILURES_MAX: u64 = 8;
/// Steps of a move, at most.
const STEPS_MAX: u64 = 2_000;
/// How often a move may fail on storage that works again, because of what failed before.
const LATE_MAX: u64 = 3;

/// The paths that the disk may have.
#[derive(Clone)]
pub struct Places([PathBuf; 2]);

impl Places {
    pub fn below(directory: &Path) -> Self {
        Self([DISKS, OTHER].map(|name| directory.join(name).join(DISK)))
    }

    pub fn directories(&self) -> Vec<PathBuf> {
        self.0.iter().map(|path| path.with_file_name("")).collect()
    }

    /// Where the disk is.
    ///
    /// # Errors
    /// More than one path, or none.
    pub fn find(&self) -> Result<PathBuf, String> {
        let mut found: Vec<PathBuf> = self
            .0
            .iter()
            .map(|path| moved_to(path).map_or_else(|| path.clone(), |moved| moved.path))
            .collect();
        found.retain(|path| path.symlink_metadata().is_ok());
        found.dedup();
        match &found[..] {
            [path] => Ok(path.clone()),
            _ => Err(format!("{found:?} are the disk")),
        }
    }

    /// The directory that the disk at `path` comes from and still needs.
    pub fn source(path: &Path) -> Option<PathBuf> {
        source_directory(path)
    }

    /// How a disk is opened that may be on its way.
    pub fn options(path: &Path) -> OpenOptions {
        let format = is_flat(path).then_some(Format::Raw);
        let allow_backing = Self::source(path).into_iter().collect();
        OpenOptions { format, allow_backing, ..OpenOptions::default() }
    }

    /// The directory that the disk at `path` is not in.
    fn other(&self, path: &Path) -> PathBuf {
        let [one, other] = &self.0;
        if path == one { other } else { one }.with_file_name("")
    }
}

/// Whether the disk is a flat copy.
pub fn is_flat(path: &Path) -> bool {
    path.ends_with(FLAT)
}

/// Whose turn it is to change the disk's files: the mover's between two steps, or the keeper's. Says whether the disk is on its way.
#[derive(Clone, Default)]
pub struct Turn(Arc<Mutex<bool>>);

impl Turn {
    pub fn take(&self) -> MutexGuard<'_, bool> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Who moves the disk.
pub struct Mover {
    places: Places,
    disk: Arc<Disk>,
    turn: Turn,
    book: Book,
    random: Random,
    /// Of the calls of a move, one in so many fails; 0 for none.
    fails_one_in: u64,
    failures: u64,
    late: u64,
    /// Calls that had failed when an error was last told of: a thread of the move may be told of a later one in a later part.
    told: u64,
    /// Whether the disk moves no further before it is opened again.
    is_over: bool,
}

impl Mover {
    pub fn new(places: Places, disk: Arc<Disk>, turn: Turn, book: Book, random: Random) -> Self {
        let fails_one_in = *random.pick(&[0, 0, 40, 150, 500]);
        Self {
            places,
            disk,
            turn,
            book,
            random,
            fails_one_in,
            failures: 0,
            late: 0,
            told: FAULTS.made(),
            is_over: false,
        }
    }

    pub fn run(mut self) {
        for _ in 0..self.random.below(MOVES_MAX + 1) {
            self.pause();
            if self.is_over || self.disk.failure().is_some() {
                return;
            }
            *self.turn.take() = true;
            if is_flat(self.disk.path()) {
                self.come_back();
                self.check_place();
                *self.turn.take() = false;
                continue;
            }
            if Places::source(self.disk.path()).is_none() && self.random.one_in(5) {
                self.flatten();
                self.check_place();
                *self.turn.take() = false;
                continue;
            }
            let moving = self.start().and_then(|moving| self.go_on(moving));
            self.check_place();
            let turn = self.turn.clone();
            let mut is_moving = turn.take();
            // A server goes on with a move whose guest writes to the target.
            *is_moving = Places::source(self.disk.path()).is_some();
            if let Some(moving) = moving {
                self.end(moving);
            }
        }
    }

    fn pause(&self) {
        std::thread::sleep(Duration::from_micros(self.random.below(3_000)));
    }

    fn options(&self) -> OpenOptions {
        Places::options(self.disk.path())
    }

    /// Does a part of a move, in which the storage may fail; `None` if it failed, and says so.
    fn attempt<T>(&mut self, what: &str, part: impl FnOnce() -> Result<T, Error>) -> Option<T> {
        let may_fail = self.fails_one_in > 0 && self.failures < FAILURES_MAX;
        let before = FAULTS.made();
        if may_fail {
            inside(|| FAULTS.begin(self.fails_one_in));
        }
        let done = part();
        inside(|| FAULTS.end());
        let is_late = |error: &Error| matches!(error, Error::Io { .. }) && FAULTS.made() > self.told;
        match done {
            Ok(done) => Some(done),
            Err(_) if self.disk.failure().is_some() => None,
            Err(error) if is_in_use(&error) => {
                tell(&format!("{what}: {error}"));
                None
            }
            // What a snapshot left to do has failed: the disk is to be opened again first.
            Err(Error::Disk(error)) if is_unfinished(&error) => {
                tell(&format!("{what}: {error}"));
                self.is_over = true;
                None
            }
            Err(error)
                if FAULTS.made() > before || is_late(&error) || self.failures > 0 && self.late < LATE_MAX =>
            {
                self.late += u64::from(!may_fail);
                self.failures += 1;
                self.told = FAULTS.made();
                tell(&format!("{what}: {error}"));
                None
            }
            Err(error) => Some(self.book.expect(what, Err(error))),
        }
    }

    /// Goes on with the move that an earlier process began, or begins another.
    fn start(&mut self) -> Option<Moving> {
        let (disk, open) = (Arc::clone(&self.disk), self.options());
        let resumed = self.attempt("go on with the move", || Moving::resume(&disk, &open))?;
        if let Some(moving) = resumed
            && (moving.phase() != Phase::Whole || self.random.one_in(2))
        {
            return Some(moving);
        }
        let to = self.places.other(self.disk.path());
        let rest = *self.random.pick(&[0, 16 << 10, 128 << 10, u64::MAX]);
        let order = *self.random.pick(&Order::ALL);
        let options = MoveOptions { rest, order, ..MoveOptions::new(to, open) };
        self.attempt("begin to move", || Moving::begin(&disk, &options))
    }

    /// Moves the disk to a flat copy, beside its other place.
    fn flatten(&mut self) {
        let (disk, to) = (Arc::clone(&self.disk), self.places.other(self.disk.path()).join(FLAT));
        let (open, order) = (self.options(), *self.random.pick(&Order::ALL));
        let options = FlatOptions { to: to.clone(), open, overwrite: false, skip_unreadable: false, order };
        let begun = self.attempt("begin to move to a flat copy", || match FlatMove::begin(&disk, &options) {
            Err(Error::Exists { .. }) => Ok(None),
            begun => begun.map(Some),
        });
        let copied = match begun {
            Some(Some(moving)) => self.go_on(moving),
            // It died before it could note whose the file is, or could not switch. People remove it.
            Some(None) => {
                self.book.expect("remove the copy", std::fs::remove_file(to));
                None
            }
            None => None,
        };
        if copied.is_some() {
            tell("a flat copy");
        }
    }

    /// Moves the disk from its flat copy to its history.
    fn come_back(&mut self) {
        let is_from = |place: &&PathBuf| is_way_back(self.disk.path(), place);
        let Some(to) = self.places.0.iter().find(is_from).cloned() else { return };
        let (disk, open, order) = (Arc::clone(&self.disk), self.options(), *self.random.pick(&Order::ALL));
        let options = BackOptions { to, open, skip_unreadable: false, order };
        let begun = self.attempt("begin to come back", || FlatMove::begin_back(&disk, &options));
        if begun.and_then(|moving| self.go_on(moving)).is_some() {
            tell("back from a flat copy");
        }
    }

    /// Goes on until the disk is whole; `None` if the move is given up before.
    fn go_on<M: Move>(&mut self, mut moving: M) -> Option<M> {
        for steps in 0.. {
            if moving.phase() == Phase::Whole {
                break;
            }
            if steps == STEPS_MAX {
                self.fail_to_end();
            }
            self.pause();
            let before = moving.phase();
            tell(&format!("{before:?}, {} bytes left", moving.report().left_bytes));
            if before == Phase::Copying && self.random.one_in(40) {
                return None;
            }
            let most = *self.random.pick(&[1, 64 << 10, 256 << 10, 1 << 20]);
            // A snapshot would make an image of a flat copy.
            let turn = self.turn.clone();
            let is_flat = moving.report().is_flat || is_flat(self.disk.path());
            let at_switch = is_flat.then(|| turn.take());
            let done = self.attempt("move", || moving.step(most));
            drop(at_switch);
            if self.is_over || self.disk.failure().is_some() {
                return None;
            }
            if done.is_none() {
                self.check_place();
                if moving.phase() == Phase::Copying {
                    return None;
                }
                self.pause();
            } else if moving.phase() != before {
                self.check_place();
            }
        }
        Some(moving)
    }

    fn fail_to_end(&self) -> ! {
        let (path, open) = (self.disk.path(), self.options());
        let used: Vec<PathBuf> = self.disk.layers().into_iter().map(|layer| layer.path).collect();
        let named = list(path, &open).map(|states| states.into_iter().map(|state| state.layer).collect());
        let named: Vec<PathBuf> = self.book.expect("list", named);
        inside(|| TASKS.fail(&format!("the move does not end: the disk uses {used:?}, and names {named:?}")))
    }

    /// What becomes of the source once the disk is whole.
    fn end(&mut self, moving: Moving) {
        tell("whole");
        self.check_alone();
        let ended = match self.random.below(4) {
            0 | 1 => self.attempt("let go of the source", || moving.let_go().map(drop)),
            2 => self.attempt("leave the source", || moving.leave_source()),
            _ => return,
        };
        if ended.is_some() {
            self.check_alone();
        }
    }

    /// One path is the disk: that of the one in use.
    fn check_place(&self) {
        let place = self.book.expect("where the disk is", self.places.find());
        let path = self.disk.path();
        if self.disk.failure().is_none() && place != path {
            let text = format!("{} is the disk, and {} is in use", place.display(), path.display());
            inside(|| TASKS.fail(&text));
        }
    }

    /// The disk needs nothing of another directory.
    fn check_alone(&self) {
        let path = self.disk.path();
        self.book.expect("a disk that is whole", list(path, &OpenOptions::default()));
        let is_elsewhere = |layer: &&PathBuf| layer.parent() != path.parent();
        let layers: Vec<PathBuf> = self.disk.layers().into_iter().map(|layer| layer.path).collect();
        if let Some(layer) = layers.iter().find(is_elsewhere) {
            inside(|| TASKS.fail(&format!("a disk that is whole stands on {}", layer.display())));
        }
    }
}

/// Whether layers cannot be changed because storage failed when a snapshot was to be finalized: that is tried once.
pub fn is_unfinished(error: &vmstrata_disk::Error) -> bool {
    FAULTS.made() > 0 && matches!(error.fault(), Some(MergeFault::LayersChanged))
}

/// Whether somebody reads a snapshot, and has it done soon.
fn is_in_use(error: &Error) -> bool {
    let Error::Disk(error) = error else { return false };
    let is_locked = matches!(error.kind(), ErrorKind::File(FileError::Lock(_)));
    is_locked || matches!(error.fault(), Some(MergeFault::TargetInUse { .. } | MergeFault::Busy))
}

/// Notes how a move goes, for people.
fn tell(text: &str) {
    inside(|| TASKS.note(Kind::Told, [0; 4], 0, &[text.as_bytes()]));
}
