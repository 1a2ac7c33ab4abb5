//! How the kernel's scheduler treats threads that guests wait for.
//!
//! A thread that wakes up for a request, on a processor which something else has just begun to use, waits for the end of
//! that one's slice; the scheduler looks at it once a tick, every 4 ms where there are 250 a second. One that asks for a
//! shorter slice takes over at once (Linux 6.12 and later). Its share of the processor stays what it was.
//!
//! It is a wish: where the kernel does not know or grant it, and where an administrator has chosen another policy,
//! everything stays as it is.

use std::io;
use std::mem;

/// The slice of a thread that guests wait for: longer than a few requests take.
const SLICE_NS: u64 = 100_000;

/// Has the calling thread run soon after it is woken.
pub fn answer_promptly() {
    if let Ok(mut attributes) = scheduling()
        && attributes.sched_policy == libc::SCHED_OTHER as u32
    {
        attributes.sched_runtime = SLICE_NS;
        let _ = set_scheduling(&attributes);
    }
}

/// Of the calling thread.
fn scheduling() -> io::Result<libc::sched_attr> {
    // SAFETY: all zeros is a valid value.
    let mut attributes: libc::sched_attr = unsafe { mem::zeroed() };
    let size = mem::size_of_val(&attributes);
    // SAFETY: the kernel writes at most `size` bytes.
    let result = unsafe { libc::syscall(libc::SYS_sched_getattr, 0, &raw mut attributes, size, 0) };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(attributes) }
}

fn set_scheduling(attributes: &libc::sched_attr) -> io::Result<()> {
    // SAFETY: the kernel reads as many bytes as the structure says that it has.
    let result = unsafe { libc::syscall(libc::SYS_sched_setattr, 0, attributes, 0) };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    use std::thread;

    use super::*;

    /// What a new thread has after `change`.
    fn after(change: impl FnOnce() + Send + 'static) -> libc::sched_attr {
        let changed = move || {
            change();
            scheduling().unwrap()
        };
        thread::spawn(changed).join().unwrap()
    }

    #[test]
    fn a_prompt_thread_has_a_short_slice_and_its_share() {
        let (usual, prompt) = (after(|| ()), after(answer_promptly));
        assert_eq!((prompt.sched_policy, prompt.sched_nice), (usual.sched_policy, usual.sched_nice));
        // Before Linux 6.12 there are no slices.
        if usual.sched_runtime != 0 {
            assert_eq!(prompt.sched_runtime, SLICE_NS);
        }
    }

    #[test]
    fn a_policy_that_an_administrator_chose_stays() {
        let batch = || {
            let mut attributes = scheduling().unwrap();
            attributes.sched_policy = libc::SCHED_BATCH as u32;
            set_scheduling(&attributes).unwrap();
        };
        let prompt = after(move || {
            batch();
            answer_promptly();
        });
        assert_eq!(prompt.sched_policy, libc::SCHED_BATCH as u32);
        assert_ne!(prompt.sched_runtime, SLICE_NS);
    }
}
