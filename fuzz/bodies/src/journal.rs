//! The notes a killed process left beside an image: damaged, and made up by someone who knows how.
//!
//! ```text
//!   first byte even: journal 0 = what was left, xor the rest            damage
//!   first byte odd:  records of 24 bytes (table and index, old, new)    made up, with checks that are right
//! ```

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::LazyLock;

use tempfile::TempDir;
use vmstrata_disk::{ErrorKind, OpenOptions, Unflushed};
use vmstrata_qcow2::{CreateOptions, new_image};
use vmstrata_store::Segment;
use vmstrata_types::{ClusterBits, GuestOffset};

use crate::image::{check, look, write};
use crate::memory_file::{INODE, MemoryFile};

const HEADER_LEN: usize = 64;
const SIZE: u64 = 8 << 20;

/// What a process killed in the middle of writing leaves.
struct Left {
    dir: TempDir,
    image: Vec<u8>,
    journals: [Vec<u8>; 2],
}

static LEFT: LazyLock<Left> = LazyLock::new(|| {
    let memory = Path::new("/dev/shm");
    let dir = if memory.is_dir() { tempfile::tempdir_in(memory) } else { tempfile::tempdir() };
    let dir = dir.expect("a directory for journals");
    let cluster_bits = ClusterBits::new(12).expect("in range");
    let new = new_image(&CreateOptions { cluster_bits, ..CreateOptions::new(SIZE) }).expect("an image");
    let mut image = vec![0; new.file_len as usize];
    for (at, bytes) in &new.parts {
        image[at.get() as usize..][..bytes.len()].copy_from_slice(bytes);
    }
    let file = MemoryFile::new(image);
    let disk = file.open(false, Some(dir.path())).expect("our own image");
    let put =
        |at: u64| disk.write(GuestOffset::new(at), &[Segment::from_mut(&mut [0x5a; 20_000])]).expect("room");
    put(0);
    disk.flush().expect("a flush");
    put(8192);
    put(SIZE / 2 + 5);
    put(SIZE - 20_000);
    let image = file.bytes();
    let journals = [0, 1].map(|half| fs::read(path(dir.path(), half)).expect("a journal"));
    disk.close().expect("a disk that can be closed");
    assert!(journals.iter().any(|journal| turn(journal) > 0), "nothing was recorded");
    Left { dir, image, journals }
});

fn word(half: &[u8], at: usize) -> u64 {
    half.get(at..at + 8).map_or(0, |bytes| u64::from_le_bytes(bytes.try_into().expect("eight bytes")))
}

/// Of two halves the one that was begun later has the greater; 0 for one that was dropped.
fn turn(half: &[u8]) -> u64 {
    word(half, 40)
}

fn path(dir: &Path, half: usize) -> PathBuf {
    dir.join(format!("1-{INODE:x}.{half}.journal"))
}

/// Opens an image beside the journal that `data` makes; see the module documentation.
///
/// # Panics
/// When a journal that was only damaged harms the image.
pub fn journal(data: &[u8]) {
    let Some((&kind, rest)) = data.split_first() else { return };
    let made_up = kind & 1 == 1;
    for (half, left) in LEFT.journals.iter().enumerate() {
        let is_newer = turn(left) > turn(&LEFT.journals[1 - half]);
        let bytes = match (made_up, is_newer) {
            (_, false) => left.clone(),
            (true, true) => forge(left, rest),
            (false, true) => damage(left, rest),
        };
        fs::write(path(LEFT.dir.path(), half), bytes).expect("room for a journal");
    }
    let file = MemoryFile::new(LEFT.image.clone());
    let dir = Some(LEFT.dir.path());
    let disk = file.open(false, dir).unwrap_or_else(|error| {
        let is_refused =
            matches!(error.kind(), ErrorKind::JournalMissing { .. } | ErrorKind::JournalMismatch { .. });
        assert!(is_refused, "{error}");
        let options = OpenOptions { unflushed: Unflushed::Discard, ..OpenOptions::default() };
        file.open_with(options, dir).expect("no journal makes an image useless")
    });
    look(&disk);
    write(&disk, !made_up);
    let closed = disk.close();
    drop(disk);
    let report = check(&file).expect("an image that can be checked");
    if !made_up {
        closed.expect("a disk that can be closed");
        assert!(report.is_safe(), "{report:#?}");
    }
}

fn damage(left: &[u8], with: &[u8]) -> Vec<u8> {
    let mut bytes = left.to_vec();
    bytes.resize(left.len().max(with.len()), 0);
    bytes.iter_mut().zip(with).for_each(|(byte, with)| *byte ^= with);
    bytes
}

/// The record's check is a CRC-32C of the session number, the turn and its 24 bytes, and a one above it.
fn forge(left: &[u8], records: &[u8]) -> Vec<u8> {
    let mut bytes = left[..HEADER_LEN.min(left.len())].to_vec();
    let session = crc32c::crc32c(&word(left, 48).to_le_bytes());
    let seed = crc32c::crc32c_append(session, &(turn(left) as u32).to_le_bytes());
    for record in records.as_chunks::<24>().0 {
        bytes.extend(record);
        bytes.extend((u64::from(crc32c::crc32c_append(seed, record)) | 1 << 32).to_le_bytes());
    }
    bytes
}
