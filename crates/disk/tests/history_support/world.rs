//! Disks, who uses them, and the steps of a history.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use rand::Rng as _;
use rand::rngs::SmallRng;
use vmstrata_disk::merge::{Merge, MergeOptions};
use vmstrata_disk::{Disk, Error, OpenOptions, ResourceOptions, Resources};

use super::model::{Id, Image, Model};
use crate::common;
use crate::common::io::Client;
use crate::common::stock::{path_str, qemu_img};

/// What kind of disk a history begins with.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Kind {
    /// Options for stock tools.
    pub(crate) options: &'static str,
    pub(crate) version: u32,
    /// Bytes of a cluster, or of a subcluster, as requests are chosen by.
    pub(crate) cluster: u64,
    /// Whether it stands on a raw image, which is nobody's snapshot.
    pub(crate) has_raw_base: bool,
}

/// A disk that is in use.
pub(crate) struct Guest {
    /// Goes before the disk. Some guests have a queue, which may know files of layers.
    pub(super) client: Option<Client>,
    pub(super) disk: Arc<Disk>,
}

/// A merge under way.
#[derive(Debug)]
pub(crate) struct Job {
    pub(super) merge: Merge,
    pub(super) options: MergeOptions,
    /// The disk's layers when it began, and which of them go.
    pub(super) chain: Vec<Id>,
    pub(super) first: usize,
    pub(super) last: usize,
    pub(super) is_relinked: bool,
    /// The layers whose files are to be removed.
    pub(super) wanted: Vec<Id>,
    /// A snapshot has frozen what was copied into.
    pub(super) is_over: bool,
    pub(super) is_commit: bool,
}

impl Job {
    pub(super) fn target(&self) -> Id {
        self.chain[self.last + 1]
    }

    /// The lowest layer that nobody may begin to read.
    pub(super) fn lowest(&self) -> Id {
        if self.is_commit && !self.is_relinked { self.chain[self.first] } else { self.target() }
    }

    pub(super) fn has_frozen_target(&self) -> bool {
        self.last + 2 < self.chain.len()
    }
}

/// A name that leads to an image.
pub(crate) struct Slot {
    pub(super) active: Id,
    pub(super) guest: Option<Guest>,
    pub(super) job: Option<Job>,
}

/// A state that someone reads: its layers, base first.
#[derive(Debug)]
pub(crate) struct View {
    pub(super) layers: Vec<Id>,
    pub(super) disk: Arc<Disk>,
}

pub(crate) struct World {
    pub(super) kind: Kind,
    pub(super) random: SmallRng,
    pub(super) model: Model,
    pub(super) slots: Vec<Slot>,
    pub(super) views: Vec<View>,
    /// What the disks of this process share.
    pub(super) server: Arc<Resources>,
    /// Those of another one, that only reads.
    pub(super) reader: Arc<Resources>,
    /// Images that were removed by hand.
    pub(super) gone: Vec<PathBuf>,
    /// For file names.
    pub(super) count: usize,
    pub(super) said: Vec<String>,
    /// Goes last.
    pub(super) dir: tempfile::TempDir,
}

/// Sizes in bytes between which disks begin.
const SIZES: std::ops::Range<u64> = 4 << 20..7 << 20;

impl World {
    pub(crate) fn new(kind: Kind, mut random: SmallRng) -> Self {
        let dir = common::scratch();
        for sub in ["golden", "vms", "journals"] {
            std::fs::create_dir(dir.path().join(sub)).unwrap();
        }
        let reader = common::small_resources(None);
        let server = serving(dir.path(), &mut random);
        let mut world = Self {
            kind,
            random,
            model: Model::default(),
            slots: Vec::new(),
            views: Vec::new(),
            server,
            reader,
            gone: Vec::new(),
            count: 0,
            said: Vec::new(),
            dir,
        };
        world.make_first();
        world
    }

    fn make_first(&mut self) {
        let size = self.random.random_range(SIZES) / 512 * 512;
        let path = self.directory(0).join("web.qcow2");
        let mut args = vec!["create", "-q", "-f", "qcow2", "-o", self.kind.options];
        let mut image = Image::new(path.clone(), vec![0; size as usize]);
        if self.kind.has_raw_base {
            let base = self.directory(0).join("base.raw");
            let bytes = common::flat::pattern(&mut self.random, 3 << 20);
            std::fs::write(&base, &bytes).unwrap();
            image.bytes[..bytes.len()].copy_from_slice(&bytes);
            image.below = Some(self.model.add(Image { is_raw: true, ..Image::new(base, bytes) }));
            args.extend(["-b", "base.raw", "-F", "raw"]);
        }
        let size = size.to_string();
        args.extend([path_str(&path), &size]);
        qemu_img(&args);
        let active = self.model.add(image);
        self.slots.push(Slot { active, guest: None, job: None });
    }

    /// `golden` or `vms`.
    pub(super) fn directory(&self, number: usize) -> PathBuf {
        self.dir.path().canonicalize().unwrap().join(["golden", "vms"][number])
    }

    /// How an image is opened: disks in `vms` may stand on layers in `golden`, and not the other way around.
    pub(super) fn options(&self, path: &Path) -> OpenOptions {
        let is_golden = path.starts_with(self.directory(0));
        let allow_backing = if is_golden { Vec::new() } else { vec![self.directory(0)] };
        OpenOptions { allow_backing, ..OpenOptions::default() }
    }

    pub(super) fn say(&mut self, what: impl std::fmt::Display) {
        self.said.push(what.to_string());
    }

    pub(super) fn path(&self, slot: usize) -> PathBuf {
        self.model.images[self.slots[slot].active].path.clone()
    }

    /// The file's name, for those who read along.
    pub(super) fn name(&self, id: Id) -> String {
        self.model.images[id].path.file_name().unwrap().to_string_lossy().into_owned()
    }

    /// One step of some disk.
    pub(crate) fn step(&mut self) {
        let slot = self.random.random_range(0..self.slots.len());
        if self.is_blocked(self.slots[slot].active, Some(slot)) && self.slots[slot].guest.is_none() {
            return self.meet_merge(slot);
        }
        if self.slots[slot].job.is_some() && (self.slots[slot].guest.is_none() || self.random.random()) {
            return self.go_on(slot);
        }
        match self.slots[slot].guest {
            Some(_) => self.step_of_guest(slot),
            None => self.step_of_files(slot),
        }
        self.notice_gone();
    }

    fn step_of_guest(&mut self, slot: usize) {
        match self.random.random_range(0..100) {
            0..46 => self.change(slot),
            46..60 => self.snapshot(slot),
            60..64 => self.snapshot_together(slot),
            64..77 => self.delete(slot),
            77..79 => self.flatten(slot),
            79..82 => self.resize(slot),
            82..86 => self.close_and_revert(slot),
            86..89 => self.close(slot),
            89..94 => self.clone_of(slot),
            94..96 => self.look_at(slot),
            _ => self.stop_looking(),
        }
    }

    fn step_of_files(&mut self, slot: usize) {
        match self.random.random_range(0..100) {
            0..50 => self.open(slot),
            50..62 => self.snapshot_of_files(slot),
            62..68 => self.revert(slot),
            68..84 => self.delete(slot),
            84..87 => self.flatten(slot),
            87..92 => self.clone_of(slot),
            92..95 => self.index(slot),
            _ => self.remove_disk(slot),
        }
    }

    /// Whether an image stands on a layer that is being copied into for another disk.
    pub(super) fn is_blocked(&self, top: Id, but: Option<usize>) -> bool {
        let others = self.slots.iter().enumerate().filter(|(slot, _)| Some(*slot) != but);
        let mut jobs = others.filter_map(|(_, slot)| slot.job.as_ref());
        jobs.any(|job| job.has_frozen_target() && self.model.stands_on(top, job.lowest()))
    }

    pub(super) fn open(&mut self, slot: usize) {
        let path = self.path(slot);
        let disk = self.patiently(|world| Disk::open(&path, &world.options(&path), &world.server));
        let client = self.random.random::<bool>().then(|| Client::new(&disk, 8));
        self.model.images[self.slots[slot].active].is_unclean = false;
        self.slots[slot].guest = Some(Guest { client, disk });
        self.say(format!("opened {}", path.display()));
    }

    pub(super) fn patiently<T>(&self, work: impl Fn(&Self) -> Result<T, Error>) -> T {
        common::patiently(|| work(self)).unwrap_or_else(|error| panic!("{error}"))
    }

    pub(super) fn close(&mut self, slot: usize) {
        self.slots[slot].job = None;
        let guest = self.slots[slot].guest.take().unwrap();
        guest.disk.close().unwrap();
        self.say(format!("closed {}", self.path(slot).display()));
    }

    pub(crate) fn close_all(&mut self) {
        self.views.clear();
        self.slots.iter_mut().for_each(|slot| slot.job = None);
        for slot in 0..self.slots.len() {
            if self.slots[slot].guest.is_none() && self.model.images[self.slots[slot].active].is_unclean {
                self.open(slot);
            }
            if self.slots[slot].guest.is_some() {
                self.close(slot);
            }
        }
    }
}

pub(super) fn serving(dir: &Path, random: &mut SmallRng) -> Arc<Resources> {
    Resources::new(ResourceOptions {
        metadata_cache_bytes: if random.random() { 0 } else { 1 << 20 },
        max_open_files: 64,
        workers: 1,
        journal_dir: Some(dir.join("journals")),
    })
}

impl Drop for World {
    fn drop(&mut self) {
        if std::thread::panicking() {
            for line in &self.said {
                eprintln!("{line}");
            }
        }
    }
}
