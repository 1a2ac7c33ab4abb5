//! Layers that are dropped: of disks in use and of files, in one go or step by step among other steps.

use std::path::{Path, PathBuf};

use rand::Rng as _;
use vmstrata_disk::Error;
use vmstrata_disk::merge::{
    Action, Direction, Kept, Merge, MergeFault, MergeOptions, MergeRange, Merged, Removal, all_of, ranges_of,
};
use vmstrata_types::LayerIndex;

use super::model::Id;
use super::world::{Job, World};

fn range(first: usize, last: usize) -> MergeRange {
    let index = |layer: usize| LayerIndex::new(u16::try_from(layer).unwrap());
    MergeRange { first: index(first), last: index(last) }
}

/// A path whose last part may be gone.
fn real(path: &Path) -> PathBuf {
    path.parent().unwrap().canonicalize().unwrap().join(path.file_name().unwrap())
}

impl World {
    /// Deletes snapshots by name, the newest range first.
    pub(super) fn delete(&mut self, slot: usize) {
        let names: Vec<String> =
            (0..self.random.random_range(1..4)).filter_map(|_| self.some_snapshot(slot)?.name).collect();
        if names.is_empty() || self.slots[slot].job.is_some() {
            return;
        }
        let names = if names.len() == 2 { vec![names.join("..")] } else { names };
        let ranges = ranges_of(&self.path(slot), &names, &self.options(&self.path(slot)));
        let chain = self.model.chain(self.slots[slot].active);
        let of_others = self.model.layers_of_others(&chain);
        let expected = self.ranges(slot, &names);
        if expected.iter().any(|&(_, last)| last + 1 < of_others) {
            let error = ranges.unwrap_err().to_string();
            return assert!(error.contains("belong to"), "{error}");
        }
        let expected: Vec<MergeRange> =
            expected.into_iter().map(|(first, last)| range(first, last)).collect();
        assert_eq!(ranges.unwrap(), expected, "{names:?}");
        let last_one = self.random.random_range(0..4);
        for (number, range) in expected.into_iter().enumerate() {
            let begun = self.begin(slot, range);
            // The one that is left to itself is taken up by later steps.
            if !begun || number == last_one {
                return;
            }
            self.finish_job(slot);
        }
    }

    /// The layers that these names mean, the newest range first.
    fn ranges(&self, slot: usize, names: &[String]) -> Vec<(usize, usize)> {
        let active = self.slots[slot].active;
        let chain = self.model.chain(active);
        let layer = |name: &str| {
            let layer = self.model.find(active, name).unwrap().layer;
            chain.iter().position(|&id| id == layer).unwrap()
        };
        let mut layers: Vec<usize> = Vec::new();
        for name in names {
            let ends: Vec<usize> = name.split("..").map(layer).collect();
            layers.extend(*ends.iter().min().unwrap()..=*ends.iter().max().unwrap());
        }
        layers.sort_unstable();
        layers.dedup();
        let mut ranges: Vec<(usize, usize)> = Vec::new();
        for layer in layers {
            match ranges.last_mut() {
                Some((_, last)) if *last + 1 == layer => *last = layer,
                _ => ranges.push((layer, layer)),
            }
        }
        ranges.reverse();
        ranges
    }

    /// The disk stands on nothing any more.
    pub(super) fn flatten(&mut self, slot: usize) {
        let layers = self.model.chain(self.slots[slot].active).len();
        let Some(range) = all_of(layers).filter(|_| self.slots[slot].job.is_none()) else { return };
        if self.begin(slot, range) && self.random.random() {
            self.finish_job(slot);
        }
    }

    fn some_options(&mut self, slot: usize) -> MergeOptions {
        let removal = match self.random.random_range(0..8) {
            0 => Removal::Everywhere,
            1 => Removal::Nothing,
            _ => Removal::Snapshots,
        };
        let direction = match self.random.random_range(0..4) {
            0 => Direction::Stream,
            1 => Direction::Auto,
            _ => Direction::Commit,
        };
        let (open, forget_missing) = (self.options(&self.path(slot)), self.random.random());
        MergeOptions { open, removal, forget_missing, direction, ..MergeOptions::default() }
    }

    /// Begins a merge, unless somebody uses what would be copied into; whether it did.
    fn begin(&mut self, slot: usize, range: MergeRange) -> bool {
        let options = self.some_options(slot);
        let chain = self.model.chain(self.slots[slot].active);
        let (first, last) = (range.first.index(), range.last.index());
        let target = chain[last + 1];
        let is_used = last + 2 < chain.len() && self.is_used_by_others(slot, target);
        // A refusal takes half a second.
        if is_used && self.random.random_ratio(9, 10) {
            return false;
        }
        if self.slots[slot].guest.is_some() {
            self.disk(slot).finalize().unwrap();
        }
        self.wake_queues();
        let begun = match &self.slots[slot].guest {
            Some(guest) => Merge::of_disk(&guest.disk, range, &options),
            None => Merge::new(&self.path(slot), range, &options, &self.server),
        };
        if self.slots[slot].guest.is_none() && begun.is_ok() {
            self.model.images[self.slots[slot].active].is_unclean = false;
        }
        if let Err(error) = &begun
            && matches!(error.fault(), Some(MergeFault::NoCommit { .. }))
        {
            assert_eq!(options.direction, Direction::Commit, "{error}");
            self.say(error);
            return false;
        }
        if is_used {
            let error = begun.map(drop).unwrap_err().to_string();
            assert!(error.contains("in use") || error.contains("merged"), "{error}");
            return false;
        }
        let names: Vec<String> = chain.iter().map(|&id| self.name(id)).collect();
        self.said.push(format!("drops {first} to {last} of {names:?} ({:?})", options.removal));
        let merge = begun.unwrap();
        let (is_relinked, is_over, is_commit) = (false, false, merge.merged().is_commit);
        if is_commit {
            self.say("commit");
            chain[first..=last].iter().for_each(|&id| self.model.images[id].is_half_deleted = true);
        }
        let wanted = Vec::new();
        self.slots[slot].job =
            Some(Job { merge, options, chain, first, last, is_relinked, wanted, is_over, is_commit });
        true
    }

    /// Whether anyone but this disk uses one that stands on the layer.
    fn is_used_by_others(&self, slot: usize, layer: Id) -> bool {
        let others = self.slots.iter().enumerate().filter(|(other, _)| *other != slot);
        let mut used = others.filter(|(_, other)| other.guest.is_some() || other.job.is_some());
        used.any(|(_, other)| self.model.stands_on(other.active, layer))
            || self.views.iter().any(|view| view.layers.contains(&layer))
    }

    fn finish_job(&mut self, slot: usize) {
        while self.slots[slot].job.is_some() {
            self.take_action(slot);
        }
    }

    /// Some actions of a merge; now and then it is dropped.
    pub(super) fn go_on(&mut self, slot: usize) {
        for _ in 0..self.random.random_range(1..4) {
            if self.slots[slot].job.is_none() {
                return;
            }
            self.take_action(slot);
            if self.slots[slot].guest.is_some() {
                self.change(slot);
            }
        }
        if self.random.random_ratio(1, 10) && self.slots[slot].job.take().is_some() {
            self.say("the merge is dropped");
        }
    }

    fn take_action(&mut self, slot: usize) {
        let job = self.slots[slot].job.as_ref().unwrap();
        let Some(action) = job.merge.select() else {
            self.slots[slot].job = None;
            return;
        };
        let (mut expected, mut are_awake) = (None, true);
        if action == Action::Remove {
            are_awake = self.random.random();
            // What earlier merges did not come to remove goes when one begins.
            self.notice_gone();
            expected = Some(self.expected(slot));
            if are_awake {
                self.wake_queues();
            }
        }
        let job = self.slots[slot].job.as_mut().unwrap();
        let applied = job.merge.apply(action);
        self.said.push(format!("{action:?}: {applied:?}"));
        match applied {
            Err(error) => self.end_early(slot, &error),
            Ok(_) if action == Action::Relink => self.relinked(slot),
            Ok(_) => {}
        }
        if let Some(expected) = expected {
            self.removed(slot, &expected, are_awake);
        }
    }

    /// A queue without requests goes on holding the files, and so the locks, of the layers of before.
    fn wake_queues(&mut self) {
        for slot in &mut self.slots {
            if let Some(guest) = &mut slot.guest {
                guest.read(0, 512);
            }
        }
    }

    fn end_early(&mut self, slot: usize, error: &Error) {
        let job = self.slots[slot].job.take().unwrap();
        assert!(job.is_over && error.to_string().contains("layers have changed"), "{error}");
    }

    fn relinked(&mut self, slot: usize) {
        let of_others = {
            let job = self.slots[slot].job.as_ref().unwrap();
            assert!(!job.is_over, "what it was copied into is a layer now");
            self.model.layers_of_others(&job.chain)
        };
        let job = self.slots[slot].job.as_mut().unwrap();
        job.is_relinked = true;
        if job.is_commit {
            // Its file has the name of the one that stays.
            let lowest = &mut self.model.images[job.chain[job.first]];
            lowest.is_there = false;
            self.model.images[job.target()].may_leak = lowest.may_leak;
        }
        for layer in job.first + usize::from(job.is_commit)..=job.last {
            let is_own = layer >= of_others && self.model.is_named(job.chain[layer + 1]);
            let is_wanted = match job.options.removal {
                Removal::Snapshots => is_own,
                Removal::Everywhere | Removal::All => true,
                Removal::Nothing => false,
            };
            self.model.images[job.chain[layer]].is_going |= is_wanted;
            job.wanted.extend(is_wanted.then_some(job.chain[layer]));
        }
        self.model.drop_layers(&job.chain, job.first, job.last);
    }

    /// The dropped layers that must be removed: those that are wanted gone and that nobody needs, newest first.
    fn expected(&self, slot: usize) -> Vec<Id> {
        let job = self.slots[slot].job.as_ref().unwrap();
        let mut gone: Vec<Id> = Vec::new();
        for layer in job.wanted.iter().rev() {
            let is_needed = self.model.users(*layer).any(|user| !gone.contains(&user));
            let is_viewed = self.views.iter().any(|view| view.layers.contains(layer));
            if !is_needed && !is_viewed && self.model.images[*layer].is_there {
                gone.push(*layer);
            }
        }
        gone
    }

    /// Files were removed: those that had to be, and beside them only what waited since an earlier merge.
    fn removed(&mut self, slot: usize, expected: &[Id], are_awake: bool) {
        let job = self.slots[slot].job.as_ref().unwrap();
        let merged: Merged = job.merge.merged().clone();
        let mut removed: Vec<PathBuf> = merged.removed.iter().map(|path| real(path)).collect();
        if job.is_commit {
            let lowest = &self.model.images[job.chain[job.first]].path;
            assert!(removed.contains(lowest), "{removed:?}");
            removed.retain(|path| path != lowest);
        }
        self.said.push(format!("{merged:?}"));
        for &id in expected {
            let path = &self.model.images[id].path;
            let kept = merged.kept.iter().find(|(kept, _)| real(kept) == *path);
            let may_stay = match kept.map(|(_, why)| why) {
                Some(Kept::InUse) => !are_awake,
                Some(Kept::Missing { by }) => self.may_be_elsewhere(slot, by),
                // What may not go keeps what is below it.
                Some(Kept::Needed { by }) => merged.kept.iter().any(|(kept, _)| real(kept) == *by),
                _ => false,
            };
            assert!(removed.contains(path) || may_stay, "{} stays: {kept:?}", path.display());
        }
        for path in removed {
            let id = self.model.at(&path).expect("an image that was there");
            let is_waiting = self.model.images[id].is_going && self.model.users(id).next().is_none();
            assert!(expected.contains(&id) || is_waiting, "{} is removed", path.display());
            self.model.images[id].is_there = false;
            assert!(!path.exists());
        }
    }

    /// A disk that was removed by hand may have been moved.
    fn may_be_elsewhere(&self, slot: usize, disk: &PathBuf) -> bool {
        let forgets = self.slots[slot].job.as_ref().unwrap().options.forget_missing;
        !forgets && !disk.exists() && self.gone.contains(disk)
    }

    /// What a killed merge left goes when the disk is used next: only what was dropped, and nobody needs.
    pub(super) fn notice_gone(&mut self) {
        let gone: Vec<Id> = self.model.there().filter(|&id| !self.model.images[id].path.exists()).collect();
        for &id in &gone {
            let image = &self.model.images[id];
            let needed_by = self.model.users(id).find(|user| !gone.contains(user));
            let is_viewed = self.views.iter().any(|view| view.layers.contains(&id));
            assert!(image.is_going, "{} is gone", image.path.display());
            assert!(needed_by.is_none() && !is_viewed, "{} is gone and needed", image.path.display());
        }
        for id in gone {
            self.say(format!("{} is gone", self.model.images[id].path.display()));
            self.model.images[id].is_there = false;
        }
    }
}
