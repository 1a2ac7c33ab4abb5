//! Which host clusters of the active layer are free: refcounts, read and written.
//!
//! Clusters are claimed in batches: the refcounts of a batch are raised in one write, and requests take clusters
//! from it without touching the file. A refcount is raised before anything can refer to its cluster, and lowered
//! only after nothing on stable storage does; [`crate::changes`] keeps that order. So a crash can leave clusters
//! that no one uses (a leak), never a cluster in use that counts as free.
//!
//! Refcount blocks are written through: what is in memory is what was written. A new block is on stable storage
//! before the refcount table points to it, and a new table before the header does.
//!
//! Lock order: the allocator's lock is a leaf; store operations happen under it.

mod claim;
mod grow;
#[cfg(test)]
mod tests;

use std::collections::{BTreeSet, HashMap};
use std::ops::Range;
use std::sync::Arc;

use parking_lot::Mutex;
use vmstrata_qcow2::refcount::decode_table_entry;
use vmstrata_qcow2::{Header, RefcountOrder};
use vmstrata_store::Store;
use vmstrata_types::{ClusterBits, HostOffset};

use crate::error::{ErrorKind, IoContext as _, Result};
use crate::flusher::Flusher;
use crate::layer::words;

/// Bytes claimed at once, about: enough to make the refcount write of a claim cheap, little to leak in a crash.
const CLAIM_BYTES: u64 = 4 << 20;
/// Bytes of refcount blocks kept in memory.
const KEPT_BLOCK_BYTES: u64 = 2 << 20;

/// Clusters of one allocation, contiguous in the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Allocated {
    pub(crate) at: HostOffset,
    pub(crate) clusters: u64,
    /// Whether they read as zeros: nothing was ever written there.
    pub(crate) zeroed: bool,
}

/// See the module documentation.
#[derive(Debug)]
pub(crate) struct Allocator {
    store: Arc<dyn Store>,
    flusher: Arc<Flusher>,
    bits: ClusterBits,
    order: RefcountOrder,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    table_at: HostOffset,
    /// Refcount table: where the block for each run of clusters lies.
    table: Vec<Option<HostOffset>>,
    /// Refcount blocks in memory, by their index in the table.
    blocks: HashMap<usize, Box<[u8]>>,
    /// Clusters claimed and not handed out yet: their refcount is 1.
    claimed: Range<u64>,
    /// No free cluster lies below this one.
    hint: u64,
    /// Clusters from here on were never part of the file: they read as zeros.
    fresh_from: u64,
    /// Clusters of the header and the tables that the image was opened with, but for those freed since. A refcount
    /// that calls one of them free is wrong.
    protected: BTreeSet<u64>,
}

impl Allocator {
    /// Reads the refcount table of the image whose header this is, and whose L2 tables are these.
    ///
    /// # Errors
    /// A table that cannot be read or breaks the format.
    pub(crate) fn open(
        store: Arc<dyn Store>,
        flusher: Arc<Flusher>,
        header: &Header,
        l2_tables: impl Iterator<Item = HostOffset>,
        file_len: u64,
    ) -> Result<Self> {
        let bits = header.cluster_bits;
        let table_at = header.refcount_table_offset;
        let mut bytes = vec![0; header.refcount_table_entries() * 8];
        store
            .read_padded(&mut bytes, table_at)
            .while_trying("read the refcount table")
            .map_err(|e| e.at(table_at))?;
        let mut table = Vec::with_capacity(bytes.len() / 8);
        for (index, raw) in words(&bytes).enumerate() {
            let block = decode_table_entry(raw, bits)
                .map_err(|entry| ErrorKind::Entry { table: "refcount table", entry })
                .map_err(|kind| crate::Error::from(kind).at(table_at + index as u64 * 8))?;
            table.push(block);
        }
        let clusters_of =
            |at: HostOffset, len: u64| at.get() >> bits.get()..(at.get() + len).div_ceil(bits.size());
        let mut protected: BTreeSet<u64> =
            table.iter().flatten().copied().chain(l2_tables).map(|at| at.get() >> bits.get()).collect();
        protected.extend(clusters_of(HostOffset::ZERO, 1));
        protected.extend(clusters_of(table_at, bytes.len() as u64));
        protected.extend(clusters_of(header.l1_table_offset, u64::from(header.l1_size) * 8));
        let state = State {
            table_at,
            table,
            protected,
            blocks: HashMap::new(),
            claimed: 0..0,
            hint: 0,
            fresh_from: file_len.div_ceil(bits.size()),
        };
        Ok(Self { store, flusher, bits, order: header.refcount_order, state: Mutex::new(state) })
    }

    fn entries_per_block(&self) -> u64 {
        self.order.entries_per_block(self.bits) as u64
    }

    fn cluster_at(&self, cluster: u64) -> HostOffset {
        HostOffset::new(cluster << self.bits.get())
    }

    /// Hands out up to `clusters` contiguous clusters, at least one, each with refcount 1.
    ///
    /// # Errors
    /// A host that is out of space or cannot write; a refcount structure that is damaged or full.
    pub(crate) fn allocate(&self, clusters: u64) -> Result<Allocated> {
        let mut state = self.state.lock();
        if state.claimed.is_empty() {
            let batch = clusters.max(CLAIM_BYTES >> self.bits.get()).max(1);
            state.claimed = self.claim(&mut state, batch)?;
        }
        Ok(self.hand_out(&mut state, clusters))
    }

    /// Hands out the first of the claimed clusters, up to `clusters`.
    fn hand_out(&self, state: &mut State, clusters: u64) -> Allocated {
        let first = state.claimed.start;
        let count = clusters.min(state.claimed.end - first);
        state.claimed.start += count;
        let zeroed = first >= state.fresh_from;
        state.fresh_from = state.fresh_from.max(first + count);
        Allocated { at: self.cluster_at(first), clusters: count, zeroed }
    }

    /// Where the clusters that were ever handed out end.
    pub(crate) fn end(&self) -> HostOffset {
        self.cluster_at(self.state.lock().fresh_from)
    }

    /// Where the clusters that count as used end; past the end of the file where the last ones were never written.
    ///
    /// # Errors
    /// A block that cannot be read.
    pub(crate) fn used_end(&self) -> Result<HostOffset> {
        let mut state = self.state.lock();
        for index in (0..state.table.len()).rev() {
            let Some(block) = self.block(&mut state, index)? else { continue };
            let entries = self.entries_per_block();
            if let Some(last) = (0..entries).rev().find(|&entry| self.order.get(block, entry as usize) > 0) {
                return Ok(self.cluster_at(index as u64 * entries + last + 1));
            }
        }
        Ok(HostOffset::ZERO)
    }

    /// A cluster's refcount; `None` where no block says.
    fn refcount_of(&self, state: &mut State, cluster: u64) -> Result<Option<u64>> {
        let per_block = self.entries_per_block();
        let (index, within) = ((cluster / per_block) as usize, (cluster % per_block) as usize);
        let Some(block) = self.block(state, index)? else { return Ok(None) };
        Ok(Some(self.order.get(block, within)))
    }

    fn block<'s>(&self, state: &'s mut State, index: usize) -> Result<Option<&'s mut Box<[u8]>>> {
        let Some(at) = state.table.get(index).copied().flatten() else { return Ok(None) };
        if !state.blocks.contains_key(&index) {
            let kept = (KEPT_BLOCK_BYTES >> self.bits.get()).max(4) as usize;
            if state.blocks.len() >= kept {
                // Written through, so any may go: which one matters little at one read per 2 GiB of disk.
                state.blocks.clear();
            }
            let mut bytes = vec![0; self.bits.size() as usize].into_boxed_slice();
            self.store
                .read_padded(&mut bytes, at)
                .while_trying("read a refcount block")
                .map_err(|e| e.at(at))?;
            state.blocks.insert(index, bytes);
        }
        Ok(state.blocks.get_mut(&index))
    }

    /// Sets the refcounts of `clusters`, all covered by blocks, in memory and in the file.
    fn set_range(&self, state: &mut State, clusters: Range<u64>, value: u64) -> Result<()> {
        let per_block = self.entries_per_block();
        let mut first = clusters.start;
        while first < clusters.end {
            let index = (first / per_block) as usize;
            let end = clusters.end.min((index as u64 + 1) * per_block);
            let at = state.table[index].expect("refcounts are set only where a block is");
            let width = u64::from(self.order.width_bits());
            let (low, high) = (first % per_block, end - index as u64 * per_block);
            let bytes = (low * width / 8) as usize..((high * width).div_ceil(8)) as usize;
            let block = self.block(state, index)?.expect("looked up above");
            for entry in low..high {
                self.order.set(block, entry as usize, value).expect("refcounts only go down or to 1");
            }
            let written = self.store.write_all(&block[bytes.clone()], at + bytes.start as u64);
            if written.is_err() {
                // Memory must say what the file says, and that is not known any more: read it again when needed.
                state.blocks.remove(&index);
            }
            written.while_trying("write refcounts").map_err(|e| e.at(at))?;
            first = end;
        }
        Ok(())
    }

    /// Counts one user less of every cluster that `len` bytes at `at` touch; gives back the space of those that
    /// have none left.
    ///
    /// The caller knows that no entry on stable storage, and no request under way, refers to them.
    ///
    /// # Errors
    /// A host that cannot write; a refcount that was 0 already.
    pub(crate) fn free(&self, at: HostOffset, len: u64) -> Result<()> {
        let mut state = self.state.lock();
        let last = (at.get() + len - 1) >> self.bits.get();
        let mut cluster = at.get() >> self.bits.get();
        while cluster <= last {
            let found = self.refcount_of(&mut state, cluster)?.unwrap_or(0);
            if found == 0 {
                let kind = ErrorKind::Refcount { found, needed: "at least 1" };
                return Err(crate::Error::from(kind).at(self.cluster_at(cluster)));
            }
            let mut end = cluster + 1;
            while end <= last && self.refcount_of(&mut state, end)? == Some(found) {
                end += 1;
            }
            self.set_range(&mut state, cluster..end, found - 1)?;
            if found == 1 {
                state.hint = state.hint.min(cluster);
                while let Some(&freed) = state.protected.range(cluster..end).next() {
                    state.protected.remove(&freed);
                }
                // Space is given back where the host can; the refcount alone makes the clusters free.
                let _ = self.store.punch_hole(self.cluster_at(cluster), (end - cluster) << self.bits.get());
            }
            cluster = end;
        }
        Ok(())
    }

    /// A cluster's refcount; 0 where no block says.
    ///
    /// # Errors
    /// A block that cannot be read.
    pub(crate) fn refcount(&self, at: HostOffset) -> Result<u64> {
        let mut state = self.state.lock();
        Ok(self.refcount_of(&mut state, at.get() >> self.bits.get())?.unwrap_or(0))
    }

    /// Runs `change` while the place of the refcount table, which the header tells, stays as it is.
    pub(crate) fn exclusively<T>(&self, change: impl FnOnce() -> T) -> T {
        let _state = self.state.lock();
        change()
    }

    /// Gives the clusters claimed and not handed out back, as a clean close does.
    ///
    /// # Errors
    /// A host that cannot write.
    pub(crate) fn release_claimed(&self) -> Result<()> {
        let mut state = self.state.lock();
        let claimed = state.claimed.clone();
        if !claimed.is_empty() {
            self.set_range(&mut state, claimed.clone(), 0)?;
            state.hint = state.hint.min(claimed.start);
            state.claimed = 0..0;
        }
        Ok(())
    }
}
