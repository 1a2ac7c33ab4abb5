//! One layer's file is copied: what it holds, and not its holes. What a killed process had copied is compared, and not sent again.
//!
//! ```text
//!   begin ─► go_on, go_on, ... ─► finish: flush, compare ─► name it: rename
//!                │ chunk by chunk, in the order of a Scheduler; up to 64 MiB of them are flushed together,
//!                └─► and read from storage on a thread of its own, while the next are copied
//! ```

mod digest;

use std::fmt;
use std::fs::{self, File};
use std::io;
use std::ops::Range;
use std::os::unix::fs::{FileExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};

use rustix::fs::{Timespec, Timestamps};
use serde::{Deserialize, Serialize};
use vmstrata_disk::{copy_access, unfinished_copy};
use vmstrata_store::{FileId, Place, Planted, is_zero};
use vmstrata_types::{GuestOffset, GuestRange};

use self::digest::{CHUNK, ChunkDigest, Digest, PIECE, ReadBack, data_chunks, next_data};
use crate::error::{Error, Result};
use crate::follow::{Kind, Order, Scheduler};

/// So much of the source is looked at in one step, where nothing is to be written.
const LOOK: u64 = 64 << 20;
/// Bytes that are flushed and read back while the next ones are copied: so many steps, at most that.
const REGION_STEPS: u64 = 64;
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
    /// Which chunk is next. Its offsets are those of the file.
    scheduler: Scheduler,
    /// The chunk that is being copied: the range that is left, and the digest of what was read.
    chunk: Option<(Range<u64>, ChunkDigest)>,
    digest: Digest,
    buffer: Vec<u8>,
    /// Chunks that are not flushed.
    unflushed: Vec<u64>,
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
    pub(crate) fn begin(from: &Path, to: &Path, (order, skips): (Order, bool)) -> Result<Self> {
        let source = File::open(from).map_err(Error::of_file(from, "open the layer"))?;
        let about = source.metadata().map_err(Error::of_file(from, "examine the layer"))?;
        let part = unfinished_copy(to);
        let options = File::options().read(true).write(true).create(true).truncate(false).open(&part);
        let target = options.map_err(Error::of_file(&part, "make the copy"))?;
        let there = target.metadata().map_err(Error::of_file(&part, "examine the copy"))?.len();
        target.set_len(about.len()).map_err(Error::of_file(&part, "set the copy's length"))?;
        let data = data_chunks(&source, about.len()).map_err(Error::of_file(from, "look for data"))?;
        Ok(Self {
            from: from.to_owned(),
            to: to.to_owned(),
            source,
            seen: Seen::of(&about),
            part,
            target,
            there,
            scheduler: Scheduler::new(order, CHUNK, data),
            chunk: None,
            digest: Digest::default(),
            buffer: Vec::new(),
            unflushed: Vec::new(),
            back: None,
            sent: 0,
            skips,
            unreadable: Vec::new(),
        })
    }

    /// The guest's request is at this place of the layer.
    pub(crate) fn guest(&mut self, kind: Kind, at: u64, len: u64) {
        self.scheduler.guest(kind, GuestRange::new(GuestOffset::new(at), len), true);
    }

    /// Copies on, until about `most` bytes are written or a good deal is looked at. Returns the bytes that were written.
    pub(crate) fn go_on(&mut self, most: u64) -> Result<u64> {
        let (mut written, mut looked) = (0, 0);
        while written < most && looked < LOOK {
            let Some((mut left, mut digest)) = self.chunk.take().or_else(|| self.next_chunk()) else { break };
            let data =
                next_data(&self.source, left.start).map_err(Error::of_file(&self.from, "look for data"))?;
            // Whole pieces, as digests have them.
            let data = data.map_or(left.end, |data| data - data % PIECE as u64);
            left.start = data.clamp(left.start, left.end);
            let wanted = (most - written).next_multiple_of(PIECE as u64);
            let part = left.start..left.end.min(left.start + wanted);
            looked += part.end - part.start;
            left.start = part.end;
            if !part.is_empty() {
                written += self.step(part, &mut digest)?;
            }
            if left.is_empty() {
                let at = left.end - 1 - (left.end - 1) % CHUNK;
                self.digest.put(at, &digest);
                self.unflushed.push(at);
            } else {
                self.chunk = Some((left, digest));
            }
        }
        self.sent += written;
        let region = most.saturating_mul(REGION_STEPS).min(REGION);
        if self.unflushed.len() as u64 * CHUNK >= region {
            self.read_back()?;
        }
        Ok(written)
    }

    /// A layer that has grown is copied again.
    fn next_chunk(&mut self) -> Option<(Range<u64>, ChunkDigest)> {
        let range = self.scheduler.next_chunk()?.range;
        Some((range.start.get()..range.end().get().min(self.seen.len), ChunkDigest::default()))
    }

    /// Has what was copied so far read back. Flushed here, it goes to storage while what was copied before comes from there.
    fn read_back(&mut self) -> Result<()> {
        self.target.sync_data().map_err(Error::of_file(&self.part, "flush the copy"))?;
        if self.back.is_none() {
            let begun = self.target.try_clone().and_then(|file| ReadBack::begin(file, self.seen.len));
            self.back = Some(begun.map_err(Error::of_file(&self.part, "read the copy back"))?);
        }
        self.back.as_ref().expect("it was begun").read(std::mem::take(&mut self.unflushed));
        Ok(())
    }

    /// Whether all of the source is read.
    pub(crate) fn is_read(&self) -> bool {
        self.chunk.is_none() && self.scheduler.left() == 0
    }

    fn step(&mut self, part: Range<u64>, digest: &mut ChunkDigest) -> Result<u64> {
        let (begin, len) = (part.start, part.end - part.start);
        let mut buffer = std::mem::take(&mut self.buffer);
        buffer.resize(len as usize, 0);
        let read = |into: &mut [u8], at| self.source.read_exact_at(into, at);
        if self.skips {
            self.unreadable.extend(read_around(&self.from, &mut buffer, begin, read));
        } else {
            read(&mut buffer, begin).map_err(Error::at_offset(&self.from, "read the layer", begin))?;
        }
        digest.add(begin, &buffer);
        let known = self.there.saturating_sub(begin).min(len) as usize;
        let mut old = vec![0; known];
        let read = self.target.read_exact_at(&mut old, begin);
        read.map_err(Error::at_offset(&self.part, "read the copy", begin))?;
        let is_there = |at: usize, block: &[u8]| match old.get(at..at + block.len()) {
            Some(old) => old == block,
            // Where the copy ends, what is past its end counts, too.
            None => old.len() <= at && is_zero(block),
        };
        let mut written = 0;
        for run in runs(&buffer, is_there) {
            let at = begin + run.start as u64;
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
        let part = &self.part.clone();
        copy_access(&self.from, &self.target)?;
        // An index is first compared by time.
        let modified = Timespec { tv_sec: self.seen.modified.0, tv_nsec: self.seen.modified.1 };
        let times = Timestamps { last_access: modified, last_modification: modified };
        rustix::fs::futimens(&self.target, &times).map_err(Error::of_file(part, "set the copy's time"))?;
        self.flush()?;
        let digest = self.digest.text();
        let read = self.read_rest().map_err(Error::of_file(part, "read the copy back"))?.text();
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

    /// The digest of all that the flushed copy holds.
    fn read_rest(&mut self) -> io::Result<Digest> {
        let mut read = self.back.take().map_or_else(|| Ok(Digest::default()), ReadBack::end)?;
        read.read_back(&self.target, self.seen.len, &self.unflushed)?;
        read.read_others(&self.target, self.seen.len)?;
        Ok(read)
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
    let digest = File::open(path).and_then(|file| Digest::of(&file));
    Ok(digest.map_err(Error::of_file(path, "read"))?.text())
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
    use rand::rngs::SmallRng;
    use rand::{Rng as _, SeedableRng as _};

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
        let mut copy = LayerCopy::begin(&from, &to, (Order::Sequential, false)).unwrap();
        while !copy.is_read() {
            copy.go_on(1 << 20).unwrap();
        }
        assert_eq!(copy.finish().unwrap().sent, 100 * BLOCK as u64);
        copy.name(|_| Ok(false)).unwrap();
        assert!(allocated(&to) < 16 * 100 * BLOCK as u64);
        assert!(fs::read(&from).unwrap() == fs::read(&to).unwrap());
    }

    /// A layer of 24 chunks and a part of one: some are holes, some are zeros, some have a little.
    fn layer_at(path: &Path, random: &mut SmallRng) {
        let layer = File::create(path).unwrap();
        layer.set_len(24 * CHUNK + 12_345).unwrap();
        for chunk in 0..24 {
            let len = [0, 0, BLOCK, 300_000, CHUNK as usize][random.random_range(0..5)];
            let bytes = vec![u8::from(random.random_bool(0.8)) * 7; len];
            layer.write_all_at(&bytes, chunk * CHUNK + random.random_range(0..=CHUNK - len as u64)).unwrap();
        }
        layer.write_all_at(b"the end", 24 * CHUNK + 12_338).unwrap();
    }

    /// Steps of any size, with a guest here and there. Returns the bytes written.
    fn steps(copy: &mut LayerCopy, random: &mut SmallRng, steps: usize) -> u64 {
        let mut written = 0;
        for _ in 0..steps {
            if copy.is_read() {
                break;
            }
            copy.guest(Kind::Read, random.random_range(0..25 * CHUNK), 4096);
            written += copy.go_on(random.random_range(1..2 * CHUNK)).unwrap();
        }
        written
    }

    #[test]
    fn a_copy_in_any_order_goes_on_in_any_other() {
        let mut random = SmallRng::seed_from_u64(7);
        let others = Order::ALL.into_iter().cycle().skip(2);
        for (order, other) in Order::ALL.into_iter().zip(others) {
            let dir = tempfile::tempdir().unwrap();
            let (from, to) = (dir.path().join("layer"), dir.path().join("copy"));
            layer_at(&from, &mut random);
            let mut killed = LayerCopy::begin(&from, &to, (order, false)).unwrap();
            let sent = steps(&mut killed, &mut random, 8);
            drop(killed);
            let mut copy = LayerCopy::begin(&from, &to, (other, false)).unwrap();
            let rest = steps(&mut copy, &mut random, usize::MAX);
            let whole = copy.finish().unwrap();
            copy.name(|_| Ok(false)).unwrap();
            let bytes = fs::read(&from).unwrap();
            assert!(bytes == fs::read(&to).unwrap(), "{order:?}, then {other:?}");
            let blocks = bytes.chunks(BLOCK).filter(|block| !is_zero(block)).count() as u64;
            assert!(sent + rest <= blocks * BLOCK as u64, "nothing is sent twice: {sent} and {rest}");
            assert_eq!((digest_at(&to).unwrap(), whole.sent), (whole.digest, rest));
        }
    }

    /// Such as what an earlier copy of another layer left.
    #[test]
    fn what_lies_in_a_hole_of_the_layer_is_found() {
        let dir = tempfile::tempdir().unwrap();
        let (from, to) = (dir.path().join("layer"), dir.path().join("copy"));
        File::create(&from).unwrap().set_len(4 * CHUNK).unwrap();
        fs::write(unfinished_copy(&to), vec![1; 2 * CHUNK as usize]).unwrap();
        let mut copy = LayerCopy::begin(&from, &to, (Order::Nearest, false)).unwrap();
        assert!(copy.is_read());
        assert!(matches!(copy.finish(), Err(Error::Changed { .. })));
        assert!(!unfinished_copy(&to).exists());
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
