//! Pages that were taken over from before a merge, against a map that was built afresh.

use proptest::prelude::*;
use vmstrata_store::Segment;
use vmstrata_types::{ClusterBits, GuestOffset, GuestRange, LayerIndex};

use super::*;
use crate::merge::{Merge, MergeOptions, MergeRange};
use crate::snapshots::SnapshotInfo;
use crate::{CreateOptions, Disk, OpenOptions, ResourceOptions, Resources, create};

/// Two pages and a part of one, in clusters of 512 bytes.
const SIZE: u64 = 600 << 10;

fn range(at: u64, len: u64) -> GuestRange {
    GuestRange::new(GuestOffset::new(at), len)
}

/// A change: where, how long, and whether of zeros.
type Change = (u64, u64, bool);

fn history(dir: &tempfile::TempDir, layers: &[Vec<Change>]) -> (Arc<Disk>, Arc<Resources>) {
    let path = dir.path().join("disk.qcow2");
    let (size, cluster_bits) = (Some(SIZE), ClusterBits::new(9).unwrap());
    create(&path, &CreateOptions { size, cluster_bits, ..CreateOptions::default() }).unwrap();
    let resources = Resources::new(ResourceOptions::default());
    let disk = Disk::open(&path, &OpenOptions::default(), &resources).unwrap();
    for (number, changes) in layers.iter().enumerate() {
        for &(at, len, zeros) in changes {
            let range = range(at * 512, (len * 512).min(SIZE - at * 512));
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
        layers in prop::collection::vec(prop::collection::vec((0u64..1200, 1u64..60, any::<bool>()), 0..6), 4..24),
        merges in prop::collection::vec((0usize..24, 0usize..24), 1..4),
    ) {
        let dir = tempfile::tempdir().unwrap();
        let (disk, resources) = history(&dir, &layers);
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
            for number in 0..map.units.pages(Level::First, SIZE) {
                let page = MapPage { level: Level::First, number };
                prop_assert!(map.cache.copy(map.pages.key(page), &mut words), "{page:?} is in memory");
                prop_assert_eq!(words, expected.page(page).unwrap(), "{:?}", page);
            }
        }
        disk.close().unwrap();
    }
}
