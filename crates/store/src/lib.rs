//! Where bytes live: the [`Store`] trait, the stores, and the ring that feeds them asynchronously.
//!
//! ```text
//!   disk ──► Store ──► FileStore    a local file or block device, with QEMU-compatible locks
//!        │         ├─► WindowStore  a part of another store, only read
//!        │         ├─► MemoryStore  a byte vector, for tests
//!        │         └─► FaultStore   any other store, with failures, delays and a record of every operation
//!        ├─► Ring  ──► the raw file below a FileStore, many operations at a time, with or without io_uring;
//!        │             in tests, FaultStores
//!        └─► View  ──► its pages in the host's page cache, without a system call
//!   export ──► EventNotifier ──► an eventfd of another process, without ever waiting
//! ```
//!
//! A store knows nothing of disks: it reads, writes, flushes, and gives space back. [`Store`] is the one seam
//! where tests inject faults, and [`Ring::simulated`] leads there. [`Segment`] is memory the kernel fills or drains, which may belong to a guest
//! that changes it at any time; no reference to it is ever made.
//!
//! `unsafe` lives here so that it need not live in the engine.

mod arena;
mod direct;
mod directory;
mod fault;
mod file;
mod gate;
mod guard;
mod identity;
mod lock;
mod memory;
mod notifier;
mod open_files;
mod open_store;
mod planted;
mod prefetch;
pub mod proc;
mod ring;
mod segment;
mod share;
mod transfer;
mod view;
mod window;

use std::any::Any;
use std::fmt;
use std::io;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

pub use directory::{Directory, Entry, Place, open_device, open_named};
pub use fault::{
    Crash, CrashKind, Effect, Fault, FaultPlan, FaultStore, Moment, Operation, OperationKind, Record,
    StoreId, Survivors, When,
};
pub use file::{CacheMode, FileError, FileOptions, FileStore};
pub use gate::{Access, Gate, GateError};
pub use guard::Guard;
pub use identity::{FileId, FileIdentity};
pub use lock::{LockError, LockKind, Permission, check_free, is_held};
pub use memory::MemoryStore;
pub use notifier::EventNotifier;
pub use open_files::{Holders, OpenFiles};
pub use open_store::OpenStore;
pub use planted::Planted;
#[cfg(feature = "planted")]
pub use planted::plant;
pub use prefetch::prefetch;
pub use ring::{PinnedFile, Ring, RingCompletion, RingFile, io_uring_refused};
pub use segment::{
    AlignedBuf, Segment, SegmentVec, Slices, are_zero, copy_from_slice, copy_to_slice, fill_zero, is_zero,
    slice, total_len,
};
pub use share::on_threads;
pub use transfer::SEGMENTS_MAX;
pub use view::{View, major_faults};
use vmstrata_types::HostOffset;
pub use window::WindowStore;

/// Random access to a growable run of bytes.
///
/// Every method may be called from any number of threads at once. A write that returns an error may have
/// written any part of its range.
#[expect(clippy::len_without_is_empty, reason = "nobody asks whether a disk's file is empty")]
pub trait Store: Send + Sync + fmt::Debug {
    /// Reads at `at` into `segments`; returns the bytes read, fewer than asked for only at the end.
    ///
    /// # Errors
    /// Whatever the medium reports; the segments then hold unspecified bytes.
    fn read_segments(&self, segments: &[Segment<'_>], at: HostOffset) -> io::Result<usize>;

    /// Writes all of `segments` at `at`, growing the store when it ends earlier.
    ///
    /// # Errors
    /// Whatever the medium reports; any part may have been written.
    fn write_segments(&self, segments: &[Segment<'_>], at: HostOffset) -> io::Result<()>;

    /// Returns once everything written before the call is on stable storage.
    ///
    /// # Errors
    /// After an error nothing is known of the writes since the last success: do not retry, stop writing.
    fn flush(&self) -> io::Result<()>;

    /// Makes a range read as zeros and gives its space back; a range past the end is cut there.
    ///
    /// # Errors
    /// `Unsupported` where the medium cannot; the bytes are then unchanged.
    fn punch_hole(&self, at: HostOffset, len: u64) -> io::Result<()>;

    /// Bytes up to the end.
    ///
    /// # Errors
    /// Whatever the medium reports.
    fn len(&self) -> io::Result<u64>;

    /// Cuts off, or extends with zeros, to `len` bytes.
    ///
    /// # Errors
    /// Whatever the medium reports.
    fn set_len(&self, len: u64) -> io::Result<()>;

    /// The end of the run of data, or of the hole, that `at` lies in: `(is_data, end)`.
    ///
    /// A medium that does not know answers that all is data up to its end.
    ///
    /// # Errors
    /// Whatever the medium reports.
    fn extent(&self, at: HostOffset) -> io::Result<(bool, HostOffset)> {
        let end = self.len()?.max(at.get());
        Ok((true, HostOffset::new(end)))
    }

    /// What the store can do beyond that because it is a file or a device of this host.
    fn local(&self) -> Option<&dyn LocalFile> {
        None
    }

    /// How its bytes come to this host, where they may be elsewhere. Such a store's own reads wait for that, and it is no
    /// [`LocalFile`].
    fn fetch(&self) -> Option<&dyn Fetch> {
        None
    }

    /// Reads exactly `buf.len()` bytes at `at`; what lies past the end reads as zeros.
    ///
    /// # Errors
    /// Whatever the medium reports.
    fn read_padded(&self, buf: &mut [u8], at: HostOffset) -> io::Result<()> {
        let len = buf.len();
        let read = self.read_segments(&[Segment::from_mut(buf)], at)?;
        assert!(read <= len, "a store reported more bytes than it was asked for");
        buf[read..].fill(0);
        Ok(())
    }

    /// Reads exactly `buf.len()` bytes at `at`.
    ///
    /// # Errors
    /// `UnexpectedEof` when the store ends earlier; otherwise whatever the medium reports.
    fn read_exact(&self, buf: &mut [u8], at: HostOffset) -> io::Result<()> {
        let len = buf.len();
        let read = self.read_segments(&[Segment::from_mut(buf)], at)?;
        if read == len { Ok(()) } else { Err(io::ErrorKind::UnexpectedEof.into()) }
    }

    /// Writes all of `buf` at `at`.
    ///
    /// # Errors
    /// Whatever the medium reports; any part may have been written.
    fn write_all(&self, buf: &[u8], at: HostOffset) -> io::Result<()> {
        self.write_segments(&[Segment::from_ref(buf)], at)
    }
}

/// Keeps bytes of a [`Fetch`] here until it is dropped.
pub type Hold = Arc<dyn Any + Send + Sync>;

/// What a fetch came to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fetched {
    /// The bytes are here, unless they have gone again.
    Here,
    /// This host cannot keep some of them: only the store's own reads get those.
    NotKept,
}

/// A store whose bytes may be elsewhere, and come to a file of this host when they are asked for. They may go again.
pub trait Fetch {
    /// Keeps a range here, if all of it is here: until the hold is dropped, [`Fetch::file`] has its bytes.
    fn hold(&self, at: HostOffset, len: u64) -> Option<Hold>;

    /// Brings the bytes of a range here, and calls `then`, once: when they are here, or cannot be had. Waits for nothing.
    fn fetch(&self, at: HostOffset, len: u64, then: Box<dyn FnOnce(io::Result<Fetched>) + Send>);

    /// The file that has those that are here, for rings and views.
    fn file(&self) -> &dyn LocalFile;
}

/// A file that may let a log make its flushes durable: once it has joined, and until it leaves.
///
/// What joins is written by this process alone, and looked at by others only after it has left, or the log was brought into it.
pub trait Logged {
    /// Tells the log from others of this host; never 0, 15 bits.
    fn tag(&self) -> u64;

    /// Has the log make later flushes durable. `mark` is what marks the file: recovery writes into no file that has another one.
    /// All that was written to the file is on stable storage, and no write is under way.
    ///
    /// # Errors
    /// A log that failed, or has no room for more files: flushes go on without it.
    fn join(&self, mark: u64) -> io::Result<()>;

    /// Says what marks the file from now on.
    fn set_mark(&self, mark: u64);

    /// Whether it has joined, and not left.
    fn has_joined(&self) -> bool;

    /// As [`Store::flush`], and brings `writes` to stable storage, too. None of them is in the file before all that was written
    /// earlier is on stable storage; all of them are when this returns.
    ///
    /// # Errors
    /// As [`Store::flush`], or a host that cannot write.
    fn commit(&self, writes: &[(HostOffset, Vec<u8>)]) -> io::Result<()>;

    /// Takes the file out of the log: it has all that was written, on stable storage, and recovery does not touch it.
    ///
    /// # Errors
    /// A host or a log that failed: what the log has of the file stays there.
    fn leave(&self) -> io::Result<()>;
}

/// What only a file or a device of this host can do.
pub trait LocalFile {
    /// The descriptor below, when a [`Ring`] may read and write it directly with the same effect.
    fn raw(&self) -> Option<BorrowedFd<'_>> {
        None
    }

    /// Where in the file of [`LocalFile::raw`], or the store of [`LocalFile::simulated`], the first byte lies.
    fn start(&self) -> HostOffset {
        HostOffset::ZERO
    }

    /// The store itself, when [`Ring::simulated`] may carry requests out on it.
    fn simulated(&self) -> Option<&FaultStore> {
        None
    }

    /// Alignment that offset, length and memory of a ring's operations must have; 1 when any will do.
    fn raw_alignment(&self) -> usize {
        1
    }

    /// The bytes as a mapping to read small pieces from, when that cannot go wrong in ways that reading would not.
    fn view(&self) -> Option<View> {
        None
    }

    /// Gives up the right to write, once the caller has written its last: others may open the bytes for reading, as this
    /// store goes on doing.
    ///
    /// # Errors
    /// Whatever the medium reports.
    fn give_up_writing(&self) -> io::Result<()> {
        Ok(())
    }

    /// Fills `buf` from `at` if that takes no waiting, as for bytes that the host has in memory; false when it may.
    fn read_now(&self, _buf: &mut [u8], _at: HostOffset) -> bool {
        false
    }

    /// Gives a range that is a hole, or lies past the end, its space: it reads as zeros, and writes into it need none.
    ///
    /// # Errors
    /// A medium without space, or that cannot promise any.
    fn allocate(&self, _at: HostOffset, _len: u64) -> io::Result<()> {
        Err(io::ErrorKind::Unsupported.into())
    }

    /// Asks the host to begin writing out a range that it has in memory only. A wish: nothing waits for it or is told of what
    /// becomes of it, and only [`Store::flush`] says what is on stable storage.
    fn begin_write_out(&self, _at: HostOffset, _len: u64) {}

    /// The log that makes its flushes durable, if there is one. Then no ring may flush it.
    fn log(&self) -> Option<&dyn Logged> {
        None
    }

    /// A flush begins, by [`Store::flush`] or a ring: the bytes written through the host's page cache since the last one
    /// began, which is the most that it has to write out.
    fn begin_flush(&self) -> u64 {
        0
    }
}
