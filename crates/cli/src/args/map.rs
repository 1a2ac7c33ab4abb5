//! `vmstrata map` on the command line.

use std::path::PathBuf;

use clap::Args;
use vmstrata_disk::Format;

use super::BackingArgs;
use crate::disk_spec::format_parser;
use crate::units::parse_size;

/// `vmstrata map`
#[derive(Debug, Args)]
#[command(after_help = MAP_HELP)]
pub struct MapArgs {
    /// The image, or DISK@SNAPSHOT
    pub file: PathBuf,
    /// First byte to show
    #[arg(long, value_name = "OFFSET", value_parser = parse_size, default_value = "0")]
    pub start_offset: u64,
    /// How many bytes to show; up to the end if omitted
    #[arg(long, value_name = "LENGTH", value_parser = parse_size)]
    pub max_length: Option<u64>,
    /// What the image holds; looked up in the file if omitted
    #[arg(long, short = 'f', value_name = "FORMAT", value_parser = format_parser())]
    pub format: Option<Format>,
    /// Where backing files may be.
    #[command(flatten)]
    pub backing: BackingArgs,
    /// Print JSON, with the fields of `qemu-img map --output=json` and the layer and file of each run
    #[arg(long)]
    pub json: bool,
}

const MAP_HELP: &str = "\
Examples:
  vmstrata map web.qcow2                                     runs of data, with layer and file
  vmstrata map web.qcow2 --start-offset 1G --max-length 64M
  vmstrata map web.qcow2 --json | jq '[.[] | select(.layer == 0) | .length] | add'

Depth counts from the active layer down (0 is FILE), layer from the base up (0 is the base).
Exit codes: 0 shown, 1 the chain cannot be read, 64 wrong usage.";
