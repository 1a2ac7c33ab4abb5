//! What a mount of all disks shows: a directory a disk, with the disk as it is now, and its snapshots.
//!
//! ```text
//!   DIR/web/disk               as it is now: never kept in the kernel's page cache, as guests may write it
//!   DIR/web/snapshots/monday   opened when a program opens it, which keeps its file
//! ```
//!
//! The tree holds no disk: each lookup asks the table. A disk or a snapshot whose name no file can have is not shown; nor are the
//! snapshots of a disk whose layers are no files of this host.

use std::collections::HashMap;
use std::ffi::{OsStr, OsString};
use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;
use std::sync::{Arc, Weak};
use std::time::{Duration, SystemTime};

use parking_lot::Mutex;
use rustix::io::Errno;
use vmstrata_disk::snapshot::{self, Snapshot, State};
use vmstrata_disk::{Disk, OpenOptions};
use vmstrata_export::fuse::{About, Directory, File, Node, Opened};
use vmstrata_nbd::Uri;

use super::Host;
use crate::error::Error;
use crate::spec::{DiskSpec, FuseSpec};

const NOW: &str = "disk";
const SNAPSHOTS: &str = "snapshots";

/// All disks of a host, for one mount.
#[derive(Debug)]
pub(super) struct Tree {
    host: Weak<Host>,
    spec: FuseSpec,
    seen: Mutex<HashMap<String, Seen>>,
}

/// The snapshots of a disk as they were when they were last looked at. Its layers change when they do.
#[derive(Clone, Debug)]
struct Seen {
    disk: Weak<Disk>,
    generation: u64,
    snapshots: Arc<Vec<State>>,
    /// Bytes that all layers but the active one take.
    frozen: u64,
    about: Arc<Vec<About>>,
}

impl Tree {
    pub(super) fn new(host: Weak<Host>, spec: FuseSpec) -> Self {
        Self { host, spec, seen: Mutex::default() }
    }

    fn host(&self) -> io::Result<Arc<Host>> {
        // A server that ends has no files any more.
        self.host.upgrade().ok_or_else(|| Errno::SHUTDOWN.into())
    }

    /// The disk of this name, if it is served.
    fn served(&self, name: &str) -> io::Result<(DiskSpec, Arc<Disk>)> {
        let host = self.host()?;
        let table = host.table.lock();
        let (spec, disk) = table.serving(name).map_err(|error| match error {
            Error::NoSuchDisk { .. } => Errno::NOENT,
            _ => Errno::BUSY,
        })?;
        Ok((spec.clone(), Arc::clone(disk)))
    }

    /// The snapshots of a disk; `None` if it shows none.
    fn seen(&self, name: &str) -> io::Result<Option<Seen>> {
        let (spec, disk) = self.served(name)?;
        if spec.tier.is_some() || spec.replica.is_some() || Uri::is_meant(&spec.path) {
            return Ok(None);
        }
        let generation = disk.generation();
        let is_same =
            |seen: &&Seen| seen.generation == generation && Weak::as_ptr(&seen.disk) == Arc::as_ptr(&disk);
        if let Some(seen) = self.seen.lock().get(name).filter(is_same) {
            return Ok(Some(seen.clone()));
        }
        let options = self.host()?.open_options(&spec);
        let found = snapshot::list(disk.path(), &options).map_err(|error| {
            tracing::warn!(disk = name, %error, "its snapshots cannot be shown as files");
            Errno::from_raw_os_error(error.errno())
        })?;
        let seen = Seen::of(&disk, generation, found);
        let mut all = self.seen.lock();
        all.retain(|_, seen| seen.disk.strong_count() > 0);
        all.insert(name.to_owned(), seen.clone());
        Ok(Some(seen))
    }
}

impl Seen {
    fn of(disk: &Arc<Disk>, generation: u64, newest_first: Vec<Snapshot>) -> Self {
        let (mut snapshots, mut about, mut frozen) = (Vec::<State>::new(), Vec::new(), 0);
        for found in newest_first.into_iter().rev() {
            frozen += found.allocated_bytes;
            let Some(info) = found.info.filter(|info| !found.is_being_deleted && is_shown(&info.name)) else {
                continue;
            };
            let modified = SystemTime::UNIX_EPOCH + Duration::from_nanos(info.taken_ns);
            let (size, allocated) = (found.virtual_size, frozen);
            // A clone's own snapshot hides one of the same name of the disk that it comes from.
            if let Some(at) = snapshots.iter().position(|other| name_of(other) == info.name) {
                snapshots.remove(at);
                about.remove(at);
            }
            about.push(About { size, allocated, modified, is_writable: false, is_fixed: true });
            snapshots.push(State { path: found.layer, format: Some(found.format), info: Some(info) });
        }
        let (snapshots, about) = (Arc::new(snapshots), Arc::new(about));
        Self { disk: Arc::downgrade(disk), generation, snapshots, frozen, about }
    }
}

fn name_of(state: &State) -> &str {
    state.info.as_ref().map_or("", |info| &info.name)
}

/// Whether a file can have this name.
fn is_shown(name: &str) -> bool {
    !name.contains('/') && !matches!(name, "." | "..")
}

/// A name that is no text is none of a disk.
fn text(name: &OsStr) -> io::Result<&str> {
    name.to_str().ok_or_else(|| Errno::NOENT.into())
}

/// The root.
#[derive(Debug)]
pub(super) struct AllDisks(pub(super) Arc<Tree>);

impl Directory for AllDisks {
    fn list(&self) -> io::Result<Vec<(OsString, Node)>> {
        let host = self.0.host()?;
        let table = host.table.lock();
        let names = table.served().map(|(name, _)| name).filter(|name| is_shown(name));
        let directory = |name: &str| OneDisk { tree: Arc::clone(&self.0), name: name.to_owned() };
        Ok(names.map(|name| (name.into(), Node::Directory(Arc::new(directory(name))))).collect())
    }

    fn find(&self, name: &OsStr) -> io::Result<Node> {
        let name = text(name)?.to_owned();
        self.0.served(&name)?;
        Ok(Node::Directory(Arc::new(OneDisk { tree: Arc::clone(&self.0), name })))
    }
}

#[derive(Clone, Debug)]
struct OneDisk {
    tree: Arc<Tree>,
    name: String,
}

impl Directory for OneDisk {
    fn list(&self) -> io::Result<Vec<(OsString, Node)>> {
        let mut listed = vec![(NOW.into(), Node::File(Arc::new(Now(self.clone()))))];
        if self.tree.seen(&self.name)?.is_some() {
            listed.push((SNAPSHOTS.into(), Node::Directory(Arc::new(History(self.clone())))));
        }
        Ok(listed)
    }
}

#[derive(Debug)]
struct History(OneDisk);

impl History {
    fn seen(&self) -> io::Result<Seen> {
        self.0.tree.seen(&self.0.name)?.ok_or_else(|| Errno::NOENT.into())
    }

    fn node(&self, (state, about): (&State, &About)) -> Node {
        Node::File(Arc::new(Then { of: self.0.clone(), state: state.clone(), about: *about }))
    }
}

impl Directory for History {
    fn list(&self) -> io::Result<Vec<(OsString, Node)>> {
        let seen = self.seen()?;
        let all = seen.snapshots.iter().zip(&*seen.about);
        Ok(all.map(|found| (name_of(found.0).into(), self.node(found))).collect())
    }

    fn find(&self, name: &OsStr) -> io::Result<Node> {
        let (name, seen) = (text(name)?, self.seen()?);
        let found = seen.snapshots.iter().zip(&*seen.about).find(|(state, _)| name_of(state) == name);
        found.map(|found| self.node(found)).ok_or_else(|| Errno::NOENT.into())
    }
}

/// A disk as it is now.
#[derive(Debug)]
struct Now(OneDisk);

impl File for Now {
    fn id(&self) -> u64 {
        0
    }

    fn about(&self) -> About {
        let (tree, name) = (&self.0.tree, &self.0.name);
        let served = tree.served(name).ok();
        let size = served.as_ref().map_or(0, |(_, disk)| disk.size());
        let is_writable = tree.spec.rw && served.as_ref().is_some_and(|(_, disk)| !disk.is_read_only());
        // Without its layers, what they take is not known: as much as the disk has.
        let frozen = tree.seen(name).ok().flatten().map_or(size, |seen| seen.frozen);
        let active = served.and_then(|(_, disk)| fs::metadata(disk.path()).ok());
        let allocated = frozen + active.as_ref().map_or(0, |found| found.blocks() * 512);
        let modified = active.and_then(|found| found.modified().ok()).unwrap_or(SystemTime::UNIX_EPOCH);
        About { size, allocated, modified, is_writable, is_fixed: false }
    }

    fn open(&self, writes: bool) -> io::Result<Opened> {
        let OneDisk { tree, name } = &self.0;
        let (_, disk) = tree.served(name)?;
        if writes && (!tree.spec.rw || disk.is_read_only()) {
            return Err(Errno::ROFS.into());
        }
        let writer =
            || format!("programs that have {} open", tree.spec.directory.join(name).join(NOW).display());
        let attached = writes.then(|| disk.attach_writer(&writer(), tree.spec.share)).transpose();
        let writer = attached.map_err(|error| {
            tracing::warn!(disk = name, "not opened for writing: {error}");
            Errno::BUSY
        })?;
        Ok(Opened { disk, writer, is_fixed: false, of: name.clone() })
    }

    fn is_served(&self) -> bool {
        self.0.tree.served(&self.0.name).is_ok()
    }
}

/// A disk as it was at a snapshot.
#[derive(Debug)]
struct Then {
    of: OneDisk,
    state: State,
    about: About,
}

impl File for Then {
    fn id(&self) -> u64 {
        self.state.taken_ns().unwrap_or_default()
    }

    fn about(&self) -> About {
        self.about
    }

    fn open(&self, writes: bool) -> io::Result<Opened> {
        let OneDisk { tree, name } = &self.of;
        if writes {
            return Err(Errno::ROFS.into());
        }
        let (spec, host) = (tree.served(name)?.0, tree.host()?);
        let options = self.state.open_options(OpenOptions { read_only: true, ..host.open_options(&spec) });
        let disk = Disk::open(&self.state.path, &options, &host.resources).map_err(|error| {
            let path: &Path = &self.state.path;
            tracing::warn!(disk = name, layer = %path.display(), %error, "a snapshot cannot be opened as a file");
            Errno::from_raw_os_error(error.errno())
        })?;
        Ok(Opened { disk, writer: None, is_fixed: true, of: name.clone() })
    }

    fn is_served(&self) -> bool {
        self.of.tree.served(&self.of.name).is_ok()
    }
}
