//! Numbers of a survey against `qemu-img info --backing-chain` of the same chains.

use std::collections::{HashMap, HashSet};
use std::path::PathBuf;

use crate::common::{Tree, chain, set_mtime, stock_chain, tool};
use serde_json::Value;
use vmstrata_qcow2::SnapshotInfo;
use vmstrata_survey::{Report, SurveyOptions, TimeSource, survey};

/// A small fleet: a base image of three steps, disks on it and on each other, disks alone, raw ones.
fn fleet() -> (Tree, Vec<PathBuf>) {
    let tree = Tree::new();
    tree.create("golden/os-0.qcow2", &["1G"]);
    tree.create("golden/os-1.qcow2", &["-b", "os-0.qcow2", "-F", "qcow2"]);
    tree.create("golden/os-2.qcow2", &["-b", "os-1.qcow2", "-F", "qcow2", "2G"]);
    tool("qemu-img", ["create", "-q", "-f", "raw", &tree.name("golden/old.raw"), "64M"]);
    tool("qemu-io", ["-f", "raw", "-c", "write -q 0 1M", &tree.name("golden/old.raw")]);
    let mut tops = Vec::new();
    for vm in 0..6 {
        let mut below = format!("{}/golden/os-{}.qcow2", tree.root().display(), vm % 3);
        for step in 0..vm * 3 {
            let name = format!("vm{vm}/disk.{step}.qcow2");
            // Names are relative from the second on.
            tree.create(&name, &["-b", &below, "-F", "qcow2"]);
            tool("qemu-io", ["-c", &format!("write -q {}k 64k", step * 64), &tree.name(&name)]);
            below = format!("disk.{step}.qcow2");
        }
        if vm > 0 {
            tops.push(tree.path(&format!("vm{vm}/disk.{}.qcow2", vm * 3 - 1)));
        }
    }
    // A copy of a disk in the middle of its history.
    tops.push(tree.create("vm4/copy.qcow2", &["-b", "disk.5.qcow2", "-F", "qcow2"]));
    tops.push(tree.create("on-raw.qcow2", &["-b", "golden/old.raw", "-F", "raw"]));
    tops.push(tree.create("alone.qcow2", &["-o", "cluster_size=4k", "300M"]));
    (tree, tops)
}

/// What the report must say, worked out chain by chain and layer by layer from what stock says.
struct Oracle {
    chains: HashMap<PathBuf, Vec<Value>>,
    /// For each layer's path the chains it is in.
    users: HashMap<String, HashSet<PathBuf>>,
}

impl Oracle {
    fn new(tops: &[PathBuf]) -> Self {
        let chains: HashMap<_, _> = tops.iter().map(|top| (top.clone(), stock_chain(top))).collect();
        let mut users: HashMap<String, HashSet<PathBuf>> = HashMap::new();
        for (top, layers) in &chains {
            for layer in layers {
                users.entry(file_of(layer)).or_default().insert(top.clone());
            }
        }
        Self { chains, users }
    }
}

/// Stock writes `/a/b/../c`.
fn file_of(layer: &Value) -> String {
    let path = PathBuf::from(layer["filename"].as_str().expect("a name"));
    path.canonicalize().expect("there").to_str().expect("UTF-8").to_owned()
}

fn sum(layers: &[Value], key: &str) -> u64 {
    layers.iter().map(|layer| layer[key].as_u64().expect("a number")).sum()
}

#[test]
fn every_chain_and_layer_is_what_stock_says() {
    let (tree, tops) = fleet();
    let report = tree.survey();
    let oracle = Oracle::new(&tops);
    assert_eq!(report.chains.len(), tops.len(), "{:#?}", report.chains);
    for (top, layers) in &oracle.chains {
        let ours = chain(&report, top);
        assert_eq!(ours.layers as usize, layers.len(), "{}", top.display());
        assert_eq!(ours.virtual_size, layers[0]["virtual-size"].as_u64().unwrap(), "{}", top.display());
        assert_eq!(ours.allocated, sum(layers, "actual-size"), "{}", top.display());
        let shared = layers.iter().filter(|layer| oracle.users[&file_of(layer)].len() > 1).count();
        assert_eq!(ours.shared as usize, shared, "{}", top.display());
        assert!(ours.severity.is_none() && ours.known && !ours.in_use, "{ours:?}");
        // Downwards through the list of layers, as a reader of the JSON would go.
        let mut at = Some(ours.top);
        for layer in layers {
            let ours = &report.layers[at.expect("as long as stock's")];
            assert_eq!(ours.path, file_of(layer));
            assert_eq!(ours.format, layer["format"].as_str().unwrap(), "{}", ours.path);
            assert_eq!(ours.allocated, layer["actual-size"].as_u64().unwrap(), "{}", ours.path);
            assert_eq!(ours.backing_filename.as_deref(), layer["backing-filename"].as_str(), "{}", ours.path);
            at = ours.below;
        }
        assert_eq!(at, None);
    }
    assert_layers(&report, &oracle);
    assert!(report.risks.is_empty(), "{:#?}", report.risks);
}

fn assert_layers(report: &Report, oracle: &Oracle) {
    let mut longest: HashMap<&str, usize> = HashMap::new();
    for (layer, users) in &oracle.users {
        longest.insert(layer, users.iter().map(|top| oracle.chains[top].len()).max().unwrap());
    }
    assert_eq!(report.layers.len(), oracle.users.len());
    for layer in &report.layers {
        assert_eq!(layer.chains as usize, oracle.users[&layer.path].len(), "{}", layer.path);
        assert_eq!(layer.longest_chain as usize, longest[layer.path.as_str()], "{}", layer.path);
    }
    let allocated: u64 = report.layers.iter().map(|layer| layer.allocated).sum();
    assert_eq!(report.summary.allocated_bytes, allocated);
    assert_eq!(report.summary.layers as usize, oracle.users.len());
}

#[test]
fn summaries_are_those_of_the_chains() {
    let (tree, tops) = fleet();
    let report = tree.survey();
    let mut lengths: Vec<f64> = tops.iter().map(|top| stock_chain(top).len() as f64).collect();
    lengths.sort_by(f64::total_cmp);
    let summary = report.summary.chain_length;
    assert_eq!((summary.min, summary.max), (lengths[0], *lengths.last().unwrap()));
    assert_eq!(summary.p50, lengths[lengths.len().div_ceil(2) - 1]);
    assert_eq!(summary.count as usize, lengths.len());
    let snapshots = &report.snapshots;
    assert_eq!(snapshots.taken as usize, report.layers.iter().filter(|layer| layer.below.is_some()).count());
    assert_eq!(snapshots.points.iter().map(|point| point.count).sum::<u64>(), snapshots.dated);
    assert_eq!(snapshots.sources.values().sum::<u64>(), snapshots.dated);
}

#[test]
fn costs_follow_the_model() {
    let (tree, _) = fleet();
    let report = tree.survey();
    for chain in &report.chains {
        let (cost, layers) = (&chain.cost, u64::from(chain.layers));
        assert_eq!(cost.stock_memory_min, layers * (138 << 10));
        assert!(cost.stock_memory_max >= cost.stock_memory_min);
        assert!(cost.stock_memory_max <= layers * ((138 << 10) + (32 << 20)));
        assert!(cost.stock_open_s > 0.0 && cost.open_s > 0.0 && cost.reads_per_s > cost.stock_reads_per_s);
    }
    let alone = chain(&report, &tree.path("alone.qcow2"));
    assert_eq!(alone.cost.map_memory_max, (300 << 20) / 4096 * 8, "8 bytes a cluster");
    let total: u64 = report.chains.iter().map(|chain| chain.cost.stock_memory_max).sum();
    assert_eq!(report.savings.stock_memory_max, total);
    let layers = report.layers.len() as u64;
    assert!(report.savings.memory_max >= (7 << 20) + layers * 512);
    assert!(report.savings.memory_max <= (7 << 20) + layers * 512 + (64 << 20));
}

#[test]
fn the_number_of_threads_changes_nothing() {
    let (tree, _) = fleet();
    let json = |threads| {
        let report = survey(&SurveyOptions { threads, ..tree.options() }).unwrap();
        let mut json = serde_json::to_value(report).unwrap();
        json["made-at"] = 0.into();
        json["growth"]["surveys"][0]["made-at"] = 0.into();
        json
    };
    let alone = json(1);
    for threads in [2, 3, 16] {
        assert_eq!(json(threads), alone, "{threads} threads");
    }
}

#[test]
fn a_file_with_several_names_is_one_image() {
    let tree = Tree::new();
    let first = tree.create("a/disk.qcow2", &["16M"]);
    std::fs::hard_link(&first, tree.path("b.qcow2")).unwrap();
    std::os::unix::fs::symlink("disk.qcow2", tree.path("a/link.qcow2")).unwrap();
    let through_link = tree.overlay("top.qcow2", "a/link.qcow2");
    let report = tree.survey();
    assert_eq!((report.chains.len(), report.layers.len()), (1, 2));
    assert_eq!(chain(&report, &through_link).layers, 2);
    assert_eq!(report.layers[0].path, first.to_str().unwrap(), "the first name in the alphabet");
    assert_eq!(report.scanned.links.count, 1);
}

#[test]
fn times_between_snapshots_come_from_the_files() {
    const DAY: u64 = 86_400;
    let tree = Tree::new();
    let base = tree.create("0.qcow2", &["16M"]);
    let tops: Vec<_> =
        (1..=4).map(|at| tree.overlay(&format!("{at}.qcow2"), &format!("{}.qcow2", at - 1))).collect();
    // As if copied here with their times: each was written last when the next one was made.
    for (at, path) in [&base].into_iter().chain(&tops).enumerate() {
        set_mtime(path, 1_700_000_000 + (at as u64).pow(2) * DAY);
    }
    let snapshots = tree.survey().snapshots;
    assert_eq!(snapshots.taken, 4);
    // The base's own making is not known, so nothing is for the first snapshot.
    assert_eq!(snapshots.dated, 3);
    assert_eq!(snapshots.sources.get(&TimeSource::Change), Some(&3));
    assert_eq!((snapshots.interval_s.min, snapshots.interval_s.max), (DAY as f64, 5.0 * DAY as f64));
    let positions: Vec<_> = snapshots.points.iter().map(|point| (point.position, point.count)).collect();
    assert_eq!(positions, [(2, 1), (3, 1), (4, 1)]);
}

#[test]
fn times_and_names_of_snapshots_come_from_the_images_where_they_are_there() {
    const HOUR: u64 = 3600;
    let tree = Tree::new();
    tree.quick("web.start.qcow2", None);
    let layers =
        [("web.monday.qcow2", "start", 0), ("web.tuesday.qcow2", "monday", 24), ("web.qcow2", "tuesday", 72)];
    let mut below = "web.start.qcow2";
    for (file, name, hours) in layers {
        let taken_ns = (1_700_000_000 + hours * HOUR) * 1_000_000_000;
        let info = SnapshotInfo { name: name.to_owned(), taken_ns, ..SnapshotInfo::default() };
        tree.quick_snapshot(file, Some(below), Some(info));
        below = file;
    }
    // What taking a snapshot leaves when it is killed.
    tree.quick(".web.qcow2.71-0.snapshot", Some("web.qcow2"));
    let report = tree.survey();
    let snapshots = &report.snapshots;
    assert_eq!((snapshots.taken, snapshots.sources.get(&TimeSource::Metadata)), (3, Some(&2)));
    assert_eq!(
        (snapshots.interval_s.min, snapshots.interval_s.max),
        ((24 * HOUR) as f64, (48 * HOUR) as f64)
    );
    // The base was made now, after the first snapshot was taken, as its file says.
    assert_eq!(snapshots.out_of_order, 1);
    let names: Vec<_> = report.layers.iter().map(|layer| layer.snapshot.as_deref()).collect();
    // In order of the files: web.monday, web, web.start, web.tuesday.
    assert_eq!(names, [Some("monday"), None, Some("start"), Some("tuesday")]);
    assert_eq!((report.chains.len(), report.scanned.unfinished.count), (1, 1));
}
