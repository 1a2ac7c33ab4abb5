//! What a killed process left: a temporary overlay, and perhaps the second name that it gave the active file.
//!
//! Both are named by the overlay alone. A temporary file of this disk is known by its name; the second name is the one
//! that the temporary overlay has as its backing file, if it is a name of the very file that is active. The second name
//! goes first, so that a sweep that is killed itself can be taken up.

use std::path::{Path, PathBuf};

use vmstrata_store::{FileId, Gate};

use super::prepare::{Step, file_at};
use crate::chain::{backing_of, open_layer};
use crate::error::{IoContext as _, Result};
use crate::layer::Format;
use crate::opener::{LocalFiles, Role, directory_of};

/// How the name of a temporary overlay ends.
pub(super) const PURPOSE: &str = "snapshot";

/// Removes what was left of snapshots of the disk at `active`, which is the file `identity`.
///
/// # Errors
/// Whatever the host reports.
pub(super) fn sweep(active: &Path, identity: FileId, on_step: fn(Step)) -> Result<()> {
    let Some(file_name) = active.file_name().and_then(|name| name.to_str()) else { return Ok(()) };
    let directory = directory_of(active);
    for entry in std::fs::read_dir(&directory).while_trying("read the disk's directory")? {
        let entry = entry.while_trying("read the disk's directory")?;
        let is_left = entry.file_name().to_str().is_some_and(|name| is_temporary(name, file_name));
        if is_left && entry.file_type().is_ok_and(|kind| kind.is_file()) {
            let left = entry.path();
            if let Some(second) = second_name(&left, active, identity) {
                on_step(Step::Unlink);
                remove(&second)?;
            }
            on_step(Step::Remove);
            remove(&left)?;
        }
    }
    Ok(())
}

fn remove(path: &Path) -> Result<()> {
    tracing::info!(file = %path.display(), "removed what an interrupted snapshot left");
    std::fs::remove_file(path)
        .while_trying("remove what an interrupted snapshot left")
        .map_err(|e| e.in_file(path))
}

/// Whether `name` is what [`crate::draft::Temporary::named`] calls an overlay of the disk `disk`.
fn is_temporary(name: &str, disk: &str) -> bool {
    let number = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    let middle = name
        .strip_prefix('.')
        .and_then(|name| name.strip_prefix(disk))
        .and_then(|name| name.strip_prefix('.'));
    let middle = middle.and_then(|name| name.strip_suffix(PURPOSE)).and_then(|name| name.strip_suffix('.'));
    middle.and_then(|middle| middle.split_once('-')).is_some_and(|(pid, count)| number(pid) && number(count))
}

/// The second name of the active file that the overlay at `left` was to stand on.
///
/// An overlay that was not finished has none: the name is given after the overlay was flushed.
fn second_name(left: &Path, active: &Path, identity: FileId) -> Option<PathBuf> {
    let file =
        open_layer(left, Role::Inspected, Some(Format::Qcow2), &Gate::unrestricted(), &LocalFiles).ok()?;
    let (second, _) = backing_of(left, file.head.as_ref()).ok()??;
    let is_beside = second.file_name().is_some_and(|name| directory_of(active).join(name) == normal(&second));
    let is_second = is_beside && second.file_name() != active.file_name();
    (is_second && file_at(&second).ok()? == identity).then_some(second)
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
        assert!(is_temporary(".web.qcow2.123-0.snapshot", "web.qcow2"));
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
        ] {
            assert!(!is_temporary(other, "web.qcow2"), "{other}");
        }
    }
}
