//! Commands without payload: trim, zeroes, cache, flush.

use vmstrata_disk::Op;
use vmstrata_types::{GuestOffset, GuestRange};

use super::{Current, Pause, Session, Task, TaskKind};
use crate::nbd::limits::{PREFETCH, SPAN};
use crate::nbd::protocol::reply::ReplyTo;

/// Which command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum SpanKind {
    Trim,
    Cache,
    Zero { unmap: bool },
}

/// A range that is being taken in. It may be as long as the disk: the engine gets it in steps.
#[derive(Debug)]
pub(super) struct Spanning {
    task: u32,
    kind: SpanKind,
    next: GuestOffset,
    end: GuestOffset,
    fua: bool,
}

impl Session {
    pub(super) fn begin_span(&mut self, kind: SpanKind, range: GuestRange, to: ReplyTo, fua: bool) {
        // The engine makes one step of zeroes stable by itself; for anything else a flush follows.
        let is_single = step_end(range.start, range.end(), SPAN) == range.end();
        let is_alone = is_single && matches!(kind, SpanKind::Zero { .. });
        let mut task = Task::new(to, TaskKind::Plain);
        task.flush_after = fua && !is_alone;
        let task = self.tasks.insert(task);
        let fua = fua && is_alone;
        self.current = Current::Span(Spanning { task, kind, next: range.start, end: range.end(), fua });
    }

    pub(super) fn span(&mut self, mut spanning: Spanning) -> Option<Pause> {
        while spanning.next < spanning.end {
            // Reading ahead holds a worker that all disks share: one step of it at a time.
            let is_cache = spanning.kind == SpanKind::Cache;
            let must_wait = is_cache && self.tasks.get_mut(spanning.task).outstanding > 0;
            if must_wait || !self.engine.has_room() {
                self.current = Current::Span(spanning);
                return Some(Pause::Room);
            }
            let end = step_end(spanning.next, spanning.end, if is_cache { PREFETCH } else { SPAN });
            let range = GuestRange::new(spanning.next, end - spanning.next);
            spanning.next = end;
            let op = match spanning.kind {
                SpanKind::Trim => Op::Discard,
                SpanKind::Cache => Op::Prefetch,
                SpanKind::Zero { unmap } => Op::WriteZeroes { unmap, fua: spanning.fua },
            };
            self.push(spanning.task, op, range, None, end == spanning.end);
        }
        None
    }

    pub(super) fn flush(&mut self, to: ReplyTo) -> Option<Pause> {
        if !self.engine.has_room() {
            self.current = Current::Flush(to);
            return Some(Pause::Room);
        }
        let task = self.tasks.insert(Task::new(to, TaskKind::Plain));
        self.push(task, Op::Flush, GuestRange::new(GuestOffset::ZERO, 0), None, true);
        None
    }
}

/// Where a step of at most `size` bytes ends: at a multiple of its size, or with the range.
fn step_end(next: GuestOffset, end: GuestOffset, size: u64) -> GuestOffset {
    let len = (end - next).min(size - next.get() % size);
    next + len
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_end_at_multiples_of_their_size_and_never_overflow() {
        let step = |next, end| step_end(GuestOffset::new(next), GuestOffset::new(end), SPAN).get();
        assert_eq!(step(0, 10), 10);
        assert_eq!(step(5, u64::MAX), SPAN);
        assert_eq!(step(SPAN, 3 * SPAN), 2 * SPAN);
        assert_eq!(step(u64::MAX - 1, u64::MAX), u64::MAX);
    }
}
