//! The requests of a ring, where the kernel finds them.
//!
//! Place in the data flow: [`crate::Ring`] fills a slot for each request, and empties it at its completion.
//!
//! Invariant: between the two, what the kernel may use stays alive and stays where it is: the store with its
//! descriptor, and the segments.

use io_uring::types::{Fd, FsyncFlags};
use io_uring::{opcode, squeue};
use vmstrata_types::HostOffset;

use super::super::{Action, Job};
use super::pinned::{PinnedFile, RingFile};
use crate::transfer::SEGMENTS_MAX;
use crate::{Segment, SegmentVec, total_len};

/// Most bytes the kernel moves in one request (`MAX_RW_COUNT`).
const BYTES_MAX: usize = i32::MAX as usize & !0xfff;

/// Slots by index; used over and over, so that requests need no allocation.
pub(super) struct Slots {
    /// Boxed: the kernel is given addresses inside.
    #[expect(clippy::vec_box, reason = "slots must not move when the vector grows")]
    slots: Vec<Box<Slot>>,
    free: Vec<u32>,
}

#[derive(Default)]
struct Slot {
    /// Present while the request is in flight.
    file: Option<RingFile>,
    segments: SegmentVec<'static>,
    token: u64,
    expected: usize,
}

impl Slots {
    /// Room for `count` requests; more make more room.
    pub(super) fn new(count: u32) -> Self {
        Self { slots: (0..count).map(|_| Box::default()).collect(), free: (0..count).rev().collect() }
    }

    /// Takes a slot for a request; returns the entry for it, with its index as `user_data`.
    ///
    /// # Panics
    /// When the store has no raw descriptor.
    #[inline]
    pub(super) fn fill(&mut self, job: Job) -> squeue::Entry {
        let Job { action, file, segments, at, token } = job;
        // Before a slot is taken: a store without a descriptor panics, and the ring's end waits for every slot.
        let (fd, flags, at) = match &file {
            RingFile::Open(store) => (Fd(store.ring_fd()), squeue::Flags::empty(), at + store.start().get()),
            RingFile::Pinned(PinnedFile(place)) => {
                let place = i32::try_from(place.get()).expect("few files are pinned");
                (Fd(place), squeue::Flags::FIXED_FILE, at)
            }
        };
        let index = self.free.pop().unwrap_or_else(|| {
            self.slots.push(Box::default());
            u32::try_from(self.slots.len() - 1).expect("fewer than 2^32 requests")
        });
        let slot = &mut self.slots[index as usize];
        slot.expected = total_len(&segments);
        slot.file = Some(file);
        slot.segments = segments;
        slot.token = token;
        entry(action, fd, &slot.segments, at).flags(flags).user_data(u64::from(index))
    }

    /// Gives a slot back at the completion of its request; returns the request's token and bytes.
    ///
    /// # Panics
    /// When `data` is not the `user_data` of a request in flight.
    pub(super) fn empty(&mut self, data: u64) -> (u64, usize) {
        let slot = &mut self.slots[data as usize];
        assert!(slot.file.take().is_some(), "a completion for a request that is not in flight");
        slot.segments = SegmentVec::new();
        self.free.push(data as u32);
        (slot.token, slot.expected)
    }

    /// Slots in use.
    pub(super) fn in_flight(&self) -> usize {
        self.slots.len() - self.free.len()
    }

    #[cfg(test)]
    pub(super) fn capacity(&self) -> usize {
        self.slots.len()
    }
}

/// The kernel's form of a request.
fn entry(action: Action, fd: Fd, segments: &[Segment<'static>], at: HostOffset) -> squeue::Entry {
    let offset = at.get();
    let (iovecs, count) = (Segment::as_iovecs(segments), segments.len().min(SEGMENTS_MAX) as u32);
    // One segment needs no vector: the kernel then has nothing to copy and check. A longer one than the field has
    // room for completes short, which every request may.
    match (action, segments) {
        (Action::Read | Action::ReadApart, [segment]) => {
            let len = segment.len().min(BYTES_MAX) as u32;
            opcode::Read::new(fd, segment.address(), len).offset(offset).build()
        }
        (Action::Read | Action::ReadApart, _) => opcode::Readv::new(fd, iovecs, count).offset(offset).build(),
        (Action::Write, [segment]) => {
            let len = segment.len().min(BYTES_MAX) as u32;
            opcode::Write::new(fd, segment.address(), len).offset(offset).build()
        }
        (Action::Write, _) => opcode::Writev::new(fd, iovecs, count).offset(offset).build(),
        (Action::Flush, _) => opcode::Fsync::new(fd).flags(FsyncFlags::DATASYNC).build(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_segment_needs_no_vector() {
        // SAFETY: never handed to the kernel.
        let segment = unsafe { Segment::new(std::ptr::null_mut(), 5 << 30) };
        for (action, plain, vectored) in [
            (Action::Read, opcode::Read::CODE, opcode::Readv::CODE),
            (Action::Write, opcode::Write::CODE, opcode::Writev::CODE),
        ] {
            let code = |segments: &[_]| entry(action, Fd(0), segments, HostOffset::ZERO).get_opcode();
            assert_eq!(code(&[segment]), u32::from(plain));
            assert_eq!(code(&[segment; 2]), u32::from(vectored));
            assert_eq!(code(&[]), u32::from(vectored));
        }
    }
}
