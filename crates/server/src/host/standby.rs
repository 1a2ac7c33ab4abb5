//! Tiered disks that go from one host to another while both run: offered here, awaited and taken over there.

use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use vmstrata_api as api;
use vmstrata_disk::{Disk, OpenOptions};
use vmstrata_tier::{HeadNumber, Place, Standby, TierStatus};

use super::tier::tier_status;
use super::{Host, Table};
use crate::error::Error;
use crate::spec::{DiskSpec, SpecError};

/// How long a hand-over, or the end of one, may take. What it began goes on.
const PATIENCE: Duration = Duration::from_secs(60);
/// How long to wait for a repository that has to let go of what a standby kept there.
const END_PATIENCE: Duration = Duration::from_secs(5);

/// What waits to take disks over, and what it said last: it may hang in a repository.
#[derive(Debug)]
pub(super) struct StandingBy {
    standby: Mutex<Option<Standby>>,
    status: Mutex<TierStatus>,
}

impl StandingBy {
    pub(super) fn status(&self) -> TierStatus {
        self.status.lock().clone()
    }

    /// Lets go of what it keeps in the repository.
    pub(super) fn end(&self, name: &str) {
        let Some(standby) = self.standby.lock().take() else { return };
        let (tell, told) = mpsc::channel();
        let work = move || {
            // The one who waited may be gone.
            let _ = tell.send(standby.end());
        };
        let started = std::thread::Builder::new().name("standby-end".to_owned()).spawn(work);
        match started.map(|_| told.recv_timeout(END_PATIENCE)) {
            Ok(Ok(Ok(()))) => {}
            Ok(Ok(Err(error))) => tracing::warn!(disk = name, %error, "its pin stays in the repository"),
            _ => tracing::warn!(disk = name, "its repository does not answer: its pin may stay there"),
        }
    }
}

impl Table {
    /// Refuses what needs a disk that this host publishes.
    ///
    /// # Errors
    /// [`Error::StandsBy`].
    pub(super) fn refuse_standby(&self, name: &str) -> Result<(), Error> {
        match self.entry(name).and_then(|entry| entry.standby.as_ref()) {
            Some(_) => Err(Error::StandsBy { name: name.to_owned() }),
            None => Ok(()),
        }
    }

    fn standby(&self, name: &str) -> Result<Arc<StandingBy>, Error> {
        self.serving(name)?;
        let standby = self.entry(name).and_then(|entry| Some(entry.standby.clone()?.0));
        standby.ok_or_else(|| Error::NoStandby { name: name.to_owned() })
    }
}

impl Host {
    /// Opens disks that another host publishes: all requests wait until they are taken over.
    pub(super) fn open_standby(
        &self,
        specs: &[DiskSpec],
        place: &Place,
        options: &[OpenOptions],
    ) -> Result<Vec<Arc<Disk>>, Error> {
        let (disks, standby, aside) = Standby::open(place, options, &self.resources)?;
        let status = standby.status();
        for spec in specs {
            tracing::info!(
                disk = spec.name, repository = %status.repository.display(), epoch = %status.epoch, publisher = %status.published_by,
                "stands by: requests wait until this host takes the disk over"
            );
        }
        if let Some(aside) = aside {
            tracing::warn!(disk = specs[0].name, branch = %aside.display(), "an earlier copy on this host is put aside");
        }
        let standing =
            Arc::new(StandingBy { standby: Mutex::new(Some(standby)), status: Mutex::new(status) });
        let mut table = self.table.lock();
        for (number, spec) in specs.iter().enumerate() {
            if let Some(entry) = table.entry_mut(&spec.name) {
                entry.standby = Some((Arc::clone(&standing), number));
            }
        }
        Ok(disks)
    }

    /// Has a disk that this host waits for stand on what is published now.
    ///
    /// # Errors
    /// No such disk, one that does not stand by, one that was resized; what the repository reports.
    pub fn follow_tier(&self, name: &str) -> Result<api::TierStatus, Error> {
        let table = self.table.lock();
        let standing = table.standby(name)?;
        let _lent = table.lend(name, "being followed")?.1;
        drop(table);
        let mut standby = standing.standby.lock();
        let standby = standby.as_mut().ok_or_else(|| Error::NoStandby { name: name.to_owned() })?;
        let status = standby.follow()?;
        *standing.status.lock() = status.clone();
        Ok(tier_status(&status))
    }

    /// Takes a disk over that this host waits for, from the head that its host offers, or from what that published last.
    ///
    /// # Errors
    /// No such disk, one that does not stand by; one that its host has taken back; what the repository reports: then the disk may be this host's, which
    /// asking again, or a restart, finds out.
    pub fn take_tier_over(&self, name: &str, asked: &api::TakeOver) -> Result<api::TierStatus, Error> {
        let head = |head: &String| {
            HeadNumber::of(head).ok_or_else(|| Error::from(SpecError::Head { text: head.clone() }))
        };
        let from = asked.head.as_ref().map(head).transpose()?;
        let (_change, table) = self.begin_change()?;
        let standing = table.standby(name)?;
        let (spec, _lent) = table.lend(name, "being taken over")?;
        let options = spec.tier.as_ref().expect("it stands by").options(&self.wire);
        drop(table);
        let mut guard = standing.standby.lock();
        let none = || Error::NoStandby { name: name.to_owned() };
        let claimed = guard.as_mut().ok_or_else(none)?.claim(from, &options)?;
        let standby = guard.take().expect("it made the claim");
        drop(guard);
        let tiered = Arc::new(standby.finish(claimed)?);
        let mut table = self.table.lock();
        for entry in &mut table.disks {
            if let Some((_, number)) = entry.standby.take_if(|(other, _)| Arc::ptr_eq(other, &standing)) {
                entry.tier = Some((Arc::clone(&tiered), number));
            }
        }
        drop(table);
        let status = tiered.status();
        tracing::info!(disk = name, epoch = %status.epoch, generation = %status.generation, "taken over: published by this host, and requests go on");
        Ok(tier_status(&status))
    }

    /// Publishes all of a disk, has its requests wait, and lets another host take it over.
    ///
    /// # Errors
    /// No such disk, one that is not served or not tiered; one that cannot be published: requests go on.
    pub fn hand_tier_over(&self, name: &str) -> Result<api::TierStatus, Error> {
        let tier = self.tier(name)?;
        tier.hand_over(Instant::now() + PATIENCE)?;
        Ok(tier_status(&tier.status()))
    }

    /// Goes on with a disk that was handed over, unless another host has taken it over.
    ///
    /// # Errors
    /// No such disk, one that is not served or not tiered; one that another host has, or of which that is not known yet.
    pub fn take_tier_back(&self, name: &str) -> Result<api::TierStatus, Error> {
        Ok(tier_status(&self.tier(name)?.take_back(Instant::now() + PATIENCE)?))
    }
}
