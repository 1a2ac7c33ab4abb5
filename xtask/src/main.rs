//! `cargo xtask`: the chores of this repository. Run it without arguments for the list.

use std::path::Path;

use anyhow::{Result, ensure};
use clap::Parser;

mod bench_command;
mod chain_command;
mod demo_command;
mod fuzz_command;
mod load_command;
mod sim_command;
mod soak_command;
mod stress_command;

/// Chores of this repository.
#[derive(Parser)]
#[command(name = "cargo xtask", version)]
enum Command {
    /// Check the rules of the sources that the compiler does not.
    Tidy,
    /// Make a qcow2 chain, or verify a disk against one.
    Chain(chain_command::Chain),
    /// Measure against stock QEMU and the floor.
    Bench(bench_command::Bench),
    /// A guest with 500 snapshots, in stock QEMU alone and through vmstrata, side by side.
    Demo(demo_command::Demo),
    /// Feed hostile bytes to parsers and servers, with cargo-fuzz.
    Fuzz(fuzz_command::Fuzz),
    /// A guest through 1,000 snapshots, most deleted from the middle, the server killed now and then.
    Soak(soak_command::Soak),
    /// Run seeds of the deterministic simulation.
    Sim(sim_command::Sim),
    /// Stamped sectors over all exports, through kills, full disks and merges, against a model.
    Stress(stress_command::Stress),
    /// Serve a tiered disk on an NFS server, or the same disk alone: what `bench tier` runs.
    Host(xtask::nas::host::Options),
    /// Run one load against a vhost-user-blk socket or a raw file.
    Load(load_command::LoadCommand),
}

/// The root of the repository.
fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("xtask lies in the root")
}

fn main() -> Result<()> {
    match Command::parse() {
        Command::Tidy => tidy(),
        Command::Chain(chain) => chain.run(),
        Command::Bench(bench) => bench.run(),
        Command::Demo(demo) => demo.run(),
        Command::Fuzz(fuzz) => fuzz.run(),
        Command::Soak(soak) => soak.run(),
        Command::Sim(sim) => sim.run(),
        Command::Stress(stress) => stress.run(),
        Command::Host(host) => xtask::nas::host::run(&host),
        Command::Load(load) => load.run(),
    }
}

fn tidy() -> Result<()> {
    let complaints = xtask::tidy::check(root())?;
    complaints.iter().for_each(|complaint| println!("{complaint}"));
    ensure!(complaints.is_empty(), "{} to mend", complaints.len());
    Ok(())
}
