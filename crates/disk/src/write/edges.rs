//! What a write copies up: the bytes around it that its new cluster, or its subclusters, must have.

use vmstrata_qcow2::RawEntry;
use vmstrata_store::Segment;
use vmstrata_types::GuestOffset;

use super::{Wait, with_scratch};
use crate::active::Active;
use crate::error::Result;
use crate::layers::Layers;
use crate::map::Source;

/// Where a request ends within what is written: how many bytes there are before and behind it, and the entries of the clusters
/// that these lie in.
#[derive(Clone, Copy, Debug)]
pub(super) struct Around {
    pub(super) head: (usize, RawEntry),
    pub(super) tail: (usize, RawEntry),
}

/// Bytes on one side of a request.
pub(super) struct Edge<'a> {
    bytes: &'a mut [u8],
    /// They are zeros, and are not filled in.
    is_zero: bool,
}

impl<'a> Edge<'a> {
    /// What has to be written of it to a place that reads as zeros already, or that does not.
    pub(super) fn into_segment(self, is_zeroed: bool) -> Option<Segment<'a>> {
        if self.bytes.is_empty() || self.is_zero && is_zeroed {
            return None;
        }
        if self.is_zero {
            self.bytes.fill(0);
        }
        Some(Segment::from_mut(self.bytes))
    }
}

impl Layers {
    /// Reads what lies around `len` bytes at `at`, and has `write` write all of it; `None` when reading takes waiting and must not.
    /// The clusters are locked.
    pub(super) fn with_edges<T>(
        &self,
        active: &Active,
        (at, len): (GuestOffset, usize),
        around: Around,
        wait: Wait,
        write: impl FnOnce(Edge<'_>, Edge<'_>) -> Result<Option<T>>,
    ) -> Result<Option<T>> {
        with_scratch(around.head.0 + around.tail.0, |scratch| {
            let (head, tail) = scratch.split_at_mut(around.head.0);
            let start = GuestOffset::new(at.get() - head.len() as u64);
            let Some(head) = self.edge(active, around.head.1, start, head, wait)? else { return Ok(None) };
            let Some(tail) = self.edge(active, around.tail.1, at + len as u64, tail, wait)? else {
                return Ok(None);
            };
            write(head, tail)
        })
    }

    /// Reads `bytes` at `at`, of a cluster whose entry is `raw`; past the end of the disk there are zeros.
    fn edge<'a>(
        &self,
        active: &Active,
        raw: RawEntry,
        at: GuestOffset,
        bytes: &'a mut [u8],
        wait: Wait,
    ) -> Result<Option<Edge<'a>>> {
        let there = self.size.saturating_sub(at.get()).min(bytes.len() as u64);
        let is_zero = there == 0
            || self
                .find_old(active, |_| raw, at, there, wait)?
                .is_some_and(|run| run.source.is_zero() && run.len == there);
        let is_read = is_zero
            || match wait {
                Wait::May => self.copy_up(active, |_| raw, at, bytes).map(|()| true)?,
                Wait::MustNot => self.copy_up_now(active, raw, at, bytes)?,
            };
        Ok(is_read.then_some(Edge { bytes, is_zero }))
    }

    /// As [`Layers::read_old`]; past the end of the disk there are zeros.
    pub(crate) fn copy_up(
        &self,
        active: &Active,
        raw: impl Fn(u64) -> RawEntry,
        at: GuestOffset,
        into: &mut [u8],
    ) -> Result<()> {
        let there = self.size.saturating_sub(at.get()).min(into.len() as u64) as usize;
        into[there..].fill(0);
        if there == 0 {
            return Ok(());
        }
        self.read_old(active, raw, at, &[Segment::from_mut(&mut into[..there])])
    }

    /// As [`Layers::copy_up`], from memory; false where the host does not have all of it there.
    fn copy_up_now(&self, active: &Active, raw: RawEntry, at: GuestOffset, into: &mut [u8]) -> Result<bool> {
        let there = self.size.saturating_sub(at.get()).min(into.len() as u64) as usize;
        into[there..].fill(0);
        let mut done = 0;
        while done < there {
            let rest = (there - done) as u64;
            let Some(run) = self.find_old(active, |_| raw, at + done as u64, rest, Wait::MustNot)? else {
                return Ok(false);
            };
            let bytes = &mut into[done..done + run.len as usize];
            match run.source {
                Source::Hole | Source::Zero(_) => bytes.fill(0),
                Source::Data(layer, host) => {
                    let file = self.open_file_of(layer);
                    let local = file.as_ref().and_then(|file| file.local());
                    if !local.is_some_and(|file| file.read_now(bytes, host)) {
                        return Ok(false);
                    }
                }
                Source::Compressed(_) | Source::Damaged(_) => return Ok(false),
            }
            done += run.len as usize;
        }
        Ok(true)
    }
}
