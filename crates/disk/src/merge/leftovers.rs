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
//! ([`super::remove`]), and it is that file still. Nor does it lead out of the directory, which who forged it can write.
//! Dropped layers in other directories have no name that the disk wants again; a killed process leaves them.
//!
//! Invariant: before a file goes, the header that does not lead to it any more is on stable storage.

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
}

/// A file that is to go.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Noted {
    /// In the disk's directory.
    name: String,
    dev: u64,
    ino: u64,
    len: u64,
    mtime_ns: i64,
}

impl Noted {
    fn is(&self, found: &FileIdentity) -> bool {
        let file = FileId { dev: self.dev, ino: self.ino };
        (file, self.len, self.mtime_ns) == (found.file, found.len, found.mtime_ns)
    }
}

fn note_of(disk: &Path) -> Option<PathBuf> {
    let name = disk.file_name()?.to_str()?;
    Some(directory_of(disk).join(format!(".{name}{SUFFIX}")))
}

fn identity(path: &Path) -> Result<FileIdentity> {
    LocalFiles.identity(path, &Gate::unrestricted())
}

/// Notes that those of these files that lie beside the disk go once `target` does not stand on them any more.
///
/// # Errors
/// Whatever the host reports. There is then no note.
pub(super) fn announce(disk: &Path, target: FileId, files: &[Dropped]) -> Result<()> {
    let Some(place) = note_of(disk) else { return Ok(()) };
    let directory = |path: &Path| directory_of(path).canonicalize().while_trying("find a layer's directory");
    let here = directory(disk)?;
    let mut note = Note { target: (target.dev, target.ino), files: Vec::new() };
    for file in files {
        let Some(name) = file.path.file_name().and_then(|name| name.to_str()) else { continue };
        if directory(&file.path)? == here {
            let FileIdentity { file: FileId { dev, ino }, len, mtime_ns, .. } = identity(&file.path)?;
            note.files.push(Noted { name: name.to_owned(), dev, ino, len, mtime_ns });
        }
    }
    if note.files.is_empty() {
        return Ok(());
    }
    let text = serde_json::to_vec(&note).expect("text and numbers");
    settle(disk);
    let write = || -> io::Result<()> {
        // Not through a link that someone put there.
        let mut file = File::options().write(true).create_new(true).open(&place)?;
        file.write_all(&text)?;
        file.sync_all()
    };
    write().while_trying("write down what is to be removed")?;
    flush_directory(disk)
}

/// Forgets the note: what it names is gone, or stays.
pub(super) fn settle(disk: &Path) {
    if let Some(place) = note_of(disk) {
        let _ = std::fs::remove_file(place);
    }
}

/// As [`sweep`], of a disk that this process has not open.
pub(crate) fn sweep_files(disk: &Path, open: &OpenOptions) {
    sweep(disk, open, Locks::AreOthers, &|_| false);
}

/// Removes what a killed merge of the disk left, if there is anything. The caller holds the disk's writer's lock, or is its
/// writer, and no merge of it is under way. `needed_here` as in [`remove`].
pub(crate) fn sweep(disk: &Path, open: &OpenOptions, locks: Locks, needed_here: &dyn Fn(FileId) -> bool) {
    let is_there = |place: &PathBuf| place.symlink_metadata().is_ok_and(|found| found.is_file());
    let Some(place) = note_of(disk).filter(is_there) else { return };
    let swept = read(&place).and_then(|note| {
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
        Ok(()) => settle(disk),
        Err(error) => tracing::warn!(note = %place.display(), %error, "what an interrupted merge left stays"),
    }
}

/// The note; `None` if it was not finished, and so nothing came of that merge.
fn read(place: &Path) -> Result<Option<Note>> {
    let mut text = Vec::new();
    let read = File::open(place).and_then(|file| file.take(BYTES_MAX).read_to_end(&mut text));
    read.while_trying("read what is to be removed")?;
    Ok(serde_json::from_slice(&text).ok())
}

/// The files that are still what they were and that the disk does not stand on, for good.
fn left(disk: &Path, note: &Note, open: &OpenOptions) -> Result<Vec<Dropped>> {
    let links = plan::links(disk, open, &LocalFiles)?;
    let mut left = Vec::new();
    for noted in &note.files {
        let name = Path::new(&noted.name);
        let path = directory_of(disk).join(name);
        let is_beside = name.file_name() == Some(name.as_os_str());
        let is_it = is_beside && identity(&path).is_ok_and(|found| noted.is(&found));
        let file = FileId { dev: noted.dev, ino: noted.ino };
        if is_it && links.iter().all(|link| link.file != file) {
            left.push(Dropped { path, file, is_own_snapshot: true });
        }
    }
    let target = links.iter().find(|link| (link.file.dev, link.file.ino) == note.target);
    let Some(target) = target.filter(|_| !left.is_empty()) else { return Ok(Vec::new()) };
    // The header that a killed process wrote may be in the page cache alone.
    let flushed = File::open(&target.path).and_then(|file| file.sync_all());
    flushed.while_trying("flush").map_err(|error| error.in_file(&target.path))?;
    Ok(left)
}
