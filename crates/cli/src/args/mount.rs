//! `mount`: a disk as a file.

use std::path::PathBuf;

use clap::Args;
use vmstrata_disk::Format;

use super::{BackingArgs, JournalArgs};
use crate::disk_spec::format_parser;

/// `vmstrata mount`
#[derive(Debug, Args)]
#[command(after_help = MOUNT_HELP)]
pub struct MountArgs {
    /// The disk: a file, or DISK@SNAPSHOT
    pub disk: PathBuf,
    /// Where: a file, which becomes the disk and is made if it is not there; or a directory, which gets the file `disk`
    #[arg(value_name = "FILE|DIR")]
    pub place: PathBuf,
    /// Let the file be written, and with it the disk; not for a snapshot
    #[arg(long)]
    pub write: bool,
    /// Let other users read it, too; unless root this needs user_allow_other in /etc/fuse.conf
    #[arg(long)]
    pub allow_other: bool,
    /// What DISK holds; looked up in the file if omitted
    #[arg(long, value_name = "FORMAT", value_parser = format_parser())]
    pub format: Option<Format>,
    /// With --write, write even if other images have DISK as backing file, which corrupts them
    #[arg(long, requires = "write")]
    pub force: bool,
    /// Where backing files may be.
    #[command(flatten)]
    pub backing: BackingArgs,
    /// What a killed server left, for --write.
    #[command(flatten)]
    pub journal: JournalArgs,
    /// Print what is mounted as one JSON line
    #[arg(long)]
    pub json: bool,
}

const MOUNT_HELP: &str = "\
Examples:
  vmstrata mount web.qcow2@mon /mnt/web.raw
  vmstrata mount web.qcow2 /mnt/web.raw --write
  losetup --find --show --direct-io=on --read-only /mnt/web.raw
  umount /mnt/web.raw

Runs until the place is unmounted, or until SIGINT or SIGTERM: if a program has the file open then, the place is taken out of sight \
and the command ends once the file is closed; a second signal ends it at once. When it is ready it says so on standard output. If \
it is killed, a second process takes the mount away. The file has holes where the disk has; with --write, punching holes gives space \
back. A disk that a server serves is mounted by the server: `serve --fuse`, `export add --fuse`.
Exit codes: 0 unmounted, 1 not mounted or not closed clean (the reason is on stderr), 64 wrong usage.";

/// `vmstrata mount-guard`, which a process that mounts runs
#[derive(Debug, Args)]
pub struct MountGuardArgs {
    /// Where the mount is
    pub place: PathBuf,
    /// Remove the empty file there, too
    #[arg(long)]
    pub remove: bool,
}
