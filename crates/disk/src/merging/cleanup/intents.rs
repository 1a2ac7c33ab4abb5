//! The note itself: what is in it, where it lies, and how it is written and read.

use std::ffi::{OsStr, OsString};
use std::io::{self, Read as _, Write as _};
use std::path::{Path, PathBuf};

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use vmstrata_store::{Access, FileId, FileIdentity, Gate, Place};

use crate::error::{IoContext as _, Result};
use crate::names::beside_name;
use crate::opener::{LocalFiles, Opener as _, directory_of};

/// How the note's name ends; it begins as the disk's, after a dot.
const SUFFIX: &str = ".dropped";
/// The same, of the note of files that stay until somebody asks for their removal.
const LEFT: &str = ".left";
/// How the names of notes end.
pub(in crate::merging) const NOTES: [&str; 2] = [SUFFIX, LEFT];
/// Longer notes are not ours: this is one of 65,535 files with names of 200 bytes.
const BYTES_MAX: u64 = 32 << 20;

#[derive(Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Intents {
    /// The image that is about to stand on something else: device and inode.
    pub(super) target: (u64, u64),
    /// Newest first.
    pub(super) files: Vec<Intent>,
    /// Those that earlier merges could not remove, as somebody needed them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(super) waiting: Vec<Intent>,
}

/// Files that were left when the disk let go of them: see [`crate::merging::orphans`].
#[derive(Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(in crate::merging) struct LeftNote {
    pub(in crate::merging) left: Vec<Intent>,
    /// Left while another process used the disk, which may know of them as its layers.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(in crate::merging) shared: Vec<Intent>,
}

/// A file that is to go.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(in crate::merging) struct Intent {
    /// In the note's directory.
    #[serde(with = "crate::file_name")]
    pub(in crate::merging) name: OsString,
    pub(super) dev: u64,
    pub(super) ino: u64,
    len: u64,
    mtime_ns: i64,
}

impl Intent {
    /// `None` for a name that no note can have, and for a file that cannot be examined.
    pub(in crate::merging) fn of(path: &Path) -> Option<Self> {
        let name = path.file_name()?.to_owned();
        let FileIdentity { file: FileId { dev, ino }, len, mtime_ns, .. } = identity(path).ok()?;
        Some(Self { name, dev, ino, len, mtime_ns })
    }

    /// The same file by another name.
    pub(super) fn named(self, name: &OsStr) -> Self {
        Self { name: name.to_owned(), ..self }
    }

    pub(super) fn is(&self, found: &FileIdentity) -> bool {
        let file = FileId { dev: self.dev, ino: self.ino };
        (file, self.len, self.mtime_ns) == (found.file, found.len, found.mtime_ns)
    }
}

impl Intents {
    /// Writes one in the place of another that may be there: whatever happens, what waits is in the one or in the other.
    pub(super) fn replace(&self, place: &Path) -> Result<()> {
        replace(self, place)
    }

    /// The note; `None` if it was not finished, and so nothing came of that merge.
    pub(super) fn read(place: &Path) -> Result<Option<Self>> {
        read(place)
    }

    /// The disk's note, if there is one that can be read.
    pub(super) fn of(disk: &Path) -> Option<Self> {
        Self::read(&intents_path(disk).filter(|place| is_file(place))?).ok().flatten()
    }
}

impl LeftNote {
    /// The note, if there is one that can be read.
    pub(in crate::merging) fn read(place: &Path) -> Option<Self> {
        if is_file(place) { read(place).ok().flatten() } else { None }
    }

    /// Writes it in the place of another that may be there; without files there is none.
    pub(in crate::merging) fn replace(&self, place: &Path) -> Result<()> {
        if self.left.is_empty() && self.shared.is_empty() {
            remove_intents(place);
            return Ok(());
        }
        replace(self, place)
    }

    pub(in crate::merging) fn retain(&mut self, stays: impl Fn(&Intent) -> bool) {
        self.left.retain(&stays);
        self.shared.retain(&stays);
    }

    /// Forgets files that are gone, or others by now.
    pub(in crate::merging) fn retain_there(&mut self, directory: &Path) {
        self.retain(|noted| identity(&directory.join(&noted.name)).is_ok_and(|found| noted.is(&found)));
    }
}

fn replace(note: &impl Serialize, place: &Path) -> Result<()> {
    let replace = || -> io::Result<()> {
        remove_intents(&atomic_file_of(place));
        let draft = Place::of(&atomic_file_of(place))?;
        let place = draft.directory().place(place.file_name().unwrap_or_default());
        if place.look().is_ok_and(|found| !found.is_file()) {
            return Err(io::ErrorKind::AlreadyExists.into());
        }
        let written = write_to(note, &draft).and_then(|()| draft.rename(&place));
        if written.is_err() {
            remove_intents(&atomic_file_of(&place.path()));
        }
        written?;
        place.directory().sync()
    };
    replace().while_trying("write down what is to be removed").map_err(|error| error.in_file(place))
}

fn write_to(note: &impl Serialize, place: &Place) -> io::Result<()> {
    let text = serde_json::to_vec(note).expect("text and numbers");
    let mut file = place.create(0o644)?;
    file.write_all(&text)?;
    file.sync_all()
}

/// `None` for what is no whole note.
fn read<T: DeserializeOwned>(place: &Path) -> Result<Option<T>> {
    let mut text = Vec::new();
    let file = Place::of(place).and_then(|place| place.open(Access::ReadOnly));
    let read = file.and_then(|file| file.take(BYTES_MAX).read_to_end(&mut text));
    read.while_trying("read what is to be removed")?;
    Ok(serde_json::from_slice(&text).ok())
}

/// The note of files that stay.
pub(in crate::merging) fn left_note_path(disk: &Path) -> Option<PathBuf> {
    Some(directory_of(disk).join(beside_name(disk.file_name()?, LEFT)))
}

pub(super) fn intents_path(disk: &Path) -> Option<PathBuf> {
    Some(directory_of(disk).join(beside_name(disk.file_name()?, SUFFIX)))
}

/// Where a note is until it is whole. Only the disk's writer is ever there.
pub(super) fn atomic_file_of(place: &Path) -> PathBuf {
    let mut name = place.as_os_str().to_owned();
    name.push(".new");
    name.into()
}

pub(in crate::merging) fn is_file(place: &Path) -> bool {
    Place::of(place).is_ok_and(|place| place.is_file())
}

/// Removes a note, if there is one; what else has its name is not ours.
pub(super) fn remove_intents(place: &Path) {
    if let Ok(place) = Place::of(place)
        && place.is_file()
    {
        let _ = place.remove();
    }
}

pub(super) fn identity(path: &Path) -> Result<FileIdentity> {
    LocalFiles.identity(path, &Gate::unrestricted())
}
