//! Writing a snapshot: pages come in any order, threads hash, compress and write them, and the last step makes it a snapshot.
//!
//! ```text
//!   page() ──► batch ──► thread: zeros? known? ──no──► open extent ──full──► output: append to each copy
//!                              │                                                       │
//!                              └── a word for the page: where it is                    │
//!   finish() ──► rest of the extents, ends of the objects ──► flush all copies ──► names ──► metadata, the same way
//! ```
//!
//! Memory: [`Policy::buffer_bytes`] of waiting pages, two open extents a thread, and some 50 bytes for each page stored.

mod begin;
mod finish;
mod output;
mod worker;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;

use crossbeam_channel::{Receiver, Sender};
use parking_lot::Mutex;
use vmstrata_repo::Held;

use super::Vault;
use super::error::{Result, VaultError};
use super::extent::is_zero;
use super::info::{DiskState, Info};
use super::known::Known;
use super::name::SnapshotId;
use super::pages::{self, Content, Entry, PageNumber};
use super::place::Share;
use super::policy::Policy;
use super::refill::Refill;
use super::stats::Stats;
use crate::address::{Frame, PAGE_BYTES};
use crate::class::PageClass;
use crate::hide::Hiding;
use crate::ram::Layout;
use output::Output;
pub(super) use output::{Building, Copies};

/// A snapshot that is to be written.
#[derive(Clone, Debug)]
pub struct NewSnapshot {
    /// The guest it is of.
    pub guest: String,
    /// Its name, which no other snapshot of the guest has.
    pub name: String,
    /// The guest's memory.
    pub layout: Layout,
    /// How it is to be kept.
    pub policy: Policy,
}

/// What is known once all pages were given.
#[derive(Clone, Debug, Default)]
pub struct Closing {
    /// The instant the guest was at, in ns since 1970.
    pub taken_ns: u64,
    /// Keys and values.
    pub labels: Vec<(String, String)>,
    /// Disks at that instant; pieces of refilled pages count them from 0.
    pub disks: Vec<DiskState>,
    /// What hides clean pages that are lost.
    pub hiding: Hiding,
    /// Whatever else is to be kept, by name: the state of the devices, for example.
    pub blobs: BTreeMap<String, Vec<u8>>,
}

/// A snapshot that was written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Saved {
    /// Tells it from all others.
    pub id: SnapshotId,
    /// Whether it needs no object of an older snapshot.
    pub is_full: bool,
    /// What it holds and costs.
    pub stats: Stats,
}

/// Pages on their way to a thread.
#[derive(Debug, Default)]
struct Batch {
    pages: Vec<(PageNumber, PageClass)>,
    bytes: Vec<u8>,
}

const BATCH_PAGES: usize = 64;

/// What the threads share.
#[derive(Debug)]
struct Shared {
    /// `[page]`: an entry's word, 0 until it is known.
    words: Vec<AtomicU64>,
    known: Known,
    critical: Output,
    clean: Output,
    policy: Policy,
    failed: AtomicBool,
    error: Mutex<Option<VaultError>>,
}

impl Shared {
    fn set(&self, page: PageNumber, entry: Entry) {
        self.words[page.0 as usize].store(entry.to_word(), Ordering::Relaxed);
    }

    fn fail(&self, error: VaultError) {
        self.error.lock().get_or_insert(error);
        self.failed.store(true, Ordering::Release);
    }

    fn check(&self) -> Result<()> {
        if self.failed.load(Ordering::Acquire) {
            return Err(self.error.lock().take().unwrap_or(VaultError::Worker));
        }
        Ok(())
    }
}

/// Writes one snapshot. Dropped before [`Writer::finish`], it leaves nothing that is listed.
#[derive(Debug)]
pub struct Writer {
    vault: Arc<Vault>,
    info: Info,
    shares: Vec<Share>,
    shared: Arc<Shared>,
    batch: Batch,
    /// `None` once the threads are to end.
    send: Option<Sender<Batch>>,
    emptied: Receiver<Batch>,
    threads: Vec<JoinHandle<Stats>>,
    refill: Vec<(Frame, Refill)>,
    stats: Stats,
    is_saved: bool,
    /// Let go last.
    _held: HeldRepositories,
}

struct HeldRepositories(#[expect(dead_code, reason = "held, not used")] Vec<Held>);

impl std::fmt::Debug for HeldRepositories {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("HeldRepositories")
    }
}

impl Writer {
    /// The id that the snapshot will have.
    pub fn id(&self) -> SnapshotId {
        self.info.id
    }

    /// Takes a page's bytes; those of a free page are not looked at. Waits when the threads do not keep up.
    ///
    /// # Errors
    /// [`VaultError::Page`] for a frame that the machine does not have or that was given before; what the threads met
    /// since: the writer is then of no further use.
    pub fn page(&mut self, frame: Frame, class: PageClass, bytes: &[u8; PAGE_BYTES]) -> Result<()> {
        if class == PageClass::Free {
            return self.free(frame);
        }
        let page = self.take(frame)?;
        let is_clean = class == PageClass::Clean;
        self.stats.clean += u64::from(is_clean);
        if is_zero(bytes) {
            let zeros = if is_clean { &mut self.stats.zero_clean } else { &mut self.stats.zero_critical };
            *zeros += 1;
            self.shared.set(page, Entry { class, content: Content::Zero });
            return Ok(());
        }
        self.batch.pages.push((page, class));
        self.batch.bytes.extend_from_slice(bytes);
        if self.batch.pages.len() < BATCH_PAGES { Ok(()) } else { self.send() }
    }

    /// Notes a page whose content means nothing.
    ///
    /// # Errors
    /// As [`Writer::page`].
    pub fn free(&mut self, frame: Frame) -> Result<()> {
        let page = self.take(frame)?;
        self.stats.free += 1;
        self.shared.set(page, Entry { class: PageClass::Free, content: Content::Absent });
        Ok(())
    }

    /// Notes a clean page that is not stored, as its bytes lie on the guest's disks.
    ///
    /// # Errors
    /// As [`Writer::page`]; also for pieces that do not fit a page.
    pub fn refill(&mut self, frame: Frame, refill: Refill) -> Result<()> {
        if !super::refill::fit(&refill.pieces, u16::MAX.into()) {
            return Err(VaultError::Page { frame, reason: "it does not fit its pieces on disk" });
        }
        let page = self.take(frame)?;
        self.stats.clean += 1;
        self.stats.refilled += 1;
        self.refill.push((frame, refill));
        self.shared.set(page, Entry { class: PageClass::Clean, content: Content::Absent });
        Ok(())
    }

    /// The number of a page that is given now, and never again.
    fn take(&mut self, frame: Frame) -> Result<PageNumber> {
        self.shared.check()?;
        let wrong = |reason| VaultError::Page { frame, reason };
        let page = pages::number(&self.info.layout, frame).ok_or(wrong("the machine has no such page"))?;
        // Threads set the word later: until then it says that the page was given.
        let before = self.shared.words[page.0 as usize].swap(worker::TAKEN, Ordering::Relaxed);
        if before == 0 {
            return Ok(page);
        }
        self.shared.words[page.0 as usize].store(before, Ordering::Relaxed);
        Err(wrong("it was given twice"))
    }

    fn send(&mut self) -> Result<()> {
        let next = self.emptied.try_recv().unwrap_or_default();
        let batch = std::mem::replace(&mut self.batch, next);
        let send = self.send.as_ref().ok_or(VaultError::Worker)?;
        send.send(batch).map_err(|_| VaultError::Worker)
    }
}
