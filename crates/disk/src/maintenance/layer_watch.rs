//! The thread that notices frozen layers being changed beside disks in use.
//!
//! Where an index tells what every layer has, their files are opened, and so locked, only when they are read. What a request
//! meets in a file is compared with what is known of it ([`crate::disk`]); that a layer has a cluster now that is known to be
//! further down is met by no request. So all files are looked at, a few at a time.

use std::convert::Infallible;
use std::sync::{Arc, Weak};
use std::time::Duration;

use crossbeam_channel::{RecvTimeoutError, Sender, bounded};

use super::Disks;
use crate::error::Result;
use crate::threads;

/// The most layers of a disk looked at in one go: a look takes about a microsecond.
const LAYERS_MAX: usize = 256;

/// See the module documentation. The thread ends when this is dropped, once it has looked at the disk that it is at: on a
/// file server that does not answer a look may take for ever, and nobody waits for it.
#[derive(Debug)]
pub(crate) struct LayerWatch {
    _end: Sender<Infallible>,
}

impl LayerWatch {
    /// Starts the thread.
    ///
    /// # Errors
    /// A host that cannot start a thread.
    pub(crate) fn new(disks: Arc<Disks>, period: Duration) -> Result<Self> {
        let (end, ended) = bounded::<Infallible>(0);
        let look = move || {
            while ended.recv_timeout(period) == Err(RecvTimeoutError::Timeout) {
                let watched = disks.lock().clone();
                for disk in watched.iter().filter_map(Weak::upgrade) {
                    disk.look_at_layers(LAYERS_MAX);
                }
            }
        };
        threads::start("layer-watch", look)?;
        Ok(Self { _end: end })
    }
}
