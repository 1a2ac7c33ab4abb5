//! Bytes that a client has sent and that are not parsed yet.

/// Bytes one receive call may bring ahead of what is needed.
const CAPACITY: usize = 256 << 10;
/// The same while most of a payload goes straight to its own buffer: enough for the requests behind it.
const CAPACITY_IN_PAYLOAD: usize = 8 << 10;

/// A run of received bytes: one system call brings many requests.
#[derive(Debug)]
pub(crate) struct ReceiveBuffer {
    memory: Box<[u8]>,
    start: usize,
    end: usize,
}

impl ReceiveBuffer {
    pub(crate) fn new() -> Self {
        Self { memory: vec![0; CAPACITY].into_boxed_slice(), start: 0, end: 0 }
    }

    /// Received and not yet consumed.
    pub(crate) fn bytes(&self) -> &[u8] {
        &self.memory[self.start..self.end]
    }

    /// Marks the first `len` bytes as read.
    pub(crate) fn consume(&mut self, len: usize) {
        self.start += len;
        assert!(self.start <= self.end, "only what was received can be consumed");
        if self.start == self.end {
            // Starting over keeps to memory that is still in the caches.
            (self.start, self.end) = (0, 0);
        }
    }

    /// Moves bytes to the front of `into`; returns how many.
    pub(crate) fn copy_to(&mut self, into: &mut [u8]) -> usize {
        let len = into.len().min(self.end - self.start);
        into[..len].copy_from_slice(&self.memory[self.start..self.start + len]);
        self.consume(len);
        len
    }

    /// Room to receive into, never empty: callers consume whole requests, which are far shorter than the buffer.
    pub(crate) fn room(&mut self, in_payload: bool) -> &mut [u8] {
        if self.start > 0 {
            self.memory.copy_within(self.start..self.end, 0);
            (self.start, self.end) = (0, self.end - self.start);
        }
        let capacity = if in_payload { CAPACITY_IN_PAYLOAD } else { CAPACITY };
        assert!(self.end < capacity, "a request that is never consumed");
        &mut self.memory[self.end..capacity]
    }

    /// Marks the first `len` bytes of [`ReceiveBuffer::room`] as received.
    pub(crate) fn received(&mut self, len: usize) {
        self.end += len;
        assert!(self.end <= self.memory.len(), "more than there was room for");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_come_out_in_order_over_many_rounds() {
        let mut rx = ReceiveBuffer::new();
        let (mut next_in, mut next_out) = (0u8, 0u8);
        for round in 1..500 {
            let room = rx.room(false);
            let len = room.len().min(round * 7);
            room[..len].iter_mut().for_each(|byte| {
                *byte = next_in;
                next_in = next_in.wrapping_add(1);
            });
            rx.received(len);
            let mut out = vec![0; rx.bytes().len() - rx.bytes().len().min(20)];
            assert_eq!(rx.copy_to(&mut out), out.len());
            for byte in out {
                assert_eq!(byte, next_out);
                next_out = next_out.wrapping_add(1);
            }
        }
        assert_eq!(rx.bytes().len(), 20);
    }

    #[test]
    fn room_is_small_behind_a_payload() {
        let mut rx = ReceiveBuffer::new();
        assert_eq!(rx.room(true).len(), CAPACITY_IN_PAYLOAD);
        rx.received(100);
        rx.consume(60);
        assert_eq!(rx.room(true).len(), CAPACITY_IN_PAYLOAD - 40);
        assert_eq!(rx.room(false).len(), CAPACITY - 40);
    }
}
