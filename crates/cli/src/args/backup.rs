//! `diff`, `backup` and `restore`: states of a disk compared, copied and made again.

use std::ffi::OsString;
use std::path::PathBuf;

use clap::{ArgGroup, Args, ValueEnum};
use vmstrata_backup::RestoreFormat;
use vmstrata_disk::Format;
use vmstrata_qcow2::CompressionType;

use super::{BackingArgs, ControlArgs};
use crate::disk_spec::format_parser;
use crate::units::parse_size;

/// `vmstrata diff`
#[derive(Debug, Args)]
#[command(after_help = DIFF_HELP)]
pub struct DiffArgs {
    /// The state to compare with: DISK@SNAPSHOT, or the file of a frozen layer
    pub old: PathBuf,
    /// The state whose changes are shown
    pub new: PathBuf,
    /// Compare bytes: leave out clusters that were written again with what they held
    #[arg(long)]
    pub bytes: bool,
    /// Show zeros in place of other zeros too, where they come from another place
    #[arg(long, conflicts_with = "bytes")]
    pub allocation: bool,
    /// What NEW holds; if omitted what the layer above it says, or the file itself
    #[arg(long, short = 'f', value_name = "FORMAT", value_parser = format_parser())]
    pub format: Option<Format>,
    /// What OLD holds, likewise
    #[arg(long, value_name = "FORMAT", value_parser = format_parser())]
    pub old_format: Option<Format>,
    /// Where backing files may be.
    #[command(flatten)]
    pub backing: BackingArgs,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
    /// Say by the exit code whether there is a difference, as diff does
    #[arg(long)]
    pub exit_code: bool,
}

const DIFF_HELP: &str = "\
Examples:
  vmstrata diff web.qcow2@monday web.qcow2@tuesday
  vmstrata diff web.qcow2@monday web.qcow2@tuesday --json | jq '[.extents[].length] | add'
  vmstrata diff old.qcow2 new.qcow2 --bytes --exit-code && echo the same

Both states must be frozen and have a layer in common; which is older does not matter. Only the tables of the \
layers between them are read. Past its end, the first state counts as zeros.
Exit codes: 0 shown, 1 the states cannot be compared, 64 wrong usage; with --exit-code 0 no difference, \
1 a difference, 2 the states cannot be compared.";

/// `vmstrata backup`
#[derive(Debug, Args)]
#[command(after_help = BACKUP_HELP, group = ArgGroup::new("job").required(true).args(["output", "verify"]))]
pub struct BackupArgs {
    /// The state to back up: DISK@SNAPSHOT, or the file of a frozen layer; with --snapshot the disk
    #[arg(required_unless_present = "verify")]
    pub state: Option<PathBuf>,
    /// Take the snapshot NAME of the disk first, served or not, and back that up; the date and time if NAME is omitted. It stays, for
    /// the next incremental backup
    #[arg(long, value_name = "NAME", num_args = 0..=1, conflicts_with = "verify")]
    pub snapshot: Option<Option<String>>,
    /// Where the backup goes; - for standard output
    #[arg(long, short, value_name = "FILE")]
    pub output: Option<PathBuf>,
    /// Compare the backup FILE with its manifest, instead of making one
    #[arg(long, value_name = "FILE", conflicts_with_all = ["state", "since", "manifest", "force"])]
    pub verify: Option<PathBuf>,
    /// Store only what changed since STATE, on top of a backup of that
    #[arg(long, value_name = "STATE")]
    pub since: Option<PathBuf>,
    /// The backup of the --since state (or its manifest), on which this one stands
    #[arg(long, value_name = "FILE", requires = "since")]
    pub previous: Option<PathBuf>,
    /// Name of the backing file to store; the --previous file if omitted
    #[arg(long, value_name = "NAME", requires = "since")]
    pub backing_name: Option<OsString>,
    /// Hold the snapshot that is backed up under TAG, so that no command or rule drops it; the --since one is let go of once this
    /// backup is made
    #[arg(long, value_name = "TAG", default_value = "backup", conflicts_with = "verify")]
    pub hold_tag: String,
    /// Hold nothing, and let go of nothing: for a backup that no incremental one will build upon
    #[arg(long, conflicts_with_all = ["hold_tag", "verify"])]
    pub no_hold: bool,
    /// How to compress clusters
    #[arg(long, value_name = "TYPE", default_value = "none")]
    pub compress: Packing,
    /// What STATE holds; if omitted what the layer above it says, or the file itself
    #[arg(long, short = 'f', value_name = "FORMAT", value_parser = format_parser())]
    pub format: Option<Format>,
    /// Where the manifest goes when the backup goes to standard output; else beside the backup
    #[arg(long, value_name = "FILE")]
    pub manifest: Option<PathBuf>,
    /// Speed.
    #[command(flatten)]
    pub speed: SpeedArgs,
    /// Where backing files may be.
    #[command(flatten)]
    pub backing: BackingArgs,
    /// The server that may be serving the disk.
    #[command(flatten)]
    pub server: ControlArgs,
    /// Replace FILE if it exists
    #[arg(long)]
    pub force: bool,
    /// Print the result as JSON (on stderr when the backup is on stdout)
    #[arg(long)]
    pub json: bool,
    /// Show no progress
    #[arg(long, short)]
    pub quiet: bool,
}

const BACKUP_HELP: &str = "\
Examples:
  vmstrata backup web.qcow2 --snapshot monday -o monday.qcow2
  vmstrata backup web.qcow2 --snapshot tuesday --since web.qcow2@monday --previous monday.qcow2 -o tuesday.qcow2
  vmstrata backup web.qcow2@monday -o monday.qcow2 --compress zstd
  vmstrata backup web.qcow2@tuesday --since web.qcow2@monday --previous monday.qcow2 -o tuesday.qcow2
  vmstrata backup web.qcow2@monday -o - --manifest monday.qcow2.manifest.json | ssh vault 'cat > monday.qcow2'
  vmstrata backup --verify tuesday.qcow2

A backup is an ordinary qcow2 file; an incremental one has the previous one as its backing file. Beside it lies \
FILE.manifest.json with SHA-256 sums of all of it. A disk in use is backed up by a snapshot of it, which --snapshot takes. That \
stays, and is held under the tag backup: the next incremental backup is of what changed since. When that is made, its own snapshot is \
held instead. A full backup begins a new series and leaves the hold of the one before: `vmstrata snapshot release` ends that one, or \
--no-hold where full backups are all that is made. Two series of one disk need two tags (--hold-tag).
Exit codes: 0 made or sound, 1 not made (FILE is left as it was) or damaged, 64 wrong usage.";

/// `vmstrata restore`
#[derive(Debug, Args)]
#[command(after_help = RESTORE_HELP)]
pub struct RestoreArgs {
    /// A full backup, then the incremental ones on top of it, oldest first
    #[arg(required = true)]
    pub files: Vec<PathBuf>,
    /// The disk to make; with --format raw a block device, too
    #[arg(long, short, value_name = "FILE")]
    pub output: PathBuf,
    /// What to make: an image, or the bytes of the disk
    #[arg(long, short = 'f', value_name = "FORMAT", value_enum, default_value_t = RestoreAs::Qcow2)]
    pub format: RestoreAs,
    /// How to compress clusters
    #[arg(long, value_name = "TYPE", default_value = "none")]
    pub compress: Packing,
    /// Speed.
    #[command(flatten)]
    pub speed: SpeedArgs,
    /// Replace FILE if it exists
    #[arg(long)]
    pub force: bool,
    /// Print the result as JSON
    #[arg(long)]
    pub json: bool,
    /// Show no progress
    #[arg(long, short)]
    pub quiet: bool,
}

const RESTORE_HELP: &str = "\
Examples:
  vmstrata restore monday.qcow2 -o web.qcow2
  vmstrata restore monday.qcow2 tuesday.qcow2 wednesday.qcow2 -o web.qcow2
  vmstrata restore monday.qcow2 tuesday.qcow2 --format raw --force -o /dev/vg/web

Every backup is compared with its manifest, and each manifest with the one before it; the disk appears under its \
name only when all of that is right. A block device is written after that, with zeros where the disk has none; it must be unused.
Exit codes: 0 restored, 1 not restored (FILE is left as it was), 64 wrong usage.";

/// What a disk is restored as.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum RestoreAs {
    /// A qcow2 image
    Qcow2,
    /// The disk's bytes, in a file with holes or on a block device
    Raw,
}

impl From<RestoreAs> for RestoreFormat {
    fn from(restore: RestoreAs) -> Self {
        match restore {
            RestoreAs::Qcow2 => Self::Qcow2,
            RestoreAs::Raw => Self::Raw,
        }
    }
}

/// How fast a job may be.
#[derive(Debug, Args)]
pub struct SpeedArgs {
    /// Read no more than SIZE a second, such as 100M
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    pub limit: Option<u64>,
    /// Threads that read, hash and compress; as suits the host if omitted
    #[arg(long, value_name = "N", default_value_t = 0, hide_default_value = true)]
    pub threads: usize,
}

/// How clusters are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Packing {
    /// As they are
    None,
    /// Deflate, which every tool reads
    Zlib,
    /// Zstandard, which QEMU 5.1 and later read
    Zstd,
}

impl Packing {
    /// The compression that the format calls so.
    pub fn compression(self) -> Option<CompressionType> {
        match self {
            Self::None => None,
            Self::Zlib => Some(CompressionType::Zlib),
            Self::Zstd => Some(CompressionType::Zstd),
        }
    }
}
