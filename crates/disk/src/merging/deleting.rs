//! The flag of a layer whose own state is about to be lost.
//!
//! A commit writes into a layer what the layers above it have already, so readers through those layers see no change. The
//! layer's own state, and those of dropped layers between, are lost with the first write. So the merge first writes a flag into
//! the header of each: the file name under which its content will be a state again, that of the layer whose place it takes.
//! Opening a state checks the flag ([`Top::check_state`]); the merge's last step, a rename, makes the name true. Stock tools
//! ignore the flag, and chains above stay sound.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt as _;

use vmstrata_qcow2::{Extension, Extensions, extension::magic};
use vmstrata_store::Store;

use super::relink::{Below, Relink};
use crate::chain::{Qcow2Head, Top, read_head};
use crate::error::{ErrorKind, IoContext as _, Result};
use crate::refs::ChainFile;

/// The writes that set the flag of a layer, or clear it.
#[derive(Debug)]
pub(super) struct DeletingFlag(Relink);

impl DeletingFlag {
    /// Finds out how the layer in `top`, one of `chain`, can be flagged as right under `name` only.
    ///
    /// # Errors
    /// A header without room, or that cannot be read.
    pub(super) fn plan(top: &Top, chain: &[ChainFile], layer: usize, name: &OsStr) -> Result<Self> {
        let head = top.head.as_ref().ok_or(ErrorKind::Changed)?;
        Self::plan_as(&*top.opened.store, head, chain, layer, Some(name)).map_err(|e| e.in_file(&top.path))
    }

    /// Finds out how the flag of the layer in `store` can be cleared.
    ///
    /// # Errors
    /// As [`DeletingFlag::plan`].
    pub(super) fn plan_removal(store: &dyn Store, chain: &[ChainFile], layer: usize) -> Result<Self> {
        let head = read_head(store, store.len().while_trying("read the file's length")?)?;
        Self::plan_as(store, &head, chain, layer, None)
    }

    fn plan_as(
        store: &dyn Store,
        head: &Qcow2Head,
        chain: &[ChainFile],
        layer: usize,
        name: Option<&OsStr>,
    ) -> Result<Self> {
        let link = &chain[layer];
        let below = link.backing_name.as_ref().zip(layer.checked_sub(1)).map(|(name, below)| Below {
            name: name.clone(),
            format: chain[below].format,
            record: link.record.clone(),
        });
        let change = |extensions: &mut Extensions| {
            extensions.items.retain(|item| item.magic() != magic::DROPPED);
            let data = name.map(|name| name.as_bytes().to_vec());
            extensions.items.extend(data.map(|data| Extension::Unknown { magic: magic::DROPPED, data }));
        };
        Relink::plan_with(store, &head.header, below.as_ref(), change).map(Self)
    }

    /// Writes it. On stable storage when this returns.
    ///
    /// # Errors
    /// A host that cannot write or flush: the flag is set or not.
    pub(super) fn write(&self, store: &dyn Store) -> Result<()> {
        let flush = || store.flush().while_trying("flush the header");
        if self.0.write_body(store)? {
            flush()?;
        }
        self.0.write_sector(store)?;
        flush()
    }
}
