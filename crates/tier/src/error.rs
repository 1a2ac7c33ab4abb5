//! What a tier refuses, or could not do.

use std::io;
use std::path::{Path, PathBuf};

use thiserror::Error;
use vmstrata_repo::ObjectName;

use crate::head::{EpochNumber, Head, HeadNumber, OBJECTS_MAX, ObjectId};

/// Shorthand for results of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// See the module documentation.
#[derive(Debug, Error)]
pub enum Error {
    /// The repository did not do it, or did and could not say so.
    #[error(transparent)]
    Repository(#[from] vmstrata_repo::Error),
    /// The disk could not be read.
    #[error(transparent)]
    Disk(#[from] vmstrata_disk::Error),
    /// A layer that would be as large as it likes.
    #[error("{}: its L1 table names more L2 tables than the file has clusters", layer.display())]
    SharedTables {
        /// The layer.
        layer: PathBuf,
    },
    /// More than can be shipped as one layer.
    #[error("the state has data in more than {clusters} clusters")]
    TooLarge {
        /// The most there can be.
        clusters: usize,
    },
    /// A name, or labels, that no snapshot can have.
    #[error(transparent)]
    Unnamable(#[from] vmstrata_qcow2::SnapshotInfoError),
    /// A snapshot's name that another one has.
    #[error("{repository}: a snapshot '{name}' is there already")]
    NameTaken {
        /// The repository.
        repository: String,
        /// The name.
        name: String,
    },
    /// More snapshots than may wait until they are published.
    #[error("{}: {most} snapshots wait until they are published, which is the most", file.display())]
    TooManyPending {
        /// The file that has them.
        file: PathBuf,
        /// How many may.
        most: usize,
    },
    /// No state of that name, or none as old as that.
    #[error("{repository}: {why}")]
    NoState {
        /// The repository.
        repository: String,
        /// What there is.
        why: String,
    },
    /// A state that a disk cannot be rebased onto.
    #[error("cannot rebase onto {onto}: {why}")]
    OtherBase {
        /// What was asked for.
        onto: String,
        /// What is wrong with it.
        why: String,
    },
    /// Whoever wanted it does not any more.
    #[error("it was given up")]
    GivenUp,
    /// A head or a pin that is not what a process wrote.
    #[error("{repository}: {name} is damaged: {why}")]
    Damaged {
        /// The repository.
        repository: String,
        /// The head or the pin.
        name: ObjectName,
        /// What is wrong with it.
        why: String,
    },
    /// A newest head that is not what a process wrote.
    #[error(
        "{repository}: {name}, the newest head, is damaged: {why}; where the NAS has lost what it acknowledged, `vmstrata tier takeover` goes back to the newest epoch that is whole"
    )]
    DamagedNewest {
        /// The repository.
        repository: String,
        /// The head.
        name: ObjectName,
        /// What is wrong with it.
        why: String,
    },
    /// A repository that has lost what it acknowledged.
    #[error(
        "{repository}: {name} is lost: {why}; so are all epochs that are kept: see what snapshots there are (`vmstrata snapshot list`)"
    )]
    Lost {
        /// The repository.
        repository: String,
        /// The newest head.
        name: ObjectName,
        /// What is wrong with it.
        why: String,
    },
    /// An epoch that no head may publish.
    #[error("{repository}: epoch {epoch} cannot be published: {why}")]
    BadEpoch {
        /// The repository.
        repository: String,
        /// Its number.
        epoch: EpochNumber,
        /// What is wrong with it.
        why: String,
    },
    /// A listing that cannot be relied on.
    #[error("{repository}: a listing lacks {name}, which was created before, or took too long")]
    OldListing {
        /// The repository.
        repository: String,
        /// An object that this process created.
        name: ObjectName,
    },
    /// A state that was deleted, or never published.
    #[error("{repository}: epoch {epoch} is not kept")]
    NotKept {
        /// The repository.
        repository: String,
        /// The epoch.
        epoch: EpochNumber,
    },
    /// The repository holds other bytes than were written.
    #[error("{repository}: {name} reads back otherwise than it was written")]
    Corrupt {
        /// The repository.
        repository: String,
        /// The object, which nothing names.
        name: ObjectName,
    },
    /// The host's cache of layers cannot be used.
    #[error("cannot use the cache {}: {source}", path.display())]
    Cache {
        /// Its directory, or a file in it.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// A cache that must not be filled with layers that stay.
    #[error("the cache {} takes {room} bytes of layers that stay, and these have {wanted}: give it more room (--tier-cache)", path.display())]
    NoRoom {
        /// Its directory.
        path: PathBuf,
        /// What was asked for.
        wanted: u64,
        /// What there is room for, beside reads of other layers.
        room: u64,
    },
    /// A layer that stays on this host.
    #[error("the layer {} is pinned to this host: let it go first (vmstrata replica unpin)", layer.layer_name())]
    Pinned {
        /// The layer.
        layer: ObjectId,
    },
    /// A repository without heads.
    #[error("{repository}: no disk is published here")]
    NoHead {
        /// The repository.
        repository: String,
    },
    /// Disks that cannot be published together.
    #[error("group '{group}': {why}")]
    NoGroup {
        /// The group's name.
        group: String,
        /// Why not.
        why: String,
    },
    /// Disks that are published together with others.
    #[error(
        "group '{group}': {} is published with it, and not here: serve all of its disks together", missing.join(", ")
    )]
    Incomplete {
        /// The group's name.
        group: String,
        /// The names of the others.
        missing: Vec<String>,
    },
    /// What is not done with disks of a group.
    #[error("group '{group}': {what}")]
    Grouped {
        /// The group's name.
        group: String,
        /// What it is, and what to do.
        what: &'static str,
    },
    /// Another copy of the disk publishes here.
    #[error(
        "{repository}: copy {} of the disk publishes here since generation {} ({}): if its host is off, take the disk over with `vmstrata tier takeover`",
        by.owner, by.generation, by.number
    )]
    Fenced {
        /// The repository.
        repository: String,
        /// What it published.
        by: Box<Head>,
    },
    /// A disk that its host does not offer any more.
    #[error("{repository}: the disk cannot be taken over from {from}: {why}")]
    NotHandedOver {
        /// The repository.
        repository: String,
        /// The head that was offered.
        from: HeadNumber,
        /// Why not.
        why: String,
    },
    /// A disk that cannot be offered to another host.
    #[error("{}: the disk cannot be handed over: {why}", repository.display())]
    NotOffered {
        /// The repository.
        repository: PathBuf,
        /// Why not.
        why: &'static str,
    },
    /// A disk that has another size than this host shows.
    #[error(
        "{}: it has {is} bytes now, and {shown} when this host began to stand by: remove it here, and add it again",
        path.display()
    )]
    Resized {
        /// The disk's path.
        path: PathBuf,
        /// Its bytes.
        is: u64,
        /// Those that this host's guests see.
        shown: u64,
    },
    /// A disk with as many layers as a head names.
    #[error("{repository}: the disk has {OBJECTS_MAX} layers, which is the most that are published")]
    TooManyLayers {
        /// The repository.
        repository: String,
    },
    /// A file of this host or of the disk's directory.
    #[error("{}: cannot {action}: {source}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// What was tried, as a verb with its object.
        action: &'static str,
        /// What the host said.
        source: io::Error,
    },
    /// The host's copy of a disk is in use.
    #[error("{}: another process has this copy of the disk open", copy.display())]
    Held {
        /// Its directory.
        copy: PathBuf,
    },
    /// An image that cannot become a layer as it is.
    #[error("{} cannot be tiered: {why}", path.display())]
    NotAttachable {
        /// The image.
        path: PathBuf,
        /// Why not.
        why: String,
    },
    /// A file in the place of the overlay that leads to the newest head.
    #[error(
        "{} is another image than the disk in {}: give it another name", path.display(), repository.display()
    )]
    Foreign {
        /// The file, which stays.
        path: PathBuf,
        /// The repository of the disk that has this path.
        repository: PathBuf,
    },
    /// A repository of another disk, by its name.
    #[error(
        "{repository} is that of the disk {has}: name a path that ends so, or another repository than for {name}"
    )]
    OtherDisk {
        /// The repository.
        repository: String,
        /// Whose it is.
        has: String,
        /// The file name of the disk's path.
        name: String,
    },
    /// A copy of a disk that lacks what it published.
    #[error(
        "{}: this copy of the disk is older than epoch {epoch}, which it published: it was restored or its layers are gone; take the disk over with `vmstrata tier takeover`",
        copy.display()
    )]
    OldCopy {
        /// Its directory.
        copy: PathBuf,
        /// What is published.
        epoch: EpochNumber,
    },
    /// A disk that nobody has to take over.
    #[error("{}: this host's copy publishes the disk: serve it", copy.display())]
    OwnCopy {
        /// Its directory.
        copy: PathBuf,
    },
    /// A copy that has what the repository lacks.
    #[error(
        "{}: this host has writes that epoch {epoch}, the newest, lacks: serve the disk and publish them (`vmstrata tier sync`)",
        copy.display()
    )]
    NotAllPublished {
        /// Its directory.
        copy: PathBuf,
        /// What is published.
        epoch: EpochNumber,
    },
    /// A disk of which somebody reads a state.
    #[error(
        "{repository}: {who} reads a state of the disk, which would be deleted: end that first, or release its pin with `vmstrata tier pins`"
    )]
    IsRead {
        /// The repository.
        repository: String,
        /// Who.
        who: String,
    },
    /// A disk whose layers are another disk's, too.
    #[error("{}: shares layers with the base that it was cloned from: detach it with --flatten", path.display())]
    Shared {
        /// The disk's path.
        path: PathBuf,
    },
    /// A disk that this host has not published.
    #[error(
        "{}: this host has no copy of the disk ({}): do it where the disk was served last, or take it over with `vmstrata tier takeover`",
        path.display(), copy.display()
    )]
    NoCopy {
        /// The disk's path.
        path: PathBuf,
        /// Where the copy would be.
        copy: PathBuf,
    },
    /// A disk that was tiered until a moment ago.
    #[error(
        "{} is an ordinary image since `vmstrata tier detach`, which did not end: run it again to delete the repository and this host's copy",
        path.display()
    )]
    Detached {
        /// The disk's path.
        path: PathBuf,
    },
    /// Epochs that cannot be held on this host.
    #[error("{}: its epochs cannot be held: {why}", repository.display())]
    NotHeld {
        /// The repository.
        repository: PathBuf,
        /// Why not.
        why: &'static str,
    },
    /// A disk whose engine has ended.
    #[error("{0}")]
    NotPublished(String),
}

impl Error {
    /// For `map_err`: `action` with the file at `path` failed.
    pub(crate) fn of_file<'a>(path: &'a Path, action: &'static str) -> impl FnOnce(io::Error) -> Self + 'a {
        move |source| Self::File { path: path.to_owned(), action, source }
    }

    /// For `map_err`: these disks cannot be this group.
    pub(crate) fn of_group(group: &str) -> impl FnOnce(String) -> Self {
        let group = group.to_owned();
        move |why| Self::NoGroup { group, why }
    }
}
