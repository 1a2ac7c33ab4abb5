//! Pages that were taken over from before a merge, against a map that was built afresh.

use proptest::prelude::*;
use vmstrata_store::Segment;
use vmstrata_types::{ClusterBits, GuestOffset, GuestRange, LayerIndex};

use super::*;
use crate::merge::{Merge, MergeOptions, MergeRange};
use crate::snapshots::SnapshotInfo;
use crate::{CreateOptions, Disk, OpenOptions, ResourceOptions, Resources, create};

/// Layers of one kind: pages are taken over where no layer that goes has units of its own.
#[derive(Clone, Copy, Debug)]
struct Shape {
    bits: u32,
    /// Else version 2, whose overlays have none either.
    subclusters: bool,
    /// Bytes of the disk: two pages and a part of one.
    size: u64,
}

const SHAPES: [Shape; 2] = [
    Shape { bits: 9, subclusters: false, size: 600 << 10 },
    Shape { bits: 14, subclusters: true, size: 32 * (600 << 10) },
];

/// Sectors of [`SHAPES`]' smallest disk.
const SECTORS: u64 = 1200;

fn range(at: u64, len: u64) -> GuestRange {
    GuestRange::new(GuestOffset::new(at), len)
}

/// A change: where of [`SECTORS`], how many sectors, and whether of zeros.
type Change = (u64, u64, bool);

fn history(dir: &tempfile::TempDir, shape: Shape, layers: &[Vec<Change>]) -> (Arc<Disk>, Arc<Resources>) {
    let path = dir.path().join("disk.qcow2");
    let options = CreateOptions {
        size: Some(shape.size),
        cluster_bits: ClusterBits::new(shape.bits).unwrap(),
        subclusters: shape.subclusters,
        version: if shape.subclusters { 3 } else { 2 },
        ..CreateOptions::default()
    };
    create(&path, &options).unwrap();
    let resources = Resources::new(ResourceOptions::default());
    let disk = Disk::open(&path, &OpenOptions::default(), &resources).unwrap();
    for (number, changes) in layers.iter().enumerate() {
        for &(at, len, zeros) in changes {
            let at = at * (shape.size / SECTORS);
            let range = range(at, (len * 512).min(shape.size - at));
            if zeros {
                disk.write_zeroes(range, false).unwrap();
            } else {
                let mut data = vec![number as u8 + 1; range.len as usize];
                disk.write(range.start, &[Segment::from_mut(&mut data)]).unwrap();
            }
        }
        disk.snapshot(&SnapshotInfo { name: format!("s{number}"), ..SnapshotInfo::default() }).unwrap();
    }
    (disk, resources)
}

fn map_of(disk: &Disk) -> Arc<FrozenMap> {
    Arc::clone(disk.layers_now().frozen.as_ref().expect("snapshots were taken"))
}

fn afresh(map: &FrozenMap, resources: &Arc<Resources>) -> FrozenMap {
    let (cache, files) = (Arc::clone(resources.cache()), Arc::clone(resources.files()));
    FrozenMap::new(resources.new_owner().unwrap(), map.layers().cloned().collect(), cache, files).unwrap()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 8, ..ProptestConfig::default() })]
    #[test]
    fn pages_taken_over_are_those_of_a_map_built_afresh(
        shape in prop::sample::select(SHAPES.to_vec()),
        layers in prop::collection::vec(prop::collection::vec((0..SECTORS, 1u64..60, any::<bool>()), 0..6), 4..24),
        merges in prop::collection::vec((0usize..24, 0usize..24), 1..4),
    ) {
        let dir = tempfile::tempdir().unwrap();
        let (disk, resources) = history(&dir, shape, &layers);
        for (one, other) in merges {
            let frozen = disk.layer_count() - 1;
            if frozen < 3 {
                break;
            }
            // The target is frozen: the newest frozen layer at most.
            let (one, other) = (one % (frozen - 1), other % (frozen - 1));
            let [first, last] = [one.min(other), one.max(other)].map(|layer| LayerIndex::new(layer as u16));
            disk.warm_map().unwrap();
            let options = MergeOptions::default();
            Merge::of_disk(&disk, MergeRange { first, last }, &options).unwrap().run().unwrap();
            let map = map_of(&disk);
            let expected = afresh(&map, &resources);
            let mut words = [0; PAGE_WORDS];
            for level in map.units.levels() {
                for number in 0..map.units.pages(level, shape.size) {
                    let page = MapPage { level, number };
                    let is_there = map.cache.copy(map.pages.key(page), &mut words);
                    prop_assert!(is_there || level == Level::Second, "{page:?} is in memory");
                    if is_there {
                        prop_assert_eq!(words, expected.page(page).unwrap(), "{:?}", page);
                    }
                }
            }
        }
        disk.close().unwrap();
    }
}
