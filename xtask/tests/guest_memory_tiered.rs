//! A guest on a tiered disk is taken while nothing is published, and goes on at once; from what is published later it is started again, on
//! its host and on another one.

use std::fs;
use std::ops::RangeInclusive;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use crate::counting::{Counting, STEPS_MAX, last_count, must};
use serde_json::Value;
use xtask::bench::server;

/// A guest is held for some 100 ms; a NAS is away for longer.
const PAUSE_MS_MAX: f64 = 5000.0;

fn tool(counting: &Counting, words: &[&str]) -> Command {
    let mut command = Command::new(server::vmstrata());
    command.args(words).env("VMSTRATA_CONTROL", counting.guest.server().control());
    command
}

/// What the guest has counted to.
fn count(counting: &mut Counting) -> u32 {
    assert!(!counting.guest.vm.saw("no such line", Duration::ZERO).unwrap());
    last_count(&counting.guest.vm)
}

/// A snapshot that was taken.
struct Taken {
    name: &'static str,
    /// What the guest counted to before and afterwards.
    counts: RangeInclusive<u32>,
    said: Value,
}

/// Takes a snapshot.
fn take(counting: &mut Counting, name: &'static str) -> Taken {
    let before = count(counting);
    let taken = must(counting.snapshot(name).arg("--json"));
    eprintln!("{}{}", String::from_utf8_lossy(&taken.stdout), String::from_utf8_lossy(&taken.stderr));
    let said: Value = serde_json::from_slice(&taken.stdout).unwrap();
    assert!(said["pause-ms"].as_f64() < Some(PAUSE_MS_MAX), "{said}");
    Taken { name, counts: before..=count(counting), said }
}

/// The state of the snapshot `name`, as it is listed.
fn state(counting: &Counting, name: &str) -> String {
    let mut command = tool(counting, &["vm", "list", "web", "--json"]);
    ["a", "b"].iter().for_each(|part| _ = command.arg("--vault").arg(counting.dir.path().join(part)));
    let listed: Value = serde_json::from_slice(&must(&mut command).stdout).unwrap();
    let row = listed["snapshots"].as_array().unwrap().iter().find(|row| row["name"] == name).unwrap();
    row["state"].as_str().unwrap().to_owned()
}

fn wait_complete(counting: &Counting, name: &str) {
    let start = Instant::now();
    while state(counting, name) != "complete" {
        assert!(start.elapsed() < STEPS_MAX, "{name}: {}", counting.guest.server().log());
        std::thread::sleep(Duration::from_millis(100));
    }
}

/// Starts the guest from a snapshot.
fn restore(counting: &mut Counting, taken: &Taken, flags: &[&str]) {
    counting.restore(taken.name, flags);
    counting.guest.vm.wait_for("guest: count ", STEPS_MAX).unwrap();
    let first = last_count(&counting.guest.vm);
    let (before, after) = taken.counts.clone().into_inner();
    assert!((before..=after + 1).contains(&first), "taken at {:?}, went on at {first}", taken.counts);
    counting.counts_on();
    eprintln!("{flags:?}: {}", counting.guest.vm.console());
}

#[test]
fn guest_on_a_tiered_disk_is_taken_at_once_and_restored_from_what_is_published_later() {
    let mut counting = Counting::start_tiered();
    let repository = counting.dir.path().join("nas/web.qcow2.tier");
    must(&mut tool(&counting, &["tier", "sync", "disk"]));
    // The NAS is away. What the guest needs of its disk it has read.
    let away = repository.with_file_name("away");
    fs::rename(&repository, &away).unwrap();
    let mon = take(&mut counting, "mon");
    assert_eq!((&mon.said["state"], state(&counting, "mon").as_str()), (&"incomplete".into(), "incomplete"));
    counting.counts_on();
    fs::rename(&away, &repository).unwrap();
    wait_complete(&counting, "mon");

    // The server is killed before it has published.
    must(&mut tool(&counting, &["tier", "hold", "disk", "--for", "10m"]));
    let tue = take(&mut counting, "tue");
    counting.counts_on();
    assert_eq!(state(&counting, "tue"), "incomplete");
    counting.guest.kill_server().unwrap();
    wait_complete(&counting, "tue");
    counting.counts_on();

    let mut taken = vec![mon, tue];
    // At one instant or another the guest has cache that is clean.
    while taken.last().expect("tue").said["clean-pages"] == 0 || taken.len() == 2 {
        let name = ["wed", "thu", "fri", "sat", "sun"][taken.len() - 2];
        counting.counts_on();
        taken.push(take(&mut counting, name));
    }
    let [mon, tue, .., cached] = &taken[..] else { panic!("three at least") };
    assert!(cached.said["refilled-pages"].as_u64() > Some(0), "{}", cached.said);
    wait_complete(&counting, cached.name);
    restore(&mut counting, cached, &[]);
    assert!(counting.guest.vm.console().contains("pages of cache from its disks"), "refilled");
    restore(&mut counting, mon, &["--lazy", "--cache-time", "0"]);

    // Another host, which sees the NAS.
    counting.guest.end().unwrap();
    let (other, disk): (PathBuf, _) = (counting.dir.path().join("other"), counting.guest.disk().to_owned());
    let mut takeover = tool(&counting, &["tier", "takeover"]);
    takeover.arg(&disk).arg("--tier").arg(&other).arg("--yes");
    let keys = Counting::tier_keys(&other);
    counting.guest.serve_again(Some(keys), || xtask::guest::must(&mut takeover).map(drop)).unwrap();
    restore(&mut counting, tue, &[]);

    counting.guest.end().unwrap();
    let pins = || String::from_utf8(must(tool(&counting, &["tier", "pins"]).arg(&disk)).stdout).unwrap();
    assert!(taken.iter().all(|taken| pins().contains(&format!("snapshot {}", taken.name))), "{}", pins());
    let names: Vec<String> = taken.iter().map(|taken| format!("web@{}", taken.name)).collect();
    let words: Vec<&str> = names.iter().map(String::as_str).chain(["--disks"]).collect();
    must(&mut counting.vm_delete(&words));
    assert!(!pins().contains("snapshot"), "{}", pins());
}

/// Names of snapshots that wait to be published.
fn pending(counting: &Counting) -> String {
    let status = must(&mut tool(counting, &["tier", "status", "disk", "--json"]));
    let status: Value = serde_json::from_slice(&status.stdout).unwrap();
    status["pending_snapshots"].to_string()
}

#[test]
fn guest_on_a_tiered_disk_runs_on_and_no_pin_is_left_when_vmstrata_is_killed() {
    let mut counting = Counting::start_tiered();
    for after_ms in [50, 100, 150, 250, 400, 700] {
        let (name, before) = (format!("killed-{after_ms}"), counting.listed());
        let mut snapshot = counting.snapshot(&name);
        let mut child = snapshot.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
        std::thread::sleep(Duration::from_millis(after_ms));
        child.kill().unwrap();
        child.wait().unwrap();
        counting.counts_on();
        let (start, quoted) = (Instant::now(), format!("\"{name}\""));
        // A snapshot that waits is not listed yet: it must be looked for first.
        while pending(&counting).contains(&quoted) {
            assert!(start.elapsed() < STEPS_MAX, "{}", pending(&counting));
        }
        counting.wait_whole(&name, before);
    }
    take(&mut counting, "whole");
    wait_complete(&counting, "whole");
}
