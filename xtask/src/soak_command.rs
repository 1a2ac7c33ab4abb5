//! `cargo xtask soak`: its command line.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::Result;
use clap::Args;
use xtask::soak;

/// Example: `cargo xtask soak --snapshots 100 --deletes 80 --seed 7`
#[derive(Args)]
pub(crate) struct Soak {
    /// Snapshots to take.
    #[arg(long, default_value_t = 1000)]
    snapshots: usize,
    /// How many of them to delete.
    #[arg(long, default_value_t = 900)]
    deletes: usize,
    /// Milliseconds from one snapshot's end to the next.
    #[arg(long, default_value_t = 150)]
    every_ms: u64,
    /// Snapshots from one kill of the server to the next, on average; 0 never kills it.
    #[arg(long, default_value_t = 25)]
    kill_every: usize,
    /// Check the file system of one in so many of the layers that are left.
    #[arg(long, default_value_t = 5)]
    check_every: usize,
    /// What is drawn.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Directory for the disk.
    #[arg(long)]
    dir: Option<PathBuf>,
}

impl Soak {
    pub(crate) fn run(self) -> Result<()> {
        let start = std::time::Instant::now();
        let outcome = soak::run(&soak::Options {
            snapshots: self.snapshots,
            deletes: self.deletes,
            every: Duration::from_millis(self.every_ms),
            kill_every: self.kill_every,
            check_every: self.check_every,
            seed: self.seed,
            dir: self.dir.unwrap_or_else(|| super::root().join("target/soak")),
        })?;
        println!("seed {}, {} s: {outcome:#?}", self.seed, start.elapsed().as_secs());
        Ok(())
    }
}
