//! A disk in use becomes a tiered one, whatever happens to its host on the way.

use std::fs;
use std::io::Write as _;
use std::os::unix::process::ExitStatusExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use crate::common::flat::{read, write};
use crate::common::stock::{content, path_str, qemu_img};
use crate::common::{for_seeds, random, scratch, small_resources};
use crate::tier_support::{
    SIZE, block, host, host_with, image, newest_of, place, published, soon, sync, take_over, writes_of,
};
use rand::Rng as _;
use vmstrata_disk::{Disk, OpenOptions, Resources};
use vmstrata_tier::{Attaching, Error, Place, TierOptions, Tiered};

/// What the child finds its orders in: the image, and how long it lives, in microseconds.
const ORDERS: &str = "VMSTRATA_TEST_ATTACH_CHILD";

fn begin(disk: &Arc<Disk>, path: &Path, tier: &Path, resources: &Arc<Resources>) -> Result<Attaching, Error> {
    let place = Place::of(path, tier)?;
    let options = TierOptions { window: Duration::from_secs(600), ..TierOptions::default() };
    Attaching::begin(&place, options, &OpenOptions::default(), disk, resources)
}

fn finish(mut attaching: Attaching) -> Tiered {
    while attaching.bytes().1 > 0 {
        attaching.read(64 << 10).unwrap();
    }
    attaching.publish().unwrap();
    attaching.finish().unwrap()
}

fn number_of(disk: &Disk) -> u64 {
    writes_of(&read(disk, 0, SIZE as usize).unwrap())
}

#[test]
fn a_disk_in_use_becomes_a_tiered_one_and_its_guest_goes_on() {
    let (nas, tier) = (scratch(), scratch());
    let (path, resources) = (image(nas.path()), small_resources(None));
    let disk = Disk::open(&path, &OpenOptions::default(), &resources).unwrap();
    let is_over = AtomicBool::new(false);
    let (tiered, written) = std::thread::scope(|scope| {
        let guest = scope.spawn(|| {
            let mut number = 0;
            while !is_over.load(Ordering::Relaxed) {
                number += 1;
                write(&disk, place(number), &block(number)).unwrap();
            }
            number
        });
        let attaching = begin(&disk, &path, tier.path(), &resources).unwrap();
        let at_once = writes_of(&content(&path, "qcow2"));
        let tiered = finish(attaching);
        assert_eq!(published(&newest_of(&path), &path), content(&path, "qcow2"));
        assert_eq!(writes_of(&content(&path, "qcow2")), at_once, "nothing else is published yet");
        is_over.store(true, Ordering::Relaxed);
        (tiered, guest.join().unwrap())
    });
    assert!(disk.path().starts_with(tier.path()), "{:?}", disk.path());
    assert_eq!(number_of(&disk), written);
    sync(&tiered).unwrap();
    assert_eq!(writes_of(&published(&newest_of(&path), &path)), written);
    let more = written + 10;
    (written + 1..=more).for_each(|number| write(&disk, place(number), &block(number)).unwrap());
    sync(&tiered).unwrap();
    assert_eq!(number_of(&disk), more);
    assert!(tiered.stop(soon()));
    disk.close().unwrap();
    drop((disk, tiered, resources));
    let (disk, tiered) = host(&path, tier.path()).unwrap();
    assert_eq!(number_of(&disk), more);
    assert!(tiered.stop(soon()));
}

#[test]
fn what_cannot_be_attached_is_refused_and_stays_as_it_is() {
    let (nas, tier) = (scratch(), scratch());
    let (base, resources) = (image(nas.path()), small_resources(None));
    let path = nas.path().join("overlay.qcow2");
    let on_base = ["create", "-q", "-f", "qcow2", "-F", "qcow2", "-b", path_str(&base), path_str(&path)];
    qemu_img(&on_base);
    let disk = Disk::open(&path, &OpenOptions::default(), &resources).unwrap();
    let refused = begin(&disk, &path, tier.path(), &resources).unwrap_err().to_string();
    assert!(refused.contains("flatten the image first"), "{refused}");
    disk.close().unwrap();
    drop(disk);
    fs::remove_file(&path).unwrap();

    let disk = Disk::open(&base, &OpenOptions::default(), &resources).unwrap();
    let tiered = finish(begin(&disk, &base, tier.path(), &resources).unwrap());
    let refused = begin(&disk, &base, tier.path(), &resources).unwrap_err().to_string();
    assert!(refused.contains("is not in the repository") || refused.contains("another process"), "{refused}");
    write(&disk, place(1), &block(1)).unwrap();
    sync(&tiered).unwrap();
    assert!(tiered.stop(soon()));
}

/// The disk has moved by then, and must not be where nobody knows of it.
#[test]
fn a_repository_that_fails_once_the_disk_has_moved_is_tried_again() {
    let (nas, tier) = (scratch(), scratch());
    let (path, resources) = (image(nas.path()), small_resources(None));
    let disk = Disk::open(&path, &OpenOptions::default(), &resources).unwrap();
    write(&disk, place(1), &block(1)).unwrap();
    let mut attaching = begin(&disk, &path, tier.path(), &resources).unwrap();
    let layer = disk.layers()[0].path.clone();
    let away = layer.with_extension("away");
    fs::rename(&layer, &away).unwrap();
    assert!(attaching.read(1 << 20).is_err() && attaching.bytes().1 > 0);
    write(&disk, place(2), &block(2)).unwrap();
    fs::rename(&away, &layer).unwrap();
    let tiered = finish(attaching);
    sync(&tiered).unwrap();
    assert_eq!(writes_of(&published(&newest_of(&path), &path)), 2);
    assert!(tiered.stop(soon()));
}

/// The host that takes it over has it as it was when it moved.
#[test]
fn a_host_that_dies_while_it_attaches_a_disk_is_followed_by_another() {
    let (nas, tier, other) = (scratch(), scratch(), scratch());
    let (path, resources) = (image(nas.path()), small_resources(None));
    let disk = Disk::open(&path, &OpenOptions::default(), &resources).unwrap();
    (1..=10).for_each(|number| write(&disk, place(number), &block(number)).unwrap());
    let attaching = begin(&disk, &path, tier.path(), &resources).unwrap();
    (11..=20).for_each(|number| write(&disk, place(number), &block(number)).unwrap());
    disk.close().unwrap();
    drop((attaching, disk, resources));
    assert!(matches!(host(&path, other.path()), Err(Error::Fenced { .. })));
    take_over(&path, other.path()).unwrap();
    let (disk, tiered) = host(&path, other.path()).unwrap();
    assert_eq!(number_of(&disk), 10);
    assert!(tiered.stop(soon()));
    assert!(matches!(host(&path, tier.path()), Err(Error::Fenced { .. })), "its copy is a branch");
}

/// Writes numbered blocks, says which have completed, attaches its disk, and is killed at some time.
#[test]
#[ignore = "the process that the other test starts and kills"]
fn child_that_attaches_until_it_is_killed() {
    let Ok(orders) = std::env::var(ORDERS) else { return };
    let (path, lifetime) = orders.split_once(' ').unwrap();
    let (path, lifetime) = (PathBuf::from(path), Duration::from_micros(lifetime.parse().unwrap()));
    let resources = small_resources(Some(&path.with_file_name("journals")));
    let disk = Disk::open(&path, &OpenOptions::default(), &resources).unwrap();
    let mut reported = fs::File::create(path.with_file_name("reported")).unwrap();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for number in 1.. {
                write(&disk, place(number), &block(number)).unwrap();
                reported.write_all(b".").unwrap();
            }
        });
        scope.spawn(move || {
            std::thread::sleep(lifetime);
            rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::KILL).unwrap();
        });
        let _tiered = finish(begin(&disk, &path, &path.with_file_name("tier"), &resources).unwrap());
        loop {
            std::thread::park();
        }
    });
}

#[test]
fn a_process_that_is_killed_while_it_attaches_a_disk_loses_nothing() {
    for_seeds(12, |seed| {
        let dir = scratch();
        let path = image(dir.path());
        let lifetime = random("attach", seed).random_range(1_000..120_000_u64);
        let child = Command::new(std::env::current_exe().unwrap())
            .args([
                "--exact",
                "attach::child_that_attaches_until_it_is_killed",
                "--include-ignored",
                "--nocapture",
            ])
            .env(ORDERS, format!("{} {lifetime}", path_str(&path)))
            .output()
            .unwrap();
        assert_eq!(child.status.signal(), Some(9), "{}", String::from_utf8_lossy(&child.stderr));
        let reported = fs::read(path.with_file_name("reported")).unwrap_or_default().len() as u64;
        let (place, window) = (Place::of(&path, &path.with_file_name("tier")), Duration::from_secs(600));
        let resources = small_resources(Some(&path.with_file_name("journals")));
        let options = TierOptions { window, ..TierOptions::default() };
        let opened = Tiered::open(&place.unwrap(), options, &[OpenOptions::default()], &resources);
        let (mut disks, tiered) = opened.unwrap();
        let disk = disks.remove(0);
        let found = number_of(&disk);
        assert!(found == reported || found == reported + 1, "{found} of {reported} after {lifetime} us");
        sync(&tiered).unwrap();
        assert_eq!(writes_of(&published(&newest_of(&path), &path)), found);
        assert!(tiered.stop(soon()));
        disk.close().unwrap();
        drop((disk, tiered, resources));
        let (_disk, tiered) = host_with(&path, &path.with_file_name("tier"), window).unwrap();
        assert!(tiered.stop(soon()));
    });
}
