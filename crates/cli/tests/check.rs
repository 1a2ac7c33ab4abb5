//! `vmstrata check` against `qemu-img check` of the same images, clean and damaged.

use crate::support;
use std::fs;
use std::path::{Path, PathBuf};

use crate::support::{Images, assert_clean, run, run_err, run_json, run_ok, stderr, tool};
use serde_json::Value;

/// Counters both tools print; stock leaves out those that are 0.
const COUNTERS: [&str; 7] = [
    "corruptions",
    "leaks",
    "check-errors",
    "total-clusters",
    "allocated-clusters",
    "compressed-clusters",
    "image-end-offset",
];

fn counter(report: &Value, key: &str) -> u64 {
    report[key].as_u64().unwrap_or(0)
}

/// Both tools' exit codes and reports.
fn check_both(path: &Path) -> (Option<i32>, Value) {
    let text = path.to_str().unwrap();
    let ours = run(["check", "--json", text]);
    let theirs = tool("qemu-img", ["check", "--output=json", text]);
    assert_eq!(ours.status.code(), theirs.status.code(), "{}\nstock: {}", stderr(&ours), stderr(&theirs));
    let ours_json: Value = serde_json::from_slice(&ours.stdout).expect("JSON");
    let theirs_json: Value = serde_json::from_slice(&theirs.stdout).expect("JSON");
    for key in COUNTERS {
        assert_eq!(
            counter(&ours_json, key),
            counter(&theirs_json, key),
            "{key}\n{ours_json:#}\n{theirs_json:#}"
        );
    }
    (ours.status.code(), ours_json)
}

/// An image with data, whose first refcount block is where the header says.
fn image_with_data(images: &Images, name: &str) -> PathBuf {
    let path = images.create(name, &["64M"]);
    images.write_layer(name, &["write 0 1M", "write 10M 256k", "write -c 20M 64k"]);
    path
}

fn be64(bytes: &[u8], at: usize) -> u64 {
    u64::from_be_bytes(bytes[at..at + 8].try_into().unwrap())
}

/// Sets the 16-bit refcount of host cluster `cluster`.
fn set_refcount(path: &Path, cluster: usize, value: u16) {
    let mut bytes = fs::read(path).unwrap();
    let table = be64(&bytes, 48) as usize;
    let block = be64(&bytes, table) as usize;
    bytes[block + cluster * 2..][..2].copy_from_slice(&value.to_be_bytes());
    fs::write(path, bytes).unwrap();
}

/// A cluster at the end of the file that nothing refers to.
fn leak_a_cluster(path: &Path) {
    let clusters = fs::metadata(path).unwrap().len().div_ceil(65536) as usize;
    fs::File::options().write(true).open(path).unwrap().set_len((clusters as u64 + 1) << 16).unwrap();
    set_refcount(path, clusters, 1);
}

/// The host cluster of the first guest cluster.
fn first_data_cluster(path: &Path) -> usize {
    let bytes = fs::read(path).unwrap();
    let offset = |entry: u64| (entry & 0x00ff_ffff_ffff_fe00) as usize;
    let l2 = offset(be64(&bytes, be64(&bytes, 40) as usize));
    offset(be64(&bytes, l2)) >> 16
}

#[test]
fn clean_images_of_every_kind_count_like_stock() {
    let images = Images::new();
    let all = &["write 0 1M", "write 3M 5k", "write -c 10M 64k", "write -z 5M 1M"][..];
    for (name, options, writes) in [
        ("plain", "compat=1.1", all),
        ("tiny", "cluster_size=512", all),
        ("wide", "refcount_bits=64", all),
        ("zstd", "compression_type=zstd", all),
        // Version 2 has no zero clusters, and what is allocated is not compressed any more.
        ("old", "compat=0.10", &all[..3]),
        ("full", "preallocation=metadata", &all[..2]),
    ] {
        let path = images.create(name, &["-o", options, "20M"]);
        images.write_layer(name, writes);
        assert_eq!(check_both(&path).0, Some(0), "{name}");
    }
}

#[test]
fn a_layer_of_a_long_chain_is_checked_alone() {
    let images = Images::new();
    let top = images.long_chain(300);
    assert_eq!(check_both(&top).0, Some(0));
    fs::remove_file(images.path("0.qcow2")).unwrap();
    run_ok(["check", top.to_str().unwrap()]);
}

#[test]
fn leaks_are_3_and_go_when_repaired() {
    let images = Images::new();
    let path = image_with_data(&images, "leaky.qcow2");
    leak_a_cluster(&path);
    let (code, report) = check_both(&path);
    assert_eq!((code, counter(&report, "leaks")), (Some(3), 1));
    let report = run_json(["check", "--json", "--repair", "leaks", path.to_str().unwrap()]);
    assert_eq!((counter(&report, "leaks"), counter(&report, "leaks-fixed")), (0, 1), "{report:#}");
    assert_clean(&path);
    assert_eq!(check_both(&path).0, Some(0));
}

#[test]
fn corruption_is_2_named_by_offset_and_repaired_only_by_all() {
    let images = Images::new();
    let path = image_with_data(&images, "bad.qcow2");
    let cluster = first_data_cluster(&path);
    set_refcount(&path, cluster, 0);
    let (code, report) = check_both(&path);
    assert_eq!(code, Some(2), "{report:#}");

    let said = run(["check", path.to_str().unwrap()]);
    let text = String::from_utf8_lossy(&said.stdout);
    assert!(text.contains(&format!("{:#x}", cluster << 16)) && text.contains("refcount"), "{text}");
    assert!(text.contains("--repair all"), "what to do is said: {text}");

    let leaks_only = run(["check", "-r", "leaks", path.to_str().unwrap()]);
    assert_eq!(leaks_only.status.code(), Some(2), "{}", stderr(&leaks_only));
    run_ok(["check", "-r", "all", path.to_str().unwrap()]);
    assert_clean(&path);
    let data = tool("qemu-io", ["-c", "read -P 0xcd 0 1M", path.to_str().unwrap()]);
    assert!(!String::from_utf8_lossy(&data.stdout).contains("failed"), "the repair changed data");
}

#[test]
fn findings_are_listed_as_data() {
    let images = Images::new();
    let path = image_with_data(&images, "bad.qcow2");
    let cluster = first_data_cluster(&path);
    set_refcount(&path, cluster, 0);
    let output = run(["check", "--json", path.to_str().unwrap()]);
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    let finding = &report["findings"][0];
    assert!(finding["severity"] == "corruption", "{report:#}");
    assert!(finding["offset"].is_u64() && finding["message"].is_string(), "{report:#}");
    let kinds: Vec<_> =
        report["findings"].as_array().unwrap().iter().map(|finding| &finding["kind"]).collect();
    assert!(kinds.contains(&&Value::from("refcount-too-low")), "{kinds:?}");
}

#[test]
fn what_cannot_be_checked_is_1() {
    let images = Images::new();
    fs::write(images.path("cut"), b"QFI\xfb\0\0\0\x03").unwrap();
    for (name, part) in [("absent", "No such file"), ("cut", "cut")] {
        let message = run_err(1, ["check", &images.name(name)]);
        assert!(message.contains(name) && message.contains(part), "{name}: {message}");
    }
}

#[test]
fn a_raw_file_is_63_as_for_stock() {
    let images = Images::new();
    fs::write(images.path("disk.raw"), vec![0; 65536]).unwrap();
    let raw = images.name("disk.raw");
    assert_eq!(tool("qemu-img", ["check", &raw]).status.code(), Some(63));
    for options in [&[][..], &["--json"], &["--repair", "all"]] {
        let message = run_err(63, [&["check", &raw], options].concat());
        assert!(message.contains("disk.raw: this image format does not support checks"), "{message}");
    }
}

#[test]
fn a_disk_in_use_is_neither_checked_nor_repaired() {
    let images = Images::new();
    let path = image_with_data(&images, "used.qcow2");
    leak_a_cluster(&path);
    let before = fs::read(&path).unwrap();
    let user = support::Holder::open(&path, true);
    let message = run_err(1, ["check", "--repair", "all", path.to_str().unwrap()]);
    assert!(message.contains("in use"), "{message}");
    // A reader does not keep another reader out.
    assert_eq!(run(["check", path.to_str().unwrap()]).status.code(), Some(3));
    user.close();
    assert_eq!(fs::read(&path).unwrap(), before);
}
