//! Tiered disks on hosts that are stopped, fenced, restored and cut off from the repository.

#[path = "../../disk/tests/common/mod.rs"]
mod common;
mod tier_support;

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use common::flat::{read, write};
use common::stock::{assert_clean, content, path_str, qemu_img};
use common::{scratch, wait_until};
use tier_support::{
    SIZE, block, host, host_with, image, newest_of, place, published, soon, sync, take_over, writes_of,
};
use vmstrata_disk::Disk;
use vmstrata_tier::{Error, Place, TierState, Tiered, repository_of};

/// The guest's writes from one number to another.
fn writes(disk: &Disk, numbers: std::ops::RangeInclusive<u64>) {
    numbers.for_each(|number| write(disk, place(number), &block(number)).unwrap());
}

/// Ends the host of a disk.
fn end(disk: Arc<Disk>, tiered: &Tiered) {
    assert!(tiered.stop(soon()));
    disk.close().unwrap();
}

/// A served disk of which writes 1 to 10 are published and 11 to 20 are not.
fn half_published(path: &Path, tier: &Path) -> (Arc<Disk>, Tiered) {
    let (disk, tiered) = host(path, tier).unwrap();
    writes(&disk, 1..=10);
    sync(&tiered).unwrap();
    writes(&disk, 11..=20);
    (disk, tiered)
}

/// How many writes the newest head has.
fn published_writes(path: &Path) -> u64 {
    writes_of(&published(&newest_of(path), path))
}

#[test]
fn an_ordinary_image_becomes_the_first_layer_and_its_path_leads_to_the_newest() {
    let (nas, tier) = (scratch(), scratch());
    let path = image(nas.path());
    common::stock::qemu_io(&path, &["write -P 7 1M 64k".to_owned()]);
    let before = content(&path, "qcow2");
    let (disk, tiered) = host(&path, tier.path()).unwrap();
    let head = newest_of(&path);
    assert_eq!(published(&head, &path), before);
    assert_eq!(head.epoch.objects.len(), 1);
    write(&disk, 0, &block(1)).unwrap();
    sync(&tiered).unwrap();
    assert!(tiered.stop(soon()));
    assert_clean(&path);
    let mut now = before;
    now[..4096].copy_from_slice(&block(1));
    assert!(content(&path, "qcow2") == now);
}

#[test]
fn a_disk_that_is_not_written_makes_no_epochs() {
    let (nas, tier) = (scratch(), scratch());
    let path = image(nas.path());
    let (disk, tiered) = host(&path, tier.path()).unwrap();
    writes(&disk, 1..=10);
    let epoch = sync(&tiered).unwrap().epoch;
    assert_eq!(sync(&tiered).unwrap().epoch, epoch);
    let status = tiered.status();
    assert_eq!((status.unpublished_bytes, status.unpublished_since_ns), (0, None));
    writes(&disk, 11..=11);
    wait_until("the write is seen", || tiered.status().unpublished_since_ns.is_some());
    assert!(tiered.status().unpublished_bytes > 0);
    assert!(sync(&tiered).unwrap().epoch > epoch);
}

#[test]
fn a_write_is_published_when_it_is_as_old_as_the_window() {
    let (nas, tier) = (scratch(), scratch());
    let path = image(nas.path());
    let (disk, tiered) = host_with(&path, tier.path(), Duration::from_secs(1)).unwrap();
    let epoch = tiered.status().epoch;
    writes(&disk, 1..=10);
    wait_until("an epoch", || tiered.status().epoch > epoch);
    assert_eq!(published_writes(&path), 10);
}

#[test]
fn a_disk_goes_to_another_host_with_what_is_published() {
    let (nas, tier, other) = (scratch(), scratch(), scratch());
    let path = image(nas.path());
    let (disk, tiered) = half_published(&path, tier.path());
    assert!(tiered.stop(soon()));
    assert!(sync(&tiered).unwrap_err().to_string().contains("closed"));
    disk.close().unwrap();
    assert_eq!(take_over(&path, other.path()).unwrap(), None);
    let (disk, _tiered) = host(&path, other.path()).unwrap();
    assert_eq!(read(&disk, place(10), 4096).unwrap(), block(10));
    assert_eq!(read(&disk, place(20), 4096).unwrap(), vec![0; 4096]);
}

#[test]
fn a_guest_goes_on_without_the_repository_which_then_gets_all() {
    let (nas, tier) = (scratch(), scratch());
    let path = image(nas.path());
    let (disk, tiered) = host(&path, tier.path()).unwrap();
    let (repository, away) = (repository_of(&path), nas.path().join("away"));
    fs::rename(&repository, &away).unwrap();
    writes(&disk, 1..=50);
    let refused = sync(&tiered).unwrap_err().to_string();
    assert!(refused.contains("web.qcow2.tier"), "{refused}");
    assert!(matches!(tiered.status().state, TierState::Stalled { .. }));
    writes(&disk, 51..=100);
    assert_eq!(read(&disk, place(100), 4096).unwrap(), block(100));
    fs::rename(&away, &repository).unwrap();
    wait_until("what was cut", || published_writes(&path) == 50);
    sync(&tiered).unwrap();
    assert_eq!((published_writes(&path), tiered.status().state), (100, TierState::Publishing));
}

#[test]
fn a_restart_publishes_what_was_cut_before_it() {
    let (nas, tier) = (scratch(), scratch());
    let path = image(nas.path());
    let (disk, tiered) = host(&path, tier.path()).unwrap();
    let (repository, away) = (repository_of(&path), nas.path().join("away"));
    writes(&disk, 1..=10);
    let first = sync(&tiered).unwrap().epoch;
    fs::rename(&repository, &away).unwrap();
    writes(&disk, 11..=50);
    sync(&tiered).unwrap_err();
    writes(&disk, 51..=60);
    end(disk, &tiered);
    fs::rename(&away, &repository).unwrap();
    let (_disk, tiered) = host(&path, tier.path()).unwrap();
    wait_until("what was cut", || tiered.status().epoch == first.next());
    assert_eq!(published_writes(&path), 50);
    let status = sync(&tiered).unwrap();
    assert_eq!((published_writes(&path), status.epoch), (60, first.next().next()));
}

#[test]
fn a_host_that_was_taken_over_refuses_writes_and_keeps_its_own() {
    let (nas, tier, other) = (scratch(), scratch(), scratch());
    let path = image(nas.path());
    let (disk, tiered) = half_published(&path, tier.path());
    take_over(&path, other.path()).unwrap();
    let told = sync(&tiered).unwrap_err().to_string();
    assert!(told.contains(&newest_of(&path).owner.to_string()), "{told}");
    assert!(matches!(tiered.status().state, TierState::Fenced { .. }));
    let refused = write(&disk, 0, &block(1)).unwrap_err().to_string();
    assert!(refused.contains("publishes here since generation 2"), "{refused}");
    assert_eq!(read(&disk, place(20), 4096).unwrap(), block(20));
    assert_eq!(published_writes(&path), 10);
    assert!(tiered.stop(soon()));
    drop(disk);
    assert!(matches!(host(&path, tier.path()).unwrap_err(), Error::Fenced { .. }));
    // It comes back, and what it had alone is a branch.
    let aside = take_over(&path, tier.path()).unwrap().expect("its copy of before");
    assert!(aside.join("web.qcow2").exists());
    let (disk, tiered) = host(&path, tier.path()).unwrap();
    assert_eq!(read(&disk, place(20), 4096).unwrap(), vec![0; 4096]);
    writes(&disk, 11..=12);
    sync(&tiered).unwrap();
    assert_eq!(published_writes(&path), 12);
}

#[test]
fn a_disk_of_another_host_is_not_opened_nor_one_that_is_open() {
    let (nas, tier, other) = (scratch(), scratch(), scratch());
    let path = image(nas.path());
    let (_disk, tiered) = host(&path, tier.path()).unwrap();
    let told = host(&path, other.path()).unwrap_err().to_string();
    assert!(told.contains("vmstrata tier takeover"), "{told}");
    assert!(matches!(host(&path, tier.path()).unwrap_err(), Error::Held { .. }));
    assert!(matches!(take_over(&path, tier.path()).unwrap_err(), Error::Held { .. }));
    sync(&tiered).unwrap();
}

#[test]
fn a_copy_that_lacks_what_it_published_is_refused() {
    let (nas, tier) = (scratch(), scratch());
    let path = image(nas.path());
    let local = Place::of(&path, tier.path()).unwrap().local;
    let restored = tier.path().join("restored");
    let copy = |from: &Path, to: &Path| {
        let copied = std::process::Command::new("cp").arg("-a").args([from, to]).status().unwrap();
        assert!(copied.success());
    };
    let (disk, tiered) = host(&path, tier.path()).unwrap();
    end(disk, &tiered);
    copy(&local, &restored);
    let (disk, tiered) = host(&path, tier.path()).unwrap();
    writes(&disk, 1..=10);
    sync(&tiered).unwrap();
    end(disk, &tiered);
    fs::remove_dir_all(&local).unwrap();
    copy(&restored, &local);
    assert!(matches!(host(&path, tier.path()).unwrap_err(), Error::OldCopy { .. }));
    fs::remove_file(Place::of(&path, tier.path()).unwrap().disk()).unwrap();
    take_over(&path, tier.path()).unwrap().expect("the old copy");
    let (disk, _tiered) = host(&path, tier.path()).unwrap();
    assert_eq!(read(&disk, place(10), 4096).unwrap(), block(10));
}

#[test]
fn a_claim_that_was_interrupted_is_made_again() {
    let (nas, tier) = (scratch(), scratch());
    let path = image(nas.path());
    let (disk, tiered) = host(&path, tier.path()).unwrap();
    end(disk, &tiered);
    // As a process that was killed leaves it before the copy has a layer.
    let place = Place::of(&path, tier.path()).unwrap();
    fs::remove_file(place.disk()).unwrap();
    let record = place.local.join("copy.json");
    let text = fs::read_to_string(&record).unwrap().replace("\"base\":1", "\"base\":null");
    fs::write(&record, text).unwrap();
    let (disk, tiered) = host(&path, tier.path()).unwrap();
    writes(&disk, 1..=10);
    sync(&tiered).unwrap();
    assert_eq!(published_writes(&path), 10);
}

#[test]
fn published_epochs_do_not_pile_up_on_the_host() {
    let (nas, tier) = (scratch(), scratch());
    let path = image(nas.path());
    let (disk, tiered) = host(&path, tier.path()).unwrap();
    for epoch in 0..30 {
        writes(&disk, epoch * 10 + 1..=epoch * 10 + 10);
        sync(&tiered).unwrap();
        assert!(disk.layer_count() <= 10, "{} layers after {epoch}", disk.layer_count());
    }
    assert_eq!(published_writes(&path), 300);
    end(disk, &tiered);
    let (disk, _tiered) = host(&path, tier.path()).unwrap();
    (1..=300).for_each(|number| assert_eq!(read(&disk, place(number), 4096).unwrap(), block(number)));
}

#[test]
fn what_cannot_be_a_layer_is_refused_and_stays() {
    let (nas, tier) = (scratch(), scratch());
    let [raw, base, over] = ["raw.img", "base.qcow2", "over.qcow2"].map(|name| nas.path().join(name));
    qemu_img(&["create", "-q", "-f", "raw", path_str(&raw), "1M"]);
    qemu_img(&["create", "-q", "-f", "qcow2", path_str(&base), "1M"]);
    qemu_img(&["create", "-q", "-f", "qcow2", "-F", "qcow2", "-b", "base.qcow2", path_str(&over)]);
    for (path, why) in [(&raw, "raw"), (&over, "base.qcow2"), (&nas.path().join("none"), "none")] {
        let told = host(path, tier.path()).unwrap_err().to_string();
        assert!(told.contains(why), "{told}");
        assert!(!repository_of(path).exists());
    }
}

#[test]
fn another_image_at_the_path_of_a_tiered_disk_stays() {
    let (nas, tier) = (scratch(), scratch());
    let path = image(nas.path());
    let (disk, tiered) = host(&path, tier.path()).unwrap();
    fs::remove_file(&path).unwrap();
    image(nas.path());
    writes(&disk, 1..=10);
    sync(&tiered).unwrap();
    end(disk, &tiered);
    assert_eq!(content(&path, "qcow2"), vec![0; SIZE as usize]);
    assert!(matches!(host(&path, tier.path()).unwrap_err(), Error::Foreign { .. }));
    fs::remove_file(&path).unwrap();
    let (_disk, tiered) = host(&path, tier.path()).unwrap();
    sync(&tiered).unwrap();
    assert_eq!(writes_of(&content(&path, "qcow2")), 10);
}

#[test]
fn a_host_that_only_tried_to_serve_a_disk_has_no_branch() {
    let (nas, tier, other) = (scratch(), scratch(), scratch());
    let path = image(nas.path());
    let (_disk, tiered) = host(&path, tier.path()).unwrap();
    sync(&tiered).unwrap();
    host(&path, other.path()).unwrap_err();
    assert_eq!(take_over(&path, other.path()).unwrap(), None);
}

#[test]
fn a_file_system_that_is_not_mounted_gets_no_second_repository() {
    let (nas, tier) = (scratch(), scratch());
    let path = image(nas.path());
    let (disk, tiered) = host(&path, tier.path()).unwrap();
    assert!(tiered.stop(soon()));
    disk.close().unwrap();
    fs::rename(repository_of(&path), nas.path().join("away")).unwrap();
    fs::remove_file(&path).unwrap();
    image(nas.path());
    assert!(matches!(host(&path, tier.path()).unwrap_err(), Error::NoHead { .. }));
    assert!(!repository_of(&path).exists());
}

#[test]
fn an_attachment_that_was_interrupted_is_completed() {
    let (nas, tier) = (scratch(), scratch());
    let path = image(nas.path());
    let (disk, tiered) = host(&path, tier.path()).unwrap();
    let first = repository_of(&path).join(newest_of(&path).epoch.objects[0].id.layer_name().as_str());
    end(disk, &tiered);
    // As a process that was killed leaves it before the path leads to the repository.
    fs::remove_file(&path).unwrap();
    fs::hard_link(&first, &path).unwrap();
    let (disk, tiered) = host(&path, tier.path()).unwrap();
    writes(&disk, 1..=10);
    sync(&tiered).unwrap();
    assert_eq!(writes_of(&content(&path, "qcow2")), 10);
    assert_eq!(first.metadata().unwrap().permissions().mode() & 0o777, 0o444);
}
