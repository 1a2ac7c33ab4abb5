//! What was done to the host's disks.

use vmstrata_api as api;
use vmstrata_disk::stats::{DEPTH_BUCKETS, DiskStats, Kind};

use super::report::{layers, state};
use super::{Host, Phase};

impl Host {
    /// The numbers of all disks.
    pub fn stats(&self) -> api::StatsList {
        let named = self.entries().into_iter().map(|entry| {
            let disk = match &entry.phase {
                Phase::Serving(disk) => Some(disk),
                _ => None,
            };
            api::NamedStats {
                state: state(&entry.phase),
                layers: disk.map(|disk| layers(disk)).unwrap_or_default(),
                stats: disk.map(|disk| translate(&disk.stats())).unwrap_or_default(),
                name: entry.spec.name,
            }
        });
        api::StatsList {
            disks: named.collect(),
            resources: self.resource_status(),
            at_ns: u64::try_from(self.started.elapsed().as_nanos()).unwrap_or(u64::MAX),
        }
    }
}

/// The engine's numbers in the API's words.
pub(super) fn translate(stats: &DiskStats) -> api::DiskStats {
    let kind = |kind: Kind| api::KindStats {
        requests: stats.requests_of(kind),
        errors: stats.errors[kind as usize],
        bytes: stats.bytes_of(kind),
        at_workers: stats.at_workers[kind as usize],
    };
    api::DiskStats {
        read: kind(Kind::Read),
        write: kind(Kind::Write),
        flush: kind(Kind::Flush),
        discard: kind(Kind::Discard),
        write_zeroes: kind(Kind::WriteZeroes),
        prefetch: kind(Kind::Prefetch),
        read_latency: latency(stats.latency_ns[0], &stats.read_latency),
        write_latency: latency(stats.latency_ns[1], &stats.write_latency),
        other_latency: latency(stats.latency_ns[2], &stats.other_latency),
        read_depths: depths(&stats.read_depth),
        read_zero_bytes: stats.zero_bytes[0],
        metadata_hits: stats.metadata_hits[0],
        metadata_misses: stats.metadata_misses[0],
    }
}

fn latency(sum_ns: u64, counts: &[u64]) -> api::Latency {
    let buckets = counts.iter().enumerate().filter(|(_, count)| **count > 0).map(|(at, &count)| {
        let bound = DiskStats::latency_bound(at).map(|bound| bound.as_nanos());
        api::LatencyBucket { below_ns: bound.and_then(|bound| u64::try_from(bound).ok()), count }
    });
    api::Latency { sum_ns, buckets: buckets.collect() }
}

fn depths(bytes: &[u64; DEPTH_BUCKETS]) -> Vec<api::DepthStats> {
    let depth = |(at, &bytes): (usize, &u64)| {
        let (from, to) = match at {
            0 => (0, 0),
            at => (1 << (at - 1), u16::MAX >> (16 - at)),
        };
        api::DepthStats { from, to, bytes }
    };
    bytes.iter().enumerate().filter(|(_, bytes)| **bytes > 0).map(depth).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn depths_cover_every_layer_once() {
        let ranges = depths(&[1; DEPTH_BUCKETS]);
        assert_eq!((ranges[0].from, ranges[0].to), (0, 0));
        assert_eq!((ranges[2].from, ranges[2].to), (2, 3));
        assert_eq!(ranges.last().unwrap().to, u16::MAX);
        assert!(ranges.windows(2).all(|pair| pair[0].to + 1 == pair[1].from));
    }

    #[test]
    fn empty_buckets_are_left_out() {
        let mut counts = [0; vmstrata_disk::stats::LATENCY_BUCKETS];
        (counts[0], counts[3], counts[24]) = (5, 6, 7);
        let buckets = latency(0, &counts).buckets;
        let found: Vec<_> = buckets.iter().map(|bucket| (bucket.below_ns, bucket.count)).collect();
        assert_eq!(found, [(Some(1024), 5), (Some(8192), 6), (None, 7)]);
    }
}
