//! A whole kernel made up for tests: what a note leads to, and pages to be judged.
//!
//! ```text
//!   0x0000_1000 page tables   0x0040_0000 note      0x0050_0000 sections, node, objects   0x0060_0000 struct pages
//!   0x0100_0000 the image: _stext, names, BTF       direct map of all 64 MiB
//! ```

use super::{Memory, Types, structures};
use crate::address::{Physical, Virtual};

pub(crate) const FRAMES: u64 = 1 << 14;
pub(crate) const NOTE: u64 = 0x40_0000;
pub(crate) const BTF: u64 = 0x120_0000;
const DIRECT: u64 = 0xffff_8880_0000_0000;
const IMAGE: u64 = 0xffff_ffff_8100_0000;
const NAMES: u64 = 0x10_0000;
const ROOTS: u64 = 0x50_0000;
const NODE: u64 = 0x52_0000;
const PAGES: u64 = 0x60_0000;
/// Free blocks of order 0, and pages of cache, as the kernel counts them.
pub(crate) const FREE_BLOCKS: u64 = NODE + 64 + 16;
pub(crate) const FILE_PAGES: u64 = NODE + 4096 + 16;

/// Page flags, by their numbers in [`types`].
pub(crate) const UPTODATE: u64 = 1 << 3;
pub(crate) const DIRTY: u64 = 1 << 4;
pub(crate) const LRU: u64 = 1 << 5;
pub(crate) const HEAD: u64 = 1 << 6;
pub(crate) const PRIVATE: u64 = 1 << 14;
pub(crate) const CHECKED: u64 = 1 << 10;
pub(crate) const BUDDY: u32 = 0xf000_0000;

/// The members of a struct page that tests set; as a page of clean cache without buffers has them.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Page {
    pub flags: u64,
    pub mapping: u64,
    pub private: u64,
    pub mapcount: u32,
    pub refcount: u32,
}

impl Page {
    pub(crate) fn cached(mapping: Virtual) -> Self {
        Self { flags: UPTODATE | LRU, mapping: mapping.get(), private: 0, mapcount: u32::MAX, refcount: 1 }
    }
}

/// Memory with a kernel in it.
pub(crate) struct Kernel {
    pub memory: Memory,
    next: u64,
}

impl Kernel {
    pub(crate) fn new() -> Self {
        let mut memory = Memory::new(FRAMES, 4);
        memory.map(Virtual::new(DIRECT), Physical::new(0), FRAMES >> 9, 21);
        memory.map(Virtual::new(IMAGE), Physical::new(0x100_0000), 4, 21);
        let mut kernel = Self { memory, next: 0x53_0000 };
        kernel.note("6.12.0-made-up", "");
        kernel.write(0x100_0000 + NAMES + 130, b"6.12.0-made-up\0");
        kernel.write(BTF, &types().finish());
        kernel.word(ROOTS, DIRECT + ROOTS + 0x1000);
        // Frame 0's struct page, with the flags of a section in use.
        kernel.word(ROOTS + 0x1000, (DIRECT + PAGES) | 0b1111);
        kernel.word(ROOTS + 0x2000, DIRECT + NODE);
        kernel.write(NODE, &1_u32.to_le_bytes());
        for frame in 0..FRAMES {
            kernel.page(frame, Page { flags: 0, mapping: 0, private: 0, mapcount: u32::MAX, refcount: 1 });
        }
        kernel
    }

    /// The note, with lines of the test's own at its end, which win over those before.
    pub(crate) fn note(&mut self, release: &str, more: &str) {
        self.note_at(NOTE, Self::note_text(release, more).as_bytes());
    }

    /// What a note of this kernel says.
    pub(crate) fn note_text(release: &str, more: &str) -> String {
        let direct = |at: u64| DIRECT + at;
        format!(
            "OSRELEASE={release}\nSYMBOL(_stext)={IMAGE:x}\nSYMBOL(init_uts_ns)={:x}\nOFFSET(uts_namespace.name)=0\n\
             SYMBOL(init_top_pgt)=ffffffff80001000\nNUMBER(phys_base)=0\nNUMBER(pgtable_l5_enabled)=0\n\
             NUMBER(SECTION_SIZE_BITS)=27\nSYMBOL(mem_section)={:x}\nLENGTH(mem_section)=2048\nSIZE(mem_section)=16\n\
             OFFSET(mem_section.section_mem_map)=0\nSYMBOL(node_data)={:x}\nLENGTH(node_data)=1\n\
             LENGTH(zone.free_area)=11\nNUMBER(PAGE_BUDDY_MAPCOUNT_VALUE)=-268435456\nNUMBER(sme_mask)=0\n{more}",
            IMAGE + NAMES,
            direct(ROOTS),
            direct(ROOTS + 0x2000),
        )
    }

    pub(crate) fn note_at(&mut self, at: u64, text: &[u8]) {
        let mut note = Vec::new();
        [11, text.len() as u32, 0].iter().for_each(|word| note.extend(word.to_le_bytes()));
        note.extend(b"VMCOREINFO\0\0");
        note.extend(text);
        self.write(at, &note);
    }

    pub(crate) fn page(&mut self, frame: u64, page: Page) {
        let at = PAGES + frame * 64;
        self.word(at, page.flags);
        self.word(at + 24, page.mapping);
        self.word(at + 40, page.private);
        self.write(at + 48, &page.mapcount.to_le_bytes());
        self.write(at + 52, &page.refcount.to_le_bytes());
    }

    /// Where a struct page's byte lies.
    pub(crate) fn page_at(frame: u64, offset: u64) -> u64 {
        PAGES + frame * 64 + offset
    }

    /// Makes a folio of 2^`order` pages out of those from `frame` on.
    pub(crate) fn folio(&mut self, frame: u64, order: u8, page: Page) {
        let refcount = page.refcount - 1 + (1 << order);
        self.page(frame, Page { flags: page.flags | HEAD, refcount, ..page });
        for tail in frame + 1..frame + (1 << order) {
            self.page(tail, Page { flags: 0, mapping: 0, private: 0, mapcount: u32::MAX, refcount: 0 });
            self.word(Self::page_at(tail, 8), (DIRECT + Self::page_at(frame, 0)) | 1);
        }
        self.word(Self::page_at(frame + 1, 0), u64::from(order));
        self.write(Self::page_at(frame + 1, 16), &u32::MAX.to_le_bytes());
        self.write(Self::page_at(frame + 1, 56), &(1_u32 << order).to_le_bytes());
    }

    /// A regular file on a file system: its mapping, and where that, its inode and its super block lie.
    pub(crate) fn file(&mut self, system: &str, block_bits: u8) -> (Virtual, u64, u64, u64) {
        let [mapping, inode, super_block, kind, name] = [(); 5].map(|()| self.object(64));
        let [device, disk] = [(); 2].map(|()| self.object(64));
        self.word(mapping, DIRECT + inode);
        self.write(inode, &0o100_644_u16.to_le_bytes());
        self.word(inode + 16, DIRECT + super_block);
        self.word(inode + 24, DIRECT + mapping);
        self.word(inode + 32, 4711);
        self.write(inode + 40, &[block_bits]);
        self.word(super_block, DIRECT + device);
        self.word(super_block + 8, DIRECT + kind);
        self.word(kind, DIRECT + name);
        self.write(name, system.as_bytes());
        self.word(device, 2048);
        self.word(device + 8, DIRECT + disk);
        self.write(disk, &254_u32.to_le_bytes());
        self.write(disk + 12, b"vda");
        (Virtual::new(DIRECT + mapping), mapping, inode, super_block)
    }

    /// A ring of buffer heads for a page: where they lie.
    pub(crate) fn buffers(&mut self, frame: u64, super_block: u64, count: u64, bytes: u64) -> Vec<u64> {
        let heads: Vec<u64> = (0..count).map(|_| self.object(64)).collect();
        let device = self.memory.read_u64(Physical::new(super_block));
        for (index, &head) in heads.iter().enumerate() {
            let next = heads[(index + 1) % heads.len()];
            let page = DIRECT + Self::page_at(frame, 0);
            for (member, value) in
                [0b1_1001, DIRECT + next, page, 700 + index as u64, bytes, device].into_iter().enumerate()
            {
                self.word(head + member as u64 * 8, value);
            }
        }
        heads
    }

    /// An address in the kernel's image.
    pub(crate) fn image(at: u64) -> Virtual {
        Virtual::new(IMAGE + at)
    }

    /// An address in the direct map.
    pub(crate) const fn direct(at: u64) -> u64 {
        DIRECT + at
    }

    pub(crate) fn object(&mut self, bytes: u64) -> u64 {
        self.next += bytes;
        self.next - bytes
    }

    pub(crate) fn word(&mut self, at: u64, value: u64) {
        self.write(at, &value.to_le_bytes());
    }

    pub(crate) fn write(&mut self, at: u64, bytes: &[u8]) {
        self.memory.write(Physical::new(at), bytes);
    }
}

/// Name, bytes, and members `(name, type, byte offset)`.
/// The types of that kernel.
pub(crate) fn types() -> Types {
    let mut types = Types::new();
    let [word, half, short, byte] = [8, 4, 2, 1].map(|size| types.int(size));
    let name = types.array(byte, 32);
    let words = types.array(word, 8);
    let basic = structures::Basic { word, half, short, byte, name, words };
    structures::declare(&mut types, basic);
    enumerations(&mut types);
    types
}

fn enumerations(types: &mut Types) {
    let flags =
        ["PG_locked", "PG_writeback", "PG_referenced", "PG_uptodate", "PG_dirty", "PG_lru", "PG_head"];
    let mut flags: Vec<(&str, u32)> = flags.into_iter().zip(0..).collect();
    flags.extend([
        ("PG_checked", 10),
        ("PG_reserved", 13),
        ("PG_private", 14),
        ("PG_swapbacked", 17),
        ("PG_active", 8),
    ]);
    flags.push(("__NR_PAGEFLAGS", 24));
    types.enumeration("pageflags", &flags);
    types.enumeration(
        "bh_state_bits",
        &[("BH_Uptodate", 0), ("BH_Dirty", 1), ("BH_Req", 3), ("BH_Mapped", 4)],
    );
    types.enumeration("node_stat_item", &[("NR_FILE_PAGES", 2)]);
}
