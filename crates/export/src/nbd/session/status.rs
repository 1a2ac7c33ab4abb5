//! Block status requests, with and without a list of the contexts wanted.

use vmstrata_types::GuestRange;

use super::{Current, Pause, Session};
use crate::nbd::admission::{Refusal, Terms};
use crate::nbd::block_status::{self, View};
use crate::nbd::contexts::{Context, ContextSet};
use crate::nbd::outgoing::Payload;
use crate::nbd::protocol::reply::{Head, ReplyTo};
use crate::nbd::protocol::request::StatusFilter;
use crate::nbd::protocol::{CommandFlags, Errno};
use crate::nbd::receive::ReceiveBuffer;

/// The longest list of contexts that names none twice, in bytes.
const MAX_FILTER: usize = 8 + 4 * ContextSet::LEN_MAX;

const BAD_FILTER: Refusal =
    Refusal { errno: Errno::Inval, message: "the payload names unknown contexts, or a range past the end" };

const BASE_LEFT: Refusal =
    Refusal { errno: Errno::Inval, message: "the layer to compare with is no longer part of the disk" };

/// A block status whose list of contexts is being received.
#[derive(Debug)]
pub(super) struct Filtering {
    to: ReplyTo,
    range: GuestRange,
    only_first: bool,
    payload: [u8; MAX_FILTER],
    filled: usize,
    len: usize,
}

impl Session {
    pub(super) fn begin_block_status(&mut self, range: GuestRange, to: ReplyTo, flags: CommandFlags) {
        let only_first = flags.contains(CommandFlags::REQ_ONE);
        if !flags.contains(CommandFlags::PAYLOAD_LEN) {
            return self.block_status(range, to, self.terms.contexts, only_first);
        }
        if range.len > MAX_FILTER as u64 {
            self.current = Current::Skip { left: range.len, to, refusal: BAD_FILTER };
            return;
        }
        let len = range.len as usize;
        let payload = [0; MAX_FILTER];
        self.current = Current::Filter(Filtering { to, range, only_first, payload, filled: 0, len });
    }

    pub(super) fn filter(&mut self, mut filtering: Filtering, rx: &mut ReceiveBuffer) -> Option<Pause> {
        let Filtering { to, range, only_first, len, .. } = filtering;
        filtering.filled += rx.copy_to(&mut filtering.payload[filtering.filled..len]);
        if filtering.filled < len {
            self.current = Current::Filter(filtering);
            return Some(Pause::Input);
        }
        match select(&filtering.payload[..len], range, &self.terms) {
            Some((range, contexts)) => self.block_status(range, to, contexts, only_first),
            None => self.fail(to, BAD_FILTER),
        }
        None
    }

    fn block_status(&mut self, range: GuestRange, to: ReplyTo, contexts: ContextSet, only_first: bool) {
        let style = self.terms.style;
        let runs = match block_status::look_up(self.engine.disk(), range) {
            Ok(runs) => runs,
            Err(error) => {
                self.report_failure(range, &error);
                let errno = Errno::from_os(error.errno());
                return self.fail(to, Refusal { errno, message: "the layout cannot be read" });
            }
        };
        // Looked up before the first chunk leaves, and after the runs: a layer that left the chain in between is missed.
        let Some(views) = contexts.iter().map(|context| self.view(context)).collect::<Option<Vec<_>>>()
        else {
            return self.fail(to, BASE_LEFT);
        };
        let mut contexts = contexts.iter().zip(views).peekable();
        while let Some((context, view)) = contexts.next() {
            let payload = block_status::encode(&runs, context, view, style, only_first);
            let is_done = contexts.peek().is_none();
            self.out.push(Head::block_status(style, to, payload.len(), is_done), Payload::Bytes(payload));
        }
    }
}

impl Session {
    /// What a context needs to know; `None` when the layer it is about has left the chain.
    fn view(&self, context: Context) -> Option<View> {
        Some(match context {
            Context::Allocation => View::Allocation,
            Context::Layer => View::Layer,
            Context::Diff(slot) => View::Since(self.contexts.base(slot, self.engine.disk())?),
        })
    }
}

/// The range and the contexts that a payload asks for; `None` where it must be refused.
fn select(payload: &[u8], range: GuestRange, terms: &Terms) -> Option<(GuestRange, ContextSet)> {
    let filter = StatusFilter::decode(payload).ok()?;
    let range = GuestRange::new(range.start, filter.effect_len);
    let mut contexts = ContextSet::EMPTY;
    for id in filter.context_ids() {
        let context = Context::from_id(id).filter(|context| terms.contexts.contains(*context))?;
        if !contexts.insert(context) {
            return None;
        }
    }
    let is_sound = !contexts.is_empty() && range.len > 0 && range.fits(terms.size);
    is_sound.then_some((range, contexts))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::nbd::protocol::reply::Style;
    use vmstrata_types::GuestOffset;

    fn chosen(len: u64, ids: &[u32]) -> Option<Vec<Context>> {
        let mut contexts = ContextSet::EMPTY;
        contexts.insert(Context::Layer);
        let terms =
            Terms { size: 1000, read_only: false, style: Style::Extended, contexts, cluster_size: 512 };
        let mut payload = len.to_be_bytes().to_vec();
        ids.iter().for_each(|id| payload.extend(id.to_be_bytes()));
        let range = GuestRange::new(GuestOffset::new(400), payload.len() as u64);
        let (range, contexts) = select(&payload, range, &terms)?;
        assert_eq!(range, GuestRange::new(GuestOffset::new(400), len));
        Some(contexts.iter().collect())
    }

    #[test]
    fn only_selected_contexts_on_the_disk_can_be_asked_for() {
        assert_eq!(chosen(600, &[2]), Some(vec![Context::Layer]));
        assert_eq!(chosen(601, &[2]), None, "past the end");
        assert_eq!(chosen(0, &[2]), None, "nothing");
        assert_eq!(chosen(u64::MAX, &[2]), None);
        assert_eq!(chosen(600, &[1]), None, "not selected");
        assert_eq!(chosen(600, &[2, 2]), None, "twice");
        assert_eq!(chosen(600, &[]), None, "none at all");
        assert_eq!(chosen(600, &[77]), None, "unknown");
    }
}
