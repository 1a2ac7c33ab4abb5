//! `/v1/metrics`: the server's numbers as Prometheus and OpenMetrics read them, taken when they are asked for.

mod disks;
mod format;
mod process;

use std::fmt;
use std::sync::Arc;

use axum::extract::State;
use axum::http::{HeaderMap, header};
use axum::response::IntoResponse;
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeLabelSet, text};
use prometheus_client::metrics::MetricType;
use prometheus_client::registry::Registry;
use vmstrata_api::{
    DiskState, DiskStatus, ExportCounters, ExportSpec, ExportStatus, FlushLogStatus, JobStatus, NamedStats,
    ServerStatus, TierCache, TierState, TierStatus,
};

use self::format::Format;
use self::process::Process;
use super::apart;
use crate::control::problem::Failure;
use crate::host::{Counted, Host};

/// The server's numbers for Prometheus, in the format that `Accept` prefers
#[utoipa::path(
    get, path = "/v1/metrics", tag = "server",
    responses((
        status = OK, description = "The Prometheus text format, or OpenMetrics",
        content((String = "text/plain"), (String = "application/openmetrics-text"))
    ))
)]
pub(in crate::control) async fn metrics(
    State(host): State<Arc<Host>>,
    headers: HeaderMap,
) -> Result<impl IntoResponse, Failure> {
    let format = Format::preferred(&headers);
    let look = |host: &Host| Numbers {
        status: host.status(),
        stats: host.stats().disks,
        jobs: host.jobs(),
        counted: host.counted(),
        process: Process::now(),
    };
    let text = apart(host, move |host| Ok(encode(look(host)))).await?;
    Ok(([(header::CONTENT_TYPE, format.media_type())], format.write(text)))
}

/// The numbers as OpenMetrics text.
fn encode(numbers: Numbers) -> String {
    let mut registry = Registry::with_prefix("vmstrata");
    registry.register_collector(Box::new(numbers));
    let mut text = String::new();
    text::encode(&mut text, &registry).expect("a string takes any text");
    text
}

/// One scrape's numbers.
#[derive(Debug)]
struct Numbers {
    status: ServerStatus,
    stats: Vec<NamedStats>,
    jobs: Vec<JobStatus>,
    counted: Counted,
    process: Process,
}

impl Collector for Numbers {
    fn encode(&self, mut encoder: DescriptorEncoder) -> fmt::Result {
        self.server(&mut encoder)?;
        self.disks(&mut encoder)?;
        tiers(&self.status.disks, &mut encoder)?;
        tier_caches(&self.status.tier_caches, &mut encoder)?;
        self.status.flush_log.as_ref().map_or(Ok(()), |log| flush_log(log, &mut encoder))?;
        disks::encode(&self.stats, &mut encoder)?;
        process::encode(self.process, self.counted, &self.jobs, &mut encoder)?;
        self.exports(&mut encoder)
    }
}

impl Numbers {
    fn server(&self, encoder: &mut DescriptorEncoder) -> fmt::Result {
        let server = &self.status;
        let build = encoder.encode_descriptor("build", "The program's version", None, MetricType::Info);
        build?.encode_info(&[("version", server.version.as_str())])?;
        let used = &server.resources;
        for (name, help, value) in [
            ("uptime_seconds", "Seconds since the server began to serve", server.uptime_seconds),
            (
                "io_uring",
                "Whether requests go through io_uring, not through threads because the host forbids it",
                u64::from(server.io_uring_refused.is_none()),
            ),
            ("metadata_cache_bytes", "Metadata pages in memory", used.metadata_cache_bytes),
            ("metadata_cache_max_bytes", "The most there may be", used.metadata_cache_max_bytes),
            ("layer_files_open", "Files of frozen layers open now", used.open_files),
            ("layer_files_open_max", "The most there may be", used.open_files_max),
        ] {
            encoder.encode_descriptor(name, help, None, MetricType::Gauge)?.encode_gauge(&value)?;
        }
        let help = "Metadata pages put into memory: missed by requests, or read when disks were opened";
        let mut fills = encoder.encode_descriptor("metadata_cache_fills", help, None, MetricType::Counter)?;
        fills.encode_counter::<NoLabels, _, u64>(&used.metadata_cache_fills, None)
    }

    fn disks(&self, encoder: &mut DescriptorEncoder) -> fmt::Result {
        let of_disks = |value: fn(&vmstrata_api::DiskStatus) -> u64| {
            self.status.disks.iter().map(move |disk| ([("disk", disk.name.as_str())], value(disk)))
        };
        let serving = of_disks(|disk| u64::from(disk.state == DiskState::Serving));
        gauges(
            encoder,
            "disk_serving",
            "1 while the disk is served, 0 while it opens, closes or waits",
            serving,
        )?;
        let waiting = of_disks(|disk| u64::from(disk.state == DiskState::Waiting));
        let help = "1 while the disk is not open because that failed: the server tries again";
        gauges(encoder, "disk_waiting", help, waiting)?;
        let sizes = of_disks(|disk| disk.size_bytes.unwrap_or_default());
        gauges(encoder, "disk_size_bytes", "Virtual size", sizes)?;
        let layers = of_disks(|disk| disk.layers.unwrap_or_default());
        gauges(encoder, "disk_layers", "Layers of the chain", layers)?;
        let roles = self
            .status
            .disks
            .iter()
            .map(|disk| ([("disk", disk.name.as_str()), ("role", disk.role.as_str())], 1));
        gauges(encoder, "disk_role", "1: what the disk's guest has it for", roles)?;
        let failed = of_disks(|disk| u64::from(disk.failed.is_some()));
        let help = "1 if the disk takes no more writes because it has failed: it is served for reading";
        gauges(encoder, "disk_failed", help, failed)?;
        let finalizing = of_disks(|disk| u64::from(disk.finalizing));
        gauges(encoder, "disk_finalizing", "1 while the last snapshot gets its index", finalizing)?;
        let help = "Snapshots that were taken and did not get their index";
        let mut family =
            encoder.encode_descriptor("disk_finalize_failures", help, None, MetricType::Counter)?;
        for (labels, failures) in of_disks(|disk| disk.finalize_failures) {
            family.encode_family(&labels)?.encode_counter::<NoLabels, _, u64>(&failures, None)?;
        }
        Ok(())
    }

    fn exports(&self, encoder: &mut DescriptorEncoder) -> fmt::Result {
        let waiting = self.status.exports.iter().filter(|export| export.open_error.is_some()).count() as u64;
        let help = "Exports that are not open because that failed: the server tries again";
        encoder
            .encode_descriptor("exports_waiting", help, None, MetricType::Gauge)?
            .encode_gauge(&waiting)?;
        let connections = self.status.exports.iter().filter_map(|export| match &export.export {
            ExportSpec::Nbd(spec) => Some(([("address", spec.address.as_str())], export.connections?)),
            ExportSpec::VhostUser(_) | ExportSpec::Fuse(_) => None,
        });
        gauges(encoder, "nbd_connections", "Connections of NBD clients now", connections)?;
        let guests = self
            .status
            .exports
            .iter()
            .filter_map(|export| Some((vhost_user(export)?.0, export.connections?)));
        gauges(encoder, "vhost_user_attached", "1 while a guest is attached", guests)?;
        let counters: [(&str, &str, Count); 8] = [
            ("vhost_user_requests", "Requests taken from rings", |counted| counted.requests),
            ("vhost_user_errors", "Requests answered with an error", |counted| counted.errors),
            ("vhost_user_read_bytes", "Bytes asked for by reads", |counted| counted.read_bytes),
            ("vhost_user_written_bytes", "Bytes brought by writes", |counted| counted.written_bytes),
            ("vhost_user_kicks", "Notifications from drivers", |counted| counted.kicks),
            ("vhost_user_calls", "Notifications to drivers", |counted| counted.calls),
            ("vhost_user_polls", "Times a thread found work by looking", |counted| counted.polls),
            ("vhost_user_sleeps", "Times a thread went to sleep", |counted| counted.sleeps),
        ];
        for (name, help, value) in counters {
            let mut family = encoder.encode_descriptor(name, help, None, MetricType::Counter)?;
            for (labels, counted) in self.status.exports.iter().filter_map(vhost_user) {
                family.encode_family(&labels)?.encode_counter::<NoLabels, _, u64>(&value(counted), None)?;
            }
        }
        Ok(())
    }
}

/// What of tiered disks is published.
fn tiers(disks: &[DiskStatus], encoder: &mut DescriptorEncoder) -> fmt::Result {
    type Value = fn(&TierStatus) -> u64;
    let numbers: [(&str, &str, Value); 10] = [
        ("tier_epoch", "The newest epoch that is published", |tier| tier.epoch),
        ("tier_unpublished_bytes", "Bytes on this host that the repository lacks", |tier| {
            tier.unpublished_bytes
        }),
        ("tier_unpublished_seconds", "Age of the oldest write that the repository lacks", |tier| {
            tier.unpublished_seconds.unwrap_or_default()
        }),
        ("tier_stalled", "1 while the disk cannot be published: the server tries again", |tier| {
            u64::from(tier.state == TierState::Stalled)
        }),
        ("tier_fenced", "1 if another host took the disk over", |tier| {
            u64::from(tier.state == TierState::Fenced)
        }),
        ("tier_reads_wait_seconds", "For how long the repository has not answered reads", |tier| {
            tier.reads_wait_seconds.unwrap_or_default()
        }),
        ("tier_held", "1 while its epochs are held on this host", |tier| {
            u64::from(tier.held_seconds.is_some())
        }),
        (
            "tier_slowed_to_bytes_per_second",
            "To what the guest's writes are slowed; 0 if they are not",
            |tier| tier.slowed_to_bytes_a_second.unwrap_or_default(),
        ),
        ("tier_writes_wait", "1 while the guest's writes wait until something is published", |tier| {
            u64::from(tier.writes_wait)
        }),
        ("tier_flushes_wait", "Flushes of the guest that wait to be published", |tier| tier.flushes_wait),
    ];
    for (name, help, value) in numbers {
        let tiered = disks.iter().filter_map(|disk| Some((disk.name.as_str(), disk.tier.as_ref()?)));
        gauges(encoder, name, help, tiered.map(|(disk, tier)| ([("disk", disk)], value(tier))))?;
    }
    Ok(())
}

/// What is kept of layers that are in repositories.
fn tier_caches(caches: &[TierCache], encoder: &mut DescriptorEncoder) -> fmt::Result {
    let of_caches = |value: fn(&TierCache) -> u64| {
        caches.iter().map(move |cache| ([("directory", cache.directory.as_str())], value(cache)))
    };
    gauges(
        encoder,
        "tier_cache_bytes",
        "Bytes of repositories' layers on this host",
        of_caches(|cache| cache.bytes),
    )?;
    gauges(encoder, "tier_cache_max_bytes", "The most there should be", of_caches(|cache| cache.max_bytes))?;
    let help = "Chunks that came from repositories";
    let mut family =
        encoder.encode_descriptor("tier_cache_fetched_chunks", help, None, MetricType::Counter)?;
    for (labels, chunks) in of_caches(|cache| cache.fetched_chunks) {
        family.encode_family(&labels)?.encode_counter::<NoLabels, _, u64>(&chunks, None)?;
    }
    Ok(())
}

/// The log that makes flushes durable.
fn flush_log(log: &FlushLogStatus, encoder: &mut DescriptorEncoder) -> fmt::Result {
    for (name, help, value) in [
        ("flush_log_bytes", "Bytes of the flush log for flushed writes", log.bytes),
        (
            "flush_log_used_bytes",
            "Bytes that flushed writes take until they are synced to their images",
            log.used_bytes,
        ),
        ("flush_log_files", "Images that use the flush log", log.files),
        ("flush_log_waiting", "Flushes that wait for its next sync", log.waiting),
        ("flush_log_failed", "1: it takes no more, and its disks no writes", u64::from(log.failed.is_some())),
    ] {
        encoder.encode_descriptor(name, help, None, MetricType::Gauge)?.encode_gauge(&value)?;
    }
    for (name, help, value) in [
        ("flush_log_flushes", "Flushes that the flush log made durable", log.flushes),
        ("flush_log_syncs", "Its syncs for them", log.syncs),
    ] {
        let mut family = encoder.encode_descriptor(name, help, None, MetricType::Counter)?;
        family.encode_counter::<NoLabels, _, u64>(&value, None)?;
    }
    Ok(())
}

/// Which of an export's numbers.
type Count = fn(&ExportCounters) -> u64;

/// Counters have no exemplars, whose labels these would be.
type NoLabels = [(&'static str, &'static str); 0];

fn vhost_user(export: &ExportStatus) -> Option<([(&str, &str); 2], &ExportCounters)> {
    match &export.export {
        ExportSpec::VhostUser(spec) => Some((
            [("disk", spec.disk.as_str()), ("socket", spec.socket.as_str())],
            export.counters.as_ref()?,
        )),
        ExportSpec::Nbd(_) | ExportSpec::Fuse(_) => None,
    }
}

fn gauges<L: EncodeLabelSet>(
    encoder: &mut DescriptorEncoder,
    name: &str,
    help: &str,
    values: impl Iterator<Item = (L, u64)>,
) -> fmt::Result {
    let mut family = encoder.encode_descriptor(name, help, None, MetricType::Gauge)?;
    for (labels, value) in values {
        family.encode_family(&labels)?.encode_gauge(&value)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use vmstrata_api::ResourceStatus;

    use super::*;

    fn tier() -> TierStatus {
        TierStatus {
            group: None,
            state: TierState::Stalled,
            error: Some("no answer".to_owned()),
            stalled_seconds: Some(60),
            repository: "/nas/web.qcow2.tier".to_owned(),
            local: "/tier/web".to_owned(),
            owner: "0".repeat(32),
            published_by: "0".repeat(32),
            head: "head-000000000012".to_owned(),
            generation: 1,
            epoch: 12,
            epoch_age_seconds: 90,
            epoch_layers: 13,
            unpublished_bytes: 4096,
            unpublished_seconds: Some(80),
            reads_wait_seconds: Some(5),
            mount_warnings: Vec::new(),
            advice: Vec::new(),
            cache: None,
            window_seconds: 30,
            on_outage: vmstrata_api::OnOutage::Continue,
            durability: vmstrata_api::DurableAt::Host,
            held_seconds: None,
            ships_bytes_a_second: None,
            slowed_to_bytes_a_second: Some(65536),
            writes_wait: false,
            flushes_wait: 2,
            pending_snapshots: Vec::new(),
        }
    }

    #[test]
    fn names_are_labels_and_hostile_ones_are_escaped() {
        let disk = DiskStatus {
            added: false,
            name: "we\"b\\".to_owned(),
            path: "/web.qcow2".to_owned(),
            file: None,
            state: DiskState::Serving,
            open_error: None,
            read_only: false,
            detect_zeroes: vmstrata_api::DetectZeroes::Off,
            subclusters: vmstrata_api::Subclusters::On,
            moving: None,
            tier: Some(tier()),
            limits: vmstrata_api::DiskLimits::default(),
            role: vmstrata_api::DiskRole::Disk,
            size_bytes: Some(1 << 30),
            layers: Some(300),
            failed: Some("EIO".to_owned()),
            finalizing: true,
            finalize_failures: 4,
            metadata_hits: 0,
            metadata_misses: 0,
        };
        let status = ServerStatus {
            version: "1.2.3".to_owned(),
            pid: 1,
            uptime_seconds: 7,
            io_uring_refused: None,
            resources: ResourceStatus::default(),
            flush_log: Some(FlushLogStatus {
                used_bytes: 8192,
                flushes: 9,
                syncs: 4,
                failed: Some("EIO".to_owned()),
                ..FlushLogStatus::default()
            }),
            tier_caches: vec![TierCache {
                directory: "/tier/cache".to_owned(),
                bytes: 512,
                max_bytes: 1024,
                fetched_chunks: 3,
            }],
            disks: vec![disk],
            exports: Vec::new(),
        };
        let counted =
            Counted { snapshots: 3, snapshot_pause_us: 1500, jobs_ended: [5, 0, 1], ..Counted::default() };
        let text = encode(Numbers {
            status,
            stats: Vec::new(),
            jobs: Vec::new(),
            counted,
            process: Process::default(),
        });
        for line in [
            r#"vmstrata_build_info{version="1.2.3"} 1"#,
            r#"vmstrata_uptime_seconds 7"#,
            "vmstrata_io_uring 1",
            r#"vmstrata_disk_size_bytes{disk="we\"b\\"} 1073741824"#,
            r#"vmstrata_disk_layers{disk="we\"b\\"} 300"#,
            r#"vmstrata_disk_failed{disk="we\"b\\"} 1"#,
            r#"vmstrata_disk_finalizing{disk="we\"b\\"} 1"#,
            r#"vmstrata_disk_finalize_failures_total{disk="we\"b\\"} 4"#,
            r#"vmstrata_tier_epoch{disk="we\"b\\"} 12"#,
            r#"vmstrata_tier_unpublished_bytes{disk="we\"b\\"} 4096"#,
            r#"vmstrata_tier_unpublished_seconds{disk="we\"b\\"} 80"#,
            r#"vmstrata_tier_stalled{disk="we\"b\\"} 1"#,
            r#"vmstrata_tier_fenced{disk="we\"b\\"} 0"#,
            r#"vmstrata_tier_reads_wait_seconds{disk="we\"b\\"} 5"#,
            r#"vmstrata_tier_cache_bytes{directory="/tier/cache"} 512"#,
            r#"vmstrata_tier_cache_fetched_chunks_total{directory="/tier/cache"} 3"#,
            r#"vmstrata_tier_slowed_to_bytes_per_second{disk="we\"b\\"} 65536"#,
            r#"vmstrata_tier_writes_wait{disk="we\"b\\"} 0"#,
            r#"vmstrata_tier_flushes_wait{disk="we\"b\\"} 2"#,
            r#"vmstrata_tier_held{disk="we\"b\\"} 0"#,
            "vmstrata_flush_log_used_bytes 8192",
            "vmstrata_flush_log_failed 1",
            "vmstrata_flush_log_flushes_total 9",
            "vmstrata_flush_log_syncs_total 4",
            "vmstrata_snapshots_total 3",
            "vmstrata_snapshot_pause_seconds_total 0.0015",
            r#"vmstrata_jobs{state="running"} 0"#,
            r#"vmstrata_jobs_ended_total{how="failed"} 1"#,
            "vmstrata_retention_failures_total 0",
            "# EOF",
        ] {
            assert!(text.lines().any(|found| found == line), "{line} is not in\n{text}");
        }
    }
}
