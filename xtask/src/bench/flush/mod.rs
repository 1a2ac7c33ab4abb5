//! `cargo xtask bench flush`: guests that flush often, with a flush log and without, beside stock QEMU.
//!
//! ```text
//!   single     one disk: 4 KiB writes into new clusters, each flushed; the floor writes over a raw file, RWF_DSYNC each
//!   many       eight disks at once
//!   greedy     one disk writes as much as it can, others flush now and then
//!   recovery   a server with a long log is killed, and the page cache is gone
//!   guest      SQLite and PostgreSQL in a guest, and appends on ext4 with its journal on a disk of its own
//!      └──► report (rows beside their bounds) ──► docs/measurements/flush.json, docs/flush-log.md
//! ```
//!
//! Who is compared takes turns in one round; a ratio is taken from one round, and the median of the rounds is judged.

mod guest;
mod recovery;

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Result, ensure};

use super::client::{Client, Target};
use super::fleet::{Fleet, Served};
use super::fresh::{BLOCK, full};
use super::load::{Access, Load};
use super::machine::{by_turns, settle};
use super::report::{Report, Row};
use super::results::{median, ratios};
use super::server::{self, Kind, vmstrata};
use super::shown::Shown;
use crate::guest::flushes::Operations;

/// Where the results are kept.
pub const SHOWN: Shown = Shown {
    file: "docs/measurements/flush.json",
    summary: "docs/flush-log.md",
    page: "docs/measurements/flush.md",
    mark: "bench:flush",
};

const SEED: u64 = 20_261_129;
/// Disks of a host.
const DISKS: usize = 8;
/// Bytes of each: so many that a random write nearly always meets a new cluster.
const SIZE: u64 = 50 << 30;
/// More writes than a turn has.
const SHARE: u64 = 20_000;

/// What can be measured on its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Part {
    /// One disk.
    Single,
    /// Eight at once.
    Many,
    /// One that takes all it can.
    Greedy,
    /// A server with a long log starts again.
    Recovery,
    /// Databases and ext4 in a guest.
    Guest,
}

impl Part {
    const ALL: [Self; 5] = [Self::Single, Self::Many, Self::Greedy, Self::Recovery, Self::Guest];
}

/// What the command line asks for.
#[derive(Clone, Debug)]
pub struct Options {
    /// Of each turn.
    pub turn: Duration,
    /// Bytes of the file that the floor writes to.
    pub floor: u64,
    /// Bytes of the log that is recovered.
    pub log: u64,
    /// What the guest does.
    pub operations: Operations,
    /// Rounds.
    pub rounds: u32,
    /// What is measured.
    pub parts: Vec<Part>,
    /// Where files are made, and removed at the end.
    pub dir: PathBuf,
    /// Root of the repository, to write results into; `None` prints only.
    pub publish: Option<PathBuf>,
}

impl Options {
    /// The benchmark of the bounds.
    pub fn full(dir: PathBuf) -> Self {
        Self {
            turn: Duration::from_secs(3),
            floor: 1 << 30,
            log: 1 << 30,
            operations: Operations { appends: 300, transactions: 150, pgbench_s: 10 },
            rounds: 5,
            parts: Part::ALL.to_vec(),
            dir,
            publish: None,
        }
    }

    /// Everything once, small; its figures mean little.
    pub fn quick(dir: PathBuf) -> Self {
        Self {
            turn: Duration::from_millis(200),
            floor: 16 << 20,
            log: 16 << 20,
            operations: Operations { appends: 20, transactions: 20, pgbench_s: 2 },
            rounds: 1,
            parts: Part::ALL.to_vec(),
            dir,
            publish: None,
        }
    }
}

/// Runs the benchmark and, when asked to, writes its files.
///
/// # Errors
/// When a server, a tool or a guest fails, or files cannot be written.
pub fn run(options: &Options) -> Result<Report> {
    ensure!(vmstrata().exists(), "build vmstrata first: cargo build --release");
    server::raise_file_limit()?;
    fs::create_dir_all(&options.dir)?;
    let mut report = Report::new("qemu-storage-daemon", parameters(options));
    for part in &options.parts {
        let dir = tempfile::Builder::new().prefix("flush-").tempdir_in(&options.dir)?;
        let run = match part {
            Part::Single => single,
            Part::Many => many,
            Part::Greedy => greedy,
            Part::Recovery => recovery::run,
            Part::Guest => guest::run,
        };
        run(options, dir.path(), &mut report)?;
    }
    SHOWN.publish_parts(options.publish.as_deref(), &report, options.parts == Part::ALL)?;
    Ok(report)
}

fn parameters(options: &Options) -> Vec<(String, String)> {
    let named = |name: &str, value: String| (name.to_owned(), value);
    let Operations { appends, transactions, pgbench_s } = options.operations;
    vec![
        named(
            "disks",
            format!("{} GiB, empty at first; vhost-user-blk, cache=host, QEMU: writeback", SIZE >> 30),
        ),
        named("log", "a file beside the disks, on the same storage".into()),
        named(
            "floor",
            format!("a raw file of {} MiB whose blocks are there, through io_uring", options.floor >> 20),
        ),
        named("recovered log", format!("{} MiB; the page cache is dropped", options.log >> 20)),
        named("guest", "one processor, software emulation, 256 MiB".into()),
        named(
            "appends",
            format!(
                "{appends} of 4 KiB to a file on ext4, O_SYNC; the tier's repository is a directory of the host"
            ),
        ),
        named(
            "SQLite",
            format!("{transactions} transactions of one row each, journal_mode=DELETE, synchronous=FULL"),
        ),
        named("PostgreSQL", format!("pgbench, scale 1, 4 clients, {pgbench_s} s")),
        named("rounds", format!("{}, of turns of {} s", options.rounds, options.turn.as_secs_f64())),
        named("all of it", "cargo xtask bench flush".into()),
    ]
}

/// Writes into new clusters, each flushed, one after another.
fn flushed(options: &Options, round: u16, depth: usize, block: usize) -> Load {
    let access = Access::Share { round, count: SHARE };
    Load { access, fua: true, block, depth, time: options.turn, seed: 0 }
}

/// Who serves disks.
const SIDES: [Served; 3] = [Served::WithLog, Served::WithoutLog, Served::Qemu];

fn fleets(disks: usize, dir: &Path) -> Result<Vec<Fleet>> {
    SIDES.iter().map(|side| Fleet::start(*side, (disks, SIZE), dir, &[])).collect()
}

fn single(options: &Options, dir: &Path, report: &mut Report) -> Result<()> {
    let mut fleets = fleets(1, dir)?;
    let raw = full(options.floor, Kind::Floor, dir)?;
    let mut floor = Client::connect(&Target::RawFile(raw), SEED, false)?;
    // `[side][round]`, the floor last.
    let (mut rates, mut p99) = (vec![Vec::new(); 4], vec![Vec::new(); 4]);
    for round in 0..options.rounds {
        settle();
        let mut order = [0, 1, 2, 3];
        by_turns(&mut order, round);
        for side in order {
            let found = match fleets.get_mut(side) {
                Some(fleet) => fleet.work(|round, _| flushed(options, round, 1, BLOCK))?[0],
                None => {
                    let access = Access::RandomWrite { round: 0 };
                    floor.run_timed(&Load { access, seed: round.into(), ..flushed(options, 0, 1, BLOCK) })?
                }
            };
            rates[side].push(found.0);
            p99[side].push(found.1);
        }
    }
    let name = "4 KiB writes into new clusters, each flushed, QD1";
    report.add(Row::median(name, "IOPS", &rates[0]).beside(median(&rates[2])));
    report.add(
        Row::median(&format!("{name}: with the log / floor"), "", &ratios(&rates[0], &rates[3]))
            .at_least(0.9),
    );
    report.add(Row::median(&format!("{name}: with the log / without"), "", &ratios(&rates[0], &rates[1])));
    report.add(Row::median(&format!("{name}: p99, with the log / without"), "", &ratios(&p99[0], &p99[1])));
    fleets.into_iter().try_for_each(Fleet::stop)
}

fn many(options: &Options, dir: &Path, report: &mut Report) -> Result<()> {
    let mut fleets = fleets(DISKS, dir)?;
    // `[side][round]`
    let (mut one, mut all) = (vec![Vec::new(); 3], vec![Vec::new(); 3]);
    for round in 0..options.rounds {
        settle();
        let mut order = [0, 1, 2];
        by_turns(&mut order, round);
        for side in order {
            let load = |round, _| flushed(options, round, 1, BLOCK);
            one[side].push(fleets[side].work_on(1, load)?[0].0);
            all[side].push(fleets[side].work(load)?.iter().map(|(rate, _)| rate).sum());
        }
    }
    let name = format!("the same, {DISKS} disks at once");
    report.add(Row::median(&name, "IOPS", &all[0]).beside(median(&all[2])));
    report.add(
        Row::median(&format!("{name}: all of them / one alone"), "", &ratios(&all[0], &one[0]))
            .at_least(3.0)
            .beside(median(&ratios(&all[2], &one[2]))),
    );
    report.add(Row::median(&format!("{name}: with the log / without"), "", &ratios(&all[0], &all[1])));
    fleets.into_iter().try_for_each(Fleet::stop)
}

/// The first disk writes 64 KiB at a time, sixteen at once, each flushed.
fn greedy(options: &Options, dir: &Path, report: &mut Report) -> Result<()> {
    let mut fleets = fleets(DISKS / 2, dir)?;
    let worst = |found: &[(f64, f64)]| found[1..].iter().map(|(_, p99)| *p99).fold(0.0, f64::max);
    // `[side][round]`
    let mut slower = vec![Vec::new(); 3];
    for round in 0..options.rounds {
        settle();
        let mut order = [0, 1, 2];
        by_turns(&mut order, round);
        for side in order {
            let alone = |round, _| flushed(options, round, 1, BLOCK);
            let beside = |round, disk| match disk {
                0 => flushed(options, round, 16, 64 << 10),
                _ => flushed(options, round, 1, BLOCK),
            };
            let alone = worst(&fleets[side].work(alone)?);
            slower[side].push(worst(&fleets[side].work(beside)?) / alone);
        }
    }
    let name = "one disk writes 64 KiB, flushed, QD16: p99 of the others / when it does as they do";
    report.add(Row::median(name, "", &slower[0]).at_most(1.3).beside(median(&slower[2])));
    report.add(Row::median("the same without the log", "", &slower[1]));
    fleets.into_iter().try_for_each(Fleet::stop)
}
