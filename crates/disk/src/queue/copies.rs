//! Reads that are carried out together.
//!
//! A read that [`Views`](super::views::Views) have all of waits for the others of its batch: each has asked for its first
//! bytes when it was pushed, and while the map is looked at for the next one the processor fetches them. Copied one by
//! one, every read would wait for its own, and that takes longer than the copy.

use super::IoQueue;
use super::plan::Parts;
use crate::epoch::Phase;
use crate::request::Request;
use crate::stats::Begun;

/// Reads that wait at a time: more would be dropped from the processor's nearest memory before their turn.
const COPIES_MAX: usize = 32;

/// A read whose parts all are in views of the queue's layers.
#[derive(Debug)]
pub(super) struct Copy {
    request: Request,
    phase: Phase,
    begun: Begun,
    parts: Parts,
}

impl IoQueue {
    /// Carries a read out before anything is submitted, waited for, or taken from other layers.
    #[inline]
    pub(super) fn copy_soon(&mut self, request: Request, phase: Phase, parts: Parts) {
        self.copies.push(Copy { request, phase, begun: self.begun, parts });
        if self.copies.len() == COPIES_MAX {
            self.copy();
        }
    }

    /// Carries out the reads that wait.
    #[inline]
    pub(super) fn copy(&mut self) {
        if !self.copies.is_empty() {
            self.copy_all();
        }
    }

    fn copy_all(&mut self) {
        let being_pushed = self.begun;
        let mut copies = std::mem::take(&mut self.copies);
        let since = self.views.begin();
        for copy in &copies {
            self.views.prefetch(&copy.parts);
        }
        for Copy { request, phase, begun, parts } in copies.drain(..) {
            self.begun = begun;
            if self.views.read(&request, &parts) {
                self.finish_now(request.token, phase, Ok(()));
            } else {
                // The file was cut off, or another queue has just found that the host takes pages back.
                self.leave_to_worker(request, phase);
            }
        }
        self.views.look_back(since);
        self.copies = copies;
        self.begun = being_pushed;
    }
}
