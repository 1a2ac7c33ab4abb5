//! Disks in other directories that stand on a layer, as far as they told.
//!
//! ```text
//!   /golden/web.v7.qcow2                                           the layer
//!   /golden/.web.v7.qcow2.clones/ci-42.qcow2.9d01… ──► /vms/ci-42.qcow2   symbolic link to a disk
//! ```
//!
//! Images beside a layer are found by looking at them ([`crate::merge::users`]); nobody can look everywhere. So whoever makes a
//! disk on a layer in another directory, or opens such a disk for writing, leaves a link beside the layer, and
//! whoever would remove or change the layer follows the links. What a disk lets go of and what stays has links of its own.
//!
//! A link decides nothing but that someone looks: a disk that does not stand on the layer any more does not keep it. The
//! other way around, a disk that has not told, because a stock tool made it or the layer's directory could not be written,
//! is known by its locks only, while it is in use.

use std::io;
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};

use sha2::{Digest as _, Sha256};
use vmstrata_store::Place;

use crate::error::{IoContext as _, Result};
use crate::opener::directory_of;

const SUFFIX: &str = ".clones";

/// What a disk has told.
#[derive(Clone, Debug)]
pub(crate) struct Told {
    /// The link beside the layer.
    link: Place,
    /// The disk.
    pub(crate) disk: PathBuf,
}

/// The directory of the links; `None` for a name that has none.
fn directory(layer: &Path) -> io::Result<Option<Place>> {
    let place = Place::of(layer)?;
    Ok(place.name().to_str().map(|name| place.directory().place(format!(".{name}{SUFFIX}"))))
}

/// Tells those who care for `layer` that the disk at `disk` stands on it. On stable storage when this returns.
///
/// # Errors
/// Whatever the host reports, such as a directory that may not be written.
pub(crate) fn tell(layer: &Path, disk: &Path) -> Result<()> {
    let tell = || -> io::Result<()> {
        let Some(place) = directory(layer)? else { return Ok(()) };
        let disk = real(disk)?;
        let made = is_new(place.create_directory(0o777))?;
        let links = place.open_directory()?;
        let linked = is_new(links.place(link_name(&disk)).create_link(&disk))?;
        if made || linked {
            links.sync()?;
            place.directory().sync()?;
        }
        Ok(())
    };
    tell().while_trying("tell that a disk stands on the layer").map_err(|error| error.in_file(layer))
}

/// Tells of a disk wherever its chain, given by its files from the base up, goes on in another directory. That it cannot be told
/// is no reason not to use the disk, and is said once.
pub(crate) fn tell_of_chain<'a>(disk: &Path, files: impl Iterator<Item = &'a Path>) {
    let files: Vec<&Path> = files.collect();
    for pair in files.windows(2) {
        let [below, above] = pair else { unreachable!("windows of two") };
        if let Err(error) = if is_beside(below, above) { Ok(()) } else { tell(below, disk) } {
            tracing::info!(disk = %disk.display(), %error, "who deletes snapshots there will not know of this disk while it is not in use, unless told by --allow-backing");
        }
    }
}

/// Tells of images that stay and that a disk lets go of, given from the one below them on: each in its own name, as nobody
/// comes to them from the disk any more.
pub(crate) fn tell_of_left<'a>(files: impl Iterator<Item = &'a Path>) {
    let files: Vec<&Path> = files.collect();
    files.windows(2).for_each(|pair| tell_of_chain(pair[1], pair.iter().copied()));
}

/// Whether two files are in one directory.
pub(crate) fn is_beside(one: &Path, other: &Path) -> bool {
    let (one, other) = (directory_of(one), directory_of(other));
    one == other || one.canonicalize().is_ok_and(|one| other.canonicalize().is_ok_and(|other| one == other))
}

/// Who told, in no order.
///
/// # Errors
/// A directory that is there and cannot be read: then anybody may have.
pub(crate) fn who_told(layer: &Path) -> io::Result<Vec<Told>> {
    let links = directory(layer).and_then(|place| place.map(|place| place.open_directory()).transpose());
    let links = match links {
        Ok(Some(links)) => links,
        Ok(None) => return Ok(Vec::new()),
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(error),
    };
    let mut told = Vec::new();
    for entry in links.entries()? {
        let (link, _) = entry?;
        // Skip entries that vmstrata did not make.
        if let Ok(disk) = link.read_link()
            && link.name() == &*link_name(&disk)
        {
            told.push(Told { link, disk });
        }
    }
    Ok(told)
}

/// The layer goes: so does what was told of it.
pub(crate) fn forget(layer: &Path) {
    for told in who_told(layer).unwrap_or_default() {
        let _ = told.link.remove();
    }
    if let Ok(Some(place)) = directory(layer) {
        let _ = place.remove_directory();
    }
}

/// The image at `image` is gone: it stands on the layer no more.
pub(crate) fn take_back(layer: &Path, image: &Path) {
    let Ok(real) = real(image) else { return };
    for told in who_told(layer).unwrap_or_default().into_iter().filter(|told| told.disk == real) {
        let _ = told.link.remove();
    }
}

/// A disk's path without links, whether or not it is there.
fn real(disk: &Path) -> io::Result<PathBuf> {
    Ok(directory_of(disk).canonicalize()?.join(disk.file_name().unwrap_or_default()))
}

/// Readable, and different for disks of one name in different directories.
fn link_name(disk: &Path) -> String {
    let hash = Sha256::digest(disk.as_os_str().as_bytes());
    let name = disk.file_name().unwrap_or_default().to_string_lossy();
    // A file's name has 255 bytes at most.
    let short: String = name.chars().take(50).collect();
    let hash: String = hash[..8].iter().map(|byte| format!("{byte:02x}")).collect();
    format!("{short}.{hash}")
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
    fn who_told_is_known_until_the_layer_is_gone() {
        let root = tempfile::tempdir().unwrap();
        let root = root.path().canonicalize().unwrap();
        let layer = root.join("golden/web.v7.qcow2");
        let disks = [root.join("a/ci.qcow2"), root.join("b/ci.qcow2")];
        for dir in ["golden", "a", "b"] {
            std::fs::create_dir(root.join(dir)).unwrap();
        }
        assert!(who_told(&layer).unwrap().is_empty());
        for disk in disks.iter().chain(&disks) {
            tell(&layer, disk).unwrap();
        }
        let mut told: Vec<PathBuf> = who_told(&layer).unwrap().into_iter().map(|told| told.disk).collect();
        told.sort();
        assert_eq!(told, disks);
        assert!(who_told(&layer.with_file_name("web.v8.qcow2")).unwrap().is_empty());
        forget(&layer);
        assert_eq!(std::fs::read_dir(root.join("golden")).unwrap().count(), 0);
    }

    #[test]
    fn a_chain_tells_where_it_leaves_a_directory() {
        let root = tempfile::tempdir().unwrap();
        let path = |name: &str| root.path().join(name);
        for dir in ["golden", "web"] {
            std::fs::create_dir(path(dir)).unwrap();
        }
        let files = ["golden/a", "golden/b", "web/c", "web/d"].map(path);
        tell_of_chain(&files[3], files.iter().map(PathBuf::as_path));
        let told = files.each_ref().map(|file| who_told(file).unwrap().len());
        assert_eq!(told, [0, 1, 0, 0]);
    }
}
