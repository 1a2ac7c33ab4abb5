//! Disks of a guest that are cut at one instant and published by one head, on hosts that are killed, fenced and cut off.
//!
//! The guest makes steps: it writes a step's number to the first disk, and then to the second.

use crate::common;
use crate::tier_support;
use std::collections::BTreeMap;
use std::fs;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crate::common::flat::{read, write};
use crate::common::scratch;
use crate::common::stock::{assert_clean, content, path_str, qemu_img};
use crate::tier_support::{
    SIZE, block, far, image_at, make_far, place, published, repository_dir, soon, sync, writes_of,
};
use vmstrata_disk::snapshot::SnapshotInfo;
use vmstrata_disk::{Disk, OpenOptions, ResourceOptions, Resources};
use vmstrata_repo::DirectoryRepository;
use vmstrata_tier::{
    Detach, Error, Head, Pin, Place, TierOptions, TierState, TierStatus, Tiered, find_state, is_object_name,
    newest, repository_of, revert, states,
};

const NAMES: [&str; 2] = ["log.qcow2", "data.qcow2"];

fn images(nas: &Path) -> [PathBuf; 2] {
    NAMES.map(|name| image_at(&nas.join(name)))
}

fn group_place(paths: &[PathBuf], tier: &Path) -> Result<Place, Error> {
    Ok(place_and_resources(paths, tier)?.0)
}

/// In a directory that hosts do not know as such, if there is one.
fn place_and_resources(paths: &[PathBuf], tier: &Path) -> Result<(Place, Arc<Resources>), Error> {
    let all: Vec<&Path> = paths.iter().map(PathBuf::as_path).collect();
    let far_dir = all[0].with_file_name("far");
    if !far_dir.exists() {
        return Ok((Place::group("guest", &all, tier)?, Resources::new(ResourceOptions::default())));
    }
    let (elsewhere, files) = far(&far_dir, tier);
    let place = Place::elsewhere(Some("guest"), &all, tier, elsewhere)?;
    Ok((place, Resources::with_opener(ResourceOptions::default(), files)))
}

/// A host that serves both disks.
struct Host {
    disks: Vec<Arc<Disk>>,
    tiered: Tiered,
}

impl Host {
    fn open(paths: &[PathBuf], tier: &Path, options: TierOptions) -> Result<Self, Error> {
        let (place, resources) = place_and_resources(paths, tier)?;
        let opens = vec![OpenOptions::default(); paths.len()];
        let (disks, tiered) = Tiered::open(&place, options, &opens, &resources)?;
        Ok(Self { disks, tiered })
    }

    /// Cut when it is asked to be.
    fn new(paths: &[PathBuf], tier: &Path) -> Self {
        let window = Duration::from_secs(600);
        Self::open(paths, tier, TierOptions { window, ..TierOptions::default() }).unwrap()
    }

    fn steps(&self, numbers: std::ops::RangeInclusive<u64>) {
        for number in numbers {
            self.disks.iter().for_each(|disk| write(disk, place(number), &block(number)).unwrap());
        }
    }

    fn sync(&self) -> TierStatus {
        sync(&self.tiered).unwrap()
    }

    /// The steps that it has.
    fn has(&self) -> u64 {
        in_order([0, 1].map(|disk| writes_of(&read(&self.disks[disk], 0, SIZE as usize).unwrap())))
    }

    fn end(self) {
        assert!(self.tiered.stop(soon()));
        self.disks.iter().for_each(|disk| disk.close().unwrap());
    }
}

/// How many steps the first disk has, and the second had one at most not yet.
fn in_order([first, second]: [u64; 2]) -> u64 {
    assert!(first == second || first == second + 1, "step {second} without {first}");
    second
}

fn repository(path: &Path) -> DirectoryRepository {
    DirectoryRepository::open(&repository_dir(path), is_object_name).unwrap()
}

fn newest_of(path: &Path) -> Head {
    newest(&repository(path)).unwrap().expect("a head")
}

/// The steps that a head has, as stock tools read it.
fn steps_of(head: &Head, paths: &[PathBuf; 2]) -> u64 {
    in_order(paths.each_ref().map(|path| writes_of(&published(head, path))))
}

fn published_steps(paths: &[PathBuf; 2]) -> u64 {
    steps_of(&newest_of(&paths[0]), paths)
}

fn take_over(path: &Path, tier: &Path) -> Result<Option<PathBuf>, Error> {
    let far_dir = path.with_file_name("far");
    let (place, resources) = if far_dir.exists() {
        let (elsewhere, files) = far(&far_dir, tier);
        let place = Place::published_elsewhere(tier, elsewhere)?;
        (place, Resources::with_opener(ResourceOptions::default(), files))
    } else {
        (Place::of(path, tier)?, Resources::new(ResourceOptions::default()))
    };
    vmstrata_tier::take_over(&place, &OpenOptions::default(), &resources).map(|(_, aside)| aside)
}

#[test]
fn every_published_state_is_one_that_all_disks_had_at_one_instant() {
    let (nas, tier) = (scratch(), scratch());
    let paths = images(nas.path());
    let host = Host::new(&paths, tier.path());
    let (steps, all) = (AtomicU64::new(0), 3000);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for number in 1..=all {
                host.steps(number..=number);
                steps.store(number, Ordering::Release);
            }
        });
        for _ in 0..8 {
            let before = steps.load(Ordering::Acquire);
            host.sync();
            assert!(published_steps(&paths) >= before);
        }
    });
    host.sync();
    assert_eq!(published_steps(&paths), all);
    for head in states(&repository(&paths[0])).unwrap() {
        if !head.epoch.disks.is_empty() {
            steps_of(&head, &paths);
        }
    }
    // The paths lead there, for stock tools.
    assert!(host.tiered.stop(soon()));
    for path in &paths {
        assert_clean(path);
        assert_eq!(writes_of(&content(path, "qcow2")), all);
    }
}

#[test]
fn a_take_over_of_any_disk_takes_all_and_fences_all() {
    let (nas, tier, other) = (scratch(), scratch(), scratch());
    let paths = images(nas.path());
    let first = Host::new(&paths, tier.path());
    first.steps(1..=10);
    first.sync();
    first.steps(11..=20);
    assert_eq!(take_over(&paths[1], other.path()).unwrap(), None);
    let second = Host::new(&paths, other.path());
    assert_eq!(second.has(), 10);
    let told = sync(&first.tiered).unwrap_err().to_string();
    assert!(told.contains("generation 2"), "{told}");
    assert!(matches!(first.tiered.status().state, TierState::Fenced { .. }));
    first.disks.iter().for_each(|disk| _ = write(disk, 0, &block(1)).unwrap_err());
    second.steps(11..=12);
    second.sync();
    assert_eq!(published_steps(&paths), 12);
    drop(first);
    let aside = take_over(&paths[0], tier.path()).unwrap().expect("its copy of before");
    let aside = NAMES.map(|name| writes_of(&content(&aside.join(name), "qcow2")));
    assert_eq!(in_order(aside), 20);
}

#[test]
fn a_cut_that_not_all_disks_have_is_no_state_and_loses_nothing() {
    for torn in [0, 1] {
        let (nas, tier) = (scratch(), scratch());
        let paths = images(nas.path());
        let host = Host::new(&paths, tier.path());
        host.steps(1..=10);
        let epoch = host.sync().epoch;
        host.steps(11..=20);
        host.end();
        // As a process that was killed between the disks leaves it.
        let place = &group_place(&paths, tier.path()).unwrap().members()[torn];
        let open = OpenOptions { allow_backing: vec![place.repository.clone()], ..OpenOptions::default() };
        let disk = Disk::open(&place.disk(), &open, &Resources::new(ResourceOptions::default())).unwrap();
        let name = epoch.next().snapshot_name();
        disk.snapshot(&SnapshotInfo { name, taken_ns: 1, ..SnapshotInfo::default() }).unwrap();
        disk.close().unwrap();
        drop(disk);

        let host = Host::new(&paths, tier.path());
        assert_eq!(host.has(), 20);
        host.steps(21..=22);
        assert_eq!((published_steps(&paths), host.tiered.status().epoch), (10, epoch));
        host.sync();
        assert_eq!(published_steps(&paths), 22);
        host.end();
        NAMES.iter().for_each(|name| assert_clean(&place.local.join(name)));
    }
}

#[test]
fn a_disk_that_is_not_written_ships_nothing() {
    let (nas, tier) = (scratch(), scratch());
    let paths = images(nas.path());
    let host = Host::new(&paths, tier.path());
    let data = &host.disks[1];
    for number in 1..=12 {
        write(data, place(number), &block(number)).unwrap();
        host.sync();
    }
    let epoch = newest_of(&paths[0]).epoch;
    let layers = |name: &str| epoch.disk(name).unwrap().objects.len();
    assert_eq!(NAMES.map(layers), [1, 13]);
    assert!(host.disks.iter().all(|disk| disk.layer_count() <= 10));
    // A size is part of the state, too.
    host.disks[0].resize(2 * SIZE, vmstrata_disk::Shrink::Refuse).unwrap();
    host.sync();
    let size = |path: &PathBuf| published(&newest_of(path), path).len() as u64;
    assert_eq!(paths.each_ref().map(size), [2 * SIZE, SIZE]);
    host.end();
    let host = Host::new(&paths, tier.path());
    assert_eq!(writes_of(&read(&host.disks[1], 0, SIZE as usize).unwrap()), 12);
}

#[test]
fn a_snapshot_names_the_state_of_all_and_a_revert_takes_all_back() {
    let (nas, tier) = (scratch(), scratch());
    let paths = images(nas.path());
    let host = Host::new(&paths, tier.path());
    host.steps(1..=20);
    let named = SnapshotInfo { name: "monday".to_owned(), taken_ns: 1, ..SnapshotInfo::default() };
    let taken = host.tiered.snapshot(&named, soon(), || {}).unwrap();
    assert_eq!([0, 1].map(|disk| writes_of(&content(&taken.layers[disk], "qcow2"))), [20, 20]);
    let snapshots =
        |pins: Vec<Pin>| pins.iter().filter(|pin| format!("{:?}", pin.purpose).contains("monday")).count();
    assert_eq!(snapshots(Pin::all(&repository(&paths[1])).unwrap()), 1);
    host.steps(21..=40);
    host.end();
    find_state(&repository(&paths[1]), "monday", 0).unwrap();
    let resources = Resources::new(ResourceOptions::default());
    let place = Place::of(&paths[1], tier.path()).unwrap();
    let aside = revert(&place, "monday", &OpenOptions::default(), &resources).unwrap();
    assert_eq!(in_order(NAMES.map(|name| writes_of(&content(&aside.join(name), "qcow2")))), 40);
    assert_eq!(published_steps(&paths), 20);
    let host = Host::new(&paths, tier.path());
    assert_eq!(host.has(), 20);
    host.steps(21..=21);
    host.sync();
    assert_eq!(published_steps(&paths), 21);
}

#[test]
fn a_copy_of_all_disks_stands_on_merged_bases_and_releases_the_old_ones() {
    // More than is left alone, of both disks together.
    const PART: usize = 40 << 20;
    let (nas, tier) = (scratch(), scratch());
    let paths = images(nas.path());
    for path in &paths {
        common::stock::qemu_io(path, &["write -P 1 0 40M".to_owned()]);
    }
    let host = Host::new(&paths, tier.path());
    let pins = || Pin::all(&repository(&paths[0])).unwrap();
    let first = pins().remove(0).id;
    let mut round = 2;
    while pins().iter().any(|pin| pin.id == first) {
        assert!(round < 20, "the copy stands on what both disks were merged to");
        host.disks.iter().for_each(|disk| write(disk, 0, &vec![round; PART]).unwrap());
        host.sync();
        for disk in &host.disks {
            let now = read(disk, 0, PART).unwrap();
            common::flat::assert_same(&now, &vec![round; PART], 0, "in use");
        }
        round += 1;
    }
    host.disks.iter().for_each(|disk| write(disk, 4096, &block(3)).unwrap());
    let now: Vec<Vec<u8>> = host.disks.iter().map(|disk| read(disk, 0, PART).unwrap()).collect();
    host.end();
    let host = Host::new(&paths, tier.path());
    for (disk, now) in host.disks.iter().zip(now) {
        common::flat::assert_same(&read(disk, 0, PART).unwrap(), &now, 0, "opened again");
    }
    host.sync();
}

#[test]
fn flushes_of_one_disk_are_durable_with_the_state_of_all() {
    use common::io::Client;
    use vmstrata_disk::Op;
    use vmstrata_tier::DurableAt;

    let (nas, tier, other) = (scratch(), scratch(), scratch());
    let paths = images(nas.path());
    let durability = DurableAt::Repository;
    let window = Duration::from_secs(600);
    let options = TierOptions { window, durability, ..TierOptions::default() };
    let host = Host::open(&paths, tier.path(), options).unwrap();
    host.steps(1..=10);
    let mut client = Client::new(&host.disks[1], 8);
    client.push(Op::Flush, 0, 0, None);
    client.drain().into_iter().for_each(|done| done.result.unwrap());
    assert_eq!(published_steps(&paths), 10);
    take_over(&paths[0], other.path()).unwrap();
    client.push(Op::Write { fua: true }, place(11), 4096, Some(&block(11)));
    let told = client.drain()[0].result.as_ref().unwrap_err().to_string();
    assert!(told.contains("publishes here since"), "{told}");
}

#[test]
fn what_cannot_be_a_group_is_refused_and_stays() {
    let (nas, tier, other) = (scratch(), scratch(), scratch());
    let paths = images(nas.path());
    let third = image_at(&nas.path().join("third.qcow2"));
    let all = [paths[0].clone(), paths[1].clone(), third.clone()];
    let told = |paths: &[PathBuf], tier: &Path| {
        Host::open(paths, tier, TierOptions::default()).map(drop).unwrap_err().to_string()
    };
    // One that is published alone.
    let (disk, tiered) = tier_support::host(&third, tier.path()).unwrap();
    assert!(tiered.stop(soon()));
    disk.close().unwrap();
    drop(disk);
    assert!(told(&all, tier.path()).contains("third.qcow2 is published alone"));
    let raw = nas.path().join("raw.img");
    qemu_img(&["create", "-q", "-f", "raw", path_str(&raw), "1M"]);
    assert!(told(&[paths[0].clone(), raw], tier.path()).contains("raw"));
    assert!(!nas.path().join("guest.tier").exists());

    let host = Host::new(&paths, tier.path());
    host.steps(1..=3);
    host.sync();
    host.end();
    let fourth = image_at(&nas.path().join("fourth.qcow2"));
    let added = [paths[0].clone(), paths[1].clone(), fourth.clone()];
    assert!(told(&added, tier.path()).contains("fourth.qcow2 cannot be added"));
    assert!(fourth.exists() && !repository_of(&fourth).exists());
    for tier in [tier.path(), other.path()] {
        assert!(told(&paths[..1], tier).contains("data.qcow2 is published with it"));
    }
    let refused = Place::group("other", &[&paths[0]], tier.path()).unwrap();
    let resources = Resources::new(ResourceOptions::default());
    let refused =
        Tiered::open(&refused, TierOptions::default(), &[OpenOptions::default()], &resources).unwrap_err();
    assert!(refused.to_string().contains("is one of group 'guest'"), "{refused}");
    let place = Place::of(&paths[0], tier.path()).unwrap();
    assert_eq!((place.group_name(), place.members().len()), (Some("guest"), 2));
    let refused = Detach::begin(&place, true, &OpenOptions::default(), &resources).unwrap_err();
    assert!(matches!(refused, Error::Grouped { .. }), "{refused}");
    assert_eq!(published_steps(&paths), 3);
    fs::remove_file(nas.path().join("log.qcow2.tier")).unwrap();
    // The link is made again where all of them are named.
    Host::new(&paths, tier.path()).end();
    assert_eq!(repository_of(&paths[0]), nas.path().join("guest.tier"));
}

/// What the child finds its orders in: the directory of images and copy, and how many epochs it publishes before it ends.
const ORDERS: &str = "VMSTRATA_TEST_GROUP_CHILD";
const AHEAD: u64 = 40;
/// Calls by which files get and lose names: between them the disks are cut, shipped, published and merged.
const NAMING: [&str; 3] = ["renameat", "linkat", "unlinkat"];

/// The child: a guest makes steps, its host publishes, and says for each epoch how many there had been before it was cut.
#[test]
#[ignore = "the process that other tests start and kill"]
fn host_that_publishes_until_it_is_killed() {
    let Ok(orders) = std::env::var(ORDERS) else { return };
    let (dir, epochs) = orders.split_once(' ').unwrap();
    let dir = Path::new(dir);
    let paths = NAMES.map(|name| dir.join(name));
    let host = Host::new(&paths, &dir.join("tier"));
    let mut report = fs::OpenOptions::new().append(true).create(true).open(dir.join("report")).unwrap();
    let first = host.has();
    // The guest is ahead of the epochs by so many steps at most, so that there is not too much to compare.
    let (steps, allowed) = (AtomicU64::new(first), AtomicU64::new(first + AHEAD));
    let last = first + (epochs.parse::<u64>().unwrap() + 1) * AHEAD;
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for number in first + 1..=last {
                while allowed.load(Ordering::Acquire) < number {
                    std::thread::yield_now();
                }
                host.steps(number..=number);
                steps.store(number, Ordering::Release);
            }
        });
        for _ in 0..epochs.parse().unwrap() {
            while steps.load(Ordering::Acquire) < allowed.load(Ordering::Acquire) - AHEAD / 2 {
                std::thread::yield_now();
            }
            let before = steps.load(Ordering::Acquire);
            // What failed is tried again.
            if sync(&host.tiered).is_ok() {
                report.write_all(&before.to_le_bytes()).unwrap();
            }
            allowed.fetch_add(AHEAD, Ordering::Release);
        }
    });
}

/// Runs the child in `dir` under strace.
fn strace(dir: &Path, epochs: u64, options: &[&str]) -> std::process::Output {
    let child = std::env::current_exe().unwrap();
    Command::new("strace")
        .args(["-f", "-qq", "-e", "signal=none"])
        .args(options)
        .arg(child)
        .args(["--exact", "group::host_that_publishes_until_it_is_killed", "--ignored", "--nocapture"])
        .env(ORDERS, format!("{} {epochs}", path_str(dir)))
        .output()
        .expect("strace")
}

/// The steps that the child reported as published.
fn reported(dir: &Path) -> u64 {
    let bytes = fs::read(dir.join("report")).unwrap_or_default();
    bytes.as_chunks::<8>().0.last().map_or(0, |number| u64::from_le_bytes(*number))
}

/// What is published has all that was said to be, in order, and so has what the host goes on with; it then publishes all.
fn assert_goes_on(paths: &[PathBuf; 2], tier: &Path, dir: &Path, what: &str) {
    let is_published = repository_dir(&paths[0]).join("head-000000000002").exists();
    let before = if is_published { published_steps(paths) } else { 0 };
    assert!(before >= reported(dir), "{what}: {before} of {}", reported(dir));
    let host = Host::new(paths, tier);
    let has = host.has();
    assert!(has >= before, "{what}: {has} of {before}");
    host.steps(has + 1..=has + 3);
    host.sync();
    assert_eq!(published_steps(paths), has + 3, "{what}");
    host.end();
}

#[test]
fn a_host_that_is_killed_at_any_change_of_names_has_and_publishes_states_of_both_disks_alone() {
    assert_survives_kills(images, 6);
}

#[test]
fn a_host_of_a_far_repository_that_is_killed_publishes_states_of_both_disks_alone() {
    let far_images = |dir: &Path| {
        make_far(dir);
        images(dir)
    };
    assert_survives_kills(far_images, 3);
}

/// Kills hosts at so many calls of each kind.
fn assert_survives_kills(images: impl Fn(&Path) -> [PathBuf; 2], kills: usize) {
    const EPOCHS: u64 = 4;
    let whole = scratch();
    images(whole.path());
    let log = whole.path().join("calls");
    let trace = format!("trace={}", NAMING.join(","));
    let output = strace(whole.path(), EPOCHS, &["-e", &trace, "-o", path_str(&log)]);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let calls = fs::read_to_string(&log).unwrap();
    let mut killed = 0;
    for name in NAMING {
        // They are counted for each thread: the first that makes so many is killed.
        let mut counts = BTreeMap::<&str, usize>::new();
        for line in calls.lines().filter(|line| line.contains(&format!(" {name}("))) {
            *counts.entry(line.split(' ').next().unwrap_or_default()).or_default() += 1;
        }
        let count = counts.into_values().max().unwrap_or_default();
        for number in (1..=count).step_by((count / kills).max(1)) {
            let (dir, other) = (scratch(), scratch());
            let paths = images(dir.path());
            let inject = format!("inject={name}:signal=KILL:when={number}");
            let trace = format!("trace={name}");
            let output = strace(dir.path(), EPOCHS, &["-e", &trace, "-e", &inject, "-o", "/dev/null"]);
            killed += usize::from(!output.status.success());
            let what = format!("killed at {name} {number}");
            let tier = dir.path().join("tier");
            if number % 2 == 0 && repository_dir(&paths[0]).join("head-000000000002").exists() {
                take_over(&paths[number % 4 / 2], other.path()).unwrap();
                assert_goes_on(&paths, other.path(), dir.path(), &what);
            } else {
                assert_goes_on(&paths, &tier, dir.path(), &what);
            }
        }
    }
    assert!(killed > kills * 4 / 3, "{killed} were killed");
}

#[test]
fn a_host_whose_repository_fails_once_at_any_operation_publishes_states_of_both_disks_alone() {
    // By which the repository gives names, takes them away, flushes, and is listed and entered.
    let calls = ["linkat", "renameat", "fsync", "openat"];
    for (name, number) in calls.into_iter().flat_map(|name| [1, 4, 8].map(|number| (name, number))) {
        let dir = scratch();
        let paths = images(dir.path());
        // The group is made first: what fails there is refused, not tried again.
        Host::new(&paths, &dir.path().join("tier")).end();
        let inject = format!("inject={name}:error=EIO:when={number}");
        let (trace, repository) = (format!("trace={name}"), dir.path().join("guest.tier"));
        let options = ["-e", &trace, "-e", &inject, "-P", path_str(&repository), "-o", "/dev/null"];
        let output = strace(dir.path(), 3, &options);
        let what = format!("{name} {number} failed, and the child {:?}", output.status);
        assert_goes_on(&paths, &dir.path().join("tier"), dir.path(), &what);
    }
}
