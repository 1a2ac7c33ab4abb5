//! `vmstrata vm snapshot` of a machine without a system: live, where that is refused, and again and again. Guests are taken in
//! the guest tests.

use crate::support;
use std::fs::File;
use std::io::Write;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use crate::support::server::Server;
use crate::support::{Images, audited, stderr, tool_json, vmstrata, wait_until};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};
use vmstrata_memory::qmp::Qmp;

/// A machine whose firmware finds nothing to start; killed when dropped.
struct Machine {
    qemu: Child,
    monitor: PathBuf,
}

impl Machine {
    /// With memory in `memory`, and its monitor at `monitor`.
    fn start(memory: &Path, monitor: PathBuf, more: &[&str]) -> Self {
        let _ = std::fs::remove_file(&monitor);
        let object = format!("memory-backend-file,id=mem,size=64M,share=on,mem-path={}", memory.display());
        let mut command = Command::new("qemu-system-x86_64");
        command.args(["-nodefaults", "-display", "none", "-accel", "tcg", "-m", "64", "-object", &object]);
        command.args(["-machine", "q35,memory-backend=mem"]).args(more);
        command.args(["-qmp", &format!("unix:{},server=on,wait=off", monitor.display())]);
        let machine = Self { qemu: command.stdin(Stdio::null()).spawn().expect("QEMU starts"), monitor };
        wait_until("the monitor", || machine.monitor.exists());
        machine
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        let _ = self.qemu.kill();
        let _ = self.qemu.wait();
    }
}

/// `vmstrata vm snapshot web` into `images`' directory, with a server that is not there unless named.
fn snapshot(images: &Images, monitor: &Path) -> Command {
    std::fs::create_dir_all(images.path("vault")).expect("a directory");
    let mut command = vmstrata();
    command.args(["vm", "snapshot", "web", "--copies", "1", "--vault"]).arg(images.path("vault"));
    command.arg("--qmp").arg(monitor).env("VMSTRATA_CONTROL", images.path("no-server"));
    command
}

#[test]
fn a_machine_is_taken_live_and_stores_what_changed_unless_it_is_full() {
    let images = Images::new();
    let memory = tempfile::tempdir_in("/dev/shm").expect("memory");
    let machine = Machine::start(&memory.path().join("memory"), images.path("qmp"), &[]);
    let take = |name: &str| -> Value {
        let mut command = snapshot(&images, &machine.monitor);
        command.args(["--mode", "live", "--json", "--full-every", "2", "--name", name]);
        let output = command.output().expect("runs");
        assert!(output.status.success(), "{}", stderr(&output));
        serde_json::from_slice(&output.stdout).expect("JSON")
    };
    let [first, second, third] = ["first", "second", "third"].map(take);
    assert_eq!(first["pages"], 16384);
    let stored = |taken: &Value| taken["stored-pages"].as_u64().expect("a number");
    assert!(stored(&first) > 16 && stored(&second) < stored(&first), "{first}\n{second}");
    assert!(stored(&third) > stored(&second), "{second}\n{third}");
    let full = [&first, &second, &third].map(|taken| taken["full"] == true);
    assert_eq!(full, [true, false, true]);
}

#[test]
fn what_stands_against_a_live_capture_is_told_with_what_to_do() {
    let images = Images::new();
    let machine =
        Machine::start(&PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("memory"), images.path("qmp"), &[]);
    let output = snapshot(&images, &machine.monitor).args(["--mode", "live"]).output().expect("runs");
    // A build directory on /dev/shm would do.
    let said = stderr(&output);
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(said.contains("mem-path=/dev/shm/NAME") && said.contains("--mode copy does not need"), "{said}");
    drop(machine);
    let memory = tempfile::tempdir_in("/dev/shm").expect("memory");
    let machine = Machine::start(&memory.path().join("memory"), images.path("qmp"), &["-S"]);
    let output = snapshot(&images, &machine.monitor).args(["--mode", "live"]).output().expect("runs");
    assert!(stderr(&output).contains("it is paused"), "{}", stderr(&output));
    {
        let mut qmp = Qmp::connect(&machine.monitor, Duration::from_secs(20)).expect("answers");
        qmp.tell("cont", json!({})).expect("runs");
        let on = json!({ "capabilities": [{ "capability": "x-ignore-shared", "state": true }] });
        qmp.tell("migrate-set-capabilities", on).expect("sets");
    }
    let output = snapshot(&images, &machine.monitor).args(["--mode", "live"]).output().expect("runs");
    assert!(stderr(&output).contains("x-ignore-shared is on"), "{}", stderr(&output));
    std::fs::remove_file(PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("memory")).expect("removes");
}

#[test]
fn periodic_snapshots_go_on_without_the_guest_and_keep_what_the_rules_say() {
    let images = Images::new();
    let memory = tempfile::tempdir_in("/dev/shm").expect("memory");
    images.create("web.qcow2", &["16M"]);
    let (disk, nbd) = (images.name("web.qcow2"), images.name("nbd.sock"));
    let server = Server::start(&["--disk", &format!("path={disk}"), "--nbd", &format!("unix:{nbd},rw")]);
    let export = format!("driver=nbd,node-name=disk,export=web,server.type=unix,server.path={nbd}");
    let devices = ["-blockdev", &export, "-device", "virtio-blk-pci,drive=disk"];
    let machine = || Machine::start(&memory.path().join("memory"), images.path("qmp"), &devices);
    let ours = |command: &mut Command| {
        command.env("VMSTRATA_CONTROL", server.control());
    };
    let guest = machine();
    let mut by_hand = snapshot(&images, &guest.monitor);
    ours(&mut by_hand);
    assert!(by_hand.args(["--name", "by-hand"]).status().expect("runs").success());
    drop(guest);

    let log = images.path("log");
    let mut periodic = snapshot(&images, &images.path("qmp"));
    ours(&mut periodic);
    let file = File::create(&log).expect("a log");
    periodic
        .args(["--every", "1s", "--keep", "last=2"])
        .stdout(file.try_clone().expect("a file"))
        .stderr(file);
    let mut periodic = periodic.spawn().expect("starts");
    let said = |words: &str| std::fs::read_to_string(&log).expect("a log").matches(words).count();
    wait_until("a round without the guest", || said("web: no snapshot: guest web cannot be reached") > 1);
    let guest = machine();
    wait_until("four snapshots", || said("1 disk taken") > 3);
    drop(guest);
    let before = said("no snapshot");
    wait_until("a round without the guest", || said("no snapshot") > before);
    kill_process(Pid::from_child(&periodic), Signal::TERM).expect("it runs");
    let status = periodic.wait().expect("ends");
    assert!(status.success(), "{status}: {}", std::fs::read_to_string(&log).unwrap_or_default());
    assert!(said(": deleted") > 1, "{}", std::fs::read_to_string(&log).unwrap_or_default());

    let listed: Value = vm_list(&images);
    let memory: Vec<&str> = names(&listed);
    assert_eq!((memory.len(), memory.contains(&"by-hand")), (3, true), "{listed}");
    let disks: Value =
        serde_json::from_str(&server.ask_ok(["snapshot", "list", "--json", &disk])).expect("JSON");
    assert_eq!(
        names(&disks),
        memory,
        "each with its disk: {}",
        std::fs::read_to_string(&log).unwrap_or_default()
    );
    assert!(tool_json("qemu-img", ["info", "-U", "--output=json", &disk])["format"] == "qcow2");
}

/// Its memory alone would go on with what is in the swap by then.
#[test]
fn a_machine_with_swap_of_its_own_is_not_taken() {
    let images = Images::new();
    let memory = tempfile::tempdir_in("/dev/shm").expect("memory");
    images.create("web.qcow2", &["16M"]);
    let [disk, swap, nbd] = ["web.qcow2", "swap.img", "nbd.sock"].map(|file| images.name(file));
    let (web, swap) = (format!("path={disk}"), format!("path={swap},role=swap,size=16M"));
    let server = Server::start(&["--disk", &web, "--disk", &swap, "--nbd", &format!("unix:{nbd},rw")]);
    let export =
        |name: &str| format!("driver=nbd,node-name={name},export={name},server.type=unix,server.path={nbd}");
    let devices = ["-blockdev", &export("web"), "-device", "virtio-blk-pci,drive=web"];
    let swap = ["-blockdev", &export("swap"), "-device", "virtio-blk-pci,drive=swap"];
    let machine =
        Machine::start(&memory.path().join("memory"), images.path("qmp"), &[devices, swap].concat());
    let mut take = snapshot(&images, &machine.monitor);
    let taken =
        take.env("VMSTRATA_CONTROL", server.control()).args(["--name", "mon"]).output().expect("runs");
    assert!(!taken.status.success() && stderr(&taken).contains("swap"), "{}", stderr(&taken));
    assert!(names(&vm_list(&images)).is_empty());
    assert!(server.ask_ok(["snapshot", "list", &disk]).contains("no snapshots"));
    let mut qmp = Qmp::connect(&machine.monitor, Duration::from_secs(20)).expect("answers");
    let status: Value = qmp.ask("query-status", json!({})).expect("tells");
    assert_eq!(status["status"], "running");
}

#[test]
fn periodic_snapshots_go_on_after_the_program_was_replaced() {
    let images = Images::new();
    let memory = tempfile::tempdir_in("/dev/shm").expect("memory");
    let _guest = Machine::start(&memory.path().join("memory"), images.path("qmp"), &[]);
    let (program, log) = (images.path("vmstrata"), images.path("log"));
    std::fs::copy(env!("CARGO_BIN_EXE_vmstrata"), &program).expect("copies");
    std::fs::create_dir_all(images.path("vault")).expect("a directory");
    let file = File::create(&log).expect("a log");
    let mut periodic = Command::new(&program);
    periodic.args(["vm", "snapshot", "web", "--copies", "1", "--every", "1s", "--vault"]);
    periodic.arg(images.path("vault")).arg("--qmp").arg(images.path("qmp"));
    periodic.env("VMSTRATA_CONTROL", images.path("no-server"));
    periodic.stdout(file.try_clone().expect("a file")).stderr(file);
    let mut periodic = periodic.spawn().expect("starts");
    let said = |words: &str| std::fs::read_to_string(&log).expect("a log").matches(words).count();
    wait_until("a snapshot", || said(" taken (") > 0);
    // What an upgrade leaves at the path need not even be a program.
    std::fs::write(images.path("new"), "another version").expect("writes");
    std::fs::rename(images.path("new"), &program).expect("replaces");
    let before = said(" taken (");
    wait_until("two more rounds", || said(" taken (") > before + 1 || said("no snapshot") > 0);
    kill_process(Pid::from_child(&periodic), Signal::TERM).expect("it runs");
    assert!(periodic.wait().expect("ends").success());
    assert_eq!(said("no snapshot"), 0, "{}", std::fs::read_to_string(&log).unwrap_or_default());
}

/// A monitor may be another's for a while, or break off: the guest waits for its stream to be read all that time.
#[test]
fn a_guard_reads_on_until_qemu_does_what_it_says() {
    let images = Images::new();
    let memory = tempfile::tempdir_in("/dev/shm").expect("memory");
    let machine = Machine::start(&memory.path().join("memory"), images.path("qemu"), &["-S"]);
    let listener = UnixListener::bind(images.path("qmp")).expect("a monitor that is none");
    let (reader, mut writer) = std::io::pipe().expect("a pipe");
    std::fs::create_dir_all(images.path("vault")).expect("a directory");
    let mut guard = {
        let mut command = vmstrata();
        command.args(["vm", "guard"]).stdin(Stdio::piped()).stdout(reader);
        command.spawn().expect("starts")
    };
    let undo = json!([{ "Resume": {
        "monitor": images.path("qmp"), "ran": true, "capability": null, "guest": "web", "name": "mon",
        "taken_ns": 1, "disks": [], "control": images.path("no-server"), "vault": [images.path("vault")],
    } }]);
    // The second line was cut off: what it was for has not begun.
    let words = format!("{undo}\n{}", "[{\"Remove\":\"/");
    guard.stdin.take().expect("a pipe").write_all(words.as_bytes()).expect("hears it");
    for _ in 0..2 {
        listener.accept().expect("it tries again").0.write_all(b"{}\n").expect("hears it");
    }
    writer.write_all(&[0; 1 << 20]).expect("somebody reads");
    std::fs::rename(&machine.monitor, images.path("qmp")).expect("the monitor is QEMU's");
    drop(listener);
    assert!(guard.wait().expect("ends").success());
    let mut qmp = Qmp::connect(&images.path("qmp"), Duration::from_secs(60)).expect("connects");
    let status: Value = qmp.ask("query-status", json!({})).expect("answers");
    assert_eq!(status["running"], true);
}

#[test]
fn copies_are_those_of_the_newest_snapshot_and_what_devices_allow() {
    let images = Images::new();
    let memory = tempfile::tempdir_in("/dev/shm").expect("memory");
    let machine = Machine::start(&memory.path().join("memory"), images.path("qmp"), &[]);
    for repository in ["a", "b"] {
        std::fs::create_dir(images.path(repository)).expect("a directory");
    }
    let vault = format!("{}:{}", images.name("a"), images.name("b"));
    let take = |name: &str, flags: &[&str]| {
        let mut command = vmstrata();
        command.args(["vm", "snapshot", "web", "--name", name, "--vault", &vault]).args(flags);
        let command =
            command.arg("--qmp").arg(&machine.monitor).env("VMSTRATA_CONTROL", images.path("no-server"));
        stderr(&command.output().expect("runs"))
    };
    let copies = || {
        let listed = support::run_json(["vm", "list", "web", "--json", "--vault", &vault]);
        listed["snapshots"][0]["copies"].as_u64().expect("a number")
    };
    let said = take("one", &[]);
    assert!(said.contains("1 copy instead of 3") && said.contains("on one device"), "{said}");
    assert_eq!(copies(), 1);
    let said = take("meant", &["--copies", "1"]);
    assert!(!said.contains("instead of"), "{said}");
    // What is asked for is not made less of.
    assert!(take("refused", &["--copies", "2"]).contains("would share a device"));
    take("two", &["--copies", "2", "--one-device"]);
    let said = take("inherited", &["--one-device"]);
    assert!(said.contains("2 copies instead of 3") && said.contains("no more repositories"), "{said}");
    assert_eq!(copies(), 2);
}

/// A machine goes on from its snapshot on a clone of its disk, while what was written to the disk since stays.
#[test]
fn a_machine_is_restored_on_a_clone_of_its_disk() {
    let images = Images::new();
    let memory = tempfile::tempdir_in("/dev/shm").expect("memory");
    images.create("web.qcow2", &["16M"]);
    let (disk, nbd) = (images.name("web.qcow2"), images.name("nbd.sock"));
    let server = Server::start(&["--disk", &format!("path={disk}"), "--nbd", &format!("unix:{nbd},rw")]);
    let export = format!("driver=nbd,node-name=disk,export=web,server.type=unix,server.path={nbd}");
    let devices = ["-blockdev", &export, "-device", "virtio-blk-pci,drive=disk"];
    let machine = Machine::start(&memory.path().join("memory"), images.path("qmp"), &devices);
    let audit = images.path("audit");
    let mut take = snapshot(&images, &machine.monitor);
    take.env("VMSTRATA_CONTROL", server.control()).env("VMSTRATA_AUDIT", &audit).args(["--name", "mon"]);
    assert!(take.status().expect("runs").success());
    drop(machine);
    let url = format!("nbd+unix:///web?socket={nbd}");
    support::tool_ok("qemu-io", ["-f", "raw", "-c", "write -P 7 1M 64k", url.as_str()]);

    let qemu = |flags: &[&str]| {
        let mut restore = vmstrata();
        restore.args(["vm", "restore", "web@mon", "--vault"]).arg(images.path("vault")).args(flags);
        restore.arg("--qmp").arg(images.path("qmp")).arg("--memory-dir").arg(memory.path());
        restore.args(["--", "qemu-system-x86_64", "-nodefaults", "-display", "none", "-accel", "tcg"]);
        restore.args(["-machine", "q35,memory-backend=mem", "-m", "64"]).args(devices);
        restore.env("VMSTRATA_CONTROL", server.control()).env("VMSTRATA_AUDIT", &audit);
        restore
    };
    let refused = qemu(&[]).output().expect("runs");
    assert!(stderr(&refused).contains("snapshot revert"), "{}", stderr(&refused));
    let log = images.path("log");
    let mut restore =
        qemu(&["--clone-disks"]).stderr(File::create(&log).expect("a log")).spawn().expect("starts");
    let said = |words: &str| std::fs::read_to_string(&log).expect("a log").contains(words);
    wait_until("the guest", || said("restored in") || restore.try_wait().expect("waits").is_some());
    assert!(said("restored in"), "{}", std::fs::read_to_string(&log).unwrap_or_default());
    kill_process(Pid::from_child(&restore), Signal::TERM).expect("it runs");
    restore.wait().expect("ends");
    assert!(images.path("web.mon.clone.qcow2").exists(), "it is the guest's disk now");
    let clone = format!("nbd+unix:///web.mon.clone?socket={nbd}");
    let read = |url: &str, pattern: &str| {
        support::tool_ok("qemu-io", ["-r", "-f", "raw", "-c", &format!("read -P {pattern} 1M 64k"), url])
    };
    assert!(!read(&clone, "0").contains("failed") && !read(&url, "7").contains("failed"));
    let told: Vec<_> =
        audited(&audit).iter().map(|line| (line["change"].clone(), line["disks"].clone())).collect();
    let cloned = images.name("web.mon.clone.qcow2");
    let expected = [("vm_snapshot", "web"), ("vm_restore", &cloned)]
        .map(|(change, disk)| (json!(change), json!([disk])));
    assert_eq!(told, expected, "the disk's own snapshot is in its server's");
}

/// A machine is taken into an object store, and goes on from there. What was deleted while the vault was read goes with `gc`.
#[cfg(feature = "s3")]
#[test]
fn a_machine_is_kept_in_s3() {
    crate::s3::with_keys("vm_snapshot::a_machine_is_kept_in_s3", || {
        let store = crate::s3::Store::start();
        let images = Images::new();
        let memory = tempfile::tempdir_in("/dev/shm").expect("memory");
        let machine = Machine::start(&memory.path().join("memory"), images.path("qmp"), &[]);
        let vault = store.repository("vault");
        let run = |args: &[&str]| {
            support::run_json(["vm"].iter().chain(args).chain(&["--json", "--vault", &vault]))
        };
        for name in ["mon", "tue"] {
            let mut take = vmstrata();
            take.args([
                "vm",
                "snapshot",
                "web",
                "--copies",
                "1",
                "--full-every",
                "1",
                "--name",
                name,
                "--qmp",
            ]);
            take.arg(&machine.monitor);
            let output = take.env("VMSTRATA_VAULT", &vault).env("VMSTRATA_CONTROL", images.path("no-server"));
            let output = output.output().expect("runs");
            assert!(output.status.success(), "{}", stderr(&output));
        }
        drop(machine);
        assert_eq!(names(&run(&["list", "web"])), ["tue", "mon"]);
        let vault_in_use =
            vmstrata_memory::vault::Vault::open_at(std::slice::from_ref(&vault)).expect("opens");
        let reader = vault_in_use.snapshot(&"web@tue".parse().expect("a name")).expect("opens");
        run(&["delete", "web@mon"]);
        let refused = support::run_err(1, ["vm", "gc", "--vault", &vault]);
        assert!(refused.contains("the vault is in use"), "{refused}");
        drop(reader);
        let done = run(&["gc"]);
        assert!(done["removed"].as_u64() > Some(0) && done["freed"].as_u64() > Some(0), "{done}");
        assert_eq!(run(&["verify"])[0]["whole"], true);
        assert!(store.keys().iter().all(|key| key.starts_with("vault/") && !key.contains("/.")));

        let log = images.path("log");
        let mut restore = vmstrata();
        restore.args(["vm", "restore", "web@tue", "--vault", &vault]);
        restore.arg("--qmp").arg(images.path("qmp")).arg("--memory-dir").arg(memory.path());
        restore.args(["--", "qemu-system-x86_64", "-nodefaults", "-display", "none", "-accel", "tcg"]);
        restore.args(["-machine", "q35,memory-backend=mem", "-m", "64"]);
        restore.env("VMSTRATA_CONTROL", images.path("no-server")).stderr(File::create(&log).expect("a log"));
        let mut restore = restore.spawn().expect("starts");
        let said = || std::fs::read_to_string(&log).expect("a log");
        let is_restored = || said().contains("restored in");
        wait_until("the guest", || is_restored() || restore.try_wait().expect("waits").is_some());
        assert!(is_restored(), "{}", said());
        kill_process(Pid::from_child(&restore), Signal::TERM).expect("it runs");
        restore.wait().expect("ends");
    });
}

fn vm_list(images: &Images) -> Value {
    support::run_json(["vm", "list", "web", "--json", "--vault", &images.name("vault")])
}

fn names(listed: &Value) -> Vec<&str> {
    let rows = listed["snapshots"].as_array().expect("a list");
    rows.iter().filter_map(|row| row["name"].as_str()).collect()
}
