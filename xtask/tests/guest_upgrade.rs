//! A guest works on its file system while one server after another takes over under it.
//!
//! The guest must go on without an I/O error and find every byte it wrote; as every server ends clean, so is the image.

use std::process::Command;
use std::time::{Duration, Instant};

use xtask::guest::{Attach, BOOT_MAX, Guest, RootImage, Task, UP, Vm, serve, spread};

const LAYERS: u32 = 20;
const ROUNDS: u32 = 4;
const UPGRADES_MIN: u32 = 3;
const BETWEEN_UPGRADES: Duration = Duration::from_millis(1_300);
const WORKLOAD_MAX: Duration = Duration::from_secs(600);

#[test]
fn guest_does_not_notice_that_its_server_is_upgraded() {
    xtask::build::vmstrata().unwrap();
    let dir = tempfile::tempdir().unwrap();
    let guest = Guest::here().unwrap();
    let raw = RootImage { size: 256 << 20, files: 4, file_size: 2 << 20 }.make(&guest, dir.path()).unwrap();
    let top = spread(&raw, &dir.path().join("chain"), LAYERS).unwrap();

    let mut server = serve(&top).unwrap();
    let attach = Attach::VhostUser(server.vhost_user());
    let mut vm = Vm::boot(&guest, &attach, Task::Workload { rounds: ROUNDS }).unwrap();
    vm.wait_for(UP, BOOT_MAX).unwrap();
    let start = Instant::now();
    let mut upgrades = 0;
    while !vm
        .saw("guest: done", BETWEEN_UPGRADES)
        .unwrap_or_else(|error| panic!("{error:#}\n{}", server.log()))
    {
        assert!(start.elapsed() < WORKLOAD_MAX, "after {upgrades}:\n{}\n{}", vm.console(), server.log());
        server.replace().unwrap();
        upgrades += 1;
    }
    vm.wait_for_end(BOOT_MAX).unwrap_or_else(|error| panic!("{error:#}\nserver:\n{}", server.log()));
    server.stop().unwrap();

    assert!(upgrades >= UPGRADES_MIN, "only {upgrades} upgrades fell into the workload");
    for round in 1..=ROUNDS {
        assert!(vm.console().contains(&format!("guest: round {round} verified")), "{}", vm.console());
    }
    let check = Command::new("qemu-img").args(["check", "-q"]).arg(&top).status().unwrap();
    assert!(check.success(), "every server ended clean, and the image is not");
    let mut stock = Vm::boot(&guest, &Attach::Qcow2(top), Task::Verify).unwrap();
    stock.wait_for_end(BOOT_MAX).unwrap();
}
