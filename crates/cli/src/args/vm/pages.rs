//! `vmstrata vm pages` on the command line.

use std::path::PathBuf;

use clap::{Args, ValueEnum};

/// `vmstrata vm pages`
#[derive(Debug, Args)]
#[command(after_help = PAGES_HELP)]
pub struct VmPagesArgs {
    /// The monitor (QMP) socket of a running QEMU, with no other client; its memory must be in shared memory-backend-file objects
    #[arg(long, value_name = "SOCKET", required_unless_present = "memory")]
    pub qmp: Option<PathBuf>,
    /// Pause the guest while its pages are read, so that what is shown is of one instant
    #[arg(long, conflicts_with = "memory")]
    pub pause: bool,
    /// A file that holds a guest's memory, all of it: QEMU's memory backend, or a copy
    #[arg(long, value_name = "FILE", conflicts_with = "qmp")]
    pub memory: Option<PathBuf>,
    /// The machine type whose memory layout FILE has
    #[arg(long, value_name = "TYPE", default_value = "q35", requires = "memory")]
    pub machine: MachineKind,
    /// Write a picture to FILE (PPM): one pixel a page, 1,024 pages a row
    #[arg(long, value_name = "FILE")]
    pub picture: Option<PathBuf>,
    /// Show a map of the memory, too
    #[arg(long, conflicts_with = "json")]
    pub map: bool,
    /// Print the result as JSON
    #[arg(long)]
    pub json: bool,
}

const PAGES_HELP: &str = "\
Examples:
  vmstrata vm pages --qmp /run/vm/web.qmp
  vmstrata vm pages --qmp /run/vm/web.qmp --pause --map
  vmstrata vm pages --qmp /run/vm/web.qmp --picture web.ppm
  vmstrata vm pages --memory /dev/shm/web.mem --machine pc --json | jq .causes

Each page is free (its content means nothing), clean (file cache that equals the disk, unused at this moment), or critical \
(all else, and all that is not understood). Linux 5.10 and later on x86-64 is understood, ext4 and xfs for clean pages; \
the kernel needs VMCOREINFO and BTF, as distributions build it. The guest is not touched and need not know.

In a picture, free is black, ext4 cache green, xfs cache blue, other cache yellow, anonymous red, kernel memory grey.

Exit codes: 0 shown, 1 the memory cannot be reached, 2 the guest is not understood (all of it counts as critical), \
64 wrong usage.";

/// Machine types of QEMU whose memory layouts are known.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum MachineKind {
    /// ICH9: up to 2.75 GiB below the hole, 2 GiB of larger memories.
    Q35,
    /// i440FX: up to 3.5 GiB below the hole, 3 GiB of larger memories.
    Pc,
}
