//! A region: the unit in which a backup is read, hashed and written.

use sha2::{Digest as _, Sha256};
use vmstrata_disk::{Disk, Result};
use vmstrata_store::{Segment, is_zero};
use vmstrata_types::{ClusterBits, GuestOffset};

use crate::REGION_BYTES;
use crate::diff::DiffKind;
use crate::manifest::{Digest, RegionSum};
use crate::plan::Planned;

/// The clusters of a region that a backup stores.
#[derive(Debug)]
pub(crate) struct Region {
    /// In order.
    pub(crate) clusters: Vec<Planned>,
    /// The data clusters one after the other; past the disk's end they are zeros.
    pub(crate) data: Vec<u8>,
    bits: ClusterBits,
}

impl Region {
    pub(crate) fn new(clusters: Vec<Planned>, data: Vec<u8>, bits: ClusterBits) -> Self {
        Self { clusters, data, bits }
    }

    /// Reads the planned clusters from a disk.
    ///
    /// # Errors
    /// What cannot be read.
    pub(crate) fn read(disk: &Disk, clusters: Vec<Planned>, bits: ClusterBits) -> Result<Self> {
        let len = bits.size() as usize;
        let count = clusters.iter().filter(|cluster| cluster.kind == DiffKind::Data).count();
        let mut region = Self { clusters, data: vec![0; count * len], bits };
        let mut filled = 0;
        let mut rest = &region.clusters[..];
        while let Some(start) = rest.iter().position(|cluster| cluster.kind == DiffKind::Data) {
            rest = &rest[start..];
            // Neighbours are read together.
            let goes_on = |n: &usize| {
                let next = rest.get(*n);
                next.is_some_and(|c| c.kind == DiffKind::Data && c.at == rest[0].at + *n as u64 * bits.size())
            };
            let run = (1..).take_while(goes_on).count() + 1;
            let there = (disk.size() - rest[0].at.get()).min((run * len) as u64) as usize;
            disk.read(rest[0].at, &[Segment::from_mut(&mut region.data[filled..filled + there])])?;
            filled += run * len;
            rest = &rest[run..];
        }
        Ok(region)
    }

    /// The clusters, each with its bytes if it has any.
    pub(crate) fn stored(&self) -> impl Iterator<Item = (GuestOffset, Option<&[u8]>)> {
        let mut data = self.data.chunks_exact(self.bits.size() as usize);
        self.clusters.iter().map(move |cluster| match cluster.kind {
            DiffKind::Data => (cluster.at, Some(data.next().expect("as many as data clusters"))),
            DiffKind::Zero => (cluster.at, None),
        })
    }

    /// Makes data clusters that are zeros zero clusters, or drops them where nothing lies below.
    pub(crate) fn drop_zeros(&mut self, keep_as_zero: bool) {
        let len = self.bits.size() as usize;
        let mut clusters = Vec::with_capacity(self.clusters.len());
        let (mut from, mut to) = (0, 0);
        for &cluster in &self.clusters {
            let mut kind = cluster.kind;
            if kind == DiffKind::Data {
                if is_zero(&self.data[from..from + len]) {
                    kind = DiffKind::Zero;
                } else {
                    self.data.copy_within(from..from + len, to);
                    to += len;
                }
                from += len;
            }
            if kind == DiffKind::Data || keep_as_zero {
                clusters.push(Planned { kind, ..cluster });
            }
        }
        self.data.truncate(to);
        self.clusters = clusters;
    }

    /// Its checksum; `None` when nothing is stored.
    pub(crate) fn sum(&self) -> Option<RegionSum> {
        let first = self.clusters.first()?;
        let mut hash = Sha256::new();
        for (at, data) in self.stored() {
            hash.update(at.get().to_le_bytes());
            hash.update([u8::from(data.is_some())]);
            hash.update(data.unwrap_or_default());
        }
        Some(RegionSum { start: first.at.get() / REGION_BYTES * REGION_BYTES, sha256: Digest::of(hash) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn region(kinds: &[DiffKind], fills: &[u8]) -> Region {
        let at = |number: usize| GuestOffset::new(number as u64 * 512);
        let clusters =
            kinds.iter().enumerate().map(|(number, &kind)| Planned { at: at(number), kind }).collect();
        let data = fills.iter().flat_map(|&fill| vec![fill; 512]).collect();
        Region::new(clusters, data, ClusterBits::MIN)
    }

    #[test]
    fn zeros_are_found_and_kept_or_dropped() {
        use DiffKind::{Data, Zero};
        let kinds = [Data, Zero, Data, Data];
        let mut kept = region(&kinds, &[0, 5, 0]);
        kept.drop_zeros(true);
        assert_eq!(kept.clusters.iter().map(|c| c.kind).collect::<Vec<_>>(), [Zero, Zero, Data, Zero]);
        assert_eq!(kept.data, [5; 512]);
        let mut dropped = region(&kinds, &[0, 5, 0]);
        dropped.drop_zeros(false);
        assert_eq!(
            dropped.stored().map(|(at, data)| (at.get(), data.is_some())).collect::<Vec<_>>(),
            [(1024, true)]
        );
    }

    #[test]
    fn the_sum_depends_on_place_kind_and_bytes() {
        use DiffKind::{Data, Zero};
        let sums = [
            region(&[Data], &[1]).sum(),
            region(&[Data], &[2]).sum(),
            region(&[Zero], &[]).sum(),
            region(&[Zero, Zero], &[]).sum(),
            region(&[], &[]).sum(),
        ];
        for (number, one) in sums.iter().enumerate() {
            assert!(sums[..number].iter().all(|other| other != one), "{number}");
        }
    }
}
