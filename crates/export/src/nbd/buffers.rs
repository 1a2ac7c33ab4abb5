//! Payload memory of one connection: reused, and counted.

use super::memory::Share;
use crate::buffer::{Buffer, SpareBuffers};

/// Buffers for one connection. All of them, lent or kept, are in the connection's share of the server's memory.
#[derive(Debug)]
pub(crate) struct BufferPool {
    share: Share,
    spare: SpareBuffers,
    lent: usize,
}

impl BufferPool {
    /// A pool without buffers.
    pub(crate) fn new(share: Share) -> Self {
        Self { share, spare: SpareBuffers::default(), lent: 0 }
    }

    pub(crate) fn share(&mut self) -> &mut Share {
        &mut self.share
    }

    /// Bytes of memory that are lent out.
    pub(crate) fn lent(&self) -> usize {
        self.lent
    }

    /// Memory for `len` bytes of payload, holding whatever was there before; `None` while others have it. [`BufferPool::lent`]
    /// grows by [`Buffer::cost`].
    ///
    /// # Panics
    /// For more than the longest payload of the protocol.
    pub(crate) fn take(&mut self, len: usize) -> Option<Buffer> {
        let buffer = match self.spare.take(len) {
            Some(buffer) => buffer,
            None => {
                let size = Buffer::cost(len);
                if !self.share.take(size) {
                    // Memory of other sizes is as good.
                    self.let_go();
                    if !self.share.take(size) {
                        return None;
                    }
                }
                Buffer::new(len)
            }
        };
        self.lent += buffer.size();
        Some(buffer)
    }

    /// Gives back what is kept and more than the connection's own.
    pub(crate) fn trim(&mut self) {
        if self.share.has_borrowed() {
            self.let_go();
        }
    }

    fn let_go(&mut self) {
        self.share.give(self.spare.clear());
    }

    /// Takes memory back.
    pub(crate) fn give(&mut self, buffer: Buffer) {
        let size = buffer.size();
        self.lent = self.lent.checked_sub(size).expect("a buffer of this pool, given back once");
        if self.share.is_short() || !self.spare.give(buffer) {
            self.share.give(size);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::buffer::KEPT;
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
        assert_eq!((pool.spare.kept(), pool.lent()), (KEPT, 0));
        let large = pool.take(32 << 20).unwrap();
        assert_eq!(pool.lent(), 32 << 20);
        pool.give(large);
        assert_eq!(pool.spare.kept(), KEPT);
    }

    #[test]
    fn sizes_are_powers_of_two_of_pages() {
        for (len, cost) in [(0, 4096), (1, 4096), (4096, 4096), (4097, 8192), (512 << 10, 512 << 10)] {
            assert_eq!(Buffer::cost(len), cost, "{len}");
        }
    }

    #[test]
    #[should_panic(expected = "larger than any request")]
    fn no_buffer_is_larger_than_the_longest_payload() {
        pool().take((32 << 20) + 1);
    }

    #[test]
    fn kept_buffers_make_room_for_others_and_an_idle_connection_keeps_its_own_only() {
        let budget = Budget::new(2 << 20, Duration::ZERO);
        let mut pool = BufferPool::new(share(&budget));
        let buffers: Vec<_> = (0..4).map(|_| pool.take(1 << 20).unwrap()).collect();
        buffers.into_iter().for_each(|buffer| pool.give(buffer));
        assert_eq!(pool.spare.kept(), KEPT);
        let other_size = pool.take(4 << 20).unwrap();
        assert_eq!(pool.spare.kept(), 0);
        pool.give(other_size);
        assert!(share(&budget).take(OWN) && !share(&budget).take(OWN + 1));
        pool.trim();
        assert_eq!(pool.spare.kept(), 0);
        assert!(share(&budget).take(2 * OWN));
    }
}
