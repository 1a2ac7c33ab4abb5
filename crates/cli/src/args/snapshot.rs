//! `vmstrata snapshot` on the command line.

use std::path::PathBuf;

use anyhow::Context;
use clap::{Args, Subcommand};
use vmstrata_api::Quiesce;
use vmstrata_disk::{Format, OpenOptions};

use super::{BackingArgs, ControlArgs, JournalArgs};
use crate::disk_spec::format_parser;

/// `vmstrata snapshot`
#[derive(Debug, Args)]
#[command(after_help = HELP)]
pub struct SnapshotArgs {
    /// What to do.
    #[command(subcommand)]
    pub command: SnapshotCommand,
}

const HELP: &str = "\
Examples:
  vmstrata snapshot create web.qcow2 --name before-upgrade
  vmstrata snapshot list web.qcow2
  vmstrata snapshot revert web.qcow2 before-upgrade --yes
  vmstrata snapshot clone web.qcow2 before-upgrade -o test.qcow2
  vmstrata snapshot delete web.qcow2 before-upgrade

A snapshot is a layer: the file web.qcow2 is renamed to web.NAME.qcow2, and a new, empty web.qcow2 has it as its backing file. \
Every command that takes an image takes web.qcow2@NAME too. Stock tools read and check all of these files.";

/// The commands of `vmstrata snapshot`.
#[derive(Debug, Subcommand)]
pub enum SnapshotCommand {
    /// Take a snapshot of a disk, or of several at one instant
    Create(SnapshotCreateArgs),
    /// List a disk's snapshots, newest first
    List(SnapshotListArgs),
    /// Show one snapshot
    Show(SnapshotShowArgs),
    /// Make a disk what it was at a snapshot
    Revert(SnapshotRevertArgs),
    /// Make a new disk that starts as a snapshot
    Clone(SnapshotCloneArgs),
    /// Keep a snapshot from being dropped, by whatever command or rule, until it is released
    #[command(after_help = HOLD_HELP)]
    Hold(SnapshotHoldArgs),
    /// Release a hold
    #[command(after_help = HOLD_HELP)]
    Release(SnapshotHoldArgs),
    /// Delete snapshots, wherever they are in the chain
    Delete(super::SnapshotDeleteArgs),
    /// Delete the snapshots that no rule keeps
    Prune(super::SnapshotPruneArgs),
}

/// How the disk is to be looked at.
#[derive(Clone, Debug, Args)]
pub struct SnapshotCommonArgs {
    /// What DISK holds; looked up in the file if omitted
    #[arg(long, short = 'f', value_name = "FORMAT", value_parser = format_parser())]
    pub format: Option<Format>,
    /// Where backing files may be.
    #[command(flatten)]
    pub backing: BackingArgs,
    /// Print the result as JSON
    #[arg(long)]
    pub json: bool,
}

/// What the new overlay is like.
#[derive(Clone, Debug, Args)]
pub struct OverlayArgs {
    /// Make an overlay without subclusters, which crosvm, cloud-hypervisor's own qcow2 and QEMU before 5.2 can read; for a disk
    /// that a server serves, its option subclusters=off says so
    #[arg(long)]
    pub no_subclusters: bool,
}

/// How a disk is reached that a server may be serving, or that no process has open.
#[derive(Clone, Debug, Args)]
pub struct AccessArgs {
    /// What a killed server left.
    #[command(flatten)]
    pub journal: JournalArgs,
    /// The server that may be serving it.
    #[command(flatten)]
    pub server: ControlArgs,
    /// Common options.
    #[command(flatten)]
    pub common: SnapshotCommonArgs,
}

impl AccessArgs {
    /// How the disk's files are opened where no server serves it.
    pub fn open(&self) -> OpenOptions {
        OpenOptions { unflushed: self.journal.unflushed(), ..self.common.open() }
    }
}

impl SnapshotCommonArgs {
    /// The engine's options.
    pub fn open(&self) -> OpenOptions {
        OpenOptions {
            read_only: true,
            allow_backing: self.backing.allow_backing.clone(),
            format: self.format,
            ..OpenOptions::default()
        }
    }
}

/// `vmstrata snapshot create`
#[derive(Debug, Args)]
#[command(after_help = CREATE_HELP)]
pub struct SnapshotCreateArgs {
    /// The disks: all served by one running server, or none in use
    #[arg(value_name = "DISK", required = true)]
    pub disks: Vec<PathBuf>,
    /// What to call it: up to 100 of A-Z a-z 0-9 . _ - [default: the time in UTC]
    #[arg(long, short, value_name = "NAME")]
    pub name: Option<String>,
    /// A label, such as job=nightly (repeatable)
    #[arg(long, short, value_name = "KEY=VALUE", value_parser = parse_label)]
    pub label: Vec<(String, String)>,
    /// What the snapshots of several disks have in common [default: the time, for more than one disk]
    #[arg(long, value_name = "ID")]
    pub group: Option<String>,
    /// The socket of the QEMU guest agent in the disks' guest, whose file systems are frozen for the moment
    /// [default: what the server was told of each disk, agent=SOCKET]
    #[arg(long, value_name = "SOCKET")]
    pub agent: Option<PathBuf>,
    /// Whether file systems are frozen [default: always with --agent, auto without]
    #[arg(long, value_name = "WHEN", value_enum)]
    pub quiesce: Option<Quiesce>,
    /// Take it although images stand on the disk itself; what is written to the disk then changes those
    #[arg(long)]
    pub force: bool,
    /// Let the paths of raw disks become qcow2: their snapshots are overlays
    #[arg(long)]
    pub convert_raw: bool,
    /// What the new overlay is like.
    #[command(flatten)]
    pub overlay: OverlayArgs,
    /// How it is reached, and the result printed.
    #[command(flatten)]
    pub access: AccessArgs,
}

const CREATE_HELP: &str = "\
Examples:
  vmstrata snapshot create web.qcow2
  vmstrata snapshot create web.qcow2 --name mon --label job=nightly --label by=cron
  vmstrata snapshot create root.qcow2 data.qcow2 --name v2 --group guest7      at one instant
  vmstrata snapshot create web.qcow2 --agent /run/web-agent.sock               file systems need no recovery in it
  vmstrata snapshot create web.qcow2 --json | jq -r '.snapshots[].layer'

A disk that a server serves goes on being written meanwhile; writes are held for about a millisecond. \
What was written stays where it is, under a second name: it takes no time and no space but for an empty image. \
A raw disk is refused without --convert-raw, for its path leads to a qcow2 overlay afterwards. What opens that file itself must \
then say so (libvirt: <driver type='qcow2'/>); guests behind this server's sockets see a raw disk as before.
Exit codes: 0 taken, 1 not taken (every disk is as it was; where a host fails between two disks of a group, the message names \
those that have the snapshot), 64 wrong usage.";

/// `vmstrata snapshot list`
#[derive(Debug, Args)]
#[command(after_help = LIST_HELP)]
pub struct SnapshotListArgs {
    /// The disk, which may be in use
    pub disk: PathBuf,
    /// List also files of snapshots that the disk does not stand on any more, and what needs them
    #[arg(long, short)]
    pub all: bool,
    /// Common options.
    #[command(flatten)]
    pub common: SnapshotCommonArgs,
}

const LIST_HELP: &str = "\
Examples:
  vmstrata snapshot list web.qcow2
  vmstrata snapshot list web.qcow2 --json | jq -r '.snapshots[] | select(.labels.job == \"nightly\") | .name'

--all also lists files that were left behind. Their names cannot be used again until the files are removed (`vmstrata gc`). \
Layers without a name are listed as '-': backing files that other tools made are states of the disk too.
Exit codes: 0 listed, 1 the chain cannot be read, 64 wrong usage.";

/// `vmstrata snapshot show`
#[derive(Debug, Args)]
#[command(after_help = SHOW_HELP)]
pub struct SnapshotShowArgs {
    /// The disk, which may be in use; or DISK@NAME
    pub disk: PathBuf,
    /// The snapshot
    #[arg(default_value = "", hide_default_value = true)]
    pub name: String,
    /// Common options.
    #[command(flatten)]
    pub common: SnapshotCommonArgs,
}

const SHOW_HELP: &str = "\
Examples:
  vmstrata snapshot show web.qcow2 mon
  vmstrata snapshot show web.qcow2 mon --json | jq -r .layer

Exit codes: 0 shown, 1 no such snapshot or the chain cannot be read, 64 wrong usage.";

/// `vmstrata snapshot hold` and `vmstrata snapshot release`
#[derive(Debug, Args)]
pub struct SnapshotHoldArgs {
    /// The disk, which may be in use; or DISK@NAME
    pub disk: PathBuf,
    /// The snapshot
    #[arg(default_value = "", hide_default_value = true)]
    pub name: String,
    /// Who holds it: up to 100 of A-Z a-z 0-9 . _ -
    #[arg(long, short, value_name = "TAG", default_value = vmstrata_disk::snapshot::DEFAULT_TAG)]
    pub tag: String,
    /// Common options.
    #[command(flatten)]
    pub common: SnapshotCommonArgs,
}

const HOLD_HELP: &str = "\
Examples:
  vmstrata snapshot hold web.qcow2 before-audit --tag audit
  vmstrata snapshot list web.qcow2 --json | jq -r '.snapshots[] | select(.holds != []) | .name'
  vmstrata snapshot release web.qcow2 before-audit --tag audit

While a snapshot has a hold, `snapshot delete` and `prune`, `merge`, `flatten`, a revert to an older one, and the rules of a server \
refuse to drop it, or leave it out. It may have several holds, of different tags; each is released by itself. `vmstrata backup` holds \
what it was made from under the tag backup, and moves that hold with each incremental backup.
Exit codes: 0 done (also if it was held under this tag already), 1 not, 64 wrong usage.";

/// `vmstrata snapshot revert`
#[derive(Debug, Args)]
#[command(after_help = REVERT_HELP)]
pub struct SnapshotRevertArgs {
    /// The disk: not in use, or served to no guest and no client at the moment; or DISK@NAME
    pub disk: PathBuf,
    /// The snapshot to go back to
    #[arg(default_value = "", hide_default_value = true)]
    pub name: String,
    /// Keep what is active now as FILE, a disk of its own, in the same directory
    #[arg(long, value_name = "FILE")]
    pub keep: Option<PathBuf>,
    /// Let go of what was written since the newest snapshot
    #[arg(long, short)]
    pub yes: bool,
    /// Go back although images stand on the disk as it is now, and will read other data then
    #[arg(long)]
    pub force: bool,
    /// What the new overlay is like.
    #[command(flatten)]
    pub overlay: OverlayArgs,
    /// How it is reached, and the result printed.
    #[command(flatten)]
    pub access: AccessArgs,
}

const REVERT_HELP: &str = "\
Examples:
  vmstrata snapshot revert web.qcow2 mon                     says what would be lost, and does nothing
  vmstrata snapshot revert web.qcow2 mon --yes
  vmstrata snapshot revert web.qcow2 mon --keep web-broken.qcow2

The files of snapshots newer than NAME stay, and a disk kept with --keep still needs them. `snapshot list --all` shows them, and \
`vmstrata gc` removes those that nothing needs. The command is refused while one of them is held (vmstrata snapshot hold).
Images whose backing file is the disk itself, not a snapshot of it, would read other data: with such images the command needs \
--force, and it is refused while one of them is in use.
A served disk goes back while no guest and no client is connected to it, and is behind the same exports again then.
Exit codes: 0 reverted, 1 not (the disk is as it was), 64 wrong usage.";

/// `vmstrata snapshot clone`
#[derive(Debug, Args)]
#[command(after_help = CLONE_HELP)]
pub struct SnapshotCloneArgs {
    /// The disk, which may be in use; or DISK@NAME
    pub disk: PathBuf,
    /// The snapshot to start from
    #[arg(default_value = "", hide_default_value = true)]
    pub name: String,
    /// The new disk
    #[arg(long, short, value_name = "FILE")]
    pub output: PathBuf,
    /// What the new overlay is like.
    #[command(flatten)]
    pub overlay: OverlayArgs,
    /// Common options.
    #[command(flatten)]
    pub common: SnapshotCommonArgs,
}

const CLONE_HELP: &str = "\
Examples:
  vmstrata snapshot clone web.qcow2 mon -o test.qcow2
  vmstrata snapshot clone golden.qcow2 v7 -o /vms/ci-42.qcow2

The clone shares the snapshot's layers, which must stay where they are; deleting the snapshot leaves them. In another directory \
than theirs, serve it with --allow-backing, and if it is moved later, delete snapshots of the disk it came from only after \
it was opened at its new place.
Exit codes: 0 made, 1 not made, 64 wrong usage.";

pub(super) fn parse_label(text: &str) -> anyhow::Result<(String, String)> {
    let (key, value) = text.split_once('=').context("a label is KEY=VALUE, as in job=nightly")?;
    Ok((key.to_owned(), value.to_owned()))
}
