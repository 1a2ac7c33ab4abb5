//! `cargo xtask sim`: the product on a simulated host, run by run, each from a seed.

use std::process::Command;

use anyhow::{Context, Result, ensure};
use clap::Args;

/// Example: `cargo xtask sim --seeds 10000`, or `cargo xtask sim --seed 4711 --verbose` to see one run
#[derive(Args)]
pub(crate) struct Sim {
    /// How many seeds to run.
    #[arg(long, default_value_t = 1)]
    seeds: u64,
    /// The first one.
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// Build a fault into the product, which the seeds have to find: `vmstrata_store::Planted` names them.
    #[arg(long)]
    plant: Option<String>,
    /// Run each seed twice, and fail where the runs differ in anything.
    #[arg(long)]
    twice: bool,
    /// Print each event.
    #[arg(long)]
    verbose: bool,
}

impl Sim {
    pub(crate) fn run(self) -> Result<()> {
        let mut command = Command::new("cargo");
        // What this workspace and that one build alike is built once.
        command.env(
            "CARGO_TARGET_DIR",
            std::env::var_os("CARGO_TARGET_DIR").unwrap_or(crate::root().join("target").into()),
        );
        command
            .args(["run", "--quiet", "--locked", "--manifest-path"])
            .arg(crate::root().join("sim/Cargo.toml"));
        command.args(["--", "--seeds", &self.seeds.to_string(), "--seed", &self.seed.to_string()]);
        command.args(self.plant.iter().flat_map(|fault| ["--plant", fault]));
        command.args(self.twice.then_some("--twice")).args(self.verbose.then_some("--verbose"));
        ensure!(command.status().context("cargo")?.success(), "a seed failed");
        Ok(())
    }
}
