//! Direct I/O on a file, for requests of any alignment.
//!
//! Place in the data flow: the part of [`crate::FileStore`] that works around the page cache. Aligned
//! requests go to the kernel as they are. Others pass through an aligned bounce buffer; writes that do not cover
//! whole blocks go through the page cache, which local file systems keep coherent with direct I/O.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};

use rustix::fs::{AtFlags, OFlags, StatxFlags};
use vmstrata_types::HostOffset;

use crate::gate::reopen;
use crate::{Access, AlignedBuf, Segment, copy_from_slice, copy_to_slice, slice, total_len, transfer};

/// Largest bounce buffer; longer requests take several turns.
const BOUNCE_MAX: usize = 1 << 20;
/// What every device can do, when the kernel does not tell.
const ALIGNMENT_FALLBACK: usize = 4096;

/// A second, direct descriptor of a file.
#[derive(Debug)]
pub(crate) struct Direct {
    file: File,
    alignment: usize,
}

impl Direct {
    /// Opens `buffered` again for direct I/O; `None` where the file system cannot.
    pub(crate) fn open(buffered: &File, access: Access) -> io::Result<Option<Self>> {
        let file = match reopen(buffered, access, OFlags::DIRECT) {
            Ok(file) => file,
            Err(error) if error.raw_os_error() == Some(libc::EINVAL) => return Ok(None),
            Err(error) => return Err(error),
        };
        let alignment = match kernel_alignment(&file)? {
            Some(alignment) => alignment,
            None => probe_alignment(&file),
        };
        // A bounce buffer must do for every request.
        let usable = alignment.is_power_of_two() && alignment <= AlignedBuf::ALIGNMENT;
        Ok(usable.then_some(Self { file, alignment }))
    }

    /// The direct descriptor.
    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }

    /// What offset, length and memory of direct requests must be multiples of.
    pub(crate) fn alignment(&self) -> usize {
        self.alignment
    }

    fn is_aligned(&self, value: u64) -> bool {
        value & (self.alignment as u64 - 1) == 0
    }

    fn fits(&self, segments: &[Segment<'_>], at: HostOffset) -> bool {
        self.is_aligned(at.get()) && segments.iter().all(|segment| segment.is_aligned(self.alignment))
    }

    /// Reads at `at` into `segments`; returns the bytes read, fewer than asked for only at the end of the file.
    pub(crate) fn read_at(
        &self,
        buffered: &File,
        segments: &[Segment<'_>],
        at: HostOffset,
    ) -> io::Result<usize> {
        let total = total_len(segments);
        let mut done = 0;
        if self.fits(segments, at) && segments.len() <= transfer::SEGMENTS_MAX {
            done = transfer::read_once(self.fd(), segments, at)?;
            if done == total || done == 0 {
                return Ok(done);
            }
        }
        let mut bounce = AlignedBuf::zeroed(self.bounce_len(total - done));
        while done < total {
            let from = at.checked_add(done as u64).ok_or_else(too_far)?;
            let skip = (from.get() & (self.alignment as u64 - 1)) as usize;
            let block = HostOffset::new(from.get() - skip as u64);
            let read = transfer::read_once(self.fd(), &[Segment::from_mut(&mut bounce)], block)?;
            let take = read.saturating_sub(skip).min(total - done);
            if take == 0 {
                break;
            }
            copy_from_slice(&slice(segments, done, take), &bounce[skip..skip + take]);
            done += take;
        }
        let _ = buffered;
        Ok(done)
    }

    /// Writes all of `segments` at `at`.
    pub(crate) fn write_at(
        &self,
        buffered: &File,
        segments: &[Segment<'_>],
        at: HostOffset,
    ) -> io::Result<()> {
        let total = total_len(segments);
        if self.fits(segments, at) {
            return transfer::write_at(self.fd(), segments, at);
        }
        if !self.is_aligned(at.get()) || !self.is_aligned(total as u64) {
            return transfer::write_at(buffered.as_fd(), segments, at);
        }
        let mut bounce = AlignedBuf::zeroed(total.min(BOUNCE_MAX));
        let mut done = 0;
        while done < total {
            let take = bounce.len().min(total - done);
            copy_to_slice(&slice(segments, done, take), &mut bounce[..take]);
            let to = at.checked_add(done as u64).ok_or_else(too_far)?;
            transfer::write_at(self.fd(), &[Segment::from_ref(&bounce[..take])], to)?;
            done += take;
        }
        Ok(())
    }

    /// Room for `len` bytes at any offset, within the largest bounce.
    fn bounce_len(&self, len: usize) -> usize {
        (len.min(BOUNCE_MAX) + 2 * self.alignment).next_multiple_of(self.alignment)
    }
}

fn too_far() -> io::Error {
    io::Error::from_raw_os_error(libc::EFBIG)
}

/// What the kernel says it needs (since Linux 6.1); 0 means that it cannot do direct I/O on this file.
fn kernel_alignment(file: &File) -> io::Result<Option<usize>> {
    let stat = match rustix::fs::statx(file, c"", AtFlags::EMPTY_PATH, StatxFlags::DIOALIGN) {
        Ok(stat) => stat,
        Err(rustix::io::Errno::NOSYS | rustix::io::Errno::INVAL) => return Ok(None),
        Err(errno) => return Err(errno.into()),
    };
    if stat.stx_mask & StatxFlags::DIOALIGN.bits() == 0 {
        return Ok(None);
    }
    Ok(Some(match stat.stx_dio_offset_align {
        0 => 0,
        offset => offset.max(stat.stx_dio_mem_align) as usize,
    }))
}

/// The smallest alignment that a trial read gets through with; the fallback for a file too short to tell.
fn probe_alignment(file: &File) -> usize {
    let mut buf = AlignedBuf::zeroed(2 * ALIGNMENT_FALLBACK);
    let sector = 512;
    match transfer::read_once(
        file.as_fd(),
        &[Segment::from_mut(&mut buf[sector..2 * sector])],
        HostOffset::new(sector as u64),
    ) {
        Ok(read) if read == sector => sector,
        _ => ALIGNMENT_FALLBACK,
    }
}
