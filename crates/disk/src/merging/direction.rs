//! Which way layers are merged: streamed into the layer above them, or what is above committed into their base.
//!
//! Either way what is read stays what it is, and the layer above the dropped ones keeps its name. A stream copies what they hold
//! and the layer above does not, which for a disk's oldest layer is about the whole disk; a commit copies what the layers above the
//! base hold. A commit overwrites the states that are dropped, so no other image may stand on those.

use std::ffi::OsStr;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;
use std::sync::Arc;

use vmstrata_qcow2::Incompatible;
use vmstrata_store::FileId;
use vmstrata_types::LayerIndex;

use super::commit::Costs;
use super::commit::Failed;
use super::deleting::DeletingFlag;
use super::plan::map_up_to;
use super::{MergeFault, MergeOptions, MergeRange, remove};
use crate::chain::{Top, is_being_dropped};
use crate::error::{Error, Result};
use crate::layer::Format;
use crate::map::FrozenMap;
use crate::opener::Role;
use crate::refs::{ChainFile, LocalHolders, Users, back_refs, holder_among, layers_of_others, missing};
use crate::resources::Resources;

/// Which way layers are merged.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Direction {
    /// The way that copies less, as far as it is open.
    #[default]
    Auto,
    /// Into the layer above those that are dropped.
    Stream,
    /// Into the base of those that are dropped; refused where others need it as it is.
    Commit,
}

/// A commit that nothing stands against, as far as was seen.
#[derive(Debug)]
pub(crate) struct CommitPlan {
    /// The chain up to the layer that stays.
    pub(crate) state: Arc<FrozenMap>,
    /// Who may stand on the layers from the base on.
    pub(crate) users: Users,
}

/// What is to be merged, and who asks.
pub(crate) struct Asked<'a> {
    pub(crate) disk: &'a Path,
    pub(crate) chain: &'a [ChainFile],
    pub(crate) range: MergeRange,
    pub(crate) options: &'a MergeOptions,
    pub(crate) resources: &'a Arc<Resources>,
    /// This process.
    pub(crate) here: LocalHolders<'a>,
    /// Those of some layers whose locks say nothing of others, because this process has them: it is asked when that matters.
    pub(crate) ours: &'a dyn Fn(&[ChainFile]) -> Vec<FileId>,
}

/// A reason not to commit, in words.
type Against = std::result::Result<(), String>;

impl Asked<'_> {
    /// Decides: `None` is a stream.
    ///
    /// # Errors
    /// [`MergeFault::NoCommit`]; a chain that cannot be read.
    pub(crate) fn choose(&self) -> Result<Option<CommitPlan>> {
        if self.options.direction == Direction::Stream {
            return Ok(None);
        }
        match self.look(self.options.direction == Direction::Auto)? {
            Ok(found) => Ok(found),
            Err(reason) => self.or_stream(reason),
        }
    }

    /// There is a reason against a commit.
    ///
    /// # Errors
    /// [`MergeFault::NoCommit`], if that way was asked for.
    pub(crate) fn or_stream<T>(&self, reason: String) -> Result<Option<T>> {
        if self.options.direction == Direction::Commit {
            let base = &self.chain[self.range.first.index()].path;
            return Err(Error::from(MergeFault::NoCommit { reason }).in_file(base));
        }
        tracing::debug!(disk = %self.disk.display(), reason, "layers are streamed");
        Ok(None)
    }

    /// The commit has failed: as long as nothing is lost, there is the other way.
    ///
    /// # Errors
    /// What it failed with, if that way was asked for, or dropped layers are marked.
    pub(crate) fn or_stream_after<T>(&self, failed: Failed) -> Result<Option<T>> {
        if failed.is_marked || self.options.direction != Direction::Auto {
            return Err(failed.error);
        }
        self.or_stream(failed.error.to_string())
    }

    fn look(&self, by_cost: bool) -> Result<std::result::Result<Option<CommitPlan>, String>> {
        if let Err(reason) = self.check_range().and_then(|()| self.check_files()) {
            return Ok(Err(reason));
        }
        let tops = match self.check_heads()? {
            Ok(tops) => tops,
            Err(reason) => return Ok(Err(reason)),
        };
        let (first, target) = (self.range.first, self.range.target().index());
        let state = map_up_to(self.disk, self.chain, target, &self.options.open, self.resources)?;
        let extent =
            |layer: LayerIndex, at| tops.get(layer.index() - first.index())?.opened.store.extent(at).ok();
        let costs = Costs::of(&state, first, extent)?;
        // What this process has open twice says nothing of others.
        drop(tops);
        tracing::debug!(disk = %self.disk.display(), ?costs, "bytes that merging would copy");
        if by_cost && costs.stream <= costs.commit {
            return Ok(Ok(None));
        }
        let users = Users::standing_on(&self.chain[first.index()..], self.disk, &self.options.open);
        Ok(self.check_users(&users).map(|()| Some(CommitPlan { state, users })))
    }

    /// The layers whose own states are lost.
    fn dropped(&self) -> &[ChainFile] {
        &self.chain[self.range.first.index()..self.range.target().index()]
    }

    fn check_range(&self) -> Against {
        if self.range.target().index() + 1 == self.chain.len() {
            return Err("the layer above is the one that takes the writes".to_owned());
        }
        if self.range.first.index() < layers_of_others(self.chain) && !self.options.beyond_own {
            return Err("it is not of the disk's own history".to_owned());
        }
        let all = remove::dropped(self.chain, self.range);
        let kept = all.iter().find_map(|layer| self.options.removal.wants(layer).err());
        kept.map_or(Ok(()), |why| Err(why.to_string()))?;
        check_open_files(self.dropped().len())
    }

    /// The base's file takes the place of the one that stays.
    fn check_files(&self) -> Against {
        let target = &self.chain[self.range.target().index()];
        for link in self.dropped().iter().chain([target]) {
            let found = link.path.symlink_metadata().map_err(|error| error.to_string())?;
            let same = (found.dev(), found.ino()) == (link.file.dev, link.file.ino);
            if !found.is_file() || !same || found.nlink() != 1 || link.format != Format::Qcow2 {
                return Err(format!("{} is no qcow2 file with a single name", link.path.display()));
            }
        }
        check_owner(&self.dropped()[0].path, &target.path)?;
        if !back_refs::is_beside(&self.dropped()[0].path, &target.path) {
            return Err("the layer above lies in another directory".to_owned());
        }
        Ok(())
    }

    /// Looks at the dropped layers and the one that stays, and returns them open.
    fn check_heads(&self) -> Result<std::result::Result<Vec<Top>, String>> {
        let (first, target) = (self.range.first.index(), self.range.target().index());
        let opener = &**self.resources.files().opener();
        let (mut size, mut tops) = (None, Vec::new());
        for layer in first..=target {
            let top = self.chain[layer].open(Role::Inspected, opener)?;
            if let Err(reason) = check_head(&top) {
                return Ok(Err(format!("{} {reason}", top.path.display())));
            }
            let found = top.head.as_ref().map(|head| head.header.size);
            if *size.get_or_insert(found) != found {
                return Ok(Err("its size is not that of the layers above".to_owned()));
            }
            if layer == target {
                // What took its place would be a state under its name.
                if is_being_dropped(&top.path, top.head.as_ref()) {
                    return Ok(Err(format!("{} is half deleted", top.path.display())));
                }
                tops.push(top);
                break;
            }
            if let Err(error) = DeletingFlag::plan(&top, self.chain, layer, self.new_name()) {
                return Ok(Err(error.to_string()));
            }
            tops.push(top);
        }
        Ok(Ok(tops))
    }

    /// The name of the file that stays.
    pub(crate) fn new_name(&self) -> &OsStr {
        let path = &self.chain[self.range.target().index()].path;
        path.file_name().unwrap_or_default()
    }

    fn check_users(&self, users: &Users) -> Against {
        if let Some(why) = users.overlooked() {
            return Err(why.to_string());
        }
        let (first, layers) = (self.range.first.index(), self.dropped());
        for (layer, above) in layers.iter().zip(&self.chain[first + 1..]) {
            if let Some(other) = users.other_than(layer.file, above.file) {
                return Err(format!("{} stands on {}", other.display(), layer.path.display()));
            }
            let missing = missing(&layer.path).map_err(|error| {
                format!("the back-references of {} cannot be read: {error}", layer.path.display())
            })?;
            if let Some(back_ref) = missing.first().filter(|_| !self.options.forget_missing) {
                return Err(format!("{} was made on it, and is not there now", back_ref.disk.display()));
            }
        }
        self.check_unused(users, &[])
    }

    /// Makes sure that no other process uses one of the layers from the base on, or a disk on one of them; `held` are locked.
    pub(crate) fn check_unused(&self, users: &Users, held: &[FileId]) -> Against {
        let above = &self.chain[self.range.first.index()..];
        let ours = [(self.ours)(above), held.to_vec()].concat();
        let by = holder_among(&ours).or_else(|| users.in_use(above, &self.here, &ours));
        by.map_or(Ok(()), |by| Err(format!("it is in use by {by}")))
    }
}

/// All dropped layers are open until the merge is done.
fn check_open_files(layers: usize) -> Against {
    let most = rustix::process::getrlimit(rustix::process::Resource::Nofile).current;
    let most = most.and_then(|most| usize::try_from(most).ok()).unwrap_or(usize::MAX);
    let open = vmstrata_store::proc::open_descriptors();
    let free = most.saturating_sub(open);
    // The other half is for those who use disks meanwhile.
    if layers > free / 2 {
        return Err(format!("{layers} files would be held open, and this process may open {free} more"));
    }
    Ok(())
}

/// What takes a file's place gets its owner.
fn check_owner(base: &Path, target: &Path) -> Against {
    let [base, target] = [base, target].map(|path| path.metadata().map(|found| (found.uid(), found.gid())));
    match (base, target) {
        (Ok(base), Ok(target)) if base == target || rustix::process::geteuid().is_root() => Ok(()),
        (Err(error), _) | (_, Err(error)) => Err(error.to_string()),
        _ => Err("another user owns the layer above, and only root can change a file's owner".to_owned()),
    }
}

fn check_head(top: &Top) -> Result<(), &'static str> {
    let Some(head) = &top.head else { return Err("is raw") };
    let header = &head.header;
    if header.incompatible.intersects(Incompatible::DIRTY | Incompatible::CORRUPT) {
        return Err("is marked dirty or corrupt");
    }
    if top.is_in_session() {
        return Err("was not closed by the process that wrote it");
    }
    if header.snapshot_count > 0 {
        return Err("has internal snapshots");
    }
    if head.bitmaps.is_some() { Err("has bitmaps") } else { Ok(()) }
}
