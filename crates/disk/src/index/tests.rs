use std::path::Path;

use vmstrata_store::Segment;
use vmstrata_types::GuestOffset;

use super::leaves::Merger;
use super::*;
use crate::chain::open_layer;
use crate::create::{CreateOptions, create};
use crate::layer::Format;
use crate::opener::LocalFiles;
use crate::{Disk, OpenOptions, ResourceOptions, Resources};

fn scratch() -> tempfile::TempDir {
    let memory = Path::new("/dev/shm");
    if memory.is_dir() { tempfile::tempdir_in(memory) } else { tempfile::tempdir() }.unwrap()
}

/// Makes `name` on top of `below`, with a cluster of bytes at each of `writes`, and zeros in the cluster after it.
fn layer(dir: &Path, name: &str, below: Option<&str>, bits: u32, writes: &[u64]) -> PathBuf {
    let cluster_bits = ClusterBits::new(bits).unwrap();
    let options = CreateOptions { cluster_bits, ..CreateOptions::default() };
    make(dir, name, below, options, 1 << bits, writes)
}

/// The same of clusters of 128 KiB with subclusters of 4 KiB, with `len` bytes at each of `writes` and as many zeros after them.
fn split_layer(dir: &Path, name: &str, below: Option<&str>, len: u64, writes: &[u64]) -> PathBuf {
    let cluster_bits = ClusterBits::new(17).unwrap();
    let options = CreateOptions { cluster_bits, subclusters: true, ..CreateOptions::default() };
    make(dir, name, below, options, len, writes)
}

fn make(
    dir: &Path,
    name: &str,
    below: Option<&str>,
    options: CreateOptions,
    len: u64,
    writes: &[u64],
) -> PathBuf {
    let path = dir.join(name);
    let backing = below.map(|below| (PathBuf::from(below), Format::Qcow2));
    let size = options.size.or(Some(40 << 20));
    create(&path, &CreateOptions { size, backing, ..options }).unwrap();
    let disk =
        Disk::open(&path, &OpenOptions::default(), &Resources::new(ResourceOptions::default())).unwrap();
    for &at in writes {
        let mut bytes = vec![1; len as usize];
        disk.write(GuestOffset::new(at), &[Segment::from_mut(&mut bytes)]).unwrap();
        let after = vmstrata_types::GuestRange::new(GuestOffset::new(at + len), len);
        disk.write_zeroes(after, false).unwrap();
    }
    disk.close().unwrap();
    path
}

struct Kit {
    dir: tempfile::TempDir,
    gate: Gate,
    opener: Arc<dyn Opener>,
}

impl Kit {
    fn new() -> Self {
        let dir = scratch();
        let gate = Gate::new([dir.path()]).unwrap();
        Self { dir, gate, opener: Arc::new(LocalFiles) }
    }

    fn extend(&self, path: &Path, nearest: Option<&Index>) -> Index {
        let below = nearest.map_or(&[][..], |index| index.layers());
        extend(path, Format::Qcow2, below, nearest, &self.gate, &self.opener).unwrap()
    }

    fn load(&self, path: &Path) -> Found {
        let top = open_layer(path, Role::Frozen, None, &self.gate, &*self.opener).unwrap();
        load(&top, &self.gate, &self.opener, &mut Looks::default())
    }

    fn page(&self, index: &Index, number: u64, unit: ClusterBits) -> [u64; LEAF_WORDS] {
        let read = |layer: LayerIndex, at: HostOffset, page: &mut Page| {
            let path = &index.layers()[layer.index()].path;
            let opened = self.opener.open(path, Role::Inspected, &self.gate)?;
            opened.store.read_exact(&mut page[..], at).while_trying("read")
        };
        index.read_page(number, unit, read).unwrap()
    }

    /// The same from the tables.
    fn merged(&self, index: &Index, unit: ClusterBits, pages: u64) -> Vec<[u64; LEAF_WORDS]> {
        let merger = Merger { layers: index.layers(), unit, gate: &self.gate, opener: &*self.opener };
        let mut merged = merger.merge(0, 0..pages).unwrap();
        (0..pages).map(|number| merged.remove(&number).map_or([0; LEAF_WORDS], |words| *words)).collect()
    }

    /// All words of all levels are those of the tables.
    fn assert_like_tables(&self, index: &Index) {
        for unit in index.units().levels().map(|level| index.units().of(level)) {
            let pages = Root::leaves_of(40 << 20, unit);
            for (number, expected) in (0..).zip(self.merged(index, unit, pages)) {
                assert_eq!(self.page(index, number, unit), expected, "{:?}, {number}", index.layer());
            }
        }
    }
}

#[test]
fn an_index_that_was_written_loads_as_it_was_returned() {
    let kit = Kit::new();
    let base = layer(kit.dir.path(), "base", None, 16, &[0, 5 << 20, 33 << 20]);
    let first = kit.extend(&base, None);
    let top = layer(kit.dir.path(), "top", Some("base"), 16, &[1 << 20, 33 << 20]);
    let second = kit.extend(&top, Some(&first));
    let Found::Whole(loaded) = kit.load(&top) else { panic!("not found") };
    assert_eq!(
        (loaded.layer().get(), loaded.units().finest(), loaded.map.leaves()),
        (1, ClusterBits::DEFAULT, 2)
    );
    for (one, other) in loaded.layers().iter().zip(second.layers()) {
        assert_eq!(
            (&one.path, one.identity, &one.record, one.home),
            (&other.path, other.identity, &other.record, other.home)
        );
    }
    let merged = kit.merged(&loaded, loaded.units().finest(), loaded.map.leaves());
    for (number, expected) in (0..).zip(&merged) {
        assert_eq!(kit.page(&loaded, number, loaded.units().finest()), *expected);
        assert_eq!(kit.page(&second, number, second.units().finest()), *expected);
    }
    assert!(merged[0].iter().any(|&word| word >> 48 == 1) && merged[0].iter().any(|&word| word != 0));
    // The write at 33 MiB lies in the second leaf, that at 1 MiB in the first: both differ from the base's index.
    assert_eq!(first.differing(&loaded, Level::First), [0, 1]);
    assert_eq!(loaded.differing(&second, Level::First), [0; 0]);
}

impl Kit {
    /// The pages of the second level, and which of them the index has.
    fn second_level(&self, index: &Index) -> Vec<bool> {
        let unit = index.units().get(Level::Second).unwrap();
        let leaves = index.fine.leaves();
        for (number, expected) in (0..).zip(self.merged(index, unit, leaves)) {
            assert_eq!(self.page(index, number, unit), expected, "{number}");
        }
        (0..leaves).map(|number| !index.fine.get(number).is_hole()).collect()
    }
}

/// A leaf of words for 128 KiB has 32 leaves of words for 4 KiB below it.
#[test]
fn fine_leaves_are_there_where_words_are_split() {
    let kit = Kit::new();
    let some = |numbers: &[usize]| (0..32).map(|number| numbers.contains(&number)).collect::<Vec<_>>();
    let plain = kit.extend(&layer(kit.dir.path(), "0", None, 17, &[0, 6 << 20]), None);
    assert_eq!((plain.fine.leaves(), plain.units().get(Level::Second)), (0, None));
    // Writes a layer, and empty ones on it until one has a full index.
    let mut number = 0;
    let mut full_above = |below: &Index, len, writes: &[u64]| {
        let (mut writes, mut index) = (writes, None);
        loop {
            let below_name = number.to_string();
            number += 1;
            let path = split_layer(kit.dir.path(), &number.to_string(), Some(&below_name), len, writes);
            let next = kit.extend(&path, Some(index.as_ref().unwrap_or(below)));
            if next.kind() == IndexKind::Full {
                return (path, next);
            }
            (writes, index) = (&[], Some(next));
        }
    };
    let (_, first) = full_above(&plain, 4096, &[1 << 20, 30 << 20]);
    assert_eq!(kit.second_level(&first), some(&[0, 15]));
    let (path, full) = full_above(&first, 128 << 10, &[30 << 20, 8 << 20]);
    assert_eq!(kit.second_level(&full), some(&[0]), "clusters that are whole again have none");
    assert_eq!(full.fine.get(0), first.fine.get(0), "a leaf that says the same is shared");
    let Found::Whole(loaded) = kit.load(&path) else { panic!("not found") };
    assert_eq!(kit.second_level(&loaded), some(&[0]));
}

/// Its index keeps words of what it hides, and a longer layer above takes them over.
#[test]
fn a_shorter_layer_keeps_the_fine_leaves_of_words_that_it_hides() {
    let kit = Kit::new();
    let first = kit.extend(&split_layer(kit.dir.path(), "0", None, 4096, &[30 << 20]), None);
    let short = CreateOptions { size: Some(10 << 20), ..CreateOptions::default() };
    let second = kit.extend(&make(kit.dir.path(), "1", Some("0"), short, 0, &[]), Some(&first));
    let third = kit.extend(&layer(kit.dir.path(), "2", Some("1"), 17, &[]), Some(&second));
    assert!(kit.second_level(&third)[15]);
}

#[test]
fn a_split_word_without_a_fine_leaf_is_an_error() {
    let kit = Kit::new();
    let path = split_layer(kit.dir.path(), "0", None, 4096, &[0]);
    let mut index = kit.extend(&path, None);
    let split = MapEntry::split(LayerIndex::BASE);
    assert!(index.check_word(Level::First, split).is_ok() && index.check_word(Level::Second, split).is_err());
    index.fine = Tree::new(index.fine.leaves());
    let error = index.read_page(0, index.units().finest(), |_, at, page| {
        let opened = kit.opener.open(&path, Role::Inspected, &kit.gate)?;
        opened.store.read_exact(page, at).while_trying("read")
    });
    assert!(matches!(error.unwrap_err().kind(), crate::ErrorKind::Index(IndexError::FineLeaf { leaf: 0 })));
    let plain = kit.extend(&layer(kit.dir.path(), "plain", None, 16, &[0]), None);
    assert!(plain.check_word(Level::First, split).is_err(), "no second level says of what");
}

/// Every kind of index that a chain of this length has: one with no record below it, and the one after the last record. Both
/// levels.
#[test]
fn each_65th_index_is_full_and_those_between_add_what_their_layer_says() {
    let kit = Kit::new();
    let mut index: Option<Index> = None;
    let mut kinds = Vec::new();
    for number in 0..67u64 {
        let name = number.to_string();
        let below = number.checked_sub(1).map(|below| below.to_string());
        let (writes, len) = ([(number * 7 % 40) << 20, 33 << 20], 4096 << (number % 6));
        let path = split_layer(kit.dir.path(), &name, below.as_deref(), len, &writes);
        let next = kit.extend(&path, index.as_ref());
        let Found::Whole(loaded) = kit.load(&path) else { panic!("{number} is not found") };
        for index in [&next, &loaded] {
            kit.assert_like_tables(index);
        }
        if let Some(below) = &index
            && next.kind() == IndexKind::Delta
        {
            // A leaf of the second level speaks for 2 MiB.
            let touched = writes.map(|at| (at >> 21) as usize);
            let expected: Vec<u64> = (0..20).filter(|leaf| touched.contains(&(*leaf as usize))).collect();
            assert_eq!(below.differing(&loaded, Level::First), [0], "{number}");
            assert_eq!(below.differing(&loaded, Level::Second), expected, "{number}");
        }
        kinds.push(next.kind());
        index = Some(next);
    }
    let full = |number: usize| number == 0 || number == 65;
    let expected = |number| if full(number) { IndexKind::Full } else { IndexKind::Delta };
    assert_eq!(kinds, (0..67).map(expected).collect::<Vec<_>>());
}

/// Where words are of other units there is nothing to add a record to.
#[test]
fn a_layer_of_smaller_clusters_gets_a_full_index() {
    let kit = Kit::new();
    let base = kit.extend(&layer(kit.dir.path(), "base", None, 16, &[0, 33 << 20]), None);
    let small = kit.extend(&layer(kit.dir.path(), "small", Some("base"), 12, &[5 << 20]), Some(&base));
    let large = kit.extend(&layer(kit.dir.path(), "large", Some("small"), 16, &[1 << 20]), Some(&small));
    assert_eq!([&small, &large].map(Index::kind), [IndexKind::Full, IndexKind::Delta]);
    [&small, &large].into_iter().for_each(|index| kit.assert_like_tables(index));
}

/// Layers above may have smaller clusters, even so small that a page is a part of a single word.
#[test]
fn a_page_in_a_smaller_unit_is_made_of_parts() {
    for bits in [16, 21] {
        let kit = Kit::new();
        let path = layer(kit.dir.path(), "base", None, bits, &[0, 6 << 20, 12 << 20]);
        let index = kit.extend(&path, None);
        for unit in (9..bits).filter_map(ClusterBits::new) {
            let pages = Root::leaves_of(40 << 20, unit);
            for (number, expected) in (0..).zip(kit.merged(&index, unit, pages)) {
                assert_eq!(kit.page(&index, number, unit), expected, "{bits} {unit:?} {number}");
            }
        }
    }
}

#[test]
fn pages_past_the_end_are_holes() {
    let kit = Kit::new();
    let index = kit.extend(&layer(kit.dir.path(), "base", None, 16, &[0]), None);
    assert!(!index.map.get(0).is_hole() && index.map.get(1).is_hole() && index.map.get(1 << 40).is_hole());
    assert_eq!(kit.page(&index, 1 << 40, index.units().finest()), [0; LEAF_WORDS]);
}

/// A disk opened for writing again, then frozen again: its old index is gone and the new one is right.
#[test]
fn a_layer_that_was_written_again_gets_another_index() {
    let kit = Kit::new();
    let path = layer(kit.dir.path(), "base", None, 16, &[0]);
    kit.extend(&path, None);
    let disk =
        Disk::open(&path, &OpenOptions::default(), &Resources::new(ResourceOptions::default())).unwrap();
    assert!(matches!(kit_load_unlocked(&kit, &path), Found::Nothing), "a session stands in the header");
    let mut bytes = [2; 4096];
    disk.write(GuestOffset::new(9 << 20), &[Segment::from_mut(&mut bytes)]).unwrap();
    disk.close().unwrap();
    drop(disk);
    assert!(matches!(kit.load(&path), Found::Nothing), "our own writer clears the bit");
    let index = kit.extend(&path, None);
    let merged = kit.merged(&index, index.units().finest(), 1);
    assert_eq!(kit.page(&index, 0, index.units().finest()), merged[0]);
    assert_ne!(merged[0][9 << 4], 0);
}

fn kit_load_unlocked(kit: &Kit, path: &Path) -> Found {
    let top = open_layer(path, Role::Inspected, None, &kit.gate, &*kit.opener).unwrap();
    load(&top, &kit.gate, &kit.opener, &mut Looks::default())
}
