//! A request as the exports hand it in, and how a thread that may block carries it out.

use vmstrata_store::{SegmentVec, slice};
use vmstrata_types::{ClusterBits, GuestRange};

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

    /// Whether all that it covers is on stable storage when it completes.
    pub(crate) fn is_durable(self) -> bool {
        matches!(self, Self::Flush | Self::Write { fua: true } | Self::WriteZeroes { fua: true, .. })
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

/// Most bytes that a worker reads or writes, and clears, before others get their turn.
const PIECE_MAX: u64 = 4 << 20;
const CLEARED_MAX: u64 = 64 << 20;
/// Pieces end at a multiple of it: no cluster is larger.
const CLUSTER_MAX: u64 = ClusterBits::MAX.size();

impl Request {
    /// Most bytes of such a request that are carried out at once.
    fn piece_max(&self) -> u64 {
        match self.op {
            Op::Flush => u64::MAX,
            Op::Read | Op::Write { .. } | Op::Prefetch => PIECE_MAX,
            Op::Discard | Op::WriteZeroes { .. } => CLEARED_MAX,
        }
    }

    /// Whether others should have their turn in the middle of it.
    pub(crate) fn is_long(&self) -> bool {
        self.range.len > self.piece_max()
    }

    /// Splits the start of a long request off, to be carried out before the rest.
    pub(crate) fn split_front(&mut self) -> Self {
        let GuestRange { start, len } = self.range;
        let first = self.piece_max() - start.get() % CLUSTER_MAX;
        let segments = if self.op.has_buffers() {
            let split = first as usize;
            let front = slice(&self.segments, 0, split);
            self.segments = slice(&self.segments, split, len as usize - split);
            front
        } else {
            SegmentVec::new()
        };
        self.range = GuestRange::new(start + first, len - first);
        // The rest is flushed with all that was written before it.
        let op = match self.op {
            Op::Write { .. } => Op::Write { fua: false },
            Op::WriteZeroes { unmap, .. } => Op::WriteZeroes { unmap, fua: false },
            op => op,
        };
        Self { op, range: GuestRange::new(start, first), segments, token: self.token }
    }
}

#[cfg(test)]
mod tests {
    use vmstrata_types::GuestOffset;

    use super::*;

    #[test]
    fn a_long_request_is_split_at_clusters_and_flushed_at_its_end() {
        let range = GuestRange::new(GuestOffset::new(CLUSTER_MAX - 512), 3 * CLEARED_MAX);
        let op = Op::WriteZeroes { unmap: true, fua: true };
        let mut rest = Request { op, range, segments: SegmentVec::new(), token: 7 };
        let split = || rest.is_long().then(|| rest.split_front());
        let pieces: Vec<Request> = std::iter::from_fn(split).collect();
        let mut at = range.start;
        for piece in pieces.iter().chain([&rest]) {
            assert_eq!((piece.range.start, piece.token), (at, 7));
            assert!(piece.range.len <= CLEARED_MAX);
            at = at + piece.range.len;
        }
        assert_eq!(at, range.end());
        assert!(pieces.iter().all(|piece| piece.range.end().is_aligned(ClusterBits::MAX)));
        assert!(pieces.iter().all(|piece| piece.op == Op::WriteZeroes { unmap: true, fua: false }));
        assert_eq!((rest.op, pieces.len()), (op, 3));
        assert!(!Request { op: Op::Flush, range, ..rest }.is_long());
    }
}
