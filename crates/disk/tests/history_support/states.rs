//! Whether everything reads as it must, for us and for stock tools.

use std::collections::HashSet;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;

use rand::Rng as _;
use vmstrata_check::{Options, Repair};
use vmstrata_disk::snapshot::list;
use vmstrata_disk::{CheckOptions, Disk, OpenOptions, check};

use super::kill::files;
use super::model::Id;
use super::world::World;
use crate::common::flat::{assert_reads, assert_same};
use crate::common::stock::{assert_clean, assert_safe, content};

fn inode(path: &Path) -> u64 {
    path.metadata().unwrap().ino()
}

impl World {
    /// Every disk has the snapshots that it must have, and reads as it must; of the other images, one in `one_in` does.
    pub(crate) fn verify(&mut self, one_in: u32) {
        self.notice_gone();
        for slot in 0..self.slots.len() {
            self.verify_list(slot);
            if self.slots[slot].guest.is_some() {
                self.verify_guest(slot);
            }
        }
        self.views.iter().for_each(|view| self.assert_view(view));
        let there: Vec<Id> = self.model.there().collect();
        for id in there {
            if self.can_be_read(id) && self.random.random_ratio(1, one_in) {
                self.verify_image(id);
            }
        }
    }

    fn verify_list(&self, slot: usize) {
        let found = list(&self.path(slot), &self.options(&self.path(slot))).unwrap();
        let expected = self.model.snapshots(self.slots[slot].active);
        let what = self.path(slot);
        assert_eq!(found.len(), expected.len(), "layers below {}: {found:?}", what.display());
        for (found, expected) in found.iter().zip(&expected) {
            let image = &self.model.images[expected.layer];
            assert_eq!(found.name(), expected.name.as_deref(), "{}", what.display());
            assert_eq!(found.origin, expected.origin, "{} at {:?}", what.display(), expected.name);
            assert_eq!(inode(&found.layer), inode(&image.path), "{} at {:?}", what.display(), expected.name);
            assert_eq!(found.virtual_size, image.bytes.len() as u64, "{}", image.path.display());
            assert_eq!(found.is_being_deleted, image.is_half_deleted, "{}", image.path.display());
        }
    }

    fn verify_guest(&mut self, slot: usize) {
        let active = self.slots[slot].active;
        let layers: Vec<u64> = self.disk(slot).layers().iter().map(|layer| inode(&layer.path)).collect();
        let expected: Vec<u64> =
            self.model.chain(active).iter().map(|&id| inode(&self.model.images[id].path)).collect();
        assert_eq!(layers, expected, "layers of {}", self.path(slot).display());
        let bytes = &self.model.images[active].bytes;
        assert_reads(self.disk(slot), bytes, &format!("{} in use", self.path(slot).display()));
        let (at, len) = (0, bytes.len() as u64);
        if self.slots[slot].guest.as_ref().unwrap().client.is_some() {
            let found = self.guest(slot).read(at, len);
            assert_same(&found, &self.model.images[active].bytes, at, "through the queue");
        }
    }

    /// Whether a process that only reads can be let in.
    fn can_be_read(&self, id: Id) -> bool {
        let is_busy =
            |slot: &super::world::Slot| slot.active == id && (slot.guest.is_some() || slot.job.is_some());
        let image = &self.model.images[id];
        !image.is_raw && !image.is_unclean && !self.slots.iter().any(is_busy) && !self.is_blocked(id, None)
    }

    fn verify_image(&mut self, id: Id) {
        let path = self.model.images[id].path.clone();
        let is_here = self.random.random();
        let options = OpenOptions { read_only: true, ..self.options(&path) };
        let resources = if is_here { &self.server } else { &self.reader };
        if self.model.images[id].is_half_deleted {
            let error = Disk::open(&path, &options, resources).map(drop).unwrap_err().to_string();
            return assert!(error.contains("being deleted"), "{error}");
        }
        let disk = self.patiently(|world| {
            Disk::open(&path, &options, if is_here { &world.server } else { &world.reader })
        });
        assert_reads(&disk, &self.model.images[id].bytes, &path.display().to_string());
    }

    /// What stock tools make of all images, when nobody uses them.
    pub(crate) fn verify_by_stock(&mut self) {
        self.close_all();
        self.verify(1);
        let there: Vec<Id> = self.model.there().collect();
        for id in there {
            let image = &self.model.images[id];
            let format = if image.is_raw { "raw" } else { "qcow2" };
            let what = format!("{} for stock tools", image.path.display());
            // They do not know its mark.
            if !image.is_half_deleted {
                assert_same(&content(&image.path, format), &image.bytes, 0, &what);
            }
            match image.may_leak {
                _ if image.is_raw || self.lost_its_base(id) => {}
                true => assert_safe(&image.path),
                false => assert_clean(&image.path),
            }
        }
    }

    /// Whether it is dropped, not removed yet, and stood on what was written down into.
    fn lost_its_base(&self, id: Id) -> bool {
        let is_there = |below: &Id| self.model.images[*below].is_there;
        self.model.images[id].is_half_deleted && !self.model.chain(id).iter().all(is_there)
    }

    /// The end of a history: stock tools find nothing wrong, and there is nothing that nobody knows of.
    pub(crate) fn finish(mut self) {
        self.verify_by_stock();
        for id in self.model.there().filter(|&id| self.model.images[id].may_leak && !self.lost_its_base(id)) {
            let path = &self.model.images[id].path;
            let image = Options { repair: Repair::Leaks, ..Options::default() };
            check(path, &CheckOptions { image, ..CheckOptions::default() }).unwrap();
            assert_clean(path);
        }
        let known: HashSet<&Path> = self.model.there().map(|id| &*self.model.images[id].path).collect();
        for path in [0, 1].into_iter().flat_map(|number| files(&self.directory(number))) {
            let name = path.to_str().unwrap();
            let is_note = [".vmsx", ".dropped", ".left"].iter().any(|end| name.ends_with(end));
            assert!(is_note || known.contains(&*path), "{name} is left");
        }
    }
}
