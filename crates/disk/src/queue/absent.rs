//! Reads of bytes that are not on this host yet.
//!
//! ```text
//!   read ──► all its pieces here? ── yes ──► ring
//!                    │ no                      ▲
//!                    ▼                         │ the last piece has come
//!               a fetch of each piece ─────────┘
//! ```
//!
//! The read waits in its slot, outside the disk's epochs: no thread and no lock is held, other requests pass it, and layers may
//! change meanwhile. When the last piece has come it starts anew. Requests of all kinds that need a worker do the same: it looks for
//! what is absent before it carries them out.

use std::sync::Arc;

use vmstrata_store::RingFile;

use super::IoQueue;
use super::plan::Parts;
use crate::absent::{Absent, fetch_all};
use crate::epoch::Phase;
use crate::error::Result;
use crate::request::{Completion, Op, Request};
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
        let slot = self.slot(request, None, 0);
        self.at_workers += 1;
        let mailbox = Arc::clone(&self.mailbox);
        fetch_all(absent, move |fetched| mailbox.post(slot, Reply::Fetched(fetched)));
    }

    /// What a request waited for has come, or cannot be had.
    pub(super) fn fetched(&mut self, number: u32, fetched: Result<()>, out: &mut Vec<Completion>) {
        let slot = &mut self.slots[number as usize];
        let request = slot.request.as_ref().expect("a slot in use has a request");
        match fetched {
            Ok(()) => {
                self.begun = slot.begun;
                let request = slot.request.take().expect("looked at above");
                self.free.push(number);
                self.start(request);
                self.submit();
            }
            // All else that it covers is brought to stable storage.
            Err(_) if request.op == Op::Flush => self.send_whatever_is_absent(number),
            Err(error) => out.push(self.release(number, Err(error))),
        }
    }
}
