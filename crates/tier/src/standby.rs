//! A disk that this host shows to guests before it is this host's: requests wait until it is taken over.
//!
//! ```text
//!   open ──► stands on the newest epoch, requests wait ──► claimed: a head of this host ──► finish: published, requests go on
//!                  │         ▲
//!                  └─ follow ┘  another host publishes newer ones
//! ```
//!
//! The disk is an empty overlay on the newest epoch of the other host, open and drained. A guest that waits for it, as the target of a migration does,
//! finds its size and features. Following puts the overlay onto a later epoch: no request has seen what it stood on before. So at the
//! claim there is little left to open.
//!
//! Invariants: what the overlay stands on is pinned for this copy. Nothing is read or written before the claim. A copy without a base was
//! never written: a process that is killed before that is noted makes the overlay anew.

use std::io::ErrorKind;
use std::mem;
use std::path::PathBuf;
use std::sync::Arc;

use vmstrata_disk::{Disk, Format, OpenOptions, Resources, create_on};
use vmstrata_repo::Repository;

use crate::copies::{active_layer, open_options};
use crate::engine::Held;
use crate::error::{Error, Result};
use crate::head::{Head, HeadNumber, OwnerId};
use crate::look::newest;
use crate::metered::Watched;
use crate::pin::Pin;
use crate::place::{Copy, Place, read_record};
use crate::publisher::{Claim, Publisher, Seen};
use crate::stand;
use crate::status::{TierOptions, TierState, TierStatus};
use crate::tiered::Tiered;
use crate::whole::newest_whole;

/// See the module documentation.
#[derive(Debug)]
pub struct Standby {
    place: Place,
    opens: Vec<OpenOptions>,
    resources: Arc<Resources>,
    repository: Arc<dyn Repository>,
    copy: Copy,
    owner: OwnerId,
    disks: Vec<Arc<Disk>>,
    /// What the disks stand on, or did.
    pins: Vec<Pin>,
    head: Head,
}

impl Standby {
    /// Whether this host's copy published the disk last: then it need not wait to take it over.
    ///
    /// # Errors
    /// What host and repository report.
    pub fn is_own(place: &Place) -> Result<bool> {
        let Some(record) = read_record(&place.local)? else { return Ok(false) };
        let newest = place.open_repository()?.map(|repository| newest(&*repository)).transpose()?.flatten();
        Ok(newest.is_some_and(|head| head.owner == record.owner))
    }

    /// Opens a disk, or all disks of a group, that another host publishes. `opens` says how each is opened, in the order of [`Place::members`], in which
    /// the disks are returned. Also returns where an earlier copy on this host was put.
    ///
    /// # Errors
    /// [`Error::NoHead`] for a disk of which nothing is published, [`Error::OwnCopy`] for one that this host's copy publishes; what host and repository report.
    ///
    /// # Panics
    /// Without as many options as there are disks.
    pub fn open(
        place: &Place,
        opens: &[OpenOptions],
        resources: &Arc<Resources>,
    ) -> Result<(Vec<Arc<Disk>>, Self, Option<PathBuf>)> {
        let members = place.members();
        assert_eq!(opens.len(), members.len(), "{place}: one for each disk");
        place.check_links()?;
        let no_head = || Error::NoHead { repository: place.repository_name().display().to_string() };
        let repository = place.open_repository()?.ok_or_else(no_head)?;
        let head = newest(&*repository)?.ok_or_else(no_head)?;
        place.check_disks(&head.epoch)?;
        let (mut copy, mut aside) = (Copy::hold(place)?, None);
        let record = copy.record().map(|record| (record.owner, record.base));
        let owner = match record {
            Some((owner, _)) if owner == head.owner => {
                return Err(Error::OwnCopy { copy: place.local.clone() });
            }
            Some((owner, None)) => owner,
            Some((_, Some(_))) => {
                let (path, new) = copy.set_aside()?;
                (copy, aside) = (new, Some(path));
                OwnerId::draw()
            }
            None => OwnerId::draw(),
        };
        copy.note(owner, None)?;
        // Those of a process that stood by before.
        let mut pins = stand::pins_of(&*repository, owner)?;
        let pin = stand::pin_as(&*repository, &head, owner)?;
        place.show(&pin.epoch)?;
        let mut disks = Vec::with_capacity(members.len());
        for (member, open) in members.iter().zip(opens) {
            let state = member.state(&pin.epoch);
            let options = active_layer(place, state.newest(), state.size, open);
            create_on(&member.disk(), &options, &*place.opener())?;
            let disk = Disk::open(&member.disk(), &open_options(member, open), resources)?;
            disk.drain();
            disks.push(disk);
        }
        for pin in mem::take(&mut pins) {
            pin.release(&*repository)?;
        }
        let standby = Self {
            place: place.clone(),
            opens: opens.to_vec(),
            resources: Arc::clone(resources),
            repository,
            copy,
            owner,
            disks: disks.clone(),
            pins: vec![pin],
            head,
        };
        Ok((disks, standby, aside))
    }

    /// What there is to say of it.
    pub fn status(&self) -> TierStatus {
        TierStatus { owner: self.owner, state: TierState::Standby, ..TierStatus::of(&self.place, &self.head) }
    }

    /// Has the disks stand on what is published now.
    ///
    /// # Errors
    /// [`Error::Resized`]; what host and repository report. The disks then stand on what they did, or on something newer.
    pub fn follow(&mut self) -> Result<TierStatus> {
        let none = || Error::NoHead { repository: self.repository.describe() };
        let head = newest(&*self.repository)?.ok_or_else(none)?;
        self.stand_on(head)?;
        Ok(self.status())
    }

    fn stand_on(&mut self, head: Head) -> Result<()> {
        let (place, members) = (&self.place, self.place.members());
        place.check_disks(&head.epoch)?;
        for (member, disk) in members.iter().zip(&self.disks) {
            let (is, shown) = (member.state(&head.epoch).size, disk.size());
            if is != shown {
                return Err(Error::Resized { path: member.path.clone(), is, shown });
            }
        }
        let last = self.pins.last().expect("one keeps what the disks stand on");
        let newest_of =
            |pin: &Pin| members.iter().map(|member| member.state(&pin.epoch).newest()).collect::<Vec<_>>();
        let is_there = members
            .iter()
            .zip(newest_of(last))
            .all(|(member, last)| member.state(&head.epoch).newest() == last);
        if !is_there {
            place.show(&head.epoch)?;
            self.pins.push(stand::pin_as(&*self.repository, &head, self.owner)?);
        }
        for (member, disk) in members.iter().zip(&self.disks) {
            let newest = member.state(&head.epoch).newest();
            if stand::border(disk, &place.repository).is_none_or(|(below, _)| below != newest) {
                disk.rebase(disk.path(), None, (&place.layer(newest), Format::Qcow2))?;
            }
        }
        let last = self.pins.pop().expect("as above");
        for pin in mem::replace(&mut self.pins, vec![last]) {
            pin.release(&*self.repository)?;
        }
        self.head = head;
        Ok(())
    }

    /// Takes the disks over, from the head that another host offers ([`Tiered::hand_over`]), or from the newest whole one of a host that is
    /// off, as the caller made sure. From then on no other host publishes them. Can be tried again after an error.
    ///
    /// # Errors
    /// [`Error::NotHandedOver`] where the other host has taken the disks back; [`Error::Resized`]; what host and repository report: the claim may then have
    /// happened.
    pub fn claim(&mut self, from: Option<HeadNumber>, options: &TierOptions) -> Result<Claimed> {
        let repository = Arc::clone(&self.repository);
        let (claim, seen) = match from {
            Some(from) => {
                let gone = |error| match error {
                    Error::Repository(error) if error.kind() == ErrorKind::NotFound => {
                        let why = "it is not there any more".to_owned();
                        Error::NotHandedOver { repository: repository.describe(), from, why }
                    }
                    error => error,
                };
                (Claim::HandedOver(from), Seen::at(&*repository, from).map_err(gone)?)
            }
            None => {
                let whole = newest_whole(&*repository)?;
                (Claim::TakeOver, Seen::of_whole(whole))
            }
        };
        // Before the claim, so that little is left to be done after it.
        if let Some(below) = seen.below.clone() {
            self.stand_on(below)?;
        }
        let mut watched = Watched::new(&options.wire);
        let publisher = Publisher::claim_above(watched.of(repository), self.owner, claim, seen)?;
        self.stand_on(publisher.head().clone())?;
        self.copy.note(self.owner, Some(publisher.head().epoch.number))?;
        Ok(Claimed { publisher, watched, options: options.clone() })
    }

    /// Publishes the disks from now on, and lets requests go on.
    ///
    /// # Errors
    /// What repository or host report: the disks go on once they are served anew.
    pub fn finish(self, claimed: Claimed) -> Result<Tiered> {
        let Self { place, opens, resources, copy, disks, pins, .. } = self;
        let Claimed { publisher, watched, options } = claimed;
        let (merges, meter, running) = (watched.merges(), watched.meter, disks.clone());
        let held = Held { copy, publisher, pins, meter, merges, running, reads_past_cache: false };
        let (_, tiered) = Tiered::run(&place, options, &opens, &resources, held)?;
        disks.iter().for_each(|disk| disk.resume());
        Ok(tiered)
    }

    /// Stands by no longer. The disks are closed by who has them.
    ///
    /// # Errors
    /// What the repository reports: a pin then stays there.
    pub fn end(self) -> Result<()> {
        self.pins.iter().try_for_each(|pin| pin.release(&*self.repository))
    }
}

/// A claim, with which [`Standby::finish`] goes on.
#[must_use]
pub struct Claimed {
    publisher: Publisher,
    watched: Watched,
    options: TierOptions,
}
