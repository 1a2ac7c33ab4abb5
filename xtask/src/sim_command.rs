//! `cargo xtask sim`: the product on a simulated host, run by run, each from a seed.

use std::process::Command;

use anyhow::{Context, Result, ensure};
use clap::Args;

/// Example: `cargo xtask sim --seeds 10000`, or `cargo xtask sim --seed 4711 --verbose` to see one run
#[derive(Args)]
#[command(disable_help_flag = true)]
pub(crate) struct Sim {
    /// What the simulator is told; `--help` lists it.
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    arguments: Vec<String>,
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
            .arg(crate::root().join("sim/Cargo.toml"))
            .arg("--")
            .args(self.arguments);
        ensure!(command.status().context("cargo")?.success(), "a seed failed");
        Ok(())
    }
}
