//! A process that serves a tiered disk is killed; another host takes the disk over, and stock tools judge what it gets.

use std::fs::OpenOptions as FileOptions;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crate::common::flat::write;
use crate::common::stock::path_str;
use crate::common::{for_seeds, random, scratch, wait_until};
use crate::tier_support::{
    block, host, image, newest_of, place, published, soon, sync, take_over, writes_of,
};
use rand::Rng as _;
use vmstrata_disk::Disk;
use vmstrata_tier::{Head, HeadNumber, Tiered, repository_of};

const ORDERS: &str = "VMSTRATA_TEST_CHILD";

/// The child: a guest writes, its host publishes, and says for each epoch how many writes had completed before it was cut.
#[test]
#[ignore = "the process that the other test starts and kills"]
fn host_that_publishes_until_it_is_killed() {
    let Ok(orders) = std::env::var(ORDERS) else { return };
    let local = PathBuf::from(orders);
    let (disk, tiered) = host(&local.join("web.qcow2"), &local.join("tier")).unwrap();
    let mut report = FileOptions::new().append(true).create(true).open(local.join("report")).unwrap();
    let written = Arc::new(AtomicU64::new(0));
    let counted = written.clone();
    std::thread::spawn(move || {
        for number in 1.. {
            write(&disk, place(number), &block(number)).unwrap();
            counted.store(number, Ordering::Release);
        }
    });
    loop {
        let before = written.load(Ordering::Acquire);
        sync(&tiered).unwrap();
        report.write_all(&before.to_le_bytes()).unwrap();
    }
}

/// The numbers that the child reported.
fn reported(local: &Path) -> Vec<u64> {
    let bytes = std::fs::read(local.join("report")).unwrap_or_default();
    bytes.as_chunks::<8>().0.iter().map(|number| u64::from_le_bytes(*number)).collect()
}

/// Runs the child until it is killed, anywhere in an epoch.
fn killed(local: &Path, seed: u64) {
    let before = reported(local).len();
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "takeover::host_that_publishes_until_it_is_killed", "--ignored", "--nocapture"])
        .env(ORDERS, path_str(local))
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    wait_until("some epochs", || reported(local).len() >= before + 3);
    std::thread::sleep(Duration::from_micros(random("moment", seed).random_range(0..200_000)));
    child.kill().unwrap();
    child.wait().unwrap();
}

/// A disk has all writes that the child reported as published, and none but the first ones; and it publishes more.
fn assert_goes_on(disk: &Disk, tiered: &Tiered, path: &Path, local: &Path) {
    let published_writes = || writes_of(&published(&newest_of(path), path));
    let (count, told) = (published_writes(), reported(local));
    assert!(count >= *told.last().unwrap(), "{count} writes, of {told:?}");
    for number in count + 1..=count + 100 {
        write(disk, place(number), &block(number)).unwrap();
    }
    sync(tiered).unwrap();
    assert_eq!(published_writes(), count + 100);
}

#[test]
fn a_take_over_after_a_kill_gets_the_last_published_state() {
    for_seeds(3, |seed| {
        let (local, other) = (scratch(), scratch());
        let path = image(local.path());
        killed(local.path(), seed);
        take_over(&path, other.path()).unwrap();
        let (disk, tiered) = host(&path, other.path()).unwrap();
        assert_goes_on(&disk, &tiered, &path, local.path());
    });
}

/// All heads of a disk, oldest first.
fn heads(path: &Path) -> Vec<Head> {
    let files = std::fs::read_dir(repository_of(path)).unwrap().map(|entry| entry.unwrap());
    let head = |file: std::fs::DirEntry| {
        let number = HeadNumber::of(file.file_name().to_str()?)?;
        Some(Head::decode(number, &std::fs::read(file.path()).unwrap()).unwrap())
    };
    let mut heads: Vec<Head> = files.filter_map(head).collect();
    heads.sort_by_key(|head| head.number);
    heads
}

#[test]
fn a_host_publishes_again_what_its_nas_has_lost() {
    let (local, other) = (scratch(), scratch());
    let (path, tier) = (image(local.path()), local.path().join("tier"));
    let (disk, tiered) = host(&path, &tier).unwrap();
    for number in 1..=20 {
        write(&disk, place(number), &block(number)).unwrap();
        if number % 2 == 0 {
            sync(&tiered).unwrap();
        }
    }
    assert!(tiered.stop(soon()));
    drop((disk, tiered));
    for head in &heads(&path)[8..] {
        std::fs::write(repository_of(&path).join(head.number.name().as_str()), "").unwrap();
    }
    let Err(refused) = host(&path, &tier) else { panic!("a lost head may be a claim") };
    assert!(refused.to_string().contains("vmstrata tier takeover"), "{refused}");
    assert_eq!(take_over(&path, &tier).unwrap(), None, "its copy has all that is lost");
    let (disk, tiered) = host(&path, &tier).unwrap();
    sync(&tiered).unwrap();
    assert_eq!(writes_of(&published(&newest_of(&path), &path)), 20);
    drop((disk, tiered));
    take_over(&path, other.path()).unwrap();
}

#[test]
fn a_restart_after_a_kill_publishes_each_epoch_once_and_in_order() {
    for_seeds(3, |seed| {
        let local = scratch();
        let path = image(local.path());
        killed(local.path(), seed);
        let (disk, tiered) = host(&path, &local.path().join("tier")).unwrap();
        sync(&tiered).unwrap();
        assert_goes_on(&disk, &tiered, &path, local.path());
        for pair in heads(&path).windows(2) {
            let [before, after] = [&pair[0], &pair[1]];
            let [older, newer] = [before, after].map(|head| head.epoch.objects().collect::<Vec<_>>());
            let layers = older.len();
            if before.generation == after.generation && after.epoch.number == before.epoch.number {
                assert!(newer.len() < layers, "merged");
            } else if before.generation == after.generation {
                assert_eq!(after.epoch.number, before.epoch.number.next());
                assert_eq!(newer[..layers], older);
            } else {
                assert_eq!(after.epoch, before.epoch);
            }
        }
    });
}
