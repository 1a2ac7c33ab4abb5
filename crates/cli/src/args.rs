//! The command line: what can be asked, and the help that shows how.
//!
//! Parsing ends here: every value reaches its command checked and in the command's own types. Exit codes are the same
//! everywhere, and those of `check` are qemu-img's, so usage errors take sysexits' 64 instead of clap's 2.

mod backup;
mod base;
mod control;
mod convert;
mod gc;
mod index;
mod job;
mod layers;
mod map;
mod merge;
mod mount;
mod moving;
mod prune;
mod rebase;
mod recover;
mod replica;
mod resize;
mod serve;
mod snapshot;
mod states;
mod survey;
mod tier;
mod vm;

use std::ffi::OsString;
use std::os::unix::ffi::OsStrExt as _;
use std::path::PathBuf;

use clap::error::ErrorKind;
use clap::{Args, CommandFactory as _, Parser, Subcommand, ValueEnum};
use vmstrata_disk::{Format, Unflushed};

pub use self::backup::{BackupArgs, DiffArgs, RestoreArgs};
pub use self::base::{BaseArgs, BaseCommand, BaseListArgs, BasePublishArgs, BaseRetireArgs};
pub use self::control::{
    ControlArgs, DiskArgs, DiskCommand, ExportArgs, ExportCommand, NewExport, StatusArgs, TopArgs,
};
pub use self::convert::ConvertArgs;
pub use self::gc::GcArgs;
pub use self::index::{
    IndexArgs, IndexBuildArgs, IndexCommand, IndexCommonArgs, IndexDropArgs, IndexVerifyArgs,
};
pub use self::job::{JobArgs, JobCommand};
pub use self::layers::{FlattenArgs, LayersArgs, MergeArgs};
pub use self::map::MapArgs;
pub use self::merge::{LoseArgs, MergeHowArgs, RemoveArgs, SnapshotDeleteArgs};
pub use self::mount::{MountArgs, MountGuardArgs};
pub use self::moving::{DrainArgs, MoveArgs, MoveHowArgs};
pub use self::prune::SnapshotPruneArgs;
pub use self::rebase::RebaseArgs;
pub use self::recover::RecoverArgs;
pub use self::replica::{
    ReplicaArgs, ReplicaCommand, ReplicaDropArgs, ReplicaFillArgs, ReplicaListArgs, ReplicaScrubArgs,
};
pub use self::resize::ResizeArgs;
pub use self::serve::{ServeArgs, ThawGuardArgs};
pub use self::snapshot::{
    OverlayArgs, SnapshotArgs, SnapshotCloneArgs, SnapshotCommand, SnapshotCommonArgs, SnapshotCreateArgs,
    SnapshotHoldArgs, SnapshotListArgs, SnapshotRevertArgs, SnapshotShowArgs,
};
pub use self::survey::SurveyArgs;
pub use self::tier::{
    BranchesArgs, DetachArgs, PinsArgs, TakeoverArgs, TierArgs, TierAttachArgs, TierCommand, TierDiskArgs,
    TierHoldArgs, TierRateArgs,
};
pub use self::vm::{
    DiskSnapshotArgs, MachineKind, VaultArgs, VmArgs, VmArgsArgs, VmCommand, VmDeleteArgs, VmGcArgs,
    VmListArgs, VmMigrateArgs, VmMode, VmPagesArgs, VmPruneArgs, VmRepairArgs, VmRestoreArgs, VmShowArgs,
    VmSnapshotArgs, VmStoreCommand, VmVerifyArgs,
};
use crate::disk_spec::format_parser;
use crate::units::parse_size;

/// EX_USAGE of sysexits.h; clap's own 2 would look like corruption to callers of `check`.
pub const EXIT_USAGE: u8 = 64;

/// Serves qcow2 chains of any length at the speed of one file.
#[derive(Debug, Parser)]
#[command(name = "vmstrata", version, about, after_help = HELP, disable_help_subcommand = true)]
pub struct Cli {
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
    /// Append a JSON line to FILE for each change of disks, exports and snapshots: what, by whom, how it ended. FILE may be renamed
    /// or cut at any time. What a server does is in the server's
    #[arg(long, global = true, value_name = "FILE", env = "VMSTRATA_AUDIT")]
    pub audit: Option<PathBuf>,
}

impl Cli {
    /// What this process was asked.
    ///
    /// # Errors
    /// Wrong usage, and help.
    pub fn of_process() -> Result<Self, clap::Error> {
        refuse_empty(std::env::args_os().skip(1))?;
        let mut asked = Self::try_parse()?;
        states::split_snapshots(&mut asked.command)?;
        Ok(asked)
    }
}

/// Refuses empty arguments, as clap refuses empty paths. What follows `--` belongs to another program.
fn refuse_empty(args: impl Iterator<Item = OsString>) -> Result<(), clap::Error> {
    let mut before = OsString::new();
    for arg in args.take_while(|arg| arg != "--") {
        let of_option = arg.as_bytes().strip_suffix(b"=").filter(|option| option.starts_with(b"--"));
        if arg.is_empty() || of_option.is_some_and(|option| !option.contains(&b'=')) {
            let said = format!("an argument is empty, after '{}'", before.display());
            return Err(Cli::command().error(ErrorKind::InvalidValue, said));
        }
        before = arg;
    }
    Ok(())
}

const HELP: &str = "\
Examples:
  vmstrata create web.qcow2 --backing golden.qcow2
  vmstrata info web.qcow2
  vmstrata serve --disk path=web.qcow2,name=web --vhost-user web=/run/web.sock

A disk is named by its path, or by the name under which a running server serves it; a snapshot by DISK@NAME.
Exit codes: 0 success, 1 failure (the reason is on stderr), 64 wrong usage; check and survey add 2 and 3, \
see there.
RUST_LOG sets what is logged, for example RUST_LOG=debug.";

/// The commands.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Make a new, empty qcow2 image, alone or on top of another
    Create(CreateArgs),
    /// Show an image's header, features, snapshots and the layers below it
    Info(InfoArgs),
    /// Show which layer holds each part of a disk
    Map(MapArgs),
    /// Check an image's metadata, and repair it if asked
    Check(CheckArgs),
    /// Build, verify or drop what lets a long chain open at once
    Index(IndexArgs),
    /// Take snapshots of a disk, list and delete them, go back to one, or make a new disk of one
    Snapshot(Box<SnapshotArgs>),
    /// Drop layers from the middle of a chain, whether or not they have names
    Merge(Box<MergeArgs>),
    /// Let a disk stand on nothing, or on its base alone: copy what it needs of the layers below into its own file
    Flatten(Box<FlattenArgs>),
    /// Move a disk to another version of its base; its content does not change
    Rebase(Box<RebaseArgs>),
    /// Remove files that disks let go of and left behind, where nothing needs them
    Gc(Box<GcArgs>),
    /// Give a disk another size, also while its guest runs
    Resize(Box<ResizeArgs>),
    /// Move a disk to another directory with its history, also while its guest runs
    Move(Box<MoveArgs>),
    /// Move all disks of a directory that a server serves
    Drain(Box<DrainArgs>),
    /// Make an image or a raw disk of a disk, of any kind and from anywhere
    Convert(Box<ConvertArgs>),
    /// Show a disk, or a snapshot of it, as a file
    Mount(Box<MountArgs>),
    /// Show what changed between two states of a disk
    Diff(DiffArgs),
    /// Copy a state of a disk, whole or what changed, with checksums; or verify a copy
    Backup(Box<BackupArgs>),
    /// Make a disk from its backups
    Restore(RestoreArgs),
    /// Bring what a flush log has into the images, without a server
    Recover(RecoverArgs),
    /// Look at all images of a host: sizes, chains, sharing, snapshots, risks
    Survey(SurveyArgs),
    /// Serve disks over vhost-user-blk and NBD until told to stop
    Serve(Box<ServeArgs>),
    /// Show what a running server serves
    Status(StatusArgs),
    /// Watch what the disks of a running server are doing
    Top(TopArgs),
    /// Show a disk of a running server, add, limit or remove one
    Disk(Box<DiskArgs>),
    /// Add an export to a running server, or remove one
    Export(ExportArgs),
    /// Begin, watch and change the long work of a running server
    Job(JobArgs),
    /// Show what of a tiered disk is published, publish or hold it, take it over from another host, or make it an ordinary image again
    Tier(TierArgs),
    /// Publish, list and retire versions of a shared base image
    Base(Box<BaseArgs>),
    /// Show the host's copies of layers in repositories, such as a shared base; fill, pin, scrub or drop them
    Replica(ReplicaArgs),
    /// Take snapshots of running guests (memory, devices and disks), and start guests from them
    Vm(VmArgs),
    /// Print the completion script of a shell
    Completions(CompletionsArgs),
    /// Thaws a guest when the server that froze it is killed
    #[command(hide = true)]
    ThawGuard(ThawGuardArgs),
    /// Takes a mount away when the process that serves it is killed
    #[command(hide = true)]
    MountGuard(MountGuardArgs),
}

/// Which directories backing files may be in.
#[derive(Clone, Debug, Args)]
pub struct BackingArgs {
    /// Open backing files in DIR and below too (repeatable); without it only in the directory of the image
    #[arg(long, value_name = "DIR")]
    pub allow_backing: Vec<PathBuf>,
}

/// What a server that was killed left of a disk, for commands that close the disk first.
#[derive(Clone, Debug, Default, Args)]
pub struct JournalArgs {
    /// Where the journals of killed servers are
    /// [default: /run/vmstrata, or $XDG_RUNTIME_DIR/vmstrata unless root]
    #[arg(long, value_name = "DIR")]
    pub runtime_dir: Option<PathBuf>,
    /// Go on without the writes that a killed server had not flushed, where its journal is missing or does not fit the disk:
    /// they are lost, as after a power failure
    #[arg(long)]
    pub discard_unflushed: bool,
}

impl JournalArgs {
    /// What happens to writes that cannot be taken up.
    pub fn unflushed(&self) -> Unflushed {
        if self.discard_unflushed { Unflushed::Discard } else { Unflushed::Keep }
    }

    /// Where to look for journals; `None` where there is no such directory, and so no journal.
    pub fn dir(&self) -> Option<PathBuf> {
        let dir = self.runtime_dir.clone().unwrap_or_else(vmstrata_server::default_dir);
        Some(dir).filter(|dir| dir.is_dir())
    }
}

/// `vmstrata create`
#[derive(Debug, Args)]
#[command(after_help = CREATE_HELP)]
pub struct CreateArgs {
    /// The file to make
    pub file: PathBuf,
    /// The disk's size, such as 20G; taken from the backing file if omitted
    #[arg(value_parser = parse_size, required_unless_present = "backing")]
    pub size: Option<u64>,
    /// Lay the new image on top of FILE, which from then on must not change
    #[arg(long, short, value_name = "FILE")]
    pub backing: Option<PathBuf>,
    /// What the backing file holds; looked up in the file if omitted
    #[arg(long, short = 'F', value_name = "FORMAT", requires = "backing", value_parser = format_parser())]
    pub backing_format: Option<Format>,
    /// Bytes per cluster: a power of two from 512 to 2M
    #[arg(long, value_name = "SIZE", value_parser = parse_size, default_value = "64K")]
    pub cluster_size: u64,
    /// Give each cluster 32 subclusters: a write copies up one of them at most; for clusters of 16K and more
    #[arg(long)]
    pub subclusters: bool,
    /// Bits per reference count: 1, 2, 4, 8, 16, 32 or 64
    #[arg(long, value_name = "BITS", default_value_t = 16)]
    pub refcount_bits: u32,
    /// The format's version: 2 (compat 0.10) for tools from before 2013, else 3 (compat 1.1)
    #[arg(long = "format-version", value_name = "VERSION", default_value_t = 3, value_parser = clap::value_parser!(u32).range(2..=3))]
    pub version: u32,
    /// Put off refcount updates: faster first writes, a repair after a crash
    #[arg(long)]
    pub lazy_refcounts: bool,
    /// How clusters written compressed are to be compressed
    #[arg(long, value_name = "TYPE", default_value = "zlib")]
    pub compression: Compression,
    /// Replace FILE if it exists
    #[arg(long)]
    pub force: bool,
    /// Print what was made as JSON
    #[arg(long)]
    pub json: bool,
}

const CREATE_HELP: &str = "\
Examples:
  vmstrata create data.qcow2 100G
  vmstrata create web.qcow2 --backing golden.qcow2           as large as golden.qcow2
  vmstrata create web.qcow2 40G -b golden.raw -F raw         larger than its base
  vmstrata create vm.qcow2 40G --cluster-size 128K --subclusters
  vmstrata create old.qcow2 10G --format-version 2

The backing file's name is stored as given; a relative one is looked up from the new file's directory.
Exit codes: 0 made, 1 not made (FILE is left as it was), 64 wrong usage.";

/// The compression types of the format.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Compression {
    /// Deflate, which every tool reads.
    Zlib,
    /// Zstandard, which QEMU 5.1 and later read.
    Zstd,
}

/// `vmstrata info`
#[derive(Debug, Args)]
#[command(after_help = INFO_HELP)]
pub struct InfoArgs {
    /// The image, or DISK@SNAPSHOT
    pub file: PathBuf,
    /// List every layer of the chain, not only its ends
    #[arg(long)]
    pub chain: bool,
    /// What the image holds; looked up in the file if omitted
    #[arg(long, short = 'f', value_name = "FORMAT", value_parser = format_parser())]
    pub format: Option<Format>,
    /// Where backing files may be.
    #[command(flatten)]
    pub backing: BackingArgs,
    /// Print JSON, with the fields of `qemu-img info --output=json` where they mean the same
    #[arg(long)]
    pub json: bool,
}

const INFO_HELP: &str = "\
Examples:
  vmstrata info web.qcow2
  vmstrata info web.qcow2 --chain --allow-backing /srv/golden
  vmstrata info web.qcow2 --chain --json | jq -r '.layers[].filename'

Takes no lock: a disk in use can be looked at.
Exit codes: 0 shown, 1 the image or a layer below it cannot be read, 64 wrong usage.";

/// `vmstrata check`
#[derive(Debug, Args)]
#[command(after_help = CHECK_HELP)]
pub struct CheckArgs {
    /// The image, or DISK@SNAPSHOT; the layers below it are not checked
    pub file: PathBuf,
    /// Repair what is found
    #[arg(long, short, value_name = "WHAT")]
    pub repair: Option<Repair>,
    /// Check a disk while it is in use: what is found may be a change half made
    #[arg(long, short = 'U', conflicts_with = "repair")]
    pub force_share: bool,
    /// What a killed server left.
    #[command(flatten)]
    pub journal: JournalArgs,
    /// Where backing files may be, which a repair needs after a killed server.
    #[command(flatten)]
    pub backing: BackingArgs,
    /// Print the result as JSON, with the fields of `qemu-img check --output=json`
    #[arg(long)]
    pub json: bool,
    /// Show no progress
    #[arg(long, short)]
    pub quiet: bool,
}

const CHECK_HELP: &str = "\
Examples:
  vmstrata check web.qcow2
  vmstrata check web.qcow2 --repair leaks                    give lost space back, change nothing else
  vmstrata check web.qcow2 --json | jq .corruptions
  for f in *.qcow2; do vmstrata check \"$f\" -q || echo \"$f: $?\"; done

Of a disk whose server was killed, the writes that wait in the server's journal are no leaks; a repair takes them up first, or \
refuses where it cannot. (`qemu-img check -r` knows nothing of them, and destroys them.)

Exit codes, as qemu-img check has them:
  0   clean, or everything found was repaired
  1   the check could not be made
  2   the metadata is corrupt: do not write to the image; repair a copy with --repair all
  3   clusters are leaked: data is safe, space is lost until --repair leaks
  63  the image is raw: there is no metadata to check
  64  wrong usage";

/// What `check` may change.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Repair {
    /// Only give leaked clusters back: safe
    Leaks,
    /// Everything: may lose what the corruption already made ambiguous
    All,
}

/// `vmstrata completions`
#[derive(Debug, Args)]
#[command(after_help = COMPLETIONS_HELP)]
pub struct CompletionsArgs {
    /// The shell
    pub shell: clap_complete::Shell,
}

const COMPLETIONS_HELP: &str = "\
Examples:
  vmstrata completions bash > /etc/bash_completion.d/vmstrata
  vmstrata completions zsh > /usr/share/zsh/site-functions/_vmstrata
  vmstrata completions fish > ~/.config/fish/completions/vmstrata.fish";

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn the_definitions_are_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn the_example_of_the_help_parses() {
        let line = "vmstrata serve --disk path=web.qcow2,name=web --vhost-user web=/run/web.sock,queues=4 \
                    --nbd unix:/run/nbd.sock --metadata-cache 32M";
        let Command::Serve(serve) = Cli::try_parse_from(line.split(' ')).unwrap().command else {
            panic!("not serve");
        };
        assert_eq!(serve.disks[0].name.as_deref(), Some("web"));
        assert_eq!(serve.vhost_user[0].queues.map(u16::from), Some(4));
        assert_eq!(serve.resources.metadata_cache, Some(32 << 20));
    }

    #[test]
    fn create_needs_a_size_or_a_backing_file() {
        assert!(Cli::try_parse_from(["vmstrata", "create", "a.qcow2"]).is_err());
        assert!(Cli::try_parse_from(["vmstrata", "create", "a.qcow2", "1G"]).is_ok());
        assert!(Cli::try_parse_from(["vmstrata", "create", "a.qcow2", "-b", "b"]).is_ok());
        assert!(Cli::try_parse_from(["vmstrata", "create", "a.qcow2", "1G", "-F", "raw"]).is_err());
    }

    #[test]
    fn tls_needs_certificate_key_and_nbd() {
        let parse = |tail: &str| {
            let line = format!("vmstrata serve --disk path=a {tail}");
            Cli::try_parse_from(line.split_whitespace()).is_ok()
        };
        assert!(parse("--nbd unix:s --nbd-tls-cert c --nbd-tls-key k --nbd-tls-client-ca a"));
        assert!(!parse("--nbd unix:s --nbd-tls-cert c"));
        assert!(!parse("--nbd unix:s --nbd-tls-key k"));
        assert!(!parse("--nbd-tls-cert c --nbd-tls-key k"));
        assert!(!parse("--nbd unix:s --nbd-tls-client-ca a"));
    }
}
