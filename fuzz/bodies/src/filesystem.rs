//! A file system on a guest's disk: its geometry, inodes and extents.

use std::collections::HashMap;

use vmstrata_memory::filesystem::{Files, ReadDevice};
use vmstrata_memory::introspect::FileSystem;

const SECTOR: usize = 512;
/// Bytes of the device; zeros where there is no sector.
const DEVICE_BYTES: u64 = 1 << 40;
/// Reads that finding one block may take: the inode with its group, and a block for each level of the deepest tree.
const READS_MAX: u64 = 2 * (2 + 12);
/// Inodes asked for, at the start of the input.
const INODES: usize = 4;

/// Sectors by their number.
struct Device<'a> {
    sectors: HashMap<u64, &'a [u8]>,
    reads: u64,
}

impl ReadDevice for &mut Device<'_> {
    fn read(&mut self, offset: u64, into: &mut [u8]) -> Option<()> {
        assert!(into.len() <= 64 << 10, "{} bytes at once", into.len());
        self.reads += 1;
        let end = offset.checked_add(into.len() as u64)?;
        (end <= DEVICE_BYTES).then_some(())?;
        for (byte, at) in into.iter_mut().zip(offset..) {
            let sector = self.sectors.get(&(at / SECTOR as u64));
            *byte = sector.map_or(0, |sector| sector[at as usize % SECTOR]);
        }
        Some(())
    }
}

/// A byte for which of the two it is, four bytes for each of four inodes, then sectors: each its number in four bytes, and its bytes.
pub fn filesystem(data: &[u8]) {
    let Some((&[kind], rest)) = data.split_first_chunk() else { return };
    let Some((inodes, rest)) = rest.split_at_checked(INODES * 4) else { return };
    let number = |bytes: &[u8]| u64::from(u32::from_le_bytes(*bytes.first_chunk().expect("four bytes")));
    let sectors = rest.chunks_exact(4 + SECTOR).map(|record| (number(record), &record[4..]));
    let mut device = Device { sectors: sectors.collect(), reads: 0 };
    let system = if kind % 2 == 0 { FileSystem::Ext4 } else { FileSystem::Xfs };
    let Some(mut files) = Files::open(system, &mut device) else { return };
    let mut asked = 1;
    for inode in inodes.chunks_exact(4).map(number) {
        let pages = (0..64).map(|page| page * 5 * 4096);
        for at in pages.chain([1 << 32, 1 << 50, u64::MAX]) {
            asked += 1;
            if let Some(run) = files.find(inode, at) {
                assert!(run.len > 0 && run.offset.checked_add(run.len).is_some(), "{run:?}");
            }
        }
    }
    drop(files);
    assert!(device.reads <= asked * READS_MAX, "{} reads for {asked} questions", device.reads);
}
