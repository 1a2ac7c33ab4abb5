//! Repositories that are no directory of this host: where they are, as people write it, and how a host reaches one.

use std::fmt;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use vmstrata_repo::{Address, Error, Repository, Result};

use crate::cache::Cache;
use crate::cached_files::CachedFiles;
use crate::error::Error as TierError;
use crate::group::NAME_BYTES_MAX;
use crate::head::{DiskState, Object, is_object_name};
use crate::remote::{OnMissing, Remote};

/// Bytes that are copied at a time.
const PIECE: usize = 1 << 20;
/// Bytes of the blocks of layers unless the address says it: HDFS allows a file 10,000 of them.
const BLOCK_BYTES: u64 = 128 << 20;

/// Where a repository is that is no directory of this host: `hdfs://NAMENODE[:PORT]/DIR[?block=SIZE]` or `s3://BUCKET[/PREFIX]`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RepositoryAddress {
    /// As it was written.
    text: String,
    address: Address,
}

impl RepositoryAddress {
    /// The address that people write as `text`. What follows a `#` names [a disk](DiskAddress), and no directory.
    ///
    /// # Errors
    /// `InvalidInput`: a directory, or what is none of the addresses there are.
    pub fn parse(text: &str) -> Result<Self> {
        if text.contains('#') {
            let why = "the directory of a repository has no # in its name";
            return Err(Error::of(text, "parsing")(io::Error::new(io::ErrorKind::InvalidInput, why)));
        }
        let mut address = Address::parse(text)?;
        match &mut address {
            Address::Hdfs(hdfs) if !text.contains('?') => hdfs.block_bytes = BLOCK_BYTES,
            Address::Hdfs(_) | Address::S3(_) => {}
            Address::Directory(_) => {
                let why = "the repository of a disk in a directory lies beside the disk";
                return Err(Error::of(text, "parsing")(io::Error::new(io::ErrorKind::InvalidInput, why)));
            }
        }
        Ok(Self { text: text.to_owned(), address })
    }

    /// The place alone, which is the same for all addresses of a repository: as it describes itself.
    pub fn place(&self) -> String {
        match &self.address {
            Address::Hdfs(hdfs) => hdfs.to_string(),
            Address::S3(s3) => s3.to_string(),
            Address::Directory(path) => path.display().to_string(),
        }
    }

    /// The repository there.
    ///
    /// # Errors
    /// `NotFound` without that directory; one that cannot be reached; `Unsupported` by a build without this kind.
    pub fn open(&self) -> Result<Arc<dyn Repository>> {
        self.address.clone().open(is_object_name)
    }
}

impl fmt::Display for RepositoryAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

/// Where a disk is: the address of its repository, and `#DISK` for one of a group, by its name in epochs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DiskAddress {
    /// Its repository.
    pub repository: RepositoryAddress,
    /// Which disk there; `None` for the only one, or all.
    pub disk: Option<String>,
}

impl DiskAddress {
    /// Whether `text` is one, rightly or not, and no file of this host.
    pub fn is_address(text: &str) -> bool {
        Address::is_elsewhere(text)
    }

    /// The address that people write as `text`.
    ///
    /// # Errors
    /// As [`RepositoryAddress::parse`].
    pub fn parse(text: &str) -> Result<Self> {
        let (repository, disk) = match text.split_once('#') {
            Some((repository, disk)) => (repository, Some(disk.to_owned())),
            None => (text, None),
        };
        Ok(Self { repository: RepositoryAddress::parse(repository)?, disk })
    }
}

/// A repository that is no directory of this host.
#[derive(Clone, Debug)]
pub struct Elsewhere {
    /// Its layers, by way of this host's cache.
    pub remote: Arc<Remote>,
    /// What opens files for the disk's resources.
    pub files: Arc<CachedFiles>,
}

impl Elsewhere {
    /// A repository whose layers are read through a cache.
    pub fn new(
        repository: Arc<dyn Repository>,
        cache: &Arc<Cache>,
        files: Arc<CachedFiles>,
        on_missing: OnMissing,
    ) -> Self {
        Self { remote: Remote::new(cache, repository, on_missing), files }
    }

    /// What people call the repository.
    pub(crate) fn name(&self) -> String {
        self.remote.repository().describe()
    }

    /// What its disk or group is called on this host: as its last directory, with letters that any file system and group takes.
    pub(crate) fn disk_name(&self) -> String {
        last_directory(&self.name())
    }
}

/// The last directory of a repository's name, with letters that any file system and group takes.
pub(crate) fn last_directory(repository: &str) -> String {
    let place = repository.split('?').next().unwrap_or_default();
    let last = place.trim_end_matches('/').rsplit('/').next().unwrap_or_default();
    let is_plain = |at, c: char| c.is_ascii_alphanumeric() || "_-".contains(c) || at > 0 && c == '.';
    let plain = |(at, c)| if is_plain(at, c) { c } else { '_' };
    last.chars().take(NAME_BYTES_MAX).enumerate().map(plain).collect()
}

/// Copies the layers of a disk that are not there yet into a directory of this host, as files that stock tools open, each proved by its
/// digest. Returns the newest.
///
/// # Errors
/// What repository or host report; [`Error::Corrupt`](crate::Error::Corrupt).
pub fn fetch(repository: &dyn Repository, state: &DiskState, dir: &Path) -> crate::Result<PathBuf> {
    let path = |object: &Object| dir.join(object.id.layer_name().as_str());
    for object in &state.objects {
        let path = path(object);
        match File::create_new(&path) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => continue,
            file => {
                fetch_layer(repository, object, (&path, &file.map_err(TierError::of_file(&path, "make"))?))?
            }
        }
    }
    Ok(dir.join(state.newest().layer_name().as_str()))
}

fn fetch_layer(
    repository: &dyn Repository,
    object: &Object,
    (path, file): (&Path, &File),
) -> crate::Result<()> {
    let name = object.id.layer_name();
    let reader = repository.open(&name)?;
    let (mut hasher, mut piece) = (blake3::Hasher::new(), vec![0; PIECE]);
    for at in (0..reader.len()).step_by(PIECE) {
        let piece = &mut piece[..(reader.len() - at).min(PIECE as u64) as usize];
        reader.read_at(at, piece)?;
        hasher.update(piece);
        if piece.iter().any(|byte| *byte != 0) {
            file.write_all_at(piece, at).map_err(TierError::of_file(path, "write"))?;
        }
    }
    file.set_len(reader.len()).map_err(TierError::of_file(path, "write"))?;
    if hasher.finalize() != object.blake3 {
        return Err(TierError::Corrupt { repository: repository.describe(), name });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_is_no_directory_and_has_large_blocks_unless_it_says_otherwise() {
        let block = |text: &str| match RepositoryAddress::parse(text).unwrap() {
            RepositoryAddress { text: shown, address: Address::Hdfs(hdfs) } => {
                assert_eq!(shown, text);
                hdfs.block_bytes >> 20
            }
            other => panic!("{other:?}"),
        };
        assert_eq!(block("hdfs://namenode:8020/vms/web"), 128);
        assert_eq!(block("hdfs://namenode:8020/vms/web?block=1M"), 1);
        for wrong in ["/mnt/nas", "vms", "s3://bucket?x", "hdfs://namenode", "", "hdfs://namenode/vms#web"] {
            let error = RepositoryAddress::parse(wrong).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::InvalidInput, "{wrong}");
        }
    }
    #[test]
    fn a_disk_is_named_behind_the_address_of_its_repository() {
        let parsed = |text: &str| DiskAddress::parse(text).unwrap();
        let with = parsed("hdfs://namenode/vms/guest/?block=1M#data#2@x.qcow2");
        assert_eq!(with.disk.as_deref(), Some("data#2@x.qcow2"));
        let without = parsed("hdfs://namenode/vms/guest");
        assert_eq!((without.disk, with.repository.place()), (None, without.repository.place()));
        DiskAddress::parse("hdfs://namenode#data.qcow2").unwrap_err();
    }
}
