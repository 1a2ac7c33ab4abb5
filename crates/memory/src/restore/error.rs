//! Why a guest was not brought back.

use std::io;

use crate::address::Frame;
use crate::qmp::QmpError;
use crate::vault::VaultError;

/// Why a guest does not run again.
#[derive(Debug, thiserror::Error)]
pub enum RestoreError {
    /// QEMU refused, or is gone.
    #[error(transparent)]
    Qmp(#[from] QmpError),
    /// The machine is another one than the guest had.
    #[error("the guest had machine type {had}, and this QEMU has {has}: start it with -machine {had}")]
    Kind {
        /// The type at capture.
        had: String,
        /// The type of the machine that was started.
        has: String,
    },
    /// QEMU did not take the devices.
    #[error(
        "QEMU cannot load the guest's devices: {words} (its options must be those the guest was started with)"
    )]
    Incoming {
        /// QEMU's words.
        words: String,
    },
    /// The snapshot cannot be read.
    #[error(transparent)]
    Vault(#[from] VaultError),
    /// A page of clean cache is lost, and how to tell the guest is not known.
    #[error("{frame} of clean cache is lost, and nothing recorded hides it from the guest")]
    Unhidden {
        /// The page.
        frame: Frame,
    },
    /// A file of the memory cannot be written.
    #[error("the guest's memory cannot be written")]
    Memory(#[from] io::Error),
    /// The snapshot was taken by something else, or by a version to come.
    #[error("the snapshot does not say how its guest is started: {what}")]
    Captured {
        /// What is lacking or wrong.
        what: String,
    },
}
