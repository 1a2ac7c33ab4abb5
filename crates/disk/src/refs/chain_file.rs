//! The files of a chain, from its headers.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

use vmstrata_qcow2::{LayerRecord, SnapshotInfo};
use vmstrata_store::{FileId, Gate};

use super::space::allocated_bytes;
use crate::chain::{OpenOptions, Top, open_described, walk};
use crate::error::{Error, ErrorKind, Result};
use crate::json_name::{Below, Described};
use crate::layer::Format;
use crate::names::sidecar_of;
use crate::opener::{Opener, Role};
use crate::window::Window;

/// A file of the chain.
#[derive(Clone, Debug)]
pub(crate) struct ChainFile {
    pub(crate) path: PathBuf,
    pub(crate) file: FileId,
    pub(crate) format: Format,
    /// What of the file it is; `None` for all.
    pub(crate) window: Option<Window>,
    /// The name of the layer below as its header has it.
    pub(crate) backing_name: Option<OsString>,
    /// What it says of the layer below as a snapshot.
    pub(crate) record: Option<Vec<u8>>,
    /// Whether it knows of an index.
    pub(crate) has_index: bool,
    /// Snapshots within the file, of stock tools' making, which have tables of their own over the same backing file.
    pub(crate) internal: u32,
    /// What it took of the host's storage, with the index beside it.
    pub(crate) allocated_bytes: u64,
}

impl ChainFile {
    fn of(top: Top) -> Self {
        let has_index = top.head.as_ref().is_some_and(|head| {
            head.header.autoclear.contains(vmstrata_qcow2::Autoclear::INDEX)
                || sidecar_of(&top.path).is_some_and(|sidecar| sidecar.exists())
        });
        let format = if top.head.is_some() { Format::Qcow2 } else { Format::Raw };
        let internal = top.head.as_ref().map_or(0, |head| head.header.snapshot_count);
        let allocated_bytes = allocated_bytes(&top.path);
        let (backing_name, record) = top.head.map_or((None, None), |head| (head.backing_name, head.snapshot));
        Self {
            file: top.opened.identity.file,
            path: top.path,
            format,
            window: top.window,
            backing_name,
            record,
            has_index,
            internal,
            allocated_bytes,
        }
    }

    /// Opens the layer, which must be the file that it was.
    ///
    /// # Errors
    /// A file that cannot be opened, or another one.
    pub(crate) fn open(&self, role: Role, opener: &dyn Opener) -> Result<Top> {
        let (path, format) = (self.path.clone(), Some(self.format));
        let named = Described { path, format, window: self.window, below: Below::AsStored };
        let top = open_described(&named, role, &Gate::unrestricted(), opener)?;
        if top.opened.identity.file == self.file {
            Ok(top)
        } else {
            Err(Error::from(ErrorKind::Changed).in_file(&self.path))
        }
    }

    /// What it says of the layer below, as far as that can be read.
    pub(crate) fn said(&self) -> Option<LayerRecord> {
        self.record.as_deref().and_then(|data| LayerRecord::parse(data).ok())
    }

    /// What it says of the layer below as a snapshot.
    pub(crate) fn info(&self) -> Option<SnapshotInfo> {
        match self.said()? {
            LayerRecord::Snapshot(info) => Some(info),
            LayerRecord::Foreign(_) => None,
        }
    }

    /// The disk that the layers below belong to, if it says that this is another one.
    pub(crate) fn origin(&self) -> Option<String> {
        Some(self.said()?.origin()?.to_owned())
    }

    /// Whether the layer below is a snapshot of the same disk.
    pub(crate) fn goes_on(&self) -> bool {
        self.info().is_some_and(|info| info.origin.is_none())
    }
}

/// How many layers, from the base on, are not of this disk's own history. That ends, from the top, at the first link that
/// does not say of the layer below which of the disk's snapshots it is: whoever made a plain overlay on a disk, or on a
/// snapshot of one, stands on what is not theirs.
pub(crate) fn layers_of_others(chain: &[ChainFile]) -> usize {
    chain.iter().rposition(|link| !link.goes_on()).unwrap_or(0)
}

/// The files of the chain of `disk`, base first.
///
/// # Errors
/// As [`walk`].
pub(crate) fn chain_files(disk: &Path, options: &OpenOptions, opener: &dyn Opener) -> Result<Vec<ChainFile>> {
    let (top, mut chain) = walk(disk, options, opener, |layer| Ok(ChainFile::of(layer)))?;
    chain.push(ChainFile::of(top));
    Ok(chain)
}
