//! The whole benchmark: chains, groups, rounds, and the files it leaves.
//!
//! For each chain length there is a group of rounds. In a round QEMU on the chain, vmstrata on the chain, vmstrata on one
//! layer (the reference of length ratios), and the floor read, one after the other; then each writes. Every other round goes
//! the other way around. Writing takes and gives back much memory, which busies the machine for seconds afterwards: what
//! is compared must not differ by that. Files of a group are read once before, so that all of it is in the page
//! cache: a 4 GiB disk needs about 21 GiB of memory.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::time::Instant;

use anyhow::{Result, ensure};

use super::cached::{self, Cached};
use super::floor;
use super::load::Access;
use super::machine::{by_turns, settle, touch_free_memory};
use super::prepared::{self, Prepared};
use super::results::{Figure, Results, Sample};
use super::server::{self, Disk, Kind};
use super::session::{self, Chain, Timing, Values};
use super::{describe, publish, table};
use crate::chain::{self, Backing, Base, Plan, Shape, image};

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

/// Whose turn it is in a round: a server on a chain, and what it is measured for by reading.
struct Turn<'a> {
    server: Kind,
    layers: u32,
    chain: &'a Prepared,
    figures: &'static [Figure],
}

/// Everything of one run.
struct Bench<'a> {
    options: &'a Options,
    samples: Vec<Sample>,
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

    let mut bench = Bench { options, samples: Vec::new() };
    let one = prepared::prepare(options, 1)?;
    let raw = prepared::raw_copy(options, &one)?;
    rustix::fs::sync();
    let _cached = Cached::new(&[one.paths(), vec![raw.clone()]])?;
    for &layers in &options.layers {
        let chain = if layers == 1 { None } else { Some(prepared::prepare(options, layers)?) };
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
    fn group(&mut self, layers: u32, one: &Prepared, long: Option<&Prepared>, raw: &Path) -> Result<()> {
        let chains: Vec<&Prepared> = [Some(one), long].into_iter().flatten().collect();
        rustix::fs::sync();
        let cached = Cached::new(&long.map(Prepared::paths).into_iter().collect::<Vec<_>>())?;
        for round in 0..self.options.rounds {
            let start = Instant::now();
            let mut turns = self.turns(layers, &chains, round);
            by_turns(&mut turns, round);
            settle();
            for turn in &turns {
                self.reads(turn, raw, (layers, round))?;
            }
            for turn in &turns {
                self.writes(turn, raw, (layers, round))?;
            }
            eprintln!("{layers} layers, round {}: {:.0} s", round + 1, start.elapsed().as_secs_f64());
        }
        // No later group reads it, and all of them together do not fit into memory.
        drop(cached);
        long.map(Prepared::paths).iter().flatten().try_for_each(|path| cached::forget(path))?;
        Ok(())
    }

    /// Who takes part in a round. `chains`: one layer, then the group's own chain, where that is another.
    fn turns<'a>(&self, layers: u32, chains: &[&'a Prepared], round: u32) -> Vec<Turn<'a>> {
        let longest = chains[chains.len() - 1];
        let mut turns = Vec::new();
        for &server in &self.options.servers {
            if server == Kind::Qemu && round >= qemu_rounds(layers) {
                continue;
            }
            let figures = if server == Kind::Floor { &FLOOR_FIGURES[..] } else { &READ_FIGURES };
            turns.push(Turn { server, layers, chain: longest, figures });
            if server == Kind::Vmstrata && chains.len() > 1 {
                turns.push(Turn { server, layers: 1, chain: chains[0], figures: &REFERENCE_FIGURES });
            }
        }
        turns
    }

    /// Data is checked whole in the first round of a group only: it costs more time than the runs.
    fn timing(&self, round: u32) -> Timing {
        Timing { whole: self.options.timing.whole && round == 0, ..self.options.timing }
    }

    fn reads(&mut self, turn: &Turn<'_>, raw: &Path, (group, round): (u32, u32)) -> Result<()> {
        let timing = self.timing(round);
        if turn.server != Kind::Floor {
            let values = session::read(turn.server, &turn.chain.chain(), turn.figures, timing)?;
            self.take(turn.server, turn.layers, group, round, values);
            return Ok(());
        }
        let values = session::floor(raw, turn.figures, timing)?;
        self.take(Kind::Floor, 0, group, round, values);
        let rate = floor::Files::open(&turn.chain.paths())?.read(timing.run, 0)?;
        self.take(Kind::Floor, group, group, round, vec![(Figure::FileRead, rate)]);
        Ok(())
    }

    fn writes(&mut self, turn: &Turn<'_>, raw: &Path, (group, round): (u32, u32)) -> Result<()> {
        let Turn { server, layers, chain, .. } = *turn;
        let mut values = Vec::new();
        match server {
            Kind::Floor if group == 1 => {
                touch_free_memory(WRITTEN_MEMORY);
                let rate = floor::copy_clusters(raw, &self.options.dir, self.timing(round).run)?;
                values.push((Figure::FirstWrite, rate));
            }
            Kind::Floor => return Ok(()),
            Kind::Qemu if layers > QEMU_SLOW_LAYERS && round > 0 => {}
            _ => values.extend(self.first_writes(server, chain, round)?),
        }
        if group == 1 {
            values.extend(self.overwrites(server, round)?);
        }
        self.take(server, if server == Kind::Floor { 0 } else { layers }, group, round, values);
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
        let mut spec = prepared::spec(self.options, 1);
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
            let mut disks: Vec<_> = disks.iter().collect();
            by_turns(&mut disks, round);
            settle();
            for (layers, disk) in disks {
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
