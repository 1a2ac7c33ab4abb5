//! Copies of a disk that were put aside on this host, because another one had taken the disk over.
//!
//! A branch has the epochs that its host did not publish, and what was written after the last. It stands on layers of the
//! repository, which may be gone.

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::fs::{self, DirEntry};
use std::io::{self, ErrorKind};
use std::os::unix::fs::MetadataExt as _;
use std::path::PathBuf;

use vmstrata_disk::snapshot::recorded_in;
use vmstrata_repo::Repository;
use vmstrata_store::{FileId, Holders};

use crate::error::{Error, Result};
use crate::head::{EpochNumber, OwnerId};
use crate::pin::Pin;
use crate::place::{BRANCH, Place, read_record, sync_directory};

/// See the module documentation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Branch {
    /// Its directory.
    pub path: PathBuf,
    /// Whose copy it was, if that can be read.
    pub owner: Option<OwnerId>,
    /// The epochs that it has and that its host is not known to have published.
    pub unpublished: Vec<EpochNumber>,
    /// Bytes that its files take.
    pub bytes: u64,
    /// When it was last written, in nanoseconds since 1970.
    pub written_ns: u64,
}

impl Branch {
    /// Those of a disk, by their names.
    ///
    /// # Errors
    /// Whatever the host reports.
    pub fn all(place: &Place) -> Result<Vec<Self>> {
        let tier = place.tier();
        let entries = match fs::read_dir(tier) {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
            entries => entries.and_then(Iterator::collect::<io::Result<Vec<_>>>),
        };
        let mut prefix = place.local.file_name().unwrap_or_default().to_owned();
        prefix.push(BRANCH);
        let is_branch = |entry: &DirEntry| {
            let name = entry.file_name();
            name.as_encoded_bytes().starts_with(prefix.as_encoded_bytes())
        };
        let mut paths: Vec<PathBuf> = entries
            .map_err(Error::of_file(tier, "look for branches"))?
            .iter()
            .filter(|entry| is_branch(entry))
            .map(DirEntry::path)
            .collect();
        paths.sort();
        paths.into_iter().map(Self::at).collect()
    }

    fn at(path: PathBuf) -> Result<Self> {
        let record = read_record(&path).ok().flatten();
        let published = record.as_ref().and_then(|record| record.published.max(record.base));
        let mut branch = Self {
            owner: record.map(|record| record.owner),
            path: path.clone(),
            unpublished: Vec::new(),
            bytes: 0,
            written_ns: 0,
        };
        let mut epochs = BTreeSet::new();
        for file in files(&path).map_err(Error::of_file(&path, "look into the branch"))? {
            let about = file.metadata().map_err(Error::of_file(&path, "look into the branch"))?;
            branch.bytes += about.blocks() * 512;
            let written_ns = about.mtime() * 1_000_000_000 + about.mtime_nsec();
            branch.written_ns = branch.written_ns.max(u64::try_from(written_ns).unwrap_or_default());
            epochs.extend(recorded_in(&file.path()).and_then(|info| EpochNumber::of(&info.name)));
        }
        branch.unpublished = epochs.into_iter().filter(|epoch| Some(*epoch) > published).collect();
        Ok(branch)
    }

    /// Its name, which `vmstrata tier branches` takes.
    pub fn name(&self) -> OsString {
        self.path.file_name().unwrap_or_default().to_owned()
    }

    /// Deletes it, with all that it alone has, and lets go of what it stands on in the repository, if there is one.
    ///
    /// # Errors
    /// [`Error::Held`]; whatever host and repository report: some of it may then be left.
    pub fn remove(self, repository: Option<&dyn Repository>) -> Result<()> {
        let failed = |action| Error::of_file(&self.path, action);
        let found = files(&self.path).map_err(failed("look into the branch"))?;
        let ids: Vec<FileId> = found.iter().filter_map(|file| FileId::at(&file.path())).collect();
        if !Holders::of(&ids).pids.is_empty() {
            return Err(Error::Held { copy: self.path });
        }
        let parent = self.path.parent().expect("it lies in a directory");
        fs::remove_dir_all(&self.path)
            .and_then(|()| sync_directory(parent))
            .map_err(failed("delete the branch"))?;
        let Some((repository, owner)) = repository.zip(self.owner) else { return Ok(()) };
        let is_own = |pin: &Pin| pin.purpose.is_copy_of(owner);
        Pin::all(repository)?.iter().filter(|pin| is_own(pin)).try_for_each(|pin| pin.release(repository))
    }
}

/// The regular files of a directory.
fn files(dir: &std::path::Path) -> io::Result<Vec<DirEntry>> {
    let mut files = Vec::new();
    for entry in fs::read_dir(dir)? {
        let entry = entry?;
        if entry.file_type()?.is_file() {
            files.push(entry);
        }
    }
    Ok(files)
}
