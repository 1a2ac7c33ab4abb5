//! A disk of those that an engine publishes together: its layers on this host, and their way into the repository.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use vmstrata_disk::merge::{Merge, MergeOptions, Selection};
use vmstrata_disk::{Disk, OpenOptions, Resources};
use vmstrata_repo::Repository;

use crate::copies::{cuts, open_options};
use crate::cuts::Cut;
use crate::dense::{says_nothing, ship_state};
use crate::error::Result;
use crate::head::{DiskState, Epoch, EpochNumber, Object, ObjectId};
use crate::merger::{Ground, Merger};
use crate::place::Place;
use crate::stand::border;

/// See the module documentation.
pub(crate) struct Member {
    pub(crate) place: Place,
    pub(crate) disk: Arc<Disk>,
    pub(crate) merger: Merger,
    open: OpenOptions,
    resources: Arc<Resources>,
}

impl Member {
    /// The disk with its layers on this host, which is opened unless it is in use already. `merges` is the repository, for merges of its layers,
    /// which give way while epochs are late.
    ///
    /// # Errors
    /// Whatever the host reports.
    pub(crate) fn new(
        place: Place,
        running: Option<Arc<Disk>>,
        open: &OpenOptions,
        resources: &Arc<Resources>,
        (merges, is_late): (Arc<dyn Repository>, Arc<AtomicBool>),
    ) -> Result<Self> {
        let open = open_options(&place, open);
        let disk = running.map_or_else(|| Disk::open(&place.disk(), &open, resources), Ok)?;
        let merger = Merger::new(Ground {
            repository: merges,
            place: place.clone(),
            open: open.clone(),
            resources: resources.clone(),
            is_late,
        });
        Ok(Self { place, disk, merger, open, resources: resources.clone() })
    }

    /// The epochs that are layers of it, oldest first.
    ///
    /// # Errors
    /// Whatever the host reports.
    pub(crate) fn cuts(&self) -> Result<Vec<Cut>> {
        cuts(self.disk.path(), &self.open)
    }

    /// Ships a cut, to stand on what the repository has of the disk; nothing where the disk was not written.
    ///
    /// # Errors
    /// As [`ship_state`].
    pub(crate) fn ship(
        &self,
        repository: &dyn Repository,
        cut: &Cut,
        below: &DiskState,
    ) -> Result<Option<Object>> {
        if cut.size == below.size && says_nothing(&cut.layer, &self.resources)? {
            return Ok(None);
        }
        let below = Some(below.newest());
        ship_state(repository, &cut.layer, below, &self.open, &self.resources).map(Some)
    }

    /// Goes on merging the disk's layers in the repository; returns those of the result, once it is complete. `on_host` is the layer of this host
    /// that is the epoch, if there is one.
    ///
    /// # Errors
    /// As [`Merger::go_on`].
    pub(crate) fn merge_layers(
        &mut self,
        epoch: &Epoch,
        on_host: Option<PathBuf>,
    ) -> Result<Option<Vec<Object>>> {
        let state = self.place.state(epoch);
        let newest = on_host.unwrap_or_else(|| self.place.layer(state.newest()));
        self.merger.go_on(&state.objects, newest)
    }

    /// Merges epochs on this host into the layer above them, as far as there is time.
    ///
    /// # Errors
    /// Whatever the host reports.
    pub(crate) fn merge(&self, epochs: &[EpochNumber], is_stopped: impl Fn() -> bool) -> Result<()> {
        let names: Vec<String> = epochs.iter().map(|number| number.snapshot_name()).collect();
        let selection = Selection::named(self.disk.path(), &names, &self.open)?;
        for range in selection.ranges(self.disk.path(), &self.open)? {
            let mut merge = Merge::of_disk(&self.disk, range, &MergeOptions::default())?;
            while let Some(action) = merge.select() {
                if is_stopped() {
                    return Ok(());
                }
                merge.apply(action)?;
            }
        }
        Ok(())
    }

    /// The layer of the repository that it stands on, and its lowest layer on this host, unless that takes writes.
    pub(crate) fn border(&self) -> Option<(ObjectId, Option<PathBuf>)> {
        border(&self.disk, &self.place.repository)
    }
}
