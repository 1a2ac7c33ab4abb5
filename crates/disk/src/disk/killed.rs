//! Finishing the snapshot that a killed process began.
//!
//! When a snapshot is taken, the disk's file is a new overlay at once; what was active before is still on its way to
//! stable storage. A process killed in between leaves a backing file with a session number in its header, and that
//! session's journal. Whoever opens the disk for writing next takes the journal up first, as it would the disk's own.

use std::sync::Arc;

use vmstrata_store::{CacheMode, Gate};
use vmstrata_types::LayerIndex;

use super::durable::leave_clean;
use super::open::open_top;
use crate::chain::{Chain, open_layer};
use crate::error::{Error, ErrorKind, Result};
use crate::layers::{Layers, Top};
use crate::opener::Role;
use crate::resources::Resources;

/// Takes up what a killed process left of the layer below the chain's top, and ends its session.
///
/// # Errors
/// A file that is in use, is not the one that was found in the chain, or cannot be written.
pub(super) fn finish_snapshot(chain: Chain, cache: CacheMode, resources: &Arc<Resources>) -> Result<()> {
    let layer = chain.below.last().expect("the unfinished layer");
    let (path, file, format) = (layer.path.clone(), layer.identity.file, layer.format());
    // A reader's lock on the file would keep the writer out.
    drop(chain);
    let opener = &**resources.files().opener();
    let backing = open_layer(&path, Role::Active(cache), Some(format), &Gate::unrestricted(), opener)?;
    if backing.opened.identity.file != file {
        // The gate let another file through.
        return Err(Error::from(ErrorKind::Changed).in_file(&path));
    }
    let top = open_top(backing, LayerIndex::BASE, resources)?;
    let layers = Layers::new(0, top, None, resources);
    layers.commit()?;
    if let Top::Qcow2(active) = &layers.top {
        leave_clean(active, || ())?;
    }
    tracing::info!(file = %path.display(), "finished the snapshot that a killed process began");
    Ok(())
}
