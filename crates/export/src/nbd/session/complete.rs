//! Pieces that are done: their replies, and the memory they give back.

use vmstrata_disk::{Error, Op};
use vmstrata_types::{GuestOffset, GuestRange};

use super::{Session, TaskKind};
use crate::buffer::Buffer;
use crate::engine::Piece;
use crate::nbd::admission::Refusal;
use crate::nbd::outgoing::Payload;
use crate::nbd::protocol::Errno;
use crate::nbd::protocol::reply::{Head, Style};

/// What clients are told of an engine's error: its words name files of this host, which are not theirs to know.
const FAILED: &str = "the disk could not carry out the request";

/// Failures of one connection's requests that are logged.
const MAX_REPORTED: u32 = 10;

impl Session {
    /// Queues the replies of everything that is finished; returns how many pieces were.
    pub(crate) fn reap(&mut self) -> usize {
        let mut finished = std::mem::take(&mut self.finished);
        self.engine.reap(&mut finished);
        let count = finished.len();
        for (piece, result) in finished.drain(..) {
            self.complete(piece, result);
        }
        self.finished = finished;
        count
    }

    fn complete(&mut self, piece: Piece<u32>, result: Result<(), Error>) {
        let error = result.err().map(|error| self.report(&piece, &error));
        let task = self.tasks.get_mut(piece.task);
        task.outstanding -= 1;
        task.error = task.error.or(error);
        let is_done = task.is_planned && task.outstanding == 0;
        match (task.kind, piece.buffer) {
            (TaskKind::Plain, buffer) => {
                if let Some(buffer) = buffer {
                    self.pool.give(buffer);
                }
                if is_done {
                    self.finish_plain(piece.task);
                }
                return;
            }
            (_, None) => unreachable!("reads have buffers"),
            (TaskKind::WholeRead, Some(buffer)) => self.answer_whole(piece.task, piece.range, buffer),
            (TaskKind::ChunkedRead, Some(buffer)) => {
                let at = piece.range.start.get();
                let (style, to) = (self.terms.style, task.to);
                if let Some(errno) = error {
                    self.pool.give(buffer);
                    self.out.push(Head::error_at(style, to, errno, at, is_done), Payload::None);
                } else {
                    let head = Head::data(style, to, at, buffer.len(), is_done);
                    self.out.push(head, Payload::Buffer(buffer));
                }
            }
        }
        if is_done {
            self.tasks.remove(piece.task);
        }
    }

    fn answer_whole(&mut self, task: u32, range: GuestRange, buffer: Buffer) {
        let (style, task) = (self.terms.style, self.tasks.get_mut(task));
        let to = task.to;
        if let Some(errno) = task.error {
            self.pool.give(buffer);
            return self.fail(to, Refusal { errno, message: FAILED });
        }
        let head = match style {
            Style::Simple => Head::simple(to, None),
            _ => Head::data(style, to, range.start.get(), buffer.len(), true),
        };
        self.out.push(head, Payload::Buffer(buffer));
    }

    /// Answers a request without data, after the flush that it may still need.
    fn finish_plain(&mut self, key: u32) {
        let task = self.tasks.get_mut(key);
        if std::mem::take(&mut task.flush_after) && task.error.is_none() {
            // The piece that has just completed has left its place free.
            return self.push(key, Op::Flush, GuestRange::new(GuestOffset::ZERO, 0), None, true);
        }
        let task = self.tasks.remove(key);
        match task.error {
            None => self.succeed(task.to),
            Some(errno) => self.fail(task.to, Refusal { errno, message: FAILED }),
        }
    }

    /// Logs a failure of the disk. A client can bring about any number of them: the first few are enough.
    fn report(&mut self, piece: &Piece<u32>, error: &Error) -> Errno {
        self.report_failure(piece.range, error);
        Errno::from_os(error.errno())
    }

    pub(super) fn report_failure(&mut self, range: GuestRange, error: &Error) {
        self.reported = self.reported.saturating_add(1);
        let export = self.export.name();
        match self.reported {
            ..MAX_REPORTED => tracing::warn!(export, %range, %error, "request failed"),
            MAX_REPORTED => {
                tracing::warn!(export, %range, %error, "request failed; more of this client's are not logged");
            }
            _ => tracing::debug!(export, %range, %error, "request failed"),
        }
    }
}
