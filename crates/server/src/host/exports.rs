//! Exports come and go.

use std::path::Path;
use std::sync::Arc;

use vmstrata_api::{self as api, Event};
use vmstrata_disk::Disk;
use vmstrata_export::fuse::{self, Mount, Node};
use vmstrata_export::nbd::{self, Exports, Limits, Listener};
use vmstrata_export::{vhost_user, warn_if_libvirt_is_kept_out};

use super::reconcile::Wait;
use super::tree::{AllDisks, Tree};
use super::{Host, Table};
use crate::error::Error;
use crate::spec::{ExportSpec, FuseSpec, NbdSpec, VhostUserSpec, check_guests};

/// An export that is wanted.
#[derive(Debug)]
pub(super) struct Export {
    pub(super) id: u64,
    /// What was asked for; once it is open, with the port that was taken in place of 0.
    pub(super) spec: ExportSpec,
    /// Whether it was added while the server, or the one before it, ran.
    pub(super) is_added: bool,
    pub(super) state: State,
}

/// What lets clients in.
#[derive(Debug)]
pub(super) enum State {
    /// Nothing yet.
    Waiting(Wait),
    /// One disk, for one guest.
    VhostUser(vhost_user::Server),
    /// All disks. A server for each address, so that each can go alone.
    Nbd(Arc<nbd::Server>),
    /// All disks, as files.
    Fuse(Arc<Mount>),
}

/// An export that all disks go through.
#[derive(Clone, Debug)]
pub(super) enum Shared {
    Nbd(Arc<nbd::Server>),
    Fuse(Arc<Mount>),
}

impl Shared {
    /// Who uses a disk through it.
    pub(super) fn users_of(&self, disk: &str) -> usize {
        match self {
            Self::Nbd(server) => server.connections_of(disk),
            Self::Fuse(mount) => mount.open_files_of(disk),
        }
    }

    /// Lets those go who use a disk. Clients that still wait find the disk closed.
    pub(super) fn withdraw(&self, disk: &str) {
        match self {
            Self::Nbd(server) => server.withdraw(disk),
            Self::Fuse(mount) => mount.withdraw(disk),
        };
    }

    /// Lets no more in to a disk. Files ask the table.
    pub(super) fn hide(&self, disk: &str) {
        if let Self::Nbd(server) = self {
            server.exports().remove(disk);
        }
    }
}

impl Export {
    pub(super) fn shared(&self) -> Option<Shared> {
        match &self.state {
            State::Nbd(server) => Some(Shared::Nbd(Arc::clone(server))),
            State::Fuse(mount) => Some(Shared::Fuse(Arc::clone(mount))),
            State::Waiting(_) | State::VhostUser(_) => None,
        }
    }

    pub(super) fn vhost_user(&self) -> Option<&vhost_user::Server> {
        match &self.state {
            State::VhostUser(server) => Some(server),
            _ => None,
        }
    }

    pub(super) fn wait(&self) -> Option<&Wait> {
        match &self.state {
            State::Waiting(wait) => Some(wait),
            _ => None,
        }
    }

    pub(super) fn wait_mut(&mut self) -> Option<&mut Wait> {
        match &mut self.state {
            State::Waiting(wait) => Some(wait),
            _ => None,
        }
    }

    /// Shows a disk to NBD clients, if it is open for those.
    pub(super) fn show(&self, name: &str, disk: &Arc<Disk>) -> Result<(), Error> {
        match (&self.spec, &self.state) {
            (ExportSpec::Nbd(spec), State::Nbd(server)) => {
                Ok(server.exports().add(spec.export(name, disk))?)
            }
            _ => Ok(()),
        }
    }

    /// Whether it goes when the disk goes.
    pub(super) fn is_only_for(&self, disk: &str) -> bool {
        self.spec.only_disk() == Some(disk)
    }

    /// The socket at which a guest is attached.
    fn guest(&self) -> Option<&Path> {
        self.vhost_user().filter(|server| server.is_connected()).map(vhost_user::Server::path)
    }

    /// The socket at which a guest uses `disk` alone.
    pub(super) fn guest_of(&self, disk: &str) -> Option<&Path> {
        self.guest().filter(|_| self.is_only_for(disk))
    }

    /// Shuts it for an operation that opens it again, and returns what it was.
    pub(super) fn shut(&mut self, why: String) -> State {
        std::mem::replace(&mut self.state, State::Waiting(Wait::shut(why)))
    }

    pub(super) fn status(&self, server_has_tls: bool) -> api::ExportStatus {
        let (open_error, connections, counters) = match &self.state {
            State::Waiting(wait) => (Some(wait.why.clone()), None, None),
            State::VhostUser(server) => {
                (None, Some(server.is_connected().into()), Some(counters(&server.stats())))
            }
            State::Nbd(server) => (None, Some(server.connections() as u64), None),
            State::Fuse(mount) => {
                let gone =
                    || "someone has unmounted it: remove the export, or add it again after that".to_owned();
                (mount.has_ended().then(gone), Some(mount.open_files() as u64), None)
            }
        };
        api::ExportStatus {
            id: self.id,
            export: (&self.spec).into(),
            added: self.is_added,
            open_error,
            connections,
            has_spoken: matches!(&self.state, State::VhostUser(server) if server.has_spoken()),
            tls: server_has_tls && matches!(self.spec, ExportSpec::Nbd(_)),
            counters,
        }
    }
}

impl State {
    /// Refuses new clients and finishes what is in flight.
    pub(super) fn close(self) -> Result<(), Error> {
        match self {
            Self::Waiting(_) => Ok(()),
            Self::VhostUser(server) => {
                let what = format!("the export {}", server.path().display());
                if server.shutdown() { Ok(()) } else { Err(Error::NotEnded { what }) }
            }
            Self::Nbd(server) => server.shutdown().map_err(Error::NbdFlush),
            Self::Fuse(mount) => {
                mount.stop();
                Ok(())
            }
        }
    }

    /// Begins to close an export to a guest, and waits for nothing.
    pub(super) fn begin_close(&self) {
        if let Self::VhostUser(server) = self {
            server.begin_shutdown();
        }
    }

    /// As [`State::close`], for one whose disks are closed next, which flushes them.
    pub(super) fn close_unflushed(self) -> Result<(), Error> {
        match self {
            Self::Nbd(server) => {
                server.stop();
                Ok(())
            }
            other => other.close(),
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
    /// Opens an export, which waits under the number `waits` if it was wanted before. Returns its number.
    pub(super) fn open_export(&self, spec: &ExportSpec, waits: Option<u64>) -> Result<u64, Error> {
        let (_change, table) = self.begin_change()?;
        let (mut table, spec, state) = match spec {
            ExportSpec::VhostUser(spec) => {
                let state = bind_vhost_user(&table, spec, waits)?;
                (table, ExportSpec::VhostUser(spec.clone()), state)
            }
            ExportSpec::Nbd(spec) => {
                // Names may have to be resolved for this, which takes as long as it takes.
                drop(table);
                spec.check_clients(self.knows_nbd_clients)?;
                let listener = Listener::bind_for(&spec.address, &self.nbd_access)?;
                let spec = NbdSpec { address: listener.address().clone(), ..spec.clone() };
                let table = self.table.lock();
                table.check_waits(waits)?;
                let server = nbd::Server::new(Exports::new(), self.tls.clone(), Limits::default())?;
                for (name, disk) in table.served() {
                    server.exports().add(spec.export(name, disk))?;
                }
                server.listen(listener)?;
                (table, ExportSpec::Nbd(spec), State::Nbd(Arc::new(server)))
            }
            ExportSpec::Fuse(spec) => {
                drop(table);
                let mount = self.mount(spec)?;
                let table = self.table.lock();
                table.check_waits(waits)?;
                (table, ExportSpec::Fuse(spec.clone()), State::Fuse(Arc::new(mount)))
            }
        };
        let id = match table.exports.iter_mut().find(|export| Some(export.id) == waits) {
            Some(export) => {
                (export.spec, export.state) = (spec.clone(), state);
                export.id
            }
            None => table.new_export(spec.clone(), state),
        };
        drop(table);
        if let ExportSpec::VhostUser(spec) = &spec {
            warn_if_libvirt_is_kept_out(&spec.socket);
        }
        Ok(id)
    }

    /// Mounts all disks as files.
    fn mount(&self, spec: &FuseSpec) -> Result<Mount, Error> {
        let tree = Tree::new(self.me.clone(), spec.clone());
        let root = Node::Directory(Arc::new(AllDisks(Arc::new(tree))));
        let options =
            fuse::Options { read_only: !spec.rw, allow_other: spec.allow_other, guard: self.guard.clone() };
        Ok(Mount::new(root, &spec.directory, &options)?)
    }

    /// Closes an export: requests in flight are finished, its clients are let go, its disks stay.
    ///
    /// # Errors
    /// No such export; unless `force`, one that a guest is attached by: nothing has changed. What NBD clients wrote cannot be
    /// flushed: the export is gone all the same.
    pub fn remove_export(&self, id: u64, force: bool) -> Result<(), Error> {
        let (_change, mut table) = self.begin_change()?;
        let at = table.exports.iter().position(|export| export.id == id);
        let at = at.ok_or(Error::NoSuchExport { id })?;
        if let Some(guest) = table.exports[at].guest().filter(|_| !force) {
            return Err(Error::GuestAttached { socket: guest.to_owned() });
        }
        let export = table.exports.remove(at);
        drop(table);
        let closed = export.state.close();
        self.tell(Event::ExportRemoved { id });
        closed
    }
}

fn bind_vhost_user(table: &Table, spec: &VhostUserSpec, waits: Option<u64>) -> Result<State, Error> {
    let (disk_spec, disk) = table.serving(&spec.disk)?;
    let others = table.exports.iter().filter_map(|export| match &export.spec {
        ExportSpec::VhostUser(spec) if Some(export.id) != waits => Some(spec),
        _ => None,
    });
    check_guests(spec, disk_spec.read_only, others)?;
    table.check_waits(waits)?;
    let bound = vhost_user::Server::bind(&spec.socket, Arc::clone(disk), vhost_user_options(spec));
    Ok(State::VhostUser(bound.map_err(|source| Error::VhostUser { disk: spec.disk.clone(), source })?))
}

impl Table {
    /// Notes an export under a new number, and returns that.
    pub(super) fn new_export(&mut self, spec: ExportSpec, state: State) -> u64 {
        self.next_export += 1;
        self.exports.push(Export { id: self.next_export, spec, is_added: false, state });
        self.next_export
    }

    /// Refuses to open an export that waited, and that was removed or opened meanwhile.
    fn check_waits(&self, waits: Option<u64>) -> Result<(), Error> {
        let Some(id) = waits else { return Ok(()) };
        let waits = self.exports.iter().any(|export| export.id == id && export.wait().is_some());
        if waits { Ok(()) } else { Err(Error::NoSuchExport { id }) }
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
