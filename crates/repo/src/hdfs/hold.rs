//! Holding a repository in a file system that has no locks, so that nothing is deleted while another process writes or reads.
//!
//! A hold is a directory of its own in `.holds`, with a file `alive` that stays open for writing. HDFS lets one client write
//! a file, and ends its lease if the client does not renew it for 60 seconds by the NameNode's clock. So a killed process lets
//! go, and no clocks are compared.
//!
//! *Two never hold against each other.* Each makes its directory first, then looks for others. The NameNode does one thing
//! after another, so at least one of two sees the other, and gives up.
//!
//! *A process that lost its hold does no harm.* It may have been stopped, and not know. The process that finds the hold
//! expired removes the directory, and all that matters is renamed out of it or into it: unfinished objects lie there until
//! they get their names, and objects are deleted by being moved there. Without the directory both fail, however late they
//! come.

use std::sync::Arc;
use std::{fmt, io};

use hdfs_native::WriteOptions;
use hdfs_native::file::FileWriter;
use parking_lot::Mutex;

use super::link::Link;
use crate::holds::{Kind, Lasting, Taken};
use crate::name::draw_id;
use crate::repository::Swept;

/// The directory of all holds, in the repository.
const HOLDS: &str = ".holds";
/// What is open as long as the hold lasts.
const ALIVE: &str = "alive";
/// Ends the names of objects that are not published.
pub(super) const UNFINISHED: &str = ".new";

/// A hold on a repository, until it is dropped.
pub(super) struct HoldDir {
    link: Arc<Link>,
    /// Its directory.
    path: String,
    /// Open, and renewed by the client's threads.
    _alive: Mutex<FileWriter>,
}

impl fmt::Debug for HoldDir {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HoldDir").field("path", &self.path).finish_non_exhaustive()
    }
}

impl HoldDir {
    /// Holds the repository in the directory `repository`, unless another holds it against that.
    pub(super) fn take(link: &Arc<Link>, repository: &str, kind: Kind) -> io::Result<Taken<Self>> {
        let holds = format!("{repository}/{HOLDS}");
        let own = format!("{}{:032x}", kind.prefix(), draw_id());
        let path = format!("{holds}/{own}");
        let options = WriteOptions::default().replication(1).permission(0o660).create_parent(true);
        let alive = link.ask(link.client.create(&format!("{path}/{ALIVE}"), options))?;
        // From here on dropping it removes the directory.
        let hold = Self { link: Arc::clone(link), path, _alive: Mutex::new(alive) };
        let mut swept = Swept::default();
        for other in link.ask(link.client.list_status(&holds, false))? {
            let name = other.path.rsplit('/').next().unwrap_or_default();
            let is_against = name != own && kind.is_against(name);
            if !is_against {
                continue;
            }
            if is_alive(link, &other.path)? {
                return Ok((None, swept));
            }
            swept += remove(link, &other.path)?;
        }
        Ok((Some(hold), swept))
    }

    /// Where objects lie while they are written, and those that are deleted.
    pub(super) fn path(&self) -> &str {
        &self.path
    }
}

impl Lasting for HoldDir {
    /// Once it does not count, it never will again.
    fn check(&self) -> io::Result<()> {
        match self.link.ask(self.link.client.get_file_info(&self.path)) {
            Ok(_) => Ok(()),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Err(lost()),
            Err(error) => Err(error),
        }
    }
}

impl Drop for HoldDir {
    fn drop(&mut self) {
        if let Err(error) = self.link.tidy(self.link.client.delete(&self.path, true)) {
            tracing::warn!("{}: cannot be removed, and holds until its lease expires: {error}", self.path);
        }
    }
}

/// That the hold's directory is gone.
pub(super) fn lost() -> io::Error {
    io::Error::other("the hold on it was lost: this process did not reach the NameNode for over a minute")
}

/// Whether the process that made the hold still renews its lease.
fn is_alive(link: &Link, hold: &str) -> io::Result<bool> {
    // Appending is refused while another writes. It closes the file of a writer whose lease has expired.
    match link.ask(link.client.append(&format!("{hold}/{ALIVE}"))) {
        Ok(_) => Ok(false),
        Err(error) => match error.kind() {
            io::ErrorKind::NotFound => Ok(false),
            // The last two: another is finding out just now; another user's, of which nobody can tell.
            io::ErrorKind::AlreadyExists | io::ErrorKind::ResourceBusy | io::ErrorKind::PermissionDenied => {
                Ok(true)
            }
            _ => Err(error),
        },
    }
}

/// Removes the holds that have expired, of which there need be none, with what their processes did not finish.
pub(super) fn sweep(link: &Link, repository: &str) -> io::Result<Swept> {
    let holds = match link.ask(link.client.list_status(&format!("{repository}/{HOLDS}"), false)) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Swept::default()),
        holds => holds?,
    };
    let mut swept = Swept::default();
    for hold in holds {
        if !is_alive(link, &hold.path)? {
            swept += remove(link, &hold.path)?;
        }
    }
    Ok(swept)
}

/// Removes an expired hold with all that is in it, and counts the unfinished objects.
fn remove(link: &Link, hold: &str) -> io::Result<Swept> {
    let mut unfinished = Swept::default();
    match link.ask(link.client.list_status(hold, false)) {
        Ok(files) => files.iter().filter(|file| file.path.ends_with(UNFINISHED)).for_each(|file| {
            unfinished += Swept { objects: 1, bytes: file.length as u64 };
        }),
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        Err(error) => return Err(error),
    }
    link.ask(link.client.delete(hold, true))?;
    Ok(unfinished)
}
