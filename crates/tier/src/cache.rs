//! The chunks of repositories' layers that this host has: one copy for all disks of a process.
//!
//! ```text
//!               claim              settle             evict                 no read holds it
//!   missing ─────────────► coming ────────► here ◄──────────────► retired ─────────────────► missing
//!   found, by a restart ──►   │              proved by its digest     │ claim: looked at again
//!                             └── only this one touches the file      └─ its bytes are still there
//! ```
//!
//! A layer has one sparse file, `ID.chunks`, with each chunk at its place, so that rings and views read it as any other file. Which
//! chunks are here is known in memory only. A process that begins takes what files hold for *found*: it proves a chunk by its
//! digest before it uses it. So nothing has to be flushed, and torn, stale and foreign bytes are noticed.
//!
//! Invariants:
//! - A chunk that is here was proved by its digest in this process.
//! - A read holds a layer's token from before it looks at chunks to its end. Eviction takes a chunk out of the table, replaces the token, and
//!   frees the chunk's bytes once no read holds the old token, when another chunk comes. It does not wait for that: the budget is exceeded meanwhile.
//! - A layer gives up no more chunks before those are gone: who holds an older token needs no newer one.
//! - A pinned layer, which a file `ID.pinned` makes it, gives up none.
//! - One process writes the directory at a time. Others may read what it has beside it: for them nothing is ever here, and they prove each
//!   chunk that they find.
//!
//! Lock order: one at a time, but for a layer's file under the room.

mod kept;
mod watch;

use std::collections::{BTreeMap, HashMap, HashSet};
use std::fmt;
use std::fs::{DirBuilder, File};
use std::io::{self, Read as _, Write as _};
use std::ops::Range;
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use arc_swap::ArcSwap;
use parking_lot::{Condvar, Mutex};
use rustix::fs::{MemfdFlags, memfd_create};
use vmstrata_disk::merge::available_bytes;
use vmstrata_store::{Access, Directory, Fetched, FileOptions, FileStore, Hold, Place, Store};
use vmstrata_types::HostOffset;

use crate::companion::Companion;
use crate::digests::CHUNK;
use crate::error::{Error, Result};
use crate::head::{Object, ObjectId};
use crate::lock::lock_within;
use crate::waiter::{Failure, Waiter};

/// The least budget that serves any request: one of 1,024 pieces needs as many chunks at a time.
pub const CACHE_BYTES_MIN: u64 = 1024 * CHUNK;
/// The largest layer.
const LAYER_BYTES_MAX: u64 = 16 << 40;
/// The part of the budget that is given up at a time, beyond what is needed.
const SPARE: u64 = 64;
/// Of what a cache has and its file system has to spare, it gets this part, unless it is asked for more.
const ROOM_PART: u64 = 4;
/// And this part at most: guests' writes need room.
const ROOM_PART_MAX: u64 = 2;
/// Bytes given up when the host has no room.
const FEW: u64 = 8 * CHUNK;
/// For how long to try to lock the directory: a process that ends lets go of it late.
const PATIENCE: Duration = Duration::from_secs(5);
const LOCK: &str = "lock";
const CHUNKS_SUFFIX: &str = ".chunks";
const PINNED_SUFFIX: &str = ".pinned";
const PRIVATE: u32 = 0o600;

/// See the module documentation.
#[derive(Debug)]
pub struct Cache {
    dir: Directory,
    budget: u64,
    wrap: Wrap,
    room: Mutex<Room>,
    fetched: AtomicU64,
    /// Whether its files could not be written lately.
    is_failing: AtomicBool,
    watch: Mutex<Watch>,
    watched: Condvar,
    is_closed: Mutex<bool>,
    closing: Condvar,
    /// Keeps the directory locked; `None` where another process does, and this one only reads.
    lock: Option<File>,
}

/// What is put around each file of the cache: tests fail and delay what is done with it.
struct Wrap(Box<Wrapping>);

type Wrapping = dyn Fn(Arc<dyn Store>) -> Arc<dyn Store> + Send + Sync;

impl fmt::Debug for Wrap {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Wrap")
    }
}

/// How full a cache is, and what it has done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CacheUse {
    /// Bytes of layers on this host.
    pub bytes: u64,
    /// The most there should be.
    pub budget: u64,
    /// Chunks that came from repositories since the process began.
    pub fetched: u64,
}

/// All chunks there are.
#[derive(Debug, Default)]
struct Room {
    layers: Vec<Arc<Cached>>,
    by_id: HashMap<ObjectId, usize>,
    /// Where to look next for a chunk to give up: a layer, and a chunk of it.
    hand: (usize, usize),
    /// Bytes of chunks that files have, or may have.
    used: u64,
    retired: Vec<Retired>,
    /// Layers that give up nothing.
    pinned: HashSet<ObjectId>,
}

/// Chunks of a layer that are given up.
#[derive(Debug)]
struct Retired {
    layer: Arc<Cached>,
    chunks: Vec<usize>,
    /// Of reads that may have found them here.
    token: Arc<()>,
}

#[derive(Debug, Default)]
struct Watch {
    is_running: bool,
    /// When the first waiter's time is over.
    next: Option<Instant>,
}

/// Where a chunk is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct State(u8);

impl State {
    const MISSING: Self = Self(0);
    /// The file may have it: it must be proved.
    const FOUND: Self = Self(1);
    const HERE: Self = Self(2);
    const RETIRED: Self = Self(3);
    const COMING: Self = Self(4);
    /// Beside the state: it was read since the clock's hand passed.
    const USED: u8 = 1 << 7;
}

/// What of a layer is on this host.
#[derive(Debug)]
pub(crate) struct Cached {
    pub(crate) id: ObjectId,
    /// Bytes of the layer.
    len: u64,
    /// What the layer is, once a disk has said so.
    object: Mutex<Option<Object>>,
    /// Their states; changed under the cache's room, or by who has claimed the chunk.
    chunks: Box<[AtomicU8]>,
    token: ArcSwap<()>,
    /// While a disk has it open.
    file: Mutex<Option<Weak<dyn Store>>>,
    companion: Mutex<Option<Arc<Companion>>>,
    /// Who waits for a chunk that is fetched.
    waiting: Mutex<HashMap<usize, Vec<Waiter>>>,
}

impl Cached {
    fn new(id: ObjectId, len: u64) -> Self {
        Self {
            id,
            len,
            object: Mutex::default(),
            chunks: bytemuck::zeroed_slice_box(len.div_ceil(CHUNK) as usize),
            token: ArcSwap::default(),
            file: Mutex::default(),
            companion: Mutex::default(),
            waiting: Mutex::default(),
        }
    }

    /// Where a chunk lies.
    pub(crate) fn place_of(chunk: usize) -> HostOffset {
        HostOffset::new(chunk as u64 * CHUNK)
    }

    /// Bytes of a chunk.
    pub(crate) fn chunk_len(&self, chunk: usize) -> u64 {
        CHUNK.min(self.len - chunk as u64 * CHUNK)
    }

    /// The chunks that a range lies in.
    pub(crate) fn chunks_of(&self, at: HostOffset, len: u64) -> Range<usize> {
        let end = at.get().saturating_add(len).min(self.len).div_ceil(CHUNK);
        ((at.get() / CHUNK).min(end) as usize)..end as usize
    }

    /// Keeps chunks here, if all of them are.
    #[inline]
    pub(crate) fn hold(&self, mut chunks: Range<usize>) -> Option<Hold> {
        // Before it looks at the chunks: who gives one up replaces the token after that.
        let token = self.token.load_full();
        chunks.all(|chunk| self.use_here(chunk)).then_some(token)
    }

    /// Notes that a chunk is used, if it is here.
    #[inline]
    fn use_here(&self, chunk: usize) -> bool {
        let now = self.chunks[chunk].load(Ordering::SeqCst);
        let is_here = now & !State::USED == State::HERE.0;
        if is_here && now & State::USED == 0 {
            self.chunks[chunk].fetch_or(State::USED, Ordering::SeqCst);
        }
        is_here
    }

    /// Whether a chunk was read since that was forgotten.
    pub(crate) fn is_used(&self, chunk: usize) -> bool {
        self.chunks[chunk].load(Ordering::SeqCst) & State::USED != 0
    }

    /// Forgets that a chunk was read; whether it was.
    pub(crate) fn take_used(&self, chunk: usize) -> bool {
        self.chunks[chunk].fetch_and(!State::USED, Ordering::SeqCst) & State::USED != 0
    }

    fn state(&self, chunk: usize) -> State {
        State(self.chunks[chunk].load(Ordering::SeqCst) & !State::USED)
    }

    fn set(&self, chunk: usize, state: State) {
        self.chunks[chunk].store(state.0, Ordering::SeqCst);
    }

    /// How many chunks there are.
    pub(crate) fn chunk_count(&self) -> usize {
        self.chunks.len()
    }

    /// Bytes of chunks that are here, or that the file may have.
    pub(crate) fn kept_bytes(&self) -> u64 {
        let is_kept = |chunk: &usize| self.state(*chunk) != State::MISSING;
        (0..self.chunks.len()).filter(is_kept).map(|chunk| self.chunk_len(chunk)).sum()
    }

    /// Whether a chunk is neither here nor in the file, at this moment.
    pub(crate) fn is_missing(&self, chunk: usize) -> bool {
        self.state(chunk) == State::MISSING
    }

    /// Whether a chunk is here at this moment.
    pub(crate) fn is_here(&self, chunk: usize) -> bool {
        self.state(chunk) == State::HERE
    }

    /// Says what the layer is; false if another disk has said otherwise.
    fn is(&self, object: &Object) -> bool {
        self.object.lock().get_or_insert(*object) == object
    }

    /// Its companion, which `load` gets if it is not known yet.
    pub(crate) fn companion<E>(
        &self,
        load: impl FnOnce() -> Result<Companion, E>,
    ) -> Result<Arc<Companion>, E> {
        let mut companion = self.companion.lock();
        if let Some(companion) = &*companion {
            return Ok(Arc::clone(companion));
        }
        let loaded = Arc::new(load()?);
        *companion = Some(Arc::clone(&loaded));
        Ok(loaded)
    }

    /// Adds a waiter for a chunk; true for the first one, whose caller has the chunk fetched.
    pub(crate) fn wait(&self, chunk: usize, waiter: Waiter) -> bool {
        let mut waiting = self.waiting.lock();
        let is_first = !waiting.contains_key(&chunk);
        waiting.entry(chunk).or_default().push(waiter);
        is_first
    }

    /// A chunk has come, or cannot be had: those who wait for it hear of it.
    pub(crate) fn answer(&self, chunk: usize, fetched: Result<Fetched, &Failure>) {
        let waiting = self.waiting.lock().remove(&chunk).unwrap_or_default();
        for waiter in waiting {
            (waiter.then)(fetched.map_err(Failure::error));
        }
    }

    /// Ends the fetching of a chunk if nobody waits for it any more; whether that is so.
    pub(crate) fn is_given_up(&self, chunk: usize) -> bool {
        let mut waiting = self.waiting.lock();
        let is_over = waiting.get(&chunk).is_none_or(Vec::is_empty);
        if is_over {
            waiting.remove(&chunk);
        }
        is_over
    }

    /// Tells those whose time is over; returns when that of the next one is.
    fn expire(&self, now: Instant) -> Option<Instant> {
        let (mut over, mut next) = (Vec::new(), None::<Instant>);
        for waiters in self.waiting.lock().values_mut() {
            over.extend(waiters.extract_if(.., |waiter| waiter.until.is_some_and(|until| until <= now)));
            next = next.into_iter().chain(waiters.iter().filter_map(|waiter| waiter.until)).min();
        }
        for waiter in over {
            (waiter.then)(Err(waiter.late.error()));
        }
        next
    }
}

/// What a chunk was before it was claimed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Claimed {
    /// Here: there is nothing to do.
    Here,
    /// In the file, perhaps.
    Found,
    /// Nowhere on this host.
    Missing,
}

/// What becomes of a chunk that was claimed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Settled {
    /// The file has it, and it is proved.
    Here,
    /// The file has something in its place.
    Found,
    /// The file has nothing in its place.
    Missing,
}

impl Cache {
    /// The cache in a directory, which is made if need be. It keeps to `budget` bytes, about; with fewer than [`CACHE_BYTES_MIN`]
    /// large requests may never find all that they need.
    ///
    /// # Errors
    /// A directory that cannot be used, or that another process uses.
    pub fn open(dir: &Path, budget: u64) -> Result<Arc<Self>> {
        Self::open_with(dir, budget, |file| file)
    }

    /// As [`Cache::open`], for tests: `wrap` is put around each file.
    ///
    /// # Errors
    /// As there.
    pub fn open_with(
        dir: &Path,
        budget: u64,
        wrap: impl Fn(Arc<dyn Store>) -> Arc<dyn Store> + Send + Sync + 'static,
    ) -> Result<Arc<Self>> {
        Self::opened(dir, wrap, |_| budget)
    }

    /// As [`Cache::open`], with a budget that leaves the file system room for guests' writes: `asked`, or a quarter of what the cache has
    /// and the file system has to spare, and never more than half of that; but at least [`CACHE_BYTES_MIN`].
    ///
    /// # Errors
    /// As there.
    pub fn open_within(dir: &Path, asked: Option<u64>) -> Result<Arc<Self>> {
        Self::opened(
            dir,
            |file| file,
            |cache| {
                let spare = available_bytes(&cache.dir.place(LOCK).path());
                let Some(spare) = spare else { return asked.unwrap_or(CACHE_BYTES_MIN) };
                let room = cache.usage().bytes + spare;
                let budget = asked.unwrap_or(room / ROOM_PART).min(room / ROOM_PART_MAX).max(CACHE_BYTES_MIN);
                if budget < asked.unwrap_or_default() || budget > room / ROOM_PART_MAX {
                    let dir = dir.display();
                    tracing::warn!(%dir, room, budget, "the cache's file system has little room: guests' writes need it as well");
                }
                budget
            },
        )
    }

    /// What another process keeps in a directory: each chunk is proved and used, and what is missing is read from the repository, and not
    /// kept.
    ///
    /// # Errors
    /// A directory that cannot be read.
    pub fn beside(dir: &Path) -> Result<Arc<Self>> {
        let cache = Directory::open(dir).map(|dir| Self::new(dir, None, |file| file));
        cache.map(Arc::new).map_err(|source| Error::Cache { path: dir.to_owned(), source })
    }

    fn new(
        dir: Directory,
        lock: Option<File>,
        wrap: impl Fn(Arc<dyn Store>) -> Arc<dyn Store> + Send + Sync + 'static,
    ) -> Self {
        Self {
            dir,
            budget: u64::MAX,
            wrap: Wrap(Box::new(wrap)),
            room: Mutex::default(),
            fetched: AtomicU64::new(0),
            is_failing: AtomicBool::new(false),
            watch: Mutex::default(),
            watched: Condvar::new(),
            is_closed: Mutex::new(false),
            closing: Condvar::new(),
            lock,
        }
    }

    fn opened(
        dir: &Path,
        wrap: impl Fn(Arc<dyn Store>) -> Arc<dyn Store> + Send + Sync + 'static,
        budget: impl FnOnce(&Self) -> u64,
    ) -> Result<Arc<Self>> {
        let open = || -> io::Result<Self> {
            DirBuilder::new().recursive(true).mode(0o700).create(dir)?;
            let dir = Directory::open(dir)?;
            let lock = lock(&dir)?;
            Ok(Self::new(dir, Some(lock), wrap))
        };
        let cache = open().and_then(|mut cache| {
            cache.find()?;
            cache.budget = budget(&cache);
            cache.check_pins();
            cache.shrink(&mut cache.room.lock());
            Ok(cache)
        });
        cache.map(Arc::new).map_err(|source| Error::Cache { path: dir.to_owned(), source })
    }

    /// How full it is, and what it has done.
    pub fn usage(&self) -> CacheUse {
        let bytes = self.room.lock().used;
        CacheUse { bytes, budget: self.budget, fetched: self.fetched.load(Ordering::Relaxed) }
    }

    /// Fails all that waits, and all that would wait from now on: disks can then be closed though a repository does not answer.
    pub fn close(&self) {
        *self.is_closed.lock() = true;
        self.closing.notify_all();
        let layers = self.room.lock().layers.clone();
        for layer in layers {
            let chunks: Vec<usize> = layer.waiting.lock().keys().copied().collect();
            chunks.into_iter().for_each(|chunk| layer.answer(chunk, Err(&Failure::closed())));
        }
    }

    /// Its directory.
    pub fn path(&self) -> PathBuf {
        self.dir.path().to_owned()
    }

    /// Whether this process fills it.
    pub(crate) fn is_own(&self) -> bool {
        self.lock.is_some()
    }

    pub(crate) fn is_closed(&self) -> bool {
        *self.is_closed.lock()
    }

    /// Waits, unless the cache is closed.
    pub(crate) fn pause(&self, time: Duration) {
        let mut is_closed = self.is_closed.lock();
        if !*is_closed {
            self.closing.wait_for(&mut is_closed, time);
        }
    }

    /// Takes in what an earlier process has left, without reading it.
    fn find(&self) -> io::Result<()> {
        let mut room = self.room.lock();
        for entry in self.dir.entries()? {
            let (place, _) = entry?;
            room.pinned.extend(id_of(&place, PINNED_SUFFIX));
            let Some(id) = id_of(&place, CHUNKS_SUFFIX) else { continue };
            let file = match place.open(Access::ReadWrite) {
                Ok(file) => self.wrapped(file, &place)?,
                Err(error) => {
                    tracing::warn!(file = %place.path().display(), %error, "the cache leaves this file alone");
                    continue;
                }
            };
            let len = file.len()?;
            let layer = Cached::new(id, if len <= LAYER_BYTES_MAX { len } else { 0 });
            let mut at = HostOffset::ZERO;
            while at.get() < layer.len {
                let (is_data, end) = file.extent(at)?;
                if end <= at {
                    // Somebody cuts it off.
                    break;
                }
                if is_data {
                    for chunk in layer.chunks_of(at, end.get() - at.get()) {
                        if layer.state(chunk) == State::MISSING {
                            layer.set(chunk, State::FOUND);
                            room.used += layer.chunk_len(chunk);
                        }
                    }
                }
                at = end;
            }
            if (0..layer.chunks.len()).all(|chunk| layer.state(chunk) == State::MISSING) {
                place.remove()?;
                // Its companion may not have been kept.
                let _ = self.companion_place(id).remove();
            } else {
                room.add(Arc::new(layer));
            }
        }
        Ok(())
    }

    /// What of a layer is here, from now on for a disk that knows what the layer is.
    ///
    /// # Errors
    /// A layer that is too large, or that another disk knows as something else.
    pub(crate) fn layer(&self, object: &Object) -> Result<Arc<Cached>> {
        let place = self.chunks_place(object.id);
        let failed =
            |why: &str| Error::Cache { path: place.path(), source: io::Error::other(why.to_owned()) };
        if object.bytes > LAYER_BYTES_MAX {
            return Err(failed("a layer of more than 16 TiB"));
        }
        let mut room = self.room.lock();
        let known = room.by_id.get(&object.id).map(|&place| Arc::clone(&room.layers[place]));
        let layer = match known {
            Some(layer) if layer.len == object.bytes || layer.object.lock().is_some() => layer,
            // A file of another length is none of this layer's.
            Some(_) | None => room.add(Arc::new(Cached::new(object.id, object.bytes))),
        };
        if layer.is(object) { Ok(layer) } else { Err(failed("another repository has a layer of this id")) }
    }

    /// The file that has what is here of a layer.
    ///
    /// # Errors
    /// Whatever the host reports.
    pub(crate) fn file(&self, layer: &Cached) -> io::Result<Arc<dyn Store>> {
        let mut file = layer.file.lock();
        if let Some(file) = file.as_ref().and_then(Weak::upgrade) {
            return Ok(file);
        }
        let place = self.chunks_place(layer.id);
        if !self.is_own() {
            return self.file_beside(&place);
        }
        let opened = self.wrapped(place.open_or_create(PRIVATE)?, &place)?;
        if opened.len()? != layer.len {
            opened.set_len(0)?;
            opened.set_len(layer.len)?;
        }
        *file = Some(Arc::downgrade(&opened));
        Ok(opened)
    }

    /// The file that another process may have of a layer; an empty one otherwise.
    fn file_beside(&self, place: &Place) -> io::Result<Arc<dyn Store>> {
        let file = match place.open(Access::ReadOnly) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                File::from(memfd_create("none", MemfdFlags::CLOEXEC)?)
            }
            opened => opened?,
        };
        let options = FileOptions { access: Access::ReadOnly, lock: None, ..FileOptions::FROZEN };
        Ok(Arc::new(FileStore::new(file, &place.path(), &options).map_err(io::Error::other)?))
    }

    fn wrapped(&self, file: File, place: &Place) -> io::Result<Arc<dyn Store>> {
        let options = FileOptions { access: Access::ReadWrite, lock: None, ..FileOptions::FROZEN };
        let store = FileStore::new(file, &place.path(), &options).map_err(io::Error::other)?;
        Ok((self.wrap.0)(Arc::new(store)))
    }

    fn chunks_place(&self, id: ObjectId) -> Place {
        self.dir.place(format!("{id}{CHUNKS_SUFFIX}"))
    }

    fn companion_place(&self, id: ObjectId) -> Place {
        self.dir.place(id.companion_name().as_str())
    }

    /// The companion that was kept of a layer, whatever it is worth.
    pub(crate) fn kept_companion(&self, object: &Object) -> io::Result<Vec<u8>> {
        let file = self.companion_place(object.id).open(Access::ReadOnly)?;
        let mut bytes = Vec::new();
        file.take(Companion::encoded_len_max(object.bytes)).read_to_end(&mut bytes)?;
        Ok(bytes)
    }

    /// Keeps a companion.
    ///
    /// # Errors
    /// Whatever the host reports.
    pub(crate) fn keep_companion(&self, id: ObjectId, bytes: &[u8]) -> io::Result<()> {
        if !self.is_own() {
            return Ok(());
        }
        let mut file = self.companion_place(id).open_or_create(PRIVATE)?;
        file.set_len(0)?;
        file.write_all(bytes)
    }

    /// Claims a chunk for whoever fetches it, who settles it if it is not here.
    ///
    /// # Panics
    /// When it is claimed already.
    pub(crate) fn claim(&self, layer: &Cached, chunk: usize) -> Claimed {
        let _room = self.room.lock();
        let claimed = match layer.state(chunk) {
            State::HERE => return Claimed::Here,
            State::FOUND | State::RETIRED => Claimed::Found,
            state => {
                assert_eq!(state, State::MISSING, "a chunk is fetched by one thread at a time");
                Claimed::Missing
            }
        };
        layer.set(chunk, State::COMING);
        claimed
    }

    /// Ends a claim: says where the chunk is now, and gives up others for it if need be.
    pub(crate) fn settle(&self, layer: &Cached, chunk: usize, claimed: Claimed, settled: Settled) {
        let mut room = self.room.lock();
        let (state, takes_room) = match settled {
            Settled::Here => (State::HERE.0 | State::USED, true),
            Settled::Found => (State::FOUND.0, true),
            Settled::Missing => (State::MISSING.0, false),
        };
        if takes_room && claimed == Claimed::Missing {
            room.used += layer.chunk_len(chunk);
        }
        layer.chunks[chunk].store(state, Ordering::SeqCst);
        self.shrink(&mut room);
    }

    /// Gives up a few chunks for others, as the host has no room.
    pub(crate) fn give_up_some(&self) {
        let mut room = self.room.lock();
        room.retire(FEW);
        self.reclaim(&mut room);
    }

    /// Notes whether its files can be written, and says so when that changes.
    pub(crate) fn note_written(&self, written: &io::Result<()>) {
        let was_failing = self.is_failing.swap(written.is_err(), Ordering::Relaxed);
        let cache = self.dir.path().display();
        match written {
            Err(error) if !was_failing => {
                tracing::error!(%cache, %error, "the cache cannot be written: what it lacks is read from the NAS each time");
            }
            Ok(()) if was_failing => tracing::info!(%cache, "the cache is written again"),
            _ => {}
        }
    }

    /// A chunk came from its repository.
    pub(crate) fn count_fetched(&self) {
        self.fetched.fetch_add(1, Ordering::Relaxed);
    }

    /// The host cannot read a chunk back: it is not here any more.
    pub(crate) fn lose(&self, layer: &Cached, chunk: usize) {
        let _room = self.room.lock();
        if layer.is_here(chunk) {
            layer.set(chunk, State::FOUND);
        }
    }

    /// Gives up chunks until the rest is within the budget, but for those that reads hold.
    fn shrink(&self, room: &mut Room) {
        self.reclaim(room);
        let leaving: u64 = room.retired.iter().map(Retired::bytes).sum();
        let staying = room.used - leaving;
        if staying > self.budget {
            room.retire(staying - (self.budget - self.budget / SPARE));
            self.reclaim(room);
        }
    }

    /// Frees the space of what is given up and not read any more.
    fn reclaim(&self, room: &mut Room) {
        let Room { retired, used, .. } = room;
        retired.retain_mut(|Retired { layer, chunks, token }| {
            if Arc::get_mut(token).is_none() {
                return true;
            }
            for &chunk in chunks.iter().filter(|&&chunk| layer.state(chunk) == State::RETIRED) {
                let len = layer.chunk_len(chunk);
                match self.file(layer).and_then(|file| file.punch_hole(Cached::place_of(chunk), len)) {
                    Ok(()) => {
                        *used -= len;
                        layer.set(chunk, State::MISSING);
                    }
                    Err(error) => {
                        tracing::warn!(layer = %layer.id, %error, "the cache cannot give space back");
                        layer.set(chunk, State::FOUND);
                    }
                }
            }
            false
        });
    }
}

impl Room {
    /// Takes a layer in, in place of one of its id, of which nothing is used.
    fn add(&mut self, layer: Arc<Cached>) -> Arc<Cached> {
        match self.by_id.get(&layer.id) {
            Some(&place) => {
                let before = std::mem::replace(&mut self.layers[place], Arc::clone(&layer));
                let found = (0..before.chunks.len()).filter(|&chunk| before.state(chunk) != State::MISSING);
                self.used -= found.map(|chunk| before.chunk_len(chunk)).sum::<u64>();
            }
            None => {
                self.by_id.insert(layer.id, self.layers.len());
                self.layers.push(Arc::clone(&layer));
            }
        }
        layer
    }

    /// Gives up chunks that were not used for longest, about: `excess` bytes, or what there is in two turns of the hand.
    fn retire(&mut self, mut excess: u64) {
        let mut chosen: BTreeMap<usize, Vec<usize>> = BTreeMap::new();
        for _ in 0..=2 * self.layers.len() {
            let place = self.hand.0 % self.layers.len();
            let layer = &self.layers[place];
            let is_kept = self.pinned.contains(&layer.id) || self.gives_up(layer);
            while !is_kept && excess > 0 && self.hand.1 < layer.chunks.len() {
                let chunk = self.hand.1;
                self.hand.1 += 1;
                let is_kept = matches!(layer.state(chunk), State::HERE | State::FOUND);
                if is_kept && !layer.take_used(chunk) {
                    layer.set(chunk, State::RETIRED);
                    excess = excess.saturating_sub(layer.chunk_len(chunk));
                    chosen.entry(place).or_default().push(chunk);
                }
            }
            if excess == 0 {
                break;
            }
            self.hand = (place + 1, 0);
        }
        for (place, chunks) in chosen {
            self.retired.push(Retired::new(Arc::clone(&self.layers[place]), chunks));
        }
    }

    /// Whether a layer gives up chunks already, which are in the way of more.
    fn gives_up(&self, layer: &Arc<Cached>) -> bool {
        self.retired.iter().any(|retired| Arc::ptr_eq(&retired.layer, layer))
    }
}

impl Retired {
    /// Chunks that were marked so.
    fn new(layer: Arc<Cached>, chunks: Vec<usize>) -> Self {
        let token = layer.token.swap(Arc::default());
        Self { layer, chunks, token }
    }

    /// Bytes that it will give back.
    fn bytes(&self) -> u64 {
        let leaving = self.chunks.iter().filter(|&&chunk| self.layer.state(chunk) == State::RETIRED);
        leaving.map(|&chunk| self.layer.chunk_len(chunk)).sum()
    }
}

/// Locks the directory for this process.
fn lock(dir: &Directory) -> io::Result<File> {
    let file = dir.place(LOCK).open_or_create(PRIVATE)?;
    if lock_within(&file, PATIENCE)? {
        Ok(file)
    } else {
        Err(io::Error::new(io::ErrorKind::ResourceBusy, "another process uses it"))
    }
}

/// Which layer a file of the cache with this suffix is of.
fn id_of(place: &Place, suffix: &str) -> Option<ObjectId> {
    let name = place.name().to_str()?;
    let id: ObjectId = name.strip_suffix(suffix)?.parse().ok()?;
    (format!("{id}{suffix}") == name).then_some(id)
}
