//! What a simulated process does: it opens a disk that an earlier one left, looks whether that is as it must be, and serves guests
//! until it dies.

use std::cell::RefCell;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use vmstrata_disk::merge::{Direction, Merge, MergeFault, MergeOptions, MergeRange, Removal};
use vmstrata_disk::snapshot::{
    PrepareOptions, RevertOptions, SnapshotInfo, clone, create, find, list, revert,
};
use vmstrata_disk::{
    CheckOptions, Completion, Disk, Error, ErrorKind, IoQueue, Op, OpenOptions, Request, ResourceOptions,
    Resources, Unflushed, check,
};
use vmstrata_store::{AlignedBuf, CacheMode, Segment, SegmentVec};
use vmstrata_types::{GuestOffset, GuestRange, LayerIndex};

use crate::history::{Deed, History, Keeps, Look, SECTOR, State};
use crate::kernel::inside;
use crate::moves::{Mover, Places, Turn, is_flat, is_unfinished};
use crate::random::Random;
use crate::shared::Kind;
use crate::tasks::TASKS;

/// The disk's own directory, and the journals', in that of the host.
pub const DISKS: &str = "disks";
pub const JOURNALS: &str = "journals";
/// Where the disk moves to, and back from.
pub const OTHER: &str = "other";
/// Where disks lie that stand on layers of others.
pub const CLONES: &str = "clones";
/// The disk.
pub const DISK: &str = "web.qcow2";
/// Its flat copy.
pub const FLAT: &str = "web.raw";

/// Requests of a guest in a life, at most, and those at a time.
const REQUESTS_MAX: u64 = 60;
const DEPTH_MAX: u64 = 6;
/// Sectors of a request.
const SECTORS_MAX: u64 = 48;

/// The history, which all tasks write, and the log.
#[derive(Clone)]
pub struct Book(Arc<Mutex<History>>);

impl Book {
    fn history(&self) -> MutexGuard<'_, History> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes a deed, in the history and in the log.
    pub fn enter(&self, deed: Deed, args: [u64; 3], stamps: &[u64]) {
        let mut history = self.history();
        inside(|| {
            history.enter(deed, args, stamps);
            let bytes: Vec<u8> = stamps.iter().flat_map(|stamp| stamp.to_le_bytes()).collect();
            TASKS.note(Kind::Guest, [deed as u64, args[0], args[1], args[2]], 0, &[&bytes]);
        });
    }

    /// Notes the beginning of a deed under a new number, which it returns.
    fn begin(&self, deed: Deed, first: u64, second: u64) -> u64 {
        let mut history = self.history();
        inside(|| {
            let number = history.next();
            history.enter(deed, [number, first, second], &[]);
            TASKS.note(Kind::Guest, [deed as u64, number, first, second], 0, &[]);
            number
        })
    }

    pub fn expect<T, E: std::fmt::Display>(&self, what: &str, result: Result<T, E>) -> T {
        result.unwrap_or_else(|error| inside(|| TASKS.fail(&format!("{what}: {error}"))))
    }
}

/// Fills sectors from `first` on with a write's number.
fn stamp(bytes: &mut [u8], number: u64, first: u64) {
    for (sector, bytes) in (first..).zip(bytes.chunks_exact_mut(SECTOR)) {
        for word in bytes.as_chunks_mut::<8>().0 {
            *word = (number << 20 | sector).to_le_bytes();
        }
    }
}

/// The numbers of the writes that sectors from `first` on hold.
fn stamps(bytes: &[u8], first: u64) -> Result<Vec<u64>, String> {
    let of = |(sector, bytes): (u64, &[u8])| {
        let words = bytes.as_chunks::<8>().0;
        let word = u64::from_le_bytes(words[0]);
        if words.iter().any(|other| *other != words[0]) {
            return Err(format!("sector {sector} is torn"));
        }
        match (word >> 20, word & ((1 << 20) - 1)) {
            (0, 0) => Ok(0),
            (number, found) if found == sector => Ok(number),
            (number, found) => Err(format!("sector {sector} holds write {number} of sector {found}")),
        }
    };
    (first..).zip(bytes.chunks_exact(SECTOR)).map(of).collect()
}

fn range(first: u64, sectors: u64) -> GuestRange {
    GuestRange::new(GuestOffset::new(first * SECTOR as u64), sectors * SECTOR as u64)
}

/// See the module documentation.
pub struct Life {
    pub directory: PathBuf,
    pub history: History,
    pub seed: u64,
    /// Whether no process has died with the disk open.
    pub is_first: bool,
    /// Whether the disk moves.
    pub moves: bool,
}

impl Life {
    /// Lives it: never returns.
    pub fn live(self) -> ! {
        let Self { directory, history, seed, is_first, moves } = self;
        let random = Random::new(seed);
        let book = Book(Arc::new(Mutex::new(history)));
        let journals = directory.join(JOURNALS);
        book.expect("the journals' directory", std::fs::create_dir_all(&journals));
        let options = ResourceOptions {
            metadata_cache_bytes: 1 << 20,
            max_open_files: 8,
            workers: 1 + random.below(2) as usize,
            journal_dir: Some(journals.clone()),
        };
        let resources = book.expect("resources", Resources::start(options));
        let places = moves.then(|| Places::below(&directory));
        let path = match &places {
            Some(places) => book.expect("where the disk is", places.find()),
            None => directory.join(DISKS).join(DISK),
        };
        let at = RefCell::new(At::Closed(path));
        let keeper =
            Keeper { directory, at, journals, resources, book, random, places, turn: Turn::default() };
        keeper.check_files(false);
        let disk = keeper.open();
        let guests: Vec<_> = (0..1 + keeper.random.below(3)).map(|_| keeper.start_guest(&disk)).collect();
        let mover = keeper.start_mover(&disk);
        keeper.keep(&disk);
        for task in guests.into_iter().chain(mover) {
            let ended = task.join().map_err(|_| "it panicked");
            keeper.book.expect("a guest", ended);
        }
        if keeper.random.one_in(2) && !keeper.has_failed() {
            keeper.book.expect("close", disk.close());
            keeper.book.enter(Deed::Closed, [0; 3], &[]);
            keeper.at.replace(At::Closed(disk.path().to_owned()));
            drop(disk);
            // Leaks of version 2 images stay until they are asked for.
            keeper.check_files(is_first && !moves);
            if !keeper.is_flat() {
                keeper.change_closed();
            }
        }
        inside(|| TASKS.die())
    }
}

/// Where the disk is.
enum At {
    Closed(PathBuf),
    Open(Arc<Disk>),
}

/// Who opens the disk, and takes and drops snapshots of it.
struct Keeper {
    directory: PathBuf,
    at: RefCell<At>,
    journals: PathBuf,
    resources: Arc<Resources>,
    book: Book,
    random: Random,
    /// Between which it moves.
    places: Option<Places>,
    turn: Turn,
}

impl Keeper {
    /// The disk's path of now.
    fn path(&self) -> PathBuf {
        match &*self.at.borrow() {
            At::Closed(path) => path.clone(),
            At::Open(disk) => disk.path().to_owned(),
        }
    }

    /// Whether a fault of the storage has had the disk fail.
    fn has_failed(&self) -> bool {
        self.places.is_some() && matches!(&*self.at.borrow(), At::Open(disk) if disk.failure().is_some())
    }

    /// Whether the disk has moved to a flat copy: its snapshots stayed behind.
    fn is_flat(&self) -> bool {
        is_flat(&self.path())
    }

    /// Whether a move of the closed disk is to be gone on with.
    fn is_moving(&self) -> bool {
        self.places.as_ref().is_some_and(|_| Places::source(&self.path()).is_some())
    }

    /// How the disk's files are looked at.
    fn options(&self) -> OpenOptions {
        match &self.places {
            Some(_) => Places::options(&self.path()),
            None => OpenOptions::default(),
        }
    }

    /// Does something with the disk's path. That may become another one meanwhile.
    fn at_path<T>(&self, what: impl Fn(&Path) -> Result<T, Error>) -> Result<T, Error> {
        loop {
            let path = self.path();
            let done = what(&path);
            if done.is_ok() || self.path() == path && path.symlink_metadata().is_ok() {
                return done;
            }
            if self.has_failed() {
                return done;
            }
            // It is just being moved.
            std::thread::sleep(Duration::from_micros(100));
        }
    }

    /// The result, unless the disk has failed or is flat by now.
    fn expect<T>(&self, what: &str, result: Result<T, Error>) -> Option<T> {
        match result {
            Err(_) if self.has_failed() || self.is_flat() => None,
            result => Some(self.book.expect(what, result)),
        }
    }

    /// The file of a state.
    fn state_path(&self, state: State) -> Result<PathBuf, Error> {
        let State { number, keeps, .. } = state;
        let clone = || format!("clone-{number}.qcow2");
        match (keeps, &self.places) {
            (Keeps::Snapshot, None) => Ok(self.path().with_extension(format!("{number}.qcow2"))),
            (Keeps::Snapshot, Some(_)) => {
                let found = self.at_path(|path| find(path, &number.to_string(), &Places::options(path)));
                found.map(|found| found.layer)
            }
            (Keeps::Clone, _) if number % 2 == 0 => Ok(self.directory.join(DISKS).join(clone())),
            (Keeps::Clone, _) => Ok(self.directory.join(CLONES).join(clone())),
        }
    }

    fn states(&self) -> Vec<State> {
        let is_flat = self.is_flat();
        let is_there = |state: &State| !is_flat || state.keeps == Keeps::Clone;
        self.book.history().states().into_iter().filter(is_there).collect()
    }

    /// Snapshots that are there, and were read.
    fn known(&self) -> Vec<State> {
        let is_known =
            |state: &State| state.must_be_there && state.is_known && state.keeps == Keeps::Snapshot;
        self.states().into_iter().filter(is_known).collect()
    }

    /// The file of every state that must be there is sound; with `no_leaks`, nothing in it is wasted.
    fn check_files(&self, no_leaks: bool) {
        let options = CheckOptions { journal_dir: Some(self.journals.clone()), ..CheckOptions::default() };
        let states = self.states().into_iter().filter(|state| state.must_be_there);
        let of = |state| self.book.expect("find a state", self.state_path(state));
        let mut paths: Vec<PathBuf> = states.map(of).collect();
        if !self.is_flat() {
            paths.push(self.path());
        }
        for path in &paths {
            let report = self.book.expect("check", check(path, &options));
            if !report.is_safe() || no_leaks && !report.is_clean() {
                let text = format!("{} is damaged: {report:?}", path.display());
                inside(|| TASKS.fail(&text));
            }
        }
    }

    /// Opens the disk and looks at all of it, and at its snapshots.
    fn open(&self) -> Arc<Disk> {
        let cache = *self.random.pick(&[CacheMode::Host, CacheMode::Host, CacheMode::Direct]);
        let had_failed = self.book.history().had_failed;
        let unflushed = if had_failed { Unflushed::Discard } else { Unflushed::Keep };
        let options = OpenOptions { cache, unflushed, ..self.options() };
        let disk = self.book.expect("open", Disk::open(&self.path(), &options, &self.resources));
        self.at.replace(At::Open(Arc::clone(&disk)));
        if self.places.is_some() {
            let book = self.book.clone();
            disk.when_failed(move |_| book.enter(Deed::Failed, [0; 3], &[]));
            *self.turn.take() = self.is_moving();
        }
        self.states().into_iter().for_each(|state| self.look_at(state));
        let stamps = self.read_all(&disk);
        let history = self.book.history();
        let checked = history.check(0, &stamps, history.look());
        drop(history);
        self.book.expect("the disk", checked);
        self.book.enter(Deed::Seen, [0; 3], &stamps);
        disk
    }

    fn read_all(&self, disk: &Disk) -> Vec<u64> {
        self.book.expect("read", self.try_read_all(disk))
    }

    fn try_read_all(&self, disk: &Disk) -> Result<Vec<u64>, Error> {
        let mut bytes = vec![0; disk.size() as usize];
        for (at, part) in (0..).step_by(64 << 10).zip(bytes.chunks_mut(64 << 10)) {
            disk.read(GuestOffset::new(at), &[Segment::from_mut(part)])?;
        }
        Ok(self.book.expect("the disk", stamps(&bytes, 0)))
    }

    /// Reads a state, which holds what it held before, or what the disk held when it was taken.
    fn look_at(&self, state: State) {
        let allow_backing = match (&self.places, state.keeps) {
            (Some(_), Keeps::Snapshot) => self.options().allow_backing,
            (Some(places), Keeps::Clone) => places.directories(),
            (None, _) => vec![self.directory.join(DISKS)],
        };
        let options = OpenOptions { read_only: true, allow_backing, ..OpenOptions::default() };
        let opened = self.state_path(state).and_then(|path| Disk::open(&path, &options, &self.resources));
        let disk = match opened {
            // A move has it stand on another layer.
            Err(error) if self.places.is_some() && is_busy(&error) => {
                std::thread::sleep(Duration::from_millis(1));
                return self.look_at(state);
            }
            Ok(disk) => disk,
            Err(_) if !state.must_be_there || self.has_failed() => return,
            Err(_) if state.keeps == Keeps::Snapshot && self.is_flat() => return,
            Err(error) => self.book.expect("open a state", Err(error)),
        };
        let stamps = match self.try_read_all(&disk) {
            // It was opened just before: the layer has another header by now.
            Err(error) if self.places.is_some() && is_changed(&error) => return self.look_at(state),
            read => self.book.expect("read", read),
        };
        let checked = self.book.history().check_snapshot(state.number, &stamps);
        self.book.expect(&format!("{state:?}"), checked);
        self.book.enter(Deed::SnapshotSeen, [state.number, 0, 0], &stamps);
    }

    /// The state was made: it is there from now on.
    fn made(&self, number: u64) {
        self.book.enter(Deed::Ended, [number, 0, 0], &[]);
        self.states()
            .into_iter()
            .filter(|state| state.number == number)
            .for_each(|state| self.look_at(state));
    }

    fn start_guest(&self, disk: &Arc<Disk>) -> JoinHandle<()> {
        let (book, disk, random) = (self.book.clone(), Arc::clone(disk), Random::new(self.random.next()));
        let may_fail = self.places.is_some();
        let run = move || Guest::new(book, &disk, (random, may_fail)).run();
        self.book.expect("a guest", std::thread::Builder::new().spawn(run))
    }

    /// Starts who moves the disk, if that is so.
    fn start_mover(&self, disk: &Arc<Disk>) -> Option<JoinHandle<()>> {
        let places = self.places.clone()?;
        let (disk, turn, book) = (Arc::clone(disk), self.turn.clone(), self.book.clone());
        let mover = Mover::new(places, disk, turn, book, Random::new(self.random.next()));
        Some(self.book.expect("a mover", std::thread::Builder::new().spawn(move || mover.run())))
    }

    /// Takes and drops snapshots beside the guests.
    fn keep(&self, disk: &Arc<Disk>) {
        for _ in 0..self.random.below(6) {
            std::thread::sleep(Duration::from_micros(self.random.below(20_000)));
            let is_moving = self.places.as_ref().map(|_| self.turn.take());
            if self.has_failed() || self.is_flat() {
                return;
            }
            match self.random.below(7) {
                0..4 => self.take(Some(disk)),
                4 => self.clone(),
                _ if is_moving.as_ref().is_some_and(|is_moving| **is_moving) => {}
                _ => self.merge(Some(disk)),
            }
        }
    }

    /// Takes a snapshot of the disk, or of the closed one, and looks at it.
    fn take(&self, disk: Option<&Disk>) {
        let number = self.book.begin(Deed::Snapshot, 0, 0);
        let info = SnapshotInfo { name: number.to_string(), ..SnapshotInfo::default() };
        let taken = match disk {
            Some(disk) => disk.snapshot(&info).map(drop),
            None => {
                let (open, options) = (self.options(), PrepareOptions::default());
                create(&[self.path()], &info, &open, &options, &self.resources).map(drop)
            }
        };
        if self.expect("take a snapshot", taken).is_some() {
            self.made(number);
        }
    }

    /// Makes a disk of its own of a snapshot, beside the disk or elsewhere.
    fn clone(&self) {
        let known = self.known();
        if known.is_empty() {
            return;
        }
        let snapshot = self.random.pick(&known).number;
        let number = self.book.begin(Deed::Clone, snapshot, 0);
        let clones = self.states().into_iter().filter(|state| state.number == number);
        for path in clones.map(|clone| self.state_path(clone)) {
            let path = self.book.expect("a clone's path", path);
            let made = self.at_path(|disk| clone(disk, &snapshot.to_string(), &path, &self.options()));
            if self.expect("clone", made).is_none() {
                return;
            }
        }
        self.made(number);
    }

    /// Drops one or two layers of the disk, or of the closed one, and looks at states that stay.
    fn merge(&self, disk: Option<&Arc<Disk>>) {
        let snapshots = self.book.expect("list", list(&self.path(), &self.options()));
        let frozen: Vec<PathBuf> = snapshots.into_iter().rev().map(|snapshot| snapshot.layer).collect();
        if frozen.is_empty() {
            return;
        }
        let first = self.random.below(frozen.len() as u64) as usize;
        let last = first + self.random.below((frozen.len() - first).min(2) as u64) as usize;
        for path in &frozen[first..=last] {
            let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
            let number = name.split('.').nth(1).and_then(|number| number.parse().ok());
            self.book.enter(Deed::Drop, [number.unwrap_or(0), 0, 0], &[]);
        }
        let direction = *self.random.pick(&[Direction::Auto, Direction::Stream, Direction::Commit]);
        let open = self.options();
        let options = MergeOptions { open, removal: Removal::All, direction, ..MergeOptions::default() };
        let index = |place: usize| LayerIndex::new(place as u16);
        let dropped = MergeRange { first: index(first), last: index(last) };
        let merge = match disk {
            Some(disk) => Merge::of_disk(disk, dropped, &options),
            None => Merge::new(&self.path(), dropped, &options, &self.resources),
        };
        match merge {
            Ok(merge) => drop(self.book.expect("merge", merge.run())),
            // What a revert has left stands on it.
            Err(error) if matches!(error.fault(), Some(MergeFault::NoCommit { .. })) => {}
            Err(error) if self.places.is_some() && is_unfinished(&error) => {}
            Err(error) => self.book.expect("merge", Err(error)),
        }
        let states = self.states().into_iter().filter(|state| state.must_be_there && state.is_known);
        states.filter(|_| self.random.one_in(2)).for_each(|state| self.look_at(state));
    }

    /// What is done to a disk that no process serves.
    fn change_closed(&self) {
        for _ in 0..self.random.below(3) {
            match self.random.below(3) {
                0 => self.take(None),
                _ if self.is_moving() => {}
                1 => self.merge(None),
                _ => self.revert(),
            }
        }
    }

    /// Takes the closed disk back to a snapshot.
    fn revert(&self) {
        let known = self.known();
        if known.is_empty() {
            return;
        }
        let snapshot = self.random.pick(&known).number;
        let number = self.book.begin(Deed::Revert, snapshot, 0);
        let options = RevertOptions { open: self.options(), ..RevertOptions::default() };
        let reverted = revert(&self.path(), &snapshot.to_string(), &options, &self.resources);
        self.book.expect("revert", reverted);
        self.book.enter(Deed::Ended, [number, 1, 0], &[]);
    }
}

fn is_changed(error: &Error) -> bool {
    matches!(error.kind(), ErrorKind::Changed)
}

fn is_busy(error: &Error) -> bool {
    matches!(error.fault(), Some(MergeFault::Busy))
}

/// A request under way.
struct Flying {
    token: u64,
    buffer: AlignedBuf,
    kind: Flight,
}

enum Flight {
    Read {
        first: u64,
        sectors: u64,
        look: Look,
    },
    /// Whether it asked to be on stable storage when it ends.
    Change {
        is_stable: bool,
    },
}

/// Who reads and writes the disk through a queue.
struct Guest {
    book: Book,
    queue: IoQueue,
    disk: Arc<Disk>,
    /// Whether the disk may fail.
    may_fail: bool,
    random: Random,
    flying: Vec<Flying>,
    /// Memory of requests that have ended. It is used again, as a guest's is, and never freed.
    spare: Vec<AlignedBuf>,
    sectors: u64,
    reads: u64,
}

impl Guest {
    fn new(book: Book, disk: &Arc<Disk>, (random, may_fail): (Random, bool)) -> Self {
        let queue = book.expect("a queue", IoQueue::new(Arc::clone(disk), 8));
        let (disk, sectors) = (Arc::clone(disk), disk.size() / SECTOR as u64);
        let (flying, spare) = (Vec::new(), Vec::new());
        Self { book, queue, disk, may_fail, random, flying, spare, sectors, reads: 0 }
    }

    fn has_failed(&self) -> bool {
        self.may_fail && self.disk.failure().is_some()
    }

    fn run(mut self) {
        let depth = 1 + self.random.below(DEPTH_MAX);
        let mut left = self.random.below(REQUESTS_MAX);
        while left > 0 || !self.flying.is_empty() {
            if left > 0 && (self.flying.len() as u64) < depth {
                left = if self.has_failed() { 0 } else { left - 1 };
                self.push();
                if self.random.one_in(2) {
                    continue;
                }
            }
            self.queue.submit();
            let mut ended = Vec::new();
            if self.queue.reap(&mut ended) == 0 && !self.flying.is_empty() {
                self.queue.wait(&[], Some(Duration::from_millis(100)));
            }
            ended.into_iter().for_each(|completion| self.ended(completion));
            if self.random.one_in(8) {
                // Now and then long enough for housekeeping. In the queue, as an export does: it hears there of new layers.
                let most = if self.random.one_in(8) { 7_000_000 } else { 8_000 };
                self.queue.wait(&[], Some(Duration::from_micros(self.random.below(most))));
            }
        }
        std::mem::forget(self.spare);
    }

    /// A place for a request: mostly where others are, too.
    fn place(&self) -> (u64, u64) {
        let (first, sectors) = if self.random.one_in(2) {
            (self.random.below(self.sectors / 8) * 8, 8)
        } else {
            (self.random.below(self.sectors), 1 + self.random.below(SECTORS_MAX))
        };
        let first = if self.random.one_in(2) { first % 256 } else { first };
        (first, sectors.min(self.sectors - first))
    }

    fn push(&mut self) {
        let (first, sectors) = self.place();
        let fua = self.random.one_in(6);
        let (op, deed) = match self.random.below(16) {
            0..4 => (Op::Read, None),
            4..12 => (Op::Write { fua }, Some(Deed::Write)),
            12 => (Op::WriteZeroes { unmap: self.random.one_in(2), fua }, Some(Deed::Zero)),
            13 => (Op::Discard, Some(Deed::Discard)),
            _ => (Op::Flush, Some(Deed::Flush)),
        };
        let (first, sectors) = if op == Op::Flush { (0, 0) } else { (first, sectors) };
        let (token, kind) = match deed {
            Some(deed) => {
                let is_stable = fua && matches!(deed, Deed::Write | Deed::Zero);
                (self.book.begin(deed, first, sectors), Flight::Change { is_stable })
            }
            None => {
                self.reads += 1;
                let look = self.book.history().look();
                (u64::MAX - self.reads, Flight::Read { first, sectors, look })
            }
        };
        let whole = SECTORS_MAX as usize * SECTOR;
        let mut buffer = self.spare.pop().unwrap_or_else(|| AlignedBuf::zeroed(whole));
        let mut segments = SegmentVec::new();
        if matches!(op, Op::Read | Op::Write { .. }) {
            let len = sectors as usize * SECTOR;
            // What a read leaves as it is belongs to no sector.
            stamp(&mut buffer[..len], token & 0xffff_ffff, if deed.is_some() { first } else { first + 1 });
            // SAFETY: the buffer is never freed.
            segments.push(unsafe { Segment::new(buffer.as_mut_ptr(), len) });
        }
        self.flying.push(Flying { token, buffer, kind });
        self.queue.push(Request { op, range: range(first, sectors), segments, token });
    }

    fn ended(&mut self, Completion { token, result }: Completion) {
        let is_refused = result.is_err() && self.has_failed();
        if !is_refused {
            self.book.expect("a request", result);
        }
        let place = self.flying.iter().position(|flying| flying.token == token);
        let place = self.book.expect("a completion", place.ok_or("of no request"));
        let Flying { buffer, kind, .. } = self.flying.swap_remove(place);
        match kind {
            // It may be there or not.
            _ if is_refused => {}
            Flight::Change { is_stable } => {
                self.book.enter(Deed::Ended, [token, u64::from(is_stable), 0], &[]);
            }
            Flight::Read { first, sectors, look } => {
                let found = stamps(&buffer[..sectors as usize * SECTOR], first);
                let found = self.book.expect("a read", found);
                let checked = self.book.history().check(first as usize, &found, look);
                self.book.expect("a read", checked);
            }
        }
        self.spare.push(buffer);
    }
}
