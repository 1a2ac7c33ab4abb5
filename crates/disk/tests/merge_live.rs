//! Layers dropped from the chain of a disk in use: the guest reads what it wrote, the snapshots that stay are what they
//! were, for us and for stock tools, and the files are gone.

use std::os::fd::AsFd as _;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use crate::common::flat::{assert_reads, assert_same, pattern, range as bytes, read, some_range, write};
use crate::common::io::Client;
use crate::common::stock::{assert_clean, content, path_str, qemu_img};
use crate::common::{for_seeds, open, open_read_only, random, scratch};
use rand::Rng as _;
use vmstrata_disk::merge::{
    Action, Direction, Kept, Merge, MergeFault, MergeOptions, MergeRange, Merged, Removal, ranges_of,
};
use vmstrata_disk::snapshot::{self, SnapshotInfo, list};
use vmstrata_disk::{Disk, Error, Format, Op, OpenOptions, ResourceOptions, Resources, snapshot_together};
use vmstrata_types::LayerIndex;

const SIZE: u64 = 8 << 20;

fn disk_in(dir: &Path, options: &str) -> PathBuf {
    let path = dir.join("disk.img");
    qemu_img(&["create", "-q", "-f", "qcow2", "-o", options, path_str(&path), &SIZE.to_string()]);
    path
}

fn named(name: impl std::fmt::Display) -> SnapshotInfo {
    SnapshotInfo { name: name.to_string(), ..SnapshotInfo::default() }
}

fn range(first: usize, last: usize) -> MergeRange {
    let index = |layer: usize| LayerIndex::new(u16::try_from(layer).unwrap());
    MergeRange { first: index(first), last: index(last) }
}

fn merge(disk: &Arc<Disk>, range: MergeRange) -> Result<Merged, Error> {
    let options = MergeOptions { removal: Removal::All, ..MergeOptions::default() };
    Merge::of_disk(disk, range, &options)?.run()
}

/// A disk and its snapshots, with what each must read as.
struct History {
    disk: Arc<Disk>,
    path: PathBuf,
    model: Vec<u8>,
    states: Vec<(PathBuf, Vec<u8>)>,
    taken: usize,
}

impl History {
    fn new(path: PathBuf) -> Self {
        Self { disk: open(&path), path, model: vec![0; SIZE as usize], states: Vec::new(), taken: 0 }
    }

    fn change(&mut self, random: &mut rand::rngs::SmallRng) {
        let (at, len) = some_range(random, SIZE, 64 << 10);
        let place = at as usize..(at + len) as usize;
        match random.random_range(0..10) {
            0..=6 => {
                let data = pattern(random, len as usize);
                write(&self.disk, at, &data).unwrap();
                self.model[place].copy_from_slice(&data);
            }
            _ => {
                self.disk.write_zeroes(bytes(at, len), random.random()).unwrap();
                self.model[place].fill(0);
            }
        }
    }

    fn snapshot(&mut self) {
        let taken = self.disk.snapshot(&named(self.taken)).unwrap();
        self.taken += 1;
        self.states.push((taken.layer, self.model.clone()));
    }

    fn check(&self, what: &str) {
        assert_reads(&self.disk, &self.model, what);
        assert_eq!(self.disk.layers().len(), self.states.len() + 1, "{what}");
    }

    /// By stock tools too, when the disk is closed.
    fn end(self, what: &str) {
        self.disk.close().unwrap();
        drop(self.disk);
        for (layer, model) in &self.states {
            assert_clean(layer);
            assert_same(&content(layer, "qcow2"), model, 0, what);
            assert_reads(&open_read_only(layer), model, what);
        }
        assert_clean(&self.path);
        assert_same(&content(&self.path, "qcow2"), &self.model, 0, what);
        assert_reads(&open(&self.path), &self.model, what);
        let names = list(&self.path, &OpenOptions::default()).unwrap();
        let layers: Vec<_> = names.iter().rev().map(|snapshot| snapshot.layer.clone()).collect();
        assert_eq!(layers, self.states.iter().map(|state| state.0.clone()).collect::<Vec<_>>(), "{what}");
    }
}

/// Random changes, snapshots and merges of random ranges; changes go on between the steps of a merge.
#[test]
fn histories_with_merges_read_as_flat_arrays_do() {
    for_seeds(8, |seed| {
        let dir = scratch();
        let kinds = [
            "cluster_size=4k",
            "cluster_size=128k,extended_l2=on",
            "cluster_size=64k",
            "cluster_size=16k,extended_l2=on",
            "compat=0.10",
            "cluster_size=2M,extended_l2=on",
            "cluster_size=2M",
            "cluster_size=32k,extended_l2=on",
        ];
        let mut random = random("live merges", seed);
        let mut history = History::new(disk_in(dir.path(), kinds[seed as usize % kinds.len()]));
        for step in 0..60 {
            let what = format!("seed {seed}, step {step}");
            (0..random.random_range(0..12)).for_each(|_| history.change(&mut random));
            if history.states.len() < 2 || random.random_ratio(2, 3) {
                history.snapshot();
                continue;
            }
            let first = random.random_range(0..history.states.len());
            let last = random.random_range(first..history.states.len().min(first + 4));
            let options = MergeOptions { removal: Removal::All, ..MergeOptions::default() };
            let mut job = Merge::of_disk(&history.disk, range(first, last), &options).unwrap();
            if random.random() {
                job.copy_at_most(random.random_range(1 << 18..4 << 20));
            }
            while let Some(action) = job.select() {
                job.apply(action).unwrap_or_else(|error| panic!("{what}: {action:?}: {error}"));
                (0..random.random_range(0..4)).for_each(|_| history.change(&mut random));
            }
            assert_eq!(job.merged().removed.len(), last - first + 1, "{what}: {:?}", job.merged().kept);
            drop(job);
            history.states.drain(first..=last);
            history.check(&what);
        }
        history.end(&format!("seed {seed}"));
    });
}

/// Zeros over data below the dropped layers: what the guest discards after it was copied must not show that data.
#[test]
fn a_cluster_discarded_after_it_was_copied_stays_zeros() {
    for discard in [false, true] {
        let dir = scratch();
        let path = disk_in(dir.path(), "cluster_size=64k");
        let disk = open(&path);
        write(&disk, 0, &[1; 256 << 10]).unwrap();
        disk.snapshot(&named("data")).unwrap();
        disk.write_zeroes(bytes(0, 256 << 10), true).unwrap();
        disk.snapshot(&named("zeros")).unwrap();
        write(&disk, 0, &[2; 128 << 10]).unwrap();
        let options = MergeOptions::default();
        let mut job = Merge::of_disk(&disk, range(1, 1), &options).unwrap();
        while let Some(action) = job.select() {
            job.apply(action).unwrap();
            if matches!(action, Action::Copy(_)) {
                let gone = bytes(0, 128 << 10);
                if discard { disk.discard(gone) } else { disk.write_zeroes(gone, true) }.unwrap();
            }
        }
        drop(job);
        assert_reads(&disk, &vec![0; SIZE as usize], "discarded");
        disk.close().unwrap();
        drop(disk);
        assert_same(&content(&path, "qcow2"), &vec![0; SIZE as usize], 0, "by stock tools");
        assert_clean(&path);
    }
}

/// Writers and readers by queue and by call, while 30 of 40 layers go.
#[test]
fn thirty_of_forty_layers_go_under_load() {
    const BLOCKS: u64 = 64;
    let dir = scratch();
    let path = disk_in(dir.path(), "cluster_size=64k");
    let mut random = random("thirty", 1);
    let mut history = History::new(path);
    for _ in 0..40 {
        (0..6).for_each(|_| history.change(&mut random));
        history.snapshot();
    }
    let disk = Arc::clone(&history.disk);
    let (stop, rounds) = (AtomicBool::new(false), AtomicU64::new(0));
    let numbers: Vec<u64> = std::thread::scope(|scope| {
        let writers: Vec<_> = (0..2)
            .map(|writer| {
                let (disk, stop, rounds) = (&disk, &stop, &rounds);
                scope.spawn(move || {
                    let mut client = Client::new(disk, 8);
                    let mut number = 0u64;
                    while !stop.load(Ordering::Relaxed) || number == 0 {
                        number += 1;
                        let data = (number + writer).to_le_bytes().repeat(512);
                        let place = |block: u64| (writer * BLOCKS + block) * (SIZE / BLOCKS / 2);
                        for block in 0..BLOCKS {
                            client.push(Op::Write { fua: false }, place(block), 4096, Some(&data));
                        }
                        assert!(client.drain().iter().all(|done| done.result.is_ok()), "a write failed");
                        for block in 0..BLOCKS {
                            client.push(Op::Read, place(block), 4096, None);
                        }
                        for done in client.drain() {
                            done.result.expect("reads");
                            assert!(done.bytes[..] == data[..], "a read returned something else");
                        }
                        rounds.fetch_add(1, Ordering::Relaxed);
                    }
                    number
                })
            })
            .collect();
        for (first, last) in [(30, 39), (3, 12), (5, 14)] {
            let merged = merge(&disk, range(first, last)).unwrap();
            assert_eq!(merged.removed.len(), 10, "{:?}", merged.kept);
            history.states.drain(first..=last);
            assert_eq!(disk.layers().len(), history.states.len() + 1);
        }
        stop.store(true, Ordering::Relaxed);
        writers.into_iter().map(|writer| writer.join().expect("a writer")).collect()
    });
    assert!(rounds.load(Ordering::Relaxed) > 2);
    for (writer, number) in (0u64..).zip(numbers) {
        for block in 0..BLOCKS {
            let at = ((writer * BLOCKS + block) * (SIZE / BLOCKS / 2)) as usize;
            history.model[at..at + 4096].copy_from_slice(&(number + writer).to_le_bytes().repeat(512));
        }
    }
    drop(disk);
    history.check("after the load");
    history.end("after the load");
}

#[test]
fn a_job_that_is_cancelled_leaves_the_disk_in_use() {
    let dir = scratch();
    let mut random = random("cancel", 1);
    let mut history = History::new(disk_in(dir.path(), "cluster_size=64k"));
    for _ in 0..5 {
        (0..8).for_each(|_| history.change(&mut random));
        history.snapshot();
    }
    for (first, last) in [(1, 2), (3, 4), (0, 4)] {
        let mut job = Merge::of_disk(&history.disk, range(first, last), &MergeOptions::default()).unwrap();
        job.apply(job.select().unwrap()).unwrap();
        drop(job);
        (0..8).for_each(|_| history.change(&mut random));
        history.check("cancelled");
    }
    history.snapshot();
    merge(&history.disk, range(1, 2)).unwrap();
    history.states.drain(1..=2);
    history.check("begun again");
    history.end("begun again");
}

#[test]
fn a_snapshot_may_be_taken_in_the_middle() {
    let dir = scratch();
    let mut random = random("in the middle", 1);
    let mut history = History::new(disk_in(dir.path(), "cluster_size=64k"));
    for _ in 0..4 {
        (0..8).for_each(|_| history.change(&mut random));
        history.snapshot();
    }
    let options = MergeOptions { removal: Removal::All, ..MergeOptions::default() };
    let mut job = Merge::of_disk(&history.disk, range(1, 2), &options).unwrap();
    while let Some(action) = job.select() {
        job.apply(action).unwrap();
        if matches!(action, Action::Copy(_) | Action::Relink) {
            history.change(&mut random);
            history.snapshot();
        }
    }
    drop(job);
    history.states.drain(1..=2);
    history.check("with snapshots meanwhile");
    // One that freezes the target ends the job; begun again, it goes on.
    let newest = history.states.len() - 1;
    let mut job = Merge::of_disk(&history.disk, range(newest, newest), &options).unwrap();
    job.apply(job.select().unwrap()).unwrap();
    history.snapshot();
    let error = job.run().unwrap_err();
    assert!(error.to_string().contains("layers have changed"), "{error}");
    history.check("the target was frozen");
    merge(&history.disk, range(newest, newest)).unwrap();
    history.states.remove(newest);
    history.check("begun again");
    history.end("at the end");
}

/// A target that another disk in use stands on is not touched; a dropped layer that one stands on keeps its file.
#[test]
fn other_disks_of_the_server_are_protected() {
    let dir = scratch();
    let path = disk_in(dir.path(), "cluster_size=64k");
    let resources = Resources::new(ResourceOptions::default());
    let open = |path: &Path| Disk::open(path, &OpenOptions::default(), &resources);
    let disk = open(&path).unwrap();
    let mut model = vec![0; SIZE as usize];
    for number in 0..4u8 {
        let at = u64::from(number) << 20;
        write(&disk, at, &vec![number + 1; 100_000]).unwrap();
        model[at as usize..at as usize + 100_000].fill(number + 1);
        disk.snapshot(&named(format!("s{number}"))).unwrap();
    }
    let clone = dir.path().join("clone.qcow2");
    snapshot::clone(&path, "s2", &clone, &OpenOptions::default()).unwrap();
    let other = open(&clone).unwrap();
    let other_model = read(&other, 0, SIZE as usize).unwrap();
    let refused = merge(&disk, range(1, 1)).unwrap_err().to_string();
    assert!(refused.contains("in use by the disk") && refused.contains("clone.qcow2"), "{refused}");
    let merged = merge(&disk, range(2, 2)).unwrap();
    assert!(matches!(merged.kept[..], [(_, Kept::Needed { .. })]), "{merged:?}");
    assert_reads(&disk, &model, "the disk");
    assert_reads(&other, &other_model, "the clone");
    other.close().unwrap();
    drop(other);
    // While its layers are copied into, no disk can be opened over them; a second merge has to wait.
    let mut job = Merge::of_disk(&disk, range(0, 0), &MergeOptions::default()).unwrap();
    job.apply(job.select().unwrap()).unwrap();
    assert!(open(&clone).unwrap_err().to_string().contains("being merged"));
    assert!(merge(&disk, range(0, 0)).unwrap_err().to_string().contains("being merged"));
    let merged = job.run().unwrap();
    assert_eq!(merged.removed.len(), 1, "{merged:?}");
    let other = open(&clone).unwrap();
    assert_reads(&other, &other_model, "the clone, whose chain is shorter too");
    assert_reads(&disk, &model, "the disk");
    let names = ranges_of(&path, &["s1".to_owned()], &OpenOptions::default()).unwrap();
    assert_eq!(names, [range(0, 0)]);
    for disk in [other, disk] {
        disk.close().unwrap();
    }
    assert_clean(&path);
    assert_clean(&clone);
}

/// Its file is open, and not yet one of those that are known to be.
#[test]
fn merging_works_beside_a_snapshot_that_is_not_finalized() {
    let dir = scratch();
    let mut random = random("not finalized", 1);
    let mut history = History::new(disk_in(dir.path(), "cluster_size=64k"));
    for _ in 0..3 {
        (0..8).for_each(|_| history.change(&mut random));
        history.snapshot();
    }
    let mut job = Merge::of_disk(&history.disk, range(0, 0), &MergeOptions::default()).unwrap();
    while let Some(action) = job.select() {
        if action == Action::Remove {
            // Two, as what was active when the merge began is known to be the disk's own.
            for name in ["one", "other"] {
                snapshot_together(&[&history.disk], &named(name)).unwrap();
            }
            assert!(history.disk.is_finalizing());
        }
        job.apply(action).unwrap();
    }
    assert_eq!((job.merged().removed.len(), &job.merged().kept[..]), (1, &[][..]));
    assert!(history.disk.is_finalizing(), "it was finalized first");
}

/// It read all layers, and sleeps: their locks must not look like those of somebody else.
#[test]
fn a_queue_without_requests_is_in_nobodys_way() {
    let dir = scratch();
    let mut random = random("idle", 1);
    let mut history = History::new(disk_in(dir.path(), "cluster_size=64k"));
    for _ in 0..4 {
        (0..8).for_each(|_| history.change(&mut random));
        history.snapshot();
    }
    let disk = Arc::clone(&history.disk);
    let (end, ended) = (std::io::pipe().unwrap(), std::sync::Barrier::new(2));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut client = Client::new(&disk, 8);
            client.push(Op::Read, 0, SIZE, None);
            client.drain().remove(0).result.unwrap();
            ended.wait();
            let woken = client.idle(end.0.as_fd());
            assert!(woken < 200, "it does not sleep: {woken}");
        });
        ended.wait();
        // Ends the thread whatever comes of it.
        let _end = end.1;
        history.snapshot();
        for layer in [1, 2, 0] {
            let merged = merge(&history.disk, range(layer, layer)).unwrap();
            assert_eq!(merged.removed.len(), 1, "{merged:?}");
            history.states.remove(layer);
        }
    });
    drop(disk);
    history.check("beside an idle queue");
    history.end("beside an idle queue");
}

/// An index goes where the target's clusters go: it must not be built into a layer that is being copied into.
#[test]
fn no_index_is_written_into_a_layer_that_is_copied_into() {
    let dir = scratch();
    let mut random = random("index meanwhile", 1);
    let path = dir.path().join("disk.img");
    let options = vmstrata_disk::CreateOptions { size: Some(SIZE), ..Default::default() };
    vmstrata_disk::create(&path, &options).unwrap();
    let mut history = History::new(path);
    for _ in 0..4 {
        (0..8).for_each(|_| history.change(&mut random));
        history.snapshot();
    }
    let options = MergeOptions { removal: Removal::All, ..MergeOptions::default() };
    let mut job = Merge::of_disk(&history.disk, range(1, 1), &options).unwrap();
    while let Some(action) = job.select() {
        if matches!(action, Action::Copy(_)) {
            vmstrata_disk::index::build(&history.path, &Default::default()).unwrap();
        }
        job.apply(action).unwrap();
    }
    drop(job);
    history.states.remove(1);
    history.check("with indices built meanwhile");
    history.end("with indices built meanwhile");
}

/// Snapshots that are taken while names are looked up must not make another layer of what is meant.
#[test]
fn what_a_name_means_does_not_move_while_snapshots_are_taken() {
    let dir = scratch();
    let path = disk_in(dir.path(), "cluster_size=64k");
    let disk = open(&path);
    for name in ["a", "b", "c"] {
        disk.snapshot(&named(name)).unwrap();
    }
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for number in 0.. {
                if stop.load(Ordering::Relaxed) {
                    return;
                }
                disk.snapshot(&named(number)).unwrap();
            }
        });
        let names = ["b".to_owned(), "c".to_owned()];
        let mut looked = 0;
        while looked < 300 || disk.layer_count() < 20 {
            let found = ranges_of(&path, &names, &OpenOptions::default());
            looked += 1;
            if found.as_deref().ok() != Some(&[range(1, 2)]) {
                stop.store(true, Ordering::Relaxed);
                panic!("look {looked}: {found:?}");
            }
        }
        stop.store(true, Ordering::Relaxed);
    });
    disk.close().unwrap();
}

/// Into a frozen layer and into the active one, while the guest's writes make the disk larger.
#[test]
fn the_freed_bytes_of_a_disk_in_use_leave_out_what_the_guest_writes() {
    const MIB: u64 = 1 << 20;
    let dir = scratch();
    let mut history = History::new(disk_in(dir.path(), "cluster_size=64k"));
    for at in 0..2 {
        // The second hides half of the first.
        write(&history.disk, at * MIB / 2, &vec![7; MIB as usize]).unwrap();
        history.snapshot();
    }
    // With the index beside it.
    let taken = |path: &Path| {
        let of = |path: PathBuf| path.metadata().map_or(0, |found| found.blocks() * 512);
        of(path.to_owned()) + of(format!("{}.vmsx", path.display()).into())
    };
    for (into_active, copied) in [(false, MIB / 2), (true, MIB * 3 / 2)] {
        let layers: Vec<_> = history.states.iter().map(|state| state.0.clone()).collect();
        let before: u64 = layers.iter().map(|path| taken(path)).sum();
        let (removal, direction) = (Removal::All, Direction::Stream);
        let options = MergeOptions { removal, direction, ..MergeOptions::default() };
        let mut job = Merge::of_disk(&history.disk, range(0, 0), &options).unwrap();
        while let Some(action) = job.select() {
            write(&history.disk, 4 * MIB, &vec![8; 3 * MIB as usize]).unwrap();
            job.apply(action).unwrap();
        }
        assert_eq!(job.merged().copied_bytes, copied);
        let now = if into_active { copied } else { taken(&layers[1]) };
        assert_eq!(job.merged().freed_bytes, before - now);
        drop(job);
        history.states.remove(0);
    }
}

/// A disk under load comes to stand on another chain below one of its layers, then on a third.
#[test]
fn a_disk_in_use_moves_to_chains_that_read_the_same() {
    for_seeds(4, |seed| {
        let dir = scratch();
        let mut random = random("rebase", seed);
        let mut history = History::new(disk_in(dir.path(), "cluster_size=64k"));
        for _ in 0..6 {
            (0..8).for_each(|_| history.change(&mut random));
            history.snapshot();
        }
        let other = |layer: usize| dir.path().join(format!("below-{layer}.qcow2"));
        for (layer, cluster, longer) in [(3, "128k", 0), (4, "64k", 3)] {
            let (lowest, model) = history.states[layer].clone();
            let mut below = other(layer);
            let from = path_str(&history.states[layer - 1].0).to_owned();
            let options = format!("cluster_size={cluster}");
            qemu_img(&["convert", "-q", "-O", "qcow2", "-o", &options, &from, path_str(&below)]);
            // With more layers than lay below, the layers above have other numbers.
            for number in 0..longer {
                let over = dir.path().join(format!("over-{number}.qcow2"));
                let backing = path_str(&below).to_owned();
                qemu_img(&["create", "-q", "-f", "qcow2", "-F", "qcow2", "-b", &backing, path_str(&over)]);
                below = over;
            }
            (0..4).for_each(|_| history.change(&mut random));
            let on = history.states[layer - 1].0.clone();
            for wrong in [&on, &lowest] {
                let stands = history.disk.rebase(&history.path, Some(wrong), (&below, Format::Qcow2));
                assert!(matches!(stands.unwrap_err().fault(), Some(MergeFault::LayersChanged)), "{wrong:?}");
            }
            history.disk.rebase(&lowest, Some(&on), (&below, Format::Qcow2)).unwrap();
            (0..4).for_each(|_| history.change(&mut random));
            assert_reads(&history.disk, &history.model, "after it");
            assert_clean(&lowest);
            assert_same(&content(&lowest, "qcow2"), &model, 0, "the lowest layer");
            history.snapshot();
        }
        let (disk, path, model) = (history.disk.clone(), history.path.clone(), history.model.clone());
        let paths: Vec<PathBuf> = disk.layers().iter().map(|layer| layer.path.clone()).collect();
        assert_eq!(paths[0], other(4));
        drop(history);
        disk.close().unwrap();
        drop(disk);
        assert_clean(&path);
        assert_same(&content(&path, "qcow2"), &model, 0, "by stock tools");
        assert_reads(&open(&path), &model, "opened again");
    });
}

#[test]
fn the_lowest_layer_is_not_rebased() {
    let dir = scratch();
    let mut history = History::new(disk_in(dir.path(), "cluster_size=64k"));
    history.snapshot();
    let lowest = history.states[0].0.clone();
    for layer in [&lowest, &dir.path().join("other.qcow2")] {
        history.disk.rebase(layer, None, (&lowest, Format::Qcow2)).unwrap_err();
    }
    history.check("as before");
}
