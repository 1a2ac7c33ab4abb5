//! A request in guest memory: the chain of descriptors it is made of, checked and translated.

use std::ptr::NonNull;

use vmstrata_store::SegmentVec;

use super::super::memory::{GuestMemory, SegmentBuilder};
use super::RingError;

/// Most descriptors one request may consist of.
const CHAIN_MAX: u16 = 1024;
/// Bytes at the start of every virtio-blk request: `struct virtio_blk_outhdr`.
pub(in crate::vhost_user) const HEADER_LEN: usize = 16;
/// Bytes of a descriptor.
pub(super) const DESC_LEN: u64 = 16;

const DESC_NEXT: u16 = 1;
const DESC_WRITE: u16 = 2;
const DESC_INDIRECT: u16 = 4;

/// One request as it lies in guest memory.
pub(in crate::vhost_user) struct Chain {
    /// Identifies the request until it is answered.
    pub(in crate::vhost_user) head: u16,
    /// The first bytes the device may read, copied out once.
    pub(in crate::vhost_user) header: [u8; HEADER_LEN],
    /// What else the device may read.
    pub(in crate::vhost_user) readable: SegmentVec<'static>,
    pub(in crate::vhost_user) readable_len: u64,
    /// What the device may write, except the status byte at the end.
    pub(in crate::vhost_user) writable: SegmentVec<'static>,
    pub(in crate::vhost_user) writable_len: u64,
    /// Descriptors the request is made of.
    pub(in crate::vhost_user) descriptors: u16,
}

/// What a device may write of a request, as guest addresses and lengths; kept only for a dirty log.
pub(super) type Written = Vec<(u64, u32)>;

/// A chain with what only the ring needs to know of it.
pub(super) struct Walked {
    pub(super) chain: Chain,
    /// Where the status byte is.
    pub(super) status: NonNull<u8>,
    pub(super) written: Written,
}

/// How chains are walked.
#[derive(Clone, Copy)]
pub(super) struct Rules {
    /// Whether indirect descriptors were negotiated.
    pub(super) indirect: bool,
    /// Whether to note what the device may write.
    pub(super) logged: bool,
}

/// A descriptor table: the ring's own, or an indirect one.
#[derive(Clone, Copy)]
pub(super) struct Table {
    pub(super) base: NonNull<u8>,
    pub(super) len: u16,
}

#[derive(Clone, Copy)]
struct Descriptor {
    guest: u64,
    len: u32,
    flags: u16,
    next: u16,
}

/// Collects the chain that starts at `head` of `table`.
///
/// # Errors
/// When the chain breaks the rules, or is outside guest memory.
#[inline]
pub(super) fn walk(
    memory: &GuestMemory,
    mut table: Table,
    head: u16,
    rules: Rules,
) -> Result<Walked, RingError> {
    let mut walk = Walk::new(memory, rules.logged);
    let (mut next, mut steps, mut nested) = (head, 0, false);
    loop {
        if next >= table.len {
            return Err(RingError::DescriptorOutside { next, len: table.len });
        }
        steps += 1;
        if steps > table.len || walk.descriptors >= CHAIN_MAX {
            return Err(RingError::ChainTooLong { limit: table.len.min(CHAIN_MAX) });
        }
        let descriptor = table.read(next);
        if descriptor.flags & DESC_INDIRECT != 0 {
            if nested || !rules.indirect || descriptor.flags & DESC_NEXT != 0 {
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

impl Table {
    fn read(self, index: u16) -> Descriptor {
        // SAFETY: `index` was checked against the table's length, and the whole table is mapped.
        let at = unsafe { self.base.add(16 * usize::from(index)) };
        let whole = u128::from_le_bytes(read_16(at));
        let (guest, rest) = (whole as u64, (whole >> 64) as u64);
        Descriptor { guest, len: rest as u32, flags: (rest >> 32) as u16, next: (rest >> 48) as u16 }
    }
}

/// Reads sixteen bytes of guest memory, each of which may change meanwhile, once.
#[inline]
fn read_16(at: NonNull<u8>) -> [u8; 16] {
    // SAFETY: callers pass sixteen mapped bytes.
    let second = unsafe { at.add(8) };
    let mut bytes = [0; 16];
    bytes[..8].copy_from_slice(&read_u64(at).to_ne_bytes());
    bytes[8..].copy_from_slice(&read_u64(second).to_ne_bytes());
    bytes
}

/// Reads eight bytes of guest memory, which may change meanwhile, once.
#[inline]
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
    logged: bool,
    written: Written,
}

impl<'mem> Walk<'mem> {
    fn new(memory: &'mem GuestMemory, logged: bool) -> Self {
        Self {
            memory,
            header: [0; HEADER_LEN],
            header_len: 0,
            readable: SegmentBuilder::new(),
            writable: SegmentBuilder::new(),
            descriptors: 0,
            writing: false,
            logged,
            written: Written::new(),
        }
    }

    /// The table an indirect descriptor points to.
    fn indirect(&self, descriptor: Descriptor) -> Result<Table, RingError> {
        let Descriptor { guest, len, .. } = descriptor;
        let bad = RingError::Indirect { len };
        if len == 0 || u64::from(len) % DESC_LEN != 0 || u64::from(len) / DESC_LEN > u64::from(CHAIN_MAX) {
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
        if writable && self.logged {
            self.written.push((descriptor.guest, descriptor.len));
        }
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
        if take == HEADER_LEN {
            self.header = read_16(host);
        } else {
            for byte in 0..take {
                // SAFETY: below `len`, all of which is mapped.
                let at = unsafe { host.add(byte) };
                // SAFETY: mapped; read once, as the guest may change it.
                self.header[self.header_len + byte] = unsafe { at.read_volatile() };
            }
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
    fn finish(mut self, head: u16) -> Result<Walked, RingError> {
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
        Ok(Walked { chain, status, written: self.written })
    }
}
