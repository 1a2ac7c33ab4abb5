//! Reads of bytes that are not on this host yet.
//!
//! ```text
//!   read ──► all its pieces here? ── yes: held ──► view, ring
//!                    │ no
//!                    ▼
//!               a fetch of each piece ──► the last has come: worker
//! ```
//!
//! The read waits in its slot, outside the disk's epochs: no thread and no lock is held, other requests pass it, and layers may
//! change meanwhile. Requests of all kinds that need a worker do the same: it looks for what is absent before it carries them out. When
//! the last piece has come, a worker carries the request out. Pieces may have gone again; it waits for each on its own, as where there is
//! no room for all of them at a time, they would never be here together. The same goes for what this host cannot keep.

use std::sync::Arc;

use smallvec::SmallVec;
use vmstrata_store::{Fetched, Hold, RingFile};

use super::IoQueue;
use super::plan::Parts;
use crate::absent::{Absent, fetch_all};
use crate::epoch::Phase;
use crate::error::Result;
use crate::request::{Completion, Op, Request};
use crate::workers::Reply;

/// What keeps the pieces of a read here.
pub(super) type Holds = SmallVec<[Hold; 1]>;

impl IoQueue {
    /// Lets a read wait for those of its pieces that are elsewhere; gives it back if all are here, and keeps them here.
    #[inline]
    pub(super) fn wait_for_absent(
        &mut self,
        request: Request,
        phase: Phase,
        parts: &Parts,
    ) -> Option<(Request, Phase, Holds)> {
        let (mut holds, mut absent) = (Holds::new(), Vec::new());
        for part in parts {
            let RingFile::Open(file) = &part.file else { continue };
            match self.layers.hold_piece(file, part.layer, part.at, part.len as u64) {
                Ok(None) => {}
                Ok(Some(hold)) if holds.last().is_some_and(|last| Arc::ptr_eq(last, &hold)) => {}
                Ok(Some(hold)) => holds.push(hold),
                Err(piece) => absent.push(piece),
            }
        }
        if absent.is_empty() {
            return Some((request, phase, holds));
        }
        // Before it waits: what is held takes room.
        drop(holds);
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
    pub(super) fn fetched(&mut self, number: u32, fetched: Result<Fetched>, out: &mut Vec<Completion>) {
        let slot = &mut self.slots[number as usize];
        let request = slot.request.as_ref().expect("a slot in use has a request");
        match fetched {
            // There may be more to wait for.
            Ok(Fetched::Here) if request.is_long() => {
                self.begun = slot.begun;
                let request = slot.request.take().expect("looked at above");
                self.free.push(number);
                self.start(request);
                self.submit();
            }
            Ok(_) => self.send_whatever_is_absent(number),
            // All else that it covers is brought to stable storage.
            Err(_) if request.op == Op::Flush => self.send_whatever_is_absent(number),
            Err(error) => out.push(self.release(number, Err(error))),
        }
    }
}
