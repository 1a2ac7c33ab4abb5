//! Disks over layers that are read through the host's cache read as they do without it, whatever is given up and fails meanwhile.

use crate::common;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::{fs, io};

use crate::common::flat::{assert_reads, assert_same, pattern, some_range, write};
use crate::common::io::Client;
use crate::common::stock::{content, path_str, qemu_img};
use crate::common::{for_seeds, random, scratch};
use rand::Rng as _;
use rand::rngs::SmallRng;
use tempfile::TempDir;
use vmstrata_disk::snapshot::SnapshotInfo;
use vmstrata_disk::{
    CreateOptions, Disk, Format, Op, OpenOptions, Opened, Opener, ResourceOptions, Resources, Role, create,
};
use vmstrata_repo::{DirectoryRepository, Repository};
use vmstrata_store::{
    Effect, Fault, FaultPlan, FaultStore, FileIdentity, Gate, OperationKind, Ring, StoreId, When,
};
use vmstrata_tier::{
    Cache, CachedFiles, LayerDirectory, Object, ObjectId, OnMissing, Remote, adopt, is_object_name,
    ship_state,
};

const SIZE: u64 = 12 << 20;
const CLUSTER: u64 = 64 << 10;

/// A repository with a chain: an image with compressed clusters that was there before, and dense layers on it.
struct World {
    remote: TempDir,
    host: TempDir,
    repository: Arc<dyn Repository>,
    objects: Vec<Object>,
    /// What the newest layer reads as, by stock tools.
    content: Vec<u8>,
}

impl World {
    fn new(random: &mut SmallRng) -> Self {
        let (remote, host, local) = (scratch(), scratch(), scratch());
        let repository: Arc<dyn Repository> =
            Arc::new(DirectoryRepository::open(remote.path(), is_object_name).unwrap());
        let raw = local.path().join("raw");
        fs::write(&raw, pattern(random, SIZE as usize)).unwrap();
        let id = ObjectId::draw();
        let base = remote.path().join(id.layer_name().as_str());
        qemu_img(&["convert", "-c", "-f", "raw", "-O", "qcow2", path_str(&raw), path_str(&base)]);
        let mut objects = vec![adopt(&*repository, id).unwrap()];
        let options = OpenOptions { allow_backing: vec![remote.path().to_owned()], ..OpenOptions::default() };
        let resources = Resources::new(ResourceOptions::default());
        let path = local.path().join("disk");
        create(&path, &CreateOptions { backing: Some((base, Format::Qcow2)), ..CreateOptions::default() })
            .unwrap();
        let disk = Disk::open(&path, &options, &resources).unwrap();
        for number in 0..3 {
            for _ in 0..20 {
                let (at, len) = some_range(random, SIZE, CLUSTER);
                match random.random_range(0..5) {
                    0 => disk.write_zeroes(common::flat::range(at, len), true).unwrap(),
                    _ => write(&disk, at, &pattern(random, len as usize)).unwrap(),
                }
            }
            let info = SnapshotInfo { name: format!("epoch-{number}"), ..SnapshotInfo::default() };
            let layer = disk.snapshot(&info).unwrap().layer;
            let below = objects.last().map(|object| object.id);
            objects.push(ship_state(&*repository, &layer, below, &options, &resources).unwrap());
        }
        let top = remote.path().join(objects[3].id.layer_name().as_str());
        let content = content(&top, "qcow2");
        Self { remote, host, repository, objects, content }
    }

    fn cache(&self, budget: u64, plan: Option<&Arc<FaultPlan>>) -> Arc<Cache> {
        let plan = plan.cloned();
        let wrap = move |file| match &plan {
            Some(plan) => Arc::new(FaultStore::new(file, plan, CACHE)) as _,
            None => file,
        };
        Cache::open_with(&self.host.path().join("cache"), budget, wrap).unwrap()
    }

    fn files(&self, cache: &Arc<Cache>) -> CachedFiles {
        let files = CachedFiles::default();
        let remote = Remote::new(cache, self.repository.clone(), OnMissing::Wait);
        let dir = LayerDirectory { path: self.remote.path(), indices: self.host.path() };
        files.add(dir, &remote, &self.objects).unwrap();
        files
    }

    /// A disk of this host on the newest layer.
    fn disk(&self) -> PathBuf {
        let path = self.host.path().join("web.qcow2");
        let top = self.remote.path().join(self.objects[3].id.layer_name().as_str());
        create(&path, &CreateOptions { backing: Some((top, Format::Qcow2)), ..CreateOptions::default() })
            .unwrap();
        path
    }

    fn open(&self, path: &Path, files: Arc<dyn Opener>) -> Arc<Disk> {
        let options =
            OpenOptions { allow_backing: vec![self.remote.path().to_owned()], ..OpenOptions::default() };
        Disk::open(path, &options, &Resources::with_opener(ResourceOptions::default(), files)).unwrap()
    }

    /// Reads, many at a time, and writes in between; compares with what the disk must read as.
    fn use_disk(&self, disk: &Arc<Disk>, random: &mut SmallRng) -> Vec<u8> {
        let mut model = self.content.clone();
        let mut client = Client::new(disk, 64);
        for round in 0..30 {
            let reads: Vec<(u64, u64)> = (0..32).map(|_| some_range(random, SIZE, CLUSTER)).collect();
            for &(at, len) in &reads {
                client.push(Op::Read, at, len, None);
            }
            let mut done = client.drain();
            done.sort_by_key(|done| done.token);
            for ((at, len), done) in reads.into_iter().zip(done) {
                done.result.unwrap();
                let expected = &model[at as usize..][..len as usize];
                assert_same(&done.bytes, expected, at, &format!("in round {round}"));
            }
            let (at, len) = some_range(random, SIZE, CLUSTER);
            let bytes = pattern(random, len as usize);
            client.push(Op::Write { fua: false }, at, len, Some(&bytes));
            client.drain().remove(0).result.unwrap();
            model[at as usize..][..len as usize].copy_from_slice(&bytes);
        }
        model
    }
}

const CACHE: StoreId = StoreId(1);

#[test]
fn a_disk_reads_the_same_through_the_cache_as_directly() {
    for_seeds(4, |seed| {
        let mut random = random("cached", seed);
        let world = World::new(&mut random);
        // Of about 6 MiB.
        let budget = if seed % 2 == 0 { 2 << 20 } else { u64::MAX };
        let path = world.disk();
        let cache = world.cache(budget, None);
        let disk = world.open(&path, Arc::new(world.files(&cache)));
        let mut model = world.use_disk(&disk, &mut random);
        // The layer gets an index of all that is below.
        disk.snapshot(&SnapshotInfo { name: "mon".to_owned(), ..SnapshotInfo::default() }).unwrap();
        write(&disk, 512, &[7; 512]).unwrap();
        model[512..1024].fill(7);
        assert_reads(&disk, &model, "after a snapshot");
        disk.close().unwrap();
        drop((disk, cache));
        let cache = world.cache(budget, None);
        let disk = world.open(&path, Arc::new(world.files(&cache)));
        assert_reads(&disk, &model, "after a restart");
        assert!(budget < u64::MAX || cache.usage().fetched == 0, "{:?}", cache.usage());
        disk.close().unwrap();
        drop(disk);
        assert_same(&content(&path, "qcow2"), &model, 0, "by stock tools, without the cache");
    });
}

/// Files whose every operation passes a plan, and rings that go through them.
#[derive(Debug)]
struct Faulty {
    files: CachedFiles,
    plan: Arc<FaultPlan>,
}

impl Opener for Faulty {
    fn open(&self, path: &Path, role: Role, gate: &Gate) -> vmstrata_disk::Result<Opened> {
        let opened = self.files.open(path, role, gate)?;
        if opened.store.fetch().is_some() {
            return Ok(opened);
        }
        let store = Arc::new(FaultStore::new(opened.store, &self.plan, StoreId(0)));
        Ok(Opened { store, ..opened })
    }

    fn identity(&self, path: &Path, gate: &Gate) -> vmstrata_disk::Result<FileIdentity> {
        self.files.identity(path, gate)
    }

    fn may_be_absent(&self) -> bool {
        true
    }

    fn ring(&self, _: u32) -> io::Result<Ring> {
        Ring::simulated(&self.plan)
    }
}

#[test]
fn a_cache_file_that_fails_costs_a_fetch_and_no_read() {
    for_seeds(6, |seed| {
        let mut random = random("faulty", seed);
        let world = World::new(&mut random);
        let plan = FaultPlan::new();
        let cache = world.cache(2 << 20, Some(&plan));
        let faulty = Faulty { files: world.files(&cache), plan: Arc::clone(&plan) };
        let disk = world.open(&world.disk(), Arc::new(faulty));
        for number in 0..20 {
            let (kind, effect) = match random.random_range(0..4) {
                0 => (OperationKind::Write, Effect::Fail(libc::ENOSPC)),
                1 => (OperationKind::PunchHole, Effect::Fail(libc::EIO)),
                2 => (OperationKind::Read, Effect::Short { bytes: 1000 }),
                _ => (OperationKind::Read, Effect::Fail(libc::EIO)),
            };
            let when = When::Nth(number * 10 + random.random_range(0..10));
            plan.add(Fault { kind: Some(kind), store: Some(CACHE), when, effect });
        }
        let model = world.use_disk(&disk, &mut random);
        plan.clear();
        assert_reads(&disk, &model, "after faults");
    });
}

#[test]
fn a_cache_that_cannot_be_written_keeps_no_read_waiting() {
    let mut random = random("unwritable", 0);
    let world = World::new(&mut random);
    let plan = FaultPlan::new();
    let cache = world.cache(2 << 20, Some(&plan));
    let disk = world.open(&world.disk(), Arc::new(world.files(&cache)));
    let (kind, effect) = (Some(OperationKind::Write), Effect::Fail(libc::EIO));
    plan.add(Fault { kind, store: Some(CACHE), when: When::From(0), effect });
    let model = world.use_disk(&disk, &mut random);
    assert_reads(&disk, &model, "without a cache");
    // Long requests are carried out in pieces.
    let mut client = Client::new(&disk, 4);
    client.push(Op::Read, 0, SIZE, None);
    let done = client.drain().remove(0);
    done.result.unwrap();
    assert_same(&done.bytes, &model, 0, "in one request");
}

#[test]
fn bytes_that_the_repository_changed_reach_no_guest() {
    let mut random = random("changed", 0);
    let world = World::new(&mut random);
    let name = world.objects[3].id.layer_name();
    let file =
        fs::File::options().read(true).write(true).open(world.remote.path().join(name.as_str())).unwrap();
    let (mut byte, last) = ([0], world.objects[3].bytes - 1);
    file.read_exact_at(&mut byte, last).unwrap();
    file.write_all_at(&[byte[0] ^ 1], last).unwrap();
    let cache = world.cache(u64::MAX, None);
    let disk = world.open(&world.disk(), Arc::new(world.files(&cache)));
    let mut client = Client::new(&disk, 64);
    (0..SIZE).step_by(CLUSTER as usize).for_each(|at| _ = client.push(Op::Read, at, CLUSTER, None));
    let mut told = Vec::new();
    for done in client.drain() {
        let at = done.token * CLUSTER;
        match done.result {
            Ok(()) => assert_same(&done.bytes, &world.content[at as usize..][..CLUSTER as usize], at, "read"),
            Err(error) => told.push(error.to_string()),
        }
    }
    assert!(!told.is_empty(), "some clusters lie there");
    for told in told {
        let parts = [
            name.as_str(),
            "layer 3: ",
            "at byte 0x",
            path_str(world.remote.path()),
            "is not what was shipped",
        ];
        assert!(parts.iter().all(|part| told.contains(part)), "{told}");
    }
}

#[test]
fn a_layer_of_another_disks_repository_is_outside() {
    let mut random = random("gate", 0);
    let world = World::new(&mut random);
    let cache = world.cache(u64::MAX, None);
    let files = Arc::new(world.files(&cache));
    let path = world.disk();
    let resources = Resources::with_opener(ResourceOptions::default(), files.clone());
    let told = Disk::open(&path, &OpenOptions::default(), &resources).unwrap_err().to_string();
    assert!(told.contains("is outside the allowed directories"), "{told}");
    let layer = world.remote.path().join(world.objects[0].id.layer_name().as_str());
    for role in [Role::Indexed, Role::CopiedInto, Role::Active(vmstrata_store::CacheMode::Host)] {
        files.open(&layer, role, &Gate::unrestricted()).unwrap_err();
    }
}
