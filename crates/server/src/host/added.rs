//! Disks and doors that are added to the running server, and those that were added to the one before.

use vmstrata_api as api;
use vmstrata_export::nbd::Address;

use super::waiting::Wanted;
use super::{Host, Table};
use crate::added::{Added, Place};
use crate::error::Error;
use crate::spec::{DiskSpec, VhostUserSpec};

impl Host {
    /// As [`Host::add_disk`], for somebody who asks the running server: its successor opens the disk, too.
    ///
    /// # Errors
    /// As [`Host::add_disk`].
    pub fn add_disk_by_hand(&self, spec: DiskSpec) -> Result<(), Error> {
        let name = spec.name.clone();
        self.add_disk(spec)?;
        self.table.lock().disk_is_added(&name);
        self.note_added();
        Ok(())
    }

    /// Opens a door for somebody who asks the running server: its successor opens it, too. Returns its number.
    ///
    /// # Errors
    /// As [`Host::add_vhost_user`] and [`Host::add_nbd`].
    pub fn add_door_by_hand(&self, door: api::DoorSpec) -> Result<u64, Error> {
        let id = match wanted(door)? {
            Wanted::VhostUser(spec) => self.add_vhost_user(spec)?,
            Wanted::Nbd(address) => self.add_nbd(&address)?,
        };
        self.table.lock().added_doors.insert(id);
        self.note_added();
        Ok(id)
    }

    /// Keeps a note of what is added, and opens what was added to the server before, unless that is to be forgotten. What cannot be opened
    /// waits: nobody is there to be told.
    ///
    /// # Errors
    /// A server that is ending.
    pub(crate) fn take_over(&self, place: Place, forget: bool) -> Result<(), Error> {
        let added = if forget { Added::default() } else { place.read() };
        *self.added.lock() = Some(place);
        for disk in added.disks {
            if let Some(spec) = self.new_disk(disk) {
                tracing::info!(disk = spec.name, "was added to the server before");
                let name = spec.name.clone();
                self.add_disk_or_wait(spec)?;
                self.table.lock().disk_is_added(&name);
            }
        }
        for door in added.doors {
            if let Some(wanted) = self.new_door(door) {
                tracing::info!(at = wanted.place(), "was added to the server before");
                let id = self.add_door_or_wait(wanted)?;
                self.table.lock().added_doors.insert(id);
            }
        }
        self.note_added();
        Ok(())
    }

    /// A disk that the options do not have.
    fn new_disk(&self, disk: api::DiskSpec) -> Option<DiskSpec> {
        let spec = DiskSpec::try_from(disk);
        let spec = spec.inspect_err(|error| tracing::error!(%error, "a disk is not taken over")).ok()?;
        self.table.lock().entry(&spec.name).is_none().then_some(spec)
    }

    /// A door that the options do not have, to a disk that is there.
    fn new_door(&self, door: api::DoorSpec) -> Option<Wanted> {
        let wanted =
            wanted(door).inspect_err(|error| tracing::error!(%error, "a door is not taken over")).ok()?;
        let table = self.table.lock();
        let leads_somewhere = match &wanted {
            Wanted::VhostUser(spec) => table.entry(&spec.disk).is_some(),
            Wanted::Nbd(_) => true,
        };
        (leads_somewhere && table.places().all(|place| place != wanted.place())).then_some(wanted)
    }

    /// Writes down what was added and is there.
    pub(super) fn note_added(&self) {
        // Held while it is written: the last change is what is read.
        let place = self.added.lock();
        let Some(place) = &*place else { return };
        let added = self.table.lock().added();
        if let Err(error) = place.write(&added) {
            tracing::error!(%error, "what was added to this server will be gone after a restart");
        }
    }
}

fn wanted(door: api::DoorSpec) -> Result<Wanted, Error> {
    Ok(match door {
        api::DoorSpec::VhostUser(asked) => Wanted::VhostUser(VhostUserSpec::try_from(asked)?),
        api::DoorSpec::Nbd(asked) => Wanted::Nbd(asked.address.parse::<Address>()?),
    })
}

impl Table {
    fn disk_is_added(&mut self, name: &str) {
        if let Some(entry) = self.disks.iter_mut().find(|entry| entry.spec.name == name) {
            entry.is_added = true;
        }
    }

    /// What was added and is there.
    fn added(&self) -> Added {
        let disks = self.disks.iter().filter(|entry| entry.is_added);
        let open = self.doors.iter().map(|(id, door)| (*id, door.spec()));
        let waiting = self.waiting.iter().map(|door| (door.id, door.wanted.spec()));
        let doors = open.chain(waiting).filter(|(id, _)| self.added_doors.contains(id));
        Added {
            disks: disks.map(|entry| (&entry.spec).into()).collect(),
            doors: doors.map(|(_, door)| door).collect(),
        }
    }

    /// Where doors are.
    fn places(&self) -> impl Iterator<Item = String> {
        let open = self.doors.iter().map(|(_, door)| place_of(&door.spec()));
        open.chain(self.waiting.iter().map(|door| door.wanted.place()))
    }
}

fn place_of(door: &api::DoorSpec) -> String {
    match door {
        api::DoorSpec::VhostUser(spec) => spec.socket.clone(),
        api::DoorSpec::Nbd(spec) => spec.address.clone(),
    }
}
