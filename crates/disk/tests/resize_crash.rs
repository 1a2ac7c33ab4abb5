//! Power failures, failing hosts and killed processes in the middle of a resize: the disk has the one size or the other,
//! reads what it must, and no tool finds it corrupt.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use crate::common::faulty::FaultyFiles;
use crate::common::flat::{assert_reads, assert_same, read, write};
use crate::common::shape::{LayerShape, Made, make};
use crate::common::stock::{assert_clean, assert_safe, content, path_str};
use crate::common::{open, open_read_only, random, scratch, small_resources, wait_until};
use rand::Rng as _;
use vmstrata_disk::{CheckOptions, Disk, ErrorKind, OpenOptions, Shrink, check};
use vmstrata_store::{Crash, CrashKind, Effect, Fault, FaultPlan, Moment, OperationKind, Survivors, When};

const KIB: u64 = 1 << 10;

/// A chain, and the size that its disk is to have.
struct Case {
    what: &'static str,
    layers: Vec<LayerShape>,
    to: u64,
}

fn cases() -> Vec<Case> {
    let quiet = |shape: LayerShape| LayerShape { operations: 6, ..shape };
    vec![
        Case {
            // One L1 entry of 512-byte clusters is 32 KiB: the table moves, and takes more than a cluster.
            what: "a longer L1 table",
            layers: vec![quiet(LayerShape::qcow2(9, 200 * KIB))],
            to: 5000 * KIB + 512,
        },
        Case {
            // One L1 entry of 4 KiB clusters is 2 MiB: there is room for 512 in the table's cluster.
            what: "an L1 table that stays where it is",
            layers: vec![quiet(LayerShape::qcow2(12, 300 * KIB))],
            to: 5000 * KIB + 512,
        },
        Case {
            what: "over a longer backing file",
            layers: vec![LayerShape::qcow2(12, 900 * KIB), quiet(LayerShape::qcow2(9, 100 * KIB + 512))],
            to: 700 * KIB,
        },
        Case {
            what: "over a longer backing file, version 2",
            layers: vec![
                LayerShape::qcow2(12, 500 * KIB),
                quiet(LayerShape { version: 2, ..LayerShape::qcow2(12, 100 * KIB) }),
            ],
            to: 300 * KIB,
        },
        Case {
            what: "shorter",
            layers: vec![LayerShape::qcow2(12, 300 * KIB), LayerShape::qcow2(9, 400 * KIB)],
            to: 101 * KIB + 512,
        },
        Case {
            what: "with subclusters, over a longer backing file",
            layers: vec![
                LayerShape::qcow2(12, 500 * KIB),
                quiet(LayerShape { subclusters: true, ..LayerShape::qcow2(14, 100 * KIB + 512) }),
            ],
            to: 300 * KIB,
        },
        Case {
            what: "shorter, with subclusters",
            layers: vec![LayerShape { subclusters: true, ..LayerShape::qcow2(14, 400 * KIB) }],
            to: 101 * KIB + 512,
        },
        Case {
            what: "shorter, with tables shared with a snapshot",
            layers: vec![LayerShape { snapshots: 1, ..LayerShape::qcow2(9, 300 * KIB) }],
            to: 64 * KIB,
        },
    ]
}

impl Case {
    /// What the disk reads as with the new size.
    fn after(&self, made: &Made) -> Vec<u8> {
        let mut model = made.model.clone();
        model.resize(self.to as usize, 0);
        model
    }
}

/// Makes sure that what is left in `top` is the one or the other; returns whether it has the new size.
fn assert_one_of_both(case: &Case, made: &Made, ask_stock: bool, what: &str) -> bool {
    let options = CheckOptions { force_share: true, ..CheckOptions::default() };
    let report = check(&made.top, &options).expect("checks");
    assert_eq!((report.corruptions, report.check_errors), (0, 0), "{what}: {:?}", report.findings);
    let disk = open_read_only(&made.top);
    let size = disk.size();
    let after = case.after(made);
    assert!([made.model.len(), after.len()].contains(&(size as usize)), "{what}: {size} bytes");
    let is_new = size == after.len() as u64;
    // Of what a disk is about to lose, anything may be left.
    let kept = if is_new { &after[..] } else { &made.model[..made.model.len().min(after.len())] };
    assert_same(&read(&disk, 0, kept.len()).expect("reads"), kept, 0, what);
    if ask_stock {
        assert_safe(&made.top);
        assert_same(&content(&made.top, "qcow2")[..kept.len()], kept, 0, what);
    }
    is_new
}

/// Does it once more, and then everything is as if nothing had happened.
fn assert_completed(case: &Case, made: &Made, what: &str) {
    let disk = open(&made.top);
    disk.resize(case.to, Shrink::Allow).expect("completes");
    assert_reads(&disk, &case.after(made), what);
    disk.close().expect("closes");
    drop(disk);
    assert_safe(&made.top);
    assert_same(&content(&made.top, "qcow2"), &case.after(made), 0, what);
}

#[test]
fn resizing_survives_power_failures_at_every_operation() {
    for (seed, case) in cases().into_iter().enumerate() {
        let dir = scratch();
        let made = make(dir.path(), &case.layers, &mut random("resize crash", seed as u64));
        let before = std::fs::read(&made.top).expect("made");
        let plan = FaultPlan::recording();
        let files = FaultyFiles::new(&plan);
        let disk = Disk::open(&made.top, &OpenOptions::default(), &files.resources()).expect("opens");
        disk.resize(case.to, Shrink::Allow).expect("no faults here");
        let resized = plan.now();
        disk.close().expect("closes");
        drop(disk);
        assert_clean(&made.top);
        let (log, store) = (plan.log(), files.id(&made.top));
        let end = log.iter().map(|record| record.completed.unwrap_or(record.issued)).max().expect("it wrote");
        let mut sizes = [0, 0];
        for at in 0..=end.0 {
            for survivors in [Survivors::None, Survivors::All, Survivors::Seeded(at), Survivors::Seeded(!at)]
            {
                let crash = Crash { kind: CrashKind::Power, at: Moment(at), survivors };
                std::fs::write(&made.top, crash.image(&before, &log, store)).expect("written");
                let what = format!("{}: {crash:?}", case.what);
                let is_new = assert_one_of_both(&case, &made, at % 16 == 0, &what);
                sizes[usize::from(is_new)] += 1;
                assert!(is_new || at < resized.0, "{what}: a size that was acknowledged is lost");
                if at % 24 == 0 && survivors != Survivors::All {
                    assert_completed(&case, &made, &what);
                }
            }
        }
        assert!(sizes[0] > 0 && sizes[1] > 0, "{}: both sizes were seen, {sizes:?}", case.what);
    }
}

/// Each operation in turn fails, for good or with a part of it done.
#[test]
fn no_failure_of_the_host_makes_a_disk_unsound() {
    for (seed, case) in cases().into_iter().enumerate() {
        let kinds = [OperationKind::Write, OperationKind::Flush, OperationKind::Read, OperationKind::Len];
        for (kind, nth) in kinds.into_iter().flat_map(|kind| (0..40).map(move |nth| (kind, nth))) {
            let dir = scratch();
            let made = make(dir.path(), &case.layers, &mut random("resize faults", seed as u64));
            let plan = FaultPlan::new();
            let files = FaultyFiles::new(&plan);
            let disk = Disk::open(&made.top, &OpenOptions::default(), &files.resources()).expect("opens");
            let opened = plan.count(Some(kind));
            let effect = Effect::Tear { bytes: 700 * (nth as usize % 2), errno: 5 };
            plan.add(Fault { kind: Some(kind), store: None, when: When::Nth(opened + nth), effect });
            let resized = disk.resize(case.to, Shrink::Allow);
            let befell = plan.count(Some(kind)) > opened + nth;
            let what = format!("{}: {kind:?} {nth}: {resized:?}", case.what);
            assert!(befell || resized.is_ok(), "{what}");
            // In use, it has the size that it says, and reads are right.
            let wanted = if resized.is_ok() { case.to } else { made.model.len() as u64 };
            assert_eq!(disk.size(), wanted, "{what}");
            let kept = &made.model[..made.model.len().min(case.to as usize)];
            assert_same(&read(&disk, 0, kept.len()).expect("reads"), kept, 0, &what);
            let closed = disk.close();
            drop(disk);
            let is_new = assert_one_of_both(&case, &made, nth % 8 == 0, &what);
            assert!(is_new || resized.is_err(), "{what}: acknowledged and lost");
            if nth % 4 == 0 {
                assert_completed(&case, &made, &format!("{what}, {closed:?}"));
            }
            if !befell {
                break;
            }
        }
    }
}

/// A host that is full says so; the disk is as it was, goes on, and grows when there is room.
#[test]
fn a_full_host_leaves_a_disk_as_it_was() {
    let case = &cases()[0];
    for (nth, what) in ["write a longer L1 table", "write the header", "free the old one"].iter().enumerate()
    {
        let dir = scratch();
        let made = make(dir.path(), &case.layers, &mut random("resize full", nth as u64));
        let plan = FaultPlan::new();
        let files = FaultyFiles::new(&plan);
        let disk = Disk::open(&made.top, &OpenOptions::default(), &files.resources()).expect("opens");
        let when = When::Nth(plan.count(Some(OperationKind::Write)) + nth as u64);
        plan.add(Fault { kind: Some(OperationKind::Write), store: None, when, effect: Effect::Fail(28) });
        let resized = disk.resize(case.to, Shrink::Refuse);
        if nth < 2 {
            let full = resized.unwrap_err();
            assert!(full.errno() == 28 && full.to_string().contains(what), "{full}");
        } else {
            resized.expect("a leak is no reason not to grow");
        }
        let written = write(&disk, 0, &[1; 512]);
        if nth == 1 {
            // Which header a power failure would show is not known.
            let failed = written.unwrap_err();
            assert!(matches!(failed.kind(), ErrorKind::Failed { .. }), "{failed}");
            continue;
        }
        written.expect("the disk goes on");
        disk.resize(case.to, Shrink::Refuse).expect("there is room now");
        write(&disk, case.to - 512, &[2; 512]).expect("writes");
        disk.close().expect("closes");
        drop(disk);
        assert_safe(&made.top);
    }
}

/// What the child finds its orders in: the image.
const ORDERS: &str = "VMSTRATA_TEST_RESIZE_CHILD";
const SMALL: u64 = 256 * KIB;

fn open_with_journal(top: &Path) -> std::sync::Arc<Disk> {
    let journals = top.parent().expect("in a directory").join("journals");
    let resources = small_resources(Some(journals.as_path()));
    Disk::open(top, &OpenOptions::default(), &resources).expect("the disk opens")
}

fn report_of(top: &Path) -> PathBuf {
    top.with_file_name("reported")
}

/// The child: writes blocks without flushing and says which, while it resizes over and over.
#[test]
#[ignore = "the process that the other test starts and kills"]
fn child_that_resizes_until_it_is_killed() {
    use std::io::Write as _;
    let Ok(top) = std::env::var(ORDERS) else { return };
    let top = PathBuf::from(top);
    let disk = open_with_journal(&top);
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for turn in 0..u64::MAX {
                if stop.load(Ordering::Relaxed) {
                    break;
                }
                let to = SMALL + (turn % 3) * 700 * KIB;
                disk.resize(to, Shrink::Allow).expect("resizes");
            }
        });
        let mut reported = std::fs::File::create(report_of(&top)).expect("opens");
        for number in 0..100_000u64 {
            let block = number % (SMALL / 512);
            let value = (number / (SMALL / 512) + 1) as u8;
            write(&disk, block * 512, &[value; 512]).expect("writes");
            reported.write_all(b".").expect("reports");
        }
        stop.store(true, Ordering::Relaxed);
    });
    std::thread::park();
}

/// Of a disk over a longer backing file, so that entries past its end are in the journal.
#[test]
fn what_a_guest_wrote_survives_a_process_that_is_killed_while_it_resizes() {
    for seed in 0..12 {
        let dir = scratch();
        let base = LayerShape { operations: 40, ..LayerShape::qcow2(12, 2048 * KIB) };
        let mut random = random("resize kill", seed);
        let made = make(
            dir.path(),
            &[base, LayerShape { operations: 0, ..LayerShape::qcow2(9, SMALL) }],
            &mut random,
        );
        let mut child = Command::new(std::env::current_exe().expect("the test binary"))
            .args([
                "--exact",
                "resize_crash::child_that_resizes_until_it_is_killed",
                "--ignored",
                "--nocapture",
            ])
            .env(ORDERS, path_str(&made.top))
            .stdout(Stdio::null())
            .spawn()
            .expect("the child starts");
        let reported = || std::fs::metadata(report_of(&made.top)).map_or(0, |report| report.len());
        wait_until("the child's work", || reported() >= 100);
        std::thread::sleep(Duration::from_micros(random.random_range(0..40_000)));
        child.kill().expect("killed");
        child.wait().expect("gone");
        let completed = reported();
        assert_safe(&made.top);
        let disk = open_with_journal(&made.top);
        assert!([SMALL, SMALL + 700 * KIB, SMALL + 1400 * KIB].contains(&disk.size()), "{}", disk.size());
        let blocks = SMALL / 512;
        for block in 0..blocks {
            let found = read(&disk, block * 512, 512).expect("reads");
            let newest = (completed + blocks - 1 - block) / blocks;
            let expected: Vec<u8> = (newest..=newest + 1).map(|round| round as u8).collect();
            let was = &made.model[(block * 512) as usize..((block + 1) * 512) as usize];
            let old = newest == 0 && found == was;
            assert!(
                old || found.iter().all(|byte| *byte == found[0]) && expected.contains(&found[0]),
                "seed {seed}: block {block} of {completed} writes holds {:?}, not {expected:?}",
                &found[..4]
            );
        }
        let rest = read(&disk, SMALL, (disk.size() - SMALL) as usize).expect("reads");
        assert!(rest.iter().all(|byte| *byte == 0), "seed {seed}: what lies below shows");
        disk.close().expect("closes");
        drop(disk);
        assert_safe(&made.top);
    }
}
