//! Back-references: which disks in other directories stand on a layer.
//!
//! ```text
//!   /golden/web.v7.qcow2                                           the layer
//!   /golden/.web.v7.qcow2.clones/ci-42.qcow2.9d01… ──► /vms/ci-42.qcow2   symbolic link to a disk
//! ```
//!
//! Images beside a layer are found by looking at them ([`super::users`]); images anywhere cannot be. So a disk that is
//! made on a layer in another directory, or opened for writing there, leaves a link beside the layer. A command that would
//! remove or change the layer follows the links. A disk that lets go of layers leaves links for those that stay.
//!
//! Who stands on a published layer of a tiered disk has a pin in its repository instead.
//!
//! A link alone keeps nothing: the disk that it names must still stand on the layer. A disk without a link, because a stock
//! tool made it or the layer's directory could not be written, is known by its locks only, while it is in use.
//!
//! A hold on the layer's own state ([`crate::snapshots::hold`]) lies in the same directory: `hold.TAG`, which leads to `NAME@TIME`, no
//! path.

use std::io;
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};

use vmstrata_qcow2::SnapshotInfo;
use vmstrata_qcow2::snapshot_info::is_snapshot_name;
use vmstrata_store::{Directory, Place};

use crate::error::{IoContext as _, Result};
use crate::names::{beside_name, is_published, short_hash};
use crate::opener::directory_of;

const SUFFIX: &str = ".clones";
/// How the name of a hold begins.
const HOLD: &str = "hold.";

/// A disk that stands on a layer.
#[derive(Clone, Debug)]
pub(crate) struct BackRef {
    /// The link beside the layer.
    link: Place,
    /// The disk.
    pub(crate) disk: PathBuf,
}

/// The directory of the links.
fn directory(layer: &Path) -> io::Result<Place> {
    let place = Place::of(layer)?;
    Ok(place.directory().place(beside_name(place.name(), SUFFIX)))
}

/// Records that the disk at `disk` stands on `layer`. On stable storage when this returns.
///
/// # Errors
/// Whatever the host reports, such as a directory that may not be written.
pub(crate) fn record(layer: &Path, disk: &Path) -> Result<()> {
    let made = || real(disk).and_then(|disk| link(layer, &link_name(&disk), &disk));
    let back_ref = made().while_trying("record that a disk stands on the layer");
    back_ref.map(|_| ()).map_err(|error| error.in_file(layer))
}

/// Makes a link in the layer's directory of links; returns whether it was not there. On stable storage when this returns.
fn link(layer: &Path, name: &str, target: &Path) -> io::Result<bool> {
    let place = directory(layer)?;
    let made = is_new(place.create_directory(0o777))?;
    let links = place.open_directory()?;
    let linked = is_new(links.place(name).create_link(target))?;
    if made || linked {
        links.sync()?;
        place.directory().sync()?;
    }
    Ok(linked)
}

/// Holds the layer, which is the snapshot `info`, under `tag`. Returns whether there was no such hold.
///
/// # Errors
/// Whatever the host reports, such as a directory that may not be written.
pub(crate) fn hold(layer: &Path, tag: &str, info: &SnapshotInfo) -> Result<bool> {
    let held = || -> io::Result<bool> {
        if holds(layer, info)?.iter().any(|known| known == tag) {
            return Ok(false);
        }
        // One of a snapshot that is gone has no meaning.
        release_link(layer, tag)?;
        link(layer, &format!("{HOLD}{tag}"), Path::new(&state_text(info)))
    };
    held().while_trying("hold the snapshot").map_err(|error| error.in_file(layer))
}

/// Releases the hold `tag` of the layer. Returns whether there was one.
///
/// # Errors
/// Whatever the host reports.
pub(crate) fn release(layer: &Path, tag: &str) -> Result<bool> {
    release_link(layer, tag).while_trying("release the snapshot").map_err(|error| error.in_file(layer))
}

fn release_link(layer: &Path, tag: &str) -> io::Result<bool> {
    let Some(links) = links_of(layer)? else { return Ok(false) };
    match links.place(format!("{HOLD}{tag}")).remove() {
        Ok(()) => {}
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(false),
        Err(error) => return Err(error),
    }
    links.sync()?;
    // Others may have links there.
    let _ = directory(layer)?.remove_directory();
    Ok(true)
}

/// The tags under which the layer is held as the snapshot `info`, in order.
///
/// # Errors
/// A directory that is there and cannot be read.
pub(crate) fn holds(layer: &Path, info: &SnapshotInfo) -> io::Result<Vec<String>> {
    let state = state_text(info);
    let held = all_holds(layer)?.into_iter().filter(|(_, held)| held.as_os_str() == &*state);
    let mut tags: Vec<String> = held.map(|(tag, _)| tag).collect();
    tags.sort();
    Ok(tags)
}

/// Has the copy of a layer held as the layer is, which is not held any more then.
///
/// # Errors
/// Whatever the host reports: some holds are at both.
pub(crate) fn move_holds(layer: &Path, copy: &Path) -> Result<()> {
    let moved = || -> io::Result<()> {
        let held = all_holds(layer)?;
        for (tag, state) in &held {
            link(copy, &format!("{HOLD}{tag}"), state)?;
        }
        held.iter().try_for_each(|(tag, _)| release_link(layer, tag).map(drop))
    };
    moved().while_trying("move the snapshot's holds").map_err(|error| error.in_file(layer))
}

/// The tag of some hold of the layer, of whatever state.
///
/// # Errors
/// A directory that is there and cannot be read.
pub(crate) fn some_hold(layer: &Path) -> io::Result<Option<String>> {
    Ok(all_holds(layer)?.into_iter().next().map(|(tag, _)| tag))
}

fn all_holds(layer: &Path) -> io::Result<Vec<(String, PathBuf)>> {
    let Some(links) = links_of(layer)? else { return Ok(Vec::new()) };
    let mut found = Vec::new();
    for entry in links.entries()? {
        let (link, _) = entry?;
        let tag = link.name().to_str().and_then(|name| name.strip_prefix(HOLD)).map(str::to_owned);
        // A disk that is called `hold` has an absolute path.
        if let Some(tag) = tag.filter(|tag| is_snapshot_name(tag))
            && let Some(state) = target_of(&link)?
            && !state.is_absolute()
        {
            found.push((tag, state));
        }
    }
    Ok(found)
}

/// What the link of a hold leads to: names are given again, times are not.
fn state_text(info: &SnapshotInfo) -> String {
    format!("{}@{}", info.name, info.taken_ns)
}

/// The layer's directory of links, if there is one.
fn links_of(layer: &Path) -> io::Result<Option<Directory>> {
    match directory(layer).and_then(|place| place.open_directory()) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        links => links.map(Some),
    }
}

/// Records a disk wherever its chain, given by its files from the base up, goes on in another directory. A failure is logged;
/// the disk can be used all the same.
pub(crate) fn record_chain<'a>(disk: &Path, files: impl Iterator<Item = &'a Path>) {
    let files: Vec<&Path> = files.collect();
    for pair in files.windows(2) {
        let [below, above] = pair else { unreachable!("windows of two") };
        if let Err(error) =
            if is_published(below) || is_beside(below, above) { Ok(()) } else { record(below, disk) }
        {
            tracing::info!(disk = %disk.display(), %error, "the disk cannot be recorded beside its backing file: name its directory with --allow-backing when snapshots there are deleted");
        }
    }
}

/// Records the images that a disk lets go of and that stay, given from the one below them on: each in its own name.
pub(crate) fn record_left<'a>(files: impl Iterator<Item = &'a Path>) {
    let files: Vec<&Path> = files.collect();
    files.windows(2).for_each(|pair| record_chain(pair[1], pair.iter().copied()));
}

/// Whether two files are in one directory.
pub(crate) fn is_beside(one: &Path, other: &Path) -> bool {
    let (one, other) = (directory_of(one), directory_of(other));
    one == other || one.canonicalize().is_ok_and(|one| other.canonicalize().is_ok_and(|other| one == other))
}

/// The back-references of a layer, in no order.
///
/// # Errors
/// A directory that is there and cannot be read.
pub(crate) fn of_layer(layer: &Path) -> io::Result<Vec<BackRef>> {
    let Some(links) = links_of(layer)? else { return Ok(Vec::new()) };
    let mut found = Vec::new();
    for entry in links.entries()? {
        let (link, _) = entry?;
        // Skip entries that vmstrata did not make.
        if let Some(disk) = target_of(&link)?
            && link.name() == &*link_name(&disk)
        {
            found.push(BackRef { link, disk });
        }
    }
    Ok(found)
}

/// What a link leads to; `None` where it is gone by now, or is no link.
fn target_of(link: &Place) -> io::Result<Option<PathBuf>> {
    match link.read_link() {
        Err(error) if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::InvalidInput) => {
            Ok(None)
        }
        read => read.map(Some),
    }
}

/// Removes the back-references of a layer that goes.
pub(crate) fn remove_all(layer: &Path) {
    for back_ref in of_layer(layer).unwrap_or_default() {
        let _ = back_ref.link.remove();
    }
    if let Ok(place) = directory(layer) {
        let _ = place.remove_directory();
    }
}

/// Removes the back-reference of an image that is gone.
pub(crate) fn remove(layer: &Path, image: &Path) {
    let Ok(real) = real(image) else { return };
    for back_ref in of_layer(layer).unwrap_or_default().into_iter().filter(|back_ref| back_ref.disk == real) {
        let _ = back_ref.link.remove();
    }
}

/// A disk's path without links, whether or not it is there.
fn real(disk: &Path) -> io::Result<PathBuf> {
    Ok(directory_of(disk).canonicalize()?.join(disk.file_name().unwrap_or_default()))
}

/// Readable, and different for disks of one name in different directories.
fn link_name(disk: &Path) -> String {
    let name = disk.file_name().unwrap_or_default().to_string_lossy();
    // A file's name has 255 bytes at most.
    let short: String = name.chars().take(50).collect();
    format!("{short}.{}", short_hash(disk.as_os_str().as_bytes()))
}

/// Whether it was made just now; what is there already is no error.
fn is_new(made: io::Result<()>) -> io::Result<bool> {
    match made {
        Ok(()) => Ok(true),
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(false),
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn back_refs_are_known_until_the_layer_is_gone() {
        let root = tempfile::tempdir().unwrap();
        let root = root.path().canonicalize().unwrap();
        let layer = root.join("golden/web.v7.qcow2");
        let disks = [root.join("a/ci.qcow2"), root.join("b/ci.qcow2")];
        for dir in ["golden", "a", "b"] {
            std::fs::create_dir(root.join(dir)).unwrap();
        }
        assert!(of_layer(&layer).unwrap().is_empty());
        for disk in disks.iter().chain(&disks) {
            record(&layer, disk).unwrap();
        }
        let mut disks_found: Vec<PathBuf> =
            of_layer(&layer).unwrap().into_iter().map(|back_ref| back_ref.disk).collect();
        disks_found.sort();
        assert_eq!(disks_found, disks);
        assert!(of_layer(&layer.with_file_name("web.v8.qcow2")).unwrap().is_empty());
        remove_all(&layer);
        assert_eq!(std::fs::read_dir(root.join("golden")).unwrap().count(), 0);
    }

    #[test]
    fn a_hold_is_of_one_state_and_is_no_back_ref() {
        let root = tempfile::tempdir().unwrap();
        let layer = root.path().join("web.mon.qcow2");
        let info = |taken_ns| SnapshotInfo { name: "mon".to_owned(), taken_ns, ..SnapshotInfo::default() };
        assert!(!release(&layer, "backup").unwrap());
        assert!(hold(&layer, "backup", &info(1)).unwrap());
        assert!(!hold(&layer, "backup", &info(1)).unwrap(), "it is held already");
        assert!(hold(&layer, "audit", &info(1)).unwrap());
        // A disk whose link begins as a hold's does.
        record(&layer, &root.path().join("hold.qcow2")).unwrap();
        assert_eq!(holds(&layer, &info(1)).unwrap(), ["audit", "backup"]);
        assert_eq!(of_layer(&layer).unwrap().len(), 1);
        assert!(holds(&layer, &info(2)).unwrap().is_empty(), "another snapshot of that name");
        assert!(hold(&layer, "backup", &info(2)).unwrap());
        assert_eq!(holds(&layer, &info(1)).unwrap(), ["audit"]);
        for tag in ["audit", "backup"] {
            assert!(release(&layer, tag).unwrap());
        }
        remove_all(&layer);
        assert_eq!(std::fs::read_dir(root.path()).unwrap().count(), 0);
    }

    #[test]
    fn a_chain_tells_where_it_leaves_a_directory() {
        let root = tempfile::tempdir().unwrap();
        let path = |name: &str| root.path().join(name);
        for dir in ["golden", "web"] {
            std::fs::create_dir(path(dir)).unwrap();
        }
        let files = ["golden/a", "golden/b", "web/c", "web/d"].map(path);
        record_chain(&files[3], files.iter().map(PathBuf::as_path));
        let counts = files.each_ref().map(|file| of_layer(file).unwrap().len());
        assert_eq!(counts, [0, 1, 0, 0]);
    }
}
