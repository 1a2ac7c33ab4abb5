//! Processes that use a file: known by what they have open, and by their locks.

use std::collections::HashSet;
use std::os::fd::{AsFd as _, BorrowedFd};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use vmstrata_store::{FileId, LocalFile, OpenFiles, OpenStore, Permission, is_held, open_named};

use super::chain_file::ChainFile;
use super::users::Users;
use super::{Holder, holders_of};

/// A process that is being started holds the files of its parent for a moment, and one that was killed its own.
const PATIENCE: Duration = Duration::from_millis(500);

/// What this process itself has to do with files.
#[derive(Clone, Copy)]
pub(crate) struct LocalHolders<'a> {
    /// Whether one of its disks stands on a file.
    pub(crate) needs: &'a dyn Fn(FileId) -> bool,
    /// Its open file, through which its own locks are not seen.
    pub(crate) store: &'a dyn Fn(FileId) -> Option<Arc<OpenStore>>,
}

impl LocalHolders<'_> {
    /// No disk of this process is open; of one it has the writer's lock.
    pub(crate) const NOTHING: LocalHolders<'static> = LocalHolders { needs: &|_| false, store: &|_| None };

    /// Whether another process uses one of a disk's `layers`, or a disk that stands on one. The topmost is this process's own.
    pub(crate) fn is_used_by_others(&self, users: &Users, layers: &[ChainFile]) -> bool {
        let own = layers.last().map(|link| link.file);
        users.in_use(layers, self, own.as_slice()).is_some()
    }
}

impl Users {
    /// Who, beside this process, uses one of `layers`, or a disk that stands on one: `but` are the files that nobody else can
    /// have open.
    pub(crate) fn in_use(
        &self,
        layers: &[ChainFile],
        here: &LocalHolders<'_>,
        but: &[FileId],
    ) -> Option<String> {
        let mut files = self.above(layers);
        files.retain(|file, _| !but.contains(file));
        let set: HashSet<FileId> = files.keys().copied().collect();
        patiently(|| {
            let seen = holders_of(&set).first().map(Holder::to_string);
            seen.or_else(|| {
                let mut locked = files.iter().filter(|(file, path)| is_locked(path, **file, here)).peekable();
                locked.peek()?;
                // A file that was closed to make room for others is open for as long as a request reads it.
                let own = Own::now();
                let other = locked.find(|(file, _)| !own.has_twice(**file, here))?;
                Some(format!("{}, which has {}", Holder::unseen(), other.1.display()))
            })
        })
    }
}

/// Of `layers`, the files that this process has open beside the open file that it knows: those locks look like somebody else's.
pub(crate) fn open_twice(layers: &[ChainFile], here: &LocalHolders<'_>) -> Vec<FileId> {
    let own = Own::now();
    layers.iter().map(|link| link.file).filter(|&file| own.has_twice(file, here)).collect()
}

/// The files that this process has open; `None` where it cannot see that.
struct Own(Option<OpenFiles>);

impl Own {
    fn now() -> Self {
        Self(OpenFiles::own().ok())
    }

    /// Whether it has the file open beside the open file that it knows, or may have.
    fn has_twice(&self, file: FileId, here: &LocalHolders<'_>) -> bool {
        let open = self.0.as_ref().map_or(1, |own| own.count(file));
        open > usize::from((here.store)(file).is_some())
    }
}

/// Another process that has one of `files` open, as far as this user may see it.
pub(crate) fn holder_among(files: &[FileId]) -> Option<String> {
    let files: HashSet<FileId> = files.iter().copied().collect();
    if files.is_empty() {
        return None;
    }
    patiently(|| holders_of(&files).first().map(Holder::to_string))
}

/// Whether someone else has the file open.
pub(crate) fn is_open(path: &Path, file: FileId, here: &LocalHolders<'_>) -> bool {
    let open =
        || (is_locked(path, file, here) || !holders_of(&HashSet::from([file])).is_empty()).then_some(());
    patiently(open).is_some()
}

/// Whether anyone has it locked, but for this process.
fn is_locked(path: &Path, file: FileId, here: &LocalHolders<'_>) -> bool {
    let held = |fd: BorrowedFd<'_>| {
        let permissions = [Permission::ConsistentRead, Permission::Write];
        permissions.iter().any(|&permission| is_held(fd, permission).unwrap_or(true))
    };
    match (here.store)(file) {
        Some(store) => store.local().and_then(LocalFile::raw).is_some_and(held),
        None => open_named(path).is_ok_and(|file| held(file.as_fd())),
    }
}

/// What `look` sees for as long as there is patience.
fn patiently<T>(look: impl Fn() -> Option<T>) -> Option<T> {
    let deadline = Instant::now() + PATIENCE;
    loop {
        let seen = look()?;
        if Instant::now() >= deadline {
            return Some(seen);
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}
