//! `cargo xtask stress`: a real server under stamped sectors, over several connections of both kinds, while it is killed,
//! its disk is snapshotted and merged, and its file systems are full.
//!
//! ```text
//!   workers ──vhost-user──┐                          ┌── snapshots, deletes up and down, flatten, resize, jobs   (disturb)
//!   workers ──NBD─────────┴──► vmstrata serve ◄──────┼── full file systems                                       (place)
//!      │ asked, answered                             └── kill -9, with the journal or without                    (round)
//!      ▼
//!   model: what each sector may hold ──► reads of the load, of the whole disk after each start, of stock tools   (judge)
//! ```
//!
//! Every sector that is written holds its own number and a value that is never used again (`stamp`), so what is found tells
//! which request it came from. A round is a configuration drawn from its seed: cluster size, cache mode, layers below,
//! connections. Its schedule is not replayed: threads and processes run side by side.

mod below;
mod config;
mod disturb;
mod done;
mod export;
mod full;
mod history;
mod jobs;
mod judge;
mod load;
mod model;
mod nbd;
mod page;
mod place;
mod resize;
mod round;
mod server;
mod shared;
mod snapshots;
mod stamp;
mod trail;
mod vhost;
mod view;
mod wait;

use std::io::{IsTerminal as _, Write as _};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};

use crate::bench::server::{raise_file_limit, vmstrata};
use crate::build;
pub use done::Figures;
pub use page::page;
use round::{Given, Round};
use server::Setup;

/// When a run ends.
#[derive(Clone, Copy, Debug)]
pub enum Length {
    /// After so many rounds.
    Rounds(u64),
    /// With the first round that ends after so long.
    Time(Duration),
}

/// What to do.
#[derive(Clone, Debug)]
pub struct Options {
    /// The seed of the first round; each next one has the next number.
    pub seed: u64,
    /// When to end.
    pub length: Length,
    /// Where directories of rounds are made; that of a failed round stays.
    pub dir: PathBuf,
    /// The `vmstrata` to run; built if not given.
    pub server: Option<PathBuf>,
}

/// What a run did.
#[derive(Clone, Debug)]
pub struct Outcome {
    /// Rounds, all of them without an error.
    pub rounds: u64,
    /// What they did.
    pub figures: Figures,
    /// What was left out, and why.
    pub left_out: Option<String>,
}

/// Runs it, and prints a line a round.
///
/// # Errors
/// The first thing that is wrong, with where the files are.
pub fn run(options: &Options) -> Result<Outcome> {
    raise_file_limit()?;
    let program = match &options.server {
        Some(program) => program.canonicalize().with_context(|| program.display().to_string())?,
        None => {
            build::vmstrata()?;
            vmstrata()
        }
    };
    std::fs::create_dir_all(&options.dir)?;
    let left_out =
        place::can_mount(&options.dir)?.map(|why| format!("full file systems are left out: {why}"));
    if let Some(left_out) = &left_out {
        println!("{left_out}");
    }
    let given = Given { knows: Setup::knows(&program)?, program, mounts: left_out.is_none() };
    let start = Instant::now();
    let (mut rounds, mut figures) = (0, Figures::default());
    let goes_on = |rounds: u64| match options.length {
        Length::Rounds(count) => rounds < count,
        Length::Time(time) => start.elapsed() < time,
    };
    while goes_on(rounds) {
        figures.add(&one(options, &given, rounds, start)?);
        rounds += 1;
    }
    Ok(Outcome { rounds, figures, left_out })
}

fn one(options: &Options, given: &Given, number: u64, start: Instant) -> Result<Figures> {
    let seed = options.seed + number;
    let dir = tempfile::Builder::new().prefix(&format!("stress-{seed}-")).tempdir_in(&options.dir)?;
    let sockets = tempfile::Builder::new().prefix("stress-").tempdir()?;
    let mut round =
        Round::make(seed, dir.path(), sockets.path(), given).with_context(|| format!("seed {seed}"))?;
    let began = Instant::now();
    let progress = |shared: &shared::Shared| {
        let rate = shared.counts.requests() as f64 / began.elapsed().as_secs_f64();
        progress(&format!("seed {seed}: {rate:.0} requests/s, {}", left(options.length, number, start)));
    };
    let ran = round.run(&progress);
    progress_is_over();
    let config = &round.shared.config;
    match ran {
        Ok(done) => {
            let figures = done.figures(&round.shared.counts);
            println!("seed {seed} ({config}): {}; {:.1} s", figures.line(), began.elapsed().as_secs_f64());
            drop(round);
            dir.close()?;
            Ok(figures)
        }
        Err(error) => {
            let told = round.explain(&error);
            let requests = round.requests();
            // It stays, to be looked at.
            let _ = dir.keep();
            bail!("seed {seed}, round {number} ({config}), after {requests} requests: {told}")
        }
    }
}

fn left(length: Length, number: u64, start: Instant) -> String {
    match length {
        Length::Rounds(rounds) => format!("round {} of {rounds}", number + 1),
        Length::Time(time) => {
            format!("round {}, {} s left", number + 1, time.saturating_sub(start.elapsed()).as_secs())
        }
    }
}

fn progress(text: &str) {
    let mut to = std::io::stderr();
    if to.is_terminal() {
        // A line that cannot be shown is left out.
        let _ = write!(to, "\r\x1b[K{text}");
        let _ = to.flush();
    }
}

fn progress_is_over() {
    progress("");
}
