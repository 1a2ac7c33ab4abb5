//! A disk in use leaves its chain for a flat copy of it: a raw file, a device, or anything else that is a store.
//!
//! The mover copies the frozen layers while the guest goes on. [`Disk::own_ranges`] lists what the active layer holds; the mover copies that
//! while writes are held. From then on the copy is the disk's only layer.

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use vmstrata_qcow2::{L2Entry, SubclusterState};
use vmstrata_types::{GuestOffset, GuestRange};

use super::Disk;
use super::home::Home;
use super::switch::give_up;
use crate::active::Active;
use crate::active::session::{end_session, session_ended};
use crate::chain::OpenOptions;
use crate::error::{Error, ErrorKind, Result};
use crate::layers::{Layers, RawTop, Top};
use crate::merging::MergeFault;
use crate::opener::Opened;

/// Where a disk goes that leaves its chain.
#[derive(Debug)]
pub struct FlatHome {
    /// What the disk is called from then on.
    pub path: PathBuf,
    /// How it is opened from then on: as a raw image.
    pub options: OpenOptions,
    /// The copy, open for writing.
    pub copy: Opened,
}

impl Disk {
    /// Opens a state of the disk, that of its frozen layer `layer`, to be read.
    ///
    /// # Errors
    /// As [`Disk::open`].
    pub fn open_state(&self, layer: &Path) -> Result<Arc<Self>> {
        self.open_beside(layer, &OpenOptions { read_only: true, format: None, ..self.options() })
    }

    /// Opens another disk with this one's resources.
    ///
    /// # Errors
    /// As [`Disk::open`].
    pub fn open_beside(&self, path: &Path, options: &OpenOptions) -> Result<Arc<Self>> {
        Self::open(path, options, &self.resources)
    }

    /// What the active layer has, in the guest's order, neighbours together. It is read from the tables in memory, so it is
    /// quick where the layer is young; what is written meanwhile may be missing.
    ///
    /// A raw layer has no tables: all of the disk is its own.
    ///
    /// # Errors
    /// Tables that cannot be read; a disk that takes no writes.
    pub fn own_ranges(&self) -> Result<Vec<GuestRange>> {
        let _guard = self.epochs.enter();
        let layers = self.layers_now();
        let whole = GuestRange::new(GuestOffset::ZERO, layers.size);
        match &layers.top {
            Top::Qcow2(active) => own_ranges(active, whole).map_err(|error| error.in_file(self.path())),
            Top::Raw(_) => Ok(vec![whole]),
            Top::Frozen => Err(Error::from(ErrorKind::ReadOnly).in_file(self.path())),
        }
    }

    /// Makes a flat copy the disk's only layer. `last` runs while writes are held: it brings to the copy what it lacks still, and to
    /// stable storage, and has the disk's old name lead nowhere. Returns for how long writes were held.
    ///
    /// What was active is left as an image that was closed; what fails of that is logged only, as the disk needs it no more.
    ///
    /// # Errors
    /// A disk that takes no writes, or whose layers are being merged; what `last` reports: nothing has changed then, unless the disk's
    /// name leads nowhere by then: it takes no more writes.
    pub fn leave_chain<E: From<Error> + fmt::Display>(
        &self,
        to: FlatHome,
        last: impl FnOnce() -> Result<(), E>,
    ) -> Result<Duration, E> {
        let _changing = self.change();
        if self.state.is_merging() {
            return Err(Error::from(MergeFault::Busy).in_file(self.path()).into());
        }
        self.check_changeable()?;
        let before = arc_swap::Guard::into_inner(self.layers_now());
        let old = self.path().to_owned();
        let FlatHome { path, options, copy } = to;
        let raw = RawTop::new(path.clone(), copy, None);
        let after = Layers::new(before.size, Top::Raw(raw), None, &self.resources);
        let home = Home::new(&path, &options);
        let began = Instant::now();
        let switched = self.write_gate.quiesce(|| {
            last()?;
            self.put_layers_and_call(after);
            self.settle(home);
            Ok(began.elapsed())
        });
        let pause = switched.inspect_err(|error: &E| {
            if old.symlink_metadata().is_err() {
                self.refuse_writes(&error.to_string());
            }
        })?;
        *self.snapshot_names.lock() = None;
        if let Err(error) = self.close_what_was_active(&before, &old) {
            tracing::warn!(disk = %old.display(), %error, "what the disk was before is left as after a killed process");
        }
        tracing::info!(from = %old.display(), to = %path.display(), pause_us = pause.as_micros(), "moved to a flat copy");
        Ok(pause)
    }

    /// Leaves the image that was active clean.
    fn close_what_was_active(&self, before: &Layers, path: &Path) -> Result<()> {
        before.commit()?;
        let Top::Qcow2(active) = &before.top else { return Ok(()) };
        let _tending = self.tending.lock();
        end_session(active, || self.epochs.synchronize())?;
        session_ended(active)?;
        give_up(&*active.store, path)
    }
}

fn own_ranges(active: &Active, whole: GuestRange) -> Result<Vec<GuestRange>> {
    let geometry = &active.tables.geometry;
    let (bits, unit) = (geometry.cluster_bits, geometry.unit());
    let mut found: Vec<GuestRange> = Vec::new();
    let mut add = |from: u64, len: u64| {
        let len = len.min(whole.end().get().saturating_sub(from));
        match found.last_mut() {
            Some(last) if last.end().get() == from => last.len += len,
            _ if len == 0 => {}
            _ => found.push(GuestRange::new(GuestOffset::new(from), len)),
        }
    };
    let (mut cluster, end) = (0, whole.len.div_ceil(bits.size()));
    while cluster < end {
        if !active.has_table(cluster) {
            cluster = (cluster | ((1 << geometry.l2_bits) - 1)) + 1;
            continue;
        }
        let at = cluster << bits.get();
        match active.decode(cluster, active.entry(cluster)?)? {
            L2Entry::Unallocated => {}
            L2Entry::Data { .. } | L2Entry::Compressed { .. } | L2Entry::Zero { .. } => add(at, bits.size()),
            L2Entry::Subclusters { states, .. } => {
                for (first, count, state) in states.runs() {
                    if state != SubclusterState::Unallocated {
                        add(at + (u64::from(first) << unit.get()), u64::from(count) << unit.get());
                    }
                }
            }
        }
        cluster += 1;
    }
    Ok(found)
}
