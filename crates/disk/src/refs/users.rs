//! Who needs a file: images that name it as their backing file, disks elsewhere by their back-references ([`crate::refs::back_refs`]), and processes that
//! have it open, or have a disk open that stands on it.
//!
//! Images are looked for in directories, at any depth up to a limit. Whatever is found and cannot be understood may need the
//! file: a name that is no plain file's, a header that cannot be read. A symbolic link to an image is an image of its own: tools
//! look for what a relative name means beside the name that they were given. Locks tell of processes on other hosts too, and of those
//! of other users, which `/proc` does not; a disk that was opened by its index has locked its newest layers only, so those
//! are what is looked at.

use std::collections::{HashMap, HashSet};
use std::io;
use std::path::{Path, PathBuf};

use rustix::fs::FileType;

use vmstrata_store::{Directory, FileId, Gate, SilentMounts};
use vmstrata_types::MAX_LAYERS;

use super::back_refs::{self, BackRef};
use super::kept::Kept;
use super::link::Link;
use crate::chain::{OpenOptions, backing_text, plain_name};
use crate::error::Result;
use crate::opener::{LocalFiles, Opener as _, Role, directory_of};

/// Most files looked at. Of each that is no image, and of each that stands on nothing, only the first bytes are read and
/// nothing is kept.
pub(super) const FILES_MAX: usize = 1_000_000;
/// Where file systems put what a repair has found; only root may look into it, and no disk is used there.
const LOST: &str = "lost+found";
/// Directories below the given ones are looked into this deep.
const DEPTH_MAX: usize = 8;

/// Why someone may have been overlooked.
#[derive(Clone, Debug)]
pub(super) enum Gap {
    TooMany,
    Unread { path: PathBuf, reason: String },
}

/// An image that names a file as its backing file.
#[derive(Debug, PartialEq, Eq)]
struct User {
    /// As it was found: itself, or a link to it.
    path: PathBuf,
    /// Itself.
    real: PathBuf,
}

/// Images, and what they stand on.
#[derive(Debug, Default)]
pub(crate) struct Users {
    by_file: HashMap<FileId, Vec<User>>,
    gap: Option<Gap>,
    /// Files looked at.
    looked: usize,
    /// Directories that were looked into.
    directories: HashSet<PathBuf>,
    /// File systems that do not answer: the search skips them.
    silent: SilentMounts,
}

impl Users {
    /// Looks at all images below `directories`.
    pub(crate) fn find(directories: &[PathBuf]) -> Self {
        let mut users = Self { silent: SilentMounts::but(directories), ..Self::default() };
        directories.iter().for_each(|directory| users.look_below(directory));
        users
    }

    /// Looks at all images below a directory, unless that was done.
    fn look_below(&mut self, directory: &Path) {
        let mut waiting: Vec<(PathBuf, usize)> =
            directory.canonicalize().into_iter().map(|path| (path, 0)).collect();
        while let Some((directory, depth)) = waiting.pop() {
            if !self.directories.insert(directory.clone()) {
                continue;
            }
            let entries = match Directory::open(&directory).and_then(|directory| directory.entries()) {
                Ok(entries) => entries,
                Err(error) => {
                    self.overlook(&directory, &error);
                    continue;
                }
            };
            for entry in entries {
                self.looked += 1;
                if self.looked > FILES_MAX || depth > DEPTH_MAX {
                    self.gap = Some(Gap::TooMany);
                    return;
                }
                match entry {
                    Ok((entry, FileType::Directory)) if entry.name() == LOST => {}
                    Ok((entry, FileType::Directory)) => {
                        if !self.is_silent(&entry.path()) {
                            waiting.push((entry.path(), depth + 1));
                        }
                    }
                    Ok((entry, _)) => self.look(entry.path()),
                    Err(error) => self.overlook(&directory, &error),
                }
            }
        }
    }

    /// Looks for all that may stand on some layers of a disk.
    pub(crate) fn standing_on(layers: &[Link], disk: &Path, open: &OpenOptions) -> Self {
        let mut users = Self::find(&directories(layers, disk, open));
        users.follow_back_refs(layers.iter().map(|link| link.path.as_path()));
        users
    }

    /// Whether a path leads onto a file system that does not answer; who lies there may have been overlooked.
    fn is_silent(&mut self, path: &Path) -> bool {
        let is_silent = self.silent.hold(path);
        if is_silent {
            self.overlook(path, &"its file system does not answer");
        }
        is_silent
    }

    /// Looks at a file, or where a link to one leads.
    fn look(&mut self, path: PathBuf) {
        // Links that lead nowhere, and what is neither a file nor a link to one, stand on nothing.
        if !self.is_silent(&path) && path.metadata().is_ok_and(|metadata| metadata.is_file()) {
            self.enter(path);
        }
    }

    /// Notes what the image that `path` leads to may stand on, and returns it: by its own place, and by that of a link to it.
    fn enter(&mut self, path: PathBuf) -> Vec<PathBuf> {
        if self.is_silent(&path) {
            return Vec::new();
        }
        let real = match path.canonicalize() {
            Ok(real) => real,
            Err(error) => {
                self.overlook(&path, &error);
                return Vec::new();
            }
        };
        let mut below = self.note(real.clone(), &real);
        if path != real {
            below.extend(self.note(path, &real));
        }
        // Of several names those that lead somewhere are meant; one that leads nowhere is for the caller to wonder about.
        let exists = |path: &PathBuf| !self.silent.hold(path) && path.exists();
        if below.iter().any(exists) {
            below.retain(exists);
        }
        below
    }

    /// Notes what the image `real` stands on if it is opened as `path`.
    fn note(&mut self, path: PathBuf, real: &Path) -> Vec<PathBuf> {
        let below = match below(&path) {
            Ok(below) => below,
            Err(error) => {
                self.overlook(&path, &error);
                return Vec::new();
            }
        };
        // What lies on such a file system is none of the layers asked about.
        for backing in below.iter().filter(|backing| !self.silent.hold(backing)) {
            if let Ok(identity) = LocalFiles.identity(backing, &Gate::unrestricted()) {
                let users = self.by_file.entry(identity.file).or_default();
                let user = User { path: path.clone(), real: real.to_owned() };
                if !users.contains(&user) {
                    users.push(user);
                }
            }
        }
        below
    }

    /// Follows the back-references of layers: down the chain of each disk that is there.
    pub(crate) fn follow_back_refs<'a>(&mut self, layers: impl Iterator<Item = &'a Path>) {
        for layer in layers {
            match back_refs::of_layer(layer) {
                Ok(found) => found.into_iter().for_each(|back_ref| self.follow(back_ref.disk)),
                Err(error) => self.overlook(layer, &error),
            }
        }
    }

    fn follow(&mut self, disk: PathBuf) {
        if self.is_silent(&disk) {
            return;
        }
        if disk.symlink_metadata().is_err_and(|error| error.kind() == io::ErrorKind::NotFound) {
            // Whoever deleted or moved it may have left its snapshots.
            return self.look_beside(&disk);
        }
        let mut next = vec![disk];
        for _ in 0..MAX_LAYERS {
            let Some(path) = next.pop() else { return };
            next.extend(self.enter(path));
        }
        self.gap = Some(Gap::TooMany);
    }

    /// Looks at the images where a disk was, unless that was done.
    fn look_beside(&mut self, disk: &Path) {
        let Ok(directory) = directory_of(disk).canonicalize() else { return };
        let is_new = self.directories.insert(directory.clone());
        let read = || Directory::open(&directory)?.entries();
        let Some(entries) = is_new.then(read).and_then(std::io::Result::ok) else { return };
        for entry in entries {
            self.looked += 1;
            if self.looked > FILES_MAX {
                self.gap = Some(Gap::TooMany);
                return;
            }
            match entry {
                Ok((entry, _)) => self.look(entry.path()),
                Err(error) => self.overlook(disk, &error),
            }
        }
    }

    fn overlook(&mut self, path: &Path, error: &dyn std::fmt::Display) {
        let gap = || Gap::Unread { path: path.to_owned(), reason: error.to_string() };
        self.gap.get_or_insert_with(gap);
    }

    /// An image that names the file as its backing file.
    pub(crate) fn of(&self, file: FileId) -> Option<&PathBuf> {
        self.by_file.get(&file)?.first().map(|user| &user.path)
    }

    /// An image that names the file as its backing file, other than `above`.
    pub(crate) fn other_than(&self, file: FileId, above: FileId) -> Option<&PathBuf> {
        let is_other = |path: &&PathBuf| {
            LocalFiles.identity(path, &Gate::unrestricted()).map_or(true, |found| found.file != above)
        };
        self.by_file.get(&file)?.iter().map(|user| &user.path).find(is_other)
    }

    /// Why someone may have been overlooked, as a reason to keep a file.
    pub(crate) fn overlooked(&self) -> Option<Kept> {
        Some(match self.gap.as_ref()? {
            Gap::TooMany => Kept::TooMany,
            Gap::Unread { path, reason } => Kept::Unread { path: path.clone(), reason: reason.clone() },
        })
    }

    /// A removed image needs nothing any more.
    pub(crate) fn forget(&mut self, path: &Path) {
        let Ok(path) =
            directory_of(path).canonicalize().map(|dir| dir.join(path.file_name().unwrap_or_default()))
        else {
            return;
        };
        self.by_file.values_mut().for_each(|users| users.retain(|user| user.real != path));
    }

    /// All images that stand on `layers`, directly or not, and these themselves.
    pub(super) fn above(&self, layers: &[Link]) -> HashMap<FileId, PathBuf> {
        let mut found: HashMap<FileId, PathBuf> =
            layers.iter().map(|link| (link.file, link.path.clone())).collect();
        let mut next: Vec<FileId> = found.keys().copied().collect();
        while let Some(file) = next.pop() {
            for User { path, real } in self.by_file.get(&file).into_iter().flatten() {
                let Ok(identity) = LocalFiles.identity(real, &Gate::unrestricted()) else { continue };
                if found.insert(identity.file, path.clone()).is_none() {
                    next.push(identity.file);
                }
            }
        }
        found
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

/// The back-references of a layer whose disks are gone.
pub(crate) fn missing(layer: &Path) -> Vec<BackRef> {
    let silent = SilentMounts::but([directory_of(layer)]);
    let is_gone = |back_ref: &BackRef| {
        !silent.hold(&back_ref.disk)
            && back_ref.disk.symlink_metadata().is_err_and(|e| e.kind() == io::ErrorKind::NotFound)
    };
    back_refs::of_layer(layer).unwrap_or_default().into_iter().filter(is_gone).collect()
}

/// The files that the image at `path` may stand on: one, or none; for a `json:` description all that it names.
pub(crate) fn below(path: &Path) -> Result<Vec<PathBuf>> {
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
