//! The index on disk: the map of a frozen chain, kept beside the chain, so that it need not be made at open.
//!
//! ```text
//!                 ┌──────────── build, or the freezing of a layer ◄─ tables of that layer
//!                 ▼
//!   pages in the layer's file, or its sidecar        (crates/qcow2/src/index: bytes; docs/format.md: the format)
//!                 │ load: root, layer table, one look at every file, inner pages, delta records
//!                 ▼
//!   Index: layers, 16 bytes a leaf, runs ──► read_page ──► 512 map words ──► crate::map, instead of the layers' tables
//! ```
//!
//! A **full** index has a tree of leaves for each level of the map ([`crate::levels`]). A fine leaf is there only where one of its
//! words lies in a unit whose word is split. Above it, up to 64 layers add a **delta** record each: what the layer itself says,
//! kilobytes however widely it is spread. [`delta::adds_delta`] decides which of them a layer gets.
//!
//! An index is believed only as far as it can be checked. Each layer's file is looked at when an index is loaded: length
//! and time of change; where they differ from what the index says, the layer's header and tables are read and their
//! digest decides. Below the lowest changed layer the indices of older layers still hold. Every page is checked against
//! the pointer it was reached by. Whatever does not hold is as if it were not there: the tables answer, which takes time.
//!
//! Not believed is not the same as checked word by word: whoever can write the files of a chain can write an index that
//! leads astray, as he can write tables that do. `verify` compares with the tables; see `docs/format.md`, "What an
//! index is trusted with".
//!
//! Lock order: the table of sidecar files is a leaf.

mod build;
mod delta;
mod digest;
mod drop;
mod free;
mod home;
mod leaves;
mod link;
mod load;
mod looks;
mod place;
mod tree;
mod verify;
mod write;

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::Arc;

use parking_lot::Mutex;
use vmstrata_qcow2::index::{Home, IndexError, LEAF_WORDS, LayerRecord, PAGE_LEN, Page, PagePointer, Root};
use vmstrata_store::{FileIdentity, Gate, Store};
use vmstrata_types::{ClusterBits, HostOffset, LayerIndex};

pub use build::{IndexBuild, IndexBuilder, IndexOptions, IndexOutcome, IndexedFile, build};
pub use drop::{IndexDropped, remove};
pub(crate) use home::{forget_sidecar, is_link_stale};
pub use load::is_as_indexed;
pub(crate) use load::{Found, load};
pub(crate) use looks::Looks;
pub use verify::{IndexVerdict, VerifiedFile, verify};
pub(crate) use write::extend;

use crate::entry::{MapEntry, Mapping};
use crate::error::{IoContext as _, Result};
use crate::layer::{Layer, Tables};
use crate::levels::{Level, MapPage, Units, Words};
use crate::opener::{Opener, Role};
use delta::Delta;
use tree::Tree;

/// Sidecars open at once.
const SIDECARS_MAX: usize = 16;

/// How much of the map an index has in pages of its own and of older layers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IndexKind {
    /// All of it, in leaves.
    Full,
    /// What its layer says, as a record above that of the layer below, or above a full index.
    Delta,
}

/// A layer of a chain that an index answers for.
#[derive(Clone, Debug)]
pub(crate) struct IndexLayer {
    /// The file, as the layer above names it.
    pub(crate) path: PathBuf,
    /// The file as it was found when the index was loaded or made.
    pub(crate) identity: FileIdentity,
    pub(crate) record: LayerRecord,
    /// Where its own index is.
    pub(crate) home: Home,
}

/// Whether a layer's file is as the layer table knows it, by a look.
fn is_as_recorded(record: &LayerRecord, now: &FileIdentity) -> bool {
    (record.stamp.len, record.stamp.mtime_ns) == (now.len, Some(now.mtime_ns))
}

impl IndexLayer {
    fn is_as_recorded(&self) -> bool {
        is_as_recorded(&self.record, &self.identity)
    }

    /// Whether a cluster that begins in its file may hold the byte at `host`; of a raw file no word leads to any.
    fn has_cluster_at(&self, host: HostOffset) -> bool {
        let tables = self.record.tables.as_ref();
        tables.is_some_and(|tables| host.align_down(tables.cluster_bits).get() < self.identity.len)
    }

    /// What is needed to walk its tables; `None` for a raw file.
    pub(crate) fn tables(&self) -> Option<Tables> {
        let tables = self.record.tables?;
        Some(Tables {
            version: tables.version,
            l1_at: tables.l1_at,
            l1_entries: tables.l1_entries,
            entries: tables.entry_format(),
            geometry: tables.geometry(),
            compression: tables.compression,
        })
    }

    /// The layer, its file not open yet.
    pub(crate) fn layer(&self) -> Layer {
        Layer::new(self.path.clone(), self.identity, self.record.size, self.tables()).into_unverified()
    }
}

/// The index of a frozen layer; see the module documentation.
#[derive(Debug)]
pub(crate) struct Index {
    root: Root,
    /// Base first; the last is the layer that the index belongs to.
    layers: Vec<IndexLayer>,
    /// The map of the layers up to `root.full`.
    map: Tree,
    /// The second level of the map.
    fine: Tree,
    /// What each layer above those says, oldest first.
    deltas: Vec<Arc<Delta>>,
    table: Tree,
    opener: Arc<dyn Opener>,
    gate: Gate,
    sidecars: Mutex<HashMap<LayerIndex, Arc<dyn Store>>>,
}

impl Index {
    /// The layers it answers for, base first.
    pub(crate) fn layers(&self) -> &[IndexLayer] {
        &self.layers
    }

    /// The layer it belongs to.
    pub(crate) fn layer(&self) -> LayerIndex {
        self.root.layer
    }

    /// The units of its words.
    pub(crate) fn units(&self) -> Units {
        Units::new(self.root.unit, self.root.fine_unit)
    }

    fn tree(&self, level: Level) -> &Tree {
        match level {
            Level::First => &self.map,
            Level::Second => &self.fine,
        }
    }

    /// How much of the map its layer's own pages have.
    pub(crate) fn kind(&self) -> IndexKind {
        if self.deltas.is_empty() { IndexKind::Full } else { IndexKind::Delta }
    }

    /// Bytes of its layer's own pages.
    pub(crate) fn bytes(&self) -> u64 {
        self.root.area.end - self.root.area.start
    }

    /// The words of a leaf, as the tables of the layers up to the full index would make them, but for words of layers that a
    /// shorter layer above hides anyway. Past the last leaf all is a hole.
    ///
    /// `read` reads a page of a layer's own file; sidecars are opened here.
    ///
    /// # Errors
    /// A page that cannot be read or is damaged, a missing fine leaf. The caller then makes the words from the tables. Ask for a fine
    /// leaf only where words are split.
    fn read_leaf(
        &self,
        leaf: MapPage,
        mut read: impl FnMut(LayerIndex, HostOffset, &mut Page) -> Result<()>,
    ) -> Result<Words> {
        let pointer = self.tree(leaf.level).get(leaf.number);
        if pointer.is_hole() {
            return match leaf.level {
                Level::First => Ok([0; LEAF_WORDS]),
                Level::Second => Err(IndexError::FineLeaf { leaf: leaf.number }.into()),
            };
        }
        let mut page: Box<Page> = Box::new([0; PAGE_LEN]);
        let layer = pointer.layer();
        match self.layers[layer.index()].home {
            Home::Sidecar => {
                let store = self.sidecar(layer)?;
                store.read_exact(&mut page[..], pointer.at()).while_trying("read the index")?;
            }
            Home::File | Home::None => read(layer, pointer.at(), &mut page)?,
        }
        self.decode(pointer, leaf.level, &page).map_err(|error| crate::Error::from(error).in_layer(layer))
    }

    /// Page `number` of a map's words for `unit`, of which its units tell ([`Units::answer_for`]).
    ///
    /// # Errors
    /// As [`Index::read_leaf`].
    pub(crate) fn read_page(
        &self,
        number: u64,
        unit: ClusterBits,
        mut read: impl FnMut(LayerIndex, HostOffset, &mut Page) -> Result<()>,
    ) -> Result<Words> {
        let words = self.units().words(unit, number, |leaf| self.read_leaf(leaf, &mut read))?;
        Ok(self.with_deltas(number, unit, words))
    }

    /// Page `number` of words for `unit`, given those of the full index.
    fn with_deltas(&self, number: u64, unit: ClusterBits, mut words: Words) -> Words {
        if number < self.root.leaves() << (self.root.unit.get() - unit.get()) {
            self.deltas.iter().for_each(|delta| delta.put(number, unit, &mut words));
        }
        words
    }

    /// Whether no layer says anything about a leaf.
    fn is_hole(&self, leaf: MapPage) -> bool {
        let unit = self.units().of(leaf.level);
        self.tree(leaf.level).get(leaf.number).is_hole()
            && !self.deltas.iter().any(|delta| delta.touches(leaf.number, unit))
    }

    fn decode(&self, pointer: PagePointer, level: Level, page: &Page) -> Result<Words, IndexError> {
        pointer.check(&self.root.chain, page, "leaf")?;
        let mut words = [0; LEAF_WORDS];
        for (word, bytes) in words.iter_mut().zip(page.as_chunks::<8>().0) {
            *word = u64::from_le_bytes(*bytes);
            self.check_word(level, MapEntry::from_word(*word))?;
        }
        Ok(words)
    }

    /// Refuses what no builder writes: a word of a layer that is not there, data outside the layer's file, or a split one that no
    /// second level answers for.
    fn check_word(&self, level: Level, entry: MapEntry) -> Result<(), IndexError> {
        let (layer, host) = match entry.mapping(self.units().of(level)) {
            Mapping::Hole => return Ok(()),
            Mapping::Data(layer, host) => (layer, host),
            Mapping::Zero(layer) | Mapping::Compressed(layer) | Mapping::Damaged(layer) => {
                (layer, HostOffset::ZERO)
            }
        };
        let may_be_split = level == Level::First && self.units().get(Level::Second).is_some();
        match self.layers.get(layer.index()) {
            _ if entry.is_split() && !may_be_split => Err(IndexError::Layer { layer }),
            Some(known) if known.has_cluster_at(host) => Ok(()),
            _ => Err(IndexError::Layer { layer }),
        }
    }

    fn sidecar(&self, layer: LayerIndex) -> Result<Arc<dyn Store>> {
        let mut sidecars = self.sidecars.lock();
        if let Some(store) = sidecars.get(&layer) {
            return Ok(Arc::clone(store));
        }
        if sidecars.len() >= SIDECARS_MAX {
            sidecars.clear();
        }
        let path = self.opener.sidecar(&self.layers[layer.index()].path, &self.gate);
        let path = path.ok_or(IndexError::Missing)?;
        let opened = self.opener.open(&path, Role::Inspected, &self.gate)?;
        sidecars.insert(layer, Arc::clone(&opened.store));
        Ok(opened.store)
    }

    /// Returns a function that says whether a pointer of this index and one of the other lead to the same page.
    fn same_page(&self, other: &Self) -> impl Fn(PagePointer, PagePointer) -> bool + Copy + use<> {
        let same_layer = |pair: &(&IndexLayer, &IndexLayer)| pair.0.identity == pair.1.identity;
        let common = self.layers.iter().zip(&other.layers).take_while(same_layer).count();
        let same_chain = self.root.chain == other.root.chain;
        move |one, two| one == two && (one.is_hole() || same_chain && one.layer().index() < common)
    }

    /// Numbers of the leaves of a level of which the trees of the two indices have different pages, in order. Costs what it
    /// returns, and a comparison for every 256 leaves.
    fn unshared<'a>(&'a self, other: &'a Self, level: Level) -> impl Iterator<Item = u64> + 'a {
        self.tree(level).differing(other.tree(level), self.same_page(other))
    }

    /// Numbers of the leaves of a level in which two indices of the same units may differ, in order.
    fn differing(&self, other: &Self, level: Level) -> Vec<u64> {
        let mut leaves = vec![false; self.tree(level).leaves().max(other.tree(level).leaves()) as usize];
        for leaf in self.unshared(other, level) {
            leaves[leaf as usize] = true;
        }
        let (same_page, unit) = (self.same_page(other), self.units().of(level));
        for (one, two) in [(self, other), (other, self)] {
            let is_shared = |delta: &Delta| {
                two.deltas.iter().any(|theirs| {
                    theirs.layer == delta.layer && same_page(theirs.pointer.top, delta.pointer.top)
                })
            };
            let own = one.deltas.iter().filter(|delta| !is_shared(delta));
            own.for_each(|delta| delta.mark(unit, &mut leaves));
        }
        (0..).zip(leaves).filter_map(|(leaf, differs)| differs.then_some(leaf)).collect()
    }
}

#[cfg(test)]
mod tests;
