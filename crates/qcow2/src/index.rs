//! The index on disk: a frozen chain's map and layer table, as pages of bytes.
//!
//! An index answers for a frozen layer and everything below it. It lies in pages of 4 KiB past the allocated end of the
//! layer's file, or in a sidecar file; `docs/format.md` has every byte of it.
//!
//! ```text
//!   header extension ──► root ─┬─► map tree:      inner pages ──► leaves, 512 words each
//!   (or start of sidecar)      ├─► fine tree:     inner pages ──► leaves for parts of the units that are split
//!                              ├─► delta records: inner pages ──► runs of what one layer changed
//!                              └─► layer table:   inner pages ──► records of the layers, base first
//! ```
//!
//! Indices of one chain share pages: a new one writes what its layer changed, and points into the files of older layers
//! for the rest. A [`PagePointer`] carries the checksum of what it points to, so a page that was
//! overwritten, torn, or left from another time is noticed when the pointer is followed.
//!
//! | module | bytes of |
//! |---|---|
//! | `pointer` | pointers, inner pages, checksums |
//! | `root` | the page where an index starts |
//! | `delta` | runs of what one layer changed |
//! | `table` | records of layers |
//! | `link` | the header extension that leads to the root |
//!
//! Invariants: nothing here panics on any input, and a parsed root bounds the number of pages that reading the index
//! can take. Integers are little-endian, as map words are in memory; only the header extension follows the header's order.

mod delta;
mod link;
mod pointer;
mod root;
mod table;

use thiserror::Error;
use vmstrata_types::LayerIndex;

pub use delta::{DeltaPointer, DeltaRun, MAX_DELTA_RUNS, MAX_DELTAS, PAGE_RUNS, decode_runs, encode_runs};
pub use link::{IndexLink, link_place};
pub use pointer::{ChainId, PagePointer, decode_inner, encode_inner};
pub use root::{MAGIC, Root};
pub use table::{BackingFormat, LayerRecord, RecordBacking, RecordTables, Stamp, TablePage, pack};

/// Bytes of a page.
pub const PAGE_LEN: usize = 4096;
/// A page's bytes.
pub type Page = [u8; PAGE_LEN];
/// Pointers in an inner page.
pub const FANOUT: usize = PAGE_LEN / PagePointer::LEN;
/// Map words in a leaf.
pub const LEAF_WORDS: usize = PAGE_LEN / 8;
/// Most leaves of each tree of an index: 128 TiB of disk in clusters of 64 KiB, 8 TiB in subclusters of 4 KiB. Larger disks get no
/// index, so that the pointers of a tree never take more than 64 MiB.
pub const MAX_LEAVES: u64 = 1 << 22;
/// The version this crate writes. It reads all up to that.
pub const VERSION: u32 = 2;

/// Where a layer keeps the pages of its own index.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Home {
    /// It has none.
    #[default]
    None,
    /// In its own file, past the allocated end.
    File,
    /// In the sidecar beside its file.
    Sidecar,
}

/// Why bytes are no index, or not the part of one that they should be.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum IndexError {
    /// The root does not start as one.
    #[error("there is no index")]
    Missing,
    /// A later format.
    #[error("index version {found} is not known, only versions up to {VERSION} are")]
    Version {
        /// The version the root claims.
        found: u32,
    },
    /// Other bytes than those the checksum was made of.
    #[error("{what}: the checksum does not match")]
    Checksum {
        /// Which page.
        what: &'static str,
    },
    /// A number that cannot be.
    #[error("{field}: {value} cannot be")]
    Field {
        /// The field.
        field: &'static str,
        /// What is in it.
        value: u64,
    },
    /// A split word, and no leaf of the fine tree that says of what.
    #[error("fine leaf {leaf} is missing, though a word above it is split")]
    FineLeaf {
        /// Its number.
        leaf: u64,
    },
    /// A pointer or word that names a layer above the index.
    #[error("layer {layer} is named, which the index does not answer for")]
    Layer {
        /// The layer.
        layer: LayerIndex,
    },
}

fn wrong<T>(field: &'static str, value: impl Into<u64>) -> Result<T, IndexError> {
    Err(IndexError::Field { field, value: value.into() })
}

/// Little-endian numbers at byte positions of a page.
mod le {
    pub(super) fn u16(bytes: &[u8], at: usize) -> u16 {
        u16::from_le_bytes(chunk(bytes, at))
    }

    pub(super) fn u32(bytes: &[u8], at: usize) -> u32 {
        u32::from_le_bytes(chunk(bytes, at))
    }

    pub(super) fn u64(bytes: &[u8], at: usize) -> u64 {
        u64::from_le_bytes(chunk(bytes, at))
    }

    pub(super) fn chunk<const N: usize>(bytes: &[u8], at: usize) -> [u8; N] {
        *bytes[at..].first_chunk().expect("the caller knows how long the structure is")
    }
}

#[cfg(test)]
mod tests;
