//! `cargo xtask fuzz`: all targets of `fuzz/`, one after the other, with cargo-fuzz on nightly Rust.

use std::path::Path;
use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};
use clap::Args;

/// Example: `cargo xtask fuzz --seconds 600 --target nbd_client`
#[derive(Args)]
pub(crate) struct Fuzz {
    /// How long each target gets.
    #[arg(long, default_value_t = 60)]
    seconds: u64,
    /// Only this target; all by default.
    #[arg(long)]
    target: Option<String>,
}

impl Fuzz {
    pub(crate) fn run(self) -> Result<()> {
        let fuzz = crate::root().join("fuzz");
        ensure!(
            is_installed(&fuzz),
            "fuzzing needs nightly Rust and cargo-fuzz: `rustup toolchain install nightly`, `cargo install cargo-fuzz`; \
             without them `VMSTRATA_FUZZ_SECONDS=60 cargo test -p vmstrata-fuzz-bodies` does nearly the same"
        );
        let targets = match self.target {
            Some(target) => vec![target],
            None => targets(&fuzz)?,
        };
        for target in targets {
            println!("{target}: {} seconds", self.seconds);
            run(&fuzz, &target, self.seconds)?;
        }
        Ok(())
    }
}

fn is_installed(fuzz: &Path) -> bool {
    let mut version = cargo(fuzz, &["fuzz", "--version"]);
    version.stdout(Stdio::null()).stderr(Stdio::null()).status().is_ok_and(|status| status.success())
}

/// A cargo of the nightly toolchain, whatever toolchain runs us.
fn cargo(fuzz: &Path, arguments: &[&str]) -> Command {
    let mut command = Command::new("rustup");
    command.args(["run", "nightly", "cargo"]).args(arguments).current_dir(fuzz);
    command.env_remove("CARGO").env_remove("RUSTUP_TOOLCHAIN");
    command
}

/// The names of the files in `targets/`.
fn targets(fuzz: &Path) -> Result<Vec<String>> {
    let files = std::fs::read_dir(fuzz.join("targets")).context("fuzz/targets")?;
    let name = |path: &Path| Some(path.file_stem()?.to_str()?.to_owned());
    let mut names: Vec<_> = files.filter_map(|file| name(&file.ok()?.path())).collect();
    names.sort();
    Ok(names)
}

/// New inputs go to `corpus/`, failures to `artifacts/`; seeds are only read.
///
/// No sanitizer: what is unsafe here works on mappings and guest memory, whose bounds none of them knows.
fn run(fuzz: &Path, target: &str, seconds: u64) -> Result<()> {
    let (corpus, seeds) = (format!("corpus/{target}"), format!("seeds/{target}"));
    std::fs::create_dir_all(fuzz.join(&corpus))?;
    let time = format!("-max_total_time={seconds}");
    let mut command = cargo(fuzz, &["fuzz", "run", "--sanitizer", "none", target, &corpus, &seeds, "--"]);
    command.args([time.as_str(), "-timeout=60", "-rss_limit_mb=1024", "-max_len=65536"]);
    ensure!(command.status()?.success(), "{target} failed: see fuzz/artifacts/{target}");
    Ok(())
}
