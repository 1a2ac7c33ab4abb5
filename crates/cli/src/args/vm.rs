//! `vmstrata vm` on the command line.

mod store;

use clap::{Args, Subcommand};

pub use store::{
    VaultArgs, VmDeleteArgs, VmListArgs, VmPruneArgs, VmRepairArgs, VmShowArgs, VmStoreCommand, VmVerifyArgs,
};

/// `vmstrata vm`
#[derive(Debug, Args)]
#[command(after_help = HELP)]
pub struct VmArgs {
    /// What to do.
    #[command(subcommand)]
    pub command: VmCommand,
}

const HELP: &str = "\
Examples:
  vmstrata vm list --vault /srv/a --vault /srv/b --vault /srv/c
  vmstrata vm verify --vault /srv/a --vault /srv/b --vault /srv/c";

/// The commands of `vmstrata vm`.
#[derive(Debug, Subcommand)]
pub enum VmCommand {
    /// Those that look after snapshots that were taken.
    #[command(flatten)]
    Store(VmStoreCommand),
}
