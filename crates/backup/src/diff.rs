//! What changed between two states of a chain.
//!
//! ```text
//!        old          new           a state is a frozen layer; the two stand on a common one
//!         │            │
//!      o1 o0        n2 n1 n0        layers of one state only, newest first: their tables are read
//!         └─── common ───┘          what lies here is the same file at the same place for both: not read
//! ```
//!
//! A cluster can differ only where a layer above the common one has it, or where a shorter layer hides the common
//! part from one of the states (past a layer's end, what lies below it does not show). So a diff reads the L1 tables of those layers and
//! the L2 tables that exist in them, region by region, and costs what changed, whatever the disk's size and the
//! chain's length. What the common part holds is asked only where the answer depends on it: zeros of a layer above are
//! no change where zeros were before.
//!
//! Place in the data flow: beside the engine, for `vmstrata diff` and for incremental backups. Memory is bounded by a
//! region, not by what is found.
//!
//! Invariants: extents are sorted, do not touch unless their kinds differ, and lie on the newer state; where none is,
//! both states read alike. Past its end the older state counts as zeros.

mod bytes;
mod classify;
mod region;
mod states;

use std::collections::VecDeque;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use vmstrata_disk::{Disk, Format, FrozenLayer, OpenOptions, Resources, Result, directory_of};
use vmstrata_types::{ClusterBits, GuestRange};

pub use bytes::ChangedBytes;
pub(crate) use bytes::Looked;
pub use classify::DiffExtents;
use states::States;

/// How to compare.
#[derive(Clone, Debug, Default)]
pub struct DiffOptions {
    /// Directories, beside those of the two states, in which backing files may lie.
    pub allow_backing: Vec<PathBuf>,
    /// Count clusters that read as zeros in both states as changed, too, where they come from different places.
    pub allocation: bool,
    /// The newer state's format; if `None`, what the older one's chain says if it stands on it, or else its first bytes, which the
    /// guest of a raw disk could write.
    pub format: Option<Format>,
    /// The older state's, likewise.
    pub old_format: Option<Format>,
}

/// How the newer state has what changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum DiffKind {
    /// As bytes.
    Data,
    /// As zeros, without being read.
    Zero,
}

/// A run of bytes that may have changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DiffExtent {
    /// Which bytes of the newer state.
    pub range: GuestRange,
    /// How it has them.
    pub kind: DiffKind,
}

/// Two states of a chain, ready to be compared; see the module documentation.
#[derive(Clone, Debug)]
pub struct Diff {
    states: States,
    options: DiffOptions,
    resources: Arc<Resources>,
}

impl Diff {
    /// Finds the layers between the states whose newest layers are the files `old` and `new`, either of which may be
    /// the older one.
    ///
    /// Reads headers only, down to the first common layer.
    ///
    /// # Errors
    /// A file that cannot be opened, is not allowed, or is being written; states that have no layer in common.
    pub fn open(old: &Path, new: &Path, options: &DiffOptions, resources: &Arc<Resources>) -> Result<Self> {
        let states = States::open(old, new, options, resources)?;
        Ok(Self { states, options: options.clone(), resources: Arc::clone(resources) })
    }

    /// Virtual size of the older state in bytes.
    pub fn old_size(&self) -> u64 {
        self.states.old.size
    }

    /// Virtual size of the newer state in bytes.
    pub fn new_size(&self) -> u64 {
        self.states.new.size
    }

    /// The smallest cluster or subcluster size of the layers between the states: extents begin and end on its multiples, but for the
    /// ends of layers.
    pub fn unit(&self) -> ClusterBits {
        self.states.unit
    }

    /// What may have changed, by what the tables say.
    pub fn extents(&self) -> DiffExtents {
        DiffExtents::new(self.clone())
    }

    /// What has changed, by what the bytes are: clusters that were written again with what they held drop out.
    ///
    /// # Errors
    /// A state that cannot be opened for reading.
    pub fn changed_bytes(&self) -> Result<ChangedBytes> {
        ChangedBytes::new(self)
    }

    /// The disk whose newest layer is `layer`.
    fn disk(&self, layer: &FrozenLayer) -> Result<Arc<Disk>> {
        let mut allow_backing = self.options.allow_backing.clone();
        allow_backing.extend([&self.states.old, &self.states.new].map(|side| directory_of(&side.path)));
        let format = Some(layer.format());
        let options = OpenOptions {
            read_only: true,
            allow_backing,
            format,
            format_is_exact: true,
            ..OpenOptions::default()
        };
        Disk::open(layer.path(), &options, &self.resources)
    }
}

/// Differences found and not yet handed out, sorted; the last one is kept back, as what is found next may continue it.
#[derive(Debug, Default)]
struct Found {
    extents: VecDeque<DiffExtent>,
    failed: bool,
}

impl Found {
    /// Appends `extent`, merging it with the last one where they touch and are alike.
    fn push(&mut self, extent: DiffExtent) {
        match self.extents.back_mut() {
            Some(last) if last.range.end() == extent.range.start && last.kind == extent.kind => {
                last.range.len += extent.range.len;
            }
            _ => self.extents.push_back(extent),
        }
    }
}

/// A search for differences, piece by piece.
trait Search {
    /// Looks into the next piece; false at the end.
    fn advance(&mut self) -> Result<bool>;

    fn found(&mut self) -> &mut Found;

    /// The next difference; nothing more after an error.
    fn next_found(&mut self) -> Option<Result<DiffExtent>> {
        while self.found().extents.len() < 2 && !self.found().failed {
            match self.advance() {
                Ok(true) => {}
                Ok(false) => break,
                Err(error) => {
                    self.found().failed = true;
                    return Some(Err(error));
                }
            }
        }
        let found = self.found();
        if found.failed { None } else { found.extents.pop_front().map(Ok) }
    }
}
