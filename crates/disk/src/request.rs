//! A request as the doors hand it in, and how a thread that may block carries it out.

use vmstrata_store::{Segment, SegmentVec, total_len};
use vmstrata_types::GuestRange;

use crate::disk::Disk;
use crate::error::Result;

/// What to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Op {
    /// Fill the segments with the range's bytes.
    Read,
    /// Write the segments to the range; with `fua` the request completes only once that is durable.
    Write {
        /// Force unit access.
        fua: bool,
    },
    /// Bring everything that completed before to stable storage.
    Flush,
    /// Give the range's space back.
    Discard,
    /// Make the range read as zeros.
    WriteZeroes {
        /// Give its space back.
        unmap: bool,
        /// Force unit access.
        fua: bool,
    },
    /// Read the range into the host's page cache.
    Prefetch,
}

impl Op {
    /// Whether the request carries bytes.
    pub(crate) fn has_buffers(self) -> bool {
        matches!(self, Self::Read | Self::Write { .. })
    }

    /// Whether a read-only disk refuses it.
    pub(crate) fn changes_disk(self) -> bool {
        matches!(self, Self::Write { .. } | Self::Discard | Self::WriteZeroes { .. })
    }
}

/// A request to a disk. The memory of its segments must stay valid until its completion is reaped.
#[derive(Clone, Debug)]
pub struct Request {
    /// What to do.
    pub op: Op,
    /// With which bytes of the disk; ignored by a flush.
    pub range: GuestRange,
    /// The bytes to fill or to write: as many as the range has, or none for requests without buffers.
    pub segments: SegmentVec<'static>,
    /// The caller's name for it.
    pub token: u64,
}

/// The end of a request.
#[derive(Debug)]
pub struct Completion {
    /// The request's token.
    pub token: u64,
    /// Whether it was carried out.
    pub result: Result<()>,
}

impl Disk {
    /// Refuses a request that makes no sense for this disk.
    pub(crate) fn check(&self, request: &Request) -> Result<()> {
        if request.op.has_buffers() {
            self.check_buffers(request.range, total_len(&request.segments))?;
        } else if request.op != Op::Flush {
            self.check_range(request.range)?;
        }
        if request.op.changes_disk() { self.check_writable() } else { Ok(()) }
    }

    /// Carries a request out, blocking until it is done.
    ///
    /// # Errors
    /// As the method for the operation.
    pub fn run(&self, request: &Request) -> Result<()> {
        self.on_chain(|| self.run_once(request))
    }

    /// As [`Disk::run`], on the chain as it is known.
    pub(crate) fn run_once(&self, request: &Request) -> Result<()> {
        self.check(request)?;
        let segments: &[Segment<'_>] = &request.segments;
        let range = request.range;
        match request.op {
            Op::Read => self.read_counted(range.start, segments),
            Op::Write { fua } => self.write_once(range.start, segments).and_then(|()| self.flush_if(fua)),
            Op::Flush => self.flush(),
            Op::Discard => self.discard(range),
            Op::WriteZeroes { unmap, fua } => {
                self.write_zeroes(range, unmap).and_then(|()| self.flush_if(fua))
            }
            Op::Prefetch => self.prefetch(range),
        }
    }

    fn flush_if(&self, fua: bool) -> Result<()> {
        if fua { self.flush() } else { Ok(()) }
    }
}
