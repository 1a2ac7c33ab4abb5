//! The guest's disks before it runs: each must be as it was at the instant of the memory, or a clone of that takes its place.
//!
//! ```text
//!   disks of the snapshot ─► QEMU's command line, a server's sockets: how QEMU gets to each ─► Disk
//!     as left?  on its snapshot (name and time), nothing written since ──► start
//!     else      refused with what puts it right; --clone-disks: a clone, and the command line leads to it
//! ```
//!
//! A guest goes on with what its memory says of its file systems: on a disk in another state it destroys them.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use vmstrata_api::{
    DiskDetail, DiskList, DiskSpec, DiskStatus, ExportList, ExportSpec, ExportStatus, encode_segment,
};
use vmstrata_disk::{OpenOptions, own_clusters, snapshot};
use vmstrata_memory::restore::{Pair, edit};
use vmstrata_memory::vault::{DiskState, Info};
use vmstrata_store::{FileId, Gate};
use vmstrata_tier::Pin;
use vmstrata_types::{path_from_text, path_to_text};

use super::super::disks::{is_export, layer_directories};
use super::super::guard::{Clone, Undo};
use super::super::states::moved;
use super::Ending;
use crate::args::{BackingArgs, VmRestoreArgs};
use crate::attach::{absolute, shell_quote};
use crate::client::Client;
use crate::commands::snapshot::live::is_file_of;
use crate::commands::taken::{Taken, find_taken};
use crate::commands::tiered::{Found, clone_of};
use crate::output::counted;

/// Names that are tried for a clone while other processes take them.
const CLONE_TRIES: u32 = 16;

/// How QEMU gets to a disk.
#[derive(Clone, Debug)]
enum Way {
    /// It opens the file.
    File,
    /// Through an export of the server.
    Export(ExportSpec),
}

/// A disk of the snapshot.
struct Disk {
    state: DiskState,
    way: Option<Way>,
    /// What the server says of it, if it serves it.
    served: Option<DiskStatus>,
}

/// The guest's disks, and the server that may serve them.
pub(super) struct GuestDisks<'a> {
    args: &'a VmRestoreArgs,
    info: &'a Info,
    client: Client,
    disks: Vec<Disk>,
}

impl<'a> GuestDisks<'a> {
    /// Finds the disks of the snapshot `info`, where they are now.
    ///
    /// # Errors
    /// As [`moved`]; what the server says.
    pub(super) fn find(args: &'a VmRestoreArgs, info: &'a Info) -> Result<Self> {
        let client = Client::new(&args.server)?;
        let states = moved(&info.disks, &args.disks)?;
        let (mut served, mut exports) = (Vec::new(), Vec::new());
        if !states.is_empty() && client.is_answered() {
            served = client.get::<DiskList>("/v1/disks")?.disks;
            exports = client.get::<ExportList>("/v1/exports")?.exports;
        }
        let disk = |state: DiskState| {
            let path = &path_from_text(&state.disk);
            let served = served.iter().find(|served| is_file_of(served, path)).cloned();
            let way = find_way(&args.qemu, path, served.as_ref(), &exports);
            Disk { state, way, served }
        };
        let disks = states.into_iter().map(disk).collect();
        Ok(Self { args, info, client, disks })
    }

    /// Checks that each disk is the one that QEMU gets, and as the snapshot left it. With `--force`, says what is not.
    ///
    /// # Errors
    /// Disks that are not, with what to do.
    pub(super) fn check(&self) -> Result<()> {
        let wrong: Vec<String> = self.disks.iter().filter_map(|disk| self.wrong(disk)).collect();
        if self.args.force {
            wrong.iter().for_each(|wrong| eprintln!("vmstrata: warning: {wrong}"));
            return Ok(());
        }
        match &wrong[..] {
            [] => Ok(()),
            wrong => bail!(
                "{}\nThe guest would destroy its file systems: it is not started (--force starts it all the same)",
                wrong.join("\n")
            ),
        }
    }

    /// What is wrong with a disk, and what to do.
    fn wrong(&self, disk: &Disk) -> Option<String> {
        let path = &disk.state.disk;
        if disk.way.is_none() {
            return Some(self.not_used(disk));
        }
        if let Some(taken_ns) = disk.state.tiered_ns {
            return self.wrong_tiered(disk, taken_ns).unwrap_or_else(|error| Some(format!("{error:#}")));
        }
        let snapshots = match self.newer(disk) {
            Ok(newer) => newer,
            Err(error) => return Some(format!("{error:#}")),
        };
        let why = match &snapshots[..] {
            [] => match self.written(disk) {
                Ok(None) => return None,
                Ok(Some(written)) => written,
                Err(error) => return Some(format!("{path}: {error:#}")),
            },
            newer => format!("{} taken since: {}", counted(newer.len() as u64, "snapshot"), newer.join(", ")),
        };
        let name = &disk.state.snapshot;
        let keep = unused(&path_from_text(path), None, &format!("before-{name}"));
        let revert = ["snapshot", "revert", path, name, "--keep", &keep.to_string_lossy()].map(shell_quote);
        Some(format!(
            "{path} is not as {} left it: {why}\n  vmstrata {}   puts it back, and keeps what it is now; or start the guest on clones with --clone-disks",
            self.info.title(),
            revert.join(" ")
        ))
    }

    /// The same for a tiered disk. Once it is reverted, its active layer stands directly on the pinned state.
    fn wrong_tiered(&self, disk: &Disk, taken_ns: u64) -> Result<Option<String>> {
        let DiskState { disk: path, snapshot: name, .. } = &disk.state;
        let (found, pin) = self.find_taken(disk, taken_ns)?;
        let layer = found.top_of(found.state_of(&pin.epoch)?);
        let Some(served) = &disk.served else {
            bail!("{path} is a tiered disk: serve it, and lead QEMU to its socket");
        };
        let detail = self.detail(served)?;
        let why = match &detail.chain[..] {
            // By its id: directories of a group's disks are links.
            [.., below, active] if path_from_text(&below.path).file_name() == layer.file_name() => {
                match written_to(&path_from_text(&active.path), &detail)? {
                    None => return Ok(None),
                    Some(written) => written,
                }
            }
            _ => "it is based on another state".to_owned(),
        };
        let revert = ["snapshot", "revert", path, name, "--yes"].map(shell_quote);
        let or = if found.is_directory { "; or start the guest on clones with --clone-disks" } else { "" };
        Ok(Some(format!(
            "{path} is not as {} left it: {why}\n  vmstrata {}   puts it back, and keeps what it is now as a branch{or}",
            self.info.title(),
            revert.join(" ")
        )))
    }

    /// The state of a tiered disk that is kept: its repository, and its pin.
    fn find_taken(&self, disk: &Disk, taken_ns: u64) -> Result<(Found, Pin)> {
        let taken = Taken { name: disk.state.snapshot.clone(), taken_ns };
        find_taken(&path_from_text(&disk.state.disk), taken).with_context(|| {
            format!("{} is not complete (see `vmstrata vm show`): {}", self.info.title(), disk.state.disk)
        })
    }

    fn detail(&self, served: &DiskStatus) -> Result<DiskDetail> {
        self.client.get(&format!("/v1/disks/{}", encode_segment(&served.name)))
    }

    fn not_used(&self, disk: &Disk) -> String {
        let path = &disk.state.disk;
        let server = match self.client.is_answered() {
            true => format!("no socket there leads to it by the server at {}", self.client.path().display()),
            false => format!("no server answers at {}", self.client.path().display()),
        };
        format!(
            "{path} is not a disk of QEMU's command line: no option there names it, and {server}\n  \
             name the files that are the guest's disks now with --disk, or their server with --control"
        )
    }

    /// The snapshots of a disk that are newer than its state, which is in its chain.
    fn newer(&self, disk: &Disk) -> Result<Vec<String>> {
        let DiskState { disk: path, snapshot: name, .. } = &disk.state;
        let snapshots = snapshot::list(&path_from_text(path), &self.options(disk)?)?;
        let is_it = |found: &snapshot::Snapshot| {
            let info = found.info.as_ref();
            info.is_some_and(|info| info.name == *name && info.taken_ns == self.info.taken_ns)
        };
        let Some(at) = snapshots.iter().position(is_it) else {
            bail!(
                "{path} does not stand on the snapshot {name} that was taken with {}\n  \
                 name the files that do with --disk, in the order of `vmstrata vm show`",
                self.info.title()
            );
        };
        let name_of = |found: &snapshot::Snapshot| found.name().unwrap_or("one without a name").to_owned();
        Ok(snapshots[..at].iter().map(name_of).collect())
    }

    /// What was written to a disk since it stands on its newest snapshot.
    fn written(&self, disk: &Disk) -> Result<Option<String>> {
        let path = path_from_text(&disk.state.disk);
        match &disk.served {
            Some(served) => written_to(&path, &self.detail(served)?),
            None => written_in(&path),
        }
    }

    /// How a disk's headers are read.
    fn options(&self, disk: &Disk) -> Result<OpenOptions> {
        let mut allow_backing = self.args.backing.allow_backing.clone();
        if let Some(served) = &disk.served {
            allow_backing.extend(layer_directories(&self.client, &served.name)?);
        }
        Ok(OpenOptions { allow_backing, ..OpenOptions::default() })
    }

    /// Where backing files of the disks may be: also where a server has found them.
    ///
    /// # Errors
    /// What the server says.
    pub(super) fn backing(&self) -> Result<BackingArgs> {
        let mut allow_backing = self.args.backing.allow_backing.clone();
        for served in self.disks.iter().filter_map(|disk| disk.served.as_ref()) {
            allow_backing.extend(layer_directories(&self.client, &served.name)?);
        }
        Ok(BackingArgs { allow_backing })
    }

    /// Makes a clone of each disk as it was at the snapshot; returns QEMU's command line with the clones in their place, and the
    /// clones' files.
    ///
    /// # Errors
    /// A disk that QEMU does not get, or that has no such snapshot; what the host or the server says.
    pub(super) fn clone_all(
        &self,
        dir: Option<&Path>,
        ending: &Ending,
    ) -> Result<(Vec<String>, Vec<String>)> {
        let (mut qemu, mut files) = (self.args.qemu.clone(), Vec::new());
        for disk in &self.disks {
            let Some(way) = &disk.way else { bail!("{}", self.not_used(disk)) };
            match disk.state.tiered_ns {
                Some(taken_ns) => {
                    let (found, _) = self.find_taken(disk, taken_ns)?;
                    found.refuse_elsewhere("`vm restore` clones states")?;
                }
                None => drop(self.newer(disk)?),
            }
            let (changed, file) = self.clone_one(disk, way, dir, ending)?;
            qemu = replaced(&qemu, &path_from_text(&disk.state.disk), way, &changed);
            files.push(absolute(&file));
        }
        Ok((qemu, files))
    }

    /// Makes a clone; returns what QEMU gets (a path, a socket or an export), and the clone's file.
    fn clone_one(
        &self,
        disk: &Disk,
        way: &Way,
        dir: Option<&Path>,
        ending: &Ending,
    ) -> Result<(Changed, PathBuf)> {
        let DiskState { disk: path, snapshot: name, .. } = &disk.state;
        let mut tries = 0;
        let (file, added) = loop {
            let free = unused(&path_from_text(path), dir, &format!("{name}.clone"));
            let file = path_from_text(&absolute(&free));
            tries += 1;
            match self.make_clone(disk, way, &file, ending) {
                // Nothing is left of a clone that failed: another process took the name first.
                Err(_) if tries < CLONE_TRIES && file.symlink_metadata().is_ok() => {}
                made => break (file, made?),
            }
        };
        let changed = match (way, &disk.served, added) {
            (Way::Export(export), Some(served), Some(added)) => self.lead_to(export, &served.name, &added)?,
            _ => Changed { to: path_to_text(&file), export: String::new() },
        };
        eprintln!("vmstrata: {}: clone of {path} at {name}, the guest's disk from now on", file.display());
        Ok((changed, file))
    }

    /// Makes a clone in a new file; returns its name in the server, if the server made it.
    ///
    /// # Errors
    /// A file of that name; what the host or the server says. Nothing is then left.
    fn make_clone(&self, disk: &Disk, way: &Way, file: &Path, ending: &Ending) -> Result<Option<String>> {
        let DiskState { disk: path, snapshot: name, .. } = &disk.state;
        let clone = |served, is_served| {
            let control = self.args.server.control.clone();
            Undo::Drop(Clone { file: file.to_owned(), served, is_served, control })
        };
        match (way, &disk.served) {
            (Way::File, _) | (_, None) => {
                ending.undo(clone(None, false))?;
                let made = snapshot::clone(&path_from_text(path), name, file, &self.options(disk)?);
                // The file may be another's.
                made.or_else(|error| ending.change(None).and(Err(error.into())))?;
                Ok(None)
            }
            (Way::Export(_), Some(served)) => {
                // Not the file's own: several guests may have a disk of that name.
                let name_there = file.file_stem().unwrap_or_default().to_string_lossy().into_owned();
                ending.undo(clone(Some(name_there.clone()), false))?;
                let added = match disk.state.tiered_ns {
                    Some(taken_ns) => self.serve_tiered_clone(disk, taken_ns, file, name_there),
                    None => self.serve_clone(served, name, file, name_there),
                };
                let added = added.or_else(|error| ending.change(None).and(Err(error)))?;
                ending.change(Some(clone(Some(added.clone()), true)))?;
                Ok(Some(added))
            }
        }
    }

    /// Has the server serve a clone; returns its name there.
    fn serve_clone(
        &self,
        served: &DiskStatus,
        name: &str,
        file: &Path,
        name_there: String,
    ) -> Result<String> {
        let mut backing = layer_directories(&self.client, &served.name)?;
        backing.extend(file.parent().map(Path::to_owned));
        let backing = backing.iter().map(|dir| path_to_text(dir)).collect();
        let spec = DiskSpec {
            path: served.path.clone(),
            at: Some(name.to_owned()),
            clone: Some(path_to_text(file)),
            backing: Some(backing),
            name: Some(name_there),
            ..DiskSpec::default()
        };
        let added: DiskDetail = self.client.post("/v1/disks", &spec)?;
        Ok(added.disk.name)
    }

    /// Makes a clone of a tiered disk's state, and has the server serve it as an ordinary disk; returns its name there.
    fn serve_tiered_clone(
        &self,
        disk: &Disk,
        taken_ns: u64,
        file: &Path,
        name_there: String,
    ) -> Result<String> {
        let (found, pin) = self.find_taken(disk, taken_ns)?;
        clone_of(&pin, &found, file, true)?;
        let spec = DiskSpec {
            path: path_to_text(file),
            backing: Some(vec![path_to_text(&found.name)]),
            name: Some(name_there),
            ..DiskSpec::default()
        };
        let added: DiskDetail = self.client.post("/v1/disks", &spec)?;
        Ok(added.disk.name)
    }

    /// Has an export like that of the disk `old` lead to the disk `new`.
    fn lead_to(&self, export: &ExportSpec, old: &str, new: &str) -> Result<Changed> {
        match export {
            ExportSpec::VhostUser(export) => {
                let socket = Path::new(&export.socket).with_file_name(format!("{new}.sock"));
                let to = absolute(&socket);
                let mut export = export.clone();
                (export.disk, export.socket) = (new.to_owned(), to.clone());
                let _: ExportStatus = self.client.post("/v1/exports", &ExportSpec::VhostUser(export))?;
                Ok(Changed { to, export: String::new() })
            }
            ExportSpec::Nbd(_) => Ok(Changed { to: new.to_owned(), export: old.to_owned() }),
            ExportSpec::Fuse(export) => Ok(Changed { to: export.file_of(new), export: String::new() }),
        }
    }
}

/// What was written to the active layer of a disk that is served.
fn written_to(active: &Path, detail: &DiskDetail) -> Result<Option<String>> {
    if let Some(written) = written_in(active)? {
        return Ok(Some(written));
    }
    // The server may hold writes that are not in the file yet.
    let stats = detail.stats.as_ref();
    let changes =
        stats.map_or(0, |stats| stats.write.requests + stats.discard.requests + stats.write_zeroes.requests);
    Ok((changes > 0).then(|| format!("{} since the server opened it", counted(changes, "write"))))
}

/// What a file has of its own.
fn written_in(active: &Path) -> Result<Option<String>> {
    let mut clusters = 0;
    own_clusters(active, &Gate::unrestricted(), |_| clusters += 1)?;
    Ok((clusters > 0).then(|| format!("{} written since", counted(clusters, "cluster"))))
}

/// What QEMU is given instead of a path or a socket; or of the export of that name.
struct Changed {
    to: String,
    export: String,
}

/// A name that no file has: STEM.WHAT.qcow2 beside the disk or in `dir`, or with a number.
fn unused(disk: &Path, dir: Option<&Path>, what: &str) -> PathBuf {
    let name = |what: &str| {
        let beside = snapshot::frozen_path(disk, what, vmstrata_disk::Format::Qcow2);
        let beside = beside.unwrap_or_else(|| disk.with_file_name(format!("disk.{what}.qcow2")));
        match dir {
            Some(dir) => dir.join(beside.file_name().unwrap_or_default()),
            None => beside,
        }
    };
    let numbered = (2..).map(|number| name(&format!("{what}-{number}")));
    std::iter::once(name(what))
        .chain(numbered)
        .find(|path| path.symlink_metadata().is_err())
        .expect("endless")
}

/// How a command line gets to the disk at `path`, which may be served.
fn find_way(
    qemu: &[String],
    path: &Path,
    served: Option<&DiskStatus>,
    exports: &[ExportStatus],
) -> Option<Way> {
    let file = Way::File;
    let is_there = |way: &Way, name: &str| {
        let mut found = false;
        let _ = edit(qemu, |pairs| found |= hits(pairs, path, way, name).next().is_some());
        found
    };
    if is_there(&file, "") {
        return Some(file);
    }
    let name = &served?.name;
    let own = exports.iter().filter(|export| export.export.serves(name));
    let mut ways = own.map(|export| Way::Export(export.export.clone()));
    ways.find(|way| is_there(way, name))
}

/// The command line with what leads to a disk replaced.
fn replaced(qemu: &[String], path: &Path, way: &Way, changed: &Changed) -> Vec<String> {
    edit(qemu, |pairs| {
        let at: Vec<usize> = hits(pairs, path, way, &changed.export).collect();
        for at in at {
            let value = &mut pairs[at].1;
            let is_url = way.is_nbd() && value.contains(':');
            *value = match (is_url, value.strip_prefix("file:")) {
                (true, _) => with_export(value, &changed.export, &changed.to),
                (false, Some(_)) => format!("file:{}", changed.to),
                (false, None) => changed.to.clone(),
            };
        }
    })
}

impl Way {
    fn is_nbd(&self) -> bool {
        matches!(self, Self::Export(ExportSpec::Nbd(_)))
    }
}

/// An NBD address with another export's name.
fn with_export(url: &str, old: &str, new: &str) -> String {
    for (before, after) in [("/", "?"), ("exportname=", "")] {
        let from = format!("{before}{old}{after}");
        if let Some(at) = url.find(&from) {
            return format!("{}{before}{new}{after}{}", &url[..at], &url[at + from.len()..]);
        }
    }
    url.strip_suffix(old).map_or_else(|| url.to_owned(), |head| format!("{head}{new}"))
}

/// The places of the values in `pairs` that lead to the disk at `path` this way; `name` is its name there.
fn hits(pairs: &[Pair], path: &Path, way: &Way, name: &str) -> std::vec::IntoIter<usize> {
    let same_path = |value: &str, path: &Path| {
        let value = Path::new(value);
        value == path
            || value.canonicalize().is_ok_and(|value| path.canonicalize().is_ok_and(|path| path == value))
    };
    let is_hit = |(key, value): &Pair| match way {
        Way::File => {
            let named = Path::new(value.strip_prefix("file:").unwrap_or(value));
            FileId::at(path).is_some_and(|id| FileId::at(named) == Some(id))
        }
        Way::Export(ExportSpec::VhostUser(export)) => same_path(value, Path::new(&export.socket)),
        Way::Export(ExportSpec::Fuse(export)) => same_path(value, Path::new(&export.file_of(name))),
        Way::Export(ExportSpec::Nbd(export)) => {
            let is_here = match export.address.split_once(':') {
                Some(("unix", socket)) => {
                    value == &format!("nbd:unix:{socket}:exportname={name}")
                        || pairs.iter().any(|(_, value)| same_path(value, Path::new(socket)))
                }
                Some((_, at)) => {
                    let (host, port) = at.rsplit_once(':').unwrap_or((at, "10809"));
                    let has = |end: &str, text: &str| {
                        pairs.iter().any(|(key, value)| key.ends_with(end) && value == text)
                    };
                    value == &format!("nbd:{at}:exportname={name}") || has("host", host) && has("port", port)
                }
                None => false,
            };
            let is_export_key = key.ends_with("export") && value == name;
            is_export(value, &export.address, name)
                || is_here && (is_export_key || value.ends_with(&format!("exportname={name}")))
        }
    };
    let hits: Vec<usize> = (0..pairs.len()).filter(|&at| is_hit(&pairs[at])).collect();
    hits.into_iter()
}
