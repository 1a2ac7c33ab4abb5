//! Who else can enter the directory of a repository.
//!
//! Objects hold all that guests know. So a repository is written only where nobody else can enter: the directory belongs to
//! this user or to root, and its mode gives nothing to its group and to others. (An ACL that lets anyone in shows as the
//! group's.)
//!
//! A directory that was made with an ordinary umask is open to readers. Refusing all of those would end periodic snapshots at
//! an upgrade, unseen. So a directory of this user's that others can only read, and that holds nothing but objects, is closed
//! to them before it is written, with a warning. Refused, with what to do about it, is a directory
//!
//! - of another user, who can change what is in it at any time, or of root's that this user cannot close;
//! - that others can write to: someone has to look at what they have put there;
//! - that holds other things, too: closing it would shut out those who use them.

use std::fmt;
use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;

use rustix::fs::{AtFlags, Dir, FileType, Mode, fchmod, fstat, statat};
use rustix::process::{Uid, geteuid};

/// What the file system's own tools make in its root directory.
const LOST_AND_FOUND: &str = "lost+found";

/// Whose a directory is, and who can enter it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Access {
    owner: Uid,
    mode: Mode,
}

impl Access {
    pub(super) fn of(dir: &OwnedFd) -> io::Result<Self> {
        let about = fstat(dir)?;
        Ok(Self { owner: Uid::from_raw(about.st_uid), mode: Mode::from_raw_mode(about.st_mode & 0o7777) })
    }

    pub(super) fn is_ours(self) -> bool {
        self.owner == geteuid()
    }

    /// Whether nobody but this user and root can enter.
    pub(super) fn is_private(self) -> bool {
        (self.is_ours() || self.owner.is_root()) && !self.mode.intersects(Mode::RWXG | Mode::RWXO)
    }

    /// What makes it private.
    pub(super) fn remedy(self, path: &Path) -> String {
        let (at, user) = (path.display(), geteuid().as_raw());
        if self.is_ours() {
            format!("chmod 700 {at}")
        } else {
            format!("chown {user} {at} && chmod 700 {at}")
        }
    }
}

impl fmt::Display for Access {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "it belongs to user {}, with mode {:o}", self.owner.as_raw(), self.mode.as_raw_mode())
    }
}

/// Closes a repository's directory, called `path`, to others if it may be closed.
///
/// # Errors
/// When others can enter it: it must not be written.
pub(super) fn close(dir: &OwnedFd, path: &Path, is_own: impl Fn(&str) -> bool) -> io::Result<()> {
    let access = Access::of(dir)?;
    if access.is_private() {
        return Ok(());
    }
    let refused = |why: String| Err(io::Error::new(io::ErrorKind::PermissionDenied, why));
    let remedy = access.remedy(path);
    if !access.is_ours() {
        return refused(format!("others can enter it: {access}; {remedy}"));
    }
    if access.mode.intersects(Mode::WGRP | Mode::WOTH) {
        return refused(format!("others can write to it: {access}; see what is in it, and {remedy}"));
    }
    if let Some(name) = stranger(dir, is_own)? {
        return refused(format!(
            "others can enter it: {access}; it holds {name:?}, which is not the repository's: take that out, or {remedy}"
        ));
    }
    if let Err(error) = fchmod(dir, access.mode - (Mode::RWXG | Mode::RWXO)) {
        return refused(format!("others can enter it: {access}; that cannot be changed: {error}"));
    }
    if !Access::of(dir)?.is_private() {
        return refused(format!(
            "others can enter it: {access}; its file system does not let that be changed"
        ));
    }
    tracing::warn!(
        "{}: closed to others, who could read the objects in it: before, {access}",
        path.display()
    );
    Ok(())
}

/// Something in the directory that no repository of this user's has.
fn stranger(dir: &OwnedFd, is_own: impl Fn(&str) -> bool) -> io::Result<Option<String>> {
    for entry in Dir::read_from(dir)? {
        let entry = entry?;
        let name = entry.file_name().to_string_lossy();
        let kind = match &*name {
            "." | ".." => continue,
            LOST_AND_FOUND => FileType::Directory,
            name if is_own(name) => FileType::RegularFile,
            _ => return Ok(Some(name.into_owned())),
        };
        let about = match statat(dir, entry.file_name(), AtFlags::SYMLINK_NOFOLLOW) {
            // Removed since its name was read.
            Err(rustix::io::Errno::NOENT) => continue,
            about => about?,
        };
        let owner = Uid::from_raw(about.st_uid);
        let is_known = owner == geteuid() || owner.is_root();
        if FileType::from_raw_mode(about.st_mode) != kind || !is_known {
            return Ok(Some(name.into_owned()));
        }
    }
    Ok(None)
}
