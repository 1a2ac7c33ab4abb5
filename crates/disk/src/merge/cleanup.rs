//! Files of dropped layers that nothing leads to any more: those that a killed process did not come to remove, and those that
//! somebody needed.
//!
//! ```text
//!   note written ──► relink ──► files removed ──► note removed
//!                │ killed   │ killed         │ somebody needs some
//!                ▼          ▼                ▼
//!           files stay   files go, at      note of those that wait: they go at a later merge, when
//!                        the next merge,   nobody needs them any more
//!                        snapshot, or
//!                        opening for writing
//! ```
//!
//! The note lies beside the disk and names files beside it that are to go, each as the very file it is and was when it was
//! last written. It decides nothing: a file goes only if the disk does not stand on it, nobody else does
//! ([`super::remove`]), and it is that file still. Nor does a note lead out of its directory, which who forged it can write:
//! dropped layers in other directories have a note there. The disk's own note says which directories these are, and only
//! those are looked into that its backing files may lie in.
//!
//! Invariant: before a file goes, the header that does not lead to it any more is on stable storage.

mod intents;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use vmstrata_store::FileId;

pub(super) use self::intents::{Intent, LeftNote, NOTES, is_file, left_note_path};
use self::intents::{Intents, atomic_file_of, identity, intents_path, intents_path_in, remove_intents};
use super::remove::{Dropped, Removal, Wanted, remove};
use crate::atomic_file::{flush_directory, flush_file};
use crate::chain::OpenOptions;
use crate::error::{IoContext as _, Result};
use crate::opener::{LocalFiles, directory_of};
use crate::refs::{self, Kept, Link, LocalHolders, Users, back_refs};

/// Notes that these files go once `target` does not stand on them any more.
///
/// # Errors
/// Whatever the host reports. The note beside the disk is then as it was, and others lead nowhere.
pub(super) fn announce(disk: &Path, open: &OpenOptions, target: FileId, files: &[Dropped]) -> Result<()> {
    let Some(place) = intents_path(disk) else { return Ok(()) };
    let directory = |path: &Path| directory_of(path).canonicalize().while_trying("find a layer's directory");
    let mut by_directory: BTreeMap<PathBuf, Vec<Intent>> = BTreeMap::new();
    for (position, file) in files.iter().enumerate() {
        if let Some(noted) = Intent::of(&file.path, position)? {
            by_directory.entry(directory(&file.path)?).or_default().push(noted);
        }
    }
    if by_directory.is_empty() {
        return Ok(());
    }
    let waiting = waiting(disk);
    remove_intents_elsewhere(&place, disk, open);
    let (target, files) =
        ((target.dev, target.ino), by_directory.remove(&directory(disk)?).unwrap_or_default());
    let elsewhere = by_directory.keys().filter_map(|path| path.to_str().map(str::to_owned)).collect();
    // The one that leads to the others comes first, so that none stays that nothing leads to.
    Intents { target, files, waiting, elsewhere }.replace(&place)?;
    for (directory, files) in by_directory {
        let Some(place) = intents_path_in(disk, &directory, target) else { continue };
        if let Err(error) =
            (Intents { target, files, waiting: Vec::new(), elsewhere: Vec::new() }).write(&place)
        {
            // A directory that takes no note may not let its files go either.
            tracing::warn!(%error, "killed now, the merge would leave dropped layers there");
        }
    }
    Ok(())
}

/// The files that wait, by the disk's note.
pub(super) fn waiting(disk: &Path) -> Vec<Intent> {
    let note = intents_path(disk)
        .filter(|place| is_file(place))
        .and_then(|place| Intents::read(&place).ok().flatten());
    note.map(|note| note.waiting).unwrap_or_default()
}

/// What could be removed is: notes only those files that may go later, as far as they lie beside the disk.
pub(super) fn leave<'a>(disk: &Path, open: &OpenOptions, later: impl Iterator<Item = &'a Path>) {
    let beside = later.filter(|path| back_refs::is_beside(path, disk)).enumerate();
    let waiting: Vec<Intent> =
        beside.filter_map(|(position, path)| Intent::of(path, position).ok().flatten()).collect();
    if waiting.is_empty() {
        return remove_all_intents(disk, open);
    }
    let Some(place) = intents_path(disk) else { return };
    remove_intents_elsewhere(&place, disk, open);
    let note = Intents { target: (0, 0), files: Vec::new(), waiting, elsewhere: Vec::new() };
    if let Err(error) = note.replace(&place) {
        tracing::warn!(%error, "files of dropped layers stay, and will not be removed later");
    }
}

/// Of files that were kept, those that may go later.
pub(super) fn later(kept: &[(PathBuf, Kept)]) -> impl Iterator<Item = &Path> {
    kept.iter().filter(|(_, why)| why.may_end()).map(|(path, _)| path.as_path())
}

/// The files that wait and that the disk does not stand on.
pub(super) fn waiting_of(disk: &Path, links: &[Link]) -> Vec<Dropped> {
    let mut found = find(&directory_of(disk), &waiting(disk));
    found.retain(|(_, dropped)| links.iter().all(|link| link.file != dropped.file));
    found.into_iter().map(|(_, dropped)| dropped).collect()
}

/// Forgets those of the files that wait that are gone. What an interrupted merge left stays noted. The caller holds the disk's
/// writer's lock, or the disk is gone.
pub(super) fn forget_gone(disk: &Path, open: &OpenOptions) {
    let note = intents_path(disk)
        .filter(|place| is_file(place))
        .and_then(|place| Intents::read(&place).ok().flatten());
    if let Some(note) = note.filter(|note| !note.is_of_killed()) {
        let there = find(&directory_of(disk), &note.waiting);
        leave(disk, open, there.iter().map(|(_, file)| file.path.as_path()));
    }
}

/// Forgets the notes: what they name is gone, or stays.
fn remove_all_intents(disk: &Path, open: &OpenOptions) {
    let Some(place) = intents_path(disk) else { return };
    remove_intents_elsewhere(&place, disk, open);
    remove_intents(&place);
}

/// Of the notes that the one at `place` leads to.
fn remove_intents_elsewhere(place: &Path, disk: &Path, open: &OpenOptions) {
    for place in Intents::read(place).ok().flatten().iter().flat_map(|note| note.places_elsewhere(disk, open))
    {
        remove_intents(&place);
    }
}

/// As [`sweep`], of a disk that this process has not open, but whose writer's lock it has.
pub(crate) fn sweep_files(disk: &Path, open: &OpenOptions) {
    sweep(disk, open, LocalHolders::NOTHING);
}

/// Removes what a killed merge of the disk left, if there is anything. The caller holds the disk's writer's lock, or is its
/// writer, and no merge of it is under way.
pub(crate) fn sweep(disk: &Path, open: &OpenOptions, here: LocalHolders<'_>) {
    let Some(place) = intents_path(disk) else { return };
    remove_intents(&atomic_file_of(&place));
    if !is_file(&place) {
        return;
    }
    let swept = Intents::read(&place).and_then(|note| {
        let Some(note) = note else {
            remove_all_intents(disk, open);
            return Ok(());
        };
        if !note.is_of_killed() {
            return Ok(());
        }
        let (left, links) = left(disk, &note, open)?;
        let kept = if left.is_empty() {
            Vec::new()
        } else {
            let mut users = Users::standing_on(&links, disk, open);
            users.follow_back_refs(left.iter().map(|layer| layer.path.as_path()));
            let by_others = here.is_used_by_others(&users, &links);
            let wanted = Wanted { removal: Removal::All, forget_missing: false, here: Some(here), by_others };
            let (removed, kept) = remove(&left, &mut users, &wanted);
            for file in removed {
                tracing::info!(file = %file.display(), "removed what an interrupted merge left");
            }
            for (file, why) in &kept {
                tracing::warn!(file = %file.display(), %why, "left by an interrupted merge, and stays");
            }
            flush_directory(disk)?;
            kept
        };
        let waiting = find(&directory_of(disk), &note.waiting);
        leave(disk, open, later(&kept).chain(waiting.iter().map(|(_, file)| file.path.as_path())));
        Ok(())
    });
    if let Err(error) = swept {
        tracing::warn!(note = %place.display(), %error, "what an interrupted merge left stays");
    }
}

/// The files that are still what they were and that the disk does not stand on, for good: newest first; and what it stands on.
fn left(disk: &Path, note: &Intents, open: &OpenOptions) -> Result<(Vec<Dropped>, Vec<Link>)> {
    let links = refs::links(disk, open, &LocalFiles)?;
    let elsewhere = note.places_elsewhere(disk, open);
    let read =
        |place: &PathBuf| Intents::read(place).ok().flatten().filter(|found| found.target == note.target);
    let mut left = find(&directory_of(disk), &note.files);
    for place in &elsewhere {
        left.extend(read(place).into_iter().flat_map(|note| find(&directory_of(place), &note.files)));
    }
    left.retain(|(_, dropped)| links.iter().all(|link| link.file != dropped.file));
    left.sort_by_key(|(position, _)| *position);
    let target = links.iter().find(|link| (link.file.dev, link.file.ino) == note.target);
    let Some(target) = target.filter(|_| !left.is_empty()) else { return Ok((Vec::new(), links)) };
    // The header that a killed process wrote may be in the page cache alone, and so may the name that it gave.
    flush_file(&target.path)?;
    flush_directory(&target.path)?;
    Ok((left.into_iter().map(|(_, dropped)| dropped).collect(), links))
}

/// Those of the files that are in the directory, and still what they were; with their positions.
pub(super) fn find(directory: &Path, files: &[Intent]) -> Vec<(usize, Dropped)> {
    let is_there = |noted: &&Intent| {
        let name = Path::new(&noted.name);
        let is_beside = name.file_name() == Some(name.as_os_str());
        is_beside && identity(&directory.join(name)).is_ok_and(|found| noted.is(&found))
    };
    let dropped = |noted: &Intent| Dropped {
        path: directory.join(&noted.name),
        file: FileId { dev: noted.dev, ino: noted.ino },
        is_own_snapshot: true,
        is_beside: true,
    };
    files.iter().filter(is_there).map(|noted| (noted.position, dropped(noted))).collect()
}
