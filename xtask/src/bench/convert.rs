//! `cargo xtask bench convert`: disks converted, beside `qemu-img convert`.
//!
//! ```text
//!   files of this host, as many as fit ─► a raw disk, half of it a hole ──► a qcow2 image, plain and compressed
//!   a long chain ────────────────────────────────────────────────────────► a raw disk
//!      └──► report (rows beside their bounds) ──► docs/measurements/convert.json, docs/convert.md
//! ```
//!
//! Sources lie in the page cache. Both take turns in a round, and nothing is dirty when a turn begins; each target is compared with its source
//! by stock tools.

use std::fs::{self, File};
use std::io::{self, Read as _, Write as _};
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};

use super::history::take::timed;
use super::machine::by_turns;
use super::report::{Report, Row};
use super::results::{median, ratios};
use super::server::vmstrata;
use super::shown::Shown;
use crate::chain::{self, Base, Plan, Spec};

/// Where the results are kept.
pub const SHOWN: Shown = Shown {
    file: "docs/measurements/convert.json",
    summary: "docs/convert.md",
    page: "docs/measurements/convert.md",
    mark: "bench:convert",
};

/// Where the raw disk's bytes come from.
const FILES: &str = "/usr";
/// Files begin at a block of a file system.
const BLOCK: u64 = 4096;
const SEED: u64 = 20_261_130;

/// What the command line asks for.
#[derive(Clone, Debug)]
pub struct Options {
    /// Bytes of data on the disks.
    pub data: u64,
    /// Layers of the chain.
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
        Self { data: 2 << 30, layers: 500, rounds: 5, dir, publish: None }
    }

    /// Everything once, small; its figures mean little.
    pub fn quick(dir: PathBuf) -> Self {
        Self { data: 64 << 20, layers: 20, rounds: 1, dir, publish: None }
    }
}

/// One conversion, by both.
struct Task<'a> {
    name: String,
    source: &'a Path,
    format: &'a str,
    own: &'a [&'a str],
    qemu: &'a [&'a str],
    /// How many times as fast we are to be.
    bound: f64,
}

/// Runs the benchmark and, when asked to, writes its files.
///
/// # Errors
/// When a tool fails, a byte is wrong, or files cannot be written.
pub fn run(options: &Options) -> Result<Report> {
    ensure!(vmstrata().exists(), "build vmstrata first: cargo build --release");
    fs::create_dir_all(&options.dir)?;
    let dir = tempfile::Builder::new().prefix("convert-").tempdir_in(&options.dir)?;
    let mut report = Report::new("qemu-img", parameters(options));
    let raw = dir.path().join("disk.raw");
    fill(&raw, options.data)?;
    let chain = dir.path().join("chain");
    let plan = Plan {
        layers: options.layers,
        size: options.data,
        cluster_size: 64 << 10,
        fill: 0.5,
        overlap: 0.1,
        compress: 0.0,
        seed: SEED,
    };
    let made =
        chain::generate(&chain, &Spec { plan, base: Base::Qcow2, backing_format: true, from_raw: None })?;
    let top = chain.join(made.files.last().context("a layer")?);
    let tasks = [
        Task {
            name: "raw to qcow2".into(),
            source: &raw,
            format: "raw",
            own: &["--to", "qcow2"],
            qemu: &["-O", "qcow2"],
            bound: 1.5,
        },
        Task {
            name: "raw to qcow2, zstd".into(),
            source: &raw,
            format: "raw",
            own: &["--to", "qcow2", "--compress", "zstd"],
            qemu: &["-O", "qcow2", "-c", "-o", "compression_type=zstd"],
            bound: 1.0,
        },
        Task {
            name: format!("{} layers to raw", options.layers),
            source: &top,
            format: "qcow2",
            own: &["--to", "raw"],
            qemu: &["-O", "raw"],
            bound: 20.0,
        },
    ];
    for task in &tasks {
        measure(options, task, dir.path(), &mut report)?;
    }
    SHOWN.publish(options.publish.as_deref(), &report)?;
    Ok(report)
}

fn measure(options: &Options, task: &Task<'_>, dir: &Path, report: &mut Report) -> Result<()> {
    let targets = ["own", "qemu"].map(|name| dir.join(name));
    let mut own = Command::new(vmstrata());
    own.args(["convert", "--quiet", "--no-sync", "--from", task.format]).args(task.own);
    own.arg(task.source).arg(&targets[0]);
    let mut qemu = Command::new("qemu-img");
    qemu.args(["convert", "-m", "16", "-W", "-f", task.format]).args(task.qemu);
    qemu.arg(task.source).arg(&targets[1]);
    let (mut seconds, mut bytes) = ([Vec::new(), Vec::new()], [0.0; 2]);
    for round in 0..options.rounds {
        let [own_seconds, qemu_seconds] = &mut seconds;
        let mut both = [(&mut own, 0, own_seconds), (&mut qemu, 1, qemu_seconds)];
        by_turns(&mut both, round);
        for (command, number, seconds) in both {
            let target = &targets[number];
            if target.exists() {
                fs::remove_file(target)?;
            }
            rustix::fs::sync();
            seconds.push(timed(command)?.1.as_secs_f64());
            rustix::fs::sync();
            bytes[number] = (target.metadata()?.blocks() * 512) as f64;
        }
    }
    for target in &targets {
        let format = if task.own[1] == "raw" { "raw" } else { "qcow2" };
        let mut compare = Command::new("qemu-img");
        compare.args(["compare", "-q", "-f", task.format, "-F", format]).args([task.source, target]);
        timed(&mut compare).with_context(|| format!("{}: {}", task.name, target.display()))?;
        fs::remove_file(target)?;
    }
    let name = &task.name;
    let times = ratios(&seconds[1], &seconds[0]);
    let qemu = median(&seconds[1]);
    report.add(Row::median(&format!("{name}: time"), "s", &seconds[0]).beside(qemu));
    report.add(Row::median(&format!("{name}: times as fast as qemu-img"), "", &times).at_least(task.bound));
    report.add(
        Row::median(&format!("{name}: space taken / qemu-img's"), "", &[bytes[0] / bytes[1]]).at_most(1.02),
    );
    Ok(())
}

/// Makes a raw disk of twice so many bytes: files of this host, one after the other, and a hole behind them.
fn fill(path: &Path, data: u64) -> Result<()> {
    let mut to = io::BufWriter::new(File::create_new(path)?);
    let (mut filled, mut rest) = (0, vec![PathBuf::from(FILES)]);
    while filled < data
        && let Some(next) = rest.pop()
    {
        let found = next.symlink_metadata()?;
        if found.is_dir() {
            let mut inside =
                fs::read_dir(&next)?.map(|entry| Ok(entry?.path())).collect::<io::Result<Vec<_>>>()?;
            inside.sort();
            rest.append(&mut inside);
        } else if found.is_file() {
            let copied = io::copy(&mut File::open(&next)?.take(data - filled), &mut to)?;
            let padding = copied.next_multiple_of(BLOCK) - copied;
            to.write_all(&vec![0; padding as usize])?;
            filled += copied + padding;
        }
    }
    ensure!(filled >= data, "{FILES} has only {filled} bytes: ask for fewer");
    to.into_inner()?.set_len(2 * data)?;
    Ok(())
}

fn parameters(options: &Options) -> Vec<(String, String)> {
    let named = |name: &str, value: String| (name.to_owned(), value);
    let mib = options.data >> 20;
    vec![
        named("raw disk", format!("{mib} MiB of files below {FILES}, and as much of a hole")),
        named("chain", format!("{mib} MiB, half of it written, clusters of 64 KiB spread over the layers")),
        named("vmstrata", "convert --no-sync".into()),
        named("qemu-img", "convert -m 16 -W".into()),
        named("sources", "in the page cache; targets not flushed, by either".into()),
        named("rounds", options.rounds.to_string()),
        named("all of it", "cargo xtask bench convert".into()),
    ]
}
