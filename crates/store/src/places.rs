//! Where short files are mapped: one behind the other.
//!
//! Left to itself the kernel lets each begin where one of its page tables does, and much of a table is unused behind its
//! end: with a thousand layers of 4 MiB, a fifth of all that the tables take.

use std::ffi::c_void;
use std::ops::Range;
use std::ptr;

use parking_lot::Mutex;
use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous, munmap};

/// Longer files leave less of a table unused, and may get larger pages where the kernel puts them.
const SHORT_MAX: usize = 32 << 20;
/// Addresses that are looked for at a time.
const ROOM: usize = 1 << 40;

/// Where to map `len` bytes, if there is room; null where the kernel shall say.
///
/// Nothing is reserved: what others map there first stays theirs, and the file is mapped somewhere else.
pub(crate) fn place_for(len: usize) -> *mut c_void {
    static FREE: Mutex<Range<usize>> = Mutex::new(0..0);
    let len = len.next_multiple_of(rustix::param::page_size());
    if len > SHORT_MAX {
        return ptr::null_mut();
    }
    let mut free = FREE.lock();
    if free.len() < len {
        *free = find_room();
    }
    let place = free.start;
    free.start = (place + len).min(free.end);
    ptr::without_provenance_mut(place)
}

/// Addresses that are free for now; none if this process may not have as many.
fn find_room() -> Range<usize> {
    // SAFETY: a new mapping, wherever there is room.
    let room = unsafe { mmap_anonymous(ptr::null_mut(), ROOM, ProtFlags::empty(), MapFlags::PRIVATE) };
    let Ok(room) = room else { return 0..0 };
    // SAFETY: all of what was just mapped, and nobody has used.
    if let Err(errno) = unsafe { munmap(room, ROOM) } {
        debug_assert!(false, "cannot unmap what is not used: {errno}");
    }
    room.addr()..room.addr() + ROOM
}
