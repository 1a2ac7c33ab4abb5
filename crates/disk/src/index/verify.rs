//! `vmstrata index verify`: every index of a chain, word by word, against the layers' tables.
//!
//! Layers are taken from the base up, so that each is read once for a level: the words so far are the truth for its index, and of
//! that only the pages need be read that the index below does not share. The second level is compared as who reads it sees it: where
//! no word of the first is split, what that one says of the parts.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::path::{Path, PathBuf};

use vmstrata_qcow2::index::{Home, LEAF_WORDS, LayerRecord, MAX_LEAVES, Stamp};
use vmstrata_types::ClusterBits;

use super::build::{IndexOptions, Links};
use super::leaves::{Merger, units_of};
use super::load::{Found, load};
use super::looks::Looks;
use super::{Index, IndexKind, IndexLayer};
use crate::chain::Top;
use crate::entry::MapEntry;
use crate::error::{Error, IoContext as _, Result};
use crate::levels::{Level, MapPage, Words};
use crate::opener::Role;

/// Leaves whose words are kept at once: 64 MiB at most.
const WINDOW: u64 = 16_384;

/// What an index is worth.
#[derive(Debug)]
pub enum IndexVerdict {
    /// It says what the tables say.
    Good {
        /// How much of the map its own pages have.
        kind: IndexKind,
        /// Bytes of these.
        bytes: u64,
    },
    /// The layer needs none.
    NotNeeded,
    /// There is none, or none that can be read.
    Missing,
    /// A layer below, or the layer itself, was changed since.
    Stale {
        /// The lowest changed layer's file.
        changed: PathBuf,
    },
    /// Pages that are not what they should be: noticed when they are read, and made again from tables.
    Damaged {
        /// How many.
        pages: u64,
        /// What is wrong with the first.
        first: Error,
    },
    /// Pages that look right and say something else than the tables: whatever made them, drop the index.
    Wrong {
        /// How many.
        pages: u64,
        /// Guest offset that the first differing word speaks for.
        at: u64,
    },
}

/// A layer and its index.
#[derive(Debug)]
pub struct VerifiedFile {
    /// The layer's file.
    pub path: PathBuf,
    /// Its index.
    pub verdict: IndexVerdict,
}

/// Compares every index of the chain of the disk at `path` with the tables.
///
/// # Errors
/// A chain that cannot be read, tables included.
pub fn verify(path: &Path, options: &IndexOptions) -> Result<Vec<VerifiedFile>> {
    let chain = Links::read(path, options)?;
    let tops = chain.links.iter().map(|link| Ok(bare(&chain.open(link, Role::Inspected)?)));
    let layers = tops.collect::<Result<Vec<IndexLayer>>>()?;
    let mut run = Verifier { chain: &chain, layers: &layers, looks: Looks::default(), found: Vec::new() };
    run.found.extend(layers.iter().map(|_| Counts::default()));
    for level in [Level::First, Level::Second] {
        for number in 0..MAX_LEAVES.div_ceil(WINDOW) {
            let more = run.window(level, number * WINDOW..(number + 1) * WINDOW, options)?;
            if !more {
                break;
            }
        }
    }
    let verdict = |(layer, counts): (&IndexLayer, Counts)| VerifiedFile {
        path: layer.path.clone(),
        verdict: counts.verdict(),
    };
    Ok(layers.iter().zip(run.found).map(verdict).collect())
}

/// A layer as its header describes it; nobody asks for its digest.
fn bare(top: &Top) -> IndexLayer {
    let tables =
        top.head.as_ref().map(|head| super::write::record_tables(&crate::layer::Tables::of(&head.header)));
    let stamp = Stamp { len: top.opened.identity.len, mtime_ns: None };
    let record = LayerRecord { size: top.size, tables, backing: None, stamp, digest: [0; 32] };
    IndexLayer { path: top.path.clone(), identity: top.opened.identity, record, home: Home::None }
}

#[derive(Debug, Default)]
struct Counts {
    /// What the first window found out.
    whole: Option<IndexVerdict>,
    damaged: u64,
    first: Option<Error>,
    wrong: u64,
    at: u64,
}

impl Counts {
    fn is_sound(&self) -> bool {
        self.damaged == 0 && self.wrong == 0
    }

    fn verdict(self) -> IndexVerdict {
        match (self.whole, self.first) {
            _ if self.wrong > 0 => IndexVerdict::Wrong { pages: self.wrong, at: self.at },
            (_, Some(first)) => IndexVerdict::Damaged { pages: self.damaged, first },
            (whole, None) => whole.unwrap_or(IndexVerdict::Missing),
        }
    }
}

struct Verifier<'a> {
    chain: &'a Links,
    layers: &'a [IndexLayer],
    looks: Looks,
    found: Vec<Counts>,
}

impl Verifier<'_> {
    /// Verifies the leaves of a level in `window` of every index; says whether any has more.
    fn window(&mut self, level: Level, window: Range<u64>, options: &IndexOptions) -> Result<bool> {
        let is_first = level == Level::First && window.start == 0;
        let mut truth: BTreeMap<u64, Box<Words>> = BTreeMap::new();
        let mut unit = None;
        let mut previous: Option<Index> = None;
        let mut more = false;
        for (number, link) in self.chain.links.iter().enumerate() {
            let below = &self.layers[..=number];
            let units = units_of(below);
            let Some(now) = units.get(level) else { continue };
            let from = if unit == Some(now) { number } else { 0 };
            if from == 0 {
                (truth, previous) = (BTreeMap::new(), None);
            }
            unit = Some(now);
            more |= units.pages(level, self.layers[number].record.size) > window.end;
            let merger =
                Merger { layers: below, unit: now, gate: &self.chain.gate, opener: &*self.chain.opener };
            let touched = absorb(&mut truth, merger.merge(from, window.clone())?);
            let top = self.chain.open(link, Role::Inspected)?;
            previous = match load(&top, &self.chain.gate, &self.chain.opener, &mut self.looks) {
                // One of another chain could be whole, too, if a file was replaced meanwhile.
                Found::Whole(index) if index.layer().index() == number => {
                    let leaves = to_compare(&index, level, previous.as_ref(), &window, &touched);
                    self.compare(number, &index, level, leaves, &truth);
                    // One with a bad page vouches for none: the index above may share it.
                    self.found[number].is_sound().then_some(*index)
                }
                found => {
                    if is_first {
                        self.found[number].whole = Some(unusable(found, &top));
                    }
                    None
                }
            };
            options.tell(number + 1, self.layers.len());
        }
        Ok(more)
    }

    fn compare(
        &mut self,
        number: usize,
        index: &Index,
        level: Level,
        leaves: Vec<u64>,
        truth: &BTreeMap<u64, Box<Words>>,
    ) {
        let unit = index.units().of(level);
        let visible = Visible::of(&self.layers[..=number], unit);
        let nothing: Words = [0; LEAF_WORDS];
        let counts = &mut self.found[number];
        counts.whole.get_or_insert(IndexVerdict::Good { kind: index.kind(), bytes: index.bytes() });
        for leaf in leaves {
            if index.is_hole(MapPage { level, number: leaf }) && !truth.contains_key(&leaf) {
                continue;
            }
            let read = |page: MapPage| {
                let read = index.read_leaf(page, |layer, at, page| {
                    let link = &self.chain.links[layer.index()];
                    let top = self.chain.open(link, Role::Inspected)?;
                    top.opened.store.read_exact(&mut page[..], at).while_trying("read the index")
                });
                read.map_err(|error| (page.level, error))
            };
            let words = match index.units().words(unit, leaf, read) {
                Ok(words) => index.with_deltas(leaf, unit, words),
                // Counted when that level was compared.
                Err((Level::First, _)) if level == Level::Second => continue,
                Err((_, error)) => {
                    counts.damaged += 1;
                    counts.first.get_or_insert(error);
                    continue;
                }
            };
            let expected = truth.get(&leaf).map_or(&nothing, |words| words);
            if let Some(at) = visible.difference(leaf, &words, expected) {
                counts.at = if counts.wrong == 0 { at } else { counts.at };
                counts.wrong += 1;
            }
        }
    }
}

/// Puts what newer layers say over what older ones say; returns which leaves that touches.
fn absorb(truth: &mut BTreeMap<u64, Box<Words>>, newer: BTreeMap<u64, Box<Words>>) -> BTreeSet<u64> {
    let touched = newer.keys().copied().collect();
    for (leaf, words) in newer {
        let old = truth.entry(leaf).or_insert_with(|| Box::new([0; LEAF_WORDS]));
        old.iter_mut().zip(words.iter()).for_each(|(old, new)| *old = (*old).max(*new));
    }
    touched
}

fn unusable(found: Found, top: &Top) -> IndexVerdict {
    match found {
        Found::ChangedFrom(changed) => IndexVerdict::Stale { changed },
        _ if top.head.is_none() => IndexVerdict::NotNeeded,
        _ => IndexVerdict::Missing,
    }
}

/// The leaves of a level of `index` in `window` that the verified index below does not vouch for.
fn to_compare(
    index: &Index,
    level: Level,
    previous: Option<&Index>,
    window: &Range<u64>,
    touched: &BTreeSet<u64>,
) -> Vec<u64> {
    let end = window.end.min(index.tree(level).leaves());
    let Some(previous) = previous else { return (window.start..end).collect() };
    let mut leaves: BTreeSet<u64> = previous.differing(index, level).into_iter().collect();
    leaves.extend(touched);
    // Past the end of the one below, there is nothing that it vouches for.
    leaves.extend(previous.tree(level).leaves().saturating_sub(1)..end);
    leaves.into_iter().filter(|leaf| (window.start..end).contains(leaf)).collect()
}

/// Up to where each layer can be seen from the newest: the size rule of [`crate::map`].
struct Visible {
    ends: Vec<u64>,
    unit: ClusterBits,
}

impl Visible {
    fn of(layers: &[IndexLayer], unit: ClusterBits) -> Self {
        let mut end = u64::MAX;
        let mut ends: Vec<u64> = Vec::with_capacity(layers.len());
        for layer in layers.iter().rev() {
            end = end.min(layer.record.size);
            ends.push(end);
        }
        ends.reverse();
        Self { ends, unit }
    }

    /// The guest offset of the first word that matters and is not the same.
    fn difference(&self, leaf: u64, one: &Words, other: &Words) -> Option<u64> {
        let first = (leaf * LEAF_WORDS as u64) << self.unit.get();
        let offset = |number: usize| first + ((number as u64) << self.unit.get());
        let pairs = one.iter().zip(other.iter()).enumerate();
        pairs
            .map(|(number, (one, other))| (offset(number), *one, *other))
            .find_map(|(at, one, other)| (self.seen(at, one) != self.seen(at, other)).then_some(at))
    }

    /// The word as whoever reads through it sees it: 0 where its layer is hidden.
    fn seen(&self, at: u64, word: u64) -> u64 {
        let layer = MapEntry::from_word(word).layer();
        if self.ends.get(layer.index()).is_some_and(|&end| at < end) { word } else { 0 }
    }
}
