//! The server's process and what it did by itself, as metrics.

use std::fmt;
use std::fs;

use prometheus_client::encoding::DescriptorEncoder;
use prometheus_client::metrics::MetricType;
use vmstrata_api::{JobState, JobStatus};

use super::{NoLabels, gauges};
use crate::host::Counted;

/// What the kernel says of this process; nothing where it says nothing.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Process {
    resident_bytes: Option<u64>,
    open_files: Option<u64>,
}

impl Process {
    pub(super) fn now() -> Self {
        let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
        // One of them is this look.
        let open_files = fs::read_dir("/proc/self/fd").ok().map(|open| open.count().saturating_sub(1) as u64);
        Self { resident_bytes: resident(&status), open_files }
    }
}

fn resident(status: &str) -> Option<u64> {
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kib << 10)
}

/// Encodes what is not about one disk or export.
pub(super) fn encode(
    process: Process,
    counted: Counted,
    jobs: &[JobStatus],
    encoder: &mut DescriptorEncoder,
) -> fmt::Result {
    for (name, help, value) in [
        ("process_resident_memory_bytes", "Memory of the server in RAM", process.resident_bytes),
        ("process_open_fds", "File descriptors of the server", process.open_files),
    ] {
        if let Some(value) = value {
            encoder.encode_descriptor(name, help, None, MetricType::Gauge)?.encode_gauge(&value)?;
        }
    }
    encode_jobs(counted, jobs, encoder)?;
    for (name, help, value) in [
        ("snapshots", "Snapshots that were taken", counted.snapshots),
        ("snapshot_failures", "Snapshots that were not taken, or not as asked", counted.snapshot_failures),
        (
            "retention_failures",
            "Times that snapshots which no rule keeps could not be deleted",
            counted.prune_failures,
        ),
    ] {
        let mut family = encoder.encode_descriptor(name, help, None, MetricType::Counter)?;
        family.encode_counter::<NoLabels, _, u64>(&value, None)?;
    }
    let help = "Seconds for which snapshots held writes, together";
    let mut family = encoder.encode_descriptor("snapshot_pause_seconds", help, None, MetricType::Counter)?;
    family.encode_counter::<NoLabels, _, u64>(&(counted.snapshot_pause_us as f64 / 1e6), None)
}

fn encode_jobs(counted: Counted, jobs: &[JobStatus], encoder: &mut DescriptorEncoder) -> fmt::Result {
    let states =
        [("running", JobState::Running), ("paused", JobState::Paused), ("cancelling", JobState::Cancelling)];
    let under_way = states.into_iter().map(|(name, state)| {
        ([("state", name)], jobs.iter().filter(|job| job.state == state).count() as u64)
    });
    gauges(encoder, "jobs", "Jobs under way", under_way)?;
    let help = "Jobs that ended, by how";
    let mut family = encoder.encode_descriptor("jobs_ended", help, None, MetricType::Counter)?;
    for (how, count) in ["done", "cancelled", "failed"].into_iter().zip(counted.jobs_ended) {
        family.encode_family(&[("how", how)])?.encode_counter::<NoLabels, _, u64>(&count, None)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernel_says_how_large_this_process_is() {
        assert_eq!(resident("VmPeak:\t 9 kB\nVmRSS:\t   1234 kB\n"), Some(1234 << 10));
        assert_eq!(resident("VmRSS: many"), None);
        let process = Process::now();
        assert!(process.resident_bytes > Some(0) && process.open_files > Some(2), "{process:?}");
    }
}
