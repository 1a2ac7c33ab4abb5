//! `vmstrata map` against `qemu-img map` of the same images, byte range by byte range.

use std::path::Path;

use crate::support::server::Server;
use crate::support::{Images, run_err, run_json, run_ok, tool_json, tool_ok};
use serde_json::Value;

/// What a map says about one place: whether something is there, what, how deep, and at which offset of the file.
type Place = (bool, bool, u64, Option<u64>);

/// The map cut at every multiple of `step`, so that it does not matter how runs were merged.
fn places(map: &Value, step: u64) -> Vec<Place> {
    let mut all = Vec::new();
    let mut next = 0;
    for run in map.as_array().expect("a list") {
        let (start, length) = (run["start"].as_u64().unwrap(), run["length"].as_u64().unwrap());
        assert_eq!(start, next, "runs follow one another");
        next = start + length;
        for at in (start..next).step_by(step as usize) {
            let (data, zero) = (run["data"].as_bool().unwrap(), run["zero"].as_bool().unwrap());
            let offset = run["offset"].as_u64().filter(|_| data).map(|offset| offset + (at - start));
            // How deep nothing is does not matter, and the tools count it differently.
            let depth = if data { run["depth"].as_u64().unwrap() } else { 0 };
            all.push((data, zero, depth, offset));
        }
    }
    all
}

fn assert_same_map(path: &Path, step: u64) {
    let path = path.to_str().unwrap();
    let (ours, theirs) =
        (run_json(["map", "--json", path]), tool_json("qemu-img", ["map", "--output=json", path]));
    let (ours, theirs) = (places(&ours, step), places(&theirs, step));
    assert_eq!(ours.len(), theirs.len(), "{path}");
    for (at, (ours, theirs)) in ours.iter().zip(&theirs).enumerate() {
        assert_eq!(ours, theirs, "(data, zero, depth, offset) at {:#x} of {path}", at as u64 * step);
    }
}

#[test]
fn kinds_layers_and_offsets_are_what_qemu_img_says() {
    let images = Images::new();
    images.create("0.qcow2", &["16M"]);
    images.write_layer("0.qcow2", &["write 0 1M", "write -c 2M 64k", "write 5M 128k"]);
    images.create("1.qcow2", &["-b", "0.qcow2", "-F", "qcow2"]);
    images.write_layer("1.qcow2", &["write -z 64k 64k", "write 256k 64k", "write 3M 1M"]);
    let top = images.create("2.qcow2", &["-b", "1.qcow2", "-F", "qcow2"]);
    images.write_layer("2.qcow2", &["write 3M 64k", "write -c 4M 64k", "write 8M 64k", "discard 8M 64k"]);
    assert_same_map(&top, 65536);
    assert_same_map(&images.path("1.qcow2"), 65536);
}

#[test]
fn old_versions_and_other_cluster_sizes_agree() {
    let images = Images::new();
    for (name, options, step) in [
        ("v2", "compat=0.10", 65536),
        ("tiny", "cluster_size=512", 512),
        ("huge", "cluster_size=2M", 2 << 20),
    ] {
        let path = images.create(name, &["-o", options, "12M"]);
        images.write_layer(name, &["write 0 4k", "write 3M 70k", "write 10M 1k"]);
        assert_same_map(&path, step);
    }
}

#[test]
fn mixed_cluster_sizes_and_lengths_agree() {
    let images = Images::new();
    images.create("base.qcow2", &["-o", "cluster_size=64k", "4M"]);
    images.write_layer("base.qcow2", &["write 0 256k", "write 3M 1M"]);
    images.create("small.qcow2", &["-o", "cluster_size=4k", "-b", "base.qcow2", "-F", "qcow2", "2M"]);
    images.write_layer("small.qcow2", &["write 4k 8k", "write 1M 4k"]);
    let top =
        images.create("top.qcow2", &["-o", "cluster_size=64k", "-b", "small.qcow2", "-F", "qcow2", "8M"]);
    images.write_layer("top.qcow2", &["write 7M 64k"]);
    assert_same_map(&top, 4096);
}

#[test]
fn a_raw_base_with_holes_agrees() {
    let images = Images::new();
    tool_ok("qemu-img", ["create", "-q", "-f", "raw", &images.name("base.raw"), "8M"]);
    tool_ok("qemu-io", ["-f", "raw", "-c", "write 1M 128k", &images.name("base.raw")]);
    let top = images.create("top.qcow2", &["-b", "base.raw", "-F", "raw"]);
    images.write_layer("top.qcow2", &["write 4M 64k"]);
    assert_same_map(&top, 65536);
}

#[test]
fn a_chain_of_300_layers_agrees_and_names_layer_and_file() {
    let images = Images::new();
    let top = images.long_chain(300);
    assert_same_map(&top, 65536);
    let map = run_json(["map", "--json", top.to_str().unwrap()]);
    // Cluster 7 was written in layer 7 only, cluster 10 in layer 10 and again in layer 11.
    for (cluster, layer) in [(7_u64, 7_u64), (10, 11), (299, 299)] {
        let run = map.as_array().unwrap().iter().find(|run| {
            let start = run["start"].as_u64().unwrap();
            (start..start + run["length"].as_u64().unwrap()).contains(&(cluster << 16))
        });
        let run = run.unwrap();
        assert_eq!(run["layer"], layer, "{run}");
        assert_eq!(run["depth"], 299 - layer, "{run}");
        assert_eq!(run["filename"], images.name(&format!("{layer}.qcow2")), "{run}");
    }
}

#[test]
fn a_part_of_the_disk_can_be_asked_for() {
    let images = Images::new();
    let path = images.create("a.qcow2", &["16M"]);
    images.write_layer("a.qcow2", &["write 1M 1M"]);
    let path = path.to_str().unwrap();
    let part = ["--start-offset", "1536K", "--max-length", "1M"];
    let ours = run_json([&["map", "--json", path], &part[..]].concat());
    let theirs = tool_json("qemu-img", ["map", "--output=json", path, "-s", "1536K", "-l", "1M"]);
    let bounds = |map: &Value| -> Vec<(u64, u64, bool)> {
        let runs = map.as_array().unwrap();
        runs.iter()
            .map(|run| (run["start"].as_u64().unwrap(), run["length"].as_u64().unwrap(), run["data"] == true))
            .collect()
    };
    assert_eq!(bounds(&ours), bounds(&theirs));
    assert_eq!(bounds(&ours), [(1536 << 10, 512 << 10, true), (2 << 20, 512 << 10, false)]);
    let message = run_err(1, ["map", path, "--start-offset", "17M"]);
    assert!(message.contains("past the end of the disk at 0x1000000"), "{message}");
}

#[test]
fn the_table_shows_what_is_there() {
    let images = Images::new();
    images.create("base.qcow2", &["1M"]);
    images.write_layer("base.qcow2", &["write 128k 64k"]);
    let top = images.create("top.qcow2", &["-b", "base.qcow2", "-F", "qcow2"]);
    images.write_layer("top.qcow2", &["write -z 256k 64k", "write -c 512k 64k"]);
    let table = run_ok(["map", top.to_str().unwrap()]);
    let rows: Vec<Vec<&str>> = table.lines().map(|line| line.split_whitespace().collect()).collect();
    let base = images.name("base.qcow2");
    assert_eq!(rows[0], ["Offset", "Length", "Kind", "Layer", "Mapped", "to", "File"]);
    assert_eq!(rows[1], ["0x20000", "0x10000", "data", "0", "0x50000", &base]);
    assert_eq!(rows[2][..4], ["0x40000", "0x10000", "zero", "1"]);
    assert_eq!(rows[3][..4], ["0x80000", "0x10000", "compressed", "1"]);
    assert_eq!(rows.len(), 4);
}

#[test]
fn an_empty_disk_is_an_empty_list() {
    let images = Images::new();
    let path = images.create("a.qcow2", &["0"]);
    assert_eq!(run_ok(["map", "--json", path.to_str().unwrap()]), "[]\n");
}

#[test]
fn all_commands_and_nbd_number_layers_from_the_base() {
    let images = Images::new();
    let top = images.create("web.qcow2", &["8M"]);
    let disk = top.to_str().unwrap();
    for (name, write) in [("mon", "write 0 1M"), ("tue", "write 1M 1M")] {
        images.write_layer("web.qcow2", &[write]);
        run_ok(["snapshot", "create", disk, "--name", name]);
    }
    images.write_layer("web.qcow2", &["write 2M 1M"]);
    let none = u64::from(u32::MAX);
    let by_map: Vec<(u64, u64)> = run_json(["map", "--json", disk])
        .as_array()
        .unwrap()
        .iter()
        .map(|run| (run["start"].as_u64().unwrap(), run["layer"].as_u64().unwrap_or(none)))
        .collect();
    assert_eq!(by_map, [(0, 0), (1 << 20, 1), (2 << 20, 2), (3 << 20, none)]);
    let listed = run_json(["snapshot", "list", disk, "--json"]);
    let numbers: Vec<_> = listed["snapshots"].as_array().unwrap().iter().map(|row| &row["number"]).collect();
    assert_eq!(numbers, [1, 0]);
    let plan = run_json(["merge", disk, "--layers", "1..1", "--dry-run", "--json"]);
    assert!(plan.to_string().contains("web.tue.qcow2") && !plan.to_string().contains("web.mon"), "{plan}");
    let said = run_err(1, ["merge", disk, "--layers", "5..9"]);
    assert!(
        said.contains("web.qcow2: it has layers 0 (the base) to 2") && said.contains("layers 5 to 9"),
        "{said}"
    );
    let nbd = format!("unix:{}", images.name("nbd.sock"));
    let server = Server::start(&["--disk", &format!("path={disk}"), "--nbd", &nbd]);
    let map = tool_json("nbdinfo", ["--json", "--map=vmstrata:layer", &server.uri("web")]);
    let number = |value: &Value| value.as_u64().unwrap();
    let by_nbd: Vec<_> =
        map.as_array().unwrap().iter().map(|run| (number(&run["offset"]), number(&run["type"]))).collect();
    assert_eq!(by_nbd, by_map);
    assert!(server.stop().success());
}
