//! Who is inside a disk: a sleepable read-copy-update counter that can be closed.
//!
//! A request enters before it looks anything up and leaves when its last byte has moved. A cluster that was taken
//! out of the map may be given to someone else only after every request that could have seen it has left:
//! [`Epochs::synchronize`] waits for that. Entering and leaving is one atomic addition each, on a cache line that
//! requests of one thread share with few others.
//!
//! A disk has two of these. All its requests enter one, which [`crate::Disk::drain`] closes. Writers also enter the other, the
//! *write gate*, until their change is published: [`Epochs::quiesce`] closes it while the layers change. Readers need not
//! wait for that: what they found stays readable.
//!
//! Invariant: who is inside after waiting for the gate sees what was changed while it was closed. It looks after it has entered:
//! either the change waited for it, or it saw the gate closed.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering, fence};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

use crate::workers::Mailbox;

const SHARDS: usize = 16;

/// Bits of the state: the phase, and whether it is closed.
const PHASE: usize = 1;
const CLOSED: usize = 2;

/// For how long those inside are watched before the waiting thread sleeps: most are in the middle of one system call, and a
/// thread that sleeps, or yields, waits for a processor again, while all writers may be held.
const WATCHED: Duration = Duration::from_micros(20);
/// Of the sleep, at first and at most.
const PAUSE_MIN: Duration = Duration::from_micros(50);
const PAUSE_MAX: Duration = Duration::from_millis(1);

#[derive(Debug, Default)]
#[repr(align(128))]
struct Counter(AtomicU64);

/// See the module documentation. Counts in two phases that take turns.
#[derive(Debug, Default)]
pub(crate) struct Epochs {
    state: AtomicUsize,
    counters: [[Counter; SHARDS]; 2],
    flipping: Mutex<()>,
    /// Held while it is closed for a change: one at a time.
    changing: Mutex<()>,
    /// Those to call when it opens, besides the threads that wait for `opened`.
    waiting: Mutex<Vec<Arc<Mailbox>>>,
    opened: Condvar,
}

/// Proof of having entered; give it back with [`Epochs::leave`].
#[derive(Debug)]
#[must_use = "a ticket that is not given back holds freed clusters for ever"]
struct Ticket {
    phase: u8,
    shard: u8,
}

/// Leaves when dropped; for synchronous requests.
pub(crate) struct Guard<'epochs> {
    epochs: &'epochs Epochs,
    ticket: Option<Ticket>,
}

impl Drop for Guard<'_> {
    fn drop(&mut self) {
        if let Some(ticket) = self.ticket.take() {
            self.epochs.leave(ticket);
        }
    }
}

/// The requests of one thread, which enter together: only the first inside and the last to leave touch the counter.
#[derive(Debug)]
pub(crate) struct Member {
    shard: usize,
    /// Requests inside, by phase.
    inside: [u32; 2],
    tickets: [Option<Ticket>; 2],
}

/// The phase a request entered in; give it back with [`Member::leave`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Phase(u8);

impl Member {
    pub(crate) fn new(shard: usize) -> Self {
        Self { shard, inside: [0; 2], tickets: [None, None] }
    }

    /// Enters as one of the thread's requests; `None` while it is closed.
    #[inline]
    pub(crate) fn try_enter(&mut self, epochs: &Epochs) -> Option<Phase> {
        // Acquire: a request counted in the new phase sees what was unpublished before the turn. One counted in the
        // old phase holds up the thread that waits for that, first of its phase or not.
        let state = epochs.state.load(Ordering::Acquire);
        if state & CLOSED != 0 {
            return None;
        }
        let phase = state & PHASE;
        if self.inside[phase] == 0 {
            let ticket = epochs.enter_phase(phase, self.shard);
            if epochs.is_closed() {
                epochs.leave(ticket);
                return None;
            }
            self.tickets[phase] = Some(ticket);
        }
        self.inside[phase] += 1;
        Some(Phase(phase as u8))
    }

    /// Ends what [`Member::try_enter`] began.
    #[inline]
    pub(crate) fn leave(&mut self, epochs: &Epochs, phase: Phase) {
        let phase = usize::from(phase.0);
        self.inside[phase] -= 1;
        if self.inside[phase] == 0
            && let Some(ticket) = self.tickets[phase].take()
        {
            epochs.leave(ticket);
        }
    }
}

impl Epochs {
    #[inline]
    fn is_closed(&self) -> bool {
        self.state.load(Ordering::SeqCst) & CLOSED != 0
    }

    fn enter_phase(&self, phase: usize, shard: usize) -> Ticket {
        let shard = shard % SHARDS;
        self.counters[phase][shard].0.fetch_add(1, Ordering::SeqCst);
        // The lookups that follow must not be seen before the counter, and who closes sees one or is seen.
        fence(Ordering::SeqCst);
        Ticket { phase: phase as u8, shard: shard as u8 }
    }

    /// Ends what [`Epochs::enter_phase`] began.
    #[inline]
    #[expect(clippy::needless_pass_by_value, reason = "a ticket is used once")]
    fn leave(&self, ticket: Ticket) {
        self.counters[usize::from(ticket.phase)][usize::from(ticket.shard)].0.fetch_sub(1, Ordering::Release);
    }

    /// Enters for the length of a scope, closed or not: for the disk's own work.
    pub(crate) fn guard(&self) -> Guard<'_> {
        let phase = self.state.load(Ordering::Relaxed) & PHASE;
        Guard { epochs: self, ticket: Some(self.enter_phase(phase, thread_shard())) }
    }

    /// Enters for the length of a scope, waiting while it is closed.
    pub(crate) fn enter(&self) -> Guard<'_> {
        loop {
            let guard = self.guard();
            if !self.is_closed() {
                return guard;
            }
            drop(guard);
            let mut waiting = self.waiting.lock();
            while self.is_closed() {
                self.opened.wait(&mut waiting);
            }
        }
    }

    /// Calls `mailbox` once it is open.
    pub(crate) fn call_when_open(&self, mailbox: &Arc<Mailbox>) {
        let mut waiting = self.waiting.lock();
        if !self.is_closed() {
            mailbox.call();
        } else if !waiting.iter().any(|other| Arc::ptr_eq(other, mailbox)) {
            waiting.push(Arc::clone(mailbox));
        }
    }

    /// Closes it, and waits until those inside have left.
    pub(crate) fn close(&self) {
        self.state.fetch_or(CLOSED, Ordering::SeqCst);
        self.synchronize();
    }

    /// Opens it again.
    pub(crate) fn open(&self) {
        let mut waiting = self.waiting.lock();
        self.state.fetch_and(!CLOSED, Ordering::SeqCst);
        self.opened.notify_all();
        waiting.drain(..).for_each(|mailbox| mailbox.call());
    }

    /// Runs `change` while it is closed and no one is inside.
    pub(crate) fn quiesce<T>(&self, change: impl FnOnce() -> T) -> T {
        let _one_at_a_time = self.changing.lock();
        let reopen = Reopen(self);
        self.close();
        let changed = change();
        drop(reopen);
        changed
    }

    /// Returns once every request that entered before the call has left.
    ///
    /// Both phases are drained, because a request may have read the phase just before it turned and counted
    /// itself just after.
    pub(crate) fn synchronize(&self) {
        let _one_at_a_time = self.flipping.lock();
        for _ in 0..2 {
            fence(Ordering::SeqCst);
            let old = self.state.fetch_xor(PHASE, Ordering::SeqCst) & PHASE;
            let is_inside = || self.counters[old].iter().any(|counter| counter.0.load(Ordering::SeqCst) != 0);
            let (began, mut pause) = (Instant::now(), PAUSE_MIN);
            while is_inside() {
                if began.elapsed() < WATCHED {
                    std::hint::spin_loop();
                } else {
                    std::thread::sleep(pause);
                    pause = (pause * 2).min(PAUSE_MAX);
                }
            }
        }
    }
}

/// Opens it again, also after a panic.
struct Reopen<'a>(&'a Epochs);

impl Drop for Reopen<'_> {
    fn drop(&mut self) {
        self.0.open();
    }
}

/// A number that spreads users over the shards of the counters.
pub(crate) fn next_shard() -> usize {
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    NEXT.fetch_add(1, Ordering::Relaxed)
}

/// The calling thread's shard.
fn thread_shard() -> usize {
    thread_local!(static SHARD: usize = next_shard());
    SHARD.with(|shard| *shard)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicBool;

    /// Synchronizes on a thread of its own; the flag says when it is done.
    fn synchronize_elsewhere(epochs: &Arc<Epochs>) -> (std::thread::JoinHandle<()>, Arc<AtomicBool>) {
        let done = Arc::new(AtomicBool::new(false));
        let (epochs, set) = (Arc::clone(epochs), Arc::clone(&done));
        let waiter = std::thread::spawn(move || {
            epochs.synchronize();
            set.store(true, Ordering::SeqCst);
        });
        (waiter, done)
    }

    #[test]
    fn synchronize_waits_for_those_inside_and_not_for_later_ones() {
        let epochs = Arc::new(Epochs::default());
        let early = epochs.guard();
        let (waiter, done) = synchronize_elsewhere(&epochs);
        std::thread::sleep(Duration::from_millis(30));
        assert!(!done.load(Ordering::SeqCst), "did not wait for the early request");
        drop(early);
        waiter.join().unwrap();
        epochs.synchronize();
    }

    #[test]
    fn synchronize_waits_for_the_last_of_a_members_requests() {
        let epochs = Arc::new(Epochs::default());
        let mut member = Member::new(0);
        let (first, second) = (member.try_enter(&epochs).unwrap(), member.try_enter(&epochs).unwrap());
        let phase = || epochs.state.load(Ordering::SeqCst) & PHASE;
        let before = phase();
        let (waiter, done) = synchronize_elsewhere(&epochs);
        while phase() == before {
            std::thread::yield_now();
        }
        let later = member.try_enter(&epochs).unwrap();
        assert_ne!(first, later, "the phase has turned");
        member.leave(&epochs, first);
        std::thread::sleep(Duration::from_millis(20));
        assert!(!done.load(Ordering::SeqCst), "did not wait for the second request");
        member.leave(&epochs, second);
        member.leave(&epochs, later);
        waiter.join().unwrap();
    }

    /// A value is unpublished, synchronized, then poisoned: no reader that found it may see the poison.
    #[test]
    fn what_a_reader_found_stays_usable_until_it_leaves() {
        let epochs = Epochs::default();
        let published = AtomicUsize::new(0);
        let slots: Vec<AtomicU64> = (0..64).map(|_| AtomicU64::new(1)).collect();
        let stop = AtomicBool::new(false);
        std::thread::scope(|scope| {
            for _ in 0..2 {
                let (epochs, published, slots, stop) = (&epochs, &published, &slots, &stop);
                scope.spawn(move || {
                    while !stop.load(Ordering::Relaxed) {
                        let _guard = epochs.guard();
                        let slot = published.load(Ordering::Acquire);
                        for _ in 0..20 {
                            assert_eq!(slots[slot].load(Ordering::Relaxed), 1, "reclaimed under a reader");
                        }
                    }
                });
            }
            for round in 0..300usize {
                let old = round % 64;
                slots[(round + 1) % 64].store(1, Ordering::Relaxed);
                published.store((round + 1) % 64, Ordering::SeqCst);
                epochs.synchronize();
                slots[old].store(0, Ordering::Relaxed);
            }
            stop.store(true, Ordering::Relaxed);
        });
    }

    /// Writers of both kinds change two numbers that are equal whenever no one is inside.
    #[test]
    fn while_it_is_closed_no_one_is_inside() {
        let write_gate = Epochs::default();
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
                    let Some(phase) = member.try_enter(&write_gate) else { continue };
                    numbers.iter().for_each(|number| {
                        number.fetch_add(1, Ordering::Relaxed);
                    });
                    member.leave(&write_gate, phase);
                }
            });
            let _stop = StopAtEnd(&stop);
            let (mut rounds, mut last) = (0, 0);
            let look = || numbers.each_ref().map(|number| number.load(Ordering::SeqCst));
            // Until writers have got through, however late their threads begin.
            while rounds < 200 || last == 0 {
                let [one, other] = write_gate.quiesce(look);
                assert_eq!(one, other, "a writer was inside");
                write_gate.close();
                let drained = look();
                std::thread::yield_now();
                assert_eq!(look(), drained, "a writer came in");
                write_gate.open();
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
        let write_gate = Epochs::default();
        let run = || write_gate.quiesce(|| panic!("on purpose"));
        assert!(std::panic::catch_unwind(std::panic::AssertUnwindSafe(run)).is_err());
        drop(write_gate.enter());
    }
}
