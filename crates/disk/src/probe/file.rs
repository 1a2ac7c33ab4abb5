//! Looking at one file of a tree of images: what it is, what its header says, where it says its backing file is.
//!
//! Place in the data flow: beside the engine, for `vmstrata survey`, which looks at every file of a host once and puts
//! the chains together by itself. Like [`super::chain`] it takes no lock; unlike it, what cannot be used is a finding
//! about the file, not the end. Read are the header and the L1 table: a file that was cut short shows there.
//!
//! Bounded for hostile files: one header cluster is read, of the L1 table what the file really has, and nothing is
//! opened that the gate does not let through.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, StatxFlags};
use vmstrata_qcow2::{Autoclear, Header, SnapshotInfo};
use vmstrata_store::{FileIdentity, Gate, LocalFile, Permission, Store, is_held};

use crate::chain::{Qcow2Head, backing_of, is_being_dropped, probe};
use crate::error::{Error, Result};
use crate::index::is_link_stale;
use crate::layer::Format;
use crate::opener::{LocalFiles, Opened, Opener as _, Role};
use crate::session::{SESSION_MASK, log_in};

/// A file as it was found.
#[derive(Debug)]
pub struct ProbedFile {
    /// Which file it is, and what tells whether it has changed.
    pub identity: FileIdentity,
    /// Bytes of the host's storage that it takes.
    pub allocated_bytes: u64,
    /// When the file was made on this file system, in ns since 1970, where that is known.
    pub born_ns: Option<i64>,
    /// Whether a process has it open for writing, as far as it says so by QEMU's locks.
    pub writer: bool,
    /// Its header; `None` where it does not start like qcow2, the reason where it cannot be used.
    pub head: Result<Option<ImageHead>>,
}

/// A usable header.
#[derive(Debug)]
pub struct ImageHead {
    /// The header.
    pub header: Header,
    /// The backing file, if there is one.
    pub backing: Option<BackingPlace>,
    /// What the image says of the snapshot that its backing file is; `None` too where that cannot be read.
    pub snapshot: Option<SnapshotInfo>,
    /// Whether deleting the snapshot in it was begun and not completed: its own state is lost, those above it are right.
    pub is_half_deleted: bool,
    /// Whether another program has had it open for writing since vmstrata made its index.
    pub was_written_since_indexed: bool,
    /// What is wrong with its L1 table. Nothing is said of an image that someone writes, or did when he was killed.
    pub l1: Result<()>,
}

/// A backing file as an image names it.
#[derive(Debug)]
pub struct BackingPlace {
    /// The name as stored.
    pub name: OsString,
    /// Where that leads, in which format; the reason where it is not a local file's name.
    pub place: Result<(PathBuf, Option<Format>)>,
}

impl ImageHead {
    /// Whether the process that writes the image, or wrote it last, has not closed it.
    ///
    /// Only vmstrata leaves this mark; an image that QEMU did not close has none unless its refcounts are lazy.
    pub fn is_in_session(&self) -> bool {
        self.header.autoclear.intersects(Autoclear::from_bits_retain(SESSION_MASK))
    }

    /// Whether a flush log may have flushed writes of the image, which is marked corrupt for that.
    pub fn is_behind_log(&self) -> bool {
        log_in(self.header.autoclear.bits()) != 0
    }
}

/// Looks at the file `path` if `gate` lets it through.
///
/// # Errors
/// A file that cannot be opened; what is wrong with a file that can is in [`ProbedFile::head`].
pub fn probe_file(path: &Path, gate: &Gate) -> Result<ProbedFile> {
    let opened = LocalFiles.open(path, Role::Inspected, gate)?;
    let (allocated_bytes, born_ns) = extent_and_birth(&opened).map_err(|error| error.in_file(path))?;
    let writer = has_writer(&*opened.store);
    let head = probe(&*opened.store, opened.identity.len)
        .and_then(|head| head.map(|head| image_head(path, head, &*opened.store, writer)).transpose())
        .map_err(|error| error.in_file(path));
    Ok(ProbedFile { identity: opened.identity, allocated_bytes, born_ns, writer, head })
}

fn image_head(path: &Path, head: Qcow2Head, store: &dyn Store, writer: bool) -> Result<ImageHead> {
    let is_half_deleted = is_being_dropped(path, Some(&head));
    let place = backing_of(path, Some(&head)).transpose();
    let backing = head.backing_name.zip(place).map(|(name, place)| BackingPlace { name, place });
    // A record that cannot be read is as good as none: it is there for people, and nothing depends on it.
    let record = head.snapshot.filter(|_| backing.is_some());
    let snapshot = record.and_then(|record| SnapshotInfo::parse(&record).ok());
    let was_written_since_indexed = is_link_stale(store, &head.header)?;
    let mut head = ImageHead {
        header: head.header,
        backing,
        snapshot,
        is_half_deleted,
        was_written_since_indexed,
        l1: Ok(()),
    };
    if !writer && !head.is_in_session() {
        head.l1 = super::clusters::check_l1(store, &head.header).map_err(|error| error.in_file(path));
    }
    Ok(head)
}

/// Where nothing can be locked nothing can be known: no writer is then reported.
fn has_writer(store: &dyn Store) -> bool {
    store.local().and_then(LocalFile::raw).is_some_and(|fd| is_held(fd, Permission::Write).unwrap_or(false))
}

fn extent_and_birth(opened: &Opened) -> Result<(u64, Option<i64>)> {
    let fd = opened.store.local().and_then(LocalFile::raw).expect("a local file has a descriptor");
    let wanted = StatxFlags::BTIME | StatxFlags::BLOCKS | StatxFlags::TYPE;
    let stat = rustix::fs::statx(fd, "", AtFlags::EMPTY_PATH, wanted)
        .map_err(|errno| Error::io("examine", errno.into()))?;
    let born_ns = StatxFlags::from_bits_retain(stat.stx_mask).contains(StatxFlags::BTIME).then(|| {
        let (seconds, ns) = (stat.stx_btime.tv_sec, i64::from(stat.stx_btime.tv_nsec));
        seconds.saturating_mul(1_000_000_000).saturating_add(ns)
    });
    let is_file = rustix::fs::FileType::from_raw_mode(stat.stx_mode.into()).is_file();
    // stx_blocks counts 512 bytes whatever the file system's block is; a device has all its bytes.
    Ok((if is_file { stat.stx_blocks * 512 } else { opened.identity.len }, born_ns))
}
