//! What a round is like, drawn from its seed.

use std::fmt;

use rand::Rng as _;
use rand::rngs::SmallRng;

use super::stamp::SECTOR;

/// What lies below the disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Below {
    Nothing,
    /// A raw file.
    Raw,
    /// A qcow2 image of compressed clusters.
    Compressed,
    /// A qcow2 image of version 2 (compat 0.10).
    Version2,
    /// Two qcow2 images with cluster sizes of their own.
    Mixed,
}

/// Where the image lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Media {
    Ext4,
    Tmpfs,
}

/// What a worker mostly does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Style {
    /// Some of everything.
    Mixed,
    /// Discards a cluster and then writes parts of it.
    Rewriter,
    /// Long requests at any alignment.
    Long,
    /// Flush after flush.
    Flusher,
    /// Reads mostly.
    Reader,
}

/// Base-2 logarithm of the smallest clusters that have subclusters.
pub(super) const SUBCLUSTERS_SINCE: u32 = 14;

/// A round's configuration.
#[derive(Clone, Debug)]
pub(super) struct Config {
    pub(super) cluster_bits: u32,
    /// Sectors of the disk.
    pub(super) sectors: u64,
    pub(super) direct: bool,
    pub(super) version2: bool,
    pub(super) subclusters: bool,
    pub(super) below: Below,
    /// Sectors of the lowest layer; shorter than the disk now and then.
    pub(super) below_sectors: u64,
    pub(super) media: Media,
    /// Workers with an NBD connection each.
    pub(super) nbd: Vec<Style>,
    /// Workers with a queue of the vhost-user connection each.
    pub(super) vhost: Vec<Style>,
    /// Requests in flight of a worker.
    pub(super) depth: usize,
    /// Clusters that most requests fall into.
    pub(super) hot: u64,
    /// Whether the image begins with clusters that were used and given back.
    pub(super) aged: bool,
    /// Nothing but clusters that are given back and written anew beside flushes, and no layer below: what becomes of a
    /// cluster without an entry.
    pub(super) focused: bool,
    /// Times that the server is started.
    pub(super) lives: u32,
}

impl Config {
    /// Draws the configuration of `seed`. Thirteen seeds in a row have all cluster sizes.
    pub(super) fn draw(seed: u64, random: &mut SmallRng) -> Self {
        let cluster_bits = 9 + (seed * 5 % 13) as u32;
        let media = if random.random_ratio(1, 4) { Media::Tmpfs } else { Media::Ext4 };
        let sectors = sectors(cluster_bits, media, random);
        let below_sectors =
            if random.random_ratio(1, 3) { sectors - random.random_range(0..sectors / 2) } else { sectors };
        let mut nbd: Vec<Style> = (0..random.random_range(1..=3)).map(|_| style(random)).collect();
        if random.random() {
            nbd.push(Style::Flusher);
        }
        let mut vhost: Vec<Style> = (0..random.random_range(1..=2)).map(|_| style(random)).collect();
        let focused = random.random_ratio(1, 4);
        if focused {
            nbd = vec![Style::Rewriter, Style::Rewriter, Style::Flusher, Style::Flusher];
            vhost = vec![Style::Rewriter];
        }
        let version2 = random.random_ratio(1, 6);
        Self {
            cluster_bits,
            sectors,
            direct: media == Media::Ext4 && random.random(),
            version2,
            subclusters: cluster_bits >= SUBCLUSTERS_SINCE && !version2 && random.random(),
            below: if focused { Below::Nothing } else { below(random) },
            focused,
            below_sectors,
            media,
            nbd,
            vhost,
            depth: if focused { 1 } else { random.random_range(1..=4) },
            hot: random.random_range(4..=40),
            lives: random.random_range(3..=6),
            aged: focused || random.random(),
        }
    }

    /// Sectors of a cluster.
    pub(super) fn cluster(&self) -> u64 {
        1 << (self.cluster_bits - SECTOR.trailing_zeros())
    }

    /// Sectors of the longest request.
    pub(super) fn longest(&self) -> u64 {
        (self.cluster() * 8).clamp(128, 4096)
    }
}

fn sectors(cluster_bits: u32, media: Media, random: &mut SmallRng) -> u64 {
    // Small clusters make many tables, large ones few clusters; a file system in memory takes memory.
    let mib = match cluster_bits {
        ..=12 => random.random_range(8..=16),
        _ if media == Media::Tmpfs => random.random_range(16..=24),
        13..=18 => random.random_range(16..=48),
        _ => 64,
    };
    let sectors = (mib << 20) / SECTOR as u64;
    let cluster = 1u64 << cluster_bits >> SECTOR.trailing_zeros();
    // Now and then a last cluster that is not whole.
    sectors + if random.random_ratio(1, 3) { random.random_range(0..cluster.max(8)) } else { 0 }
}

fn below(random: &mut SmallRng) -> Below {
    match random.random_range(0..8) {
        0..3 => Below::Nothing,
        3 => Below::Raw,
        4 => Below::Compressed,
        5 => Below::Version2,
        _ => Below::Mixed,
    }
}

fn style(random: &mut SmallRng) -> Style {
    match random.random_range(0..10) {
        0..4 => Style::Mixed,
        4..7 => Style::Rewriter,
        7 => Style::Long,
        8 => Style::Flusher,
        _ => Style::Reader,
    }
}

impl fmt::Display for Config {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let bytes = 1u64 << self.cluster_bits;
        let cluster = match self.cluster_bits {
            ..10 => format!("{bytes} B"),
            10..20 => format!("{} KiB", bytes >> 10),
            _ => format!("{} MiB", bytes >> 20),
        };
        write!(
            f,
            "clusters {cluster}, {} sectors, cache={}, {:?}{}, below: {:?}",
            self.sectors,
            if self.direct { "direct" } else { "host" },
            self.media,
            if self.version2 { ", version 2" } else { "" },
            self.below
        )?;
        if self.below != Below::Nothing && self.below_sectors != self.sectors {
            write!(f, " ({} sectors)", self.below_sectors)?;
        }
        if self.focused {
            f.write_str(", focused")?;
        }
        if self.aged {
            f.write_str(", aged")?;
        }
        write!(f, ", NBD {:?}, vhost-user {:?}, depth {}", self.nbd, self.vhost, self.depth)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use rand::SeedableRng as _;

    use super::*;

    #[test]
    fn thirteen_seeds_in_a_row_have_all_cluster_sizes() {
        let draw = |seed| Config::draw(seed, &mut SmallRng::seed_from_u64(seed));
        let sizes: BTreeSet<u32> = (40..53).map(|seed| draw(seed).cluster_bits).collect();
        assert_eq!(sizes, (9..=21).collect());
    }
}
