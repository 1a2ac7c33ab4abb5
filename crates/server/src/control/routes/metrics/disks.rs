//! What was done to disks, as metrics.

use std::fmt;

use prometheus_client::encoding::DescriptorEncoder;
use prometheus_client::metrics::MetricType;
use vmstrata_api::{DiskStats, KindStats, Latency, NamedStats};

use super::NoLabels;

type Labels<'a> = [(&'static str, &'a str); 2];
/// Which of a kind's numbers.
type Count = fn(&KindStats) -> u64;

/// Encodes the numbers of all disks.
pub(super) fn encode(disks: &[NamedStats], encoder: &mut DescriptorEncoder) -> fmt::Result {
    let numbers: [(&str, &str, Count); 4] = [
        ("disk_requests", "Requests that ended", |kind| kind.requests),
        ("disk_request_errors", "Requests that failed", |kind| kind.errors),
        ("disk_request_bytes", "Bytes that requests were about", |kind| kind.bytes),
        ("disk_requests_at_workers", "Requests that the metadata in memory did not answer", |kind| {
            kind.at_workers
        }),
    ];
    for (name, help, value) in numbers {
        let mut family = encoder.encode_descriptor(name, help, None, MetricType::Counter)?;
        for (labels, kind) in disks.iter().flat_map(kinds_of) {
            family.encode_family(&labels)?.encode_counter::<NoLabels, _, u64>(&value(kind), None)?;
        }
    }
    lookups(disks, encoder)?;
    throttled(disks, encoder)?;
    latencies(disks, encoder)?;
    depths(disks, encoder)
}

fn lookups(disks: &[NamedStats], encoder: &mut DescriptorEncoder) -> fmt::Result {
    let help =
        "Lookups by whether the metadata in memory answered them (hit), or tables had to be read (miss)";
    let mut family = encoder.encode_descriptor("disk_metadata_lookups", help, None, MetricType::Counter)?;
    for disk in disks {
        for (result, count) in [("hit", disk.stats.metadata_hits), ("miss", disk.stats.metadata_misses)] {
            let labels: Labels<'_> = [("disk", disk.name.as_str()), ("result", result)];
            family.encode_family(&labels)?.encode_counter::<NoLabels, _, u64>(&count, None)?;
        }
    }
    Ok(())
}

fn throttled(disks: &[NamedStats], encoder: &mut DescriptorEncoder) -> fmt::Result {
    let help = "Requests that waited for the disk's limits, or wait";
    let mut family = encoder.encode_descriptor("disk_throttled_requests", help, None, MetricType::Counter)?;
    for disk in disks {
        let labels = [("disk", disk.name.as_str())];
        family.encode_family(&labels)?.encode_counter::<NoLabels, _, u64>(&disk.stats.throttled, None)?;
    }
    let help = "Time that requests waited for the disk's limits, together";
    let mut family = encoder.encode_descriptor("disk_throttled_seconds", help, None, MetricType::Counter)?;
    for disk in disks {
        let labels = [("disk", disk.name.as_str())];
        let seconds = disk.stats.throttled_ns as f64 / 1e9;
        family.encode_family(&labels)?.encode_counter::<NoLabels, _, f64>(&seconds, None)?;
    }
    Ok(())
}

fn kinds_of(disk: &NamedStats) -> impl Iterator<Item = (Labels<'_>, &KindStats)> {
    let DiskStats { read, write, flush, discard, write_zeroes, prefetch, .. } = &disk.stats;
    let kinds = [
        ("read", read),
        ("write", write),
        ("flush", flush),
        ("discard", discard),
        ("write_zeroes", write_zeroes),
        ("prefetch", prefetch),
    ];
    kinds.into_iter().map(|(name, kind)| ([("disk", disk.name.as_str()), ("kind", name)], kind))
}

fn latencies(disks: &[NamedStats], encoder: &mut DescriptorEncoder) -> fmt::Result {
    let help = "Time in the server; one read or write in thirteen is timed, and all else";
    let mut family = encoder.encode_descriptor("disk_latency_seconds", help, None, MetricType::Histogram)?;
    for disk in disks {
        let stats = &disk.stats;
        let of_kinds =
            [("read", &stats.read_latency), ("write", &stats.write_latency), ("other", &stats.other_latency)];
        for (kind, latency) in of_kinds {
            let labels: Labels<'_> = [("disk", disk.name.as_str()), ("kind", kind)];
            let count = latency.buckets.iter().map(|bucket| bucket.count).sum();
            let sum = latency.sum_ns as f64 / 1e9;
            let mut metric = family.encode_family(&labels)?;
            metric.encode_histogram::<NoLabels>(sum, count, &bounds(latency), None)?;
        }
    }
    Ok(())
}

/// Every scrape has the same buckets, a microsecond to 8.6 seconds by doubling, however few were met.
fn bounds(latency: &Latency) -> Vec<(f64, u64)> {
    const FIRST: u32 = 10;
    const LAST: u32 = 33;
    let count = |below_ns| {
        let found = latency.buckets.iter().find(|bucket| bucket.below_ns == below_ns);
        found.map_or(0, |bucket| bucket.count)
    };
    let bounded = (FIRST..=LAST).map(|shift| ((1_u64 << shift) as f64 / 1e9, count(Some(1 << shift))));
    bounded.chain([(f64::INFINITY, count(None))]).collect()
}

fn depths(disks: &[NamedStats], encoder: &mut DescriptorEncoder) -> fmt::Result {
    let help = "Bytes that reads took from layers so far below the active one";
    let mut family = encoder.encode_descriptor("disk_read_depth_bytes", help, None, MetricType::Counter)?;
    for disk in disks {
        for depth in &disk.stats.read_depths {
            let range = if depth.from == depth.to {
                depth.from.to_string()
            } else {
                format!("{}-{}", depth.from, depth.to)
            };
            let labels: Labels<'_> = [("disk", disk.name.as_str()), ("depth", &range)];
            family.encode_family(&labels)?.encode_counter::<NoLabels, _, u64>(&depth.bytes, None)?;
        }
    }
    let help = "Bytes of reads that no layer has data for";
    let mut family = encoder.encode_descriptor("disk_read_zero_bytes", help, None, MetricType::Counter)?;
    for disk in disks {
        let labels = [("disk", disk.name.as_str())];
        let zeros = disk.stats.read_zero_bytes;
        family.encode_family(&labels)?.encode_counter::<NoLabels, _, u64>(&zeros, None)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use vmstrata_api::LatencyBucket;
    use vmstrata_disk::stats::{DiskStats as EngineStats, LATENCY_BUCKETS};

    use super::*;

    #[test]
    fn the_buckets_are_those_of_the_engine() {
        let all = (0..LATENCY_BUCKETS).map(|at| {
            let below = EngineStats::latency_bound(at).map(|bound| bound.as_nanos() as u64);
            LatencyBucket { below_ns: below, count: 1 }
        });
        let bounds = bounds(&Latency { sum_ns: 0, buckets: all.collect() });
        assert_eq!(bounds.len(), LATENCY_BUCKETS);
        assert!(bounds.iter().all(|(_, count)| *count == 1), "{bounds:?}");
    }
}
