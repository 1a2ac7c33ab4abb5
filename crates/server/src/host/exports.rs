//! Exports come and go.

use std::path::Path;
use std::sync::Arc;

use vmstrata_api::{self as api, Event};
use vmstrata_disk::Disk;
use vmstrata_export::nbd::{self, Exports, Limits, Listener};
use vmstrata_export::{vhost_user, warn_if_libvirt_is_kept_out};

use super::waiting::Wanted;
use super::{Host, Phase};
use crate::error::Error;
use crate::spec::{NbdSpec, VhostUserSpec, check_guests};

/// What lets clients in.
#[derive(Debug)]
pub(super) enum Export {
    /// One disk, for one guest.
    VhostUser { spec: VhostUserSpec, server: vhost_user::Server },
    /// All disks. A server for each address, so that each can go alone.
    Nbd { spec: NbdSpec, server: Arc<nbd::Server> },
}

impl Export {
    pub(super) fn nbd(&self) -> Option<Arc<nbd::Server>> {
        match self {
            Self::VhostUser { .. } => None,
            Self::Nbd { server, .. } => Some(Arc::clone(server)),
        }
    }

    /// Shows a disk to NBD clients, if it is for those.
    pub(super) fn show(&self, name: &str, disk: &Arc<Disk>) -> Result<(), Error> {
        match self {
            Self::VhostUser { .. } => Ok(()),
            Self::Nbd { spec, server } => Ok(server.exports().add(spec.export(name, disk))?),
        }
    }

    /// Whether it goes when the disk goes.
    pub(super) fn is_only_for(&self, disk: &str) -> bool {
        matches!(self, Self::VhostUser { spec, .. } if spec.disk == disk)
    }

    /// Opens a vhost-user socket.
    pub(super) fn vhost_user(spec: VhostUserSpec, disk: &Arc<Disk>) -> Result<Self, Error> {
        let bound = vhost_user::Server::bind(&spec.socket, Arc::clone(disk), vhost_user_options(&spec));
        let server = bound.map_err(|source| Error::VhostUser { disk: spec.disk.clone(), source })?;
        Ok(Self::VhostUser { spec, server })
    }

    /// The socket at which a guest is attached.
    fn guest(&self) -> Option<&Path> {
        match self {
            Self::VhostUser { server, .. } if server.is_connected() => Some(server.path()),
            _ => None,
        }
    }

    /// The socket at which a guest uses `disk` alone.
    pub(super) fn guest_of(&self, disk: &str) -> Option<&Path> {
        self.guest().filter(|_| self.is_only_for(disk))
    }

    /// Lets no guest in any more by a vhost-user export that none is connected to; tells how it can be opened again when
    /// this one was dropped. `None` if there is a guest, or it is another kind: nothing has changed.
    pub(super) fn close_if_idle(&self) -> Option<VhostUserSpec> {
        match self {
            Self::VhostUser { spec, server } if server.close_if_idle() => Some(spec.clone()),
            _ => None,
        }
    }

    /// Lets nobody in any more and finishes what is in flight.
    pub(super) fn close(self) -> Result<(), Error> {
        match self {
            Self::VhostUser { spec, server } => {
                let what = || format!("the export {}", spec.socket.display());
                if server.shutdown() { Ok(()) } else { Err(Error::NotEnded { what: what() }) }
            }
            Self::Nbd { server, .. } => server.shutdown().map_err(Error::NbdFlush),
        }
    }

    /// Begins to close an export to a guest, and waits for nothing.
    pub(super) fn begin_close(&self) {
        if let Self::VhostUser { server, .. } = self {
            server.begin_shutdown();
        }
    }

    /// As [`Export::close`], for one whose disks are closed next, which flushes them.
    pub(super) fn close_unflushed(self) -> Result<(), Error> {
        match self {
            Self::VhostUser { .. } => self.close(),
            Self::Nbd { server, .. } => {
                server.stop();
                Ok(())
            }
        }
    }

    /// What was asked for, with a port of 0 replaced by the one that was taken.
    pub(super) fn spec(&self) -> api::ExportSpec {
        match self {
            Self::VhostUser { spec, .. } => api::ExportSpec::VhostUser(spec.into()),
            Self::Nbd { spec, .. } => api::ExportSpec::Nbd(spec.into()),
        }
    }

    pub(super) fn status(&self, id: u64, tls: bool) -> api::ExportStatus {
        match self {
            Self::VhostUser { server, .. } => api::ExportStatus {
                id,
                export: self.spec(),
                added: false,
                open_error: None,
                connections: Some(server.is_connected().into()),
                tls: false,
                counters: Some(counters(&server.stats())),
            },
            Self::Nbd { server, .. } => api::ExportStatus {
                id,
                export: self.spec(),
                added: false,
                open_error: None,
                connections: Some(server.connections() as u64),
                tls,
                counters: None,
            },
        }
    }
}

fn counters(stats: &vhost_user::Stats) -> api::ExportCounters {
    api::ExportCounters {
        requests: stats.requests,
        errors: stats.errors,
        read_bytes: stats.read_bytes,
        written_bytes: stats.written_bytes,
        kicks: stats.kicks,
        calls: stats.calls,
        polls: stats.polls,
        sleeps: stats.sleeps,
    }
}

impl Host {
    /// Opens a vhost-user socket for a disk that is served. Returns its number.
    ///
    /// # Errors
    /// No such disk; a second guest for a writable disk; a socket that cannot be had.
    pub fn add_vhost_user(&self, spec: VhostUserSpec) -> Result<u64, Error> {
        self.open_vhost_user(spec, None)
    }

    /// The same, for an export that may have waited under this number.
    pub(super) fn open_vhost_user(&self, spec: VhostUserSpec, waited: Option<u64>) -> Result<u64, Error> {
        let (_change, mut table) = self.begin_change()?;
        let (disk_spec, disk) = table.serving(&spec.disk)?;
        let others = table.exports.iter().filter_map(|(_, export)| match export {
            Export::VhostUser { spec, .. } => Some(spec),
            Export::Nbd { .. } => None,
        });
        let waiting = table.waiting.iter().filter_map(|export| match &export.wanted {
            Wanted::VhostUser(spec) if Some(export.id) != waited => Some(spec),
            _ => None,
        });
        check_guests(&spec, disk_spec.read_only, others.chain(waiting))?;
        let disk = Arc::clone(disk);
        table.check_waits(waited)?;
        let socket = spec.socket.clone();
        let export = Export::vhost_user(spec, &disk)?;
        let id = table.add_export(waited, export);
        drop(table);
        warn_if_libvirt_is_kept_out(&socket);
        self.tell(Event::ExportAdded { id });
        Ok(id)
    }

    /// Opens an address for NBD clients of all disks. Returns its number.
    ///
    /// # Errors
    /// An address that cannot be had, or that would let in whom nobody knows.
    pub fn add_nbd(&self, spec: &NbdSpec) -> Result<u64, Error> {
        self.open_nbd(spec, None)
    }

    /// The same, for an export that may have waited under this number.
    pub(super) fn open_nbd(&self, spec: &NbdSpec, waited: Option<u64>) -> Result<u64, Error> {
        let (_change, table) = self.begin_change()?;
        // Names may have to be resolved for this, which takes as long as it takes.
        drop(table);
        spec.check_clients(self.knows_nbd_clients)?;
        let listener = Listener::bind_for(&spec.address, &self.nbd_access)?;
        let spec = NbdSpec { address: listener.address().clone(), ..spec.clone() };
        let mut table = self.table.lock();
        table.check_waits(waited)?;
        let server = nbd::Server::new(Exports::new(), self.tls.clone(), Limits::default())?;
        let export = Export::Nbd { spec, server: Arc::new(server) };
        for entry in &table.disks {
            if let Phase::Serving(disk) = &entry.phase {
                export.show(&entry.spec.name, disk)?;
            }
        }
        if let Some(server) = export.nbd() {
            server.listen(listener)?;
        }
        let id = table.add_export(waited, export);
        drop(table);
        self.tell(Event::ExportAdded { id });
        Ok(id)
    }

    /// Closes an export: requests in flight are finished, its clients are let go, its disks stay.
    ///
    /// # Errors
    /// No such export; unless `force`, one that a guest is attached by: nothing has changed. What NBD clients wrote cannot be
    /// flushed: the export is gone all the same.
    pub fn remove_export(&self, id: u64, force: bool) -> Result<(), Error> {
        let (change, mut table) = self.begin_change()?;
        if let Some(at) = table.waiting.iter().position(|export| export.id == id) {
            table.waiting.remove(at);
            drop(table);
            self.export_is_gone(id);
            self.note_added(&change);
            return Ok(());
        }
        let at = table.exports.iter().position(|(number, _)| *number == id);
        let at = at.ok_or(Error::NoSuchExport { id })?;
        if let Some(guest) = table.exports[at].1.guest().filter(|_| !force) {
            return Err(Error::GuestAttached { socket: guest.to_owned() });
        }
        let (_, export) = table.exports.remove(at);
        drop(table);
        let closed = export.close();
        self.export_is_gone(id);
        self.note_added(&change);
        closed
    }
}

impl super::Table {
    pub(super) fn new_export(&mut self) -> u64 {
        self.next_export += 1;
        self.next_export
    }

    /// Refuses to open an export that waited, and that somebody has given up.
    fn check_waits(&self, waited: Option<u64>) -> Result<(), Error> {
        match waited {
            Some(id) if self.waiting.iter().all(|export| export.id != id) => Err(Error::NoSuchExport { id }),
            _ => Ok(()),
        }
    }

    /// Notes an open export under the number that it had while it was shut, or a new one, and returns that.
    pub(super) fn add_export(&mut self, number: Option<u64>, export: Export) -> u64 {
        let id = number.unwrap_or_else(|| self.new_export());
        self.waiting.retain(|export| export.id != id);
        self.exports.push((id, export));
        self.exports.sort_by_key(|(id, _)| *id);
        id
    }
}

fn vhost_user_options(spec: &VhostUserSpec) -> vhost_user::Options {
    let mut options = vhost_user::Options::default();
    if let Some(queues) = spec.queues {
        options.queues = queues.get();
        options.io_threads = options.io_threads.min(queues.get().into());
    }
    if let Some(threads) = spec.threads {
        options.io_threads = threads.get().into();
    }
    if let Some(poll_us) = spec.poll_us {
        options.poll_us = poll_us;
    }
    if let Some(serial) = &spec.serial {
        options.serial.clone_from(serial);
    }
    options.any_memory = spec.any_memory;
    options.share = spec.share;
    options.access.clone_from(&spec.access);
    options
}
