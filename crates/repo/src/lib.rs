//! Repositories: immutable objects in a directory or in HDFS.
//!
//! | kind | new objects | rename | copies | free space | holds |
//! |---|---|---|---|---|---|
//! | directory, local or mounted | `link(2)` decides | yes | 1 | of the file system | `flock` |
//! | HDFS | a rename that replaces nothing | no | up to 16, in blocks of a size of choice | of the quota | leases |
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
pub use repository::{
    Capabilities, DeviceId, Held, Hold, NewObject, ObjectInfo, ObjectReader, Repository, Swept,
};
