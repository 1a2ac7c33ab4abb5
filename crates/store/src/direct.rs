//! Direct I/O on a file, for requests of any alignment.
//!
//! Place in the data flow: the part of [`crate::FileStore`] that works around the page cache. Aligned
//! requests go to the kernel as they are; others pass through an aligned bounce buffer. A write that covers a block
//! partly reads it first, writes it whole, and excludes every other write of that sort meanwhile.
//!
//! Two limits follow:
//! - A partial write that overlaps a *concurrent* aligned write may undo that write in the rest of
//!   the blocks it touches. Callers whose requests may overlap in one block must put them in order.
//! - A partial write of the last block of the file, which must not make the file longer than asked for, goes
//!   through the page cache. The kernel keeps that coherent with direct I/O that comes later. (Not so with direct I/O
//!   in flight on the same page, which it answers with `EIO` from the next flush; that is why the page
//!   cache does not serve for all partial writes.)

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};

use parking_lot::Mutex;
use rustix::fs::{AtFlags, OFlags, SeekFrom, StatxFlags};
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
    /// Held while blocks are read, changed and written back.
    partial_writes: Mutex<()>,
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
        Ok(usable.then_some(Self { file, alignment, partial_writes: Mutex::new(()) }))
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
    pub(crate) fn read_at(&self, segments: &[Segment<'_>], at: HostOffset) -> io::Result<usize> {
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
            let (block, skip) = self.split(at, done)?;
            let read = transfer::read_once(self.fd(), &[Segment::from_mut(&mut bounce)], block)?;
            let take = read.saturating_sub(skip).min(total - done);
            if take == 0 {
                break;
            }
            copy_from_slice(&slice(segments, done, take), &bounce[skip..skip + take]);
            done += take;
        }
        Ok(done)
    }

    /// Writes all of `segments` at `at`; `buffered` is another descriptor of the file.
    pub(crate) fn write_at(
        &self,
        buffered: &File,
        segments: &[Segment<'_>],
        at: HostOffset,
    ) -> io::Result<()> {
        if self.fits(segments, at) {
            return transfer::write_at(self.fd(), segments, at);
        }
        let end = at.checked_add(total_len(segments) as u64).ok_or_else(too_far)?.get();
        if self.is_aligned(at.get()) && self.is_aligned(end) {
            return self.write_blocks(segments, at);
        }
        let _guard = self.partial_writes.lock();
        let last_block_end = end.checked_next_multiple_of(self.alignment as u64).ok_or_else(too_far)?;
        if last_block_end > rustix::fs::seek(buffered, SeekFrom::End(0))? {
            return transfer::write_at(buffered.as_fd(), segments, at);
        }
        self.write_blocks(segments, at)
    }

    /// Writes through a bounce buffer, completing the blocks that `segments` cover partly with what they hold.
    fn write_blocks(&self, segments: &[Segment<'_>], at: HostOffset) -> io::Result<()> {
        let total = total_len(segments);
        let mut bounce = AlignedBuf::zeroed(self.bounce_len(total));
        let mut done = 0;
        while done < total {
            let (block, skip) = self.split(at, done)?;
            let take = (bounce.len() - skip).min(total - done);
            let len = (skip + take).next_multiple_of(self.alignment);
            let last = len - self.alignment;
            if skip > 0 {
                self.fill(&mut bounce[..self.alignment], block)?;
            }
            let first_is_last = last == 0 && skip > 0;
            if skip + take < len && !first_is_last {
                self.fill(&mut bounce[last..len], block + last as u64)?;
            }
            copy_to_slice(&slice(segments, done, take), &mut bounce[skip..skip + take]);
            transfer::write_at(self.fd(), &[Segment::from_ref(&bounce[..len])], block)?;
            done += take;
        }
        Ok(())
    }

    /// Reads a whole block, which lies below the end of the file.
    fn fill(&self, into: &mut [u8], block: HostOffset) -> io::Result<()> {
        let len = into.len();
        let read = transfer::read_once(self.fd(), &[Segment::from_mut(into)], block)?;
        if read == len { Ok(()) } else { Err(io::ErrorKind::UnexpectedEof.into()) }
    }

    /// The block that byte `done` of a request at `at` lies in, and where in it.
    fn split(&self, at: HostOffset, done: usize) -> io::Result<(HostOffset, usize)> {
        let byte = at.checked_add(done as u64).ok_or_else(too_far)?.get();
        let skip = byte % self.alignment as u64;
        Ok((HostOffset::new(byte - skip), skip as usize))
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
