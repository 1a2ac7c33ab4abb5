//! Payload memory of one connection: page-aligned, reused, and counted.

use vmstrata_store::AlignedBuf;

use super::memory::Share;

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

/// Buffers for one connection. What was given back last is lent first: it is still in the caches. All of them, lent or kept,
/// are in the connection's share of the server's memory.
#[derive(Debug)]
pub(crate) struct BufferPool {
    share: Share,
    free: [Vec<AlignedBuf>; CLASSES],
    kept: usize,
    lent: usize,
}

impl BufferPool {
    /// A pool without buffers.
    pub(crate) fn new(share: Share) -> Self {
        Self { share, free: Default::default(), kept: 0, lent: 0 }
    }

    pub(crate) fn share(&mut self) -> &mut Share {
        &mut self.share
    }

    /// Bytes of memory that are lent out.
    pub(crate) fn lent(&self) -> usize {
        self.lent
    }

    /// What [`BufferPool::take`] adds to [`BufferPool::lent`] for a payload of `len` bytes.
    pub(crate) fn cost(len: usize) -> usize {
        SMALLEST << class(len)
    }

    /// Memory for `len` bytes of payload, holding whatever was there before; `None` while others have it.
    ///
    /// # Panics
    /// For more than the longest payload of the protocol.
    pub(crate) fn take(&mut self, len: usize) -> Option<Buffer> {
        let size = Self::cost(len);
        let memory = match self.free[class(len)].pop() {
            Some(memory) => {
                self.kept -= size;
                memory
            }
            None => {
                if !self.share.take(size) {
                    // Memory of other sizes is as good.
                    self.let_go();
                    if !self.share.take(size) {
                        return None;
                    }
                }
                AlignedBuf::zeroed(size)
            }
        };
        self.lent += size;
        Some(Buffer { memory, len })
    }

    /// Gives back what is kept and more than the connection's own.
    pub(crate) fn trim(&mut self) {
        if self.share.has_borrowed() {
            self.let_go();
        }
    }

    fn let_go(&mut self) {
        self.free.iter_mut().for_each(Vec::clear);
        self.share.give(std::mem::take(&mut self.kept));
    }

    /// Takes memory back.
    pub(crate) fn give(&mut self, buffer: Buffer) {
        let size = buffer.memory.len();
        self.lent = self.lent.checked_sub(size).expect("a buffer of this pool, given back once");
        if self.kept + size <= KEPT && !self.share.is_short() {
            self.kept += size;
            self.free[class(size)].push(buffer.memory);
        } else {
            drop(buffer);
            self.share.give(size);
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
    use std::time::Duration;

    use super::*;
    use crate::nbd::memory::{Budget, OWN, tests::share};

    fn pool() -> BufferPool {
        BufferPool::new(share(&Budget::new(64 << 20, Duration::ZERO)))
    }

    #[test]
    fn the_last_buffer_given_back_is_lent_first() {
        let mut pool = pool();
        let (first, second) = (pool.take(4096).unwrap(), pool.take(100).unwrap());
        assert_eq!(pool.lent(), 8192);
        let address = second.bytes().as_ptr();
        pool.give(first);
        pool.give(second);
        assert_eq!(pool.lent(), 0);
        assert_eq!(pool.take(4000).unwrap().bytes().as_ptr(), address);
    }

    #[test]
    fn only_so_much_is_kept() {
        let mut pool = pool();
        let buffers: Vec<_> = (0..3).map(|_| pool.take(2 << 20).unwrap()).collect();
        buffers.into_iter().for_each(|buffer| pool.give(buffer));
        assert_eq!((pool.kept, pool.lent()), (KEPT, 0));
        let large = pool.take(32 << 20).unwrap();
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
        pool().take((32 << 20) + 1);
    }

    #[test]
    fn kept_buffers_make_room_for_others_and_an_idle_connection_keeps_its_own_only() {
        let budget = Budget::new(2 << 20, Duration::ZERO);
        let mut pool = BufferPool::new(share(&budget));
        let buffers: Vec<_> = (0..4).map(|_| pool.take(1 << 20).unwrap()).collect();
        buffers.into_iter().for_each(|buffer| pool.give(buffer));
        assert_eq!(pool.kept, KEPT);
        let other_size = pool.take(4 << 20).unwrap();
        assert_eq!(pool.kept, 0);
        pool.give(other_size);
        assert!(share(&budget).take(OWN) && !share(&budget).take(OWN + 1));
        pool.trim();
        assert_eq!(pool.kept, 0);
        assert!(share(&budget).take(2 * OWN));
    }
}
