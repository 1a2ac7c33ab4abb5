//! `cargo xtask bench fuse`: disks as files on loop devices, beside a raw file on one and QEMU's FUSE export.
//!
//! ```text
//!   raw file ───────────────────────────────────────────────► loop device ──┐
//!   the same bytes in layers ─┬─► vmstrata mount ─────────────► loop device ─┼► fio, in turns ─► report ─► docs/measurements/fuse.json
//!                             └─► qemu-storage-daemon, type=fuse ► loop device ─┘
//! ```
//!
//! With direct I/O, a raw file on a loop device is read from the host's disk, and a mounted disk from the page cache of its layers, which
//! their readers share; so all are also read through the page cache of the loop device. All files are read once before.

use std::fs::{self, File};
use std::io::{BufRead as _, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

use super::history::take::timed;
use super::machine::by_turns;
use super::report::{Report, Row};
use super::results::{median, ratios};
use super::server::vmstrata;
use super::shown::Shown;
use crate::chain::{self, Base, Plan, Spec};

/// Where the results are kept.
pub const SHOWN: Shown = Shown {
    file: "docs/measurements/fuse.json",
    summary: "docs/mount.md",
    page: "docs/measurements/fuse.md",
    mark: "bench:fuse",
};

const SEED: u64 = 20_261_201;
/// A mounted disk is to be at least so fast, as a part of a raw file.
const PART: f64 = 0.6;

/// What the command line asks for.
#[derive(Clone, Debug)]
pub struct Options {
    /// Bytes of the disk.
    pub size: u64,
    /// Layers of the disk.
    pub layers: u32,
    /// How long a load lasts.
    pub time: Duration,
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
        Self { size: 1 << 30, layers: 50, time: Duration::from_secs(3), rounds: 5, dir, publish: None }
    }

    /// Everything once, small; its figures mean little.
    pub fn quick(dir: PathBuf) -> Self {
        Self { size: 64 << 20, layers: 5, time: Duration::from_millis(500), rounds: 1, dir, publish: None }
    }
}

/// A load, and how the loop devices are made.
struct Load {
    name: &'static str,
    fio: &'static [&'static str],
    is_direct: bool,
    writes: bool,
    /// `None` for what is shown only.
    bound: Option<f64>,
}

const LOADS: [Load; 4] = [
    Load {
        name: "random reads, 4 KiB, QD16, direct I/O",
        fio: &["--rw=randread", "--bs=4k", "--iodepth=16"],
        is_direct: true,
        writes: false,
        bound: Some(PART),
    },
    Load {
        name: "random reads, 4 KiB, QD16, page cache",
        fio: &["--rw=randread", "--bs=4k", "--iodepth=16"],
        is_direct: false,
        writes: false,
        bound: Some(PART),
    },
    Load {
        name: "random reads of a disk mounted for writing, 4 KiB, QD16, direct I/O",
        fio: &["--rw=randread", "--bs=4k", "--iodepth=16"],
        is_direct: true,
        writes: true,
        bound: Some(PART),
    },
    Load {
        name: "random writes, 4 KiB, QD16, direct I/O",
        fio: &["--rw=randwrite", "--bs=4k", "--iodepth=16"],
        is_direct: true,
        writes: true,
        bound: None,
    },
];

/// Runs the benchmark and, when asked to, writes its files.
///
/// # Errors
/// When a tool fails, a byte is wrong, or files cannot be written.
pub fn run(options: &Options) -> Result<Report> {
    ensure!(vmstrata().exists(), "build vmstrata first: cargo build --release");
    fs::create_dir_all(&options.dir)?;
    let dir = tempfile::Builder::new().prefix("fuse-").tempdir_in(&options.dir)?;
    let mut report = Report::new("qemu-storage-daemon", parameters(options));
    let chain = dir.path().join("chain");
    let plan = Plan {
        layers: options.layers,
        size: options.size,
        cluster_size: 64 << 10,
        fill: 1.0,
        overlap: 0.1,
        compress: 0.0,
        seed: SEED,
    };
    let made =
        chain::generate(&chain, &Spec { plan, base: Base::Qcow2, backing_format: true, from_raw: None })?;
    let disk = chain.join(made.files.last().context("a layer")?);
    let files = Files { raw: dir.path().join("disk.raw"), disk, dir: dir.path() };
    timed(
        Command::new("qemu-img").args(["convert", "-O", "raw", "-S", "0"]).args([&files.disk, &files.raw]),
    )?;
    for load in &LOADS {
        measure(options, load, &files, &mut report)?;
    }
    SHOWN.publish(options.publish.as_deref(), &report)?;
    Ok(report)
}

/// The same bytes in two ways, and where more is made.
struct Files<'a> {
    raw: PathBuf,
    disk: PathBuf,
    dir: &'a Path,
}

impl Files<'_> {
    /// What one program serves: the disk, or an overlay of its own on it.
    fn disk_of(&self, program: &str, load: &Load) -> Result<PathBuf> {
        if !load.writes {
            return Ok(self.disk.clone());
        }
        let overlay = self.disk.with_file_name(format!("{program}.qcow2"));
        let mut create = Command::new("qemu-img");
        create.args(["create", "-q", "-f", "qcow2", "-F", "qcow2", "-b"]).args([&self.disk, &overlay]);
        timed(&mut create)?;
        Ok(overlay)
    }
}

fn measure(options: &Options, load: &Load, files: &Files<'_>, report: &mut Report) -> Result<()> {
    let places = ["own", "qemu"].map(|program| files.dir.join(format!("{program}.raw")));
    let [own, qemu] = [files.disk_of("own", load)?, files.disk_of("qemu", load)?];
    let exports = [
        Exported::by_vmstrata(&own, &places[0], load.writes)?,
        Exported::by_qemu(&qemu, &places[1], load.writes)?,
    ];
    for place in &places {
        timed(Command::new("cmp").args([place, &files.raw]))?;
    }
    let devices = [&places[0], &places[1], &files.raw].map(|file| LoopDevice::new(file, load)).into_iter();
    let devices = devices.collect::<Result<Vec<_>>>()?;
    let mut rates = [Vec::new(), Vec::new(), Vec::new()];
    for round in 0..options.rounds {
        let mut all: Vec<_> = devices.iter().zip(&mut rates).collect();
        by_turns(&mut all, round);
        for (device, rates) in all {
            rustix::fs::sync();
            rates.push(fio(&device.0, load, options.time)?);
        }
    }
    drop(devices);
    for (export, place) in exports.into_iter().zip(&places) {
        export.end(place)?;
    }
    let (name, [own, qemu, raw]) = (load.name, rates);
    report.add(Row::median(&format!("raw file: {name}"), "1/s", &raw));
    report.add(Row::median(name, "1/s", &own).beside(median(&qemu)));
    let part = Row::median(&format!("{name}: of the raw file's"), "", &ratios(&own, &raw));
    let part = part.beside(median(&ratios(&qemu, &raw)));
    report.add(load.bound.map_or(part.clone(), |bound| part.at_least(bound)));
    Ok(())
}

/// Requests a second.
fn fio(device: &str, load: &Load, time: Duration) -> Result<f64> {
    let mut fio = Command::new("fio");
    fio.args(["--name=load", "--ioengine=libaio", "--direct=1", "--time_based", "--output-format=json"]);
    fio.args(load.fio).arg(format!("--filename={device}")).arg(format!("--runtime={}ms", time.as_millis()));
    let result: Value = serde_json::from_slice(&timed(&mut fio)?.0)?;
    let job = &result["jobs"][0];
    ensure!(job["error"] == 0, "fio met error {}", job["error"]);
    let rate = |kind: &str| job[kind]["iops"].as_f64().unwrap_or_default();
    Ok(rate("read") + rate("write"))
}

/// A program that shows a disk as a file.
struct Exported {
    child: Child,
    /// Whether it ends when the file is unmounted.
    ends: bool,
}

impl Exported {
    fn by_vmstrata(disk: &Path, place: &Path, writes: bool) -> Result<Self> {
        let mut command = Command::new(vmstrata());
        command.arg("mount").args([disk, place]).args(writes.then_some("--write"));
        let mut child = command.stdout(Stdio::piped()).spawn().context("vmstrata mount")?;
        let mut line = String::new();
        BufReader::new(child.stdout.as_mut().context("its output")?).read_line(&mut line)?;
        ensure!(!line.is_empty(), "vmstrata mount: {}", child.wait()?);
        Ok(Self { child, ends: true })
    }

    fn by_qemu(disk: &Path, place: &Path, writes: bool) -> Result<Self> {
        File::create(place)?;
        let [disk, place_text] = [disk, place].map(|path| path.display().to_string().replace(',', ",,"));
        let writable = if writes { "on" } else { "off" };
        let mut command = Command::new("qemu-storage-daemon");
        command.arg("--blockdev").arg(format!(
            "driver=qcow2,node-name=disk,read-only={},discard=unmap,file.driver=file,file.filename={disk}",
            if writes { "off" } else { "on" }
        ));
        command
            .arg("--export")
            .arg(format!("type=fuse,id=fuse,node-name=disk,mountpoint={place_text},writable={writable}"));
        let mut child = command.stdout(Stdio::null()).spawn().context("qemu-storage-daemon")?;
        while place.metadata()?.len() == 0 {
            ensure!(child.try_wait()?.is_none(), "qemu-storage-daemon has ended");
            thread::sleep(Duration::from_millis(10));
        }
        Ok(Self { child, ends: false })
    }

    fn end(mut self, place: &Path) -> Result<()> {
        if self.ends {
            timed(Command::new("umount").arg(place))?;
            let status = self.child.wait()?;
            ensure!(status.success(), "vmstrata mount: {status}");
            return Ok(());
        }
        let pid = Pid::from_child(&self.child);
        kill_process(pid, Signal::TERM)?;
        self.child.wait()?;
        Ok(fs::remove_file(place)?)
    }
}

impl Drop for Exported {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A file as a block device.
struct LoopDevice(String);

impl LoopDevice {
    fn new(file: &Path, load: &Load) -> Result<Self> {
        let mut losetup = Command::new("losetup");
        losetup
            .args(["--find", "--show"])
            .arg(format!("--direct-io={}", if load.is_direct { "on" } else { "off" }));
        let (name, _) = timed(losetup.args((!load.writes).then_some("--read-only")).arg(file))?;
        Ok(Self(String::from_utf8(name)?.trim().to_owned()))
    }
}

impl Drop for LoopDevice {
    fn drop(&mut self) {
        let _ = Command::new("losetup").args(["--detach", &self.0]).status();
    }
}

fn parameters(options: &Options) -> Vec<(String, String)> {
    let named = |name: &str, value: String| (name.to_owned(), value);
    vec![
        named("disk", format!("{} MiB, all of it data, in {} layers", options.size >> 20, options.layers)),
        named("raw file", "the same bytes, on a loop device of the same kind".into()),
        named("stock QEMU", "qemu-storage-daemon --export type=fuse, of the same layers".into()),
        named("mounted for writing", "an empty overlay on those layers".into()),
        named(
            "load",
            format!("fio --ioengine=libaio --direct=1 on the loop devices, {} s", options.time.as_secs()),
        ),
        named("direct I/O, page cache", "losetup --direct-io=on, off".into()),
        named("rounds", options.rounds.to_string()),
        named("all of it", "cargo xtask bench fuse".into()),
    ]
}
