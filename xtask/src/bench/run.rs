//! The whole benchmark: chains, groups, rounds, and the files it leaves.
//!
//! For each chain length there is a group of rounds. In a round QEMU on the chain, vmstrata on the chain, vmstrata on one
//! layer (the reference of length ratios), and the floor read, each for a fraction of a second in turn; then they write.
//! First writes fill new memory, each its own: there each runs alone. Writing takes and gives back much memory, which busies
//! the machine for seconds afterwards: what is compared must not differ by that. Files of a group are read once before, so
//! that all of it is in the page cache: a 4 GiB disk needs about 21 GiB of memory.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};

use super::cached::{self, Cached};
use super::floor;
use super::load::Access;
use super::machine::{by_turns, settle, touch_free_memory};
use super::prepared::{self, Prepared};
use super::results::{Figure, Results, Sample, cells};
use super::server::{self, Disk, Kind};
use super::session::{self, Reader, Session, Timing, Values};
use super::{machine, publish, targets};
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

/// Who takes part in a round: a server on a chain, and what it is measured for by reading.
struct Turn<'a> {
    server: Kind,
    /// None of the floor's.
    layers: u32,
    chain: &'a Prepared,
    figures: &'static [Figure],
}

impl<'a> Turn<'a> {
    /// Opens what it reads: its chain, or `raw`, which holds what the chain of `one` layer does.
    fn reader(&self, one: &'a Prepared, raw: &Path) -> Result<Reader<'a>> {
        let (chain, disk) = if self.server == Kind::Floor {
            (one.chain(), Disk { path: raw.to_owned(), writable: false, backing: None })
        } else {
            (self.chain.chain(), self.chain.chain().read_only())
        };
        Reader::start(self.server, &disk, chain, self.figures)
    }
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
    let results = results(options, bench.samples);
    println!("{}", publish::markdown(&results));
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
            self.reads(&turns, (one, raw), (layers, round))?;
            for turn in &turns {
                self.first_writes(turn, raw, (layers, round))?;
            }
            if layers == 1 {
                self.overwrites(&turns, round)?;
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
            let layers = if server == Kind::Floor { 0 } else { layers };
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

    fn reads<'a>(
        &mut self,
        turns: &[Turn<'a>],
        (one, raw): (&'a Prepared, &Path),
        (group, round): (u32, u32),
    ) -> Result<()> {
        let timing = self.timing(round);
        let readers = turns.iter().map(|turn| turn.reader(one, raw)).collect::<Result<_>>()?;
        for (turn, values) in turns.iter().zip(session::read(readers, timing)?) {
            self.take(turn.server, turn.layers, group, round, values);
        }
        for turn in turns.iter().filter(|turn| turn.server == Kind::Floor) {
            let rate = floor::Files::open(&turn.chain.paths())?.read(timing.run, 0)?;
            self.take(Kind::Floor, group, group, round, vec![(Figure::FileRead, rate)]);
        }
        Ok(())
    }

    fn take(&mut self, server: Kind, layers: u32, group: u32, round: u32, values: Values) {
        for (figure, value) in values {
            eprintln!("  {:9} {layers:5} layers  {:?} {value:.1} {}", server.label(), figure, figure.unit());
            self.samples.push(Sample { figure, server, layers, group, round, value });
        }
    }

    /// Each cluster written to for the first time.
    fn first_writes(&mut self, turn: &Turn<'_>, raw: &Path, (group, round): (u32, u32)) -> Result<()> {
        let Turn { server, layers, .. } = *turn;
        let rate = match server {
            Kind::Floor if group > 1 => return Ok(()),
            Kind::Qemu if layers > QEMU_SLOW_LAYERS && round > 0 => return Ok(()),
            Kind::Floor => {
                touch_free_memory(WRITTEN_MEMORY);
                floor::copy_clusters(raw, &self.options.dir, self.timing(round).run)?
            }
            Kind::Qemu | Kind::Vmstrata => self.copy_up(server, turn.chain, round)?,
        };
        self.take(server, layers, group, round, vec![(Figure::FirstWrite, rate)]);
        Ok(())
    }

    /// A fresh overlay on the chain: every write copies a cluster up.
    fn copy_up(&self, server: Kind, chain: &Prepared, round: u32) -> Result<f64> {
        let dir = tempfile::Builder::new().prefix("overlay-").tempdir_in(&self.options.dir)?;
        let path = dir.path().join("overlay.qcow2");
        let below = chain.manifest.top(&chain.dir).canonicalize()?;
        let name = Path::new("..").join(below.strip_prefix(self.options.dir.canonicalize()?)?);
        let backing = Backing { name: name.display().to_string(), format: Some("qcow2") };
        let shape = Shape { size: self.options.size, cluster_size: CLUSTER, backing: Some(backing) };
        image::write(&path, &shape, &[], &image::Empty)?;
        touch_free_memory(WRITTEN_MEMORY);
        let disk = Disk { path, writable: true, backing: Some(chain.dir.clone()) };
        let session = Session::start(server, &disk, chain.chain())?;
        let rates =
            session::write(vec![session], Access::FirstWrite { round: round as u16 }, self.timing(round))?;
        Ok(rates[0])
    }

    /// Fresh images whose clusters are all there already.
    fn overwrites(&mut self, turns: &[Turn<'_>], round: u32) -> Result<()> {
        let dir = tempfile::Builder::new().prefix("overwrite-").tempdir_in(&self.options.dir)?;
        let image = |turn: &Turn<'_>| full_image(self.options, turn.server, dir.path());
        let images = turns.iter().map(image).collect::<Result<Vec<_>>>()?;
        settle();
        let mut sessions = Vec::new();
        for (turn, image) in turns.iter().zip(&images) {
            let disk = Disk { writable: true, ..image.chain().read_only() };
            sessions.push(Session::start(turn.server, &disk, image.chain())?);
        }
        let access = Access::RandomWrite { round: round as u16 };
        for (turn, rate) in turns.iter().zip(session::write(sessions, access, self.timing(round))?) {
            self.take(turn.server, turn.layers, 1, round, vec![(Figure::Overwrite, rate)]);
        }
        Ok(())
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

/// An image all of whose clusters are there already, in a directory of its own in `dir`; a raw one for the floor.
fn full_image(options: &Options, server: Kind, dir: &Path) -> Result<Prepared> {
    let dir = dir.join(server.label());
    let mut spec = prepared::spec(options, 1);
    spec.plan = Plan { size: OVERWRITE_SIZE.min(options.size), fill: 1.0, ..spec.plan };
    if server == Kind::Floor {
        spec.base = Base::Raw;
    }
    let manifest = chain::generate(&dir, &spec)?;
    File::open(manifest.top(&dir))?.sync_all()?;
    let owners = manifest.owners().collect();
    Ok(Prepared { dir, manifest, owners })
}

/// Rounds that QEMU takes part in at a chain length: opening 1,000 layers alone takes it 14 s.
const fn qemu_rounds(layers: u32) -> u32 {
    match layers {
        0..=QEMU_SLOW_LAYERS => u32::MAX,
        101..=500 => 2,
        _ => 1,
    }
}

/// The results file for `samples`.
fn results(options: &Options, samples: Vec<Sample>) -> Results {
    Results {
        date: machine::today(),
        machine: machine::machine(),
        versions: named([
            ("qemu", machine::version("qemu-storage-daemon")),
            ("vmstrata", machine::version(&server::vmstrata().display().to_string())),
            ("fio", machine::version("fio")),
            ("libnbd", machine::version("nbdcopy")),
        ]),
        commands: commands(),
        parameters: parameters(options),
        cells: cells(&samples),
        ratios: targets::ratios(&samples),
        samples,
    }
}

fn named<const N: usize>(pairs: [(&str, String); N]) -> Vec<(String, String)> {
    pairs.map(|(name, value)| (name.to_owned(), value)).into()
}

fn commands() -> Vec<(String, String)> {
    named([
        ("qemu", command_line(Kind::Qemu)),
        ("vmstrata", command_line(Kind::Vmstrata)),
        ("vhost-user client", "libblkio virtio-blk-vhost-user, one queue, interrupts".into()),
        ("floor client", "libblkio io_uring on a raw file through the page cache".into()),
        ("nbd client", "fio --ioengine=nbd --rw=randread --bs=4k --iodepth=16".into()),
        ("copy", "nbdcopy URI null:".into()),
        ("all of it", "cargo xtask bench chain".into()),
    ])
}

fn command_line(kind: Kind) -> String {
    let disk = Disk { path: "DISK".into(), writable: false, backing: None };
    let command = server::command(kind, &disk, Path::new("DIR"));
    let program = Path::new(command.get_program()).file_name().unwrap_or_default().to_owned();
    let words = std::iter::once(program.as_os_str()).chain(command.get_args());
    words.map(|word| word.to_string_lossy().into_owned()).collect::<Vec<_>>().join(" ")
}

fn parameters(options: &Options) -> Vec<(String, String)> {
    let seconds = |time: Duration| format!("{} s", time.as_secs_f64());
    named([
        ("disk", format!("{} MiB", options.size >> 20)),
        ("fill", FILL.to_string()),
        ("cluster", format!("{} KiB", CLUSTER >> 10)),
        ("rounds", options.rounds.to_string()),
        ("timed run", seconds(options.timing.run)),
        ("warm-up", seconds(options.timing.warm_up)),
    ])
}
