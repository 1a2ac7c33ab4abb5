//! Memory that the kernel fills or drains on our behalf.
//!
//! A guest may change its buffers while a request is in flight, so Rust references to them would be unsound.
//! A [`Segment`] is an address and a length; bytes are moved only by system calls or by the raw copies below.

use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use std::marker::PhantomData;
use std::ptr::NonNull;

use smallvec::SmallVec;

/// A run of memory for vectored I/O; layout-compatible with `struct iovec`.
#[derive(Clone, Copy)]
#[repr(transparent)]
pub struct Segment<'mem>(libc::iovec, PhantomData<&'mem mut [u8]>);

// SAFETY: a segment is an address that only system calls and raw copies dereference; the contract of
// `Segment::new` covers use from any thread.
unsafe impl Send for Segment<'_> {}
// SAFETY: as above; a shared segment allows nothing that an owned one does not.
unsafe impl Sync for Segment<'_> {}

/// The segments of one request; four fit without allocation.
pub type SegmentVec<'mem> = SmallVec<[Segment<'mem>; 4]>;

impl<'mem> Segment<'mem> {
    /// Describes `len` bytes at `address`.
    ///
    /// # Safety
    /// The memory must stay mapped, and be writable if it is read into, until the request that carries the
    /// segment has completed. Other parties may read and write it meanwhile.
    pub unsafe fn new(address: *mut u8, len: usize) -> Self {
        Self(libc::iovec { iov_base: address.cast(), iov_len: len }, PhantomData)
    }

    /// A segment over `buf`, which stays borrowed for as long as the segment lives.
    pub fn from_mut(buf: &'mem mut [u8]) -> Self {
        Self(libc::iovec { iov_base: buf.as_mut_ptr().cast(), iov_len: buf.len() }, PhantomData)
    }

    /// A segment over `buf` that must only be written from, never read into: hence not public.
    pub(crate) fn from_ref(buf: &'mem [u8]) -> Self {
        Self(libc::iovec { iov_base: buf.as_ptr().cast_mut().cast(), iov_len: buf.len() }, PhantomData)
    }

    /// Bytes in the segment.
    pub fn len(&self) -> usize {
        self.0.iov_len
    }

    /// Whether the segment has no bytes.
    pub fn is_empty(&self) -> bool {
        self.0.iov_len == 0
    }

    /// Whether address and length are multiples of `alignment` (a power of two).
    pub fn is_aligned(&self, alignment: usize) -> bool {
        (self.0.iov_base as usize | self.0.iov_len) & (alignment - 1) == 0
    }

    pub(crate) fn address(&self) -> *mut u8 {
        self.0.iov_base.cast()
    }

    pub(crate) fn as_iovecs(segments: &[Self]) -> *const libc::iovec {
        segments.as_ptr().cast()
    }
}

impl std::fmt::Debug for Segment<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Segment({:p}+{:#x})", self.0.iov_base, self.0.iov_len)
    }
}

/// Bytes in all of `segments`.
pub fn total_len(segments: &[Segment<'_>]) -> usize {
    segments.iter().map(Segment::len).sum()
}

/// The part of `segments` from byte `skip`, `len` bytes long.
///
/// # Panics
/// When the segments hold fewer than `skip + len` bytes.
pub fn slice<'mem>(segments: &[Segment<'mem>], skip: usize, len: usize) -> SegmentVec<'mem> {
    let mut part = SegmentVec::new();
    let (mut skip, mut left) = (skip, len);
    for segment in segments {
        if skip >= segment.len() {
            skip -= segment.len();
            continue;
        }
        if left == 0 {
            break;
        }
        let take = (segment.len() - skip).min(left);
        // SAFETY: a sub-range of a segment whose contract its maker accepted.
        part.push(unsafe { Segment::new(segment.address().wrapping_add(skip), take) });
        skip = 0;
        left -= take;
    }
    assert_eq!(left, 0, "slice past the end of its segments");
    part
}

/// Parts of segments, asked for in their order: all of them take one pass over the segments.
#[derive(Clone, Copy, Debug)]
pub struct Slices<'a, 'mem> {
    /// From the one on that has the byte where the last part began.
    rest: &'a [Segment<'mem>],
    /// Bytes before those.
    passed: usize,
}

impl<'a, 'mem> Slices<'a, 'mem> {
    /// Of `segments`.
    pub fn new(segments: &'a [Segment<'mem>]) -> Self {
        Self { rest: segments, passed: 0 }
    }

    /// As [`slice`]; no part may begin before the last one did.
    ///
    /// # Panics
    /// As [`slice`], and when a part begins before the last one.
    #[inline]
    pub fn take(&mut self, skip: usize, len: usize) -> SegmentVec<'mem> {
        while let [first, rest @ ..] = self.rest
            && skip >= self.passed + first.len()
        {
            self.passed += first.len();
            self.rest = rest;
        }
        slice(self.rest, skip.checked_sub(self.passed).expect("parts in their order"), len)
    }
}

/// Writes zeros over all of `segments`.
pub fn fill_zero(segments: &[Segment<'_>]) {
    for segment in segments {
        // SAFETY: the maker of the segment promised mapped, writable memory until its request completes.
        unsafe { segment.address().write_bytes(0, segment.len()) };
    }
}

/// Copies `from` over the start of `segments`.
///
/// # Panics
/// When the segments hold fewer bytes than `from`.
pub fn copy_from_slice(segments: &[Segment<'_>], from: &[u8]) {
    let mut left = from;
    for segment in segments {
        let (now, later) = left.split_at(left.len().min(segment.len()));
        // SAFETY: as in `fill_zero`; `now` is no longer than the segment and lives elsewhere.
        unsafe { segment.address().copy_from(now.as_ptr(), now.len()) };
        left = later;
    }
    assert!(left.is_empty(), "more bytes than the segments hold");
}

/// Copies the start of `segments` over all of `into`.
///
/// # Panics
/// When the segments hold fewer bytes than `into`.
pub fn copy_to_slice(segments: &[Segment<'_>], into: &mut [u8]) {
    let mut done = 0;
    for segment in segments {
        let now = (into.len() - done).min(segment.len());
        // SAFETY: as in `fill_zero`; the destination is `now` bytes of `into`.
        unsafe { into[done..].as_mut_ptr().copy_from(segment.address(), now) };
        done += now;
    }
    assert_eq!(done, into.len(), "fewer bytes in the segments than asked for");
}

/// Whether `bytes` are all zeros; looks no further than the first 4 KiB that are not.
pub fn is_zero(bytes: &[u8]) -> bool {
    // Compared in large strides, which the compiler turns into vector instructions.
    bytes.chunks(4096).all(|chunk| chunk.iter().fold(0, |any, byte| any | byte) == 0)
}

/// As [`is_zero`], of memory that others may be changing meanwhile.
pub fn are_zero(segments: &[Segment<'_>]) -> bool {
    let mut bytes = [0; 512];
    segments.iter().all(|segment| {
        (0..segment.len()).step_by(bytes.len()).all(|at| {
            let part = &mut bytes[..(segment.len() - at).min(512)];
            // SAFETY: as in `fill_zero`; the destination is a part of `bytes`.
            unsafe { part.as_mut_ptr().copy_from(segment.address().wrapping_add(at), part.len()) };
            is_zero(part)
        })
    })
}

/// A zeroed heap buffer aligned to 4 KiB, so that direct I/O can use it.
#[derive(Debug)]
pub struct AlignedBuf {
    address: NonNull<u8>,
    len: usize,
}

// SAFETY: the buffer owns its memory; it is a `Box<[u8]>` with a stricter alignment.
unsafe impl Send for AlignedBuf {}
// SAFETY: as above; shared access only reads.
unsafe impl Sync for AlignedBuf {}

impl AlignedBuf {
    /// Alignment of every buffer.
    pub const ALIGNMENT: usize = 4096;

    /// `len` zero bytes.
    pub fn zeroed(len: usize) -> Self {
        if len == 0 {
            return Self { address: NonNull::dangling(), len };
        }
        let layout = Self::layout(len);
        // SAFETY: the layout has a non-zero size.
        let address = unsafe { alloc_zeroed(layout) };
        let Some(address) = NonNull::new(address) else { handle_alloc_error(layout) };
        Self { address, len }
    }

    fn layout(len: usize) -> Layout {
        Layout::from_size_align(len, Self::ALIGNMENT).expect("buffer length below isize::MAX")
    }
}

impl Drop for AlignedBuf {
    fn drop(&mut self) {
        if self.len > 0 {
            // SAFETY: allocated in `zeroed` with this very layout, freed once.
            unsafe { dealloc(self.address.as_ptr(), Self::layout(self.len)) };
        }
    }
}

impl std::ops::Deref for AlignedBuf {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        // SAFETY: `len` initialised bytes owned by the buffer.
        unsafe { std::slice::from_raw_parts(self.address.as_ptr(), self.len) }
    }
}

impl std::ops::DerefMut for AlignedBuf {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `deref`, and `self` is borrowed exclusively.
        unsafe { std::slice::from_raw_parts_mut(self.address.as_ptr(), self.len) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slices_cross_segment_borders() {
        let mut bytes = *b"abcdefgh";
        let (left, right) = bytes.split_at_mut(3);
        let segments = [Segment::from_mut(left), Segment::from_mut(right)];
        let part = slice(&segments, 2, 4);
        let mut out = [0; 4];
        copy_to_slice(&part, &mut out);
        assert_eq!(&out, b"cdef");
        copy_from_slice(&part, b"WXYZ");
        fill_zero(&slice(&segments, 0, 1));
        drop(part);
        assert_eq!(&bytes, b"\0bWXYZgh");
    }

    #[test]
    fn slices_in_order_are_those_that_are_asked_for_one_by_one() {
        let mut bytes = [0; 60];
        let segments: Vec<_> = bytes.chunks_mut(7).map(Segment::from_mut).collect();
        let mut slices = Slices::new(&segments);
        for (skip, len) in [(0, 3), (0, 7), (2, 20), (21, 1), (30, 30), (59, 1)] {
            let (found, wanted) = (slices.take(skip, len), slice(&segments, skip, len));
            assert_eq!(format!("{found:?}"), format!("{wanted:?}"), "{len} bytes from {skip}");
        }
    }

    #[test]
    fn one_byte_anywhere_is_not_zeros() {
        let mut bytes = [0; 9000];
        assert!(is_zero(&bytes) && is_zero(&[]) && are_zero(&[]));
        for at in [0, 511, 512, 4095, 4096, 8999] {
            bytes[at] = 1;
            assert!(!is_zero(&bytes), "{at}");
            let (left, right) = bytes.split_at_mut(700);
            assert!(!are_zero(&[Segment::from_mut(left), Segment::from_mut(right)]), "{at}");
            bytes[at] = 0;
            assert!(are_zero(&[Segment::from_mut(&mut bytes)]));
        }
    }

    #[test]
    fn aligned_buffers_start_on_a_page() {
        let buf = AlignedBuf::zeroed(5000);
        assert!(Segment::from_ref(&buf[..4096]).is_aligned(4096));
        assert!(buf.iter().all(|&byte| byte == 0));
        assert!(AlignedBuf::zeroed(0).is_empty());
    }
}
