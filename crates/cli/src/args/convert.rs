//! `convert`: a disk made an image or a raw disk of another kind, or in another place.

use std::path::PathBuf;

use clap::Args;
use vmstrata_disk::Format;

use super::BackingArgs;
use super::backup::{Packing, RestoreAs, SpeedArgs};
use crate::disk_spec::format_parser;
use crate::units::parse_size;

/// `vmstrata convert`
#[derive(Debug, Args)]
#[command(after_help = CONVERT_HELP)]
pub struct ConvertArgs {
    /// The disk: a file, DISK@SNAPSHOT, a block device, a json: description, nbd://HOST/NAME, or - for a raw disk from standard input
    #[arg(value_name = "SRC")]
    pub source: PathBuf,
    /// What to make: a file, a block device, nbd://HOST/NAME, or - for standard output
    #[arg(value_name = "DST")]
    pub target: PathBuf,
    /// What SRC holds; looked up in the file if omitted
    #[arg(long, short = 'f', value_name = "FORMAT", value_parser = format_parser())]
    pub from: Option<Format>,
    /// What to make of it: if omitted raw for what is no file, or is called .raw or .img, else qcow2
    #[arg(long, short = 'O', value_name = "FORMAT", value_enum)]
    pub to: Option<RestoreAs>,
    /// Bytes per cluster: a power of two from 512 to 2M; 64K if omitted
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    pub cluster_size: Option<u64>,
    /// Give each cluster 32 subclusters; for clusters of 16K and more
    #[arg(long)]
    pub subclusters: bool,
    /// How to compress clusters
    #[arg(long, value_name = "TYPE", default_value = "none")]
    pub compress: Packing,
    /// Keep SRC's backing file, and store what lies above it; without it all of the disk is stored
    #[arg(long)]
    pub keep_backing: bool,
    /// Read DST again, from its storage, and compare it with SRC
    #[arg(long, conflicts_with = "no_sync")]
    pub verify: bool,
    /// Do not wait until DST is on stable storage: a power failure may leave any part of it
    #[arg(long)]
    pub no_sync: bool,
    /// Speed.
    #[command(flatten)]
    pub speed: SpeedArgs,
    /// Where backing files may be.
    #[command(flatten)]
    pub backing: BackingArgs,
    /// Replace DST if it exists; needed for block devices and exports, which are overwritten
    #[arg(long)]
    pub force: bool,
    /// Show what would be stored; writes nothing
    #[arg(long)]
    pub dry_run: bool,
    /// Print the result as JSON (on stderr when the disk is on stdout)
    #[arg(long)]
    pub json: bool,
    /// Show no progress
    #[arg(long, short)]
    pub quiet: bool,
}

const CONVERT_HELP: &str = "\
Examples:
  vmstrata convert disk.raw disk.qcow2
  vmstrata convert web.qcow2@monday web.raw
  vmstrata convert web.qcow2 small.qcow2 --compress zstd --verify
  vmstrata convert old.qcow2 new.qcow2 --cluster-size 128K --subclusters
  vmstrata convert overlay.qcow2 copy.qcow2 --keep-backing
  vmstrata convert golden.qcow2 /dev/vg/web --force
  vmstrata convert web.qcow2 - | zstd > web.raw.zst
  zstdcat web.raw.zst | vmstrata convert - web.qcow2
  vmstrata convert nbd://nas/web web.qcow2

A chain becomes one file, unless --keep-backing is given. Zeros are left out. A file appears under its name when it is whole; an \
active layer in use is refused: take a snapshot and convert DISK@SNAPSHOT. What an NBD server exports must not change meanwhile.
Exit codes: 0 made, 1 not made (a file DST is left as it was; a device or an export may hold a part), 64 wrong usage.";
