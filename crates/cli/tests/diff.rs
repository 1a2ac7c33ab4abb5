//! `vmstrata diff` against what qemu-img says of the same states.

use crate::support::{Holder, Images, run, run_err, run_json, run_ok, stderr, tool_json};
use serde_json::{Value, json};

/// Two states of 64 MiB; the newer one has data, zeros over data, and zeros over nothing.
fn pair(images: &Images) -> [String; 2] {
    images.create("old.qcow2", &["64M"]);
    images.write_layer("old.qcow2", &["write -P 1 0 1M", "write -P 2 32M 64k"]);
    images.create("new.qcow2", &["-b", "old.qcow2", "-F", "qcow2"]);
    images.write_layer(
        "new.qcow2",
        &["write -P 3 128k 64k", "write -P 1 256k 64k", "write -z 32M 64k", "write -z 48M 1M"],
    );
    ["old.qcow2", "new.qcow2"].map(|name| images.name(name))
}

#[test]
fn the_extents_are_the_clusters_that_the_layer_above_has() {
    let images = Images::new();
    let [old, new] = pair(&images);
    let found = run_json(["diff", "--json", "--allocation", &old, &new]);
    let map = tool_json("qemu-img", ["map", "--output=json", &new]);
    let own: Vec<Value> = map
        .as_array()
        .unwrap()
        .iter()
        .filter(|run| run["depth"] == 0 && run["present"] == true)
        .map(|run| json!({"start": run["start"], "length": run["length"], "zero": run["zero"], "data": run["data"]}))
        .collect();
    assert_eq!(found["extents"], Value::Array(own));
    assert_eq!((&found["old-size"], &found["new-size"]), (&json!(64 << 20), &json!(64 << 20)));
}

#[test]
fn zeros_over_nothing_and_equal_bytes_drop_out_as_asked() {
    let images = Images::new();
    let [old, new] = pair(&images);
    let starts = |options: &[&str]| -> Vec<u64> {
        let found = run_json([&["diff", "--json"], options, &[&old, &new]].concat());
        found["extents"].as_array().unwrap().iter().map(|extent| extent["start"].as_u64().unwrap()).collect()
    };
    assert_eq!(starts(&[]), [128 << 10, 256 << 10, 32 << 20]);
    assert_eq!(starts(&["--bytes"]), [128 << 10, 32 << 20]);
}

#[test]
fn the_table_has_a_line_for_each_extent_and_a_sum() {
    let images = Images::new();
    let [old, new] = pair(&images);
    let table = run_ok(["diff", &old, &new]);
    let rows: Vec<Vec<&str>> = table.lines().map(|line| line.split_whitespace().collect()).collect();
    assert_eq!(rows[0], ["Offset", "Length", "Size", "Kind"]);
    assert_eq!(rows[1], ["0x20000", "0x10000", "64", "KiB", "data"]);
    assert_eq!(rows[3], ["0x2000000", "0x10000", "64", "KiB", "zero"]);
    assert_eq!(table.lines().last(), Some("3 extents: 128 KiB of data, 64 KiB of zeros"));
}

#[test]
fn a_disk_that_was_resized_says_so() {
    let images = Images::new();
    images.create("old.qcow2", &["1M"]);
    images.create("new.qcow2", &["-b", "old.qcow2", "-F", "qcow2", "2M"]);
    let (old, new) = (images.name("old.qcow2"), images.name("new.qcow2"));
    assert_eq!(
        run_ok(["diff", &old, &new]),
        "0 extents: 0 B of data, 0 B of zeros; resized from 1 MiB to 2 MiB\n"
    );
    let found = run_json(["diff", "--json", &old, &new]);
    assert_eq!(
        found,
        json!({"old": old, "new": new, "old-size": 1 << 20, "new-size": 2 << 20, "extents": [],
            "data-bytes": 0, "zero-bytes": 0})
    );
}

#[test]
fn exit_codes_are_those_of_diff_when_asked_for() {
    let images = Images::new();
    let [old, new] = pair(&images);
    let code = |args: &[&str]| run(args).status.code();
    assert_eq!(code(&["diff", &old, &new]), Some(0));
    assert_eq!(code(&["diff", "--exit-code", &old, &new]), Some(1));
    assert_eq!(code(&["diff", "--exit-code", &old, &old]), Some(0));
    let missing = images.name("missing.qcow2");
    let output = run(["diff", "--exit-code", &old, &missing]);
    assert_eq!(output.status.code(), Some(2));
    assert!(stderr(&output).contains("missing.qcow2"), "{}", stderr(&output));
    run_err(1, ["diff", &old, &missing]);
}

#[test]
fn a_state_that_is_being_written_is_refused_with_advice() {
    let images = Images::new();
    let [old, new] = pair(&images);
    let holder = Holder::open(&images.path("new.qcow2"), false);
    let message = run_err(1, ["diff", &old, &new]);
    assert!(message.contains("in use") && message.contains("take a snapshot"), "{message}");
    holder.close();
}

#[test]
fn strangers_have_nothing_in_common() {
    let images = Images::new();
    let [old, _] = pair(&images);
    let other = images.create("other.qcow2", &["64M"]);
    let message = run_err(1, ["diff", &old, other.to_str().unwrap()]);
    assert!(message.contains("no layer in common"), "{message}");
}

#[test]
fn backing_files_elsewhere_need_permission() {
    let images = Images::new();
    std::fs::create_dir(images.path("above")).unwrap();
    images.create("old.qcow2", &["1M"]);
    images.create("above/mid.qcow2", &["-b", "../old.qcow2", "-F", "qcow2"]);
    images.create("above/new.qcow2", &["-b", "mid.qcow2", "-F", "qcow2"]);
    let (old, new) = (images.name("old.qcow2"), images.name("above/new.qcow2"));
    let message = run_err(1, ["diff", &old, &new]);
    assert!(message.contains("--allow-backing"), "{message}");
    let allow = images.path("").to_str().unwrap().to_owned();
    run_ok(["diff", &old, &new, "--allow-backing", &allow]);
}
