//! Power failures around live snapshots: every write and flush to every layer is recorded while snapshots are taken; then
//! the host dies at many moments, in the middle of freezing a layer too. The disk is whole each time, with all that was
//! flushed, and a snapshot that was taken reads as the disk did then, whatever became of the layers above it. So it is where a flush
//! log makes flushes durable.

use std::collections::HashMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, OnceLock};

use crate::common::flat::{assert_same, read};
use crate::common::ledger::{Ledger, Step, steps, take};
use crate::common::shape::{LayerShape, make};
use crate::common::{for_seeds, open, open_read_only, random, scratch, stock};
use rand::Rng as _;
use vmstrata_disk::snapshot::SnapshotInfo;
use vmstrata_disk::{
    Disk, LocalFiles, OpenOptions, Opened, Opener, ResourceOptions, Resources, Role, open_logged,
    snapshot_together,
};
use vmstrata_flushlog::{FlushLog, Host, LoggedStore, Subject, Targets};
use vmstrata_store::{
    Crash, CrashKind, FaultPlan, FaultStore, FileId, Gate, MemoryStore, Moment, Operation, Record, Store,
    StoreId, Survivors,
};

const SNAPSHOTS: usize = 3;
const STEPS: usize = 25;
/// The flush log's store and its bytes, where there is one.
const LOG: StoreId = StoreId(u32::MAX);
const LOG_LEN: usize = 256 << 10;

/// Records what is done to files whatever their names are at the time, and what they held when they were first opened.
#[derive(Debug)]
struct Recorder {
    plan: Arc<FaultPlan>,
    files: Mutex<Vec<(FileId, Vec<u8>)>>,
    /// Makes the flushes of active layers durable, if it is there.
    flush_log: OnceLock<Arc<FlushLog>>,
}

/// Surviving files: the inode before the crash, and the path after it.
struct Left(Vec<(u64, PathBuf)>);

impl Targets for Left {
    fn open(&self, subject: &Subject, marks: &[u64]) -> io::Result<Option<Arc<dyn Store>>> {
        let (_, path) = self.0.iter().find(|(ino, _)| *ino == subject.ino).ok_or(io::ErrorKind::NotFound)?;
        let ino = file_of(path).ino;
        open_logged(path, ino, marks).map(Some).map_err(io::Error::other)
    }
}

fn open_log(store: Arc<dyn Store>, boot: u8, left: &Left) -> Arc<FlushLog> {
    let host = Host { id: [1; 16], boot: [boot; 16] };
    FlushLog::open(store, Path::new("/log"), host, left).unwrap_or_else(|error| panic!("{error}")).0
}

impl Opener for Recorder {
    fn open(&self, path: &Path, role: Role, gate: &Gate) -> vmstrata_disk::Result<Opened> {
        let opened = LocalFiles.open(path, role, gate)?;
        let mut files = self.files.lock().unwrap();
        let known = files.iter().position(|(file, _)| *file == opened.identity.file);
        let number = known.unwrap_or_else(|| {
            files.push((opened.identity.file, std::fs::read(path).expect("reads")));
            files.len() - 1
        });
        let id = StoreId(u32::try_from(number).expect("few files"));
        let mut store: Arc<dyn Store> = Arc::new(FaultStore::new(opened.store, &self.plan, id));
        if let (Some(log), Role::Active(_)) = (self.flush_log.get(), role) {
            store = LoggedStore::new(store, path.to_owned(), opened.identity.file.ino, log);
        }
        Ok(Opened { store, identity: opened.identity })
    }

    fn identity(&self, path: &Path, gate: &Gate) -> vmstrata_disk::Result<vmstrata_store::FileIdentity> {
        LocalFiles.identity(path, gate)
    }
}

/// A layer of the disk: the file that was active until a snapshot, or still is.
struct File {
    store: StoreId,
    ino: u64,
    before: Vec<u8>,
    /// From when on the disk's name leads to it.
    published: Moment,
}

struct Recording {
    files: Vec<File>,
    log: Vec<Record>,
    ledger: Ledger,
    steps: Vec<(Step, Moment, Moment)>,
    /// What each snapshot holds, and when it had been taken.
    states: Vec<(Vec<u8>, Moment)>,
    /// When nothing was left to do for it, where that is known.
    finalized: Vec<Moment>,
    opened: Moment,
    has_flush_log: bool,
}

/// `finalizes`: whether each snapshot is finalized before the disk is used again, or by the next one.
fn record(seed: u64, shape: LayerShape, finalizes: bool, has_flush_log: bool) -> Recording {
    let dir = scratch();
    let mut random = random("snapshots", seed);
    let has_subclusters = shape.subclusters;
    let made = make(dir.path(), &[shape], &mut random);
    // Overlays have subclusters of their own where the layer below has none.
    let overlay_unit = if has_subclusters { made.cluster } else { 4096 };
    let plan = FaultPlan::recording();
    let (files, flush_log) = Default::default();
    let recorder = Arc::new(Recorder { plan: Arc::clone(&plan), files, flush_log });
    if has_flush_log {
        let store = FaultStore::new(Arc::new(MemoryStore::from_vec(vec![0; LOG_LEN])), &plan, LOG);
        recorder.flush_log.get_or_init(|| open_log(Arc::new(store), 1, &Left(Vec::new())));
    }
    let options = ResourceOptions { metadata_cache_bytes: 0, workers: 1, ..ResourceOptions::default() };
    let resources = Resources::with_opener(options, Arc::clone(&recorder) as Arc<dyn Opener>);
    let disk = Disk::open(&made.top, &OpenOptions::default(), &resources).expect("opens");
    let opened = plan.now();
    let mut ledger = Ledger::new(&made.model, made.cluster);
    let (mut done, mut states, mut active) = (Vec::new(), Vec::new(), vec![(file_of(&made.top), opened)]);
    let mut finalized = Vec::new();
    for round in 0..=SNAPSHOTS {
        for step in steps(&mut random, STEPS, ledger.size(), made.cluster) {
            let began = plan.now();
            take(&disk, &step).expect("no faults here");
            ledger.enter(done.len() + 1, &step, true);
            done.push((step, began, plan.now()));
        }
        if round < SNAPSHOTS {
            let content = read(&disk, 0, disk.size() as usize).expect("reads");
            let began = plan.now();
            let info = SnapshotInfo { name: format!("s{round}"), ..SnapshotInfo::default() };
            snapshot_together(&[&disk], &info).expect("no faults here");
            // What it returned of is on stable storage.
            done.push((Step::Flush, began, plan.now()));
            states.push((content, plan.now()));
            ledger.set_cluster(overlay_unit);
            assert!(disk.is_finalizing());
            if finalizes {
                disk.finalize().expect("no faults here");
                finalized.push(plan.now());
            }
            active.push((file_of(&made.top), began));
        }
    }
    disk.close().expect("closes");
    drop(disk);
    let log = plan.log();
    let known = recorder.files.lock().unwrap();
    let files = active.into_iter().map(|(file, began)| {
        let number = known.iter().position(|(known, _)| *known == file).expect("it was opened");
        let store = StoreId(number as u32);
        File {
            store,
            ino: file.ino,
            before: known[number].1.clone(),
            published: published(&log, store, began),
        }
    });
    if let Some(log) = recorder.flush_log.get() {
        assert!(log.usage().records > 0, "nothing went to the log");
    }
    Recording { files: files.collect(), log, ledger, steps: done, states, finalized, opened, has_flush_log }
}

fn file_of(path: &Path) -> FileId {
    LocalFiles.identity(path, &Gate::unrestricted()).expect("there").file
}

/// The overlay gets the disk's name when it is ready for writes: nothing is recorded between its first flush and that.
fn published(log: &[Record], store: StoreId, began: Moment) -> Moment {
    let is_flush = |record: &&Record| {
        record.store == store && matches!(record.operation, Operation::Flush) && record.issued >= began
    };
    log.iter().find(is_flush).and_then(|record| record.completed).unwrap_or(began)
}

impl Recording {
    /// Writes the layers that survive the crash into `dir`, and replays the flush log into them. Returns the disk's path.
    fn leave(&self, dir: &Path, crash: Crash) -> PathBuf {
        let there = self.files.iter().take_while(|file| file.published < crash.at).count().max(1);
        let (top, mut left) = (dir.join("disk.qcow2"), Vec::new());
        for (number, file) in self.files[..there].iter().enumerate() {
            let path = if number + 1 == there { top.clone() } else { layer(dir, number) };
            std::fs::write(&path, crash.image(&file.before, &self.log, file.store)).expect("written");
            left.push((file.ino, path));
        }
        if self.has_flush_log {
            let bytes = crash.image(&vec![0; LOG_LEN], &self.log, LOG);
            let log = open_log(Arc::new(MemoryStore::from_vec(bytes)), 2, &Left(left));
            // Who opens the disk next says what became of its last session, as a server with the log does.
            let (plan, files, flush_log) = (FaultPlan::recording(), Mutex::default(), log.into());
            let resources = Resources::with_opener(
                ResourceOptions::default(),
                Arc::new(Recorder { plan, files, flush_log }) as Arc<dyn Opener>,
            );
            Disk::open(&top, &OpenOptions::default(), &resources).expect("opens").close().expect("closes");
        }
        top
    }

    fn crash(&self, crash: Crash, what: &str) {
        let dir = scratch();
        let top = self.leave(dir.path(), crash);
        stock::assert_safe(&top);
        let taken = self.states.iter().take_while(|(_, at)| *at <= crash.at).count();
        let is_flush = |step: &Step| matches!(step, Step::Flush);
        let flushed = self.steps.iter().rposition(|(step, _, ended)| is_flush(step) && *ended <= crash.at);
        let last = self.steps.iter().rposition(|(_, began, _)| *began < crash.at);
        let (flushed, last) = (flushed.map_or(0, |place| place + 1), last.map_or(0, |place| place + 1));
        let check = |bytes: &[u8], how: &str| {
            let checked = self.ledger.check(0, bytes, flushed, last);
            checked.unwrap_or_else(|error| panic!("{what}, {crash:?}, {taken} taken, {how}: {error}"));
        };
        check(&stock::content(&top, "qcow2"), "stock tools");
        let disk = open(&top);
        check(&read(&disk, 0, disk.size() as usize).expect("reads"), "its successor");
        disk.snapshot(&SnapshotInfo { name: "after".into(), ..SnapshotInfo::default() }).expect("goes on");
        disk.close().expect("closes");
        drop(disk);
        stock::assert_safe(&top);
        for (number, (content, _)) in self.states[..taken].iter().enumerate() {
            let layer = layer(dir.path(), number);
            stock::assert_safe(&layer);
            let snapshot = open_read_only(&layer);
            let found = read(&snapshot, 0, content.len()).expect("reads");
            assert_same(&found, content, 0, &format!("{what}, {crash:?}, snapshot {number}"));
        }
    }
}

fn layer(dir: &Path, number: usize) -> PathBuf {
    // As the overlays' headers name them.
    dir.join(format!("{STEM}.s{number}.qcow2"))
}

/// The stem of the file that `make` makes for a chain of one layer.
const STEM: &str = "layer0";

#[test]
fn snapshots_survive_power_failures() {
    for_seeds(4, |seed| {
        let (bits, size) =
            [(12, 300 << 10), (9, 200 << 10), (12, 300 << 10), (14, 300 << 10)][seed as usize % 4];
        let shape = LayerShape { subclusters: bits == 14, ..LayerShape::qcow2(bits, size) };
        let recording = record(seed, shape, seed < 2, false);
        recording.cut_around_snapshots(seed);
    });
}

#[test]
fn snapshots_behind_a_flush_log_survive_power_failures() {
    for_seeds(2, |seed| {
        let shape = LayerShape { subclusters: seed == 1, ..LayerShape::qcow2(14, 300 << 10) };
        record(seed, shape, seed == 0, true).cut_around_snapshots(seed);
    });
}

impl Recording {
    /// At many moments, and at each operation of the freezing of a layer in turn.
    fn cut_around_snapshots(&self, seed: u64) {
        let end = self.log.iter().map(|record| record.issued).max().expect("it wrote");
        let mut random = random("cuts", seed);
        let mut moments: Vec<Moment> =
            (0..24).map(|_| Moment(random.random_range(self.opened.0..=end.0))).collect();
        let ends = self.states.iter().map(|(_, taken)| *taken);
        let finalized = self.finalized.iter().copied().chain(ends.skip(self.finalized.len()));
        for (file, end) in self.files[1..].iter().zip(finalized) {
            moments.extend((file.published.0..=end.0 + 1).map(Moment));
        }
        for at in moments {
            for survivors in [Survivors::None, Survivors::Seeded(random.random())] {
                self.crash(Crash { kind: CrashKind::Power, at, survivors }, &format!("seed {seed}"));
            }
        }
    }
}

/// The recording itself: with nothing lost, the files are what they are.
#[test]
fn a_crash_that_loses_nothing_leaves_everything() {
    let recording = record(7, LayerShape::qcow2(12, 300 << 10), true, false);
    assert_eq!((recording.files.len(), recording.states.len()), (SNAPSHOTS + 1, SNAPSHOTS));
    let by_store: HashMap<_, _> = recording.files.iter().map(|file| (file.store, file.published)).collect();
    assert_eq!(by_store.len(), SNAPSHOTS + 1, "each layer is a file of its own");
    let all = Crash { kind: CrashKind::Power, at: Moment(u64::MAX), survivors: Survivors::All };
    recording.crash(all, "nothing lost");
}

/// A process that was killed may have left the end of a layer's session in the page cache alone.
#[test]
fn the_newest_frozen_layer_is_flushed_when_a_disk_is_opened_for_writing() {
    let dir = scratch();
    let shapes = [LayerShape::qcow2(12, 300 << 10), LayerShape::qcow2(12, 300 << 10)];
    let made = make(dir.path(), &shapes, &mut random("opened", 0));
    let (plan, files, flush_log) = (FaultPlan::recording(), Default::default(), OnceLock::new());
    let recorder = Arc::new(Recorder { plan: Arc::clone(&plan), files, flush_log });
    let resources =
        Resources::with_opener(ResourceOptions::default(), Arc::clone(&recorder) as Arc<dyn Opener>);
    let disk = Disk::open(&made.top, &OpenOptions::default(), &resources).expect("opens");
    let frozen = recorder.files.lock().unwrap().iter().position(|(file, _)| *file != file_of(&made.top));
    let frozen = StoreId(frozen.expect("it was opened") as u32);
    let is_flush = |record: &Record| record.store == frozen && matches!(record.operation, Operation::Flush);
    assert!(plan.log().iter().any(is_flush));
    disk.close().expect("closes");
}
