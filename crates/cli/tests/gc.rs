//! `vmstrata gc` and `snapshot list --all`: what disks leave behind is listed, and removed only where that is proved to harm nobody.

use std::fs;
use std::os::unix::fs::symlink;

use crate::support::server::Server;
use crate::support::{Holder, Images, assert_clean, run_err, run_json, run_ok, tool_ok};
use serde_json::{Value, json};

fn qemu_io(target: &str, command: &str) {
    let said = tool_ok("qemu-io", ["-c", command, target]);
    assert!(!said.contains("failed"), "{target}: {said}");
}

/// `web.qcow2` with snapshots s1 to s4, each with its number at its own megabyte.
fn with_history(images: &Images) -> String {
    images.create("web.qcow2", &["8M"]);
    let disk = images.name("web.qcow2");
    for number in 1..=4 {
        qemu_io(&disk, &format!("write -P {number} {number}M 64k"));
        run_ok(["snapshot", "create", &disk, "--name", &format!("s{number}")]);
    }
    disk
}

fn assert_state(images: &Images, name: &str, newest: u8) {
    let path = images.name(name);
    for number in 1..=4 {
        qemu_io(&path, &format!("read -P {} {number}M 64k", if number <= newest { number } else { 0 }));
    }
    assert_clean(&images.path(name));
}

/// Names of what is left over, and why each stays.
fn left_over(disk: &str) -> Vec<(String, Value)> {
    let listed = run_json(["snapshot", "list", disk, "--all", "--json"]);
    let files = listed["left-over"].as_array().unwrap().iter();
    let name = |file: &Value| file["file"].as_str().unwrap().rsplit('/').next().unwrap().to_owned();
    files.map(|file| (name(file), file["reason"].clone())).collect()
}

/// The images there are, without indices beside them.
fn image_files(images: &Images) -> Vec<String> {
    images.files().into_iter().filter(|name| !name.ends_with(".vmsx")).collect()
}

fn free(names: &[&str]) -> Vec<(String, Value)> {
    names.iter().map(|name| ((*name).to_owned(), Value::Null)).collect()
}

#[test]
fn what_a_revert_leaves_is_listed_and_collected_and_its_names_are_free_again() {
    let images = Images::new();
    let disk = with_history(&images);
    assert!(left_over(&disk).is_empty());
    run_ok(["snapshot", "revert", &disk, "s2", "--yes"]);
    assert_eq!(left_over(&disk), free(&["web.s3.qcow2", "web.s4.qcow2"]));
    let text = run_ok(["snapshot", "list", &disk, "--all"]);
    assert!(text.contains("web.s3.qcow2  nothing needs it: vmstrata gc removes it"), "{text}");
    assert!(!run_ok(["snapshot", "list", &disk]).contains("s3"));
    let refused = run_err(1, ["snapshot", "create", &disk, "--name", "s3"]);
    assert!(refused.contains("snapshot list --all") && refused.contains("vmstrata gc"), "{refused}");
    let survey = run_json(["survey", &images.name(""), "--json"]);
    assert_eq!(survey["scanned"]["left-over"]["count"], json!(2));
    assert!(run_ok(["survey", &images.name("")]).contains("Left over: 2 files that disks let go of"));

    let before = images.files();
    let plan = run_json(["gc", &disk, "--json"]);
    assert_eq!((&plan["dry-run"], images.files()), (&json!(true), before), "a dry run is the default");
    let sizes = plan["disks"][0]["files"].as_array().unwrap().iter();
    let sizes: u64 = sizes.map(|file| file["actual-size"].as_u64().unwrap()).sum();
    assert_eq!(plan["freed-bytes"].as_u64(), Some(sizes));
    let said = run_ok(["gc", &disk, "--yes"]);
    assert!(said.contains("2 files removed"), "{said}");
    assert_eq!(image_files(&images), ["web.qcow2", "web.s1.qcow2", "web.s2.qcow2"]);
    assert!(run_ok(["gc", &disk, "--yes"]).contains("0 files removed, 0 B freed"));
    run_ok(["snapshot", "create", &disk, "--name", "s3"]);
    assert_state(&images, "web.qcow2", 2);
}

#[test]
fn what_somebody_needs_or_nobody_can_vouch_for_stays() {
    let images = Images::new();
    let disk = with_history(&images);
    // Called as a snapshot of the disk would be, and marked as one: but a disk that was kept.
    run_ok(["snapshot", "revert", &disk, "s2", "--keep", &images.name("web.kept.qcow2")]);
    qemu_io(&images.name("web.kept.qcow2"), "write -P 9 6M 64k");
    fs::copy(images.path("web.qcow2"), images.path("web.copy.qcow2")).unwrap();
    let left = left_over(&disk);
    let (names, reasons): (Vec<_>, Vec<_>) = left.into_iter().unzip();
    assert_eq!(names, ["web.copy.qcow2", "web.kept.qcow2", "web.s3.qcow2", "web.s4.qcow2"]);
    let because = |at: usize, words: &str| {
        assert!(reasons[at].as_str().unwrap().contains(words), "{names:?}: {reasons:?}");
    };
    because(0, "nothing records");
    because(1, "nothing records");
    because(2, "web.s4.qcow2 stands on it");
    because(3, "web.kept.qcow2 stands on it");
    let before = images.files();
    run_ok(["gc", &disk, "--yes"]);
    assert_eq!(images.files(), before);
    assert_state(&images, "web.kept.qcow2", 4);
    // Once that disk is gone, so is the need.
    fs::remove_file(images.path("web.kept.qcow2")).unwrap();
    run_ok(["gc", &disk, "--yes"]);
    assert_eq!(image_files(&images), ["web.copy.qcow2", "web.qcow2", "web.s1.qcow2", "web.s2.qcow2"]);
}

#[test]
fn a_file_that_changed_or_is_in_use_or_is_a_link_stays() {
    let images = Images::new();
    let disk = with_history(&images);
    run_ok(["flatten", &disk, "--yes", "--keep-files"]);
    assert_eq!(left_over(&disk).len(), 4);
    // The newest is a disk of somebody's now, and has all below it.
    qemu_io(&images.name("web.s4.qcow2"), "write -P 9 6M 64k");
    let before = images.files();
    run_ok(["gc", &disk, "--yes"]);
    assert_eq!(images.files(), before);
    assert_state(&images, "web.s4.qcow2", 4);
    fs::remove_file(images.path("web.s4.qcow2")).unwrap();
    // One that somebody has open.
    let holder = Holder::open(&images.path("web.s3.qcow2"), true);
    let said = run_ok(["gc", &disk, "--yes"]);
    assert!(said.contains("web.s3.qcow2  stays: it is in use") && said.contains("0 files removed"), "{said}");
    holder.close();
    // A link in the place of one leads nowhere for it, but names what it leads to.
    let victim = images.create("victim.qcow2", &["1M"]);
    fs::remove_file(images.path("web.s3.qcow2")).unwrap();
    symlink(&victim, images.path("web.s3.qcow2")).unwrap();
    run_ok(["gc", &disk, "--yes"]);
    assert!(victim.exists() && images.path("web.s3.qcow2").symlink_metadata().is_ok());
    for gone in ["web.s2.qcow2", "web.s1.qcow2"] {
        assert!(!images.path(gone).exists(), "{gone}: nothing needs it");
    }
    assert_state(&images, "web.qcow2", 4);
}

#[test]
fn a_clone_elsewhere_keeps_what_it_stands_on() {
    let images = Images::new();
    let disk = with_history(&images);
    fs::create_dir(images.path("ci")).unwrap();
    let clone = images.name("ci/clone.qcow2");
    run_ok(["snapshot", "clone", &disk, "s3", "-o", &clone]);
    run_ok(["flatten", &disk, "--yes", "--keep-files"]);
    let said = run_ok(["gc", &disk, "--yes"]);
    assert!(said.contains("1 file removed") && said.contains("ci/clone.qcow2 stands on it"), "{said}");
    tool_ok("qemu-img", ["check", "-q", &clone]);
    qemu_io(&clone, "read -P 3 3M 64k");
    // It may have been moved.
    fs::remove_file(&clone).unwrap();
    let said = run_ok(["gc", &disk, "--yes"]);
    assert!(said.contains("0 files removed") && said.contains("was made on it"), "{said}");
    // The whole directory, and a disk that is gone itself.
    fs::remove_file(&disk).unwrap();
    let all = run_json(["gc", &images.name(""), "--yes", "--forget-missing", "--json"]);
    assert_eq!(all["disks"][0]["files"].as_array().unwrap().len(), 3, "{all}");
    assert_eq!(images.files(), ["ci"]);
}

#[test]
fn what_a_served_disk_left_is_collected_while_it_is_served() {
    let images = Images::new();
    let disk = with_history(&images);
    let served = format!("path={disk},name=web");
    let server = Server::start(&["--disk", &served, "--nbd", &format!("unix:{}", images.name("nbd.sock"))]);
    server.ask_ok(["snapshot", "revert", &disk, "s3", "--yes"]);
    server.ask_ok(["snapshot", "delete", &disk, "s1", "--keep-files"]);
    assert_eq!(left_over(&disk), free(&["web.s1.qcow2", "web.s4.qcow2"]));
    assert!(run_ok(["gc", &disk, "--yes"]).contains("2 files removed"));
    assert!(images.path("web.s2.qcow2").exists() && images.path("web.s3.qcow2").exists());
    assert!(server.stop().success());
    assert_state(&images, "web.qcow2", 3);
}
