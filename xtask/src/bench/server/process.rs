//! What can be done to a process whatever it is: end it, weigh it, and give it files to open.

use std::fs;
use std::path::Path;
use std::process::Child;

use anyhow::{Context, Result};

/// Sends SIGTERM to a child.
///
/// # Errors
/// When it is gone already.
pub fn terminate(child: &Child) -> Result<()> {
    let pid = rustix::process::Pid::from_child(child);
    Ok(rustix::process::kill_process(pid, rustix::process::Signal::TERM)?)
}

/// What a process takes of the host's memory, in bytes: its resident memory and the page tables for it. Left out are shared
/// memory (a client's buffers, a guest's RAM) and the pages of files that it has mapped only to read them, as vmstrata has
/// layers: those are the host's page cache, whoever reads the files and however.
///
/// # Errors
/// When the process is gone.
pub fn resident_bytes(pid: u32) -> Result<u64> {
    let status = fs::read_to_string(format!("/proc/{pid}/status"))?;
    let mappings = fs::read_to_string(format!("/proc/{pid}/smaps"))?;
    let all = parse_resident(&status).context("no resident memory in /proc status")?;
    Ok(all.saturating_sub(parse_cached(&mappings)))
}

fn parse_resident(status: &str) -> Option<u64> {
    ["RssAnon:", "RssFile:", "VmPTE:"]
        .iter()
        .map(|name| status.lines().find_map(|line| kib(line, name)))
        .sum()
}

/// Bytes of a line of /proc that gives KiB by this name.
fn kib(line: &str, name: &str) -> Option<u64> {
    let value: u64 = line.strip_prefix(name)?.split_whitespace().next()?.parse().ok()?;
    Some(value * 1024)
}

/// Resident bytes of shared mappings that can only be read.
fn parse_cached(smaps: &str) -> u64 {
    let mut is_cache = false;
    let mut bytes = 0;
    for line in smaps.lines() {
        // A mapping begins with its addresses, its access and more; then come its figures, each by a name.
        match line.split_whitespace().nth(1).map(str::as_bytes) {
            Some(b"r--s") => is_cache = true,
            Some([_, _, _, b's' | b'p']) => is_cache = false,
            _ => {}
        }
        bytes += kib(line, "Rss:").filter(|_| is_cache).unwrap_or(0);
    }
    bytes
}

/// Lets this program's children hold as many files as the system allows: QEMU opens every layer at once.
///
/// # Errors
/// When the limit cannot be set.
pub fn raise_file_limit() -> Result<()> {
    let hard = rustix::process::getrlimit(rustix::process::Resource::Nofile).maximum;
    let limit = rustix::process::Rlimit { current: hard, maximum: hard };
    Ok(rustix::process::setrlimit(rustix::process::Resource::Nofile, limit)?)
}

/// Whether a process listens at a unix socket. The file alone says little: it is there a moment before, and is left by who
/// was killed. Connecting says more, but a server of one client would take that for the client.
pub(super) fn listens(socket: &Path) -> Result<bool> {
    /// The kernel's `__SO_ACCEPTCON`.
    const ACCEPTS: &str = "00010000";
    let name = socket.to_str().context("a path that is text")?;
    let sockets = fs::read_to_string("/proc/net/unix")?;
    // Num RefCount Protocol Flags Type St Inode Path
    let accepts = |line: &str| line.split_whitespace().nth(3) == Some(ACCEPTS);
    Ok(sockets.lines().any(|line| line.ends_with(&format!(" {name}")) && accepts(line)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::cached::Cached;

    #[test]
    fn resident_memory_leaves_shared_memory_out() {
        let status = "VmRSS:\t   900 kB\nVmPTE:\t 7 kB\nRssAnon:\t     100 kB\nRssFile:\t  50 kB\nRssShmem:\t 750 kB\n";
        assert_eq!(parse_resident(status), Some(157 * 1024));
        assert_eq!(parse_resident("Name: x\nRssAnon:\t 1 kB\n"), None);
    }

    #[test]
    fn resident_memory_leaves_files_out_that_are_only_read() {
        let dir = tempfile::tempdir_in("/var/tmp").unwrap();
        let path = dir.path().join("file");
        fs::write(&path, vec![1; 64 << 20]).unwrap();
        let pid = std::process::id();
        let all = || parse_resident(&fs::read_to_string("/proc/self/status").unwrap()).unwrap();
        let before = (all(), resident_bytes(pid).unwrap());
        let mapped = Cached::new(&[vec![path]]).unwrap();
        let after = (all(), resident_bytes(pid).unwrap());
        drop(mapped);
        assert!(after.0 > before.0 + (60 << 20), "{before:?} {after:?}");
        assert!(after.1 < before.1 + (16 << 20), "{before:?} {after:?}");
    }

    #[test]
    fn only_a_bound_socket_that_accepts_counts() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("socket");
        assert!(!listens(&path).unwrap());
        let listener = std::os::unix::net::UnixListener::bind(&path).unwrap();
        assert!(listens(&path).unwrap());
        drop(listener);
        assert!(path.exists() && !listens(&path).unwrap());
    }
}
