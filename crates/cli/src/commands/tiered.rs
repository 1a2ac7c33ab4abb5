//! Tiered disks as commands name them: a state is a layer of the repository, and what changes the disk goes through its server.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context as _, Result, bail, ensure};
use serde::Serialize;
use tempfile::TempDir;
use vmstrata_disk::snapshot::{SnapshotInfo, is_snapshot_name, now_ns};
use vmstrata_disk::{CreateOptions, create, create_on, directory_of};
use vmstrata_repo::{DirectoryRepository, Repository};
use vmstrata_tier::{
    Cache, CachedFiles, DiskAddress, DiskState, Epoch, Head, LayerDirectory, OnMissing, Pin, Purpose, Remote,
    clone_reader, fetch, find_state, forget, is_object_name, newest, repository_of, snapshots, stand_in,
};
use vmstrata_types::{path_to_text, time};

use super::named::disks_of;
use super::snapshot::live::Live;
use crate::args::{
    Command, IndexCommand, PinsArgs, SnapshotCloneArgs, SnapshotCommand, SnapshotDeleteArgs,
    SnapshotListArgs, SnapshotShowArgs,
};
use crate::audit;
use crate::output::{Table, answer, print};
use crate::units::short_size;

/// The repository of a tiered disk that a command names by the disk's path, or by an address.
#[derive(Debug)]
pub struct Found {
    /// What people call it: its directory, or its address.
    pub name: PathBuf,
    /// The repository.
    pub repository: Arc<dyn Repository>,
    /// Whether it is a directory of this host, whose layers any tool opens.
    pub is_directory: bool,
    /// The disk that is meant, by its name in epochs; `None` for the only one, or all.
    disk: Option<String>,
}

impl Found {
    /// The newest layer of a disk.
    pub fn top_of(&self, state: &DiskState) -> PathBuf {
        self.name.join(state.newest().layer_name().as_str())
    }

    /// The path by which the image at `path` knows the newest layer of a disk.
    fn known_as(&self, state: &DiskState, path: &Path) -> Result<PathBuf> {
        if self.is_directory {
            return Ok(std::path::absolute(self.top_of(state))?);
        }
        let directory = std::path::absolute(directory_of(path))?.canonicalize()?;
        let stand_in = stand_in(&directory, &path_to_text(&self.name));
        fs::create_dir_all(&stand_in).with_context(|| stand_in.display().to_string())?;
        Ok(stand_in.join(state.newest().layer_name().as_str()))
    }

    /// What commands call one of its disks.
    pub fn disk_called(&self, name: &str) -> PathBuf {
        match self.is_directory {
            true => self.name.with_file_name(name),
            false => disk_at(&self.name, name),
        }
    }

    /// What an epoch has of the disk that is meant.
    ///
    /// # Errors
    /// A disk that it does not have, or an address that names none of several, with what there is.
    pub fn state_of<'a>(&self, epoch: &'a Epoch) -> Result<&'a DiskState> {
        let found = match (&self.disk, &epoch.disks[..]) {
            (None, [only]) => Some(only),
            (None, _) => None,
            (Some(name), _) if self.is_directory => epoch.disk(name),
            (Some(name), disks) => disks.iter().find(|disk| disk.name == *name),
        };
        found.with_context(|| {
            let all = epoch.disks.iter().map(|disk| path_to_text(&self.disk_called(&disk.name)));
            let all = all.collect::<Vec<_>>().join(", ");
            match &self.disk {
                Some(name) => format!("{}: no disk {name}: it has {all}", self.name.display()),
                None => format!("{}: name one of its disks: {all}", self.name.display()),
            }
        })
    }

    /// What an epoch has of the disk that is meant, or of all.
    ///
    /// # Errors
    /// A disk that it does not have.
    fn states_of<'a>(&self, epoch: &'a Epoch) -> Result<Vec<&'a DiskState>> {
        match self.disk {
            Some(_) => Ok(vec![self.state_of(epoch)?]),
            None => Ok(epoch.disks.iter().collect()),
        }
    }

    /// Refuses what needs a directory.
    ///
    /// # Errors
    /// That, with what does.
    pub fn refuse_elsewhere(&self, what: &str) -> Result<()> {
        ensure!(
            self.is_directory,
            "{}: {what} only where the repository is a directory: `vmstrata backup` makes an ordinary image of a state",
            self.name.display()
        );
        Ok(())
    }
}

/// What a command reads: states that are kept for it, and copies of those that are in no directory.
#[derive(Debug, Default)]
pub struct Readings {
    pins: Vec<Reading>,
    copies: Option<TempDir>,
}

/// A state that is kept while a command reads it.
#[derive(Debug)]
struct Reading {
    repository: Arc<dyn Repository>,
    pin: Pin,
}

impl Drop for Reading {
    fn drop(&mut self) {
        if let Err(error) = self.pin.release(&*self.repository) {
            eprintln!("vmstrata: warning: what was read stays pinned: {error}");
        }
    }
}

/// The address that `disk` is, if it is one.
///
/// # Errors
/// One that is malformed.
pub fn address_of(disk: &Path) -> Result<Option<DiskAddress>> {
    let text = disk.to_str().filter(|text| DiskAddress::is_address(text));
    Ok(text.map(DiskAddress::parse).transpose()?)
}

/// The address of a disk of the group that is published at that of a repository.
pub fn disk_at(repository: &Path, name: &str) -> PathBuf {
    let mut address = repository.as_os_str().to_owned();
    address.push("#");
    address.push(name);
    address.into()
}

/// The repository of the tiered disk at `path`, if it is one, or at that address.
///
/// # Errors
/// A repository that cannot be opened.
pub fn repository_at(path: &Path) -> Result<Option<Found>> {
    if let Some(DiskAddress { repository, disk }) = address_of(path)? {
        let repository = repository.open()?;
        let name = repository.describe().into();
        return Ok(Some(Found { name, repository, is_directory: false, disk }));
    }
    let Ok(path) = path.canonicalize() else { return Ok(None) };
    let name = repository_of(&path);
    let disk = path.file_name().map(|name| name.to_string_lossy().into_owned());
    match DirectoryRepository::open(&name, is_object_name) {
        Ok(repository) => {
            Ok(Some(Found { name, repository: Arc::new(repository), is_directory: true, disk }))
        }
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error.into()),
    }
}

/// The repository of a tiered disk, and its newest head.
///
/// # Errors
/// A disk that is not tiered, or of which nothing is published.
pub fn published(disk: &Path) -> Result<(Found, Head)> {
    let found = tiered(disk)?;
    let head = newest(&*found.repository)?;
    let head = head.with_context(|| format!("{}: nothing of it is published", disk.display()))?;
    Ok((found, head))
}

/// The repository of a tiered disk.
///
/// # Errors
/// A disk that is not tiered; as [`repository_at`].
pub fn tiered(disk: &Path) -> Result<Found> {
    repository_at(disk)?.with_context(|| format!("{}: is not a tiered disk", disk.display()))
}

/// Puts layers in the place of states of tiered disks that the command reads, and keeps those. Refuses to change a tiered disk that
/// no server serves.
///
/// # Errors
/// That; a state that is not there; a repository that cannot be read.
pub fn prepare(command: &mut Command) -> Result<Readings> {
    refuse_unserved(command)?;
    let is_long =
        matches!(command, Command::Diff(_) | Command::Backup(_) | Command::Convert(_) | Command::Mount(_));
    let takes_snapshot = matches!(command, Command::Backup(args) if args.snapshot.is_some());
    let states: Vec<&mut PathBuf> = match command {
        Command::Info(args) => vec![&mut args.file],
        Command::Map(args) => vec![&mut args.file],
        Command::Check(args) => vec![&mut args.file],
        Command::Convert(args) => vec![&mut args.source],
        Command::Mount(args) if !args.write => vec![&mut args.disk],
        Command::Diff(args) => vec![&mut args.old, &mut args.new],
        Command::Backup(args) => args.state.iter_mut().chain(&mut args.since).collect(),
        _ => Vec::new(),
    };
    let mut readings = Readings::default();
    for state in states {
        let (disk, name) = match split(state).filter(|_| !state.exists()) {
            Some((disk, name)) => (disk.to_owned(), Some(name.to_owned())),
            None => (state.clone(), None),
        };
        let is_path = address_of(&disk)?.is_none();
        if is_path && name.is_none() && !is_long {
            continue;
        }
        let Some(found) = repository_at(&disk)? else { continue };
        ensure!(
            !takes_snapshot,
            "{}: is a tiered disk: take the snapshot first (vmstrata snapshot create), and back that up",
            disk.display()
        );
        *state = readings.enter(found, name.as_deref(), is_long)?;
    }
    Ok(readings)
}

impl Readings {
    /// Keeps a state for as long as it is read; returns the file of its newest layer.
    fn enter(&mut self, found: Found, name: Option<&str>, is_long: bool) -> Result<PathBuf> {
        let repository = &*found.repository;
        let epoch = name.map(|name| find_state(repository, name, now_ns())).transpose()?;
        let epoch = match (epoch, name) {
            (Some(epoch), Some(name)) if is_snapshot_name(name) => epoch,
            (epoch, _) => {
                let reader = Purpose::reader(&format!("vmstrata, process {}", std::process::id()));
                let pin = Pin::make(repository, epoch.map(|epoch| epoch.number), &reader)?;
                let epoch = pin.epoch.clone();
                self.pins.push(Reading { repository: found.repository.clone(), pin });
                epoch
            }
        };
        if found.is_directory {
            return Ok(found.top_of(found.state_of(&epoch)?));
        }
        let state = found.state_of(&epoch)?;
        ensure!(
            is_long,
            "{}: its layers are no files: vmstrata backup makes one of a state, diff compares two",
            found.name.display()
        );
        if self.copies.is_none() {
            self.copies = Some(tempfile::Builder::new().prefix("vmstrata-").tempdir()?);
        }
        let copies = self.copies.as_ref().expect("made above");
        Ok(fetch(repository, state, copies.path())?)
    }
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
        let Some(found) = repository_at(disk)? else { continue };
        if Live::find(&[disk.to_owned()], &server)?.is_none() {
            bail!(
                "{}: is a tiered disk, and its file only leads to what is published: serve the disk to change it",
                disk.display()
            );
        }
        // All else that servers do with tiered disks they do with whole groups.
        if let (Command::Resize(_), Some(head)) = (&*command, newest(&*found.repository)?) {
            found.state_of(&head.epoch)?;
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
    /// The newest layer, unless of several disks.
    #[serde(skip_serializing_if = "Option::is_none")]
    layer: Option<String>,
    virtual_size: u64,
    /// Bytes of its layers, of which other states may need some, too.
    actual_size: u64,
}

impl Row {
    fn new(found: &Found, info: &SnapshotInfo, pin: &Pin) -> Result<Self> {
        let states = found.states_of(&pin.epoch)?;
        let layer = match &states[..] {
            [only] => Some(path_to_text(&found.top_of(only))),
            _ => None,
        };
        Ok(Self {
            name: info.name.clone(),
            time: time::rfc3339(info.taken_ns),
            time_ns: info.taken_ns,
            labels: info.labels.iter().cloned().collect(),
            epoch: pin.epoch.number.get(),
            layer,
            virtual_size: states.iter().map(|state| state.size).sum(),
            actual_size: states.iter().flat_map(|state| &state.objects).map(|object| object.stored).sum(),
        })
    }

    fn labels(&self) -> String {
        let labels: Vec<String> = self.labels.iter().map(|(key, value)| format!("{key}={value}")).collect();
        labels.join(" ")
    }

    fn text(&self) -> String {
        let Self { name, time, epoch, .. } = self;
        let (size, layer) = (short_size(self.virtual_size), self.layer.as_deref().unwrap_or("several disks"));
        format!("{name}: taken {time}, epoch {epoch}, {size}, {layer} {}\n", self.labels())
    }
}

fn rows(found: &Found) -> Result<Vec<Row>> {
    let named = snapshots(&*found.repository)?.into_iter();
    let rows = named.map(|(info, pin)| Row::new(found, &info, &pin));
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
pub fn list(args: &SnapshotListArgs, found: &Found) -> Result<()> {
    let listed = Listed { disk: path_to_text(&args.disk), snapshots: rows(found)? };
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
pub fn show(args: &SnapshotShowArgs, found: &Found) -> Result<()> {
    let row = rows(found)?.into_iter().find(|row| row.name == args.name);
    let row = row.with_context(|| format!("{}: no snapshot '{}'", args.disk.display(), args.name))?;
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
pub fn delete(args: &SnapshotDeleteArgs, found: &Found) -> Result<()> {
    let repository = &*found.repository;
    let there = snapshots(repository)?;
    for name in &args.names {
        let is_there = there.iter().any(|(info, _)| info.name == *name);
        ensure!(is_there, "{}: no snapshot '{name}'", args.disk.display());
    }
    let names = args.names.join(", ");
    if args.dry_run {
        return Ok(print(&format!("{}: {names} would be deleted\n", args.disk.display()))?);
    }
    audit::change(audit::of("snapshot_delete", [&args.disk]).object(&names), |_| {
        Ok(args.names.iter().try_for_each(|name| forget(repository, name))?)
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
pub fn clone(args: &SnapshotCloneArgs, found: &Found) -> Result<PathBuf> {
    let named = pin_of(found, &args.disk, &args.name)?;
    clone_of(&named, found, &args.output, !args.overlay.no_subclusters)
}

/// Clones the state of a disk that a snapshot's pin in its repository keeps into a new file. Returns the clone's backing file.
///
/// # Errors
/// As [`clone`].
pub fn clone_of(named: &Pin, found: &Found, output: &Path, subclusters: bool) -> Result<PathBuf> {
    let repository = &*found.repository;
    ensure!(output.symlink_metadata().is_err(), "{}: exists already", output.display());
    let state = found.state_of(&named.epoch)?;
    let layer = found.known_as(state, output)?;
    let pin = named.again(repository, &clone_reader(output))?;
    let options = CreateOptions::overlay(layer.clone(), state.size, subclusters);
    let made = match found.is_directory {
        true => create(output, &options).map_err(Into::into),
        false => create_elsewhere(output, &options, found, (state, &layer)),
    };
    if let Err(error) = made {
        pin.release(repository)?;
        return Err(error);
    }
    Ok(layer)
}

/// Makes an overlay on a layer that is no file: its header comes from the repository.
fn create_elsewhere(
    output: &Path,
    options: &CreateOptions,
    found: &Found,
    (state, layer): (&DiskState, &Path),
) -> Result<()> {
    let empty = TempDir::new()?;
    let cache = Cache::beside(empty.path())?;
    let (remote, files) =
        (Remote::new(&cache, found.repository.clone(), OnMissing::Wait), CachedFiles::default());
    let directory = LayerDirectory { path: &directory_of(layer), indices: empty.path() };
    files.add(directory, &remote, &state.objects)?;
    Ok(create_on(output, options, &files)?)
}

/// What keeps a snapshot of a tiered disk.
///
/// # Errors
/// No such snapshot; a repository that cannot be read.
pub fn pin_of(found: &Found, disk: &Path, name: &str) -> Result<Pin> {
    let named = snapshots(&*found.repository)?.into_iter().find(|(info, _)| info.name == name);
    Ok(named.with_context(|| format!("{}: no snapshot '{name}'", disk.display()))?.1)
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
    let (found, head) = published(&args.disk)?;
    let repository = &*found.repository;
    let pins = Pin::all(repository)?;
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
    audit::change(audit::of("tier_unpin", [&args.disk]).object(row.why()), |_| Ok(pin.release(repository)?))?;
    answer(args.json, &row, || format!("{path}: released: {}\n", row.why()))
}
