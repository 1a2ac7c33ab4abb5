//! The thread that frees room in the log: it has files synced, those first whose records lie longest.
//!
//! A file whose storage hangs holds this thread and the tail. The others then flush as without a log.

use std::io;
use std::sync::{Arc, Weak};

use crossbeam_channel::{Receiver, bounded};

use crate::log::FlushLog;

impl FlushLog {
    /// Starts the thread that has files synced when room gets short; it ends with the log.
    ///
    /// # Errors
    /// A host that cannot start a thread.
    pub fn start_checkpoints(self: &Arc<Self>) -> io::Result<()> {
        let (wake, woken) = bounded(1);
        let log = Arc::downgrade(self);
        std::thread::Builder::new().name("flush-log".to_owned()).spawn(move || run(&log, &woken))?;
        self.call_when_filled(wake);
        Ok(())
    }
}

fn run(log: &Weak<FlushLog>, woken: &Receiver<()>) {
    while woken.recv().is_ok() {
        let Some(log) = log.upgrade() else { return };
        while log.is_filled() {
            let oldest = log.oldest();
            if let Some(store) = &oldest
                && let Err(error) = store.checkpoint()
            {
                tracing::error!(file = %store.path().display(), %error, "cannot sync a file behind the flush log: its disk takes no more writes");
            }
            if let Err(error) = log.advance() {
                tracing::error!(log = %log.path().display(), %error, "the flush log failed: disks behind it take no more writes");
                return;
            }
            if oldest.is_none() {
                break;
            }
        }
    }
}
