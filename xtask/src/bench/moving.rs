//! `cargo xtask bench move`: a disk in use moves to another directory, beside stock QEMU's `blockdev-mirror` at the same rate.
//!
//! ```text
//!   guest      random reads and writes without a move, and during one: by vmstrata, and by QEMU in both copy modes
//!   idle       nobody uses the disk: how fast it moves, beside `cp` and a flush
//!   busy       a guest writes as fast as it can: what is sent, and for how long writes are held
//!   estimate   what a job says of its end once a fifth is done, beside when it ends; a guest writes meanwhile
//!   flat       a guest writes as fast as it can, and the disk goes to stock qemu-nbd
//!   history    a disk of many snapshots, beside one without of the same bytes
//!      └──► report (rows beside their bounds) ──► docs/measurements/move.json, docs/move.md
//! ```
//!
//! Who is compared takes turns in one round; a ratio is taken from one round, and the median of the rounds is judged.

use std::fs::{self, File};
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use serde::Deserialize;
use serde_json::json;

use super::client::Client;
use super::fresh::{BLOCK, Side, full};
use super::history::take::timed;
use super::load::{Access, Load};
use super::machine::settle;
use super::mover::{Moved, Mover, beside};
use super::qmp::Qmp;
use super::report::{Report, Row};
use super::results::median;
use super::server::{self, Kind, vmstrata};
use super::shown::Shown;
use crate::answer::wait_for_answer;
use crate::chain::{self, Base, Plan, Spec};

/// Where the results are kept.
pub const SHOWN: Shown = Shown {
    file: "docs/measurements/move.json",
    summary: "docs/move.md",
    page: "docs/measurements/move.md",
    mark: "bench:move",
};

const SEED: u64 = 20_261_129;
/// QEMU's copy modes.
const MODES: [&str; 2] = ["background", "write-blocking"];
/// Requests of the guest at a time.
const DEPTH: usize = 8;

/// What can be measured on its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Part {
    /// Random writes of a guest during a move, and QEMU's mirror beside it.
    Guest,
    /// An idle disk, beside `cp`.
    Idle,
    /// A guest that writes as fast as it can.
    Busy,
    /// What a job says of its end.
    Estimate,
    /// The same guest, and stock qemu-nbd as the target.
    Flat,
    /// A disk of many snapshots.
    History,
}

impl Part {
    const ALL: [Self; 6] = [Self::Guest, Self::Idle, Self::Busy, Self::Estimate, Self::Flat, Self::History];
}

/// What the command line asks for.
#[derive(Clone, Debug)]
pub struct Options {
    /// Bytes of the disks.
    pub size: u64,
    /// Snapshots of the disk with a history.
    pub snapshots: u32,
    /// Bytes a second that are copied beside a guest.
    pub rate: u64,
    /// Of each turn of a guest.
    pub turn: Duration,
    /// Rounds.
    pub rounds: u32,
    /// What is measured.
    pub parts: Vec<Part>,
    /// Where files are made, and removed at the end.
    pub dir: PathBuf,
    /// Root of the repository, to write results into; `None` prints only.
    pub publish: Option<PathBuf>,
}

impl Options {
    /// The benchmark of the bounds.
    pub fn full(dir: PathBuf) -> Self {
        let (turn, rate) = (Duration::from_secs(5), 100 << 20);
        Self {
            size: 1 << 30,
            snapshots: 1000,
            rate,
            turn,
            rounds: 5,
            parts: Part::ALL.to_vec(),
            dir,
            publish: None,
        }
    }

    /// Everything once, small; its figures mean little.
    pub fn quick(dir: PathBuf) -> Self {
        let (turn, rate) = (Duration::from_millis(200), 100 << 20);
        Self {
            size: 64 << 20,
            snapshots: 20,
            rate,
            turn,
            rounds: 1,
            parts: Part::ALL.to_vec(),
            dir,
            publish: None,
        }
    }
}

/// Runs the benchmark and, when asked to, writes its files.
///
/// # Errors
/// When a server or a tool fails, or files cannot be written.
pub fn run(options: &Options) -> Result<Report> {
    ensure!(vmstrata().exists(), "build vmstrata first: cargo build --release");
    server::raise_file_limit()?;
    fs::create_dir_all(&options.dir)?;
    let dir = tempfile::Builder::new().prefix("move-").tempdir_in(&options.dir)?;
    let mut report = Report::new("qemu-storage-daemon", parameters(options));
    for part in &options.parts {
        let run = match part {
            Part::Guest => beside_a_guest,
            Part::Idle => idle,
            Part::Busy => busy,
            Part::Estimate => estimated,
            Part::Flat => flat,
            Part::History => history,
        };
        run(options, dir.path(), &mut report)?;
    }
    SHOWN.publish_parts(options.publish.as_deref(), &report, options.parts == Part::ALL)?;
    Ok(report)
}

fn parameters(options: &Options) -> Vec<(String, String)> {
    let named = |name: &str, value: String| (name.to_owned(), value);
    vec![
        named("disk", format!("{} MiB, all of its clusters there", options.size >> 20)),
        named("copied beside a guest", format!("{} MiB a second at most", options.rate >> 20)),
        named("rounds", format!("{}, of turns of {} s", options.rounds, options.turn.as_secs_f64())),
        named("all of it", "cargo xtask bench move".into()),
    ]
}

/// What a guest does: requests a second, and the time in ms that 99 of 100 do not exceed.
fn works(client: &mut Client, seed: u64, time: Duration) -> Result<(f64, f64)> {
    let access = Access::RandomWrite { round: 0 };
    client.run_timed(&Load { access, fua: false, block: BLOCK, depth: DEPTH, time, seed })
}

/// Of rounds: during a move / without.
#[derive(Default)]
struct Slowed {
    rates: Vec<f64>,
    p99: Vec<f64>,
}

impl Slowed {
    fn add(&mut self, (rate, p99): (f64, f64), (rate_without, p99_without): (f64, f64)) {
        self.rates.push(rate / rate_without);
        self.p99.push(p99 / p99_without);
    }
}

fn beside_a_guest(options: &Options, dir: &Path, report: &mut Report) -> Result<()> {
    let mut own = Mover::new(full(options.size, Kind::Vmstrata, &dir.join("own"))?)?;
    let mut client = own.client()?;
    let image = full(options.size, Kind::Qemu, &dir.join("peer"))?;
    let mut peer = Side::start(Kind::Qemu, &image)?;
    let (mut slowed, mut mirrored) = (Slowed::default(), <[Slowed; 2]>::default());
    for round in 0..options.rounds {
        let seed = |turn: u64| u64::from(round) * 8 + turn;
        settle();
        let without = works(&mut client, seed(0), options.turn)?;
        let mut command = own.command(Some(options.rate));
        let ((said, _), during) = beside(&mut command, |_| works(&mut client, seed(1), options.turn))?;
        slowed.add(during, without);
        own.moved(&said)?;
        for (turn, (mode, mirrored)) in MODES.iter().zip(&mut mirrored).enumerate() {
            settle();
            let without = works(&mut peer.client, seed(2 + 2 * turn as u64), options.turn)?;
            let target = Mirror::start(&peer, &image, mode, (options.size, options.rate))?;
            let during = works(&mut peer.client, seed(3 + 2 * turn as u64), options.turn)?;
            target.end()?;
            mirrored.add(during, without);
        }
    }
    let name = "guest, 4 KiB random writes, QD8: during a move / without";
    report.add(Row::median(name, "", &slowed.rates).at_least(0.9).beside(median(&mirrored[0].rates)));
    let name = "guest's p99: during a move / without";
    report.add(Row::median(name, "", &slowed.p99).at_most(2.0).beside(median(&mirrored[0].p99)));
    let blocking = &mirrored[1];
    report.add(Row::median("QEMU, copy-mode=write-blocking: during / without", "", &blocking.rates));
    report.add(Row::median("QEMU, copy-mode=write-blocking: p99, during / without", "", &blocking.p99));
    peer.stop()?;
    drop(client);
    own.server.stop()
}

/// A mirror job of stock QEMU.
struct Mirror {
    qmp: Qmp,
    target: PathBuf,
}

impl Mirror {
    fn start(peer: &Side, image: &Path, mode: &str, (size, rate): (u64, u64)) -> Result<Self> {
        let target = image.with_file_name("mirror.qcow2");
        let mut create = Command::new("qemu-img");
        timed(create.args(["create", "-q", "-f", "qcow2"]).arg(&target).arg(size.to_string()))?;
        let mut qmp = Qmp::connect(&peer.server.as_ref().context("a server")?.control())?;
        let file = json!({ "driver": "file", "filename": target });
        qmp.execute("blockdev-add", &json!({ "driver": "qcow2", "node-name": "target", "file": file }))?;
        let job = json!({
            "job-id": "mirror", "device": "disk", "target": "target", "sync": "full", "speed": rate, "copy-mode": mode
        });
        qmp.execute("blockdev-mirror", &job)?;
        Ok(Self { qmp, target })
    }

    /// Gives it up.
    fn end(mut self) -> Result<()> {
        self.qmp.execute("block-job-cancel", &json!({ "device": "mirror", "force": true }))?;
        let start = Instant::now();
        while self.qmp.execute("blockdev-del", &json!({ "node-name": "target" })).is_err() {
            ensure!(start.elapsed() < Duration::from_secs(30), "QEMU's mirror does not end");
            thread::sleep(Duration::from_millis(20));
        }
        Ok(fs::remove_file(&self.target)?)
    }
}

/// Bytes that the files of a directory take.
fn allocated(dir: &Path) -> Result<u64> {
    let blocks = fs::read_dir(dir)?.map(|entry| Ok(entry?.metadata()?.blocks()));
    Ok(blocks.sum::<Result<u64>>()? * 512)
}

fn idle(options: &Options, dir: &Path, report: &mut Report) -> Result<()> {
    let mut own = Mover::new(full(options.size, Kind::Vmstrata, &dir.join("idle"))?)?;
    let (mut rates, mut sent) = (Vec::new(), Vec::new());
    for _ in 0..options.rounds {
        let bytes = allocated(own.path.parent().context("a directory")?)?;
        settle();
        let (said, took) = timed(&mut own.command(None))?;
        let moved = own.moved(&said)?;
        settle();
        let copy = dir.join("copy");
        let start = Instant::now();
        timed(Command::new("cp").arg("--sparse=always").arg(&own.path).arg(&copy))?;
        File::open(&copy)?.sync_all()?;
        rates.push(start.elapsed().as_secs_f64() / took.as_secs_f64());
        fs::remove_file(&copy)?;
        sent.push(moved.copied_bytes as f64 / bytes as f64);
    }
    report.add(Row::median("rate of an idle disk's move / cp and a flush", "", &rates).at_least(0.9));
    report.add(Row::median("bytes sent / allocated", "", &sent).at_most(1.02));
    own.server.stop()
}

/// Runs a command while a guest works, again and again; each time with another seed. Returns what it printed, and the time that it took.
fn under_work(
    command: &mut Command,
    client: &mut Client,
    round: u32,
    mut work: impl FnMut(&mut Client, u64) -> Result<()>,
) -> Result<(Vec<u8>, Duration)> {
    let (said, ()) = beside(command, |runs| {
        let mut seed = u64::from(round) << 32;
        while runs() {
            work(client, seed)?;
            seed += 1;
        }
        Ok(())
    })?;
    Ok(said)
}

fn busy(options: &Options, dir: &Path, report: &mut Report) -> Result<()> {
    let mut own = Mover::new(full(options.size, Kind::Vmstrata, &dir.join("busy"))?)?;
    let mut client = own.client()?;
    let (mut sent, mut times) = (Vec::new(), Vec::new());
    for round in 0..options.rounds {
        let bytes = allocated(own.path.parent().context("a directory")?)?;
        settle();
        let mut command = own.command(None);
        let work = |client: &mut Client, seed| works(client, seed, options.turn / 10).map(drop);
        let (said, took) = under_work(&mut command, &mut client, round, work)?;
        let moved = own.moved(&said)?;
        sent.push(moved.copied_bytes as f64 / bytes as f64);
        times.push(took.as_secs_f64());
    }
    let pauses = own.pauses("writes go there from now on")?;
    report.add(Row::median("a guest that writes as fast as it can: time of the move", "s", &times));
    // What it held, and what was written meanwhile: at most all of the disk once more.
    report.add(Row::median("the same: bytes sent / allocated when it began", "", &sent).at_most(2.1));
    report.add(Row::median("writes held at the switch", "ms", &pauses).at_most(10.0));
    drop(client);
    own.server.stop()
}

/// A job, as `vmstrata job list --json` shows it.
#[derive(Debug, Deserialize)]
struct Job {
    state: String,
    done: u64,
    total: u64,
    seconds_left: Option<u64>,
}

#[derive(Debug, Deserialize)]
struct Jobs {
    jobs: Vec<Job>,
}

/// When the job of a server ends, as it says, in seconds from now; once a fifth of it is done.
fn foreseen(control: &Path) -> Result<Option<f64>> {
    let mut list = Command::new(vmstrata());
    list.args(["job", "list", "--json"]).env("VMSTRATA_CONTROL", control);
    let jobs: Jobs = serde_json::from_slice(&timed(&mut list)?.0).context("what the command says")?;
    let running = jobs.jobs.into_iter().find(|job| job.state == "running" && job.done * 5 >= job.total);
    Ok(running.and_then(|job| job.seconds_left).map(|seconds| seconds as f64))
}

fn estimated(options: &Options, dir: &Path, report: &mut Report) -> Result<()> {
    let mut own = Mover::new(full(options.size, Kind::Vmstrata, &dir.join("estimate"))?)?;
    let mut client = own.client()?;
    let mut off = Vec::new();
    for round in 0..options.rounds {
        settle();
        // It is said in whole seconds.
        let mut command = own.command(Some(options.rate / 2));
        let control = own.server.control();
        let (began, mut end) = (Instant::now(), None);
        let work = |client: &mut Client, seed| {
            let (access, time) = (Access::RandomWrite { round: 0 }, Duration::from_millis(100));
            client.run_timed(&Load { access, fua: true, block: BLOCK, depth: 1, time, seed })?;
            if end.is_none() {
                end = foreseen(&control)?.map(|left| began.elapsed().as_secs_f64() + left);
            }
            Ok(())
        };
        let (said, took) = under_work(&mut command, &mut client, round, work)?;
        own.moved(&said)?;
        let end = end.context("the job was over before a fifth of it was seen")?;
        off.push((end / took.as_secs_f64() - 1.0).abs());
    }
    let name = "estimate of the time a move takes, once a fifth is done: off by";
    report.add(Row::median(name, "", &off).at_most(0.15));
    drop(client);
    own.server.stop()
}

fn flat(options: &Options, dir: &Path, report: &mut Report) -> Result<()> {
    let (mut times, mut sent, mut pauses) = (Vec::new(), Vec::new(), Vec::new());
    for round in 0..options.rounds {
        let dir = dir.join(format!("flat{round}"));
        let mut own = Mover::new(full(options.size, Kind::Vmstrata, &dir)?)?;
        let mut client = own.client()?;
        let target = Target::start(&dir, options.size)?;
        own.to = format!("nbd+unix:///?socket={}", target.socket.display()).into();
        settle();
        let mut command = own.command(None);
        command.arg("--yes");
        let work = |client: &mut Client, seed| works(client, seed, options.turn / 10).map(drop);
        let (said, took) = under_work(&mut command, &mut client, round, work)?;
        let moved: Moved = serde_json::from_slice(&said).context("what the command says")?;
        times.push(took.as_secs_f64());
        sent.push(moved.copied_bytes as f64 / options.size as f64);
        pauses.extend(own.pauses("moved to a flat copy")?);
        drop(client);
        own.server.stop()?;
        drop(target);
        fs::remove_dir_all(&dir)?;
    }
    report.add(Row::median(
        "to qemu-nbd, a guest that writes as fast as it can: time of the move",
        "s",
        &times,
    ));
    report.add(Row::median("the same: bytes sent / bytes of the disk", "", &sent));
    report.add(Row::median("the same: writes held at the switch", "ms", &pauses).at_most(10.0));
    Ok(())
}

/// A stock NBD server of an empty raw file.
struct Target {
    child: Child,
    socket: PathBuf,
}

impl Target {
    fn start(dir: &Path, size: u64) -> Result<Self> {
        let (file, socket) = (dir.join("target.raw"), dir.join("target.sock"));
        File::create(&file)?.set_len(size)?;
        let mut command = Command::new("qemu-nbd");
        let child = command.args(["-t", "-f", "raw", "-k"]).arg(&socket).arg(&file).spawn()?;
        let mut target = Self { child, socket };
        let listens = || {
            ensure!(target.socket.exists(), "no socket yet");
            Ok(())
        };
        wait_for_answer(&mut target.child, "qemu-nbd", Duration::from_secs(30), String::new, listens)?;
        Ok(target)
    }
}

impl Drop for Target {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn history(options: &Options, dir: &Path, report: &mut Report) -> Result<()> {
    let chain = |layers: u32, name: &str| -> Result<Mover> {
        let plan = Plan {
            layers,
            size: options.size,
            cluster_size: 64 << 10,
            fill: 0.9,
            overlap: 0.0,
            compress: 0.0,
            seed: SEED,
        };
        let dir = dir.join(name);
        let spec = Spec { plan, base: Base::Qcow2, backing_format: true, from_raw: None };
        Mover::new(chain::generate(&dir, &spec)?.top(&dir))
    };
    let (mut long, mut flat) = (chain(options.snapshots, "long")?, chain(1, "flat")?);
    let mut ratios = Vec::new();
    for _ in 0..options.rounds {
        let mut times = [0.0; 2];
        for (mover, time) in [&mut long, &mut flat].into_iter().zip(&mut times) {
            settle();
            let (said, took) = timed(&mut mover.command(None))?;
            mover.moved(&said)?;
            *time = took.as_secs_f64();
        }
        ratios.push(times[0] / times[1]);
    }
    let name = format!("time of {} layers / one layer of the same bytes", options.snapshots);
    report.add(Row::median(&name, "", &ratios).at_most(1.1));
    let top = long.path.clone();
    long.server.stop()?;
    flat.server.stop()?;
    let check = Command::new("qemu-img").args(["check", "-q"]).arg(&top).status()?;
    ensure!(check.success(), "{}: {check}", top.display());
    Ok(())
}
