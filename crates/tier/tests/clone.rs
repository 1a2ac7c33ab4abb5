//! A clone of a published base becomes a tiered disk, which shares the base's layers.

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
use vmstrata_tier::{Error, Place, TierOptions, Tiered, repository_of};

/// What the child finds its orders in: the clone, and how long it lives, in microseconds.
const ORDERS: &str = "VMSTRATA_TEST_CLONE_CHILD";
/// Writes that the base has, and the clone.
const BASE: u64 = 10;
const CLONE: u64 = 20;

/// A base, published in two layers.
fn base(dir: &Path) -> PathBuf {
    let path = image_at(&dir.join("golden.qcow2"));
    let (disk, tiered) = host(&path, &dir.join("tier")).unwrap();
    (1..=BASE).for_each(|number| write(&disk, place(number), &block(number)).unwrap());
    sync(&tiered).unwrap();
    assert!(tiered.stop(soon()));
    path
}

/// A clone of the base as it is published, with writes of its own.
fn clone_of(base: &Path) -> PathBuf {
    let (path, head) = (base.with_file_name("desk.qcow2"), newest_of(base));
    let newest = repository_of(base).join(head.epoch.disks[0].newest().layer_name().as_str());
    create(&path, &CreateOptions::overlay(newest, SIZE, true)).unwrap();
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

/// Attaches the clone, and is killed at some time.
#[test]
#[ignore = "the process that the other test starts and kills"]
fn child_that_attaches_a_clone_until_it_is_killed() {
    let Ok(orders) = std::env::var(ORDERS) else { return };
    let (path, lifetime) = orders.split_once(' ').unwrap();
    let lifetime = Duration::from_micros(lifetime.parse().unwrap());
    std::thread::scope(|scope| {
        scope.spawn(move || {
            std::thread::sleep(lifetime);
            rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::KILL).unwrap();
        });
        let _tiered = host_clone(Path::new(path)).unwrap();
        loop {
            std::thread::park();
        }
    });
}

#[test]
fn a_process_that_is_killed_while_it_attaches_a_clone_loses_nothing() {
    for_seeds(16, |seed| {
        let dir = scratch();
        let desk = clone_of(&base(dir.path()));
        let lifetime = random("clone", seed).random_range(1_000..60_000_u64);
        let child = Command::new(std::env::current_exe().unwrap())
            .args([
                "--exact",
                "clone::child_that_attaches_a_clone_until_it_is_killed",
                "--include-ignored",
                "--nocapture",
            ])
            .env(ORDERS, format!("{} {lifetime}", path_str(&desk)))
            .output()
            .unwrap();
        assert_eq!(child.status.signal(), Some(9), "{}", String::from_utf8_lossy(&child.stderr));
        assert_eq!(writes_of(&content(&desk, "qcow2")), CLONE, "as stock tools read it, after {lifetime} us");
        let (disk, tiered) = host_clone(&desk).unwrap();
        assert_eq!(number_of(&disk), CLONE, "after {lifetime} us");
        write(&disk, place(CLONE + 1), &block(CLONE + 1)).unwrap();
        sync(&tiered).unwrap();
        assert_eq!(writes_of(&published(&newest_of(&desk), &desk)), CLONE + 1);
        assert!(tiered.stop(soon()));
    });
}
