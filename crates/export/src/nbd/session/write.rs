//! Writes: payload from the socket into page-aligned pieces, each handed to the engine as soon as it is there.

use vmstrata_disk::Op;
use vmstrata_types::{GuestOffset, GuestRange};

use super::{Current, Pause, Session, Task, TaskKind};
use crate::buffer::Buffer;
use crate::nbd::limits::PIECE;
use crate::nbd::protocol::reply::ReplyTo;
use crate::nbd::receive::ReceiveBuffer;

/// A write that is being taken in.
#[derive(Debug)]
pub(super) struct Writing {
    task: u32,
    next: GuestOffset,
    end: GuestOffset,
    /// The piece that is being received, and how much of it is there.
    filling: Option<(Buffer, usize)>,
    /// The only piece is made stable by the engine itself.
    fua: bool,
}

impl Session {
    pub(super) fn begin_write(&mut self, range: GuestRange, to: ReplyTo, fua: bool) {
        let is_single = self.write_piece_len(range.start, range.end()) == range.len;
        let mut task = Task::new(to, TaskKind::Plain);
        task.flush_after = fua && !is_single;
        let task = self.tasks.insert(task);
        let (next, end) = (range.start, range.end());
        self.current = Current::Write(Writing { task, next, end, filling: None, fua: fua && is_single });
    }

    /// Bytes of a write's next piece. No cluster is cut in two, so none is copied up for half of its new bytes.
    fn write_piece_len(&self, next: GuestOffset, end: GuestOffset) -> u64 {
        let size = PIECE.max(self.terms.cluster_size);
        (end - next).min(size - next.get() % size)
    }

    pub(super) fn write(
        &mut self,
        mut writing: Writing,
        rx: &mut ReceiveBuffer,
        round: &mut usize,
    ) -> Option<Pause> {
        while writing.next < writing.end {
            let len = self.write_piece_len(writing.next, writing.end);
            let (mut buffer, mut filled) = match writing.filling.take() {
                Some(filling) => filling,
                None => match self.buffer(len as usize) {
                    Some(buffer) => (buffer, 0),
                    None => {
                        self.current = Current::Write(writing);
                        return Some(Pause::Room);
                    }
                },
            };
            filled += rx.copy_to(&mut buffer.bytes_mut()[filled..]);
            if filled < buffer.len() {
                writing.filling = Some((buffer, filled));
                self.current = Current::Write(writing);
                return Some(Pause::Input);
            }
            let range = GuestRange::new(writing.next, len);
            writing.next = range.end();
            let is_last = writing.next == writing.end;
            self.push(writing.task, Op::Write { fua: writing.fua }, range, Some(buffer), is_last);
            *round += len as usize;
        }
        None
    }

    /// Where payload can be received directly; empty when none is expected.
    pub(crate) fn payload_room(&mut self) -> &mut [u8] {
        match &mut self.current {
            Current::Write(Writing { filling: Some((buffer, filled)), .. }) => {
                &mut buffer.bytes_mut()[*filled..]
            }
            _ => &mut [],
        }
    }

    /// Notes that the first `len` bytes of [`Session::payload_room`] were received.
    pub(crate) fn payload_received(&mut self, len: usize) {
        if let Current::Write(Writing { filling: Some((buffer, filled)), .. }) = &mut self.current {
            *filled += len;
            assert!(*filled <= buffer.len(), "more payload than there was room for");
        } else {
            assert_eq!(len, 0, "payload that nobody expects");
        }
    }
}
