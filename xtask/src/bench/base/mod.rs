//! `cargo xtask bench base`: guests that boot from one base on a NAS, beside the same base on a local disk and stock QEMU on the NAS.
//!
//! ```text
//!   boot     a real guest boots once on a local disk; its reads are noted
//!   storm    one client, five of one host, twenty-five of five hosts do the same reads at once: time, bytes from the NAS; and again
//!   s3       one does them on a disk that a far object store has, with the list of what earlier starts read and without
//!   upgrade  the guests of one host write what the base's next version has, too: bytes to the NAS
//!   swap     a guest with little memory swaps: through vmstrata, to a local file, to the NAS
//!   responses    guests boot, write and read, as one did in stock QEMU: how often one waits long for its disk
//!      └──► report (rows beside their bounds) ──► docs/measurements/base.json, docs/bases.md
//! ```
//!
//! The NAS is a real server ([`crate::nas`]), mounted in user space ([`crate::nas::Mount`]); `vmstrata serve` is as users run it. A
//! round has each storm once, one after the other; a ratio is taken from one round, and the median of the rounds is judged.

mod boot;
mod far;
mod responses;
mod stage;
mod storm;
mod swap;
mod upgrade;
mod work;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Result, ensure};

use super::history::take::timed;
use super::report::Report;
use super::server::{self, vmstrata};
use super::shown::Shown;
use crate::guest::swap::Swapping;
use crate::guest::{Guest, RootImage};
use crate::nas::{self, StoreKind};
use boot::Boot;
use stage::Stage;
use work::Work;

/// Where the results are kept.
pub const SHOWN: Shown = Shown {
    file: "docs/measurements/base.json",
    summary: "docs/bases.md",
    page: "docs/measurements/base.md",
    mark: "bench:base",
};

/// What can be measured on its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Part {
    /// Guests that boot at once.
    Storm,
    /// A guest that boots from an object store.
    S3,
    /// Guests that apply the same upgrade.
    Upgrade,
    /// A guest that swaps.
    Swap,
    /// How often guests wait long.
    Responses,
}

impl Part {
    const ALL: [Self; 5] = [Self::Storm, Self::S3, Self::Upgrade, Self::Swap, Self::Responses];
}

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
    /// The object store.
    pub store: StoreKind,
    /// What a request to the object store and its answer take on their way.
    pub far: Duration,
    /// Whether a host notes for the others what a guest reads at its start, which takes two minutes.
    pub notes_start: bool,
    /// What the guest does that swaps.
    pub swapping: Swapping,
    /// Trees of files that the guest writes and reads whose waits are looked at.
    pub work: u32,
    /// Guests that wait begin so far apart, on average.
    pub apart: Duration,
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
        Self {
            image: RootImage { size: 2 << 30, files: 32, file_size: 4 << 20 },
            hosts: 5,
            guests: 5,
            speed: 1,
            store: StoreKind::Versitygw,
            far: Duration::from_millis(20),
            notes_start: true,
            swapping: Swapping { memory_mib: 256, mib: 384, rounds: 2 },
            work: 6,
            apart: Duration::from_millis(500),
            rounds: 5,
            parts: Part::ALL.to_vec(),
            dir,
            publish: None,
        }
    }

    /// Everything once, small; its figures mean little.
    pub fn quick(dir: PathBuf) -> Self {
        Self {
            image: RootImage { size: 256 << 20, files: 4, file_size: 1 << 20 },
            hosts: 2,
            guests: 2,
            speed: 20,
            store: StoreKind::Moto,
            far: Duration::from_millis(5),
            notes_start: false,
            swapping: Swapping { memory_mib: 96, mib: 80, rounds: 0 },
            work: 1,
            apart: Duration::from_millis(20),
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
    nas::check()?;
    server::raise_file_limit()?;
    fs::create_dir_all(&options.dir)?;
    let dir = tempfile::Builder::new().prefix("base-").tempdir_in(&options.dir)?;
    let guest = Guest::here()?;
    let local = local_base(options, &guest, dir.path())?;
    let boot = Boot::record(&guest, &local, dir.path())?;
    let mut report = Report::new("qemu-storage-daemon", parameters(options, &boot));
    for part in &options.parts {
        // Each with a NAS that has nothing else to do.
        let dir = tempfile::tempdir_in(dir.path())?;
        let stage = |hosts: u8| Stage::new(hosts, dir.path(), &local);
        match part {
            Part::Storm => storm::run(options, &stage(options.hosts)?, &boot, &mut report)?,
            Part::S3 => far::run(options, &stage(1)?, &boot, &mut report)?,
            Part::Upgrade => upgrade::run(options, &stage(2)?, &mut report)?,
            Part::Swap => swap::run(options, &stage(1)?, &mut report)?,
            Part::Responses => {
                let work = Work::record(&guest, &local, options.work, dir.path())?;
                responses::run(options, &stage(options.hosts)?, &work, &mut report)?;
            }
        }
    }
    SHOWN.publish_parts(options.publish.as_deref(), &report, options.parts == Part::ALL)?;
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
        named(
            "object store",
            format!(
                "{}, S3; behind the same wire, and {} ms",
                options.store.label(),
                options.far.as_millis()
            ),
        ),
        named(
            "swap",
            format!(
                "{} MiB of data in {} MiB of memory; written, read {} times",
                options.swapping.mib,
                options.swapping.memory_mib,
                options.swapping.rounds + 2
            ),
        ),
        named(
            "waits",
            format!("{} trees of files; guests begin {} ms apart", options.work, options.apart.as_millis()),
        ),
        named("rounds", options.rounds.to_string()),
        named("all of it", "cargo xtask bench base".into()),
    ]
}
