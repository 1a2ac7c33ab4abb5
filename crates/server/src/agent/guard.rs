//! Guests that go on although their server was killed while they were frozen.
//!
//! ```text
//!   note locked ──► second process ──► freeze ──► the cut ──► thaw ──► note removed
//!                                               │ server killed, or no thaw that succeeds
//!                                               ├─► the second process thaws, and removes the note
//!                                               └─► killed as well: the next server, or the next snapshot, finds the note
//! ```
//!
//! A note is a file in the runtime directory, which says at which socket the agent listens. The second process has the
//! note's lock as well, so an unlocked note is that of a guest without a guard. What was frozen by
//! someone else has no note, and is left alone.
//!
//! Invariant: while a guest may be frozen by this server, there is a note of it, locked by a process that will thaw it.

use std::ffi::OsString;
use std::fs::{self, File, TryLockError};
use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::io::{self, Read as _, Write as _};
use std::os::unix::ffi::{OsStrExt as _, OsStringExt as _};
use std::os::unix::fs::DirBuilderExt as _;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use vmstrata_store::{Access, FileId, Place};

use super::{AgentFault, Patience, thaw_left};

/// What a server that has thawed the guest says to the second process.
const DONE: u8 = b'd';
/// How long the second process tries: a server that is started again may be what the guest waits for.
const GUARD_PATIENCE: Duration = Duration::from_secs(60);
/// How often a lock is tried.
const KNOCK_EVERY: Duration = Duration::from_millis(20);
/// No socket's path is as long as this.
const PATH_MAX: u64 = 4096;

/// Where notes are, and what the second process is.
#[derive(Clone, Debug)]
pub(crate) struct Guards {
    dir: PathBuf,
    /// `None`: there is none, as in a program that is not `vmstrata`.
    program: Option<PathBuf>,
}

/// A locked note. It is removed when this is dropped, unless the guest may be frozen.
#[derive(Debug)]
pub(super) struct Note {
    path: PathBuf,
    file: File,
    /// Also of a note that a killed server left.
    pub(super) may_be_frozen: bool,
}

/// The second process, and the note that it shares.
#[derive(Debug)]
pub(super) struct Guard {
    child: Option<Child>,
    pub(super) note: Note,
}

impl Guards {
    /// Notes go below `runtime_dir`; `program` has the command `thaw-guard`.
    pub(crate) fn new(runtime_dir: &Path, program: Option<PathBuf>) -> Self {
        Self { dir: runtime_dir.join("frozen"), program }
    }

    /// The locked note of the agent at `socket`.
    ///
    /// # Errors
    /// [`AgentFault::Busy`] if someone else has it for longer than `patience`; a runtime directory without room.
    pub(super) fn note(&self, socket: &Path, patience: Duration) -> Result<Note, AgentFault> {
        fs::DirBuilder::new().recursive(true).mode(0o700).create(&self.dir)?;
        let mut hash = DefaultHasher::new();
        socket.hash(&mut hash);
        Note::lock(self.dir.join(format!("{:016x}", hash.finish())), patience, true)
    }

    /// Starts the second process for the agent at `socket`, which may be frozen from now on. It is in a process group of its
    /// own, so what is sent to this one's does not reach it.
    ///
    /// # Errors
    /// No process, or no room for the note: the guest must not be frozen.
    pub(super) fn start(&self, socket: &Path, mut note: Note) -> Result<Guard, AgentFault> {
        let start = |program: &PathBuf| {
            let mut command = Command::new(program);
            command.arg0("vmstrata").arg("thaw-guard").args([socket, &note.path]).process_group(0);
            // The note is its output so that it has the lock.
            command.stdin(Stdio::piped()).stdout(note.file.try_clone()?).spawn()
        };
        note.file.set_len(0)?;
        (&note.file).write_all(socket.as_os_str().as_bytes())?;
        let child = self.program.as_ref().map(start).transpose().map_err(AgentFault::Guard)?;
        note.may_be_frozen = true;
        Ok(Guard { child, note })
    }

    /// Thaws the guests that a killed server left frozen, each on a thread of its own: agents may be slow to answer.
    pub(crate) fn thaw_what_is_left(&self) {
        let Ok(notes) = fs::read_dir(&self.dir) else { return };
        for note in notes.flatten() {
            let thaw = move || {
                // Its second process may be at it.
                if let Err(fault) = thaw_if_left(note.path(), GUARD_PATIENCE + Patience::default().thaw) {
                    tracing::error!(note = %note.path().display(), %fault, "a guest may be frozen since its server was killed: send guest-fsfreeze-thaw to its agent");
                }
            };
            if let Err(error) = std::thread::Builder::new().name("thaw".into()).spawn(thaw) {
                tracing::error!(%error, "guests may be frozen since their server was killed: no thread");
            }
        }
    }
}

/// Thaws the guest of a note that a killed server left, if it is frozen.
fn thaw_if_left(path: PathBuf, patience: Duration) -> Result<(), AgentFault> {
    let mut note = match Note::lock(path, patience, false) {
        Ok(note) => note,
        Err(AgentFault::Io(error)) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(fault) => return Err(fault),
    };
    if note.may_be_frozen {
        let socket = note.socket()?;
        if thaw_left(&socket, Patience::default().thaw)? {
            tracing::warn!(agent = %socket.display(), "thawed a guest that a killed server had left frozen");
        }
        note.may_be_frozen = false;
    }
    Ok(())
}

impl Note {
    fn lock(path: PathBuf, patience: Duration, create: bool) -> Result<Self, AgentFault> {
        let deadline = Instant::now() + patience;
        loop {
            let place = Place::of(&path)?;
            let file = if create { place.open_or_create(0o600)? } else { place.open(Access::ReadWrite)? };
            match file.try_lock() {
                Ok(()) => {
                    let locked = file.metadata()?;
                    // As a rule, the process that held it has removed it.
                    if place.look().is_ok_and(|there| there.file() == FileId::of(&locked)) {
                        return Ok(Self { path, file, may_be_frozen: locked.len() > 0 });
                    }
                }
                Err(TryLockError::WouldBlock) if Instant::now() < deadline => std::thread::sleep(KNOCK_EVERY),
                Err(TryLockError::WouldBlock) => return Err(AgentFault::Busy(patience)),
                Err(TryLockError::Error(error)) => return Err(error.into()),
            }
        }
    }

    /// Where the agent listens.
    fn socket(&self) -> Result<PathBuf, AgentFault> {
        let mut bytes = Vec::new();
        (&self.file).take(PATH_MAX).read_to_end(&mut bytes)?;
        Ok(OsString::from_vec(bytes).into())
    }
}

impl Drop for Note {
    fn drop(&mut self) {
        if !self.may_be_frozen {
            let _ = fs::remove_file(&self.path);
        }
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        let Some(mut child) = self.child.take() else { return };
        let input = child.stdin.take();
        if self.note.may_be_frozen {
            // No word: it takes over, for longer than anybody here should wait.
            drop(input);
            let reap = std::thread::Builder::new().name("thaw".into()).spawn(move || child.wait());
            // Without a thread it stays a zombie until the server ends, which does no harm.
            return drop(reap);
        }
        if let Some(mut input) = input {
            // One that is gone guards nothing any more.
            let _ = input.write_all(&[DONE]);
        }
        let _ = child.wait();
    }
}

/// Is the second process: waits for the server's word, and thaws the guest if there is none, because the server was killed or
/// could not do it.
///
/// # Errors
/// An agent that does not answer for a minute. The note stays for the next server.
pub fn thaw_guard(socket: &Path, note: &Path) -> Result<(), AgentFault> {
    let mut word = [0];
    if io::stdin().read(&mut word).unwrap_or(0) == 1 && word[0] == DONE {
        return Ok(());
    }
    if thaw_left(socket, GUARD_PATIENCE)? {
        tracing::warn!(agent = %socket.display(), "thawed the guest, which the server had frozen and did not thaw");
    }
    fs::remove_file(note)?;
    Ok(())
}
