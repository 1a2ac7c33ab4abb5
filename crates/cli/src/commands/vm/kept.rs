//! Whether the states of tiered disks are kept that belong to snapshots of memory.
//!
//! A guest goes on when its memory and its disks are cut, and its disks' repository may not answer then. The snapshot of memory is complete
//! once the disks' states are published, each with a pin that has its name and time. That is noted nowhere: it is looked up, in the repositories
//! and at the server, which has the snapshots that wait.

use std::collections::BTreeMap;
use std::path::PathBuf;

use anyhow::{Result, bail};
use vmstrata_api::{DiskList, DiskStatus, PendingSnapshot, TierState, TierStatus, encode_segment};
use vmstrata_memory::vault::{DiskState, Listed};
use vmstrata_types::path_from_text;

use crate::args::ControlArgs;
use crate::client::Client;
use crate::commands::named::argument_for;
use crate::commands::taken::{self, Taken};

/// Whether a guest can be restored, as far as its disks are concerned; the worst last.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Keeping {
    /// All states are kept.
    Complete,
    /// One is not published yet, because of this.
    Incomplete(String),
    /// A repository does not say whether it has one.
    Unknown(String),
    /// One is not kept, and never will be.
    Lost(String),
}

impl Keeping {
    /// As the API and the manual call it.
    pub(super) fn name(&self) -> &'static str {
        match self {
            Self::Complete => "complete",
            Self::Incomplete(_) => "incomplete",
            Self::Unknown(_) => "unknown",
            Self::Lost(_) => "lost",
        }
    }

    /// Why it is not complete.
    pub(super) fn why(&self) -> Option<&str> {
        match self {
            Self::Complete => None,
            Self::Incomplete(why) | Self::Unknown(why) | Self::Lost(why) => Some(why),
        }
    }
}

/// What the repositories and the server say at the moment.
#[derive(Debug)]
pub(super) struct Look {
    served: Vec<DiskStatus>,
    /// `[disk]`: the snapshots that its repository keeps, or why it does not say.
    kept: BTreeMap<String, Result<Vec<Taken>, String>>,
}

impl Look {
    /// Looks at the tiered ones of these disks. A repository that does not answer is not waited for.
    ///
    /// # Errors
    /// When the host is out of descriptors or threads.
    pub(super) fn at<'a>(
        disks: impl IntoIterator<Item = &'a DiskState>,
        server: &ControlArgs,
    ) -> Result<Self> {
        let tiered = disks.into_iter().filter(|state| state.tiered_ns.is_some());
        let disks: BTreeMap<String, PathBuf> =
            tiered.map(|state| (state.disk.clone(), path_from_text(&state.disk))).collect();
        let served = if disks.is_empty() { Vec::new() } else { served(&Client::new(server)?) };
        Ok(Self { served, kept: taken::kept_of(disks)? })
    }

    /// The same, for all snapshots of a vault.
    ///
    /// # Errors
    /// As [`Look::at`].
    pub(super) fn at_all(listed: &[Listed], server: &ControlArgs) -> Result<Self> {
        let infos = listed.iter().filter_map(|listed| listed.info.as_ref().ok());
        Self::at(infos.flat_map(|info| &info.disks), server)
    }

    /// What that says of a snapshot with these disks.
    pub(super) fn of(&self, disks: &[DiskState]) -> Keeping {
        let states = disks.iter().filter_map(|state| Some(self.of_disk(state, state.tiered_ns?)));
        states.max().unwrap_or(Keeping::Complete)
    }

    fn of_disk(&self, state: &DiskState, taken_ns: u64) -> Keeping {
        let (disk, name) = (&state.disk, &state.snapshot);
        let kept = self.kept.get(disk).map_or(Ok(false), |kept| {
            let is_it = |taken: &Taken| taken.name == *name && taken.taken_ns == taken_ns;
            kept.as_ref().map(|kept| kept.iter().any(is_it))
        });
        let served = find_served(&self.served, disk);
        let tier = served.and_then(|served| served.tier.as_ref());
        let pending = tier.filter(|tier| waits(tier, name, taken_ns).is_some());
        match (kept, pending, served) {
            (Ok(true), ..) => Keeping::Complete,
            (_, Some(tier), _) => match (tier.state, waiting_for(tier)) {
                (TierState::Fenced, why) => Keeping::Lost(format!("{disk} is never published: {why}")),
                (_, why) => Keeping::Incomplete(format!("{disk} is not published yet: {why}")),
            },
            (Err(why), ..) => Keeping::Unknown(why.clone()),
            (Ok(false), None, Some(_)) if tier.is_some() => {
                Keeping::Lost(format!("{disk} has no such snapshot, and none that waits to be published"))
            }
            (Ok(false), None, Some(served)) => {
                let why = served.open_error.as_deref().unwrap_or("it is being opened");
                Keeping::Incomplete(format!("{disk} is not published, and not open at the server: {why}"))
            }
            (Ok(false), None, None) => Keeping::Incomplete(format!(
                "{disk} is not published: serve it on the host where the snapshot was taken"
            )),
        }
    }
}

/// The disks that a server has, if one answers.
fn served(client: &Client) -> Vec<DiskStatus> {
    client.get::<DiskList>("/v1/disks").map_or_else(|_| Vec::new(), |served| served.disks)
}

/// The one of a snapshot among them.
fn find_served<'a>(served: &'a [DiskStatus], disk: &str) -> Option<&'a DiskStatus> {
    served.iter().find(|served| argument_for(served) == path_from_text(disk))
}

/// The snapshot of a tiered disk, if it waits to be published.
fn waits<'a>(tier: &'a TierStatus, name: &str, taken_ns: u64) -> Option<&'a PendingSnapshot> {
    tier.pending_snapshots.iter().find(|pending| pending.name == name && pending.taken_ns == taken_ns)
}

/// What keeps a disk from being published.
fn waiting_for(tier: &TierStatus) -> String {
    match (&tier.error, tier.held_seconds) {
        (Some(error), _) => error.clone(),
        (None, Some(seconds)) => format!("its epochs are held for another {seconds} s (vmstrata tier hold)"),
        (None, None) => "it is on its way".to_owned(),
    }
}

/// Whether the state of a tiered disk is published, as far as a server knows.
///
/// # Errors
/// What keeps it from being published.
pub(super) fn published(client: &Client, state: &DiskState, taken_ns: u64) -> Result<Published> {
    let served = served(client);
    let served = find_served(&served, &state.disk);
    let Some(tier) = served.and_then(|served| served.tier.as_ref()) else {
        return Ok(Published::Perhaps(None));
    };
    if waits(tier, &state.snapshot, taken_ns).is_none() {
        let cache = tier.cache.as_ref().map(|cache| path_from_text(&cache.directory));
        return Ok(Published::Perhaps(cache));
    }
    if tier.state != TierState::Publishing || tier.held_seconds.is_some() {
        bail!("it is not published yet: {}", waiting_for(tier));
    }
    Ok(Published::Soon)
}

/// Whether a state is published.
#[derive(Debug)]
pub(super) enum Published {
    /// It does not wait; where a server keeps layers of its repository.
    Perhaps(Option<PathBuf>),
    /// It is on its way.
    Soon,
}

/// Deletes the state of a tiered disk, whether it is kept or waits for its repository; false if neither is so.
///
/// # Errors
/// A repository or a server that does not do it, or a disk that no server serves: its state may wait for that.
pub(super) fn delete(client: &Client, state: &DiskState, taken_ns: u64) -> Result<bool> {
    let served = served(client);
    let name = &state.snapshot;
    let tier = find_served(&served, &state.disk).and_then(|served| Some((served, served.tier.as_ref()?)));
    if let Some((disk, _)) = tier.filter(|(_, tier)| waits(tier, name, taken_ns).is_some()) {
        let path = format!("/v1/disks/{}/snapshots/{}", encode_segment(&disk.name), encode_segment(name));
        // If it is published meanwhile, it is kept.
        if client.delete(&path).is_ok() {
            return Ok(true);
        }
    }
    let path = path_from_text(&state.disk);
    let is_deleted = taken::forget_taken(&path, Taken { name: name.clone(), taken_ns })?;
    if !is_deleted && tier.is_none() {
        let disk = &state.disk;
        bail!("it is not published, and no server here serves {disk}, where it may wait");
    }
    Ok(is_deleted)
}
