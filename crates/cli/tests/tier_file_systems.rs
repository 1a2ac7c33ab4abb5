//! File systems on a tiered disk: each state that is published is one that the kernel brings in order from its journal, with all files
//! that were on stable storage before.
//!
//! ```text
//!   files ──► ext4, xfs ──► loop device ──► qemu-storage-daemon ──► vmstrata serve, window=1 ──► repository
//!                                                                                                   │ each epoch
//!   mounted, files compared, checked by the file system's own tool ◄── loop device ◄── qemu-img ◄───┘
//! ```

use std::fs::{self, File};
use std::io::Write as _;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

use crate::support::loop_device::{FileSystem, LoopDevice};
use crate::support::server::Server;
use crate::support::{Images, tool, tool_ok, wait_until};
use rustix::fs::OFlags;
use vmstrata_repo::DirectoryRepository;
use vmstrata_tier::{Epoch, is_object_name, newest, repository_of};

const SIZE: &str = "512M";
/// Files that are there at a time.
const KEPT: u64 = 100;
/// The cut comes later than the time of an epoch says, by less.
const CUT_NS: u64 = 500_000_000;

/// Ends the process, of which nothing is left to be said.
struct Daemon(Child);

impl Drop for Daemon {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn now_ns() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_nanos() as u64
}

/// What the file of a number holds.
fn bytes_of(number: u64) -> Vec<u8> {
    let len = 1 + number * 7919 % 60_000;
    (0..len).map(|at| (number.wrapping_mul(31) + at * 7) as u8).collect()
}

/// When a file was on stable storage under its name, and when it began to be removed.
#[derive(Clone, Copy)]
struct Life {
    there_ns: u64,
    removed_ns: u64,
}

/// Makes files one after the other: written, flushed, given their name, flushed.
fn write_files(dir: &Path, lives: &Mutex<Vec<Life>>, is_over: &AtomicBool) {
    let flush = |path: &Path| File::open(path).unwrap().sync_all().unwrap();
    for number in 0u64.. {
        if is_over.load(Ordering::Relaxed) {
            return;
        }
        let [draft, name] = [dir.join("draft"), dir.join(number.to_string())];
        let mut file = File::create(&draft).unwrap();
        file.write_all(&bytes_of(number)).unwrap();
        file.sync_all().unwrap();
        fs::rename(draft, name).unwrap();
        flush(dir);
        lives.lock().unwrap().push(Life { there_ns: now_ns(), removed_ns: u64::MAX });
        if let Some(old) = number.checked_sub(KEPT) {
            lives.lock().unwrap()[old as usize].removed_ns = now_ns();
            fs::remove_file(dir.join(old.to_string())).unwrap();
        }
    }
}

/// Makes sure that a state has what it must have, and nothing that was never written.
fn judge(state: &Path, mount: &Path, options: &str, check: &[&str], time_ns: u64, lives: &[Life]) {
    let device = LoopDevice::over(state).expect("a loop device");
    let mounted = FileSystem::new(&device, mount, options);
    for (number, life) in (0u64..).zip(lives) {
        let found = fs::read(mount.join("files").join(number.to_string()));
        let must_be_there = life.there_ns < time_ns && life.removed_ns > time_ns + CUT_NS;
        match found {
            Ok(found) => assert!(found == bytes_of(number), "file {number} has other bytes"),
            Err(error) => assert!(!must_be_there, "file {number}: {error}"),
        }
    }
    drop(mounted);
    // A mount namespace that another process has made meanwhile may have it mounted a little longer.
    let exclusive = || File::options().read(true).custom_flags(OFlags::EXCL.bits() as i32).open(&device.0);
    wait_until("nothing has it mounted", || exclusive().is_ok());
    let (command, args) = check.split_first().unwrap();
    let checked = tool(command, args.iter().copied().chain([device.0.as_str()]));
    assert!(checked.status.success(), "{checked:?}");
}

/// Publishes so many states of a file system under load, and judges each.
fn states_are_sound(make: &[&str], options: &str, check: &[&str], count: usize) {
    let images = Images::new();
    let [nas, path] = ["nas", "nas/web.qcow2"].map(|name| images.path(name));
    fs::create_dir(&nas).unwrap();
    tool_ok("qemu-img", ["create", "-q", "-f", "qcow2", path.to_str().unwrap(), SIZE]);
    let disk = format!("path={},tier={},window=1", path.display(), images.name("tier"));
    let socket = images.name("nbd.sock");
    let server = Server::start(&["--disk", &disk, "--nbd", &format!("unix:{socket},rw")]);
    let file = images.path("disk");
    File::create(&file).unwrap();
    let daemon = Command::new("qemu-storage-daemon")
        .args([
            "--blockdev",
            &format!("driver=nbd,node-name=nbd,server.type=unix,server.path={socket},export=web"),
        ])
        .args([
            "--export",
            &format!("type=fuse,id=fuse,node-name=nbd,mountpoint={},writable=on", file.display()),
        ])
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    let daemon = Daemon(daemon);
    wait_until("the disk as a file", || file.metadata().is_ok_and(|about| about.len() > 0));
    let Some(device) = LoopDevice::over(&file) else {
        eprintln!("not tested: file systems need root and loop devices");
        return;
    };
    let (command, args) = make.split_first().unwrap();
    tool_ok(command, args.iter().copied().chain([device.0.as_str()]));
    let mounted = FileSystem::new(&device, &images.path("mounted"), options);
    let files = mounted.0.join("files");
    fs::create_dir(&files).unwrap();
    tool_ok("sync", ["-f", files.to_str().unwrap()]);

    let (lives, is_over) = (Mutex::new(Vec::new()), AtomicBool::new(false));
    let repository = DirectoryRepository::open(&repository_of(&path), is_object_name).unwrap();
    let begun = newest(&repository).unwrap().unwrap().epoch.number;
    let epochs: Vec<Epoch> = std::thread::scope(|scope| {
        scope.spawn(|| write_files(&files, &lives, &is_over));
        let mut epochs: Vec<Epoch> = Vec::new();
        while epochs.len() < count {
            let last = epochs.last().map_or(begun.next(), |epoch| epoch.number);
            let mut next = None;
            wait_until("an epoch", || {
                next = newest(&repository)
                    .ok()
                    .flatten()
                    .map(|head| head.epoch)
                    .filter(|epoch| epoch.number > last);
                next.is_some()
            });
            epochs.extend(next);
        }
        is_over.store(true, Ordering::Relaxed);
        epochs
    });
    drop((mounted, device, daemon));
    let lives = lives.into_inner().unwrap();
    assert!(lives.len() > count, "{} files", lives.len());
    for epoch in &epochs {
        let top = epoch.disks[0].newest().layer_name();
        let (layer, state) = (repository_of(&path).join(top.as_str()), images.path("state"));
        tool_ok("qemu-img", ["convert", "-O", "raw", layer.to_str().unwrap(), state.to_str().unwrap()]);
        judge(&state, &images.path("judged"), options, check, epoch.time_ns, &lives);
    }
    eprintln!("{make:?} {options}: {} states are sound, {} files", epochs.len(), lives.len());
    assert!(server.stop().success());
}

/// How many states of each file system: `VMSTRATA_CRASH_STATES`.
fn count() -> usize {
    std::env::var("VMSTRATA_CRASH_STATES").map_or(7, |count| count.parse().unwrap())
}

#[test]
fn states_of_ext4_are_sound() {
    states_are_sound(&["mkfs.ext4", "-q", "-F"], "data=ordered", &["e2fsck", "-f", "-n"], count());
}

#[test]
fn states_of_ext4_with_all_data_in_its_journal_are_sound() {
    states_are_sound(&["mkfs.ext4", "-q", "-F"], "data=journal", &["e2fsck", "-f", "-n"], count());
}

#[test]
fn states_of_xfs_are_sound() {
    states_are_sound(&["mkfs.xfs", "-q", "-f"], "nouuid", &["xfs_repair", "-n"], count());
}
