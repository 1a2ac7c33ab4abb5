//! Builds the binary under test in the profile this program was built in.

use std::process::Command;

use anyhow::{Context, Result, ensure};

/// Set when the binary is built already. Cargo resolves features for the packages it is given: for others it builds everything again.
const BUILT: &str = "VMSTRATA_BUILT";

/// Makes sure that the `vmstrata` beside this program is there and built from today's sources.
///
/// # Errors
/// When cargo does not run or the build fails.
pub fn vmstrata() -> Result<()> {
    if std::env::var_os(BUILT).is_some() && crate::bench::server::vmstrata().exists() {
        return Ok(());
    }
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let mut build = Command::new(cargo);
    // As `scripts/demo` does.
    build
        .args(["build", "--quiet", "--locked", "--package", "xtask", "--package", "vmstrata-cli"])
        .current_dir(env!("CARGO_MANIFEST_DIR"));
    if !cfg!(debug_assertions) {
        build.arg("--release");
    }
    let status = build.status().context("cargo does not run")?;
    ensure!(status.success(), "vmstrata does not build");
    Ok(())
}
