//! What a killed process leaves: its files as they are at that moment, whatever it would have done to them later.

use std::collections::BTreeMap;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Weak};
use std::time::SystemTime;

use rand::Rng as _;
use vmstrata_disk::Disk;

use super::world::{World, serving};

/// Every file below a directory, with its bytes and the time of its last change.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Moment(BTreeMap<PathBuf, (Vec<u8>, SystemTime)>);

impl Moment {
    /// A moment at which nobody writes: other threads may copy up what a guest's writes put off.
    pub(crate) fn of(directory: &Path) -> Self {
        loop {
            let moment = Self::look(directory);
            if moment == Self::look(directory) {
                return moment;
            }
        }
    }

    fn look(directory: &Path) -> Self {
        let mut found = BTreeMap::new();
        for path in files(directory) {
            let changed = path.metadata().unwrap().modified().unwrap();
            found.insert(path.clone(), (std::fs::read(&path).unwrap(), changed));
        }
        Self(found)
    }

    /// Makes the files what they were, as the very files they are.
    pub(crate) fn put_back(&self, directory: &Path) {
        for path in files(directory) {
            if !self.0.contains_key(&path) {
                std::fs::remove_file(path).unwrap();
            }
        }
        for (path, (bytes, changed)) in &self.0 {
            // A journal may go when its disk is dropped; it need not be the same file again.
            if std::fs::read(path).ok().is_none_or(|found| found != *bytes) {
                assert!(path.exists() || path.extension().is_some_and(|ending| ending == "journal"));
                std::fs::write(path, bytes).unwrap();
            }
            File::options().write(true).open(path).unwrap().set_modified(*changed).unwrap();
        }
    }
}

impl World {
    /// The process that serves the disks ends, without a chance to close anything; another one begins.
    pub(crate) fn kill(&mut self) {
        let is_exact = self.random.random_ratio(2, 3);
        self.say(format!("killed ({is_exact})"));
        let moment = is_exact.then(|| Moment::of(self.dir.path()));
        let mut disks: Vec<Weak<Disk>> =
            self.views.drain(..).map(|view| Arc::downgrade(&view.disk)).collect();
        for slot in &mut self.slots {
            if let Some(job) = slot.job.take() {
                for id in [job.target(), job.lowest()] {
                    self.model.images[id].may_leak = true;
                }
            }
            if let Some(guest) = slot.guest.take() {
                disks.push(Arc::downgrade(&guest.disk));
                let active = &mut self.model.images[slot.active];
                (active.is_unclean, active.may_leak) = (true, true);
            }
        }
        self.server = serving(self.dir.path(), &mut self.random);
        // A thread that copies up may have one for a moment.
        while disks.iter().any(|disk| disk.strong_count() > 0) {
            std::thread::yield_now();
        }
        if let Some(moment) = moment {
            moment.put_back(self.dir.path());
        }
    }
}

/// All files below a directory; no links.
pub(crate) fn files(directory: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(directory).unwrap() {
        let entry = entry.unwrap();
        let kind = entry.file_type().unwrap();
        if kind.is_dir() {
            found.extend(files(&entry.path()));
        } else if kind.is_file() {
            found.push(entry.path());
        }
    }
    found
}
