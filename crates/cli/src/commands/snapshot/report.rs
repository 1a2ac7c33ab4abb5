//! What the commands print: as data for scripts, as text for people.

use std::collections::BTreeMap;
use std::path::Path;

use serde::Serialize;
use vmstrata_api::SnapshotTaken;
use vmstrata_disk::snapshot::{Created, Snapshot, SnapshotInfo};
use vmstrata_types::{path_to_text, time};

use crate::args::{SnapshotCloneArgs, SnapshotHoldArgs, SnapshotRevertArgs};
use crate::commands::gc::LeftOver;
use crate::output::{Table, answer, counted};
use crate::units::{exact_size, short_size};

/// A snapshot that was taken of one or more disks.
#[derive(Debug, Serialize)]
pub struct Taken {
    name: String,
    time: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    group: Option<String>,
    /// For how long a server held writes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pause_us: Option<u64>,
    /// Whether guests' file systems were frozen for it.
    #[serde(skip_serializing_if = "Option::is_none")]
    quiesced: Option<bool>,
    #[serde(skip_serializing_if = "Option::is_none")]
    not_quiesced_because: Option<String>,
    snapshots: Vec<TakenOne>,
}

/// What became of one disk.
#[derive(Debug, Serialize)]
pub struct TakenOne {
    disk: String,
    layer: String,
    /// Whether the disk was a raw file, and is qcow2 from now on.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    was_raw: bool,
}

impl TakenOne {
    /// From the engine's answer.
    pub fn new(created: &Created) -> Self {
        Self::named(path_to_text(&created.disk), path_to_text(&created.layer), created.was_raw)
    }

    /// From what a server says.
    pub fn named(disk: String, layer: String, was_raw: bool) -> Self {
        Self { disk, layer, was_raw }
    }
}

impl Taken {
    /// What was taken of `snapshots`.
    pub fn new(info: &SnapshotInfo, snapshots: Vec<TakenOne>) -> Self {
        let (name, time) = (info.name.clone(), time::rfc3339(info.taken_ns));
        let group = info.group.clone();
        Self { name, time, group, pause_us: None, quiesced: None, not_quiesced_because: None, snapshots }
    }

    /// With what a server says of it.
    pub fn live(self, taken: &SnapshotTaken) -> Self {
        let not_quiesced_because = taken.not_quiesced_because.clone();
        Self { pause_us: Some(taken.pause_us), quiesced: Some(taken.quiesced), not_quiesced_because, ..self }
    }
}

/// A disk's snapshots.
#[derive(Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct Listed<'a> {
    disk: String,
    snapshots: Vec<Row<'a>>,
    /// Files that it does not stand on any more, where they were asked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    left_over: Option<Vec<LeftOver>>,
}

impl<'a> Listed<'a> {
    /// Those of `disk`, and what it left behind.
    pub fn new(disk: &Path, snapshots: &'a [Snapshot], left_over: Option<Vec<LeftOver>>) -> Self {
        Self { disk: path_to_text(disk), snapshots: snapshots.iter().map(Row::new).collect(), left_over }
    }
}

/// One snapshot as data.
#[derive(Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct Row<'a> {
    name: Option<&'a str>,
    time: Option<String>,
    time_ns: Option<u64>,
    labels: BTreeMap<&'a str, &'a str>,
    /// The tags of its holds.
    holds: Vec<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    group: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    cloned_from: Option<&'a str>,
    layer: String,
    format: String,
    /// Layers between it and the active one, that one included.
    depth: usize,
    /// Layers below it.
    number: usize,
    virtual_size: u64,
    actual_size: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    damage: Option<&'a str>,
    /// It was half deleted, and is no state any more.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    being_deleted: bool,
}

impl<'a> Row<'a> {
    /// As the engine found it.
    pub fn new(snapshot: &'a Snapshot) -> Self {
        let info = snapshot.info.as_ref();
        let labels = info.map_or(&[][..], |info| &info.labels);
        Self {
            name: snapshot.name(),
            time: info.map(|info| time::rfc3339(info.taken_ns)),
            time_ns: info.map(|info| info.taken_ns),
            labels: labels.iter().map(|(key, value)| (key.as_str(), value.as_str())).collect(),
            holds: snapshot.holds().unwrap_or_default(),
            group: info.and_then(|info| info.group.as_deref()),
            cloned_from: snapshot.origin.as_deref(),
            layer: path_to_text(&snapshot.layer),
            format: snapshot.format.to_string(),
            depth: snapshot.depth,
            number: snapshot.number,
            virtual_size: snapshot.virtual_size,
            actual_size: snapshot.allocated_bytes,
            damage: snapshot.damage.as_deref(),
            being_deleted: snapshot.is_being_deleted,
        }
    }

    fn labels(&self) -> String {
        let mut labels: Vec<String> =
            self.labels.iter().map(|(key, value)| format!("{key}={value}")).collect();
        labels.extend(self.group.map(|group| format!("(group {group})")));
        labels.extend((!self.holds.is_empty()).then(|| format!("(held: {})", self.holds.join(", "))));
        labels.extend(self.cloned_from.map(|disk| format!("(cloned from {disk})")));
        labels.extend(self.being_deleted.then(|| "(being deleted)".to_owned()));
        labels.join(" ")
    }
}

/// The list as a table.
pub fn table(disk: &Path, snapshots: &[Snapshot]) -> String {
    if snapshots.is_empty() {
        return format!("{}: no snapshots\n", disk.display());
    }
    let mut table = Table::new(["NAME", "TAKEN", ">SIZE ON DISK", "FILE", "LABELS"]);
    for snapshot in snapshots {
        let row = Row::new(snapshot);
        let (name, size) = (row.name.unwrap_or("-").to_owned(), short_size(row.actual_size));
        let file = snapshot.layer.file_name().unwrap_or_default().to_string_lossy().into_owned();
        table.row([name, row.time.clone().unwrap_or_else(|| "-".to_owned()), size, file, row.labels()]);
    }
    table.to_string()
}

/// One snapshot as lines.
pub fn show(snapshot: &Snapshot) -> String {
    let row = Row::new(snapshot);
    let mut lines = vec![
        ("name", row.name.unwrap_or("-").to_owned()),
        ("taken", row.time.clone().unwrap_or_else(|| "-".to_owned())),
    ];
    lines.extend(
        row.being_deleted.then(|| ("state", "being deleted; it can only be deleted again".to_owned())),
    );
    lines.extend(row.group.map(|group| ("group", group.to_owned())));
    lines.extend(row.holds.iter().map(|tag| ("held", tag.clone())));
    lines.extend(row.cloned_from.map(|disk| ("cloned from", disk.to_owned())));
    lines.extend(row.labels.iter().map(|(key, value)| ("label", format!("{key}={value}"))));
    lines.push(("layer", format!("{} ({})", row.layer, row.format)));
    lines.push(("newer", counted(row.depth as u64 - 1, "layer") + " between it and the active one"));
    lines.push(("disk size", exact_size(row.virtual_size)));
    lines.push(("size on disk", exact_size(row.actual_size)));
    lines.iter().map(|(what, value)| format!("{what:<13} {value}\n")).collect()
}

/// A hold that was placed or released.
#[derive(Debug, Serialize)]
pub struct Holding {
    disk: String,
    snapshot: String,
    tag: String,
    held: bool,
}

impl Holding {
    /// The hold that was asked for.
    pub fn new(args: &SnapshotHoldArgs, held: bool) -> Self {
        Self { disk: path_to_text(&args.disk), snapshot: args.name.clone(), tag: args.tag.clone(), held }
    }

    /// Prints it.
    ///
    /// # Errors
    /// When nobody reads it.
    pub fn tell(&self, how: &str, json: bool) -> anyhow::Result<()> {
        answer(json, self, || format!("{}@{}: {how} ({})\n", self.disk, self.snapshot, self.tag))
    }
}

/// A disk that went back.
#[derive(Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct Reverted {
    disk: String,
    snapshot: String,
    layer: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    kept: Option<String>,
    /// Newest first.
    dropped_layers: Vec<String>,
}

impl Reverted {
    /// What was asked, and what was done.
    pub fn new(args: &SnapshotRevertArgs, layer: String, dropped_layers: Vec<String>) -> Self {
        Self {
            disk: path_to_text(&args.disk),
            snapshot: args.name.clone(),
            layer,
            kept: args.keep.as_deref().map(path_to_text),
            dropped_layers,
        }
    }

    /// Prints it.
    ///
    /// # Errors
    /// When nobody reads it.
    pub fn tell(&self, json: bool) -> anyhow::Result<()> {
        answer(json, self, || self.text())
    }

    /// The same in words.
    fn text(&self) -> String {
        let mut lines = format!("{}: is as at {} again\n", self.disk, self.snapshot);
        if let Some(kept) = &self.kept {
            lines += &format!("{kept}: what it was until now\n");
        }
        for layer in &self.dropped_layers {
            lines += &format!("{layer}: no longer below {}\n", self.disk);
        }
        lines
    }
}

/// A new disk.
#[derive(Debug, Serialize)]
pub struct Cloned {
    disk: String,
    snapshot: String,
    clone: String,
    layer: String,
}

impl Cloned {
    /// What was asked, and where it stands.
    pub fn new(args: &SnapshotCloneArgs, layer: &Path) -> Self {
        let (disk, clone) = (path_to_text(&args.disk), path_to_text(&args.output));
        Self { disk, snapshot: args.name.clone(), clone, layer: path_to_text(layer) }
    }

    /// The same in words.
    pub fn text(&self) -> String {
        format!("{}: made, as {} was at {} ({})\n", self.clone, self.disk, self.snapshot, self.layer)
    }
}
