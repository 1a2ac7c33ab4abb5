//! `vmstrata index` on the command line.

use clap::{Args, Subcommand};
use vmstrata_disk::Format;

use super::{BackingArgs, ControlArgs};
use crate::disk_spec::format_parser;

/// `vmstrata index`
#[derive(Debug, Args)]
#[command(after_help = HELP)]
pub struct IndexArgs {
    /// What to do with them.
    #[command(subcommand)]
    pub command: IndexCommand,
}

const HELP: &str = "\
Examples:
  vmstrata index build web.qcow2
  vmstrata index verify web.qcow2
  vmstrata index drop web.qcow2

An index lets a chain of any length open at once. It belongs to a frozen layer and answers for it and all below. \
Files made by vmstrata take it past their allocated end; beside others, a file NAME.vmsx holds it. Stock tools find \
both clean, and whatever they change is noticed when a disk is opened. docs/format.md describes it.";

/// The commands of `vmstrata index`.
#[derive(Debug, Subcommand)]
pub enum IndexCommand {
    /// Give every frozen layer of a chain an index that lacks one
    Build(IndexBuildArgs),
    /// Compare every index of a chain with the layers' tables
    Verify(IndexVerifyArgs),
    /// Remove every index from a chain
    Drop(IndexDropArgs),
}

/// What the commands have in common.
#[derive(Debug, Args)]
pub struct IndexCommonArgs {
    /// What DISK holds; looked up in the file if omitted
    #[arg(long, short = 'f', value_name = "FORMAT", value_parser = format_parser())]
    pub format: Option<Format>,
    /// Where backing files may be.
    #[command(flatten)]
    pub backing: BackingArgs,
    /// Print the result as JSON
    #[arg(long)]
    pub json: bool,
    /// Show no progress
    #[arg(long, short)]
    pub quiet: bool,
}

/// `vmstrata index build`
#[derive(Debug, Args)]
#[command(after_help = BUILD_HELP)]
pub struct IndexBuildArgs {
    /// The disk: its active layer, which may be in use
    #[arg(value_name = "DISK")]
    pub disk: std::path::PathBuf,
    /// Index DISK's own file too, for one that others will stand on; no one may be writing it
    #[arg(long)]
    pub top: bool,
    /// The server that may be serving it.
    #[command(flatten)]
    pub server: ControlArgs,
    /// Common options.
    #[command(flatten)]
    pub common: IndexCommonArgs,
}

const BUILD_HELP: &str = "\
Examples:
  vmstrata index build web.qcow2                             all layers below web.qcow2
  vmstrata index build golden.qcow2 --top                    a base image that clones will stand on
  vmstrata index build web.qcow2 --json | jq '[.layers[].bytes] | add'

The server of a disk that is served does it, as a job like those of `vmstrata job`; --json then prints the job. It knows the \
disk's format and where its layers may be. Layers that have a good index keep it; after a chain was copied, this makes the times in it right again.
Exit codes:
  0   every frozen layer has an index, or needs none
  1   the chain cannot be read
  3   some layers have none: reading them costs time at every open
  64  wrong usage";

/// `vmstrata index verify`
#[derive(Debug, Args)]
#[command(after_help = VERIFY_HELP)]
pub struct IndexVerifyArgs {
    /// The disk: its active layer, which may be in use
    #[arg(value_name = "DISK")]
    pub disk: std::path::PathBuf,
    /// Verify the index of DISK's own file too
    #[arg(long)]
    pub top: bool,
    /// Common options.
    #[command(flatten)]
    pub common: IndexCommonArgs,
}

const VERIFY_HELP: &str = "\
Examples:
  vmstrata index verify web.qcow2
  vmstrata index verify web.qcow2 --json | jq '.layers[] | select(.verdict != \"good\")'

Reads every page of every index and all tables. Do this for chains that come from strangers, or drop their indices: \
an index is checked against damage and change, not against who made it.
Exit codes:
  0   all good
  1   the chain cannot be read
  2   an index looks right and says something wrong: drop it, and report it as a bug
  3   indices are missing, out of date or damaged: this costs time, build makes them again
  64  wrong usage";

/// `vmstrata index drop`
#[derive(Debug, Args)]
#[command(after_help = DROP_HELP)]
pub struct IndexDropArgs {
    /// The disk: its active layer; no one may be writing it
    #[arg(value_name = "DISK")]
    pub disk: std::path::PathBuf,
    /// Common options.
    #[command(flatten)]
    pub common: IndexCommonArgs,
}

const DROP_HELP: &str = "\
Examples:
  vmstrata index drop web.qcow2
  vmstrata index drop web.qcow2 --json | jq '[.layers[].bytes_freed] | add'

Other disks that stand on the same layers lose these indices too, which costs them time and nothing else.
Exit codes: 0 removed, 1 some of it could not be removed, 64 wrong usage.";
