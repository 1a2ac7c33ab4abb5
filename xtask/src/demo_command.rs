//! `cargo xtask demo`: the demonstration's command line.

use std::path::PathBuf;

use anyhow::Result;
use clap::Args;
use xtask::demo;
use xtask::size::parse_size;

/// Example: `cargo xtask demo --layers 1000`
#[derive(Args)]
pub(crate) struct Demo {
    /// Snapshots in the disk's history.
    #[arg(long, default_value_t = 500)]
    layers: u32,
    /// Size of the guest's disk; three quarters of it are files.
    #[arg(long, value_parser = parse_size, default_value = "2G")]
    size: u64,
    /// Directory for the disk.
    #[arg(long)]
    dir: Option<PathBuf>,
}

impl Demo {
    pub(crate) fn run(self) -> Result<()> {
        let dir = self.dir.unwrap_or_else(|| super::root().join("target/demo"));
        demo::run(&demo::Options { layers: self.layers, size: self.size, dir })
    }
}
