//! Committing into the base of dropped layers, of a disk in use.
//!
//! ```text
//!   requests ──► map of the whole chain ──► the layer that has the newest: never what is written over meanwhile
//!   job      ──► what layers above the base have ──► written into the base ──► rename ──► shorter map
//! ```
//!
//! What is written has a newer version in a layer above, and the map leads there: requests see nothing of it, and none waits.
//! They get objects of the dropped layers that allow for growing, and one of the layer that stays; all keep their files open, because
//! after the rename that last one's path leads to another file.
//!
//! The states of dropped layers are lost with the first write. So these are claimed: no disk of this process stands on one, and
//! none is opened that would; other processes of ours find them locked ([`Role::CopiedInto`]). Stock tools may begin to read the
//! layer that stays, or a disk on it, as what they read is not touched.

use std::sync::Arc;

use super::Running;
use crate::error::Result;
use crate::layers::Layers;
use crate::merge::commit::{self, OpenDropped};
use crate::merge::direction::Asked;
use crate::merge::{Copier, MergeOptions};
use crate::opener::Role;
use crate::refs::{ChainFile, LocalHolders, open_twice};

impl Running {
    /// Begins to commit into the base of the dropped layers, if that is the way to take.
    ///
    /// # Errors
    /// [`crate::merge::MergeFault::NoCommit`]; a layer that cannot be opened, read or written.
    pub(super) fn begin_commit(
        &mut self,
        chain: &[ChainFile],
        options: &MergeOptions,
    ) -> Result<Option<Copier>> {
        let disk = Arc::clone(&self.disk);
        disk.with_local_holders(|here| self.begin_commit_beside(here, chain, options))
    }

    fn begin_commit_beside(
        &mut self,
        here: LocalHolders<'_>,
        chain: &[ChainFile],
        options: &MergeOptions,
    ) -> Result<Option<Copier>> {
        let (disk, range) = (Arc::clone(&self.disk), self.range);
        let above = &chain[range.first.index()..];
        let ours = |layers: &[ChainFile]| open_twice(layers, &here);
        let (path, resources) = (&disk.path, &disk.resources);
        let asked = Asked { disk: path, chain, range, options, resources, here, ours: &ours };
        let Some(found) = asked.choose()? else { return Ok(None) };
        let dropped = &above[..=range.last.index() - range.first.index()];
        if let Err(reason) = self.claim_all(dropped) {
            return asked.or_stream(reason);
        }
        let opened = commit::open(&asked, found, Role::CopiedInto, |held| self.put_held(chain, held));
        opened.map(Some).or_else(|failed| {
            if !failed.is_marked {
                self.put_back();
            }
            asked.or_stream_after(failed)
        })
    }

    /// Lets the dropped layers be like others again.
    fn put_back(&mut self) {
        let changing = self.disk.change();
        self.grow_no_more(&self.disk.layers_now());
        drop(changing);
        self.give_up_claims();
    }

    /// Makes sure that no disk of this process stands on one of the dropped layers, or will.
    fn claim_all(&mut self, dropped: &[ChainFile]) -> std::result::Result<(), String> {
        let claimed = dropped.iter().try_for_each(|link| self.claim(link));
        claimed.map_err(|error| {
            self.give_up_claims();
            error.to_string()
        })
    }

    /// Gives requests the objects of the dropped layers that allow for their growing.
    fn put_held(&self, chain: &[ChainFile], held: &OpenDropped) -> Result<()> {
        let (disk, first) = (&self.disk, self.range.first.index());
        let (_changing, layers) = self.hold_layers(chain)?;
        let map = layers.frozen.as_ref().expect("the dropped layers are in it");
        let stays = map.layer(self.range.target());
        let pinned = stays.growing();
        pinned.put_file(Some(disk.resources.files().store(stays)?));
        let map = map.with_layers(first, held.layers.iter().cloned().chain([Arc::new(pinned)]));
        disk.put_layers_and_call(Layers { frozen: Some(Arc::new(map)), ..Layers::clone(&layers) });
        disk.epochs.synchronize();
        Ok(())
    }
}
