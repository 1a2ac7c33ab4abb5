//! What happens when a file is cut off, or cannot be read, that is mapped here.
//!
//! Touching a page of a file that was truncated, or that the device does not give, raises SIGBUS, which would end the whole
//! server with the disks of all guests. This module answers the signal: it puts empty private memory in the place of
//! the whole mapping, and says so to whoever asks. Who reads what others may take away asks after each read
//! ([`Guard::is_lost`]), so that the zeros are never taken for the file's bytes. Two kinds of memory are guarded: that of
//! guests, whose frontend may shrink it (the guest then reads zeros, which its rings do not survive; nobody else
//! notices), and files' pages that are read in place ([`crate::View`]). System calls on such memory fail by themselves.
//!
//! The handler is the process's, installed with the first guard. Signals from anywhere else are passed on to the handler
//! that was there before.

use std::mem::MaybeUninit;
use std::ops::Range;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

/// Mappings that can be guarded at a time, in the whole process.
const GUARDS_MAX: usize = 16_384;
/// Those of them that files' pages never take: a guest without its memory has no disk, a layer without a view is read by system
/// calls.
const GUESTS_ONLY: usize = 4096;

/// A guarded run of addresses; free when `start` is 0, not guarded yet while `len` is.
struct Guarded {
    start: AtomicUsize,
    len: AtomicUsize,
    is_lost: AtomicBool,
}

impl Guarded {
    /// Where and how long the mapping is, for the signal handler.
    fn place(&self) -> Option<(usize, usize)> {
        let start = self.start.load(Ordering::Acquire);
        let len = self.len.load(Ordering::Acquire);
        // Given to another mapping in between, whose length would be taken for this one's: neither is what was touched, as
        // that stays guarded while it is used.
        let is_torn = self.start.load(Ordering::Acquire) != start;
        (start != 0 && !is_torn).then_some((start, len))
    }
}

/// Read by the signal handler, hence plain atomics.
static GUARDED: [Guarded; GUARDS_MAX] = [const {
    Guarded { start: AtomicUsize::new(0), len: AtomicUsize::new(0), is_lost: AtomicBool::new(false) }
}; GUARDS_MAX];

/// Where to look for a free one first.
static NEXT: AtomicUsize = AtomicUsize::new(0);

/// Mappings that were lost since the process began.
static LOST: AtomicUsize = AtomicUsize::new(0);

/// The action of the process before ours.
static PREVIOUS: OnceLock<libc::sigaction> = OnceLock::new();

/// Guards a mapping for as long as it lives.
#[derive(Debug)]
pub struct Guard {
    slot: usize,
}

impl Guard {
    /// Guards `len` bytes of a guest's memory at `start`; `None` when too many mappings are.
    ///
    /// # Safety
    /// The bytes are one or more whole mappings of the caller's, which nothing but raw copies and atomics touches, and
    /// which stay mapped for as long as the guard lives.
    pub unsafe fn new(start: *mut u8, len: usize) -> Option<Self> {
        // SAFETY: as the caller promises.
        unsafe { Self::in_one_of(0..GUARDS_MAX, start, len) }
    }

    /// As [`Guard::new`] for pages of a file, which leave room for guests' memory.
    ///
    /// # Safety
    /// As for [`Guard::new`].
    pub(crate) unsafe fn of_pages(start: *mut u8, len: usize) -> Option<Self> {
        // SAFETY: as the caller promises.
        unsafe { Self::in_one_of(GUESTS_ONLY..GUARDS_MAX, start, len) }
    }

    /// # Safety
    /// As for [`Guard::new`].
    unsafe fn in_one_of(slots: Range<usize>, start: *mut u8, len: usize) -> Option<Self> {
        PREVIOUS.get_or_init(install);
        let first = NEXT.fetch_add(1, Ordering::Relaxed);
        let mut places = (0..slots.len()).map(|step| slots.start + (first + step) % slots.len());
        let slot = places.find(|slot| {
            let taken =
                GUARDED[*slot].start.compare_exchange(0, start as usize, Ordering::AcqRel, Ordering::Relaxed);
            taken.is_ok()
        })?;
        GUARDED[slot].is_lost.store(false, Ordering::Relaxed);
        GUARDED[slot].len.store(len, Ordering::Release);
        Some(Self { slot })
    }

    /// Whether the memory was lost: what has been read from it since may be zeros, and not what the file has.
    #[inline]
    pub fn is_lost(&self) -> bool {
        GUARDED[self.slot].is_lost.load(Ordering::Acquire)
    }
}

/// Whether any guarded memory was lost: one word for all guards, which hardly ever changes. To be asked before
/// [`Guard::is_lost`] where many are read: only that touches a line of the guard's own.
#[inline]
pub(crate) fn is_any_lost() -> bool {
    LOST.load(Ordering::Acquire) > 0
}

impl Drop for Guard {
    fn drop(&mut self) {
        GUARDED[self.slot].len.store(0, Ordering::Release);
        GUARDED[self.slot].start.store(0, Ordering::Release);
    }
}

fn install() -> libc::sigaction {
    let mut previous = MaybeUninit::<libc::sigaction>::zeroed();
    let mut action = MaybeUninit::<libc::sigaction>::zeroed();
    let ours: extern "C" fn(libc::c_int, *mut libc::siginfo_t, *mut libc::c_void) = on_fault;
    // SAFETY: all zeros is a valid `sigaction`: the default action, no flags, an empty mask.
    let set = unsafe { action.assume_init_mut() };
    set.sa_sigaction = ours as usize;
    set.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
    // SAFETY: both point to a `sigaction`; the handler is async-signal-safe.
    let result = unsafe { libc::sigaction(libc::SIGBUS, set, previous.as_mut_ptr()) };
    assert_eq!(result, 0, "SIGBUS can be handled");
    // SAFETY: zeroed, then filled by the call.
    unsafe { previous.assume_init() }
}

/// Runs on the thread that touched the memory, in the middle of anything: atomics and system calls only.
extern "C" fn on_fault(signal: libc::c_int, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    // SAFETY: the kernel passes a valid `siginfo_t` to a handler with SA_SIGINFO.
    let info_ref = unsafe { &*info };
    // SAFETY: SIGBUS is one of the signals that have an address.
    let address = unsafe { info_ref.si_addr() } as usize;
    for guarded in &GUARDED {
        if let Some((start, len)) = guarded.place()
            && address.wrapping_sub(start) < len
        {
            // Before the zeros are there: who has read one then sees it, on whatever thread.
            guarded.is_lost.store(true, Ordering::SeqCst);
            LOST.fetch_add(1, Ordering::SeqCst);
            if replace(start, len) {
                return;
            }
        }
    }
    pass_on(signal, info, context);
}

/// Puts empty memory where a mapping was; whether that worked.
fn replace(start: usize, len: usize) -> bool {
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED | libc::MAP_NORESERVE;
    let access = libc::PROT_READ | libc::PROT_WRITE;
    // SAFETY: the range is a guarded mapping, which whoever touched it keeps from being unmapped.
    let place = unsafe { libc::mmap(start as *mut libc::c_void, len, access, flags, -1, 0) };
    place != libc::MAP_FAILED
}

fn pass_on(signal: libc::c_int, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    let handler = PREVIOUS.get().map_or(libc::SIG_DFL, |previous| previous.sa_sigaction);
    if handler == libc::SIG_DFL || handler == libc::SIG_IGN {
        // SAFETY: back to the default; the access is repeated on return and ends the process as it should.
        unsafe { libc::signal(signal, libc::SIG_DFL) };
        return;
    }
    // SAFETY: a handler that the process had installed; one without SA_SIGINFO ignores the other arguments.
    let handler = unsafe {
        std::mem::transmute::<usize, extern "C" fn(libc::c_int, *mut libc::siginfo_t, *mut libc::c_void)>(
            handler,
        )
    };
    handler(signal, info, context);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn guests_memory_finds_room_beside_any_number_of_files() {
        // Nobody touches what is guarded here.
        let start = std::ptr::without_provenance_mut(0x1000);
        // SAFETY: no mapping at all, and the handler is not called.
        let files: Vec<Guard> = std::iter::from_fn(|| unsafe { Guard::of_pages(start, 1) }).collect();
        assert!(files.len() <= GUARDS_MAX - GUESTS_ONLY);
        // SAFETY: as above.
        let guests: Vec<Guard> = std::iter::from_fn(|| unsafe { Guard::new(start, 1) }).collect();
        assert!(guests.len() >= GUESTS_ONLY, "{} left for guests", guests.len());
        drop(files);
        // SAFETY: as above.
        assert!(unsafe { Guard::of_pages(start, 1) }.is_some(), "given back");
    }
}
