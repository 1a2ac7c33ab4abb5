//! Disks and exports that cannot be opened now, of a server that goes on without them: they are tried again.
//!
//! ```text
//!   start ──► opens? ──no──► waits, and the status says why ──► thread:    opens? ──yes──► served, then its exports
//!                                    ▲                             │ no: after twice the time
//!                                    └─────────────────────────────┘
//! ```
//!
//! Only what a server was started with waits; what is added to one that runs is opened or refused. A waiting disk has its name
//! and a waiting export its number, as if they were open, so that nobody else takes them.

use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};
use vmstrata_api::{self as api, Event};

use super::background::Background;
use super::users::PATIENCE;
use super::{Change, Host, Phase, Table};
use crate::error::{Error, told};
use crate::spec::{DiskSpec, NbdSpec, VhostUserSpec};

/// The time before the first new try.
const DELAY_MIN: Duration = Duration::from_secs(1);
/// The most between two: a guest waits this long for a disk that has come back.
const DELAY_MAX: Duration = Duration::from_secs(30);

/// Why something is not open, and when it is tried again.
#[derive(Clone, Debug)]
pub(super) struct Wait {
    pub(super) why: String,
    delay: Duration,
    next: Instant,
    is_tried: bool,
}

impl Wait {
    fn new(error: &Error) -> Self {
        Self { why: why(error), delay: DELAY_MIN, next: Instant::now() + DELAY_MIN, is_tried: false }
    }

    /// After a try that failed; tells whether for another reason than before.
    fn longer(&mut self, error: &Error) -> bool {
        let before = std::mem::replace(&mut self.why, why(error));
        self.delay = (self.delay * 2).min(DELAY_MAX);
        self.next = Instant::now() + self.delay;
        self.is_tried = false;
        before != self.why
    }
}

/// A reason as the status says it: what is wrong with a disk is said of the disk, and not of its exports again.
fn why(error: &Error) -> String {
    match error {
        Error::NotOpen { name, .. } => format!("disk '{name}' is not open"),
        error => told(error),
    }
}

/// An export to open.
#[derive(Clone, Debug)]
pub(crate) enum Wanted {
    VhostUser(VhostUserSpec),
    Nbd(NbdSpec),
}

impl Wanted {
    fn is_only_for(&self, name: &str) -> bool {
        matches!(self, Self::VhostUser(spec) if spec.disk == name)
    }

    pub(super) fn spec(&self) -> api::ExportSpec {
        match self {
            Self::VhostUser(spec) => api::ExportSpec::VhostUser(spec.into()),
            Self::Nbd(spec) => api::ExportSpec::Nbd(spec.into()),
        }
    }

    pub(super) fn place(&self) -> String {
        match self {
            Self::VhostUser(spec) => spec.socket.display().to_string(),
            Self::Nbd(spec) => spec.address.to_string(),
        }
    }
}

/// An export that is not open.
#[derive(Clone, Debug)]
pub(super) struct WaitingExport {
    pub(super) id: u64,
    pub(super) wanted: Wanted,
    wait: Wait,
}

impl WaitingExport {
    pub(super) fn status(&self, tls: bool) -> api::ExportStatus {
        let tls = tls && matches!(self.wanted, Wanted::Nbd(_));
        let (export, open_error) = (self.wanted.spec(), Some(self.wait.why.clone()));
        api::ExportStatus {
            id: self.id,
            export,
            added: false,
            open_error,
            connections: None,
            tls,
            counters: None,
        }
    }
}

impl Table {
    fn wait(&mut self, name: &str) -> Option<&mut Wait> {
        let entry = self.disks.iter_mut().find(|entry| entry.spec.name == name)?;
        match &mut entry.phase {
            Phase::Waiting(wait) => Some(wait),
            _ => None,
        }
    }

    /// Gives up the exports of a disk that are not open; their numbers.
    pub(super) fn forget_waiting_exports(&mut self, name: &str) -> Vec<u64> {
        let own = self.waiting.extract_if(.., |export| export.wanted.is_only_for(name));
        own.map(|export| export.id).collect()
    }

    fn due_disks(&self, now: Instant) -> Vec<DiskSpec> {
        let is_due = |phase: &Phase| matches!(phase, Phase::Waiting(wait) if wait.next <= now);
        self.disks.iter().filter(|entry| is_due(&entry.phase)).map(|entry| entry.spec.clone()).collect()
    }

    fn due_exports(&self, now: Instant) -> Vec<WaitingExport> {
        self.waiting.iter().filter(|export| export.wait.next <= now).cloned().collect()
    }

    /// When there is something to try; `None` if nothing waits.
    fn next_try(&self) -> Option<Instant> {
        let disks = self.disks.iter().filter_map(|entry| match &entry.phase {
            Phase::Waiting(wait) => Some(wait.next),
            _ => None,
        });
        disks.chain(self.waiting.iter().map(|export| export.wait.next)).min()
    }
}

impl Host {
    /// As [`Host::add_disk`], but one that cannot be opened waits.
    ///
    /// # Errors
    /// A name that is taken, a server that is ending.
    pub(crate) fn add_disk_or_wait(&self, spec: DiskSpec) -> Result<(), Error> {
        let (_change, spec) = self.enter(spec)?;
        if let Err(error) = self.open_entered(&spec) {
            tracing::error!(disk = spec.name, "cannot be opened, and is tried again: {}", why(&error));
            self.table.lock().set_phase(&spec.name, Phase::Waiting(Wait::new(&error)));
        }
        Ok(())
    }

    /// As [`Host::add_vhost_user`] and [`Host::add_nbd`], but an export that cannot be opened waits. Returns its number.
    ///
    /// # Errors
    /// A server that is ending.
    pub(crate) fn add_export_or_wait(&self, wanted: Wanted) -> Result<u64, Error> {
        match self.open_export(&wanted, None) {
            Err(error) if !matches!(error, Error::Ending) => {
                tracing::error!(at = wanted.place(), "cannot be opened, and is tried again: {}", why(&error));
                let mut table = self.table.lock();
                let id = table.new_export();
                table.waiting.push(WaitingExport { id, wanted, wait: Wait::new(&error) });
                Ok(id)
            }
            opened => opened,
        }
    }

    /// Opens an export, which may have waited under this number.
    fn open_export(&self, wanted: &Wanted, waited: Option<u64>) -> Result<u64, Error> {
        match wanted {
            Wanted::VhostUser(spec) => self.open_vhost_user(spec.clone(), waited),
            Wanted::Nbd(spec) => self.open_nbd(spec, waited),
        }
    }

    /// Gives up a disk that waits, and its exports; `false` if it does not.
    ///
    /// # Errors
    /// It is being opened right now, and that takes long.
    pub(super) fn remove_waiting_disk(&self, name: &str, change: &Change<'_>) -> Result<bool, Error> {
        let deadline = Instant::now() + PATIENCE;
        let mut table = self.table.lock();
        while table.wait(name).is_some_and(|wait| wait.is_tried) {
            if self.changed.wait_until(&mut table, deadline).timed_out() {
                return Err(Error::Busy { name: name.to_owned(), doing: "being opened" });
            }
        }
        if table.wait(name).is_none() {
            return Ok(false);
        }
        table.forget(name);
        let exports = table.forget_waiting_exports(name);
        drop(table);
        exports.into_iter().for_each(|id| self.export_is_gone(id));
        self.note_added(change);
        self.tell(Event::DiskRemoved { disk: name.to_owned(), error: None });
        Ok(true)
    }

    /// Begins to try what waits, on a thread of its own, until what is returned is dropped.
    ///
    /// # Errors
    /// No thread.
    pub(crate) fn start_reopening(self: &Arc<Self>) -> Result<Background, Error> {
        let (host, ending) = (Arc::clone(self), Arc::<(Mutex<bool>, Condvar)>::default());
        let told_to_end = Arc::clone(&ending);
        let look = move || {
            // Nothing begins to wait any more: the server runs.
            loop {
                let next = host.table.lock().next_try();
                let Some(next) = next else { return };
                let (is_ending, signal) = &*told_to_end;
                let mut is_ending = is_ending.lock();
                if !*is_ending {
                    signal.wait_until(&mut is_ending, next);
                }
                if *is_ending {
                    return;
                }
                drop(is_ending);
                host.try_what_is_due();
            }
        };
        let end = move || {
            let (is_ending, signal) = &*ending;
            *is_ending.lock() = true;
            signal.notify_all();
        };
        Background::start("reopening", "start the thread that opens what waits", look, end)
    }

    fn try_what_is_due(&self) {
        let now = Instant::now();
        let disks = self.table.lock().due_disks(now);
        disks.iter().for_each(|spec| self.try_disk(spec));
        // Also those of the disks that were opened just now.
        let exports = self.table.lock().due_exports(Instant::now());
        exports.iter().for_each(|export| self.try_export(export));
    }

    fn try_disk(&self, spec: &DiskSpec) {
        let Ok((_change, mut table)) = self.begin_change() else { return };
        // Otherwise it was removed meanwhile.
        let Some(wait) = table.wait(&spec.name) else { return };
        wait.is_tried = true;
        drop(table);
        let opened = self.open_entered(spec);
        let mut table = self.table.lock();
        match opened {
            Ok(()) => {
                let own = table.waiting.iter_mut().filter(|export| export.wanted.is_only_for(&spec.name));
                own.for_each(|export| export.wait.next = Instant::now());
            }
            Err(error) => {
                if table.wait(&spec.name).is_some_and(|wait| wait.longer(&error)) {
                    tracing::error!(disk = spec.name, "still cannot be opened: {}", why(&error));
                }
            }
        }
    }

    fn try_export(&self, export: &WaitingExport) {
        match self.open_export(&export.wanted, Some(export.id)) {
            Ok(id) => tracing::info!(export = id, at = export.wanted.place(), "opened"),
            Err(error) => {
                let mut table = self.table.lock();
                // Otherwise it was removed meanwhile.
                let waiting = table.waiting.iter_mut().find(|waiting| waiting.id == export.id);
                if waiting.is_some_and(|waiting| waiting.wait.longer(&error)) {
                    tracing::error!(at = export.wanted.place(), "still cannot be opened: {}", why(&error));
                }
            }
        }
    }
}
