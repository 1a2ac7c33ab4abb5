//! Changes of the active layer's tables on their way to the image, and the order in which they get there.
//!
//! ```text
//!   write: data ──► noted ──► visible to lookups ──► recorded in the journal ──► request completes
//!   commit:  flush ──► write L1 and L2 entries ──► flush ──► freed clusters may be reclaimed
//!            data and refcounts                    tables
//!       or:  one record of a log, of data, refcounts and entries ──► write the entries
//! ```
//!
//! The first flush puts everything that noted changes refer to on stable storage: data, copied-up bytes, new L2
//! tables, raised refcounts. Only then is any entry written. So after a power failure the image shows, for each
//! cluster, the old entry or the new one, and both lead to whole clusters that count as used. A guest's FLUSH is a
//! commit. Until then changes live in memory and in the volatile journal, where a killed process leaves them.
//!
//! A cluster that an entry let go of stays as it is until the change is on stable storage and the requests that may
//! still see it are done ([`Changes::take_reclaimable`]).
//!
//! Nothing is noted that the journal has no room for: the caller commits then, which begins the journal anew, and tries again
//! ([`Changes::note_or_commit`]). A queue's thread has the records of several writes given to the journal at once: before any request
//! of the disk completes ([`Changes::record`]), and before a commit begins. So what a killed process leaves is never behind the image,
//! nor behind what a guest knows.
//!
//! Lock order: the commit lock, then the state's lock. The state's lock is never held during a flush.

use std::collections::BTreeMap;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use parking_lot::{Mutex, MutexGuard};
use vmstrata_qcow2::RawEntry;
use vmstrata_store::Planted;
use vmstrata_types::{ClusterBits, HostOffset};

use crate::error::{Error, ErrorKind, IoContext as _, Result};
use crate::journal::{Journal, Record, Slot};

/// Changes noted before a writer must commit them itself: bounds memory and journal.
const MAX_NOTED: usize = 262_144;

/// Commits before a change is given up that others leave no room in the journal.
const ROOM_TRIES: usize = 8;

/// A run of bytes of the image that an entry no longer refers to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Freed {
    pub(crate) at: HostOffset,
    pub(crate) len: u64,
}

/// See the module documentation.
#[derive(Debug)]
pub(crate) struct Changes {
    /// Size of the image's clusters.
    bits: ClusterBits,
    state: Mutex<State>,
    /// Serialises commits; holds how many of the requests counted below the last one covered.
    committing: Mutex<u64>,
    /// Commits asked for.
    asked: AtomicU64,
    /// A commit failed, or the journal broke; there will be no other commits.
    failed: AtomicBool,
    /// The journal is still to be given records. Changes under the state's lock.
    unrecorded: AtomicBool,
}

#[derive(Debug)]
struct State {
    journal: Option<Journal>,
    commit_each: bool,
    /// Noted since the last commit began.
    open: Batch,
    /// Being written to the image by a commit, which reads it without the lock.
    closing: Arc<Batch>,
    /// On stable storage; their clusters wait for requests under way.
    reclaimable: Vec<Freed>,
    /// When the oldest change of `open` was noted.
    since: Option<Instant>,
    /// Why the journal took the last change not.
    refused: Option<io::Error>,
}

#[derive(Debug, Default)]
struct Batch {
    entries: BTreeMap<Slot, RawEntry>,
    freed: Vec<Freed>,
}

/// When a change is given to the journal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Recorded {
    /// Before the change is shown.
    Now,
    /// By the next [`Changes::record`].
    Later,
}

/// What noting a change asks of the one who made it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub(crate) enum Noted {
    /// The change is as durable as it must be before the next flush.
    Safe,
    /// Too much waits: commit before completing the request.
    MustCommit,
    /// Nothing was noted: the journal could not take it. A commit makes room.
    NoRoom,
}

/// How a commit reaches the image.
pub(crate) trait CommitTarget {
    /// Everything written so far goes to stable storage.
    fn flush(&self) -> Result<()>;
    /// Writes raw entries, given in ascending order.
    fn write_entries(&self, entries: &BTreeMap<Slot, RawEntry>) -> Result<()>;
    /// Where a log makes flushes durable: brings everything written so far, and these entries, to stable storage. They are written
    /// once all is there. False without a log.
    fn commit_to_log(&self, _entries: &BTreeMap<Slot, RawEntry>) -> Result<bool> {
        Ok(false)
    }
}

impl Changes {
    /// No changes, and no journal yet.
    pub(crate) fn new(bits: ClusterBits) -> Self {
        let state = State {
            journal: None,
            commit_each: false,
            open: Batch::default(),
            closing: Arc::default(),
            reclaimable: Vec::new(),
            since: None,
            refused: None,
        };
        Self {
            bits,
            state: Mutex::new(state),
            committing: Mutex::new(0),
            asked: AtomicU64::new(0),
            failed: AtomicBool::new(false),
            unrecorded: AtomicBool::new(false),
        }
    }

    /// Records changes in `journal` from now on. What it has of an earlier session goes: the image does not name that any more.
    pub(crate) fn use_journal(&self, mut journal: Option<Journal>) {
        if let Some(journal) = &mut journal {
            journal.drop_older();
        }
        self.state.lock().journal = journal;
    }

    /// Whether every change must be committed before its request completes, for images whose header cannot vouch for
    /// a journal.
    pub(crate) fn commit_each_change(&self, each: bool) {
        self.state.lock().commit_each = each;
    }

    /// Notes changes whose data is written, and the clusters they let go of.
    pub(crate) fn note(&self, records: &[Record], freed: &[Freed], recorded: Recorded) -> Noted {
        let mut state = self.state.lock();
        let append = |journal: &mut Journal| match recorded {
            Recorded::Now => journal.append(records),
            Recorded::Later => {
                self.unrecorded.store(true, Ordering::Release);
                journal.append_later(records)
            }
        };
        if let Err(error) = state.journal.as_mut().map_or(Ok(()), append) {
            if state.is_journal_broken() {
                self.failed.store(true, Ordering::SeqCst);
            }
            state.refused = Some(error);
            return Noted::NoRoom;
        }
        state.open.entries.extend(records.iter().map(|record| (record.slot, record.new)));
        for &run in freed {
            merge(&mut state.open.freed, run, self.bits);
        }
        state.since.get_or_insert_with(Instant::now);
        let is_full = state.open.entries.len() >= MAX_NOTED;
        if is_full || state.commit_each { Noted::MustCommit } else { Noted::Safe }
    }

    /// As [`Changes::note`]; commits first where the journal has no room.
    ///
    /// # Errors
    /// A commit that failed, or a journal that cannot be written: nothing was noted.
    pub(crate) fn note_or_commit(
        &self,
        (records, recorded): (&[Record], Recorded),
        freed: &[Freed],
        target: &impl CommitTarget,
    ) -> Result<Noted> {
        for _ in 0..ROOM_TRIES {
            match self.note(records, freed, recorded) {
                Noted::NoRoom => self.make_room(target)?,
                noted => return Ok(noted),
            }
        }
        Err(self.no_room())
    }

    /// Gives the journal the records of all changes that were noted before. A request completes only after that: it may have seen
    /// one of them.
    ///
    /// # Errors
    /// A journal that cannot be written: the caller must fail the disk.
    #[inline]
    pub(crate) fn record(&self) -> Result<()> {
        if self.unrecorded.load(Ordering::Acquire) { self.record_now() } else { Ok(()) }
    }

    #[cold]
    fn record_now(&self) -> Result<()> {
        let mut state = self.state.lock();
        let Some(journal) = &mut state.journal else { return Ok(()) };
        let written = journal.write_out().while_trying("write the volatile journal");
        let path = journal.path().to_owned();
        self.failed.fetch_or(written.is_err(), Ordering::SeqCst);
        self.unrecorded.store(false, Ordering::Release);
        written.map_err(|error| error.in_file(&path))
    }

    /// Commits, so that the journal begins anew.
    fn make_room(&self, target: &impl CommitTarget) -> Result<()> {
        let turn = self.state.lock().turn();
        self.commit(target)?;
        if self.state.lock().turn() == turn { Err(self.no_room()) } else { Ok(()) }
    }

    /// Why the journal did not take a change.
    pub(crate) fn no_room(&self) -> Error {
        let mut state = self.state.lock();
        let source = state.refused.take().unwrap_or_else(|| io::Error::other("it takes no records"));
        let error = Error::io("write the volatile journal, as every change of the tables has to", source);
        match &state.journal {
            Some(journal) => error.in_file(journal.path()),
            None => error,
        }
    }

    /// Puts noted entries for `clusters` over what the image says of them.
    pub(crate) fn overlay(&self, clusters: std::ops::Range<u64>, mut put: impl FnMut(u64, RawEntry)) {
        let state = self.state.lock();
        for batch in [&*state.closing, &state.open] {
            for (slot, &raw) in batch.entries.range(Slot::L2(clusters.start)..Slot::L2(clusters.end)) {
                if let Slot::L2(cluster) = *slot {
                    put(cluster, raw);
                }
            }
        }
    }

    /// Brings every change noted before the call to stable storage, with all data written before it.
    ///
    /// Calls that wait for each other share one commit.
    ///
    /// # Errors
    /// A flush or a table write that failed, now or before; the caller must fail the disk, because nothing more is
    /// known of what is on stable storage.
    pub(crate) fn commit(&self, target: &impl CommitTarget) -> Result<()> {
        let mine = self.asked.fetch_add(1, Ordering::SeqCst) + 1;
        let mut covered = self.committing.lock();
        if *covered >= mine {
            return Ok(());
        }
        if self.has_failed() {
            // A caller that waited for the commit that failed must not return success.
            return Err(ErrorKind::Failed { cause: "the commit before this one failed".to_owned() }.into());
        }
        let covers = self.asked.load(Ordering::SeqCst);
        let done = match Planted::LostLock.is_there() {
            true => MutexGuard::unlocked(&mut covered, || self.commit_open(target)),
            false => self.commit_open(target),
        };
        // A journal may have broken meanwhile: that stays.
        self.failed.fetch_or(done.is_err(), Ordering::SeqCst);
        if done.is_ok() {
            *covered = covers;
        }
        done
    }

    /// Whether a flush of the file is all that a commit would do.
    pub(crate) fn is_empty(&self) -> bool {
        let state = self.state.lock();
        let has_none = state.open.entries.is_empty() && state.closing.entries.is_empty();
        has_none && state.refused.is_none() && !self.has_failed()
    }

    /// Whether a commit has failed.
    pub(crate) fn has_failed(&self) -> bool {
        self.failed.load(Ordering::SeqCst)
    }

    fn commit_open(&self, target: &impl CommitTarget) -> Result<()> {
        if self.begin()? {
            // Lookups that miss the cache go on finding the entries until they are in the image.
            let closing = Arc::clone(&self.state.lock().closing);
            if target.commit_to_log(&closing.entries)? {
                self.end();
                return Ok(());
            }
            if !Planted::SwappedFlush.is_there() {
                target.flush()?;
            }
            target.write_entries(&closing.entries)?;
            if !Planted::MissingFlush.is_there() {
                target.flush()?;
            }
            self.end();
        } else {
            target.flush()?;
        }
        Ok(())
    }

    /// Closes the open batch; false when there is nothing in it.
    fn begin(&self) -> Result<bool> {
        let mut state = self.state.lock();
        if state.open.entries.is_empty() && state.refused.is_none() {
            return Ok(false);
        }
        // The image shows no change that the journal lacks.
        if let Some(journal) = &mut state.journal {
            journal.write_out().while_trying("write the volatile journal")?;
        }
        self.unrecorded.store(false, Ordering::Release);
        // If the other half cannot be begun, this one goes on: longer, and as true.
        if state.journal.as_mut().is_some_and(|journal| journal.turn().is_ok()) {
            state.refused = None;
        }
        state.closing = Arc::new(std::mem::take(&mut state.open));
        state.since = None;
        Ok(true)
    }

    fn end(&self) {
        let mut state = self.state.lock();
        let closed = std::mem::take(&mut state.closing);
        for &run in &closed.freed {
            merge(&mut state.reclaimable, run, self.bits);
        }
        if let Some(journal) = &mut state.journal {
            journal.drop_older();
        }
        drop(state);
        // It may be large: others do not wait for it.
        drop(closed);
    }

    /// Whether a change has waited longer than `age`, or so many wait that a writer would soon have to commit.
    pub(crate) fn is_commit_due(&self, age: Duration) -> bool {
        let state = self.state.lock();
        state.open.entries.len() >= MAX_NOTED / 2 || state.since.is_some_and(|since| since.elapsed() >= age)
    }

    /// Whether [`Changes::take_reclaimable`] has any.
    pub(crate) fn has_reclaimable(&self) -> bool {
        !self.state.lock().reclaimable.is_empty()
    }

    /// The freed clusters that nothing on stable storage refers to any more; requests that were under way when this
    /// is called may still read or write them.
    pub(crate) fn take_reclaimable(&self) -> Vec<Freed> {
        std::mem::take(&mut self.state.lock().reclaimable)
    }

    /// Removes the journal of an image that will not be written again: all is committed, or what is not cannot be
    /// trusted.
    pub(crate) fn remove_journal(&self) {
        if let Some(journal) = self.state.lock().journal.take() {
            journal.remove();
        }
    }
}

impl State {
    /// The turn of the journal.
    fn turn(&self) -> u64 {
        self.journal.as_ref().map_or(0, Journal::turn_now)
    }

    fn is_journal_broken(&self) -> bool {
        self.journal.as_ref().is_some_and(Journal::is_broken)
    }
}

/// Adds a run, joining it to the last one where it goes on from there with a new cluster. (Two compressed clusters
/// that meet inside a host cluster are two users of it, and must be counted as two.)
fn merge(runs: &mut Vec<Freed>, run: Freed, bits: ClusterBits) {
    match runs.last_mut() {
        Some(last) if last.at + last.len == run.at && run.at.is_aligned(bits) => last.len += run.len,
        _ => runs.push(run),
    }
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;

    use super::*;
    use crate::journal;

    #[derive(Default)]
    struct Log(RefCell<Vec<String>>);

    impl CommitTarget for Log {
        fn flush(&self) -> Result<()> {
            self.0.borrow_mut().push("flush".into());
            Ok(())
        }
        fn write_entries(&self, entries: &BTreeMap<Slot, RawEntry>) -> Result<()> {
            let words = entries.iter().map(|(slot, raw)| (slot, raw.word));
            self.0.borrow_mut().push(format!("{:?}", words.collect::<BTreeMap<_, _>>()));
            Ok(())
        }
    }

    fn change(cluster: u64, new: u64) -> Record {
        Record { slot: Slot::L2(cluster), old: RawEntry::EMPTY, new: RawEntry::standard(new) }
    }

    #[test]
    fn entries_are_written_between_two_flushes_and_clusters_freed_after() {
        let changes = Changes::new(ClusterBits::MIN);
        let log = Log::default();
        changes.commit(&log).unwrap();
        assert_eq!(*log.0.borrow(), ["flush"]);
        let freed =
            [Freed { at: HostOffset::new(0), len: 512 }, Freed { at: HostOffset::new(512), len: 512 }];
        assert_eq!(changes.note(&[change(5, 1), change(5, 2)], &freed, Recorded::Now), Noted::Safe);
        assert!(changes.take_reclaimable().is_empty() && changes.is_commit_due(Duration::ZERO));
        changes.commit(&log).unwrap();
        assert_eq!(log.0.borrow()[1..], ["flush", "{L2(5): 2}", "flush"]);
        assert_eq!(changes.take_reclaimable(), [Freed { at: HostOffset::new(0), len: 1024 }]);
        assert!(!changes.is_commit_due(Duration::ZERO));
    }

    #[test]
    fn records_put_off_are_in_the_journal_before_a_request_completes_or_a_commit_begins() {
        let dir = tempfile::tempdir().unwrap();
        let (journal, subject) = journal::tests::fresh(dir.path());
        let changes = Changes::new(ClusterBits::DEFAULT);
        changes.use_journal(Some(journal));
        let found = || journal::look(dir.path(), &subject).unwrap().records;
        let later = |records: &[Record]| changes.note(records, &[], Recorded::Later);
        assert_eq!((later(&[change(1, 1)]), later(&[change(2, 2)])), (Noted::Safe, Noted::Safe));
        assert!(found().is_empty());
        changes.record().unwrap();
        assert_eq!(found(), [change(1, 1), change(2, 2)]);
        let _ = later(&[change(3, 3)]);
        let _ = changes.note(&[change(4, 4)], &[], Recorded::Now);
        assert_eq!(found()[2..], [change(3, 3), change(4, 4)], "in order");
        let _ = later(&[change(5, 5)]);
        assert!(changes.begin().unwrap());
        assert_eq!(found()[4..], [change(5, 5)]);
    }

    #[test]
    fn a_change_that_the_journal_has_no_room_for_is_made_after_a_commit() {
        let dir = tempfile::tempdir().unwrap();
        let (mut journal, subject) = journal::tests::fresh(dir.path());
        journal.limit(64 + 32);
        let changes = Changes::new(ClusterBits::DEFAULT);
        changes.use_journal(Some(journal));
        let found = || journal::look(dir.path(), &subject).unwrap().records;
        assert_eq!(changes.note(&[change(1, 1)], &[], Recorded::Now), Noted::Safe);
        assert_eq!(
            changes.note(&[change(2, 2)], &[], Recorded::Now),
            Noted::NoRoom,
            "one record is the limit"
        );
        assert_eq!(found(), [change(1, 1)]);
        let log = Log::default();
        assert_eq!(changes.note_or_commit((&[change(2, 2)], Recorded::Now), &[], &log).unwrap(), Noted::Safe);
        assert_eq!(*log.0.borrow(), ["flush", "{L2(1): 1}", "flush"], "what was noted before, and no more");
        assert_eq!(found(), [change(2, 2)]);
        changes.note_or_commit((&[change(3, 3), change(4, 4)], Recorded::Now), &[], &log).unwrap_err();
        changes.overlay(3..5, |cluster, _| panic!("{cluster}: too long for any half, and not made"));
    }

    #[test]
    fn a_commit_is_due_before_a_writer_has_to_make_one() {
        let changes = Changes::new(ClusterBits::DEFAULT);
        let note = |clusters: std::ops::Range<u64>| {
            let records: Vec<Record> = clusters.map(|cluster| change(cluster, 1)).collect();
            changes.note(&records, &[], Recorded::Now)
        };
        let (half, all) = (MAX_NOTED as u64 / 2, MAX_NOTED as u64);
        assert_eq!(note(0..half - 1), Noted::Safe);
        assert!(!changes.is_commit_due(Duration::MAX));
        assert_eq!(note(half - 1..all - 1), Noted::Safe);
        assert!(changes.is_commit_due(Duration::MAX));
        assert_eq!(note(all - 1..all), Noted::MustCommit);
    }

    #[test]
    fn compressed_clusters_that_share_a_host_cluster_are_freed_one_by_one() {
        let changes = Changes::new(ClusterBits::DEFAULT);
        let at = |at| Freed { at: HostOffset::new(at), len: 512 };
        let whole = |at| Freed { at: HostOffset::new(at), len: 65536 };
        let freed = [at(0x5_0000), at(0x5_0200), whole(0x6_0000), whole(0x7_0000)];
        let _ = changes.note(&[change(1, 0)], &freed, Recorded::Now);
        changes.commit(&Log::default()).unwrap();
        let last = Freed { at: HostOffset::new(0x6_0000), len: 2 * 65536 };
        assert_eq!(changes.take_reclaimable(), [freed[0], freed[1], last]);
    }

    #[test]
    fn the_newest_note_of_a_cluster_is_what_lookups_see() {
        let changes = Changes::new(ClusterBits::MIN);
        let _ = changes.note(&[change(1, 10), change(2, 20)], &[], Recorded::Now);
        assert!(changes.begin().unwrap());
        let _ = changes.note(&[change(2, 21), change(9, 90)], &[], Recorded::Now);
        let mut seen = BTreeMap::new();
        changes.overlay(0..9, |cluster, raw| {
            seen.insert(cluster, raw.word);
        });
        assert_eq!(seen, BTreeMap::from([(1, 10), (2, 21)]));
    }
}
