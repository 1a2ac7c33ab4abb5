//! The volatile journal: table changes that are not in the image yet, kept where a killed process leaves them.
//!
//! A mapping may reach the image only after the data it points to is on stable storage, else a power failure could
//! show a cluster full of garbage where flushed data was. But a guest outlives its storage server: when the server
//! is killed and started again, writes that completed must still be there. So every change of the tables is
//! recorded in a file that survives the process and not the machine (`/run` is memory), and replayed by the next
//! server. After a power failure the journal is gone, and with it only what was never flushed.
//!
//! Two files, the halves, take turns. When a commit begins, new records go to the other half; when it is done, the first half is
//! dropped.
//!
//! ```text
//!   header, 64 bytes: magic, boot id, device, inode, turn, session, check
//!   record, 32 bytes: table and index │ old raw entry │ new raw entry │ check
//!   with subclusters, 48 bytes: table and index │ old and new first words │ old and new bitmaps │ check
//! ```
//!
//! Invariants:
//! - A change is in the journal before the image shows it, and before a request completes that may have seen it. A change for
//!   whose record there is no room is not made.
//! - The valid halves, in order of their turns, hold every value that a slot has had since the one the image holds, that one
//!   included.
//! - Both halves have room for one publication, so a full file system makes commits frequent, and stops nothing.
//!
//! The second needs little of a failing write: a half is valid once its header is written, which is last; a record counts
//! with its own turn only, so old ones behind the new ones are none. Where a write failed and what it left cannot be
//! overwritten either, nothing more is recorded ([`Journal::is_broken`]).
//!
//! Nothing in a journal is believed unless the image still is what it was: its header names the same session (any
//! stock writer clears those autoclear bits), each entry in the image still has a value recorded for it (or what replaying
//! makes of the newest), the refcount of every new cluster is 1, and no two entries lead to one. Integers are
//! little-endian: a journal never leaves its machine.

use std::io::{self, Read as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use smallvec::SmallVec;
use vmstrata_qcow2::RawEntry;
use vmstrata_store::{Access, Directory, FileId, Gate, Place, Store};
use vmstrata_types::HostOffset;

use crate::error::{IoContext as _, Result};
use crate::opener::{Opener, Role};
use crate::session::BootId;

const MAGIC: &[u8; 8] = b"VMSJRNL2";
/// Of a journal whose records have subclusters.
const MAGIC_EXTENDED: &[u8; 8] = b"VMSJRNLX";
const HEADER_LEN: u64 = 64;
const RECORD_LEN: usize = 32;
/// Of an image whose L2 entries are extended.
const EXTENDED_LEN: usize = 48;
/// Set in a record's index when it is about an L1 entry.
const L1_FLAG: u64 = 1 << 63;
/// A journal longer than this was not written by us: commits keep them far shorter.
const LEN_MAX: u64 = 64 << 20;
/// Most records written at once: as many as one page of entries has.
const TOGETHER_MAX: u64 = 512;
/// By so many bytes room is made.
const ROOM_STEP: u64 = 4 << 10;
/// Room that a half keeps when it is dropped.
const ROOM_KEPT: u64 = 1 << 20;

/// Records as they are written.
type Bytes = SmallVec<[u8; 4 * EXTENDED_LEN]>;

/// One change of a table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Record {
    pub(crate) slot: Slot,
    /// Raw entry before; what is in the image until the change is committed.
    pub(crate) old: RawEntry,
    /// Raw entry after.
    pub(crate) new: RawEntry,
}

/// An entry of the image's tables.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Slot {
    /// Entry of the L1 table.
    L1(u64),
    /// L2 entry of this guest cluster.
    L2(u64),
}

impl std::fmt::Display for Slot {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::L1(index) => write!(f, "L1 entry {index}"),
            Self::L2(cluster) => write!(f, "entry of guest cluster {cluster}"),
        }
    }
}

impl Record {
    /// A change of the L1 table.
    pub(crate) fn of_l1(index: u64, old: u64, new: u64) -> Self {
        Self { slot: Slot::L1(index), old: RawEntry::standard(old), new: RawEntry::standard(new) }
    }

    /// Appends the record's bytes. `seed` is the turn's ([`Subject::seed`]): a record of another turn does not pass its check.
    fn put(&self, subject: &Subject, seed: u32, into: &mut Bytes) {
        let index = match self.slot {
            Slot::L1(index) => index | L1_FLAG,
            Slot::L2(cluster) => cluster,
        };
        let (old, new) = (self.old, self.new);
        let words = [index, old.word, new.word, old.subclusters, new.subclusters];
        let words = if subject.is_extended { &words[..] } else { &words[..3] };
        assert!(subject.is_extended || old.subclusters | new.subclusters == 0, "no room for subclusters");
        let start = into.len();
        words.iter().for_each(|word| into.extend_from_slice(&word.to_le_bytes()));
        let check = u64::from(crc32c::crc32c_append(seed, &into[start..])) | 1 << 32;
        into.extend_from_slice(&check.to_le_bytes());
    }

    /// `bytes` are those of one record.
    fn decode(bytes: &[u8], seed: u32) -> Option<Self> {
        let word = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().expect("eight bytes"));
        let end = bytes.len() - 8;
        if word(end) != u64::from(crc32c::crc32c_append(seed, &bytes[..end])) | 1 << 32 {
            return None;
        }
        let subclusters = |at: usize| if bytes.len() == EXTENDED_LEN { word(at) } else { 0 };
        let index = word(0);
        let slot = if index & L1_FLAG != 0 { Slot::L1(index & !L1_FLAG) } else { Slot::L2(index) };
        let old = RawEntry { word: word(8), subclusters: subclusters(24) };
        Some(Self { slot, old, new: RawEntry { word: word(16), subclusters: subclusters(32) } })
    }
}

/// Which image and which process a journal belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Subject {
    pub(crate) image: FileId,
    pub(crate) boot: BootId,
    /// The session number in the image's header.
    pub(crate) session: u64,
    /// Whether the image's L2 entries have subclusters.
    pub(crate) is_extended: bool,
}

impl Subject {
    fn header(&self, turn: u64) -> [u8; HEADER_LEN as usize] {
        let mut bytes = [0; HEADER_LEN as usize];
        bytes[..8].copy_from_slice(if self.is_extended { MAGIC_EXTENDED } else { MAGIC });
        bytes[8..24].copy_from_slice(&self.boot.0);
        bytes[24..32].copy_from_slice(&self.image.dev.to_le_bytes());
        bytes[32..40].copy_from_slice(&self.image.ino.to_le_bytes());
        bytes[40..48].copy_from_slice(&turn.to_le_bytes());
        bytes[48..56].copy_from_slice(&self.session.to_le_bytes());
        let check = crc32c::crc32c(&bytes[..56]);
        bytes[56..60].copy_from_slice(&check.to_le_bytes());
        bytes
    }

    fn record_len(&self) -> usize {
        if self.is_extended { EXTENDED_LEN } else { RECORD_LEN }
    }

    /// Differs for every turn of a session, and in all likelihood for the turns of two sessions.
    fn seed(&self, turn: u64) -> u32 {
        crc32c::crc32c_append(crc32c::crc32c(&self.session.to_le_bytes()), &(turn as u32).to_le_bytes())
    }

    /// Where the halves of an image's journal lie.
    fn paths(&self, dir: &Path) -> [PathBuf; 2] {
        let FileId { dev, ino } = self.image;
        [0, 1].map(|half| dir.join(format!("{dev:x}-{ino:x}.{half}.journal")))
    }

    /// What the bytes of the halves say. A half of another image or boot says nothing.
    pub(crate) fn read(&self, halves: [&[u8]; 2]) -> (Found, Option<Newest>) {
        let mut valid = Vec::new();
        let mut of_other_sessions = 0;
        for (number, bytes) in halves.into_iter().enumerate() {
            let Some((header, records)) = bytes.split_at_checked(HEADER_LEN as usize) else { continue };
            let word = |at: usize| u64::from_le_bytes(header[at..at + 8].try_into().expect("eight bytes"));
            let (turn, subject) = (word(40), Self { session: word(48), ..*self });
            if header != subject.header(turn) {
                continue;
            }
            let seed = subject.seed(turn);
            let records = records.chunks_exact(self.record_len());
            let decoded = records.map_while(|record| Record::decode(record, seed));
            if subject == *self {
                valid.push((Newest { turn, number }, decoded.collect::<Vec<_>>()));
            } else {
                of_other_sessions += decoded.count();
            }
        }
        valid.sort_by_key(|(half, _)| half.turn);
        let newest = valid.last().map(|(half, _)| *half);
        let records = valid.into_iter().flat_map(|(_, records)| records).collect();
        (Found { records, is_there: newest.is_some(), of_other_sessions }, newest)
    }
}

/// The half that was begun last.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Newest {
    turn: u64,
    number: usize,
}

fn bytes_of(store: &dyn Store) -> io::Result<Vec<u8>> {
    let len = store.len()?;
    let mut bytes = vec![0; if len > LEN_MAX { 0 } else { len as usize }];
    store.read_padded(&mut bytes, HostOffset::ZERO)?;
    Ok(bytes)
}

/// What processes left in a journal.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Found {
    /// Oldest first.
    pub(crate) records: Vec<Record>,
    /// Whether there is a journal of the session. It may be empty.
    pub(crate) is_there: bool,
    /// How many records there are of other sessions of this image and boot.
    pub(crate) of_other_sessions: usize,
}

/// Reads the journal of an image, and changes nothing.
///
/// # Errors
/// A file that cannot be read.
pub(crate) fn look(dir: &Path, subject: &Subject) -> io::Result<Found> {
    let read = |path: PathBuf| {
        let mut bytes = Vec::new();
        match Place::of(&path).and_then(|place| place.open(Access::ReadOnly)) {
            Ok(mut file) => file.read_to_end(&mut bytes).map(|_| bytes),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(bytes),
            Err(error) => Err(error),
        }
    };
    let [first, second] = subject.paths(dir);
    Ok(subject.read([&read(first)?, &read(second)?]).0)
}

/// The two files of one image.
#[derive(Debug)]
pub(crate) struct Journal {
    halves: [Half; 2],
    current: usize,
    /// The turn of the half that was begun last, or that failed to be: no two have records of one turn.
    turn: u64,
    subject: Subject,
    /// Longest a half may grow; commits come long before.
    len_max: u64,
    /// Records that the current half has room for and is still to be given.
    pending: Bytes,
    is_broken: bool,
}

#[derive(Debug)]
struct Half {
    path: PathBuf,
    store: Arc<dyn Store>,
    turn: u64,
    /// Bytes of this turn.
    len: u64,
    /// Bytes that the file has: what lies within can be written though the file system is full.
    room: u64,
}

impl Half {
    fn make_room(&mut self, len: u64) -> io::Result<()> {
        if len > self.room {
            let zeros = vec![0; (len.next_multiple_of(ROOM_STEP) - self.room) as usize];
            self.store.write_all(&zeros, HostOffset::new(self.room))?;
            self.room += zeros.len() as u64;
        }
        Ok(())
    }

    /// Makes the half none.
    fn drop_header(&mut self) -> io::Result<()> {
        self.len = 0;
        if self.room == 0 {
            return Ok(());
        }
        self.store.write_all(&[0; HEADER_LEN as usize], HostOffset::ZERO)
    }
}

impl Journal {
    /// Opens or makes the journal of an image in `dir`; returns what the process of the subject's session left there. Call
    /// [`Journal::begin`] before the first record.
    ///
    /// # Errors
    /// A directory or file that cannot be made, read or written.
    pub(crate) fn open(dir: &Path, subject: Subject, opener: &dyn Opener) -> Result<(Self, Found)> {
        let in_dir = |error: crate::Error| error.in_file(dir);
        Directory::open_or_create(dir).while_trying("make the directory of the journals").map_err(in_dir)?;
        let open = |path: PathBuf| -> Result<Half> {
            let store = opener.open(&path, Role::Journal, &Gate::unrestricted())?.store;
            let room = store.len().while_trying("look at the journal").map_err(|e| e.in_file(&path))?;
            Ok(Half { path, store, turn: 0, len: 0, room })
        };
        let [first, second] = subject.paths(dir);
        let halves = [open(first)?, open(second)?];
        Self::of(halves, subject).while_trying("read the volatile journal").map_err(in_dir)
    }

    fn of(halves: [Half; 2], subject: Subject) -> io::Result<(Self, Found)> {
        let (first, second) = (bytes_of(&*halves[0].store)?, bytes_of(&*halves[1].store)?);
        let (found, newest) = subject.read([&first, &second]);
        let Newest { turn, number: current } = newest.unwrap_or(Newest { turn: 0, number: 0 });
        Ok((
            Self {
                halves,
                current,
                turn,
                subject,
                len_max: LEN_MAX,
                pending: Bytes::new(),
                is_broken: false,
            },
            found,
        ))
    }

    /// Begins `session`. What was found remains, and is the journal for as long as the image names the earlier session: drop it
    /// when that is over ([`Journal::drop_older`]).
    ///
    /// # Errors
    /// A file that cannot be written.
    pub(crate) fn begin(&mut self, session: u64) -> io::Result<()> {
        self.subject.session = session;
        self.turn()?;
        self.halves[1 - self.current].make_room(room_for_one(&self.subject))
    }

    /// Begins a commit: later changes go to the other half.
    ///
    /// # Errors
    /// A file that cannot be written; then the current half goes on.
    pub(crate) fn turn(&mut self) -> io::Result<()> {
        self.check_sound()?;
        self.write_out()?;
        self.turn += 1;
        let (turn, other) = (self.turn, 1 - self.current);
        let header = self.subject.header(turn);
        let half = &mut self.halves[other];
        half.make_room(room_for_one(&self.subject))?;
        // Valid or not, the half is an older one until it has its new header.
        half.drop_header()?;
        if let Err(error) = half.store.write_all(&header, HostOffset::ZERO) {
            // A half with a header of this turn would count as newer than the one that goes on.
            self.is_broken = half.drop_header().is_err();
            return Err(error);
        }
        (half.turn, half.len) = (turn, HEADER_LEN);
        self.current = other;
        Ok(())
    }

    /// Records changes; they are kept once this returns.
    ///
    /// # Errors
    /// A file system without room, or a half that is too long: nothing is recorded then, and a turn may help.
    pub(crate) fn append(&mut self, records: &[Record]) -> io::Result<()> {
        self.check_sound()?;
        self.write_out()?;
        let seed = self.subject.seed(self.turn_now());
        let mut bytes = Bytes::new();
        records.iter().for_each(|record| record.put(&self.subject, seed, &mut bytes));
        let half = &mut self.halves[self.current];
        let end = half.len + bytes.len() as u64;
        if end > self.len_max {
            return Err(io::ErrorKind::FileTooLarge.into());
        }
        half.make_room(end)?;
        if let Err(error) = half.store.write_all(&bytes, HostOffset::new(half.len)) {
            // Records of changes that are not made must not be replayed.
            let undone = half.store.write_all(&vec![0; bytes.len()], HostOffset::new(half.len));
            self.is_broken = undone.is_err();
            return Err(error);
        }
        half.len = end;
        Ok(())
    }

    /// As [`Journal::append`], but that the records are kept once [`Journal::write_out`] returns.
    ///
    /// # Errors
    /// The same.
    pub(crate) fn append_later(&mut self, records: &[Record]) -> io::Result<()> {
        self.check_sound()?;
        let (seed, before) = (self.subject.seed(self.turn_now()), self.pending.len());
        records.iter().for_each(|record| record.put(&self.subject, seed, &mut self.pending));
        let half = &mut self.halves[self.current];
        let end = half.len + self.pending.len() as u64;
        let room =
            if end > self.len_max { Err(io::ErrorKind::FileTooLarge.into()) } else { half.make_room(end) };
        if room.is_err() {
            self.pending.truncate(before);
        }
        room
    }

    /// Gives the half the records that it has room for.
    ///
    /// # Errors
    /// A file that cannot be written: the journal is broken, as lookups show the changes already.
    pub(crate) fn write_out(&mut self) -> io::Result<()> {
        if self.pending.is_empty() {
            return Ok(());
        }
        let half = &mut self.halves[self.current];
        let written = half.store.write_all(&self.pending, HostOffset::new(half.len));
        self.is_broken |= written.is_err();
        half.len += self.pending.len() as u64;
        self.pending.clear();
        written
    }

    /// Ends a commit: what was recorded before it is in the image. A half that cannot be dropped is harmless: it is whole, and
    /// older.
    pub(crate) fn drop_older(&mut self) {
        let half = &mut self.halves[1 - self.current];
        if half.drop_header().is_ok() && half.room > ROOM_KEPT && half.store.set_len(ROOM_KEPT).is_ok() {
            half.room = ROOM_KEPT;
        }
    }

    /// Whether it is not known what a half holds: nothing more is recorded.
    pub(crate) fn is_broken(&self) -> bool {
        self.is_broken
    }

    fn check_sound(&self) -> io::Result<()> {
        if self.is_broken { Err(io::Error::other("an earlier write of it failed")) } else { Ok(()) }
    }

    /// The turn of the half that takes the records.
    pub(crate) fn turn_now(&self) -> u64 {
        self.halves[self.current].turn
    }

    /// The half that takes the records.
    pub(crate) fn path(&self) -> &Path {
        &self.halves[self.current].path
    }

    /// Lets halves grow to `len_max` bytes only.
    #[cfg(test)]
    pub(crate) fn limit(&mut self, len_max: u64) {
        self.len_max = len_max;
    }

    /// Removes the files, when the image is closed cleanly.
    pub(crate) fn remove(&self) {
        for half in &self.halves {
            // A file that stays behind is not believed: its image's autoclear bits are clear.
            let _ = Place::of(&half.path).and_then(|place| place.remove());
        }
    }
}

/// What a half needs to take one publication.
fn room_for_one(subject: &Subject) -> u64 {
    HEADER_LEN + TOGETHER_MAX * subject.record_len() as u64
}

#[cfg(test)]
pub(crate) mod tests;
