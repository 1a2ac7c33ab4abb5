//! `vmstrata vm migrate` on the command line.

use std::path::PathBuf;

use clap::Args;

use crate::args::ControlArgs;
use crate::units::parse_size;

/// `vmstrata vm migrate`
#[derive(Debug, Args)]
#[command(after_help = MIGRATE_HELP)]
pub struct VmMigrateArgs {
    /// What the guest is called
    pub guest: String,
    /// The control socket of the target host's server, as ssh forwards it
    #[arg(long, value_name = "SOCKET")]
    pub to_control: PathBuf,
    /// The monitor (QMP) socket of the QEMU that waits at the target, as ssh forwards it
    #[arg(long, value_name = "SOCKET")]
    pub to_qmp: PathBuf,
    /// Where the target's QEMU listens for the guest's memory, as in tcp:hostb:4444
    #[arg(long, value_name = "URI", required_unless_present_any = ["recover", "dry_run"])]
    pub uri: Option<String>,
    /// The monitor (QMP) socket of the guest's QEMU [default: as `vm args` has it]
    #[arg(long, value_name = "PATH")]
    pub qmp: Option<PathBuf>,
    /// A disk of the guest, as both servers call it (repeatable) [default: those whose sockets QEMU is connected to]
    #[arg(long = "disk", value_name = "NAME")]
    pub disks: Vec<String>,
    /// Bytes of memory that QEMU sends in a second at most [default: what QEMU is set to]
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    pub bandwidth: Option<u64>,
    /// Milliseconds for which QEMU may stop the guest for the last of its memory [default: what QEMU is set to]
    #[arg(long, value_name = "MS", value_parser = clap::value_parser!(u32).range(1..=2_000_000))]
    pub downtime: Option<u32>,
    /// Check whether the guest can move, and move nothing
    #[arg(long, conflicts_with = "recover")]
    pub dry_run: bool,
    /// End a migration whose command was killed or gave up: the guest goes on where its disk is
    #[arg(long)]
    pub recover: bool,
    /// The server of the guest's disks.
    #[command(flatten)]
    pub server: ControlArgs,
    /// Print the result as JSON
    #[arg(long)]
    pub json: bool,
}

const MIGRATE_HELP: &str = "\
Examples:
  vmstrata vm migrate web --to-control /run/b/control.sock --to-qmp /run/b/web.qmp --dry-run
  vmstrata vm migrate web --to-control /run/b/control.sock --to-qmp /run/b/web.qmp --uri tcp:hostb:4444
  vmstrata vm migrate web --to-control /run/b/control.sock --to-qmp /run/b/web.qmp --recover

Run it at the source. Its disks are tiered, all in one group if there are several, and their repository is seen by both hosts. At the target, the disk is added with its key standby and an \
export, and QEMU waits with -incoming defer. The sockets of the target come by ssh:
  ssh -N -L /run/b/control.sock:/run/vmstrata/control.sock -L /run/b/web.qmp:/run/vmstrata/web.qmp hostb

Memory goes from QEMU to QEMU while the guest runs. When the target has all of it, the disk is handed over: one object in the repository decides which host has \
it. Before that, any failure, a cancel (SIGINT) or a kill leaves the guest running at the source; after it, at the target. A second process ends a \
migration whose command is killed; --recover does the same by hand. The QEMU that is left is ended.
Exit codes: 0 the guest runs at the target (--dry-run: it can move; --recover: it runs at one of them), 1 it did not move, 64 wrong usage.";
