//! A guest is started before its memory is read, and counts on; repositories of its snapshot go while it does.

use std::path::Path;
use std::process::Command;

use crate::counting::{Counting, Export, STEPS_MAX, last_count, must};
use xtask::guest::{Task, Vm};

/// Nothing in the background, so that what is read is what the guest touched.
const ONLY_FAULTS: [&str; 3] = ["--lazy", "--fill-rate", "0"];

/// Waits until the restored guest counts, from where it was taken.
fn went_on(counting: &mut Counting, taken_at: u32) {
    counting.guest.vm.wait_for("guest: count ", STEPS_MAX).unwrap();
    let first = last_count(&counting.guest.vm);
    assert!(first >= taken_at && first <= taken_at + 2, "taken at {taken_at}, went on at {first}");
    counting.counts_on();
}

/// Ends `vmstrata vm restore` as an init system does; returns what it said last of how much it read, in percent.
fn end(counting: &mut Counting) -> f64 {
    must(Command::new("kill").args(["-TERM", &counting.guest.vm.pid().to_string()]));
    let ended = counting.guest.vm.wait_for("no such line", STEPS_MAX).unwrap_err();
    assert!(ended.to_string().starts_with("ended before"), "{ended}");
    let said = counting.guest.vm.console().lines().rev().find(|line| line.contains(" read (")).unwrap();
    let share = said.split(" read (").nth(1).unwrap().trim_end_matches(" %)");
    share.parse().unwrap_or_else(|_| panic!("{said}"))
}

/// Nothing is left of a restore.
fn assert_clean(counting: &Counting) {
    let mounts = std::fs::read_to_string("/proc/self/mounts").unwrap();
    let dir = counting.dir.path().join("pages");
    assert!(!mounts.contains(dir.to_str().unwrap()), "{mounts}");
    assert_eq!(std::fs::read_dir(&dir).unwrap().count(), 0);
}

fn empty(repository: &Path) {
    for file in std::fs::read_dir(repository).unwrap() {
        let path = file.unwrap().path();
        // Who has it open notices too.
        std::fs::File::options().write(true).open(&path).unwrap().set_len(0).unwrap();
        std::fs::remove_file(path).unwrap();
    }
}

fn answers_before_its_memory_is_read(export: Export) {
    let mut counting = Counting::start(export, Task::Count, 256);
    let dir = counting.dir.path().join("pages");
    std::fs::create_dir(&dir).unwrap();
    must(counting.snapshot("mon").args(["--disk", "disk"]));
    let at = last_count(&counting.guest.vm);
    let dir = ["--memory-dir", dir.to_str().unwrap()];
    for cache in [&["--cache-time", "0"][..], &["--no-cache"]] {
        counting.restore("mon", &[&ONLY_FAULTS[..], &dir, cache].concat());
        counting.guest.vm.wait_for("guest: count ", STEPS_MAX).unwrap();
        let share = end(&mut counting);
        assert!(share > 0.0 && share < 100.0, "{share} % read\n{}", counting.guest.vm.console());
        assert_clean(&counting);
    }
    // All of it in the background, with a repository that goes as soon as the guest runs: its copies are in the other one.
    counting.restore("mon", &[&["--lazy"][..], &dir].concat());
    counting.guest.vm.wait_for("restored lazily", STEPS_MAX).unwrap();
    empty(&counting.dir.path().join("a"));
    went_on(&mut counting, at);
    if !counting.guest.vm.console().contains("no longer needed") {
        counting.guest.vm.wait_for("no longer needed", STEPS_MAX).unwrap();
    }
    empty(&counting.dir.path().join("b"));
    counting.counts_on();
    counting.counts_on();
    assert_eq!(end(&mut counting), 100.0);
    assert_clean(&counting);
}

#[test]
fn guest_on_an_nbd_disk_answers_before_its_memory_is_read() {
    answers_before_its_memory_is_read(Export::Nbd);
}

#[test]
fn guest_on_a_vhost_user_disk_answers_before_its_memory_is_read() {
    answers_before_its_memory_is_read(Export::VhostUser);
}

/// What a lazily restored guest has not touched yet is read for its next snapshot.
#[test]
fn guest_that_was_restored_lazily_is_taken_again() {
    let mut counting = Counting::start(Export::Nbd, Task::Count, 256);
    must(counting.snapshot("mon").args(["--disk", "disk"]));
    let at = last_count(&counting.guest.vm);
    counting.restore("mon", &["--lazy"]);
    went_on(&mut counting, at);
    let private = counting.snapshot("private").output().unwrap();
    assert!(String::from_utf8_lossy(&private.stderr).contains("share=off"), "{private:?}");
    counting.restore("mon", &[&ONLY_FAULTS[..], &["--shared"]].concat());
    went_on(&mut counting, at);
    must(&mut counting.snapshot("tue"));
    let at = last_count(&counting.guest.vm);
    counting.counts_on();
    counting.restore("tue", &[]);
    went_on(&mut counting, at);
}

/// A page that the guest needs and that is nowhere ends QEMU: it is never zeros.
#[test]
fn guest_does_not_outlive_a_page_that_it_needs() {
    let mut counting = Counting::start(Export::Nbd, Task::Count, 256);
    must(counting.snapshot("mon").args(["--disk", "disk"]));
    counting.restore("mon", &[&ONLY_FAULTS[..], &["--no-cache", "--page-patience", "0"]].concat());
    counting.guest.vm.wait_for("restored lazily", STEPS_MAX).unwrap();
    for repository in ["a", "b"] {
        empty(&counting.dir.path().join(repository));
    }
    let ended = counting.guest.vm.wait_for("no such line", STEPS_MAX).unwrap_err().to_string();
    assert!(ended.starts_with("ended before"), "{ended}");
    assert!(counting.guest.vm.console().contains("cannot be read"), "{ended}");
    counting.guest.vm = Vm::start(Command::new("true")).unwrap();
    // With nothing left, that is said at once.
    let lost = counting.vm_command(&["restore", "web@mon"]).args(["--lazy", "--", "qemu"]).output().unwrap();
    assert_eq!(lost.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&lost.stderr).contains("no snapshot web@mon"), "{lost:?}");
}
