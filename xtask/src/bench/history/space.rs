//! What snapshots leave on the disk, and whether stock tools find it sound.
//!
//! ```text
//!   a frozen layer's file:  header, tables │ L2 tables, data of what the guest wrote │ index
//!                           └──── added ───┘                                         └ added ┘
//! ```
//!
//! What the guest wrote costs a subcluster for each block, and L2 tables for them, with or without snapshots before. All
//! else that is allocated to the file is what the snapshot added.

use std::collections::BTreeSet;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering};

use anyhow::{Context, Result, anyhow};
use serde_json::json;

use super::super::report::{Report, Row};
use super::super::results::median;
use super::disk::{CHANGED, History};
use super::take::timed;
use super::{BLOCK, CLUSTER};

const PAGE: u64 = 4 << 10;
/// Clusters that a leaf of the index speaks for, and pages that an inner page does.
const LEAF: u64 = 512;
/// Clusters that a leaf with words for subclusters of 4 KiB speaks for.
const FINE_LEAF: u64 = (512 * 4096) / CLUSTER;
const FANOUT: u64 = 256;
/// Runs in a page of a delta record.
const RUNS: u64 = 256;
/// Layers with an index that is full, or adds a delta record to that.
const FULL_EVERY: usize = 65;
/// Bytes of an L2 table of an overlay, and clusters of the base for which it has entries.
const TABLE: u64 = 128 << 10;
const TABLE_CLUSTERS: u64 = (1 << 30) / CLUSTER;

/// Checks all layers and adds up their bytes.
///
/// # Errors
/// When `qemu-img check` finds anything in a layer.
pub(super) fn measure(history: &History, dir: &Path, report: &mut Report) -> Result<()> {
    let layers: Vec<&Path> = history.layers.iter().map(|layer| layer.path.as_path()).collect();
    let paths: Vec<&Path> = layers.iter().copied().chain([history.disk.as_path()]).collect();
    check_all(&paths)?;
    report.add(
        Row::median("layers that `qemu-img check` finds clean (rc 0)", "", &[paths.len() as f64])
            .at_least(layers.len() as f64 + 1.0),
    );
    let empty = empty_overlay(dir, &history.disk, layers[0])?;
    let (mut all, mut all_bounds, mut all_changed) = (0, 0, Vec::new());
    for count in CHANGED {
        let same = |changed: &&Vec<u64>| changed.len() == count;
        let known =
            history.layers.iter().filter_map(|layer| Some((layer, layer.changed.as_ref().filter(same)?)));
        let (mut added, mut bounds) = (Vec::new(), Vec::new());
        for (layer, changed) in known {
            let written = BLOCK as u64 * changed.len() as u64 + TABLE * distinct(changed, TABLE_CLUSTERS);
            let bound = empty + delta_bound(changed);
            let bytes = allocated(&layer.path)?.saturating_sub(written);
            added.push(bytes as f64 / 1024.0);
            bounds.push(bound as f64 / 1024.0);
            (all, all_bounds) = (all + bytes, all_bounds + bound);
            all_changed.extend(changed);
        }
        let name = format!("bytes that a snapshot adds, {count} clusters changed");
        report.add(Row::median(&name, "KiB", &added).at_most(median(&bounds)).beside(empty as f64 / 1024.0));
    }
    all_bounds += layers.len().div_ceil(FULL_EVERY) as u64 * full_bound(&all_changed);
    let ratio = all as f64 / all_bounds as f64;
    report.add(Row::median("bytes that all snapshots add / their bound", "", &[ratio]).at_most(1.0));
    Ok(())
}

/// The most that a delta index adds: its runs and the inner page that leads to them, the layer table's last page and its
/// inner page, and the root.
fn delta_bound(changed: &[u64]) -> u64 {
    let (inner, table, root) = (1, 2, 1);
    PAGE * ((changed.len() as u64).div_ceil(RUNS) + inner + table + root)
}

/// The most that a full one adds instead of the runs: a page for each leaf changed in any layer, of words for clusters and for
/// subclusters, and the inner pages that lead to them.
fn full_bound(changed: &[u64]) -> u64 {
    let top = 1;
    let pages = |leaf| distinct(changed, leaf) + distinct(changed, leaf * FANOUT) + top;
    PAGE * (pages(LEAF) + pages(FINE_LEAF))
}

/// How many runs of `unit` clusters the changed ones lie in.
fn distinct(changed: &[u64], unit: u64) -> u64 {
    changed.iter().map(|cluster| cluster / unit).collect::<BTreeSet<_>>().len() as u64
}

/// Bytes allocated to a layer and, if it has one, its sidecar.
fn allocated(layer: &Path) -> Result<u64> {
    let mut sidecar = layer.as_os_str().to_owned();
    sidecar.push(".vmsx");
    let of = |path: &Path| path.metadata().map(|metadata| metadata.blocks() * 512);
    let own = of(layer).with_context(|| format!("{} is not there", layer.display()))?;
    Ok(own + of(Path::new(&sidecar)).unwrap_or(0))
}

/// Bytes allocated to the overlay that `qemu-img create -b` makes, with the clusters of ours.
fn empty_overlay(dir: &Path, disk: &Path, backing: &Path) -> Result<u64> {
    let overlay = dir.join("empty.qcow2");
    let mut create = Command::new("qemu-img");
    create.args([
        "create",
        "-q",
        "-f",
        "qcow2",
        "-o",
        "cluster_size=128k,extended_l2=on",
        "-F",
        "qcow2",
        "-b",
    ]);
    create.arg(backing).arg(&overlay);
    timed(&mut create).with_context(|| format!("an overlay like {}", disk.display()))?;
    let bytes = allocated(&overlay)?;
    std::fs::remove_file(overlay)?;
    Ok(bytes)
}

/// `qemu-img check` of each file by itself, on all processors.
fn check_all(paths: &[&Path]) -> Result<()> {
    let next = AtomicUsize::new(0);
    let work = || -> Result<()> {
        while let Some(path) = paths.get(next.fetch_add(1, Ordering::Relaxed)) {
            check(path)?;
        }
        Ok(())
    };
    std::thread::scope(|scope| {
        let threads = std::thread::available_parallelism().map_or(1, usize::from);
        let workers: Vec<_> = (0..threads).map(|_| scope.spawn(work)).collect();
        workers.into_iter().try_for_each(|worker| worker.join().map_err(|_| anyhow!("a check panicked"))?)
    })
}

/// Anything but exit code 0 is an error. The layers below are left out: opening them all for each would take hours.
fn check(path: &Path) -> Result<()> {
    let file = json!({ "driver": "file", "filename": path });
    let image = json!({ "driver": "qcow2", "backing": null, "file": file });
    timed(Command::new("qemu-img").arg("check").arg(format!("json:{image}"))).map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_bounds_count_runs_or_pages_changed_and_the_path_to_them() {
        assert_eq!(delta_bound(&[7; 257]), PAGE * (2 + 4));
        assert_eq!(full_bound(&[0, 1, 511]), PAGE * ((1 + 1 + 1) + (2 + 1 + 1)));
        assert_eq!(full_bound(&[0, 512, 512 * 256]), PAGE * ((3 + 2 + 1) + (3 + 2 + 1)));
        assert_eq!(delta_bound(&[]), PAGE * 4);
    }

    #[test]
    fn an_unclean_layer_is_noticed_without_the_layers_below() {
        let dir = tempfile::tempdir().unwrap();
        let (base, top) = (dir.path().join("base.qcow2"), dir.path().join("top.qcow2"));
        super::super::disk::create(&base, 1 << 26).unwrap();
        let empty = empty_overlay(dir.path(), &top, &base).unwrap();
        assert!(empty > 0 && empty.is_multiple_of(PAGE), "{empty}");
        check_all(&[base.as_path()]).unwrap();
        let mut bytes = std::fs::read(&base).unwrap();
        // The refcount of some cluster in the middle: 16 bits each, in the block after the refcount table.
        bytes[2 * CLUSTER as usize + 64] ^= 1;
        bytes[2 * CLUSTER as usize + 65] ^= 1;
        std::fs::write(&top, bytes).unwrap();
        assert!(check_all(&[base.as_path(), top.as_path()]).is_err());
    }
}
