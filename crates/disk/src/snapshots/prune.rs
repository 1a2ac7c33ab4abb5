//! Which snapshots of a disk rules may delete.

use super::keep::no_later_than;
use super::{Keep, Snapshot, SnapshotInfo};

/// The label of snapshots of disks that were taken with one of a guest's memory, which needs them: `GUEST@NAME`.
pub const MEMORY_LABEL: &str = "memory";

/// The label of a state that is in a disk's history for the sake of a move only, until that is over.
pub const MOVE_LABEL: &str = "vmstrata/move";

/// The label of a state that is in a disk's history for the sake of a rebase only, which removes it: the id of the pin that the rebase
/// made, if it has made one.
pub const REBASE_LABEL: &str = "vmstrata/rebase";

/// What rules say of a disk's own snapshots. What has no name, what belongs to another disk, and states of a move or a rebase are in none of the lists.
#[derive(Debug, Default)]
pub struct Pruning<'a> {
    /// Those that a rule keeps.
    pub keep: Vec<&'a str>,
    /// Those that none keeps, and those that are half deleted already.
    pub delete: Vec<&'a str>,
    /// Those that are left alone for the sake of a guest's memory, which is worth nothing without them.
    pub with_memory: Vec<&'a str>,
    /// Those that no rule keeps and that are held, and so stay.
    pub held: Vec<&'a str>,
    /// Those of the first two that say they were taken after now, or after one that stands on them: the clock was wrong.
    pub misdated: Vec<&'a str>,
}

impl<'a> Pruning<'a> {
    /// Looks at those of `snapshots`, newest first, that have all of `labels`. Snapshots taken with a guest's memory are looked at only when
    /// the labels speak of that. It is `now_ns` since 1970.
    pub fn of(snapshots: &'a [Snapshot], keep: &Keep, labels: &[(String, String)], now_ns: u64) -> Self {
        let own = snapshots.iter().filter(|snapshot| snapshot.is_own());
        let named = own.filter_map(|snapshot| Some((snapshot, snapshot.info.as_ref()?)));
        let is_passing = |key: &str| [MOVE_LABEL, REBASE_LABEL].contains(&key);
        let named = named.filter(|(_, info)| !info.labels.iter().any(|(key, _)| is_passing(key)));
        let meant = named.filter(|(_, info)| labels.iter().all(|label| info.labels.contains(label)));
        // A deletion that was cut short is completed: they are no states any more.
        let (half_deleted, meant): (Vec<_>, Vec<_>) = meant.partition(|(found, _)| found.is_being_deleted);
        let is_memory = |(key, _): &(String, String)| key == MEMORY_LABEL;
        let for_memory = labels.iter().any(is_memory);
        let is_with_memory = |info: &SnapshotInfo| !for_memory && info.labels.iter().any(is_memory);
        let infos = meant.into_iter().map(|(_, info)| info);
        let (with_memory, looked_at): (Vec<&SnapshotInfo>, Vec<_>) =
            infos.partition(|info| is_with_memory(info));
        let taken: Vec<u64> = looked_at.iter().map(|info| info.taken_ns).collect();
        let decided = keep.decide_in_order(&taken, now_ns);
        let named = |wanted: bool| {
            let those = looked_at.iter().zip(&decided).filter(move |(_, kept)| **kept == wanted);
            those.map(|(info, _)| info.name.as_str())
        };
        let is_held = |name: &&str| {
            let of_name = |snapshot: &&Snapshot| snapshot.is_own() && snapshot.name() == Some(*name);
            let found = snapshots.iter().find(of_name);
            found.is_some_and(|found| found.holds().is_ok_and(|holds| !holds.is_empty()))
        };
        let (held, unheld): (Vec<&str>, Vec<&str>) = named(false).partition(is_held);
        let half_deleted = half_deleted.iter().map(|(_, info)| info.name.as_str());
        let with_memory = with_memory.iter().map(|info| info.name.as_str()).collect();
        let sound = looked_at.iter().zip(no_later_than(&taken, now_ns));
        let misdated = sound.filter(|(info, sound)| info.taken_ns != *sound);
        let misdated = misdated.map(|(info, _)| info.name.as_str()).collect();
        let (keep, delete) = (named(true).collect(), unheld.into_iter().chain(half_deleted).collect());
        Self { keep, delete, with_memory, held, misdated }
    }
}
