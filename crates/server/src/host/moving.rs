//! Disks in use move to other directories, and their source files go after a while.
//!
//! ```text
//!   job move ──► Report in the disk's entry ──► its path, its status
//!   opened, job ended, some time passed ──► Due ──► states that only the move made: job snapshot_delete ──► old files removed
//! ```

use std::num::NonZeroU64;
use std::ops::RangeInclusive;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use vmstrata_api::{self as api, ChangedBy, JobSpec, JobStatus, MergeDirection};
use vmstrata_disk::snapshot::{list, now_ns};
use vmstrata_disk::{Disk, Format};
use vmstrata_job::RateShare;
use vmstrata_migrate::Error::Refused;
use vmstrata_migrate::follow::Order;
use vmstrata_migrate::{
    BackOptions, FlatMove, FlatOptions, Move, MoveOptions, Moving, Phase, Report, Unreadable, is_flat,
    is_way_back, order_for,
};
use vmstrata_types::{path_from_text, path_to_text};

use super::Host;
use crate::error::Error;
use crate::jobs::{Care, DiskMove, FLATTEN, MERGE, MOVE, REBASE, SNAPSHOT_DELETE, Slot};
use crate::spec::{SpecError, check_host_rate};

/// What is done with a disk until its job has begun.
const BEGINNING: &str = "being moved";
/// Of its latency without a move, a guest may be held to these.
const LATENCY_PERCENT: RangeInclusive<u32> = 110..=10_000;

impl Host {
    /// Begins to move a disk, or goes on with that.
    pub(super) fn begin_move(&self, asked: &JobSpec, by: ChangedBy) -> Result<JobStatus, Error> {
        let JobSpec::Move {
            disk: name,
            to,
            keep_seconds,
            overwrite,
            skip_unreadable,
            deadline_seconds,
            latency_percent,
            order,
            bytes_per_second,
        } = asked
        else {
            unreachable!("asked for by its kind")
        };
        let (_change, table) = self.begin_change()?;
        let (spec, disk) = table.lend(name, BEGINNING)?;
        spec.refuse_if_tiered(BEGINNING)?;
        spec.refuse_if_local("move")?;
        let open = self.open_options(spec);
        drop(table);
        let slot = self.jobs.reserve(&MOVE, name)?;
        self.jobs.refuse_beside(&[&MERGE, &FLATTEN, &SNAPSHOT_DELETE, &REBASE], name)?;
        let to = path_from_text(to);
        if latency_percent.is_some_and(|percent| !LATENCY_PERCENT.contains(&percent)) {
            let why = format!(
                "a guest is held to {} to {} percent of its latency",
                LATENCY_PERCENT.start(),
                LATENCY_PERCENT.end()
            );
            return Err(Refused { disk: disk.path().to_owned(), to, why }.into());
        }
        let (order, skip_unreadable) = (move_order(*order, disk.path()), *skip_unreadable);
        let moving: Box<dyn Move> = if is_way_back(disk.path(), &to) {
            let options = BackOptions { to, open, skip_unreadable, order };
            Box::new(FlatMove::begin_back(&disk, &options)?)
        } else if is_flat(&to) {
            Box::new(FlatMove::begin(
                &disk,
                &FlatOptions { to, open, overwrite: *overwrite, skip_unreadable, order },
            )?)
        } else {
            let mut options = MoveOptions::new(to, open);
            options.keep = keep_seconds.map_or(options.keep, Duration::from_secs);
            (options.skip_unreadable, options.order) = (skip_unreadable, order);
            Box::new(Moving::begin(&disk, &options)?)
        };
        let care = Care {
            time: deadline_seconds.map(Duration::from_secs),
            latency: latency_percent.map(|percent| f64::from(percent) / 100.0),
        };
        self.run_move(name, slot, moving, (care, *bytes_per_second, by))
    }

    /// Goes on with the move of a disk that was opened by its new path.
    pub(super) fn go_on_moving(&self, name: &str, disk: &Arc<Disk>) {
        let go_on = || -> Result<Option<JobStatus>, Error> {
            let open = {
                let table = self.table.lock();
                let (spec, _) = table.serving(name)?;
                if spec.tier.is_some() || spec.read_only {
                    return Ok(None);
                }
                self.open_options(spec)
            };
            let Some(moving) = Moving::resume(disk, &open)? else { return Ok(None) };
            if moving.phase() == Phase::Whole {
                self.note_move(name, moving.report());
                return Ok(None);
            }
            let slot = self.jobs.reserve(&MOVE, name)?;
            self.run_move(name, slot, Box::new(moving), (Care::default(), None, ChangedBy::Server)).map(Some)
        };
        match go_on() {
            Ok(Some(job)) => tracing::info!(disk = name, job = job.id, "its move goes on"),
            Ok(None) => {}
            Err(error) => tracing::error!(disk = name, %error, "its move does not go on"),
        }
    }

    fn run_move(
        &self,
        name: &str,
        slot: Slot,
        moving: Box<dyn Move>,
        (care, limit, by): (Care, Option<u64>, ChangedBy),
    ) -> Result<JobStatus, Error> {
        let (host, disk) = (self.me.clone(), name.to_owned());
        let tell = move |report: Report| {
            if let Some(host) = host.upgrade() {
                host.note_move(&disk, report);
            }
        };
        let work = DiskMove::new(moving, care, RateShare::new(Arc::clone(&self.move_rate)), Box::new(tell));
        self.keep_job(name, || slot.start(limit, by, work))
    }

    /// How fast all moves together write.
    pub fn move_rate(&self) -> api::HostRate {
        api::HostRate { bytes_a_second: self.move_rate.rate().map(NonZeroU64::get) }
    }

    /// Changes that until the server ends, also for moves that run.
    ///
    /// # Errors
    /// Too few bytes a second.
    pub fn set_move_rate(&self, asked: api::HostRate) -> Result<api::HostRate, Error> {
        let rate = asked.bytes_a_second.map(check_host_rate).transpose().map_err(SpecError::from)?;
        self.move_rate.set_rate(rate, Instant::now());
        Ok(self.move_rate())
    }

    /// Notes where a disk is.
    fn note_move(&self, name: &str, report: Report) {
        // Until a disk is back, its old path leads to its flat copy. That is the one to have after a restart: the other may not lead back.
        let has_moved = report.phase != Phase::Copying || is_way_back(&report.from, &report.to);
        let mut table = self.table.lock();
        let Some(entry) = table.entry_mut(name) else { return };
        let to = report.to.clone();
        let is_new = has_moved && entry.spec.path != to;
        if is_new {
            entry.spec.path.clone_from(&to);
            match entry.spec.format {
                _ if report.is_flat => entry.spec.format = Some(Format::Raw),
                Some(Format::Raw) => entry.spec.format = None,
                _ => {}
            }
        }
        let is_whole = report.phase == Phase::Whole;
        entry.moving = Some(report);
        drop(table);
        if is_new {
            self.save();
            tracing::info!(disk = name, path = %to.display(), "serve it by this path from now on");
        }
        if is_whole {
            self.due.now();
        }
    }

    /// Removes the source files of moved disks once their time is over. Returns how long until the next one's is.
    pub(super) fn let_go_of_sources(&self) -> Option<Duration> {
        let moved: Vec<(String, Report)> = {
            let table = self.table.lock();
            let moved = |entry: &super::Entry| Some((entry.spec.name.clone(), entry.moving.clone()?));
            table.disks.iter().filter_map(moved).collect()
        };
        let mut next: Option<Duration> = None;
        for (name, report) in moved {
            let Some(until) = report.kept_until_ns else { continue };
            let left = Duration::from_nanos(until.saturating_sub(now_ns()));
            if left > Duration::ZERO {
                next = Some(next.map_or(left, |next| next.min(left)));
                continue;
            }
            if let Err(error) = self.let_go_of_source(&name, &report) {
                tracing::warn!(disk = name, %error, "the source files stay for now");
            }
        }
        next
    }

    fn let_go_of_source(&self, name: &str, report: &Report) -> Result<(), Error> {
        let (_change, table) = self.begin_change()?;
        let (spec, disk) = table.lend(name, "removing its source files")?;
        let open = self.open_options(spec);
        drop(table);
        let states = list(disk.path(), &open)?;
        let is_there = |made: &&String| states.iter().any(|state| state.name() == Some(made.as_str()));
        let made: Vec<String> = report.froze.iter().filter(is_there).cloned().collect();
        if !made.is_empty() {
            let asked = JobSpec::SnapshotDelete {
                disk: name.to_owned(),
                snapshots: made,
                keep_files: false,
                direction: MergeDirection::default(),
                forget_missing: false,
                bytes_per_second: None,
            };
            drop(disk);
            // The end of that looks here again.
            return match self.begin_job(asked, ChangedBy::Server) {
                Err(Error::JobExists { .. }) | Ok(_) => Ok(()),
                Err(error) => Err(error),
            };
        }
        // What a disk was that is back from a flat copy, others are to remove.
        let moving = Moving::resume(&disk, &open)?;
        for kept in moving.map_or_else(|| Ok(Vec::new()), Moving::let_go)? {
            match kept.kept {
                None => {
                    tracing::info!(disk = name, file = %kept.path.display(), "removed: the disk has moved")
                }
                Some(why) => {
                    tracing::warn!(disk = name, file = %kept.path.display(), "stays though the disk has moved: {why}");
                }
            }
        }
        if let Some(entry) = self.table.lock().entry_mut(name) {
            entry.moving = None;
        }
        Ok(())
    }
}

/// The order that is asked for, or the one that suits the device of a disk.
pub fn move_order(asked: Option<api::MoveOrder>, disk: &Path) -> Order {
    match asked {
        None => order_for(disk),
        Some(api::MoveOrder::Sequential) => Order::Sequential,
        Some(api::MoveOrder::Nearest) => Order::Nearest,
        Some(api::MoveOrder::HotFirst) => Order::HotFirst,
        Some(api::MoveOrder::ColdFirst) => Order::ColdFirst,
        Some(api::MoveOrder::Predicted) => Order::Predicted,
    }
}

/// As the API says it.
pub(super) fn move_status(report: &Report) -> api::MoveStatus {
    api::MoveStatus {
        phase: match report.phase {
            Phase::Copying => api::MovePhase::Copying,
            Phase::Rest => api::MovePhase::Rest,
            Phase::Whole => api::MovePhase::Moved,
        },
        from: path_to_text(&report.from),
        to: path_to_text(&report.to),
        left_bytes: report.left_bytes,
        kept_until_ns: report.kept_until_ns,
        is_flat: report.is_flat,
        slowed_to: report.slowed_to,
        unreadable: report.unreadable.iter().map(unreadable).collect(),
    }
}

fn unreadable(bad: &Unreadable) -> api::UnreadableRange {
    api::UnreadableRange { file: path_to_text(&bad.file), offset: bad.offset, bytes: bad.len }
}
