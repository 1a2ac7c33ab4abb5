//! The loop of one connection's thread: receive, take up, submit, reap, send, sleep.
//!
//! A round takes what one system call received, hands it to the kernel in one system call, and sends all that
//! is done in one more. The thread sleeps in one place, for whatever can make progress: input when more can be
//! taken up, a writable socket while replies wait, a completion while pieces are under way.

use std::io::IoSliceMut;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use rustix::event::epoll;
use smallvec::SmallVec;

use super::error::End;
use super::handshake::Agreement;
use super::limits::Limits;
use super::memory::Share;
use super::receive::ReceiveBuffer;
use super::session::{Pause, Session};
use super::transport::{Received, Transport};

/// How long a client that has said good-bye may take to hang up.
const LINGER: Duration = Duration::from_secs(1);
/// Payload still missing from which receiving ahead of it is kept short.
const BULK: usize = 32 << 10;

/// Serves an export to a client until either side ends the session.
///
/// # Errors
/// [`End`] unless the client took its leave, went away between requests, or the server stopped.
pub(crate) fn serve(
    transport: Transport,
    agreement: Agreement,
    share: Share,
    limits: &Limits,
    stop: &AtomicBool,
) -> Result<(), End> {
    let mut connection = Connection {
        session: Session::new(agreement, share, limits)?,
        writable: writable_event(&transport)?,
        transport,
        rx: ReceiveBuffer::new(),
        may_read: true,
        waits_since: None,
        stop,
    };
    connection.run()?;
    let Connection { session, transport, .. } = connection;
    drop(session);
    transport.close(Instant::now() + LINGER);
    Ok(())
}

/// A descriptor that is readable while the socket is writable: the engine can watch only for reading.
fn writable_event(transport: &Transport) -> Result<OwnedFd, End> {
    let event = epoll::create(epoll::CreateFlags::CLOEXEC)?;
    epoll::add(&event, transport.socket(), epoll::EventData::new_u64(0), epoll::EventFlags::OUT)?;
    Ok(event)
}

struct Connection<'a> {
    // Dropped first: until then the engine may use memory of the session.
    session: Session,
    transport: Transport,
    writable: OwnedFd,
    rx: ReceiveBuffer,
    /// The socket may have bytes that were not received yet.
    may_read: bool,
    /// Since when it waits for memory, and has not looked who keeps it.
    waits_since: Option<Instant>,
    stop: &'a AtomicBool,
}

impl Connection<'_> {
    fn run(&mut self) -> Result<(), End> {
        let mut pause = Pause::Input;
        loop {
            if pause == Pause::Input && self.may_read {
                self.receive()?;
            }
            if self.stop.load(Ordering::Relaxed) {
                self.session.close();
            }
            pause = self.session.advance(&mut self.rx)?;
            self.session.submit();
            let finished = self.session.reap();
            let sent = self.session.send(&mut self.transport)?;
            let goes_on = match pause {
                Pause::Round => true,
                Pause::Room => finished > 0 || sent > 0,
                Pause::Input => self.may_read,
                Pause::Closed if self.is_drained() => return Ok(()),
                Pause::Closed => false,
            };
            if !goes_on && !self.session.has_pushed() {
                self.sleep(pause)?;
            }
        }
    }

    fn is_drained(&mut self) -> bool {
        self.session.in_flight() == 0 && !self.has_output()
    }

    fn has_output(&self) -> bool {
        self.session.has_output() || self.transport.is_pending()
    }

    /// Receives the rest of a payload to where it belongs, and what comes behind it into the receive buffer.
    fn receive(&mut self) -> Result<(), End> {
        let payload = self.session.payload_room();
        let payload_len = payload.len();
        let room = self.rx.room(payload_len >= BULK);
        let received = if payload_len == 0 {
            self.transport.receive(&mut [IoSliceMut::new(room)])?
        } else {
            self.transport.receive(&mut [IoSliceMut::new(payload), IoSliceMut::new(room)])?
        };
        match received {
            Received::Bytes { len, drained } => {
                let direct = len.min(payload_len);
                self.session.payload_received(direct);
                self.rx.received(len - direct);
                self.may_read = !drained;
            }
            Received::Nothing => self.may_read = false,
            Received::End => self.session.close(),
        }
        Ok(())
    }

    fn sleep(&mut self, pause: Pause) -> Result<(), End> {
        let wants_input = pause == Pause::Input;
        let wants_output = self.has_output();
        let timeout = self.waiting_for_memory();
        assert!(
            wants_input || wants_output || timeout.is_some() || self.session.in_flight() > 0,
            "a connection that waits for nothing"
        );
        let may_read = if self.session.in_flight() == 0 {
            let Some((call, turn)) = self.session.rest() else { return Ok(()) };
            let (may_read, called) = self.transport.poll((wants_input, wants_output), call, turn, timeout)?;
            self.session.engine().roused(called);
            may_read
        } else {
            self.wait_for_engine(wants_input, wants_output, timeout)
        };
        if timeout.is_some() {
            self.session.share().called();
        }
        self.may_read |= wants_input && may_read;
        self.transport.flush()?;
        Ok(())
    }

    /// How long to wait at most for memory that others have, if the connection does; by then some of them may be stalled.
    fn waiting_for_memory(&mut self) -> Option<Duration> {
        let share = self.session.share();
        if share.turn().is_none() {
            self.waits_since = None;
            return None;
        }
        let (budget, now) = (share.budget(), Instant::now());
        let since = self.waits_since.get_or_insert(now);
        if now.duration_since(*since) >= budget.stall() {
            budget.cut_stalled();
            *since = now;
        }
        Some(budget.stall())
    }

    /// Sleeps for a piece or the socket; says whether the socket may be readable.
    fn wait_for_engine(&mut self, wants_input: bool, wants_output: bool, timeout: Option<Duration>) -> bool {
        let mut watched = SmallVec::<[_; 3]>::new();
        if wants_input {
            watched.push(self.transport.socket());
        }
        if wants_output {
            watched.push(self.writable.as_fd());
        }
        let ready = self.session.wait(&mut watched, timeout);
        ready & 1 != 0
    }
}
