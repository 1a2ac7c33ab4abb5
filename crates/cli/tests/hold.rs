//! `vmstrata snapshot hold` and `release`: what is held is dropped by no command and no rule.

use crate::support::server::Server;
use crate::support::{Images, assert_clean, run, run_err, run_json, run_ok, stderr, tool_ok, wait_until};
use serde_json::{Value, json};

fn write(target: &str, pattern: usize) {
    let said = tool_ok("qemu-io", ["-c", &format!("write -P {pattern} 0 64k"), target]);
    assert!(!said.contains("failed"), "{said}");
}

/// `web.qcow2` with snapshots s1 to s4; the first byte of each is its number.
fn with_history(images: &Images) -> String {
    images.create("web.qcow2", &["4M"]);
    let disk = images.name("web.qcow2");
    for number in 1..=4 {
        write(&disk, number);
        run_ok(["snapshot", "create", &disk, "--name", &format!("s{number}")]);
    }
    disk
}

fn names(disk: &str) -> Vec<String> {
    let listed = run_json(["snapshot", "list", disk, "--json"]);
    let rows = listed["snapshots"].as_array().unwrap().iter();
    rows.map(|row| row["name"].as_str().unwrap().to_owned()).collect()
}

fn holds(disk: &str) -> Vec<(String, Value)> {
    let listed = run_json(["snapshot", "list", disk, "--json"]);
    let rows = listed["snapshots"].as_array().unwrap().iter();
    let rows = rows.map(|row| (row["name"].as_str().unwrap().to_owned(), row["holds"].clone()));
    rows.filter(|(_, holds)| *holds != json!([])).collect()
}

#[test]
fn a_held_snapshot_is_dropped_by_no_command() {
    let images = Images::new();
    let disk = with_history(&images);
    let layer = std::fs::read(images.path("web.s2.qcow2")).unwrap();
    run_ok(["snapshot", "hold", &disk, "s2", "--tag", "audit"]);
    assert!(run_ok(["snapshot", "hold", &disk, "s2", "--tag", "audit"]).contains("held already (audit)"));
    let said = run_json(["snapshot", "hold", &disk, "s2", "--json"]);
    assert_eq!((&said["tag"], &said["held"]), (&json!("manual"), &json!(true)));
    assert_eq!(holds(&disk), [("s2".to_owned(), json!(["audit", "manual"]))]);
    assert!(run_ok(["snapshot", "list", &disk]).contains("(held: audit, manual)"));
    assert!(run_ok(["snapshot", "show", &disk, "s2"]).contains("held          audit\n"));
    assert!(std::fs::read(images.path("web.s2.qcow2")).unwrap() == layer, "the frozen file is not written");

    let release = format!("vmstrata snapshot release {disk} s2 --tag audit");
    for command in [
        &["snapshot", "delete", &disk, "s2"][..],
        &["snapshot", "delete", &disk, "s1..s3"],
        &["snapshot", "delete", &disk, "s2", "--keep-files"],
        &["snapshot", "delete", &disk, "s2", "--dry-run"],
        &["merge", &disk, "--layers", "1..2", "--yes"],
        &["flatten", &disk, "--yes"],
        &["snapshot", "revert", &disk, "s1", "--yes"],
        &["snapshot", "revert", &disk, "s1", "--keep", &images.name("kept.qcow2")],
    ] {
        let refused = run_err(1, command.iter().copied());
        assert!(refused.contains("snapshot s2 is held (audit, manual)"), "{command:?}: {refused}");
        assert!(refused.contains(&release), "{command:?}: {refused}");
    }
    let plan = run_json(["snapshot", "prune", &disk, "--keep", "last=1", "--dry-run", "--json"]);
    assert_eq!((&plan["delete"], &plan["held"]), (&json!(["s3", "s1"]), &json!(["s2"])));
    run_ok(["snapshot", "prune", &disk, "--keep", "last=1"]);
    assert_eq!(names(&disk), ["s4", "s2"]);
    // What is older may go into it, and it reads as it did.
    tool_ok("qemu-io", ["-r", "-c", "read -P 2 0 64k", &images.name("web.s2.qcow2")]);
    assert_clean(&images.path("web.s2.qcow2"));
    run_ok(["snapshot", "revert", &disk, "s2", "--yes"]);

    assert!(run_err(1, ["snapshot", "release", &disk, "s2", "--tag", "other"]).contains("audit, manual"));
    run_ok(["snapshot", "release", &disk, "s2"]);
    assert!(run_err(1, ["snapshot", "delete", &disk, "s2"]).contains("is held (audit)"));
    run_ok(["snapshot", "release", &disk, "s2", "--tag", "audit"]);
    run_ok(["snapshot", "delete", &disk, "s2"]);
    assert!(images.files().iter().all(|name| !name.ends_with(".clones")), "{:?}", images.files());
    assert!(run_err(1, ["snapshot", "hold", &disk, "s2"]).contains("no snapshot \"s2\""));
    assert!(run_err(1, ["snapshot", "hold", &disk, "s4", "--tag", "a/b"]).contains("no tag of a hold"));
}

#[test]
fn a_clone_lets_go_of_what_its_origin_holds() {
    let images = Images::new();
    let disk = with_history(&images);
    let clone = images.name("clone.qcow2");
    run_ok(["snapshot", "clone", &disk, "s2", "-o", &clone]);
    run_ok(["snapshot", "hold", &disk, "s2"]);
    run_ok(["flatten", &clone]);
    assert_eq!(holds(&disk), [("s2".to_owned(), json!(["manual"]))]);
    tool_ok("qemu-io", ["-r", "-c", "read -P 2 0 64k", &clone]);
}

#[test]
fn a_served_disk_and_its_rules_leave_what_is_held() {
    let images = Images::new();
    let disk = with_history(&images);
    run_ok(["snapshot", "hold", &disk, "s1"]);
    let served = format!("path={disk},name=web,keep=last=1");
    let server = Server::start(&["--disk", &served, "--nbd", &format!("unix:{}", images.name("nbd.sock"))]);
    wait_until("the rule's job", || {
        let listed: Value = serde_json::from_str(&server.ask_ok(["job", "list", "--json"])).unwrap();
        let mut jobs = listed["jobs"].as_array().unwrap().iter();
        jobs.any(|job| job["kind"] == "snapshot_delete" && job["state"] == "done")
    });
    assert_eq!(names(&disk), ["s4", "s1"]);
    server.ask_ok(["snapshot", "hold", &disk, "s4", "--tag", "live"]);
    for (command, held) in [
        (&["snapshot", "delete", &disk, "s4"][..], "s4"),
        (&["flatten", &disk, "--yes"], "s4"),
        (&["merge", &disk, "--layers", "0", "--yes"], "s1"),
        (&["snapshot", "revert", &disk, "s1", "--yes"], "s4"),
    ] {
        let refused = server.ask_err(command.iter().copied());
        assert!(refused.contains(&format!("snapshot {held} is held")), "{command:?}: {refused}");
    }
    assert_eq!(names(&disk), ["s4", "s1"]);
    server.ask_ok(["snapshot", "release", &disk, "s1"]);
    server.ask_ok(["snapshot", "delete", &disk, "s1"]);
    assert_eq!(holds(&disk), [("s4".to_owned(), json!(["live"]))]);
    assert!(server.stop().success());
}

#[test]
fn a_backup_holds_its_snapshot_until_the_next_incremental_one() {
    let images = Images::new();
    let disk = with_history(&images);
    let of = |name: &str| format!("{disk}@{name}");
    let [full, inc, once] = ["full.qcow2", "inc.qcow2", "once.qcow2"].map(|name| images.name(name));
    run_ok(["backup", &of("s1"), "-o", &full]);
    assert_eq!(holds(&disk), [("s1".to_owned(), json!(["backup"]))]);
    // A rule that would take it leaves it, so that the next one can be made.
    run_ok(["snapshot", "prune", &disk, "--keep", "last=2"]);
    assert_eq!(names(&disk), ["s4", "s3", "s1"]);
    run_ok(["backup", &of("s3"), "--no-hold", "-o", &once]);
    assert_eq!(holds(&disk), [("s1".to_owned(), json!(["backup"]))]);
    // A failed one holds what it needs the next time, and no more.
    let command = ["backup", &of("s4"), "--since", &of("s1"), "--previous", &full];
    let failed = run(command.iter().copied().chain(["-o", &images.name("no/such/dir.qcow2")]));
    assert!(!failed.status.success(), "{}", stderr(&failed));
    assert_eq!(holds(&disk), [("s1".to_owned(), json!(["backup"]))]);
    run_ok(command.iter().copied().chain(["-o", &inc]));
    assert_eq!(holds(&disk), [("s4".to_owned(), json!(["backup"]))]);
    run_ok(["snapshot", "delete", &disk, "s1"]);
    // The same with the snapshot taken on the way, of another series.
    let taken = images.name("taken.qcow2");
    run_ok(["backup", &disk, "--snapshot", "s5", "--hold-tag", "weekly", "-o", &taken]);
    let expected = [("s5".to_owned(), json!(["weekly"])), ("s4".to_owned(), json!(["backup"]))];
    assert_eq!(holds(&disk), expected);
    let restored = images.name("restored.qcow2");
    run_ok(["restore", &full, &inc, "-o", &restored]);
    tool_ok("qemu-img", ["compare", "-q", &restored, &images.name("web.s4.qcow2")]);
}
