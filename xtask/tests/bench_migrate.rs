//! Moves that follow their guests, small: in the model each byte is moved once, and the same traces give the same figures; on real storage
//! all figures are there.

use std::fmt::Write as _;
use std::fs;
use std::path::Path;

use rand::rngs::SmallRng;
use rand::{Rng as _, SeedableRng as _};
use xtask::bench::migrate::{self, Options, Part};
use xtask::bench::report::Report;

/// A trace of a guest that reads runs here and there on three devices, and writes at random.
fn write_trace(path: &Path, seed: u64) {
    let mut rng = SmallRng::seed_from_u64(seed);
    let mut text = String::new();
    let mut runs = [(0, 0_u64); 4];
    for number in 0..400_u64 {
        let run = &mut runs[rng.random_range(0..4)];
        if rng.random_bool(0.1) {
            *run = (rng.random_range(0..3), rng.random_range(0..100_000));
        }
        let op = u8::from(rng.random_bool(0.8));
        let sectors = rng.random_range(1..64);
        _ = writeln!(text, "{} {} {} {sectors} {op}", number * 1_000_000, run.0, run.1);
        run.1 += sectors;
    }
    fs::write(path, text).unwrap();
}

/// A directory of all traces.
fn traces() -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    let names = ["wsrch-small.trace", "spc_financial1_first9999.ssdsim.ascii", "tpcc-small.trace"];
    names.iter().zip(0..).for_each(|(name, seed)| write_trace(&dir.path().join(name), seed));
    dir
}

fn quick(traces: &Path) -> Options {
    Options::quick(traces.to_owned(), traces.join("files"))
}

/// Measures a part on real storage, and looks whether its files are gone.
pub(crate) fn measured(part: Part) -> Report {
    xtask::build::vmstrata().unwrap();
    let traces = traces();
    let options = Options { parts: vec![part], ..quick(traces.path()) };
    let report = migrate::measure(&options).unwrap();
    assert!(report.rows.iter().all(|row| row.value.is_finite() && row.value > 0.0), "{:?}", report.rows);
    assert_eq!(fs::read_dir(&options.dir).unwrap().count(), 0, "files are left");
    report
}

/// Each kind of move has a guest's mean, its p99, and a rate; the controller's p99 has a bound.
fn has_all_figures(report: &Report) {
    let count = |what: &str| report.rows.iter().filter(|row| row.name.ends_with(what)).count();
    let counts = ["response during a move / without", "p99 during a move / without", "the move"].map(count);
    assert_eq!(counts, [4; 3], "{:?}", report.rows);
    assert_eq!(report.rows.iter().filter(|row| row.bound.is_some()).count(), 1, "{:?}", report.rows);
}

/// The study itself fails if a byte of an image is not moved, or moved twice.
fn study(traces: &Path) -> migrate::Study {
    let study = migrate::model(&quick(traces)).unwrap();
    assert!(study.rows.iter().all(|row| row.value.is_finite() && row.value > 0.0), "{:?}", study.rows);
    assert!(study.rows.iter().filter(|row| row.bound.is_some()).count() >= 8, "{:?}", study.rows);
    for table in &study.tables {
        assert!(!table.lines.is_empty());
        assert!(table.lines.iter().all(|line| line.1.len() == table.columns.len()), "{table:?}");
    }
    study
}

#[test]
fn a_small_study_has_all_figures_and_they_are_the_same_again() {
    let dir = traces();
    let first = study(dir.path());
    let date = first.date.clone();
    assert_eq!(migrate::Study { date, ..study(dir.path()) }, first);
    let beside = migrate::traces_beside(Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap());
    if beside.is_dir() {
        study(&beside);
    }
}

#[test]
fn what_is_no_trace_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("wsrch-small.trace"), "1 2 3\n").unwrap();
    let error = migrate::model(&quick(dir.path())).unwrap_err();
    assert!(format!("{error:#}").contains("wsrch-small.trace:1: no request"), "{error:#}");
}

#[test]
fn moves_beside_traces_are_measured_on_this_machines_disk() {
    has_all_figures(&measured(Part::Disk));
}

#[test]
fn moves_beside_traces_are_measured_from_a_nas() {
    if let Err(why) = xtask::nas::check() {
        eprintln!("not tested: {why}");
        return;
    }
    has_all_figures(&measured(Part::Nas));
}
