//! `vmstrata status`: what a running server serves.

use std::process::ExitCode;

use anyhow::Result;
use vmstrata_api::{DiskState, DiskStatus, ExportSpec, ExportStatus, FlushLogStatus, ServerStatus};

use crate::args::StatusArgs;
use crate::client::Client;
use crate::commands::tier;
use crate::output::{Table, answer, counted, share, share_of};
use crate::units::short_size;

/// Shows the server's disks and exports.
///
/// # Errors
/// When no server answers.
pub fn run(args: &StatusArgs) -> Result<ExitCode> {
    let status: ServerStatus = Client::new(&args.server)?.get("/v1/status")?;
    answer(args.json, &status, || to_text(&status))?;
    Ok(ExitCode::SUCCESS)
}

fn to_text(status: &ServerStatus) -> String {
    let mut disks = Table::new(["DISK", "STATE", "MODE", ">SIZE", ">LAYERS", ">HITS", "FILE"]);
    status.disks.iter().for_each(|disk| disks.row(disk_row(disk)));
    let mut exports = Table::new([">EXPORT", "KIND", "DISK", "AT", "USE"]);
    status.exports.iter().for_each(|export| exports.row(export_row(export)));
    let log = flush_log(status).unwrap_or_default();
    let lines = [failures(status), tiers(status), moves(status), log].concat();
    format!("{}\n\n{disks}{lines}\n{exports}", headline(status))
}

/// The line that says which server this is and how full it is.
pub fn headline(status: &ServerStatus) -> String {
    let used = &status.resources;
    format!(
        "vmstrata {}, process {}, up {}; metadata {} of {}, layer files {} of {}",
        status.version,
        status.pid,
        duration(status.uptime_seconds),
        short_size(used.metadata_cache_bytes),
        short_size(used.metadata_cache_max_bytes),
        used.open_files,
        used.open_files_max,
    )
}

/// A line for each disk that takes no more writes, for each disk and export that is not open, and for a host without io_uring.
pub fn failures(status: &ServerStatus) -> String {
    let failed = status.disks.iter().filter_map(|disk| Some((&disk.name, disk.failed.as_ref()?)));
    let failed = failed.map(|(name, why)| format!("{name} takes no more writes: {why}\n"));
    let disks = status.disks.iter().filter_map(|disk| Some((&disk.name, disk.open_error.as_ref()?)));
    let disks = disks.map(|(name, why)| format!("{name} is not open, and is tried again: {why}\n"));
    let exports = status.exports.iter().filter_map(|export| Some((export.id, export.open_error.as_ref()?)));
    let exports = exports.map(|(id, why)| format!("export {id} is not open, and is tried again: {why}\n"));
    let slow = status.io_uring_refused.iter();
    let slow = slow.map(|why| format!("io_uring is refused, and threads carry requests out: {why}\n"));
    failed.chain(disks).chain(exports).chain(slow).collect()
}

/// A line for each tiered disk: what of it is published; and for each cache of what is read from repositories.
pub fn tiers(status: &ServerStatus) -> String {
    let tiers = status.disks.iter().filter_map(|disk| Some((&disk.name, disk.tier.as_ref()?)));
    let tiers = tiers.map(|(name, tier)| format!("{name}: {}\n", tier::line(tier)));
    let caches = status.tier_caches.iter().map(|cache| format!("{}\n", tier::cache_line(cache)));
    tiers.chain(caches).collect()
}

/// A line for the flush log.
fn flush_log(status: &ServerStatus) -> Option<String> {
    let FlushLogStatus { path, bytes, used_bytes, files, flushes, syncs, failed, .. } =
        status.flush_log.as_ref()?;
    let (used, all) = (short_size(*used_bytes), short_size(*bytes));
    let syncs = counted(*syncs, "sync");
    let failed = failed.as_ref().map(|why| format!("; FAILED: {why}")).unwrap_or_default();
    Some(format!(
        "flush log {path}: {used} of {all}, {}, {syncs} for {flushes} flushes{failed}\n",
        counted(*files, "image")
    ))
}

/// A line for each disk that moves, or has moved a while ago.
fn moves(status: &ServerStatus) -> String {
    let moving = status.disks.iter().filter_map(|disk| Some((&disk.name, disk.moving.as_ref()?)));
    moving.map(|(name, moving)| format!("{name}: {}\n", super::moving::line(moving))).collect()
}

/// What a disk is doing, in a word or two.
pub fn state(disk: &DiskStatus) -> &'static str {
    match disk.state {
        DiskState::Opening => "opening",
        DiskState::Serving if disk.failed.is_some() => "failed",
        DiskState::Serving if disk.finalizing => "serving, indexing",
        DiskState::Serving => "serving",
        DiskState::Closing => "closing",
        DiskState::Waiting => "not open",
    }
}

/// Whether it may be written.
pub fn mode(disk: &DiskStatus) -> &'static str {
    if disk.read_only { "read-only" } else { "writable" }
}

fn disk_row(disk: &DiskStatus) -> [String; 7] {
    let shown = |value: Option<String>| value.unwrap_or_else(|| "-".to_owned());
    [
        disk.name.clone(),
        state(disk).to_owned(),
        if disk.added { format!("{}, added", mode(disk)) } else { mode(disk).to_owned() },
        shown(disk.size_bytes.map(short_size)),
        shown(disk.layers.map(|layers| layers.to_string())),
        share(share_of(disk.metadata_hits, disk.metadata_misses)),
        disk.path.clone(),
    ]
}

fn export_row(export: &ExportStatus) -> [String; 5] {
    let (kind, disk) = match &export.export {
        ExportSpec::VhostUser(spec) => ("vhost-user", spec.disk.as_str()),
        ExportSpec::Nbd(spec) if !spec.allow.is_empty() => ("nbd, by client", "(all)"),
        ExportSpec::Nbd(spec) if spec.rw => ("nbd, rw", "(all)"),
        ExportSpec::Nbd(_) => ("nbd", "(all)"),
        ExportSpec::Fuse(spec) if spec.rw => ("files, rw", "(all)"),
        ExportSpec::Fuse(_) => ("files", "(all)"),
    };
    let used = match (&export.export, export.connections.unwrap_or_default()) {
        _ if export.open_error.is_some() => "not open".to_owned(),
        (ExportSpec::Nbd(_), connections) => counted(connections, "connection"),
        (ExportSpec::Fuse(_), open) => format!("{open} open"),
        (ExportSpec::VhostUser(_), guests) => {
            let requests = counted(export.counters.unwrap_or_default().requests, "request");
            format!("{}, {requests}", if guests > 0 { "guest attached" } else { "no guest" })
        }
    };
    [export.id.to_string(), kind.to_owned(), disk.to_owned(), export.export.place().to_owned(), used]
}

/// `3 s`, `5 min 3 s`, `2 h 5 min`, `4 d 2 h`: the two largest units that say something.
pub fn duration(seconds: u64) -> String {
    let units = [
        ("d", seconds / 86_400),
        ("h", seconds / 3600 % 24),
        ("min", seconds / 60 % 60),
        ("s", seconds % 60),
    ];
    let from = units.iter().position(|(_, count)| *count > 0).unwrap_or(units.len() - 1);
    let shown = units[from..].iter().take(2).filter(|(_, count)| *count > 0 || seconds == 0);
    shown.map(|(unit, count)| format!("{count} {unit}")).collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_have_their_two_largest_units() {
        for (seconds, shown) in [
            (0, "0 s"),
            (3, "3 s"),
            (303, "5 min 3 s"),
            (7500, "2 h 5 min"),
            (86_400, "1 d"),
            (352_800, "4 d 2 h"),
        ] {
            assert_eq!(duration(seconds), shown);
        }
    }
}
