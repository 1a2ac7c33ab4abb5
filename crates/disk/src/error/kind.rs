//! What can go wrong, kind by kind.

use std::io;

use thiserror::Error as ThisError;
use vmstrata_qcow2::{EntryError, ImageFormat, ParseError};
use vmstrata_store::{FileError, GateError};
use vmstrata_types::{GuestRange, HostOffset, MAX_LAYERS};

/// What went wrong.
#[derive(Debug, ThisError)]
#[non_exhaustive]
pub enum ErrorKind {
    /// The host could not read, write or flush a file.
    #[error("cannot {action}: {source}")]
    Io {
        /// What was tried, as a verb with its object.
        action: &'static str,
        /// What the host said.
        source: io::Error,
    },
    /// The image breaks the format, or uses a part of it that is refused.
    #[error("{0}")]
    Format(#[from] ParseError),
    /// A table entry breaks the format.
    #[error("damaged {table} {entry}")]
    Entry {
        /// Which table: "L1 table" or "L2 table".
        table: &'static str,
        /// What is wrong with the entry.
        entry: EntryError,
    },
    /// A table entry points to bytes that the file does not have.
    #[error("{what} lies at {at} but the file ends at {file_len:#x}: the file was cut short")]
    Truncated {
        /// What the entry points to.
        what: &'static str,
        /// Where it should be.
        at: HostOffset,
        /// Bytes in the file.
        file_len: u64,
    },
    /// A compressed cluster that does not decompress to a whole cluster.
    #[error("compressed cluster does not decompress: the image is damaged")]
    Decompress,
    /// A cluster's refcount contradicts its use.
    #[error(
        "refcount of the cluster is {found}, its use needs {needed}: run `vmstrata check --repair=all` on it"
    )]
    Refcount {
        /// The refcount in the image.
        found: u64,
        /// What a consistent image would have.
        needed: &'static str,
    },
    /// Its last writer marked the image corrupt.
    #[error("the image is marked corrupt: repair it with `vmstrata check --repair=all` before writing to it")]
    MarkedCorrupt,
    /// A backing file may not be opened.
    #[error("{0}")]
    Gate(#[from] GateError),
    /// A file that cannot be used: another process holds it, for instance.
    #[error("{0}")]
    File(#[from] FileError),
    /// A backing file name that is not the path of a local file.
    #[error(
        "backing file name {name:?} uses {feature}, which is not supported: rebase it onto a plain file name"
    )]
    BackingName {
        /// The name in the image.
        name: String,
        /// What in it is not supported.
        feature: String,
    },
    /// A part of a file that the file does not have.
    #[error(
        "a json: description says that the layer reaches up to {end} of the file, which has {file_len:#x} bytes: mend the description (`qemu-img rebase -u`), or the file if it was cut short"
    )]
    Window {
        /// The least offset at which the part ends.
        end: HostOffset,
        /// Bytes in the file.
        file_len: u64,
    },
    /// A format that is neither qcow2 nor raw.
    #[error("backing format {name:?} is not supported (qcow2 and raw are)")]
    BackingFormat {
        /// The format in the image.
        name: String,
    },
    /// An image of a format that is not read, in the place of one whose format was not said.
    #[error(
        "it is a {format} image, which vmstrata does not read: convert it (`qemu-img convert -O qcow2 FILE NEW`); if these bytes are the disk itself, say format=raw (of a backing file `qemu-img rebase -u -F raw`)"
    )]
    Foreign {
        /// Its format.
        format: ImageFormat,
    },
    /// A raw file, of which there is nothing to check.
    #[error("this image format does not support checks: it is raw, and has no metadata")]
    NoMetadata,
    /// A write of an image's header to a raw disk whose format was not said.
    #[error(
        "the write would put the header of a {format} image on a disk that was probed as raw, and the next open would read it as that image; say format=raw to allow such writes"
    )]
    HeaderWrite {
        /// The format of the image.
        format: ImageFormat,
    },
    /// A disk that is said to be raw, whose file begins with a qcow2 header that vmstrata made.
    #[error(
        "it is said to be raw, and begins with a qcow2 header that vmstrata made: if a snapshot converted it, say format=qcow2; if its guest wrote that header, do not, and serve an overlay of it (`vmstrata create NEW --backing FILE --backing-format raw`)"
    )]
    SaidRaw,
    /// A chain that leads back into itself.
    #[error("the backing chain loops: this file is already layer {earlier} from the top")]
    Loop {
        /// Distance from the active layer at which the file was met first.
        earlier: usize,
    },
    /// An image whose backing file is the image itself.
    #[error(
        "the backing chain loops: the image names itself as its backing file; if you know the right one, `qemu-img rebase -u -b BACKING -F FORMAT FILE` names that"
    )]
    OwnBacking,
    /// A file that is to be replaced, and that another image needs.
    #[error("{} stands on it: replacing it would destroy that image; choose another name, or remove that image first", image.display())]
    StoodOn {
        /// An image that names it as its backing file.
        image: std::path::PathBuf,
    },
    /// A file that is to be written, and that another image needs as it is.
    #[error("{} stands on it and would read other data: for a disk to write to, make one on it (`vmstrata create NEW --backing FILE`, or `vmstrata snapshot clone` of a snapshot); to change this one, make that image stand alone (`vmstrata flatten`), delete it, or say --force", image.display())]
    IsBase {
        /// An image that names it as its backing file.
        image: std::path::PathBuf,
    },
    /// A file that is to be written.
    #[error("it is a published layer of a tiered disk, which never changes")]
    Published,
    /// A file that is to be written, and that only leads to what a tiered disk has published.
    #[error(
        "it is the path of a tiered disk, whose newest writes are elsewhere: serve it with its key tier=DIR; on another host, take it over first (`vmstrata tier takeover`)"
    )]
    TieredPath,
    /// More layers than can be numbered.
    #[error("the backing chain is longer than {MAX_LAYERS} layers")]
    TooLong,
    /// An overlay that is to take a disk's writes.
    #[error("the overlay has {overlay} bytes and the disk {disk}: they must be of one size")]
    OverlaySize {
        /// Virtual size of the overlay.
        overlay: u64,
        /// Virtual size of the disk.
        disk: u64,
    },
    /// A disk of more pages than the map can number.
    #[error("the disk ({size} bytes in units of {unit} bytes) is too large for the map")]
    TooLarge {
        /// Virtual size.
        size: u64,
        /// Smallest cluster size of the chain.
        unit: u64,
    },
    /// A new image without a size, and without a backing file to take it from.
    #[error("a new image needs a size, or a backing file to take it from")]
    SizeMissing,
    /// A check that could not be done.
    #[error("{0}")]
    Check(#[from] vmstrata_check::Error),
    /// Direct I/O in blocks larger than the image's clusters.
    #[error(
        "direct I/O needs clusters of at least {block} bytes here, the image has {cluster}: use cache=host"
    )]
    BlockTooLarge {
        /// The image's cluster size.
        cluster: u64,
        /// The file system's block size.
        block: usize,
    },
    /// A page of an index that is not what it should be: the layers' tables answer instead.
    #[error("index: {0}")]
    Index(#[from] vmstrata_qcow2::index::IndexError),
    /// A layer that cannot have an index.
    #[error("cannot have an index: {reason}")]
    NotIndexable {
        /// Why not.
        reason: &'static str,
    },
    /// A file that is no index has the name that an index would have.
    #[error("is no index of vmstrata, and has the name that one would have: move it away")]
    SidecarTaken,
    /// Only of raw images what is written can be noted.
    #[error("is no raw image")]
    NotRaw,
    /// A frozen layer was changed under an open disk.
    #[error("another program changed the file while the disk was open: close the disk and open it again")]
    Changed,
    /// A layer whose own state is not there any more.
    #[error(
        "the snapshot in it is being deleted, and what it held is overwritten in part: only deleting it again is possible, which completes it"
    )]
    BeingDropped,
    /// A request that does not lie on the disk.
    #[error("request {range} does not fit the disk of {size} bytes")]
    OutOfRange {
        /// The request.
        range: GuestRange,
        /// The disk's size.
        size: u64,
    },
    /// A request whose buffers do not have the request's length.
    #[error("request {range} came with buffers of {len} bytes")]
    BufferLength {
        /// The request.
        range: GuestRange,
        /// Bytes in its buffers.
        len: usize,
    },
    /// A write to a disk that is open for reading.
    #[error("the disk is open read-only")]
    ReadOnly,
    /// A write to a disk that has failed: what is on stable storage is unknown, or a frozen layer was changed.
    #[error(
        "the disk takes no more writes, as it has failed ({cause}): see to the cause, then open it again"
    )]
    Failed {
        /// The first failure.
        cause: String,
    },
    /// An image whose writer was killed in this boot, without the journal that has the writer's unflushed writes.
    #[error(
        "its last writer was killed, and the journal of the writes that it had not flushed is not {}: give the runtime directory of that server (`--runtime-dir`), or go on without those writes (`--discard-unflushed`)",
        in_directory(dir.as_deref())
    )]
    JournalMissing {
        /// Where it was looked for; `None` where no directory was given.
        dir: Option<std::path::PathBuf>,
    },
    /// A journal of a killed writer that does not fit the image. It is kept.
    #[error(
        "the journal of its killed writer, in {}, does not fit the image: {mismatch}; nothing was changed: restore what was changed since, or go on without the writes that were not flushed (`--discard-unflushed`)",
        dir.display()
    )]
    JournalMismatch {
        /// What does not fit.
        mismatch: Box<dyn std::error::Error + Send + Sync>,
        /// The directory of the journal.
        dir: std::path::PathBuf,
    },
    /// An image of which a flush log has flushed writes, and that log is not the one that is open, if any is.
    #[error(
        "a flush log has flushed writes of it: start the server that uses that log (`--flush-log`), which brings them into the image; if the log is lost, `vmstrata check --repair=all --discard-unflushed` makes the image usable without them"
    )]
    BehindLog,
    /// A file that is to be brought what a flush log has of it.
    #[error(
        "it is not what it was when its writes went to the flush log: {what}; put it back as it was, or move the log away to start without what it has"
    )]
    NotAsLogged {
        /// What is different.
        what: &'static str,
    },
    /// A repair that would destroy the unflushed writes of a killed process.
    #[error(
        "its last writer was killed, and its unflushed writes cannot be taken up before the repair: {source}; put that right, or repair without them (`--discard-unflushed`)"
    )]
    JournalStuck {
        /// Why not.
        source: Box<crate::Error>,
    },
    /// A request after [`crate::Disk::close`].
    #[error("the disk is closed")]
    Closed,
    /// The format has no room for more clusters.
    #[error("the image cannot grow any more: {what} is at the format's limit")]
    Full {
        /// The structure that cannot grow.
        what: &'static str,
    },
    /// What can go wrong in one kind of work only, such as a merge: see [`Error::fault`](crate::Error::fault).
    #[error("{0}")]
    Fault(Box<dyn std::error::Error + Send + Sync>),
    /// An image that may not be written as it is.
    #[error("{0}")]
    Create(#[from] vmstrata_qcow2::CreateError),
}

fn in_directory(dir: Option<&std::path::Path>) -> String {
    dir.map_or_else(|| "known here".to_owned(), |dir| format!("in {}", dir.display()))
}
