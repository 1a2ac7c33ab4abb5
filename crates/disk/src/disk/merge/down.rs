//! Writing down into the lowest dropped layer of a disk in use.
//!
//! ```text
//!   requests ──► map of the whole chain ──► the layer that has the newest: never what is written over meanwhile
//!   job      ──► what layers above the lowest dropped one have ──► written into that one ──► rename ──► shorter map
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
use crate::merge::direction::Asked;
use crate::merge::down::{self, Held};
use crate::merge::{Copier, MergeOptions};
use crate::opener::Role;
use crate::refs::{Link, LocalHolders, open_twice};

impl Running {
    /// Begins to write down into the lowest dropped layer, if that is the way to take.
    ///
    /// # Errors
    /// [`crate::merge::MergeFault::NotDown`]; a layer that cannot be opened, read or written.
    pub(super) fn write_down(&mut self, links: &[Link], options: &MergeOptions) -> Result<Option<Copier>> {
        let disk = Arc::clone(&self.disk);
        disk.with_local_holders(|here| self.write_down_from(here, links, options))
    }

    fn write_down_from(
        &mut self,
        here: LocalHolders<'_>,
        links: &[Link],
        options: &MergeOptions,
    ) -> Result<Option<Copier>> {
        let (disk, range) = (Arc::clone(&self.disk), self.range);
        let above = &links[range.first.index()..];
        let ours = |layers: &[Link]| open_twice(layers, &here);
        let (path, resources) = (&disk.path, &disk.resources);
        let asked = Asked { disk: path, links, range, options, resources, here, ours: &ours };
        let Some(found) = asked.choose()? else { return Ok(None) };
        let dropped = &above[..=range.last.index() - range.first.index()];
        if let Err(reason) = self.claim_all(dropped) {
            return asked.or_up(reason);
        }
        let opened = down::open(&asked, found, Role::CopiedInto, |held| self.put_held(links, held));
        opened.map(Some).or_else(|failed| {
            if !failed.is_marked {
                self.put_back();
            }
            asked.or_up_after(failed)
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
    fn claim_all(&mut self, dropped: &[Link]) -> std::result::Result<(), String> {
        let claimed = dropped.iter().try_for_each(|link| self.claim(link));
        claimed.map_err(|error| {
            self.give_up_claims();
            error.to_string()
        })
    }

    /// Gives requests the objects of the dropped layers that allow for their growing.
    fn put_held(&self, links: &[Link], held: &Held) -> Result<()> {
        let (disk, first) = (&self.disk, self.range.first.index());
        let (_changing, layers) = self.hold_layers(links)?;
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
