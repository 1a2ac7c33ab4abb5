//! Whether the QEMU of libvirt can connect to a socket.
//!
//! A guest whose QEMU may not connect does not fail: with `reconnect` QEMU tries again without end, and `virsh start` waits for it
//! and prints nothing. So the server looks when it makes the socket.

use std::ffi::{CString, OsStr};
use std::fs::{Metadata, metadata};
use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use nix::unistd::{Gid, Group, Uid, User, getgrouplist};
use rustix::io::Errno;

/// The users that libvirt runs QEMU as, unless its qemu.conf says otherwise: Debian's and Fedora's.
const LIBVIRTS: [&str; 2] = ["libvirt-qemu", "qemu"];

/// A user with its groups.
#[derive(Debug)]
struct Account {
    name: String,
    uid: u32,
    groups: Vec<u32>,
}

/// What keeps a user from a socket.
#[derive(Debug, PartialEq, Eq)]
struct Obstacle {
    /// The socket, or a directory on the way to it.
    path: PathBuf,
    is_dir: bool,
    owner: u32,
    group: u32,
    mode: u32,
}

/// Logs a warning if this host's libvirt runs QEMU as a user that cannot connect to the socket at `path`.
pub fn warn_if_libvirt_is_kept_out(path: &Path) {
    let Some(user) = Account::of_libvirts_qemu() else { return };
    match user.kept_out_by(path) {
        Ok(Some(obstacle)) => tracing::warn!("{}", obstacle.to_text(&user, path)),
        Ok(None) => {}
        Err(error) => tracing::debug!(path = %path.display(), %error, "cannot tell who can connect"),
    }
}

impl Account {
    fn of_libvirts_qemu() -> Option<Self> {
        let found = LIBVIRTS.iter().find_map(|name| User::from_name(name).ok().flatten())?;
        let name = CString::new(found.name.clone()).ok()?;
        // As libvirt does when it starts a guest.
        let groups = getgrouplist(&name, found.gid).ok()?;
        let groups = groups.into_iter().map(Gid::as_raw).collect();
        Some(Self { name: found.name, uid: found.uid.as_raw(), groups })
    }

    /// The first thing on the way to `path`, from the root on, that this user may not pass.
    ///
    /// An access list may let in anybody, and is not read: what has one is taken to let the user in.
    fn kept_out_by(&self, path: &Path) -> io::Result<Option<Obstacle>> {
        let path = path.canonicalize()?;
        let mut way: Vec<&Path> = path.ancestors().collect();
        way.reverse();
        for part in way {
            let found = metadata(part)?;
            let needed = if found.is_dir() { 0o1 } else { 0o2 };
            if !self.has(&found, needed) && !has_access_list(part) {
                return Ok(Some(Obstacle {
                    path: part.to_owned(),
                    is_dir: found.is_dir(),
                    owner: found.uid(),
                    group: found.gid(),
                    mode: found.mode() & 0o777,
                }));
            }
        }
        Ok(None)
    }

    fn has(&self, found: &Metadata, permission: u32) -> bool {
        let class = if self.uid == found.uid() {
            6
        } else if self.groups.contains(&found.gid()) {
            3
        } else {
            0
        };
        self.uid == 0 || found.mode() >> class & permission != 0
    }
}

fn has_access_list(path: &Path) -> bool {
    let read = rustix::fs::getxattr(path, OsStr::new("system.posix_acl_access"), &mut [0_u8; 0]);
    !matches!(read, Err(Errno::NODATA | Errno::NOTSUP))
}

impl Obstacle {
    fn to_text(&self, user: &Account, socket: &Path) -> String {
        let Self { path, is_dir, mode, .. } = self;
        let (owner, group) = (name_of_user(self.owner), name_of_group(self.group));
        let (user, needed) = (&user.name, if *is_dir { 0o010 } else { 0o020 });
        let join = format!("make it a member of the group: usermod -aG {group} {user}");
        let remedy = match (is_dir, mode & needed != 0) {
            // A group that root is in is nothing to join.
            (_, true) if self.group != 0 => join,
            (true, _) => format!("put the socket into a directory that {user} can enter"),
            (false, _) => {
                format!("say group=GROUP with a group of {user}, or, of a server of root, owner={user}")
            }
        };
        let at = if *is_dir { format!(": it may not enter {}", path.display()) } else { String::new() };
        format!(
            "libvirt runs QEMU as {user}, which may not connect to {}{at} ({owner}:{group}, {mode:04o}); \
             a guest of qemu:///system would wait for its disk without a message; {remedy}",
            socket.display()
        )
    }
}

fn name_of_user(uid: u32) -> String {
    User::from_uid(Uid::from_raw(uid)).ok().flatten().map_or_else(|| uid.to_string(), |user| user.name)
}

fn name_of_group(gid: u32) -> String {
    Group::from_gid(Gid::from_raw(gid)).ok().flatten().map_or_else(|| gid.to_string(), |group| group.name)
}

#[cfg(test)]
mod tests {
    use std::fs::{Permissions, set_permissions};
    use std::os::unix::fs::PermissionsExt as _;
    use std::os::unix::net::UnixListener;

    use super::*;

    /// A user that no host has.
    fn account(groups: &[u32]) -> Account {
        Account { name: "stranger".into(), uid: 61_003, groups: groups.to_vec() }
    }

    #[test]
    fn each_directory_on_the_way_and_the_socket_must_let_the_user_in() {
        let dir = tempfile::tempdir().unwrap();
        let (inner, socket) = (dir.path().join("inner"), dir.path().join("inner/socket"));
        std::fs::create_dir(&inner).unwrap();
        let _listener = UnixListener::bind(&socket).unwrap();
        let group = metadata(&socket).unwrap().gid();
        let member = account(&[group]);
        for (modes, stranger_kept_out, member_kept_out) in [
            ([0o755, 0o755, 0o666], None, None),
            ([0o755, 0o755, 0o600], Some("inner/socket"), Some("inner/socket")),
            ([0o755, 0o755, 0o660], Some("inner/socket"), None),
            // A member is judged by the group's permissions alone.
            ([0o755, 0o755, 0o606], None, Some("inner/socket")),
            ([0o755, 0o750, 0o666], Some("inner"), None),
            ([0o700, 0o755, 0o666], Some(""), Some("")),
        ] {
            for (path, mode) in [dir.path(), &inner, &socket].into_iter().zip(modes) {
                set_permissions(path, Permissions::from_mode(mode)).unwrap();
            }
            let kept_out = |user: &Account| user.kept_out_by(&socket).unwrap().map(|it| it.path);
            let expected = |part: Option<&str>| part.map(|part| dir.path().join(part).components().collect());
            assert_eq!(kept_out(&account(&[])), expected(stranger_kept_out), "{modes:?}");
            assert_eq!(kept_out(&member), expected(member_kept_out), "{modes:?}");
        }
    }

    #[test]
    fn a_warning_names_user_path_and_remedy() {
        let at = |path: &str, is_dir, group, mode| {
            let obstacle = Obstacle { path: path.into(), is_dir, owner: 0, group, mode };
            obstacle.to_text(&account(&[]), Path::new("/run/web.sock"))
        };
        let socket = at("/run/web.sock", false, 0, 0o600);
        assert!(socket.contains("QEMU as stranger") && socket.contains("(root:root, 0600)"), "{socket}");
        assert!(socket.contains("owner=stranger"), "{socket}");
        let shut = at("/run", true, 0, 0o700);
        assert!(
            shut.contains("it may not enter /run ") && shut.contains("that stranger can enter"),
            "{shut}"
        );
        let members = at("/run", true, 61_010, 0o750);
        assert!(members.contains("usermod -aG 61010 stranger"), "{members}");
    }
}
