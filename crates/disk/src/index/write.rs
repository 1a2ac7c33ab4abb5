//! Writing the index of one layer: what the layer changed, and pointers to the rest.
//!
//! A delta index adds a record of the layer to those of the index below. A full one has leaves for what the layer and
//! those records changed, and the path to them.

use std::collections::BTreeSet;
use std::hash::{BuildHasher as _, RandomState};
use std::ops::Range;
use std::os::unix::ffi::OsStrExt as _;
use std::path::Path;
use std::sync::Arc;

use vmstrata_qcow2::index::{
    BackingFormat, ChainId, Home, LEAF_WORDS, LayerRecord, MAX_LEAVES, PAGE_LEN, Page, PagePointer,
    RecordBacking, RecordTables, Root, Stamp, pack,
};
use vmstrata_store::Gate;
use vmstrata_types::{ClusterBits, HostOffset, LayerIndex};

use super::delta::{Delta, adds_delta};
use super::digest::{Content, digest, stable_mtime};
use super::leaves::{Merger, WINDOW, units_of, windows};
use super::place::{Place, sidecar_for};
use super::tree::Tree;
use super::{Index, IndexLayer};
use crate::chain::{Qcow2Head, Top, open_layer};
use crate::error::{ErrorKind, IoContext as _, Result};
use crate::layer::{Format, Tables};
use crate::levels::{Level, Units, Words, is_split};
use crate::opener::{Opener, Role};
use crate::times;

/// What of a layer's file goes into the layer table, and how the index of the layer above will call it.
///
/// The file must be locked against writers, or whoever calls must know that there is none. Waits up to 20 ms if the file
/// was changed just now.
///
/// # Errors
/// Tables that cannot be read, or a file that a process was writing when it was last seen.
pub(super) fn describe(top: &Top, home: Home, below: Option<&IndexLayer>) -> Result<(IndexLayer, Content)> {
    let identity = top.opened.identity;
    let describe = || -> Result<_> {
        let content = digest(&*top.opened.store, top.head.as_ref(), identity.len)?;
        let stamp = Stamp { len: identity.len, mtime_ns: stable_mtime(identity.mtime_ns) };
        let record = LayerRecord {
            size: top.size,
            tables: top.head.as_ref().map(|head| record_tables(&Tables::of(&head.header))),
            backing: top.head.as_ref().and_then(|head| record_backing(head, below)),
            stamp,
            digest: content.digest,
        };
        Ok((IndexLayer { path: top.path.clone(), identity, record, home }, content))
    };
    describe().map_err(|error| error.in_file(&top.path))
}

pub(super) fn record_tables(tables: &Tables) -> RecordTables {
    RecordTables {
        version: tables.version,
        cluster_bits: tables.geometry.cluster_bits,
        is_extended: tables.entries.is_extended(),
        compression: tables.compression,
        l1_at: tables.l1_at,
        l1_entries: tables.l1_entries,
    }
}

fn record_backing(head: &Qcow2Head, below: Option<&IndexLayer>) -> Option<RecordBacking> {
    let format = head.backing_format.as_deref().map(|name| match name {
        "qcow2" => BackingFormat::Qcow2,
        // Other formats do not get past the opening of a chain.
        _ => BackingFormat::Raw,
    });
    let home = below.map_or(Home::None, |below| below.home);
    head.backing_name.as_ref().map(|name| RecordBacking { name: name.as_bytes().to_vec(), format, home })
}

/// Makes the index of the frozen layer at `path` (of the given format), which stands on `below` (base first).
///
/// `nearest` is the index of the highest layer of `below` that has one: its pages are shared, and only the tables of
/// layers above it are read. Nothing of it need be read again if it belongs to the layer right below.
///
/// # Errors
/// [`ErrorKind::NotIndexable`] and whatever keeps the layer's tables from being read or the index from being written.
pub(crate) fn extend(
    path: &Path,
    format: Format,
    below: &[IndexLayer],
    nearest: Option<&Index>,
    gate: &Gate,
    opener: &Arc<dyn Opener>,
) -> Result<Index> {
    let top = open_layer(path, Role::Frozen, Some(format), gate, &**opener)?;
    let write = || -> Result<Index> {
        sidecar_for(path, gate, &**opener)?;
        let (this, content) = describe(&top, Home::None, below.last())?;
        let place = Place::choose(&top, &content, gate, &**opener)?;
        let mut layers = below.to_vec();
        layers.push(IndexLayer { home: place.home(), ..this });
        let writer = Writer::new(layers, nearest, place, gate, opener)?;
        writer.write(&top)
    };
    write().map_err(|error| error.in_file(path))
}

struct Writer<'a> {
    layers: Vec<IndexLayer>,
    /// Without it all layers are merged.
    nearest: Option<&'a Index>,
    /// The leaves of each level that its delta records say anything about.
    behind: [Vec<bool>; 2],
    place: Place,
    root: Root,
    units: Units,
    map: Tree,
    /// The second level of the map.
    fine: Tree,
    gate: &'a Gate,
    opener: &'a Arc<dyn Opener>,
}

impl<'a> Writer<'a> {
    fn new(
        layers: Vec<IndexLayer>,
        nearest: Option<&'a Index>,
        place: Place,
        gate: &'a Gate,
        opener: &'a Arc<dyn Opener>,
    ) -> Result<Self> {
        let units = units_of(&layers);
        let size = layers.last().expect("the layer itself").record.size;
        if units.levels().any(|level| units.pages(level, size) > MAX_LEAVES) {
            return Err(ErrorKind::NotIndexable { reason: "its disk has too many clusters" }.into());
        }
        // Words of another unit cannot be shared. An index of one level has no fine leaves, of whatever unit.
        let is_like = |theirs: Units| {
            let second = theirs.get(Level::Second);
            theirs.of(Level::First) == units.of(Level::First)
                && second.is_none_or(|unit| unit == units.finest())
        };
        let shared = nearest.filter(|index| is_like(index.units()));
        let tree = |level| {
            let leaves = units.pages(level, size);
            let mut tree = shared.map_or_else(|| Tree::new(leaves), |index| index.tree(level).clone());
            tree.resize(leaves);
            tree
        };
        let (map, fine) = (tree(Level::First), tree(Level::Second));
        let behind = [&map, &fine].map(|tree| vec![false; tree.leaves() as usize]);
        let layer = LayerIndex::new(u16::try_from(layers.len() - 1).expect("chains are shorter than 65,536"));
        let root = Root {
            chain: nearest.map_or_else(new_chain, |index| index.root.chain),
            generation: nearest.map_or(0, |index| index.root.generation).max(place.replaces) + 1,
            layer,
            unit: units.of(Level::First),
            fine_unit: units.finest(),
            size,
            at: HostOffset::ZERO,
            area: HostOffset::ZERO..HostOffset::ZERO,
            len_before: 0,
            table_pages: 0,
            map: map.top(),
            table: map.top(),
            fine: fine.top(),
            full: layer,
            deltas: Vec::new(),
        };
        let mut writer =
            Self { layers, nearest: shared, behind, place, root, units, map, fine, gate, opener };
        for delta in shared.iter().flat_map(|index| &index.deltas) {
            units.levels().for_each(|level| delta.mark(units.of(level), &mut writer.behind[level as usize]));
        }
        Ok(writer)
    }

    fn write(mut self, top: &Top) -> Result<Index> {
        let mtime_ns = top.opened.identity.mtime_ns;
        let deltas = match self.delta()? {
            Some((below, delta)) => self.write_delta(below, delta)?,
            None => {
                self.write_full(mtime_ns)?;
                Vec::new()
            }
        };
        let table = self.write_table(top)?;
        let root = self.place.finish(top, self.root, mtime_ns)?;
        let newest = self.layers.last_mut().expect("the layer itself");
        newest.identity = self.opener.identity(&newest.path, self.gate)?;
        Ok(Index {
            root,
            layers: self.layers,
            map: self.map,
            fine: self.fine,
            deltas,
            table,
            opener: Arc::clone(self.opener),
            gate: self.gate.clone(),
            sidecars: parking_lot::Mutex::default(),
        })
    }

    /// The layer's delta record and the index to add it to; `None` where a full index is to be written.
    fn delta(&self) -> Result<Option<(&'a Index, Delta)>> {
        let is_below = |index: &&Index| {
            index.layer().index() + 1 == self.root.layer.index()
                // An index without records has none in another unit.
                && (index.units() == self.units || index.deltas.is_empty())
                && index.map.leaves() == self.map.leaves()
        };
        let Some(below) = self.nearest.filter(is_below) else { return Ok(None) };
        let unit = self.units.finest();
        // To the end of the last leaf of the first level, so that its last unit is covered wholly.
        let end = self.units.below(self.map.leaves()).start;
        let Some(runs) = self.merger(unit).runs(end)? else { return Ok(None) };
        let delta = Delta::new(self.root.layer, unit, runs);
        let leaves_of_full = |level: Level| {
            let mut leaves = self.behind[level as usize].clone();
            delta.mark(self.units.of(level), &mut leaves);
            leaves.into_iter().filter(|is_touched| *is_touched).count()
        };
        let leaves = self.units.levels().map(leaves_of_full).sum();
        Ok(adds_delta(&below.root.deltas, delta.pointer, leaves).then_some((below, delta)))
    }

    fn write_delta(&mut self, below: &Index, mut delta: Delta) -> Result<Vec<Arc<Delta>>> {
        delta.write(&mut |page| self.put(page))?;
        self.root.full = below.root.full;
        self.root.deltas = below.root.deltas.iter().copied().chain([delta.pointer]).collect();
        Ok(below.deltas.iter().cloned().chain([Arc::new(delta)]).collect())
    }

    fn write_full(&mut self, mtime_ns: i64) -> Result<()> {
        for window in windows(self.root.leaves()) {
            let changed = self.changed(Level::First, window, |_| true)?;
            self.write_leaves(Level::First, &changed, mtime_ns)?;
            self.write_fine(&changed, mtime_ns)?;
        }
        for level in [Level::First, Level::Second] {
            let mut tree = std::mem::take(self.tree(level));
            tree.seal(&mut |page| self.put(page))?;
            *self.tree(level) = tree;
        }
        (self.root.map, self.root.fine) = (self.map.top(), self.fine.top());
        Ok(())
    }

    fn tree(&mut self, level: Level) -> &mut Tree {
        match level {
            Level::First => &mut self.map,
            Level::Second => &mut self.fine,
        }
    }

    fn write_leaves(&mut self, level: Level, leaves: &[(u64, Box<Words>)], mtime_ns: i64) -> Result<()> {
        for (number, words) in leaves {
            let pointer = self.put(&bytes_of(words))?;
            self.tree(level).set(*number, pointer);
        }
        if self.place.home() == Home::File {
            // Writing pages changed the file's time; the next merger identifies the file by it.
            times::put_back(&*self.place.store, mtime_ns)?;
        }
        Ok(())
    }

    /// Writes the fine leaves below some leaves that have changed, where words of those are split, and drops the others.
    fn write_fine(&mut self, changed: &[(u64, Box<Words>)], mtime_ns: i64) -> Result<()> {
        let Some(unit) = self.units.get(Level::Second) else { return Ok(()) };
        let mut split = BTreeSet::new();
        for (leaf, words) in changed {
            for number in self.units.below(*leaf) {
                if is_split(&words[self.units.over(unit, number).1]) {
                    split.insert(number);
                } else if !self.fine.get(number).is_hole() {
                    self.fine.set(number, PagePointer::HOLE);
                }
            }
        }
        for window in windows(self.fine.leaves()) {
            if split.range(window.clone()).next().is_some() {
                let changed = self.changed(Level::Second, window, |leaf| split.contains(&leaf))?;
                self.write_leaves(Level::Second, &changed, mtime_ns)?;
            }
        }
        Ok(())
    }

    fn merger(&self, unit: ClusterBits) -> Merger<'_> {
        Merger { layers: &self.layers, unit, gate: self.gate, opener: &**self.opener }
    }

    fn put(&mut self, page: &Page) -> Result<PagePointer> {
        self.place.put(&self.root.chain, self.root.layer, self.root.generation, page)
    }

    /// Those of the wanted leaves in `window` that are not as the tree of the nearest index has them.
    fn changed(
        &self,
        level: Level,
        window: Range<u64>,
        is_wanted: impl Fn(u64) -> bool,
    ) -> Result<Vec<(u64, Box<Words>)>> {
        let (unit, behind) = (self.units.of(level), &self.behind[level as usize]);
        let merger = self.merger(unit);
        let from = self.nearest.map_or(0, |index| index.layer().index() + 1);
        let mut changed = Vec::new();
        let mut newer = merger.merge(from, window.clone())?;
        for number in window.filter(|&number| behind[number as usize]) {
            newer.entry(number).or_insert_with(|| Box::new([0; LEAF_WORDS]));
        }
        for (number, mut words) in newer {
            if !is_wanted(number) {
                continue;
            }
            match self.nearest.map(|index| self.read_old(index, number, unit)) {
                None => {}
                Some(Ok(old)) => {
                    words.iter_mut().zip(old.iter()).for_each(|(word, old)| *word = (*word).max(*old));
                    if *words == old && !behind[number as usize] {
                        continue;
                    }
                }
                Some(Err(error)) => {
                    tracing::debug!(%error, leaf = number, "made again from all layers' tables");
                    let mut whole = merger.merge(0, number..number + 1)?;
                    words = whole.remove(&number).unwrap_or(words);
                }
            }
            changed.push((number, words));
        }
        debug_assert!(changed.len() as u64 <= WINDOW);
        Ok(changed)
    }

    fn read_old(&self, index: &Index, number: u64, unit: ClusterBits) -> Result<Words> {
        index.read_page(number, unit, |layer, at, page| {
            let path = &self.layers[layer.index()].path;
            let opened = self.opener.open(path, Role::Inspected, self.gate)?;
            opened.store.read_exact(&mut page[..], at).while_trying("read the index")
        })
    }

    /// Writes the pages of the layer table that the nearest index does not have, and all inner pages: they lead to pages
    /// in files whose names are known only to who reads the table, so they must not lie there too.
    fn write_table(&mut self, top: &Top) -> Result<Tree> {
        let old = self.nearest.map(|index| {
            let records: Vec<LayerRecord> = index.layers.iter().map(|layer| layer.record.clone()).collect();
            (pack(&records), &index.table)
        });
        let keeps_time = self.place.keeps_time();
        let newest = &mut self.layers.last_mut().expect("the layer itself").record;
        if !keeps_time {
            newest.stamp.mtime_ns = None;
        }
        // The last record names the length that the file will have when all pages are written, the table's included.
        let same = |number: usize, page: &Page| {
            old.as_ref().is_some_and(|(pages, _)| pages.get(number).is_some_and(|(_, old)| **old == *page))
        };
        let packed = pack(&self.records());
        let last = packed.len() - 1;
        let fresh = (0..last).filter(|&number| !same(number, &packed[number].1)).count() + 1;
        let pages = fresh as u64 + Tree::inner_pages(packed.len() as u64);
        let len = self.place.len_after(top.opened.identity.len, pages);
        self.layers.last_mut().expect("the layer itself").record.stamp.len = len;
        let packed = pack(&self.records());
        let mut table = Tree::new(packed.len() as u64);
        for (number, (_, page)) in packed.iter().enumerate() {
            let pointer = match &old {
                Some((_, tree)) if number < last && same(number, page) => tree.get(number as u64),
                _ => self.put(page)?,
            };
            table.set(number as u64, pointer);
        }
        table.touch();
        table.seal(&mut |page| self.put(page))?;
        self.root.table_pages = u32::try_from(packed.len()).expect("fewer than layers");
        self.root.table = table.top();
        assert_eq!(self.place.len_after(top.opened.identity.len, 0), len, "pages were counted right");
        Ok(table)
    }

    fn records(&self) -> Vec<LayerRecord> {
        self.layers.iter().map(|layer| layer.record.clone()).collect()
    }
}

fn bytes_of(words: &Words) -> Box<Page> {
    let mut page = Box::new([0; PAGE_LEN]);
    for (bytes, word) in page.chunks_exact_mut(8).zip(words) {
        bytes.copy_from_slice(&word.to_le_bytes());
    }
    page
}

/// A name for a chain that no other has, in all likelihood.
fn new_chain() -> ChainId {
    let random = || RandomState::new().hash_one(std::time::Instant::now()).to_le_bytes();
    let mut id = [0; 16];
    id[..8].copy_from_slice(&random());
    id[8..].copy_from_slice(&random());
    ChainId(id)
}
