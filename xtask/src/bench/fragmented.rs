//! `cargo xtask bench fragmented`: disks whose 4 KiB blocks lie all over a long history.
//!
//! ```text
//!   a full disk, rewritten in random order, a snapshot after each share of it
//!     ├── 100 layers ───► sequential reads beside a fresh disk, warm and cold
//!     └── 1,000 layers ─► random reads beside one layer, with metadata in its budget and not; memory
//!   50 GiB, 1,000 random writes before each of 1,000 snapshots ─► opening
//!      └──► report (rows beside their bounds) ──► docs/measurements/fragmented.json, docs/snapshots.md
//! ```
//!
//! A served disk makes the layers, as a guest and its snapshots do. All data is read back and checked.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};

use super::cached::forget;
use super::fresh::{BLOCK, COUNTED, LARGE, Side, TURNS, compare, full, sparse, wait_until_finalized};
use super::history::take::{Take as _, Vmstrata};
use super::load::{Access, Load, in_random_order};
use super::machine::by_turns;
use super::report::{Report, Row};
use super::results::ratios;
use super::server::{self, Kind, vmstrata};
use super::shown::Shown;
use crate::chain::pattern::Writer;

/// Where the results are kept.
pub const SHOWN: Shown = Shown {
    file: "docs/measurements/fragmented.json",
    summary: "docs/snapshots.md",
    page: "docs/measurements/fragmented.md",
    mark: "bench:fragmented",
};

/// The server's default for metadata, in MiB.
const BUDGET_MIB: f64 = 64.0;

/// What the command line asks for.
#[derive(Clone, Debug)]
pub struct Options {
    /// Bytes of the disks that are read.
    pub size: u64,
    /// Bytes of the disk that is opened.
    pub large: u64,
    /// Snapshots of the disk that is read in sequence, and of the others.
    pub layers: [u16; 2],
    /// Rounds.
    pub rounds: u32,
    /// Of each turn.
    pub turn: Duration,
    /// Where files are made, and removed at the end.
    pub dir: PathBuf,
    /// Root of the repository, to write results into; `None` prints only.
    pub publish: Option<PathBuf>,
}

impl Options {
    /// The benchmark of the bounds.
    pub fn full(dir: PathBuf) -> Self {
        let turn = Duration::from_millis(250);
        Self { size: 4 << 30, large: LARGE, layers: [100, 1000], rounds: 5, turn, dir, publish: None }
    }

    /// Everything once, small; its figures mean little.
    pub fn quick(dir: PathBuf) -> Self {
        let turn = Duration::from_millis(50);
        Self { size: 64 << 20, large: 1 << 30, layers: [10, 20], rounds: 1, turn, dir, publish: None }
    }
}

/// Runs the benchmark and, when asked to, writes its files.
///
/// # Errors
/// When a server or a tool fails, a byte is wrong, or files cannot be written.
pub fn run(options: &Options) -> Result<Report> {
    ensure!(vmstrata().exists(), "build vmstrata first: cargo build --release");
    server::raise_file_limit()?;
    fs::create_dir_all(&options.dir)?;
    let dir = tempfile::Builder::new().prefix("fragmented-").tempdir_in(&options.dir)?;
    let mut report = Report::new("qemu-storage-daemon", parameters(options));
    let fresh = full(options.size, Kind::Vmstrata, dir.path())?;
    for (layers, measure) in options.layers.into_iter().zip([sequential, random]) {
        let count = (options.size / BLOCK as u64).div_ceil(u64::from(layers));
        let path = full(options.size, Kind::Vmstrata, &dir.path().join(layers.to_string()))?;
        let scattered = Scattered::make(path, layers, count)?;
        measure(options, &fresh, &scattered, &mut report)?;
        fs::remove_dir_all(scattered.path.parent().context("a directory")?)?;
    }
    let large = sparse(dir.path(), options.large)?;
    opening(options, &Scattered::make(large, options.layers[1], COUNTED as u64)?, &mut report)?;
    SHOWN.publish(options.publish.as_deref(), &report)?;
    Ok(report)
}

/// A disk with a snapshot after each share of its blocks was written.
struct Scattered {
    path: PathBuf,
    layers: u16,
    /// By block: which share it belongs to, if it was written.
    owners: Vec<Option<u16>>,
}

impl Scattered {
    fn make(path: PathBuf, layers: u16, count: u64) -> Result<Self> {
        eprintln!("making {layers} layers");
        let mut side = Side::start(Kind::Vmstrata, &path)?;
        let control = side.server.as_ref().context("a server")?.control();
        let mut take = Vmstrata { disk: path.clone(), control: control.clone() };
        let blocks = side.client.capacity() / BLOCK as u64;
        let mut owners = vec![None; blocks as usize];
        for round in 0..layers {
            let first = u64::from(round) * count;
            for place in first..blocks.min(first + count) {
                owners[in_random_order(place, blocks) as usize] = Some(round);
            }
            let access = Access::Share { round, count };
            let load = Load { access, fua: false, block: BLOCK, depth: 32, time: Duration::MAX, seed: 0 };
            side.client.run(&load)?;
            take.take(&format!("s{round}"))?;
        }
        wait_until_finalized(&control)?;
        side.stop()?;
        rustix::fs::sync();
        Ok(Self { path, layers, owners })
    }

    /// Who wrote at `at`, where the whole disk was written.
    fn writer(&self, at: u64) -> Option<Writer> {
        self.owners[(at / BLOCK as u64) as usize].map(Writer::client)
    }

    fn block(&self) -> Result<u64> {
        let written = self.owners.iter().position(Option::is_some);
        Ok(written.context("something was written")? as u64 * BLOCK as u64)
    }

    /// Reads and checks the whole disk.
    fn verify(&self, side: &mut Side) -> Result<()> {
        side.client.verify(Duration::ZERO, true, &|at| self.writer(at)).map(drop)
    }
}

/// Sequential reads, as MiB are read one after the other.
fn sequential(options: &Options, fresh: &Path, scattered: &Scattered, report: &mut Report) -> Result<()> {
    let access = Access::SequentialRead;
    let load = Load { access, fua: false, block: 1 << 20, depth: 4, time: options.turn, seed: 0 };
    let paths = [&scattered.path, fresh];
    let start =
        || paths.into_iter().map(|path| Side::start(Kind::Vmstrata, path)).collect::<Result<Vec<_>>>();
    let name = |what: &str| format!("1 MiB sequential reads, QD4, {} layers{what}", scattered.layers);

    let mut sides = start()?;
    scattered.verify(&mut sides[0])?;
    let warm = compare(options.rounds, &mut sides, &load)?;
    sides.into_iter().try_for_each(Side::stop)?;
    report.add(Row::median(&name(", warm"), "MiB/s", &warm[0]));
    report.add(Row::median("the same of a fresh disk", "MiB/s", &warm[1]));
    report.add(Row::median(&name(" / a fresh disk, warm"), "", &ratios(&warm[0], &warm[1])).at_least(0.5));

    let mut cold = [Vec::new(), Vec::new()];
    for round in 0..options.rounds {
        let mut both: Vec<_> = paths.into_iter().zip(&mut cold).collect();
        by_turns(&mut both, round);
        for (path, rates) in both {
            // Only a server that is new has none of the pages mapped.
            let mut side = Side::start(Kind::Vmstrata, path)?;
            for entry in fs::read_dir(path.parent().context("a directory")?)? {
                forget(&entry?.path())?;
            }
            let load = Load { time: options.turn * 4, seed: u64::from(round), ..load };
            rates.push(side.client.run(&load)?.iops());
            side.stop()?;
        }
    }
    report.add(Row::median(&name(", cold"), "MiB/s", &cold[0]));
    report.add(Row::median(&name(" / a fresh disk, cold"), "", &ratios(&cold[0], &cold[1])));
    Ok(())
}

/// Random reads, with all of the map in memory and with a quarter of it; and the memory that all of the disk takes.
fn random(options: &Options, fresh: &Path, scattered: &Scattered, report: &mut Report) -> Result<()> {
    // A word of 8 bytes for each block.
    let quarter = options.size / BLOCK as u64 * 8 / 4;
    let tight = vec!["--metadata-cache".to_owned(), quarter.to_string()];
    let access = Access::RandomRead;
    let load = Load { access, fua: false, block: BLOCK, depth: 32, time: options.turn, seed: 0 };
    let name = |what: &str| format!("4 KiB random reads, QD32, {} layers{what}", scattered.layers);
    for (what, flags, bound) in
        [("map within its budget", Vec::new(), 0.95), ("budget a quarter of the map", tight, 0.5)]
    {
        let is_usual = flags.is_empty();
        let mut sides = vec![
            Side::start_with(Kind::Vmstrata, &scattered.path, flags)?,
            Side::start(Kind::Vmstrata, fresh)?,
        ];
        scattered.verify(&mut sides[0])?;
        let resident = sides[0].server.as_ref().context("a server")?.resident_bytes()?;
        let rates = compare(options.rounds, &mut sides, &load)?;
        sides.into_iter().try_for_each(Side::stop)?;
        if is_usual {
            let memory = format!(
                "memory, {} layers, everything read; its budget of metadata included",
                scattered.layers
            );
            let mib = resident as f64 / f64::from(1 << 20);
            report.add(Row::median(&memory, "MiB", &[mib]).at_most(32.0 + BUDGET_MIB));
        }
        report.add(Row::median(&name(&format!(", {what}")), "IOPS", &rates[0]));
        report.add(Row::median("the same of a fresh disk", "IOPS", &rates[1]));
        let ratio = name(&format!(" / 1 layer: {what}"));
        report.add(Row::median(&ratio, "", &ratios(&rates[0], &rates[1])).at_least(bound));
    }
    Ok(())
}

/// From the start of a server to its first read answered.
fn opening(options: &Options, scattered: &Scattered, report: &mut Report) -> Result<()> {
    let at = scattered.block()?;
    let mut times = Vec::new();
    for _ in 0..options.rounds {
        let start = Instant::now();
        let mut side = Side::start(Kind::Vmstrata, &scattered.path)?;
        side.client.read(at, BLOCK)?;
        times.push(start.elapsed().as_secs_f64() * 1000.0);
        side.client.check(at, BLOCK, &|at| scattered.writer(at))?;
        side.stop()?;
    }
    let size = options.large >> 30;
    let name = format!("open {} layers of a {size} GiB disk: to the first read answered", scattered.layers);
    report.add(Row::median(&name, "ms", &times).at_most(30.0));
    Ok(())
}

fn parameters(options: &Options) -> Vec<(String, String)> {
    let named = |name: &str, value: String| (name.to_owned(), value);
    vec![
        named("disks that are read", format!("{} MiB, rewritten once in 4 KiB blocks", options.size >> 20)),
        named("disk that is opened", format!("{COUNTED} random 4 KiB writes before each snapshot")),
        named("served for writing", "cache=host".into()),
        named(
            "rounds",
            format!("{}, of {TURNS} turns of {} ms each", options.rounds, options.turn.as_millis()),
        ),
        named("all of it", "cargo xtask bench fragmented".into()),
    ]
}
