//! Jobs of the host's disks begin, change and end.

use std::path::Path;
use std::sync::Arc;

use vmstrata_api::{self as api, ChangedBy, JobChange, JobSpec, JobStatus, MergeInto, RemoveFiles};
use vmstrata_disk::Disk;
use vmstrata_disk::merge::{Direction, LayerRef, MergeOptions, Removal};

use super::Host;
use crate::audit::What;
use crate::error::Error;
use crate::jobs::{DEFAULT_LIMIT, Flatten, IndexBuild, MergeLayers, SnapshotDelete, Work};
use crate::spec::{SpecError, check_path};

/// A limit of 0 would be a pause that does not say so.
fn check_limit(bytes_per_second: Option<u64>) -> Result<(), Error> {
    match bytes_per_second {
        Some(0) => Err(SpecError::Zero { what: "bytes_per_second" }.into()),
        _ => Ok(()),
    }
}

/// How layers are dropped, but for how their files are looked at.
fn how(remove: RemoveFiles, into: MergeInto, forget_missing: bool) -> MergeOptions {
    let removal = match remove {
        RemoveFiles::None => Removal::Nothing,
        RemoveFiles::Snapshots => Removal::Snapshots,
        RemoveFiles::All => Removal::All,
        RemoveFiles::Everywhere => Removal::Everywhere,
    };
    let direction = match into {
        MergeInto::Auto => Direction::Auto,
        MergeInto::Up => Direction::Up,
        MergeInto::Down => Direction::Down,
    };
    MergeOptions { removal, forget_missing, direction, ..MergeOptions::default() }
}

/// A relative path is refused: it is seen from the server's directory.
fn layer_ref(layer: api::LayerRef) -> Result<LayerRef, Error> {
    match layer {
        api::LayerRef::Number(number) => Ok(LayerRef::Number(number as usize)),
        api::LayerRef::File(path) => {
            check_path("file", &path)?;
            if Path::new(&path).is_absolute() {
                Ok(LayerRef::File(path.into()))
            } else {
                Err(SpecError::Relative { path }.into())
            }
        }
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

    fn begin_job(&self, asked: JobSpec, by: ChangedBy) -> Result<JobStatus, Error> {
        check_limit(asked.bytes_per_second())?;
        match asked {
            JobSpec::IndexBuild { disk, bytes_per_second } => {
                self.start_indexing(&disk, bytes_per_second, by)
            }
            JobSpec::SnapshotDelete {
                disk,
                snapshots,
                keep_files,
                into,
                forget_missing,
                bytes_per_second,
            } => {
                let remove = if keep_files { RemoveFiles::None } else { RemoveFiles::Snapshots };
                let how = how(remove, into, forget_missing);
                self.start_merging(&disk, how, (bytes_per_second, by), |open, options| {
                    SnapshotDelete::new(open, &snapshots, options)
                })
            }
            JobSpec::Merge {
                disk,
                first,
                last,
                drop_snapshots,
                remove,
                into,
                forget_missing,
                bytes_per_second,
            } => {
                let ends = [layer_ref(first)?, layer_ref(last)?];
                let how = how(remove, into, forget_missing);
                self.start_merging(&disk, how, (bytes_per_second, by), |open, options| {
                    MergeLayers::new(open, ends.each_ref(), drop_snapshots, options)
                })
            }
            JobSpec::Flatten { disk, onto, drop_snapshots, remove, forget_missing, bytes_per_second } => {
                let onto = onto.map(layer_ref).transpose()?;
                let how = how(remove, MergeInto::Up, forget_missing);
                self.start_merging(&disk, how, (bytes_per_second, by), |open, options| {
                    Flatten::new(open, onto.as_ref(), drop_snapshots, options)
                })
            }
        }
    }

    fn start_indexing(
        &self,
        disk: &str,
        bytes_per_second: Option<u64>,
        by: ChangedBy,
    ) -> Result<JobStatus, Error> {
        let (_change, table) = self.begin_change()?;
        let (_, open) = table.lend(disk, BEGINNING)?;
        drop(table);
        let slot = self.jobs.reserve(disk)?;
        let work = IndexBuild::new(&open, false)?;
        self.keep_job(disk, || slot.start(bytes_per_second, by, work))
    }

    /// Has the index of a disk made anew that was opened with one that does not hold any more.
    pub(super) fn mend_index(&self, name: &str, disk: &Arc<Disk>) {
        if !disk.lost_its_index() {
            return;
        }
        let start = || {
            let slot = self.jobs.reserve(name)?;
            let work = IndexBuild::new(disk, true)?;
            self.keep_job(name, || slot.start(Some(DEFAULT_LIMIT), ChangedBy::Server, work))
        };
        match start() {
            Ok(job) => tracing::info!(disk = name, job = job.id, "its index is made anew"),
            Err(error) => tracing::warn!(disk = name, %error, "its index is not made anew"),
        }
    }

    fn start_merging<W: Work>(
        &self,
        disk: &str,
        how: MergeOptions,
        (bytes_per_second, by): (Option<u64>, ChangedBy),
        make: impl FnOnce(Arc<Disk>, MergeOptions) -> Result<W, Error>,
    ) -> Result<JobStatus, Error> {
        let (_change, table) = self.begin_change()?;
        let (spec, open) = table.lend(disk, BEGINNING)?;
        let options = MergeOptions { open: self.open_options(spec), ..how };
        drop(table);
        let slot = self.jobs.reserve(disk)?;
        let work = make(Arc::clone(&open), options)?;
        let limit = Some(bytes_per_second.unwrap_or(DEFAULT_LIMIT));
        self.keep_job(disk, || slot.start(limit, by, work))
    }

    /// Starts a job unless its disk has gone or the server is ending: none begins after the disk's jobs were ended.
    fn keep_job(
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
