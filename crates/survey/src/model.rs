//! What a chain costs stock QEMU and what it costs vmstrata: a model, stated, and the curves that were measured.
//!
//! | | stock QEMU, each disk by itself | vmstrata, one server |
//! |---|---|---|
//! | memory, at least | 138 KiB a layer | 7 MiB, and 512 bytes a layer file |
//! | memory, at most | and an L2 cache a layer: the layer's L2 tables, 32 MiB at most | and 8 bytes a cluster of each disk, 64 MiB for all disks together |
//! | open, reads per second | measured over chain length | measured over chain length |
//!
//! A layer's L2 tables are no larger than what maps its whole disk, and no larger than its file. The curves are those of
//! `docs/measurements/chain.json`: one disk of 4 GiB, page cache warm, on the machine named there. Between measured
//! lengths they are interpolated (both axes logarithmic); past the longest one its value stands, which flatters stock.

use std::sync::OnceLock;

use serde::Serialize;
use serde_json::Value;

use crate::image::Image;

/// State that stock QEMU keeps for each layer.
pub(crate) const STOCK_LAYER_BYTES: u64 = 138 << 10;
/// Most that stock QEMU's L2 cache of one layer holds by default.
pub(crate) const STOCK_CACHE_BYTES_MAX: u64 = 32 << 20;
/// What a server of vmstrata takes before it has disks.
pub(crate) const OURS_BASE_BYTES: u64 = 7 << 20;
/// What it keeps for each layer file, about.
pub(crate) const OURS_LAYER_BYTES: u64 = 512;
/// What its map needs for each cluster of a disk.
pub(crate) const OURS_ENTRY_BYTES: u64 = 8;
/// Default budget of the map and cache of all its disks.
pub(crate) const OURS_CACHE_BYTES_MAX: u64 = 64 << 20;

const MEASURED: &str = include_str!("../../../docs/measurements/chain.json");

/// What the layers of a chain add up to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Footprint {
    /// Bytes of stock's L2 caches, at most.
    pub(crate) stock_caches: u64,
    /// Smallest cluster size of the chain, as a power of two.
    pub(crate) unit_bits: u32,
}

impl Default for Footprint {
    fn default() -> Self {
        // A chain of raw files alone has no clusters; the map then works in these.
        Self { stock_caches: 0, unit_bits: vmstrata_types::ClusterBits::DEFAULT.get() }
    }
}

impl Footprint {
    pub(crate) fn with(self, layer: Self) -> Self {
        Self {
            stock_caches: self.stock_caches.saturating_add(layer.stock_caches),
            unit_bits: self.unit_bits.min(layer.unit_bits),
        }
    }
}

/// What one layer adds.
pub(crate) fn layer(image: &Image) -> Footprint {
    let Some(facts) = &image.qcow2 else { return Footprint::default() };
    let tables = entries_bytes(image.virtual_size, facts.cluster_bits.get());
    Footprint {
        stock_caches: tables.min(image.allocated).min(STOCK_CACHE_BYTES_MAX),
        unit_bits: facts.cluster_bits.get(),
    }
}

/// Bytes that 8 bytes for each cluster of a disk make.
fn entries_bytes(size: u64, cluster_bits: u32) -> u64 {
    size.div_ceil(1 << cluster_bits).saturating_mul(OURS_ENTRY_BYTES)
}

/// What a chain costs both; bytes, seconds, requests per second.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct Cost {
    /// Memory of stock QEMU with empty caches.
    pub stock_memory_min: u64,
    /// Memory of stock QEMU with full caches.
    pub stock_memory_max: u64,
    /// Memory that vmstrata's map of the disk takes when all of it is in use.
    pub map_memory_max: u64,
    /// Time that stock QEMU takes to open the chain.
    pub stock_open_s: f64,
    /// Time that vmstrata takes.
    pub open_s: f64,
    /// Random reads of 4 KiB per second at queue depth 32 with stock QEMU.
    pub stock_reads_per_s: f64,
    /// The same with vmstrata.
    pub reads_per_s: f64,
    /// Whether the chain is longer than any that was measured.
    pub beyond_measured: bool,
}

/// The cost of a chain of `layers` layers with this footprint, for a disk of `size` bytes.
pub(crate) fn cost(layers: u32, size: u64, footprint: Footprint) -> Cost {
    let curves = Curves::measured();
    let at = f64::from(layers.max(1));
    let stock_memory_min = u64::from(layers) * STOCK_LAYER_BYTES;
    Cost {
        stock_memory_min,
        stock_memory_max: stock_memory_min.saturating_add(footprint.stock_caches),
        map_memory_max: entries_bytes(size, footprint.unit_bits).min(OURS_CACHE_BYTES_MAX),
        stock_open_s: curves.stock_open.at(at),
        open_s: curves.open.at(at),
        stock_reads_per_s: curves.stock_reads.at(at),
        reads_per_s: curves.reads.at(at),
        beyond_measured: at > curves.stock_reads.longest(),
    }
}

/// A figure over chain length, ascending.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Curve(Vec<(f64, f64)>);

impl Curve {
    /// The value at `layers`: measured, or between two that were.
    pub(crate) fn at(&self, layers: f64) -> f64 {
        let above = self.0.partition_point(|(x, _)| *x < layers);
        match (above.checked_sub(1).map(|below| self.0[below]), self.0.get(above).copied()) {
            (Some((x0, y0)), Some((x1, y1))) => {
                let share = (layers / x0).ln() / (x1 / x0).ln();
                (y0.ln() + share * (y1 / y0).ln()).exp()
            }
            (Some((_, y)), None) | (None, Some((_, y))) => y,
            (None, None) => f64::NAN,
        }
    }

    fn longest(&self) -> f64 {
        self.0.last().map_or(0.0, |(x, _)| *x)
    }
}

/// The measured curves.
pub(crate) struct Curves {
    pub(crate) stock_open: Curve,
    pub(crate) open: Curve,
    pub(crate) stock_reads: Curve,
    pub(crate) reads: Curve,
    /// When and on what they were measured.
    pub(crate) source: String,
}

impl Curves {
    /// Those of the file that this program was built with.
    pub(crate) fn measured() -> &'static Self {
        static CURVES: OnceLock<Curves> = OnceLock::new();
        CURVES.get_or_init(|| {
            let file: Value =
                serde_json::from_str(MEASURED).expect("the measurements in the source are JSON");
            Self {
                stock_open: curve(&file, "open", "qemu"),
                open: curve(&file, "open", "vmstrata"),
                stock_reads: curve(&file, "random_read32", "qemu"),
                reads: curve(&file, "random_read32", "vmstrata"),
                source: source(&file),
            }
        })
    }
}

fn curve(file: &Value, figure: &str, server: &str) -> Curve {
    let cells = file["cells"].as_array().map_or(&[][..], Vec::as_slice);
    let mut points: Vec<(f64, f64)> = cells
        .iter()
        .filter(|cell| cell["figure"] == figure && cell["server"] == server)
        .filter_map(|cell| Some((cell["layers"].as_f64()?, cell["median"].as_f64()?)))
        .filter(|(layers, value)| *layers >= 1.0 && *value > 0.0)
        .collect();
    points.sort_by(|a, b| a.0.total_cmp(&b.0));
    Curve(points)
}

fn source(file: &Value) -> String {
    let text = |value: &Value| value.as_str().unwrap_or("?").to_owned();
    let stock = file["versions"][0][1].as_str().unwrap_or("?");
    let version = stock.split_whitespace().nth(2).unwrap_or(stock);
    let machine = &file["machine"];
    format!(
        "{}, {} cores of {}, QEMU {version}",
        text(&file["date"]),
        machine["cores"],
        text(&machine["cpu"])
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::image::tests::qcow2_image;

    #[test]
    fn the_measurements_in_the_source_have_all_curves() {
        let curves = Curves::measured();
        for curve in [&curves.stock_open, &curves.open, &curves.stock_reads, &curves.reads] {
            assert!(curve.0.len() >= 3, "{curve:?}");
            assert!(curve.0.is_sorted_by(|a, b| a.0 < b.0), "{curve:?}");
            assert!(curve.longest() >= 1000.0, "{curve:?}");
        }
        assert!(!curves.source.contains('?'), "{}", curves.source);
    }

    #[test]
    fn a_curve_goes_through_its_points_and_stays_level_past_its_ends() {
        let curve = Curve(vec![(1.0, 100.0), (10.0, 10.0), (1000.0, 0.1)]);
        assert_eq!(curve.at(1.0), 100.0);
        assert!((curve.at(10.0) - 10.0).abs() < 1e-9);
        assert!((curve.at(100.0) - 1.0).abs() < 1e-9, "{}", curve.at(100.0));
        assert_eq!(curve.at(5000.0), 0.1);
        assert_eq!(curve.at(0.5), 100.0);
    }

    #[test]
    fn memory_of_1000_layers_is_what_was_measured_within_a_quarter() {
        let size = 4 << 30;
        let image = Image { virtual_size: size, allocated: 4 << 20, ..qcow2_image("a", None) };
        let footprint = (0..1000).fold(Footprint::default(), |sum, _| sum.with(layer(&image)));
        let cost = cost(1000, size, footprint);
        let file: Value = serde_json::from_str(MEASURED).unwrap();
        let measured = curve(&file, "memory", "qemu").at(1000.0) * f64::from(1 << 20);
        assert!(((cost.stock_memory_max as f64) / measured - 1.0).abs() < 0.25, "{cost:?} {measured}");
        assert!(cost.stock_memory_min < cost.stock_memory_max);
        assert_eq!(cost.map_memory_max, (4 << 30 >> 16) * 8);
        assert!(!cost.beyond_measured);
    }

    #[test]
    fn a_hostile_size_saturates() {
        let image = Image { virtual_size: u64::MAX, ..qcow2_image("a", None) };
        let cost = cost(1, u64::MAX, layer(&image));
        assert_eq!(cost.map_memory_max, OURS_CACHE_BYTES_MAX);
        assert!(cost.stock_memory_max <= STOCK_LAYER_BYTES + STOCK_CACHE_BYTES_MAX);
    }
}
