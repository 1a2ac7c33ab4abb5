//! A guest works on its file system while the server is killed and started again under it.
//!
//! The guest must go on without an I/O error, find every byte it wrote, and leave a chain that stock tools
//! call clean and from which stock QEMU boots.

use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use xtask::bench::server::{self, Server};
use xtask::guest::{Attach, BOOT_MAX, Guest, RootImage, Task, UP, Vm, kill_and_serve, serve, spread};

const LAYERS: u32 = 20;
const ROUNDS: u32 = 6;
const KILLS_MIN: u32 = 4;
/// Long enough that requests are in flight at any moment of the workload, short enough for many kills.
const BETWEEN_KILLS: Duration = Duration::from_millis(1_300);
/// Exit codes of `qemu-img check`.
const CLEAN: i32 = 0;
const LEAKS: i32 = 3;
const WORKLOAD_MAX: Duration = Duration::from_secs(600);

#[test]
fn guest_survives_a_server_that_is_killed_again_and_again() {
    xtask::build::vmstrata().unwrap();
    let dir = tempfile::tempdir().unwrap();
    let guest = Guest::here().unwrap();
    let raw = RootImage { size: 256 << 20, files: 4, file_size: 2 << 20 }.make(&guest, dir.path()).unwrap();
    let top = spread(&raw, &dir.path().join("chain"), LAYERS).unwrap();
    let below_before = frozen(&top);

    let mut server = serve(&top).unwrap();
    let attach = Attach::VhostUser(server.vhost_user());
    let mut vm = Vm::boot(&guest, &attach, Task::Workload { rounds: ROUNDS }).unwrap();
    vm.wait_for(UP, BOOT_MAX).unwrap();
    let kills = kill_until_done(&mut server, &mut vm);
    vm.wait_for_end(BOOT_MAX).unwrap_or_else(|error| panic!("{error:#}\nserver:\n{}", server.log()));
    server.stop().unwrap();

    assert!(kills >= KILLS_MIN, "only {kills} kills fell into the workload");
    for round in 1..=ROUNDS {
        assert!(vm.console().contains(&format!("guest: round {round} verified")), "{}", vm.console());
    }
    assert!(check(&top) == CLEAN || check(&top) == LEAKS, "a crash may leak clusters and do nothing worse");
    repair_leaks(&top);
    assert_eq!(check(&top), CLEAN);
    assert_eq!(frozen(&top), below_before, "frozen layers must not change");

    let mut stock = Vm::boot(&guest, &Attach::Qcow2(top), Task::Verify).unwrap();
    stock.wait_for_end(BOOT_MAX).unwrap();
}

/// Exit code of `qemu-img check`.
fn check(image: &Path) -> i32 {
    let check = Command::new("qemu-img").args(["check", "-q"]).arg(image).status().unwrap();
    check.code().expect("not killed")
}

/// Gives back what each killed server had set aside for writes to come.
fn repair_leaks(image: &Path) {
    let repair =
        Command::new(server::vmstrata()).args(["check", "--repair", "leaks"]).arg(image).output().unwrap();
    assert!(repair.status.success(), "{}", String::from_utf8_lossy(&repair.stderr));
}

/// Kills and restarts the server in intervals until the guest is done; returns how often.
fn kill_until_done(server: &mut Server, vm: &mut Vm) -> u32 {
    let start = Instant::now();
    let mut kills = 0;
    loop {
        let done = vm.saw("guest: done", BETWEEN_KILLS);
        if done.unwrap_or_else(|error| panic!("after {kills} kills: {error:#}\nserver:\n{}", server.log())) {
            return kills;
        }
        assert!(start.elapsed() < WORKLOAD_MAX, "after {kills} kills:\n{}\n{}", vm.console(), server.log());
        let served = kill_and_serve(server, vm);
        kills += 1;
        if served.unwrap_or_else(|error| panic!("{error:#}\nserver:\n{}", server.log())) {
            return kills;
        }
    }
}

/// Name, size and modification time of every layer below the active one.
fn frozen(top: &Path) -> Vec<(String, u64, std::time::SystemTime)> {
    let layers = std::fs::read_dir(top.parent().unwrap()).unwrap().map(|entry| entry.unwrap());
    let frozen =
        layers.filter(|entry| entry.path() != top && entry.path().extension().is_some_and(|e| e == "qcow2"));
    let mut facts: Vec<_> = frozen
        .map(|entry| {
            let meta = entry.metadata().unwrap();
            (entry.file_name().to_string_lossy().into_owned(), meta.len(), meta.modified().unwrap())
        })
        .collect();
    facts.sort();
    facts
}
