//! Removing the files of dropped layers, unless someone needs them.
//!
//! A file is needed by an image that names it as its backing file, and by a process that has it open. Images are looked for
//! in the directories of the disk and of the file, and in those that the operator allowed, at any depth up to a limit; if
//! there are too many files to look at, nothing is removed. What is needed keeps all layers below it.

use std::collections::HashMap;
use std::fs::File;
use std::os::fd::AsFd as _;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use vmstrata_store::{FileId, Gate, Permission, is_held};

use super::plan::{Link, MergeRange, layers_of_others};
use crate::chain::{backing_of, open_layer};
use crate::index::sidecar_of;
use crate::opener::{LocalFiles, Opener as _, Role, directory_of};
use crate::snapshot::{Holder, holders};

/// Most files looked at.
const FILES_MAX: usize = 50_000;
/// Directories below the allowed ones are looked into this deep.
const DEPTH_MAX: usize = 8;
/// A process that is being started holds the files of its parent for a moment.
const PATIENCE: Duration = Duration::from_millis(500);

/// Which files of dropped layers are removed, if no one needs them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Removal {
    /// Those of this disk's own snapshots; not a base without a name, or one that came with a clone.
    #[default]
    Snapshots,
    /// All.
    All,
    /// None.
    Nothing,
}

/// Why a file was not removed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Kept {
    /// It was not asked for.
    #[error("it was to be kept")]
    Asked,
    /// Not a snapshot of this disk.
    #[error("it is not a snapshot that was taken of this disk")]
    NotASnapshot,
    /// An image stands on it.
    #[error("{} stands on it", by.display())]
    Needed {
        /// The image.
        by: PathBuf,
    },
    /// Someone has it open.
    #[error("it is in use")]
    InUse,
    /// Images that may need it were not all looked at.
    #[error("there are more than {FILES_MAX} files, or directories too deep, among which others may need it")]
    Unknown,
    /// Another file has its name now, or a link does.
    #[error("its path leads elsewhere")]
    Replaced,
    /// The host refused.
    #[error("it cannot be removed: {reason}")]
    Failed {
        /// What the host said.
        reason: String,
    },
}

/// The file of a dropped layer.
#[derive(Clone, Debug)]
pub(crate) struct Dropped {
    pub(super) path: PathBuf,
    pub(super) file: FileId,
    pub(super) is_own_snapshot: bool,
}

/// The files of the layers in `range`, newest first.
pub(crate) fn dropped(links: &[Link], range: MergeRange) -> Vec<Dropped> {
    let layers = range.first.index()..=range.last.index();
    let of_others = layers_of_others(links);
    let of = |layer: usize| Dropped {
        path: links[layer].path.clone(),
        file: links[layer].file,
        is_own_snapshot: layer >= of_others && links[layer + 1].info().is_some(),
    };
    layers.rev().map(of).collect()
}

/// Who needs files.
#[derive(Debug)]
pub(crate) struct Users {
    by_file: HashMap<FileId, Vec<PathBuf>>,
    complete: bool,
}

impl Users {
    /// Looks at all images below `directories`.
    pub(crate) fn find(directories: &[PathBuf]) -> Self {
        let mut users = Self { by_file: HashMap::new(), complete: true };
        let mut waiting: Vec<(PathBuf, usize)> = Vec::new();
        for directory in directories {
            if let Ok(path) = directory.canonicalize()
                && !waiting.iter().any(|(known, _)| *known == path)
            {
                waiting.push((path, 0));
            }
        }
        let mut looked = 0;
        while let Some((directory, depth)) = waiting.pop() {
            let Ok(entries) = std::fs::read_dir(&directory) else {
                users.complete = false;
                continue;
            };
            for entry in entries.flatten() {
                looked += 1;
                let Ok(kind) = entry.file_type() else { continue };
                if looked > FILES_MAX || kind.is_dir() && depth == DEPTH_MAX {
                    users.complete = false;
                    return users;
                }
                if kind.is_dir() {
                    waiting.push((entry.path(), depth + 1));
                } else if kind.is_file() {
                    users.enter(entry.path());
                }
            }
        }
        users
    }

    fn enter(&mut self, path: PathBuf) {
        let gate = Gate::unrestricted();
        let Ok(image) = open_layer(&path, Role::Inspected, None, &gate, &LocalFiles) else { return };
        let Ok(Some((backing, _))) = backing_of(&path, image.head.as_ref()) else { return };
        if let Ok(identity) = LocalFiles.identity(&backing, &gate) {
            self.by_file.entry(identity.file).or_default().push(path);
        }
    }

    fn of(&self, file: FileId) -> Option<&PathBuf> {
        self.by_file.get(&file)?.first()
    }

    /// A removed image needs nothing any more.
    fn forget(&mut self, path: &Path) {
        let Ok(path) =
            directory_of(path).canonicalize().map(|dir| dir.join(path.file_name().unwrap_or_default()))
        else {
            return;
        };
        self.by_file.values_mut().for_each(|users| users.retain(|user| *user != path));
    }
}

/// What locks on the files tell.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Locks {
    /// That others use them.
    AreOthers,
    /// Nothing: this process has the files open itself.
    MayBeOurs,
}

/// Removes what may be removed; tells of each file which it was. `needed_here` says whether another disk of this process
/// stands on a file.
pub(crate) fn remove(
    dropped: &[Dropped],
    users: &mut Users,
    removal: Removal,
    locks: Locks,
    needed_here: &dyn Fn(FileId) -> bool,
) -> (Vec<PathBuf>, Vec<(PathBuf, Kept)>) {
    let (mut removed, mut kept) = (Vec::new(), Vec::new());
    for layer in dropped {
        match remove_one(layer, users, removal, locks, needed_here) {
            Ok(()) => {
                users.forget(&layer.path);
                removed.push(layer.path.clone());
            }
            Err(why) => kept.push((layer.path.clone(), why)),
        }
    }
    (removed, kept)
}

impl Removal {
    /// Whether the file is to go if no one needs it.
    pub(super) fn wants(self, layer: &Dropped) -> Result<(), Kept> {
        match self {
            Self::Nothing => Err(Kept::Asked),
            Self::Snapshots if !layer.is_own_snapshot => Err(Kept::NotASnapshot),
            Self::Snapshots | Self::All => Ok(()),
        }
    }
}

fn remove_one(
    layer: &Dropped,
    users: &Users,
    removal: Removal,
    locks: Locks,
    needed_here: &dyn Fn(FileId) -> bool,
) -> Result<(), Kept> {
    removal.wants(layer)?;
    if let Some(by) = users.of(layer.file) {
        return Err(Kept::Needed { by: by.clone() });
    }
    if !users.complete {
        return Err(Kept::Unknown);
    }
    let kind = layer.path.symlink_metadata().map_err(failed)?;
    let now = LocalFiles.identity(&layer.path, &Gate::unrestricted()).map_err(|_| Kept::Replaced)?;
    if kind.is_symlink() || now.file != layer.file {
        return Err(Kept::Replaced);
    }
    if needed_here(layer.file) || in_use(&layer.path, locks) {
        return Err(Kept::InUse);
    }
    // First, so that a process killed in between leaves nothing that speaks of a file that is gone.
    let _ = std::fs::remove_file(sidecar_of(&layer.path));
    std::fs::remove_file(&layer.path).map_err(failed)
}

#[expect(clippy::needless_pass_by_value, reason = "for map_err")]
fn failed(error: std::io::Error) -> Kept {
    Kept::Failed { reason: error.to_string() }
}

fn in_use(path: &Path, locks: Locks) -> bool {
    let locked = || {
        locks == Locks::AreOthers
            && File::open(path).is_ok_and(|file| {
                [Permission::ConsistentRead, Permission::Write]
                    .iter()
                    .any(|&permission| is_held(file.as_fd(), permission).unwrap_or(true))
            })
    };
    patiently(|| (locked() || !holders(path).is_empty()).then_some(())).is_some()
}

/// Another process that has the file open, and keeps it open.
pub(crate) fn user_of(path: &Path) -> Option<Holder> {
    patiently(|| holders(path).into_iter().next())
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
