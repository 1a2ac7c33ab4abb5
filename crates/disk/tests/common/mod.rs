//! What the engine's tests share: stock tools as oracles, a disk as a flat array, images of every shape, and files
//! that fail and record.
//!
//! Every random choice comes from a seed that a failing test prints. `VMSTRATA_SEED` moves all seeds, and
//! `VMSTRATA_SOAK_SECONDS` makes the random tests go on with new seeds for that long.

#![allow(dead_code, unused_imports, reason = "each test binary uses its own part of this")]
#![allow(unreachable_pub, missing_docs, reason = "shared by test binaries only")]

pub mod daemon;
pub mod elsewhere;
pub mod faulty;
pub mod flat;
pub mod io;
pub mod judged;
pub mod killed;
pub mod ledger;
pub mod shape;
pub mod stock;
pub mod traced;
pub mod wait;

pub use wait::wait_until;

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rand::SeedableRng as _;
use rand::rngs::SmallRng;
use vmstrata_disk::{Disk, Error, ErrorKind, OpenOptions, ResourceOptions, Resources};

/// A directory in memory where there is one: flushes are many, and what they cost is not what is tested.
pub fn scratch() -> tempfile::TempDir {
    let memory = Path::new("/dev/shm");
    if memory.is_dir() { tempfile::tempdir_in(memory) } else { tempfile::tempdir() }
        .expect("a directory for the test")
}

/// A number from the environment.
fn knob(name: &str) -> Option<u64> {
    std::env::var(name)
        .ok()
        .map(|text| text.parse().unwrap_or_else(|_| panic!("{name} is not a number: {text}")))
}

/// Runs `case` for `count` seeds, and for new ones until the soak time is over. Says which seed failed.
pub fn for_seeds(count: u64, case: impl Fn(u64)) {
    let base = knob("VMSTRATA_SEED").unwrap_or(0);
    let soak = Duration::from_secs(knob("VMSTRATA_SOAK_SECONDS").unwrap_or(0));
    let started = Instant::now();
    let mut seed = base;
    while seed < base + count || started.elapsed() < soak {
        let told = SayOnPanic(seed);
        case(seed);
        drop(told);
        seed += 1;
    }
}

struct SayOnPanic(u64);

impl Drop for SayOnPanic {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("failed with seed {0}: run again with VMSTRATA_SEED={0}", self.0);
        }
    }
}

/// The random numbers of a seed, different for each test.
pub fn random(test: &str, seed: u64) -> SmallRng {
    let name = test
        .bytes()
        .fold(0xcbf2_9ce4_8422_2325u64, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3));
    SmallRng::seed_from_u64(name ^ seed.wrapping_mul(0x9e37_79b9_7f4a_7c15))
}

/// Resources of the least size; `journal_dir` as given.
pub fn small_resources(journal_dir: Option<&Path>) -> Arc<Resources> {
    Resources::new(ResourceOptions {
        metadata_cache_bytes: 0,
        max_open_files: 16,
        workers: 2,
        journal_dir: journal_dir.map(Path::to_owned),
        // All the time.
    })
}

/// Opens a disk for writing with its own default resources.
pub fn open(path: &Path) -> Arc<Disk> {
    open_with(path, &OpenOptions::default())
}

/// Opens a disk with its own default resources.
pub fn open_with(path: &Path, options: &OpenOptions) -> Arc<Disk> {
    Disk::open(path, options, &Resources::new(ResourceOptions::default())).expect("the disk opens")
}

/// Opens a disk for reading with its own default resources.
pub fn open_read_only(path: &Path) -> Arc<Disk> {
    let options = OpenOptions { read_only: true, ..OpenOptions::default() };
    patiently(|| Disk::open(path, &options, &Resources::new(ResourceOptions::default())))
        .expect("the disk opens")
}

/// Tries again while a file is locked: between the fork and the exec of a tool, the tool holds the locks of every file that is
/// open in this process.
pub fn patiently<T>(mut work: impl FnMut() -> Result<T, Error>) -> Result<T, Error> {
    let deadline = Instant::now() + Duration::from_secs(5);
    loop {
        match work() {
            Err(error) if matches!(error.kind(), ErrorKind::File(_)) && Instant::now() < deadline => {
                std::thread::sleep(Duration::from_millis(5));
            }
            done => return done,
        }
    }
}
