//! What the kernel tells of processes and of itself.

use std::fs;
use std::io;

/// The name of a process's program; empty if it is not known.
pub fn program(pid: u32) -> String {
    fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default().trim_end().to_owned()
}

/// How many descriptors this process has open; 0 if it is not known.
pub fn open_descriptors() -> usize {
    fs::read_dir("/proc/self/fd").map_or(0, Iterator::count)
}

/// The random number of this boot, as text.
///
/// # Errors
/// A host without `/proc`.
pub fn boot_id() -> io::Result<String> {
    Ok(fs::read_to_string("/proc/sys/kernel/random/boot_id")?.trim().to_owned())
}
