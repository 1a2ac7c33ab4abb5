//! Why a file stays.

use std::path::PathBuf;

/// Why a file was not removed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Kept {
    /// It was not asked for.
    #[error("it was to be kept")]
    Asked,
    /// Not a snapshot of this disk.
    #[error("it is not a snapshot that was taken of this disk")]
    NotASnapshot,
    /// There is more in the file than the layer.
    #[error("the layer is only a part of it")]
    Part,
    /// Of a tiered disk.
    #[error("it is a published layer of a tiered disk, whose server deletes it once no pin needs it")]
    Published,
    /// In a directory that is not the disk's.
    #[error(
        "it is in another directory, where unknown disks may stand on it: --remove everywhere removes it, too"
    )]
    Elsewhere,
    /// An image stands on it.
    #[error("{} stands on it", by.display())]
    Needed {
        /// The image.
        by: PathBuf,
    },
    /// A disk told that it stands on it, and is not where it was.
    #[error(
        "{} was made on it and is not there now: if it was deleted, and not moved, delete again with --forget-missing",
        by.display()
    )]
    Missing {
        /// The disk.
        by: PathBuf,
    },
    /// Someone has it open.
    #[error("it is in use")]
    InUse,
    /// An image that may need it cannot be read.
    #[error("{} may stand on it, and cannot be read: {reason}", path.display())]
    Unread {
        /// The image, or a directory of images.
        path: PathBuf,
        /// What was wrong.
        reason: String,
    },
    /// It is held.
    #[error("it is held ({tag}): vmstrata snapshot release")]
    Held {
        /// The tag of one of its holds.
        tag: String,
    },
    /// Nothing records that it was dropped.
    #[error("nothing records that it was a snapshot of this disk: it may be a disk of its own")]
    Unrecorded,
    /// Another file has its name now, or a link does.
    #[error("its path leads elsewhere")]
    Replaced,
    /// The host refused.
    #[error("it cannot be removed: {reason}")]
    Failed {
        /// What the host said.
        reason: String,
    },
}

impl Kept {
    /// Whether the file may be removed later.
    pub(crate) fn may_end(&self) -> bool {
        !matches!(
            self,
            Self::Asked
                | Self::NotASnapshot
                | Self::Part
                | Self::Published
                | Self::Elsewhere
                | Self::Replaced
                | Self::Unrecorded
        )
    }
}
