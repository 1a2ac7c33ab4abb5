//! A disk goes from one host to another while both run: one of them has it, whatever comes in between.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread;

use crate::common::flat::{read, write};
use crate::common::{for_seeds, scratch};
use crate::tier_support::{block, host, image, image_at, newest_of, place, published, soon, sync, writes_of};
use vmstrata_disk::{Disk, OpenOptions, ResourceOptions, Resources};
use vmstrata_repo::DirectoryRepository;
use vmstrata_tier::{
    Error, HeadNumber, Pin, Place, Standby, TierOptions, TierState, Tiered, is_object_name, repository_of,
};

fn writes(disk: &Disk, numbers: std::ops::RangeInclusive<u64>) {
    numbers.for_each(|number| write(disk, place(number), &block(number)).unwrap());
}

fn stand_by(path: &Path, tier: &Path) -> Result<(Arc<Disk>, Standby, Option<PathBuf>), Error> {
    let resources = Resources::new(ResourceOptions::default());
    let opened = Standby::open(&Place::of(path, tier)?, &[OpenOptions::default()], &resources);
    opened.map(|(mut disks, standby, aside)| (disks.remove(0), standby, aside))
}

fn take(mut standby: Standby, from: Option<HeadNumber>) -> Result<Tiered, Error> {
    let claimed = standby.claim(from, &TierOptions::default())?;
    standby.finish(claimed)
}

fn pins(path: &Path) -> usize {
    Pin::all(&DirectoryRepository::open(&repository_of(path), is_object_name).unwrap()).unwrap().len()
}

fn published_writes(path: &Path) -> u64 {
    writes_of(&published(&newest_of(path), path))
}

#[test]
fn a_disk_that_is_handed_over_goes_on_at_the_other_host_and_leaves_nothing_behind() {
    let (nas, tier, other) = (scratch(), scratch(), scratch());
    let path = image(nas.path());
    let (disk, tiered) = host(&path, tier.path()).unwrap();
    writes(&disk, 1..=10);
    sync(&tiered).unwrap();
    let (target, mut standby, _) = stand_by(&path, other.path()).unwrap();
    assert_eq!(standby.status().state, TierState::Standby);
    let (reader, asked) = (target.clone(), place(30));
    let reader = thread::spawn(move || read(&reader, asked, 4096).unwrap());
    writes(&disk, 11..=20);
    let own = sync(&tiered).unwrap();
    let followed = standby.follow().unwrap();
    assert_eq!((followed.head, followed.published_by), (own.head, own.owner));
    writes(&disk, 21..=30);
    assert!(!reader.is_finished(), "read before the disk was handed over");

    let head = tiered.hand_over(soon()).unwrap();
    assert_eq!((tiered.hand_over(soon()).unwrap(), tiered.status().state), (head, TierState::HandedOver));
    let taken = take(standby, Some(head)).unwrap();
    assert_eq!(reader.join().unwrap(), block(30));
    writes(&target, 31..=40);
    sync(&taken).unwrap();
    assert_eq!(published_writes(&path), 40);

    tiered.take_back(soon()).unwrap_err();
    assert!(matches!(tiered.status().state, TierState::Fenced { .. }) && disk.failure().is_some());
    assert!(tiered.stop(soon()));
    let local = tiered.status().local;
    // It takes no more writes, and so is not clean.
    disk.close().unwrap_err();
    drop(disk);
    assert!(local.exists() && pins(&path) == 2);
    assert!(tiered.leave().unwrap() && !local.exists());
    assert_eq!(pins(&path), 1);
    // And back.
    let (back, standby, aside) = stand_by(&path, tier.path()).unwrap();
    assert_eq!(aside, None);
    let head = taken.hand_over(soon()).unwrap();
    let _taken = take(standby, Some(head)).unwrap();
    assert_eq!(read(&back, place(40), 4096).unwrap(), block(40));
}

#[test]
fn what_is_taken_back_goes_on_and_cannot_be_taken_over() {
    let (nas, tier, other) = (scratch(), scratch(), scratch());
    let path = image(nas.path());
    let (disk, tiered) = host(&path, tier.path()).unwrap();
    writes(&disk, 1..=10);
    sync(&tiered).unwrap();
    let (_target, mut standby, _) = stand_by(&path, other.path()).unwrap();
    tiered.take_back(soon()).unwrap();
    let head = tiered.hand_over(soon()).unwrap();
    let writer = disk.clone();
    let writer = thread::spawn(move || writes(&writer, 11..=11));
    assert_eq!(tiered.take_back(soon()).unwrap().state, TierState::Publishing);
    writer.join().unwrap();
    let refused = standby.claim(Some(head), &TierOptions::default()).err().unwrap().to_string();
    assert!(refused.contains("cannot be taken over from") && refused.contains("went on with"), "{refused}");
    sync(&tiered).unwrap();
    assert_eq!(published_writes(&path), 11);
    let head = tiered.hand_over(soon()).unwrap();
    take(standby, Some(head)).unwrap();
}

#[test]
fn of_taking_over_and_taking_back_at_one_time_one_succeeds() {
    for_seeds(20, |seed| {
        let (nas, tier, other) = (scratch(), scratch(), scratch());
        let path = image(nas.path());
        let (disk, tiered) = host(&path, tier.path()).unwrap();
        writes(&disk, 1..=seed + 1);
        let (target, mut standby, _) = stand_by(&path, other.path()).unwrap();
        let head = tiered.hand_over(soon()).unwrap();
        let (taken, back) = thread::scope(|scope| {
            let taken = scope.spawn(|| standby.claim(Some(head), &TierOptions::default()));
            let back = tiered.take_back(soon());
            (taken.join().unwrap(), back)
        });
        assert!(taken.is_ok() != back.is_ok(), "{:?} {back:?}", taken.err());
        let (disk, publishes) = match taken {
            Ok(claimed) => (target, standby.finish(claimed).unwrap()),
            Err(_) => (disk, tiered),
        };
        write(&disk, place(seed + 2), &block(seed + 2)).unwrap();
        sync(&publishes).unwrap();
        assert_eq!(published_writes(&path), seed + 2);
    });
}

#[test]
fn a_host_that_is_killed_with_its_offer_takes_the_disk_back() {
    let (nas, tier, other) = (scratch(), scratch(), scratch());
    let path = image(nas.path());
    let (disk, tiered) = host(&path, tier.path()).unwrap();
    writes(&disk, 1..=10);
    let (_target, mut standby, _) = stand_by(&path, other.path()).unwrap();
    let head = tiered.hand_over(soon()).unwrap();
    assert!(tiered.stop(soon()));
    drop((disk, tiered));
    let (disk, tiered) = host(&path, tier.path()).unwrap();
    standby.claim(Some(head), &TierOptions::default()).err().unwrap();
    writes(&disk, 11..=12);
    sync(&tiered).unwrap();
    assert_eq!(published_writes(&path), 12);
}

#[test]
fn a_host_that_is_killed_after_its_claim_has_the_disk() {
    for is_noted in [true, false] {
        let (nas, tier, other) = (scratch(), scratch(), scratch());
        let path = image(nas.path());
        let (disk, tiered) = host(&path, tier.path()).unwrap();
        writes(&disk, 1..=10);
        let (target, mut standby, _) = stand_by(&path, other.path()).unwrap();
        writes(&disk, 11..=20);
        let head = tiered.hand_over(soon()).unwrap();
        let noted = standby.status().local.join("copy.json");
        let before = std::fs::read(&noted).unwrap();
        drop(standby.claim(Some(head), &TierOptions::default()).unwrap());
        if !is_noted {
            std::fs::write(&noted, before).unwrap();
        }
        drop((target, standby));
        assert!(Standby::is_own(&Place::of(&path, other.path()).unwrap()).unwrap());
        let (target, taken) = host(&path, other.path()).unwrap();
        assert_eq!(read(&target, place(20), 4096).unwrap(), block(20));
        writes(&target, 21..=30);
        sync(&taken).unwrap();
        assert_eq!(published_writes(&path), 30);
        tiered.take_back(soon()).unwrap_err();
    }
}

#[test]
fn a_host_that_stands_by_takes_over_from_one_that_is_lost() {
    let (nas, tier, other) = (scratch(), scratch(), scratch());
    let path = image(nas.path());
    let (disk, tiered) = host(&path, tier.path()).unwrap();
    writes(&disk, 1..=10);
    let (target, standby, _) = stand_by(&path, other.path()).unwrap();
    writes(&disk, 11..=20);
    sync(&tiered).unwrap();
    let taken = take(standby, None).unwrap();
    assert_eq!(read(&target, place(20), 4096).unwrap(), block(20));
    writes(&disk, 21..=21);
    sync(&tiered).unwrap_err();
    drop(taken);
    // What stood by and was given up leaves no pin.
    let before = pins(&path);
    let (third, third_tier) = (scratch(), scratch());
    let (target, standby, _) = stand_by(&path, third.path()).unwrap();
    drop(target);
    assert_eq!(pins(&path), before + 1);
    standby.end().unwrap();
    assert_eq!(pins(&path), before);
    let refused = stand_by(&image_at(&nas.path().join("plain.qcow2")), third_tier.path()).err().unwrap();
    assert!(matches!(refused, Error::NoHead { .. }), "{refused}");
}

#[test]
fn disks_of_a_group_are_handed_over_together() {
    let (nas, tier, other) = (scratch(), scratch(), scratch());
    let paths = ["log.qcow2", "data.qcow2"].map(|name| image_at(&nas.path().join(name)));
    let paths = paths.each_ref().map(PathBuf::as_path);
    let opens = vec![OpenOptions::default(); 2];
    let at = |tier: &Path| {
        (Place::group("guest", &paths, tier).unwrap(), Resources::new(ResourceOptions::default()))
    };
    let (own, resources) = at(tier.path());
    let (disks, tiered) = Tiered::open(&own, TierOptions::default(), &opens, &resources).unwrap();
    let (there, resources) = at(other.path());
    let (targets, standby, _) = Standby::open(&there, &opens, &resources).unwrap();
    for (disk, number) in disks.iter().zip(1..) {
        writes(disk, number..=number + 5);
    }
    let head = tiered.hand_over(soon()).unwrap();
    let _taken = take(standby, Some(head)).unwrap();
    for (target, number) in targets.iter().zip(1..) {
        assert_eq!(read(target, place(number + 5), 4096).unwrap(), block(number + 5));
    }
}

#[test]
fn a_disk_that_was_resized_meanwhile_is_not_taken_over_with_its_old_size() {
    let (nas, tier, other) = (scratch(), scratch(), scratch());
    let path = image(nas.path());
    let (disk, tiered) = host(&path, tier.path()).unwrap();
    let (_target, mut standby, _) = stand_by(&path, other.path()).unwrap();
    disk.resize(disk.size() * 2, vmstrata_disk::Shrink::Refuse).unwrap();
    write(&disk, 0, &block(1)).unwrap();
    let head = tiered.hand_over(soon()).unwrap();
    let refused = standby.claim(Some(head), &TierOptions::default()).err().unwrap();
    assert!(matches!(refused, Error::Resized { .. }), "{refused}");
    assert_eq!(tiered.take_back(soon()).unwrap().state, TierState::Publishing);
}
