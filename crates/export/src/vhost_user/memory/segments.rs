//! Segments of a request, put together from runs of guest memory.

use std::ptr::NonNull;

use vmstrata_store::{Segment, SegmentVec};

/// Builds the segments of one direction of a request, joining neighbours.
///
/// The newest run is held back so that the next one can be joined to it, and so that the last byte can be
/// taken off at the end.
pub(in crate::vhost_user) struct SegmentBuilder {
    segments: SegmentVec<'static>,
    last: *mut u8,
    last_len: usize,
    total: u64,
}

impl SegmentBuilder {
    pub(in crate::vhost_user) fn new() -> Self {
        Self { segments: SegmentVec::new(), last: std::ptr::null_mut(), last_len: 0, total: 0 }
    }

    /// Bytes added so far.
    pub(in crate::vhost_user) fn total(&self) -> u64 {
        self.total
    }

    /// Adds `len` bytes at `host`.
    ///
    /// # Safety
    /// The memory must stay mapped until the request that will carry the segments has completed.
    #[inline]
    pub(in crate::vhost_user) unsafe fn push(&mut self, host: NonNull<u8>, len: usize) {
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
    pub(in crate::vhost_user) fn split_last_byte(&mut self) -> Option<NonNull<u8>> {
        self.last_len = self.last_len.checked_sub(1)?;
        self.total -= 1;
        NonNull::new(self.last.wrapping_add(self.last_len))
    }

    /// The finished segments.
    #[inline]
    pub(in crate::vhost_user) fn finish(mut self) -> SegmentVec<'static> {
        self.end_run();
        self.segments
    }

    #[inline]
    fn end_run(&mut self) {
        if self.last_len > 0 {
            // SAFETY: whoever pushed the run promised that it stays mapped for the request's lifetime.
            self.segments.push(unsafe { Segment::new(self.last, self.last_len) });
            self.last_len = 0;
        }
    }
}
