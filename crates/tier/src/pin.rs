//! Pins: objects that keep states of a disk, for who reads them long: a named snapshot, a clone, a disk whose layers stand on them.

use serde::{Deserialize, Serialize};
use vmstrata_qcow2::snapshot_info::is_snapshot_name;
use vmstrata_repo::Repository;
use vmstrata_store::Planted;
use vmstrata_store::proc::host_name;

use crate::error::{Error, Result};
use crate::head::{Epoch, EpochNumber, Head, OwnerId, PinId, as_text};
use crate::look::{Heads, Look, newest, read, read_head};
use crate::object::Shipment;
use crate::sealed::{seal, unseal};

const VERSION: u32 = 1;
/// The most bytes of text that say who reads.
const WHO_MAX: usize = 1000;

/// What a pin is for.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub enum Purpose {
    /// A host's copy of the disk stands on the state.
    Copy {
        /// Whose copy it is.
        #[serde(with = "as_text")]
        owner: OwnerId,
        /// The host's name.
        host: String,
    },
    /// The state has a name.
    Snapshot {
        /// The snapshot's name, as one of an ordinary disk.
        name: String,
        /// When it was taken, in nanoseconds since 1970, by the clock of whoever took it. Name and time together identify a snapshot.
        taken_ns: u64,
        /// Its labels.
        labels: Vec<(String, String)>,
    },
    /// Somebody reads it.
    Reader(String),
}

/// A pin that its maker has seen to be in time: the layers of its epoch stay until it is released.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pin {
    /// Its id.
    pub id: PinId,
    /// The state that it keeps.
    pub epoch: Epoch,
    /// What it is for.
    pub purpose: Purpose,
}

/// The object that is a pin.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Stored {
    version: u32,
    purpose: Purpose,
    epoch: Epoch,
}

impl Purpose {
    /// Somebody on this host who reads.
    pub fn reader(who: &str) -> Self {
        let mut who = format!("{who} at {}", host_name());
        who.truncate(who.floor_char_boundary(WHO_MAX));
        Self::Reader(who)
    }

    /// Whether a copy of this owner stands on the state.
    pub(crate) fn is_copy_of(&self, owner: OwnerId) -> bool {
        matches!(self, Self::Copy { owner: of, .. } if *of == owner)
    }

    fn check(&self) -> Result<(), String> {
        match self {
            Self::Snapshot { name, .. } if !is_snapshot_name(name) => Err(format!("{name:?} is no name")),
            Self::Reader(who) if who.len() > WHO_MAX => Err("its reader has a long name".to_owned()),
            _ => Ok(()),
        }
    }
}

impl Pin {
    /// Pins the newest epoch, or the one with this number, if it is kept.
    ///
    /// # Errors
    /// [`Error::NoHead`]; [`Error::NotKept`]; what the repository reports: a pin may then be left, see [`Pin::all`].
    pub fn make(repository: &dyn Repository, wanted: Option<EpochNumber>, purpose: &Purpose) -> Result<Self> {
        let head = newest(repository)?;
        let head = head.ok_or_else(|| Error::NoHead { repository: repository.describe() })?;
        Self::make_from(repository, head, wanted, purpose)
    }

    /// The same, for who knows a head.
    pub(crate) fn make_from(
        repository: &dyn Repository,
        mut head: Head,
        wanted: Option<EpochNumber>,
        purpose: &Purpose,
    ) -> Result<Self> {
        let none = || Error::NoHead { repository: repository.describe() };
        loop {
            let Head { number, epoch, .. } = publishing(repository, head.clone(), wanted)?;
            let pin = Self { id: PinId::draw(), epoch, purpose: purpose.clone() };
            let looked = pin.put(repository).and_then(|()| Look::since(repository, &pin.id.name()));
            let newest = looked.and_then(|look| match look.heads().max().ok_or_else(none)? {
                same if same == head.number => Ok(head),
                newest => read_head(repository, newest),
            });
            match &newest {
                Ok(newest) if newest.floor <= number || Planted::UnseenPin.is_there() => return Ok(pin),
                // Too late, or not known to be in time.
                _ => pin.release(repository)?,
            }
            head = newest?;
        }
    }

    pub(crate) fn put(&self, repository: &dyn Repository) -> Result<()> {
        let stored = Stored { version: VERSION, purpose: self.purpose.clone(), epoch: self.epoch.clone() };
        let mut shipment = Shipment::begin(repository, self.id.name())?;
        shipment.put(&seal(&stored))?;
        shipment.finish().map(drop)
    }

    /// Pins the state that this pin keeps once more.
    ///
    /// # Errors
    /// [`Error::NoState`] where this pin is gone; what the repository reports.
    pub fn again(&self, repository: &dyn Repository, purpose: &Purpose) -> Result<Self> {
        self.again_as(repository, purpose, PinId::draw())
    }

    /// The same by an id that was drawn before.
    pub(crate) fn again_as(&self, repository: &dyn Repository, purpose: &Purpose, id: PinId) -> Result<Self> {
        let pin = Self { id, epoch: self.epoch.clone(), purpose: purpose.clone() };
        let looked = pin.put(repository).and_then(|()| Look::since(repository, &pin.id.name()));
        // Whoever deletes the state has looked at the pins after this one was released, and so after the new one was made.
        let is_there = looked.map(|look| look.pins().any(|id| id == self.id));
        if !matches!(is_there, Ok(true)) {
            pin.release(repository)?;
            is_there?;
            let why = "the snapshot was deleted meanwhile".to_owned();
            return Err(Error::NoState { repository: repository.describe(), why });
        }
        Ok(pin)
    }

    /// The pin with this id.
    ///
    /// # Errors
    /// One that is gone or damaged, a repository that cannot be read.
    pub fn read(repository: &dyn Repository, id: PinId) -> Result<Self> {
        let Stored { purpose, epoch, .. } = read(repository, &id.name(), |bytes| {
            let stored: Stored = unseal(bytes)?;
            if stored.version != VERSION {
                return Err(format!("it is of version {}, not {VERSION}", stored.version));
            }
            stored.purpose.check()?;
            stored.epoch.check()?;
            Ok(stored)
        })?;
        Ok(Self { id, epoch, purpose })
    }

    /// All pins, those included that somebody failed to make.
    ///
    /// # Errors
    /// As [`Pin::read`].
    pub fn all(repository: &dyn Repository) -> Result<Vec<Self>> {
        Look::any(repository)?.pins().map(|id| Self::read(repository, id)).collect()
    }

    /// Takes the pin away. Its state may then be deleted.
    ///
    /// # Errors
    /// When it may still be there.
    pub fn release(&self, repository: &dyn Repository) -> Result<()> {
        Ok(repository.delete(&self.id.name())?)
    }
}

/// The newest head, from this one down to its floor, that publishes the wanted epoch; without one this one.
fn publishing(repository: &dyn Repository, head: Head, wanted: Option<EpochNumber>) -> Result<Head> {
    let Some(wanted) = wanted else { return Ok(head) };
    let mut kept = Heads::from(repository, head);
    let is_past = |head: &Result<Head>| head.as_ref().map_or(true, |head| head.epoch.number <= wanted);
    let found = kept.find(is_past).transpose()?.filter(|head| head.epoch.number == wanted);
    found.ok_or_else(|| Error::NotKept { repository: repository.describe(), epoch: wanted })
}
