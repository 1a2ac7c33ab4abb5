//! What a tier refuses, or could not do.

use std::path::PathBuf;

use thiserror::Error;
use vmstrata_repo::ObjectName;

use crate::head::Head;

/// Shorthand for results of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// See the module documentation.
#[derive(Debug, Error)]
pub enum Error {
    /// The repository did not do it, or did and could not say so.
    #[error(transparent)]
    Repository(#[from] vmstrata_repo::Error),
    /// The disk could not be read.
    #[error(transparent)]
    Disk(#[from] vmstrata_disk::Error),
    /// A layer that would be as large as it likes.
    #[error("{}: its L1 table names more L2 tables than the file has clusters", layer.display())]
    SharedTables {
        /// The layer.
        layer: PathBuf,
    },
    /// More than can be shipped as one layer.
    #[error("the state has data in more than {clusters} clusters")]
    TooLarge {
        /// The most there can be.
        clusters: usize,
    },
    /// A head that is not what a process published.
    #[error("{repository}: {name} is damaged: {why}")]
    BadHead {
        /// The repository.
        repository: String,
        /// The head.
        name: ObjectName,
        /// What is wrong with it.
        why: String,
    },
    /// The repository holds other bytes than were written.
    #[error("{repository}: {name} reads back otherwise than it was written")]
    Corrupt {
        /// The repository.
        repository: String,
        /// The object, which nothing names.
        name: ObjectName,
    },
    /// A repository without heads.
    #[error("{repository}: no disk is published here")]
    NoHead {
        /// The repository.
        repository: String,
    },
    /// Another copy of the disk publishes here.
    #[error("{repository}: copy {} of the disk publishes here since generation {}; see {}", by.owner, by.generation, by.number)]
    Fenced {
        /// The repository.
        repository: String,
        /// What it published.
        by: Box<Head>,
    },
}
