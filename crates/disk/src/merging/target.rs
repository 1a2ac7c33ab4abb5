//! The layer that is copied into, ready to be written.
//!
//! It is written as the active layer of a disk is, without a session: nothing of it is in a journal, because what is
//! copied is still in the dropped layers if it is lost. Its index goes first, by its autoclear bit: pages of the index lie
//! in clusters that are free, and are about to be used.

use std::sync::Arc;

use vmstrata_qcow2::header::field;
use vmstrata_qcow2::{Autoclear, Incompatible};
use vmstrata_types::{HostOffset, LayerIndex};

use super::MergeFault;
use crate::active::Active;
use crate::active::session::{FEATURES_SINCE, write_session};
use crate::chain::Top;
use crate::error::{ErrorKind, IoContext as _, Result};
use crate::layer::TablesLock;
use crate::resources::Resources;
use crate::times;

/// Makes the layer in `top`, which no one else writes, ready to be copied into; who reads its tables meanwhile has `lock`.
///
/// # Errors
/// A layer that may not be written as it is; a host that cannot read or write.
pub(crate) fn open(
    top: &Top,
    index: LayerIndex,
    lock: Option<TablesLock>,
    resources: &Resources,
) -> Result<Arc<Active>> {
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
        let mut active =
            Active::open(&top.path, store, top.opened.identity, header, index, resources.new_pages()?)?;
        active.tables_lock = lock;
        // What guests read does not change, so bitmaps stay true. Bits of others fall, as for every writer.
        active.autoclear = (header.autoclear & Autoclear::BITMAPS).bits();
        if header.version >= FEATURES_SINCE && header.autoclear.bits() != active.autoclear {
            write_session(&active, 0)?;
        }
        // A process that looks from now on finds it locked.
        times::touch(&*active.store)?;
        Ok(active)
    };
    ready().map(Arc::new).map_err(|error| error.in_layer(index).in_file(&top.path))
}

/// Undoes [`open`], as long as nothing was copied: the index holds as before.
pub(crate) fn give_back(top: &Top, active: &Active) {
    let Some(head) = &top.head else { return };
    let back = || {
        if head.header.version >= FEATURES_SINCE {
            let bits = head.header.autoclear.bits().to_be_bytes();
            let written = active.store.write_all(&bits, HostOffset::new(field::AUTOCLEAR));
            written.and_then(|()| active.store.flush()).while_trying("write the header")?;
        }
        times::put_back(&*active.store, top.opened.identity.mtime_ns)
    };
    if let Err(error) = back() {
        tracing::warn!(file = %top.path.display(), %error, "a layer that was not merged has lost its index");
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::chain::open_layer;
    use crate::layer::Format;
    use crate::opener::{LocalFiles, Role};
    use crate::{CreateOptions, ResourceOptions, create};
    use vmstrata_store::{CacheMode, Gate};

    #[test]
    fn a_target_that_is_given_back_is_as_it_was() {
        use std::os::unix::fs::{FileExt as _, MetadataExt as _};
        let dir = tempfile::tempdir().unwrap();
        for version in [2, 3] {
            let path = dir.path().join(format!("{version}.qcow2"));
            create(&path, &CreateOptions { size: Some(1 << 20), version, ..CreateOptions::default() })
                .unwrap();
            if version == 3 {
                let file = std::fs::File::options().write(true).open(&path).unwrap();
                file.write_all_at(&(1u64 << 31).to_be_bytes(), field::AUTOCLEAR).unwrap();
            }
            let state = || {
                let found = path.metadata().unwrap();
                (std::fs::read(&path).unwrap(), found.mtime(), found.mtime_nsec())
            };
            let before = state();
            std::thread::sleep(std::time::Duration::from_millis(20));
            let (role, gate) = (Role::Active(CacheMode::Host), Gate::unrestricted());
            let top = open_layer(&path, role, Some(Format::Qcow2), &gate, &LocalFiles).unwrap();
            let resources = Resources::new(ResourceOptions::default());
            let active = open(&top, LayerIndex::new(0), None, &resources).unwrap();
            assert_ne!(before.1..=before.2, state().1..=state().2, "others must see that it is written");
            give_back(&top, &active);
            assert!(state() == before, "version {version}");
        }
    }
}
