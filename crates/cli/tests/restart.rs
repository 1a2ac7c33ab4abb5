//! A server that is started again as at first, after what it served was changed: it goes on with every disk.

use crate::support;
use std::path::Path;

use crate::support::server::Server;
use crate::support::{Images, assert_clean, run_err, run_json, run_ok, tool_ok};

fn io(server: &Server, disk: &str, command: &str) {
    let said = tool_ok("qemu-io", ["-f", "raw", "-c", command, &server.uri(disk)]);
    assert!(!said.contains("failed"), "{command}: {said}");
}

fn names(listed: &serde_json::Value) -> Vec<&str> {
    listed["snapshots"].as_array().unwrap().iter().filter_map(|row| row["name"].as_str()).collect()
}

/// A snapshot makes a raw disk qcow2: the server knows it of the disks that were added, the configuration has to be told.
#[test]
fn a_raw_disk_goes_on_as_qcow2_after_its_first_snapshot() {
    let images = Images::new();
    let disks = ["web", "db"].map(|name| images.name(&format!("{name}.img")));
    for disk in &disks {
        std::fs::File::create(disk).unwrap().set_len(16 << 20).unwrap();
    }
    let [web, db] = &disks;
    let nbd = format!("unix:{},rw", images.name("nbd.sock"));
    let db_socket = images.name("db.sock");
    let io_db = |command: &str| {
        let uri = format!("nbd+unix:///db?socket={db_socket}");
        let said = tool_ok("qemu-io", ["-f", "raw", "-c", command, &uri]);
        assert!(!said.contains("failed"), "{command}: {said}");
    };
    let spec = |format: &str| format!("path={web},format={format}");
    let server = Server::start(&["--disk", &spec("raw"), "--nbd", &nbd]);
    server.ask_ok(["disk", "add", &format!("path={db},format=raw")]);
    server.ask_ok(["export", "add", "--nbd", &format!("unix:{db_socket},rw")]);
    io(&server, "web", "write -P 1 0 64k");
    io_db("write -P 1 0 64k");
    let said = server.ask_err(["snapshot", "create", web, "--name", "mon"]);
    assert!(said.contains("--convert-raw"), "{said}");
    server.ask_ok(["snapshot", "create", web, db, "--name", "mon", "--convert-raw"]);
    server.ask_ok(["snapshot", "create", web, "--name", "tue"]);
    server.ask_ok(["snapshot", "delete", web, "mon"]);
    let mut said = server.ask(["snapshot", "revert", db, "mon", "--yes"]);
    while support::stderr(&said).contains("in use by") {
        said = server.ask(["snapshot", "revert", db, "mon", "--yes"]);
    }
    assert!(said.status.success(), "{said:?}");
    io(&server, "web", "write -P 2 0 64k");
    io_db("write -P 2 64k 64k");
    let runtime = server.crash();

    let said = run_err(1, ["serve", "--no-control", "--disk", &spec("raw"), "--nbd", &nbd]);
    assert!(said.contains("format=qcow2"), "{said}");
    let server = Server::start_in(runtime, &["--disk", &spec("qcow2"), "--nbd", &nbd]);
    io(&server, "web", "read -P 2 0 64k");
    io_db("read -P 1 0 64k");
    io_db("read -P 2 64k 64k");
    assert!(server.stop().success());
    let listed = run_json(["snapshot", "list", web, "-f", "qcow2", "--json"]);
    assert_eq!(names(&listed), ["tue"]);
    disks.iter().for_each(|disk| assert_clean(Path::new(disk)));
}

#[test]
fn states_of_a_disk_that_was_raw_are_read_as_what_they_are() {
    let images = Images::new();
    let disk = images.name("web.img");
    let file = std::fs::File::create(&disk).unwrap();
    std::os::unix::fs::FileExt::write_all_at(&file, &[1; 1 << 20], 0).unwrap();
    file.set_len(4 << 20).unwrap();
    for (night, format) in [("mon", "raw"), ("tue", "qcow2"), ("wed", "qcow2")] {
        let said = run_ok(["snapshot", "create", &disk, "-f", format, "--convert-raw", "--name", night]);
        assert_eq!(said.contains("type='qcow2'"), night == "mon", "{said}");
    }
    let listed = run_json(["snapshot", "list", &disk, "--json"]);
    assert_eq!(names(&listed), ["wed", "tue", "mon"]);
    let of = |state: &str| format!("{disk}@{state}");
    let (old, new) = (of("mon"), of("wed"));
    let said = run_ok(["diff", &old, &new]);
    assert!(said.contains("0 B"), "{said}");
    for (state, out) in [(&disk, "active"), (&new, "wed"), (&old, "mon")] {
        let out = images.name(&format!("{out}.backup"));
        run_ok(["backup", state, "-o", &out]);
        let said = tool_ok("qemu-io", ["-r", "-c", "read -P 1 0 1M", "-c", "read -P 0 1M 3M", &out]);
        assert!(!said.contains("failed"), "{said}");
    }
}

/// What `at=SNAPSHOT,clone=FILE` made is a disk like any other, and lets go of the snapshot like any other.
#[test]
fn a_clone_goes_on_when_it_does_not_stand_on_its_snapshot_any_more() {
    let images = Images::new();
    let disk = images.create("web.qcow2", &["16M"]).to_str().unwrap().to_owned();
    for name in ["mon", "tue"] {
        run_ok(["snapshot", "create", &disk, "--name", name]);
    }
    let (ci, nbd) = (images.name("ci.qcow2"), format!("unix:{},rw", images.name("nbd.sock")));
    let (origin, clone) = (format!("path={disk}"), format!("path={disk},at=tue,clone={ci}"));
    let start = || Server::start(&["--disk", &origin, "--disk", &clone, "--nbd", &nbd]);
    let commands: [&[&str]; 4] = [
        &["snapshot", "create", &ci, "--name", "mine"],
        &["snapshot", "revert", &ci, "mon", "--yes"],
        &["snapshot", "create", &ci, "--name", "later"],
        &["flatten", &ci, "--yes"],
    ];
    for (turn, command) in commands.into_iter().enumerate() {
        let server = start();
        io(&server, "ci", &format!("write -P {} 0 64k", turn + 1));
        let mut said = server.ask(command.iter().copied());
        while support::stderr(&said).contains("in use by") {
            said = server.ask(command.iter().copied());
        }
        assert!(said.status.success(), "{command:?}: {said:?}");
        // Served on, and again by the next server.
        io(&server, "ci", &format!("write -P {} 1M 64k", turn + 1));
        assert!(server.stop().success());
    }
    let server = start();
    io(&server, "ci", "read -P 4 1M 64k");
    assert!(server.stop().success());
    assert_clean(Path::new(&ci));
}

/// A server and a command each have a directory of their own; both have a disk of this name.
#[test]
fn a_relative_path_means_the_file_in_the_directory_of_whoever_says_it() {
    let (images, elsewhere, third) = (Images::new(), Images::new(), Images::new());
    images.create("web.qcow2", &["4M"]);
    elsewhere.create("web.qcow2", &["4M"]);
    let (served, other) = (images.name("web.qcow2"), elsewhere.name("web.qcow2"));
    let runtime = images.path("run");
    std::fs::create_dir(&runtime).unwrap();
    let control = runtime.join("control.sock");
    let mut server = support::vmstrata()
        .current_dir(Path::new(&served).parent().unwrap())
        .args(["serve", "--json", "--disk", "path=web.qcow2", "--nbd", "unix:nbd.sock,rw", "--runtime-dir"])
        .arg(&runtime)
        .stdout(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    let mut ready = String::new();
    std::io::BufRead::read_line(&mut std::io::BufReader::new(server.stdout.as_mut().unwrap()), &mut ready)
        .unwrap();
    let run = |from: &Images, args: &[&str]| {
        let output = support::vmstrata()
            .current_dir(from.path("."))
            .args(args)
            .env("VMSTRATA_CONTROL", &control)
            .output()
            .unwrap();
        assert!(output.status.success(), "{}", support::stderr(&output));
        String::from_utf8(output.stdout).unwrap()
    };
    let status = run(&third, &["status", "--json"]);
    assert!(status.contains(&served), "{status}");
    // The other one is nobody's, and is worked on as files.
    let said = run(&elsewhere, &["snapshot", "create", "web.qcow2", "--name", "offline"]);
    assert!(!said.contains("writes held"), "{said}");
    // The served one is found from anywhere by its path, and from its own directory by its name.
    for (from, name, disk) in [(&third, "far", served.as_str()), (&images, "near", "web.qcow2")] {
        let said = run(from, &["snapshot", "create", disk, "--name", name]);
        assert!(said.contains("writes held"), "{said}");
    }
    run(&elsewhere, &["snapshot", "revert", "web.qcow2", "offline", "--yes"]);
    rustix::process::kill_process(rustix::process::Pid::from_child(&server), rustix::process::Signal::TERM)
        .unwrap();
    assert!(server.wait().unwrap().success());
    assert_eq!(names(&run_json(["snapshot", "list", &served, "--json"])), ["near", "far"]);
    assert_eq!(names(&run_json(["snapshot", "list", &other, "--json"])), ["offline"]);
}
