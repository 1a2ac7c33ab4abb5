//! Payload memory of all connections of a server: one budget, and who waits for it.
//!
//! ```text
//!   a connection's memory:  [ OWN ][ from the budget ............ ]      at most Limits::payload_bytes, lent and kept
//!   the budget:             [ taken by connections, in turn  ][ free ]   Limits::budget_bytes
//! ```
//!
//! Every connection has [`OWN`] for itself, enough for one piece of any request but a long read without structured replies. So a
//! client goes on, slowly, whatever the others hold. More comes out of the budget, first come, first served: who waits
//! takes nothing from those that wait for longer.
//!
//! Memory taken from the budget is in use by the disk, or holds replies. A client that does not take those would keep it from
//! everybody; so while others wait, clients that have taken less than [`TAKEN_MIN`] in [`super::Limits::stall`] are cut off.
//!
//! Lock order: none; the one lock is held for a few instructions.

use std::collections::{HashMap, VecDeque};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use rustix::event::{EventfdFlags, eventfd};
use rustix::net::Shutdown;

/// Bytes that each connection has beside the budget: a piece of the largest cluster.
pub(super) const OWN: usize = 2 << 20;
/// Bytes of replies that count as progress, unless a client takes all there are.
const TAKEN_MIN: usize = 1 << 20;

/// See the module documentation.
#[derive(Debug)]
pub(crate) struct Budget {
    bytes: usize,
    stall: Duration,
    began: Instant,
    state: Mutex<State>,
    /// Whether a connection waits.
    is_short: AtomicBool,
}

#[derive(Debug, Default)]
struct State {
    used: usize,
    next: u64,
    members: HashMap<u64, Arc<Member>>,
    waiting: VecDeque<u64>,
}

/// What the others see of a connection.
#[derive(Debug)]
struct Member {
    socket: Arc<OwnedFd>,
    /// Readable when it may be the connection's turn.
    turn: OwnedFd,
    /// Since when its client has made no progress, in milliseconds; [`NEVER_STALLED`] while no reply waits.
    taken_at_ms: AtomicU64,
}

const NEVER_STALLED: u64 = u64::MAX;

impl Budget {
    /// A budget of `bytes`.
    pub(crate) fn new(bytes: usize, stall: Duration) -> Arc<Self> {
        let (began, is_short) = (Instant::now(), AtomicBool::new(false));
        Arc::new(Self { bytes, stall, began, state: Mutex::default(), is_short })
    }

    /// A connection's share, of which nothing is used.
    ///
    /// # Errors
    /// When the process has no descriptor left.
    pub(crate) fn join(self: &Arc<Self>, socket: Arc<OwnedFd>) -> io::Result<Share> {
        let turn = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        let member = Arc::new(Member { socket, turn, taken_at_ms: AtomicU64::new(NEVER_STALLED) });
        let mut state = self.state.lock();
        let id = state.next;
        state.next += 1;
        state.members.insert(id, Arc::clone(&member));
        drop(state);
        Ok(Share { budget: Arc::clone(self), id, member, used: 0, taken: 0, is_waiting: false })
    }

    /// How long a client may take nothing while others wait.
    pub(crate) fn stall(&self) -> Duration {
        self.stall
    }

    /// Cuts off clients that take no replies.
    pub(crate) fn cut_stalled(&self) {
        let now = self.now_ms();
        let is_stalled = |member: &&Arc<Member>| {
            let since = member.taken_at_ms.load(Ordering::Relaxed);
            since != NEVER_STALLED && Duration::from_millis(now.saturating_sub(since)) >= self.stall
        };
        for member in self.state.lock().members.values().filter(is_stalled) {
            tracing::info!("an NBD client is cut off: it takes no replies, and others wait for their memory");
            // One that its client has closed already cannot be shut down, and need not be.
            let _ = rustix::net::shutdown(&*member.socket, Shutdown::Both);
        }
    }

    fn now_ms(&self) -> u64 {
        u64::try_from(self.began.elapsed().as_millis()).unwrap_or(NEVER_STALLED - 1)
    }
}

impl State {
    /// Tells who waits for longest to look again.
    fn call_next(&self) {
        if let Some(member) = self.waiting.front().and_then(|id| self.members.get(id)) {
            // The counter cannot overflow, and nothing else can fail.
            let _ = rustix::io::write(&member.turn, &1u64.to_ne_bytes());
        }
    }
}

/// One connection's memory: what it has for itself, and what it has taken of the budget.
#[derive(Debug)]
pub(crate) struct Share {
    budget: Arc<Budget>,
    id: u64,
    member: Arc<Member>,
    /// Bytes, with its own.
    used: usize,
    /// Bytes of replies since there was progress.
    taken: usize,
    is_waiting: bool,
}

impl Share {
    /// Takes `bytes`; else `false`, and the connection is called when it may be its turn.
    pub(super) fn take(&mut self, bytes: usize) -> bool {
        let more = (self.used + bytes).saturating_sub(OWN) - self.used.saturating_sub(OWN);
        if more == 0 && !self.is_waiting {
            self.used += bytes;
            return true;
        }
        let mut state = self.budget.state.lock();
        let is_first = state.waiting.front().is_none_or(|first| *first == self.id);
        let may_take = more == 0 || is_first && state.used + more <= self.budget.bytes;
        if may_take {
            state.used += more;
            self.used += bytes;
            if std::mem::take(&mut self.is_waiting) {
                state.waiting.retain(|id| *id != self.id);
                state.call_next();
            }
        } else if !std::mem::replace(&mut self.is_waiting, true) {
            state.waiting.push_back(self.id);
        }
        self.budget.is_short.store(!state.waiting.is_empty(), Ordering::Relaxed);
        may_take
    }

    /// Gives bytes back.
    pub(super) fn give(&mut self, bytes: usize) {
        let left = self.used.checked_sub(bytes).expect("no more than was taken");
        let less = self.used.saturating_sub(OWN) - left.saturating_sub(OWN);
        self.used = left;
        if less > 0 {
            let mut state = self.budget.state.lock();
            state.used -= less;
            state.call_next();
        }
    }

    /// Whether another connection waits while this one has more than its share: it should give back what it does not need.
    pub(super) fn is_short(&self) -> bool {
        self.used > OWN && self.budget.is_short.load(Ordering::Relaxed)
    }

    /// Whether it has memory of the budget.
    pub(super) fn has_borrowed(&self) -> bool {
        self.used > OWN
    }

    /// Notes what the client took of its replies, and whether more of them wait.
    pub(super) fn client_took(&mut self, bytes: usize, has_more: bool) {
        self.taken += bytes;
        let since = self.member.taken_at_ms.load(Ordering::Relaxed);
        let now = match (has_more && self.used > OWN, self.taken >= TAKEN_MIN) {
            (false, _) => NEVER_STALLED,
            (true, false) if since != NEVER_STALLED => return,
            (true, _) => self.budget.now_ms(),
        };
        self.taken = 0;
        self.member.taken_at_ms.store(now, Ordering::Relaxed);
    }

    /// The connection wants no more memory.
    pub(super) fn give_up(&mut self) {
        if std::mem::take(&mut self.is_waiting) {
            let mut state = self.budget.state.lock();
            state.waiting.retain(|id| *id != self.id);
            self.budget.is_short.store(!state.waiting.is_empty(), Ordering::Relaxed);
            state.call_next();
        }
    }

    /// What to watch while the connection waits for memory.
    pub(crate) fn turn(&self) -> Option<BorrowedFd<'_>> {
        self.is_waiting.then(|| self.member.turn.as_fd())
    }

    /// The connection looks again.
    pub(crate) fn called(&self) {
        // Empty unless it was called: both are fine.
        let _ = rustix::io::read(&self.member.turn, &mut [0; 8]);
    }

    pub(crate) fn budget(&self) -> &Budget {
        &self.budget
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        self.give_up();
        let mut state = self.budget.state.lock();
        state.used -= self.used.saturating_sub(OWN);
        state.members.remove(&self.id);
        state.call_next();
    }
}

#[cfg(test)]
pub(super) mod tests {
    use std::os::unix::net::UnixStream;

    use super::*;

    pub(in crate::nbd) fn share(budget: &Arc<Budget>) -> Share {
        budget.join(Arc::new(UnixStream::pair().unwrap().0.into())).unwrap()
    }

    fn is_called(share: &Share) -> bool {
        rustix::io::read(&share.member.turn, &mut [0; 8]).is_ok()
    }

    #[test]
    fn what_a_connection_has_for_itself_is_never_waited_for() {
        let budget = Budget::new(OWN, Duration::ZERO);
        let (mut first, mut second) = (share(&budget), share(&budget));
        assert!(first.take(2 * OWN) && !first.take(1));
        assert!(second.take(OWN) && !second.take(1));
        second.give(1);
        assert!(second.take(1), "its own, though it waits");
    }

    #[test]
    fn who_waits_for_longest_is_called_and_served_first() {
        let budget = Budget::new(2 * OWN, Duration::ZERO);
        let mut all: Vec<Share> = (0..4).map(|_| share(&budget)).collect();
        assert!(all[0].take(3 * OWN));
        assert!(!all[1].take(3 * OWN) && !all[2].take(2 * OWN) && !all[3].take(2 * OWN));
        all[0].give(OWN);
        assert!(is_called(&all[1]) && !is_called(&all[2]));
        assert!(!all[2].take(2 * OWN), "the first waits for more still");
        all[0].give(OWN);
        assert!(is_called(&all[1]) && all[1].take(3 * OWN));
        // What the first no longer wants goes on to the next.
        drop(all.remove(1));
        assert!(is_called(&all[1]) && all[1].take(2 * OWN));
        assert!(is_called(&all[2]) && all[2].take(2 * OWN));
        assert!(!budget.is_short.load(Ordering::Relaxed));
    }

    #[test]
    fn all_memory_comes_back() {
        let budget = Budget::new(4 * OWN, Duration::ZERO);
        let mut share = share(&budget);
        for bytes in [1, OWN, OWN + 1, 2 * OWN] {
            assert!(share.take(bytes));
        }
        share.give(OWN);
        drop(share);
        let state = budget.state.lock();
        assert_eq!((state.used, state.members.len(), state.waiting.len()), (0, 0, 0));
    }
}
