//! What the commands print: as data for scripts, as text for people.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::Result;
use serde::Serialize;
use vmstrata_memory::vault::{DiskState, Info, Listed, Savings, UsedObject};
use vmstrata_types::time;

use super::super::kept::{Keeping, Look};
use crate::output::{Table, answer, counted, percent, print, print_json_line};
use crate::units::{exact_size, short_size};

/// All snapshots.
#[derive(Debug, Serialize)]
pub struct Listing<'a> {
    /// Newest first.
    pub snapshots: Vec<Row<'a>>,
}

/// One snapshot as data.
#[derive(Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct Row<'a> {
    id: String,
    guest: Option<&'a str>,
    name: Option<&'a str>,
    time: Option<String>,
    time_ns: Option<u64>,
    memory_size: Option<u64>,
    /// All copies that it added.
    cost: Option<u64>,
    copies: Option<u8>,
    clean_copies: Option<u8>,
    metadata_copies: usize,
    parent: Option<String>,
    /// Whether it needs no object of an older snapshot.
    full: Option<bool>,
    /// How many it builds on.
    step: Option<u32>,
    disks: Vec<Disk<'a>>,
    /// Whether its disks' states are kept.
    state: Option<&'static str>,
    /// Why they are not.
    #[serde(skip_serializing_if = "Option::is_none")]
    state_why: Option<String>,
    labels: BTreeMap<&'a str, &'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    damage: Option<&'a [String]>,
}

#[derive(Debug, Serialize)]
struct Disk<'a> {
    disk: &'a str,
    snapshot: &'a str,
}

impl<'a> Row<'a> {
    /// As the vault lists it, and its disks look.
    pub fn new(listed: &'a Listed, look: &Look) -> Self {
        let info = listed.info.as_ref().ok();
        let labels = info.map_or(&[][..], |info| &info.labels);
        let disks = info.map_or(&[][..], |info| &info.disks);
        let keeping = info.map(|info| look.of(&info.disks));
        Self {
            id: listed.id.to_string(),
            guest: info.map(|info| info.guest.as_str()),
            name: info.map(|info| info.name.as_str()),
            time: info.map(|info| time::rfc3339(info.taken_ns)),
            time_ns: info.map(|info| info.taken_ns),
            memory_size: info.map(|info| info.layout.bytes()),
            cost: info.map(|info| cost(info, listed)),
            copies: info.map(|info| info.critical_copies),
            clean_copies: info.map(|info| info.clean_copies),
            metadata_copies: listed.metadata_copies,
            parent: info.and_then(|info| info.parent).map(|id| id.to_string()),
            full: info.map(Info::is_full),
            step: info.map(|info| info.step),
            disks: disks.iter().map(|state| Disk { disk: &state.disk, snapshot: &state.snapshot }).collect(),
            state: keeping.as_ref().map(Keeping::name),
            state_why: keeping.and_then(|keeping| keeping.why().map(str::to_owned)),
            labels: labels.iter().map(|(key, value)| (key.as_str(), value.as_str())).collect(),
            damage: listed.info.as_ref().err().map(Vec::as_slice),
        }
    }
}

fn savings(info: &Info, listed: &Listed) -> Savings {
    let mut stats = info.stats;
    stats.bytes_metadata += listed.metadata_len;
    stats.savings()
}

fn cost(info: &Info, listed: &Listed) -> u64 {
    savings(info, listed).used
}

impl Listing<'_> {
    /// As a table, and why snapshots are not complete.
    pub fn text(&self) -> String {
        if self.snapshots.is_empty() {
            return "no snapshots\n".to_owned();
        }
        let columns = ["SNAPSHOT", "TAKEN", "STATE", ">MEMORY", ">COST", ">COPIES", ">STEP", "ID"];
        let mut table = Table::new(columns);
        self.snapshots.iter().for_each(|row| table.row(row.cells()));
        let why =
            |row: &Row<'_>| row.state_why.as_ref().map(|_| format!("{}: {}\n", row.title(), row.state()));
        table.to_string() + &self.snapshots.iter().filter_map(why).collect::<String>()
    }
}

impl Row<'_> {
    fn title(&self) -> String {
        self.guest
            .zip(self.name)
            .map_or_else(|| "(lost)".to_owned(), |(guest, name)| format!("{guest}@{name}"))
    }

    /// Whether its disks' states are kept, since when they are not, and why.
    fn state(&self) -> String {
        let (state, since) = (self.state.unwrap_or("-"), self.time.as_deref().unwrap_or("-"));
        match &self.state_why {
            None => state.to_owned(),
            Some(why) => format!("{state} since {since}: {why}"),
        }
    }

    fn cells(&self) -> [String; 8] {
        let row = self;
        let none = || "-".to_owned();
        let size = |bytes: Option<u64>| bytes.map_or_else(none, short_size);
        let copies = row.copies.map_or_else(none, |copies| copies.to_string());
        let time = row.time.clone().unwrap_or_else(none);
        let step = row.step.map_or_else(
            || "-".to_owned(),
            |step| match step {
                0 => "full".to_owned(),
                _ => step.to_string(),
            },
        );
        let state = row.state.unwrap_or("-").to_owned();
        [row.title(), time, state, size(row.memory_size), size(row.cost), copies, step, row.id.clone()]
    }
}

/// One snapshot, with what it holds and what was saved.
#[derive(Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct Shown<'a> {
    #[serde(flatten)]
    row: Row<'a>,
    pages: Pages,
    savings: SavingsRow,
    /// Other snapshots whose pages lie in the same objects.
    shared_with: Vec<&'a str>,
    objects: Vec<Object<'a>>,
    #[serde(skip)]
    info: Option<&'a Info>,
}

#[derive(Debug, Default, Serialize)]
#[serde(rename_all = "kebab-case")]
struct Pages {
    all: u64,
    free: u64,
    clean: u64,
    critical: u64,
    zero: u64,
    refilled: u64,
    dropped: u64,
    same: u64,
    in_older_snapshots: u64,
    stored: u64,
}

/// An object that pages of the snapshot lie in.
#[derive(Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
struct Object<'a> {
    object: String,
    copies: u64,
    /// Bytes of one copy.
    size: u64,
    critical_pages: u64,
    clean_pages: u64,
    used_by: &'a [String],
}

impl<'a> Object<'a> {
    fn new(used: &'a UsedObject) -> Self {
        Self {
            object: used.name.to_string(),
            copies: used.copies,
            size: used.len,
            critical_pages: used.critical_pages,
            clean_pages: used.clean_pages,
            used_by: &used.others,
        }
    }

    fn text(&self) -> String {
        let copies = if self.copies == 1 { "1 copy".to_owned() } else { format!("{} copies", self.copies) };
        let pages = [(self.critical_pages, "critical page"), (self.clean_pages, "clean page")];
        let pages = pages.iter().filter(|(count, _)| *count > 0).map(|(count, kind)| counted(*count, kind));
        let lost = pages.collect::<Vec<_>>().join(" and ");
        let users = if self.used_by.is_empty() {
            String::new()
        } else {
            format!("; used by {}", self.used_by.join(", "))
        };
        format!("{}: {copies} of {}, {lost}{users}", self.object, short_size(self.size))
    }
}

/// Bytes, all copies.
#[derive(Debug, Default, Serialize)]
#[serde(rename_all = "kebab-case")]
struct SavingsRow {
    full_copies: u64,
    free: u64,
    refill: u64,
    clean: u64,
    zero: u64,
    same: u64,
    in_older_snapshots: u64,
    zstd: i64,
    cost: u64,
}

impl<'a> Shown<'a> {
    /// As the vault lists it, with the objects that it uses, and its disks look.
    pub fn new(listed: &'a Listed, used: &'a [UsedObject], look: &Look) -> Self {
        let shared_with: BTreeSet<&str> =
            used.iter().flat_map(|object| object.others.iter().map(String::as_str)).collect();
        let info = listed.info.as_ref().ok();
        let stats = info.map(|info| info.stats).unwrap_or_default();
        let saved = info.map(|info| savings(info, listed)).unwrap_or_default();
        Self {
            row: Row::new(listed, look),
            pages: Pages {
                all: stats.pages,
                free: stats.free,
                clean: stats.clean,
                critical: stats.pages.saturating_sub(stats.free + stats.clean),
                zero: stats.zero_critical + stats.zero_clean,
                refilled: stats.refilled,
                dropped: stats.dropped,
                same: stats.same_critical + stats.same_clean,
                in_older_snapshots: stats.older_critical + stats.older_clean,
                stored: stats.stored_critical + stats.stored_clean,
            },
            savings: SavingsRow {
                full_copies: saved.full,
                free: saved.free,
                refill: saved.refill,
                clean: saved.clean,
                zero: saved.zero,
                same: saved.dedup,
                in_older_snapshots: saved.older,
                zstd: saved.zstd,
                cost: saved.used,
            },
            shared_with: shared_with.into_iter().collect(),
            objects: used.iter().map(Object::new).collect(),
            info,
        }
    }

    /// The same in words.
    pub fn text(&self) -> String {
        let mut lines = Vec::new();
        if let Some(info) = self.info {
            lines.push(("snapshot", info.title()));
            lines.push(("id", info.id.to_string()));
            lines.push(("taken", time::rfc3339(info.taken_ns)));
            lines.push(("state", self.row.state()));
            lines.push(("memory", exact_size(info.layout.bytes())));
            lines.extend(info.labels.iter().map(|(key, value)| ("label", format!("{key}={value}"))));
            let disk = |state: &DiskState| format!("{} at {}", state.disk, state.snapshot);
            lines.extend(info.disks.iter().map(|state| ("disk", disk(state))));
            let copies =
                format!("{} of critical pages, {} of clean", info.critical_copies, info.clean_copies);
            lines.push(("copies", copies));
            let step = match info.step {
                0 => "full: it needs no older snapshot's pages".to_owned(),
                step => format!("{step} since a full one, whose pages it needs"),
            };
            lines.push(("step", step));
        }
        let pages = &self.pages;
        let split = format!("{} critical, {} clean, {} free", pages.critical, pages.clean, pages.free);
        lines.push(("pages", split));
        lines.push(("stored", counted(pages.stored, "page")));
        let others = match self.shared_with.len() {
            0 => "used by no other snapshot".to_owned(),
            others => format!("used by {}", counted(others as u64, "other snapshot")),
        };
        lines.push(("objects", format!("{}, {others}", self.objects.len())));
        lines.extend(self.objects.iter().map(|object| ("", object.text())));
        let head: String = lines.iter().map(|(what, value)| format!("{what:<13} {value}\n")).collect();
        head + &self.causes()
    }

    fn causes(&self) -> String {
        let saved = &self.savings;
        let share = |bytes: u64| format!("{:5.1} %", percent(bytes, saved.full_copies));
        let mut lines = format!("full copies   {}\n", short_size(saved.full_copies));
        for (cause, bytes) in [
            ("free pages", saved.free),
            ("read again from disk", saved.refill),
            ("fewer copies of clean pages", saved.clean),
            ("zeros", saved.zero),
            ("same pages", saved.same),
            ("in older snapshots", saved.in_older_snapshots),
            ("zstd", u64::try_from(saved.zstd).unwrap_or(0)),
        ] {
            lines += &format!("  saved by    {}  {cause}: {}\n", share(bytes), short_size(bytes));
        }
        lines + &format!("cost          {} ({})\n", short_size(saved.cost), share(saved.cost).trim())
    }
}

/// Snapshots that are no more.
#[derive(Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct Gone {
    /// Their names.
    deleted: Vec<String>,
    /// Bytes given back; none when others use the vault now.
    freed: Option<u64>,
    /// Snapshots of disks that were taken with them, and are there still: `DISK@NAME`.
    disk_snapshots_left: Vec<String>,
}

impl Gone {
    /// Of snapshots called `deleted`, with what is left of their disks'.
    pub fn new(deleted: Vec<String>, freed: Option<u64>, left: &[DiskState]) -> Self {
        Self { deleted, freed, disk_snapshots_left: disk_snapshots(left) }
    }

    /// Prints it.
    ///
    /// # Errors
    /// When stdout does not take it.
    pub fn tell(&self, json: bool) -> Result<()> {
        answer(json, self, || self.text())
    }

    /// Prints it, as one of many results: on one line as JSON.
    ///
    /// # Errors
    /// As [`Self::tell`].
    pub fn tell_line(&self, json: bool) -> Result<()> {
        if json { Ok(print_json_line(self)?) } else { Ok(print(&self.text())?) }
    }

    fn text(&self) -> String {
        let mut lines: String = self.deleted.iter().map(|name| format!("{name}: deleted\n")).collect();
        for disk in &self.disk_snapshots_left {
            lines +=
                &format!("{disk} stays (vmstrata snapshot delete; --disks deletes such snapshots, too)\n");
        }
        match self.freed {
            Some(bytes) => lines + &format!("{} freed\n", short_size(bytes)),
            None => lines + "the vault is in use: the space is freed later (vmstrata vm gc)\n",
        }
    }
}

/// `DISK@NAME` of each.
fn disk_snapshots(states: &[DiskState]) -> Vec<String> {
    states.iter().map(|state| format!("{}@{}", state.disk, state.snapshot)).collect()
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
struct DeletePlan {
    delete: Vec<String>,
    /// Snapshots of disks that would be deleted, too.
    delete_disk_snapshots: Vec<String>,
    /// Snapshots of disks that would stay.
    keep_disk_snapshots: Vec<String>,
}

/// Says what deleting snapshots by their names would delete.
///
/// # Errors
/// When stdout does not take it.
pub fn tell_delete_plan(
    delete: Vec<String>,
    disks: &[DiskState],
    with_disks: bool,
    json: bool,
) -> Result<()> {
    let (gone, stay) = if with_disks { (disks, &[][..]) } else { (&[][..], disks) };
    let (delete_disk_snapshots, keep_disk_snapshots) = (disk_snapshots(gone), disk_snapshots(stay));
    let plan = DeletePlan { delete, delete_disk_snapshots, keep_disk_snapshots };
    answer(json, &plan, || {
        let gone = || plan.delete.iter().chain(&plan.delete_disk_snapshots);
        let mut said = counted(gone().count() as u64, "snapshot") + " to delete\n";
        gone().for_each(|name| said += &format!("  {name}\n"));
        for name in &plan.keep_disk_snapshots {
            said += &format!("{name} stays (--disks deletes such snapshots, too)\n");
        }
        said
    })
}

#[derive(Debug, Serialize)]
struct Plan<'a> {
    guest: &'a str,
    keep: Vec<&'a str>,
    delete: Vec<&'a str>,
}

/// Says what would be deleted.
///
/// # Errors
/// When stdout does not take it.
pub fn tell_plan<'a>(guest: &str, keep: &[&'a Info], gone: &[&'a Info], json: bool) -> Result<()> {
    let names = |infos: &[&'a Info]| infos.iter().map(|info| &*info.name).collect();
    let plan = Plan { guest, keep: names(keep), delete: names(gone) };
    answer(json, &plan, || {
        let count = counted(plan.delete.len() as u64, "snapshot");
        let head = format!("{guest}: {count} to delete, {} to keep\n", plan.keep.len());
        plan.delete.iter().fold(head, |said, name| said + &format!("  {name}\n"))
    })
}
