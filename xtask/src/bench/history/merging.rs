//! What a guest feels while snapshots are deleted from the middle of its disk's history.
//!
//! ```text
//!   a round:   write ─► snapshot a ─► write ─► snapshot b ─► snapshot kept        (half of `merged` each)
//!   guest:     ├── as long without ──┤├── a and b are deleted ──┤                 reads everything, writes its own part
//! ```
//!
//! vmstrata pulls what a and b hold up into the layer of the snapshot kept above them, at its default speed limit; stock
//! QEMU's block-commit pushes it down, at its own default, which is none. Afterwards every block is where it was.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde_json::json;

use super::super::client::Client;
use super::super::qmp::Qmp;
use super::super::report::{Report, Row};
use super::super::results::median;
use super::super::server::{Disk, Kind, Server, vmstrata};
use super::guest::Guest;
use super::take::{self, Take, timed};
use super::{BLOCK, Options, SEED, disk};
use crate::chain::pattern::Writer;

/// Written at once when a layer is filled.
const FILL: usize = 1 << 20;
/// How often QEMU is asked whether its job has ended.
const LOOK_EVERY: Duration = Duration::from_millis(20);
/// The longest that a merge takes.
const MERGE_MAX: Duration = Duration::from_secs(300);
/// The share of requests that keep the latency that is looked at.
const PART: f64 = 0.99;

/// Someone who takes snapshots, and deletes them.
trait Merge {
    /// Takes one.
    fn take(&mut self, name: &str) -> Result<()>;
    /// Deletes both snapshots of a round, and returns when that is done.
    fn delete(&mut self, round: u32) -> Result<()>;
}

/// What a guest felt: one value a round.
struct Felt {
    /// 99 of 100 requests were done within, ms, while nothing was merged.
    without: Vec<f64>,
    /// The same during merges.
    during: Vec<f64>,
    /// Bytes copied a second, roughly.
    speeds: Vec<f64>,
}

/// Adds the rows of both.
///
/// # Errors
/// When a server fails, or a block is wrong afterwards.
pub(super) fn measure(options: &Options, dir: &Path, report: &mut Report) -> Result<()> {
    let ours = of_server(Kind::Vmstrata, options, dir, |server, path| {
        let take = take::Vmstrata { disk: path, control: server.control() };
        Ok(Box::new(Ours(take)))
    })?;
    let qemu = of_server(Kind::Qemu, options, dir, |server, path| {
        let qmp = Qmp::connect(&server.control())?;
        let active = ("disk".to_owned(), path);
        let take = take::Qemu { qmp, dir: dir.to_owned(), active, size: size(options) };
        Ok(Box::new(Stock { take, frozen: Vec::new() }))
    })?;
    let add = |report: &mut Report, row: Row, qemu: &[f64]| report.add(row.beside(median(qemu)));
    let without = "4 KiB requests of a guest, p99: while nothing is merged";
    add(report, Row::median(without, "ms", &ours.without), &qemu.without);
    let during = "4 KiB requests of a guest, p99: while snapshots are deleted from the middle";
    add(report, Row::median(during, "ms", &ours.during), &qemu.during);
    add(report, Row::median("speed of that merge", "MiB/s", &ours.speeds), &qemu.speeds);
    let ratio = Row::median("p99 while merging / without", "", &ours.ratios()).at_most(1.5);
    add(report, ratio, &qemu.ratios());
    Ok(())
}

impl Felt {
    fn ratios(&self) -> Vec<f64> {
        self.during.iter().zip(&self.without).map(|(during, without)| during / without).collect()
    }
}

fn size(options: &Options) -> u64 {
    let all = options.working_set + u64::from(options.rounds) * options.merged;
    all.next_multiple_of(1 << 30)
}

fn of_server(
    kind: Kind,
    options: &Options,
    dir: &Path,
    merger: impl FnOnce(&Server, PathBuf) -> Result<Box<dyn Merge>>,
) -> Result<Felt> {
    let path = dir.join(format!("{}.qcow2", kind.label()));
    disk::create(&path, size(options))?;
    let mut server = Server::start(kind, &Disk { path: path.clone(), writable: true, backing: None })?;
    let mut client = server.connect(SEED, false)?;
    let mut merge = merger(&server, path)?;
    // The disk as it was made is not part of what is merged.
    merge.take("base")?;
    for round in 0..options.rounds {
        for (half, name) in ["a", "b"].iter().enumerate() {
            fill(&mut client, part(options, round, half), round)?;
            merge.take(&format!("{name}{round}"))?;
        }
        merge.take(&format!("kept{round}"))?;
    }
    let (mut client, felt) = rounds(client, options, &mut *merge, dir)?;
    for round in 0..options.rounds {
        (0..2).try_for_each(|half| check(&mut client, part(options, round, half), round))?;
    }
    drop((client, merge));
    server.stop()?;
    Ok(felt)
}

/// The guest at work, and every round's merge under it.
fn rounds(client: Client, options: &Options, merge: &mut dyn Merge, dir: &Path) -> Result<(Client, Felt)> {
    let guest = Guest::start_mixed(client, size(options), options.working_set);
    // By then each cluster that the guest writes is its disk's own.
    std::thread::sleep(options.pace.second * 2);
    let mut windows = Vec::new();
    for round in 0..options.rounds {
        let _memory = options.pace.memory(dir, 2 * options.merged as usize)?;
        let rest = guest.now();
        std::thread::sleep(options.pace.second * 3);
        let from = guest.now();
        merge.delete(round)?;
        windows.push((rest, from, guest.now()));
        std::thread::sleep(options.pace.second);
    }
    let (client, trace) = guest.stop()?;
    let p99 = |from, to| -> Result<f64> {
        Ok(trace.percentile(PART, from, to).context("the guest stood still")?.as_secs_f64() * 1000.0)
    };
    let mut felt = Felt { without: Vec::new(), during: Vec::new(), speeds: Vec::new() };
    for (rest, from, to) in windows {
        felt.without.push(p99(rest, from)?);
        felt.during.push(p99(from, to)?);
        felt.speeds.push(options.merged as f64 / f64::from(1 << 20) / (to - from).as_secs_f64());
    }
    Ok((client, felt))
}

/// Where a layer's data goes, behind what the guest writes to.
fn part(options: &Options, round: u32, half: usize) -> std::ops::Range<u64> {
    let len = options.merged / 2;
    let start = options.working_set + (u64::from(round) * 2 + half as u64) * len;
    start..start + len
}

/// Who wrote it.
fn writer(round: u32) -> Writer {
    Writer::client(round as u16 + 1)
}

fn fill(client: &mut Client, range: std::ops::Range<u64>, round: u32) -> Result<()> {
    range.step_by(FILL).try_for_each(|at| client.write(at, FILL, writer(round)))
}

fn check(client: &mut Client, range: std::ops::Range<u64>, round: u32) -> Result<()> {
    let mut blocks = range.step_by(FILL / 4);
    blocks.try_for_each(|at| client.check(at, BLOCK, &|_| Some(writer(round))))
}

/// `vmstrata snapshot delete`.
struct Ours(take::Vmstrata);

impl Merge for Ours {
    fn take(&mut self, name: &str) -> Result<()> {
        self.0.take(name).map(drop)
    }

    fn delete(&mut self, round: u32) -> Result<()> {
        let mut delete = Command::new(vmstrata());
        delete.args(["snapshot", "delete", "--control"]).arg(&self.0.control).arg(&self.0.disk);
        timed(delete.args([format!("a{round}"), format!("b{round}")])).map(drop)
    }
}

/// `block-commit`.
struct Stock {
    take: take::Qemu,
    /// What QEMU calls the layers, base first.
    frozen: Vec<String>,
}

impl Merge for Stock {
    fn take(&mut self, name: &str) -> Result<()> {
        self.frozen.push(self.take.active.0.clone());
        self.take.take(name).map(drop)
    }

    fn delete(&mut self, round: u32) -> Result<()> {
        // Three layers a round, over the base: what those of a and b hold goes into the one below.
        let node = |place: usize| self.frozen.get(place).cloned().context("a layer of that round");
        let below = round as usize * 3;
        let (base, top) = (node(below)?, node(below + 2)?);
        let job =
            json!({"job-id": "merge", "device": self.take.active.0, "top-node": top, "base-node": base});
        self.take.qmp.execute("block-commit", &job)?;
        let start = std::time::Instant::now();
        while self
            .take
            .qmp
            .execute("query-block-jobs", &json!({}))?
            .as_array()
            .is_some_and(|jobs| !jobs.is_empty())
        {
            ensure!(start.elapsed() < MERGE_MAX, "block-commit does not end");
            std::thread::sleep(LOOK_EVERY);
        }
        Ok(())
    }
}
