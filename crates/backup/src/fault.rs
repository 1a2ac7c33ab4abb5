//! What can be wrong with a backup, beside what can go wrong with any file.

use std::path::PathBuf;

use thiserror::Error;
use vmstrata_types::GuestOffset;

/// What is wrong with a backup, or with what was asked of one.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum BackupFault {
    /// A manifest that is none.
    #[error("not a backup's manifest: {reason}")]
    NotAManifest {
        /// Why not.
        reason: String,
    },
    /// A manifest of a format that this version does not know.
    #[error("the manifest has version {version}; this program knows versions up to {known}")]
    Version {
        /// The manifest's.
        version: u32,
        /// The newest one that is known.
        known: u32,
    },
    /// A backup in the place of the disk that it is of.
    #[error("is a file of the disk that is copied: choose another name")]
    OntoItself,
    /// A manifest that does not match its own checksum.
    #[error("the manifest is damaged: it does not match its own checksum")]
    ManifestDamaged,
    /// A file of another length than its manifest says.
    #[error("the backup is damaged: it has {found} bytes, its manifest says {expected}")]
    Length {
        /// Bytes of the file.
        found: u64,
        /// Bytes it should have.
        expected: u64,
    },
    /// A file that does not match its manifest.
    #[error("the backup is damaged: the file does not match its SHA-256 in the manifest")]
    FileSum,
    /// Disk content that does not match the manifest.
    #[error(
        "the backup is damaged: what it stores from byte {start} of the disk on does not match the manifest"
    )]
    RegionSum {
        /// Where the region begins.
        start: GuestOffset,
    },
    /// A header that does not match the manifest.
    #[error("the backup is damaged: its {what} does not match the manifest")]
    Header {
        /// Which part.
        what: &'static str,
    },
    /// The first of the files to restore is incremental.
    #[error("is an incremental backup on top of {}: name that one, and all before it, first", file.display())]
    NotFull {
        /// What it builds upon.
        file: PathBuf,
    },
    /// A full backup after another one.
    #[error("is a full backup: it stands alone")]
    NotIncremental,
    /// Two backups that do not follow one another.
    #[error("does not build upon {}: it was made on top of another backup", other.display())]
    OtherChain {
        /// The backup named before it.
        other: PathBuf,
    },
    /// An incremental backup that was made without the previous one's manifest.
    #[error(
        "does not say which backup it builds upon (it was made without --previous), so its chain cannot be verified: read it with stock tools instead"
    )]
    Unlinked,
    /// The previous backup is not one of the older state.
    #[error(
        "the previous backup is of {found:?}, not of {expected:?}, so changes since that would not fit on top of it"
    )]
    OtherState {
        /// What the previous backup is of.
        found: String,
        /// What it should be of.
        expected: String,
    },
    /// The backup has more regions than a manifest can list.
    #[error(
        "it would store more than {most} bytes, and a manifest lists no more: back up older states first, as one full and then incremental backups"
    )]
    TooMuch {
        /// Bytes of the disk, at least, that fit.
        most: u64,
    },
    /// The previous backup is of a disk of another size.
    #[error(
        "the previous backup is of a disk of {found} bytes, and the older state has {expected}: it is a backup of something else"
    )]
    OtherSize {
        /// Bytes of the disk that the previous backup is of.
        found: u64,
        /// Bytes of the older state.
        expected: u64,
    },
    /// The previous backup is of a state of the same name that was taken at another time.
    #[error(
        "the previous backup is of another {file:?}, taken at another time: of a snapshot of that name that was deleted since, or of another disk's. Make the backup of this one first"
    )]
    OtherSnapshot {
        /// The older state.
        file: String,
    },
    /// A device on which the disk does not fit.
    #[error("the device has {found} bytes, and the disk {size}")]
    DeviceTooSmall {
        /// Bytes of the device.
        found: u64,
        /// Bytes of the disk.
        size: u64,
    },
    /// A qcow2 image cannot go to a block device.
    #[error(
        "only a file holds an image; a block device, an export or a pipe gets a disk's bytes: choose the raw format"
    )]
    ImageOnDevice,
    /// A disk in raw format cannot be compressed.
    #[error("a disk in raw format is not compressed")]
    CompressedRaw,
    /// A device is overwritten only if the caller says so.
    #[error("all that is on it will be lost: say that it is to be replaced")]
    DeviceNotReplaced,
    /// A raw disk has no backing file.
    #[error("a disk in raw format has no backing file")]
    RawOnBacking,
    /// A stream is one raw disk.
    #[error("a stream has no layers: nothing lies below it")]
    StreamOnBacking,
    /// A stream is gone when it could be compared.
    #[error("a stream cannot be read again, so nothing can be compared with it")]
    StreamVerified,
    /// How much a stream has shows at its end.
    #[error("how large the disk is shows only at the end of the stream: convert it to a file first")]
    SizeUnknown,
    /// An incremental backup without a name for what it builds upon.
    #[error("an incremental backup needs the previous backup, or the name of its backing file")]
    NoBackingName,
    /// A full backup with a backing file.
    #[error("only an incremental backup has a backing file or a previous backup")]
    FullWithBacking,
    /// A compressed backup for a pipe.
    #[error(
        "a compressed backup cannot be written to a pipe, as its header is known last: write it to a file, or uncompressed, and compress the stream"
    )]
    CompressedStream,
    /// A disk of which more clusters are stored than a plan can hold.
    #[error("the disk ({size} bytes) has more clusters to store than a backup can hold")]
    TooLarge {
        /// Its virtual size.
        size: u64,
    },
    /// A file with more tables than it has room for: several entries lead to one.
    #[error("the backup is damaged: it has more tables than fit its file")]
    Tables,
    /// Two states of which nothing is the same file.
    #[error("has no layer in common with {}: only states of one disk, or of disks on one base, can be compared", other.display())]
    NothingInCommon {
        /// The other state's newest layer.
        other: PathBuf,
    },
    /// A disk that cannot be rebased.
    #[error(
        "its backing file is no published layer: the disk has snapshots of its own, or is no clone of a tiered disk's snapshot"
    )]
    NotOnBase,
    /// A disk of which a rebase would lose something.
    #[error("it has {0}, which would be lost")]
    WouldLose(&'static str),
    /// A copy that is none.
    #[error("reads otherwise than the disk at byte {at}: it is not taken")]
    ReadsOtherwise {
        /// Where.
        at: GuestOffset,
    },
    /// Nothing to restore from.
    #[error("no backup to restore from")]
    Nothing,
    /// The caller wanted no more.
    #[error("stopped before it was done")]
    Stopped,
}

impl From<BackupFault> for vmstrata_disk::Error {
    fn from(fault: BackupFault) -> Self {
        vmstrata_disk::ErrorKind::Fault(Box::new(fault)).into()
    }
}
