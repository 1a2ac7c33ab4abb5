//! `cargo xtask bench memory`: what snapshots of guests' memory cost, beside full copies and QEMU's own.
//!
//! ```text
//!   for each kind of work:  Stage (guest of 1 GiB at work, its disk served by vmstrata)
//!      ├─ taken     vm snapshot in every mode into empty vaults: bytes by cause, duration, pause
//!      ├─ copies    the same memory as three full copies, and compressed; QEMU's migrate to a file
//!      └─ rollback  the guest killed and restored, with and without its cache: time, and work done afterwards
//!   large: guests of 4 GiB, their pages classified on one processor, and one full of file cache taken and restored
//!      └──► report (rows beside their bounds) ──► docs/measurements/memory.json, docs/memory-snapshots.md
//! ```
//!
//! Everything is done by the commands that users have and measured from outside. All copies lie on one disk, so times are
//! those of three copies there, for everyone.

mod copies;
mod large;
mod rollback;
mod sample;
mod stage;
mod taken;

use std::fs;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};

use self::sample::Samples;
use self::stage::Stage;
use super::report::Report;
use super::server;
use super::shown::Shown;
use crate::guest::Guest;

/// Where the results are kept.
pub const SHOWN: Shown = Shown {
    file: "docs/measurements/memory.json",
    summary: "docs/memory-snapshots.md",
    page: "docs/measurements/memory.md",
    mark: "bench:memory",
};

/// Copies of what a guest cannot live without, and of everything in the full copies.
const COPIES: usize = 3;

/// What the command line asks for.
#[derive(Clone, Debug)]
pub struct Options {
    /// MiB of a guest.
    pub mib: u32,
    /// MiB of the guests of which is measured what takes longer the larger they are; left out if `None`.
    pub large_mib: Option<u32>,
    /// Kinds of work, as `works-init.sh` calls them.
    pub works: Vec<String>,
    /// Snapshots of each guest.
    pub rounds: usize,
    /// For how long the work of a restored guest is counted.
    pub after: Duration,
    /// Where disks and vaults are made, and removed at the end.
    pub dir: PathBuf,
    /// Root of the repository, to write results into; `None` prints only.
    pub publish: Option<PathBuf>,
}

/// All kinds of work.
pub const WORKS: [&str; 4] = ["files", "database", "search", "build"];

impl Options {
    /// Guests of 1 GiB.
    pub fn full(dir: PathBuf) -> Self {
        Self {
            mib: 1024,
            large_mib: Some(4096),
            works: WORKS.map(str::to_owned).to_vec(),
            rounds: 3,
            after: Duration::from_secs(10),
            dir,
            publish: None,
        }
    }
}

/// Runs the benchmark and, when asked to, writes its files.
///
/// # Errors
/// When a guest, a server or a tool fails, or files cannot be written.
pub fn run(options: &Options) -> Result<Report> {
    ensure!(server::vmstrata().exists(), "build vmstrata first: cargo build --release");
    fs::create_dir_all(&options.dir)?;
    let start = Instant::now();
    let said = |what: &str| eprintln!("{:5.1} s  {what}", start.elapsed().as_secs_f64());
    let guest = Guest::for_work()?;
    let mut samples = Samples::default();
    for work in &options.works {
        said(&format!("a guest at work: {work}"));
        let mut stage = Stage::start(&guest, work, options)?;
        for round in 0..options.rounds {
            said(&format!("{work}: snapshot {round}"));
            taken::measure(&stage, round, &mut samples)?;
            copies::measure(&stage, &mut samples)?;
            taken::measure_next(&stage, round, &mut samples)?;
        }
        said(&format!("{work}: rollback"));
        rollback::measure(&mut stage, options, &mut samples)?;
    }
    if let Some(mib) = options.large_mib {
        said("large guests");
        large::measure(&guest, mib, options, &mut samples)?;
    }
    said("done");
    let mut report = Report::new("qemu-system-x86_64", parameters(options));
    samples.rows(&mut report);
    SHOWN.publish(options.publish.as_deref(), &report)?;
    Ok(report)
}

fn parameters(options: &Options) -> Vec<(String, String)> {
    let named = |name: &str, value: String| (name.to_owned(), value);
    let mut large = String::from("none");
    if let Some(mib) = options.large_mib {
        large = format!("{mib} MiB; full of file cache: seven eighths of it used");
    }
    vec![
        named("guests", format!("{} MiB, software emulation, one CPU", options.mib)),
        named("large guests", large),
        named("work", options.works.join(", ")),
        named("snapshots of each", options.rounds.to_string()),
        named(
            "copies",
            format!(
                "{COPIES} of critical pages, 1 of clean ones not on the guest's disk, all on one disk, flushed"
            ),
        ),
        named("full copies", format!("{COPIES} files of the memory and the devices' state, flushed")),
        named(
            "stock QEMU",
            "`migrate` of the paused guest to one file, flushed, without a speed limit".into(),
        ),
        named("all of it", "cargo xtask bench memory".into()),
    ]
}
