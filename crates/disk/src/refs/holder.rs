//! Who has a disk's file open, so that a refusal can say what to do about it.
//!
//! The kernel tells that a lock is held, not by whom: locks of this kind belong to open files. So the processes are
//! asked, as far as the user may look at them.

use std::collections::HashSet;
use std::fmt;
use std::path::Path;

use vmstrata_store::{FileId, Holders, proc};

/// What kind of program it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HolderKind {
    /// A running virtual machine.
    Qemu,
    /// `qemu-img`, `qemu-nbd`, `qemu-io` or `qemu-storage-daemon`.
    QemuTool,
    /// A vmstrata server, or another vmstrata command.
    Vmstrata,
    /// Some other program.
    Other,
    /// None that this user may see.
    Unseen,
}

/// A process that has a file open.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Holder {
    /// What it is.
    pub kind: HolderKind,
    /// The program's name as the kernel keeps it, up to 15 bytes; empty for [`HolderKind::Unseen`].
    pub program: String,
    /// Its process id; 0 for [`HolderKind::Unseen`].
    pub pid: u32,
}

impl HolderKind {
    fn of(program: &str) -> Self {
        match program {
            _ if program.starts_with("qemu-system") || program.starts_with("kvm") => Self::Qemu,
            _ if program.starts_with("qemu") => Self::QemuTool,
            _ if program.starts_with("vmstrata") => Self::Vmstrata,
            _ => Self::Other,
        }
    }
}

impl Holder {
    /// Someone who is there and cannot be seen.
    pub(crate) fn unseen() -> Self {
        Self { kind: HolderKind::Unseen, program: String::new(), pid: 0 }
    }

    /// What to do about it.
    pub(crate) fn advice(&self) -> String {
        match self.kind {
            HolderKind::Qemu => format!(
                "it is in use by a running virtual machine, {self}: shut the machine down, or let it have the disk through `vmstrata serve`, which takes snapshots of running disks"
            ),
            HolderKind::QemuTool => format!("it is in use by {self}: wait until that is done, or stop it"),
            HolderKind::Vmstrata => format!(
                "it is in use by {self}: if that is a server, ask it (--control names its socket); otherwise wait until it is done"
            ),
            HolderKind::Other => format!("it is in use by {self}: stop that first"),
            HolderKind::Unseen => {
                format!("it is in use by {self}: `lslocks` or `fuser -v`, run as root, names it")
            }
        }
    }
}

impl fmt::Display for Holder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.kind {
            HolderKind::Unseen => f.write_str("a process that this user may not see"),
            _ => write!(f, "pid {} ({})", self.pid, self.program),
        }
    }
}

/// The other processes that have the file at `path` open, as far as this user may see them.
pub fn holders(path: &Path) -> Vec<Holder> {
    let Ok(file) = path.metadata() else { return Vec::new() };
    holders_of(&HashSet::from([FileId::of(&file)]))
}

/// The other processes that have any of `files` open, as far as this user may see them.
pub(crate) fn holders_of(files: &HashSet<FileId>) -> Vec<Holder> {
    Holders::of(files).pids.into_iter().map(holder).collect()
}

fn holder(pid: u32) -> Holder {
    let program: String = proc::program(pid).chars().map(|c| if c.is_control() { '?' } else { c }).collect();
    Holder { kind: HolderKind::of(&program), program, pid }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn programs_are_told_apart_by_their_names() {
        for (program, kind) in [
            ("qemu-system-x86", HolderKind::Qemu),
            ("qemu-img", HolderKind::QemuTool),
            ("qemu-storage-da", HolderKind::QemuTool),
            ("vmstrata", HolderKind::Vmstrata),
            ("cp", HolderKind::Other),
        ] {
            assert_eq!(HolderKind::of(program), kind);
        }
    }

    #[test]
    fn a_process_with_the_file_open_is_found() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let opened = std::fs::File::open(file.path()).unwrap();
        let mut child = std::process::Command::new("sleep").arg("60").stdin(opened).spawn().unwrap();
        // Until it has become another program, it has the name of this one.
        let found = loop {
            let found = holders(file.path());
            if found.iter().all(|holder| holder.program == "sleep") {
                break found;
            }
            std::thread::yield_now();
        };
        child.kill().unwrap();
        child.wait().unwrap();
        let expected = Holder { kind: HolderKind::Other, program: "sleep".to_owned(), pid: child.id() };
        assert_eq!(found, [expected]);
    }
}
