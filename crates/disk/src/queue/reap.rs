//! The ends of requests: what the ring and the workers have finished, and what may begin now.

use super::IoQueue;
use crate::error::Result;
use crate::request::Completion;

impl IoQueue {
    /// Appends finished requests to `out` and returns how many; never blocks.
    pub fn reap(&mut self, out: &mut Vec<Completion>) -> usize {
        let before = out.len();
        self.ring.reap(&mut self.moved);
        let mut moved = std::mem::take(&mut self.moved);
        for completion in moved.drain(..) {
            let number = u32::try_from(completion.token).expect("a token is a slot");
            let is_whole = matches!(completion.result, Ok(moved) if moved == completion.expected);
            self.part_done(number, is_whole, out);
        }
        self.moved = moved;
        if self.mailbox.is_waiting() {
            let mut replies = std::mem::take(&mut self.replies);
            self.mailbox.take(&mut replies);
            self.at_workers -= replies.len();
            for (slot, result) in replies.drain(..) {
                if self.slots[slot as usize].parts_left > 0 {
                    self.part_done(slot, result.is_ok(), out);
                } else {
                    out.push(self.release(slot, result));
                }
            }
            self.replies = replies;
            if !self.held.is_empty() {
                self.start_held();
            }
        }
        out.append(&mut self.ready);
        let count = out.len() - before;
        self.in_flight -= count;
        count
    }

    /// A part has ended; the last one ends the request, or has a worker do all of it again.
    fn part_done(&mut self, number: u32, is_whole: bool, out: &mut Vec<Completion>) {
        let slot = &mut self.slots[number as usize];
        slot.failed |= !is_whole;
        slot.parts_left -= 1;
        if slot.parts_left > 0 {
            return;
        }
        if let Some(writing) = slot.writing.take() {
            // The layers are those that the write began on: they do not change while a writer is inside.
            self.layers.blocks.iter().for_each(|order| order.leave());
            self.writer.leave(&self.disk.write_gate, writing);
        }
        if slot.failed {
            if let Some(phase) = slot.phase.take() {
                self.member.leave(&self.disk.epochs, phase);
            }
            self.send_to_worker(number);
        } else {
            if let Some(fetch) = slot.fetches.take() {
                self.views.note(&fetch);
            }
            out.push(self.release(number, Ok(())));
        }
    }

    /// Frees a slot.
    fn release(&mut self, number: u32, result: Result<()>) -> Completion {
        let slot = &mut self.slots[number as usize];
        let token = slot.request.take().expect("a slot in use has a request").token;
        if let Some(phase) = slot.phase.take() {
            self.member.leave(&self.disk.epochs, phase);
        }
        self.stats.end(slot.begun, result.is_ok());
        self.free.push(number);
        Completion { token, result }
    }
}
