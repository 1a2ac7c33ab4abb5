//! The layer that is copied into, ready to be written.
//!
//! It is written as the active layer of a disk is, without a session: nothing of it is in a journal, because what is
//! copied is still in the dropped layers if it is lost. Its index goes first, by its autoclear bit: pages of the index lie
//! in clusters that are free, and are about to be used.

use std::sync::Arc;

use vmstrata_qcow2::{Autoclear, Incompatible};
use vmstrata_types::LayerIndex;

use super::MergeFault;
use crate::active::Active;
use crate::chain::Top;
use crate::disk::write_session;
use crate::error::{ErrorKind, Result};
use crate::resources::Resources;

/// Version 2 headers have no feature bits.
const FEATURES_SINCE: u32 = 3;

/// Makes the layer in `top`, which no one else writes, ready to be copied into.
///
/// # Errors
/// A layer that may not be written as it is; a host that cannot read or write.
pub(crate) fn open(top: &Top, index: LayerIndex, resources: &Resources) -> Result<Arc<Active>> {
    let ready = || -> Result<Active> {
        let head = top.head.as_ref().ok_or(ErrorKind::Changed)?;
        let header = &head.header;
        if header.incompatible.intersects(Incompatible::DIRTY | Incompatible::CORRUPT) {
            return Err(MergeFault::NeedsRepair.into());
        }
        if top.is_in_session() {
            return Err(MergeFault::Unclosed.into());
        }
        let store = Arc::clone(&top.opened.store);
        let mut active = Active::open(&top.path, store, top.opened.identity, header, index, resources)?;
        // What guests read does not change, so bitmaps stay true. Bits of others fall, as for every writer.
        active.autoclear = (header.autoclear & Autoclear::BITMAPS).bits();
        if header.version >= FEATURES_SINCE && header.autoclear.bits() != active.autoclear {
            write_session(&active, 0)?;
        }
        Ok(active)
    };
    ready().map(Arc::new).map_err(|error| error.in_layer(index).in_file(&top.path))
}
