//! Where a repository is, as people write it.

use std::fmt;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;

use crate::directory::DirectoryRepository;
use crate::error::{Error, Result};
use crate::name::NameRule;
use crate::repository::Repository;

const HDFS: &str = "hdfs://";

/// Where a repository is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RepositoryAddress {
    /// A directory of this host.
    Directory(PathBuf),
    /// A directory of HDFS: `hdfs://NAMENODE[:PORT]/DIR[?block=SIZE]`.
    Hdfs(String),
}

impl RepositoryAddress {
    /// The addresses in a text that has `:` between them, as search paths have.
    pub fn parse_list(text: &str) -> Vec<Self> {
        let mut addresses = Vec::new();
        let mut rest = Some(text);
        while let Some(text) = rest {
            // In an address of HDFS a port may come before the directory.
            let before = match text.strip_prefix(HDFS) {
                Some(after) => HDFS.len() + after.find('/').unwrap_or(after.len()),
                None => 0,
            };
            let end = text[before..].find(':').map_or(text.len(), |at| before + at);
            let (address, after) = text.split_at(end);
            if !address.is_empty() {
                addresses.push(Self::parse(address));
            }
            rest = after.strip_prefix(':');
        }
        addresses
    }

    fn parse(text: &str) -> Self {
        if text.starts_with(HDFS) { Self::Hdfs(text.to_owned()) } else { Self::Directory(text.into()) }
    }

    /// The repository there, of objects with these names.
    ///
    /// # Errors
    /// When there is no such directory, or it cannot be reached.
    pub fn open(&self, names: NameRule) -> Result<Arc<dyn Repository>> {
        match self {
            Self::Directory(path) => match DirectoryRepository::open(path, names) {
                Err(error) if error.kind() == io::ErrorKind::NotFound => {
                    let remedy = format!("no such directory; `mkdir -m 700 {}` makes it", path.display());
                    Err(Error { source: io::Error::new(error.kind(), remedy), ..error })
                }
                opened => Ok(Arc::new(opened?)),
            },
            #[cfg(feature = "hdfs")]
            Self::Hdfs(address) => Ok(Arc::new(crate::hdfs::HdfsRepository::open(address, names)?)),
            #[cfg(not(feature = "hdfs"))]
            Self::Hdfs(_) => Err(Error::of(self, "opening")(io::Error::new(
                io::ErrorKind::Unsupported,
                "built without HDFS",
            ))),
        }
    }
}

impl fmt::Display for RepositoryAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Directory(path) => path.display().fmt(f),
            Self::Hdfs(address) => f.write_str(address),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn list(text: &str) -> Vec<String> {
        RepositoryAddress::parse_list(text).iter().map(ToString::to_string).collect()
    }

    #[test]
    fn colons_part_addresses_and_not_ports() {
        assert_eq!(list("/srv/a"), ["/srv/a"]);
        assert_eq!(list("/srv/a:b::/srv/c:"), ["/srv/a", "b", "/srv/c"]);
        assert_eq!(list("hdfs://nn:8020/v"), ["hdfs://nn:8020/v"]);
        let mixed = "/srv/a:hdfs://nn:8020/v?block=1M:hdfs://cluster/w:/srv/b";
        assert_eq!(list(mixed), ["/srv/a", "hdfs://nn:8020/v?block=1M", "hdfs://cluster/w", "/srv/b"]);
        assert_eq!(list("hdfs://nn:8020"), ["hdfs://nn:8020"]);
        assert_eq!(list(""), [""; 0]);
    }

    #[test]
    fn only_hdfs_is_no_directory() {
        assert!(matches!(RepositoryAddress::parse_list("hdfs://nn/v")[..], [RepositoryAddress::Hdfs(_)]));
        assert!(matches!(RepositoryAddress::parse_list("hdfs")[..], [RepositoryAddress::Directory(_)]));
    }
}
