//! Chains and layers, as the report has them.

use serde::Serialize;
use vmstrata_types::path_to_text;

use crate::deep::LayerUse;
use crate::graph::Graph;
use crate::model::{self, Cost};
use crate::risk::{RiskKind, Severity};

/// A disk: its active layer and all below it.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct Chain {
    /// The active layer's file.
    pub path: String,
    /// Where the active layer is in the report's `layers`.
    pub top: usize,
    /// Whether the active layer's header could be read.
    pub known: bool,
    /// Bytes the guest sees.
    pub virtual_size: u64,
    /// Layers, as far down as the chain can be followed.
    pub layers: u32,
    /// Those of them, the active layer excepted, that another chain uses too.
    pub shared: u32,
    /// Bytes that its files take on the host, those it shares included.
    pub allocated: u64,
    /// Internal snapshots of the active layer.
    pub internal_snapshots: u32,
    /// Whether a process has the active layer open for writing.
    pub in_use: bool,
    /// The worst of its risks.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub severity: Option<Severity>,
    /// The kinds of its risks, its own and those of the layers below, worst first.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub risks: Vec<RiskKind>,
    /// What it costs stock QEMU and vmstrata.
    #[serde(flatten)]
    pub cost: Cost,
}

/// A layer's file.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct Layer {
    /// The file.
    pub path: String,
    /// `qcow2`, `raw`, or `unknown` where the header cannot be used.
    pub format: &'static str,
    /// Bytes the guest would see.
    pub virtual_size: u64,
    /// Bytes the file takes on the host.
    pub allocated: u64,
    /// The snapshot that it is, as an overlay of it says, unless that is half deleted.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub snapshot: Option<String>,
    /// Its backing file's name as stored.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub backing_filename: Option<String>,
    /// Where the layer below is in this list.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub below: Option<usize>,
    /// Its place in its chains, counted from the base, which is 0.
    pub depth: u32,
    /// Layers that stand directly on it.
    pub overlays: u32,
    /// Chains that it belongs to.
    pub chains: u32,
    /// Layers of the longest of them.
    pub longest_chain: u32,
    /// Bytes of its clusters in use, where its tables were read.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mapped: Option<u64>,
    /// Those of them that no disk surveyed can see.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub hidden: Option<u64>,
}

pub(super) fn chains(graph: &Graph<'_>) -> Vec<Chain> {
    graph.tops.iter().map(|&top| chain(graph, top)).collect()
}

fn chain(graph: &Graph<'_>, top: usize) -> Chain {
    let (image, stack) = (&graph.images[top], &graph.stacks[top]);
    Chain {
        path: path_to_text(&image.path),
        top,
        known: image.fault.is_none(),
        virtual_size: image.virtual_size,
        layers: stack.layers,
        shared: stack.shared,
        allocated: stack.allocated,
        internal_snapshots: image.qcow2.as_ref().map_or(0, |facts| facts.internal_snapshots),
        in_use: image.writer,
        severity: stack.risks.severity(),
        risks: stack.risks.kinds().collect(),
        cost: model::cost(stack.layers, image.virtual_size, stack.footprint),
    }
}

pub(super) fn layers(graph: &Graph<'_>, deep: Option<&[Option<LayerUse>]>) -> Vec<Layer> {
    let read = |at: usize| deep.and_then(|layers| layers[at].as_ref()).filter(|layer| layer.fault.is_none());
    let longest = longest_chains(graph);
    let mut names = snapshot_names(graph);
    let layers = graph.images.iter().enumerate().map(|(at, image)| Layer {
        path: path_to_text(&image.path),
        format: match (&image.qcow2, &image.fault) {
            (Some(_), _) => "qcow2",
            (None, None) => "raw",
            (None, Some(_)) => "unknown",
        },
        virtual_size: image.virtual_size,
        allocated: image.allocated,
        snapshot: names[at].take(),
        backing_filename: image.qcow2.as_ref().and_then(|facts| facts.backing_name.clone()),
        below: graph.below[at],
        depth: graph.stacks[at].layers - 1,
        overlays: graph.users[at],
        chains: graph.chains[at],
        longest_chain: longest[at],
        mapped: read(at).map(|layer| layer.mapped),
        hidden: read(at).map(|layer| layer.hidden),
    });
    layers.collect()
}

/// For each layer the name that the first of its overlays gives it.
fn snapshot_names(graph: &Graph<'_>) -> Vec<Option<String>> {
    let mut names: Vec<Option<String>> = vec![None; graph.images.len()];
    for (image, below) in graph.images.iter().zip(&graph.below) {
        let snapshot = image.qcow2.as_ref().and_then(|facts| facts.snapshot.as_ref());
        if let (Some(below), Some((name, _))) = (below, snapshot)
            && !graph.images[*below].qcow2.as_ref().is_some_and(|facts| facts.half_deleted)
        {
            names[*below].get_or_insert_with(|| name.clone());
        }
    }
    names
}

/// For each layer the length of the longest chain it belongs to: handed down from the tops, longest first, so that
/// every layer is visited once.
fn longest_chains(graph: &Graph<'_>) -> Vec<u32> {
    let mut longest = vec![0; graph.images.len()];
    let mut tops = graph.tops.clone();
    tops.sort_by_key(|&top| std::cmp::Reverse(graph.stacks[top].layers));
    for top in tops {
        let mut next = Some(top);
        while let Some(at) = next.filter(|&at| longest[at] == 0) {
            longest[at] = graph.stacks[top].layers;
            next = graph.below[at];
        }
    }
    longest
}
