//! `cargo xtask bench fresh`: a disk without any history, and what its first snapshots cost.
//!
//! ```text
//!   reads, overwrites, FUA   a full disk of one layer, served for writing, beside QEMU and a raw file
//!   first writes             an overlay on it, by both
//!   snapshots                one every few seconds under a guest that writes, and none
//!      └──► report (rows beside their bounds) ──► docs/measurements/fresh.json, docs/snapshots.md
//! ```
//!
//! Who is compared takes turns in one round; a ratio is taken from one round, and the median of the rounds is judged.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::os::unix::fs::{FileExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use rustix::fs::{SeekFrom, seek};
use rustix::io::Errno;

use super::client::{Client, Target};
use super::history::take::{Take as _, Vmstrata, timed};
use super::load::{Access, Load};
use super::machine::{by_turns, settle, touch_free_memory};
use super::report::{Report, Row};
use super::results::{median, ratios};
use super::server::{self, Disk, Kind, Server, vmstrata};
use super::shown::Shown;
use crate::chain::{self, Base, Plan, Spec};

/// Where the results are kept.
pub const SHOWN: Shown = Shown {
    file: "docs/measurements/fresh.json",
    summary: "docs/snapshots.md",
    page: "docs/measurements/fresh.md",
    mark: "bench:fresh",
};

const SEED: u64 = 20_261_127;
const CLUSTER: u64 = 64 << 10;
pub(super) const BLOCK: usize = 4 << 10;
/// Turns that each takes in a round.
pub(super) const TURNS: u64 = 6;
/// First writes by which the bytes of one are counted, and the disk they are spread over.
pub(super) const COUNTED: usize = 1000;
pub(super) const LARGE: u64 = 50 << 30;

/// What can be measured on its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Part {
    /// Reads and overwrites of a full disk.
    OneLayer,
    /// Of an overlay, by time.
    FirstWrites,
    /// Of an overlay, by bytes.
    Counted,
    /// A guest that writes, with snapshots and without.
    Snapshots,
}

impl Part {
    const ALL: [Self; 4] = [Self::OneLayer, Self::FirstWrites, Self::Counted, Self::Snapshots];
}

/// What the command line asks for.
#[derive(Clone, Debug)]
pub struct Options {
    /// Bytes of the disk.
    pub size: u64,
    /// Rounds.
    pub rounds: u32,
    /// Of each turn.
    pub turn: Duration,
    /// Between two snapshots.
    pub every: Duration,
    /// Snapshots in a round.
    pub snapshots: usize,
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
        let (turn, every) = (Duration::from_millis(250), Duration::from_secs(4));
        let parts = Part::ALL.to_vec();
        Self { size: 4 << 30, rounds: 5, turn, every, snapshots: 5, parts, dir, publish: None }
    }

    /// Everything once, small; its figures mean little.
    pub fn quick(dir: PathBuf) -> Self {
        let (turn, every) = (Duration::from_millis(50), Duration::from_millis(200));
        let parts = Part::ALL.to_vec();
        Self { size: 256 << 20, rounds: 1, turn, every, snapshots: 2, parts, dir, publish: None }
    }
}

/// Someone with a disk of its own, and a client.
pub(super) struct Side {
    pub(super) client: Client,
    /// The floor has none.
    pub(super) server: Option<Server>,
}

impl Side {
    pub(super) fn start(kind: Kind, path: &Path) -> Result<Self> {
        Self::start_with(kind, path, Vec::new())
    }

    /// With `flags` for the server.
    pub(super) fn start_with(kind: Kind, path: &Path, flags: Vec<String>) -> Result<Self> {
        if kind == Kind::Floor {
            let client = Client::connect(&Target::RawFile(path.to_owned()), SEED, false)?;
            return Ok(Self { client, server: None });
        }
        let disk = Disk { path: path.to_owned(), writable: true, backing: path.parent().map(Path::to_owned) };
        let mut server = Server::start_with(kind, &disk, flags)?;
        Ok(Self { client: server.connect(SEED, false)?, server: Some(server) })
    }

    pub(super) fn stop(self) -> Result<()> {
        drop(self.client);
        self.server.map_or(Ok(()), Server::stop)
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
    let dir = tempfile::Builder::new().prefix("fresh-").tempdir_in(&options.dir)?;
    let mut report = Report::new("qemu-storage-daemon", parameters(options));
    for part in &options.parts {
        match part {
            Part::OneLayer => one_layer(options, dir.path(), &mut report)?,
            Part::FirstWrites => first_writes(options, dir.path(), &mut report)?,
            Part::Counted => counted(dir.path(), &mut report)?,
            Part::Snapshots => snapshots(options, dir.path(), &mut report)?,
        }
    }
    SHOWN.publish(options.publish.as_deref(), &report)?;
    Ok(report)
}

/// What is done to a full disk, with the bounds over each peer, if there are any.
struct Work {
    what: &'static str,
    access: Access,
    fua: bool,
    depth: usize,
    floor: Option<f64>,
    qemu: Option<f64>,
}

const WORKS: [Work; 5] = {
    let read = Work {
        what: "random reads, QD32",
        access: Access::RandomRead,
        fua: false,
        depth: 32,
        floor: Some(1.3),
        qemu: None,
    };
    let write =
        Work { what: "overwrites, QD32", access: Access::RandomWrite { round: 0 }, floor: Some(1.0), ..read };
    [
        Work { what: "random reads, QD1", depth: 1, floor: None, qemu: Some(5.0), ..read },
        Work { what: "overwrites, each FUA, QD1", fua: true, depth: 1, floor: Some(0.85), ..write },
        Work { what: "overwrites, each FUA, QD16", fua: true, depth: 16, floor: Some(2.0), ..write },
        read,
        write,
    ]
};

/// Reads and overwrites of a disk all of whose clusters are there.
fn one_layer(options: &Options, dir: &Path, report: &mut Report) -> Result<()> {
    let kinds = [Kind::Vmstrata, Kind::Floor, Kind::Qemu];
    let images = kinds.iter().map(|&kind| full(options.size, kind, dir)).collect::<Result<Vec<_>>>()?;
    rustix::fs::sync();
    let sides = kinds.into_iter().zip(&images).map(|(kind, image)| Side::start(kind, image));
    let mut sides = sides.collect::<Result<Vec<_>>>()?;
    for Work { what, access, fua, depth, floor, qemu } in WORKS {
        let load = Load { access, fua, block: BLOCK, depth, time: options.turn, seed: 0 };
        let rates = compare(options.rounds, &mut sides, &load)?;
        let name = |what: &str| format!("4 KiB {what}");
        report.add(Row::median(&name(what), "IOPS", &rates[0]).beside(median(&rates[2])));
        for (peer, bound) in [(1, floor), (2, qemu)] {
            let ratios = ratios(&rates[0], &rates[peer]);
            let row =
                Row::median(&format!("{}: vmstrata / {}", name(what), kinds[peer].label()), "", &ratios);
            report.add(match bound {
                Some(bound) => row.at_least(bound),
                None => row,
            });
        }
    }
    sides.into_iter().try_for_each(Side::stop)
}

/// Requests a second of each side, by turns. `[side][round]`
pub(super) fn compare(rounds: u32, sides: &mut [Side], load: &Load) -> Result<Vec<Vec<f64>>> {
    settle();
    let mut rates = vec![Vec::new(); sides.len()];
    for round in 0..rounds {
        let mut turns = vec![Vec::new(); sides.len()];
        for turn in 0..=TURNS {
            let seed = u64::from(round) * (TURNS + 1) + turn;
            let mut order: Vec<usize> = (0..sides.len()).collect();
            by_turns(&mut order, turn as u32);
            for side in order {
                let rate = sides[side].client.run(&Load { seed, ..*load })?.iops();
                // The first turn warms up.
                turns[side].extend((turn > 0).then_some(rate));
            }
        }
        rates.iter_mut().zip(&turns).for_each(|(rates, turns)| rates.push(median(turns)));
    }
    Ok(rates)
}

/// An image all of whose clusters are there, in a directory of its own; a raw one for the floor.
pub(super) fn full(size: u64, kind: Kind, dir: &Path) -> Result<PathBuf> {
    let dir = dir.join(kind.label());
    let plan =
        Plan { layers: 1, size, cluster_size: CLUSTER, fill: 1.0, overlap: 0.0, compress: 0.0, seed: SEED };
    let base = if kind == Kind::Floor { Base::Raw } else { Base::Qcow2 };
    let manifest = chain::generate(&dir, &Spec { plan, base, backing_format: true, from_raw: None })?;
    Ok(manifest.top(&dir))
}

/// How `vmstrata create` makes the overlay of a snapshot.
pub(super) const AS_A_SNAPSHOT: [&str; 5] = ["create", "--subclusters", "--cluster-size", "128K", "-b"];

/// Who writes to overlays, and how the overlay is made.
const OVERLAYS: [(&str, Kind, &[&str]); 3] = [
    ("vmstrata", Kind::Vmstrata, &[]),
    ("QEMU", Kind::Qemu, &[]),
    ("QEMU, extended_l2=on", Kind::Qemu, &["-o", "extended_l2=on,cluster_size=128k"]),
];

/// First writes of an overlay on one layer: each alone, as they fill new memory.
fn first_writes(options: &Options, dir: &Path, report: &mut Report) -> Result<()> {
    let base = full(options.size, Kind::Qemu, &dir.join("below"))?;
    rustix::fs::sync();
    let mut rates: [Vec<f64>; 3] = Default::default();
    for round in 0..options.rounds {
        let mut order: Vec<_> = OVERLAYS.iter().zip(&mut rates).collect();
        by_turns(&mut order, round);
        for ((_, kind, flags), rates) in order {
            let path = base.with_file_name("overlay.qcow2");
            if *kind == Kind::Vmstrata {
                timed(Command::new(vmstrata()).args(AS_A_SNAPSHOT).arg(&base).arg(&path))?;
            } else {
                let mut create = Command::new("qemu-img");
                create.args(["create", "-q", "-f", "qcow2", "-F", "qcow2", "-b"]).arg(&base);
                timed(create.args(*flags).arg(&path))?;
            }
            touch_free_memory(2 << 30);
            let mut side = Side::start(*kind, &path)?;
            let access = Access::FirstWrite { round: round as u16 };
            let time = options.turn * 4;
            let load = Load { access, fua: false, block: BLOCK, depth: 32, time, seed: u64::from(round) };
            rates.push(side.client.run(&load)?.iops());
            side.stop()?;
            fs::remove_file(&path)?;
        }
    }
    let name = "4 KiB first writes after a snapshot, QD32";
    report.add(Row::median(name, "IOPS", &rates[0]).beside(median(&rates[1])));
    for (peer, bound) in [(1, 5.0), (2, 1.2)] {
        let ratios = ratios(&rates[0], &rates[peer]);
        let name = format!("{name}: vmstrata / {}", OVERLAYS[peer].0);
        report.add(Row::median(&name, "", &ratios).at_least(bound));
    }
    Ok(())
}

/// Bytes that go to the host for a first write, no flush between, with what freezing the layer writes.
fn counted(dir: &Path, report: &mut Report) -> Result<()> {
    let path = dir.join("counted.qcow2");
    timed(Command::new(vmstrata()).args(AS_A_SNAPSHOT).arg(sparse(dir, LARGE)?).arg(&path))?;
    let mut side = Side::start(Kind::Vmstrata, &path)?;
    let server = side.server.as_ref().context("a server")?;
    let (pid, control) = (server.id(), server.control());
    let mut take = Vmstrata { disk: path.clone(), control: control.clone() };
    // With it the base gets its index, which all snapshots share.
    take.take("first")?;
    wait_until_finalized(&control)?;
    let before = written_by(pid)?;
    let access = Access::Share { round: 0, count: COUNTED as u64 };
    let load = Load { access, fua: false, block: BLOCK, depth: 1, time: Duration::MAX, seed: 0 };
    side.client.run(&load)?;
    take.take("counted")?;
    wait_until_finalized(&control)?;
    let bytes = written_by(pid)? - before;
    let added = added_by(&backing_file(&path)?)?;
    report.add(
        Row::median(
            "bytes written to the host per 4 KiB first write",
            "KiB",
            &[bytes as f64 / COUNTED as f64 / 1024.0],
        )
        .at_most(10.0),
    );
    let name = "bytes that such a snapshot allocates, without data and L2 tables";
    report.add(Row::median(name, "KiB", &[added as f64 / 1024.0]).at_most(150.0));
    side.stop()
}

/// The file that an image lies on.
fn backing_file(path: &Path) -> Result<PathBuf> {
    let (out, _) = timed(Command::new("qemu-img").args(["info", "-U", "--output=json"]).arg(path))?;
    let info: serde_json::Value = serde_json::from_slice(&out)?;
    Ok(info["full-backing-filename"].as_str().context("no backing file")?.into())
}

/// Bytes that the host allocates for a layer, without those of its data clusters and L2 tables.
fn added_by(layer: &Path) -> Result<u64> {
    let file = File::open(layer)?;
    file.sync_all()?;
    let words = |at: u64, len: u64| -> Result<Vec<u64>> {
        let mut bytes = vec![0; len as usize];
        file.read_exact_at(&mut bytes, at)?;
        Ok(bytes.as_chunks().0.iter().map(|word| u64::from_be_bytes(*word)).collect())
    };
    // qcow2 "Header": cluster_bits at 20, l1_size at 36, l1_table_offset at 40, incompatible_features at 72; with bit 4 of those,
    // L2 entries have 16 bytes. Bits 9 to 55 of an entry say where its table or its data is.
    let header = words(0, 104)?;
    let low = |word: u64| word & 0xffff_ffff;
    let (cluster, entry) = (1 << low(header[2]), 1 + (header[9] >> 4 & 1) as usize);
    let places = |entries: Vec<u64>, step| {
        let places = entries.into_iter().step_by(step).map(|word| word & 0x00ff_ffff_ffff_fe00);
        places.filter(|at| *at != 0).collect::<BTreeSet<u64>>()
    };
    let mut clusters = places(words(header[5], low(header[4]) * 8)?, 1);
    for table in clusters.clone() {
        clusters.extend(places(words(table, cluster)?, entry));
    }
    let mut left = file.metadata()?.blocks() * 512;
    for at in clusters {
        left -= allocated(&file, at, at + cluster)?;
    }
    Ok(left)
}

/// Bytes of a range of a file that are no hole.
fn allocated(file: &File, mut at: u64, end: u64) -> Result<u64> {
    let mut bytes = 0;
    while at < end {
        let data = match seek(file, SeekFrom::Data(at)) {
            Err(Errno::NXIO) => break,
            found => found?.min(end),
        };
        at = seek(file, SeekFrom::Hole(data))?.min(end);
        bytes += at - data;
    }
    Ok(bytes)
}

/// An image of `size` bytes whose clusters are there, and read as zeros; its file is sparse.
pub(super) fn sparse(dir: &Path, size: u64) -> Result<PathBuf> {
    let path = dir.join("sparse.qcow2");
    let mut create = Command::new("qemu-img");
    create.args(["create", "-q", "-f", "qcow2", "-o", "preallocation=metadata"]);
    timed(create.arg(&path).arg(size.to_string()))?;
    Ok(path)
}

/// Waits until no snapshot lacks its index any more.
pub(super) fn wait_until_finalized(control: &Path) -> Result<()> {
    loop {
        let (out, _) = timed(Command::new(vmstrata()).args(["status", "--json", "--control"]).arg(control))?;
        let status: serde_json::Value = serde_json::from_slice(&out)?;
        let disks = status["disks"].as_array().context("no disks in the status")?;
        // It is said only where it is so.
        if !disks.iter().any(|disk| disk["finalizing"] == true) {
            return Ok(());
        }
        thread::sleep(Duration::from_millis(10));
    }
}

/// Bytes that a process has handed to the host in write calls.
fn written_by(pid: u32) -> Result<u64> {
    let io = fs::read_to_string(format!("/proc/{pid}/io"))?;
    let line = io.lines().find_map(|line| line.strip_prefix("wchar:")).context("bytes written")?;
    Ok(line.trim().parse()?)
}

/// A guest that writes at random all the time, with a snapshot every few seconds and without.
fn snapshots(options: &Options, dir: &Path, report: &mut Report) -> Result<()> {
    let (mut with, mut without, mut ratios, mut growth) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    for round in 0..options.rounds {
        let mut order = [true, false];
        by_turns(&mut order, round);
        let mut pair = [0.0; 2];
        for taken in order {
            let dir = tempfile::tempdir_in(dir)?;
            let path = full(options.size, Kind::Vmstrata, dir.path())?;
            rustix::fs::sync();
            settle();
            let mut side = Side::start(Kind::Vmstrata, &path)?;
            let control = side.server.as_ref().context("a server")?.control();
            let mut take = Vmstrata { disk: path.clone(), control };
            let before = blocks_in(&path)?;
            let (began, mut requests, mut distinct) = (Instant::now(), 0, 0);
            for number in 0..options.snapshots as u64 {
                let access = Access::RandomWrite { round: 0 };
                let seed = u64::from(round) << 8 | number;
                let load = Load { access, fua: false, block: BLOCK, depth: 8, time: options.every, seed };
                let outcome = thread::scope(|scope| -> Result<_> {
                    let snapshot = taken.then(|| scope.spawn(|| take.take(&format!("s{number}"))));
                    let outcome = side.client.run(&load)?;
                    snapshot.map(|thread| thread.join().expect("no panic")).transpose()?;
                    Ok(outcome)
                })?;
                requests += outcome.requests;
                distinct += outcome.written.iter().filter(|written| **written).count() * BLOCK;
            }
            let rate = requests as f64 / began.elapsed().as_secs_f64();
            side.stop()?;
            pair[usize::from(taken)] = rate;
            if taken {
                with.push(rate);
                growth.push((blocks_in(&path)? - before) as f64 / distinct as f64);
            } else {
                without.push(rate);
            }
        }
        ratios.push(pair[1] / pair[0]);
    }
    let name = |what: &str| {
        format!("4 KiB random writes, QD8, a snapshot every {} s{what}", options.every.as_secs_f64())
    };
    report.add(Row::median(&name(""), "IOPS", &with));
    report.add(Row::median("the same without snapshots", "IOPS", &without));
    report.add(Row::median(&name(" / without"), "", &ratios).at_least(0.8));
    report.add(Row::median("growth of the disk / bytes written in each layer", "", &growth).at_most(1.3));
    Ok(())
}

/// Bytes allocated in the directory of a file.
fn blocks_in(path: &Path) -> Result<u64> {
    let mut bytes = 0;
    for entry in fs::read_dir(path.parent().context("a directory")?)? {
        bytes += entry?.metadata()?.blocks() * 512;
    }
    Ok(bytes)
}

fn parameters(options: &Options) -> Vec<(String, String)> {
    let named = |name: &str, value: String| (name.to_owned(), value);
    vec![
        named("disk", format!("{} MiB, all of its 64 KiB clusters there, warm", options.size >> 20)),
        named("served for writing", "cache=host; QEMU: cache=writeback".into()),
        named(
            "rounds",
            format!("{}, of {TURNS} turns of {} ms each", options.rounds, options.turn.as_millis()),
        ),
        named("floor", "io_uring on a raw file through the page cache; FUA as RWF_DSYNC".into()),
        named("all of it", "cargo xtask bench fresh".into()),
    ]
}
