//! Copying up what first writes deferred.
//!
//! The next flush or snapshot would otherwise do all of it at once. The thread leaves new clusters alone for a moment, as
//! a guest that writes a file from start to end fills them; then it copies, and pauses after each burst so that the disk can be
//! closed.

use std::convert::Infallible;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, RecvTimeoutError, Sender, bounded};

use super::{Disks, Maintained};
use crate::error::Result;
use crate::threads;

/// How long it has a disk to itself, and the pause after it.
const BURST: Duration = Duration::from_millis(1);
const PAUSE: Duration = Duration::from_micros(200);

/// See the module documentation. The thread ends when this is dropped.
#[derive(Debug)]
pub(crate) struct Completer {
    wake: Sender<()>,
    _end: Sender<Infallible>,
}

/// The thread's side.
struct Ends {
    woken: Receiver<()>,
    ended: Receiver<Infallible>,
}

impl Completer {
    /// Starts the thread, for clusters that have been partial for `age`.
    ///
    /// # Errors
    /// A host that cannot start a thread.
    pub(crate) fn new(disks: Arc<Disks>, age: Duration) -> Result<Self> {
        let ((wake, woken), (end, ended)) = (bounded(1), bounded(0));
        let ends = Ends { woken, ended };
        let work = move || while ends.woken.recv().is_ok() && copy_all(&disks, age, &ends) {};
        threads::start("completer", work)?;
        Ok(Self { wake, _end: end })
    }

    /// There is something to do.
    #[inline]
    pub(crate) fn wake(&self) {
        // Full: it is awake, or about to be.
        let _ = self.wake.try_send(());
    }
}

impl Ends {
    /// Returns after `time`; false at once when it is time to end.
    fn sleep(&self, time: Duration) -> bool {
        self.ended.recv_timeout(time) == Err(RecvTimeoutError::Timeout)
    }
}

/// Copies until nothing is deferred; false when it is time to end.
fn copy_all(disks: &Disks, age: Duration, ends: &Ends) -> bool {
    loop {
        let deferred = |disk: &Weak<dyn Maintained>| Some((disk.clone(), disk.upgrade()?.deferred()));
        let open = disks.lock().clone();
        let found: Vec<(Weak<dyn Maintained>, Vec<u64>)> = open.iter().filter_map(deferred).collect();
        if found.iter().all(|(_, clusters)| clusters.is_empty()) {
            return true;
        }
        if !ends.sleep(age) {
            return false;
        }
        for (disk, clusters) in found {
            let mut left = clusters.as_slice();
            while let [_, ..] = left {
                // Not held while it sleeps: the caller that closes the disk may have to be its last user.
                let Some(disk) = disk.upgrade() else { break };
                left = disk.copy_up_some(left, Instant::now() + BURST);
                drop(disk);
                if !ends.sleep(PAUSE) {
                    return false;
                }
            }
        }
    }
}
