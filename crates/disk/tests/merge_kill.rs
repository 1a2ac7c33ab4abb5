//! kill -9 in the middle of merging: the chain is sound and reads as it did, and what was left goes the next time.
//!
//! Each case runs in a child process, which is this test binary again.

use std::collections::BTreeSet;
use std::os::unix::process::ExitStatusExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use crate::common::flat::{read, write};
use crate::common::killed::{PLACES, is_killed, numbers};
use crate::common::stock::{assert_clean, assert_safe, path_str, qemu_img, qemu_io, text, try_qemu_io};
use crate::common::{for_seeds, open_read_only, patiently, random, scratch, small_resources, wait_until};
use rand::Rng as _;
use vmstrata_disk::merge::{
    Action, Direction, Merge, MergeFault, MergeOptions, MergeRange, Removal, all_of, ranges_of,
};
use vmstrata_disk::snapshot::{self, PrepareOptions, SnapshotInfo, list};
use vmstrata_disk::{CreateOptions, Disk, OpenOptions, create, probe_file};
use vmstrata_store::Gate;
use vmstrata_types::LayerIndex;

/// What a child finds its orders in.
const STEP: &str = "VMSTRATA_TEST_MERGE_STEP";
const WORK: &str = "VMSTRATA_TEST_MERGE_WORK";
/// Seed and round of the child: what it drops and how it names things come from these.
const SEED: &str = "VMSTRATA_TEST_MERGE_SEED";
/// How often the child is killed.
const ROUNDS: u64 = 6;
const NOTE: &str = ".web.qcow2.dropped";

fn named(name: impl std::fmt::Display) -> SnapshotInfo {
    SnapshotInfo { name: name.to_string(), ..SnapshotInfo::default() }
}

fn options(direction: Direction) -> MergeOptions {
    MergeOptions { removal: Removal::All, direction, ..MergeOptions::default() }
}

fn open(path: &Path) -> Arc<Disk> {
    let journals = path.with_file_name("journals");
    let resources = small_resources(Some(journals.as_path()));
    patiently(|| Disk::open(path, &OpenOptions::default(), &resources)).expect("the disk opens")
}

fn kill_self() -> ! {
    let _ = rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::KILL);
    unreachable!("killed")
}

/// Merges s0 and s1 of a disk, and dies before its n-th step: "live-up N DISK", "files-down N DISK" and so on.
#[test]
#[ignore = "the process that the other tests start"]
fn child_that_dies_at_a_step() {
    let Ok(case) = std::env::var(STEP) else { return };
    let mut words = case.splitn(3, ' ');
    let (how, step, path) = (words.next().unwrap(), words.next().unwrap(), words.next().unwrap());
    let (path, names) = (Path::new(path), ["s0".to_owned(), "s1".to_owned()]);
    let range = ranges_of(path, &names, &OpenOptions::default()).unwrap()[0];
    let options = options(if how.ends_with("commit") { Direction::Commit } else { Direction::Stream });
    let mut merge = match how.starts_with("live") {
        true => Merge::of_disk(&open(path), range, &options),
        false => Merge::new(path, range, &options, &small_resources(None)),
    }
    .unwrap();
    for number in 0usize.. {
        let action = merge.select();
        if step.parse() == Ok(number) || action == Some(Action::Remove) && step == "1000" {
            kill_self();
        }
        let Some(action) = action else { return };
        merge.apply(action).unwrap();
    }
}

fn dies_at(how: &str, step: usize, disk: &Path) -> bool {
    is_killed("merge_kill::child_that_dies_at_a_step", STEP, format!("{how} {step} {}", path_str(disk)))
}

/// A disk with s0, s1 and s2, in which the first cluster says who wrote last, and a cluster each that nobody else wrote.
fn new_disk(dir: &Path) -> PathBuf {
    let disk = dir.join("web.qcow2");
    std::fs::create_dir(dir.join("journals")).unwrap();
    create(&disk, &CreateOptions { size: Some(1 << 20), ..CreateOptions::default() }).unwrap();
    for number in 0..4 {
        let own = format!("write -P {} {}k 64k", number + 1, number * 64 + 64);
        qemu_io(&disk, &[format!("write -P {} 0 64k", number + 1), own]);
        if number < 3 {
            snapshot_of(&disk, &format!("s{number}")).unwrap();
        }
    }
    disk
}

fn snapshot_of(disk: &Path, name: &str) -> vmstrata_disk::Result<Vec<snapshot::Created>> {
    let (disks, journals) = ([disk.to_owned()], disk.with_file_name("journals"));
    let (open, resources) = (OpenOptions::default(), small_resources(Some(&journals)));
    snapshot::create(&disks, &named(name), &open, &PrepareOptions::default(), &resources)
}

/// What a state whose newest writer was `newest` reads as.
fn assert_state(path: &Path, newest: u8) {
    let mut commands = vec![format!("read -P {newest} 0 64k")];
    for number in 1..=4 {
        let pattern = if number <= newest { number } else { 0 };
        commands.push(format!("read -P {pattern} {}k 64k", u32::from(number) * 64));
    }
    // The kernel takes a killed process's locks back when it comes to that.
    let output = try_qemu_io(path, &["-r", "-U"], &commands);
    let said = text(&output);
    assert!(output.status.success() && !said.contains("failed"), "{commands:?} {}: {said}", path.display());
}

fn files(dir: &Path) -> BTreeSet<String> {
    let entries = std::fs::read_dir(dir).unwrap();
    let names = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap());
    // An index beside a layer belongs to it, if it has one.
    let belongs = |name: &str| name.strip_suffix(".vmsx").is_some_and(|layer| dir.join(layer).exists());
    names.filter(|name| !belongs(name)).collect()
}

fn chain(disk: &Path) -> BTreeSet<String> {
    let layers = open_read_only(disk).layers();
    let names = layers.iter().map(|layer| layer.path.file_name().unwrap().to_str().unwrap().to_owned());
    names.chain(["journals".to_owned()]).collect()
}

#[test]
fn a_merge_killed_at_any_step_leaves_a_sound_chain_and_nothing_for_good() {
    for how in ["live-stream", "files-stream", "live-commit", "files-commit"] {
        let mut outcomes = BTreeSet::new();
        for step in 0.. {
            let dir = scratch();
            let disk = new_disk(dir.path());
            if !dies_at(how, step, &disk) {
                assert!(step >= 4, "{how} has only {step} steps");
                assert_eq!(files(dir.path()), chain(&disk));
                break;
            }
            assert_safe(&disk);
            assert_state(&disk, 4);
            assert_state(&dir.path().join("web.s2.qcow2"), 3);
            let dropped = chain(&disk).len() == 3;
            outcomes.insert((dropped, dir.path().join(NOTE).exists()));
            if dropped {
                // The name is free again, without a word to anybody.
                snapshot_of(&disk, "s1").unwrap();
                assert_state(&dir.path().join("web.s1.qcow2"), 4);
                assert!(list(&disk, &OpenOptions::default()).unwrap().iter().all(|s| !s.is_being_deleted));
            } else {
                assert!(!dies_at(how, 999, &disk), "completes");
            }
            open(&disk).close().unwrap();
            assert_state(&disk, 4);
            assert_safe(&disk);
            assert_eq!(files(dir.path()), chain(&disk), "{how} killed at {step}");
        }
        assert!(
            outcomes.contains(&(false, false)) && outcomes.contains(&(true, true)),
            "{how}: {outcomes:?}"
        );
    }
}

#[test]
fn what_a_killed_merge_left_goes_when_the_disk_is_opened_for_writing_and_not_before() {
    let dir = scratch();
    let disk = new_disk(dir.path());
    assert!(dies_at("live-stream", 1000, &disk));
    open_read_only(&disk);
    let layer = |name: &str| dir.path().join(name);
    assert!(layer("web.s0.qcow2").exists() && layer("web.s1.qcow2").exists() && layer(NOTE).exists());
    open(&disk).close().unwrap();
    assert_eq!(files(dir.path()), chain(&disk));
    assert_clean(&disk);
}

#[test]
fn only_what_nobody_needs_and_is_what_it_was_goes() {
    let dir = scratch();
    let disk = new_disk(dir.path());
    let layer = |name: &str| dir.path().join(name);
    // A clone that came after the merge had looked; a file that was written since; names out of the directory.
    assert!(dies_at("live-stream", 1000, &disk));
    let note = std::fs::read_to_string(layer(NOTE)).unwrap();
    let (clone, s1) = (layer("clone.qcow2"), layer("web.s1.qcow2"));
    qemu_img(&["create", "-q", "-f", "qcow2", "-F", "qcow2", "-b", "web.s0.qcow2", path_str(&clone)]);
    let moved = std::fs::read(&s1).unwrap();
    std::fs::write(&s1, &moved).unwrap();
    open(&disk).close().unwrap();
    assert!(layer("web.s0.qcow2").exists() && s1.exists());
    assert_state(&clone, 1);
    // What somebody needs waits for a merge that finds nobody does.
    let waiting: serde_json::Value = serde_json::from_slice(&std::fs::read(layer(NOTE)).unwrap()).unwrap();
    let names =
        |list: &str| waiting[list].as_array().unwrap().iter().map(|file| file["name"].clone()).collect();
    let (files, waits): (Vec<_>, Vec<_>) = (names("files"), names("waiting"));
    assert_eq!((files.len(), waits), (0, vec![serde_json::json!("web.s0.qcow2")]));
    // Forged notes: one that leads elsewhere, and ones that are none.
    std::fs::remove_file(&clone).unwrap();
    std::fs::create_dir(layer("elsewhere")).unwrap();
    std::fs::rename(layer("web.s0.qcow2"), layer("elsewhere/web.s0.qcow2")).unwrap();
    for forged in [note.replace("web.s0", "elsewhere/web.s0"), "{".to_owned(), String::new()] {
        std::fs::write(layer(NOTE), &forged).unwrap();
        open(&disk).close().unwrap();
        assert!(layer("elsewhere/web.s0.qcow2").exists() && !layer(NOTE).exists(), "{forged}");
    }
    assert_state(&disk, 4);
}

/// The child: writes numbers at both ends, takes snapshots, and drops some, for ever.
#[test]
#[ignore = "the process that the other test starts and kills"]
fn child_that_merges_until_it_is_killed() {
    let Some(path) = std::env::var_os(WORK).map(PathBuf::from) else { return };
    let seed = std::env::var(SEED).expect("with a seed");
    let disk = open(&path);
    let start = read(&disk, PLACES[0], 8).unwrap();
    let start = u64::from_le_bytes(start.try_into().unwrap());
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for number in start + 1.. {
                let block = number.to_le_bytes().repeat(512);
                for place in PLACES {
                    write(&disk, place + 65536 + number % 9 * 65536, &block).expect("writes");
                    write(&disk, place, &block).expect("writes");
                }
            }
        });
        let mut random = random(&format!("merges {seed}"), 0);
        for step in 0u64.. {
            for part in 0..3 {
                let name = format!("{seed}-{step}-{part}");
                disk.snapshot(&named(name)).expect("takes a snapshot");
                std::thread::sleep(Duration::from_millis(2));
            }
            let all = all_of(disk.layer_count()).expect("snapshots were taken");
            let first = random.random_range(0..=all.last.index());
            let last = random.random_range(first..=all.last.index());
            let index = |layer: usize| LayerIndex::new(layer as u16);
            let range = MergeRange { first: index(first), last: index(last) };
            let merge = |way| Merge::of_disk(&disk, range, &options(way)).and_then(Merge::run);
            match merge([Direction::Stream, Direction::Commit][random.random_range(0..2)]) {
                Err(error) if matches!(error.fault(), Some(MergeFault::NoCommit { .. })) => {
                    merge(Direction::Stream)
                }
                merged => merged,
            }
            .expect("merges");
        }
    });
}

/// Runs the child until it has begun to take snapshots, and then for as long as it happens to live.
fn run_and_kill(disk: &Path, seed: u64, round: u64) {
    let mut child = Command::new(std::env::current_exe().expect("the test binary"))
        .args(["--exact", "merge_kill::child_that_merges_until_it_is_killed", "--ignored", "--nocapture"])
        .envs([(WORK, disk.as_os_str()), (SEED, format!("{seed}-{round}").as_ref())])
        .stdout(Stdio::null())
        .spawn()
        .expect("the child starts");
    let dir = disk.parent().expect("in a directory");
    let before = files(dir);
    wait_until("the child's first file", || files(dir) != before);
    let after = random("moment", seed * ROUNDS + round).random_range(0..250_000);
    std::thread::sleep(Duration::from_micros(after));
    child.kill().expect("killed");
    assert_eq!(child.wait().expect("gone").signal(), Some(9), "it did not fail by itself");
}

fn every_state_is_whole(disk: &Path, but_one_being_taken: bool) {
    let mut snapshots = list(disk, &OpenOptions::default()).unwrap();
    // What a commit began to write over is none any more.
    snapshots.retain(|snapshot| !snapshot.is_being_deleted);
    for (age, snapshot) in snapshots.iter().enumerate() {
        assert_safe(&snapshot.layer);
        let head = probe_file(&snapshot.layer, &Gate::unrestricted()).unwrap().head.unwrap().unwrap();
        if !(but_one_being_taken && age == 0 && head.is_in_session()) {
            numbers(&open_read_only(&snapshot.layer), &snapshot.layer.display().to_string());
        }
    }
}

/// What the child does comes from the seed; where it is killed in that is up to the machine.
#[test]
fn a_server_killed_while_it_merges_leaves_every_state_whole() {
    for_seeds(2, |seed| {
        let dir = scratch();
        let disk = dir.path().join("web.qcow2");
        std::fs::create_dir(dir.path().join("journals")).unwrap();
        qemu_img(&["create", "-q", "-f", "qcow2", path_str(&disk), "8M"]);
        let mut newest = 0;
        for round in 0..ROUNDS {
            run_and_kill(&disk, seed, round);
            assert_safe(&disk);
            every_state_is_whole(&disk, true);
            let opened = open(&disk);
            // What of the newest was in the journal only is in its file now.
            every_state_is_whole(&disk, false);
            let [first, _] = numbers(&opened, "the disk");
            assert!(first >= newest, "round {round}: {newest} was lost: {first}");
            newest = first;
            // The next child goes on from here, at both places.
            write(&opened, PLACES[1], &first.to_le_bytes().repeat(512)).unwrap();
            // Taking one removes what was left of another.
            opened.snapshot(&named(format!("round-{round}"))).unwrap();
            opened.close().unwrap();
            drop(opened);
            assert_eq!(files(dir.path()), chain(&disk), "round {round}");
            // What a killed process had set aside for writes to come may be leaked.
            assert_safe(&disk);
        }
        assert!(newest > 100, "the children did not work: {newest}");
    });
}
