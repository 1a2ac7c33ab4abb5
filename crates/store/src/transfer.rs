//! Whole transfers out of system calls that may move less than asked for.
//!
//! Place in the data flow: between [`crate::FileStore`] and the kernel. Handles short transfers, interruption,
//! and the kernel's limit on the number of segments in one call.

use std::io::{self, IoSliceMut};
use std::os::fd::{AsRawFd, BorrowedFd};

use rustix::io::ReadWriteFlags;
use vmstrata_types::HostOffset;

use crate::{Segment, slice, total_len};

/// Most segments the kernel takes in one call (`UIO_MAXIOV`).
pub const SEGMENTS_MAX: usize = 1024;

/// Reads at `at` into `segments`; returns the bytes read, fewer than asked for only at the end of the file.
pub(crate) fn read_at(fd: BorrowedFd<'_>, segments: &[Segment<'_>], at: HostOffset) -> io::Result<usize> {
    transfer(segments, at, |part, at| read_vectored(fd, part, at))
}

/// Reads at `at` with one system call, which may move less than asked for.
pub(crate) fn read_once(fd: BorrowedFd<'_>, segments: &[Segment<'_>], at: HostOffset) -> io::Result<usize> {
    let mut called = false;
    transfer(segments, at, |part, at| {
        if std::mem::replace(&mut called, true) {
            return Ok(0);
        }
        let read = read_vectored(fd, part, at);
        called = !matches!(&read, Err(error) if error.kind() == io::ErrorKind::Interrupted);
        read
    })
}

/// Fills `buf` from the host's page cache; false when not all of it is there.
pub(crate) fn read_cached(fd: BorrowedFd<'_>, buf: &mut [u8], at: HostOffset) -> bool {
    let len = buf.len();
    let read = rustix::io::preadv2(fd, &mut [IoSliceMut::new(buf)], at.get(), ReadWriteFlags::NOWAIT);
    read == Ok(len)
}

fn read_vectored(fd: BorrowedFd<'_>, part: &[Segment<'_>], at: i64) -> io::Result<usize> {
    // SAFETY: `part` holds no more iovecs than it says, over memory that their maker promised is
    // writable until this request completes, which it has when the call returns.
    result(unsafe { libc::preadv(fd.as_raw_fd(), Segment::as_iovecs(part), part.len() as _, at) })
}

/// Writes all of `segments` at `at`.
pub(crate) fn write_at(fd: BorrowedFd<'_>, segments: &[Segment<'_>], at: HostOffset) -> io::Result<()> {
    let written = transfer(segments, at, |part, at| {
        // SAFETY: as in `read_vectored`; the kernel only reads the memory.
        result(unsafe { libc::pwritev(fd.as_raw_fd(), Segment::as_iovecs(part), part.len() as _, at) })
    })?;
    if written == total_len(segments) { Ok(()) } else { Err(io::ErrorKind::WriteZero.into()) }
}

fn result(moved: isize) -> io::Result<usize> {
    usize::try_from(moved).map_err(|_| io::Error::last_os_error())
}

/// Repeats `call` until all of `segments` has been moved or it moves nothing.
fn transfer(
    segments: &[Segment<'_>],
    at: HostOffset,
    mut call: impl FnMut(&[Segment<'_>], i64) -> io::Result<usize>,
) -> io::Result<usize> {
    let total = total_len(segments);
    let mut done = 0;
    while done < total {
        let offset = at
            .checked_add(done as u64)
            .and_then(|offset| i64::try_from(offset.get()).ok())
            .ok_or_else(|| io::Error::from_raw_os_error(libc::EFBIG))?;
        let moved = if done == 0 && segments.len() <= SEGMENTS_MAX {
            call(segments, offset)
        } else {
            let part = slice(segments, done, total - done);
            call(&part[..part.len().min(SEGMENTS_MAX)], offset)
        };
        match moved {
            Ok(0) => break,
            Ok(moved) => done += moved,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(done)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A transfer of 10 bytes in 3 segments whose calls answer as scripted.
    fn scripted(answers: Vec<io::Result<usize>>) -> (io::Result<usize>, Vec<(usize, i64)>) {
        let mut memory = [0_u8; 10];
        let (left, rest) = memory.split_at_mut(3);
        let (middle, right) = rest.split_at_mut(3);
        let segments = [Segment::from_mut(left), Segment::from_mut(middle), Segment::from_mut(right)];
        let mut answers = answers.into_iter();
        let mut calls = Vec::new();
        let result = transfer(&segments, HostOffset::new(100), |part, at| {
            calls.push((total_len(part), at));
            answers.next().expect("no more calls than answers")
        });
        (result, calls)
    }

    #[test]
    fn short_and_interrupted_calls_are_continued() {
        let (result, calls) = scripted(vec![Ok(2), Err(io::ErrorKind::Interrupted.into()), Ok(5), Ok(3)]);
        assert_eq!(result.unwrap(), 10);
        assert_eq!(calls, [(10, 100), (8, 102), (8, 102), (3, 107)]);
    }

    #[test]
    fn the_end_and_errors_stop_a_transfer() {
        let (result, _) = scripted(vec![Ok(4), Ok(0)]);
        assert_eq!(result.unwrap(), 4);
        let (result, calls) = scripted(vec![Ok(4), Err(io::Error::from_raw_os_error(libc::EIO))]);
        assert_eq!(result.unwrap_err().raw_os_error(), Some(libc::EIO));
        assert_eq!(calls.len(), 2);
    }

    #[test]
    fn more_segments_than_the_kernel_takes_are_split() {
        let mut memory = vec![0_u8; 3000];
        let mut segments: Vec<_> = memory.chunks_mut(1).map(Segment::from_mut).collect();
        segments.insert(0, Segment::from_mut(&mut []));
        let mut calls = Vec::new();
        let result = transfer(&segments, HostOffset::ZERO, |part, at| {
            calls.push((part.len(), at));
            Ok(total_len(part))
        });
        assert_eq!(result.unwrap(), 3000);
        assert_eq!(calls, [(1024, 0), (1024, 1024), (952, 2048)]);
    }

    #[test]
    fn offsets_past_what_files_can_have_are_refused() {
        let mut memory = [0_u8; 1];
        let error = transfer(&[Segment::from_mut(&mut memory)], HostOffset::new(u64::MAX), |_, _| {
            panic!("must not reach the kernel")
        })
        .unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::EFBIG));
    }
}
