//! Memory for pieces, and sleeping until there is some, or something else to do.

use std::os::fd::BorrowedFd;
use std::time::Duration;

use smallvec::SmallVec;

use super::Session;
use crate::buffer::Buffer;
use crate::nbd::memory::Share;

impl Session {
    /// Memory for a piece with `len` bytes of payload, if it can be taken on now.
    pub(super) fn buffer(&mut self, len: usize) -> Option<Buffer> {
        let lent = self.pool.lent();
        let has_room =
            self.engine.has_room() && (lent == 0 || lent + Buffer::cost(len) <= self.payload_bytes);
        if has_room { self.pool.take(len) } else { None }
    }

    /// What to sleep with while nothing is under way: what calls the engine, and what calls for memory if that is waited for.
    /// `None` when there is something to do.
    pub(crate) fn rest(&mut self) -> Option<(BorrowedFd<'_>, Option<BorrowedFd<'_>>)> {
        self.pool.trim();
        let call = self.engine.rest()?;
        Some((call, self.pool.share().turn()))
    }

    /// Sleeps until a piece is finished, it may be this connection's turn to have memory, one of `watched` is readable, or
    /// `timeout` has passed; says which of `watched`.
    pub(crate) fn wait<'a>(
        &'a mut self,
        watched: &mut SmallVec<[BorrowedFd<'a>; 3]>,
        timeout: Option<Duration>,
    ) -> u64 {
        watched.extend(self.pool.share().turn());
        self.engine.wait(watched, timeout)
    }

    /// The connection's memory.
    pub(crate) fn share(&mut self) -> &mut Share {
        self.pool.share()
    }
}
