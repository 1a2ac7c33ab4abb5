//! `cargo xtask load`: one timed run against any vhost-user-blk socket or raw file, for profiling.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::Result;
use clap::{Args, ValueEnum};
use xtask::bench::client::{Client, Target};
use xtask::bench::load::{Access, Load};
use xtask::size::parse_size;

/// Example: `cargo xtask load --vhost-user /run/web.sock --depth 1 --seconds 5`
#[derive(Args)]
pub(crate) struct LoadCommand {
    /// A vhost-user-blk socket.
    #[arg(long, required_unless_present = "raw", conflicts_with = "raw")]
    vhost_user: Option<PathBuf>,
    /// A raw file, read with io_uring.
    #[arg(long)]
    raw: Option<PathBuf>,
    /// Watch the ring instead of sleeping until the server interrupts.
    #[arg(long, requires = "vhost_user")]
    poll: bool,
    /// What requests do.
    #[arg(long, value_enum, default_value_t = Kind::Read)]
    kind: Kind,
    /// Each write is on stable storage when it ends.
    #[arg(long)]
    fua: bool,
    /// Bytes of a request.
    #[arg(long, value_parser = parse_size, default_value = "4K")]
    block: u64,
    /// Requests in flight.
    #[arg(long, default_value_t = 32)]
    depth: usize,
    /// Length of the run.
    #[arg(long, default_value_t = 3.0)]
    seconds: f64,
}

#[derive(Clone, Copy, ValueEnum)]
enum Kind {
    Read,
    Sequential,
    Write,
    /// Once into each cluster of a fresh overlay.
    FirstWrite,
}

impl LoadCommand {
    pub(crate) fn run(self) -> Result<()> {
        let target = match (self.vhost_user, self.raw) {
            (Some(path), _) if self.poll => Target::VhostUserPolled(path),
            (Some(path), _) => Target::VhostUser(path),
            (None, Some(path)) => Target::RawFile(path),
            (None, None) => unreachable!("clap asks for one of the two"),
        };
        let access = match self.kind {
            Kind::Read => Access::RandomRead,
            Kind::Sequential => Access::SequentialRead,
            Kind::Write => Access::RandomWrite { round: 0 },
            Kind::FirstWrite => Access::FirstWrite { round: 0 },
        };
        let writes = matches!(self.kind, Kind::Write | Kind::FirstWrite);
        let mut client = Client::connect(&target, 1, !writes)?;
        let time = Duration::from_secs_f64(self.seconds);
        let load =
            Load { access, fua: self.fua, block: self.block as usize, depth: self.depth, time, seed: 1 };
        let outcome = client.run(&load)?;
        let rate = outcome.iops();
        println!("{rate:.0} requests/s, {:.0} MiB/s", rate * self.block as f64 / (1 << 20) as f64);
        Ok(())
    }
}
