//! Snapshots of a tiered disk that were cut off, and whose epochs are not published yet.
//!
//! Whoever takes one need not wait for the repository: the engine gives the epoch its name once it is published. They are in a file of this
//! host's copy of the disk, so that a process that goes on with the copy goes on with them.

use std::fs;
use std::io::{ErrorKind, Write as _};
use std::path::{Path, PathBuf};
use std::time::Duration;

use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use vmstrata_disk::AtomicFile;
use vmstrata_disk::snapshot::SnapshotInfo;

use crate::error::{Error, Result};
use crate::head::EpochNumber;
use crate::pin::Purpose;

const FILE: &str = "snapshots.json";
/// Snapshots of one disk that may wait.
const PENDING_MAX: usize = 256;
/// More than so many take.
const FILE_BYTES_MAX: u64 = 8 << 20;

/// A snapshot that is there once its epoch is published.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PendingSnapshot {
    /// What it will be called.
    pub name: String,
    /// When it was taken, in nanoseconds since 1970, by the clock of whoever took it.
    pub taken_ns: u64,
    /// Its labels.
    pub labels: Vec<(String, String)>,
    /// The epoch that it is.
    pub epoch: EpochNumber,
}

impl PendingSnapshot {
    pub(crate) fn new(info: &SnapshotInfo, epoch: EpochNumber) -> Self {
        let SnapshotInfo { name, taken_ns, labels, .. } = info.clone();
        Self { name, taken_ns, labels, epoch }
    }

    pub(crate) fn purpose(&self) -> Purpose {
        let Self { name, taken_ns, labels, .. } = self.clone();
        Purpose::Snapshot { name, taken_ns, labels }
    }
}

/// A state that was cut off.
#[derive(Clone, Copy, Debug)]
pub struct CutState {
    /// Its epoch.
    pub epoch: EpochNumber,
    /// For how long the guest's writes were held.
    pub pause: Duration,
}

/// The snapshots of one disk that wait.
#[derive(Debug)]
pub(crate) struct Pending {
    file: PathBuf,
    list: Mutex<Vec<PendingSnapshot>>,
}

impl Pending {
    /// Those that the copy in a directory has.
    ///
    /// # Errors
    /// A file that is damaged; whatever the host reports.
    pub(crate) fn of(local: &Path) -> Result<Self> {
        let file = local.join(FILE);
        let failed = |error| Error::of_file(&file, "read")(error);
        let list = match fs::metadata(&file) {
            Err(error) if error.kind() == ErrorKind::NotFound => Vec::new(),
            Ok(about) if about.len() > FILE_BYTES_MAX => return Err(failed(ErrorKind::FileTooLarge.into())),
            _ => fs::read(&file).and_then(|text| Ok(serde_json::from_slice(&text)?)).map_err(failed)?,
        };
        Ok(Self { file, list: Mutex::new(list) })
    }

    /// All of them, oldest first.
    pub(crate) fn all(&self) -> Vec<PendingSnapshot> {
        self.list.lock().clone()
    }

    /// Those whose epochs are published.
    pub(crate) fn due(&self, published: EpochNumber) -> Vec<PendingSnapshot> {
        self.list.lock().iter().filter(|snapshot| snapshot.epoch <= published).cloned().collect()
    }

    /// Adds one, on stable storage.
    ///
    /// # Errors
    /// [`Error::NameTaken`] by another that waits; too many; whatever the host reports.
    pub(crate) fn add(&self, snapshot: PendingSnapshot) -> Result<()> {
        let mut list = self.list.lock();
        if list.iter().any(|other| other.name == snapshot.name) {
            let repository = self.file.display().to_string();
            return Err(Error::NameTaken { repository, name: snapshot.name });
        }
        if list.len() == PENDING_MAX {
            return Err(Error::TooManyPending { file: self.file.clone(), most: PENDING_MAX });
        }
        let mut longer = list.clone();
        longer.push(snapshot);
        self.write(&longer)?;
        *list = longer;
        Ok(())
    }

    /// Takes one away; false if it does not wait.
    ///
    /// # Errors
    /// Whatever the host reports: it still waits.
    pub(crate) fn remove(&self, name: &str, taken_ns: u64) -> Result<bool> {
        let mut list = self.list.lock();
        let is_it = |other: &PendingSnapshot| other.name == name && other.taken_ns == taken_ns;
        let shorter: Vec<PendingSnapshot> = list.iter().filter(|other| !is_it(other)).cloned().collect();
        if shorter.len() == list.len() {
            return Ok(false);
        }
        self.write(&shorter)?;
        *list = shorter;
        Ok(true)
    }

    fn write(&self, list: &[PendingSnapshot]) -> Result<()> {
        let mut draft = AtomicFile::beside(&self.file)?;
        let text = serde_json::to_vec(list).expect("plain data");
        draft.file.write_all(&text).map_err(Error::of_file(&self.file, "write"))?;
        Ok(draft.publish(&self.file, true)?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn snapshot(name: &str, epoch: EpochNumber) -> PendingSnapshot {
        let info = SnapshotInfo { name: name.to_owned(), taken_ns: 5, ..SnapshotInfo::default() };
        PendingSnapshot::new(&info, epoch)
    }

    #[test]
    fn as_many_wait_as_may_and_a_restart_finds_them() {
        let dir = tempfile::tempdir().unwrap();
        let pending = Pending::of(dir.path()).unwrap();
        let first = EpochNumber::NONE.next();
        for number in 0..PENDING_MAX {
            pending.add(snapshot(&number.to_string(), first)).unwrap();
        }
        assert!(matches!(pending.add(snapshot("0", first)), Err(Error::NameTaken { .. })));
        assert!(matches!(pending.add(snapshot("more", first)), Err(Error::TooManyPending { .. })));
        assert!(pending.due(EpochNumber::NONE).is_empty());
        assert!(!pending.remove("0", 6).unwrap() && pending.remove("0", 5).unwrap());
        pending.add(snapshot("last", first.next())).unwrap();
        let again = Pending::of(dir.path()).unwrap();
        assert_eq!(again.all(), pending.all());
        assert_eq!(again.due(first).len(), PENDING_MAX - 1);
        fs::write(dir.path().join(FILE), "[{").unwrap();
        assert!(Pending::of(dir.path()).unwrap_err().to_string().contains(FILE));
    }
}
