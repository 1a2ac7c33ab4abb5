//! Maps of random chains, made in every way, against layers painted over each other.

use std::path::{Path, PathBuf};

use proptest::prelude::*;
use vmstrata_qcow2::{L2Entry, SubclusterState, Subclusters};
use vmstrata_store::Segment;

use super::*;
use crate::index::{IndexOptions, IndexVerdict, VerifiedFile, build, verify};
use crate::snapshots::SnapshotInfo;
use crate::{
    CreateOptions, Disk, Format, OpenOptions, ResourceOptions, Resources, create, snapshot_together,
};

const SECTOR: u64 = 512;
/// More than one page of the second level, of subclusters of up to 4 KiB.
const SECTORS_MAX: u64 = 6000;

/// A change: where and how long, in sectors, and whether of zeros.
type Change = (u64, u64, bool);

/// How a layer is made.
#[derive(Clone, Debug)]
struct Shape {
    bits: u32,
    subclusters: bool,
    sectors: u64,
    changes: Vec<Change>,
}

fn some_changes() -> impl Strategy<Value = Vec<Change>> {
    let len = prop_oneof![3 => 1u64..20, 1 => 20u64..600];
    prop::collection::vec((0..SECTORS_MAX, len, prop::bool::weighted(0.3)), 0..6)
}

fn some_shape() -> impl Strategy<Value = Shape> {
    let bits = prop::sample::select(vec![9, 14, 16, 17]);
    (bits, any::<bool>(), SECTORS_MAX / 2..SECTORS_MAX, some_changes()).prop_map(
        |(bits, subclusters, sectors, changes)| Shape {
            bits,
            subclusters: subclusters && bits >= 14,
            sectors,
            changes,
        },
    )
}

fn change(disk: &Disk, changes: &[Change]) {
    for &(at, len, zeros) in changes {
        let at = at * SECTOR % disk.size();
        let range = GuestRange::new(GuestOffset::new(at), (len * SECTOR).min(disk.size() - at));
        if zeros {
            disk.write_zeroes(range, len % 2 == 0).unwrap();
        } else {
            let mut data = vec![7; range.len as usize];
            disk.write(range.start, &[Segment::from_mut(&mut data)]).unwrap();
        }
    }
}

/// A chain of these layers, on a raw base if asked for; returns the newest.
fn make(dir: &Path, has_raw_base: bool, shapes: &[Shape]) -> PathBuf {
    let mut below = None;
    if has_raw_base {
        std::fs::write(dir.join("base"), vec![1; (SECTORS_MAX * SECTOR) as usize]).unwrap();
        below = Some((PathBuf::from("base"), Format::Raw));
    }
    for (number, shape) in shapes.iter().enumerate() {
        let name = PathBuf::from(format!("{number}.qcow2"));
        let options = CreateOptions {
            size: Some(shape.sectors * SECTOR),
            cluster_bits: ClusterBits::new(shape.bits).unwrap(),
            subclusters: shape.subclusters,
            backing: below.replace((name.clone(), Format::Qcow2)),
            ..CreateOptions::default()
        };
        create(&dir.join(&name), &options).unwrap();
        let disk = open(&dir.join(&name), &new_resources());
        change(&disk, &shape.changes);
        disk.close().unwrap();
    }
    dir.join(below.unwrap().0)
}

fn scratch() -> tempfile::TempDir {
    let memory = Path::new("/dev/shm");
    if memory.is_dir() { tempfile::tempdir_in(memory) } else { tempfile::tempdir() }.unwrap()
}

fn new_resources() -> Arc<Resources> {
    Resources::new(ResourceOptions::default())
}

fn open(path: &Path, resources: &Arc<Resources>) -> Arc<Disk> {
    Disk::open(path, &OpenOptions::default(), resources).unwrap()
}

fn frozen(disk: &Disk) -> Arc<FrozenMap> {
    Arc::clone(disk.layers_now().frozen.as_ref().expect("a layer below"))
}

/// The same layers in a map that knows nothing yet.
fn afresh(map: &FrozenMap, resources: &Arc<Resources>) -> FrozenMap {
    let (cache, files) = (Arc::clone(resources.cache()), Arc::clone(resources.files()));
    FrozenMap::new(resources.new_owner().unwrap(), map.layers().cloned().collect(), cache, files).unwrap()
}

/// What each sector comes from: layer over layer from the base up, an entry at a time.
fn painted(map: &FrozenMap) -> Vec<Source> {
    let mut sectors = vec![Source::Hole; (SECTORS_MAX * 2) as usize];
    for (index, layer) in map.layers().enumerate() {
        let number = LayerIndex::new(index as u16);
        sectors[(layer.size / SECTOR) as usize..].fill(Source::Hole);
        let own = &mut sectors[..(layer.size / SECTOR) as usize];
        let Some(tables) = layer.tables else {
            let at = |sector: usize| HostOffset::new(sector as u64 * SECTOR);
            (0..own.len()).for_each(|sector| own[sector] = Source::Data(number, at(sector)));
            continue;
        };
        let store = map.files.store(layer).unwrap();
        let in_cluster = tables.geometry.cluster_bits.size() / SECTOR;
        for (cluster, own) in (0..).zip(own.chunks_mut(in_cluster as usize)) {
            let raw = layer.l2_entry(&**store, GuestOffset::new(cluster * in_cluster * SECTOR)).unwrap();
            for (sector, own) in (0..).zip(own) {
                let data = |host: HostOffset| Source::Data(number, host + sector * SECTOR);
                let said = match tables.entries.l2(raw).unwrap() {
                    L2Entry::Unallocated => None,
                    L2Entry::Zero { .. } => Some(Source::Zero(number)),
                    L2Entry::Data { host, .. } => Some(data(host)),
                    L2Entry::Compressed { .. } => Some(Source::Compressed(number)),
                    L2Entry::Subclusters { host, states, .. } => {
                        match states.state((sector * u64::from(Subclusters::COUNT) / in_cluster) as u32) {
                            SubclusterState::Unallocated => None,
                            SubclusterState::Zero => Some(Source::Zero(number)),
                            SubclusterState::Allocated => host.map(data),
                        }
                    }
                };
                *own = said.unwrap_or(*own);
            }
        }
    }
    sectors.truncate((map.size() / SECTOR) as usize);
    sectors
}

/// The words of a page, without those that a shorter layer hides: they mean nothing.
fn seen(map: &FrozenMap, page: MapPage, words: &Words) -> Vec<u64> {
    let start = |slot: usize| (page.units().start + slot as u64) << map.units.of(page.level).get();
    let is_seen = |slot, word| start(slot) < map.layers[MapEntry::from_word(word).layer().index()].end;
    words.iter().enumerate().map(|(slot, &word)| if is_seen(slot, word) { word } else { 0 }).collect()
}

/// The same as a map answers.
fn mapped(map: &FrozenMap) -> Vec<Source> {
    let at = |sector| GuestOffset::new(sector * SECTOR);
    (0..map.size() / SECTOR).map(|sector| map.locate(at(sector), SECTOR).unwrap().source).collect()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 12, ..ProptestConfig::default() })]
    #[test]
    fn a_map_says_what_the_newest_layer_says_however_it_is_made(
        has_raw_base in any::<bool>(),
        shapes in prop_oneof![
            3 => prop::collection::vec(some_shape(), 2..6),
            1 => prop::collection::vec(some_shape(), 17..20),
        ],
        rounds in prop::collection::vec((some_changes(), any::<bool>()), 1..4),
    ) {
        let dir = scratch();
        let top = make(dir.path(), has_raw_base, &shapes);
        let resources = new_resources();
        let disk = open(&top, &resources);
        let expected = painted(&frozen(&disk));
        prop_assert_eq!(mapped(&frozen(&disk)), expected.clone(), "as opened");
        prop_assert_eq!(mapped(&afresh(&frozen(&disk), &resources)), expected, "page by page");
        for (number, (changes, is_read)) in rounds.iter().enumerate() {
            change(&disk, changes);
            let info = SnapshotInfo { name: format!("s{number}"), ..SnapshotInfo::default() };
            snapshot_together(&[&*disk], &info).unwrap();
            // Whose tables are still on their way to the file.
            let fresh = frozen(&disk);
            let early = is_read.then(|| mapped(&fresh));
            drop(fresh);
            disk.finalize().unwrap();
            let map = frozen(&disk);
            let expected = painted(&map);
            if let Some(early) = early {
                prop_assert_eq!(early, expected.clone(), "round {}, before it is finalized", number);
            }
            prop_assert_eq!(mapped(&map), expected.clone(), "round {}, finalized", number);
            prop_assert_eq!(mapped(&afresh(&map, &resources)), expected, "round {}, page by page", number);
        }
        disk.close().unwrap();
        drop(disk);
        build(&top, &IndexOptions::default()).unwrap();
        let disk = open(&top, &new_resources());
        let map = frozen(&disk);
        prop_assert!(map.index().is_some(), "the chain has an index");
        prop_assert_eq!(mapped(&map), painted(&map), "from the index");
        let verified = verify(&top, &IndexOptions::default()).unwrap();
        let is_good = |file: &VerifiedFile| matches!(file.verdict, IndexVerdict::Good { .. } | IndexVerdict::NotNeeded);
        prop_assert!(verified.iter().all(is_good), "{:?}", verified);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 12, ..ProptestConfig::default() })]
    /// The layers below the target are gone, as a merge leaves a chain; to a map it is all one what the target says.
    #[test]
    fn pages_taken_over_say_what_the_shorter_chain_says(
        has_raw_base in any::<bool>(),
        shapes in prop::collection::vec(some_shape(), 3..7),
        places in (0usize..7, 0usize..7),
    ) {
        let dir = scratch();
        let resources = new_resources();
        let disk = open(&make(dir.path(), has_raw_base, &shapes), &resources);
        let old = frozen(&disk);
        mapped(&old);
        let layers: Vec<Arc<Layer>> = old.layers().cloned().collect();
        let [one, other] = [places.0, places.1].map(|place| place % layers.len());
        let (first, target) = (one.min(other), one.max(other));
        let map_of = |layers: Vec<Arc<Layer>>| {
            let (cache, files) = (Arc::clone(resources.cache()), Arc::clone(resources.files()));
            FrozenMap::new(resources.new_owner().unwrap(), layers, cache, files).unwrap()
        };
        let below = (first > 0).then(|| map_of(layers[..first].to_vec()));
        let new = map_of([&layers[..first], &layers[target..]].concat());
        new.take_over(&old, below.as_ref()).unwrap();
        let are_there = |level| (0..new.units.pages(level, new.size)).map(move |number| MapPage { level, number });
        let mut words = [0; PAGE_WORDS];
        let is_told = |below: &FrozenMap| {
            new.units.levels().all(|level| below.units.answer_for(new.units.of(level)))
        };
        if new.units == old.units && below.as_ref().is_none_or(is_told) {
            for page in new.units.levels().flat_map(are_there) {
                let is_taken = new.cache.copy(new.pages.key(page), &mut words);
                prop_assert!(is_taken || page.level == Level::Second, "{:?} is in memory", page);
                let expected = new.scan_page(0..new.layers.len(), page, &mut Scratch::default()).unwrap();
                prop_assert!(!is_taken || seen(&new, page, &words) == seen(&new, page, &expected), "{:?}", page);
            }
        }
        prop_assert_eq!(mapped(&new), painted(&new));
        disk.close().unwrap();
    }
}

#[test]
fn pages_of_the_second_level_are_made_where_layers_split_clusters() {
    let dir = scratch();
    let size = 50 << 30;
    let create_on = |name: &str, below: Option<&str>| {
        let options = CreateOptions {
            size: Some(size),
            cluster_bits: ClusterBits::new(17).unwrap(),
            subclusters: true,
            backing: below.map(|below| (PathBuf::from(below), Format::Qcow2)),
            ..CreateOptions::default()
        };
        create(&dir.path().join(name), &options).unwrap();
        open(&dir.path().join(name), &new_resources())
    };
    let disk = create_on("base", None);
    // Whole clusters, then ten in part.
    disk.write_zeroes(GuestRange::new(GuestOffset::ZERO, 1 << 30), false).unwrap();
    disk.close().unwrap();
    drop(disk);
    let disk = create_on("top", Some("base"));
    for number in 0..10 {
        let mut data = [1; 4096];
        disk.write(GuestOffset::new(number * (5 << 30) + 8192), &[Segment::from_mut(&mut data)]).unwrap();
    }
    disk.close().unwrap();
    drop(disk);
    let resources = new_resources();
    let options = OpenOptions { read_only: true, ..OpenOptions::default() };
    let disk = Disk::open(&dir.path().join("top"), &options, &resources).unwrap();
    disk.warm_map().unwrap();
    let pages =
        Units::new(ClusterBits::new(17).unwrap(), ClusterBits::new(12).unwrap()).pages(Level::First, size);
    assert_eq!(resources.usage().metadata_cache_fills, pages + 10);
}
