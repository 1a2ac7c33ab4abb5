//! `cargo xtask bench history`: what a thousand snapshots of a live disk cost, beside stock QEMU.
//!
//! ```text
//!   disk (50 GiB, 90 % mapped, sparse) ──► live: snapshots of a served disk, guest writing ──► History
//!                                     └──► live: the same through stock QEMU and QMP         │
//!   opened, space, changes: the same files, opened, checked by qemu-img, compared ◄──────────┘
//!   merging: snapshots from the middle deleted, a guest at work on another disk, through both
//!   reads: 1,000 layers / 1 layer, on chains whose data is there
//!      └──► report (rows beside their bounds) ──► docs/measurements/history.json, docs/snapshots.md
//! ```
//!
//! The history is made by the commands that users have, one process each, and everything is measured from outside. Data
//! is checked: blocks are read back after the history was made, and `qemu-img check` judges every layer.

mod changes;
mod disk;
mod guest;
mod live;
mod merging;
mod opened;
mod reads;
mod space;
pub(super) mod take;
mod trace;

use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};

use super::machine::FreeMemory;
use super::report::Report;
use super::server;
use super::shown::Shown;

/// Where the results are kept.
pub const SHOWN: Shown = Shown {
    file: "docs/measurements/history.json",
    summary: "docs/snapshots.md",
    page: "docs/measurements/history.md",
    mark: "bench:history",
};

/// Tells this benchmark's data from others'.
const SEED: u64 = 20_260_301;
const CLUSTER: u64 = 64 << 10;
const BLOCK: usize = 4 << 10;

/// What the command line asks for.
#[derive(Clone, Debug)]
pub struct Options {
    /// Bytes of the disk.
    pub size: u64,
    /// Snapshots in all.
    pub snapshots: usize,
    /// Those that are taken while a guest writes without a break.
    pub pace: Pace,
    /// Bytes at the disk's start that this guest writes to; a snapshot makes it copy each cluster of them once.
    pub working_set: u64,
    /// Bytes that a merge copies while a guest works.
    pub merged: u64,
    /// Bytes of the disks whose reads are compared.
    pub reads_size: u64,
    /// Times that a thing is done again, where one time is little.
    pub rounds: u32,
    /// What is measured.
    pub parts: Vec<Part>,
    /// Where files are made, and removed at the end.
    pub dir: PathBuf,
    /// Root of the repository, to write results into; `None` prints only.
    pub publish: Option<PathBuf>,
}

/// A part of the benchmark that can be run by itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Part {
    /// Snapshots of a live disk, and the history that they leave: differences, bytes, opening.
    Live,
    /// Snapshots deleted from the middle while a guest works.
    Merging,
    /// Reads of many layers beside reads of one.
    Reads,
}

impl Part {
    /// The whole benchmark.
    pub const ALL: [Self; 3] = [Self::Live, Self::Merging, Self::Reads];
}

/// How snapshots follow each other while a guest writes.
#[derive(Clone, Copy, Debug)]
pub struct Pace {
    /// Snapshots with a whole `second` before and after, for throughput.
    pub spaced: usize,
    /// Further ones, for latency only.
    pub close: usize,
    /// What is looked at before and after.
    pub second: Duration,
}

impl Pace {
    /// Sets memory free for what comes next, and waits until the host is done with what was free before: it begins with that after
    /// two seconds. (Where a `second` is shorter, figures mean little anyway.)
    fn memory(&self, dir: &Path, bytes: usize) -> Result<FreeMemory> {
        let memory = FreeMemory::touched(dir, bytes)?;
        std::thread::sleep(self.second.mul_f64(2.3));
        Ok(memory)
    }
}

impl Options {
    /// The benchmark of the issue: 50 GiB, 1,000 snapshots.
    pub fn full(dir: PathBuf) -> Self {
        Self {
            size: 50 << 30,
            snapshots: 1000,
            pace: Pace { spaced: 30, close: 70, second: Duration::from_secs(1) },
            working_set: 64 << 20,
            merged: 192 << 20,
            reads_size: 4 << 30,
            rounds: 5,
            parts: Part::ALL.to_vec(),
            dir,
            publish: None,
        }
    }

    /// Everything once, small; its figures mean little.
    pub fn quick(dir: PathBuf) -> Self {
        Self {
            size: 1 << 30,
            snapshots: 50,
            pace: Pace { spaced: 3, close: 5, second: Duration::from_millis(300) },
            working_set: 16 << 20,
            merged: 16 << 20,
            reads_size: 64 << 20,
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
/// When a server or a tool fails, a byte is wrong, a layer is not clean, or files cannot be written.
pub fn run(options: &Options) -> Result<Report> {
    server::raise_file_limit()?;
    ensure!(server::vmstrata().exists(), "build vmstrata first: cargo build --release");
    let guests = options.pace.spaced + options.pace.close;
    ensure!(guests > 0 && options.snapshots >= guests + 2 * disk::SPECIAL, "too few snapshots");
    fs::create_dir_all(&options.dir)?;
    let mut report = Report::new("qemu-storage-daemon", parameters(options));
    let start = Instant::now();
    let said = |what: &str| eprintln!("{:5.1} s  {what}", start.elapsed().as_secs_f64());
    for part in &options.parts {
        let dir = tempfile::Builder::new().prefix("history-").tempdir_in(&options.dir)?;
        match part {
            Part::Live => measure_live(options, dir.path(), &said, &mut report)?,
            Part::Merging => {
                said("snapshots deleted under a guest, by both");
                merging::measure(options, dir.path(), &mut report)?;
            }
            Part::Reads => {
                said("reads");
                reads::measure(options, dir.path(), &mut report)?;
            }
        }
    }
    said("done");
    SHOWN.publish(options.publish.as_deref(), &report)?;
    Ok(report)
}

/// Makes the history under a guest, and looks at what it left.
fn measure_live(options: &Options, dir: &Path, said: &dyn Fn(&str), report: &mut Report) -> Result<()> {
    said("snapshots of a live disk");
    let (history, felt) = live::vmstrata(options, dir, report)?;
    said("the same by stock QEMU");
    let qemu = live::qemu(options, dir)?;
    live::rows(&felt, &qemu, report);
    said("differences");
    changes::measure(&history, options.rounds, report)?;
    said("qemu-img check of every layer");
    space::measure(&history, dir, report)?;
    said("open");
    opened::measure(&history, options.rounds, report)
}

fn parameters(options: &Options) -> Vec<(String, String)> {
    let named = |name: &str, value: String| (name.to_owned(), value);
    let pace = options.pace;
    vec![
        named("disk", format!("{} GiB, 90 % of its 64 KiB clusters mapped", options.size >> 30)),
        named("snapshots", options.snapshots.to_string()),
        named("snapshots under a writing guest", (pace.spaced + pace.close).to_string()),
        named("guest", format!("4 KiB random writes, QD8, to {} MiB", options.working_set >> 20)),
        named(
            "guest during merges",
            format!(
                "4 KiB random reads and writes in turn, QD8; {} MiB copied at the default speed limit",
                options.merged >> 20
            ),
        ),
        named("disks of the reads", format!("{} MiB", options.reads_size >> 20)),
        named("all of it", "cargo xtask bench history".into()),
    ]
}
