//! An arena of addresses in which short files are mapped, one behind the other.
//!
//! Left to itself, the kernel begins each mapping where a page table begins, and leaves the rest of the last table unused: with
//! a thousand layers of 4 MiB, a fifth of the memory of all tables.

use std::ffi::c_void;
use std::ops::Range;
use std::ptr;

use parking_lot::Mutex;
use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous, munmap};

/// Longer files leave less of a table unused, and may get larger pages where the kernel puts them.
const SHORT_MAX: usize = 32 << 20;
/// Bytes of addresses in an arena.
const ARENA: usize = 1 << 40;

/// A hint for where to map `len` bytes; null leaves it to the kernel.
///
/// Nothing is reserved: if something else is mapped there, the kernel maps the file elsewhere.
pub(crate) fn address_for(len: usize) -> *mut c_void {
    static FREE: Mutex<Range<usize>> = Mutex::new(0..0);
    let len = len.next_multiple_of(rustix::param::page_size());
    if len > SHORT_MAX {
        return ptr::null_mut();
    }
    let mut free = FREE.lock();
    if free.len() < len {
        *free = new_arena();
    }
    let address = free.start;
    free.start = (address + len).min(free.end);
    ptr::without_provenance_mut(address)
}

/// Addresses that are free now; none if the process may not map that many.
fn new_arena() -> Range<usize> {
    // SAFETY: a new mapping at an address that the kernel chooses.
    let arena = unsafe { mmap_anonymous(ptr::null_mut(), ARENA, ProtFlags::empty(), MapFlags::PRIVATE) };
    let Ok(arena) = arena else { return 0..0 };
    // SAFETY: the mapping made above, to which there are no references.
    if let Err(errno) = unsafe { munmap(arena, ARENA) } {
        debug_assert!(false, "cannot unmap an unused arena: {errno}");
    }
    arena.addr()..arena.addr() + ARENA
}
