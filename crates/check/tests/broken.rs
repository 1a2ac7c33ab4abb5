//! Images broken on purpose, each with the finding or the error it must give, beside stock tools' verdict.

use crate::support::guest::*;
use crate::support::*;
use vmstrata_check::{Options, Repair};

/// What our check must say.
enum Expect {
    /// No finding at all.
    Clean,
    /// Findings with this name among others.
    Finding(&'static str),
    /// An error whose text has this in it.
    Error(&'static str),
}

/// How our numbers stand to stock's.
#[derive(PartialEq)]
enum Stock {
    /// Exactly the same.
    Same,
    /// Stock finds as much or less: see the module documentation of `check`.
    Milder,
    /// Stock walks garbage that we do not, or gives up: only "something is wrong" is the same.
    Otherwise,
}

/// What a repair must make of it.
#[derive(PartialEq)]
enum After {
    /// An image that stock finds flawless, with the same contents.
    Mended,
    /// No more than it was: what is wrong cannot be mended without losing something.
    Kept,
}

struct Case {
    name: &'static str,
    expect: Expect,
    stock: Stock,
    after: After,
    edit: fn(&Editor),
}

const fn case(name: &'static str, expect: Expect, stock: Stock, after: After, edit: fn(&Editor)) -> Case {
    Case { name, expect, stock, after, edit }
}

use After::{Kept, Mended};
use Expect::{Clean, Error, Finding};
use Stock::{Milder, Otherwise, Same};

const MIB: u64 = 1 << 20;

/// Points the L2 entry of a guest cluster at `host`, with the copied flag that a careless writer would leave.
fn point(image: &Editor, guest: u64, host: u64) {
    image.put_u64(image.l2_entry(guest), host | COPIED);
}

const REFCOUNTS: &[Case] = &[
    case("nothing wrong", Clean, Same, Mended, |_| {}),
    case("data refcount 0", Finding("refcount-too-low"), Same, Mended, |image| {
        image.set_refcount(image.host(OWN), 0);
    }),
    case("data refcount 2 instead of 1", Finding("leak"), Same, Mended, |image| {
        image.set_refcount(image.host(OWN), 2);
    }),
    case("shared data refcount 1 instead of 2", Finding("refcount-too-low"), Same, Mended, |image| {
        image.set_refcount(image.host(SHARED), 1);
    }),
    case("shared data refcount 65535", Finding("leak"), Same, Mended, |image| {
        image.set_refcount(image.host(SHARED), 65535);
    }),
    case("compressed refcount too low", Finding("refcount-too-low"), Same, Mended, |image| {
        image.set_refcount(image.u64_at(image.l2_entry(COMPRESSED)) & 0xff_ffff, 1);
    }),
    case("zero cluster's refcount 0", Finding("refcount-too-low"), Same, Mended, |image| {
        image.set_refcount(image.host(ZERO_ALLOCATED), 0);
    }),
    case("L2 table refcount 0", Finding("refcount-too-low"), Same, Mended, |image| {
        image.set_refcount(image.l2(0), 0);
    }),
    case("L1 table refcount 0", Finding("refcount-too-low"), Same, Mended, |image| {
        image.set_refcount(image.l1(), 0);
    }),
    case("header refcount 0", Finding("refcount-too-low"), Same, Mended, |image| image.set_refcount(0, 0)),
    case("refcount table refcount 0", Finding("refcount-too-low"), Same, Mended, |image| {
        image.set_refcount(image.refcount_table(), 0);
    }),
    case("refcount block refcount 0", Finding("refcount-too-low"), Same, Mended, |image| {
        image.set_refcount(image.block(0), 0);
    }),
    case("snapshot table refcount 0", Finding("refcount-too-low"), Same, Mended, |image| {
        image.set_refcount(image.snapshots(), 0);
    }),
    case("snapshot table refcount 3", Finding("leak"), Same, Mended, |image| {
        image.set_refcount(image.snapshots(), 3);
    }),
    case("bitmap table refcount 0", Finding("refcount-too-low"), Same, Mended, |image| {
        image.set_refcount(image.bitmap_table(), 0);
    }),
    case("one leaked cluster", Finding("leak"), Same, Mended, |image| {
        image.set_refcount(image.len().next_multiple_of(65536), 1);
        image.set_len(image.len() + 65536);
    }),
    case("thousands of leaked clusters", Finding("leak"), Same, Mended, |image| {
        let end = image.len().next_multiple_of(65536);
        image.set_len(end + 5000 * 65536);
        (0..5000).for_each(|n| image.set_refcount(end + n * 65536, 1));
    }),
    case("all refcounts 0", Finding("refcount-too-low"), Same, Mended, |image| {
        image.put(image.block(0), &[0; 65536]);
    }),
    case("all refcounts 65535", Finding("leak"), Same, Mended, |image| {
        image.put(image.block(0), &[0xff; 65536]);
    }),
    case("leak behind the end of the file", Clean, Same, Mended, |image| {
        image.set_refcount(1 << 30, 1);
    }),
];

const COPIED_FLAGS: &[Case] = &[
    case("copied flag missing on data", Finding("l2-copied"), Same, Mended, |image| {
        image.map(image.l2_entry(OWN), |raw| raw & !COPIED);
    }),
    case("copied flag on shared data", Finding("l2-copied"), Same, Mended, |image| {
        image.map(image.l2_entry(SHARED), |raw| raw | COPIED);
    }),
    case("copied flag on a shared zero cluster", Finding("l2-copied"), Same, Mended, |image| {
        image.map(image.l2_entry(ZERO_ALLOCATED), |raw| raw | COPIED);
    }),
    case("copied flag missing on an L2 table", Finding("l1-copied"), Same, Mended, |image| {
        image.map(image.l1_entry(0), |raw| raw & !COPIED);
    }),
    case("copied flag on a shared L2 table", Finding("l1-copied"), Same, Mended, |image| {
        image.map(image.l1_entry(1), |raw| raw | COPIED);
    }),
    case("copied flag on a compressed cluster", Finding("l2-entry"), Same, Mended, |image| {
        image.map(image.l2_entry(COMPRESSED), |raw| raw | COPIED);
    }),
    case("copied flag on a plain zero cluster", Clean, Same, Mended, |image| {
        image.map(image.l2_entry(ZERO_PLAIN), |raw| raw | COPIED);
    }),
    case("copied flag on nothing", Clean, Same, Mended, |image| {
        image.put_u64(image.l2_entry(NOTHING), COPIED);
    }),
    case("copied flag on no L2 table", Finding("l1-entry"), Otherwise, Mended, |image| {
        image.put_u64(image.l1_entry(1), COPIED);
    }),
];

const RESERVED_BITS: &[Case] = &[
    case("high reserved bit in an L2 entry", Finding("l2-entry"), Same, Mended, |image| {
        image.map(image.l2_entry(OWN), |raw| raw | 1 << 56);
    }),
    case("low reserved bit in an L2 entry", Finding("l2-entry"), Same, Mended, |image| {
        image.map(image.l2_entry(SHARED), |raw| raw | 1 << 8);
    }),
    case("reserved bit in an empty L2 entry", Finding("l2-entry"), Same, Mended, |image| {
        image.put_u64(image.l2_entry(NOTHING), 2);
    }),
    case("every reserved bit in a zero entry", Finding("l2-entry"), Same, Mended, |image| {
        image.map(image.l2_entry(ZERO_PLAIN), |raw| raw | 0x3f00_0000_0000_01fe);
    }),
    case("reserved bit in a snapshot's L2 table", Finding("l2-entry"), Same, Mended, |image| {
        let l1 = image.u64_at(image.snapshots());
        image.map(image.u64_at(l1) & OFFSET, |raw| raw | 2);
    }),
    case("reserved bit in an L1 entry", Finding("l1-entry"), Same, Mended, |image| {
        image.map(image.l1_entry(0), |raw| raw | 1 << 60);
    }),
    case("reserved bit in a snapshot's L1 entry", Finding("l1-entry"), Same, Mended, |image| {
        image.map(image.u64_at(image.snapshots()), |raw| raw | 1);
    }),
    case("reserved bit in a refcount table entry", Finding("refcount-table-entry"), Same, Mended, |image| {
        image.map(image.refcount_table(), |raw| raw | 1);
    }),
    case("reserved bit in a bitmap table entry", Finding("bitmap-entry"), Otherwise, Kept, |image| {
        image.map(image.bitmap_table(), |raw| raw | 1 << 60);
    }),
];

const PLACES: &[Case] = &[
    case("data off a cluster boundary", Finding("l2-entry"), Same, Kept, |image| {
        image.map(image.l2_entry(OWN), |raw| raw + 512);
    }),
    case("zero cluster off a cluster boundary", Finding("l2-entry"), Same, Mended, |image| {
        image.map(image.l2_entry(ZERO_ALLOCATED), |raw| raw + 1024);
    }),
    case("L2 table off a cluster boundary", Finding("l1-entry"), Same, Kept, |image| {
        image.map(image.l1_entry(0), |raw| raw + 512);
    }),
    case(
        "refcount block off a cluster boundary",
        Finding("refcount-table-entry"),
        Otherwise,
        Mended,
        |image| {
            image.map(image.refcount_table(), |raw| raw + 512);
        },
    ),
    case("bitmap off a cluster boundary", Finding("bitmap-entry"), Otherwise, Kept, |image| {
        image.map(image.bitmap_table(), |raw| if raw & OFFSET == 0 { 512 } else { raw + 512 });
    }),
    case("data past the end", Finding("past-end"), Same, Kept, |image| {
        point(image, OWN, image.len().next_multiple_of(65536) + MIB);
    }),
    case("data far past the end", Finding("past-end"), Same, Kept, |image| point(image, NOTHING, 1 << 55)),
    case("zero cluster past the end", Finding("past-end"), Same, Kept, |image| {
        image.put_u64(image.l2_entry(ZERO_PLAIN), 1 << 40 | COPIED | 1);
    }),
    case("compressed data past the end", Finding("past-end"), Same, Kept, |image| {
        image.put_u64(image.l2_entry(COMPRESSED), 1 << 62 | 3 << 54 | 1 << 40);
    }),
    case("L2 table past the end", Finding("past-end"), Same, Kept, |image| {
        image.put_u64(image.l1_entry(0), 1 << 40 | COPIED);
    }),
    case("snapshot's L2 table past the end", Finding("past-end"), Same, Kept, |image| {
        image.put_u64(image.u64_at(image.snapshots()), 1 << 40);
    }),
    case("refcount block past the end", Finding("past-end"), Same, Mended, |image| {
        image.put_u64(image.refcount_table() + 8, 1 << 40);
    }),
    case("bitmap past the end", Finding("past-end"), Same, Kept, |image| {
        image.put_u64(image.bitmap_table(), 1 << 40);
    }),
    case("refcount table past the end", Finding("past-end"), Same, Mended, |image| {
        image.put_u64(48, 1 << 40)
    }),
    case("L1 table past the end", Finding("past-end"), Same, Kept, |image| image.put_u64(40, 1 << 40)),
    case("cut short by a cluster", Finding("past-end"), Otherwise, Kept, |image| {
        image.set_len(image.host(OWN_TOO + 3));
    }),
    case("cut short by half", Finding("past-end"), Otherwise, Kept, |image| image.set_len(image.len() / 2)),
    case("cut short within the last cluster", Clean, Same, Mended, |image| {
        let last = image.len().next_multiple_of(65536) - 65536;
        image.set_len(last + 512);
    }),
];

const OVERLAPS: &[Case] = &[
    case("two entries of one cluster", Finding("refcount-too-low"), Same, Mended, |image| {
        point(image, NOTHING, image.host(OWN));
    }),
    case("data on the L1 table", Finding("refcount-too-low"), Same, Mended, |image| {
        point(image, NOTHING, image.l1());
    }),
    case("data on the refcount table", Finding("refcount-too-low"), Same, Mended, |image| {
        point(image, NOTHING, image.refcount_table());
    }),
    case("data on a refcount block", Finding("refcount-block-shared"), Same, Mended, |image| {
        point(image, NOTHING, image.block(0));
    }),
    case("data on its own L2 table", Finding("refcount-too-low"), Same, Mended, |image| {
        point(image, NOTHING, image.l2(0));
    }),
    case("data on a snapshot's L2 table", Finding("refcount-too-low"), Same, Kept, |image| {
        let l1 = image.u64_at(image.snapshots());
        point(image, NOTHING, image.u64_at(l1) & OFFSET);
    }),
    case("data on the snapshot table", Finding("refcount-too-low"), Same, Kept, |image| {
        point(image, NOTHING, image.snapshots());
    }),
    case("data on the bitmap directory", Finding("refcount-too-low"), Same, Kept, |image| {
        point(image, NOTHING, image.bitmap_directory());
    }),
    case("compressed data on the header", Finding("l2-entry"), Same, Kept, |image| {
        image.put_u64(image.l2_entry(NOTHING), 1 << 62 | 0x400);
    }),
    case("two L1 entries of one L2 table", Finding("refcount-too-low"), Same, Mended, |image| {
        image.put_u64(image.l1_entry(1), image.u64_at(image.l1_entry(0)));
    }),
    case("L2 table that is the L1 table", Finding("refcount-too-low"), Same, Mended, |image| {
        image.put_u64(image.l1_entry(1), image.l1() | COPIED);
    }),
    case("L2 table that is a refcount block", Finding("refcount-block-shared"), Same, Kept, |image| {
        image.put_u64(image.l1_entry(1), image.block(0) | COPIED);
    }),
    case("L2 table that is data", Finding("refcount-too-low"), Same, Kept, |image| {
        image.put_u64(image.l1_entry(1), image.host(OWN) | COPIED);
    }),
    case("refcount table that is its own block", Finding("refcount-block-shared"), Same, Mended, |image| {
        image.put_u64(image.refcount_table(), image.refcount_table());
    }),
    case("refcount block that is data", Finding("refcount-block-shared"), Same, Mended, |image| {
        image.put_u64(image.refcount_table(), image.host(OWN));
    }),
    case("refcount block listed twice", Finding("refcount-block-shared"), Same, Mended, |image| {
        image.put_u64(image.refcount_table() + 8, image.block(0));
    }),
    case("no refcount block", Finding("refcount-too-low"), Same, Mended, |image| {
        image.put_u64(image.refcount_table(), 0);
    }),
    case("data on an L2 table, counted right", Finding("overlap"), Milder, Mended, |image| {
        let table = image.l2(0);
        image.put_u64(image.l2_entry(NOTHING), table);
        image.map(image.l1_entry(0), |raw| raw & !COPIED);
        image.set_refcount(table, 2);
    }),
];

const SNAPSHOTS_AND_BITMAPS: &[Case] = &[
    case("snapshot table past the end", Finding("snapshot-table"), Otherwise, Kept, |image| {
        image.put_u64(64, 1 << 40);
    }),
    case("snapshot without the fields of version 3", Finding("snapshot-incomplete"), Same, Kept, |image| {
        image.put_u32(image.snapshots() + 36, 8);
    }),
    case("snapshot with too much extra data", Finding("snapshot-table"), Otherwise, Kept, |image| {
        image.put_u32(image.snapshots() + 36, 4096);
    }),
    case("more snapshots than the table has", Finding("snapshot"), Otherwise, Kept, |image| {
        image.put_u32(60, 100);
        image.put_u64(image.snapshots() + 72, 0xabcd);
    }),
    case("snapshot's L1 table off a cluster boundary", Finding("snapshot"), Same, Kept, |image| {
        image.map(image.snapshots(), |raw| raw + 512);
    }),
    case("snapshot's L1 table past the end", Finding("snapshot"), Same, Kept, |image| {
        image.put_u64(image.snapshots(), 1 << 40);
    }),
    case("snapshot's L1 table too large", Finding("snapshot"), Same, Kept, |image| {
        image.put_u32(image.snapshots() + 8, 5 << 20);
    }),
    case(
        "snapshot's L1 table that is the active one",
        Finding("refcount-too-low"),
        Otherwise,
        Mended,
        |image| {
            image.put_u64(image.snapshots(), image.l1());
        },
    ),
    case("snapshot forgotten", Finding("leak"), Same, Mended, |image| image.put_u32(60, 0)),
    case("bitmaps out of date", Finding("leak"), Same, Mended, |image| image.put_u64(88, 0)),
    case("bitmap with reserved flags", Finding("bitmaps"), Otherwise, Kept, |image| {
        image.put_u32(image.bitmap_directory() + 12, 1 << 30);
    }),
    case("bitmap without a name", Finding("bitmaps"), Otherwise, Kept, |image| {
        image.put(image.bitmap_directory() + 18, &[0, 0]);
    }),
    case("bitmap table off a cluster boundary", Finding("bitmaps"), Otherwise, Kept, |image| {
        image.map(image.bitmap_directory(), |raw| raw + 8);
    }),
];

/// The two words of a guest cluster's extended entry, within the first L2 table.
fn extended(image: &Editor, guest: u64) -> [u64; 2] {
    [0, 8].map(|word| image.l2(0) + guest * 16 + word)
}

/// Guest clusters of [`make_extended`]'s disk.
const PARTS: u64 = 0;
const WHOLE: u64 = 4;
const PACKED: u64 = 8;
const ZEROS: u64 = 12;

/// A disk whose clusters have subclusters: data and zeros in one, data, compressed data, zeros without a cluster.
fn make_extended(path: &std::path::Path) {
    must("qemu-img", &["create", "-q", "-f", "qcow2", "-o", "extended_l2=on", path.to_str().unwrap(), "16M"]);
    let writes = ["write -P 1 2k 4k", "write -z 10k 2k", "write -P 2 256k 64k", "write -c -P 3 512k 64k"];
    qemu_io(path, &[&writes[..], &["write -z 768k 10k"]].concat());
}

const SUBCLUSTERS: &[Case] = &[
    case("nothing wrong with subclusters", Clean, Same, Mended, |_| {}),
    case("a subcluster of data and zeros", Finding("l2-entry"), Same, Mended, |image| {
        image.map(extended(image, PARTS)[1], |bits| bits | 1 << 33);
    }),
    case("subclusters of no cluster", Finding("l2-entry"), Same, Kept, |image| {
        image.put_u64(extended(image, NOTHING)[1], 0x10);
    }),
    case("subclusters of a compressed cluster", Finding("l2-entry"), Otherwise, Mended, |image| {
        image.put_u64(extended(image, PACKED)[1], 1 << 40);
    }),
    case("reserved bit beside subclusters", Finding("l2-entry"), Same, Mended, |image| {
        image.map(extended(image, PARTS)[0], |raw| raw | 1 << 57);
    }),
    case("zero flag beside subclusters", Clean, Same, Mended, |image| {
        image.map(extended(image, PARTS)[0], |raw| raw | 1);
    }),
    case("copied flag missing beside subclusters", Finding("l2-copied"), Same, Mended, |image| {
        image.map(extended(image, WHOLE)[0], |raw| raw & !COPIED);
    }),
    case("subclusters of zeros off a cluster boundary", Finding("l2-entry"), Same, Mended, |image| {
        image.put_u64(extended(image, ZEROS)[0], 0x1_0200);
    }),
    case("subclusters of data off a cluster boundary", Finding("l2-entry"), Same, Kept, |image| {
        image.map(extended(image, WHOLE)[0], |raw| raw + 512);
    }),
    // Guest clusters of which different subclusters are used may share a host cluster.
    case("subclusters that share a cluster", Clean, Same, Mended, |image| {
        let [from, to] = [PARTS, NOTHING].map(|guest| extended(image, guest));
        image.map(from[0], |raw| raw & !COPIED);
        image.put_u64(to[0], image.u64_at(from[0]));
        image.put_u64(to[1], 0xff00);
        image.set_refcount(image.u64_at(from[0]), 2);
    }),
    case(
        "subclusters that share a cluster counted once",
        Finding("refcount-too-low"),
        Same,
        Mended,
        |image| {
            let [from, to] = [PARTS, NOTHING].map(|guest| extended(image, guest));
            image.put_u64(to[0], image.u64_at(from[0]));
            image.put_u64(to[1], 0xff00);
        },
    ),
];

const HEADERS: &[Case] = &[
    case("marked dirty", Clean, Same, Mended, |image| image.map(72, |bits| bits | 1)),
    case("marked corrupt", Clean, Same, Mended, |image| image.map(72, |bits| bits | 2)),
    case("not qcow2", Error("magic"), Otherwise, Kept, |image| image.put(0, b"QFI\xfa")),
    case("version 4", Error("version 4"), Otherwise, Kept, |image| image.put_u32(4, 4)),
    case("clusters of 4 MiB", Error("cluster_bits"), Otherwise, Kept, |image| image.put_u32(20, 22)),
    case("clusters of 256 bytes", Error("cluster_bits"), Otherwise, Kept, |image| image.put_u32(20, 8)),
    case("refcounts of 128 bits", Error("refcount_order"), Otherwise, Kept, |image| image.put_u32(96, 7)),
    case("header longer than its cluster", Error("header_length"), Otherwise, Kept, |image| {
        image.put_u32(100, 65544);
    }),
    case("unknown incompatible feature", Error("incompatible feature"), Otherwise, Kept, |image| {
        image.map(72, |bits| bits | 1 << 20);
    }),
    case("external data file", Error("external data file"), Otherwise, Kept, |image| {
        image.map(72, |bits| bits | 4);
    }),
    case("entries of 16 bytes, of which there are too few", Error("l1_size"), Otherwise, Kept, |image| {
        image.map(72, |bits| bits | 16)
    }),
    case("encryption", Error("encryption"), Otherwise, Kept, |image| image.put_u32(32, 2)),
    case("refcount table off a cluster boundary", Error("refcount_table_offset"), Otherwise, Kept, |image| {
        image.map(48, |at| at + 512);
    }),
    case("no refcount table", Error("refcount_table_clusters"), Otherwise, Kept, |image| {
        image.put_u32(56, 0)
    }),
    case("refcount table of 1 TiB", Error("refcount_table_clusters"), Otherwise, Kept, |image| {
        image.put_u32(56, 1 << 24);
    }),
    case("L1 table off a cluster boundary", Error("l1_table_offset"), Otherwise, Kept, |image| {
        image.map(40, |at| at + 512);
    }),
    case("L1 table on the header", Error("l1_table_offset"), Otherwise, Kept, |image| image.put_u64(40, 0)),
    case("L1 table on the refcount table", Error("lies over"), Otherwise, Kept, |image| {
        image.put_u64(40, image.refcount_table());
    }),
    case("L1 table too small", Error("l1_size"), Otherwise, Kept, |image| image.put_u32(36, 1)),
    case("L1 table of 32 GiB", Error("l1_size"), Otherwise, Kept, |image| image.put_u32(36, u32::MAX)),
    case("more snapshots than allowed", Error("nb_snapshots"), Otherwise, Kept, |image| {
        image.put_u32(60, 1 << 20)
    }),
    case("snapshot table off a cluster boundary", Error("snapshots_offset"), Otherwise, Kept, |image| {
        image.map(64, |at| at + 8);
    }),
    case("extension longer than the header's cluster", Error("extension"), Otherwise, Kept, |image| {
        image.put_u32(u64::from(image.u32_at(100)) + 4, 1 << 30);
    }),
    case("backing name past the first cluster", Error("backing_file"), Otherwise, Kept, |image| {
        image.put_u64(8, 65530);
        image.put_u32(16, 100);
    }),
    case("cut short within the header", Error("header"), Otherwise, Kept, |image| image.set_len(60)),
    case("empty file", Error("header"), Otherwise, Kept, |image| image.set_len(0)),
];

fn try_case(case: &Case, golden: &std::path::Path, dir: &std::path::Path) {
    let name = case.name;
    let path = dir.join(format!("{}.qcow2", name.replace([' ', '\''], "-")));
    std::fs::copy(golden, &path).unwrap();
    (case.edit)(&Editor::open(&path));
    let before = std::fs::read(&path).unwrap();
    let checked = check(&path, &Options::default());
    let stock = Judgement::by_stock(&path);
    let report = match (&case.expect, checked) {
        (Error(part), Err(error)) => {
            let text = error.to_string();
            assert!(text.contains(part), "{name}: {text}");
            return;
        }
        (Error(part), Ok(report)) => panic!("{name}: no error with {part:?}: {report:?}"),
        (_, Err(error)) => panic!("{name}: {error}"),
        (_, Ok(report)) => report,
    };
    assert_eq!(std::fs::read(&path).unwrap(), before, "{name}: a check without repair wrote");
    match &case.expect {
        Finding(kind) => {
            let found = report.findings.iter().any(|finding| finding.kind.name() == *kind);
            assert!(found, "{name}: no {kind} in {:#?}", report.findings);
        }
        _ => assert!(report.is_clean(), "{name}: {report:#?}"),
    }
    let ours = Judgement::from(&report);
    match case.stock {
        Same => assert_eq!(Some(&ours), stock.as_ref(), "{name}: ours, stock; {:#?}", report.findings),
        Milder => {
            let stock = stock.expect("stock checks it");
            assert!(stock.corruptions <= ours.corruptions && stock.leaks <= ours.leaks, "{name}: {stock:?}");
        }
        Otherwise => assert_ne!(stock_rc(&path), Some(0), "{name}: stock finds nothing wrong"),
    }
    repair_and_compare(case, &path, report.corruptions);
}

fn repair_and_compare(case: &Case, path: &std::path::Path, corruptions: u64) {
    let name = case.name;
    let before = path.with_extension("before");
    std::fs::copy(path, &before).unwrap();
    let report = repair(path, Repair::All);
    if case.after == Mended {
        assert!(report.is_clean() && !report.dirty && !report.marked_corrupt, "{name}: {report:#?}");
        assert_eq!(stock_rc(path), Some(0), "{name}: stock after repair");
    } else {
        assert!(report.corruptions <= corruptions, "{name}: {report:#?}");
        assert!(!report.is_clean(), "{name}: said to be beyond repair, but was mended");
    }
    if is_readable(&before) {
        assert!(same_contents(&before, path), "{name}: the repair changed the disk");
    }
}

fn try_all(cases: &[Case]) {
    try_on(make_rich, cases);
}

fn try_on(make: fn(&std::path::Path), cases: &[Case]) {
    let dir = tempfile::tempdir().unwrap();
    let golden = dir.path().join("golden.qcow2");
    make(&golden);
    cases.iter().for_each(|case| try_case(case, &golden, dir.path()));
}

#[test]
fn broken_refcounts() {
    try_all(REFCOUNTS);
}

#[test]
fn broken_copied_flags() {
    try_all(COPIED_FLAGS);
}

#[test]
fn broken_reserved_bits() {
    try_all(RESERVED_BITS);
}

#[test]
fn broken_places() {
    try_all(PLACES);
}

#[test]
fn broken_overlaps() {
    try_all(OVERLAPS);
}

#[test]
fn broken_snapshots_and_bitmaps() {
    try_all(SNAPSHOTS_AND_BITMAPS);
}

#[test]
fn broken_subclusters() {
    try_on(make_extended, SUBCLUSTERS);
}

#[test]
fn broken_headers() {
    try_all(HEADERS);
}
