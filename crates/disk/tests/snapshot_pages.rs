//! What a snapshot does to the pages of the map in memory: those that it does not change stay where they are.

use std::sync::Arc;

use crate::common::flat::{assert_same, pattern, read, write};
use crate::common::stock::{content, path_str, qemu_img};
use crate::common::{random, scratch, small_resources};
use rand::Rng as _;
use vmstrata_disk::snapshot::SnapshotInfo;
use vmstrata_disk::{Disk, OpenOptions, ResourceOptions, Resources, snapshot_together};

const CLUSTER: u64 = 64 << 10;
/// What a page of the map covers.
const PAGE: u64 = 512 * CLUSTER;
const PAGES: u64 = 64;
const PAGE_BYTES: u64 = 4096;

fn take(disk: &Disk, name: &str) {
    snapshot_together(&[disk], &SnapshotInfo { name: name.into(), ..SnapshotInfo::default() }).unwrap();
    disk.finalize().unwrap();
}

/// A disk of [`PAGES`] pages with a layer below the active one, all of whose pages are in memory.
fn disk_of_pages(dir: &std::path::Path, resources: &Arc<Resources>) -> Arc<Disk> {
    let path = dir.join("a.qcow2");
    qemu_img(&["create", "-q", "-f", "qcow2", path_str(&path), &(PAGES * PAGE).to_string()]);
    let disk = Disk::open(&path, &OpenOptions::default(), resources).unwrap();
    take(&disk, "first");
    (0..PAGES).for_each(|page| assert!(read(&disk, page * PAGE, 4096).unwrap() == [0; 4096]));
    disk
}

#[test]
fn a_snapshot_makes_the_pages_that_it_changes() {
    let (dir, resources) = (scratch(), Resources::new(ResourceOptions::default()));
    let disk = disk_of_pages(dir.path(), &resources);
    let fills = || resources.usage().metadata_cache_fills;
    for number in 0..8 {
        write(&disk, number * 5 * PAGE + CLUSTER, &[1; 4096]).unwrap();
        let before = fills();
        take(&disk, &format!("then{number}"));
        let made = fills() - before;
        // One page changed, in whose table are the entries of 16.
        assert!(made <= 1 + 16, "{made} of {PAGES} pages were made for one that changed");
        let before = fills();
        for page in 0..PAGES {
            read(&disk, page * PAGE + CLUSTER, 4096).unwrap();
        }
        // The new active layer's own, and one of the second level for the cluster that is split now.
        assert_eq!(fills() - before, PAGES + 1, "pages that were in memory were made again");
    }
}

#[test]
fn pages_of_before_do_not_pile_up() {
    let (dir, mut random) = (scratch(), random("pages", 1));
    let resources = Resources::new(ResourceOptions {
        // Room for all pages of thirty snapshots.
        metadata_cache_bytes: 32 * PAGES * PAGE_BYTES,
        ..Default::default()
    });
    let disk = disk_of_pages(dir.path(), &resources);
    let mut used = Vec::new();
    for number in 0..100 {
        for _ in 0..4 {
            write(&disk, random.random_range(0..PAGES) * PAGE + CLUSTER, &[1; 4096]).unwrap();
        }
        (0..PAGES).for_each(|page| drop(read(&disk, page * PAGE, 4096).unwrap()));
        take(&disk, &format!("then{number}"));
        used.push(resources.usage().metadata_cache_bytes / PAGE_BYTES);
    }
    let (first, last) = (used[0], used[99]);
    assert!(last <= 2 * first, "{first} pages had memory after the first snapshot, {last} after a hundred");
}

/// Two disks on one history go different ways; each has its own bytes, at any state.
#[test]
fn maps_that_share_pages_differ_where_their_layers_do() {
    let (dir, mut random, resources) = (scratch(), random("pages", 2), small_resources(None));
    let size = 4 * PAGE;
    let base = dir.path().join("base.qcow2");
    qemu_img(&["create", "-q", "-f", "qcow2", path_str(&base), &size.to_string()]);
    let place =
        |random: &mut rand::rngs::SmallRng| random.random_range(0..size / CLUSTER / 256) * 256 * CLUSTER;
    let golden = Disk::open(&base, &OpenOptions::default(), &resources).unwrap();
    let mut models = vec![vec![0; size as usize]];
    for number in 0..3 {
        let (at, bytes) = (place(&mut random), pattern(&mut random, 4096));
        write(&golden, at, &bytes).unwrap();
        models[0][at as usize..][..4096].copy_from_slice(&bytes);
        take(&golden, &format!("golden{number}"));
    }
    golden.close().unwrap();
    drop(golden);
    let clones: Vec<Arc<Disk>> = ["one", "other"]
        .iter()
        .map(|name| {
            let path = dir.path().join(name);
            qemu_img(&["create", "-q", "-f", "qcow2", "-b", "base.qcow2", "-F", "qcow2", path_str(&path)]);
            Disk::open(&path, &OpenOptions::default(), &resources).unwrap()
        })
        .collect();
    models.push(models[0].clone());
    let mut states = Vec::new();
    for round in 0..12 {
        for (disk, model) in clones.iter().zip(&mut models) {
            for _ in 0..3 {
                let (at, bytes) = (place(&mut random), pattern(&mut random, 4096));
                write(disk, at, &bytes).unwrap();
                model[at as usize..][..4096].copy_from_slice(&bytes);
            }
            let info = SnapshotInfo { name: format!("round{round}"), ..SnapshotInfo::default() };
            let taken = snapshot_together(&[disk], &info).unwrap();
            // Before it is finalized, and after.
            for when in ["taken", "finalized"] {
                for at in (0..size).step_by(256 * CLUSTER as usize) {
                    let found = read(disk, at, 4096).unwrap();
                    assert_same(&found, &model[at as usize..][..4096], at, when);
                }
                disk.finalize().unwrap();
            }
            if round % 4 == 3 {
                states.push((taken[0].layer.clone(), model.clone()));
            }
        }
    }
    clones.iter().for_each(|disk| disk.close().unwrap());
    for (layer, model) in states {
        assert_same(&content(&layer, "qcow2"), &model, 0, "a snapshot as qemu-img reads it");
    }
}
