//! Giving a disk another size while it is used, or not.
//!
//! ```text
//!   grow:    room in L1 ──► zeros where something would show ──► size in header ──► requests see it
//!            writers held
//!   shrink:  requests see it ──► wait for those under way ──► what is past the end goes ──► size in header
//! ```
//!
//! Each step is on stable storage before the next begins, and each leaves an image that is right for the size its header
//! says: tables and zero entries past the end mean nothing. Only a move of the L1 table holds writers for the time of its
//! writes, and it moves only where its last cluster has no room left; readers are never held.
//!
//! New space reads as zeros. It would not by itself where the active layer has entries there, as an image that a stock
//! tool shrank may, or where a layer below is longer than the disk was: there, and only there, zeros are said or written.
//!
//! Frozen layers keep their sizes, and so do states of the disk.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use thiserror::Error as ThisError;
use vmstrata_qcow2::header::MAX_L1_ENTRIES;
use vmstrata_types::{GuestOffset, GuestRange};

use super::Disk;
use crate::active::Active;
use crate::cache::{PAGE_SHIFT, PageKey};
use crate::chain::read_head;
use crate::error::{ErrorKind, IoContext as _, Result};
use crate::layers::{Layers, RawTop, Top};
use crate::zero::Purpose;

/// Sizes are multiples of it.
const SECTOR: u64 = 512;
/// Most bytes of the disk cleared before others get their turn.
const TURN: u64 = 1 << 30;

/// Whether a disk may become smaller, which loses what is past its new end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shrink {
    /// It may not.
    Refuse,
    /// It may.
    Allow,
}

/// Why a disk cannot have a size.
#[derive(Debug, ThisError)]
#[non_exhaustive]
pub enum ResizeFault {
    /// No bytes, or more than offsets can say.
    #[error("a disk cannot have {size} bytes: it has at least 512, and fewer than 2^63")]
    Size {
        /// Bytes asked for.
        size: u64,
    },
    /// Smaller, without being told that it may be.
    #[error(
        "the disk has {from} bytes: making it {to} loses all data past its new end, which must be allowed explicitly (`--shrink`)"
    )]
    WouldShrink {
        /// Bytes now.
        from: u64,
        /// Bytes asked for.
        to: u64,
    },
    /// More than the format's tables reach.
    #[error("a disk of {size} bytes is too large for the image's clusters, which reach {max} bytes")]
    TooLarge {
        /// Bytes asked for.
        size: u64,
        /// The most bytes that this cluster size reaches.
        max: u64,
    },
    /// Layers of the disk are being merged.
    #[error("layers of this disk are being merged: wait for the job, or cancel it")]
    Merging,
    /// Snapshots inside the image that have no size of their own.
    #[error(
        "a version 2 image with internal snapshots cannot be resized, as they keep no size of their own: delete them, or `qemu-img amend -o compat=1.1` it"
    )]
    InternalSnapshots,
}

crate::error::fault!(ResizeFault);

/// What a resize did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Resized {
    /// Bytes before.
    pub from: u64,
    /// Bytes now.
    pub to: u64,
    /// For how long writes were held; reads were not.
    pub pause: Duration,
}

impl Disk {
    /// Gives the disk `size` bytes, rounded up to whole sectors. New space reads as zeros; when this returns, the size is on stable storage, and requests
    /// see it.
    ///
    /// # Errors
    /// A disk that takes no writes; [`ResizeFault`]: nothing has changed. A host that is full, or cannot write or flush: the
    /// disk has the size that it had, but what is past a smaller size may be lost; if the header could not be written, the
    /// disk takes no more writes.
    pub fn resize(&self, size: u64, shrink: Shrink) -> Result<Resized> {
        let _changing = self.change();
        self.check_changeable()?;
        let layers = arc_swap::Guard::into_inner(self.layers_now());
        let from = layers.size;
        let size = size.checked_next_multiple_of(SECTOR).unwrap_or(size);
        self.check_size(&layers, size, shrink).map_err(|error| error.in_file(self.path()))?;
        let pause = match size.cmp(&from) {
            std::cmp::Ordering::Equal => Duration::ZERO,
            std::cmp::Ordering::Greater => self.grow(&layers, size)?,
            std::cmp::Ordering::Less => self.shrink(&layers, size).map(|()| Duration::ZERO)?,
        };
        tracing::info!(disk = %self.path().display(), from, to = size, pause_us = pause.as_micros(), "resized");
        Ok(Resized { from, to: size, pause })
    }

    fn check_size(&self, layers: &Layers, size: u64, shrink: Shrink) -> Result<()> {
        if size == 0 || i64::try_from(size).is_err() {
            return Err(ResizeFault::Size { size }.into());
        }
        if size < layers.size && shrink == Shrink::Refuse {
            return Err(ResizeFault::WouldShrink { from: layers.size, to: size }.into());
        }
        if self.state.is_merging() {
            return Err(ResizeFault::Merging.into());
        }
        let Top::Qcow2(active) = &layers.top else { return Ok(()) };
        let geometry = active.tables.geometry;
        let max = geometry.l2_span() * u64::from(MAX_L1_ENTRIES);
        if size > max {
            return Err(ResizeFault::TooLarge { size, max }.into());
        }
        let below = layers.frozen.as_ref().map(|map| map.finest_unit());
        let unit = below.map_or(geometry.unit(), |unit| unit.min(geometry.unit()));
        if size >> unit.get() >> PAGE_SHIFT >= PageKey::MAX_PAGES {
            return Err(ErrorKind::TooLarge { size, unit: unit.size() }.into());
        }
        let len = active.store.len().while_trying("read the file's length")?;
        let header = read_head(&*active.store, len)?.header;
        if header.version < 3 && header.snapshot_count > 0 {
            return Err(ResizeFault::InternalSnapshots.into());
        }
        Ok(())
    }

    /// Requests that begin from now on are about a disk of `size` bytes.
    fn put_size(&self, layers: &Layers, size: u64) {
        self.put_layers(Layers { size, ..layers.clone() });
        self.size.store(size, Ordering::Release);
    }

    /// Returns for how long writers were held.
    fn grow(&self, layers: &Layers, size: u64) -> Result<Duration> {
        let mut pause = Duration::ZERO;
        match &layers.top {
            Top::Qcow2(active) => {
                pause = self.make_room(layers, active, size)?;
                self.hide_new_space(layers, active, size)?;
                self.write_size(active, size)?;
            }
            Top::Raw(raw) => self.set_raw_len(raw, size)?,
            Top::Frozen => return Err(ErrorKind::ReadOnly.into()),
        }
        self.put_size(layers, size);
        Ok(pause)
    }

    /// Sees to it that the L1 table reaches to `size`.
    fn make_room(&self, layers: &Layers, active: &Active, size: u64) -> Result<Duration> {
        let entries = active.tables.geometry.l1_entries(size);
        if entries <= u64::from(active.tables_now().l1_entries) {
            return Ok(Duration::ZERO);
        }
        let extended = active.extend_l1(entries);
        if extended.map_err(|error| self.fail_if_fatal(error.in_file(self.path())))? {
            let began = Instant::now();
            self.write_gate.quiesce(|| active.know_longer_l1(entries));
            return Ok(began.elapsed());
        }
        // Most of what there is to commit need not be committed while writers are held.
        self.commit()?;
        let began = Instant::now();
        let grown = self.write_gate.quiesce(|| layers.commit().and_then(|()| active.grow_l1(entries)));
        let pause = began.elapsed();
        grown.map_err(|error| self.fail_if_fatal(error.in_file(self.path())))?;
        Ok(pause)
    }

    /// Makes what would show in the new space zeros.
    fn hide_new_space(&self, layers: &Layers, active: &Active, size: u64) -> Result<()> {
        let below = layers.frozen.as_ref().map_or(0, |map| map.size());
        let end = size.min(below.max(active.tables_end()));
        self.clear_past(
            &Layers { size, ..layers.clone() },
            GuestRange::new(GuestOffset::new(layers.size), end.saturating_sub(layers.size)),
            Purpose::ZeroAndFree,
        )?;
        self.commit()
    }

    /// Clears a range that no request sees.
    fn clear_past(&self, layers: &Layers, range: GuestRange, purpose: Purpose) -> Result<()> {
        let mut at = range.start;
        while at < range.end() {
            let _guard = self.epochs.guard();
            let _inside = self.write_gate.enter();
            self.check_writable()?;
            // Turns end where clusters of every size do.
            let turn = GuestRange::new(at, (range.end() - at).min(TURN - at.get() % TURN));
            layers.clear(turn, purpose).map_err(|error| self.fail_if_fatal(error))?;
            at = turn.end();
        }
        Ok(())
    }

    fn write_size(&self, active: &Active, size: u64) -> Result<()> {
        active.write_size(size).map_err(|error| self.fail_if_fatal(error.in_file(self.path())))
    }

    fn set_raw_len(&self, raw: &RawTop, size: u64) -> Result<()> {
        raw.store.set_len(size).while_trying("change the file's length").map_err(|e| e.in_file(&raw.path))?;
        self.commit()
    }

    fn shrink(&self, layers: &Arc<Layers>, size: u64) -> Result<()> {
        self.put_size(layers, size);
        self.epochs.synchronize();
        let cut = match &layers.top {
            Top::Qcow2(active) => self.cut(layers, active, size),
            Top::Raw(raw) => self.set_raw_len(raw, size),
            Top::Frozen => Err(ErrorKind::ReadOnly.into()),
        };
        if cut.is_err() {
            self.put_size(layers, layers.size);
        }
        cut
    }

    /// Lets go of everything past `size`, then lets the disk end there: who makes it longer again finds nothing.
    fn cut(&self, layers: &Layers, active: &Active, size: u64) -> Result<()> {
        let rest = GuestRange::new(GuestOffset::new(size), layers.size - size);
        self.clear_past(layers, rest, Purpose::Cut)?;
        self.commit()?;
        self.write_size(active, size)?;
        self.reclaim(active);
        Ok(())
    }
}
