//! A guest's memory as its kernel sees it: page tables walked in software, with caches.
//!
//! One [`View`] serves one pass. What it has read it may answer again from memory, so it must not outlive the instant it
//! looks at. Source: Intel SDM volume 3, "4-Level Paging and 5-Level Paging".

use crate::address::{Frame, PAGE_BITS, PAGE_BYTES, Physical, Virtual};
use crate::ram::Ram;

/// Entries of a page table.
const TABLE_ENTRIES: u64 = 512;
const PRESENT: u64 = 1;
const WRITABLE: u64 = 1 << 1;
const HUGE: u64 = 1 << 7;
/// Bits 12 to 51 of an entry: the physical address.
const ADDRESS: u64 = 0x000f_ffff_ffff_f000;
const HUGE_BITS: u32 = 21;

/// Pages kept; 4 MiB.
const CACHED_PAGES: usize = 1024;
const CACHED_TRANSLATIONS: usize = 4096;

/// The root of a kernel's page tables.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Tables {
    /// The top table.
    pub root: Physical,
    /// Levels: 4 or 5.
    pub levels: u32,
}

/// A page as the tables have it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Leaf {
    /// The physical address that it begins at; of a gigantic page, that of the 2 MiB asked for.
    pub start: Physical,
    /// Base-2 logarithm of its bytes.
    pub bits: u32,
    /// Whether its own entry lets it be written.
    pub is_writable: bool,
}

/// Guest memory by virtual address.
pub(super) struct View<'a> {
    ram: &'a dyn Ram,
    tables: Tables,
    pages: PageCache,
    small: Translations,
    huge: Translations,
}

impl<'a> View<'a> {
    /// Looks at `ram` through `tables`.
    pub(super) fn new(ram: &'a dyn Ram, tables: Tables) -> Self {
        let (small, huge) = (Translations::new(PAGE_BITS), Translations::new(HUGE_BITS));
        Self { ram, tables, pages: PageCache::new(), small, huge }
    }

    /// The physical address of `at`, and the bytes from there on that are mapped in one piece; `None` if unmapped.
    pub(super) fn translate(&mut self, at: Virtual) -> Option<(Physical, u64)> {
        if let Some(found) = self.huge.find(at).or_else(|| self.small.find(at)) {
            return Some(found);
        }
        let Leaf { start, bits, .. } = self.walk(at).ok()?;
        let known = if bits >= HUGE_BITS { &mut self.huge } else { &mut self.small };
        known.add(at, start);
        known.find(at)
    }

    /// The page around `at`; where there is none, the base-2 logarithm of the bytes around `at` that are surely not mapped.
    pub(super) fn walk(&mut self, at: Virtual) -> Result<Leaf, u32> {
        let top = PAGE_BITS + 9 * self.tables.levels;
        let sign = at.get().cast_signed() >> (top - 1);
        if sign != 0 && sign != -1 {
            return Err(PAGE_BITS);
        }
        let mut table = self.tables.root;
        for level in (0..self.tables.levels).rev() {
            let bits = PAGE_BITS + 9 * level;
            let index = (at.get() >> bits) % TABLE_ENTRIES;
            let entry = table.checked_add(index * 8).and_then(|entry| self.physical_u64(entry)).unwrap_or(0);
            let is_writable = entry & WRITABLE != 0;
            if entry & PRESENT == 0 {
                return Err(bits);
            }
            if level == 0 {
                return Ok(Leaf { start: Physical::new(entry & ADDRESS), bits, is_writable });
            }
            if entry & HUGE != 0 {
                let page = (entry & ADDRESS) >> bits << bits;
                let within = (at.get() % (1 << bits)) >> HUGE_BITS << HUGE_BITS;
                let leaf = Leaf { start: Physical::new(page | within), bits: HUGE_BITS, is_writable };
                return if level <= 2 { Ok(leaf) } else { Err(bits) };
            }
            table = Physical::new(entry & ADDRESS);
        }
        Err(PAGE_BITS)
    }

    /// Fills `into` with small objects at `at`; `None` when a part of it is not there.
    pub(super) fn read(&mut self, mut at: Virtual, mut into: &mut [u8]) -> Option<()> {
        while !into.is_empty() {
            let (from, _) = self.translate(at)?;
            let len = into.len().min(PAGE_BYTES - from.within_page());
            let (now, later) = into.split_at_mut(len);
            let page = self.pages.get(self.ram, Frame::of(from))?;
            now.copy_from_slice(&page[from.within_page()..][..len]);
            at = at.checked_add(len as u64)?;
            into = later;
        }
        Some(())
    }

    /// As many bytes as `spare` has of a small object at `at`: where they are kept, or put together in `spare` where it goes
    /// over the end of a page. `None` when a part of it is not there.
    pub(super) fn object<'b>(&'b mut self, at: Virtual, spare: &'b mut [u8]) -> Option<&'b [u8]> {
        let (from, _) = self.translate(at)?;
        let (within, len) = (from.within_page(), spare.len());
        if len <= PAGE_BYTES - within {
            return self.pages.get(self.ram, Frame::of(from))?.get(within..within + len);
        }
        self.read(at, spare)?;
        Some(spare)
    }

    /// Fills `into` past the cache, for what is large and read once; parts that are not there become 0xff.
    pub(super) fn read_large(&mut self, mut at: Virtual, mut into: &mut [u8]) {
        while !into.is_empty() {
            let (from, mapped) = match self.translate(at) {
                Some((from, mapped)) => (Some(from), mapped),
                None => (None, (PAGE_BYTES - at.within_page()) as u64),
            };
            let len = usize::try_from(mapped).unwrap_or(usize::MAX).min(into.len());
            let (now, later) = into.split_at_mut(len);
            if from.is_none_or(|from| self.ram.read(from, now).is_err()) {
                now.fill(0xff);
            }
            let Some(next) = at.checked_add(len as u64) else { return later.fill(0xff) };
            (at, into) = (next, later);
        }
    }

    /// An array of bytes.
    pub(super) fn bytes<const N: usize>(&mut self, at: Virtual) -> Option<[u8; N]> {
        let mut bytes = [0; N];
        self.read(at, &mut bytes)?;
        Some(bytes)
    }

    /// Eight bytes as a number.
    pub(super) fn u64(&mut self, at: Virtual) -> Option<u64> {
        self.bytes(at).map(u64::from_le_bytes)
    }

    /// Eight bytes as an address.
    pub(super) fn pointer(&mut self, at: Virtual) -> Option<Virtual> {
        self.u64(at).map(Virtual::new)
    }

    /// Four bytes as a number.
    pub(super) fn u32(&mut self, at: Virtual) -> Option<u32> {
        self.bytes(at).map(u32::from_le_bytes)
    }

    fn physical_u64(&mut self, at: Physical) -> Option<u64> {
        let page = self.pages.get(self.ram, Frame::of(at))?;
        let word = page.get(at.within_page()..)?.first_chunk::<8>()?;
        Some(u64::from_le_bytes(*word))
    }
}

/// Pages read lately; each has one slot that it may be in.
struct PageCache {
    /// `[slot]`; the frame in it.
    frames: Vec<Option<Frame>>,
    /// `[slot][byte]`.
    bytes: Vec<u8>,
}

impl PageCache {
    fn new() -> Self {
        Self { frames: vec![None; CACHED_PAGES], bytes: vec![0; CACHED_PAGES * PAGE_BYTES] }
    }

    fn get<'a>(&'a mut self, ram: &'a dyn Ram, frame: Frame) -> Option<&'a [u8]> {
        let start = frame.start()?;
        if let Some(page) = ram.bytes(start, PAGE_BYTES) {
            return Some(page);
        }
        let slot = (frame.get() % CACHED_PAGES as u64) as usize;
        let page = &mut self.bytes[slot * PAGE_BYTES..][..PAGE_BYTES];
        if self.frames[slot] != Some(frame) {
            self.frames[slot] = None;
            ram.read(start, page).ok()?;
            self.frames[slot] = Some(frame);
        }
        Some(page)
    }
}

/// Translations of pages of one size; each has one slot that it may be in.
struct Translations {
    /// Base-2 logarithm of the page size.
    bits: u32,
    /// `[slot]`: virtual page number and where it begins.
    slots: Vec<Option<(u64, Physical)>>,
}

impl Translations {
    fn new(bits: u32) -> Self {
        Self { bits, slots: vec![None; CACHED_TRANSLATIONS] }
    }

    const fn slot(number: u64) -> usize {
        (number % CACHED_TRANSLATIONS as u64) as usize
    }

    fn find(&self, at: Virtual) -> Option<(Physical, u64)> {
        let number = at.get() >> self.bits;
        let (known, start) = self.slots[Self::slot(number)]?;
        let within = at.get() % (1 << self.bits);
        (known == number).then_some(())?;
        Some((start.checked_add(within)?, (1 << self.bits) - within))
    }

    fn add(&mut self, at: Virtual, start: Physical) {
        let number = at.get() >> self.bits;
        self.slots[Self::slot(number)] = Some((number, start));
    }
}

#[cfg(test)]
mod tests;
