//! Payload memory of one connection: page-aligned, reused, and counted.

use vmstrata_store::AlignedBuf;

/// Free memory kept for the next requests, in bytes; more than this goes back to the system.
const KEPT: usize = 4 << 20;
/// The smallest buffer, in bytes.
const SMALLEST: usize = 4 << 10;
/// Sizes from 4 KiB to 32 MiB, by powers of two.
const CLASSES: usize = 14;

/// Memory for the payload of one request or of a piece of one.
///
/// Holds bytes of earlier requests of the same connection until they are overwritten.
#[derive(Debug)]
pub(crate) struct Buffer {
    memory: AlignedBuf,
    len: usize,
}

impl Buffer {
    /// Payload bytes; the memory behind may be larger.
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

/// Buffers for one connection. What was given back last is lent first: it is still in the caches.
#[derive(Debug, Default)]
pub(crate) struct BufferPool {
    free: [Vec<AlignedBuf>; CLASSES],
    kept: usize,
    lent: usize,
}

impl BufferPool {
    /// Bytes of memory that are lent out.
    pub(crate) fn lent(&self) -> usize {
        self.lent
    }

    /// What [`BufferPool::take`] adds to [`BufferPool::lent`] for a payload of `len` bytes.
    pub(crate) fn cost(len: usize) -> usize {
        SMALLEST << class(len)
    }

    /// Memory for `len` bytes of payload, holding whatever was there before.
    ///
    /// # Panics
    /// For more than the longest payload of the protocol.
    pub(crate) fn take(&mut self, len: usize) -> Buffer {
        let size = Self::cost(len);
        self.lent += size;
        let memory = match self.free[class(len)].pop() {
            Some(memory) => {
                self.kept -= size;
                memory
            }
            None => AlignedBuf::zeroed(size),
        };
        Buffer { memory, len }
    }

    /// Takes memory back.
    pub(crate) fn give(&mut self, buffer: Buffer) {
        let size = buffer.memory.len();
        self.lent = self.lent.checked_sub(size).expect("a buffer of this pool, given back once");
        if self.kept + size <= KEPT {
            self.kept += size;
            self.free[class(size)].push(buffer.memory);
        }
    }
}

/// Which size holds `len` bytes.
fn class(len: usize) -> usize {
    let pages = len.max(1).div_ceil(SMALLEST).next_power_of_two();
    let class = pages.trailing_zeros() as usize;
    assert!(class < CLASSES, "payload of {len} bytes past the limit of the protocol");
    class
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_buffer_given_back_is_lent_first() {
        let mut pool = BufferPool::default();
        let (first, second) = (pool.take(4096), pool.take(100));
        assert_eq!(pool.lent(), 8192);
        let address = second.bytes().as_ptr();
        pool.give(first);
        pool.give(second);
        assert_eq!(pool.lent(), 0);
        assert_eq!(pool.take(4000).bytes().as_ptr(), address);
    }

    #[test]
    fn only_so_much_is_kept() {
        let mut pool = BufferPool::default();
        let buffers: Vec<_> = (0..3).map(|_| pool.take(2 << 20)).collect();
        buffers.into_iter().for_each(|buffer| pool.give(buffer));
        assert_eq!((pool.kept, pool.lent()), (KEPT, 0));
        let large = pool.take(32 << 20);
        assert_eq!(pool.lent(), 32 << 20);
        pool.give(large);
        assert_eq!(pool.kept, KEPT);
    }

    #[test]
    fn sizes_are_powers_of_two_of_pages() {
        for (len, cost) in [(0, 4096), (1, 4096), (4096, 4096), (4097, 8192), (512 << 10, 512 << 10)] {
            assert_eq!(BufferPool::cost(len), cost, "{len}");
        }
    }

    #[test]
    #[should_panic(expected = "past the limit")]
    fn no_buffer_is_larger_than_the_longest_payload() {
        BufferPool::default().take((32 << 20) + 1);
    }
}
