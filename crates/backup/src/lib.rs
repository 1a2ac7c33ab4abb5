//! What changed between two states of a disk, and copies of frozen states: as backups, which are a qcow2 file of the clusters that
//! matter and a manifest of checksums beside it, and converted.
//!
//! ```text
//!   full:         Disk::extents ─┐            ┌─► readers (threads): Disk::read, SHA-256, compression
//!                                ├─► Plan ────┤        │ regions, in order
//!   incremental:  Diff ──────────┘            └─► plain or packed writer ─► file or pipe ─► Manifest
//!
//!   convert:  Disk::extents, or a stream ─► pieces ─► threads that read, compress and write ─► packed writer, or the bytes
//!
//!   restore:  files, oldest first ─► their regions laid over each other, each checked ─► packed writer
//! ```
//!
//! | module | what it knows |
//! |---|---|
//! | [`diff`](Diff) | what changed between two states |
//! | `plan` | which clusters are stored, two bits each |
//! | `region`, `pipeline` | the unit of work and of checksums, and how many threads keep it in order |
//! | `plain` | an uncompressed file, written from front to back: the tables are known beforehand |
//! | `packed` | a file of which shows in the making what it stores: each table follows its clusters, the header comes last |
//! | `content` | what one file stores, whatever lies below it |
//! | [`manifest`](Manifest), `coming` | what a backup is, and the checksums of all of it; how it gets its name with the file |
//! | `raw_disk` | a disk as its bytes |
//! | `verify`, `restore` | comparing with the manifest, and making a disk again |
//! | [`mod@convert`], `turns` | makes an image or a raw disk of any disk, as fast as the host can |
//! | [`rebase`](Rebase) | moves a disk onto another base, content unchanged |
//!
//! Only frozen layers are read, so a backup is a state of the disk however long it takes. An incremental backup has the
//! previous one as its backing file: stock tools read the two as one disk.
//!
//! Invariant: under a backup's name there is either what was there before or a whole backup, and its manifest is there: under
//! its own name, or (until the process that made it comes to that) under one that it has first.

#![forbid(unsafe_code)]

mod before;
mod coming;
mod compress;
mod content;
mod convert;
mod diff;
mod digest;
mod fault;
mod head;
mod manifest;
mod packed;
mod pipeline;
mod plain;
mod plan;
mod raw_disk;
mod rebase;
mod region;
mod restore;
mod run;
mod target;
mod turns;
mod verify;

use std::ffi::OsString;
use std::io::Write;
use std::path::PathBuf;
use std::time::Duration;

pub use before::check;
pub use convert::{ConvertOptions, ConvertReport, ConvertSource, ConvertTarget, convert, data_bytes};
pub use diff::{ChangedBytes, Diff, DiffExtent, DiffExtents, DiffKind, DiffOptions};
pub use fault::BackupFault;
pub use manifest::{
    Digest, FileSum, Link, MANIFEST_SUFFIX, Manifest, ManifestDraft, RegionSum, State, manifest_path,
};
pub use rebase::{Rebase, RebaseOptions, rebased_from};
pub use restore::{RestoreFormat, RestoreOptions, restore};
pub use run::backup;
pub use verify::verify;
use vmstrata_disk::snapshot;
use vmstrata_qcow2::CompressionType;

/// Bytes of the disk in a region, the unit of work and of checksums: a multiple of every cluster size.
const REGION_BYTES: u64 = 4 << 20;

/// Called while a job runs with bytes done and bytes to do. The job stops when it answers false.
pub type Watch<'a> = &'a mut dyn FnMut(u64, u64) -> bool;

/// How to make a backup.
#[derive(Clone, Debug, Default)]
pub struct BackupOptions {
    /// Store only what changed since this state.
    pub since: Option<snapshot::State>,
    /// For an incremental backup: the name of its backing file, as stored.
    pub backing_name: Option<OsString>,
    /// For an incremental backup: the manifest of the backup it builds upon.
    pub previous: Option<Manifest>,
    /// Compress clusters; a pipe takes no compressed backup.
    pub compression: Option<CompressionType>,
    /// Directories, beside that of the state, in which backing files may lie.
    pub allow_backing: Vec<PathBuf>,
    /// Bytes read per second at most.
    pub bytes_per_second: Option<u64>,
    /// Threads that read, hash and compress; 0 for as many as suit the host.
    pub threads: usize,
}

/// Where a backup goes.
pub enum BackupTarget<'a> {
    /// A file, with its manifest beside it.
    File {
        /// Its name.
        path: PathBuf,
        /// Replace what is there.
        replace: bool,
    },
    /// Anything that takes bytes in order.
    Stream(&'a mut dyn Write),
}

impl std::fmt::Debug for BackupTarget<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::File { path, replace } => {
                f.debug_struct("File").field("path", path).field("replace", replace).finish()
            }
            Self::Stream(_) => f.write_str("Stream"),
        }
    }
}

/// What a job did.
#[derive(Clone, Debug)]
pub struct BackupReport {
    /// What was written, or verified.
    pub manifest: Manifest,
    /// Bytes of the disk that were read from it and stored.
    pub stored_bytes: u64,
    /// How long it took.
    pub took: Duration,
}
