//! `vmstrata snapshot`: takes, lists, goes back to and clones states of disks, by itself or through the server that serves them.

pub mod live;
mod prune;
mod report;

use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;

use anyhow::{Result, anyhow, bail};
use vmstrata_api::Quiesce;
use vmstrata_disk::snapshot::{
    self, PrepareOptions, RevertOptions, Snapshot, SnapshotInfo, find, list, now_ns,
};
use vmstrata_disk::{ErrorKind, Format, OpenOptions, ResourceOptions, Resources};
use vmstrata_types::{path_to_text, time};

use crate::args::{
    ControlArgs, JournalArgs, OverlayArgs, SnapshotArgs, SnapshotCloneArgs, SnapshotCommand,
    SnapshotCreateArgs, SnapshotDeleteArgs, SnapshotHoldArgs, SnapshotListArgs, SnapshotRevertArgs,
    SnapshotShowArgs,
};
use crate::attach::absolute;
use crate::audit::{self, What};
use crate::commands::{gc, tiered};
use crate::output::{Table, answer, counted, print, print_json};
use crate::units::short_size;
use report::{Cloned, Listed, Reverted, Row, Taken, TakenOne};

/// Runs one of the commands.
///
/// # Errors
/// What could not be done; the disks are then as they were.
pub fn run(args: &SnapshotArgs) -> Result<ExitCode> {
    match &args.command {
        SnapshotCommand::Create(args) => run_create(args),
        SnapshotCommand::List(args) => run_list(args),
        SnapshotCommand::Show(args) => run_show(args),
        SnapshotCommand::Revert(args) => run_revert(args),
        SnapshotCommand::Clone(args) => run_clone(args),
        SnapshotCommand::Hold(args) => run_hold(args),
        SnapshotCommand::Release(args) => run_release(args),
        SnapshotCommand::Delete(args) => run_delete(args),
        SnapshotCommand::Prune(args) => prune::run(args),
    }?;
    Ok(ExitCode::SUCCESS)
}

fn run_create(args: &SnapshotCreateArgs) -> Result<()> {
    let info = described(args, now_ns());
    if let Some(live) = live::Live::find(&args.disks, &args.access.server)? {
        refuse_for_served(&args.overlay)?;
        return live.create(&info, args);
    }
    if args.agent.is_some() || args.quiesce == Some(Quiesce::Always) {
        bail!(
            "{}: no server serves it, so there is no guest whose file systems could be frozen",
            args.disks[0].display()
        );
    }
    let open = OpenOptions { force: args.force, ..args.access.open() };
    let resources = resources(&args.access.journal)?;
    let prepare = PrepareOptions {
        format: args.access.common.format,
        convert_raw: args.convert_raw,
        subclusters: !args.overlay.no_subclusters,
        ..PrepareOptions::default()
    };
    let what = audit::of("snapshot_create", &args.disks).object(&info.name);
    let create = |_: &mut What| Ok(snapshot::create(&args.disks, &info, &open, &prepare, &resources)?);
    let created = audit::change(what, create)?;
    if args.access.common.json {
        let taken = created.iter().map(TakenOne::new).collect();
        print_json(&Taken::new(&info, taken))?;
        return Ok(());
    }
    let line = |created: &snapshot::Created| {
        let (disk, layer, note) = (&created.disk, &created.layer, note(&created.disk, created.was_raw));
        format!("{}: snapshot {} taken: {}\n{note}", disk.display(), info.name, layer.display())
    };
    Ok(print(&created.iter().map(line).collect::<String>())?)
}

/// The server makes the overlays of the disks that it serves.
fn refuse_for_served(overlay: &OverlayArgs) -> Result<()> {
    if overlay.no_subclusters {
        bail!(
            "a server serves the disk, and makes its overlays: give the disk the option subclusters=off there"
        );
    }
    Ok(())
}

/// What to do about a disk that was raw before its snapshot.
pub const NOW_QCOW2: &str = "it is qcow2 from now on: what opens this file itself must say so (libvirt: <driver type='qcow2'/>); guests behind vmstrata's sockets keep type='raw'";

/// [`NOW_QCOW2`] of a disk that `was_raw`, as a line.
fn note(disk: &Path, was_raw: bool) -> String {
    if was_raw { format!("{}: {NOW_QCOW2}\n", disk.display()) } else { String::new() }
}

/// Takes a snapshot of one disk, served or not, and says nothing of it. Returns its name: the time unless there is one.
///
/// # Errors
/// What could not be done; the disk is then as it was.
pub fn take(
    disk: &Path,
    name: Option<&str>,
    format: Option<Format>,
    open: &OpenOptions,
    server: &ControlArgs,
) -> Result<String> {
    let taken_ns = now_ns();
    let name = name.map_or_else(|| time::compact(taken_ns), str::to_owned);
    let info = SnapshotInfo { name: name.clone(), taken_ns, ..SnapshotInfo::default() };
    let disks = [disk.to_owned()];
    if let Some(live) = live::Live::find(&disks, server)? {
        live::warn_unless_quiesced(&live.take(&info, None, None, false)?);
    } else {
        let prepare = PrepareOptions { format, ..PrepareOptions::default() };
        let resources = resources(&JournalArgs::default())?;
        audit::change(audit::of("snapshot_create", &disks).object(&name), |_| {
            Ok(snapshot::create(&disks, &info, open, &prepare, &resources)?)
        })?;
    }
    Ok(name)
}

fn run_delete(args: &SnapshotDeleteArgs) -> Result<()> {
    if let Some(found) = tiered::repository_at(&args.disk)? {
        return tiered::delete(args, &found);
    }
    match live::Live::find(std::slice::from_ref(&args.disk), &args.access.server)? {
        live if args.dry_run => super::merge::foresee_delete(args, live.is_some()),
        Some(live) => live.delete(args),
        None => super::merge::delete(args),
    }
}

/// For disks that must be closed first.
///
/// # Errors
/// A host that cannot start their threads.
pub fn resources(journal: &JournalArgs) -> vmstrata_disk::Result<Arc<Resources>> {
    Resources::start(ResourceOptions { journal_dir: journal.dir(), ..ResourceOptions::default() })
}

fn described(args: &SnapshotCreateArgs, taken_ns: u64) -> SnapshotInfo {
    let now = time::compact(taken_ns);
    let is_group = args.group.is_some() || args.disks.len() > 1;
    SnapshotInfo {
        name: args.name.clone().unwrap_or_else(|| now.clone()),
        taken_ns,
        labels: args.label.clone(),
        group: is_group.then(|| args.group.clone().unwrap_or(now)),
        origin: None,
    }
}

fn run_list(args: &SnapshotListArgs) -> Result<()> {
    if let Some(found) = tiered::repository_at(&args.disk)? {
        return tiered::list(args, &found);
    }
    let snapshots = list(&args.disk, &args.common.open())?;
    let left = args.all.then(|| gc::left_over(&args.disk, &args.common)).transpose()?;
    if args.common.json {
        print_json(&Listed::new(&args.disk, &snapshots, left))?;
        return Ok(());
    }
    for snapshot in &snapshots {
        warn(snapshot);
    }
    let mut said = report::table(&args.disk, &snapshots);
    if let Some(left) = left.filter(|left| !left.is_empty()) {
        let mut table = Table::new(gc::COLUMNS);
        left.iter().for_each(|file| table.row(file.row("nothing needs it: vmstrata gc removes it")));
        said += &format!("\n{table}");
    }
    Ok(print(&said)?)
}

fn warn(snapshot: &Snapshot) {
    if let Some(damage) = &snapshot.damage {
        eprintln!("vmstrata: warning: {}: its name cannot be read: {damage}", snapshot.layer.display());
    }
}

fn run_show(args: &SnapshotShowArgs) -> Result<()> {
    if let Some(found) = tiered::repository_at(&args.disk)? {
        return tiered::show(args, &found);
    }
    let found = find(&args.disk, &args.name, &args.common.open())?;
    answer(args.common.json, &Row::new(&found), || report::show(&found))
}

fn run_hold(args: &SnapshotHoldArgs) -> Result<()> {
    let is_new = audit::change(of_hold("snapshot_hold", args), |_| {
        Ok(snapshot::hold(&args.disk, &args.name, &args.tag, &args.common.open())?)
    })?;
    let how = if is_new { "held" } else { "held already" };
    report::Holding::new(args, true).tell(how, args.common.json)
}

fn run_release(args: &SnapshotHoldArgs) -> Result<()> {
    audit::change(of_hold("snapshot_release", args), |_| {
        Ok(snapshot::release(&args.disk, &args.name, &args.tag, &args.common.open())?)
    })?;
    report::Holding::new(args, false).tell("released", args.common.json)
}

fn of_hold(change: &'static str, args: &SnapshotHoldArgs) -> What {
    audit::of(change, [&args.disk]).object(format!("{} ({})", args.name, args.tag))
}

fn run_revert(args: &SnapshotRevertArgs) -> Result<()> {
    if args.keep.is_none() && !args.yes {
        return refuse_to_lose(args);
    }
    if let Some(live) = live::Live::find(std::slice::from_ref(&args.disk), &args.access.server)? {
        refuse_for_served(&args.overlay)?;
        return live.revert(args);
    }
    let options = RevertOptions {
        keep: args.keep.clone(),
        open: OpenOptions { force: args.force, ..args.access.open() },
        prepare: PrepareOptions {
            format: args.access.common.format,
            subclusters: !args.overlay.no_subclusters,
            ..PrepareOptions::default()
        },
    };
    let resources = resources(&args.access.journal)?;
    let reverted = audit::change(audit::of("snapshot_revert", [&args.disk]).object(&args.name), |_| {
        Ok(snapshot::revert(&args.disk, &args.name, &options, &resources)?)
    })?;
    let dropped = reverted.dropped.iter().map(|snapshot| path_to_text(&snapshot.layer)).collect();
    Reverted::new(args, path_to_text(&reverted.layer), dropped).tell(args.access.common.json)
}

/// Says what going back would cost.
fn refuse_to_lose(args: &SnapshotRevertArgs) -> Result<()> {
    if tiered::repository_at(&args.disk)?.is_some() {
        bail!(
            "{}: going back to {} puts what was written since then aside, as a branch on this host: add --yes",
            args.disk.display(),
            args.name
        );
    }
    let snapshots = list(&args.disk, &args.access.common.open())?;
    let found = find(&args.disk, &args.name, &args.access.common.open())?;
    let newest = snapshots.first().and_then(Snapshot::name).unwrap_or("its newest layer");
    let own = std::os::unix::fs::MetadataExt::blocks(&args.disk.metadata()?) * 512;
    let newer = found.depth as u64 - 1;
    let also = if newer == 0 {
        String::new()
    } else {
        format!("; the disk would no longer stand on {}, whose files stay", counted(newer, "newer snapshot"))
    };
    bail!(
        "{}: going back to {} loses what was written since {newest}, up to {}{also}: --yes drops it, --keep FILE keeps it as a disk of its own",
        args.disk.display(),
        args.name,
        short_size(own)
    )
}

fn run_clone(args: &SnapshotCloneArgs) -> Result<()> {
    let state = format!("{}@{}", absolute(&args.disk), args.name);
    let layer = audit::change(audit::of("snapshot_clone", [&args.output]).object(state), |_| {
        if let Some(found) = tiered::repository_at(&args.disk)? {
            return tiered::clone(args, &found);
        }
        let open = OpenOptions { subclusters: !args.overlay.no_subclusters, ..args.common.open() };
        let cloned = snapshot::clone(&args.disk, &args.name, &args.output, &open);
        cloned.map_err(|error| match error.kind() {
            ErrorKind::Io { source, .. } if source.kind() == std::io::ErrorKind::AlreadyExists => {
                anyhow!("{}: exists already", args.output.display())
            }
            _ => error.into(),
        })
    })?;
    let report = Cloned::new(args, &layer);
    answer(args.common.json, &report, || report.text())
}
