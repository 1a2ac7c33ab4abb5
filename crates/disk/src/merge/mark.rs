//! Marking layers whose own state is about to be lost.
//!
//! What is written down into a layer is seen by nobody who reads it through the layers above, as those have the same clusters
//! themselves. Its own state, and those of dropped layers between, are gone with the first write, though. So before that
//! each gets a mark in its header: the file name under which what it holds will be a state again, that of the layer
//! whose place it takes. Whoever opens a state looks for it ([`Top::check_state`]); by its last step, a rename, the
//! merge makes it true. A mark changes nothing else: stock tools do not know it, and chains above it are sound.

use vmstrata_qcow2::{Extension, Extensions, extension::magic};
use vmstrata_store::Store;

use super::plan::Link;
use super::relink::{Below, Relink};
use crate::chain::{Qcow2Head, Top, read_head};
use crate::error::{ErrorKind, IoContext as _, Result};

/// The writes that mark a layer, or take its mark away.
#[derive(Debug)]
pub(super) struct Mark(Relink);

impl Mark {
    /// Finds out how the layer in `top`, one of `links`, can be marked as right under `name` only.
    ///
    /// # Errors
    /// A header without room, or that cannot be read.
    pub(super) fn plan(top: &Top, links: &[Link], layer: usize, name: &str) -> Result<Self> {
        let head = top.head.as_ref().ok_or(ErrorKind::Changed)?;
        Self::plan_as(&*top.opened.store, head, links, layer, Some(name)).map_err(|e| e.in_file(&top.path))
    }

    /// Finds out how the mark of the layer in `store` can be taken away.
    ///
    /// # Errors
    /// As [`Mark::plan`].
    pub(super) fn plan_removal(store: &dyn Store, links: &[Link], layer: usize) -> Result<Self> {
        let head = read_head(store, store.len().while_trying("read the file's length")?)?;
        Self::plan_as(store, &head, links, layer, None)
    }

    fn plan_as(
        store: &dyn Store,
        head: &Qcow2Head,
        links: &[Link],
        layer: usize,
        name: Option<&str>,
    ) -> Result<Self> {
        let link = &links[layer];
        let below = link.backing_name.as_ref().zip(layer.checked_sub(1)).map(|(name, below)| Below {
            name: name.clone(),
            format: links[below].format,
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
    /// A host that cannot write or flush: the layer is marked or not.
    pub(super) fn write(&self, store: &dyn Store) -> Result<()> {
        let flush = || store.flush().while_trying("flush the header");
        if self.0.write_body(store)? {
            flush()?;
        }
        self.0.write_sector(store)?;
        flush()
    }
}
