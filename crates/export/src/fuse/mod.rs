//! Disks as files: a FUSE mount of one file, or of a tree.
//!
//! ```text
//!   Mount ──► session: threads that read what the kernel asks ──► Files ──► Tree: names, sizes, which disk
//!                                                                  └──► OpenFile: a queue into the disk, a thread
//! ```
//!
//! A file has the size of its disk, and takes reads, writes, flushes, zeroes and discards, many at once; `lseek` finds its holes.
//! What never changes stays in the kernel's page cache; what guests or clients may write meanwhile is never kept there.
//!
//! A mount ends when someone unmounts it, or with [`Mount::stop`]. A second process, the guard, takes it away if this one is
//! killed: see [`guard`].
//!
//! Who writes a file system on such a file makes dirty pages that only this process can clean. So its threads are marked as part of
//! the I/O path (`PR_SET_IO_FLUSHER`): the kernel does not have them wait for those pages when they need memory.

mod file;
mod filesystem;
mod inodes;
mod place;
mod sparse;
mod tree;

use std::fs;
use std::io;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use fuser::{Config, MountOption, Session, SessionACL};
use parking_lot::{Condvar, Mutex};

use self::filesystem::{Files, Mounted};
use self::place::clean_up;
pub use self::place::{Detached, take_away_dead};
pub use self::tree::{About, Directory, File, Node, Opened};

/// What stands for the device in the table of mounts.
const SOURCE: &str = "vmstrata";
/// Threads that read what the kernel asks. One that waits for a slow disk's tables must not hold up the others.
const THREADS: usize = 8;
/// How long the requests under way of a file that is closed may take.
pub(crate) const PATIENCE: Duration = Duration::from_secs(10);

/// Why a mount cannot be made.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// What is there is no place for it.
    #[error("{}: {why}", place.display())]
    Place {
        /// Where it was to be.
        place: PathBuf,
        /// What is wrong there.
        why: PlaceFault,
    },
    /// The host does not let this user mount, or has no FUSE.
    #[error("cannot mount on {}: {source}; this needs /dev/fuse, and fusermount3 (package fuse3) unless root", place.display())]
    Mount {
        /// Where it was to be.
        place: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// No thread, or no guard.
    #[error("cannot serve the mount on {}: {source}", place.display())]
    Start {
        /// Where it was to be.
        place: PathBuf,
        /// Why.
        source: io::Error,
    },
}

/// Why a place is none for a mount.
#[derive(Debug, thiserror::Error)]
pub enum PlaceFault {
    /// The host does not say what it is.
    #[error("cannot be used as a mount point: {0}")]
    Io(io::Error),
    /// It is a file, or does not exist.
    #[error("is no directory: a tree of disks is mounted on a directory, make it first")]
    NoDirectory,
    /// Other files would be hidden, this process's own among them.
    #[error("has files in it, which the mount would hide: use an empty directory")]
    NotEmpty,
    /// It is a directory or a device.
    #[error("is no regular file")]
    NoFile,
    /// Something is mounted there.
    #[error("vmstrata is mounted there: unmount it first")]
    Mounted,
}

/// How to mount.
#[derive(Clone, Debug, Default)]
pub struct Options {
    /// Nothing may be written.
    pub read_only: bool,
    /// Other users may read, too.
    pub allow_other: bool,
    /// The program whose command `mount-guard` runs [`guard`].
    pub guard: Option<PathBuf>,
}

/// A mount. Dropping it stops it as [`Mount::stop`] does.
#[derive(Debug)]
pub struct Mount {
    place: PathBuf,
    files: Arc<Files>,
    ended: Arc<Ended>,
    guard: Mutex<Option<Guard>>,
}

/// Whether the kernel is done with it.
#[derive(Debug, Default)]
struct Ended {
    has: Mutex<bool>,
    changed: Condvar,
}

impl Mount {
    /// Mounts `root` on `place`: a directory on one that is there; a file on a regular one, which is made and removed
    /// afterwards if it is not there. A dead mount of a killed process in that place is taken away.
    ///
    /// # Errors
    /// [`Error`]: then nothing is left of it.
    pub fn new(root: Node, place: &Path, options: &Options) -> Result<Self, Error> {
        let fault = |why| Error::Place { place: place.to_owned(), why };
        let is_directory = matches!(root, Node::Directory(_));
        let is_made = place::prepare(place, is_directory).map_err(fault)?;
        let place = place.canonicalize().map_err(|error| fault(PlaceFault::Io(error)))?;
        let start = |source| Error::Start { place: place.clone(), source };
        // Before there is something to clean up.
        let guard = Guard::start(options.guard.as_deref(), &place, is_made).map_err(start)?;
        let files = Arc::new(Files::new(root, options.allow_other));
        let mut config = Config::default();
        config.mount_options = vec![
            MountOption::FSName(SOURCE.to_owned()),
            MountOption::NoDev,
            MountOption::NoSuid,
            MountOption::NoExec,
            MountOption::DefaultPermissions,
            if options.read_only { MountOption::RO } else { MountOption::RW },
        ];
        config.acl = if options.allow_other { SessionACL::All } else { SessionACL::Owner };
        config.n_threads = Some(THREADS);
        config.clone_fd = true;
        let session = Session::new(Mounted(Arc::clone(&files)), &place, &config)
            .map_err(|source| Error::Mount { place: place.clone(), source })?;
        let ended = Arc::<Ended>::default();
        let body = {
            let (ended, place) = (Arc::clone(&ended), place.clone());
            move || {
                // Only root may; without it, a host that is short of memory may hang.
                if let Err(error) = rustix::process::configure_io_flusher_behavior(true) {
                    tracing::debug!(%error, "threads of a mount are no part of the I/O path");
                }
                if let Err(error) = session.run() {
                    tracing::error!(mount = %place.display(), %error, "the mount has ended");
                }
                *ended.has.lock() = true;
                ended.changed.notify_all();
            }
        };
        thread::Builder::new().name("fuse".to_owned()).spawn(body).map_err(start)?;
        tracing::info!(mount = %place.display(), "mounted");
        Ok(Self { place, files, ended, guard: Mutex::new(Some(guard)) })
    }

    /// Where it is.
    pub fn place(&self) -> &Path {
        &self.place
    }

    /// Files that are open.
    pub fn open_files(&self) -> usize {
        self.files.open_of(None).len()
    }

    /// Open files of a served disk.
    pub fn open_files_of(&self, disk: &str) -> usize {
        self.files.open_of(Some(disk)).len()
    }

    /// Closes the files of a served disk: what is under way ends, later requests get ESTALE. Returns how many still wait for
    /// their disk; of the others nothing is held any more.
    pub fn withdraw(&self, disk: &str) -> usize {
        self.close(Some(disk))
    }

    fn close(&self, of: Option<&str>) -> usize {
        let files = self.files.open_of(of);
        files.iter().for_each(|file| file.begin_close());
        let deadline = Instant::now() + PATIENCE;
        let left = files.iter().filter(|file| !file.close(deadline)).count();
        if left > 0 {
            tracing::warn!(mount = %self.place.display(), left, "open files still wait for their disk");
        }
        left
    }

    /// Takes the mount out of sight. Programs that have files open keep them, and the mount goes on until they are closed.
    ///
    /// # Errors
    /// When it is still there.
    pub fn detach(&self) -> io::Result<Detached> {
        if self.has_ended() { Ok(Detached::Unused) } else { place::detach(&self.place) }
    }

    /// Whether the kernel is done with it: someone has unmounted it, and no file of it is open.
    pub fn has_ended(&self) -> bool {
        *self.ended.has.lock()
    }

    /// Waits until the kernel is done with it.
    pub fn wait(&self) {
        let mut has = self.ended.has.lock();
        self.ended.changed.wait_while(&mut has, |has| !*has);
    }

    /// Ends it: requests under way are finished, programs that still have files open get errors.
    pub fn stop(&self) {
        self.close(None);
        self.end();
        // Those that were opened meanwhile.
        self.close(None);
        // It looks whether something is left.
        drop(self.guard.lock().take());
    }

    fn end(&self) {
        if self.has_ended() {
            return;
        }
        if let Err(error) = place::abort(&self.place) {
            tracing::warn!(mount = %self.place.display(), %error, "the mount is left: `umount -l` takes it away");
        }
        let deadline = Instant::now() + PATIENCE;
        let mut has = self.ended.has.lock();
        // Where only root may end it, it lives until its files are closed or this process ends.
        if self.ended.changed.wait_while_until(&mut has, |has| !*has, deadline).timed_out() {
            tracing::warn!(mount = %self.place.display(), "programs still have files of the mount open");
        }
        tracing::info!(mount = %self.place.display(), "unmounted");
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        self.stop();
    }
}

/// A second process that cleans up if this one is killed.
#[derive(Debug)]
struct Guard(Option<Child>);

impl Guard {
    /// Starts one, in a process group of its own: what is sent to this one does not reach it.
    fn start(program: Option<&Path>, place: &Path, is_made: bool) -> io::Result<Self> {
        let Some(program) = program else { return Ok(Self(None)) };
        let mut command = Command::new(program);
        command.arg("mount-guard").args(is_made.then_some("--remove")).arg(place).process_group(0);
        command.stdin(Stdio::piped()).stdout(Stdio::null());
        Ok(Self(Some(command.spawn()?)))
    }
}

impl Drop for Guard {
    /// Waits until it has looked whether something is left.
    fn drop(&mut self) {
        if let Some(mut guard) = self.0.take() {
            drop(guard.stdin.take());
            let _ = guard.wait();
        }
    }
}

/// Waits for the end of the process that has the other end of `input`, and takes away what it left of a mount on `place`. With
/// `is_made`, the empty file there goes, too. For the guard.
///
/// # Errors
/// What is left.
pub fn guard(mut input: impl io::Read, place: &Path, is_made: bool) -> io::Result<()> {
    // Nothing is ever written.
    let _ = input.read(&mut [0]);
    clean_up(place)?;
    if is_made && fs::symlink_metadata(place).is_ok_and(|found| found.is_file() && found.len() == 0) {
        fs::remove_file(place)?;
    }
    Ok(())
}
