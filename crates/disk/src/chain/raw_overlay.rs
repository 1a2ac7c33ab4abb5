//! What `format=raw` says of a disk after snapshots.
//!
//! Whoever says it means the *disk*: its guest may write anything into a raw file, a qcow2 header too, and must never be
//! believed. A snapshot then puts a qcow2 overlay where the raw file was, and what was said goes on being said. So the
//! overlay has a **mark**, a random number, in its header and in a note beside the disk. A guest can write neither: the note
//! is no part of its disk, and the mark is drawn when its raw file is frozen, and never shown to it.
//!
//! | the file begins with | the note | it is |
//! |---|---|---|
//! | no qcow2 header | whatever | raw |
//! | a header with the mark of the note | is there | the overlay |
//! | another qcow2 header | is there | refused |
//! | a header with an extension of vmstrata's | is missing | refused: an overlay without its note, or a guest's imitation |
//! | another qcow2 header | is missing | raw |
//!
//! Invariant: a file that a guest may have written as raw is opened as qcow2 for nobody who says that the disk is raw, and
//! an overlay of vmstrata's is never opened as raw.

use std::fs::File;
use std::io::{self, Read as _, Write as _};
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use vmstrata_store::{Access, Place};

use rustix::rand::{GetRandomFlags, getrandom};
use serde::{Deserialize, Serialize};
use vmstrata_qcow2::OverlayMark;

use crate::access;
use crate::atomic_file::AtomicFile;
use crate::chain::{Qcow2Head, has_magic, read_head};
use crate::error::{ErrorKind, IoContext as _, Result};
use crate::layer::Format;
use crate::opener::Opened;

/// How the note's name ends.
const ENDING: &str = ".vmso";
/// Bytes of a note: it has some dozens.
const NOTE_MAX: u64 = 4096;
const VERSION: u32 = 1;

/// The note beside a disk.
#[derive(Debug, Serialize, Deserialize)]
struct Note {
    version: u32,
    mark: String,
}

/// How the open file at `path`, of a disk that is said to be raw, keeps its bytes.
///
/// # Errors
/// [`ErrorKind::Unmarked`] where the file may be either; a note that cannot be read or believed; whatever the host reports.
pub(crate) fn format_of(path: &Path, opened: &Opened) -> Result<Format> {
    if !has_magic(&*opened.store)? || !path.metadata().while_trying("examine")?.is_file() {
        // Overlays are files, never devices.
        return Ok(Format::Raw);
    }
    let head = head_of(opened)?;
    let note = note_of(path)?;
    match (read_note(&note, path)?, head) {
        (Some(noted), Some(head)) if head.mark == Some(noted) => Ok(Format::Qcow2),
        (None, None) => Ok(Format::Raw),
        (None, Some(head)) if !head.is_ours => Ok(Format::Raw),
        _ => Err(ErrorKind::Unmarked { note }.into()),
    }
}

/// Whether the open file at `path` is known to be the overlay of a raw disk.
///
/// # Errors
/// Whatever the host reports. A note that cannot be believed says nothing.
pub(crate) fn is_overlay(path: &Path, opened: &Opened) -> Result<bool> {
    if !has_magic(&*opened.store)? {
        return Ok(false);
    }
    let Some(mark) = head_of(opened)?.and_then(|head| head.mark) else { return Ok(false) };
    Ok(read_note(&note_of(path)?, path).is_ok_and(|noted| noted == Some(mark)))
}

/// The mark of a new overlay that takes the place of the file at `disk`, which `began_raw`: the note's, or a new one, which is
/// then noted.
///
/// # Errors
/// A note that cannot be written.
pub(crate) fn of_overlay(disk: &Path, began_raw: bool) -> Result<Option<OverlayMark>> {
    let note = note_of(disk)?;
    if let Ok(Some(noted)) = read_note(&note, disk) {
        return Ok(Some(noted));
    }
    if !began_raw {
        return Ok(None);
    }
    let mark = draw()?;
    write_note(&note, disk, mark).map_err(|error| error.in_file(&note))?;
    Ok(Some(mark))
}

/// The note of the disk at `path`: beside the file that it leads to.
fn note_of(path: &Path) -> Result<PathBuf> {
    let mut name = path.canonicalize().while_trying("find the disk's file")?.into_os_string();
    name.push(ENDING);
    Ok(name.into())
}

/// `None` for a header that nobody could use.
fn head_of(opened: &Opened) -> Result<Option<Qcow2Head>> {
    match read_head(&*opened.store, opened.identity.len) {
        Err(error) if matches!(error.kind(), ErrorKind::Io { .. }) => Err(error),
        head => Ok(head.ok()),
    }
}

/// The mark that the note has; `None` if there is no note.
fn read_note(note: &Path, disk: &Path) -> Result<Option<OverlayMark>> {
    let fail = |fault| ErrorKind::Note { note: note.to_owned(), fault };
    let file = match Place::of(note).and_then(|place| place.open(Access::ReadOnly)) {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(_) => return Err(fail("cannot be read").into()),
    };
    if !is_trusted(&file, disk)? {
        return Err(fail("may have been written by others than those who may write the disk").into());
    }
    let mut text = Vec::new();
    file.take(NOTE_MAX).read_to_end(&mut text).while_trying("read the note")?;
    let read: Option<Note> = serde_json::from_slice(&text).ok();
    let mark = read.filter(|read| read.version == VERSION).and_then(|read| read.mark.parse().ok());
    Ok(Some(mark.ok_or_else(|| fail("is damaged"))?))
}

/// Whether only those could write the note who can write the disk: in a directory such as `/tmp` anybody can make a file.
fn is_trusted(note: &File, disk: &Path) -> Result<bool> {
    let (note, disk) = (note.metadata().while_trying("examine")?, disk.metadata().while_trying("examine")?);
    let owners = [0, rustix::process::geteuid().as_raw(), disk.uid()];
    Ok(note.is_file() && owners.contains(&note.uid()) && note.mode() & !disk.mode() & 0o022 == 0)
}

fn draw() -> Result<OverlayMark> {
    let mut bytes = [0; 16];
    let drawn = getrandom(&mut bytes, GetRandomFlags::empty());
    drawn.map_err(io::Error::from).while_trying("draw a random number")?;
    Ok(OverlayMark::new(bytes))
}

/// Writes the note, for the users of `disk`.
fn write_note(note: &Path, disk: &Path, mark: OverlayMark) -> Result<()> {
    let mut draft = AtomicFile::beside(note)?;
    access::copy(disk, &draft.file)?;
    let text = serde_json::to_string(&Note { version: VERSION, mark: mark.to_string() });
    let text = text.expect("plain data");
    draft.file.write_all(format!("{text}\n").as_bytes()).while_trying("write the note")?;
    draft.publish(note, true)
}
