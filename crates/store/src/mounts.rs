//! File systems that do not answer: of other hosts, and of programs.
//!
//! Whoever looks through directories that are not its own meets mounts that have nothing to do with it, and may hang. A path that
//! leads onto one is told here without a question to it: the kernel's list of mounts has their places. Which of them answer, threads
//! of their own find out; one that waits for a mount waits alone.

use std::ffi::OsString;
use std::os::unix::ffi::OsStringExt as _;
use std::path::{Component, Path, PathBuf};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use rustix::fs::{AtFlags, CWD, StatxFlags};

/// Kinds whose names begin so; those of the kernel's own control files do not count.
const REMOTE: [&str; 9] = ["fuse", "nfs", "cifs", "smb3", "ceph", "9p", "afs", "lustre", "autofs"];
const LOCAL: [&str; 2] = ["fusectl", "nfsd"];
/// Links followed before a path is given up.
const LINKS_MAX: usize = 40;

/// How long a file system may take to answer.
const PATIENCE: Duration = Duration::from_secs(1);

/// Mounts that a thread has asked, and that have not answered yet.
static ASKED: Mutex<Vec<PathBuf>> = Mutex::new(Vec::new());

/// Where file systems are mounted that do not answer.
#[derive(Clone, Debug, Default)]
pub struct SilentMounts(Vec<PathBuf>);

impl SilentMounts {
    /// Those of now, but for those that one of the directories `used` lies on: who uses them waits for them anyway. Waits for a
    /// second where there are some.
    pub fn but<P: AsRef<Path>>(used: impl IntoIterator<Item = P>) -> Self {
        let mut mounts = remote(&std::fs::read("/proc/self/mountinfo").unwrap_or_default());
        if mounts.is_empty() {
            return Self(mounts);
        }
        for directory in used {
            if let Ok(directory) = directory.as_ref().canonicalize() {
                mounts.retain(|mount| !directory.starts_with(mount));
            }
        }
        Self(silent(mounts))
    }

    /// Whether an absolute path, or a symbolic link on its way, leads onto one of them.
    pub fn hold(&self, path: &Path) -> bool {
        if self.0.is_empty() {
            return false;
        }
        let parts = |path: &Path| -> Vec<OsString> {
            path.components().rev().map(|part| part.as_os_str().to_owned()).collect()
        };
        let (mut here, mut left, mut links) = (PathBuf::from("/"), parts(path), 0);
        while let Some(part) = left.pop() {
            match Path::new(&part).components().next() {
                Some(Component::ParentDir) => drop(here.pop()),
                Some(Component::Normal(name)) => here.push(name),
                Some(Component::RootDir) => here = PathBuf::from("/"),
                _ => continue,
            }
            if self.0.contains(&here) {
                return true;
            }
            let Ok(found) = here.symlink_metadata() else { return false };
            if found.is_symlink() {
                links += 1;
                let (Ok(target), true) = (here.read_link(), links <= LINKS_MAX) else { return false };
                here.pop();
                left.extend(parts(&target));
            }
        }
        false
    }
}

/// Those of `mounts` that do not answer in time.
fn silent(mut mounts: Vec<PathBuf>) -> Vec<PathBuf> {
    let (tell, answers) = mpsc::channel();
    let mut asked = 0;
    for mount in &mounts {
        let mut pending = ASKED.lock();
        if !pending.contains(mount) {
            pending.push(mount.clone());
            let (mount, tell) = (mount.clone(), tell.clone());
            let ask = move || {
                // Not what the kernel remembers. An error is an answer.
                let flags = AtFlags::STATX_FORCE_SYNC;
                let _ = rustix::fs::statx(CWD, &mount, flags, StatxFlags::BASIC_STATS);
                ASKED.lock().retain(|pending| *pending != mount);
                // Nobody may be waiting any more.
                let _ = tell.send(mount);
            };
            asked += usize::from(thread::Builder::new().name("ask-mount".to_owned()).spawn(ask).is_ok());
        }
    }
    let deadline = Instant::now() + PATIENCE;
    while asked > 0
        && let Ok(answered) = answers.recv_timeout(deadline.saturating_duration_since(Instant::now()))
    {
        mounts.retain(|mount| *mount != answered);
        asked -= 1;
    }
    mounts
}

/// The places of remote file systems in a `mountinfo`.
fn remote(mountinfo: &[u8]) -> Vec<PathBuf> {
    let lines = mountinfo.split(|byte| *byte == b'\n');
    lines
        .filter_map(|line| {
            let at = line.windows(3).position(|part| part == b" - ")?;
            let kind = std::str::from_utf8(line[at + 3..].split(|byte| *byte == b' ').next()?).ok()?;
            let is_remote = REMOTE.iter().any(|remote| kind.starts_with(remote)) && !LOCAL.contains(&kind);
            let place = line[..at].split(|byte| *byte == b' ').nth(4)?;
            is_remote.then(|| unescape(place))
        })
        .collect()
}

/// Blanks and the like stand as a backslash with three octal digits.
fn unescape(place: &[u8]) -> PathBuf {
    let mut bytes = Vec::with_capacity(place.len());
    let mut rest = place;
    while let [first, after @ ..] = rest {
        rest = after;
        let digits = after.get(..3).and_then(|digits| std::str::from_utf8(digits).ok());
        match digits.and_then(|digits| u8::from_str_radix(digits, 8).ok()) {
            Some(byte) if *first == b'\\' => {
                bytes.push(byte);
                rest = &after[3..];
            }
            _ => bytes.push(*first),
        }
    }
    PathBuf::from(OsString::from_vec(bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn remote_file_systems_are_known_by_their_kinds() {
        let text = b"36 35 98:0 / /srv rw - ext4 /dev/vda rw\n\
                     37 36 0:45 / /srv/na\\040s rw shared:1 - nfs4 nas:/x rw\n\
                     38 36 0:46 / /sys/fs/fuse/connections rw - fusectl fusectl rw\n\
                     39 36 0:47 / /srv/s rw - fuse.sshfs host: rw\n";
        assert_eq!(remote(text), [Path::new("/srv/na s"), Path::new("/srv/s")]);
        assert_eq!(unescape(b"a\\134b\\9"), Path::new("a\\b\\9"));
    }

    #[test]
    fn a_path_that_leads_onto_one_is_told_by_its_links() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path().canonicalize().unwrap();
        std::fs::create_dir_all(root.join("nas/images")).unwrap();
        std::fs::write(root.join("local"), "").unwrap();
        let link = |target: &str, name: &str| std::os::unix::fs::symlink(target, root.join(name)).unwrap();
        link("nas", "link");
        link("./link/../link/images", "second");
        link("loop", "loop");
        let mounts = SilentMounts(vec![root.join("nas")]);
        for held in ["nas", "nas/images", "nas/gone", "link", "link/images", "second", "local/../nas"] {
            assert!(mounts.hold(&root.join(held)) || held.starts_with("local"), "{held}");
        }
        for not in ["local", "gone", "loop", "nas2"] {
            assert!(!mounts.hold(&root.join(not)), "{not}");
        }
        assert!(!SilentMounts::default().hold(&root.join("nas")));
    }
}
