//! What the kernel tells of processes and of itself.

use std::fs;
use std::io;
use std::time::Duration;

/// The name of a process's program; empty if it is not known.
pub fn program(pid: u32) -> String {
    fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default().trim_end().to_owned()
}

/// How many descriptors this process has open; 0 if it is not known.
pub fn open_descriptors() -> usize {
    fs::read_dir("/proc/self/fd").map_or(0, Iterator::count)
}

/// The host's name; empty if it is not known.
pub fn host_name() -> String {
    fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default().trim_end().to_owned()
}

/// The random number of this boot, as text.
///
/// # Errors
/// A host without `/proc`.
pub fn boot_id() -> io::Result<String> {
    const PATH: &str = "/proc/sys/kernel/random/boot_id";
    let told =
        |error: io::Error| io::Error::new(error.kind(), format!("{PATH}: {error}; mount all of /proc here"));
    Ok(fs::read_to_string(PATH).map_err(told)?.trim().to_owned())
}

/// Makes sure that this process sees itself in `/proc`, by which files are opened as they were found.
///
/// # Errors
/// A host, or a container, without it.
pub fn check() -> io::Result<()> {
    fs::metadata("/proc/self/fd").map(drop).map_err(|error| {
        let told =
            format!("/proc is not mounted here, which vmstrata needs (mount -t proc proc /proc): {error}");
        io::Error::new(error.kind(), told)
    })
}

/// The time since this boot, suspensions of the host included.
pub fn since_boot() -> Duration {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // Not rustix, whose call the simulation does not see.
    // SAFETY: room for the result.
    let done = unsafe { libc::clock_gettime(libc::CLOCK_BOOTTIME, &raw mut time) };
    assert_eq!(done, 0, "every kernel has this clock");
    Duration::new(time.tv_sec.cast_unsigned(), time.tv_nsec as u32)
}
