//! A directory as a repository: an object is a file, written under a name of its own, then renamed. A new object that must not
//! replace another is linked instead, which the file system refuses if the name is there.
//!
//! Blocks of zeros are left as holes.
//!
//! The file `lock` is held with `flock`: shared by writers and readers, alone by who deletes.
//!
//! Files are made for this user alone, in a directory that nobody else can enter ([`private`]). Links in it are not followed,
//! and what is no regular file is refused, without waiting for it: neither is the repository's.
//!
//! The directory is opened anew for each operation, so its file system can be unmounted meanwhile, and be mounted again.

mod private;

use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::fs::{
    Advice, AtFlags, Dir, FileType, FlockOperation, Mode, OFlags, Stat, fadvise, flock, fstat, fstatvfs,
    fsync, linkat, openat, renameat, statat, unlinkat,
};
use rustix::io::Errno;

use crate::error::{Error, Result};
use crate::name::{NameRule, ObjectName};
use crate::repository::{
    Capabilities, DeviceId, Held, Hold, NewObject, ObjectInfo, ObjectReader, Repository, Swept,
};
use private::Access;

const LOCK: &str = ObjectName::LOCK;
const UNFINISHED: &str = ".new";
/// Zeros become holes in pieces of this size.
const BLOCK: usize = 4096;
/// Objects begun by this process.
static COUNT: AtomicU64 = AtomicU64::new(0);

/// A repository in a directory.
#[derive(Debug)]
pub struct DirectoryRepository {
    path: PathBuf,
    device: DeviceId,
    names: NameRule,
}

impl DirectoryRepository {
    /// The repository in a directory that exists, of objects with these names. One that others can enter can be read, with a
    /// warning.
    ///
    /// # Errors
    /// When there is no directory of that name: a disk that is not mounted must not become a directory on another one.
    pub fn open(path: &Path, names: NameRule) -> Result<Self> {
        Self::look_at(path, names).map_err(Error::of(path.display(), "opening"))
    }

    fn look_at(path: &Path, names: NameRule) -> io::Result<Self> {
        let dir = open_directory(path)?;
        let access = Access::of(&dir)?;
        if !access.is_private() {
            tracing::warn!("{}: others can enter it: {access}; {}", path.display(), access.remedy(path));
        }
        Ok(Self { path: path.to_owned(), device: DeviceId(fstat(&dir)?.st_dev), names })
    }

    /// The object of this name, if it can be one of this repository.
    fn object(&self, file_name: &str) -> Option<ObjectName> {
        ObjectName::new(file_name).ok().filter(|_| (self.names)(file_name))
    }

    /// Whether a file of this name is the repository's.
    fn is_own(&self, file_name: &str) -> bool {
        file_name == LOCK || self.object(file_name).is_some() || self.is_unfinished(file_name)
    }

    /// Whether a file of this name was to become an object of this repository.
    fn is_unfinished(&self, file_name: &str) -> bool {
        unfinished_object(file_name).is_some_and(|name| self.object(name).is_some())
    }

    fn to_read(&self) -> io::Result<OwnedFd> {
        open_directory(&self.path)
    }

    /// # Errors
    /// Also when others can enter it.
    fn to_write(&self) -> io::Result<OwnedFd> {
        let dir = open_directory(&self.path)?;
        private::close(&dir, &self.path, |name| self.is_own(name))?;
        Ok(dir)
    }

    /// The file to be locked; `None` for a reader where nobody has written with a lock, and none can be made.
    fn lock_file(&self, how: Hold) -> io::Result<Option<File>> {
        let make = OFlags::RDWR | OFlags::CREATE;
        if how != Hold::Read {
            return open_file(&self.to_write()?, LOCK, make).map(Some);
        }
        let dir = self.to_read()?;
        // In another user's directory it would be a file that this user cannot lock.
        if Access::of(&dir)?.is_ours() {
            match open_file(&dir, LOCK, make) {
                Err(error) if cannot_write(&error) => {}
                opened => return opened.map(Some),
            }
        }
        match open_file(&dir, LOCK, OFlags::RDONLY) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            opened => opened.map(Some),
        }
    }
}

fn open_directory(path: &Path) -> io::Result<OwnedFd> {
    Ok(rustix::fs::open(path, OFlags::DIRECTORY | OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?)
}

/// Opens a regular file of a directory; one that is made is for this user alone.
fn open_file(dir: &OwnedFd, name: &str, flags: OFlags) -> io::Result<File> {
    let always = OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
    let file = match openat(dir, name, flags | always, Mode::RUSR | Mode::WUSR) {
        Ok(file) => Some(file).filter(is_regular),
        // What links, sockets and directories answer.
        Err(Errno::LOOP | Errno::NXIO | Errno::ISDIR) => None,
        Err(error) => return Err(error.into()),
    };
    let refused = || io::Error::new(io::ErrorKind::InvalidData, format!("{name} is not a regular file"));
    file.map(File::from).ok_or_else(refused)
}

/// Bytes of the device that a file takes.
fn allocated(about: &Stat) -> u64 {
    about.st_blocks.cast_unsigned() * 512
}

fn is_regular(file: &OwnedFd) -> bool {
    fstat(file).is_ok_and(|about| FileType::from_raw_mode(about.st_mode).is_file())
}

/// The name of the object that a file of this name was to become.
fn unfinished_object(file_name: &str) -> Option<&str> {
    let (name, by) = file_name.strip_prefix('.')?.strip_suffix(UNFINISHED)?.rsplit_once('.')?;
    let (process, count) = by.split_once('-')?;
    let is_number = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    (is_number(process) && is_number(count)).then_some(name)
}

impl DirectoryRepository {
    /// For `map_err`.
    fn failed<'a>(&'a self, action: &'static str) -> impl FnOnce(io::Error) -> Error + 'a {
        Error::of(self.path.display(), action)
    }

    /// For `map_err`.
    fn failed_at<'a>(
        &'a self,
        action: &'static str,
        name: &'a ObjectName,
    ) -> impl FnOnce(io::Error) -> Error + 'a {
        Error::of_object(self.path.display(), action, name)
    }

    fn available_bytes(&self) -> io::Result<u64> {
        let about = fstatvfs(&self.to_read()?)?;
        Ok(about.f_bavail.saturating_mul(about.f_frsize))
    }

    fn names_in(&self, dir: &OwnedFd, prefix: &str) -> io::Result<Vec<ObjectName>> {
        let mut names = Vec::new();
        for entry in Dir::read_from(dir)? {
            let entry = entry?;
            let file_name = entry.file_name().to_str().ok().filter(|name| name.starts_with(prefix));
            names.extend(file_name.and_then(|name| self.object(name)));
        }
        Ok(names)
    }

    /// What has an object's name and is no regular file is listed, too: it cannot be opened, so what it needs is not known,
    /// and nothing that it may need is collected.
    fn objects(&self, prefix: &str) -> io::Result<Vec<ObjectInfo>> {
        let dir = self.to_read()?;
        let mut objects = Vec::new();
        for name in self.names_in(&dir, prefix)? {
            match statat(&dir, name.as_str(), AtFlags::SYMLINK_NOFOLLOW) {
                Ok(about) => {
                    let (len, allocated) = (about.st_size.cast_unsigned(), allocated(&about));
                    objects.push(ObjectInfo { name, len, allocated, copies: 1 });
                }
                // Deleted since its name was read.
                Err(Errno::NOENT) => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok(objects)
    }

    fn begin(&self, name: &ObjectName, copies: u8, replaces: bool) -> io::Result<NewFile> {
        name.check(self.names)?;
        self.capabilities().check_copies(copies)?;
        let dir = self.to_write()?;
        loop {
            // A name of its own, as another process may be writing the same object.
            let count = COUNT.fetch_add(1, Ordering::Relaxed);
            let unfinished = format!(".{name}.{}-{count}{UNFINISHED}", std::process::id());
            let file = match open_file(&dir, &unfinished, OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL) {
                // Left by a process of the same number.
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => continue,
                file => file?,
            };
            let (repository, name) = (self.describe(), name.clone());
            let state = State::Writing;
            return Ok(NewFile { repository, name, dir, file, unfinished, replaces, len: 0, state });
        }
    }

    fn remove(&self, name: &ObjectName) -> io::Result<()> {
        name.check(self.names)?;
        let dir = self.to_write()?;
        match unlinkat(&dir, name.as_str(), AtFlags::empty()) {
            Ok(()) | Err(Errno::NOENT) => Ok(fsync(&dir)?),
            Err(error) => Err(error.into()),
        }
    }

    fn move_object(&self, from: &ObjectName, to: &ObjectName) -> io::Result<()> {
        from.check(self.names)?;
        to.check(self.names)?;
        let dir = self.to_write()?;
        renameat(&dir, from.as_str(), &dir, to.as_str())?;
        Ok(fsync(&dir)?)
    }

    fn remove_unfinished(&self) -> io::Result<Swept> {
        let dir = self.to_write()?;
        let mut swept = Swept::default();
        for entry in Dir::read_from(&dir)? {
            let entry = entry?;
            let name = entry.file_name();
            if !name.to_str().is_ok_and(|name| self.is_unfinished(name)) {
                continue;
            }
            let about = match statat(&dir, name, AtFlags::SYMLINK_NOFOLLOW) {
                // Its writer has removed it since its name was read.
                Err(Errno::NOENT) => continue,
                about => about?,
            };
            // No writer has made anything else.
            if FileType::from_raw_mode(about.st_mode).is_file() {
                match unlinkat(&dir, name, AtFlags::empty()) {
                    Ok(()) => swept += Swept { objects: 1, bytes: allocated(&about) },
                    Err(Errno::NOENT) => {}
                    Err(error) => return Err(error.into()),
                }
            }
        }
        Ok(swept)
    }

    fn lock(&self, how: Hold) -> io::Result<Option<Held>> {
        let Some(file) = self.lock_file(how)? else { return Ok(Some(Box::new(()))) };
        let operation = match how {
            Hold::Read | Hold::Write => FlockOperation::LockShared,
            Hold::Alone => FlockOperation::LockExclusive,
            Hold::AloneOrNot => FlockOperation::NonBlockingLockExclusive,
        };
        match flock(&file, operation) {
            Ok(()) => Ok(Some(Box::new(file))),
            Err(Errno::WOULDBLOCK) if how == Hold::AloneOrNot => Ok(None),
            Err(error) => Err(error.into()),
        }
    }
}

impl Repository for DirectoryRepository {
    fn describe(&self) -> String {
        self.path.display().to_string()
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities {
            conditional_create: true,
            rename: true,
            read_back: true,
            early_read_back: true,
            max_copies: 1,
            ranged_reads: true,
            free_space: true,
            holds: true,
        }
    }

    fn device(&self) -> DeviceId {
        self.device
    }

    fn free_bytes(&self) -> Result<u64> {
        self.available_bytes().map_err(self.failed("asking for room"))
    }

    fn list(&self, prefix: &str) -> Result<Vec<ObjectInfo>> {
        self.objects(prefix).map_err(self.failed("listing"))
    }

    fn names(&self, prefix: &str) -> Result<Vec<ObjectName>> {
        let names = self.to_read().and_then(|dir| self.names_in(&dir, prefix));
        names.map_err(self.failed("listing"))
    }

    fn create_new(&self, name: &ObjectName, copies: u8) -> Result<Box<dyn NewObject>> {
        Ok(Box::new(self.begin(name, copies, false).map_err(self.failed_at("creating", name))?))
    }

    fn replace(&self, name: &ObjectName, copies: u8) -> Result<Box<dyn NewObject>> {
        Ok(Box::new(self.begin(name, copies, true).map_err(self.failed_at("creating", name))?))
    }

    fn open(&self, name: &ObjectName) -> Result<Box<dyn ObjectReader>> {
        let file = self.to_read().and_then(|dir| open_file(&dir, name.as_str(), OFlags::RDONLY));
        let opened = file.and_then(|file| OpenFile::new(self.describe(), name, file));
        Ok(Box::new(opened.map_err(self.failed_at("opening", name))?))
    }

    fn delete(&self, name: &ObjectName) -> Result<()> {
        self.remove(name).map_err(self.failed_at("deleting", name))
    }

    fn rename(&self, from: &ObjectName, to: &ObjectName) -> Result<()> {
        self.move_object(from, to).map_err(self.failed_at("renaming", from))
    }

    fn sweep(&self) -> Result<Swept> {
        self.remove_unfinished().map_err(self.failed("sweeping"))
    }

    fn hold(&self, how: Hold) -> Result<Option<Held>> {
        self.lock(how).map_err(self.failed("holding"))
    }
}

fn cannot_write(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem)
}

/// Writes what is not zeros.
fn write_sparse(file: &File, bytes: &[u8], at: u64) -> io::Result<()> {
    let is_hole = |block: &[u8]| block.len() == BLOCK && block.iter().all(|byte| *byte == 0);
    let (mut data, mut done) = (0, 0);
    for block in bytes.chunks(BLOCK) {
        let next = done + block.len();
        if is_hole(block) {
            file.write_all_at(&bytes[data..done], at + data as u64)?;
            data = next;
        }
        done = next;
    }
    file.write_all_at(&bytes[data..], at + data as u64)
}

struct NewFile {
    repository: String,
    name: ObjectName,
    dir: OwnedFd,
    file: File,
    unfinished: String,
    /// Whether it takes the place of an object of its name.
    replaces: bool,
    /// Bytes that were added; it may end with a hole.
    len: u64,
    state: State,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Writing,
    Synced,
    /// Bytes may be missing.
    Failed,
    Renamed,
}

impl NewFile {
    /// For `map_err`.
    fn failed<'a>(&'a self, action: &'static str) -> impl FnOnce(io::Error) -> Error + 'a {
        Error::of_object(&self.repository, action, &self.name)
    }

    fn open_unfinished(&self) -> io::Result<OpenFile> {
        let file = open_file(&self.dir, &self.unfinished, OFlags::RDONLY)?;
        // What is in memory says nothing about the device.
        fadvise(&file, 0, None, Advice::DontNeed)?;
        OpenFile::new(self.repository.clone(), &self.name, file)
    }

    /// Does something to the file. After a failure nothing else does: what was written may be torn, and a second flush would
    /// succeed and lie.
    fn step(&mut self, then: State, step: impl FnOnce(&mut File) -> io::Result<()>) -> io::Result<()> {
        if self.state == State::Failed {
            return Err(io::Error::other("writing it failed before"));
        }
        self.state = State::Failed;
        step(&mut self.file)?;
        self.state = then;
        Ok(())
    }

    fn flush(&mut self) -> io::Result<()> {
        if self.state == State::Synced { Ok(()) } else { self.flush_to(State::Synced) }
    }

    fn flush_to(&mut self, then: State) -> io::Result<()> {
        let len = self.len;
        self.step(then, |file| {
            file.set_len(len)?;
            file.sync_data()
        })
    }

    fn publish(&mut self) -> io::Result<()> {
        self.flush()?;
        if self.replaces {
            renameat(&self.dir, &self.unfinished, &self.dir, self.name.as_str())?;
            self.state = State::Renamed;
        } else {
            self.link()?;
        }
        Ok(fsync(&self.dir)?)
    }

    /// Of several that link to one name, one does; the others get `EEXIST`.
    fn link(&self) -> io::Result<()> {
        match linkat(&self.dir, &self.unfinished, &self.dir, self.name.as_str(), AtFlags::empty()) {
            Ok(()) => Ok(()),
            // NFS says so, too, to the one that did, if it asks again because the answer was lost.
            Err(Errno::EXIST) if self.has_name()? => Ok(()),
            // The name may be as new as that of its writer, who was not told.
            Err(Errno::EXIST) => {
                fsync(&self.dir)?;
                Err(Errno::EXIST.into())
            }
            Err(error @ (Errno::PERM | Errno::OPNOTSUPP | Errno::NOSYS)) => Err(io::Error::new(
                io::ErrorKind::Unsupported,
                format!("its file system has no hard links, which decide who creates an object: {error}"),
            )),
            Err(error) => Err(error.into()),
        }
    }

    /// Whether this file is what its name leads to.
    fn has_name(&self) -> io::Result<bool> {
        let ours = fstat(&self.file)?;
        match statat(&self.dir, self.name.as_str(), AtFlags::SYMLINK_NOFOLLOW) {
            Ok(named) => Ok((named.st_dev, named.st_ino) == (ours.st_dev, ours.st_ino)),
            Err(Errno::NOENT) => Ok(false),
            Err(error) => Err(error.into()),
        }
    }
}

impl NewObject for NewFile {
    fn write(&mut self, bytes: &[u8]) -> Result<()> {
        let at = self.len;
        self.step(State::Writing, |file| write_sparse(file, bytes, at)).map_err(self.failed("writing"))?;
        self.len += bytes.len() as u64;
        Ok(())
    }

    fn write_out(&mut self) -> Result<()> {
        self.flush_to(State::Writing).map_err(self.failed("flushing"))
    }

    fn sync(&mut self) -> Result<()> {
        self.flush().map_err(self.failed("flushing"))
    }

    fn read_back(&self) -> Result<Box<dyn ObjectReader>> {
        Ok(Box::new(self.open_unfinished().map_err(self.failed("reading back"))?))
    }

    fn finish(mut self: Box<Self>) -> Result<()> {
        self.publish().map_err(self.failed("publishing"))
    }
}

impl Drop for NewFile {
    fn drop(&mut self) {
        if self.state != State::Renamed {
            // What cannot be removed now is swept later.
            let _ = unlinkat(&self.dir, &self.unfinished, AtFlags::empty());
        }
    }
}

struct OpenFile {
    repository: String,
    name: ObjectName,
    file: File,
    len: u64,
}

impl OpenFile {
    fn new(repository: String, name: &ObjectName, file: File) -> io::Result<Self> {
        let len = file.metadata()?.len();
        Ok(Self { repository, name: name.clone(), file, len })
    }
}

impl ObjectReader for OpenFile {
    fn len(&self) -> u64 {
        self.len
    }

    fn read_at(&self, at: u64, into: &mut [u8]) -> Result<()> {
        // An offset that the kernel takes for a negative one is past the end, too.
        let is_past = at.checked_add(into.len() as u64).is_none_or(|end| end > self.len);
        let read = if is_past {
            Err(io::ErrorKind::UnexpectedEof.into())
        } else {
            self.file.read_exact_at(into, at)
        };
        read.map_err(Error::of_read(&self.repository, &self.name, at))
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::{PermissionsExt, symlink};

    use rustix::fs::{CWD, mknodat};

    use super::*;

    fn name() -> ObjectName {
        ObjectName::new("web.clean").unwrap()
    }

    fn open(dir: &tempfile::TempDir) -> DirectoryRepository {
        DirectoryRepository::open(dir.path(), |name| name.ends_with(".clean")).unwrap()
    }

    fn private_directory() -> tempfile::TempDir {
        tempfile::Builder::new().permissions(fs::Permissions::from_mode(0o700)).tempdir().unwrap()
    }

    #[test]
    fn an_object_appears_when_it_is_published_and_not_before() {
        let dir = private_directory();
        let repository = open(&dir);
        let name = name();
        let mut object = repository.replace(&name, 1).unwrap();
        object.write(b"ab").unwrap();
        object.write(b"c").unwrap();
        object.sync().unwrap();
        assert_eq!(repository.list("").unwrap(), []);
        object.finish().unwrap();
        assert_eq!(
            repository.list("").unwrap(),
            [ObjectInfo { name: name.clone(), len: 3, allocated: 4096, copies: 1 }]
        );
        let mut read = [0; 2];
        repository.open(&name).unwrap().read_at(1, &mut read).unwrap();
        assert_eq!(&read, b"bc");
        repository.delete(&name).unwrap();
        repository.delete(&name).unwrap();
        assert_eq!(repository.list("").unwrap(), []);
    }

    #[test]
    fn blocks_of_zeros_are_holes() {
        let dir = private_directory();
        let (repository, name) = (open(&dir), name());
        let mut object = repository.create_new(&name, 1).unwrap();
        let bytes = [vec![0; 2 << 20], vec![7; 5000], vec![0; 1 << 20]].concat();
        bytes.chunks(96 << 10).for_each(|part| object.write(part).unwrap());
        object.sync().unwrap();
        assert_eq!(object.read_back().unwrap().len(), bytes.len() as u64);
        object.finish().unwrap();
        assert_eq!(fs::read(dir.path().join(name.as_str())).unwrap(), bytes);
        let found = &repository.list("").unwrap()[0];
        assert!(found.len == bytes.len() as u64 && found.allocated < 100_000, "{found:?}");
    }

    /// Over NFS the answer to a link can be lost; the client asks again and hears that the name is there.
    #[test]
    fn a_link_whose_answer_was_lost_is_no_lost_race() {
        let dir = private_directory();
        let (repository, name) = (open(&dir), name());
        let mut object = repository.begin(&name, 1, false).unwrap();
        object.write(b"ours").unwrap();
        fs::hard_link(dir.path().join(&object.unfinished), dir.path().join(name.as_str())).unwrap();
        Box::new(object).finish().unwrap();
        assert_eq!(fs::read(dir.path().join(name.as_str())).unwrap(), b"ours");
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
    }

    #[test]
    fn an_object_that_could_not_be_written_is_not_finished() {
        let dir = private_directory();
        let (repository, name) = (open(&dir), name());
        let mut object = repository.begin(&name, 1, true).unwrap();
        object.file = File::open(dir.path().join(&object.unfinished)).unwrap();
        object.write(b"lost").unwrap_err();
        let refused = Box::new(object).finish().unwrap_err();
        assert_eq!(refused.source.to_string(), "writing it failed before");
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
    }

    #[test]
    fn what_is_not_finished_goes_with_its_writer_or_is_swept() {
        let dir = private_directory();
        let repository = open(&dir);
        drop(repository.replace(&name(), 1).unwrap());
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
        std::mem::forget(repository.replace(&name(), 1).unwrap());
        fs::write(dir.path().join(".other.new"), "").unwrap();
        assert_eq!(repository.sweep().unwrap().objects, 1);
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
    }

    #[test]
    fn a_sweep_passes_over_what_its_writer_removes_meanwhile() {
        let dir = private_directory();
        let repository = open(&dir);
        let sweeps = std::sync::atomic::AtomicBool::new(true);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while sweeps.load(Ordering::Relaxed) {
                    let _unfinished: Vec<_> =
                        (0..8).map(|_| repository.replace(&name(), 1).unwrap()).collect();
                }
            });
            let swept: Result<Vec<_>> = (0..2000).map(|_| repository.sweep()).collect();
            sweeps.store(false, Ordering::Relaxed);
            swept.unwrap();
        });
    }

    #[test]
    fn who_deletes_is_alone() {
        let dir = private_directory();
        let repository = open(&dir);
        let shared = [repository.hold(Hold::Read).unwrap(), repository.hold(Hold::Write).unwrap()];
        assert!(repository.hold(Hold::AloneOrNot).unwrap().is_none());
        drop(shared);
        assert!(repository.hold(Hold::AloneOrNot).unwrap().is_some());
        assert!(repository.hold(Hold::Alone).unwrap().is_some());
    }

    /// A repair writes objects whose names anyone can know.
    #[test]
    fn a_link_where_an_object_is_to_be_written_is_passed_over() {
        let (dir, outside) = (private_directory(), tempfile::tempdir().unwrap());
        let (repository, name) = (open(&dir), name());
        let theirs = outside.path().join("theirs");
        fs::write(&theirs, "theirs").unwrap();
        let next = COUNT.load(Ordering::Relaxed);
        for count in next..next + 100 {
            let planted = format!(".{name}.{}-{count}{UNFINISHED}", std::process::id());
            symlink(&theirs, dir.path().join(planted)).unwrap();
        }
        symlink(&theirs, dir.path().join(name.to_string())).unwrap();
        let mut object = repository.replace(&name, 1).unwrap();
        object.write(b"ours").unwrap();
        object.finish().unwrap();
        assert_eq!(fs::read(&theirs).unwrap(), b"theirs");
        assert_eq!(fs::read(dir.path().join(name.to_string())).unwrap(), b"ours");
        assert!(fs::symlink_metadata(dir.path().join(name.to_string())).unwrap().is_file());
    }

    #[test]
    fn only_files_that_a_writer_has_left_are_swept() {
        let (dir, name) = (private_directory(), name());
        let repository = open(&dir);
        let at = |by: &str| dir.path().join(format!(".{name}.{by}{UNFINISHED}"));
        fs::write(at("1-2"), "").unwrap();
        for others in ["x", "1", "1-", "-2", "1-x", "1-2-3"] {
            fs::write(at(others), "").unwrap();
        }
        symlink("/nowhere", at("1-3")).unwrap();
        fs::create_dir(at("1-4")).unwrap();
        assert_eq!(repository.sweep().unwrap().objects, 1);
        assert!(!at("1-2").exists());
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 8);
    }

    /// A FIFO that was waited for would make this test hang.
    #[test]
    fn what_is_no_regular_file_is_neither_opened_nor_locked() {
        let (dir, outside, name) = (private_directory(), tempfile::tempdir().unwrap(), name());
        let repository = open(&dir);
        let theirs = outside.path().join("theirs");
        let file_names = [name.to_string(), LOCK.to_owned()];
        let holds = [Hold::Read, Hold::Write, Hold::Alone, Hold::AloneOrNot];
        let plant: [&dyn Fn(&Path); 4] = [
            &|at| symlink(&theirs, at).unwrap(),
            &|at| mknodat(CWD, at, FileType::Fifo, Mode::RWXU, 0).unwrap(),
            &|at| mknodat(CWD, at, FileType::Socket, Mode::RWXU, 0).unwrap(),
            &|at| fs::create_dir(at).unwrap(),
        ];
        for (kind, plant) in plant.into_iter().enumerate() {
            file_names.iter().for_each(|name| plant(&dir.path().join(name)));
            let tried = std::iter::once(repository.open(&name).err())
                .chain(holds.map(|how| repository.hold(how).err()));
            let said: Vec<String> =
                tried.map(|error| error.map_or_else(String::new, |error| error.source.to_string())).collect();
            assert!(said.iter().all(|said| said.contains("is not a regular file")), "{kind}: {said:?}");
            assert_eq!(repository.list("").unwrap().len(), 1, "{kind}");
            for name in &file_names {
                let at = dir.path().join(name);
                fs::remove_file(&at).or_else(|_| fs::remove_dir(&at)).unwrap();
            }
        }
        assert!(!theirs.exists());
    }

    #[test]
    fn a_file_or_nothing_is_no_repository() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("file"), "").unwrap();
        assert!(DirectoryRepository::open(&dir.path().join("file"), ObjectName::is_valid).is_err());
        assert!(DirectoryRepository::open(&dir.path().join("nothing"), ObjectName::is_valid).is_err());
    }
}
