//! One word of the map: where the newest frozen version of one unit of the disk lies, or that its parts lie apart.
//!
//! ```text
//!   63           48 47  46 45                                    0
//!  ┌───────────────┬──────┬───────────────────────────────────────┐
//!  │  layer index  │ kind │  host offset, in units of the level   │
//!  └───────────────┴──────┴───────────────────────────────────────┘
//! ```
//!
//! The layer is on top so that of two words for one unit the larger is the newer: layers can be merged into a
//! map in any order, and by any number of threads, with `fetch_max`. The word 0 says that no layer has the
//! unit. (sQemu §5.2 keeps the same 16-bit index inside the L2 entry; ours stays outside the standard tables.)

use vmstrata_types::{ClusterBits, HostOffset, LayerIndex};

const LAYER_SHIFT: u32 = 48;
const KIND_SHIFT: u32 = 46;
const HOST_MASK: u64 = (1 << KIND_SHIFT) - 1;
/// What stands in place of an offset in words of kind 0.
const DAMAGED: u64 = 1;
const SPLIT: u64 = 2;

/// A packed map word; see the module documentation for its layout.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct MapEntry(u64);

/// What a map word says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mapping {
    /// No frozen qcow2 layer has the unit.
    Hole,
    /// The layer's L2 entry is damaged: reading the unit is an error.
    Damaged(LayerIndex),
    /// The unit's bytes lie in the layer's file at this offset.
    Data(LayerIndex, HostOffset),
    /// The layer says that the unit reads as zeros.
    Zero(LayerIndex),
    /// The unit is in a compressed cluster; the layer's own L2 table says where.
    Compressed(LayerIndex),
}

impl MapEntry {
    pub(crate) const HOLE: Self = Self(0);

    pub(crate) const fn from_word(word: u64) -> Self {
        Self(word)
    }

    pub(crate) const fn word(self) -> u64 {
        self.0
    }

    const fn pack(layer: LayerIndex, kind: u64, host: u64) -> Self {
        Self((layer.get() as u64) << LAYER_SHIFT | kind << KIND_SHIFT | host)
    }

    /// Data at `host`, which must be a multiple of the unit.
    ///
    /// An offset beyond what 46 bits of units can say exists in no file: it becomes [`Mapping::Damaged`].
    pub(crate) const fn data(layer: LayerIndex, host: HostOffset, unit: ClusterBits) -> Self {
        let units = host.get() >> unit.get();
        if units > HOST_MASK { Self::damaged(layer) } else { Self::pack(layer, 1, units) }
    }

    pub(crate) const fn zero(layer: LayerIndex) -> Self {
        Self::pack(layer, 2, 0)
    }

    pub(crate) const fn compressed(layer: LayerIndex) -> Self {
        Self::pack(layer, 3, 0)
    }

    pub(crate) const fn damaged(layer: LayerIndex) -> Self {
        Self::pack(layer, 0, DAMAGED)
    }

    /// In the first level of a map: the layer speaks for a part of the unit, and the second level says who has what.
    pub(crate) const fn split(layer: LayerIndex) -> Self {
        Self::pack(layer, 0, SPLIT)
    }

    /// Whether the second level answers for the unit.
    pub(crate) const fn is_split(self) -> bool {
        self.0 & ((1 << LAYER_SHIFT) - 1) == SPLIT
    }

    /// The layer that says it, [`LayerIndex::BASE`] for a hole.
    pub(crate) const fn layer(self) -> LayerIndex {
        LayerIndex::new((self.0 >> LAYER_SHIFT) as u16)
    }

    /// The same where the layer that says it is `by` places further down.
    ///
    /// # Panics
    /// In tests, where there are not so many layers below it.
    pub(crate) const fn lowered(self, by: u16) -> Self {
        debug_assert!(self.layer().get() >= by);
        Self(self.0 - ((by as u64) << LAYER_SHIFT))
    }

    /// The same, said by another layer.
    pub(crate) const fn of_layer(self, layer: LayerIndex) -> Self {
        Self(self.0 & ((1 << LAYER_SHIFT) - 1) | (layer.get() as u64) << LAYER_SHIFT)
    }

    /// The word of the unit `by` further on in a run that begins with this one: data moves along, other kinds repeat.
    pub(crate) const fn advanced(self, by: u64) -> Self {
        if self.0 >> KIND_SHIFT & 3 == 1 { Self(self.0 + by) } else { self }
    }

    /// Unpacks the word; `unit` is that of its level. A split word has no mapping of its own: who does not ask the second level
    /// reads an error.
    pub(crate) const fn mapping(self, unit: ClusterBits) -> Mapping {
        let layer = self.layer();
        match self.0 >> KIND_SHIFT & 3 {
            1 => Mapping::Data(layer, HostOffset::new((self.0 & HOST_MASK) << unit.get())),
            2 => Mapping::Zero(layer),
            3 => Mapping::Compressed(layer),
            _ if self.0 == 0 => Mapping::Hole,
            _ => Mapping::Damaged(layer),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_kind_survives_packing() {
        let unit = ClusterBits::MIN;
        for depth in [0, 1, 65_534] {
            let layer = LayerIndex::new(depth);
            let host = HostOffset::new(HOST_MASK << 9);
            assert_eq!(MapEntry::data(layer, host, unit).mapping(unit), Mapping::Data(layer, host));
            assert_eq!(MapEntry::zero(layer).mapping(unit), Mapping::Zero(layer));
            assert_eq!(MapEntry::compressed(layer).mapping(unit), Mapping::Compressed(layer));
            assert_eq!(MapEntry::damaged(layer).mapping(unit), Mapping::Damaged(layer));
        }
        assert_eq!(MapEntry::HOLE.mapping(unit), Mapping::Hole);
    }

    #[test]
    fn only_split_words_are_split() {
        let (unit, layer) = (ClusterBits::MIN, LayerIndex::new(2));
        let split = MapEntry::split(layer);
        assert!(split.is_split() && MapEntry::split(LayerIndex::BASE).is_split());
        assert_eq!((split.layer(), split.mapping(unit)), (layer, Mapping::Damaged(layer)));
        let at_two = MapEntry::data(layer, HostOffset::new(2 << 9), unit);
        let others = [at_two, MapEntry::zero(layer), MapEntry::damaged(layer), MapEntry::HOLE];
        assert!(others.iter().all(|word| !word.is_split()));
    }

    #[test]
    fn a_newer_layer_always_wins_the_maximum() {
        let unit = ClusterBits::DEFAULT;
        let old = MapEntry::compressed(LayerIndex::new(6));
        let new = MapEntry::data(LayerIndex::new(7), HostOffset::ZERO, unit);
        assert!(new > old && MapEntry::damaged(LayerIndex::BASE) > MapEntry::HOLE);
        assert!(new > MapEntry::split(LayerIndex::new(6)) && MapEntry::split(LayerIndex::new(8)) > new);
    }

    #[test]
    fn an_offset_no_file_can_have_is_damage() {
        let host = HostOffset::new((HOST_MASK + 1) << 9);
        let layer = LayerIndex::new(3);
        assert_eq!(
            MapEntry::data(layer, host, ClusterBits::MIN).mapping(ClusterBits::MIN),
            Mapping::Damaged(layer)
        );
    }
}
