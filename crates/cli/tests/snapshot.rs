//! `vmstrata snapshot` as a person and a script use it, with stock tools to judge what it leaves.

use std::fs;
use std::path::Path;

use crate::support::server::Server;
use crate::support::{
    Holder, Images, assert_clean, run, run_err, run_json, run_ok, stderr, tool, tool_json, tool_ok,
};
use serde_json::{Value, json};

fn write(images: &Images, name: &str, pattern: u8, at: &str) {
    let said = tool_ok("qemu-io", ["-c", &format!("write -P {pattern} {at}"), &images.name(name)]);
    assert!(!said.contains("failed"), "{said}");
}

fn reads(images: &Images, name: &str, pattern: u8, at: &str) {
    let said = tool_ok("qemu-io", ["-r", "-c", &format!("read -P {pattern} {at}"), &images.name(name)]);
    assert!(!said.contains("failed"), "{name}: {said}");
}

fn chain_len(path: &str) -> usize {
    tool_json("qemu-img", ["info", "--backing-chain", "--output=json", path]).as_array().unwrap().len()
}

fn create(disk: &str, name: &str) -> String {
    run_ok(["snapshot", "create", disk, "--name", name])
}

/// `web.qcow2` with snapshots mon (1) and tue (2), and 3 written since.
fn with_history(images: &Images) -> String {
    images.create("web.qcow2", &["4M"]);
    let disk = images.name("web.qcow2");
    write(images, "web.qcow2", 1, "0 1M");
    let labels = ["--label", "job=nightly", "-l", "by=cron"];
    run_ok([&["snapshot", "create", &disk, "--name", "mon"], &labels[..]].concat());
    write(images, "web.qcow2", 2, "0 1M");
    create(&disk, "tue");
    write(images, "web.qcow2", 3, "0 1M");
    disk
}

#[test]
fn a_history_is_taken_listed_and_shown() {
    let images = Images::new();
    let disk = with_history(&images);
    assert_eq!(chain_len(&disk), 3);
    let listed = run_json(["snapshot", "list", &disk, "--json"]);
    let rows = listed["snapshots"].as_array().unwrap();
    assert_eq!((&rows[0]["name"], &rows[1]["name"]), (&json!("tue"), &json!("mon")));
    assert_eq!(rows[1]["labels"], json!({"job": "nightly", "by": "cron"}));
    assert_eq!(rows[1]["layer"], images.name("web.mon.qcow2"));
    assert_eq!((&rows[1]["depth"], &rows[1]["virtual-size"]), (&json!(2), &json!(4 << 20)));
    let time = rows[1]["time"].as_str().unwrap();
    assert!(time.starts_with("20") && time.ends_with('Z') && time.len() == 20, "{time}");
    assert!(rows[0]["time-ns"].as_u64() > rows[1]["time-ns"].as_u64());
    let text = run_ok(["snapshot", "list", &disk]);
    let lines: Vec<&str> = text.lines().collect();
    assert!(
        lines[0].starts_with("NAME") && lines[1].starts_with("tue ") && lines[2].starts_with("mon "),
        "{text}"
    );
    assert!(lines[2].ends_with("web.mon.qcow2  by=cron job=nightly"), "{text}");
    assert_eq!(run_json(["snapshot", "show", &disk, "mon", "--json"]), rows[1]);
    let shown = run_ok(["snapshot", "show", &disk, "mon"]);
    assert!(
        shown.contains("label         job=nightly\n") && shown.contains("web.mon.qcow2 (qcow2)\n"),
        "{shown}"
    );
    assert!(run_err(1, ["snapshot", "show", &disk, "wed"]).contains("it has tue, mon"));
    for (name, pattern) in [("web.mon.qcow2", 1), ("web.tue.qcow2", 2), ("web.qcow2", 3)] {
        reads(&images, name, pattern, "0 1M");
        assert_clean(&images.path(name));
    }
}

#[test]
fn without_a_name_a_snapshot_is_named_by_its_time() {
    let images = Images::new();
    images.create("web.qcow2", &["4M"]);
    let disk = images.name("web.qcow2");
    let taken = run_json(["snapshot", "create", &disk, "--json"]);
    let name = taken["name"].as_str().unwrap();
    assert!(name.len() == 20 && name.ends_with('Z') && &name[8..9] == "T", "{name}");
    assert_eq!(
        taken["snapshots"],
        json!([{"disk": disk, "layer": images.name(&format!("web.{name}.qcow2"))}])
    );
    assert!(taken["group"].is_null());
}

#[test]
fn disks_of_one_guest_are_taken_together_or_not_at_all() {
    let images = Images::new();
    for name in ["root.qcow2", "data.qcow2"] {
        images.create(name, &["4M"]);
    }
    let [root, data] = ["root.qcow2", "data.qcow2"].map(|name| images.name(name));
    let taken = run_json(["snapshot", "create", &root, &data, "--name", "v1", "--group", "guest7", "--json"]);
    assert_eq!(taken["group"], "guest7");
    let of = |disk: &str| run_json(["snapshot", "list", disk, "--json"])["snapshots"][0].clone();
    let (first, second) = (of(&root), of(&data));
    assert_eq!(first["group"], "guest7");
    assert_eq!(first["group"], second["group"]);
    // That tells apart the disks' states where they are backed up.
    let time_ns = |taken: &Value| taken["time-ns"].as_u64().expect("a time");
    assert_eq!(time_ns(&first) + 1, time_ns(&second));
    let holder = Holder::open(Path::new(&data), false);
    let error = run_err(1, ["snapshot", "create", &root, &data, "--name", "v2"]);
    assert!(error.contains("data.qcow2: it is in use by pid ") && error.contains("(qemu-io)"), "{error}");
    assert_eq!(chain_len(&root), 2);
    holder.close();
    let link = images.name("link.qcow2");
    std::fs::hard_link(&root, &link).unwrap();
    for again in [&root, &link] {
        let error = run_err(1, ["snapshot", "create", &root, again, "--name", "v2"]);
        assert!(error.contains(&format!("{again}: it is given twice")), "{error}");
    }
    std::fs::remove_file(&link).unwrap();
    run_ok(["snapshot", "create", &root, &data, "--name", "v2"]);
    assert!(of(&root)["group"].is_string(), "several disks are a group");
}

#[test]
fn a_disk_that_is_served_is_refused_with_what_to_do() {
    let images = Images::new();
    images.create("web.qcow2", &["4M"]);
    let disk = images.name("web.qcow2");
    let socket = images.name("nbd.sock");
    let server = Server::start(&["--disk", &format!("path={disk}"), "--nbd", &format!("unix:{socket},rw")]);
    let error = run_err(1, ["snapshot", "create", &disk]);
    assert!(
        error.contains("in use by pid ") && error.contains("(vmstrata)") && error.contains("ask it"),
        "{error}"
    );
    assert_eq!(run_json(["snapshot", "list", &disk, "--json"])["snapshots"], json!([]));
    drop(server);
}

#[test]
fn names_and_labels_that_cannot_be_are_told_and_leave_nothing() {
    let images = Images::new();
    images.create("web.qcow2", &["4M"]);
    let disk = images.name("web.qcow2");
    for (args, part) in [
        (&["--name", "a/b"][..], "\"a/b\" is no snapshot name"),
        (&["--name", ".."], "is no snapshot name"),
        (&["--name", "ünï"], "is no snapshot name"),
        (&["--label", "a b=c"], "\"a b\" is no label"),
        (&["--label", "a=1", "--label", "a=2"], "given twice"),
        (&["--group", "x y"], "is no group id"),
    ] {
        let error = run_err(1, [&["snapshot", "create", &disk], args].concat());
        assert!(error.contains(part), "{error}");
    }
    run_err(64, ["snapshot", "create", &disk, "--label", "nightly"]);
    assert_eq!(fs::read_dir(images.path("")).unwrap().count(), 1);
}

#[test]
fn going_back_says_what_it_costs_first() {
    let images = Images::new();
    let disk = with_history(&images);
    let error = run_err(1, ["snapshot", "revert", &disk, "mon"]);
    for part in ["loses what was written since tue", "1 newer snapshot", "--yes", "--keep"] {
        assert!(error.contains(part), "{error}");
    }
    reads(&images, "web.qcow2", 3, "0 1M");
    let report =
        run_json(["snapshot", "revert", &disk, "mon", "--keep", &images.name("old.qcow2"), "--json"]);
    assert_eq!(report["dropped-layers"], json!([images.name("web.tue.qcow2")]));
    reads(&images, "web.qcow2", 1, "0 1M");
    reads(&images, "old.qcow2", 3, "0 1M");
    write(&images, "web.qcow2", 4, "0 64k");
    let said = run_ok(["snapshot", "revert", &disk, "mon", "--yes"]);
    assert!(said.contains("is as at mon again"), "{said}");
    reads(&images, "web.qcow2", 1, "0 1M");
    for name in ["web.qcow2", "old.qcow2", "web.mon.qcow2", "web.tue.qcow2"] {
        assert_clean(&images.path(name));
    }
}

#[test]
fn a_clone_starts_as_the_snapshot_and_goes_its_own_way() {
    let images = Images::new();
    let disk = with_history(&images);
    let clone = images.name("clone.qcow2");
    run_ok(["snapshot", "clone", &disk, "mon", "-o", &clone]);
    reads(&images, "clone.qcow2", 1, "0 1M");
    write(&images, "clone.qcow2", 9, "0 1M");
    reads(&images, "web.mon.qcow2", 1, "0 1M");
    assert_clean(&images.path("clone.qcow2"));
    let row = run_json(["snapshot", "show", &clone, "mon", "--json"]);
    assert_eq!(row["cloned-from"], "web.qcow2");
    assert!(run_err(1, ["snapshot", "clone", &disk, "mon", "-o", &clone]).contains("exists already"));
    reads(&images, "clone.qcow2", 9, "0 1M");
}

#[test]
fn a_state_can_be_named_wherever_an_image_is() {
    let images = Images::new();
    let disk = with_history(&images);
    let at = format!("{disk}@mon");
    let layer = images.name("web.mon.qcow2");
    assert_eq!(run_json(["info", &at, "--json"])["filename"], layer);
    assert_eq!(run_json(["map", &at, "--json"]), run_json(["map", &layer, "--json"]));
    assert_eq!(run_json(["check", &at, "--json"])["corruptions"], 0);
    let diff = run_json(["diff", &at, &format!("{disk}@tue"), "--json"]);
    assert!(diff.to_string().contains("1048576"), "{diff}");
    let backup = images.name("backup.qcow2");
    run_ok(["backup", &at, "-o", &backup]);
    reads(&images, "backup.qcow2", 1, "0 1M");
    assert!(run_err(1, ["info", &format!("{disk}@wed")]).contains("it has tue, mon"));
}

#[test]
fn layers_of_other_tools_are_listed_without_a_name() {
    let images = Images::new();
    images.create("base.qcow2", &["4M"]);
    images.create("web.qcow2", &["-b", "base.qcow2", "-F", "qcow2"]);
    let disk = images.name("web.qcow2");
    create(&disk, "mon");
    let listed = run_json(["snapshot", "list", &disk, "--json"]);
    assert_eq!(listed["snapshots"][0]["name"], "mon");
    assert_eq!(listed["snapshots"][1]["name"], Value::Null);
    assert_eq!(listed["snapshots"][1]["layer"], images.name("base.qcow2"));
    let text = run_ok(["snapshot", "list", &disk]);
    assert!(text.lines().nth(2).unwrap().starts_with("-     -   "), "{text}");
    assert!(run_ok(["snapshot", "list", &images.name("base.qcow2")]).contains("no snapshots"));
}

#[test]
fn a_directory_that_may_not_be_written_is_no_place_for_a_snapshot() {
    if !rustix::process::geteuid().is_root() {
        return;
    }
    // Root may write anywhere, so another user tries; the command must be readable for it.
    let images = Images::new();
    let disk = images.create("web.qcow2", &["4M"]);
    std::os::unix::fs::chown(&disk, Some(65534), Some(65534)).unwrap();
    fs::set_permissions(images.path(""), std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    let program = images.path("vmstrata");
    fs::copy(env!("CARGO_BIN_EXE_vmstrata"), &program).unwrap();
    let disk = images.name("web.qcow2");
    let user = ["--reuid=65534", "--regid=65534", "--clear-groups", "--"];
    let command = [program.to_str().unwrap(), "snapshot", "create", &disk];
    let output = tool("setpriv", user.iter().chain(&command));
    let said = stderr(&output);
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(said.contains("Permission denied") && said.contains("web.qcow2"), "{said}");
    assert_eq!(fs::read_dir(images.path("")).unwrap().count(), 2);
    let read_only = run(["snapshot", "list", &disk]);
    assert!(read_only.status.success());
}

#[test]
fn every_snapshot_extends_the_index_of_the_chain() {
    let images = Images::new();
    let disk = images.name("web.qcow2");
    run_ok(["create", &disk, "4M"]);
    for (pattern, name) in [(1, "mon"), (2, "tue"), (3, "wed")] {
        write(&images, "web.qcow2", pattern, "0 64k");
        create(&disk, name);
    }
    let verified = run_json(["index", "verify", &disk, "--json"]);
    let layers = verified["layers"].as_array().unwrap();
    assert_eq!(layers.len(), 3);
    assert!(layers.iter().all(|layer| layer["verdict"] == "good"), "{verified}");
    for name in ["web.qcow2", "web.wed.qcow2", "web.tue.qcow2", "web.mon.qcow2"] {
        assert_clean(&images.path(name));
    }
    reads(&images, "web.qcow2", 3, "0 64k");
    // A chain that has none gets all of it.
    run_ok(["index", "drop", &disk]);
    create(&disk, "thu");
    let verified = run_json(["index", "verify", &disk, "--json"]);
    let layers = verified["layers"].as_array().unwrap();
    assert!(layers.len() == 4 && layers.iter().all(|layer| layer["verdict"] == "good"), "{verified}");
}

#[test]
fn every_command_has_help_with_examples_and_is_completed() {
    for command in ["create", "list", "show", "revert", "clone"] {
        let help = run_ok(["snapshot", command, "--help"]);
        assert!(help.contains(&format!("  vmstrata snapshot {command} ")), "{help}");
        assert!(help.contains("Exit codes:"), "{help}");
    }
    let script = run_ok(["completions", "bash"]);
    assert!(
        script.contains("vmstrata__snapshot__revert") || script.contains("snapshot,revert"),
        "completions"
    );
}

/// What stock tools read through an NBD export.
fn asks(uri: &str, commands: &[&str]) -> String {
    let read_only = (!commands.iter().any(|command| command.starts_with("write"))).then_some("-r");
    let commands = commands.iter().flat_map(|command| ["-c", command]);
    let said = tool("qemu-io", ["-f", "raw"].into_iter().chain(read_only).chain(commands).chain([uri]));
    String::from_utf8_lossy(&said.stdout).into_owned() + &stderr(&said)
}

#[test]
fn a_snapshot_is_served_as_it_was_and_written_only_as_a_clone() {
    let images = Images::new();
    let disk = with_history(&images);
    let (clone, export) = (images.name("ci.qcow2"), format!("unix:{},rw", images.name("nbd.sock")));
    let specs = [
        format!("path={disk}"),
        format!("path={disk},at=mon"),
        format!("path={disk},at=tue,clone={clone},name=ci"),
    ];
    let args = ["--disk", &specs[0], "--disk", &specs[1], "--disk", &specs[2], "--nbd", &export];
    let server = Server::start(&args);
    let said = asks(&server.uri("web@mon"), &["read -P 1 0 1M"]);
    assert!(said.contains("read 1048576") && !said.contains("failed"), "{said}");
    let refused = asks(&server.uri("web@mon"), &["write -P 9 0 64k"]);
    assert!(refused.contains("read-only") || refused.contains("Permission denied"), "{refused}");
    let said = asks(&server.uri("ci"), &["read -P 2 0 1M", "write -P 5 0 64k", "flush", "read -P 5 0 64k"]);
    assert!(!said.contains("failed"), "{said}");
    server.stop();
    // Started again, the server goes on with the clone that is there.
    let server = Server::start(&args);
    let said = asks(&server.uri("ci"), &["read -P 5 0 64k", "read -P 2 64k 64k"]);
    assert!(!said.contains("failed"), "{said}");
    server.stop();
    reads(&images, "web.qcow2", 3, "0 1M");
    for name in ["ci.qcow2", "web.qcow2", "web.tue.qcow2", "web.mon.qcow2"] {
        assert_clean(&images.path(name));
    }
    for (spec, part) in [
        (format!("path={disk}@mon"), "is a snapshot, which does not change"),
        (format!("path={disk},at=wed"), "it has tue, mon"),
        (format!("path={disk},at=mon,clone={clone}"), "is no clone of"),
    ] {
        let error = run_err(1, ["serve", "--no-control", "--disk", &spec, "--nbd", &export]);
        assert!(error.contains(part), "{error}");
    }
}

/// `--at` says of the only disk what the key says of one of many.
#[test]
fn the_only_disk_is_served_at_a_snapshot_by_a_flag() {
    let images = Images::new();
    let disk = with_history(&images);
    let (clone, export) = (images.name("ci.qcow2"), format!("unix:{},rw", images.name("nbd.sock")));
    let spec = format!("path={disk}");
    let server = Server::start(&["--disk", &spec, "--at", "mon", "--nbd", &export]);
    let said = asks(&server.uri("web@mon"), &["read -P 1 0 1M"]);
    assert!(said.contains("read 1048576") && !said.contains("failed"), "{said}");
    server.stop();
    let server = Server::start(&["--disk", &spec, "--at", "tue", "--clone", &clone, "--nbd", &export]);
    let said = asks(&server.uri("ci"), &["read -P 2 0 1M", "write -P 5 0 64k", "flush"]);
    assert!(!said.contains("failed"), "{said}");
    server.stop();
    reads(&images, "web.qcow2", 3, "0 1M");

    let config = images.path("vmstrata.toml");
    std::fs::write(
        &config,
        format!(
            "nbd = [{{ address = \"unix:{}\", rw = true }}]\n[[disk]]\npath = \"{disk}\"\n",
            images.name("nbd.sock")
        ),
    )
    .unwrap();
    let at_key = format!("path={disk},at=mon");
    let wrong: [(&[&str], &str); 5] = [
        (&["--disk", &spec, "--disk", "path=b", "--at", "mon"], "there are 2"),
        (&["--config", config.to_str().unwrap(), "--at", "mon"], "say at = of a [[disk]]"),
        (&["--disk", &at_key, "--at", "mon"], "one or the other"),
        (&["--disk", &spec, "--at", "a/b"], "is no snapshot's name"),
        (&["--disk", &spec, "--clone", &clone], "--at"),
    ];
    for (args, part) in wrong {
        let error = run_err(64, ["serve", "--nbd", &export].iter().chain(args));
        assert!(error.contains(part), "{args:?}: {error}");
    }
    assert!(run_ok(["serve", "--help"]).contains("--at <SNAPSHOT>"), "help");
}
