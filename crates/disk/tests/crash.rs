//! Power failures: every write, hole and flush of a workload is recorded; then the host dies at many moments, and of
//! what no completed flush covers any sector may or may not have reached the disk. Whatever is left must be an image
//! without corruption, in which every sector holds a value it had at or after the last completed flush.

use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::common::faulty::FaultyFiles;
use crate::common::flat::{assert_same, pattern, read, write};
use crate::common::io::Client;
use crate::common::ledger::{BLOCK, Ledger, Step, THREADS, batches, steps, striped, take};
use crate::common::shape::{LayerShape, make};
use crate::common::{for_seeds, open, open_read_only, random, scratch, stock};
use rand::Rng as _;
use rand::rngs::SmallRng;
use vmstrata_disk::{CheckOptions, Disk, OpenOptions, check};
use vmstrata_store::{Crash, CrashKind, FaultPlan, Moment, Operation, Record, StoreId, Survivors};

/// A workload that ran, with everything the active file was told.
struct Recording {
    _dir: tempfile::TempDir,
    top: PathBuf,
    /// The active file before the first operation.
    before: Vec<u8>,
    log: Vec<Record>,
    store: StoreId,
    ledger: Ledger,
    /// The steps, with the moments at which they began and ended.
    steps: Vec<(Step, Moment, Moment)>,
    opened: Moment,
}

/// Runs the steps that `choose` gives on a new chain, one by one, and records.
fn record(
    layers: &[LayerShape],
    name: &str,
    seed: u64,
    choose: impl FnOnce(&mut SmallRng, u64, u64) -> Vec<Step>,
) -> Recording {
    record_batches(layers, name, seed, None, |random, size, cluster| {
        batches(choose(random, size, cluster), 1)
    })
}

/// Runs batches of steps, each at the same time if there is a queue, and records. The active layer's file has the `queue`'s
/// alignment: from 2 on, its ring writes in place, else its thread.
fn record_batches(
    layers: &[LayerShape],
    name: &str,
    seed: u64,
    queue: Option<usize>,
    choose: impl FnOnce(&mut SmallRng, u64, u64) -> Vec<Vec<Step>>,
) -> Recording {
    let dir = scratch();
    let mut random = random(name, seed);
    let made = make(dir.path(), layers, &mut random);
    let before = std::fs::read(&made.top).expect("made");
    let plan = FaultPlan::recording();
    if seed % 2 == 1 {
        plan.read_now();
    }
    let files = FaultyFiles::aligned(&plan, queue.unwrap_or(1));
    let disk = Disk::open(&made.top, &OpenOptions::default(), &files.resources()).expect("opens");
    let mut client = queue.map(|_| Client::new(&disk, 8));
    let opened = plan.now();
    let mut ledger = Ledger::new(&made.model, made.cluster);
    let mut taken = Vec::new();
    let chosen = choose(&mut random, ledger.size(), made.cluster);
    for batch in chosen {
        let began = plan.now();
        let results = match &mut client {
            Some(client) => client.take(&batch),
            None => batch.iter().map(|step| take(&disk, step)).collect(),
        };
        results.into_iter().for_each(|result| drop(result.expect("no faults here")));
        let ended = plan.now();
        for step in batch {
            ledger.enter(taken.len() + 1, &step, true);
            taken.push((step, began, ended));
        }
        if queue.is_none() && taken.len() % 40 == 0 {
            // The housekeeping thread gives freed clusters back once a second; later writes reuse them.
            std::thread::sleep(Duration::from_millis(1100));
        }
    }
    drop(client);
    disk.close().expect("closes");
    drop(disk);
    stock::assert_clean(&made.top);
    let store = files.id(&made.top);
    Recording { top: made.top, _dir: dir, before, log: plan.log(), store, ledger, steps: taken, opened }
}

/// A random workload.
fn some(count: usize) -> impl FnOnce(&mut SmallRng, u64, u64) -> Vec<Step> {
    move |random, size, cluster| steps(random, count, size, cluster)
}

impl Recording {
    fn end(&self) -> Moment {
        self.log.iter().map(|record| record.completed.unwrap_or(record.issued)).max().expect("it wrote")
    }

    /// Most writes that were issued and not completed.
    fn in_flight_max(&self) -> usize {
        let at = |moment| {
            let is_in_flight =
                |record: &&Record| record.issued <= moment && record.completed.is_none_or(|end| end > moment);
            self.log.iter().filter(is_in_flight).count()
        };
        (self.opened.0..=self.end().0).map(Moment).map(at).max().unwrap_or(0)
    }

    /// The last flush step that had ended, and the last step that had begun, at a moment.
    fn steps_at(&self, at: Moment) -> (usize, usize) {
        let is_flush = |step: &Step| matches!(step, Step::Flush);
        let flushed = self.steps.iter().rposition(|(step, _, ended)| is_flush(step) && *ended <= at);
        let last = self.steps.iter().rposition(|(_, began, _)| *began < at);
        (flushed.map_or(0, |place| place + 1), last.map_or(0, |place| place + 1))
    }

    /// Lets the host die, and looks at what is left, in the recording's own directory.
    fn crash(&self, crash: Crash, ask_stock: bool, go_on: bool) {
        std::fs::write(&self.top, crash.image(&self.before, &self.log, self.store)).expect("written");
        assert_sound(&self.top, ask_stock, &crash);
        let bytes = content(&self.top);
        let (flushed, last) = self.steps_at(crash.at);
        let checked = self.ledger.check(0, &bytes, flushed, last);
        checked.unwrap_or_else(|error| panic!("{crash:?}, flushed {flushed}, last {last}: {error}"));
        if go_on {
            self.use_after(bytes, &format!("{crash:?}"));
        }
    }

    /// A successor writes to what is left.
    fn use_after(&self, mut bytes: Vec<u8>, what: &str) {
        let disk = open(&self.top);
        for at in (0..bytes.len() as u64 - 4096).step_by(bytes.len() / 9 / 512 * 512) {
            write(&disk, at, &[0x5A; 1536]).expect("writes");
            bytes[at as usize..at as usize + 1536].fill(0x5A);
        }
        disk.close().expect("closes");
        drop(disk);
        stock::assert_safe(&self.top);
        assert_same(&stock::content(&self.top, "qcow2"), &bytes, 0, what);
    }

    /// Cuts at `count` moments, with nothing, everything, and random parts of what was in doubt.
    fn cut(&self, seed: u64, count: u64) {
        let mut random = random("cuts", seed);
        let moments: Vec<u64> =
            (0..count).map(|_| random.random_range(self.opened.0..=self.end().0)).collect();
        self.cut_at(moments, random);
    }

    fn cut_at(&self, moments: impl IntoIterator<Item = u64>, mut random: SmallRng) {
        let soak = std::env::var_os("VMSTRATA_SOAK_SECONDS").is_some();
        for (number, at) in (0..).zip(moments) {
            let at = Moment(at);
            for survivors in [
                Survivors::None,
                Survivors::All,
                Survivors::Seeded(random.random()),
                Survivors::Seeded(number),
            ] {
                let crash = Crash { kind: CrashKind::Power, at, survivors };
                self.crash(crash, soak || number % 64 == 0, number % 64 == 1);
            }
        }
    }
}

/// No corruption, by our own check and if need be by the stock one.
fn assert_sound(path: &Path, ask_stock: bool, crash: &Crash) {
    let options = CheckOptions { force_share: true, ..CheckOptions::default() };
    let report = check(path, &options).expect("checks");
    assert_eq!((report.corruptions, report.check_errors), (0, 0), "{crash:?}: {:?}", report.findings);
    if ask_stock {
        stock::assert_safe(path);
    }
}

fn content(path: &Path) -> Vec<u8> {
    let disk = open_read_only(path);
    read(&disk, 0, disk.size() as usize).expect("reads")
}

/// How often one kind of operation is in the log.
fn count(log: &[Record], wanted: impl Fn(&Operation) -> bool) -> usize {
    log.iter().filter(|record| wanted(&record.operation)).count()
}

#[test]
fn allocation_and_copy_on_write_survive_power_failures() {
    for_seeds(2, |seed| {
        let base = LayerShape::qcow2(14, 500 << 10);
        let active = LayerShape { operations: 5, ..LayerShape::qcow2(12, 400 << 10) };
        let with_subclusters = LayerShape { subclusters: true, cluster_bits: 15, ..active.clone() };
        for active in [active, with_subclusters] {
            let recording = record(&[base.clone(), active], "copy-on-write", seed, some(120));
            recording.cut(seed, 250);
        }
    });
}

/// Clusters of 512 bytes and refcounts of 64 bits: the first refcount table covers 2 MiB, then it must move.
#[test]
fn growing_refcounts_survive_power_failures() {
    for_seeds(1, |seed| {
        let layer = LayerShape { refcount_bits: 64, operations: 0, ..LayerShape::qcow2(9, 3 << 20) };
        let recording = record(&[layer], "growth", seed, |random, _, _| {
            let mut step = |number: u64| {
                let at = number * (128 << 10) + random.random_range(0..8) * 512;
                if number % 4 == 3 {
                    Step::Flush
                } else {
                    Step::Write { at, bytes: pattern(random, 120 << 10) }
                }
            };
            (0..24).map(&mut step).collect()
        });
        let header =
            |operation: &Operation| matches!(operation, Operation::Write { at, .. } if at.get() == 48);
        assert!(count(&recording.log, header) > 0, "the refcount table did not grow");
        recording.cut(seed, 60);
    });
}

/// An internal snapshot: tables and clusters are shared, and copied before they change.
#[test]
fn copied_tables_survive_power_failures() {
    for_seeds(2, |seed| {
        let layer = LayerShape { snapshots: 1, compressed: Some("zlib"), ..LayerShape::qcow2(10, 300 << 10) };
        let with_subclusters = LayerShape { subclusters: true, cluster_bits: 14, ..layer.clone() };
        for layer in [layer, with_subclusters] {
            let recording = record(&[layer], "tables", seed, some(120));
            recording.cut(seed, 250);
        }
    });
}

/// Discards, zero-writes, and clusters that go from one part of the disk to another after they were reclaimed.
#[test]
fn reused_clusters_survive_power_failures() {
    for_seeds(1, |seed| {
        let layer = LayerShape { operations: 0, ..LayerShape::qcow2(12, 256 << 10) };
        let recording = record(&[layer], "reuse", seed, |random, size, cluster| {
            let mut steps = steps(random, 160, size, cluster);
            for (number, step) in steps.iter_mut().enumerate() {
                match number % 40 {
                    37 => *step = Step::Discard { at: number as u64 / 40 * (32 << 10), len: 128 << 10 },
                    38 => *step = Step::Flush,
                    _ => {}
                }
            }
            steps
        });
        let freed = count(&recording.log, |operation| matches!(operation, Operation::PunchHole { .. }));
        assert!(freed > 3, "too little was freed");
        recording.cut(seed, 250);
    });
}

/// Several writes of a queue are in flight when the power fails, at each beginning and end of any of them.
#[test]
fn writes_in_flight_survive_power_failures() {
    for_seeds(2, |seed| {
        for alignment in [1, 512] {
            let base = LayerShape::qcow2(14, 300 << 10);
            let active = LayerShape { operations: 8, ..LayerShape::qcow2(12, 200 << 10) };
            let choose = |random: &mut SmallRng, size, cluster: u64| {
                let mut steps = steps(random, 60, size, cluster);
                // Whatever the seed, some clusters are overwritten at the same time.
                steps.push(Step::Write { at: 0, bytes: pattern(random, 5 * cluster as usize) });
                steps.push(Step::Flush);
                let one = |at| Step::Write { at: at * cluster, bytes: pattern(random, cluster as usize) };
                steps.extend((0..5).map(one));
                batches(steps, 6)
            };
            let recording = record_batches(&[base, active], "in flight", seed, Some(alignment), choose);
            if alignment > 1 {
                assert!(recording.in_flight_max() > 2, "too few writes at a time");
            }
            recording.cut_at(recording.opened.0..=recording.end().0, random("cuts", seed));
        }
    });
}

/// What a thread did, and when.
type Taken = Vec<(Step, Moment, Moment)>;

/// Several threads write and flush, and share commits: a flush covers what had completed, on any thread, before it
/// began.
#[test]
fn flushes_of_several_threads_cover_each_other() {
    for_seeds(2, |seed| {
        let dir = scratch();
        let size = 600 << 10;
        let bits = [9, 12][seed as usize % 2];
        let active = LayerShape { operations: 3, ..LayerShape::qcow2(bits, size) };
        let made = make(dir.path(), &[LayerShape::qcow2(14, size), active], &mut random("threads", seed));
        let before = std::fs::read(&made.top).expect("made");
        let plan = FaultPlan::recording();
        let files = FaultyFiles::new(&plan);
        let disk = Disk::open(&made.top, &OpenOptions::default(), &files.resources()).expect("opens");
        let opened = plan.now();
        let work = |me| -> Taken {
            let steps = striped(seed, me, 60, size).into_iter();
            let one = |step: Step| {
                let began = plan.now();
                take(&disk, &step).expect("no faults here");
                (step, began, plan.now())
            };
            steps.map(one).collect()
        };
        let threads: Vec<Taken> = std::thread::scope(|scope| {
            let work = &work;
            let threads: Vec<_> = (0..THREADS).map(|me| scope.spawn(move || work(me))).collect();
            threads.into_iter().map(|thread| thread.join().expect("no thread fails")).collect()
        });
        let log = plan.log();
        disk.close().expect("closes");
        drop(disk);
        let store = files.id(&made.top);
        let mut random = random("cuts", seed);
        for number in 0..400 {
            let at = Moment(random.random_range(opened.0..=log.last().expect("it wrote").issued.0));
            let survivors =
                if number % 4 == 0 { Survivors::None } else { Survivors::Seeded(random.random()) };
            let crash = Crash { kind: CrashKind::Power, at, survivors };
            std::fs::write(&made.top, crash.image(&before, &log, store)).expect("written");
            assert_sound(&made.top, number % 64 == 0, &crash);
            let bytes = content(&made.top);
            assert_striped(&bytes, &threads, &made.model, crash);
        }
    });
}

/// Checks the blocks of each thread by what it did, and by all flushes.
fn assert_striped(bytes: &[u8], threads: &[Taken], before: &[u8], crash: Crash) {
    let flushes =
        threads.iter().flatten().filter(|(step, _, ended)| matches!(step, Step::Flush) && *ended <= crash.at);
    let covered = flushes.map(|(_, began, _)| *began).max().unwrap_or_default();
    for (me, taken) in threads.iter().enumerate() {
        let mut ledger = Ledger::new(before, BLOCK);
        for (number, (step, ..)) in taken.iter().enumerate() {
            ledger.enter(number + 1, step, true);
        }
        let flushed = taken.iter().take_while(|(_, _, ended)| *ended <= covered).count();
        let last = taken.iter().take_while(|(_, began, _)| *began < crash.at).count();
        for (number, block) in bytes.chunks(BLOCK as usize).enumerate() {
            if number % THREADS as usize == me {
                let checked = ledger.check(number as u64 * BLOCK, block, flushed, last);
                checked.unwrap_or_else(|error| panic!("{crash:?}, thread {me}, {flushed} flushed: {error}"));
            }
        }
    }
}

/// The recorder itself: what it calls the newest state is the file as it is.
#[test]
fn a_crash_that_loses_nothing_is_the_file_as_it_is() {
    let recording = record(&[LayerShape::qcow2(12, 300 << 10)], "nothing lost", 0, some(30));
    let end = Crash { kind: CrashKind::Power, at: recording.end(), survivors: Survivors::All };
    let now = std::fs::read(Path::new(&recording.top)).expect("reads");
    assert_same(&end.image(&recording.before, &recording.log, recording.store), &now, 0, "the file");
}
