//! An allocator that knows how much is allocated, and how much was at most.

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering};

static USED: AtomicUsize = AtomicUsize::new(0);
static PEAK: AtomicUsize = AtomicUsize::new(0);

/// See the module documentation.
pub struct Counting;

fn add(len: usize) {
    let now = USED.fetch_add(len, Ordering::Relaxed) + len;
    PEAK.fetch_max(now, Ordering::Relaxed);
}

// SAFETY: all is left to the system's allocator; only lengths are noted.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        add(layout.size());
        // SAFETY: the caller's promise is passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        add(layout.size());
        // SAFETY: the caller's promise is passed on.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        USED.fetch_sub(layout.size(), Ordering::Relaxed);
        // SAFETY: the caller's promise is passed on.
        unsafe { System.dealloc(at, layout) }
    }
}

/// Starts to look for a new maximum; bytes allocated now.
pub fn reset_peak() -> usize {
    let used = USED.load(Ordering::Relaxed);
    PEAK.store(used, Ordering::Relaxed);
    used
}

/// Most bytes allocated at one time since.
pub fn peak() -> usize {
    PEAK.load(Ordering::Relaxed)
}
