//! Orphans: files of layers that a disk does not stand on any more and that were left where they are, and their removal when asked.
//!
//! ```text
//!   revert, merge --keep-files ──► noted (.DISK.left) ──┐
//!   merge, somebody needs them ──► noted (.DISK.dropped)┴─► listed ──► removed by `collect`, if nothing stands on them
//!   a name of the disk's snapshots, noted nowhere ────────► listed, and kept
//! ```
//!
//! What a header says of an image is no proof that it was let go of: a copy of a disk, or what `revert --keep` kept, looks the same. So
//! letting go of a layer notes it, as the very file it is, beside the disk. Only such a file is ever removed, and only if it has not
//! been changed since, the disk does not stand on it, no image does and no disk that told, nothing holds it, and no process has it
//! open. All else is listed with the reason why it stays.
//!
//! The note decides nothing more than that it may be asked for: who can forge it can remove the files anyway. It names files of its own
//! directory only. Only the disk's writer writes it.

use std::collections::HashSet;
use std::ffi::OsStr;
use std::io;
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};

use rustix::fs::FileType;
use vmstrata_qcow2::snapshot_info::is_snapshot_name;
use vmstrata_store::{Directory, FileId};

use super::cleanup::{self, Intent, LeftNote, find, is_file, left_note_path, waiting};
use super::remove::{Dropped, Removal, Wanted, foresee, remove};
use crate::atomic_file::flush_directory;
use crate::chain::OpenOptions;
use crate::error::{IoContext as _, Result};
use crate::names::stem;
use crate::opener::directory_of;
use crate::refs::{ChainFile, Kept, LocalHolders, Users, allocated_bytes, chain_files};
use crate::snapshots::lock_if_free;

/// A file that a disk does not stand on any more.
#[derive(Clone, Debug)]
pub struct Orphan {
    /// The file.
    pub path: PathBuf,
    /// The snapshot whose name its file name has.
    pub name: Option<String>,
    /// Bytes of the host's storage that it takes, and the index beside it.
    pub allocated_bytes: u64,
    /// Why it stays; `None` for one that can go, or is gone.
    pub kept: Option<Kept>,
}

impl Orphan {
    fn of(disk: &Path, path: PathBuf, kept: Option<Kept>) -> Self {
        let name = path.file_name().and_then(|file| snapshot_name(disk, file)).map(str::to_owned);
        let allocated_bytes = allocated_bytes(&path);
        Self { path, name, allocated_bytes, kept }
    }
}

/// How orphans are looked at.
#[derive(Clone, Debug, Default)]
pub struct CollectOptions {
    /// How the disk is to be looked at. Files in its directories are looked at for those that stand on orphans.
    pub open: OpenOptions,
    /// As for merging.
    pub forget_missing: bool,
}

/// The orphans of the disk at `disk`, which may be in use, or gone.
///
/// # Errors
/// A chain or a directory that cannot be read.
pub fn orphans(disk: &Path, options: &CollectOptions) -> Result<Vec<Orphan>> {
    go_through(disk, options, false)
}

/// Removes the orphans of the disk that can go; returns all there were, with why those that are left stay.
///
/// # Errors
/// A chain or a directory that cannot be read; a directory that cannot be flushed after something was removed.
pub fn collect(disk: &Path, options: &CollectOptions) -> Result<Vec<Orphan>> {
    let found = go_through(disk, options, true)?;
    if found.iter().any(|orphan| orphan.kept.is_none()) {
        flush_directory(disk)?;
    }
    forget_gone(disk);
    Ok(found)
}

fn go_through(disk: &Path, options: &CollectOptions, removes: bool) -> Result<Vec<Orphan>> {
    let mut search = Search::begin(disk, &options.open)?;
    let in_use = search.is_in_use();
    let left = search.left.iter().map(|file| (file.clone(), false));
    let mut waiting: Vec<_> = left.chain(search.shared.iter().map(|file| (file.clone(), in_use))).collect();
    let mut found = search.unrecorded()?;
    // What a file stands on is needed no more once that file is gone.
    loop {
        let (before, mut stay) = (waiting.len(), Vec::new());
        for (file, by_others) in waiting {
            let orphan = Orphan::of(disk, file.path.clone(), None);
            let (one, wanted) = (std::slice::from_ref(&file), wanted(options, by_others));
            let kept = if removes {
                remove(one, &mut search.users, &wanted).1.pop().map(|(_, why)| why)
            } else {
                foresee(one, &mut search.users, &wanted).pop().flatten()
            };
            match kept {
                None => found.push(orphan),
                kept => stay.push(((file, by_others), Orphan { kept, ..orphan })),
            }
        }
        if stay.len() == before || stay.is_empty() {
            found.extend(stay.into_iter().map(|(_, orphan)| orphan));
            break;
        }
        waiting = stay.into_iter().map(|(file, _)| file).collect();
    }
    found.sort_by(|one, other| one.path.cmp(&other.path));
    Ok(found)
}

fn wanted(options: &CollectOptions, by_others: bool) -> Wanted<'static> {
    let forget_missing = options.forget_missing;
    Wanted { removal: Removal::Snapshots, forget_missing, here: Some(LocalHolders::NOTHING), by_others }
}

/// What is known before a file is looked at.
struct Search {
    disk: PathBuf,
    chain: Vec<ChainFile>,
    /// Intent as left, of which no other process could know as layers of the disk, newest first.
    left: Vec<Dropped>,
    /// Intent as needed by somebody, or left while another process used the disk.
    shared: Vec<Dropped>,
    users: Users,
}

impl Search {
    fn begin(disk: &Path, open: &OpenOptions) -> Result<Self> {
        let chain = match chain_files(disk, open, &*open.opener) {
            Ok(chain) => chain,
            // A disk that is gone stands on nothing.
            Err(_) if is_gone(disk) => Vec::new(),
            Err(error) => return Err(error),
        };
        let note = left_note_path(disk).and_then(|place| LeftNote::read(&place)).unwrap_or_default();
        let directory = directory_of(disk);
        let there = |noted: &[Intent]| -> Vec<Dropped> {
            let found = find(&directory, noted).into_iter();
            found.filter(|dropped| chain.iter().all(|link| link.file != dropped.file)).collect()
        };
        let left = there(&note.left);
        let mut shared = there(&note.shared);
        for waiting in there(&waiting(disk)) {
            if shared.iter().all(|known| known.file != waiting.file) {
                shared.push(waiting);
            }
        }
        shared.retain(|file| left.iter().all(|known| known.file != file.file));
        let mut users = Users::standing_on(&chain, disk, open);
        users.follow_back_refs(left.iter().chain(&shared).map(|file| file.path.as_path()));
        Ok(Self { disk: disk.to_owned(), chain, left, shared, users })
    }

    /// Whether another process has the disk, or one that stands on it: it may know of dropped layers as the disk's.
    fn is_in_use(&self) -> bool {
        !self.shared.is_empty() && self.users.in_use(&self.chain, &LocalHolders::NOTHING, &[]).is_some()
    }

    /// Files with names of the disk's snapshots that are noted nowhere, and that no image stands on.
    fn unrecorded(&self) -> Result<Vec<Orphan>> {
        let known: HashSet<FileId> = self.chain.iter().map(|link| link.file).collect();
        let noted: HashSet<&Path> =
            self.left.iter().chain(&self.shared).map(|file| file.path.as_path()).collect();
        let read = || -> io::Result<Vec<PathBuf>> {
            let mut found = Vec::new();
            for entry in Directory::open(&directory_of(&self.disk))?.entries()? {
                let (place, kind) = entry?;
                if snapshot_name(&self.disk, place.name()).is_none() || kind != FileType::RegularFile {
                    continue;
                }
                let Ok(entry) = place.look() else { continue };
                let path = directory_of(&self.disk).join(place.name());
                let is_known = known.contains(&entry.file()) || noted.contains(path.as_path());
                if entry.is_file() && !is_known && self.users.of(entry.file()).is_none() {
                    found.push(path);
                }
            }
            found.sort();
            Ok(found)
        };
        let found = read().while_trying("read the disk's directory");
        let found = found.map_err(|error| error.in_file(&self.disk))?;
        Ok(found.into_iter().map(|path| Orphan::of(&self.disk, path, Some(Kept::Unrecorded))).collect())
    }
}

fn is_gone(disk: &Path) -> bool {
    disk.symlink_metadata().is_err_and(|error| error.kind() == io::ErrorKind::NotFound)
}

/// The name of the disk's snapshot whose file would be called so.
fn snapshot_name<'a>(disk: &Path, file: &'a OsStr) -> Option<&'a str> {
    let own = stem(disk.file_name()?);
    let rest = str::from_utf8(file.as_bytes().strip_prefix(own.as_bytes())?).ok()?.strip_prefix('.')?;
    let name = rest.strip_suffix(".qcow2").or_else(|| rest.strip_suffix(".raw"))?;
    is_snapshot_name(name).then_some(name)
}

/// Notes that the disk lets go of these layers, given newest first, whose files stay. Those in other directories are not noted. That
/// it cannot be noted is no reason not to let go: then they are listed, and stay.
pub(crate) fn note_left<'a>(disk: &Path, files: impl Iterator<Item = &'a Path>, by_others: bool) {
    let Some(place) = left_note_path(disk) else { return };
    let new = cleanup::intents_beside(disk, files);
    if new.is_empty() {
        return;
    }
    let mut note = LeftNote::read(&place).unwrap_or_default();
    note.retain(|noted| new.iter().all(|new| new.name != noted.name));
    note.retain_there(&directory_of(disk));
    let list = if by_others { &mut note.shared } else { &mut note.left };
    list.splice(0..0, new);
    if let Err(error) = note.replace(&place) {
        tracing::warn!(%error, "files of dropped layers stay that `vmstrata gc` will not remove");
    }
}

/// Lets the notes forget files that are gone, or that are others by now.
fn forget_gone(disk: &Path) {
    // The disk's writer may be about to write them.
    let Some(_lock) = is_gone(disk).then_some(None).or_else(|| lock_if_free(disk).map(Some)) else { return };
    cleanup::forget_gone(disk);
    let Some(place) = left_note_path(disk).filter(|place| is_file(place)) else { return };
    let mut note = LeftNote::read(&place).unwrap_or_default();
    note.retain_there(&directory_of(disk));
    if let Err(error) = note.replace(&place) {
        tracing::debug!(%error, "the note of files left behind stays as it is");
    }
}

/// The disks in a directory of which notes say that there may be orphans.
///
/// # Errors
/// A directory that cannot be read.
pub fn disks_with_orphans(directory: &Path) -> Result<Vec<PathBuf>> {
    let read = || -> io::Result<Vec<PathBuf>> {
        let mut disks = Vec::new();
        for entry in Directory::open(directory)?.entries()? {
            let (place, _) = entry?;
            if place.is_file() {
                disks.extend(noted_disk(place.name()).map(|disk| directory.join(disk)));
            }
        }
        disks.sort();
        disks.dedup();
        Ok(disks)
    };
    read().while_trying("read the directory").map_err(|error: crate::Error| error.in_file(directory))
}

/// The disk whose note is called so.
fn noted_disk(name: &OsStr) -> Option<&OsStr> {
    let name = name.as_bytes().strip_prefix(b".")?;
    let disk = super::cleanup::NOTES.iter().find_map(|suffix| name.strip_suffix(suffix.as_bytes()))?;
    (!disk.is_empty()).then(|| OsStr::from_bytes(disk))
}

/// The files that the note at `note` says are left, if it is one, as far as they are still what they were.
pub fn noted_in(note: &Path) -> Vec<PathBuf> {
    let Some(disk) = note.file_name().and_then(noted_disk) else { return Vec::new() };
    let disk = directory_of(note).join(disk);
    let left = left_note_path(&disk).filter(|place| place == note).and_then(|place| LeftNote::read(&place));
    let noted = match left {
        Some(note) => [note.left, note.shared].concat(),
        None => waiting(&disk),
    };
    find(&directory_of(&disk), &noted).into_iter().map(|file| file.path).collect()
}
