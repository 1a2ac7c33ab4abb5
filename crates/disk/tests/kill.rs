//! A real process is killed with SIGKILL while it writes: what it had completed is there for its successor, and stock
//! tools find no corruption before or after.

use std::fs::OpenOptions as FileOptions;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use crate::common::flat::{assert_same, read, write};
use crate::common::ledger::{BLOCK, Ledger, Step, THREADS, steps, striped, take};
use crate::common::shape::{LayerShape, make};
use crate::common::{for_seeds, random, scratch, small_resources, stock, wait_until};
use rand::Rng as _;
use vmstrata_disk::{Disk, ErrorKind, OpenOptions, Resources, Unflushed};

const STEPS: usize = 4000;
/// What the child finds its orders in: seed, cluster size, "journal", "none" or "threads", and the image.
const ORDERS: &str = "VMSTRATA_TEST_CHILD";

fn resources(top: &Path, journal: bool) -> Arc<Resources> {
    let journals = top.parent().expect("in a directory").join("journals");
    small_resources(journal.then_some(journals.as_path()))
}

fn open(top: &Path, journal: bool) -> Arc<Disk> {
    Disk::open(top, &OpenOptions::default(), &resources(top, journal)).expect("the disk opens")
}

fn workload(seed: u64, size: u64, cluster: u64) -> Vec<Step> {
    steps(&mut random("killed", seed), STEPS, size, cluster)
}

/// The child: works, and says after each step that it has completed.
#[test]
#[ignore = "the process that the other tests start and kill"]
fn child_that_writes_until_it_is_killed() {
    let Ok(orders) = std::env::var(ORDERS) else { return };
    let orders: Vec<&str> = orders.splitn(4, ' ').collect();
    let [seed, cluster, journal, top] = orders[..] else { panic!("four orders") };
    let top = PathBuf::from(top);
    let disk = open(&top, journal != "none");
    let (seed, cluster) = (seed.parse().expect("a number"), cluster.parse().expect("a number"));
    if journal == "threads" {
        std::thread::scope(|scope| {
            for me in 0..THREADS {
                let (disk, top) = (&disk, &top);
                scope.spawn(move || work(disk, &striped(seed, me, STEPS, disk.size()), &report_of(top, me)));
            }
        });
    } else {
        work(&disk, &workload(seed, disk.size(), cluster), &report_of(&top, 0));
    }
    // Finished too soon: wait to be killed without closing anything.
    std::thread::park();
}

fn work(disk: &Disk, steps: &[Step], report: &Path) {
    let mut reported = FileOptions::new().append(true).create(true).open(report).expect("opens");
    for step in steps {
        take(disk, step).expect("no faults here");
        reported.write_all(b".").expect("reports");
    }
}

fn report_of(top: &Path, thread: u64) -> PathBuf {
    top.with_file_name(format!("reported{thread}"))
}

struct Killed {
    /// Steps that the child reported as completed.
    completed: usize,
}

fn start(top: &Path, seed: u64, cluster: u64, mode: &str) -> Child {
    for thread in 0..THREADS {
        let _ = std::fs::remove_file(report_of(top, thread));
    }
    Command::new(std::env::current_exe().expect("the test binary"))
        .args(["--exact", "kill::child_that_writes_until_it_is_killed", "--ignored", "--nocapture"])
        .env(ORDERS, format!("{seed} {cluster} {mode} {}", stock::path_str(top)))
        .stdout(Stdio::null())
        .spawn()
        .expect("the child starts")
}

fn reported(top: &Path, thread: u64) -> usize {
    std::fs::metadata(report_of(top, thread)).map_or(0, |metadata| metadata.len() as usize)
}

/// Starts a child, lets it complete at least `steps` steps and work for a moment more, and kills it.
fn run_and_kill(top: &Path, seed: u64, cluster: u64, mode: &str, at_least: usize) -> Killed {
    let mut child = start(top, seed, cluster, mode);
    wait_until("the child's work", || reported(top, 0) >= at_least.min(STEPS));
    std::thread::sleep(Duration::from_micros(random("moment", seed).random_range(0..3000)));
    child.kill().expect("killed");
    child.wait().expect("gone");
    Killed { completed: reported(top, 0) }
}

/// Enters the steps that completed, and the one that may have been under way.
fn ledger_after(content: &[u8], seed: u64, cluster: u64, killed: &Killed) -> (Ledger, usize) {
    let mut ledger = Ledger::new(content, cluster);
    let mut flushed = 0;
    for (place, step) in
        workload(seed, content.len() as u64, cluster).iter().enumerate().take(killed.completed + 1)
    {
        let completed = place < killed.completed;
        ledger.enter(place + 1, step, completed);
        if completed && matches!(step, Step::Flush) {
            flushed = place + 1;
        }
    }
    (ledger, flushed)
}

fn content(disk: &Disk) -> Vec<u8> {
    read(disk, 0, disk.size() as usize).expect("reads")
}

#[test]
fn every_completed_write_survives_a_killed_process() {
    for_seeds(3, |seed| {
        for bits in [9, 12, 16] {
            let dir = scratch();
            let mut random = random("kill", seed * 100 + u64::from(bits));
            let base = LayerShape::qcow2(14, 1 << 20);
            let active = LayerShape { snapshots: u32::from(seed == 1), ..LayerShape::qcow2(bits, 1 << 20) };
            let active = LayerShape { subclusters: bits == 16 && seed > 0, ..active };
            let made = make(dir.path(), &[base, active], &mut random);
            let mut before = made.model;
            for round in 0..4 {
                let round_seed = seed * 1000 + u64::from(bits) * 10 + round;
                let at_least = random.random_range(1..300);
                let killed = run_and_kill(&made.top, round_seed, made.cluster, "journal", at_least);
                stock::assert_safe(&made.top);
                let (ledger, _) = ledger_after(&before, round_seed, made.cluster, &killed);
                let disk = open(&made.top, true);
                before = content(&disk);
                let done = killed.completed;
                ledger
                    .check(0, &before, done, done + 1)
                    .unwrap_or_else(|error| panic!("seed {seed}, round {round}, {done} steps done: {error}"));
                if round % 2 == 0 {
                    disk.close().expect("closes");
                    drop(disk);
                    stock::assert_clean(&made.top);
                    assert_same(&stock::content(&made.top, "qcow2"), &before, 0, "as qemu-img reads it");
                }
            }
        }
    });
}

/// The same with several threads, which share clusters, tables and the journal.
#[test]
fn every_completed_write_of_several_threads_survives_a_killed_process() {
    for_seeds(6, |seed| {
        let dir = scratch();
        let bits = [9, 12, 16][seed as usize % 3];
        let subclusters = bits == 16 && seed > 2;
        let active = LayerShape { operations: 0, subclusters, ..LayerShape::qcow2(bits, 3 << 20) };
        let made = make(dir.path(), &[LayerShape::qcow2(14, 3 << 20), active], &mut random("kill", seed));
        run_and_kill(&made.top, seed, made.cluster, "threads", 1 + seed as usize % 7 * 20);
        stock::assert_safe(&made.top);
        let disk = open(&made.top, true);
        let bytes = content(&disk);
        for me in 0..THREADS {
            let done = reported(&made.top, me);
            let mut ledger = Ledger::new(&made.model, made.cluster);
            for (place, step) in
                striped(seed, me, STEPS, bytes.len() as u64).iter().enumerate().take(done + 1)
            {
                ledger.enter(place + 1, step, place < done);
            }
            for (number, block) in bytes.chunks(BLOCK as usize).enumerate() {
                if number as u64 % THREADS == me {
                    let checked = ledger.check(number as u64 * BLOCK, block, done, done + 1);
                    checked.unwrap_or_else(|error| panic!("thread {me}, {done} steps done: {error}"));
                }
            }
        }
        disk.close().expect("closes");
        drop(disk);
        stock::assert_clean(&made.top);
    });
}

#[test]
fn without_a_journal_what_was_flushed_survives_a_killed_process() {
    for_seeds(3, |seed| {
        let dir = scratch();
        let made = make(dir.path(), &[LayerShape::qcow2(12, 1 << 20)], &mut random("kill", seed));
        let killed = run_and_kill(&made.top, seed, made.cluster, "none", 150);
        stock::assert_safe(&made.top);
        let (ledger, flushed) = ledger_after(&made.model, seed, made.cluster, &killed);
        let bytes = content(&open(&made.top, false));
        ledger.check(0, &bytes, flushed, killed.completed + 1).unwrap_or_else(|error| panic!("{error}"));
    });
}

/// After a kill someone else writes to the image: the journal is about a state that is gone.
#[test]
fn a_journal_is_not_believed_once_stock_tools_wrote_to_the_image() {
    for_seeds(3, |seed| {
        let dir = scratch();
        let layer = LayerShape { operations: 0, ..LayerShape::qcow2(12, 1 << 20) };
        let made = make(dir.path(), &[layer], &mut random("kill", seed));
        run_and_kill(&made.top, seed, made.cluster, "journal", 200);
        let commands = ["write -q -P 0x41 0 8k", "discard -q 16k 64k", "write -q -P 0x42 500k 100k"];
        stock::qemu_io(&made.top, &commands.map(str::to_owned));
        let left = stock::content(&made.top, "qcow2");
        let disk = open(&made.top, true);
        assert_same(&content(&disk), &left, 0, "what stock tools left");
        write(&disk, 0, &[0x43; 512]).expect("writes");
        disk.close().expect("closes");
        drop(disk);
        stock::assert_safe(&made.top);
    });
}

/// A journal without its first record, that of the table its entries are in: the disk is refused, and nothing is lost until that
/// is asked for.
#[test]
fn a_journal_that_does_not_fit_refuses_the_disk_and_is_kept() {
    let dir = scratch();
    let layer = LayerShape { operations: 0, ..LayerShape::qcow2(16, 1 << 20) };
    let made = make(dir.path(), &[layer], &mut random("kill", 0));
    let disk = open(&made.top, true);
    write(&disk, 0, &[0x11; 65536]).expect("writes");
    drop(disk);
    let journals = std::fs::read_dir(dir.path().join("journals")).expect("a directory");
    let half = journals
        .map(|entry| entry.expect("listed").path())
        .find(|path| std::fs::read(path).expect("reads")[64..96] != [0; 32]);
    let half = half.expect("a half with records");
    let bytes = std::fs::read(&half).expect("reads");
    assert!(
        bytes[96..128] != [0; 32] && bytes[128..160] == [0; 32],
        "one of the table and one of the cluster"
    );
    let lacking = [&bytes[..64], &bytes[96..]].concat();
    std::fs::write(&half, &lacking).expect("written");
    for _ in 0..2 {
        let refused =
            Disk::open(&made.top, &OpenOptions::default(), &resources(&made.top, true)).unwrap_err();
        assert!(matches!(refused.kind(), ErrorKind::JournalMismatch { .. }), "{refused}");
        assert!(
            refused.to_string().contains("guest cluster 0")
                && refused.to_string().contains("--discard-unflushed")
        );
        assert_eq!(std::fs::read(&half).expect("reads"), lacking, "it is kept");
    }
    std::fs::write(&half, &bytes).expect("written");
    let disk = open(&made.top, true);
    assert_same(&read(&disk, 0, 65536).expect("reads"), &[0x11; 65536], 0, "with the journal as it was");
    write(&disk, 65536, &[0x22; 65536]).expect("writes");
    drop(disk);
    let journals = dir.path().join("journals");
    std::fs::rename(&journals, dir.path().join("elsewhere")).expect("renamed");
    let refused = Disk::open(&made.top, &OpenOptions::default(), &resources(&made.top, true)).unwrap_err();
    assert!(matches!(refused.kind(), ErrorKind::JournalMissing { .. }), "{refused}");
    let options = OpenOptions { unflushed: Unflushed::Discard, ..OpenOptions::default() };
    let disk = Disk::open(&made.top, &options, &resources(&made.top, true)).expect("as asked");
    assert_same(&read(&disk, 65536, 65536).expect("reads"), &[0; 65536], 0, "without its unflushed writes");
    disk.close().expect("closes");
    drop(disk);
    stock::assert_clean(&made.top);
}

#[test]
fn what_a_killed_process_leaked_is_freed_when_the_disk_is_opened_again() {
    let dir = scratch();
    let layer = LayerShape { operations: 0, ..LayerShape::qcow2(16, 1 << 20) };
    let made = make(dir.path(), &[layer], &mut random("kill", 0));
    for (journal, at) in [(true, 0), (false, 524_288)] {
        let disk = open(&made.top, journal);
        write(&disk, at, &[0x11; 65536]).expect("writes");
        disk.flush().expect("flushes");
        write(&disk, at + 131_072, &[0x22; 65536]).expect("writes");
        // As if killed.
        drop(disk);
        // Clusters are claimed past the end of the file, where no check looks; a copy that is longer shows them.
        let copy = dir.path().join("copy");
        std::fs::copy(&made.top, &copy).expect("copied");
        FileOptions::new().write(true).open(&copy).expect("opens").set_len(16 << 20).expect("extended");
        assert_eq!(stock::check(&copy).code, 3, "with leaks");
        let disk = open(&made.top, journal);
        assert_same(&read(&disk, at, 65536).expect("reads"), &[0x11; 65536], at, "what was flushed");
        write(&disk, at + 262_144, &[0x33; 65536]).expect("writes");
        disk.close().expect("closes");
        drop(disk);
        stock::assert_clean(&made.top);
    }
}
