//! `vmstrata move` and `vmstrata drain` on the command line.

use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use vmstrata_api::MoveOrder;

use super::control::ControlArgs;
use super::snapshot::AccessArgs;
use crate::units::parse_time;

/// How disks move.
#[derive(Clone, Debug, Args)]
pub struct MoveHowArgs {
    /// Keep the source files for so long, as in 10m
    #[arg(long, value_name = "TIME", value_parser = parse_time, default_value = "10m")]
    pub keep: Duration,
    /// Write at most so many bytes a second, as in 50M; `vmstrata job limit` changes it
    #[arg(long, value_name = "SIZE", value_parser = super::job::limit)]
    pub limit: Option<u64>,
    /// Be over after so long, as in 2h: it writes no faster than it must for that
    #[arg(long, value_name = "TIME", value_parser = parse_time)]
    pub deadline: Option<Duration>,
    /// Keep the guest's latency within so many times what it is without the move, as in 1.5: fewer bytes are read at a time
    #[arg(long, value_name = "FACTOR", value_parser = parse_latency)]
    pub latency: Option<u32>,
    /// Copy a layer in this order [default: predicted from a device that rotates, else sequential]
    #[arg(long, value_name = "ORDER")]
    pub order: Option<MoveOrder>,
    /// Go on where the disk cannot be read: the copy has zeros there, and each place is listed
    #[arg(long)]
    pub skip_unreadable: bool,
    /// Say what would be copied, and copy nothing
    #[arg(long)]
    pub dry_run: bool,
}

/// A factor above 1, in percent.
fn parse_latency(text: &str) -> Result<u32, String> {
    let factor: f64 = text.parse().map_err(|_| format!("{text}: that is no number"))?;
    if (1.1..=100.0).contains(&factor) {
        return Ok((factor * 100.0).round() as u32);
    }
    Err(format!("{text}: a factor from 1.1 to 100"))
}

/// `vmstrata move`
#[derive(Debug, Args)]
#[command(after_help = MOVE_HELP)]
pub struct MoveArgs {
    /// The disk: its path, or its name at the server
    pub disk: PathBuf,
    /// The directory that it moves to with its history; or where a flat copy of it will be: a block device, a new file whose name ends in
    /// .raw or .img, or an export of an NBD server, as in nbd://HOST/NAME; or, of a flat copy, the path that the disk had
    #[arg(long, value_name = "TARGET", required_unless_present = "undo")]
    pub to: Option<PathBuf>,
    /// Overwrite what is on the device or the export
    #[arg(long)]
    pub yes: bool,
    /// Move it back, while the source files are kept: only what differs is copied
    #[arg(long, conflicts_with = "to")]
    pub undo: bool,
    /// How it moves.
    #[command(flatten)]
    pub how: MoveHowArgs,
    /// How it is reached, and the result printed.
    #[command(flatten)]
    pub access: AccessArgs,
}

const MOVE_HELP: &str = "\
Examples:
  vmstrata move web --to /mnt/new --dry-run
  vmstrata move web --to /mnt/new                  its guest goes on
  vmstrata move web --to /mnt/new --limit 50M --keep 1h
  vmstrata move web --to /mnt/new --deadline 2h    as gently as two hours allow
  vmstrata move web --to /mnt/new --latency 1.5    its guest waits 1.5 times as long as without at most
  vmstrata move web --undo
  vmstrata move web --to /dev/vg0/web --yes        without its history
  vmstrata move web --to 'nbd+unix:///web?socket=/run/nbd.sock' --yes

The command copies the layers of the disk's history. When little is left, the guest's writes go to the target, and the rest is copied. So a move \
ends however much the guest writes. Run the command again to go on with a move that was stopped or killed. It does not copy files that the target \
has already, such as a base that another disk brought. A flat copy has no history: that stays with the source files, which `vmstrata gc` \
removes. Until then the disk can go back to it.
Exit codes: 0 done, 1 not done (the reason is on stderr), 64 wrong usage.";

/// `vmstrata drain`
#[derive(Debug, Args)]
#[command(after_help = DRAIN_HELP)]
pub struct DrainArgs {
    /// The directory whose disks move
    pub dir: PathBuf,
    /// The directory that they move to
    #[arg(long, value_name = "DIR")]
    pub to: PathBuf,
    /// How they move.
    #[command(flatten)]
    pub how: MoveHowArgs,
    /// The server that serves them.
    #[command(flatten)]
    pub server: ControlArgs,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

const DRAIN_HELP: &str = "\
Examples:
  vmstrata drain /mnt/old --to /mnt/new --dry-run
  vmstrata drain /mnt/old --to /mnt/new --limit 100M

Moves the disks in DIR that the server serves, one after the other, as `vmstrata move` does. Run it again to go on. It lists the images in DIR that \
no server serves, and leaves them there. As one disk moves at a time, --limit holds for all of them; `vmstrata job move-rate` limits them together with other moves of \
the server, and changes that while they run.
Exit codes: 0 done, 1 not all is done (the reason is on stderr), 64 wrong usage.";
