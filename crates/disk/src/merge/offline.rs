//! Merging layers of a disk that nobody serves.
//!
//! The writer's lock of the disk's file is held from the beginning to the end, and that of the target as long as it is
//! written, so that running machines and servers are met with a refusal.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use vmstrata_store::{CacheMode, FileStore, Gate};
use vmstrata_types::{GuestOffset, GuestRange};

use super::plan::{self, Link};
use super::relink::{Below, Relink};
use super::remove::{self, Users};
use super::{MergeFault, MergeOptions, MergeRange, Merged, target};
use crate::active::Active;
use crate::chain::{OpenOptions, Roles, freeze, open_layer, walk};
use crate::create::flush_directory;
use crate::disk::leave_clean;
use crate::error::{Error, ErrorKind, Result};
use crate::index::{self, Found, IndexOptions, Looks};
use crate::layer::Format;
use crate::layers::{Layers, Top};
use crate::map::FrozenMap;
use crate::opener::{Role, directory_of};
use crate::resources::Resources;
use crate::snapshot::{lock_settled, name_from};

/// Guest bytes looked at in one step, about.
pub(crate) const WINDOW: u64 = 4 << 20;
/// Bytes copied before they are brought to stable storage: what a crash makes a later attempt copy again.
pub(crate) const CHECKPOINT: u64 = 64 << 20;

/// What comes next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// Copy up what the target needs of this range.
    Copy(GuestRange),
    /// Bring what was copied to stable storage.
    Commit,
    /// Let the target stand on what lies below the dropped layers.
    Relink,
    /// Make the indices of the layers from the target up anew.
    Index,
    /// Remove the dropped layers' files.
    Remove,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    Copying,
    Indexing,
    Removing,
    Done,
}

/// The job; see the module documentation. Dropped early it leaves a sound chain, in which nothing is leaked.
#[derive(Debug)]
pub struct Merge {
    disk: PathBuf,
    options: MergeOptions,
    resources: Arc<Resources>,
    links: Vec<Link>,
    range: MergeRange,
    /// Present until the target is done with.
    copier: Option<Copier>,
    /// The disk's file, unless it is the target itself.
    _lock: Option<FileStore>,
    stage: Stage,
    uncommitted: u64,
    merged: Merged,
}

/// The target over all layers below it, and what will be left of those.
#[derive(Debug)]
pub(crate) struct Copier {
    pub(crate) layers: Layers,
    pub(crate) after: Option<Arc<FrozenMap>>,
    pub(crate) relink: Relink,
    pub(crate) at: GuestOffset,
}

impl Copier {
    pub(crate) fn target(&self) -> &Arc<Active> {
        let Top::Qcow2(active) = &self.layers.top else { unreachable!("made with an active layer") };
        active
    }

    /// The next range to be looked at.
    pub(crate) fn window(&self) -> Option<GuestRange> {
        let (at, size) = (self.at.get(), self.target().size);
        (at < size).then(|| GuestRange::new(self.at, WINDOW.min(size - at)))
    }
}

impl Merge {
    /// Makes everything ready to drop the layers in `range` from the chain of `disk`. Nothing is written yet, but that a
    /// disk that was not closed is opened and closed, and that the target's index falls.
    ///
    /// # Errors
    /// A disk or a target that is in use; layers that are not there; a header without room; a chain that cannot be read.
    pub fn new(
        disk: &Path,
        range: MergeRange,
        options: &MergeOptions,
        resources: &Arc<Resources>,
    ) -> Result<Self> {
        let lock = lock_settled(disk, &options.open, resources)?;
        let links = plan::links(disk, &options.open, &**resources.files().opener())?;
        range.check(links.len()).map_err(|fault| Error::from(fault).in_file(disk))?;
        // The target's own lock takes the place of the disk's.
        let lock = (range.target().index() + 1 < links.len()).then_some(lock);
        let copier = prepare(disk, &links, range, options, resources)?;
        let (disk, options, resources) = (disk.to_owned(), options.clone(), Arc::clone(resources));
        Ok(Self {
            disk,
            options,
            resources,
            links,
            range,
            copier: Some(copier),
            _lock: lock,
            stage: Stage::Copying,
            uncommitted: 0,
            merged: Merged::default(),
        })
    }

    /// How many actions there are, about.
    pub fn total(&self) -> u64 {
        let size = self.copier.as_ref().map_or(0, |copier| copier.target().size);
        size.div_ceil(WINDOW) + 3
    }

    /// Decides what comes next; `None` when all is done.
    pub fn select(&self) -> Option<Action> {
        match self.stage {
            Stage::Copying if self.uncommitted >= CHECKPOINT => Some(Action::Commit),
            Stage::Copying => {
                let window = self.copier.as_ref().and_then(Copier::window);
                Some(window.map_or(Action::Relink, Action::Copy))
            }
            Stage::Indexing => Some(Action::Index),
            Stage::Removing => Some(Action::Remove),
            Stage::Done => None,
        }
    }

    /// Carries it out; returns the bytes copied.
    ///
    /// # Errors
    /// A layer that cannot be read, a host that is full or cannot write or flush. The chain is sound, and the job is over.
    ///
    /// # Panics
    /// With an action that [`Merge::select`] did not choose.
    pub fn apply(&mut self, action: Action) -> Result<u64> {
        match action {
            Action::Copy(range) => {
                let copier = self.copier.as_mut().expect("copying comes first");
                let bytes = copier.layers.pull_up(range, copier.after.as_deref())?;
                copier.at = range.end();
                self.uncommitted += bytes;
                self.merged.copied_bytes += bytes;
                return Ok(bytes);
            }
            Action::Commit => {
                self.copier.as_ref().expect("copying comes first").layers.commit()?;
                self.uncommitted = 0;
            }
            Action::Relink => {
                let copier = self.copier.take().expect("copying comes first");
                self.stage = Stage::Done;
                copier.finish()?;
                self.stage = Stage::Indexing;
            }
            Action::Index => {
                self.index();
                self.stage = Stage::Removing;
            }
            Action::Remove => {
                self.remove();
                self.stage = Stage::Done;
            }
        }
        Ok(0)
    }

    /// Takes all steps that are left.
    ///
    /// # Errors
    /// As [`Merge::apply`].
    pub fn run(mut self) -> Result<Merged> {
        while let Some(action) = self.select() {
            self.apply(action)?;
        }
        Ok(std::mem::take(&mut self.merged))
    }

    /// What it has done so far.
    pub fn merged(&self) -> &Merged {
        &self.merged
    }

    /// Indices from the target up lead into layers that are gone. Nothing here is an error: a chain without indices opens
    /// slower.
    fn index(&self) {
        if !self.links.iter().any(|link| link.has_index) {
            return;
        }
        let options = IndexOptions {
            allow_backing: self.options.open.allow_backing.clone(),
            format: self.options.open.format,
            opener: Some(Arc::clone(self.resources.files().opener())),
            ..IndexOptions::default()
        };
        if let Err(error) = index::build(&self.disk, &options) {
            tracing::warn!(%error, "the chain gets no index");
        }
    }

    fn remove(&mut self) {
        let dropped = remove::dropped(&self.links, self.range);
        let mut users = Users::find(&directories(&self.disk, &self.links, self.range, &self.options.open));
        let (removed, kept) = remove::remove(&dropped, &mut users, self.options.removal, false);
        (self.merged.removed, self.merged.kept) = (removed, kept);
        let _ = flush_directory(&self.disk);
    }
}

impl Copier {
    /// Brings what was copied to stable storage, and lets the target stand on what is left below it.
    ///
    /// # Errors
    /// A host that cannot write or flush: the target stands on the one or on the other.
    fn finish(self) -> Result<()> {
        let active = Arc::clone(self.target());
        self.layers.commit()?;
        active.reclaim(|| ())?;
        leave_clean(&active)?;
        let flush = || crate::changes::CommitTarget::flush(&*active);
        self.relink.apply(&*active.store, flush).map_err(|error| error.in_file(&active.path))
    }
}

impl Drop for Merge {
    /// Ends a job that was not finished: what is copied stays, nothing is leaked if the host lets it.
    fn drop(&mut self) {
        let Some(copier) = self.copier.take() else { return };
        let active = copier.target();
        let left =
            copier.layers.commit().and_then(|()| active.reclaim(|| ())).and_then(|()| leave_clean(active));
        if let Err(error) = left {
            tracing::warn!(file = %active.path.display(), %error, "a merge ended early: clusters may be leaked until `vmstrata check --repair=leaks`");
        }
    }
}

/// Where images may be that need what is dropped.
pub(crate) fn directories(
    disk: &Path,
    links: &[Link],
    range: MergeRange,
    open: &OpenOptions,
) -> Vec<PathBuf> {
    let layers = &links[range.first.index()..=range.last.index()];
    let of_layers = layers.iter().map(|link| directory_of(&link.path));
    of_layers.chain([directory_of(disk)]).chain(open.allow_backing.iter().cloned()).collect()
}

/// What the target will stand on.
///
/// # Errors
/// A path that cannot be stored as a name.
pub(crate) fn below_of(links: &[Link], range: MergeRange) -> Result<Option<Below>> {
    let (first, target) = (&links[range.first.index()], &links[range.target().index()]);
    let Some(stays) = range.first.index().checked_sub(1).map(|layer| &links[layer]) else { return Ok(None) };
    let name = match &first.backing_name {
        Some(name) if directory_of(&first.path) == directory_of(&target.path) => name.clone(),
        _ => name_from(&target.path, &stays.path)?,
    };
    Ok(Some(Below { name, format: stays.format, record: first.record.clone() }))
}

fn prepare(
    disk: &Path,
    links: &[Link],
    range: MergeRange,
    options: &MergeOptions,
    resources: &Arc<Resources>,
) -> Result<Copier> {
    let opener = resources.files().opener();
    let (link, index) = (&links[range.target().index()], range.target());
    let role = Role::Active(CacheMode::Host);
    let top = open_layer(&link.path, role, Some(Format::Qcow2), &Gate::unrestricted(), &**opener)?;
    if top.opened.identity.file != link.file {
        return Err(Error::from(ErrorKind::Changed).in_file(&link.path));
    }
    let header = &top.head.as_ref().ok_or(ErrorKind::Changed)?.header;
    let below = below_of(links, range)?;
    let relink = Relink::plan(&*top.opened.store, header, below.as_ref())
        .map_err(|error| error.in_layer(index).in_file(&link.path))?;
    let map = |layer: usize| map_up_to(disk, &links[layer], layer, &options.open, resources);
    let before = map(range.last.index())?;
    let after = range.first.index().checked_sub(1).map(map).transpose()?;
    let active = target::open(&top, index, resources)?;
    let layers = Layers::new(active.size, Top::Qcow2(active), Some(before), resources);
    Ok(Copier { layers, after, relink, at: GuestOffset::ZERO })
}

/// The map of a layer that stays frozen and of all below it.
fn map_up_to(
    disk: &Path,
    link: &Link,
    layer: usize,
    open: &OpenOptions,
    resources: &Arc<Resources>,
) -> Result<Arc<FrozenMap>> {
    let mut open = OpenOptions { read_only: true, format: Some(link.format), ..open.clone() };
    open.allow_backing.push(directory_of(disk));
    let opener = resources.files().opener();
    let gate = open.gate(&link.path)?;
    let roles = Roles { top: Role::Frozen, below: Role::Frozen };
    let (top, mut layers) = walk(&link.path, &open, roles, &**opener, |file| freeze(file, resources))?;
    let index = match index::load(&top, &gate, opener, &mut Looks::default()) {
        Found::Whole(index) if index.layers().len() == layer + 1 => Some(Arc::from(index)),
        _ => None,
    };
    layers.push(freeze(top, resources));
    if layers.len() != layer + 1 {
        return Err(Error::from(MergeFault::LayersChanged).in_file(disk));
    }
    resources.share_map(layers, index)
}
