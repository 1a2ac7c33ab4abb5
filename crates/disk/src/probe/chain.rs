//! Looking at a chain without opening it as a disk: headers only, no locks, nothing kept open.
//!
//! Place in the data flow: beside the engine, for `vmstrata info` and for planning a chain. It follows a
//! chain by the same [`walk`] as [`crate::Disk::open`], so what it shows is what would be opened.
//!
//! A file that is being written may show a header that is about to change; every header is checked as usual.

use std::ffi::OsString;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use vmstrata_qcow2::bitmap::{Bitmap, BitmapsExtension};
use vmstrata_qcow2::snapshot::{MAX_TABLE_LEN, Snapshot, parse_table};
use vmstrata_qcow2::{Autoclear, Header, ParseErrorKind};
use vmstrata_store::{FileError, FileId, Gate, LocalFile, LockKind, check_free};

use crate::chain::{
    OpenOptions, Top, backing_of, despite_merges, open_layer, open_top, resolve_name, walk, walk_below,
};
use crate::error::{Error, IoContext as _, Result};
use crate::layer::Format;
use crate::names::is_published;
use crate::opener::{LocalFiles, Role, directory_of};

/// What the file of one layer says of itself.
#[derive(Clone, Debug)]
pub struct LayerHead {
    /// The file, as the layer above (or the caller) names it.
    pub path: PathBuf,
    /// How it keeps its bytes.
    pub format: Format,
    /// Virtual size in bytes.
    pub virtual_size: u64,
    /// Bytes up to the end of the file.
    pub file_len: u64,
    /// Bytes of the host's storage that the file takes.
    pub allocated_bytes: u64,
    /// The header of a qcow2 file.
    pub header: Option<Header>,
    /// The backing file's name as stored.
    pub backing_name: Option<OsString>,
    /// The backing file's format as stored.
    pub backing_format: Option<String>,
    /// The path that the backing name leads to.
    pub backing_path: Option<PathBuf>,
    /// Internal snapshots; of the active layer only, as nobody can load those of another one.
    pub snapshots: Vec<Snapshot>,
    /// Persistent bitmaps; of the active layer only.
    pub bitmaps: Vec<Bitmap>,
}

/// Reads the headers of the chain whose active layer is `path`: base first, never empty.
///
/// # Errors
/// As [`crate::Disk::open`], but for locks.
pub fn probe_chain(path: &Path, options: &OpenOptions) -> Result<Vec<LayerHead>> {
    let (top, mut heads) = walk(path, options, &*options.opener, head_of)?;
    heads.push(whole_head_of(top)?);
    Ok(heads)
}

/// The newest published layer below the disk at `path`, or `None`. Its file is not opened.
///
/// # Errors
/// As [`probe_chain`], of the layers above it; a directory that is not there, or not allowed.
pub fn published_below(path: &Path, options: &OpenOptions) -> Result<Option<PathBuf>> {
    let (_, newest) = walk_own(path, options, |_| Ok(()))?;
    if let Some(layer) = &newest {
        let directory = directory_of(layer).canonicalize().while_trying("find the directory");
        let resolved = directory.map_err(|e| e.in_file(layer))?.join(layer.file_name().unwrap_or_default());
        options.gate(path)?.check(layer, &resolved)?;
    }
    Ok(newest)
}

/// Looks at the top of a chain, and has `keep` see each layer below it down to the published ones, of which the newest one's path is returned.
fn walk_own(
    path: &Path,
    options: &OpenOptions,
    mut keep: impl FnMut(&Top) -> Result<()>,
) -> Result<(Top, Option<PathBuf>)> {
    let published = |file: &Top| -> Result<Option<PathBuf>> {
        let backing = backing_of(&file.path, file.head.as_ref())?.map(|(path, _)| path);
        Ok(backing.filter(|path| is_published(path)))
    };
    despite_merges(|| {
        let top = open_top(path, Role::Inspected, options, &*options.opener)?;
        let mut newest = published(&top)?;
        if newest.is_none() {
            walk_below(path, &top, options, Role::Inspected, &*options.opener, |layer| {
                keep(&layer)?;
                newest = published(&layer)?;
                Ok(newest.is_none().then_some(()))
            })?;
        }
        Ok((top, newest))
    })
}

/// Makes sure that none of the chain's files is locked against [`crate::Disk::open`] now, but for those that `passes`: who
/// holds them will have let go by then. Published layers have no writers. Takes no lock.
///
/// # Errors
/// As [`probe_chain`]; a file that is in use.
pub fn check_locks(path: &Path, options: &OpenOptions, passes: impl Fn(FileId) -> bool) -> Result<()> {
    let check = |file: &Top, kind| {
        let Some(fd) =
            file.opened.store.local().and_then(LocalFile::raw).filter(|_| !passes(file.opened.identity.file))
        else {
            return Ok(());
        };
        check_free(fd, &file.path, kind).map_err(|error| FileError::from(error).into())
    };
    let (top, _) = walk_own(path, options, |layer| check(layer, LockKind::Frozen))?;
    check(&top, if options.read_only { LockKind::Frozen } else { LockKind::Active })
}

/// Reads the header of the one file `path`, whatever lies below it.
///
/// # Errors
/// A file that cannot be opened or breaks the format.
pub fn probe_layer(path: &Path, format: Option<Format>) -> Result<LayerHead> {
    whole_head_of(open_layer(path, Role::Inspected, format, &Gate::unrestricted(), &LocalFiles)?)
}

/// The format of the backing file that an image at `image` would call `name`.
///
/// It is guessed from the file's first bytes: who can write those decides what it is.
///
/// # Errors
/// A name that is not a plain file's; otherwise as [`probe_layer`].
pub fn probe_backing(image: &Path, name: &Path) -> Result<Format> {
    let named = resolve_name(image, name.as_os_str())?;
    Ok(probe_layer(&named.path, named.format)?.format)
}

/// With snapshots and bitmaps.
fn whole_head_of(file: Top) -> Result<LayerHead> {
    let read = read_snapshots(&file).and_then(|snapshots| Ok((snapshots, read_bitmaps(&file)?)));
    let (snapshots, bitmaps) = read.map_err(|error| error.in_file(&file.path))?;
    Ok(LayerHead { snapshots, bitmaps, ..head_of(file)? })
}

fn head_of(file: Top) -> Result<LayerHead> {
    let metadata = file.path.metadata().while_trying("examine").map_err(|e| e.in_file(&file.path))?;
    let backing = backing_of(&file.path, file.head.as_ref())?;
    let (header, backing_name, backing_format) = match file.head {
        Some(head) => (Some(head.header), head.backing_name, head.backing_format),
        None => (None, None, None),
    };
    Ok(LayerHead {
        format: if header.is_some() { Format::Qcow2 } else { Format::Raw },
        virtual_size: file.size,
        file_len: file.opened.identity.len,
        // st_blocks counts 512 bytes whatever the file system's block is.
        allocated_bytes: metadata.blocks() * 512,
        header,
        backing_name,
        backing_format,
        backing_path: backing.map(|(path, _)| path),
        snapshots: Vec::new(),
        bitmaps: Vec::new(),
        path: file.path,
    })
}

/// The bitmaps, unless a writer that does not know them has made the extension void.
fn read_bitmaps(file: &Top) -> Result<Vec<Bitmap>> {
    let Some(head) = file.head.as_ref().filter(|head| head.header.autoclear.contains(Autoclear::BITMAPS))
    else {
        return Ok(Vec::new());
    };
    let Some(data) = &head.bitmaps else { return Ok(Vec::new()) };
    let (header, file_len) = (&head.header, file.opened.identity.len);
    let extension = BitmapsExtension::parse(data, u64::from(header.header_length), header, file_len)?;
    let at = extension.directory_offset;
    let mut directory = vec![0; usize::try_from(extension.directory_len).expect("at most 64 MiB")];
    file.opened
        .store
        .read_exact(&mut directory, at)
        .while_trying("read the bitmaps")
        .map_err(|e| e.at(at))?;
    Ok(extension.parse_directory(&directory, header, file_len)?)
}

/// Bytes of the snapshot table read at first: enough for hundreds of snapshots.
const TABLE_PROBE: u64 = 64 << 10;

fn read_snapshots(file: &Top) -> Result<Vec<Snapshot>> {
    let Some(header) = file.head.as_ref().map(|head| &head.header).filter(|header| header.snapshot_count > 0)
    else {
        return Ok(Vec::new());
    };
    let file_len = file.opened.identity.len;
    let len_max = file_len.saturating_sub(header.snapshots_offset.get()).min(MAX_TABLE_LEN);
    let mut len = TABLE_PROBE.min(len_max);
    loop {
        let mut table = vec![0; usize::try_from(len).expect("bounded by MAX_TABLE_LEN")];
        let read = file.opened.store.read_exact(&mut table, header.snapshots_offset);
        read.while_trying("read the snapshot table").map_err(|error| error.at(header.snapshots_offset))?;
        match parse_table(&table, header, file_len) {
            Err(error) if matches!(error.kind, ParseErrorKind::Truncated { .. }) && len < len_max => {
                len = len_max
            }
            parsed => return parsed.map_err(Error::from),
        }
    }
}
