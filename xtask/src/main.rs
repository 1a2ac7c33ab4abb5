//! `cargo xtask`: the chores of this repository. Run it without arguments for the list.

use std::path::Path;

use anyhow::Result;
use clap::Parser;

mod bench_command;
mod chain_command;
mod load_command;

/// Chores of this repository.
#[derive(Parser)]
#[command(name = "cargo xtask", version)]
enum Command {
    /// Make a qcow2 chain, or verify a disk against one.
    Chain(chain_command::Chain),
    /// Measure against stock QEMU and the floor.
    Bench(bench_command::Bench),
    /// Run one load against a vhost-user-blk socket or a raw file.
    Load(load_command::LoadCommand),
}

/// The root of the repository.
fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("xtask lies in the root")
}

fn main() -> Result<()> {
    match Command::parse() {
        Command::Chain(chain) => chain.run(),
        Command::Bench(bench) => bench.run(),
        Command::Load(load) => load.run(),
    }
}
