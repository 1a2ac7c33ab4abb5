//! Who needs a file: images that name it as their backing file, disks elsewhere by their back-references
//! ([`crate::refs::back_refs`]), and processes that have it open, or have a disk open that stands on it.
//!
//! Images are looked for in the directories of the layers and of the disk and in those of `--allow-backing`, not below them. An image
//! that cannot be understood may need the file: its name is no plain file's, or its header cannot be read. A symbolic link to an image
//! is an image of its own: tools look for what a relative name means beside the name that they were given. Locks tell of processes on
//! other hosts and of other users, too, which `/proc` does not; a disk that was opened by its index has locked its newest layers
//! only, so those are what is looked at.

use std::collections::{HashMap, HashSet};
use std::ffi::OsStr;
use std::io;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::FileTypeExt as _;
use std::path::{Path, PathBuf};

use rustix::fs::FileType;
use rustix::io::Errno;

use vmstrata_store::{Directory, FileId, Gate};
use vmstrata_types::MAX_LAYERS;

use super::back_refs::{self, BackRef};
use super::chain_file::ChainFile;
use super::kept::Kept;
use crate::chain::{OpenOptions, backing_text, plain_name};
use crate::error::Result;
use crate::names::{is_published, is_unfinished};
use crate::opener::{LocalFiles, Opener as _, Role, directory_of};

/// An image that names a file as its backing file.
#[derive(Debug, PartialEq, Eq)]
struct User {
    /// As it was found: itself, or a link to it.
    path: PathBuf,
    /// Itself.
    real: PathBuf,
    file: FileId,
}

/// Images, and what they stand on.
#[derive(Debug, Default)]
pub(crate) struct Users {
    by_file: HashMap<FileId, Vec<User>>,
    /// The first path that could not be read.
    unread: Option<Kept>,
    /// Directories that were looked into.
    directories: HashSet<PathBuf>,
}

impl Users {
    /// Looks at all images in `directories`.
    pub(crate) fn find(directories: &[PathBuf]) -> Self {
        let mut users = Self::default();
        directories.iter().for_each(|directory| users.look_into(directory));
        users
    }

    /// Looks for all that may stand on some layers of a disk.
    pub(crate) fn standing_on(layers: &[ChainFile], disk: &Path, open: &OpenOptions) -> Self {
        let of_layers = layers.iter().map(|link| directory_of(&link.path)).chain([directory_of(disk)]);
        let mut directories: Vec<PathBuf> = of_layers.chain(open.allow_backing.iter().cloned()).collect();
        directories.dedup();
        let mut users = Self::find(&directories);
        users.follow_back_refs(layers.iter().map(|link| link.path.as_path()));
        users
    }

    /// Looks at the images in a directory, unless that was done.
    fn look_into(&mut self, directory: &Path) {
        // `--allow-backing` may name a file.
        let directory = match directory.canonicalize() {
            Ok(directory) => directory,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return,
            Err(error) => return self.overlook(directory, &error),
        };
        if !directory.is_dir() || !self.directories.insert(directory.clone()) {
            return;
        }
        let mut look = || -> io::Result<()> {
            for entry in Directory::open(&directory)?.entries()? {
                let (entry, kind) = entry?;
                let path = entry.path();
                // Links that lead nowhere, and what is neither a file nor a link to one, stand on nothing; published layers stand
                // on such alone.
                if kind == FileType::Directory || is_published(&path) {
                    continue;
                }
                match path.metadata() {
                    // A power failure may have torn the unfinished copy of a layer. It is none before it was read back.
                    Ok(found) if found.is_file() && is_unfinished(&path) && look_below(&path).is_err() => {}
                    Ok(found) if found.is_file() => drop(self.enter(path)),
                    Err(error) if !leads_nowhere(&error) => self.overlook(&path, &error),
                    _ => {}
                }
            }
            Ok(())
        };
        if let Err(error) = look() {
            self.overlook(&directory, &error);
        }
    }

    /// Notes what the image that `path` leads to may stand on, and returns it: by its own place, and by that of a link to it.
    fn enter(&mut self, path: PathBuf) -> Vec<PathBuf> {
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
        if below.iter().any(|path| path.exists()) {
            below.retain(|path| path.exists());
        }
        below
    }

    /// Notes what the image `real` stands on if it is opened as `path`.
    fn note(&mut self, path: PathBuf, real: &Path) -> Vec<PathBuf> {
        let (file, below) = match look_below(&path) {
            Ok(found) => found,
            Err(error) => {
                self.overlook(&path, &error);
                return Vec::new();
            }
        };
        for backing in &below {
            match LocalFiles.identity(backing, &Gate::unrestricted()) {
                Ok(identity) => {
                    let users = self.by_file.entry(identity.file).or_default();
                    let user = User { path: path.clone(), real: real.to_owned(), file };
                    if !users.contains(&user) {
                        users.push(user);
                    }
                }
                Err(error) => match backing.metadata() {
                    Err(error) if leads_nowhere(&error) => {}
                    // Nothing that a layer can be.
                    Ok(found) if !found.is_file() && !found.file_type().is_block_device() => {}
                    _ => self.overlook(backing, &error),
                },
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
        if is_gone(&disk) {
            // A disk that was deleted or moved may have left its snapshots.
            return self.look_into(&directory_of(&disk));
        }
        let mut next = vec![disk.clone()];
        for _ in 0..MAX_LAYERS {
            let Some(path) = next.pop() else { return };
            next.extend(self.enter(path));
        }
        self.overlook(&disk, &"its chain is too long");
    }

    fn overlook(&mut self, path: &Path, error: &dyn std::fmt::Display) {
        let unread = || Kept::Unread { path: path.to_owned(), reason: error.to_string() };
        self.unread.get_or_insert_with(unread);
    }

    /// An image that names the file as its backing file.
    pub(crate) fn of(&self, file: FileId) -> Option<&PathBuf> {
        self.by_file.get(&file)?.first().map(|user| &user.path)
    }

    /// An image that names the file as its backing file, other than `above`.
    pub(crate) fn other_than(&self, file: FileId, above: FileId) -> Option<&PathBuf> {
        self.by_file.get(&file)?.iter().find(|user| user.file != above).map(|user| &user.path)
    }

    /// A path that could not be read, as a reason to keep a file.
    pub(crate) fn overlooked(&self) -> Option<Kept> {
        self.unread.clone()
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
    pub(super) fn above(&self, layers: &[ChainFile]) -> HashMap<FileId, PathBuf> {
        let mut found: HashMap<FileId, PathBuf> =
            layers.iter().map(|link| (link.file, link.path.clone())).collect();
        let mut next: Vec<FileId> = found.keys().copied().collect();
        while let Some(file) = next.pop() {
            for User { path, file, .. } in self.by_file.get(&file).into_iter().flatten() {
                if found.insert(*file, path.clone()).is_none() {
                    next.push(*file);
                }
            }
        }
        found
    }
}

/// The back-references of a layer whose disks are gone.
///
/// # Errors
/// As [`back_refs::of_layer`].
pub(crate) fn missing(layer: &Path) -> io::Result<Vec<BackRef>> {
    let back_refs = back_refs::of_layer(layer)?;
    Ok(back_refs.into_iter().filter(|back_ref| is_gone(&back_ref.disk)).collect())
}

/// Whether that is no file: a link to nothing, or to itself.
fn leads_nowhere(error: &io::Error) -> bool {
    matches!(
        Errno::from_io_error(error),
        Some(Errno::NOENT | Errno::NOTDIR | Errno::LOOP | Errno::NAMETOOLONG)
    )
}

fn is_gone(disk: &Path) -> bool {
    disk.symlink_metadata().is_err_and(|error| error.kind() == io::ErrorKind::NotFound)
}

/// The files that the image at `path` may stand on: one, or none; for a `json:` description all that it names.
pub(crate) fn below(path: &Path) -> Result<Vec<PathBuf>> {
    look_below(path).map(|(_, below)| below)
}

/// The same, and which file the image is.
fn look_below(path: &Path) -> Result<(FileId, Vec<PathBuf>)> {
    let opened = LocalFiles.open(path, Role::Inspected, &Gate::unrestricted())?;
    let text = backing_text(&*opened.store, opened.identity.len).map_err(|error| error.in_file(path))?;
    let file = opened.identity.file;
    let Some(text) = text else { return Ok((file, Vec::new())) };
    let beside = |name: &OsStr| directory_of(path).join(name);
    if let Some(description) = text.as_bytes().strip_prefix(b"json:") {
        let parsed = serde_json::from_slice(description).unwrap_or(serde_json::Value::Null);
        let mut names = Vec::new();
        texts(&parsed, &mut names);
        return Ok((file, names.into_iter().map(|name| beside(name.as_ref())).collect()));
    }
    // What another protocol names is no file of this host.
    Ok((file, plain_name(&text).map(beside).into_iter().collect()))
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
