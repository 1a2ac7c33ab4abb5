//! Adding refcount blocks, and moving the refcount table when it is full.

use vmstrata_qcow2::header::{MAX_REFCOUNT_TABLE_BYTES, field};
use vmstrata_qcow2::refcount::encode_table_entry;
use vmstrata_types::HostOffset;

use super::{Allocator, State};
use crate::error::{ErrorKind, IoContext as _, Result};

impl Allocator {
    /// Hands out exactly `clusters` contiguous clusters, each with refcount 1: a table that the header leads to.
    ///
    /// # Errors
    /// As [`Allocator::allocate`]; more clusters than a refcount block counts beside itself.
    pub(crate) fn allocate_run(&self, clusters: u64) -> Result<HostOffset> {
        let mut state = self.state.lock();
        if clusters >= self.entries_per_block() {
            return Err(ErrorKind::Full { what: "a table of contiguous clusters" }.into());
        }
        if clusters <= state.claimed.end - state.claimed.start {
            let first = state.claimed.start;
            state.claimed.start += clusters;
            state.fresh_from = state.fresh_from.max(first + clusters);
            return Ok(self.cluster_at(first));
        }
        let (mut first, mut end) = (state.hint, state.hint);
        while end < first + clusters {
            match self.refcount_of(&mut state, end)? {
                Some(0) if !state.protected.contains(&end) => end += 1,
                Some(_) => (first, end) = (end + 1, end + 1),
                // The new block may lie right here: look again.
                None => self.add_block(&mut state, end / self.entries_per_block())?,
            }
        }
        self.set_range(&mut state, first..end, 1)?;
        state.fresh_from = state.fresh_from.max(end);
        Ok(self.cluster_at(first))
    }

    /// Adds the refcount block with this index, in the first cluster that it counts itself.
    pub(super) fn add_block(&self, state: &mut State, index: u64) -> Result<()> {
        if index >= state.table.len() as u64 {
            return self.grow_table(state, index);
        }
        let first = index * self.entries_per_block();
        let at = self.cluster_at(first);
        let mut block = vec![0; self.bits.size() as usize];
        self.order.set(&mut block, 0, 1).expect("every width can say 1");
        self.store.write_all(&block, at).while_trying("write a refcount block").map_err(|e| e.at(at))?;
        self.flusher.flush().while_trying("flush a refcount block")?;
        let entry_at = state.table_at + index * 8;
        let raw = encode_table_entry(Some(at), self.bits);
        self.store
            .write_all(&raw.to_be_bytes(), entry_at)
            .while_trying("write the refcount table")
            .map_err(|e| e.at(entry_at))?;
        state.table[index as usize] = Some(at);
        state.blocks.insert(index as usize, block.into_boxed_slice());
        state.fresh_from = state.fresh_from.max(first + 1);
        Ok(())
    }

    /// Moves the refcount table, half as large again, to the first clusters it does not count yet.
    ///
    /// ```text
    ///   cluster `index * per_block`:  [ blocks that count these clusters ][ new table ]
    /// ```
    fn grow_table(&self, state: &mut State, index: u64) -> Result<()> {
        let per_block = self.entries_per_block();
        let first = index * per_block;
        let (blocks, table_clusters) = self.larger_table(state.table.len() as u64, index);
        if table_clusters << self.bits.get() > MAX_REFCOUNT_TABLE_BYTES {
            return Err(ErrorKind::Full { what: "the refcount table" }.into());
        }
        let mut table = state.table.clone();
        table.resize((table_clusters * self.bits.size() / 8) as usize, None);
        for block in 0..blocks {
            table[(index + block) as usize] = Some(self.cluster_at(first + block));
        }
        self.write_new_structures(first, blocks, table_clusters, &table)?;
        let table_at = self.cluster_at(first + blocks);
        self.point_header_to(table_at, table_clusters)?;
        let old_first = state.table_at.get() >> self.bits.get();
        let old_clusters = (state.table.len() as u64 * 8).div_ceil(self.bits.size());
        state.table = table;
        state.table_at = table_at;
        state.fresh_from = state.fresh_from.max(first + blocks + table_clusters);
        // Nothing refers to the old table any more. A damaged image may count it wrongly: leave such clusters alone.
        for cluster in old_first..old_first + old_clusters {
            if self.refcount_of(state, cluster)? == Some(1) {
                self.set_range(state, cluster..cluster + 1, 0)?;
                state.protected.remove(&cluster);
            }
        }
        state.hint = state.hint.min(old_first);
        Ok(())
    }

    /// How many blocks, and clusters of table, count themselves and all before block `index`.
    fn larger_table(&self, entries_now: u64, index: u64) -> (u64, u64) {
        let (per_block, per_cluster) = (self.entries_per_block(), self.bits.size() / 8);
        let mut entries = (index + 1).max(entries_now * 3 / 2 + 1);
        loop {
            let clusters = entries.div_ceil(per_cluster);
            let blocks = (1..).find(|blocks| blocks + clusters <= blocks * per_block).expect("grows faster");
            if index + blocks <= clusters * per_cluster {
                return (blocks, clusters);
            }
            entries = index + blocks;
        }
    }

    /// Writes blocks and table of [`Allocator::grow_table`] where nothing refers to them yet, and flushes.
    fn write_new_structures(
        &self,
        first: u64,
        blocks: u64,
        table_clusters: u64,
        table: &[Option<HostOffset>],
    ) -> Result<()> {
        let per_block = self.entries_per_block();
        let mut bytes = vec![0; (blocks << self.bits.get()) as usize];
        for cluster in 0..blocks + table_clusters {
            let start = ((cluster / per_block) << self.bits.get()) as usize;
            let block = &mut bytes[start..start + self.bits.size() as usize];
            self.order.set(block, (cluster % per_block) as usize, 1).expect("every width can say 1");
        }
        bytes.extend(table.iter().flat_map(|&block| encode_table_entry(block, self.bits).to_be_bytes()));
        let at = self.cluster_at(first);
        self.store
            .write_all(&bytes, at)
            .while_trying("write a larger refcount table")
            .map_err(|e| e.at(at))?;
        self.flusher.flush().while_trying("flush a larger refcount table")
    }

    /// Switches to another refcount table: one write inside one sector, then a flush.
    fn point_header_to(&self, table_at: HostOffset, clusters: u64) -> Result<()> {
        let mut bytes = [0; 12];
        bytes[..8].copy_from_slice(&table_at.get().to_be_bytes());
        bytes[8..].copy_from_slice(&u32::try_from(clusters).expect("at most 8 MiB").to_be_bytes());
        let at = HostOffset::new(field::REFCOUNT_TABLE_OFFSET);
        let written = self.store.write_all(&bytes, at);
        if written.is_err() {
            // Which of the two tables a crash would show is not known.
            self.flusher.give_up();
        }
        written.while_trying("write the header").map_err(|e| e.at(at))?;
        self.flusher.flush().while_trying("flush the header")
    }
}
