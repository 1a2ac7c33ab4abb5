//! Pins: objects that keep states of a disk, for who reads them long: a named snapshot, a clone, a disk whose layers stand on them.

use serde::{Deserialize, Serialize};
use vmstrata_repo::Repository;
use vmstrata_store::Planted;

use crate::error::{Error, Result};
use crate::head::{Epoch, EpochNumber, Head, PinId};
use crate::look::{Look, newest, read, read_head};
use crate::object::Shipment;
use crate::sealed::{seal, unseal};

const VERSION: u32 = 1;
/// The most bytes of what a pin says that it is for.
pub const PURPOSE_MAX: usize = 1000;

/// A pin that its maker has seen to be in time: the layers of its epoch stay until it is released.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pin {
    /// Its id.
    pub id: PinId,
    /// The state that it keeps.
    pub epoch: Epoch,
    /// What it is for.
    pub purpose: String,
}

/// The object that is a pin.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Stored {
    version: u32,
    purpose: String,
    epoch: Epoch,
}

impl Pin {
    /// Pins the newest epoch, or the one with this number, if it is kept.
    ///
    /// # Errors
    /// [`Error::NoHead`]; [`Error::NotKept`]; what the repository reports: a pin may then be left, see [`Pin::all`].
    ///
    /// # Panics
    /// When the purpose is longer than [`PURPOSE_MAX`].
    pub fn make(repository: &dyn Repository, wanted: Option<EpochNumber>, purpose: &str) -> Result<Self> {
        assert!(purpose.len() <= PURPOSE_MAX, "a purpose of {} bytes", purpose.len());
        let none = || Error::NoHead { repository: repository.describe() };
        let mut head = newest(repository)?.ok_or_else(none)?;
        loop {
            let Head { number, epoch, .. } = publishing(repository, head, wanted)?;
            let pin = Self { id: PinId::draw(), epoch, purpose: purpose.to_owned() };
            let looked = pin.put(repository).and_then(|()| Look::since(repository, &pin.id.name()));
            let newest = looked.and_then(|look| {
                let newest = look.heads().max().ok_or_else(none)?;
                read_head(repository, newest)
            });
            match &newest {
                Ok(newest) if newest.floor <= number || Planted::UnseenPin.is_there() => return Ok(pin),
                // Too late, or not known to be in time.
                _ => pin.release(repository)?,
            }
            head = newest?;
        }
    }

    fn put(&self, repository: &dyn Repository) -> Result<()> {
        let stored = Stored { version: VERSION, purpose: self.purpose.clone(), epoch: self.epoch.clone() };
        let mut shipment = Shipment::begin(repository, self.id.name())?;
        shipment.put(&seal(&stored))?;
        shipment.finish().map(drop)
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
            if stored.purpose.len() > PURPOSE_MAX {
                return Err(format!("its purpose is longer than {PURPOSE_MAX} bytes"));
            }
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
    let floor = head.floor;
    let mut below = head;
    while below.epoch.number > wanted {
        let Some(number) = below.number.before().filter(|number| *number >= floor) else { break };
        below = read_head(repository, number)?;
    }
    if below.epoch.number == wanted {
        return Ok(below);
    }
    Err(Error::NotKept { repository: repository.describe(), epoch: wanted })
}
