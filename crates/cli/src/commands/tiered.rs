//! Tiered disks as commands name them: a state is a layer of the repository, and what changes the disk goes through its server.

use std::collections::BTreeMap;
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, bail, ensure};
use serde::Serialize;
use vmstrata_disk::snapshot::{SnapshotInfo, is_snapshot_name, now_ns};
use vmstrata_disk::{CreateOptions, Format, create};
use vmstrata_repo::DirectoryRepository;
use vmstrata_tier::{
    DiskState, Epoch, Pin, Purpose, find_state, forget, is_object_name, newest, repository_of, snapshots,
};
use vmstrata_types::{ClusterBits, path_to_text, time};

use super::named::disks_of;
use super::snapshot::live::Live;
use crate::args::{
    Command, IndexCommand, PinsArgs, SnapshotCloneArgs, SnapshotCommand, SnapshotDeleteArgs,
    SnapshotListArgs, SnapshotShowArgs,
};
use crate::attach::absolute;
use crate::audit;
use crate::output::{Table, answer, print};
use crate::units::short_size;

/// A state that is kept while a command reads it.
#[derive(Debug)]
pub struct Reading {
    repository: DirectoryRepository,
    pin: Pin,
}

impl Drop for Reading {
    fn drop(&mut self) {
        if let Err(error) = self.pin.release(&self.repository) {
            eprintln!("vmstrata: warning: what was read stays pinned: {error}");
        }
    }
}

/// The repository of the tiered disk at `path`, if it is one.
///
/// # Errors
/// A repository that cannot be opened.
pub fn repository_at(path: &Path) -> Result<Option<(PathBuf, DirectoryRepository)>> {
    let Ok(path) = path.canonicalize() else { return Ok(None) };
    let dir = repository_of(&path);
    match DirectoryRepository::open(&dir, is_object_name) {
        Ok(repository) => Ok(Some((dir, repository))),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error.into()),
    }
}

/// Puts layers in the place of states of tiered disks that the command reads, and keeps those. Refuses to change a tiered disk that
/// no server serves.
///
/// # Errors
/// That; a state that is not there; a repository that cannot be read.
pub fn prepare(command: &mut Command) -> Result<Vec<Reading>> {
    refuse_unserved(command)?;
    let is_long = matches!(command, Command::Diff(_) | Command::Backup(_));
    let states: Vec<&mut PathBuf> = match command {
        Command::Info(args) => vec![&mut args.file],
        Command::Map(args) => vec![&mut args.file],
        Command::Check(args) => vec![&mut args.file],
        Command::Diff(args) => vec![&mut args.old, &mut args.new],
        Command::Backup(args) => args.state.iter_mut().chain(&mut args.since).collect(),
        _ => Vec::new(),
    };
    let mut readings = Vec::new();
    for state in states {
        let (disk, name) = match split(state).filter(|_| !state.exists()) {
            Some((disk, name)) => (disk.to_owned(), Some(name.to_owned())),
            None => (state.clone(), None),
        };
        if name.is_none() && !is_long {
            continue;
        }
        let Some((dir, repository)) = repository_at(&disk)? else { continue };
        let found = name.as_deref().map(|name| find_state(&repository, name, now_ns())).transpose()?;
        let epoch = match (found, &name) {
            (Some(epoch), Some(name)) if is_snapshot_name(name) => epoch,
            (found, _) => {
                let reader = Purpose::reader(&format!("vmstrata, process {}", std::process::id()));
                let pin = Pin::make(&repository, found.map(|epoch| epoch.number), &reader)?;
                let epoch = pin.epoch.clone();
                readings.push(Reading { repository, pin });
                epoch
            }
        };
        *state = top_of(&dir, state_of(&disk, &epoch)?);
    }
    Ok(readings)
}

/// What an epoch has of the disk at a path.
pub fn state_of<'a>(disk: &Path, epoch: &'a Epoch) -> Result<&'a DiskState> {
    let path = disk.canonicalize().with_context(|| format!("{}: cannot be found", disk.display()))?;
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    epoch.disk(&name).with_context(|| format!("{}: epoch {} has no {name}", disk.display(), epoch.number))
}

/// The newest layer of a disk.
pub fn top_of(repository: &Path, state: &DiskState) -> PathBuf {
    repository.join(state.newest().layer_name().as_str())
}

/// `DISK` and what follows the last `@`: a snapshot's name, or an age such as `-30s`.
pub fn split(state: &Path) -> Option<(&Path, &str)> {
    let bytes = state.as_os_str().as_bytes();
    let at = bytes.iter().rposition(|byte| *byte == b'@').filter(|at| *at > 0)?;
    let name = str::from_utf8(&bytes[at + 1..]).ok()?;
    let is_age = name.strip_prefix('-').is_some_and(|age| !age.contains('/'));
    (is_age || is_snapshot_name(name)).then(|| (Path::new(std::ffi::OsStr::from_bytes(&bytes[..at])), name))
}

fn refuse_unserved(command: &mut Command) -> Result<()> {
    let changes = match command {
        Command::Merge(_) | Command::Flatten(_) | Command::Resize(_) => true,
        Command::Check(args) => args.repair.is_some(),
        Command::Index(args) => !matches!(args.command, IndexCommand::Verify(_)),
        Command::Snapshot(args) => !matches!(
            args.command,
            SnapshotCommand::List(_)
                | SnapshotCommand::Show(_)
                | SnapshotCommand::Clone(_)
                | SnapshotCommand::Delete(_)
        ),
        _ => false,
    };
    if !changes {
        return Ok(());
    }
    let Some((paths, server)) = disks_of(command) else { return Ok(()) };
    let paths: Vec<PathBuf> = paths.into_iter().map(|path| path.clone()).collect();
    for path in paths {
        let disk = split(&path).map_or(&*path, |(disk, _)| disk);
        if repository_at(disk)?.is_some() && Live::find(&[disk.to_owned()], &server)?.is_none() {
            bail!(
                "{}: is a tiered disk, and its file only leads to what is published: serve the disk to change it",
                disk.display()
            );
        }
    }
    Ok(())
}

/// A snapshot of a tiered disk.
#[derive(Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
struct Row {
    name: String,
    time: String,
    time_ns: u64,
    labels: BTreeMap<String, String>,
    epoch: u64,
    layer: String,
    virtual_size: u64,
    /// Bytes of its layers, of which other states may need some, too.
    actual_size: u64,
}

impl Row {
    fn new(repository: &Path, disk: &Path, info: &SnapshotInfo, pin: &Pin) -> Result<Self> {
        let state = state_of(disk, &pin.epoch)?;
        Ok(Self {
            name: info.name.clone(),
            time: time::rfc3339(info.taken_ns),
            time_ns: info.taken_ns,
            labels: info.labels.iter().cloned().collect(),
            epoch: pin.epoch.number.get(),
            layer: path_to_text(&top_of(repository, state)),
            virtual_size: state.size,
            actual_size: state.objects.iter().map(|object| object.stored).sum(),
        })
    }

    fn labels(&self) -> String {
        let labels: Vec<String> = self.labels.iter().map(|(key, value)| format!("{key}={value}")).collect();
        labels.join(" ")
    }

    fn text(&self) -> String {
        let Self { name, time, epoch, layer, .. } = self;
        let size = short_size(self.virtual_size);
        format!("{name}: taken {time}, epoch {epoch}, {size}, {layer} {}\n", self.labels())
    }
}

fn rows(disk: &Path, dir: &Path, repository: &DirectoryRepository) -> Result<Vec<Row>> {
    let rows = snapshots(repository)?.into_iter().map(|(info, pin)| Row::new(dir, disk, &info, &pin));
    let mut rows = rows.collect::<Result<Vec<Row>>>()?;
    // Newest first, as of other disks.
    rows.reverse();
    Ok(rows)
}

#[derive(Debug, Serialize)]
struct Listed {
    disk: String,
    snapshots: Vec<Row>,
}

/// Lists the snapshots of a tiered disk.
///
/// # Errors
/// A repository that cannot be read.
pub fn list(args: &SnapshotListArgs, (dir, repository): (PathBuf, DirectoryRepository)) -> Result<()> {
    let listed = Listed { disk: path_to_text(&args.disk), snapshots: rows(&args.disk, &dir, &repository)? };
    answer(args.common.json, &listed, || {
        if listed.snapshots.is_empty() {
            return format!("{}: no snapshots\n", listed.disk);
        }
        let mut table = Table::new(["NAME", "TAKEN", ">EPOCH", ">LAYERS' SIZE", "LABELS"]);
        for row in &listed.snapshots {
            let (epoch, size) = (row.epoch.to_string(), short_size(row.actual_size));
            table.row([row.name.clone(), row.time.clone(), epoch, size, row.labels()]);
        }
        table.to_string()
    })
}

/// Shows one of them.
///
/// # Errors
/// No such snapshot; a repository that cannot be read.
pub fn show(args: &SnapshotShowArgs, (dir, repository): (PathBuf, DirectoryRepository)) -> Result<()> {
    let found = rows(&args.disk, &dir, &repository)?.into_iter().find(|row| row.name == args.name);
    let row = found.with_context(|| format!("{}: no snapshot '{}'", args.disk.display(), args.name))?;
    answer(args.common.json, &row, || row.text())
}

#[derive(Debug, Serialize)]
struct Deleted<'a> {
    disk: String,
    deleted: &'a [String],
}

/// Takes snapshots' names away; their layers go when nothing else needs them.
///
/// # Errors
/// No such snapshot; a repository that cannot be read or written.
pub fn delete(args: &SnapshotDeleteArgs, (_, repository): (PathBuf, DirectoryRepository)) -> Result<()> {
    let there = snapshots(&repository)?;
    for name in &args.names {
        let is_there = there.iter().any(|(info, _)| info.name == *name);
        ensure!(is_there, "{}: no snapshot '{name}'", args.disk.display());
    }
    let names = args.names.join(", ");
    if args.dry_run {
        return Ok(print(&format!("{}: {names} would be deleted\n", args.disk.display()))?);
    }
    audit::change(audit::of("snapshot_delete", [&args.disk]).object(&names), |_| {
        Ok(args.names.iter().try_for_each(|name| forget(&repository, name))?)
    })?;
    let deleted = Deleted { disk: path_to_text(&args.disk), deleted: &args.names };
    answer(args.access.common.json, &deleted, || {
        format!("{}: {names} deleted; the server deletes layers that nothing else needs\n", deleted.disk)
    })
}

/// Clones a snapshot of a tiered disk. Returns the clone's backing file.
///
/// # Errors
/// No such snapshot; a file that is there; whatever the host or the repository reports.
pub fn clone(args: &SnapshotCloneArgs, (dir, repository): (PathBuf, DirectoryRepository)) -> Result<PathBuf> {
    let found = snapshots(&repository)?.into_iter().find(|(info, _)| info.name == args.name);
    let (_, named) =
        found.with_context(|| format!("{}: no snapshot '{}'", args.disk.display(), args.name))?;
    let disk = (&*args.disk, &*dir, &repository);
    clone_of(&named, disk, &args.output, !args.overlay.no_subclusters)
}

/// Clones the state of the disk at a path that a snapshot's pin in its repository keeps into a new file. Returns the clone's backing file.
///
/// # Errors
/// As [`clone`].
pub fn clone_of(
    named: &Pin,
    (disk, dir, repository): (&Path, &Path, &DirectoryRepository),
    output: &Path,
    subclusters: bool,
) -> Result<PathBuf> {
    ensure!(output.symlink_metadata().is_err(), "{}: exists already", output.display());
    let state = state_of(disk, &named.epoch)?;
    let layer = std::path::absolute(top_of(dir, state))?;
    let pin = named.again(repository, &Purpose::reader(&format!("clone {}", absolute(output))))?;
    let options = CreateOptions {
        size: Some(state.size),
        cluster_bits: ClusterBits::from_size(128 << 10).expect("a power of two"),
        subclusters,
        backing: Some((layer.clone(), Format::Qcow2)),
        ..CreateOptions::default()
    };
    if let Err(error) = create(output, &options) {
        pin.release(repository)?;
        return Err(error.into());
    }
    Ok(layer)
}

/// A pin as data.
#[derive(Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
struct PinRow {
    id: String,
    purpose: Purpose,
    epoch: u64,
    epoch_time: String,
    /// Bytes of layers that the newest state does not need.
    kept_bytes: u64,
}

impl PinRow {
    fn new(pin: &Pin, newest: &Epoch) -> Self {
        let is_kept = |id| newest.objects().all(|object| object.id != id);
        Self {
            id: pin.id.to_string(),
            purpose: pin.purpose.clone(),
            epoch: pin.epoch.number.get(),
            epoch_time: time::rfc3339(pin.epoch.time_ns),
            kept_bytes: pin.epoch.objects().filter(|o| is_kept(o.id)).map(|o| o.stored).sum(),
        }
    }

    fn why(&self) -> String {
        match &self.purpose {
            Purpose::Copy { owner, host } => format!("copy {owner} at {host}"),
            Purpose::Snapshot { name, .. } => format!("snapshot {name}"),
            Purpose::Reader(who) => who.clone(),
        }
    }
}

/// Shows the pins of a disk, or releases one.
///
/// # Errors
/// No such disk or pin; a repository that cannot be read or written.
pub fn pins(args: &PinsArgs) -> Result<()> {
    let path = args.disk.display();
    let (_, repository) =
        repository_at(&args.disk)?.with_context(|| format!("{path}: is not a tiered disk"))?;
    let head = newest(&repository)?.with_context(|| format!("{path}: nothing of it is published"))?;
    let pins = Pin::all(&repository)?;
    let Some(id) = &args.release else {
        let rows: Vec<PinRow> = pins.iter().map(|pin| PinRow::new(pin, &head.epoch)).collect();
        return answer(args.json, &rows, || {
            let mut table = Table::new(["PIN", ">EPOCH", "OF", ">KEEPS ALONE", "FOR"]);
            for row in &rows {
                let (epoch, kept) = (row.epoch.to_string(), short_size(row.kept_bytes));
                table.row([row.id.clone(), epoch, row.epoch_time.clone(), kept, row.why()]);
            }
            table.to_string()
        });
    };
    let pin = pins.iter().find(|pin| pin.id.to_string() == *id);
    let pin = pin.with_context(|| format!("{path}: no pin {id}"))?;
    let row = PinRow::new(pin, &head.epoch);
    if !args.yes {
        bail!("{path}: pin {id} is for {}: make sure that nothing needs it, then add --yes", row.why());
    }
    audit::change(
        audit::of("tier_unpin", [&args.disk]).object(row.why()),
        |_| Ok(pin.release(&repository)?),
    )?;
    answer(args.json, &row, || format!("{path}: released: {}\n", row.why()))
}
