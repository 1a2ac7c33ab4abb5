//! Moves a tiered disk in use to another version of its base.
//!
//! ```text
//!   cut       v1 ◄── own ◄── epoch N ◄── active      the guest goes on, and so do cuts and heads
//!   copy      v2 ◄── draft                           reads as epoch N: made, compared and shipped beside the engine
//!   publish   v2 ◄── draft                           as epoch N, if that is not published by now
//!             v2 ◄── draft ◄── N+1 to M              else as epoch M, the newest: a merge onto other layers
//!   stand     v2 ◄── draft ◄── epoch N ◄── active    as on any newer state: see `stand`
//! ```
//!
//! So no state is published but by a head that names it whole, and what this host has is not changed but for the name of the layer below it. A
//! process that is killed leaves an epoch like any other; its successor deletes the draft, and releases the pin.
//!
//! Invariants: a pin of this host's copy keeps the new version's layers in the disk's repository from before the draft is made until the engine
//! has published it, or given it up. Meanwhile the layers of this host are not merged, nor made to stand on others.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use vmstrata_disk::Disk;

use crate::attach::share;
use crate::dense::{MergeOrders, ship_merged};
use crate::error::{Error, Result};
use crate::head::{DiskState, Epoch, OBJECTS_MAX, Object};
use crate::merger::Ground;
use crate::pin::Pin;
use crate::rebase::{Draft, draft_of, remove_if_there};
use crate::rebases::Stage;
use crate::shared::{Shared, ended};
use crate::stand::pin_first;

/// See the module documentation. Dropped before it is published, it is given up.
#[derive(Debug)]
pub struct Rebasing {
    shared: Arc<Shared>,
    ground: Arc<Ground>,
    /// The layer of this host that is epoch N.
    state: PathBuf,
    draft: PathBuf,
    onto: PathBuf,
    /// The layers of the new version, and the draft once it is shipped.
    objects: Vec<Object>,
    pin: Pin,
}

impl Rebasing {
    /// Cuts the disk, and gives the published layer `onto` of its base a name in its own repository.
    pub(crate) fn begin(
        shared: &Arc<Shared>,
        ground: &Arc<Ground>,
        disks: &[Arc<Disk>],
        onto: &Path,
    ) -> Result<Self> {
        let (place, repository) = (&ground.place, &*ground.repository);
        let refused = |why: &str| Error::OtherBase { onto: onto.display().to_string(), why: why.to_owned() };
        let ([disk], None) = (disks, place.group_name()) else {
            return Err(refused("a disk of a group keeps its base"));
        };
        if place.elsewhere.is_some() {
            return Err(refused("the disk's repository is no directory, which could share its layers"));
        }
        // No sweep looks at the pins between the links and the pin.
        let changing = shared.changing.lock();
        let objects = share(place, onto)?;
        if objects.len() >= OBJECTS_MAX {
            return Err(Error::TooManyLayers { repository: repository.describe() });
        }
        let state = DiskState { name: place.name(), size: disk.size(), objects: objects.clone() };
        let status = shared.status();
        let epoch = Epoch { number: status.epoch, time_ns: status.epoch_time_ns, disks: vec![state] };
        let pin = pin_first(repository, status.owner, epoch)?;
        let begun = place.show(&pin.epoch).and_then(|()| {
            let mut rebases = shared.rebases.lock();
            let cut = shared.cut_anew(disks)?;
            rebases.begin(cut.number);
            Ok(cut.layer)
        });
        drop(changing);
        match begun {
            Ok(state) => {
                let onto = place.layer(objects.last().expect("a state has a layer").id);
                let (shared, ground) = (Arc::clone(shared), Arc::clone(ground));
                let new = Self { draft: draft_of(place), shared, ground, state, onto, objects, pin };
                remove_if_there(&new.draft)?;
                Ok(new)
            }
            Err(error) => {
                shared.rebases.lock().end(pin, objects.iter().map(|object| object.id).collect());
                Err(error)
            }
        }
    }

    /// The overlay that is to be made.
    pub fn draft(&self) -> Draft<'_> {
        let Ground { place, .. } = &*self.ground;
        let layers = [&*place.local, &*place.repository];
        Draft { disk: &self.state, onto: &self.onto, path: &self.draft, layers }
    }

    /// Ships the draft, which is flushed, closed and compared, and has the engine publish it.
    ///
    /// # Errors
    /// As [`crate::ship_state`].
    pub fn ship(&mut self) -> Result<()> {
        let Ground { repository, open, resources, is_late, .. } = &*self.ground;
        let below = self.objects.last().map(|object| object.id);
        let orders = MergeOrders { gives_way: Arc::clone(is_late), ..MergeOrders::default() };
        let layers = [&*self.draft];
        let shipped = ship_merged(&**repository, &self.draft, &layers, below, open, resources, &orders)?;
        self.objects.push(shipped);
        self.shared.rebases.lock().advance(Stage::Drafted(self.objects.clone()));
        self.shared.changed.notify_all();
        Ok(())
    }

    /// Whether the disk is published on the new version, and this host's copy stands on that.
    ///
    /// # Errors
    /// [`Error::NotPublished`]: the disk stands on what it stood on.
    pub fn is_published(&self) -> Result<bool> {
        match self.shared.rebases.lock().stage() {
            Some(Stage::Done) => return Ok(true),
            Some(Stage::Failed(why)) => return Err(Error::NotPublished(why.clone())),
            _ => {}
        }
        let orders = self.shared.orders.lock();
        if orders.has_ended { Err(ended(&orders)) } else { Ok(false) }
    }
}

impl Drop for Rebasing {
    fn drop(&mut self) {
        if let Err(error) = remove_if_there(&self.draft) {
            tracing::warn!(%error, "a draft stays until the disk is served anew");
        }
        let objects = self.objects.iter().map(|object| object.id).collect();
        self.shared.rebases.lock().end(self.pin.clone(), objects);
        self.shared.changed.notify_all();
    }
}
