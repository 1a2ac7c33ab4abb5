//! `vmstrata disk show`: a disk of a running server, what was done to it, and its chain.

use vmstrata_api::{
    DepthStats, DetectZeroes, DiskDetail, DiskLimits, DiskRole, DiskStats, Format, KindStats, Latency,
    LayerStatus, Subclusters,
};

use crate::commands::serve::attachments;
use crate::commands::status::{mode, state};
use crate::commands::tier;
use crate::commands::top::time;
use crate::output::{Table, counted};
use crate::units::short_size;

/// All that is known of the server's disk of this number, from 0, as a person reads it.
pub fn to_text(shown: &DiskDetail, number: usize) -> String {
    let disk = &shown.disk;
    let size = disk.size_bytes.map_or_else(|| "-".to_owned(), short_size);
    let layers = counted(disk.layers.unwrap_or_default(), "layer");
    let mut text =
        format!("{}: {}, {}, {size}, {layers}, {}\n", disk.name, state(disk), mode(disk), disk.path);
    text.extend(disk.failed.iter().map(|why| format!("  takes no more writes: {why}\n")));
    text.extend(disk.open_error.iter().map(|why| format!("  not open, and tried again: {why}\n")));
    text += match disk.detect_zeroes {
        DetectZeroes::Off => "",
        DetectZeroes::On => "  detect-zeroes=on\n",
        DetectZeroes::Unmap => "  detect-zeroes=unmap\n",
    };
    if disk.subclusters == Subclusters::Off {
        text += "  subclusters=off\n";
    }
    if disk.role != DiskRole::Disk {
        text += &format!("  role={}: its file goes with it\n", disk.role.as_str());
    }
    if disk.limits != DiskLimits::default() {
        text += &format!("  limits: {}\n", disk.limits);
    }
    if let Some(moving) = &disk.moving {
        text += &format!("  {}\n", crate::commands::moving::line(moving));
    }
    if let Some(tier) = &disk.tier {
        text += &format!("  tier: {}\n", tier::line(tier));
    }
    text += &attachments(&disk.name, number, &shown.exports);
    if let Some(stats) = &shown.stats {
        text += &format!("\n{}{}", requests(stats), depths(&stats.read_depths));
    }
    text + &format!("\n{}", chain(&shown.chain))
}

fn requests(stats: &DiskStats) -> Table<6> {
    let mut table = Table::new(["SINCE IT WAS OPENED", ">REQUESTS", ">BYTES", ">ERRORS", ">p50", ">p99"]);
    let mut row = |what: &str, kind: &KindStats, times: Option<&Latency>| {
        let times = times.filter(|_| kind.requests > 0);
        let bound = |share| time(times.and_then(|times| times.quantile_ns(share)).map(|ns| ns as f64 / 1e3));
        table.row([
            what.to_owned(),
            kind.requests.to_string(),
            short_size(kind.bytes),
            kind.errors.to_string(),
            bound(0.5),
            bound(0.99),
        ]);
    };
    row("reads", &stats.read, Some(&stats.read_latency));
    row("writes", &stats.write, Some(&stats.write_latency));
    // Their times are not kept apart.
    row("flushes", &stats.flush, Some(&stats.other_latency));
    row("discards", &stats.discard, Some(&stats.other_latency));
    row("writes of zeros", &stats.write_zeroes, Some(&stats.other_latency));
    row("prefetches", &stats.prefetch, None);
    table
}

/// Which layers reads took their bytes from.
fn depths(depths: &[DepthStats]) -> String {
    let from = |depth: &DepthStats| {
        let bytes = short_size(depth.bytes);
        match (depth.from, depth.to) {
            (0, _) => format!("{bytes} from the active layer"),
            (from, to) if from == to => format!("{bytes} from {from} below"),
            (from, to) => format!("{bytes} from {from} to {to} below"),
        }
    };
    let parts: Vec<String> = depths.iter().filter(|depth| depth.bytes > 0).map(from).collect();
    if parts.is_empty() { String::new() } else { format!("read: {}\n", parts.join(", ")) }
}

/// The newest layer first.
fn chain(layers: &[LayerStatus]) -> Table<6> {
    let mut table = Table::new([">LAYER", "FORMAT", ">SIZE", ">CLUSTERS", ">LENGTH", "FILE"]);
    for layer in layers.iter().rev() {
        table.row([
            layer.index.to_string(),
            match layer.format {
                Format::Qcow2 => "qcow2".to_owned(),
                Format::Raw => "raw".to_owned(),
            },
            short_size(layer.size_bytes),
            layer.cluster_size_bytes.map_or_else(|| "-".to_owned(), short_size),
            short_size(layer.file_bytes),
            layer.path.clone(),
        ]);
    }
    table
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn depths_are_said_from_the_active_layer_down() {
        let depth = |from, to, bytes| DepthStats { from, to, bytes };
        let said = depths(&[depth(0, 0, 4096), depth(1, 1, 0), depth(2, 3, 8192)]);
        assert_eq!(said, "read: 4 KiB from the active layer, 8 KiB from 2 to 3 below\n");
        assert_eq!(depths(&[]), "");
    }
}
