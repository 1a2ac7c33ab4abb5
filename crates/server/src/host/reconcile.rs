//! What is wanted against what is open: the command line, the configuration and the saved state name disks and exports, and the
//! table says which of them are served.
//!
//! ```text
//!   start, request ──► table ──► opens? ──no──► refused, or Waiting: the status says why ──► reconcile: opens? ──► served
//!                        │                                  ▲                                    │ no: after twice the time
//!                        └─► saved when a change ends       └────────────────────────────────────┘
//! ```
//!
//! What a request asks for is opened or refused. What a server starts with waits if the server keeps going; what was added to the
//! server before always does. A waiting disk has its name and a waiting export its number, so others cannot take them.

use std::sync::Arc;
use std::time::{Duration, Instant};

use vmstrata_api as api;
use vmstrata_disk::Format;
use vmstrata_tier::{disks, group_of};

use super::exports::State;
use super::users::Use;
use super::{Change, Entry, Host, Phase, Table};
use crate::error::Error;
use crate::options::Options;
use crate::saved::{SavedFile, SavedState};
use crate::spec::{DiskSpec, ExportSpec};
use vmstrata_types::told;

/// The time before the first new try.
const DELAY_MIN: Duration = Duration::from_secs(1);
/// The most between two: a guest waits this long for a disk that has come back.
const DELAY_MAX: Duration = Duration::from_secs(30);

/// Why something is not open, and when it is tried again.
#[derive(Clone, Debug)]
pub(super) struct Wait {
    pub(super) why: String,
    delay: Duration,
    /// `None` while an operation holds it shut.
    next: Option<Instant>,
}

impl Wait {
    pub(super) fn new(error: &Error) -> Self {
        Self { why: why(error), delay: DELAY_MIN, next: Some(Instant::now() + DELAY_MIN) }
    }

    /// Shut by an operation, which opens it again.
    pub(super) fn shut(why: String) -> Self {
        Self { why, delay: DELAY_MIN, next: None }
    }

    /// After a failed try; returns whether the reason has changed.
    fn longer(&mut self, error: &Error) -> bool {
        let before = std::mem::replace(&mut self.why, why(error));
        self.delay = (self.delay * 2).min(DELAY_MAX);
        self.next = Some(Instant::now() + self.delay);
        before != self.why
    }

    fn is_due(&self, now: Instant) -> bool {
        self.next.is_some_and(|next| next <= now)
    }
}

/// The reason as the status shows it. An export does not repeat what is wrong with its disk.
fn why(error: &Error) -> String {
    match error {
        Error::NotOpen { name, .. } => format!("disk '{name}' is not open"),
        error => told(error),
    }
}

/// What becomes of something that cannot be opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Failing {
    Refused,
    /// But a disk that others of its group have to come after.
    RefusedUnlessIncomplete,
    Waits,
}

impl Failing {
    fn waits(self, error: &Error) -> bool {
        let is_incomplete = || matches!(error, Error::Tier(vmstrata_tier::Error::Incomplete { .. }));
        match self {
            Self::Refused => false,
            Self::RefusedUnlessIncomplete => is_incomplete(),
            Self::Waits => true,
        }
    }
}

/// The disks that are opened together: those of a group, and each other one alone.
fn sets(disks: &[DiskSpec]) -> Vec<Vec<DiskSpec>> {
    let mut sets: Vec<Vec<DiskSpec>> = Vec::new();
    for disk in disks {
        match sets.iter_mut().find(|set| set[0].is_grouped_with(disk)) {
            Some(set) => set.push(disk.clone()),
            None => sets.push(vec![disk.clone()]),
        }
    }
    sets
}

impl Table {
    fn wait_of_disk(&mut self, name: &str) -> Option<&mut Wait> {
        match &mut self.entry_mut(name)?.phase {
            Phase::Waiting(wait) => Some(wait),
            _ => None,
        }
    }

    fn wait_of_export(&mut self, id: u64) -> Option<&mut Wait> {
        self.exports.iter_mut().find(|export| export.id == id)?.wait_mut()
    }

    fn due_disks(&self, now: Instant) -> Vec<DiskSpec> {
        let is_due = |phase: &Phase| matches!(phase, Phase::Waiting(wait) if wait.is_due(now));
        self.disks.iter().filter(|entry| is_due(&entry.phase)).map(|entry| entry.spec.clone()).collect()
    }

    /// The disks of the same group that wait, too.
    fn waiting_with(&self, spec: &DiskSpec) -> Vec<DiskSpec> {
        let is_other = |entry: &&Entry| {
            entry.spec.is_grouped_with(spec)
                && entry.spec.name != spec.name
                && matches!(entry.phase, Phase::Waiting(_))
        };
        self.disks.iter().filter(is_other).map(|entry| entry.spec.clone()).collect()
    }

    fn due_exports(&self, now: Instant) -> Vec<(u64, ExportSpec)> {
        let is_due = |wait: &Wait| wait.is_due(now);
        let due = self.exports.iter().filter(|export| export.wait().is_some_and(is_due));
        due.map(|export| (export.id, export.spec.clone())).collect()
    }

    /// When there is something to try; `None` if nothing waits.
    fn next_try(&self) -> Option<Instant> {
        let disks = self.disks.iter().filter_map(|entry| match &entry.phase {
            Phase::Waiting(wait) => wait.next,
            _ => None,
        });
        disks.chain(self.exports.iter().filter_map(|export| export.wait()?.next)).min()
    }

    /// What was added and is wanted still.
    fn saved(&self) -> SavedState {
        let disks = self.disks.iter().filter(|entry| entry.is_added);
        let exports = self.exports.iter().filter(|export| export.is_added);
        SavedState {
            disks: disks.map(|entry| (&entry.spec).into()).collect(),
            exports: exports.map(|export| (&export.spec).into()).collect(),
        }
    }
}

impl Host {
    /// Opens a disk, which every NBD export then serves, also after a restart. One of a group waits until all of them were added.
    ///
    /// # Errors
    /// A name that is taken, a chain that cannot be opened, a group that is not published yet, a server that is ending.
    pub fn add_disk(&self, spec: DiskSpec) -> Result<(), Error> {
        let _change = self.begin_change()?.0;
        let name = spec.name.clone();
        // The disks of a new group are not known.
        if let Some(group) = spec.group()
            && !is_published(&spec)?
        {
            return Err(Error::NewGroup { group: group.to_owned() });
        }
        self.want_disks(vec![spec], Failing::RefusedUnlessIncomplete)?;
        self.disk_is_added(&name);
        Ok(())
    }

    /// Opens an export, also after a restart. Returns its number.
    ///
    /// # Errors
    /// No such disk; a second guest for a writable disk; a place that cannot be had, or that would let in unknown clients.
    pub fn add_export(&self, export: api::ExportSpec) -> Result<u64, Error> {
        let _change = self.begin_change()?.0;
        let id = self.want_export(wanted(export)?, Failing::Refused)?;
        self.export_is_added(id);
        Ok(id)
    }

    /// Opens all that the server is started with, and what was added to the server before.
    ///
    /// # Errors
    /// What cannot be opened, unless the server keeps going; a server that is ending.
    pub(crate) fn open_wanted(&self, options: &Options, file: Option<SavedFile>) -> Result<(), Error> {
        let _change = self.begin_change()?.0;
        let failing = if options.keep_going { Failing::Waits } else { Failing::Refused };
        for disks in sets(&options.disks) {
            self.want_disks(disks, failing)?;
        }
        for export in options.exports() {
            self.want_export(export, failing)?;
        }
        let Some(file) = file else { return Ok(()) };
        let saved = if options.forget_added { SavedState::default() } else { file.read() };
        for disk in saved.disks.into_iter().filter_map(|disk| self.new_disk(disk)) {
            tracing::info!(disk = disk.name, "was added to the server before");
            let name = disk.name.clone();
            self.want_disks(vec![disk], Failing::Waits)?;
            self.disk_is_added(&name);
        }
        for export in saved.exports.into_iter().filter_map(|export| self.new_export(export)) {
            tracing::info!(at = export.place(), "was added to the server before");
            let id = self.want_export(export, Failing::Waits)?;
            self.export_is_added(id);
        }
        // Only now: a request that is served meanwhile must not replace what is not read yet.
        *self.saved.lock() = Some((file, None));
        Ok(())
    }

    /// A disk that the options do not have.
    fn new_disk(&self, disk: api::DiskSpec) -> Option<DiskSpec> {
        let spec = DiskSpec::try_from(disk);
        let spec = spec.inspect_err(|error| tracing::error!(%error, "a disk is not taken over")).ok()?;
        self.table.lock().entry(&spec.name).is_none().then_some(spec)
    }

    /// An export that the options do not have, to a disk that is there.
    fn new_export(&self, export: api::ExportSpec) -> Option<ExportSpec> {
        let spec = wanted(export);
        let spec = spec.inspect_err(|error| tracing::error!(%error, "an export is not taken over")).ok()?;
        let table = self.table.lock();
        let has_disk = spec.only_disk().is_none_or(|disk| table.entry(disk).is_some());
        let is_new = table.exports.iter().all(|export| export.spec.place() != spec.place());
        (has_disk && is_new).then_some(spec)
    }

    fn disk_is_added(&self, name: &str) {
        if let Some(entry) = self.table.lock().entry_mut(name) {
            entry.is_added = true;
        }
    }

    fn export_is_added(&self, id: u64) {
        if let Some(export) = self.table.lock().exports.iter_mut().find(|export| export.id == id) {
            export.is_added = true;
        }
    }

    /// Opens a disk, or disks of a group, with others of that that wait.
    fn want_disks(&self, specs: Vec<DiskSpec>, failing: Failing) -> Result<(), Error> {
        let mut entered: Vec<(Change<'_>, DiskSpec)> = Vec::with_capacity(specs.len());
        let forget = |entered: &[(Change<'_>, DiskSpec)]| {
            let mut table = self.table.lock();
            entered.iter().for_each(|(_, spec)| table.forget(&spec.name));
        };
        for spec in specs {
            entered.push(self.enter(spec).inspect_err(|_| forget(&entered))?);
        }
        let (others, _uses) = self.use_waiting_with(&entered[0].1);
        let all: Vec<DiskSpec> = entered.iter().map(|(_, spec)| spec.clone()).chain(others).collect();
        match self.open_entered(&all) {
            Err(error) if failing.waits(&error) => {
                for (_, spec) in &entered {
                    tracing::error!(
                        disk = spec.name,
                        "cannot be opened, and is tried again: {}",
                        why(&error)
                    );
                    self.table.lock().set_phase(&spec.name, Phase::Waiting(Wait::new(&error)));
                }
                self.waits.notify_one();
                Ok(())
            }
            Err(error) => {
                forget(&entered);
                Err(error)
            }
            Ok(()) => {
                let mut table = self.table.lock();
                all.iter().for_each(|spec| table.try_exports_now(&spec.name));
                drop(table);
                self.waits.notify_one();
                Ok(())
            }
        }
    }

    /// The disks of the same group that wait, which are not removed as long as they are used so.
    fn use_waiting_with(&self, spec: &DiskSpec) -> (Vec<DiskSpec>, Vec<Use>) {
        let table = self.table.lock();
        let others = table.waiting_with(spec);
        let users =
            others.iter().filter_map(|other| Some(table.entry(&other.name)?.users.begin("being opened")));
        let users = users.collect();
        (others, users)
    }

    fn want_export(&self, spec: ExportSpec, failing: Failing) -> Result<u64, Error> {
        match self.open_export(&spec, None) {
            Err(error) if failing == Failing::Waits && !matches!(error, Error::Ending) => {
                tracing::error!(at = spec.place(), "cannot be opened, and is tried again: {}", why(&error));
                Ok(self.table.lock().new_export(spec, State::Waiting(Wait::new(&error))))
            }
            opened => opened.inspect(|&id| self.tell(api::Event::ExportAdded { id })),
        }
    }

    /// Opens what waits once it can be opened, for as long as the server runs.
    pub(crate) async fn reconcile(self: Arc<Self>) {
        loop {
            let next = self.table.lock().next_try();
            let due = async {
                match next {
                    Some(next) => tokio::time::sleep_until(next.into()).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                () = due => {}
                () = self.waits.notified() => continue,
            }
            let host = Arc::clone(&self);
            if let Err(error) =
                tokio::task::spawn_blocking(move || host.try_what_is_due(Instant::now())).await
            {
                tracing::error!(%error, "cannot look at what waits");
            }
        }
    }

    pub(super) fn try_what_is_due(&self, now: Instant) {
        let disks = self.table.lock().due_disks(now);
        disks.iter().for_each(|spec| self.try_disk(spec, now));
        // Also those of the disks that were opened just now.
        let exports = self.table.lock().due_exports(now.max(Instant::now()));
        for (id, spec) in exports {
            if self.try_export(id, &spec).is_ok() {
                tracing::info!(export = id, at = spec.place(), "opened");
                self.tell(api::Event::ExportAdded { id });
            }
        }
    }

    fn try_disk(&self, spec: &DiskSpec, now: Instant) {
        let Ok((_change, table)) = self.begin_change() else { return };
        // Else it was removed meanwhile, or tried with others of its group. Who removes it now waits for the end of this try.
        let is_due = |entry: &&Entry| matches!(&entry.phase, Phase::Waiting(wait) if wait.is_due(now));
        let Some(entry) = table.entry(&spec.name).filter(is_due) else {
            return;
        };
        let _use = entry.users.begin("being opened");
        drop(table);
        let (others, _uses) = self.use_waiting_with(spec);
        let all: Vec<DiskSpec> = [spec.clone()].into_iter().chain(others).collect();
        let opened = self.open_entered(&all);
        let mut table = self.table.lock();
        for spec in &all {
            match &opened {
                Ok(()) => table.try_exports_now(&spec.name),
                Err(error) => {
                    if table.wait_of_disk(&spec.name).is_some_and(|wait| wait.longer(error)) {
                        tracing::error!(disk = spec.name, "still cannot be opened: {}", why(error));
                    }
                }
            }
        }
    }

    /// Tries to open an export that waits.
    ///
    /// # Errors
    /// Why it waits on.
    pub(super) fn try_export(&self, id: u64, spec: &ExportSpec) -> Result<(), Error> {
        let opened = self.open_export(spec, Some(id));
        if let Err(error) = &opened {
            // Else it was removed meanwhile.
            if self.table.lock().wait_of_export(id).is_some_and(|wait| wait.longer(error)) {
                tracing::error!(at = spec.place(), "still cannot be opened: {}", why(error));
            }
        }
        opened.map(drop)
    }

    /// Notes that snapshots have made raw disks qcow2, so that a later server opens them as what they are.
    pub(super) fn note_converted(&self) {
        for entry in &mut self.table.lock().disks {
            let spec = &mut entry.spec;
            let is_raw = spec.format == Some(Format::Raw) && !spec.read_only && spec.clone_of.is_none();
            if is_raw && matches!(&entry.phase, Phase::Serving(disk) if disk.format() == Format::Qcow2) {
                spec.format = Some(Format::Qcow2);
            }
        }
    }

    /// Saves what was added, if that has changed, as part of the change: a server that ends waits for it.
    pub(super) fn save(&self) {
        // Held while the file is written, so that the last change is what is read.
        let mut saved = self.saved.lock();
        let Some((file, last)) = &mut *saved else { return };
        let state = self.table.lock().saved();
        if last.as_ref() == Some(&state) {
            return;
        }
        match file.write(&state) {
            Ok(()) => *last = Some(state),
            Err(error) => {
                tracing::error!(%error, "what was added to this server will be gone after a restart")
            }
        }
    }
}

/// Whether a disk of a group is published.
fn is_published(spec: &DiskSpec) -> Result<bool, Error> {
    let Some(address) = spec.tier.as_ref().and_then(|tier| tier.repository.as_ref()) else {
        let path = spec.path.canonicalize().unwrap_or_else(|_| spec.path.clone());
        return Ok(group_of(&path).is_some());
    };
    let repository = address.open().map_err(vmstrata_tier::Error::from)?;
    Ok(!disks(&*repository)?.is_empty())
}

/// What is asked for, with the whole path of its socket.
fn wanted(export: api::ExportSpec) -> Result<ExportSpec, Error> {
    ExportSpec::try_from(export)?.absolute().map_err(Error::no_directory)
}

impl Table {
    /// Has the exports of a disk tried at once that wait for it.
    fn try_exports_now(&mut self, disk: &str) {
        let own = self.exports.iter_mut().filter(|export| export.spec.only_disk() == Some(disk));
        own.filter_map(|export| export.wait_mut())
            .for_each(|wait| wait.next = wait.next.map(|_| Instant::now()));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_of_one_name_are_parted_by_the_addresses_of_their_repositories() {
        let disk = |(name, repository): (&str, Option<&str>)| {
            let text = |text: &str| Some(text.to_owned());
            let (path, repository) = (format!("/vms/{name}.qcow2"), repository.map(str::to_owned));
            let tier = api::DiskSpec {
                path,
                tier: text("/tier"),
                group: text("guest"),
                repository,
                ..Default::default()
            };
            DiskSpec::try_from(tier).unwrap()
        };
        let (one, same, other) = ("hdfs://nn/one", "hdfs://nn/one?block=1M", "hdfs://nn/other");
        let disks = [("a", Some(one)), ("b", Some(other)), ("c", Some(same)), ("d", Some(other))].map(disk);
        let named = |disks: &[DiskSpec]| -> Vec<Vec<String>> {
            sets(disks).iter().map(|set| set.iter().map(|disk| disk.name.clone()).collect()).collect()
        };
        assert_eq!(named(&disks), [["a", "c"], ["b", "d"]]);
        assert_eq!(named(&[("a", Some(one)), ("b", None)].map(disk)), [["a", "b"]]);
    }
}
