//! Checking one layer, and mending it: `qemu-img check`, with several threads and bounded memory.
//!
//! ```text
//!   refcounts    load the refcount table, and a bit "is one" per cluster
//!   roots        header, L1 tables, snapshots, bitmaps ──► counts     │ L2 tables, each once
//!   entries      L2 tables, read in runs, on all CPUs  ──► counts  ◄──┘
//!   compare      counts against refcount blocks        ──► CheckReport
//!   repair       refcounts ─flush─► tables ─flush─► dirty and corrupt bits, then all over again
//! ```
//!
//! The numbers of a [`CheckReport`] agree with those of `qemu-img check` (QEMU 7.2). Deliberate differences:
//!
//! - **Stricter.** Structures on one cluster whose refcount "rightly" counts both ([`FindingKind::Overlap`]); a
//!   copied flag without an offset; a zero flag in a version 2 image. Stock tools call these clean, but the first
//!   loses data on the next write and reading the last is an error everywhere.
//! - **Not followed.** An L1 entry without an offset but with flags (stock reads the header as an L2 table); more
//!   than 32 MiB of L2 tables off a cluster boundary.
//! - **Further.** Where snapshots or bitmaps are not readable stock gives up; this check goes on with the rest,
//!   reports a check error, and refuses to repair: what they hold seems leaked.
//! - **Once.** A refcount block whose table entry is misaligned is one corruption; stock adds a check error for
//!   each cluster it would cover.
//!
//! A repair ([`Repair`]) goes past stock where bits can be cleared without changing what anyone reads (reserved
//! bits, stray copied flags), and moves an L2 table away from guest data that lies on the same cluster. What it
//! cannot mend, such as clusters past the end of a file that was cut short, stays as it is and stays reported.
//!
//! Work is bounded for hostile images: every table is read once however many entries lead to it, holes are not
//! read, and memory has a limit ([`CheckOptions::memory_bytes_max`]).

mod compare;
mod counts;
mod entries;
mod finding;
mod image;
mod journal;
mod read;
mod refcounts;
mod repair;
mod report;
mod roots;
mod scan;
mod snapshots;

use std::collections::HashSet;
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

pub use finding::{Finding, FindingKind, Severity};
pub use report::CheckReport;
use vmstrata_store::{CacheMode, Gate, Store};
use vmstrata_types::HostOffset;

use crate::chain::Unflushed;
use crate::error::Result;
use crate::opener::{LocalFiles, Opener, Role};

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
pub struct CheckOptions {
    /// What to mend.
    pub repair: Repair,
    /// Take no lock, and so look at an image that someone is writing: what is found may not be so. Not for repairs.
    pub force_share: bool,
    /// Findings to return; all are counted.
    pub findings_max: usize,
    /// Where the journals of killed processes are.
    pub journal_dir: Option<PathBuf>,
    /// What happens to the unflushed writes of a killed process that a repair cannot take up.
    pub unflushed: Unflushed,
    /// Directories, beside the image's own, in which backing files may lie: taking a journal up may have to read them.
    pub allow_backing: Vec<PathBuf>,
    /// Bytes of memory for counting references, about one per cluster in use.
    pub memory_bytes_max: u64,
    /// Called now and then, from several threads.
    pub progress: Option<Arc<dyn Fn(Progress) + Send + Sync>>,
}

impl Default for CheckOptions {
    fn default() -> Self {
        Self {
            repair: Repair::None,
            force_share: false,
            findings_max: 100,
            journal_dir: None,
            unflushed: Unflushed::Keep,
            allow_backing: Vec::new(),
            memory_bytes_max: 1 << 30,
            progress: None,
        }
    }
}

impl fmt::Debug for CheckOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CheckOptions")
            .field("repair", &self.repair)
            .field("force_share", &self.force_share)
            .field("journal_dir", &self.journal_dir)
            .field("unflushed", &self.unflushed)
            .field("findings_max", &self.findings_max)
            .field("memory_bytes_max", &self.memory_bytes_max)
            .finish_non_exhaustive()
    }
}

/// Checks the qcow2 file at `path`, its backing files not included, and mends it if asked to.
///
/// Without repair the file is locked as a reader locks it, with repair as a writer: a running QEMU, or a server
/// that has it open for writing, is in the way of both.
///
/// Where the process that wrote the image was killed, its journal counts: what it leads to is not leaked, and a repair takes it
/// up first.
///
/// # Errors
/// A journal that a repair cannot take up; a file that cannot be opened, is locked, is not qcow2, or whose header no one could use; an image that needs
/// more memory than allowed; whatever the store reports. Damage that a check can describe is not an error.
pub fn check(path: &Path, options: &CheckOptions) -> Result<CheckReport> {
    let role = match options.repair {
        Repair::None if options.force_share => Role::Inspected,
        Repair::None => Role::Frozen,
        Repair::Leaks | Repair::All => Role::Active(CacheMode::Host),
    };
    let repairs = options.repair != Repair::None;
    let mut opened = LocalFiles.open(path, role, &Gate::unrestricted())?;
    let mut pending = journal::pending(&opened, options).map_err(|error| error.in_file(path))?;
    if repairs && let Some(left) = &pending {
        // Opening the disk takes the lock itself.
        drop(opened);
        left.take_up(path, options)?;
        opened = LocalFiles.open(path, role, &Gate::unrestricted())?;
        pending = None;
    }
    let journal_missing = pending.as_ref().is_some_and(|left| left.clusters.is_none());
    let clusters = pending.and_then(|left| left.clusters).unwrap_or_default();
    let report = check_with_journal(&*opened.store, clusters, options);
    report.map(|report| CheckReport { journal_missing, ..report }).map_err(|error| error.in_file(path))
}

/// Checks the image in a store that is open, and locked if need be.
///
/// # Errors
/// As [`check`].
pub fn check_store(store: &dyn Store, options: &CheckOptions) -> Result<CheckReport> {
    check_with_journal(store, HashSet::new(), options)
}

/// As [`check_store`]; `journaled` are host clusters that belong to a journal.
fn check_with_journal(
    store: &dyn Store,
    journaled: HashSet<HostOffset>,
    options: &CheckOptions,
) -> Result<CheckReport> {
    match options.repair {
        Repair::None => {
            let image = image::Image { journaled, ..image::Image::read(store, options)? };
            Ok(scan::scan(&image)?.report)
        }
        Repair::Leaks | Repair::All => repair::repair(store, options),
    }
}

/// Makes the refcounts of an image right that is marked dirty, as the first thing after opening it for writing.
///
/// The store must be open for writing, and locked. When it returns, the dirty bit is cleared if all is well; the
/// report says if something is left that cannot be mended.
///
/// # Errors
/// As [`check`].
pub(crate) fn repair_dirty(store: &Arc<dyn Store>) -> Result<CheckReport> {
    check_store(&**store, &CheckOptions { repair: Repair::All, ..CheckOptions::default() })
}
