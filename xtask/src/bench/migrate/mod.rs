//! `cargo xtask bench migrate`: moves that follow their guests (IOFollow 4.1 to 4.3).
//!
//! ```text
//!   model    traces on a modelled disk, in virtual time ──► docs/measurements/migrate.{json,md,svg}
//!   disk     traces on this machine's disk                  ┐
//!   nas      traces on a disk that moves away from a NAS    ├──► docs/measurements/migrate-real.json, migrate.md, docs/move.md
//!   guest    SQLite in a guest, on this machine's disk      ┘
//! ```

mod disk;
mod guest;
mod model;
mod plot;
mod real;
mod replay;
mod study;
mod trace;

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::Result;

use super::shown::Shown;
pub use model::model;
pub use real::measure;
pub use study::{SHOWN, Study, Table, blocks, kept};
use trace::TRACES;

/// Where the results of all parts but the model are kept.
pub const REAL: Shown = Shown {
    file: "docs/measurements/migrate-real.json",
    summary: "docs/move.md",
    page: "docs/measurements/migrate.md",
    mark: "bench:migrate-real",
};

/// The latency controller's factor.
const FACTOR: f64 = 1.5;

/// What can be measured on its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Part {
    /// Traces on a modelled disk.
    Model,
    /// Traces on this machine's disk.
    Disk,
    /// Traces on a NAS.
    Nas,
    /// A real guest.
    Guest,
}

impl Part {
    const ALL: [Self; 4] = [Self::Model, Self::Disk, Self::Nas, Self::Guest];
}

/// What the command line asks for.
#[derive(Clone, Debug)]
pub struct Options {
    /// Where the traces are.
    pub traces: PathBuf,
    /// Requests of each trace that the model uses.
    pub requests: usize,
    /// Bytes of an image of the model, at most.
    pub image_max: u64,
    /// Bytes of a disk that moves.
    pub size: u64,
    /// Traces that a client replays.
    pub replays: usize,
    /// Requests of each of them.
    pub replayed: usize,
    /// Of a real guest without a move.
    pub turn: Duration,
    /// Rounds of all parts but the model.
    pub rounds: u32,
    /// What is measured.
    pub parts: Vec<Part>,
    /// Where files are made, and removed at the end.
    pub dir: PathBuf,
    /// Root of the repository, to write results into; `None` prints only.
    pub publish: Option<PathBuf>,
}

impl Options {
    /// The study of the bounds.
    pub fn full(traces: PathBuf, dir: PathBuf) -> Self {
        Self {
            traces,
            requests: usize::MAX,
            image_max: 32 << 30,
            size: 1 << 30,
            replays: TRACES.len(),
            replayed: 900,
            turn: Duration::from_secs(15),
            rounds: 5,
            parts: Part::ALL.to_vec(),
            dir,
            publish: None,
        }
    }

    /// Everything once, small; its figures mean little.
    pub fn quick(traces: PathBuf, dir: PathBuf) -> Self {
        Self {
            requests: 300,
            image_max: 64 << 20,
            size: 64 << 20,
            replays: 1,
            replayed: 50,
            turn: Duration::from_secs(1),
            rounds: 1,
            ..Self::full(traces, dir)
        }
    }
}

/// Runs the parts that are asked for.
///
/// # Errors
/// As for [`model()`] and [`measure`].
pub fn run(options: &Options) -> Result<()> {
    if options.parts.contains(&Part::Model) {
        model(options)?;
    }
    if options.parts.iter().any(|part| *part != Part::Model) {
        measure(options)?;
    }
    Ok(())
}

fn mean(values: &[f64]) -> f64 {
    values.iter().sum::<f64>() / values.len() as f64
}

/// Where traces lie beside a checkout.
pub fn traces_beside(root: &Path) -> PathBuf {
    root.join("../traces")
}
