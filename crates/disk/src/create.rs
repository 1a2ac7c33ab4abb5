//! Making new images.
//!
//! Place in the data flow: beside the engine; nothing here is used while a disk is served.
//!
//! Invariant: under the image's name there is either what was there before or a whole image, also after a crash
//! or when the file system is full (`draft.rs`).

use std::fs::File;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use vmstrata_qcow2::{CompressionType, LayerRecord, NewBacking, NewImage, RefcountOrder, new_image};
use vmstrata_store::{Access, FileId, FileOptions, FileStore, Gate};
use vmstrata_types::{ClusterBits, MAX_LAYERS};

use crate::access;
use crate::atomic_file::AtomicFile;
use crate::chain::{Qcow2Head, open_described, probe, resolve_name};
use crate::error::{Error, ErrorKind, IoContext as _, Result};
use crate::json_name::Described;
use crate::layer::Format;
use crate::names::disk_name;
use crate::opener::{LocalFiles, Opened, Opener, Role, directory_of};
use crate::refs::{Users, back_refs};

/// What a new image is to be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CreateOptions {
    /// Size of the disk in bytes; `None` takes the backing file's.
    pub size: Option<u64>,
    /// Size of a cluster.
    pub cluster_bits: ClusterBits,
    /// Give each cluster 32 subclusters, which are written one by one; version 3 and clusters of 16 KiB or more only.
    pub subclusters: bool,
    /// Width of refcounts; version 2 has 16 bits.
    pub refcount_order: RefcountOrder,
    /// 2 or 3.
    pub version: u32,
    /// Allow refcount updates to be postponed; version 3 only.
    pub lazy_refcounts: bool,
    /// How compressed clusters will be compressed; version 2 has only zlib.
    pub compression: CompressionType,
    /// The backing file and its format. The name is stored as it is; a relative one is relative to the directory of
    /// the new image.
    pub backing: Option<(PathBuf, Format)>,
    /// Replace what is there already, unless someone is using it.
    pub force: bool,
}

impl CreateOptions {
    /// An overlay of `size` bytes on a qcow2 layer: where it may have subclusters, they are of 4 KiB.
    pub fn overlay(layer: PathBuf, size: u64, subclusters: bool) -> Self {
        Self {
            size: Some(size),
            cluster_bits: ClusterBits::from_size(128 << 10).expect("a power of two"),
            subclusters,
            backing: Some((layer, Format::Qcow2)),
            ..Self::default()
        }
    }
}

impl Default for CreateOptions {
    /// What every tool makes: version 3, 64 KiB clusters, 16-bit refcounts.
    fn default() -> Self {
        Self {
            size: None,
            cluster_bits: ClusterBits::DEFAULT,
            subclusters: false,
            refcount_order: RefcountOrder::DEFAULT,
            version: 3,
            lazy_refcounts: false,
            compression: CompressionType::Zlib,
            backing: None,
            force: false,
        }
    }
}

/// Makes a new qcow2 image at `path`.
///
/// With [`CreateOptions::force`] a symbolic link at `path` is itself replaced.
///
/// # Errors
/// A file that is there already (without `force`), that is locked, that an image stands on, or that is not a regular file (with
/// it); a backing
/// file that cannot be read, is not of the format said, or stands on the very file that is to be replaced; no size;
/// options that the format does not allow; whatever the host reports. `path` is then as it was.
pub fn create(path: &Path, options: &CreateOptions) -> Result<()> {
    create_on(path, options, &LocalFiles)
}

/// As [`create`], on a backing file that is opened by `opener`.
///
/// # Errors
/// As there.
pub fn create_on(path: &Path, options: &CreateOptions, opener: &dyn Opener) -> Result<()> {
    make(path, options, opener).map_err(|error| error.in_file(path))
}

fn make(path: &Path, options: &CreateOptions, opener: &dyn Opener) -> Result<()> {
    // Held until the new image has taken the old one's place.
    let replaced = take_place(path, options.force)?;
    let mut size = options.size;
    let mut backing = None;
    if let Some((name, format)) = &options.backing {
        let size_below =
            check_backing((path, opener), (name, *format), replaced.as_ref().map(|(_, id)| *id))?;
        size = size.or(Some(size_below));
        let name = name.as_os_str().as_bytes().to_vec();
        backing = Some(NewBacking { name, format: Some(format.to_string()) });
    }
    let wanted = vmstrata_qcow2::CreateOptions {
        version: options.version,
        cluster_bits: options.cluster_bits,
        subclusters: options.subclusters,
        size: size.ok_or(ErrorKind::SizeMissing)?,
        refcount_order: options.refcount_order,
        backing,
        lazy_refcounts: options.lazy_refcounts,
        compression_type: options.compression,
        feature_names: true,
        index_room: true,
        // What lies below belongs to the disk it was made by.
        record: options.backing.as_ref().and_then(|(name, _)| disk_name(name)).map(LayerRecord::Foreign),
    };
    // A header without room for that goes without: no record says as much.
    let image = new_image(&wanted).or_else(|error| match wanted.record {
        Some(_) => new_image(&vmstrata_qcow2::CreateOptions { record: None, ..wanted }),
        None => Err(error),
    })?;
    if let Some((name, _)) = &options.backing {
        record_overlay(path, &resolve(path, name)?.path);
    }
    write_new(path, &image, options.force, replaced.is_some())
}

type Replaced = Option<(FileStore, FileId)>;

/// Records the image at `path`, which is made otherwise than by [`create`], beside its backing file in another directory.
pub fn record_overlay(path: &Path, backing: &Path) {
    back_refs::record_chain(path, [backing, path].into_iter());
}

/// Makes sure that a file may be made at `path`; locks the one that is to be replaced.
fn take_place(path: &Path, replace: bool) -> Result<Replaced> {
    if replace { lock_existing(path) } else { refuse_existing(path).map(|()| None) }
}

/// Makes sure that there is nothing at `path`.
///
/// # Errors
/// What is there; whatever the host reports.
pub fn refuse_existing(path: &Path) -> Result<()> {
    match path.symlink_metadata() {
        Ok(_) => Err(Error::io("create the image", io::ErrorKind::AlreadyExists.into())),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(error) => Err(Error::io("create the image", error)),
    }
}

/// Makes sure that no one uses or needs the file that is to be replaced.
fn lock_existing(path: &Path) -> Result<Replaced> {
    let kind = match path.symlink_metadata() {
        Ok(metadata) => metadata.file_type(),
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(Error::io("examine the file to be replaced", error)),
    };
    if kind.is_symlink() {
        return Ok(None);
    }
    if !kind.is_file() {
        return Err(Error::io("replace what is not a regular file", io::ErrorKind::InvalidInput.into()));
    }
    let file = Gate::unrestricted().open(path, Access::ReadWrite)?;
    let options = FileOptions { lock_patience: Duration::ZERO, ..FileOptions::ACTIVE };
    let store = FileStore::new(file, path, &options).map_err(Error::from)?;
    let file = store.identity().while_trying("examine the file to be replaced")?.file;
    let mut users = Users::find(&[directory_of(path)]);
    users.follow_back_refs([path].into_iter());
    match users.of(file) {
        Some(image) => Err(ErrorKind::StoodOn { image: image.clone() }.into()),
        None => Ok(Some((store, file))),
    }
}

/// Opens the backing file; returns its virtual size in bytes.
fn check_backing(
    (path, opener): (&Path, &dyn Opener),
    (name, format): (&Path, Format),
    replaced: Option<FileId>,
) -> Result<u64> {
    // Any bytes are a raw disk, also those of a qcow2 image.
    let named = Described { format: Some(format), ..resolve(path, name)? };
    let top = open_described(&named, Role::Inspected, &Gate::unrestricted(), opener)?;
    top.check_state()?;
    if let Some(replaced) = replaced {
        refuse_loop(named.path, &top.opened, (top.head, opener), replaced)?;
    }
    Ok(top.size)
}

fn resolve(path: &Path, name: &Path) -> Result<Described> {
    resolve_name(path, name.as_os_str())
}

/// Walks down the backing chain for the file that is to be replaced, as far as it can be read.
fn refuse_loop(
    mut path: PathBuf,
    opened: &Opened,
    (mut head, opener): (Option<Qcow2Head>, &dyn Opener),
    replaced: FileId,
) -> Result<()> {
    let mut id = opened.identity.file;
    for earlier in 1..=MAX_LAYERS {
        if id == replaced {
            return Err(Error::from(ErrorKind::Loop { earlier }).in_file(&path));
        }
        let Some(name) = head.take().and_then(|head| head.backing_name) else { return Ok(()) };
        let Ok(below) = resolve_name(&path, &name) else { return Ok(()) };
        path = below.path;
        let Ok(opened) = opener.open(&path, Role::Inspected, &Gate::unrestricted()) else {
            return Ok(());
        };
        id = opened.identity.file;
        head = probe(&*opened.store, opened.identity.len).unwrap_or(None);
    }
    Err(ErrorKind::TooLong.into())
}

/// Makes sure that a file may be made at `path`, or replaced, and makes a draft of it. The lock on what is to be
/// replaced must be held until that is done.
///
/// # Errors
/// A file that is there already (without `replace`), that someone uses, that an image stands on, or that is not a regular file
/// (with it).
pub fn reserve(path: &Path, replace: bool) -> Result<(Option<FileStore>, AtomicFile)> {
    let replaced = take_place(path, replace)?;
    let draft = AtomicFile::beside(path)?;
    if replaced.is_some() {
        access::copy(path, &draft.file)?;
    }
    Ok((replaced.map(|(store, _)| store), draft))
}

/// Writes the image into a new file.
///
/// # Errors
/// Whatever the host reports.
pub(crate) fn fill(file: &File, image: &NewImage) -> Result<()> {
    file.set_len(image.file_len).while_trying("extend the new image")?;
    for (at, bytes) in &image.parts {
        file.write_all_at(bytes, at.get()).while_trying("write the new image")?;
    }
    Ok(())
}

fn write_new(path: &Path, image: &NewImage, replace: bool, is_replaced: bool) -> Result<()> {
    let draft = AtomicFile::with_mode(path, 0o644)?;
    if is_replaced {
        access::copy(path, &draft.file)?;
    }
    fill(&draft.file, image)?;
    draft.publish(path, replace)
}
