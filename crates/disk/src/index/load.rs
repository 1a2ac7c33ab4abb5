//! Finding an index, and finding out how far it can be believed.
//!
//! The layer table is read from its last page to its first, as every page lies with a layer whose name the pages read
//! before it have told. Then every layer's file is looked at, and those that look different are digested, base first,
//! until one turns out changed.

use std::collections::HashMap;
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use vmstrata_qcow2::index::{
    DeltaPointer, Home, IndexError, LayerRecord, PAGE_LEN, Page, PagePointer, Root, TablePage,
};
use vmstrata_store::{Gate, Store};
use vmstrata_types::LayerIndex;

use super::delta::Delta;
use super::digest::{Seen, digest_file};
use super::home::{link_stands, root_in_file, root_in_sidecar};
use super::looks::Looks;
use super::tree::Tree;
use super::{Index, IndexLayer, is_as_recorded};
use crate::chain::{Top, open_layer, plain_name};
use crate::error::{IoContext as _, Result};
use crate::layer::Tables;
use crate::levels::Units;
use crate::opener::{LocalFiles, Opener, Role, directory_of};

/// What a layer's index turned out to be worth.
#[derive(Debug)]
pub(crate) enum Found {
    /// All of it holds.
    Whole(Box<Index>),
    /// This layer's file was changed since: indices of layers below it may hold, none of it or of those above does.
    ChangedFrom(PathBuf),
    /// There is none, or none that can be read.
    Nothing,
}

/// Files open at once while pages are read.
const OPEN_MAX: usize = 16;

/// Loads the index of the layer in `top`, wherever it is.
///
/// Nothing here is an error: what cannot be used is told in the log and costs time.
pub(crate) fn load(top: &Top, gate: &Gate, opener: &Arc<dyn Opener>, looks: &mut Looks) -> Found {
    let mut found = Found::Nothing;
    for home in [Home::File, Home::Sidecar] {
        match load_from(top, home, gate, opener, looks) {
            Ok(Found::Whole(index)) => return Found::Whole(index),
            Ok(Found::Nothing) => {}
            Ok(changed) => found = changed,
            Err(error) => {
                tracing::debug!(file = %top.path.display(), %error, "the index cannot be used");
            }
        }
    }
    found
}

fn load_from(
    top: &Top,
    home: Home,
    gate: &Gate,
    opener: &Arc<dyn Opener>,
    looks: &mut Looks,
) -> Result<Found> {
    let Some((root, store)) = root_at(top, home, gate, &**opener)? else { return Ok(Found::Nothing) };
    looks.identities.insert(top.path.clone(), top.opened.identity);
    let mut pages = Pages::new(&root, (top, home, store), gate, &**opener);
    let table = pages.tree(root.table, root.table_pages.into())?;
    let records = pages.records(&table)?;
    let layers = look_at(&root, records, &pages.places, gate, &**opener, looks)?;
    check(&root, &layers, top)?;
    if let Some(changed) = lowest_changed(&layers, gate, &**opener, looks) {
        tracing::info!(file = %top.path.display(), changed = %layers[changed.index()].path.display(), "a layer was changed since the index was made");
        return Ok(Found::ChangedFrom(layers[changed.index()].path.clone()));
    }
    let map = pages.tree(root.map, root.leaves())?;
    let fine = pages.tree(root.fine, root.fine_leaves())?;
    let deltas = pages.deltas(&layers)?;
    drop(pages);
    Ok(Found::Whole(Box::new(Index {
        root,
        layers,
        map,
        fine,
        deltas,
        table,
        opener: Arc::clone(opener),
        gate: gate.clone(),
        sidecars: parking_lot::Mutex::default(),
    })))
}

/// Whether the file at `path` is a layer that has an index of its own, made of the file as it is now: what changed it last was
/// whoever made the index, or came before.
pub fn is_as_indexed(path: &Path) -> bool {
    let gate = Gate::unrestricted();
    let looked = |top: &Top, home| -> Result<bool> {
        let Some((root, store)) = root_at(top, home, &gate, &LocalFiles)? else { return Ok(false) };
        let mut pages = Pages::new(&root, (top, home, store), &gate, &LocalFiles);
        let table = pages.tree(root.table, root.table_pages.into())?;
        let Some(last) = table.leaves().checked_sub(1) else { return Ok(false) };
        let page = TablePage::parse(&*pages.read(table.get(last), "layer table")?)?;
        Ok(page.records.last().is_some_and(|record| is_as_recorded(record, &top.opened.identity)))
    };
    let top = open_layer(path, Role::Inspected, None, &gate, &LocalFiles);
    top.is_ok_and(|top| [Home::File, Home::Sidecar].iter().any(|&home| looked(&top, home).unwrap_or(false)))
}

/// The root of the layer's index in this home, and the file it lies in.
fn root_at(
    top: &Top,
    home: Home,
    gate: &Gate,
    opener: &dyn Opener,
) -> Result<Option<(Root, Arc<dyn Store>)>> {
    let head = top.head.as_ref().filter(|head| link_stands(&head.header));
    match (home, head) {
        (Home::File, Some(head)) => {
            let root = root_in_file(&*top.opened.store, head)?;
            Ok(root.map(|root| (root, Arc::clone(&top.opened.store))))
        }
        (Home::Sidecar, _) => {
            let found = root_in_sidecar(&top.path, gate, opener)?;
            Ok(found.map(|(root, opened)| (root, opened.store)))
        }
        _ => Ok(None),
    }
}

/// Reads pages of layers, as far as their places are known.
struct Pages<'a> {
    root: &'a Root,
    gate: &'a Gate,
    opener: &'a dyn Opener,
    /// Path of each layer's file, and where its index is.
    places: HashMap<LayerIndex, (PathBuf, Home)>,
    open: HashMap<LayerIndex, Arc<dyn Store>>,
}

impl<'a> Pages<'a> {
    /// Pages of an index whose root was read from `store`, the `home` of the index of the layer in `top`.
    fn new(
        root: &'a Root,
        (top, home, store): (&Top, Home, Arc<dyn Store>),
        gate: &'a Gate,
        opener: &'a dyn Opener,
    ) -> Self {
        let places = HashMap::from([(root.layer, (top.path.clone(), home))]);
        Self { root, gate, opener, places, open: HashMap::from([(root.layer, store)]) }
    }

    fn read(&mut self, pointer: PagePointer, what: &'static str) -> Result<Box<Page>> {
        let mut page: Box<Page> = Box::new([0; PAGE_LEN]);
        let at = pointer.at();
        let store = self.store(pointer.layer())?;
        store.read_exact(&mut page[..], at).while_trying("read the index").map_err(|error| error.at(at))?;
        pointer.check(&self.root.chain, &page, what)?;
        Ok(page)
    }

    fn store(&mut self, layer: LayerIndex) -> Result<Arc<dyn Store>> {
        if let Some(store) = self.open.get(&layer) {
            return Ok(Arc::clone(store));
        }
        let Some((path, home)) = self.places.get(&layer) else {
            return Err(IndexError::Layer { layer }.into());
        };
        let opened = match home {
            Home::Sidecar => {
                let path = self.opener.sidecar(path, self.gate).ok_or(IndexError::Missing)?;
                self.opener.open(&path, Role::Inspected, self.gate)?
            }
            Home::File | Home::None => self.opener.open(path, Role::Inspected, self.gate)?,
        };
        if self.open.len() >= OPEN_MAX {
            self.open.clear();
        }
        self.open.insert(layer, Arc::clone(&opened.store));
        Ok(opened.store)
    }

    fn tree(&mut self, top: PagePointer, leaves: u64) -> Result<Tree> {
        let highest = self.root.layer;
        Tree::load(top, leaves, highest, &mut |pointer| self.read(pointer, "inner page"))
    }

    /// The delta records of the layers above the full index, oldest first.
    fn deltas(&mut self, layers: &[IndexLayer]) -> Result<Vec<Arc<Delta>>> {
        let root = self.root;
        let above = (root.full.get()..root.layer.get()).map(|below| LayerIndex::new(below + 1));
        let delta = |(layer, pointer): (LayerIndex, &DeltaPointer)| {
            let read = &mut |pointer, what| self.read(pointer, what);
            Ok(Arc::new(Delta::read(layer, *pointer, (root, &layers[layer.index()]), read)?))
        };
        above.zip(&root.deltas).map(delta).collect()
    }

    /// The records of all layers, base first.
    fn records(&mut self, table: &Tree) -> Result<Vec<LayerRecord>> {
        let mut next = self.root.layer.index() + 1;
        let mut newest_first = Vec::with_capacity(next);
        for number in (0..table.leaves()).rev() {
            let pointer = table.get(number);
            if pointer.is_hole() {
                return Err(IndexError::Missing.into());
            }
            let page = TablePage::parse(&*self.read(pointer, "layer table")?)?;
            if page.first.index() + page.records.len() != next {
                return Err(IndexError::Field { field: "first layer", value: page.first.get().into() }.into());
            }
            next = page.first.index();
            for (offset, record) in page.records.into_iter().enumerate().rev() {
                self.place_below(next + offset, &record)?;
                newest_first.push(record);
            }
        }
        if next != 0 {
            return Err(IndexError::Field { field: "first layer", value: next as u64 }.into());
        }
        newest_first.reverse();
        Ok(newest_first)
    }

    /// Notes where the layer below the one at `index` is.
    fn place_below(&mut self, index: usize, record: &LayerRecord) -> Result<()> {
        let odd = IndexError::Field { field: "backing name of layer", value: index as u64 };
        let (Some(backing), Some(below)) = (&record.backing, index.checked_sub(1)) else {
            return if index == 0 && record.backing.is_none() { Ok(()) } else { Err(odd.into()) };
        };
        let layer =
            |index: usize| LayerIndex::new(u16::try_from(index).expect("a root names at most 65,535"));
        let (path, _) = &self.places[&layer(index)];
        let path =
            directory_of(path).join(plain_name(OsStr::from_bytes(&backing.name)).map_err(|_| odd.clone())?);
        self.places.insert(layer(below), (path, backing.home));
        Ok(())
    }
}

fn look_at(
    root: &Root,
    records: Vec<LayerRecord>,
    places: &HashMap<LayerIndex, (PathBuf, Home)>,
    gate: &Gate,
    opener: &dyn Opener,
    looks: &mut Looks,
) -> Result<Vec<IndexLayer>> {
    let mut layers = Vec::with_capacity(records.len());
    for (index, record) in (0..=root.layer.get()).zip(records) {
        let (path, home) = places[&LayerIndex::new(index)].clone();
        let identity = match looks.identities.get(&path) {
            Some(identity) => *identity,
            None => {
                let identity = opener.identity(&path, gate)?;
                looks.identities.insert(path.clone(), identity);
                identity
            }
        };
        layers.push(IndexLayer { path, identity, record, home });
    }
    Ok(layers)
}

/// What must be so in any index that was made for these layers.
fn check(root: &Root, layers: &[IndexLayer], top: &Top) -> Result<(), IndexError> {
    let units = super::leaves::units_of(layers);
    let newest = layers.last().expect("a table has a record");
    // Version 1 had words for subclusters alone: of no use to a map that has words for clusters.
    if units != Units::new(root.unit, root.fine_unit) {
        return Err(IndexError::Field { field: "map unit", value: root.unit.get().into() });
    }
    if newest.record.size != root.size || root.size != top.size {
        return Err(IndexError::Field { field: "disk size", value: root.size });
    }
    if newest.tables() != top.head.as_ref().map(|head| Tables::of(&head.header)) {
        return Err(IndexError::Layer { layer: root.layer });
    }
    Ok(())
}

/// The lowest layer that is not what it was.
fn lowest_changed(
    layers: &[IndexLayer],
    gate: &Gate,
    opener: &dyn Opener,
    looks: &mut Looks,
) -> Option<LayerIndex> {
    let mut above = layers.iter().skip(1).map(Some).chain([None]);
    let changed = layers.iter().position(|layer| {
        let named = above.next().flatten();
        if layer.is_as_recorded() && !looks.doubted.contains(&layer.path) {
            return false;
        }
        let now = looks.seen.entry(layer.path.clone()).or_insert_with(|| {
            let found = digest_file(&layer.path, named, layer, gate, opener);
            found.inspect_err(|error| tracing::debug!(%error, "a layer cannot be digested")).ok()
        });
        *now != Some(Seen::as_recorded(&layer.record))
    });
    changed.map(|index| LayerIndex::new(u16::try_from(index).expect("a root names at most 65,535")))
}

#[cfg(test)]
mod tests;
