//! The store of snapshots: several copies of what a guest cannot live without, one or none of what it can read again.
//!
//! ```text
//!   capture ──► Writer ──► extents: hashed, found again or compressed ──► k repositories: ID.critical, ID.clean
//!                                                                                 then ID.snapshot: there it is
//!   restore ◄── Snapshot: whichever copy is whole ◄──────────────────────
//! ```
//!
//! Objects lie in repositories ([`vmstrata_repo`]).
//!
//! | module | what it knows |
//! |---|---|
//! | `metadata`, `info` | the object that makes a snapshot |
//! | `tables`, `pages`, `hiding`, `refill` | what it says of the guest's pages, as pages of its own |
//! | `object`, `extent` | objects of pages, and the compressed pieces that they are made of |
//! | `writer`, `known` | writing a snapshot; finding pages that are in the store already |
//! | `snapshot`, `sources` | reading one, by page or all at once, from whichever copies are whole |
//! | `copies` | an object with all its copies open, which need not lie alike |
//! | `collect` | deleting, and removing what is not needed |
//! | `live`, `compact`, `rewrite` | which pages are needed, and giving back the others |
//! | `users` | which snapshots use an object |
//! | `verify`, `repair` | reading every byte of every copy; making copies again from those that are whole |
//!
//! What is written is specified in `docs/format-memory.md`.
//!
//! Invariants: a snapshot is listed only when all it needs is on stable storage. In every repository, what a snapshot listed
//! there counts on in that repository lies there too, so that each repository can be understood and collected by itself. A
//! critical page is never kept in fewer copies than its snapshot asks for because another page is the same.
//!
//! Lock order: repositories in the order they were named, each with one lock; inside a writer, a shard of what is known, then
//! an object's output.

mod bytes;
mod collect;
mod compact;
mod copies;
mod error;
mod extent;
mod hiding;
mod info;
mod known;
mod live;
mod metadata;
mod name;
mod object;
mod pages;
mod place;
mod policy;
mod refill;
mod repair;
mod rewrite;
mod snapshot;
mod sources;
mod stats;
mod survey;
mod tables;
mod users;
mod verify;
mod writer;

use std::path::PathBuf;
use std::sync::Arc;

use vmstrata_repo::{Address, Held, Hold, Repository};

pub use collect::{Collectable, Collected, Deleted};
pub use compact::Compact;
pub use error::{Result, VaultError};
pub use info::{DiskState, Info, ObjectUse};
pub use name::{ObjectId, ObjectKind, SnapshotId};
pub use policy::{OneDevice, Policy};
pub use refill::{DiskPiece, DiskPieces, Refill};
pub use repair::Repaired;
pub use snapshot::{Order, Page, Snapshot, Want};
pub use stats::{Savings, Stats};
pub use survey::Listed;
pub use users::UsedObject;
pub use verify::Health;
pub use writer::{Closing, NewSnapshot, Saved, Writer};

use survey::Survey;

/// Which snapshot is meant.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Which {
    /// The one with this id.
    Id(SnapshotId),
    /// The one of this guest with this name.
    Named {
        /// The guest.
        guest: String,
        /// The snapshot's name.
        name: String,
    },
    /// The guest's newest.
    Newest(String),
}

impl std::str::FromStr for Which {
    type Err = VaultError;

    /// `GUEST@NAME`, an id, or `GUEST` for its newest.
    fn from_str(text: &str) -> Result<Self> {
        if let Ok(id) = text.parse() {
            return Ok(Self::Id(id));
        }
        let Some((guest, name)) = text.split_once('@') else {
            name::check_name(text)?;
            return Ok(Self::Newest(text.to_owned()));
        };
        name::check_name(guest)?;
        name::check_name(name)?;
        Ok(Self::Named { guest: guest.to_owned(), name: name.to_owned() })
    }
}

impl std::fmt::Display for Which {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Id(id) => id.fmt(f),
            Self::Named { guest, name } => write!(f, "{guest}@{name}"),
            Self::Newest(guest) => write!(f, "of {guest}"),
        }
    }
}

/// A store of snapshots in one or more repositories.
#[derive(Debug)]
pub struct Vault {
    repositories: Vec<Arc<dyn Repository>>,
    /// Repositories that could not be opened, with why.
    missing: Vec<String>,
}

impl Vault {
    /// The store in these repositories.
    pub fn open(repositories: Vec<Arc<dyn Repository>>) -> Arc<Self> {
        Arc::new(Self { repositories, missing: Vec::new() })
    }

    /// The store in these directories, as [`Vault::open_at`] opens it.
    ///
    /// # Errors
    /// As there.
    pub fn open_directories(paths: &[PathBuf]) -> Result<Arc<Self>> {
        let open = |path: &PathBuf| Address::Directory(path.clone()).open(ObjectId::is_name);
        Self::of_those_that_open(paths.iter().map(open))
    }

    /// The store in the repositories with these addresses. One that cannot be opened is left out and named by
    /// [`Vault::missing`]: reading goes on without it, deleting does not.
    ///
    /// # Errors
    /// [`VaultError::Repository`] when none can be opened.
    pub fn open_at(addresses: &[String]) -> Result<Arc<Self>> {
        Self::of_those_that_open(addresses.iter().map(|text| Address::parse(text)?.open(ObjectId::is_name)))
    }

    fn of_those_that_open(
        opened: impl Iterator<Item = vmstrata_repo::Result<Arc<dyn Repository>>>,
    ) -> Result<Arc<Self>> {
        let mut vault = Self { repositories: Vec::new(), missing: Vec::new() };
        let mut first = None;
        for opened in opened {
            match opened {
                Ok(repository) => vault.repositories.push(repository),
                Err(error) => {
                    vault.missing.push(format!("{}: {}", error.repository, error.source));
                    first.get_or_insert(error);
                }
            }
        }
        match first {
            Some(error) if vault.repositories.is_empty() => Err(error.into()),
            _ => Ok(Arc::new(vault)),
        }
    }

    /// Repositories that could not be opened, each with the reason.
    pub fn missing(&self) -> &[String] {
        &self.missing
    }

    /// Begins a snapshot. To be called before the guest is paused: this reads what is known of older snapshots.
    ///
    /// # Errors
    /// When there are too few repositories or devices for the copies asked for, the name is taken, or a repository fails.
    pub fn begin(self: &Arc<Self>, new: NewSnapshot) -> Result<Writer> {
        Writer::begin(self, new)
    }

    /// All snapshots, newest first.
    ///
    /// # Errors
    /// When no repository can be read.
    pub fn list(&self) -> Result<Vec<Listed>> {
        Ok(Survey::take(self)?.snapshots(self))
    }

    /// Opens a snapshot for reading.
    ///
    /// # Errors
    /// [`VaultError::NotFound`], [`VaultError::Ambiguous`]; [`VaultError::MetadataLost`] when no copy of what is known of it
    /// can be read, [`VaultError::Unreadable`] when it is not named by its id and may be one of those.
    pub fn snapshot(&self, which: &Which) -> Result<Snapshot> {
        // Held before it is looked for, so that what is found is not collected.
        let held = self.hold_to_read();
        let survey = Survey::take(self)?;
        let id = self.find(which, &survey)?;
        Snapshot::open(self, id, &survey, held)
    }

    /// The id of the snapshot that is meant.
    ///
    /// # Errors
    /// As [`Vault::snapshot`].
    pub fn find_id(&self, which: &Which) -> Result<SnapshotId> {
        self.find(which, &Survey::take(self)?)
    }

    fn find(&self, which: &Which, survey: &Survey) -> Result<SnapshotId> {
        let listed = match which {
            Which::Id(id) if survey.has_snapshot(*id) => return Ok(*id),
            Which::Id(_) => return Err(VaultError::NotFound(which.to_string())),
            Which::Named { .. } | Which::Newest(_) => survey.snapshots(self),
        };
        let is_meant = |info: &Info| match which {
            Which::Named { guest, name } => info.guest == *guest && info.name == *name,
            Which::Newest(guest) => info.guest == *guest,
            Which::Id(_) => unreachable!("returned above"),
        };
        let is_newest = matches!(which, Which::Newest(_));
        let known = listed.iter().filter_map(|listed| listed.info.as_ref().ok());
        let found: Vec<SnapshotId> = known.filter(|info| is_meant(info)).map(|info| info.id).collect();
        // Any of which nothing is known may be the one, or a newer one of the guest: ids begin with the time.
        let lost = listed.iter().filter(|listed| listed.info.is_err()).map(|listed| listed.id);
        let may_be = |id: &SnapshotId| found.first().is_none_or(|found| is_newest && id > found);
        let lost: Vec<SnapshotId> = lost.filter(may_be).collect();
        match found[..] {
            _ if !lost.is_empty() => Err(VaultError::Unreadable { which: which.to_string(), lost }),
            [] => Err(VaultError::NotFound(which.to_string())),
            [_, _, ..] if !is_newest => Err(VaultError::Ambiguous(which.to_string())),
            [id, ..] => Ok(id),
        }
    }

    /// Holds all repositories in one way; `None` only for [`Hold::AloneOrNot`].
    fn hold(&self, how: Hold) -> Result<Option<Vec<Held>>> {
        let mut held = Vec::with_capacity(self.repositories.len());
        for repository in &self.repositories {
            match repository.hold(how)? {
                Some(lock) => held.push(lock),
                None => return Ok(None),
            }
        }
        Ok(Some(held))
    }

    /// Holds the repositories that can be held: one that fails must not keep others from being read.
    fn hold_to_read(&self) -> Vec<Held> {
        let hold = |repository: &Arc<dyn Repository>| match repository.hold(Hold::Read) {
            Ok(held) => held,
            Err(error) => {
                tracing::warn!("{}: read without being held: {}", error.repository, error.source);
                None
            }
        };
        self.repositories.iter().filter_map(hold).collect()
    }

    fn repository(&self, index: usize) -> &dyn Repository {
        self.repositories[index].as_ref()
    }
}
