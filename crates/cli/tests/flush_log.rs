//! A server whose disks' flushes one log makes durable: killed, started again, ended; stock tools look at what is left.

use std::os::unix::fs::FileExt as _;
use std::path::Path;

use crate::support::server::Server;
use crate::support::{Images, assert_clean, run_err, run_ok, stderr, tool, tool_ok};

fn io(server: &Server, disk: &str, commands: &[&str]) -> String {
    let uri = server.uri(disk);
    let commands = commands.iter().flat_map(|command| ["-c", command]);
    let said = tool_ok("qemu-io", ["-f", "raw"].into_iter().chain(commands).chain([uri.as_str()]));
    assert!(!said.contains("failed"), "{said}");
    said
}

#[test]
fn a_killed_server_goes_on_with_all_that_completed_and_an_ended_one_leaves_clean_images() {
    let images = Images::new();
    let log = images.name("flush.log");
    let disks = ["web", "db"].map(|name| images.name(&format!("{name}.qcow2")));
    disks.iter().for_each(|disk| drop(run_ok(["create", disk, "64M"])));
    let [web, db] = disks.each_ref().map(|disk| format!("path={disk}"));
    let nbd = format!("unix:{},rw", images.name("nbd.sock"));
    let arguments = ["--flush-log", &log, "--disk", &web, "--disk", &db, "--nbd", &nbd];

    let server = Server::start(&arguments);
    for disk in ["web", "db"] {
        // New clusters each time, flushed one by one; then what no flush covers.
        for cluster in 0..20 {
            io(&server, disk, &[&format!("write -P {} {cluster}M 4k", cluster + 1), "flush"]);
        }
        io(&server, disk, &["write -P 99 5M 4k", "write -P 98 40M 256k"]);
    }
    server.ask_ok(["snapshot", "create", &disks[0], "--name", "mon"]);
    io(&server, "web", &["write -P 97 6M 4k", "flush"]);
    let runtime = server.crash();

    // Stock tools and a server without the log refuse the image.
    let said = stderr(&tool("qemu-io", ["-c", "write 0 512", &disks[1]]));
    assert!(said.contains("corrupt"), "{said}");
    let said = run_err(1, ["serve", "--no-control", "--disk", &db, "--nbd", &nbd]);
    assert!(said.contains("--flush-log"), "{said}");

    let server = Server::start_in(runtime, &arguments);
    for disk in ["web", "db"] {
        for cluster in (0..20).filter(|cluster| ![5, 6].contains(cluster)) {
            io(&server, disk, &[&format!("read -P {} {cluster}M 4k", cluster + 1)]);
        }
        io(&server, disk, &["read -P 99 5M 4k", "read -P 98 40M 256k"]);
    }
    io(&server, "web", &["read -P 97 6M 4k", "write -P 96 7M 4k", "flush"]);
    assert!(server.stop().success());
    for disk in &disks {
        assert_clean(Path::new(disk));
        let said = tool_ok("qemu-img", ["info", "-f", "qcow2", disk]);
        assert!(said.contains("corrupt: false"), "{said}");
    }
    let frozen = images.name("web.mon.qcow2");
    assert_clean(Path::new(&frozen));
    let read = |disk: &str, command: &str| tool_ok("qemu-io", ["-r", "-f", "qcow2", "-c", command, disk]);
    for (disk, command) in [
        (&disks[0], "read -P 96 7M 4k"),
        (&disks[0], "read -P 97 6M 4k"),
        (&disks[0], "read -P 98 40M 256k"),
        (&disks[1], "read -P 20 19M 4k"),
        (&frozen, "read -P 7 6M 4k"),
    ] {
        let said = read(disk, command);
        assert!(!said.contains("failed"), "{disk}: {command}: {said}");
    }
    // The log is empty: the images do without it from now on.
    std::fs::remove_file(&log).unwrap();
    let server = Server::start(&["--disk", &db, "--nbd", &nbd]);
    io(&server, "db", &["read -P 99 5M 4k"]);
    assert!(server.stop().success());
}

/// Has the log's headers name another boot of the host, as after a power failure: bytes 48 to 63, before a checksum of all before it.
fn set_other_boot(log: &str) {
    let mut bytes = std::fs::read(log).unwrap();
    for header in [0, 4096] {
        bytes[header + 48..header + 64].fill(7);
        let sum = crc32c::crc32c(&bytes[header..header + 80]).to_le_bytes();
        bytes[header + 80..header + 84].copy_from_slice(&sum);
    }
    std::fs::write(log, bytes).unwrap();
}

/// Disks behind a log whose server was killed; of each, the image lacks the last write that was flushed, as it may after a power failure.
struct Failed {
    images: Images,
    log: String,
    disks: [String; 2],
    runtime: tempfile::TempDir,
}

fn fail_power() -> Failed {
    let images = Images::new();
    let log = images.name("flush.log");
    let disks = ["web", "db"].map(|name| images.name(&format!("{name}.qcow2")));
    disks.iter().for_each(|disk| drop(run_ok(["create", disk, "64M"])));
    let specs = disks.each_ref().map(|disk| format!("path={disk}"));
    let nbd = format!("unix:{},rw", images.name("nbd.sock"));
    let size = ["--flush-log-size", "4M", "--flush-log", &log];
    let server =
        Server::start(&[&size[..], &["--disk", &specs[0], "--disk", &specs[1], "--nbd", &nbd]].concat());
    for disk in ["web", "db"] {
        io(&server, disk, &["write -P 1 0 4k", "flush", "write -P 99 0 4k", "flush"]);
    }
    assert!(server.ask_ok(["status"]).contains("2 images, "));
    let runtime = server.crash();
    for disk in &disks {
        let bytes = std::fs::read(disk).unwrap();
        let at = bytes.chunks(4096).position(|block| block == [99; 4096]).expect("it is in the page cache");
        let file = std::fs::File::options().write(true).open(disk).unwrap();
        file.write_all_at(&[0; 4096], at as u64 * 4096).unwrap();
    }
    set_other_boot(&log);
    Failed { images, log, disks, runtime }
}

fn assert_recovered(disk: &str) {
    assert_clean(Path::new(disk));
    let said = tool_ok("qemu-io", ["-r", "-f", "qcow2", "-c", "read -P 99 0 4k", disk]);
    assert!(!said.contains("failed"), "{disk}: {said}");
}

#[test]
fn a_server_that_starts_after_a_power_failure_brings_what_was_flushed_into_the_images() {
    let Failed { images, log, disks, runtime } = fail_power();
    let specs = disks.each_ref().map(|disk| format!("path={disk}"));
    let nbd = format!("unix:{},rw", images.name("nbd.sock"));
    let arguments = ["--flush-log", &log, "--disk", &specs[0], "--disk", &specs[1], "--nbd", &nbd];
    let server = Server::start_in(runtime, &arguments);
    assert!(server.log().contains("brought flushed writes from the flush log"), "{}", server.log());
    assert!(server.stop().success());
    disks.iter().for_each(|disk| assert_recovered(disk));
}

/// The other images get what was flushed of them.
#[test]
fn a_log_is_recovered_without_a_server_and_without_an_image_that_is_gone() {
    let Failed { images: _images, log, disks: [web, db], .. } = fail_power();
    std::fs::remove_file(&db).unwrap();
    let said = run_ok(["recover", &log, "--dry-run"]);
    assert!(said.contains(&web) && said.contains("would be written"), "{said}");
    let said = run_err(1, ["recover", &log]);
    assert!(said.contains(&db) && said.contains("--discard"), "{said}");
    let said = run_err(1, ["recover", &log, "--discard", &db]);
    assert!(said.contains("--yes"), "{said}");
    let said = run_err(1, ["recover", &log, "--discard", "/other.qcow2", "--yes"]);
    assert!(said.contains("nothing of"), "{said}");
    let said = run_ok(["recover", &log, "--discard", &db, "--yes"]);
    assert!(said.contains("lost") && said.contains("written into the image"), "{said}");
    let said = run_ok(["recover", &log]);
    assert!(said.contains("nothing to recover"), "{said}");
    // The image is behind the log still: who opens it next says what became of its last session.
    run_ok(["check", &web, "--repair=all", "--discard-unflushed"]);
    assert_recovered(&web);
}

#[test]
fn what_is_no_log_is_left_alone() {
    let images = Images::new();
    let (log, disk) = (images.name("notes.txt"), images.name("web.qcow2"));
    run_ok(["create", &disk, "64M"]);
    let text = "text ".repeat(100_000);
    std::fs::write(&log, &text).unwrap();
    let (nbd, spec) = (format!("unix:{}", images.name("nbd.sock")), format!("path={disk}"));
    let said = run_err(1, ["serve", "--no-control", "--flush-log", &log, "--disk", &spec, "--nbd", &nbd]);
    assert!(said.contains("is no flush log"), "{said}");
    assert_eq!(std::fs::read_to_string(&log).unwrap(), text);
}
