//! Requests that are done on this host and wait for more: those of a disk with a [`Durability`](crate::Durability).
//!
//! They wait in their slots, outside the disk's epochs: no thread and no lock is held, their memory is not used any more, and layers may
//! change meanwhile.

use std::sync::Arc;

use super::IoQueue;
use crate::error::{IoContext as _, Result};
use crate::request::Completion;
use crate::workers::Reply;

impl IoQueue {
    /// Ends a request that was carried out, or has it wait in its slot.
    pub(super) fn done_here(&mut self, number: u32, result: Result<()>) -> Option<Completion> {
        let slot = &mut self.slots[number as usize];
        if slot.is_held_here {
            self.held_here -= 1;
            return Some(self.release(number, result));
        }
        let is_durable = slot.request.as_ref().is_some_and(|request| request.op.is_durable());
        let Some(durability) = self.durability.as_ref().filter(|_| is_durable && result.is_ok()) else {
            return Some(self.release(number, result));
        };
        let reply_to = Arc::clone(&self.mailbox);
        let answer = move |published: std::io::Result<()>| {
            reply_to.post(number, Reply::Ended(published.while_trying("publish what was flushed")));
        };
        if durability.hold(Box::new(answer)).is_some() {
            return Some(self.release(number, result));
        }
        slot.is_held_here = true;
        if let Some(phase) = slot.phase.take() {
            self.member.leave(&self.disk.epochs, phase);
        }
        // As if it were with a worker.
        self.at_workers += 1;
        self.held_here += 1;
        None
    }
}
