//! A file whose flushes go to the log.
//!
//! ```text
//!   write of up to 64 KiB ──► copied, then written to the host's page cache   ┐ under the lock of the pending writes
//!   hole                  ──► noted, then punched                             ┘
//!   longer write, length  ──► made; the next flush syncs the file
//!   flush ──► pending writes as one record of the log
//!        └──► or, where the file must be synced: fdatasync of it, then a record that makes the earlier ones void
//! ```
//!
//! Invariants:
//! - A pending write is in the page cache: so a sync of the file that begins after pending writes were taken covers them.
//! - What recovery replays of a file is all that was flushed since the last record that made earlier ones void, in order. A flush
//!   whose writes are not in the log makes the earlier records void, or has nothing to make void.
//! - After a failed sync no flush succeeds, and the log says that the page cache is not to be trusted.

use std::io;
use std::os::fd::BorrowedFd;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Weak};

use parking_lot::Mutex;
use vmstrata_store::{FaultStore, LocalFile, Logged, Segment, Store, View, copy_to_slice, total_len};
use vmstrata_types::HostOffset;

use crate::format::{Kind, OperationBytes, PATH_MAX, Subject, encode_record};
use crate::log::{Behind, Content, FlushLog, Refused, ShareId};

/// Writes up to this are logged with their bytes, longer ones are not.
pub const SHORT_MAX: usize = 64 << 10;

/// See the module documentation.
#[derive(Debug)]
pub struct LoggedStore {
    inner: Arc<dyn Store>,
    log: Arc<FlushLog>,
    share: ShareId,
    path: PathBuf,
    ino: u64,
    mark: AtomicU64,
    /// Serialises flushes.
    committing: Mutex<()>,
    /// Why a sync of the file failed, if one did. Held during syncs: the kernel reports a failure to one of them only.
    syncing: Mutex<Option<String>>,
    pending: Mutex<Pending>,
    /// The batch of the last record whose operations are all in the page cache.
    applied: AtomicU64,
    has_joined: AtomicBool,
    has_failed: AtomicBool,
}

/// Written since the last flush.
#[derive(Debug, Default)]
struct Pending {
    operations: OperationBytes,
    /// Something was written that is not among the operations.
    must_sync: bool,
}

impl LoggedStore {
    /// A store around `inner` that may join the log. `path` and `ino` say to recovery which file it is.
    pub fn new(inner: Arc<dyn Store>, path: PathBuf, ino: u64, log: &Arc<FlushLog>) -> Arc<Self> {
        let share = draw();
        let pending = Pending::default();
        let store = Arc::new(Self {
            inner,
            log: Arc::clone(log),
            share,
            path,
            ino,
            mark: AtomicU64::new(0),
            committing: Mutex::new(()),
            syncing: Mutex::new(None),
            pending: Mutex::new(pending),
            applied: AtomicU64::new(0),
            has_joined: AtomicBool::new(false),
            has_failed: AtomicBool::new(false),
        });
        log.register(Arc::downgrade(&store) as Weak<dyn Behind>);
        store
    }

    fn subject(&self) -> Subject {
        Subject { path: self.path.clone(), ino: self.ino, mark: self.mark.load(Ordering::SeqCst) }
    }

    fn commit_all(&self, writes: &[(HostOffset, Vec<u8>)]) -> io::Result<()> {
        let _turn = self.committing.lock();
        self.check()?;
        if !self.has_joined() {
            return self.commit_without(writes);
        }
        let taken = std::mem::take(&mut *self.pending.lock());
        let mut extra = OperationBytes::default();
        for (at, bytes) in writes {
            extra.write(*at, bytes.len(), |room| room.copy_from_slice(bytes));
        }
        if taken.operations.is_empty() && extra.is_empty() && !taken.must_sync {
            return Ok(());
        }
        let len = taken.operations.len() + extra.len() + 2 * PATH_MAX;
        if !taken.must_sync && len <= self.log.record_max() {
            let content = Content { voids: false, has_operations: true, is_needed: false };
            match self.submit(Kind::Written, [&taken.operations, &extra], content) {
                Ok(sequence) => return self.apply(writes, sequence),
                Err(Refused::Failed(error)) => return Err(self.fail(error)),
                Err(Refused::Full) => {}
            }
        }
        self.sync()?;
        if !extra.is_empty() && extra.len() + 2 * PATH_MAX <= self.log.record_max() {
            let content = Content { voids: true, has_operations: true, is_needed: false };
            match self.submit(Kind::Synced, [&OperationBytes::default(), &extra], content) {
                Ok(sequence) => return self.apply(writes, sequence),
                Err(Refused::Failed(error)) => return Err(self.fail(error)),
                Err(Refused::Full) => {}
            }
        }
        // First: earlier records must not undo what the writes rely on.
        self.make_void()?;
        if writes.is_empty() {
            return Ok(());
        }
        self.put(writes)?;
        self.sync()
    }

    /// As [`Logged::commit`], without the log.
    fn commit_without(&self, writes: &[(HostOffset, Vec<u8>)]) -> io::Result<()> {
        self.sync()?;
        if writes.is_empty() {
            return Ok(());
        }
        self.put(writes)?;
        self.sync()
    }

    fn submit(&self, kind: Kind, operations: [&OperationBytes; 2], content: Content) -> Result<u64, Refused> {
        let record = encode_record(kind, self.share, &self.subject(), operations);
        self.log.submit(self.share, record, content)
    }

    fn put(&self, writes: &[(HostOffset, Vec<u8>)]) -> io::Result<()> {
        let put = writes.iter().try_for_each(|(at, bytes)| self.inner.write_all(bytes, *at));
        put.map_err(|error| self.fail(error))
    }

    fn apply(&self, writes: &[(HostOffset, Vec<u8>)], sequence: u64) -> io::Result<()> {
        self.put(writes)?;
        self.applied.store(sequence, Ordering::SeqCst);
        Ok(())
    }

    fn check(&self) -> io::Result<()> {
        if self.has_failed.load(Ordering::SeqCst) {
            return Err(io::Error::other("an earlier flush of this file failed"));
        }
        Ok(())
    }

    fn fail(&self, error: io::Error) -> io::Error {
        self.has_failed.store(true, Ordering::SeqCst);
        error
    }

    /// Syncs the file itself.
    fn sync(&self) -> io::Result<()> {
        let mut failed = self.syncing.lock();
        if let Some(why) = &*failed {
            return Err(io::Error::other(format!("an earlier flush of this file failed: {why}")));
        }
        self.check()?;
        let Err(error) = self.inner.flush() else { return Ok(()) };
        *failed = Some(error.to_string());
        let error = self.fail(error);
        drop(failed);
        self.tell_lost();
        Err(error)
    }

    /// Has recovery not trust the page cache.
    fn tell_lost(&self) {
        if !self.log.replays(self.share) {
            return;
        }
        let content = Content { voids: false, has_operations: false, is_needed: true };
        let none = OperationBytes::default();
        if let Err(refused) = self.submit(Kind::Lost, [&none, &none], content) {
            tracing::error!(file = %self.path.display(), log = %self.log.path().display(), ?refused, "a flush failed, and the flush log cannot be told: flushed writes may be missing after a restart");
        }
    }

    /// The file was synced: has recovery replay nothing of it.
    fn make_void(&self) -> io::Result<()> {
        if !self.log.replays(self.share) {
            return Ok(());
        }
        let content = Content { voids: true, has_operations: false, is_needed: true };
        let none = OperationBytes::default();
        match self.submit(Kind::Synced, [&none, &none], content) {
            Ok(_) => Ok(()),
            Err(Refused::Full) => Err(self.fail(io::Error::other(format!(
                "the flush log {} is full of records of files that cannot be synced",
                self.log.path().display()
            )))),
            Err(Refused::Failed(error)) => Err(self.fail(error)),
        }
    }

    /// Syncs the file, so that the log can let go of its records. Flushes go on meanwhile.
    ///
    /// # Errors
    /// A host that failed: no flush of the file succeeds any more.
    pub fn checkpoint(&self) -> io::Result<()> {
        let applied = self.applied.load(Ordering::SeqCst);
        self.sync()?;
        self.log.forget(self.share, applied);
        Ok(())
    }

    /// Makes a change that is not logged.
    fn unlogged<T>(&self, change: impl FnOnce() -> io::Result<T>) -> io::Result<T> {
        let done = change();
        let mut pending = self.pending.lock();
        *pending = Pending { operations: OperationBytes::default(), must_sync: true };
        done
    }
}

impl Behind for LoggedStore {
    fn share(&self) -> ShareId {
        self.share
    }

    fn path(&self) -> &Path {
        &self.path
    }

    fn has_failed(&self) -> bool {
        self.has_failed.load(Ordering::SeqCst)
    }

    fn checkpoint(&self) -> io::Result<()> {
        Self::checkpoint(self)
    }
}

impl Logged for LoggedStore {
    fn tag(&self) -> u64 {
        self.log.tag()
    }

    fn join(&self, mark: u64) -> io::Result<()> {
        let _turn = self.committing.lock();
        self.check()?;
        if self.path.as_os_str().len() > PATH_MAX {
            return Err(io::Error::other("its path is too long for the flush log"));
        }
        self.log.join(self.share)?;
        self.mark.store(mark, Ordering::SeqCst);
        *self.pending.lock() = Pending::default();
        self.has_joined.store(true, Ordering::SeqCst);
        Ok(())
    }

    fn set_mark(&self, mark: u64) {
        let before = self.mark.swap(mark, Ordering::SeqCst);
        if before != mark && Behind::has_failed(self) {
            // Recovery must know the file all the same.
            self.tell_lost();
        }
    }

    fn has_joined(&self) -> bool {
        self.has_joined.load(Ordering::SeqCst)
    }

    fn commit(&self, writes: &[(HostOffset, Vec<u8>)]) -> io::Result<()> {
        self.commit_all(writes)
    }

    fn leave(&self) -> io::Result<()> {
        let _turn = self.committing.lock();
        if !self.has_joined() {
            return Ok(());
        }
        self.check()?;
        self.pending.lock().sync_instead();
        self.sync()?;
        self.make_void()?;
        self.has_joined.store(false, Ordering::SeqCst);
        self.log.leave(self.share);
        Ok(())
    }
}

impl Pending {
    /// Whether the next flush logs what is written now.
    fn is_logged(&self, log: &FlushLog) -> bool {
        !self.must_sync && self.operations.len() < log.record_max() / 2
    }

    fn sync_instead(&mut self) {
        *self = Self { operations: OperationBytes::default(), must_sync: true };
    }
}

/// A number that no earlier store had, in all likelihood.
pub(crate) fn draw() -> u64 {
    use std::hash::{BuildHasher as _, RandomState};
    RandomState::new().hash_one(std::process::id())
}

impl Store for LoggedStore {
    fn read_segments(&self, segments: &[Segment<'_>], at: HostOffset) -> io::Result<usize> {
        self.inner.read_segments(segments, at)
    }

    fn write_segments(&self, segments: &[Segment<'_>], at: HostOffset) -> io::Result<()> {
        if !self.has_joined() {
            return self.inner.write_segments(segments, at);
        }
        let len = total_len(segments);
        if len > SHORT_MAX {
            return self.unlogged(|| self.inner.write_segments(segments, at));
        }
        let mut pending = self.pending.lock();
        if !pending.is_logged(&self.log) {
            pending.sync_instead();
            return self.inner.write_segments(segments, at);
        }
        // The guest may change its memory meanwhile: what is logged is what is written.
        let before = pending.operations.len();
        let bytes = pending.operations.write(at, len, |room| copy_to_slice(segments, room));
        let written = self.inner.write_all(bytes, at);
        if written.is_err() {
            // Any part of it may be in the file.
            pending.operations.undo(before);
            pending.must_sync = true;
        }
        written
    }

    fn flush(&self) -> io::Result<()> {
        self.commit_all(&[])
    }

    fn punch_hole(&self, at: HostOffset, len: u64) -> io::Result<()> {
        let mut pending = self.pending.lock();
        let punched = self.inner.punch_hole(at, len);
        match &punched {
            Ok(()) if pending.is_logged(&self.log) && at.get().checked_add(len).is_some() => {
                pending.operations.punch(at, len);
            }
            // Nothing has changed.
            Err(error) if error.kind() == io::ErrorKind::Unsupported => {}
            _ => pending.sync_instead(),
        }
        punched
    }

    fn len(&self) -> io::Result<u64> {
        self.inner.len()
    }

    fn set_len(&self, len: u64) -> io::Result<()> {
        self.unlogged(|| self.inner.set_len(len))
    }

    fn extent(&self, at: HostOffset) -> io::Result<(bool, HostOffset)> {
        self.inner.extent(at)
    }

    fn local(&self) -> Option<&dyn LocalFile> {
        self.inner.local().is_some().then_some(self)
    }
}

impl LoggedStore {
    fn file(&self) -> &dyn LocalFile {
        self.inner.local().expect("looked at before")
    }
}

impl LocalFile for LoggedStore {
    fn raw(&self) -> Option<BorrowedFd<'_>> {
        self.file().raw()
    }

    fn start(&self) -> HostOffset {
        self.file().start()
    }

    fn simulated(&self) -> Option<&FaultStore> {
        self.file().simulated()
    }

    fn raw_alignment(&self) -> usize {
        self.file().raw_alignment()
    }

    fn view(&self) -> Option<View> {
        self.file().view()
    }

    fn give_up_writing(&self) -> io::Result<()> {
        self.leave()?;
        self.file().give_up_writing()
    }

    fn read_now(&self, buf: &mut [u8], at: HostOffset) -> bool {
        self.file().read_now(buf, at)
    }

    fn allocate(&self, at: HostOffset, len: u64) -> io::Result<()> {
        self.unlogged(|| self.file().allocate(at, len))
    }

    fn begin_write_out(&self, at: HostOffset, len: u64) {
        self.file().begin_write_out(at, len);
    }

    fn log(&self) -> Option<&dyn Logged> {
        Some(self)
    }

    fn begin_flush(&self) -> u64 {
        self.file().begin_flush()
    }
}

impl Drop for LoggedStore {
    fn drop(&mut self) {
        if let Err(error) = self.leave() {
            tracing::warn!(file = %self.path.display(), log = %self.log.path().display(), %error, "the flush log keeps flushed writes of a file: they are brought into it when a server starts with that log");
        }
    }
}
