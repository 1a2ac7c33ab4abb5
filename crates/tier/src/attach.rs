//! An ordinary image becomes the first layer in a repository, and its path an overlay on the newest.
//!
//! Nothing is copied: the image gets a second name, in the repository, and is read once for its digest. Its first name leads to it
//! until an overlay takes its place. Where the repository is no directory, the image is shipped, and stays what it is.

use std::ffi::OsStr;
use std::fs::{self, Permissions};
use std::io::{self, ErrorKind};
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::{FileExt as _, MetadataExt as _, PermissionsExt as _};
use std::path::Path;
use std::sync::Arc;

use vmstrata_disk::{AtomicFile, Disk, Format, LayerHead, OpenOptions, Resources, probe_layer};
use vmstrata_qcow2::create::new_image;
use vmstrata_qcow2::{CreateOptions, Incompatible, NewBacking};
use vmstrata_repo::Repository;
use vmstrata_store::FileId;

use crate::dense::ship_state;
use crate::error::{Error, Result};
use crate::group::beside;
use crate::head::{DiskState, Epoch, ObjectId};
use crate::object::adopt;
use crate::place::{Place, sync_directory};

/// What people and stock tools may do with published files.
const READ_ONLY: u32 = 0o444;

/// Refuses an image that cannot become a layer as it is.
///
/// # Errors
/// Why not.
pub(crate) fn check_image(path: &Path) -> Result<()> {
    let head = probe_layer(path, None)?;
    match why_not(&head) {
        Some(why) => Err(Error::NotAttachable { path: path.to_owned(), why }),
        None => Ok(()),
    }
}

fn why_not(head: &LayerHead) -> Option<String> {
    let Some(header) = &head.header else {
        return Some("it is raw: convert it to qcow2 first (`qemu-img convert -O qcow2`)".to_owned());
    };
    if let Some(name) = &head.backing_name {
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

/// Gives the image at the disk's path a name in the repository, or ships it where that is no directory. Returns what the first epoch has of
/// it, and what keeps others from writing it.
///
/// # Errors
/// An image that cannot become a layer, or that is in use; whatever the host reports.
pub(crate) fn attach(
    place: &Place,
    repository: &dyn Repository,
    open: &OpenOptions,
    resources: &Arc<Resources>,
) -> Result<(DiskState, Arc<Disk>)> {
    let path = &place.path;
    check_image(path)?;
    // Without `force`: an image that has this one as its backing file would read each new epoch.
    let open = OpenOptions { format: Some(Format::Qcow2), read_only: false, force: false, ..open.clone() };
    // Takes up the journal of a killed writer.
    Disk::open(path, &open, resources)?.close()?;
    // Keeps out other writers.
    let held = Disk::open(path, &OpenOptions { read_only: true, ..open }, resources)?;
    let layer = if place.elsewhere.is_some() {
        let open = OpenOptions { format: Some(Format::Qcow2), read_only: true, ..OpenOptions::default() };
        ship_state(repository, path, None, &open, resources)?
    } else {
        adopt(repository, name_in_repository(place)?)?
    };
    Ok((DiskState { name: place.name(), size: held.size(), objects: vec![layer] }, held))
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
        let object = adopt(repository, self.layer)?;
        Ok(DiskState { name: place.name(), size: self.size, objects: vec![object] })
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

/// Has the first layer refuse writes by its mode, as all published files do.
///
/// # Errors
/// Whatever the host reports.
pub(crate) fn seal(place: &Place, epoch: &Epoch) -> Result<()> {
    if place.elsewhere.is_some() {
        return Ok(());
    }
    let layer = place.layer(place.state(epoch).objects[0].id);
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
