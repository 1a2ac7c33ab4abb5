//! Where the active layer of a disk is: its file's name, and how the files of the chain are opened. A disk in use can move.
//!
//! ```text
//!   before   disk                          after   frozen ◄── overlay, the disk from now on
//!            /nas/web.qcow2                        the same file, by the name that the overlay knows it by
//! ```
//!
//! It is a snapshot whose overlay lies elsewhere, and under another name: no byte is copied, and the disk's users notice nothing.

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use vmstrata_store::{Gate, Place};

use super::Disk;
use super::switch::{NewNames, Switch};
use crate::access;
use crate::atomic_file::AtomicFile;
use crate::chain::OpenOptions;
use crate::create::fill;
use crate::error::{Error, Result};
use crate::layer::Format;
use crate::merging::MergeFault;
use crate::refs::back_refs;
use crate::snapshots::lock::name_from;
use crate::snapshots::overlay::Below;
use crate::snapshots::{SnapshotFault, SnapshotInfo};

/// The path and options of a disk. Earlier ones stay valid for those that refer to them.
#[derive(Debug)]
pub(super) struct Home {
    path: PathBuf,
    pub(super) options: OpenOptions,
    next: OnceLock<Box<Home>>,
}

impl Home {
    pub(super) fn new(path: &Path, options: &OpenOptions) -> Self {
        Self { path: path.to_owned(), options: options.clone(), next: OnceLock::new() }
    }
}

/// Where a disk moves to.
#[derive(Clone, Debug)]
pub struct NewHome {
    /// An empty image of the disk's size, on stable storage, whose backing file is `frozen`. Its name becomes the disk's.
    pub overlay: PathBuf,
    /// A name of the file that is active until now. It stays.
    pub frozen: PathBuf,
    /// How the files of the disk are opened from now on.
    pub options: OpenOptions,
}

impl NewHome {
    /// Makes the overlay, shaped as that of a snapshot of `disk` that is called `info`: on stable storage when this returns.
    ///
    /// # Errors
    /// As [`Disk::snapshot`]; a file that is there already. Nothing is left then.
    pub fn make(&self, disk: &Disk, info: &SnapshotInfo) -> Result<()> {
        // While a snapshot is taken, the disk's path leads to another file than the active one.
        let _changing = disk.change();
        let below = (disk.path(), disk.active_format()?);
        make_beside(&self.overlay, below, &self.frozen, (info, self.options.subclusters))
    }
}

/// Makes the empty image `overlay` on the frozen qcow2 layer `below`, whose state is called `info`; with subclusters if it may have them. On stable
/// storage when this returns.
///
/// # Errors
/// A layer that cannot be read, names that the header has no room for, a file that is there already. Nothing is left then.
pub fn make_overlay(overlay: &Path, below: &Path, (info, subclusters): (&SnapshotInfo, bool)) -> Result<()> {
    make_beside(overlay, (below, Format::Qcow2), below, (info, subclusters))
}

/// Removes a second name of a layer, and the back-references beside that name. No disk may stand on the layer by it.
///
/// # Errors
/// Whatever the host reports; the name may be there still.
pub fn remove_second_name(name: &Path) -> std::io::Result<()> {
    // First: a process that is killed in between finds the name again.
    back_refs::remove_all(name);
    Place::of(name)?.remove()
}

/// The same on a layer that will be called `name`.
fn make_beside(
    overlay: &Path,
    (below, format): (&Path, Format),
    name: &Path,
    (info, subclusters): (&SnapshotInfo, bool),
) -> Result<()> {
    let make = || {
        info.check().map_err(vmstrata_qcow2::CreateError::from)?;
        let shape = Below::read(below, format)?;
        let image = shape.overlay(name_from(overlay, name)?, info, subclusters)?;
        let draft = AtomicFile::beside(overlay)?;
        access::copy(below, &draft.file)?;
        fill(&draft.file, &image)?;
        // Before it is there, as for a clone.
        back_refs::record_chain(overlay, [name, overlay].into_iter());
        draft.publish(overlay, false)
    };
    make().map_err(|error| error.in_file(overlay))
}

impl Disk {
    #[inline]
    pub(super) fn home(&self) -> &Home {
        let mut home = &self.home;
        while let Some(next) = home.next.get() {
            home = next;
        }
        home
    }

    /// The active layer's file, as it was named.
    pub fn path(&self) -> &Path {
        &self.home().path
    }

    /// Makes another image the active layer. `publish` runs just before the switch, and has the disk's old name lead to the new chain; writes
    /// until the switch go to the frozen file. Returns for how long writes were held. [`Disk::finalize`] completes the move.
    ///
    /// # Errors
    /// [`MergeFault::LayersChanged`] if another file is active than the one that has the name. A disk that takes no writes, a raw one, one
    /// whose layers are being merged, an overlay that cannot be opened, what `publish` reports: nothing has changed, and the overlay can be deleted, unless the disk's name leads elsewhere by then: it takes no more
    /// writes. The same after a host that cannot flush what was active.
    pub fn move_to<E: From<Error> + fmt::Display>(
        &self,
        to: &NewHome,
        publish: impl FnOnce() -> Result<(), E>,
    ) -> Result<Duration, E> {
        let mut changing = self.change();
        if self.state.is_merging() {
            return Err(Error::from(MergeFault::Busy).in_file(self.path()).into());
        }
        if self.active_format()? == Format::Raw {
            return Err(Error::from(SnapshotFault::StaysRaw).in_file(self.path()).into());
        }
        let opener = Arc::clone(self.resources.files().opener());
        let active = self.active_file();
        // A snapshot may have been taken since the caller gave the file that name.
        if Some(opener.identity(&to.frozen, &Gate::unrestricted())?.file) != active {
            return Err(Error::from(MergeFault::LayersChanged).in_file(self.path()).into());
        }
        opener.flush_name(&to.overlay).map_err(|error| error.in_file(&to.overlay))?;
        let names = NewNames { overlay: &to.overlay, frozen: &to.frozen, path: &to.overlay };
        let switch = Switch::prepare(self, names)?;
        publish().inspect_err(|error| {
            let leads_to = opener.identity(self.path(), &Gate::unrestricted()).ok().map(|found| found.file);
            if leads_to.is_none() || leads_to != active {
                self.refuse_writes(&error.to_string());
            }
        })?;
        let home = Home::new(&to.overlay, &to.options);
        let (mut made, pause) = Switch::make(vec![switch], || self.settle(home));
        let (_, pending) = made.pop().expect("one for each disk");
        *self.snapshot_names.lock() = None;
        self.record_chain();
        self.resources.maintenance().layer_is_new();
        self.commit_frozen(&pending)?;
        changing.pending = Some(pending);
        tracing::info!(from = %to.frozen.display(), to = %self.path().display(), pause_us = pause.as_micros(), "moved");
        Ok(pause)
    }

    pub(super) fn settle(&self, home: Home) {
        self.home().next.set(Box::new(home)).expect("the layers are held, so one move runs at a time");
    }

    /// Records the disk where its chain goes on in other directories.
    pub(super) fn record_chain(&self) {
        let layers = self.layers_now();
        let below = layers.frozen.iter().flat_map(|map| map.layers()).map(|layer| &*layer.path);
        back_refs::record_chain(self.path(), below.chain([self.path()]));
    }
}
