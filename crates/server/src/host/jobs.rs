//! Jobs of the host's disks begin, change and end.

use std::sync::Arc;

use vmstrata_api::{JobChange, JobSpec, JobStatus};

use super::Host;
use crate::error::Error;
use crate::jobs::{DEFAULT_LIMIT, IndexBuild, SnapshotDelete};

impl Host {
    /// Begins a job on a disk that is served.
    ///
    /// # Errors
    /// No such disk; a job of the kind under way already; a chain that cannot be read.
    pub fn start_job(&self, asked: JobSpec) -> Result<JobStatus, Error> {
        match asked {
            JobSpec::IndexBuild { disk, bytes_per_second } => {
                let (_change, table) = self.begin_change()?;
                let (spec, open) = table.serving(&disk)?;
                let (path, format) = (open.path().to_owned(), spec.format);
                drop(table);
                let work = IndexBuild::new(&path, format, &self.allow_backing)?;
                self.keep_job(&disk, || self.jobs.start(&disk, bytes_per_second, work))
            }
            JobSpec::SnapshotDelete { disk, snapshots, bytes_per_second } => {
                let (_change, table) = self.begin_change()?;
                let (spec, open) = table.serving(&disk)?;
                let (options, open) = (self.open_options(spec), Arc::clone(open));
                drop(table);
                let work = SnapshotDelete::new(open, &snapshots, options)?;
                let limit = Some(bytes_per_second.unwrap_or(DEFAULT_LIMIT));
                self.keep_job(&disk, || self.jobs.start(&disk, limit, work))
            }
        }
    }

    /// Starts a job unless its disk has gone meanwhile: none begins after the disk's jobs were ended.
    fn keep_job(
        &self,
        disk: &str,
        start: impl FnOnce() -> Result<JobStatus, Error>,
    ) -> Result<JobStatus, Error> {
        let table = self.table.lock();
        table.serving(disk)?;
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
    /// No such job.
    pub fn change_job(&self, id: u64, change: JobChange) -> Result<JobStatus, Error> {
        self.jobs.change(id, change)
    }
}
