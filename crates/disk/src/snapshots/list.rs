//! Finding snapshots: what the headers of a chain say of the layers below them.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use vmstrata_qcow2::{LayerRecord, SnapshotInfo, SnapshotInfoError, snapshot_info::is_snapshot_name};
use vmstrata_store::Gate;

use vmstrata_store::FileId;

use super::fault::SnapshotFault;
use crate::chain::{OpenOptions, Top, is_being_dropped, open_layer, walk};
use crate::error::{Error, Result};
use crate::layer::Format;
use crate::names::disk_name;
use crate::opener::{LocalFiles, Role};

/// A layer below the active one: a state of the disk that can be gone back to.
#[derive(Clone, Debug)]
pub struct Snapshot {
    /// What is known of it; `None` for a layer without a name.
    pub info: Option<SnapshotInfo>,
    /// Why what was recorded of it cannot be used, if so.
    pub damage: Option<String>,
    /// The disk that this one, or one it came from, was cloned from or made on, if it is below that.
    pub origin: Option<String>,
    /// The disk it belongs to, where that is another one. A disk's own history ends at the first overlay, from the top, that
    /// says so or that does not say of the layer below which of its snapshots that is: what lies below may be anybody's.
    pub owner: Option<String>,
    /// The file that was frozen.
    pub layer: PathBuf,
    /// Which file that is.
    pub(crate) file: FileId,
    /// How it keeps its bytes.
    pub format: Format,
    /// Layers above it.
    pub depth: usize,
    /// Its number: layers below it.
    pub number: usize,
    /// Virtual size in bytes.
    pub virtual_size: u64,
    /// Bytes of the host's storage that its own file takes.
    pub allocated_bytes: u64,
    /// Whether it is being deleted, and is no state any more: deleting it again completes that.
    pub is_being_deleted: bool,
}

impl Snapshot {
    /// Whether it is of this disk's own history: only that may be deleted through this disk.
    pub fn is_own(&self) -> bool {
        self.owner.is_none()
    }

    /// Its name, if it has one.
    pub fn name(&self) -> Option<&str> {
        self.info.as_ref().map(|info| info.name.as_str())
    }
}

/// The snapshots of the disk at `path`, newest first. Reads headers only and takes no lock.
///
/// # Errors
/// As [`crate::probe_chain`].
pub fn list(path: &Path, options: &OpenOptions) -> Result<Vec<Snapshot>> {
    let (top, mut layers) = walk(path, options, &*options.opener, Seen::of)?;
    layers.push(Seen::of(top)?);
    layers.reverse();
    let (mut origin, mut owner) = (None, None);
    let pairs = layers.windows(2).enumerate();
    pairs
        .map(|(above, pair)| {
            let record = pair[0].record.as_deref().filter(|_| !pair[1].is_part).map(LayerRecord::parse);
            let told = record.as_ref().and_then(|said| Some(said.as_ref().ok()?.origin()?.to_owned()));
            let found = snapshot(above + 1, layers.len() - 2 - above, record, &pair[1])?;
            // All that a clone stands on is the other disk's.
            origin = told.clone().or_else(|| origin.take());
            owner = told.or_else(|| owner.take());
            if owner.is_none() && found.info.is_none() {
                owner = Some(disk_name(&found.layer).unwrap_or_default());
            }
            Ok(Snapshot { origin: origin.clone(), owner: owner.clone(), ..found })
        })
        .collect()
}

/// A layer, as far as it matters here: headers of long chains are not to be kept.
struct Seen {
    path: PathBuf,
    file: FileId,
    format: Format,
    size: u64,
    /// What it says of the layer below.
    record: Option<Vec<u8>>,
    is_being_dropped: bool,
    /// Its path names more than the layer: it is no snapshot, which has a file of its own.
    is_part: bool,
    allocated_bytes: u64,
}

impl Seen {
    fn of(file: Top) -> Result<Self> {
        let allocated_bytes = match file.path.metadata() {
            // st_blocks counts 512 bytes whatever the file system's block is.
            Ok(metadata) => metadata.blocks() * 512,
            // Bytes of it may be elsewhere, and so may all of it.
            Err(_) if file.opened.store.fetch().is_some() => 0,
            Err(error) => return Err(Error::io("examine", error).in_file(&file.path)),
        };
        let format = if file.head.is_some() { Format::Qcow2 } else { Format::Raw };
        let is_being_dropped = is_being_dropped(&file.path, file.head.as_ref());
        let record = file.head.and_then(|head| head.snapshot);
        let (file_id, is_part) = (file.opened.identity.file, file.window.is_some());
        let (path, size) = (file.path, file.size);
        Ok(Self { file: file_id, path, format, size, record, is_being_dropped, is_part, allocated_bytes })
    }
}

/// What the header of the image at `overlay` says of the snapshot that it stands on, if it can be read. Takes no lock.
pub fn recorded_in(overlay: &Path) -> Option<SnapshotInfo> {
    let gate = Gate::unrestricted();
    let file = open_layer(overlay, Role::Inspected, Some(Format::Qcow2), &gate, &LocalFiles).ok()?;
    match LayerRecord::parse(&file.head?.snapshot?).ok()? {
        LayerRecord::Snapshot(info) => Some(info),
        LayerRecord::Foreign(_) => None,
    }
}

fn snapshot(
    depth: usize,
    number: usize,
    record: Option<std::result::Result<LayerRecord, SnapshotInfoError>>,
    seen: &Seen,
) -> Result<Snapshot> {
    let (info, damage) = match record {
        None | Some(Ok(LayerRecord::Foreign(_))) => (None, None),
        Some(Ok(LayerRecord::Snapshot(info))) => (Some(info), None),
        Some(Err(error)) => (None, Some(error.to_string())),
    };
    Ok(Snapshot {
        info,
        damage,
        origin: None,
        owner: None,
        layer: seen.path.clone(),
        file: seen.file,
        format: seen.format,
        depth,
        number,
        virtual_size: seen.size,
        allocated_bytes: seen.allocated_bytes,
        is_being_deleted: seen.is_being_dropped,
    })
}

/// The newest snapshot `name` of the disk at `path`: with clones in the chain a name may be there more than once.
///
/// # Errors
/// No such snapshot; otherwise as [`list`].
pub fn find(path: &Path, name: &str, options: &OpenOptions) -> Result<Snapshot> {
    let snapshots = list(path, options)?;
    pick(&snapshots, name).cloned().map_err(|error| error.in_file(path))
}

/// The first of `snapshots` that is called `name`.
///
/// # Errors
/// No such snapshot.
pub(crate) fn pick<'a>(snapshots: &'a [Snapshot], name: &str) -> Result<&'a Snapshot> {
    snapshots.iter().find(|snapshot| snapshot.name() == Some(name)).ok_or_else(|| {
        let have = snapshots.iter().filter_map(|snapshot| snapshot.name().map(str::to_owned)).collect();
        SnapshotFault::NoSuchSnapshot { name: name.to_owned(), have }.into()
    })
}

/// The files that make up one of a disk's `snapshots`, base first.
pub(crate) fn layers_up_to<'a>(
    found: &Snapshot,
    snapshots: &'a [Snapshot],
) -> impl Iterator<Item = &'a Path> {
    snapshots[found.depth - 1..].iter().rev().map(|snapshot| snapshot.layer.as_path())
}

/// A state of a disk as people name it.
#[derive(Clone, Debug)]
pub struct State {
    /// Its newest layer: a chain of its own.
    pub path: PathBuf,
    /// That layer's format, where it is known from the layer above.
    pub format: Option<Format>,
    /// What is known of it, when it was named as a snapshot.
    pub info: Option<SnapshotInfo>,
}

impl State {
    /// How it is opened where its disk is opened with `options`.
    pub fn open_options(&self, options: OpenOptions) -> OpenOptions {
        let format_is_exact = self.info.is_some() || options.format_is_exact;
        OpenOptions { format: self.format, format_is_exact, ..options }
    }
}

/// The state that `text` names: `DISK@NAME` is the snapshot NAME of DISK, all else is a file.
///
/// A file that is there is meant, whatever its name looks like.
///
/// # Errors
/// As [`find`], when `text` is no file and what precedes its last `@` is one.
pub fn resolve(text: &Path, options: &OpenOptions) -> Result<State> {
    let file = || State { path: text.to_owned(), format: options.format, info: None };
    let Some((disk, name)) = split_state(text) else { return Ok(file()) };
    if text.symlink_metadata().is_ok() || disk.symlink_metadata().is_err() {
        return Ok(file());
    }
    let found = find(disk, name, options)?;
    Ok(State { path: found.layer, format: Some(found.format), info: found.info })
}

/// `DISK` and `NAME` of `DISK@NAME`.
pub fn split_state(text: &Path) -> Option<(&Path, &str)> {
    let bytes = text.as_os_str().as_bytes();
    let at = bytes.iter().rposition(|byte| *byte == b'@').filter(|at| *at > 0)?;
    let name = str::from_utf8(&bytes[at + 1..]).ok()?;
    is_snapshot_name(name).then(|| (Path::new(OsStr::from_bytes(&bytes[..at])), name))
}

/// `DISK@NAME`.
pub fn state_of(disk: &Path, name: &str) -> PathBuf {
    let mut state = disk.as_os_str().to_owned();
    state.push(format!("@{name}"));
    state.into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_could_be_a_snapshot_is_taken_for_one() {
        assert_eq!(split_state(Path::new("/a/web.qcow2@mon")), Some((Path::new("/a/web.qcow2"), "mon")));
        assert_eq!(split_state(Path::new("a@b@c")), Some((Path::new("a@b"), "c")));
        for file in ["web.qcow2", "web@", "@mon", "user@host/web.qcow2", "web@a b"] {
            assert_eq!(split_state(Path::new(file)), None, "{file}");
        }
    }

    #[test]
    fn a_missing_name_is_answered_with_those_there_are() {
        let error = pick(&[], "mon").unwrap_err().to_string();
        assert_eq!(error, "it has no snapshot \"mon\": none of the layers below it is named");
    }
}
