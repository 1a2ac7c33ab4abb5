use std::collections::HashMap;

use vmstrata_qcow2::index::{ChainId, PAGE_LEN};
use vmstrata_types::HostOffset;

use super::*;

const CHAIN: ChainId = ChainId([7; 16]);

/// Pages in memory, as a file of layer 0 would hold them.
#[derive(Default)]
struct Pages(HashMap<PagePointer, Box<Page>>);

impl Pages {
    fn write(&mut self, page: &Page) -> PagePointer {
        let at = HostOffset::new((self.0.len() as u64 + 1) * PAGE_LEN as u64);
        let pointer = PagePointer::new(&CHAIN, LayerIndex::BASE, at, 1, page);
        self.0.insert(pointer, Box::new(*page));
        pointer
    }

    fn seal(&mut self, tree: &mut Tree) -> usize {
        let before = self.0.len();
        tree.seal(&mut |page| Ok(self.write(page))).unwrap();
        self.0.len() - before
    }

    fn load(&self, tree: &Tree) -> Tree {
        let mut read = |pointer: PagePointer| Ok(self.0[&pointer].clone());
        Tree::load(tree.top(), tree.leaves(), LayerIndex::BASE, &mut read).unwrap()
    }
}

fn leaf(number: u64) -> PagePointer {
    let at = HostOffset::new((number + 1) << 20);
    PagePointer::new(&CHAIN, LayerIndex::BASE, at, 1, &[1; PAGE_LEN])
}

fn assert_same(one: &Tree, other: &Tree) {
    assert_eq!(one.leaves(), other.leaves());
    assert!((0..one.leaves() + 1000).all(|number| one.get(number) == other.get(number)));
}

#[test]
fn a_tree_reads_back_and_a_change_writes_its_path_only() {
    let mut pages = Pages::default();
    let mut tree = Tree::new(100_000);
    (0..100_000).step_by(3).for_each(|number| tree.set(number, leaf(number)));
    assert_eq!(pages.seal(&mut tree), 391 + 2 + 1);
    assert_same(&pages.load(&tree), &tree);
    tree.set(5, leaf(5));
    tree.set(6, leaf(6));
    assert_eq!(pages.seal(&mut tree), 3, "leaf 6 was there already, the path is three pages");
    assert_same(&pages.load(&tree), &tree);
    assert_eq!(pages.seal(&mut tree), 0);
}

#[test]
fn empty_parts_have_no_pages() {
    let mut pages = Pages::default();
    let mut tree = Tree::new(1 << 22);
    assert_eq!((pages.seal(&mut tree), tree.top()), (0, PagePointer::HOLE));
    tree.set((1 << 22) - 1, leaf(1));
    assert_eq!(pages.seal(&mut tree), 3);
    tree.set((1 << 22) - 1, PagePointer::HOLE);
    assert_eq!((pages.seal(&mut tree), tree.top()), (0, PagePointer::HOLE));
}

#[test]
fn growing_and_shrinking_keep_what_is_left() {
    for (from, to) in [(1u64, 257u64), (256, 70_000), (70_000, 300), (300, 256), (257, 1), (10, 0), (0, 300)]
    {
        let mut pages = Pages::default();
        let mut tree = Tree::new(from);
        (0..from).for_each(|number| tree.set(number, leaf(number)));
        pages.seal(&mut tree);
        tree.resize(to);
        pages.seal(&mut tree);
        let read = pages.load(&tree);
        assert_same(&read, &tree);
        assert!((0..to.min(from)).all(|number| read.get(number) == leaf(number)), "{from} to {to}");
        assert!((from.min(to)..from.max(to)).all(|number| read.get(number).is_hole()), "{from} to {to}");
    }
}

#[test]
fn differences_are_found_where_they_are() {
    let mut pages = Pages::default();
    let mut old = Tree::new(70_000);
    (0..70_000).for_each(|number| old.set(number, leaf(number)));
    pages.seal(&mut old);
    let mut new = old.clone();
    new.resize(70_100);
    for number in [0, 300, 69_999, 70_050] {
        new.set(number, leaf(number + 100_000));
    }
    pages.seal(&mut new);
    let found: Vec<u64> = old.differing(&new, |one, other| one == other).collect();
    assert_eq!(found, [0, 300, 69_999, 70_050]);
}

/// Pointers to one page from everywhere would otherwise be followed for ever.
#[test]
fn a_page_that_contains_itself_ends_with_the_leaves() {
    let top = leaf(0);
    let mut reads = 0;
    let mut read = |_| {
        reads += 1;
        Ok(encode_inner(&[leaf(0); FANOUT]))
    };
    Tree::load(top, 1 << 16, LayerIndex::BASE, &mut read).unwrap();
    assert_eq!(reads, 1 + 256);
    let mut read = |_| Ok(encode_inner(&[leaf(0); FANOUT]));
    assert!(Tree::load(top, 255, LayerIndex::BASE, &mut read).is_err(), "a pointer past the last leaf");
}

#[test]
fn layers_above_the_index_are_refused() {
    let above = PagePointer::new(&CHAIN, LayerIndex::new(9), HostOffset::new(4096), 1, &[0; PAGE_LEN]);
    let mut read = |_| Ok(encode_inner(&[above]));
    assert!(Tree::load(leaf(0), 10, LayerIndex::new(8), &mut read).is_err());
    assert!(Tree::load(leaf(0), 10, LayerIndex::new(9), &mut read).is_ok());
}
