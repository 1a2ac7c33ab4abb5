//! What a repository of a disk holds.
//!
//! Numbers of heads are deleted, and a process that paused may create one again, or read one that was. So an old listing, and a create
//! that succeeds, say nothing by themselves. A [`Look`] does: it shows an object that the process itself created, so that
//! it is no older than that. The newest head is always there; so is one for [`KEEP`] after that. A look that takes less than half as
//! long therefore meets the head that was the newest when the look began, or a newer one. What is created at a number that was free
//! again lies below.

use std::collections::HashSet;
use std::time::Duration;

use vmstrata_repo::{ObjectName, Repository};
use vmstrata_store::proc::since_boot;

use crate::error::{Error, Result};
use crate::head::{EpochNumber, HEAD_BYTES_MAX, HEAD_PREFIX, Head, HeadNumber, ObjectId, PinId};

/// How long a head that is not the newest any more is kept, with what it names.
pub const KEEP: Duration = Duration::from_secs(600);

/// The names of all objects, as they were at a moment since an object was created. See the module documentation.
#[derive(Debug)]
pub(crate) struct Look(Vec<ObjectName>);

impl Look {
    /// Looks at what is there since this process created `own`. Without that it shows a newer head, if `own` is a head: then `own` is gone.
    pub(crate) fn since(repository: &dyn Repository, own: &ObjectName) -> Result<Self> {
        let begun = since_boot();
        let look = Self(repository.names("")?);
        let is_passed = HeadNumber::of(own.as_str()).is_some_and(|own| look.heads().any(|other| other > own));
        // The clocks of two hosts may differ, but none runs twice as fast as another.
        if !is_passed && (since_boot() - begun > KEEP / 2 || !look.0.contains(own)) {
            return Err(Error::OldListing { repository: repository.describe(), name: own.clone() });
        }
        Ok(look)
    }

    /// What a listing of any age shows.
    pub(crate) fn any(repository: &dyn Repository) -> Result<Self> {
        Ok(Self(repository.names("")?))
    }

    pub(crate) fn heads(&self) -> impl Iterator<Item = HeadNumber> {
        self.0.iter().filter_map(|name| HeadNumber::of(name.as_str()))
    }

    pub(crate) fn layers(&self) -> impl Iterator<Item = ObjectId> {
        self.0.iter().filter_map(|name| ObjectId::of(name.as_str()))
    }

    /// The first of these names that is not there.
    pub(crate) fn first_missing(&self, names: impl Iterator<Item = ObjectName>) -> Option<ObjectName> {
        let there: HashSet<&ObjectName> = self.0.iter().collect();
        names.into_iter().find(|name| !there.contains(name))
    }

    pub(crate) fn pins(&self) -> impl Iterator<Item = PinId> {
        self.0.iter().filter_map(|name| PinId::of(name.as_str()))
    }
}

/// The newest head, or an earlier one where the repository's listing is old.
///
/// # Errors
/// A repository that cannot be read, a damaged head; `NotFound` where an old listing names a head that is gone.
pub fn newest(repository: &dyn Repository) -> Result<Option<Head>> {
    let heads = repository.names(HEAD_PREFIX)?;
    let newest = heads.iter().filter_map(|name| HeadNumber::of(name.as_str())).max();
    newest.map(|number| read_newest(repository, number)).transpose()
}

/// The head with this number, which is the highest there is.
pub(crate) fn read_newest(repository: &dyn Repository, number: HeadNumber) -> Result<Head> {
    read_head(repository, number).map_err(|error| match error {
        Error::Damaged { repository, name, why } => Error::DamagedNewest { repository, name, why },
        error => error,
    })
}

/// The names of a repository's disks, which never change; none before it has a state. Damaged heads are passed over.
///
/// # Errors
/// As [`newest`].
pub fn disks(repository: &dyn Repository) -> Result<Vec<String>> {
    let mut numbers: Vec<HeadNumber> = Look::any(repository)?.heads().collect();
    numbers.sort_unstable();
    for number in numbers.into_iter().rev() {
        match read_head(repository, number) {
            Err(Error::Damaged { .. }) => {}
            head => return Ok(head?.epoch.disks.into_iter().map(|disk| disk.name).collect()),
        }
    }
    Ok(Vec::new())
}

/// The epochs that the newest head keeps, its own first, each with the newest head that publishes it. To read one, [pin](crate::Pin) it.
///
/// # Errors
/// As [`newest`].
pub fn states(repository: &dyn Repository) -> Result<Vec<Head>> {
    let mut states: Vec<Head> = Vec::new();
    for head in Heads::of(repository)? {
        let head = head?;
        if states.last().is_none_or(|last| last.epoch.number != head.epoch.number) {
            states.push(head);
        }
    }
    Ok(states)
}

/// A head and those that it keeps, newest first, each read when it is asked for. Those that a NAS has damaged are passed over, and
/// those of later epochs, from which a take-over has gone back: [`newest_whole`](crate::newest_whole).
pub(crate) struct Heads<'a> {
    repository: &'a dyn Repository,
    first: Option<Head>,
    /// Of the one after that, and of the last.
    rest: Option<[HeadNumber; 2]>,
    epoch: EpochNumber,
}

impl<'a> Heads<'a> {
    /// From the newest on.
    pub(crate) fn of(repository: &'a dyn Repository) -> Result<Self> {
        let newest = newest(repository)?;
        let none = Self { repository, first: None, rest: None, epoch: EpochNumber::NONE };
        Ok(newest.map_or(none, |newest| Self::from(repository, newest)))
    }

    /// From this one on.
    pub(crate) fn from(repository: &'a dyn Repository, first: Head) -> Self {
        let rest = first.number.before().map(|before| [before, first.floor]);
        Self { repository, epoch: first.epoch.number, first: Some(first), rest }
    }
}

impl Iterator for Heads<'_> {
    type Item = Result<Head>;

    fn next(&mut self) -> Option<Self::Item> {
        if let Some(first) = self.first.take() {
            return Some(Ok(first));
        }
        loop {
            let [number, floor] = self.rest.filter(|[number, floor]| number >= floor)?;
            self.rest = number.before().map(|before| [before, floor]);
            match read_head(self.repository, number) {
                Err(Error::Damaged { .. }) => {}
                Ok(head) if head.epoch.number > self.epoch => {}
                head => {
                    self.epoch = head.as_ref().map_or(self.epoch, |head| head.epoch.number);
                    return Some(head);
                }
            }
        }
    }
}

pub(crate) fn read_head(repository: &dyn Repository, number: HeadNumber) -> Result<Head> {
    read(repository, &number.name(), |bytes| Head::decode(number, bytes))
}

/// Reads a head or a pin.
pub(crate) fn read<T>(
    repository: &dyn Repository,
    name: &ObjectName,
    decode: impl FnOnce(&[u8]) -> Result<T, String>,
) -> Result<T> {
    let object = repository.open(name)?;
    let decoded = if object.len() > HEAD_BYTES_MAX {
        Err(format!("it has {} bytes, and {HEAD_BYTES_MAX} is the most", object.len()))
    } else {
        let mut bytes = vec![0; object.len() as usize];
        object.read_at(0, &mut bytes)?;
        decode(&bytes)
    };
    decoded.map_err(|why| Error::Damaged { repository: repository.describe(), name: name.clone(), why })
}
