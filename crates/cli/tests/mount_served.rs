//! `serve --fuse`: the disks of a server and their snapshots as files, while they come and go.

use std::ffi::OsString;
use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};

use rustix::io::Errno;
use serde_json::Value;

use crate::support::server::Server;
use crate::support::{Images, assert_clean, run_ok, tool_ok, wait_until};

/// A disk `web` in `images`, and a directory for its files.
struct Served {
    images: Images,
    disk: String,
    dir: PathBuf,
}

impl Served {
    fn new() -> Self {
        let images = Images::new();
        fs::create_dir(images.path("images")).expect("a directory");
        let disk = images.create("images/web.qcow2", &["16M"]);
        tool_ok("qemu-io", ["-c", "write -P 1 0 1M", disk.to_str().expect("UTF-8")]);
        let dir = images.path("files");
        fs::create_dir(&dir).expect("a directory");
        Self { disk: disk.to_str().expect("UTF-8").to_owned(), dir, images }
    }

    fn start(&self, mount: &str, more: &[&str]) -> Server {
        let (disk, fuse) = (format!("path={}", self.disk), format!("{}{mount}", self.dir.display()));
        Server::start(&[&["--disk", &disk, "--fuse", &fuse], more].concat())
    }

    fn file(&self, name: &str) -> PathBuf {
        self.dir.join(name)
    }
}

fn names(dir: &Path) -> Vec<OsString> {
    let mut names: Vec<_> =
        fs::read_dir(dir).expect("lists").map(|entry| entry.expect("lists").file_name()).collect();
    names.sort();
    names
}

fn bytes(file: &File, at: u64) -> io::Result<[u8; 4096]> {
    let mut bytes = [0xff; 4096];
    file.read_exact_at(&mut bytes, at).map(|()| bytes)
}

/// How many files of the mount are open.
fn open_files(server: &Server) -> Option<u64> {
    let status: Value = serde_json::from_str(&server.ask_ok(["status", "--json"])).expect("JSON");
    let exports = status["exports"].as_array().expect("a list");
    exports.iter().find(|export| export["export"]["kind"] == "fuse")?["connections"].as_u64()
}

fn raw(error: &io::Error) -> Option<Errno> {
    Errno::from_io_error(error)
}

fn is_mounted(dir: &Path) -> bool {
    let mounts = fs::read_to_string("/proc/self/mountinfo").expect("mounts");
    mounts.lines().any(|line| line.split(' ').nth(4) == dir.to_str())
}

#[test]
fn disks_and_snapshots_show_as_they_come_and_go() {
    let served = Served::new();
    let server = served.start("", &["--nbd", &format!("unix:{},rw", served.images.name("nbd.sock"))]);
    let ready = server.ready["disks"][0]["files"][0].as_str().expect("a file");
    assert_eq!(Path::new(ready), served.file("web/disk"));
    assert_eq!(names(&served.dir), ["web"]);
    assert_eq!(
        (names(&served.file("web")), names(&served.file("web/snapshots"))),
        (vec!["disk".into(), "snapshots".into()], vec![])
    );

    server.ask_ok(["snapshot", "create", "web", "--name", "mon"]);
    let now = File::open(served.file("web/disk")).expect("opens");
    let mon = File::open(served.file("web/snapshots/mon")).expect("opens");
    // What a client writes shows at once in the disk, and never in the snapshot.
    for pattern in [2u8, 3] {
        tool_ok("qemu-io", ["-f", "raw", "-c", &format!("write -P {pattern} 0 64k"), &server.uri("web")]);
        assert_eq!(
            (bytes(&now, 0).expect("reads"), bytes(&mon, 0).expect("reads")),
            ([pattern; 4096], [1; 4096])
        );
    }
    let flat = served.images.name("mon.raw");
    run_ok(["convert", &format!("{}@mon", served.disk), &flat]);
    tool_ok("cmp", [served.file("web/snapshots/mon").as_os_str(), flat.as_ref()]);

    // A program that has it open keeps it, with its file.
    server.ask_ok(["snapshot", "delete", "web@mon"]);
    assert!(names(&served.file("web/snapshots")).is_empty());
    let gone = File::open(served.file("web/snapshots/mon")).expect_err("deleted");
    assert_eq!(raw(&gone), Some(Errno::NOENT));
    assert_eq!(bytes(&mon, 0).expect("reads"), [1; 4096]);
    let left = served.images.path("images/web.mon.qcow2");
    let number = fs::metadata(&left).expect("its file is there").ino();
    drop(mon);
    let files = format!("/proc/{}/fd", server.pid().as_raw_nonzero());
    let is_open = |layer: &Path| {
        let mut links =
            fs::read_dir(&files).expect("lists").filter_map(|entry| fs::read_link(entry.ok()?.path()).ok());
        links.any(|file| file == layer)
    };
    // The kernel reports a closed file some time later.
    wait_until("nothing of it is held", || !is_open(&left));

    // Another snapshot by a name is another file, whatever the kernel keeps of the first.
    for pattern in [4u8, 5] {
        tool_ok("qemu-io", ["-f", "raw", "-c", &format!("write -P {pattern} 0 64k"), &server.uri("web")]);
        server.ask_ok(["snapshot", "create", "web", "--name", "tue"]);
        let tue = File::open(served.file("web/snapshots/tue")).expect("opens");
        assert_eq!(bytes(&tue, 0).expect("reads"), [pattern; 4096]);
        drop(tue);
        wait_until("the disk's own file is open alone", || open_files(&server) == Some(1));
        server.ask_ok(["snapshot", "delete", "web@tue"]);
    }

    server.ask_ok(["resize", "web", "32M"]);
    assert_eq!(fs::metadata(served.file("web/disk")).expect("stat").len(), 32 << 20);
    let other = served.images.create("images/db.qcow2", &["1M"]);
    server.ask_ok(["disk", "add", &format!("path={}", other.display())]);
    assert_eq!(names(&served.dir), ["db", "web"]);
    server.ask_ok(["disk", "remove", "db"]);
    assert_eq!(names(&served.dir), ["web"]);
    drop(now);
    assert!(server.stop().success());
    assert!(!is_mounted(&served.dir));
    assert!(served.start("", &[]).stop().success());
    let is_left = fs::metadata(&left).is_ok_and(|found| found.ino() == number);
    assert!(!is_left, "the next opening removes the file");
    assert_clean(Path::new(&served.disk));
}

#[test]
fn a_disk_that_is_removed_takes_its_open_files_along() {
    let served = Served::new();
    let server = served.start("", &[]);
    server.ask_ok(["snapshot", "create", "web", "--name", "mon"]);
    let files = ["web/disk", "web/snapshots/mon"].map(|name| File::open(served.file(name)).expect("opens"));
    let said = server.ask_err(["disk", "remove", "web"]);
    assert!(said.contains("a program has a file of disk 'web' open"), "{said}");
    server.ask_ok(["disk", "remove", "web", "--force"]);
    for file in &files {
        // Not at the start: that was never read, so the kernel has it not.
        let gone = bytes(file, 8 << 20).expect_err("its disk is gone");
        assert_eq!(raw(&gone), Some(Errno::STALE));
    }
    assert!(names(&served.dir).is_empty());
    // The server has let go of it.
    tool_ok("qemu-io", ["-c", "write -P 4 0 64k", &served.disk]);
    server.ask_ok(["disk", "add", &format!("path={}", served.disk)]);
    let file = File::open(served.file("web/disk")).expect("opens");
    assert_eq!(bytes(&file, 0).expect("reads"), [4; 4096]);
    assert!(server.stop().success(), "a file that is open does not keep a server from ending");
    assert!(!is_mounted(&served.dir));
    assert!(bytes(&file, 0).is_err());
    assert_clean(Path::new(&served.disk));
}

#[test]
fn a_disk_has_one_writer_and_files_are_written_only_where_that_is_said() {
    let served = Served::new();
    let write =
        |name: &str| OpenOptions::new().write(true).open(served.file(name)).map_err(|error| raw(&error));
    let nbd = format!("unix:{},rw", served.images.name("nbd.sock"));
    let server = served.start("", &["--nbd", &nbd]);
    assert_eq!(write("web/disk").expect_err("not said"), Some(Errno::ROFS));
    assert!(server.stop().success());

    let server = served.start(",rw", &["--nbd", &nbd]);
    server.ask_ok(["snapshot", "create", "web", "--name", "mon"]);
    assert_eq!(write("web/snapshots/mon").expect_err("a snapshot"), Some(Errno::ROFS));
    let file = write("web/disk").expect("opens");
    file.write_all_at(&[5; 8192], 4096).expect("writes");
    let said = crate::support::tool("qemu-io", ["-f", "raw", "-c", "write 0 4k", &server.uri("web")]);
    assert!(!said.status.success(), "a program has it: {said:?}");
    drop(file);
    wait_until("it is closed", || {
        crate::support::tool("qemu-io", ["-f", "raw", "-c", "write -P 6 0 4k", &server.uri("web")])
            .status
            .success()
    });
    let file = File::open(served.file("web/disk")).expect("opens");
    assert_eq!((bytes(&file, 0).expect("reads"), bytes(&file, 8192).expect("reads")), ([6; 4096], [5; 4096]));
    drop(file);
    assert!(server.stop().success());
    assert_clean(Path::new(&served.disk));
}

#[test]
fn a_mount_is_an_export_that_comes_and_goes() {
    let served = Served::new();
    let server = Server::start(&[
        "--disk",
        &format!("path={}", served.disk),
        "--nbd",
        &format!("unix:{}", served.images.name("nbd.sock")),
    ]);
    let dir = served.dir.to_str().expect("UTF-8");
    let none = server.ask_err(["export", "add", "--fuse", &served.images.name("none")]);
    assert!(none.contains("is no directory"), "{none}");
    let added = server.ask_ok(["export", "add", "--fuse", dir]);
    assert!(added.contains(served.file("web/disk").to_str().expect("UTF-8")), "{added}");
    let status = server.ask_ok(["status"]);
    assert!(status.contains("files") && status.contains(dir), "{status}");
    let twice = server.ask_err(["export", "add", "--fuse", dir]);
    assert!(twice.contains("is mounted there"), "{twice}");
    server.ask_ok(["export", "remove", dir]);
    assert!(!is_mounted(&served.dir) && names(&served.dir).is_empty());
    server.ask_ok(["export", "add", "--fuse", dir]);
    tool_ok("umount", [dir]);
    wait_until("the status shows it", || {
        server.ask_ok(["status", "--json"]).contains("someone has unmounted it")
    });
    server.ask_ok(["export", "remove", dir]);
    server.ask_ok(["export", "add", "--fuse", dir]);

    // A killed server leaves nothing, and the next one has its mounts again.
    let runtime = server.crash();
    wait_until("the mount is gone", || !is_mounted(&served.dir));
    let nbd = format!("unix:{}", served.images.name("nbd.sock"));
    let server = Server::start_in(runtime, &["--disk", &format!("path={}", served.disk), "--nbd", &nbd]);
    wait_until("it is mounted", || is_mounted(&served.dir));
    assert_eq!(names(&served.dir), ["web"]);
    assert!(server.stop().success());
}

#[test]
fn a_disk_with_an_open_file_is_not_reverted_under_it() {
    let served = Served::new();
    let server = served.start(",rw", &[]);
    server.ask_ok(["snapshot", "create", "web", "--name", "mon"]);
    let file = OpenOptions::new().read(true).write(true).open(served.file("web/disk")).expect("opens");
    file.write_all_at(&[7; 4096], 0).expect("writes");
    let said = server.ask_err(["snapshot", "revert", "web", "mon", "--yes"]);
    assert!(said.contains("a program that has a file of it open"), "{said}");
    drop(file);
    wait_until("it is closed", || server.ask(["snapshot", "revert", "web", "mon", "--yes"]).status.success());
    let file = File::open(served.file("web/disk")).expect("opens");
    assert_eq!(bytes(&file, 0).expect("reads"), [1; 4096]);
    drop(file);
    assert!(server.stop().success());
}
