//! Finishing the snapshot that a killed process began.
//!
//! When a snapshot is taken, the disk's file is a new overlay at once; what was active before is still on its way to
//! stable storage. A process killed in between leaves a backing file with a session number in its header, and that
//! session's journal. Whoever opens the disk for writing next takes the journal up first, as it would the disk's own.

use std::sync::Arc;

use vmstrata_store::{CacheMode, Gate};

use super::open::open_top;
use crate::active::session::leave_clean;
use crate::chain::{Unflushed, open_layer};
use crate::error::{Error, ErrorKind, Result};
use crate::layers::{Layers, Top, index_of};
use crate::loading::Chain;
use crate::opener::Role;
use crate::resources::Resources;

/// Takes up what a killed process left of the layer below the chain's top, and ends its session.
///
/// # Errors
/// A file that is in use, is not the one that was found in the chain, or cannot be written.
pub(super) fn finish_snapshot(
    chain: Chain,
    (cache, unflushed): (CacheMode, Unflushed),
    resources: &Arc<Resources>,
) -> Result<()> {
    let Chain { top, mut below, index, .. } = chain;
    let layer = below.pop().expect("the unfinished layer");
    let (path, file, format) = (layer.path.clone(), layer.identity.file, layer.format());
    // A reader's lock on the file would keep the writer out.
    drop((top, index, layer));
    let opener = &**resources.files().opener();
    let backing = open_layer(&path, Role::Active(cache), Some(format), &Gate::unrestricted(), opener)?;
    if backing.opened.identity.file != file {
        // The gate let another file through.
        return Err(Error::from(ErrorKind::Changed).in_file(&path));
    }
    let (index, size) = (index_of(below.len()), backing.size);
    let mut asked = None;
    let map = || {
        asked = if below.is_empty() { None } else { Some(resources.share_map(below, None)?) };
        Ok(asked.clone())
    };
    let top = open_top(backing, (index, unflushed), map, resources)?;
    let layers = Layers::new(size, top, asked, resources);
    // A frozen layer has whole clusters only. Where one is not, what lies below was asked for.
    layers.complete_all()?;
    layers.commit()?;
    if let Top::Qcow2(active) = &layers.top {
        leave_clean(active, || ())?;
    }
    tracing::info!(file = %path.display(), "finished the snapshot that a killed process began");
    Ok(())
}
