//! Merging downwards: what the layers above the lowest dropped one hold is written into that one, which then takes the place of
//! the layer that stays.
//!
//! ```text
//!   before   base ◄── 1 ◄── 2 ◄── 3 ◄── disk          drop 1 and 2
//!   mark     base ◄── 1*◄── 2*◄── 3 ◄── disk          1 and 2 are no states any more
//!   write    base ◄── 1'◄── 2*◄── 3 ◄── disk          1' = 1, and what 2 and 3 have: hidden by these
//!   rename   base ◄────────────── 1'◄── disk          under the name of 3, whose file is gone; its mark is true now, and goes
//!   remove                                            the file of 2
//! ```
//!
//! The layer above, and every other image on the one that stays, find it under the name that they know: none of their headers
//! is written.
//!
//! Invariants:
//! - Nothing is written into the lowest layer but clusters that a layer above it, up to the one that stays, has itself.
//! - All of them are on stable storage before the rename, and that is before a file is removed.
//! - Before the first write, nobody else stands on a dropped layer or uses one, and each is marked ([`super::deleting`]) and locked.

use std::path::PathBuf;
use std::sync::Arc;

use vmstrata_store::{Access, OpenStore, Place};
use vmstrata_types::GuestRange;

use super::copier::let_go;
use super::deleting::DeletingFlag;
use super::direction::{Asked, Downwards};
use super::holes::Holes;
use super::plan::map_up_to;
use super::room::Room;
use super::{Copier, target};
use crate::access;
use crate::active::Active;
use crate::chain::Top as OpenTop;
use crate::error::{Error, IoContext as _, Result};
use crate::index::forget_sidecar;
use crate::layer::Layer;
use crate::layers::{Layers, Top};
use crate::opener::Role;
use crate::refs::{Link, back_refs};

/// The way down; see the module documentation.
#[derive(Debug)]
pub(crate) struct Down {
    /// The chain up to the layer that stays, with the dropped ones as they are now.
    state: Layers,
    /// The lowest layer's file, and the one whose place it takes.
    from: PathBuf,
    to: PathBuf,
    /// The chain up to the lowest layer, for its header.
    links: Vec<Link>,
    /// The other dropped layers, locked.
    others: Vec<OpenTop>,
}

/// The dropped layers' files, base first: open, and as objects that allow for their being written.
pub(crate) struct Held {
    tops: Vec<OpenTop>,
    pub(crate) layers: Vec<Arc<Layer>>,
}

impl Held {
    /// Objects for the dropped layers of `found` whose files are not open yet; it reads through them from then on.
    fn of(found: &mut Downwards, first: usize) -> Self {
        let dropped: Vec<Arc<Layer>> = found.state.layers().skip(first).cloned().collect();
        let (_, dropped) = dropped.split_last().expect("the one that stays");
        let layers: Vec<Arc<Layer>> = dropped.iter().map(|layer| Arc::new(layer.growing())).collect();
        found.state = Arc::new(found.state.with_layers(first, layers.iter().cloned()));
        Self { tops: Vec::new(), layers }
    }

    fn open(&mut self, asked: &Asked<'_>, role: Role) -> Result<()> {
        let opener = &**asked.resources.files().opener();
        for (number, layer) in self.layers.iter().enumerate() {
            let top = asked.links[asked.range.first.index() + number].open(role, opener)?;
            layer.put_file(Some(OpenStore::new(Arc::clone(&top.opened.store))));
            self.tops.push(top);
        }
        Ok(())
    }
}

/// Why nothing can be written down.
pub(crate) struct Failed {
    pub(crate) error: Error,
    /// Whether the dropped layers are marked already, or some of them.
    pub(crate) is_marked: bool,
}

/// Makes everything ready to write into the lowest dropped layer, and marks the dropped ones. `tell` is given the objects that
/// allow for that before anything is written.
///
/// # Errors
/// A layer that is in use, or cannot be opened, read or written.
pub(crate) fn open(
    asked: &Asked<'_>,
    found: Downwards,
    role: Role,
    tell: impl FnOnce(&Held) -> Result<()>,
) -> std::result::Result<Copier, Failed> {
    let mut is_marked = false;
    open_and_mark(asked, found, role, tell, &mut is_marked).map_err(|error| Failed { error, is_marked })
}

fn open_and_mark(
    asked: &Asked<'_>,
    mut found: Downwards,
    role: Role,
    tell: impl FnOnce(&Held) -> Result<()>,
    is_marked: &mut bool,
) -> Result<Copier> {
    let (first, links) = (asked.range.first.index(), asked.links);
    let below = first.checked_sub(1);
    let below = below
        .map(|layer| map_up_to(asked.disk, links, layer, &asked.options.open, asked.resources))
        .transpose()?;
    let mut held = Held::of(&mut found, first);
    held.open(asked, role)?;
    tell(&held)?;
    let mut tops = held.tops;
    let others = tops.split_off(1);
    let lowest = tops.pop().expect("a layer is dropped");
    let active = target::open(&lowest, asked.range.first, asked.resources)?;
    let size = active.size();
    let layers = Layers::new(size, Top::Qcow2(Arc::clone(&active)), below.clone(), asked.resources);
    let state = Layers::new(size, Top::Frozen, Some(Arc::clone(&found.state)), asked.resources);
    let mut ready = || -> Result<Room> {
        let room = Room::find(&lowest.path, layers.push_demand(&state, &Holes::default())?)?;
        let locked: Vec<_> = held.layers.iter().map(|layer| layer.identity.file).collect();
        asked
            .check_unused(&found.users, &locked)
            .map_err(|reason| Error::from(super::MergeFault::NotDown { reason }).in_file(&lowest.path))?;
        *is_marked = true;
        for (number, top) in [&lowest].into_iter().chain(&others).enumerate() {
            let mark = DeletingFlag::plan(top, links, first + number, asked.new_name())?;
            mark.write(&*top.opened.store).map_err(|error| error.in_file(&top.path))?;
        }
        Ok(room)
    };
    let room = ready().inspect_err(|_| target::give_back(&lowest, &active))?;
    let to = links[asked.range.target().index()].path.clone();
    let down = Down { state, from: lowest.path, to, links: links[..=first].to_vec(), others };
    Ok(Copier::down(active, layers, below, down, room))
}

impl Down {
    /// Writes down what lies in `range`; returns the bytes written.
    ///
    /// # Errors
    /// As [`Layers::push_down`].
    pub(super) fn copy(&self, into: &Layers, range: GuestRange, holes: &Holes) -> Result<u64> {
        into.push_down(range, &self.state, holes)
    }

    /// The file's path once the merge is done.
    pub(crate) fn path(&self) -> &PathBuf {
        &self.to
    }

    /// The chain's file that is gone after that.
    pub(super) fn old_path(&self) -> &PathBuf {
        &self.from
    }

    /// Lets others read the dropped layers above the lowest one, whose states are lost.
    pub(super) fn let_go(&self) {
        self.others.iter().for_each(|top| let_go(&*top.opened.store, &top.path));
    }

    /// Lets the lowest layer, all of which is on stable storage, take the place of the one that stays.
    ///
    /// # Errors
    /// A host that cannot rename or flush: the one or the other is there.
    pub(super) fn take_place(&self, lowest: &Active) -> Result<()> {
        // Whoever may read the one that stays, and nobody else, may read what takes its place.
        let places = || Ok((Place::of(&self.from)?, Place::of(&self.to)?));
        let (from, to) =
            places().while_trying("find its directory").map_err(|error: Error| error.in_file(&self.from))?;
        let file = from.open(Access::ReadOnly).while_trying("open it to set its owner");
        file.and_then(|file| access::copy(&self.to, &file)).map_err(|error| error.in_file(&self.from))?;
        // They speak of files that these names do not lead to any more.
        for file in [&self.from, &self.to] {
            forget_sidecar(file);
        }
        let renamed = from
            .rename(&to)
            .and_then(|()| to.directory().sync())
            .while_trying("give it the name of the layer above");
        renamed.map_err(|error| error.in_file(&self.from))?;
        back_refs::remove_all(&self.from);
        self.unmark(lowest).or_else(|error| {
            // It is true, and so in nobody's way.
            tracing::warn!(file = %self.to.display(), %error, "a merged layer keeps a mark that it does not need");
            Ok(())
        })
    }

    fn unmark(&self, lowest: &Active) -> Result<()> {
        let layer = self.links.len() - 1;
        let mark = DeletingFlag::plan_removal(&*lowest.store, &self.links, layer)?;
        lowest.alloc.exclusively(|| mark.write(&*lowest.store))
    }
}
