//! Where a mount is: what may be there before, and taking it away.

use std::fs::{self, OpenOptions};
use std::io;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;
use std::process::Command;

use rustix::io::Errno;
use rustix::mount::{UnmountFlags, unmount};

use super::{PlaceFault, SOURCE};

/// Mounts on one place, one over the other.
const STACKED_MAX: usize = 16;

/// What a mount was when it was taken out of sight.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Detached {
    /// No program used it: it has ended.
    Unused,
    /// Programs have files of it open: it ends once they have closed them.
    InUse,
}

/// Takes away a dead mount that a killed process of this program left, if there is one.
///
/// # Errors
/// When it is still there.
pub fn take_away_dead(place: &Path) -> io::Result<()> {
    if is_dead(place) && is_ours(place) {
        clean_up(place)?;
        tracing::warn!(mount = %place.display(), "took away the mount of a process that was killed");
    }
    Ok(())
}

/// Makes a place ready for a mount; whether it was made.
pub(super) fn prepare(place: &Path, for_directory: bool) -> Result<bool, PlaceFault> {
    take_away_dead(place).map_err(PlaceFault::Io)?;
    match fs::metadata(place) {
        Err(error) if error.kind() == io::ErrorKind::NotFound && !for_directory => {
            let made = OpenOptions::new().write(true).create_new(true).mode(0o600).open(place);
            made.map(|_| true).map_err(PlaceFault::Io)
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => Err(PlaceFault::NoDirectory),
        Err(error) => Err(PlaceFault::Io(error)),
        Ok(_) if is_ours(place) => Err(PlaceFault::Mounted),
        Ok(found) if for_directory && !found.is_dir() => Err(PlaceFault::NoDirectory),
        Ok(found) if !for_directory && !found.is_file() => Err(PlaceFault::NoFile),
        Ok(_) if for_directory && fs::read_dir(place).map_err(PlaceFault::Io)?.next().is_some() => {
            Err(PlaceFault::NotEmpty)
        }
        Ok(_) => Ok(false),
    }
}

/// Takes a mount out of sight.
pub(super) fn detach(place: &Path) -> io::Result<Detached> {
    match unmount_as(place, UnmountFlags::NOFOLLOW) {
        Err(error) if error.raw_os_error() == Some(Errno::BUSY.raw_os_error()) => {
            unmount_as(place, UnmountFlags::NOFOLLOW | UnmountFlags::DETACH).map(|()| Detached::InUse)
        }
        other => other.map(|()| Detached::Unused),
    }
}

/// Takes a mount away, from under those who use it where this user may.
pub(super) fn abort(place: &Path) -> io::Result<()> {
    unmount_as(place, UnmountFlags::NOFOLLOW | UnmountFlags::FORCE | UnmountFlags::DETACH)
}

/// Takes away what a process that is gone, or about to go, left of a mount.
///
/// # Errors
/// When it is still there.
pub(super) fn clean_up(place: &Path) -> io::Result<()> {
    for _ in 0..STACKED_MAX {
        // The kernel answers once the process has closed its end.
        if !is_dead(place) {
            return Ok(());
        }
        unmount_as(place, UnmountFlags::NOFOLLOW | UnmountFlags::DETACH)?;
    }
    Err(io::Error::other("dead mounts are left: `umount -l` takes them away"))
}

/// Whether a mount is there whose process is gone.
fn is_dead(place: &Path) -> bool {
    let dead = [Errno::NOTCONN, Errno::CONNABORTED].map(Errno::raw_os_error);
    fs::symlink_metadata(place)
        .is_err_and(|error| error.raw_os_error().is_some_and(|raw| dead.contains(&raw)))
}

/// Whether a mount of this program is on a place.
fn is_ours(place: &Path) -> bool {
    let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
    // A dead mount cannot be asked where it is.
    let directory = place.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let Some((directory, name)) = directory.canonicalize().ok().zip(place.file_name()) else { return false };
    let wanted = escaped(&directory.join(name));
    mounts.lines().any(|line| {
        let Some((mount, kind)) = line.split_once(" - ") else { return false };
        let source = kind.split(' ').nth(1);
        mount.split(' ').nth(4) == Some(&wanted) && source == Some(SOURCE)
    })
}

/// A path as `mountinfo` has it.
fn escaped(path: &Path) -> String {
    let bytes = path.as_os_str().as_bytes().iter();
    let escape = |byte: &u8| match byte {
        b' ' | b'\t' | b'\n' | b'\\' => format!("\\{byte:03o}").into_bytes(),
        byte => vec![*byte],
    };
    String::from_utf8_lossy(&bytes.flat_map(escape).collect::<Vec<u8>>()).into_owned()
}

/// Unmounts; unless root, through the program that may.
fn unmount_as(place: &Path, flags: UnmountFlags) -> io::Result<()> {
    match unmount(place, flags) {
        Err(Errno::PERM) => {
            let lazy = flags.contains(UnmountFlags::DETACH).then_some("-z");
            let output =
                Command::new("fusermount3").args(["-u", "-q"]).args(lazy).arg("--").arg(place).output()?;
            let busy =
                || if lazy.is_some() { io::Error::other("fusermount3 failed") } else { Errno::BUSY.into() };
            if output.status.success() { Ok(()) } else { Err(busy()) }
        }
        // It is gone already.
        Err(Errno::INVAL | Errno::NOENT) => Ok(()),
        other => Ok(other?),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_are_found_as_the_table_of_mounts_has_them() {
        assert_eq!(escaped(Path::new("/a b/c\\d")), "/a\\040b/c\\134d");
    }
}
