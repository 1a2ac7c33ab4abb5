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
//! ([`super::remove`]), and it is that file still. A note names no files in other directories: those stay after a crash.
//!
//! Invariant: before a file goes, the header that does not lead to it any more is on stable storage.

mod intents;

use std::path::{Path, PathBuf};

use vmstrata_store::FileId;

pub(super) use self::intents::{Intent, LeftNote, NOTES, is_file, left_note_path};
use self::intents::{Intents, atomic_file_of, identity, intents_path, remove_intents};
use super::remove::{Dropped, Removal, Wanted, remove};
use crate::atomic_file::{flush_directory, flush_file};
use crate::chain::OpenOptions;
use crate::error::Result;
use crate::opener::directory_of;
use crate::refs::{self, ChainFile, Kept, LocalHolders, Users, back_refs};

/// Notes that these files go once `target` does not stand on them any more, as far as they lie beside the disk.
///
/// # Errors
/// Whatever the host reports. The note is then as it was.
pub(crate) fn announce(disk: &Path, target: FileId, files: &[Dropped]) -> Result<()> {
    let Some(place) = intents_path(disk) else { return Ok(()) };
    let files = intents_beside(disk, files.iter().map(|file| file.path.as_path()));
    if files.is_empty() {
        return Ok(());
    }
    Intents { target: (target.dev, target.ino), files, waiting: waiting(disk) }.replace(&place)
}

/// Notes that `draft`, which is about to get the name `named` beside the disk, may go unless the disk stands on it.
///
/// # Errors
/// As [`announce`].
pub(crate) fn note_draft(disk: &Path, draft: &Path, named: &Path) -> Result<()> {
    let (Some(place), Some(draft), Some(name)) = (intents_path(disk), Intent::of(draft), named.file_name())
    else {
        return Ok(());
    };
    let mut note = Intents::of(disk).unwrap_or_default();
    note.waiting.push(draft.named(name));
    note.replace(&place)
}

/// Those of the files that lie beside the disk and can be examined.
pub(super) fn intents_beside<'a>(disk: &Path, files: impl Iterator<Item = &'a Path>) -> Vec<Intent> {
    files.filter(|path| back_refs::is_beside(path, disk)).filter_map(Intent::of).collect()
}

/// The files that wait, by the disk's note.
pub(super) fn waiting(disk: &Path) -> Vec<Intent> {
    Intents::of(disk).map(|note| note.waiting).unwrap_or_default()
}

/// Replaces the note by one of the files that may go later, as far as they lie beside the disk.
pub(crate) fn leave<'a>(disk: &Path, later: impl Iterator<Item = &'a Path>) {
    let Some(place) = intents_path(disk) else { return };
    let waiting = intents_beside(disk, later);
    if waiting.is_empty() {
        return remove_intents(&place);
    }
    let note = Intents { target: (0, 0), files: Vec::new(), waiting };
    if let Err(error) = note.replace(&place) {
        tracing::warn!(%error, "files of dropped layers stay, and will not be removed later");
    }
}

/// Of files that were kept, those that may go later.
pub(crate) fn later(kept: &[(PathBuf, Kept)]) -> impl Iterator<Item = &Path> {
    kept.iter().filter(|(_, why)| why.may_end()).map(|(path, _)| path.as_path())
}

/// The files that wait and that the disk does not stand on.
pub(crate) fn waiting_of(disk: &Path, chain: &[ChainFile]) -> Vec<Dropped> {
    let mut found = find(&directory_of(disk), &waiting(disk));
    found.retain(|dropped| chain.iter().all(|link| link.file != dropped.file));
    found
}

/// Forgets those of the files that wait that are gone. What an interrupted merge left stays noted. The caller holds the disk's
/// writer's lock, or the disk is gone.
pub(super) fn forget_gone(disk: &Path) {
    if let Some(note) = Intents::of(disk).filter(|note| note.files.is_empty()) {
        let there = find(&directory_of(disk), &note.waiting);
        leave(disk, there.iter().map(|file| file.path.as_path()));
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
            remove_intents(&place);
            return Ok(());
        };
        if note.files.is_empty() {
            return Ok(());
        }
        let (left, chain) = left(disk, &note, open)?;
        let kept = if left.is_empty() {
            Vec::new()
        } else {
            let mut users = Users::standing_on(&chain, disk, open);
            users.follow_back_refs(left.iter().map(|layer| layer.path.as_path()));
            let by_others = here.is_used_by_others(&users, &chain);
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
        leave(disk, later(&kept).chain(waiting.iter().map(|file| file.path.as_path())));
        Ok(())
    });
    if let Err(error) = swept {
        tracing::warn!(note = %place.display(), %error, "what an interrupted merge left stays");
    }
}

/// The files that are still what they were and that the disk does not stand on, for good: newest first; and what it stands on.
fn left(disk: &Path, note: &Intents, open: &OpenOptions) -> Result<(Vec<Dropped>, Vec<ChainFile>)> {
    let chain = refs::chain_files(disk, open, &*open.opener)?;
    let mut left = find(&directory_of(disk), &note.files);
    left.retain(|dropped| chain.iter().all(|link| link.file != dropped.file));
    let target = chain.iter().find(|link| (link.file.dev, link.file.ino) == note.target);
    let Some(target) = target.filter(|_| !left.is_empty()) else { return Ok((Vec::new(), chain)) };
    // The header that a killed process wrote may be in the page cache alone, and so may the name that it gave.
    flush_file(&target.path)?;
    flush_directory(&target.path)?;
    Ok((left, chain))
}

/// Those of the files that are in the directory, and still what they were.
pub(super) fn find(directory: &Path, files: &[Intent]) -> Vec<Dropped> {
    let is_there = |noted: &&Intent| {
        let name = Path::new(&noted.name);
        let is_beside = name.file_name() == Some(name.as_os_str());
        is_beside && identity(&directory.join(name)).is_ok_and(|found| noted.is(&found))
    };
    let dropped = |noted: &Intent| Dropped {
        is_part: false,
        path: directory.join(&noted.name),
        file: FileId { dev: noted.dev, ino: noted.ino },
        is_own_snapshot: true,
        is_beside: true,
    };
    files.iter().filter(is_there).map(dropped).collect()
}
