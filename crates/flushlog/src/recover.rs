//! What a log holds after a crash, and bringing it into the files.
//!
//! ```text
//!   headers ──► batches from the tail on ──► records of each share, after the last that made earlier ones void
//!                                                  │
//!             another boot, or a sync failed ──────┼──► write them into the file, sync it
//!             this boot: a process was killed ─────┴──► sync the file: the page cache has all, and what is newer
//!                                                  │
//!                                                  ▼
//!                                        a new epoch: the log is empty
//! ```
//!
//! The log changes only after all of it is in the files, so recovery can be cut and repeated at any point.

use std::collections::BTreeMap;
use std::io;
use std::path::Path;
use std::sync::Arc;

use vmstrata_store::{AlignedBuf, Store, is_zero};
use vmstrata_types::HostOffset;

use crate::error::LogError;
use crate::format::{
    BATCH_HEADER_LEN, BLOCK, BatchHeader, Header, Kind, Operation, RING_AT, Subject, Tail, decode_batch,
    is_whole,
};
use crate::log::{FlushLog, RING_MIN, Ring, ShareId, write_headers};
use crate::logged::draw;

/// Bytes that are read, or cleared, at once.
const CHUNK: u64 = 1 << 20;

/// Who uses a log, and since when.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Host {
    /// Names the host for good.
    pub id: [u8; 16],
    /// Names its boot.
    pub boot: [u8; 16],
}

/// The files that recovery brings the log into.
pub trait Targets {
    /// Opens the file that a record is about, for this process alone. `marks` are all that the records have, oldest first; the file
    /// has one of them, or another program has written it since. `None` loses what the log has of it.
    ///
    /// # Errors
    /// A file that cannot be used, or is another one.
    fn open(&self, subject: &Subject, marks: &[u64]) -> io::Result<Option<Arc<dyn Store>>>;
}

/// What a log has of a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Held {
    /// The file.
    pub subject: Subject,
    /// Bytes of its flushed writes, each counted as often as it was written.
    pub bytes: u64,
    /// Whether they must be written into the file; if not, they are there, and it is synced.
    pub is_replayed: bool,
}

/// What recovery did.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Recovered {
    /// Files that writes were brought into.
    pub replayed: Vec<Subject>,
    /// Files that had all, and were synced.
    pub synced: Vec<Subject>,
    /// Files whose flushed writes are lost.
    pub lost: Vec<Subject>,
    /// Bytes of batches that were read.
    pub bytes: u64,
}

/// What a log holds of one share.
#[derive(Debug, Default)]
struct Found {
    subject: Option<Subject>,
    marks: Vec<u64>,
    /// Replay begins at this batch, in all or from this record of it on.
    from: (u64, usize),
    /// Of its operations.
    bytes: u64,
    is_lost: bool,
}

impl Found {
    /// Whether the page cache may lack what was flushed.
    fn is_replayed(&self, header: &Header, host: Host) -> bool {
        header.boot != host.boot || self.is_lost
    }
}

/// Reads batches in their order.
struct Reader<'a> {
    store: &'a dyn Store,
    ring: Ring,
    epoch: u64,
    next: Tail,
    /// The batch that was read last.
    batch: AlignedBuf,
}

impl<'a> Reader<'a> {
    fn new(store: &'a dyn Store, ring: Ring, header: &Header) -> Self {
        Self { store, ring, epoch: header.epoch, next: header.tail, batch: AlignedBuf::zeroed(0) }
    }

    /// Reads the next batch; `None` at the end.
    fn read(&mut self) -> io::Result<Option<BatchHeader>> {
        let wrapped = self.next.place.next_multiple_of(self.ring.len());
        for place in [self.next.place, wrapped] {
            let mut first = AlignedBuf::zeroed(BLOCK as usize);
            self.store.read_padded(&mut first, self.ring.at(place))?;
            let Some(found) = BatchHeader::decode(&first) else { continue };
            let expected = BatchHeader { epoch: self.epoch, sequence: self.next.sequence, place, ..found };
            let fits = found.len % BLOCK == 0
                && (BATCH_HEADER_LEN as u64..=self.ring.batch_max()).contains(&found.len)
                && place % self.ring.len() + found.len <= self.ring.len();
            if found != expected || !fits {
                continue;
            }
            self.batch = AlignedBuf::zeroed(found.len as usize);
            self.store.read_padded(&mut self.batch, self.ring.at(place))?;
            if is_whole(&self.batch) {
                self.next = Tail { place: place + found.len, sequence: found.sequence + 1 };
                return Ok(Some(found));
            }
        }
        Ok(None)
    }

    /// Whether a batch lies in the ring that was written after the one that cannot be read.
    fn has_later(&self) -> io::Result<bool> {
        let mut chunk = AlignedBuf::zeroed(CHUNK as usize);
        let mut at = 0;
        while at < self.ring.len() {
            let len = CHUNK.min(self.ring.len() - at);
            self.store.read_padded(&mut chunk[..len as usize], HostOffset::new(RING_AT + at))?;
            for block in (0..len).step_by(BLOCK as usize) {
                let found = BatchHeader::decode(&chunk[block as usize..]);
                let is_later = |found: BatchHeader| {
                    found.epoch == self.epoch
                        && found.sequence > self.next.sequence
                        && found.place % self.ring.len() == at + block
                };
                if found.is_some_and(is_later) {
                    return Ok(true);
                }
            }
            at += len;
        }
        Ok(false)
    }
}

/// A log that is being opened.
struct Opening<'a> {
    path: &'a Path,
    store: &'a dyn Store,
    ring: Ring,
}

impl FlushLog {
    /// Opens a log, brings what it has into the files, and empties it. A store that is empty, or begins with zeros, becomes a log;
    /// it is as long as it is to be. No one else uses the log or any of the files.
    ///
    /// # Errors
    /// A log that cannot be read, is damaged or of another host, or a file that cannot be used: the log has not changed.
    pub fn open(
        store: Arc<dyn Store>,
        path: &Path,
        host: Host,
        targets: &dyn Targets,
    ) -> Result<(Arc<Self>, Recovered), LogError> {
        let opening = Opening::new(path, &*store)?;
        let ring = opening.ring;
        let (recovered, id, generation) = match opening.header(host)? {
            None => (Recovered::default(), draw(), 0),
            Some(header) => (opening.recover(&header, host, targets)?, header.id, header.generation),
        };
        let mut header = Header {
            id,
            epoch: draw(),
            generation,
            host: host.id,
            boot: host.boot,
            tail: Tail { place: 0, sequence: 1 },
        };
        write_headers(&*store, &mut header).map_err(opening.io("empty"))?;
        Ok((Self::empty(path, store, ring, header), recovered))
    }

    /// What [`FlushLog::open`] would bring into files. Changes nothing.
    ///
    /// # Errors
    /// A log that cannot be read, is damaged or of another host.
    pub fn look(store: &dyn Store, path: &Path, host: Host) -> Result<Vec<Held>, LogError> {
        let opening = Opening::new(path, store)?;
        let Some(header) = opening.header(host)? else { return Ok(Vec::new()) };
        let (found, _) = opening.find(&header)?;
        let held = found.into_values().filter(|found| found.bytes > 0).filter_map(|found| {
            let is_replayed = found.is_replayed(&header, host);
            Some(Held { subject: found.subject?, bytes: found.bytes, is_replayed })
        });
        Ok(held.collect())
    }
}

impl<'a> Opening<'a> {
    fn new(path: &'a Path, store: &'a dyn Store) -> Result<Self, LogError> {
        let log = || path.to_owned();
        let len = store.len().map_err(|source| LogError::Io { log: log(), doing: "read", source })?;
        let too_small = || LogError::TooSmall { log: log(), len, min: RING_AT + RING_MIN };
        Ok(Self { path, store, ring: Ring::of(len).ok_or_else(too_small)? })
    }

    fn io(&self, doing: &'static str) -> impl FnOnce(io::Error) -> LogError {
        let log = self.path.to_owned();
        move |source| LogError::Io { log, doing, source }
    }

    /// The newest header, which must be of this host; `None` where nothing was ever written.
    fn header(&self, host: Host) -> Result<Option<Header>, LogError> {
        let mut blocks = AlignedBuf::zeroed(RING_AT as usize);
        self.store.read_padded(&mut blocks, HostOffset::ZERO).map_err(self.io("read"))?;
        let headers = blocks.chunks(BLOCK as usize).filter_map(Header::decode);
        match headers.max_by_key(|header| header.generation) {
            None if is_zero(&blocks) => Ok(None),
            None => Err(LogError::NotALog { log: self.path.to_owned() }),
            Some(header) if header.host != host.id => Err(LogError::OtherHost { log: self.path.to_owned() }),
            found => Ok(found),
        }
    }

    /// Brings what the log has into the files.
    fn recover(&self, header: &Header, host: Host, targets: &dyn Targets) -> Result<Recovered, LogError> {
        let (found, bytes) = self.find(header)?;
        let mut recovered = Recovered { bytes, ..Recovered::default() };
        let mut open: BTreeMap<ShareId, (Found, Arc<dyn Store>)> = BTreeMap::new();
        let mut synced = Vec::new();
        for (share, found) in found {
            let Some(subject) = found.subject.clone().filter(|_| found.bytes > 0) else { continue };
            let Some(store) = targets.open(&subject, &found.marks).map_err(self.target(&subject))? else {
                recovered.lost.push(subject);
                continue;
            };
            if found.is_replayed(header, host) {
                recovered.replayed.push(subject);
                open.insert(share, (found, store));
            } else {
                synced.push((subject, store));
            }
        }
        if !open.is_empty() {
            self.replay(header, &open)?;
        }
        let replayed = open.into_values().map(|(found, store)| (found.subject.expect("it has one"), store));
        for (subject, store) in synced.iter().cloned().chain(replayed) {
            store.flush().map_err(self.target(&subject))?;
        }
        recovered.synced = synced.into_iter().map(|(subject, _)| subject).collect();
        Ok(recovered)
    }

    fn target(&self, subject: &Subject) -> impl FnOnce(io::Error) -> LogError {
        let (log, file) = (self.path.to_owned(), subject.path.clone());
        move |source| LogError::Target { log, file, source }
    }

    fn damaged(&self, at: Tail) -> LogError {
        LogError::Damaged {
            log: self.path.to_owned(),
            sequence: at.sequence,
            at: self.ring.at(at.place).get(),
        }
    }

    /// What there is of each share, and how many bytes of batches were read.
    fn find(&self, header: &Header) -> Result<(BTreeMap<ShareId, Found>, u64), LogError> {
        let mut shares: BTreeMap<ShareId, Found> = BTreeMap::new();
        let mut reader = Reader::new(self.store, self.ring, header);
        let mut bytes = 0;
        while let Some(batch) = reader.read().map_err(self.io("read"))? {
            bytes += batch.len;
            let at = Tail { place: batch.place, sequence: batch.sequence };
            let records = decode_batch(&reader.batch).ok_or_else(|| self.damaged(at))?;
            for (number, record) in records.into_iter().enumerate() {
                let found = shares.entry(record.share).or_default();
                if record.kind == Kind::Synced {
                    *found = Found { from: (batch.sequence, number), ..Found::default() };
                }
                found.is_lost |= record.kind == Kind::Lost;
                found.bytes += record.operations.iter().map(Operation::len).sum::<u64>();
                if found.marks.last() != Some(&record.subject.mark) {
                    found.marks.push(record.subject.mark);
                }
                found.subject = Some(record.subject);
            }
        }
        if reader.has_later().map_err(self.io("read"))? {
            return Err(self.damaged(reader.next));
        }
        Ok((shares, bytes))
    }

    /// Writes what the log has of these shares into their files.
    fn replay(
        &self,
        header: &Header,
        open: &BTreeMap<ShareId, (Found, Arc<dyn Store>)>,
    ) -> Result<(), LogError> {
        let mut reader = Reader::new(self.store, self.ring, header);
        while let Some(batch) = reader.read().map_err(self.io("read"))? {
            let records = decode_batch(&reader.batch).expect("it was decoded before");
            for (number, record) in records.into_iter().enumerate() {
                let Some((found, store)) = open.get(&record.share) else { continue };
                if (batch.sequence, number) < found.from {
                    continue;
                }
                let repeated = record.operations.iter().try_for_each(|one| repeat(&**store, one));
                repeated.map_err(self.target(&record.subject))?;
            }
        }
        Ok(())
    }
}

/// Makes a change once more.
fn repeat(store: &dyn Store, operation: Operation<'_>) -> io::Result<()> {
    match operation {
        Operation::Write { at, bytes } => store.write_all(bytes, at),
        Operation::Punch { at, len } => match store.punch_hole(at, len) {
            Err(error) if error.kind() == io::ErrorKind::Unsupported => {
                let end = (at.get() + len).min(store.len()?);
                let zeros = vec![0; CHUNK as usize];
                let mut at = at.get();
                while at < end {
                    let part = CHUNK.min(end - at);
                    store.write_all(&zeros[..part as usize], HostOffset::new(at))?;
                    at += part;
                }
                Ok(())
            }
            punched => punched,
        },
    }
}
