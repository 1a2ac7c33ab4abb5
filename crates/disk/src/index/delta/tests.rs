use std::collections::HashMap;

use vmstrata_qcow2::CompressionType;
use vmstrata_qcow2::index::{ChainId, Home, LayerRecord, PAGE_LEN, RecordTables, Stamp};
use vmstrata_store::{FileId, FileIdentity};
use vmstrata_types::{ClusterBits, HostOffset};

use super::*;

const CHAIN: ChainId = ChainId([7; 16]);
const LAYER: LayerIndex = LayerIndex::new(3);
const UNIT: ClusterBits = ClusterBits::MIN;
/// Four leaves of units of 512 bytes.
const SIZE: u64 = 4 * 512 * 512;
/// The layer's file ends in the middle of its last cluster.
const FILE_LEN: u64 = (1 << 20) + 700;

/// Pages in memory, as the file of the layer would hold them.
#[derive(Default)]
struct Pages(HashMap<PagePointer, Box<Page>>);

impl Pages {
    fn write(&mut self, page: &Page) -> PagePointer {
        let at = HostOffset::new((self.0.len() as u64 + 1) * PAGE_LEN as u64);
        let pointer = PagePointer::new(&CHAIN, LAYER, at, 1, page);
        self.0.insert(pointer, Box::new(*page));
        pointer
    }

    fn record(&mut self, runs: &[DeltaRun]) -> Delta {
        let mut delta = Delta::new(LAYER, UNIT, runs.to_vec());
        delta.write(&mut |page| Ok(self.write(page))).unwrap();
        delta
    }

    fn read(&self, pointer: DeltaPointer) -> Result<Delta> {
        let page = |pointer| self.0.get(&pointer).cloned().ok_or(IndexError::Missing);
        Delta::read(LAYER, pointer, (&root(), &layer()), &mut |pointer, _| Ok(page(pointer)?))
    }

    /// What a record of these runs turns out to be when it is read.
    fn reread(&mut self, runs: &[DeltaRun]) -> Result<Delta> {
        let pointer = self.record(runs).pointer;
        self.read(pointer)
    }
}

fn root() -> Root {
    Root {
        chain: CHAIN,
        generation: 1,
        layer: LAYER,
        unit: UNIT,
        fine_unit: UNIT,
        size: SIZE,
        at: HostOffset::ZERO,
        area: HostOffset::ZERO..HostOffset::ZERO,
        len_before: 0,
        table_pages: 1,
        map: PagePointer::HOLE,
        table: PagePointer::HOLE,
        fine: PagePointer::HOLE,
        full: LayerIndex::new(2),
        deltas: Vec::new(),
    }
}

fn layer() -> IndexLayer {
    let tables = RecordTables {
        version: 3,
        cluster_bits: ClusterBits::DEFAULT,
        is_extended: false,
        compression: CompressionType::Zlib,
        l1_at: HostOffset::ZERO,
        l1_entries: 1,
    };
    let identity = FileIdentity { file: FileId { dev: 1, ino: 1 }, len: FILE_LEN, mtime_ns: 0, ctime_ns: 0 };
    let stamp = Stamp { len: FILE_LEN, mtime_ns: None };
    let record = LayerRecord { size: SIZE, tables: Some(tables), backing: None, stamp, digest: [0; 32] };
    IndexLayer { path: "layer".into(), identity, record, home: Home::File }
}

fn data(host: u64) -> MapEntry {
    MapEntry::data(LayerIndex::BASE, HostOffset::new(host), UNIT)
}

fn zero() -> MapEntry {
    MapEntry::zero(LayerIndex::BASE)
}

fn run(first: u64, units: u64, entry: MapEntry) -> DeltaRun {
    DeltaRun::new(first, units, entry.word())
}

#[test]
fn entries_that_continue_one_another_become_one_run() {
    let mut runs = Runs::default();
    let of_layer = |entry: MapEntry| entry.of_layer(LAYER);
    for unit in 5..8 {
        runs.push(unit, of_layer(data(unit * 512)));
    }
    runs.push(8, of_layer(data(0)));
    runs.push(9, of_layer(zero()));
    runs.push(10, of_layer(zero()));
    runs.push(12, of_layer(zero()));
    let expected = [run(5, 3, data(5 * 512)), run(8, 1, data(0)), run(9, 2, zero()), run(12, 1, zero())];
    assert_eq!(runs.finish().unwrap(), expected);
}

/// So each larger unit, which a layer below may have, is covered by one run, or in parts.
#[test]
fn a_long_run_is_cut_at_multiples_of_any_cluster() {
    let max = DeltaRun::MAX_UNITS;
    let mut runs = Runs { runs: vec![run(5, max - 5, zero())], is_over: false };
    runs.push(max, zero());
    runs.push(max + 1, zero());
    assert_eq!(runs.finish().unwrap(), [run(5, max - 5, zero()), run(max, 2, zero())]);
    assert!(max.is_multiple_of(ClusterBits::MAX.size() / ClusterBits::MIN.size()));
}

#[test]
fn more_runs_than_an_index_may_have_are_no_record() {
    let mut runs = Runs::default();
    (0..u64::from(MAX_DELTA_RUNS)).for_each(|number| runs.push(number * 2, zero()));
    runs.push(u64::from(MAX_DELTA_RUNS) * 2 - 1, zero());
    assert_eq!(runs.runs.len(), MAX_DELTA_RUNS as usize, "one that continues the last takes no room");
    runs.push(u64::from(MAX_DELTA_RUNS) * 2 + 1, zero());
    assert!(runs.finish().is_none());
}

/// What runs say of a unit.
fn word_of(runs: &[DeltaRun], unit: u64) -> Option<u64> {
    let run = runs.iter().find(|run| (run.first()..run.end()).contains(&unit))?;
    Some(MapEntry::from_word(run.word()).of_layer(LAYER).advanced(unit - run.first()).word())
}

#[test]
fn a_record_says_what_was_written_and_nothing_of_other_units() {
    let mut pages = Pages::default();
    let mut runs = vec![run(3, 2, data(0x1_0000)), run(510, 4, data(0x2_0000)), run(600, 700, zero())];
    // More than a page of them.
    runs.extend((0..300).map(|number| run(1400 + number * 2, 1, zero())));
    let delta = pages.reread(&runs).unwrap();
    assert_eq!((delta.pointer.runs, delta.pointer.pages()), (303, 2));
    for leaf in 0..5 {
        let mut words = [9; LEAF_WORDS];
        delta.put(leaf, UNIT, &mut words);
        let expected: Vec<u64> =
            (leaf * 512..(leaf + 1) * 512).map(|unit| word_of(&runs, unit).unwrap_or(9)).collect();
        assert_eq!(words[..], expected, "leaf {leaf}");
        assert_eq!(delta.touches(leaf, UNIT), words.iter().any(|&word| word != 9), "leaf {leaf}");
    }
    let mut leaves = [false; 5];
    delta.mark(UNIT, &mut leaves);
    assert_eq!(leaves, [true, true, true, true, false]);
    assert_eq!(pages.reread(&[]).unwrap().pointer, DeltaPointer::default());
}

/// Units of the first level are of four units here, and those of a map with smaller clusters are parts of one.
#[test]
fn units_of_other_sizes_are_covered_wholly_or_split() {
    let large = ClusterBits::new(11).unwrap();
    let data_at = |host, unit| MapEntry::data(LAYER, HostOffset::new(host), unit);
    let runs = [run(3, 5, data(0x1_0600)), run(8, 4, zero()), run(12, 2, zero()), run(14, 2, data(0x2_0000))];
    let delta = Delta::new(LAYER, UNIT, runs.to_vec());
    let mut words = [9; LEAF_WORDS];
    delta.put(0, large, &mut words);
    let split = MapEntry::split(LAYER);
    let expected = [split, data_at(0x1_0800, large), MapEntry::zero(LAYER), split].map(MapEntry::word);
    assert_eq!((&words[..4], &words[4..]), (&expected[..], &[9; 508][..]));
    let word = MapEntry::data(LayerIndex::BASE, HostOffset::new(0x1_0800), large).word();
    let delta = Delta::new(LAYER, large, vec![DeltaRun::new(1, 2, word)]);
    let mut words = [9; LEAF_WORDS];
    delta.put(0, UNIT, &mut words);
    for (unit, word) in (0..).zip(words) {
        let expected = if (4..12).contains(&unit) { data_at(0x1_0000 + unit * 512, UNIT).word() } else { 9 };
        assert_eq!(word, expected, "{unit}");
    }
    let mut leaves = [false; 2];
    delta.mark(UNIT, &mut leaves);
    assert_eq!(leaves, [true, false]);
}

/// Of someone whose checksums are right.
#[test]
fn runs_that_no_writer_makes_are_refused() {
    let mut pages = Pages::default();
    let mut is_read = |runs: &[DeltaRun]| pages.reread(runs).is_ok();
    assert!(is_read(&[run(0, 1, zero()), run(1, 2047, MapEntry::damaged(LayerIndex::BASE))]));
    assert!(!is_read(&[run(2047, 2, zero())]), "past the disk's end");
    assert!(!is_read(&[run(DeltaRun::FIRST_END - 1, DeltaRun::MAX_UNITS, zero())]));
    assert!(!is_read(&[run(4, 2, zero()), run(5, 1, zero())]), "two that overlap");
    assert!(!is_read(&[run(4, 2, zero()), run(2, 1, zero())]), "in another order");
    assert!(!is_read(&[run(4, 2, MapEntry::HOLE)]));
    assert!(!is_read(&[run(4, 2, MapEntry::split(LayerIndex::BASE))]), "there is no finer level");
    assert!(!is_read(&[run(4, 2, zero().of_layer(LAYER))]), "the layer follows from the place");
    // The last cluster begins in the file, and ends where it would.
    assert!(is_read(&[run(4, 128, data(1 << 20))]));
    assert!(!is_read(&[run(4, 129, data(1 << 20))]));
    assert!(!is_read(&[run(4, 1, data((1 << 20) + (1 << 16)))]));
    assert!(!is_read(&[DeltaRun::new(4, 2000, 1 << 46 | ((1 << 46) - 1))]), "an offset that goes round");
    // A run of no units cannot be made, only forged.
    let mut page = encode_runs(&[run(4, 1, zero())]);
    page[5] = 0;
    let mut tree = Tree::new(1);
    tree.set(0, pages.write(&page));
    tree.seal(&mut |page| Ok(pages.write(page))).unwrap();
    assert!(pages.read(DeltaPointer { top: tree.top(), runs: 1 }).is_err());
}

#[test]
fn a_record_with_less_pages_than_runs_is_refused() {
    let mut pages = Pages::default();
    let pointer = pages.record(&[run(4, 1, zero())]).pointer;
    for runs in [0, 257, MAX_DELTA_RUNS] {
        assert!(pages.read(DeltaPointer { runs, ..pointer }).is_err(), "{runs}");
    }
    assert!(pages.read(DeltaPointer { top: PagePointer::HOLE, runs: 1 }).is_err());
    // What follows the last run of a page is zeros.
    assert!(pages.read(DeltaPointer { runs: 2, ..pointer }).is_err());
}

#[test]
fn a_full_index_follows_64_records_or_many_runs_or_is_smaller() {
    let pointer = |runs| DeltaPointer { top: PagePointer::HOLE, runs };
    assert!(adds_delta(&[pointer(1); 63], pointer(1), 1));
    assert!(!adds_delta(&[pointer(1); 64], pointer(1), 1));
    assert!(adds_delta(&[pointer(MAX_DELTA_RUNS - 1)], pointer(1), 1));
    assert!(!adds_delta(&[pointer(MAX_DELTA_RUNS)], pointer(1), 1));
    // 300 runs fill two pages.
    assert!(adds_delta(&[], pointer(300), 2));
    assert!(!adds_delta(&[], pointer(300), 1));
    assert!(adds_delta(&[], pointer(0), 0));
}
