//! The device's side of a split virtqueue (virtio 1.2, "Split Virtqueues"), lean enough for the hot path.
//!
//! ```text
//!   next()     available ring ─► head ─► chain of descriptors ─► Chain: header, segments, status byte
//!   answer()   status byte, used element                          (not visible yet)
//!   publish()  used index, once a batch ─► does the driver want a call?
//! ```
//!
//! The crate `virtio-queue` is not used here: it looks a region up and checks bounds anew for every field,
//! publishes the used index once a request, and knows nothing of inflight tracking.
//!
//! Invariants:
//! - at most one request per head descriptor is in flight, so a head identifies a request;
//! - the memory table a request points into stays mapped until the request is answered;
//! - whatever the driver writes, a walk ends within 1024 descriptors and touches only guest memory.
//!   A ring that breaks the rules gives an error, after which nothing more is taken from it.

mod chain;

use std::collections::VecDeque;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU16, AtomicU32, Ordering, fence};

use super::dirty::DirtyLog;
use super::inflight::InflightQueue;
use super::memory::{GuestMemory, MemoryError};
pub(super) use chain::{Chain, HEADER_LEN};
use chain::{DESC_LEN, Rules, Table, Walked, Written, walk};

const NO_NOTIFY: u16 = 1;
const NO_INTERRUPT: u16 = 1;

const RING_HEADER: usize = 4;

/// Where a ring's three parts lie, in the frontend's own addresses, and how it works.
#[derive(Clone, Copy, Debug)]
pub(super) struct RingLayout {
    pub(super) size: u16,
    pub(super) descriptors: u64,
    pub(super) available: u64,
    pub(super) used: u64,
    pub(super) event_idx: bool,
    pub(super) indirect: bool,
}

/// A running ring, owned by one I/O thread.
pub(super) struct Ring {
    layout: RingLayout,
    table: Table,
    available: NonNull<u8>,
    used: NonNull<u8>,
    memory: Arc<GuestMemory>,
    inflight: Option<InflightQueue>,
    /// Heads to take up again before anything from the available ring.
    unanswered: VecDeque<u16>,
    /// By head: where the status byte of the request in flight goes.
    status: Box<[Option<NonNull<u8>>]>,
    in_flight: u16,
    next_available: u16,
    /// The driver's index when it was last looked at.
    available_seen: u16,
    next_used: u16,
    published: u16,
    batch: Vec<u16>,
    logging: Option<Logging>,
    /// Cleared by the first call: until then the driver may wait for one a predecessor did not make.
    call_owed: bool,
}

// SAFETY: the pointers lead into mappings that `memory` keeps, and one thread at a time uses the ring.
unsafe impl Send for Ring {}

impl Ring {
    /// A ring over `memory`, taking from entry `next_available` on unless `inflight` knows better.
    ///
    /// # Errors
    /// When a part of the ring is not inside one memory region, or misaligned.
    ///
    /// # Panics
    /// When the size is not a power of two.
    pub(super) fn new(
        layout: RingLayout,
        memory: Arc<GuestMemory>,
        inflight: Option<InflightQueue>,
        next_available: u16,
    ) -> Result<Self, MemoryError> {
        assert!(layout.size.is_power_of_two(), "ring size checked when it was set");
        let size = u64::from(layout.size);
        // The event fields at the end exist only if negotiated.
        let event = if layout.event_idx { 2 } else { 0 };
        let base = memory.ring_part("descriptor table", layout.descriptors, DESC_LEN * size, 16)?;
        let available = memory.ring_part("available ring", layout.available, 4 + 2 * size + event, 2)?;
        let used = memory.ring_part("used ring", layout.used, 4 + 8 * size + event, 4)?;
        let mut ring = Self {
            layout,
            table: Table { base, len: layout.size },
            available,
            used,
            memory,
            inflight,
            unanswered: VecDeque::new(),
            status: vec![None; usize::from(layout.size)].into_boxed_slice(),
            in_flight: 0,
            next_available,
            available_seen: next_available,
            next_used: 0,
            published: 0,
            batch: Vec::with_capacity(usize::from(layout.size)),
            logging: None,
            call_owed: true,
        };
        ring.take_up();
        Ok(ring)
    }

    /// Notes from now on what is written.
    pub(super) fn log_to(&mut self, mut logging: Logging) {
        logging.fit(self.layout.size);
        self.logging = Some(logging);
    }

    /// Finds where a predecessor, or an earlier life of this ring, left off.
    fn take_up(&mut self) {
        let used = u16::from_le(self.used_word(2).load(Ordering::Acquire));
        (self.next_used, self.published) = (used, used);
        let Some(inflight) = &mut self.inflight else { return };
        let recovered = inflight.recover(used);
        self.unanswered = recovered.unanswered.into();
        if let Some(next) = recovered.next_avail {
            (self.next_available, self.available_seen) = (next, next);
        }
    }

    /// The next request, or `None` when the driver has made no more available.
    ///
    /// # Errors
    /// When the driver broke the rules; do not call again.
    #[inline]
    pub(super) fn next(&mut self) -> Result<Option<Chain>, RingError> {
        let again = self.unanswered.pop_front();
        let head = match again {
            Some(head) => head,
            None if self.next_available != self.available_seen || self.look()? => self.available_head(),
            None => return Ok(None),
        };
        let size = self.layout.size;
        let slot = self.status.get(usize::from(head)).ok_or(RingError::HeadOutside { head, size })?;
        if slot.is_some() {
            return Err(RingError::HeadBusy { head });
        }
        let rules = Rules { indirect: self.layout.indirect, logged: self.logging.is_some() };
        let Walked { chain, status, written } = walk(&self.memory, self.table, head, rules)?;
        if let Some(logging) = &mut self.logging {
            logging.note(head, written);
        }
        if again.is_none() {
            if let Some(inflight) = &mut self.inflight {
                inflight.take(head);
            }
            self.next_available = self.next_available.wrapping_add(1);
        }
        self.status[usize::from(head)] = Some(status);
        self.in_flight += 1;
        Ok(Some(chain))
    }

    /// Reads the driver's index; whether there is something to take.
    #[inline]
    fn look(&mut self) -> Result<bool, RingError> {
        self.available_seen = u16::from_le(self.available_word(2).load(Ordering::Acquire));
        let ahead = self.available_seen.wrapping_sub(self.next_available);
        if ahead > self.layout.size {
            self.available_seen = self.next_available;
            return Err(RingError::AvailableIndex { ahead, size: self.layout.size });
        }
        Ok(ahead > 0)
    }

    fn available_head(&self) -> u16 {
        let slot = usize::from(self.next_available & (self.layout.size - 1));
        u16::from_le(self.available_word(RING_HEADER + 2 * slot).load(Ordering::Relaxed))
    }

    /// Whether [`Ring::next`] has something to say: a request, or an error.
    #[inline]
    pub(super) fn has_work(&self) -> bool {
        !self.unanswered.is_empty() || self.waiting() > 0
    }

    /// Requests that the driver has made available and that are not taken; it may claim any number.
    #[inline]
    pub(super) fn waiting(&self) -> u32 {
        let available = u16::from_le(self.available_word(2).load(Ordering::Relaxed));
        available.wrapping_sub(self.next_available).into()
    }

    /// Requests taken and not answered.
    pub(super) fn in_flight(&self) -> u16 {
        self.in_flight
    }

    /// The entry of the available ring that would be taken next.
    pub(super) fn next_available(&self) -> u16 {
        self.next_available
    }

    /// Asks the driver to kick from now on; whether it made something available meanwhile, so that the
    /// caller must not sleep.
    pub(super) fn enable_kicks(&mut self) -> bool {
        if self.layout.event_idx {
            let event = RING_HEADER + 8 * usize::from(self.layout.size);
            self.used_word(event).store(self.next_available.to_le(), Ordering::Relaxed);
        } else {
            self.used_word(0).store(0, Ordering::Relaxed);
        }
        if let Some(logging) = &self.logging {
            logging.mark_used_ring(self.used_len());
        }
        // The driver writes its index, then reads whether to kick; we do it the other way round.
        fence(Ordering::SeqCst);
        self.has_work()
    }

    fn used_len(&self) -> u64 {
        RING_HEADER as u64 + 8 * u64::from(self.layout.size) + 2
    }

    /// Tells the driver that kicks are not needed. With EVENT_IDX the stale event index does so by itself.
    pub(super) fn disable_kicks(&mut self) {
        if !self.layout.event_idx {
            self.used_word(0).store(NO_NOTIFY.to_le(), Ordering::Relaxed);
        }
    }

    #[inline]
    fn available_word(&self, offset: usize) -> &AtomicU16 {
        // SAFETY: callers stay inside the part that `new` found mapped.
        let word = unsafe { self.available.add(offset) };
        // SAFETY: mapped as long as `memory`, aligned since `new` checked the start; all accesses are atomic.
        unsafe { AtomicU16::from_ptr(word.cast().as_ptr()) }
    }

    #[inline]
    fn used_word(&self, offset: usize) -> &AtomicU16 {
        // SAFETY: callers stay inside the part that `new` found mapped.
        let word = unsafe { self.used.add(offset) };
        // SAFETY: as in `available_word`.
        unsafe { AtomicU16::from_ptr(word.cast().as_ptr()) }
    }

    #[inline]
    fn used_long(&self, offset: usize) -> &AtomicU32 {
        // SAFETY: callers stay inside the part that `new` found mapped.
        let long = unsafe { self.used.add(offset) };
        // SAFETY: as in `available_word`; the used ring is aligned to 4.
        unsafe { AtomicU32::from_ptr(long.cast().as_ptr()) }
    }
}

impl Drop for Ring {
    fn drop(&mut self) {
        if self.in_flight > 0 {
            // Only a panic gets here. The kernel may still be writing: the mapping must outlive us.
            std::mem::forget(Arc::clone(&self.memory));
        }
    }
}

impl Ring {
    /// Answers request `head` with `status` and no data; see [`Ring::answer`].
    #[inline]
    pub(super) fn refuse(&mut self, head: u16, status: u8) {
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
    pub(super) fn answer(&mut self, head: u16, status: u8, written: u32) {
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
    pub(super) fn publish(&mut self) -> bool {
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

/// Where to note what is written, for as long as the frontend copies the guest.
pub(super) struct Logging {
    log: Arc<DirtyLog>,
    /// Guest address of the used ring, if writes to it are to be noted too.
    used_ring: Option<u64>,
    /// By head: what the request in flight may write.
    written: Vec<Written>,
}

impl Logging {
    /// For a ring of any size.
    pub(super) fn new(log: Arc<DirtyLog>, used_ring: Option<u64>) -> Self {
        Self { log, used_ring, written: Vec::new() }
    }

    /// Makes room for the heads of a ring of `size`.
    fn fit(&mut self, size: u16) {
        self.written.resize(usize::from(size), Written::new());
    }

    /// Keeps in mind what request `head` may write.
    #[inline]
    fn note(&mut self, head: u16, written: Written) {
        self.written[usize::from(head)] = written;
    }

    /// Marks what request `head` may have written, or only its status byte.
    fn mark_request(&mut self, head: u16, status_only: bool) {
        let written = std::mem::take(&mut self.written[usize::from(head)]);
        if !status_only {
            written.iter().for_each(|&(guest, len)| self.log.mark(guest, len.into()));
        } else if let Some(&(guest, len)) = written.iter().rfind(|(_, len)| *len > 0) {
            self.log.mark(guest.wrapping_add(u64::from(len) - 1), 1);
        }
    }

    /// Marks the first `len` bytes of the used ring, if its writes are to be noted.
    fn mark_used_ring(&self, len: u64) {
        if let Some(guest) = self.used_ring {
            self.log.mark(guest, len);
        }
    }
}

/// How a driver broke the rules of its ring.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub(super) enum RingError {
    #[error("the available index ran {ahead} entries ahead of a ring of {size}")]
    AvailableIndex { ahead: u16, size: u16 },
    #[error("head descriptor {head} is outside a ring of {size}")]
    HeadOutside { head: u16, size: u16 },
    #[error("head descriptor {head} was made available while its request was in flight")]
    HeadBusy { head: u16 },
    #[error("descriptor {next} is outside a table of {len}")]
    DescriptorOutside { next: u16, len: u16 },
    #[error("a chain of descriptors is longer than {limit}, or loops")]
    ChainTooLong { limit: u16 },
    #[error(
        "an indirect descriptor is nested, chained on, not negotiated, or its table of {len:#x} bytes is malformed"
    )]
    Indirect { len: u32 },
    #[error("a device-readable descriptor follows a device-writable one")]
    Order,
    #[error("no guest memory at {guest:#x}")]
    Unmapped { guest: u64 },
    #[error("a request has {readable} readable and {writable} writable bytes: no header or no status byte")]
    Truncated { readable: u64, writable: u64 },
}

#[cfg(test)]
mod tests;
