use std::fs::File;

use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use vmstrata_store::Segment;

use super::*;

pub(in crate::vhost_user) fn memfd(len: u64) -> File {
    let fd = memfd_create("vmstrata-test", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
    ftruncate(&fd, len).unwrap();
    File::from(fd)
}

fn shared(len: u64) -> SharedFile {
    SharedFile::new(memfd(len)).unwrap()
}

fn region(guest: u64, len: u64, file_offset: u64) -> RegionInfo {
    RegionInfo { guest, len, user: guest + 0x7000_0000_0000, file_offset }
}

fn two_regions() -> GuestMemory {
    let memory =
        GuestMemory::default().with_region(region(0x10_0000, 0x4000, 0x1000), shared(0x5000)).unwrap();
    memory.with_region(region(0, 0x2000, 0), shared(0x2000)).unwrap()
}

#[test]
fn addresses_translate_inside_regions_only() {
    let memory = two_regions();
    let (_, len) = memory.translate(0x1f00, 0x1000).unwrap();
    assert_eq!(len, 0x100, "cut at the end of the region");
    assert!(memory.translate(0x2000, 1).is_none());
    assert!(memory.translate(0xf_ffff, 1).is_none());
    assert_eq!(memory.translate(0x10_3fff, 8).unwrap().1, 1);
    assert!(memory.translate(0x10_4000, 1).is_none());
    assert!(memory.translate(u64::MAX, 1).is_none());
    assert!(GuestMemory::default().translate(0, 1).is_none());
}

#[test]
fn the_file_offset_is_where_the_region_starts() {
    use std::os::unix::fs::FileExt;
    let file = memfd(0x5000);
    file.write_all_at(b"x", 0x1234).unwrap();
    let memory = GuestMemory::default()
        .with_region(region(0x8000, 0x1000, 0x1200), SharedFile::new(file).unwrap())
        .unwrap();
    let (host, _) = memory.translate(0x8034, 1).unwrap();
    // SAFETY: one byte inside the mapping that `memory` keeps.
    assert_eq!(unsafe { host.read_volatile() }, b'x');
}

#[test]
fn ring_parts_lie_inside_one_region_and_are_aligned() {
    let memory = two_regions();
    let base = 0x7000_0000_0000;
    assert!(memory.ring_part("used ring", base + 0x1ff0, 0x10, 4).is_ok());
    assert!(memory.ring_part("used ring", base + 0x1ff0, 0x11, 4).is_err());
    assert!(memory.ring_part("used ring", base + 0x1ff1, 0x4, 4).is_err());
    assert!(memory.ring_part("used ring", u64::MAX - 1, 0x10, 1).is_err());
    assert!(memory.ring_part("used ring", base - 4, 0x10, 4).is_err());
}

#[test]
fn overlapping_short_and_wrapping_regions_are_refused() {
    let memory = two_regions();
    let refused = |info, file: File| memory.with_region(info, SharedFile::new(file).unwrap()).unwrap_err();
    assert!(matches!(refused(region(0x1fff, 0x10, 0), memfd(0x1000)), MemoryError::Overlap { .. }));
    assert!(matches!(refused(region(0xf_f000, 0x1001, 0), memfd(0x2000)), MemoryError::Overlap { .. }));
    assert!(matches!(refused(region(0x4000, 0, 0), memfd(0x1000)), MemoryError::Overlap { .. }));
    assert!(matches!(refused(region(0x4000, 0x1000, 1), memfd(0x1000)), MemoryError::FileTooSmall { .. }));
    assert!(matches!(refused(region(0x4000, 0x1000, u64::MAX), memfd(0x1000)), MemoryError::Overlap { .. }));
    assert!(memory.without_region(region(0, 0x1000, 0)).is_err());
    let fewer = memory.without_region(region(0, 0x2000, 0)).unwrap();
    assert!(fewer.translate(0, 1).is_none() && memory.translate(0, 1).is_some());
}

#[test]
fn neighbours_are_joined_and_the_last_byte_taken_off() {
    let memory = two_regions();
    let mut builder = SegmentBuilder::new();
    for at in [0u64, 0x100, 0x800, 0x8ff] {
        let (host, len) = memory.translate(at, 0x100).unwrap();
        // SAFETY: `memory` outlives the segments.
        unsafe { builder.push(host, len as usize) };
    }
    assert_eq!(builder.total(), 0x400);
    assert!(builder.split_last_byte().is_some());
    assert_eq!(builder.total(), 0x3ff);
    let lens: Vec<_> = builder.finish().iter().map(Segment::len).collect();
    assert_eq!(lens, [0x200, 0x100, 0xff]);
}

#[test]
fn a_sealed_file_cannot_shrink() {
    let file = memfd(0x2000);
    let twin = file.try_clone().unwrap();
    let _memory =
        GuestMemory::default().with_region(region(0, 0x2000, 0), SharedFile::new(file).unwrap()).unwrap();
    assert!(ftruncate(&twin, 0).is_err());
}
