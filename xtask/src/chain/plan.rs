//! Which layers hold which cluster: a pure function of the parameters, so nobody needs to keep a table.
//!
//! Clusters are spread uniformly over the layers, as in sQemu §6. With `overlap` a cluster is also present,
//! with older data, in layers below its owner; a reader that stops at the wrong layer is then found out.

use serde::{Deserialize, Serialize};

use super::pattern::mix;

/// How a chain is laid out.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Plan {
    /// Number of layers, the base included; at least 1.
    pub layers: u32,
    /// Bytes of the disk; a multiple of 512.
    pub size: u64,
    /// Bytes of a cluster.
    pub cluster_size: u64,
    /// Part of the clusters that hold data, 0 to 1.
    pub fill: f64,
    /// Chance that a cluster lies also in one lower layer; a second lower copy has the chance squared, and so on.
    pub overlap: f64,
    /// Part of the data clusters stored compressed, 0 to 1.
    pub compress: f64,
    /// Makes two chains of the same parameters differ.
    pub seed: u64,
}

/// Independent questions asked of the hash of one cluster.
#[derive(Clone, Copy)]
enum Question {
    Filled = 1,
    Owner = 2,
    Compressed = 3,
    Lower = 16,
}

/// More lower copies than this are not made, whatever the chance.
const LOWER_COPIES_MAX: u64 = 8;

impl Plan {
    /// Clusters of the disk, the last one possibly cut short.
    pub fn clusters(&self) -> u64 {
        self.size.div_ceil(self.cluster_size)
    }

    /// The newest layer that holds `cluster`, or `None` where the disk reads as zeros.
    pub fn owner(&self, cluster: u64) -> Option<u16> {
        let filled = self.chance(cluster, Question::Filled as u64) < self.fill;
        filled.then(|| self.owner_when_filled(cluster))
    }

    /// The newest layer for a cluster that is known to hold data.
    pub fn owner_when_filled(&self, cluster: u64) -> u16 {
        self.pick(cluster, Question::Owner as u64, self.layers as u64) as u16
    }

    /// Layers below the owner that hold older data of the cluster, newest first, each once.
    pub fn lower_copies(&self, cluster: u64, owner: u16) -> Vec<u16> {
        let mut copies = Vec::new();
        for copy in 0..LOWER_COPIES_MAX {
            let question = Question::Lower as u64 + 2 * copy;
            if owner == 0 || self.chance(cluster, question) >= self.overlap {
                break;
            }
            copies.push(self.pick(cluster, question + 1, owner as u64) as u16);
        }
        copies.sort_unstable_by(|a, b| b.cmp(a));
        copies.dedup();
        copies
    }

    /// Whether layers store this cluster compressed.
    pub fn is_compressed(&self, cluster: u64) -> bool {
        self.chance(cluster, Question::Compressed as u64) < self.compress
    }

    fn hash(&self, cluster: u64, question: u64) -> u64 {
        mix(mix(self.seed ^ mix(question)) ^ cluster)
    }

    fn chance(&self, cluster: u64, question: u64) -> f64 {
        (self.hash(cluster, question) >> 11) as f64 / (1u64 << 53) as f64
    }

    fn pick(&self, cluster: u64, question: u64, below: u64) -> u64 {
        ((self.hash(cluster, question) as u128 * below as u128) >> 64) as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plan(layers: u32, fill: f64, overlap: f64) -> Plan {
        Plan { layers, size: 1 << 30, cluster_size: 65_536, fill, overlap, compress: 0.0, seed: 1 }
    }

    #[test]
    fn clusters_spread_evenly_over_layers_and_fill_is_kept() {
        let plan = plan(16, 0.9, 0.0);
        let mut per_layer = [0u64; 16];
        let owners = (0..plan.clusters()).filter_map(|cluster| plan.owner(cluster));
        owners.for_each(|layer| per_layer[layer as usize] += 1);
        let filled: u64 = per_layer.iter().sum();
        assert!((14_500..=15_000).contains(&filled), "{filled} of 16384 at fill 0.9");
        assert!(per_layer.iter().all(|count| (800..=1_050).contains(count)), "{per_layer:?}");
    }

    #[test]
    fn full_and_empty_are_exact() {
        let full = plan(3, 1.0, 0.0);
        assert!((0..full.clusters()).all(|cluster| full.owner(cluster).is_some()));
        let empty = plan(3, 0.0, 0.0);
        assert!((0..empty.clusters()).all(|cluster| empty.owner(cluster).is_none()));
    }

    #[test]
    fn lower_copies_lie_below_the_owner_and_come_as_often_as_asked() {
        let plan = plan(100, 1.0, 0.5);
        let mut with_copies = 0;
        for cluster in 0..plan.clusters() {
            let owner = plan.owner(cluster).unwrap();
            let copies = plan.lower_copies(cluster, owner);
            assert!(copies.iter().all(|layer| *layer < owner));
            assert!(copies.windows(2).all(|pair| pair[0] > pair[1]));
            with_copies += u64::from(!copies.is_empty());
        }
        assert!((7_500..=8_800).contains(&with_copies), "{with_copies} of 16384 at overlap 0.5");
        assert!(Plan { overlap: 0.0, ..plan.clone() }.lower_copies(5, 99).is_empty());
    }

    #[test]
    fn another_seed_is_another_chain() {
        let one = plan(50, 0.9, 0.0);
        let two = Plan { seed: 2, ..one.clone() };
        let same = (0..1_000).filter(|cluster| one.owner(*cluster) == two.owner(*cluster)).count();
        assert!(same < 100, "{same} of 1000 owners agree");
    }
}
