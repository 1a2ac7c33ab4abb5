//! What was done to disks.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::{DiskState, ResourceStatus};

/// What was done to a disk since it was opened. Subtract an earlier answer to see what happened in between.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct DiskStats {
    /// Reads.
    pub read: KindStats,
    /// Writes.
    pub write: KindStats,
    /// Flushes.
    pub flush: KindStats,
    /// Discards.
    pub discard: KindStats,
    /// Writes of zeros.
    pub write_zeroes: KindStats,
    /// Reads into the host's page cache.
    pub prefetch: KindStats,
    /// How long reads took in the server; one in thirteen is timed.
    pub read_latency: Latency,
    /// How long writes took in the server; one in thirteen is timed.
    pub write_latency: Latency,
    /// How long all else took in the server; all of it is timed.
    pub other_latency: Latency,
    /// Bytes that reads took from files, by how far the layer is below the active one.
    pub read_depths: Vec<DepthStats>,
    /// Bytes of the same reads that no layer has data for.
    pub read_zero_bytes: u64,
    /// Lookups of where a run of a read or write lies that the metadata in memory answered.
    pub metadata_hits: u64,
    /// Those that it did not: tables had to be read first.
    pub metadata_misses: u64,
    /// Requests that waited for the disk's limits, or wait.
    #[serde(default)]
    pub throttled: u64,
    /// For how many nanoseconds those waited that wait no more, together.
    #[serde(default)]
    pub throttled_ns: u64,
}

/// Requests of one kind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct KindStats {
    /// Requests that ended.
    pub requests: u64,
    /// Of these, the ones that failed.
    pub errors: u64,
    /// Bytes they were about.
    pub bytes: u64,
    /// Requests that the metadata in memory did not answer, or that may block for another reason: workers carried
    /// them out.
    pub at_workers: u64,
}

/// A histogram of times.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Latency {
    /// Nanoseconds of all that was timed together.
    pub sum_ns: u64,
    /// The buckets, shortest first, each with what took less than its bound and not less than the one before; empty
    /// ones are left out.
    pub buckets: Vec<LatencyBucket>,
}

/// A bucket of a histogram.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct LatencyBucket {
    /// What took less; absent for the last bucket, which has all that is slower.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub below_ns: Option<u64>,
    /// How many.
    pub count: u64,
}

/// Bytes of layers at about one depth.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct DepthStats {
    /// The highest of these layers: 0 is the active one, 1 the one below.
    pub from: u16,
    /// The lowest of these layers.
    pub to: u16,
    /// Bytes.
    pub bytes: u64,
}

/// The numbers of all disks at one moment.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct StatsList {
    /// Nanoseconds since the server began: divides differences into speeds.
    pub at_ns: u64,
    /// What all disks share.
    pub resources: ResourceStatus,
    /// The disks, in the order in which they were added.
    pub disks: Vec<NamedStats>,
}

/// The numbers of a disk.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct NamedStats {
    /// Its name.
    pub name: String,
    /// Where it is.
    pub state: DiskState,
    /// Layers of the chain.
    pub layers: u64,
    /// What was done to it.
    pub stats: DiskStats,
}

impl DiskStats {
    /// What was done since `earlier`, which was asked of the same disk. All 0 where the disk was opened anew meanwhile.
    #[must_use]
    pub fn since(&self, earlier: &Self) -> Self {
        Self {
            read: self.read.since(earlier.read),
            write: self.write.since(earlier.write),
            flush: self.flush.since(earlier.flush),
            discard: self.discard.since(earlier.discard),
            write_zeroes: self.write_zeroes.since(earlier.write_zeroes),
            prefetch: self.prefetch.since(earlier.prefetch),
            read_latency: self.read_latency.since(&earlier.read_latency),
            write_latency: self.write_latency.since(&earlier.write_latency),
            other_latency: self.other_latency.since(&earlier.other_latency),
            read_depths: self.read_depths.iter().map(|depth| depth.since(&earlier.read_depths)).collect(),
            read_zero_bytes: self.read_zero_bytes.saturating_sub(earlier.read_zero_bytes),
            metadata_hits: self.metadata_hits.saturating_sub(earlier.metadata_hits),
            metadata_misses: self.metadata_misses.saturating_sub(earlier.metadata_misses),
            throttled: self.throttled.saturating_sub(earlier.throttled),
            throttled_ns: self.throttled_ns.saturating_sub(earlier.throttled_ns),
        }
    }
}

impl KindStats {
    fn since(self, earlier: Self) -> Self {
        Self {
            requests: self.requests.saturating_sub(earlier.requests),
            errors: self.errors.saturating_sub(earlier.errors),
            bytes: self.bytes.saturating_sub(earlier.bytes),
            at_workers: self.at_workers.saturating_sub(earlier.at_workers),
        }
    }
}

impl DepthStats {
    fn since(self, earlier: &[Self]) -> Self {
        let before = earlier.iter().find(|depth| depth.from == self.from).map_or(0, |depth| depth.bytes);
        Self { bytes: self.bytes.saturating_sub(before), ..self }
    }
}

impl Latency {
    fn since(&self, earlier: &Self) -> Self {
        let before = |below_ns| earlier.buckets.iter().find(|bucket| bucket.below_ns == below_ns);
        let left = self.buckets.iter().map(|bucket| LatencyBucket {
            count: bucket.count.saturating_sub(before(bucket.below_ns).map_or(0, |before| before.count)),
            ..*bucket
        });
        let sum_ns = self.sum_ns.saturating_sub(earlier.sum_ns);
        Self { sum_ns, buckets: left.filter(|bucket| bucket.count > 0).collect() }
    }

    /// The time that a share of the requests (0 to 1) did not pass, as the bound of its bucket: up to twice what it
    /// really was. `None` when nothing was timed, or it lies past the last bound.
    pub fn quantile_ns(&self, share: f64) -> Option<u64> {
        let total: u64 = self.buckets.iter().map(|bucket| bucket.count).sum();
        let rank = ((total as f64 * share).ceil() as u64).clamp(1, total.max(1));
        let mut seen = 0;
        let holds = |bucket: &&LatencyBucket| {
            seen += bucket.count;
            seen >= rank
        };
        self.buckets.iter().find(holds)?.below_ns
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn latency(buckets: &[(u64, u64)]) -> Latency {
        let bucket = |&(below, count)| LatencyBucket { below_ns: (below > 0).then_some(below), count };
        Latency { sum_ns: 0, buckets: buckets.iter().map(bucket).collect() }
    }

    #[test]
    fn quantiles_are_bounds_of_buckets() {
        let times = latency(&[(1024, 50), (2048, 49), (4096, 1)]);
        for (share, below) in
            [(0.0, 1024), (0.5, 1024), (0.51, 2048), (0.99, 2048), (0.999, 4096), (1.0, 4096)]
        {
            assert_eq!(times.quantile_ns(share), Some(below), "{share}");
        }
        assert_eq!(latency(&[]).quantile_ns(0.5), None);
        assert_eq!(latency(&[(0, 3)]).quantile_ns(0.5), None, "past the last bound");
    }

    #[test]
    fn differences_leave_out_what_was_there_before() {
        let depth = |bytes| vec![DepthStats { from: 0, to: 0, bytes }];
        let earlier = DiskStats {
            read: KindStats { requests: 10, bytes: 100, ..KindStats::default() },
            read_latency: latency(&[(1024, 5), (2048, 2)]),
            read_depths: depth(100),
            ..DiskStats::default()
        };
        let now = DiskStats {
            read: KindStats { requests: 15, bytes: 180, errors: 1, at_workers: 2 },
            read_latency: latency(&[(1024, 5), (2048, 3), (4096, 1)]),
            read_depths: depth(180),
            metadata_hits: 7,
            ..DiskStats::default()
        };
        let between = now.since(&earlier);
        assert_eq!(between.read, KindStats { requests: 5, bytes: 80, errors: 1, at_workers: 2 });
        assert_eq!(between.read_latency, latency(&[(2048, 1), (4096, 1)]));
        assert_eq!(between.read_depths, depth(80));
        assert_eq!((between.metadata_hits, earlier.since(&now).metadata_hits), (7, 0));
        // Another disk of the name, opened since.
        assert_eq!(earlier.since(&now).read.requests, 0);
    }
}
