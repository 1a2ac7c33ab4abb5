//! Disks in use come to stand on other versions of their base.
//!
//! ```text
//!   job rebase ──► done, or of a tiered disk: nothing is left
//!        └── cancelled, failed, or its server killed ──► Due ──► its state: job snapshot_delete
//! ```

use std::sync::Arc;
use std::time::Duration;

use vmstrata_api::{ChangedBy, JobSpec, JobStatus, MergeDirection};
use vmstrata_backup::{RebaseOptions, rebased_from};
use vmstrata_disk::{Disk, ErrorKind};
use vmstrata_tier::BaseState;
use vmstrata_types::path_from_text;

use super::{Host, Table};
use crate::error::Error;
use crate::jobs::{
    DEFAULT_LIMIT, DiskRebase, FLATTEN, MERGE, MOVE, REBASE, Rebased, SNAPSHOT_DELETE, TIER_ATTACH,
    TierRebase, left_of, may_be_of_rebase,
};

/// What is done with a disk until its job has begun.
const BEGINNING: &str = "being rebased";

impl Host {
    /// Begins to rebase a disk.
    pub(super) fn begin_rebase(&self, asked: &JobSpec, by: ChangedBy) -> Result<JobStatus, Error> {
        let JobSpec::Rebase { disk: name, onto, dry_run, bytes_per_second } = asked else {
            unreachable!("asked for by its kind")
        };
        let (_change, table) = self.begin_change()?;
        let (spec, disk) = table.lend(name, BEGINNING)?;
        spec.refuse_if_local("base")?;
        let (open, replica, is_tiered) = (self.open_options(spec), spec.replica.clone(), spec.tier.is_some());
        let options = RebaseOptions {
            allow_backing: open.allow_backing.clone(),
            no_subclusters: !spec.subclusters,
            opener: self.caches.opener(),
        };
        let limit = bytes_per_second.or((!dry_run).then_some(DEFAULT_LIMIT));
        let is_left = table.entry(name).is_some_and(|entry| entry.has_rebase_state);
        drop(table);
        let slot = self.jobs.reserve(&REBASE, name)?;
        self.jobs.refuse_beside(&[&MERGE, &FLATTEN, &SNAPSHOT_DELETE, &MOVE, &TIER_ATTACH], name)?;
        if disk.is_read_only() {
            return Err(vmstrata_disk::Error::from(ErrorKind::ReadOnly).in_file(disk.path()).into());
        }
        if is_tiered {
            let base = BaseState::find_shared(&path_from_text(onto))?;
            let (tiered, resources) = ((self.tier(name)?, disk.size()), Arc::clone(&self.resources));
            let work = TierRebase::new(tiered, base.layer(), options, resources, *dry_run);
            return self.keep_job(name, || slot.start(limit, by, work));
        }
        let below = rebased_from(disk.path(), &open).map_err(|error| match is_left {
            true => Error::Busy { name: name.clone(), doing: "being rid of what its last rebase left" },
            false => error.into(),
        })?;
        let base = BaseState::find(&path_from_text(onto), &below)?;
        if let Some(replica) = &replica {
            // These reads are no guest's that starts.
            self.caches.read_through(base.layer(), replica, Duration::ZERO)?;
        }
        let address = replica.and_then(|replica| replica.repository);
        let rebased = Rebased { disk: Arc::clone(&disk), open, address };
        let work = DiskRebase::new(rebased, base, options, Arc::clone(&self.resources), *dry_run);
        self.table.lock().note_rebase_state(name, true);
        self.keep_job(name, || slot.start(limit, by, work))
    }

    /// Ends what rebases left that were cancelled, failed, or were killed with their server.
    pub(super) fn let_go_of_rebases(&self) {
        let left: Vec<String> = {
            let mut table = self.table.lock();
            let left = table.disks.iter_mut();
            let left = left.filter_map(|entry| {
                std::mem::take(&mut entry.has_rebase_state).then(|| entry.spec.name.clone())
            });
            left.collect()
        };
        for name in left {
            let is_left = self.let_go_of_rebase(&name).unwrap_or_else(|error| {
                match error {
                    // Its end looks here again.
                    Error::JobExists { .. } => {}
                    error => tracing::warn!(disk = name, %error, "what a rebase left stays for now"),
                }
                true
            });
            if is_left {
                self.table.lock().note_rebase_state(&name, true);
            }
        }
    }

    /// Returns whether something is left for later.
    fn let_go_of_rebase(&self, name: &str) -> Result<bool, Error> {
        self.jobs.refuse_beside(&[&REBASE, &MERGE, &FLATTEN, &SNAPSHOT_DELETE, &MOVE], name)?;
        let (_change, table) = self.begin_change()?;
        let (spec, disk) = table.lend(name, "being rid of what a rebase left")?;
        if spec.tier.is_some() || disk.is_read_only() {
            return Ok(false);
        }
        let address = spec.replica.as_ref().and_then(|replica| replica.repository.clone());
        let rebased = Rebased { disk: Arc::clone(&disk), open: self.open_options(spec), address };
        drop(table);
        let snapshots = left_of(&rebased)?;
        drop((rebased, disk));
        if snapshots.is_empty() {
            return Ok(false);
        }
        let asked = JobSpec::SnapshotDelete {
            disk: name.to_owned(),
            snapshots,
            keep_files: false,
            direction: MergeDirection::default(),
            forget_missing: false,
            bytes_per_second: None,
        };
        let job = self.begin_job(asked, ChangedBy::Server)?;
        tracing::info!(disk = name, job = job.id, "drops the state that a rebase left");
        Ok(true)
    }
}

impl Table {
    pub(super) fn note_rebase_state(&mut self, name: &str, has: bool) {
        if let Some(entry) = self.entry_mut(name) {
            entry.has_rebase_state |= has;
        }
    }
}

/// Whether a disk may have a state that is there for the sake of a rebase.
pub(super) fn may_have_state(disk: &Disk) -> bool {
    disk.layers().iter().any(|layer| may_be_of_rebase(&layer.path))
}
