//! Claiming free clusters, a batch at a time.

use std::ops::Range;

use super::{Allocated, Allocator, CLAIM_BYTES, State};
use crate::error::{ErrorKind, Result};

impl Allocator {
    /// Brings the refcounts of the first clusters to memory, so that [`Allocator::try_allocate`] can claim some.
    ///
    /// # Errors
    /// A block that cannot be read.
    pub(crate) fn make_ready(&self) -> Result<()> {
        let mut state = self.state.lock();
        let first = state.hint / self.entries_per_block();
        self.block(&mut state, first as usize).map(drop)
    }

    /// Hands out one cluster, if that takes neither a read nor waiting for a lock. Refcounts may be written to the page cache.
    pub(crate) fn try_allocate(&self) -> Option<Allocated> {
        let mut state = self.state.try_lock()?;
        if state.claimed.is_empty() {
            let free = self.free_in_memory(&state)?;
            state.hint = free.start;
            let batch = (CLAIM_BYTES >> self.bits.get()).clamp(1, free.end - free.start);
            // The next allocation meets the error again, and says what is wrong.
            state.claimed = self.claim(&mut state, batch).ok()?;
        }
        Some(self.hand_out(&mut state, 1))
    }

    /// From the first free cluster at or above the hint to the end of its block, if that block is in memory.
    fn free_in_memory(&self, state: &State) -> Option<Range<u64>> {
        let per_block = self.entries_per_block();
        let index = state.hint / per_block;
        let block = state.blocks.get(&(index as usize))?;
        let within = state.hint % per_block..per_block;
        let first = within.clone().find(|within| self.order.get(block, *within as usize) == 0)?;
        Some(index * per_block + first..(index + 1) * per_block)
    }

    /// Raises the refcounts of the first run of free clusters, at most `max` long.
    pub(super) fn claim(&self, state: &mut State, max: u64) -> Result<Range<u64>> {
        let first = self.find_free(state)?;
        let mut end = first + 1;
        while end < first + max && self.refcount_of(state, end)? == Some(0) {
            end += 1;
        }
        if let Some(&taken) = state.protected.range(first..end).next() {
            let kind = ErrorKind::Refcount { found: 0, needed: "at least 1, it holds a table" };
            return Err(crate::Error::from(kind).at(self.cluster_at(taken)));
        }
        self.set_range(state, first..end, 1)?;
        state.hint = end;
        Ok(first..end)
    }

    /// The first free cluster at or above the hint, with a refcount block that covers it.
    fn find_free(&self, state: &mut State) -> Result<u64> {
        let mut cluster = state.hint;
        loop {
            match self.refcount_of(state, cluster)? {
                Some(0) => return Ok(cluster),
                Some(_) => cluster += 1,
                None => {
                    self.add_block(state, cluster / self.entries_per_block())?;
                }
            }
        }
    }
}
