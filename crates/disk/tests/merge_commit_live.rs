//! Layers of a disk in use committed: the guest reads what it wrote, whatever is under way, and every state that stays is
//! what it was, for us and for stock tools.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::common::daemon::Daemon;
use crate::common::flat::{assert_reads, assert_same, pattern, range as bytes, some_range, write};
use crate::common::io::Client;
use crate::common::stock::{User, assert_clean, content, path_str, qemu_img};
use crate::common::{for_seeds, open_read_only, random, scratch};
use rand::Rng as _;
use rand::rngs::SmallRng;
use vmstrata_disk::merge::{Action, Direction, Merge, MergeFault, MergeOptions, MergeRange, Merged, Removal};
use vmstrata_disk::snapshot::{SnapshotInfo, list};
use vmstrata_disk::{
    CreateOptions, Disk, Error, ErrorKind, Op, OpenOptions, ResourceOptions, Resources, create,
};
use vmstrata_types::{ClusterBits, LayerIndex};

const SIZE: u64 = 8 << 20;

fn named(name: impl std::fmt::Display) -> SnapshotInfo {
    SnapshotInfo { name: name.to_string(), ..SnapshotInfo::default() }
}

fn range(first: usize, last: usize) -> MergeRange {
    let index = |layer: usize| LayerIndex::new(u16::try_from(layer).unwrap());
    MergeRange { first: index(first), last: index(last) }
}

fn options(direction: Direction) -> MergeOptions {
    MergeOptions { removal: Removal::All, direction, ..MergeOptions::default() }
}

fn merge(disk: &Arc<Disk>, range: MergeRange, direction: Direction) -> Result<Merged, Error> {
    Merge::of_disk(disk, range, &options(direction))?.run()
}

/// A disk in use with snapshots, and what each must read as.
struct Guest {
    dir: tempfile::TempDir,
    resources: Arc<Resources>,
    disk: Arc<Disk>,
    model: Vec<u8>,
    states: Vec<(PathBuf, Vec<u8>)>,
    taken: usize,
}

impl Guest {
    fn new(resources: ResourceOptions) -> Self {
        Self::like(&CreateOptions::default(), resources)
    }

    fn like(options: &CreateOptions, resources: ResourceOptions) -> Self {
        let dir = scratch();
        let path = dir.path().join("web.qcow2");
        create(&path, &CreateOptions { size: Some(SIZE), ..options.clone() }).unwrap();
        let resources = Resources::new(resources);
        let disk = Disk::open(&path, &OpenOptions::default(), &resources).unwrap();
        Self { dir, resources, disk, model: vec![0; SIZE as usize], states: Vec::new(), taken: 0 }
    }

    /// A first snapshot with most of the disk, and `others` with little.
    fn with_history(others: usize) -> Self {
        let mut guest = Self::new(ResourceOptions::default());
        guest.put(0, &pattern(&mut random("history", 0), 6 << 20));
        guest.snapshot();
        for number in 0..others as u64 {
            guest.put(number * 0x21000, &[number as u8 + 1; 70_000]);
            guest.snapshot();
        }
        guest
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn put(&mut self, at: u64, data: &[u8]) {
        write(&self.disk, at, data).unwrap();
        self.model[at as usize..][..data.len()].copy_from_slice(data);
    }

    fn change(&mut self, random: &mut SmallRng) {
        let (at, len) = some_range(random, SIZE, 64 << 10);
        let place = at as usize..(at + len) as usize;
        if random.random_ratio(3, 4) {
            return self.put(at, &pattern(random, len as usize));
        }
        self.disk.write_zeroes(bytes(at, len), random.random()).unwrap();
        self.model[place].fill(0);
    }

    fn snapshot(&mut self) {
        let taken = self.disk.snapshot(&named(format!("s{}", self.taken))).unwrap();
        self.taken += 1;
        self.states.push((taken.layer, self.model.clone()));
    }

    fn assert_reads(&self, what: &str) {
        assert_reads(&self.disk, &self.model, what);
        assert_eq!(self.disk.layers().len(), self.states.len() + 1, "{what}");
    }

    fn reopen(mut self, what: &str) -> Self {
        let path = self.path("web.qcow2");
        self.disk.close().unwrap();
        // Goes before the one that locks its file.
        self.disk = {
            let other = self.path("other.qcow2");
            let _ = std::fs::remove_file(&other);
            create(&other, &CreateOptions { size: Some(512), ..CreateOptions::default() }).unwrap();
            Disk::open(&other, &OpenOptions::default(), &self.resources).unwrap()
        };
        self.disk = Disk::open(&path, &OpenOptions::default(), &self.resources).unwrap();
        self.assert_reads(what);
        self
    }

    /// Every state, by stock tools too.
    fn end(self, what: &str) {
        self.disk.close().unwrap();
        let path = self.path("web.qcow2");
        drop(self.disk);
        let states = self.states.iter().chain([&(path.clone(), self.model)]).cloned().collect::<Vec<_>>();
        for (layer, model) in &states {
            let what = format!("{what}: {}", layer.display());
            assert_clean(layer);
            assert_same(&content(layer, "qcow2"), model, 0, &what);
            assert_reads(&open_read_only(layer), model, &what);
        }
        let found = list(&path, &OpenOptions::default()).unwrap();
        assert!(found.iter().all(|found| !found.is_being_deleted), "{what}");
        let layers: Vec<_> = found.iter().rev().map(|found| found.layer.clone()).collect();
        assert_eq!(layers, self.states.iter().map(|state| state.0.clone()).collect::<Vec<_>>(), "{what}");
    }
}

#[test]
fn the_oldest_snapshot_of_a_disk_in_use_goes_for_what_changed_since() {
    let mut guest = Guest::with_history(3);
    let oldest = guest.path("web.s0.qcow2");
    let merged = merge(&guest.disk, range(0, 0), Direction::Auto).unwrap();
    assert!(merged.is_commit);
    assert_eq!((merged.copied_bytes, &merged.removed), (72 << 10, &vec![oldest]), "{:?}", merged.kept);
    guest.states.remove(0);
    guest.assert_reads("without s0");
    // And again: the file is the same, under another name.
    let merged = merge(&guest.disk, range(0, 1), Direction::Commit).unwrap();
    assert_eq!((merged.is_commit, merged.removed.len()), (true, 2), "{:?}", merged.kept);
    guest.states.drain(0..2);
    guest.put(100, &[9; 5000]);
    guest.assert_reads("without s1 and s2");
    guest.reopen("opened again").end("in the end");
}

/// Random changes, snapshots and merges; changes and snapshots go on between the steps of a merge, and now and then it is cancelled.
#[test]
fn histories_read_as_flat_arrays_do() {
    for_seeds(4, |seed| {
        let mut random = random("merging down live", seed);
        let metadata_cache_bytes = if seed % 2 == 0 { 0 } else { 8 << 20 };
        // So few that files are closed and opened by their paths all the time.
        let max_open_files = if seed % 3 == 0 { 1 } else { 64 };
        let with_subclusters = CreateOptions {
            subclusters: true,
            cluster_bits: ClusterBits::new(17).unwrap(),
            ..CreateOptions::default()
        };
        let like = if seed % 4 < 2 { CreateOptions::default() } else { with_subclusters };
        let resources =
            ResourceOptions { metadata_cache_bytes, max_open_files, ..ResourceOptions::default() };
        let mut guest = Guest::like(&like, resources);
        let mut downs = 0;
        for step in 0..40 {
            let what = format!("seed {seed}, step {step}");
            (0..random.random_range(0..9)).for_each(|_| guest.change(&mut random));
            if guest.states.len() < 3 || random.random() {
                guest.snapshot();
                continue;
            }
            let first = random.random_range(0..guest.states.len() - 1);
            let last = random.random_range(first..(first + 3).min(guest.states.len() - 1));
            let mut job =
                Merge::of_disk(&guest.disk, range(first, last), &options(Direction::Commit)).unwrap();
            let is_cancelled = random.random_ratio(1, 4);
            while let Some(action) = job.select() {
                if is_cancelled && (action == Action::Relink || random.random_ratio(1, 3)) {
                    break;
                }
                job.apply(action).unwrap_or_else(|error| panic!("{what}: {action:?}: {error}"));
                (0..random.random_range(0..3)).for_each(|_| guest.change(&mut random));
                if random.random_ratio(1, 6) {
                    guest.snapshot();
                }
                assert_reads(&guest.disk, &guest.model, &what);
            }
            drop(job);
            if is_cancelled {
                guest.assert_reads(&format!("{what}: cancelled"));
                // Either way completes it.
                let way = if random.random() { Direction::Commit } else { Direction::Stream };
                merge(&guest.disk, range(first, last), way).unwrap_or_else(|error| panic!("{what}: {error}"));
            }
            downs += 1;
            guest.states.drain(first..=last);
            guest.assert_reads(&what);
            if random.random_ratio(1, 8) {
                guest = guest.reopen(&what);
            }
        }
        assert!(downs > 3, "seed {seed}");
        guest.end(&format!("seed {seed}"));
    });
}

/// Readers and writers by queue, while the oldest of 20 layers goes again and again.
#[test]
fn layers_go_under_load() {
    const BLOCKS: u64 = 64;
    let mut guest = Guest::with_history(20);
    let disk = Arc::clone(&guest.disk);
    let stop = AtomicBool::new(false);
    let before = guest.model.clone();
    let last = std::thread::scope(|scope| {
        let writer = scope.spawn(|| {
            let mut client = Client::new(&disk, 8);
            let mut number = 0u64;
            while !stop.load(Ordering::Relaxed) || number == 0 {
                number += 1;
                let data = number.to_le_bytes().repeat(512);
                (0..BLOCKS).for_each(|block| {
                    client.push(Op::Write { fua: false }, (6 << 20) + block * 8192, 4096, Some(&data));
                });
                assert!(client.drain().iter().all(|done| done.result.is_ok()), "a write failed");
                // All the rest stays what it was, whichever layer has it.
                for part in 0..6u64 {
                    client.push(Op::Read, part << 20, 1 << 20, None);
                    let done = client.drain().remove(0);
                    done.result.expect("reads");
                    let at = part << 20;
                    assert_same(&done.bytes, &before[at as usize..][..1 << 20], at, "under load");
                }
            }
            number
        });
        let merged: Result<Vec<Merged>, Error> =
            (0..18).map(|_| merge(&guest.disk, range(0, 0), Direction::Commit)).collect();
        // Ends the guest whatever comes of it.
        stop.store(true, Ordering::Relaxed);
        let number = writer.join().expect("a guest");
        assert!(merged.unwrap().iter().all(|merged| merged.is_commit));
        guest.states.drain(0..18);
        number
    });
    for block in 0..BLOCKS {
        let at = (6 << 20) + block as usize * 8192;
        guest.model[at..at + 4096].copy_from_slice(&last.to_le_bytes().repeat(512));
    }
    drop(disk);
    guest.assert_reads("after the load");
    guest.end("after the load");
}

/// A dropped state that somebody reads is not written over: by a disk of the server, or by another program.
#[test]
fn whoever_reads_a_dropped_state_keeps_it() {
    let mut guest = Guest::with_history(3);
    let oldest = guest.path("web.s0.qcow2");
    let read_only = OpenOptions { read_only: true, ..OpenOptions::default() };
    let reader = Disk::open(&oldest, &read_only, &guest.resources).unwrap();
    let refused = merge(&guest.disk, range(0, 0), Direction::Commit).unwrap_err();
    assert!(matches!(refused.fault(), Some(MergeFault::NoCommit { .. })), "{refused}");
    assert!(refused.to_string().contains("in use by the disk"), "{refused}");
    assert_reads(&reader, &guest.states[0].1, "the reader");
    drop(reader);
    // One that another process has open: a stock tool, which waits for what it is told to do.
    let user = User::with(&oldest, &["-r"]);
    let refused = merge(&guest.disk, range(0, 0), Direction::Commit).unwrap_err();
    assert!(refused.to_string().contains("(qemu-io)"), "{refused}");
    drop(user);
    assert!(merge(&guest.disk, range(0, 0), Direction::Commit).unwrap().is_commit);
    guest.states.remove(0);
    guest.assert_reads("in the end");
    guest.end("in the end");
}

/// While it is written over, none of ours begins to read a dropped state, which is none any more, or one above it, whose tables
/// change. Stock tools read those above all the time, and so do they who began before the end.
#[test]
fn states_above_what_is_written_over_are_there_for_stock_tools() {
    let mut guest = Guest::with_history(3);
    let [oldest, above] = ["web.s0.qcow2", "web.s1.qcow2"].map(|name| guest.path(name));
    let mut job = Merge::of_disk(&guest.disk, range(0, 0), &options(Direction::Commit)).unwrap();
    assert!(job.apply(job.select().unwrap()).unwrap() > 0);
    let read_only = OpenOptions { read_only: true, ..OpenOptions::default() };
    for resources in [&guest.resources, &Resources::new(ResourceOptions::default())] {
        for state in [&oldest, &above] {
            let error = Disk::open(state, &read_only, resources).unwrap_err().to_string();
            assert!(error.contains("merged") || error.contains("being deleted"), "{error}");
        }
    }
    assert_same(&content(&above, "qcow2"), &guest.states[1].1, 0, "above it, meanwhile");
    // Cancelled, it is no state any more, and the one above it is.
    drop(job);
    let error = Disk::open(&oldest, &read_only, &guest.resources).unwrap_err();
    assert!(matches!(error.kind(), ErrorKind::BeingDropped), "{error}");
    assert_same(&content(&above, "qcow2"), &guest.states[1].1, 0, "above it");
    let other = Disk::open(&above, &read_only, &guest.resources).unwrap();
    assert_reads(&other, &guest.states[1].1, "above it");
    drop(other);
    assert!(list(guest.disk.path(), &OpenOptions::default()).unwrap().last().unwrap().is_being_deleted);
    assert!(merge(&guest.disk, range(0, 0), Direction::Auto).unwrap().is_commit);
    guest.states.remove(0);
    guest.assert_reads("completed");
    guest.end("completed");
}

/// A stock process that reads a clone goes on reading what it read, however the files below get other names.
#[test]
fn a_stock_process_that_began_meanwhile_reads_the_same_to_the_end() {
    let mut guest = Guest::with_history(3);
    let (of, clone) = (guest.path("web.s1.qcow2"), guest.path("ci.qcow2"));
    qemu_img(&["create", "-q", "-f", "qcow2", "-F", "qcow2", "-b", path_str(&of), path_str(&clone)]);
    let before = guest.states[1].1.clone();
    let mut job = Merge::of_disk(&guest.disk, range(0, 0), &options(Direction::Commit)).unwrap();
    assert!(job.apply(job.select().unwrap()).unwrap() > 0);
    let mut daemon = Daemon::start();
    daemon.open_disk("clone", &clone);
    let other = daemon.export("clone", guest.dir.path());
    assert_same(&other.content(guest.dir.path()), &before, 0, "before the end");
    while let Some(action) = job.select() {
        job.apply(action).unwrap();
    }
    drop(job);
    guest.states.remove(0);
    assert_same(&other.content(guest.dir.path()), &before, 0, "after the end");
    daemon.quit();
    assert_same(&content(&clone, "qcow2"), &before, 0, "opened anew");
    guest.assert_reads("in the end");
    guest.end("in the end");
}

/// An overlay of a dropped layer keeps it as it is; one of the layer that stays finds it under its name.
#[test]
fn clones_are_seen() {
    let mut guest = Guest::with_history(3);
    let clone = |name: &str, of: &str| {
        let (path, of) = (guest.path(name), guest.path(of));
        qemu_img(&["create", "-q", "-f", "qcow2", "-F", "qcow2", "-b", path_str(&of), path_str(&path)]);
        (content(&path, "qcow2"), path)
    };
    let (below, on_it) = clone("ci.qcow2", "web.s0.qcow2");
    let (stays, above) = clone("other.qcow2", "web.s2.qcow2");
    let refused = merge(&guest.disk, range(0, 1), Direction::Commit).unwrap_err();
    assert!(refused.to_string().contains("ci.qcow2"), "{refused}");
    let merged = merge(&guest.disk, range(1, 1), Direction::Commit).unwrap();
    assert!(merged.is_commit, "{merged:?}");
    guest.states.remove(1);
    for (path, before) in [(on_it, below), (above, stays)] {
        assert_same(&content(&path, "qcow2"), &before, 0, &path.display().to_string());
    }
    guest.assert_reads("in the end");
    guest.end("in the end");
}
