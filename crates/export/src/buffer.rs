//! Page-aligned memory for the bytes of requests, reused.

use vmstrata_store::AlignedBuf;

/// Free memory kept for the next requests, in bytes; more than this goes back to the system.
pub(crate) const KEPT: usize = 4 << 20;
/// The smallest buffer, in bytes.
const SMALLEST: usize = 4 << 10;
/// Sizes from 4 KiB to 32 MiB, by powers of two.
const CLASSES: usize = 14;

/// Memory for the bytes of one request or of a piece of one.
///
/// Holds bytes of earlier requests of the same client until they are overwritten. The bytes stay where they are when it moves.
#[derive(Debug)]
pub(crate) struct Buffer {
    memory: AlignedBuf,
    len: usize,
}

impl Buffer {
    /// New memory for `len` bytes.
    ///
    /// # Panics
    /// For more than 32 MiB.
    pub(crate) fn new(len: usize) -> Self {
        Self { memory: AlignedBuf::zeroed(Self::cost(len)), len }
    }

    /// Bytes of memory that a buffer for `len` bytes takes.
    pub(crate) fn cost(len: usize) -> usize {
        SMALLEST << class(len)
    }

    /// Bytes of memory that it takes.
    pub(crate) fn size(&self) -> usize {
        self.memory.len()
    }

    /// Bytes of the request; the memory behind may be larger.
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        &self.memory[..self.len]
    }

    pub(crate) fn bytes_mut(&mut self) -> &mut [u8] {
        &mut self.memory[..self.len]
    }
}

/// Buffers that were given back. The last one is lent first: it is still in the caches.
#[derive(Debug, Default)]
pub(crate) struct SpareBuffers {
    free: [Vec<AlignedBuf>; CLASSES],
    kept: usize,
}

impl SpareBuffers {
    /// Bytes kept.
    #[cfg(test)]
    pub(crate) fn kept(&self) -> usize {
        self.kept
    }

    /// A buffer for `len` bytes, if there is one of that size, holding whatever was in it before.
    ///
    /// # Panics
    /// For more than 32 MiB.
    pub(crate) fn take(&mut self, len: usize) -> Option<Buffer> {
        let memory = self.free[class(len)].pop()?;
        self.kept -= memory.len();
        Some(Buffer { memory, len })
    }

    /// Keeps a buffer, unless enough are kept.
    pub(crate) fn give(&mut self, buffer: Buffer) -> bool {
        let size = buffer.size();
        let is_kept = self.kept + size <= KEPT;
        if is_kept {
            self.kept += size;
            self.free[class(size)].push(buffer.memory);
        }
        is_kept
    }

    /// Lets go of all; returns their bytes.
    pub(crate) fn clear(&mut self) -> usize {
        self.free.iter_mut().for_each(Vec::clear);
        std::mem::take(&mut self.kept)
    }
}

/// Which size holds `len` bytes.
fn class(len: usize) -> usize {
    let pages = len.max(1).div_ceil(SMALLEST).next_power_of_two();
    let class = pages.trailing_zeros() as usize;
    assert!(class < CLASSES, "a buffer of {len} bytes is larger than any request");
    class
}
