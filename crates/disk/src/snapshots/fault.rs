//! What can be wrong with a snapshot, beside what can go wrong with any file.

use std::io;
use std::path::PathBuf;

use thiserror::Error;

use super::hold::Held;
use crate::refs::Holder;

/// Why a snapshot cannot be taken, found or used as asked.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum SnapshotFault {
    /// A path that ends in a symbolic link.
    #[error(
        "it is a symbolic link: name the file it leads to, because tools look for the layers below beside the name they are given"
    )]
    SymbolicLink,
    /// A raw disk whose path is to stay raw.
    #[error(
        "it is a raw disk, and a snapshot makes its path a qcow2 overlay on the raw file: what opens the path as raw then reads the overlay's tables. If the path may become qcow2, take its first snapshot with `vmstrata snapshot create --convert-raw`"
    )]
    StaysRaw,
    /// A disk that is given twice for one snapshot.
    #[error("it is given twice: one snapshot takes each disk once")]
    Twice,
    /// Neither a file nor a link.
    #[error("it is not a regular file: only files can get a second name, which is what a snapshot is")]
    NotAFile,
    /// The name of the snapshot's file is taken.
    #[error("a snapshot's file {} exists already: choose another name, or see with `vmstrata snapshot list --all` whether it is left over and `vmstrata gc` removes it", path.display())]
    Exists {
        /// The file.
        path: PathBuf,
    },
    /// The disk has a snapshot of that name, under whatever file name.
    #[error("the disk has a snapshot {name:?} already, its file is {}: choose another name", layer.display())]
    NameTaken {
        /// The name.
        name: String,
        /// The layer that has it.
        layer: PathBuf,
    },
    /// The file system refuses a second name for the file.
    #[error("cannot give the file the second name {}: {source}; a snapshot needs a file system with hard links (ext4, xfs, btrfs and NFS have them, FAT and some FUSE file systems do not) and a file that is not immutable", path.display())]
    NoLinks {
        /// The second name.
        path: PathBuf,
        /// What the kernel said.
        source: io::Error,
    },
    /// The path leads to another file than it did.
    #[error("the file was replaced by another one meanwhile: nothing was changed")]
    Replaced,
    /// Someone writes the disk.
    #[error("{}", holder.advice())]
    InUse {
        /// Who.
        holder: Holder,
    },
    /// A disk that stands on it is in use.
    #[error("{} stands on it and is in use by {by}, which would no longer find it: stop that first (disks made by `vmstrata snapshot clone` stand on a snapshot instead, and are never in the way)", image.display())]
    StoodOnInUse {
        /// An image that stands on it.
        image: PathBuf,
        /// Who uses it, or one that stands on it in turn.
        by: String,
    },
    /// No snapshot of that name.
    #[error("it has no snapshot {name:?}{}", known(have))]
    NoSuchSnapshot {
        /// The name.
        name: String,
        /// The names there are, newest first.
        have: Vec<String>,
    },
    /// A snapshot that nothing may drop.
    #[error(transparent)]
    Held(Held),
    /// A snapshot that is no state any more.
    #[error("its snapshot {name} is being deleted: it cannot be held")]
    BeingDeleted {
        /// Its name.
        name: String,
    },
    /// A text that is no tag.
    #[error("{tag:?} is no tag of a hold: up to 100 of A-Z a-z 0-9 . _ -")]
    Tag {
        /// The text.
        tag: String,
    },
    /// No hold of that tag.
    #[error("it is not held under {tag:?}: {}", if have.is_empty() { "nothing holds it".to_owned() } else { format!("its holds are {}", have.join(", ")) })]
    NoSuchHold {
        /// The tag.
        tag: String,
        /// The tags there are.
        have: Vec<String>,
    },
    /// A layer that its last writer has not finished.
    #[error("the snapshot's file {} is not finished: if it is being taken, try again in a moment; after a crash, open the disk for writing once, with `vmstrata serve` or `vmstrata snapshot create`", layer.display())]
    Unfinished {
        /// The layer.
        layer: PathBuf,
    },
    /// A file outside the directory in which its backing file's relative name holds.
    #[error(
        "the file to keep must be in the disk's own directory, where the names of the layers below it hold"
    )]
    KeptElsewhere,
    /// Something has the name already.
    #[error("{} exists already: name a file to keep that does not", path.display())]
    KeepExists {
        /// The file.
        path: PathBuf,
    },
    /// A second disk of a group could not be changed after the first was.
    #[error("{source}; of the group, these have their snapshot already: {}", done.join(", "))]
    GroupBroken {
        /// Disks that were changed.
        done: Vec<String>,
        /// What went wrong with the next one.
        source: Box<crate::Error>,
    },
}

crate::error::fault!(SnapshotFault);

/// What went wrong with one disk of a group of which those in `done` have their snapshot.
pub(crate) fn group_broken(done: Vec<String>, error: crate::Error) -> crate::Error {
    if done.is_empty() {
        return error;
    }
    SnapshotFault::GroupBroken { done, source: Box::new(error) }.into()
}

fn known(have: &[String]) -> String {
    const SHOWN: usize = 5;
    match have {
        [] => ": none of the layers below it is named".to_owned(),
        names if names.len() <= SHOWN => format!(", it has {}", names.join(", ")),
        names => format!(", it has {} and {} more", names[..SHOWN].join(", "), names.len() - SHOWN),
    }
}
