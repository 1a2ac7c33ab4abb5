//! A process that serves a disk and publishes its epochs is killed; another host takes the disk over, and stock tools judge what
//! it gets.

#[path = "../../disk/tests/common/mod.rs"]
mod common;

use std::fs::OpenOptions as FileOptions;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use common::flat::write;
use common::stock::{assert_clean, content, path_str};
use common::{for_seeds, random, scratch, wait_until};
use rand::Rng as _;
use vmstrata_disk::snapshot::SnapshotInfo;
use vmstrata_disk::{CreateOptions, Disk, Format, OpenOptions, ResourceOptions, Resources, create};
use vmstrata_repo::{DirectoryRepository, Repository};
use vmstrata_tier::{Claim, Error, Head, OwnerId, Publisher, is_object_name, ship_state};

const ORDERS: &str = "VMSTRATA_TEST_CHILD";
const SIZE: u64 = 64 << 20;
const BLOCK: u64 = 4096;

/// The block of the write with this number; a state between two writes follows from how many there were.
fn place(number: u64) -> u64 {
    number.wrapping_mul(0x9e37_79b9_7f4a_7c15) % (SIZE / BLOCK) * BLOCK
}

fn block(number: u64) -> Vec<u8> {
    number.to_le_bytes().repeat(BLOCK as usize / 8)
}

/// How many writes made this content; panics where no number of them did.
fn writes_of(content: &[u8]) -> u64 {
    let first_word = |block: &[u8]| u64::from_le_bytes(block[..8].try_into().unwrap());
    let count = content.chunks(BLOCK as usize).map(first_word).max().unwrap();
    let mut expected = vec![0; content.len()];
    for number in 1..=count {
        let at = place(number) as usize;
        expected[at..at + BLOCK as usize].copy_from_slice(&block(number));
    }
    common::flat::assert_same(content, &expected, 0, "after a whole number of writes");
    count
}

/// A disk on a host, with the repository in which it is published.
struct Tiered {
    disk: Arc<Disk>,
    resources: Arc<Resources>,
    options: OpenOptions,
    repository: Arc<dyn Repository>,
    publisher: Publisher,
}

impl Tiered {
    fn open(disk: &Path, remote: &Path, claim: Claim) -> Self {
        let repository: Arc<dyn Repository> =
            Arc::new(DirectoryRepository::open(remote, is_object_name).unwrap());
        let publisher = Publisher::claim(repository.clone(), OwnerId::draw(), claim).unwrap();
        let backing = publisher
            .head()
            .epoch
            .objects
            .last()
            .map(|object| (remote.join(object.id.layer_name().as_str()), Format::Qcow2));
        create(disk, &CreateOptions { size: Some(SIZE), backing, ..CreateOptions::default() }).unwrap();
        let options = OpenOptions { allow_backing: vec![remote.to_owned()], ..OpenOptions::default() };
        let resources = Resources::new(ResourceOptions::default());
        let disk = Disk::open(disk, &options, &resources).unwrap();
        Self { disk, resources, options, repository, publisher }
    }

    /// Cuts the disk, ships what was cut off, and publishes it.
    fn publish(&mut self) -> Result<(), Error> {
        let mut epoch = self.publisher.head().epoch.clone();
        epoch.number = epoch.number.next();
        epoch.size = self.disk.size();
        epoch.time_ns = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_nanos() as u64;
        let info = SnapshotInfo {
            name: format!("epoch-{}", epoch.number),
            taken_ns: epoch.time_ns,
            ..SnapshotInfo::default()
        };
        let layer = self.disk.snapshot(&info).unwrap().layer;
        let below = epoch.objects.last().map(|object| object.id);
        epoch.objects.push(ship_state(&*self.repository, &layer, below, &self.options, &self.resources)?);
        self.publisher.publish(epoch)
    }
}

/// The child: a guest writes, its host publishes, and says for each epoch how many writes had completed before it was cut.
#[test]
#[ignore = "the process that the other test starts and kills"]
fn host_that_publishes_until_it_is_killed() {
    let Ok(orders) = std::env::var(ORDERS) else { return };
    let local = PathBuf::from(orders);
    let mut tiered = Tiered::open(&local.join("web.qcow2"), &local.join("remote"), Claim::First);
    let mut report = FileOptions::new().append(true).create(true).open(local.join("report")).unwrap();
    let (disk, written) = (tiered.disk.clone(), Arc::new(AtomicU64::new(0)));
    let counted = written.clone();
    std::thread::spawn(move || {
        for number in 1.. {
            write(&disk, place(number), &block(number)).unwrap();
            counted.store(number, Ordering::Release);
        }
    });
    loop {
        let before = written.load(Ordering::Acquire);
        tiered.publish().unwrap();
        report.write_all(&before.to_le_bytes()).unwrap();
    }
}

/// The numbers that the child reported.
fn reported(local: &Path) -> Vec<u64> {
    let bytes = std::fs::read(local.join("report")).unwrap_or_default();
    bytes.as_chunks::<8>().0.iter().map(|number| u64::from_le_bytes(*number)).collect()
}

/// What stock tools read of the state that a head names, all of whose layers they find clean.
fn published(head: &Head, remote: &Path) -> Vec<u8> {
    let layers: Vec<PathBuf> =
        head.epoch.objects.iter().map(|object| remote.join(object.id.layer_name().as_str())).collect();
    for (path, object) in layers.iter().zip(&head.epoch.objects) {
        assert_clean(path);
        let bytes = std::fs::read(path).unwrap();
        assert!(bytes.len() as u64 == object.bytes && blake3::hash(&bytes) == object.blake3, "{path:?}");
    }
    content(layers.last().expect("a layer"), "qcow2")
}

#[test]
fn a_take_over_after_a_kill_gets_the_last_published_state() {
    for_seeds(3, |seed| {
        let (local, other) = (scratch(), scratch());
        let remote = local.path().join("remote");
        std::fs::create_dir(&remote).unwrap();
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "host_that_publishes_until_it_is_killed", "--ignored", "--nocapture"])
            .env(ORDERS, path_str(local.path()))
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        wait_until("some epochs", || reported(local.path()).len() >= 3);
        // Anywhere in an epoch.
        std::thread::sleep(Duration::from_micros(random("moment", seed).random_range(0..200_000)));
        child.kill().unwrap();
        child.wait().unwrap();
        let mut tiered = Tiered::open(&other.path().join("web.qcow2"), &remote, Claim::TakeOver);
        let count = writes_of(&published(tiered.publisher.head(), &remote));
        let told = reported(local.path());
        assert!(count >= *told.last().unwrap(), "{count} writes, of {told:?}");
        // And goes on from there.
        for number in count + 1..=count + 100 {
            write(&tiered.disk, place(number), &block(number)).unwrap();
        }
        tiered.publish().unwrap();
        assert_eq!(writes_of(&published(tiered.publisher.head(), &remote)), count + 100);
    });
}
