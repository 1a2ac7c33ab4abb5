//! Chains out of files: who stands on whom, and what each layer gathers from those below it.
//!
//! Every image has at most one layer below it, so all of this is linear: what a layer gathers is computed once, from
//! what the layer below it has gathered, however many disks share it. Loops are found first and kept apart.

mod cycle;
mod links;

use std::collections::BTreeMap;

use vmstrata_disk::index::is_as_indexed;
use vmstrata_types::MAX_LAYERS;

use crate::crawl::Found;
use crate::image::{Fault, Image};
use crate::model::{self, Footprint};
use crate::risk::{RiskKind, RiskSet};
use crate::times;
use links::Links;

/// A risk, at the layer it comes from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Risk {
    /// The image it is a risk of.
    pub(crate) image: usize,
    pub(crate) fault: Fault,
}

/// What a layer and all below it sum up to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Stack {
    /// Layers, this one included.
    pub(crate) layers: u32,
    /// Bytes that their files take on the host.
    pub(crate) allocated: u64,
    /// Layers that more than one chain uses.
    pub(crate) shared: u32,
    pub(crate) footprint: Footprint,
    pub(crate) risks: RiskSet,
}

/// The images and how they stand on each other; every vector is indexed like `images`.
#[derive(Debug)]
pub(crate) struct Graph<'a> {
    pub(crate) images: &'a [Image],
    /// The layer below.
    pub(crate) below: Vec<Option<usize>>,
    /// Layers that stand directly on it.
    pub(crate) users: Vec<u32>,
    /// Chains that it is a layer of.
    pub(crate) chains: Vec<u32>,
    pub(crate) stacks: Vec<Stack>,
    /// The images that nothing stands on, and one of every loop that nothing leads into.
    pub(crate) tops: Vec<usize>,
    /// Images that an overlay reads as raw, whatever they look like.
    pub(crate) used_as_raw: Vec<bool>,
    /// The images that are on no loop, each after the layer below it.
    pub(crate) bottom_up: Vec<usize>,
    /// All risks, those of one image together.
    pub(crate) risks: Vec<Risk>,
}

impl<'a> Graph<'a> {
    /// The chains that the images form; more than `long_chain` layers are a risk.
    pub(crate) fn new(found: &'a Found, long_chain: usize) -> Self {
        let images = &found.images[..];
        let mut links = Links::new(found);
        let order = cycle::bottom_up(&links.below);
        for &at in &order.on_cycles {
            let message = format!("{}: the backing chain leads back to this file", images[at].path.display());
            links.fault(at, RiskKind::Loop, message);
        }
        let tops = tops(&links, &order);
        let mut graph = Self {
            images,
            chains: chains(&links.below, &order, &tops),
            stacks: vec![Stack::default(); images.len()],
            below: links.below,
            users: links.users,
            tops,
            used_as_raw: links.used_as_raw,
            bottom_up: Vec::new(),
            risks: Vec::new(),
        };
        graph.judge_layers(&mut links.faults);
        let own: Vec<RiskSet> = set_of_each(images.len(), &links.faults);
        graph.gather(&order, &own);
        graph.judge_lengths(&mut links.faults, long_chain);
        graph.bottom_up = order.acyclic;
        links.faults.sort_by_key(|(at, fault)| (*at, fault.kind));
        graph.risks = links.faults.into_iter().map(|(image, fault)| Risk { image, fault }).collect();
        graph
    }

    /// Risks that show in a layer or between it and its overlay.
    fn judge_layers(&self, faults: &mut Vec<(usize, Fault)>) {
        for (at, image) in self.images.iter().enumerate() {
            let name = image.path.display();
            let mut add = |kind, message| faults.push((at, Fault { kind, message }));
            if let Some(facts) = &image.qcow2 {
                if facts.marked_corrupt {
                    add(
                        RiskKind::MarkedCorrupt,
                        format!("{name}: marked corrupt; `vmstrata check` tells what is wrong"),
                    );
                }
                if let (Some(fault), false) = (&facts.tables, self.used_as_raw[at]) {
                    add(fault.kind, fault.message.clone());
                }
                if facts.half_deleted {
                    add(
                        RiskKind::HalfDeleted,
                        format!(
                            "{name}: deleting this snapshot was begun and not completed: delete it again"
                        ),
                    );
                }
                if (facts.marked_dirty || facts.in_session) && !image.writer {
                    add(
                        RiskKind::Unclean,
                        format!("{name}: its last writer did not close it, and none has it open now"),
                    );
                }
            }
            if image.writer && self.users[at] > 0 {
                let overlays = self.users[at];
                add(RiskKind::Written, format!("{name}: open for writing, with {overlays} overlay(s) on it"));
            }
        }
        self.judge_changes(faults);
    }

    /// Layers that changed under their overlays: one risk a layer, however many overlays it has.
    fn judge_changes(&self, faults: &mut Vec<(usize, Fault)>) {
        let mut changed: BTreeMap<usize, (String, u32)> = BTreeMap::new();
        for (at, image) in self.images.iter().enumerate().filter(|(at, _)| self.users[*at] > 0) {
            if written_since_indexed(image) {
                let message = format!(
                    "{}: another program had it open for writing since vmstrata made its index",
                    image.path.display()
                );
                faults.push((at, Fault { kind: RiskKind::Changed, message }));
            }
        }
        for (at, image) in self.images.iter().enumerate() {
            let Some(below) = self.below[at] else { continue };
            let layer = &self.images[below];
            // What vmstrata itself merges into a layer changes nothing of what it says; the layer's index is made then.
            if let Some(message) = times::changed_since(layer, image)
                && !written_since_indexed(layer)
                && !is_as_indexed(&layer.path)
            {
                changed.entry(below).or_insert((message, 0)).1 += 1;
            }
        }
        faults.extend(changed.into_iter().map(|(at, (message, overlays))| {
            let others = if overlays > 1 { format!(", and {} more", overlays - 1) } else { String::new() };
            (at, Fault { kind: RiskKind::Changed, message: message + &others })
        }));
    }

    /// Fills `stacks`, from the bottom up.
    fn gather(&mut self, order: &cycle::Order, own: &[RiskSet]) {
        for &at in &order.on_cycles {
            let lap = order.lap(&self.below, at);
            self.stacks[at] = lap.iter().fold(Stack::default(), |sum, &at| self.put_on(sum, at, own[at]));
        }
        for &at in &order.acyclic {
            let beneath = self.below[at].map_or_else(Stack::default, |below| self.stacks[below]);
            self.stacks[at] = self.put_on(beneath, at, own[at]);
        }
    }

    fn put_on(&self, beneath: Stack, at: usize, risks: RiskSet) -> Stack {
        let image = &self.images[at];
        Stack {
            layers: beneath.layers + 1,
            allocated: beneath.allocated.saturating_add(image.allocated),
            shared: beneath.shared + u32::from(self.chains[at] > 1),
            footprint: beneath.footprint.with(model::layer(image)),
            risks: beneath.risks.union(risks),
        }
    }

    /// Risks of a chain as a whole, put on its top.
    fn judge_lengths(&mut self, faults: &mut Vec<(usize, Fault)>, long_chain: usize) {
        for &top in &self.tops {
            let layers = self.stacks[top].layers as usize;
            let name = self.images[top].path.display();
            let (kind, message) = if layers > MAX_LAYERS {
                (RiskKind::TooLong, format!("{name}: a chain of {layers} layers, more than {MAX_LAYERS}"))
            } else if layers > long_chain {
                (RiskKind::Long, format!("{name}: a chain of {layers} layers, more than {long_chain}"))
            } else {
                continue;
            };
            self.stacks[top].risks.add(kind);
            faults.push((top, Fault { kind, message }));
        }
    }
}

fn written_since_indexed(image: &Image) -> bool {
    image.qcow2.as_ref().is_some_and(|facts| facts.written_since_indexed)
}

fn set_of_each(images: usize, faults: &[(usize, Fault)]) -> Vec<RiskSet> {
    let mut sets = vec![RiskSet::default(); images];
    faults.iter().for_each(|(at, fault)| sets[*at].add(fault.kind));
    sets
}

/// The images that nothing stands on, and the first of every loop that nothing leads into.
fn tops(links: &Links, order: &cycle::Order) -> Vec<usize> {
    let mut tops: Vec<usize> = (0..links.users.len()).filter(|&at| links.users[at] == 0).collect();
    let mut seen = vec![false; links.below.len()];
    for &at in &order.on_cycles {
        if seen[at] {
            continue;
        }
        let lap = order.lap(&links.below, at);
        lap.iter().for_each(|&at| seen[at] = true);
        if lap.iter().all(|&at| links.users[at] == 1) {
            tops.push(at);
        }
    }
    tops.sort_unstable();
    tops
}

/// How many chains each image is a layer of; from the tops down, each link once.
fn chains(below: &[Option<usize>], order: &cycle::Order, tops: &[usize]) -> Vec<u32> {
    let mut chains = vec![0u32; below.len()];
    tops.iter().for_each(|&top| chains[top] = 1);
    for &at in order.acyclic.iter().rev() {
        if let Some(below) = below[at] {
            chains[below] += chains[at];
        }
    }
    // All of a loop belongs to whatever leads into any part of it.
    let mut seen = vec![false; below.len()];
    for &at in &order.on_cycles {
        if !seen[at] {
            let lap = order.lap(below, at);
            let sum = lap.iter().map(|&at| chains[at]).sum();
            lap.iter().for_each(|&at| (chains[at], seen[at]) = (sum, true));
        }
    }
    chains
}

#[cfg(test)]
mod tests;
