//! `vmstrata backup` and `restore`, from whole processes: files, pipes, interruptions, full disks.

use crate::support;
use std::io::Read as _;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use crate::support::killed::{calls, killed_at, some_of};
use crate::support::loop_device::LoopDevice;
use crate::support::server::Server;
use crate::support::{
    Holder, Images, assert_clean, run, run_err, run_json, run_ok, stderr, tool, tool_ok, vmstrata,
};
use serde_json::Value;

/// A chain of three states, each with its own data.
fn states(images: &Images) -> [String; 3] {
    images.create("0.qcow2", &["32M"]);
    images.write_layer("0.qcow2", &["write -P 1 0 4M", "write -P 2 16M 1M"]);
    images.create("1.qcow2", &["-b", "0.qcow2", "-F", "qcow2"]);
    images.write_layer("1.qcow2", &["write -P 3 1M 128k", "write -z 16M 64k"]);
    images.create("2.qcow2", &["-b", "1.qcow2", "-F", "qcow2", "40M"]);
    images.write_layer("2.qcow2", &["write -P 4 39M 1M", "write -P 5 1M 64k"]);
    ["0.qcow2", "1.qcow2", "2.qcow2"].map(|name| images.name(name))
}

fn assert_same(one: &str, other: &str) {
    tool_ok("qemu-img", ["compare", "-q", one, other]);
}

/// Names in the directory that begin with `prefix` or are temporary.
fn files(images: &Images, prefix: &str) -> Vec<String> {
    let names = std::fs::read_dir(images.path("")).unwrap().map(|entry| entry.unwrap().file_name());
    let names = names.map(|name| name.into_string().unwrap());
    names.filter(|name| name.starts_with(prefix) || name.ends_with(".new")).collect()
}

#[test]
fn a_chain_of_backups_is_read_by_stock_tools_and_restored() {
    let images = Images::new();
    let states = states(&images);
    let backups = ["full.qcow2", "inc1.qcow2", "inc2.qcow2"].map(|name| images.name(name));
    run_ok(["backup", &states[0], "-o", &backups[0], "--compress", "zlib"]);
    let made = run_json([
        "backup",
        &states[1],
        "--since",
        &states[0],
        "--previous",
        &backups[0],
        "-o",
        &backups[1],
        "--json",
    ]);
    assert_eq!((&made["incremental"], &made["stored-bytes"]), (&true.into(), &(128 << 10).into()));
    let manifest = format!("{}.manifest.json", backups[1]);
    let command = ["backup", &states[2], "--since", &states[1], "--previous", &manifest];
    run_ok([&command[..], &["--compress", "zstd", "-o", &backups[2]]].concat());
    for (state, backup) in states.iter().zip(&backups) {
        assert_same(state, backup);
        assert_clean(Path::new(backup));
        assert!(run_ok(["backup", "--verify", backup]).contains("sound"));
    }
    let sum = tool_ok("sha256sum", [&backups[1]]);
    assert_eq!(sum.split_whitespace().next(), made["sha256"].as_str(), "anyone can check it");
    for count in 1..=3 {
        let restored = images.name("restored.qcow2");
        let files: Vec<&str> = backups[..count].iter().map(String::as_str).collect();
        run_ok([&["restore"], &files[..], &["-o", &restored, "--force"]].concat());
        assert_same(&states[count - 1], &restored);
        assert_clean(Path::new(&restored));
    }
}

#[test]
fn a_pipe_carries_the_bytes_of_the_file() {
    let images = Images::new();
    let states = states(&images);
    let (file, manifest) = (images.name("full.qcow2"), images.name("piped.manifest.json"));
    run_ok(["backup", &states[0], "-o", &file]);
    let piped = run(["backup", &states[0], "-o", "-", "--manifest", &manifest, "--json"]);
    assert!(piped.status.success(), "{}", stderr(&piped));
    assert!(piped.stdout == std::fs::read(&file).unwrap());
    let result: Value = serde_json::from_str(&stderr(&piped)).expect("JSON on stderr");
    assert_eq!(result["bytes"], piped.stdout.len());
    std::fs::write(images.path("piped"), &piped.stdout).unwrap();
    run_ok(["backup", "--verify", &images.name("piped")]);
}

#[test]
fn a_backup_elsewhere_names_the_previous_one_by_its_path() {
    let images = Images::new();
    let states = states(&images);
    std::fs::create_dir(images.path("sub")).unwrap();
    let (full, inc) = (images.name("full.qcow2"), images.name("sub/inc.qcow2"));
    run_ok(["backup", &states[0], "-o", &full]);
    run_ok(["backup", &states[1], "--since", &states[0], "--previous", &full, "-o", &inc]);
    assert_same(&states[1], &inc);
    let named = images.name("named.qcow2");
    let command = ["backup", &states[1], "--since", &states[0], "--backing-name", "full.qcow2"];
    run_ok([&command[..], &["-o", &named]].concat());
    assert_same(&states[1], &named);
}

#[test]
fn damage_is_reported_by_name() {
    let images = Images::new();
    let states = states(&images);
    let full = images.name("full.qcow2");
    run_ok(["backup", &states[0], "-o", &full]);
    let mut bytes = std::fs::read(&full).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    std::fs::write(&full, bytes).unwrap();
    for command in [&["backup", "--verify", &full][..], &["restore", &full, "-o", &images.name("restored")]] {
        let message = run_err(1, command);
        assert!(message.contains("full.qcow2") && message.contains("damaged"), "{message}");
    }
    assert_eq!(files(&images, "restored"), Vec::<String>::new());
}

#[test]
fn what_exists_is_kept_unless_forced() {
    let images = Images::new();
    let states = states(&images);
    let full = images.name("full.qcow2");
    run_ok(["backup", &states[0], "-o", &full]);
    for command in [&["backup", &states[1], "-o", &full][..], &["restore", &full, "-o", &states[0]]] {
        assert!(run_err(1, command).contains("--force"));
    }
    let before = std::fs::read(&states[0]).unwrap();
    for command in [&["backup", &states[1], "-o", &states[0]][..], &["restore", &full, "-o", &states[0]]] {
        let refused = run_err(1, [command, &["--force"]].concat());
        assert!(
            refused.contains("a file of the disk") || refused.contains("1.qcow2 stands on it"),
            "{refused}"
        );
    }
    assert_eq!(std::fs::read(&states[0]).unwrap(), before);
    assert!(run_err(1, ["restore", &full, "-o", "-"]).contains("not to a pipe"));
    run_ok(["backup", &states[1], "-o", &full, "--force"]);
    assert_same(&states[1], &full);
    let message = run_err(
        1,
        ["backup", &states[2], "--since", &states[1], "--previous", &full, "-o", &full, "--force"],
    );
    assert!(message.contains("cannot replace the one it builds upon"), "{message}");
}

#[test]
fn a_disk_in_use_is_refused_with_advice_and_its_frozen_layer_is_not() {
    let images = Images::new();
    let states = states(&images);
    let holder = Holder::open(Path::new(&states[2]), false);
    let message = run_err(1, ["backup", &states[2], "-o", &images.name("full.qcow2")]);
    assert!(message.contains("in use") && message.contains("take a snapshot"), "{message}");
    assert_eq!(files(&images, "full"), Vec::<String>::new());
    run_ok(["backup", &states[1], "-o", &images.name("full.qcow2")]);
    holder.close();
}

#[test]
fn wrong_usage_is_told_before_anything_is_read() {
    for args in [
        &["backup", "a"][..],
        &["backup", "-o", "b"],
        &["backup", "a", "-o", "b", "--verify", "c"],
        &["backup", "a", "-o", "b", "--previous", "c"],
        &["backup", "a", "-o", "b", "--backing-name", "c"],
        &["restore", "-o", "b"],
        &["restore", "a"],
    ] {
        assert_eq!(run(args).status.code(), Some(64), "{args:?}");
    }
    let images = Images::new();
    let [state, ..] = states(&images);
    assert!(run_err(1, ["backup", &state, "-o", "-"]).contains("--manifest"));
    let manifest = images.name("m");
    let packed = ["backup", &state, "-o", "-", "--manifest", &manifest, "--compress", "zstd"];
    assert!(run_err(1, packed).contains("to a pipe"));
}

/// A reader that goes away is not a backup that was made.
#[test]
fn a_broken_pipe_is_a_failure() {
    let images = Images::new();
    let [state, ..] = states(&images);
    let manifest = images.path("m");
    let mut command = vmstrata();
    command.args(["backup", &state, "-o", "-", "--manifest"]).arg(&manifest);
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    child.stdout.take().unwrap().read_exact(&mut [0; 100]).unwrap();
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(1), "{}", stderr(&output));
    assert!(stderr(&output).contains("write the backup"), "{}", stderr(&output));
    assert!(!manifest.exists());
}

/// Whether the process has a file open in the images' directory that has no name, or a temporary one.
fn writes_unseen(child: &std::process::Child, images: &Images) -> bool {
    let Ok(open) = std::fs::read_dir(format!("/proc/{}/fd", child.id())) else { return false };
    let mut files = open.filter_map(|entry| std::fs::read_link(entry.ok()?.path()).ok());
    files.any(|file| {
        let name = file.strip_prefix(images.path("")).unwrap_or(Path::new("")).to_string_lossy();
        name.ends_with(" (deleted)") || name.ends_with(".new")
    })
}

/// Starts a slow backup and waits until it has begun to write.
fn slow(images: &Images, state: &str) -> std::process::Child {
    let full = images.name("full.qcow2");
    let mut command = vmstrata();
    command.args(["backup", state, "-o", &full, "--limit", "100K", "--threads", "1"]);
    let child = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    support::wait_until("the backup begins", || writes_unseen(&child, images));
    child
}

#[test]
fn a_killed_backup_leaves_nothing_under_its_name() {
    let images = Images::new();
    let [_, _, state] = states(&images);
    let mut child = slow(&images, &state);
    child.kill().unwrap();
    child.wait().unwrap();
    assert_eq!(files(&images, "full"), Vec::<String>::new(), "not even a temporary file");
    run_ok(["backup", &state, "-o", &images.name("full.qcow2")]);
    assert_same(&state, &images.name("full.qcow2"));
}

/// Old or new, it is whole, and what builds upon it is right; and what was left is in nobody's way.
#[test]
fn a_backup_killed_at_any_step_of_replacing_another_leaves_one_of_the_two() {
    let images = Images::new();
    let [old, new, later] = states(&images);
    let (full, restored, inc) =
        (images.name("full.qcow2"), images.name("restored.qcow2"), images.name("inc.qcow2"));
    let replace = ["backup", &new, "-o", &full, "--force", "--quiet"];
    let mut seen = [0; 2];
    run_ok(["backup", &old, "-o", &full]);
    for call in some_of(calls(&replace), 20) {
        run_ok(["backup", &old, "-o", &full, "--force"]);
        killed_at(&call, &replace);
        run_ok(["backup", "--verify", &full]);
        run_ok(["restore", &full, "-o", &restored, "--force"]);
        let is_new = tool("qemu-img", ["compare", "-q", &new, &restored]).status.success();
        assert_same(if is_new { &new } else { &old }, &restored);
        let since = if is_new { &new } else { &old };
        let incremental = ["backup", &later, "--since", since, "--previous", &full, "-o", &inc, "--force"];
        run_ok(incremental);
        run_ok(["restore", &full, &inc, "-o", &restored, "--force"]);
        assert_same(&later, &restored);
        // What stands on it keeps a backup from being replaced.
        std::fs::remove_file(&inc).unwrap();
        seen[usize::from(is_new)] += 1;
    }
    let named = files(&images, "full.").into_iter().filter(|name| !name.starts_with('.'));
    assert_eq!(named.count(), 2, "the backup and its manifest");
    assert!(seen.iter().all(|&times| times > 0), "killed before and after: {seen:?}");
}

#[test]
fn a_backup_killed_at_any_step_of_naming_it_can_be_made_again() {
    let images = Images::new();
    let [state, ..] = states(&images);
    let backup = |full: &str| ["backup", &state, "-o", full, "--quiet"].map(str::to_owned);
    for (number, call) in some_of(calls(&backup(&images.name("first.qcow2"))), 20).iter().enumerate() {
        let full = images.name(&format!("full-{number}.qcow2"));
        killed_at(call, &backup(&full));
        if Path::new(&full).exists() {
            run_ok(["backup", "--verify", &full]);
        } else {
            run_ok(["backup", &state, "-o", &full]);
        }
        assert_same(&state, &full);
    }
}

#[test]
fn an_interrupted_backup_removes_what_it_wrote() {
    let images = Images::new();
    let [_, _, state] = states(&images);
    let mut child = slow(&images, &state);
    let told = Instant::now();
    tool_ok("kill", ["-INT", &child.id().to_string()]);
    assert_eq!(child.wait().unwrap().code(), Some(1));
    // At this limit it waits for longer between two reads.
    assert!(told.elapsed() < Duration::from_secs(10), "{:?}", told.elapsed());
    assert_eq!(files(&images, "full"), Vec::<String>::new());
}

/// In a mount namespace of its own, with a file system of 2 MiB.
#[test]
fn a_full_disk_is_told_and_left_as_it_was() {
    let images = Images::new();
    std::fs::create_dir(images.path("small")).unwrap();
    let script =
        "mount -t tmpfs -o size=2m tmpfs \"$1\" || exit 99; shift; \"$@\"; code=$?; ls -A \"$0\"; exit $code";
    let small = images.name("small");
    for packing in ["none", "zstd"] {
        let target = format!("{small}/full.qcow2");
        // Zeros are no data, and one byte over and over is none to speak of: noise fills a disk.
        let noise = noise(&images, 4 << 20);
        let mut command = Command::new("unshare");
        command.args(["-rm", "sh", "-c", script, &small, &small, env!("CARGO_BIN_EXE_vmstrata")]);
        let output = command.args(["backup", &noise, "-o", &target, "--compress", packing]).output().unwrap();
        let said = stderr(&output);
        assert_eq!(output.status.code(), Some(1), "{said}");
        assert!(said.contains("No space left on device") && said.contains("full.qcow2"), "{said}");
        assert!(output.stdout.is_empty(), "left: {}", String::from_utf8_lossy(&output.stdout));
    }
}

/// A qcow2 image of incompressible bytes.
fn noise(images: &Images, len: usize) -> String {
    let raw = images.path("noise.raw");
    let mut state = 1_u64;
    let bytes: Vec<u8> = std::iter::repeat_with(|| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (state >> 56) as u8
    })
    .take(len)
    .collect();
    std::fs::write(&raw, bytes).unwrap();
    let image = images.name("noise.qcow2");
    tool_ok("qemu-img", ["convert", "-f", "raw", "-O", "qcow2", raw.to_str().unwrap(), &image]);
    image
}

#[test]
fn a_device_that_is_full_is_told_when_it_is_the_pipe() {
    let images = Images::new();
    let [state, ..] = states(&images);
    let full = std::fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
    let manifest = images.path("m");
    let mut command = vmstrata();
    command.args(["backup", &state, "-o", "-", "--manifest"]).arg(&manifest);
    let output = command.stdout(Stdio::from(full)).stderr(Stdio::piped()).output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert!(stderr(&output).contains("No space left on device"), "{}", stderr(&output));
    assert!(!manifest.exists());
}

#[test]
fn a_limit_is_kept() {
    let images = Images::new();
    let [_, state, _] = states(&images);
    let begun = Instant::now();
    run_ok(["backup", &state, "-o", &images.name("full.qcow2"), "--limit", "4M"]);
    assert!(begun.elapsed() > Duration::from_millis(900), "5 MiB at 4 MiB a second: {:?}", begun.elapsed());
    assert!(tool("qemu-img", ["check", "-q", &images.name("full.qcow2")]).status.success());
}

/// A snapshot by stock means: the active layer is moved away and a new one put on top of it.
fn move_away(images: &Images, name: &str) {
    std::fs::rename(images.path("web.qcow2"), images.path(name)).unwrap();
    images.create("web.qcow2", &["-b", name, "-F", "qcow2"]);
}

#[test]
fn the_frozen_layers_of_a_served_disk_are_compared_and_backed_up_while_it_is_written() {
    let images = Images::new();
    images.create("web.qcow2", &["16M"]);
    images.write_layer("web.qcow2", &["write -P 1 0 1M"]);
    move_away(&images, "monday.qcow2");
    images.write_layer("web.qcow2", &["write -P 2 64k 64k"]);
    move_away(&images, "tuesday.qcow2");
    let [web, monday, tuesday] =
        ["web", "monday", "tuesday"].map(|name| images.name(&format!("{name}.qcow2")));
    let (disk, nbd) = (format!("path={web},name=web"), format!("unix:{},rw", images.name("nbd.sock")));
    let server = Server::start(&["--disk", &disk, "--nbd", &nbd]);
    let uri = server.uri("web");
    tool_ok("qemu-io", ["-f", "raw", "-c", "write -P 3 8M 64k", &uri]);
    let found = run_json(["diff", "--json", &monday, &tuesday]);
    assert_eq!(found["data-bytes"], 64 << 10);
    let (full, inc) = (images.name("full.qcow2"), images.name("inc.qcow2"));
    run_ok(["backup", &monday, "-o", &full]);
    run_ok(["backup", &tuesday, "--since", &monday, "--previous", &full, "-o", &inc]);
    assert!(run_err(1, ["backup", &web, "-o", &images.name("web.bak")]).contains("take a snapshot"));
    let changed = tool_ok("nbdinfo", ["--map=vmstrata:diff:tuesday.qcow2", &uri]);
    let changed: Vec<Vec<&str>> = changed.lines().map(|line| line.split_whitespace().collect()).collect();
    let starts: Vec<&str> = changed.iter().filter(|line| line[2] == "1").map(|line| line[0]).collect();
    assert_eq!(starts, [(8 << 20).to_string()]);
    assert!(server.stop().success());
    assert_same(&tuesday, &inc);
}

/// The guest of a raw disk can write what looks like a header that names another file.
#[test]
fn a_raw_state_is_not_taken_for_what_its_guest_wrote() {
    let images = Images::new();
    images.create("secret.qcow2", &["1M"]);
    images.write_layer("secret.qcow2", &["write -P 7 0 1M"]);
    let disguised = images.create("disguised", &["-b", "secret.qcow2", "-F", "qcow2"]);
    let (raw, out) = (disguised.to_str().unwrap(), images.name("out.qcow2"));
    run_ok(["backup", raw, "-f", "raw", "-o", &out]);
    tool_ok("qemu-img", ["compare", "-q", "-f", "raw", "-F", "qcow2", raw, &out]);
}

/// A raw disk whose guest wrote a header naming another's layer, its snapshots `mon` and `tue`.
fn disguised(images: &Images) -> String {
    images.create("secret.qcow2", &["1M"]);
    images.write_layer("secret.qcow2", &["write -P 7 0 1M"]);
    let disk = images.name("web.img");
    std::fs::File::create(&disk).unwrap().set_len(1 << 20).unwrap();
    run_ok(["snapshot", "create", &disk, "--name", "mon", "-f", "raw", "--convert-raw"]);
    let forged = images.create("forged", &["-b", "secret.qcow2", "-F", "qcow2"]);
    std::fs::copy(forged, images.path("web.mon.raw")).unwrap();
    images.write_layer("web.img", &["write -P 5 0 512"]);
    run_ok(["snapshot", "create", &disk, "--name", "tue"]);
    disk
}

#[test]
fn what_the_chain_says_is_raw_is_not_taken_for_what_its_guest_wrote() {
    let images = Images::new();
    let disk = disguised(&images);
    let raw = images.name("web.mon.raw");
    let size = std::fs::metadata(&raw).unwrap().len().next_multiple_of(512);
    let [mon, tue] = ["mon", "tue"].map(|name| format!("{disk}@{name}"));
    let [full, inc, other] = ["full", "inc", "other"].map(|name| images.name(name));
    run_ok(["backup", &mon, "-o", &full]);
    tool_ok("qemu-img", ["compare", "-q", "-f", "raw", "-F", "qcow2", &raw, &full]);
    run_ok(["backup", &tue, "--since", &mon, "--previous", &full, "-o", &inc]);
    assert_same(&images.name("web.tue.qcow2"), &inc);
    // The older state is only named by its file; the newer one stands on it, and says what it is.
    run_ok(["backup", &tue, "--since", &raw, "--previous", &full, "-o", &other]);
    assert_same(&inc, &other);
    for old in [&mon, &raw] {
        let found = run_json(["diff", "--json", "--bytes", old, &tue]);
        assert_eq!(found["old-size"], size, "{old}: {found}");
        assert_eq!(found["data-bytes"], 4 << 10, "{old}: {found}");
    }
    let back = run_json(["diff", "--json", &tue, &raw]);
    assert_eq!(back["new-size"], size, "{back}");
}

#[test]
fn a_manifest_that_is_there_stops_a_pipe_before_it_begins() {
    let images = Images::new();
    let [state, ..] = states(&images);
    let manifest = images.name("m");
    std::fs::write(&manifest, "mine").unwrap();
    let message = run_err(1, ["backup", &state, "-o", "-", "--manifest", &manifest]);
    assert!(message.contains("--force"), "{message}");
    assert_eq!(std::fs::read(&manifest).unwrap(), b"mine");
}

#[test]
fn a_manifest_that_cannot_be_made_stops_a_pipe_before_it_begins() {
    let images = Images::new();
    let [state, ..] = states(&images);
    let manifest = images.name("missing/m");
    let output = run(["backup", &state, "-o", "-", "--manifest", &manifest]);
    assert_eq!((output.status.code(), output.stdout.len()), (Some(1), 0));
    assert!(stderr(&output).contains("missing/m"), "{}", stderr(&output));
}

#[test]
fn snapshots_are_compared_and_backed_up_by_name() {
    let images = Images::new();
    let disk = images.create("web.qcow2", &["16M"]).to_str().unwrap().to_owned();
    for (name, write) in [("mon", "write -P 1 0 1M"), ("tue", "write -P 2 64k 64k")] {
        images.write_layer("web.qcow2", &[write]);
        run_ok(["snapshot", "create", &disk, "--name", name]);
    }
    let [mon, tue] = ["mon", "tue"].map(|name| format!("{disk}@{name}"));
    let found = run_json(["diff", "--json", &mon, &tue]);
    assert_eq!((&found["data-bytes"], &found["zero-bytes"]), (&(64 << 10).into(), &0.into()));
    let (full, inc) = (images.name("full.qcow2"), images.name("inc.qcow2"));
    run_ok(["backup", &mon, "-o", &full]);
    run_ok(["backup", &tue, "--since", &mon, "--previous", &full, "-o", &inc]);
    assert_same(&images.name("web.tue.qcow2"), &inc);
    let manifest: Value =
        serde_json::from_slice(&std::fs::read(format!("{inc}.manifest.json")).unwrap()).unwrap();
    assert_eq!(manifest["state"]["snapshot"], "tue");
    assert!(manifest["state"]["taken_at"].as_u64().unwrap() > 1_700_000_000);
    let restored = images.name("restored.qcow2");
    assert!(run_ok(["restore", &full, &inc, "-o", &restored]).contains("restored tue from 2 backups"));
    assert!(run_err(1, ["backup", &format!("{disk}@wed"), "-o", &images.name("x")]).contains("wed"));
}

#[test]
fn a_running_disk_is_backed_up_by_its_snapshots() {
    let images = Images::new();
    let web = images.create("web.qcow2", &["16M"]).to_str().unwrap().to_owned();
    let (disk, nbd) = (format!("path={web},name=web"), format!("unix:{},rw", images.name("nbd.sock")));
    let server = Server::start(&["--disk", &disk, "--nbd", &nbd]);
    let uri = server.uri("web");
    for (name, write) in
        [("mon", "write -P 1 0 1M"), ("tue", "write -P 2 64k 64k"), ("", "write -P 3 8M 64k")]
    {
        tool_ok("qemu-io", ["-f", "raw", "-c", write, &uri]);
        if !name.is_empty() {
            server.ask_ok(["snapshot", "create", &web, "--name", name]);
        }
    }
    let changed = tool_ok("nbdinfo", ["--map=vmstrata:diff:mon", &uri]);
    let kinds = changed.lines().map(|line| line.split_whitespace().nth(2).unwrap());
    assert_eq!(kinds.collect::<Vec<_>>(), ["0", "1", "0", "1", "0"], "{changed}");
    let (full, inc, restored) = (images.name("full"), images.name("inc"), images.name("restored"));
    let [mon, tue] = ["mon", "tue"].map(|name| format!("{web}@{name}"));
    run_ok(["backup", &mon, "-o", &full]);
    run_ok(["backup", &tue, "--since", &mon, "--previous", &full, "-o", &inc]);
    run_ok(["restore", &full, &inc, "-o", &restored]);
    assert!(server.stop().success());
    assert_same(&images.name("web.tue.qcow2"), &restored);
}

/// One command each: the snapshot is taken, of a disk that is served or is not, and stays for the next.
#[test]
fn a_disk_is_backed_up_in_one_step() {
    let images = Images::new();
    let web = images.create("web.qcow2", &["16M"]).to_str().unwrap().to_owned();
    let (disk, nbd) = (format!("path={web},name=web"), format!("unix:{},rw", images.name("nbd.sock")));
    let server = Server::start(&["--disk", &disk, "--nbd", &nbd]);
    let (uri, [full, inc, last]) = (server.uri("web"), ["full", "inc", "last"].map(|name| images.name(name)));
    tool_ok("qemu-io", ["-f", "raw", "-c", "write -P 1 0 1M", &uri]);
    let made: Value =
        serde_json::from_str(&server.ask_ok(["backup", &web, "--snapshot", "mon", "-o", &full, "--json"]))
            .unwrap();
    assert_eq!((&made["snapshot"], &made["incremental"]), (&"mon".into(), &false.into()));
    tool_ok("qemu-io", ["-f", "raw", "-c", "write -P 2 64k 64k", &uri]);
    let mon = format!("{web}@mon");
    let since = ["--since", &mon, "--previous", &full];
    server.ask_ok([&["backup", &web, "--snapshot", "tue", "-o", &inc][..], &since].concat());
    // A name that is taken: nothing is made.
    let refused = server.ask_err(["backup", &web, "--snapshot", "mon", "-o", &last]);
    assert!(refused.contains("mon") && !Path::new(&last).exists(), "{refused}");
    let refused = server.ask_err(["backup", &mon, "--snapshot", "-o", &last]);
    assert!(refused.contains("name the disk"), "{refused}");
    // What is known before the snapshot is told before.
    let later = format!("{web}@tue");
    for (args, part) in [
        (&["-o", &last, "--previous", &last, "--since", &mon][..], "last"),
        (&["-o", &last, "--previous", &full, "--since", &later], "tue"),
        (&["-o", &images.name("none/last")], "none/last"),
        (&["-o", &web, "--force"], "a file of the disk"),
        (&["-o", &images.name("web.mon.qcow2"), "--force"], "a file of the disk"),
    ] {
        let refused = server.ask_err([&["backup", &web, "--snapshot", "wed"], args].concat());
        assert!(refused.contains(part) && !refused.contains("was taken"), "{refused}");
    }
    // The snapshot is there although its backup cannot be made, and is told.
    let refused = vmstrata()
        .args(["backup", &web, "--snapshot", "wed", "-o", "-", "--manifest", &images.name("m")])
        .env("VMSTRATA_CONTROL", server.control())
        .stdout(std::fs::File::options().write(true).open("/dev/full").unwrap())
        .output()
        .unwrap();
    let refused = stderr(&refused);
    assert!(refused.contains("@wed was taken, and stays"), "{refused}");
    assert!(server.stop().success());
    let named = run_json(["backup", &web, "--snapshot", "--quiet", "--json", "-o", &last]);
    assert!(named["snapshot"].as_str().unwrap().ends_with('Z'), "the time: {named}");
    let names = run_json(["snapshot", "list", &web, "--json"])["snapshots"].clone();
    assert_eq!(names.as_array().unwrap().len(), 4);
    // Offline nobody but the chain itself knows whose file it is.
    for own in [&web, &images.name("web.mon.qcow2")] {
        let refused = run_err(1, ["backup", &web, "--snapshot", "-o", own, "--force"]);
        assert!(refused.contains("a file of the disk"), "{refused}");
    }
    let restored = images.name("restored.qcow2");
    run_ok(["restore", &full, &inc, "-o", &restored]);
    assert_same(&images.name("web.tue.qcow2"), &restored);
}

#[test]
fn a_disk_is_restored_as_its_bytes_to_a_file_and_to_a_device() {
    let images = Images::new();
    let states = states(&images);
    let [full, inc, last] = ["full", "inc", "last"].map(|name| images.name(name));
    run_ok(["backup", &states[0], "-o", &full]);
    run_ok(["backup", &states[1], "--since", &states[0], "--previous", &full, "-o", &inc]);
    run_ok(["backup", &states[2], "--since", &states[1], "--previous", &inc, "-o", &last]);
    let raw = images.name("disk.raw");
    run_ok(["restore", &full, &inc, &last, "--format", "raw", "-o", &raw]);
    tool_ok("qemu-img", ["compare", "-q", "-F", "raw", &states[2], &raw]);
    let found = std::fs::metadata(&raw).unwrap();
    let allocated = std::os::unix::fs::MetadataExt::blocks(&found) * 512;
    assert!(found.len() == 40 << 20 && allocated < 8 << 20, "zeros are holes: {allocated}");
    assert!(run_err(1, ["restore", &full, "--format", "raw", "-o", &raw]).contains("exists already"));
    let refused = run_err(1, ["restore", &full, "-f", "raw", "--compress", "zstd", "-o", &images.name("x")]);
    assert!(refused.contains("not compressed"), "{refused}");

    // What was on the device goes, up to the disk's end and no further.
    let (len, tail) = (48u64 << 20, 8u64 << 20);
    let file = images.path("device");
    std::fs::write(&file, vec![0xee; len as usize]).unwrap();
    let Some(device) = LoopDevice::over(&file) else {
        eprintln!("not tested: devices need root and loop devices");
        return;
    };
    let to = |args: &[&'static str]| [&["restore", &*full, &*inc, &*last, "-o", &*device.0], args].concat();
    assert!(run_err(1, to(&["--format", "raw"])).contains("--force"));
    assert!(run_err(1, to(&["--force"])).contains("raw"));
    // One that somebody uses is not touched.
    let used = std::fs::read(&file).unwrap();
    let held = {
        use std::os::unix::fs::OpenOptionsExt as _;
        let exclusive = rustix::fs::OFlags::EXCL.bits() as i32;
        std::fs::File::options().read(true).custom_flags(exclusive).open(&device.0).unwrap()
    };
    assert!(run_err(1, to(&["--format", "raw", "--force"])).contains("nothing else may use"));
    drop(held);
    // Nor one whose backups are damaged, or that is too small.
    let sound = std::fs::read(&inc).unwrap();
    let mut damaged = sound.clone();
    *damaged.last_mut().unwrap() ^= 1;
    std::fs::write(&inc, damaged).unwrap();
    assert!(run_err(1, to(&["--format", "raw", "--force"])).contains("damaged"));
    std::fs::write(&inc, sound).unwrap();
    assert!(std::fs::read(&file).unwrap() == used, "nothing was written");
    run_ok(to(&["--format", "raw", "--force"]));
    let written = std::fs::read(&file).unwrap();
    assert!(written[..40 << 20] == std::fs::read(&raw).unwrap(), "the disk");
    assert!(written[40 << 20..] == vec![0xee; tail as usize], "past its end");
    drop(device);
    std::fs::File::options().write(true).open(&file).unwrap().set_len(39 << 20).unwrap();
    let small = LoopDevice::over(&file).unwrap();
    let refused = run_err(1, ["restore", &full, &inc, &last, "-f", "raw", "--force", "-o", &small.0]);
    assert!(refused.contains("the device has 40894464 bytes, and the disk 41943040"), "{refused}");
}
