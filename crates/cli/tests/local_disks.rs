//! Disks that stay on one host: swap, and journals.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;

use crate::support::http::ask;
use crate::support::server::Server;
use crate::support::{Images, tool_ok};

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
