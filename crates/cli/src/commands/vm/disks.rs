//! The disks of a guest that a server serves: found, and snapshotted while the guest is held.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Result, bail, ensure};
use serde::Deserialize;
use serde_json::json;
use vmstrata_api::{
    DiskDetail, DiskList, ExportList, ExportSpec, JobState, JobStatus, MergeDirection, SnapshotSpec,
    SnapshotTaken, encode_segment,
};
use vmstrata_disk::{OpenOptions, snapshot};
use vmstrata_memory::BoxError;
use vmstrata_memory::capture::Disks;
use vmstrata_memory::qmp::Qmp;
use vmstrata_memory::vault::DiskState;
use vmstrata_types::{path_from_text, path_to_text};

use super::kept;
use crate::args::MergeHowArgs;
use crate::client::Client;
use crate::commands::named::argument_for;
use crate::commands::snapshot::NOW_QCOW2;
use crate::commands::taken::kept_of;
use crate::key_values::escape;

/// How long a snapshot that was asked for may still come to be, after who asked is gone.
const UNDER_WAY_MAX: Duration = Duration::from_secs(30);
/// How often is looked whether it has.
const LOOK_EVERY: Duration = Duration::from_millis(50);

/// Disks of one server, and the snapshot to take of them.
pub(super) struct ServedDisks {
    client: Client,
    spec: SnapshotSpec,
    /// `[disk]`: what leads commands to it, and whether it is a tiered disk.
    paths: Vec<(String, bool)>,
    /// QEMU's names of the media that are these disks.
    media: Vec<String>,
    is_taken: bool,
}

/// An element of QEMU's answer to `query-block`.
#[derive(Debug, Deserialize)]
struct Block {
    device: String,
    qdev: Option<String>,
    inserted: Option<Inserted>,
}

/// What is said of a medium.
#[derive(Debug, Deserialize)]
struct Inserted {
    ro: bool,
    file: String,
}

impl ServedDisks {
    /// The disks that were named, or else those that QEMU is connected to.
    ///
    /// # Errors
    /// A disk that is not served.
    pub(super) fn find(client: Client, qmp: &mut Qmp, named: &[String], spec: SnapshotSpec) -> Result<Self> {
        let disks = Self::of_guest(client, qmp, named, spec)?;
        disks.check_names()?;
        Ok(disks)
    }

    /// The same, whether the snapshot can have its name or not.
    ///
    /// # Errors
    /// A disk that is not served.
    pub(super) fn of_guest(
        client: Client,
        qmp: &mut Qmp,
        named: &[String],
        spec: SnapshotSpec,
    ) -> Result<Self> {
        let mut disks = Self { client, spec, paths: Vec::new(), media: Vec::new(), is_taken: false };
        if named.is_empty() && !disks.client.is_answered() {
            return Ok(disks);
        }
        let served: DiskList = disks.client.get("/v1/disks")?;
        let mut names = disks.connected(qmp, &served)?;
        if !named.is_empty() {
            names = named.to_vec();
        }
        for name in names {
            let Some(disk) = served.disks.iter().find(|disk| disk.name == name) else {
                bail!("{}: no disk is named '{name}'", disks.client.path().display());
            };
            disks.paths.push((path_to_text(&argument_for(disk)), disk.tier.is_some()));
            disks.spec.disks.push(name);
        }
        Ok(disks)
    }

    /// Refuses a name that a snapshot of a tiered disk has. Its repository is asked now, as a guest that is held does not wait for it; one
    /// that does not answer is not waited for.
    fn check_names(&self) -> Result<()> {
        let tiered = self.paths.iter().filter(|(_, is_tiered)| *is_tiered);
        let kept = kept_of(tiered.map(|(path, _)| (path.clone(), path_from_text(path))).collect())?;
        let name = &self.spec.name;
        for (path, kept) in &kept {
            let kept = kept.as_deref().unwrap_or_default();
            ensure!(
                kept.iter().all(|taken| taken.name != *name),
                "{path}: a snapshot '{name}' is there already"
            );
        }
        Ok(())
    }

    /// Names of the disks whose vhost-user sockets QEMU was started with, and of those it is a client of over NBD. (QEMU
    /// itself tells no paths of vhost-user sockets; such a disk that was plugged in later must be named.)
    fn connected(&mut self, qmp: &mut Qmp, served: &DiskList) -> Result<Vec<String>> {
        let command = std::fs::read(format!("/proc/{}/cmdline", qmp.peer()?)).unwrap_or_default();
        let command = String::from_utf8_lossy(&command).into_owned();
        let exports: ExportList = self.client.get("/v1/exports")?;
        let media: Vec<String> = blocks(qmp)?.into_iter().map(|block| block.1).collect();
        let mut names = Vec::new();
        for export in exports.exports {
            match export.export {
                ExportSpec::VhostUser(export) if names_path(&command, Path::new(&export.socket)) => {
                    names.push(export.disk)
                }
                // QEMU tells the files that it has open.
                ExportSpec::VhostUser(_) | ExportSpec::Fuse(_) => {}
                ExportSpec::Nbd(export) => {
                    for disk in &served.disks {
                        let is_it = |file: &&String| is_export(file, &export.address, &disk.name);
                        let Some(file) = media.iter().find(is_it) else { continue };
                        names.push(disk.name.clone());
                        self.media.push(file.clone());
                    }
                }
            }
        }
        // A disk may have several exports.
        names.sort();
        names.dedup();
        Ok(names)
    }

    /// Media of the guest that no server has: their content is not in the snapshot.
    ///
    /// # Errors
    /// When QEMU does not tell.
    pub(super) fn others(&self, qmp: &mut Qmp) -> Result<Vec<String>> {
        let others = blocks(qmp)?.into_iter().filter(|(_, file)| !self.media.contains(file));
        Ok(others.map(|(name, file)| format!("{name} ({file})")).collect())
    }

    /// Disks by their names, of which a process that is gone may have asked the snapshot `name`, taken at `taken_ns`.
    pub(super) fn asked(client: Client, names: Vec<String>, name: &str, taken_ns: u64) -> Self {
        let spec = SnapshotSpec {
            disks: names,
            name: name.to_owned(),
            taken_ns: Some(taken_ns),
            ..SnapshotSpec::default()
        };
        Self { client, spec, paths: Vec::new(), media: Vec::new(), is_taken: false }
    }

    /// Deletes that snapshot, also if it comes to be only now; one that was meanwhile taken again under its name stays.
    pub(super) fn undo_late(&self) {
        let deadline = Instant::now() + UNDER_WAY_MAX;
        while !self.delete_listed().is_ok_and(|deleted| deleted) && Instant::now() < deadline {
            std::thread::sleep(LOOK_EVERY);
        }
    }

    /// Deletes the snapshot if it is there. A disk may be busy: that is an error, to be tried again.
    fn delete_listed(&self) -> Result<bool> {
        let served: DiskList = self.client.get("/v1/disks")?;
        let mut deleted = false;
        for disk in served.disks.iter().filter(|disk| self.spec.disks.contains(&disk.name)) {
            if disk.tier.is_some() {
                let taken_ns = self.spec.taken_ns.unwrap_or_default();
                let state = DiskState::new(path_to_text(&argument_for(disk)), &self.spec.name);
                deleted |= kept::delete(&self.client, &state, taken_ns)?;
                continue;
            }
            // Headers only, of a chain that the server has found fit to open, wherever its layers are.
            let open = OpenOptions { allow_backing: vec!["/".into()], ..OpenOptions::default() };
            let known = snapshot::list(&path_from_text(&disk.path), &open)?;
            let infos = known.iter().filter_map(|snapshot| snapshot.info.as_ref());
            if infos
                .clone()
                .any(|info| info.name == self.spec.name && Some(info.taken_ns) == self.spec.taken_ns)
            {
                self.delete(&disk.name)?;
                deleted = true;
            }
        }
        Ok(deleted)
    }

    /// The directories that the layers of their chains are in.
    ///
    /// # Errors
    /// What the server says.
    pub(super) fn backing(&self) -> Result<Vec<PathBuf>> {
        let mut all = Vec::new();
        for disk in &self.spec.disks {
            all.extend(layer_directories(&self.client, disk)?);
        }
        Ok(all)
    }

    /// What the server calls them.
    pub(super) fn names(&self) -> &[String] {
        &self.spec.disks
    }

    /// The states that the snapshot has.
    fn states(&self) -> Vec<DiskState> {
        let state = |(path, is_tiered): &(String, bool)| DiskState {
            tiered_ns: self.spec.taken_ns.filter(|_| *is_tiered),
            ..DiskState::new(path, &self.spec.name)
        };
        self.paths.iter().map(state).collect()
    }

    fn delete(&self, disk: &str) -> Result<()> {
        let asked = MergeHowArgs::default().delete(
            disk,
            std::slice::from_ref(&self.spec.name),
            false,
            MergeDirection::default(),
        );
        let job: JobStatus = self.client.post("/v1/jobs", &asked)?;
        let job = self.client.until_ended(job, |_| true)?;
        // A job that is done says what files it had to keep.
        if job.state != JobState::Done {
            bail!("{disk}: {}", job.error.unwrap_or_else(|| "the job was cancelled".to_owned()));
        }
        Ok(())
    }
}

impl Disks for ServedDisks {
    fn snapshot(&mut self) -> Result<Vec<DiskState>, BoxError> {
        if self.paths.is_empty() {
            return Ok(Vec::new());
        }
        let taken: SnapshotTaken = self.client.post("/v1/snapshots", &self.spec)?;
        self.is_taken = true;
        for ((path, _), _) in self.paths.iter().zip(&taken.disks).filter(|(_, layer)| layer.was_raw) {
            eprintln!("vmstrata: {path}: {NOW_QCOW2}");
        }
        Ok(self.states())
    }

    fn undo(&mut self) {
        if std::mem::take(&mut self.is_taken)
            && let Err(error) = self.spec.disks.iter().zip(&self.states()).try_for_each(|(disk, state)| {
                match state.tiered_ns {
                    Some(taken_ns) => kept::delete(&self.client, state, taken_ns).map(drop),
                    None => self.delete(disk),
                }
            })
        {
            let (name, disks) = (&self.spec.name, self.spec.disks.join(", "));
            eprintln!("vmstrata: warning: snapshot {name} of {disks} is left over: {error:#}");
        }
    }
}

/// The directories that the layers of a served disk are in: all that its backing files need to be allowed.
///
/// # Errors
/// What the server says.
pub(super) fn layer_directories(client: &Client, disk: &str) -> Result<Vec<PathBuf>> {
    let detail: DiskDetail = client.get(&format!("/v1/disks/{}", encode_segment(disk)))?;
    let parents =
        detail.chain.iter().filter_map(|layer| Some(path_from_text(&layer.path).parent()?.to_owned()));
    let mut directories: Vec<PathBuf> = parents.collect();
    directories.sort();
    directories.dedup();
    Ok(directories)
}

/// Media that the guest can write to: QEMU's name of the drive, and of the file.
fn blocks(qmp: &mut Qmp) -> Result<Vec<(String, String)>> {
    let blocks: Vec<Block> = qmp.ask("query-block", json!({}))?;
    let writable = |block: Block| {
        let inserted = block.inserted.filter(|inserted| !inserted.ro)?;
        let name = if block.device.is_empty() { block.qdev.unwrap_or_default() } else { block.device };
        Some((name, inserted.file))
    };
    Ok(blocks.into_iter().filter_map(writable).collect())
}

/// Whether QEMU's name of a medium is that of the disk `name` at the address of an export.
pub(super) fn is_export(file: &str, address: &str, name: &str) -> bool {
    let expected = match address.split_once(':') {
        Some(("unix", path)) => format!("nbd+unix:///{name}?socket={path}"),
        Some(("tcp", at)) => format!("nbd://{at}/{name}"),
        _ => return false,
    };
    file == expected
}

/// Whether a command line has a socket's path, as a whole, in an option of QEMU's.
fn names_path(command: &str, socket: &Path) -> bool {
    let resolved = socket.canonicalize().unwrap_or_else(|_| socket.to_owned());
    [socket, &resolved].into_iter().any(|path| {
        let path = escape(&path.to_string_lossy());
        let ends =
            |rest: &str| rest.is_empty() || rest.starts_with([',', '\0', '"']) && !rest.starts_with(",,");
        command.match_indices(&path).any(|(at, found)| ends(&command[at + found.len()..]))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_disk_is_the_guests_if_its_socket_is_on_the_command_line() {
        let has = |command: &str, socket: &str| names_path(command, Path::new(socket));
        let line = "qemu\0-chardev\0socket,id=d,path=/run/web.sock,reconnect=1\0-S";
        assert!(has(line, "/run/web.sock"));
        assert!(!has(line, "/run/web") && !has(line, "/run/db.sock"));
        assert!(has("socket,path=/run/a,,b.sock", "/run/a,b.sock") && !has("path=/run/a,,b.sock", "/run/a"));
        assert!(has(r#"{"backend":{"addr":{"path":"/run/web.sock"}}}"#, "/run/web.sock"));
    }

    #[test]
    fn a_medium_is_an_export_of_the_same_name_at_the_same_address() {
        let file = "nbd+unix:///web?socket=/run/nbd.sock";
        assert!(is_export(file, "unix:/run/nbd.sock", "web"));
        assert!(!is_export(file, "unix:/run/nbd.sock", "we") && !is_export(file, "unix:/run/nbd", "web"));
        assert!(is_export("nbd://localhost:10809/web", "tcp:localhost:10809", "web"));
    }
}
