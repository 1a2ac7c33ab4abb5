//! Layers of a base on a host: filled, proved again, pinned, given up, and never other bytes than were shipped.

use std::io;
use std::path::PathBuf;
use std::sync::Arc;

use crate::cache::{CHUNK, LEN, Mood, World, flip, read};
use crate::common::flat::assert_same;
use vmstrata_store::Fetch as _;
use vmstrata_tier::{
    CACHE_BYTES_MIN, Cache, CachedFiles, CachedLayer, Error, LayerDirectory, Object, OnMissing, Remote,
    Replica, Walk, ship,
};
use vmstrata_types::HostOffset;

/// A world whose layer a chain of the host names.
pub(crate) struct Host {
    pub(crate) world: World,
    cache: Arc<Cache>,
    files: CachedFiles,
    remote: Arc<Remote>,
}

impl Host {
    pub(crate) fn new(world: World, budget: u64) -> Self {
        let cache = world.cache(budget);
        let remote = Remote::new(&cache, world.repository.clone(), OnMissing::Wait);
        let host = Self { files: CachedFiles::default(), cache, remote, world };
        host.add(&host.world.object);
        host
    }

    fn add(&self, object: &Object) {
        let dir = LayerDirectory { path: self.world.remote.path(), indices: self.world.host.path() };
        self.files.add(dir, &self.remote, &[*object]).unwrap();
    }

    fn path(&self, object: &Object) -> PathBuf {
        self.world.remote.path().join(object.id.layer_name().as_str())
    }

    pub(crate) fn replica(&self) -> Replica {
        Replica::of(&self.files, [self.path(&self.world.object).as_path()]).unwrap()
    }

    fn layer(&self) -> CachedLayer {
        self.remote.layer(&self.world.object).unwrap()
    }

    fn kept(&self) -> u64 {
        self.replica().layers()[0].kept_bytes
    }

    fn is_pinned(&self) -> bool {
        self.replica().layers()[0].is_pinned
    }

    pub(crate) fn check(&self) {
        assert_same(
            &read(&self.layer(), 0, self.world.bytes.len()).unwrap(),
            &self.world.bytes,
            0,
            "through the cache",
        );
    }

    /// The same after the process has ended.
    fn again(self, budget: u64) -> Self {
        let Self { world, cache, files, remote } = self;
        drop((files, remote));
        // Its threads let go of it once they have nothing to do.
        crate::common::wait_until("nobody uses the cache", || Arc::strong_count(&cache) == 1);
        drop(cache);
        Self::new(world, budget)
    }
}

fn to_the_end(mut walk: Walk) -> u64 {
    let (mut read, mut steps) = (0, 0);
    while let Some(passed) = walk.step().unwrap() {
        (read, steps) = (read + passed.read_bytes, steps + u64::from(!passed.is_part));
    }
    assert_eq!(steps, walk.steps());
    read
}

#[test]
fn a_fill_brings_what_is_not_here_and_nothing_twice() {
    let host = Host::new(World::new(), u64::MAX);
    // The first chunk is asked for when the layer is shown.
    for chunk in [0, 5] {
        read(&host.layer(), chunk * CHUNK, 1).unwrap();
    }
    let before = host.world.link.reads();
    assert_eq!(to_the_end(host.replica().fill().unwrap()), LEN as u64 - 2 * CHUNK);
    assert_eq!((host.kept(), host.world.link.reads() - before), (LEN as u64, 9));
    assert_eq!(to_the_end(host.replica().fill().unwrap()), 0);
    host.world.link.set(Mood::Hangs);
    host.check();
    host.world.link.set(Mood::Answers);
}

#[test]
fn a_fill_waits_for_a_silent_repository_and_goes_on() {
    let host = Host::new(World::new(), u64::MAX);
    let mut walk = host.replica().fill().unwrap();
    walk.step().unwrap().expect("there are more");
    host.world.link.set(Mood::Fails);
    let error = walk.step().unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::TimedOut, "{error}");
    host.world.link.set(Mood::Answers);
    assert!(walk.step().unwrap().unwrap().read_bytes <= 4 * CHUNK);
    while walk.step().unwrap().is_some() {}
    host.check();
    // What was changed there is an error at once.
    let host = Host::new(World::new(), u64::MAX);
    flip(&host.world.remote_file(), 6 * CHUNK);
    let mut walk = host.replica().fill().unwrap();
    walk.step().unwrap();
    assert_eq!(walk.step().unwrap_err().kind(), io::ErrorKind::InvalidData);
}

#[test]
fn a_scrub_finds_each_changed_chunk_and_fetches_no_others() {
    let host = Host::new(World::new(), u64::MAX);
    // All but the last, which is not here.
    read(&host.layer(), 0, LEN - 1000).unwrap();
    let here = LEN as u64 - 1000;
    for changed in 0..10 {
        flip(&host.world.cached_file(), changed * CHUNK + 17 * changed);
        let before = host.world.link.reads();
        assert_eq!(to_the_end(host.replica().scrub()), here);
        assert_eq!((host.world.link.reads() - before, host.kept()), (1, here), "chunk {changed}");
    }
    host.check();
    // In a later process all is proved by it.
    let host = host.again(u64::MAX);
    flip(&host.world.cached_file(), 3 * CHUNK);
    let before = host.world.link.reads();
    assert_eq!(to_the_end(host.replica().scrub()), LEN as u64);
    assert_eq!(host.world.link.reads() - before, 1);
    host.check();
}

#[test]
fn a_pinned_layer_stays_whatever_else_is_read() {
    let budget = CACHE_BYTES_MIN + LEN as u64;
    let host = Host::new(World::new(), budget);
    host.replica().pin(true).unwrap();
    to_the_end(host.replica().fill().unwrap());
    let large = vec![7; 2 * CACHE_BYTES_MIN as usize];
    let other = ship(&*host.world.repository, 0, |shipment| shipment.put(&large)).unwrap();
    let read_other = |host: &Host| {
        let layer = host.remote.layer(&other).unwrap();
        for at in (0..other.bytes).step_by(CHUNK as usize) {
            assert_eq!(read(&layer, at, 1).unwrap(), [7]);
        }
        assert!(host.cache.usage().bytes <= budget);
    };
    read_other(&host);
    assert_eq!(host.kept(), LEN as u64);
    // So it does in a later process, unless there is no room for it.
    let host = host.again(budget);
    assert!(host.is_pinned());
    read_other(&host);
    assert_eq!(host.kept(), LEN as u64);
    let host = host.again(budget - 1);
    assert!(!host.is_pinned());
    assert!(matches!(host.replica().pin(true), Err(Error::NoRoom { .. })));
    assert!(matches!(host.replica().fill(), Err(Error::NoRoom { .. })));
    let host = host.again(budget);
    assert!(host.is_pinned());
    host.replica().pin(false).unwrap();
    read_other(&host);
    assert!(host.kept() < LEN as u64, "it goes as others do");
    host.check();
}

#[test]
fn what_is_given_up_stays_until_no_read_needs_it() {
    let host = Host::new(World::new(), u64::MAX);
    host.replica().pin(true).unwrap();
    assert!(matches!(host.replica().give_up(), Err(Error::Pinned { .. })));
    host.replica().pin(false).unwrap();
    host.check();
    let layer = host.layer();
    let hold = layer.hold(HostOffset::ZERO, LEN as u64).unwrap();
    assert_eq!(host.replica().give_up().unwrap(), LEN as u64);
    assert!(layer.hold(HostOffset::ZERO, 1).is_none());
    let in_file = std::fs::read(host.world.cached_file()).unwrap();
    assert_same(&in_file, &host.world.bytes, 0, "what a read holds");
    assert!(matches!(host.replica().give_up(), Err(Error::Cache { .. })));
    drop(hold);
    assert_eq!((host.replica().give_up().unwrap(), host.kept()), (0, 0));
    host.check();
}
