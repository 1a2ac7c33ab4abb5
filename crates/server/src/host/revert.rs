//! Going back to a snapshot: the disk is taken out, its files go back, and it is put back behind the same exports.
//!
//! ```text
//!   idle? ──► exports shut, no one came in between? ──no──► exports opened again, Error::Attached
//!                │ yes
//!                └─► disk closed ──► files ──► disk opened ──► exports opened
//! ```
//!
//! What a guest has read of a disk is in its memory: a disk must not become another one under it. So no guest may be
//! connected, and no NBD client, and none gets in until the disk is what it was.
//!
//! Invariant: whatever fails, the disk is behind its exports again, with the old content or the new; only a disk that cannot
//! be opened any more is gone.

use std::path::PathBuf;
use std::sync::Arc;

use vmstrata_api::{Event, RevertSpec, SnapshotReverted};
use vmstrata_disk::snapshot::{self, PrepareOptions, RevertOptions};
use vmstrata_disk::{Disk, OpenOptions};

use super::disks::close_and_release;
use super::exports::Export;
use super::users::PATIENCE;
use super::{Host, Phase, Table};
use crate::error::Error;
use crate::spec::{DiskSpec, VhostUserSpec, check_path};

/// The exports of a disk that is taken out, with their numbers.
type Exports = Vec<(u64, VhostUserSpec)>;

impl Host {
    /// Makes a disk that nobody uses what it was at a snapshot.
    ///
    /// # Errors
    /// A guest, a client or a snapshot that uses the disk, no such snapshot, a read-only disk: nothing has changed. Whatever the host
    /// reports: the disk is served as it was, or is gone if it cannot be opened again.
    pub fn revert(&self, name: &str, asked: RevertSpec) -> Result<SnapshotReverted, Error> {
        let (change, table) = self.begin_change()?;
        asked.keep.as_deref().map_or(Ok(()), |keep| check_path("keep", keep))?;
        let (spec, disk) = table.serving(name)?;
        let (spec, path, is_read_only) = (spec.clone(), disk.path().to_owned(), disk.is_read_only());
        table.check_idle(name)?;
        drop(table);
        let open = self.open_options(&spec);
        let prepare = PrepareOptions { format: open.format, ..PrepareOptions::default() };
        let open = OpenOptions { force: asked.force, ..open };
        let options = RevertOptions { keep: asked.keep.map(PathBuf::from), open, prepare };
        if is_read_only {
            return Err(vmstrata_disk::Error::from(vmstrata_disk::ErrorKind::ReadOnly).into());
        }
        snapshot::find(&path, &asked.snapshot, &options.open)?;
        let (disk, exports) = self.take_out(name).inspect_err(|_| self.note_added(&change))?;
        let reverted = close_and_release(name, disk)
            .and_then(|()| Ok(snapshot::revert(&path, &asked.snapshot, &options, &self.resources)?));
        let back = self.put_back(&spec, exports).inspect_err(|_| self.note_added(&change));
        let reverted = reverted?;
        back?;
        self.tell(Event::SnapshotReverted { disk: name.to_owned(), snapshot: asked.snapshot.clone() });
        let dropped = reverted.dropped.iter().map(|layer| layer.layer.display().to_string());
        Ok(SnapshotReverted {
            disk: name.to_owned(),
            snapshot: asked.snapshot,
            layer: reverted.layer.display().to_string(),
            dropped_layers: dropped.collect(),
        })
    }

    /// Shuts the exports of a disk that nobody uses, ends its jobs, and hands it out.
    fn take_out(&self, name: &str) -> Result<(Arc<Disk>, Exports), Error> {
        let mut table = self.unused(name, PATIENCE)?;
        let disk = Arc::clone(table.serving(name)?.1);
        table.check_idle(name)?;
        table.set_phase(name, Phase::Closing);
        let own: Vec<(u64, Export)> =
            table.exports.extract_if(.., |(_, export)| export.is_only_for(name)).collect();
        let shared = table.nbd();
        drop(table);
        for export in &shared {
            export.exports().remove(name);
        }
        // Whoever came in since the check is in now, and nobody comes in any more.
        let clients: usize = shared.iter().map(|export| export.connections_of(name)).sum();
        let mut by = (clients > 0).then(|| "an NBD client".to_owned());
        let mut exports = Exports::new();
        let mut stay = Vec::new();
        for (id, export) in own {
            match export.close_if_idle() {
                Some(spec) => exports.push((id, spec)),
                None => {
                    by = Some("a guest".to_owned());
                    stay.push((id, export));
                }
            }
        }
        self.table.lock().exports.extend(stay);
        if let Some(by) = by {
            let spec = self.table.lock().entry(name).map(|entry| entry.spec.clone());
            let spec = spec.ok_or_else(|| Error::NoSuchDisk { name: name.to_owned() })?;
            let disk = self.let_in(&spec, disk)?;
            self.open_exports(&disk, exports)?;
            return Err(Error::Attached { name: name.to_owned(), by });
        }
        self.jobs.end(Some(name));
        Ok((disk, exports))
    }

    /// Opens a disk that was taken out, and its exports.
    fn put_back(&self, spec: &DiskSpec, exports: Exports) -> Result<(), Error> {
        self.table.lock().set_phase(&spec.name, Phase::Opening);
        match self.open_and_let_in(spec) {
            Ok(disk) => {
                let opened = self.open_exports(&disk, exports);
                // The job that did so has ended with the disk.
                self.mend_index(&spec.name, &disk);
                opened
            }
            Err(error) => {
                self.table.lock().forget(&spec.name);
                exports.iter().for_each(|(id, _)| self.export_is_gone(*id));
                self.tell(Event::DiskRemoved { disk: spec.name.clone(), error: Some(error.to_string()) });
                Err(error)
            }
        }
    }

    /// Opens the exports of a disk that is served again. One that cannot be is gone; the others are opened all the same.
    fn open_exports(&self, disk: &Arc<Disk>, exports: Exports) -> Result<(), Error> {
        let mut result = Ok(());
        for (id, spec) in exports {
            match Export::vhost_user(spec, disk) {
                Ok(export) => {
                    self.table.lock().add_export(Some(id), export);
                }
                Err(error) => {
                    self.export_is_gone(id);
                    result = result.and(Err(error));
                }
            }
        }
        result
    }
}

impl Table {
    /// Refuses a disk that a guest or an NBD client uses.
    fn check_idle(&self, name: &str) -> Result<(), Error> {
        let clients = self.nbd_clients(name);
        let guest = self.exports.iter().find_map(|(_, export)| export.guest_of(name));
        let by = match (guest, clients) {
            (Some(socket), _) => format!("the guest at {}", socket.display()),
            (None, 0) => return Ok(()),
            (None, 1) => "an NBD client".to_owned(),
            (None, clients) => format!("{clients} NBD clients"),
        };
        Err(Error::Attached { name: name.to_owned(), by })
    }
}
