//! What the frontend has said about one queue, until there is enough to run it.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use vmstrata_store::EventNotifier;

/// How a driver tells that it made something available.
#[derive(Debug, Default)]
pub(super) enum Kick {
    /// The frontend has not said: the queue is not started.
    #[default]
    Unset,
    /// It does not; the queue is to be polled.
    Polled,
    Event(Arc<OwnedFd>),
}

/// Where the frontend put the parts of a ring, in its own addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct RingAddresses {
    pub(super) descriptors: u64,
    pub(super) available: u64,
    pub(super) used: u64,
    /// Guest address of the used ring, when writes to it are to be logged.
    pub(super) used_logged_at: Option<u64>,
}

/// One queue as configured, by the control thread only.
#[derive(Debug, Default)]
pub(super) struct Vring {
    pub(super) size: u16,
    pub(super) next_available: u16,
    pub(super) addresses: Option<RingAddresses>,
    pub(super) kick: Kick,
    /// Made when it is first needed, and shared with the I/O thread: another event takes effect at once.
    pub(super) call: Option<Arc<EventNotifier>>,
    pub(super) err: Option<Arc<OwnedFd>>,
    pub(super) enabled: bool,
    /// Whether an I/O thread has it.
    pub(super) running: bool,
}

impl Vring {
    /// Where the ring is, if everything needed to run it has been said.
    ///
    /// A queue runs from the kick descriptor on (vhost-user specification, "Ring states"), if it is enabled.
    pub(super) fn ready(&self) -> Option<RingAddresses> {
        let complete = self.enabled && !self.running && self.size > 0 && !matches!(self.kick, Kick::Unset);
        self.addresses.filter(|_| complete)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_queue_runs_only_when_everything_is_said() {
        let mut vring = Vring { size: 8, enabled: true, kick: Kick::Polled, ..Vring::default() };
        assert_eq!(vring.ready(), None);
        let addresses = RingAddresses { descriptors: 16, available: 2, used: 4, used_logged_at: None };
        vring.addresses = Some(addresses);
        assert_eq!(vring.ready(), Some(addresses));
        vring.kick = Kick::Unset;
        assert_eq!(vring.ready(), None);
        vring.kick = Kick::Polled;
        vring.running = true;
        assert_eq!(vring.ready(), None);
    }
}
