//! What can be wrong with a merge, beside what can go wrong with any file.

use std::path::PathBuf;

use thiserror::Error;

use crate::refs::Kept;
use crate::snapshots::Held;

/// Why layers cannot be dropped as asked.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum MergeFault {
    /// Layers that the chain does not have below its top.
    #[error(
        "it has layers 0 (the base) to {}, the last of which takes the writes: {} not below that",
        layers - 1,
        if first == last { format!("layer {first} is") } else { format!("layers {first} to {last} are") }
    )]
    Range {
        /// First layer asked for.
        first: usize,
        /// Last layer asked for.
        last: usize,
        /// Layers of the chain.
        layers: usize,
    },
    /// A file that is no layer of the chain below its top.
    #[error("it does not stand on {}: `vmstrata info --chain` lists the layers that it stands on", path.display())]
    NotALayer {
        /// The file.
        path: PathBuf,
    },
    /// Layers below the end of the disk's own history.
    #[error(
        "they belong to {disk}, which it was cloned from or made on: delete them there, or `vmstrata flatten` this disk"
    )]
    OfAnotherDisk {
        /// Its file name.
        disk: String,
    },
    /// A file with snapshots within it, which would read otherwise, or be lost with it.
    #[error(
        "{} has {count} internal snapshots, which need what is dropped: remove them with `qemu-img snapshot -d`, or make disks of them with `qemu-img convert -l`", path.display()
    )]
    InternalSnapshots {
        /// The file.
        path: PathBuf,
        /// How many.
        count: u32,
    },
    /// A target whose header cannot name another backing file by one sector's write.
    #[error(
        "its header has no room for the name of another backing file: copy it with `qemu-img convert`, or drop other layers"
    )]
    NoRoom,
    /// A file system without room for what would be copied.
    #[error(
        "there is no room for what is copied before anything is freed: {demand} bytes and {reserve} to spare, and {available} are free; make room, or drop other layers"
    )]
    NoSpace {
        /// Bytes to be copied.
        demand: u64,
        /// Bytes to be left to others.
        reserve: u64,
        /// Bytes that are free.
        available: u64,
    },
    /// A layer that a process writes, or was killed while it did.
    #[error("the process that wrote it did not close it: open the file for writing once, then try again")]
    Unclosed,
    /// A layer's refcounts are not to be relied on.
    #[error("it is marked dirty or corrupt: repair it with `vmstrata check --repair=all` first")]
    NeedsRepair,
    /// The layer to be copied into is in use by someone else.
    #[error("what is dropped would be copied into this layer, and it is in use by {by}: end that first")]
    TargetInUse {
        /// Who uses it.
        by: String,
    },
    /// What is above cannot be committed into the base of the dropped layers.
    #[error("what stays cannot be committed into it: {reason}")]
    NoCommit {
        /// What stands against it.
        reason: String,
    },
    /// The disk has other layers than when the merge began.
    #[error("the disk's layers have changed since the merge began: begin it again, what is copied stays")]
    LayersChanged,
    /// Not all who may need the files that are to go could be asked.
    #[error(
        "no file could be removed after that ({why}): mend this first, or keep the files (--keep-files, --remove none)"
    )]
    Overlooked {
        /// What stands against it.
        why: Kept,
    },
    /// A snapshot that nothing may drop.
    #[error(transparent)]
    Held(Held),
    /// Named snapshots would go, and losing them was not agreed to.
    #[error(
        "it would drop {}: --yes lets {} go (drop_snapshots=true in a job), --dry-run shows all that goes",
        plural("snapshot", names),
        if names.len() == 1 { "it" } else { "them" }
    )]
    LosesSnapshots {
        /// Their names, newest first.
        names: Vec<String>,
    },
    /// Another merge of the disk is under way.
    #[error("layers of this disk are being merged already")]
    Busy,
}

crate::error::fault!(MergeFault);

/// `snapshot a`, or `3 snapshots (a, b, c)`.
fn plural(what: &str, names: &[String]) -> String {
    const SHOWN: usize = 8;
    match names {
        [name] => format!("{what} {name}"),
        _ if names.len() <= SHOWN => format!("{} {what}s ({})", names.len(), names.join(", ")),
        _ => format!("{} {what}s ({}, and others)", names.len(), names[..SHOWN].join(", ")),
    }
}
