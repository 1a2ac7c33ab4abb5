//! Which pages of objects snapshots need.

use std::collections::BTreeMap;

use super::error::{Result, VaultError};
use super::extent::MAX_PAGES;
use super::info::{Info, ObjectUse};
use super::metadata::Outline;
use super::name::{ObjectId, ObjectKind, SnapshotId};
use super::pages::Place;
use super::survey::Survey;
use super::{Listed, Vault};

/// Pages of one object: for each extent a bit for every place in it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct PageSet(BTreeMap<u32, u64>);

impl PageSet {
    /// Adds the places of an extent that have a bit.
    pub(super) fn add(&mut self, extent: u32, places: u64) {
        if places != 0 {
            *self.0.entry(extent).or_default() |= places;
        }
    }

    pub(super) fn add_all(&mut self, other: &Self) {
        other.extents().for_each(|(extent, places)| self.add(extent, places));
    }

    /// The places of an extent, a bit for each.
    pub(super) fn places(&self, extent: u32) -> u64 {
        self.0.get(&extent).copied().unwrap_or(0)
    }

    /// Extents that have a page, each with its places.
    pub(super) fn extents(&self) -> impl Iterator<Item = (u32, u64)> + '_ {
        self.0.iter().map(|(extent, places)| (*extent, *places))
    }

    pub(super) fn has_all(&self, other: &Self) -> bool {
        other.extents().all(|(extent, places)| places & !self.places(extent) == 0)
    }
}

/// Bits of `len` places from `slot` on.
pub(super) fn places(slot: u8, len: u64) -> u64 {
    debug_assert!(len > 0 && u64::from(slot) + len <= MAX_PAGES as u64);
    (u64::MAX >> (MAX_PAGES as u64 - len)) << slot
}

/// Pages by the object that they lie in.
pub(super) type Needs = BTreeMap<ObjectId, PageSet>;

/// What a snapshot needs whose pages, those of its tables too, are `stored` there; each place with how many follow it.
pub(super) fn needs(info: &Info, stored: impl Iterator<Item = (Place, u64)>) -> Needs {
    let none = |object: &ObjectUse| (object.name, PageSet::default());
    let mut needs: Needs = info.objects.values().map(none).collect();
    for (place, len) in stored {
        let name = info.objects[&place.object].name;
        needs.entry(name).or_default().add(place.extent, places(place.slot, len));
    }
    needs
}

impl Vault {
    /// What a snapshot needs, from any copy of its metadata.
    ///
    /// # Errors
    /// Each copy with what was wrong.
    pub(super) fn needs_of(&self, survey: &Survey, id: SnapshotId) -> Result<Needs, Vec<String>> {
        let (outline, _) = Outline::read(self, survey, id)?;
        Ok(needs(&outline.info, outline.places()))
    }

    /// What those snapshots need together of the objects that `is_asked`.
    ///
    /// # Errors
    /// [`VaultError::NeedsUnknown`] names all of which no copy of the metadata can be read.
    pub(super) fn needs_of_all(
        &self,
        survey: &Survey,
        listed: &[Listed],
        is_asked: impl Fn(ObjectId) -> bool,
    ) -> Result<Needs> {
        let (mut all, mut unknown) = (Needs::new(), Vec::new());
        for Listed { id, info, .. } in listed {
            let uses =
                info.as_ref().is_ok_and(|info| info.objects.values().any(|object| is_asked(object.name)));
            if info.is_ok() && !uses {
                continue;
            }
            match self.needs_of(survey, *id) {
                Ok(needs) => {
                    for (name, pages) in needs.iter().filter(|(name, _)| is_asked(**name)) {
                        all.entry(*name).or_default().add_all(pages);
                    }
                }
                Err(_) => unknown.push(ObjectId { owner: *id, kind: ObjectKind::Metadata }),
            }
        }
        if unknown.is_empty() { Ok(all) } else { Err(VaultError::NeedsUnknown(unknown)) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_are_bits_up_to_the_last_of_an_extent() {
        assert_eq!(
            (places(0, 1), places(3, 2), places(63, 1), places(0, 64)),
            (1, 0b11000, 1 << 63, u64::MAX)
        );
    }

    #[test]
    fn sets_add_up_and_know_what_they_lack() {
        let (mut one, mut other) = (PageSet::default(), PageSet::default());
        one.add(7, 0b11);
        other.add(7, 0b100);
        other.add(9, 1);
        assert!(!one.has_all(&other) && one.has_all(&PageSet::default()));
        one.add_all(&other);
        assert!(one.has_all(&other) && !other.has_all(&one));
        assert_eq!((one.places(7), one.places(8)), (0b111, 0));
    }
}
