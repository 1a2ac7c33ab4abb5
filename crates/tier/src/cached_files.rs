//! The files of disks on this host, of which some layers are in repositories.
//!
//! A chain names a layer of a repository by its path there, so that stock tools follow it. This opens it through the cache instead:
//! the engine asks for a path, and gets a store whose bytes come when they are read. Indices of such layers lie on this host.

use std::collections::HashMap;
use std::ffi::{OsStr, OsString};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

use parking_lot::RwLock;
use vmstrata_disk::{ErrorKind, IoContext as _, LocalFiles, Opened, Opener, Role, SIDECAR};
use vmstrata_repo::Repository;
use vmstrata_store::{FileIdentity, Gate};

use crate::cache::Cache;
use crate::error::{Error, Result};
use crate::group::beside;
use crate::head::Object;
use crate::remote::{CachedLayer, OnMissing, Remote, identity_of};

/// See the module documentation.
#[derive(Debug, Default)]
pub struct CachedFiles {
    directories: RwLock<HashMap<PathBuf, Directory>>,
}

/// The directory by which chains of this host name the layers of a repository.
#[derive(Clone, Copy, Debug)]
pub struct LayerDirectory<'a> {
    /// Its path.
    pub path: &'a Path,
    /// The directory of this host that keeps the layers' indices.
    pub indices: &'a Path,
}

/// See [`LayerDirectory`].
#[derive(Debug)]
struct Directory {
    /// Its path without links.
    resolved: PathBuf,
    /// That of the indices, without links.
    indices: PathBuf,
    layers: HashMap<OsString, Layer>,
}

/// A layer, which is opened for as long as a disk has it open.
#[derive(Clone, Debug)]
struct Layer {
    remote: Arc<Remote>,
    object: Object,
}

/// How the layers of a disk are read that are in a directory.
#[derive(Clone, Debug)]
pub struct ReadThrough {
    /// As of all disks that share its [`vmstrata_disk::Resources`].
    files: Arc<CachedFiles>,
    cache: Arc<Cache>,
    on_missing: OnMissing,
    remote: Arc<OnceLock<Arc<Remote>>>,
}

impl ReadThrough {
    /// How the layers of one disk are read.
    pub fn new(files: Arc<CachedFiles>, cache: Arc<Cache>, on_missing: OnMissing) -> Self {
        Self { files, cache, on_missing, remote: Arc::default() }
    }

    /// What opens the files of the disk.
    pub(crate) fn files(&self) -> &Arc<CachedFiles> {
        &self.files
    }

    /// The layers of the disk's repository.
    pub(crate) fn remote(&self, repository: Arc<dyn Repository>) -> &Arc<Remote> {
        self.remote.get_or_init(|| Remote::new(&self.cache, repository, self.on_missing))
    }
}

impl CachedFiles {
    /// From now on, chains get these layers of a repository through the cache. Asks for the tables of each: a chain that is opened reads
    /// those first.
    ///
    /// # Errors
    /// A directory that is not there; what [`Remote::layer`] reports.
    pub fn add(&self, dir: LayerDirectory<'_>, remote: &Arc<Remote>, objects: &[Object]) -> Result<()> {
        let resolve =
            |dir: &Path| dir.canonicalize().map_err(|source| Error::Cache { path: dir.to_owned(), source });
        let (resolved, indices) = (resolve(dir.path)?, resolve(dir.indices)?);
        let objects = self.unknown(dir.path, remote, objects);
        remote.prepare(&objects)?;
        let named = |object: &Object| {
            let layer = Layer { remote: Arc::clone(remote), object: *object };
            (OsString::from(object.id.layer_name().as_str()), layer)
        };
        let layers = objects.iter().map(named);
        let mut directories = self.directories.write();
        let empty = || Directory { resolved, indices, layers: HashMap::new() };
        directories.entry(dir.path.to_owned()).or_insert_with(empty).layers.extend(layers);
        Ok(())
    }

    /// What fetches the layers of a directory.
    pub(crate) fn remote_of(&self, dir: &Path) -> Option<Arc<Remote>> {
        let directories = self.directories.read();
        directories.get(dir)?.layers.values().next().map(|layer| Arc::clone(&layer.remote))
    }

    /// The layer at a path, if it is one that was added.
    ///
    /// # Errors
    /// As [`Remote::layer`].
    pub(crate) fn layer_at(&self, path: &Path) -> Result<Option<CachedLayer>> {
        let (Some(dir), Some(name)) = (path.parent(), path.file_name()) else { return Ok(None) };
        let directories = self.directories.read();
        let layer = directories.get(dir).and_then(|directory| directory.layers.get(name)).cloned();
        drop(directories);
        layer.map(|Layer { remote, object }| remote.layer(&object)).transpose()
    }

    /// Those of a directory's layers that were not added before.
    fn unknown(&self, dir: &Path, remote: &Arc<Remote>, objects: &[Object]) -> Vec<Object> {
        let directories = self.directories.read();
        let Some(directory) = directories.get(dir) else { return objects.to_vec() };
        let known = |object: &&Object| directory.layers.get(OsStr::new(object.id.layer_name().as_str()));
        let is_known =
            |object: &&Object| known(object).is_some_and(|layer| Arc::ptr_eq(&layer.remote, remote));
        objects.iter().filter(|object| !is_known(object)).copied().collect()
    }

    /// The layer at a path, if it is one, and the gate lets it through; and where its index lies.
    fn layer(&self, path: &Path, gate: &Gate) -> vmstrata_disk::Result<Option<(Layer, PathBuf)>> {
        let (Some(dir), Some(name)) = (path.parent(), path.file_name()) else { return Ok(None) };
        let directories = self.directories.read();
        let Some(directory) = directories.get(dir) else { return Ok(None) };
        let Some(layer) = directory.layers.get(name) else { return Ok(None) };
        gate.check(path, &directory.resolved.join(name))?;
        Ok(Some((layer.clone(), beside(&directory.indices.join(name), SIDECAR))))
    }
}

impl Opener for CachedFiles {
    fn open(&self, path: &Path, role: Role, gate: &Gate) -> vmstrata_disk::Result<Opened> {
        let Some((Layer { remote, object }, _)) = self.layer(path, gate)? else {
            return LocalFiles.open(path, role, gate);
        };
        if !matches!(role, Role::Frozen | Role::Inspected) {
            return Err(vmstrata_disk::Error::from(ErrorKind::Published).in_file(path));
        }
        let opened = remote.layer(&object).map_err(io::Error::other);
        let layer = opened.while_trying("open a layer of a repository").map_err(|e| e.in_file(path))?;
        Ok(Opened { store: Arc::new(layer), identity: identity_of(&object) })
    }

    fn identity(&self, path: &Path, gate: &Gate) -> vmstrata_disk::Result<FileIdentity> {
        match self.layer(path, gate)? {
            Some((layer, _)) => Ok(identity_of(&layer.object)),
            None => LocalFiles.identity(path, gate),
        }
    }

    fn sidecar(&self, layer: &Path, gate: &Gate) -> Option<PathBuf> {
        match self.layer(layer, gate) {
            // Those of another disk are not this chain's.
            Ok(Some((_, sidecar))) => gate.check(&sidecar, &sidecar).is_ok().then_some(sidecar),
            Ok(None) => LocalFiles.sidecar(layer, gate),
            Err(_) => None,
        }
    }

    fn may_be_absent(&self) -> bool {
        !self.directories.read().is_empty()
    }
}
