//! One server, from start to end, with everything that is measured on it.
//!
//! Order inside a session: open, then vhost-user runs, then a check of the data, then NBD (`nbdcopy` reads
//! everything), then memory. Nothing is checked inside a timed run. The first round checks the whole disk; later
//! ones, and QEMU on a long chain, draw positions at random until the time box ends.

use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};

use super::client::{Client, Target};
use super::load::{Access, Load, Outcome};
use super::results::Figure;
use super::server::{Disk, Kind, Server};
use crate::chain::Manifest;
use crate::chain::pattern::Writer;

/// What one session yields.
pub type Values = Vec<(Figure, f64)>;

/// How long the parts of a session take.
#[derive(Clone, Copy, Debug)]
pub struct Timing {
    /// Each timed run.
    pub run: Duration,
    /// Before each timed run, unmeasured.
    pub warm_up: Duration,
    /// Checking data where the whole disk would take too long.
    pub check: Duration,
    /// Whether to check the whole disk, where that does not take too long.
    pub whole: bool,
}

/// A chain and what its clusters hold.
pub struct Chain<'a> {
    /// Directory of the layers.
    pub dir: &'a Path,
    /// How it was made.
    pub manifest: &'a Manifest,
    /// The owner of each cluster.
    pub owners: &'a [Option<u16>],
}

impl Chain<'_> {
    fn seed(&self) -> u64 {
        self.manifest.plan.seed
    }

    /// Whose data lies at a guest offset of the unchanged disk.
    pub(super) fn writer(&self, at: u64) -> Option<Writer> {
        self.owners[(at / self.manifest.plan.cluster_size) as usize].map(Writer::layer)
    }

    /// The disk as a read-only session opens it.
    pub fn read_only(&self) -> Disk {
        Disk { path: self.manifest.top(self.dir), writable: false, backing: None }
    }
}

const READS: [(Figure, Access, usize, usize); 3] = [
    (Figure::RandomRead32, Access::RandomRead, 4 << 10, 32),
    (Figure::RandomRead1, Access::RandomRead, 4 << 10, 1),
    (Figure::Sequential, Access::SequentialRead, 1 << 20, 4),
];

/// Reads a chain through `kind`: the figures of `wanted` that reading yields.
///
/// # Errors
/// When the server fails, or serves a wrong byte.
pub fn read(kind: Kind, chain: &Chain<'_>, wanted: &[Figure], timing: Timing) -> Result<Values> {
    let slow = is_slow(kind, chain);
    let wants = |figure| wanted.contains(&figure);
    let start = Instant::now();
    let mut server = Server::start(kind, &chain.read_only())?;
    let mut client = server.connect(chain.seed(), true)?;
    client.check(0, 4096, &|at| chain.writer(at))?;
    let mut values = vec![(Figure::Open, start.elapsed().as_secs_f64())];
    values.extend(read_runs(&mut client, wanted, timing)?);
    if wants(Figure::Memory) {
        client
            .verify(timing.check, timing.whole && !slow, &|at| chain.writer(at))
            .context("data read through vhost-user")?;
    }
    drop(client);
    if wants(Figure::NbdRandomRead16) || wants(Figure::NbdCopy) {
        server.wait_for_nbd()?;
    }
    if wants(Figure::NbdRandomRead16) {
        values.push((Figure::NbdRandomRead16, fio(&server.nbd_uri(), chain.manifest.plan.size, timing.run)?));
    }
    if wants(Figure::NbdCopy) && !slow {
        values.push((Figure::NbdCopy, nbdcopy(&server.nbd_uri())?));
    }
    if wants(Figure::Memory) {
        values.push((Figure::Memory, server.resident_bytes()? as f64 / f64::from(1 << 20)));
    }
    server.stop()?;
    values.retain(|(figure, _)| wants(*figure));
    Ok(values)
}

/// Whether a pass over the whole disk would take minutes.
fn is_slow(kind: Kind, chain: &Chain<'_>) -> bool {
    kind == Kind::Qemu && chain.manifest.plan.layers > 100
}

/// The floor: the same reads of a raw file without any server.
///
/// # Errors
/// When the file cannot be read.
pub fn floor(raw: &Path, wanted: &[Figure], timing: Timing) -> Result<Values> {
    let mut client = Client::connect(&Target::RawFile(raw.to_owned()), 0, true)?;
    read_runs(&mut client, wanted, timing)
}

/// The figures of `wanted` that a vhost-user client or the floor's file yields by reading.
///
/// # Errors
/// When a request fails.
pub fn read_runs(client: &mut Client, wanted: &[Figure], timing: Timing) -> Result<Values> {
    let mut values = Vec::new();
    for (figure, access, block, depth) in READS.into_iter().filter(|(figure, ..)| wanted.contains(figure)) {
        let load = Load { access, block, depth, time: timing.warm_up, seed: 1 };
        client.run(&load)?;
        let outcome = client.run(&Load { time: timing.run, seed: 2, ..load })?;
        let per_request = if figure == Figure::Sequential { block as f64 / f64::from(1 << 20) } else { 1.0 };
        values.push((figure, outcome.iops() * per_request));
    }
    Ok(values)
}

/// Writes to `disk`, which reads as `chain` and belongs to this session alone, then checks every byte
/// through the same server, and the file with `qemu-img check` after the server has ended.
///
/// # Errors
/// When the server fails, a byte is wrong, or the file is left unclean.
pub fn write(kind: Kind, disk: &Disk, access: Access, chain: &Chain<'_>, timing: Timing) -> Result<f64> {
    let mut server = Server::start(kind, disk)?;
    let mut client = server.connect(chain.seed(), false)?;
    let rate = write_run(&mut client, access, chain, timing, timing.whole && !is_slow(kind, chain))?;
    drop(client);
    server.stop()?;
    let check = Command::new("qemu-img").args(["check", "-q"]).arg(&disk.path).output()?;
    ensure!(
        check.status.success(),
        "qemu-img check after {}: {}",
        kind.label(),
        String::from_utf8_lossy(&check.stdout)
    );
    Ok(rate)
}

/// The floor of writing: random overwrites of a raw file that holds `chain`'s data, checked afterwards.
///
/// # Errors
/// When the file cannot be written or a byte is wrong.
pub fn floor_write(raw: &Path, access: Access, chain: &Chain<'_>, timing: Timing) -> Result<f64> {
    let mut client = Client::connect(&Target::RawFile(raw.to_owned()), chain.seed(), false)?;
    write_run(&mut client, access, chain, timing, timing.whole)
}

fn write_run(
    client: &mut Client,
    access: Access,
    chain: &Chain<'_>,
    timing: Timing,
    whole: bool,
) -> Result<f64> {
    let (Access::RandomWrite { round } | Access::FirstWrite { round }) = access else {
        panic!("reads are measured by read()")
    };
    let load = Load { access, block: 4 << 10, depth: 32, time: timing.run, seed: 3 };
    let outcome = client.run(&load)?;
    client.flush()?;
    let expected = |at: u64| expected_after(&outcome, round, chain, at);
    client.verify(timing.check, whole, &expected).context("data read back after the writes")?;
    Ok(outcome.iops())
}

fn expected_after(outcome: &Outcome, round: u16, chain: &Chain<'_>, at: u64) -> Option<Writer> {
    let written = outcome.written.get((at / 4096) as usize).copied().unwrap_or(false);
    if written { Some(Writer::client(round)) } else { chain.writer(at) }
}

/// 4 KiB random reads at queue depth 16 over one NBD connection, by fio's libnbd engine; requests per second.
fn fio(uri: &str, size: u64, time: Duration) -> Result<f64> {
    let out = tempfile::NamedTempFile::new()?;
    let run = Command::new("fio")
        .args(["--name=nbd", "--ioengine=nbd", "--rw=randread", "--bs=4k", "--iodepth=16", "--time_based"])
        .arg(format!("--uri={uri}"))
        .arg(format!("--size={size}"))
        .arg(format!("--runtime={}ms", time.as_millis()))
        .arg("--output-format=json")
        .arg(format!("--output={}", out.path().display()))
        .output()
        .context("fio does not start")?;
    ensure!(run.status.success(), "fio: {}", String::from_utf8_lossy(&run.stderr));
    let report: serde_json::Value = serde_json::from_slice(&std::fs::read(out.path())?)?;
    let job = &report["jobs"][0];
    ensure!(job["error"] == 0, "fio met error {}", job["error"]);
    job["read"]["iops"].as_f64().context("fio reports no IOPS")
}

/// Seconds that `nbdcopy` takes from the server to nowhere.
fn nbdcopy(uri: &str) -> Result<f64> {
    let start = Instant::now();
    let copy = Command::new("nbdcopy").args([uri, "null:"]).output().context("nbdcopy does not start")?;
    ensure!(copy.status.success(), "nbdcopy: {}", String::from_utf8_lossy(&copy.stderr));
    Ok(start.elapsed().as_secs_f64())
}
