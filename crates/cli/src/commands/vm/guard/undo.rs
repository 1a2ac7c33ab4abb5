//! What a guard undoes.

use std::ffi::OsStr;
use std::fs::{self, File};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use serde::{Deserialize, Serialize};
use vmstrata_api::{DiskList, encode_segment};
use vmstrata_memory::capture::Before;
use vmstrata_memory::qmp::{Qmp, QmpError};
use vmstrata_memory::restore::lazy::detach;
use vmstrata_memory::vault::{VaultError, Which};
use vmstrata_store::{Access, FileError, FileOptions, FileStore, LockError, Place};
use vmstrata_types::path_from_text;

use super::super::migration::Migration;
use super::super::{PATIENCE, disks::ServedDisks, store};
use crate::args::{ControlArgs, VaultArgs};
use crate::client::Client;

/// The variable in the environment of a QEMU, and of all that it starts, by which a guard finds them.
pub(in super::super) const MARK: &str = "VMSTRATA_RESTORE";

/// How long is tried to put QEMU back to what it was.
const PUT_BACK_MAX: Duration = Duration::from_secs(3600);
/// How soon after a failure.
const AGAIN: Duration = Duration::from_millis(100);
/// How long a killed process may take to be gone.
const END_MAX: Duration = Duration::from_secs(30);
/// How long a process may take to start a program.
const STARTING_MAX: Duration = Duration::from_secs(1);
/// How soon it is looked at again meanwhile.
const LOOK_AGAIN: Duration = Duration::from_millis(1);
/// How long a server may take to make a clone that a process asked for which is gone.
const CLONE_MAX: Duration = Duration::from_secs(30);

/// A step to undo.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(in super::super) enum Undo {
    /// A capture.
    Resume(Resume),
    /// A QEMU that was started with this value of [`MARK`].
    Kill(String),
    /// A file.
    Remove(PathBuf),
    /// A file system that is mounted on a directory.
    Detach(PathBuf),
    /// A disk of a guest that did not run.
    Drop(Clone),
    /// A guest that moves: it goes on where its disk is.
    Migration(Migration),
}

/// A capture: QEMU goes back to what it was, and the snapshot of the disks is deleted if that of the memory did not come to be.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(in super::super) struct Resume {
    /// The socket of QEMU's monitor.
    pub(in super::super) monitor: PathBuf,
    /// Whether the guest ran.
    pub(in super::super) ran: bool,
    /// The capability that the capture turns on.
    pub(in super::super) capability: Option<String>,
    pub(in super::super) guest: String,
    pub(in super::super) name: String,
    pub(in super::super) taken_ns: u64,
    /// What the server calls the disks.
    pub(in super::super) disks: Vec<String>,
    /// Where the server answers.
    pub(in super::super) control: Option<PathBuf>,
    /// Repositories.
    pub(in super::super) vault: Vec<String>,
}

/// A clone of a disk.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(in super::super) struct Clone {
    pub(in super::super) file: PathBuf,
    /// What the server calls it, if one was asked to serve it.
    pub(in super::super) served: Option<String>,
    /// Whether the server answered.
    pub(in super::super) is_served: bool,
    /// Where the server answers.
    pub(in super::super) control: Option<PathBuf>,
}

impl Undo {
    /// Undoes it, as far as there is something to undo.
    ///
    /// # Errors
    /// What is left, and why.
    pub(super) fn carry_out(&self) -> Result<()> {
        match self {
            Self::Resume(resume) => resume.carry_out(),
            Self::Kill(mark) => kill_marked(mark).context("killing QEMU"),
            Self::Remove(file) => absent(fs::remove_file(file)).with_context(|| file.display().to_string()),
            Self::Detach(dir) => absent(detach(dir)).with_context(|| dir.display().to_string()),
            Self::Drop(clone) => clone.carry_out(),
            Self::Migration(migration) => migration.end().map(drop),
        }
    }
}

/// What is not there need not be removed.
fn absent(done: io::Result<()>) -> io::Result<()> {
    done.or_else(|error| if error.kind() == io::ErrorKind::NotFound { Ok(()) } else { Err(error) })
}

impl Resume {
    fn carry_out(&self) -> Result<()> {
        let mut state = File::from(io::stdout().as_fd().try_clone_to_owned()?);
        // Until QEMU is done, or this process is.
        let read_on = move || io::copy(&mut state, &mut io::sink());
        std::thread::Builder::new()
            .name("read-on".into())
            .spawn(read_on)
            .context("starting the thread that reads what QEMU writes")?;
        self.put_back()?;
        let which = Which::Named { guest: self.guest.clone(), name: self.name.clone() };
        if !self.disks.is_empty()
            && matches!(
                store::open(&VaultArgs::of(&self.vault))?.find_id(&which),
                Err(VaultError::NotFound(_))
            )
        {
            let client = client(self.control.as_ref())?;
            ServedDisks::asked(client, self.disks.clone(), &self.name, self.taken_ns).undo_late();
        }
        Ok(())
    }

    /// Puts QEMU back to what it was. Tries again where its monitor does not answer, is another's, or breaks off: as long as
    /// this process lives it reads what QEMU writes, which the guest waits for.
    fn put_back(&self) -> Result<(), QmpError> {
        let before = Before { ran: self.ran, capability: self.capability.clone() };
        let deadline = Instant::now() + PUT_BACK_MAX;
        loop {
            let done = Qmp::connect(&self.monitor, PATIENCE).and_then(|mut qmp| before.put_back(&mut qmp));
            let is_gone = matches!(done, Err(QmpError::Connect { .. }));
            if done.is_ok() || is_gone || Instant::now() > deadline {
                return done;
            }
            std::thread::sleep(AGAIN);
        }
    }
}

impl Clone {
    fn carry_out(&self) -> Result<()> {
        if let Some(disk) = &self.served {
            let client = client(self.control.as_ref())?;
            let deadline = Instant::now() + if self.is_served { Duration::ZERO } else { CLONE_MAX };
            // A server makes a clone also when who asked for it is gone.
            let mut is_listed = self.is_listed(&client)?;
            while !is_listed && Instant::now() < deadline {
                std::thread::sleep(AGAIN);
                is_listed = self.is_listed(&client)?;
            }
            if is_listed {
                let force = if self.is_served { "?force=true" } else { "" };
                let path = format!("/v1/disks/{}{force}", encode_segment(disk));
                client.delete(&path).with_context(|| format!("the clone {disk} is still served"))?;
            }
        }
        remove_unused(&self.file).with_context(|| self.file.display().to_string())
    }

    /// Whether the server serves that file, by that name.
    fn is_listed(&self, client: &Client) -> Result<bool> {
        if !client.is_answered() {
            return Ok(false);
        }
        let served: DiskList = client.get("/v1/disks")?;
        let is_it = |name: &str, path: &str| {
            self.served.as_deref() == Some(name) && path_from_text(path) == self.file
        };
        Ok(served.disks.iter().any(|disk| is_it(&disk.name, &disk.path)))
    }
}

fn client(control: Option<&PathBuf>) -> Result<Client> {
    Client::new(&ControlArgs { control: control.cloned() })
}

/// Removes an image, if it is there and no process uses it: its name may have become another's.
fn remove_unused(image: &Path) -> Result<()> {
    let place = Place::of(image)?;
    let file = match place.open(Access::ReadWrite) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        opened => opened?,
    };
    match FileStore::new(file, image, &FileOptions::ACTIVE) {
        Ok(_lock) => Ok(place.remove()?),
        Err(FileError::Lock(LockError::Conflict { .. })) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

/// Kills the processes whose [`MARK`] has a value, and waits until they are gone.
fn kill_marked(mark: &str) -> io::Result<()> {
    let start = Instant::now();
    loop {
        let (found, some_unknown) = marked(mark)?;
        let longest = if found.is_empty() { STARTING_MAX } else { END_MAX };
        if found.is_empty() && !some_unknown || start.elapsed() > longest {
            return Ok(());
        }
        for process in &found {
            // One that has ended meanwhile needs no signal.
            let _ = pidfd_send_signal(process, Signal::KILL);
        }
        for process in &found {
            let left = END_MAX.saturating_sub(start.elapsed()).try_into().map_err(io::Error::other)?;
            while let Err(rustix::io::Errno::INTR) =
                poll(&mut [PollFd::new(process, PollFlags::IN)], Some(&left))
            {}
        }
        if found.is_empty() {
            std::thread::sleep(LOOK_AGAIN);
        }
    }
}

/// The processes of this user whose [`MARK`] has a value, and whether there are some of which that is not known yet.
fn marked(mark: &str) -> io::Result<(Vec<OwnedFd>, bool)> {
    let wanted = format!("{MARK}={mark}");
    let (mut found, mut some_unknown) = (Vec::new(), false);
    for entry in fs::read_dir("/proc")? {
        let dir = entry?.path();
        let pid = dir.file_name().and_then(|name| name.to_str()?.parse().ok()).and_then(Pid::from_raw);
        // Before it is examined: its number may become another's.
        let Some(process) = pid.and_then(|pid| pidfd_open(pid, PidfdFlags::empty()).ok()) else { continue };
        match environment(&dir) {
            Ok(Some(words)) => {
                let is_it = words.split(|byte| *byte == 0).any(|word| OsStr::from_bytes(word) == &*wanted);
                found.extend(is_it.then_some(process));
            }
            Ok(None) => some_unknown = true,
            // It has ended, or is another user's.
            Err(_) => {}
        }
    }
    Ok((found, some_unknown))
}

/// The environment of the process whose directory in /proc is `dir`; `None` while it starts another program: for a moment it
/// has a program, and neither words nor environment.
fn environment(dir: &Path) -> io::Result<Option<Vec<u8>>> {
    let read = |name: &str| fs::read(dir.join(name));
    let words = read("environ")?;
    if !words.is_empty() {
        return Ok(Some(words));
    }
    let has_words = !read("cmdline")?.is_empty();
    let words = read("environ")?;
    let is_known = has_words || !words.is_empty() || fs::read_link(dir.join("exe")).is_err();
    Ok(is_known.then_some(words))
}
