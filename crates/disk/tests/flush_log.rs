//! Disks whose flushes a log makes durable: the power fails at many moments, the log is brought into the images, and what was flushed
//! is there; only the log's host may use the images before that.

use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::common::faulty::FaultyFiles;
use crate::common::flat::write;
use crate::common::io::Client;
use crate::common::ledger::{Ledger, Step, batches, steps, take};
use crate::common::shape::{LayerShape, Made, make};
use crate::common::{for_seeds, open_read_only, random, scratch, stock};
use rand::Rng as _;
use vmstrata_disk::snapshot::SnapshotInfo;
use vmstrata_disk::{
    CheckOptions, Disk, ErrorKind, LocalFiles, OpenOptions, Opened, Opener, ResourceOptions, Resources, Role,
    check, open_logged,
};
use vmstrata_flushlog::{FlushLog, Host, LogError, LoggedStore, Subject, Targets};
use vmstrata_store::{
    CacheMode, Crash, CrashKind, FaultPlan, FaultStore, Gate, MemoryStore, Moment, OperationKind, Record,
    Ring, Store, StoreId, Survivors,
};

const LOG_LEN: u64 = 1 << 20;
const LOG: StoreId = StoreId(1000);

/// Images behind a log.
#[derive(Debug)]
struct LoggedFiles {
    files: Arc<dyn Opener>,
    log: Arc<FlushLog>,
}

impl Opener for LoggedFiles {
    fn open(&self, path: &Path, role: Role, gate: &Gate) -> vmstrata_disk::Result<Opened> {
        let Opened { store, identity } = self.files.open(path, role, gate)?;
        let store: Arc<dyn Store> = match role {
            Role::Active(CacheMode::Host) => {
                LoggedStore::new(store, path.to_owned(), identity.file.ino, &self.log)
            }
            _ => store,
        };
        Ok(Opened { store, identity })
    }

    fn ring(&self, depth: u32) -> io::Result<Ring> {
        self.files.ring(depth)
    }
}

struct Images;

impl Targets for Images {
    fn open(&self, subject: &Subject, marks: &[u64]) -> io::Result<Option<Arc<dyn Store>>> {
        open_logged(&subject.path, subject.ino, marks).map(Some).map_err(io::Error::other)
    }
}

fn boot(number: u8) -> Host {
    Host { id: [1; 16], boot: [number; 16] }
}

fn open_log(store: &Arc<dyn Store>, host: Host) -> Result<Arc<FlushLog>, LogError> {
    FlushLog::open(Arc::clone(store), Path::new("/log"), host, &Images).map(|(log, _)| log)
}

fn empty() -> Arc<dyn Store> {
    Arc::new(MemoryStore::from_vec(vec![0; LOG_LEN as usize]))
}

fn resources(files: Arc<dyn Opener>, log: &Arc<FlushLog>, journal_dir: Option<&Path>) -> Arc<Resources> {
    let options = ResourceOptions {
        metadata_cache_bytes: 0,
        max_open_files: 16,
        workers: 2,
        journal_dir: journal_dir.map(Path::to_owned),
    };
    Resources::with_opener(options, Arc::new(LoggedFiles { files, log: Arc::clone(log) }))
}

fn open(path: &Path, resources: &Arc<Resources>) -> vmstrata_disk::Result<Arc<Disk>> {
    Disk::open(path, &OpenOptions::default(), resources)
}

/// Workloads of two disks that share a log, and all that reached the files.
struct Recording {
    _dir: tempfile::TempDir,
    disks: Vec<Recorded>,
    records: Vec<Record>,
    end: Moment,
}

struct Recorded {
    made: Made,
    before: Vec<u8>,
    store: StoreId,
    ledger: Ledger,
    /// The numbers of steps, with the moments at which they began and ended.
    steps: Vec<(Step, Moment, Moment)>,
}

impl Recording {
    fn make(shapes: &[Vec<LayerShape>], seed: u64, count: usize, by_queue: bool) -> Self {
        let dir = scratch();
        let mut random = random("flush log", seed);
        let plan = FaultPlan::recording();
        let files = FaultyFiles::new(&plan);
        let log_store: Arc<dyn Store> = Arc::new(FaultStore::new(empty(), &plan, LOG));
        let log = open_log(&log_store, boot(1)).unwrap();
        let resources = resources(Arc::clone(&files) as Arc<dyn Opener>, &log, None);
        let mut disks: Vec<Recorded> = Vec::new();
        let mut opened = Vec::new();
        for (number, layers) in shapes.iter().enumerate() {
            let own = dir.path().join(number.to_string());
            std::fs::create_dir(&own).unwrap();
            let made = make(&own, layers, &mut random);
            let before = std::fs::read(&made.top).unwrap();
            opened.push(open(&made.top, &resources).unwrap());
            let (store, ledger) = (files.id(&made.top), Ledger::new(&made.model, made.cluster));
            disks.push(Recorded { made, before, store, ledger, steps: Vec::new() });
        }
        let mut clients: Vec<_> = opened.iter().map(|disk| by_queue.then(|| Client::new(disk, 8))).collect();
        for round in 0..count / 10 {
            for (number, disk) in disks.iter_mut().enumerate() {
                let chosen = steps(&mut random, 10, disk.ledger.size(), disk.made.cluster);
                for batch in batches(chosen, if by_queue { 4 } else { 1 }) {
                    let began = plan.now();
                    let results = match &mut clients[number] {
                        Some(client) => client.take(&batch),
                        None => batch.iter().map(|step| take(&opened[number], step)).collect(),
                    };
                    results.into_iter().for_each(|result| drop(result.expect("no faults here")));
                    let ended = plan.now();
                    for step in batch {
                        disk.ledger.enter(disk.steps.len() + 1, &step, true);
                        disk.steps.push((step, began, ended));
                    }
                }
            }
            if round % 3 == 1 {
                log.advance().unwrap();
            }
        }
        let end = plan.now();
        assert!(log.usage().records > 0, "nothing went to the log");
        drop(clients);
        for disk in opened {
            disk.close().unwrap();
        }
        drop(resources);
        disks.iter().for_each(|disk| stock::assert_clean(&disk.made.top));
        Self { _dir: dir, disks, records: plan.log(), end }
    }

    fn crash(&self, crash: Crash, then: Host) {
        let log = crash.image(&vec![0; LOG_LEN as usize], &self.records, LOG);
        for disk in &self.disks {
            std::fs::write(&disk.made.top, crash.image(&disk.before, &self.records, disk.store)).unwrap();
        }
        let log: Arc<dyn Store> = Arc::new(MemoryStore::from_vec(log));
        let log = open_log(&log, then).unwrap_or_else(|error| panic!("{crash:?}: {error}"));
        let resources = resources(Arc::new(LocalFiles), &log, None);
        for disk in &self.disks {
            let opened = open(&disk.made.top, &resources).unwrap_or_else(|e| panic!("{crash:?}: {e}"));
            opened.close().unwrap();
            drop(opened);
            stock::assert_clean(&disk.made.top);
            let found = stock::content(&disk.made.top, "qcow2");
            let all = crash.kind == CrashKind::Process;
            let counts = |step: &Step| all || matches!(step, Step::Flush);
            let steps = &disk.steps;
            let flushed = steps.iter().rposition(|(step, _, ended)| counts(step) && *ended <= crash.at);
            let last = steps.iter().rposition(|(_, began, _)| *began <= crash.at);
            let number = |place: Option<usize>| place.map_or(0, |place| place + 1);
            let checked = disk.ledger.check(0, &found, number(flushed), number(last));
            checked.unwrap_or_else(|error| panic!("{crash:?}, {flushed:?}, {last:?}: {error}"));
        }
    }
}

fn shapes(seed: u64) -> [Vec<LayerShape>; 2] {
    let base = LayerShape::qcow2(14, 300 << 10);
    let small = LayerShape { operations: 5, ..LayerShape::qcow2(12, 200 << 10) };
    let with_subclusters = LayerShape { subclusters: true, cluster_bits: 15, ..small.clone() };
    let shared = LayerShape { snapshots: 1, ..LayerShape::qcow2(10, 100 << 10) };
    match seed % 2 {
        0 => [vec![base, small], vec![shared]],
        _ => [vec![base.clone(), with_subclusters], vec![LayerShape::qcow2(16, 200 << 10)]],
    }
}

#[test]
fn what_was_flushed_survives_power_failures() {
    for_seeds(4, |seed| {
        let recording = Recording::make(&shapes(seed), seed, 120, seed % 4 > 1);
        let mut random = random("cuts", seed);
        for number in 0..60 {
            let at = Moment(random.random_range(0..=recording.end.0));
            let survivors = match number % 4 {
                0 => Survivors::None,
                1 => Survivors::All,
                _ => Survivors::Seeded(random.random()),
            };
            recording.crash(Crash { kind: CrashKind::Power, at, survivors }, boot(2));
        }
    });
}

/// The process is killed, and the host goes on: with a journal nothing that completed is missing.
#[test]
fn what_completed_survives_a_killed_process() {
    let dir = scratch();
    let made = make(dir.path(), &shapes(0)[0], &mut random("killed", 0));
    let before = std::fs::read(&made.top).unwrap();
    let (plan, journals) = (FaultPlan::recording(), dir.path().join("journals"));
    let files = FaultyFiles::new(&plan);
    let log_store = empty();
    let log = open_log(&log_store, boot(1)).unwrap();
    let first = resources(Arc::clone(&files) as Arc<dyn Opener>, &log, Some(&journals));
    let disk = open(&made.top, &first).unwrap();
    let mut ledger = Ledger::new(&made.model, made.cluster);
    let chosen = steps(&mut random("killed", 1), 80, ledger.size(), made.cluster);
    for (number, step) in chosen.iter().enumerate() {
        take(&disk, step).unwrap();
        ledger.enter(number + 1, step, true);
    }
    // All that the process leaves, as of now.
    let left = std::fs::read(&made.top).unwrap();
    let saved = scratch();
    let copy_of = |from: &Path, to: &Path| {
        for entry in std::fs::read_dir(from).unwrap().map(Result::unwrap) {
            std::fs::copy(entry.path(), to.join(entry.file_name())).unwrap();
        }
    };
    copy_of(&journals, saved.path());
    let mut bytes = vec![0; LOG_LEN as usize];
    log_store.read_exact(&mut bytes, vmstrata_types::HostOffset::ZERO).unwrap();
    disk.close().unwrap();
    drop((disk, first));
    assert_ne!(before, left);
    std::fs::write(&made.top, left).unwrap();
    copy_of(saved.path(), &journals);
    let log = open_log(&(Arc::new(MemoryStore::from_vec(bytes)) as Arc<dyn Store>), boot(1)).unwrap();
    let disk = open(&made.top, &resources(Arc::new(LocalFiles), &log, Some(&journals))).unwrap();
    disk.close().unwrap();
    drop(disk);
    stock::assert_clean(&made.top);
    let found = stock::content(&made.top, "qcow2");
    ledger.check(0, &found, chosen.len(), chosen.len()).unwrap();
}

fn one(dir: &Path) -> (PathBuf, Vec<u8>) {
    let made = make(dir, &[LayerShape::qcow2(16, 1 << 20)], &mut random("one", 0));
    (made.top, made.model)
}

/// A flush of a write into a new cluster: one sync of the log, none of the image, which two would need.
#[test]
fn a_flush_of_a_new_cluster_is_one_sync_of_the_log() {
    let dir = scratch();
    let path = dir.path().join("disk");
    let options =
        vmstrata_disk::CreateOptions { size: Some(64 << 20), ..vmstrata_disk::CreateOptions::default() };
    vmstrata_disk::create(&path, &options).unwrap();
    let plan = FaultPlan::recording();
    let log_store: Arc<dyn Store> = Arc::new(FaultStore::new(empty(), &plan, LOG));
    let log = open_log(&log_store, boot(1)).unwrap();
    let files = FaultyFiles::new(&plan);
    let disk = open(&path, &resources(Arc::clone(&files) as Arc<dyn Opener>, &log, None)).unwrap();
    let image = files.id(&path);
    write(&disk, 0, &[1; 4096]).unwrap();
    disk.flush().unwrap();
    let flushes = |store| {
        let is_flush = |record: &&Record| {
            OperationKind::of(&record.operation) == OperationKind::Flush && record.store == store
        };
        plan.log().iter().filter(is_flush).count()
    };
    let before = (flushes(LOG), flushes(image));
    for cluster in 1..9 {
        write(&disk, cluster << 16, &[2; 4096]).unwrap();
        disk.flush().unwrap();
    }
    assert_eq!((flushes(LOG), flushes(image)), (before.0 + 8, before.1));
    disk.close().unwrap();
}

#[test]
fn an_image_behind_a_log_is_for_its_host_alone() {
    let dir = scratch();
    let (path, model) = one(dir.path());
    let log_store = empty();
    let log = open_log(&log_store, boot(1)).unwrap();
    let resources_of = |log: &Arc<FlushLog>| resources(Arc::new(LocalFiles), log, None);
    let disk = open(&path, &resources_of(&log)).unwrap();
    write(&disk, 0, &[7; 4096]).unwrap();
    disk.flush().unwrap();
    // As the power failure leaves it: the image without what the log has.
    let mut left = std::fs::read(&path).unwrap();
    let mut bytes = vec![0; LOG_LEN as usize];
    log_store.read_exact(&mut bytes, vmstrata_types::HostOffset::ZERO).unwrap();
    let at = left.windows(4096).position(|window| window == [7; 4096]).unwrap();
    disk.close().unwrap();
    drop(disk);
    left[at..at + 4096].fill(0);
    std::fs::write(&path, &left).unwrap();
    // Neither stock tools nor ours write it, and ours do not read it.
    let told = stock::text(&stock::try_qemu_io(&path, &[], &["write 0 512".to_owned()]));
    assert!(told.contains("corrupt"), "{told}");
    let behind =
        |error: vmstrata_disk::Error| assert!(matches!(error.kind(), ErrorKind::BehindLog), "{error}");
    behind(open(&path, &Resources::new(ResourceOptions::default())).unwrap_err());
    let read_only = OpenOptions { read_only: true, ..OpenOptions::default() };
    behind(Disk::open(&path, &read_only, &Resources::new(ResourceOptions::default())).unwrap_err());
    behind(open(&path, &resources_of(&open_log(&empty(), boot(2)).unwrap())).unwrap_err());
    // A repair that throws away what was flushed must be asked for.
    let mut repair = CheckOptions::default();
    repair.image.repair = vmstrata_check::Repair::All;
    assert!(matches!(check(&path, &repair).unwrap_err().kind(), ErrorKind::JournalStuck { .. }));
    assert_eq!(std::fs::read(&path).unwrap(), left);
    // The log has it.
    let log_of = |bytes: &Vec<u8>| Arc::new(MemoryStore::from_vec(bytes.clone())) as Arc<dyn Store>;
    let log = open_log(&log_of(&bytes), boot(2)).unwrap();
    let disk = open(&path, &resources_of(&log)).unwrap();
    disk.close().unwrap();
    drop(disk);
    stock::assert_clean(&path);
    let found = stock::content(&path, "qcow2");
    assert!(found[..4096] == [7; 4096] && found[4096..] == model[4096..]);
    // Nobody has it: what is asked for is done.
    std::fs::write(&path, &left).unwrap();
    repair.unflushed = vmstrata_disk::Unflushed::Discard;
    check(&path, &repair).unwrap();
    stock::assert_clean(&path);
    drop(open_read_only(&path));
    // And then the log is not brought into it.
    let refused = open_log(&log_of(&bytes), boot(2)).unwrap_err();
    assert!(refused.to_string().contains("another program has written it"), "{refused}");
    std::fs::remove_file(&path).unwrap();
    let refused = open_log(&log_of(&bytes), boot(2)).unwrap_err();
    assert!(refused.to_string().contains("no such file"), "{refused}");
}

/// A snapshot renames the file that the log has writes of, and the new one has its name.
#[test]
fn a_snapshot_takes_the_frozen_layer_out_of_the_log() {
    let dir = scratch();
    let (path, _) = one(dir.path());
    let log_store = empty();
    let log = open_log(&log_store, boot(1)).unwrap();
    let disk = open(&path, &resources(Arc::new(LocalFiles), &log, None)).unwrap();
    write(&disk, 0, &[7; 4096]).unwrap();
    disk.flush().unwrap();
    let frozen = path.metadata().unwrap().ino();
    disk.snapshot(&SnapshotInfo { name: "mon".to_owned(), ..SnapshotInfo::default() }).unwrap();
    write(&disk, 4096, &[8; 4096]).unwrap();
    disk.flush().unwrap();
    assert_eq!(log.usage().files, 1, "the overlay alone");
    let mut bytes = vec![0; LOG_LEN as usize];
    log_store.read_exact(&mut bytes, vmstrata_types::HostOffset::ZERO).unwrap();
    disk.close().unwrap();
    drop(disk);
    let layer = std::fs::read_dir(dir.path()).unwrap().map(|entry| entry.unwrap());
    let layer = layer.into_iter().find(|entry| entry.metadata().unwrap().ino() == frozen).unwrap().path();
    stock::assert_clean(&layer);
    assert_eq!(stock::content(&layer, "qcow2")[..4096], [7; 4096]);
    let found = stock::content(&path, "qcow2");
    assert!(found[..4096] == [7; 4096] && found[4096..8192] == [8; 4096]);
    stock::assert_clean(&path);
}
