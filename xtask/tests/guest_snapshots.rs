//! A guest works on its file system while snapshots of its disk are taken, and the server is killed in between.
//!
//! The guest must go on without an I/O error and find every byte it wrote. Every snapshot is a disk as a power failure
//! would have left it: stock tools find each layer sound, and the file system on it recovers.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::time::{Duration, Instant};

use xtask::bench::server::{self, Server};
use xtask::guest::{Attach, BOOT_MAX, Guest, RootImage, Task, UP, Vm, judge, kill_and_serve, serve, spread};

const ROUNDS: u32 = 4;
const SNAPSHOTS_MIN: usize = 8;
const BETWEEN_SNAPSHOTS: Duration = Duration::from_millis(50);
/// Snapshots from one kill to the next.
const KILL_EVERY: usize = 5;
const WORKLOAD_MAX: Duration = Duration::from_secs(600);

#[test]
fn guest_does_not_notice_snapshots_of_its_disk() {
    xtask::build::vmstrata().unwrap();
    let dir = tempfile::tempdir().unwrap();
    let guest = Guest::here().unwrap();
    let raw = RootImage { size: 256 << 20, files: 4, file_size: 2 << 20 }.make(&guest, dir.path()).unwrap();
    let top = spread(&raw, &dir.path().join("chain"), 3).unwrap();

    let mut server = serve(&top).unwrap();
    let attach = Attach::VhostUser(server.vhost_user());
    let mut vm = Vm::boot(&guest, &attach, Task::Workload { rounds: ROUNDS }).unwrap();
    vm.wait_for(UP, BOOT_MAX).unwrap();
    let layers = snapshots_until_done(&mut server, &mut vm, &top);
    vm.wait_for_end(BOOT_MAX).unwrap_or_else(|error| panic!("{error:#}\nserver:\n{}", server.log()));
    server.stop().unwrap();

    for round in 1..=ROUNDS {
        assert!(vm.console().contains(&format!("guest: round {round} verified")), "{}", vm.console());
    }
    assert!(layers.len() >= SNAPSHOTS_MIN, "only {} snapshots fell into the workload", layers.len());
    for layer in layers.iter().chain([&top]) {
        judge::leaks(layer).unwrap();
    }
    for layer in layers.iter().step_by(layers.len() / 4) {
        judge::recovers(layer, dir.path()).unwrap();
    }
    let mut stock = Vm::boot(&guest, &Attach::Qcow2(top), Task::Verify).unwrap();
    stock.wait_for_end(BOOT_MAX).unwrap();
}

/// Takes snapshots until the guest is done, killing the server now and then; returns their layers.
fn snapshots_until_done(server: &mut Server, vm: &mut Vm, top: &Path) -> Vec<PathBuf> {
    let start = Instant::now();
    let mut layers = Vec::new();
    loop {
        let done = vm.saw("guest: done", BETWEEN_SNAPSHOTS);
        if done.unwrap_or_else(|error| panic!("{error:#}\nserver:\n{}", server.log())) {
            return layers;
        }
        assert!(start.elapsed() < WORKLOAD_MAX, "{}\n{}", vm.console(), server.log());
        let name = format!("s{}", layers.len());
        let taken = snapshot(server, top, &name);
        assert!(taken.status.success(), "{}", String::from_utf8_lossy(&taken.stderr));
        layers
            .push(top.with_file_name(format!("{}.{name}.qcow2", top.file_stem().unwrap().to_str().unwrap())));
        if layers.len() % KILL_EVERY == 0 {
            let served = kill_and_serve(server, vm);
            if served.unwrap_or_else(|error| panic!("{error:#}\nserver:\n{}", server.log())) {
                return layers;
            }
        }
    }
}

fn snapshot(server: &Server, disk: &Path, name: &str) -> Output {
    let mut command = Command::new(server::vmstrata());
    command.args(["snapshot", "create", "--name", name, "--control"]).arg(server.control()).arg(disk);
    command.output().unwrap()
}
