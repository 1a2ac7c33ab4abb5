//! Requests through a queue, with memory that stays where it is.

use std::collections::HashMap;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::Duration;

use vmstrata_disk::{Completion, Disk, Error, IoQueue, Op, Request};
use vmstrata_store::{AlignedBuf, Segment, SegmentVec};

use super::flat::range;
use super::ledger::Step;

/// An [`IoQueue`] that owns the buffers of its requests.
pub struct Client {
    queue: IoQueue,
    buffers: HashMap<u64, AlignedBuf>,
    next: u64,
}

/// A request that has ended, with the bytes it read or wrote.
pub struct Done {
    pub token: u64,
    pub result: Result<(), Error>,
    pub bytes: AlignedBuf,
}

impl Client {
    pub fn new(disk: &Arc<Disk>, depth: u32) -> Self {
        let queue = IoQueue::new(Arc::clone(disk), depth).expect("the host has io_uring");
        Self { queue, buffers: HashMap::new(), next: 0 }
    }

    /// Starts a request; for a write `bytes` are what to write, for a read they give the length.
    pub fn push(&mut self, op: Op, at: u64, len: u64, bytes: Option<&[u8]>) -> u64 {
        let token = self.next;
        self.next += 1;
        let moves = matches!(op, Op::Read | Op::Write { .. });
        let mut buffer = AlignedBuf::zeroed(if moves { len as usize } else { 0 });
        if let Some(bytes) = bytes {
            buffer.copy_from_slice(bytes);
        }
        let segments = if moves { segments_of(&mut buffer) } else { SegmentVec::new() };
        self.buffers.insert(token, buffer);
        self.queue.push(Request { op, range: range(at, len), segments, token });
        token
    }

    /// Does steps, all at the same time; returns how each ended, with the bytes of reads.
    pub fn take(&mut self, steps: &[Step]) -> Vec<Result<Option<Vec<u8>>, Error>> {
        for step in steps {
            match step {
                Step::Write { at, bytes } => {
                    self.push(Op::Write { fua: false }, *at, bytes.len() as u64, Some(bytes))
                }
                Step::Zeroes { at, len, unmap } => {
                    self.push(Op::WriteZeroes { unmap: *unmap, fua: false }, *at, *len, None)
                }
                Step::Discard { at, len } => self.push(Op::Discard, *at, *len, None),
                Step::Read { at, len } => self.push(Op::Read, *at, *len, None),
                Step::Flush => self.push(Op::Flush, 0, 0, None),
            };
        }
        let mut done = self.drain();
        done.sort_by_key(|done| done.token);
        let bytes = |step: &Step, done: Done| {
            let read = matches!(step, Step::Read { .. });
            done.result.map(|()| read.then(|| done.bytes.to_vec()))
        };
        steps.iter().zip(done).map(|(step, done)| bytes(step, done)).collect()
    }

    pub fn submit(&mut self) {
        self.queue.submit();
    }

    pub fn in_flight(&self) -> usize {
        self.queue.in_flight()
    }

    /// Of these, the ones that wait, or that workers have.
    pub fn at_others(&self) -> usize {
        self.queue.at_others()
    }

    /// Sleeps without requests, as long as nothing can be read from `end`; returns how often it was woken for nothing.
    pub fn idle(&mut self, end: BorrowedFd<'_>) -> usize {
        assert_eq!(self.in_flight(), 0, "nothing is under way");
        std::iter::repeat_with(|| self.queue.wait(&[end], None)).take_while(|&readable| readable == 0).count()
    }

    /// Waits until at least one request has ended, if any is under way.
    pub fn wait(&mut self) -> Vec<Done> {
        let mut ended: Vec<Completion> = Vec::new();
        self.queue.submit();
        while ended.is_empty() && self.queue.in_flight() > 0 {
            self.queue.wait(&[], None);
            self.queue.reap(&mut ended);
        }
        self.with_bytes(ended)
    }

    /// Runs the queue until something is so; returns what has ended meanwhile.
    pub fn run_until(&mut self, is_so: impl Fn() -> bool) -> Vec<Done> {
        let mut ended: Vec<Completion> = Vec::new();
        self.queue.submit();
        while !is_so() {
            self.queue.wait(&[], Some(Duration::from_millis(1)));
            self.queue.reap(&mut ended);
        }
        self.with_bytes(ended)
    }

    fn with_bytes(&mut self, ended: Vec<Completion>) -> Vec<Done> {
        let with_bytes = |Completion { token, result }| {
            let bytes = self.buffers.remove(&token).expect("every request ends once");
            Done { token, result, bytes }
        };
        ended.into_iter().map(with_bytes).collect()
    }

    /// Waits for all requests.
    pub fn drain(&mut self) -> Vec<Done> {
        let mut all = Vec::new();
        while self.queue.in_flight() > 0 {
            all.extend(self.wait());
        }
        all
    }
}

/// The buffer in two pieces. Whoever uses them keeps the buffer for as long.
#[expect(unsafe_code, reason = "a queue's buffers are named by address")]
pub fn segments_of(buffer: &mut AlignedBuf) -> SegmentVec<'static> {
    let first = buffer.len() / 2 / 512 * 512;
    let start = buffer.as_mut_ptr();
    let mut segments = SegmentVec::new();
    for (from, to) in [(0, first), (first, buffer.len())] {
        if from < to {
            // SAFETY: the buffer is kept in `Client::buffers`, on the heap, until its request has completed, and the queue
            // is dropped first.
            segments.push(unsafe { Segment::new(start.wrapping_add(from), to - from) });
        }
    }
    segments
}
