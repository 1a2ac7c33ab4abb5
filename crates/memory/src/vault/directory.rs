//! A directory as a home: an object is a file, written under a name of its own and renamed.
//!
//! The file `lock` is held with `flock`: shared by writers and readers, alone by who deletes.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::fs::{FlockOperation, flock, statvfs};

use super::home::{DeviceId, Held, Hold, Home, NewObject, ObjectReader, Stored};
use super::name::ObjectName;

const LOCK: &str = "lock";
const UNFINISHED: &str = ".new";
/// Objects begun by this process.
static COUNT: AtomicU64 = AtomicU64::new(0);

/// A home in a directory.
#[derive(Debug)]
pub struct DirectoryHome {
    path: PathBuf,
    device: DeviceId,
}

impl DirectoryHome {
    /// The home in a directory that exists.
    ///
    /// # Errors
    /// When there is no directory of that name: a disk that is not mounted must not become a directory on another one.
    pub fn open(path: &Path) -> io::Result<Self> {
        let about = fs::metadata(path)?;
        if !about.is_dir() {
            return Err(io::ErrorKind::NotADirectory.into());
        }
        Ok(Self { path: path.to_owned(), device: DeviceId(about.dev()) })
    }

    fn file(&self, name: ObjectName) -> PathBuf {
        self.path.join(name.to_string())
    }

    fn sync_names(&self) -> io::Result<()> {
        File::open(&self.path)?.sync_all()
    }
}

impl Home for DirectoryHome {
    fn describe(&self) -> String {
        self.path.display().to_string()
    }

    fn device(&self) -> DeviceId {
        self.device
    }

    fn free_bytes(&self) -> io::Result<u64> {
        let about = statvfs(&self.path)?;
        Ok(about.f_bavail.saturating_mul(about.f_frsize))
    }

    fn list(&self) -> io::Result<Vec<Stored>> {
        let mut objects = Vec::new();
        for entry in fs::read_dir(&self.path)? {
            let entry = entry?;
            let Some(name) = entry.file_name().to_str().and_then(ObjectName::parse) else { continue };
            match entry.metadata() {
                Ok(about) => objects.push(Stored { name, len: about.len(), copies: 1 }),
                // Deleted since its name was read.
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                Err(error) => return Err(error),
            }
        }
        Ok(objects)
    }

    fn create(&self, name: ObjectName, _copies: u8) -> io::Result<Box<dyn NewObject>> {
        // A name of its own, as another process may be repairing the same object.
        let count = COUNT.fetch_add(1, Ordering::Relaxed);
        let unfinished = self.path.join(format!(".{name}.{}-{count}{UNFINISHED}", std::process::id()));
        let file = OpenOptions::new().write(true).create(true).truncate(true).open(&unfinished)?;
        Ok(Box::new(NewFile { file, unfinished, target: self.file(name), published: false }))
    }

    fn open(&self, name: ObjectName) -> io::Result<Box<dyn ObjectReader>> {
        let file = File::open(self.file(name))?;
        let len = file.metadata()?.len();
        Ok(Box::new(OpenFile { file, len }))
    }

    fn delete(&self, name: ObjectName) -> io::Result<()> {
        match fs::remove_file(self.file(name)) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
            _ => self.sync_names(),
        }
    }

    fn sweep(&self) -> io::Result<usize> {
        let mut swept = 0;
        for entry in fs::read_dir(&self.path)? {
            let entry = entry?;
            let file_name = entry.file_name();
            let name = file_name.to_str().and_then(|name| name.strip_prefix('.')?.strip_suffix(UNFINISHED));
            if name.and_then(|name| ObjectName::parse(name.rsplit_once('.')?.0)).is_some() {
                fs::remove_file(entry.path())?;
                swept += 1;
            }
        }
        Ok(swept)
    }

    fn hold(&self, how: Hold) -> io::Result<Option<Held>> {
        let path = self.path.join(LOCK);
        let opened = OpenOptions::new().write(true).create(true).truncate(false).open(&path);
        // Who only reads can do so from a directory that cannot be written, where nobody deletes either.
        let file = match opened {
            Err(error) if how == Hold::Read && cannot_write(&error) => match File::open(&path) {
                Ok(file) => file,
                Err(_) => return Ok(Some(Box::new(()))),
            },
            other => other?,
        };
        let operation = match how {
            Hold::Read | Hold::Write => FlockOperation::LockShared,
            Hold::Alone => FlockOperation::LockExclusive,
            Hold::AloneOrNot => FlockOperation::NonBlockingLockExclusive,
        };
        match flock(&file, operation) {
            Ok(()) => Ok(Some(Box::new(file))),
            Err(rustix::io::Errno::WOULDBLOCK) if how == Hold::AloneOrNot => Ok(None),
            Err(error) => Err(error.into()),
        }
    }
}

fn cannot_write(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem)
}

struct NewFile {
    file: File,
    unfinished: PathBuf,
    target: PathBuf,
    published: bool,
}

impl NewObject for NewFile {
    fn append(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.file.write_all(bytes)
    }

    fn sync(&mut self) -> io::Result<()> {
        self.file.sync_data()
    }

    fn publish(mut self: Box<Self>) -> io::Result<()> {
        fs::rename(&self.unfinished, &self.target)?;
        self.published = true;
        File::open(self.target.parent().unwrap_or(Path::new(".")))?.sync_all()
    }
}

impl Drop for NewFile {
    fn drop(&mut self) {
        if !self.published {
            // What cannot be removed now is swept later.
            let _ = fs::remove_file(&self.unfinished);
        }
    }
}

struct OpenFile {
    file: File,
    len: u64,
}

impl ObjectReader for OpenFile {
    fn len(&self) -> u64 {
        self.len
    }

    fn read_at(&self, at: u64, into: &mut [u8]) -> io::Result<()> {
        self.file.read_exact_at(into, at)
    }
}

#[cfg(test)]
mod tests {
    use super::super::name::{ObjectKind, SnapshotId};
    use super::*;

    fn name() -> ObjectName {
        ObjectName { owner: SnapshotId::draw(), kind: ObjectKind::Clean }
    }

    #[test]
    fn an_object_appears_when_it_is_published_and_not_before() {
        let dir = tempfile::tempdir().unwrap();
        let home = DirectoryHome::open(dir.path()).unwrap();
        let name = name();
        let mut object = home.create(name, 1).unwrap();
        object.append(b"ab").unwrap();
        object.append(b"c").unwrap();
        object.sync().unwrap();
        assert_eq!(home.list().unwrap(), []);
        object.publish().unwrap();
        assert_eq!(home.list().unwrap(), [Stored { name, len: 3, copies: 1 }]);
        let mut read = [0; 2];
        home.open(name).unwrap().read_at(1, &mut read).unwrap();
        assert_eq!(&read, b"bc");
        home.delete(name).unwrap();
        home.delete(name).unwrap();
        assert_eq!(home.list().unwrap(), []);
    }

    #[test]
    fn what_is_not_finished_goes_with_its_writer_or_is_swept() {
        let dir = tempfile::tempdir().unwrap();
        let home = DirectoryHome::open(dir.path()).unwrap();
        drop(home.create(name(), 1).unwrap());
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
        std::mem::forget(home.create(name(), 1).unwrap());
        fs::write(dir.path().join(".other.new"), "").unwrap();
        assert_eq!(home.sweep().unwrap(), 1);
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
    }

    #[test]
    fn who_deletes_is_alone() {
        let dir = tempfile::tempdir().unwrap();
        let home = DirectoryHome::open(dir.path()).unwrap();
        let shared = [home.hold(Hold::Read).unwrap(), home.hold(Hold::Write).unwrap()];
        assert!(home.hold(Hold::AloneOrNot).unwrap().is_none());
        drop(shared);
        assert!(home.hold(Hold::AloneOrNot).unwrap().is_some());
        assert!(home.hold(Hold::Alone).unwrap().is_some());
    }

    #[test]
    fn a_file_or_nothing_is_no_home() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("file"), "").unwrap();
        assert!(DirectoryHome::open(&dir.path().join("file")).is_err());
        assert!(DirectoryHome::open(&dir.path().join("nothing")).is_err());
    }
}
