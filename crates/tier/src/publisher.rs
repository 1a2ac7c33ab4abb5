//! The rules by which one process at a time publishes a disk.
//!
//! ```text
//!   claim:    read the newest head, N ──► create head N + 1: the next generation, the same epoch
//!   publish:  ship the new layer      ──► create head N + 1: the same generation, the next epoch
//! ```
//!
//! The heads are one log, and the repository's conditional create decides who writes its next entry. So a claim is the fence as well:
//!
//! - Once a claim has number N + 1, no other head can get between it and N. The epoch that it took over is the newest that was
//!   published, for good.
//! - The next head of the process that published before has a number that is taken. It finds a newer generation there, and stops.
//!   Its late writes and links make objects that no head names: an object's name is drawn anew each time.
//! - Old heads are deleted, so that a create may succeed at a number that is free again. A process believes that its head is the newest once
//!   it has listed the repository, and the listing has that head and no newer one: [`Look`]. That head is then its own, as it has met no other's
//!   head with that number before: a process that meets a newer head than its last never creates one again.
//! - Lookups and listings may be old. Else they say only where to try next; no decision depends on one, nor on a lock.
//! - After an error the process reads the head with that number: its create may have happened. While there is none, the
//!   create may still happen, so that it tries the same head again before any other.
//!
//! A head names objects that are complete, on stable storage and read back ([`ship`](crate::ship)). What is deleted, and when: `retain`.

use std::collections::BTreeSet;
use std::io::ErrorKind;
use std::sync::Arc;
use std::time::Duration;

use vmstrata_repo::Repository;
use vmstrata_store::Planted;
use vmstrata_store::proc::since_boot;

use crate::error::{Error, Result};
use crate::head::{Epoch, Head, HeadNumber, ObjectId, OwnerId, PinId};
use crate::look::{Look, newest, read_head, read_newest};
use crate::object::{Shipment, remove};
use crate::pin::Pin;
use crate::retain::{Retention, unpinned};
use crate::whole::{Whole, newest_whole};

/// Why a process begins to publish.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Claim {
    /// Nobody has published the disk yet.
    First,
    /// Its copy of the disk published last: the process was started again.
    Resume,
    /// Whoever published last does not run any more, as the caller made sure.
    TakeOver,
    /// Who published this head offers the disk: it publishes no other one, unless it takes the disk back, which is a head, too.
    HandedOver(HeadNumber),
}

impl Claim {
    /// Refuses a claim on top of the head `below`.
    fn check(self, repository: &dyn Repository, owner: OwnerId, below: Option<&Head>) -> Result<()> {
        match (self, below) {
            (Self::First, None) | (Self::TakeOver, Some(_)) => Ok(()),
            (_, Some(head)) if head.owner == owner => Ok(()),
            (Self::HandedOver(from), Some(head)) if head.number == from => Ok(()),
            (Self::HandedOver(from), Some(head)) => {
                let why = format!("copy {} of the disk went on with {}", head.owner, head.number);
                Err(Error::NotHandedOver { repository: repository.describe(), from, why })
            }
            (_, Some(head)) => Err(fenced(repository, head.clone())),
            (_, None) => Err(Error::NoHead { repository: repository.describe() }),
        }
    }
}

/// The process that publishes a disk, as far as it knows.
#[derive(Debug)]
pub struct Publisher {
    repository: Arc<dyn Repository>,
    /// The last one that it created.
    head: Head,
    /// One that it tried to create, which may still happen.
    unsettled: Option<Head>,
    /// Whether it met a newer one.
    is_fenced: bool,
    /// Whether what other processes had begun is gone.
    is_alone: bool,
    retention: Retention,
    /// Pins never change.
    pins: Vec<Pin>,
}

/// What a repository held when somebody looked, before a claim.
#[derive(Clone, Debug)]
pub(crate) struct Seen {
    /// The layers.
    pub(crate) layers: Vec<ObjectId>,
    /// What the next head follows.
    pub(crate) below: Option<Head>,
}

impl Seen {
    /// What it holds now.
    ///
    /// # Errors
    /// As [`newest`].
    pub(crate) fn of(repository: &dyn Repository) -> Result<Self> {
        let look = Look::any(repository)?;
        let below = look.heads().max().map(|number| read_newest(repository, number)).transpose()?;
        Ok(Self { layers: look.layers().collect(), below })
    }

    /// The same, for who knows the newest head, which an old listing may lack.
    ///
    /// # Errors
    /// No such head; what the repository reports.
    pub(crate) fn at(repository: &dyn Repository, head: HeadNumber) -> Result<Self> {
        let layers = Look::any(repository)?.layers().collect();
        Ok(Self { layers, below: Some(read_head(repository, head)?) })
    }

    pub(crate) fn of_whole(whole: Option<Whole>) -> Self {
        let below = whole.as_ref().map(Whole::below);
        Self { layers: whole.map(|whole| whole.layers).unwrap_or_default(), below }
    }
}

impl Publisher {
    /// Begins a generation. When this returns, nobody who claimed the disk before publishes it any more.
    ///
    /// # Errors
    /// [`Error::Fenced`], [`Error::NoHead`] when the claim is not justified; a repository that cannot be read or written: the claim
    /// may then still succeed, which fences others, and can be made again.
    pub fn claim(repository: Arc<dyn Repository>, owner: OwnerId, claim: Claim) -> Result<Self> {
        let seen = match claim {
            Claim::TakeOver => Seen::of_whole(newest_whole(&*repository)?),
            Claim::First | Claim::Resume => Seen::of(&*repository)?,
            Claim::HandedOver(from) => Seen::at(&*repository, from)?,
        };
        Self::claim_above(repository, owner, claim, seen)
    }

    /// Begins a generation above the newest whole head, as [`Claim::TakeOver`].
    ///
    /// # Errors
    /// As [`Publisher::claim`].
    pub(crate) fn take_over(repository: Arc<dyn Repository>, owner: OwnerId, newest: Whole) -> Result<Self> {
        Self::claim_above(repository, owner, Claim::TakeOver, Seen::of_whole(Some(newest)))
    }

    /// Claims the disk, whose newest head is what was seen, or one above that.
    ///
    /// # Errors
    /// As [`Publisher::claim`].
    pub(crate) fn claim_above(
        repository: Arc<dyn Repository>,
        owner: OwnerId,
        claim: Claim,
        seen: Seen,
    ) -> Result<Self> {
        let Seen { layers, mut below } = seen;
        loop {
            claim.check(&*repository, owner, below.as_ref())?;
            let mut head = Head::after(below.as_ref(), owner);
            head.generation = head.generation.next();
            let other = match create(&*repository, &head)? {
                Some(other) => Some(other),
                None => {
                    newer(&*repository, &head)?.map(|newer| read_head(&*repository, newer)).transpose()?
                }
            };
            match (other, below) {
                (None, _) => {
                    let retention = Retention::new(&head, layers.into_iter(), since_boot());
                    return Ok(Self {
                        repository,
                        head,
                        unsettled: None,
                        is_fenced: false,
                        is_alone: false,
                        retention,
                        pins: Vec::new(),
                    });
                }
                (Some(other), Some(mut seen)) if Planted::BlindClaim.is_there() => {
                    seen.number = other.number;
                    below = Some(seen);
                }
                // Published since the listing was made.
                (Some(other), _) => below = Some(other),
            }
        }
    }

    /// The last head that this process created.
    pub fn head(&self) -> &Head {
        &self.head
    }

    /// Where it publishes.
    pub(crate) fn repository(&self) -> &Arc<dyn Repository> {
        &self.repository
    }

    /// Has heads kept for so long that are not the newest any more, at least for [`KEEP`](crate::KEEP).
    pub fn keep(&mut self, time: Duration) {
        self.retention.keep(time);
    }

    /// Publishes what could not be published before, if that is not there by now.
    ///
    /// # Errors
    /// As [`Publisher::publish`].
    pub fn settle(&mut self) -> Result<()> {
        self.begin()?;
        self.unsettled.clone().map_or(Ok(()), |head| self.create(head))
    }

    /// Publishes an epoch whose new objects were shipped since the claim: the next one, or the last one with other objects that make
    /// the same state. One that could not be published before is published first, or is the same.
    ///
    /// # Errors
    /// [`Error::Fenced`]: this process publishes nothing any more. [`Error::BadEpoch`]. Else it may happen or have happened, and
    /// can be tried again.
    ///
    /// # Panics
    /// When its number is lower than that of the last.
    pub fn publish(&mut self, epoch: Epoch) -> Result<()> {
        self.begin()?;
        if let Some(before) = self.unsettled.clone().filter(|head| head.epoch != epoch) {
            self.create(before)?;
        }
        assert!(epoch.number >= self.head.epoch.number, "epoch {} again", epoch.number);
        epoch.check().map_err(|why| Error::BadEpoch {
            repository: self.repository.describe(),
            epoch: epoch.number,
            why,
        })?;
        if let Some(same) = self.unsettled.clone() {
            return self.create(same);
        }
        let mut head = Head::after(Some(&self.head), self.head.owner);
        head.floor = self.retention.floor(since_boot()).unwrap_or(head.floor);
        head.epoch = epoch;
        self.create(head)
    }

    fn create(&mut self, head: Head) -> Result<()> {
        self.unsettled = Some(head.clone());
        if let Some(by) = create(&*self.repository, &head)? {
            return self.meet(by.number, Ok(by));
        }
        match newer(&*self.repository, &head) {
            Ok(None) => {}
            Ok(Some(number)) => return self.meet(number, read_head(&*self.repository, number)),
            Err(error) => {
                // Another look at that number might be at an old listing, with another process's head.
                self.unsettled = Some(Head::after(Some(&head), head.owner));
                return Err(error);
            }
        }
        self.unsettled = None;
        self.retention.published(&head, since_boot());
        self.head = head;
        Ok(())
    }

    /// Publishes nothing any more: there is a newer head, which is this one if it can be read.
    fn meet(&mut self, number: HeadNumber, by: Result<Head>) -> Result<()> {
        if Planted::Unfenced.is_there() {
            let mut head = self.unsettled.take().expect("set before a head is created");
            head.number = number.next();
            return self.create(head);
        }
        self.is_fenced = true;
        Err(fenced(&*self.repository, by?))
    }

    /// Refuses to go on after another process was met. The first time, has no other process finish what it began before the claim.
    fn begin(&mut self) -> Result<()> {
        if !self.is_fenced {
            if !self.is_alone {
                self.repository.sweep()?;
                self.is_alone = true;
            }
            return Ok(());
        }
        let none = || Error::NoHead { repository: self.repository.describe() };
        Err(fenced(&*self.repository, newest(&*self.repository)?.ok_or_else(none)?))
    }

    /// Has the next [`Publisher::sweep`] delete a layer that was shipped, and that this process will not publish.
    pub fn discard(&mut self, id: ObjectId) {
        self.retention.discard(id);
    }

    /// Deletes old heads, and the layers that no kept head and no pin names. Where nothing was published lately, it publishes the last
    /// epoch again to let go of what was before. Returns how many layers are gone.
    ///
    /// # Errors
    /// As [`Publisher::publish`]; a pin that cannot be read: then nothing is deleted. Can be tried again.
    pub fn sweep(&mut self) -> Result<usize> {
        self.settle()?;
        let can_rise = |floor| floor > self.head.floor && !self.retention.unnamed(floor).is_empty();
        if self.retention.floor(since_boot()).is_some_and(can_rise) {
            self.publish(self.head.epoch.clone())?;
        }
        let repository = &*self.repository;
        let look = Look::since(repository, &self.head.number.name())?;
        let newer = look.heads().max().filter(|newest| *newest > self.head.number);
        if let Some(newer) = newer.filter(|_| !Planted::Unfenced.is_there()) {
            return self.meet(newer, read_head(&*self.repository, newer)).map(|()| 0);
        }
        if Planted::LateListing.is_there() {
            look.layers().for_each(|id| self.retention.discard(id));
        }
        let listed: BTreeSet<PinId> = look.pins().filter(|_| !Planted::UnreadPins.is_there()).collect();
        self.pins.retain(|pin| listed.contains(&pin.id));
        for id in listed {
            if self.pins.iter().all(|pin| pin.id != id) {
                self.pins.push(Pin::read(repository, id)?);
            }
        }
        let unnamed = unpinned(self.retention.unnamed(self.head.floor), &self.pins);
        for id in &unnamed {
            remove(repository, *id)?;
            self.retention.deleted(*id);
        }
        for number in look.heads().filter(|number| *number < self.head.floor) {
            repository.delete(&number.name())?;
        }
        Ok(unnamed.len())
    }
}

fn fenced(repository: &dyn Repository, by: Head) -> Error {
    Error::Fenced { repository: repository.describe(), by: Box::new(by) }
}

/// Creates a head; returns another one that has its number.
fn create(repository: &dyn Repository, head: &Head) -> Result<Option<Head>> {
    let created = Shipment::begin(repository, head.number.name()).and_then(|mut shipment| {
        shipment.put(&head.encode())?;
        shipment.finish()
    });
    let Err(error) = created else { return Ok(None) };
    let is_taken = matches!(&error, Error::Repository(error) if error.kind() == ErrorKind::AlreadyExists);
    match read_head(repository, head.number) {
        // It may not be on stable storage: the next try finds it there, and waits for that.
        Ok(found) if found == *head && !is_taken && !Planted::SeenHead.is_there() => Err(error),
        Ok(found) => Ok((found != *head).then_some(found)),
        Err(Error::Repository(absent)) if absent.kind() == ErrorKind::NotFound => Err(error),
        Err(error) => Err(error),
    }
}

/// The newest head above one that this process created. It must not have listed the repository while another process's head had that number.
fn newer(repository: &dyn Repository, head: &Head) -> Result<Option<HeadNumber>> {
    if Planted::TrustedCreate.is_there() {
        return Ok(None);
    }
    let look = Look::since(repository, &head.number.name())?;
    Ok(look.heads().max().filter(|newest| *newest > head.number))
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::PermissionsExt;
    use std::path::Path;

    use tempfile::TempDir;
    use vmstrata_repo::DirectoryRepository;

    use super::*;
    use crate::{DiskState, Purpose, is_object_name, ship, states};

    fn directory() -> TempDir {
        tempfile::Builder::new().permissions(fs::Permissions::from_mode(0o700)).tempdir().unwrap()
    }

    fn repository(at: &Path) -> Arc<dyn Repository> {
        Arc::new(DirectoryRepository::open(at, is_object_name).unwrap())
    }

    /// Ships a layer, and the epoch that has it on top of the last one.
    fn next_epoch(publisher: &Publisher) -> Epoch {
        let layer = ship(&*publisher.repository, 0, |shipment| shipment.put(b"layer")).unwrap();
        let mut epoch = publisher.head().epoch.clone();
        match &mut epoch.disks[..] {
            [disk] => disk.objects.push(layer),
            _ => epoch.disks = vec![DiskState { name: "web".to_owned(), size: 4096, objects: vec![layer] }],
        }
        Epoch { number: epoch.number.next(), ..epoch }
    }

    fn visit() -> Purpose {
        Purpose::reader("a visit")
    }

    fn fenced_by(refused: Result<impl std::fmt::Debug>) -> Head {
        match refused.unwrap_err() {
            Error::Fenced { by, .. } => *by,
            other => panic!("{other}"),
        }
    }

    #[test]
    fn who_took_over_publishes_and_who_was_taken_over_does_not() {
        let dir = directory();
        let (repository, [old, new]) = (repository(dir.path()), [OwnerId::draw(), OwnerId::draw()]);
        let mut first = Publisher::claim(repository.clone(), old, Claim::First).unwrap();
        first.publish(next_epoch(&first)).unwrap();
        let mut second = Publisher::claim(repository.clone(), new, Claim::TakeOver).unwrap();
        assert_eq!(second.head().epoch, first.head().epoch);
        let late = next_epoch(&first);
        assert_eq!(fenced_by(first.publish(late.clone())), *second.head());
        second.publish(next_epoch(&second)).unwrap();
        assert_eq!(fenced_by(first.publish(late)).owner, new);
        assert_eq!(newest(&*repository).unwrap().as_ref(), Some(second.head()));
    }

    #[test]
    fn a_claim_is_refused_where_another_copy_publishes() {
        let dir = directory();
        let (repository, [old, new]) = (repository(dir.path()), [OwnerId::draw(), OwnerId::draw()]);
        for claim in [Claim::Resume, Claim::TakeOver] {
            let refused = Publisher::claim(repository.clone(), new, claim).unwrap_err();
            assert!(matches!(refused, Error::NoHead { .. }), "{refused}");
        }
        let first = Publisher::claim(repository.clone(), old, Claim::First).unwrap();
        for claim in [Claim::First, Claim::Resume] {
            assert_eq!(fenced_by(Publisher::claim(repository.clone(), new, claim)), *first.head());
        }
        let again = Publisher::claim(repository, old, Claim::Resume).unwrap();
        assert!(again.head().generation > first.head().generation);
    }

    /// Deletes heads as a sweep does when they are old enough.
    fn delete(repository: &dyn Repository, numbers: std::ops::Range<u64>) {
        for number in numbers {
            let name = format!("head-{number:012}");
            repository.delete(&vmstrata_repo::ObjectName::new(&name).unwrap()).unwrap();
        }
    }

    #[test]
    fn a_head_at_a_number_that_is_free_again_is_nobodys() {
        let dir = directory();
        let (repository, [old, new]) = (repository(dir.path()), [OwnerId::draw(), OwnerId::draw()]);
        let mut first = Publisher::claim(repository.clone(), old, Claim::First).unwrap();
        first.publish(next_epoch(&first)).unwrap();
        let mut second = Publisher::claim(repository.clone(), new, Claim::TakeOver).unwrap();
        for _ in 0..3 {
            second.publish(next_epoch(&second)).unwrap();
        }
        delete(&*repository, 1..5);
        assert_eq!(fenced_by(first.publish(next_epoch(&first))), *second.head());
        second.publish(next_epoch(&second)).unwrap();
        assert_eq!(newest(&*repository).unwrap().as_ref(), Some(second.head()));
    }

    #[test]
    fn an_epoch_of_more_layers_than_a_head_names_is_refused() {
        let dir = directory();
        let mut publisher = Publisher::claim(repository(dir.path()), OwnerId::draw(), Claim::First).unwrap();
        let mut epoch = next_epoch(&publisher);
        let objects = &mut epoch.disks[0].objects;
        let one = objects[0];
        objects.resize_with(crate::OBJECTS_MAX + 1, || crate::Object { id: ObjectId::draw(), ..one });
        let told = publisher.publish(epoch).unwrap_err().to_string();
        assert!(told.ends_with("cannot be published: it names 4097 objects, and 4096 is the most"), "{told}");
        publisher.publish(next_epoch(&publisher)).unwrap();
    }

    #[test]
    fn a_pin_keeps_an_epoch_that_a_kept_head_publishes() {
        let dir = directory();
        let repository = repository(dir.path());
        let mut publisher = Publisher::claim(repository.clone(), OwnerId::draw(), Claim::First).unwrap();
        for _ in 0..3 {
            publisher.publish(next_epoch(&publisher)).unwrap();
        }
        let states = states(&*repository).unwrap();
        assert_eq!(states.len(), 4);
        assert_eq!(Pin::make(&*repository, None, &visit()).unwrap().epoch, publisher.head().epoch);
        let pin = Pin::make(&*repository, Some(states[2].epoch.number), &visit()).unwrap();
        assert_eq!(pin.epoch, states[2].epoch);
        let unknown =
            Pin::make(&*repository, Some(publisher.head().epoch.number.next()), &visit()).unwrap_err();
        assert!(matches!(unknown, Error::NotKept { .. }), "{unknown}");
        assert_eq!(Pin::read(&*repository, pin.id).unwrap(), pin);
        pin.release(&*repository).unwrap();
        assert_eq!(Pin::all(&*repository).unwrap().len(), 1);
    }

    #[test]
    fn a_damaged_pin_is_an_error_that_names_it_and_nothing_is_deleted() {
        let dir = directory();
        let repository = repository(dir.path());
        ship(&*repository, 0, |shipment| shipment.put(b"left over")).unwrap();
        let mut publisher = Publisher::claim(repository.clone(), OwnerId::draw(), Claim::First).unwrap();
        let pin = Pin::make(&*repository, None, &visit()).unwrap();
        let path = dir.path().join(pin.id.name().as_str());
        fs::File::options().write(true).open(&path).unwrap().set_len(100).unwrap();
        let told = publisher.sweep().unwrap_err().to_string();
        assert!(told.ends_with(&format!("{} is damaged: its checksum is wrong", pin.id.name())), "{told}");
        pin.release(&*repository).unwrap();
        assert_eq!(publisher.sweep().unwrap(), 1);
    }

    #[test]
    fn a_damaged_or_huge_head_is_an_error_that_names_it() {
        let dir = directory();
        let (repository, owner) = (repository(dir.path()), OwnerId::draw());
        Publisher::claim(repository.clone(), owner, Claim::First).unwrap();
        let path = dir.path().join("head-000000000001");
        fs::File::options().write(true).open(&path).unwrap().set_len(100).unwrap();
        let told = newest(&*repository).unwrap_err().to_string();
        let why = "head-000000000001, the newest head, is damaged: its checksum is wrong; where the NAS";
        assert!(told.contains(why), "{told}");
        fs::File::options().write(true).open(&path).unwrap().set_len(1 << 40).unwrap();
        let told = newest(&*repository).unwrap_err().to_string();
        assert!(told.contains("it has 1099511627776 bytes, and 1048576 is the most"), "{told}");
        Publisher::claim(repository, owner, Claim::TakeOver).unwrap_err();
    }
}
