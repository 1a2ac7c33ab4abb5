//! Layers committed: what stays is written into the base of the dropped layers, which takes its place. Every state that
//! stays is what it was, for us and for stock tools, and a dropped one is never taken for a state.

use crate::common;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::common::faulty::FaultyFiles;
use crate::common::flat::{assert_reads, assert_same};
use crate::common::stock::{assert_clean, assert_safe, content, path_str, qemu_img, qemu_io};
use crate::common::{for_seeds, open_read_only, random};
use crate::index_support::{Chain, Maker};
use rand::Rng as _;
use rand::rngs::SmallRng;
use vmstrata_disk::merge::{Direction, Merge, MergeFault, MergeOptions, MergeRange, Merged, Removal};
use vmstrata_disk::snapshot::{self, SnapshotInfo, list};
use vmstrata_disk::{
    CheckOptions, CreateOptions, Disk, Error, ErrorKind, Format, OpenOptions, ResourceOptions, Resources,
    check, create,
};
use vmstrata_store::{
    Crash, CrashKind, Effect, Fault, FaultPlan, Moment, Operation, OperationKind, Survivors, When,
};
use vmstrata_types::{ClusterBits, HostOffset, LayerIndex};

fn resources() -> Arc<Resources> {
    Resources::new(ResourceOptions::default())
}

fn range(first: usize, last: usize) -> MergeRange {
    let index = |layer: usize| LayerIndex::new(u16::try_from(layer).unwrap());
    MergeRange { first: index(first), last: index(last) }
}

fn options(direction: Direction) -> MergeOptions {
    MergeOptions { removal: Removal::All, beyond_own: true, direction, ..MergeOptions::default() }
}

fn merge(disk: &Path, range: MergeRange, direction: Direction) -> Result<Merged, Error> {
    Merge::new(disk, range, &options(direction), &resources())?.run()
}

/// The same in actions that copy at most so many bytes each, rounded up to clusters of at most 64 KiB.
fn merge_in_steps(disk: &Path, range: MergeRange, direction: Direction, most: u64) -> Result<Merged, Error> {
    let mut job = Merge::new(disk, range, &options(direction), &resources())?;
    job.copy_at_most(most);
    while let Some(action) = job.select() {
        let bytes = job.apply(action)?;
        assert!(bytes < most.saturating_add(64 << 10), "{bytes} of {most} in one action");
    }
    Ok(job.merged().clone())
}

/// What each file of a chain reads as.
struct States(Vec<(PathBuf, Vec<u8>)>);

impl States {
    fn of(chain: &Chain) -> Self {
        Self(chain.files.iter().map(|file| (file.clone(), content(file, "qcow2"))).collect())
    }

    fn assert_same(&self, what: &str) {
        for (path, model) in &self.0 {
            let what = format!("{what}: {}", path.display());
            assert_same(&content(path, "qcow2"), model, 0, &what);
            assert_clean(path);
            assert_reads(&open_read_only(path), model, &what);
        }
    }
}

/// The clusters of a chain's layers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Clusters {
    /// All of one size.
    Even,
    /// The same, with subclusters.
    Subclusters,
    /// Of any size, with subclusters or without.
    Mixed,
}

impl Clusters {
    /// Each in its turn, the first every second time.
    fn of(seed: u64) -> Self {
        [Self::Even, Self::Mixed, Self::Even, Self::Subclusters][seed as usize % 4]
    }

    fn some_bits(self, random: &mut SmallRng) -> ClusterBits {
        ClusterBits::new(random.random_range(if self == Self::Subclusters { 14..=16 } else { 9..=16 }))
            .unwrap()
    }

    fn some_layer(self, random: &mut SmallRng, even: ClusterBits) -> (Maker, ClusterBits) {
        let bits = if self == Self::Mixed { self.some_bits(random) } else { even };
        let standard = [Maker::Ours, Maker::Ours, Maker::Stock, Maker::Old][random.random_range(0..4)];
        let has_subclusters =
            self == Self::Subclusters || self == Self::Mixed && bits.get() >= 14 && random.random();
        (if has_subclusters { Maker::Subclusters } else { standard }, bits)
    }
}

/// Layers of one size, with data, zeros, compressed clusters and holes, some over others.
fn some_chain(random: &mut SmallRng, clusters: Clusters, layers: usize) -> Chain {
    let mut chain = Chain::new();
    let even = clusters.some_bits(random);
    let size = 60 * even.size() - random.random_range(0..even.size() / 512) * 512;
    for number in 0..layers {
        let (maker, bits) = clusters.some_layer(random, even);
        chain.add(maker, size, bits);
        let commands = some_commands(random, size, bits);
        qemu_io(&chain.files[number], &commands);
    }
    chain
}

/// Compressed clusters first: stock tools put none over others.
fn some_commands(random: &mut SmallRng, size: u64, bits: ClusterBits) -> Vec<String> {
    let compressed = random.random_range(0..size.div_ceil(bits.size())) * bits.size();
    let len = bits.size().min(size - compressed);
    let mut commands = vec![format!("write -q -c -P {} {compressed} {len}", random.random::<u8>())];
    commands.extend((0..random.random_range(1..9)).map(|_| command(random, size, bits)));
    commands
}

fn command(random: &mut SmallRng, size: u64, bits: ClusterBits) -> String {
    let start = random.random_range(0..size / 512) * 512;
    let len = (random.random_range(1..8) * bits.size() / 2).next_multiple_of(512).min(size - start);
    match random.random_range(0..5) {
        0 => format!("write -q -z {start} {len}"),
        1 => format!("discard -q {start} {len}"),
        _ => format!("write -q -P {} {start} {len}", random.random_range(1..255)),
    }
}

#[test]
fn the_oldest_layer_takes_the_place_of_the_one_above() {
    let mut chain = Chain::ours(4);
    chain.build();
    chain.write(0, &["write -P 9 4M 20M"]);
    let mut states = States::of(&chain);
    chain.build();
    let merged = merge(chain.top(), range(0, 0), Direction::Auto).unwrap();
    assert!(merged.is_commit);
    assert_eq!(merged.copied_bytes, 128 << 10, "in proportion to the change");
    assert_eq!(merged.removed, [chain.files.remove(0)]);
    states.0.remove(0);
    states.assert_same("without layer 0");
    assert_eq!(open_read_only(chain.top()).layers().len(), 3);
    assert_eq!(chain.verify(), ["good"; 2]);
    // The other way is cheaper here.
    let merged = merge(chain.top(), range(1, 1), Direction::Auto).unwrap();
    assert_eq!((merged.is_commit, merged.copied_bytes), (false, 64 << 10));
}

/// A speed limit holds as closely as actions keep to it, and a range that is copied in parts counts once.
#[test]
fn an_action_copies_no_more_than_it_may() {
    for direction in [Direction::Commit, Direction::Stream] {
        let chain = Chain::ours(3);
        for (layer, at) in [(0, 1), (1, 4)] {
            chain.write(layer, &[&format!("write -P 9 {at}M 2M")]);
        }
        let mut states = States::of(&chain);
        let mut job = Merge::new(chain.top(), range(0, 0), &options(direction), &resources()).unwrap();
        job.copy_at_most(128 << 10);
        let (total, mut whole, mut parts) = (job.total(), 0, 0);
        while let Some(action) = job.select() {
            assert!(job.apply(action).unwrap() <= 128 << 10);
            *(if job.is_within_action() { &mut parts } else { &mut whole }) += 1;
        }
        assert!(parts >= 14 && whole <= total + 1, "{direction:?}: {parts} {whole} {total}");
        assert!(job.merged().copied_bytes >= 2 << 20, "{direction:?}");
        drop(job);
        states.0.remove(0);
        states.assert_same("in small steps");
    }
}

/// Of random chains layers are dropped in either direction, until none is left to drop.
#[test]
fn what_remains_reads_as_before_whichever_way_is_taken() {
    for_seeds(16, |seed| {
        let mut random = random("merging downwards", seed);
        let layers = random.random_range(3..8);
        let mut chain = some_chain(&mut random, Clusters::of(seed), layers);
        if random.random() {
            chain.build();
        }
        let mut states = States::of(&chain);
        let mut downs = 0;
        while chain.files.len() > 2 {
            let first = random.random_range(0..chain.files.len() - 2);
            let last = random.random_range(first..chain.files.len() - 2);
            let direction =
                [Direction::Commit, Direction::Commit, Direction::Auto][random.random_range(0..3)];
            let most = [1, 100_000, u64::MAX][random.random_range(0..3)];
            let what = format!("seed {seed}: {first}..={last} of {} {direction:?} {most}", chain.files.len());
            let merge = |direction| merge_in_steps(chain.top(), range(first, last), direction, most);
            let merged = match merge(direction) {
                // What is compressed, and shows in part, is not written over.
                Err(error) if error.to_string().contains("shows in the layer above") => {
                    merge(Direction::Auto)
                }
                merged => merged,
            };
            match merged {
                Ok(merged) => {
                    assert_eq!(merged.removed.len(), last - first + 1, "{what}: {:?}", merged.kept);
                    downs += usize::from(merged.is_commit);
                    chain.files.drain(first..=last).for_each(|file| assert!(!file.exists(), "{what}"));
                    states.0.drain(first..=last);
                }
                Err(error) => {
                    assert!(error.to_string().contains("no room"), "{what}: {error}");
                    return;
                }
            }
            states.assert_same(&what);
        }
        assert!(downs > 0, "seed {seed}");
    });
}

fn named(name: &str) -> SnapshotInfo {
    SnapshotInfo { name: name.to_owned(), ..SnapshotInfo::default() }
}

/// A disk with much in its first snapshot, and little in the others.
fn history(dir: &Path) -> PathBuf {
    let disk = dir.join("web.qcow2");
    create(&disk, &CreateOptions { size: Some(8 << 20), ..CreateOptions::default() }).unwrap();
    qemu_io(&disk, &["write -q -P 1 0 6M".to_owned()]);
    for (number, name) in ["mon", "tue", "wed"].into_iter().enumerate() {
        let (open, how) = (OpenOptions::default(), snapshot::PrepareOptions::default());
        snapshot::create(std::slice::from_ref(&disk), &named(name), &open, &how, &resources()).unwrap();
        qemu_io(&disk, &[format!("write -q -P {} {}k 64k", number + 2, number * 128)]);
    }
    disk
}

fn delete(disk: &Path, name: &str, direction: Direction) -> Result<Merged, Error> {
    let options = MergeOptions { direction, ..MergeOptions::default() };
    let ranges = vmstrata_disk::merge::ranges_of(disk, &[name.to_owned()], &options.open)?;
    Merge::new(disk, ranges[0], &options, &resources())?.run()
}

fn names(disk: &Path) -> Vec<(String, bool)> {
    let found = list(disk, &OpenOptions::default()).unwrap();
    found.iter().map(|found| (found.name().unwrap_or("-").to_owned(), found.is_being_deleted)).collect()
}

/// Whoever stands on the layer, or on one between, has it kept as it is: the other way is taken.
/// Who may read a state does not change by what file it is in.
#[test]
fn what_takes_a_layers_place_gets_its_owner_and_its_mode() {
    use std::fs::{Permissions, set_permissions};
    use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _, chown};
    let dir = common::scratch();
    let disk = history(dir.path());
    let [lowest, above] = ["web.mon.qcow2", "web.tue.qcow2"].map(|name| dir.path().join(name));
    let is_root = lowest.metadata().unwrap().uid() == 0;
    for (file, mode) in [(&lowest, 0o600), (&above, 0o644)] {
        set_permissions(file, Permissions::from_mode(mode)).unwrap();
    }
    if is_root {
        chown(&above, Some(65534), Some(65534)).unwrap();
    }
    let who = || {
        let found = above.metadata().unwrap();
        (found.uid(), found.gid(), found.mode() & 0o777)
    };
    let before = who();
    assert!(delete(&disk, "mon", Direction::Commit).unwrap().is_commit);
    assert_eq!(who(), before);
    assert_eq!(before.2, 0o644);
}

#[test]
fn a_layer_that_somebody_else_stands_on_is_not_written() {
    let dir = common::scratch();
    let disk = history(dir.path());
    let oldest = dir.path().join("web.mon.qcow2");
    let clone = dir.path().join("ci.qcow2");
    qemu_img(&["create", "-q", "-f", "qcow2", "-F", "qcow2", "-b", path_str(&oldest), path_str(&clone)]);
    let before = (std::fs::read(&oldest).unwrap(), content(&clone, "qcow2"));
    let refused = delete(&disk, "mon", Direction::Commit).unwrap_err();
    assert!(matches!(refused.fault(), Some(MergeFault::NoCommit { .. })), "{refused}");
    assert!(refused.to_string().contains("ci.qcow2"), "{refused}");
    let merged = delete(&disk, "mon", Direction::Auto).unwrap();
    assert!(!merged.is_commit);
    assert_eq!((std::fs::read(&oldest).unwrap(), content(&clone, "qcow2")), before);
    // One on the layer that stays finds it under its name.
    let clone = dir.path().join("other.qcow2");
    let stays = dir.path().join("web.wed.qcow2");
    qemu_img(&["create", "-q", "-f", "qcow2", "-F", "qcow2", "-b", path_str(&stays), path_str(&clone)]);
    let before = content(&clone, "qcow2");
    assert!(delete(&disk, "tue", Direction::Commit).unwrap().is_commit);
    assert_same(&content(&clone, "qcow2"), &before, 0, "the clone");
    assert_eq!(names(&disk), [("wed".to_owned(), false)]);
}

#[test]
fn a_layer_that_somebody_reads_is_not_written() {
    let dir = common::scratch();
    let disk = history(dir.path());
    let oldest = dir.path().join("web.mon.qcow2");
    let reader = open_read_only(&oldest);
    let refused = delete(&disk, "mon", Direction::Commit).unwrap_err();
    assert!(refused.to_string().contains("in use"), "{refused}");
    assert_eq!(names(&disk).last().unwrap(), &("mon".to_owned(), false));
    drop(reader);
    assert!(delete(&disk, "mon", Direction::Commit).unwrap().is_commit);
}

/// A merge that ended early: the snapshot is no state any more, for nobody, and deleting it again completes it.
#[test]
fn a_snapshot_that_is_half_deleted_is_refused_until_it_is_deleted() {
    let dir = common::scratch();
    let disk = history(dir.path());
    let before: Vec<Vec<u8>> = ["web.tue.qcow2", "web.wed.qcow2", "web.qcow2"]
        .map(|name| content(&dir.path().join(name), "qcow2"))
        .into();
    let assert_same_states = |what: &str| {
        for (name, before) in ["web.tue.qcow2", "web.wed.qcow2", "web.qcow2"].iter().zip(&before) {
            assert_same(&content(&dir.path().join(name), "qcow2"), before, 0, what);
            assert_clean(&dir.path().join(name));
        }
    };
    let open = OpenOptions::default();
    let ranges = vmstrata_disk::merge::ranges_of(&disk, &["mon".to_owned()], &open).unwrap();
    let mut begun = Merge::new(&disk, ranges[0], &options(Direction::Commit), &resources()).unwrap();
    let oldest = dir.path().join("web.mon.qcow2");
    let shut = vmstrata_disk::probe_chain(&oldest, &open);
    assert!(shut.is_ok(), "looking takes no lock");
    assert!(Disk::open(&oldest, &OpenOptions { read_only: true, ..open.clone() }, &resources()).is_err());
    let action = begun.select().unwrap();
    assert!(begun.apply(action).unwrap() > 0);
    drop(begun);
    assert_same_states("half deleted");
    assert_clean(&oldest);
    assert_eq!(names(&disk).last().unwrap(), &("mon".to_owned(), true));
    let refused =
        Disk::open(&oldest, &OpenOptions { read_only: true, ..open.clone() }, &resources()).unwrap_err();
    assert!(matches!(refused.kind(), ErrorKind::BeingDropped), "{refused}");
    let on_it = CreateOptions { backing: Some((oldest.clone(), Format::Qcow2)), ..CreateOptions::default() };
    assert!(create(&dir.path().join("new.qcow2"), &on_it).is_err());
    assert!(snapshot::clone(&disk, "mon", &dir.path().join("clone.qcow2"), &open).is_err());
    assert!(snapshot::revert(&disk, "mon", &snapshot::RevertOptions::default(), &resources()).is_err());
    // No rule counts it, and each has it deleted.
    let found = list(&disk, &open).unwrap();
    let pruning = snapshot::Pruning::of(&found, &"last=2".parse().unwrap(), &[], snapshot::now_ns());
    assert_eq!((pruning.keep, pruning.delete), (vec!["wed", "tue"], vec!["mon"]));
    // What is merged besides, above it and into it, changes nothing.
    assert!(!delete(&disk, "tue", Direction::Stream).unwrap().is_commit);
    assert_same(&content(&dir.path().join("web.wed.qcow2"), "qcow2"), &before[1], 0, "wed");
    assert_eq!(names(&disk).last().unwrap(), &("mon".to_owned(), true));
    assert!(delete(&disk, "mon", Direction::Commit).unwrap().is_commit);
    assert_same(&content(&dir.path().join("web.wed.qcow2"), "qcow2"), &before[1], 0, "wed");
    assert_same(&content(&disk, "qcow2"), &before[2], 0, "the disk");
    assert_clean(&disk);
    assert_eq!(names(&disk), [("wed".to_owned(), false)]);
}

/// What is written down into the layer below would be a state under its name, and it is none itself.
#[test]
fn a_layer_takes_the_place_of_no_snapshot_that_is_half_deleted() {
    let dir = common::scratch();
    let disk = history(dir.path());
    let before = ["web.wed.qcow2", "web.qcow2"].map(|name| content(&dir.path().join(name), "qcow2"));
    let ranges =
        vmstrata_disk::merge::ranges_of(&disk, &["tue".to_owned()], &OpenOptions::default()).unwrap();
    let mut begun = Merge::new(&disk, ranges[0], &options(Direction::Commit), &resources()).unwrap();
    assert!(begun.apply(begun.select().unwrap()).unwrap() > 0);
    drop(begun);
    let refused = delete(&disk, "mon", Direction::Commit).unwrap_err();
    assert!(refused.to_string().contains("half deleted"), "{refused}");
    assert!(!delete(&disk, "mon", Direction::Auto).unwrap().is_commit);
    assert_eq!(names(&disk), [("wed".to_owned(), false), ("tue".to_owned(), true)]);
    assert!(delete(&disk, "tue", Direction::Commit).unwrap().is_commit);
    for (name, before) in ["web.wed.qcow2", "web.qcow2"].iter().zip(&before) {
        assert_same(&content(&dir.path().join(name), "qcow2"), before, 0, name);
        assert_clean(&dir.path().join(name));
    }
}

/// The chain that is merged when the host dies or fails.
fn small_chain(seed: u64, clusters: Clusters) -> Chain {
    let mut random = random("merge down crash", seed);
    let mut chain = Chain::new();
    let extended = (Maker::Subclusters, 14);
    let layers = match clusters {
        Clusters::Even => [(Maker::Ours, 12); 5],
        Clusters::Subclusters => [extended; 5],
        Clusters::Mixed => {
            [(Maker::Ours, 12), extended, (Maker::Ours, 12), (Maker::Subclusters, 15), extended]
        }
    };
    for (number, (maker, bits)) in layers.into_iter().enumerate() {
        let bits = ClusterBits::new(bits).unwrap();
        chain.add(maker, 1 << 20, bits);
        let commands = some_commands(&mut random, 1 << 20, bits);
        // What is compressed, and shows in part, is not written over.
        let first = usize::from(clusters != Clusters::Even && number == *DROPPED.start());
        qemu_io(&chain.files[number], &commands[first..]);
    }
    chain.build();
    chain
}

const DROPPED: std::ops::RangeInclusive<usize> = 1..=2;

fn drop_middle(chain: &Chain, resources: &Arc<Resources>) -> Result<(), Error> {
    let merge = Merge::new(chain.top(), range(1, 2), &options(Direction::Commit), resources)?;
    merge.run().map(drop)
}

/// Every state that stays is right; a dropped one is right or refused.
fn assert_sound(states: &States, ask_stock: bool, what: &dyn std::fmt::Debug) {
    for (number, (file, model)) in states.0.iter().enumerate() {
        let is_dropped = DROPPED.contains(&number);
        if is_dropped && !file.exists() {
            continue;
        }
        let checked = CheckOptions { force_share: true, ..CheckOptions::default() };
        let report = check(file, &checked).expect("checks");
        assert_eq!((report.corruptions, report.check_errors), (0, 0), "{what:?}: {:?}", report.findings);
        if is_dropped {
            let read_only = OpenOptions { read_only: true, ..OpenOptions::default() };
            if let Ok(disk) = Disk::open(file, &read_only, &resources()) {
                assert_reads(&disk, model, &format!("{what:?}: dropped {}", file.display()));
            }
            continue;
        }
        assert_reads(&open_read_only(file), model, &format!("{what:?}: {}", file.display()));
        if ask_stock {
            assert_safe(file);
            assert!(content(file, "qcow2") == *model, "{what:?}: {} for stock tools", file.display());
        }
    }
}

fn assert_completed(chain: &Chain, states: &States, what: &dyn std::fmt::Debug) {
    if open_read_only(chain.top()).layers().len() == states.0.len() {
        drop_middle(chain, &resources()).unwrap_or_else(|error| panic!("{what:?}: {error}"));
    }
    assert_eq!(open_read_only(chain.top()).layers().len(), states.0.len() - 2, "{what:?}");
    assert_sound(states, true, what);
    assert!(list(chain.top(), &OpenOptions::default()).unwrap().iter().all(|state| !state.is_being_deleted));
}

/// Between which moments the lowest layer got its new name: after it was finalized, and before its mark was taken away.
fn renamed(log: &[vmstrata_store::Record], lowest: vmstrata_store::StoreId) -> (u64, u64) {
    let of_lowest: Vec<_> = log.iter().filter(|record| record.store == lowest).collect();
    let is_session = |operation: &Operation| matches!(operation, Operation::Write { at, bytes } if *at == HostOffset::new(88) && bytes.len() == 8);
    let finalized =
        of_lowest.iter().rposition(|record| is_session(&record.operation)).expect("it was finalized");
    assert_eq!(of_lowest[finalized + 1].operation, Operation::Flush);
    let after = of_lowest.get(finalized + 2).expect("the mark goes");
    (of_lowest[finalized + 1].completed.expect("flushed").0, after.issued.0)
}

#[test]
fn a_commit_survives_the_death_of_the_host_at_any_moment() {
    for clusters in [Clusters::Even, Clusters::Mixed] {
        survives_the_death_of_the_host(&small_chain(1, clusters));
    }
}

fn survives_the_death_of_the_host(chain: &Chain) {
    let states = States::of(chain);
    let before: Vec<Vec<u8>> = chain.files.iter().map(|file| std::fs::read(file).unwrap()).collect();
    let plan = FaultPlan::recording();
    let files = FaultyFiles::new(&plan);
    drop_middle(chain, &files.resources()).expect("no faults here");
    assert!(!chain.files[1].exists() && !chain.files[2].exists());
    for file in chain.files.iter().filter(|file| file.exists()) {
        assert_clean(file);
    }
    let log = plan.log();
    let (earliest, latest) = renamed(&log, files.id(&chain.files[1]));
    let end = log.iter().map(|record| record.completed.unwrap_or(record.issued)).max().expect("it wrote");
    for at in 0..=end.0 {
        for survivors in [Survivors::None, Survivors::All, Survivors::Seeded(at), Survivors::Seeded(!at)] {
            for is_renamed in [false, true] {
                if is_renamed && at < earliest || !is_renamed && at >= latest {
                    continue;
                }
                let crash = Crash { kind: CrashKind::Power, at: Moment(at), survivors };
                for (file, before) in chain.files.iter().zip(&before) {
                    std::fs::write(file, crash.image(before, &log, files.id(file))).expect("writes");
                }
                if is_renamed {
                    std::fs::rename(&chain.files[1], &chain.files[3]).expect("renames");
                }
                let what = (crash, is_renamed);
                assert_sound(&states, at % 16 == 0, &what);
                if at % 9 == 0 || is_renamed {
                    assert_completed(chain, &states, &what);
                }
            }
        }
    }
}

/// Each operation in turn fails, for good or with a part of it done.
#[test]
fn no_failure_of_the_host_changes_a_state_that_stays() {
    for kind in [OperationKind::Write, OperationKind::Flush, OperationKind::Read, OperationKind::Len] {
        for nth in 0.. {
            let clusters = Clusters::of(nth);
            let chain = small_chain(9, clusters);
            let states = States::of(&chain);
            let plan = FaultPlan::new();
            let files = FaultyFiles::new(&plan);
            let effect =
                Effect::Tear { bytes: 700 * (nth as usize % 2), errno: if nth % 2 == 0 { 5 } else { 28 } };
            plan.add(Fault { kind: Some(kind), store: None, when: When::Nth(nth), effect });
            let done = drop_middle(&chain, &files.resources());
            let failed = plan.count(Some(kind)) > nth;
            assert!(failed || done.is_ok(), "{kind:?} {nth} {clusters:?}: {done:?}");
            assert_sound(&states, nth % 8 == 0, &(kind, nth, clusters));
            if nth % 3 == 0 {
                assert_completed(&chain, &states, &(kind, nth, clusters));
            }
            if !failed || nth > 80 {
                break;
            }
        }
    }
}
