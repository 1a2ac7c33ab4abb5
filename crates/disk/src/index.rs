//! The index on disk: the map of a frozen chain, kept beside the chain, so that it need not be made at open.
//!
//! ```text
//!                 ┌──────────── build, or the freezing of a layer ◄─ tables of that layer
//!                 ▼
//!   pages in the layer's file, or its sidecar        (crates/qcow2/src/index: bytes; docs/format.md: the format)
//!                 │ load: root, layer table, one look at every file, inner pages
//!                 ▼
//!   Index: layers, 16 bytes a leaf ──► read_leaf ──► 512 map words ──► crate::map, instead of the layers' tables
//! ```
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
use crate::levels::{Units, Words};
use crate::names::sidecar_of;
use crate::opener::{Opener, Role};
use tree::Tree;

/// Sidecars open at once.
const SIDECARS_MAX: usize = 16;

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
    map: Tree,
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

    /// The units of its words. It has one level: that of the smallest cluster or subcluster of the layers.
    pub(crate) fn units(&self) -> Units {
        Units::new(self.root.unit, self.root.unit)
    }

    /// Leaves of [`LEAF_WORDS`] words.
    pub(crate) fn leaves(&self) -> u64 {
        self.map.leaves()
    }

    /// Whether no layer says anything about what leaf `number` speaks for.
    #[cfg_attr(not(test), expect(dead_code, reason = "the map reads indices from here on"))]
    pub(crate) fn is_hole(&self, number: u64) -> bool {
        self.map.get(number).is_hole()
    }

    /// Reads the words of leaf `number`, as the tables of the layers would make them, but for words of layers that a
    /// shorter layer above hides anyway. Past the last leaf all is a hole.
    ///
    /// `read` reads a page of a layer's own file; sidecars are opened here.
    ///
    /// # Errors
    /// A page that cannot be read, or is not what it should be: make the words from the tables instead.
    pub(crate) fn read_leaf(
        &self,
        number: u64,
        words: &mut [u64; LEAF_WORDS],
        read: impl FnOnce(LayerIndex, HostOffset, &mut Page) -> Result<()>,
    ) -> Result<()> {
        let pointer = self.map.get(number);
        if pointer.is_hole() {
            words.fill(0);
            return Ok(());
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
        self.decode(pointer, &page, words).map_err(|error| crate::Error::from(error).in_layer(layer))
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
        self.units().words(unit, number, |page| {
            let mut words = [0; LEAF_WORDS];
            self.read_leaf(page.number, &mut words, &mut read)?;
            Ok(words)
        })
    }

    fn decode(
        &self,
        pointer: PagePointer,
        page: &Page,
        words: &mut [u64; LEAF_WORDS],
    ) -> Result<(), IndexError> {
        pointer.check(&self.root.chain, page, "leaf")?;
        for (word, bytes) in words.iter_mut().zip(page.as_chunks::<8>().0) {
            *word = u64::from_le_bytes(*bytes);
            self.check_word(*word)?;
        }
        Ok(())
    }

    /// Refuses what no builder writes: a word of a layer that is not there, or data outside the layer's file.
    fn check_word(&self, word: u64) -> Result<(), IndexError> {
        let entry = MapEntry::from_word(word);
        let (layer, host) = match entry.mapping(self.root.unit) {
            Mapping::Hole => return Ok(()),
            _ if entry.is_split() => return Err(IndexError::Layer { layer: entry.layer() }),
            Mapping::Data(layer, host) => (layer, host),
            Mapping::Zero(layer) | Mapping::Compressed(layer) | Mapping::Damaged(layer) => {
                (layer, HostOffset::ZERO)
            }
        };
        match self.layers.get(layer.index()) {
            Some(known) if known.record.tables.is_some() && host.get() < known.identity.len => Ok(()),
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
        let path = sidecar_of(&self.layers[layer.index()].path);
        let opened = self.opener.open(&path, Role::Inspected, &self.gate)?;
        sidecars.insert(layer, Arc::clone(&opened.store));
        Ok(opened.store)
    }

    /// Numbers of the leaves in which the two indices may differ, in order: neighbours share all other pages. Costs what
    /// it returns, and a comparison for every 256 leaves.
    pub(crate) fn differing<'a>(&'a self, other: &'a Self) -> impl Iterator<Item = u64> + 'a {
        let same_layer = |pair: &(&IndexLayer, &IndexLayer)| pair.0.identity == pair.1.identity;
        let common = self.layers.iter().zip(&other.layers).take_while(same_layer).count();
        let same_chain = self.root.chain == other.root.chain;
        // A page of a layer that both stand on is the same page.
        let same = move |one: PagePointer, two: PagePointer| {
            one == two && (one.is_hole() || same_chain && one.layer().index() < common)
        };
        self.map.differing(&other.map, same)
    }
}

#[cfg(test)]
mod tests;
