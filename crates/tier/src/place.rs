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
//! Disks of a [`group`](crate::group_of) have one repository, and one copy:
//!
//! ```text
//!   /mnt/nas/vms/guest.tier/                 web.qcow2.tier and data.qcow2.tier are links to it
//!   /var/lib/vmstrata/guest-5d01ab37/        web.qcow2, data.qcow2, and the frozen epochs of both
//! ```
//!
//! Where the repository is no directory of this host, its directory is an empty one beside the copy, by whose name chains know its layers;
//! a disk's path is that of the image that becomes its first layer, and stays as it is. The copy is named after the repository, and no link
//! says which disks are a group: the repository's heads do.
//!
//! Invariants: one process at a time holds a copy. `copy.json` has its owner's id before that claims the disk, and the epoch that
//! the copy stands on once there is a layer that takes writes.

use std::fmt;
use std::fs::{self, DirBuilder, File};
use std::io::{self, ErrorKind, Write as _};
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::{DirBuilderExt as _, symlink};
use std::path::{Path, PathBuf};
use std::slice;
use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use vmstrata_disk::{AtomicFile, LocalFiles, Opener, REPOSITORY};
use vmstrata_repo::{DirectoryRepository, Repository};

use crate::cached_files::{CachedFiles, LayerDirectory, ReadThrough};
use crate::elsewhere::{Elsewhere, last_directory};
use crate::error::{Error, Result};
use crate::group::{Group, beside, group_of, repository_of};
use crate::head::{DiskState, Epoch, EpochNumber, ObjectId, OwnerId, as_text, is_object_name};
use crate::lock::lock_within;
use crate::look::disks;
use crate::remote::Remote;

const VERSION: u32 = 1;
/// The directory of a host's cache, in that of its copies of disks, whose names have a dash.
pub const CACHE_NAME: &str = "cache";
const COPY: &str = "copy.json";
/// Stands in the names of copies that were put aside, between that of the copy and its owner's.
pub(crate) const BRANCH: &str = ".branch-";
/// More than a copy has.
const COPY_BYTES_MAX: u64 = 4096;
/// How long to wait for a copy that a dying process may still hold.
const PATIENCE: Duration = Duration::from_secs(1);

/// The paths of a tiered disk. Those of a disk that is published with others are, but for its own, the paths of all of them.
#[derive(Clone, Debug)]
pub struct Place {
    /// The disk's own, with no link in it, or that of the image that the disk was made of.
    pub path: PathBuf,
    /// The directory of its repository, or one by whose name chains of this host know layers.
    pub repository: PathBuf,
    /// The directory of this host's copy.
    pub local: PathBuf,
    /// The repository, unless that is its directory.
    pub elsewhere: Option<Elsewhere>,
    /// The disks that are published together.
    group: Option<Group>,
    /// What layers in that directory are read through; `None` for files as all others.
    reading: Option<ReadThrough>,
}

impl Place {
    /// The disk at `path`, of which this host keeps its copy in a directory of `tier`. Where it is published with others, the repository
    /// says which these are.
    ///
    /// # Errors
    /// A path that leads nowhere; a repository that cannot be read, or that has no such disk.
    pub fn of(path: &Path, tier: &Path) -> Result<Self> {
        let path = real(path).map_err(Error::of_file(path, "find the disk"))?;
        let Some(name) = group_of(&path) else {
            let (local, tier) = (stem(&path), absolute(tier)?);
            let local = local_of(&local, &tier, path.as_os_str().as_bytes());
            let repository = repository_of(&path);
            return Ok(Self { repository, local, path, elsewhere: None, group: None, reading: None });
        };
        let own = Group::new(&name, slice::from_ref(&path)).map_err(Error::of_group(&name))?;
        let place = Self::of_group(path.clone(), own, tier)?;
        let disks = place.open_repository()?.map(|repository| disks(&*repository)).transpose()?;
        let Some(disks) = disks.filter(|disks| !disks.is_empty()) else { return Ok(place) };
        if !disks.contains(&place.name()) {
            let why = format!("its repository has no {}", place.name());
            return Err(Error::of_group(&name)(why));
        }
        let paths: Vec<PathBuf> = disks.iter().map(|disk| path.with_file_name(disk)).collect();
        let group = Group::new(&name, &paths).map_err(Error::of_group(&name))?;
        Self::of_group(path, group, tier)
    }

    /// The first of the disks at `paths`, which are published together as the group `name`, or will be.
    ///
    /// # Errors
    /// Disks that cannot be a group; a path that leads nowhere.
    ///
    /// # Panics
    /// Without a path.
    pub fn group(name: &str, paths: &[&Path], tier: &Path) -> Result<Self> {
        let real = |path: &&Path| real(path).map_err(Error::of_file(path, "find the disk"));
        let paths = paths.iter().map(real).collect::<Result<Vec<PathBuf>>>()?;
        let group = Group::new(name, &paths).map_err(Error::of_group(name))?;
        Self::of_group(paths[0].clone(), group, tier)
    }

    fn of_group(path: PathBuf, group: Group, tier: &Path) -> Result<Self> {
        let repository = group.repository(&path);
        let local = local_of(&group.name, &absolute(tier)?, repository.as_os_str().as_bytes());
        Ok(Self { repository, local, path, elsewhere: None, group: Some(group), reading: None })
    }

    /// The name of the disk's group, if it is published with others.
    pub fn group_name(&self) -> Option<&str> {
        self.group.as_ref().map(|group| group.name.as_str())
    }

    /// The disks that are published together, in the order in which they were said.
    pub fn members(&self) -> Vec<Self> {
        let Some(group) = &self.group else { return vec![self.clone()] };
        let member = |name: &String| Self { path: self.path.with_file_name(name), ..self.clone() };
        group.disks.iter().map(member).collect()
    }

    /// For an image that cannot be tiered.
    pub(crate) fn not_attachable(&self, why: &str) -> Error {
        Error::NotAttachable { path: self.path.clone(), why: why.to_owned() }
    }

    /// Refuses disks that are not those of an epoch.
    ///
    /// # Errors
    /// [`Error::NoGroup`], [`Error::Incomplete`].
    pub(crate) fn check_disks(&self, epoch: &Epoch) -> Result<()> {
        let Some(group) = &self.group else { return self.check_alone(epoch) };
        let missing = group.missing(epoch).map_err(Error::of_group(&group.name))?;
        if missing.is_empty() {
            return Ok(());
        }
        Err(Error::Incomplete { group: group.name.clone(), missing })
    }

    /// Refuses an epoch of other disks than this one.
    fn check_alone(&self, epoch: &Epoch) -> Result<()> {
        let (name, names): (_, Vec<&str>) =
            (self.name(), epoch.disks.iter().map(|disk| &*disk.name).collect());
        match (&names[..], &self.elsewhere) {
            ([], _) | ([_], None) => Ok(()),
            ([own], Some(_)) if *own == name => Ok(()),
            ([other], Some(elsewhere)) => {
                Err(Error::OtherDisk { repository: elsewhere.name(), has: (*other).to_owned(), name })
            }
            _ => {
                let (repository, all) = (self.repository_name(), names.join(", "));
                let why = format!("{} has {all}: serve them together, as one group", repository.display());
                Err(Error::of_group(&name)(why))
            }
        }
    }

    /// The group, where links beside its disks lead to its repository.
    fn linked_group(&self) -> Option<&Group> {
        self.group.as_ref().filter(|_| self.elsewhere.is_none())
    }

    /// Refuses disks of a group that are published otherwise.
    ///
    /// # Errors
    /// [`Error::NoGroup`].
    pub(crate) fn check_links(&self) -> Result<()> {
        let Some(group) = self.linked_group() else { return Ok(()) };
        for member in self.members() {
            let (path, own) = (member.path.display(), beside(&member.path, REPOSITORY));
            let why = match group_of(&member.path) {
                Some(other) if other != group.name => format!("{path} is one of group '{other}'"),
                None if own.symlink_metadata().is_ok() => {
                    format!("{path} is published alone, in {}", own.display())
                }
                _ => continue,
            };
            return Err(Error::of_group(&group.name)(why));
        }
        Ok(())
    }

    /// Makes the links by which the disks of a group are known as such, where they are not there.
    ///
    /// # Errors
    /// Whatever the host reports.
    pub(crate) fn make_links(&self) -> Result<()> {
        if self.linked_group().is_none() {
            return Ok(());
        }
        for member in self.members() {
            let link = beside(&member.path, REPOSITORY);
            match symlink(self.repository.file_name().expect("made of a name"), &link) {
                Err(error) if error.kind() != ErrorKind::AlreadyExists => {
                    return Err(Error::of_file(&link, "make the link")(error));
                }
                _ => {}
            }
        }
        let directory = self.path.parent().unwrap_or(Path::new("/"));
        sync_directory(directory).map_err(Error::of_file(directory, "flush"))
    }

    /// The first of the disks whose first layers were made of the images at `paths`, or will be, in a repository that is no directory. They
    /// are published together as a `group`, or there is one. The repository alone says which directory of `tier` has the copy.
    ///
    /// # Errors
    /// Disks that cannot be a group; a path that cannot be made absolute.
    ///
    /// # Panics
    /// Without a path; with several, and no group.
    pub fn elsewhere(
        group: Option<&str>,
        paths: &[&Path],
        tier: &Path,
        elsewhere: Elsewhere,
    ) -> Result<Self> {
        assert!(group.is_some() || paths.len() == 1, "several disks are a group");
        let paths: Vec<PathBuf> = paths.iter().map(|path| (*path).to_owned()).collect();
        let group = group.map(|name| Group::new(name, &paths).map_err(Error::of_group(name))).transpose()?;
        let (tier, name) = (absolute(tier)?, elsewhere.name());
        let local = local_of(&elsewhere.disk_name(), &tier, name.as_bytes());
        let (path, repository, elsewhere) = (paths[0].clone(), stand_in(&tier, &name), Some(elsewhere));
        Ok(Self { repository, local, path, elsewhere, group, reading: None })
    }

    /// The first of the disks that are published in a repository that is no directory, whatever their images are called.
    ///
    /// # Errors
    /// [`Error::NoHead`] where there are none; what the repository reports.
    pub fn published_elsewhere(tier: &Path, elsewhere: Elsewhere) -> Result<Self> {
        let names = disks(&**elsewhere.remote.repository())?;
        let group = match names.len() {
            0 => return Err(Error::NoHead { repository: elsewhere.name() }),
            1 => None,
            _ => Some(elsewhere.disk_name()),
        };
        let paths: Vec<&Path> = names.iter().map(Path::new).collect();
        Self::elsewhere(group.as_deref(), &paths, tier, elsewhere)
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

    /// The repository, as people know it.
    pub fn repository_name(&self) -> PathBuf {
        self.elsewhere.as_ref().map_or_else(|| self.repository.clone(), |elsewhere| elsewhere.name().into())
    }

    /// The disk's name in epochs.
    pub fn name(&self) -> String {
        self.path.file_name().unwrap_or_default().to_string_lossy().into_owned()
    }

    /// What an epoch that was published has of the disk.
    pub(crate) fn state<'a>(&self, epoch: &'a Epoch) -> &'a DiskState {
        epoch.disk(&self.name()).expect("an epoch that was checked has the disk")
    }

    /// The same, to be changed.
    pub(crate) fn state_mut<'a>(&self, epoch: &'a mut Epoch) -> &'a mut DiskState {
        let name = self.name();
        let is_it = |disk: &&mut DiskState| disk.name == name || self.group.is_none();
        epoch.disks.iter_mut().find(is_it).expect("an epoch that was checked has the disk")
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

impl fmt::Display for Place {
    /// The disk's path, or its group's repository.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let path = if self.group.is_some() { self.repository_name() } else { self.path.clone() };
        path.display().fmt(f)
    }
}

impl Place {
    /// What opens files of the disk's chain.
    pub(crate) fn opener(&self) -> Arc<dyn Opener> {
        self.files().map_or_else(|| Arc::new(LocalFiles) as _, |files| Arc::clone(files) as _)
    }

    /// What opens layers of the repository, unless they are files as all others.
    pub(crate) fn files(&self) -> Option<&Arc<CachedFiles>> {
        let of_elsewhere = self.elsewhere.as_ref().map(|elsewhere| &elsewhere.files);
        of_elsewhere.or_else(|| self.reading.as_ref().map(ReadThrough::files))
    }

    /// Lets chains of this host stand on the layers of an epoch.
    pub(crate) fn show(&self, epoch: &Epoch) -> Result<()> {
        let (Some(remote), Some(files)) = (self.remote()?, self.files()) else { return Ok(()) };
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

/// The directory by whose name images in `directory` know the layers of a repository that is no directory of this host, and is called
/// `repository` ([`RepositoryAddress::place`](crate::RepositoryAddress::place)). It is empty.
pub fn stand_in(directory: &Path, repository: &str) -> PathBuf {
    beside(&local_of(&last_directory(repository), directory, repository.as_bytes()), REPOSITORY)
}

fn absolute(path: &Path) -> Result<PathBuf> {
    std::path::absolute(path).map_err(Error::of_file(path, "find"))
}

fn stem(path: &Path) -> String {
    path.file_stem().unwrap_or_default().to_string_lossy().into_owned()
}

/// The directory in `tier` of the copy of a disk or a group that `id` tells from others.
fn local_of(name: &str, tier: &Path, id: &[u8]) -> PathBuf {
    tier.join(format!("{name}-{}", &blake3::hash(id).to_hex()[..8]))
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

    /// Deletes the copy.
    ///
    /// # Errors
    /// Whatever the host reports: a part may be gone.
    pub(crate) fn delete(self) -> Result<()> {
        let local = &self.place.local;
        fs::remove_dir_all(local).map_err(Error::of_file(local, "delete the copy"))
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
