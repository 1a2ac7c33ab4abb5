//! What a file holds, by chunks, so that they may be read in any order.

use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::num::NonZeroU64;
use std::os::unix::fs::FileExt as _;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread::{self, JoinHandle};

use rustix::fs::{Advice, SeekFrom};
use rustix::io::Errno;
use vmstrata_store::is_zero;
use vmstrata_types::{GuestOffset, GuestRange};

/// What is copied as one.
pub(super) const CHUNK: u64 = 1 << 20;
/// The digest has these pieces, unless they are all zeros.
pub(super) const PIECE: usize = 64 << 10;

/// The digests of all chunks that are not all zeros: two files that read the same have the same, however their holes lie.
#[derive(Debug, Default)]
pub(super) struct Digest {
    /// By the number of the chunk.
    chunks: BTreeMap<u64, blake3::Hash>,
}

/// The digest of one chunk, whose bytes come in order.
#[derive(Debug, Default)]
pub(super) struct ChunkDigest {
    hasher: blake3::Hasher,
    has_data: bool,
}

impl ChunkDigest {
    /// Adds what lies at `at` in the file, in whole pieces.
    pub(super) fn add(&mut self, at: u64, bytes: &[u8]) {
        for (number, piece) in bytes.chunks(PIECE).enumerate() {
            if !is_zero(piece) {
                self.has_data = true;
                self.hasher.update(&(at + (number * PIECE) as u64).to_le_bytes());
                self.hasher.update(piece);
            }
        }
    }
}

impl Digest {
    /// That of a whole file.
    pub(super) fn of(file: &File) -> io::Result<Self> {
        let mut digest = Self::default();
        digest.read_others(file, file.metadata()?.len())?;
        Ok(digest)
    }

    /// Takes the digest of the chunk at `at`.
    pub(super) fn put(&mut self, at: u64, chunk: &ChunkDigest) {
        if chunk.has_data {
            self.chunks.insert(at / CHUNK, chunk.hasher.finalize());
        }
    }

    /// Reads the chunk at `at` of a file of `len` bytes.
    fn read(&mut self, file: &File, at: u64, len: u64, buffer: &mut Vec<u8>) -> io::Result<()> {
        buffer.resize(CHUNK.min(len - at) as usize, 0);
        file.read_exact_at(buffer, at)?;
        let mut chunk = ChunkDigest::default();
        chunk.add(at, buffer);
        self.put(at, &chunk);
        Ok(())
    }

    /// Reads chunks that are on stable storage from there: what is in memory proves nothing.
    pub(super) fn read_back(&mut self, file: &File, len: u64, chunks: &[u64]) -> io::Result<()> {
        let mut buffer = Vec::new();
        for at in chunks {
            let _ = rustix::fs::fadvise(file, *at, NonZeroU64::new(CHUNK), Advice::DontNeed);
            self.read(file, *at, len, &mut buffer)?;
        }
        Ok(())
    }

    /// Reads what the file holds beside the chunks that are known.
    pub(super) fn read_others(&mut self, file: &File, len: u64) -> io::Result<()> {
        let mut buffer = Vec::new();
        for run in data_chunks(file, len)? {
            for at in (run.start.get()..run.end().get()).step_by(CHUNK as usize) {
                if !self.chunks.contains_key(&(at / CHUNK)) {
                    self.read(file, at, len, &mut buffer)?;
                }
            }
        }
        Ok(())
    }

    pub(super) fn text(&self) -> String {
        let mut all = blake3::Hasher::new();
        for (number, digest) in &self.chunks {
            all.update(&number.to_le_bytes());
            all.update(digest.as_bytes());
        }
        all.finalize().to_hex().to_string()
    }
}

/// The chunks of a file of `len` bytes that may hold something, in runs: the last one may end past the file.
pub(super) fn data_chunks(file: &File, len: u64) -> io::Result<Vec<GuestRange>> {
    let mut runs = Vec::new();
    let mut at = 0;
    while let Some(data) = next_data(file, at)?.filter(|data| *data < len) {
        let start = data - data % CHUNK;
        let hole = seek(file, SeekFrom::Hole(data), len)?.unwrap_or(len);
        at = hole.min(len).next_multiple_of(CHUNK);
        runs.push(GuestRange::new(GuestOffset::new(start), at - start));
    }
    Ok(runs)
}

/// Where data begins at or past `at`; `None` when there is none. A file system that knows no holes has data everywhere.
pub(super) fn next_data(file: &File, at: u64) -> io::Result<Option<u64>> {
    seek(file, SeekFrom::Data(at), at)
}

/// Where data or a hole begins; `None` past the end, and `otherwise` where the file system knows no holes.
fn seek(file: &File, to: SeekFrom, otherwise: u64) -> io::Result<Option<u64>> {
    match rustix::fs::seek(file, to) {
        Ok(found) => Ok(Some(found)),
        Err(Errno::NXIO) => Ok(None),
        Err(Errno::INVAL | Errno::OPNOTSUPP) => Ok(Some(otherwise)),
        Err(errno) => Err(errno.into()),
    }
}

/// Reads a copy back while it grows.
#[derive(Debug)]
pub(super) struct ReadBack {
    chunks: SyncSender<Vec<u64>>,
    thread: JoinHandle<io::Result<Digest>>,
}

impl ReadBack {
    /// Of a copy of `len` bytes.
    pub(super) fn begin(file: File, len: u64) -> io::Result<Self> {
        let (chunks, asked): (_, Receiver<Vec<u64>>) = sync_channel(1);
        let read = move || {
            let mut digest = Digest::default();
            asked.into_iter().try_for_each(|chunks| digest.read_back(&file, len, &chunks))?;
            Ok(digest)
        };
        let thread = thread::Builder::new().name("move-read-back".to_owned()).spawn(read)?;
        Ok(Self { chunks, thread })
    }

    /// These chunks are on storage. Waits until most of those before are read. What goes wrong, [`ReadBack::end`] reports.
    pub(super) fn read(&self, chunks: Vec<u64>) {
        let _ = self.chunks.send(chunks);
    }

    /// All that was read.
    pub(super) fn end(self) -> io::Result<Digest> {
        drop(self.chunks);
        self.thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    }
}
