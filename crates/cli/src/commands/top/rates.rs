//! Two samples of a server's numbers as speeds.

use serde::Serialize;
use vmstrata_api::{DiskStats, Latency, NamedStats, StatsList};

use crate::output::share_of;

/// What a disk did between two samples.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct DiskRates {
    /// The disk.
    pub name: String,
    /// Layers of its chain.
    pub layers: u64,
    /// Reads a second.
    pub reads_per_second: f64,
    /// Bytes read a second.
    pub read_bytes_per_second: f64,
    /// Writes a second, writes of zeros and discards included.
    pub writes_per_second: f64,
    /// Bytes written a second.
    pub write_bytes_per_second: f64,
    /// Flushes a second.
    pub flushes_per_second: f64,
    /// The time that half of the reads did not pass, up to a factor of two.
    pub read_p50_us: Option<f64>,
    /// The time that 99 % of the reads did not pass.
    pub read_p99_us: Option<f64>,
    /// The time that 99 % of the writes did not pass.
    pub write_p99_us: Option<f64>,
    /// Share of the lookups that the metadata in memory answered; absent where there was none.
    pub metadata_hits_percent: Option<f64>,
    /// Share of reads and writes that the metadata in memory did not answer.
    pub at_workers_percent: f64,
    /// Requests that failed.
    pub errors: u64,
}

/// What every disk did between two samples. A disk that was not there before did all of it since.
pub fn rates(before: &StatsList, now: &StatsList) -> Vec<DiskRates> {
    let seconds = now.at_ns.saturating_sub(before.at_ns) as f64 / 1e9;
    let earlier = |name: &str| before.disks.iter().find(|disk| disk.name == name);
    let none = DiskStats::default();
    let of_disk = |disk: &NamedStats| {
        let since = disk.stats.since(earlier(&disk.name).map_or(&none, |earlier| &earlier.stats));
        rates_of(disk, &since, seconds)
    };
    now.disks.iter().map(of_disk).collect()
}

fn rates_of(disk: &NamedStats, did: &DiskStats, seconds: f64) -> DiskRates {
    let per_second = |count: u64| if seconds > 0.0 { count as f64 / seconds } else { 0.0 };
    let bound = |latency: &Latency, share| latency.quantile_ns(share).map(|ns| ns as f64 / 1e3);
    let moved = did.read.requests + did.write.requests;
    let slow = (did.read.at_workers + did.write.at_workers) as f64;
    let writing = [did.write, did.write_zeroes, did.discard];
    let all = [did.read, did.write, did.flush, did.discard, did.write_zeroes, did.prefetch];
    DiskRates {
        name: disk.name.clone(),
        layers: disk.layers,
        reads_per_second: per_second(did.read.requests),
        read_bytes_per_second: per_second(did.read.bytes),
        writes_per_second: per_second(writing.iter().map(|kind| kind.requests).sum()),
        write_bytes_per_second: per_second(did.write.bytes),
        flushes_per_second: per_second(did.flush.requests),
        read_p50_us: bound(&did.read_latency, 0.5),
        read_p99_us: bound(&did.read_latency, 0.99),
        write_p99_us: bound(&did.write_latency, 0.99),
        metadata_hits_percent: share_of(did.metadata_hits, did.metadata_misses),
        at_workers_percent: if moved == 0 { 0.0 } else { (slow / moved as f64 * 100.0).min(100.0) },
        errors: all.iter().map(|kind| kind.errors).sum(),
    }
}

#[cfg(test)]
mod tests {
    use vmstrata_api::{DiskState, KindStats, LatencyBucket, ResourceStatus};

    use super::*;

    fn sample(at_ns: u64, reads: u64) -> StatsList {
        let read = KindStats { requests: reads, bytes: reads * 4096, errors: 1, at_workers: reads / 4 };
        let buckets = vec![LatencyBucket { below_ns: Some(2048), count: reads }];
        let read_latency = Latency { sum_ns: 0, buckets };
        let stats = DiskStats { read, read_latency, metadata_hits: reads, ..DiskStats::default() };
        let disk = NamedStats { name: "web".to_owned(), state: DiskState::Serving, layers: 7, stats };
        StatsList { at_ns, resources: ResourceStatus::default(), disks: vec![disk] }
    }

    #[test]
    fn speeds_are_differences_by_time() {
        let did = &rates(&sample(1_000_000_000, 100), &sample(3_000_000_000, 300))[0];
        assert_eq!((did.reads_per_second, did.read_bytes_per_second), (100.0, 409_600.0));
        assert_eq!((did.read_p50_us, did.write_p99_us), (Some(2.048), None));
        assert_eq!((did.at_workers_percent, did.errors), (25.0, 0));
        assert_eq!(did.metadata_hits_percent, Some(100.0));
    }

    #[test]
    fn a_disk_that_is_new_did_all_of_it_and_no_time_is_no_speed() {
        let nothing = StatsList { disks: Vec::new(), ..sample(0, 0) };
        let did = &rates(&nothing, &sample(2_000_000_000, 100))[0];
        assert_eq!((did.reads_per_second, did.errors), (50.0, 1));
        assert_eq!(rates(&nothing, &sample(0, 100))[0].reads_per_second, 0.0);
    }
}
