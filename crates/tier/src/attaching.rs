//! A disk in use becomes a tiered one.
//!
//! ```text
//!   before   web.qcow2, written by its guest
//!   move     web.qcow2.tier/ID.qcow2 (the same file, frozen) ◄── this host's copy, written by its guest     at once
//!            web.qcow2, an overlay on ID
//!   then     ID is read for its digests ──► epoch 1 is published ──► the engine goes on                     while the guest writes
//! ```
//!
//! Until epoch 1 is published, the path leads to the disk as it was when it moved. A process that is killed meanwhile leaves a copy
//! without a base, and a path that leads to a layer that no head names: whoever serves the disk next goes on from there.

use std::sync::Arc;
use std::{fmt, fs};

use vmstrata_disk::snapshot::now_ns;
use vmstrata_disk::{Disk, NewHome, OpenOptions, Resources, create_on};
use vmstrata_repo::Repository;
use vmstrata_types::told;

use crate::attach::{check_image, lead_to, name_in_repository, seal};
use crate::copies::{active_layer, hold, open_options};
use crate::engine::Held;
use crate::error::{Error, Result};
use crate::head::{DiskState, Epoch, EpochNumber, ObjectId};
use crate::meter::Meter;
use crate::metered::Watched;
use crate::object::Adoption;
use crate::pin::Pin;
use crate::place::{Copy, Place};
use crate::publisher::Publisher;
use crate::stand;
use crate::status::{TierOptions, TierState, TierStatus, WindowStatus};
use crate::tiered::Tiered;

/// See the module documentation. The disk is written on this host already.
pub struct Attaching {
    place: Place,
    options: TierOptions,
    open: OpenOptions,
    resources: Arc<Resources>,
    disk: Arc<Disk>,
    copy: Copy,
    publisher: Publisher,
    meter: Arc<Meter>,
    merges: Arc<dyn Repository>,
    /// The image, as it is called in the repository, and how far it is read.
    layer: ObjectId,
    adoption: Option<Adoption>,
    /// The disk's size when it moved, and when that was.
    size: u64,
    time_ns: u64,
    /// Bytes of the image when it began to move.
    total: u64,
    /// Keeps what the copy stands on, once that is published.
    pin: Option<Pin>,
}

impl fmt::Debug for Attaching {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Attaching").field("place", &self.place).finish_non_exhaustive()
    }
}

impl Attaching {
    /// Moves a disk in use to this host's copy. `open` says how it was opened.
    ///
    /// # Errors
    /// As [`Tiered::open`] of an image; [`Error::NotAttachable`] for one that is published already, and for disks of groups or with a
    /// repository elsewhere; as [`Disk::move_to`]. The disk is then what it was, or takes no more writes.
    pub fn begin(
        place: &Place,
        options: TierOptions,
        open: &OpenOptions,
        disk: &Arc<Disk>,
        resources: &Arc<Resources>,
    ) -> Result<Self> {
        let refused = |why: &str| place.not_attachable(why);
        if place.group_name().is_some() || place.elsewhere.is_some() {
            return Err(refused("a disk in use can be published alone, in a directory beside it"));
        }
        if check_image(place)?.is_some() {
            return Err(refused("a clone becomes a tiered disk while it is not in use"));
        }
        let mut watched = Watched::new(&options.wire);
        let (copy, publisher) = hold(place, |repository| watched.of(repository))?;
        if publisher.head().epoch.number != EpochNumber::NONE {
            return Err(refused("it is published already"));
        }
        let layer = name_in_repository(place)?;
        let about = fs::metadata(place.layer(layer)).map_err(Error::of_file(&place.path, "examine"))?;
        let (size, total) = (disk.size(), about.len());
        let to =
            NewHome { overlay: place.disk(), frozen: place.layer(layer), options: open_options(place, open) };
        let moved = create_on(&to.overlay, &active_layer(place, layer, size, open), &*place.opener())
            .map_err(Error::from)
            .and_then(|()| disk.move_to(&to, || lead_to(place, layer, size)));
        if let Err(error) = moved {
            if disk.failure().is_none() {
                // The layer is the image still, by its other name.
                let _ = fs::remove_file(place.layer(layer));
                let _ = fs::remove_file(&to.overlay);
            }
            return Err(error);
        }
        // The disk has moved: from here on nothing fails.
        let time_ns = now_ns();
        // What fails is counted: the layer then goes without an index.
        let _ = disk.finalize();
        Ok(Self {
            total,
            layer,
            adoption: None,
            place: place.clone(),
            options,
            open: open.clone(),
            resources: resources.clone(),
            disk: disk.clone(),
            copy,
            publisher,
            merges: watched.merges(),
            meter: watched.meter,
            size,
            time_ns,
            pin: None,
        })
    }

    /// What there is to say of it now.
    pub fn status(&self) -> TierStatus {
        let window = WindowStatus {
            window: self.options.window,
            on_outage: self.options.on_outage,
            durability: self.options.durability,
            unpublished_since_ns: Some(self.time_ns),
            ..WindowStatus::default()
        };
        TierStatus {
            state: TierState::Attaching,
            window,
            ..TierStatus::of(&self.place, self.publisher.head())
        }
    }

    /// Bytes of the image, and those of them that are left to be read.
    pub fn bytes(&self) -> (u64, u64) {
        (self.total, self.adoption.as_ref().map_or(self.total, Adoption::left))
    }

    /// Reads so many bytes more of the image, at most; returns how many.
    ///
    /// # Errors
    /// What the repository reports. It can be tried again.
    pub fn read(&mut self, most: u64) -> Result<u64> {
        if self.adoption.is_none() {
            self.adoption = Some(Adoption::begin(&**self.publisher.repository(), self.layer)?);
        }
        self.adoption.as_mut().expect("made above").read(most)
    }

    /// Publishes the first epoch, once all is read.
    ///
    /// # Errors
    /// As [`Tiered::sync`]. It can be tried again, unless another host took the disk over.
    ///
    /// # Panics
    /// Before all is read.
    pub fn publish(&mut self) -> Result<()> {
        if self.publisher.head().epoch.number == EpochNumber::NONE {
            let read = self.adoption.as_ref().expect("all is read");
            let object = read.finish(&**self.publisher.repository())?;
            let state = DiskState { name: self.place.name(), size: self.size, objects: vec![object] };
            let number = EpochNumber::NONE.next();
            let published =
                self.publisher.publish(Epoch { number, time_ns: self.time_ns, disks: vec![state] });
            if let Err(error @ Error::Fenced { .. }) = &published {
                self.disk.refuse_writes(&told(error));
            }
            published?;
        }
        let Self { place, copy, publisher, .. } = self;
        let head = publisher.head();
        if self.pin.is_none() {
            seal(place, &head.epoch)?;
            place.show(&head.epoch)?;
            let pin = stand::pin_for(&**publisher.repository(), head)?;
            copy.note(head.owner, Some(head.epoch.number))?;
            self.pin = Some(pin);
        }
        Ok(())
    }

    /// Has the disk published from now on, once its first epoch is.
    ///
    /// # Errors
    /// What repository or host report: the disk goes on, on this host, and is published once it is served anew.
    ///
    /// # Panics
    /// Before it is published.
    pub fn finish(self) -> Result<Tiered> {
        let Self { place, options, open, resources, disk, copy, publisher, meter, merges, pin, .. } = self;
        let pins = vec![pin.expect("it is published")];
        let running = vec![disk];
        let held = Held { copy, publisher, pins, meter, merges, running, reads_past_cache: true };
        Tiered::run(&place, options, &[open], &resources, held).map(|(_, tiered)| tiered)
    }
}
