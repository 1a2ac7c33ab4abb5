//! The driver's side of a split virtqueue, in a memory file that is shared with the device under test.
//!
//! Written with plain file reads and writes: slow, obvious, and free of the code it tests.

use std::fs::File;
use std::os::unix::fs::FileExt;

/// Descriptor flags.
pub const NEXT: u16 = 1;
pub const WRITE: u16 = 2;
pub const INDIRECT: u16 = 4;

/// Guest address of the first byte of the memory file.
pub const GUEST_BASE: u64 = 0x4000_0000;
/// Where the frontend sees that byte.
pub const USER_BASE: u64 = 0x7f00_0000_0000;

/// One ring. All positions are offsets in the memory file.
pub struct Driver {
    file: File,
    pub size: u16,
    origin: u64,
    pub next_available: u16,
    used_seen: u16,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Descriptor {
    pub guest: u64,
    pub len: u32,
    pub flags: u16,
    pub next: u16,
}

impl Descriptor {
    fn bytes(self) -> [u8; 16] {
        let mut bytes = [0; 16];
        bytes[..8].copy_from_slice(&self.guest.to_le_bytes());
        bytes[8..12].copy_from_slice(&self.len.to_le_bytes());
        bytes[12..14].copy_from_slice(&self.flags.to_le_bytes());
        bytes[14..].copy_from_slice(&self.next.to_le_bytes());
        bytes
    }
}

#[allow(dead_code, reason = "each test uses its own part")]
impl Driver {
    /// A ring at `origin`, both of whose indices are at `start`.
    pub fn new(file: File, size: u16, origin: u64, start: u16) -> Self {
        let driver = Self { file, size, origin, next_available: start, used_seen: start };
        driver.write(driver.available() + 2, &start.to_le_bytes());
        driver.write(driver.used() + 2, &start.to_le_bytes());
        driver
    }

    pub fn descriptors(&self) -> u64 {
        self.origin
    }

    pub fn available(&self) -> u64 {
        self.origin + 16 * u64::from(self.size)
    }

    pub fn used(&self) -> u64 {
        (self.available() + 6 + 2 * u64::from(self.size)).next_multiple_of(64)
    }

    /// Bytes a ring of `size` takes.
    pub fn ring_len(size: u16) -> u64 {
        (26 * u64::from(size) + 128).next_multiple_of(4096)
    }

    pub fn write(&self, at: u64, bytes: &[u8]) {
        self.file.write_all_at(bytes, at).unwrap();
    }

    pub fn read(&self, at: u64, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        self.file.read_exact_at(&mut bytes, at).unwrap();
        bytes
    }

    pub fn word(&self, at: u64) -> u16 {
        u16::from_le_bytes(self.read(at, 2).try_into().unwrap())
    }

    pub fn set_descriptor(&self, index: u16, descriptor: Descriptor) {
        self.write(self.descriptors() + 16 * u64::from(index), &descriptor.bytes());
    }

    /// Writes a table of descriptors anywhere, chained in order.
    pub fn write_table(&self, at: u64, buffers: &[(u64, u32, u16)]) {
        for (index, &(guest, len, flags)) in buffers.iter().enumerate() {
            let last = index + 1 == buffers.len();
            let flags = if last { flags } else { flags | NEXT };
            let descriptor = Descriptor { guest, len, flags, next: index as u16 + 1 };
            self.write(at + 16 * index as u64, &descriptor.bytes());
        }
    }

    /// Chains `buffers` from descriptor `first` on.
    pub fn set_chain(&self, first: u16, buffers: &[(u64, u32, u16)]) {
        for (index, &(guest, len, flags)) in buffers.iter().enumerate() {
            let last = index + 1 == buffers.len();
            let flags = if last { flags } else { flags | NEXT };
            let place = first + index as u16;
            self.set_descriptor(place, Descriptor { guest, len, flags, next: place + 1 });
        }
    }

    /// Makes the chain at `head` available.
    pub fn offer(&mut self, head: u16) {
        let slot = u64::from(self.next_available % self.size);
        self.write(self.available() + 4 + 2 * slot, &head.to_le_bytes());
        self.next_available = self.next_available.wrapping_add(1);
        self.set_available_index(self.next_available);
    }

    pub fn set_available_index(&self, index: u16) {
        self.write(self.available() + 2, &index.to_le_bytes());
    }

    pub fn set_used_event(&self, event: u16) {
        self.write(self.available() + 4 + 2 * u64::from(self.size), &event.to_le_bytes());
    }

    /// The index at which the device wants to be kicked.
    pub fn available_event(&self) -> u16 {
        self.word(self.used() + 4 + 8 * u64::from(self.size))
    }

    pub fn used_flags(&self) -> u16 {
        self.word(self.used())
    }

    pub fn used_index(&self) -> u16 {
        self.word(self.used() + 2)
    }

    /// The next answer: head, and bytes written.
    pub fn next_used(&mut self) -> Option<(u16, u32)> {
        if self.used_index() == self.used_seen {
            return None;
        }
        let slot = u64::from(self.used_seen % self.size);
        let element = self.read(self.used() + 4 + 8 * slot, 8);
        self.used_seen = self.used_seen.wrapping_add(1);
        let long = |at: usize| u32::from_le_bytes(element[at..at + 4].try_into().unwrap());
        Some((u16::try_from(long(0)).unwrap(), long(4)))
    }
}

/// The header of a virtio-blk request.
#[allow(dead_code, reason = "each test uses its own part")]
pub fn header(kind: u32, sector: u64) -> [u8; 16] {
    let mut bytes = [0; 16];
    bytes[..4].copy_from_slice(&kind.to_le_bytes());
    bytes[8..].copy_from_slice(&sector.to_le_bytes());
    bytes
}
