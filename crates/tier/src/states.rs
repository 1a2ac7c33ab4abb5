//! The states of a tiered disk that people find by a name: snapshots, and the disk as it was a while ago.
//!
//! A snapshot is a pin that has a name. What the disk was like a while ago, its kept heads say.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use vmstrata_disk::snapshot::SnapshotInfo;
use vmstrata_disk::{Disk, Format, OpenOptions, Resources};
use vmstrata_repo::Repository;
use vmstrata_types::time::rfc3339;

use crate::cache::Cache;
use crate::cached_files::{CachedFiles, LayerDirectory};
use crate::error::{Error, Result};
use crate::head::{DiskState, Epoch};
use crate::look::Heads;
use crate::pending::PendingSnapshot;
use crate::pin::{Pin, Purpose};
use crate::remote::{OnMissing, Remote};

/// The snapshots of a disk, oldest first.
///
/// # Errors
/// As [`Pin::all`].
pub fn snapshots(repository: &dyn Repository) -> Result<Vec<(SnapshotInfo, Pin)>> {
    Ok(snapshots_of(Pin::all(repository)?))
}

/// The snapshots among a disk's pins, oldest first.
pub fn snapshots_of(pins: Vec<Pin>) -> Vec<(SnapshotInfo, Pin)> {
    let named = |pin: Pin| match &pin.purpose {
        // One without layers is no state of a disk, whoever made it.
        Purpose::Snapshot { name, taken_ns, labels } if !pin.epoch.disks.is_empty() => {
            let (name, labels, taken_ns) = (name.clone(), labels.clone(), *taken_ns);
            Some((SnapshotInfo { name, labels, taken_ns, ..SnapshotInfo::default() }, pin))
        }
        _ => None,
    };
    let mut snapshots: Vec<_> = pins.into_iter().filter_map(named).collect();
    snapshots.sort_by_key(|(info, pin)| (pin.epoch.number, info.name.clone()));
    snapshots
}

/// Refuses a name that a snapshot has.
pub(crate) fn check_free(repository: &dyn Repository, name: &str) -> Result<()> {
    if snapshots(repository)?.iter().any(|(other, _)| other.name == name) {
        return Err(Error::NameTaken { repository: repository.describe(), name: name.to_owned() });
    }
    Ok(())
}

/// The pin of a snapshot, by its name and when it was taken.
///
/// # Errors
/// [`Error::NoState`], which says what there is; what the repository reports.
pub fn find_snapshot(repository: &dyn Repository, name: &str, taken_ns: u64) -> Result<Pin> {
    let found = snapshots(repository)?.into_iter().find(|(info, _)| info.name == name);
    let why = match found {
        Some((info, pin)) if info.taken_ns == taken_ns => return Ok(pin),
        Some((info, _)) => format!("'{name}' is another snapshot, of {}", rfc3339(info.taken_ns)),
        None => format!("no snapshot '{name}'"),
    };
    Err(Error::NoState { repository: repository.describe(), why })
}

/// Keeps a state that is published under the name that it waited for.
///
/// # Errors
/// [`Error::NameTaken`], [`Error::NotKept`]: it never will be; what the repository reports.
pub(crate) fn keep(repository: &dyn Repository, snapshot: &PendingSnapshot) -> Result<Pin> {
    // A process that was killed may have done it.
    if let Ok(pin) = find_snapshot(repository, &snapshot.name, snapshot.taken_ns) {
        return Ok(pin);
    }
    check_free(repository, &snapshot.name)?;
    Pin::make(repository, Some(snapshot.epoch), &snapshot.purpose())
}

/// The state of a name: a snapshot's, or `-30s`, `-10m`, `-2h` for the newest that is as old as that.
///
/// # Errors
/// [`Error::NoState`]; what the repository reports.
pub fn find_state(repository: &dyn Repository, name: &str, now_ns: u64) -> Result<Epoch> {
    let missing = |why: String| Error::NoState { repository: repository.describe(), why };
    if let Some(age) = name.strip_prefix('-') {
        let age = age_of(age).ok_or_else(|| missing(format!("'{name}' is no age: say -30s, -10m or -2h")))?;
        let mut oldest = 0;
        for head in Heads::of(repository)? {
            let epoch = head?.epoch;
            let is_old = epoch.time_ns.saturating_add(age.as_nanos() as u64) <= now_ns;
            oldest = now_ns.saturating_sub(epoch.time_ns) / 1_000_000_000;
            if is_old && !epoch.disks.is_empty() {
                return Ok(epoch);
            }
        }
        return Err(missing(format!("the oldest state that is kept is {oldest} s old")));
    }
    let snapshots = snapshots(repository)?;
    let names: Vec<&str> = snapshots.iter().map(|(info, _)| info.name.as_str()).collect();
    let none =
        if names.is_empty() { "it has none".to_owned() } else { format!("it has {}", names.join(", ")) };
    let found = snapshots.iter().find(|(info, _)| info.name == name);
    found.map(|(_, pin)| pin.epoch.clone()).ok_or_else(|| missing(format!("no snapshot '{name}': {none}")))
}

/// So many seconds, minutes or hours: `30s`, `10m`, `2h`.
pub fn age_of(text: &str) -> Option<Duration> {
    let unit = text.chars().last()?;
    let seconds = match unit {
        's' => 1,
        'm' => 60,
        'h' => 3600,
        _ => return None,
    };
    let count: u64 = text[..text.len() - 1].parse().ok()?;
    Some(Duration::from_secs(count.checked_mul(seconds).filter(|seconds| *seconds < 1 << 32)?))
}

/// Opens a state of a disk for reading, which a pin keeps, as a chain of layers in the directory `dir`: that of the repository, or any that is
/// there, such as `cache`, where the repository is none. Layers come by way of what another process keeps of them in the directory `cache`, or
/// else are files in `dir`; `files` opens the files of all disks of `resources`.
///
/// # Errors
/// A layer that cannot be read; whatever the host reports.
pub fn open_state(
    (repository, dir): (&Arc<dyn Repository>, &Path),
    state: &DiskState,
    (cache, files): (Option<&Path>, &Arc<CachedFiles>),
    open: &OpenOptions,
    resources: &Arc<Resources>,
) -> Result<Arc<Disk>> {
    let mut open = OpenOptions { read_only: true, format: Some(Format::Qcow2), ..open.clone() };
    open.allow_backing.push(dir.to_owned());
    if let Some(cache) = cache {
        let remote = Remote::new(&Cache::beside(cache)?, Arc::clone(repository), OnMissing::Wait);
        // Where this chain may have no indices: it is read for a while, and another process writes there.
        let layers = LayerDirectory { path: dir, indices: cache };
        files.add(layers, &remote, &state.objects)?;
        open.opener = files.clone();
    }
    Ok(Disk::open(&dir.join(state.newest().layer_name().as_str()), &open, resources)?)
}

/// Takes a snapshot's name away: its state may then be deleted.
///
/// # Errors
/// [`Error::NoState`]; what the repository reports.
pub fn forget(repository: &dyn Repository, name: &str) -> Result<()> {
    let found = snapshots(repository)?.into_iter().find(|(info, _)| info.name == name);
    let missing =
        || Error::NoState { repository: repository.describe(), why: format!("no snapshot '{name}'") };
    found.ok_or_else(missing)?.1.release(repository)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_age_is_a_number_and_a_unit() {
        assert_eq!(age_of("30s"), Some(Duration::from_secs(30)));
        assert_eq!(age_of("2h"), Some(Duration::from_secs(7200)));
        for text in ["", "s", "30", "-1s", "1d", "1.5m", "99999999999999999999h", "18446744073709551615h"] {
            assert_eq!(age_of(text), None, "{text}");
        }
    }
}
