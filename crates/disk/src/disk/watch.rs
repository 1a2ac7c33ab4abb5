//! A raw disk in use whose content is copied into a chain, and which then goes on there.
//!
//! A raw image cannot be frozen. So what is written meanwhile is noted: the image's store is wrapped in one that notes a range before it
//! writes it. Taking the notes holds writes for a moment, so what is copied after that has all writes that were noted before.

use std::fmt;
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use vmstrata_store::{FileIdentity, LocalFile, Segment, Store, View, total_len};
use vmstrata_types::{GuestOffset, GuestRange, HostOffset};

use super::Disk;
use super::home::Home;
use super::open::open_layers;
use crate::chain::OpenOptions;
use crate::error::{Error, ErrorKind, Result};
use crate::layers::{Layers, RawTop, Top};
use crate::merging::MergeFault;
use crate::opener::Opened;

/// Bytes that a bit stands for.
const UNIT: u64 = 64 << 10;

/// What was written.
#[derive(Debug)]
struct Written {
    size: u64,
    units: Box<[AtomicU64]>,
}

impl Written {
    fn new(size: u64) -> Self {
        let words = size.div_ceil(UNIT).div_ceil(64);
        Self { size, units: (0..words).map(|_| AtomicU64::new(0)).collect() }
    }

    fn note(&self, at: HostOffset, len: u64) {
        let end = at.get().saturating_add(len).min(self.size);
        for unit in at.get() / UNIT..end.div_ceil(UNIT) {
            self.units[(unit / 64) as usize].fetch_or(1 << (unit % 64), Ordering::Relaxed);
        }
    }

    fn bytes(&self) -> u64 {
        let units = |word: &AtomicU64| u64::from(word.load(Ordering::Relaxed).count_ones());
        self.units.iter().map(units).sum::<u64>() * UNIT
    }

    /// What was noted, neighbours together, and forgets it.
    fn take(&self) -> Vec<GuestRange> {
        let mut ranges: Vec<GuestRange> = Vec::new();
        for (number, word) in self.units.iter().enumerate() {
            let mut bits = word.swap(0, Ordering::Relaxed);
            while bits != 0 {
                let start = (number as u64 * 64 + u64::from(bits.trailing_zeros())) * UNIT;
                bits &= bits - 1;
                let len = UNIT.min(self.size - start);
                match ranges.last_mut() {
                    Some(last) if last.end().get() == start => last.len += len,
                    _ => ranges.push(GuestRange::new(GuestOffset::new(start), len)),
                }
            }
        }
        ranges
    }
}

/// A store whose writes are noted. No ring writes to it, as that would pass it by.
#[derive(Debug)]
struct WatchedStore {
    store: Arc<dyn Store>,
    written: Arc<Written>,
}

impl Store for WatchedStore {
    fn read_segments(&self, segments: &[Segment<'_>], at: HostOffset) -> io::Result<usize> {
        self.store.read_segments(segments, at)
    }

    fn write_segments(&self, segments: &[Segment<'_>], at: HostOffset) -> io::Result<()> {
        self.written.note(at, total_len(segments) as u64);
        self.store.write_segments(segments, at)
    }

    fn flush(&self) -> io::Result<()> {
        self.store.flush()
    }

    fn punch_hole(&self, at: HostOffset, len: u64) -> io::Result<()> {
        self.written.note(at, len);
        self.store.punch_hole(at, len)
    }

    fn len(&self) -> io::Result<u64> {
        self.store.len()
    }

    fn set_len(&self, len: u64) -> io::Result<()> {
        self.store.set_len(len)
    }

    fn extent(&self, at: HostOffset) -> io::Result<(bool, HostOffset)> {
        self.store.extent(at)
    }

    fn local(&self) -> Option<&dyn LocalFile> {
        self.store.local().map(|_| self as &dyn LocalFile)
    }
}

impl LocalFile for WatchedStore {
    fn raw_alignment(&self) -> usize {
        self.store.local().map_or(1, LocalFile::raw_alignment)
    }

    fn view(&self) -> Option<View> {
        self.store.local()?.view()
    }

    fn give_up_writing(&self) -> io::Result<()> {
        self.store.local().map_or(Ok(()), LocalFile::give_up_writing)
    }

    fn read_now(&self, buf: &mut [u8], at: HostOffset) -> bool {
        self.store.local().is_some_and(|file| file.read_now(buf, at))
    }

    fn begin_write_out(&self, at: HostOffset, len: u64) {
        self.store.local().into_iter().for_each(|file| file.begin_write_out(at, len));
    }

    fn begin_flush(&self) -> u64 {
        self.store.local().map_or(0, LocalFile::begin_flush)
    }
}

/// Notes what is written to a raw disk, until it is dropped.
#[derive(Debug)]
pub struct Watch {
    disk: Arc<Disk>,
    written: Arc<Written>,
    /// Of the disk's layers while they are watched.
    generation: u64,
    /// What is put back.
    store: Arc<dyn Store>,
    identity: FileIdentity,
}

impl Drop for Watch {
    fn drop(&mut self) {
        let _changing = self.disk.change();
        if self.is_on() {
            self.disk.put_store(Opened { store: Arc::clone(&self.store), identity: self.identity });
        }
    }
}

impl Disk {
    /// Notes what is written from now on. Meanwhile the disk's workers write, and no ring.
    ///
    /// # Errors
    /// A disk that takes no writes, or is no raw image.
    pub fn watch(self: &Arc<Self>) -> Result<Watch> {
        let _changing = self.change();
        self.check_changeable()?;
        let Top::Raw(RawTop { store, identity, .. }) = self.layers_now().top.clone() else {
            return Err(Error::from(ErrorKind::NotRaw).in_file(self.path()));
        };
        let written = Arc::new(Written::new(self.size()));
        let watched = WatchedStore { store: Arc::clone(&store), written: Arc::clone(&written) };
        let generation = self.put_store(Opened { store: Arc::new(watched), identity });
        Ok(Watch { disk: Arc::clone(self), written, generation, store, identity })
    }

    /// Has a raw disk use another store for the same bytes. The caller holds the disk's layers. Returns the generation of the new ones.
    fn put_store(&self, opened: Opened) -> u64 {
        self.write_gate.quiesce(|| {
            let before = Layers::clone(&self.layers_now());
            let Top::Raw(RawTop { path, guard, .. }) = before.top else {
                unreachable!("looked at by the caller")
            };
            let top = Top::Raw(RawTop::new(path, opened, guard));
            self.put_layers_and_call(Layers { top, ..before }).generation
        })
    }
}

impl Watch {
    /// Whether the layers are still those that are watched.
    pub fn is_on(&self) -> bool {
        self.disk.generation() == self.generation
    }

    /// Bytes that were written, as far as they were not taken.
    pub fn bytes(&self) -> u64 {
        self.written.bytes()
    }

    /// What was written, neighbours together, in units of 64 KiB, as far as it was not taken before. Reads from now on show all of that.
    pub fn take(&self) -> Vec<GuestRange> {
        self.disk.write_gate.quiesce(|| self.written.take())
    }

    /// Makes a chain the disk's, whose active image has the name `to` from then on. `last` runs while writes are held, with what was written since
    /// [`Watch::take`]: it brings that to the chain, closes it, and gives it its name. Returns for how long writes were held.
    ///
    /// # Errors
    /// A disk whose layers have changed, what `last` reports, a chain that cannot be opened: nothing has changed then, unless the chain has its
    /// name by then: the disk takes no more writes.
    pub fn enter_chain<E: From<Error> + fmt::Display>(
        &self,
        (to, options): (&Path, &OpenOptions),
        last: impl FnOnce(Vec<GuestRange>) -> Result<(), E>,
    ) -> Result<Duration, E> {
        let disk = &*self.disk;
        let _changing = disk.change();
        disk.check_changeable()?;
        if !self.is_on() {
            return Err(Error::from(MergeFault::LayersChanged).in_file(disk.path()).into());
        }
        let old = disk.path().to_owned();
        let began = Instant::now();
        let entered = disk.write_gate.quiesce(|| {
            last(self.written.take())?;
            // The caller has opened it, which refuses an image that others stand on.
            let open = OpenOptions { force: true, ..options.clone() };
            let (after, _) = open_layers(to, &open, &disk.resources)?;
            if after.size != disk.size() {
                let kind = ErrorKind::OverlaySize { overlay: after.size, disk: disk.size() };
                return Err(Error::from(kind).in_file(to).into());
            }
            disk.put_layers_and_call(after);
            disk.settle(Home::new(to, options));
            Ok(began.elapsed())
        });
        let pause = entered.inspect_err(|error: &E| {
            if to.symlink_metadata().is_ok() {
                disk.refuse_writes(&error.to_string());
            }
        })?;
        *disk.snapshot_names.lock() = None;
        disk.record_chain();
        disk.resources.maintenance().layer_is_new();
        tracing::info!(from = %old.display(), to = %to.display(), pause_us = pause.as_micros(), "moved to a chain");
        Ok(pause)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_written_is_told_once_in_units_and_not_past_the_end() {
        let written = Written::new(10 * UNIT + 512);
        let note = |at: u64, len: u64| written.note(HostOffset::new(at), len);
        note(UNIT - 1, 2);
        note(5 * UNIT, UNIT);
        note(10 * UNIT, UNIT);
        note(3 * UNIT, 0);
        assert_eq!(written.bytes(), 4 * UNIT);
        let range = |at: u64, len: u64| GuestRange::new(GuestOffset::new(at), len);
        assert_eq!(written.take(), [range(0, 2 * UNIT), range(5 * UNIT, UNIT), range(10 * UNIT, 512)]);
        assert_eq!((written.take(), written.bytes()), (vec![], 0));
    }
}
