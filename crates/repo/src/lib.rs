//! Repositories: immutable objects in a directory, in HDFS or in an object store.
//!
//! | kind | new objects | rename | copies | free space | holds |
//! |---|---|---|---|---|---|
//! | directory, local or mounted | `link(2)` decides | yes | 1 | of the file system | `flock` |
//! | HDFS | a rename that replaces nothing | no | up to 16, in blocks of a size of choice | of the quota | leases |
//! | S3 | a condition of the request | no | 1, which the store keeps safe | not told | objects that are renewed |
//!
//! | module | what it knows |
//! |---|---|
//! | `repository` | what every kind of repository does |
//! | `name` | names of objects |
//! | `error` | what a repository did not do, with which object |
//! | `holds` | who in this process holds a repository |
//! | `address` | where a repository is, as people write it |
//! | `directory` | a directory of this host |
//! | `hdfs` | a directory of HDFS |
//! | `s3` | a part of a bucket of an object store |

mod address;
mod directory;
mod error;
#[cfg(feature = "hdfs")]
mod hdfs;
#[cfg(any(feature = "hdfs", feature = "s3"))]
mod holds;
mod name;
mod repository;
#[cfg(feature = "s3")]
mod s3;

use std::io;
use std::sync::Arc;

pub use address::{Address, HdfsAddress, S3Address};
pub use directory::DirectoryRepository;
pub use error::{Error, Result};
pub use name::{NameRule, ObjectName, draw_id};
pub use repository::{
    Capabilities, DeviceId, Held, Hold, NewObject, ObjectInfo, ObjectReader, Repository, Swept,
};

impl Address {
    /// The repository there, of objects with these names.
    ///
    /// # Errors
    /// When there is no such directory, or it cannot be reached.
    pub fn open(self, names: NameRule) -> Result<Arc<dyn Repository>> {
        match self {
            Self::Directory(path) => match DirectoryRepository::open(&path, names) {
                Err(error) if error.kind() == io::ErrorKind::NotFound => {
                    let remedy = format!("no such directory; `mkdir -m 700 {}` makes it", path.display());
                    Err(Error { source: io::Error::new(error.kind(), remedy), ..error })
                }
                opened => Ok(Arc::new(opened?)),
            },
            #[cfg(feature = "hdfs")]
            Self::Hdfs(address) => Ok(Arc::new(hdfs::HdfsRepository::open(address, names)?)),
            #[cfg(not(feature = "hdfs"))]
            Self::Hdfs(address) => Err(left_out(address, "HDFS")),
            #[cfg(feature = "s3")]
            Self::S3(address) => Ok(Arc::new(s3::S3Repository::open(address, names)?)),
            #[cfg(not(feature = "s3"))]
            Self::S3(address) => Err(left_out(address, "S3")),
        }
    }
}

#[cfg(not(all(feature = "hdfs", feature = "s3")))]
fn left_out(address: impl std::fmt::Display, what: &str) -> Error {
    let told = io::Error::new(io::ErrorKind::Unsupported, format!("built without {what}"));
    Error::of(address, "opening")(told)
}
