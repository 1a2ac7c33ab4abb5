//! What layers take of the host's storage.

use std::os::unix::fs::MetadataExt as _;
use std::path::Path;

use crate::names::sidecar_of;

/// `st_blocks` counts in these.
const BLOCK: u64 = 512;

/// Bytes that the layer at `path` takes, with the index beside it; 0 for one that is gone.
pub(crate) fn allocated_bytes(path: &Path) -> u64 {
    let of = |path: &Path| path.symlink_metadata().map_or(0, |found| found.blocks() * BLOCK);
    of(path) + sidecar_of(path).map_or(0, |sidecar| of(&sidecar))
}
