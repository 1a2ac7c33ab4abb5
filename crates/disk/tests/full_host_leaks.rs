//! Each write to a chain's files meets a full host in turn: what is refused leaves no clusters behind that nobody uses.

use crate::common;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::common::faulty::FaultyFiles;
use crate::common::flat::{assert_reads, pattern, range as bytes, some_range};
use crate::common::{open_read_only, random, scratch};
use rand::Rng as _;
use vmstrata_disk::merge::{Direction, Merge, MergeOptions, MergeRange, Removal};
use vmstrata_disk::snapshot::SnapshotInfo;
use vmstrata_disk::{CheckOptions, CreateOptions, Disk, OpenOptions, check, create};
use vmstrata_store::{Effect, Fault, FaultPlan, OperationKind, When};
use vmstrata_types::{ClusterBits, LayerIndex};

const ENOSPC: i32 = 28;

/// What a run does after the snapshots.
#[derive(Clone, Copy, Debug)]
enum Work {
    Writes,
    Snapshot,
    /// Of the middle layers, into the one above, or into the lowest.
    Merge(Direction),
    /// Into the active layer.
    MergeIntoActive,
}

/// Which writes are refused: one of any file, or all from one on to the journals.
#[derive(Clone, Copy, Debug)]
enum Whose {
    Any,
    Journals,
}

struct Run {
    disk: Arc<Disk>,
    model: Vec<u8>,
    random: rand::rngs::SmallRng,
    path: PathBuf,
    cluster: u64,
}

impl Run {
    fn change(&mut self, count: usize) {
        for _ in 0..count {
            let (at, len) = some_range(&mut self.random, self.model.len() as u64, self.cluster);
            let data = match self.random.random_range(0..4) {
                0 => None,
                _ => Some(pattern(&mut self.random, len as usize)),
            };
            let done = match &data {
                Some(data) => common::flat::write(&self.disk, at, data),
                None => self.disk.write_zeroes(bytes(at, len), true),
            };
            // One that was refused may have been carried out in part.
            let may = (data.unwrap_or_else(|| vec![0; len as usize]), done.is_ok());
            let place = &mut self.model[at as usize..(at + len) as usize];
            match may {
                (data, true) => place.copy_from_slice(&data),
                (_, false) => {
                    place.copy_from_slice(&common::flat::read(&self.disk, at, len as usize).unwrap())
                }
            }
        }
    }

    fn snapshot(&mut self, number: usize) -> bool {
        let info = SnapshotInfo { name: format!("s{number}"), ..SnapshotInfo::default() };
        self.disk.snapshot(&info).is_ok()
    }

    /// Returns whether it may leave leaks.
    fn merge(&self, first: usize, last: usize, direction: Direction) -> bool {
        let index = |layer: usize| LayerIndex::new(u16::try_from(layer).unwrap());
        let range = MergeRange { first: index(first), last: index(last) };
        let options = MergeOptions { removal: Removal::All, direction, ..MergeOptions::default() };
        let merged = Merge::of_disk(&self.disk, range, &options).and_then(Merge::run);
        // A full host refuses room, and overwrites what has some: where that fails, the device is broken.
        let in_place = ["write table entries", "write refcounts"];
        merged.is_err_and(|error| in_place.iter().any(|what| error.to_string().contains(what)))
    }
}

/// Returns whether there was still a write to refuse.
fn run(work: Work, bits: u32, nth: u64, whose: Whose) -> bool {
    let size = 256u64 << bits;
    let dir = scratch();
    let path = dir.path().join("web.qcow2");
    std::fs::create_dir(dir.path().join("run")).unwrap();
    create(
        &path,
        &CreateOptions {
            size: Some(size),
            cluster_bits: ClusterBits::new(bits).unwrap(),
            ..CreateOptions::default()
        },
    )
    .unwrap();
    let plan = FaultPlan::new();
    let files = FaultyFiles::new(&plan);
    let disk =
        Disk::open(&path, &OpenOptions::default(), &files.resources_with(Some(dir.path().join("run"))))
            .unwrap();
    let random = random("leaks", 0);
    let mut run = Run { disk, model: vec![0; size as usize], random, path, cluster: 1 << bits };
    for number in 0..3 {
        run.change(12);
        assert!(run.snapshot(number));
        run.disk.finalize().unwrap();
    }
    let before = plan.count(Some(OperationKind::Write));
    match whose {
        Whose::Any => plan.fail_nth(Some(OperationKind::Write), nth, ENOSPC),
        Whose::Journals => {
            for entry in std::fs::read_dir(dir.path().join("run")).unwrap() {
                let store = Some(files.id(&entry.unwrap().path()));
                let (kind, effect) = (Some(OperationKind::Write), Effect::Fail(ENOSPC));
                plan.add(Fault { kind, store, when: When::From(nth), effect });
            }
        }
    }
    let may_leak = match work {
        Work::Writes => {
            run.change(30);
            false
        }
        Work::Snapshot => {
            run.change(5);
            run.snapshot(3);
            run.change(5);
            false
        }
        Work::Merge(direction) => run.merge(1, 1, direction),
        Work::MergeIntoActive => run.merge(1, 2, Direction::Stream),
    };
    let befell = plan.count(Some(OperationKind::Write)) - before > nth;
    plan.clear();
    run.change(3);
    let closed = run.disk.close();
    let is_whole = run.disk.failure().is_none() && closed.is_ok();
    drop(run.disk);
    for layer in layers(dir.path()) {
        let report = check(&layer, &CheckOptions::default()).unwrap();
        assert!(report.is_safe(), "{work:?}, write {nth}, {}: {:?}", layer.display(), report.findings);
        let is_leaky = report.leaks > 0 && is_whole && !may_leak;
        assert!(!is_leaky, "{work:?}, write {nth}, {}: {:?}", layer.display(), report.findings);
    }
    if is_whole {
        assert_reads(&open_read_only(&run.path), &run.model, "afterwards");
    }
    befell
}

fn layers(dir: &Path) -> Vec<PathBuf> {
    let files = std::fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path());
    files.filter(|path| path.extension().is_some_and(|extension| extension == "qcow2")).collect()
}

fn each(work: Work) {
    for bits in [9, 16] {
        let count = (0..).take_while(|&nth| run(work, bits, nth, Whose::Any)).count();
        assert!(count > 5, "{count}");
    }
}

#[test]
fn writes_that_meet_a_full_host_leak_nothing() {
    each(Work::Writes);
}

#[test]
fn snapshots_that_meet_a_full_host_leak_nothing() {
    each(Work::Snapshot);
}

#[test]
fn merges_that_meet_a_full_host_leak_nothing() {
    each(Work::Merge(Direction::Stream));
    each(Work::Merge(Direction::Commit));
    each(Work::MergeIntoActive);
}

#[test]
fn journals_that_meet_a_full_host_leak_nothing() {
    for work in [
        Work::Writes,
        Work::Snapshot,
        Work::Merge(Direction::Stream),
        Work::Merge(Direction::Commit),
        Work::MergeIntoActive,
    ] {
        for nth in 0..3 {
            run(work, 9, nth, Whose::Journals);
            run(work, 16, nth, Whose::Journals);
        }
    }
}
