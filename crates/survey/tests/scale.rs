//! Thousands of images: time and memory in proportion to the files, whatever they share.

use std::time::{Duration, Instant};

use crate::common::Tree;
use vmstrata_survey::{page, text};

/// Generous: a machine that runs other tests beside.
const TIME_MAX: Duration = Duration::from_secs(20);

#[test]
fn two_thousand_images_are_read_in_bounded_time() {
    let tree = Tree::new();
    for chain in 0..40 {
        tree.quick(&format!("vm{chain}/0.qcow2"), None);
        for layer in 1..50 {
            tree.quick(&format!("vm{chain}/{layer}.qcow2"), Some(&format!("{}.qcow2", layer - 1)));
        }
    }
    let started = Instant::now();
    let report = tree.survey();
    assert!(started.elapsed() < TIME_MAX, "{:?}", started.elapsed());
    assert_eq!((report.scanned.files, report.scanned.images, report.scanned.directories), (2000, 2000, 41));
    assert_eq!((report.chains.len(), report.layers.len()), (40, 2000));
    assert!(report.chains.iter().all(|chain| chain.layers == 50 && chain.severity.is_none()), "{report:#?}");
    assert_eq!(report.snapshots.taken, 40 * 49);
}

/// Walking each chain by itself would take 1,500 * 500 steps, and list as many layers.
#[test]
fn many_disks_on_one_long_chain_cost_what_their_files_cost() {
    let tree = Tree::new();
    tree.quick("0.qcow2", None);
    for layer in 1..500 {
        tree.quick(&format!("{layer}.qcow2"), Some(&format!("{}.qcow2", layer - 1)));
    }
    for disk in 0..1500 {
        tree.quick(&format!("disks/{disk}.qcow2"), Some("../499.qcow2"));
    }
    let started = Instant::now();
    let report = tree.survey();
    assert!(started.elapsed() < TIME_MAX, "{:?}", started.elapsed());
    assert_eq!((report.chains.len(), report.layers.len()), (1500, 2000));
    assert!(report.chains.iter().all(|chain| (chain.layers, chain.shared) == (501, 500)));
    assert_eq!(report.summary.layers_shared, 500);
    let json = serde_json::to_string(&report).unwrap();
    assert!(json.len() < 4 << 20, "{} bytes for 2,000 files", json.len());
    let html = page::render(&report);
    assert!(html.len() < 1 << 20, "{} bytes", html.len());
    assert!(text::render(&report).lines().count() < 60);
}
