//! Layers of a base come from an image of the host where that has the same content, and are what was published whatever the image has.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::cache::{CHUNK, Mood, World as OneLayer, flip};
use crate::common::flat::{assert_reads, assert_same, pattern, some_range, write};
use crate::common::stock::{content, path_str, qemu_img, qemu_io};
use crate::common::{for_seeds, random, scratch};
use crate::replica::Host;
use rand::Rng as _;
use rand::rngs::SmallRng;
use tempfile::TempDir;
use vmstrata_disk::snapshot::SnapshotInfo;
use vmstrata_disk::{CreateOptions, Disk, Format, OpenOptions, ResourceOptions, Resources, create};
use vmstrata_repo::{DirectoryRepository, Repository};
use vmstrata_tier::{
    Cache, CachedFiles, LayerDirectory, Object, ObjectId, OnMissing, Passed, Remote, Replica, Walk, adopt,
    is_object_name, ship_state,
};

const SIZE: u64 = 12 << 20;
const CLUSTER: u64 = 64 << 10;

/// A repository with two versions of a base: an image as stock tools make it, and a layer on that.
struct World {
    remote: TempDir,
    local: TempDir,
    repository: Arc<dyn Repository>,
    versions: [Version; 2],
}

struct Version {
    layer: Object,
    /// Of its layer.
    file: Vec<u8>,
    /// Of the disk.
    content: Vec<u8>,
}

/// A host that keeps layers.
struct Keeper {
    dir: TempDir,
    cache: Arc<Cache>,
    files: Arc<CachedFiles>,
}

impl Keeper {
    fn new() -> Self {
        let dir = scratch();
        let cache = Cache::open(&dir.path().join("cache"), u64::MAX).unwrap();
        Self { dir, cache, files: Arc::default() }
    }
}

/// What a fill did.
struct Filled {
    fetched_chunks: u64,
    image_bytes: u64,
}

fn options(allowed: &TempDir) -> OpenOptions {
    OpenOptions { allow_backing: vec![allowed.path().to_owned()], ..OpenOptions::default() }
}

impl World {
    fn new(random: &mut SmallRng) -> Self {
        let (remote, local) = (scratch(), scratch());
        let repository: Arc<dyn Repository> =
            Arc::new(DirectoryRepository::open(remote.path(), is_object_name).unwrap());
        let raw = local.path().join("v1.raw");
        fs::write(&raw, pattern(random, SIZE as usize)).unwrap();
        let id = ObjectId::draw();
        let base = remote.path().join(id.layer_name().as_str());
        qemu_img(&["convert", "-f", "raw", "-O", "qcow2", path_str(&raw), path_str(&base)]);
        let first = adopt(&*repository, id).unwrap();
        let resources = Resources::new(ResourceOptions::default());
        let path = local.path().join("patched");
        create(&path, &CreateOptions { backing: Some((base, Format::Qcow2)), ..CreateOptions::default() })
            .unwrap();
        let disk = Disk::open(&path, &options(&remote), &resources).unwrap();
        for _ in 0..30 {
            let (at, len) = some_range(random, SIZE, CLUSTER);
            write(&disk, at, &pattern(random, len as usize)).unwrap();
        }
        let info = SnapshotInfo { name: "v2".to_owned(), ..SnapshotInfo::default() };
        let layer = disk.snapshot(&info).unwrap().layer;
        let second = ship_state(&*repository, &layer, Some(first.id), &options(&remote), &resources).unwrap();
        let version = |layer: Object| {
            let path = remote.path().join(layer.id.layer_name().as_str());
            Version { layer, file: fs::read(&path).unwrap(), content: content(&path, "qcow2") }
        };
        let versions = [first, second].map(version);
        Self { remote, local, repository, versions }
    }

    fn path(&self, version: &Version) -> PathBuf {
        self.remote.path().join(version.layer.id.layer_name().as_str())
    }

    /// An image of the host with this content, of one kind or another.
    fn image(&self, name: &str, content: &[u8], kind: u64) -> Arc<Disk> {
        let raw = self.local.path().join(format!("{name}.raw"));
        fs::write(&raw, content).unwrap();
        let made = ["", "cluster_size=4k", "cluster_size=128k,extended_l2=on", "cluster_size=2M"];
        let made = made[kind as usize % made.len()];
        if made.is_empty() {
            return open_image(&raw, Format::Raw).unwrap();
        }
        let path = self.local.path().join(format!("{name}.qcow2"));
        qemu_img(&["convert", "-f", "raw", "-O", "qcow2", "-o", made, path_str(&raw), path_str(&path)]);
        open_image(&path, Format::Qcow2).unwrap()
    }

    /// Fills the cache of a host with the layers of a version, and compares them with what was published.
    fn fill(&self, host: &Keeper, versions: &[Version], image: &Arc<Disk>) -> Filled {
        let Keeper { dir: host_dir, cache, files } = host;
        let before = cache.usage().fetched;
        let remote = Remote::new(cache, Arc::clone(&self.repository), OnMissing::Wait);
        let dir = LayerDirectory { path: self.remote.path(), indices: host_dir.path() };
        let objects: Vec<Object> = versions.iter().map(|version| version.layer).collect();
        files.add(dir, &remote, &objects).unwrap();
        let paths: Vec<PathBuf> = versions.iter().map(|version| self.path(version)).collect();
        let replica = Replica::of(files, paths.iter().map(PathBuf::as_path)).unwrap();
        let walk = replica.fill_from(Arc::clone(image)).unwrap();
        let image_bytes = to_the_end(walk).iter().map(|passed| passed.image_bytes).sum();
        for version in versions {
            let kept = cache.path().join(format!("{}.chunks", version.layer.id));
            assert_same(&fs::read(kept).unwrap(), &version.file, 0, "what is kept of a layer");
        }
        let fetched_chunks = cache.usage().fetched - before;
        self.check(host, versions.last().unwrap());
        assert_eq!(cache.usage().fetched, before + fetched_chunks, "all of it is here");
        Filled { fetched_chunks, image_bytes }
    }

    /// Compares a disk on the version with what stock tools read.
    fn check(&self, host: &Keeper, version: &Version) {
        let path = host.dir.path().join(format!("on-{}.qcow2", version.layer.id));
        let backing = Some((self.path(version), Format::Qcow2));
        create(&path, &CreateOptions { backing, ..CreateOptions::default() }).unwrap();
        let resources = Resources::with_opener(ResourceOptions::default(), host.files.clone());
        let disk = Disk::open(&path, &options(&self.remote), &resources).unwrap();
        assert_reads(&disk, &version.content, "through the cache");
        disk.close().unwrap();
    }
}

fn open_image(path: &Path, format: Format) -> vmstrata_disk::Result<Arc<Disk>> {
    let options = OpenOptions { read_only: true, format: Some(format), ..OpenOptions::default() };
    Disk::open(path, &options, &Resources::new(ResourceOptions::default()))
}

fn to_the_end(mut walk: Walk) -> Vec<Passed> {
    let steps = walk.steps();
    let passed: Vec<Passed> = std::iter::from_fn(|| walk.step().unwrap()).collect();
    assert_eq!(passed.iter().filter(|passed| !passed.is_part).count() as u64, steps);
    passed
}

fn chunks(bytes: usize) -> u64 {
    bytes.div_ceil(CHUNK as usize) as u64
}

#[test]
fn equally_patched_images_need_nothing_of_a_version_from_its_repository() {
    for_seeds(4, |seed| {
        let world = World::new(&mut random("compose", seed));
        let host = Keeper::new();
        let [first, second] = &world.versions;
        let built = world.image("built", &first.content, seed);
        let filled = world.fill(&host, &world.versions[..1], &built);
        // The layer's tables, with what data lies beside them.
        assert!(filled.fetched_chunks <= 2, "{} chunks", filled.fetched_chunks);
        assert!(filled.image_bytes >= (chunks(first.file.len()) - 3) * CHUNK, "{}", filled.image_bytes);

        // Of the newer layer, no chunk can be had from the repository; its header is left, by which images find it.
        let path = world.path(second);
        (1..=second.file.len() as u64 / CHUNK).for_each(|chunk| flip(&path, chunk * CHUNK - 1));
        let patched = world.image("patched", &second.content, seed + 1);
        let filled = world.fill(&host, &world.versions, &patched);
        assert_eq!(filled.fetched_chunks, 0);
        assert!(filled.image_bytes > 0);
    });
}

#[test]
fn what_an_image_has_otherwise_is_fetched() {
    for_seeds(4, |seed| {
        let mut random = random("otherwise", seed);
        let world = World::new(&mut random);
        let mut content = world.versions[1].content.clone();
        for _ in 0..5 {
            let at = random.random_range(0..SIZE / 4096) * 4096;
            content[at as usize + 7] ^= 1;
        }
        let filled = world.fill(&Keeper::new(), &world.versions, &world.image("other", &content, seed));
        let all: u64 = world.versions.iter().map(|version| chunks(version.file.len())).sum();
        assert!((1..all).contains(&filled.fetched_chunks), "{} of {all} chunks", filled.fetched_chunks);
        assert!(filled.image_bytes > 0);
    });
}

#[test]
fn short_damaged_and_foreign_images_give_no_wrong_bytes() {
    let mut random = random("hostile", 0);
    let world = World::new(&mut random);
    let [version] = &world.versions[1..] else { panic!() };
    let raw = world.local.path().join("hostile.raw");
    let right = &version.content;
    let long = [&right[..], &pattern(&mut random, 1 << 20)].concat();
    let foreign = pattern(&mut random, SIZE as usize);
    for bytes in [&[][..], &right[..512], &right[..right.len() / 2], &long, &foreign] {
        fs::write(&raw, bytes).unwrap();
        let filled = world.fill(&Keeper::new(), &world.versions, &open_image(&raw, Format::Raw).unwrap());
        assert_eq!(filled.image_bytes > 0, bytes.len() > 512 && bytes != foreign, "{} bytes", bytes.len());
    }
    // Of images without their end, and with tables of noise, some cannot be opened.
    let whole = world.local.path().join("whole.qcow2");
    fs::write(&raw, right).unwrap();
    qemu_img(&["convert", "-f", "raw", "-O", "qcow2", path_str(&raw), path_str(&whole)]);
    let (image, whole) = (world.local.path().join("damaged.qcow2"), fs::read(whole).unwrap());
    let mut opened = 0;
    for number in 0..12 {
        let mut bytes = whole.clone();
        if number % 3 == 0 {
            bytes.truncate(random.random_range(0..whole.len()));
        } else {
            for _ in 0..200 {
                let at = random.random_range(4096..8 * CLUSTER as usize);
                bytes[at] = random.random();
            }
        }
        fs::write(&image, bytes).unwrap();
        if let Ok(image) = open_image(&image, Format::Qcow2) {
            world.fill(&Keeper::new(), &world.versions, &image);
            opened += 1;
        }
    }
    assert!(opened > 0);
}

#[test]
fn an_image_that_changes_meanwhile_gives_no_wrong_bytes() {
    let mut random = random("changing", 0);
    let world = World::new(&mut random);
    let host = Keeper::new();
    let raw = world.local.path().join("changing.raw");
    fs::write(&raw, &world.versions[0].content).unwrap();
    let image = open_image(&raw, Format::Raw).unwrap();
    let file = File::options().write(true).open(&raw).unwrap();
    std::thread::scope(|scope| {
        let mut change = || {
            let (at, len) = some_range(&mut random, SIZE, CLUSTER);
            file.write_all_at(&pattern(&mut random, len as usize), at).unwrap();
        };
        change();
        let filling = scope.spawn(|| world.fill(&host, &world.versions, &image));
        while !filling.is_finished() {
            change();
        }
        filling.join().unwrap();
    });
}

/// A layer of which a table lies behind data, and what its disk holds.
fn spread_layer(dir: &Path) -> (Vec<u8>, PathBuf) {
    let path = dir.join("spread.qcow2");
    qemu_img(&["create", "-q", "-f", "qcow2", path_str(&path), "1G"]);
    let writes = ["write -q -P 1 0 3M", "write -q -P 2 600M 3M"].map(str::to_owned);
    qemu_io(&path, &writes);
    (fs::read(&path).unwrap(), path)
}

#[test]
fn tables_that_cannot_be_read_now_are_read_later() {
    let local = scratch();
    let (bytes, image) = spread_layer(local.path());
    let all = chunks(bytes.len());
    let host = Host::new(OneLayer::holding(bytes), u64::MAX);
    let image = open_image(&image, Format::Qcow2).unwrap();
    let mut walk = host.replica().fill_from(image).unwrap();
    host.world.link.set(Mood::Fails);
    let error = walk.step().unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::TimedOut, "{error}");
    host.world.link.set(Mood::Answers);
    let before = host.world.link.reads();
    let passed = to_the_end(walk);
    let image_bytes: u64 = passed.iter().map(|passed| passed.image_bytes).sum();
    assert!(image_bytes >= (all - 4) * CHUNK, "{image_bytes} of {all} chunks");
    assert!(host.world.link.reads() - before <= 4);
    host.check();
}

#[test]
fn a_layer_that_is_no_image_is_fetched() {
    let local = scratch();
    let (_, image) = spread_layer(local.path());
    let host = Host::new(OneLayer::new(), u64::MAX);
    let passed = to_the_end(host.replica().fill_from(open_image(&image, Format::Qcow2).unwrap()).unwrap());
    assert!(passed.iter().all(|passed| passed.image_bytes == 0));
    host.check();
}
