//! Clusters that no disk can see any more, from the L2 tables: what merging would give back.
//!
//! A layer's cluster is *hidden* when every disk that stands on the layer has something newer in its place. Such
//! clusters are there only for going back to a snapshot; when no snapshot is to be kept, merging gives them back.
//! Going from the tops down, what is hidden from a layer is what *all* its overlays hide, each by itself or because it
//! was hidden from it already:
//!
//! ```text
//!   hidden(top) = nothing        hidden(layer) = ∩ over its overlays o of  hidden(o) ∪ own(o) ∪ [size(o), ∞)
//! ```
//!
//! What is not known counts as seen, so the figure is never too high for the disks surveyed: an overlay whose tables
//! cannot be read hides nothing, a raw layer has no clusters to give back, and where there is no memory left for
//! [`RUNS_MAX`] runs a layer hides nothing more. A disk on these layers that was not surveyed may see more.

mod ranges;

use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};

use parking_lot::Mutex;
use serde::Serialize;
use vmstrata_disk::own_clusters;
use vmstrata_store::{Gate, on_threads};

use self::ranges::Ranges;
use crate::crawl::Found;
use crate::graph::Graph;
use crate::image::Fault;
use crate::limits;

/// Runs of hidden bytes kept for one tree of layers at a time, in 16 bytes each.
const RUNS_MAX: usize = 16 << 20;

/// What the tables of all layers say.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct Deep {
    /// Layers whose tables were read.
    pub layers_read: u64,
    /// Layers whose tables could not be read.
    pub layers_failed: u64,
    /// Bytes of clusters in use.
    pub mapped_bytes: u64,
    /// Bytes of clusters that no disk surveyed can see.
    pub hidden_bytes: u64,
}

/// What the tables of one layer say.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct LayerUse {
    pub(crate) mapped: u64,
    pub(crate) hidden: u64,
    /// Why there is nothing to be said.
    pub(crate) fault: Option<Fault>,
}

/// Reads the tables of every qcow2 layer; `None` for the others.
pub(crate) fn read(graph: &Graph<'_>, gate: &Gate, threads: usize) -> Vec<Option<LayerUse>> {
    let trees = trees(graph);
    let next = AtomicUsize::new(0);
    let found = Mutex::new(vec![None; graph.images.len()]);
    on_threads(threads.clamp(1, limits::THREADS_MAX), || {
        while let Some(tree) = trees.get(next.fetch_add(1, Ordering::Relaxed)) {
            let uses = Tree { graph, gate, waiting: HashMap::new(), runs: 0 }.read(tree);
            let mut found = found.lock();
            uses.into_iter().for_each(|(at, layer)| found[at] = Some(layer));
        }
    });
    found.into_inner()
}

/// Tells the images what their tables turned out to be.
pub(crate) fn blame(found: &mut Found, layers: &[Option<LayerUse>]) {
    for (image, layer) in found.images.iter_mut().zip(layers) {
        let is_open = image.is_open();
        if let (Some(facts), Some(layer), false) = (&mut image.qcow2, layer, is_open) {
            facts.tables = layer.fault.clone().or(facts.tables.take());
        }
    }
}

/// Sums up over all layers.
pub(crate) fn sum(layers: &[Option<LayerUse>]) -> Deep {
    let mut deep = Deep::default();
    for layer in layers.iter().flatten() {
        deep.layers_read += u64::from(layer.fault.is_none());
        deep.layers_failed += u64::from(layer.fault.is_some());
        deep.mapped_bytes = deep.mapped_bytes.saturating_add(layer.mapped);
        deep.hidden_bytes = deep.hidden_bytes.saturating_add(layer.hidden);
    }
    deep
}

/// The layers of each tree that grows from one base, tops first; loops have no base and are left out.
fn trees(graph: &Graph<'_>) -> Vec<Vec<usize>> {
    let mut base: Vec<Option<usize>> = vec![None; graph.images.len()];
    let mut trees: HashMap<usize, Vec<usize>> = HashMap::new();
    for &at in &graph.bottom_up {
        base[at] = match graph.below[at] {
            None => Some(at),
            Some(below) => base[below],
        };
        if let Some(base) = base[at] {
            trees.entry(base).or_default().push(at);
        }
    }
    let mut trees: Vec<Vec<usize>> = trees.into_values().collect();
    trees.iter_mut().for_each(|tree| tree.reverse());
    // The largest first, so that the threads end together.
    trees.sort_by_key(|tree| std::cmp::Reverse((tree.len(), tree[0])));
    trees
}

/// What is hidden from a layer by those of its overlays that were read.
struct Waiting {
    overlays: u32,
    hidden: Ranges,
}

/// One tree while it is read.
struct Tree<'a> {
    graph: &'a Graph<'a>,
    gate: &'a Gate,
    waiting: HashMap<usize, Waiting>,
    /// Runs in `waiting`.
    runs: usize,
}

impl Tree<'_> {
    fn read(mut self, tree: &[usize]) -> Vec<(usize, LayerUse)> {
        tree.iter().filter_map(|&at| self.layer(at).map(|layer| (at, layer))).collect()
    }

    fn layer(&mut self, at: usize) -> Option<LayerUse> {
        let image = &self.graph.images[at];
        let hidden = self.hidden(at);
        let mut own = Ranges::default();
        let mut layer = LayerUse::default();
        let mut hidden_from = hidden.follower();
        let has_tables = image.qcow2.is_some() && !self.graph.used_as_raw[at];
        if has_tables {
            let read = own_clusters(&image.path, self.gate, |cluster| {
                let (start, end) = (cluster.range.start.get(), cluster.range.end().get());
                layer.mapped = layer.mapped.saturating_add(cluster.host_bytes);
                if hidden_from.covers(start, end) {
                    layer.hidden = layer.hidden.saturating_add(cluster.host_bytes);
                }
                own.push(start, end);
            });
            if let Err(error) = read {
                own = Ranges::default();
                layer = LayerUse { fault: Some(Fault::of(&error)), ..LayerUse::default() };
            }
        }
        // Several entries may claim one cluster of a damaged file: it gives back no more than it takes.
        layer.mapped = layer.mapped.min(image.allocated);
        layer.hidden = layer.hidden.min(layer.mapped);
        if let Some(below) = self.graph.below[at] {
            own.push(image.virtual_size, u64::MAX);
            self.hand_down(below, hidden.union(&own));
        }
        has_tables.then_some(layer)
    }

    /// What all overlays of `at` hide from it.
    fn hidden(&mut self, at: usize) -> Ranges {
        let Some(waiting) = self.waiting.remove(&at) else { return Ranges::default() };
        self.runs -= waiting.hidden.len();
        // An overlay in a loop, or one that is itself read as raw, was not read: it may see everything.
        if waiting.overlays == self.graph.users[at] { waiting.hidden } else { Ranges::default() }
    }

    fn hand_down(&mut self, below: usize, hidden: Ranges) {
        let (overlays, mut together) = match self.waiting.remove(&below) {
            None => (1, hidden),
            Some(others) => {
                self.runs -= others.hidden.len();
                (others.overlays + 1, others.hidden.intersection(&hidden))
            }
        };
        if self.runs + together.len() > RUNS_MAX {
            together = Ranges::default();
        }
        self.runs += together.len();
        self.waiting.insert(below, Waiting { overlays, hidden: together });
    }
}
