//! Why a guest was not captured. It runs on whatever the reason.

use std::io;

use super::machine::MachineError;
use super::stream::StreamError;
use crate::BoxError;
use crate::qmp::QmpError;
use crate::ram::RamError;

/// Why no snapshot was taken.
#[derive(Debug, thiserror::Error)]
pub enum CaptureError {
    /// QEMU refused, or is gone.
    #[error(transparent)]
    Qmp(#[from] QmpError),
    /// The guest's memory cannot be had.
    #[error(transparent)]
    Machine(#[from] MachineError),
    /// Its bytes could not be read.
    #[error(transparent)]
    Ram(#[from] RamError),
    /// The guest is in the middle of something else.
    #[error("the guest is in state '{status}': a snapshot can be taken of one that runs or is paused")]
    Status {
        /// QEMU's name of the state.
        status: String,
    },
    /// QEMU saves the state of a guest that is held only once.
    #[error(
        "the guest's state was saved or migrated as it is, and QEMU does not save it again before it has run: if it runs \
         nowhere else, let it go on (`cont` in its monitor, `virsh resume`)"
    )]
    Saved,
    /// QEMU could not save its devices.
    #[error("QEMU cannot save the guest's devices: {words}")]
    Migration {
        /// QEMU's words.
        words: String,
    },
    /// The devices' state did not come to an end in time, or has more bytes than any.
    #[error("the state of the guest's devices is {what}")]
    State {
        /// What is wrong with it.
        what: &'static str,
    },
    /// The disks could not be snapshotted.
    #[error("the guest's disks could not be snapshotted")]
    Disks(#[source] BoxError),
    /// The pages could not be stored.
    #[error("the guest's memory could not be stored")]
    Store(#[source] BoxError),
    /// There is not enough memory on the host for a copy of the guest's.
    #[error(
        "the host has no {bytes} bytes of memory for a copy of the guest's: --mode stop needs none, for a longer pause"
    )]
    Memory {
        /// The bytes wanted.
        bytes: u64,
    },
    /// The guest cannot be copied while it runs.
    #[error("the guest cannot be captured while it runs on: {why}; --mode copy does not need that")]
    Live {
        /// What stands against it.
        why: String,
    },
    /// QEMU's stream of memory and devices is not as it should be.
    #[error("the guest's memory could not be read")]
    Stream(#[source] StreamError),
    /// The host has no more threads for this process.
    #[error("starting a thread")]
    Thread(#[source] io::Error),
    /// The caller gave up.
    #[error("cancelled")]
    Cancelled,
}
