//! A disk as a flat array of bytes: the slow and certain answer to what a read must return.

use rand::Rng as _;
use rand::rngs::SmallRng;
use vmstrata_disk::{Disk, Error};
use vmstrata_store::Segment;
use vmstrata_types::{GuestOffset, GuestRange};

pub const SECTOR: u64 = 512;

/// Reads `len` bytes.
pub fn read(disk: &Disk, at: u64, len: usize) -> Result<Vec<u8>, Error> {
    let mut bytes = vec![0xEE; len];
    disk.read(GuestOffset::new(at), &[Segment::from_mut(&mut bytes)])?;
    Ok(bytes)
}

/// Writes bytes, in pieces, as a guest's scattered buffers come.
pub fn write(disk: &Disk, at: u64, bytes: &[u8]) -> Result<(), Error> {
    let mut copy = bytes.to_vec();
    let middle = copy.len() / 3;
    let (left, right) = copy.split_at_mut(middle);
    disk.write(GuestOffset::new(at), &[Segment::from_mut(left), Segment::from_mut(right)])
}

pub fn range(at: u64, len: u64) -> GuestRange {
    GuestRange::new(GuestOffset::new(at), len)
}

/// Makes sure that the disk reads as `model` everywhere.
pub fn assert_reads(disk: &Disk, model: &[u8], when: &str) {
    assert_eq!(disk.size(), model.len() as u64, "size {when}");
    for (number, expected) in model.chunks(1 << 20).enumerate() {
        let at = (number << 20) as u64;
        let found = read(disk, at, expected.len()).expect("reads");
        assert_same(&found, expected, at, when);
    }
}

/// Compares, and says where the first difference is.
pub fn assert_same(found: &[u8], expected: &[u8], at: u64, when: &str) {
    assert_eq!(found.len(), expected.len(), "length {when}");
    if found == expected {
        return;
    }
    if let Some(place) = (0..found.len()).find(|&place| found[place] != expected[place]) {
        let show = |bytes: &[u8]| bytes[place..bytes.len().min(place + 8)].to_vec();
        let at = at + place as u64;
        panic!("{when}: byte {at:#x} reads {:x?}, not {:x?}", show(found), show(expected));
    }
}

/// Bytes that are different everywhere and easy to compress.
pub fn pattern(random: &mut SmallRng, len: usize) -> Vec<u8> {
    let unit: [u8; 61] = std::array::from_fn(|_| random.random());
    repeat(&unit, len)
}

/// `unit` over and over.
pub fn repeat(unit: &[u8], len: usize) -> Vec<u8> {
    let mut bytes = unit.repeat(len.div_ceil(unit.len()));
    bytes.truncate(len);
    bytes
}

/// A run of sectors of a disk: short, up to a few clusters, at cluster borders more often than elsewhere.
pub fn some_range(random: &mut SmallRng, size: u64, cluster: u64) -> (u64, u64) {
    assert!(size >= SECTOR && size.is_multiple_of(SECTOR), "a disk of whole sectors");
    let mut at = random.random_range(0..size);
    if random.random_ratio(1, 3) {
        at -= at % cluster;
    }
    at -= at % SECTOR;
    let len = match random.random_range(0..10) {
        0..5 => random.random_range(1..=8) * SECTOR,
        5..8 => random.random_range(1..=3 * cluster.max(SECTOR)).next_multiple_of(SECTOR),
        8 => (random.random_range(1..=4) * cluster).saturating_sub(at % cluster).max(SECTOR),
        _ => random.random_range(1..=1u64 << 20).next_multiple_of(SECTOR),
    };
    (at, len.min(size - at))
}

/// Makes the model's range zeros.
pub fn zero(model: &mut [u8], at: u64, len: u64) {
    model[at as usize..(at + len) as usize].fill(0);
}
