//! The registry: which disks and exports there are, and how they come and go while others are served.
//!
//! ```text
//!   add_disk ──► Opening ──► Serving ──► Closing ──► gone        remove_disk: exports first, then the disk
//!                   │           │ add_export, remove_export
//!                   └─ failed   ▼          (at the start also ──► Waiting ──► Serving, see `reconcile`)
//!                            exports: vhost-user (one disk), NBD and files (all disks)
//! ```
//!
//! `revert` goes from Serving through Closing and Opening to Serving, with the exports shut meanwhile.
//!
//! Invariants: a disk that was opened is closed, whatever fails after it; only a crash leaves one open, and then its
//! journal replays. A disk is not closed while it is lent (`users`). No export leads to a disk that is not `Serving`. One lock guards the tables; nothing that may wait
//! (opening, draining, closing, name resolution) is done under it, so status is always answered at once.

mod attach;
mod caches;
mod disks;
mod exports;
mod jobs;
mod moving;
mod quiesce;
mod rebase;
mod reconcile;
mod replica;
mod report;
mod retention;
mod revert;
mod snapshots;
mod standby;
mod states;
mod tier;
mod tree;
mod users;

use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex, MutexGuard};
use tokio::sync::{Notify, broadcast};
use vmstrata_api::Event;
use vmstrata_disk::{Disk, Opener, ResourceOptions, Resources};
use vmstrata_export::SocketAccess;
use vmstrata_export::nbd::TlsMode;
use vmstrata_flushlog::FlushLog;
use vmstrata_job::SharedRate;
use vmstrata_migrate::Report;
use vmstrata_tier::{CachedFiles, Tiered, Wire};

use self::attach::BeingAttached;
use self::caches::Caches;
use self::exports::{Export, Shared, State};
pub use self::jobs::merge_options;
pub use self::moving::move_order;
use self::reconcile::Wait;
pub(crate) use self::report::Counted;
use self::report::Counts;
use self::retention::Due;
use self::standby::StandingBy;
pub(crate) use self::states::look_at;
use self::users::Users;
use crate::agent::Guards;
use crate::audit::Audit;
use crate::error::Error;
use crate::flush_log::{self, LoggedFiles};
use crate::jobs::Jobs;
use crate::options::Options;
use crate::saved::{SavedFile, SavedState};
use crate::spec::DiskSpec;

/// Events kept for a reader that is slow to take them.
const EVENTS_KEPT: usize = 256;
/// How long the end waits for what is under way, and then for each disk to be closed after the one before. Together with all
/// that ends beside, this is less than service managers allow (90 s with systemd).
const END_PATIENCE: Duration = Duration::from_secs(30);

/// See the module documentation.
#[derive(Debug)]
pub struct Host {
    /// Itself, for work that goes on by itself.
    me: Weak<Self>,
    resources: Arc<Resources>,
    /// What makes the disks' flushes durable, if their own files do not.
    flush_log: Option<Arc<FlushLog>>,
    caches: Caches,
    /// What tiered disks ship over.
    wire: Arc<Wire>,
    /// What moves write at together.
    move_rate: Arc<SharedRate>,
    limits: ResourceOptions,
    allow_backing: Vec<PathBuf>,
    /// Whether disks are opened without unflushed writes that cannot be taken up.
    discards_unflushed: AtomicBool,
    tls: TlsMode,
    /// Whether NBD clients have to show certificates.
    knows_nbd_clients: bool,
    nbd_access: SocketAccess,
    guards: Guards,
    /// See [`Options::guard`].
    guard: Option<PathBuf>,
    table: Mutex<Table>,
    /// Signalled when a change ends.
    changed: Condvar,
    events: broadcast::Sender<Event>,
    pub(crate) audit: Audit,
    jobs: Arc<Jobs>,
    due: Arc<Due>,
    counts: Counts,
    started: Instant,
    /// Where what was added is saved, and what is saved there. Taken before the table.
    saved: Mutex<Option<(SavedFile, Option<SavedState>)>>,
    /// Notified when something begins to wait while the server runs.
    waits: Notify,
}

#[derive(Debug, Default)]
struct Table {
    /// In the order in which they were added.
    disks: Vec<Entry>,
    /// By their numbers.
    exports: Vec<Export>,
    next_export: u64,
    /// Changes under way.
    changes: usize,
    is_ending: bool,
}

#[derive(Clone, Debug)]
struct Entry {
    spec: DiskSpec,
    phase: Phase,
    users: Arc<Users>,
    /// What publishes it, if it is a tiered disk that is open, and its number among the disks of that.
    tier: Option<(Arc<Tiered>, usize)>,
    /// What waits to take it over, if another host publishes it, and its number among the disks of that.
    standby: Option<(Arc<StandingBy>, usize)>,
    /// What is not published yet, of a disk that became a tiered one while it was in use.
    attaching: Option<BeingAttached>,
    /// Its move, until the source files are gone.
    moving: Option<Report>,
    /// Whether there may be a state in its history for the sake of a rebase only.
    has_rebase_state: bool,
    /// Whether it was added while the server, or the one before it, ran.
    is_added: bool,
}

impl Entry {
    fn new(spec: DiskSpec, phase: Phase) -> Self {
        Self {
            spec,
            phase,
            users: Arc::default(),
            tier: None,
            standby: None,
            attaching: None,
            moving: None,
            has_rebase_state: false,
            is_added: false,
        }
    }
}

/// A disk in `Closing` belongs to the thread that closes it; its files are unlocked at the end of that.
#[derive(Clone, Debug)]
enum Phase {
    Opening,
    Serving(Arc<Disk>),
    Closing,
    Waiting(Wait),
}

impl Table {
    fn entry(&self, name: &str) -> Option<&Entry> {
        self.disks.iter().find(|entry| entry.spec.name == name)
    }

    /// The disk of this name, if it is served.
    fn serving(&self, name: &str) -> Result<(&DiskSpec, &Arc<Disk>), Error> {
        let entry = self.entry(name).ok_or_else(|| Error::NoSuchDisk { name: name.to_owned() })?;
        let busy = |doing| Err(Error::Busy { name: name.to_owned(), doing });
        match &entry.phase {
            Phase::Serving(disk) => Ok((&entry.spec, disk)),
            Phase::Opening => busy("being opened"),
            Phase::Closing => busy("being closed"),
            Phase::Waiting(wait) => Err(Error::NotOpen { name: name.to_owned(), why: wait.why.clone() }),
        }
    }

    fn entry_mut(&mut self, name: &str) -> Option<&mut Entry> {
        self.disks.iter_mut().find(|entry| entry.spec.name == name)
    }

    /// The disks that are served, with their names.
    fn served(&self) -> impl Iterator<Item = (&str, &Arc<Disk>)> {
        self.disks.iter().filter_map(|entry| match &entry.phase {
            Phase::Serving(disk) => Some((entry.spec.name.as_str(), disk)),
            _ => None,
        })
    }

    /// The names of the disks that are published together with one, itself among them.
    fn published_with(&self, name: &str) -> Vec<String> {
        let tier_of = |entry: &Entry| {
            let tier = entry.tier.as_ref().map(|(tier, _)| Arc::as_ptr(tier).cast::<()>());
            tier.or(entry.standby.as_ref().map(|(standby, _)| Arc::as_ptr(standby).cast()))
        };
        let Some(tier) = self.entry(name).and_then(tier_of) else { return vec![name.to_owned()] };
        let others = self.disks.iter().filter(|entry| tier_of(entry) == Some(tier));
        others.map(|entry| entry.spec.name.clone()).collect()
    }

    fn set_phase(&mut self, name: &str, phase: Phase) {
        if let Some(entry) = self.entry_mut(name) {
            entry.phase = phase;
        }
    }

    /// The exports that all disks go through.
    fn shared(&self) -> Vec<Shared> {
        self.exports.iter().filter_map(Export::shared).collect()
    }

    /// Connections of NBD clients that use a disk.
    fn nbd_clients(&self, name: &str) -> usize {
        let nbd =
            |export: &Shared| if let Shared::Nbd(server) = export { server.connections_of(name) } else { 0 };
        self.shared().iter().map(nbd).sum()
    }

    /// Open files of a disk.
    fn open_files(&self, name: &str) -> usize {
        let fuse =
            |export: &Shared| if let Shared::Fuse(mount) = export { mount.open_files_of(name) } else { 0 };
        self.shared().iter().map(fuse).sum()
    }

    fn forget(&mut self, name: &str) {
        self.disks.retain(|entry| entry.spec.name != name);
    }
}

/// A change under way: the server does not end in the middle of it.
struct Change<'a>(&'a Host);

impl Drop for Change<'_> {
    fn drop(&mut self) {
        self.0.save();
        self.0.table.lock().changes -= 1;
        self.0.changed.notify_all();
    }
}

impl Host {
    /// A host without disks and exports.
    ///
    /// # Errors
    /// A certificate that cannot be used, an audit file that cannot be written.
    pub(crate) fn new(options: &Options, runtime_dir: PathBuf) -> Result<Arc<Self>, Error> {
        let guards = Guards::new(&runtime_dir, options.guard.clone());
        let files = Arc::<CachedFiles>::default();
        let opener: Arc<dyn Opener> = Arc::new(vmstrata_nbd::Files::new(files.clone()));
        let flush_log = options.flush_log.as_deref();
        let flush_log =
            flush_log.map(|path| flush_log::open(path, options.limits.flush_log_bytes)).transpose()?;
        let opener = match &flush_log {
            Some(log) => LoggedFiles::over(opener, log),
            None => opener,
        };
        let (resources, limits) = options.resources(runtime_dir, opener)?;
        let events = broadcast::Sender::new(EVENTS_KEPT);
        let audit = Audit::new(events.clone(), options.audit.as_deref())?;
        let due = Arc::<Due>::default();
        let tls = options.tls_mode()?;
        Ok(Arc::new_cyclic(|me| Self {
            me: me.clone(),
            resources,
            flush_log,
            caches: Caches::new(files, options.limits.tier_cache_bytes),
            wire: Arc::new(Wire::new(options.limits.tier_rate)),
            move_rate: Arc::new(SharedRate::new(options.limits.move_rate, Instant::now())),
            limits,
            allow_backing: options.allow_backing.clone(),
            discards_unflushed: AtomicBool::new(options.discard_unflushed),
            tls,
            knows_nbd_clients: options.knows_nbd_clients(),
            nbd_access: options.nbd_access.clone(),
            guards,
            guard: options.guard.clone(),
            table: Mutex::default(),
            changed: Condvar::new(),
            jobs: Arc::new(Jobs::new(events.clone(), audit.clone(), due.waker())),
            audit,
            events,
            due,
            counts: Counts::default(),
            started: Instant::now(),
            saved: Mutex::default(),
            waits: Notify::new(),
        }))
    }

    /// From now on no disk is opened without the unflushed writes of a killed server.
    pub(crate) fn keep_unflushed(&self) {
        self.discards_unflushed.store(false, Ordering::Relaxed);
    }

    /// Lets guests go on that a killed server left frozen, once their disks are served.
    pub(crate) fn thaw_what_is_left(&self) {
        self.guards.thaw_what_is_left();
    }

    /// What happens from now on.
    pub fn events(&self) -> broadcast::Receiver<Event> {
        self.events.subscribe()
    }

    /// How many listen.
    pub(crate) fn event_readers(&self) -> usize {
        self.events.receiver_count()
    }

    /// Sends an event to all readers.
    pub(crate) fn tell(&self, event: Event) {
        // No reader is no failure.
        let _ = self.events.send(event);
    }

    fn begin_change(&self) -> Result<(Change<'_>, MutexGuard<'_, Table>), Error> {
        let mut table = self.table.lock();
        if table.is_ending {
            return Err(Error::Ending);
        }
        table.changes += 1;
        Ok((Change(self), table))
    }

    /// Ends everything: no more changes, every job ended, every export drained and closed, every disk closed clean. What does not
    /// end in time is left behind.
    ///
    /// # Errors
    /// What could not be closed, or not clean; the others were all the same.
    pub fn close(&self) -> Result<(), Error> {
        let deadline = Instant::now() + END_PATIENCE;
        let exports = {
            let mut table = self.table.lock();
            table.is_ending = true;
            self.changed.wait_while_until(&mut table, |table| table.changes > 0, deadline);
            let ending = || Error::Ending.to_string();
            table.exports.iter_mut().map(|export| export.shut(ending())).collect::<Vec<_>>()
        };
        exports.iter().for_each(State::begin_close);
        self.jobs.end_all(deadline);
        let drained = exports.into_iter().map(State::close_unflushed).fold(Ok(()), Result::and);
        // Not before: flushes may wait to be published.
        self.begin_to_end_tiers();
        drained.and(self.close_disks())
    }

    fn close_disks(&self) -> Result<(), Error> {
        let disks: Vec<(String, Arc<Disk>)> = {
            let mut table = self.table.lock();
            let mut closing = Vec::new();
            for entry in &mut table.disks {
                if let Phase::Serving(disk) = std::mem::replace(&mut entry.phase, Phase::Closing) {
                    closing.push((entry.spec.name.clone(), disk));
                }
            }
            closing
        };
        let (failures, open) = disks::close_all(disks, END_PATIENCE);
        for name in &open {
            tracing::error!(
                disk = name,
                "not closed in time: its storage does not answer; its journal replays when it is opened"
            );
        }
        if !failures.is_empty() {
            return Err(Error::NotClean { failures });
        }
        let names: Vec<String> = open.into_iter().map(|name| format!("'{name}'")).collect();
        if names.is_empty() {
            self.flush_log.iter().try_for_each(|log| flush_log::close(log))
        } else {
            Err(Error::NotEnded { what: format!("disk {}", names.join(", ")) })
        }
    }
}
