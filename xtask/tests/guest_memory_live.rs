//! A busy guest is taken while it runs on: QEMU saves each page before the guest changes it. Its disk is an NBD export, because
//! nobody but QEMU may write the guest's memory.

use std::process::{Command, Stdio};
use std::time::Duration;

use crate::counting::{Counting, Export, STEPS_MAX, last_count, must};
use serde_json::Value;
use xtask::guest::{Task, Vm};

fn live(counting: &Counting, name: &str) -> Command {
    let mut command = counting.snapshot(name);
    command.args(["--mode", "live", "--json"]);
    command
}

fn json(command: &mut Command) -> Value {
    let output = must(command);
    eprintln!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap()
}

#[test]
fn guest_that_ran_on_while_it_was_taken_counts_on_from_there() {
    let mut counting = Counting::start(Export::Nbd, Task::Busy, 512);
    let taken = json(&mut live(&counting, "mon"));
    let at = last_count(&counting.guest.vm);
    assert_eq!(taken["disks"].as_array().unwrap().len(), 1, "the disk is found by its export: {taken}");
    counting.counts_on();
    pages_are_shown(&mut counting);
    let next = json(&mut live(&counting, "tue"));
    assert!(next["stored-pages"].as_u64() < taken["stored-pages"].as_u64(), "only what changed: {next}");
    counting.counts_on();
    counting.restore("mon", &[]);
    counting.guest.vm.wait_for("guest: count ", STEPS_MAX).unwrap();
    let on = last_count(&counting.guest.vm);
    assert!(on >= at.saturating_sub(2) && on <= at + 2, "taken at {at}, went on at {on}");
    counting.counts_on();
    // One that was restored is taken like any other.
    json(&mut live(&counting, "wed"));
    counting.counts_on();
}

/// `vm pages` of a running guest, and of one that is paused for it.
fn pages_are_shown(counting: &mut Counting) {
    for flags in [&[][..], &["--pause"]] {
        let mut pages = counting.pages();
        let report = json(pages.args(["--json"]).args(flags));
        let classes = report["classes"].as_object().unwrap();
        let sum: u64 = classes.values().map(|pages| pages.as_u64().unwrap()).sum();
        assert_eq!((sum, &report["pages"]), (512 << 8, &(512 << 8).into()), "{report}");
        assert!(report["release"].is_string() && classes["clean"].as_u64() > Some(100), "{report}");
        counting.counts_on();
    }
    let shown = String::from_utf8(must(counting.pages().args(["--pause", "--map"])).stdout).unwrap();
    assert!(shown.starts_with("kernel: Linux ") && shown.contains("located on vda"), "{shown}");
}

#[test]
fn guest_runs_on_whatever_is_killed_while_it_is_taken_live() {
    let mut counting = Counting::start(Export::Nbd, Task::Busy, 256);
    for (signal, after_ms) in [
        ("KILL", 50),
        ("KILL", 150),
        ("TERM", 200),
        ("KILL", 250),
        ("INT", 300),
        ("KILL", 400),
        ("KILL", 700),
    ] {
        let (name, before) = (format!("ended-{signal}-{after_ms}"), counting.listed());
        let mut child = live(&counting, &name).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
        std::thread::sleep(Duration::from_millis(after_ms));
        must(Command::new("kill").args([&format!("-{signal}"), &child.id().to_string()]));
        let taken = child.wait().unwrap().success();
        counting.counts_on();
        match signal {
            "KILL" => counting.wait_whole(&name, before),
            _ => counting.assert_whole(&name, taken, before),
        }
    }
    // What was interrupted is in nobody's way, in either mode.
    json(&mut live(&counting, "whole"));
    must(&mut counting.snapshot("copied"));
    counting.counts_on();
    // QEMU killed under it.
    let before = counting.listed();
    let mut child = live(&counting, "gone").stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    std::thread::sleep(Duration::from_millis(300));
    counting.guest.vm = Vm::start(Command::new("true")).unwrap();
    let taken = child.wait().unwrap().success();
    counting.assert_whole("gone", taken, before);
}
