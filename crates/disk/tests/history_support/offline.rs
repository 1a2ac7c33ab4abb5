//! What is done to disks that nobody uses: snapshots, ways back, clones.

use std::path::PathBuf;

use rand::Rng as _;
use vmstrata_disk::index::{IndexOptions, build};
use vmstrata_disk::snapshot::{self, PrepareOptions, RevertOptions};
use vmstrata_disk::{Disk, Format};

use super::guest::named;
use super::model::{Said, Seen};
use super::world::{Slot, World};

/// Most disks at a time.
const DISKS_MAX: usize = 5;

impl World {
    /// A snapshot of a disk that has a name; of several of that name the newest.
    pub(super) fn some_snapshot(&mut self, slot: usize) -> Option<Seen> {
        let active = self.slots[slot].active;
        let names: Vec<String> =
            self.model.snapshots(active).into_iter().filter_map(|seen| seen.name).collect();
        if names.is_empty() {
            return None;
        }
        self.model.find(active, &names[self.random.random_range(0..names.len())])
    }

    pub(super) fn snapshot_of_files(&mut self, slot: usize) {
        let mut group = vec![slot];
        let is_closed = |other: &usize| {
            let found = &self.slots[*other];
            found.guest.is_none() && found.job.is_none() && !self.is_blocked(found.active, None)
        };
        group.extend((0..self.slots.len()).filter(is_closed).find(|&other| other != slot));
        if !self.may_grow() {
            return;
        }
        let name = self.some_name();
        let disks: Vec<PathBuf> = group.iter().map(|&slot| self.path(slot)).collect();
        let options = PrepareOptions::default();
        let open = self.options(disks.iter().max().unwrap());
        let created = snapshot::create(&disks, &named(&name), &open, &options, &self.server);
        for &slot in &group {
            // They were opened and closed, whatever came of it; not always all of them.
            self.model.images[self.slots[slot].active].is_unclean &= created.is_err();
        }
        if group.iter().any(|&slot| self.is_taken(slot, &name)) {
            let error = created.unwrap_err().to_string();
            return assert!(error.contains("already"), "{error}");
        }
        assert_eq!(created.unwrap().len(), group.len());
        for slot in group {
            self.freeze(slot, &name);
        }
    }

    /// Whether a disk has a snapshot of that name, or another file has that of its file.
    fn is_taken(&self, slot: usize, name: &str) -> bool {
        let path = snapshot::frozen_path(&self.path(slot), name, Format::Qcow2).unwrap();
        self.model.find(self.slots[slot].active, name).is_some() || self.model.at(&path).is_some()
    }

    /// As whoever serves a disk does it.
    pub(super) fn close_and_revert(&mut self, slot: usize) {
        self.close(slot);
        if !self.is_blocked(self.slots[slot].active, None) {
            self.revert(slot);
            self.open(slot);
        }
    }

    pub(super) fn revert(&mut self, slot: usize) {
        let Some(Seen { name, origin, layer }) = self.some_snapshot(slot) else { return };
        let image = &self.model.images[layer];
        if self.is_blocked(layer, None) || image.is_raw || image.is_half_deleted {
            return;
        }
        let (path, before, name) = (self.path(slot), self.slots[slot].active, name.unwrap());
        self.count += 1;
        let keep = (self.slots.len() < DISKS_MAX && self.random.random_ratio(1, 3))
            .then(|| path.with_file_name(format!("kept{}.qcow2", self.count)));
        let options =
            RevertOptions { keep: keep.clone(), open: self.options(&path), ..RevertOptions::default() };
        let reverted = self.patiently(|world| snapshot::revert(&path, &name, &options, &world.server));
        assert_eq!(reverted.layer.canonicalize().unwrap(), self.model.images[layer].path);
        self.say(format!("{} is at {name} again, {keep:?} is what it was", path.display()));
        match keep {
            Some(keep) => {
                self.model.images[before].path = keep;
                self.slots.push(Slot { active: before, guest: None, job: None });
            }
            None => self.model.images[before].is_there = false,
        }
        self.slots[slot].active = self.model.overlay(path, layer, Said { name: Some(name), origin });
    }

    pub(super) fn clone_of(&mut self, slot: usize) {
        let Some(Seen { name, layer, .. }) = self.some_snapshot(slot) else { return };
        let is_half_deleted = self.model.images[layer].is_half_deleted;
        if self.slots.len() >= DISKS_MAX || !self.may_grow() || self.is_target(layer) || is_half_deleted {
            return;
        }
        let is_golden = self.path(slot).starts_with(self.directory(0));
        let directory = if is_golden { self.random.random_range(0..2) } else { 1 };
        let path = self.directory(directory).join(format!("c{}.qcow2", self.random.random_range(0..8)));
        if self.model.at(&path).is_some() {
            return;
        }
        let (disk, name) = (self.path(slot), name.unwrap());
        let origin = Some(disk.file_name().unwrap().to_string_lossy().into_owned());
        let stands_on = self.patiently(|world| snapshot::clone(&disk, &name, &path, &world.options(&disk)));
        assert_eq!(stands_on.canonicalize().unwrap(), self.model.images[layer].path);
        self.say(format!("{} is a clone of {} at {name}", path.display(), disk.display()));
        let active = self.model.overlay(path, layer, Said { name: Some(name), origin });
        self.slots.push(Slot { active, guest: None, job: None });
    }

    /// Whether a job copies into the layer.
    fn is_target(&self, layer: usize) -> bool {
        self.slots.iter().filter_map(|slot| slot.job.as_ref()).any(|job| job.target() == layer)
    }

    /// Others may be using the layers: what cannot be indexed then is not.
    pub(super) fn index(&mut self, slot: usize) {
        let path = self.path(slot);
        let allow_backing = self.options(&path).allow_backing;
        let built = build(&path, &IndexOptions { allow_backing, ..IndexOptions::default() }).map(|_| ());
        self.say(format!("indices of {}: {built:?}", path.display()));
    }

    /// By hand, as people do it: its own files go, as far as no other image stands on them.
    pub(super) fn remove_disk(&mut self, slot: usize) {
        if slot == 0 {
            return;
        }
        let Slot { active, .. } = self.slots.swap_remove(slot);
        self.say(format!("{} is removed", self.model.images[active].path.display()));
        let chain = self.model.chain(active);
        let own = &chain[self.model.layers_of_others(&chain)..];
        for &id in own.iter().rev() {
            let is_viewed = self.views.iter().any(|view| view.layers.contains(&id));
            if is_viewed || self.model.users(id).next().is_some() {
                return;
            }
            let path = self.model.images[id].path.clone();
            self.model.images[id].is_there = false;
            self.gone.push(path.clone());
            std::fs::remove_file(&path).unwrap();
            if self.random.random() {
                let _ = std::fs::remove_file(format!("{}.vmsx", path.display()));
            }
        }
    }

    /// While layers of a disk are copied into, no other disk on them is opened.
    pub(super) fn meet_merge(&mut self, slot: usize) {
        let active = self.slots[slot].active;
        let jobs = self.slots.iter().filter_map(|slot| slot.job.as_ref());
        let mut jobs = jobs.filter(|job| self.model.stands_on(active, job.lowest()));
        // Once it has gone over to its new place, other processes may use it again.
        if jobs.any(|job| job.is_relinked) || self.slots[slot].job.is_some() || self.random.random_ratio(3, 4)
        {
            return;
        }
        let path = self.path(slot);
        for resources in [&self.server, &self.reader] {
            let options = vmstrata_disk::OpenOptions { read_only: true, ..self.options(&path) };
            let error = Disk::open(&path, &options, resources).map(drop).unwrap_err().to_string();
            assert!(error.contains("in use") || error.contains("merged"), "{error}");
        }
    }
}
