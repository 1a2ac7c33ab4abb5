//! The housekeeping thread: commits changes that no guest flushes, and gives back clusters that no one uses.

use std::sync::{Arc, Weak};
use std::time::Duration;

use crossbeam_channel::{RecvTimeoutError, Sender};

use crate::copier::{Copier, Disks};
use crate::disk::Disk;
use crate::lookout::Lookout;

/// How often the thread looks at every disk.
const PERIOD: Duration = Duration::from_secs(1);
/// How long a change may wait for a guest's flush before it is committed without one: bounds what a power failure
/// can undo for guests that never flush, as the kernel does for files.
const COMMIT_AGE: Duration = Duration::from_secs(5);

/// See the module documentation. The thread ends when this is dropped.
#[derive(Debug)]
pub(crate) struct Upkeep {
    disks: Arc<Disks>,
    /// None where nothing is copied before it must be.
    copier: Option<Copier>,
    /// None where only what requests meet is noticed.
    _lookout: Option<Lookout>,
    _end: Sender<()>,
}

impl Upkeep {
    /// Starts the threads; what first writes put off is copied up after `copy_up_after`, and frozen layers are looked at every
    /// `look_every`.
    ///
    /// # Panics
    /// When the host cannot start a thread.
    pub(crate) fn new(copy_up_after: Option<Duration>, look_every: Option<Duration>) -> Self {
        let (end, ended) = crossbeam_channel::bounded(0);
        let disks: Arc<Disks> = Arc::default();
        let watched = Arc::clone(&disks);
        let look = move || {
            while ended.recv_timeout(PERIOD) == Err(RecvTimeoutError::Timeout) {
                let disks = {
                    let mut watched = watched.lock();
                    watched.retain(|disk| disk.strong_count() > 0);
                    watched.clone()
                };
                for disk in disks.iter().filter_map(Weak::upgrade) {
                    disk.tend(COMMIT_AGE);
                }
            }
        };
        std::thread::Builder::new().name("upkeep".into()).spawn(look).expect("the host can start threads");
        let copier = copy_up_after.map(|age| Copier::new(Arc::clone(&disks), age));
        let _lookout = look_every.map(|period| Lookout::new(Arc::clone(&disks), period));
        Self { disks, copier, _lookout, _end: end }
    }

    /// A cluster was written in part.
    #[inline]
    pub(crate) fn put_off(&self) {
        if let Some(copier) = &self.copier {
            copier.wake();
        }
    }

    /// The disks that are open.
    pub(crate) fn disks(&self) -> Vec<Arc<Disk>> {
        self.disks.lock().iter().filter_map(Weak::upgrade).collect()
    }

    pub(crate) fn watch(&self, disk: &Arc<Disk>) {
        self.disks.lock().push(Arc::downgrade(disk));
    }
}
