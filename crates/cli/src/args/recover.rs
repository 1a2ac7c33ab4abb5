//! `vmstrata recover` on the command line.

use std::path::PathBuf;

use clap::Args;

/// `vmstrata recover`
#[derive(Debug, Args)]
#[command(after_help = HELP)]
pub struct RecoverArgs {
    /// The log of a server that has ended: what it was started with as --flush-log
    #[arg(value_name = "LOG")]
    pub log: PathBuf,
    /// Only show what the log has of which image
    #[arg(long, short = 'n')]
    pub dry_run: bool,
    /// Lose what the log has of this image, which is gone or cannot be used (repeatable)
    #[arg(long, value_name = "IMAGE")]
    pub discard: Vec<PathBuf>,
    /// Lose it without another question
    #[arg(long, short, requires = "discard")]
    pub yes: bool,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

const HELP: &str = "\
Examples:
  vmstrata recover /var/lib/vmstrata/flush.log --dry-run
  vmstrata recover /var/lib/vmstrata/flush.log
  vmstrata recover /var/lib/vmstrata/flush.log --discard /vms/lost.qcow2 --yes

A server does the same when it starts with --flush-log. The command is for a host whose server does not start, because an image is \
gone or was written by another program, and for images that another tool needs now. All other images get what was flushed. After \
`recover --discard`, `vmstrata check --repair=all --discard-unflushed` makes such an image usable without it.
Exit codes: 0 done (also when there was nothing to do), 1 not, and the log is as it was; 64 wrong usage.";
