//! Who needs a file: images that name it as their backing file, disks elsewhere that told ([`crate::clones`]), and processes that
//! have it open, or have a disk open that stands on it.
//!
//! Images are looked for in directories, at any depth up to a limit. Whatever is found and cannot be understood may need the
//! file: a name that is no plain file's, a header that cannot be read. Locks tell of processes on other hosts too, and of those
//! of other users, which `/proc` does not; a disk that was opened by its index has locked its newest layers only, so those
//! are what is looked at.

use std::collections::{HashMap, HashSet};
use std::fs::{DirEntry, File};
use std::io;
use std::os::fd::{AsFd as _, BorrowedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use vmstrata_store::{FileId, Gate, OpenStore, Permission, is_held};
use vmstrata_types::MAX_LAYERS;

use super::plan::Link;
use crate::chain::{OpenOptions, backing_text, plain_name};
use crate::clones::{self, Told};
use crate::error::Result;
use crate::opener::{LocalFiles, Opener as _, Role, directory_of};
use crate::snapshot::{Holder, holders_of};

/// Most files looked at.
pub(super) const FILES_MAX: usize = 50_000;
/// Directories below the given ones are looked into this deep.
const DEPTH_MAX: usize = 8;
/// A process that is being started holds the files of its parent for a moment, and one that was killed its own.
const PATIENCE: Duration = Duration::from_millis(500);

/// What this process itself has to do with files.
pub(crate) struct Here<'a> {
    /// Whether one of its disks stands on a file.
    pub(crate) needs: &'a dyn Fn(FileId) -> bool,
    /// Its open file, through which its own locks are not seen.
    pub(crate) store: &'a dyn Fn(FileId) -> Option<Arc<OpenStore>>,
}

impl Here<'_> {
    /// No disk of this process is open; of one it has the writer's lock.
    pub(crate) const NOTHING: Here<'static> = Here { needs: &|_| false, store: &|_| None };

    /// Whether another process uses one of a disk's `layers`, or a disk that stands on one. The topmost is this process's own.
    pub(super) fn is_used_by_others(&self, users: &Users, layers: &[Link]) -> bool {
        let own = layers.last().map(|link| link.file);
        users.in_use(layers, self, own.as_slice()).is_some()
    }
}

/// Why someone may have been overlooked.
#[derive(Clone, Debug)]
pub(super) enum Gap {
    TooMany,
    Unread { path: PathBuf, reason: String },
}

/// Images, and what they stand on.
#[derive(Debug, Default)]
pub(crate) struct Users {
    by_file: HashMap<FileId, Vec<PathBuf>>,
    gap: Option<Gap>,
    looked: usize,
}

impl Users {
    /// Looks at all images below `directories`.
    pub(crate) fn find(directories: &[PathBuf]) -> Self {
        let mut users = Self::default();
        let mut waiting: Vec<(PathBuf, usize)> = Vec::new();
        for directory in directories {
            if let Ok(path) = directory.canonicalize()
                && !waiting.iter().any(|(known, _)| *known == path)
            {
                waiting.push((path, 0));
            }
        }
        while let Some((directory, depth)) = waiting.pop() {
            let entries = match std::fs::read_dir(&directory) {
                Ok(entries) => entries,
                Err(error) => {
                    users.overlook(&directory, &error);
                    continue;
                }
            };
            for entry in entries {
                users.looked += 1;
                if users.looked > FILES_MAX || depth > DEPTH_MAX {
                    users.gap = Some(Gap::TooMany);
                    return users;
                }
                let kind = entry.and_then(|entry| Ok((entry.file_type()?, entry)));
                match kind {
                    Ok((kind, entry)) if kind.is_dir() => waiting.push((entry.path(), depth + 1)),
                    Ok((_, entry)) => users.look(&entry),
                    Err(error) => users.overlook(&directory, &error),
                }
            }
        }
        users
    }

    /// Looks for all that may stand on some layers of a disk.
    pub(crate) fn standing_on(layers: &[Link], disk: &Path, open: &OpenOptions) -> Self {
        let mut users = Self::find(&directories(layers, disk, open));
        users.follow_told(layers.iter().map(|link| link.path.as_path()));
        users
    }

    /// Looks at a file, or where a link to one leads.
    fn look(&mut self, entry: &DirEntry) {
        let path = entry.path();
        // Links that lead nowhere, and what is neither a file nor a link to one, stand on nothing.
        if path.metadata().is_ok_and(|metadata| metadata.is_file()) {
            match path.canonicalize() {
                Ok(path) => drop(self.enter(path)),
                Err(error) => self.overlook(&path, &error),
            }
        }
    }

    /// Notes what the image at `path` stands on, and returns it.
    fn enter(&mut self, path: PathBuf) -> Vec<PathBuf> {
        let below = match below(&path) {
            Ok(below) => below,
            Err(error) => {
                self.overlook(&path, &error);
                return Vec::new();
            }
        };
        for backing in &below {
            if let Ok(identity) = LocalFiles.identity(backing, &Gate::unrestricted()) {
                let users = self.by_file.entry(identity.file).or_default();
                if !users.contains(&path) {
                    users.push(path.clone());
                }
            }
        }
        below
    }

    /// Follows what was told of layers: down the chain of each disk that is there.
    pub(crate) fn follow_told<'a>(&mut self, layers: impl Iterator<Item = &'a Path>) {
        for layer in layers {
            match clones::who_told(layer) {
                Ok(told) => told.into_iter().for_each(|told| self.follow(told.disk)),
                Err(error) => self.overlook(layer, &error),
            }
        }
    }

    fn follow(&mut self, disk: PathBuf) {
        if disk.symlink_metadata().is_err_and(|error| error.kind() == io::ErrorKind::NotFound) {
            return;
        }
        let mut next = vec![disk];
        for _ in 0..MAX_LAYERS {
            let Some(path) = next.pop() else { return };
            next = self.enter(path);
        }
        self.gap = Some(Gap::TooMany);
    }

    fn overlook(&mut self, path: &Path, error: &dyn std::fmt::Display) {
        let gap = || Gap::Unread { path: path.to_owned(), reason: error.to_string() };
        self.gap.get_or_insert_with(gap);
    }

    /// An image that names the file as its backing file.
    pub(crate) fn of(&self, file: FileId) -> Option<&PathBuf> {
        self.by_file.get(&file)?.first()
    }

    pub(super) fn gap(&self) -> Option<&Gap> {
        self.gap.as_ref()
    }

    /// A removed image needs nothing any more.
    pub(super) fn forget(&mut self, path: &Path) {
        let Ok(path) =
            directory_of(path).canonicalize().map(|dir| dir.join(path.file_name().unwrap_or_default()))
        else {
            return;
        };
        self.by_file.values_mut().for_each(|users| users.retain(|user| *user != path));
    }

    /// All images that stand on `layers`, directly or not, and these themselves.
    fn above(&self, layers: &[Link]) -> HashMap<FileId, PathBuf> {
        let mut found: HashMap<FileId, PathBuf> =
            layers.iter().map(|link| (link.file, link.path.clone())).collect();
        let mut next: Vec<FileId> = found.keys().copied().collect();
        while let Some(file) = next.pop() {
            for path in self.by_file.get(&file).into_iter().flatten() {
                let Ok(identity) = LocalFiles.identity(path, &Gate::unrestricted()) else { continue };
                if found.insert(identity.file, path.clone()).is_none() {
                    next.push(identity.file);
                }
            }
        }
        found
    }

    /// Who, beside this process, uses one of `layers`, or a disk that stands on one: `but` are the files that nobody else can
    /// have open.
    pub(crate) fn in_use(&self, layers: &[Link], here: &Here<'_>, but: &[FileId]) -> Option<String> {
        let mut files = self.above(layers);
        files.retain(|file, _| !but.contains(file));
        let set: HashSet<FileId> = files.keys().copied().collect();
        patiently(|| {
            let seen = holders_of(&set).first().map(Holder::to_string);
            seen.or_else(|| {
                let locked = files.iter().find(|(file, path)| is_locked(path, **file, here))?;
                Some(format!("{}, which has {}", Holder::unseen(), locked.1.display()))
            })
        })
    }
}

/// Where images may be that need some layers of a disk.
fn directories(layers: &[Link], disk: &Path, open: &OpenOptions) -> Vec<PathBuf> {
    let of_layers = layers.iter().map(|link| directory_of(&link.path));
    let mut all: Vec<PathBuf> =
        of_layers.chain([directory_of(disk)]).chain(open.allow_backing.iter().cloned()).collect();
    all.dedup();
    all
}

/// Those who told that they stand on the layer and are not where they said.
pub(super) fn missing(layer: &Path) -> Vec<Told> {
    let is_gone =
        |told: &Told| told.disk.symlink_metadata().is_err_and(|e| e.kind() == io::ErrorKind::NotFound);
    clones::who_told(layer).unwrap_or_default().into_iter().filter(is_gone).collect()
}

/// Whether someone else has the file open.
pub(super) fn is_open(path: &Path, file: FileId, here: &Here<'_>) -> bool {
    let open =
        || (is_locked(path, file, here) || !holders_of(&HashSet::from([file])).is_empty()).then_some(());
    patiently(open).is_some()
}

/// Whether anyone has it locked, but for this process.
fn is_locked(path: &Path, file: FileId, here: &Here<'_>) -> bool {
    let held = |fd: BorrowedFd<'_>| {
        let permissions = [Permission::ConsistentRead, Permission::Write];
        permissions.iter().any(|&permission| is_held(fd, permission).unwrap_or(true))
    };
    match (here.store)(file) {
        Some(store) => store.raw().is_some_and(held),
        None => File::open(path).is_ok_and(|file| held(file.as_fd())),
    }
}

/// What `look` sees for as long as there is patience.
fn patiently<T>(look: impl Fn() -> Option<T>) -> Option<T> {
    let deadline = Instant::now() + PATIENCE;
    loop {
        let seen = look()?;
        if Instant::now() >= deadline {
            return Some(seen);
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// The files that the image at `path` may stand on: one, or none; for a `json:` description all that it names.
pub(super) fn below(path: &Path) -> Result<Vec<PathBuf>> {
    let opened = LocalFiles.open(path, Role::Inspected, &Gate::unrestricted())?;
    let text = backing_text(&*opened.store, opened.identity.len).map_err(|error| error.in_file(path))?;
    let Some(text) = text else { return Ok(Vec::new()) };
    let beside = |name: &str| directory_of(path).join(name);
    if let Some(description) = text.strip_prefix("json:") {
        let parsed = serde_json::from_str(description).unwrap_or(serde_json::Value::Null);
        let mut names = Vec::new();
        texts(&parsed, &mut names);
        return Ok(names.into_iter().map(beside).collect());
    }
    // What another protocol names is no file of this host.
    Ok(plain_name(&text).map(beside).into_iter().collect())
}

/// All texts in a JSON value.
fn texts<'a>(value: &'a serde_json::Value, found: &mut Vec<&'a str>) {
    match value {
        serde_json::Value::String(text) => found.push(text),
        serde_json::Value::Array(values) => values.iter().for_each(|value| texts(value, found)),
        serde_json::Value::Object(values) => values.values().for_each(|value| texts(value, found)),
        _ => {}
    }
}
