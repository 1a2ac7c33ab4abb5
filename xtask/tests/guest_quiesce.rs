//! A guest that writes to its file system has the real QEMU guest agent: in a quiesced snapshot the file system needs no
//! recovery, in any other it does, and the guest goes on, also when the server is killed while it is frozen.

use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;
use xtask::bench::server::{self, Server};
use xtask::guest::{Attach, BOOT_MAX, Guest, RootImage, Task, UP, Vm, serve, spread};

const SNAPSHOTS: usize = 4;
const ROUND_MAX: Duration = Duration::from_secs(180);
const KILLS_MAX: u64 = 20;

#[test]
fn a_quiesced_file_system_needs_no_recovery() {
    xtask::build::vmstrata().unwrap();
    let dir = tempfile::tempdir().unwrap();
    let guest = Guest::here().unwrap();
    let raw = RootImage { size: 256 << 20, files: 2, file_size: 1 << 20 }.make(&guest, dir.path()).unwrap();
    let top = spread(&raw, &dir.path().join("chain"), 2).unwrap();
    let mut server = serve(&top).unwrap();
    let agent = dir.path().join("agent.sock");
    let attach = Attach::VhostUser(server.vhost_user());
    let mut vm = Vm::boot_with(&guest, &attach, Task::Soak, &port(&agent)).unwrap();
    wait_for(&mut vm, &server, UP);
    wait_for(&mut vm, &server, "guest: agent");
    wait_for(&mut vm, &server, "verified");

    let take = |name: &str, more: &[&str]| -> Value {
        let mut command = Command::new(server::vmstrata());
        command.args(["snapshot", "create", "--json", "--name", name, "--control"]).arg(server.control());
        let taken = command.args(more).arg(&top).output().unwrap();
        assert!(taken.status.success(), "{}", String::from_utf8_lossy(&taken.stderr));
        serde_json::from_slice(&taken.stdout).unwrap()
    };
    for number in 0..SNAPSHOTS {
        let agent = agent.to_str().unwrap();
        let quiet = take(&format!("quiet{number}"), &["--agent", agent]);
        let loud = take(&format!("loud{number}"), &["--agent", agent, "--quiesce", "never"]);
        assert_eq!((&quiet["quiesced"], &loud["quiesced"]), (&true.into(), &false.into()), "{quiet} {loud}");
        // It writes, and reads back what it wrote: it was thawed.
        wait_for(&mut vm, &server, "verified");
    }
    kill_while_frozen(&mut server, &agent, &top, &mut vm);
    drop(vm);
    server.stop().unwrap();
    for number in 0..SNAPSHOTS {
        for (name, quiesced) in [("quiet", true), ("loud", false)] {
            let layer = layer_of(&top, &format!("{name}{number}"));
            assert_eq!(needs_recovery(&layer, dir.path()), !quiesced, "{}", layer.display());
        }
    }
}

fn wait_for(vm: &mut Vm, server: &Server, text: &str) {
    let seen = vm.wait_for(text, BOOT_MAX.max(ROUND_MAX));
    seen.unwrap_or_else(|error| panic!("{error:#}\n{}", server.log()));
}

/// Kills the server at moments of the freezing, until a guest was thawed by who stays.
fn kill_while_frozen(server: &mut Server, agent: &Path, disk: &Path, vm: &mut Vm) {
    for round in 0..KILLS_MAX {
        let mut create = Command::new(server::vmstrata());
        create.args(["snapshot", "create", "--quiesce", "always", "--name"]).arg(format!("killed{round}"));
        create.arg("--agent").arg(agent).arg("--control").arg(server.control()).arg(disk);
        let mut asked = create.stderr(Stdio::null()).spawn().unwrap();
        let begun = Instant::now();
        while !is_guarded(agent) {
            assert!(begun.elapsed() < ROUND_MAX, "the guest is not frozen: {}", server.log());
            std::thread::sleep(Duration::from_millis(1));
        }
        // The agent is asked, and the guest's file system takes its time, about now.
        std::thread::sleep(Duration::from_millis(10 * round));
        server.crash().unwrap();
        asked.wait().unwrap();
        server.restart().unwrap();
        server.wait_for_vhost_user().unwrap();
        // Twice: the first may have been on its way to the console.
        wait_for(vm, server, "verified");
        wait_for(vm, server, "verified");
        if server.log().contains("thawed the guest, which the server had frozen") {
            return;
        }
    }
    panic!("no guest was frozen in {KILLS_MAX} kills: {}", server.log());
}

/// Whether the second process is there that would thaw this agent's guest.
fn is_guarded(agent: &Path) -> bool {
    let processes = std::fs::read_dir("/proc").unwrap().flatten();
    let mut said = processes.filter_map(|process| std::fs::read(process.path().join("cmdline")).ok());
    said.any(|words| {
        let mut words = words.split(|byte| *byte == 0).skip(1);
        words.next() == Some(b"thaw-guard") && words.next() == Some(agent.as_os_str().as_bytes())
    })
}

/// What gives a machine a port for its agent, which this side is the client of.
fn port(socket: &Path) -> Vec<String> {
    let chardev = format!("socket,id=agent,path={},server=on,wait=off", socket.display());
    let port = "virtserialport,chardev=agent,name=org.qemu.guest_agent.0";
    ["-device", "virtio-serial-pci", "-chardev", &chardev, "-device", port].map(str::to_owned).to_vec()
}

fn layer_of(top: &Path, snapshot: &str) -> PathBuf {
    top.with_file_name(format!("{}.{snapshot}.qcow2", top.file_stem().unwrap().to_str().unwrap()))
}

/// Whether the file system on a snapshot has a journal to replay; if it has none, it is in order as it is.
fn needs_recovery(image: &Path, dir: &Path) -> bool {
    let raw = dir.join("snapshot.raw");
    let convert = Command::new("qemu-img").args(["convert", "-O", "raw"]).args([image, &raw]).status();
    assert!(convert.unwrap().success());
    let tool = |program: &str, options: &[&str]| -> Output {
        let mut command = Command::new(program);
        command.env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin").args(options).arg(&raw).output().unwrap()
    };
    let header = tool("dumpe2fs", &["-h"]);
    assert!(header.status.success(), "{}", String::from_utf8_lossy(&header.stderr));
    let needs = String::from_utf8_lossy(&header.stdout).contains("needs_recovery");
    if !needs {
        let checked = tool("e2fsck", &["-f", "-n"]);
        let said = String::from_utf8_lossy(&checked.stdout);
        assert!(checked.status.success(), "{}: {said}", image.display());
    }
    needs
}
