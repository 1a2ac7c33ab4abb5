//! What a lookup costs: one answer for a chain of 1 layer and of 1,000, with clusters that are whole or split.

use std::hint::black_box;
use std::path::Path;
use std::sync::Arc;

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};
use vmstrata_disk::{Disk, OpenOptions, ResourceOptions, Resources};
use vmstrata_types::{ClusterBits, GuestOffset};

const DISK_BYTES: u64 = 1 << 30;
const CLUSTER: u64 = 65536;
/// Clusters with subclusters of 4 KiB.
const SPLIT: ClusterBits = ClusterBits::from_size(128 << 10).expect("a power of two");

/// A chain whose layers each own some clusters, or subclusters, at random.
fn chain(dir: &Path, layers: u64, subclusters: bool) -> std::path::PathBuf {
    use vmstrata_disk::{CreateOptions, Format, create};
    let mut rng = SmallRng::seed_from_u64(layers);
    let resources = Resources::new(ResourceOptions::default());
    let mut below: Option<std::path::PathBuf> = None;
    for number in 0..layers {
        let path = dir.join(format!("{number}.qcow2"));
        let backing = below.take().map(|path| (path, Format::Qcow2));
        let cluster_bits = if subclusters { SPLIT } else { ClusterBits::DEFAULT };
        let size = Some(DISK_BYTES);
        let options = CreateOptions { size, cluster_bits, subclusters, backing, ..CreateOptions::default() };
        create(&path, &options).unwrap();
        let disk = Disk::open(&path, &OpenOptions::default(), &resources).unwrap();
        for _ in 0..(DISK_BYTES / CLUSTER / layers).max(1) {
            let at = rng.random_range(0..DISK_BYTES / CLUSTER) * CLUSTER;
            let mut bytes = [7; 512];
            disk.write(GuestOffset::new(at), &[vmstrata_store::Segment::from_mut(&mut bytes)]).unwrap();
        }
        disk.close().unwrap();
        below = Some(path);
    }
    below.unwrap()
}

fn open(path: &Path) -> Arc<Disk> {
    let options = OpenOptions { read_only: false, ..OpenOptions::default() };
    Disk::open(path, &options, &Resources::new(ResourceOptions::default())).unwrap()
}

fn lookups(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("lookup");
    group.throughput(Throughput::Elements(1));
    for (layers, subclusters) in [(1, false), (1000, false), (1000, true)] {
        let dir = tempfile::tempdir().unwrap();
        let disk = open(&chain(dir.path(), layers, subclusters));
        disk.warm_map().unwrap();
        let mut rng = SmallRng::seed_from_u64(1);
        let offsets: Vec<GuestOffset> =
            (0..4096).map(|_| GuestOffset::new(rng.random_range(0..DISK_BYTES / 4096) * 4096)).collect();
        let mut next = 0;
        let split = if subclusters { ", split" } else { "" };
        group.bench_function(format!("random 4 KiB, {layers} layers{split}"), |bencher| {
            bencher.iter(|| {
                next = (next + 1) % offsets.len();
                assert!(disk.map_hit(black_box(offsets[next]), 4096));
            });
        });
        disk.close().unwrap();
    }
    group.finish();
}

criterion_group!(benches, lookups);
criterion_main!(benches);
