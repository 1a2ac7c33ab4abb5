//! Who may use a file that is made for a disk, its overlay or a note beside it: those who may use the disk's.
//!
//! Only root can give a file to another user, and only who is in a group can give it to that group. Where owner or group cannot be
//! the disk's, they are those of whoever makes the file, as with every tool; but a group that is not the disk's may then do
//! no more than everybody.

use std::fs::Metadata;
use std::os::fd::AsFd;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use rustix::fs::{Gid, Mode, Uid, XattrFlags};
use rustix::io::Errno;

use crate::error::{Error, IoContext as _, Result};

const ACL: &str = "system.posix_acl_access";
/// Most bytes of an extended attribute.
const ACL_MAX: usize = 1 << 16;
/// `POSIX_ACL_XATTR_VERSION`, four bytes; then entries of eight: tag and permissions (two bytes each), id. Little-endian.
const ACL_HEADER: usize = 4;
const ACL_ENTRY: usize = 8;
/// `ACL_GROUP_OBJ`: what the file's group may do. With an ACL the mode has its mask in that place.
const OWNING_GROUP: u16 = 4;

/// Gives the file at `to`, which was just made, owner, group, permissions and access control list of the one at `like`.
///
/// # Errors
/// Whatever the host reports.
pub fn copy(like: &Path, to: impl AsFd) -> Result<()> {
    let wanted = like.metadata().while_trying("examine the disk")?;
    let mut acl = acl_of(like)?;
    let mut mode = wanted.mode() & 0o777;
    if let Some(acl) = &acl {
        mode = (mode & !0o070) | u32::from(owning_group(acl)) << 3;
    }
    if !give(&wanted, to.as_fd())? {
        let everybody = mode & 0o007;
        mode &= everybody << 3 | 0o707;
        if let Some(acl) = &mut acl {
            limit_owning_group(acl, everybody as u16);
        }
    }
    let failed = |what| move |errno: Errno| Error::io(what, errno.into());
    // One that the directory gives to all its files is not the disk's.
    match rustix::fs::fremovexattr(&to, ACL) {
        Ok(()) | Err(Errno::NODATA | Errno::OPNOTSUPP) => {}
        Err(errno) => return Err(failed("take back the directory's access control list")(errno)),
    }
    let mode = Mode::from_raw_mode(mode);
    rustix::fs::fchmod(&to, mode).map_err(failed("set its permissions"))?;
    if let Some(acl) = acl {
        let set = rustix::fs::fsetxattr(&to, ACL, &acl, XattrFlags::empty());
        set.map_err(failed("set its access control list"))?;
    }
    Ok(())
}

/// Lets the owner of a file that was made like a read-only one write it.
///
/// # Errors
/// Whatever the host reports.
pub fn let_owner_write(file: impl AsFd) -> Result<()> {
    let set = rustix::fs::fstat(&file).and_then(|found| {
        let mode = Mode::from_raw_mode(found.st_mode) | Mode::RUSR | Mode::WUSR;
        rustix::fs::fchmod(&file, mode)
    });
    set.map_err(|errno| Error::io("set its permissions", errno.into()))
}

/// Gives the file away as far as we may; false if its group is not the one that is wanted.
fn give(wanted: &Metadata, to: impl AsFd) -> Result<bool> {
    let group = Gid::from_raw(wanted.gid());
    if rustix::fs::fchown(&to, Some(Uid::from_raw(wanted.uid())), Some(group)).is_err() {
        let _ = rustix::fs::fchown(&to, None, Some(group));
    }
    let is = rustix::fs::fstat(&to).map_err(|errno| Error::io("examine what was made", errno.into()))?;
    Ok(is.st_gid == wanted.gid())
}

/// The access control list, if there is more than the mode.
fn acl_of(path: &Path) -> Result<Option<Vec<u8>>> {
    let mut acl = vec![0; ACL_MAX];
    match rustix::fs::getxattr(path, ACL, &mut acl[..]) {
        Ok(len) => {
            acl.truncate(len);
            Ok(Some(acl))
        }
        Err(Errno::NODATA | Errno::OPNOTSUPP) => Ok(None),
        Err(errno) => Err(Error::io("read the access control list of the disk", errno.into())),
    }
}

fn owning_group(acl: &[u8]) -> u16 {
    let entries = acl.get(ACL_HEADER..).unwrap_or_default().chunks_exact(ACL_ENTRY);
    let mut found = entries.filter(|entry| tag(entry) == OWNING_GROUP).map(|entry| u16::from(entry[2]) & 0o7);
    found.next().unwrap_or(0)
}

fn limit_owning_group(acl: &mut [u8], most: u16) {
    let entries = acl.get_mut(ACL_HEADER..).unwrap_or_default().chunks_exact_mut(ACL_ENTRY);
    for entry in entries.filter(|entry| tag(entry) == OWNING_GROUP) {
        entry[2] &= most as u8;
    }
}

fn tag(entry: &[u8]) -> u16 {
    u16::from_le_bytes([entry[0], entry[1]])
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `user::rw-, user:4242:rw-, group::r--, mask::rw-, other::---`
    fn acl() -> Vec<u8> {
        let entries: [(u16, u16, u32); 5] =
            [(1, 6, u32::MAX), (2, 6, 4242), (4, 4, u32::MAX), (16, 6, u32::MAX), (32, 0, u32::MAX)];
        let mut acl = 2u32.to_le_bytes().to_vec();
        for (tag, may, id) in entries {
            acl.extend(tag.to_le_bytes());
            acl.extend(may.to_le_bytes());
            acl.extend(id.to_le_bytes());
        }
        acl
    }

    #[test]
    fn whom_a_list_names_may_use_the_overlay_and_its_group_no_more_than_before() {
        let dir = tempfile::tempdir().unwrap();
        let [below, above] = ["below", "above"].map(|name| dir.path().join(name));
        std::fs::write(&below, "").unwrap();
        rustix::fs::setxattr(&below, ACL, &acl(), XattrFlags::empty())
            .expect("a file system with such lists");
        // The directory would give its files another list.
        rustix::fs::setxattr(dir.path(), "system.posix_acl_default", &acl(), XattrFlags::empty()).unwrap();
        let file = std::fs::File::create(&above).unwrap();
        copy(&below, &file).unwrap();
        assert_eq!(acl_of(&above).unwrap(), Some(acl()));
        let plain = std::fs::File::create(dir.path().join("plain")).unwrap();
        rustix::fs::removexattr(&below, ACL).unwrap();
        rustix::fs::chmod(&below, Mode::from_raw_mode(0o600)).unwrap();
        copy(&below, &plain).unwrap();
        assert_eq!(acl_of(&dir.path().join("plain")).unwrap(), None);
        assert_eq!(plain.metadata().unwrap().mode() & 0o777, 0o600);
    }

    #[test]
    fn another_group_gets_what_everybody_has() {
        let mut list = acl();
        assert_eq!(owning_group(&list), 4);
        limit_owning_group(&mut list, 0);
        assert_eq!(owning_group(&list), 0);
        assert_eq!(list.len(), acl().len());
    }

    /// Root plays two users: the one whose disk it is, and one of the disk's group, or of none of its own, who takes a snapshot.
    #[test]
    fn a_snapshot_by_another_user_keeps_the_group_or_gives_it_nothing() {
        use std::os::unix::fs::{PermissionsExt as _, chown};
        if !rustix::process::geteuid().is_root() {
            return;
        }
        let dir = tempfile::tempdir().unwrap();
        std::fs::set_permissions(dir.path(), std::fs::Permissions::from_mode(0o777)).unwrap();
        let below = dir.path().join("below");
        std::fs::write(&below, "").unwrap();
        chown(&below, Some(1002), Some(2000)).unwrap();
        std::fs::set_permissions(&below, std::fs::Permissions::from_mode(0o664)).unwrap();
        for (groups, expected) in [(&[2000][..], (1001, 2000, 0o664)), (&[], (1001, 1001, 0o644))] {
            let above = dir.path().join(format!("above{}", groups.len()));
            let found = std::thread::scope(|scope| {
                let taken = scope.spawn(|| {
                    let groups: Vec<Gid> = groups.iter().map(|&group| Gid::from_raw(group)).collect();
                    // Of this thread alone.
                    rustix::thread::set_thread_groups(&groups).unwrap();
                    rustix::thread::set_thread_gid(Gid::from_raw(1001)).unwrap();
                    rustix::thread::set_thread_uid(Uid::from_raw(1001)).unwrap();
                    let file = std::fs::File::create(&above).unwrap();
                    copy(&below, &file).unwrap();
                    file.metadata().unwrap()
                });
                taken.join().unwrap()
            });
            assert_eq!((found.uid(), found.gid(), found.mode() & 0o777), expected);
        }
    }
}
