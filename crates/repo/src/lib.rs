//! Repositories: immutable objects in a directory or in HDFS.
//!
//! | module | what it knows |
//! |---|---|
//! | [`repository`] | what every kind of repository does |
//! | [`name`] | names of objects |
//! | [`error`] | what a repository did not do, with which object |
//! | [`address`] | where a repository is, as people write it |
//! | [`directory`] | a directory of this host |
//! | `hdfs` | a directory of HDFS |

mod address;
mod directory;
mod error;
#[cfg(feature = "hdfs")]
mod hdfs;
mod name;
mod repository;

pub use address::RepositoryAddress;
pub use directory::DirectoryRepository;
pub use error::{Error, Result};
#[cfg(feature = "hdfs")]
pub use hdfs::HdfsRepository;
pub use name::{NameRule, ObjectName, draw_id};
pub use repository::{DeviceId, Held, Hold, NewObject, ObjectInfo, ObjectReader, Repository, Swept};
