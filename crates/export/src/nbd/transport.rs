//! Bytes to and from one client: a non-blocking socket, with or without TLS.
//!
//! The handshake uses the calls with a deadline, which sleep; transmission uses [`Transport::receive`] and
//! [`Transport::send`], which never do.

use std::io::{IoSlice, IoSliceMut};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{SendAncillaryBuffer, SendFlags, Shutdown};
use smallvec::SmallVec;

use super::error::End;
use super::tls::{Fill, TlsConfig, TlsSession};

/// What one call of [`Transport::receive`] brought.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Received {
    /// So many bytes; `drained` when the socket had no more at that moment.
    Bytes { len: usize, drained: bool },
    /// Nothing for now.
    Nothing,
    /// The client will send no more.
    End,
}

/// One client's socket.
#[derive(Debug)]
pub(crate) struct Transport {
    socket: Arc<OwnedFd>,
    tls: Option<Box<TlsSession>>,
}

impl Transport {
    /// Over a connected, non-blocking socket.
    pub(crate) fn new(socket: Arc<OwnedFd>) -> Self {
        Self { socket, tls: None }
    }

    pub(crate) fn socket(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    pub(crate) fn shared_socket(&self) -> Arc<OwnedFd> {
        Arc::clone(&self.socket)
    }

    pub(crate) fn is_tls(&self) -> bool {
        self.tls.is_some()
    }

    /// The names in the client's certificate; none without one.
    pub(crate) fn client_names(&self) -> Vec<String> {
        self.tls.as_ref().map(|tls| tls.client_names()).unwrap_or_default()
    }

    /// Reads exactly `into`.
    ///
    /// # Errors
    /// [`End::Timeout`] past the deadline, [`End::Gone`] when the client closes first.
    pub(crate) fn read_exact(&mut self, mut into: &mut [u8], deadline: Instant) -> Result<(), End> {
        while !into.is_empty() {
            match self.receive(&mut [IoSliceMut::new(into)])? {
                Received::Bytes { len, .. } => into = &mut into[len..],
                Received::Nothing => self.sleep(PollFlags::IN, deadline)?,
                Received::End => return Err(End::Gone),
            }
        }
        Ok(())
    }

    /// Writes all of `from`.
    ///
    /// # Errors
    /// [`End::Timeout`] past the deadline, [`End::Gone`] when the client closes first.
    pub(crate) fn write_all(&mut self, mut from: &[u8], deadline: Instant) -> Result<(), End> {
        while !from.is_empty() {
            let sent = self.send(&[IoSlice::new(from)])?;
            from = &from[sent..];
            if sent == 0 {
                self.sleep(PollFlags::OUT, deadline)?;
            }
        }
        while !self.flush()? {
            self.sleep(PollFlags::OUT, deadline)?;
        }
        Ok(())
    }

    /// Goes on over TLS: the client speaks next.
    ///
    /// # Errors
    /// [`End::Tls`] when no common ground is found or the client's certificate is refused.
    pub(crate) fn start_tls(&mut self, config: &TlsConfig, deadline: Instant) -> Result<(), End> {
        assert!(self.tls.is_none(), "the handshake refuses a second STARTTLS");
        let mut session = Box::new(TlsSession::new(config)?);
        while let Some(wants_write) = session.handshake_wants_write() {
            let socket = self.socket.as_fd();
            if wants_write {
                if !session.flush(socket)? {
                    self.sleep(PollFlags::OUT, deadline)?;
                }
                continue;
            }
            match session.fill(socket)? {
                Fill::Some => {}
                Fill::Nothing => self.sleep(PollFlags::IN, deadline)?,
                Fill::End => return Err(End::Gone),
            }
        }
        self.tls = Some(session);
        Ok(())
    }

    /// Takes what is there, without waiting.
    pub(crate) fn receive(&mut self, into: &mut [IoSliceMut<'_>]) -> Result<Received, End> {
        if let Some(tls) = &mut self.tls {
            return tls.receive(self.socket.as_fd(), into);
        }
        let room: usize = into.iter().map(|slice| slice.len()).sum();
        match rustix::io::retry_on_intr(|| rustix::io::readv(&*self.socket, into)) {
            Ok(0) if room > 0 => Ok(Received::End),
            Ok(len) => Ok(Received::Bytes { len, drained: len < room }),
            Err(Errno::AGAIN) => Ok(Received::Nothing),
            Err(errno) => Err(errno.into()),
        }
    }

    /// Sends without waiting; returns the bytes taken, 0 while the client does not read.
    pub(crate) fn send(&mut self, from: &[IoSlice<'_>]) -> Result<usize, End> {
        if let Some(tls) = &mut self.tls {
            return tls.send(self.socket.as_fd(), from);
        }
        let send = || {
            let mut control = SendAncillaryBuffer::default();
            rustix::net::sendmsg(&*self.socket, from, &mut control, SendFlags::NOSIGNAL)
        };
        match rustix::io::retry_on_intr(send) {
            Ok(len) => Ok(len),
            Err(Errno::AGAIN) => Ok(0),
            Err(errno) => Err(errno.into()),
        }
    }

    /// Sends what TLS holds back; `true` when nothing is left.
    pub(crate) fn flush(&mut self) -> Result<bool, End> {
        match &mut self.tls {
            Some(tls) => tls.flush(self.socket.as_fd()),
            None => Ok(true),
        }
    }

    /// Whether [`Transport::flush`] has something to do.
    pub(crate) fn is_pending(&self) -> bool {
        self.tls.as_ref().is_some_and(|tls| tls.is_pending())
    }

    /// Sleeps until the socket is ready for what is wanted, or `call` or `turn` is readable, or `timeout` has passed; says
    /// whether the socket may be readable, and whether `call` is.
    ///
    /// # Errors
    /// [`End::Gone`] when the client has gone and neither direction is wanted, which would show it. Whatever keeps the system
    /// from waiting.
    pub(crate) fn poll(
        &self,
        (input, output): (bool, bool),
        call: BorrowedFd<'_>,
        turn: Option<BorrowedFd<'_>>,
        timeout: Option<Duration>,
    ) -> Result<(bool, bool), End> {
        let mut wanted = PollFlags::empty();
        wanted.set(PollFlags::IN, input);
        wanted.set(PollFlags::OUT, output);
        let mut polled = SmallVec::<[_; 3]>::new();
        polled.extend([PollFd::new(&*self.socket, wanted), PollFd::new(&call, PollFlags::IN)]);
        polled.extend(turn.as_ref().map(|turn| PollFd::new(turn, PollFlags::IN)));
        match poll(&mut polled, timeout.map(timespec).as_ref()) {
            Ok(_) if wanted.is_empty() && !polled[0].revents().is_empty() => Err(End::Gone),
            // Errors and hang-ups show up in the next call for either direction.
            Ok(_) => {
                Ok((polled[0].revents().intersects(!PollFlags::OUT), polled[1].revents() == PollFlags::IN))
            }
            Err(Errno::INTR) => Ok((false, false)),
            Err(errno) => Err(errno.into()),
        }
    }

    /// Says good-bye, then waits until the client has hung up too.
    ///
    /// Closing a socket with unread bytes in it would cost the client the replies it has not read yet.
    pub(crate) fn close(mut self, deadline: Instant) {
        if let Some(tls) = &mut self.tls {
            tls.close(self.socket.as_fd());
        }
        if rustix::net::shutdown(&*self.socket, Shutdown::Write).is_err() {
            return;
        }
        let mut scratch = [0; 4096];
        loop {
            match rustix::io::read(&*self.socket, &mut scratch) {
                Ok(0) => return,
                Ok(_) | Err(Errno::INTR) if Instant::now() < deadline => {}
                Err(Errno::AGAIN) if self.sleep(PollFlags::IN, deadline).is_ok() => {}
                _ => return,
            }
        }
    }

    fn sleep(&self, ready: PollFlags, deadline: Instant) -> Result<(), End> {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(End::Timeout);
        }
        match poll(&mut [PollFd::new(&*self.socket, ready)], Some(&timespec(left))) {
            Ok(0) => Err(End::Timeout),
            Ok(_) | Err(Errno::INTR) => Ok(()),
            Err(errno) => Err(errno.into()),
        }
    }
}

fn timespec(time: Duration) -> Timespec {
    Timespec { tv_sec: time.as_secs() as i64, tv_nsec: time.subsec_nanos().into() }
}
