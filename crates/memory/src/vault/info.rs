//! What is known of a snapshot, beside its pages.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::bytes::Malformed;
use super::error::{Result, VaultError};
use super::name::{ObjectId, ObjectKind, SnapshotId, check_name};
use super::policy::Policy;
use super::stats::Stats;
use crate::ram::{Block, Layout};

/// No machine has memory above this address: 64 TiB.
pub(super) const MAX_ADDRESS: u64 = 1 << 46;
const MAX_LABELS: usize = 32;
const MAX_DISKS: usize = 256;
const MAX_BLOCKS: usize = 1024;
const MAX_TEXT: usize = 4096;
/// Objects that the pages of a snapshot may lie in.
pub(super) const MAX_OBJECTS: usize = 1 << 14;

/// A disk that was snapshotted at the same instant.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DiskState {
    /// The disk.
    pub disk: String,
    /// The name of its snapshot.
    pub snapshot: String,
    /// Of a tiered disk, when it was taken, in ns since 1970: that and the name tell it from all others. It is kept once it is published, and the
    /// snapshot of memory is complete then.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tiered_ns: Option<u64>,
}

impl DiskState {
    /// The state of an ordinary disk.
    pub fn new(disk: impl Into<String>, snapshot: impl Into<String>) -> Self {
        Self { disk: disk.into(), snapshot: snapshot.into(), tiered_ns: None }
    }
}

/// An object that a snapshot's pages lie in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ObjectUse {
    /// The object.
    pub name: ObjectId,
    /// Copies that this snapshot counts on.
    pub copies: u8,
    /// Its bytes.
    pub len: u64,
}

/// What is known of a snapshot, beside its pages.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Info {
    /// Tells it from all others.
    pub id: SnapshotId,
    /// The guest it is of.
    pub guest: String,
    /// Its name, the only one of the guest.
    pub name: String,
    /// The instant the guest was at, in ns since 1970.
    pub taken_ns: u64,
    /// Keys and values, as they were given.
    pub labels: Vec<(String, String)>,
    /// Disks at that instant.
    pub disks: Vec<DiskState>,
    /// The guest's memory; offsets are those of the file it was in.
    pub layout: Layout,
    /// Copies of metadata and critical pages.
    pub critical_copies: u8,
    /// Copies of clean pages.
    pub clean_copies: u8,
    /// The snapshot that unchanged pages were looked for in.
    pub parent: Option<SnapshotId>,
    /// Snapshots that it builds on, one on another; 0 for a full one, whose pages lie in no older snapshot's objects.
    pub step: u32,
    /// Where its pages lie, by the numbers that stand for them. An object keeps its number in the guest's next snapshots.
    pub objects: BTreeMap<u16, ObjectUse>,
    /// What it holds and costs.
    pub stats: Stats,
}

impl Info {
    /// `GUEST@NAME`.
    pub fn title(&self) -> String {
        format!("{}@{}", self.guest, self.name)
    }

    /// Whether it needs no object of an older snapshot.
    pub fn is_full(&self) -> bool {
        self.step == 0
    }

    /// Checks what callers give.
    pub(super) fn check(&self) -> Result<()> {
        check_name(&self.guest)?;
        check_name(&self.name)?;
        check_layout(&self.layout)?;
        let most = |what, value: usize, most: usize| {
            let (value, most) = (value.try_into().unwrap_or(i64::MAX), most as i64);
            if value <= most { Ok(()) } else { Err(VaultError::Limit { what, value, least: 0, most }) }
        };
        most("the number of labels", self.labels.len(), MAX_LABELS)?;
        most("the number of disks", self.disks.len(), MAX_DISKS)?;
        most("the number of objects", self.objects.len(), MAX_OBJECTS)?;
        let labels = self.labels.iter().flat_map(|(key, value)| [key, value]);
        let texts = labels.chain(self.disks.iter().flat_map(|state| [&state.disk, &state.snapshot]));
        let longest = texts.map(String::len).max().unwrap_or(0);
        most("the length of a label or of a disk's name", longest, MAX_TEXT)
    }

    /// Checks what was read.
    pub(super) fn check_read(&self) -> Result<(), Malformed> {
        let copies = 1..=Policy::MAX_COPIES;
        if !copies.contains(&self.critical_copies) || self.clean_copies > self.critical_copies {
            return Err(Malformed("a number of copies is out of bounds"));
        }
        if self.objects.values().any(|object| object.name.kind == ObjectKind::Metadata) {
            return Err(Malformed("an object is of no known kind"));
        }
        self.check().map_err(|_| Malformed("a name or a number is out of bounds"))
    }
}

/// Checks that a machine can be described.
pub(super) fn check_layout(layout: &Layout) -> Result<()> {
    let highest = layout.blocks().last().map_or(0, Block::end);
    let limit = |what, value, most| {
        if value <= most { Ok(()) } else { Err(VaultError::Limit { what, value, least: 0, most }) }
    };
    limit("the end of memory", highest as i64, MAX_ADDRESS as i64)?;
    limit("the number of memory blocks", layout.blocks().len() as i64, MAX_BLOCKS as i64)
}

#[cfg(test)]
pub(super) fn example() -> Info {
    let id = SnapshotId::from_bytes([5; 16]);
    let text = |text: &str| text.to_owned();
    Info {
        id,
        guest: text("web"),
        name: text("mon"),
        taken_ns: 1_700_000_000_000_000_000,
        labels: vec![(text("job"), text("nightly"))],
        disks: vec![DiskState::new("web.qcow2", "mon")],
        layout: Layout::split_at_4g(5 << 12, 3 << 12).unwrap(),
        critical_copies: 3,
        clean_copies: 1,
        parent: Some(SnapshotId::from_bytes([4; 16])),
        step: 3,
        objects: BTreeMap::from([(
            7,
            ObjectUse { name: ObjectId { owner: id, kind: ObjectKind::Critical }, copies: 3, len: 12345 },
        )]),
        stats: Stats { pages: 5, free: 1, ..Stats::default() },
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::address::Physical;

    #[test]
    fn limits_hold_at_and_past_their_edges() {
        let fits = |change: fn(&mut Info)| {
            let mut info = example();
            change(&mut info);
            info.check().is_ok()
        };
        let top = |end: u64| Layout::new(vec![Block { start: Physical::new(0), len: end, file_offset: 0 }]);
        assert!(fits(|info| info.labels = vec![("k".into(), "v".repeat(MAX_TEXT)); MAX_LABELS]));
        assert!(!fits(|info| info.labels = vec![("k".into(), "v".into()); MAX_LABELS + 1]));
        assert!(!fits(|info| info.labels = vec![("k".repeat(MAX_TEXT + 1), "v".into())]));
        assert!(!fits(|info| info.guest = "a@b".into()));
        assert!(check_layout(&top(MAX_ADDRESS).unwrap()).is_ok());
        assert!(check_layout(&top(MAX_ADDRESS + 4096).unwrap()).is_err());
    }
}
