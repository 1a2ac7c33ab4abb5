//! An ordinary image becomes the first layer in a repository, and its path an overlay on the newest.
//!
//! Nothing is copied: the image gets a second name, in the repository, and is read once for its digest. Its first name leads to it
//! until an overlay takes its place. Where the repository is no directory, the image is shipped, and stays what it is.
//!
//! A clone of a published base gets the base's layers as links, with their ids, so that a host keeps one copy of them for all clones. What the
//! clone itself holds is shipped as the layer above.
//!
//! ```text
//!   golden.qcow2.tier/  base ◄── v1                          desk0.qcow2: the clone
//!   desk0.qcow2.tier/   base ◄── v1 ◄── own                  desk0.qcow2: an overlay on `own`
//!                       └─ links ─┘
//! ```

use std::ffi::OsStr;
use std::fs::{self, Permissions};
use std::io::{self, ErrorKind};
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::{FileExt as _, MetadataExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use vmstrata_disk::{
    AtomicFile, Disk, Format, LayerHead, OpenOptions, Resources, directory_of, is_published, probe_layer,
};
use vmstrata_qcow2::create::new_image;
use vmstrata_qcow2::{CreateOptions, Incompatible, NewBacking};
use vmstrata_repo::{DirectoryRepository, Repository};
use vmstrata_store::FileId;

use crate::dense::ship_state;
use crate::error::{Error, Result};
use crate::group::beside;
use crate::head::{BOOT_NAME, DiskState, Epoch, Object, ObjectId, is_object_name};
use crate::object::adopt;
use crate::place::{Place, sync_directory};
use crate::replica::objects_below;

/// What people and stock tools may do with published files.
const READ_ONLY: u32 = 0o444;

/// Refuses an image that cannot become layers. Returns the published layer that it is a clone of, if it is one.
///
/// # Errors
/// Why not.
pub(crate) fn check_image(place: &Place) -> Result<Option<PathBuf>> {
    let head = probe_layer(&place.path, None)?;
    let is_base = |path: &PathBuf| is_published(path) && path.parent() != Some(&place.repository);
    let base = head.backing_path.clone().filter(is_base);
    let why =
        why_not(&head, base.as_deref()).or_else(|| base.as_ref().and_then(|_| why_not_a_clone(place, &head)));
    why.map_or(Ok(base), |why| Err(place.not_attachable(&why)))
}

fn why_not_a_clone(place: &Place, head: &LayerHead) -> Option<String> {
    let why = if place.elsewhere.is_some() {
        "it is a clone, whose base can only be shared in a directory: flatten the image first"
    } else if place.group_name().is_some() {
        "it is a clone, which is published alone: flatten the image first"
    } else if !head.snapshots.is_empty() || !head.bitmaps.is_empty() {
        "it is a clone with internal snapshots or bitmaps, which would be lost: delete them first"
    } else {
        return None;
    };
    Some(why.to_owned())
}

fn why_not(head: &LayerHead, base: Option<&Path>) -> Option<String> {
    let Some(header) = &head.header else {
        return Some("it is raw: convert it to qcow2 first (`qemu-img convert -O qcow2`)".to_owned());
    };
    if let (Some(name), None) = (&head.backing_name, base) {
        let name = name.to_string_lossy();
        return Some(format!("its backing file {name} is not in the repository: flatten the image first"));
    }
    if header.incompatible.contains(Incompatible::EXTERNAL_DATA) {
        return Some(
            "its data lies in another file: convert it first (`qemu-img convert -O qcow2`)".to_owned(),
        );
    }
    (header.crypt_method != 0).then(|| "it is encrypted".to_owned())
}

/// Gives the image at the disk's path a name in the repository, or ships it where that is no directory, or where it is a clone. Returns what the
/// first epoch has of it, and what keeps others from writing it. A clone's path leads to its layers then, after `pin` has kept them.
///
/// # Errors
/// An image that cannot become layers, or that is in use; whatever the host reports.
pub(crate) fn attach(
    place: &Place,
    repository: &dyn Repository,
    open: &OpenOptions,
    resources: &Arc<Resources>,
    pin: impl FnOnce(&DiskState) -> Result<()>,
) -> Result<(DiskState, Arc<Disk>)> {
    let path = &place.path;
    let base = check_image(place)?;
    // Without `force`: an image that has this one as its backing file would read each new epoch.
    let open = OpenOptions { format: Some(Format::Qcow2), read_only: false, force: false, ..open.clone() };
    // Takes up the journal of a killed writer.
    Disk::open(path, &open, resources)?.close()?;
    // Keeps out other writers.
    let open = OpenOptions { read_only: true, ..open };
    let held = Disk::open(path, &open, resources)?;
    let objects = match base {
        Some(base) => {
            let mut objects = share(place, &base)?;
            let below = objects.last().map(|object| object.id);
            objects.push(ship_state(repository, path, below, &open, resources)?);
            objects
        }
        None if place.elsewhere.is_some() => {
            let open = OpenOptions { format: Some(Format::Qcow2), read_only: true, ..OpenOptions::default() };
            vec![ship_state(repository, path, None, &open, resources)?]
        }
        None => vec![adopt(repository, name_in_repository(place)?)?],
    };
    let state = DiskState { name: place.name(), size: held.size(), objects };
    if state.objects.len() > 1 {
        // Before the clone goes: a successor finds here what its layers are.
        pin(&state)?;
        lead_to(place, state.newest(), state.size)?;
    }
    Ok((state, held))
}

/// Gives the published layer at `newest`, and those that it stands on, names in the disk's own repository. Returns what they are, base first.
///
/// # Errors
/// A base on another file system, or whose repository does not keep the layer; whatever the host reports.
pub(crate) fn share(place: &Place, newest: &Path) -> Result<Vec<Object>> {
    let directory = directory_of(newest);
    let id = newest.file_name().and_then(id_of).expect("published layers have such names");
    let objects = objects_below(&DirectoryRepository::open(&directory, is_object_name)?, id)?;
    for object in &objects {
        for name in [object.id.layer_name(), object.id.companion_name()] {
            let (from, to) = (directory.join(name.as_str()), place.repository.join(name.as_str()));
            match fs::hard_link(&from, &to) {
                // Of an earlier try.
                Err(error)
                    if error.kind() == ErrorKind::AlreadyExists && FileId::at(&from) == FileId::at(&to) => {}
                Err(error) if error.kind() == ErrorKind::CrossesDevices => {
                    return Err(
                        place.not_attachable("its base lies on another file system: flatten the image first")
                    );
                }
                linked => linked.map_err(Error::of_file(&to, "link the base's layer"))?,
            }
        }
    }
    // What guests of the base read when they start, those of its clones read, too.
    let boot = place.repository.join(BOOT_NAME);
    match fs::hard_link(directory.join(BOOT_NAME), &boot) {
        Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::AlreadyExists) => {}
        linked => linked.map_err(Error::of_file(&boot, "link the base's list"))?,
    }
    sync_directory(&place.repository).map_err(Error::of_file(&place.repository, "flush the directory"))?;
    Ok(objects)
}

/// Gives the image at the disk's path the name of a layer as well.
pub(crate) fn name_in_repository(place: &Place) -> Result<ObjectId> {
    let id = ObjectId::draw();
    fs::hard_link(&place.path, place.layer(id))
        .and_then(|()| sync_directory(&place.repository))
        .map_err(Error::of_file(&place.path, "name it in its repository"))?;
    Ok(id)
}

/// A disk that was in use when it became a tiered one: its image is a layer, its path leads there, and nothing is published yet.
pub(crate) struct Moved {
    layer: ObjectId,
    size: u64,
    /// When it was.
    pub(crate) time_ns: u64,
}

impl Moved {
    /// Of a disk of which nothing is published.
    pub(crate) fn find(place: &Place) -> Result<Option<Self>> {
        if place.elsewhere.is_some() {
            return Ok(None);
        }
        let Some(head) = overlay_of(place)? else { return Ok(None) };
        let layer = head.backing_name.as_deref().and_then(id_of);
        let size = head.header.map(|header| header.size);
        let about = fs::metadata(&place.path).map_err(Error::of_file(&place.path, "examine"))?;
        let time_ns = about.mtime() as u64 * 1_000_000_000 + about.mtime_nsec() as u64;
        Ok(layer.zip(size).map(|(layer, size)| Self { layer, size, time_ns }))
    }

    /// Makes the image the first layer: reads it.
    ///
    /// # Errors
    /// Whatever the host or the repository report.
    pub(crate) fn adopt(
        &self,
        place: &Place,
        repository: &dyn Repository,
        open: &OpenOptions,
        resources: &Arc<Resources>,
    ) -> Result<DiskState> {
        let state = |objects| DiskState { name: place.name(), size: self.size, objects };
        if probe_layer(&place.layer(self.layer), None)?.backing_name.is_some() {
            // A clone's, which was pinned.
            return Ok(state(objects_below(repository, self.layer)?));
        }
        // Takes up the journal of a killed writer, by a name that can be written to.
        let (layer, name) = (place.layer(self.layer), beside(&place.path, ".attaching"));
        let linked = match fs::remove_file(&name) {
            Err(error) if error.kind() != ErrorKind::NotFound => Err(error),
            _ => fs::hard_link(&layer, &name),
        };
        linked.map_err(Error::of_file(&name, "make the link"))?;
        let open = OpenOptions { format: Some(Format::Qcow2), read_only: false, force: true, ..open.clone() };
        Disk::open(&name, &open, resources)?.close()?;
        fs::remove_file(&name).map_err(Error::of_file(&name, "remove the link"))?;
        Ok(state(vec![adopt(repository, self.layer)?]))
    }
}

/// The layer of a repository that a file is.
fn id_of(path: &OsStr) -> Option<ObjectId> {
    ObjectId::of(Path::new(path).file_name()?.to_str()?)
}

/// Whether the image at `path` is there, and stands on a layer.
///
/// # Errors
/// A file that cannot be read.
pub(crate) fn stands_on(path: &Path, layer: ObjectId) -> Result<bool> {
    if !path.exists() {
        return Ok(false);
    }
    Ok(probe_layer(path, None)?.backing_name.as_deref().and_then(id_of) == Some(layer))
}

/// Has the image that became the first layer refuse writes by its mode, as all published files do.
///
/// # Errors
/// Whatever the host reports.
pub(crate) fn seal(place: &Place, epoch: &Epoch) -> Result<()> {
    let [first] = &place.state(epoch).objects[..] else { return Ok(()) };
    if place.elsewhere.is_some() {
        return Ok(());
    }
    let layer = place.layer(first.id);
    fs::set_permissions(&layer, Permissions::from_mode(READ_ONLY))
        .map_err(Error::of_file(&layer, "make it read-only"))
}

/// Makes the disk's path lead to an empty overlay on the newest layer of an epoch, unless that lies in no directory.
///
/// # Errors
/// Another image at the path; whatever the host reports.
pub(crate) fn point_at(place: &Place, epoch: &Epoch) -> Result<()> {
    if place.elsewhere.is_some() {
        return Ok(());
    }
    check_own(place, epoch)?;
    let state = place.state(epoch);
    lead_to(place, state.newest(), state.size)
}

/// The same for a layer, whatever is at the path.
///
/// # Errors
/// Whatever the host reports.
pub(crate) fn lead_to(place: &Place, layer: ObjectId, size: u64) -> Result<()> {
    let path = &place.path;
    let below = in_repository(place, layer);
    let draft = AtomicFile::beside(path)?;
    write_overlay(&draft, &below, size)
        .and_then(|()| draft.file.set_permissions(Permissions::from_mode(READ_ONLY)))
        .map_err(Error::of_file(path, "make the overlay"))?;
    Ok(draft.publish(path, true)?)
}

/// Makes a draft an empty overlay of `size` bytes.
pub(crate) fn write_overlay(draft: &AtomicFile, below: &Path, size: u64) -> io::Result<()> {
    let backing =
        NewBacking { name: below.as_os_str().as_bytes().to_vec(), format: Some("qcow2".to_owned()) };
    let options = CreateOptions { backing: Some(backing), ..CreateOptions::new(size) };
    let image = new_image(&options).map_err(io::Error::other)?;
    draft.file.set_len(image.file_len)?;
    image.parts.iter().try_for_each(|(at, bytes)| draft.file.write_all_at(bytes, at.get()))
}

/// The name of a layer, from the directory of the disk's path.
fn in_repository(place: &Place, id: ObjectId) -> std::path::PathBuf {
    let directory = place.repository.file_name().expect("made of a file's name");
    Path::new(directory).join(id.layer_name().as_str())
}

/// Refuses a file at the disk's path that is neither an overlay on its repository nor the image that became a layer.
///
/// # Errors
/// [`Error::Foreign`]; a file that cannot be read.
pub(crate) fn check_own(place: &Place, epoch: &Epoch) -> Result<()> {
    let Some(found) = FileId::at(&place.path) else { return Ok(()) };
    let first = epoch.disk(&place.name()).and_then(|disk| disk.objects.first());
    let first = first.map(|first| place.layer(first.id));
    if first.is_some_and(|first| FileId::at(&first) == Some(found)) {
        return Ok(());
    }
    if is_overlay_of(place)? {
        return Ok(());
    }
    Err(Error::Foreign { path: place.path.clone(), repository: place.repository.clone() })
}

/// Whether the file at the disk's path is an overlay on the disk's repository.
///
/// # Errors
/// A file that cannot be read.
pub(crate) fn is_overlay_of(place: &Place) -> Result<bool> {
    Ok(overlay_of(place)?.is_some())
}

/// The header of such an overlay.
fn overlay_of(place: &Place) -> Result<Option<LayerHead>> {
    let head = probe_layer(&place.path, None)?;
    let directory = place.repository.file_name().map(Path::new);
    let below = head.backing_name.as_ref().and_then(|name| Path::new(name).parent());
    let is_overlay = below.is_some() && below == directory;
    Ok(is_overlay.then_some(head))
}

/// Whether an ordinary image has taken the place of the disk's path: the one with this inode, which does not stand on the
/// repository.
pub(crate) fn is_detached(place: &Place, detaching: Option<u64>) -> Result<bool> {
    let Some(inode) = detaching else { return Ok(false) };
    match fs::metadata(&place.path) {
        Ok(about) => Ok(about.ino() == inode && !is_overlay_of(place)?),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(false),
        Err(error) => Err(Error::of_file(&place.path, "examine")(error)),
    }
}
