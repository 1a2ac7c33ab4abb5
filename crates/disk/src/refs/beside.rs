//! Images that stand on a file, looked for when that file is opened for writing.
//!
//! Opening must stay cheap: only the file's own directory is read, without those below it, and of the files there not those of the
//! disk's own chain, which cannot stand on its top. What was read is remembered for a moment, as a server opens many disks of one
//! directory in a row. Disks elsewhere are known by what they told ([`crate::refs::back_refs`]).

use std::collections::{HashMap, HashSet};
use std::ffi::{OsStr, OsString};
use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime};

use parking_lot::Mutex;
use rustix::fs::FileType;
use vmstrata_store::{Directory, FileId, Gate};

use super::users::{Users, below};
use crate::opener::{LocalFiles, Opener as _, directory_of};

/// For how long a directory that was not changed meanwhile counts as read. Changing a header in place does not change it.
const REMEMBERED: Duration = Duration::from_secs(1);
/// A slow file system holds up an opening for no longer than this.
const PATIENCE: Duration = Duration::from_secs(2);

/// What the images of directories name as their backing files.
#[derive(Debug, Default)]
pub(crate) struct Beside(Mutex<HashMap<PathBuf, Read>>);

#[derive(Debug)]
struct Read {
    changed: SystemTime,
    at: Instant,
    below: HashMap<OsString, Vec<PathBuf>>,
}

impl Beside {
    /// An image that stands on the file `file` at `path`, whose chain goes on with the files `chain`.
    ///
    /// # Errors
    /// A directory that cannot be read.
    pub(crate) fn standing_on<'a>(
        &self,
        (path, file): (&Path, FileId),
        chain: impl Iterator<Item = &'a Path>,
    ) -> io::Result<Option<PathBuf>> {
        let path = match path.canonicalize() {
            Ok(path) => path,
            // A file that is in memory, or was moved away since it was opened, has nothing beside it.
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(error),
        };
        let directory = directory_of(&path);
        let in_directory = |path: &&Path| directory_of(path).canonicalize().is_ok_and(|dir| dir == directory);
        // Neighbours in a chain mostly lie in one directory: each other one is looked up once.
        let mut looked = HashMap::new();
        let mut is_here = |path: &&Path| {
            *looked.entry(path.parent().map(Path::to_owned)).or_insert_with(|| in_directory(path))
        };
        let chain: HashSet<&OsStr> = chain.filter(|path| is_here(path)).filter_map(Path::file_name).collect();
        if let Some(image) = self.look(&directory, &path, file, &chain)? {
            return Ok(Some(image));
        }
        let mut users = Users::default();
        users.follow_back_refs([&*path].into_iter());
        Ok(users.of(file).cloned())
    }

    fn look(
        &self,
        directory: &Path,
        path: &Path,
        file: FileId,
        chain: &HashSet<&OsStr>,
    ) -> io::Result<Option<PathBuf>> {
        let changed = directory.metadata()?.modified()?;
        let begun = Instant::now();
        let mut read = self.0.lock();
        read.retain(|_, read| read.at.elapsed() < REMEMBERED);
        let read = read
            .entry(directory.to_owned())
            .and_modify(|read| {
                if read.changed != changed {
                    read.below.clear();
                    (read.changed, read.at) = (changed, begun);
                }
            })
            .or_insert_with(|| Read { changed, at: begun, below: HashMap::new() });
        for entry in Directory::open(directory)?.entries()? {
            let (entry, kind) = entry?;
            if kind != FileType::RegularFile
                || chain.contains(entry.name())
                || Some(entry.name()) == path.file_name()
            {
                continue;
            }
            let below = read
                .below
                .entry(entry.name().to_owned())
                .or_insert_with(|| below(&entry.path()).unwrap_or_default());
            // Hard links aside, it is named by its name; the file is asked for only then.
            let is_it = |named: &PathBuf| {
                named.file_name() == path.file_name()
                    && LocalFiles.identity(named, &Gate::unrestricted()).is_ok_and(|found| found.file == file)
            };
            if below.iter().any(is_it) {
                return Ok(Some(entry.path()));
            }
            if begun.elapsed() > PATIENCE {
                tracing::warn!(file = %path.display(), "not all images beside it were looked at: the file system is slow; make sure that none stands on it");
                break;
            }
        }
        Ok(None)
    }
}
