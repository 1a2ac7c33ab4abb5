//! The pointers of an index in memory: 16 bytes a page, and a copy of the path where something changes.
//!
//! ```text
//!   above[1]            top
//!   above[0]      a ────┴──── b        pointers to inner pages
//!                 │           │
//!   nodes      256 pointers  256 pointers   to leaves (of the map) or to pages of the layer table
//! ```
//!
//! Invariants: there is always one inner page at least, unless nothing is below at all; a node without a pointer to
//! any page takes no memory; pointers past the number of leaves are holes.

use std::collections::BTreeSet;

use vmstrata_qcow2::index::{FANOUT, IndexError, Page, PagePointer, decode_inner, encode_inner};
use vmstrata_types::LayerIndex;

use crate::error::Result;

type Node = Box<[PagePointer; FANOUT]>;

/// See the module documentation.
#[derive(Clone, Debug, Default)]
pub(super) struct Tree {
    leaves: u64,
    nodes: Vec<Option<Node>>,
    above: Vec<Vec<PagePointer>>,
    /// Nodes that differ from their page.
    dirty: BTreeSet<usize>,
}

/// Inner pages of each level, lowest first: the last level is the top.
fn widths(leaves: u64) -> Vec<usize> {
    let mut width = usize::try_from(leaves.div_ceil(FANOUT as u64)).expect("leaves are bounded").max(1);
    let mut widths = vec![width];
    while width > 1 {
        width = width.div_ceil(FANOUT);
        widths.push(width);
    }
    widths
}

impl Tree {
    /// A tree of holes.
    pub(super) fn new(leaves: u64) -> Self {
        let above: Vec<_> = widths(leaves).into_iter().map(|width| vec![PagePointer::HOLE; width]).collect();
        Self { leaves, nodes: vec![None; above[0].len()], above, dirty: BTreeSet::new() }
    }

    /// Reads the inner pages below `top`.
    ///
    /// Bounded by `leaves`, whatever the pages say. `highest` is the newest layer that may be named.
    ///
    /// # Errors
    /// Those of `read`, and pages that are no inner pages of this tree.
    pub(super) fn load(
        top: PagePointer,
        leaves: u64,
        highest: LayerIndex,
        read: &mut impl FnMut(PagePointer) -> Result<Box<Page>>,
    ) -> Result<Self> {
        let mut tree = Self::new(leaves);
        *tree.above.last_mut().expect("a level").first_mut().expect("a top") = top;
        for level in (0..tree.above.len()).rev() {
            for number in 0..tree.above[level].len() {
                let pointer = tree.above[level][number];
                if pointer.is_hole() {
                    continue;
                }
                let node = decode_inner(&*read(pointer)?)?;
                if let Some(bad) = node.iter().find(|pointer| pointer.layer() > highest) {
                    return Err(IndexError::Layer { layer: bad.layer() }.into());
                }
                tree.put_node(level, number, node)?;
            }
        }
        Ok(tree)
    }

    fn put_node(&mut self, level: usize, number: usize, node: Node) -> Result<()> {
        let first = number * FANOUT;
        let width = if level == 0 { self.leaves as usize } else { self.above[level - 1].len() };
        let count = FANOUT.min(width - first.min(width));
        if node[count..].iter().any(|pointer| !pointer.is_hole()) {
            return Err(IndexError::Field { field: "pointers past the last", value: width as u64 }.into());
        }
        if level == 0 {
            self.nodes[number] = Some(node);
        } else {
            self.above[level - 1][first..first + count].copy_from_slice(&node[..count]);
        }
        Ok(())
    }

    pub(super) fn top(&self) -> PagePointer {
        self.above.last().expect("a level")[0]
    }

    pub(super) fn leaves(&self) -> u64 {
        self.leaves
    }

    /// The pointer to leaf `number`; a hole past the end.
    pub(super) fn get(&self, number: u64) -> PagePointer {
        let number = usize::try_from(number).unwrap_or(usize::MAX);
        match self.nodes.get(number / FANOUT) {
            Some(Some(node)) => node[number % FANOUT],
            _ => PagePointer::HOLE,
        }
    }

    /// Points leaf `number` to another page.
    ///
    /// # Panics
    /// Past the end.
    pub(super) fn set(&mut self, number: u64, pointer: PagePointer) {
        assert!(number < self.leaves, "a leaf past the end");
        let number = number as usize;
        let node = &mut self.nodes[number / FANOUT];
        let node = node.get_or_insert_with(|| Box::new([PagePointer::HOLE; FANOUT]));
        if node[number % FANOUT] != pointer {
            node[number % FANOUT] = pointer;
            self.dirty.insert(number / FANOUT);
        }
    }

    /// Makes the tree longer, with holes, or shorter.
    pub(super) fn resize(&mut self, leaves: u64) {
        if leaves == self.leaves {
            return;
        }
        let mut resized = Self::new(leaves);
        for (number, node) in self.nodes.drain(..).enumerate().take(resized.nodes.len()) {
            resized.nodes[number] = node;
        }
        for (new, old) in resized.above.iter_mut().zip(&self.above) {
            let count = new.len().min(old.len());
            new[..count].copy_from_slice(&old[..count]);
        }
        let last = resized.nodes.len() - 1;
        let kept = leaves as usize - last * FANOUT;
        if let Some(Some(node)) = resized.nodes.get_mut(last) {
            node[kept..].fill(PagePointer::HOLE);
        }
        resized.dirty = std::mem::take(&mut self.dirty).into_iter().filter(|&node| node < last).collect();
        // The path to the end is written anew: it is one level longer or shorter, or ends earlier.
        resized.dirty.extend([0, last]);
        *self = resized;
    }

    /// Has the next [`Tree::seal`] write all inner pages.
    pub(super) fn touch(&mut self) {
        self.dirty.extend(0..self.nodes.len());
    }

    /// Inner pages of a tree without holes.
    pub(super) fn inner_pages(leaves: u64) -> u64 {
        widths(leaves).iter().sum::<usize>() as u64
    }

    /// Writes the inner pages on the way to what changed, lowest first.
    ///
    /// # Errors
    /// Those of `write`.
    pub(super) fn seal(&mut self, write: &mut impl FnMut(&Page) -> Result<PagePointer>) -> Result<()> {
        let mut dirty = std::mem::take(&mut self.dirty);
        for level in 0..self.above.len() {
            let mut parents = BTreeSet::new();
            for number in dirty {
                let pointers = self.children(level, number);
                let pointer = if pointers.iter().all(|pointer| pointer.is_hole()) {
                    PagePointer::HOLE
                } else {
                    write(&encode_inner(pointers))?
                };
                self.above[level][number] = pointer;
                parents.insert(number / FANOUT);
            }
            dirty = parents;
        }
        Ok(())
    }

    fn children(&self, level: usize, number: usize) -> &[PagePointer] {
        if level == 0 {
            return self.nodes[number].as_ref().map_or(&[], |node| &node[..]);
        }
        let below = &self.above[level - 1];
        &below[number * FANOUT..below.len().min((number + 1) * FANOUT)]
    }

    /// Leaves whose pointers `same` calls different, in order. Whole nodes that are the same page cost one comparison.
    pub(super) fn differing<'a>(
        &'a self,
        other: &'a Self,
        same: impl Fn(PagePointer, PagePointer) -> bool + Copy + 'a,
    ) -> impl Iterator<Item = u64> + 'a {
        let nodes = self.nodes.len().max(other.nodes.len());
        let page = |tree: &Self, number| tree.above[0].get(number).copied().unwrap_or_default();
        (0..nodes).filter(move |&number| !same(page(self, number), page(other, number))).flat_map(
            move |number| {
                let first = (number * FANOUT) as u64;
                (first..first + FANOUT as u64).filter(move |&leaf| !same(self.get(leaf), other.get(leaf)))
            },
        )
    }
}

#[cfg(test)]
mod tests;
