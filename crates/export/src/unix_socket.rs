//! Unix sockets to listen on, with the owner, group and permissions that they shall have from the first moment on.

use std::ffi::OsStr;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::net::UnixListener;
use std::path::Path;

use nix::unistd;
use rustix::fs::{
    AtFlags, Gid, Mode, OFlags, RenameFlags, Uid, chmodat, chownat, fchmod, fstat, mkdirat, open, openat,
    renameat_with, unlinkat,
};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, bind, listen, socket_with};
use rustix::process::{getegid, geteuid, getgroups, umask};
use rustix::thread::{CapabilitySet, UnshareFlags, capabilities, unshare_unsafe};

/// Clients that may wait to be accepted.
const BACKLOG: i32 = 128;

/// Who may connect to a unix socket beside root. Such a client can read and write the disk.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SocketAccess {
    /// The owner of the socket, by name or number; that of the process unless said.
    pub owner: Option<String>,
    /// The group of the socket, by name or number; that of the process, or of the directory, if it is not said.
    pub group: Option<String>,
    /// The permissions of the socket. Unless they are said, the owner may connect, and the group if that is said.
    pub mode: Option<u32>,
}

impl SocketAccess {
    /// Whether this process can make a socket with this access.
    ///
    /// # Errors
    /// A user or group that there is not, or that this process may not give files to.
    pub fn check(&self) -> io::Result<()> {
        self.ids().map(drop)
    }

    fn ids(&self) -> io::Result<(Option<Uid>, Option<Gid>)> {
        let owner = self.owner.as_deref().map(owner_id).transpose()?;
        Ok((owner, self.group.as_deref().map(group_id).transpose()?))
    }

    fn mode(&self) -> Mode {
        let unsaid = if self.group.is_some() { 0o660 } else { 0o600 };
        Mode::from_raw_mode(self.mode.unwrap_or(unsaid))
    }
}

/// Listens at `path`, where there must be nothing, and lets in whom `access` names; accepts without waiting.
///
/// # Errors
/// As [`SocketAccess::check`]; whatever else the system reports.
pub(crate) fn listen_at(path: &Path, access: &SocketAccess) -> io::Result<UnixListener> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    let address = SocketAddrUnix::new(path)?;
    match access.ids()? {
        (None, None) => {
            bind_with_mode(&socket, &address, access.mode())?;
            listen(&socket, BACKLOG)?;
        }
        ids => listen_for(&socket, path, ids, access.mode())?,
    }
    Ok(socket.into())
}

/// Binds a socket that has these permissions at once.
///
/// Linux gives the file the mode of its socket, less the umask. A change by path after that would leave a moment with other
/// permissions, and could meet another file. Where a thread may have no umask of its own (in some containers), the permissions are
/// what the umask leaves of those asked for.
fn bind_with_mode(socket: &OwnedFd, address: &SocketAddrUnix, mode: Mode) -> io::Result<()> {
    fchmod(socket, mode)?;
    let bound = std::thread::scope(|scope| {
        // The umask belongs to the process, unless a thread has its own.
        let bind = || {
            // SAFETY: descriptors stay shared; the thread gets a copy of the umask and of the directories it is in.
            match unsafe { unshare_unsafe(UnshareFlags::FS) } {
                Ok(()) => drop(umask(Mode::empty())),
                Err(errno) => tracing::debug!(%errno, "the umask applies to sockets"),
            }
            bind(socket, address)
        };
        scope.spawn(bind).join().expect("it does not panic")
    });
    Ok(bound?)
}

/// Listens at `path` with a socket of this owner and group.
///
/// A socket has owner and group of the process that binds it, and can get others by its name only. So it is bound in a directory
/// that no other user can enter, gets its owner, group and permissions there, and is moved to `path` when it listens: whoever finds it
/// there finds it as it stays. (What lists sockets by the paths they were bound at, as ss(8) does, shows the name alone.)
fn listen_for(
    socket: &OwnedFd,
    path: &Path,
    (owner, group): (Option<Uid>, Option<Gid>),
    mode: Mode,
) -> io::Result<()> {
    let name = path.file_name().ok_or(Errno::INVAL)?;
    let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let parent = open(parent, OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())?;
    let private = PrivateDir::make_in(parent)?;
    // By its descriptor: its path may be longer than an address may be, and lead elsewhere by now.
    let address = Path::new("/proc/self/fd").join(private.dir.as_raw_fd().to_string()).join(BOUND);
    bind(socket, &SocketAddrUnix::new(&address)?)?;
    chmodat(&private.dir, BOUND, mode, AtFlags::empty())?;
    // Last: only the owner may change the permissions.
    chownat(&private.dir, BOUND, owner, group, AtFlags::SYMLINK_NOFOLLOW)?;
    listen(socket, BACKLOG)?;
    private.give_out(name)
}

/// What a socket is called in a [`PrivateDir`].
const BOUND: &str = "socket";

/// A directory that only its owner can enter; it is removed when this is dropped.
#[derive(Debug)]
struct PrivateDir {
    parent: OwnedFd,
    name: String,
    dir: OwnedFd,
}

impl PrivateDir {
    fn make_in(parent: OwnedFd) -> io::Result<Self> {
        let mut random = [0; 8];
        rustix::rand::getrandom(&mut random, rustix::rand::GetRandomFlags::empty())?;
        let name = format!(".vmstrata-{:016x}", u64::from_ne_bytes(random));
        mkdirat(&parent, &name, Mode::RWXU)?;
        let flags = OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let dir = openat(&parent, &name, flags, Mode::empty())?;
        // A user with write access to the parent could have put another in its place.
        let stat = fstat(&dir)?;
        if stat.st_uid != geteuid().as_raw()
            || Mode::from_raw_mode(stat.st_mode).intersects(Mode::RWXG | Mode::RWXO)
        {
            return Err(Errno::PERM.into());
        }
        Ok(Self { parent, name, dir })
    }

    /// Moves the socket into the parent, where nothing may have that name.
    fn give_out(&self, name: &OsStr) -> io::Result<()> {
        match renameat_with(&self.dir, BOUND, &self.parent, name, RenameFlags::NOREPLACE) {
            // As bind has it.
            Err(Errno::EXIST) => Err(Errno::ADDRINUSE.into()),
            moved => Ok(moved?),
        }
    }
}

impl Drop for PrivateDir {
    fn drop(&mut self) {
        let _ = unlinkat(&self.dir, BOUND, AtFlags::empty());
        let _ = unlinkat(&self.parent, &self.name, AtFlags::REMOVEDIR);
    }
}

/// Whether this process may give its files to any user and group: root may, unless that was taken from it.
fn may_give_away() -> io::Result<bool> {
    Ok(capabilities(None)?.effective.contains(CapabilitySet::CHOWN))
}

/// The number of a user that this process may give its files to.
fn owner_id(owner: &str) -> io::Result<Uid> {
    let number = match owner.parse() {
        Ok(number) => number,
        Err(_) => match unistd::User::from_name(owner)? {
            Some(found) => found.uid.as_raw(),
            None => {
                return Err(io::Error::new(io::ErrorKind::NotFound, format!("there is no user '{owner}'")));
            }
        },
    };
    let id = Uid::from_raw(number);
    if id == geteuid() || may_give_away()? {
        Ok(id)
    } else {
        let why = format!(
            "the server may not give a socket to the user '{owner}': only root may (CAP_CHOWN); \
             say group= with a group of both users instead"
        );
        Err(io::Error::new(io::ErrorKind::PermissionDenied, why))
    }
}

/// The number of a group that this process may give its files to.
fn group_id(group: &str) -> io::Result<Gid> {
    let number = match group.parse() {
        Ok(number) => number,
        Err(_) => match unistd::Group::from_name(group)? {
            Some(found) => found.gid.as_raw(),
            None => {
                return Err(io::Error::new(io::ErrorKind::NotFound, format!("there is no group '{group}'")));
            }
        },
    };
    let id = Gid::from_raw(number);
    if may_give_away()? || getegid() == id || getgroups()?.contains(&id) {
        Ok(id)
    } else {
        let why = format!("the server's user is not a member of the group '{group}'");
        Err(io::Error::new(io::ErrorKind::PermissionDenied, why))
    }
}

#[cfg(test)]
mod tests {
    use std::fs::{metadata, read_dir};
    use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
    use std::os::unix::net::UnixStream;

    use super::*;

    fn access(group: Option<&str>, mode: Option<u32>) -> SocketAccess {
        SocketAccess { owner: None, group: group.map(str::to_owned), mode }
    }

    #[test]
    fn a_socket_belongs_to_the_owner_it_was_given() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("socket");
        let owned = |owner: &str| SocketAccess { owner: Some(owner.to_owned()), ..SocketAccess::default() };
        if may_give_away().unwrap() {
            // Again, as after a restart.
            for _ in 0..2 {
                let _listener = listen_at(&path, &owned("61002")).unwrap();
                let made = metadata(&path).unwrap();
                assert_eq!((made.uid(), made.mode() & 0o777), (61002, 0o600));
                std::fs::remove_file(&path).unwrap();
            }
        } else {
            let refused = listen_at(&path, &owned("0")).unwrap_err();
            assert!(refused.to_string().contains("only root may"), "{refused}");
        }
        let own = geteuid().as_raw().to_string();
        let _listener = listen_at(&path, &owned(&own)).unwrap();
        let unknown = owned("no such user").check().unwrap_err();
        assert!(unknown.to_string().contains("there is no user 'no such user'"), "{unknown}");
    }

    /// The umask is what it is here: that of a process cannot be changed under other tests.
    #[test]
    fn a_socket_has_the_mode_it_was_given() {
        let dir = tempfile::tempdir().unwrap();
        let own = rustix::process::getegid().as_raw().to_string();
        for (at, (group, mode, expected)) in [
            (None, None, 0o600),
            (None, Some(0o660), 0o660),
            (None, Some(0o666), 0o666),
            (Some(own.as_str()), None, 0o660),
            (Some(own.as_str()), Some(0o666), 0o666),
            (Some(own.as_str()), Some(0o020), 0o020),
        ]
        .into_iter()
        .enumerate()
        {
            let path = dir.path().join(at.to_string());
            let listener = listen_at(&path, &access(group, mode)).unwrap();
            assert_eq!(metadata(&path).unwrap().permissions().mode() & 0o777, expected);
            if expected & 0o600 != 0 {
                UnixStream::connect(&path).unwrap();
                listener.accept().unwrap();
            }
        }
        assert_eq!(read_dir(dir.path()).unwrap().count(), 6, "only the sockets are left");
    }

    #[test]
    fn a_socket_belongs_to_the_group_it_was_given() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("s".repeat(100 - dir.path().as_os_str().len()));
        if geteuid().is_root() {
            let _listener = listen_at(&path, &access(Some("61010"), None)).unwrap();
            assert_eq!((metadata(&path).unwrap().gid(), metadata(&path).unwrap().uid()), (61010, 0));
        } else {
            let refused = listen_at(&path, &access(Some("0"), None)).unwrap_err();
            assert!(refused.to_string().contains("not a member"), "{refused}");
        }
        let root = listen_at(&dir.path().join("root"), &access(Some("root"), None));
        assert_eq!(root.is_ok(), geteuid().is_root(), "{root:?}");
        let unknown = listen_at(&dir.path().join("none"), &access(Some("no such group"), None)).unwrap_err();
        assert!(unknown.to_string().contains("there is no group 'no such group'"), "{unknown}");
        assert!(!dir.path().join("none").exists());
    }

    #[test]
    fn what_is_there_stays() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("link");
        std::os::unix::fs::symlink("/dev/null", &path).unwrap();
        let own = rustix::process::getegid().as_raw().to_string();
        for group in [None, Some(own.as_str())] {
            let refused = listen_at(&path, &access(group, Some(0o666))).unwrap_err();
            assert_eq!(refused.kind(), io::ErrorKind::AddrInUse);
        }
        assert!(path.is_symlink());
        assert_eq!(read_dir(dir.path()).unwrap().count(), 1, "only what was there is left");
    }
}
