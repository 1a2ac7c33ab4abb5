//! Tiered disks on hosts that are stopped, fenced, restored and cut off from the repository.

use crate::common;
use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use crate::common::flat::{read, write};
use crate::common::stock::{assert_clean, content, path_str, qemu_img};
use crate::common::{scratch, wait_until};
use crate::tier_support::{
    SIZE, block, host, host_with, image, newest_of, place, published, soon, sync, take_over, writes_of,
};
use vmstrata_disk::snapshot::SnapshotInfo;
use vmstrata_disk::{Disk, OpenOptions, ResourceOptions, Resources};
use vmstrata_repo::DirectoryRepository;
use vmstrata_tier::{
    Error, LAYERS_MAX, Pin, Place, TierState, Tiered, find_snapshot, find_state, forget, is_object_name,
    repository_of, revert, snapshots, states,
};

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
    assert_eq!(head.epoch.disks[0].objects.len(), 1);
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
    assert_eq!((status.window.unpublished_bytes, status.window.unpublished_since_ns), (0, None));
    writes(&disk, 11..=11);
    wait_until("the write is seen", || tiered.status().window.unpublished_since_ns.is_some());
    assert!(tiered.status().window.unpublished_bytes > 0);
    assert!(sync(&tiered).unwrap().epoch > epoch);
}

#[test]
fn a_write_is_published_before_it_is_older_than_the_window() {
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

/// Its guest would find an older state, and write past what the host has.
#[test]
fn the_path_of_a_tiered_disk_is_not_written_as_an_ordinary_image() {
    let (nas, tier) = (scratch(), scratch());
    let path = image(nas.path());
    let (disk, tiered) = host(&path, tier.path()).unwrap();
    end(disk, &tiered);
    let resources = Resources::new(ResourceOptions::default());
    let refused = Disk::open(&path, &OpenOptions::default(), &resources).unwrap_err().to_string();
    assert!(refused.contains("serve it with its key tier=DIR"), "{refused}");
    Disk::open(&path, &OpenOptions { read_only: true, ..OpenOptions::default() }, &resources).unwrap();
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
    let first =
        repository_of(&path).join(newest_of(&path).epoch.disks[0].objects[0].id.layer_name().as_str());
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

/// Epochs of one write each, to number `last`.
fn epochs(disk: &Disk, tiered: &Tiered, numbers: std::ops::RangeInclusive<u64>) {
    for number in numbers {
        write(disk, place(number), &block(number)).unwrap();
        sync(tiered).unwrap();
    }
}

#[test]
fn layers_of_the_repository_are_merged_while_epochs_are_published() {
    let (nas, tier, other) = (scratch(), scratch(), scratch());
    let path = image(nas.path());
    let (disk, tiered) = host(&path, tier.path()).unwrap();
    let layers = LAYERS_MAX as u64;
    epochs(&disk, &tiered, 1..=layers + 10);
    let mut last = layers + 10;
    wait_until("a merge", || {
        last += 1;
        epochs(&disk, &tiered, last..=last);
        tiered.status().layers < LAYERS_MAX
    });
    assert_eq!(published_writes(&path), last);
    end(disk, &tiered);
    let (disk, tiered) = host(&path, tier.path()).unwrap();
    epochs(&disk, &tiered, last + 1..=last + 1);
    end(disk, &tiered);
    take_over(&path, other.path()).unwrap();
    assert_eq!(published_writes(&path), last + 1);
}

#[test]
fn a_copy_stands_on_a_merged_base_and_releases_the_old_one() {
    let (nas, tier) = (scratch(), scratch());
    let path = image(nas.path());
    // More than is left alone, all of which is written again.
    common::stock::qemu_io(&path, &["write -P 1 0 64M".to_owned()]);
    let (disk, tiered) = host(&path, tier.path()).unwrap();
    let pinned = || {
        let repository = DirectoryRepository::open(&repository_of(&path), is_object_name).unwrap();
        let pins = Pin::all(&repository).unwrap();
        assert_eq!(pins.len(), 1, "{pins:?}");
        pins[0].epoch.disks[0].objects[0].id
    };
    let first = pinned();
    for round in 2..8 {
        write(&disk, 0, &vec![round; SIZE as usize]).unwrap();
        sync(&tiered).unwrap();
    }
    assert_ne!(pinned(), first);
    let now = read(&disk, 0, SIZE as usize).unwrap();
    write(&disk, 4096, &block(3)).unwrap();
    end(disk, &tiered);
    let (disk, tiered) = host(&path, tier.path()).unwrap();
    assert_eq!(read(&disk, 0, 4096).unwrap(), now[..4096]);
    assert_eq!(read(&disk, 4096, 4096).unwrap(), block(3));
    assert_ne!(pinned(), first);
    end(disk, &tiered);
    assert_clean(&Place::of(&path, tier.path()).unwrap().disk());
}

fn named(name: &str) -> SnapshotInfo {
    SnapshotInfo { name: name.to_owned(), taken_ns: 1, ..SnapshotInfo::default() }
}

fn repository(path: &Path) -> DirectoryRepository {
    DirectoryRepository::open(&repository_of(path), is_object_name).unwrap()
}

#[test]
fn a_snapshot_keeps_its_state_and_a_disk_goes_back_to_it() {
    let (nas, tier) = (scratch(), scratch());
    let path = image(nas.path());
    let (disk, tiered) = half_published(&path, tier.path());
    let mut cut = false;
    let taken = tiered.snapshot(&named("monday"), soon(), || cut = true).unwrap();
    assert!(cut);
    assert_eq!(writes_of(&content(&taken.layers[0], "qcow2")), 20);
    let twice = tiered.snapshot(&named("monday"), soon(), || {}).unwrap_err();
    assert!(matches!(twice, Error::NameTaken { .. }), "{twice}");
    tiered.snapshot(&named("no name"), soon(), || {}).unwrap_err();
    writes(&disk, 21..=30);
    sync(&tiered).unwrap();
    writes(&disk, 31..=40);
    end(disk, &tiered);

    assert_eq!(names(&path), ["monday"]);
    let state = find_state(&repository(&path), "monday", 0).unwrap();
    assert!(find_state(&repository(&path), "sunday", 0).unwrap_err().to_string().contains("monday"));
    let place_of_disk = Place::of(&path, tier.path()).unwrap();
    let resources = Resources::new(ResourceOptions::default());
    let aside = revert(&place_of_disk, "monday", &OpenOptions::default(), &resources).unwrap();
    assert_eq!(published_writes(&path), 20);
    assert!(newest_of(&path).epoch.number > state.number);
    assert_eq!(writes_of(&content(&aside.join("web.qcow2"), "qcow2")), 40);
    let (disk, tiered) = host(&path, tier.path()).unwrap();
    writes(&disk, 21..=21);
    sync(&tiered).unwrap();
    assert_eq!(published_writes(&path), 21);
    forget(&repository(&path), "monday").unwrap();
    assert_eq!(names(&path), Vec::<String>::new());
    forget(&repository(&path), "monday").unwrap_err();
}

fn names(path: &Path) -> Vec<String> {
    snapshots(&repository(path)).unwrap().into_iter().map(|(info, _)| info.name).collect()
}

#[test]
fn a_snapshot_that_was_cut_gets_its_name_when_it_is_published_also_by_the_next_process() {
    let (nas, tier) = (scratch(), scratch());
    let path = image(nas.path());
    let (disk, tiered) = half_published(&path, tier.path());
    let (its_repository, away) = (repository_of(&path), nas.path().join("away"));
    fs::rename(&its_repository, &away).unwrap();
    let cut = tiered.cut_for(&named("monday")).unwrap();
    let twice = tiered.cut_for(&named("monday")).unwrap_err();
    assert!(matches!(twice, Error::NameTaken { .. }), "{twice}");
    let pending = tiered.status().pending;
    assert_eq!((pending.len(), &*pending[0].name, pending[0].epoch), (1, "monday", cut.epoch));
    writes(&disk, 21..=30);
    tiered.cut_for(&named("unwanted")).unwrap();
    assert!(tiered.withdraw("unwanted", 1).unwrap() && !tiered.withdraw("unwanted", 1).unwrap());
    end(disk, &tiered);
    fs::rename(&away, &its_repository).unwrap();
    assert_eq!(names(&path), Vec::<String>::new());

    let (disk, tiered) = host(&path, tier.path()).unwrap();
    wait_until("it has its name", || names(&path) == ["monday"]);
    wait_until("it waits no more", || tiered.status().pending.is_empty());
    let pin = find_snapshot(&repository(&path), "monday", 1).unwrap();
    assert_eq!(pin.epoch.number, cut.epoch);
    let layer = its_repository.join(pin.epoch.disks[0].newest().layer_name().as_str());
    assert_eq!(writes_of(&content(&layer, "qcow2")), 20);
    let other = find_snapshot(&repository(&path), "monday", 2).unwrap_err().to_string();
    assert!(other.contains("'monday' is another snapshot"), "{other}");
    // Nothing was written since: what is published already gets the name.
    sync(&tiered).unwrap();
    let cut = tiered.cut_for(&named("again")).unwrap();
    assert_eq!(cut.epoch, tiered.status().epoch);
    wait_until("it has its name", || names(&path) == ["monday", "again"]);
    end(disk, &tiered);
}

#[test]
fn a_snapshot_whose_name_another_one_got_meanwhile_is_lost() {
    let (nas, tier) = (scratch(), scratch());
    let path = image(nas.path());
    let (disk, tiered) = half_published(&path, tier.path());
    tiered.snapshot(&named("monday"), soon(), || {}).unwrap();
    tiered.cut_for(&SnapshotInfo { taken_ns: 2, ..named("monday") }).unwrap();
    wait_until("it is given up", || tiered.status().pending.is_empty());
    find_snapshot(&repository(&path), "monday", 1).unwrap();
    find_snapshot(&repository(&path), "monday", 2).unwrap_err();
    assert_eq!(tiered.status().state, TierState::Publishing);
    end(disk, &tiered);
}

#[test]
fn a_state_is_found_by_its_age() {
    let (nas, tier) = (scratch(), scratch());
    let path = image(nas.path());
    let (disk, tiered) = host(&path, tier.path()).unwrap();
    epochs(&disk, &tiered, 1..=3);
    let at = |name: &str, now: u64| find_state(&repository(&path), name, now).map(|epoch| epoch.number);
    let newest = newest_of(&path).epoch;
    let second = states(&repository(&path)).unwrap()[1].epoch.clone();
    assert_eq!(at("-0s", newest.time_ns).unwrap(), newest.number);
    assert_eq!(at("-1s", newest.time_ns + 1_000_000_000).unwrap(), newest.number);
    assert_eq!(at("-0s", newest.time_ns - 1).unwrap(), second.number);
    let refused = at("-24h", newest.time_ns).unwrap_err();
    assert!(matches!(refused, Error::NoState { .. }), "{refused}");
    at("-1w", newest.time_ns).unwrap_err();
}
