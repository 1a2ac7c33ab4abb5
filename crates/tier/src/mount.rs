//! How the file system of a repository is mounted, and what its errors ask for.
//!
//! Nothing depends on this: it says what a user may want to change.

use std::ffi::OsString;
use std::fs;
use std::os::unix::ffi::OsStringExt as _;
use std::path::{Path, PathBuf};

use rustix::io::Errno;

use crate::error::Error;

/// Attributes that a client keeps for longer than NFS's own default make listings old: seconds.
const ATTRIBUTES_SECONDS_MAX: u64 = 60;

/// A line of `/proc/self/mountinfo`.
#[derive(Debug, PartialEq, Eq)]
struct Mount {
    point: PathBuf,
    /// Such as `nfs4`.
    kind: String,
    /// Those of the mount and of the file system.
    options: Vec<String>,
}

impl Mount {
    /// Linux `Documentation/filesystems/proc.rst` 3.5: `36 35 98:0 /root /point rw,noatime master:1 - ext3 /dev/root rw,errors=continue`.
    fn parse(line: &str) -> Option<Self> {
        let (own, of_file_system) = line.split_once(" - ")?;
        let (mut own, mut of_file_system) = (own.split(' ').skip(4), of_file_system.split(' '));
        let (point, options) = (own.next()?, own.next()?);
        let (kind, _source, more) = (of_file_system.next()?, of_file_system.next()?, of_file_system.next()?);
        let options = options.split(',').chain(more.split(',')).map(str::to_owned).collect();
        Some(Self { point: unescaped(point), kind: kind.to_owned(), options })
    }

    /// The one that a path without links lies in.
    fn of(path: &Path, mountinfo: &str) -> Option<Self> {
        let mounts = mountinfo.lines().filter_map(Self::parse);
        // Of several at one point, the last hides the others.
        mounts
            .filter(|mount| path.starts_with(&mount.point))
            .max_by_key(|mount| mount.point.as_os_str().len())
    }

    fn has(&self, option: &str) -> bool {
        self.options.iter().any(|own| own == option)
    }

    fn is_nfs(&self) -> bool {
        matches!(self.kind.as_str(), "nfs" | "nfs4")
    }

    /// What is to be said of it.
    fn warnings(&self) -> Vec<String> {
        let mut told = Vec::new();
        let mut tell = |what: &str| told.push(format!("{} ({}): {what}", self.point.display(), self.kind));
        if self.has("ro") {
            tell("is mounted read-only: nothing can be published; mount it rw");
        }
        match self.kind.as_str() {
            "nfs" | "nfs4" => {}
            "cifs" | "smb3" | "smbfs" | "9p" | "ncpfs" | "fuse.sshfs" => {
                tell(
                    "is not tested as a repository, which needs hard links and renames that are atomic; use NFS",
                );
            }
            _ => return told,
        }
        if !self.is_nfs() {
            return told;
        }
        if self.has("soft") || self.has("softerr") {
            tell("is mounted soft: a server that is slow for a while fails writes and reads; mount it hard");
        }
        let local = ["nolock", "local_lock=all", "local_lock=flock", "local_lock=posix"];
        if let Some(option) = local.into_iter().find(|option| self.has(option)) {
            tell(&format!(
                "is mounted with {option}: other hosts do not see the locks of tools that open an image; leave it out"
            ));
        }
        if self.has("noac") || self.has("sync") {
            tell("is mounted noac or sync: publishing is slow, and no safer; leave it out");
        }
        let seconds = |option: &String| {
            let (key, value) = option.split_once('=')?;
            let is_one = matches!(key, "actimeo" | "acregmax" | "acdirmax");
            value.parse::<u64>().ok().filter(|seconds| is_one && *seconds > ATTRIBUTES_SECONDS_MAX)
        };
        if let Some(seconds) = self.options.iter().filter_map(seconds).max() {
            tell(&format!(
                "keeps attributes for {seconds} s: listings are as old, which delays take-overs; 60 is enough"
            ));
        }
        told
    }
}

/// With spaces, tabs, newlines and backslashes, which the kernel writes as `\040` and so on.
fn unescaped(text: &str) -> PathBuf {
    let (mut bytes, mut rest) = (Vec::new(), text.as_bytes());
    while let Some((&byte, after)) = rest.split_first() {
        let code = after.get(..3).filter(|_| byte == b'\\').and_then(|code| std::str::from_utf8(code).ok());
        match code.and_then(|code| u8::from_str_radix(code, 8).ok()) {
            Some(code) => {
                bytes.push(code);
                rest = &after[3..];
            }
            None => {
                bytes.push(byte);
                rest = after;
            }
        }
    }
    OsString::from_vec(bytes).into()
}

/// What a user may want to change in how the file system of a repository is mounted.
pub(crate) fn warnings(repository: &Path) -> Vec<String> {
    let mountinfo = fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
    Mount::of(repository, &mountinfo).map(|mount| mount.warnings()).unwrap_or_default()
}

/// What to do about an error of a repository, where its number says so.
pub(crate) fn advice(error: &Error) -> Option<&'static str> {
    let Error::Repository(error) = error else { return None };
    let advice = match Errno::from_io_error(&error.source)? {
        Errno::ACCESS | Errno::PERM if rustix::process::geteuid().is_root() => {
            "root is refused, as an NFS server with root_squash does: run vmstrata as the user who owns the directory, or export it with no_root_squash"
        }
        Errno::ACCESS | Errno::PERM => {
            "this user may not: make the directory, and what is in it, this user's own"
        }
        Errno::DQUOT => "the quota there is used up: raise it, or delete something",
        Errno::NOSPC => "the file system there is full: make room",
        Errno::ROFS => "the file system there is read-only: mount it rw, or have it exported so",
        Errno::STALE => {
            "the NAS does not know the directory any more, which was restored, moved or exported anew: unmount and mount it again"
        }
        _ => return None,
    };
    Some(advice)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn told(options: &str, kind: &str, more: &str) -> String {
        let mountinfo = format!(
            "22 1 8:1 / / rw - ext4 /dev/sda1 rw\n36 22 0:45 / /mnt/my\\040nas {options} shared:1 - {kind} nas:/vms {more}\n"
        );
        Mount::of(Path::new("/mnt/my nas/vms/web.qcow2.tier"), &mountinfo).unwrap().warnings().join("\n")
    }

    #[test]
    fn mounts_that_lose_writes_or_hide_locks_are_told_of() {
        assert_eq!(told("rw,relatime", "nfs4", "rw,vers=4.2,hard,acdirmax=60,local_lock=none"), "");
        assert_eq!(told("rw", "ext4", "rw"), "");
        for (options, kind, more, part) in [
            ("rw", "nfs", "rw,soft,timeo=600", "/mnt/my nas (nfs): is mounted soft"),
            ("rw", "nfs4", "rw,softerr", "soft"),
            ("rw", "nfs", "rw,hard,nolock,local_lock=all", "nolock"),
            ("rw", "nfs4", "rw,hard,noac", "noac"),
            ("rw", "nfs4", "rw,hard,acregmax=600", "600 s"),
            ("ro,relatime", "nfs4", "rw,hard", "read-only"),
            ("rw", "ext4", "ro", "read-only"),
            ("rw", "cifs", "rw", "not tested"),
        ] {
            assert!(told(options, kind, more).contains(part), "{}", told(options, kind, more));
        }
    }

    #[test]
    fn a_path_is_in_the_innermost_mount() {
        let mountinfo = "1 1 8:1 / / rw - ext4 a rw\n2 1 0:4 / /mnt rw - nfs b rw,soft\n3 2 0:5 / /mnt/x rw - nfs4 c rw\n";
        let kind = |path: &str| Mount::of(Path::new(path), mountinfo).unwrap().kind;
        assert_eq!([kind("/mnt/web"), kind("/mnt/x/web"), kind("/mntx")], ["nfs", "nfs4", "ext4"]);
    }

    #[test]
    fn errors_of_a_nas_say_what_to_do() {
        let of = |number: Errno| {
            let failed = vmstrata_repo::Error::of("/nas", "listing")(number.into());
            advice(&failed.into())
        };
        for (number, part) in [
            (Errno::DQUOT, "quota"),
            (Errno::NOSPC, "full"),
            (Errno::ROFS, "read-only"),
            (Errno::STALE, "mount it again"),
            (Errno::ACCESS, ""),
        ] {
            assert!(of(number).is_some_and(|advice| advice.contains(part)), "{number}");
        }
        assert_eq!(of(Errno::IO), None);
        // The host's own.
        let local = Error::of_file(Path::new("/var/lib/web"), "write")(Errno::NOSPC.into());
        assert_eq!(advice(&local), None);
    }
}
