//! `vmstrata index build`: indices for all frozen layers of a chain, base first.
//!
//! A layer keeps the index it has when all of it holds and every file is as the index remembers it. From the first layer
//! on that lacks one, all are made anew, as each leads into the ones below it.
//!
//! A build wants sound indices: the pages of those that are kept are read, each page once however many
//! indices share it. A disk in use makes what it lacks without that: it notices a damaged page when it comes to need it.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use vmstrata_qcow2::index::Home;
use vmstrata_store::Gate;

use super::load::{Found, load};
use super::looks::Looks;
use super::write::{describe, extend};
use super::{Index, IndexKind, IndexLayer};
use crate::chain::{OpenOptions, Top, open_layer, walk};
use crate::error::{Error, ErrorKind, IoContext as _, Result};
use crate::layer::Format;
use crate::levels::MapPage;
use crate::opener::{LocalFiles, Opener, Role};

/// What to do with the indices of a chain.
#[derive(Clone, Default)]
pub struct IndexOptions {
    /// Directories, beside the disk's own, in which backing files may lie.
    pub allow_backing: Vec<PathBuf>,
    /// As [`OpenOptions::allow_backing_alone`].
    pub allow_backing_alone: bool,
    /// The disk's format; `None` looks at its first bytes.
    pub format: Option<Format>,
    /// Take the disk's own file for a frozen layer too; it must not be written meanwhile.
    pub include_top: bool,
    /// Keep indices without reading their pages: one that is damaged keeps its damage.
    pub keep_unread: bool,
    /// What opens the files; `None` opens those of this host.
    pub opener: Option<Arc<dyn Opener>>,
    /// BackRef how many layers are done, of how many.
    pub progress: Option<Arc<dyn Fn(u64, u64) + Send + Sync>>,
}

impl IndexOptions {
    /// For whoever makes what a disk lacks that is opened so; pages of what is kept are read when they are needed.
    pub(crate) fn of_disk(open: &OpenOptions, opener: Option<&Arc<dyn Opener>>) -> Self {
        Self {
            allow_backing: open.allow_backing.clone(),
            allow_backing_alone: open.allow_backing_alone,
            format: open.format,
            keep_unread: true,
            opener: opener.cloned(),
            ..Self::default()
        }
    }
}

impl std::fmt::Debug for IndexOptions {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { allow_backing, allow_backing_alone, format, include_top, keep_unread, .. } = self;
        f.debug_struct("IndexOptions")
            .field("allow_backing", allow_backing)
            .field("allow_backing_alone", allow_backing_alone)
            .field("format", format)
            .field("include_top", include_top)
            .field("keep_unread", keep_unread)
            .finish_non_exhaustive()
    }
}

/// What became of a layer.
#[derive(Debug)]
pub enum IndexOutcome {
    /// It had an index that holds.
    Kept(IndexKind),
    /// It has a new one, of this many bytes.
    Built {
        /// How much of the map these are.
        kind: IndexKind,
        /// Bytes added.
        bytes: u64,
        /// Whether they are in a sidecar file rather than in the layer's own.
        sidecar: bool,
    },
    /// It needs none: a raw file has no tables.
    NotNeeded,
    /// It has none.
    Failed(Error),
}

/// A layer of the chain, and what became of it.
#[derive(Debug)]
pub struct IndexedFile {
    /// The layer's file.
    pub path: PathBuf,
    /// What became of it.
    pub outcome: IndexOutcome,
}

/// What [`build`] did, base first.
#[derive(Debug, Default)]
pub struct IndexBuild {
    /// The layers.
    pub layers: Vec<IndexedFile>,
}

/// A layer of a chain that is to be looked at.
#[derive(Clone, Debug)]
pub(super) struct Link {
    pub(super) path: PathBuf,
    pub(super) format: Format,
}

/// A chain, read from its headers.
#[derive(Debug)]
pub(super) struct Links {
    /// Base first.
    pub(super) links: Vec<Link>,
    pub(super) gate: Gate,
    pub(super) opener: Arc<dyn Opener>,
}

impl Links {
    /// The frozen layers of the disk at `path`, with the disk's own file if asked for.
    pub(super) fn read(path: &Path, options: &IndexOptions) -> Result<Self> {
        let opener = options.opener.clone().unwrap_or_else(|| Arc::new(LocalFiles));
        let open = OpenOptions {
            allow_backing: options.allow_backing.clone(),
            allow_backing_alone: options.allow_backing_alone,
            format: options.format,
            ..OpenOptions::default()
        };
        let link = |top: Top| Link {
            format: if top.head.is_some() { Format::Qcow2 } else { Format::Raw },
            path: top.path,
        };
        let (top, mut links) = walk(path, &open, &*opener, |top| Ok(link(top)))?;
        if options.include_top {
            links.push(link(top));
        }
        let gate = if links.is_empty() { Gate::unrestricted() } else { open.gate(path)? };
        Ok(Self { links, gate, opener })
    }

    pub(super) fn open(&self, link: &Link, role: Role) -> Result<Top> {
        open_layer(&link.path, role, Some(link.format), &self.gate, &*self.opener)
    }
}

impl IndexOptions {
    pub(super) fn tell(&self, done: usize, total: usize) {
        if let Some(progress) = &self.progress {
            progress(done as u64, total as u64);
        }
    }
}

/// Makes the indices that the chain of the disk at `path` lacks.
///
/// Layers may be in use as long as no one writes them. A layer that cannot have an index is told and passed over.
///
/// # Errors
/// A chain that cannot be read.
pub fn build(path: &Path, options: &IndexOptions) -> Result<IndexBuild> {
    let mut builder = IndexBuilder::new(path, options)?;
    let mut done = IndexBuild::default();
    while let Some(file) = builder.step() {
        done.layers.push(file);
        options.tell(done.layers.len(), builder.layers());
    }
    Ok(done)
}

/// As [`build`], one layer at a time, for callers that pause in between or stop before the end: what is done by then holds.
#[derive(Debug)]
pub struct IndexBuilder {
    chain: Links,
    next: usize,
    looks: Looks,
    /// What is known of the layers so far; `None` above one of which nothing is known.
    below: Option<Vec<IndexLayer>>,
    nearest: Option<Index>,
    keep_unread: bool,
    /// Whether a layer below has a new index: what those above it lead to may be gone.
    remade: bool,
}

impl IndexBuilder {
    /// Reads the chain of the disk at `path`.
    ///
    /// # Errors
    /// A chain that cannot be read.
    pub fn new(path: &Path, options: &IndexOptions) -> Result<Self> {
        let chain = Links::read(path, options)?;
        Ok(Self {
            chain,
            next: 0,
            looks: Looks::default(),
            below: Some(Vec::new()),
            nearest: None,
            keep_unread: options.keep_unread,
            remade: false,
        })
    }

    /// How many layers there are.
    pub fn layers(&self) -> usize {
        self.chain.links.len()
    }

    /// Whether all are done.
    pub fn is_done(&self) -> bool {
        self.next == self.chain.links.len()
    }

    /// Makes the index of the next layer from the base up, if it lacks one; `None` when all are done.
    pub fn step(&mut self) -> Option<IndexedFile> {
        let link = self.chain.links.get(self.next)?.clone();
        self.next += 1;
        let outcome = self.index(&link).unwrap_or_else(IndexOutcome::Failed);
        Some(IndexedFile { path: link.path, outcome })
    }

    fn index(&mut self, link: &Link) -> Result<IndexOutcome> {
        let Some(below) = self.below.take() else {
            return Err(ErrorKind::NotIndexable { reason: "a layer below cannot be read" }.into());
        };
        let top = self.chain.open(link, Role::Frozen)?;
        if let Some(index) = self.kept(&top, &below) {
            let kind = index.kind();
            self.below = Some(index.layers().to_vec());
            self.nearest = Some(index);
            return Ok(IndexOutcome::Kept(kind));
        }
        if top.head.is_none() {
            let (layer, _) = describe(&top, Home::None, below.last())?;
            self.below = Some(vec![layer]);
            return Ok(IndexOutcome::NotNeeded);
        }
        let (gate, opener) = (&self.chain.gate, &self.chain.opener);
        match extend(&link.path, link.format, &below, self.nearest.as_ref(), gate, opener) {
            Ok(index) => {
                self.remade = true;
                let newest = index.layers().last().expect("the layer itself").clone();
                self.looks.learn(&newest);
                let (kind, bytes, sidecar) = (index.kind(), index.bytes(), newest.home == Home::Sidecar);
                self.below = Some(index.layers().to_vec());
                self.nearest = Some(index);
                Ok(IndexOutcome::Built { kind, bytes, sidecar })
            }
            Err(error) => {
                let (layer, _) = describe(&top, Home::None, below.last())?;
                self.below = Some(below.into_iter().chain([layer]).collect());
                Err(error)
            }
        }
    }

    /// The index that the layer has, if it stands on the same layers with the same indices, remembers every file as it is
    /// now, and leads to no damaged page.
    fn kept(&mut self, top: &Top, below: &[IndexLayer]) -> Option<Index> {
        if self.remade {
            return None;
        }
        let Found::Whole(index) = load(top, &self.chain.gate, &self.chain.opener, &mut self.looks) else {
            return None;
        };
        let (_, known) = index.layers().split_last()?;
        let same = known.len() == below.len()
            && known
                .iter()
                .zip(below)
                .all(|(one, other)| one.record == other.record && one.home == other.home)
            && index.layers().iter().all(IndexLayer::is_as_recorded);
        (same && (self.keep_unread || self.is_sound(&index, top))).then_some(*index)
    }

    /// Whether every leaf of the index of the layer in `top` is what it should be. Those that it shares with the nearest
    /// index below were read for that one; inner pages and delta records were read when it was loaded.
    fn is_sound(&self, index: &Index, top: &Top) -> bool {
        let damaged = index.units().levels().find_map(|level| {
            let tree = index.tree(level);
            let mut own: Box<dyn Iterator<Item = u64>> = match &self.nearest {
                Some(below) => Box::new(below.unshared(index, level)),
                None => Box::new(0..tree.leaves()),
            };
            own.find_map(|number| {
                if tree.get(number).is_hole() {
                    return None;
                }
                let read = index.read_leaf(MapPage { level, number }, |layer, at, page| {
                    let elsewhere;
                    let store = if layer == index.layer() {
                        &top.opened.store
                    } else {
                        elsewhere = self.chain.open(&self.chain.links[layer.index()], Role::Inspected)?;
                        &elsewhere.opened.store
                    };
                    store.read_exact(&mut page[..], at).while_trying("read the index")
                });
                read.err()
            })
        });
        if let Some(error) = &damaged {
            tracing::info!(file = %top.path.display(), %error, "a damaged index is made anew");
        }
        damaged.is_none()
    }
}
