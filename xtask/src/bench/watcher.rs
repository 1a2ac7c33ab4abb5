//! A thread that watches the machine: one that only the kernel itself and the host can keep from running.

use std::io;
use std::process::{Command, Stdio};
use std::thread::JoinHandle;

use rustix::thread::{CpuSet, gettid, sched_setaffinity};

/// Starts one that has this processor and precedence over all ordinary threads; it returns what it saw.
///
/// # Errors
/// Where this process may not have threads of real-time priority.
pub(super) fn spawn<T: Send + 'static>(
    processor: usize,
    look: impl FnOnce() -> Vec<T> + Send + 'static,
) -> io::Result<JoinHandle<Vec<T>>> {
    let (tell, told) = std::sync::mpsc::channel();
    let watcher = std::thread::spawn(move || {
        let ready = before_all_others(processor);
        let is_ready = ready.is_ok();
        let _ = tell.send(ready);
        if is_ready { look() } else { Vec::new() }
    });
    told.recv().map_err(|_| io::Error::other("a thread that watches the machine ended"))??;
    Ok(watcher)
}

/// Gives the calling thread one processor, and precedence over all ordinary threads.
pub(super) fn before_all_others(processor: usize) -> io::Result<()> {
    let mut only = CpuSet::new();
    only.set(processor);
    sched_setaffinity(None, &only)?;
    let thread = gettid().as_raw_nonzero().to_string();
    let mut change = Command::new("chrt");
    let changed = change.args(["--fifo", "--pid", "1", &thread]).stderr(Stdio::null()).status()?;
    if changed.success() { Ok(()) } else { Err(io::Error::from(io::ErrorKind::PermissionDenied)) }
}
