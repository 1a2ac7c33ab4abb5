//! Disks come and go.

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::atomic::Ordering;
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use vmstrata_api::{DiskLimits, Event, SizeChange, SizeSpec};
use vmstrata_disk::{Disk, ErrorKind, OpenOptions, Shrink, Unflushed};
use vmstrata_store::{FileError, FileId, LockError};

use super::exports::{Export, Shared};
use super::rebase::may_have_state;
use super::users::{Lent, PATIENCE};
use super::{Change, Entry, Host, Phase, states};
use crate::error::{Error, NotClean};
use crate::spec::{DiskSpec, limits_of, shown_limits};

/// How long to wait for housekeeping that looks at a disk for the last time.
const LAST_LOOK: Duration = Duration::from_secs(5);
/// Disks that are closed at one time: storage that hangs holds up one of these each.
const CLOSED_AT_ONCE: usize = 32;

impl Host {
    /// Takes the name of a disk that is to be opened.
    pub(super) fn enter(&self, spec: DiskSpec) -> Result<(Change<'_>, DiskSpec), Error> {
        let spec = spec.absolute().map_err(Error::no_directory)?.where_it_is();
        let (change, mut table) = self.begin_change()?;
        if let Some(path) = table.entry(&spec.name).map(|other| other.spec.path.clone()) {
            drop(table);
            return Err(if same_file(&path, &spec.path) {
                Error::Served { path: spec.path, name: spec.name }
            } else {
                Error::NameTaken { name: spec.name, path }
            });
        }
        table.disks.push(Entry::new(spec.clone(), Phase::Opening));
        drop(table);
        Ok((change, spec))
    }

    /// Opens a disk that has its name already, or the disks of a group.
    pub(super) fn open_entered(&self, specs: &[DiskSpec]) -> Result<(), Error> {
        specs.iter().try_for_each(|spec| states::make_clone(spec, self.open_options(spec)))?;
        specs.iter().try_for_each(states::make_local)?;
        for (spec, disk) in specs.iter().zip(self.open_and_let_in(specs)?) {
            self.tell(Event::DiskAdded { disk: spec.name.clone() });
            self.mend_index(&spec.name, &disk);
            self.go_on_moving(&spec.name, &disk);
        }
        self.due.now();
        Ok(())
    }

    /// How the files of a disk are opened.
    pub(super) fn open_options(&self, spec: &DiskSpec) -> OpenOptions {
        let options = states::open_options(spec, &self.allow_backing);
        match spec.stand_in() {
            // Its layers are no files.
            Some(_) => OpenOptions { opener: self.caches.opener(), ..options },
            None => options,
        }
    }

    /// Opens a disk, or the disks of a group.
    pub(super) fn open_disks(&self, specs: &[DiskSpec]) -> Result<Vec<Arc<Disk>>, Error> {
        let options = |spec: &DiskSpec| {
            let mut options = self.open_options(spec);
            if self.discards_unflushed.load(Ordering::Relaxed) {
                options.unflushed = Unflushed::Discard;
            }
            options
        };
        let disks = match &specs[0].tier {
            Some(tier) => self.open_tiered(specs, tier, &specs.iter().map(options).collect::<Vec<_>>())?,
            None => vec![self.open_files(&specs[0], options(&specs[0]))?],
        };
        for (spec, disk) in specs.iter().zip(&disks) {
            disk.limit(spec.limits);
            self.watch(&spec.name, disk);
            let layers = disk.layers().len();
            let noun = if layers == 1 { "layer" } else { "layers" };
            tracing::info!(disk = spec.name, path = %spec.path.display(), bytes = disk.size(), "opened: {layers} {noun}");
        }
        Ok(disks)
    }

    pub(super) fn open_files(&self, spec: &DiskSpec, options: OpenOptions) -> Result<Arc<Disk>, Error> {
        let (path, options) = states::find(spec, options)?;
        // Else its lock would be taken for another process's.
        self.refuse_served(spec, &path)?;
        if let Some(replica) = &spec.replica {
            self.read_through(&path, &options, replica)?;
        }
        let disk = Disk::open(&path, &options, &self.resources).or_else(|error| match error.kind() {
            ErrorKind::IsBase { .. } => {
                tracing::warn!(disk = spec.name, "served read-only: {error} (the disk's key `force`)");
                Disk::open(&path, &OpenOptions { read_only: true, ..options }, &self.resources)
            }
            _ => Err(error),
        });
        disk.map_err(|error| self.if_served(spec, error))
    }

    /// Refuses a file that another disk of this server has.
    pub(super) fn refuse_served(&self, spec: &DiskSpec, path: &Path) -> Result<(), Error> {
        // What cannot be looked at is said when it is opened.
        let Some(file) = FileId::at(path) else { return Ok(()) };
        let others: Vec<(String, Arc<Disk>)> = {
            let table = self.table.lock();
            let others = table.served().filter(|(name, _)| *name != spec.name);
            others.map(|(name, disk)| (name.to_owned(), Arc::clone(disk))).collect()
        };
        match others.into_iter().find(|(_, disk)| disk.excludes(file, !spec.read_only)) {
            Some((name, _)) => Err(Error::Served { path: path.to_owned(), name }),
            None => Ok(()),
        }
    }

    /// Why a disk cannot be opened, where a lock of this very server is in the way.
    fn if_served(&self, spec: &DiskSpec, error: vmstrata_disk::Error) -> Error {
        let served = match error.kind() {
            ErrorKind::File(FileError::Lock(LockError::Conflict { path, .. })) => {
                self.refuse_served(spec, path)
            }
            _ => Ok(()),
        };
        served.err().unwrap_or(Error::Disk(error))
    }

    /// Sends an event when the disk takes no more writes.
    fn watch(&self, name: &str, disk: &Disk) {
        let (name, events) = (name.to_owned(), self.events.clone());
        disk.when_failed(move |error| {
            // No reader is no failure.
            let _ = events.send(Event::DiskFailed { disk: name.clone(), error: error.to_owned() });
        });
    }

    /// Opens a disk, or the disks of a group, and shows them to their users.
    pub(super) fn open_and_let_in(&self, specs: &[DiskSpec]) -> Result<Vec<Lent>, Error> {
        let disks = self.open_disks(specs)?;
        self.let_in(specs, disks)
    }

    /// Shows open disks to NBD clients and to new exports: all of them, or none.
    pub(super) fn let_in(&self, specs: &[DiskSpec], disks: Vec<Arc<Disk>>) -> Result<Vec<Lent>, Error> {
        let mut table = self.table.lock();
        let shown = specs.iter().zip(&disks).try_for_each(|(spec, disk)| {
            table.exports.iter().try_for_each(|export| export.show(&spec.name, disk))
        });
        if let Err(error) = shown {
            let exports = table.shared();
            drop(table);
            specs.iter().for_each(|spec| withdraw(&spec.name, &exports));
            self.end_tier(&specs[0].name);
            let closed = specs.iter().zip(disks).map(|(spec, disk)| close_and_release(&spec.name, disk));
            return Err(closed.fold(Ok(()), Result::and).err().unwrap_or(error));
        }
        let mut lent = Vec::with_capacity(specs.len());
        for (spec, disk) in specs.iter().zip(disks) {
            table.note_rebase_state(&spec.name, may_have_state(&disk));
            table.set_phase(&spec.name, Phase::Serving(disk));
            lent.push(table.lend(&spec.name, "being opened")?.1);
        }
        Ok(lent)
    }

    /// Gives a disk another size, and tells its guests. The size that it has is no error: guests are told again.
    ///
    /// # Errors
    /// No such disk, one that is not served, or what the engine refuses; see [`vmstrata_disk::Disk::resize`].
    pub fn resize(&self, name: &str, asked: &SizeSpec) -> Result<SizeChange, Error> {
        let (_change, table) = self.begin_change()?;
        table.refuse_standby(name)?;
        let (_, disk) = table.lend(name, "being resized")?;
        drop(table);
        let shrink = if asked.shrink { Shrink::Allow } else { Shrink::Refuse };
        let resized = disk.resize(asked.size_bytes, shrink)?;
        let table = self.table.lock();
        let own = table.exports.iter().filter(|export| export.is_only_for(name));
        let guests = own.filter_map(Export::vhost_user);
        // Not what was asked for: someone else may have resized it since.
        let told = guests.filter(|server| server.set_size(disk.size())).count();
        let nbd_clients = table.nbd_clients(name);
        drop(table);
        if resized.from != resized.to {
            self.tell(Event::DiskResized { disk: name.to_owned(), size_bytes: resized.to });
        }
        Ok(SizeChange {
            disk: name.to_owned(),
            from_bytes: resized.from,
            size_bytes: resized.to,
            pause_us: u64::try_from(resized.pause.as_micros()).unwrap_or(u64::MAX),
            guests_told: told as u64,
            nbd_clients: nbd_clients as u64,
        })
    }

    /// Gives a disk other limits, from now on.
    ///
    /// # Errors
    /// No such disk, one that is not served, or numbers that are no limits.
    pub fn limit(&self, name: &str, asked: &DiskLimits) -> Result<DiskLimits, Error> {
        let limits = limits_of(asked)?;
        let (_change, mut table) = self.begin_change()?;
        table.serving(name)?.1.limit(limits);
        table.entry_mut(name).expect("it is served").spec.limits = limits;
        Ok(shown_limits(limits))
    }

    /// Closes a disk, and the others of its group: the exports are drained, the images are left clean, their files are unlocked. The file of one
    /// that stays on this host goes with it.
    ///
    /// # Errors
    /// No such disk; one that is not served, or that something is being done with; unless `force`, one that a guest is attached
    /// to, or that a program has a file of open: nothing has changed. An image that could not be closed clean, or at all in time: the disk is gone all the same.
    pub fn remove_disk(&self, name: &str, force: bool) -> Result<(), Error> {
        let _change = self.begin_change()?.0;
        let all = self.table.lock().published_with(name);
        let mut table = self.unused(&all, PATIENCE)?;
        let mut disks = Vec::with_capacity(all.len());
        for name in &all {
            match table.serving(name) {
                Ok((_, disk)) => disks.push((name, Some(Arc::clone(disk)))),
                Err(Error::NotOpen { .. }) => disks.push((name, None)),
                Err(error) => return Err(error),
            }
            let guest = table.exports.iter().find_map(|export| export.guest_of(name));
            if let Some(guest) = guest.filter(|_| !force) {
                return Err(Error::GuestAttached { socket: guest.to_owned() });
            }
            if !force && table.open_files(name) > 0 {
                return Err(Error::FilesOpen { name: name.clone() });
            }
        }
        all.iter().for_each(|name| table.set_phase(name, Phase::Closing));
        let is_own = |export: &mut Export| all.iter().any(|name| export.is_only_for(name));
        let own: Vec<Export> = table.exports.extract_if(.., is_own).collect();
        let shared = table.shared();
        drop(table);
        all.iter().for_each(|name| self.jobs.end(Some(name)));
        let mut ended = Ok(());
        for export in own {
            ended = ended.and(export.state.close());
            self.tell(Event::ExportRemoved { id: export.id });
        }
        all.iter().for_each(|name| withdraw(name, &shared));
        let tier = self.table.lock().entry(name).and_then(|entry| entry.tier.clone());
        let published = self.publish_last(name);
        // Closing would wait for what is still under way.
        let closed = ended.and_then(|()| {
            let open = disks.into_iter().filter_map(|(name, disk)| Some((name, disk?)));
            open.map(|(name, disk)| close_and_release(name, disk)).fold(Ok(()), Result::and)
        });
        let removed = || {
            let spec = self.table.lock().entry(name).map(|entry| entry.spec.clone());
            spec.as_ref().map_or(Ok(()), states::remove_local)
        };
        // A copy that is gone, as another host has all of it, need not be clean.
        let closed = match tier.map_or(Ok(false), |(tier, _)| tier.leave()) {
            Ok(true) => Ok(()),
            left => closed.and(published).and(left.map(drop).map_err(Error::from)),
        };
        let closed = closed.and_then(|()| removed());
        let error = closed.as_ref().err().map(Error::to_string);
        for name in all {
            self.table.lock().forget(&name);
            self.tell(Event::DiskRemoved { disk: name, error: error.clone() });
        }
        closed
    }
}

/// Whether two paths lead to one file; those of snapshots (`DISK@NAME`) lead to none.
fn same_file(one: &Path, other: &Path) -> bool {
    one == other || FileId::at(one).is_some_and(|found| FileId::at(other) == Some(found))
}

/// Lets those go who use a disk through exports of all disks.
fn withdraw(name: &str, exports: &[Shared]) {
    exports.iter().for_each(|export| export.withdraw(name));
}

/// Closes a disk that no export leads to any more.
pub(super) fn close(name: String, disk: &Disk) -> Result<(), NotClean> {
    disk.close().map_err(|source| {
        tracing::error!(disk = name, "cannot be closed clean: {source}");
        NotClean { name, source }
    })
}

/// Closes disks, several at a time, until none of them has been closed for as long as `patience`. Returns those that could not
/// be closed clean, and the names of those that were not closed.
pub(super) fn close_all(
    disks: Vec<(String, Arc<Disk>)>,
    patience: Duration,
) -> (Vec<NotClean>, BTreeSet<String>) {
    let mut open: BTreeSet<String> = disks.iter().map(|(name, _)| name.clone()).collect();
    let threads = disks.len().min(CLOSED_AT_ONCE);
    let disks = Arc::new(Mutex::new(disks.into_iter()));
    let (tell, told) = mpsc::channel();
    for _ in 0..threads {
        let (disks, tell) = (Arc::clone(&disks), tell.clone());
        let work = move || {
            while let Some((name, disk)) = next(&disks) {
                let closed = close(name.clone(), &disk);
                drop(disk);
                // There is no receiver any more when the time is over.
                let _ = tell.send((name, closed));
            }
        };
        if let Err(error) = std::thread::Builder::new().name("close".to_owned()).spawn(work) {
            tracing::warn!(%error, "cannot start a thread to close disks");
        }
    }
    drop(tell);
    let mut failures = Vec::new();
    while let Ok((name, closed)) = told.recv_timeout(patience) {
        open.remove(&name);
        failures.extend(closed.err());
    }
    (failures, open)
}

fn next(disks: &Mutex<std::vec::IntoIter<(String, Arc<Disk>)>>) -> Option<(String, Arc<Disk>)> {
    disks.lock().next()
}

/// Closes a disk, and lets go of its files.
///
/// # Errors
/// An image that could not be closed clean; files that are locked still.
pub(super) fn close_and_release(name: &str, disk: Arc<Disk>) -> Result<(), Error> {
    let closed = close(name.to_owned(), &disk);
    let released = release(name, disk);
    closed.map_err(|failure| Error::NotClean { failures: vec![failure] }).and(released)
}

/// Lets go of the last reference, and with it of the files' locks.
///
/// # Errors
/// Someone else has the disk still.
fn release(name: &str, mut disk: Arc<Disk>) -> Result<(), Error> {
    let deadline = Instant::now() + LAST_LOOK;
    loop {
        match Arc::try_unwrap(disk) {
            Ok(_closed) => return Ok(()),
            Err(shared) => disk = shared,
        }
        if Instant::now() > deadline {
            return Err(Error::StillLocked { name: name.to_owned() });
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[cfg(test)]
mod tests {
    use vmstrata_disk::{
        CreateOptions, LocalFiles, Opened, Opener, ResourceOptions, Resources, Role, create,
    };
    use vmstrata_store::{Effect, Fault, FaultPlan, FaultStore, Gate, OperationKind, StoreId, When};
    use vmstrata_types::{GuestOffset, GuestRange};

    use super::*;
    use crate::options::Options;

    /// Opens files whose operations may be made to fail.
    #[derive(Debug)]
    struct Faulty(Arc<FaultPlan>);

    impl Opener for Faulty {
        fn open(&self, path: &Path, role: Role, gate: &Gate) -> vmstrata_disk::Result<Opened> {
            let opened = LocalFiles.open(path, role, gate)?;
            let store = Arc::new(FaultStore::new(opened.store, &self.0, StoreId::default()));
            Ok(Opened { store, ..opened })
        }
    }

    fn open(path: &Path, resources: &Arc<Resources>) -> Entry {
        let size = Some(1 << 20);
        create(path, &CreateOptions { size, ..CreateOptions::default() }).unwrap();
        let disk = Disk::open(path, &OpenOptions::default(), resources).unwrap();
        disk.write_zeroes(GuestRange::new(GuestOffset::ZERO, 65536), false).unwrap();
        let spec = vmstrata_api::DiskSpec { path: path.to_str().unwrap().to_owned(), ..Default::default() };
        Entry::new(spec.try_into().unwrap(), Phase::Serving(disk))
    }

    const EIO: i32 = 5;

    /// A host, and a disk that fails as the plan says.
    fn host_and_bad_disk(dir: &Path) -> (Arc<Host>, Arc<FaultPlan>, Entry) {
        let plan = FaultPlan::new();
        let broken = Resources::with_opener(ResourceOptions::default(), Arc::new(Faulty(Arc::clone(&plan))));
        let host = Host::new(&Options::default(), dir.to_owned()).unwrap();
        let bad = open(&dir.join("bad.qcow2"), &broken);
        (host, plan, bad)
    }

    #[test]
    fn a_disk_whose_storage_fails_says_so_in_its_status_and_once_to_whoever_listens() {
        let dir = tempfile::tempdir().unwrap();
        let (host, plan, bad) = host_and_bad_disk(dir.path());
        let Phase::Serving(disk) = bad.phase.clone() else { unreachable!("just opened") };
        host.watch("bad", &disk);
        host.table.lock().disks.push(bad);
        let mut events = host.events();
        assert_eq!(host.disks()[0].failed, None);
        plan.fail_from(Some(OperationKind::Flush), 0, EIO);
        disk.flush().unwrap_err();
        let why = host.disks()[0].failed.clone().expect("it takes no more writes");
        assert!(why.contains("bad.qcow2"), "{why}");
        disk.flush().unwrap_err();
        assert_eq!(events.try_recv(), Ok(Event::DiskFailed { disk: "bad".to_owned(), error: why }));
        assert!(events.try_recv().is_err(), "told twice");
    }

    #[test]
    fn a_disk_whose_storage_hangs_keeps_no_other_from_being_closed() {
        let dir = tempfile::tempdir().unwrap();
        let (host, plan, bad) = host_and_bad_disk(dir.path());
        let good = open(&dir.path().join("good.qcow2"), &host.resources);
        let disks = [bad, good].map(|entry| match entry.phase {
            Phase::Serving(disk) => (entry.spec.name, disk),
            _ => unreachable!("just opened"),
        });
        plan.add(Fault {
            kind: Some(OperationKind::Flush),
            store: None,
            when: When::From(0),
            effect: Effect::Hold,
        });
        let (failures, open) = close_all(disks.into(), Duration::from_secs(3));
        assert!(failures.is_empty());
        assert_eq!(open, BTreeSet::from(["bad".to_owned()]));
        let again = Disk::open(&dir.path().join("good.qcow2"), &OpenOptions::default(), &host.resources);
        again.expect("it is unlocked").close().unwrap();
        plan.clear();
    }

    #[test]
    fn requests_for_a_disk_whose_storage_hangs_leave_room_for_other_disks() {
        let dir = tempfile::tempdir().unwrap();
        let (host, plan, bad) = host_and_bad_disk(dir.path());
        let good = open(&dir.path().join("good.qcow2"), &host.resources);
        host.table.lock().disks.extend([bad, good]);
        let hold = Effect::Hold;
        plan.add(Fault { kind: Some(OperationKind::Flush), store: None, when: When::From(0), effect: hold });
        let take = |disk: &str, name: String| {
            let disks = vec![disk.to_owned()];
            host.snapshot(vmstrata_api::SnapshotSpec { disks, name, ..Default::default() })
        };
        std::thread::scope(|scope| {
            let waiting: Vec<_> =
                (0..8).map(|number| scope.spawn(move || take("bad", format!("s{number}")))).collect();
            let until = std::time::Instant::now() + Duration::from_secs(20);
            while !matches!(host.table.lock().lend("bad", "being looked at"), Err(Error::Crowded { .. })) {
                assert!(std::time::Instant::now() < until, "eight of them wait");
                std::thread::yield_now();
            }
            let crowded = take("bad", "s8".to_owned()).unwrap_err().to_string();
            assert!(crowded.starts_with("8 requests wait for disk 'bad' already"), "{crowded}");
            take("good", "s".to_owned()).unwrap();
            plan.clear();
            assert!(waiting.into_iter().all(|waiting| waiting.join().unwrap().is_ok()));
        });
    }

    #[test]
    fn a_disk_that_cannot_be_closed_clean_is_an_error_and_the_others_are_closed_all_the_same() {
        let dir = tempfile::tempdir().unwrap();
        let (host, plan, bad) = host_and_bad_disk(dir.path());
        let good = open(&dir.path().join("good.qcow2"), &host.resources);
        let Phase::Serving(sound) = good.phase.clone() else { unreachable!("just opened") };
        host.table.lock().disks.extend([bad, good]);
        plan.fail_from(Some(OperationKind::Flush), 0, EIO);
        let error = host.close().unwrap_err().to_string();
        assert!(error.contains("disk 'bad' could not be closed clean"), "{error}");
        assert!(!error.contains("good"), "{error}");
        assert!(sound.flush().is_err(), "the sound disk is still open");
        let late = vmstrata_api::DiskSpec { path: "late.qcow2".to_owned(), ..Default::default() };
        assert!(matches!(host.add_disk(late.try_into().unwrap()), Err(Error::Ending)));
    }
}
