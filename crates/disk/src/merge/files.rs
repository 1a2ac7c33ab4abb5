//! Merging layers of a disk that no server serves.
//!
//! The writer's lock of the disk's file is held from the beginning to the end, and that of the target as long as it is
//! written, so that running machines and servers are met with a refusal.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use vmstrata_store::{CacheMode, FileId, FileStore};

use crate::chain::OpenOptions;
use crate::error::{Error, ErrorKind, Result};
use crate::index::{self, IndexOptions};
use crate::layers::{Layers, Top};
use crate::merging::copier::Copier;
use crate::merging::direction::Asked;
use crate::merging::plan::{below_of, map_up_to};
use crate::merging::relink::Relink;
use crate::merging::remove::refuse_overlooked;
use crate::merging::{MergeFault, MergeOptions, MergeRange, cleanup, commit, target};
use crate::opener::Role;
use crate::refs::{self, ChainFile, LocalHolders, Users};
use crate::resources::Resources;
use crate::snapshot::lock_finalized;
use crate::snapshots::interrupted;

/// See the module documentation.
#[derive(Debug)]
pub(super) struct Files {
    pub(super) disk: PathBuf,
    open: OpenOptions,
    resources: Arc<Resources>,
    /// The disk's file, unless it is the target itself.
    _lock: Option<FileStore>,
}

impl Files {
    /// Locks the disk and opens the target.
    ///
    /// # Errors
    /// As [`super::Merge::new`].
    pub(super) fn begin(
        disk: &Path,
        range: MergeRange,
        options: &MergeOptions,
        resources: &Arc<Resources>,
    ) -> Result<(Self, Vec<ChainFile>, Copier)> {
        let lock = lock_finalized(disk, &options.open, resources)?;
        cleanup::sweep_files(disk, &options.open);
        let chain = refs::chain_files(disk, &options.open, &**resources.files().opener())?;
        let own = chain[chain.len() - 1].file;
        interrupted::sweep(disk, own, |_| {})?;
        range.check(&chain, options).map_err(|fault| Error::from(fault).in_file(disk))?;
        // The target's own lock takes the place of the disk's.
        let lock = (range.target().index() + 1 < chain.len()).then_some(lock);
        let users = Users::standing_on(&chain[range.first.index()..], disk, &options.open);
        refuse_overlooked(&chain, range, options, &users)
            .map_err(|fault| Error::from(fault).in_file(disk))?;
        let opened = |file| resources.files().open_store(file);
        let here = LocalHolders { needs: &|_| false, store: &opened };
        let asked = Asked { disk, chain: &chain, range, options, resources, here, ours: &|_| vec![own] };
        let committing = match asked.choose()? {
            Some(found) => commit::open(&asked, found, Role::Active(CacheMode::Host), |_| Ok(()))
                .map(Some)
                .or_else(|failed| asked.or_stream_after(failed))?,
            None => None,
        };
        let copier = match committing {
            Some(copier) => copier,
            None => open_target(disk, &chain, range, &users, options, resources)?,
        };
        let (disk, open, resources) = (disk.to_owned(), options.open.clone(), Arc::clone(resources));
        Ok((Self { disk, open, resources, _lock: lock }, chain, copier))
    }

    /// Makes the indices of the layers from the target up anew, if there were any: what they lead to is gone. Returns
    /// whether that is all.
    ///
    /// # Errors
    /// A chain that cannot be read.
    pub(super) fn index(&self, chain: &[ChainFile]) -> Result<bool> {
        if chain.iter().any(|link| link.has_index) {
            index::build(
                &self.disk,
                &IndexOptions::of_disk(&self.open, Some(self.resources.files().opener())),
            )?;
        }
        Ok(true)
    }
}

/// Refuses a target, the lowest of `above`, that a disk in use stands on, but for files that only we can have open.
fn refuse_users(above: &[ChainFile], users: &Users, ours: &[FileId]) -> Result<()> {
    match users.in_use(above, &LocalHolders::NOTHING, ours) {
        Some(by) => Err(Error::from(MergeFault::TargetInUse { by }).in_file(&above[0].path)),
        None => Ok(()),
    }
}

fn open_target(
    disk: &Path,
    chain: &[ChainFile],
    range: MergeRange,
    users: &Users,
    options: &MergeOptions,
    resources: &Arc<Resources>,
) -> Result<Copier> {
    let open = &options.open;
    let opener = resources.files().opener();
    let (above, index) = (&chain[range.target().index()..], range.target());
    let (link, locked) = (&above[0], above[above.len() - 1].file);
    refuse_users(above, users, &[locked])?;
    let top = link.open(Role::Active(CacheMode::Host), &**opener)?;
    let header = &top.head.as_ref().ok_or(ErrorKind::Changed)?.header;
    let below = below_of(chain, range)?;
    let relink = Relink::plan(&*top.opened.store, header, below.as_ref())
        .map_err(|error| error.in_layer(index).in_file(&link.path))?;
    let before = map_up_to(disk, chain, range.last.index(), open, resources)?;
    let stays = range.first.index().checked_sub(1);
    let after = stays.map(|layer| map_up_to(disk, chain, layer, open, resources)).transpose()?;
    let active = target::open(&top, index, None, resources)?;
    // A disk that is opened from here on looks at the file, and finds it locked.
    refuse_users(above, users, &[locked, link.file]).inspect_err(|_| target::give_back(&top, &active))?;
    let layers = Layers::new(active.size(), Top::Qcow2(Arc::clone(&active)), Some(before), resources);
    Copier::of_frozen(Arc::clone(&active), layers, after, relink)
        .inspect_err(|_| target::give_back(&top, &active))
}
