//! Locks on image files that QEMU and its tools understand.
//!
//! QEMU guards every image with *open file description* locks on single bytes (its `file-posix.c`): a holder
//! read-locks byte `100 + i` for each permission `i` it has, and byte `200 + i` for each permission it does
//! not let others have. It then makes sure that nobody else has a lock on `200 + i` for a permission it has,
//! nor on `100 + i` for one it does not share. Read locks never conflict with each other, so each side sees the
//! other's claims, whoever comes first.
//!
//! Place in the data flow: [`crate::FileStore`] takes a lock when it is made. The lock belongs to the
//! open file description and goes when the last descriptor to it is closed.
//!
//! Invariant: a lock that could not be had whole leaves no byte locked.

use std::fmt;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

/// First byte of the permissions a holder has (`RAW_LOCK_PERM_BASE`).
const HELD_BASE: i64 = 100;
/// First byte of the permissions a holder denies to others (`RAW_LOCK_SHARED_BASE`).
const DENIED_BASE: i64 = 200;
/// The byte of who copies into a file, which readers of ours heed. QEMU knows nothing of it, and need not: what it reads stays.
const COPIED_INTO: i64 = 300;
/// Between two attempts.
const RETRY_EVERY: Duration = Duration::from_millis(50);

/// What a holder of an image may do with it; discriminants are QEMU's `BLK_PERM_*` bit numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Permission {
    /// Read data that stays consistent.
    ConsistentRead = 0,
    /// Write.
    Write = 1,
    /// Write what leaves the visible data unchanged.
    WriteUnchanged = 2,
    /// Change the length.
    Resize = 3,
}

impl Permission {
    const ALL: [Self; 4] = [Self::ConsistentRead, Self::Write, Self::WriteUnchanged, Self::Resize];
}

impl fmt::Display for Permission {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::ConsistentRead => "consistent read",
            Self::Write => "write",
            Self::WriteUnchanged => "write unchanged",
            Self::Resize => "resize",
        })
    }
}

/// How a file is used, and so what others may do with it meanwhile.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LockKind {
    /// The active layer of a disk: this process writes, nobody else may even open it for reading. QEMU's lock on
    /// an image that it writes.
    Active,
    /// A file only read here: others may read it too, nobody may write it. QEMU's lock on backing files and on
    /// images opened read-only.
    Frozen,
    /// A file that others read, and that is written here without a change to what they read: it gets an index. One at a time
    /// does that. QEMU's lock of a job that writes what a layer below has anyway.
    Unchanged,
    /// The same for a file that is copied into. Its tables change, though not in what they say together with the layers below:
    /// whoever begins to read it would know tables that do not last, so none of ours may begin meanwhile.
    CopiedInto,
}

impl LockKind {
    fn holds(self, permission: Permission) -> bool {
        match self {
            Self::Active => permission != Permission::WriteUnchanged,
            Self::Frozen => permission == Permission::ConsistentRead,
            Self::Unchanged | Self::CopiedInto => {
                matches!(permission, Permission::ConsistentRead | Permission::WriteUnchanged)
            }
        }
    }

    fn shares(self, permission: Permission) -> bool {
        match self {
            // QEMU's format drivers share exactly these, whether they write or not.
            Self::Active | Self::Frozen => {
                matches!(permission, Permission::ConsistentRead | Permission::WriteUnchanged)
            }
            Self::Unchanged | Self::CopiedInto => permission == Permission::ConsistentRead,
        }
    }
}

/// Why a file could not be locked.
#[derive(Debug, thiserror::Error)]
pub enum LockError {
    /// Someone else uses the file in a way that excludes ours.
    #[error(
        "{} is in use by another process: {}; stop the QEMU, qemu-img or vmstrata that has it open (`lslocks` or `fuser {}` names it)",
        path.display(), conflict(*permission, *held), path.display()
    )]
    Conflict {
        /// The file.
        path: PathBuf,
        /// The permission in dispute.
        permission: Permission,
        /// True when the other side has the permission and we would deny it; false when the other side denies it
        /// and we want it.
        held: bool,
    },
    /// Another process copies into the file.
    #[error(
        "layers are being merged, and {} is written meanwhile: try again when that is done (`vmstrata job list` shows how far it is)",
        path.display()
    )]
    CopiedInto {
        /// The file.
        path: PathBuf,
    },
    /// The file system does not lock.
    #[error("cannot lock {}: {source}; the file system must support open file description locks", path.display())]
    Unsupported {
        /// The file.
        path: PathBuf,
        /// What the kernel said.
        source: io::Error,
    },
}

impl LockError {
    /// The file, which the words of the error name.
    pub fn path(&self) -> &Path {
        match self {
            Self::Conflict { path, .. } | Self::CopiedInto { path } | Self::Unsupported { path, .. } => path,
        }
    }
}

fn conflict(permission: Permission, held: bool) -> String {
    if held {
        format!("it holds the \"{permission}\" permission, which this use does not share")
    } else {
        format!("it does not share the \"{permission}\" permission, which this use needs")
    }
}

/// Locks the file behind `fd`, trying again for up to `patience` while someone else has it.
///
/// Patience helps after a crash: a process killed in the middle of I/O keeps its files, and so its locks, until the
/// kernel has finished that I/O, which can be a moment after its successor has started.
pub(crate) fn lock(
    fd: BorrowedFd<'_>,
    path: &Path,
    kind: LockKind,
    patience: Duration,
) -> Result<(), LockError> {
    let deadline = Instant::now() + patience;
    loop {
        match try_lock(fd, kind) {
            Ok(()) => return Ok(()),
            Err(Refusal::Conflict { .. } | Refusal::CopiedInto) if Instant::now() < deadline => {
                thread::sleep(RETRY_EVERY);
            }
            Err(refusal) => return Err(refusal.of(path)),
        }
    }
}

enum Refusal {
    Conflict { permission: Permission, held: bool },
    CopiedInto,
    Io(io::Error),
}

impl Refusal {
    fn of(self, path: &Path) -> LockError {
        let path = path.to_owned();
        match self {
            Self::Conflict { permission, held } => LockError::Conflict { path, permission, held },
            Self::CopiedInto => LockError::CopiedInto { path },
            Self::Io(source) => LockError::Unsupported { path, source },
        }
    }
}

/// One attempt: claim every byte, then look for contradicting claims; on refusal every claim is withdrawn.
fn try_lock(fd: BorrowedFd<'_>, kind: LockKind) -> Result<(), Refusal> {
    let result = claim(fd, kind).and_then(|()| check(fd, kind));
    if result.is_err() {
        for permission in Permission::ALL {
            for base in [HELD_BASE, DENIED_BASE] {
                // Withdrawing fails only where locking does not work at all, which `result` reports.
                let _ = control(fd, libc::F_OFD_SETLK, libc::F_UNLCK, base + permission as i64);
            }
        }
        let _ = control(fd, libc::F_OFD_SETLK, libc::F_UNLCK, COPIED_INTO);
    }
    result
}

/// Turns the lock of a writer into that of a reader, without a moment in between.
///
/// # Errors
/// Whatever the kernel reports.
pub(crate) fn downgrade(fd: BorrowedFd<'_>) -> io::Result<()> {
    for permission in Permission::ALL {
        if !LockKind::Frozen.holds(permission) {
            control(fd, libc::F_OFD_SETLK, libc::F_UNLCK, HELD_BASE + permission as i64)?;
        }
        if LockKind::Frozen.shares(permission) {
            control(fd, libc::F_OFD_SETLK, libc::F_UNLCK, DENIED_BASE + permission as i64)?;
        }
    }
    control(fd, libc::F_OFD_SETLK, libc::F_UNLCK, COPIED_INTO)?;
    Ok(())
}

fn claim(fd: BorrowedFd<'_>, kind: LockKind) -> Result<(), Refusal> {
    for permission in Permission::ALL {
        let claims = [(HELD_BASE, kind.holds(permission)), (DENIED_BASE, !kind.shares(permission))];
        for (base, _) in claims.into_iter().filter(|(_, wanted)| *wanted) {
            match control(fd, libc::F_OFD_SETLK, libc::F_RDLCK, base + permission as i64) {
                Ok(_) => {}
                // Only a write lock, which QEMU never takes for good, stands against a read lock.
                Err(error) if matches!(error.raw_os_error(), Some(libc::EAGAIN | libc::EACCES)) => {
                    return Err(Refusal::Conflict { permission, held: base == DENIED_BASE });
                }
                Err(error) => return Err(Refusal::Io(error)),
            }
        }
    }
    if kind == LockKind::CopiedInto {
        control(fd, libc::F_OFD_SETLK, libc::F_RDLCK, COPIED_INTO).map_err(Refusal::Io)?;
    }
    Ok(())
}

fn check(fd: BorrowedFd<'_>, kind: LockKind) -> Result<(), Refusal> {
    // Whoever copies into a file is met by the others of its kind below; it may find readers.
    if kind == LockKind::Frozen && is_copied_into(fd).map_err(Refusal::Io)? {
        return Err(Refusal::CopiedInto);
    }
    for permission in Permission::ALL {
        let against = [(DENIED_BASE, kind.holds(permission)), (HELD_BASE, !kind.shares(permission))];
        for (base, _) in against.into_iter().filter(|(_, wanted)| *wanted) {
            let found = control(fd, libc::F_OFD_GETLK, libc::F_WRLCK, base + permission as i64);
            if found.map_err(Refusal::Io)? != libc::F_UNLCK {
                return Err(Refusal::Conflict { permission, held: base == HELD_BASE });
            }
        }
    }
    Ok(())
}

/// Whether a lock of this kind on the file behind `fd`, which need not be locked itself, would be refused now.
///
/// Takes no lock; the answer is as old as it is.
///
/// # Errors
/// The refusal, or a file system that does not lock.
pub fn check_free(fd: BorrowedFd<'_>, path: &Path, kind: LockKind) -> Result<(), LockError> {
    check(fd, kind).map_err(|refusal| refusal.of(path))
}

/// Whether someone else has claimed `permission` for the file behind `fd`, which need not be locked itself.
///
/// Takes no lock; the answer is as old as it is.
///
/// # Errors
/// Whatever the kernel reports, such as a file system that does not lock.
pub fn is_held(fd: BorrowedFd<'_>, permission: Permission) -> io::Result<bool> {
    let found = control(fd, libc::F_OFD_GETLK, libc::F_WRLCK, HELD_BASE + permission as i64)?;
    Ok(found != libc::F_UNLCK)
}

/// Whether someone else copies into the file behind `fd`.
fn is_copied_into(fd: BorrowedFd<'_>) -> io::Result<bool> {
    Ok(control(fd, libc::F_OFD_GETLK, libc::F_WRLCK, COPIED_INTO)? != libc::F_UNLCK)
}

/// One lock operation on one byte; returns the type of lock the kernel left in the request.
fn control(fd: BorrowedFd<'_>, command: i32, lock_type: i32, byte: i64) -> io::Result<i32> {
    let mut request = libc::flock {
        l_type: lock_type as libc::c_short,
        l_whence: libc::SEEK_SET as libc::c_short,
        l_start: byte,
        l_len: 1,
        l_pid: 0,
    };
    loop {
        // SAFETY: the lock commands read and write one `struct flock`, which `request` is.
        let done = unsafe { libc::fcntl(fd.as_raw_fd(), command, &raw mut request) };
        if done == 0 {
            return Ok(i32::from(request.l_type));
        }
        let error = io::Error::last_os_error();
        if error.kind() != io::ErrorKind::Interrupted {
            return Err(error);
        }
    }
}
