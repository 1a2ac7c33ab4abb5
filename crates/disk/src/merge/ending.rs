//! The end of the job: who has to know that the chain is shorter, and the files that go.

use std::path::Path;

use vmstrata_store::FileId;

use super::{Host, Merge};
use crate::atomic_file::{flush_directory, flush_file};
use crate::chain::OpenOptions;
use crate::merging::commit::Commit;
use crate::merging::remove::{self, Wanted};
use crate::merging::{Kept, Removal, cleanup, orphans};
use crate::refs::{LocalHolders, Users, back_refs};

impl Merge {
    pub(super) fn disk(&self) -> (&Path, &OpenOptions) {
        let disk = match &self.host {
            Host::Files(files) => &*files.disk,
            Host::Running(running) => running.disk.path(),
        };
        (disk, &self.options.open)
    }

    /// The target may be about to stand on a layer in another directory, and dropped layers may stay.
    pub(super) fn tell_of_target(&self) {
        let (first, last, target) =
            (self.range.first.index(), self.range.last.index(), self.range.target().index());
        let stays = first.checked_sub(1);
        let path = |layer: usize| self.chain[layer].path.as_path();
        back_refs::record_chain(self.disk().0, stays.into_iter().chain([target]).map(path));
        back_refs::record_left((stays.unwrap_or(first)..=last).map(path));
    }

    /// The base of the dropped layers is in the place of the one above them.
    pub(super) fn took_place(&mut self, commit: &Commit, file: FileId) {
        let (first, target) = (self.range.first.index(), self.range.target().index());
        let mut base = self.chain[first].clone();
        (base.path, base.file) = (commit.path().clone(), file);
        self.chain.splice(first..=target, [base]);
        self.merged.removed.push(commit.old_path().clone());
    }

    /// Records what is left to remove, for the next opening after a crash.
    pub(super) fn announce(&self, target: FileId) {
        let mut dropped = self.dropped.clone();
        dropped.retain(|layer| self.options.removal.wants(layer).is_ok());
        let disk = self.disk().0;
        let announced = || {
            if self.merged.is_commit {
                // The note knows them by the times that their marks gave them.
                dropped.iter().try_for_each(|layer| flush_file(&layer.path))?;
            }
            cleanup::announce(disk, target, &dropped)
        };
        if let Err(error) = announced() {
            tracing::warn!(%error, "killed now, the merge would leave the files of dropped layers behind");
        }
    }

    pub(super) fn remove(&mut self) {
        let waiting = cleanup::waiting_of(self.disk().0, &self.chain);
        self.space.add(waiting.iter().map(|layer| layer.path.clone()));
        let (disk, open) = self.disk();
        let first = self.range.first.index();
        let target = if self.merged.is_commit { first } else { self.range.target().index() };
        let above = &self.chain[target..];
        let dropped = [self.dropped.clone(), waiting.clone()].concat();
        let mut users = Users::standing_on(&self.chain[first..], disk, open);
        users.follow_back_refs(waiting.iter().map(|layer| layer.path.as_path()));
        let (removal, forget_missing) = (self.options.removal, self.options.forget_missing);
        let mut remove = |here: LocalHolders<'_>| {
            let by_others = here.is_used_by_others(&users, above);
            let wanted = Wanted { removal, forget_missing, here: Some(here), by_others };
            remove::remove(&dropped, &mut users, &wanted)
        };
        let (removed, kept) = match &self.host {
            Host::Files(_) => remove(LocalHolders::NOTHING),
            Host::Running(running) => running.with_local_holders(remove),
        };
        let _ = flush_directory(disk);
        let left = |path: &Path| dropped.iter().any(|layer| layer.path == path && layer.is_own_snapshot);
        let asked: Vec<&Path> =
            kept.iter().filter(|(_, why)| *why == Kept::Asked).map(|(path, _)| path.as_path()).collect();
        if asked.iter().any(|path| left(path)) {
            let by_others = |here: LocalHolders<'_>| here.is_used_by_others(&users, above);
            let by_others = match &self.host {
                Host::Files(_) => by_others(LocalHolders::NOTHING),
                Host::Running(running) => running.with_local_holders(by_others),
            };
            orphans::note_left(disk, asked.into_iter().filter(|path| left(path)), by_others);
        }
        let was_waiting = |path: &Path| waiting.iter().any(|layer| layer.path == path);
        if removal == Removal::Nothing {
            cleanup::leave(disk, waiting.iter().map(|layer| layer.path.as_path()));
        } else {
            cleanup::leave(disk, cleanup::later(&kept));
        }
        let kept = kept.into_iter().filter(|(path, _)| !was_waiting(path)).collect();
        let (waited, mut removed): (Vec<_>, Vec<_>) = removed.into_iter().partition(|path| was_waiting(path));
        // A base that took another's place is there already.
        removed.append(&mut self.merged.removed);
        removed.extend(waited);
        self.merged.freed_bytes = self.space.freed(self.merged.copied_bytes);
        (self.merged.removed, self.merged.kept) = (removed, kept);
    }
}
