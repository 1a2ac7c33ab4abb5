//! Chunks of layers, made from an image on this host.
//!
//! ```text
//!   the layer's tables ──► which bytes of the disk a chunk has ──► read from the image ──► the digest's? ── yes ──► the cache
//!                                                                                                │ no
//!                                                                                                ▼
//!                                                                                             fetched
//! ```
//!
//! Two images with the same content have it at different places of their files. The layer's tables say which bytes of the disk lie where
//! in the layer; the rest of a chunk is taken for zeros. Only a chunk with the published digest is kept. So an image with other content, or one
//! that changes meanwhile, costs this host some reads and does no harm.

use std::collections::HashMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use vmstrata_disk::{
    Disk, Error as DiskError, ErrorKind, Format, FrozenLayer, Opened, Opener, ResourceOptions, Resources,
    Role,
};
use vmstrata_qcow2::{Geometry, L2Entry, SubclusterState, Subclusters};
use vmstrata_store::{Gate, Segment};
use vmstrata_types::{GuestOffset, GuestRange};

use crate::cache::Cached;
use crate::dense::TABLES_AT_ONCE;
use crate::digests::CHUNK;
use crate::error::Result;
use crate::remote::{CachedLayer, OnMissing, identity_of};

/// The most runs of a layer that are known: 96 MiB of memory. Chunks with others are fetched.
const RUNS_MAX: usize = 4 << 20;

/// See the module documentation. Goes through layers one after the other.
#[derive(Debug)]
pub(crate) struct Composer {
    image: Arc<Disk>,
    /// Opens the layers by their names.
    resources: Arc<Resources>,
    /// Of which layer `tables` and `runs` are.
    layer: Option<usize>,
    /// The layer's tables that are not read yet.
    tables: Option<Tables>,
    /// In the order of the layer's file once all tables are read.
    runs: Vec<Run>,
    /// Whether the image could not be read.
    is_failing: bool,
}

/// Tables of a layer, from a place of the disk on.
#[derive(Debug)]
struct Tables {
    layer: FrozenLayer,
    geometry: Geometry,
    next: u64,
}

/// Bytes of the disk in a chunk.
#[derive(Clone, Copy, Debug)]
struct Run {
    /// Where they lie in the layer's file.
    host: u64,
    /// Where they lie on the disk.
    guest: u64,
    len: u64,
}

/// The files of some layers, each by its name.
#[derive(Debug)]
struct LayerFiles(HashMap<PathBuf, CachedLayer>);

impl Opener for LayerFiles {
    fn open(&self, path: &Path, _: Role, _: &Gate) -> vmstrata_disk::Result<Opened> {
        let layer = self
            .0
            .get(path)
            .ok_or_else(|| DiskError::io("open a layer", io::ErrorKind::NotFound.into()).in_file(path))?;
        Ok(Opened { store: Arc::new(layer.clone()), identity: identity_of(layer.object()) })
    }
}

fn name_of(layer: &CachedLayer) -> PathBuf {
    layer.id().layer_name().as_str().into()
}

impl Composer {
    /// Makes chunks of these layers from `image`. Their tables come from their repositories, within `patience` each time.
    ///
    /// # Errors
    /// A cache that has no room for a layer's file; a host without threads.
    pub(crate) fn new(image: Arc<Disk>, layers: &[CachedLayer], patience: OnMissing) -> Result<Self> {
        let patient = |layer: &CachedLayer| Ok((name_of(layer), layer.with_patience(patience)?));
        let files = LayerFiles(layers.iter().map(patient).collect::<Result<_>>()?);
        let resources = Resources::start_with(ResourceOptions::default(), Arc::new(files))?;
        Ok(Self { image, resources, layer: None, tables: None, runs: Vec::new(), is_failing: false })
    }

    /// Whether chunks of the layer with this number can be made: all of its tables are read.
    pub(crate) fn is_ready(&self, number: usize) -> bool {
        self.layer == Some(number) && self.tables.is_none()
    }

    /// Reads some tables of the layer with this number. After an error the same are read again.
    ///
    /// # Errors
    /// A repository that does not answer.
    pub(crate) fn read_tables(&mut self, number: usize, layer: &CachedLayer) -> io::Result<()> {
        if self.layer != Some(number) {
            self.runs.clear();
            self.tables = self.open(layer)?;
            self.layer = Some(number);
        }
        let Some(Tables { layer, geometry, next }) = &mut self.tables else { return Ok(()) };
        let span = geometry.l2_span().saturating_mul(TABLES_AT_ONCE);
        let before = self.runs.len();
        let runs = &mut self.runs;
        let range = GuestRange::new(GuestOffset::new(*next), span.min(layer.size().saturating_sub(*next)));
        let read = layer.entries(range, |at, entry| {
            // One that breaks the format stands for no data.
            if let Ok(entry) = entry {
                add(runs, *geometry, at, entry);
            }
        });
        match read {
            Ok(()) => {
                *next = next.saturating_add(span);
                if *next < layer.size() && runs.len() < RUNS_MAX {
                    return Ok(());
                }
            }
            Err(error) => {
                runs.truncate(before);
                pass_over(layer.path(), &error)?;
            }
        }
        self.tables = None;
        self.runs.sort_unstable_by_key(|run| run.host);
        Ok(())
    }

    /// The tables of a layer of which something is missing here.
    fn open(&self, layer: &CachedLayer) -> io::Result<Option<Tables>> {
        let cached = layer.cached();
        if !(0..cached.chunk_count()).any(|chunk| cached.is_missing(chunk)) {
            return Ok(None);
        }
        let path = name_of(layer);
        match FrozenLayer::open(&path, Some(Format::Qcow2), &self.resources) {
            Ok(layer) => Ok(layer.geometry().map(|geometry| Tables { layer, geometry, next: 0 })),
            Err(error) => pass_over(&path, &error).map(|()| None),
        }
    }

    /// What the layer's chunk is if the image has the same content; `None` where that cannot be.
    pub(crate) fn compose(&mut self, cached: &Cached, chunk: usize) -> Option<Vec<u8>> {
        let start = Cached::place_of(chunk).get();
        let from = |at: u64| self.runs.partition_point(|run| run.host < at);
        let runs = &self.runs[from(start)..from(start + CHUNK)];
        if runs.is_empty() {
            return None;
        }
        let mut bytes = vec![0; cached.chunk_len(chunk) as usize];
        for Run { host, guest, len } in runs {
            let there = self.image.size().saturating_sub(*guest).min(*len);
            let at = (host - start) as usize;
            // The file may end within its last cluster.
            let into = bytes.get_mut(at..)?;
            let into_len = into.len().min(there as usize);
            let into = &mut into[..into_len];
            if into.is_empty() {
                continue;
            }
            if let Err(error) = self.image.read(GuestOffset::new(*guest), &[Segment::from_mut(into)]) {
                if !self.is_failing {
                    tracing::warn!(%error, "the image cannot be read: what it may have is fetched");
                }
                self.is_failing = true;
                return None;
            }
        }
        Some(bytes)
    }
}

/// Goes on without tables that cannot be used: what they lead to is fetched. A repository that does not answer may do so later.
fn pass_over(layer: &Path, error: &DiskError) -> io::Result<()> {
    use io::ErrorKind::{InvalidData, UnexpectedEof};
    match error.kind() {
        ErrorKind::Io { source, .. } if !matches!(source.kind(), InvalidData | UnexpectedEof) => {
            Err(io::Error::new(source.kind(), error.to_string()))
        }
        _ => {
            let layer = layer.display();
            tracing::warn!(%layer, %error, "no chunks of the layer are made from an image: they are fetched");
            Ok(())
        }
    }
}

/// Adds the data of a cluster.
fn add(runs: &mut Vec<Run>, geometry: Geometry, at: GuestOffset, entry: L2Entry) {
    let Some(host) = entry.host() else { return };
    let unit = geometry.cluster_bits.size() / u64::from(Subclusters::COUNT);
    for (first, count, state) in entry.states().runs() {
        if state == SubclusterState::Allocated {
            let (from, len) = (u64::from(first) * unit, u64::from(count) * unit);
            add_run(runs, Run { host: host.get() + from, guest: at.get() + from, len });
        }
    }
}

/// Adds a run, of each chunk what lies in it.
fn add_run(runs: &mut Vec<Run>, Run { mut host, mut guest, mut len }: Run) {
    while len > 0 && runs.len() < RUNS_MAX {
        let part = len.min(CHUNK - host % CHUNK);
        match runs.last_mut() {
            Some(last)
                if !host.is_multiple_of(CHUNK)
                    && (last.host + last.len, last.guest + last.len) == (host, guest) =>
            {
                last.len += part;
            }
            _ => runs.push(Run { host, guest, len: part }),
        }
        (host, guest, len) = (host + part, guest + part, len - part);
    }
}
