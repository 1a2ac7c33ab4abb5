//! Where a guest says that its clean pages lie on one of its disks: by their buffer heads, or else by their files, through
//! the structures of the file system.

use std::collections::HashMap;

use crate::address::{Frame, PAGE_BITS, PAGE_BYTES};
use crate::disk::ReadDisk;
use crate::filesystem::{Files, ReadDevice};
use crate::introspect::{DeviceIndex, DiskIndex, FilePages, FileSystem, Origin, Pages};
use crate::ram::Ram;
use crate::vault::{DiskPiece, DiskPieces};

/// Pages of a device's structures that are kept: 16 MiB.
const KEPT_PAGES: usize = 4096;

/// A clean page.
#[derive(Clone, Copy, Debug)]
pub(super) struct CleanPage {
    pub(super) frame: Frame,
    folio: FilePages,
}

impl CleanPage {
    /// Byte of its file.
    fn at(&self) -> Option<u64> {
        let within = self.frame.get() - self.folio.first.get();
        self.folio.index.checked_add(within)?.checked_mul(PAGE_BYTES as u64)
    }
}

/// A clean page and where it is said to be.
#[derive(Clone, Debug)]
pub(super) struct Claim {
    pub(super) frame: Frame,
    pub(super) is_hot: bool,
    /// From the page's first byte on; never empty.
    pub(super) pieces: DiskPieces,
}

/// The clean pages of files on a disk, in the order in which their places are found out fastest.
pub(super) fn pages_on(pages: &Pages, disk: DiskIndex) -> Vec<CleanPage> {
    let is_on =
        |device: DeviceIndex| pages.devices.get(device.0 as usize).is_some_and(|device| device.disk == disk);
    let mut folios: Vec<FilePages> =
        pages.files.iter().filter(|folio| is_on(folio.device)).copied().collect();
    folios.sort_unstable_by_key(|folio| (folio.device, folio.system, folio.inode, folio.index));
    let each = |folio: FilePages| {
        let frames = (0..u64::from(folio.pages)).map(move |page| folio.first.get() + page);
        frames.map(move |frame| CleanPage { frame: Frame::new(frame), folio })
    };
    folios.into_iter().flat_map(each).collect()
}

/// What is said of `wanted`, which [`pages_on`] gave, if the guest's disk is `disk`, which the snapshot counts as `index`.
pub(super) fn claims(
    ram: &dyn Ram,
    pages: &Pages,
    wanted: &[CleanPage],
    (disk, index): (&dyn ReadDisk, u16),
) -> Vec<Claim> {
    let mut claims = Vec::new();
    let same = |one: &CleanPage, other: &CleanPage| {
        (one.folio.device, one.folio.system) == (other.folio.device, other.folio.system)
    };
    for wanted in wanted.chunk_by(same) {
        let FilePages { device, system, .. } = wanted[0].folio;
        let start = pages.devices[device.0 as usize].start;
        let device =
            GuestDevice { ram, disk, start, newer: newer(pages, device, system), kept: HashMap::new() };
        let mut files = Files::open(system, device);
        for page in wanted {
            let mut pieces = Pieces { disk: index, pieces: DiskPieces::new(), end: 0 };
            let told = pieces.of_origins(&pages.origins, page.frame).or_else(|| {
                pieces = Pieces { disk: index, pieces: DiskPieces::new(), end: 0 };
                pieces.of_file(files.as_mut()?, page, start)
            });
            if told.is_some() && !pieces.pieces.is_empty() {
                claims.push(Claim { frame: page.frame, is_hot: page.folio.is_hot, pieces: pieces.pieces });
            }
        }
    }
    claims
}

/// Pages of a device that the guest may not have written back. XFS keeps such structures elsewhere.
fn newer(pages: &Pages, device: DeviceIndex, system: FileSystem) -> HashMap<u64, Frame> {
    let folios =
        pages.device_cache.iter().filter(|folio| folio.device == device && system == FileSystem::Ext4);
    let each = |folio: &crate::introspect::DeviceFolio| {
        let (index, first) = (folio.index, folio.first.get());
        (0..u64::from(folio.pages)).map(move |page| (index.wrapping_add(page), Frame::new(first + page)))
    };
    folios.flat_map(each).collect()
}

/// The pieces of a page, in the making.
struct Pieces {
    disk: u16,
    pieces: DiskPieces,
    /// Bytes of the page so far.
    end: usize,
}

impl Pieces {
    fn push(&mut self, offset: u64, len: usize) -> Option<()> {
        let len = u16::try_from(len).ok()?;
        self.end += usize::from(len);
        match self.pieces.last_mut() {
            Some(last) if last.offset.checked_add(last.len.into()) == Some(offset) => last.len += len,
            _ => self.pieces.push(DiskPiece { disk: self.disk, offset, len }),
        }
        Some(())
    }

    /// What buffer heads say; `None` unless they say it of the page's first bytes and of those that follow without a gap.
    fn of_origins(&mut self, origins: &[Origin], frame: Frame) -> Option<()> {
        let first = origins.partition_point(|origin| origin.frame < frame);
        for origin in origins[first..].iter().take_while(|origin| origin.frame == frame) {
            let fits = usize::from(origin.within_page) == self.end
                && self.end + usize::from(origin.len) <= PAGE_BYTES;
            fits.then_some(())?;
            self.push(origin.offset, origin.len.into())?;
        }
        (self.end > 0).then_some(())
    }

    /// What the file system says; what comes after a hole is left out.
    fn of_file(&mut self, files: &mut Files<GuestDevice<'_>>, page: &CleanPage, start: u64) -> Option<()> {
        while self.end < PAGE_BYTES {
            let at = page.at()?.checked_add(self.end as u64)?;
            let Some(run) = files.find(page.folio.inode, at) else { break };
            let len = usize::try_from(run.len).unwrap_or(usize::MAX).min(PAGE_BYTES - self.end);
            self.push(start.checked_add(run.offset)?, len)?;
        }
        Some(())
    }
}

/// A guest's device: what is on the disk, but for what the guest has changed in memory since.
struct GuestDevice<'a> {
    ram: &'a dyn Ram,
    disk: &'a dyn ReadDisk,
    /// Where it begins on the disk.
    start: u64,
    /// `[page of the device]`
    newer: HashMap<u64, Frame>,
    /// Pages read lately.
    kept: HashMap<u64, Box<[u8; PAGE_BYTES]>>,
}

impl GuestDevice<'_> {
    fn page(&mut self, number: u64) -> Option<&[u8; PAGE_BYTES]> {
        if !self.kept.contains_key(&number) {
            let mut page = Box::new([0; PAGE_BYTES]);
            match self.newer.get(&number) {
                Some(frame) => self.ram.read(frame.start()?, &mut page[..]).ok()?,
                None => {
                    let at = number.checked_mul(PAGE_BYTES as u64)?.checked_add(self.start)?;
                    self.disk.read_at(at, &mut page[..]).ok()?;
                }
            }
            if self.kept.len() == KEPT_PAGES {
                self.kept.clear();
            }
            self.kept.insert(number, page);
        }
        self.kept.get(&number).map(Box::as_ref)
    }
}

impl ReadDevice for GuestDevice<'_> {
    fn read(&mut self, mut offset: u64, mut into: &mut [u8]) -> Option<()> {
        while !into.is_empty() {
            let within = (offset % PAGE_BYTES as u64) as usize;
            let (now, later) = into.split_at_mut(into.len().min(PAGE_BYTES - within));
            now.copy_from_slice(&self.page(offset >> PAGE_BITS)?[within..][..now.len()]);
            offset = offset.checked_add(now.len() as u64)?;
            into = later;
        }
        Some(())
    }
}
