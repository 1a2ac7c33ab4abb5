//! Desktops that are tiered disks: clones of a base, whose layers they share.

use std::fs;
use std::os::unix::fs::MetadataExt as _;

use crate::support::nas::{Nas, publish};
use crate::support::server::Server;
use crate::support::{run_err, run_json, run_ok, tool_ok};

/// What the base's second version has and the first has not.
const PATCH: [&str; 2] = ["write -P 90 1M 2M", "write -P 91 30M 4M"];
/// What a guest writes: the patch, and something of its own.
const GUEST: [&str; 3] = ["write -P 90 1M 2M", "write -P 91 30M 4M", "write -P 5 50M 300k"];

/// Bytes of files in the desktop's repository that the base's has not.
fn own_bytes(nas: &Nas) -> u64 {
    let files = fs::read_dir(nas.images.path("nas/desk0.qcow2.tier")).unwrap().map(Result::unwrap);
    let about =
        files.map(|file| file.metadata().unwrap()).filter(|about| about.is_file() && about.nlink() == 1);
    about.map(|about| about.len()).sum()
}

#[test]
fn a_tiered_desktop_stands_on_a_newer_base_and_ships_what_differs() {
    let nas = Nas::new();
    publish(&nas.images, "v2", &PATCH);
    let [dir, desk, tier, base, model] = ["nas", "nas/desk0.qcow2", "tier", "nas/golden.qcow2", "desk.qcow2"]
        .map(|name| nas.images.name(name));
    let (disk, nbd) = (
        format!("path={desk},tier={tier},window=600,backing={dir}"),
        format!("unix:{},rw", nas.images.name("desk.sock")),
    );
    let serve = || Server::start(&["--disk", &disk, "--nbd", &nbd]);
    let server = serve();
    nas.assert_as_base(&server, "desk0");
    for write in GUEST {
        tool_ok("qemu-io", ["-f", "raw", "-c", write, "-c", "flush", &server.uri("desk0")]);
    }
    tool_ok("qemu-img", ["convert", "-f", "raw", "-O", "qcow2", &server.uri("desk0"), &model]);
    assert!(server.stop().success());
    assert!(own_bytes(&nas) < 1 << 20, "what the guest wrote is on the host");

    let onto = format!("{base}@v2");
    let refused = run_err(1, ["rebase", &desk, "--onto", &onto]);
    assert!(refused.contains("--tier"), "{refused}");
    let rebase = ["rebase", &desk, "--onto", &onto, "--tier", &tier];
    let foreseen = run_json(rebase.into_iter().chain(["--dry-run", "--json"]));
    let stored = foreseen["stored_bytes"].as_u64().unwrap();
    assert!((300 << 10..512 << 10).contains(&stored), "{foreseen}");
    run_ok(rebase);
    tool_ok("qemu-img", ["compare", &desk, &model]);
    // The patch alone has twice as much.
    assert!(own_bytes(&nas) < 3 << 20, "{} bytes", own_bytes(&nas));
    let server = serve();
    tool_ok("qemu-img", ["compare", "-f", "raw", "-F", "qcow2", &server.uri("desk0"), &model]);
    assert!(server.stop().success());
}
