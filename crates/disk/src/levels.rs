//! The two levels of a map: words for clusters, and words for parts of them where a layer tells parts apart.
//!
//! ```text
//!   first level    │ a │ split │ b │ hole │     a word a unit, the smallest cluster of the chain
//!   second level       │a│b│b│a│                a word a fine unit, the smallest cluster or subcluster
//! ```
//!
//! Both levels are flat over the disk, and both say of each place what the newest layer there says. A word of the first level is
//! split where that layer speaks for a part of the unit. Only then is the second level asked, and only there does it have pages, in
//! memory and on disk. So subclusters cost what they are used for, and a chain without any has one level.

use std::ops::Range;

use vmstrata_qcow2::Geometry;
use vmstrata_types::{ClusterBits, GuestOffset, GuestRange};

use crate::cache::{PAGE_SHIFT, PAGE_WORDS};
use crate::entry::{MapEntry, Mapping};

/// The words of a page.
pub(crate) type Words = [u64; PAGE_WORDS];

/// A level of a map.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Level {
    /// Words for units.
    First,
    /// Words for fine units.
    Second,
}

/// A page of a map.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct MapPage {
    pub(crate) level: Level,
    pub(crate) number: u64,
}

impl MapPage {
    /// The units, of its level, for which it has words.
    pub(crate) fn units(self) -> Range<u64> {
        self.number << PAGE_SHIFT..(self.number + 1) << PAGE_SHIFT
    }
}

/// The units of a map's levels; see the module documentation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Units {
    first: ClusterBits,
    /// At most `first`; the same if there is no second level.
    second: ClusterBits,
}

impl Units {
    /// # Panics
    /// When the fine unit is the larger one.
    pub(crate) fn new(first: ClusterBits, second: ClusterBits) -> Self {
        assert!(second <= first, "a part is no larger than the whole");
        Self { first, second }
    }

    /// Those of the map of layers with these tables.
    pub(crate) fn of_tables(tables: impl Iterator<Item = Geometry>) -> Self {
        let largest = Self { first: ClusterBits::MAX, second: ClusterBits::MAX };
        tables.fold(largest, |units, table| Self {
            first: units.first.min(table.cluster_bits),
            second: units.second.min(table.unit()),
        })
    }

    /// The smallest part of a disk that has a word.
    pub(crate) fn finest(self) -> ClusterBits {
        self.second
    }

    /// The unit of a level; `None` if there is no such level.
    pub(crate) fn get(self, level: Level) -> Option<ClusterBits> {
        self.levels().find(|other| *other == level).map(|level| self.of(level))
    }

    /// The unit of a level that there is.
    #[inline]
    pub(crate) fn of(self, level: Level) -> ClusterBits {
        match level {
            Level::First => self.first,
            Level::Second => self.second,
        }
    }

    /// The levels that there are.
    pub(crate) fn levels(self) -> impl Iterator<Item = Level> {
        let has_second = self.second < self.first;
        [Level::First].into_iter().chain(has_second.then_some(Level::Second))
    }

    /// How many pages of a level cover a disk of `size` bytes. Those of the second level lie below all words of the first's, also
    /// where a layer that is hidden goes on past the end.
    pub(crate) fn pages(self, level: Level, size: u64) -> u64 {
        let first = size.div_ceil(self.first.size()).div_ceil(PAGE_WORDS as u64);
        match level {
            Level::First => first,
            Level::Second if self.second < self.first => self.below(first).start,
            Level::Second => 0,
        }
    }

    /// The page that holds the word for `at`, and which word.
    #[inline]
    pub(crate) fn page_of(self, level: Level, at: GuestOffset) -> (MapPage, usize) {
        let unit = at.get() >> self.of(level).get();
        (MapPage { level, number: unit >> PAGE_SHIFT }, unit as usize & (PAGE_WORDS - 1))
    }

    /// The part of the disk that a page speaks for.
    pub(crate) fn range(self, page: MapPage) -> GuestRange {
        let bits = self.of(page.level).get();
        GuestRange::new(GuestOffset::new(page.units().start << bits), (PAGE_WORDS as u64) << bits)
    }

    /// The page of the first level over one of words for `unit`, and the words there for the same part of the disk: a part of
    /// one word at least.
    pub(crate) fn over(self, unit: ClusterBits, number: u64) -> (MapPage, Range<usize>) {
        let bits = self.first.get() - unit.get();
        let first = number << PAGE_SHIFT >> bits;
        let slot = first as usize & (PAGE_WORDS - 1);
        let page = MapPage { level: Level::First, number: first >> PAGE_SHIFT };
        (page, slot..slot + (PAGE_WORDS >> bits).max(1))
    }

    /// The pages of the second level below one of the first.
    pub(crate) fn below(self, number: u64) -> Range<u64> {
        let bits = self.first.get() - self.second.get();
        number << bits..(number + 1) << bits
    }

    /// Whether a map of these units has words for units of `unit`, or makes them of its own ([`Units::words`]).
    pub(crate) fn answer_for(self, unit: ClusterBits) -> bool {
        unit == self.first || unit <= self.second
    }

    /// Page `number` of words for `unit`, from the pages of a map of these units, which `read` gets.
    ///
    /// The second level is asked where a word of the first is split, so a place without split words needs none of its pages.
    ///
    /// # Errors
    /// Those of `read`.
    ///
    /// # Panics
    /// Unless [`Units::answer_for`] the unit.
    pub(crate) fn words<E>(
        self,
        unit: ClusterBits,
        number: u64,
        mut read: impl FnMut(MapPage) -> Result<Words, E>,
    ) -> Result<Words, E> {
        assert!(self.answer_for(unit), "a map has no words for parts that it does not tell apart");
        let (over, slots) = self.over(unit, number);
        let words = read(over)?;
        if unit == self.first || !is_split(&words[slots]) {
            return Ok(parts(&words, self.first, unit, number));
        }
        let bits = self.second.get() - unit.get();
        let page = MapPage { level: Level::Second, number: number >> bits };
        Ok(parts(&read(page)?, self.second, unit, number))
    }
}

/// Whether one of the words is split.
pub(crate) fn is_split(words: &[u64]) -> bool {
    words.iter().any(|word| MapEntry::from_word(*word).is_split())
}

/// Page `number` of words for `unit`, where `words` for units of `from` speak for them as wholes: either the page is a part of
/// theirs, or a part of one word.
fn parts(words: &Words, from: ClusterBits, unit: ClusterBits, number: u64) -> Words {
    let bits = from.get() - unit.get();
    if bits == 0 {
        return *words;
    }
    let first = number << PAGE_SHIFT;
    std::array::from_fn(|slot| {
        let part = first + slot as u64;
        let word = words[(part >> bits) as usize & (PAGE_WORDS - 1)];
        let within = (part & ((1 << bits) - 1)) << unit.get();
        match MapEntry::from_word(word).mapping(from) {
            Mapping::Data(layer, host) => MapEntry::data(layer, host + within, unit).word(),
            _ => word,
        }
    })
}
