//! Replies on their way out: heads and payloads, gathered into as few system calls as the socket allows.

use std::collections::VecDeque;
use std::io::IoSlice;

use smallvec::SmallVec;

use super::buffers::BufferPool;
use super::error::End;
use super::limits::{MAX_OUTGOING, MAX_OUTGOING_BYTES};
use super::protocol::reply::Head;
use super::transport::Transport;
use crate::buffer::Buffer;

/// Runs of memory handed to the socket at a time.
const MAX_SLICES: usize = 128;

/// What follows the head of a reply.
#[derive(Debug)]
pub(crate) enum Payload {
    None,
    Text(&'static str),
    Bytes(Vec<u8>),
    Buffer(Buffer),
}

impl Payload {
    fn as_bytes(&self) -> &[u8] {
        match self {
            Self::None => &[],
            Self::Text(text) => text.as_bytes(),
            Self::Bytes(bytes) => bytes,
            Self::Buffer(buffer) => buffer.bytes(),
        }
    }
}

struct Message {
    head: Head,
    payload: Payload,
}

impl Message {
    fn len(&self) -> usize {
        self.head.as_bytes().len() + self.payload.as_bytes().len()
    }
}

/// Messages in the order they go out.
#[derive(Default)]
pub(crate) struct Outgoing {
    messages: VecDeque<Message>,
    /// Bytes of the first message that are gone already.
    sent: usize,
    /// Bytes of all payloads.
    payload_bytes: usize,
}

impl Outgoing {
    pub(crate) fn is_empty(&self) -> bool {
        self.messages.is_empty()
    }

    /// Whether the client must read before more requests are taken up.
    pub(crate) fn is_full(&self) -> bool {
        self.messages.len() >= MAX_OUTGOING || self.payload_bytes >= MAX_OUTGOING_BYTES
    }

    pub(crate) fn push(&mut self, head: Head, payload: Payload) {
        self.payload_bytes += payload.as_bytes().len();
        self.messages.push_back(Message { head, payload });
    }

    /// Sends what the socket takes and gives buffers back to `pool`; returns the bytes sent.
    ///
    /// # Errors
    /// When the client is gone.
    pub(crate) fn send(&mut self, transport: &mut Transport, pool: &mut BufferPool) -> Result<usize, End> {
        let mut total = 0;
        while !self.messages.is_empty() {
            let (slices, offered) = self.slices();
            let sent = transport.send(&slices)?;
            drop(slices);
            self.retire(sent, pool);
            total += sent;
            if sent < offered {
                break;
            }
        }
        Ok(total)
    }

    /// The front of the queue as memory, and how long it is.
    fn slices(&self) -> (SmallVec<[IoSlice<'_>; MAX_SLICES]>, usize) {
        let (mut slices, mut skip, mut offered) = (SmallVec::new(), self.sent, 0);
        for message in &self.messages {
            for part in [message.head.as_bytes(), message.payload.as_bytes()] {
                let (gone, part) = part.split_at(skip.min(part.len()));
                skip -= gone.len();
                if !part.is_empty() {
                    offered += part.len();
                    slices.push(IoSlice::new(part));
                }
            }
            if slices.len() + 2 > MAX_SLICES {
                break;
            }
        }
        (slices, offered)
    }

    fn retire(&mut self, sent: usize, pool: &mut BufferPool) {
        self.sent += sent;
        while let Some(len) = self.messages.front().map(Message::len).filter(|len| *len <= self.sent) {
            self.sent -= len;
            let payload = self.messages.pop_front().map_or(Payload::None, |message| message.payload);
            self.payload_bytes -= payload.as_bytes().len();
            if let Payload::Buffer(buffer) = payload {
                pool.give(buffer);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read;
    use std::os::fd::OwnedFd;
    use std::os::unix::net::UnixStream;
    use std::sync::Arc;
    use std::time::Duration;

    use super::*;
    use crate::nbd::memory::{Budget, tests::share};
    use crate::nbd::protocol::reply::{ReplyTo, Style};

    fn pool() -> BufferPool {
        BufferPool::new(share(&Budget::new(64 << 20, Duration::ZERO)))
    }

    fn head(cookie: u64) -> Head {
        Head::done(Style::Simple, ReplyTo { cookie, offset: 0 })
    }

    fn pair() -> (Transport, UnixStream) {
        let (ours, theirs) = UnixStream::pair().unwrap();
        ours.set_nonblocking(true).unwrap();
        (Transport::new(Arc::new(OwnedFd::from(ours))), theirs)
    }

    #[test]
    fn slices_continue_where_the_socket_stopped() {
        let mut out = Outgoing::default();
        let mut whole = Vec::new();
        for cookie in 0..3 {
            out.push(head(cookie), Payload::Text("abcdefg"));
            whole.extend_from_slice(head(cookie).as_bytes());
            whole.extend_from_slice(b"abcdefg");
        }
        let mut pool = pool();
        for done in 0..whole.len() {
            let (slices, offered) = out.slices();
            assert_eq!(
                slices.iter().flat_map(|slice| slice.iter().copied()).collect::<Vec<_>>(),
                whole[done..],
                "after {done} bytes"
            );
            assert_eq!(offered, whole.len() - done);
            drop(slices);
            out.retire(1, &mut pool);
        }
        assert!(out.is_empty());
    }

    #[test]
    fn a_client_that_does_not_read_gets_everything_later() {
        let (mut transport, mut client) = pair();
        let (mut out, mut pool) = (Outgoing::default(), pool());
        let mut expected = Vec::new();
        for cookie in 0..300 {
            let mut buffer = pool.take(10_000).unwrap();
            buffer.bytes_mut().fill(cookie as u8);
            expected.extend_from_slice(head(cookie).as_bytes());
            expected.extend_from_slice(buffer.bytes());
            out.push(head(cookie), Payload::Buffer(buffer));
        }
        out.send(&mut transport, &mut pool).unwrap();
        assert!(!out.is_empty(), "three megabytes do not fit into a socket");
        let reader = std::thread::spawn(move || {
            let mut got = vec![0; expected.len()];
            client.read_exact(&mut got).unwrap();
            got == expected
        });
        while !out.is_empty() {
            out.send(&mut transport, &mut pool).unwrap();
            std::thread::yield_now();
        }
        assert!(reader.join().unwrap());
        assert_eq!(pool.lent(), 0);
    }

    #[test]
    fn waiting_payloads_are_bounded() {
        let (mut transport, mut client) = pair();
        let (mut out, mut pool) = (Outgoing::default(), pool());
        out.push(head(1), Payload::Bytes(vec![0; MAX_OUTGOING_BYTES]));
        assert!(out.is_full());
        let reader = std::thread::spawn(move || {
            let _ = client.read_exact(&mut vec![0; MAX_OUTGOING_BYTES + 16]);
        });
        while !out.is_empty() {
            out.send(&mut transport, &mut pool).unwrap();
        }
        reader.join().unwrap();
        assert!(!out.is_full());
    }
}
