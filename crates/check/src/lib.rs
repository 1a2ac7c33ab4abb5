//! Whether one qcow2 file is sound, and its repair: `qemu-img check`, with several threads and bounded memory.
//!
//! ```text
//!   refcounts    load the refcount table, and a bit "is one" per cluster
//!   roots        header, L1 tables, snapshots, bitmaps ──► counts     │ L2 tables, each once
//!   entries      L2 tables, read in runs, on all CPUs  ──► counts  ◄──┘
//!   compare      counts against refcount blocks        ──► Report
//!   repair       refcounts ─flush─► tables ─flush─► dirty and corrupt bits, then all over again
//! ```
//!
//! The numbers of a [`Report`] agree with those of `qemu-img check` (QEMU 7.2). Deliberate differences:
//!
//! - **Stricter.** Structures on one cluster whose refcount "rightly" counts both ([`FindingKind::Overlap`]); a
//!   copied flag without an offset; a zero flag in a version 2 image. Stock tools call these clean, but the first
//!   loses data on the next write and reading the last is an error everywhere.
//! - **Kept.** The host clusters of a compressed cluster whose entry has a subcluster bitmap, which must be 0: everyone reads
//!   it, but stock tools count its clusters as leaked.
//! - **Not followed.** An L1 entry without an offset but with flags (stock reads the header as an L2 table); more
//!   than 32 MiB of L2 tables off a cluster boundary.
//! - **Further.** Where snapshots or bitmaps are not readable stock gives up; this check goes on with the rest,
//!   reports a check error, and refuses to repair: what they hold seems leaked.
//! - **Once.** A refcount block whose table entry is misaligned is one corruption; stock adds a check error for
//!   each cluster it would cover.
//!
//! A repair ([`Repair`]) goes past stock where bits can be cleared without changing what anyone reads (reserved
//! bits, stray copied flags, a subcluster that is data and zeros at once becomes zeros), and moves an L2 table away from guest data that lies on the same cluster. What it
//! cannot mend, such as clusters past the end of a file that was cut short, stays as it is and stays reported.
//!
//! Work is bounded for hostile images: every table is read once however many entries lead to it, holes are not
//! read, and memory has a limit ([`Options::memory_bytes_max`]).

#![forbid(unsafe_code)]

mod compare;
mod counts;
mod entries;
mod error;
mod finding;
mod image;
mod read;
mod refcounts;
mod repair;
mod report;
mod roots;
mod scan;
mod snapshots;

use std::collections::HashSet;
use std::fmt;
use std::sync::Arc;

pub use error::{Error, ErrorKind, Result};
pub use finding::{Finding, FindingKind, Severity};
pub use report::Report;
use vmstrata_store::Store;
use vmstrata_types::HostOffset;

/// What to mend.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum Repair {
    /// Nothing: the file is only read.
    #[default]
    None,
    /// Give leaked clusters back.
    Leaks,
    /// All that can be mended without losing data that is readable.
    All,
}

/// Which part of a check is under way.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Phase {
    /// Reading refcount blocks.
    Refcounts,
    /// Reading L2 tables.
    Tables,
    /// Writing.
    Repair,
}

/// How far a check has come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Progress {
    /// What is being done; phases come again after a repair.
    pub phase: Phase,
    /// Clusters of metadata done in this phase.
    pub done: u64,
    /// Clusters of metadata there are in this phase.
    pub total: u64,
}

/// How to check.
#[derive(Clone)]
pub struct Options {
    /// What to mend.
    pub repair: Repair,
    /// Findings to return; all are counted.
    pub findings_max: usize,
    /// Bytes of memory for counting references, about one per cluster in use.
    pub memory_bytes_max: u64,
    /// Host clusters that the journal of a killed process leads to: they are in use though the image does not refer to them.
    pub journaled: HashSet<HostOffset>,
    /// Called now and then, from several threads.
    pub progress: Option<Arc<dyn Fn(Progress) + Send + Sync>>,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            repair: Repair::None,
            findings_max: 100,
            memory_bytes_max: 1 << 30,
            journaled: HashSet::new(),
            progress: None,
        }
    }
}

impl fmt::Debug for Options {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Options").field("repair", &self.repair).finish_non_exhaustive()
    }
}

/// Checks the qcow2 image in `store`, backing files not included, and mends it if asked to.
///
/// The store must be locked against writers, and open for writing if the image is to be mended. A repair of all that can
/// be mended clears the dirty bit; the report says what is left.
///
/// # Errors
/// A file that is not qcow2, or whose header no one could use; an image that needs more memory than allowed; whatever the
/// store reports. Damage that a check can describe is not an error.
pub fn check(store: &dyn Store, options: &Options) -> Result<Report> {
    match options.repair {
        Repair::None => Ok(scan::scan(&image::Image::read(store, options)?)?.report),
        Repair::Leaks | Repair::All => repair::repair(store, options),
    }
}
