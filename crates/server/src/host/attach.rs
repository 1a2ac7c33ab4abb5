//! Disks in use become tiered ones.

use std::path::PathBuf;
use std::sync::Arc;

use parking_lot::Mutex;
use vmstrata_api::{self as api, ChangedBy, JobSpec, JobStatus};
use vmstrata_disk::Disk;
use vmstrata_tier::{Attaching, TierStatus};

use super::{Host, Table};
use crate::error::Error;
use crate::jobs::{Attached, REBASE, TIER_ATTACH, TierAttach};
use crate::spec::DiskSpec;

/// A disk that is being attached, as its status shows it.
#[derive(Clone, Debug)]
pub(super) struct BeingAttached {
    attached: Attached,
    status: TierStatus,
    /// The file that its guests write.
    written: PathBuf,
}

impl BeingAttached {
    fn new(attaching: Attaching, disk: &Disk) -> Self {
        let (status, written) = (attaching.status(), disk.path().to_owned());
        Self { attached: Arc::new(Mutex::new(Some(attaching))), status, written }
    }

    pub(super) fn status(&self) -> TierStatus {
        use std::os::unix::fs::MetadataExt as _;
        let mut status = self.status.clone();
        status.window.unpublished_bytes = self.written.metadata().map_or(0, |about| about.blocks() * 512);
        status
    }
}

impl Table {
    /// Refuses what needs a repository that has the disk already.
    ///
    /// # Errors
    /// [`Error::BeingAttached`].
    pub(super) fn refuse_attaching(&self, name: &str) -> Result<(), Error> {
        match self.entry(name).and_then(|entry| entry.attaching.as_ref()) {
            Some(_) => Err(Error::BeingAttached { name: name.to_owned() }),
            None => Ok(()),
        }
    }
}

impl Host {
    /// Begins to make a disk in use a tiered one, or goes on with that.
    pub(super) fn begin_attach(&self, asked: &JobSpec, by: ChangedBy) -> Result<JobStatus, Error> {
        let name = asked.disk();
        let (_change, table) = self.begin_change()?;
        let (spec, disk) = table.lend(name, "being attached")?;
        let spec = spec.clone();
        let attaching = table.entry(name).and_then(|entry| entry.attaching.clone());
        drop(table);
        let slot = self.jobs.reserve(&TIER_ATTACH, name)?;
        self.jobs.refuse_beside(&[&REBASE], name)?;
        let attaching = match attaching {
            Some(attaching) if attaching.attached.lock().is_none() => {
                let why = "what publishes it could not be started: remove the disk, and add it".to_owned();
                return Err(Error::NotAllPublished { name: name.to_owned(), why });
            }
            Some(attaching) => attaching,
            None => {
                spec.refuse_if_tiered("being attached again")?;
                spec.refuse_if_local("repository")?;
                self.move_to_tier(&with_tier(&spec, asked)?, &disk)?
            }
        };
        let (host, name) = (self.me.clone(), name.to_owned());
        let then = move |tiered: vmstrata_tier::Tiered| {
            let Some(host) = host.upgrade() else { return };
            let mut table = host.table.lock();
            if let Some(entry) = table.entry_mut(&name) {
                entry.attaching = None;
                entry.tier = Some((Arc::new(tiered), 0));
            }
            tracing::info!(disk = name, "published by this host from now on");
        };
        let work = TierAttach::new(attaching.attached, Box::new(then));
        self.keep_job(asked.disk(), || slot.start(asked.bytes_per_second(), by, work))
    }

    /// Has the disk's guests write on this host from now on.
    fn move_to_tier(&self, spec: &DiskSpec, disk: &Arc<Disk>) -> Result<BeingAttached, Error> {
        let tier = spec.tier.as_ref().expect("said by who asks");
        let place = self.place(std::slice::from_ref(spec), tier)?;
        let (options, open) = (tier.options(&self.wire), self.open_options(spec));
        let attaching = Attaching::begin(&place, options, &open, disk, &self.resources)?;
        let attaching = BeingAttached::new(attaching, disk);
        tracing::info!(
            disk = spec.name, repository = %attaching.status.repository.display(), copy = %attaching.status.local.display(),
            "what was flushed is durable here at once; until its image is read, nothing newer is in the repository: serve it with tier={} from now on",
            tier.dir.display()
        );
        for warning in &attaching.status.mount_warnings {
            tracing::warn!(disk = spec.name, "{warning}");
        }
        if let Some(entry) = self.table.lock().entry_mut(&spec.name) {
            entry.spec = spec.clone();
            entry.attaching = Some(attaching.clone());
        }
        Ok(attaching)
    }
}

/// The same disk with the keys of a tiered one.
fn with_tier(spec: &DiskSpec, asked: &JobSpec) -> Result<DiskSpec, Error> {
    let JobSpec::TierAttach { tier, window, epochs, on_missing, on_outage, outage_bytes, durability, .. } =
        asked
    else {
        unreachable!("asked for by its kind")
    };
    if spec.force {
        return Err(Error::Tiered { name: spec.name.clone(), what: "force" });
    }
    let asked = api::DiskSpec {
        tier: Some(tier.clone()),
        window: *window,
        epochs: epochs.clone(),
        on_missing: on_missing.clone(),
        on_outage: *on_outage,
        outage_bytes: *outage_bytes,
        durability: *durability,
        ..spec.into()
    };
    DiskSpec::try_from(asked)?.absolute().map_err(Error::no_directory)
}
