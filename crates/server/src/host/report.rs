//! What the host says of itself.

use std::sync::atomic::{AtomicU64, Ordering};

use vmstrata_api as api;
use vmstrata_disk::stats::{DEPTH_BUCKETS, DiskStats, Kind};
use vmstrata_disk::{Disk, LayerInfo};
use vmstrata_export::nbd::TlsMode;
use vmstrata_store::io_uring_refused;
use vmstrata_types::path_to_text;

use super::moving::move_status;
use super::tier::tier_status;
use super::{Entry, Host, Phase};
use crate::error::Error;
use crate::flush_log;
use crate::spec::{shown_detect_zeroes, shown_format, shown_limits, shown_subclusters};

impl Host {
    /// The server, its disks and its exports.
    pub fn status(&self) -> api::ServerStatus {
        api::ServerStatus {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            pid: std::process::id(),
            uptime_seconds: self.started.elapsed().as_secs(),
            io_uring_refused: io_uring_refused().map(ToString::to_string),
            resources: self.resource_status(),
            tier_caches: self.caches.status(),
            flush_log: self.flush_log.as_deref().map(flush_log::status),
            disks: self.disks(),
            exports: self.exports(),
        }
    }

    fn resource_status(&self) -> api::ResourceStatus {
        let used = self.resources.usage();
        api::ResourceStatus {
            metadata_cache_bytes: used.metadata_cache_bytes,
            metadata_cache_max_bytes: self.limits.metadata_cache_bytes,
            metadata_cache_fills: used.metadata_cache_fills,
            open_files: used.open_files as u64,
            open_files_max: self.limits.max_open_files as u64,
        }
    }

    /// All disks, in the order in which they were added.
    pub fn disks(&self) -> Vec<api::DiskStatus> {
        let entries = self.entries();
        entries.iter().map(disk_status).collect()
    }

    /// All exports, in the order in which they were added.
    pub fn exports(&self) -> Vec<api::ExportStatus> {
        let tls = !matches!(self.tls, TlsMode::Off);
        let table = self.table.lock();
        table.exports.iter().map(|export| export.status(tls)).collect()
    }

    /// One export.
    ///
    /// # Errors
    /// No such export.
    pub fn export(&self, id: u64) -> Result<api::ExportStatus, Error> {
        self.exports().into_iter().find(|export| export.id == id).ok_or(Error::NoSuchExport { id })
    }

    /// One disk, with its chain and its exports.
    ///
    /// # Errors
    /// No such disk.
    pub fn disk(&self, name: &str) -> Result<api::DiskDetail, Error> {
        let entries = self.entries();
        let entry = entries.iter().find(|entry| entry.spec.name == name);
        let entry = entry.ok_or_else(|| Error::NoSuchDisk { name: name.to_owned() })?;
        let chain = match &entry.phase {
            Phase::Serving(disk) => disk.layers().iter().map(layer_status).collect(),
            _ => Vec::new(),
        };
        let stats = match &entry.phase {
            Phase::Serving(disk) => Some(translate(&disk.stats())),
            _ => None,
        };
        let exports = self.exports().into_iter().filter(|export| export.export.serves(name)).collect();
        Ok(api::DiskDetail { disk: disk_status(entry), chain, exports, stats })
    }

    /// The table as it is now: what takes longer than copying it is done without its lock.
    fn entries(&self) -> Vec<Entry> {
        self.table.lock().disks.clone()
    }
}

fn state(phase: &Phase) -> api::DiskState {
    match phase {
        Phase::Opening => api::DiskState::Opening,
        Phase::Serving(_) => api::DiskState::Serving,
        Phase::Closing => api::DiskState::Closing,
        Phase::Waiting(_) => api::DiskState::Waiting,
    }
}

fn disk_status(entry: &Entry) -> api::DiskStatus {
    let disk = match &entry.phase {
        Phase::Serving(disk) => Some(disk),
        _ => None,
    };
    let stats = disk.map(|disk| disk.stats()).unwrap_or_default();
    api::DiskStatus {
        name: entry.spec.name.clone(),
        path: path_to_text(&entry.spec.path),
        file: disk
            .and_then(|disk| disk.active_file())
            .map(|file| api::FileNumber { device: file.dev, inode: file.ino }),
        state: state(&entry.phase),
        added: entry.is_added,
        open_error: match &entry.phase {
            Phase::Waiting(wait) => Some(wait.why.clone()),
            _ => None,
        },
        read_only: disk.map_or(entry.spec.read_only, |disk| disk.is_read_only()),
        detect_zeroes: shown_detect_zeroes(entry.spec.detect_zeroes),
        subclusters: shown_subclusters(entry.spec.subclusters),
        limits: shown_limits(entry.spec.limits),
        role: entry.spec.role(),
        size_bytes: disk.map(|disk| disk.size()),
        layers: disk.map(|disk| layers(disk)),
        failed: disk.and_then(|disk| disk.failure()),
        finalizing: disk.is_some_and(|disk| disk.is_finalizing()),
        finalize_failures: disk.map_or(0, |disk| disk.finalize_failures()),
        tier: match (&entry.tier, &entry.attaching, &entry.standby) {
            (Some((tier, _)), ..) => Some(tier_status(&tier.status())),
            (None, Some(attaching), _) => Some(tier_status(&attaching.status())),
            (None, None, standby) => standby.as_ref().map(|(standby, _)| tier_status(&standby.status())),
        },
        moving: entry.moving.as_ref().map(move_status),
        metadata_hits: stats.metadata_hits[0],
        metadata_misses: stats.metadata_misses[0],
    }
}

fn layers(disk: &Disk) -> u64 {
    disk.layer_count() as u64
}

fn layer_status(layer: &LayerInfo) -> api::LayerStatus {
    api::LayerStatus {
        index: layer.index.get(),
        path: path_to_text(&layer.path),
        format: shown_format(layer.format),
        size_bytes: layer.size,
        cluster_size_bytes: layer.cluster_bits.map(|bits| bits.size()),
        file_bytes: layer.file_len,
    }
}

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
fn translate(stats: &DiskStats) -> api::DiskStats {
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
        throttled: stats.throttled[0],
        throttled_ns: stats.throttled_ns[0],
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

/// See the module documentation.
#[derive(Debug, Default)]
pub(super) struct Counts {
    snapshots: AtomicU64,
    snapshot_failures: AtomicU64,
    snapshot_pause_us: AtomicU64,
    prune_failures: AtomicU64,
}

/// The counts at one moment.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Counted {
    pub(crate) snapshots: u64,
    pub(crate) snapshot_failures: u64,
    /// For how long they held writes, together.
    pub(crate) snapshot_pause_us: u64,
    pub(crate) prune_failures: u64,
    /// Jobs that were done, cancelled, and that failed.
    pub(crate) jobs_ended: [u64; 3],
}

impl Counts {
    /// Counts a snapshot that was asked for.
    pub(super) fn snapshot(&self, taken: &Result<api::SnapshotTaken, Error>) {
        match taken {
            Ok(taken) => {
                self.snapshots.fetch_add(1, Ordering::Relaxed);
                self.snapshot_pause_us.fetch_add(taken.pause_us, Ordering::Relaxed);
            }
            Err(_) => _ = self.snapshot_failures.fetch_add(1, Ordering::Relaxed),
        }
    }

    /// Counts snapshots of a disk that stay though no rule keeps them.
    pub(super) fn prune_failed(&self) {
        self.prune_failures.fetch_add(1, Ordering::Relaxed);
    }
}

impl Host {
    /// What was counted until now.
    pub(crate) fn counted(&self) -> Counted {
        let now = |count: &AtomicU64| count.load(Ordering::Relaxed);
        Counted {
            snapshots: now(&self.counts.snapshots),
            snapshot_failures: now(&self.counts.snapshot_failures),
            snapshot_pause_us: now(&self.counts.snapshot_pause_us),
            prune_failures: now(&self.counts.prune_failures),
            jobs_ended: self.jobs.ended(),
        }
    }
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
