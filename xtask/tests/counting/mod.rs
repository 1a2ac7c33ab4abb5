//! A guest that counts on a served disk, is snapshotted, killed, and started again from what was taken.
//!
//! It checks at each step a file in memory, a file on disk, and that its disk holds every step before: a memory and a disk of
//! two instants never count on. A busy one also has readers, writers, programs mapped from disk, and too little memory.

// Each test binary compiles this module for itself and uses a part of it.
#![allow(dead_code, unreachable_pub)]

use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::time::{Duration, Instant};

use tempfile::TempDir;
use xtask::bench::server;
pub use xtask::guest::Export;
use xtask::guest::{self, BOOT_MAX, Guest, Hardware, RootImage, ServedGuest, Task, Vm, spread};

/// Far more than a guest needs for some steps, on a busy machine.
pub const STEPS_MAX: Duration = Duration::from_secs(120);

/// See the module documentation.
pub struct Counting {
    pub guest: ServedGuest,
    pub dir: TempDir,
}

impl Counting {
    /// A guest of `mib` MiB that has counted some steps.
    pub fn start(export: Export, task: Task, mib: u32) -> Self {
        let hardware = |dir: &Path| Hardware { memory: Some(dir.join("memory")), mib, ..Hardware::default() };
        Self::start_on(export, task, hardware)
    }

    /// As [`Counting::start`], on what `hardware` makes of a directory in memory.
    pub fn start_on(export: Export, task: Task, hardware: impl FnOnce(&Path) -> Hardware) -> Self {
        xtask::build::vmstrata().unwrap();
        let guest = Guest::here().unwrap();
        let dir = tempfile::tempdir_in("/dev/shm").unwrap();
        let image = RootImage { size: 128 << 20, files: 4, file_size: 2 << 20 };
        let raw = image.make(&guest, dir.path()).unwrap();
        let disk = spread(&raw, &dir.path().join("chain"), 2).unwrap();
        let hardware = hardware(dir.path());
        let monitor = dir.path().join("qmp");
        let mut guest = ServedGuest::start(&guest, (disk, export), task, &hardware, monitor).unwrap();
        guest.vm.wait_for("guest: count 3", BOOT_MAX).unwrap();
        Self { guest, dir }
    }

    /// A guest whose disk is published in `nas` by a host that keeps its copy in `tier`.
    pub fn start_tiered() -> Self {
        xtask::build::vmstrata().unwrap();
        let guest = Guest::here().unwrap();
        let dir = tempfile::tempdir_in("/dev/shm").unwrap();
        let image = RootImage { size: 128 << 20, files: 4, file_size: 2 << 20 };
        let raw = image.make(&guest, dir.path()).unwrap();
        std::fs::create_dir(dir.path().join("nas")).unwrap();
        let disk = dir.path().join("nas/web.qcow2");
        let mut convert = Command::new("qemu-img");
        must(convert.args(["convert", "-f", "raw", "-O", "qcow2"]).args([&raw, &disk]));
        std::fs::remove_file(raw).unwrap();
        let hardware = Hardware { memory: Some(dir.path().join("memory")), mib: 256, ..Hardware::default() };
        let (monitor, keys) = (dir.path().join("qmp"), Self::tier_keys(&dir.path().join("tier")));
        let disk = ((disk, Export::VhostUser), keys);
        let mut guest = ServedGuest::start_keyed(&guest, disk, Task::Count, &hardware, monitor).unwrap();
        guest.vm.wait_for("guest: count 3", BOOT_MAX).unwrap();
        Self { guest, dir }
    }

    /// The keys of a tiered disk on the host that keeps its copy in `tier`. It is cut when it is asked to be.
    pub fn tier_keys(tier: &Path) -> String {
        format!(",tier={},window=600", tier.display())
    }

    fn repositories(&self) -> [PathBuf; 2] {
        ["a", "b"].map(|repository| self.dir.path().join(repository))
    }

    /// `vmstrata vm COMMAND ... --vault a --vault b --qmp ...`
    pub fn vm_command(&self, words: &[&str]) -> Command {
        self.guest.vm_monitored(words, &self.repositories()).unwrap()
    }

    pub fn snapshot(&self, name: &str) -> Command {
        self.vm_command(&["snapshot", "web", "--one-device", "--copies", "2", "--name", name])
    }

    /// `vmstrata vm delete ... --vault a --vault b`
    pub fn vm_delete(&self, words: &[&str]) -> Command {
        let words = [&["delete"], words].concat();
        self.guest.vm_command(&words, &self.repositories()).unwrap()
    }

    /// `vmstrata vm pages --qmp ...`
    pub fn pages(&self) -> Command {
        let mut command = vmstrata();
        command.args(["vm", "pages", "--qmp"]).arg(self.guest.monitor());
        command
    }

    /// Kills the guest, puts its disk back to `name`, and starts it from there.
    pub fn restore(&mut self, name: &str, flags: &[&str]) {
        let repositories = self.repositories();
        self.guest.restore(&format!("web@{name}"), &repositories, flags).unwrap();
    }

    /// Sends a signal to the server of the guest's disk.
    pub fn signal_server(&self, signal: &str) {
        must(Command::new("kill").args([signal, &self.guest.server().id().to_string()]));
    }

    /// The guest runs, if it counts on.
    pub fn counts_on(&mut self) {
        let next = last_count(&self.guest.vm) + 2;
        self.guest.vm.wait_for(&format!("guest: count {next}"), STEPS_MAX).unwrap();
    }

    /// Names of the snapshots of the disk.
    pub fn disk_snapshots(&self) -> String {
        let list = must(vmstrata().args(["snapshot", "list", "--json"]).arg(self.guest.disk()));
        String::from_utf8(list.stdout).unwrap()
    }

    /// Snapshots that a repository has.
    pub fn listed(&self) -> usize {
        let repository = std::fs::read_dir(self.dir.path().join("a"));
        let is_snapshot = |path: PathBuf| path.extension().is_some_and(|extension| extension == "snapshot");
        repository.map_or(0, |files| files.filter(|file| is_snapshot(file.as_ref().unwrap().path())).count())
    }

    /// Waits until a snapshot called `name` is wholly there or not at all: what a killed process leaves is put away by another.
    pub fn wait_whole(&self, name: &str, before: usize) {
        let (start, quoted) = (Instant::now(), format!("\"{name}\""));
        while (self.listed() > before) != self.disk_snapshots().contains(&quoted) {
            assert!(start.elapsed() < STEPS_MAX, "{name}: {}", self.disk_snapshots());
            std::thread::sleep(Duration::from_millis(100));
        }
    }

    /// A snapshot called `name` is wholly there if it was `taken`, and else not at all.
    pub fn assert_whole(&self, name: &str, taken: bool, before: usize) {
        assert_eq!(self.listed(), before + usize::from(taken));
        assert_eq!(
            self.disk_snapshots().contains(&format!("\"{name}\"")),
            taken,
            "{}",
            self.disk_snapshots()
        );
    }
}

fn vmstrata() -> Command {
    Command::new(server::vmstrata())
}

pub fn must(command: &mut Command) -> Output {
    guest::must(command).unwrap()
}

pub fn last_count(vm: &Vm) -> u32 {
    let console = vm.console();
    let mut counts =
        console.lines().rev().filter_map(|line| line.strip_prefix("guest: count ")?.parse().ok());
    counts.next().expect("a guest that counts")
}
