//! A guest is taken while it runs (memory, devices, disk), killed, and started again from what was taken.
//!
//! The guest counts, and checks at each step a file in memory, a file on disk, and that its disk holds every step before: a
//! memory and a disk of two instants never count on. What is killed at any step of a snapshot leaves a guest that runs.

use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::Duration;

use tempfile::TempDir;
use xtask::bench::server::{self, Disk, Kind, Server};
use xtask::guest::{Attach, BOOT_MAX, Guest, Hardware, RootImage, Task, Vm, spread};

/// Far more than a guest needs for some steps, on a busy machine.
const STEPS_MAX: Duration = Duration::from_secs(120);

/// A guest that counts on a served disk.
struct Counting {
    vm: Vm,
    server: Server,
    disk: PathBuf,
    /// QEMU's arguments.
    arguments: Vec<String>,
    dir: TempDir,
}

impl Counting {
    fn start() -> Self {
        xtask::build::vmstrata().unwrap();
        let guest = Guest::here().unwrap();
        let dir = tempfile::tempdir_in("/dev/shm").unwrap();
        let image = RootImage { size: 128 << 20, files: 4, file_size: 2 << 20 };
        let raw = image.make(&guest, dir.path()).unwrap();
        let disk = spread(&raw, &dir.path().join("chain"), 2).unwrap();
        let server = serve(&disk);
        let attach = Attach::VhostUser(server.vhost_user());
        let hardware = Hardware { memory: Some(dir.path().join("memory")), ..Hardware::default() };
        let arguments = Vm::arguments(&guest, &attach, Task::Count, &hardware);
        let arguments = arguments.into_iter().map(|argument| argument.into_string().unwrap()).collect();
        let mut counting =
            Self { vm: Vm::start(Command::new("true")).unwrap(), server, disk, arguments, dir };
        let mut command = Command::new("qemu-system-x86_64");
        let monitor = format!("unix:{},server=on,wait=off", counting.monitor().display());
        command.args(&counting.arguments).args(["-qmp", &monitor]);
        counting.vm = Vm::start(command).unwrap();
        counting.vm.wait_for("guest: count 3", BOOT_MAX).unwrap();
        counting
    }

    fn monitor(&self) -> PathBuf {
        self.dir.path().join("qmp")
    }

    /// `vmstrata vm COMMAND ... --vault a --vault b --qmp ...`
    fn vm_command(&self, words: &[&str]) -> Command {
        let mut command = vmstrata();
        command.arg("vm").args(words).env("VMSTRATA_CONTROL", self.server.control());
        for home in ["a", "b"] {
            let home = self.dir.path().join(home);
            std::fs::create_dir_all(&home).unwrap();
            command.arg("--vault").arg(home);
        }
        command.arg("--qmp").arg(self.monitor());
        command
    }

    fn snapshot(&self, name: &str) -> Command {
        self.vm_command(&["snapshot", "web", "--one-device", "--copies", "2", "--name", name])
    }

    /// Kills the guest, puts its disk back to `name`, and starts it from there.
    fn restore(&mut self, name: &str, flags: &[&str]) {
        let server = &self.server.vhost_user();
        let snapshot = format!("web@{name}");
        self.end_guest();
        std::mem::replace(&mut self.server, serve(&idle(self.dir.path()))).stop().unwrap();
        let kept = self.dir.path().join(format!("chain/after-{name}.qcow2"));
        let _ = std::fs::remove_file(&kept);
        must(vmstrata().args(["snapshot", "revert"]).arg(&self.disk).arg(name).arg("--keep").arg(kept));
        self.server = serve(&self.disk);
        let moved = self.server.vhost_user().display().to_string();
        let arguments = self.arguments.iter().map(|word| word.replace(&server.display().to_string(), &moved));
        let arguments: Vec<String> = arguments.collect();
        let mut restore = self.vm_command(&["restore", &snapshot]);
        restore.args(flags).args(["--", "qemu-system-x86_64"]).args(&arguments);
        self.arguments = arguments;
        self.vm = Vm::start(restore).unwrap();
    }

    /// Kills the guest; one that was restored is the child of the command that did it.
    fn end_guest(&mut self) {
        let pid = self.vm.pid();
        let children =
            std::fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).unwrap_or_default();
        for child in children.split_whitespace() {
            let _ = Command::new("kill").args(["-KILL", child]).status();
        }
        self.vm = Vm::start(Command::new("true")).unwrap();
    }

    /// The guest runs, if it counts on.
    fn counts_on(&mut self) {
        let next = last_count(&self.vm) + 2;
        self.vm.wait_for(&format!("guest: count {next}"), STEPS_MAX).unwrap();
    }

    /// Names of the snapshots of the disk.
    fn disk_snapshots(&self) -> String {
        let list = must(vmstrata().args(["snapshot", "list", "--json"]).arg(&self.disk));
        String::from_utf8(list.stdout).unwrap()
    }

    /// Snapshots that a home has.
    fn listed(&self) -> usize {
        let home = std::fs::read_dir(self.dir.path().join("a"));
        let is_snapshot = |path: PathBuf| path.extension().is_some_and(|extension| extension == "snapshot");
        home.map_or(0, |files| files.filter(|file| is_snapshot(file.as_ref().unwrap().path())).count())
    }

    /// A snapshot called `name` is wholly there if it was `taken`, and else not at all.
    fn assert_whole(&self, name: &str, taken: bool, before: usize) {
        assert_eq!(self.listed(), before + usize::from(taken));
        assert_eq!(
            self.disk_snapshots().contains(&format!("\"{name}\"")),
            taken,
            "{}",
            self.disk_snapshots()
        );
    }
}

impl Drop for Counting {
    fn drop(&mut self) {
        self.end_guest();
    }
}

fn serve(disk: &Path) -> Server {
    let mut server =
        Server::start(Kind::Vmstrata, &Disk { path: disk.to_owned(), writable: true, backing: None })
            .unwrap();
    server.wait_for_vhost_user().unwrap();
    server
}

/// A disk that nobody uses.
fn idle(dir: &Path) -> PathBuf {
    let path = dir.join("idle.qcow2");
    must(Command::new("qemu-img").args(["create", "-q", "-f", "qcow2"]).arg(&path).arg("1M"));
    path
}

fn vmstrata() -> Command {
    Command::new(server::vmstrata())
}

fn must(command: &mut Command) -> Output {
    let output = command.output().unwrap();
    assert!(output.status.success(), "{command:?}: {}", String::from_utf8_lossy(&output.stderr));
    output
}

fn last_count(vm: &Vm) -> u32 {
    let console = vm.console();
    let mut counts =
        console.lines().rev().filter_map(|line| line.strip_prefix("guest: count ")?.parse().ok());
    counts.next().expect("a guest that counts")
}

#[test]
fn guest_counts_on_from_its_snapshots_with_and_without_its_cache() {
    let mut counting = Counting::start();
    let taken = must(&mut counting.snapshot("mon"));
    eprintln!("{}{}", String::from_utf8_lossy(&taken.stdout), String::from_utf8_lossy(&taken.stderr));
    let at = last_count(&counting.vm);
    counting.counts_on();
    for flags in [&[][..], &["--no-cache"]] {
        counting.restore("mon", flags);
        counting.vm.wait_for("guest: count ", STEPS_MAX).unwrap();
        let first = last_count(&counting.vm);
        assert!(first >= at && first <= at + 2, "taken at {at}, went on at {first}");
        counting.counts_on();
        eprintln!("{flags:?}: {}", counting.vm.console());
    }
}

#[test]
fn guest_runs_on_when_vmstrata_is_killed_at_any_step_of_a_snapshot() {
    let mut counting = Counting::start();
    for after_ms in [20, 60, 100, 150, 200, 300, 500] {
        let mut snapshot = counting.snapshot(&format!("killed-{after_ms}"));
        let mut child = snapshot.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
        std::thread::sleep(Duration::from_millis(after_ms));
        child.kill().unwrap();
        child.wait().unwrap();
        counting.counts_on();
    }
    // What was interrupted is in nobody's way.
    must(&mut counting.snapshot("whole"));
    counting.counts_on();
}

#[test]
fn guest_runs_on_and_nothing_is_listed_when_a_snapshot_fails() {
    let mut counting = Counting::start();
    for after_ms in [100, 300, 500] {
        let (name, before) = (format!("ended-{after_ms}"), counting.listed());
        let mut child = counting.snapshot(&name).stderr(Stdio::null()).spawn().unwrap();
        std::thread::sleep(Duration::from_millis(after_ms));
        must(Command::new("kill").args(["-TERM", &child.id().to_string()]));
        let taken = child.wait().unwrap().success();
        counting.assert_whole(&name, taken, before);
        counting.counts_on();
    }
    // No space in a home: noticed after the disks have their snapshot.
    let (snapshot, before) = (counting.snapshot("full"), counting.listed());
    let mut limited = Command::new("sh");
    limited.args(["-c", "trap '' XFSZ; ulimit -f 1000; exec \"$@\"", "sh"]);
    limited.arg(snapshot.get_program()).args(snapshot.get_args());
    limited.envs(snapshot.get_envs().filter_map(|(name, value)| Some((name, value?))));
    let full = limited.output().unwrap();
    assert_eq!(full.status.code(), Some(1), "{full:?}");
    counting.assert_whole("full", false, before);
    counting.counts_on();
    // QEMU killed under it.
    let mut child = counting.snapshot("gone").stderr(Stdio::null()).spawn().unwrap();
    std::thread::sleep(Duration::from_millis(150));
    counting.vm = Vm::start(Command::new("true")).unwrap();
    let taken = child.wait().unwrap().success();
    counting.assert_whole("gone", taken, before);
}
