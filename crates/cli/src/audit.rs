//! Changes that a command makes without a server: the same log line and line of the audit file as the server's for each.
//!
//! What a server does for a command is in the server's log and audit file, by the user who asked for it.

use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use anyhow::Result;
use nix::unistd::{User, getuid};
use vmstrata_api::ChangedBy;
use vmstrata_server::Audit;
pub use vmstrata_server::What;

use crate::attach::absolute;

/// The file, as this process was asked; like the log, it is one for all that the process does.
static FILE: OnceLock<PathBuf> = OnceLock::new();

/// Has changes appended to `file`, if there is one. Call once, at the start.
pub fn start(file: Option<PathBuf>) {
    if let Some(file) = file {
        FILE.get_or_init(|| file);
    }
}

/// The file.
pub fn file() -> Option<&'static Path> {
    FILE.get().map(PathBuf::as_path)
}

/// Something about the disks at `paths`.
pub fn of<P: AsRef<Path>>(change: &'static str, paths: impl IntoIterator<Item = P>) -> What {
    What::of(change, paths.into_iter().map(|path| absolute(path.as_ref())))
}

/// Does `work`, which may complete what is said of it, and records it.
///
/// # Errors
/// Before the work: an audit file that cannot be written. Those of the work.
pub fn change<T>(what: What, work: impl FnOnce(&mut What) -> Result<T>) -> Result<T> {
    let audit = Audit::without_events(file())?;
    let name = User::from_uid(getuid()).ok().flatten().map(|user| user.name);
    audit.change(ChangedBy::Local { uid: getuid().as_raw(), name }, what, work)
}
