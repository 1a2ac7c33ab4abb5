//! The copy that a disk is moved to, and what was written to it and not yet read back.

use std::num::NonZeroU64;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::channel;
use std::thread;
use std::time::Duration;

use parking_lot::Mutex;
use rustix::fs::Advice;
use vmstrata_disk::Disk;
use vmstrata_store::{LocalFile, Segment, Store, is_zero, on_threads};
use vmstrata_types::{GuestOffset, GuestRange, HostOffset};

use crate::copy::{Unreadable, read_around};
use crate::error::{Error, Result};

/// Bytes that are read and written at a time.
pub(super) const PART: u64 = 256 << 10;
/// Parts that are under way at the same time.
const ABREAST: usize = 8;
/// Of these bytes, each piece is zeroed at the target rather than written if it is all zeros.
pub(super) const PIECE: usize = 64 << 10;
/// A target that takes longer than this while writes are held is given up, and the guest goes on.
const HELD_MAX: Duration = Duration::from_secs(1);

/// How bytes come to the copy.
#[derive(Clone, Copy, Debug)]
pub(super) struct How {
    /// Only what differs is sent.
    pub(super) compares: bool,
    /// Zeros are written: the copy may have something else there.
    pub(super) zeroes: bool,
}

impl How {
    /// What was written since the pass before.
    pub(super) const AGAIN: Self = Self { compares: false, zeroes: true };
}

/// See the module documentation.
#[derive(Debug)]
pub(super) struct Copy {
    store: Arc<dyn Store>,
    name: PathBuf,
    /// What of the disk cannot be read is passed over.
    skips: bool,
    pub(super) taken: Taken,
}

/// What was done to a copy.
#[derive(Debug, Default)]
pub(super) struct Taken {
    written: Vec<(GuestRange, blake3::Hash)>,
    pub(super) bytes: u64,
    pub(super) unreadable: Vec<Unreadable>,
}

impl Taken {
    fn add(&mut self, other: Self) {
        self.written.extend(other.written);
        self.bytes += other.bytes;
        self.unreadable.extend(other.unreadable);
    }
}

/// Does something with each of these, several at the same time, and returns what became of it on each thread.
fn abreast<T: Send, R: Send + Default>(
    parts: Vec<T>,
    work: impl Fn(T, &mut R) -> Result<()> + Sync,
) -> Result<Vec<R>> {
    let threads = parts.len().min(ABREAST);
    let left = Mutex::new(parts.into_iter());
    let on_thread = || {
        let mut done = R::default();
        while let Some(part) = { left.lock().next() } {
            work(part, &mut done)?;
        }
        Ok(done)
    };
    on_threads(threads, on_thread).into_iter().collect()
}

impl Copy {
    pub(super) fn new(store: &Arc<dyn Store>, name: &Path, skips: bool) -> Self {
        Self { store: Arc::clone(store), name: name.to_owned(), skips, taken: Taken::default() }
    }

    /// Brings parts of the disk to the copy. Returns the bytes written.
    pub(super) fn take(&mut self, disk: &Disk, parts: Vec<GuestRange>, how: How) -> Result<u64> {
        let before = self.taken.bytes;
        let all = abreast(parts, |range, taken: &mut Taken| self.take_part(disk, range, how, taken))?;
        all.into_iter().for_each(|taken| self.taken.add(taken));
        Ok(self.taken.bytes - before)
    }

    /// Has the copy read zeros there. Returns the bytes written for that.
    pub(super) fn take_zeros(&mut self, range: GuestRange) -> Result<u64> {
        let mut taken = Taken::default();
        self.zero(range, &mut taken)?;
        let written = taken.bytes;
        self.taken.add(taken);
        Ok(written)
    }

    /// The parts of a range that are not known to be holes of the copy.
    pub(super) fn held(&self, range: GuestRange) -> impl Iterator<Item = GuestRange> {
        let mut at = range.start;
        std::iter::from_fn(move || {
            while at < range.end() {
                let found = self.store.extent(HostOffset::new(at.get()));
                let (is_data, end) =
                    found.map_or((true, range.end().get()), |(is_data, end)| (is_data, end.get()));
                let end = GuestOffset::new(end.clamp(at.get() + 1, range.end().get()));
                let start = std::mem::replace(&mut at, end);
                if is_data {
                    return Some(GuestRange::new(start, end - start));
                }
            }
            None
        })
    }

    fn take_part(
        &self,
        disk: &Disk,
        range: GuestRange,
        How { compares, zeroes }: How,
        taken: &mut Taken,
    ) -> Result<()> {
        let mut bytes = vec![0; range.len as usize];
        let read = |into: &mut [u8], at| disk.read(GuestOffset::new(at), &[Segment::from_mut(into)]);
        if self.skips {
            taken.unreadable.extend(read_around(disk.path(), &mut bytes, range.start.get(), read));
        } else {
            read(&mut bytes, range.start.get())?;
        }
        let mut old = Vec::new();
        if compares {
            old.resize(bytes.len(), 0);
            self.read(&mut old, range)?;
        }
        let mut done = 0;
        while done < bytes.len() {
            let piece = |at: usize| {
                let piece = at..(at + PIECE).min(bytes.len());
                match is_zero(&bytes[piece.clone()]) {
                    _ if compares && old[piece.clone()] == bytes[piece.clone()] => Piece::Same,
                    true => Piece::Zero,
                    false => Piece::Data,
                }
            };
            let (what, mut end) = (piece(done), done);
            while end < bytes.len() && piece(end) == what {
                end = (end + PIECE).min(bytes.len());
            }
            let at = range.start + done as u64;
            match what {
                Piece::Data => self.write(&bytes[done..end], at, taken)?,
                Piece::Zero if zeroes => self.zero(GuestRange::new(at, (end - done) as u64), taken)?,
                Piece::Zero | Piece::Same => {}
            }
            done = end;
        }
        Ok(())
    }

    fn write(&self, bytes: &[u8], at: GuestOffset, taken: &mut Taken) -> Result<()> {
        let wrote = self.store.write_all(bytes, HostOffset::new(at.get()));
        wrote.map_err(Error::at_offset(&self.name, "write the copy", at.get()))?;
        taken.written.push((GuestRange::new(at, bytes.len() as u64), blake3::hash(bytes)));
        taken.bytes += bytes.len() as u64;
        Ok(())
    }

    /// Zeros a range. That is not read back: where it is not the host's or the server's doing, it was written.
    fn zero(&self, range: GuestRange, taken: &mut Taken) -> Result<()> {
        if self.store.punch_hole(HostOffset::new(range.start.get()), range.len).is_ok() {
            return Ok(());
        }
        let zeros = vec![0; PART.min(range.len) as usize];
        let mut done = 0;
        while done < range.len {
            let part = PART.min(range.len - done);
            self.write(&zeros[..part as usize], range.start + done, taken)?;
            done += part;
        }
        Ok(())
    }

    /// Reads from the copy's storage: what is in memory proves nothing.
    fn read(&self, into: &mut [u8], range: GuestRange) -> Result<()> {
        let at = range.start.get();
        if let Some(file) = self.store.local().and_then(LocalFile::raw) {
            let _ = rustix::fs::fadvise(file, at, NonZeroU64::new(range.len), Advice::DontNeed);
        }
        let read = self.store.read_exact(into, HostOffset::new(at));
        read.map_err(Error::at_offset(&self.name, "read the copy", at))
    }

    /// Brings what was written to stable storage, and makes sure that it reads so.
    pub(super) fn finish(&mut self) -> Result<()> {
        self.store.flush().map_err(Error::of_file(&self.name, "flush the copy"))?;
        self.taken.bytes = 0;
        let written = std::mem::take(&mut self.taken.written);
        let each = |(range, digest): (GuestRange, blake3::Hash), bytes: &mut Vec<u8>| {
            bytes.resize(range.len as usize, 0);
            self.read(bytes, range)?;
            if blake3::hash(bytes) != digest {
                return Err(Error::Untrue { copy: self.name.clone(), offset: range.start.get() });
            }
            Ok(())
        };
        abreast(written, each).map(drop)
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Piece {
    Data,
    Zero,
    /// The copy has it.
    Same,
}

impl Copy {
    /// Copies what is left, while writes are held. Returns what cannot be read of it. A target that takes too long is left to its thread,
    /// which keeps it locked.
    pub(super) fn take_last(mut self, disk: Arc<Disk>, left: Vec<GuestRange>) -> Result<Vec<Unreadable>> {
        let target = self.name.clone();
        let (done, result) = channel();
        let copied = move || {
            let part = |range: GuestRange, from| {
                let start = range.start + from;
                GuestRange::new(start, PART.min(range.end() - start))
            };
            let parts =
                |range: GuestRange| (0..range.len).step_by(PART as usize).map(move |from| part(range, from));
            self.take(&disk, left.into_iter().flat_map(parts).collect(), How::AGAIN)?;
            self.finish()?;
            Ok(self.taken.unreadable)
        };
        thread::spawn(move || {
            let _ = done.send(copied());
        });
        let slow = |_| Err(Error::Slow { target, after: HELD_MAX });
        result.recv_timeout(HELD_MAX).unwrap_or_else(slow)
    }
}
