//! Jobs of the host's disks begin, change and end.

use std::sync::Arc;

use vmstrata_api::{self as api, ChangedBy, JobChange, JobSpec, JobStatus, MergeDirection, RemoveFiles};
use vmstrata_disk::merge::{Direction, LayerRef, MergeOptions, Removal};
use vmstrata_disk::{Disk, OpenOptions};

use super::Host;
use crate::audit::What;
use crate::error::Error;
use crate::jobs::{
    DEFAULT_LIMIT, FLATTEN, INDEX_BUILD, IndexBuild, MERGE, MOVE, Merging, REBASE, SNAPSHOT_DELETE,
};
use crate::spec::{SpecError, absolute};

/// A limit of 0 would be a pause that does not say so.
fn check_limit(bytes_per_second: Option<u64>) -> Result<(), Error> {
    match bytes_per_second {
        Some(0) => Err(SpecError::Zero { what: "bytes_per_second" }.into()),
        _ => Ok(()),
    }
}

/// How layers are dropped, in the engine's words.
pub fn merge_options(
    open: OpenOptions,
    remove: RemoveFiles,
    direction: MergeDirection,
    forget_missing: bool,
) -> MergeOptions {
    let removal = match remove {
        RemoveFiles::None => Removal::Nothing,
        RemoveFiles::Snapshots => Removal::Snapshots,
        RemoveFiles::All => Removal::All,
        RemoveFiles::Everywhere => Removal::Everywhere,
    };
    let direction = match direction {
        MergeDirection::Auto => Direction::Auto,
        MergeDirection::Stream => Direction::Stream,
        MergeDirection::Commit => Direction::Commit,
    };
    MergeOptions { open, removal, forget_missing, direction, ..MergeOptions::default() }
}

fn layer_ref(layer: &api::LayerRef) -> Result<LayerRef, Error> {
    match layer {
        api::LayerRef::Number(number) => Ok(LayerRef::Number(*number as usize)),
        api::LayerRef::File(path) => Ok(LayerRef::File(absolute("file", path)?)),
    }
}

/// What is done with a disk until its job has begun.
const BEGINNING: &str = "having a job begun";

impl Host {
    /// Begins a job on a disk that is served.
    ///
    /// # Errors
    /// No such disk; a job of the kind under way already; a chain that cannot be read; a limit of 0.
    pub fn start_job(&self, asked: JobSpec, by: ChangedBy) -> Result<JobStatus, Error> {
        let what = What::of("job_start", [asked.disk().to_owned()]);
        self.audit.change(by.clone(), what, |what| {
            what.object = Some(asked.kind().to_owned());
            let started = self.begin_job(asked, by)?;
            what.object = Some(format!("job {}: {}", started.id, started.kind));
            Ok(started)
        })
    }

    pub(super) fn begin_job(&self, asked: JobSpec, by: ChangedBy) -> Result<JobStatus, Error> {
        let limit = asked.bytes_per_second();
        check_limit(limit)?;
        if let JobSpec::TierAttach { .. } = asked {
            return self.begin_attach(&asked, by);
        }
        if let JobSpec::Move { .. } = asked {
            return self.begin_move(&asked, by);
        }
        if let JobSpec::Rebase { .. } = asked {
            return self.begin_rebase(&asked, by);
        }
        if let JobSpec::ReplicaFill { .. } | JobSpec::ReplicaScrub { .. } = asked {
            return self.begin_replica_walk(&asked, by);
        }
        let (_change, table) = self.begin_change()?;
        let (spec, open) = table.lend(asked.disk(), BEGINNING)?;
        spec.refuse_if_tiered("jobs")?;
        let open_options = self.open_options(spec);
        drop(table);
        let reserve = |kind| self.jobs.reserve(kind, asked.disk());
        let how = |remove, direction, forget_missing| {
            merge_options(open_options, remove, direction, forget_missing)
        };
        let (slot, work) = match &asked {
            JobSpec::IndexBuild { disk, .. } => {
                let slot = reserve(&INDEX_BUILD)?;
                let work = IndexBuild::new(&open, false)?;
                return self.keep_job(disk, || slot.start(limit, by, work));
            }
            JobSpec::SnapshotDelete { snapshots, keep_files, direction, forget_missing, .. } => {
                let remove = if *keep_files { RemoveFiles::None } else { RemoveFiles::Snapshots };
                let slot = reserve(&SNAPSHOT_DELETE)?;
                let how = how(remove, *direction, *forget_missing);
                (slot, Merging::snapshots(Arc::clone(&open), snapshots, how)?)
            }
            JobSpec::Merge { first, last, drop_snapshots, remove, direction, forget_missing, .. } => {
                let ends = [layer_ref(first)?, layer_ref(last)?];
                let slot = reserve(&MERGE)?;
                let how = how(*remove, *direction, *forget_missing);
                (slot, Merging::layers(Arc::clone(&open), ends.each_ref(), *drop_snapshots, how)?)
            }
            JobSpec::Flatten { onto, drop_snapshots, remove, forget_missing, .. } => {
                let onto = onto.as_ref().map(layer_ref).transpose()?;
                let slot = reserve(&FLATTEN)?;
                let how = how(*remove, MergeDirection::Stream, *forget_missing);
                (slot, Merging::flatten(Arc::clone(&open), onto.as_ref(), *drop_snapshots, how)?)
            }
            JobSpec::TierAttach { .. }
            | JobSpec::Move { .. }
            | JobSpec::Rebase { .. }
            | JobSpec::ReplicaFill { .. }
            | JobSpec::ReplicaScrub { .. } => unreachable!("begun above"),
        };
        self.jobs.refuse_beside(&[&MOVE, &REBASE], asked.disk())?;
        let limit = Some(limit.unwrap_or(DEFAULT_LIMIT));
        self.keep_job(asked.disk(), || slot.start(limit, by, work))
    }

    /// Rebuilds the index of a disk that was opened with one that no longer holds.
    pub(super) fn mend_index(&self, name: &str, disk: &Arc<Disk>) {
        if !disk.lost_its_index() {
            return;
        }
        let start = || {
            let slot = self.jobs.reserve(&INDEX_BUILD, name)?;
            let work = IndexBuild::new(disk, true)?;
            self.keep_job(name, || slot.start(Some(DEFAULT_LIMIT), ChangedBy::Server, work))
        };
        match start() {
            Ok(job) => tracing::info!(disk = name, job = job.id, "its index is being rebuilt"),
            Err(error) => tracing::warn!(disk = name, %error, "its index is not rebuilt"),
        }
    }

    /// Starts a job unless its disk has gone or the server is ending: none begins after the disk's jobs were ended.
    pub(super) fn keep_job(
        &self,
        disk: &str,
        start: impl FnOnce() -> Result<JobStatus, Error>,
    ) -> Result<JobStatus, Error> {
        let table = self.table.lock();
        table.serving(disk)?;
        if table.is_ending {
            return Err(Error::Ending);
        }
        start()
    }

    /// Jobs under way, and the last ones that ended.
    pub fn jobs(&self) -> Vec<JobStatus> {
        self.jobs.list()
    }

    /// A job by its number.
    ///
    /// # Errors
    /// No such job.
    pub fn job(&self, id: u64) -> Result<JobStatus, Error> {
        self.jobs.status(id)
    }

    /// Pauses, resumes, cancels or slows a job.
    ///
    /// # Errors
    /// No such job; a limit of 0.
    pub fn change_job(&self, id: u64, change: JobChange) -> Result<JobStatus, Error> {
        if let JobChange::Limit { bytes_per_second } = change {
            check_limit(bytes_per_second)?;
        }
        self.jobs.change(id, change)
    }
}
