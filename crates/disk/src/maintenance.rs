//! The housekeeping thread: commits changes that no guest flushes, gives back clusters that no one uses, and has files written
//! out while they grow.

use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, RecvTimeoutError, Sender, bounded};

use crate::completer::{Completer, Disks};
use crate::disk::Disk;
use crate::error::Result;
use crate::lookout::Lookout;
use crate::threads;

/// How often the thread looks at every disk.
const PERIOD: Duration = Duration::from_secs(1);
/// The same while files grow: new clusters are written out when they are as old.
const REST: Duration = Duration::from_millis(100);
/// How long a change may wait for a guest's flush before it is committed without one: bounds what a power failure
/// can undo for guests that never flush, as the kernel does for files.
const COMMIT_AGE: Duration = Duration::from_secs(5);

/// See the module documentation. The thread ends when this is dropped.
#[derive(Debug)]
pub(crate) struct Maintenance {
    disks: Arc<Disks>,
    /// None where nothing is copied before it must be.
    completer: Option<Completer>,
    /// None where only what requests meet is noticed.
    _lookout: Option<Lookout>,
    /// Wakes the thread, and ends it when this is dropped.
    wake: Sender<()>,
}

impl Maintenance {
    /// Starts the threads; what first writes put off is copied up after `copy_up_after`, and frozen layers are looked at every
    /// `look_every`.
    ///
    /// # Errors
    /// A host that cannot start a thread.
    pub(crate) fn new(copy_up_after: Option<Duration>, look_every: Option<Duration>) -> Result<Self> {
        let (wake, woken) = bounded(1);
        let disks: Arc<Disks> = Arc::default();
        let watched = Arc::clone(&disks);
        threads::start("maintenance", move || tend_all(&watched, &woken))?;
        let completer = copy_up_after.map(|age| Completer::new(Arc::clone(&disks), age)).transpose()?;
        let _lookout = look_every.map(|period| Lookout::new(Arc::clone(&disks), period)).transpose()?;
        Ok(Self { disks, completer, _lookout, wake })
    }

    /// A cluster was written in part.
    #[inline]
    pub(crate) fn cluster_is_partial(&self) {
        if let Some(completer) = &self.completer {
            completer.wake();
        }
    }

    /// A disk has a new layer, which is about to grow.
    pub(crate) fn layer_is_new(&self) {
        // Full: it is about to look.
        let _ = self.wake.try_send(());
    }

    /// The disks that are open.
    pub(crate) fn disks(&self) -> Vec<Arc<Disk>> {
        self.disks.lock().iter().filter_map(Weak::upgrade).collect()
    }

    pub(crate) fn watch(&self, disk: &Arc<Disk>) {
        self.disks.lock().push(Arc::downgrade(disk));
    }
}

/// Looks after the disks until nobody can wake it any more.
fn tend_all(watched: &Disks, woken: &Receiver<()>) {
    let mut tended = Instant::now();
    let mut next = tended + PERIOD;
    loop {
        match woken.recv_deadline(next) {
            // However often it is woken, it looks.
            Ok(()) => {
                next = next.min(Instant::now() + REST);
                continue;
            }
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => return,
        }
        let disks = {
            let mut watched = watched.lock();
            watched.retain(|disk| disk.strong_count() > 0);
            watched.clone()
        };
        let is_due = tended.elapsed() >= PERIOD;
        if is_due {
            tended = Instant::now();
        }
        let mut period = PERIOD;
        for disk in disks.iter().filter_map(Weak::upgrade) {
            if disk.write_out() {
                period = REST;
            }
            if is_due {
                disk.tend(COMMIT_AGE);
            }
        }
        next = Instant::now() + period;
    }
}
