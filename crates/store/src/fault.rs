//! A store that fails, delays and records on demand.
//!
//! Place in the data flow: wraps any other store, in tests. It has no raw descriptor, so that every operation
//! comes through the trait, or through [`crate::Ring::simulated`], and so past the [`FaultPlan`]. Stores that share a
//! plan share its numbering and its log: "the seventh write of this test", whichever file it goes to.
//!
//! Invariant: what the log says was written is what the wrapped store was told to write, and nothing else was.

mod plan;
mod replay;

use std::io;
use std::sync::Arc;

use vmstrata_types::HostOffset;

pub(crate) use plan::{Admission, Held, Ticket};
pub use plan::{Effect, Fault, FaultPlan, OperationKind, When};
pub use replay::{Crash, CrashKind, Survivors};

use crate::{LocalFile, Segment, Store, copy_to_slice, slice, total_len};

/// Names one store of a plan; the test chooses it, and keeps it when the file is opened again.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct StoreId(pub u32);

/// A moment in a log: everything that happened has a moment of its own, in the order it happened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Moment(pub u64);

/// What changes a store, or makes changes last.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Operation {
    /// Bytes given to the medium at an offset.
    Write {
        /// Where.
        at: HostOffset,
        /// What.
        bytes: Vec<u8>,
    },
    /// A range made to read as zeros.
    PunchHole {
        /// Where.
        at: HostOffset,
        /// How many bytes.
        len: u64,
    },
    /// A new length.
    SetLen {
        /// In bytes.
        len: u64,
    },
    /// A flush.
    Flush,
}

/// One operation of a log.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Record {
    /// The store it went to.
    pub store: StoreId,
    /// What was done; of a write torn by a fault, the part that was done.
    pub operation: Operation,
    /// When it was handed to the store.
    pub issued: Moment,
    /// When it succeeded; `None` while it has not, and for ever if it failed.
    pub completed: Option<Moment>,
}

/// A store whose every operation passes a [`FaultPlan`].
#[derive(Debug)]
pub struct FaultStore {
    inner: Arc<dyn Store>,
    plan: Arc<FaultPlan>,
    id: StoreId,
    alignment: usize,
}

impl FaultStore {
    /// Wraps `inner` as store `id` of `plan`.
    pub fn new(inner: Arc<dyn Store>, plan: &Arc<FaultPlan>, id: StoreId) -> Self {
        Self { inner, plan: Arc::clone(plan), id, alignment: 1 }
    }

    /// The same, of which rings take whole blocks of `alignment` bytes only, as of files that are used around the page cache.
    #[must_use]
    pub fn aligned(self, alignment: usize) -> Self {
        Self { alignment, ..self }
    }

    /// The store within.
    pub fn inner(&self) -> &Arc<dyn Store> {
        &self.inner
    }

    /// Has the plan admit a ring's request.
    pub(crate) fn try_admit(&self, kind: OperationKind) -> Result<Admission, Held> {
        self.plan.try_admit(self.id, kind)
    }

    /// Reads what the plan admits.
    pub(crate) fn read_admitted(
        &self,
        admission: Admission,
        segments: &[Segment<'_>],
        at: HostOffset,
    ) -> io::Result<usize> {
        match admission {
            Admission::Go => self.inner.read_segments(segments, at),
            Admission::Cut { bytes, errno } => {
                let part = slice(segments, 0, bytes.min(total_len(segments)));
                let read = self.inner.read_segments(&part, at)?;
                errno.map_or(Ok(read), |errno| Err(io::Error::from_raw_os_error(errno)))
            }
        }
    }

    /// Writes what the plan admits, and logs it as issued; the caller reports its completion.
    pub(crate) fn write_admitted(
        &self,
        admission: Admission,
        segments: &[Segment<'_>],
        at: HostOffset,
    ) -> (Ticket, io::Result<()>) {
        let total = total_len(segments);
        let (take, errno) = match admission {
            Admission::Go | Admission::Cut { errno: None, .. } => (total, None),
            Admission::Cut { bytes, errno } => (bytes.min(total), errno),
        };
        // The guest may change its memory meanwhile: what is logged is what is written.
        let mut bytes = vec![0; take];
        copy_to_slice(&slice(segments, 0, take), &mut bytes);
        let ticket = self.plan.issue(self.id, || Operation::Write { at, bytes: bytes.clone() });
        let written = self.inner.write_all(&bytes, at);
        let failed = |errno| Err(io::Error::from_raw_os_error(errno));
        (ticket, written.and_then(|()| errno.map_or(Ok(()), failed)))
    }

    /// Flushes if the plan admits it, and logs it as issued; the caller reports its completion.
    pub(crate) fn flush_admitted(&self, admission: &Admission) -> (Ticket, io::Result<()>) {
        let ticket = self.plan.issue(self.id, || Operation::Flush);
        let flushed = match admission {
            Admission::Go | Admission::Cut { errno: None, .. } => self.inner.flush(),
            Admission::Cut { errno: Some(errno), .. } => Err(io::Error::from_raw_os_error(*errno)),
        };
        (ticket, flushed)
    }

    /// An operation that leaves the store as it is, and so has no record.
    fn look<T>(&self, kind: OperationKind, call: impl FnOnce() -> io::Result<T>) -> io::Result<T> {
        match self.plan.admit(self.id, kind) {
            Admission::Go | Admission::Cut { errno: None, .. } => call(),
            Admission::Cut { errno: Some(errno), .. } => Err(io::Error::from_raw_os_error(errno)),
        }
    }

    /// An operation that is done whole or, when the plan says so, not at all.
    fn change(&self, operation: Operation, call: impl FnOnce() -> io::Result<()>) -> io::Result<()> {
        let admission = self.plan.admit(self.id, OperationKind::of(&operation));
        let ticket = self.plan.issue(self.id, || operation);
        if let Admission::Cut { errno: Some(errno), .. } = admission {
            self.plan.completed(ticket, false);
            return Err(io::Error::from_raw_os_error(errno));
        }
        let result = call();
        self.plan.completed(ticket, result.is_ok());
        result
    }
}

impl Store for FaultStore {
    fn read_segments(&self, segments: &[Segment<'_>], at: HostOffset) -> io::Result<usize> {
        self.read_admitted(self.plan.admit(self.id, OperationKind::Read), segments, at)
    }

    fn write_segments(&self, segments: &[Segment<'_>], at: HostOffset) -> io::Result<()> {
        let admission = self.plan.admit(self.id, OperationKind::Write);
        let (ticket, result) = self.write_admitted(admission, segments, at);
        self.plan.completed(ticket, result.is_ok());
        result
    }

    fn flush(&self) -> io::Result<()> {
        self.change(Operation::Flush, || self.inner.flush())
    }

    fn punch_hole(&self, at: HostOffset, len: u64) -> io::Result<()> {
        self.change(Operation::PunchHole { at, len }, || self.inner.punch_hole(at, len))
    }

    fn len(&self) -> io::Result<u64> {
        self.look(OperationKind::Len, || self.inner.len())
    }

    fn set_len(&self, len: u64) -> io::Result<()> {
        self.change(Operation::SetLen { len }, || self.inner.set_len(len))
    }

    fn extent(&self, at: HostOffset) -> io::Result<(bool, HostOffset)> {
        self.look(OperationKind::Extent, || self.inner.extent(at))
    }

    fn local(&self) -> Option<&dyn LocalFile> {
        Some(self)
    }
}

impl LocalFile for FaultStore {
    fn simulated(&self) -> Option<&FaultStore> {
        Some(self)
    }

    fn raw_alignment(&self) -> usize {
        self.alignment
    }

    fn give_up_writing(&self) -> io::Result<()> {
        self.inner.local().map_or(Ok(()), LocalFile::give_up_writing)
    }

    fn read_now(&self, buf: &mut [u8], at: HostOffset) -> bool {
        self.plan.reads_now()
            && matches!(self.plan.admit(self.id, OperationKind::Read), Admission::Go)
            && self.inner.read_exact(buf, at).is_ok()
    }

    fn allocate(&self, at: HostOffset, len: u64) -> io::Result<()> {
        let len = self.inner.len()?.max(at.get() + len);
        self.change(Operation::SetLen { len }, || self.inner.set_len(len))
    }

    fn begin_flush(&self) -> u64 {
        self.inner.local().map_or(0, LocalFile::begin_flush)
    }
}
