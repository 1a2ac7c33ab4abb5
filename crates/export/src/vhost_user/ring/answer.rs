//! The way back: statuses, the used ring, and whether the driver wants to hear of it.

use std::sync::atomic::{Ordering, fence};

use super::{RING_HEADER, Ring};

const NO_INTERRUPT: u16 = 1;

impl Ring {
    /// Answers request `head` with `status` and no data; see [`Ring::answer`].
    #[inline]
    pub(in crate::vhost_user) fn refuse(&mut self, head: u16, status: u8) {
        self.hand_back(head, status, 0);
        if let Some(logging) = &mut self.logging {
            logging.mark_request(head, true);
        }
    }

    /// Writes the status of request `head` and hands it back with `written` bytes of data before the status;
    /// the driver sees it after [`Ring::publish`].
    ///
    /// # Panics
    /// When no such request is in flight.
    #[inline]
    pub(in crate::vhost_user) fn answer(&mut self, head: u16, status: u8, written: u32) {
        self.hand_back(head, status, written);
        if let Some(logging) = &mut self.logging {
            logging.mark_request(head, false);
        }
    }

    #[inline]
    fn hand_back(&mut self, head: u16, status: u8, written: u32) {
        let place = self.status[usize::from(head)].take().expect("answer to a request in flight");
        // SAFETY: `walk` translated the address in `memory`, which this ring has kept since.
        unsafe { place.write_volatile(status) };
        let slot = usize::from(self.next_used & (self.layout.size - 1));
        let element = RING_HEADER + 8 * slot;
        self.used_long(element).store(u32::from(head).to_le(), Ordering::Relaxed);
        self.used_long(element + 4).store(written.saturating_add(1).to_le(), Ordering::Relaxed);
        if let Some(inflight) = &self.inflight {
            inflight.link(head);
        }
        self.batch.push(head);
        self.next_used = self.next_used.wrapping_add(1);
        self.in_flight -= 1;
    }

    /// Shows the driver all answers since the last call; whether it wants to be called for them.
    #[inline]
    pub(in crate::vhost_user) fn publish(&mut self) -> bool {
        if self.batch.is_empty() {
            return false;
        }
        let (old, new) = (self.published, self.next_used);
        self.used_word(2).store(new.to_le(), Ordering::Release);
        if let Some(logging) = &self.logging {
            logging.mark_used_ring(self.used_len());
        }
        if let Some(inflight) = &self.inflight {
            inflight.answered(&self.batch, new);
        }
        self.batch.clear();
        self.published = new;
        // The driver writes what it waits for, then reads the index; we do it the other way round.
        fence(Ordering::SeqCst);
        let wanted = if self.layout.event_idx {
            let event = RING_HEADER + 2 * usize::from(self.layout.size);
            let event = u16::from_le(self.available_word(event).load(Ordering::Relaxed));
            new.wrapping_sub(event).wrapping_sub(1) < new.wrapping_sub(old)
        } else {
            u16::from_le(self.available_word(0).load(Ordering::Relaxed)) & NO_INTERRUPT == 0
        };
        std::mem::take(&mut self.call_owed) | wanted
    }
}
