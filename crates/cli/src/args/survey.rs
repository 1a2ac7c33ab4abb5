//! `vmstrata survey` on the command line.

use std::path::PathBuf;

use clap::{Args, value_parser};

/// `vmstrata survey`
#[derive(Debug, Args)]
#[command(after_help = HELP)]
pub struct SurveyArgs {
    /// Directories to look through, with all below them; or single images
    #[arg(required = true, value_name = "DIR")]
    pub roots: Vec<PathBuf>,
    /// Backing files may also be in DIR and below (repeatable); without it only below what is surveyed
    #[arg(long, value_name = "DIR")]
    pub allow_backing: Vec<PathBuf>,
    /// Call chains of more than N layers long (libvirt refuses more than 200)
    #[arg(long, value_name = "N", default_value_t = 200, value_parser = value_parser!(u32).range(1..))]
    pub long_chain: u32,
    /// Read L2 tables too, and tell how many bytes no disk can see any more (merging gives them back); slower
    #[arg(long)]
    pub deep: bool,
    /// Threads that look at files; as many as there are processors, but 8 at most, if omitted
    #[arg(long, value_name = "N", value_parser = value_parser!(u16).range(1..=64))]
    pub threads: Option<u16>,
    /// Write one self-contained page with plots and tables to FILE
    #[arg(long, value_name = "FILE")]
    pub html: Option<PathBuf>,
    /// Append what is found to FILE, a line a survey, and show it beside what earlier surveys of the same directories found
    #[arg(long, value_name = "FILE")]
    pub history: Option<PathBuf>,
    /// Print the result as JSON
    #[arg(long)]
    pub json: bool,
    /// Show no progress
    #[arg(long, short)]
    pub quiet: bool,
}

const HELP: &str = "\
Examples:
  vmstrata survey /var/lib/libvirt/images
  vmstrata survey /srv/vm --allow-backing /srv/golden --html fleet.html
  vmstrata survey /srv/vm --json | jq -r '.risks[] | [.kind, .chains, .path] | @tsv'
  vmstrata survey /srv/vm --json | jq '[.chains[].layers] | max'
  vmstrata survey /srv/vm --deep --json | jq '.deep'
  vmstrata survey /srv/vm --history /var/lib/vmstrata/survey.jsonl --html fleet.html      every night: how chains grow

Only headers and L1 tables are read (with --deep, L2 tables too), and no lock is taken: disks in use can be looked at. A file counts \
as an image if it starts like qcow2, if its name ends in .qcow2, .qcow, .raw or .img, or if an image names it as its \
backing file. Symbolic links and special files are not opened. A disk is a layer that no other layer stands on.

The model: stock QEMU keeps 138 KiB a layer, and for each layer an L2 cache of 32 MiB at most (less where the layer's \
tables, or its file, are smaller). A vmstrata server keeps 7 MiB, 512 bytes a layer file, and 8 bytes a cluster of \
each disk, 64 MiB at most for all disks together; what a disk does not use, and its guest does not look at, takes \
nothing of that. Times to open and reads per second are those that were measured for chains of that length without \
an index (docs/measurements/chain.json); with one, opening takes less.

Exit codes:
  0   no chain is at risk
  1   the survey could not be made
  2   chains are broken: something missing, looping, unreadable, corrupt, outside, too long, unsupported
  3   chains may be at risk (marked corrupt, unclean, half-deleted, changed, written, long), or parts of the tree could
      not be read
  64  wrong usage";
