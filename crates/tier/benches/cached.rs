//! What a random read of 4 KiB costs on a layer that lies on this host, and on the same one through the cache, all of it here.
//!
//! By turns, in one process: medians of five paired rounds.

#[path = "../../disk/tests/common/mod.rs"]
mod common;

use std::sync::Arc;
use std::time::{Duration, Instant};

use common::flat::write;
use common::io::segments_of;
use common::scratch;
use rand::rngs::SmallRng;
use rand::{Rng as _, SeedableRng as _};
use vmstrata_disk::{
    CreateOptions, Disk, Format, IoQueue, LocalFiles, Op, OpenOptions, Opener, Request, ResourceOptions,
    Resources, create,
};
use vmstrata_repo::DirectoryRepository;
use vmstrata_store::{AlignedBuf, SegmentVec};
use vmstrata_tier::{Cache, CachedFiles, LayerDirectory, OnMissing, Remote, is_object_name, ship_state};
use vmstrata_types::{GuestOffset, GuestRange};

const SIZE: u64 = 256 << 20;
const ROUNDS: usize = 5;
const ROUND: Duration = Duration::from_millis(500);
const LEN: u64 = 4096;

/// Random reads of a disk, some at a time.
struct Reader {
    queue: IoQueue,
    /// The memory that `segments` names.
    _buffers: Vec<AlignedBuf>,
    segments: Vec<SegmentVec<'static>>,
    rng: SmallRng,
}

impl Reader {
    fn new(disk: &Arc<Disk>, depth: usize) -> Self {
        let mut buffers: Vec<_> = (0..depth).map(|_| AlignedBuf::zeroed(LEN as usize)).collect();
        let segments = buffers.iter_mut().map(segments_of).collect();
        let queue = IoQueue::new(Arc::clone(disk), depth as u32).expect("a queue");
        Self { queue, _buffers: buffers, segments, rng: SmallRng::seed_from_u64(1) }
    }

    /// Nanoseconds a read.
    fn round(&mut self) -> f64 {
        let (mut ended, mut count, start) = (Vec::new(), 0u64, Instant::now());
        let mut free: Vec<usize> = (0..self.segments.len()).collect();
        while start.elapsed() < ROUND {
            for slot in free.drain(..) {
                let at = self.rng.random_range(0..SIZE / LEN) * LEN;
                let range = GuestRange::new(GuestOffset::new(at), LEN);
                let segments = self.segments[slot].clone();
                self.queue.push(Request { op: Op::Read, range, segments, token: slot as u64 });
            }
            self.queue.submit();
            self.queue.wait(&[], None);
            self.queue.reap(&mut ended);
            count += ended.len() as u64;
            for done in ended.drain(..) {
                done.result.expect("a read");
                free.push(done.token as usize);
            }
        }
        let each = start.elapsed().as_nanos() as f64 / count as f64;
        while self.queue.in_flight() > 0 {
            self.queue.wait(&[], None);
            self.queue.reap(&mut ended);
        }
        each
    }
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

fn main() {
    let (remote, host) = (scratch(), scratch());
    let repository =
        Arc::new(DirectoryRepository::open(remote.path(), is_object_name).expect("a repository"));
    let base = host.path().join("base.qcow2");
    create(&base, &CreateOptions { size: Some(SIZE), ..CreateOptions::default() }).expect("an image");
    let resources = Resources::new(ResourceOptions::default());
    let disk = Disk::open(&base, &OpenOptions::default(), &resources).expect("a disk");
    for at in (0..SIZE).step_by(1 << 20) {
        write(&disk, at, &vec![(at >> 20) as u8 + 1; 1 << 20]).expect("a write");
    }
    disk.close().expect("closes");
    drop(disk);
    let object = ship_state(&*repository, &base, None, &OpenOptions::default(), &resources).expect("ships");
    let layer = remote.path().join(object.id.layer_name().as_str());
    let open = |name: &str, files: Arc<dyn Opener>| {
        let path = host.path().join(name);
        let backing = Some((layer.clone(), Format::Qcow2));
        create(&path, &CreateOptions { backing, ..CreateOptions::default() }).expect("an overlay");
        let options = OpenOptions { allow_backing: vec![remote.path().to_owned()], ..OpenOptions::default() };
        Disk::open(&path, &options, &Resources::with_opener(ResourceOptions::default(), files))
            .expect("a disk")
    };
    let cache = Cache::open(&host.path().join("cache"), u64::MAX).expect("a cache");
    let files = CachedFiles::default();
    let far = Remote::new(&cache, repository, OnMissing::Wait);
    files
        .add(LayerDirectory { path: remote.path(), indices: host.path() }, &far, &[object])
        .expect("a layer");
    let [local, cached] = [open("local", Arc::new(LocalFiles)), open("cached", Arc::new(files))];
    for depth in [1, 32] {
        let [mut local, mut cached] = [&local, &cached].map(|disk| Reader::new(disk, depth));
        // Until all is here.
        (0..4).for_each(|_| _ = (local.round(), cached.round()));
        let pairs: Vec<(f64, f64)> = (0..ROUNDS).map(|_| (local.round(), cached.round())).collect();
        let of = |take: fn(&(f64, f64)) -> f64| median(pairs.iter().map(take).collect());
        let [first, second, ratio] = [of(|pair| pair.0), of(|pair| pair.1), of(|pair| pair.1 / pair.0)];
        println!("QD{depth}: local {first:.0} ns, cached {second:.0} ns, cached / local {ratio:.3}");
    }
    println!("{} of {} chunks fetched", cache.usage().fetched, object.bytes.div_ceil(256 << 10));
}
