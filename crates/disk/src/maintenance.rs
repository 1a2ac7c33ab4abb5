//! The housekeeping thread: commits changes that no guest flushes, gives back clusters that no one uses, and has files written
//! out while they grow.

use std::path::Path;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, RecvTimeoutError, Sender, bounded};
use parking_lot::Mutex;
use vmstrata_store::FileId;

use crate::error::Result;
use crate::threads;

/// What the thread does for a disk.
pub(crate) trait Maintained: std::fmt::Debug + Send + Sync {
    /// Has the host begin to write out what the active layer has grown by, once that has rested since the last call; false
    /// when it has not grown since.
    fn write_out(&self) -> bool;

    /// Commits changes that wait since `age` or longer, and gives back clusters that no one uses any more.
    fn tend(&self, age: Duration);

    /// Whether one of its frozen layers is this file.
    fn stands_on(&self, file: FileId) -> bool;

    /// The path of its active layer.
    fn path(&self) -> &Path;
}

/// The disks that are open.
pub(crate) type Disks = Mutex<Vec<Weak<dyn Maintained>>>;

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
    /// Wakes the thread, and ends it when this is dropped.
    wake: Sender<()>,
}

impl Maintenance {
    /// Starts the thread.
    ///
    /// # Errors
    /// A host that cannot start a thread.
    pub(crate) fn new() -> Result<Self> {
        let (wake, woken) = bounded(1);
        let disks: Arc<Disks> = Arc::default();
        let watched = Arc::clone(&disks);
        threads::start("maintenance", move || tend_all(&watched, &woken))?;
        Ok(Self { disks, wake })
    }

    /// A disk has a new layer, which is about to grow.
    pub(crate) fn layer_is_new(&self) {
        // Full: it is about to look.
        let _ = self.wake.try_send(());
    }

    /// The disks that are open.
    pub(crate) fn disks(&self) -> Vec<Arc<dyn Maintained>> {
        self.disks.lock().iter().filter_map(Weak::upgrade).collect()
    }

    pub(crate) fn watch(&self, disk: Weak<dyn Maintained>) {
        self.disks.lock().push(disk);
    }
}

/// Looks after the disks until its [`Maintenance`] is dropped.
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
