//! Which pages are in the store already, and where.
//!
//! Two ways to find out: the page at the same frame of the guest's last snapshot (no lock, and most pages of a periodic
//! snapshot end there), then a table of all hashes, which the writer's threads share and add to.
//!
//! Invariants: a place is given for a page only if its object is kept in as many copies as the page's class asks for, each
//! beside a copy of the new snapshot's metadata; what a critical page finds is in an object of critical pages.

use std::collections::HashMap;
use std::collections::hash_map::Entry as MapEntry;

use parking_lot::Mutex;

use super::info::{Info, MAX_OBJECTS, ObjectUse};
use super::name::ObjectKind;
use super::object::{self, Hash};
use super::pages::{Content, PageNumber, Pages, Place};
use super::place::Share;
use super::survey::Survey;
use super::{Listed, Vault, metadata};
use crate::class::PageClass;

/// Tables, so that threads seldom wait for one another; a power of two.
const SHARDS: usize = 16;
/// Pages of older snapshots that are remembered, some 200 MiB of tables; beyond it pages are stored again.
const MAX_OLDER_PAGES: usize = 4 << 20;

/// Hashes with their places, by one class.
#[derive(Debug, Default)]
struct Table {
    shards: [Mutex<HashMap<Hash, Place>>; SHARDS],
}

impl Table {
    fn shard(&self, hash: &Hash) -> &Mutex<HashMap<Hash, Place>> {
        &self.shards[usize::from(hash[15]) % SHARDS]
    }
}

/// What became of a page that was asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Found {
    /// It is there.
    At(Place),
    /// It is not: whoever asked stores it at the place offered.
    New,
}

/// What is known of the pages in the store.
#[derive(Debug, Default)]
pub(super) struct Known {
    critical: Table,
    clean: Table,
    last: Option<Last>,
    /// Objects that places lead to, after the two of the new snapshot.
    pub(super) older: Vec<ObjectUse>,
    /// The guest's last snapshot.
    pub(super) parent: Option<super::SnapshotId>,
}

/// The guest's last snapshot.
#[derive(Debug)]
struct Last {
    pages: Pages,
    /// `[its object]`: index among the new snapshot's objects, kind, and `[extent]` the index of the first hash.
    objects: Vec<Option<LastObject>>,
}

#[derive(Debug)]
struct LastObject {
    index: u16,
    kind: ObjectKind,
    first: Vec<u32>,
    hashes: Vec<Hash>,
}

/// Objects of the new snapshot itself, which come first in its table.
pub(super) const OWN_OBJECTS: usize = 2;

/// Where the new snapshot goes.
#[derive(Clone, Copy, Debug)]
pub(super) struct Shares<'a> {
    pub(super) critical: &'a [Share],
    pub(super) clean_copies: u8,
}

impl Known {
    /// What older snapshots have, those of `guest` first, as far as it may be used by one that goes to `shares`.
    pub(super) fn load(
        vault: &Vault,
        (survey, listed): (&Survey, &[Listed]),
        info: &Info,
        shares: Shares<'_>,
    ) -> Self {
        let mut known = Self::default();
        let all: Vec<&Info> = listed.iter().filter_map(|listed: &Listed| listed.info.as_ref().ok()).collect();
        let (own, others): (Vec<&Info>, Vec<&Info>) =
            all.into_iter().partition(|other| other.guest == info.guest);
        let last = own.first().filter(|last| last.layout == info.layout).copied();
        let mut pages = 0;
        let mut last_objects = Vec::new();
        if let Some(last) = last {
            last_objects.resize_with(last.objects.len(), || None);
        }
        for (of, object) in objects(&own, &others) {
            let seen = known.older.iter().any(|older| older.name == object.name);
            if seen || known.older.len() + OWN_OBJECTS >= MAX_OBJECTS || pages > MAX_OLDER_PAGES {
                continue;
            }
            let Some(loaded) = known.add(vault, survey, object, shares) else { continue };
            pages += loaded.hashes.len();
            if let Some(last) = last.filter(|last| std::ptr::eq(*last, of)) {
                let index = last.objects.iter().position(|other| other.name == object.name);
                last_objects[index.expect("it came from this table")] = Some(loaded);
            }
        }
        known.parent = last.map(|last| last.id);
        known.last = last.and_then(|last| {
            let name = super::ObjectName { owner: last.id, kind: ObjectKind::Metadata };
            let read = survey.first_good(vault, name, |reader| metadata::Outline::read(last.id, reader));
            Some(Last { pages: read.ok()?.pages, objects: last_objects })
        });
        known
    }

    /// Adds the pages of an object, if they may be used.
    fn add(
        &mut self,
        vault: &Vault,
        survey: &Survey,
        object: ObjectUse,
        shares: Shares<'_>,
    ) -> Option<LastObject> {
        let copies = usable_copies(survey, object, shares)?;
        let read = |reader: &dyn super::ObjectReader| {
            Ok((object::contents(object.name, reader)?, object::hashes(object.name, reader)?))
        };
        let (contents, hashes) = survey.first_good(vault, object.name, read).ok()?;
        let mut first = Vec::with_capacity(contents.extents.len());
        let mut count = 0;
        for extent in &contents.extents {
            first.push(count);
            count += u32::from(extent.pages);
        }
        if count as usize != hashes.len() {
            return None;
        }
        let index = (OWN_OBJECTS + self.older.len()) as u16;
        self.older.push(ObjectUse { copies, ..object });
        let table = self.table(object.name.kind);
        for (extent, (start, place)) in first.iter().zip(&contents.extents).enumerate() {
            for slot in 0..place.pages {
                let hash = hashes[*start as usize + usize::from(slot)];
                let place = Place { object: index, extent: extent as u32, slot };
                table.shard(&hash).lock().entry(hash).or_insert(place);
            }
        }
        Some(LastObject { index, kind: object.name.kind, first, hashes })
    }

    fn table(&self, kind: ObjectKind) -> &Table {
        if kind == ObjectKind::Critical { &self.critical } else { &self.clean }
    }

    /// Where the guest's last snapshot has these bytes, if it has them at this page.
    pub(super) fn at_same_page(&self, page: PageNumber, class: PageClass, hash: &Hash) -> Option<Place> {
        let last = self.last.as_ref()?;
        let Content::At(place) = last.pages.get(page).content else { return None };
        let object = last.objects.get(usize::from(place.object))?.as_ref()?;
        let fits = class == PageClass::Clean || object.kind == ObjectKind::Critical;
        let index = *object.first.get(place.extent as usize)? as usize + usize::from(place.slot);
        let same = fits && object.hashes.get(index)? == hash;
        same.then_some(Place { object: object.index, ..place })
    }

    /// Where a page of `class` with this hash is; or, when it is nowhere, notes that it is at what `offer` gives.
    pub(super) fn find_or_claim(
        &self,
        class: PageClass,
        hash: &Hash,
        offer: impl FnOnce() -> Option<Place>,
    ) -> Found {
        if class == PageClass::Clean
            && let Some(place) = self.critical.shard(hash).lock().get(hash)
        {
            return Found::At(*place);
        }
        let table = if class == PageClass::Critical { &self.critical } else { &self.clean };
        match table.shard(hash).lock().entry(*hash) {
            MapEntry::Occupied(entry) => Found::At(*entry.get()),
            MapEntry::Vacant(entry) => {
                if let Some(place) = offer() {
                    entry.insert(place);
                }
                Found::New
            }
        }
    }
}

/// Objects that snapshots use, each with a snapshot that does; those of the guest's newest first.
fn objects<'a>(own: &[&'a Info], others: &[&'a Info]) -> impl Iterator<Item = (&'a Info, ObjectUse)> {
    let infos: Vec<&Info> = own.iter().chain(others).copied().collect();
    infos.into_iter().flat_map(|info| info.objects.iter().map(move |object| (info, *object)))
}

/// How many copies of an object a snapshot that goes to `shares` could count on; `None` when they are too few.
fn usable_copies(survey: &Survey, object: ObjectUse, shares: Shares<'_>) -> Option<u8> {
    let there = |share: &Share| {
        let copies = survey.copies(object.name).iter();
        let whole = copies.filter(|copy| copy.home == share.home && copy.len == object.len);
        whole.map(|copy| copy.copies.min(share.copies)).sum::<u8>()
    };
    let copies: u8 = shares.critical.iter().map(there).sum();
    let all: u8 = shares.critical.iter().map(|share| share.copies).sum();
    match object.name.kind {
        ObjectKind::Critical => (copies >= all).then_some(all),
        ObjectKind::Clean => (shares.clean_copies > 0 && copies >= shares.clean_copies).then_some(copies),
        ObjectKind::Metadata => None,
    }
}
