//! The bytes of the log. All integers are little-endian: a log never leaves its host.
//!
//! ```text
//!   block 0, 1   header, twice: the valid one with the higher generation counts
//!   block 2 ...  ring of batches; a batch begins at a block, and does not wrap
//!
//!   batch    48 bytes: magic │ epoch │ sequence │ place │ length │ records │ CRC-32C; then records, zeros up to a block
//!   record   40 bytes: length │ kind │ share │ inode │ mark │ path length │ operations; then path, operations
//!   operation 24 bytes: where │ length │ kind; then the bytes of a write
//! ```
//!
//! Records, paths and bytes are padded to 8 bytes. The epoch is drawn anew whenever the log is emptied by recovery: batches of
//! another epoch are none. No guest knows it, so none can write what looks like a batch.

use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};

use vmstrata_types::HostOffset;

/// Batches begin at multiples of it, and no write to the log is shorter.
pub(crate) const BLOCK: u64 = 4096;
/// Where the ring begins.
pub(crate) const RING_AT: u64 = 2 * BLOCK;
/// Longest path that a record names.
pub(crate) const PATH_MAX: usize = 2048;

const LOG_MAGIC: &[u8; 8] = b"VMSFLOG1";
const BATCH_MAGIC: &[u8; 8] = b"VMSBATCH";
const HEADER_LEN: usize = 88;
pub(crate) const BATCH_HEADER_LEN: usize = 48;
const BATCH_CHECK: std::ops::Range<usize> = 44..48;
const RECORD_LEN: usize = 40;
const OPERATION_LEN: usize = 24;

/// Where batches are read from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Tail {
    /// Bytes from the first batch of the epoch: never reused, modulo the ring's length.
    pub(crate) place: u64,
    /// The number of the batch there.
    pub(crate) sequence: u64,
}

/// What the first blocks say.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Header {
    /// Drawn when the log was made.
    pub(crate) id: u64,
    pub(crate) epoch: u64,
    pub(crate) generation: u64,
    pub(crate) host: [u8; 16],
    pub(crate) boot: [u8; 16],
    pub(crate) tail: Tail,
}

fn word(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(bytes[at..at + 8].try_into().expect("eight bytes"))
}

fn half(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(bytes[at..at + 4].try_into().expect("four bytes"))
}

impl Header {
    pub(crate) fn encode(&self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(BLOCK as usize);
        bytes.extend_from_slice(LOG_MAGIC);
        bytes.extend_from_slice(&self.id.to_le_bytes());
        bytes.extend_from_slice(&self.epoch.to_le_bytes());
        bytes.extend_from_slice(&self.generation.to_le_bytes());
        bytes.extend_from_slice(&self.host);
        bytes.extend_from_slice(&self.boot);
        bytes.extend_from_slice(&self.tail.place.to_le_bytes());
        bytes.extend_from_slice(&self.tail.sequence.to_le_bytes());
        debug_assert_eq!(bytes.len(), HEADER_LEN - 8);
        let check = crc32c::crc32c(&bytes);
        bytes.extend_from_slice(&u64::from(check).to_le_bytes());
        bytes.resize(BLOCK as usize, 0);
        bytes
    }

    /// `None` where there is none, or a torn one.
    pub(crate) fn decode(bytes: &[u8]) -> Option<Self> {
        let (covered, rest) = bytes.split_at_checked(HEADER_LEN - 8)?;
        let is_whole = rest.len() >= 8 && word(rest, 0) == u64::from(crc32c::crc32c(covered));
        if !is_whole || !covered.starts_with(LOG_MAGIC) {
            return None;
        }
        let array = |at: usize| covered[at..at + 16].try_into().expect("sixteen bytes");
        Some(Self {
            id: word(covered, 8),
            epoch: word(covered, 16),
            generation: word(covered, 24),
            host: array(32),
            boot: array(48),
            tail: Tail { place: word(covered, 64), sequence: word(covered, 72) },
        })
    }
}

/// Which file a record is about.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Subject {
    /// Its name when it was opened; it may have another one by now.
    pub path: PathBuf,
    /// Its inode number; 0 for a block device.
    pub ino: u64,
    /// What its owner last said that marks it ([`vmstrata_store::Logged::join`]).
    pub mark: u64,
}

/// What a record says of its file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// Its operations were flushed.
    Written,
    /// All earlier records of the share are in the file; its operations were flushed, too.
    Synced,
    /// A flush of the file failed: the host's page cache is not to be trusted.
    Lost,
}

/// A record's head.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Record<'a> {
    pub(crate) kind: Kind,
    pub(crate) share: u64,
    pub(crate) subject: Subject,
    pub(crate) operations: Operations<'a>,
}

/// A change of a file, in the order in which they are made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Operation<'a> {
    Write { at: HostOffset, bytes: &'a [u8] },
    Punch { at: HostOffset, len: u64 },
}

impl Operation<'_> {
    /// Bytes of the file that it changes.
    pub(crate) fn len(self) -> u64 {
        match self {
            Self::Write { bytes, .. } => bytes.len() as u64,
            Self::Punch { len, .. } => len,
        }
    }
}

/// Operations as they stand in a record.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct OperationBytes {
    bytes: Vec<u8>,
    count: u32,
}

impl OperationBytes {
    pub(crate) fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// Bytes of the record that they take.
    pub(crate) fn len(&self) -> usize {
        self.bytes.len()
    }

    fn head(&mut self, at: HostOffset, len: u64, kind: u64) {
        [at.get(), len, kind].iter().for_each(|word| self.bytes.extend_from_slice(&word.to_le_bytes()));
        self.count += 1;
    }

    /// Adds a write of `len` bytes, which `fill` puts into the room that it is given; returns that room. [`OperationBytes::undo`] takes it back.
    pub(crate) fn write(&mut self, at: HostOffset, len: usize, fill: impl FnOnce(&mut [u8])) -> &[u8] {
        self.head(at, len as u64, 0);
        let start = self.bytes.len();
        self.bytes.resize(start + len.next_multiple_of(8), 0);
        fill(&mut self.bytes[start..start + len]);
        &self.bytes[start..start + len]
    }

    pub(crate) fn punch(&mut self, at: HostOffset, len: u64) {
        self.head(at, len, 1);
    }

    /// Takes the last operation back; `len` is what [`OperationBytes::len`] was before it.
    pub(crate) fn undo(&mut self, len: usize) {
        self.bytes.truncate(len);
        self.count -= 1;
    }
}

/// A record's bytes.
pub(crate) fn encode_record(
    kind: Kind,
    share: u64,
    subject: &Subject,
    operations: [&OperationBytes; 2],
) -> Vec<u8> {
    let path = subject.path.as_os_str().as_bytes();
    assert!(path.len() <= PATH_MAX, "checked when the file was opened");
    let count: u32 = operations.iter().map(|some| some.count).sum();
    let body: usize = operations.iter().map(|some| some.bytes.len()).sum();
    let len = RECORD_LEN + path.len().next_multiple_of(8) + body;
    let mut bytes = Vec::with_capacity(len);
    let kind: u32 = match kind {
        Kind::Written => 1,
        Kind::Synced => 2,
        Kind::Lost => 3,
    };
    bytes.extend_from_slice(&u32::try_from(len).expect("records are short").to_le_bytes());
    bytes.extend_from_slice(&kind.to_le_bytes());
    [share, subject.ino, subject.mark].iter().for_each(|word| bytes.extend_from_slice(&word.to_le_bytes()));
    bytes.extend_from_slice(&(path.len() as u32).to_le_bytes());
    bytes.extend_from_slice(&count.to_le_bytes());
    bytes.extend_from_slice(path);
    bytes.resize(bytes.len().next_multiple_of(8), 0);
    operations.iter().for_each(|some| bytes.extend_from_slice(&some.bytes));
    bytes
}

/// The longest a record without operations gets, in a batch of its own.
pub(crate) const fn is_one_block() -> bool {
    BATCH_HEADER_LEN + RECORD_LEN + PATH_MAX <= BLOCK as usize
}

const _: () = assert!(is_one_block(), "the room that is set aside counts in blocks");

/// The operations of a record, checked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Operations<'a> {
    bytes: &'a [u8],
    count: u32,
}

impl<'a> Operations<'a> {
    pub(crate) fn iter(self) -> impl Iterator<Item = Operation<'a>> {
        let mut rest = self.bytes;
        (0..self.count).map(move |_| take_operation(&mut rest).expect("checked when it was decoded"))
    }
}

fn take_operation<'a>(rest: &mut &'a [u8]) -> Option<Operation<'a>> {
    let (head, body) = rest.split_at_checked(OPERATION_LEN)?;
    let (at, len) = (word(head, 0), word(head, 8));
    // What lies past the end of every file is none.
    at.checked_add(len).filter(|end| i64::try_from(*end).is_ok())?;
    let at = HostOffset::new(at);
    match word(head, 16) {
        0 => {
            let (padded, after) =
                body.split_at_checked(usize::try_from(len).ok()?.checked_next_multiple_of(8)?)?;
            *rest = after;
            Some(Operation::Write { at, bytes: &padded[..len as usize] })
        }
        1 => {
            *rest = body;
            Some(Operation::Punch { at, len })
        }
        _ => None,
    }
}

fn take_record<'a>(rest: &mut &'a [u8]) -> Option<Record<'a>> {
    let head = rest.get(..RECORD_LEN)?;
    let (record, after) = rest.split_at_checked(half(head, 0) as usize)?;
    let kind = match half(head, 4) {
        1 => Kind::Written,
        2 => Kind::Synced,
        3 => Kind::Lost,
        _ => return None,
    };
    let path_len = half(head, 32) as usize;
    let body = record.get(RECORD_LEN..).filter(|_| path_len <= PATH_MAX)?;
    let (path, bytes) = body.split_at_checked(path_len.next_multiple_of(8))?;
    let operations = Operations { bytes, count: half(head, 36) };
    let mut unread = bytes;
    for _ in 0..operations.count {
        take_operation(&mut unread)?;
    }
    if !unread.is_empty() {
        return None;
    }
    *rest = after;
    let path = Path::new(std::ffi::OsStr::from_bytes(&path[..path_len])).to_owned();
    let subject = Subject { path, ino: word(head, 16), mark: word(head, 24) };
    Some(Record { kind, share: word(head, 8), subject, operations })
}

/// What the first block of a batch says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct BatchHeader {
    pub(crate) epoch: u64,
    /// Consecutive in an epoch.
    pub(crate) sequence: u64,
    /// As [`Tail::place`].
    pub(crate) place: u64,
    /// Bytes up to the next block that is free.
    pub(crate) len: u64,
}

impl BatchHeader {
    /// What bytes at a block's start may be; whether the batch is whole, [`decode_batch`] tells.
    pub(crate) fn decode(bytes: &[u8]) -> Option<Self> {
        let head = bytes.get(..BATCH_HEADER_LEN)?;
        head.starts_with(BATCH_MAGIC).then(|| Self {
            epoch: word(head, 8),
            sequence: word(head, 16),
            place: word(head, 24),
            len: word(head, 32),
        })
    }
}

/// Bytes of the ring that a batch of records with these lengths takes.
pub(crate) fn batch_len(records: usize) -> u64 {
    ((BATCH_HEADER_LEN + records) as u64).next_multiple_of(BLOCK)
}

/// Puts a batch together in `into`, which is as long as [`batch_len`] says; the sequence, place and epoch are those of `header`.
pub(crate) fn encode_batch<'a>(
    header: BatchHeader,
    records: impl Iterator<Item = &'a [u8]>,
    into: &mut [u8],
) {
    assert_eq!(into.len() as u64, header.len, "as long as its batch");
    into[..8].copy_from_slice(BATCH_MAGIC);
    let words = [header.epoch, header.sequence, header.place, header.len];
    words.iter().enumerate().for_each(|(number, word)| {
        into[8 + 8 * number..16 + 8 * number].copy_from_slice(&word.to_le_bytes());
    });
    let (mut at, mut count) = (BATCH_HEADER_LEN, 0_u32);
    for record in records {
        into[at..at + record.len()].copy_from_slice(record);
        (at, count) = (at + record.len(), count + 1);
    }
    into[at..].fill(0);
    into[40..44].copy_from_slice(&count.to_le_bytes());
    into[BATCH_CHECK].fill(0);
    let check = crc32c::crc32c(into);
    into[BATCH_CHECK].copy_from_slice(&check.to_le_bytes());
}

/// Whether `bytes` are a whole batch.
pub(crate) fn is_whole(bytes: &[u8]) -> bool {
    let Some(found) = bytes.get(BATCH_CHECK) else { return false };
    let check = crc32c::crc32c(&bytes[..BATCH_CHECK.start]);
    let check = crc32c::crc32c_append(check, &[0; 4]);
    crc32c::crc32c_append(check, &bytes[BATCH_CHECK.end..]).to_le_bytes() == *found
}

/// The records of a whole batch; `None` where one breaks the format.
pub(crate) fn decode_batch(bytes: &[u8]) -> Option<Vec<Record<'_>>> {
    let mut rest = bytes.get(BATCH_HEADER_LEN..)?;
    (0..half(bytes, 40)).map(|_| take_record(&mut rest)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn subject() -> Subject {
        Subject { path: PathBuf::from("/vms/web.qcow2"), ino: 7, mark: 9 }
    }

    fn batch() -> Vec<u8> {
        let mut operations = OperationBytes::default();
        operations.write(HostOffset::new(512), 5, |room| room.copy_from_slice(b"bytes"));
        operations.punch(HostOffset::new(1 << 40), 1 << 20);
        let none = OperationBytes::default();
        let records = [
            encode_record(Kind::Written, 3, &subject(), [&operations, &none]),
            encode_record(Kind::Synced, 4, &subject(), [&none, &none]),
        ];
        let len = batch_len(records.iter().map(Vec::len).sum());
        let mut bytes = vec![0xaa; len as usize];
        let header = BatchHeader { epoch: 1, sequence: 2, place: 0, len };
        encode_batch(header, records.iter().map(Vec::as_slice), &mut bytes);
        assert_eq!(BatchHeader::decode(&bytes), Some(header));
        bytes
    }

    #[test]
    fn a_batch_reads_as_it_was_written() {
        let bytes = batch();
        assert!(is_whole(&bytes));
        let records = decode_batch(&bytes).unwrap();
        assert_eq!((records[0].kind, records[0].share, &records[0].subject), (Kind::Written, 3, &subject()));
        let operations: Vec<_> = records[0].operations.iter().collect();
        let write = Operation::Write { at: HostOffset::new(512), bytes: b"bytes" };
        assert_eq!(operations, [write, Operation::Punch { at: HostOffset::new(1 << 40), len: 1 << 20 }]);
        assert_eq!((records[1].kind, records[1].operations.iter().count()), (Kind::Synced, 0));
    }

    #[test]
    fn no_flip_of_a_bit_goes_unseen() {
        let bytes = batch();
        for bit in 0..bytes.len() * 8 {
            let mut flipped = bytes.clone();
            flipped[bit / 8] ^= 1 << (bit % 8);
            assert!(!is_whole(&flipped), "bit {bit}");
        }
        let header = Header {
            id: 7,
            epoch: 1,
            generation: 2,
            host: [3; 16],
            boot: [4; 16],
            tail: Tail { place: 5, sequence: 6 },
        };
        let bytes = header.encode();
        assert_eq!(Header::decode(&bytes), Some(header));
        for bit in 0..HEADER_LEN * 8 {
            let mut flipped = bytes.clone();
            flipped[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(Header::decode(&flipped), None, "bit {bit}");
        }
    }

    proptest! {
        /// Whatever passes the check, nothing is read past its end.
        #[test]
        fn hostile_records_are_refused_or_read(mut bytes in proptest::collection::vec(any::<u8>(), 48..600), count in 0_u32..4, small in any::<bool>()) {
            bytes[40..44].copy_from_slice(&count.to_le_bytes());
            if small {
                // Lengths that a record may have.
                let rest = bytes.len() as u32 - 48;
                if rest >= 40 {
                    bytes[48..52].copy_from_slice(&rest.to_le_bytes());
                    bytes[52..56].copy_from_slice(&1_u32.to_le_bytes());
                    bytes[80..84].copy_from_slice(&0_u32.to_le_bytes());
                }
            }
            if let Some(records) = decode_batch(&bytes) {
                for record in records {
                    prop_assert!(record.operations.iter().count() == record.operations.count as usize);
                }
            }
        }
    }
}
