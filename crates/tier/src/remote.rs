//! Layers of a repository, read through the host's cache.
//!
//! ```text
//!   read ──► chunk here? ── yes: held ──► the cache's file, as any local file
//!                │ no                          ▲
//!                ▼                             │ written
//!          who waits for it ──► thread: found in the file, or read from the repository ──► proved by its digest
//! ```
//!
//! However many wait for a chunk, it is fetched once. A repository has threads of its own while there is something to fetch, so that one
//! that hangs keeps none from the others. What a repository cannot give is asked for again until it comes, or nobody waits for it any more:
//! whether and how long reads wait is [`OnMissing`]. A layer's tables come from its companion, without the layer. Bytes that their digest does not prove are an error at once. Where the cache's files cannot
//! be written, each read goes to the repository.

use std::collections::{HashMap, VecDeque};
use std::fmt;
use std::io;
use std::num::NonZeroU64;
use std::ops::Range;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};
use rustix::fs::Advice;
use vmstrata_repo::{Error as RepositoryError, ObjectReader, Repository};
use vmstrata_store::{
    Fetch, Fetched, FileId, FileIdentity, Hold, LocalFile, Segment, Store, copy_from_slice, slice, total_len,
};
use vmstrata_types::HostOffset;

use crate::abreast::each;
use crate::boot::Boot;
use crate::cache::{Cache, Cached, Claimed, Settled};
use crate::companion::Companion;
use crate::error::{Error, Result};
use crate::head::{Object, ObjectId};
use crate::waiter::{Failure, Waiter};

/// Chunks of a repository that are fetched at a time.
const THREADS_MAX: usize = 8;
/// Companions of layers that are read at a time, when a chain is to be opened.
const PREPARED_AT_ONCE: usize = 128;
/// For how long a thread without work stays.
const IDLE: Duration = Duration::from_secs(1);
/// After which a repository that did not answer is asked again, at first and at most.
const PAUSE_MIN: Duration = Duration::from_millis(10);
const PAUSE_MAX: Duration = Duration::from_secs(1);

/// Of a cache's file: one of zeros may be a hole.
const BLOCK: usize = 4096;
/// Who says nothing for so long does not answer.
const SLOW: Duration = Duration::from_secs(3);

/// What becomes of a read of bytes that the cache lacks while the repository does not answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OnMissing {
    /// It waits.
    Wait,
    /// It waits for so long, and then fails.
    Error(Duration),
}

/// See the module documentation.
pub struct Remote {
    cache: Arc<Cache>,
    repository: Arc<dyn Repository>,
    on_missing: OnMissing,
    queue: Mutex<Queue>,
    more: Condvar,
    readers: Mutex<Readers>,
    /// The start of disks that is watched.
    boot: Mutex<Option<Arc<Boot>>>,
}

/// Of layers, while something is fetched: the repository's file system can be unmounted when nothing is.
type Readers = HashMap<ObjectId, Arc<dyn ObjectReader>>;

#[derive(Debug, Default)]
struct Queue {
    jobs: VecDeque<Job>,
    threads: usize,
    idle: usize,
    /// Since when the repository has not answered.
    silent: Option<Instant>,
    /// When what is fetched now was begun.
    begun: Vec<Instant>,
}

/// A chunk to be fetched.
#[derive(Debug)]
struct Job {
    layer: Arc<Far>,
    chunk: usize,
}

/// A layer of a repository, as a store whose bytes come when they are asked for.
#[derive(Clone, Debug)]
pub struct CachedLayer(Arc<Far>);

struct Far {
    remote: Arc<Remote>,
    object: Object,
    cached: Arc<Cached>,
    file: Arc<dyn Store>,
}

impl fmt::Debug for Remote {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Remote").field("repository", &self.repository).finish_non_exhaustive()
    }
}

impl fmt::Debug for Far {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Far").field("object", &self.object).finish_non_exhaustive()
    }
}

impl Remote {
    /// The layers of a repository, by way of a cache.
    pub fn new(cache: &Arc<Cache>, repository: Arc<dyn Repository>, on_missing: OnMissing) -> Arc<Self> {
        let (cache, more) = (Arc::clone(cache), Condvar::new());
        Arc::new(Self {
            cache,
            repository,
            on_missing,
            queue: Mutex::default(),
            more,
            readers: Mutex::default(),
            boot: Mutex::default(),
        })
    }

    /// The start of disks that is watched.
    pub(crate) fn boot(&self) -> &Mutex<Option<Arc<Boot>>> {
        &self.boot
    }

    /// The repository.
    pub(crate) fn repository(&self) -> &Arc<dyn Repository> {
        &self.repository
    }

    /// A layer. The repository is not asked.
    ///
    /// # Errors
    /// A cache that has no room for its file, or knows another layer of its id.
    pub fn layer(self: &Arc<Self>, object: &Object) -> Result<CachedLayer> {
        let cached = self.cache.layer(object)?;
        let file = self.cache.file(&cached).map_err(|source| {
            let path = self.cache.path();
            Error::Cache { path, source }
        })?;
        Ok(CachedLayer(Arc::new(Far { remote: Arc::clone(self), object: *object, cached, file })))
    }

    /// Brings what lies beside these layers here, and begins to put their tables into the cache: whoever opens their chain reads the tables
    /// of one after the other. What cannot be had now is asked for again when it is read.
    ///
    /// # Errors
    /// As [`Remote::layer`].
    pub(crate) fn prepare(self: &Arc<Self>, objects: &[Object]) -> Result<()> {
        each(objects, PREPARED_AT_ONCE, |object| {
            if let Ok(cached) = self.cache.layer(object) {
                // See above.
                let _ = self.companion(object, &cached);
            }
            true
        });
        for object in objects {
            let layer = self.layer(object)?;
            let chunks = layer.0.cached.companion(|| Err(())).map_or(0, |companion| companion.chunks());
            let tables = Cached::place_of(chunks).get().max(1);
            layer.fetch_within(HostOffset::ZERO, tables, self.on_missing, Box::new(drop));
        }
        Ok(())
    }

    /// The companion of a layer: what this host has kept, or else that of the repository.
    fn companion(&self, object: &Object, cached: &Cached) -> Result<Arc<Companion>, Failure> {
        cached.companion(|| {
            let kept = self.cache.kept_companion(object).ok();
            if let Some(companion) = kept.and_then(|bytes| Companion::decode(&bytes, object)) {
                return Ok(companion);
            }
            let name = object.id.companion_name();
            let beside = self.repository.open(&name).map_err(|error| failure(&error))?;
            let refused = || self.other_bytes(name.as_str());
            if beside.len() > Companion::encoded_len_max(object.bytes) {
                return Err(refused());
            }
            let mut bytes = vec![0; beside.len() as usize];
            beside.read_at(0, &mut bytes).map_err(|error| failure(&error))?;
            let companion = Companion::decode(&bytes, object).ok_or_else(refused)?;
            if let Err(error) = self.cache.keep_companion(object.id, &bytes) {
                tracing::debug!(%name, %error, "the cache does not keep it: the repository is asked again");
            }
            Ok(companion)
        })
    }

    fn other_bytes(&self, what: &str) -> Failure {
        let repository = self.repository.describe();
        Failure::new(io::ErrorKind::InvalidData, format!("{repository}: {what} is not what was shipped"))
    }

    /// The layers' cache.
    pub fn cache(&self) -> &Arc<Cache> {
        &self.cache
    }

    /// Whether it reads through this cache, and waits so long.
    pub(crate) fn is_through(&self, cache: &Arc<Cache>, on_missing: OnMissing) -> bool {
        Arc::ptr_eq(&self.cache, cache) && self.on_missing == on_missing
    }

    /// Since when the repository has not answered those who wait for it, because it fails, or because it says nothing.
    pub fn silent_since(&self) -> Option<Instant> {
        let queue = self.queue.lock();
        let hangs = || queue.begun.iter().min().copied().filter(|begun| begun.elapsed() > SLOW);
        queue.silent.or_else(hangs)
    }

    /// A waiter, who waits for so long.
    fn waiter(&self, patience: OnMissing, then: Box<dyn FnOnce(io::Result<Fetched>) + Send>) -> Waiter {
        let (until, text) = match patience {
            OnMissing::Wait => (None, String::new()),
            OnMissing::Error(time) => {
                let text = format!("{}: no answer for {} s", self.repository.describe(), time.as_secs_f32());
                (Some(Instant::now() + time), text)
            }
        };
        Waiter { until, late: Failure::new(io::ErrorKind::TimedOut, text), then }
    }

    /// Has a thread fetch a chunk.
    fn start(self: &Arc<Self>, job: Job) {
        let mut queue = self.queue.lock();
        queue.jobs.push_back(job);
        if queue.idle >= queue.jobs.len() {
            self.more.notify_one();
        } else if queue.threads < THREADS_MAX {
            queue.threads += 1;
            let remote = Arc::clone(self);
            if let Err(error) = thread::Builder::new().name("fetch".to_owned()).spawn(move || remote.work()) {
                queue.threads -= 1;
                // Without any thread, nobody would get to them.
                let stranded =
                    if queue.threads == 0 { std::mem::take(&mut queue.jobs) } else { VecDeque::new() };
                drop(queue);
                let failure = Failure::new(error.kind(), format!("no thread to fetch it: {error}"));
                stranded.iter().for_each(|job| job.layer.cached.answer(job.chunk, Err(&failure)));
            }
        }
    }

    fn work(&self) {
        let mut queue = self.queue.lock();
        loop {
            if let Some(job) = queue.jobs.pop_front() {
                let begun = Instant::now();
                queue.begun.push(begun);
                drop(queue);
                job.run();
                queue = self.queue.lock();
                let place = queue.begun.iter().position(|other| *other == begun);
                queue.begun.swap_remove(place.expect("put there above"));
                continue;
            }
            queue.idle += 1;
            let is_over = self.more.wait_for(&mut queue, IDLE).timed_out();
            queue.idle -= 1;
            if is_over && queue.jobs.is_empty() {
                queue.threads -= 1;
                let mut unused = Readers::new();
                if queue.threads == 0 {
                    // Nobody waits any more.
                    queue.silent = None;
                    unused = std::mem::take(&mut *self.readers.lock());
                }
                drop(queue);
                // A repository that hangs may do so when they are closed.
                drop(unused);
                return;
            }
        }
    }

    /// Notes whether the repository answers, and says so when that changes.
    fn note(&self, failure: Option<&Failure>) {
        let mut queue = self.queue.lock();
        match (failure, queue.silent) {
            (Some(failure), None) => {
                queue.silent = Some(Instant::now());
                drop(queue);
                tracing::warn!(error = %failure.text, "reads wait for what the cache lacks: it is asked for again");
            }
            (None, Some(since)) => {
                queue.silent = None;
                drop(queue);
                let (repository, seconds) = (self.repository.describe(), since.elapsed().as_secs());
                tracing::info!(repository, seconds, "what the cache lacks is read again");
            }
            _ => {}
        }
    }
}

impl Drop for Remote {
    fn drop(&mut self) {
        self.boot.get_mut().iter().for_each(|boot| boot.leave());
    }
}

impl Job {
    /// Fetches the chunk, until it is here or nobody waits for it any more.
    fn run(self) {
        let Self { layer, chunk } = self;
        let (remote, cached) = (&layer.remote, &layer.cached);
        let mut pause = PAUSE_MIN;
        loop {
            let fetched = layer.bring(chunk, None);
            let failure = match &fetched {
                Err(failure) if failure.kind != io::ErrorKind::InvalidData => Some(failure),
                _ => None,
            };
            remote.note(failure);
            if failure.is_none() {
                return cached.answer(chunk, fetched.as_ref().copied());
            }
            if remote.cache.is_closed() {
                return cached.answer(chunk, Err(&Failure::closed()));
            }
            if cached.is_given_up(chunk) {
                return;
            }
            remote.cache.pause(pause);
            pause = (2 * pause).min(PAUSE_MAX);
        }
    }
}

impl Far {
    /// Stores a chunk that no other thread brings: the bytes that were `proved`, or else those of the repository.
    ///
    /// # Errors
    /// `InvalidData` for other bytes than were shipped; else it may come later.
    fn bring(&self, chunk: usize, proved: Option<Vec<u8>>) -> Result<Fetched, Failure> {
        let cache = &self.remote.cache;
        if !cache.is_own() {
            return Ok(Fetched::NotKept);
        }
        let claimed = cache.claim(&self.cached, chunk);
        if claimed == Claimed::Here {
            return Ok(Fetched::Here);
        }
        let mut left = if claimed == Claimed::Found { Settled::Found } else { Settled::Missing };
        let brought = self.bring_claimed(chunk, &mut left, proved);
        let settled = if matches!(brought, Ok(Fetched::Here)) { Settled::Here } else { left };
        cache.settle(&self.cached, chunk, claimed, settled);
        brought
    }

    /// Brings a chunk of whose place in the file `left` says what it has.
    fn bring_claimed(
        &self,
        chunk: usize,
        left: &mut Settled,
        proved: Option<Vec<u8>>,
    ) -> Result<Fetched, Failure> {
        let cache = &self.remote.cache;
        let at = Cached::place_of(chunk);
        let may_be_there = *left == Settled::Found;
        let (mut is_table, is_proved) = (false, proved.is_some());
        let mut bytes = proved.unwrap_or_else(|| vec![0; self.cached.chunk_len(chunk) as usize]);
        if !is_proved {
            let companion = self.remote.companion(&self.object, &self.cached)?;
            let is_found = may_be_there && self.file.read_exact(&mut bytes, at).is_ok();
            if is_found && companion.digests.prove(chunk, &bytes) {
                return Ok(Fetched::Here);
            }
            is_table = companion.unpack(chunk, &mut bytes);
            if !is_table {
                self.fetch(chunk, &companion, &mut bytes)?;
            }
        }
        *left = Settled::Found;
        // Of tables, most is a hole and stays one.
        let write = || {
            if is_table && !may_be_there {
                self.write_data(&bytes, at)
            } else {
                self.file.write_all(&bytes, at)
            }
        };
        let mut written = write();
        if matches!(&written, Err(error) if error.kind() == io::ErrorKind::StorageFull) {
            cache.give_up_some();
            written = write();
        }
        cache.note_written(&written);
        Ok(if written.is_ok() { Fetched::Here } else { Fetched::NotKept })
    }

    /// Writes what is not zeros to the cache's file.
    fn write_data(&self, bytes: &[u8], at: HostOffset) -> io::Result<()> {
        let blocks = bytes.chunks(BLOCK).zip((at.get()..).step_by(BLOCK));
        let mut data = blocks.filter(|(block, _)| block.iter().any(|byte| *byte != 0));
        data.try_for_each(|(block, at)| self.file.write_all(block, HostOffset::new(at)))
    }

    /// Reads a chunk from the repository, and proves it.
    fn fetch(&self, chunk: usize, companion: &Companion, into: &mut [u8]) -> Result<(), Failure> {
        let at = Cached::place_of(chunk);
        self.read(at.get(), into)?;
        if !companion.digests.prove(chunk, into) {
            return Err(self.remote.other_bytes(&format!("{} at byte {at}", self.object.id.layer_name())));
        }
        self.remote.cache.count_fetched();
        Ok(())
    }

    /// Reads a part of a chunk that this process cannot keep: from the repository, unless another process has it.
    fn read_past(&self, chunk: usize, into: &[Segment<'_>], at: HostOffset) -> Result<(), Failure> {
        let companion = self.remote.companion(&self.object, &self.cached)?;
        let mut bytes = vec![0; self.cached.chunk_len(chunk) as usize];
        let at_chunk = Cached::place_of(chunk);
        let is_beside = !self.remote.cache.is_own() && self.file.read_exact(&mut bytes, at_chunk).is_ok();
        let is_right = is_beside && companion.digests.prove(chunk, &bytes);
        if !is_right && !companion.unpack(chunk, &mut bytes) {
            self.fetch(chunk, &companion, &mut bytes)?;
        }
        let from = (at.get() - Cached::place_of(chunk).get()) as usize;
        copy_from_slice(into, &bytes[from..from + total_len(into)]);
        Ok(())
    }

    /// Reads from the repository.
    fn read(&self, at: u64, into: &mut [u8]) -> Result<(), Failure> {
        let reader = self.reader()?;
        reader.read_at(at, into).map_err(|error| {
            // The next one opens it anew: it may have been mounted again.
            self.remote.readers.lock().remove(&self.object.id);
            failure(&error)
        })
    }

    fn reader(&self) -> Result<Arc<dyn ObjectReader>, Failure> {
        if let Some(reader) = self.remote.readers.lock().get(&self.object.id) {
            return Ok(Arc::clone(reader));
        }
        let name = self.object.id.layer_name();
        let reader: Arc<dyn ObjectReader> =
            self.remote.repository.open(&name).map_err(|error| failure(&error))?.into();
        if reader.len() != self.object.bytes {
            return Err(self.remote.other_bytes(&format!("{name}, which has another length,")));
        }
        self.remote.readers.lock().insert(self.object.id, Arc::clone(&reader));
        Ok(reader)
    }
}

fn failure(error: &RepositoryError) -> Failure {
    Failure::new(error.kind(), format!("{error}: {}", error.source))
}

impl CachedLayer {
    /// Which layer it is.
    pub fn id(&self) -> ObjectId {
        self.0.object.id
    }

    /// Waits until a chunk has been fetched.
    fn wait(&self, chunk: usize) -> io::Result<Fetched> {
        self.note_missed(chunk..chunk + 1);
        self.wait_for(Cached::place_of(chunk), 1, self.0.remote.on_missing)
    }

    /// Has a chunk fetched, however long that takes.
    pub(crate) fn fetch_ahead(&self, chunk: usize, then: Box<dyn FnOnce(io::Result<Fetched>) + Send>) {
        self.fetch_within(Cached::place_of(chunk), 1, OnMissing::Wait, then);
    }

    /// Notes what guests ask for that is not here.
    fn note_missed(&self, chunks: Range<usize>) {
        let Far { cached, remote, object, .. } = &*self.0;
        let boot = remote.boot.lock().clone();
        let Some(boot) = boot else { return };
        chunks.filter(|&chunk| cached.is_missing(chunk)).for_each(|chunk| boot.missed(object.id, chunk));
    }

    /// Waits until the chunks of a range have been fetched.
    pub(crate) fn wait_for(&self, at: HostOffset, len: u64, patience: OnMissing) -> io::Result<Fetched> {
        let (tell, told) = std::sync::mpsc::channel();
        let then = move |fetched| {
            // The receiver waits below.
            let _ = tell.send(fetched);
        };
        self.fetch_within(at, len, patience, Box::new(then));
        told.recv().expect("who waits is answered")
    }

    /// What the layer is.
    pub(crate) fn object(&self) -> &Object {
        &self.0.object
    }

    /// Bytes of the layer.
    pub(crate) fn bytes(&self) -> u64 {
        self.0.object.bytes
    }

    /// What of it is on this host.
    pub(crate) fn cached(&self) -> &Arc<Cached> {
        &self.0.cached
    }

    /// Where it comes from.
    pub(crate) fn remote(&self) -> &Arc<Remote> {
        &self.0.remote
    }

    /// The same layer, of which reads wait so long.
    ///
    /// # Errors
    /// As [`Remote::layer`].
    pub(crate) fn with_patience(&self, patience: OnMissing) -> Result<Self> {
        let Remote { cache, repository, .. } = &**self.remote();
        Remote::new(cache, Arc::clone(repository), patience).layer(self.object())
    }

    /// Takes the bytes of a chunk from this host, if they are what was shipped; whether the chunk is here by that. Does not wait.
    pub(crate) fn take(&self, chunk: usize, bytes: Vec<u8>) -> bool {
        let Far { cached, remote, .. } = &*self.0;
        let is_right = |companion: Arc<Companion>| companion.digests.prove(chunk, &bytes);
        if !cached.companion(|| Err(())).is_ok_and(is_right) || !cached.begin(chunk) {
            return false;
        }
        if remote.cache.is_closed() {
            // As in `fetch_within`.
            cached.answer(chunk, Err(&Failure::closed()));
            return false;
        }
        let brought = self.0.bring(chunk, Some(bytes));
        cached.answer(chunk, brought.as_ref().copied());
        matches!(brought, Ok(Fetched::Here))
    }

    /// Reads a chunk that is here once more, from the cache's device; false if that has other bytes, which are not here any more. One that is not here
    /// is proved when it is used.
    ///
    /// # Errors
    /// A companion that cannot be had.
    pub(crate) fn prove_again(&self, chunk: usize) -> io::Result<bool> {
        let Far { cached, remote, file, .. } = &*self.0;
        let companion = remote.companion(&self.0.object, cached).map_err(|failure| failure.error())?;
        let Some(hold) = cached.hold(chunk..chunk + 1) else { return Ok(true) };
        let (at, len) = (Cached::place_of(chunk), cached.chunk_len(chunk));
        if let Some(raw) = file.local().and_then(LocalFile::raw) {
            // It may be in memory still: then that is looked at.
            let _ = rustix::fs::fadvise(raw, at.get(), NonZeroU64::new(len), Advice::DontNeed);
        }
        let mut bytes = vec![0; len as usize];
        let is_right = file.read_exact(&mut bytes, at).is_ok() && companion.digests.prove(chunk, &bytes);
        drop(hold);
        if !is_right {
            remote.cache.lose(cached, chunk);
        }
        Ok(is_right)
    }

    /// Reads what of a chunk `into` is for, and waits for it if it is elsewhere.
    fn read(&self, chunk: usize, into: &[Segment<'_>], at: HostOffset) -> io::Result<()> {
        let Far { cached, remote, file, .. } = &*self.0;
        if !remote.cache.is_own() {
            return self.0.read_past(chunk, into, at).map_err(|failure| failure.error());
        }
        let (mut is_again, mut is_kept) = (false, true);
        loop {
            let Some(hold) = cached.hold(chunk..chunk + 1) else {
                if !is_kept {
                    match self.0.read_past(chunk, into, at) {
                        Err(failure) if failure.kind != io::ErrorKind::InvalidData => {}
                        read => return read.map_err(|failure| failure.error()),
                    }
                }
                // As long as reads of this repository wait.
                is_kept = self.wait(chunk)? == Fetched::Here;
                continue;
            };
            let read = file.read_segments(into, at);
            drop(hold);
            let error = match read {
                Ok(read) if read == total_len(into) => return Ok(()),
                Ok(_) => io::ErrorKind::UnexpectedEof.into(),
                Err(error) => error,
            };
            // The host has lost it: the repository has it still. A second time, the cache's device may be failing.
            (is_kept, is_again) = (!is_again, true);
            tracing::warn!(layer = %self.id(), %error, "the cache cannot read a chunk back: it is fetched again");
            remote.cache.lose(cached, chunk);
        }
    }
}

/// Stands for a layer as a file's identity does: from its random id, as it never changes.
pub(crate) fn identity_of(object: &Object) -> FileIdentity {
    let id = object.id.to_u128();
    // An inode of 0 would be a device.
    let file = FileId { dev: (id >> 64) as u64, ino: id as u64 | 1 };
    FileIdentity { file, len: object.bytes, mtime_ns: 0, ctime_ns: 0 }
}

fn read_only() -> io::Error {
    io::Error::new(io::ErrorKind::Unsupported, "a layer of a repository is only read")
}

impl Store for CachedLayer {
    fn read_segments(&self, segments: &[Segment<'_>], at: HostOffset) -> io::Result<usize> {
        let left = usize::try_from(self.0.object.bytes.saturating_sub(at.get())).unwrap_or(usize::MAX);
        let len = total_len(segments).min(left);
        for chunk in self.0.cached.chunks_of(at, len as u64) {
            let start = Cached::place_of(chunk).max(at);
            let end = Cached::place_of(chunk + 1).get().min(at.get() + len as u64);
            let part = slice(segments, (start.get() - at.get()) as usize, (end - start.get()) as usize);
            self.read(chunk, &part, start)?;
        }
        Ok(len)
    }

    fn write_segments(&self, _: &[Segment<'_>], _: HostOffset) -> io::Result<()> {
        Err(read_only())
    }

    fn flush(&self) -> io::Result<()> {
        Ok(())
    }

    fn punch_hole(&self, _: HostOffset, _: u64) -> io::Result<()> {
        Err(read_only())
    }

    fn len(&self) -> io::Result<u64> {
        Ok(self.0.object.bytes)
    }

    fn set_len(&self, _: u64) -> io::Result<()> {
        Err(read_only())
    }

    fn fetch(&self) -> Option<&dyn Fetch> {
        Some(self)
    }
}

impl Fetch for CachedLayer {
    #[inline]
    fn hold(&self, at: HostOffset, len: u64) -> Option<Hold> {
        let cached = &self.0.cached;
        cached.hold(cached.chunks_of(at, len))
    }

    fn fetch(&self, at: HostOffset, len: u64, then: Box<dyn FnOnce(io::Result<Fetched>) + Send>) {
        self.note_missed(self.0.cached.chunks_of(at, len));
        self.fetch_within(at, len, self.0.remote.on_missing, then);
    }

    fn file(&self) -> &dyn LocalFile {
        self.0.file.local().expect("the cache's files are local")
    }
}

impl CachedLayer {
    fn fetch_within(
        &self,
        at: HostOffset,
        len: u64,
        patience: OnMissing,
        then: Box<dyn FnOnce(io::Result<Fetched>) + Send>,
    ) {
        let Far { cached, remote, .. } = &*self.0;
        let absent: Vec<usize> = cached.chunks_of(at, len).filter(|&chunk| !cached.is_here(chunk)).collect();
        if absent.is_empty() {
            return then(Ok(Fetched::Here));
        }
        if remote.cache.is_closed() {
            return then(Err(Failure::closed().error()));
        }
        let all = Arc::new(Mutex::new((absent.len(), Ok(Fetched::Here), Some(then))));
        for chunk in absent {
            let all = Arc::clone(&all);
            let waiter = remote.waiter(patience, Box::new(move |fetched| came(&all, fetched)));
            let until = waiter.until;
            let is_first = cached.wait(chunk, waiter);
            if remote.cache.is_closed() {
                // It may have been closed before this one waited.
                cached.answer(chunk, Err(&Failure::closed()));
            } else if is_first {
                remote.start(Job { layer: Arc::clone(&self.0), chunk });
            }
            if let Some(until) = until {
                remote.cache.expire_at(until);
            }
        }
    }
}

/// Who is told when the last of several chunks has come, and what.
type All = Mutex<(usize, io::Result<Fetched>, Option<Box<dyn FnOnce(io::Result<Fetched>) + Send>>)>;

/// One of several chunks has come, or cannot be had.
fn came(all: &All, fetched: io::Result<Fetched>) {
    let mut all_now = all.lock();
    let (left, result, then) = &mut *all_now;
    *left -= 1;
    if result.is_ok() && !matches!(fetched, Ok(Fetched::Here)) {
        *result = fetched;
    }
    if *left == 0 {
        let (result, then) = (std::mem::replace(result, Ok(Fetched::Here)), then.take());
        drop(all_now);
        then.expect("the last comes once")(result);
    }
}
