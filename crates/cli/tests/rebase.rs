//! `vmstrata rebase`: of disks that no server has, and of disks in use.

use std::fs;
use std::os::unix::fs::{DirEntryExt as _, MetadataExt as _, PermissionsExt as _};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use crate::support::http::ask;
use crate::support::killed::{Call, calls_of_thread_with, killing, logging, some_of};
use crate::support::nas::{Nas, begin_slow_rebase, is_as, publish, write_until};
use crate::support::server::Server;
use crate::support::{assert_clean, run_err, run_json, run_ok, tool, tool_ok, wait_until};
use serde_json::{Value, json};

/// What the second version has and the first has not.
const PATCH: [&str; 3] = ["write -P 90 1M 2M", "write -P 91 30M 4M", "write -z 6M 1M"];
/// What a guest writes: the patch, but for one part, and something of its own.
const GUEST: [&str; 4] =
    ["write -P 90 1M 2M", "write -P 91 30M 4M", "write -P 5 50M 300k", "write -z 9M 64k"];
/// Of the writes and flushes of a job, about so many are those at which it is killed.
const KILLS: usize = 12;

const DESK: &str = "nas/desk0.qcow2";

/// Bytes that a file takes.
fn allocated(path: &Path) -> u64 {
    path.metadata().unwrap().blocks() * 512
}

/// How many pins there are for the first desktop.
fn own_pins(nas: &Nas) -> usize {
    let pins = run_json(["tier", "pins", &nas.images.name("nas/golden.qcow2"), "--json"]);
    let is_own =
        |pin: &&Value| pin["purpose"]["reader"].as_str().is_some_and(|who| who.contains("desk0.qcow2"));
    pins.as_array().unwrap().iter().filter(is_own).count()
}

/// What a rebase makes beside the first desktop and does not leave there. A snapshot that was killed leaves another name of the desktop's own
/// file, until the next one is taken.
fn left(nas: &Nas) -> Vec<String> {
    let own = nas.images.path("nas/desk0.qcow2").metadata().unwrap().ino();
    let files = fs::read_dir(nas.images.path("nas")).unwrap().map(Result::unwrap);
    let names = files.filter(|file| file.ino() != own).map(|file| file.file_name().into_string().unwrap());
    names.filter(|name| [".rebase-", ".part", ".dropped"].iter().any(|made| name.contains(made))).collect()
}

/// The version whose newest layer is the backing file of an image.
fn stands_on(nas: &Nas, image: &str) -> String {
    let desk = nas.images.name(image);
    let about: Value =
        serde_json::from_str(&tool_ok("qemu-img", ["info", "-U", "--output=json", &desk])).unwrap();
    let listed = run_json(["snapshot", "list", &nas.images.name("nas/golden.qcow2"), "--json"]);
    let states = listed["snapshots"].as_array().unwrap();
    let state = states.iter().find(|state| state["layer"] == about["full-backing-filename"]);
    state.unwrap_or_else(|| panic!("{about} of {listed}"))["name"].as_str().unwrap().to_owned()
}

/// The first desktop has been written, and its base has a second version; what the desktop holds.
fn patched() -> (Nas, [String; 2]) {
    let nas = Nas::new();
    publish(&nas.images, "v2", &PATCH);
    let server = nas.serve(&[]);
    for write in GUEST {
        tool_ok("qemu-io", ["-f", "raw", "-c", write, "-c", "flush", &server.uri("desk0")]);
    }
    assert!(server.stop().success());
    let [desk, model] = ["nas/desk0.qcow2", "desk.qcow2"].map(|file| nas.images.name(file));
    tool_ok("qemu-img", ["convert", "-O", "qcow2", &desk, &model]);
    let v2 = format!("{}@v2", nas.images.name("nas/golden.qcow2"));
    (nas, [model, v2])
}

#[test]
fn a_disk_stands_on_a_newer_base_and_reads_as_before() {
    let nas = Nas::new();
    publish(&nas.images, "v2", &PATCH);
    let base = nas.images.name("nas/golden.qcow2");
    let [v2, model] = [format!("{base}@v2"), nas.images.name("desk.qcow2")];
    // It was patched as the base was, but for one part; and it has something of its own.
    let server = nas.serve(&[]);
    for write in GUEST {
        tool_ok("qemu-io", ["-f", "raw", "-c", write, "-c", "flush", &server.uri("desk0")]);
    }
    let desk = nas.images.name("nas/desk0.qcow2");
    assert!(server.stop().success());
    tool_ok("qemu-img", ["convert", "-O", "qcow2", &desk, &model]);
    fs::set_permissions(&desk, fs::Permissions::from_mode(0o640)).unwrap();

    let before = allocated(desk.as_ref());
    let foreseen = run_json(["rebase", &desk, "--onto", &v2, "--dry-run", "--json"]);
    tool_ok("qemu-img", ["compare", &desk, &model]);
    assert_eq!(allocated(desk.as_ref()), before);
    let said = run_ok(["rebase", &desk, "--onto", &v2]);
    assert!(said.contains("stands on") && said.contains("before"), "{said}");
    tool_ok("qemu-img", ["compare", &desk, &model]);
    assert_clean(desk.as_ref());
    assert_eq!(fs::metadata(&desk).unwrap().permissions().mode() & 0o777, 0o640);
    // What v1 had and v2 has not is kept, beside its own; the patch is not.
    let stored = foreseen["stored_bytes"].as_u64().unwrap();
    assert!((1 << 20..=(1 << 20) + (512 << 10)).contains(&stored), "{stored}");
    let after = allocated(desk.as_ref());
    assert!(after < stored + (2 << 20) && after < before / 2, "{after} of {before}");
    assert_eq!(run_json(["rebase", &desk, "--onto", &v2, "--dry-run", "--json"])["stored_bytes"], stored);

    // One pin keeps what it stands on now, and none what it stood on.
    assert_eq!(own_pins(&nas), 1);
    run_ok(["rebase", &desk, "--onto", &v2]);
    tool_ok("qemu-img", ["compare", &desk, &model]);

    let allow = nas.repository()[0].to_str().unwrap().to_owned();
    run_ok(["snapshot", "create", &desk, "--name", "own", "--allow-backing", &allow]);
    let refused = run_err(1, ["rebase", &desk, "--onto", &v2]);
    assert!(refused.contains("snapshots of its own"), "{refused}");
    assert!(!nas.images.files().iter().any(|file| file.contains(".part")));
}

#[test]
fn a_disk_in_use_stands_on_a_newer_base_while_its_guest_writes() {
    let (nas, [model, v2]) = patched();
    let desk = nas.images.name("nas/desk0.qcow2");
    let before = allocated(desk.as_ref());
    let server = nas.serve(&[]);
    let stop = AtomicBool::new(false);
    let foreseen = thread::scope(|scope| {
        let guest = scope.spawn(|| write_until(&stop, &server, &model));
        let foreseen = server.ask_ok(["rebase", "desk0", "--onto", &v2, "--dry-run", "--json"]);
        let said = server.ask_ok(["rebase", "desk0", "--onto", &v2]);
        assert!(said.contains("stands on") && said.contains("before"), "{said}");
        stop.store(true, Ordering::Relaxed);
        assert!(guest.join().unwrap() > 0);
        serde_json::from_str::<Value>(&foreseen).unwrap()
    });
    is_as(&server, &model);
    // What v1 had and v2 has not, its own, and what was written since; the patch is not.
    let stored = foreseen["stored_bytes"].as_u64().unwrap();
    assert!((1 << 20..=(1 << 20) + (512 << 10) + (2 << 20)).contains(&stored), "{foreseen}");
    assert_eq!((left(&nas), own_pins(&nas), stands_on(&nas, DESK)), (Vec::new(), 1, "v2".to_owned()));
    let after = allocated(desk.as_ref());
    assert!(after < before - (3 << 20), "{after} of {before}");

    // Again, there is nothing to gain; and what would be lost is refused.
    server.ask_ok(["rebase", &desk, "--onto", &v2]);
    is_as(&server, &model);
    for (disk, onto, why) in [
        ("desk0", nas.images.name("nas/golden.qcow2@none"), "no snapshot 'none'"),
        ("desk0", nas.images.name("nas/golden.qcow2"), "BASE@VERSION"),
    ] {
        let refused = server.ask_err(["rebase", disk, "--onto", &onto]);
        assert!(refused.contains(why), "{refused}");
    }
    server.ask_ok(["snapshot", "create", "desk0", "--name", "own"]);
    let refused = server.ask_err(["rebase", "desk0", "--onto", &v2]);
    assert!(refused.contains("snapshots of its own"), "{refused}");
    assert!(server.stop().success());
    tool_ok("qemu-img", ["compare", &desk, &model]);
    assert_clean(desk.as_ref());
}

#[test]
fn a_snapshot_that_is_taken_during_a_rebase_stays() {
    let (nas, [model, v2]) = patched();
    let server = nas.serve(&[]);
    let path = begin_slow_rebase(&server, &v2);
    server.ask_ok(["snapshot", "create", "desk0", "--name", "mid"]);
    let mid = nas.images.name("mid.qcow2");
    fs::copy(&model, &mid).unwrap();
    for (uri, format) in [(server.uri("desk0"), "raw"), (model.clone(), "qcow2")] {
        tool_ok("qemu-io", ["-f", format, "-c", "write -P 6 1M 1M", &uri]);
    }
    let limit = json!({ "action": "limit", "bytes_per_second": null }).to_string();
    ask(&server.control(), "POST", &path, &limit);
    wait_until("it is done", || ask(&server.control(), "GET", &path, "").json()["state"] == "done");
    is_as(&server, &model);
    assert!(server.stop().success());
    let [desk, layer] = [DESK, "nas/desk0.mid.qcow2"].map(|file| nas.images.name(file));
    for (image, content) in [(&desk, &model), (&layer, &mid)] {
        tool_ok("qemu-img", ["compare", image, content]);
        assert_clean(image.as_ref());
    }
    assert_eq!((left(&nas), own_pins(&nas)), (Vec::new(), 1));
    assert_eq!(stands_on(&nas, "nas/desk0.mid.qcow2"), "v2");
}

#[test]
fn a_cancelled_rebase_leaves_a_disk_as_it_was() {
    let (nas, [model, v2]) = patched();
    let server = nas.serve(&[]);
    let path = begin_slow_rebase(&server, &v2);
    let status = || ask(&server.control(), "GET", &path, "").json();
    let change =
        |action: &str| ask(&server.control(), "POST", &path, &json!({ "action": action }).to_string());
    assert_eq!(change("pause").json()["state"], "paused");
    for args in
        [&["rebase", "desk0", "--onto", &v2][..], &["move", "desk0", "--to", &nas.images.name("host")]]
    {
        let refused = server.ask_err(args.iter().copied());
        assert!(refused.contains("rebase"), "{refused}");
    }
    assert!(server.ask_ok(["snapshot", "list", "desk0"]).contains("rebase-"));
    change("cancel");
    wait_until("it has ended", || status()["state"] == "cancelled");
    wait_until("nothing is left", || left(&nas).is_empty());
    is_as(&server, &model);
    assert_eq!((own_pins(&nas), stands_on(&nas, DESK)), (1, "v1".to_owned()));
    assert!(server.stop().success());
    let desk = nas.images.name("nas/desk0.qcow2");
    tool_ok("qemu-img", ["compare", &desk, &model]);
    assert_clean(desk.as_ref());
}

/// Whatever is left reads as before by stock tools, and the next server ends what was begun: undone, or done.
#[test]
fn a_server_killed_anywhere_in_a_rebase_is_followed_by_one_that_ends_it() {
    let (nas, [model, v2]) = patched();
    let [desk, dir, kept] = ["nas/desk0.qcow2", "nas", "kept"].map(|file| nas.images.name(file));
    tool_ok("cp", ["-a", &dir, &kept]);
    let restore = || {
        tool_ok("rm", ["-rf", &dir, &nas.images.name("host")]);
        tool_ok("cp", ["-a", &kept, &dir]);
    };
    let all = nas.args(&[]);
    // The first disk, and NBD.
    let args: Vec<&str> = all[..2].iter().chain(&all[6..]).map(String::as_str).collect();
    let log = nas.images.name("log");
    let server = Server::start_traced(&logging(&log), &args);
    server.ask_ok(["rebase", "desk0", "--onto", &v2]);
    assert!(server.stop().success());
    let calls = calls_of_thread_with(&fs::read_to_string(&log).unwrap(), "-onto.qcow2");
    let mut ended = Vec::new();
    // A crash may leak clusters.
    let is_sound = |call: &Call| {
        tool_ok("qemu-img", ["compare", "-U", &desk, &model]);
        let checked = tool("qemu-img", ["check", "-U", &desk]).status.code();
        assert!(matches!(checked, Some(0 | 3)), "killed at {call:?}: {checked:?}");
    };
    for call in some_of(calls, KILLS) {
        restore();
        let server = Server::start_traced(&killing(&call), &args);
        if server.ask(["rebase", "desk0", "--onto", &v2]).status.success() {
            // Threads share the work otherwise than in the run that was looked at. It may be killed at its end.
            let _ = server.stop();
            continue;
        }
        let runtime = server.wait_killed();
        is_sound(&call);
        let server = Server::start_in(runtime, &args);
        wait_until(&format!("nothing is left of what was killed at {call:?}"), || left(&nas).is_empty());
        is_as(&server, &model);
        assert_eq!(own_pins(&nas), 1, "killed at {call:?}");
        assert!(server.stop().success());
        is_sound(&call);
        ended.push(stands_on(&nas, DESK));
    }
    assert!(ended.len() >= KILLS, "{ended:?}");
    assert!(["v1", "v2"].iter().all(|version| ended.iter().any(|on| on == version)), "{ended:?}");
}
