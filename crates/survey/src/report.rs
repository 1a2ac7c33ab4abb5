//! The result as data: everything that the renderings show, and `--json` prints. The keys are [`SCHEMA`].
//!
//! Its size is linear in the images found: each layer is there once, and a chain names only its top.

mod chains;
mod snapshots;

use std::time::{SystemTime, UNIX_EPOCH};

use serde::Serialize;
use vmstrata_types::path_to_text;

pub use self::chains::{Chain, Layer};
pub use self::snapshots::{SnapshotPoint, Snapshots};
use crate::SurveyOptions;
pub use crate::crawl::Omitted;
use crate::crawl::{Found, LeftOut};
pub use crate::deep::Deep;
use crate::deep::{self, LayerUse};
use crate::graph::Graph;
use crate::history::{self, Growth, Surveyed};
pub use crate::model::Cost;
use crate::model::{self, Curves};
use crate::risk::{RiskKind, Severity};
pub use crate::stats::Summary;
pub use crate::times::TimeSource;

/// The version of the keys: raised when one changes its meaning or goes, not when one is added.
pub const SCHEMA: u32 = 1;

/// What a survey found.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct Report {
    /// [`SCHEMA`].
    pub schema: u32,
    /// When the survey was made, in seconds since 1970.
    pub made_at: u64,
    /// What was looked at, as paths from the root of the host's files.
    pub roots: Vec<String>,
    /// Chains of more layers are called long.
    pub long_chain: usize,
    /// What was found on the way.
    pub scanned: Scanned,
    /// What the chains are like, all together.
    pub summary: Totals,
    /// When snapshots were taken.
    pub snapshots: Snapshots,
    /// The longest chain over time.
    pub growth: Growth,
    /// What all chains cost, and the model behind it.
    pub savings: Savings,
    /// What the L2 tables say, where they were read.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub deep: Option<Deep>,
    /// Risks, worst first, each at the layer it comes from.
    pub risks: Vec<Risk>,
    /// Every chain, in order of its top's path.
    pub chains: Vec<Chain>,
    /// Every layer, in order of its path; `below` counts in this list.
    pub layers: Vec<Layer>,
}

/// What was found on the way.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct Scanned {
    /// Regular files met below the roots.
    pub files: u64,
    /// Directories entered.
    pub directories: u64,
    /// Images among the files.
    pub images: u64,
    /// Files and directories that could not be read, and that nothing calls images.
    pub unreadable: Omitted,
    /// Symbolic links, which are not followed.
    pub links: Omitted,
    /// FIFOs, sockets, devices, directories of the kernel's.
    pub special: Omitted,
    /// Overlays of snapshots under way, or left by one that was killed.
    pub unfinished: Omitted,
    /// Layers that their disks let go of and that were left where they are; they are among the images, too.
    pub left_over: Omitted,
    /// Directories deeper than is looked.
    pub too_deep: Omitted,
    /// Images beyond the most that are taken in.
    pub too_many: Omitted,
}

/// What the chains are like, all together.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct Totals {
    /// Chains, one a disk.
    pub chains: u64,
    /// Chains that cannot be opened.
    pub chains_broken: u64,
    /// Chains that can, but have other risks.
    pub chains_suspect: u64,
    /// Layer files.
    pub layers: u64,
    /// Layers that belong to more than one chain.
    pub layers_shared: u64,
    /// Bytes that all layer files take on the host, each counted once.
    pub allocated_bytes: u64,
    /// Bytes of the disks, as their guests see them.
    pub virtual_size: Summary,
    /// Bytes that a chain's files take, those it shares included.
    pub chain_allocated: Summary,
    /// Bytes that a layer's file takes.
    pub layer_allocated: Summary,
    /// Layers of a chain.
    pub chain_length: Summary,
    /// For a layer: the length of the longest chain it belongs to.
    pub layer_chain_length: Summary,
    /// Backing files of a chain that another chain uses too.
    pub chain_shared: Summary,
    /// Chains that a layer belongs to.
    pub layer_chains: Summary,
}

/// What all chains cost, if each disk is open once.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct Savings {
    /// Memory of stock QEMU for all disks, with empty caches.
    pub stock_memory_min: u64,
    /// The same with full caches.
    pub stock_memory_max: u64,
    /// Memory of one vmstrata server for all disks, at most.
    pub memory_max: u64,
    /// Time to open all disks one after the other with stock QEMU, in seconds.
    pub stock_open_s: f64,
    /// The same with vmstrata.
    pub open_s: f64,
    /// Random reads per second of a chain with stock QEMU.
    pub stock_reads_per_s: Summary,
    /// The same with vmstrata.
    pub reads_per_s: Summary,
    /// Chains longer than any that was measured, whose figures are those of the longest.
    pub beyond_measured: u64,
    /// When and where the curves were measured.
    pub measured: String,
    /// How memory was reckoned.
    pub model: &'static str,
}

/// A risk, at the layer it comes from.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct Risk {
    /// What it is.
    pub kind: RiskKind,
    /// How bad it is.
    pub severity: Severity,
    /// The layer's file.
    pub path: String,
    /// In words.
    pub message: String,
    /// Chains that the layer belongs to.
    pub chains: u32,
}

impl Risk {
    /// Where and what: the message, after the layer's file where that is not in it. What is wrong with a backing file names
    /// that file, not the layer that names it.
    pub(crate) fn told(&self) -> String {
        let (path, message) = (&self.path, &self.message);
        if message.contains(path.as_str()) { message.clone() } else { format!("{path}: {message}") }
    }
}

const MODEL: &str = "stock QEMU, a disk: 138 KiB a layer, and at most an L2 cache a layer of what its L2 tables can take \
                     (whole disk / cluster size * 8 bytes; the file's size; 32 MiB; the least of these). vmstrata, one \
                     server: 7 MiB, 512 bytes a layer file, and at most 8 bytes a cluster of each disk, 64 MiB for all \
                     disks together.";

/// Puts the report together; `deep` is what the tables of each layer say, where they were read.
pub(crate) fn build(
    options: &SurveyOptions,
    found: &Found,
    graph: &Graph<'_>,
    deep: Option<&[Option<LayerUse>]>,
) -> Report {
    let chains = chains::chains(graph);
    let layers = chains::layers(graph, deep);
    let mut report = Report {
        schema: SCHEMA,
        made_at: SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |now| now.as_secs()),
        roots: found.roots.iter().map(|root| path_to_text(root)).collect(),
        long_chain: options.long_chain,
        scanned: scanned(found),
        summary: totals(&chains, &layers),
        snapshots: snapshots::snapshots(graph),
        growth: Growth { by_layers: history::by_layers(graph), surveys: Vec::new() },
        savings: savings(&chains, layers.len()),
        deep: deep.map(deep::sum),
        risks: risks(graph),
        chains,
        layers,
    };
    report.growth.surveys.push(Surveyed::of(&report));
    report
}

fn scanned(found: &Found) -> Scanned {
    Scanned {
        files: found.files,
        directories: found.directories,
        images: found.images.len() as u64,
        unreadable: found.omitted(LeftOut::Unreadable),
        links: found.omitted(LeftOut::Link),
        special: found.omitted(LeftOut::Special),
        unfinished: found.omitted(LeftOut::Unfinished),
        left_over: found.omitted(LeftOut::LeftOver),
        too_deep: found.omitted(LeftOut::TooDeep),
        too_many: found.omitted(LeftOut::TooMany),
    }
}

fn totals(chains: &[Chain], layers: &[Layer]) -> Totals {
    let with = |severity| chains.iter().filter(|chain| chain.severity == Some(severity)).count() as u64;
    // A header that cannot be read tells no size.
    let known = || chains.iter().filter(|chain| chain.known);
    Totals {
        chains: chains.len() as u64,
        chains_broken: with(Severity::Broken),
        chains_suspect: with(Severity::Suspect),
        layers: layers.len() as u64,
        layers_shared: layers.iter().filter(|layer| layer.chains > 1).count() as u64,
        allocated_bytes: layers.iter().map(|layer| layer.allocated).fold(0, u64::saturating_add),
        virtual_size: Summary::of(known().map(|chain| chain.virtual_size as f64)),
        chain_allocated: Summary::of(chains.iter().map(|chain| chain.allocated as f64)),
        layer_allocated: Summary::of(layers.iter().map(|layer| layer.allocated as f64)),
        chain_length: Summary::of(chains.iter().map(|chain| f64::from(chain.layers))),
        layer_chain_length: Summary::of(layers.iter().map(|layer| f64::from(layer.longest_chain))),
        chain_shared: Summary::of(chains.iter().map(|chain| f64::from(chain.shared))),
        layer_chains: Summary::of(layers.iter().map(|layer| f64::from(layer.chains))),
    }
}

fn savings(chains: &[Chain], layers: usize) -> Savings {
    let sum = |figure: fn(&Cost) -> u64| {
        chains.iter().map(|chain| figure(&chain.cost)).fold(0, u64::saturating_add)
    };
    let maps = sum(|cost| cost.map_memory_max).min(model::OURS_CACHE_BYTES_MAX);
    Savings {
        stock_memory_min: sum(|cost| cost.stock_memory_min),
        stock_memory_max: sum(|cost| cost.stock_memory_max),
        memory_max: model::OURS_BASE_BYTES + maps + layers as u64 * model::OURS_LAYER_BYTES,
        stock_open_s: seconds(chains.iter().map(|chain| chain.cost.stock_open_s)),
        open_s: seconds(chains.iter().map(|chain| chain.cost.open_s)),
        stock_reads_per_s: Summary::of(chains.iter().map(|chain| chain.cost.stock_reads_per_s)),
        reads_per_s: Summary::of(chains.iter().map(|chain| chain.cost.reads_per_s)),
        beyond_measured: chains.iter().filter(|chain| chain.cost.beyond_measured).count() as u64,
        measured: Curves::measured().source.clone(),
        model: MODEL,
    }
}

/// The sum of none is 0, and not -0, as `Sum` has it.
fn seconds(of_each: impl Iterator<Item = f64>) -> f64 {
    of_each.fold(0.0, |sum, one| sum + one)
}

fn risks(graph: &Graph<'_>) -> Vec<Risk> {
    let mut risks: Vec<Risk> = graph
        .risks
        .iter()
        .map(|risk| Risk {
            kind: risk.fault.kind,
            severity: risk.fault.kind.severity(),
            path: path_to_text(&graph.images[risk.image].path),
            message: risk.fault.message.clone(),
            chains: graph.chains[risk.image],
        })
        .collect();
    // Stable: within a kind the order is that of the paths.
    risks.sort_by_key(|risk| risk.kind);
    risks
}

impl Report {
    /// The worst that was found; `None` when no chain is at risk.
    pub fn severity(&self) -> Option<Severity> {
        self.chains.iter().filter_map(|chain| chain.severity).max()
    }

    /// Chains of more than one layer, longest first.
    pub(crate) fn longest_chains(&self) -> Vec<&Chain> {
        let mut chains: Vec<&Chain> = self.chains.iter().filter(|chain| chain.layers > 1).collect();
        chains.sort_by_key(|chain| std::cmp::Reverse(chain.layers));
        chains
    }

    /// Whether all that lies below the roots was looked at, but for links and special files.
    pub fn is_complete(&self) -> bool {
        let left_out = [&self.scanned.unreadable, &self.scanned.too_deep, &self.scanned.too_many];
        left_out.iter().all(|omitted| omitted.count == 0)
    }
}
