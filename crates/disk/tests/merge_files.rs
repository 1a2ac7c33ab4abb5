//! Layers dropped from chains of files: every state that remains is what it was, for us and for stock tools.

use crate::common;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::common::flat::assert_same;
use crate::common::stock::{assert_clean, content, path_str, qemu_img, qemu_io};
use crate::common::{for_seeds, open_read_only, random};
use crate::index_support::{Chain, Maker, random_chain};
use rand::Rng as _;
use vmstrata_disk::merge::{
    Action, Direction, Kept, Merge, MergeOptions, MergeRange, Merged, Removal, ranges_of,
};
use vmstrata_disk::snapshot::{self, PrepareOptions, SnapshotInfo, list};
use vmstrata_disk::{CreateOptions, Error, OpenOptions, ResourceOptions, Resources, create};
use vmstrata_types::{ClusterBits, LayerIndex};

fn resources() -> Arc<Resources> {
    Resources::new(ResourceOptions::default())
}

fn range(first: usize, last: usize) -> MergeRange {
    let index = |layer: usize| LayerIndex::new(u16::try_from(layer).unwrap());
    MergeRange { first: index(first), last: index(last) }
}

fn all() -> MergeOptions {
    MergeOptions { removal: Removal::All, beyond_own: true, ..MergeOptions::default() }
}

fn merge(disk: &Path, range: MergeRange, options: &MergeOptions) -> Result<Merged, Error> {
    let job = Merge::new(disk, range, options, &resources())?;
    let demand = job.demand();
    let merged = job.run()?;
    // Clusters turn out to be zeros when they are read; what is written over takes no room.
    assert!(merged.is_commit || merged.copied_bytes <= demand, "{} of {demand}", merged.copied_bytes);
    Ok(merged)
}

/// Files of a chain, base first, each with what it reads as for stock tools.
struct States(Vec<(PathBuf, &'static str, Vec<u8>)>);

impl States {
    fn of(files: &[PathBuf]) -> Self {
        let is_qcow2 = |path: &Path| std::fs::read(path).unwrap().starts_with(b"QFI\xfb");
        let state = |path: &PathBuf| {
            let format = if is_qcow2(path) { "qcow2" } else { "raw" };
            (path.clone(), format, content(path, format))
        };
        Self(files.iter().map(state).collect())
    }

    fn assert_same(&self, what: &str) {
        for (path, format, model) in &self.0 {
            let what = format!("{what}: {}", path.display());
            assert_same(&content(path, format), model, 0, &what);
            if *format == "qcow2" {
                assert_clean(path);
            }
            let disk = open_read_only(path);
            let mut model = model.clone();
            model.resize(disk.size() as usize, 0);
            common::flat::assert_reads(&disk, &model, &what);
        }
    }
}

#[test]
fn a_layer_is_dropped_from_the_middle() {
    let mut chain = Chain::ours(5);
    let mut states = States::of(&chain.files);
    let merged = merge(chain.top(), range(2, 2), &all()).unwrap();
    let gone = chain.files.remove(2);
    states.0.remove(2);
    assert_eq!((merged.removed.as_slice(), merged.kept.as_slice()), (&[gone.clone()][..], &[][..]));
    assert_eq!(merged.copied_bytes, 64 << 10, "its own cluster; the common one is hidden");
    assert!(!gone.exists());
    states.assert_same("without layer 2");
    assert_eq!(open_read_only(chain.top()).layers().len(), 4);
}

#[test]
fn what_an_interrupted_snapshot_left_is_removed_first() {
    let chain = Chain::ours(3);
    let top = chain.top();
    let name = top.file_name().unwrap().to_str().unwrap();
    let left = top.with_file_name(format!(".{name}.4711-0.snapshot"));
    // Torn: an image like that may stand on any layer.
    std::fs::write(&left, &std::fs::read(top).unwrap()[..64]).unwrap();
    let merged = merge(top, range(1, 1), &all()).unwrap();
    assert_eq!(merged.removed, [chain.files[1].clone()]);
    assert!(!left.exists());
}

#[test]
fn a_merge_copies_the_subclusters_that_differ_and_are_not_there() {
    const SUBCLUSTER: u64 = 4096;
    let bits = ClusterBits::from_size(32 * SUBCLUSTER).unwrap();
    for direction in [Direction::Stream, Direction::Commit] {
        for base in [Maker::Subclusters, Maker::Ours] {
            let mut chain = Chain::new();
            for maker in [Maker::Ours, base, Maker::Subclusters, Maker::Subclusters] {
                let bits = if maker == Maker::Ours { ClusterBits::DEFAULT } else { bits };
                chain.add(maker, 4 << 20, bits);
            }
            chain.write(0, &["write -q -P 1 0 4M"]);
            // What lies below all, what only the dropped layer has, and what the one above has too, as data and as zeros.
            chain.write(1, &["write -q -P 2 128k 64k", "write -q -P 2 256k 128k", "write -q -z 1M 128k"]);
            chain.write(2, &["write -q -P 3 132k 8k", "write -q -z 260k 4k", "write -q -P 3 1028k 4k"]);
            let mut states = States::of(&chain.files);
            let merged = merge(chain.top(), range(1, 1), &MergeOptions { direction, ..all() }).unwrap();
            let copied = match (direction, base) {
                (Direction::Stream, _) => (64 << 10) - 2 * SUBCLUSTER + (128 << 10) - SUBCLUSTER,
                (_, Maker::Subclusters) => 3 * SUBCLUSTER,
                // It has no cluster of its own there: what is around is copied up.
                _ => 2 * SUBCLUSTER + (64 << 10),
            };
            assert_eq!(merged.copied_bytes, copied, "{direction:?} {base:?}");
            chain.files.remove(1);
            states.0.remove(1);
            states.assert_same("without layer 1");
        }
    }
}

/// Random chains (sizes, cluster sizes, versions, raw bases, with and without indices), random ranges, until little is
/// left.
#[test]
fn what_remains_of_random_chains_reads_as_before() {
    for_seeds(12, |seed| {
        let mut random = random("merging", seed);
        let layers = random.random_range(3..8);
        let mut chain = random_chain(&mut random, layers);
        if random.random() {
            chain.build();
        }
        let mut states = States::of(&chain.files);
        while chain.files.len() > 1 {
            let first = random.random_range(0..chain.files.len() - 1);
            let last = random.random_range(first..chain.files.len() - 1);
            let what = format!("seed {seed}: {first}..={last} of {}", chain.files.len());
            let target = chain.files[last + 1].clone();
            match merge(chain.top(), range(first, last), &all()) {
                Ok(merged) => {
                    assert_eq!(merged.removed.len(), last - first + 1, "{what}: {:?}", merged.kept);
                    chain.files.drain(first..=last);
                    states.0.drain(first..=last);
                    states.assert_same(&what);
                }
                Err(error) => {
                    // Headers of small clusters are full, and the format's name is longer or shorter now.
                    assert!(error.to_string().contains("no room"), "{what}: {error}");
                    states.assert_same(&what);
                    let small = qemu_img(&["info", path_str(&target)]).contains("cluster_size: 512\n");
                    assert!(small, "{what}");
                    return;
                }
            }
        }
    });
}

#[test]
fn all_is_flattened_into_one_file() {
    let chain = Chain::ours(6);
    chain.build();
    let before = content(chain.top(), "qcow2");
    let merged = merge(chain.top(), range(0, 4), &all()).unwrap();
    assert_eq!(merged.removed.len(), 5);
    let info = qemu_img(&["info", path_str(chain.top())]);
    assert!(!info.contains("backing"), "{info}");
    assert_same(&content(chain.top(), "qcow2"), &before, 0, "flat");
    assert_clean(chain.top());
}

#[test]
fn a_job_that_is_dropped_early_leaves_a_sound_chain_and_is_taken_up_again() {
    for steps in 1..6 {
        let chain = Chain::ours(4);
        let states = States::of(&chain.files);
        let mut job = Merge::new(chain.top(), range(1, 2), &all(), &resources()).unwrap();
        for _ in 0..steps {
            let action = job.select().unwrap();
            assert!(matches!(action, Action::Copy(_)));
            job.apply(action).unwrap();
        }
        drop(job);
        states.assert_same("left early");
        merge(chain.top(), range(1, 2), &all()).unwrap();
        States(
            states
                .0
                .into_iter()
                .enumerate()
                .filter(|(at, _)| ![1, 2].contains(at))
                .map(|(_, state)| state)
                .collect(),
        )
        .assert_same("done");
    }
}

#[test]
fn indices_are_made_again_from_the_target_up() {
    let chain = Chain::ours(6);
    chain.build();
    merge(chain.top(), range(1, 2), &all()).unwrap();
    assert_eq!(chain.verify(), ["good", "good", "good"]);
    chain_is_clean(&chain);
}

fn chain_is_clean(chain: &Chain) {
    chain.files.iter().filter(|file| file.exists()).for_each(|file| assert_clean(file));
}

/// A disk with the snapshots s0, s1, ..., each after a write of its own.
fn with_snapshots(dir: &Path, count: usize) -> PathBuf {
    let disk = dir.join("web.qcow2");
    create(&disk, &CreateOptions { size: Some(16 << 20), ..CreateOptions::default() }).unwrap();
    for number in 0..count {
        write(&disk, &format!("write -q -P {} {number}M 300k", number + 1));
        take(&disk, &format!("s{number}"));
    }
    disk
}

fn take(disk: &PathBuf, name: &str) {
    let info = SnapshotInfo { name: name.to_owned(), taken_ns: 7, ..SnapshotInfo::default() };
    let (open, options) = (OpenOptions::default(), PrepareOptions::default());
    snapshot::create(std::slice::from_ref(disk), &info, &open, &options, &resources()).unwrap();
}

fn write(path: &Path, command: &str) {
    qemu_io(path, &[command.to_owned()]);
}

fn names(disk: &Path) -> Vec<String> {
    let found = list(disk, &OpenOptions::default()).unwrap();
    found.iter().map(|snapshot| snapshot.name().unwrap_or("-").to_owned()).collect()
}

fn delete(disk: &Path, names: &[&str]) -> Vec<Merged> {
    let names: Vec<String> = names.iter().map(|&name| name.to_owned()).collect();
    let ranges = ranges_of(disk, &names, &OpenOptions::default()).unwrap();
    ranges.into_iter().map(|range| merge(disk, range, &MergeOptions::default()).unwrap()).collect()
}

#[test]
fn snapshots_are_deleted_by_name_and_the_others_keep_theirs() {
    let dir = common::scratch();
    let disk = with_snapshots(dir.path(), 8);
    let file = |number: usize| dir.path().join(format!("web.s{number}.qcow2"));
    let states = |numbers: &[usize]| {
        States::of(&numbers.iter().map(|&number| file(number)).chain([disk.clone()]).collect::<Vec<_>>())
    };
    let kept = states(&[1, 4, 6]);
    let merged = delete(&disk, &["s2", "s0", "s3", "s7", "s5"]);
    assert_eq!(merged.len(), 4, "2 and 3 go together");
    assert!(merged.iter().all(|merged| merged.kept.is_empty()), "{merged:?}");
    assert_eq!(names(&disk), ["s6", "s4", "s1"]);
    kept.assert_same("after deleting five of eight");
    for number in [0, 2, 3, 5, 7] {
        assert!(!file(number).exists(), "{number}");
    }
    // The names are free again.
    write(&disk, "write -q -P 99 9M 64k");
    let info = SnapshotInfo { name: "s7".to_owned(), ..SnapshotInfo::default() };
    snapshot::create(
        std::slice::from_ref(&disk),
        &info,
        &OpenOptions::default(),
        &PrepareOptions::default(),
        &resources(),
    )
    .unwrap();
    assert_eq!(names(&disk), ["s7", "s6", "s4", "s1"]);
}

#[test]
fn a_layer_that_a_clone_stands_on_keeps_its_file() {
    let dir = common::scratch();
    let disk = with_snapshots(dir.path(), 4);
    let clone = dir.path().join("clone.qcow2");
    snapshot::clone(&disk, "s1", &clone, &OpenOptions::default()).unwrap();
    write(&clone, "write -q -P 77 5M 100k");
    let states = States::of(&[clone.clone(), disk.clone()]);
    let merged = delete(&disk, &["s0", "s1", "s2"]).remove(0);
    let clone_found = clone.canonicalize().unwrap();
    let s1 = dir.path().join("web.s1.qcow2");
    assert_eq!(merged.removed, [dir.path().join("web.s2.qcow2")]);
    assert_eq!(merged.kept[0], (s1.clone(), Kept::Needed { by: clone_found }));
    assert_eq!(
        merged.kept[1],
        (dir.path().join("web.s0.qcow2"), Kept::Needed { by: s1.canonicalize().unwrap() })
    );
    states.assert_same("clone and disk");
    assert_eq!(names(&disk), ["s3"]);
    assert_eq!(names(&clone), ["s1", "s0"]);
}

/// What came with a clone is its origin's: flattening the clone leaves it.
#[test]
fn a_flattened_clone_leaves_the_files_of_its_origin() {
    let dir = common::scratch();
    let disk = with_snapshots(dir.path(), 2);
    let clone = dir.path().join("clone.qcow2");
    snapshot::clone(&disk, "s1", &clone, &OpenOptions::default()).unwrap();
    let states = States::of(&[clone.clone(), disk.clone()]);
    let merged = merge(&clone, range(0, 1), &MergeOptions::default()).unwrap();
    assert_eq!((merged.removed.len(), merged.kept.len()), (0, 2));
    assert_eq!(merged.kept[0].1, Kept::NotASnapshot);
    states.assert_same("flat");
    assert_eq!((names(&clone).len(), names(&disk).len()), (0, 2));
}

/// A clone has the snapshots of its origin in its chain, and may go back to them; they are the origin's to delete.
#[test]
fn what_came_with_a_clone_is_deleted_at_its_origin_only() {
    let dir = common::scratch();
    let disk = with_snapshots(dir.path(), 3);
    let clone = dir.path().join("clone.qcow2");
    snapshot::clone(&disk, "s2", &clone, &OpenOptions::default()).unwrap();
    write(&clone, "write -q -P 77 5M 100k");
    take(&clone, "own");
    let of = |disk: &Path| -> Vec<Option<String>> {
        list(disk, &OpenOptions::default()).unwrap().into_iter().map(|found| found.origin).collect()
    };
    let web = Some("web.qcow2".to_owned());
    assert_eq!(of(&clone), [None, web.clone(), web.clone(), web.clone()]);
    let states = States::of(&[clone.clone(), disk.clone(), dir.path().join("web.s1.qcow2")]);
    for names in [&["s0"][..], &["own", "s1"], &["s0..s1"]] {
        let names: Vec<String> = names.iter().map(|name| (*name).to_owned()).collect();
        let refused = ranges_of(&clone, &names, &OpenOptions::default()).unwrap_err();
        assert!(refused.to_string().contains("belong to web.qcow2"), "{refused}");
    }
    let refused = merge(&clone, range(0, 0), &all()).unwrap_err();
    assert!(refused.to_string().contains("belong to web.qcow2"), "{refused}");
    // The newest goes from this chain alone.
    let merged = delete(&clone, &["s2"]).remove(0);
    assert_eq!(merged.kept, [(dir.path().join("web.s2.qcow2"), Kept::NotASnapshot)]);
    states.assert_same("clone and origin");
    assert_eq!(
        (names(&clone), of(&clone)),
        (
            vec!["own", "s1", "s0"].into_iter().map(str::to_owned).collect(),
            vec![None, web.clone(), web.clone()]
        )
    );
    // Gone back to one of them, it is still the origin's.
    snapshot::revert(&clone, "s0", &snapshot::RevertOptions::default(), &resources()).unwrap();
    assert_eq!(of(&clone), [web]);
    let merged = merge(&clone, range(0, 0), &MergeOptions::default()).unwrap();
    assert_eq!(merged.kept[0].1, Kept::NotASnapshot);
    assert_eq!(names(&disk), ["s2", "s1", "s0"]);
}

#[test]
fn layers_in_use_are_left_alone() {
    let dir = common::scratch();
    let disk = with_snapshots(dir.path(), 3);
    let (s0, s1) = (dir.path().join("web.s0.qcow2"), dir.path().join("web.s1.qcow2"));
    let states = States::of(&[s1.clone(), disk.clone()]);
    let reader = open_read_only(&s1);
    let refused = merge(&disk, range(0, 0), &MergeOptions::default()).unwrap_err();
    assert!(refused.to_string().contains("in use"), "{refused}");
    drop(reader);
    let reader = open_read_only(&s0);
    let merged = merge(&disk, range(0, 0), &MergeOptions::default()).unwrap();
    assert_eq!(merged.kept, [(s0.clone(), Kept::InUse)]);
    drop(reader);
    assert!(s0.exists());
    let served = common::open(&disk);
    let refused = merge(&disk, range(0, 0), &MergeOptions::default()).unwrap_err();
    assert!(refused.to_string().contains("in use"), "{refused}");
    drop(served);
    states.assert_same("refused and not");
}

#[test]
fn layers_that_are_not_there_are_refused() {
    let chain = Chain::ours(3);
    for bad in [range(0, 2), range(2, 2), range(1, 0), range(7, 9)] {
        let refused = merge(chain.top(), bad, &all()).unwrap_err();
        assert!(refused.to_string().contains("not below that"), "{refused}");
    }
    let mut single = Chain::new();
    let top = single.add(Maker::Ours, 1 << 20, ClusterBits::DEFAULT);
    assert!(merge(&top, range(0, 0), &all()).is_err());
}

/// A short layer hides what lies below it past its end; dropped, it must go on doing so.
#[test]
fn what_a_short_layer_hid_stays_zeros() {
    for maker in [Maker::Ours, Maker::Old] {
        let mut chain = Chain::new();
        for (size, maker) in [(4 << 20, Maker::Ours), (1 << 20, Maker::Ours), (4 << 20, maker)] {
            chain.add(maker, size, ClusterBits::DEFAULT);
        }
        chain.write(0, &["write -q -P 1 0 4M"]);
        chain.write(1, &["write -q -P 2 64k 64k"]);
        let states = States::of(&[chain.files[0].clone(), chain.files[2].clone()]);
        merge(chain.top(), range(1, 1), &all()).unwrap();
        states.assert_same("without the short layer");
    }
}

#[test]
fn holes_that_no_layer_filled_stay_holes() {
    let mut chain = Chain::new();
    for _ in 0..4 {
        chain.add(Maker::Ours, 64 << 20, ClusterBits::DEFAULT);
    }
    chain.write(1, &["write -q -z 0 8M", "write -q -P 3 40M 64k"]);
    let merged = merge(chain.top(), range(0, 2), &all()).unwrap();
    assert_eq!(merged.copied_bytes, 64 << 10, "zeros over nothing are nothing");
    let mapped = common::stock::map(chain.top(), "qcow2");
    assert!(mapped.iter().all(|extent| extent.present == extent.data), "{mapped:?}");
}

/// Stock tools keep snapshots within a file too: what such a one has not written it reads through to the layers below.
#[test]
fn files_with_internal_snapshots_are_neither_relinked_nor_removed() {
    for (holder, drops) in [(2, 1), (1, 1)] {
        let chain = Chain::ours(3);
        qemu_img(&["snapshot", "-c", "inner", path_str(&chain.files[holder])]);
        let refused = merge(chain.top(), range(drops, drops), &all()).unwrap_err();
        assert!(refused.to_string().contains("has 1 internal snapshots"), "{refused}");
        let running = common::open(chain.top());
        let refused = Merge::of_disk(&running, range(drops, drops), &all()).unwrap_err();
        assert!(refused.to_string().contains("has 1 internal snapshots"), "{refused}");
        running.close().unwrap();
        drop(running);
        // A file that only leaves the chain keeps its own.
        if holder == drops {
            let keep = MergeOptions { removal: Removal::Nothing, ..all() };
            merge(chain.top(), range(drops, drops), &keep).unwrap();
            qemu_img(&["snapshot", "-a", "inner", path_str(&chain.files[holder])]);
            qemu_io(&chain.files[holder], &["read -q -P 1 0 64k".to_owned()]);
        }
    }
}

/// Bytes that the files of a directory take.
fn du(dir: &Path) -> u64 {
    let files = std::fs::read_dir(dir).unwrap();
    files.map(|file| file.unwrap().metadata().unwrap().blocks() * 512).sum()
}

/// Random chains, with and without indices, merged either way, with files removed and kept.
#[test]
fn the_freed_bytes_are_the_change_of_du() {
    for_seeds(12, |seed| {
        let mut random = random("freeing", seed);
        let layers = random.random_range(3..8);
        let mut chain = random_chain(&mut random, layers);
        if random.random() {
            chain.build();
        }
        let dir = chain.top().parent().unwrap().to_owned();
        while chain.files.len() > 1 {
            let first = random.random_range(0..chain.files.len() - 1);
            let last = random.random_range(first..chain.files.len() - 1);
            let removal = if random.random_bool(0.8) { Removal::All } else { Removal::Nothing };
            let before = du(&dir);
            let Ok(merged) = merge(chain.top(), range(first, last), &MergeOptions { removal, ..all() })
            else {
                break;
            };
            let what = format!("seed {seed}: {first}..={last} of {}: {merged:?}", chain.files.len());
            assert_eq!(merged.freed_bytes, before.saturating_sub(du(&dir)), "{what}");
            chain.files.drain(first..=last);
        }
    });
}
