//! What is known of a move on storage.
//!
//! ```text
//!   /b/.web.qcow2.moving   lines of JSON: where from; each layer that is whole, with its digest; the switch; the end
//!   /a/.web.qcow2.moved    where to: written just before the old path is removed; beside a flat copy: where it went back to
//!   /a/.web.qcow2.sending  lines of JSON: that a flat copy was begun, and where; gone once the disk has moved
//! ```
//!
//! A line is written once what it records is on stable storage. A torn end of the file is ignored. The disk has moved when its old path is
//! gone; once the journal records that, another disk may use the path.

use std::collections::HashMap;
use std::ffi::OsString;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Read as _, Write as _};
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

use rustix::fs::OFlags;
use serde::{Deserialize, Serialize};
use vmstrata_nbd::Uri;
use vmstrata_types::{path_from_text, path_to_text};

use crate::copy::{Source, flush_directory};
use crate::error::{Error, Result};

const VERSION: u32 = 1;
/// Of notes and journals: see [`open_own`].
const PRIVATE: u32 = 0o600;
/// Moves that are followed from one path to the next.
const FOLLOWED_MAX: usize = 64;

#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Line {
    Begin {
        version: u32,
        from: String,
        keep_s: u64,
    },
    Copied {
        from: String,
        name: String,
        len: u64,
        digest: String,
        sent: u64,
        /// Offsets and lengths of what could not be read.
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        unreadable: Vec<(u64, u64)>,
        #[serde(default)]
        source: Option<Source>,
    },
    /// A state that is in the history for the sake of the move only.
    Froze {
        name: String,
    },
    Switched,
    Whole {
        time_ns: u64,
    },
}

/// A layer that is whole at the target.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Copied {
    pub(crate) to: PathBuf,
    pub(crate) len: u64,
    pub(crate) digest: String,
    /// `None` in journals of programs that did not note it.
    pub(crate) source: Option<Source>,
    /// What of the layer could not be read: offsets and lengths.
    pub(crate) unreadable: Vec<(u64, u64)>,
}

impl Copied {
    /// Whether the layer still is what was copied.
    pub(crate) fn is_of(&self, layer: &Path) -> bool {
        fs::metadata(layer).is_ok_and(|now| self.source == Some(Source::of(&now)))
    }
}

/// The journal beside the new path of a disk.
#[derive(Debug)]
pub(crate) struct Journal {
    path: PathBuf,
    file: File,
    /// Bytes of whole lines.
    len: u64,
    /// Whether more follows them, of a line that could not be written.
    is_torn: bool,
    /// The old path.
    pub(crate) from: PathBuf,
    /// Seconds for which the source is kept.
    pub(crate) keep_s: u64,
    /// By the layers' old paths.
    pub(crate) copied: HashMap<PathBuf, Copied>,
    /// Names of states that the move made.
    pub(crate) froze: Vec<String>,
    /// Whether it is known that the old path is not the disk any more, whatever is there.
    pub(crate) has_switched: bool,
    /// When the disk needed its old directory no more.
    pub(crate) whole_ns: Option<u64>,
    pub(crate) sent: u64,
}

/// Opens a file of this user's that only this user can write: others could name any directory in it.
fn open_own(path: &Path, options: &mut OpenOptions) -> io::Result<File> {
    let file = options.custom_flags(OFlags::NOFOLLOW.bits().cast_signed()).open(path)?;
    let about = file.metadata()?;
    let is_own = about.uid() == rustix::process::geteuid().as_raw() && about.mode() & 0o022 == 0;
    if about.is_file() && is_own {
        return Ok(file);
    }
    Err(io::Error::new(io::ErrorKind::PermissionDenied, "it is not this user's alone"))
}

/// Makes such a file, empty.
fn make_own(path: &Path) -> io::Result<File> {
    let mut options = File::options();
    let file = open_own(path, options.append(true).create(true).mode(PRIVATE))?;
    file.set_len(0)?;
    Ok(file)
}

/// Such a file, opened so, and what it has; `None` where there is none.
fn read_own(path: &Path, options: &mut OpenOptions) -> Result<Option<(File, Vec<u8>)>> {
    let mut file = match open_own(path, options.read(true)) {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(Error::of_file(path, "open what is noted of a move")(error)),
    };
    let mut text = Vec::new();
    file.read_to_end(&mut text).map_err(Error::of_file(path, "read what is noted of a move"))?;
    Ok(Some((file, text)))
}

fn text_of(lines: &[impl Serialize]) -> Vec<u8> {
    let mut text = Vec::new();
    for line in lines {
        serde_json::to_writer(&mut text, line).expect("text and numbers");
        text.push(b'\n');
    }
    text
}

fn note_beside(disk: &Path, end: &str) -> PathBuf {
    let mut name = OsString::from(".");
    name.push(disk.file_name().unwrap_or_default());
    name.push(end);
    disk.with_file_name(name)
}

fn journal_of(disk: &Path) -> PathBuf {
    note_beside(disk, ".moving")
}

impl Journal {
    /// Begins that of a move from `from` to `to`. It has its name once its first line is on stable storage.
    pub(crate) fn begin(from: &Path, to: &Path, keep_s: u64) -> Result<Self> {
        let (path, draft) = (journal_of(to), note_beside(to, ".moving.new"));
        let file = make_own(&draft).map_err(Error::of_file(&draft, "make the journal"))?;
        let mut journal = Self::new(path, file, (path_to_text(from), keep_s));
        journal.append(&[Line::Begin { version: VERSION, from: path_to_text(from), keep_s }])?;
        fs::rename(&draft, &journal.path).map_err(Error::of_file(&journal.path, "name the journal"))?;
        flush_directory(to.parent().unwrap_or(Path::new(".")))?;
        Ok(journal)
    }

    fn new(path: PathBuf, file: File, (from, keep_s): (String, u64)) -> Self {
        Self {
            path,
            file,
            len: 0,
            is_torn: false,
            from: path_from_text(&from),
            keep_s,
            copied: HashMap::new(),
            froze: Vec::new(),
            has_switched: false,
            whole_ns: None,
            sent: 0,
        }
    }

    /// That of the disk whose new path is `to`, if there is one. Whoever goes on with the move writes it.
    ///
    /// # Errors
    /// A file that is none.
    pub(crate) fn find(to: &Path) -> Result<Option<Self>> {
        let path = journal_of(to);
        let Some((file, text)) = read_own(&path, File::options().append(true))? else { return Ok(None) };
        let wrong = |why: &str| Error::Journal { path: path.clone(), why: why.to_owned() };
        let (mut lines, mut len) = (Vec::new(), 0);
        for line in text.split_inclusive(|&byte| byte == b'\n').filter(|line| line.ends_with(b"\n")) {
            match serde_json::from_slice::<Line>(line) {
                Ok(line) => lines.push(line),
                Err(error) if error.is_data() => return Err(wrong(&error.to_string())),
                // A power failure left some sectors of what was written last, which was never answered for.
                Err(_) => break,
            }
            len += line.len();
        }
        let mut lines = lines.into_iter();
        let Some(Line::Begin { version: VERSION, from, keep_s }) = lines.next() else {
            return Err(wrong("its first line is of no version that this program knows"));
        };
        let mut journal = Self::new(path.clone(), file, (from, keep_s));
        journal.len = len as u64;
        // Another process may be writing there: who goes on with the move takes it away.
        journal.is_torn = len < text.len();
        lines.for_each(|line| journal.apply(line));
        Ok(Some(journal))
    }

    fn apply(&mut self, line: Line) {
        match line {
            Line::Begin { .. } => {}
            Line::Copied { from, name, len, digest, sent, source, unreadable } => {
                let to = self.path.with_file_name(path_from_text(&name));
                self.sent += sent;
                self.copied.insert(path_from_text(&from), Copied { to, len, digest, source, unreadable });
            }
            Line::Froze { name } => self.froze.push(name),
            Line::Switched => self.has_switched = true,
            Line::Whole { time_ns } => self.whole_ns = Some(time_ns),
        }
    }

    fn append(&mut self, lines: &[Line]) -> Result<()> {
        let text = text_of(lines);
        let mut write = || {
            // What follows a torn line could not be read.
            if self.is_torn {
                self.file.set_len(self.len)?;
            }
            self.is_torn = true;
            self.file.write_all(&text)?;
            self.file.sync_data()
        };
        write().map_err(Error::of_file(&self.path, "write the journal"))?;
        self.is_torn = false;
        self.len += text.len() as u64;
        Ok(())
    }

    fn add(&mut self, lines: Vec<Line>) -> Result<()> {
        self.append(&lines)?;
        lines.into_iter().for_each(|line| self.apply(line));
        Ok(())
    }

    /// Notes layers that are whole: old path, copy, bytes sent.
    pub(crate) fn add_copied(&mut self, layers: Vec<(PathBuf, Copied, u64)>) -> Result<()> {
        let line = |(from, copied, sent): (PathBuf, Copied, u64)| Line::Copied {
            from: path_to_text(&from),
            name: path_to_text(Path::new(copied.to.file_name().unwrap_or_default())),
            len: copied.len,
            digest: copied.digest,
            sent,
            source: copied.source,
            unreadable: copied.unreadable,
        };
        self.add(layers.into_iter().map(line).collect())
    }

    pub(crate) fn add_froze(&mut self, name: &str) -> Result<()> {
        self.add(vec![Line::Froze { name: name.to_owned() }])
    }

    /// Notes that the disk is not at its old path any more, which is on stable storage.
    pub(crate) fn add_switched(&mut self) -> Result<()> {
        self.add(vec![Line::Switched])
    }

    pub(crate) fn add_whole(&mut self, time_ns: u64) -> Result<()> {
        self.add(vec![Line::Whole { time_ns }])
    }

    /// Removes it.
    pub(crate) fn remove(self) -> Result<()> {
        fs::remove_file(&self.path).map_err(Error::of_file(&self.path, "remove the journal"))
    }
}

#[derive(Debug, Serialize, Deserialize)]
struct Note {
    version: u32,
    to: String,
    /// As a raw image, whatever is in it.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    raw: bool,
    /// Of a raw image: the state that its history ends with.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    left: Option<String>,
    /// Of a flat copy that stays at the old path: it holds as soon as there is a file at the new one.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    back: bool,
    /// The flat copy, once nobody writes it: another file at the old path is another disk.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    copy: Option<Source>,
}

impl Note {
    fn new(to: &Path) -> Self {
        Self { version: VERSION, to: path_to_text(to), raw: false, left: None, back: false, copy: None }
    }

    /// The note beside a path, if there is one. One that is torn says nothing.
    fn beside(disk: &Path) -> Result<Option<Self>> {
        let found = read_own(&note_beside(disk, ".moved"), &mut File::options())?;
        Ok(found.and_then(|(_, text)| serde_json::from_slice(&text).ok()))
    }
}

/// Notes beside the old path of a disk where it moves to. On stable storage when this returns.
pub(crate) fn note_moved(from: &Path, to: &Path) -> Result<()> {
    write_note(from, &Note::new(to))
}

/// Where the flat copy of a disk is, and what the disk left.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Flat {
    pub(crate) to: PathBuf,
    /// The state that its history ends with. Programs before this one did not note it.
    pub(crate) left: Option<String>,
}

/// Notes beside the old path of a disk where its flat copy is. On stable storage when this returns.
pub(crate) fn note_flat(from: &Path, flat: Flat) -> Result<()> {
    write_note(from, &Note { raw: true, left: flat.left, ..Note::new(&flat.to) })
}

/// What that note says, if there is one.
///
/// # Errors
/// A note that cannot be read.
pub(crate) fn left_flat(from: &Path) -> Result<Option<Flat>> {
    let note = Note::beside(from)?.filter(|note| note.raw);
    Ok(note.map(|note| Flat { to: path_from_text(&note.to), left: note.left }))
}

/// Notes beside a flat copy, a file that stays, that the disk goes back to `to`, and is there once that is there; when it is there, which file
/// the copy was. On stable storage when this returns.
pub(crate) fn note_return(flat: &Path, to: &Path, copy: Option<&fs::Metadata>) -> Result<()> {
    write_note(flat, &Note { back: true, copy: copy.map(Source::of), ..Note::new(to) })
}

/// What a disk that goes back to the path `to` is called until it is the disk.
pub(crate) fn draft_of_return(to: &Path) -> PathBuf {
    note_beside(to, ".back")
}

fn write_note(from: &Path, note: &Note) -> Result<()> {
    let path = note_beside(from, ".moved");
    let draft = note_beside(from, ".moved.new");
    let text = serde_json::to_vec(note).expect("text");
    let write = || {
        let mut file = make_own(&draft)?;
        file.write_all(&text)?;
        file.sync_all()?;
        fs::rename(&draft, &path)
    };
    write().map_err(Error::of_file(&path, "note where the disk moves"))?;
    flush_directory(from.parent().unwrap_or(Path::new(".")))
}

/// Removes that note.
pub(crate) fn forget_moved(from: &Path) {
    let _ = fs::remove_file(note_beside(from, ".moved"));
}

/// Where the disk at `from` was about to go when its last move ended before the switch did.
///
/// # Errors
/// A note or a journal that cannot be read.
pub(crate) fn half_moved(from: &Path) -> Result<Option<PathBuf>> {
    let Some(note) = Note::beside(from)?.filter(|note| !note.raw && !note.back) else { return Ok(None) };
    let to = path_from_text(&note.to);
    let is_half = |journal: Journal| journal.from == from && !journal.has_switched;
    Ok(Journal::find(&to)?.is_some_and(is_half).then_some(to))
}

/// Where a disk has moved to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Moved {
    /// Its new path, or its address.
    pub path: PathBuf,
    /// Whether it is a raw image there.
    pub is_raw: bool,
}

/// Where the disk is whose path was `path`, if it moved: nothing is at the path, and a note beside it says where to. What a killed move
/// left at its target before the switch is not the disk: that is where it was. That nothing is at the old path of a flat copy is on stable
/// storage when this returns.
pub fn moved_to(path: &Path) -> Option<Moved> {
    let mut at = Moved { path: path.to_owned(), is_raw: false };
    for _ in 0..FOLLOWED_MAX {
        let found = at.path.symlink_metadata();
        let is_gone = found.as_ref().is_err_and(|error| error.kind() == io::ErrorKind::NotFound);
        if !is_gone || Uri::is_meant(&at.path) {
            let is_of = |copy: Source| found.as_ref().is_ok_and(|about| Source::of(about) == copy);
            let note = Note::beside(&at.path).ok().flatten();
            let note = note.filter(|note| note.back && note.copy.is_none_or(is_of));
            let back = note.map(|note| path_from_text(&note.to));
            if let Some(to) = back.filter(|to| to.symlink_metadata().is_ok()) {
                at = Moved { path: to, is_raw: false };
                continue;
            }
            if let Some(from) = not_moved(&at.path) {
                at = Moved { path: from, is_raw: false };
            }
            return (at.path != path).then_some(at);
        }
        let note = Note::beside(&at.path).ok().flatten()?;
        // A process may have been killed before it did: see `source_directory`.
        if note.raw
            && let Err(error) = flush_directory(at.path.parent().unwrap_or(Path::new(".")))
        {
            tracing::error!(%error, disk = %at.path.display(), to = note.to, "has moved, and cannot be used before its old directory is flushed");
            return None;
        }
        at = Moved { path: path_from_text(&note.to), is_raw: note.raw };
    }
    None
}

/// That a flat copy of a disk was begun.
#[derive(Debug)]
pub(crate) struct Sending {
    path: PathBuf,
    file: File,
    /// The target.
    pub(crate) to: PathBuf,
    /// Names of states that the move made.
    pub(crate) froze: Vec<String>,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Sent {
    Begin { version: u32, to: String },
    Froze { name: String },
}

impl Sending {
    /// Notes beside the disk at `from` that it is sent to `to`. On stable storage when this returns.
    pub(crate) fn begin(from: &Path, to: &Path) -> Result<Self> {
        let path = note_beside(from, ".sending");
        let file = make_own(&path).map_err(Error::of_file(&path, "note the move"))?;
        let mut note = Self { path, file, to: to.to_owned(), froze: Vec::new() };
        note.add(&Sent::Begin { version: VERSION, to: path_to_text(to) })?;
        flush_directory(from.parent().unwrap_or(Path::new(".")))?;
        Ok(note)
    }

    /// The note beside the disk at `from`, if there is one. One that is torn says nothing.
    pub(crate) fn find(from: &Path) -> Result<Option<Self>> {
        let path = note_beside(from, ".sending");
        let Some((file, text)) = read_own(&path, File::options().append(true))? else { return Ok(None) };
        let lines = text.split(|&byte| byte == b'\n');
        let mut lines = lines.map_while(|line| serde_json::from_slice::<Sent>(line).ok());
        let Some(Sent::Begin { version: VERSION, to }) = lines.next() else { return Ok(None) };
        let froze = lines.filter_map(|line| match line {
            Sent::Froze { name } => Some(name),
            Sent::Begin { .. } => None,
        });
        let froze = froze.collect();
        Ok(Some(Self { path, file, to: path_from_text(&to), froze }))
    }

    fn add(&mut self, line: &Sent) -> Result<()> {
        let written = self.file.write_all(&text_of(&[line])).and_then(|()| self.file.sync_data());
        written.map_err(Error::of_file(&self.path, "note the move"))
    }

    pub(crate) fn add_froze(&mut self, name: &str) -> Result<()> {
        self.add(&Sent::Froze { name: name.to_owned() })?;
        self.froze.push(name.to_owned());
        Ok(())
    }

    /// Removes it: the disk has moved.
    pub(crate) fn remove(&self) -> Result<()> {
        fs::remove_file(&self.path).map_err(Error::of_file(&self.path, "remove the note of a move"))
    }
}

/// The old path of a disk that was about to move to `to` when its process was killed. That it is there says so; later it may be another's.
fn not_moved(to: &Path) -> Option<PathBuf> {
    let journal = Journal::find(to).ok()??;
    let is_old = !journal.has_switched && journal.from.symlink_metadata().is_ok();
    is_old.then_some(journal.from)
}

/// The old path of the disk at `path`, if it came here by a move, and the files that it came from are kept.
///
/// # Errors
/// A journal that cannot be read.
pub fn came_from(path: &Path) -> Result<Option<PathBuf>> {
    Ok(Journal::find(path)?.map(|journal| journal.from))
}

/// The directory in which layers of the disk at `path` may still lie, which has moved there and is not whole yet: it must be allowed for
/// backing files. That the disk's old path is gone is on stable storage when this returns.
pub fn source_directory(path: &Path) -> Option<PathBuf> {
    let journal = Journal::find(path).ok()??;
    if journal.whole_ns.is_some() || not_moved(path).is_some() {
        return None;
    }
    let directory = journal.from.parent()?;
    // A process may have been killed before it did. A power failure would bring the old path back, without what is written from now on.
    let flushed = if journal.has_switched { Ok(()) } else { flush_directory(directory) };
    match flushed {
        Ok(()) => Some(directory.to_owned()),
        Err(error) => {
            tracing::error!(%error, disk = %path.display(), "has moved, and cannot be used before its old directory is flushed");
            None
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn begun(dir: &Path) -> Journal {
        Journal::begin(Path::new("/old/web.qcow2"), &dir.join("web.qcow2"), 600).unwrap()
    }

    /// Also what a process that was killed had begun under another name.
    #[test]
    fn a_journal_has_its_name_once_it_is_one() {
        let dir = tempfile::tempdir().unwrap();
        let draft = dir.path().join(".web.qcow2.moving.new");
        let mut half =
            File::options().write(true).create(true).truncate(false).mode(PRIVATE).open(&draft).unwrap();
        half.write_all(b"{\"begin\":{\"ver").unwrap();
        assert!(Journal::find(&dir.path().join("web.qcow2")).unwrap().is_none());
        begun(dir.path());
        let found = Journal::find(&dir.path().join("web.qcow2")).unwrap().unwrap();
        assert_eq!((found.from, draft.exists()), (PathBuf::from("/old/web.qcow2"), false));
    }

    /// As on a file system that is full for a while.
    #[test]
    fn a_line_that_could_not_be_written_does_not_spoil_the_next() {
        let dir = tempfile::tempdir().unwrap();
        let mut journal = begun(dir.path());
        journal.add_froze("one").unwrap();
        let torn: [&[u8]; 3] =
            [b"{\"froze\":{\"na", b"{\"froze\":{\"na", b"\0\0\0\0\"}}\n{\"froze\":{\"name\":\"two\"}}\n"];
        for (round, torn) in torn.into_iter().enumerate() {
            journal.file.write_all(torn).unwrap();
            if round == 0 {
                journal.is_torn = true;
            } else {
                // By another process, or before a power failure.
                journal = Journal::find(&dir.path().join("web.qcow2")).unwrap().unwrap();
            }
            journal.add_froze("other").unwrap();
        }
        let found = Journal::find(&dir.path().join("web.qcow2")).unwrap().unwrap();
        let names = ["one", "other", "other", "other"].map(str::to_owned).to_vec();
        assert_eq!((found.froze, found.is_torn), (names, false));
    }
}
