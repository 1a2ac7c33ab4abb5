//! `cargo xtask bench tier`: disks whose epochs go to a NAS, beside the same disk without a NAS, and on one through stock QEMU.
//!
//! ```text
//!   writes, flushed writes   while epochs are shipped, with a delay and without
//!   bytes                    that go to the NAS for those that the guest writes
//!   take-over, restart       from the command to the first read
//!   outage                   the NAS is killed under load, and comes back
//!      └──► report (rows beside their bounds) ──► docs/measurements/tier.json, docs/tier.md
//! ```
//!
//! The NAS is a real server ([`crate::nas`]). Who is compared takes turns in one round; a ratio is taken from one round, and the median of the
//! rounds is judged.

mod bytes;
mod outage;
mod stage;
mod writes;

use std::fs;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Result, ensure};

use super::report::Report;
use super::server::{self, vmstrata};
use super::shown::Shown;
use crate::nas::{self, Nas};
use stage::Stage;

/// Where the results are kept.
pub const SHOWN: Shown = Shown {
    file: "docs/measurements/tier.json",
    summary: "docs/tier.md",
    page: "docs/measurements/tier.md",
    mark: "bench:tier",
};

/// What can be measured on its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Part {
    /// Random writes, and flushed ones, while epochs are shipped.
    Writes,
    /// Bytes that go to the NAS.
    Bytes,
    /// Another host takes a disk of many epochs over.
    TakeOver,
    /// The NAS is gone for a while.
    Outage,
    /// A host that is killed while the NAS is gone begins again.
    Restart,
}

impl Part {
    const ALL: [Self; 5] = [Self::Writes, Self::Bytes, Self::TakeOver, Self::Outage, Self::Restart];
}

/// What the command line asks for.
#[derive(Clone, Debug)]
pub struct Options {
    /// Bytes of the disks that are written to.
    pub size: u64,
    /// Bytes of the disk whose writes are counted.
    pub sparse: u64,
    /// Writes of one of its epochs.
    pub counted: u64,
    /// How old a write becomes before it is published, where guests' speeds are compared.
    pub window: Duration,
    /// The same where a NAS is gone for a while.
    pub short_window: Duration,
    /// Of each turn.
    pub turn: Duration,
    /// What a request to the NAS and its answer take on their way.
    pub round_trips: Vec<Duration>,
    /// Epochs of the disk that is taken over, and its round trip.
    pub epochs: u64,
    /// See [`Options::epochs`].
    pub far: Duration,
    /// How long the NAS is gone.
    pub outage: Duration,
    /// Rounds.
    pub rounds: u32,
    /// What is measured.
    pub parts: Vec<Part>,
    /// Where the hosts' files are made, and removed at the end.
    pub dir: PathBuf,
    /// Root of the repository, to write results into; `None` prints only.
    pub publish: Option<PathBuf>,
}

impl Options {
    /// The benchmark of the bounds.
    pub fn full(dir: PathBuf) -> Self {
        Self {
            size: 1 << 30,
            sparse: 50 << 30,
            counted: 60_000,
            window: Duration::from_secs(30),
            short_window: Duration::from_secs(3),
            turn: Duration::from_secs(20),
            round_trips: [0, 5, 20].map(Duration::from_millis).to_vec(),
            epochs: 1000,
            far: Duration::from_millis(20),
            outage: Duration::from_secs(60),
            rounds: 5,
            parts: Part::ALL.to_vec(),
            dir,
            publish: None,
        }
    }

    /// Everything once, small; its figures mean little.
    pub fn quick(dir: PathBuf) -> Self {
        Self {
            size: 64 << 20,
            sparse: 1 << 30,
            counted: 2000,
            window: Duration::from_millis(500),
            short_window: Duration::from_millis(500),
            turn: Duration::from_secs(2),
            round_trips: [0, 5].map(Duration::from_millis).to_vec(),
            epochs: 20,
            far: Duration::from_millis(5),
            outage: Duration::from_secs(2),
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
/// When a server, a host or a tool fails, or files cannot be written.
pub fn run(options: &Options) -> Result<Report> {
    ensure!(vmstrata().exists(), "build vmstrata first: cargo build --release");
    nas::check()?;
    server::raise_file_limit()?;
    fs::create_dir_all(&options.dir)?;
    let mut report = Report::new("qemu-storage-daemon", parameters(options));
    for part in &options.parts {
        // Each with a NAS that has nothing else to do.
        let dir = tempfile::Builder::new().prefix("tier-").tempdir_in(&options.dir)?;
        let stage = Stage { options, nas: Nas::start(2)?, dir: dir.path() };
        match part {
            Part::Writes => writes::run(&stage, &mut report)?,
            Part::Bytes => bytes::run(&stage, &mut report)?,
            Part::TakeOver => outage::take_over(&stage, &mut report)?,
            Part::Outage => outage::outage(&stage, &mut report)?,
            Part::Restart => outage::restart(&stage, &mut report)?,
        }
    }
    SHOWN.publish_parts(options.publish.as_deref(), &report, options.parts == Part::ALL)?;
    Ok(report)
}

fn parameters(options: &Options) -> Vec<(String, String)> {
    let named = |name: &str, value: String| (name.to_owned(), value);
    vec![
        named(
            "NAS",
            "nfs-ganesha, NFSv3, in memory; 1 Gbit/s, the delay by a proxy; 128 calls at a time".into(),
        ),
        named("on the NAS", "qcow2 through stock QEMU's libnfs driver".into()),
        named("disk", format!("{} MiB, all of its clusters there", options.size >> 20)),
        named(
            "window",
            format!(
                "{} s, and {} s where the NAS is gone; where bytes are counted, an epoch is cut by hand",
                options.window.as_secs_f64(),
                options.short_window.as_secs_f64()
            ),
        ),
        named("rounds", format!("{}, of turns of {} s", options.rounds, options.turn.as_secs_f64())),
        named("all of it", "cargo xtask bench tier".into()),
    ]
}
