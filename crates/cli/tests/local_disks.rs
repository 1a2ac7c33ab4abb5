//! Disks that stay on one host: swap, and journals.

use std::fs;
use std::os::unix::fs::{FileExt as _, PermissionsExt as _};

use crate::support::http::ask;
use crate::support::server::Server;
use crate::support::{Images, tool_ok, wait_until};

struct Host {
    images: Images,
}

impl Host {
    fn args(&self) -> [String; 6] {
        let name = |file: &str| self.images.name(file);
        let disk = |file: &str, role| format!("path={},role={role},size=16M", name(file));
        let nbd = format!("unix:{},rw", name("nbd.sock"));
        ["--disk".to_owned(), disk("swap.img", "swap"), "--disk".to_owned(), disk("journal.img", "local")]
            .into_iter()
            .chain(["--nbd".to_owned(), nbd])
            .collect::<Vec<_>>()
            .try_into()
            .expect("six")
    }

    fn serve(&self) -> Server {
        Server::start(&self.args().each_ref().map(String::as_str))
    }
}

#[test]
fn a_local_disk_is_made_kept_over_restarts_and_removed_with_its_file() {
    let host = Host { images: Images::new() };
    let server = host.serve();
    let [swap, journal] = ["swap.img", "journal.img"].map(|file| host.images.path(file));
    for file in [&swap, &journal] {
        let found = fs::metadata(file).unwrap();
        assert_eq!((found.len(), found.permissions().mode() & 0o777), (16 << 20, 0o600));
    }
    let uri = server.uri("swap");
    tool_ok("qemu-io", ["-f", "raw", "-c", "write -P 7 1M 64k", "-c", "flush", &uri]);
    let args = host.args();
    let server = Server::start_in(server.crash(), &args.each_ref().map(String::as_str));
    tool_ok("qemu-io", ["-f", "raw", "-c", "read -P 7 1M 64k", &server.uri("swap")]);

    let shown = ask(&server.control(), "GET", "/v1/disks", "").json();
    assert_eq!((&shown["disks"][0]["role"], &shown["disks"][1]["role"]), (&"swap".into(), &"local".into()));
    let metrics = ask(&server.control(), "GET", "/v1/metrics", "").body;
    assert!(metrics.contains(r#"vmstrata_disk_role{disk="swap",role="swap"} 1"#), "{metrics}");
    assert!(server.ask_ok(["disk", "show", "journal"]).contains("role=local: its file goes with it"));

    let elsewhere = host.images.name("elsewhere");
    fs::create_dir(&elsewhere).unwrap();
    for (args, what) in [
        (&["snapshot", "create", "swap", "--name", "mon"][..], "snapshot"),
        (&["snapshot", "create", "swap", "--name", "mon", "--convert-raw"], "snapshot"),
        (&["move", "swap", "--to", &elsewhere], "move"),
        (&["tier", "attach", "swap", "--tier", &elsewhere], "repository"),
    ] {
        let told = server.ask_err(args.iter().copied());
        assert!(told.contains(&format!("there is no {what} of it")), "{args:?}: {told}");
    }

    server.ask_ok(["disk", "remove", "swap"]);
    assert!(!swap.exists());
    let told = server.ask_err(["disk", "remove", "journal"]);
    assert!(told.contains("journal.img goes with the disk") && journal.exists(), "{told}");
    server.ask_ok(["disk", "remove", "journal", "--yes"]);
    assert!(!journal.exists());
    assert!(server.stop().success());
}

#[test]
fn a_server_that_ends_leaves_the_files_of_its_local_disks() {
    let host = Host { images: Images::new() };
    assert!(host.serve().stop().success());
    assert!(["swap.img", "journal.img"].iter().all(|file| host.images.path(file).exists()));
}

#[test]
fn another_file_is_not_taken_for_a_local_disk() {
    let images = Images::new();
    let other = images.name("other.qcow2");
    tool_ok("qemu-img", ["create", "-q", "-f", "qcow2", &other, "16M"]);
    let before = fs::read(&other).unwrap();
    for (disk, told) in [
        (format!("path={other},role=swap,size=16M"), "is no file of 16777216 bytes"),
        (format!("path={},role=swap,size=16M", images.name(".")), "directory"),
        (format!("path={other},role=swap"), "needs a size"),
        (format!("path={other},role=swap,size=1000"), "multiple of 4096"),
        (format!("path={other},size=16M"), "'size' goes with"),
        (format!("path={other},role=local,size=16M,tier=/t"), "'tier' does not go with 'role=local'"),
        ("path=nbd://localhost/x,role=swap,size=16M".to_owned(), "'path=nbd' does not go with"),
        (format!("path={other},role=local,size=16M,format=qcow2"), "'format=qcow2' does not go with"),
    ] {
        let said = run_err_of_serve(&disk, &images);
        assert!(said.contains(told), "{disk}: {said}");
    }
    assert!(fs::read(&other).unwrap() == before);
}

fn run_err_of_serve(disk: &str, images: &Images) -> String {
    let output = crate::support::run([
        "serve",
        "--disk",
        disk,
        "--nbd",
        &format!("unix:{}", images.name("s")),
        "--runtime-dir",
        &images.name("run"),
    ]);
    assert!(!output.status.success());
    String::from_utf8_lossy(&output.stderr).into_owned()
}

#[test]
fn swap_on_a_tiered_disk_is_named_with_its_partition() {
    let images = Images::new();
    let [raw, swap, web] = ["guest.raw", "swap.raw", "web.qcow2"].map(|file| images.name(file));
    for (file, bytes) in [(&raw, 64 << 20), (&swap, 8 << 20)] {
        fs::File::create(file).unwrap().set_len(bytes).unwrap();
    }
    tool_ok("mkswap", ["-q", &swap]);
    let guest = fs::File::options().write(true).open(&raw).unwrap();
    guest.write_all_at(&fs::read(&swap).unwrap(), 1 << 20).unwrap();
    // A table of one partition of 8 MiB, from 1 MiB on.
    let entry = [&[0, 0, 0, 0, 0x82, 0, 0, 0][..], &2048u32.to_le_bytes(), &16384u32.to_le_bytes()].concat();
    guest.write_all_at(&entry, 446).unwrap();
    guest.write_all_at(&[0x55, 0xaa], 510).unwrap();
    tool_ok("qemu-img", ["convert", "-f", "raw", "-O", "qcow2", &raw, &web]);
    let disk = format!("path={web},tier={},window=600", images.name("host"));
    let nbd = format!("unix:{},rw", images.name("nbd.sock"));
    let server = Server::start(&["--disk", &disk, "--nbd", &nbd]);
    let said = |command: &str| {
        tool_ok("qemu-io", ["-f", "raw", "-c", command, "-c", "flush", &server.uri("web")]);
        server.ask_ok(["tier", "sync", "web"]);
        // It is looked at once that is published.
        wait_until("the disk was looked at", || {
            let tier = ask(&server.control(), "GET", "/v1/disks/web", "").json()["tier"].clone();
            tier["advice"].as_array().map_or(0, Vec::len) == usize::from(command.contains("40M"))
        });
        server.ask_ok(["tier", "status", "web"])
    };
    // The guest reads its table and its swap when it starts.
    tool_ok("qemu-io", ["-f", "raw", "-c", "read 0 4k", "-c", "read 1M 4k", &server.uri("web")]);
    let told = said("write -P 7 40M 64k");
    assert!(told.contains("web.qcow2: partition 1 (8 MiB) is swap") && told.contains("role=swap"), "{told}");
    assert!(server.log().contains("partition 1 (8 MiB) is swap"), "{}", server.log());
    let told = said("write -z 1M 8M");
    assert!(!told.contains("is swap"), "{told}");
    assert!(server.stop().success());
}
