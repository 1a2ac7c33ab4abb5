//! Who is still using the mappings of a disk: a sleepable read-copy-update counter.
//!
//! A request enters before it looks anything up and leaves when its last byte has moved. A cluster that was taken
//! out of the map may be given to someone else only after every request that could have seen it has left:
//! [`Epochs::synchronize`] waits for that. Entering and leaving is one atomic addition each, on a cache line that
//! requests of one thread share with few others.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering, fence};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

const SHARDS: usize = 16;

/// For how long those inside are watched before their end is slept for: most are in the middle of one system call, and whoever
/// sleeps, or yields, waits for a processor again, while all writers may be held.
const WATCHED: Duration = Duration::from_micros(20);
/// Of the sleep, at first and at most.
const PAUSE_MIN: Duration = Duration::from_micros(50);
const PAUSE_MAX: Duration = Duration::from_millis(1);

#[derive(Debug, Default)]
#[repr(align(128))]
struct Counter(AtomicU64);

/// Counts the requests under way, in two phases that take turns.
#[derive(Debug, Default)]
pub(crate) struct Epochs {
    phase: AtomicUsize,
    counters: [[Counter; SHARDS]; 2],
    flipping: Mutex<()>,
}

/// Proof of having entered; give it back with [`Epochs::leave`].
#[derive(Debug)]
#[must_use = "a ticket that is not given back holds freed clusters for ever"]
pub(crate) struct Ticket {
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

/// The phase a member's request entered in; give it back with [`Member::leave`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Phase(u8);

impl Member {
    pub(crate) fn new(shard: usize) -> Self {
        Self { shard, inside: [0; 2], tickets: [None, None] }
    }

    /// As [`Epochs::enter`].
    #[inline]
    pub(crate) fn enter(&mut self, epochs: &Epochs) -> Phase {
        // Acquire: a request counted in the new phase sees what was unpublished before the turn. One counted in the
        // old phase holds up whoever waits for that, first of its phase or not.
        let phase = epochs.phase.load(Ordering::Acquire) & 1;
        if self.inside[phase] == 0 {
            self.tickets[phase] = Some(epochs.enter_phase(phase, self.shard));
        }
        self.inside[phase] += 1;
        Phase(phase as u8)
    }

    /// Ends what [`Member::enter`] began.
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
    /// Marks a request as under way; any `shard` will do, threads with different ones do not disturb each other.
    #[inline]
    pub(crate) fn enter(&self, shard: usize) -> Ticket {
        self.enter_phase(self.phase.load(Ordering::Relaxed) & 1, shard)
    }

    fn enter_phase(&self, phase: usize, shard: usize) -> Ticket {
        let shard = shard % SHARDS;
        self.counters[phase][shard].0.fetch_add(1, Ordering::SeqCst);
        // The lookups that follow must not be seen before the counter: see `synchronize`.
        fence(Ordering::SeqCst);
        Ticket { phase: phase as u8, shard: shard as u8 }
    }

    /// Ends what [`Epochs::enter`] began.
    #[inline]
    #[expect(clippy::needless_pass_by_value, reason = "a ticket is used once")]
    pub(crate) fn leave(&self, ticket: Ticket) {
        self.counters[usize::from(ticket.phase)][usize::from(ticket.shard)].0.fetch_sub(1, Ordering::Release);
    }

    /// Enters for the length of a scope.
    pub(crate) fn guard(&self, shard: usize) -> Guard<'_> {
        Guard { epochs: self, ticket: Some(self.enter(shard)) }
    }

    /// Returns once every request that entered before the call has left.
    ///
    /// Both phases are drained, because a request may have read the phase just before it turned and counted
    /// itself just after.
    pub(crate) fn synchronize(&self) {
        let _one_at_a_time = self.flipping.lock();
        for _ in 0..2 {
            fence(Ordering::SeqCst);
            let old = self.phase.fetch_add(1, Ordering::SeqCst) & 1;
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

/// A number that spreads users over the shards of the counters.
pub(crate) fn next_shard() -> usize {
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    NEXT.fetch_add(1, Ordering::Relaxed)
}

/// The calling thread's shard.
pub(crate) fn thread_shard() -> usize {
    thread_local!(static SHARD: usize = next_shard());
    SHARD.with(|shard| *shard)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;
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
        let early = epochs.enter(3);
        let (waiter, done) = synchronize_elsewhere(&epochs);
        std::thread::sleep(Duration::from_millis(30));
        assert!(!done.load(Ordering::SeqCst), "did not wait for the early request");
        epochs.leave(early);
        waiter.join().unwrap();
        epochs.synchronize();
    }

    #[test]
    fn synchronize_waits_for_the_last_of_a_members_requests() {
        let epochs = Arc::new(Epochs::default());
        let mut member = Member::new(0);
        let (first, second) = (member.enter(&epochs), member.enter(&epochs));
        let (waiter, done) = synchronize_elsewhere(&epochs);
        std::thread::sleep(Duration::from_millis(20));
        let later = member.enter(&epochs);
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
            for shard in 0..2 {
                let (epochs, published, slots, stop) = (&epochs, &published, &slots, &stop);
                scope.spawn(move || {
                    while !stop.load(Ordering::Relaxed) {
                        let _guard = epochs.guard(shard);
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
}
