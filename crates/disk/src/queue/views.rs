//! Small pieces of reads out of the host's page cache, by the queue's own thread.
//!
//! ```text
//!   piece ──► in a view? ──► copied with its batch
//!                 │ no
//!                 ▼
//!                ring ──► done ──► its pages are in memory now: noted in the view
//! ```
//!
//! A page is copied when the host has it in memory as far as is known: it said so, or the page was read through the ring
//! before. The host may have taken it back meanwhile, and this thread then waits for the disk, as none of the other
//! requests should have to. So it looks back after each batch that took long: if it has waited for a page, all that is
//! known of pages is forgotten, and for a while the ring reads everything.

use std::time::{Duration, Instant};

use smallvec::SmallVec;
use vmstrata_store::{OpenStore, Slices, View, major_faults};
use vmstrata_types::{HostOffset, LayerIndex};

use super::plan::{Part, Parts};
use crate::request::Request;

/// Pieces of more bytes gain little by it.
const VIEWED_MAX: usize = 64 << 10;
/// Pieces of a request that the processor is asked for ahead: of more, the first would have to make room for the last.
const PREFETCHED_MAX: usize = 16;
/// A batch that took less has not waited for a disk.
const PROMPT: Duration = Duration::from_micros(50);
/// For how long the ring reads everything after a page that was waited for; twice as long after the next, and so on until
/// [`AWAY_MAX`], unless that comes more than [`AWAY_MAX`] later.
const AWAY: Duration = Duration::from_secs(1);
const AWAY_MAX: Duration = Duration::from_secs(64);

/// The views of layers' files that a queue has met.
#[derive(Debug, Default)]
pub(super) struct Views {
    by_layer: Vec<Option<View>>,
    /// Of [`major_faults`], when last asked.
    faults: Option<i64>,
    /// Until when the ring reads everything.
    away_until: Option<Instant>,
    /// For how long it did so the last time, and until when.
    last: Option<(Duration, Instant)>,
}

/// What a small piece of a read fetches, from a layer that may have changed its place when it is done: then other pages
/// are taken to be in memory, and no harm is done but a wait.
#[derive(Clone, Copy, Debug)]
pub(super) struct Fetch {
    layer: LayerIndex,
    at: HostOffset,
    len: u64,
}

impl Fetch {
    pub(super) fn of(parts: &[Part]) -> SmallVec<[Self; 1]> {
        let small = parts.iter().filter(|part| part.len <= VIEWED_MAX);
        small.map(|part| Self { layer: part.layer, at: part.at, len: part.len as u64 }).collect()
    }
}

impl Views {
    /// Views a layer's file from now on, up to `end` at least, if that can be done.
    pub(super) fn add(&mut self, layer: LayerIndex, store: &OpenStore, end: HostOffset) {
        if self.of(layer).is_some_and(|view| view.reaches(end)) {
            return;
        }
        if self.by_layer.len() <= layer.index() {
            self.by_layer.resize(layer.index() + 1, None);
        }
        self.by_layer[layer.index()] = store.view(end);
    }

    /// Has the processor fetch what [`Views::read`] will look at first.
    #[inline]
    pub(super) fn prefetch(&self, parts: &[Part]) {
        if self.away_until.is_none() {
            for part in &parts[..parts.len().min(PREFETCHED_MAX)] {
                if let Some(view) = self.of(part.layer) {
                    view.prefetch(part.at, part.len);
                }
            }
        }
    }

    /// Fills a request's memory with what is in views of its parts, and says what that was; the ring has to read those that are left.
    #[inline]
    pub(super) fn read(&mut self, request: &Request, parts: &mut Parts, mut copied: impl FnMut(&Part)) {
        let (mut memory, mut bytes) = (Slices::new(&request.segments), 0);
        parts.retain(|part| {
            let view = self.of(part.layer).filter(|_| self.away_until.is_none() && part.len <= VIEWED_MAX);
            let is_copied = view.is_some_and(|view| view.read(&memory.take(part.skip, part.len), part.at));
            if is_copied {
                copied(part);
                bytes += part.len;
                if bytes > VIEWED_MAX {
                    // As many pages may have to be waited for as a small request has, not all of a large one.
                    bytes = 0;
                    self.notice_faults();
                }
            }
            !is_copied
        });
    }

    #[inline]
    fn of(&self, layer: LayerIndex) -> Option<&View> {
        self.by_layer.get(layer.index())?.as_ref()
    }

    /// The ring has done what `fetch` is of.
    pub(super) fn note(&self, fetch: &Fetch) {
        if let Some(view) = self.of(fetch.layer) {
            view.note(fetch.at, fetch.len);
        }
    }

    /// Whether the ring reads everything for the moment.
    #[cfg(test)]
    pub(super) fn is_away(&self) -> bool {
        self.away_until.is_some()
    }

    /// A batch begins; when.
    #[inline]
    pub(super) fn begin(&mut self) -> Instant {
        let now = Instant::now();
        self.away_until = self.away_until.filter(|until| now < *until);
        self.faults.get_or_insert_with(major_faults);
        now
    }

    /// A batch that began at `since` has ended.
    #[inline]
    pub(super) fn look_back(&mut self, since: Instant) {
        if since.elapsed() > PROMPT {
            self.notice_faults();
        }
    }

    fn notice_faults(&mut self) {
        let faults = major_faults();
        if self.faults.replace(faults).is_some_and(|before| faults > before) {
            self.stay_away(Instant::now());
        }
    }

    #[cold]
    fn stay_away(&mut self, now: Instant) {
        let away = match self.last {
            Some((away, until)) if now < until + AWAY_MAX => (away * 2).min(AWAY_MAX),
            _ => AWAY,
        };
        let seconds = away.as_secs();
        tracing::debug!(
            seconds,
            "the host takes pages of files back: io_uring reads all of them for a while"
        );
        self.away_until = Some(now + away);
        self.last = Some((away, now + away));
        self.by_layer.iter().flatten().for_each(View::forget);
    }

    /// Begins anew with other layers; what is known of the host stays. Returns the views there were.
    pub(super) fn clear(&mut self) -> Vec<Option<View>> {
        std::mem::take(&mut self.by_layer)
    }
}
