//! Deterministic simulation: the product's own code on a host whose time, threads, storage and death come from a seed.
//!
//! ```text
//!   simulator ── fork ──► a process of the host: life ──► disk, store (not changed) ──► kernel ──► calls, tasks
//!       ▲                    │ dies at a step                        system calls, clock, threads
//!       │   shared: events ◄─┘
//!       ├──► history: what may the disk hold?
//!       └──► storage: what does a power failure leave?  ──► files in memory for the next life
//! ```
//!
//! One seed is one run: the same steps in the same order with the same bytes, which a hash of all events shows. A run is a few
//! lives of a process. Each ends where the seed says, by itself or killed; then the power may fail. The next one finds what is left, and
//! looks at all of it.
//!
//! ```text
//!   tier: hosts that publish ──► repository: a handle of each process ──► network ──► repository: the server
//! ```
//!
//! With `--run repository`, a run is one life, whose tasks are several hosts with a network between them: they take a disk over
//! from each other, publish its epochs in one repository, merge and delete layers, and pin states.
//!
//! ```text
//!   tier: hosts that publish ──► directory repository ── system calls ──► mount: their kernels ──► nas ──► crash: what if it died now?
//! ```
//!
//! With `--run move`, the disk moves between two directories meanwhile, or to a flat copy, and the storage of a move fails now and then.
//!
//! With `--run mount`, the repository is a directory that the hosts have mounted. The seed draws what the NAS would leave at any moment,
//! and each of these crash states is judged, too.
//!
//! Processes are real ones, so that a death is one: locks go, memory goes, statics begin anew. What a host with several processes, or
//! hosts that die one by one, would add: tasks and time in [`shared`] memory, and sockets in [`calls`].

#[cfg(not(all(target_arch = "x86_64", target_os = "linux", target_env = "gnu")))]
compile_error!("the simulation knows Linux on x86-64 with glibc only");

mod calls;
mod faults;
mod history;
mod kernel;
mod life;
mod mount;
mod moves;
mod nas;
mod network;
mod random;
mod repository;
mod shared;
mod storage;
mod syscall;
mod tasks;
mod tier;

use std::collections::BTreeSet;
use std::fmt::Debug;
use std::fs::{self, File, TryLockError};
use std::io::Write as _;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};
use std::time::Instant;

use clap::error::ErrorKind;
use clap::{CommandFactory as _, Parser, ValueEnum};
use vmstrata_disk::{CreateOptions, create};
use vmstrata_store::Planted;
use vmstrata_types::ClusterBits;

use history::{Deed, History, SECTOR};
use life::{CLONES, DISK, DISKS, FLAT, JOURNALS, Life, OTHER};
use random::{Random, hash};
use repository::Fault;
use shared::{Kind, Shared};
use storage::Storage;
use tasks::Death;

#[global_allocator]
static ALLOCATOR: kernel::Allocator = kernel::Allocator;

/// Run seeds, and say which fail. Runs need a file system in memory at /dev/shm.
#[derive(Parser)]
struct Arguments {
    /// How many seeds to run.
    #[arg(long, default_value_t = 1)]
    seeds: u64,
    /// The first one.
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// What runs.
    #[arg(long, value_enum, default_value_t)]
    run: Scene,
    /// Build a fault into what runs, which the seeds have to find.
    #[arg(long)]
    plant: Option<String>,
    /// Run each seed twice, and where the runs differ in anything once more; fail where no two are alike.
    #[arg(long)]
    twice: bool,
    /// Print what each seed did, and every event of it.
    #[arg(long)]
    verbose: bool,
}

/// What runs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
enum Scene {
    /// A disk of a host that dies again and again.
    #[default]
    Disk,
    /// Hosts that publish in one repository, over a network.
    Repository,
    /// Hosts that publish in one directory of a NAS, which each has mounted, and which dies.
    Mount,
    /// A disk of a host that dies again and again, which moves from one directory to another.
    Move,
}

impl Scene {
    /// The faults that can be planted.
    fn faults(self) -> Vec<String> {
        match self {
            Self::Disk => named(&Planted::DISK),
            Self::Repository => [named(&Fault::ALL), named(&Planted::TIER)].concat(),
            Self::Move => named(&Planted::MOVE),
            Self::Mount => [named(&nas::Fault::ALL), named(&Planted::TIER)].concat(),
        }
    }
}

fn named(faults: &[impl Debug]) -> Vec<String> {
    faults.iter().map(|fault| format!("{fault:?}")).collect()
}

impl Arguments {
    /// The number of the fault among those of what runs, from 1 on; 0 without.
    fn plant(&self) -> usize {
        let Some(name) = &self.plant else { return 0 };
        let faults = self.run.faults();
        let place = faults.iter().position(|fault| fault.eq_ignore_ascii_case(name));
        let told = || Self::command().error(ErrorKind::InvalidValue, format!("--plant: one of {faults:?}"));
        1 + place.unwrap_or_else(|| told().exit())
    }
}

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().collect();
    match &arguments[..] {
        [_, seed, scene, plant, place, verbose] if seed.starts_with(SEED) => {
            run(seed, scene, plant, place, verbose);
            ExitCode::SUCCESS
        }
        _ => run_all(&Arguments::parse()),
    }
}

/// Begins the first argument of a process that runs a seed.
const SEED: &str = "seed=";

fn run_all(arguments: &Arguments) -> ExitCode {
    let place = Place::find();
    be_alike(&place);
    let (begun, mut steps, mut crashes, mut all) = (Instant::now(), 0, 0, 0);
    for seed in arguments.seed..arguments.seed + arguments.seeds {
        let (ran, mut failure) = run_one(seed, arguments, &place);
        if arguments.twice {
            let again = || run_one(seed, arguments, &place).0;
            let second = again();
            // The real host shows through in one of some hundred runs: then a third one decides.
            if second != ran && ![ran, second].contains(&again()) {
                failure.get_or_insert("no two of three runs are alike".to_owned());
            }
        }
        let [events, hashed, crashed] = ran;
        (steps, crashes) = (steps + events, crashes + crashed);
        all = hash(all, &hashed.to_le_bytes());
        if let Some(failure) = failure {
            let plant =
                arguments.plant.as_ref().map_or_else(String::new, |fault| format!(" --plant {fault}"));
            let command = match arguments.run {
                Scene::Disk => "cargo xtask sim",
                Scene::Repository => "cargo xtask sim --run repository",
                Scene::Mount => "cargo xtask sim --run mount",
                Scene::Move => "cargo xtask sim --run move",
            };
            println!("seed {seed}: {failure}");
            println!("replay it: {command} --seed {seed}{plant} --verbose");
            return ExitCode::FAILURE;
        }
    }
    let per_minute = steps as f64 / begun.elapsed().as_secs_f64() * 60.0;
    let judged = if crashes > 0 { format!(", {crashes} crash states") } else { String::new() };
    println!("{} seeds, {steps} steps ({per_minute:.0} a minute){judged}, hash {all:016x}", arguments.seeds);
    ExitCode::SUCCESS
}

/// Makes all processes that this one starts have the same addresses, on one processor: tasks take turns anyway.
fn be_alike(place: &Place) {
    // SAFETY: no pointers; this process only.
    let before = unsafe { libc::personality(0xffff_ffff) };
    // SAFETY: as above.
    if unsafe { libc::personality((before | libc::ADDR_NO_RANDOMIZE) as libc::c_ulong) } < 0 {
        eprintln!("this host wants random addresses: a seed may not run twice in the same way");
    }
    // SAFETY: plain data, for which zeros are valid.
    let (mut all, mut one): (libc::cpu_set_t, libc::cpu_set_t) = unsafe { std::mem::zeroed() };
    // SAFETY: room for the set.
    unsafe { libc::sched_getaffinity(0, size_of_val(&all), &mut all) };
    // SAFETY: within the set.
    let ours = (0..libc::CPU_SETSIZE as usize).filter(|&number| unsafe { libc::CPU_ISSET(number, &all) });
    let ours: Vec<usize> = ours.collect();
    if let Some(&processor) = ours.get(place.number % ours.len().max(1)) {
        // SAFETY: within the set.
        unsafe { libc::CPU_SET(processor, &mut one) };
        // SAFETY: the set is valid. Slower without.
        unsafe { libc::sched_setaffinity(0, size_of_val(&one), &one) };
    }
}

/// Runs a seed in a process of its own, in which all but the seed is the same for each: locks are found by their addresses.
/// Returns its events, their hash, how many different crash states it judged, and what failed.
fn run_one(seed: u64, arguments: &Arguments, place: &Place) -> ([u64; 3], Option<String>) {
    let mut process = Command::new("/proc/self/exe");
    process.env_clear().arg(format!("{SEED}{seed:020}")).arg((arguments.run as u8).to_string());
    process.arg(arguments.plant().to_string()).arg(&place.directory);
    process.arg(u8::from(arguments.verbose).to_string());
    let output = process.stderr(Stdio::inherit()).output().expect("this program");
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let mut parts = text.splitn(4, ' ');
    let mut number = || parts.next().and_then(|number| number.parse().ok());
    match (number(), number(), number()) {
        (Some(events), Some(hashed), Some(crashed)) => {
            let failure = parts.next().filter(|failure| !failure.is_empty()).map(str::to_owned);
            ([events, hashed, crashed], failure)
        }
        _ => ([0; 3], Some(format!("the run ended with {}", output.status))),
    }
}

/// The process of a seed.
fn run(seed: &str, scene: &str, plant: &str, place: &str, verbose: &str) {
    // SAFETY: no pointers; what the caller of all this has open is none of the host's.
    unsafe { libc::close_range(3, u32::MAX, 0) };
    // SAFETY: no pointers. What a power failure leaves is made with it.
    unsafe { libc::umask(0o022) };
    let plant = plant.parse::<usize>().expect("a number").checked_sub(1);
    let seed = seed[SEED.len()..].parse().expect("a number");
    let run = Run::new(seed, Path::new(place), verbose == "1");
    let of_host = |of_server: usize| {
        let of_host = plant.and_then(|number| number.checked_sub(of_server));
        vmstrata_store::plant(of_host.map(|planted| Planted::TIER[planted]));
    };
    let scene: u8 = scene.parse().expect("a number");
    let ran = if scene == Scene::Repository as u8 {
        of_host(Fault::ALL.len());
        let fault = plant.and_then(|number| Fault::ALL.get(number).copied());
        run.run_hosts(move |seed| tier::run_network(seed, fault))
    } else if scene == Scene::Mount as u8 {
        of_host(nas::Fault::ALL.len());
        let fault = plant.and_then(|number| nas::Fault::ALL.get(number).copied());
        run.run_hosts(move |seed| tier::run_mount(seed, fault))
    } else {
        let moves = scene == Scene::Move as u8;
        let faults = if moves { &Planted::MOVE[..] } else { &Planted::DISK };
        vmstrata_store::plant(plant.map(|planted| faults[planted]));
        run.run_disk(moves)
    };
    print!("{} {} {} {}", ran.events, ran.hash, ran.crashes, ran.failure.unwrap_or_default());
}

/// The directory of the simulated host, whose name has no part in what happens as it is as long as all others.
struct Place {
    directory: PathBuf,
    number: usize,
    _lock: File,
}

impl Place {
    fn find() -> Self {
        // SAFETY: no pointers.
        let all = PathBuf::from(format!("/dev/shm/vmstrata-sim-{}", unsafe { libc::geteuid() }));
        fs::create_dir_all(&all).expect("a file system in memory at /dev/shm");
        for number in 10..100 {
            let lock = File::create(all.join(format!("{number}.lock"))).expect("a lock");
            match lock.try_lock() {
                Ok(()) => return Self { directory: all.join(number.to_string()), number, _lock: lock },
                Err(TryLockError::WouldBlock) => {}
                Err(TryLockError::Error(error)) => panic!("{error}"),
            }
        }
        panic!("{} is full", all.display());
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        clear(&self.directory);
    }
}

fn clear(directory: &Path) {
    if directory.exists() {
        fs::remove_dir_all(directory).expect("removed");
    }
}

/// What became of a seed.
struct Ran {
    events: u64,
    hash: u64,
    /// Different states that a NAS might have left, all of which were judged.
    crashes: u64,
    failure: Option<String>,
}

/// A seed.
struct Run<'a> {
    random: Random,
    /// Where the host is, and files of the simulator.
    place: &'a Path,
    shared: Shared,
    is_verbose: bool,
    now_ns: u64,
    /// The name of the host's boot.
    boot: u64,
}

/// Lives of a run, at most, and the steps of one that is killed, or those of them that change files.
const LIVES_MAX: u64 = 5;
const STEPS_MAX: u64 = 6_000;
const CHANGES_MAX: u64 = 600;

impl<'a> Run<'a> {
    fn new(seed: u64, place: &'a Path, is_verbose: bool) -> Self {
        let (random, shared) = (Random::new(random::mix(seed + 1)), Shared::new());
        Self { random, place, shared, is_verbose, now_ns: 1, boot: 1 }
    }

    fn root(&self) -> PathBuf {
        self.place.join("host")
    }

    /// Runs one life, whose tasks are several hosts.
    fn run_hosts(self, main: impl FnOnce(u64) + Send + 'static) -> Ran {
        clear(self.place);
        fs::create_dir_all(self.root()).expect("made");
        let failure = self.live(0, self.random.next(), Death::AtStep(u64::MAX), main);
        let mut ran = Ran { events: 0, hash: hash(0, self.shared.bytes()), crashes: 0, failure };
        let mut crashed = BTreeSet::new();
        for (number, event, data) in self.shared.events() {
            ran.events += 1;
            if event.kind == Kind::Crashed {
                crashed.insert(event.args[0]);
            }
            if self.is_verbose {
                eprintln!("{number} {event:?} {}", String::from_utf8_lossy(data));
            }
        }
        ran.crashes = crashed.len() as u64;
        ran
    }

    fn run_disk(mut self, moves: bool) -> Ran {
        clear(self.place);
        for name in [CLONES, DISKS, JOURNALS].iter().chain(moves.then_some(&OTHER)) {
            fs::create_dir_all(self.root().join(name)).expect("made");
        }
        let sectors = 8 * (64 + self.random.below(256));
        let (cluster_bits, version) = (*self.random.pick(&[9, 12, 14, 16]), *self.random.pick(&[2, 3, 3, 3]));
        let options = CreateOptions {
            size: Some(sectors * SECTOR as u64),
            cluster_bits: ClusterBits::new(cluster_bits).expect("a size of clusters"),
            version,
            subclusters: cluster_bits >= 14 && version == 3 && self.random.one_in(2),
            ..CreateOptions::default()
        };
        create(&self.root().join(DISKS).join(DISK), &options).expect("a disk");
        let mut storage = Storage::new(&self.root(), JOURNALS, self.shared);
        let mut history = History::new(sectors as usize);
        let mut ran = Ran { events: 0, hash: 0, crashes: 0, failure: None };
        let lives = 2 + self.random.below(LIVES_MAX - 1);
        for life in 0..lives {
            self.shared.clear_log();
            let failure = self.live_disk(life, &history, moves);
            ran.hash = hash(ran.hash, self.shared.bytes());
            for (number, event, data) in self.shared.events() {
                ran.events += 1;
                self.now_ns = event.time_ns;
                if self.is_verbose {
                    // Nothing is allocated for it: a run is the same with and without.
                    let mut out = std::io::stderr();
                    let _ = match event.kind {
                        Kind::Told => {
                            let _ = write!(out, "{life} {number} ");
                            out.write_all(data).and_then(|()| out.write_all(b"\n"))
                        }
                        _ => writeln!(out, "{life} {number} {event:?} {:016x}", hash(0, data)),
                    };
                }
                storage.see(number, &event, data);
                let is_of_names = matches!(event.kind, Kind::Name | Kind::Ended);
                let may_lose = || [DISK, FLAT].iter().all(|name| storage.may_lose(name, &[DISKS, OTHER]));
                if moves && is_of_names && may_lose() {
                    let text = format!("life {life}: a power failure after event {number} may leave no disk");
                    ran.failure.get_or_insert(text);
                }
                if event.kind == Kind::Guest {
                    let [deed, args @ ..] = event.args;
                    let words = data.as_chunks::<8>().0;
                    let stamps: Vec<u64> = words.iter().map(|word| u64::from_le_bytes(*word)).collect();
                    history.enter(Deed::of(deed), args, &stamps);
                }
            }
            ran.failure = failure.or(ran.failure.take());
            if ran.failure.is_some() {
                break;
            }
            self.now_ns += 1_000_000_000;
            if self.random.one_in(2) {
                storage.lose_process();
                history.lose_process();
            } else {
                self.boot += 1;
                storage.lose_power(&self.random, self.now_ns);
                history.lose_power();
            }
        }
        ran
    }

    /// Runs a process that uses the disk, as [`Run::live`].
    fn live_disk(&self, life: u64, history: &History, moves: bool) -> Option<String> {
        let longer = if moves { 3 } else { 1 };
        let death = match self.random.below(2) {
            0 => Death::AtStep(1 + self.random.below(longer * STEPS_MAX)),
            _ => Death::AtChange(1 + self.random.below(longer * CHANGES_MAX)),
        };
        let (directory, history) = (self.root(), history.clone());
        self.live(life, self.random.next(), death, move |seed| {
            Life { directory, history, seed, is_first: life == 0, moves }.live()
        })
    }

    /// Runs a process, which does `main` with a seed, until it dies; says what is wrong if it does not die as it must.
    fn live<F>(&self, life: u64, seed: u64, death: Death, main: F) -> Option<String>
    where
        F: FnOnce(u64) + Send + 'static,
    {
        let place = self.place;
        // Without the seed: of these, no two have the same tag in session numbers, as one in 32,767 would.
        let boot_id = format!("{:08x}-0000-4000-8000-000000000000\n", self.boot);
        for (name, text) in [("boot_id", &*boot_id), ("mountinfo", calls::MOUNTS)] {
            fs::write(place.join(name), text).expect("written");
        }
        fs::create_dir_all(place.join("proc")).expect("made");
        // SAFETY: this process has one thread.
        let child = unsafe { libc::fork() };
        assert!(child >= 0, "no other process");
        if child == 0 {
            // SAFETY: no pointers. A process that hangs is killed.
            unsafe { libc::alarm(60) };
            let device = fs::metadata(self.root()).expect("there").dev();
            calls::begin(device, 1000 + life, place);
            std::panic::set_hook(Box::new(|panic| {
                kernel::inside(|| tasks::TASKS.fail(&panic.to_string()));
            }));
            tasks::TASKS.begin(self.shared, seed, self.now_ns, death);
            kernel::begin();
            // In a thread of its own: this one has drawn numbers for hash maps from the real host.
            let _ = std::thread::spawn(move || main(random::mix(seed))).join();
            unreachable!("a life ends with its process");
        }
        let mut status = 0;
        // SAFETY: room for the result.
        assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
        match self.shared.events().last() {
            Some((_, event, _)) if event.kind == Kind::Died && status == 0 => None,
            Some((_, event, text)) if event.kind == Kind::Failed => {
                Some(format!("life {life}: {}", String::from_utf8_lossy(text)))
            }
            _ => Some(format!("life {life}: the process died with status {status:#x}")),
        }
    }
}
