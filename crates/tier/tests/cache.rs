//! Layers of a repository through the host's cache: never other bytes than were shipped, whatever becomes of the repository, the
//! cache's files and the process.

use crate::common;
use std::fs;
use std::io;
use std::os::unix::fs::{FileExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, mpsc};
use std::time::Duration;

use crate::common::stock::path_str;
use crate::common::{for_seeds, random, scratch, wait_until};
use rand::Rng as _;
use rand::rngs::SmallRng;
use tempfile::TempDir;
use vmstrata_repo::{
    Capabilities, DeviceId, DirectoryRepository, NewObject, ObjectInfo, ObjectName, ObjectReader, Repository,
    Swept,
};
use vmstrata_store::{
    Effect, Fault, FaultPlan, FaultStore, Fetch, Fetched, OperationKind, Segment, Store, StoreId, When,
};
use vmstrata_tier::{CACHE_BYTES_MIN, Cache, CachedLayer, Object, OnMissing, Remote, is_object_name, ship};
use vmstrata_types::HostOffset;

pub(crate) const CHUNK: u64 = 256 << 10;
/// The last chunk is a short one.
pub(crate) const LEN: usize = 10 * CHUNK as usize + 1000;
const SOON: OnMissing = OnMissing::Error(Duration::from_millis(100));

/// How a repository answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mood {
    Answers,
    Fails,
    /// Says nothing until this changes.
    Hangs,
}

/// A repository on a network.
#[derive(Debug)]
pub(crate) struct Far {
    inner: DirectoryRepository,
    link: Arc<Link>,
}

#[derive(Debug)]
pub(crate) struct Link {
    mood: Mutex<Mood>,
    changed: Condvar,
    /// Operations that were asked for.
    asked: AtomicU64,
    /// Reads of layers.
    reads: AtomicU64,
}

impl Link {
    pub(crate) fn set(&self, mood: Mood) {
        *self.mood.lock().unwrap() = mood;
        self.changed.notify_all();
    }

    fn pass(&self) -> vmstrata_repo::Result<()> {
        self.asked.fetch_add(1, Ordering::SeqCst);
        let mut mood = self.mood.lock().unwrap();
        while *mood == Mood::Hangs {
            mood = self.changed.wait(mood).unwrap();
        }
        let failed = |source| vmstrata_repo::Error::of("nas", "reading")(source);
        if *mood == Mood::Fails { Err(failed(io::ErrorKind::NotConnected.into())) } else { Ok(()) }
    }

    pub(crate) fn reads(&self) -> u64 {
        self.reads.load(Ordering::SeqCst)
    }
}

struct FarReader {
    inner: Box<dyn ObjectReader>,
    link: Arc<Link>,
    is_layer: bool,
}

impl ObjectReader for FarReader {
    fn len(&self) -> u64 {
        self.inner.len()
    }
    fn read_at(&self, at: u64, into: &mut [u8]) -> vmstrata_repo::Result<()> {
        self.link.reads.fetch_add(u64::from(self.is_layer), Ordering::SeqCst);
        self.link.pass()?;
        self.inner.read_at(at, into)
    }
}

impl Repository for Far {
    fn describe(&self) -> String {
        "nas".to_owned()
    }
    fn capabilities(&self) -> Capabilities {
        self.inner.capabilities()
    }
    fn device(&self) -> DeviceId {
        self.inner.device()
    }
    fn list(&self, prefix: &str) -> vmstrata_repo::Result<Vec<ObjectInfo>> {
        self.inner.list(prefix)
    }
    fn create_new(&self, name: &ObjectName, copies: u8) -> vmstrata_repo::Result<Box<dyn NewObject>> {
        self.inner.create_new(name, copies)
    }
    fn replace(&self, name: &ObjectName, copies: u8) -> vmstrata_repo::Result<Box<dyn NewObject>> {
        self.inner.replace(name, copies)
    }
    fn open(&self, name: &ObjectName) -> vmstrata_repo::Result<Box<dyn ObjectReader>> {
        self.link.pass()?;
        let is_layer = name.as_str().ends_with(".qcow2");
        Ok(Box::new(FarReader { inner: self.inner.open(name)?, link: Arc::clone(&self.link), is_layer }))
    }
    fn delete(&self, name: &ObjectName) -> vmstrata_repo::Result<()> {
        self.inner.delete(name)
    }
    fn sweep(&self) -> vmstrata_repo::Result<Swept> {
        self.inner.sweep()
    }
}

/// A repository with a layer, and a directory for the cache of a host.
pub(crate) struct World {
    pub(crate) remote: TempDir,
    pub(crate) host: TempDir,
    pub(crate) repository: Arc<Far>,
    pub(crate) link: Arc<Link>,
    pub(crate) object: Object,
    pub(crate) bytes: Vec<u8>,
}

impl World {
    pub(crate) fn new() -> Self {
        let mut bytes = vec![0; LEN];
        random("layer", 0).fill(&mut bytes[..]);
        Self::holding(bytes)
    }

    /// With a layer of these bytes.
    pub(crate) fn holding(bytes: Vec<u8>) -> Self {
        let (remote, host) = (scratch(), scratch());
        let inner = DirectoryRepository::open(remote.path(), is_object_name).unwrap();
        let object = ship(&inner, 0, |shipment| shipment.put(&bytes)).unwrap();
        let (mood, changed, asked, reads) = (Mutex::new(Mood::Answers), Condvar::new(), 0.into(), 0.into());
        let link = Arc::new(Link { mood, changed, asked, reads });
        let repository = Arc::new(Far { inner, link: Arc::clone(&link) });
        Self { remote, host, repository, link, object, bytes }
    }

    fn dir(&self) -> PathBuf {
        self.host.path().join("cache")
    }

    pub(crate) fn cache(&self, budget: u64) -> Arc<Cache> {
        Cache::open(&self.dir(), budget).unwrap()
    }

    fn layer(&self, cache: &Arc<Cache>, on_missing: OnMissing) -> CachedLayer {
        Remote::new(cache, self.repository.clone(), on_missing).layer(&self.object).unwrap()
    }

    /// A cache of its own with room for all, and the layer in it.
    fn open(&self, on_missing: OnMissing) -> (Arc<Cache>, CachedLayer) {
        let cache = self.cache(u64::MAX);
        let layer = self.layer(&cache, on_missing);
        (cache, layer)
    }

    pub(crate) fn remote_file(&self) -> PathBuf {
        self.remote.path().join(self.object.id.layer_name().as_str())
    }

    pub(crate) fn cached_file(&self) -> PathBuf {
        self.dir().join(format!("{}.chunks", self.object.id))
    }

    fn check(&self, layer: &CachedLayer) {
        common::flat::assert_same(&read(layer, 0, LEN).unwrap(), &self.bytes, 0, "through the cache");
    }

    /// Reads something, and makes sure that it is right.
    fn check_some(&self, layer: &CachedLayer, random: &mut SmallRng) {
        let at = random.random_range(0..LEN);
        let len = random.random_range(1..=(LEN - at).min(8192));
        let found = read(layer, at as u64, len).unwrap();
        common::flat::assert_same(&found, &self.bytes[at..at + len], at as u64, "through the cache");
    }
}

pub(crate) fn read(layer: &CachedLayer, at: u64, len: usize) -> io::Result<Vec<u8>> {
    let mut bytes = vec![0xEE; len];
    layer.read_exact(&mut bytes, HostOffset::new(at))?;
    Ok(bytes)
}

/// Changes a byte of a file.
pub(crate) fn flip(path: &Path, at: u64) {
    let file = fs::File::options().read(true).write(true).open(path).unwrap();
    let mut byte = [0];
    file.read_exact_at(&mut byte, at).unwrap();
    file.write_all_at(&[byte[0] ^ 1], at).unwrap();
}

#[test]
fn a_layer_reads_as_it_was_shipped_and_is_fetched_once() {
    let world = World::new();
    let (cache, layer) = world.open(SOON);
    world.check(&layer);
    world.check(&layer);
    assert_eq!((cache.usage().bytes, cache.usage().fetched), (LEN as u64, 11));
    let mut past = [0xEE; 16];
    let count =
        layer.read_segments(&[Segment::from_mut(&mut past)], HostOffset::new(LEN as u64 - 4)).unwrap();
    assert_eq!((count, &past[..4]), (4, &world.bytes[LEN - 4..]));
    assert!(layer.write_all(&[0], HostOffset::ZERO).is_err() && layer.set_len(0).is_err());
}

#[test]
fn a_chunk_that_hundreds_wait_for_is_fetched_once() {
    let world = World::new();
    let (_cache, layer) = world.open(OnMissing::Wait);
    world.link.set(Mood::Hangs);
    let (tell, told) = mpsc::channel();
    for number in 0..300 {
        let tell = tell.clone();
        // Each waits for two chunks, of which they have one in common.
        let at = HostOffset::new((1 + number % 2) * CHUNK - 10);
        Fetch::fetch(&layer, at, 20, Box::new(move |fetched| tell.send(fetched).unwrap()));
    }
    assert!(told.try_recv().is_err(), "nothing can have come");
    world.link.set(Mood::Answers);
    (0..300).for_each(|_| assert_eq!(told.recv().unwrap().unwrap(), Fetched::Here));
    assert_eq!(world.link.reads(), 3);
    world.check(&layer);
}

#[test]
fn bytes_that_the_repository_changed_are_an_error_that_names_them() {
    let world = World::new();
    let (_cache, layer) = world.open(OnMissing::Wait);
    flip(&world.remote_file(), 3 * CHUNK + 7);
    let told = read(&layer, 4 * CHUNK - 1, 1).unwrap_err();
    assert_eq!(told.kind(), io::ErrorKind::InvalidData);
    let expected = format!("nas: {} at byte 0xc0000 is not what was shipped", world.object.id.layer_name());
    assert_eq!(told.to_string(), expected);
    assert_eq!(read(&layer, 0, 10).unwrap(), world.bytes[..10], "other chunks are read");
    flip(&world.remote_file(), 3 * CHUNK + 7);
    world.check(&layer);
}

#[test]
fn a_layer_of_another_length_or_with_other_digests_is_refused() {
    let world = World::new();
    let digests = world.remote.path().join(world.object.id.companion_name().as_str());
    flip(&digests, 100);
    let (_cache, layer) = world.open(OnMissing::Wait);
    let told = read(&layer, 0, 1).unwrap_err().to_string();
    assert_eq!(told, format!("nas: {} is not what was shipped", world.object.id.companion_name()));
    flip(&digests, 100);
    fs::File::options().write(true).open(world.remote_file()).unwrap().set_len(LEN as u64 - 1).unwrap();
    let told = read(&layer, 0, 1).unwrap_err().to_string();
    assert!(told.contains("another length"), "{told}");
}

#[test]
fn what_was_cached_is_found_again_and_proved() {
    let world = World::new();
    let (cache, layer) = world.open(SOON);
    world.check(&layer);
    drop((cache, layer));
    world.link.set(Mood::Fails);
    let (cache, layer) = world.open(SOON);
    assert_eq!(cache.usage().bytes, LEN as u64, "known before it is read");
    world.check(&layer);
    drop((cache, layer));
    world.link.set(Mood::Answers);
    for at in [0, 5 * CHUNK + 1, LEN as u64 - 1] {
        flip(&world.cached_file(), at);
    }
    let (cache, layer) = world.open(SOON);
    world.check(&layer);
    assert_eq!(cache.usage().fetched, 3, "what was changed meanwhile is fetched again");
}

#[test]
fn a_file_or_digests_that_are_not_the_layers_are_replaced() {
    let world = World::new();
    for len in [1 << 20, LEN as u64 + 1] {
        let (cache, layer) = world.open(SOON);
        world.check(&layer);
        drop((cache, layer));
        let file = fs::File::create(world.cached_file()).unwrap();
        file.write_all_at(&[1; 1 << 20], 0).unwrap();
        file.set_len(len).unwrap();
        flip(&world.dir().join(world.object.id.companion_name().as_str()), 0);
        fs::write(world.dir().join("notes.chunks"), "not ours").unwrap();
        let (cache, layer) = world.open(SOON);
        world.check(&layer);
        assert_eq!(cache.usage().bytes, LEN as u64);
    }
    assert!(world.dir().join("notes.chunks").exists());
}

#[test]
fn one_process_uses_a_cache_at_a_time() {
    let world = World::new();
    let _cache = world.cache(1 << 30);
    let told = Cache::open(&world.dir(), 1 << 30).unwrap_err().to_string();
    assert!(told.ends_with("cache: another process uses it"), "{told}");
}

#[test]
fn another_layer_of_the_same_id_is_refused() {
    let world = World::new();
    let (cache, _layer) = world.open(SOON);
    let remote = Remote::new(&cache, world.repository.clone(), SOON);
    for other in
        [Object { bytes: 1 << 20, ..world.object }, Object { blake3: blake3::hash(b"other"), ..world.object }]
    {
        let told = remote.layer(&other).unwrap_err().to_string();
        assert!(told.ends_with("another repository has a layer of this id"), "{told}");
    }
    let huge = Object { bytes: u64::MAX, ..world.object };
    assert!(remote.layer(&huge).unwrap_err().to_string().ends_with("a layer of more than 16 TiB"));
}

#[test]
fn without_the_repository_reads_wait_or_fail_in_time() {
    for mood in [Mood::Fails, Mood::Hangs] {
        let world = World::new();
        let (_cache, layer) = world.open(SOON);
        read(&layer, 0, 1).unwrap();
        world.link.set(mood);
        assert_eq!(read(&layer, 0, 100).unwrap(), world.bytes[..100], "what is here is read");
        let told = read(&layer, 2 * CHUNK, 1).unwrap_err();
        assert_eq!(
            (told.kind(), told.to_string().as_str()),
            (io::ErrorKind::TimedOut, "nas: no answer for 0.1 s")
        );
        world.link.set(Mood::Answers);
        world.check(&layer);
        drop(layer);

        let world = World::new();
        let (_cache, layer) = world.open(OnMissing::Wait);
        world.link.set(mood);
        std::thread::scope(|scope| {
            let waits = scope.spawn(|| world.check(&layer));
            wait_until("it to be asked for", || world.link.asked.load(Ordering::SeqCst) > 0);
            assert!(!waits.is_finished());
            world.link.set(Mood::Answers);
        });
    }
}

#[test]
fn a_cache_that_is_closed_lets_nobody_wait() {
    let world = World::new();
    let (cache, layer) = world.open(OnMissing::Wait);
    read(&layer, 0, 1).unwrap();
    world.link.set(Mood::Fails);
    std::thread::scope(|scope| {
        let waits = scope.spawn(|| read(&layer, CHUNK, 1));
        cache.close();
        assert_eq!(waits.join().unwrap().unwrap_err().kind(), io::ErrorKind::NotConnected);
    });
    read(&layer, CHUNK, 1).unwrap_err();
    assert_eq!(read(&layer, 0, 1).unwrap(), world.bytes[..1]);
}

#[test]
fn reads_while_chunks_are_given_up_get_no_other_bytes() {
    for_seeds(3, |seed| {
        let world = World::new();
        let cache = world.cache(3 * CHUNK);
        let layer = world.layer(&cache, OnMissing::Wait);
        std::thread::scope(|scope| {
            for thread in 0..4 {
                let (world, layer) = (&world, &layer);
                let mut random = random("evict", 10 * seed + thread);
                scope.spawn(move || (0..300).for_each(|_| world.check_some(layer, &mut random)));
            }
        });
        world.check(&layer);
        // What was read when it should have gone goes when the next chunk comes, which no read of a layer that is all here asks for.
        let other = World::new();
        read(&other.layer(&cache, OnMissing::Wait), 0, 1).unwrap();
        let usage = cache.usage();
        assert!(usage.bytes <= 3 * CHUNK && usage.fetched > 11, "{usage:?}");
        let stored = fs::metadata(world.cached_file()).unwrap().blocks() * 512;
        assert!(stored <= 3 * CHUNK, "{stored} bytes stored");
    });
}

#[test]
fn a_chunk_that_is_held_keeps_its_bytes_when_it_is_given_up() {
    let world = World::new();
    let cache = world.cache(2 * CHUNK);
    let layer = world.layer(&cache, OnMissing::Wait);
    read(&layer, 0, 1).unwrap();
    let hold = layer.hold(HostOffset::ZERO, CHUNK).expect("it is here");
    for chunk in 1..10 {
        read(&layer, chunk * CHUNK, 1).unwrap();
    }
    assert!(layer.hold(HostOffset::ZERO, 1).is_none(), "it was given up");
    let file = fs::File::open(world.cached_file()).unwrap();
    let mut bytes = vec![0; CHUNK as usize];
    file.read_exact_at(&mut bytes, 0).unwrap();
    assert!(bytes == world.bytes[..CHUNK as usize]);
    let fetched = cache.usage().fetched;
    assert_eq!(read(&layer, 0, 10).unwrap(), world.bytes[..10]);
    assert_eq!(cache.usage().fetched, fetched, "its bytes were still there");
    drop(hold);
    world.check(&layer);
    let stored = fs::metadata(world.cached_file()).unwrap().blocks() * 512;
    assert!(stored <= 2 * CHUNK, "{stored} bytes stored");
}

/// Fails every operation on the cache's files in turn.
#[test]
fn a_host_that_cannot_keep_chunks_delays_reads_and_changes_none() {
    for kind in [OperationKind::Read, OperationKind::Write, OperationKind::PunchHole] {
        for (when, effect) in [
            (When::Nth(0), Effect::Fail(libc::EIO)),
            (When::Nth(4), Effect::Fail(libc::EIO)),
            (When::Nth(2), Effect::Tear { bytes: 1000, errno: libc::ENOSPC }),
        ] {
            let world = World::new();
            let plan = FaultPlan::new();
            let wrap = {
                let plan = Arc::clone(&plan);
                move |file| Arc::new(FaultStore::new(file, &plan, StoreId(0))) as Arc<dyn Store>
            };
            let cache = Cache::open_with(&world.dir(), 3 * CHUNK, wrap).unwrap();
            let layer = world.layer(&cache, OnMissing::Wait);
            plan.add(Fault { kind: Some(kind), store: None, when, effect });
            world.check(&layer);
            world.check(&layer);
            assert!(cache.usage().bytes <= 4 * CHUNK, "{:?}", cache.usage());
        }
    }
}

#[test]
fn a_cache_whose_files_cannot_be_used_is_read_past() {
    for (kind, errno) in [
        (OperationKind::Read, libc::EIO),
        (OperationKind::Write, libc::EIO),
        (OperationKind::Write, libc::ENOSPC),
    ] {
        let world = World::new();
        let plan = FaultPlan::new();
        let wrap = {
            let plan = Arc::clone(&plan);
            move |file| Arc::new(FaultStore::new(file, &plan, StoreId(0))) as Arc<dyn Store>
        };
        let cache = Cache::open_with(&world.dir(), u64::MAX, wrap).unwrap();
        let layer = world.layer(&cache, OnMissing::Wait);
        plan.add(Fault { kind: Some(kind), store: None, when: When::From(0), effect: Effect::Fail(errno) });
        world.check(&layer);
        // Such reads wait for the repository, too.
        world.link.set(Mood::Fails);
        std::thread::scope(|scope| {
            let asked = world.link.asked.load(Ordering::SeqCst);
            let waits = scope.spawn(|| world.check(&layer));
            wait_until("it to be asked for", || world.link.asked.load(Ordering::SeqCst) > asked + 1);
            assert!(!waits.is_finished());
            world.link.set(Mood::Answers);
        });
        plan.clear();
        world.check(&layer);
        assert!(layer.hold(HostOffset::ZERO, LEN as u64).is_some(), "all is kept again");
    }
}

#[test]
fn a_repository_that_fails_or_hangs_is_known_to_be_silent() {
    for mood in [Mood::Fails, Mood::Hangs] {
        let world = World::new();
        let cache = world.cache(u64::MAX);
        let remote = Remote::new(&cache, world.repository.clone(), OnMissing::Wait);
        let layer = remote.layer(&world.object).unwrap();
        world.check(&layer);
        assert_eq!(remote.silent_since(), None);
        drop(layer);
        let world = World::new();
        let remote = Remote::new(&cache, world.repository.clone(), OnMissing::Wait);
        let layer = remote.layer(&world.object).unwrap();
        world.link.set(mood);
        std::thread::scope(|scope| {
            let waits = scope.spawn(|| world.check(&layer));
            wait_until("it to be noticed", || remote.silent_since().is_some());
            world.link.set(Mood::Answers);
            waits.join().unwrap();
        });
        assert_eq!(remote.silent_since(), None);
    }
}

#[test]
fn a_budget_leaves_room_for_what_guests_write() {
    let world = World::new();
    let asked = |bytes| Cache::open_within(&world.dir(), bytes).unwrap().usage().budget;
    assert_eq!(asked(Some(300 << 20)), 300 << 20);
    assert_eq!(asked(Some(1)), CACHE_BYTES_MIN);
    let (default, most) = (asked(None), asked(Some(u64::MAX)));
    assert!(default < most && most < u64::MAX / 2, "{default} {most}");
}

const ORDERS: &str = "VMSTRATA_TEST_CHILD";

/// The child: reads through a cache that is too small until it is killed.
#[test]
#[ignore = "the process that the other test starts and kills"]
fn host_that_reads_until_it_is_killed() {
    let Ok(orders) = std::env::var(ORDERS) else { return };
    let (remote, rest) = orders.split_once('\n').unwrap();
    let (dir, object) = rest.split_once('\n').unwrap();
    let object: Object = serde_json::from_str(object).unwrap();
    let repository = Arc::new(DirectoryRepository::open(Path::new(remote), is_object_name).unwrap());
    let cache = Cache::open(Path::new(dir), 6 * CHUNK).unwrap();
    let layer = Remote::new(&cache, repository, OnMissing::Wait).layer(&object).unwrap();
    let mut random = random("child", u64::from(std::process::id()));
    loop {
        read(&layer, random.random_range(0..LEN as u64), 1).unwrap();
        if cache.usage().fetched > 20 {
            fs::write(Path::new(dir).join("ready"), "").unwrap();
        }
    }
}

#[test]
fn a_killed_process_leaves_chunks_that_are_proved_or_fetched() {
    for_seeds(3, |seed| {
        let world = World::new();
        let object = serde_json::to_string(&world.object).unwrap();
        let orders = [path_str(world.remote.path()), path_str(&world.dir()), &object].join("\n");
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "cache::host_that_reads_until_it_is_killed", "--ignored", "--nocapture"])
            .env(ORDERS, orders)
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        wait_until("some chunks", || world.dir().join("ready").exists());
        // Anywhere in what it does.
        std::thread::sleep(Duration::from_micros(random("moment", seed).random_range(0..20_000)));
        child.kill().unwrap();
        child.wait().unwrap();
        let (cache, layer) = world.open(SOON);
        world.check(&layer);
        let fetched = cache.usage().fetched;
        assert!((1..11).contains(&fetched), "{fetched} chunks were fetched");
    });
}

#[test]
fn another_process_uses_what_is_there_and_proves_it_and_keeps_nothing() {
    let world = World::new();
    Cache::beside(&world.dir()).unwrap_err();
    let (own, layer) = world.open(SOON);
    read(&layer, 0, 3 * CHUNK as usize).unwrap();
    let reads = world.link.reads();
    flip(&world.cached_file(), CHUNK + 5);
    let beside = Cache::beside(&world.dir()).unwrap();
    let other = world.layer(&beside, OnMissing::Wait);
    world.check(&other);
    // The chunk that was changed, and those that are not there.
    assert_eq!(world.link.reads() - reads, 1 + 8);
    assert_eq!((own.usage().bytes, beside.usage().bytes), (3 * CHUNK, 0));
    world.link.set(Mood::Fails);
    assert_eq!(read(&other, 2 * CHUNK, 100).unwrap(), world.bytes[2 * CHUNK as usize..][..100]);
    read(&other, 5 * CHUNK, 100).unwrap_err();
    drop((own, layer));
    fs::remove_file(world.cached_file()).unwrap();
    world.link.set(Mood::Answers);
    world.check(&world.layer(&Cache::beside(&world.dir()).unwrap(), OnMissing::Wait));
}
