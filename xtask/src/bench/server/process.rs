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

/// Resident memory of a process in bytes, shared memory (a client's buffers, a guest's RAM) left out.
///
/// # Errors
/// When the process is gone.
pub fn resident_bytes(pid: u32) -> Result<u64> {
    let status = fs::read_to_string(format!("/proc/{pid}/status"))?;
    parse_resident(&status).context("no resident memory in /proc status")
}

fn parse_resident(status: &str) -> Option<u64> {
    let field = |name: &str| -> Option<u64> {
        let line = status.lines().find_map(|line| line.strip_prefix(name))?;
        line.split_whitespace().next()?.parse().ok()
    };
    Some((field("RssAnon:")? + field("RssFile:")?) * 1024)
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

    #[test]
    fn resident_memory_leaves_shared_memory_out() {
        let status = "VmRSS:\t   900 kB\nRssAnon:\t     100 kB\nRssFile:\t  50 kB\nRssShmem:\t 750 kB\n";
        assert_eq!(parse_resident(status), Some(150 * 1024));
        assert_eq!(parse_resident("Name: x\n"), None);
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
