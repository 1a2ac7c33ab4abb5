//! What is left to do once a snapshot is on stable storage: the end of the session on what was active, the layer's page of
//! history (its index), and a map that reads the layer's tables from its file.
//!
//! ```text
//!   snapshot ──► answered ──► Disk::finalize, on a thread of the server ──► index, map of files alone
//!                    └── or first thing in whatever changes the layers next, or closes the disk
//! ```
//!
//! Nothing here can undo the snapshot. Killed before it is done, a process leaves a layer without an index, which the next
//! one reads without, and its journal, which says what the file says.
//!
//! Invariant: at most one snapshot of a disk is pending, the newest.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Instant;

use parking_lot::{Mutex, MutexGuard};
use vmstrata_store::{FileIdentity, Gate};

use super::Disk;
use crate::active::session::session_ended;
use crate::error::{Error, ErrorKind, Result};
use crate::layer::{Layer, Tables};
use crate::layers::{Layers, Top};

/// A snapshot of which something is left to do.
#[derive(Debug)]
pub(super) struct PendingFinalize {
    /// The layers of before it; their active one is frozen now.
    pub(super) before: Arc<Layers>,
    /// The name of that layer.
    pub(super) path: PathBuf,
}

/// Held by who changes the layers.
pub(super) type Changing<'a> = MutexGuard<'a, Option<PendingFinalize>>;

/// How it goes with what snapshots leave to do.
#[derive(Debug, Default)]
pub(super) struct Finalizing {
    /// Whether there is something, or being done.
    pending: AtomicBool,
    pub(super) failures: AtomicU64,
    /// When the chain could not be given an index last.
    pub(super) unindexed_since: Mutex<Option<Instant>>,
}

impl Disk {
    /// Does what the last snapshot left to do ([`crate::snapshot_together`]); nothing if there is nothing. Whoever changes the
    /// disk's layers next does it otherwise, and waits for it.
    ///
    /// # Errors
    /// A host that cannot flush: the disk takes no more writes. A layer that was replaced: it goes without an index. What
    /// failed is counted and not tried again.
    pub fn finalize(&self) -> Result<()> {
        let mut changing = self.changing.lock();
        let Some(pending) = changing.take() else { return Ok(()) };
        let finalized = self.finalize_now(&pending);
        self.finalizing.pending.store(false, Ordering::Release);
        finalized.inspect_err(|error| {
            self.finalizing.failures.fetch_add(1, Ordering::Relaxed);
            tracing::error!(layer = %pending.path.display(), "snapshot taken; finalizing it failed: {error}");
        })
    }

    /// Whether something is left to do for the last snapshot.
    pub fn is_finalizing(&self) -> bool {
        self.finalizing.pending.load(Ordering::Acquire)
    }

    /// How often something could not be done that a snapshot had left to do.
    pub fn finalize_failures(&self) -> u64 {
        self.finalizing.failures.load(Ordering::Relaxed)
    }

    /// Keeps others from changing the layers; what the last snapshot left to do is done.
    pub(super) fn change(&self) -> Changing<'_> {
        loop {
            // An error is counted, and stands in nobody's way.
            let _ = self.finalize();
            let changing = self.changing.lock();
            if changing.is_none() {
                return changing;
            }
        }
    }

    /// Leaves something to do.
    pub(super) fn leave_pending(&self, pending: PendingFinalize, changing: &mut Option<PendingFinalize>) {
        assert!(changing.is_none(), "the snapshot before is finalized first");
        self.finalizing.pending.store(true, Ordering::Release);
        *changing = Some(pending);
    }

    fn finalize_now(&self, pending: &PendingFinalize) -> Result<()> {
        let PendingFinalize { before, path } = pending;
        let (identity, tables) = self.end(before)?;
        let index = self.index_newest(before, path);
        let opener = self.resources.files().opener();
        let now = opener.identity(path, &Gate::unrestricted())?;
        if now.file != identity.file {
            return Err(Error::from(ErrorKind::Changed).in_file(path));
        }
        let newest = self.resources.share_layer(Layer::new(path.clone(), now, before.size, tables));
        // Now, not in the first request for it.
        self.resources.files().store(&newest)?;
        let layers = self.layers_now();
        let map = layers.frozen.as_ref().expect("what was active is frozen").finalized(newest)?;
        let map = Arc::new(match index {
            Some(index) => map.with_index(index),
            None => map,
        });
        self.resources.offer_map(&map);
        self.put_layers_and_call(Layers { frozen: Some(map), before: None, ..Layers::clone(&layers) });
        drop(layers);
        self.index_whole();
        Ok(())
    }

    /// Ends the session on what was active.
    fn end(&self, before: &Layers) -> Result<(FileIdentity, Option<Tables>)> {
        match &before.top {
            Top::Qcow2(active) => {
                session_ended(active).map_err(|error| self.fail(error))?;
                Ok((active.identity, Some(active.tables_now())))
            }
            Top::Raw(raw) => Ok((raw.identity, None)),
            Top::Frozen => Err(ErrorKind::ReadOnly.into()),
        }
    }
}
