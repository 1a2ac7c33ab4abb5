//! What is done to a disk in use.

use rand::Rng as _;
use vmstrata_disk::snapshot::{SnapshotInfo, frozen_path};
use vmstrata_disk::{Disk, Format, Op, Shrink, snapshot_together};

use super::discarded;
use super::model::Id;
use super::world::{Guest, View, World};
use crate::common::flat::{SECTOR, assert_same, pattern, range, read, some_range, write};

/// Most images at a time.
pub(super) const IMAGES_MAX: usize = 22;
const GROWTH_MAX: u64 = 1 << 20;
const SIZE_MAX: u64 = 10 << 20;

pub(super) fn named(name: &str) -> SnapshotInfo {
    SnapshotInfo { name: name.to_owned(), ..SnapshotInfo::default() }
}

impl Guest {
    fn write(&mut self, at: u64, bytes: &[u8]) {
        match &mut self.client {
            None => write(&self.disk, at, bytes).unwrap(),
            Some(_) => {
                drop(self.through_queue(Op::Write { fua: false }, at, bytes.len() as u64, Some(bytes)))
            }
        }
    }

    pub(super) fn read(&mut self, at: u64, len: u64) -> Vec<u8> {
        match &mut self.client {
            None => read(&self.disk, at, len as usize).unwrap(),
            Some(_) => self.through_queue(Op::Read, at, len, None),
        }
    }

    fn through_queue(&mut self, op: Op, at: u64, len: u64, bytes: Option<&[u8]>) -> Vec<u8> {
        let client = self.client.as_mut().unwrap();
        client.push(op, at, len, bytes);
        let done = client.drain().pop().unwrap();
        done.result.unwrap();
        done.bytes.to_vec()
    }
}

impl World {
    pub(super) fn guest(&mut self, slot: usize) -> &mut Guest {
        self.slots[slot].guest.as_mut().unwrap()
    }

    pub(super) fn disk(&self, slot: usize) -> &Disk {
        &self.slots[slot].guest.as_ref().unwrap().disk
    }

    /// A few requests.
    pub(super) fn change(&mut self, slot: usize) {
        for _ in 0..self.random.random_range(1..8) {
            self.request(slot);
        }
    }

    fn request(&mut self, slot: usize) {
        let active = self.slots[slot].active;
        let size = self.model.images[active].bytes.len() as u64;
        let (at, len) = some_range(&mut self.random, size, self.kind.cluster);
        // Most of it in one part of the disk, so that layers lie over each other.
        let at = if self.random.random_ratio(2, 3) { at % (size / 8) / SECTOR * SECTOR } else { at };
        let place = at as usize..(at + len) as usize;
        match self.random.random_range(0..20) {
            0..10 => {
                let bytes = pattern(&mut self.random, len as usize);
                self.guest(slot).write(at, &bytes);
                self.model.put(active, at, &bytes);
            }
            10..13 => {
                let unmap = self.random.random();
                self.disk(slot).write_zeroes(range(at, len), unmap).unwrap();
                self.model.images[active].bytes[place].fill(0);
            }
            13..16 => self.discard(slot, at, len),
            16..19 => {
                let found = self.guest(slot).read(at, len);
                assert_same(&found, &self.model.images[active].bytes[place], at, "a read");
            }
            _ => self.disk(slot).flush().unwrap(),
        }
    }

    /// What lies below may show where a version 2 image has no other way to let go of a cluster.
    fn discard(&mut self, slot: usize, at: u64, len: u64) {
        let active = self.slots[slot].active;
        // Overlays of snapshots have subclusters, whatever the disk began with.
        let unit = self.disk(slot).cluster_bits().size();
        self.disk(slot).discard(range(at, len)).unwrap();
        let image = &self.model.images[active];
        if self.kind.version > 2 || image.below.is_none() {
            return self.model.discard(active, at, len, unit);
        }
        let size = image.bytes.len() as u64;
        let Some(whole) = discarded(at, len, unit, size) else { return };
        let found = self.guest(slot).read(whole.start, whole.end - whole.start);
        let old = &self.model.images[active].bytes[whole.start as usize..whole.end as usize];
        let is_old_or_zero = |(found, old): (&u8, &u8)| found == old || *found == 0;
        assert!(found.iter().zip(old).all(is_old_or_zero), "a discard made things up");
        self.model.put(active, whole.start, &found);
    }

    /// A name for a snapshot: now and then one that is in use.
    pub(super) fn some_name(&mut self) -> String {
        self.count += 1;
        if self.random.random_ratio(1, 5) {
            return format!("n{}", self.random.random_range(0..self.count));
        }
        format!("n{}", self.count)
    }

    /// The file that a snapshot would have, unless there is one of that name.
    fn free_path(&self, slot: usize, name: &str) -> Option<std::path::PathBuf> {
        let path = frozen_path(&self.path(slot), name, Format::Qcow2).unwrap();
        self.model.at(&path).is_none().then_some(path)
    }

    /// What was active has a name now.
    pub(super) fn freeze(&mut self, slot: usize, name: &str) {
        let frozen = self.free_path(slot, name).unwrap();
        let before = self.slots[slot].active;
        self.slots[slot].active = self.model.freeze(before, name, frozen);
        if let Some(job) = &mut self.slots[slot].job {
            job.is_over |= !job.is_relinked && job.target() == before;
        }
        self.say(format!("snapshot {name} of {}", self.name(self.slots[slot].active)));
    }

    /// Whether a snapshot in the disk's chain has the name.
    fn knows(&self, slot: usize, name: &str) -> bool {
        self.model.find(self.slots[slot].active, name).is_some()
    }

    pub(super) fn may_grow(&self) -> bool {
        self.model.there().count() < IMAGES_MAX
    }

    pub(super) fn snapshot(&mut self, slot: usize) {
        if !self.may_grow() {
            return self.delete(slot);
        }
        let name = self.some_name();
        let (frozen, is_known) = (self.free_path(slot, &name), self.knows(slot, &name));
        let taken = self.disk(slot).snapshot(&named(&name));
        let Some(frozen) = frozen.filter(|_| !is_known) else {
            let error = taken.unwrap_err().to_string();
            let why = if is_known { "has a snapshot" } else { "exists already" };
            return assert!(error.contains(why), "{error}");
        };
        assert_eq!(taken.unwrap().layer, frozen);
        self.freeze(slot, &name);
    }

    /// Of two disks, if there are two; what is left to do then waits for whoever comes next.
    pub(super) fn snapshot_together(&mut self, slot: usize) {
        let mut others: Vec<usize> = (0..self.slots.len()).collect();
        others.retain(|&other| other != slot && self.slots[other].guest.is_some());
        let mut group = vec![slot];
        if !others.is_empty() {
            group.insert(self.random.random_range(0..2), others[self.random.random_range(0..others.len())]);
        }
        let name = self.some_name();
        if !self.may_grow()
            || group.iter().any(|&slot| self.knows(slot, &name) || self.free_path(slot, &name).is_none())
        {
            return;
        }
        let disks: Vec<&Disk> = group.iter().map(|&slot| self.disk(slot)).collect();
        let taken = snapshot_together(&disks, &named(&name)).unwrap();
        assert_eq!(taken.len(), group.len());
        for slot in group {
            self.freeze(slot, &name);
        }
    }

    pub(super) fn resize(&mut self, slot: usize) {
        let active = self.slots[slot].active;
        let size = self.model.images[active].bytes.len() as u64;
        let to = (size + self.random.random_range(0..GROWTH_MAX) / 512 * 512).min(SIZE_MAX);
        let resized = self.disk(slot).resize(to, Shrink::Refuse);
        if self.slots[slot].job.is_some() {
            let error = resized.unwrap_err().to_string();
            return assert!(error.contains("being merged"), "{error}");
        }
        assert_eq!((resized.unwrap().to, self.disk(slot).size()), (to, to));
        self.model.images[active].bytes.resize(to as usize, 0);
        self.say(format!("{} has {to:#x} bytes", self.name(active)));
    }

    /// Begins to read a state, as long as nobody copies into it.
    pub(super) fn look_at(&mut self, slot: usize) {
        let Some(layer) = self.some_snapshot(slot).map(|seen| seen.layer) else { return };
        let image = &self.model.images[layer];
        if self.is_blocked(layer, None) || image.is_raw || image.is_half_deleted {
            return;
        }
        let path = self.model.images[layer].path.clone();
        let options = vmstrata_disk::OpenOptions { read_only: true, ..self.options(&path) };
        let disk = self.patiently(|world| Disk::open(&path, &options, &world.server));
        self.say(format!("looks at {}", self.name(layer)));
        self.views.push(View { layers: self.model.chain(layer), disk });
    }

    pub(super) fn stop_looking(&mut self) {
        if self.views.is_empty() {
            return;
        }
        let view = self.views.swap_remove(self.random.random_range(0..self.views.len()));
        self.assert_view(&view);
        self.say("looks away");
    }

    pub(super) fn assert_view(&self, view: &View) {
        let layer: Id = *view.layers.last().unwrap();
        crate::common::flat::assert_reads(
            &view.disk,
            &self.model.images[layer].bytes,
            "someone who looks on",
        );
    }
}
