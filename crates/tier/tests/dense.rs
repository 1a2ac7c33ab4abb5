//! Dense layers against stock tools: found clean, read as the states that were shipped, and written by them.

use std::fs;
use std::os::unix::fs::{FileExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::common::stock::{assert_clean, path_str, qemu_img, qemu_io};
use crate::common::{for_seeds, scratch};
use rand::rngs::SmallRng;
use rand::{Rng as _, SeedableRng as _};
use tempfile::TempDir;
use vmstrata_disk::{OpenOptions, ResourceOptions, Resources};
use vmstrata_repo::{DirectoryRepository, Repository as _};
use vmstrata_tier::{
    Merge, MergeOrders, Object, ObjectId, adopt, is_object_name, ship, ship_merged, ship_state,
};

/// Local layers, base first, and the repository to which they are shipped.
struct Fixture {
    local: TempDir,
    remote: TempDir,
    repository: DirectoryRepository,
    resources: Arc<Resources>,
    layers: Vec<PathBuf>,
    shipped: Vec<Object>,
}

impl Fixture {
    fn new() -> Self {
        let (local, remote) = (scratch(), scratch());
        let repository = DirectoryRepository::open(remote.path(), is_object_name).unwrap();
        let resources = Resources::new(ResourceOptions::default());
        Self { local, remote, repository, resources, layers: Vec::new(), shipped: Vec::new() }
    }

    /// Adds a layer made by stock tools, ships it, and compares what stock tools read.
    fn add(&mut self, options: &str, size: &str, commands: &[String]) -> Object {
        let path = self.local.path().join(format!("{}.qcow2", self.layers.len()));
        let mut create = vec!["create", "-q", "-f", "qcow2", "-o", options];
        if let Some(below) = self.layers.last() {
            create.extend(["-b", path_str(below), "-F", "qcow2"]);
        }
        qemu_img(&[&create[..], &[path_str(&path), size]].concat());
        qemu_io(&path, commands);
        self.layers.push(path.clone());
        let below = self.shipped.last().map(|object| object.id);
        let object = self.ship(&path, below);
        assert_clean(&self.path(object));
        qemu_img(&[
            "compare",
            "-q",
            "-f",
            "qcow2",
            "-F",
            "qcow2",
            path_str(&path),
            path_str(&self.path(object)),
        ]);
        self.shipped.push(object);
        object
    }

    fn ship(&self, state: &Path, below: Option<ObjectId>) -> Object {
        ship_state(&self.repository, state, below, &OpenOptions::default(), &self.resources).unwrap()
    }

    /// Merges what is left, reading the state where it is local; compares what stock tools then read.
    fn merge(&self, merge: &mut Merge, chain: &[Object]) {
        let left = merge.left(chain);
        let layers: Vec<PathBuf> = left.iter().map(|object| self.path(*object)).collect();
        let layers: Vec<&Path> = layers.iter().map(PathBuf::as_path).collect();
        let local = &self.layers[chain.len() - 1];
        let options = OpenOptions::default();
        let result = ship_merged(
            &self.repository,
            local,
            &layers,
            merge.below(),
            &options,
            &self.resources,
            &MergeOrders::default(),
        )
        .unwrap();
        merge.merged(left.len(), result);
        assert_clean(&self.path(result));
        let [local, result] = [path_str(local), path_str(&self.path(result))].map(str::to_owned);
        qemu_img(&["compare", "-q", "-f", "qcow2", "-F", "qcow2", &local, &result]);
    }

    fn path(&self, object: Object) -> PathBuf {
        self.remote.path().join(object.id.layer_name().as_str())
    }

    /// Bytes that the repository stores of an object.
    fn stored(&self, object: Object) -> u64 {
        fs::metadata(self.path(object)).unwrap().blocks() * 512
    }
}

#[test]
fn layers_of_every_shape_read_as_they_were_and_are_clean() {
    const SIZE: u64 = (40 << 20) + 1536;
    for_seeds(4, |seed| {
        let mut random = SmallRng::seed_from_u64(seed);
        let mut fixture = Fixture::new();
        for layer in 0..4 {
            let options = [
                "cluster_size=512",
                "cluster_size=4k",
                "cluster_size=64k",
                "cluster_size=2M",
                "cluster_size=16k,extended_l2=on",
                "cluster_size=128k,extended_l2=on",
                "cluster_size=2M,extended_l2=on",
            ];
            // First, as stock tools compress only what is not there yet.
            let compressed = (0..random.random_range(0..4)).map(|number| {
                let at = (number * 5 + random.random_range(0..5)) << 21;
                format!("write -q -c -P {} {at} 2M", random.random_range(1..=255))
            });
            let mut commands: Vec<String> = compressed.collect();
            for _ in 0..random.random_range(0..40) {
                let at = random.random_range(0..SIZE / 512) * 512;
                let len = (random.random_range(1..=200) * 512).min(SIZE - at);
                commands.push(match random.random_range(0..5) {
                    0 => format!("write -q -z {at} {len}"),
                    1 => format!("write -q -z -u {at} {len}"),
                    2 => format!("discard -q {at} {len}"),
                    _ => format!("write -q -P {} {at} {len}", random.random_range(1..=255)),
                });
            }
            let object =
                fixture.add(options[random.random_range(0..options.len())], &SIZE.to_string(), &commands);
            if layer == 3 {
                // All but the last, then the last on top of that.
                let mut merge = Merge::new(&fixture.shipped, random.random_range(0..3));
                fixture.merge(&mut merge, &fixture.shipped[..3]);
                fixture.merge(&mut merge, &fixture.shipped);
                let merged = merge.finish(&fixture.shipped);
                assert!(merged.len() <= 4 && fixture.stored(merged[0]) > 0);
                let flat = fixture.ship(&fixture.layers[3], None);
                let [top, flat] = [object, flat].map(|object| fixture.path(object));
                assert_clean(&flat);
                qemu_img(&["compare", "-q", "-f", "qcow2", "-F", "qcow2", path_str(&top), path_str(&flat)]);
            }
        }
    });
}

#[test]
fn a_layer_of_a_grown_disk_grows() {
    let mut fixture = Fixture::new();
    fixture.add("cluster_size=64k", "10M", &["write -q -P 1 0 10M".to_owned()]);
    fixture.add("cluster_size=64k", "30M", &["write -q -P 2 29M 4k".to_owned()]);
    fixture.add("cluster_size=64k", "30M", &[]);
}

/// What a smaller layer between hides must not show through the merged one.
#[test]
fn a_merge_of_layers_of_several_sizes_reads_as_they_did() {
    let mut fixture = Fixture::new();
    fixture.add("cluster_size=64k", "30M", &["write -q -P 1 0 30M".to_owned()]);
    fixture.add("cluster_size=64k", "30M", &["write -q -P 2 1M 20M".to_owned()]);
    fixture.add("cluster_size=64k", "10243k", &["write -q -P 3 0 4k".to_owned()]);
    fixture.add("cluster_size=64k", "40M", &["write -q -P 4 35M 4k".to_owned()]);
    for from in 0..4 {
        fixture.merge(&mut Merge::new(&fixture.shipped, from), &fixture.shipped);
    }
}

#[test]
fn a_layer_of_few_random_writes_stores_little_more_than_them() {
    let mut fixture = Fixture::new();
    fixture.add("cluster_size=64k", "50G", &[]);
    let mut random = SmallRng::seed_from_u64(7);
    let writes: Vec<String> = (0..100)
        .map(|_| format!("write -q -P 1 {} 4k", random.random_range(0u64..(50 << 30) / 4096) * 4096))
        .collect();
    let layer = fixture.add("cluster_size=128k,extended_l2=on", "50G", &writes);
    let (stored, written) = (fixture.stored(layer), 100 * 4096);
    assert!(stored * 10 <= written * 22, "{stored} bytes stored for {written}");
}

#[test]
fn a_raw_base_is_shipped_whole() {
    let fixture = Fixture::new();
    let raw = fixture.local.path().join("disk.raw");
    let bytes = [vec![0; 1 << 20], vec![7; 300_032], vec![0; 1 << 20]].concat();
    fs::write(&raw, &bytes).unwrap();
    let object = fixture.ship(&raw, None);
    assert_clean(&fixture.path(object));
    qemu_img(&["compare", "-q", "-f", "raw", "-F", "qcow2", path_str(&raw), path_str(&fixture.path(object))]);
}

#[test]
fn an_image_that_is_there_already_is_named_as_if_it_was_shipped() {
    let fixture = Fixture::new();
    let shipped = ship(&fixture.repository, 0, |shipment| shipment.put(&[7; 600_000])).unwrap();
    let id = ObjectId::draw();
    fs::hard_link(fixture.path(shipped), fixture.remote.path().join(id.layer_name().as_str())).unwrap();
    assert_eq!(adopt(&fixture.repository, id).unwrap(), Object { id, ..shipped });
    let digests = |id: ObjectId| fs::read(fixture.remote.path().join(id.companion_name().as_str())).unwrap();
    assert_eq!(digests(id), digests(shipped.id));
}

#[test]
fn a_damaged_layer_is_an_error_that_names_it_and_ships_nothing() {
    let mut fixture = Fixture::new();
    let base = fixture.add("cluster_size=64k", "1M", &["write -q -P 1 0 64k".to_owned()]);
    fixture.add("cluster_size=64k", "1M", &["write -q -P 1 0 64k".to_owned()]);
    let (top, before) = (&fixture.layers[1], fixture.repository.list("").unwrap().len());
    // The L2 table is the image's fifth cluster; its first entry gets a reserved bit.
    let mut bytes = fs::read(top).unwrap();
    bytes[4 << 16 | 7] |= 2;
    fs::write(top, bytes).unwrap();
    let told =
        ship_state(&fixture.repository, top, Some(base.id), &OpenOptions::default(), &fixture.resources);
    let told = told.unwrap_err().to_string();
    assert!(told.contains("1.qcow2"), "{told}");
    assert_eq!(fixture.repository.list("").unwrap().len(), before);
}

/// Its single L2 table would make data of the whole disk.
#[test]
fn a_layer_whose_tables_are_one_is_refused() {
    let mut fixture = Fixture::new();
    let base = fixture.add("cluster_size=64k", "64G", &[]);
    fixture.add("cluster_size=64k", "64G", &["write -q -z 0 512M".to_owned()]);
    let top = &fixture.layers[1];
    let mut bytes = vec![0; 8];
    let file = fs::File::options().read(true).write(true).open(top).unwrap();
    let l1 = 3 << 16;
    file.read_exact_at(&mut bytes, l1).unwrap();
    file.write_all_at(&bytes.repeat((64 << 30) >> 29), l1).unwrap();
    let refused =
        ship_state(&fixture.repository, top, Some(base.id), &OpenOptions::default(), &fixture.resources);
    let told = refused.unwrap_err().to_string();
    assert!(
        told.ends_with("1.qcow2: its L1 table names more L2 tables than the file has clusters"),
        "{told}"
    );
}
