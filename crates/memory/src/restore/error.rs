//! Why a guest was not brought back, and what can be instead.

use std::io;

use crate::address::Frame;
use crate::qmp::QmpError;
use crate::vault::{Info, Vault, VaultError, Which};

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
    /// The host has no more threads for this process.
    #[error("starting a thread")]
    Thread(#[source] io::Error),
    /// The snapshot cannot be restored, and what can be instead was looked for.
    #[error("{lost}; {}", instead(older.as_deref()))]
    Lost {
        /// Why it cannot.
        lost: Box<RestoreError>,
        /// The newest older snapshot of the guest that is whole.
        older: Option<Box<Info>>,
    },
    /// The snapshot was taken by something else, or by a version to come.
    #[error("the snapshot does not say how its guest is started: {what}")]
    Captured {
        /// What is lacking or wrong.
        what: String,
    },
}

fn instead(older: Option<&Info>) -> String {
    match older {
        Some(info) => format!("the newest older snapshot that is whole is {} ({})", info.title(), info.id),
        None => "no older snapshot of the guest is whole".to_owned(),
    }
}

impl RestoreError {
    /// Whether the vault has lost what the guest needs.
    pub fn is_loss(&self) -> bool {
        matches!(
            self,
            Self::Unhidden { .. }
                | Self::Vault(
                    VaultError::PageLost { .. }
                        | VaultError::MetadataLost { .. }
                        | VaultError::Unreadable { .. }
                )
        )
    }

    /// For a loss, looks for what can be restored instead of the snapshot meant: all of older ones is read for that.
    #[must_use]
    pub fn with_older(self, vault: &Vault, which: &Which) -> Self {
        if !self.is_loss() {
            return self;
        }
        match vault.newest_whole_before(which) {
            Ok(older) => Self::Lost { lost: Box::new(self), older: older.map(Box::new) },
            // That repositories cannot be read is no news.
            Err(_) => self,
        }
    }
}
