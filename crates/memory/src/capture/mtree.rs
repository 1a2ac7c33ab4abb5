//! Where a machine's memory backends appear in guest-physical memory, as QEMU's `info mtree -f` tells it.
//!
//! The flat view is what the guest's processors see at this moment, so it holds for any machine type and option
//! (`max-ram-below-4g`, NUMA, plugged memory). A part of a backend may be hidden: below 1 MiB by ROM and video memory,
//! which come and go. What is hidden belongs where its neighbours put it.

use crate::address::Physical;
use crate::ram::Block;

/// A range of the flat view that is a part of a backend.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Range {
    /// The first address.
    start: u64,
    /// Bytes.
    len: u64,
    /// Where it begins in the backend.
    offset: u64,
}

/// The ranges of system memory that belong to the backend `id`, in the text of `info mtree -f`.
pub(super) fn ranges(text: &str, id: &str) -> Vec<Range> {
    system_memory(text).filter_map(|line| range(line, id)).collect()
}

/// The blocks of a backend of `bytes` bytes: ranges at one distance from their place in the backend are one block, with
/// what is hidden between them. `None` when some part of the backend is nowhere.
pub(super) fn blocks(ranges: &[Range], bytes: u64) -> Option<Vec<Block>> {
    let mut blocks: Vec<Block> = Vec::new();
    let mut sorted = ranges.to_vec();
    sorted.sort_by_key(|range| range.offset);
    let mut covered = 0;
    for range in sorted {
        let start = Physical::new(range.start);
        match blocks.last_mut() {
            Some(last)
                if range.start.wrapping_sub(range.offset)
                    == last.start.get().wrapping_sub(last.file_offset) =>
            {
                last.len = range.offset.checked_add(range.len)?.checked_sub(last.file_offset)?;
            }
            _ if range.offset == covered => {
                blocks.push(Block { start, len: range.len, file_offset: range.offset });
            }
            _ => return None,
        }
        covered = range.offset.checked_add(range.len)?;
    }
    (covered == bytes).then_some(blocks)
}

/// The lines of the flat view of the address space `memory`.
fn system_memory(text: &str) -> impl Iterator<Item = &str> {
    let views = text.split("FlatView #");
    let is_memory = |view: &&str| view.lines().any(|line| line.trim().starts_with("AS \"memory\""));
    views.filter(is_memory).take(1).flat_map(str::lines)
}

/// Reads a line such as `  0000000100000000-000000017fffffff (prio 0, ram): mem @0000000080000000 KVM`.
fn range(line: &str, id: &str) -> Option<Range> {
    let (place, what) = line.trim().split_once(" (prio ")?;
    let (kind, name) = what.split_once("): ")?;
    let kind = kind.rsplit(", ").next()?.trim_start_matches("nv-");
    if kind != "ram" && kind != "rom" {
        return None;
    }
    let name = name.strip_suffix(" KVM").unwrap_or(name);
    let (name, offset) = match name.rsplit_once(" @") {
        Some((name, offset)) => (name, u64::from_str_radix(offset, 16).ok()?),
        None => (name, 0),
    };
    let (start, last) = place.split_once('-')?;
    let (start, last) = (u64::from_str_radix(start, 16).ok()?, u64::from_str_radix(last, 16).ok()?);
    let len = last.checked_sub(start)?.checked_add(1)?;
    (name.strip_prefix("/objects/").unwrap_or(name) == id).then_some(Range { start, len, offset })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// QEMU 7.2, `-machine q35 -m 4G`, cut.
    const Q35: &str = "\
FlatView #0
 AS \"I/O\", root: io
 Root memory region: io
  0000000000000000-0000000000000007 (prio 0, i/o): dma-chan

FlatView #1
 AS \"cpu-smm-0\", root: memory
  0000000000000000-000000007fffffff (prio 0, ram): mem @0000000000000000

FlatView #3
 AS \"memory\", root: system
 AS \"cpu-memory-0\", root: system
 Root memory region: system
  0000000000000000-000000000009ffff (prio 0, ram): mem KVM
  00000000000a0000-00000000000bffff (prio 1, i/o): vga-lowmem
  00000000000c0000-00000000000dffff (prio 1, rom): pc.rom
  00000000000e0000-00000000000fffff (prio 0, rom): mem @00000000000e0000 KVM
  0000000000100000-000000007fffffff (prio 0, ram): mem @0000000000100000 KVM
  00000000fec00000-00000000fec00fff (prio 0, i/o): ioapic
  0000000100000000-000000017fffffff (prio 0, ram): /objects/mem @0000000080000000 KVM
  0000000180000000-00000001bfffffff (prio 0, nv-ram): more
";

    fn block(start: u64, len: u64, file_offset: u64) -> Block {
        Block { start: Physical::new(start), len, file_offset }
    }

    #[test]
    fn what_rom_hides_belongs_to_the_memory_around_it() {
        let found = blocks(&ranges(Q35, "mem"), 4 << 30).unwrap();
        assert_eq!(found, [block(0, 2 << 30, 0), block(4 << 30, 2 << 30, 2 << 30)]);
        let more = blocks(&ranges(Q35, "more"), 1 << 30).unwrap();
        assert_eq!(more, [block(6 << 30, 1 << 30, 0)]);
    }

    #[test]
    fn a_backend_that_is_not_wholly_there_has_no_blocks() {
        assert_eq!(blocks(&ranges(Q35, "mem"), 5 << 30), None);
        assert_eq!(blocks(&ranges(Q35, "pc.ram"), 1 << 30), None);
        let hole = [
            Range { start: 0, len: 1 << 20, offset: 0 },
            Range { start: 8 << 20, len: 1 << 20, offset: 2 << 20 },
        ];
        assert_eq!(blocks(&hole, 3 << 20), None);
    }

    #[test]
    fn lines_that_are_no_ranges_are_passed_over() {
        for line in [
            "",
            " (prio 0, ram): mem",
            "0-f (prio 0, ram) mem",
            "zz-ff (prio 0, ram): mem",
            "ff-00 (prio 0, ram): mem",
            "0000000000000000-ffffffffffffffff (prio 0, ram): mem",
            "00-ff (prio 0, ram): mem @xyz",
        ] {
            assert_eq!(range(line, "mem"), None, "{line}");
        }
    }
}
