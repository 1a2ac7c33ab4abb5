//! Which clusters a backup stores, and how: two bits for each, in one array for each L2 table that is needed.

use std::collections::BTreeMap;

use vmstrata_qcow2::Geometry;
use vmstrata_types::{ClusterBits, GuestOffset, GuestRange};

use crate::REGION_BYTES;
use crate::diff::DiffKind;
use crate::fault::BackupFault;

/// Memory that a plan may take: enough for 256 TiB of 64 KiB clusters.
const BYTES_MAX: usize = 1 << 30;
const ABSENT: u8 = 0;
const ZERO: u8 = 1;
const DATA: u8 = 2;
/// Clusters in a byte.
const PER_BYTE: usize = 4;

/// See the module documentation.
#[derive(Debug)]
pub(crate) struct Plan {
    geometry: Geometry,
    size: u64,
    /// By L1 index.
    tables: BTreeMap<usize, Box<[u8]>>,
    data: u64,
}

/// A cluster to be stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Planned {
    pub(crate) at: GuestOffset,
    pub(crate) kind: DiffKind,
}

impl Plan {
    /// Nothing of a disk of `size` bytes.
    pub(crate) fn new(bits: ClusterBits, size: u64) -> Self {
        Self { geometry: Geometry::new(bits), size, tables: BTreeMap::new(), data: 0 }
    }

    pub(crate) fn bits(&self) -> ClusterBits {
        self.geometry.cluster_bits
    }

    /// Virtual size of the disk.
    pub(crate) fn size(&self) -> u64 {
        self.size
    }

    /// Clusters of data.
    pub(crate) fn data_clusters(&self) -> u64 {
        self.data
    }

    /// L2 tables that are needed.
    pub(crate) fn table_count(&self) -> usize {
        self.tables.len()
    }

    /// Adds every cluster that `range` touches. A cluster that is zeros in part only is stored as data.
    ///
    /// # Errors
    /// [`BackupFault::TooLarge`] when the plan would take too much memory.
    pub(crate) fn mark(&mut self, range: GuestRange, kind: DiffKind) -> Result<(), BackupFault> {
        let (bits, end) = (self.bits(), range.end().get().min(self.size));
        let mut at = range.start.align_down(bits);
        while at.get() < end {
            let next = at.get() + bits.size();
            let whole = at >= range.start && next.min(self.size) <= end;
            self.mark_one(at, if kind == DiffKind::Zero && whole { ZERO } else { DATA })?;
            at = GuestOffset::new(next);
        }
        Ok(())
    }

    fn mark_one(&mut self, at: GuestOffset, mark: u8) -> Result<(), BackupFault> {
        let entries = self.geometry.l2_entries();
        if self.tables.len() * (entries / PER_BYTE) > BYTES_MAX {
            return Err(BackupFault::TooLarge { size: self.size });
        }
        let table = self
            .tables
            .entry(self.geometry.l1_index(at))
            .or_insert_with(|| vec![0; entries / PER_BYTE].into());
        let (byte, shift) = place(self.geometry.l2_index(at));
        let before = table[byte] >> shift & 3;
        if mark > before {
            table[byte] = table[byte] & !(3 << shift) | mark << shift;
            self.data += u64::from(mark == DATA);
        }
        Ok(())
    }

    /// The tables in order, each with its L1 index and its planned clusters.
    pub(crate) fn tables(&self) -> impl Iterator<Item = (usize, impl Iterator<Item = Planned>)> {
        let geometry = self.geometry;
        self.tables.iter().map(move |(&l1_index, table)| {
            let planned = (0..geometry.l2_entries()).filter_map(move |l2_index| {
                let (byte, shift) = place(l2_index);
                let at = geometry.guest_offset(l1_index, l2_index);
                match table[byte] >> shift & 3 {
                    ABSENT => None,
                    ZERO => Some(Planned { at, kind: DiffKind::Zero }),
                    _ => Some(Planned { at, kind: DiffKind::Data }),
                }
            });
            (l1_index, planned)
        })
    }

    /// Whether anything is planned in more than `most` regions.
    pub(crate) fn has_more_regions_than(&self, most: usize) -> bool {
        self.size / REGION_BYTES >= most as u64 && self.regions().nth(most).is_some()
    }

    /// The planned clusters in order, region by region.
    pub(crate) fn regions(&self) -> impl Iterator<Item = Vec<Planned>> {
        let mut clusters = self.tables().flat_map(|(_, planned)| planned).peekable();
        std::iter::from_fn(move || {
            let first = clusters.next()?;
            let number = first.at.get() / REGION_BYTES;
            let mut region = vec![first];
            while let Some(next) = clusters.next_if(|next| next.at.get() / REGION_BYTES == number) {
                region.push(next);
            }
            Some(region)
        })
    }
}

/// Byte and shift of a cluster's two bits.
fn place(l2_index: usize) -> (usize, u32) {
    (l2_index / PER_BYTE, (l2_index % PER_BYTE * 2) as u32)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn range(start: u64, len: u64) -> GuestRange {
        GuestRange::new(GuestOffset::new(start), len)
    }

    fn planned(plan: &Plan) -> Vec<(u64, DiffKind)> {
        plan.regions().flatten().map(|planned| (planned.at.get(), planned.kind)).collect()
    }

    #[test]
    fn zeros_of_a_part_of_a_cluster_are_stored_as_data() {
        let mut plan = Plan::new(ClusterBits::DEFAULT, 0x4_8000);
        plan.mark(range(0x8000, 0x1_8000), DiffKind::Zero).unwrap();
        assert_eq!(planned(&plan), [(0, DiffKind::Data), (0x1_0000, DiffKind::Zero)]);
        plan.mark(range(0x4_0000, 0x8000), DiffKind::Zero).unwrap();
        assert_eq!(planned(&plan)[2], (0x4_0000, DiffKind::Zero), "the disk's last cluster is not whole");
    }

    #[test]
    fn data_wins_and_is_counted_once() {
        let mut plan = Plan::new(ClusterBits::MIN, 1 << 20);
        plan.mark(range(512, 512), DiffKind::Zero).unwrap();
        plan.mark(range(1000, 1), DiffKind::Data).unwrap();
        plan.mark(range(1000, 1), DiffKind::Data).unwrap();
        plan.mark(range(512, 512), DiffKind::Zero).unwrap();
        assert_eq!(planned(&plan), [(512, DiffKind::Data)]);
        assert_eq!((plan.data_clusters(), plan.table_count()), (1, 1));
    }

    #[test]
    fn regions_are_cut_at_their_borders() {
        let mut plan = Plan::new(ClusterBits::MAX, 64 << 20);
        plan.mark(range(2 << 20, 8 << 20), DiffKind::Data).unwrap();
        let lens: Vec<usize> = plan.regions().map(|region| region.len()).collect();
        assert_eq!(lens, [1, 2, 1]);
        assert!(plan.has_more_regions_than(2) && !plan.has_more_regions_than(3));
    }
}
