//! A guest's first boot on a host, from a disk that a far object store has, beside the same disk on the host.
//!
//! ```text
//!   publish ─► two repositories of the same disk ─┬─ one guest boots, and its server notes what it read ─► boots with the list
//!                                                 └─ the list is removed before each boot              ─► boots without
//! ```
//!
//! Each boot is the first of its host: it takes the disk over with an empty cache.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Child;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};

use super::super::client::Client;
use super::super::history::take::timed;
use super::super::machine::settle;
use super::super::report::{Report, Row};
use super::super::results::ratios;
use super::super::server::{serve_at, terminate, vmstrata};
use super::Options;
use super::boot::Boot;
use super::stage::{PAYLOAD, SEED, Stage};
use crate::nas::ObjectStore;

/// The host that everything runs on.
const HOST: u8 = 1;
/// The image's name, in each directory that a server of it has.
const IMAGE: &str = "base.qcow2";
/// The object that is the list of what guests read when they start.
const LIST: &str = "boot";
/// The disk whose hosts have no such list.
const WITHOUT: &str = "without";
/// Until a server has written the list; it does so two minutes after it has opened the disk.
const NOTED_MAX: Duration = Duration::from_secs(240);
/// Between two looks for it.
const LOOK: Duration = Duration::from_millis(200);

/// A disk in the object store.
struct Far<'a> {
    store: &'a ObjectStore<'a>,
    stage: &'a Stage<'a>,
    /// What names of its objects begin with.
    prefix: &'static str,
    /// Hosts that have had it.
    hosts: u32,
}

/// What a boot took.
struct Booted {
    time_s: f64,
    /// From the store to the host, without headers.
    bytes: f64,
}

pub(super) fn run(options: &Options, stage: &Stage<'_>, boot: &Boot, report: &mut Report) -> Result<()> {
    let store = ObjectStore::start(&stage.nas, options.store)?;
    let far = |prefix| Far { store: &store, stage, prefix, hosts: 0 };
    let (mut without, mut with) = (far(WITHOUT), far("with"));
    without.publish()?;
    if options.notes_start {
        with.publish()?;
    }
    stage.nas.set_round_trip(options.far);
    if options.notes_start {
        with.note_start(boot, options.speed)?;
    }
    let mut local = Vec::new();
    let mut sides = [(without, Vec::new()), (with, Vec::new())];
    for _ in 0..options.rounds {
        settle();
        let (server, sockets) = stage.serve_local()?;
        local.push(stage.storm((vec![server], sockets), boot, options.speed)?.time_s);
        for (far, booted) in sides.iter_mut().take(1 + usize::from(options.notes_start)) {
            settle();
            if far.prefix == WITHOUT {
                far.forget_list()?;
            }
            booted.push(far.boot(boot, options.speed)?);
        }
    }
    let [(_, without_list), (_, with_list)] = sides;
    let name = format!("first boot from S3 at {} ms", options.far.as_millis());
    let row = |what: &str, booted: &[Booted]| {
        let times: Vec<f64> = booted.iter().map(|booted| booted.time_s).collect();
        Row::median(
            &format!("{name}, {what} list of earlier starts / 1 on a local disk"),
            "",
            &ratios(&times, &local),
        )
    };
    if options.notes_start {
        report.add(row("with the", &with_list).at_most(1.5));
    }
    report.add(row("without a", &without_list));
    let mib: Vec<f64> = without_list.iter().map(|booted| booted.bytes / f64::from(1 << 20)).collect();
    report.add(Row::median(
        &format!("{name}, without a list of earlier starts: from the store"),
        "MiB",
        &mib,
    ));
    Ok(())
}

impl Far<'_> {
    fn address(&self) -> String {
        self.store.repository(HOST, self.prefix)
    }

    fn list(&self) -> String {
        format!("{}/{LIST}", self.prefix)
    }

    fn has_list(&self) -> Result<bool> {
        self.store.has(&self.list())
    }

    /// A server that lived long enough has noted what its guest read.
    fn forget_list(&self) -> Result<()> {
        self.store.remove(&self.list())
    }

    /// The directory of a host that has nothing of the disk.
    fn new_host(&mut self) -> Result<PathBuf> {
        self.hosts += 1;
        let dir = self.stage.dir.join(format!("{}{}", self.prefix, self.hosts));
        fs::create_dir(&dir)?;
        Ok(dir)
    }

    fn serve(&self, dir: &Path) -> Result<(Child, Client)> {
        let socket = dir.join("vhost.sock");
        let mut command = self.store.command(HOST, &vmstrata());
        let (path, tier) = (dir.join(IMAGE), dir.join("tier"));
        command.args(["serve", "--disk"]).arg(format!(
            "path={},name=disk,cache=host,tier={},repository={}",
            path.display(),
            tier.display(),
            self.address()
        ));
        command.arg("--vhost-user").arg(format!("disk={},any-memory,share", socket.display()));
        command.arg(format!("--control={}", dir.join("control.sock").display()));
        serve_at(command, "vmstrata", &socket, SEED)
    }

    fn publish(&mut self) -> Result<()> {
        let dir = self.new_host()?;
        fs::copy(self.stage.local, dir.join(IMAGE))?;
        let (server, client) = self.serve(&dir)?;
        drop(client);
        stop(server)
    }

    /// Has another host take the disk over, and serves it there.
    fn take_over(&mut self) -> Result<(Child, Client)> {
        let dir = self.new_host()?;
        let mut command = self.store.command(HOST, &vmstrata());
        command.args(["tier", "takeover", &self.address(), "--yes", "--tier"]).arg(dir.join("tier"));
        timed(&mut command)?;
        self.serve(&dir)
    }

    /// Boots once on a host that lives until it has noted what the guest read.
    fn note_start(&mut self, boot: &Boot, speed: u32) -> Result<()> {
        let (mut server, mut client) = self.take_over()?;
        boot.again(&mut client, speed)?;
        let start = Instant::now();
        while !self.has_list()? {
            ensure!(
                server.try_wait()?.is_none() && start.elapsed() < NOTED_MAX,
                "what was read is not noted"
            );
            thread::sleep(LOOK);
        }
        drop(client);
        stop(server)
    }

    /// The first boot of a host.
    fn boot(&mut self, boot: &Boot, speed: u32) -> Result<Booted> {
        let network = self.stage.nas.network();
        let (server, mut client) = self.take_over()?;
        let before = network.received_bytes(HOST)?;
        let time_s = boot.again(&mut client, speed)?.as_secs_f64();
        let bytes = (network.received_bytes(HOST)? - before) as f64 * PAYLOAD;
        drop(client);
        stop(server)?;
        Ok(Booted { time_s, bytes })
    }
}

fn stop(mut server: Child) -> Result<()> {
    terminate(&server)?;
    let status = server.wait().context("a server")?;
    ensure!(status.success(), "vmstrata ended with {status}");
    Ok(())
}
