//! Pages of a real guest's cache that no snapshot stores: they come back from its disk, and the guest reads its files right.

use std::io::Write;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Output;
use std::time::Duration;

use serde_json::Value;
use tempfile::TempDir;
use xtask::guest::{BOOT_MAX, Export, Guest, Hardware, RootImage, ServedGuest, Task, must, spread};

/// Far more than a guest needs to read its files, on a busy machine.
const CHECK_MAX: Duration = Duration::from_secs(120);
const FILES: RootImage = RootImage { size: 128 << 20, files: 8, file_size: 2 << 20 };

/// A guest that has its files in memory.
struct Cached {
    guest: ServedGuest,
    dir: TempDir,
}

impl Cached {
    fn start() -> Self {
        xtask::build::vmstrata().unwrap();
        let guest = Guest::here().unwrap();
        let dir = tempfile::tempdir_in("/dev/shm").unwrap();
        let raw = FILES.make(&guest, dir.path()).unwrap();
        let disk = spread(&raw, &dir.path().join("chain"), 3).unwrap();
        let hardware = Hardware { memory: Some(dir.path().join("memory")), ..Hardware::default() };
        let monitor = dir.path().join("qmp");
        let disk = (disk, Export::VhostUser);
        let mut guest = ServedGuest::start(&guest, disk, Task::Cache, &hardware, monitor).unwrap();
        guest.vm.wait_for("guest: cached", BOOT_MAX).unwrap();
        Self { guest, dir }
    }

    fn repository(&self, repository: &str) -> PathBuf {
        self.dir.path().join(repository)
    }

    fn snapshot(&self, name: &str, repository: &str, flags: &[&str]) -> Value {
        let words = ["snapshot", "web", "--copies", "1", "--json", "--name", name];
        let mut command = self.guest.vm_monitored(&words, &[self.repository(repository)]).unwrap();
        json(&must(command.args(flags)).unwrap())
    }

    /// Kills the guest, puts its disk back to `name`, and starts it from there.
    fn restore(&mut self, name: &str, repository: &str, flags: &[&str]) {
        let repositories = [self.repository(repository)];
        self.guest.restore(&format!("web@{name}"), &repositories, flags).unwrap();
        self.guest.vm.wait_for(" restored ", CHECK_MAX).unwrap();
    }

    /// Has the guest read all its files; returns what it read from its disk since the disk was served.
    fn check(&mut self) -> u64 {
        self.guest.vm.say("check").unwrap();
        self.guest.vm.wait_for("guest: checked", CHECK_MAX).unwrap();
        let mut socket = UnixStream::connect(self.guest.server().control()).unwrap();
        socket.write_all(b"GET /v1/stats HTTP/1.1\r\nHost: here\r\nConnection: close\r\n\r\n").unwrap();
        let answer = std::io::read_to_string(socket).unwrap();
        let (_, body) = answer.split_once("\r\n\r\n").unwrap();
        let stats: Value = serde_json::from_str(body).unwrap();
        stats["disks"][0]["stats"]["read"]["bytes"].as_u64().unwrap_or_else(|| panic!("{body}"))
    }
}

fn json(output: &Output) -> Value {
    serde_json::from_slice(&output.stdout).unwrap()
}

fn bytes(repository: &Path) -> u64 {
    std::fs::read_dir(repository).unwrap().map(|file| file.unwrap().metadata().unwrap().len()).sum()
}

#[test]
fn guest_gets_its_cache_back_from_its_disk() {
    let mut cached = Cached::start();
    let stored = cached.snapshot("stored", "stored", &["--no-refill"]);
    let refilled = cached.snapshot("refilled", "refilled", &[]);
    let pages = |of: &Value, what: &str| of[what].as_u64().unwrap();
    let (clean, on_disk) = (pages(&refilled, "clean-pages"), pages(&refilled, "refilled-pages"));
    let [with_copies, without] =
        ["stored", "refilled"].map(|repository| bytes(&cached.repository(repository)));
    eprintln!(
        "{on_disk} of {clean} clean pages are on the disk: {without} bytes stored instead of {with_copies}"
    );
    assert_eq!(pages(&stored, "refilled-pages"), 0);
    let file_pages = u64::from(FILES.files) * FILES.file_size / 4096;
    assert!(clean > file_pages && on_disk * 10 > clean * 9, "{refilled}");
    assert!(without < with_copies, "{without} {with_copies}");

    cached.restore("refilled", "refilled", &[]);
    let warm = cached.check();
    cached.restore("refilled", "refilled", &["--no-refill"]);
    let cold = cached.check();
    cached.restore("refilled", "refilled", &["--lazy", "--cache-time", "60"]);
    let first = cached.check();
    // Without time before it runs: page by page as it asks for them, and in the background.
    let unread = ["--lazy", "--cache-time", "0"];
    cached.restore("refilled", "refilled", &[&unread[..], &["--fill-rate", "0"]].concat());
    let later = cached.check();
    cached.restore("refilled", "refilled", &unread);
    cached.guest.vm.wait_for("all of its memory is here", CHECK_MAX).unwrap();
    let whole = cached.check();
    eprintln!("the guest read {warm} bytes with its cache, {first} when it ran first, {cold} without");
    eprintln!("{later} where it asked for its cache, {whole} when all was there");
    assert!(cold >= file_pages * 4096 && warm * 20 < cold && first * 20 < cold, "{warm} {first} {cold}");
    assert!(later * 20 < cold && whole * 20 < cold, "{later} {whole} {cold}");
}
