//! Checks, repairs, offline commands and the next server keep the unflushed writes of a killed server.

use crate::support;
use std::process::Command;

use crate::support::server::Server;
use crate::support::{Images, run_err, run_json, run_ok, tool};
use tempfile::TempDir;

/// Writes 1 and flushes, then writes 2 and 3 and does not.
const WRITES: &str = "h.pwrite(b'\x01' * 65536, 0); h.flush(); h.pwrite(b'\x02' * 65536, 65536); h.pwrite(b'\x03' * 4096, 131072)";

/// A disk whose server was killed, and that server's runtime directory.
fn killed() -> (Images, String, TempDir) {
    let images = Images::new();
    let disk = images.name("web.qcow2");
    run_ok(["create", &disk, "16M"]);
    let server = serve(TempDir::new().unwrap(), &images, &[]);
    let uri = server.uri("web");
    // Debian's nbdsh needs Debian's Python.
    let path = format!("/usr/bin:{}", std::env::var("PATH").unwrap_or_default());
    let wrote = Command::new("nbdsh").args(["-u", &uri, "-c", WRITES]).env("PATH", path).status();
    assert!(wrote.expect("nbdsh").success());
    let runtime = server.crash();
    (images, disk, runtime)
}

fn serve(runtime: TempDir, images: &Images, more: &[&str]) -> Server {
    let (disk, nbd) =
        (format!("path={}", images.name("web.qcow2")), format!("unix:{},rw", images.name("nbd.sock")));
    Server::start_in(runtime, &[&["--disk", &disk, "--nbd", &nbd], more].concat())
}

/// What the disk reads where nothing was flushed.
fn unflushed(server: &Server) -> String {
    let reads = |pattern: &str, at: &str| {
        let read = format!("read -P {pattern} {at}");
        tool("qemu-io", ["-f", "raw", "-c", &read, &server.uri("web")]).status.success()
    };
    match (reads("2", "64k 64k"), reads("3", "128k 4k"), reads("0", "64k 64k")) {
        (true, true, false) => "there",
        (false, false, true) => "lost",
        _ => "something else",
    }
    .to_owned()
}

#[test]
fn a_check_calls_the_writes_of_a_killed_server_no_leaks() {
    let (images, disk, runtime) = killed();
    let dir = runtime.path().to_str().unwrap();
    let report = run_json(["check", &disk, "--json", "--runtime-dir", dir]);
    assert_eq!((report["leaks"].as_u64(), report["journaled"].as_u64()), (Some(0), Some(2)));
    assert!(run_ok(["check", &disk, "--runtime-dir", dir]).contains("2 clusters belong to writes"));
    assert_eq!(unflushed(&serve(runtime, &images, &[])), "there");
}

#[test]
fn no_offline_command_loses_what_a_killed_server_completed() {
    let commands: [&[&str]; 4] = [
        &["check", "DISK", "--repair", "leaks"],
        &["check", "DISK", "--repair", "all"],
        &["snapshot", "create", "DISK", "--name", "mon"],
        &["resize", "DISK", "+1M"],
    ];
    let elsewhere = TempDir::new().unwrap();
    for command in commands {
        let (images, disk, runtime) = killed();
        let with = |dir: &str| {
            let named = command.iter().map(|word| word.replace("DISK", &disk));
            named.chain(["--runtime-dir".to_owned(), dir.to_owned()]).collect::<Vec<_>>()
        };
        let said = run_err(1, with(elsewhere.path().to_str().unwrap()));
        assert!(
            said.contains("--runtime-dir") && said.contains("--discard-unflushed"),
            "{command:?}: {said}"
        );
        run_ok(with(runtime.path().to_str().unwrap()));
        assert_eq!(unflushed(&serve(runtime, &images, &[])), "there", "{command:?}");
    }
}

#[test]
fn unflushed_writes_are_lost_only_where_that_is_asked_for() {
    let (images, disk, runtime) = killed();
    let elsewhere = TempDir::new().unwrap();
    let spec = format!("path={disk}");
    let nbd = format!("unix:{},rw", images.name("nbd.sock"));
    let dir = elsewhere.path().to_str().unwrap();
    let said = run_err(1, ["serve", "--disk", &spec, "--nbd", &nbd, "--no-control", "--runtime-dir", dir]);
    assert!(said.contains("web.qcow2") && said.contains("--discard-unflushed"), "{said}");
    let server = serve(elsewhere, &images, &["--discard-unflushed"]);
    assert_eq!(unflushed(&server), "lost");
    assert!(server.log().contains("discarded, as asked"), "{}", server.log());
    assert!(server.stop().success());
    // The journal that was left is about a session that is over.
    assert_eq!(unflushed(&serve(runtime, &images, &[])), "lost");

    let (images, disk, runtime) = killed();
    let elsewhere = TempDir::new().unwrap();
    let dir = elsewhere.path().to_str().unwrap();
    run_ok(["check", &disk, "--repair", "leaks", "--runtime-dir", dir, "--discard-unflushed"]);
    assert_eq!(unflushed(&serve(runtime, &images, &[])), "lost");
}

#[test]
fn a_check_without_the_journal_does_not_call_leaks_safe_to_repair() {
    let (_images, disk, _runtime) = killed();
    let elsewhere = TempDir::new().unwrap();
    let output = support::run(["check", &disk, "--runtime-dir", elsewhere.path().to_str().unwrap()]);
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    assert_eq!(output.status.code(), Some(3), "{said}");
    assert!(
        said.contains("2 leaks at most") && said.contains("--runtime-dir") && !said.contains("safe"),
        "{said}"
    );
}
