//! What a killed process left of a merge: files of dropped layers that nothing leads to any more, whose names are taken.
//!
//! ```text
//!   note written ──► relink ──► files removed ──► note removed
//!                │ killed   │ killed
//!                ▼          ▼
//!           files stay   files go, at the next merge, snapshot, or opening for writing
//! ```
//!
//! The note lies beside the disk and names files beside it that are to go, each as the very file it is and was when it was
//! last written. It decides nothing: a file goes only if the disk does not stand on it, nobody else does
//! ([`super::remove`]), and it is that file still. Nor does a note lead out of its directory, which who forged it can write:
//! dropped layers in other directories have a note there. The disk's own note says which directories these are, and only
//! those are looked into that its backing files may lie in.
//!
//! Invariant: before a file goes, the header that does not lead to it any more is on stable storage.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Read as _, Write as _};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use vmstrata_store::{FileId, FileIdentity, Gate};

use super::plan;
use super::remove::{Dropped, Locks, Removal, Users, remove};
use crate::chain::OpenOptions;
use crate::draft::flush_directory;
use crate::error::{IoContext as _, Result};
use crate::opener::{LocalFiles, Opener as _, directory_of};

/// How the note's name ends; it begins as the disk's, after a dot.
const SUFFIX: &str = ".dropped";
/// Longer notes are not ours: this is one of 65,535 files with names of 200 bytes.
const BYTES_MAX: u64 = 32 << 20;

#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Note {
    /// The image that is about to stand on something else: device and inode.
    target: (u64, u64),
    files: Vec<Noted>,
    /// Other directories in which a note of this merge lies.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    elsewhere: Vec<String>,
}

/// A file that is to go.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Noted {
    /// In the note's directory.
    name: String,
    dev: u64,
    ino: u64,
    len: u64,
    mtime_ns: i64,
    /// Among all that go, newest first.
    #[serde(default)]
    position: usize,
}

impl Noted {
    /// `None` for a name that no note can have.
    fn of(path: &Path, position: usize) -> Result<Option<Self>> {
        let Some(name) = path.file_name().and_then(|name| name.to_str()) else { return Ok(None) };
        let FileIdentity { file: FileId { dev, ino }, len, mtime_ns, .. } = identity(path)?;
        Ok(Some(Self { name: name.to_owned(), dev, ino, len, mtime_ns, position }))
    }

    fn is(&self, found: &FileIdentity) -> bool {
        let file = FileId { dev: self.dev, ino: self.ino };
        (file, self.len, self.mtime_ns) == (found.file, found.len, found.mtime_ns)
    }
}

impl Note {
    fn write(&self, place: &Path) -> Result<()> {
        let text = serde_json::to_vec(self).expect("text and numbers");
        let write = || -> io::Result<()> {
            // Not through a link that someone put there.
            let mut file = File::options().write(true).create_new(true).open(place)?;
            file.write_all(&text)?;
            file.sync_all()
        };
        write().while_trying("write down what is to be removed").map_err(|error| error.in_file(place))?;
        flush_directory(place)
    }

    /// The note; `None` if it was not finished, and so nothing came of that merge.
    fn read(place: &Path) -> Result<Option<Self>> {
        let mut text = Vec::new();
        let read = File::open(place).and_then(|file| file.take(BYTES_MAX).read_to_end(&mut text));
        read.while_trying("read what is to be removed")?;
        Ok(serde_json::from_slice(&text).ok())
    }

    /// The notes of the same merge in other directories, as far as they may be looked into.
    fn places_elsewhere(&self, disk: &Path, open: &OpenOptions) -> Vec<PathBuf> {
        let allowed = [directory_of(disk)].into_iter().chain(open.allow_backing.iter().cloned());
        let allowed: Vec<PathBuf> = allowed.filter_map(|directory| directory.canonicalize().ok()).collect();
        let found = self.elsewhere.iter().filter_map(|directory| Path::new(directory).canonicalize().ok());
        let found = found.filter(|directory| allowed.iter().any(|allowed| directory.starts_with(allowed)));
        found
            .filter_map(|directory| note_elsewhere(disk, &directory, self.target))
            .filter(|place| is_file(place))
            .collect()
    }
}

fn note_of(disk: &Path) -> Option<PathBuf> {
    let name = disk.file_name()?.to_str()?;
    Some(directory_of(disk).join(format!(".{name}{SUFFIX}")))
}

/// The note in another directory: disks of the same name may have layers there.
fn note_elsewhere(disk: &Path, directory: &Path, target: (u64, u64)) -> Option<PathBuf> {
    let name = disk.file_name()?.to_str()?;
    Some(directory.join(format!(".{name}.{:x}-{:x}{SUFFIX}", target.0, target.1)))
}

fn is_file(place: &Path) -> bool {
    place.symlink_metadata().is_ok_and(|found| found.is_file())
}

fn identity(path: &Path) -> Result<FileIdentity> {
    LocalFiles.identity(path, &Gate::unrestricted())
}

/// Notes that these files go once `target` does not stand on them any more.
///
/// # Errors
/// Whatever the host reports. There is then no note beside the disk, and others lead nowhere.
pub(super) fn announce(disk: &Path, open: &OpenOptions, target: FileId, files: &[Dropped]) -> Result<()> {
    let Some(place) = note_of(disk) else { return Ok(()) };
    let directory = |path: &Path| directory_of(path).canonicalize().while_trying("find a layer's directory");
    let mut by_directory: BTreeMap<PathBuf, Vec<Noted>> = BTreeMap::new();
    for (position, file) in files.iter().enumerate() {
        if let Some(noted) = Noted::of(&file.path, position)? {
            by_directory.entry(directory(&file.path)?).or_default().push(noted);
        }
    }
    if by_directory.is_empty() {
        return Ok(());
    }
    settle(disk, open);
    let (target, files) =
        ((target.dev, target.ino), by_directory.remove(&directory(disk)?).unwrap_or_default());
    let elsewhere = by_directory.keys().filter_map(|path| path.to_str().map(str::to_owned)).collect();
    // The one that leads to the others comes first, so that none stays that nothing leads to.
    Note { target, files, elsewhere }.write(&place)?;
    for (directory, files) in by_directory {
        let Some(place) = note_elsewhere(disk, &directory, target) else { continue };
        if let Err(error) = (Note { target, files, elsewhere: Vec::new() }).write(&place) {
            // A directory that takes no note may not let its files go either.
            tracing::warn!(%error, "killed now, the merge would leave dropped layers there");
        }
    }
    Ok(())
}

/// Forgets the notes: what they name is gone, or stays.
pub(super) fn settle(disk: &Path, open: &OpenOptions) {
    let Some(place) = note_of(disk) else { return };
    if let Ok(Some(note)) = Note::read(&place) {
        for place in note.places_elsewhere(disk, open) {
            let _ = std::fs::remove_file(place);
        }
    }
    let _ = std::fs::remove_file(place);
}

/// As [`sweep`], of a disk that this process has not open.
pub(crate) fn sweep_files(disk: &Path, open: &OpenOptions) {
    sweep(disk, open, Locks::AreOthers, &|_| false);
}

/// Removes what a killed merge of the disk left, if there is anything. The caller holds the disk's writer's lock, or is its
/// writer, and no merge of it is under way. `needed_here` as in [`remove`].
pub(crate) fn sweep(disk: &Path, open: &OpenOptions, locks: Locks, needed_here: &dyn Fn(FileId) -> bool) {
    let Some(place) = note_of(disk).filter(|place| is_file(place)) else { return };
    let swept = Note::read(&place).and_then(|note| {
        let left = note.map_or(Ok(Vec::new()), |note| left(disk, &note, open))?;
        if left.is_empty() {
            return Ok(());
        }
        let directories = [directory_of(disk)].into_iter().chain(open.allow_backing.iter().cloned());
        let mut users = Users::find(&directories.collect::<Vec<_>>());
        let (removed, kept) = remove(&left, &mut users, Removal::All, locks, needed_here);
        for file in removed {
            tracing::info!(file = %file.display(), "removed what an interrupted merge left");
        }
        for (file, why) in kept {
            tracing::warn!(file = %file.display(), %why, "left by an interrupted merge, and stays");
        }
        flush_directory(disk)
    });
    match swept {
        Ok(()) => settle(disk, open),
        Err(error) => tracing::warn!(note = %place.display(), %error, "what an interrupted merge left stays"),
    }
}

/// The files that are still what they were and that the disk does not stand on, for good: newest first.
fn left(disk: &Path, note: &Note, open: &OpenOptions) -> Result<Vec<Dropped>> {
    let links = plan::links(disk, open, &LocalFiles)?;
    let elsewhere = note.places_elsewhere(disk, open);
    let read = |place: &PathBuf| Note::read(place).ok().flatten().filter(|found| found.target == note.target);
    let mut left = find(&directory_of(disk), &note.files);
    for place in &elsewhere {
        left.extend(read(place).into_iter().flat_map(|note| find(&directory_of(place), &note.files)));
    }
    left.retain(|(_, dropped)| links.iter().all(|link| link.file != dropped.file));
    left.sort_by_key(|(position, _)| *position);
    let target = links.iter().find(|link| (link.file.dev, link.file.ino) == note.target);
    let Some(target) = target.filter(|_| !left.is_empty()) else { return Ok(Vec::new()) };
    // The header that a killed process wrote may be in the page cache alone.
    let flushed = File::open(&target.path).and_then(|file| file.sync_all());
    flushed.while_trying("flush").map_err(|error| error.in_file(&target.path))?;
    Ok(left.into_iter().map(|(_, dropped)| dropped).collect())
}

/// Those of the files that are in the directory, and still what they were; with their positions.
fn find(directory: &Path, files: &[Noted]) -> Vec<(usize, Dropped)> {
    let is_there = |noted: &&Noted| {
        let name = Path::new(&noted.name);
        let is_beside = name.file_name() == Some(name.as_os_str());
        is_beside && identity(&directory.join(name)).is_ok_and(|found| noted.is(&found))
    };
    let dropped = |noted: &Noted| Dropped {
        path: directory.join(&noted.name),
        file: FileId { dev: noted.dev, ino: noted.ino },
        is_own_snapshot: true,
    };
    files.iter().filter(is_there).map(|noted| (noted.position, dropped(noted))).collect()
}
