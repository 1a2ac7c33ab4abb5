//! Guest memory: the regions a frontend shares, and translation of its addresses into ours.
//!
//! ```text
//!   SET_MEM_TABLE / ADD_MEM_REG ──► GuestMemory (immutable, shared by Arc)
//!                                      │ guest address ──► Segment   buffers, for the kernel to fill
//!                                      └ user address  ──► pointer   rings, read and written by us
//! ```
//!
//! A table never changes: a new one replaces it, and each ring keeps the one its requests point into until
//! they have completed.
//!
//! The guest, and the frontend, write this memory whenever they like. So no Rust reference to it is ever
//! made, every value is read once into a local before it is checked, and no address is used untranslated.
//!
//! **Assumption about the memory file**: it is a [`SharedFile`], and large enough. Its size is checked when it arrives and sealed against shrinking where the file allows it; what
//! happens when a frontend shrinks an unsealed file all the same is in `guarded`.

use std::ptr::NonNull;
use std::sync::Arc;

use vmstrata_store::{Segment, SegmentVec};

use super::guarded::GuardedMapping;
use super::shared_file::SharedFile;

/// Most regions a frontend may share; what QEMU's memory hotplug can use.
pub(super) const MAX_REGIONS: usize = 512;

/// Why a memory region was refused, or an address lies nowhere.
#[derive(Debug, thiserror::Error)]
pub(super) enum MemoryError {
    #[error("memory region at guest address {guest:#x} (+{len:#x}) overlaps another or wraps around")]
    Overlap { guest: u64, len: u64 },
    #[error("the frontend shares more than {MAX_REGIONS} memory regions")]
    TooManyRegions,
    #[error(
        "the file of the memory region at guest address {guest:#x} holds {file_len:#x} bytes, {needed:#x} are needed"
    )]
    FileTooSmall { guest: u64, file_len: u64, needed: u64 },
    #[error("no memory region at guest address {guest:#x} (+{len:#x}) to remove")]
    NoSuchRegion { guest: u64, len: u64 },
    #[error("cannot map the memory region at guest address {guest:#x}: {source}")]
    Map { guest: u64, source: std::io::Error },
    #[error(
        "the memory region at guest address {guest:#x} is refused: {source}; a guest whose memory is elsewhere (restored with --lazy) needs a socket with any-memory"
    )]
    File { guest: u64, source: std::io::Error },
    #[error(
        "{what} at frontend address {user:#x} (+{len:#x}) is not inside one shared memory region, or not aligned"
    )]
    RingAddress { what: &'static str, user: u64, len: u64 },
}

/// Where a frontend says a region lies: `len` bytes at guest physical address `guest`, which the frontend
/// itself sees at `user` and which start `file_offset` bytes into the file that came along.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct RegionInfo {
    pub(super) guest: u64,
    pub(super) len: u64,
    pub(super) user: u64,
    pub(super) file_offset: u64,
}

#[derive(Clone, Debug)]
struct Region {
    info: RegionInfo,
    /// Our address of the region's first byte.
    host: NonNull<u8>,
    /// What `host` points into; shared by all tables that have the region.
    _mapping: Arc<GuardedMapping>,
}

/// One memory table. Regions are sorted by guest address and disjoint.
#[derive(Debug, Default)]
pub(super) struct GuestMemory {
    regions: Vec<Region>,
}

// SAFETY: the pointers lead into mappings that the regions own; the memory is shared with another process
// anyway, and every access goes through raw copies or atomics.
unsafe impl Send for GuestMemory {}
// SAFETY: as above; the table itself is immutable.
unsafe impl Sync for GuestMemory {}

impl GuestMemory {
    /// This table with one more region.
    ///
    /// # Errors
    /// When the region overlaps another, its file is too small, or it cannot be mapped.
    pub(super) fn with_region(&self, info: RegionInfo, file: SharedFile) -> Result<Self, MemoryError> {
        let (guest, len) = (info.guest, info.len);
        if self.regions.len() >= MAX_REGIONS {
            return Err(MemoryError::TooManyRegions);
        }
        let overlap = MemoryError::Overlap { guest, len };
        if len == 0 || guest.checked_add(len).is_none() || info.user.checked_add(len).is_none() {
            return Err(overlap);
        }
        let place = self.regions.partition_point(|region| region.info.guest < guest);
        let meets_next = self.regions.get(place).is_some_and(|next| next.info.guest < guest + len);
        let meets_previous = place > 0 && {
            let previous = self.regions[place - 1].info;
            previous.guest + previous.len > guest
        };
        if meets_next || meets_previous {
            return Err(overlap);
        }
        let region = Region::map(info, file)?;
        let mut regions = self.regions.clone();
        regions.insert(place, region);
        Ok(Self { regions })
    }

    /// This table without the region at this guest address, frontend address and length.
    ///
    /// # Errors
    /// When there is none.
    pub(super) fn without_region(&self, info: RegionInfo) -> Result<Self, MemoryError> {
        let same = |region: &Region| {
            let here = region.info;
            (here.guest, here.len, here.user) == (info.guest, info.len, info.user)
        };
        let place = self.regions.iter().position(same);
        let place = place.ok_or(MemoryError::NoSuchRegion { guest: info.guest, len: info.len })?;
        let mut regions = self.regions.clone();
        regions.remove(place);
        Ok(Self { regions })
    }

    /// Our address of `len` bytes at guest address `guest`, or as many of them as one region holds.
    /// `None` when no region holds the first byte.
    #[inline]
    pub(super) fn translate(&self, guest: u64, len: u64) -> Option<(NonNull<u8>, u64)> {
        let found = match &self.regions[..] {
            [only] => only,
            regions => {
                let above = regions.partition_point(|region| region.info.guest <= guest);
                regions.get(above.wrapping_sub(1))?
            }
        };
        let offset = guest.checked_sub(found.info.guest)?;
        let left = found.info.len.checked_sub(offset).filter(|&left| left > 0)?;
        // SAFETY: `offset` is below the region's length, so the sum stays inside its mapping.
        let host = unsafe { found.host.add(offset as usize) };
        Some((host, left.min(len)))
    }

    /// Our address of a part of a ring, given in the frontend's own address space.
    ///
    /// # Errors
    /// When the range is not inside one region, or the address is not a multiple of `align`.
    pub(super) fn ring_part(
        &self,
        what: &'static str,
        user: u64,
        len: u64,
        align: usize,
    ) -> Result<NonNull<u8>, MemoryError> {
        let error = MemoryError::RingAddress { what, user, len };
        let holds = |region: &&Region| {
            let offset = user.wrapping_sub(region.info.user);
            user >= region.info.user && offset < region.info.len && region.info.len - offset >= len
        };
        let Some(region) = self.regions.iter().find(holds) else { return Err(error) };
        // SAFETY: the range was found to lie inside the region, hence inside its mapping.
        let host = unsafe { region.host.add((user - region.info.user) as usize) };
        if host.addr().get() % align == 0 { Ok(host) } else { Err(error) }
    }
}

impl Region {
    fn map(info: RegionInfo, file: SharedFile) -> Result<Self, MemoryError> {
        let guest = info.guest;
        let failed = |source: std::io::Error| MemoryError::Map { guest, source };
        let needed = info.file_offset.checked_add(info.len);
        let needed = needed.ok_or(MemoryError::Overlap { guest, len: info.len })?;
        let file_len = file.len().map_err(failed)?;
        if file_len < needed {
            return Err(MemoryError::FileTooSmall { guest, file_len, needed });
        }
        let len = usize::try_from(info.len).map_err(|_| MemoryError::Overlap { guest, len: info.len })?;
        let mapping = GuardedMapping::new(file, info.file_offset, len).map_err(failed)?;
        let mapping = mapping.ok_or(MemoryError::TooManyRegions)?;
        Ok(Self { info, host: mapping.start(), _mapping: Arc::new(mapping) })
    }
}

/// Builds the segments of one direction of a request, joining neighbours.
///
/// The newest run is held back so that the next one can be joined to it, and so that the last byte can be
/// taken off at the end.
pub(super) struct SegmentBuilder {
    segments: SegmentVec<'static>,
    last: *mut u8,
    last_len: usize,
    total: u64,
}

impl SegmentBuilder {
    pub(super) fn new() -> Self {
        Self { segments: SegmentVec::new(), last: std::ptr::null_mut(), last_len: 0, total: 0 }
    }

    /// Bytes added so far.
    pub(super) fn total(&self) -> u64 {
        self.total
    }

    /// Adds `len` bytes at `host`.
    ///
    /// # Safety
    /// The memory must stay mapped until the request that will carry the segments has completed.
    #[inline]
    pub(super) unsafe fn push(&mut self, host: NonNull<u8>, len: usize) {
        self.total += len as u64;
        if self.last.wrapping_add(self.last_len) == host.as_ptr() {
            self.last_len += len;
            return;
        }
        self.end_run();
        (self.last, self.last_len) = (host.as_ptr(), len);
    }

    /// Takes the last byte off and returns where it is; `None` when there is none.
    #[inline]
    pub(super) fn split_last_byte(&mut self) -> Option<NonNull<u8>> {
        self.last_len = self.last_len.checked_sub(1)?;
        self.total -= 1;
        NonNull::new(self.last.wrapping_add(self.last_len))
    }

    /// The finished segments.
    #[inline]
    pub(super) fn finish(mut self) -> SegmentVec<'static> {
        self.end_run();
        self.segments
    }

    #[inline]
    fn end_run(&mut self) {
        if self.last_len > 0 {
            // SAFETY: the caller of `push` promised that the run stays mapped for the request's lifetime.
            self.segments.push(unsafe { Segment::new(self.last, self.last_len) });
            self.last_len = 0;
        }
    }
}

#[cfg(test)]
pub(super) mod tests;
