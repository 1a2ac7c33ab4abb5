//! What a tree of images is like: disk sizes, chain lengths, sharing, snapshot frequency, risks, and what vmstrata
//! would save; the questions of section 3 of the sQemu paper, asked of one's own host.
//!
//! ```text
//!   crawl ──► images ──► graph ──► risk, times, model, deep ──► report ──► text, page, JSON
//!   (files)   (headers,  (chains)        (findings)             (data)       (renderings)
//!              L1 tables)
//! ```
//!
//! | module | what it knows |
//! |---|---|
//! | `crawl`, `image` | files: found by several threads, looked at once, no lock taken, nothing hostile opened |
//! | `graph` | chains: who stands on whom, loops, what is shared |
//! | `risk` | what endangers a chain, and how badly |
//! | `times` | when layers were made, as far as anything tells |
//! | `model` | what a chain costs stock QEMU and vmstrata, from measurements |
//! | [`history`] | how long chains were before |
//! | `deep` | clusters that no disk can see any more, from the L2 tables |
//! | [`report`], [`text`], [`page`] | the result as data, for a terminal, as one HTML page |
//!
//! Invariants: time and memory are linear in the files found, whatever the images say (a chain is never walked once
//! per disk that shares it); every limit is in [`limits`]; the same tree gives the same report whatever the number of
//! threads.

#![forbid(unsafe_code)]

mod crawl;
mod deep;
mod graph;
pub mod history;
mod human;
mod image;
mod model;
pub mod page;
pub mod report;
mod risk;
mod stats;
pub mod text;
mod times;

use std::path::PathBuf;
use std::sync::Arc;

pub use report::Report;
pub use risk::{RiskKind, Severity};
pub use times::TimeSource;

/// The limits of a survey.
pub mod limits {
    /// Most images taken into one survey; what is found beyond is counted and left out.
    pub const IMAGES_MAX: usize = 1_000_000;
    /// Deepest directory that is entered, counted from the directory named.
    pub const DEPTH_MAX: usize = 64;
    /// Paths listed of each sort of thing that was left out; all are counted.
    pub const LISTED_MAX: usize = 100;
    /// Most threads.
    pub const THREADS_MAX: usize = 64;
}

/// What to look at, and how.
#[derive(Clone)]
pub struct SurveyOptions {
    /// The directories (or single images) to look at.
    pub roots: Vec<PathBuf>,
    /// Directories beside them in which backing files may lie.
    pub allow_backing: Vec<PathBuf>,
    /// Threads that look at files.
    pub threads: usize,
    /// Chains of more layers than this are called long.
    pub long_chain: usize,
    /// Read L2 tables too, to find what no disk can see any more: takes time in proportion to the tables.
    pub deep: bool,
    /// Called now and then, from several threads.
    pub progress: Option<Arc<dyn Fn(Progress) + Send + Sync>>,
}

impl Default for SurveyOptions {
    fn default() -> Self {
        // libvirt refuses longer chains.
        Self {
            roots: Vec::new(),
            allow_backing: Vec::new(),
            threads: 2,
            long_chain: 200,
            deep: false,
            progress: None,
        }
    }
}

/// How far a survey has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Progress {
    /// Files looked at.
    pub files: u64,
    /// Images among them.
    pub images: u64,
}

/// Why there is no survey.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SurveyError {
    /// What is to be looked at, or allowed, does not exist or cannot be entered.
    #[error(transparent)]
    Directory(#[from] vmstrata_store::GateError),
}

/// Looks at all images below the roots.
///
/// # Errors
/// A root or an allowed directory that cannot be resolved; everything below them that cannot be read is part of the
/// report.
pub fn survey(options: &SurveyOptions) -> Result<Report, SurveyError> {
    let (mut found, gate) = crawl::crawl(options)?;
    let deep = options.deep.then(|| {
        let layers = deep::read(&graph::Graph::new(&found, options.long_chain), &gate, options.threads);
        deep::blame(&mut found, &layers);
        layers
    });
    let graph = graph::Graph::new(&found, options.long_chain);
    Ok(report::build(options, &found, &graph, deep.as_deref()))
}
