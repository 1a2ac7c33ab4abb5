//! What happens when a frontend takes shared memory away that is still mapped here.
//!
//! Touching a page of a file that was truncated raises SIGBUS, which would end the whole server with the
//! disks of all other guests. Files that can be sealed are; for the others (tmpfs, hugetlbfs, memfds made
//! without seals) this module answers the signal: it puts empty private memory in the place of the whole
//! mapping. The guest whose memory it was reads zeros from then on, which its rings do not survive; nobody
//! else notices. System calls on such memory fail by themselves.
//!
//! The handler is the process's, installed with the first mapping. Signals from anywhere else are passed on
//! to the handler that was there before.

use std::mem::MaybeUninit;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};

use vm_memory::MmapRegion;

/// Mappings that can be guarded at a time, in the whole process.
const GUARDS_MAX: usize = 4096;

/// A guarded run of addresses; free when `len` is 0.
struct Guarded {
    start: AtomicUsize,
    len: AtomicUsize,
}

/// Read by the signal handler, hence plain atomics.
static GUARDED: [Guarded; GUARDS_MAX] =
    [const { Guarded { start: AtomicUsize::new(0), len: AtomicUsize::new(0) } }; GUARDS_MAX];

/// The action of the process before ours.
static PREVIOUS: OnceLock<libc::sigaction> = OnceLock::new();

/// A shared mapping whose file may shrink.
#[derive(Debug)]
pub(super) struct GuardedMapping {
    slot: usize,
    // Dropped after the guard was released in `drop`.
    mapping: MmapRegion<()>,
}

impl GuardedMapping {
    /// Guards `mapping`; `None` when too many are.
    pub(super) fn new(mapping: MmapRegion<()>) -> Option<Self> {
        PREVIOUS.get_or_init(install);
        let len = mapping.size();
        let free = |guarded: &Guarded| {
            guarded
                .start
                .compare_exchange(0, mapping.as_ptr() as usize, Ordering::AcqRel, Ordering::Relaxed)
                .is_ok()
        };
        let slot = GUARDED.iter().position(free)?;
        GUARDED[slot].len.store(len, Ordering::Release);
        Some(Self { slot, mapping })
    }

    pub(super) fn as_ptr(&self) -> *mut u8 {
        self.mapping.as_ptr()
    }
}

impl Drop for GuardedMapping {
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
        let (start, len) = (guarded.start.load(Ordering::Acquire), guarded.len.load(Ordering::Acquire));
        if address.wrapping_sub(start) < len && replace(start, len) {
            return;
        }
    }
    pass_on(signal, info, context);
}

/// Puts empty memory where a mapping was; whether that worked.
fn replace(start: usize, len: usize) -> bool {
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED | libc::MAP_NORESERVE;
    let access = libc::PROT_READ | libc::PROT_WRITE;
    // SAFETY: the range is a mapping of ours, which whoever touched it keeps from being unmapped.
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
    use std::fs::File;

    use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
    use vm_memory::FileOffset;

    use super::*;

    #[test]
    fn memory_taken_away_reads_as_zeros() {
        const LEN: usize = 1 << 20;
        let file = File::from(memfd_create("unsealed", MemfdFlags::CLOEXEC).unwrap());
        ftruncate(&file, LEN as u64).unwrap();
        let twin = file.try_clone().unwrap();
        let mapping = MmapRegion::from_file(FileOffset::new(file, 0), LEN).unwrap();
        let guarded = GuardedMapping::new(mapping).unwrap();
        let last = guarded.as_ptr().wrapping_add(LEN - 1);
        // SAFETY: inside the mapping.
        unsafe { last.write_volatile(7) };
        ftruncate(&twin, 0).unwrap();
        // SAFETY: inside the mapping, whose guard makes the access succeed.
        assert_eq!(unsafe { last.read_volatile() }, 0);
        // SAFETY: as above.
        unsafe { last.write_volatile(9) };
        // SAFETY: as above.
        assert_eq!(unsafe { last.read_volatile() }, 9, "and can be written");
        let slot = guarded.slot;
        drop(guarded);
        assert_eq!(GUARDED[slot].len.load(Ordering::Relaxed), 0);
    }
}
