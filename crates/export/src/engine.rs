//! One client's requests inside the disk engine, and the memory they use.
//!
//! A request of the protocol is handed over in pieces. The engine writes into a piece's buffer, or reads from
//! it, until the piece has completed; [`Engine`] owns both the queue and the buffers, so neither outlives the other.

use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::Duration;

use smallvec::smallvec;
use vmstrata_disk::{Completion, Disk, Error, IoQueue, Op, Request};
use vmstrata_store::{Segment, SegmentVec};
use vmstrata_types::GuestRange;

use crate::buffer::Buffer;
use crate::slab::Slab;

/// A piece of a request, under way or just done.
#[derive(Debug)]
pub(crate) struct Piece<T> {
    /// The request it belongs to.
    pub(crate) task: T,
    /// What it covers.
    pub(crate) range: GuestRange,
    /// The bytes read, or to be written.
    pub(crate) buffer: Option<Buffer>,
}

/// A queue into the disk with the buffers of everything in it.
pub(crate) struct Engine<T> {
    // Dropped before `pieces`: dropping the queue waits until nothing uses their buffers any more.
    queue: IoQueue,
    pieces: Slab<Piece<T>>,
    done: Vec<Completion>,
    depth: usize,
    has_pushed: bool,
}

impl<T> Engine<T> {
    /// A queue for up to `depth` pieces.
    ///
    /// # Errors
    /// Whatever keeps the engine from making one.
    pub(crate) fn new(disk: Arc<Disk>, depth: u32) -> Result<Self, Error> {
        let queue = IoQueue::new(disk, depth)?;
        Ok(Self { queue, pieces: Slab::new(), done: Vec::new(), depth: depth as usize, has_pushed: false })
    }

    pub(crate) fn disk(&self) -> &Arc<Disk> {
        self.queue.disk()
    }

    /// Pieces under way.
    pub(crate) fn in_flight(&self) -> usize {
        self.pieces.len()
    }

    /// Whether another piece may be pushed.
    pub(crate) fn has_room(&self) -> bool {
        self.pieces.len() < self.depth
    }

    /// Whether something was pushed since the last [`Engine::submit`].
    pub(crate) fn has_pushed(&self) -> bool {
        self.has_pushed
    }

    /// Starts a piece.
    ///
    /// # Panics
    /// Without room, or when a buffer is not as long as the range.
    pub(crate) fn push(&mut self, op: Op, mut piece: Piece<T>) {
        assert!(self.has_room(), "checked by the session");
        let range = piece.range;
        let segments = match &mut piece.buffer {
            None => SegmentVec::new(),
            Some(buffer) => {
                assert_eq!(buffer.len() as u64, range.len, "a buffer is as long as its piece");
                let memory = buffer.bytes_mut();
                // SAFETY: the heap memory of the buffer stays where it is, in `pieces`, until the completion
                // has been reaped; and `queue`, which is dropped first, waits for its requests.
                let segment: Segment<'static> = unsafe { Segment::new(memory.as_mut_ptr(), memory.len()) };
                smallvec![segment]
            }
        };
        let token = self.pieces.insert(piece).into();
        self.queue.push(Request { op, range, segments, token });
        self.has_pushed = true;
    }

    /// Hands everything pushed to the kernel.
    pub(crate) fn submit(&mut self) {
        if std::mem::take(&mut self.has_pushed) {
            self.queue.submit();
        }
    }

    /// Moves what is finished to the end of `into`.
    pub(crate) fn reap(&mut self, into: &mut Vec<(Piece<T>, Result<(), Error>)>) {
        if self.pieces.len() == 0 {
            return;
        }
        self.queue.reap(&mut self.done);
        for completion in self.done.drain(..) {
            let key = u32::try_from(completion.token).expect("a token of ours");
            into.push((self.pieces.remove(key), completion.result));
        }
    }

    /// Sleeps until a piece is finished, one of `watched` is readable, or `timeout` has passed; says which.
    pub(crate) fn wait(&mut self, watched: &[BorrowedFd<'_>], timeout: Option<Duration>) -> u64 {
        self.queue.wait(watched, timeout)
    }

    /// As [`IoQueue::rest`].
    pub(crate) fn rest(&mut self) -> Option<BorrowedFd<'_>> {
        self.queue.rest()
    }

    /// As [`IoQueue::roused`].
    pub(crate) fn roused(&mut self, called: bool) {
        self.queue.roused(called);
    }
}
