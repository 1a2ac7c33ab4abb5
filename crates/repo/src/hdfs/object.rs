//! Objects in HDFS, while they are written and read.

use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use hdfs_native::file::{FileReader, FileWriter};
use parking_lot::Mutex;

use super::Common;
use super::hold::{HoldDir, lost};
use super::link::{Link, PIECE};
use crate::error::{Error, Result};
use crate::name::ObjectName;
use crate::repository::{NewObject, ObjectReader, read_in_pieces};

/// How long the NameNode may take to know of a block that DataNodes have, and how often it is asked.
const KNOWN_MAX: Duration = Duration::from_secs(60);
const KNOWN_POLL: Duration = Duration::from_millis(10);

/// An object that is being written.
pub(super) struct NewFile {
    pub(super) repository: Arc<Common>,
    pub(super) name: ObjectName,
    /// Its directory is where the file lies until it is published.
    pub(super) _hold: Arc<HoldDir>,
    pub(super) writer: FileWriter,
    /// Bytes so far.
    pub(super) written: u64,
    pub(super) unfinished: String,
    pub(super) target: String,
    /// Whether it takes the place of an object of its name.
    pub(super) replaces: bool,
    pub(super) state: State,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum State {
    Writing,
    Synced,
    /// Bytes may be missing.
    Failed,
    /// Renamed, perhaps.
    Publishing,
    Published,
}

impl NewFile {
    /// For `map_err`.
    fn failed<'a>(&'a self, action: &'static str) -> impl FnOnce(io::Error) -> Error + 'a {
        Error::of_object(&self.repository.address, action, &self.name)
    }

    /// Does something to the file. After a failure nothing else does: what was written may be torn.
    fn step(
        &mut self,
        then: State,
        step: impl FnOnce(&Link, &mut FileWriter) -> io::Result<()>,
    ) -> io::Result<()> {
        if self.state == State::Failed {
            return Err(io::Error::other("writing it failed before"));
        }
        self.state = State::Failed;
        step(&self.repository.link, &mut self.writer)?;
        self.state = then;
        Ok(())
    }

    /// The client has DataNodes flush each block when it is full, and the last one here. A NameNode may close a file before it knows of
    /// the last block, and take it for shorter until then (`dfs.namenode.file.close.num-committed-allowed`).
    fn flush(&mut self) -> io::Result<()> {
        if self.state == State::Synced {
            return Ok(());
        }
        let (path, written) = (self.unfinished.clone(), self.written);
        self.step(State::Synced, |link, writer| {
            link.move_data(writer.close())?;
            let deadline = Instant::now() + KNOWN_MAX;
            // Not its status: that has the block already.
            while link.ask(link.client.read(&path))?.file_length() as u64 != written {
                if Instant::now() > deadline {
                    let told = "the NameNode does not know of all that the DataNodes took";
                    return Err(io::Error::new(io::ErrorKind::TimedOut, told));
                }
                std::thread::sleep(KNOWN_POLL);
            }
            Ok(())
        })
    }

    /// Of several that rename to one name without replacing it, the NameNode lets one.
    fn publish(&mut self) -> io::Result<()> {
        self.flush()?;
        self.state = State::Publishing;
        let link = &self.repository.link;
        match link.ask(link.client.rename(&self.unfinished, &self.target, self.replaces)) {
            Ok(()) => {
                self.state = State::Published;
                Ok(())
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => Err(lost()),
            Err(error) => Err(error),
        }
    }
}

impl NewObject for NewFile {
    fn write(&mut self, bytes: &[u8]) -> Result<()> {
        let written = self.step(State::Writing, |link, writer| {
            bytes.chunks(PIECE).try_for_each(|piece| {
                link.move_data(writer.write_bytes(Bytes::copy_from_slice(piece))).map(drop)
            })
        });
        self.written += bytes.len() as u64;
        written.map_err(self.failed("writing"))
    }

    fn sync(&mut self) -> Result<()> {
        self.flush().map_err(self.failed("flushing"))
    }

    fn read_back(&self) -> Result<Box<dyn ObjectReader>> {
        let opened = OpenFile::open(&self.repository, &self.name, self.unfinished.clone());
        Ok(Box::new(opened.map_err(self.failed("reading back"))?))
    }

    fn finish(mut self: Box<Self>) -> Result<()> {
        self.publish().map_err(self.failed("publishing"))
    }
}

impl Drop for NewFile {
    fn drop(&mut self) {
        if self.state == State::Published {
            return;
        }
        let link = &self.repository.link;
        let gone = link.tidy(link.client.delete(&self.unfinished, false));
        // A rename on its way finds nothing to rename from here on; where that is not sure, the name may still appear.
        if gone.is_err() && self.state == State::Publishing {
            self.repository.unanswered.lock().push(std::mem::take(&mut self.unfinished));
        }
    }
}

/// An object that is open for reading.
pub(super) struct OpenFile {
    repository: Arc<Common>,
    name: ObjectName,
    path: String,
    len: u64,
    /// Knows where the blocks are, and which DataNodes failed.
    reader: Mutex<Arc<FileReader>>,
}

impl OpenFile {
    pub(super) fn open(repository: &Arc<Common>, name: &ObjectName, path: String) -> io::Result<Self> {
        let reader = repository.link.ask(repository.link.client.read(&path))?;
        let len = reader.file_length() as u64;
        let (repository, name) = (Arc::clone(repository), name.clone());
        Ok(Self { repository, name, path, len, reader: Mutex::new(Arc::new(reader)) })
    }

    fn read_piece(&self, at: u64, into: &mut [u8]) -> io::Result<()> {
        let at = usize::try_from(at).map_err(|_| io::ErrorKind::UnexpectedEof)?;
        let Common { link, patience, .. } = &*self.repository;
        loop {
            let reader = Arc::clone(&self.reader.lock());
            let error = match link.move_data(reader.read_range_buf(into, at)) {
                Ok(()) => return Ok(()),
                Err(error) => error,
            };
            if !patience.lasts() {
                return Err(error);
            }
            std::thread::sleep(Patience::PAUSE);
            // Blocks may have moved, and DataNodes that failed may be back.
            let fresh = link.ask(link.client.read(&self.path)).map_err(|_| error)?;
            if fresh.file_length() as u64 != self.len {
                return Err(io::Error::other("it was replaced by another"));
            }
            *self.reader.lock() = Arc::new(fresh);
        }
    }
}

impl ObjectReader for OpenFile {
    fn len(&self) -> u64 {
        self.len
    }

    fn read_at(&self, at: u64, into: &mut [u8]) -> Result<()> {
        let failed = Error::of_read(&self.repository.address, &self.name, at);
        read_in_pieces(self.len, (at, into), PIECE, |at, piece| self.read_piece(at, piece)).map_err(failed)
    }
}

/// How long reads that fail are tried again: a few seconds of every minute, for all objects of a repository together. What is
/// lost for good would otherwise be waited for block by block.
#[derive(Debug, Default)]
pub(super) struct Patience {
    began: Mutex<Option<Instant>>,
}

impl Patience {
    /// Between two tries.
    const PAUSE: Duration = Duration::from_millis(200);
    const LASTS: Duration = Duration::from_secs(3);
    const RENEWED_AFTER: Duration = Duration::from_secs(60);

    /// Whether to try again.
    fn lasts(&self) -> bool {
        let (mut began, now) = (self.began.lock(), Instant::now());
        let since = began.map(|began| now - began);
        if since.is_none_or(|since| since > Self::RENEWED_AFTER) {
            *began = Some(now);
            return true;
        }
        since.is_some_and(|since| since < Self::LASTS)
    }
}
