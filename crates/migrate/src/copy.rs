//! One layer's file is copied: what it holds, and not its holes. What a killed process had copied is compared, and not sent again.
//!
//! ```text
//!   begin ─► go_on, go_on, ... ─► finish: flush, compare ─► name it: rename
//!                │ each 64 MiB is flushed,
//!                └─► and read from storage on a thread of its own, while the next are copied
//! ```
//!
//! A digest covers the pieces that are not all zeros, with their offsets: two files that read the same have the same, however their holes
//! lie.

use std::fmt;
use std::fs::{self, File};
use std::io;
use std::num::NonZeroU64;
use std::ops::Range;
use std::os::unix::fs::{FileExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread::{self, JoinHandle};

use rustix::fs::{Advice, SeekFrom, Timespec, Timestamps};
use rustix::io::Errno;
use serde::{Deserialize, Serialize};
use vmstrata_disk::{copy_access, unfinished_copy};
use vmstrata_store::{FileId, Place, Planted, is_zero};

use crate::error::{Error, Result};

/// Bytes that are read and written at a time.
const STEP: usize = 1 << 20;
/// The digest has these pieces, unless they are all zeros.
const PIECE: usize = 64 << 10;
/// So much of the source is looked at in one step, where nothing is to be written.
const LOOK: u64 = 64 << 20;
/// Bytes that are read back while the next ones are copied.
const REGION: u64 = 64 << 20;

/// Of these bytes, each block is a hole in the copy if it is all zeros, and is tried by itself where more cannot be read.
const BLOCK: usize = 4096;

/// Bytes that cannot be read, which a copy has as zeros.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unreadable {
    /// The file; of a flat copy, the disk.
    pub file: PathBuf,
    /// Where in it.
    pub offset: u64,
    /// How many.
    pub len: u64,
}

/// Reads a range, and has zeros for the blocks that cannot be read; returns those.
pub(crate) fn read_around<E: fmt::Display>(
    file: &Path,
    buffer: &mut [u8],
    at: u64,
    read: impl Fn(&mut [u8], u64) -> Result<(), E>,
) -> Vec<Unreadable> {
    let mut found: Vec<Unreadable> = Vec::new();
    if read(buffer, at).is_ok() {
        return found;
    }
    for (number, block) in buffer.chunks_mut(BLOCK).enumerate() {
        let (offset, len) = (at + (number * BLOCK) as u64, block.len() as u64);
        let Err(error) = read(block, offset) else { continue };
        block.fill(0);
        tracing::error!(file = %file.display(), offset, bytes = len, %error, "cannot be read: the copy has zeros there");
        match found.last_mut() {
            Some(last) if last.offset + last.len == offset => last.len += len,
            _ => found.push(Unreadable { file: file.to_owned(), offset, len }),
        }
    }
    found
}

/// What a layer's file was when it was read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Seen {
    file: FileId,
    len: u64,
    modified: (i64, i64),
}

impl Seen {
    fn of(about: &fs::Metadata) -> Self {
        Self { file: FileId::of(about), len: about.len(), modified: (about.mtime(), about.mtime_nsec()) }
    }
}

/// The same, as a journal has it. The number of a file system may be another after a reboot.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Source {
    inode: u64,
    len: u64,
    modified: (i64, i64),
}

impl Source {
    pub(crate) fn of(about: &fs::Metadata) -> Self {
        Self { inode: about.ino(), len: about.len(), modified: (about.mtime(), about.mtime_nsec()) }
    }
}

/// See the module documentation.
#[derive(Debug)]
pub(crate) struct LayerCopy {
    pub(crate) from: PathBuf,
    pub(crate) to: PathBuf,
    source: File,
    seen: Seen,
    part: PathBuf,
    target: File,
    /// Bytes that were there already.
    there: u64,
    at: u64,
    digest: blake3::Hasher,
    buffer: Vec<u8>,
    /// Where what is read back ends.
    region: u64,
    back: Option<ReadBack>,
    /// Bytes written.
    pub(crate) sent: u64,
    /// What cannot be read is passed over.
    skips: bool,
    unreadable: Vec<Unreadable>,
}

/// A layer that is whole at its target.
#[derive(Clone, Debug)]
pub(crate) struct Whole {
    pub(crate) digest: String,
    pub(crate) len: u64,
    pub(crate) sent: u64,
    pub(crate) unreadable: Vec<Unreadable>,
    pub(crate) source: Source,
}

impl LayerCopy {
    pub(crate) fn begin(from: &Path, to: &Path, skips: bool) -> Result<Self> {
        let source = File::open(from).map_err(Error::of_file(from, "open the layer"))?;
        let about = source.metadata().map_err(Error::of_file(from, "examine the layer"))?;
        let part = unfinished_copy(to);
        let options = File::options().read(true).write(true).create(true).truncate(false).open(&part);
        let target = options.map_err(Error::of_file(&part, "make the copy"))?;
        let there = target.metadata().map_err(Error::of_file(&part, "examine the copy"))?.len();
        Ok(Self {
            from: from.to_owned(),
            to: to.to_owned(),
            source,
            seen: Seen::of(&about),
            part,
            target,
            there,
            at: 0,
            digest: blake3::Hasher::new(),
            buffer: Vec::new(),
            region: 0,
            back: None,
            sent: 0,
            skips,
            unreadable: Vec::new(),
        })
    }

    /// Copies on, until about `most` bytes are written or a good deal is looked at. Returns the bytes that were written.
    pub(crate) fn go_on(&mut self, most: u64) -> Result<u64> {
        let (mut written, mut looked) = (0, 0);
        while written < most && looked < LOOK {
            let found = next_data(&self.source, self.at).map_err(Error::at_offset(
                &self.from,
                "look for data",
                self.at,
            ))?;
            // A layer that has grown is copied again.
            let Some(at) = found.filter(|at| *at < self.seen.len) else {
                self.at = self.seen.len;
                break;
            };
            // Whole pieces, as holes are compared by them.
            self.at = at - at % PIECE as u64;
            let len =
                STEP.min((self.seen.len - self.at) as usize).min((most - written).max(PIECE as u64) as usize);
            let len = if len > PIECE { len - len % PIECE } else { len };
            written += self.step(len)?;
            looked += len as u64;
            self.at += len as u64;
        }
        self.sent += written;
        if self.at >= self.region + REGION {
            self.region = self.at;
            self.read_back()?;
        }
        Ok(written)
    }

    /// Has what was copied so far read back. Flushed here, it goes to storage while what was copied before comes from there.
    fn read_back(&mut self) -> Result<()> {
        self.target.sync_data().map_err(Error::of_file(&self.part, "flush the copy"))?;
        if self.back.is_none() {
            let begun = self.target.try_clone().and_then(ReadBack::begin);
            self.back = Some(begun.map_err(Error::of_file(&self.part, "read the copy back"))?);
        }
        self.back.as_ref().expect("it was begun").until(self.region);
        Ok(())
    }

    /// Whether all of the source is read.
    pub(crate) fn is_read(&self) -> bool {
        self.at >= self.seen.len
    }

    fn step(&mut self, len: usize) -> Result<u64> {
        self.buffer.resize(len, 0);
        let mut buffer = std::mem::take(&mut self.buffer);
        let read = |into: &mut [u8], at| self.source.read_exact_at(into, at);
        if self.skips {
            self.unreadable.extend(read_around(&self.from, &mut buffer, self.at, read));
        } else {
            read(&mut buffer, self.at).map_err(Error::at_offset(&self.from, "read the layer", self.at))?;
        }
        for (number, piece) in buffer.chunks(PIECE).enumerate() {
            if !is_zero(piece) {
                digest_piece(&mut self.digest, self.at + (number * PIECE) as u64, piece);
            }
        }
        let known = self.there.saturating_sub(self.at).min(len as u64) as usize;
        let mut old = vec![0; known];
        let read = read_padded(&self.target, &mut old, self.at);
        read.map_err(Error::at_offset(&self.part, "read the copy", self.at))?;
        let is_there = |at: usize, block: &[u8]| match old.get(at..at + block.len()) {
            Some(old) => old == block,
            // Where the copy ends, what is past its end counts, too.
            None => old.len() <= at && is_zero(block),
        };
        let mut written = 0;
        for run in runs(&buffer, is_there) {
            let at = self.at + run.start as u64;
            let wrote = self.target.write_all_at(&buffer[run.clone()], at);
            wrote.map_err(Error::at_offset(&self.part, "write the copy", at))?;
            written += run.len() as u64;
        }
        self.buffer = buffer;
        Ok(written)
    }

    /// Brings the copy to stable storage, and makes sure that it reads as the layer, which has not changed.
    pub(crate) fn finish(&mut self) -> Result<Whole> {
        let about = self.source.metadata().map_err(Error::of_file(&self.from, "examine the layer"))?;
        let is_same = fs::metadata(&self.from).is_ok_and(|now| Seen::of(&now) == self.seen);
        if Seen::of(&about) != self.seen || !is_same {
            return Err(Error::Changed { layer: self.from.clone() });
        }
        let part = &self.part;
        self.target.set_len(self.seen.len).map_err(Error::of_file(part, "set the copy's length"))?;
        copy_access(&self.from, &self.target)?;
        // An index is first compared by time.
        let modified = Timespec { tv_sec: self.seen.modified.0, tv_nsec: self.seen.modified.1 };
        let times = Timestamps { last_access: modified, last_modification: modified };
        rustix::fs::futimens(&self.target, &times).map_err(Error::of_file(part, "set the copy's time"))?;
        self.flush()?;
        let digest = self.digest.finalize().to_hex().to_string();
        let back = self.back.take().map_or_else(|| Ok(Digest::default()), ReadBack::end);
        let read = back
            .and_then(|digest| digest.read_back(&self.target, self.seen.len))
            .map_err(Error::of_file(part, "read the copy back"))?
            .text();
        if read != digest {
            let error = if self.there > 0 {
                // What an earlier copy of another layer had where this one has holes.
                Error::Changed { layer: self.from.clone() }
            } else {
                Error::Corrupt { copy: part.clone(), layer: self.from.clone() }
            };
            fs::remove_file(part).map_err(Error::of_file(part, "remove the copy"))?;
            return Err(error);
        }
        Ok(Whole {
            digest,
            len: self.seen.len,
            sent: self.sent,
            source: Source::of(&about),
            unreadable: std::mem::take(&mut self.unreadable),
        })
    }

    fn flush(&self) -> Result<()> {
        if Planted::UnflushedCopy.is_there() {
            return Ok(());
        }
        self.target.sync_all().map_err(Error::of_file(&self.part, "flush the copy"))
    }

    /// Gives the copy, which is whole, its name. `rename_backing` is done to it before, and says whether it has changed it.
    pub(crate) fn name(&self, rename_backing: impl FnOnce(&Path) -> Result<bool>) -> Result<()> {
        // One with another backing name has a time of its own then, so that no index of the source is used for it.
        if rename_backing(&self.part)? {
            self.flush()?;
        }
        // Never over another file.
        let named = Place::of(&self.part).and_then(|part| part.rename_new(&Place::of(&self.to)?));
        match named {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
                Err(Error::Exists { path: self.to.clone() })
            }
            named => named.map_err(Error::of_file(&self.to, "name the copy")),
        }
    }
}

/// The runs of blocks that are not there.
fn runs(buffer: &[u8], is_there: impl Fn(usize, &[u8]) -> bool) -> Vec<Range<usize>> {
    let mut runs: Vec<Range<usize>> = Vec::new();
    for (number, bytes) in buffer.chunks(BLOCK).enumerate() {
        let at = number * BLOCK;
        match runs.last_mut() {
            _ if is_there(at, bytes) => {}
            Some(last) if last.end == at => last.end = at + bytes.len(),
            _ => runs.push(at..at + bytes.len()),
        }
    }
    runs
}

/// The digest of the file at `path`.
pub(crate) fn digest_at(path: &Path) -> Result<String> {
    let read = || {
        let file = File::open(path)?;
        let len = file.metadata()?.len();
        Ok(Digest::default().read(&file, len)?.text())
    };
    read().map_err(Error::of_file::<io::Error>(path, "read"))
}

/// The digest of a file as far as it was read.
#[derive(Debug, Default)]
struct Digest {
    pieces: blake3::Hasher,
    at: u64,
}

impl Digest {
    /// Reads on, up to `end`.
    fn read(mut self, file: &File, end: u64) -> io::Result<Self> {
        let mut buffer = vec![0; STEP];
        while let Some(data) = next_data(file, self.at)?.filter(|data| *data < end) {
            self.at = data - data % PIECE as u64;
            let step = STEP.min((end - self.at) as usize);
            file.read_exact_at(&mut buffer[..step], self.at)?;
            for (number, piece) in buffer[..step].chunks(PIECE).enumerate() {
                if !is_zero(piece) {
                    digest_piece(&mut self.pieces, self.at + (number * PIECE) as u64, piece);
                }
            }
            self.at += step as u64;
        }
        self.at = end;
        Ok(self)
    }

    /// The same of bytes that are on stable storage, from there: what is in memory proves nothing.
    fn read_back(self, file: &File, end: u64) -> io::Result<Self> {
        let _ = rustix::fs::fadvise(file, self.at, NonZeroU64::new(end - self.at), Advice::DontNeed);
        self.read(file, end)
    }

    fn text(&self) -> String {
        self.pieces.finalize().to_hex().to_string()
    }
}

/// Reads a copy back while it grows.
#[derive(Debug)]
struct ReadBack {
    ends: SyncSender<u64>,
    thread: JoinHandle<io::Result<Digest>>,
}

impl ReadBack {
    fn begin(file: File) -> io::Result<Self> {
        let (ends, asked): (_, Receiver<u64>) = sync_channel(1);
        let read =
            move || asked.into_iter().try_fold(Digest::default(), |digest, end| digest.read_back(&file, end));
        let thread = thread::Builder::new().name("move-read-back".to_owned()).spawn(read)?;
        Ok(Self { ends, thread })
    }

    /// Everything before `end` is on storage. Waits until most of it is read. What goes wrong, [`ReadBack::end`] reports.
    fn until(&self, end: u64) {
        let _ = self.ends.send(end);
    }

    fn end(self) -> io::Result<Digest> {
        drop(self.ends);
        self.thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    }
}

fn digest_piece(digest: &mut blake3::Hasher, at: u64, piece: &[u8]) {
    digest.update(&at.to_le_bytes());
    digest.update(piece);
}

/// Where data begins at or past `at`; `None` when there is none. A file system that knows no holes has data everywhere.
fn next_data(file: &File, at: u64) -> io::Result<Option<u64>> {
    match rustix::fs::seek(file, SeekFrom::Data(at)) {
        Ok(found) => Ok(Some(found)),
        Err(Errno::NXIO) => Ok(None),
        Err(Errno::INVAL | Errno::OPNOTSUPP) => Ok((at < file.metadata()?.len()).then_some(at)),
        Err(errno) => Err(errno.into()),
    }
}

fn read_padded(file: &File, mut into: &mut [u8], mut at: u64) -> io::Result<()> {
    while !into.is_empty() {
        match file.read_at(into, at)? {
            0 => {
                into.fill(0);
                break;
            }
            read => {
                into = &mut into[read..];
                at += read as u64;
            }
        }
    }
    Ok(())
}

/// Brings a file that may be another's to stable storage, with its name.
pub(crate) fn flush_file(path: &Path) -> Result<()> {
    File::open(path).and_then(|file| file.sync_all()).map_err(Error::of_file(path, "flush"))?;
    flush_directory(path.parent().unwrap_or(Path::new(".")))
}

/// Brings the names in a directory to stable storage.
pub(crate) fn flush_directory(directory: &Path) -> Result<()> {
    File::open(directory)
        .and_then(|directory| directory.sync_all())
        .map_err(Error::of_file(directory, "flush the directory"))
}

/// Bytes that a file takes of its storage.
pub fn allocated(path: &Path) -> u64 {
    fs::metadata(path).map_or(0, |about| about.blocks() * 512)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// As of a layer with scattered blocks of a guest, whose other blocks are holes.
    #[test]
    fn a_copy_has_blocks_where_the_layer_has_them() {
        let dir = tempfile::tempdir().unwrap();
        let (from, to) = (dir.path().join("layer"), dir.path().join("copy"));
        let layer = File::create(&from).unwrap();
        layer.set_len(64 << 20).unwrap();
        for number in 0..100 {
            layer.write_all_at(&[number as u8 + 1; BLOCK], number * 10 * BLOCK as u64).unwrap();
        }
        let mut copy = LayerCopy::begin(&from, &to, false).unwrap();
        while !copy.is_read() {
            copy.go_on(1 << 20).unwrap();
        }
        assert_eq!(copy.finish().unwrap().sent, 100 * BLOCK as u64);
        copy.name(|_| Ok(false)).unwrap();
        assert!(allocated(&to) < 16 * 100 * BLOCK as u64);
        assert!(fs::read(&from).unwrap() == fs::read(&to).unwrap());
    }

    #[test]
    fn what_cannot_be_read_is_listed_and_zeros() {
        let read = |into: &mut [u8], at: u64| {
            let end = at + into.len() as u64;
            let is_bad = |block: u64| at < block + 4096 && block < end;
            if [8192, 12_288, 40_960].into_iter().any(is_bad) {
                return Err(io::Error::other("bad"));
            }
            into.fill(7);
            Ok(())
        };
        let mut buffer = vec![1; 50_000];
        let found = read_around(Path::new("/a"), &mut buffer, 0, read);
        let places: Vec<(u64, u64)> = found.iter().map(|bad| (bad.offset, bad.len)).collect();
        assert_eq!(places, [(8192, 8192), (40_960, 4096)]);
        let zeros = buffer.iter().filter(|byte| **byte == 0).count();
        assert_eq!((zeros, buffer[8191], buffer[16_384], buffer[49_999]), (3 * 4096, 7, 7, 7));
    }
}
