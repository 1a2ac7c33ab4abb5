//! One layer's file is copied: what it holds, and not its holes. What a killed process had copied is compared, and not sent again.
//!
//! ```text
//!   begin ─► go_on, go_on, ... ─► finish: flush, read back, compare ─► name it: rename
//! ```
//!
//! A digest covers the pieces that are not all zeros, with their offsets: two files that read the same have the same, however their holes
//! lie.

use std::ffi::OsString;
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::{FileExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};

use rustix::fs::{Advice, SeekFrom, Timespec, Timestamps};
use rustix::io::Errno;
use vmstrata_disk::copy_access;
use vmstrata_store::{FileId, Place, is_zero};

use crate::error::{Error, Result};

/// How the name of a file ends that is not whole.
const PART: &str = ".part";
/// Bytes that are read and written at a time.
const STEP: usize = 1 << 20;
/// Of these bytes, each piece is a hole in the copy if it is all zeros.
const PIECE: usize = 64 << 10;
/// So much of the source is looked at in one step, where nothing is to be written.
const LOOK: u64 = 64 << 20;

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
    /// Bytes written.
    pub(crate) sent: u64,
}

/// A layer that is whole at its target.
#[derive(Clone, Debug)]
pub(crate) struct Whole {
    pub(crate) digest: String,
    pub(crate) len: u64,
    pub(crate) sent: u64,
}

impl LayerCopy {
    pub(crate) fn begin(from: &Path, to: &Path) -> Result<Self> {
        let source = File::open(from).map_err(Error::of_file(from, "open the layer"))?;
        let about = source.metadata().map_err(Error::of_file(from, "examine the layer"))?;
        let part = part_of(to);
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
            sent: 0,
        })
    }

    /// Copies on, until about `most` bytes are written or a good deal is looked at. Returns the bytes that were written.
    pub(crate) fn go_on(&mut self, most: u64) -> Result<u64> {
        let (mut written, mut looked) = (0, 0);
        while written < most && looked < LOOK {
            let Some(at) = next_data(&self.source, self.at).map_err(Error::at_offset(
                &self.from,
                "look for data",
                self.at,
            ))?
            else {
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
        Ok(written)
    }

    /// Whether all of the source is read.
    pub(crate) fn is_read(&self) -> bool {
        self.at >= self.seen.len
    }

    fn step(&mut self, len: usize) -> Result<u64> {
        self.buffer.resize(len, 0);
        let mut buffer = std::mem::take(&mut self.buffer);
        let read = self.source.read_exact_at(&mut buffer, self.at);
        read.map_err(Error::at_offset(&self.from, "read the layer", self.at))?;
        let mut written = 0;
        let mut old = Vec::new();
        for (number, piece) in buffer.chunks(PIECE).enumerate() {
            let at = self.at + (number * PIECE) as u64;
            let is_zero = is_zero(piece);
            if !is_zero {
                digest_piece(&mut self.digest, at, piece);
            }
            if at < self.there {
                old.resize(piece.len(), 0);
                let known = read_padded(&self.target, &mut old, at);
                known.map_err(Error::at_offset(&self.part, "read the copy", at))?;
                if old == piece {
                    continue;
                }
            } else if is_zero {
                continue;
            }
            let wrote = self.target.write_all_at(piece, at);
            wrote.map_err(Error::at_offset(&self.part, "write the copy", at))?;
            written += piece.len() as u64;
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
        self.target.sync_all().map_err(Error::of_file(part, "flush the copy"))?;
        // What is in memory proves nothing.
        let _ = rustix::fs::fadvise(&self.target, 0, None, Advice::DontNeed);
        let digest = self.digest.finalize().to_hex().to_string();
        let read = digest_of(&self.target).map_err(Error::of_file(part, "read the copy back"))?;
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
        Ok(Whole { digest, len: self.seen.len, sent: self.sent })
    }

    /// Gives the copy, which is whole, its name. `rename_backing` is done to it before.
    pub(crate) fn name(&self, rename_backing: impl FnOnce(&Path) -> Result<()>) -> Result<()> {
        rename_backing(&self.part)?;
        // Of the layer: what is known of a chain compares times first.
        let modified = Timespec { tv_sec: self.seen.modified.0, tv_nsec: self.seen.modified.1 };
        let times = Timestamps { last_access: modified, last_modification: modified };
        rustix::fs::futimens(&self.target, &times)
            .map_err(Error::of_file(&self.part, "set the copy's time"))?;
        self.target.sync_all().map_err(Error::of_file(&self.part, "flush the copy"))?;
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

/// Where a copy is made.
pub(crate) fn part_of(to: &Path) -> PathBuf {
    let mut name = OsString::from(".");
    name.push(to.file_name().unwrap_or_default());
    name.push(PART);
    to.with_file_name(name)
}

/// The digest of the file at `path`.
pub(crate) fn digest_at(path: &Path) -> Result<String> {
    let file = File::open(path).map_err(Error::of_file(path, "open"))?;
    digest_of(&file).map_err(Error::of_file(path, "read"))
}

fn digest_of(file: &File) -> io::Result<String> {
    let (len, mut at) = (file.metadata()?.len(), 0);
    let (mut digest, mut buffer) = (blake3::Hasher::new(), vec![0; STEP]);
    while let Some(data) = next_data(file, at)? {
        at = data - data % PIECE as u64;
        let step = STEP.min((len - at) as usize);
        file.read_exact_at(&mut buffer[..step], at)?;
        for (number, piece) in buffer[..step].chunks(PIECE).enumerate() {
            if !is_zero(piece) {
                digest_piece(&mut digest, at + (number * PIECE) as u64, piece);
            }
        }
        at += step as u64;
    }
    Ok(digest.finalize().to_hex().to_string())
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

/// Brings the names in a directory to stable storage.
pub(crate) fn flush_directory(directory: &Path) -> Result<()> {
    File::open(directory)
        .and_then(|directory| directory.sync_all())
        .map_err(Error::of_file(directory, "flush the directory"))
}

/// Bytes that a file takes of its storage.
pub(crate) fn allocated(path: &Path) -> u64 {
    fs::metadata(path).map_or(0, |about| about.blocks() * 512)
}
