//! `cargo xtask stress`: its command line.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::Result;
use clap::Args;
use xtask::stress::{self, Length};

/// Stamped sectors over vhost-user and NBD, through kills, full disks, snapshots and merges; root for full disks.
///
/// Example: `cargo xtask stress --seed 7 --minutes 10`
///
/// A round's configuration follows from its seed, so `--seed N --rounds 1` runs that of a round again. What meets what does
/// not: threads and processes run side by side.
#[derive(Args)]
pub(crate) struct Stress {
    /// The seed of the first round; each next one has the next number.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Rounds to run.
    #[arg(long, default_value_t = 13, conflicts_with = "minutes")]
    rounds: u64,
    /// Run rounds for so long instead.
    #[arg(long)]
    minutes: Option<f64>,
    /// Directory for the images; that of a round that fails is kept.
    #[arg(long)]
    dir: Option<PathBuf>,
    /// Write what was done to this file, as docs/measurements/stress.md is.
    #[arg(long)]
    report: Option<PathBuf>,
    /// The `vmstrata` to run; built from this checkout if omitted.
    #[arg(long)]
    server: Option<PathBuf>,
}

impl Stress {
    pub(crate) fn run(self) -> Result<()> {
        let start = Instant::now();
        let length = match self.minutes {
            Some(minutes) => Length::Time(Duration::from_secs_f64(minutes * 60.0)),
            None => Length::Rounds(self.rounds),
        };
        let outcome = stress::run(&stress::Options {
            seed: self.seed,
            length,
            dir: self.dir.unwrap_or_else(|| super::root().join("target/stress")),
            server: self.server,
        })?;
        println!(
            "{} rounds from seed {} in {} s, no error",
            outcome.rounds,
            self.seed,
            start.elapsed().as_secs()
        );
        if let Some(report) = self.report {
            std::fs::write(&report, stress::page(self.seed, start.elapsed(), &outcome))?;
        }
        Ok(())
    }
}
