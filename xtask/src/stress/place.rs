//! Where a round takes place: a small file system for the images, and a smaller one for the runtime directory. Both can be
//! filled, and given their room back.
//!
//! ```text
//!   DIR/images     loop-mounted ext4, or tmpfs      disk, layers, filler
//!   DIR/run        tmpfs of 1 MiB                   journals, filler
//!   DIR/out        plain directory                  logs, copies that are judged
//! ```
//!
//! Without the right to mount, both are plain directories, and are never full.

use std::fs::{self, File, OpenOptions};
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};
use rustix::fs::{FallocateFlags, fallocate, statvfs, syncfs};

use super::config::Media;

const FILLER: &str = "filler";
/// Bytes of the file system of the images.
const IMAGES: u64 = 1 << 30;
/// Of one that takes its memory when it is filled.
const IMAGES_IN_MEMORY: u64 = 512 << 20;
const RUN: u64 = 1 << 20;
/// With less than this, requests may fail for want of room.
const SCARCE: u64 = 8 << 20;

/// A directory that may be a file system of its own.
#[derive(Debug)]
pub(super) struct Room {
    pub(super) path: PathBuf,
    mounted: bool,
}

impl Room {
    /// Whether it can be filled.
    pub(super) fn can_be_full(&self) -> bool {
        self.mounted
    }

    /// Takes all the room that is left.
    pub(super) fn fill(&self) -> Result<()> {
        let file = OpenOptions::new().create(true).append(true).open(self.path.join(FILLER))?;
        let mut length = file.metadata()?.len();
        // Halves until not even a block fits.
        let mut part = IMAGES;
        while part >= 512 {
            match fallocate(&file, FallocateFlags::empty(), length, part) {
                Ok(()) => length += part,
                Err(rustix::io::Errno::NOSPC) => part /= 2,
                Err(error) => return Err(error).context("cannot fill a file system"),
            }
        }
        // What fallocate leaves in a last block.
        let _ = file.write_all_at(&[1; 4096], length);
        Ok(())
    }

    /// Gives it back, and returns once it can be used.
    pub(super) fn empty(&self) -> Result<()> {
        match fs::remove_file(self.path.join(FILLER)) {
            Ok(()) => Ok(syncfs(File::open(&self.path)?)?),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    /// Whether requests may fail for want of room.
    pub(super) fn is_scarce(&self) -> bool {
        self.mounted && statvfs(&self.path).is_ok_and(|now| now.f_bavail * now.f_frsize < SCARCE)
    }

    /// Removes every file, as a reboot does with a runtime directory.
    pub(super) fn wipe(&self) -> Result<()> {
        for entry in fs::read_dir(&self.path)? {
            let entry = entry?;
            if entry.file_type()?.is_dir() {
                fs::remove_dir_all(entry.path())?;
            } else {
                fs::remove_file(entry.path())?;
            }
        }
        Ok(())
    }
}

impl Drop for Room {
    fn drop(&mut self) {
        if self.mounted {
            // The kernel may still be taking a killed server's ring apart: then it goes when that is done.
            let _ = Command::new("umount").arg("--lazy").arg(&self.path).status();
        }
    }
}

/// See the module documentation.
#[derive(Debug)]
pub(super) struct Place {
    pub(super) images: Room,
    pub(super) run: Room,
    pub(super) out: PathBuf,
    dir: PathBuf,
}

impl Place {
    /// Makes the directories below `dir`, which is there.
    pub(super) fn make(dir: &Path, media: Media, mounts: bool) -> Result<Self> {
        let made = |name: &str| -> Result<PathBuf> {
            let path = dir.join(name);
            fs::create_dir_all(&path)?;
            Ok(path)
        };
        let (images, run, out) = (made("images")?, made("run")?, made("out")?);
        if mounts {
            match media {
                Media::Tmpfs => mount_tmpfs(&images, IMAGES_IN_MEMORY)?,
                Media::Ext4 => mount_ext4(&images)?,
            }
        }
        let images = Room { path: images, mounted: mounts };
        if mounts {
            mount_tmpfs(&run, RUN)?;
        }
        Ok(Self { images, run: Room { path: run, mounted: mounts }, out, dir: dir.to_owned() })
    }

    /// Copies what is to be looked at after an error out of the mounts, which go later.
    pub(super) fn keep(&self) -> Result<PathBuf> {
        let kept = self.dir.join("kept");
        for room in [&self.images, &self.run] {
            room.empty()?;
            let to = kept.join(room.path.file_name().context("a name")?);
            fs::create_dir_all(&to)?;
            let copied = Command::new("cp")
                .args(["-a", "--sparse=always"])
                .arg(room.path.join("."))
                .arg(&to)
                .status()?;
            ensure!(copied.success(), "cannot copy {} to {}", room.path.display(), to.display());
        }
        Ok(kept)
    }
}

fn run(command: &mut Command) -> Result<()> {
    let output = command.output().with_context(|| format!("{:?} does not run", command.get_program()))?;
    ensure!(output.status.success(), "{command:?}: {}", String::from_utf8_lossy(&output.stderr));
    Ok(())
}

fn mount_tmpfs(at: &Path, bytes: u64) -> Result<()> {
    run(Command::new("mount").args(["-t", "tmpfs", "-o", &format!("size={bytes},mode=755"), "tmpfs"]).arg(at))
}

/// The file below it lies in memory where there is room, as flushes are many. It has no name: the mount alone keeps it.
fn mount_ext4(at: &Path) -> Result<()> {
    let memory = Path::new("/dev/shm");
    let dir = if memory.is_dir() { memory } else { at.parent().context("a directory above")? };
    let file = tempfile::NamedTempFile::new_in(dir)?;
    file.as_file().set_len(IMAGES)?;
    run(Command::new("mkfs.ext4").args(["-q", "-F", "-m", "0", "-O", "^resize_inode"]).arg(file.path()))?;
    run(Command::new("mount").args(["-o", "loop"]).arg(file.path()).arg(at))
}

/// Whether this process may mount; otherwise why not.
///
/// # Errors
/// When `dir` cannot be written.
pub(super) fn can_mount(dir: &Path) -> Result<Option<String>> {
    let probe = tempfile::Builder::new().prefix("mount-").tempdir_in(dir)?;
    let at = probe.path().join("at");
    fs::create_dir(&at)?;
    let room = |mounted: Result<()>| -> Result<()> {
        mounted?;
        drop(Room { path: at.clone(), mounted: true });
        Ok(())
    };
    let tried = room(mount_tmpfs(&at, RUN)).and_then(|()| room(mount_ext4(&at)));
    Ok(tried.err().map(|error| format!("{error:#}").trim().to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_full_room_takes_nothing_until_it_is_emptied() {
        let dir = tempfile::tempdir().unwrap();
        if can_mount(dir.path()).unwrap().is_some() {
            return;
        }
        for media in [Media::Ext4, Media::Tmpfs] {
            let place = Place::make(dir.path(), media, true).unwrap();
            for room in [&place.images, &place.run] {
                let file = room.path.join("file");
                room.fill().unwrap();
                assert!(room.is_scarce());
                assert!(fs::write(&file, [1; 8192]).is_err(), "{room:?} has room");
                room.empty().unwrap();
                fs::write(&file, [1; 8192]).unwrap();
            }
        }
    }
}
