//! Taking up what a killed process left in its journal.

use std::collections::BTreeMap;
use std::sync::atomic::Ordering;

use vmstrata_qcow2::L2Entry;
use vmstrata_qcow2::entry::COPIED;

use super::{Active, Change, Partial};
use crate::changes::Freed;
use crate::error::Result;
use crate::journal::{Record, Slot};
use crate::layer::table_of;

impl Active {
    /// Takes up what a killed process left in its journal, if the image is still what it was then.
    ///
    /// Returns false, having changed nothing, when it is not.
    ///
    /// # Errors
    /// Tables or refcounts that cannot be read.
    pub(crate) fn take_up(&self, found: &[Record]) -> Result<bool> {
        let mut histories: BTreeMap<Slot, Vec<u64>> = BTreeMap::new();
        for record in found {
            histories.entry(record.slot).or_default().extend([record.old, record.new]);
        }
        let mut newest = Vec::with_capacity(histories.len());
        for (&slot, history) in &histories {
            let last = *history.last().expect("two values a record");
            let (now, sole_user) = match slot {
                Slot::L1(index) => (self.l1_entry(index), self.is_sole_table(last)?),
                Slot::L2(cluster) if self.is_in_own_table(cluster, &histories) => {
                    (Some(self.entry(cluster)?), self.is_sole_user(last)?)
                }
                Slot::L2(_) => (None, false),
            };
            match now.and_then(|now| self.newest(history, now)) {
                Some(new) if sole_user => newest.push((slot, new)),
                _ => return Ok(false),
            }
        }
        // Pages were filled through the old tables.
        self.owner.forget_pages();
        // Slots are in order, L1 first: L2 entries may be in tables that they lead to.
        newest.into_iter().try_for_each(|(slot, new)| self.take_up_one(slot, new))?;
        Ok(true)
    }

    /// What an entry with this history is to be; `None` if it is something else `now`.
    fn newest(&self, history: &[u64], now: u64) -> Option<u64> {
        let last = *history.last()?;
        // Whoever takes the journal up makes the cluster whole, and may be stopped when the image says so.
        let whole = || self.partial(last).map(Partial::whole);
        if history.contains(&now) { Some(last) } else { whole().filter(|whole| *whole == now) }
    }

    fn take_up_one(&self, slot: Slot, new: u64) -> Result<()> {
        match slot {
            Slot::L1(index) => {
                let old = self.l1.load().entries[index as usize].swap(new, Ordering::AcqRel);
                if old != new {
                    let len = self.tables.geometry.cluster_bits.size();
                    let freed = table_of(&self.tables, old, u64::MAX)?.map(|at| Freed { at, len });
                    self.settle(self.changes.note(&[Record { slot, old, new }], freed.as_slice()))?;
                }
                Ok(())
            }
            Slot::L2(cluster) => {
                let page = self.lock_page(cluster);
                let old = self.entry_locked(cluster, &page)?;
                if old == new {
                    return Ok(());
                }
                // A zero entry may keep the cluster that the data entry before it had, and the other way round.
                let kept = self.clusters_of(new)?;
                let freed = self.clusters_of(old)?.filter(|freed| Some(*freed) != kept);
                self.publish(&[Change { cluster, old, new }], freed.as_slice(), &page)
            }
        }
    }

    /// Whether a cluster of the disk has its entry in a table of this image alone, once `histories` are taken up.
    fn is_in_own_table(&self, cluster: u64, histories: &BTreeMap<Slot, Vec<u64>>) -> bool {
        let geometry = self.tables.geometry;
        let index = cluster >> geometry.l2_bits;
        let table = histories.get(&Slot::L1(index)).and_then(|history| history.last().copied());
        let table = table.or_else(|| self.l1_entry(index)).unwrap_or(0);
        // Not only those of the disk: a process may have been killed while it made room past the disk's end.
        index < self.l1.load().entries.len() as u64 && table & COPIED != 0
    }

    fn is_sole_table(&self, raw: u64) -> Result<bool> {
        match self.tables.entries.l1(raw) {
            Ok(entry) => entry.table.map_or(Ok(false), |table| Ok(self.alloc.refcount(table)? == 1)),
            Err(_) => Ok(false),
        }
    }

    /// Whether the cluster that an entry of ours leads to, if any, is counted exactly once.
    fn is_sole_user(&self, raw: u64) -> Result<bool> {
        if let Some(partial) = self.partial(raw) {
            return Ok(self.alloc.refcount(partial.host)? == 1);
        }
        match self.tables.entries.l2(raw) {
            Ok(L2Entry::Data { host, .. } | L2Entry::Zero { host: Some(host), .. }) => {
                Ok(self.alloc.refcount(host)? == 1)
            }
            Ok(L2Entry::Unallocated | L2Entry::Zero { host: None, .. }) => Ok(true),
            // Never written by us.
            Ok(L2Entry::Compressed { .. }) | Err(_) => Ok(false),
        }
    }
}
