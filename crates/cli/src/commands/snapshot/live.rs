//! Snapshots of disks that a server serves: the server takes them.

use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;

use anyhow::{Result, bail};
use vmstrata_api::{
    DiskList, DiskStatus, FileNumber, JobSpec, JobState, JobStatus, Quiesce, RevertSpec, SnapshotReverted,
    SnapshotSpec, SnapshotTaken,
};
use vmstrata_disk::snapshot::SnapshotInfo;
use vmstrata_nbd::Uri;
use vmstrata_store::FileId;
use vmstrata_types::{path_from_text, path_to_text};

use super::note;
use super::report::{Reverted, Taken, TakenOne};
use crate::args::{
    ControlArgs, FlattenArgs, MergeArgs, SnapshotCreateArgs, SnapshotDeleteArgs, SnapshotRevertArgs,
};
use crate::client::Client;
use crate::commands::backup::until_stopped;
use crate::commands::merge::{STOPPED, line};
use crate::commands::named::leads_to;
use crate::commands::tiered::address_of;
use crate::output::{Progress, print, print_json};

/// Disks that a server serves, and what it calls them.
pub struct Live {
    client: Client,
    disks: Vec<(PathBuf, String)>,
}

impl Live {
    /// Asks the server whether it serves `disks`; `None` when there is no server, or it serves none of them.
    ///
    /// # Errors
    /// A server that was named and does not answer, or that serves some of the disks and not the others.
    pub fn find(disks: &[PathBuf], server: &ControlArgs) -> Result<Option<Self>> {
        let client = Client::new(server)?;
        if server.control.is_none() && !client.path().exists() {
            return Ok(None);
        }
        let served: DiskList = match client.get("/v1/disks") {
            Ok(served) => served,
            // The socket of a server that is gone. One that is there and does not say what it serves may serve these.
            Err(_) if server.control.is_none() && !client.is_answered() => return Ok(None),
            Err(error) => return Err(error),
        };
        let name_of = |disk: &Path| {
            let same = |served: &&DiskStatus| is_file_of(served, disk);
            served.disks.iter().find(same).map(|served| served.name.clone())
        };
        let found: Vec<(PathBuf, String)> =
            disks.iter().filter_map(|disk| Some((disk.clone(), name_of(disk)?))).collect();
        if found.is_empty() {
            return Ok(None);
        }
        if let Some(other) = disks.iter().find(|disk| found.iter().all(|(known, _)| known != *disk)) {
            bail!(
                "{}: is not served by {}, which serves {}: one snapshot is of disks of one server, or of files that no process has open",
                other.display(),
                client.path().display(),
                found[0].0.display()
            );
        }
        Ok(Some(Self { client, disks: found }))
    }

    /// The server.
    pub fn client(&self) -> &Client {
        &self.client
    }

    /// What the server calls the first disk.
    pub fn name(&self) -> &str {
        &self.disks[0].1
    }

    /// Has the server take the snapshot.
    ///
    /// # Errors
    /// What the server says.
    pub fn create(&self, info: &SnapshotInfo, args: &SnapshotCreateArgs) -> Result<()> {
        let taken = self.take(info, args.agent.as_deref(), args.quiesce, args.convert_raw)?;
        let layers = self.disks.iter().zip(&taken.disks);
        if args.access.common.json {
            let one = |((disk, _), layer): (&(PathBuf, String), &vmstrata_api::SnapshotLayer)| {
                TakenOne::named(path_to_text(disk), layer.layer.clone(), layer.was_raw)
            };
            let snapshots = layers.map(one).collect();
            return Ok(print_json(&Taken::new(info, snapshots).live(&taken))?);
        }
        let line = |((disk, _), layer): (&(PathBuf, String), &vmstrata_api::SnapshotLayer)| {
            let (note, disk, layer) = (note(disk, layer.was_raw), disk.display(), &layer.layer);
            let held_ms = taken.pause_us as f64 / 1000.0;
            let quiesced = match (taken.quiesced, &taken.not_quiesced_because) {
                (true, _) => "quiesced, ",
                (false, Some(_)) => "not quiesced, ",
                (false, None) => "",
            };
            format!(
                "{disk}: snapshot {} taken: {layer} ({quiesced}writes held for {held_ms:.1} ms)\n{note}",
                info.name
            )
        };
        warn_unless_quiesced(&taken);
        Ok(print(&layers.map(line).collect::<String>())?)
    }

    /// The same, and says nothing of it.
    ///
    /// # Errors
    /// What the server says.
    pub fn take(
        &self,
        info: &SnapshotInfo,
        agent: Option<&Path>,
        quiesce: Option<Quiesce>,
        convert_raw: bool,
    ) -> Result<SnapshotTaken> {
        let agent = agent.map(std::path::absolute).transpose()?;
        let spec = SnapshotSpec {
            disks: self.disks.iter().map(|(_, name)| name.clone()).collect(),
            name: info.name.clone(),
            taken_ns: Some(info.taken_ns),
            labels: info.labels.iter().cloned().collect(),
            group: info.group.clone(),
            agent: agent.as_deref().map(path_to_text),
            quiesce,
            convert_raw,
            publish_later: false,
        };
        self.client.post("/v1/snapshots", &spec)
    }

    /// Has the server delete snapshots of the first disk, and waits until it has.
    ///
    /// # Errors
    /// What the server says, also of a job that someone ended.
    pub fn delete(&self, args: &SnapshotDeleteArgs) -> Result<()> {
        let asked = args.how.delete(self.name(), &args.names, args.keep_files, args.direction);
        self.run_job(&asked, &format!("{} deleted", args.names.join(", ")), args.access.common.json)
    }

    /// Has the server drop layers of the first disk, and waits until it has.
    ///
    /// # Errors
    /// What the server says, also of a job that someone ended.
    pub fn merge(&self, args: &MergeArgs) -> Result<()> {
        let asked = args.how.merge(self.name(), &args.layers, args.lose.yes, args.remove, args.direction)?;
        self.run_job(&asked, &format!("{} dropped", args.layers.in_words()), args.access.common.json)
    }

    /// Has the server flatten the first disk, and waits until it has.
    ///
    /// # Errors
    /// What the server says, also of a job that someone ended.
    pub fn flatten(&self, args: &FlattenArgs) -> Result<()> {
        let asked = args.how.flatten(self.name(), args.onto.as_deref(), args.lose.yes, args.remove)?;
        self.run_job(&asked, &args.done(), args.access.common.json)
    }

    /// Has the server take the first disk back to a snapshot.
    ///
    /// # Errors
    /// What the server says.
    pub fn revert(&self, args: &SnapshotRevertArgs) -> Result<()> {
        let keep = args.keep.as_deref().map(std::path::absolute).transpose()?;
        let asked = RevertSpec {
            snapshot: args.name.clone(),
            keep: keep.as_deref().map(path_to_text),
            force: args.force,
        };
        let path = format!("/v1/disks/{}/revert", vmstrata_api::encode_segment(&self.disks[0].1));
        let done: SnapshotReverted = self.client.post(&path, &asked)?;
        Reverted::new(args, done.layer, done.dropped_layers).tell(args.access.common.json)
    }

    fn run_job(&self, asked: &JobSpec, done: &str, json: bool) -> Result<()> {
        let job = self.wait_job(asked, false)?;
        if json {
            return Ok(print_json(&job)?);
        }
        let disk = path_to_text(&self.disks[0].0);
        let mut text = line(&disk, done, job.bytes, job.removed.unwrap_or_default());
        // Files that stay, and why.
        text.extend(job.error.map(|kept| kept + "\n"));
        Ok(print(&text)?)
    }

    /// Has the server do a job on the first disk, and waits until it has; a signal that ends this command ends the job, too.
    ///
    /// # Errors
    /// What the server says, also of a job that someone ended.
    pub fn wait_job(&self, asked: &JobSpec, quiet: bool) -> Result<JobStatus> {
        let job: JobStatus = self.client.post("/v1/jobs", asked)?;
        let what = job.kind.replace('_', "-");
        let progress = Progress::of(quiet, &job.unit);
        let job = until_stopped(|stop| {
            self.client.until_ended(job, |job| {
                progress.update_written(&what, job.done, job.total, job.bytes);
                !stop.load(Ordering::Relaxed)
            })
        })?;
        if job.state != JobState::Done {
            let left = match asked {
                JobSpec::IndexBuild { .. } => "what is built stays",
                JobSpec::TierAttach { .. } => {
                    "its guest writes on this host, and nothing is published: the command goes on if it is run again"
                }
                JobSpec::ReplicaFill { .. } => "what came stays: the command goes on if it is run again",
                JobSpec::Move { .. } => "what is copied stays: the command goes on if it is run again",
                JobSpec::Rebase { .. } => {
                    "the disk stands on what it stood on, and its server drops the state that was taken for it"
                }
                _ => STOPPED,
            };
            // The error names the file itself.
            bail!(job.error.unwrap_or_else(|| {
                format!("{}: job {} was cancelled: {left}", self.disks[0].0.display(), job.id)
            }));
        }
        Ok(job)
    }
}

/// Says so if a guest was to stand still and did not.
pub fn warn_unless_quiesced(taken: &SnapshotTaken) {
    if let Some(why) = &taken.not_quiesced_because {
        eprintln!("vmstrata: warning: not quiesced: {why}");
    }
}

/// Whether a file is that of a disk that a server serves.
///
/// A relative path, as older servers tell it, says nothing: it is seen from the server's directory.
pub fn is_file_of(served: &DiskStatus, disk: &Path) -> bool {
    if Uri::is_meant(disk) {
        return path_from_text(&served.path) == disk;
    }
    let Some(file) = number_of(disk) else {
        return matches!(address_of(disk), Ok(Some(address)) if leads_to(&address, served));
    };
    if served.file == Some(file) {
        return true;
    }
    // It gets another file at each snapshot, and the server may have said which before or after; the file system stays, but for a
    // tiered disk's, which is another.
    let may_be = served.tier.is_some() || served.file.is_none_or(|active| active.device == file.device);
    let path = path_from_text(&served.path);
    may_be && path.is_absolute() && number_of(&path) == Some(file)
}

fn number_of(path: &Path) -> Option<FileNumber> {
    let file = FileId::at(path)?;
    Some(FileNumber { device: file.dev, inode: file.ino })
}
