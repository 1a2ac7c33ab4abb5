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
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use parking_lot::Mutex;
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

/// How it goes with what snapshots leave to do.
#[derive(Debug, Default)]
pub(super) struct Finalizing {
    pub(super) failures: AtomicU64,
    /// When the chain could not be given an index last.
    pub(super) unindexed_since: Mutex<Option<Instant>>,
}

impl Disk {
    /// Finalizes a snapshot. What failed is counted, and not tried again.
    pub(super) fn finalize_pending(&self, pending: &PendingFinalize) -> Result<()> {
        self.finalize_now(pending).inspect_err(|error| {
            self.finalizing.failures.fetch_add(1, Ordering::Relaxed);
            tracing::error!(layer = %pending.path.display(), "snapshot taken; finalizing it failed: {error}");
        })
    }

    /// How many times a snapshot could not be finalized.
    pub fn finalize_failures(&self) -> u64 {
        self.finalizing.failures.load(Ordering::Relaxed)
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
