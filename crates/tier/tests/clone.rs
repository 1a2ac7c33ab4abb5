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
use crate::common::{for_seeds, random, scratch, small_resources};
use crate::tier_support::{
    SIZE, block, host, image_at, newest_of, place, published, soon, sync, take_over, writes_of,
};
use rand::Rng as _;
use vmstrata_disk::{CreateOptions, Disk, OpenOptions, ResourceOptions, Resources, create};
use vmstrata_tier::{Detach, Error, Place, TierOptions, Tiered, rebase, repository_of};

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
        let [disk, onto, path] = [draft.disk, draft.onto, draft.path].map(path_str);
        qemu_img(&["convert", "-O", "qcow2", "-B", onto, "-F", "qcow2", disk, path]);
        Ok(())
    })
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
        let _tiered = match what {
            "attach" => Some(host_clone(path).unwrap()),
            _ => {
                rebase_on(path, &path.with_file_name("golden.qcow2")).unwrap();
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
