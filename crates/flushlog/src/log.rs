//! Batches of records, written and synced for all who wait: group commit.
//!
//! ```text
//!   submit ──► queue, first in first out ──► one of those who wait writes a batch of all, and syncs ──► the others are woken
//!                    ▲                                   │
//!                    └── who comes meanwhile is in the next batch
//!
//!   ring:   ├─ free ─┤ tail ├── batches ──┤ head ├─ free ─┤ set aside for records without operations ├─ a batch that does not fit the end ─┤
//! ```
//!
//! There is no timer: the sync under way is the time in which the next batch gathers. The end of a batch wakes those whose records are in it, and
//! one of the others, which writes the next.
//!
//! Invariants:
//! - At most one batch is not on stable storage, the last. So a batch that cannot be read is damaged if a later one is there.
//! - A batch is overwritten only after headers with a tail behind it are on stable storage.
//! - A record without operations always has room: a share that has none for its data does without the log, and only has to say
//!   that its earlier records are void.
//! - After a failed write or sync nothing more is written.

use std::collections::{HashMap, VecDeque};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Weak};

use crossbeam_channel::Sender;
use parking_lot::{Condvar, Mutex, MutexGuard};
use vmstrata_store::{AlignedBuf, Store};
use vmstrata_types::HostOffset;

use crate::format::{BLOCK, BatchHeader, Header, RING_AT, Tail, batch_len, encode_batch};

/// The shortest ring.
pub(crate) const RING_MIN: u64 = 128 << 10;
/// The highest tag.
const TAG_MAX: u64 = 0x7FFF;
/// Longest batch, of a long ring.
const BATCH_MAX: u64 = 4 << 20;
/// Longest record: a flush of more data is one of bandwidth. The log would write it twice, and others' flushes wait for it.
const RECORD_MAX: u64 = 256 << 10;

/// The log of a host.
#[derive(Debug)]
pub struct FlushLog {
    path: PathBuf,
    store: Arc<dyn Store>,
    ring: Ring,
    /// As it was written last; the tail is where recovery begins.
    header: Mutex<Header>,
    state: Mutex<State>,
    /// Where those wait whose records are in batches of an even number, and of an odd one: the batch under way and the next one.
    batch: [Condvar; 2],
    /// Where who writes headers waits for a batch.
    headers: Condvar,
    /// Wakes the thread that frees room, and ends it.
    wake: Mutex<Option<Sender<()>>>,
    stores: Mutex<Vec<Weak<dyn Behind>>>,
}

/// A file behind the log.
pub(crate) trait Behind: std::fmt::Debug + Send + Sync {
    /// Its part of the log.
    fn share(&self) -> ShareId;

    /// Its name when it was opened.
    fn path(&self) -> &Path;

    /// Whether a flush of it failed.
    fn has_failed(&self) -> bool;

    /// Syncs it, so that the log can let go of its records.
    fn checkpoint(&self) -> io::Result<()>;
}

/// Names a share; drawn at random, so that no two files have one, nor a file that is opened again.
pub(crate) type ShareId = u64;

/// How bytes of the ring are used.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Ring {
    len: u64,
}

impl Ring {
    /// The ring of a log of `len` bytes.
    pub(crate) fn of(len: u64) -> Option<Self> {
        let len = len.checked_sub(RING_AT)? / BLOCK * BLOCK;
        (len >= RING_MIN).then_some(Self { len })
    }

    pub(crate) fn len(self) -> u64 {
        self.len
    }

    pub(crate) fn batch_max(self) -> u64 {
        BATCH_MAX.min(self.len / 4 / BLOCK * BLOCK)
    }

    /// Longest record.
    pub(crate) fn record_max(self) -> usize {
        (self.batch_max() / 2).min(RECORD_MAX) as usize
    }

    /// What records with operations may take: at the end of the ring a batch may not fit.
    fn usable(self) -> u64 {
        self.len - self.batch_max()
    }

    /// How many bytes are left at `place` up to the end.
    fn to_end(self, place: u64) -> u64 {
        self.len - place % self.len
    }

    /// What only records without operations may take, one block each.
    fn set_aside(self) -> u64 {
        self.len / 8 / BLOCK * BLOCK
    }

    /// How many files may use the log.
    fn shares_max(self) -> usize {
        (self.set_aside() / BLOCK) as usize
    }

    /// Where a batch of `len` bytes goes that is to follow what ends at `place`.
    pub(crate) fn place_for(self, place: u64, len: u64) -> u64 {
        let to_end = self.to_end(place);
        if len > to_end { place + to_end } else { place }
    }

    /// Where a place is in the log.
    pub(crate) fn at(self, place: u64) -> HostOffset {
        HostOffset::new(RING_AT + place % self.len)
    }
}

/// What is being written, without the lock of the state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Writing {
    Nothing,
    /// The one with the number of the head.
    Batch,
    Headers,
}

#[derive(Debug)]
struct State {
    queue: VecDeque<Waiting>,
    /// Bytes of the ring that the queue takes at most.
    queued: u64,
    /// The number of the last record that was put into the queue, and of the last that is on stable storage.
    asked: u64,
    done: u64,
    writing: Writing,
    failed: Option<String>,
    /// Where the next batch begins, and its number.
    head: Tail,
    /// Those that some share needs, and those behind.
    batches: VecDeque<Placed>,
    /// As in the header on stable storage.
    tail: Tail,
    shares: HashMap<ShareId, Share>,
    syncs: u64,
    records: u64,
}

#[derive(Debug)]
struct Waiting {
    share: ShareId,
    bytes: Vec<u8>,
    content: Content,
}

/// What a record is to its share.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Content {
    /// Whether earlier records of the share are void by it.
    pub(crate) voids: bool,
    /// Whether it must be replayed.
    pub(crate) has_operations: bool,
    /// Whether it may use what is set aside.
    pub(crate) is_needed: bool,
}

#[derive(Clone, Copy, Debug)]
struct Placed {
    at: Tail,
}

/// One file's part of the log.
#[derive(Debug, Default)]
struct Share {
    /// Batches whose records are not known to be in the file, with the bytes that these take.
    live: VecDeque<(u64, u64)>,
    live_bytes: u64,
    /// The last record that recovery would replay, unless the tail has passed it.
    replayed: Option<u64>,
}

impl Share {
    fn forget_through(&mut self, sequence: u64) {
        while let Some(&(first, bytes)) = self.live.front()
            && first <= sequence
        {
            self.live_bytes -= bytes;
            self.live.pop_front();
        }
    }
}

/// Why a record was not taken.
#[derive(Debug)]
pub(crate) enum Refused {
    /// No room; the caller can do without.
    Full,
    /// The log failed.
    Failed(io::Error),
}

/// How a log is used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Usage {
    /// Bytes of the ring.
    pub bytes: u64,
    /// Bytes that batches take.
    pub used: u64,
    /// Files that use the log.
    pub files: usize,
    /// Flushes that the log made durable since it was opened.
    pub records: u64,
    /// Syncs of the log for them.
    pub syncs: u64,
    /// Flushes that wait for the next batch.
    pub waiting: usize,
}

impl FlushLog {
    /// A log that is empty, and whose headers say so.
    pub(crate) fn empty(path: &Path, store: Arc<dyn Store>, ring: Ring, header: Header) -> Arc<Self> {
        let state = State {
            queue: VecDeque::new(),
            queued: 0,
            asked: 0,
            done: 0,
            writing: Writing::Nothing,
            failed: None,
            head: header.tail,
            batches: VecDeque::new(),
            tail: header.tail,
            shares: HashMap::new(),
            syncs: 0,
            records: 0,
        };
        Arc::new(Self {
            path: path.to_owned(),
            store,
            ring,
            header: Mutex::new(header),
            state: Mutex::new(state),
            batch: Default::default(),
            headers: Condvar::new(),
            wake: Mutex::default(),
            stores: Mutex::default(),
        })
    }

    /// Has `wake` called when room gets short.
    pub(crate) fn call_when_filled(&self, wake: Sender<()>) {
        *self.wake.lock() = Some(wake);
    }

    /// Its file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// As [`vmstrata_store::Logged::tag`].
    pub(crate) fn tag(&self) -> u64 {
        u64::from(crc32c::crc32c(&self.header.lock().id.to_le_bytes())) % TAG_MAX + 1
    }

    /// How it is used.
    pub fn usage(&self) -> Usage {
        let state = self.state.lock();
        Usage {
            bytes: self.ring.len(),
            used: state.used(),
            files: state.shares.len(),
            records: state.records,
            syncs: state.syncs,
            waiting: state.queue.len(),
        }
    }

    /// Why nothing more is written to it, if that is so.
    pub fn failure(&self) -> Option<String> {
        self.state.lock().failed.clone()
    }

    /// Longest record.
    pub(crate) fn record_max(&self) -> usize {
        self.ring.record_max()
    }

    /// Gives a file a share.
    pub(crate) fn join(&self, share: ShareId) -> io::Result<()> {
        let mut state = self.state.lock();
        self.check(&state)?;
        if state.shares.len() >= self.ring.shares_max() {
            let told = format!("the flush log {} is too short for more files", self.path.display());
            return Err(io::Error::other(told));
        }
        state.shares.insert(share, Share::default());
        Ok(())
    }

    pub(crate) fn register(&self, store: Weak<dyn Behind>) {
        let mut stores = self.stores.lock();
        stores.retain(|store| store.strong_count() > 0);
        stores.push(store);
    }

    /// Ends a share. One of which recovery would replay records keeps its part of the ring.
    pub(crate) fn leave(&self, share: ShareId) {
        let mut state = self.state.lock();
        let is_void = state.shares.get(&share).is_some_and(|share| !state.replays(share));
        if is_void {
            state.shares.remove(&share);
        }
    }

    /// Whether recovery would replay records of a share.
    pub(crate) fn replays(&self, share: ShareId) -> bool {
        let state = self.state.lock();
        state.shares.get(&share).is_some_and(|share| state.replays(share))
    }

    fn check(&self, state: &State) -> io::Result<()> {
        match &state.failed {
            Some(why) => {
                Err(io::Error::other(format!("the flush log {} failed: {why}", self.path.display())))
            }
            None => Ok(()),
        }
    }

    /// Brings a record to stable storage, with those of others; returns the number of its batch.
    pub(crate) fn submit(&self, share: ShareId, bytes: Vec<u8>, content: Content) -> Result<u64, Refused> {
        let cost = batch_len(bytes.len());
        debug_assert!(!content.is_needed || cost == BLOCK, "what is set aside has a block for each");
        let mut state = self.state.lock();
        self.check(&state).map_err(Refused::Failed)?;
        let mut room = state.room(self.ring, content.is_needed);
        if !content.is_needed {
            let own = state.shares[&share].live_bytes;
            let most = self.ring.usable() / 2 / state.shares.len().max(2) as u64;
            room = room.saturating_sub(self.ring.set_aside()).min(most.saturating_sub(own));
        }
        if cost > room {
            self.wake();
            return Err(Refused::Full);
        }
        state.asked += 1;
        let mine = state.asked;
        state.queued += cost;
        state.queue.push_back(Waiting { share, bytes, content });
        while state.done < mine {
            self.check(&state).map_err(Refused::Failed)?;
            match state.batch_of(mine) {
                Some(batch) => self.waiters(batch).wait(&mut state),
                None => self.write_batch(&mut state),
            }
        }
        // A share has one record under way at a time.
        let sequence = state.shares[&share].live.back().map_or(0, |(sequence, _)| *sequence);
        let is_filling = state.used() > self.ring.len() / 4;
        drop(state);
        if is_filling {
            self.wake();
        }
        Ok(sequence)
    }

    fn wake(&self) {
        if let Some(wake) = &*self.wake.lock() {
            // Full: it is about to look.
            let _ = wake.try_send(());
        }
    }

    /// Writes the first records of the queue, as many as a batch takes.
    fn write_batch(&self, state: &mut MutexGuard<'_, State>) {
        let mut records = Vec::new();
        let mut bytes = 0;
        // Only one record alone may not fit the end.
        let most = self.ring.batch_max().min(self.ring.to_end(state.head.place));
        while let Some(next) = state.queue.front()
            && (records.is_empty() || batch_len(bytes + next.bytes.len()) <= most)
        {
            let next = state.queue.pop_front().expect("it is there");
            bytes += next.bytes.len();
            records.push(next);
        }
        let len = batch_len(bytes);
        let place = self.ring.place_for(state.head.place, len);
        let header =
            BatchHeader { epoch: self.header.lock().epoch, sequence: state.head.sequence, place, len };
        state.writing = Writing::Batch;
        let written = MutexGuard::unlocked(state, || {
            let mut batch = AlignedBuf::zeroed(len as usize);
            encode_batch(header, records.iter().map(|record| record.bytes.as_slice()), &mut batch);
            self.store.write_all(&batch, self.ring.at(place)).and_then(|()| self.store.flush())
        });
        match written {
            Ok(()) => state.written(header, &records),
            Err(error) => state.failed = Some(error.to_string()),
        }
        self.waiters(header.sequence).notify_all();
        self.hand_on(state);
    }

    fn waiters(&self, batch: u64) -> &Condvar {
        &self.batch[(batch % 2) as usize]
    }

    /// Nothing is written any more: wakes one of those whose records wait, to write the next batch, and those who wait to write headers.
    fn hand_on(&self, state: &mut State) {
        state.writing = Writing::Nothing;
        if state.failed.is_some() {
            self.batch.iter().for_each(|batch| _ = batch.notify_all());
        } else {
            self.waiters(state.head.sequence).notify_one();
        }
        self.headers.notify_all();
    }

    /// The records of a share up to those of batch `sequence` are in its file, on stable storage.
    pub(crate) fn forget(&self, share: ShareId, sequence: u64) {
        let mut state = self.state.lock();
        if let Some(share) = state.shares.get_mut(&share) {
            share.forget_through(sequence);
        }
    }

    /// Lets batches be overwritten that no share needs.
    ///
    /// # Errors
    /// A host that cannot write: the log has failed.
    pub fn advance(&self) -> io::Result<()> {
        let mut state = self.state.lock();
        while state.writing != Writing::Nothing {
            self.headers.wait(&mut state);
        }
        self.check(&state)?;
        let tail = state.needed();
        if tail == state.tail {
            return Ok(());
        }
        state.writing = Writing::Headers;
        let mut header = *self.header.lock();
        header.tail = tail;
        let written = MutexGuard::unlocked(&mut state, || write_headers(&*self.store, &mut header));
        match &written {
            Ok(()) => {
                *self.header.lock() = header;
                state.tail = tail;
                while state.batches.front().is_some_and(|batch| batch.at.sequence < tail.sequence) {
                    state.batches.pop_front();
                }
            }
            Err(error) => state.failed = Some(error.to_string()),
        }
        self.hand_on(&mut state);
        written
    }

    /// The file whose records lie longest in the log, of those that can be synced.
    pub(crate) fn oldest(&self) -> Option<Arc<dyn Behind>> {
        let state = self.state.lock();
        let first = |share: &Share| share.live.front().map(|(sequence, _)| *sequence);
        let live = state.shares.iter().filter_map(|(id, share)| Some((first(share)?, *id)));
        let mut oldest: Vec<_> = live.collect();
        drop(state);
        oldest.sort_unstable();
        let stores: Vec<_> = self.stores.lock().iter().filter_map(Weak::upgrade).collect();
        let of = |id| stores.iter().find(|store| store.share() == id && !store.has_failed()).cloned();
        oldest.into_iter().find_map(|(_, id)| of(id))
    }

    /// Whether more is used than the thread that frees room leaves.
    pub(crate) fn is_filled(&self) -> bool {
        self.state.lock().used() > self.ring.len() / 8
    }
}

impl State {
    /// The batch that a record has to wait for, which it is in or may be; `None` if its owner is to write one.
    fn batch_of(&self, record: u64) -> Option<u64> {
        let next = self.head.sequence;
        match self.writing {
            Writing::Nothing => None,
            Writing::Headers => Some(next),
            Writing::Batch => Some(next + u64::from(record > self.asked - self.queue.len() as u64)),
        }
    }

    /// Bytes of the ring from the tail to the head.
    fn used(&self) -> u64 {
        self.head.place - self.tail.place
    }

    /// Bytes left for the next record. What a batch did not use at the end of the ring counts as used; until one has come there, as much is kept
    /// as a record of more than a block may leave.
    fn room(&self, ring: Ring, is_needed: bool) -> u64 {
        let is_before_end = self.head.place / ring.len() == self.tail.place / ring.len();
        let may_leave_some = !is_needed || self.queue.iter().any(|waiting| !waiting.content.is_needed);
        let kept = if is_before_end && may_leave_some { ring.batch_max() } else { 0 };
        ring.len().saturating_sub(self.used() + self.queued + kept)
    }

    fn replays(&self, share: &Share) -> bool {
        share.replayed.is_some_and(|sequence| sequence >= self.tail.sequence)
    }

    /// Where the first batch is that a share needs.
    fn needed(&self) -> Tail {
        let first =
            self.shares.values().filter_map(|share| share.live.front().map(|(first, _)| *first)).min();
        let Some(first) = first else { return self.head };
        let of = self.batches.iter().find(|batch| batch.at.sequence == first);
        of.map_or(self.tail, |batch| batch.at)
    }

    fn written(&mut self, batch: BatchHeader, records: &[Waiting]) {
        let BatchHeader { sequence, place, len, .. } = batch;
        self.batches.push_back(Placed { at: Tail { place, sequence } });
        self.head = Tail { place: place + len, sequence: sequence + 1 };
        self.syncs += 1;
        self.records += records.len() as u64;
        self.done += records.len() as u64;
        for Waiting { share, bytes, content } in records {
            let cost = batch_len(bytes.len());
            self.queued -= cost;
            let Some(share) = self.shares.get_mut(share) else { continue };
            if content.voids {
                share.forget_through(u64::MAX);
                share.replayed = None;
            }
            if content.has_operations {
                share.replayed = Some(sequence);
                share.live.push_back((sequence, cost));
                share.live_bytes += cost;
            }
        }
    }
}

/// Writes both headers, one after the other: what relies on the new one must not find the old one where the new one is damaged.
pub(crate) fn write_headers(store: &dyn Store, header: &mut Header) -> io::Result<()> {
    for _ in 0..2 {
        header.generation += 1;
        let mut block = AlignedBuf::zeroed(BLOCK as usize);
        block.copy_from_slice(&header.encode());
        store.write_all(&block, HostOffset::new(header.generation % 2 * BLOCK))?;
        store.flush()?;
    }
    Ok(())
}
