//! The command lines of the commands that speak to a running server.

use std::path::PathBuf;

use clap::builder::{OsStringValueParser, TypedValueParser as _};
use clap::{Args, Subcommand};
use vmstrata_api as api;
use vmstrata_server::spec::{FuseSpec, NbdSpec, VhostUserSpec};

use crate::disk_spec::{parse_api_disk, parse_fuse, parse_limits, parse_nbd, parse_vhost_user};

/// Which server is meant.
#[derive(Clone, Debug, Args)]
pub struct ControlArgs {
    /// The server's control socket [default: control.sock in /run/vmstrata, or $XDG_RUNTIME_DIR/vmstrata unless root]
    #[arg(long, value_name = "PATH", env = "VMSTRATA_CONTROL")]
    pub control: Option<PathBuf>,
}

impl ControlArgs {
    /// The server that the environment names, or the default one, for commands that only look up a disk's name.
    pub fn of_environment() -> Self {
        Self { control: std::env::var_os("VMSTRATA_CONTROL").map(PathBuf::from) }
    }
}

/// `vmstrata status`
#[derive(Debug, Args)]
#[command(after_help = STATUS_HELP)]
pub struct StatusArgs {
    /// Which server.
    #[command(flatten)]
    pub server: ControlArgs,
    /// Print JSON, as `GET /v1/status` answers
    #[arg(long)]
    pub json: bool,
}

const STATUS_HELP: &str = "\
Examples:
  vmstrata status
  vmstrata status --json | jq -r '.disks[] | select(.layers > 500) | .name'
  vmstrata status --control /run/vms/control.sock

Exit codes: 0 shown, 1 no server answers, 64 wrong usage.";

/// `vmstrata top`
#[derive(Debug, Args)]
#[command(after_help = TOP_HELP)]
pub struct TopArgs {
    /// Which server.
    #[command(flatten)]
    pub server: ControlArgs,
    /// Seconds from one look to the next
    #[arg(long, short, value_name = "SECONDS", default_value = "1", value_parser = interval)]
    pub interval: f64,
    /// Print what happened in one interval, and end
    #[arg(long)]
    pub once: bool,
    /// Print JSON, a list of disks for each interval
    #[arg(long)]
    pub json: bool,
}

const TOP_HELP: &str = "\
Examples:
  vmstrata top
  vmstrata top --interval 5
  vmstrata top --once --json | jq '.[] | {name, reads_per_second}'

Times are bounds: <16 µs is from 8 to 16. SLOW is the share of reads and writes that the metadata in memory did not \
answer, or that had to allocate. Without a terminal, each look is printed below the one before.
Exit codes: 0 shown, 1 no server answers, or it ended, 64 wrong usage.";

fn interval(text: &str) -> anyhow::Result<f64> {
    let seconds: f64 = text.parse()?;
    anyhow::ensure!((0.1..=3600.0).contains(&seconds), "an interval is from 0.1 to 3600 seconds");
    Ok(seconds)
}

/// `vmstrata disk`
#[derive(Debug, Args)]
#[command(after_help = DISK_HELP)]
pub struct DiskArgs {
    /// What to do.
    #[command(subcommand)]
    pub command: DiskCommand,
}

/// What can be done to the disks of a running server.
#[derive(Debug, Subcommand)]
pub enum DiskCommand {
    /// Show a disk: its exports, what was done to it, and its chain
    #[command(after_help = "Examples:\n  vmstrata disk show web\n  vmstrata disk show web --json")]
    Show {
        /// The disk's name, or its path
        name: String,
        /// Which server.
        #[command(flatten)]
        server: ControlArgs,
        /// Print JSON, as `GET /v1/disks/NAME` answers
        #[arg(long)]
        json: bool,
    },
    /// Open a disk; every NBD export serves it from then on
    #[command(
        after_help = "Examples:\n  vmstrata disk add path=web.qcow2,name=web\n  vmstrata disk add path=web.qcow2,name=web-mon,at=mon\n  vmstrata disk add path=backup.qcow2,read-only --json"
    )]
    Add {
        /// path=FILE[,name=NAME][,read-only][,force][,cache=host|direct][,detect-zeroes=off|on|unmap][,subclusters=on|off][,format=qcow2|raw]
        /// [,at=SNAPSHOT[,clone=FILE]][,agent=SOCKET][,keep=RULE,,RULE...][,backing=none|PATH[:PATH...]]
        /// [,tier=DIR[,repository=ADDRESS][,group=NAME][,window=SECONDS][,epochs=TIME][,on-missing=wait|error[:SECONDS]][,on-outage=continue|stall]
        /// [,outage-bytes=SIZE][,durability=host|repository][,standby]][,replica=DIR[,repository=ADDRESS][,on-missing=...]][,role=swap|local,size=SIZE][,LIMITS], as for `serve --disk`. A disk of a group
        /// waits until all of the group were added
        #[arg(value_name = "SPEC", value_parser = OsStringValueParser::new().try_map(|text| parse_api_disk(text).map(Box::new)))]
        spec: Box<api::DiskSpec>,
        /// Which server.
        #[command(flatten)]
        server: ControlArgs,
        /// Print what was added as JSON
        #[arg(long)]
        json: bool,
    },
    /// Limit what a disk's guests may do in a second, from now on
    #[command(
        after_help = "Examples:\n  vmstrata disk limit web iops-total=1000,bps-total=64M\n  vmstrata disk limit web bps-write=20M,bps-write-max=100M,bps-write-max-length=60\n  vmstrata disk limit web none"
    )]
    Limit {
        /// The disk's name
        name: String,
        /// All its limits: iops-total=N, iops-read, iops-write, bps-total=SIZE, bps-read, bps-write; bursts with KEY-max=N, for
        /// KEY-max-length=SECONDS; or none
        #[arg(value_name = "LIMITS", value_parser = |text: &str| parse_limits(text).map(Box::new))]
        limits: Box<api::DiskLimits>,
        /// Which server.
        #[command(flatten)]
        server: ControlArgs,
        /// Print the limits as JSON
        #[arg(long)]
        json: bool,
    },
    /// Close a disk, and the others of its group: exports are drained, images are left clean, files are unlocked
    #[command(
        after_help = "Examples:\n  vmstrata disk remove web\n  vmstrata disk remove web --force\n  vmstrata disk remove web-journal --yes"
    )]
    Remove {
        /// The disk's name, or its path
        name: String,
        /// Also from under a guest that is attached
        #[arg(long)]
        force: bool,
        /// Also the file of a disk with role=local, which goes with it
        #[arg(long)]
        yes: bool,
        /// Which server.
        #[command(flatten)]
        server: ControlArgs,
        /// Print what was removed as JSON
        #[arg(long)]
        json: bool,
    },
}

const DISK_HELP: &str = "\
Examples:
  vmstrata disk show web
  vmstrata disk add path=web.qcow2,name=web
  vmstrata disk add path=backup.qcow2,read-only --json
  vmstrata disk limit web iops-total=1000,bps-total=64M
  vmstrata disk remove web

Exit codes: 0 done, 1 not done (the reason is on stderr), 64 wrong usage.";

/// `vmstrata export`
#[derive(Debug, Args)]
#[command(after_help = EXPORT_HELP)]
pub struct ExportArgs {
    /// What to do.
    #[command(subcommand)]
    pub command: ExportCommand,
}

/// What can be done to the exports of a running server.
#[derive(Debug, Subcommand)]
pub enum ExportCommand {
    /// Open an export to a disk, or to all
    #[command(
        after_help = "Examples:\n  vmstrata export add --vhost-user web=/run/web.sock,queues=4\n  vmstrata export add --nbd unix:/run/nbd.sock"
    )]
    Add {
        /// What to open.
        #[command(flatten)]
        export: Box<NewExport>,
        /// Which server.
        #[command(flatten)]
        server: ControlArgs,
        /// Print what was added as JSON
        #[arg(long)]
        json: bool,
    },
    /// Close an export: requests in flight are finished, its clients are let go, its disks stay
    #[command(
        after_help = "Examples:\n  vmstrata export remove /run/web.sock\n  vmstrata export remove unix:/run/nbd.sock --force"
    )]
    Remove {
        /// The export's number, socket, address or directory, as `vmstrata status` shows it
        export: String,
        /// Also from under a guest that is attached
        #[arg(long)]
        force: bool,
        /// Which server.
        #[command(flatten)]
        server: ControlArgs,
        /// Print what was removed as JSON
        #[arg(long)]
        json: bool,
    },
}

/// One export.
#[derive(Debug, Args)]
#[group(required = true, multiple = false)]
pub struct NewExport {
    /// A socket for one guest: NAME=SOCKET[,queues=N][,threads=N][,poll-us=N][,serial=S][,share][,any-memory]
    /// [,owner=USER][,group=GROUP][,mode=MODE]
    #[arg(long, value_name = "SPEC", value_parser = parse_vhost_user)]
    pub vhost_user: Option<VhostUserSpec>,
    /// An address for NBD clients of all disks, who read: unix:/path or tcp:host:port[,rw][,share][,insecure]
    /// [,allow=CLIENT[:ro|:rw[:DISK...]],,CLIENT...], as for `serve --nbd`
    #[arg(long, value_name = "SPEC", value_parser = parse_nbd)]
    pub nbd: Option<NbdSpec>,
    /// A directory on which all disks and their snapshots are mounted as files: DIR[,rw][,share][,allow-other], as for `serve
    /// --fuse`
    #[arg(long, value_name = "SPEC", value_parser = parse_fuse)]
    pub fuse: Option<FuseSpec>,
}

const EXPORT_HELP: &str = "\
Examples:
  vmstrata export add --vhost-user web=/run/web.sock,queues=4
  vmstrata export add --nbd unix:/run/nbd.sock
  vmstrata export add --nbd unix:/run/restore.sock,rw
  vmstrata export add --fuse /run/vmstrata/disks
  vmstrata export remove /run/web.sock

Exit codes: 0 done, 1 not done (the reason is on stderr), 64 wrong usage.";
