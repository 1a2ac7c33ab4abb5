//! Moves on real storage, while a client replays a trace: on this machine's disk, and from a NAS to it.
//!
//! ```text
//!   base (frozen, full, cold) ◄── overlay ──► vmstrata serve ◄── client: requests of the trace at their times, on other places each time it
//!      └──► vmstrata move ──► another directory                           begins again, as many as the move takes
//! ```
//!
//! Each turn begins with an empty overlay, a server of its own, and a base of which the host has nothing in memory. A round has a move of
//! each kind and then, without a move, as many requests as the longest one met: of these each move is compared with those that it met.

use std::fs;
use std::iter::zip;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use vmstrata_migrate::follow::Kind;
use vmstrata_types::{GuestOffset, GuestRange};

use super::super::cached::forget;
use super::super::client::Client;
use super::super::fresh::{AS_A_SNAPSHOT, full};
use super::super::history::take::timed;
use super::super::load::Request;
use super::super::machine::{by_turns, settle};
use super::super::mover::{Mover, beside};
use super::super::report::{Report, Row};
use super::super::results::quantile;
use super::super::server::{self, vmstrata};
use super::trace::{TRACES, Trace};
use super::{FACTOR, Options, Part, REAL, guest, mean};
use crate::chain::pattern::Writer;
use crate::nas::{self, Mount, Nas};

/// What a move is called, and more arguments of its command.
pub(super) type Way = (&'static str, &'static [&'static str]);
pub(super) const SEQUENTIAL: Way = ("sequential", &["--order", "sequential"]);
pub(super) const CONTROLLED: Way = ("with the controller", &["--latency", "1.5"]);
const WAYS: [Way; 4] =
    [SEQUENTIAL, ("nearest", &["--order", "nearest"]), ("predicted", &["--order", "predicted"]), CONTROLLED];
/// What the storage is busy with the guest alone, if it serves one request at a time.
const BUSY: f64 = 0.2;
/// So far from its place lies a request that comes again.
const SHIFT: u64 = (65 << 20) + (128 << 10);

/// Measures all parts but the model and, when asked to, writes what was found.
///
/// # Errors
/// When traces cannot be read, a server or a tool fails, or files cannot be written.
pub fn measure(options: &Options) -> Result<Report> {
    ensure!(vmstrata().exists(), "build vmstrata first: cargo build --release");
    server::raise_file_limit()?;
    fs::create_dir_all(&options.dir)?;
    let dir = tempfile::Builder::new().prefix("migrate-").tempdir_in(&options.dir)?;
    let dir = dir.path();
    let mut report = Report::new("qemu-system-x86_64", parameters(options));
    let parts: Vec<Part> = Part::ALL.into_iter().filter(|part| options.parts.contains(part)).collect();
    for part in &parts {
        match part {
            Part::Model => {}
            Part::Disk => {
                let place = Place::new(options.size, &dir.join("disk"), &dir.join("disk"), &dir.join("to"))?;
                beside_traces(options, "this machine's disk", &place, &mut report)?;
            }
            Part::Nas => {
                nas::check()?;
                let nas = Nas::start(1)?;
                let at = dir.join("nas");
                fs::create_dir(&at)?;
                let mount = Mount::new(&nas, 1, &at)?;
                let place = Place::new(options.size, &nas.export(), mount.dir(), &dir.join("to"))?;
                beside_traces(options, "from a NAS", &place, &mut report)?;
            }
            Part::Guest => guest::run(options, &dir.join("guest"), &mut report)?,
        }
    }
    let are_all = Part::ALL.iter().all(|part| *part == Part::Model || parts.contains(part));
    REAL.publish_parts(options.publish.as_deref(), &report, are_all)?;
    Ok(report)
}

fn parameters(options: &Options) -> Vec<(String, String)> {
    let mib = options.size >> 20;
    [
        ("disk", format!("a frozen layer of {mib} MiB, all of its clusters there, and an empty layer that takes the writes")),
        ("page cache", "cold: frozen layers are read through it, and it has nothing of them when a turn begins; what a move reads stays in it. Storage below may have caches of its own".into()),
        (
            "traces",
            format!(
                "{}: the first {} requests of each, on the stretches that they touch, packed; again until the move ends, each time elsewhere. A figure is their mean",
                TRACES[..options.replays].iter().map(|trace| trace.0).collect::<Vec<_>>().join(", "),
                options.replayed
            ),
        ),
        (
            "load",
            format!(
                "each trace is slowed or sped up until requests one after another would take {} % of its time; requests are sent at their times, however late answers are",
                BUSY * 100.0
            ),
        ),
        ("NAS", "nfs-ganesha, NFSv3, in memory; 1 Gbit/s; mounted in user space. The disk moves from it to this machine's disk".into()),
        ("controller", format!("--latency {FACTOR}, in the order that is the default")),
        ("guest", format!("SQLite, a row in each transaction, in a guest of one processor under software emulation; {} s without a move", options.turn.as_secs_f64())),
        ("rounds", options.rounds.to_string()),
        ("all of it", "cargo xtask bench migrate".into()),
    ]
    .map(|(name, value): (&str, String)| (name.to_owned(), value))
    .to_vec()
}

/// Where a disk lies, and where it moves to.
struct Place {
    /// The frozen layer.
    base: PathBuf,
    /// Of the active layer.
    dir: PathBuf,
    to: PathBuf,
}

impl Place {
    /// A frozen layer in `made`, which the server finds in `seen`; disks lie in `seen` as well.
    fn new(size: u64, made: &Path, seen: &Path, to: &Path) -> Result<Self> {
        let base = full(size, server::Kind::Vmstrata, made)?;
        Ok(Self { base: seen.join(base.strip_prefix(made)?), dir: seen.join("active"), to: to.to_owned() })
    }

    fn clear(&self) -> Result<()> {
        for dir in [&self.dir, &self.to] {
            if dir.exists() {
                fs::remove_dir_all(dir)?;
            }
        }
        Ok(())
    }

    /// Serves a new disk on the frozen layer, of which nothing is in memory.
    fn serve(&self) -> Result<(Mover, Client)> {
        self.clear()?;
        fs::create_dir(&self.dir)?;
        fs::create_dir(&self.to)?;
        let path = self.dir.join("disk.qcow2");
        timed(Command::new(vmstrata()).args(AS_A_SNAPSHOT).arg(&self.base).arg(&path))?;
        rustix::fs::sync();
        settle();
        forget(&self.base)?;
        let backing = self.base.parent().context("a directory")?.display().to_string();
        let mut mover = Mover::start(path, self.to.clone(), vec!["--allow-backing".to_owned(), backing])?;
        let client = mover.client()?;
        Ok((mover, client))
    }

    /// The trace at its load.
    fn loaded(&self, trace: &Trace) -> Result<Trace> {
        let (mover, mut client) = self.serve()?;
        let start = Instant::now();
        for Request { range, kind, .. } in &trace.requests {
            let (at, len) = (range.start.get(), range.len as usize);
            match kind {
                Kind::Read => drop(client.read(at, len)?),
                Kind::Write => client.write(at, len, Writer::client(0))?,
            }
        }
        let busy = start.elapsed().as_secs_f64();
        drop(client);
        mover.server.stop()?;
        Ok(trace.slower(busy / BUSY / trace.period.as_secs_f64()))
    }

    /// The guest's responses in ms during a move, and the move's MB/s.
    fn moving(&self, requests: impl Iterator<Item = Request>, how: &[&str]) -> Result<(Vec<f64>, f64)> {
        let (mut mover, mut client) = self.serve()?;
        let mut command = mover.command(None);
        command.args(how);
        let ((said, took), ms) = beside(&mut command, |runs| client.replay(requests, runs))?;
        let moved = mover.moved(&said)?;
        drop(client);
        mover.server.stop()?;
        Ok((ms, moved.copied_bytes as f64 / 1e6 / took.as_secs_f64()))
    }

    /// The guest's responses in ms without a move.
    fn without(&self, requests: impl Iterator<Item = Request>) -> Result<Vec<f64>> {
        let (mover, mut client) = self.serve()?;
        let ms = client.replay(requests, || true)?;
        drop(client);
        mover.server.stop()?;
        Ok(ms)
    }
}

/// The requests of a trace, again and again, each time elsewhere on a disk of `size` bytes.
fn requests(trace: &Trace, size: u64) -> impl Iterator<Item = Request> {
    (0..).map(move |number| {
        let (at, request) = trace.request(0, number);
        let (start, len) = (request.range.start.get(), request.range.len);
        let shifted = start + (number / trace.requests.len()) as u64 * SHIFT;
        let range = GuestRange::new(GuestOffset::new(shifted % (size - len + 512)), len);
        Request { at, range, ..request }
    })
}

fn beside_traces(options: &Options, name: &str, place: &Place, report: &mut Report) -> Result<()> {
    let mut traces = Vec::new();
    for (name, file) in &TRACES[..options.replays] {
        let limits = (options.replayed, options.size);
        traces.push(place.loaded(&Trace::read(name, &options.traces.join(file), limits)?)?);
    }
    // Means of the traces, `[round][way][figure]`; the last is without a move.
    let mut found = Vec::new();
    for round in 0..options.rounds {
        let mut means = [[0.0; 3]; WAYS.len() + 1];
        let mut add = |way: usize, figures: [f64; 3]| {
            zip(&mut means[way], figures).for_each(|(mean, figure)| *mean += figure / traces.len() as f64);
        };
        for trace in &traces {
            let mut turns: Vec<_> = WAYS.iter().enumerate().collect();
            by_turns(&mut turns, round);
            let mut moved = Vec::new();
            for (way, (_, how)) in turns {
                moved.push((way, place.moving(requests(trace, options.size), how)?));
            }
            let most = moved.iter().map(|(_, (ms, _))| ms.len()).max().context("a way")?;
            let without = place.without(requests(trace, options.size).take(most))?;
            for (way, (during, rate)) in moved {
                let without = &without[..during.len()];
                let p99 = quantile(&during, 0.99) / quantile(without, 0.99);
                add(way, [mean(&during) / mean(without), p99, rate]);
            }
            let rate = trace.requests.len() as f64 / trace.period.as_secs_f64();
            add(WAYS.len(), [mean(&without), quantile(&without, 0.99), rate]);
        }
        found.push(means);
    }
    place.clear()?;
    let row = |what: &str, unit: &str, (way, figure): (usize, usize)| {
        let values: Vec<f64> = found.iter().map(|means| means[way][figure]).collect();
        Row::median(&format!("{name}{what}"), unit, &values)
    };
    report.add(row(": guest's response without a move", "ms", (WAYS.len(), 0)));
    report.add(row(": guest's p99 without a move", "ms", (WAYS.len(), 1)));
    report.add(row(": guest's requests", "a second", (WAYS.len(), 2)));
    for (number, way) in WAYS.into_iter().enumerate() {
        let label = way.0;
        report.add(row(&format!(", {label}: guest's response during a move / without"), "", (number, 0)));
        let p99 = row(&format!(", {label}: guest's p99 during a move / without"), "", (number, 1));
        report.add(if way == CONTROLLED { p99.at_most(FACTOR) } else { p99 });
        report.add(row(&format!(", {label}: the move"), "MB/s", (number, 2)));
    }
    Ok(())
}
