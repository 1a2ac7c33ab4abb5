//! `cargo xtask bench base`: guests that boot from one base on a NAS, beside the same base on a local disk and stock QEMU on the NAS.
//!
//! ```text
//!   boot     a real guest boots once on a local disk; its reads are noted
//!   storm    one client, five of one host, twenty-five of five hosts do the same reads at once: time, bytes from the NAS; and again
//!      └──► report (rows beside their bounds) ──► docs/measurements/base.json, docs/bases.md
//! ```
//!
//! The NAS is a real server ([`crate::nas`]), mounted in user space ([`crate::nas::Mount`]); `vmstrata serve` is as users run it. A
//! round has each storm once, one after the other; a ratio is taken from one round, and the median of the rounds is judged.

mod boot;
mod stage;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Result, ensure};

use super::history::take::timed;
use super::machine::settle;
use super::report::{Report, Row};
use super::results::{median, ratios};
use super::server::{self, vmstrata};
use super::shown::Shown;
use crate::guest::{Guest, RootImage};
use crate::nas::{self, Mount, Nas};
use boot::Boot;
use stage::{Stage, Storm};

/// Where the results are kept.
pub const SHOWN: Shown = Shown {
    file: "docs/measurements/base.json",
    summary: "docs/bases.md",
    page: "docs/measurements/base.md",
    mark: "bench:base",
};

/// What the command line asks for.
#[derive(Clone, Debug)]
pub struct Options {
    /// The guest's disk.
    pub image: RootImage,
    /// Hosts of the large storm.
    pub hosts: u8,
    /// Guests of each host.
    pub guests: usize,
    /// By what the time is divided that the recorded guest took between its reads.
    pub speed: u32,
    /// Rounds.
    pub rounds: u32,
    /// Where files are made, and removed at the end.
    pub dir: PathBuf,
    /// Root of the repository, to write results into; `None` prints only.
    pub publish: Option<PathBuf>,
}

impl Options {
    /// The benchmark of the bounds.
    pub fn full(dir: PathBuf) -> Self {
        let image = RootImage { size: 2 << 30, files: 32, file_size: 4 << 20 };
        Self { image, hosts: 5, guests: 5, speed: 1, rounds: 5, dir, publish: None }
    }

    /// Everything once, small; its figures mean little.
    pub fn quick(dir: PathBuf) -> Self {
        let image = RootImage { size: 256 << 20, files: 4, file_size: 1 << 20 };
        Self { image, hosts: 2, guests: 2, speed: 20, rounds: 1, dir, publish: None }
    }
}

/// What each side found, round by round.
#[derive(Debug, Default)]
struct Found {
    local: Vec<f64>,
    plain_one: Vec<Storm>,
    plain: Vec<Storm>,
    one: Vec<Storm>,
    host: Vec<Storm>,
    again: Vec<Storm>,
    hosts: Vec<Storm>,
}

/// Runs the benchmark and, when asked to, writes its files.
///
/// # Errors
/// When a server or a tool fails, or files cannot be written.
pub fn run(options: &Options) -> Result<Report> {
    ensure!(vmstrata().exists(), "build vmstrata first: cargo build --release");
    nas::check()?;
    server::raise_file_limit()?;
    fs::create_dir_all(&options.dir)?;
    let dir = tempfile::Builder::new().prefix("base-").tempdir_in(&options.dir)?;
    let guest = Guest::here()?;
    let local = local_base(options, &guest, dir.path())?;
    let boot = Boot::record(&guest, &local, dir.path())?;
    let nas = Nas::start(options.hosts)?;
    let mount = |host: u8| -> Result<Mount> {
        let at = dir.path().join(format!("mount{host}"));
        fs::create_dir(&at)?;
        Mount::new(&nas, host, &at)
    };
    let mounts = (1..=options.hosts).map(mount).collect::<Result<_>>()?;
    let stage = Stage { nas: &nas, dir: dir.path(), mounts, local };
    stage.publish()?;
    let found = storms(options, &stage, &boot)?;
    let allocated = fs::metadata(&stage.local)?.len() as f64;
    let mut report = Report::new("qemu-storage-daemon", parameters(options, &boot));
    rows(options, &found, allocated, &mut report);
    SHOWN.publish_parts(options.publish.as_deref(), &report, true)?;
    Ok(report)
}

/// The guest's disk as a qcow2 file.
fn local_base(options: &Options, guest: &Guest, dir: &Path) -> Result<PathBuf> {
    let raw = options.image.make(guest, dir)?;
    let (into, path) = (dir.join("base"), dir.join("base/golden.qcow2"));
    fs::create_dir(into)?;
    let mut convert = Command::new("qemu-img");
    convert.args(["convert", "-f", "raw", "-O", "qcow2"]);
    timed(convert.arg(&raw).arg(&path))?;
    fs::remove_file(raw)?;
    Ok(path)
}

fn storms(options: &Options, stage: &Stage<'_>, boot: &Boot) -> Result<Found> {
    let clones: Vec<_> =
        (1..=options.hosts).map(|host| stage.clones(host, options.guests)).collect::<Result<_>>()?;
    let mut found = Found::default();
    let forget = || (1..=options.hosts).try_for_each(|host| stage.forget(host));
    // Guests of the first hosts.
    let replica = |hosts: u8, guests: usize| -> Result<Storm> {
        let (mut served, mut sockets) = (Vec::new(), Vec::new());
        for host in 1..=hosts {
            let (server, more) = stage.serve(host, &clones[usize::from(host) - 1][..guests])?;
            served.push(server);
            sockets.extend(more);
        }
        stage.storm((served, sockets), boot, options.speed)
    };
    let plain = |guests: usize| -> Result<Storm> {
        let served = stage.serve_plain(1, guests)?;
        stage.storm(served.into_iter().unzip(), boot, options.speed)
    };
    for _ in 0..options.rounds {
        settle();
        let (server, sockets) = stage.serve_local()?;
        found.local.push(stage.storm((vec![server], sockets), boot, options.speed)?.time_s);
        found.plain_one.push(plain(1)?);
        found.plain.push(plain(options.guests)?);
        forget()?;
        found.one.push(replica(1, 1)?);
        forget()?;
        found.host.push(replica(1, options.guests)?);
        found.again.push(replica(1, options.guests)?);
        forget()?;
        found.hosts.push(replica(options.hosts, options.guests)?);
    }
    Ok(found)
}

fn rows(options: &Options, found: &Found, allocated: f64, report: &mut Report) {
    let times = |storms: &[Storm]| storms.iter().map(|storm| storm.time_s).collect::<Vec<_>>();
    // Of the host that had most.
    let most = |storm: &Storm| storm.bytes.iter().copied().fold(0.0, f64::max);
    let bytes = |storms: &[Storm]| storms.iter().map(most).collect::<Vec<_>>();
    let mib = |bytes: &[f64]| bytes.iter().map(|bytes| bytes / f64::from(1 << 20)).collect::<Vec<_>>();
    let (guests, all) = (options.guests, options.guests * usize::from(options.hosts));
    report.add(Row::median("boot, 1 guest on a local disk", "s", &found.local));
    for (what, storms, plain) in [
        ("1 guest".to_owned(), &found.one, Some(&found.plain_one)),
        (format!("{guests} guests of one host"), &found.host, Some(&found.plain)),
        (format!("{guests} guests of one host, again"), &found.again, Some(&found.plain)),
        (format!("{all} guests of {} hosts", options.hosts), &found.hosts, None),
    ] {
        let beside = |row: Row, value: &dyn Fn(&[Storm]) -> Vec<f64>| match plain {
            Some(plain) => row.beside(median(&value(plain))),
            None => row,
        };
        let time = Row::median(
            &format!("boot, {what}: the last is up / 1 on a local disk"),
            "",
            &ratios(&times(storms), &found.local),
        );
        report.add(beside(time.at_most(1.2), &|plain| ratios(&times(plain), &found.local)));
        let came = Row::median(&format!("boot, {what}: from the NAS to a host"), "MiB", &mib(&bytes(storms)));
        report.add(beside(came, &|plain| mib(&bytes(plain))));
        let shares: Vec<f64> = bytes(storms).iter().map(|bytes| bytes / allocated).collect();
        let share = Row::median(&format!("boot, {what}: from the NAS to a host / the base"), "", &shares);
        report.add(share.at_most(if what.ends_with("again") { 0.01 } else { 1.0 }));
    }
}

fn parameters(options: &Options, boot: &Boot) -> Vec<(String, String)> {
    let named = |name: &str, value: String| (name.to_owned(), value);
    vec![
        named("NAS", "nfs-ganesha, NFSv3, in memory; 1 Gbit/s to each host; mounted in user space".into()),
        named(
            "guest",
            format!(
                "Debian, booted once under software emulation; reads {} MiB; done again {} times as fast",
                boot.bytes() >> 20,
                options.speed
            ),
        ),
        named(
            "stock QEMU",
            "qcow2 on the NAS through QEMU's libnfs driver, without a cache; overlays on the host".into(),
        ),
        named("rounds", options.rounds.to_string()),
        named("all of it", "cargo xtask bench base".into()),
    ]
}
