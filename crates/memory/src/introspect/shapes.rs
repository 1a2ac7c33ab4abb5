//! Where the kernel's structs have the members that classification reads, and which bits and values mean what.
//!
//! Kernels differ by which members exist, never by their version number here. What one kernel lacks and another needs is
//! an `Option`; what all need and one lacks is [`Unreadable::Missing`].

mod counters;
mod file;

pub(super) use counters::Counters;
pub(super) use file::{Buffers, Disks, Files, Iomap, Start};

use super::Unreadable;
use super::btf::Btf;
use super::vmcoreinfo::VmCoreInfo;

/// Everything read out of BTF and VMCOREINFO.
#[derive(Clone, Debug)]
pub(super) struct Shapes {
    /// `struct page` and `struct folio`.
    pub page: Page,
    /// `enum pageflags`.
    pub flags: Flags,
    /// The values of `page_type`.
    pub types: Types,
    /// What leads from a page to its file system.
    pub files: Files,
    /// Buffer heads.
    pub buffers: Buffers,
    /// The state of folios of file systems on iomap; kernels may lack it.
    pub iomap: Option<Iomap>,
    /// Block devices.
    pub disks: Disks,
    /// The kernel's own counters.
    pub counters: Counters,
}

impl Shapes {
    /// Reads what all of this needs.
    ///
    /// # Errors
    /// [`Unreadable::Missing`] names the first thing that is not there.
    pub(super) fn of(btf: &Btf, info: &VmCoreInfo) -> Result<Self, Unreadable> {
        let find = Find { btf };
        Ok(Self {
            page: Page::of(&find)?,
            flags: Flags::of(&find)?,
            types: Types::of(&find, info)?,
            files: Files::of(&find)?,
            buffers: Buffers::of(&find)?,
            iomap: Iomap::of(&find)?,
            disks: Disks::of(&find)?,
            counters: Counters::of(&find)?,
        })
    }
}

/// Questions to BTF whose answer must be there.
struct Find<'a> {
    btf: &'a Btf,
}

impl Find<'_> {
    /// The offset of a member that must be `size` bytes.
    fn sized(&self, of: &str, name: &str, size: usize) -> Result<usize, Unreadable> {
        let member = self.btf.member(of, name).filter(|member| member.size == size);
        let member = member.ok_or_else(|| Unreadable::Missing(format!("{of}.{name} of {size} bytes")))?;
        // An offset past any real struct would only be a way to make reads wander.
        (member.offset < 1 << 20)
            .then_some(member.offset)
            .ok_or_else(|| Unreadable::Missing(format!("{of}.{name}")))
    }

    fn word(&self, of: &str, name: &str) -> Result<usize, Unreadable> {
        self.sized(of, name, 8)
    }

    fn half(&self, of: &str, name: &str) -> Result<usize, Unreadable> {
        self.sized(of, name, 4)
    }

    /// Bytes from a member of a struct to a later one.
    fn within(&self, of: &str, from: &str, to: &str) -> Option<usize> {
        let [from, to] = [from, to].map(|name| self.btf.member(of, name).map(|member| member.offset));
        to?.checked_sub(from?).filter(|&bytes| bytes < 1 << 20)
    }

    /// The mask of a bit whose number is an enumerator.
    fn bit(&self, of: &str, name: &str) -> Result<u64, Unreadable> {
        self.bit_if_any(of, name).ok_or_else(|| Unreadable::Missing(name.to_owned()))
    }

    fn bit_if_any(&self, of: &str, name: &str) -> Option<u64> {
        let bit = self.btf.constant(of, name).filter(|&bit| bit < 64)?;
        Some(1 << bit)
    }

    fn constant(&self, of: &str, name: &str) -> Result<u64, Unreadable> {
        self.btf.constant(of, name).ok_or_else(|| Unreadable::Missing(name.to_owned()))
    }
}

/// `struct page`; of a folio's second page what describes the folio.
#[derive(Clone, Debug)]
pub(super) struct Page {
    /// Bytes of it.
    pub size: usize,
    /// `flags`, eight bytes.
    pub flags: usize,
    /// `mapping`, a pointer with two low bits of its own.
    pub mapping: usize,
    /// `private`, eight bytes.
    pub private: usize,
    /// `index`, eight bytes: which page of its file; kernels may call it otherwise.
    pub index: Option<usize>,
    /// `_refcount`, four bytes.
    pub refcount: usize,
    /// `_mapcount`, four bytes; of pages that cannot be mapped, their type.
    pub mapcount: usize,
    /// Eight bytes whose lowest bit says that this page is not the first of its folio.
    pub tail: usize,
    /// How a folio's size is told.
    pub order: Order,
    /// Four bytes each, from the folio's first struct page on: -1 when the folio is not mapped.
    pub minus_one_if_unmapped: Vec<usize>,
    /// Four bytes each, from the folio's first struct page on: 0 when the folio is not mapped.
    pub zero_if_unmapped: Vec<usize>,
}

/// Where a folio has the base-2 logarithm of its number of pages, from its first struct page on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Order {
    /// One byte there.
    pub at: usize,
    /// Four bytes that must equal the number of pages, where the kernel has them.
    pub pages: Option<usize>,
}

impl Page {
    fn of(find: &Find<'_>) -> Result<Self, Unreadable> {
        let btf = find.btf;
        let size = btf.size_of("page").filter(|size| (56..=128).contains(size));
        let size = size.ok_or_else(|| Unreadable::Missing("page".into()))?;
        let tail = find.word("page", "compound_head").or_else(|_| find.word("page", "compound_info"))?;
        // Members of `struct page` for second pages lie one struct further, seen from the first.
        let second = |name| btf.member("page", name).map(|member| size + member.offset);
        let folio =
            |name| btf.member("folio", name).filter(|member| member.size == 4).map(|member| member.offset);
        let small = |member: &super::btf::Member| member.size == 1;
        let order = second("compound_order")
            .or_else(|| Some(btf.member("folio", "_folio_order").filter(small)?.offset))
            .or_else(|| Some(btf.member("folio", "_flags_1")?.offset))
            .ok_or_else(|| Unreadable::Missing("order of a folio".into()))?;
        let minus_one =
            ["_entire_mapcount", "_large_mapcount", "_total_mapcount"].into_iter().filter_map(folio);
        Ok(Self {
            size,
            flags: find.word("page", "flags")?,
            mapping: find.word("page", "mapping")?,
            private: find.word("page", "private")?,
            index: find.word("folio", "index").or_else(|_| find.word("page", "index")).ok(),
            refcount: find.half("page", "_refcount")?,
            mapcount: find.half("page", "_mapcount")?,
            tail,
            order: Order { at: order, pages: folio("_nr_pages").or_else(|| folio("_folio_nr_pages")) },
            minus_one_if_unmapped: minus_one.chain(second("compound_mapcount")).collect(),
            zero_if_unmapped: folio("_nr_pages_mapped").into_iter().collect(),
        })
    }
}

/// Masks of page flags.
#[derive(Clone, Copy, Debug)]
pub(super) struct Flags {
    /// Every flag there is; bits above hold zone, node and the like.
    pub all: u64,
    /// The content is valid.
    pub uptodate: u64,
    /// On a list of pages that may be reclaimed.
    pub lru: u64,
    /// First page of a folio of several.
    pub head: u64,
    /// Holds buffer heads or iomap state, with a reference for them.
    pub private: u64,
    /// Set aside at boot.
    pub reserved: u64,
    /// Newer than the disk, being written, or locked for either.
    pub dirty: u64,
    /// Anonymous or tmpfs.
    pub swap_backed: u64,
    /// A page of small objects, where that is a flag.
    pub slab: u64,
    /// The hardware has lost it.
    pub poisoned: u64,
    /// What a clean page may have set.
    pub harmless: u64,
    /// The kernel keeps the page longer than others: it was used again, or came back soon after it went.
    pub hot: u64,
}

impl Flags {
    fn of(find: &Find<'_>) -> Result<Self, Unreadable> {
        let bit = |name| find.bit("pageflags", name);
        let any = |names: &[&str]| {
            names.iter().filter_map(|name| find.bit_if_any("pageflags", name)).fold(0, |mask, bit| mask | bit)
        };
        let count = find.constant("pageflags", "__NR_PAGEFLAGS")?.min(63);
        let (uptodate, lru) = (bit("PG_uptodate")?, bit("PG_lru")?);
        let (head, private) = (bit("PG_head")?, bit("PG_private")?);
        let harmless = ["PG_referenced", "PG_active", "PG_workingset", "PG_reclaim", "PG_mappedtodisk"];
        Ok(Self {
            all: (1 << count) - 1,
            uptodate,
            lru,
            head,
            private,
            reserved: bit("PG_reserved")?,
            dirty: bit("PG_dirty")? | bit("PG_writeback")?,
            swap_backed: bit("PG_swapbacked")?,
            slab: any(&["PG_slab"]),
            poisoned: any(&["PG_hwpoison"]),
            harmless: uptodate
                | lru
                | head
                | private
                | any(&harmless)
                | any(&["PG_young", "PG_idle", "PG_arch_1"]),
            // PG_referenced comes and goes with each scan.
            hot: any(&["PG_active", "PG_workingset"]),
        })
    }
}

/// How a kernel writes the type of a page that cannot be mapped.
#[derive(Clone, Copy, Debug)]
pub(super) struct Types {
    /// What `page_type` of a free block's first page is.
    pub buddy: Type,
    /// Page tables, where the kernel tells.
    pub table: Option<Type>,
    /// Small objects, where that is a type.
    pub slab: Option<Type>,
    /// Huge pages, where that is a type.
    pub huge: Option<Type>,
    /// Orders of free blocks are below this.
    pub orders: u32,
}

/// One value of `page_type`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Type {
    value: u32,
    mask: u32,
}

impl Type {
    /// The kernel's own constant: since 6.12 the type stands in the top byte, before that it clears one bit of -1.
    pub(super) fn new(value: i64) -> Option<Self> {
        let value = i32::try_from(value).ok()?.cast_unsigned();
        // -1 is a page without a type, 0 and up a page that is mapped.
        let sound = value >> 31 == 1 && value != u32::MAX;
        let mask = if value & 0x00ff_ffff == 0 { 0xff00_0000 } else { u32::MAX };
        sound.then_some(Self { value, mask })
    }

    /// Whether a page with `page_type` is of this type.
    pub(super) const fn is(self, page_type: u32) -> bool {
        page_type & self.mask == self.value
    }
}

impl Types {
    fn of(find: &Find<'_>, info: &VmCoreInfo) -> Result<Self, Unreadable> {
        let missing = || Unreadable::Missing("PAGE_BUDDY_MAPCOUNT_VALUE".into());
        let told = |name| info.number(name).and_then(Type::new);
        let in_top_byte = |name| {
            let value = find.btf.constant("pagetype", name).filter(|&value| value <= 0xff)?;
            Type::new(i64::from(((value as u32) << 24).cast_signed()))
        };
        let orders = info.length("zone.free_area").filter(|orders| (1..=32).contains(orders));
        Ok(Self {
            buddy: told("PAGE_BUDDY_MAPCOUNT_VALUE").ok_or_else(missing)?,
            table: in_top_byte("PGTY_table"),
            slab: told("PAGE_SLAB_MAPCOUNT_VALUE").or_else(|| in_top_byte("PGTY_slab")),
            huge: told("PAGE_HUGETLB_MAPCOUNT_VALUE").or_else(|| in_top_byte("PGTY_hugetlb")),
            orders: orders.ok_or_else(|| Unreadable::Missing("LENGTH(zone.free_area)".into()))? as u32,
        })
    }
}
