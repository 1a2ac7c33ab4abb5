//! `cargo xtask bench rocksdb`: what a database in a guest feels of the disk's history.
//!
//! ```text
//!   ext4 with a database ──► spread over 1 layer and over 500: each block of 64 KiB lies in a layer drawn at random
//!   a copy of the newest layer ──► server ──► guest: db_bench, caches dropped before each workload ──► a rate each
//!      └──► report (rows beside their bounds) ──► docs/measurements/rocksdb.json, docs/snapshots.md
//! ```
//!
//! The guest runs under software emulation and has one processor: what its processor does is part of each figure, and makes
//! servers look more alike than they are. RocksDB checks the checksum of each block that it reads, and finds every key.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, ensure};

use super::machine::{by_turns, settle};
use super::report::{Report, Row};
use super::results::{median, ratios};
use super::server::{self, Disk, Kind, Server, vmstrata};
use super::shown::Shown;
use crate::guest::rocksdb::{self, Operations, WORKLOADS};
use crate::guest::{Attach, Guest, Task, Vm, spread};

/// Where the results are kept.
pub const SHOWN: Shown = Shown {
    file: "docs/measurements/rocksdb.json",
    summary: "docs/snapshots.md",
    page: "docs/measurements/rocksdb.md",
    mark: "bench:rocksdb",
};

/// Longest that the guest takes, from power-on to its end.
const RUN_MAX: Duration = Duration::from_secs(600);

/// What the command line asks for.
#[derive(Clone, Debug)]
pub struct Options {
    /// What the guest does.
    pub operations: Operations,
    /// Layers of the long chain.
    pub layers: u32,
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
        let operations = Operations { keys: 400_000, reads: 4_000, writes: 40_000 };
        Self { operations, layers: 500, rounds: 5, dir, publish: None }
    }

    /// Everything once, small; its figures mean little.
    pub fn quick(dir: PathBuf) -> Self {
        let operations = Operations { keys: 50_000, reads: 500, writes: 5_000 };
        Self { operations, layers: 500, rounds: 1, dir, publish: None }
    }
}

/// Runs the benchmark and, when asked to, writes its files.
///
/// # Errors
/// When a server, a tool or the guest fails, a key is not found, or files cannot be written.
pub fn run(options: &Options) -> Result<Report> {
    ensure!(vmstrata().exists(), "build vmstrata first: cargo build --release");
    server::raise_file_limit()?;
    fs::create_dir_all(&options.dir)?;
    let dir = tempfile::Builder::new().prefix("rocksdb-").tempdir_in(&options.dir)?;
    let guest = rocksdb::guest(dir.path())?;
    let raw = rocksdb::disk(&guest, dir.path(), options.operations.keys)?;
    let long = spread(&raw, &dir.path().join("long"), options.layers)?;
    let short = spread(&raw, &dir.path().join("short"), 1)?;
    fs::remove_file(raw)?;

    let sides = [(Kind::Vmstrata, &long), (Kind::Vmstrata, &short), (Kind::Qemu, &long)];
    // `[side][workload][round]`
    let mut rates = vec![vec![Vec::new(); WORKLOADS.len()]; sides.len()];
    for round in 0..options.rounds {
        let mut turns: Vec<_> = sides.iter().zip(&mut rates).collect();
        by_turns(&mut turns, round);
        for ((kind, disk), rates) in turns {
            let found = side(*kind, disk, &guest, options.operations)?;
            rates.iter_mut().zip(found).for_each(|(rates, rate)| rates.push(rate));
        }
    }

    let mut report = Report::new("qemu-storage-daemon", parameters(options));
    for (index, workload) in WORKLOADS.iter().enumerate() {
        let [long, short, qemu] = [0, 1, 2].map(|side: usize| &rates[side][index]);
        let name = format!("{workload}, {} layers", options.layers);
        let of_qemu = median(qemu);
        report.add(Row::median(&name, "ops/s", long).beside(of_qemu));
        report.add(Row::median(&format!("{workload}, 1 layer"), "ops/s", short));
        report.add(Row::median(&format!("{name} / 1 layer"), "", &ratios(long, short)).at_least(0.95));
        report.add(
            Row::median(&format!("{name}: vmstrata / stock QEMU"), "", &ratios(long, qemu)).at_least(10.0),
        );
    }
    SHOWN.publish(options.publish.as_deref(), &report)?;
    Ok(report)
}

/// The rate of each workload in a guest on a copy of `disk`.
fn side(kind: Kind, disk: &Path, guest: &Guest, operations: Operations) -> Result<Vec<f64>> {
    let path = disk.with_file_name("run.qcow2");
    fs::copy(disk, &path)?;
    // Or the guest's flushes would wait for the copy.
    rustix::fs::sync();
    settle();
    let mut server = Server::start(kind, &Disk { path: path.clone(), writable: true, backing: None })?;
    server.wait_for_vhost_user()?;
    let mut vm = Vm::boot(guest, &Attach::VhostUser(server.vhost_user()), Task::Rocksdb(operations))?;
    vm.wait_for_end(RUN_MAX).with_context(|| format!("{} serves {}", kind.label(), path.display()))?;
    server.stop()?;
    fs::remove_file(path)?;
    WORKLOADS.iter().map(|workload| rocksdb::rate(vm.console(), workload)).collect()
}

fn parameters(options: &Options) -> Vec<(String, String)> {
    let named = |name: &str, value: String| (name.to_owned(), value);
    let Operations { keys, reads, writes } = options.operations;
    vec![
        named("database", format!("{keys} keys with values of 1 KiB, not compressed, on ext4")),
        named(
            "chains",
            "clusters of 64 KiB, each in a layer drawn at random, a fifth with older data below".into(),
        ),
        named(
            "guest",
            "one processor, software emulation, 256 MiB; its cache is dropped before each workload".into(),
        ),
        named("readrandom", format!("{reads} reads")),
        named("readwhilewriting", format!("{reads} reads beside writes of 1 MiB/s")),
        named("fillrandom", format!("{writes} writes into a new database on the same disk")),
        named("served for writing", "vhost-user-blk; vmstrata: cache=host".into()),
        named("rounds", options.rounds.to_string()),
        named("all of it", "cargo xtask bench rocksdb".into()),
    ]
}
