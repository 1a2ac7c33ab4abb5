//! One pass over all struct pages, in order of frames: what each page is, in chunks of a section's worth.

use super::cause::{Cause, CauseMap};
use super::chunk::Chunk;
use super::disks::DiskTable;
use super::folio::{Candidate, Findings};
use super::guest::Guest;
use super::mapping::{FileCache, Owner, Owners};
use super::origin::{DeviceFolio, FilePages, FileSystem};
use super::shapes::Shapes;
use super::view::View;
use super::{Pages, Rules};
use crate::address::{Frame, PAGE_BITS, Virtual};
use crate::class::ClassMap;
use crate::ram::Ram;

/// Frames whose struct pages are read at once: 2 MiB of them, which is how the kernel maps them.
const CHUNK_FRAMES: u64 = 1 << 15;
/// Low bits of `mapping`: anonymous, or something that can be moved.
const MAPPING_BITS: u64 = 3;
/// The order of the largest folio, with room to spare (1 GiB of huge pages is 18).
const ORDER_MAX: u32 = 20;

/// A pass under way.
pub(super) struct Pass<'a, 'v> {
    shapes: &'a Shapes,
    rules: Rules,
    view: &'a mut View<'v>,
    owners: Owners,
    disks: DiskTable,
    findings: Findings,
    pages: Pages,
}

/// The members of a struct page that decide what it is.
#[derive(Clone, Copy)]
struct Head {
    frame: Frame,
    /// Its index in the chunk.
    index: usize,
    flags: u64,
    mapping: u64,
    mapcount: u32,
    refcount: u32,
    private: u64,
    /// Which page of its file, where the kernel tells.
    file_index: Option<u64>,
}

/// A number of pages, from a head on, and what they are for.
type Verdict = (u64, Cause);

/// Goes over every page of `ram`.
pub(super) fn run(guest: &Guest, ram: &dyn Ram, view: &mut View<'_>, rules: Rules) -> Pages {
    let frames = usize::try_from(ram.layout().frames()).unwrap_or(0);
    let pages = Pages { classes: ClassMap::new(frames), causes: CauseMap::new(frames), ..Pages::default() };
    let shapes = &guest.shapes;
    let owners = Owners::new(shapes.files);
    let mut pass = Pass {
        shapes,
        rules,
        view,
        owners,
        disks: DiskTable::default(),
        findings: Findings::default(),
        pages,
    };
    let stride = shapes.page.size;
    let step = CHUNK_FRAMES.min(guest.section_frames());
    let mut bytes = vec![0; step as usize * stride];
    for block in ram.layout().blocks() {
        let (first, end) = (Frame::of(block.start).get(), block.end() >> PAGE_BITS);
        for start in (first / step * step..end).step_by(step as usize) {
            let (from, to) = (start.max(first), (start + step).min(end));
            let first = Frame::new(from);
            let Some(at) = guest.struct_page(pass.view, first) else { continue };
            let bytes = &mut bytes[..(to - from) as usize * stride];
            pass.view.read_large(at, bytes);
            pass.chunk(&Chunk { first, at, bytes, stride });
        }
    }
    (pass.pages.disks, pass.pages.devices) = pass.disks.into_parts();
    pass.pages
}

impl Pass<'_, '_> {
    fn chunk(&mut self, chunk: &Chunk<'_>) {
        let mut index = 0;
        while index < chunk.len() {
            let (pages, cause) = self.verdict(chunk, index);
            let pages = pages.clamp(1, (chunk.len() - index) as u64);
            let frame = Frame::new(chunk.first.get() + index as u64);
            self.pages.causes.set(frame, pages, cause);
            self.pages.classes.set(frame, pages, cause.class());
            index += pages as usize;
        }
    }

    /// What the page at `index` is, and how many after it share that.
    fn verdict(&mut self, chunk: &Chunk<'_>, index: usize) -> Verdict {
        let (page, flags) = (&self.shapes.page, &self.shapes.flags);
        let head = Head {
            frame: Frame::new(chunk.first.get() + index as u64),
            index,
            flags: chunk.u64(index, page.flags),
            mapping: chunk.u64(index, page.mapping),
            mapcount: chunk.u32(index, page.mapcount),
            refcount: chunk.u32(index, page.refcount),
            private: chunk.u64(index, page.private),
            file_index: page.index.map(|at| chunk.u64(index, at)),
        };
        if head.flags == u64::MAX {
            return (1, Cause::Unknown);
        }
        if self.shapes.types.buddy.is(head.mapcount) {
            return self.free_block(chunk, head);
        }
        if chunk.u64(index, page.tail) & 1 != 0 {
            // The rest of something whose head was not understood.
            return (1, Cause::Kernel);
        }
        let pages = if head.flags & flags.head == 0 { Some(1) } else { self.folio_pages(chunk, index) };
        match pages {
            Some(pages) => (pages, self.in_use(chunk, head, pages)),
            None => (1, Cause::Kernel),
        }
    }

    /// A block of the page allocator: its order, aligned to it, with no page in use inside.
    fn free_block(&self, chunk: &Chunk<'_>, head: Head) -> Verdict {
        let page = &self.shapes.page;
        let order = u32::try_from(head.private).unwrap_or(u32::MAX);
        let sound = order < self.shapes.types.orders
            && head.frame.get().trailing_zeros() >= order
            && head.index + (1 << order) <= chunk.len();
        if !sound || head.flags & (self.shapes.flags.lru | self.shapes.flags.head) != 0 {
            return (1, Cause::Unknown);
        }
        let pages = 1 << order;
        let inside = head.index + 1..head.index + pages;
        let idle = |index: usize| {
            chunk.u32(index, page.refcount) == 0
                && !self.shapes.types.buddy.is(chunk.u32(index, page.mapcount))
        };
        let free = head.refcount == 0 && inside.into_iter().all(idle);
        if free { (pages as u64, Cause::Free) } else { (1, Cause::Unknown) }
    }

    /// The number of pages of the folio whose head is at `index`; `None` when its parts disagree.
    fn folio_pages(&self, chunk: &Chunk<'_>, index: usize) -> Option<u64> {
        let page = &self.shapes.page;
        let order = u32::from(chunk.u8(index, page.order.at));
        let pages = 1_u64 << (1..=ORDER_MAX).contains(&order).then_some(order)?;
        let told = page.order.pages.map(|at| u64::from(chunk.u32(index, at)));
        let aligned = (chunk.first.get() + index as u64).is_multiple_of(pages);
        let last = (index as u64 + pages).min(chunk.len() as u64) as usize;
        let tails = (index + 1..last).all(|tail| chunk.u64(tail, page.tail) & 1 != 0);
        (told.is_none_or(|told| told == pages) && aligned && tails).then_some(pages)
    }

    fn in_use(&mut self, chunk: &Chunk<'_>, head: Head, pages: u64) -> Cause {
        let (flags, types) = (&self.shapes.flags, &self.shapes.types);
        let is = |kind: Option<super::shapes::Type>| kind.is_some_and(|kind| kind.is(head.mapcount));
        if head.flags & flags.slab != 0 || is(types.slab) {
            return Cause::Slab;
        }
        if is(types.table) {
            return Cause::PageTable;
        }
        if is(types.huge) {
            return Cause::Huge;
        }
        if head.flags & flags.reserved != 0 {
            return Cause::Reserved;
        }
        if head.flags & flags.lru == 0 {
            return Cause::Kernel;
        }
        if head.mapping & MAPPING_BITS != 0 || head.flags & flags.swap_backed != 0 && head.mapping == 0 {
            return Cause::Anonymous;
        }
        self.cached(chunk, head, pages)
    }

    /// A page on the lists of reclaimable pages that belongs to a mapping.
    fn cached(&mut self, chunk: &Chunk<'_>, head: Head, pages: u64) -> Cause {
        let file = match self.owners.of(self.view, Virtual::new(head.mapping)) {
            Owner::File(file) => file,
            Owner::BlockDevice(device) => {
                // Locked or not, dirty or not: what is made of it is held against hashes.
                device.and_then(|device| self.record_device(head, pages, device));
                return Cause::BlockCache;
            }
            Owner::Shmem => return Cause::Shmem,
            Owner::Other => return Cause::OtherCache,
        };
        let flags = self.shapes.flags;
        if head.flags & flags.dirty != 0 {
            return Cause::DirtyCache;
        }
        if !self.is_unmapped(chunk, head.index, pages) {
            return Cause::MappedCache;
        }
        let private = head.flags & flags.private != 0;
        let quiet = head.flags & flags.all & !flags.harmless == 0
            && head.flags & flags.uptodate != 0
            && (u64::from(head.refcount) == pages + u64::from(private) || !self.rules.references)
            && self.is_whole(chunk, head.index, pages);
        let at = chunk.at.checked_add((head.index * chunk.stride) as u64);
        let candidate = at.filter(|_| quiet).map(|page| Candidate {
            page,
            private: private.then_some(Virtual::new(head.private)),
            bytes: pages << PAGE_BITS,
            file,
        });
        let clean = candidate.and_then(|folio| self.findings.fill(self.view, self.shapes, folio));
        if clean.is_none() || self.record(head, pages, file).is_none() {
            return Cause::BusyCache;
        }
        match file.system {
            FileSystem::Ext4 => Cause::CleanExt4,
            FileSystem::Xfs => Cause::CleanXfs,
        }
    }

    fn is_unmapped(&self, chunk: &Chunk<'_>, head: usize, pages: u64) -> bool {
        let page = &self.shapes.page;
        let each = (head..head + pages as usize).all(|index| chunk.u32(index, page.mapcount) == u32::MAX);
        let whole = |at: &[usize], value: u32| at.iter().all(|&at| chunk.u32(head, at) == value);
        each && (pages == 1
            || whole(&page.minus_one_if_unmapped, u32::MAX) && whole(&page.zero_if_unmapped, 0))
    }

    /// Whether a folio lies in this chunk as a whole, and no page of it is lost.
    fn is_whole(&self, chunk: &Chunk<'_>, head: usize, pages: u64) -> bool {
        let (page, poisoned) = (&self.shapes.page, self.shapes.flags.poisoned);
        let end = head + pages as usize;
        end <= chunk.len() && (head + 1..end).all(|tail| chunk.u64(tail, page.flags) & poisoned == 0)
    }

    /// Notes how to hide the folio just examined, and what leads to its bytes on disk.
    fn record(&mut self, head: Head, pages: u64, file: FileCache) -> Option<()> {
        let (first, pages) = (head.frame, u32::try_from(pages).ok()?);
        self.pages.hiding.push(first, pages, &self.findings.clears)?;
        let Some((index, device)) = self.disks.device(self.view, &self.shapes.disks, file.device) else {
            return Some(());
        };
        let blocks = self.findings.placed.iter();
        self.pages.origins.extend(blocks.filter_map(|block| device.origin(first, block)));
        let FileCache { system, inode, .. } = file;
        let Some(at) = head.file_index else { return Some(()) };
        let folio = FilePages {
            first,
            pages,
            device: index,
            system,
            inode,
            index: at,
            is_hot: head.flags & self.shapes.flags.hot != 0,
        };
        let files = &mut self.pages.files;
        match files.last_mut().and_then(|last| Some((last.and(folio)?, last))) {
            Some((longer, last)) => *last = longer,
            None => files.push(folio),
        }
        Some(())
    }

    /// Notes pages of a device itself.
    fn record_device(&mut self, head: Head, pages: u64, device: Virtual) -> Option<()> {
        let (index, pages) = (head.file_index?, u32::try_from(pages).ok()?);
        (head.flags & self.shapes.flags.uptodate != 0).then_some(())?;
        let (device, _) = self.disks.device(self.view, &self.shapes.disks, device)?;
        self.pages.device_cache.push(DeviceFolio { first: head.frame, pages, device, index });
        Some(())
    }
}
