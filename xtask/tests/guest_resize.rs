//! The disk of a running guest grows: the guest sees the new size without a restart, writes to the new end, and leaves an
//! image that stock tools call clean.

use std::path::Path;
use std::process::{Command, Output};
use std::time::Duration;

use xtask::bench::server::{self, Server};
use xtask::guest::{Attach, BOOT_MAX, Guest, RootImage, Task, UP, Vm, serve, spread};

const SIZE: u64 = 256 << 20;
/// Past what the L1 table of a disk of 256 MiB reaches, so that it moves.
const LARGER: u64 = 20 << 30;
/// For a guest under software emulation on a busy machine.
const SEEN_MAX: Duration = Duration::from_secs(180);

#[test]
fn guest_sees_its_disk_grow_without_a_restart() {
    xtask::build::vmstrata().unwrap();
    let dir = tempfile::tempdir().unwrap();
    let guest = Guest::here().unwrap();
    let raw = RootImage { size: SIZE, files: 4, file_size: 2 << 20 }.make(&guest, dir.path()).unwrap();
    let top = spread(&raw, &dir.path().join("chain"), 3).unwrap();

    let server = serve(&top).unwrap();
    let attach = Attach::VhostUser(server.vhost_user());
    let mut vm = Vm::boot(&guest, &attach, Task::Resize).unwrap();
    vm.wait_for(UP, BOOT_MAX).unwrap();
    vm.wait_for(&format!("guest: disk has {} sectors", SIZE / 512), SEEN_MAX).unwrap();
    let resized = resize(&server, &top);
    let said = String::from_utf8_lossy(&resized.stdout);
    assert!(resized.status.success(), "{}", String::from_utf8_lossy(&resized.stderr));
    assert!(said.contains("1 guest told"), "{said}");
    let seen = vm.wait_for(&format!("guest: disk has {} sectors", LARGER / 512), SEEN_MAX);
    seen.unwrap_or_else(|error| panic!("{error:#}\nserver:\n{}", server.log()));
    vm.wait_for("guest: new end verified", SEEN_MAX).unwrap();
    vm.wait_for_end(BOOT_MAX).unwrap_or_else(|error| panic!("{error:#}\nserver:\n{}", server.log()));
    assert!(vm.console().contains("guest: files verified"), "{}", vm.console());
    server.stop().unwrap();

    assert_eq!(check(&top), Some(0), "clean");
    assert_eq!(sum_of_last_mib(&top, dir.path()), told_sum(vm.console()), "for stock tools");
    let mut stock = Vm::boot(&guest, &Attach::Qcow2(top), Task::Verify).unwrap();
    stock.wait_for_end(BOOT_MAX).unwrap();
}

fn resize(server: &Server, disk: &Path) -> Output {
    let mut command = Command::new(server::vmstrata());
    command.args(["resize", "--control"]).arg(server.control()).arg(disk).arg(LARGER.to_string());
    command.output().unwrap()
}

/// Exit code of `qemu-img check`.
fn check(image: &Path) -> Option<i32> {
    Command::new("qemu-img").args(["check", "-q"]).arg(image).status().unwrap().code()
}

/// What the guest found there, as it printed it.
fn told_sum(console: &str) -> String {
    let line = console.lines().find_map(|line| line.split("guest: new end verified ").nth(1)).unwrap();
    line.split(' ').next().unwrap().to_owned()
}

/// The checksum of what stock tools read at the disk's end.
fn sum_of_last_mib(image: &Path, dir: &Path) -> String {
    let out = dir.join("end");
    let copied = Command::new("qemu-img")
        .args(["dd", "-O", "raw", "bs=1M"])
        .arg(format!("skip={}", (LARGER >> 20) - 1))
        .arg(format!("if={}", image.display()))
        .arg(format!("of={}", out.display()))
        .status();
    assert!(copied.unwrap().success());
    let sum = Command::new("sha256sum").arg(&out).output().unwrap();
    String::from_utf8_lossy(&sum.stdout).split(' ').next().unwrap().to_owned()
}
