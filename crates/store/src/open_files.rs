//! Which files a process has open, asked of the kernel alone.
//!
//! `stat` through `/proc/PID/fd` asks the file system that the file lies on, and one on a FUSE or NFS server that hangs never
//! answers. `/proc/PID/fdinfo` has the inode and the mount of an open file, and `/proc/PID/mountinfo` the device of a mount:
//! the kernel says both from memory.

use std::cell::OnceCell;
use std::collections::HashMap;
use std::fs;
use std::io;
use std::path::PathBuf;

use crate::FileId;

/// File systems whose files have another device number than their mount: an inode number has to do.
const ANOTHER_DEVICE: [&str; 3] = ["btrfs", "overlay", "bcachefs"];
/// Where device nodes lie: the kernel's own, which always answer.
const OF_NODES: [&str; 2] = ["devtmpfs", "tmpfs"];

/// The files that one process has open.
#[derive(Debug)]
pub struct OpenFiles {
    process: PathBuf,
    files: Vec<OpenFile>,
    mounts: OnceCell<HashMap<u64, Mount>>,
}

#[derive(Clone, Copy, Debug)]
struct OpenFile {
    descriptor: u32,
    inode: u64,
    mount: u64,
}

#[derive(Clone, Copy, Debug)]
struct Mount {
    device: u64,
    has_other_devices: bool,
    has_nodes: bool,
}

/// The other processes that have one of `files` open.
#[derive(Clone, Debug, Default)]
pub struct Holders {
    /// Their numbers.
    pub pids: Vec<u32>,
    /// Those that this user may not look at: they may be such.
    pub unseen: Vec<u32>,
}

impl Holders {
    /// Those of now.
    pub fn of<'a>(files: impl IntoIterator<Item = &'a FileId> + Clone) -> Self {
        let mut found = Self::default();
        let Ok(processes) = fs::read_dir("/proc") else { return found };
        let pids = processes.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse::<u32>().ok());
        for pid in pids.filter(|&pid| pid != std::process::id()) {
            match OpenFiles::of(pid) {
                Ok(open) if files.clone().into_iter().any(|&file| open.count(file) > 0) => {
                    found.pids.push(pid)
                }
                Ok(_) => {}
                // One that ended meanwhile has nothing open.
                Err(error) if error.kind() == io::ErrorKind::PermissionDenied => found.unseen.push(pid),
                Err(_) => {}
            }
        }
        found
    }
}

impl OpenFiles {
    /// Those of a process, as far as this user may see them.
    ///
    /// # Errors
    /// A process that is gone, or that this user may not look at.
    pub fn of(pid: u32) -> io::Result<Self> {
        Self::read(PathBuf::from(format!("/proc/{pid}")))
    }

    /// Those of this process.
    ///
    /// # Errors
    /// A host without `/proc`.
    pub fn own() -> io::Result<Self> {
        Self::read(PathBuf::from("/proc/self"))
    }

    fn read(process: PathBuf) -> io::Result<Self> {
        let descriptors = fs::read_dir(process.join("fdinfo"))?;
        // A descriptor may be closed meanwhile.
        let files = descriptors.filter_map(|entry| {
            let entry = entry.ok()?;
            let descriptor = entry.file_name().to_str()?.parse().ok()?;
            let info = fs::read_to_string(entry.path()).ok()?;
            Some(OpenFile { descriptor, inode: field(&info, "ino:")?, mount: field(&info, "mnt_id:")? })
        });
        Ok(Self { files: files.collect(), process, mounts: OnceCell::new() })
    }

    /// How often the process has `file` open.
    pub fn count(&self, file: FileId) -> usize {
        self.files.iter().filter(|open| self.is(open, file)).count()
    }

    fn is(&self, open: &OpenFile, file: FileId) -> bool {
        let link = || self.process.join(format!("fd/{}", open.descriptor));
        let mount = || {
            let read = || mounts(&fs::read_to_string(self.process.join("mountinfo")).unwrap_or_default());
            self.mounts.get_or_init(read).get(&open.mount)
        };
        if file.is_device() {
            // Its nodes have inodes of their own.
            return mount().is_some_and(|mount| mount.has_nodes)
                && fs::metadata(link()).is_ok_and(|found| FileId::of(&found) == file);
        }
        open.inode == file.ino
            && match mount() {
                Some(mount) => mount.device == file.dev || mount.has_other_devices,
                // A mount that the process does not see: the kernel's own, of memory, pipes and sockets; or a detached one.
                None => fs::read_link(link())
                    .is_ok_and(|path| path.is_absolute() && !path.to_string_lossy().starts_with("/memfd:")),
            }
    }
}

/// A number in a text of lines `name:\tnumber`.
fn field(text: &str, name: &str) -> Option<u64> {
    text.lines().find_map(|line| line.strip_prefix(name))?.trim().parse().ok()
}

/// Mounts by their numbers, of a `mountinfo`.
fn mounts(text: &str) -> HashMap<u64, Mount> {
    text.lines().filter_map(mount).collect()
}

fn mount(line: &str) -> Option<(u64, Mount)> {
    let (place, kind) = line.split_once(" - ")?;
    let mut fields = place.split(' ');
    let number = fields.next()?.parse().ok()?;
    let (major, minor) = fields.nth(1)?.split_once(':')?;
    let device = rustix::fs::makedev(major.parse().ok()?, minor.parse().ok()?);
    let kind = kind.split(' ').next()?;
    let (has_other_devices, has_nodes) = (ANOTHER_DEVICE.contains(&kind), OF_NODES.contains(&kind));
    Some((number, Mount { device, has_other_devices, has_nodes }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn open_files_are_counted_without_being_asked() {
        let (file, other) =
            (tempfile::NamedTempFile::new().unwrap(), tempfile::NamedTempFile::new().unwrap());
        let id = |path| FileId::of(&fs::metadata(path).unwrap());
        let open = [(); 2].map(|()| fs::File::open(file.path()).unwrap());
        let own = OpenFiles::own().unwrap();
        assert_eq!(own.count(id(file.path())), 1 + open.len());
        assert_eq!(own.count(id(other.path())), 1);
        let id = id(other.path());
        drop(other);
        assert_eq!(OpenFiles::own().unwrap().count(id), 0);
        assert!(OpenFiles::of(u32::MAX).is_err());
    }

    #[test]
    fn mounts_are_known_by_device_and_some_file_systems_by_inode_alone() {
        let text = "36 35 98:0 /mnt1 /mnt2 rw,noatime master:1 - ext3 /dev/root rw,errors=continue\n\
                    37 35 0:45 / /a\\040b rw - btrfs /dev/vdb rw\n\
                    broken\n";
        let found = mounts(text);
        assert_eq!(found.len(), 2);
        assert_eq!((found[&36].device, found[&36].has_other_devices), (rustix::fs::makedev(98, 0), false));
        assert!(found[&37].has_other_devices);
    }
}
