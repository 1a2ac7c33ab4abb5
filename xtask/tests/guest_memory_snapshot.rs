//! A guest is taken while it runs (memory, devices, disk), killed, and started again from what was taken. What is killed at
//! any step of a snapshot leaves a guest that runs.

use std::process::{Command, Stdio};
use std::time::Duration;

use crate::counting::{Counting, Export, STEPS_MAX, last_count, must};
use vmstrata_memory::qmp::Qmp;
use xtask::guest::{Task, Vm};

#[test]
fn guest_counts_on_from_its_snapshots_with_and_without_its_cache() {
    let mut counting = Counting::start(Export::VhostUser, Task::Count, 256);
    let taken = must(&mut counting.snapshot("mon"));
    eprintln!("{}{}", String::from_utf8_lossy(&taken.stdout), String::from_utf8_lossy(&taken.stderr));
    let at = last_count(&counting.guest.vm);
    counting.counts_on();
    for flags in [&[][..], &["--no-cache"]] {
        counting.restore("mon", flags);
        counting.guest.vm.wait_for("guest: count ", STEPS_MAX).unwrap();
        let first = last_count(&counting.guest.vm);
        assert!(first >= at && first <= at + 2, "taken at {at}, went on at {first}");
        counting.counts_on();
        eprintln!("{flags:?}: {}", counting.guest.vm.console());
    }
}

#[test]
fn guest_runs_on_when_vmstrata_is_killed_at_any_step_of_a_snapshot() {
    let mut counting = Counting::start(Export::VhostUser, Task::Count, 256);
    for after_ms in [20, 60, 100, 120, 140, 160, 180, 200, 300, 500] {
        let (name, before) = (format!("killed-{after_ms}"), counting.listed());
        let mut snapshot = counting.snapshot(&name);
        let mut child = snapshot.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
        std::thread::sleep(Duration::from_millis(after_ms));
        // What the server was asked then is done when nobody waits for it any more.
        counting.signal_server("-STOP");
        child.kill().unwrap();
        child.wait().unwrap();
        std::thread::sleep(Duration::from_millis(200));
        counting.signal_server("-CONT");
        counting.counts_on();
        counting.wait_whole(&name, before);
    }
    // What was interrupted is in nobody's way.
    must(&mut counting.snapshot("whole"));
    counting.counts_on();
}

fn held_guest_is_taken_once_until_it_runs(counting: &mut Counting) {
    let tell = |counting: &Counting, command| {
        let mut qmp = Qmp::connect(counting.guest.monitor(), Duration::from_secs(20)).unwrap();
        qmp.tell(command, serde_json::json!({})).unwrap();
    };
    tell(counting, "stop");
    must(&mut counting.snapshot("held"));
    let again = counting.snapshot("again").output().unwrap();
    let said = String::from_utf8_lossy(&again.stderr);
    assert!(again.status.code() == Some(1) && said.contains("let it go on"), "{said}");
    tell(counting, "cont");
    counting.counts_on();
}

#[test]
fn guest_runs_on_and_nothing_is_listed_when_a_snapshot_fails() {
    let mut counting = Counting::start(Export::VhostUser, Task::Count, 256);
    // No space in a repository: noticed after the disks have their snapshot. First, while no snapshot holds most of the pages.
    let (snapshot, before) = (counting.snapshot("full"), counting.listed());
    let mut limited = Command::new("sh");
    limited.args(["-c", "trap '' XFSZ; ulimit -f 1000; exec \"$@\"", "sh"]);
    limited.arg(snapshot.get_program()).args(snapshot.get_args());
    limited.envs(snapshot.get_envs().filter_map(|(name, value)| Some((name, value?))));
    let full = limited.output().unwrap();
    assert_eq!(full.status.code(), Some(1), "{full:?}");
    counting.assert_whole("full", false, before);
    counting.counts_on();
    for after_ms in [100, 300, 500] {
        let (name, before) = (format!("ended-{after_ms}"), counting.listed());
        let mut child = counting.snapshot(&name).stderr(Stdio::null()).spawn().unwrap();
        std::thread::sleep(Duration::from_millis(after_ms));
        must(Command::new("kill").args(["-TERM", &child.id().to_string()]));
        let taken = child.wait().unwrap().success();
        counting.assert_whole(&name, taken, before);
        counting.counts_on();
    }
    held_guest_is_taken_once_until_it_runs(&mut counting);
    // QEMU killed under it.
    let before = counting.listed();
    let mut child = counting.snapshot("gone").stderr(Stdio::null()).spawn().unwrap();
    std::thread::sleep(Duration::from_millis(150));
    counting.guest.vm = Vm::start(Command::new("true")).unwrap();
    let taken = child.wait().unwrap().success();
    counting.assert_whole("gone", taken, before);
}
