//! The disk whose history is made, and what is known of each of its layers.

use std::collections::{HashMap, HashSet};
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};

use super::super::client::Client;
use super::{BLOCK, CLUSTER};
use crate::chain::pattern::{Writer, mix};

/// Layers of another number of changed clusters than the rest, of each kind.
pub(super) const SPECIAL: usize = 5;
/// Clusters changed in an ordinary layer, in a small, in a large one.
pub(super) const CHANGED: [usize; 3] = [100, 10, 1000];

/// A frozen layer made by a snapshot.
#[derive(Debug)]
pub(super) struct Layer {
    pub(super) path: PathBuf,
    /// The guest clusters written in it, if that is known exactly.
    pub(super) changed: Option<Vec<u64>>,
}

/// A disk with its snapshots.
#[derive(Debug)]
pub(super) struct History {
    /// The active layer.
    pub(super) disk: PathBuf,
    /// Frozen layers, the base first.
    pub(super) layers: Vec<Layer>,
    /// Who wrote blocks last, by guest offset.
    pub(super) written: HashMap<u64, u16>,
}

impl History {
    /// Reads blocks of all ages back, `most` at most.
    ///
    /// # Errors
    /// When one does not hold what was written.
    pub(super) fn verify(&self, client: &mut Client, most: usize) -> Result<()> {
        let step = self.written.len().div_ceil(most).max(1);
        for (at, round) in self.written.iter().step_by(step) {
            client
                .check(*at, BLOCK, &|_| Some(Writer::client(*round)))
                .with_context(|| format!("what was written before snapshot {round}"))?;
        }
        Ok(())
    }
}

/// Makes an image of `size` bytes with 90 % of its clusters mapped, each GiB up to nine tenths. Its file is sparse: the
/// clusters are there, and read as zeros.
///
/// # Errors
/// When the stock tools fail.
pub(super) fn create(path: &Path, size: u64) -> Result<()> {
    let mut make = Command::new("qemu-img");
    make.args(["create", "-q", "-f", "qcow2", "-o", "preallocation=metadata"])
        .arg(path)
        .arg(size.to_string());
    ensure!(make.status().context("qemu-img does not run")?.success(), "qemu-img create failed");
    let mut discard = Command::new("qemu-io");
    discard.args(["-f", "qcow2", "-d", "unmap"]).arg(path).stdin(Stdio::piped()).stdout(Stdio::null());
    let mut child = discard.spawn().context("qemu-io does not run")?;
    let mut commands = child.stdin.take().context("no standard input")?;
    let step = 1 << 30;
    for start in (0..size).step_by(step as usize) {
        let end = (start + step).min(size);
        let from = (start + (end - start) / 10 * 9) / CLUSTER * CLUSTER;
        writeln!(commands, "discard {from} {}", end - from)?;
    }
    drop(commands);
    ensure!(child.wait()?.success(), "qemu-io failed");
    Ok(())
}

/// `count` different clusters of `from..to`, in random order, as `round` draws them.
pub(super) fn draw(from: u64, to: u64, count: usize, round: u64) -> Vec<u64> {
    let (first, clusters) = (from / CLUSTER, (to - from) / CLUSTER);
    assert!(clusters >= 2 * count as u64, "{clusters} clusters are too few to draw {count} from");
    let mut seen = HashSet::new();
    let draws = (0..).map(|index: u64| first + mix(mix(round) ^ index) % clusters);
    draws.filter(|cluster| seen.insert(*cluster)).take(count).collect()
}

/// How many clusters are changed before each of `count` snapshots: the last ones are the special ones.
pub(super) fn changes(count: usize) -> impl Iterator<Item = usize> {
    let kind = move |index: usize| match count - index {
        1..=SPECIAL => CHANGED[2],
        left if left <= 2 * SPECIAL => CHANGED[1],
        _ => CHANGED[0],
    };
    (0..count).map(kind)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clusters_are_drawn_once_each_and_where_they_may_lie() {
        let drawn = draw(16 << 20, 1 << 30, 1000, 7);
        let distinct: HashSet<u64> = drawn.iter().copied().collect();
        assert_eq!((drawn.len(), distinct.len()), (1000, 1000));
        assert!(drawn.iter().all(|cluster| (256..16_384).contains(cluster)));
        assert_ne!(drawn, draw(16 << 20, 1 << 30, 1000, 8));
    }

    #[test]
    fn the_last_layers_change_little_and_much() {
        let all: Vec<usize> = changes(12).collect();
        assert_eq!(all, [100, 100, 10, 10, 10, 10, 10, 1000, 1000, 1000, 1000, 1000]);
    }

    #[test]
    fn nine_tenths_of_a_new_disk_are_mapped_and_take_no_space() {
        use std::os::unix::fs::MetadataExt as _;
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.qcow2");
        create(&path, (1 << 30) + (64 << 20)).unwrap();
        assert!(path.metadata().unwrap().blocks() * 512 < 2 << 20);
        let map = Command::new("qemu-img").args(["map", "--output=json"]).arg(&path).output().unwrap();
        let map: serde_json::Value = serde_json::from_slice(&map.stdout).unwrap();
        let mapped = map.as_array().unwrap().iter().filter(|extent| extent["offset"].is_u64());
        let bytes: u64 = mapped.map(|extent| extent["length"].as_u64().unwrap()).sum();
        let part = bytes as f64 / f64::from((1 << 30) + (64 << 20));
        assert!((0.89..0.91).contains(&part), "{part}");
    }
}
