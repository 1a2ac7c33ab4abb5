//! Where the parts of a tiered disk lie, and what this host keeps of one.
//!
//! ```text
//!   /mnt/nas/vms/web.qcow2                   the disk's path: an overlay on the newest head, for people and stock tools
//!   /mnt/nas/vms/web.qcow2.tier/             its repository
//!   /var/lib/vmstrata/web-1f0c66ab/          this host's copy: `lock`, `copy.json`,
//!       web.qcow2, web.epoch-7.qcow2         the active layer, and frozen epochs
//!       ID.qcow2.vmsx                        the index of a layer in the repository
//! ```
//!
//! Where the repository is no directory of this host, its directory is an empty one beside the copy, by whose name chains know its layers;
//! the disk's path is that of the image that becomes the first layer, and stays as it is.
//!
//! Invariants: one process at a time holds a copy. `copy.json` has its owner's id before that claims the disk, and the epoch that
//! the copy stands on once there is a layer that takes writes.

use std::ffi::OsString;
use std::fs::{self, DirBuilder, File};
use std::io::{self, ErrorKind, Write as _};
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use vmstrata_disk::{AtomicFile, LocalFiles, Opener, REPOSITORY};
use vmstrata_repo::{DirectoryRepository, Repository};

use crate::cached_files::{CachedFiles, LayerDirectory, ReadThrough};
use crate::error::{Error, Result};
use crate::head::{DiskState, Epoch, EpochNumber, ObjectId, OwnerId, as_text, is_object_name};
use crate::lock::lock_within;
use crate::remote::Remote;

const VERSION: u32 = 1;
const COPY: &str = "copy.json";
/// Stands in the names of copies that were put aside, between that of the copy and its owner's.
pub(crate) const BRANCH: &str = ".branch-";
/// More than a copy has.
const COPY_BYTES_MAX: u64 = 4096;
/// How long to wait for a copy that a dying process may still hold.
const PATIENCE: Duration = Duration::from_secs(1);

/// A repository that is no directory of this host.
#[derive(Clone, Debug)]
pub struct Elsewhere {
    /// Its layers, by way of this host's cache.
    pub remote: Arc<Remote>,
    /// What opens files for the disk's resources.
    pub files: Arc<CachedFiles>,
}

/// The paths of a tiered disk.
#[derive(Clone, Debug)]
pub struct Place {
    /// The disk's own, with no link in it.
    pub path: PathBuf,
    /// The directory of its repository.
    pub repository: PathBuf,
    /// The directory of this host's copy.
    pub local: PathBuf,
    /// The repository, unless that is its directory.
    pub elsewhere: Option<Elsewhere>,
    /// What layers in that directory are read through; `None` for files as all others.
    reading: Option<ReadThrough>,
}

impl Place {
    /// The disk at `path`, of which this host keeps its copy in a directory of `tier`.
    ///
    /// # Errors
    /// A path that leads nowhere.
    pub fn of(path: &Path, tier: &Path) -> Result<Self> {
        let path = real(path).map_err(Error::of_file(path, "find the disk"))?;
        let tier = std::path::absolute(tier).map_err(Error::of_file(tier, "find the directory"))?;
        let local = local_of(&path, &tier, path.as_os_str().as_bytes());
        Ok(Self { repository: repository_of(&path), local, path, elsewhere: None, reading: None })
    }

    /// The disk whose first layer was made of the image at `path`, or will be, in a repository that is no directory.
    ///
    /// # Errors
    /// Paths that cannot be made absolute.
    pub fn elsewhere(path: &Path, tier: &Path, elsewhere: Elsewhere) -> Result<Self> {
        let absolute = |path| std::path::absolute(path).map_err(Error::of_file(path, "find the disk"));
        let (path, tier) = (absolute(path)?, absolute(tier)?);
        let local = local_of(&path, &tier, elsewhere.remote.repository().describe().as_bytes());
        Ok(Self { repository: repository_of(&local), local, path, elsewhere: Some(elsewhere), reading: None })
    }

    /// The same, whose layers are read through a cache of this host.
    #[must_use]
    pub fn read_through(self, reading: ReadThrough) -> Self {
        Self { reading: Some(reading), ..self }
    }

    /// The directory of this host's copies.
    pub(crate) fn tier(&self) -> &Path {
        self.local.parent().unwrap_or(Path::new("/"))
    }

    /// The file of a layer in the repository.
    pub(crate) fn layer(&self, id: ObjectId) -> PathBuf {
        self.repository.join(id.layer_name().as_str())
    }

    /// The file that takes the guest's writes.
    pub fn disk(&self) -> PathBuf {
        self.local.join(self.path.file_name().unwrap_or_default()).with_extension("qcow2")
    }

    /// The disk's name in epochs.
    pub(crate) fn name(&self) -> String {
        self.path.file_name().unwrap_or_default().to_string_lossy().into_owned()
    }

    /// What an epoch that was published has of the disk.
    pub(crate) fn state<'a>(&self, epoch: &'a Epoch) -> &'a DiskState {
        epoch.disk(&self.name()).expect("an epoch that was published has the disk")
    }

    /// The repository, if there is one.
    ///
    /// # Errors
    /// Whatever the host reports.
    pub fn open_repository(&self) -> Result<Option<Arc<dyn Repository>>> {
        if let Some(elsewhere) = &self.elsewhere {
            return Ok(Some(Arc::clone(elsewhere.remote.repository())));
        }
        match DirectoryRepository::open(&self.repository, is_object_name) {
            Ok(repository) => Ok(Some(Arc::new(repository))),
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error.into()),
        }
    }

    /// Makes the directory of the repository, for this user alone.
    pub(crate) fn make_repository(&self) -> Result<Arc<dyn Repository>> {
        make_private(&self.repository).map_err(Error::of_file(&self.repository, "make the repository"))?;
        self.open_repository()?
            .ok_or_else(|| Error::NoHead { repository: self.repository.display().to_string() })
    }
}

impl Place {
    /// What opens files of the disk's chain.
    pub(crate) fn opener(&self) -> Arc<dyn Opener> {
        match (&self.elsewhere, &self.reading) {
            (Some(elsewhere), _) => Arc::clone(&elsewhere.files) as _,
            (None, Some(reading)) => Arc::clone(reading.files()) as _,
            (None, None) => Arc::new(LocalFiles),
        }
    }

    /// Lets chains of this host stand on the layers of an epoch.
    pub(crate) fn show(&self, epoch: &Epoch) -> Result<()> {
        let Some(remote) = self.remote()? else { return Ok(()) };
        let files = match (&self.elsewhere, &self.reading) {
            (Some(elsewhere), _) => &elsewhere.files,
            (None, Some(reading)) => reading.files(),
            (None, None) => return Ok(()),
        };
        let dir = LayerDirectory { path: &self.repository, indices: &self.local };
        epoch.disks.iter().try_for_each(|disk| files.add(dir, &remote, &disk.objects))
    }

    /// What reads the layers of the repository, unless they are files as all others.
    ///
    /// # Errors
    /// As [`Place::open_repository`].
    pub(crate) fn remote(&self) -> Result<Option<Arc<Remote>>> {
        if let Some(elsewhere) = &self.elsewhere {
            return Ok(Some(Arc::clone(&elsewhere.remote)));
        }
        let Some(reading) = &self.reading else { return Ok(None) };
        Ok(self.open_repository()?.map(|repository| Arc::clone(reading.remote(repository))))
    }
}

/// The directory in `tier` of the copy of a disk that `id` tells from others.
fn local_of(path: &Path, tier: &Path, id: &[u8]) -> PathBuf {
    let stem = path.file_stem().unwrap_or_default().to_string_lossy();
    tier.join(format!("{stem}-{}", &blake3::hash(id).to_hex()[..8]))
}

/// The directory of the repository of the disk at `path`.
pub fn repository_of(path: &Path) -> PathBuf {
    beside(path, REPOSITORY)
}

/// A path with more at its end.
pub(crate) fn beside(path: &Path, suffix: &str) -> PathBuf {
    let mut name = OsString::from(path);
    name.push(suffix);
    name.into()
}

/// The path without links; its file need not be there.
fn real(path: &Path) -> io::Result<PathBuf> {
    match path.canonicalize() {
        Err(error) if error.kind() == ErrorKind::NotFound => {
            let (path, no_file) = (std::path::absolute(path)?, || ErrorKind::IsADirectory);
            let (parent, name) = path.parent().zip(path.file_name()).ok_or_else(no_file)?;
            Ok(parent.canonicalize()?.join(name))
        }
        found => found,
    }
}

pub(crate) fn make_private(path: &Path) -> io::Result<()> {
    match DirBuilder::new().mode(0o700).create(path) {
        Err(error) if error.kind() != ErrorKind::AlreadyExists => Err(error),
        _ => sync_directory(path.parent().unwrap_or(Path::new("/"))),
    }
}

pub(crate) fn sync_directory(path: &Path) -> io::Result<()> {
    File::open(path)?.sync_all()
}

/// What `copy.json` says.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Record {
    version: u32,
    /// Who writes the copy.
    #[serde(with = "as_text")]
    pub(crate) owner: OwnerId,
    /// The epoch in the repository that the copy stands on; none before it was made.
    pub(crate) base: Option<EpochNumber>,
    /// The newest epoch that it is known to have published.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) published: Option<EpochNumber>,
    /// The inode of the ordinary image that is about to take the place of the disk's path.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) detaching: Option<u64>,
}

/// This host's copy of a disk, held until this is dropped.
#[derive(Debug)]
pub(crate) struct Copy {
    place: Place,
    record: Option<Record>,
    _lock: File,
}

impl Copy {
    /// Holds the copy of a disk, which is made if there is none.
    ///
    /// # Errors
    /// One that another process holds; whatever the host reports.
    pub(crate) fn hold(place: &Place) -> Result<Self> {
        let failed = |action| Error::of_file(&place.local, action);
        let tier = place.tier();
        fs::create_dir_all(tier).map_err(Error::of_file(tier, "make the directory"))?;
        make_private(&place.local).map_err(failed("make the directory"))?;
        if place.elsewhere.is_some() {
            make_private(&place.repository).map_err(failed("make the directory of its layers"))?;
        }
        let lock = File::options().create(true).truncate(false).write(true).open(place.local.join("lock"));
        let lock = lock.map_err(failed("lock the copy"))?;
        if !lock_within(&lock, PATIENCE).map_err(failed("lock the copy"))? {
            return Err(Error::Held { copy: place.local.clone() });
        }
        Ok(Self { record: read_record(&place.local)?, place: place.clone(), _lock: lock })
    }

    pub(crate) fn record(&self) -> Option<&Record> {
        self.record.as_ref()
    }

    /// Notes on stable storage whose copy this is, and what it stands on.
    pub(crate) fn note(&mut self, owner: OwnerId, base: Option<EpochNumber>) -> Result<()> {
        self.write(Record { version: VERSION, owner, base, published: None, detaching: None })
    }

    /// Changes what is noted of a copy that has an owner.
    pub(crate) fn change(&mut self, change: impl FnOnce(&mut Record)) -> Result<()> {
        let mut record = self.record.clone().expect("a copy that somebody wrote");
        change(&mut record);
        self.write(record)
    }

    fn write(&mut self, record: Record) -> Result<()> {
        let path = self.place.local.join(COPY);
        let mut draft = AtomicFile::beside(&path)?;
        let text = serde_json::to_vec(&record).expect("plain data");
        draft.file.write_all(&text).map_err(Error::of_file(&path, "write"))?;
        draft.publish(&path, true)?;
        self.record = Some(record);
        Ok(())
    }

    /// Puts the copy away under another name, which is returned, and holds a new one.
    ///
    /// # Errors
    /// Whatever the host reports.
    pub(crate) fn set_aside(self) -> Result<(PathBuf, Self)> {
        let Self { place, record, .. } = self;
        let owner = record.expect("a copy that somebody wrote").owner.to_string();
        let aside = beside(&place.local, &format!("{BRANCH}{}", &owner[..8]));
        let failed = |action| Error::of_file(&place.local, action);
        fs::rename(&place.local, &aside).map_err(failed("put the copy aside"))?;
        Ok((aside, Self::hold(&place)?))
    }
}

/// What is noted of the copy in a directory.
pub(crate) fn read_record(local: &Path) -> Result<Option<Record>> {
    let path = local.join(COPY);
    let failed = |error| Err(Error::of_file(&path, "read")(error));
    match fs::metadata(&path) {
        Ok(about) if about.len() > COPY_BYTES_MAX => return failed(ErrorKind::FileTooLarge.into()),
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
        _ => {}
    }
    let record: Record = match fs::read(&path).and_then(|text| Ok(serde_json::from_slice(&text)?)) {
        Ok(record) => record,
        Err(error) => return failed(error),
    };
    if record.version != VERSION {
        return failed(io::Error::other(format!("it is of version {}, not {VERSION}", record.version)));
    }
    Ok(Some(record))
}
