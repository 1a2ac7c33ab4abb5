//! VMCOREINFO: what a Linux kernel says of itself for the sake of crash dumps, as a note in its memory.
//!
//! ```text
//!   page boundary ─► u32 name length = 11 │ u32 text length │ u32 type = 0 │ "VMCOREINFO\0" + 1 │ OSRELEASE=…\nSYMBOL(…)=…
//! ```
//!
//! Source: Linux `kernel/vmcore_info.c`, `Documentation/admin-guide/kdump/vmcoreinfo.rst`.

use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use vmstrata_store::on_threads;

use crate::address::{Frame, PAGE_BYTES, Physical, Virtual};
use crate::ram::{Block, Ram};

const NAME: &[u8; 12] = b"VMCOREINFO\0\0";
const HEADER_BYTES: usize = 12 + NAME.len();
/// The kernel has one page for the text; later ones may have more, up to here.
const TEXT_BYTES_MAX: usize = 16 * PAGE_BYTES;
/// Bytes that are looked at, or left out because nobody ever wrote them.
const PIECE_BYTES: u64 = 1 << 20;
/// Pieces for which a thread more is worth it.
const PIECES_PER_THREAD: usize = 64;
/// Kernels write 100 to 200 lines.
const LINES_MAX: usize = 4096;

/// The text of a note, taken apart.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct VmCoreInfo {
    /// By what stands before `=`.
    lines: HashMap<String, String>,
}

impl VmCoreInfo {
    /// Takes the text of a note apart; lines that are not `key=value` in UTF-8 are left out. `None` without `OSRELEASE`.
    pub fn parse(text: &[u8]) -> Option<Self> {
        let lines = text.split(|&byte| byte == b'\n' || byte == 0).take(LINES_MAX);
        let pairs = lines.filter_map(|line| str::from_utf8(line).ok()?.split_once('='));
        let lines: HashMap<_, _> = pairs.map(|(key, value)| (key.to_owned(), value.to_owned())).collect();
        lines.contains_key("OSRELEASE").then_some(Self { lines })
    }

    /// The kernel's release.
    pub fn release(&self) -> &str {
        self.lines.get("OSRELEASE").map_or("", String::as_str)
    }

    /// The address of a symbol (for an array's pointer: what it points to).
    pub fn symbol(&self, name: &str) -> Option<Virtual> {
        let digits = self.lines.get(&format!("SYMBOL({name})"))?;
        u64::from_str_radix(digits, 16).ok().map(Virtual::new)
    }

    /// A constant or variable of the kernel.
    pub fn number(&self, name: &str) -> Option<i64> {
        let digits = self.lines.get(&format!("NUMBER({name})"))?;
        match digits.strip_prefix("0x") {
            Some(hex) => u64::from_str_radix(hex, 16).ok().map(u64::cast_signed),
            None => digits.parse().ok(),
        }
    }

    /// The offset of a member, as `struct.member`.
    pub fn offset(&self, member: &str) -> Option<u64> {
        self.lines.get(&format!("OFFSET({member})"))?.parse().ok()
    }

    /// Bytes of a struct.
    pub fn size(&self, of: &str) -> Option<u64> {
        self.lines.get(&format!("SIZE({of})"))?.parse().ok()
    }

    /// The number of elements of an array.
    pub fn length(&self, array: &str) -> Option<u64> {
        self.lines.get(&format!("LENGTH({array})"))?.parse().ok()
    }
}

/// Every note in `ram`, in order: where it begins and what it says. They may be left over from earlier kernels, or made up.
///
/// The kernel's buffer for it is two pages at least, and so begins at an even frame. Reading two dozen bytes of every
/// other page is the larger part of reading a large guest: it waits for the host's memory, and so is done by all processors.
/// What the guest never touched is left out.
pub fn notes(ram: &dyn Ram) -> impl Iterator<Item = (Physical, VmCoreInfo)> + '_ {
    starts(ram).into_iter().filter_map(move |at| Some((at, note_at(ram, at)?)))
}

/// Where something begins that looks like a note, in order.
fn starts(ram: &dyn Ram) -> Vec<Physical> {
    let of_block = |block: &Block| {
        let piece = |from: u64| (block.start.get() + from, PIECE_BYTES.min(block.len - from));
        (0..block.len).step_by(PIECE_BYTES as usize).map(piece).collect::<Vec<_>>()
    };
    let pieces: Vec<(u64, u64)> = ram.layout().blocks().iter().flat_map(of_block).collect();
    let next = AtomicUsize::new(0);
    let look = || {
        let mut found = Vec::new();
        while let Some(&(start, len)) = pieces.get(next.fetch_add(1, Ordering::Relaxed)) {
            if !ram.is_untouched(Physical::new(start), len) {
                found.extend(even_pages(start, len).filter(|&at| header_at(ram, at).is_some()));
            }
        }
        found
    };
    let threads = thread::available_parallelism().map_or(1, usize::from);
    let threads = threads.min(pieces.len() / PIECES_PER_THREAD);
    let mut found = on_threads(threads, look).concat();
    found.sort_unstable();
    found
}

fn even_pages(start: u64, len: u64) -> impl Iterator<Item = Physical> {
    let first = Frame::of(Physical::new(start)).get();
    let frames = (first..first + len / PAGE_BYTES as u64).filter(|frame| frame.is_multiple_of(2));
    frames.filter_map(|frame| Frame::new(frame).start())
}

/// The bytes of text of the note whose header lies at `at`.
fn header_at(ram: &dyn Ram, at: Physical) -> Option<usize> {
    let mut buffer = [0; HEADER_BYTES];
    let header = ram.view(at, &mut buffer).ok()?;
    let word = |index: usize| u32::from_le_bytes(header[index * 4..][..4].try_into().expect("four bytes"));
    let text_bytes = word(1) as usize;
    let is_note = word(0) == 11 && word(2) == 0 && header[12..] == *NAME;
    (is_note && text_bytes <= TEXT_BYTES_MAX).then_some(text_bytes)
}

/// What the note at `at` says, if there is one.
pub(super) fn note_at(ram: &dyn Ram, at: Physical) -> Option<VmCoreInfo> {
    let mut text = vec![0; header_at(ram, at)?];
    ram.read(at.checked_add(HEADER_BYTES as u64)?, &mut text).ok()?;
    VmCoreInfo::parse(&text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_text_is_taken_apart() {
        let info = VmCoreInfo::parse(
            b"OSRELEASE=6.1.0\nSYMBOL(_stext)=ffffffff81000000\nNUMBER(phys_base)=-16\nNUMBER(V)=0xffffffffffffffff\n\
              OFFSET(page.flags)=0\nLENGTH(mem_section)=2048\nKERNELOFFSET=0\n=\nno pair\nNUMBER(bad)=x\0\0",
        )
        .unwrap();
        assert_eq!(info.release(), "6.1.0");
        assert_eq!(info.symbol("_stext"), Some(Virtual::new(0xffff_ffff_8100_0000)));
        assert_eq!(
            (info.number("phys_base"), info.number("V"), info.number("bad")),
            (Some(-16), Some(-1), None)
        );
        assert_eq!((info.offset("page.flags"), info.length("mem_section")), (Some(0), Some(2048)));
        assert_eq!(info.symbol("none"), None);
        assert_eq!(VmCoreInfo::parse(b"SYMBOL(_stext)=0"), None, "no release");
        assert_eq!(VmCoreInfo::parse(b"\xff\xfe"), None);
    }
}
