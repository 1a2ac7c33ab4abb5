//! `vmstrata vm` on the command line.

mod lazy;
mod migrate;
mod pages;
mod store;

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Subcommand, ValueEnum};
use vmstrata_disk::snapshot::Keep;

use super::snapshot::parse_label;
use super::{BackingArgs, ControlArgs};
use crate::units::{parse_size, parse_time};

use lazy::LazyArgs;
pub use migrate::VmMigrateArgs;
pub use pages::{MachineKind, VmPagesArgs};
pub use store::{
    DiskSnapshotArgs, VaultArgs, VmDeleteArgs, VmGcArgs, VmListArgs, VmPruneArgs, VmRepairArgs, VmShowArgs,
    VmStoreCommand, VmVerifyArgs,
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
  vmstrata vm args web --memory 4G                            how QEMU must be started
  vmstrata vm snapshot web --name mon --vault /srv/a --vault /srv/b --vault /srv/c
  vmstrata vm restore web@mon --vault /srv/a --vault /srv/b --vault /srv/c -- qemu-system-x86_64 ...
  vmstrata vm migrate web --to-control /run/b/control.sock --to-qmp /run/b/web.qmp --uri tcp:hostb:4444
  vmstrata vm list --vault /srv/a --vault /srv/b --vault /srv/c
  vmstrata vm verify --vault /srv/a --vault /srv/b --vault /srv/c

A snapshot is of memory, devices and the disks that vmstrata serves, at one instant.";

/// The commands of `vmstrata vm`.
#[derive(Debug, Subcommand)]
pub enum VmCommand {
    /// Print the options that QEMU or libvirt must start a guest with
    Args(VmArgsArgs),
    /// Take a snapshot of a running guest: memory, devices and disks at one instant
    Snapshot(Box<VmSnapshotArgs>),
    /// Start a guest from a snapshot
    Restore(VmRestoreArgs),
    /// Move a running guest to another host, with its tiered disks
    Migrate(Box<VmMigrateArgs>),
    /// Show what a Linux guest uses its memory for, without the guest's help
    Pages(VmPagesArgs),
    /// Those that look after snapshots that were taken.
    #[command(flatten)]
    Store(VmStoreCommand),
    /// Undoes what a killed process leaves
    #[command(hide = true)]
    Guard,
}

/// `vmstrata vm args`
#[derive(Debug, Args)]
#[command(after_help = ARGS_HELP)]
pub struct VmArgsArgs {
    /// What the guest is called
    pub guest: String,
    /// How much memory it has
    #[arg(long, short, value_name = "SIZE", value_parser = parse_size, default_value = "2G")]
    pub memory: u64,
    /// The file that is its memory; anything that several processes can map [default: /dev/shm/GUEST.memory]
    #[arg(long, value_name = "FILE")]
    pub memory_file: Option<PathBuf>,
    /// The socket of QEMU's monitor [default: GUEST.qmp in /run/vmstrata, or $XDG_RUNTIME_DIR/vmstrata unless root]
    #[arg(long, value_name = "PATH")]
    pub qmp: Option<PathBuf>,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

const ARGS_HELP: &str = "\
Examples:
  vmstrata vm args web --memory 4G
  vmstrata vm args web --memory 4G --memory-file /dev/hugepages/web
  qemu-system-x86_64 $(vmstrata vm args web --json | jq -r '.qemu[]') ...

Memory is in a file so that it can be read beside QEMU, and shared so that the file is what the guest has. The monitor \
is one that nothing else uses: QEMU serves one client of it at a time.
Exit codes: 0 printed, 64 wrong usage.";

/// `vmstrata vm snapshot`
#[derive(Debug, Args)]
#[command(after_help = SNAPSHOT_HELP)]
pub struct VmSnapshotArgs {
    /// What the guest is called
    pub guest: String,
    /// What to call the snapshot: up to 100 of A-Z a-z 0-9 . _ - [default: the time in UTC]
    #[arg(long, short, value_name = "NAME")]
    pub name: Option<String>,
    /// The socket of QEMU's monitor [default: as `vm args` has it]
    #[arg(long, value_name = "PATH")]
    pub qmp: Option<PathBuf>,
    /// Where to keep it.
    #[command(flatten)]
    pub vault: VaultArgs,
    /// Copies of what the guest cannot live without [default: as its newest snapshot has, else 3; fewer, with a warning, where the
    /// vault has fewer devices]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u8).range(1..=16))]
    pub copies: Option<u8>,
    /// Copies of what it can read again from its disks; 0 for none [default: as its newest snapshot has, else 1]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u8).range(0..=16))]
    pub clean_copies: Option<u8>,
    /// Store pages of cache also where the snapshot of the disks has the same bytes
    #[arg(long)]
    pub no_refill: bool,
    /// Let copies lie on one device, where they are lost together
    #[arg(long)]
    pub one_device: bool,
    /// Make each N-th snapshot of the guest full: it needs no older one's pages, so damage to one object touches at most N of the
    /// guest's snapshots; 0 for never
    #[arg(long, value_name = "N", default_value_t = vmstrata_memory::vault::Policy::FULL_EVERY)]
    pub full_every: u32,
    /// Compression level of zstd, -7 to 19
    #[arg(long, value_name = "LEVEL", default_value_t = 1, allow_hyphen_values = true)]
    pub level: i32,
    /// What is done while the guest is held
    #[arg(long, value_name = "MODE", default_value = "copy")]
    pub mode: VmMode,
    /// A label, such as job=nightly (repeatable)
    #[arg(long, short, value_name = "KEY=VALUE", value_parser = parse_label)]
    pub label: Vec<(String, String)>,
    /// Take one each time this long has passed, until interrupted: 30s, 10m, 6h, 1d; they get the label kind=periodic
    #[arg(long, value_name = "TIME", value_parser = parse_time, conflicts_with = "name")]
    pub every: Option<Duration>,
    /// With --every, delete those that no rule keeps, and the snapshots of their disks: last, hourly, daily, weekly,
    /// monthly, yearly, each with how many
    #[arg(long, value_name = "RULES", requires = "every")]
    pub keep: Option<Keep>,
    /// Let the paths of raw disks become qcow2: their snapshots are overlays
    #[arg(long)]
    pub convert_raw: bool,
    /// A disk of the guest, as the server calls it (repeatable) [default: those whose sockets QEMU is connected to]
    #[arg(long = "disk", value_name = "NAME")]
    pub disks: Vec<String>,
    /// Where backing files of the disks may be.
    #[command(flatten)]
    pub backing: BackingArgs,
    /// The server of the guest's disks.
    #[command(flatten)]
    pub server: ControlArgs,
    /// Print the result as JSON
    #[arg(long)]
    pub json: bool,
}

const SNAPSHOT_HELP: &str = "\
Examples:
  vmstrata vm snapshot web --vault /srv/a --vault /srv/b --vault /srv/c
  VMSTRATA_VAULT=/srv/a:/srv/b vmstrata vm snapshot web --name mon --copies 2
  vmstrata vm snapshot web --vault /tmp/v --copies 1 --mode stop
  vmstrata vm snapshot web --vault /srv/a --vault /srv/b --copies 2 --every 10m --keep hourly=24,daily=7
  vmstrata vm snapshot web --vault 'hdfs://namenode:8020/vault?block=4M' --copies 3 --clean-copies 1
  vmstrata vm snapshot web --vault s3://bucket/vault --copies 1

The guest is held while its devices are saved and its memory is copied; then it goes on, also when the command fails, is \
interrupted or killed. Its disks get a snapshot of the same name, if vmstrata serves them; clean pages of cache that are \
on these disks, byte for byte, need no copy. A tiered disk is cut at once and published afterwards: until then the snapshot is \
incomplete (vmstrata vm list).

With --every, it prints a line for each snapshot and each failure. A guest that is down is tried again when the next snapshot is \
due; one that is due while another is being taken is skipped. packaging/systemd has a service for it.
Exit codes: 0 taken (with --every: interrupted), 1 not taken (nothing is listed, the guest runs on), 64 wrong usage.";

/// What is done while the guest is held.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum VmMode {
    /// Copy memory to memory, and store it afterwards
    Copy,
    /// Store memory: needs none on the host, and holds the guest for as long as it takes
    Stop,
    /// Let the guest run on at once and save pages before they change: not with vhost-user devices
    Live,
}

/// `vmstrata vm restore`
#[derive(Clone, Debug, Args)]
#[command(after_help = RESTORE_HELP)]
pub struct VmRestoreArgs {
    /// The snapshot: GUEST@NAME, GUEST for its newest, or an id
    pub snapshot: String,
    /// Where it is kept.
    #[command(flatten)]
    pub vault: VaultArgs,
    /// Restore no page of clean cache: the guest reads them again from its disks
    #[arg(long, conflicts_with = "no_refill")]
    pub no_cache: bool,
    /// Leave pages of cache out that have to be read from the disks: the guest reads them again when it needs them
    #[arg(long)]
    pub no_refill: bool,
    /// Where a disk of the snapshot is now, in the order of `vm show` (repeatable) [default: where it was]
    #[arg(long = "disk", value_name = "FILE")]
    pub disks: Vec<PathBuf>,
    /// Start the guest on clones of its disks as they were at the snapshot, made beside them or in DIR
    #[arg(long, value_name = "DIR", num_args = 0..=1, require_equals = true)]
    #[expect(clippy::option_option, reason = "an option whose value may be left out")]
    pub clone_disks: Option<Option<PathBuf>>,
    /// Start the guest although its disks are not as the snapshot left them: it may destroy its file systems
    #[arg(long, conflicts_with = "clone_disks")]
    pub force: bool,
    /// The server that may be serving the disks.
    #[command(flatten)]
    pub server: ControlArgs,
    /// Where backing files of the disks may be.
    #[command(flatten)]
    pub backing: BackingArgs,
    /// Where to make the files of the guest's memory; they are removed when QEMU has opened them
    #[arg(long, value_name = "DIR", default_value = "/dev/shm")]
    pub memory_dir: PathBuf,
    /// The socket of QEMU's monitor [default: as `vm args` has it]
    #[arg(long, value_name = "PATH")]
    pub qmp: Option<PathBuf>,
    /// Leave the guest paused
    #[arg(long)]
    pub paused: bool,
    /// Whether the guest waits for all of its memory.
    #[command(flatten)]
    pub lazy: LazyArgs,
    /// QEMU's command line, as the guest was started with
    #[arg(last = true, required = true, value_name = "QEMU")]
    pub qemu: Vec<String>,
}

const RESTORE_HELP: &str = "\
Examples:
  vmstrata snapshot revert web.qcow2 mon --keep web.before.qcow2      the disk, before it is served again
  vmstrata vm restore web@mon --vault /srv/a --vault /srv/b -- qemu-system-x86_64 -machine q35 ...
  vmstrata vm restore web@mon --vault /srv/a --vault /srv/b --clone-disks -- qemu-system-x86_64 -machine q35 ...
  vmstrata vm restore web@mon --vault /srv/b --no-cache -- qemu-system-x86_64 -machine q35 ...
  vmstrata vm restore web@mon --vault /srv/a --vault /srv/b --lazy -- qemu-system-x86_64 -machine q35 ...

The command line is the one the guest was started with: its memory is pointed to the snapshot's, and -incoming and a \
monitor are added. Each disk of the snapshot must be one that QEMU opens or finds behind a socket of the server, stand on its \
snapshot of the same instant, and not have been written since: else the guest is not started, and the message says what puts it \
right. --clone-disks makes clones that are, and has the command line and the server lead to them: their files stay, as the guest's \
disks. Pages of cache that the snapshot does not
hold are read from them first, and compared with what they were; what is not there any more the guest reads again. \
With --lazy they are read while it runs, unless its disks were not checked (--force). The command ends when QEMU does, with its exit code; told to end (SIGTERM, SIGINT, SIGHUP), it ends QEMU.

Killed before the guest runs, the command leaves nothing: QEMU, clones and files go with it. Killed later, the guest goes on \
without it, unless it was restored with --lazy.

With --lazy the guest answers at once, whatever its size. This command serves the guest's memory until QEMU ends: if it is \
killed, QEMU is too. QEMU also ends (SIGBUS) where a page that the guest needs cannot be read from any copy for \
--page-patience. It needs /dev/fuse, fusermount3 (package fuse3) unless
root, and room in --memory-dir for all that was stored. A snapshot whose copies are missing or cut short is refused before QEMU is started; \
damage inside them is found when it is read.
Exit codes: QEMU's; 1 the guest was not started, 64 wrong usage.";
