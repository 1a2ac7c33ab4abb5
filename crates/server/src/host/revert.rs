//! Going back to a snapshot: the disk is taken out, its files go back, and it is put back behind the same exports.
//!
//! ```text
//!   idle? ──► exports shut, still idle? ──no──► exports opened again, Error::Attached
//!                │ yes
//!                └─► disk closed ──► files ──► disk opened ──► exports opened
//! ```
//!
//! What a guest has read of a disk is in its memory: a disk must not become another one under it. So no guest may be
//! connected, and no NBD client, and none gets in until the disk is what it was.
//!
//! Invariant: whatever fails, the disk is behind its exports again, with the old content or the new; what cannot be opened waits.

use std::sync::Arc;

use vmstrata_api::{Event, RevertSpec, SnapshotReverted};
use vmstrata_disk::snapshot::{self, PrepareOptions, RevertOptions, now_ns};
use vmstrata_disk::{Disk, OpenOptions};
use vmstrata_tier::{find_state, revert};
use vmstrata_types::{path_from_text, path_to_text};

use super::disks::close_and_release;
use super::exports::State;
use super::reconcile::Wait;
use super::users::PATIENCE;
use super::{Host, Phase, Table};
use crate::error::Error;
use crate::spec::{DiskSpec, ExportSpec, TierSpec, check_path};

/// Who uses a disk through a mount.
const OPEN_FILE: &str = "a program that has a file of it open (`lsof` and `losetup -l` name it)";

impl Host {
    /// Makes a disk that nobody uses what it was at a snapshot.
    ///
    /// # Errors
    /// A guest, a client or a snapshot that uses the disk, no such snapshot, a read-only disk: nothing has changed. Whatever the host
    /// reports: the disk is served with its old content, or waits until it can be opened.
    pub fn revert(&self, name: &str, asked: RevertSpec) -> Result<SnapshotReverted, Error> {
        let (_change, table) = self.begin_change()?;
        asked.keep.as_deref().map_or(Ok(()), |keep| check_path("keep", keep))?;
        table.refuse_attaching(name)?;
        table.refuse_standby(name)?;
        let (spec, disk) = table.serving(name)?;
        let (spec, path, is_read_only) = (spec.clone(), disk.path().to_owned(), disk.is_read_only());
        table.check_idle(name)?;
        drop(table);
        if let Some(tier) = &spec.tier {
            return self.revert_tiered(&spec, tier, asked);
        }
        let open = self.open_options(&spec);
        let (format, subclusters) = (open.format, open.subclusters);
        let prepare = PrepareOptions { format, subclusters, ..PrepareOptions::default() };
        let open = OpenOptions { force: asked.force, ..open };
        let options = RevertOptions { keep: asked.keep.as_deref().map(path_from_text), open, prepare };
        if is_read_only {
            return Err(vmstrata_disk::Error::from(vmstrata_disk::ErrorKind::ReadOnly).into());
        }
        snapshot::find(&path, &asked.snapshot, &options.open)?;
        let names = [name.to_owned()];
        let disk = self.take_out(&names)?.pop().expect("one for each name");
        let reverted = close_and_release(name, disk)
            .and_then(|()| Ok(snapshot::revert(&path, &asked.snapshot, &options, &self.resources)?));
        let back = self.put_back(&[spec]);
        let reverted = reverted?;
        back?;
        self.tell(Event::SnapshotReverted { disk: name.to_owned(), snapshot: asked.snapshot.clone() });
        let dropped = reverted.dropped.iter().map(|layer| path_to_text(&layer.layer));
        Ok(SnapshotReverted {
            disk: name.to_owned(),
            snapshot: asked.snapshot,
            layer: path_to_text(&reverted.layer),
            dropped_layers: dropped.collect(),
        })
    }

    /// The same of a tiered disk, with all disks of its group: that state becomes the next epoch.
    fn revert_tiered(
        &self,
        spec: &DiskSpec,
        tier: &TierSpec,
        asked: RevertSpec,
    ) -> Result<SnapshotReverted, Error> {
        let name = &spec.name;
        if asked.keep.is_some() {
            return Err(Error::Tiered {
                name: name.clone(),
                what: "keep: what it was until now becomes a branch",
            });
        }
        let table = self.table.lock();
        let names = table.published_with(name);
        let specs = names.iter().filter_map(|name| Some(table.entry(name)?.spec.clone()));
        let specs: Vec<DiskSpec> = specs.collect();
        drop(table);
        let place = self.place(&specs, tier)?;
        if let Some(repository) = place.open_repository()? {
            find_state(&*repository, &asked.snapshot, now_ns())?;
        }
        let disks = self.take_out(&names)?;
        self.end_tier(name);
        let open = self.open_options(spec);
        let closed = names.iter().zip(disks).map(|(name, disk)| close_and_release(name, disk));
        let reverted = closed
            .fold(Ok(()), Result::and)
            .and_then(|()| Ok(revert(&place, &asked.snapshot, &open, &self.resources)?));
        let back = self.put_back(&specs);
        let aside = reverted?;
        back?;
        for disk in names {
            self.tell(Event::SnapshotReverted { disk, snapshot: asked.snapshot.clone() });
        }
        Ok(SnapshotReverted {
            disk: name.clone(),
            snapshot: asked.snapshot,
            layer: path_to_text(&place.disk()),
            dropped_layers: vec![path_to_text(&aside)],
        })
    }

    /// Shuts the exports of disks that are not in use, ends their jobs, and hands them out.
    fn take_out(&self, names: &[String]) -> Result<Vec<Arc<Disk>>, Error> {
        let mut table = self.unused(names, PATIENCE)?;
        let mut disks = Vec::with_capacity(names.len());
        for name in names {
            disks.push(Arc::clone(table.serving(name)?.1));
            table.check_idle(name)?;
        }
        let mut own: Vec<(u64, State)> = Vec::new();
        for name in names {
            table.set_phase(name, Phase::Closing);
            let exports = table.exports.iter_mut().filter(|export| export.is_only_for(name));
            own.extend(
                exports.map(|export| (export.id, export.shut(format!("disk '{name}' is being reverted")))),
            );
        }
        let shared = table.shared();
        drop(table);
        for export in &shared {
            names.iter().for_each(|name| export.hide(name));
        }
        // A client that came in since the check is in now, and no other comes in.
        let clients: usize =
            names.iter().flat_map(|name| shared.iter().map(|export| export.users_of(name))).sum();
        let mut by = (clients > 0).then(|| format!("an NBD client, or {OPEN_FILE}"));
        for (id, state) in own {
            if let State::VhostUser(server) = &state
                && !server.close_if_idle()
            {
                by = Some("a guest".to_owned());
                // Else it was removed meanwhile.
                if let Some(export) = self.table.lock().exports.iter_mut().find(|export| export.id == id) {
                    export.state = state;
                }
            }
        }
        if let Some(by) = by {
            let table = self.table.lock();
            let specs: Vec<DiskSpec> =
                names.iter().filter_map(|name| Some(table.entry(name)?.spec.clone())).collect();
            drop(table);
            drop(self.let_in(&specs, disks)?);
            names.iter().try_for_each(|name| self.open_exports(name))?;
            return Err(Error::Attached { name: names.join("', '"), by });
        }
        names.iter().for_each(|name| self.jobs.end(Some(name)));
        Ok(disks)
    }

    /// Opens disks that were taken out, and their exports. What cannot be opened waits.
    fn put_back(&self, specs: &[DiskSpec]) -> Result<(), Error> {
        specs.iter().for_each(|spec| self.table.lock().set_phase(&spec.name, Phase::Opening));
        let opened = self.open_and_let_in(specs);
        if let Err(error) = &opened {
            for spec in specs {
                self.table.lock().set_phase(&spec.name, Phase::Waiting(Wait::new(error)));
            }
        }
        let exports = specs.iter().map(|spec| self.open_exports(&spec.name)).fold(Ok(()), Result::and);
        for (spec, disk) in specs.iter().zip(opened?) {
            // The job that did so has ended with the disk.
            self.mend_index(&spec.name, &disk);
        }
        self.due.now();
        exports
    }

    /// Opens the exports of a disk that is served again.
    fn open_exports(&self, disk: &str) -> Result<(), Error> {
        let own: Vec<(u64, ExportSpec)> = {
            let table = self.table.lock();
            let shut =
                table.exports.iter().filter(|export| export.is_only_for(disk) && export.wait().is_some());
            shut.map(|export| (export.id, export.spec.clone())).collect()
        };
        let opened = own.iter().map(|(id, spec)| self.try_export(*id, spec)).fold(Ok(()), Result::and);
        self.waits.notify_one();
        opened
    }
}

impl Table {
    /// Refuses a disk that a guest, an NBD client or a program uses.
    fn check_idle(&self, name: &str) -> Result<(), Error> {
        let clients = self.nbd_clients(name);
        let guest = self.exports.iter().find_map(|export| export.guest_of(name));
        let by = match (guest, clients, self.open_files(name)) {
            (Some(socket), ..) => format!("the guest at {}", socket.display()),
            (None, 0, 0) => return Ok(()),
            (None, 0, _) => OPEN_FILE.to_owned(),
            (None, 1, _) => "an NBD client".to_owned(),
            (None, clients, _) => format!("{clients} NBD clients"),
        };
        Err(Error::Attached { name: name.to_owned(), by })
    }
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use vmstrata_api as api;
    use vmstrata_disk::{CreateOptions, create};

    use super::*;
    use crate::options::Options;

    #[test]
    fn a_disk_that_cannot_be_opened_again_waits_with_its_exports() {
        let dir = tempfile::tempdir().unwrap();
        let [path, aside, socket] = ["a.qcow2", "aside", "a.sock"].map(|name| dir.path().join(name));
        create(&path, &CreateOptions { size: Some(1 << 20), ..CreateOptions::default() }).unwrap();
        let host = Host::new(&Options::default(), dir.path().to_owned()).unwrap();
        let text = |path: &std::path::Path| path.to_str().unwrap().to_owned();
        let spec: DiskSpec = api::DiskSpec { path: text(&path), ..Default::default() }.try_into().unwrap();
        host.add_disk(spec.clone()).unwrap();
        let export = api::VhostUserSpec { disk: "a".into(), socket: text(&socket), ..Default::default() };
        let id = host.add_export(api::ExportSpec::VhostUser(export)).unwrap();

        let disk = host.take_out(&["a".to_owned()]).unwrap().remove(0);
        close_and_release("a", disk).unwrap();
        std::fs::rename(&path, &aside).unwrap();
        host.put_back(&[spec]).unwrap_err();
        let why = host.disks()[0].open_error.clone().expect("it waits");
        assert!(why.contains("a.qcow2") && host.disks()[0].added, "{why}");
        assert_eq!(host.export(id).unwrap().open_error.as_deref(), Some("disk 'a' is not open"));

        std::fs::rename(&aside, &path).unwrap();
        host.try_what_is_due(Instant::now() + Duration::from_secs(60));
        assert_eq!(host.disks()[0].state, api::DiskState::Serving);
        assert!(host.export(id).unwrap().open_error.is_none() && socket.exists());
        host.close().unwrap();
    }
}
