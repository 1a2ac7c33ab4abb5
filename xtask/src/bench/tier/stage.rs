//! What takes part: hosts with tiered disks, the same disk alone, and stock QEMU with the disk on the NAS.

use std::fs;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use vmstrata_repo::Repository as _;
use vmstrata_tier::is_object_name;

use super::super::client::{Client, Target};
use super::super::fresh::BLOCK;
use super::super::history::take::timed;
use super::super::load::{Access, Load, Outcome};
use super::super::server::serve_node;
use super::Options;
use crate::nas::host::{self, Host};
use crate::nas::{Nas, NfsRepository};

const SEED: u64 = 20_261_128;
/// No epoch ends by itself.
pub(super) const NEVER: Duration = Duration::from_secs(600);
/// For so long nothing is written when nothing is merged.
const QUIET: Duration = Duration::from_secs(2);

/// A NAS, and where hosts keep their files.
pub(super) struct Stage<'a> {
    pub(super) options: &'a Options,
    pub(super) nas: Nas,
    pub(super) dir: &'a Path,
}

/// A host, and its guest.
pub(super) struct Side {
    pub(super) client: Client,
    pub(super) host: Host,
}

/// Stock QEMU's storage daemon on a host, and its guest.
pub(super) struct Peer {
    pub(super) client: Client,
    child: Child,
}

impl Stage<'_> {
    /// An empty image of so many bytes in a directory of its own.
    pub(super) fn empty(&self, name: &str, size: u64) -> Result<PathBuf> {
        let dir = self.dir.join(name);
        fs::create_dir_all(&dir)?;
        let path = dir.join("empty.qcow2");
        let mut create = Command::new("qemu-img");
        timed(create.args(["create", "-q", "-f", "qcow2"]).arg(&path).arg(size.to_string()))?;
        Ok(path)
    }

    /// Starts a host on the image at `disk`, whose repository is the directory `name` of the NAS.
    pub(super) fn host(&self, number: u8, disk: &Path, name: &str, how: (Duration, bool)) -> Result<Side> {
        let (window, take_over) = how;
        let (server, path) = self.nas.address(number, name);
        fs::create_dir_all(&path)?;
        let options = host::Options {
            disk: disk.to_owned(),
            dir: self.host_dir(number, name),
            server: Some(IpAddr::V4(server)),
            path: Some(path),
            take_over,
            window: window.as_secs_f64(),
        };
        Side::start(self.nas.network().on_host(number, &host::program()), &options)
    }

    /// Where a host keeps what it has of a disk.
    pub(super) fn host_dir(&self, number: u8, name: &str) -> PathBuf {
        self.dir.join(format!("{name}-host{number}"))
    }

    /// Removes a repository, and what a host that has ended has of it.
    pub(super) fn forget(&self, number: u8, name: &str) -> Result<()> {
        let (server, path) = self.nas.address(number, name);
        let remove = || -> Result<()> {
            self.nas.network().enter_host(number)?;
            // Through the server, which else keeps open what it has served.
            let repository = NfsRepository::open(IpAddr::V4(server), &path, is_object_name)?;
            Ok(repository.names("")?.iter().try_for_each(|object| repository.delete(object))?)
        };
        thread::scope(|scope| scope.spawn(remove).join().expect("does not panic"))?;
        Ok(fs::remove_dir_all(self.host_dir(number, name))?)
    }

    /// Serves the image at `disk` by the same program, without a NAS.
    pub(super) fn local(&self, disk: &Path) -> Result<Side> {
        let dir = disk.parent().context("a directory")?.join("served");
        let (disk, window) = (disk.to_owned(), NEVER.as_secs_f64());
        let options = host::Options { disk, dir, server: None, path: None, take_over: false, window };
        Side::start(Command::new(host::program()), &options)
    }

    /// Has stock QEMU serve a copy of the image at `disk` that lies on the NAS.
    pub(super) fn peer(&self, disk: &Path, cache: &str) -> Result<Peer> {
        let name = format!("peer-{cache}.qcow2");
        fs::copy(disk, self.nas.export().join(&name))?;
        let (server, path) = self.nas.address(1, &name);
        let socket = self.dir.join(format!("{name}.sock"));
        let direct = if cache == "none" { "on" } else { "off" };
        let mut command = self.nas.network().on_host(1, Path::new("qemu-storage-daemon"));
        command.arg("--blockdev").arg(format!(
            "driver=nfs,node-name=file,server.type=inet,server.host={server},path={path},cache.direct={direct}"
        ));
        command.arg("--blockdev").arg(format!("driver=qcow2,node-name=disk,file=file,cache.direct={direct}"));
        let (child, client) = serve_node(command, &socket, SEED)?;
        Ok(Peer { client, child })
    }
}

impl Side {
    fn start(command: Command, options: &host::Options) -> Result<Self> {
        let host = Host::start(command, options)?;
        let client = Client::connect(&Target::VhostUser(host.socket().to_owned()), SEED, false)?;
        Ok(Self { client, host })
    }

    pub(super) fn stop(self) -> Result<()> {
        drop(self.client);
        self.host.stop()
    }

    /// Cuts the disk, and ships that. Returns the bytes that went to the NAS.
    pub(super) fn ship(&mut self) -> Result<u64> {
        let before = self.host.status()?.written_bytes;
        Ok(self.host.sync()?.written_bytes - before)
    }

    /// Waits until nothing is written to the NAS any more: merges of what was shipped before have ended.
    pub(super) fn wait_for_merges(&mut self) -> Result<()> {
        let mut before = (self.host.status()?.written_bytes, Instant::now());
        while before.1.elapsed() < QUIET {
            thread::sleep(Duration::from_millis(100));
            let now = self.host.status()?.written_bytes;
            if now != before.0 {
                before = (now, Instant::now());
            }
        }
        Ok(())
    }

    /// Processor time of the host so far, in seconds.
    pub(super) fn processor_s(&self) -> Result<f64> {
        let stat = fs::read_to_string(format!("/proc/{}/stat", self.host.id()))?;
        // What follows the name, which may have anything in it: from field 3 on.
        let fields = stat.rsplit_once(") ").context("a process")?.1;
        let ticks: u64 =
            fields.split(' ').skip(11).take(2).filter_map(|field| field.parse::<u64>().ok()).sum();
        Ok(ticks as f64 / rustix::param::clock_ticks_per_second() as f64)
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Random 4 KiB writes of a guest for so long.
pub(super) fn random_writes(seed: u64, depth: usize, fua: bool, time: Duration) -> Load {
    Load { access: Access::RandomWrite { round: 0 }, fua, block: BLOCK, depth, time, seed }
}

/// Bytes of the blocks that were written, each counted once.
pub(super) fn distinct_bytes(outcome: &Outcome) -> u64 {
    (outcome.written.iter().filter(|written| **written).count() * BLOCK) as u64
}
