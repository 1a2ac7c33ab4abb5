//! The units of `packaging/` under a real systemd: see `xtask/src/guest/system-test.sh` for what is tried.

use std::time::Duration;

use xtask::guest::{Attach, Guest, Hardware, Task, Vm, serve, spread, system};

/// Booting a system of services takes long under software emulation.
const PATIENCE: Duration = Duration::from_secs(400);

#[test]
fn the_units_start_confine_and_keep_the_server() {
    xtask::build::vmstrata().unwrap();
    let dir = tempfile::tempdir().unwrap();
    let guest = Guest::here().unwrap();
    let raw = system::make(dir.path()).unwrap();
    let top = spread(&raw, &dir.path().join("chain"), 1).unwrap();
    let server = serve(&top).unwrap();
    let hardware = Hardware { mib: 512, ..Hardware::default() };
    let attach = Attach::VhostUser(server.vhost_user());
    let mut command = std::process::Command::new("qemu-system-x86_64");
    command.args(Vm::arguments(&guest, &attach, Task::System, &hardware));
    let mut vm = Vm::start(command).unwrap();
    vm.wait_for_end(PATIENCE).unwrap();
    drop(vm);
    server.stop().unwrap();
}
