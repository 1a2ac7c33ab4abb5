//! What a killed process left: a temporary overlay, and perhaps the second name that it gave the active file.
//!
//! Both are named by the overlay alone. A temporary file of this disk is known by its name; the second name is the one
//! that the temporary overlay has as its backing file or, when a disk goes back and its file is kept, one whose sum is in the
//! overlay's name, if it is a name of the very file that is active. The second name goes first, so that a sweep that is killed
//! itself can be taken up.

use std::ffi::OsStr;
use std::io;
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};

use rustix::fs::FileType;

use vmstrata_store::{FileId, Gate, Place};

use super::prepare::Step;
use crate::chain::{backing_of, open_layer};
use crate::error::{IoContext as _, Result};
use crate::layer::Format;
use crate::names::{HASH_LEN, beside_name, short_hash};
use crate::opener::{LocalFiles, Role, directory_of};

/// How the name of a temporary overlay ends.
const PURPOSE: &str = "snapshot";

/// What a temporary overlay is for, as its name ends: with the sum of the name under which the active file is to be kept. So
/// the note of it goes with the rename that makes the kept file another one than the active.
pub(super) fn purpose(keep: Option<&Path>) -> String {
    let keep = keep.and_then(Path::file_name);
    keep.map_or_else(|| PURPOSE.to_owned(), |name| format!("{}.{PURPOSE}", sum(name)))
}

fn sum(name: &OsStr) -> String {
    short_hash(name.as_bytes())
}

/// Removes what was left of snapshots of the disk at `active`, which is the file `identity`.
///
/// # Errors
/// Whatever the host reports.
pub(crate) fn sweep(active: &Path, identity: FileId, on_step: fn(Step)) -> Result<()> {
    let Some(file_name) = active.file_name() else { return Ok(()) };
    for (overlay, kind) in entries(active)? {
        let Some(left) = Left::parse(overlay.name(), file_name) else { continue };
        if kind == FileType::RegularFile {
            let kept = left.sum.map(|sum| kept(&sum, active, identity)).transpose()?.flatten();
            for second in second_name(&overlay, active, identity).into_iter().chain(kept) {
                on_step(Step::Unlink);
                remove(&second)?;
            }
            on_step(Step::Remove);
            remove(&overlay)?;
        }
    }
    Ok(())
}

/// What lies beside the disk.
fn entries(active: &Path) -> Result<Vec<(Place, FileType)>> {
    let read = || -> io::Result<_> { Place::of(active)?.directory().entries()?.collect() };
    read().while_trying("read the disk's directory").map_err(|error| error.in_file(active))
}

fn remove(file: &Place) -> Result<()> {
    tracing::info!(file = %file.path().display(), "removed what an interrupted snapshot left");
    file.remove()
        .while_trying("remove what an interrupted snapshot left")
        .map_err(|error| error.in_file(&file.path()))
}

fn is(place: &Place, file: FileId) -> bool {
    place.look().is_ok_and(|found| found.file() == file)
}

/// What the name of a temporary overlay says.
#[derive(Debug, PartialEq, Eq)]
struct Left {
    sum: Option<String>,
}

impl Left {
    /// `name`, if it is what [`crate::atomic_file::Temporary::named`] calls an overlay of the disk `disk`.
    fn parse(name: &OsStr, disk: &OsStr) -> Option<Self> {
        let text = name.to_string_lossy();
        let (rest, last) = text.strip_suffix(PURPOSE)?.strip_suffix('.')?.rsplit_once('.')?;
        let is_sum = last.len() == HASH_LEN && last.bytes().all(|byte| byte.is_ascii_hexdigit());
        let (rest, numbers, sum) = if is_sum {
            rest.rsplit_once('.').map(|(rest, all)| (rest, all, Some(last)))?
        } else {
            (rest, last, None)
        };
        let (pid, count) = numbers.split_once('-')?;
        let number = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
        let is_own = beside_name(disk, &text[rest.len()..]) == *name;
        (number(pid) && number(count) && is_own).then(|| Self { sum: sum.map(str::to_owned) })
    }
}

/// The second name with this sum that was given to the active file.
fn kept(wanted: &str, active: &Path, identity: FileId) -> Result<Option<Place>> {
    let is_second = |place: &Place| Some(place.name()) != active.file_name() && sum(place.name()) == wanted;
    let mut places = entries(active)?.into_iter().map(|(place, _)| place);
    Ok(places.find(|place| is_second(place) && is(place, identity)))
}

/// The second name of the active file that the overlay at `left` was to stand on.
///
/// An overlay that was not finished has none: the name is given after the overlay was flushed.
fn second_name(overlay: &Place, active: &Path, identity: FileId) -> Option<Place> {
    let left = overlay.path();
    let file =
        open_layer(&left, Role::Inspected, Some(Format::Qcow2), &Gate::unrestricted(), &LocalFiles).ok()?;
    let (second, _) = backing_of(&left, file.head.as_ref()).ok()??;
    let is_beside = second.file_name().is_some_and(|name| directory_of(active).join(name) == normal(&second));
    let is_second = is_beside && second.file_name() != active.file_name();
    let second = overlay.directory().place(second.file_name()?);
    (is_second && is(&second, identity)).then_some(second)
}

/// `a/./b` as `a/b`, which is how components are compared.
fn normal(path: &Path) -> PathBuf {
    path.components().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_names_that_were_given_to_overlays_of_the_disk_are_taken_for_them() {
        let parse = |name: &str| Left::parse(name.as_ref(), "web.qcow2".as_ref());
        assert_eq!(parse(".web.qcow2.123-0.snapshot"), Some(Left { sum: None }));
        let kept = format!(".web.qcow2.123-0.{}", purpose(Some(Path::new("/a/kept.qcow2"))));
        assert_eq!(parse(&kept), Some(Left { sum: Some(sum("kept.qcow2".as_ref())) }));
        for other in [
            "web.qcow2.123-0.snapshot",
            ".web.qcow2.123-0.new",
            ".web.qcow2.12a-0.snapshot",
            ".web.qcow2.-0.snapshot",
            ".web.qcow2.123.snapshot",
            ".web.qcow2.snapshot",
            ".web.qcow2..snapshot",
            ".web2.qcow2.1-1.snapshot",
            ".my.web.qcow2.1-1.snapshot",
            ".web.qcow2.1-1..snapshot",
            ".web.qcow2.1-1.0123456789abcde.snapshot",
            ".web.qcow2.1-1.0123456789abcdex.snapshot",
        ] {
            assert_eq!(parse(other), None, "{other}");
        }
    }
}
