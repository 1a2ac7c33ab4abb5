//! Taking up what a killed process left in its journal.

use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::sync::atomic::Ordering;

use vmstrata_qcow2::entry::{COPIED, EntryFormat};
use vmstrata_qcow2::{L2Entry, RawEntry};
use vmstrata_types::HostOffset;

use super::{Active, Change};
use crate::changes::{Freed, Recorded};
use crate::error::Result;
use crate::journal::{Record, Slot};
use crate::layer::table_of;

/// A word that older versions had in place of the entry of a cluster that they had written in part: 1 in its top bits.
const PARTIAL_SHIFT: u32 = 61;

impl Active {
    /// Takes up what a killed process left in its journal, if the image is still what it was then.
    ///
    /// Returns why not when it is not; nothing was changed then.
    ///
    /// # Errors
    /// Tables or refcounts that cannot be read.
    pub(crate) fn take_up(&self, found: &[Record]) -> Result<Result<(), Mismatch>> {
        let mut histories: BTreeMap<Slot, Vec<RawEntry>> = BTreeMap::new();
        for record in found {
            histories.entry(record.slot).or_default().extend([record.old, record.new]);
        }
        let mut newest = Vec::with_capacity(histories.len());
        let mut led_to = HashMap::with_capacity(histories.len());
        for (&slot, history) in &histories {
            let last = *history.last().expect("two values a record");
            if matches!(slot, Slot::L2(_)) && !self.has_subclusters() && last.word >> PARTIAL_SHIFT == 1 {
                return Ok(Err(Mismatch::Partial { slot }));
            }
            let now = match slot {
                Slot::L1(index) => self.l1_entry(index).map(RawEntry::standard),
                Slot::L2(cluster) if self.is_in_own_table(cluster, &histories) => Some(self.entry(cluster)?),
                Slot::L2(_) => None,
            };
            if !now.is_some_and(|now| history.contains(&now)) {
                return Ok(Err(Mismatch::Entry { slot, now }));
            }
            if let Some(host) = host_of(self.tables.entries, (slot, last)) {
                let refcount = host.map_or(Ok(0), |host| self.alloc.refcount(host))?;
                // Where only bits of subclusters changed, others may use the cluster too.
                let is_l2 = matches!(slot, Slot::L2(_));
                let is_shared = is_l2 && self.has_subclusters() && last.word & COPIED == 0 && refcount > 0;
                if refcount != 1 && !is_shared {
                    return Ok(Err(Mismatch::Refcount { slot, host, refcount }));
                }
                if !is_shared && let Some(other) = led_to.insert(host, slot) {
                    return Ok(Err(Mismatch::Shared { slots: [other, slot], host }));
                }
            }
            newest.push((slot, last));
        }
        // Pages were filled through the old tables.
        self.owner.forget_pages();
        // Slots are in order, L1 first: L2 entries may be in tables that they lead to.
        newest.into_iter().try_for_each(|(slot, new)| self.take_up_one(slot, new))?;
        Ok(Ok(()))
    }

    fn take_up_one(&self, slot: Slot, new: RawEntry) -> Result<()> {
        match slot {
            Slot::L1(index) => {
                let new = new.word;
                let old = self.l1.load().entries[index as usize].swap(new, Ordering::AcqRel);
                if old != new {
                    let len = self.tables.geometry.cluster_bits.size();
                    let freed = table_of(&self.tables, old, u64::MAX)?.map(|at| Freed { at, len });
                    self.commit_if_due(self.changes.note(
                        &[Record::of_l1(index, old, new)],
                        freed.as_slice(),
                        Recorded::Now,
                    ))?;
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
                let kept = self.clusters_of(cluster, new)?;
                let freed = self.clusters_of(cluster, old)?.filter(|freed| Some(*freed) != kept);
                self.publish(&[Change { cluster, old, new }], freed.as_slice(), &page)
            }
        }
    }

    /// Whether a cluster of the disk has its entry in a table of this image alone, once `histories` are taken up.
    fn is_in_own_table(&self, cluster: u64, histories: &BTreeMap<Slot, Vec<RawEntry>>) -> bool {
        let geometry = self.tables.geometry;
        let index = cluster >> geometry.l2_bits;
        let table = histories.get(&Slot::L1(index)).and_then(|history| Some(history.last()?.word));
        let table = table.or_else(|| self.l1_entry(index)).unwrap_or(0);
        // Not only those of the disk: a process may have been killed while it made room past the disk's end.
        index < self.l1.load().entries.len() as u64 && table & COPIED != 0
    }
}

/// The cluster that a journal's entry leads to, if to any; `Some(None)` for an entry that vmstrata never writes.
pub(crate) fn host_of(entries: EntryFormat, (slot, raw): (Slot, RawEntry)) -> Option<Option<HostOffset>> {
    if let Slot::L1(_) = slot {
        return entries.l1(raw.word).map_or(Some(None), |entry| entry.table.map(Some));
    }
    match entries.l2(raw) {
        Ok(L2Entry::Compressed { .. }) | Err(_) => Some(None),
        Ok(entry) => entry.host().map(Some),
    }
}

/// Why a journal is not about its image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mismatch {
    /// An older version wrote a cluster in part, and recorded what no image can have.
    Partial {
        /// The cluster's entry.
        slot: Slot,
    },
    /// The image has an entry that the journal knows nothing of.
    Entry {
        /// Which entry.
        slot: Slot,
        /// What the image has; `None` where it has no table of its own for it.
        now: Option<RawEntry>,
    },
    /// An entry of the journal leads to a cluster that is not its own.
    Refcount {
        /// Which entry.
        slot: Slot,
        /// The cluster; `None` for an entry that vmstrata never writes.
        host: Option<HostOffset>,
        /// How many users the image counts.
        refcount: u64,
    },
    /// Two entries lead to one cluster.
    Shared {
        /// Which entries.
        slots: [Slot; 2],
        /// The cluster.
        host: Option<HostOffset>,
    },
}

impl fmt::Display for Mismatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Partial { slot } => {
                write!(
                    f,
                    "it was left by an older version, which wrote the cluster of {slot} in part: open the disk once with that version"
                )
            }
            Self::Entry { slot, now: Some(now) } => {
                write!(f, "the image's {slot} is {now}, which the journal knows nothing of")
            }
            Self::Entry { slot, now: None } => write!(f, "the image has no table of its own for {slot}"),
            Self::Refcount { slot, host: Some(host), refcount } => {
                write!(f, "{slot} leads to the cluster at {host}, whose refcount is {refcount}")
            }
            Self::Refcount { slot, host: None, .. } => write!(f, "{slot} is none that vmstrata writes"),
            Self::Shared { slots: [one, other], host } => {
                let host = host.unwrap_or(HostOffset::ZERO);
                write!(f, "{one} and {other} lead to one cluster, at {host}")
            }
        }
    }
}

impl std::error::Error for Mismatch {}
