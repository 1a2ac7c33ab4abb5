//! Taking the chain as it is now, when a frozen layer turns out not to be what it was.
//!
//! Layers that an index answers for are opened, and so locked, when they are first read. Until then any program may change
//! them: commit into them, repair them, or open them for writing and do nothing. A request that meets such a layer has the
//! chain read again, as when a disk is opened, and is carried out on what is there. Layers that no request meets are looked at
//! from time to time (`look.rs`).
//!
//! ```text
//!   request ──► Changed ──► chain read anew, under `changing` ──► new layers, new map ──► the same request
//!                                └── its index does not hold any more: told, to be made anew
//! ```
//!
//! The active layer is the same before and after, so no writer need be held. What is behind a name must be the same file: one
//! that was replaced stays an error.

use std::collections::HashMap;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use vmstrata_store::FileId;
use vmstrata_types::{GuestOffset, GuestRange};

use super::Disk;
use crate::error::{Error, ErrorKind, Result};
use crate::layer::Layer;
use crate::layers::{Layers, Top};
use crate::loading::{Chain, freeze, reread_chain};
use crate::refs::back_refs;

/// How often a request meets changed layers before it is an error: as many may change under way.
const TRIES: usize = 4;

/// Whom to tell that an index was lost.
#[derive(Default)]
pub(super) struct IndexLoss {
    is_new: AtomicBool,
    call: std::sync::OnceLock<Box<dyn Fn() + Send + Sync>>,
}

impl std::fmt::Debug for IndexLoss {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("IndexLoss").field("is_new", &self.is_new).finish_non_exhaustive()
    }
}

impl Disk {
    /// Calls `call` whenever the disk's chain has lost its index while it was in use; see [`Disk::take_index_loss`]. Only the
    /// first one that asks for it is called.
    pub fn call_when_index_lost(&self, call: impl Fn() + Send + Sync + 'static) {
        let _ = self.index_loss.call.set(Box::new(call));
    }

    /// Whether the chain has lost its index since this was asked last, and has none yet.
    pub fn take_index_loss(&self) -> bool {
        self.index_loss.is_new.swap(false, Ordering::AcqRel) && self.lost_its_index()
    }

    /// Does `work`, and does it again on the chain as it is now if a layer was changed. The caller holds nothing of the disk.
    #[inline]
    pub(crate) fn on_chain<T>(&self, work: impl Fn() -> Result<T>) -> Result<T> {
        let generation = self.generation();
        match work() {
            Err(error) if error.is_change() => self.work_anew(error, generation, &work),
            done => done,
        }
    }

    #[cold]
    fn work_anew<T>(&self, mut error: Error, mut generation: u64, work: &dyn Fn() -> Result<T>) -> Result<T> {
        for _ in 0..TRIES {
            if let Err(why) = self.take_anew(generation, error.path()) {
                tracing::warn!(disk = %self.path.display(), error = %why, "the chain cannot be read anew");
                return Err(error);
            }
            generation = self.generation();
            match work() {
                Err(next) if next.is_change() => error = next,
                done => return done,
            }
        }
        Err(error)
    }

    /// Takes the chain as it is now, unless its layers have changed since `generation`; `file` is the one that has.
    pub(super) fn take_anew(&self, generation: u64, file: Option<&Path>) -> Result<()> {
        let _changing = self.change();
        if self.generation() != generation {
            return Ok(());
        }
        self.check_range(GuestRange::new(GuestOffset::ZERO, 0))?;
        let before = arc_swap::Guard::into_inner(self.layers_now());
        let is_finalized = before.before.is_none() && before.merging_to.is_none();
        if !is_finalized || self.merging.load(Ordering::Acquire) {
            return Err(ErrorKind::NotIndexable { reason: "its layers are being merged" }.into());
        }
        let chain = reread_chain(&self.path, file, &self.options, &self.resources)?;
        if self.put_anew(&before, chain)? {
            self.lost_index.store(true, Ordering::Release);
            self.index_loss.is_new.store(true, Ordering::Release);
            self.index_loss.call.get().into_iter().for_each(|call| call());
        }
        Ok(())
    }

    /// Puts the same active layer over the chain that was read; returns whether that lacks an index where there was one.
    fn put_anew(&self, before: &Layers, chain: Chain) -> Result<bool> {
        let Chain { top, mut below, index, .. } = chain;
        let (file, size) = (top.opened.identity.file, top.size);
        let newest = before.frozen.as_ref().and_then(|map| Some(map.layers().last()?.identity.file));
        let is_same = match &before.top {
            // Requests know the active layer by its place: there may be fewer layers below, as after a merge, but not more.
            Top::Qcow2(active) => {
                file == active.identity.file && (1..=active.index.index()).contains(&below.len())
            }
            Top::Frozen => {
                below.push(freeze(top, &self.resources));
                Some(file) == newest && size == before.size
            }
            Top::Raw(_) => false,
        };
        if !is_same {
            return Err(Error::from(ErrorKind::Changed).in_file(&self.path));
        }
        if let Some(replaced) = replaced(before, &below) {
            return Err(Error::from(ErrorKind::Changed).in_file(&replaced.path));
        }
        if !self.is_read_only() {
            back_refs::record_chain(&self.path, below.iter().map(|layer| &*layer.path).chain([&*self.path]));
        }
        let map = self.resources.share_map(below, index)?;
        let had_index = before.frozen.as_ref().is_some_and(|map| map.has_index());
        let lost_index = had_index && map.index().is_none();
        let after = match &before.top {
            Top::Frozen => Layers::new(size, Top::Frozen, Some(map), &self.resources),
            _ => before.finalized(map),
        };
        self.put_layers_and_call(after);
        tracing::info!(disk = %self.path.display(), lost_index, "a layer was changed: the chain was read anew");
        Ok(lost_index)
    }
}

/// A layer behind whose name there was another file before.
fn replaced<'a>(before: &Layers, now: &'a [Arc<Layer>]) -> Option<&'a Arc<Layer>> {
    let known: HashMap<&Path, FileId> = before
        .frozen
        .iter()
        .flat_map(|map| map.layers())
        .map(|layer| (&*layer.path, layer.identity.file))
        .collect();
    now.iter().find(|layer| known.get(&*layer.path).is_some_and(|file| *file != layer.identity.file))
}
