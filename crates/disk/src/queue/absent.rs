//! Reads of bytes that are not on this host yet.
//!
//! ```text
//!   read ──► all its pieces here? ── yes ──► ring
//!                    │ no                      ▲
//!                    ▼                         │ the last piece has come
//!               a fetch for each piece ────────┘
//! ```
//!
//! The read waits in its slot, outside the disk's epochs: no thread and no lock is held, other requests pass it, and layers may
//! change meanwhile. When the last piece has come it starts anew. A worker that finds a piece absent does the same.

use std::sync::Arc;

use vmstrata_store::RingFile;

use super::IoQueue;
use super::plan::Parts;
use crate::absent::Absent;
use crate::epoch::Phase;
use crate::error::Result;
use crate::request::{Completion, Request};
use crate::workers::Reply;

impl IoQueue {
    /// Lets a read wait for those of its pieces that are elsewhere; gives it back if all are here.
    #[inline]
    pub(super) fn wait_for_absent(
        &mut self,
        request: Request,
        phase: Phase,
        parts: &Parts,
    ) -> Option<(Request, Phase)> {
        let absent: Vec<Absent> = parts
            .iter()
            .filter_map(|part| match &part.file {
                RingFile::Open(file) => self.layers.absent_piece(file, part.layer, part.at, part.len as u64),
                RingFile::Pinned(_) => None,
            })
            .collect();
        if absent.is_empty() {
            return Some((request, phase));
        }
        self.fetch_absent(request, phase, absent);
        None
    }

    #[cold]
    fn fetch_absent(&mut self, request: Request, phase: Phase, absent: Vec<Absent>) {
        self.member.leave(&self.disk.epochs, phase);
        let slot = self.slot(request, None, absent.len());
        self.slots[slot as usize].is_absent = true;
        self.at_workers += absent.len();
        for piece in absent {
            let mailbox = Arc::clone(&self.mailbox);
            piece.fetch(move |fetched| mailbox.post(slot, Reply::Fetched(fetched)));
        }
    }

    /// A piece of a read has come, or cannot be had.
    pub(super) fn fetched(&mut self, number: u32, fetched: Result<()>, out: &mut Vec<Completion>) {
        let slot = &mut self.slots[number as usize];
        if slot.is_absent {
            slot.failed |= fetched.is_err();
            slot.parts_left -= 1;
            if slot.parts_left > 0 {
                return;
            }
            slot.is_absent = false;
            if slot.failed {
                // It asks once more, and says what is wrong.
                return self.send_to_worker(number);
            }
        } else if fetched.is_err() {
            out.push(self.release(number, fetched));
            return;
        }
        self.begun = slot.begun;
        let request = slot.request.take().expect("a slot in use has a request");
        self.free.push(number);
        self.start(request);
        self.submit();
    }
}
