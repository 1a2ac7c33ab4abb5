//! `vmstrata mount`: stock tools use a disk as a file; nothing stays behind.

use std::fs::{self, File, OpenOptions, Permissions};
use std::io::{BufRead as _, BufReader, Read as _};
use std::os::unix::fs::{FileExt as _, MetadataExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::process::{Child, ExitStatus, Stdio};

use rustix::fs::{FallocateFlags, SeekFrom, fallocate, seek};
use rustix::io::Errno;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

use crate::support::loop_device::{FileSystem, LoopDevice};
use crate::support::{Images, assert_clean, run_err, run_ok, tool, tool_json, tool_ok, vmstrata, wait_until};

const SIZE: u64 = 64 << 20;

/// A `vmstrata mount` that runs. Killed on drop; its guard takes the mount away then.
struct Mounted {
    child: Child,
    file: PathBuf,
}

impl Mounted {
    /// Mounts, and waits until that is done.
    fn new(disk: &str, place: &Path, more: &[&str]) -> Self {
        let mut command = vmstrata();
        command.args(["mount", disk]).arg(place).args(more).arg("--json");
        let mut child = command.stdout(Stdio::piped()).spawn().expect("vmstrata starts");
        let mut line = String::new();
        BufReader::new(child.stdout.as_mut().expect("piped")).read_line(&mut line).expect("reads");
        let ready: Value =
            serde_json::from_str(&line).unwrap_or_else(|_| panic!("not ready: {:?}", child.wait()));
        assert_eq!(ready["writable"], more.contains(&"--write"), "{ready}");
        Self { child, file: ready["file"].as_str().expect("a path").into() }
    }

    fn path(&self) -> &str {
        self.file.to_str().expect("UTF-8")
    }

    fn pid(&self) -> Pid {
        Pid::from_child(&self.child)
    }

    fn wait(mut self) -> ExitStatus {
        self.child.wait().expect("our child")
    }

    /// Unmounts it, after which the command ends.
    fn unmount(self, place: &Path) {
        tool_ok("umount", [place]);
        assert!(self.wait().success());
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn is_mounted(place: &Path) -> bool {
    let mounts = fs::read_to_string("/proc/self/mountinfo").expect("mounts");
    mounts.lines().any(|line| line.split(' ').nth(4) == place.to_str())
}

/// A disk with data, zeros and holes in several layers, its snapshot `mon` below what was written last, and the bytes of both.
struct Disk {
    images: Images,
    path: String,
}

impl Disk {
    fn new() -> Self {
        let images = Images::new();
        fs::create_dir(images.path("images")).expect("a directory");
        let path = images.create("images/web.qcow2", &[&SIZE.to_string()]);
        let path = path.to_str().expect("UTF-8").to_owned();
        let write = |commands: &[&str]| {
            let commands = commands.iter().flat_map(|command| ["-c", command]);
            tool_ok("qemu-io", [path.as_str()].into_iter().chain(commands));
        };
        write(&["write -P 1 0 1M", "write -P 2 10M 3M", "write -P 3 63M 1M"]);
        run_ok(["snapshot", "create", &path, "--name", "sun"]);
        write(&["write -z 11M 1M", "write -P 4 30M 64k"]);
        run_ok(["snapshot", "create", &path, "--name", "mon"]);
        write(&["write -P 5 0 64k", "write -P 6 40M 1M"]);
        Self { images, path }
    }

    /// The bytes of a state, by stock tools alone.
    fn flat(&self, layer: &str) -> PathBuf {
        let (from, to) = (self.images.name(&format!("images/{layer}")), self.images.path("flat.raw"));
        tool_ok("qemu-img", ["convert", "-O", "raw", &from, to.to_str().expect("UTF-8")]);
        to
    }

    fn place(&self) -> PathBuf {
        self.images.path("web.raw")
    }
}

/// Where stock tools find data.
fn data(file: &str, format: &str) -> Vec<(u64, u64)> {
    let map = tool_json("qemu-img", ["map", "--output=json", "-f", format, file]);
    let mut found: Vec<(u64, u64)> = Vec::new();
    for run in
        map.as_array().expect("a list").iter().filter(|run| run["data"] == true && run["zero"] == false)
    {
        let (start, len) =
            (run["start"].as_u64().expect("a number"), run["length"].as_u64().expect("a number"));
        match found.last_mut() {
            Some((_, end)) if *end == start => *end += len,
            _ => found.push((start, start + len)),
        }
    }
    found
}

#[test]
fn a_snapshot_is_a_file_with_the_bytes_and_the_holes_of_its_disk() {
    let disk = Disk::new();
    let mounted = Mounted::new(&format!("{}@mon", disk.path), &disk.place(), &[]);
    let flat = disk.flat("web.mon.qcow2");
    tool_ok("cmp", [mounted.file.as_os_str(), flat.as_os_str()]);
    tool_ok("qemu-img", ["compare", "-f", "raw", "-F", "raw", mounted.path(), flat.to_str().expect("UTF-8")]);
    assert_eq!(data(mounted.path(), "raw"), data(&disk.images.name("images/web.mon.qcow2"), "qcow2"));
    let found = fs::metadata(&mounted.file).expect("stat");
    assert_eq!((found.len(), found.mode() & 0o777), (SIZE, 0o400));
    assert!(found.blocks() * 512 < SIZE, "a sparse file: {}", found.blocks());
    let refused = OpenOptions::new().write(true).open(&mounted.file).expect_err("read-only");
    assert_eq!(refused.raw_os_error(), Some(Errno::ROFS.raw_os_error()));
    let input = format!("if={}", mounted.path());
    tool_ok("dd", [&*input, "of=/dev/null", "bs=1M", "iflag=direct", "status=none"]);
    mounted.unmount(&disk.place());
    assert!(!disk.place().exists(), "the file that was made goes, too");
}

#[test]
fn a_directory_gets_the_disk_as_a_file() {
    let disk = Disk::new();
    let dir = disk.images.path("dir");
    fs::create_dir(&dir).expect("a directory");
    let mounted = Mounted::new(&disk.path, &dir, &[]);
    assert_eq!(mounted.file, dir.join("disk"));
    let names: Vec<_> =
        fs::read_dir(&dir).expect("lists").map(|entry| entry.expect("lists").file_name()).collect();
    assert_eq!(names, ["disk"]);
    tool_ok("cmp", [mounted.file.as_os_str(), disk.flat("web.qcow2").as_os_str()]);
    mounted.unmount(&dir);
    assert!(dir.is_dir());
}

#[test]
fn a_file_system_on_a_loop_device_keeps_its_files_and_gives_space_back() {
    let images = Images::new();
    fs::create_dir(images.path("images")).expect("a directory");
    let (path, place, dir) = (images.name("images/ext4.qcow2"), images.path("ext4.raw"), images.path("root"));
    run_ok(["create", &path, "256M"]);
    let random: Vec<u8> = {
        let mut bytes = vec![0; 20 << 20];
        File::open("/dev/urandom").and_then(|mut file| file.read_exact(&mut bytes)).expect("random bytes");
        bytes
    };
    let mounted = Mounted::new(&path, &place, &["--write"]);
    let device = LoopDevice::with(&["--direct-io=on"], &mounted.file).expect("a loop device");
    tool_ok("mkfs.ext4", ["-q", &device.0]);
    let file_system = FileSystem::new(&device, &dir, "rw");
    fs::write(dir.join("kept"), &random).expect("writes");
    fs::write(dir.join("gone"), &random).expect("writes");
    let sync = || tool_ok("sync", ["-f".as_ref(), dir.as_os_str()]);
    sync();
    fs::remove_file(dir.join("gone")).expect("removes");
    // Until then the journal needs the blocks.
    sync();
    let taken = |path: &str| data(path, "qcow2").iter().map(|(start, end)| end - start).sum::<u64>();
    tool_ok("fstrim", [&dir]);
    drop(file_system);
    drop(device);
    mounted.unmount(&place);
    assert_clean(Path::new(&path));
    assert!(taken(&path) < 35 << 20, "what was trimmed has no clusters: {}", taken(&path));

    // Read back through the page cache, from a snapshot.
    run_ok(["snapshot", "create", &path, "--name", "s"]);
    let mounted = Mounted::new(&format!("{path}@s"), &place, &[]);
    let device = LoopDevice::with(&["--read-only"], &mounted.file).expect("a loop device");
    tool_ok("e2fsck", ["-fn", &device.0]);
    let file_system = FileSystem::new(&device, &dir, "ro,noload");
    assert!(fs::read(dir.join("kept")).expect("reads") == random, "other bytes");
    drop((file_system, device));
    mounted.unmount(&place);
}

#[test]
fn many_requests_at_once_write_what_they_say() {
    let images = Images::new();
    fs::create_dir(images.path("images")).expect("a directory");
    let (path, place) = (images.name("images/fio.qcow2"), images.path("fio.raw"));
    run_ok(["create", &path, "128M"]);
    let mounted = Mounted::new(&path, &place, &["--write"]);
    for (engine, direct) in [("libaio", "1"), ("psync", "0"), ("io_uring", "1")] {
        let args = [
            "--name=verify",
            "--rw=randrw",
            "--bsrange=4k-256k",
            "--iodepth=32",
            "--numjobs=1",
            "--verify=crc32c",
            "--verify_fatal=1",
            "--verify_state_save=0",
            "--fsync=64",
            "--size=64M",
        ];
        let (engine, direct) = (format!("--ioengine={engine}"), format!("--direct={direct}"));
        let file = format!("--filename={}", mounted.path());
        tool_ok("fio", args.into_iter().chain([&*engine, &*direct, &*file]));
    }
    mounted.unmount(&place);
    assert_clean(Path::new(&path));
}

#[test]
fn a_written_file_obeys_what_programs_ask_of_files() {
    let images = Images::new();
    fs::create_dir(images.path("images")).expect("a directory");
    let (path, place) = (images.name("images/web.qcow2"), images.path("web.raw"));
    run_ok(["create", &path, "16M"]);
    let mounted = Mounted::new(&path, &place, &["--write"]);
    let file = OpenOptions::new().read(true).write(true).open(&mounted.file).expect("opens");
    file.write_all_at(&[7; 3 << 20], 1 << 20).expect("writes");
    let hole = || seek(&file, SeekFrom::Hole(1 << 20)).expect("seeks");
    assert_eq!((seek(&file, SeekFrom::Data(0)), hole()), (Ok(1 << 20), 4 << 20));
    let punch = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    fallocate(&file, punch, (2 << 20) + 100, 1 << 20).expect("punches");
    // Whole clusters are given back; of others the bytes are zeros.
    assert_eq!(hole(), (2 << 20) + (64 << 10));
    fallocate(&file, FallocateFlags::ZERO_RANGE, 5 << 20, 4096).expect("zeroes");
    let mut bytes = vec![1; 3 << 20];
    file.read_exact_at(&mut bytes, 1 << 20).expect("reads");
    let expected = |at: usize| if ((1 << 20) + 100..(2 << 20) + 100).contains(&at) { 0 } else { 7 };
    assert!(
        bytes.iter().enumerate().all(|(at, byte)| *byte == expected(at)),
        "zeros where they were punched"
    );
    assert_eq!(fallocate(&file, FallocateFlags::empty(), 0, 4096), Err(Errno::OPNOTSUPP));
    let full = file.write_at(&[1; 8192], (16 << 20) - 4096).expect("a short write");
    assert_eq!(full, 4096);
    let past = file.write_at(&[1], 16 << 20).expect_err("past the end");
    assert_eq!(past.raw_os_error(), Some(Errno::NOSPC.raw_os_error()));
    assert_eq!(file.read_at(&mut bytes, 16 << 20).expect("the end"), 0);
    assert_eq!(seek(&file, SeekFrom::Data(16 << 20)), Err(Errno::NXIO));
    let shorter = file.set_len(1 << 20).expect_err("a disk has its size");
    assert_eq!(shorter.raw_os_error(), Some(Errno::PERM.raw_os_error()));
    file.set_len(16 << 20).expect("its own size is none too");
    file.sync_all().expect("flushes");
    drop(file);
    mounted.unmount(&place);
    assert_clean(Path::new(&path));
}

#[test]
fn what_was_written_survives_a_kill_and_the_mount_does_not() {
    let images = Images::new();
    fs::create_dir(images.path("images")).expect("a directory");
    let (path, place, runtime) =
        (images.name("images/web.qcow2"), images.path("web.raw"), images.name("run"));
    fs::create_dir(&runtime).expect("a directory");
    run_ok(["create", &path, "16M"]);
    let more = ["--write", "--runtime-dir", &runtime];
    let mounted = Mounted::new(&path, &place, &more);
    let file = OpenOptions::new().write(true).open(&mounted.file).expect("opens");
    file.write_all_at(&[9; 65536], 4096).expect("writes");
    kill_process(mounted.pid(), Signal::KILL).expect("it runs");
    mounted.wait();
    wait_until("the mount is gone", || !is_mounted(&place) && !place.exists());
    drop(file);
    let mounted = Mounted::new(&path, &place, &more);
    let mut bytes = [0; 65536];
    File::open(&mounted.file).expect("opens").read_exact_at(&mut bytes, 4096).expect("reads");
    assert!(bytes == [9; 65536]);
    mounted.unmount(&place);
    assert_clean(Path::new(&path));
}

#[test]
fn a_signal_waits_for_those_who_use_the_file() {
    let disk = Disk::new();
    let place = disk.place();
    let mut mounted = Mounted::new(&format!("{}@mon", disk.path), &place, &[]);
    let device = LoopDevice::with(&["--read-only"], &mounted.file).expect("a loop device");
    kill_process(mounted.pid(), Signal::TERM).expect("it runs");
    wait_until("it is out of sight", || !is_mounted(&place));
    assert!(mounted.child.try_wait().expect("our child").is_none());
    tool_ok("cmp", [device.0.as_ref(), disk.flat("web.mon.qcow2").as_os_str()]);
    drop(device);
    assert!(mounted.wait().success());
    assert!(!place.exists());
}

#[test]
fn a_second_signal_ends_it_at_once_and_leaves_nothing() {
    let disk = Disk::new();
    let place = disk.place();
    let mut mounted = Mounted::new(&format!("{}@mon", disk.path), &place, &[]);
    let file = File::open(&mounted.file).expect("opens");
    kill_process(mounted.pid(), Signal::INT).expect("it runs");
    wait_until("it is out of sight", || !is_mounted(&place));
    kill_process(mounted.pid(), Signal::INT).expect("it runs");
    assert_eq!(mounted.child.wait().expect("our child").code(), Some(143));
    wait_until("the file is gone", || !place.exists());
    assert!(file.read_at(&mut [0], 12 << 20).is_err(), "its server is gone");
}

#[test]
fn a_dead_mount_gives_way_to_a_new_one() {
    let disk = Disk::new();
    let dir = disk.images.path("dir");
    fs::create_dir(&dir).expect("a directory");
    let mounted = Mounted::new(&disk.path, &dir, &[]);
    // Both at once, as when a service manager kills all of a service.
    let guard = tool_ok("pgrep", ["-P", &mounted.pid().as_raw_nonzero().to_string(), "-f", "mount-guard"]);
    let guard = Pid::from_raw(guard.trim().parse().expect("one process")).expect("a process");
    kill_process(guard, Signal::KILL).expect("it runs");
    kill_process(mounted.pid(), Signal::KILL).expect("it runs");
    mounted.wait();
    wait_until("it is dead", || fs::metadata(&dir).is_err());
    let mounted = Mounted::new(&disk.path, &dir, &[]);
    tool_ok("cmp", [mounted.file.as_os_str(), disk.flat("web.qcow2").as_os_str()]);
    let twice = run_err(1, ["mount", &format!("{}@mon", disk.path), dir.to_str().expect("UTF-8")]);
    assert!(twice.contains("is mounted there"), "{twice}");
    mounted.unmount(&dir);
    assert!(!is_mounted(&dir));
}

#[test]
fn other_users_read_only_where_that_is_said() {
    let disk = Disk::new();
    let (dir, place, state) = (disk.images.path("."), disk.place(), format!("{}@mon", disk.path));
    fs::set_permissions(&dir, Permissions::from_mode(0o755)).expect("permissions");
    let read = |file: &str| {
        let as_other = ["--reuid=65534", "--regid=65534", "--clear-groups", "head", "-c", "1", file];
        tool("setpriv", as_other).status.success()
    };
    for (more, may) in [(&[][..], false), (&["--allow-other"][..], true)] {
        let mounted = Mounted::new(&state, &place, more);
        assert_eq!(read(mounted.path()), may, "{more:?}");
        mounted.unmount(&place);
    }
}

#[test]
fn what_cannot_be_mounted_says_why() {
    let disk = Disk::new();
    let [place, beside, dir] =
        ["web.raw", "images/web.raw", "dir/sub/web.raw"].map(|name| disk.images.name(name));
    let state = format!("{}@mon", disk.path);
    for (args, part) in [
        (vec![&*state, &place, "--write"], "snapshot clone"),
        (vec![&*disk.path, &beside], "mount it elsewhere"),
        (vec![&*state, &disk.images.name("")], "mount it elsewhere"),
        (vec![&*disk.path, "/dev/null"], "is no regular file"),
        (vec![&*disk.path, &dir], "No such file or directory"),
        (vec![&*disk.images.name("images/no.qcow2"), &place], "no.qcow2"),
    ] {
        let said = run_err(1, ["mount"].into_iter().chain(args.iter().copied()));
        assert!(said.contains(part), "{args:?}: {said}");
    }
    let mounted = Mounted::new(&disk.path, Path::new(&place), &["--write"]);
    let used = run_err(1, ["mount", &disk.path, &disk.images.name("again.raw")]);
    assert!(used.contains("in use"), "{used}");
    assert!(!disk.images.path("again.raw").exists());
    let checked = tool("qemu-img", ["check", &disk.path]);
    assert!(!checked.status.success(), "stock tools see that it is in use");
    mounted.unmount(Path::new(&place));
}

#[test]
fn a_mount_hides_no_files() {
    let disk = Disk::new();
    std::fs::create_dir(disk.images.path("dir")).expect("a directory");
    std::fs::write(disk.images.path("dir/file"), b"seen").expect("a file");
    let said = run_err(1, ["mount", &format!("{}@mon", disk.path), &disk.images.name("dir")]);
    assert!(said.contains("has files in it, which the mount would hide"), "{said}");
    assert_eq!(std::fs::read(disk.images.path("dir/file")).expect("reads"), b"seen");
}

/// What Firecracker takes for a disk: `Drive` of its published API, version 1.17, for disks in files.
fn firecracker_drive() -> Value {
    serde_json::json!({
        "type": "object",
        "required": ["drive_id", "is_root_device", "is_read_only", "path_on_host"],
        "additionalProperties": false,
        "properties": {
            "drive_id": { "type": "string" },
            "partuuid": { "type": "string" },
            "is_root_device": { "type": "boolean" },
            "is_read_only": { "type": "boolean" },
            "path_on_host": { "type": "string" },
            "cache_type": { "enum": ["Unsafe", "Writeback"] },
            "io_engine": { "enum": ["Sync", "Async"] },
            "rate_limiter": { "type": "object" },
        },
    })
}

#[test]
fn the_disks_of_the_firecracker_recipe_are_what_its_api_takes() {
    let page =
        fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/mount.md")).expect("the page");
    let recipe =
        page.split_once("<!-- firecracker -->\n```json\n").and_then(|(_, rest)| rest.split_once("```"));
    let recipe: Value = serde_json::from_str(recipe.expect("a recipe").0).expect("JSON");
    let drives = recipe["drives"].as_array().expect("a list");
    assert_eq!(drives.len(), 2);
    let schema = jsonschema::validator_for(&firecracker_drive()).expect("a schema");
    for drive in drives {
        assert!(schema.is_valid(drive), "{drive}");
    }
    assert!(
        !schema.is_valid(&serde_json::json!({ "drive_id": "root", "is_root_device": true, "socket": "/s" }))
    );
}
