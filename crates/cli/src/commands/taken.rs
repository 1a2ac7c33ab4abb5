//! Snapshots of tiered disks, asked for without waiting for a NAS that does not answer.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{self, Receiver};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, anyhow};
use vmstrata_disk::snapshot::SnapshotInfo;
use vmstrata_tier::{Pin, find_snapshot, snapshots};

use super::tiered::{Found, repository_at};

/// How long a repository may take to say which snapshots it has.
const ANSWER_MAX: Duration = Duration::from_secs(5);

/// A snapshot of a tiered disk, which its name and time tell from all others.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Taken {
    /// What it is called.
    pub name: String,
    /// When it was taken, in ns since 1970.
    pub taken_ns: u64,
}

/// Asks the repository of the tiered disk at `path`, on a thread of its own, which is left behind if the repository hangs.
fn ask<T: Send + 'static>(
    path: &Path,
    question: impl FnOnce(Found) -> Result<T> + Send + 'static,
) -> Result<Receiver<Result<T>>> {
    let (tell, told) = mpsc::sync_channel(1);
    let path = path.to_owned();
    let answer = move || {
        let shown = path.display();
        let answer = repository_at(&path).and_then(|found| {
            question(found.with_context(|| format!("{shown}: no repository of a tiered disk is there"))?)
        });
        // After the deadline the receiver is gone.
        let _ = tell.send(answer);
    };
    std::thread::Builder::new().name("ask".to_owned()).spawn(answer)?;
    Ok(told)
}

/// The answer to what was asked, if it comes in time.
fn answer<T>(path: &Path, told: &Receiver<Result<T>>, deadline: Instant) -> Result<T> {
    let left = deadline.saturating_duration_since(Instant::now());
    told.recv_timeout(left)
        .unwrap_or_else(|_| Err(anyhow!("{}: its repository does not answer", path.display())))
}

/// The snapshots that the repositories of tiered disks keep, or why one does not say; by whatever the disks are called.
///
/// # Errors
/// When the host is out of threads.
pub fn kept_of(disks: BTreeMap<String, PathBuf>) -> Result<BTreeMap<String, Result<Vec<Taken>, String>>> {
    let list = |found: Found| {
        let taken = |(info, _): (SnapshotInfo, Pin)| Taken { name: info.name, taken_ns: info.taken_ns };
        Ok(snapshots(&*found.repository)?.into_iter().map(taken).collect())
    };
    let asked: Vec<_> =
        disks.into_iter().map(|(disk, path)| Ok((disk, ask(&path, list)?, path))).collect::<Result<_>>()?;
    let deadline = Instant::now() + ANSWER_MAX;
    let kept = |told: &Receiver<Result<_>>, path: &Path| {
        answer(path, told, deadline).map_err(|error| format!("{error:#}"))
    };
    Ok(asked.into_iter().map(|(disk, told, path)| (disk, kept(&told, &path))).collect())
}

/// The repository of the tiered disk at `path`, and the pin of a snapshot.
///
/// # Errors
/// No such snapshot; a repository that does not answer.
pub fn find_taken(path: &Path, taken: Taken) -> Result<(Found, Pin)> {
    let find = move |found: Found| {
        let pin = find_snapshot(&*found.repository, &taken.name, taken.taken_ns)?;
        Ok((found, pin))
    };
    answer(path, &ask(path, find)?, Instant::now() + ANSWER_MAX)
}

/// Takes the name of a snapshot of the tiered disk at `path` away; false if there is no such snapshot.
///
/// # Errors
/// A repository that cannot be read or written, or does not answer.
pub fn forget_taken(path: &Path, taken: Taken) -> Result<bool> {
    let forget = move |found: Found| {
        let repository = &*found.repository;
        match find_snapshot(repository, &taken.name, taken.taken_ns) {
            Ok(pin) => pin.release(repository)?,
            Err(vmstrata_tier::Error::NoState { .. }) => return Ok(false),
            Err(error) => return Err(error.into()),
        }
        Ok(true)
    };
    answer(path, &ask(path, forget)?, Instant::now() + ANSWER_MAX)
}
