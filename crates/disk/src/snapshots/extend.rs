//! The index of a layer that was frozen just now.
//!
//! A chain opens at once only if its newest frozen layer has an index, so a snapshot must not leave it without. Where the
//! layer below has one, what is added is in proportion to what this layer changed. A chain without any gets all of it: that
//! is once, and reads the tables of every layer.

use std::path::Path;
use std::sync::Arc;

use crate::chain::{OpenOptions, backing_of, open_layer};
use crate::error::Result;
use crate::index::{self, Found, IndexOptions, IndexOutcome, Looks};
use crate::layer::Format;
use crate::opener::{LocalFiles, Opener, Role};

/// Gives the newest layer below the disk at `disk` an index. Without one the disk works, and opens slower.
pub(crate) fn index_newest(disk: &Path, options: &OpenOptions) {
    match extend(disk, options) {
        Ok(bytes) => tracing::debug!(disk = %disk.display(), ?bytes, "index"),
        Err(error) => tracing::warn!(%error, "the new layer gets no index: the disk opens, but slower"),
    }
}

/// Returns the bytes that the index added; `None` where there is nothing to extend.
fn extend(disk: &Path, options: &OpenOptions) -> Result<Option<u64>> {
    let opener: Arc<dyn Opener> = Arc::new(LocalFiles);
    let gate = options.gate(disk)?;
    // What is below is what the overlay says, not what a guest may have written at its start.
    let overlay = open_layer(disk, Role::Inspected, Some(Format::Qcow2), &gate, &*opener)?;
    let Some((frozen, format)) = backing_of(disk, overlay.head.as_ref())? else { return Ok(None) };
    let top = open_layer(&frozen, Role::Frozen, format, &gate, &*opener)?;
    if top.head.is_none() {
        return Ok(None);
    }
    let Some((name, format)) = backing_of(&frozen, top.head.as_ref())? else {
        let written = index::extend(&frozen, Format::Qcow2, &[], None, &gate, &opener)?;
        return Ok(Some(written.bytes()));
    };
    let below = open_layer(&name, Role::Frozen, format, &gate, &*opener)?;
    let Found::Whole(index) = index::load(&below, &gate, &opener, &mut Looks::default()) else {
        return build_all(disk, options);
    };
    let written = index::extend(&frozen, Format::Qcow2, index.layers(), Some(&index), &gate, &opener)?;
    Ok(Some(written.bytes()))
}

fn build_all(disk: &Path, options: &OpenOptions) -> Result<Option<u64>> {
    let built = index::build(disk, &IndexOptions::of_disk(options, None))?;
    let (mut bytes, mut failed) = (0, None);
    // Those below may do without: published layers of a tiered disk have none that others find.
    for layer in built.layers {
        failed = None;
        match layer.outcome {
            IndexOutcome::Built { bytes: more, .. } => bytes += more,
            IndexOutcome::Failed(error) => failed = Some(error),
            IndexOutcome::Kept(_) | IndexOutcome::NotNeeded => {}
        }
    }
    failed.map_or(Ok(Some(bytes)), Err)
}
