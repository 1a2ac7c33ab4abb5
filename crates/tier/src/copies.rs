//! This host's copy of a tiered disk: made on what is published, gone on with, given up.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use vmstrata_disk::snapshot::{self, now_ns};
use vmstrata_disk::{CreateOptions, Format, OpenOptions, Resources, create_on};
use vmstrata_repo::Repository;

use crate::abreast::beside;
use crate::attach::{Moved, attach, check_image, is_detached, point_at, seal, stands_on};
use crate::cuts::Cut;
use crate::error::{Error, Result};
use crate::head::{DiskState, Epoch, EpochNumber, Head, ObjectId, OwnerId};
use crate::pin::Pin;
use crate::place::{Copy, Place};
use crate::publisher::{Claim, Publisher, Seen};
use crate::stand;
use crate::states::find_state;
use crate::whole::newest_whole;

/// A copy that publishes its disks.
pub(crate) struct Claimed {
    pub(crate) copy: Copy,
    pub(crate) publisher: Publisher,
    /// Of what the copy may stand on.
    pub(crate) pins: Vec<Pin>,
}

/// Claims a disk, or those of a group, for this host's copy. There is one when this returns. They are published in what `watched` makes of
/// their repository. `opens` says how each disk is opened.
///
/// # Errors
/// As [`crate::Tiered::open`].
pub(crate) fn claim(
    place: &Place,
    opens: &[OpenOptions],
    resources: &Arc<Resources>,
    watched: impl FnOnce(Arc<dyn Repository>) -> Arc<dyn Repository>,
) -> Result<Claimed> {
    let (mut copy, mut publisher) = hold(place, watched)?;
    let owner = publisher.head().owner;
    let pins = match copy.record().and_then(|record| record.base) {
        None => vec![make_copy(&mut copy, place, &mut publisher, opens, resources)?],
        Some(base) => {
            let pins = stand::pins_of(&**publisher.repository(), owner)?;
            pins.iter().try_for_each(|pin| place.show(&pin.epoch))?;
            let epoch = publisher.head().epoch.number;
            if !holds(place, base, epoch)? {
                return Err(Error::OldCopy { copy: place.local.clone(), epoch });
            }
            pins
        }
    };
    Ok(Claimed { copy, publisher, pins })
}

/// Makes an image that nobody uses a tiered disk, with this host's copy, to be served from then on.
///
/// # Errors
/// As [`crate::Tiered::open`].
pub fn attach_image(place: &Place, open: &OpenOptions, resources: &Arc<Resources>) -> Result<Head> {
    let opens = vec![open.clone(); place.members().len()];
    claim(place, &opens, resources, |repository| repository).map(|claimed| claimed.publisher.head().clone())
}

/// Claims disks for this host's copy, which may still have to be made.
pub(crate) fn hold(
    place: &Place,
    watched: impl FnOnce(Arc<dyn Repository>) -> Arc<dyn Repository>,
) -> Result<(Copy, Publisher)> {
    place.check_links()?;
    let repository = place.open_repository()?;
    let seen = repository.as_deref().map(Seen::of).transpose()?;
    match &seen {
        Some(Seen { below: Some(head), .. }) => place.check_disks(&head.epoch)?,
        Some(_) => {}
        None => place.members().iter().try_for_each(|member| check_image(member).map(drop))?,
    }
    let mut copy = Copy::hold(place)?;
    let base = copy.record().and_then(|record| record.base);
    if is_detached(place, copy.record().and_then(|record| record.detaching))? {
        return Err(Error::Detached { path: place.path.clone() });
    }
    let repository = match (repository, base) {
        (Some(repository), _) => repository,
        (None, None) => place.make_repository()?,
        // A file system that is not mounted must not become another.
        (None, Some(_)) => {
            return Err(Error::NoHead { repository: place.repository_name().display().to_string() });
        }
    };
    let owner = match copy.record() {
        Some(record) => record.owner,
        None => {
            let owner = OwnerId::draw();
            copy.note(owner, None)?;
            owner
        }
    };
    let claim = if base.is_some() { Claim::Resume } else { Claim::First };
    let seen = seen.map_or_else(|| Seen::of(&*repository), Ok)?;
    let show = |head: Option<&Head>| head.map_or(Ok(()), |head| place.show(&head.epoch));
    let below = seen.below.clone();
    let (shown, publisher) =
        beside(|| show(below.as_ref()), || Publisher::claim_above(watched(repository), owner, claim, seen));
    let publisher = publisher?;
    shown?;
    place.check_disks(&publisher.head().epoch)?;
    show(Some(publisher.head()))?;
    Ok((copy, publisher))
}

/// Takes a disk over, with those of its group, of which another host has published the newest epoch. Whoever asks has made sure that this host is off, and
/// what it did not publish is lost. Where the NAS has lost the newest epochs, the disks go back to the newest that is whole, with a
/// warning; this host's own copy then publishes again what it has. Returns the head that begins the new generation, and where an earlier copy on this host was put.
///
/// # Errors
/// A disk of which nothing is published, or that this host's copy publishes; whatever host and repository report.
pub fn take_over(
    place: &Place,
    open: &OpenOptions,
    resources: &Arc<Resources>,
) -> Result<(Head, Option<PathBuf>)> {
    let no_head = || Error::NoHead { repository: place.repository_name().display().to_string() };
    let repository = place.open_repository()?.ok_or_else(no_head)?;
    let whole = newest_whole(&*repository)?.ok_or_else(no_head)?;
    let newest = whole.head.clone();
    place.check_disks(&newest.epoch)?;
    let (mut copy, mut aside) = (Copy::hold(place)?, None);
    let show = || place.show(&newest.epoch);
    // One without a base was never written.
    if let Some((owner, base)) = copy.record().and_then(|record| Some((record.owner, record.base?))) {
        let is_there = place.members().iter().all(|member| member.disk().exists());
        show()?;
        if owner == newest.owner && is_there && holds(place, base, newest.epoch.number)? {
            if whole.lost.is_empty() {
                return Err(Error::OwnCopy { copy: place.local.clone() });
            }
            // The copy has what the lost heads published, if that was this host, and publishes it again.
            let publisher = Publisher::take_over(repository, owner, whole)?;
            return Ok((publisher.head().clone(), None));
        }
        let (path, new) = copy.set_aside()?;
        (copy, aside) = (new, Some(path));
    }
    let owner = OwnerId::draw();
    copy.note(owner, None)?;
    // Both take many round trips.
    let (shown, publisher) = beside(show, || Publisher::take_over(repository, owner, whole));
    let mut publisher = publisher?;
    shown?;
    place.check_disks(&publisher.head().epoch)?;
    let opens = vec![open.clone(); place.members().len()];
    make_copy(&mut copy, place, &mut publisher, &opens, resources)?;
    Ok((publisher.head().clone(), aside))
}

/// Has a disk that is not served, with those of its group, become what it was at a snapshot, as its next epoch. What it was until now stays in the directory that
/// is returned.
///
/// # Errors
/// [`Error::NoState`]; as [`crate::Tiered::open`]; as [`take_over`]: then the disk has to be taken over.
pub fn revert(place: &Place, name: &str, open: &OpenOptions, resources: &Arc<Resources>) -> Result<PathBuf> {
    let members = place.members();
    let opens = vec![open.clone(); members.len()];
    let Claimed { copy, mut publisher, .. } = claim(place, &opens, resources, |repository| repository)?;
    let mut newest = publisher.head().epoch.number;
    for member in members {
        newest = newest.max(newest_cut(&member, &open_options(&member, open))?);
    }
    let number = newest.next();
    let state = find_state(&**publisher.repository(), name, now_ns())?;
    place.check_disks(&state)?;
    publisher.publish(Epoch { number, time_ns: now_ns(), ..state })?;
    drop((copy, publisher));
    let (_, aside) = take_over(place, open, resources)?;
    Ok(aside.expect("the copy that was claimed"))
}

/// Makes each disk's layer of this host that takes writes, on what is published; of disks of which nothing is, of their images first.
fn make_copy(
    copy: &mut Copy,
    place: &Place,
    publisher: &mut Publisher,
    opens: &[OpenOptions],
    resources: &Arc<Resources>,
) -> Result<Pin> {
    let members = place.members();
    if publisher.head().epoch.number == EpochNumber::NONE {
        if place.elsewhere.is_some() {
            // Before the first is shipped, which may take long.
            members.iter().try_for_each(|member| check_image(member).map(drop))?;
        }
        place.make_links()?;
        let (repository, owner) = (&**publisher.repository(), publisher.head().owner);
        let (number, mut time_ns) = (EpochNumber::NONE.next(), now_ns());
        let pin = |state: &DiskState| {
            // The first of the disk: nothing is deleted until then.
            let epoch = Epoch { number, time_ns: now_ns(), disks: vec![state.clone()] };
            stand::pin_first(repository, owner, epoch).map(drop)
        };
        let images = members.iter().zip(opens);
        let first = images.map(|(member, open)| match Moved::find(member)? {
            Some(moved) => {
                time_ns = moved.time_ns;
                Ok((moved.adopt(member, repository, open, resources)?, None))
            }
            None => attach(member, repository, open, resources, pin).map(|(state, held)| (state, Some(held))),
        });
        let (mut disks, _held): (Vec<_>, Vec<_>) = first.collect::<Result<Vec<_>>>()?.into_iter().unzip();
        disks.sort_by(|one, other| one.name.cmp(&other.name));
        let epoch = Epoch { number, time_ns, disks };
        publisher.publish(epoch.clone())?;
        if place.elsewhere.is_some() {
            for member in &members {
                let (image, repository) = (member.path.display(), place.repository_name());
                tracing::info!(%image, repository = %repository.display(), "is the first layer there; the file is of no use any more");
            }
        }
        for member in &members {
            seal(member, &epoch)?;
            point_at(member, &epoch)?;
        }
    }
    let (owner, epoch) = (publisher.head().owner, &publisher.head().epoch);
    place.show(epoch)?;
    let pin = stand::pin_for(&**publisher.repository(), publisher.head())?;
    for (member, open) in members.iter().zip(opens) {
        let state = member.state(epoch);
        if stands_on(&member.disk(), state.newest())? {
            // Of a process that was killed, maybe after a guest had written to it: see `Attaching`.
            continue;
        }
        let options = active_layer(place, state.newest(), state.size, open);
        create_on(&member.disk(), &options, &*place.opener())?;
    }
    copy.note(owner, Some(epoch.number))?;
    Ok(pin)
}

/// How the layer of this host is made that takes writes. One that is there and stands on another layer was never written.
pub(crate) fn active_layer(place: &Place, below: ObjectId, size: u64, open: &OpenOptions) -> CreateOptions {
    CreateOptions { force: true, ..CreateOptions::overlay(place.layer(below), size, open.subclusters) }
}

/// How the local disk is opened: its lowest layers lie in the repository.
pub(crate) fn open_options(place: &Place, open: &OpenOptions) -> OpenOptions {
    let mut open = OpenOptions { format: Some(Format::Qcow2), read_only: false, ..open.clone() };
    open.allow_backing.extend([place.repository.clone(), place.local.clone()]);
    open.opener = place.opener();
    open
}

/// The epochs that are layers of the local disk, oldest first.
pub(crate) fn cuts(disk: &Path, open: &OpenOptions) -> Result<Vec<Cut>> {
    let own = snapshot::list(disk, open)?.into_iter().filter(snapshot::Snapshot::is_own);
    let mut cuts: Vec<Cut> = own
        .filter_map(|layer| {
            let info = layer.info?;
            let (time_ns, size) = (info.taken_ns, layer.virtual_size);
            Some(Cut { number: EpochNumber::of(&info.name)?, layer: layer.layer, time_ns, size })
        })
        .collect();
    cuts.sort_by_key(|cut| cut.number);
    Ok(cuts)
}

/// The last of them; [`EpochNumber::NONE`] without any.
pub(crate) fn newest_cut(member: &Place, open: &OpenOptions) -> Result<EpochNumber> {
    Ok(cuts(&member.disk(), open)?.last().map_or(EpochNumber::NONE, |cut| cut.number))
}

/// Whether the copy has the state of this epoch: because it was made on it, or as a layer of each disk, or below one.
pub(crate) fn holds(place: &Place, base: EpochNumber, epoch: EpochNumber) -> Result<bool> {
    if base >= epoch {
        return Ok(base == epoch);
    }
    for member in place.members() {
        let layers = cuts(&member.disk(), &open_options(&member, &OpenOptions::default()))?;
        if layers.iter().all(|cut| cut.number < epoch) {
            return Ok(false);
        }
    }
    Ok(true)
}
