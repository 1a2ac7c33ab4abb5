//! Which pages are in the store already, and where.
//!
//! Two ways to find out: the page at the same frame of the guest's last snapshot (no lock, and most pages of a periodic
//! snapshot end there), then a table of all hashes, which the writer's threads share and add to.
//!
//! Invariants: a place is given for a page only if its object is kept in as many copies as the page's class asks for, each
//! beside a copy of the new snapshot's metadata; what a critical page finds is in an object of critical pages.

use std::collections::hash_map::Entry as MapEntry;
use std::collections::{BTreeMap, BTreeSet, HashMap};

use parking_lot::Mutex;

use super::bytes::Malformed;
use super::info::{Info, MAX_OBJECTS, ObjectUse};
use super::metadata::Outline;
use super::name::{ObjectId, ObjectKind};
use super::object::{self, Hash, TAIL};
use super::pages::{Content, PageNumber, Pages, Place};
use super::place::Share;
use super::survey::Survey;
use super::{Listed, Vault};
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
#[derive(Debug)]
pub(super) struct Known {
    critical: Table,
    clean: Table,
    last: Option<Last>,
    /// Objects of older snapshots that places lead to, by their numbers in the new snapshot.
    pub(super) older: BTreeMap<u16, ObjectUse>,
    /// The numbers of the new snapshot's own objects, by kind.
    pub(super) own: [u16; 2],
    /// The guest's last snapshot, if the new one builds on it.
    pub(super) parent: Option<super::SnapshotId>,
    /// The new snapshot's, if it comes to need older objects.
    pub(super) step: u32,
}

/// The guest's last snapshot.
#[derive(Debug)]
struct Last {
    pages: Pages,
    /// `[number]`
    objects: Vec<Option<LastObject>>,
}

#[derive(Debug)]
struct LastObject {
    kind: ObjectKind,
    /// `[extent]`: the index of its first hash.
    first: Vec<u32>,
    hashes: Vec<Hash>,
}

/// Where the new snapshot goes.
#[derive(Clone, Copy, Debug)]
pub(super) struct Shares<'a> {
    pub(super) critical: &'a [Share],
    pub(super) clean_copies: u8,
}

impl Known {
    /// Nothing.
    pub(super) fn nothing() -> Self {
        Self {
            critical: Table::default(),
            clean: Table::default(),
            last: None,
            older: BTreeMap::new(),
            own: [0, 1],
            parent: None,
            step: 0,
        }
    }

    /// What older snapshots have, those of `guest` first, as far as it may be used by one that goes to `shares`.
    pub(super) fn load(
        vault: &Vault,
        (survey, listed): (&Survey, &[Listed]),
        info: &Info,
        (shares, full_every): (Shares<'_>, u32),
    ) -> Self {
        let mut known = Self::nothing();
        let all: Vec<&Info> = listed.iter().filter_map(|listed: &Listed| listed.info.as_ref().ok()).collect();
        let (own, others): (Vec<&Info>, Vec<&Info>) =
            all.into_iter().partition(|other| other.guest == info.guest);
        let parent = own.first().copied();
        known.step = parent.map_or(1, |parent| parent.step.saturating_add(1));
        if full_every > 0 && known.step >= full_every {
            return known;
        }
        let outline = match parent.map(|parent| Outline::read_whole(vault, survey, parent.id)).transpose() {
            Ok(outline) => outline,
            // Pages of its tables would be found again, and be lost again.
            Err(tried) => {
                let title = parent.map(Info::title).unwrap_or_default();
                let tried = tried.join("; ");
                tracing::warn!("{title}: its metadata is lost, so nothing of it is shared; tried {tried}");
                return known;
            }
        };
        let mut numbers = Numbers::after(parent);
        known.own = [numbers.take(), numbers.take()];
        let mut pages = 0;
        let (mut last_objects, mut seen) = (Vec::new(), BTreeSet::new());
        let looked_at = match parent {
            Some(parent) if full_every > 0 => vec![parent],
            _ => own.iter().chain(&others).copied().collect(),
        };
        for object in objects(looked_at) {
            if !seen.insert(object.name)
                || known.older.len() + known.own.len() >= MAX_OBJECTS
                || pages > MAX_OLDER_PAGES
            {
                continue;
            }
            let inherited = numbers.inherited.get(&object.name).copied();
            let number = inherited.unwrap_or_else(|| numbers.free());
            let Some(loaded) = known.add(vault, survey, (number, object), shares) else { continue };
            pages += loaded.hashes.len();
            if inherited.is_none() {
                numbers.take();
            } else {
                let index = usize::from(number);
                last_objects.resize_with(last_objects.len().max(index + 1), || None);
                last_objects[index] = Some(loaded);
            }
        }
        known.parent = parent.map(|parent| parent.id);
        let outline = outline.filter(|outline| outline.info.layout == info.layout);
        known.last = outline.map(|outline| Last { pages: outline.pages, objects: last_objects });
        known
    }

    /// Adds the pages of an object, if they may be used.
    fn add(
        &mut self,
        vault: &Vault,
        survey: &Survey,
        (number, object): (u16, ObjectUse),
        shares: Shares<'_>,
    ) -> Option<LastObject> {
        let (like, copies) = usable_copies(vault, survey, object, shares)?;
        let read = |reader: &dyn vmstrata_repo::ObjectReader| {
            if object::ends(object.name, reader)? != like {
                return Err(Malformed("it is not like the copies that are counted"));
            }
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
        self.older.insert(number, ObjectUse { copies, ..object });
        let table = self.table(object.name.kind);
        for (extent, (start, place)) in first.iter().zip(&contents.extents).enumerate() {
            for slot in 0..place.pages {
                let hash = hashes[*start as usize + usize::from(slot)];
                let place = Place { object: number, extent: extent as u32, slot };
                table.shard(&hash).lock().entry(hash).or_insert(place);
            }
        }
        Some(LastObject { kind: object.name.kind, first, hashes })
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
        same.then_some(place)
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

/// Numbers for the objects of a new snapshot.
struct Numbers {
    /// Those of its parent's objects, which keep them: what is said of unchanged pages stays the same bytes.
    inherited: HashMap<ObjectId, u16>,
    /// All others, in order.
    free: std::vec::IntoIter<u16>,
}

impl Numbers {
    fn after(parent: Option<&Info>) -> Self {
        let taken: BTreeMap<u16, ObjectUse> = parent.map(|parent| parent.objects.clone()).unwrap_or_default();
        let free: Vec<u16> = (0..=u16::MAX).filter(|number| !taken.contains_key(number)).collect();
        let inherited = taken.into_iter().map(|(number, object)| (object.name, number)).collect();
        Self { inherited, free: free.into_iter() }
    }

    /// The first that no object has.
    fn free(&self) -> u16 {
        self.free.as_slice()[0]
    }

    /// Gives it to an object. There are enough: a snapshot has at most [`MAX_OBJECTS`], and so has its parent.
    fn take(&mut self) -> u16 {
        self.free.next().expect("there are more numbers than objects of two snapshots")
    }
}

/// Objects that snapshots use, of each the newest first.
fn objects(infos: Vec<&Info>) -> impl Iterator<Item = ObjectUse> {
    infos.into_iter().flat_map(|info| {
        let mut objects: Vec<ObjectUse> = info.objects.values().copied().collect();
        objects.sort_by_key(|object| std::cmp::Reverse(object.name));
        objects
    })
}

/// How many copies of an object a snapshot that goes to `shares` could count on, and what those end with: they have the
/// same pages. `None` when they are too few.
fn usable_copies(
    vault: &Vault,
    survey: &Survey,
    object: ObjectUse,
    shares: Shares<'_>,
) -> Option<([u8; TAIL], u8)> {
    let mut alike: BTreeMap<[u8; TAIL], u8> = BTreeMap::new();
    for share in shares.critical {
        let Some(copy) = survey.copies(object.name).iter().find(|copy| copy.repository == share.repository)
        else {
            continue;
        };
        let reader = vault.repository(copy.repository).open(&object.name.into()).ok();
        if let Some(ends) = reader.and_then(|reader| object::ends(object.name, reader.as_ref()).ok()) {
            *alike.entry(ends).or_default() += copy.copies.min(share.copies);
        }
    }
    let (ends, copies) = alike.into_iter().max_by_key(|(_, copies)| *copies)?;
    let all: u8 = shares.critical.iter().map(|share| share.copies).sum();
    let copies = match object.name.kind {
        ObjectKind::Critical => (copies >= all).then_some(all),
        ObjectKind::Clean => (shares.clean_copies > 0 && copies >= shares.clean_copies).then_some(copies),
        ObjectKind::Metadata => None,
    };
    Some((ends, copies?))
}
