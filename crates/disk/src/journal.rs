//! The volatile journal: table changes that are not in the image yet, kept where a killed process leaves them.
//!
//! A mapping may reach the image only after the data it points to is on stable storage, else a power failure could
//! show a cluster full of garbage where flushed data was. But a guest outlives its storage server: when the server
//! is killed and started again, writes that completed must still be there. So every change of the tables is
//! noted in a file that survives the process and not the machine (`/run` is memory), and taken up again by the next
//! server. After a power failure the journal is gone, and with it only what was never flushed.
//!
//! Two files take turns. When a commit begins, new notes go to the other one; when it is done, the first is emptied. A half
//! begins with what the commit leaves, and its header is written last: a half that is believed has all of that.
//!
//! ```text
//!   header, 64 bytes: magic, boot id, device, inode, turn, session, check
//!   record, 32 bytes: table and index │ old raw entry │ new raw entry │ check
//! ```
//!
//! Nothing in a journal is believed unless the image still is what it was: its header names the same session (any
//! stock writer clears those autoclear bits), each entry in the image still has a value noted for it (or what taking up
//! makes of the newest), and the refcount of every new cluster is 1. Integers are little-endian: a journal never leaves its
//! machine.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

use vmstrata_store::FileId;

const MAGIC: &[u8; 8] = b"VMSJRNL1";
const HEADER_LEN: u64 = 64;
const RECORD_LEN: usize = 32;
/// Set in a record's index when it is about an L1 entry.
const L1_FLAG: u64 = 1 << 63;
/// A journal longer than this was not written by us: commits keep them far shorter.
const MAX_LEN: u64 = 64 << 20;

/// One change of a table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Record {
    pub(crate) slot: Slot,
    /// Raw entry before; what is in the image until the change is committed.
    pub(crate) old: u64,
    /// Raw entry after.
    pub(crate) new: u64,
}

/// An entry of the image's tables.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Slot {
    /// Entry of the L1 table.
    L1(u64),
    /// L2 entry of this guest cluster.
    L2(u64),
}

impl Record {
    fn encode(&self) -> [u8; RECORD_LEN] {
        let index = match self.slot {
            Slot::L1(index) => index | L1_FLAG,
            Slot::L2(cluster) => cluster,
        };
        let mut bytes = [0; RECORD_LEN];
        bytes[..8].copy_from_slice(&index.to_le_bytes());
        bytes[8..16].copy_from_slice(&self.old.to_le_bytes());
        bytes[16..24].copy_from_slice(&self.new.to_le_bytes());
        let check = u64::from(crc32c::crc32c(&bytes[..24])) | 1 << 32;
        bytes[24..].copy_from_slice(&check.to_le_bytes());
        bytes
    }

    fn decode(bytes: &[u8; RECORD_LEN]) -> Option<Self> {
        let word = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().expect("eight bytes"));
        if word(24) != u64::from(crc32c::crc32c(&bytes[..24])) | 1 << 32 {
            return None;
        }
        let index = word(0);
        let slot = if index & L1_FLAG != 0 { Slot::L1(index & !L1_FLAG) } else { Slot::L2(index) };
        Some(Self { slot, old: word(8), new: word(16) })
    }
}

/// The two files of one image.
#[derive(Debug)]
pub(crate) struct Journal {
    halves: [Half; 2],
    current: usize,
    turn: u64,
    image: FileId,
    session: u64,
    boot_id: [u8; 16],
    /// Longest a half may grow; commits come long before.
    len_max: u64,
}

#[derive(Debug)]
struct Half {
    path: PathBuf,
    file: File,
    len: u64,
}

impl Journal {
    /// Opens or makes the journal of an image in `dir`; returns what the process of that session left there, oldest
    /// first. Call [`Journal::reset`] or [`Journal::go_on`] before the first note.
    ///
    /// # Errors
    /// A directory or file that cannot be made, read or written.
    pub(crate) fn open(dir: &Path, image: FileId, session: u64) -> io::Result<(Self, Vec<Record>)> {
        std::fs::create_dir_all(dir)?;
        let boot_id = boot_id()?;
        let open = |half: u8| -> io::Result<Half> {
            let path = dir.join(format!("{:x}-{:x}.{half}.journal", image.dev, image.ino));
            let file = OpenOptions::new()
                .read(true)
                .write(true)
                .create(true)
                .truncate(false)
                .mode(0o600)
                .custom_flags(rustix::fs::OFlags::NOFOLLOW.bits().cast_signed())
                .open(&path)?;
            Ok(Half { path, file, len: 0 })
        };
        let mut journal = Self {
            halves: [open(0)?, open(1)?],
            current: 0,
            turn: 0,
            image,
            session,
            boot_id,
            len_max: MAX_LEN,
        };
        let mut found: Vec<(u64, usize, Vec<Record>)> = Vec::new();
        for (number, half) in journal.halves.iter().enumerate() {
            found.extend(journal.read(half)?.map(|(turn, records)| (turn, number, records)));
        }
        found.sort_by_key(|(turn, ..)| *turn);
        if let Some((turn, number, _)) = found.last() {
            (journal.turn, journal.current) = (*turn, *number);
        }
        Ok((journal, found.into_iter().flat_map(|(.., records)| records).collect()))
    }

    /// Turn and records of a half, if it is of this image and this boot.
    fn read(&self, half: &Half) -> io::Result<Option<(u64, Vec<Record>)>> {
        let len = half.file.metadata()?.len();
        if !(HEADER_LEN..=MAX_LEN).contains(&len) {
            return Ok(None);
        }
        let mut bytes = vec![0; len as usize];
        half.file.read_exact_at(&mut bytes, 0)?;
        let turn = u64::from_le_bytes(bytes[40..48].try_into().expect("eight bytes"));
        if bytes[..HEADER_LEN as usize] != self.header(turn) {
            return Ok(None);
        }
        let records = bytes[HEADER_LEN as usize..].as_chunks().0.iter().map_while(Record::decode).collect();
        Ok(Some((turn, records)))
    }

    fn header(&self, turn: u64) -> [u8; HEADER_LEN as usize] {
        let mut bytes = [0; HEADER_LEN as usize];
        bytes[..8].copy_from_slice(MAGIC);
        bytes[8..24].copy_from_slice(&self.boot_id);
        bytes[24..32].copy_from_slice(&self.image.dev.to_le_bytes());
        bytes[32..40].copy_from_slice(&self.image.ino.to_le_bytes());
        bytes[40..48].copy_from_slice(&turn.to_le_bytes());
        bytes[48..56].copy_from_slice(&self.session.to_le_bytes());
        let check = crc32c::crc32c(&bytes[..56]);
        bytes[56..60].copy_from_slice(&check.to_le_bytes());
        bytes
    }

    /// Empties both halves for a new session: what they held is in the image now, or not worth believing.
    ///
    /// # Errors
    /// A file that cannot be written.
    pub(crate) fn reset(&mut self, session: u64) -> io::Result<()> {
        self.session = session;
        for number in 0..2 {
            self.clear(number)?;
        }
        self.start(0, &[])
    }

    /// Goes on with the session that it was opened for: what was found is in the image now, but for `staying`.
    ///
    /// # Errors
    /// A file that cannot be written: what was found is there still.
    pub(crate) fn go_on(&mut self, staying: &[Record]) -> io::Result<()> {
        self.turn(staying)?;
        self.drop_older()
    }

    fn clear(&mut self, number: usize) -> io::Result<()> {
        self.halves[number].len = 0;
        self.halves[number].file.set_len(0)
    }

    fn start(&mut self, number: usize, with: &[Record]) -> io::Result<()> {
        // Nothing old may follow the new notes.
        self.clear(number)?;
        let records: Vec<u8> = with.iter().flat_map(Record::encode).collect();
        let header = self.header(self.turn + 1);
        let half = &mut self.halves[number];
        let written = half.file.write_all_at(&records, HEADER_LEN);
        // Last: without it the half is none, whether it has no room or its writer is killed here.
        if let Err(error) = written.and_then(|()| half.file.write_all_at(&header, 0)) {
            let _ = self.clear(number);
            return Err(error);
        }
        half.len = HEADER_LEN + records.len() as u64;
        (self.turn, self.current) = (self.turn + 1, number);
        Ok(())
    }

    /// Notes changes; they are kept once this returns.
    ///
    /// # Errors
    /// A journal directory that is full, or a journal that is too long to be believed: the caller must commit
    /// instead.
    pub(crate) fn append(&mut self, records: &[Record]) -> io::Result<()> {
        let bytes: smallvec::SmallVec<[u8; 4 * RECORD_LEN]> =
            records.iter().flat_map(Record::encode).collect();
        let half = &mut self.halves[self.current];
        if half.len + bytes.len() as u64 > self.len_max {
            return Err(io::ErrorKind::FileTooLarge.into());
        }
        if let Err(error) = half.file.write_all_at(&bytes, half.len) {
            // Records that fitted would stand behind the next one, and be taken for newer.
            if half.file.set_len(half.len).is_err() {
                half.len = self.len_max;
            }
            return Err(error);
        }
        half.len += bytes.len() as u64;
        Ok(())
    }

    /// Begins a commit: later changes go to the other half, which begins with `staying`, those that the commit leaves.
    ///
    /// # Errors
    /// A file that cannot be written; then the current half goes on.
    pub(crate) fn turn(&mut self, staying: &[Record]) -> io::Result<()> {
        self.start(1 - self.current, staying)
    }

    /// Ends a commit: what was noted before it is in the image.
    ///
    /// # Errors
    /// A file that cannot be written.
    pub(crate) fn drop_older(&mut self) -> io::Result<()> {
        self.clear(1 - self.current)
    }

    /// Lets halves grow to `len_max` bytes only.
    #[cfg(test)]
    pub(crate) fn limit(&mut self, len_max: u64) {
        self.len_max = len_max;
    }

    /// Removes the files, when the image is closed cleanly.
    pub(crate) fn remove(&self) {
        for half in &self.halves {
            // A file that stays behind is not believed: its image's autoclear bit is clear.
            let _ = std::fs::remove_file(&half.path);
        }
    }
}

/// The kernel's name for this boot.
fn boot_id() -> io::Result<[u8; 16]> {
    let text = std::fs::read_to_string("/proc/sys/kernel/random/boot_id")?;
    let digits: String = text.chars().filter(char::is_ascii_hexdigit).collect();
    let id = u128::from_str_radix(&digits, 16).map_err(io::Error::other)?;
    Ok(id.to_le_bytes())
}

#[cfg(test)]
mod tests;
