//! Repositories: immutable objects in a directory or in HDFS.
//!
//! | kind | new objects | rename | copies | free space | holds |
//! |---|---|---|---|---|---|
//! | directory, local or mounted | `link(2)` decides | yes | 1 | of the file system | `flock` |
//! | HDFS | a rename that replaces nothing | no | up to 16, in blocks of a size of choice | of the quota | leases |
//!
//! | module | what it knows |
//! |---|---|
//! | `repository` | what every kind of repository does |
//! | `name` | names of objects |
//! | `error` | what a repository did not do, with which object |
//! | `address` | where a repository is, as people write it |
//! | `directory` | a directory of this host |
//! | `hdfs` | a directory of HDFS |

mod address;
mod directory;
mod error;
#[cfg(feature = "hdfs")]
mod hdfs;
mod name;
mod repository;

use std::io;
use std::sync::Arc;

pub use address::{Address, HdfsAddress};
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
            Self::Hdfs(address) => {
                let told = io::Error::new(io::ErrorKind::Unsupported, "built without HDFS");
                Err(Error::of(address, "opening")(told))
            }
        }
    }
}
