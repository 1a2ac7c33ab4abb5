//! Tiered disks of the host: opened with what publishes them, and closed after it has ended.

use std::num::NonZeroU64;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use vmstrata_api as api;
use vmstrata_disk::snapshot::now_ns;
use vmstrata_disk::{Disk, OpenOptions};
use vmstrata_tier::{DurableAt, PendingSnapshot, Place, Standby, TierState, TierStatus, Tiered};
use vmstrata_types::path_to_text;

use super::Host;
use super::caches::cache_status;
use crate::error::Error;
use crate::spec::{DiskSpec, SpecError, TierSpec, check_host_rate, shown_durability, shown_on_outage};

/// How long a request to publish may take. What it began goes on.
pub(super) const SYNC_PATIENCE: Duration = Duration::from_secs(600);
/// How long a disk that is removed may take to be published.
const LAST_PATIENCE: Duration = Duration::from_secs(60);
/// How long to wait for an engine that does not publish any more.
const END_PATIENCE: Duration = Duration::from_secs(5);

impl DiskSpec {
    /// Refuses what cannot be done with a tiered disk.
    pub(super) fn refuse_if_tiered(&self, what: &'static str) -> Result<(), Error> {
        match self.tier {
            Some(_) => Err(Error::Tiered { name: self.name.clone(), what }),
            None => Ok(()),
        }
    }
}

impl Host {
    /// Where the parts of a tiered disk lie, or those of a group; layers are read through the cache.
    pub(super) fn place(&self, specs: &[DiskSpec], tier: &TierSpec) -> Result<Place, Error> {
        if let Some(group) = &tier.group
            && let Some(other) = specs.iter().find(|other| other.tier.as_ref() != Some(tier))
        {
            let (one, other) = (specs[0].name.clone(), other.name.clone());
            return Err(Error::GroupDiffers { group: group.clone(), one, other });
        }
        let paths: Vec<&Path> = specs.iter().map(|spec| spec.path.as_path()).collect();
        if let Some(address) = &tier.repository {
            let elsewhere = self.caches.elsewhere(&tier.dir, address, tier.on_missing)?;
            return Ok(Place::elsewhere(tier.group.as_deref(), &paths, &tier.dir, elsewhere)?);
        }
        let place = match &tier.group {
            Some(group) => Place::group(group, &paths, &tier.dir)?,
            None => Place::of(paths[0], &tier.dir)?,
        };
        if let (None, Some(group)) = (&tier.group, place.group_name()) {
            return Err(Error::InGroup { name: specs[0].name.clone(), group: group.to_owned() });
        }
        Ok(place.read_through(self.caches.of(&tier.dir, tier.on_missing)?))
    }

    /// Opens a tiered disk, or all those of a group, in their order. `options` says how each is opened.
    pub(super) fn open_tiered(
        &self,
        specs: &[DiskSpec],
        tier: &TierSpec,
        options: &[OpenOptions],
    ) -> Result<Vec<Arc<Disk>>, Error> {
        let spec = &specs[0];
        let place = self.place(specs, tier)?;
        for (member, spec) in place.members().iter().zip(specs) {
            self.refuse_served(spec, &member.disk())?;
        }
        if tier.standby && !Standby::is_own(&place)? {
            return self.open_standby(specs, &place, options);
        }
        let (disks, tiered) = Tiered::open(&place, tier.options(&self.wire), options, &self.resources)?;
        let head = tiered.status();
        let durable = match head.window.durability {
            DurableAt::Host => "here at once, and in the repository within",
            DurableAt::Repository => "in the repository; what was not flushed is there within",
        };
        tracing::info!(
            disk = spec.name, repository = %head.repository.display(), epoch = %head.epoch,
            "published by this host: what was flushed is durable {durable} {} s while that answers",
            head.window.window.as_secs()
        );
        for warning in &head.mount_warnings {
            tracing::warn!(disk = spec.name, "{warning}");
        }
        let tiered = Arc::new(tiered);
        let mut table = self.table.lock();
        for (number, spec) in specs.iter().enumerate() {
            if let Some(entry) = table.entry_mut(&spec.name) {
                entry.tier = Some((Arc::clone(&tiered), number));
            }
        }
        Ok(disks)
    }

    pub(super) fn tier(&self, name: &str) -> Result<Arc<Tiered>, Error> {
        let table = self.table.lock();
        table.serving(name)?;
        table.refuse_attaching(name)?;
        table.refuse_standby(name)?;
        let tier = table.entry(name).and_then(|entry| Some(entry.tier.clone()?.0));
        tier.ok_or_else(|| Error::NotTiered { name: name.to_owned() })
    }

    /// Cuts a tiered disk, and waits until that is published.
    ///
    /// # Errors
    /// No such disk, one that is not served or not tiered; one that cannot be published: what was cut off is tried again.
    pub fn sync_tier(&self, name: &str) -> Result<api::TierStatus, Error> {
        // The disk is not lent: who removes it need not wait for a repository that does not answer.
        Ok(tier_status(&self.tier(name)?.sync(Instant::now() + SYNC_PATIENCE)?))
    }

    /// Gives a state of a tiered disk no name that it would get once it is published.
    ///
    /// # Errors
    /// No such disk, one that is not served or not tiered; no snapshot of that name that waits.
    pub fn withdraw_snapshot(&self, name: &str, snapshot: &str) -> Result<(), Error> {
        let tier = self.tier(name)?;
        let found = tier.status().pending.into_iter().find(|pending| pending.name == snapshot);
        match found.map(|found| tier.withdraw(&found.name, found.taken_ns)).transpose()? {
            Some(true) => Ok(()),
            _ => Err(Error::NotPending { disk: name.to_owned(), snapshot: snapshot.to_owned() }),
        }
    }

    /// Holds the epochs of a tiered disk on this host for so long, or no longer.
    ///
    /// # Errors
    /// No such disk, one that is not served or not tiered; a period that is too long; one whose flushes wait to be published.
    pub fn hold_tier(&self, name: &str, asked: api::TierHold) -> Result<api::TierStatus, Error> {
        let period = Some(Duration::from_secs(asked.seconds)).filter(|period| !period.is_zero());
        Ok(tier_status(&self.tier(name)?.hold(period)?))
    }

    /// How fast all tiered disks together ship.
    pub fn tier_rate(&self) -> api::HostRate {
        api::HostRate { bytes_a_second: self.wire.rate().map(NonZeroU64::get) }
    }

    /// Changes that until the server ends.
    ///
    /// # Errors
    /// Too few bytes a second.
    pub fn set_tier_rate(&self, asked: api::HostRate) -> Result<api::HostRate, Error> {
        let rate = asked.bytes_a_second.map(check_host_rate).transpose().map_err(SpecError::from)?;
        self.wire.set_rate(rate);
        Ok(self.tier_rate())
    }

    /// Publishes the rest of a disk, or of all of a group, without users, then stops publishing it.
    ///
    /// # Errors
    /// What could not be published, and stays on this host.
    pub(super) fn publish_last(&self, name: &str) -> Result<(), Error> {
        let table = self.table.lock();
        let tier = table.entry(name).and_then(|entry| entry.tier.clone());
        let attached = table.refuse_attaching(name);
        drop(table);
        let published = tier.map(|(tier, _)| match tier.status().state {
            // All is, and another host may have it.
            TierState::HandedOver => Ok(tier.status()),
            _ => tier.sync(Instant::now() + LAST_PATIENCE),
        });
        self.end_tier(name);
        attached?;
        match published {
            Some(Err(error)) => Err(Error::NotAllPublished { name: name.to_owned(), why: error.to_string() }),
            _ => Ok(()),
        }
    }

    /// Ends what publishes a disk, and the others of its group, before they are closed.
    pub(super) fn end_tier(&self, name: &str) {
        let mut table = self.table.lock();
        let all = table.published_with(name);
        let (mut tier, mut attaching, mut standby) = (None, None, None);
        for name in all {
            let Some(entry) = table.entry_mut(&name) else { continue };
            tier = entry.tier.take().map(|(tier, _)| tier);
            attaching = entry.attaching.take();
            standby = entry.standby.take();
        }
        drop(table);
        drop(attaching);
        if let Some((standby, _)) = standby {
            standby.end(name);
        }
        if tier.is_some_and(|tier| !tier.stop(Instant::now() + END_PATIENCE)) {
            tracing::error!(disk = name, "its repository does not answer: this server still waits for it");
        }
    }

    /// Has no disk published any more: the next server goes on with what is not.
    pub(super) fn begin_to_end_tiers(&self) {
        self.table
            .lock()
            .disks
            .iter()
            .filter_map(|entry| entry.tier.as_ref())
            .for_each(|(tier, _)| tier.begin_stop());
    }
}

fn pending(snapshot: &PendingSnapshot) -> api::PendingSnapshot {
    let PendingSnapshot { name, taken_ns, epoch, .. } = snapshot;
    api::PendingSnapshot { name: name.clone(), taken_ns: *taken_ns, epoch: epoch.get() }
}

/// In the API's words.
pub(super) fn tier_status(status: &TierStatus) -> api::TierStatus {
    let now = now_ns();
    let age = |ns: u64| now.saturating_sub(ns) / 1_000_000_000;
    let window = &status.window;
    let (state, error, stalled_seconds) = match &status.state {
        TierState::Attaching => (api::TierState::Attaching, None, None),
        TierState::Standby => (api::TierState::Standby, None, None),
        TierState::Publishing => (api::TierState::Publishing, None, None),
        TierState::HandedOver => (api::TierState::HandedOver, None, None),
        TierState::Stalled { since_ns, why } => {
            (api::TierState::Stalled, Some(why.clone()), Some(age(*since_ns)))
        }
        TierState::Fenced { why } => (api::TierState::Fenced, Some(why.clone()), None),
    };
    api::TierStatus {
        state,
        error,
        stalled_seconds,
        group: status.group.clone(),
        repository: path_to_text(&status.repository),
        local: path_to_text(&status.local),
        owner: status.owner.to_string(),
        published_by: status.published_by.to_string(),
        head: status.head.to_string(),
        generation: status.generation.get(),
        epoch: status.epoch.get(),
        epoch_age_seconds: age(status.epoch_time_ns),
        epoch_layers: status.layers as u64,
        reads_wait_seconds: status.silent_since.map(|since| since.elapsed().as_secs()),
        mount_warnings: status.mount_warnings.clone(),
        advice: status.advice.clone(),
        cache: status.cache.as_ref().map(|(dir, used)| cache_status(dir, *used)),
        unpublished_bytes: window.unpublished_bytes,
        unpublished_seconds: window.unpublished_since_ns.map(age),
        window_seconds: window.window.as_secs(),
        on_outage: shown_on_outage(window.on_outage),
        durability: shown_durability(window.durability),
        held_seconds: window.held_until_ns.map(|until| until.saturating_sub(now).div_ceil(1_000_000_000)),
        ships_bytes_a_second: window.ships_bytes_a_second,
        slowed_to_bytes_a_second: window.slowed_to_bytes_a_second,
        writes_wait: window.writes_wait,
        flushes_wait: window.flushes_wait as u64,
        pending_snapshots: status.pending.iter().map(pending).collect(),
    }
}
