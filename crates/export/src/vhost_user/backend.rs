//! The messages of the vhost-user protocol: what the frontend says, turned into queues that run.
//!
//! ```text
//!   socket ─► vhost::BackendReqHandler ─► Backend (`messages`) ─► Worker::start / stop
//! ```
//!
//! Every message that changes a ring, the memory or the features stops the queues it concerns, which waits
//! for what they have in flight; then it applies the change and starts again what is complete and enabled.
//! So a change never meets a request, and a reply to GET_VRING_BASE means that all is answered.
//!
//! Not offered: packed rings, postcopy, and the device's own status.

mod messages;

use std::fs::File;
use std::sync::Arc;

use vhost::vhost_user::VhostUserVirtioFeatures;
use virtio_bindings::virtio_ring::{VIRTIO_RING_F_EVENT_IDX, VIRTIO_RING_F_INDIRECT_DESC};
use vmstrata_store::EventNotifier;

use super::config::Device;
use super::dirty::DirtyLog;
use super::inflight::{InflightError, InflightQueue, InflightRegion};
use super::memory::{GuestMemory, MemoryError, RegionInfo};
use super::notify;
use super::queue::QueueParts;
use super::ring::{Logging, Ring, RingLayout};
use super::shared_file::SharedFile;
use super::vring::{Kick, RingAddresses, Vring};
use super::worker::Worker;

/// The state of one connection.
pub(super) struct Backend {
    device: Arc<Device>,
    workers: Arc<[Worker]>,
    queue_size_max: u16,
    /// Whether guests' memory may be in any file.
    any_memory: bool,
    features: u64,
    memory: Arc<GuestMemory>,
    inflight: Option<Arc<InflightRegion>>,
    dirty: Option<Arc<DirtyLog>>,
    vrings: Vec<Vring>,
}

/// Why a queue could not be started.
#[derive(Debug, thiserror::Error)]
enum StartError {
    #[error(transparent)]
    Memory(#[from] MemoryError),
    #[error(transparent)]
    Inflight(#[from] InflightError),
    #[error("cannot set up what signals its driver: {0}")]
    Notifier(#[from] std::io::Error),
}

impl Backend {
    /// A connection that has said nothing yet.
    pub(super) fn new(
        device: Arc<Device>,
        workers: Arc<[Worker]>,
        queue_size_max: u16,
        any_memory: bool,
    ) -> Self {
        device.reset();
        let vrings = (0..device.queues).map(|_| Vring::default()).collect();
        let memory = Arc::new(GuestMemory::default());
        Self {
            device,
            workers,
            queue_size_max,
            any_memory,
            features: 0,
            memory,
            inflight: None,
            dirty: None,
            vrings,
        }
    }

    /// Stops all queues, with everything in flight answered.
    pub(super) fn stop_all(&mut self) {
        for index in 0..self.vrings.len() {
            self.stop(index);
        }
    }

    fn worker(&self, index: usize) -> &Worker {
        &self.workers[index % self.workers.len()]
    }

    fn stop(&mut self, index: usize) {
        if std::mem::take(&mut self.vrings[index].running) {
            let stopped = self.worker(index).stop(index as u16);
            self.vrings[index].next_available = stopped.next_available;
        }
    }

    /// Starts a queue if it is complete. One that cannot be started stays as it is and is tried again with
    /// the next message about it or about memory: a frontend that exchanges regions one by one leaves a ring
    /// without memory for a moment.
    fn start(&mut self, index: usize) {
        let Some(addresses) = self.vrings[index].ready() else { return };
        match self.assemble(index, addresses) {
            Ok(parts) => {
                // A predecessor may have been killed between answering and calling.
                notify::call(&parts.call);
                self.worker(index).start(parts);
                self.vrings[index].running = true;
                tracing::debug!(queue = index, "queue started");
            }
            Err(error) => {
                tracing::warn!(queue = index, %error, "queue not started");
                if let Some(err) = &self.vrings[index].err {
                    notify::call_once(err);
                }
            }
        }
    }

    fn assemble(&mut self, index: usize, addresses: RingAddresses) -> Result<QueueParts, StartError> {
        let call = self.notifier(index)?;
        let vring = &self.vrings[index];
        let has = |bit: u32| self.features & (1 << bit) != 0;
        let layout = RingLayout {
            size: vring.size,
            descriptors: addresses.descriptors,
            available: addresses.available,
            used: addresses.used,
            event_idx: has(VIRTIO_RING_F_EVENT_IDX),
            indirect: has(VIRTIO_RING_F_INDIRECT_DESC),
        };
        let kick = match &vring.kick {
            Kick::Event(fd) => Some(Arc::clone(fd)),
            Kick::Polled | Kick::Unset => None,
        };
        let region = self.inflight.clone();
        let inflight =
            region.map(|region| InflightQueue::new(region, index as u16, vring.size)).transpose()?;
        let mut ring = Ring::new(layout, Arc::clone(&self.memory), inflight, vring.next_available)?;
        if let Some(log) = self.dirty.as_ref().filter(|_| self.logs_everything()) {
            ring.log_to(Logging::new(Arc::clone(log), addresses.used_logged_at));
        }
        Ok(QueueParts {
            index: index as u16,
            ring,
            ring_size: vring.size,
            kick,
            call,
            err: vring.err.clone(),
            features: self.features,
        })
    }

    /// A memory table with one more region.
    fn with_region(
        &self,
        memory: &GuestMemory,
        info: RegionInfo,
        file: File,
    ) -> Result<GuestMemory, MemoryError> {
        let file = if self.any_memory { Ok(SharedFile::trusted(file)) } else { SharedFile::new(file) };
        let file = file.map_err(|source| MemoryError::File { guest: info.guest, source })?;
        memory.with_region(info, file)
    }

    /// What signals the driver of queue `index`.
    fn notifier(&mut self, index: usize) -> std::io::Result<Arc<EventNotifier>> {
        let call = &mut self.vrings[index].call;
        let notifier = call.take().map_or_else(|| EventNotifier::new().map(Arc::new), Ok)?;
        Ok(Arc::clone(call.insert(notifier)))
    }

    /// Stops queue `index`, changes it, and starts it again if it is complete.
    fn change(&mut self, index: usize, change: impl FnOnce(&mut Vring)) {
        self.stop(index);
        change(&mut self.vrings[index]);
        self.start(index);
    }

    /// Stops all queues, changes what they share, and starts again those that are complete.
    fn change_all(&mut self, change: impl FnOnce(&mut Self)) {
        self.stop_all();
        change(self);
        for index in 0..self.vrings.len() {
            self.start(index);
        }
    }

    /// Whether the frontend wants to know what is written.
    fn logs_everything(&self) -> bool {
        self.features & VhostUserVirtioFeatures::LOG_ALL.bits() != 0
    }

    fn forget_driver(&mut self) {
        self.stop_all();
        self.device.reset();
        self.features = 0;
        self.inflight = None;
        self.dirty = None;
        self.vrings.iter_mut().for_each(|vring| *vring = Vring::default());
    }
}

impl Drop for Backend {
    fn drop(&mut self) {
        self.stop_all();
    }
}
