//! Where a kernel's BTF lies in its memory.

use super::{Btf, Extent, HEADER_BYTES, MAGIC};
use crate::address::Physical;
use crate::ram::Ram;

/// How far behind the start of a kernel's code its BTF may begin.
const DISTANCE_MAX: u64 = 128 << 20;
/// Bytes looked at in one piece.
const CHUNK_BYTES: usize = 1 << 20;
/// Headers that are followed up, each with up to 64 MiB to read: a kernel has one, and code may hold the magic number.
const CANDIDATES_MAX: usize = 8;
/// The kernel reads the header in place.
const ALIGNMENT: usize = 4;

/// The first whole BTF at or above `stext`, where the kernel's code begins. What lies below may be left over from unpacking
/// the kernel, and half overwritten.
pub fn find(ram: &dyn Ram, stext: Physical) -> Option<Btf> {
    let mut chunk = vec![0; CHUNK_BYTES];
    let mut candidates = 0;
    for start in (0..DISTANCE_MAX).step_by(CHUNK_BYTES) {
        let at = stext.checked_add(start)?;
        // The image is physically contiguous: where memory ends, it has ended.
        ram.read(at, &mut chunk).ok()?;
        for offset in (0..CHUNK_BYTES).step_by(ALIGNMENT) {
            if chunk[offset] != MAGIC[0] || chunk[offset..][..3] != MAGIC {
                continue;
            }
            let found = at.checked_add(offset as u64)?;
            let Some(extent) = header_at(ram, found) else { continue };
            if let Some(btf) = whole(ram, found, extent) {
                return Some(btf);
            }
            candidates += 1;
            if candidates == CANDIDATES_MAX {
                return None;
            }
        }
    }
    None
}

fn header_at(ram: &dyn Ram, at: Physical) -> Option<Extent> {
    let mut header = [0; HEADER_BYTES];
    ram.read(at, &mut header).ok()?;
    Extent::of(&header)
}

fn whole(ram: &dyn Ram, at: Physical, extent: Extent) -> Option<Btf> {
    let mut blob = vec![0; extent.bytes()];
    ram.read(at, &mut blob).ok()?;
    // Some struct every kernel has: BTF of a module or a program is whole as well.
    Btf::parse(&blob).filter(|btf| btf.member("page", "flags").is_some())
}
