//! Our check beside stock's, over every shape of image, sound and randomly damaged.

use std::path::Path;

use crate::support::*;
use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};
use vmstrata_check::{Options, Repair};

/// An image shape: `qemu-img create` options and the size of the disk.
const SHAPES: &[(&str, &str)] = &[
    ("compat=1.1", "1G"),
    ("compat=0.10", "1G"),
    ("compat=1.1,cluster_size=512", "24M"),
    ("compat=1.1,cluster_size=4k,refcount_bits=1", "64M"),
    ("compat=1.1,cluster_size=1k,refcount_bits=2", "64M"),
    ("compat=1.1,cluster_size=4k,refcount_bits=4", "64M"),
    ("compat=1.1,cluster_size=2k,refcount_bits=8", "64M"),
    ("compat=1.1,cluster_size=8k,refcount_bits=32", "64M"),
    ("compat=1.1,cluster_size=512,refcount_bits=64", "24M"),
    ("compat=1.1,cluster_size=2M", "3G"),
    ("compat=1.1,lazy_refcounts=on", "1G"),
    ("compat=1.1,compression_type=zstd", "1G"),
    ("compat=1.1,extended_l2=on,cluster_size=16k", "64M"),
    ("compat=1.1,extended_l2=on,cluster_size=128k", "1G"),
    ("compat=1.1,extended_l2=on,cluster_size=2M", "3G"),
    ("compat=1.1,preallocation=metadata", "1G"),
    ("compat=1.1,preallocation=metadata,cluster_size=512", "24M"),
    ("compat=1.1", "1025k"),
    ("compat=1.1", "0"),
];

/// Makes an image of a shape and writes all over it; with snapshots where refcounts can count them.
fn make(path: &Path, shape: &str, size: &str, rng: &mut SmallRng) {
    let name = path.to_str().unwrap();
    must("qemu-img", &["create", "-q", "-f", "qcow2", "-o", shape, name, size]);
    let bytes = size.trim_end_matches(['k', 'M', 'G']).parse::<u64>().unwrap()
        << if size.ends_with('G') {
            30
        } else if size.ends_with('M') {
            20
        } else {
            10
        };
    let narrow = ["refcount_bits=1", "refcount_bits=2", "refcount_bits=4"];
    let snapshots = bytes > 0 && !narrow.iter().any(|width| shape.contains(width));
    let cluster = Editor::open(path).cluster();
    for round in 0..3 {
        let mut commands = Vec::new();
        for _ in 0..12 * u64::from(bytes > 0) {
            let mut len = (cluster * rng.random_range(1..8)).min(bytes);
            let mut at = rng.random_range(0..=(bytes - len) / cluster) * cluster;
            if shape.contains("extended_l2") && rng.random() {
                (at, len) =
                    (at + cluster / 32 * rng.random_range(0..20), cluster / 32 * rng.random_range(1..10));
            }
            commands.push(match rng.random_range(0..8) {
                0 => format!("write -z {at} {len}"),
                1 => format!("discard {at} {len}"),
                2 | 3 if at + cluster <= bytes && at.is_multiple_of(cluster) => {
                    format!("write -c -P {round} {at} {cluster}")
                }
                _ => format!("write -P {} {at} {len}", rng.random_range(1..255)),
            });
        }
        // Stock does not compress over what is there: such a command does nothing.
        let mut args = vec!["-f", "qcow2"];
        commands.iter().for_each(|command| args.extend(["-c", command]));
        args.push(name);
        run("qemu-io", &args);
        if snapshots && round < 2 {
            must("qemu-img", &["snapshot", "-c", &format!("s{round}"), name]);
        }
    }
    if shape.contains("compat=1.1") && bytes > 0 {
        must("qemu-img", &["bitmap", "-f", "qcow2", "--add", name, "tracked"]);
    }
}

#[test]
fn sound_images_of_every_shape_are_clean_with_the_same_statistics() {
    let dir = tempfile::tempdir().unwrap();
    let mut rng = SmallRng::seed_from_u64(1);
    for (number, (shape, size)) in SHAPES.iter().enumerate() {
        let path = dir.path().join(format!("{number}.qcow2"));
        make(&path, shape, size, &mut rng);
        let report = agree(&path, shape);
        assert!(report.is_clean() && report.findings.is_empty(), "{shape}: {:#?}", report.findings);
    }
}

/// Every place of the file that metadata lies at, so that damage does not go into data.
fn metadata(image: &Editor) -> Vec<(u64, u64)> {
    let cluster = image.cluster();
    let mut places = vec![(image.refcount_table(), cluster), (image.l1(), u64::from(image.u32_at(36)) * 8)];
    let offsets = |start: u64, entries: u64| {
        (0..entries)
            .map(move |n| image.u64_at(start + n * 8) & OFFSET)
            .filter(|&at| at != 0 && at < image.len())
    };
    places.extend(offsets(image.refcount_table(), cluster / 8).map(|at| (at, cluster)));
    places.extend(offsets(image.l1(), u64::from(image.u32_at(36))).map(|at| (at, cluster)));
    places
}

/// Changes a word of metadata to something plausible or to garbage.
fn damage(image: &Editor, places: &[(u64, u64)], rng: &mut SmallRng) {
    let (start, len) = places[rng.random_range(0..places.len())];
    if len == 0 {
        return;
    }
    // Half of the tables are empty at their ends.
    let span = if rng.random() { len / 8 } else { (len / 8).min(16) };
    let at = start + rng.random_range(0..span) * 8;
    if at + 8 > image.len() {
        return;
    }
    let cluster = image.cluster();
    let host = rng.random_range(0..image.len() / cluster + 2) * cluster;
    let bit = 1u64 << rng.random_range(0..64);
    let how = rng.random_range(0..6);
    image.map(at, |raw| match how {
        0 => 0,
        1 => raw ^ COPIED,
        2 => raw ^ bit,
        3 => host | raw & COPIED,
        4 => host | COPIED | 1,
        _ => raw,
    });
}

/// Differences between ours and stock that the module documentation of `check` announces.
fn is_comparable(report: &vmstrata_check::Report) -> bool {
    use vmstrata_check::FindingKind;
    use vmstrata_qcow2::EntryError;
    report.findings_total == report.findings.len() as u64
        && !report.findings.iter().any(|finding| match &finding.kind {
            FindingKind::Overlap { .. } => true,
            FindingKind::RefcountTableEntry(error) => matches!(error, EntryError::Misaligned { .. }),
            FindingKind::L1Entry(EntryError::Reserved { raw, .. }) => raw & OFFSET == 0,
            FindingKind::L1Entry(error) | FindingKind::L2Entry(error) => !matches!(
                error,
                EntryError::Reserved { .. }
                    | EntryError::Misaligned { .. }
                    | EntryError::CopiedCompressed { .. }
            ),
            kind => kind.severity() == vmstrata_check::Severity::CheckError,
        })
}

#[test]
fn random_damage_is_counted_as_stock_counts_it_and_repairs_keep_every_byte() {
    try_seeds(0..20);
}

#[test]
fn more_random_damage() {
    try_seeds(20..40);
}

fn try_seeds(seeds: std::ops::Range<u64>) {
    let dir = tempfile::tempdir().unwrap();
    let mut compared = 0;
    let mut mended = 0;
    for seed in seeds {
        let mut rng = SmallRng::seed_from_u64(seed);
        let (shape, size) = SHAPES[seed as usize % (SHAPES.len() - 1)];
        let path = dir.path().join("damaged.qcow2");
        let _ = std::fs::remove_file(&path);
        make(&path, shape, size, &mut rng);
        let image = Editor::open(&path);
        let places = metadata(&image);
        (0..rng.random_range(1..6)).for_each(|_| damage(&image, &places, &mut rng));
        let name = format!("seed {seed}, {shape}");
        let options = Options { findings_max: 1_000_000, ..Options::default() };
        let report = check(&path, &options).unwrap_or_else(|error| panic!("{name}: {error}"));
        if is_comparable(&report) {
            agree(&path, &name);
            compared += 1;
        } else {
            assert!(!report.is_clean(), "{name}");
        }
        mended += u64::from(repair_keeps_contents(&path, &name));
    }
    assert!(compared >= 12 && mended >= 7, "{compared} compared, {mended} mended");
}

/// Repairs; whether all is well then.
fn repair_keeps_contents(path: &Path, name: &str) -> bool {
    let before = path.with_extension("before");
    std::fs::copy(path, &before).unwrap();
    let report = repair(path, Repair::All);
    if is_readable(&before) {
        assert!(same_contents(&before, path), "{name}: the repair changed the disk");
    }
    if report.is_clean() {
        assert_eq!(stock_rc(path), Some(0), "{name}: stock after repair");
    }
    report.is_clean()
}
