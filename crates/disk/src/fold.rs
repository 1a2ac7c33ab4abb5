//! Turning the L2 entries of one layer into entries of the map.

use std::ops::Range;
use std::sync::Arc;

use vmstrata_qcow2::{L2Entry, RawEntry, SubclusterState, Subclusters};
use vmstrata_types::{ClusterBits, GuestOffset, HostOffset, LayerIndex};

use crate::entry::{MapEntry, Mapping};
use crate::layer::Layer;
use crate::levels::{MapPage, Words};

#[derive(Debug)]
pub(crate) struct Visible {
    pub(crate) layer: Arc<Layer>,
    /// Guest offset from which on the layer, and all below it, are hidden.
    pub(crate) end: u64,
}

/// Turns L2 entries of one layer into map entries of one level.
pub(crate) struct Merge {
    pub(crate) index: LayerIndex,
    format: vmstrata_qcow2::EntryFormat,
    unit: ClusterBits,
    units_per_cluster: u64,
    file_len: u64,
}

impl Merge {
    /// `None` for a raw layer, which the map leaves to [`Mapping::Hole`].
    pub(crate) fn new(visible: &Visible, index: usize, unit: ClusterBits) -> Option<Self> {
        let index = LayerIndex::new(u16::try_from(index).expect("chains are shorter than 65,536"));
        Self::of(&visible.layer, index, unit)
    }

    /// For a layer at `index` of its chain; `None` for a raw one.
    pub(crate) fn of(layer: &Layer, index: LayerIndex, unit: ClusterBits) -> Option<Self> {
        let tables = layer.tables.as_ref()?;
        let units_per_cluster = tables.geometry.cluster_bits.size() >> unit.get();
        let file_len = layer.len_max();
        Some(Self { index, format: tables.entries, unit, units_per_cluster, file_len })
    }

    /// Puts one cluster's entries over those of a page.
    #[inline]
    pub(crate) fn put(&self, cluster: GuestOffset, raw: RawEntry, page: MapPage, words: &mut Words) {
        let units = page.units();
        let first_unit = units.start;
        for (unit, entry) in self.entries(cluster, raw).clip(units) {
            let word = &mut words[(unit - first_unit) as usize];
            *word = (*word).max(entry.word());
        }
    }

    /// The map entries of one cluster.
    #[inline]
    pub(crate) fn entries(&self, cluster: GuestOffset, raw: RawEntry) -> ClusterEntries {
        let mut states = None;
        let first = match self.format.l2(raw) {
            Ok(L2Entry::Unallocated) => MapEntry::HOLE,
            Ok(L2Entry::Zero { .. }) => MapEntry::zero(self.index),
            Ok(L2Entry::Compressed { .. }) => MapEntry::compressed(self.index),
            Ok(L2Entry::Data { host, .. }) => self.data(host),
            Ok(L2Entry::Subclusters { host, states: differ, .. }) => {
                states = Some(differ);
                host.map_or(MapEntry::HOLE, |host| self.data(host))
            }
            // An error for its reader.
            Err(_) => MapEntry::damaged(self.index),
        };
        let is_data = matches!(first.mapping(self.unit), Mapping::Data(..));
        let first_unit = cluster.get() >> self.unit.get();
        ClusterEntries {
            layer: self.index,
            first,
            step: u64::from(is_data),
            units: first_unit..first_unit + self.units_per_cluster,
            states,
        }
    }

    /// The cluster at `host`. One past the end of a file that was cut short is an error for its reader.
    #[inline]
    fn data(&self, host: HostOffset) -> MapEntry {
        if host.get() < self.file_len {
            MapEntry::data(self.index, host, self.unit)
        } else {
            MapEntry::damaged(self.index)
        }
    }
}

/// The map entries of one cluster, unit by unit: data moves along with the units, other kinds repeat. A unit of several
/// subclusters that differ is split.
pub(crate) struct ClusterEntries {
    layer: LayerIndex,
    /// Of the first unit, if it is allocated.
    first: MapEntry,
    step: u64,
    units: Range<u64>,
    /// Of a cluster whose subclusters differ.
    states: Option<Subclusters>,
}

impl ClusterEntries {
    /// Those whose units lie in `range`.
    #[inline]
    pub(crate) fn clip(self, range: Range<u64>) -> impl Iterator<Item = (u64, MapEntry)> {
        let units = self.units.start.max(range.start)..self.units.end.min(range.end);
        let per_cluster = self.units.end - self.units.start;
        let subclusters = (u64::from(Subclusters::COUNT) / per_cluster).max(1);
        units.map(move |unit| {
            let number = unit - self.units.start;
            let data = MapEntry::from_word(self.first.word() + number * self.step);
            let Some(states) = self.states else { return (unit, data) };
            let first = number * u64::from(Subclusters::COUNT) / per_cluster;
            let (state, alike) = states.run(first as u32);
            let entry = match state {
                _ if u64::from(alike) < subclusters => MapEntry::split(self.layer),
                SubclusterState::Allocated => data,
                SubclusterState::Zero => MapEntry::zero(self.layer),
                SubclusterState::Unallocated => MapEntry::HOLE,
            };
            (unit, entry)
        })
    }
}
