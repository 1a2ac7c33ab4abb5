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
//! - Lookups and listings may be old. They say only where to try next; no decision depends on one, nor on a clock or a lock.
//! - After an error the process reads the head with that number: its create may have happened. While there is none, the
//!   create may still happen, so that it tries the same head again, and no other.
//!
//! A head names objects that are complete, on stable storage and read back ([`ship`](crate::ship)).

use std::io::ErrorKind;
use std::sync::Arc;

use vmstrata_repo::Repository;
use vmstrata_store::Planted;

use crate::error::{Error, Result};
use crate::head::{Epoch, Generation, HEAD_BYTES_MAX, HEAD_PREFIX, Head, HeadNumber, OwnerId};
use crate::object::Shipment;

/// Why a process begins to publish.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Claim {
    /// Nobody has published the disk yet.
    First,
    /// Its copy of the disk published last: the process was started again.
    Resume,
    /// Whoever published last does not run any more, as the caller made sure.
    TakeOver,
}

impl Claim {
    /// Refuses a claim on top of the head `below`.
    fn check(self, repository: &dyn Repository, owner: OwnerId, below: Option<&Head>) -> Result<()> {
        match (self, below) {
            (Self::First, None) | (Self::TakeOver, Some(_)) => Ok(()),
            (_, Some(head)) if head.owner == owner => Ok(()),
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
}

impl Publisher {
    /// Begins a generation. When this returns, nobody who claimed the disk before publishes it any more.
    ///
    /// # Errors
    /// [`Error::Fenced`], [`Error::NoHead`] when the claim is not justified; a repository that cannot be read or written: the claim
    /// may then still succeed, which fences others, and can be made again.
    pub fn claim(repository: Arc<dyn Repository>, owner: OwnerId, claim: Claim) -> Result<Self> {
        let mut below = newest(&*repository)?;
        loop {
            claim.check(&*repository, owner, below.as_ref())?;
            let (number, generation, epoch) = match &below {
                None => (HeadNumber::FIRST, Generation::NONE, Epoch::NONE),
                Some(head) => (head.number.next(), head.generation, head.epoch.clone()),
            };
            let head = Head::new(number, generation.next(), owner, epoch);
            match (create(&*repository, &head)?, below) {
                (None, _) => return Ok(Self { repository, head, unsettled: None }),
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

    /// Publishes an epoch whose new objects were shipped.
    ///
    /// # Errors
    /// [`Error::Fenced`]: this process publishes nothing any more. Else it may happen or have happened, and can be tried again.
    ///
    /// # Panics
    /// When an epoch before it failed otherwise than by [`Error::Fenced`], and this is another one; when its number is not higher than
    /// that of the last; when it has more than [`OBJECTS_MAX`](crate::OBJECTS_MAX) objects.
    pub fn publish(&mut self, epoch: Epoch) -> Result<()> {
        assert!(epoch.number > self.head.epoch.number, "epoch {} again", epoch.number);
        let head = Head::new(self.head.number.next(), self.head.generation, self.head.owner, epoch);
        let is_settled = self.unsettled.as_ref().is_none_or(|unsettled| *unsettled == head);
        assert!(is_settled, "{} may still be created with another epoch", head.number);
        self.unsettled = Some(head.clone());
        let taken = create(&*self.repository, &head)?;
        self.unsettled = None;
        match taken {
            None => self.head = head,
            Some(by) if Planted::Unfenced.is_there() => {
                self.head.number = by.number;
                return self.publish(head.epoch);
            }
            Some(by) => return Err(fenced(&*self.repository, by)),
        }
        Ok(())
    }
}

fn fenced(repository: &dyn Repository, by: Head) -> Error {
    Error::Fenced { repository: repository.describe(), by: Box::new(by) }
}

/// The newest head, or an earlier one where the repository's listing is old.
///
/// # Errors
/// A repository that cannot be read, a damaged head.
pub fn newest(repository: &dyn Repository) -> Result<Option<Head>> {
    let heads = repository.list(HEAD_PREFIX)?;
    let Some(number) = heads.iter().filter_map(|head| HeadNumber::of(head.name.as_str())).max() else {
        return Ok(None);
    };
    read(repository, number).map(Some)
}

/// Creates a head; returns the one that has its number, where that is another.
fn create(repository: &dyn Repository, head: &Head) -> Result<Option<Head>> {
    let created = Shipment::begin(repository, head.number.name()).and_then(|mut shipment| {
        shipment.put(&head.encode())?;
        shipment.finish()
    });
    let Err(error) = created else { return Ok(None) };
    match read(repository, head.number) {
        Ok(found) => Ok((found != *head).then_some(found)),
        Err(Error::Repository(absent)) if absent.kind() == ErrorKind::NotFound => Err(error),
        Err(error) => Err(error),
    }
}

fn read(repository: &dyn Repository, number: HeadNumber) -> Result<Head> {
    let name = number.name();
    let object = repository.open(&name)?;
    let decoded = if object.len() > HEAD_BYTES_MAX {
        Err(format!("it has {} bytes, and {HEAD_BYTES_MAX} is the most", object.len()))
    } else {
        let mut bytes = vec![0; object.len() as usize];
        object.read_at(0, &mut bytes)?;
        Head::decode(number, &bytes)
    };
    decoded.map_err(|why| Error::BadHead { repository: repository.describe(), name, why })
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::PermissionsExt;
    use std::path::Path;

    use tempfile::TempDir;
    use vmstrata_repo::DirectoryRepository;

    use super::*;
    use crate::head::is_object_name;
    use crate::ship;

    fn directory() -> TempDir {
        tempfile::Builder::new().permissions(fs::Permissions::from_mode(0o700)).tempdir().unwrap()
    }

    fn repository(at: &Path) -> Arc<dyn Repository> {
        Arc::new(DirectoryRepository::open(at, is_object_name).unwrap())
    }

    /// Ships a layer, and the epoch that has it on top of the last one.
    fn next_epoch(publisher: &Publisher) -> Epoch {
        let mut epoch = publisher.head().epoch.clone();
        epoch.objects.push(ship(&*publisher.repository, 0, |shipment| shipment.put(b"layer")).unwrap());
        Epoch { number: epoch.number.next(), size: 4096, ..epoch }
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

    #[test]
    fn a_damaged_or_huge_head_is_an_error_that_names_it() {
        let dir = directory();
        let (repository, owner) = (repository(dir.path()), OwnerId::draw());
        Publisher::claim(repository.clone(), owner, Claim::First).unwrap();
        let path = dir.path().join("head-000000000001");
        fs::File::options().write(true).open(&path).unwrap().set_len(100).unwrap();
        let told = newest(&*repository).unwrap_err().to_string();
        assert!(told.ends_with("head-000000000001 is damaged: its checksum is wrong"), "{told}");
        fs::File::options().write(true).open(&path).unwrap().set_len(1 << 40).unwrap();
        let told = newest(&*repository).unwrap_err().to_string();
        assert!(told.contains("it has 1099511627776 bytes, and 1048576 is the most"), "{told}");
        Publisher::claim(repository, owner, Claim::TakeOver).unwrap_err();
    }
}
