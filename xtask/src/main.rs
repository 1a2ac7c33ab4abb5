//! `cargo xtask`: the chores of this repository. Run it without arguments for the list.

use anyhow::Result;
use clap::Parser;

mod chain_command;
mod load_command;

/// Chores of this repository.
#[derive(Parser)]
#[command(name = "cargo xtask", version)]
enum Command {
    /// Make a qcow2 chain, or verify a disk against one.
    Chain(chain_command::Chain),
    /// Run one load against a vhost-user-blk socket or a raw file.
    Load(load_command::LoadCommand),
}

fn main() -> Result<()> {
    match Command::parse() {
        Command::Chain(chain) => chain.run(),
        Command::Load(load) => load.run(),
    }
}
