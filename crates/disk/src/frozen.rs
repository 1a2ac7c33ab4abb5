//! Frozen layers for those who read their tables: what a comparison or a backup needs of a layer, a file at a time.
//!
//! Place in the data flow: beside the engine. Layers are opened, held against writers and shared as a disk's own are
//! ([`Resources`]); nothing is merged into a map.

use std::collections::HashMap;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use vmstrata_qcow2::entry::EntryError;
use vmstrata_qcow2::{Geometry, L2Entry};
use vmstrata_store::{FileId, FileIdentity, Gate};
use vmstrata_types::{ClusterBits, GuestOffset, GuestRange, MAX_LAYERS};

use crate::chain::{OpenOptions, Top, described_backing, open_described, open_layer, open_top};
use crate::compressed::Key;
use crate::error::{Error, ErrorKind, IoContext as _, Result};
use crate::json_name::{Below, Described};
use crate::layer::{Format, Layer, Scratch, Tables, words};
use crate::loading::freeze;
use crate::opener::Role;
use crate::resources::Resources;

/// A layer that no process writes, as long as this is there.
#[derive(Clone, Debug)]
pub struct FrozenLayer {
    layer: Arc<Layer>,
    resources: Arc<Resources>,
}

impl FrozenLayer {
    /// Opens the one file `path`, whatever it stands on; without a `format`, its first bytes say it.
    ///
    /// # Errors
    /// A file that cannot be opened, is being written, or breaks the format.
    pub fn open(path: &Path, format: Option<Format>, resources: &Arc<Resources>) -> Result<Self> {
        let opener = &**resources.files().opener();
        Ok(Self::new(open_layer(path, Role::Frozen, format, &Gate::unrestricted(), opener)?, resources))
    }

    fn new(top: Top, resources: &Arc<Resources>) -> Self {
        Self { layer: freeze(top, resources), resources: Arc::clone(resources) }
    }

    /// The file, as the layer above (or the caller) names it.
    pub fn path(&self) -> &Path {
        &self.layer.path
    }

    /// Which file it is, and its state when it was opened.
    pub fn identity(&self) -> FileIdentity {
        self.layer.identity
    }

    /// Which bytes of which file it is. Chains with a layer of the same ones share that layer.
    pub fn place(&self) -> (FileId, Range<u64>) {
        let bytes = match self.layer.window {
            Some(window) => window.start.get()..window.start.get() + self.layer.size,
            None => 0..u64::MAX,
        };
        (self.layer.identity.file, bytes)
    }

    /// Virtual size in bytes.
    pub fn size(&self) -> u64 {
        self.layer.size
    }

    /// How it keeps its bytes.
    pub fn format(&self) -> Format {
        self.layer.format()
    }

    /// What maps guest offsets to table entries; a raw file has no tables.
    pub fn geometry(&self) -> Option<Geometry> {
        self.layer.tables.map(|tables| tables.geometry)
    }

    /// Size of its clusters; a raw file has none.
    pub fn cluster_bits(&self) -> Option<ClusterBits> {
        self.layer.cluster_bits()
    }

    /// The smallest run that its entries tell apart, a cluster or a subcluster; a raw file has none.
    pub fn unit(&self) -> Option<ClusterBits> {
        self.layer.unit()
    }

    /// Of the L1 entries from number `first` on, `count` at most, which have an L2 table; none past the last entry.
    ///
    /// # Errors
    /// A table that cannot be read.
    ///
    /// # Panics
    /// On a raw layer.
    pub fn has_tables(&self, first: usize, count: usize) -> Result<Vec<bool>> {
        let tables = self.tables();
        let count = count.min((tables.l1_entries as usize).saturating_sub(first));
        let mut bytes = vec![0; count * 8];
        let at = tables.l1_at + first as u64 * 8;
        let read = self.resources.files().store(&self.layer).and_then(|store| {
            store.read_padded(&mut bytes, at).while_trying("read the L1 table").map_err(|error| error.at(at))
        });
        read.map_err(|error| error.in_file(self.path()))?;
        Ok(words(&bytes).map(|raw| raw != 0).collect())
    }

    /// Calls `visit` with guest offset and entry of every cluster in `range` that the layer's tables say anything about, in
    /// order.
    ///
    /// # Errors
    /// A file that cannot be read; an L1 entry that breaks the format.
    ///
    /// # Panics
    /// On a raw layer.
    pub fn entries(
        &self,
        range: GuestRange,
        mut visit: impl FnMut(GuestOffset, Result<L2Entry, EntryError>),
    ) -> Result<()> {
        let entries = self.tables().entries;
        let scan = |store| {
            let store: Arc<vmstrata_store::OpenStore> = store;
            self.layer.scan(&**store, range, &mut Scratch::default(), &mut |at, raw| {
                visit(at, entries.l2(raw));
            })
        };
        self.resources.files().store(&self.layer).and_then(scan).map_err(|error| error.in_file(self.path()))
    }

    /// Reads the cluster at `at`, of which the layer has `entry`: data, or compressed.
    ///
    /// # Errors
    /// A file that cannot be read; bytes that do not decompress.
    ///
    /// # Panics
    /// On a raw layer; when `buf` has not the size of a cluster.
    pub fn read_cluster(&self, at: GuestOffset, entry: L2Entry, buf: &mut [u8]) -> Result<()> {
        let mut read = || -> Result<()> {
            let store = self.resources.files().store(&self.layer)?;
            if let L2Entry::Data { host, .. } = entry {
                return store.read_exact(buf, host).while_trying("read").map_err(|error| error.at(host));
            }
            let raw = self.tables().entries.encode_l2(entry);
            let key = Key { file: self.layer.identity, guest: at, raw };
            buf.copy_from_slice(&self.resources.clusters().read(key, &**store, self.tables())?);
            Ok(())
        };
        read().map_err(|error| error.in_file(self.path()))
    }

    fn tables(&self) -> &Tables {
        self.layer.tables.as_ref().expect("a raw layer has no tables")
    }
}

/// The layers of a frozen state, newest first, each opened when it is asked for.
///
/// Ends with the base, or with the first error: a file that cannot be opened, is not allowed, is being written, or was met
/// before.
#[derive(Debug)]
pub struct FrozenChain<'a> {
    path: PathBuf,
    options: OpenOptions,
    resources: &'a Arc<Resources>,
    gate: Option<Gate>,
    next: Option<Described>,
    met: HashMap<FileId, usize>,
}

impl<'a> FrozenChain<'a> {
    /// The chain whose newest layer is the file `path`.
    pub fn new(path: &Path, options: &OpenOptions, resources: &'a Arc<Resources>) -> Self {
        let (named, format) = (path.to_owned(), options.format);
        let next = Some(Described { path: named, format, window: None, below: Below::AsStored });
        let (path, options) = (path.to_owned(), options.clone());
        Self { path, options, resources, gate: None, next, met: HashMap::new() }
    }

    fn open(&mut self, layer: &Described) -> Result<FrozenLayer> {
        let path = &layer.path;
        if self.met.len() >= MAX_LAYERS {
            return Err(Error::from(ErrorKind::TooLong).in_file(&self.path));
        }
        let opener = &**self.resources.files().opener();
        let top = if self.met.is_empty() {
            let state = open_top(path, Role::Frozen, &self.options, opener)?;
            state.check_state()?;
            state
        } else {
            if self.gate.is_none() {
                // A state without backing files needs no gate, whatever its directory is.
                self.gate = Some(self.options.gate(&self.path)?);
            }
            let gate = self.gate.as_ref().expect("made above");
            open_described(layer, Role::Frozen, gate, opener)?
        };
        self.next = described_backing(&top.path, top.head.as_ref())?;
        if let Some(earlier) = self.met.insert(top.opened.identity.file, self.met.len()) {
            let is_own = earlier + 1 == self.met.len();
            let kind = if is_own { ErrorKind::OwnBacking } else { ErrorKind::Loop { earlier } };
            return Err(Error::from(kind).in_file(path));
        }
        Ok(FrozenLayer::new(top, self.resources))
    }
}

impl Iterator for FrozenChain<'_> {
    type Item = Result<FrozenLayer>;

    fn next(&mut self) -> Option<Self::Item> {
        let layer = self.next.take()?;
        let opened = self.open(&layer);
        if opened.is_err() {
            self.next = None;
        }
        Some(opened)
    }
}
