//! Reads: cut into pieces, with the parts that are known to be zeros left out.

use vmstrata_disk::{ExtentKind, Op};
use vmstrata_types::{GuestOffset, GuestRange};

use super::{Current, Pause, Session, Task, TaskKind};
use crate::nbd::limits::{HOLE_MIN, PIECE, ROUND_BYTES, SPARSE_READ_MIN};
use crate::nbd::outgoing::Payload;
use crate::nbd::protocol::reply::{Head, ReplyTo};

/// Bytes of a long read whose layout is looked up at a time.
const PLAN_WINDOW: u64 = 16 << 20;
/// Runs of one layer looked at for one window.
const PLAN_EXTENTS: usize = 512;

/// A run of data or of zeros inside a read, up to `end`.
#[derive(Clone, Copy, Debug)]
pub(super) struct Run {
    end: GuestOffset,
    is_hole: bool,
}

/// A read that is being taken in.
#[derive(Debug)]
pub(super) struct Reading {
    task: u32,
    next: GuestOffset,
    end: GuestOffset,
    /// Sent in pieces, with zeros left out; otherwise in a single piece.
    is_sparse: bool,
}

impl Session {
    pub(super) fn begin_read(&mut self, range: GuestRange, to: ReplyTo, dont_fragment: bool) {
        let is_chunked = self.terms.style.is_chunked() && !dont_fragment;
        let kind = if is_chunked { TaskKind::ChunkedRead } else { TaskKind::WholeRead };
        // What is short costs less to read than to look up.
        let is_sparse = is_chunked && range.len >= SPARSE_READ_MIN;
        let task = self.tasks.insert(Task::new(to, kind));
        self.runs.clear();
        self.current = Current::Read(Reading { task, next: range.start, end: range.end(), is_sparse });
    }

    pub(super) fn read(&mut self, mut reading: Reading, round: &mut usize) -> Option<Pause> {
        while reading.next < reading.end {
            let (len, is_hole) = self.next_run(&reading);
            let (buffer, pause) = if self.out.is_full() {
                (None, Some(Pause::Room))
            } else if *round >= ROUND_BYTES {
                (None, Some(Pause::Round))
            } else if is_hole {
                (None, None)
            } else {
                let buffer = self.buffer(len as usize);
                let pause = if buffer.is_none() { Some(Pause::Room) } else { None };
                (buffer, pause)
            };
            if pause.is_some() {
                self.current = Current::Read(reading);
                return pause;
            }
            let range = GuestRange::new(reading.next, len);
            reading.next = range.end();
            let is_last = reading.next == reading.end;
            if buffer.is_some() {
                self.push(reading.task, Op::Read, range, buffer, is_last);
                *round += len as usize;
            } else {
                self.send_hole(reading.task, range, is_last);
            }
        }
        None
    }

    /// Length and kind of what comes next in a read.
    fn next_run(&mut self, reading: &Reading) -> (u64, bool) {
        let left = reading.end - reading.next;
        if !reading.is_sparse {
            return (left, false);
        }
        while self.runs.front().is_some_and(|run| run.end <= reading.next) {
            self.runs.pop_front();
        }
        if self.runs.is_empty() {
            self.plan(GuestRange::new(reading.next, left.min(PLAN_WINDOW)));
        }
        let run = self.runs.front().expect("a plan has runs");
        let len = run.end - reading.next;
        if run.is_hole || len <= PIECE {
            (len, run.is_hole)
        } else {
            // Pieces end at multiples of their size, so that they meet the boundaries of clusters.
            (PIECE - reading.next.get() % PIECE, false)
        }
    }

    /// Finds the runs of zeros in the front of `range` that are worth leaving out.
    fn plan(&mut self, range: GuestRange) {
        let extents = match self.engine.disk().extents(range, PLAN_EXTENTS) {
            Ok(extents) => extents,
            // Reading meets the same error, and reports it where it belongs.
            Err(_) => return self.runs.push_back(Run { end: range.end(), is_hole: false }),
        };
        for extent in extents {
            let end = extent.range.end().min(range.end());
            let is_zero = matches!(extent.kind, ExtentKind::Zero | ExtentKind::Hole);
            let is_hole = is_zero && extent.range.len >= HOLE_MIN;
            match self.runs.back_mut() {
                Some(last) if last.is_hole == is_hole => last.end = end,
                _ => self.runs.push_back(Run { end, is_hole }),
            }
        }
    }

    fn send_hole(&mut self, key: u32, range: GuestRange, is_last: bool) {
        let task = self.tasks.get_mut(key);
        task.is_planned = is_last;
        let (to, is_done) = (task.to, is_last && task.outstanding == 0);
        let len = u32::try_from(range.len).expect("no longer than a window");
        self.out.push(Head::hole(self.terms.style, to, range.start.get(), len, is_done), Payload::None);
        if is_done {
            self.tasks.remove(key);
        }
    }
}
