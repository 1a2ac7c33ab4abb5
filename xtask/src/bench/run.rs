//! The whole benchmark: chains, groups, rounds, and the files it leaves.
//!
//! For each chain length there is a group of rounds. One round runs, in turn, QEMU on the chain, vmstrata on
//! the chain, vmstrata on one layer (the reference of length ratios), and the floor. Files of a group are
//! read once before, so that all of it is in the page cache: a 4 GiB disk needs about 12 GiB of free memory.

use std::collections::HashSet;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::time::Instant;

use anyhow::{Result, ensure};

use super::floor;
use super::load::Access;
use super::machine::touch_free_memory;
use super::prepared::{self, Prepared};
use super::results::{Figure, Results, Sample};
use super::server::{self, Disk, Kind};
use super::session::{self, Chain, Timing, Values};
use super::{describe, publish, table};
use crate::chain::{self, Backing, Base, Manifest, Plan, Shape, Spec, image};

/// What the command line asks for.
#[derive(Clone, Debug)]
pub struct Options {
    /// Chain lengths, ascending; 1 is always measured as the reference.
    pub layers: Vec<u32>,
    /// Rounds in each group.
    pub rounds: u32,
    /// Bytes of the disk.
    pub size: u64,
    /// Length of the parts.
    pub timing: Timing,
    /// Where chains are kept from run to run.
    pub dir: PathBuf,
    /// Root of the repository, to write results into; `None` prints only.
    pub publish: Option<PathBuf>,
    /// Servers that take part.
    pub servers: Vec<Kind>,
    /// Also boot a guest on the shortest and the longest chain.
    pub boot: bool,
}

const SEED: u64 = 20_260_101;
pub(super) const FILL: f64 = 0.9;
pub(super) const CLUSTER: u64 = 64 << 10;
/// QEMU on more layers than this opens in seconds and answers in milliseconds; few rounds tell all.
const QEMU_SLOW_LAYERS: u32 = 100;
/// The group of guest boots, whose chains hold a guest's disk.
const BOOTS: u32 = 0;
/// Size of the fully allocated image for overwrites.
const OVERWRITE_SIZE: u64 = 1 << 30;
/// Memory touched before a run that fills new pages of the page cache: many times what it can fill, for the kernel gives out
/// what was touched last only after what lies in small pieces.
const WRITTEN_MEMORY: usize = 9 << 30;

const READ_FIGURES: [Figure; 7] = [
    Figure::RandomRead32,
    Figure::RandomRead1,
    Figure::Sequential,
    Figure::NbdRandomRead16,
    Figure::NbdCopy,
    Figure::Memory,
    Figure::Open,
];
/// What the reference of one layer repeats in every group.
const REFERENCE_FIGURES: [Figure; 3] = [Figure::RandomRead32, Figure::NbdRandomRead16, Figure::NbdCopy];
const FLOOR_FIGURES: [Figure; 3] = [Figure::RandomRead32, Figure::RandomRead1, Figure::Sequential];

/// Everything of one run.
struct Bench<'a> {
    options: &'a Options,
    samples: Vec<Sample>,
    /// Files in the page cache since they were read there.
    warm: HashSet<PathBuf>,
}

/// Runs the benchmark and, when asked to, writes its files.
///
/// # Errors
/// When a server fails or serves a wrong byte, or files cannot be written.
pub fn run(options: &Options) -> Result<Results> {
    server::raise_file_limit()?;
    if options.servers.contains(&Kind::Vmstrata) {
        ensure!(server::vmstrata().exists(), "build vmstrata first: cargo build --release");
    }
    fs::create_dir_all(&options.dir)?;

    let mut bench = Bench { options, samples: Vec::new(), warm: HashSet::new() };
    let one = bench.prepare(1)?;
    let raw = bench.raw_copy(&one)?;
    for &layers in &options.layers {
        let chain = if layers == 1 { None } else { Some(bench.prepare(layers)?) };
        bench.group(layers, &one, chain.as_ref(), &raw)?;
    }
    if options.boot {
        bench.boots()?;
    }
    let results = describe::results(options, bench.samples);
    println!("{}", table::markdown(&results));
    if let Some(root) = &options.publish {
        publish::write(root, &results)?;
    }
    Ok(results)
}

impl Bench<'_> {
    fn spec(&self, layers: u32) -> Spec {
        let size = self.options.size;
        let plan =
            Plan { layers, size, cluster_size: CLUSTER, fill: FILL, overlap: 0.0, compress: 0.0, seed: SEED };
        Spec { plan, base: Base::Qcow2, backing_format: true, from_raw: None }
    }

    /// The chain of `layers` layers, made unless it is there already.
    fn prepare(&self, layers: u32) -> Result<Prepared> {
        let spec = self.spec(layers);
        let dir = self.options.dir.join(format!("bench-{layers}-{}", self.options.size));
        let there = Manifest::load(&dir).ok().filter(|manifest| manifest.matches(&spec));
        let manifest = match there {
            Some(manifest) => manifest,
            None => {
                eprintln!("making a chain of {layers} layers");
                chain::generate(&dir, &spec)?
            }
        };
        let owners = manifest.owners().collect();
        Ok(Prepared { dir, manifest, owners })
    }

    /// A raw file with the bytes of the disk, for the floor. All lengths own the same clusters, but their
    /// data names its layer, so the floor's file is the one-layer chain's.
    fn raw_copy(&self, one: &Prepared) -> Result<PathBuf> {
        let raw = self.options.dir.join(format!("bench-floor-{}.raw", self.options.size));
        if raw.metadata().is_ok_and(|meta| meta.len() == self.options.size) {
            return Ok(raw);
        }
        eprintln!("making the raw file of the floor");
        let partial = raw.with_extension("partial");
        let convert = std::process::Command::new("qemu-img")
            .args(["convert", "-O", "raw"])
            .args([&one.manifest.top(&one.dir), &partial])
            .status()?;
        ensure!(convert.success(), "qemu-img convert failed");
        fs::rename(&partial, &raw)?;
        Ok(raw)
    }

    fn group(&mut self, layers: u32, one: &Prepared, long: Option<&Prepared>, raw: &Path) -> Result<()> {
        let chain = long.unwrap_or(one);
        rustix::fs::sync();
        for prepared in [Some(one), long].into_iter().flatten() {
            for file in &prepared.manifest.files {
                self.warm(&prepared.dir.join(file))?;
            }
        }
        self.warm(raw)?;
        for round in 0..self.options.rounds {
            let start = Instant::now();
            for server in self.options.servers.clone() {
                match server {
                    Kind::Floor => self.floor_round(raw, chain, layers, round)?,
                    Kind::Qemu if round >= qemu_rounds(layers) => {}
                    _ => self.server_round(server, chain, layers, round)?,
                }
            }
            if long.is_some() && self.options.servers.contains(&Kind::Vmstrata) {
                self.reference_round(one, layers, round)?;
            }
            eprintln!("{layers} layers, round {}: {:.0} s", round + 1, start.elapsed().as_secs_f64());
        }
        Ok(())
    }

    fn warm(&mut self, path: &Path) -> Result<()> {
        if self.warm.insert(path.to_owned()) { prepared::warm(path) } else { Ok(()) }
    }

    /// Data is checked whole in the first round of a group only: it costs more time than the runs.
    fn timing(&self, round: u32) -> Timing {
        Timing { whole: self.options.timing.whole && round == 0, ..self.options.timing }
    }

    fn floor_round(&mut self, raw: &Path, chain: &Prepared, group: u32, round: u32) -> Result<()> {
        let mut values = session::floor(raw, &FLOOR_FIGURES, self.timing(round))?;
        if group == 1 {
            values.extend(self.overwrites(Kind::Floor, round)?);
            touch_free_memory(WRITTEN_MEMORY);
            let rate = floor::copy_clusters(raw, &self.options.dir, self.timing(round).run)?;
            values.push((Figure::FirstWrite, rate));
        }
        self.take(Kind::Floor, 0, group, round, values);
        let files: Vec<PathBuf> = chain.manifest.files.iter().map(|file| chain.dir.join(file)).collect();
        let rate = floor::read_files(&files, self.timing(round).run)?;
        self.take(Kind::Floor, group, group, round, vec![(Figure::FileRead, rate)]);
        Ok(())
    }

    /// vmstrata on one layer, for the ratios of long chains to it.
    fn reference_round(&mut self, one: &Prepared, group: u32, round: u32) -> Result<()> {
        let timing = self.timing(round);
        let mut values = session::read(Kind::Vmstrata, &one.chain(), &REFERENCE_FIGURES, timing)?;
        values.extend(self.first_writes(Kind::Vmstrata, one, round)?);
        self.take(Kind::Vmstrata, 1, group, round, values);
        Ok(())
    }

    fn server_round(&mut self, server: Kind, chain: &Prepared, layers: u32, round: u32) -> Result<()> {
        let mut values = session::read(server, &chain.chain(), &READ_FIGURES, self.timing(round))?;
        if server != Kind::Qemu || layers <= QEMU_SLOW_LAYERS || round == 0 {
            values.extend(self.first_writes(server, chain, round)?);
        }
        if layers == 1 {
            values.extend(self.overwrites(server, round)?);
        }
        self.take(server, layers, layers, round, values);
        Ok(())
    }

    fn take(&mut self, server: Kind, layers: u32, group: u32, round: u32, values: Values) {
        for (figure, value) in values {
            eprintln!("  {:9} {layers:5} layers  {:?} {value:.1} {}", server.label(), figure, figure.unit());
            self.samples.push(Sample { figure, server, layers, group, round, value });
        }
    }

    /// A fresh overlay on the chain: every write copies a cluster up.
    fn first_writes(&self, server: Kind, chain: &Prepared, round: u32) -> Result<Values> {
        let dir = tempfile::Builder::new().prefix("overlay-").tempdir_in(&self.options.dir)?;
        let path = dir.path().join("overlay.qcow2");
        let below = chain.manifest.top(&chain.dir).canonicalize()?;
        let name = Path::new("..").join(below.strip_prefix(self.options.dir.canonicalize()?)?);
        let backing = Backing { name: name.display().to_string(), format: Some("qcow2") };
        let shape = Shape { size: self.options.size, cluster_size: CLUSTER, backing: Some(backing) };
        image::write(&path, &shape, &[], &image::Empty)?;
        let access = Access::FirstWrite { round: round as u16 };
        touch_free_memory(WRITTEN_MEMORY);
        let disk = Disk { path, writable: true, backing: Some(chain.dir.clone()) };
        let rate = session::write(server, &disk, access, &chain.chain(), self.timing(round))?;
        Ok(vec![(Figure::FirstWrite, rate)])
    }

    /// A fresh image whose clusters are all there already.
    fn overwrites(&self, server: Kind, round: u32) -> Result<Values> {
        let dir = tempfile::Builder::new().prefix("overwrite-").tempdir_in(&self.options.dir)?;
        let mut spec = self.spec(1);
        spec.plan = Plan { size: OVERWRITE_SIZE.min(self.options.size), fill: 1.0, ..spec.plan };
        if server == Kind::Floor {
            spec.base = Base::Raw;
        }
        let manifest = chain::generate(dir.path(), &spec)?;
        let path = manifest.top(dir.path());
        File::open(&path)?.sync_all()?;
        let owners: Vec<_> = manifest.owners().collect();
        let chain = Chain { dir: dir.path(), manifest: &manifest, owners: &owners };
        let access = Access::RandomWrite { round: round as u16 };
        let rate = if server == Kind::Floor {
            session::floor_write(&path, access, &chain, self.timing(round))?
        } else {
            let disk = Disk { path, writable: true, backing: None };
            session::write(server, &disk, access, &chain, self.timing(round))?
        };
        Ok(vec![(Figure::Overwrite, rate)])
    }

    fn boots(&mut self) -> Result<()> {
        let longest = self.options.layers.iter().copied().max().unwrap_or(1);
        let lengths: &[u32] = if longest > 1 { &[1, longest] } else { &[1] };
        let disks = crate::guest::disks(&self.options.dir, lengths)?;
        for round in 0..self.options.rounds {
            for (layers, disk) in &disks {
                for server in self.options.servers.clone() {
                    if server == Kind::Floor || (server == Kind::Qemu && round >= qemu_rounds(*layers)) {
                        continue;
                    }
                    let seconds = crate::guest::boot_through(server, disk)?.as_secs_f64();
                    self.take(server, *layers, BOOTS, round, vec![(Figure::Boot, seconds)]);
                }
            }
        }
        Ok(())
    }
}

/// Rounds that QEMU takes part in at a chain length: opening 1,000 layers alone takes it 14 s.
const fn qemu_rounds(layers: u32) -> u32 {
    match layers {
        0..=QEMU_SLOW_LAYERS => u32::MAX,
        101..=500 => 2,
        _ => 1,
    }
}
