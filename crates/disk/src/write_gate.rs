//! The gate that writers pass, so that they can be held back while a disk's layers change.
//!
//! A writer enters before it looks anything up and leaves when its change is published. [`WriteGate::quiesce`] closes the
//! gate, waits until the writers inside have left, runs a change, and opens the gate again. Readers do not enter: what they
//! found stays readable.
//!
//! Invariant: a writer inside sees the layers as the last quiesced change left them. It looks at them only after it has
//! entered: either the change waited for it, or it saw the gate closed.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::{Condvar, Mutex};

use crate::epoch::{Epochs, Guard, Member, Phase, thread_shard};
use crate::workers::Mailbox;

/// See the module documentation.
#[derive(Debug, Default)]
pub(crate) struct WriteGate {
    inside: Epochs,
    closed: AtomicBool,
    /// Held while the gate is closed: one change at a time.
    closing: Mutex<()>,
    /// Those to call when it opens, besides the threads that wait for `opened`.
    waiting: Mutex<Vec<Arc<Mailbox>>>,
    opened: Condvar,
}

impl WriteGate {
    /// Enters, waiting while the gate is closed; dropping the guard leaves.
    pub(crate) fn enter(&self) -> Guard<'_> {
        loop {
            let guard = self.inside.guard(thread_shard());
            if !self.closed.load(Ordering::SeqCst) {
                return guard;
            }
            drop(guard);
            let mut waiting = self.waiting.lock();
            while self.closed.load(Ordering::SeqCst) {
                self.opened.wait(&mut waiting);
            }
        }
    }

    /// Enters as one of a thread's writers; `None` while the gate is closed.
    #[inline]
    pub(crate) fn try_enter(&self, member: &mut Member) -> Option<Phase> {
        let phase = member.enter(&self.inside);
        if self.closed.load(Ordering::SeqCst) {
            member.leave(&self.inside, phase);
            return None;
        }
        Some(phase)
    }

    /// Ends what [`WriteGate::try_enter`] began.
    #[inline]
    pub(crate) fn leave(&self, member: &mut Member, phase: Phase) {
        member.leave(&self.inside, phase);
    }

    /// Calls `mailbox` once it is open.
    pub(crate) fn call_when_open(&self, mailbox: &Arc<Mailbox>) {
        let mut waiting = self.waiting.lock();
        if self.closed.load(Ordering::SeqCst) {
            waiting.push(Arc::clone(mailbox));
        } else {
            mailbox.call();
        }
    }

    /// Runs `change` while no writer is inside.
    pub(crate) fn quiesce<T>(&self, change: impl FnOnce() -> T) -> T {
        let _one_at_a_time = self.closing.lock();
        let reopen = Reopen(self);
        self.closed.store(true, Ordering::SeqCst);
        self.inside.synchronize();
        let changed = change();
        drop(reopen);
        changed
    }
}

/// Opens the gate again, also after a panic.
struct Reopen<'a>(&'a WriteGate);

impl Drop for Reopen<'_> {
    fn drop(&mut self) {
        let mut waiting = self.0.waiting.lock();
        self.0.closed.store(false, Ordering::SeqCst);
        self.0.opened.notify_all();
        waiting.drain(..).for_each(|mailbox| mailbox.call());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicU64;

    /// Writers of both kinds change two numbers that are equal whenever the write_gate is closed.
    #[test]
    fn a_closed_run_never_meets_a_writer() {
        let write_gate = WriteGate::default();
        let numbers = [AtomicU64::new(0), AtomicU64::new(0)];
        let stop = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !stop.load(Ordering::Relaxed) {
                    let _inside = write_gate.enter();
                    numbers.iter().for_each(|number| {
                        number.fetch_add(1, Ordering::Relaxed);
                    });
                }
            });
            scope.spawn(|| {
                let mut member = Member::new(1);
                while !stop.load(Ordering::Relaxed) {
                    let Some(phase) = write_gate.try_enter(&mut member) else { continue };
                    numbers.iter().for_each(|number| {
                        number.fetch_add(1, Ordering::Relaxed);
                    });
                    write_gate.leave(&mut member, phase);
                }
            });
            let _stop = StopAtEnd(&stop);
            let (mut rounds, mut last) = (0, 0);
            // Until writers have got through, however late their threads begin.
            while rounds < 200 || last == 0 {
                let [one, other] =
                    write_gate.quiesce(|| numbers.each_ref().map(|number| number.load(Ordering::SeqCst)));
                assert_eq!(one, other, "a writer was inside");
                (rounds, last) = (rounds + 1, last.max(one));
                std::thread::yield_now();
            }
        });
    }

    /// Lets threads end, also when what they are to see is not so.
    struct StopAtEnd<'a>(&'a AtomicBool);

    impl Drop for StopAtEnd<'_> {
        fn drop(&mut self) {
            self.0.store(true, Ordering::Relaxed);
        }
    }

    #[test]
    fn it_opens_again_when_the_closed_run_panics() {
        let write_gate = WriteGate::default();
        let run = || write_gate.quiesce(|| panic!("on purpose"));
        assert!(std::panic::catch_unwind(std::panic::AssertUnwindSafe(run)).is_err());
        drop(write_gate.enter());
    }
}
