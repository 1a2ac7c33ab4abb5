//! The requests of one connection: from bytes received to replies queued.
//!
//! ```text
//!   ReceiveBuffer ──► advance() ──► Engine ──► reap() ──► Outgoing
//!                       │ Current: the request being cut into pieces
//!                       └ Task: a request with pieces under way
//! ```
//!
//! One request at a time is taken in ([`Current`]): it is cut into pieces, each of which needs a place in the
//! engine and memory from the pool. Where one of them is lacking, the session pauses until a piece completes
//! or a reply has left, so a connection never holds more than its limits. Pieces of any number of requests
//! are under way together, and replies leave in the order in which they become ready.
//!
//! Invariants: the session pauses for [`Pause::Room`] only while a piece is under way, a reply waits, or other connections
//! have the memory; a task is removed when its last piece has completed, and only then gets its last reply chunk.

mod complete;
mod read;
mod span;
mod status;
mod wait;
mod write;

use std::sync::Arc;

use vmstrata_disk::{Error, Op};
use vmstrata_types::{GuestOffset, GuestRange};

use self::read::{Reading, Run};
use self::span::{SpanKind, Spanning};
use self::status::Filtering;
use self::write::Writing;
use super::admission::{self, Refusal, Terms};
use super::buffers::BufferPool;
use super::diff_base::Selection;
use super::error::End;
use super::exports::{Export, Visible};
use super::handshake::Agreement;
use super::limits::{Limits, ROUND_BYTES};
use super::memory::Share;
use super::outgoing::{Outgoing, Payload};
use super::protocol::reply::{Head, ReplyTo};
use super::protocol::request::{Command, Request};
use super::protocol::{CommandFlags, MAX_PAYLOAD};
use super::receive::ReceiveBuffer;
use super::transport::Transport;
use crate::buffer::Buffer;
use crate::engine::{Engine, Piece};
use crate::slab::Slab;

/// Why [`Session::advance`] returned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Pause {
    /// All that was received is taken up.
    Input,
    /// A piece must complete, or a reply leave, first.
    Room,
    /// Enough was pushed for one round; there is more.
    Round,
    /// No more requests are taken up.
    Closed,
}

/// A request whose pieces are under way.
#[derive(Debug)]
struct Task {
    to: ReplyTo,
    kind: TaskKind,
    /// Pieces under way.
    outstanding: u32,
    /// No more pieces will follow.
    is_planned: bool,
    /// The first failure of a piece.
    error: Option<super::protocol::Errno>,
    /// What the pieces wrote must be made stable before the reply.
    flush_after: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum TaskKind {
    /// A read whose pieces are sent as they come.
    ChunkedRead,
    /// A read in a single piece.
    WholeRead,
    /// Anything that is answered by success or failure alone.
    Plain,
}

/// The request that is being taken in.
#[derive(Debug)]
enum Current {
    Idle,
    Read(Reading),
    Write(Writing),
    Span(Spanning),
    Flush(ReplyTo),
    Filter(Filtering),
    /// A refused request; `left` bytes of payload are still to be passed over.
    Skip {
        left: u64,
        to: ReplyTo,
        refusal: Refusal,
    },
}

/// The requests of one connection.
pub(crate) struct Session {
    engine: Engine<u32>,
    tasks: Slab<Task>,
    current: Current,
    /// What the read being taken in consists of, from its `next` on.
    runs: std::collections::VecDeque<Run>,
    pool: BufferPool,
    out: Outgoing,
    finished: Vec<(Piece<u32>, Result<(), Error>)>,
    export: Arc<Export>,
    terms: Terms,
    contexts: Selection,
    payload_bytes: usize,
    /// Failures of the disk told to the log so far.
    reported: u32,
    is_closing: bool,
}

impl Session {
    /// A session on the export that was agreed on.
    ///
    /// # Errors
    /// Whatever keeps the engine from making a queue.
    pub(crate) fn new(agreement: Agreement, share: Share, limits: &Limits) -> Result<Self, Error> {
        let Agreement { visible, style, contexts, .. } = agreement;
        let Visible { export, read_only } = visible;
        Ok(Self {
            engine: Engine::new(export.disk().clone(), limits.requests.max(1))?,
            tasks: Slab::new(),
            current: Current::Idle,
            runs: Default::default(),
            pool: BufferPool::new(share),
            out: Outgoing::default(),
            finished: Vec::new(),
            terms: Terms::new(&export, read_only, style, contexts.set),
            contexts,
            export,
            payload_bytes: limits.payload_bytes,
            reported: 0,
            is_closing: false,
        })
    }

    /// Takes up requests until something is lacking.
    ///
    /// # Errors
    /// When the client breaks the protocol beyond repair.
    pub(crate) fn advance(&mut self, rx: &mut ReceiveBuffer) -> Result<Pause, End> {
        let mut round = 0;
        while !self.is_closing {
            if self.out.is_full() {
                return Ok(Pause::Room);
            }
            if round >= ROUND_BYTES {
                return Ok(Pause::Round);
            }
            let pause = match std::mem::replace(&mut self.current, Current::Idle) {
                Current::Idle => self.next_request(rx)?,
                Current::Read(reading) => self.read(reading, &mut round),
                Current::Write(writing) => self.write(writing, rx, &mut round),
                Current::Span(spanning) => self.span(spanning),
                Current::Flush(to) => self.flush(to),
                Current::Filter(filtering) => self.filter(filtering, rx),
                Current::Skip { left, to, refusal } => self.skip(left, to, refusal, rx),
            };
            if let Some(pause) = pause {
                return Ok(pause);
            }
        }
        self.pool.share().give_up();
        Ok(Pause::Closed)
    }

    fn next_request(&mut self, rx: &mut ReceiveBuffer) -> Result<Option<Pause>, End> {
        let extended = self.terms.style.is_extended();
        let size = Request::size(extended);
        if rx.bytes().len() < size {
            return Ok(Some(Pause::Input));
        }
        let request = Request::decode(rx.bytes(), extended)?;
        rx.consume(size);
        let payload_len = request.payload_len(extended);
        if payload_len > MAX_PAYLOAD.into() {
            return Err(End::TooBig { len: payload_len });
        }
        let to = ReplyTo { cookie: request.cookie, offset: request.offset };
        match admission::check(&request, &self.terms) {
            Ok(()) => self.begin(&request, to),
            Err(refusal) => {
                tracing::debug!(?request, refusal.message, "request refused");
                self.current = Current::Skip { left: payload_len, to, refusal };
            }
        }
        Ok(None)
    }

    /// Makes an admitted request the current one.
    fn begin(&mut self, request: &Request, to: ReplyTo) {
        let range = GuestRange::new(GuestOffset::new(request.offset), request.length);
        let flags = request.flags;
        let fua = flags.contains(CommandFlags::FUA);
        match request.command {
            Command::Read | Command::Write | Command::Trim | Command::Cache | Command::WriteZeroes
                if range.len == 0 =>
            {
                self.succeed(to);
            }
            Command::Read => self.begin_read(range, to, flags.contains(CommandFlags::DF)),
            Command::Write => self.begin_write(range, to, fua),
            Command::Trim => self.begin_span(SpanKind::Trim, range, to, fua),
            Command::Cache => self.begin_span(SpanKind::Cache, range, to, false),
            Command::WriteZeroes => {
                let unmap = !flags.contains(CommandFlags::NO_HOLE);
                self.begin_span(SpanKind::Zero { unmap }, range, to, fua);
            }
            Command::Flush => self.current = Current::Flush(to),
            Command::BlockStatus => self.begin_block_status(range, to, flags),
            Command::Disconnect => self.is_closing = true,
            Command::Unknown(_) => unreachable!("refused by admission"),
        }
    }

    fn skip(&mut self, left: u64, to: ReplyTo, refusal: Refusal, rx: &mut ReceiveBuffer) -> Option<Pause> {
        let now = left.min(rx.bytes().len() as u64);
        rx.consume(now as usize);
        if now < left {
            self.current = Current::Skip { left: left - now, to, refusal };
            return Some(Pause::Input);
        }
        self.fail(to, refusal);
        None
    }

    /// Starts a piece of a task; `is_last` when no more follow.
    fn push(&mut self, task: u32, op: Op, range: GuestRange, buffer: Option<Buffer>, is_last: bool) {
        let state = self.tasks.get_mut(task);
        state.outstanding += 1;
        state.is_planned = is_last;
        self.engine.push(op, Piece { task, range, buffer });
    }

    fn succeed(&mut self, to: ReplyTo) {
        self.out.push(Head::done(self.terms.style, to), Payload::None);
    }

    fn fail(&mut self, to: ReplyTo, refusal: Refusal) {
        let style = self.terms.style;
        let message = if style.is_chunked() { refusal.message } else { "" };
        self.out.push(Head::error(style, to, refusal.errno, message.len()), Payload::Text(message));
    }

    /// Takes up no more requests: what is under way is finished.
    pub(crate) fn close(&mut self) {
        self.is_closing = true;
    }

    /// Hands the pieces pushed to the kernel.
    pub(crate) fn submit(&mut self) {
        self.engine.submit();
    }

    /// Whether there are pieces that [`Session::submit`] has not seen yet.
    pub(crate) fn has_pushed(&self) -> bool {
        self.engine.has_pushed()
    }

    /// Sends what the client takes; returns the bytes.
    pub(crate) fn send(&mut self, transport: &mut Transport) -> Result<usize, End> {
        let sent = self.out.send(transport, &mut self.pool)?;
        self.pool.share().client_took(sent, !self.out.is_empty());
        Ok(sent)
    }

    /// Whether replies wait for the client to read.
    pub(crate) fn has_output(&self) -> bool {
        !self.out.is_empty()
    }

    /// Pieces under way.
    pub(crate) fn in_flight(&self) -> usize {
        self.engine.in_flight()
    }

    /// What carries the pieces out, to sleep with.
    pub(crate) fn engine(&mut self) -> &mut Engine<u32> {
        &mut self.engine
    }
}

impl Task {
    fn new(to: ReplyTo, kind: TaskKind) -> Self {
        Self { to, kind, outstanding: 0, is_planned: false, error: None, flush_after: false }
    }
}
