//! Disks and exports that are added to the running server, and those that were added to the one before.

use vmstrata_api as api;

use super::waiting::Wanted;
use super::{Change, Host, Table};
use crate::added::{Added, Place};
use crate::error::Error;
use crate::spec::{DiskSpec, NbdSpec, VhostUserSpec};

impl Host {
    /// As [`Host::add_disk`], for somebody who asks the running server: its successor opens the disk, too.
    ///
    /// # Errors
    /// As [`Host::add_disk`].
    pub fn add_disk_by_hand(&self, spec: DiskSpec) -> Result<(), Error> {
        let name = spec.name.clone();
        let change = self.begin_change()?.0;
        self.add_disk(spec)?;
        self.table.lock().disk_is_added(&name);
        self.note_added(&change);
        Ok(())
    }

    /// Opens an export for somebody who asks the running server: its successor opens it, too. Returns its number.
    ///
    /// # Errors
    /// As [`Host::add_vhost_user`] and [`Host::add_nbd`].
    pub fn add_export_by_hand(&self, export: api::ExportSpec) -> Result<u64, Error> {
        let wanted = wanted(export)?;
        let change = self.begin_change()?.0;
        let id = match wanted {
            Wanted::VhostUser(spec) => self.add_vhost_user(spec)?,
            Wanted::Nbd(spec) => self.add_nbd(&spec)?,
        };
        self.table.lock().export_is_added(id);
        self.note_added(&change);
        Ok(id)
    }

    /// Keeps a note of what is added, and opens what was added to the server before, unless that is to be forgotten. What cannot be opened
    /// waits: nobody is there to be told.
    ///
    /// # Errors
    /// A server that is ending.
    pub(crate) fn take_over(&self, place: Place, forget: bool) -> Result<(), Error> {
        let change = self.begin_change()?.0;
        let added = if forget { Added::default() } else { place.read() };
        for disk in added.disks {
            if let Some(spec) = self.new_disk(disk) {
                tracing::info!(disk = spec.name, "was added to the server before");
                let name = spec.name.clone();
                self.add_disk_or_wait(spec)?;
                self.table.lock().disk_is_added(&name);
            }
        }
        for export in added.exports {
            if let Some(wanted) = self.new_export(export) {
                tracing::info!(at = wanted.place(), "was added to the server before");
                let id = self.add_export_or_wait(wanted)?;
                self.table.lock().export_is_added(id);
            }
        }
        // Whoever asks this server meanwhile changes nothing of the note: it is whole at any time.
        *self.added.lock() = Some(place);
        self.note_added(&change);
        Ok(())
    }

    /// A disk that the options do not have.
    fn new_disk(&self, disk: api::DiskSpec) -> Option<DiskSpec> {
        let spec = DiskSpec::try_from(disk);
        let spec = spec.inspect_err(|error| tracing::error!(%error, "a disk is not taken over")).ok()?;
        self.table.lock().entry(&spec.name).is_none().then_some(spec)
    }

    /// An export that the options do not have, to a disk that is there.
    fn new_export(&self, export: api::ExportSpec) -> Option<Wanted> {
        let wanted = wanted(export)
            .inspect_err(|error| tracing::error!(%error, "an export is not taken over"))
            .ok()?;
        let table = self.table.lock();
        let leads_somewhere = match &wanted {
            Wanted::VhostUser(spec) => table.entry(&spec.disk).is_some(),
            Wanted::Nbd(_) => true,
        };
        (leads_somewhere && table.places().all(|place| place != wanted.place())).then_some(wanted)
    }

    /// Writes down what was added and is there, as part of the change that it is: a server that ends waits for it.
    pub(super) fn note_added(&self, _: &Change<'_>) {
        // Held while it is written: the last change is what is read.
        let place = self.added.lock();
        let Some(place) = &*place else { return };
        let added = self.table.lock().added();
        if let Err(error) = place.write(&added) {
            tracing::error!(%error, "what was added to this server will be gone after a restart");
        }
    }
}

/// What is asked for, with the socket's whole path: the successor may be started elsewhere.
fn wanted(export: api::ExportSpec) -> Result<Wanted, Error> {
    let failed = |source| Error::System { action: "find the directory it was started in", source };
    Ok(match export {
        api::ExportSpec::VhostUser(asked) => {
            let spec = VhostUserSpec::try_from(asked)?;
            let socket = std::path::absolute(&spec.socket).map_err(failed)?;
            Wanted::VhostUser(VhostUserSpec { socket, ..spec })
        }
        api::ExportSpec::Nbd(asked) => Wanted::Nbd(NbdSpec::try_from(asked)?.absolute().map_err(failed)?),
    })
}

impl Table {
    fn disk_is_added(&mut self, name: &str) {
        if let Some(entry) = self.disks.iter_mut().find(|entry| entry.spec.name == name) {
            entry.is_added = true;
        }
    }

    fn export_is_added(&mut self, id: u64) {
        let open = self.exports.iter().map(|(id, export)| (*id, export.spec()));
        let mut all = open.chain(self.waiting.iter().map(|export| (export.id, export.wanted.spec())));
        let added = all.find(|(number, _)| *number == id);
        self.added_exports.extend(added);
    }

    /// What was added and is there.
    fn added(&self) -> Added {
        let disks = self.disks.iter().filter(|entry| entry.is_added);
        Added {
            disks: disks.map(|entry| (&entry.spec).into()).collect(),
            exports: self.added_exports.values().cloned().collect(),
        }
    }

    /// Where exports are.
    fn places(&self) -> impl Iterator<Item = String> {
        let open = self.exports.iter().map(|(_, export)| place_of(&export.spec()));
        open.chain(self.waiting.iter().map(|export| export.wanted.place()))
    }
}

fn place_of(export: &api::ExportSpec) -> String {
    match export {
        api::ExportSpec::VhostUser(spec) => spec.socket.clone(),
        api::ExportSpec::Nbd(spec) => spec.address.clone(),
    }
}
