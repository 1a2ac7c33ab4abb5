//! A clone of a published base becomes a tiered disk, which shares the base's layers, and stands on a newer version of it later.

use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::os::unix::process::ExitStatusExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use crate::common::flat::{read, write};
use crate::common::stock::{content, path_str, qemu_img};
use crate::common::{for_seeds, random, scratch, small_resources, wait_until};
use crate::tier_support::{
    SIZE, block, host, image_at, newest_of, place, published, soon, sync, take_over, writes_of,
};
use rand::Rng as _;
use vmstrata_disk::snapshot::SnapshotInfo;
use vmstrata_disk::{CreateOptions, Disk, OpenOptions, ResourceOptions, Resources, create};
use vmstrata_repo::DirectoryRepository;
use vmstrata_tier::{
    Detach, Draft, Error, Head, Pin, Place, Purpose, Rebasing, TierOptions, Tiered, find_snapshot,
    is_object_name, rebase, repository_of,
};

/// What the child finds its orders in: what it does, the clone, and how long it lives, in microseconds.
const ORDERS: &str = "VMSTRATA_TEST_CLONE_CHILD";
/// Writes that the base has, the clone, the base's next version, and the clone as a tiered disk.
const BASE: u64 = 10;
const CLONE: u64 = 20;
const NEXT: u64 = 25;
const TIERED: u64 = 30;

/// A base, published in two layers.
fn base(dir: &Path) -> PathBuf {
    let path = image_at(&dir.join("golden.qcow2"));
    publish(&path, 1, BASE);
    path
}

/// The base with these writes, too.
fn publish(base: &Path, first: u64, last: u64) {
    let (disk, tiered) = host(base, &base.with_file_name("tier")).unwrap();
    (first..=last).for_each(|number| write(&disk, place(number), &block(number)).unwrap());
    sync(&tiered).unwrap();
    assert!(tiered.stop(soon()));
}

/// The path of the newest layer of a disk.
fn newest_layer(path: &Path) -> PathBuf {
    repository_of(path).join(newest_of(path).epoch.disks[0].newest().layer_name().as_str())
}

/// A clone of the base as it is published, with writes of its own.
fn clone_of(base: &Path) -> PathBuf {
    let path = base.with_file_name("desk.qcow2");
    create(&path, &CreateOptions::overlay(newest_layer(base), SIZE, true)).unwrap();
    let disk = Disk::open(&path, &open_options(&path), &small_resources(None)).unwrap();
    (BASE + 1..=CLONE).for_each(|number| write(&disk, place(number), &block(number)).unwrap());
    disk.close().unwrap();
    path
}

fn open_options(path: &Path) -> OpenOptions {
    OpenOptions { allow_backing: vec![path.parent().unwrap().to_owned()], ..OpenOptions::default() }
}

fn host_clone(path: &Path) -> Result<(Arc<Disk>, Tiered), Error> {
    let options = TierOptions { window: Duration::from_secs(600), ..TierOptions::default() };
    let resources = Resources::new(ResourceOptions::default());
    let place = Place::of(path, &path.with_file_name("tier"))?;
    let (mut disks, tiered) = Tiered::open(&place, options, &[open_options(path)], &resources)?;
    Ok((disks.remove(0), tiered))
}

/// Has a clone that is not served stand on the base as it is published now.
fn rebase_on(desk: &Path, base: &Path) -> Result<(), Error> {
    let place = Place::of(desk, &desk.with_file_name("tier"))?;
    let resources = Resources::new(ResourceOptions::default());
    rebase(&place, &newest_layer(base), &open_options(desk), &resources, |draft| {
        make(draft);
        Ok(())
    })
}

fn make(draft: Draft<'_>) {
    let [disk, onto, path] = [draft.disk, draft.onto, draft.path].map(path_str);
    qemu_img(&["create", "-q", "-f", "qcow2", "-F", "qcow2", "-b", disk, path]);
    // Copies what differs.
    qemu_img(&["rebase", "-F", "qcow2", "-b", onto, path]);
}

/// Has a clone in use begin to stand on the base as it is published now. The draft is made.
fn begin_on(tiered: &Tiered, base: &Path) -> Rebasing {
    let rebasing = tiered.begin_rebase(&newest_layer(base)).unwrap();
    make(rebasing.draft());
    rebasing
}

fn finish(mut rebasing: Rebasing) {
    rebasing.ship().unwrap();
    wait_until("it is published", || rebasing.is_published().unwrap());
}

fn writes(disk: &Disk, numbers: std::ops::RangeInclusive<u64>) {
    numbers.for_each(|number| write(disk, place(number), &block(number)).unwrap());
}

fn repository(disk: &Path) -> DirectoryRepository {
    DirectoryRepository::open(&repository_of(disk), is_object_name).unwrap()
}

/// How many pins there are for hosts' copies of a disk.
fn copy_pins(disk: &Path) -> usize {
    let pins = Pin::all(&repository(disk)).unwrap();
    pins.iter().filter(|pin| matches!(pin.purpose, Purpose::Copy { .. })).count()
}

/// How many layers an epoch of the clone has beside those of the base, all of which it has.
fn own_layers(head: &Head, base: &Path) -> usize {
    let (base, own) = (newest_of(base), &head.epoch.disks[0].objects);
    let base = &base.epoch.disks[0].objects;
    assert_eq!(own[..base.len()], base[..]);
    own.len() - base.len()
}

fn number_of(disk: &Disk) -> u64 {
    writes_of(&read(disk, 0, SIZE as usize).unwrap())
}

#[test]
fn a_clone_shares_the_layers_of_its_base_and_outlives_it() {
    let dir = scratch();
    let golden = base(dir.path());
    let desk = clone_of(&golden);
    let (disk, tiered) = host_clone(&desk).unwrap();
    assert_eq!(number_of(&disk), CLONE);
    let (base, own) = (newest_of(&golden), newest_of(&desk));
    let (base, own) = (&base.epoch.disks[0].objects, &own.epoch.disks[0].objects);
    assert_eq!((&own[..base.len()], own.len()), (&base[..], base.len() + 1));
    let inode = |image: &Path, id: &str| fs::metadata(repository_of(image).join(id)).unwrap().ino();
    for object in base {
        for name in [object.id.layer_name(), object.id.companion_name()] {
            assert_eq!(inode(&golden, name.as_str()), inode(&desk, name.as_str()));
        }
    }
    assert!(own[base.len()].bytes < 1 << 20, "it has the clone's writes alone: {own:?}");
    assert_eq!(writes_of(&published(&newest_of(&desk), &desk)), CLONE);

    write(&disk, place(CLONE + 1), &block(CLONE + 1)).unwrap();
    sync(&tiered).unwrap();
    assert!(tiered.stop(soon()));
    disk.close().unwrap();
    drop((disk, tiered));
    fs::remove_dir_all(repository_of(&golden)).unwrap();
    fs::remove_file(&golden).unwrap();
    assert_eq!(writes_of(&content(&desk, "qcow2")), CLONE + 1, "as stock tools read it");
    let other = dir.path().join("other");
    take_over(&desk, &other).unwrap();
    let (disk, tiered) = host(&desk, &other).unwrap();
    assert_eq!(number_of(&disk), CLONE + 1);
    assert!(tiered.stop(soon()));
}

#[test]
fn a_clone_that_would_lose_something_is_refused_and_stays_as_it_is() {
    let dir = scratch();
    let desk = clone_of(&base(dir.path()));
    qemu_img(&["snapshot", "-c", "inside", path_str(&desk)]);
    let refused = host_clone(&desk).unwrap_err().to_string();
    assert!(refused.contains("internal snapshots"), "{refused}");
    qemu_img(&["snapshot", "-d", "inside", path_str(&desk)]);
    let other = desk.with_file_name("other.qcow2");
    fs::rename(&desk, &other).unwrap();
    qemu_img(&["create", "-q", "-f", "qcow2", "-F", "qcow2", "-b", path_str(&other), path_str(&desk)]);
    let refused = host_clone(&desk).unwrap_err().to_string();
    assert!(refused.contains("flatten the image first"), "{refused}");
    assert_eq!(writes_of(&content(&desk, "qcow2")), CLONE);
}

/// Tools may change the layers of an ordinary image.
#[test]
fn a_detached_clone_keeps_no_layer_of_its_base() {
    let dir = scratch();
    let golden = base(dir.path());
    let desk = clone_of(&golden);
    let (disk, tiered) = host_clone(&desk).unwrap();
    assert!(tiered.stop(soon()));
    disk.close().unwrap();
    drop((disk, tiered));
    let place = Place::of(&desk, &desk.with_file_name("tier")).unwrap();
    let resources = Resources::new(ResourceOptions::default());
    let detach = |flatten| Detach::begin(&place, flatten, &open_options(&desk), &resources);
    assert!(matches!(detach(false), Err(Error::Shared { .. })));
    detach(true).unwrap().run().unwrap();
    assert_eq!(writes_of(&content(&desk, "qcow2")), CLONE);
    assert!(!repository_of(&desk).exists());
    assert_eq!(writes_of(&content(&golden, "qcow2")), BASE);
    assert_eq!(writes_of(&published(&newest_of(&golden), &golden)), BASE);
}

/// A clone with writes that are not published, and its base with its next version.
fn clone_beside_next(dir: &Path) -> (PathBuf, PathBuf) {
    let golden = base(dir);
    let desk = clone_of(&golden);
    let (disk, tiered) = host_clone(&desk).unwrap();
    (CLONE + 1..=TIERED).for_each(|number| write(&disk, place(number), &block(number)).unwrap());
    assert!(tiered.stop(soon()));
    disk.close().unwrap();
    publish(&golden, BASE + 1, NEXT);
    (golden, desk)
}

#[test]
fn a_clone_stands_on_a_newer_version_of_its_base() {
    let dir = scratch();
    let (golden, desk) = clone_beside_next(dir.path());
    assert_eq!(writes_of(&published(&newest_of(&desk), &desk)), CLONE, "the rest is on the host");
    rebase_on(&desk, &golden).unwrap();
    assert_eq!(writes_of(&published(&newest_of(&desk), &desk)), TIERED);
    assert_eq!(writes_of(&content(&desk, "qcow2")), TIERED, "as stock tools read it");
    let (base, own) = (newest_of(&golden), newest_of(&desk));
    let (base, own) = (&base.epoch.disks[0].objects, &own.epoch.disks[0].objects);
    assert_eq!((&own[..base.len()], own.len()), (&base[..], base.len() + 1));
    let copies = fs::read_dir(dir.path().join("tier")).unwrap();
    let branches =
        copies.filter(|copy| copy.as_ref().unwrap().file_name().to_str().unwrap().contains(".branch-"));
    assert_eq!(branches.count(), 0, "the copy that the host had before is gone");
    let (disk, tiered) = host_clone(&desk).unwrap();
    assert_eq!(number_of(&disk), TIERED);
    write(&disk, place(TIERED + 1), &block(TIERED + 1)).unwrap();
    sync(&tiered).unwrap();
    assert!(tiered.stop(soon()));
    assert_eq!(writes_of(&content(&desk, "qcow2")), TIERED + 1);
}

/// A clone in use with writes that are not published, in an hour in which nothing is, and its base with its next version.
fn held_beside_next(dir: &Path) -> (PathBuf, PathBuf, Arc<Disk>, Tiered) {
    let (golden, desk) = clone_beside_next(dir);
    let (disk, tiered) = host_clone(&desk).unwrap();
    tiered.hold(Some(TierOptions::HOLD_MAX)).unwrap();
    (golden, desk, disk, tiered)
}

/// Publishes the rest of a clone that has so many writes. So says the next process on this host, and another host.
fn check_to_the_end(desk: &Path, (disk, tiered): (Arc<Disk>, Tiered), count: u64) {
    assert_eq!(number_of(&disk), count);
    sync(&tiered).unwrap();
    assert_eq!(writes_of(&published(&newest_of(desk), desk)), count);
    assert_eq!(writes_of(&content(desk, "qcow2")), count, "as stock tools read it");
    assert!(tiered.stop(soon()));
    disk.close().unwrap();
    drop((disk, tiered));
    let (disk, tiered) = host_clone(desk).unwrap();
    assert_eq!(number_of(&disk), count);
    writes(&disk, count + 1..=count + 1);
    sync(&tiered).unwrap();
    assert!(tiered.stop(soon()));
    disk.close().unwrap();
    drop((disk, tiered));
    let other = desk.with_file_name("other");
    take_over(desk, &other).unwrap();
    let (disk, tiered) = host(desk, &other).unwrap();
    assert_eq!(number_of(&disk), count + 1);
    assert!(tiered.stop(soon()));
}

#[test]
fn a_clone_in_use_ships_what_a_newer_version_of_its_base_has_not() {
    let dir = scratch();
    let (golden, desk, disk, tiered) = held_beside_next(dir.path());
    let rebasing = begin_on(&tiered, &golden);
    writes(&disk, TIERED + 1..=TIERED + 5);
    assert_eq!(writes_of(&published(&newest_of(&desk), &desk)), CLONE, "nothing is published meanwhile");
    finish(rebasing);
    let head = newest_of(&desk);
    assert_eq!(own_layers(&head, &golden), 1);
    assert_eq!(writes_of(&published(&head, &desk)), TIERED, "as it was when it began");
    assert_eq!(writes_of(&content(&desk, "qcow2")), TIERED, "its path leads there");
    let below = repository_of(&desk).join(head.epoch.disks[0].newest().layer_name().as_str());
    assert!(disk.layers().iter().any(|layer| layer.path == below), "this host stands on it");
    assert_eq!(number_of(&disk), TIERED + 5);
    wait_until("one pin is left", || copy_pins(&desk) == 1);
    assert!(tiered.status().window.held_until_ns.is_some());
    check_to_the_end(&desk, (disk, tiered), TIERED + 5);
}

#[test]
fn what_a_clone_publishes_while_it_is_rebased_lies_above() {
    let dir = scratch();
    let (golden, desk) = clone_beside_next(dir.path());
    let (disk, tiered) = host_clone(&desk).unwrap();
    let rebasing = begin_on(&tiered, &golden);
    for number in TIERED + 1..=TIERED + 20 {
        writes(&disk, number..=number);
        sync(&tiered).unwrap();
        assert_eq!(writes_of(&published(&newest_of(&desk), &desk)), number);
    }
    let before = newest_of(&desk).epoch;
    finish(rebasing);
    let head = newest_of(&desk);
    assert_eq!((own_layers(&head, &golden), head.epoch.number), (2, before.number));
    assert_eq!(writes_of(&published(&head, &desk)), TIERED + 20);
    wait_until("one pin is left", || copy_pins(&desk) == 1);
    check_to_the_end(&desk, (disk, tiered), TIERED + 20);
}

#[test]
fn a_rebase_that_is_given_up_leaves_a_clone_as_it_is_and_can_be_made_again() {
    let dir = scratch();
    let (golden, desk, disk, tiered) = held_beside_next(dir.path());
    let draft = Place::of(&desk, &dir.path().join("tier")).unwrap().local.join("rebased.qcow2");
    let before = newest_of(&desk);
    for ships in [false, true] {
        let mut rebasing = begin_on(&tiered, &golden);
        assert!(draft.exists());
        if ships {
            let [repository, away] = [repository_of(&desk), dir.path().join("away")];
            fs::rename(&repository, &away).unwrap();
            rebasing.ship().unwrap_err();
            fs::rename(&away, &repository).unwrap();
        }
        drop(rebasing);
        wait_until("one pin is left", || copy_pins(&desk) == 1);
        assert!(!draft.exists());
        assert_eq!(newest_of(&desk), before);
    }
    finish(begin_on(&tiered, &golden));
    assert_eq!(own_layers(&newest_of(&desk), &golden), 1);
    check_to_the_end(&desk, (disk, tiered), TIERED);
}

#[test]
fn a_snapshot_that_waits_for_an_epoch_before_a_rebase_gets_its_name() {
    let dir = scratch();
    let (golden, desk, disk, tiered) = held_beside_next(dir.path());
    tiered.cut_for(&SnapshotInfo { name: "mon".to_owned(), taken_ns: 1, ..SnapshotInfo::default() }).unwrap();
    writes(&disk, TIERED + 1..=TIERED + 1);
    finish(begin_on(&tiered, &golden));
    wait_until("it has its name", || tiered.status().pending.is_empty());
    let pin = find_snapshot(&repository(&desk), "mon", 1).unwrap();
    let layer = repository_of(&desk).join(pin.epoch.disks[0].newest().layer_name().as_str());
    assert_eq!(writes_of(&content(&layer, "qcow2")), TIERED);
    check_to_the_end(&desk, (disk, tiered), TIERED + 1);
}

#[test]
fn a_clone_with_snapshots_that_wait_is_rebased_in_use_only() {
    let dir = scratch();
    let (golden, desk, disk, tiered) = held_beside_next(dir.path());
    tiered.cut_for(&SnapshotInfo { name: "mon".to_owned(), taken_ns: 1, ..SnapshotInfo::default() }).unwrap();
    assert!(tiered.stop(soon()));
    disk.close().unwrap();
    drop((disk, tiered));
    assert!(matches!(rebase_on(&desk, &golden), Err(Error::NotAllPublished { .. })));
    let (disk, tiered) = host_clone(&desk).unwrap();
    finish(begin_on(&tiered, &golden));
    find_snapshot(&repository(&desk), "mon", 1).unwrap();
    check_to_the_end(&desk, (disk, tiered), TIERED);
}

/// Does what it is asked to, and is killed at some time.
#[test]
#[ignore = "the process that the other tests start and kill"]
fn child_that_is_killed() {
    let Ok(orders) = std::env::var(ORDERS) else { return };
    let [what, path, lifetime] = orders.split(' ').collect::<Vec<_>>()[..] else { panic!("{orders}") };
    let (path, lifetime) = (Path::new(path), Duration::from_micros(lifetime.parse().unwrap()));
    std::thread::scope(|scope| {
        scope.spawn(move || {
            std::thread::sleep(lifetime);
            rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::KILL).unwrap();
        });
        let golden = path.with_file_name("golden.qcow2");
        let _tiered = match what {
            "attach" => Some(host_clone(path).unwrap()),
            "held" | "served" => {
                let (disk, tiered) = host_clone(path).unwrap();
                if what == "held" {
                    tiered.hold(Some(TierOptions::HOLD_MAX)).unwrap();
                }
                let rebasing = begin_on(&tiered, &golden);
                for number in TIERED + 1..=TIERED + 4 {
                    writes(&disk, number..=number);
                    if what == "served" {
                        sync(&tiered).unwrap();
                    }
                }
                finish(rebasing);
                Some((disk, tiered))
            }
            _ => {
                rebase_on(path, &golden).unwrap();
                None
            }
        };
        loop {
            std::thread::park();
        }
    });
}

fn kill_while(what: &str, desk: &Path, lifetime: u64) {
    let child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "clone::child_that_is_killed", "--include-ignored", "--nocapture"])
        .env(ORDERS, format!("{what} {} {lifetime}", path_str(desk)))
        .output()
        .unwrap();
    assert_eq!(child.status.signal(), Some(9), "{}", String::from_utf8_lossy(&child.stderr));
}

#[test]
fn a_process_that_is_killed_while_it_attaches_a_clone_loses_nothing() {
    for_seeds(16, |seed| {
        let dir = scratch();
        let desk = clone_of(&base(dir.path()));
        let lifetime = random("clone", seed).random_range(1_000..120_000_u64);
        kill_while("attach", &desk, lifetime);
        assert_eq!(writes_of(&content(&desk, "qcow2")), CLONE, "as stock tools read it, after {lifetime} us");
        let (disk, tiered) = host_clone(&desk).unwrap();
        assert_eq!(number_of(&disk), CLONE, "after {lifetime} us");
        write(&disk, place(CLONE + 1), &block(CLONE + 1)).unwrap();
        sync(&tiered).unwrap();
        assert_eq!(writes_of(&published(&newest_of(&desk), &desk)), CLONE + 1);
        assert!(tiered.stop(soon()));
    });
}

#[test]
fn a_process_that_is_killed_while_it_rebases_a_clone_loses_nothing() {
    for_seeds(16, |seed| {
        let dir = scratch();
        let (_, desk) = clone_beside_next(dir.path());
        let lifetime = random("rebase", seed).random_range(1_000..400_000_u64);
        kill_while("rebase", &desk, lifetime);
        let opened = match host_clone(&desk) {
            // It was published, and its copy not made yet.
            Err(Error::OldCopy { .. }) => {
                take_over(&desk, &desk.with_file_name("tier")).unwrap();
                host_clone(&desk)
            }
            opened => opened,
        };
        let (disk, tiered) = opened.unwrap();
        assert_eq!(number_of(&disk), TIERED, "after {lifetime} us");
        sync(&tiered).unwrap();
        assert_eq!(writes_of(&published(&newest_of(&desk), &desk)), TIERED);
        assert!(tiered.stop(soon()));
    });
}

/// At every moment the repository has a whole state, and this host what was written to it.
#[test]
fn a_process_that_is_killed_while_it_rebases_a_clone_in_use_loses_nothing() {
    for_seeds(24, |seed| {
        let dir = scratch();
        let (_, desk) = clone_beside_next(dir.path());
        let mut random = random("rebase in use", seed);
        let what = ["held", "served"][random.random_range(0..2)];
        let lifetime = random.random_range(20_000..600_000_u64);
        kill_while(what, &desk, lifetime);
        let on_nas = writes_of(&published(&newest_of(&desk), &desk));
        assert!(writes_of(&content(&desk, "qcow2")) <= on_nas, "its path leads to a whole state");
        let (disk, tiered) = host_clone(&desk).unwrap();
        let count = number_of(&disk);
        assert!(count >= TIERED.max(on_nas), "{what}, after {lifetime} us: {count}, {on_nas} published");
        wait_until("one pin is left", || copy_pins(&desk) == 1);
        check_to_the_end(&desk, (disk, tiered), count);
    });
}
