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
//! - whatever the driver writes, a walk ends within [`MAX_CHAIN`] descriptors and touches only guest memory.
//!   A ring that breaks the rules gives an error, after which nothing more is taken from it.

use std::collections::VecDeque;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU16, AtomicU32, Ordering, fence};

use vmstrata_store::SegmentVec;

use super::inflight::InflightQueue;
use super::memory::{GuestMemory, MemoryError, SegmentBuilder};

/// Most descriptors one request may consist of.
pub(super) const MAX_CHAIN: u16 = 1024;
/// Bytes at the start of every virtio-blk request: `struct virtio_blk_outhdr`.
pub(super) const HEADER_LEN: usize = 16;

const DESC_NEXT: u16 = 1;
const DESC_WRITE: u16 = 2;
const DESC_INDIRECT: u16 = 4;
const NO_INTERRUPT: u16 = 1;
const NO_NOTIFY: u16 = 1;

const DESC_LEN: u64 = 16;
const RING_HEADER: usize = 4;

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

/// One request as it lies in guest memory.
pub(super) struct Chain {
    /// Identifies the request until it is answered.
    pub(super) head: u16,
    /// The first bytes the device may read, copied out once.
    pub(super) header: [u8; HEADER_LEN],
    /// What else the device may read.
    pub(super) readable: SegmentVec<'static>,
    pub(super) readable_len: u64,
    /// What the device may write, except the status byte at the end.
    pub(super) writable: SegmentVec<'static>,
    pub(super) writable_len: u64,
    /// Descriptors the request is made of.
    pub(super) descriptors: u16,
}

/// A descriptor table: the ring's own, or an indirect one.
#[derive(Clone, Copy)]
struct Table {
    base: NonNull<u8>,
    len: u16,
}

#[derive(Clone, Copy)]
struct Descriptor {
    guest: u64,
    len: u32,
    flags: u16,
    next: u16,
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
            call_owed: true,
        };
        ring.take_up();
        Ok(ring)
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
        let (chain, status) = self.walk(head)?;
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
        !self.unanswered.is_empty()
            || u16::from_le(self.available_word(2).load(Ordering::Relaxed)) != self.next_available
    }

    /// Requests taken and not answered.
    pub(super) fn in_flight(&self) -> u16 {
        self.in_flight
    }

    /// The entry of the available ring that would be taken next.
    pub(super) fn next_available(&self) -> u16 {
        self.next_available
    }

    /// Writes the status of request `head` and hands it back with `written` bytes of data before the status;
    /// the driver sees it after [`Ring::publish`].
    ///
    /// # Panics
    /// When no such request is in flight.
    #[inline]
    pub(super) fn answer(&mut self, head: u16, status: u8, written: u32) {
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

    /// Asks the driver to kick from now on; whether it made something available meanwhile, so that the
    /// caller must not sleep.
    pub(super) fn enable_kicks(&mut self) -> bool {
        if self.layout.event_idx {
            let event = RING_HEADER + 8 * usize::from(self.layout.size);
            self.used_word(event).store(self.next_available.to_le(), Ordering::Relaxed);
        } else {
            self.used_word(0).store(0, Ordering::Relaxed);
        }
        // The driver writes its index, then reads whether to kick; we do it the other way round.
        fence(Ordering::SeqCst);
        self.has_work()
    }

    /// Tells the driver that kicks are not needed. With EVENT_IDX the stale event index does so by itself.
    pub(super) fn disable_kicks(&mut self) {
        if !self.layout.event_idx {
            self.used_word(0).store(NO_NOTIFY.to_le(), Ordering::Relaxed);
        }
    }

    /// Collects the chain that starts at `head`, and where its status byte is.
    fn walk(&self, head: u16) -> Result<(Chain, NonNull<u8>), RingError> {
        let mut walk = Walk::new(&self.memory);
        let mut table = self.table;
        let mut next = head;
        let mut steps = 0;
        let mut nested = false;
        loop {
            if next >= table.len {
                return Err(RingError::DescriptorOutside { next, len: table.len });
            }
            steps += 1;
            if steps > table.len || walk.descriptors >= MAX_CHAIN {
                return Err(RingError::ChainTooLong { limit: table.len.min(MAX_CHAIN) });
            }
            let descriptor = table.read(next);
            if descriptor.flags & DESC_INDIRECT != 0 {
                if nested || !self.layout.indirect || descriptor.flags & DESC_NEXT != 0 {
                    return Err(RingError::Indirect { len: descriptor.len });
                }
                table = walk.indirect(descriptor)?;
                (next, steps, nested) = (0, 0, true);
                continue;
            }
            walk.add(descriptor)?;
            if descriptor.flags & DESC_NEXT == 0 {
                return walk.finish(head);
            }
            next = descriptor.next;
        }
    }

    fn available_word(&self, offset: usize) -> &AtomicU16 {
        // SAFETY: callers stay inside the part that `new` found mapped.
        let word = unsafe { self.available.add(offset) };
        // SAFETY: mapped as long as `memory`, aligned since `new` checked the start; all accesses are atomic.
        unsafe { AtomicU16::from_ptr(word.cast().as_ptr()) }
    }

    fn used_word(&self, offset: usize) -> &AtomicU16 {
        // SAFETY: callers stay inside the part that `new` found mapped.
        let word = unsafe { self.used.add(offset) };
        // SAFETY: as in `available_word`.
        unsafe { AtomicU16::from_ptr(word.cast().as_ptr()) }
    }

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

impl Table {
    fn read(self, index: u16) -> Descriptor {
        // SAFETY: `index` was checked against the table's length, and the whole table is mapped.
        let at = unsafe { self.base.add(16 * usize::from(index)) };
        // SAFETY: the second half of the same descriptor.
        let second = unsafe { at.add(8) };
        let (guest, rest) = (u64::from_le(read_u64(at)), u64::from_le(read_u64(second)));
        Descriptor { guest, len: rest as u32, flags: (rest >> 32) as u16, next: (rest >> 48) as u16 }
    }
}

/// Reads eight bytes of guest memory, which may change meanwhile, once.
fn read_u64(at: NonNull<u8>) -> u64 {
    let at = at.cast::<u64>();
    if at.is_aligned() {
        // SAFETY: callers pass mapped memory; aligned.
        unsafe { at.read_volatile() }
    } else {
        // SAFETY: callers pass mapped memory; an array of bytes needs no alignment.
        u64::from_ne_bytes(unsafe { at.cast::<[u8; 8]>().read_volatile() })
    }
}

/// A chain being collected.
struct Walk<'mem> {
    memory: &'mem GuestMemory,
    header: [u8; HEADER_LEN],
    header_len: usize,
    readable: SegmentBuilder,
    writable: SegmentBuilder,
    descriptors: u16,
    writing: bool,
}

impl<'mem> Walk<'mem> {
    fn new(memory: &'mem GuestMemory) -> Self {
        Self {
            memory,
            header: [0; HEADER_LEN],
            header_len: 0,
            readable: SegmentBuilder::new(),
            writable: SegmentBuilder::new(),
            descriptors: 0,
            writing: false,
        }
    }

    /// The table an indirect descriptor points to.
    fn indirect(&self, descriptor: Descriptor) -> Result<Table, RingError> {
        let Descriptor { guest, len, .. } = descriptor;
        let bad = RingError::Indirect { len };
        if len == 0 || u64::from(len) % DESC_LEN != 0 || u64::from(len) / DESC_LEN > u64::from(MAX_CHAIN) {
            return Err(bad);
        }
        let (base, here) = self.memory.translate(guest, len.into()).ok_or(RingError::Unmapped { guest })?;
        if here < u64::from(len) {
            return Err(RingError::Unmapped { guest: guest + here });
        }
        Ok(Table { base, len: (u64::from(len) / DESC_LEN) as u16 })
    }

    /// Adds one buffer; it may cross from one memory region into the next.
    #[inline]
    fn add(&mut self, descriptor: Descriptor) -> Result<(), RingError> {
        self.descriptors += 1;
        let writable = descriptor.flags & DESC_WRITE != 0;
        if self.writing && !writable {
            return Err(RingError::Order);
        }
        self.writing = writable;
        let (mut guest, mut len) = (descriptor.guest, u64::from(descriptor.len));
        while len > 0 {
            let (host, here) = self.memory.translate(guest, len).ok_or(RingError::Unmapped { guest })?;
            if writable {
                // SAFETY: mapped by `memory`, which the ring keeps until the request is answered.
                unsafe { self.writable.push(host, here as usize) };
            } else {
                self.add_readable(host, here as usize);
            }
            (guest, len) = (guest.wrapping_add(here), len - here);
        }
        Ok(())
    }

    #[inline]
    fn add_readable(&mut self, host: NonNull<u8>, len: usize) {
        let take = len.min(HEADER_LEN - self.header_len);
        for byte in 0..take {
            // SAFETY: below `len`, all of which is mapped.
            let at = unsafe { host.add(byte) };
            // SAFETY: mapped; read once, as the guest may change it.
            self.header[self.header_len + byte] = unsafe { at.read_volatile() };
        }
        self.header_len += take;
        if take < len {
            // SAFETY: `take` is below `len`.
            let rest = unsafe { host.add(take) };
            // SAFETY: mapped by `memory`, which the ring keeps until the request is answered.
            unsafe { self.readable.push(rest, len - take) };
        }
    }

    #[inline]
    fn finish(mut self, head: u16) -> Result<(Chain, NonNull<u8>), RingError> {
        let (readable, writable) = (self.readable.total() + self.header_len as u64, self.writable.total());
        let truncated = RingError::Truncated { readable, writable };
        if self.header_len < HEADER_LEN {
            return Err(truncated);
        }
        let status = self.writable.split_last_byte().ok_or(truncated)?;
        let chain = Chain {
            head,
            header: self.header,
            readable_len: self.readable.total(),
            readable: self.readable.finish(),
            writable_len: self.writable.total(),
            writable: self.writable.finish(),
            descriptors: self.descriptors,
        };
        Ok((chain, status))
    }
}

#[cfg(test)]
mod tests;
