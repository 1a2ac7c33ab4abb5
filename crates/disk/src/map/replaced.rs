//! The map of a chain in which layers are merged, which changes nothing that is read: while one layer's file is being
//! written, and when others are gone.

use std::sync::Arc;

use super::FrozenMap;
use crate::cache::PAGE_WORDS;
use crate::entry::MapEntry;
use crate::error::Result;
use crate::layer::{Layer, Scratch};
use crate::levels::{Level, MapPage, Words, is_split};

impl FrozenMap {
    /// The same map, pages in memory and index included, with other objects for the layers from `first` on.
    ///
    /// # Panics
    /// With more objects than there are layers.
    pub(crate) fn with_layers(&self, first: usize, others: impl IntoIterator<Item = Arc<Layer>>) -> Self {
        let mut layers: Vec<Arc<Layer>> = self.layers().cloned().collect();
        for (number, layer) in others.into_iter().enumerate() {
            layers[first + number] = layer;
        }
        Self { index: self.index.clone(), ..self.over_layers(layers) }
    }

    /// Makes the pages that `old` has in memory: who asks for them next should not have to wait. This is the map of its
    /// chain with others below the target, or without those that were merged into it; `below` is the map of these.
    ///
    /// What the layers above the target say is in the old pages, under higher numbers, and what those below it say in the
    /// pages of `below`: only the target's own tables are read, however long the chain. Where there are more below than before, all
    /// pages are made anew.
    ///
    /// # Errors
    /// Tables that cannot be read.
    pub(crate) fn take_over(&self, old: &Self, below: Option<&Self>) -> Result<()> {
        let is_told =
            |below: &Self| self.units.levels().all(|level| below.units.answer_for(self.units.of(level)));
        let dropped = old.layers.len().checked_sub(self.layers.len());
        let Some(dropped) = dropped.filter(|_| old.units == self.units && below.is_none_or(is_told)) else {
            // Its pages are of other places.
            return if self.has_index() { Ok(()) } else { self.build() };
        };
        let (target, lowered) = (below.map_or(0, |below| below.layers.len()), dropped as u16);
        let (mut scratch, mut words) = (Scratch::default(), [0; PAGE_WORDS]);
        for level in self.units.levels() {
            for number in 0..self.units.pages(level, self.size.min(old.size)) {
                let page = MapPage { level, number };
                if !self.cache.copy(old.pages.key(page), &mut words) || !self.may_be_asked_for(page) {
                    continue;
                }
                let merged = self.scan_page(target..target + 1, page, &mut scratch)?;
                let beneath = below.map_or(Ok([0; PAGE_WORDS]), |below| self.words_of(below, page))?;
                for (unit, word) in words.iter_mut().enumerate() {
                    let entry = MapEntry::from_word(*word);
                    let is_above = entry.layer().index() > target + dropped;
                    *word = if is_above {
                        entry.lowered(lowered).word()
                    } else {
                        merged[unit].max(beneath[unit])
                    };
                }
                self.cache.fill(self.pages.key(page), &words);
            }
        }
        Ok(())
    }

    /// Whether the page is one of the first level, or a word over it is split, as far as the first level is in memory.
    fn may_be_asked_for(&self, page: MapPage) -> bool {
        let (over, slots) = self.units.over(self.units.of(page.level), page.number);
        let mut words = [0; PAGE_WORDS];
        page.level == Level::First
            || self.cache.copy(self.pages.key(over), &mut words) && is_split(&words[slots])
    }

    /// What the map of some layers below says of a page of this one.
    fn words_of(&self, below: &Self, page: MapPage) -> Result<Words> {
        if self.units.range(page).start.get() >= below.size {
            return Ok([0; PAGE_WORDS]);
        }
        below.units.words(self.units.of(page.level), page.number, |page| below.page(page))
    }
}

#[cfg(test)]
mod tests;
