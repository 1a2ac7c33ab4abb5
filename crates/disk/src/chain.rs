//! Reading a chain: from the active layer's header down to the base, checking every step.
//!
//! Data flow: path → [`read_chain`] → [`Chain`] → [`crate::map::FrozenMap`] and [`crate::active::Active`]. Only
//! headers are read here. Memory and time are bounded by [`MAX_LAYERS`], by the size of a header cluster, and by
//! a check of every file's identity against those already met.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use vmstrata_qcow2::{Extensions, Header, ParseError, ParseErrorKind, SnapshotInfo};
use vmstrata_store::{CacheMode, Gate, Store};
use vmstrata_types::{HostOffset, MAX_LAYERS};

use crate::error::{Error, ErrorKind, IoContext as _, Result};
use crate::layer::{Format, Layer, Tables};
use crate::opener::{Opened, Opener, Role, directory_of};
use crate::resources::Resources;

/// How to open a disk.
#[derive(Clone, Debug)]
pub struct OpenOptions {
    /// Refuse writes; every layer is then frozen.
    pub read_only: bool,
    /// How the active layer's data passes the host's page cache. Frozen layers always use the page cache, which
    /// all disks on one base share.
    pub cache: CacheMode,
    /// Directories, beside the disk's own, in which backing files may lie.
    pub allow_backing: Vec<PathBuf>,
    /// The active layer's format; `None` looks at its first bytes. Name `Raw` for disks whose guest is not
    /// trusted: it could write a qcow2 header.
    pub format: Option<Format>,
}

impl Default for OpenOptions {
    fn default() -> Self {
        Self { read_only: false, cache: CacheMode::Host, allow_backing: Vec::new(), format: None }
    }
}

/// The header of a qcow2 file with what follows it.
#[derive(Debug)]
pub(crate) struct Qcow2Head {
    pub(crate) header: Header,
    pub(crate) backing_name: Option<String>,
    pub(crate) backing_format: Option<String>,
    /// The bitmaps extension.
    pub(crate) bitmaps: Option<Vec<u8>>,
    /// What it says of the layer below as a snapshot.
    pub(crate) snapshot: Option<Vec<u8>>,
}

/// The open file on top of a chain.
#[derive(Debug)]
pub(crate) struct Top {
    pub(crate) path: PathBuf,
    pub(crate) opened: Opened,
    /// Virtual size in bytes.
    pub(crate) size: u64,
    /// `None` for a raw file.
    pub(crate) head: Option<Qcow2Head>,
}

/// A chain as read from its headers.
#[derive(Debug)]
pub(crate) struct Chain {
    pub(crate) top: Top,
    /// The layers below the top, base first.
    pub(crate) below: Vec<Arc<Layer>>,
}

/// Bytes read at first: enough for the header and extensions that tools write.
const HEAD_PROBE: usize = 4096;
/// The largest cluster.
const HEADER_MAX: usize = 2 << 20;
/// Autoclear bits that name the process that writes an image: bit 63 set, bits 32 to 62 drawn anew for each. Any
/// stock writer clears them, so a journal that does not name the same number is not about this state of the image.
pub(crate) const SESSION_MASK: u64 = 0xFFFF_FFFF_0000_0000;
const MAGIC: &[u8; 4] = b"QFI\xfb";
/// Raw files are counted in sectors: the last one reads as if padded with zeros.
const SECTOR: u64 = 512;

/// Reads the headers of the chain whose active layer is `path`.
///
/// # Errors
/// As [`walk`].
pub(crate) fn read_chain(path: &Path, options: &OpenOptions, resources: &Resources) -> Result<Chain> {
    let top = if options.read_only { Role::Frozen } else { Role::Active(options.cache) };
    let roles = Roles { top, below: Role::Frozen };
    let (top, below) =
        walk(path, options, roles, &**resources.files().opener(), |layer| freeze(layer, resources))?;
    Ok(Chain { top, below })
}

/// What the files of a chain are opened for.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Roles {
    pub(crate) top: Role,
    pub(crate) below: Role,
}

/// Follows the chain down from `path`; returns the top and what `keep` makes of each layer below it, base first.
///
/// # Errors
/// Any file of the chain that cannot be opened, is not allowed, is locked by a writer, breaks the format, or was
/// met before.
pub(crate) fn walk<T>(
    path: &Path,
    options: &OpenOptions,
    roles: Roles,
    opener: &dyn Opener,
    mut keep: impl FnMut(Top) -> T,
) -> Result<(Top, Vec<T>)> {
    let top = open_layer(path, roles.top, options.format, &Gate::unrestricted(), opener)?;
    let mut allowed = options.allow_backing.clone();
    allowed.push(directory_of(path));
    let mut met = HashMap::from([(top.opened.identity.file, 0)]);
    let mut below = Vec::new();
    // A disk without backing files needs no gate, whatever its directory is.
    let mut gate = None;
    let mut next = backing_of(&top.path, top.head.as_ref())?;
    while let Some((name, format)) = next {
        if below.len() + 1 >= MAX_LAYERS {
            return Err(Error::from(ErrorKind::TooLong).in_file(path));
        }
        if gate.is_none() {
            gate = Some(Gate::new(&allowed)?);
        }
        let gate = gate.as_ref().expect("made above");
        let layer = open_layer(&name, roles.below, format, gate, opener)?;
        if let Some(earlier) = met.insert(layer.opened.identity.file, below.len() + 1) {
            return Err(Error::from(ErrorKind::Loop { earlier }).in_file(&name));
        }
        next = backing_of(&layer.path, layer.head.as_ref())?;
        below.push(keep(layer));
    }
    below.reverse();
    Ok((top, below))
}

/// Makes an open file a shared frozen layer.
pub(crate) fn freeze(file: Top, resources: &Resources) -> Arc<Layer> {
    if file.head.as_ref().is_some_and(|head| head.header.autoclear.bits() & SESSION_MASK != 0) {
        tracing::warn!(
            file = %file.path.display(),
            "the process that wrote this file did not close it: what it had not flushed is in its journal, if anywhere; to take that up, open the file itself for writing once, with the same journal directory"
        );
    }
    let tables = file.head.as_ref().map(|head| Tables::of(&head.header));
    let layer = resources.share_layer(Layer::new(file.path, file.opened.identity, file.size, tables));
    resources.files().adopt(&layer, &file.opened);
    layer
}

pub(crate) fn open_layer(
    path: &Path,
    role: Role,
    format: Option<Format>,
    gate: &Gate,
    opener: &dyn Opener,
) -> Result<Top> {
    let opened = opener.open(path, role, gate)?;
    let read = || -> Result<(u64, Option<Qcow2Head>)> {
        let file_len = opened.identity.len;
        let head = match format {
            Some(Format::Raw) => None,
            Some(Format::Qcow2) => Some(read_head(&*opened.store, file_len)?),
            None => probe(&*opened.store, file_len)?,
        };
        let size = head.as_ref().map_or(file_len.next_multiple_of(SECTOR), |head| head.header.size);
        Ok((size, head))
    };
    let (size, head) = read().map_err(|error| error.in_file(path))?;
    Ok(Top { path: path.to_owned(), opened, size, head })
}

/// The header if the file starts like a qcow2 image; `None` for a raw file.
pub(crate) fn probe(store: &dyn Store, file_len: u64) -> Result<Option<Qcow2Head>> {
    let mut magic = [0; 4];
    store.read_padded(&mut magic, HostOffset::ZERO).while_trying("read the first bytes")?;
    if &magic == MAGIC { read_head(store, file_len).map(Some) } else { Ok(None) }
}

/// Reads and checks header, extensions and backing name.
pub(crate) fn read_head(store: &dyn Store, file_len: u64) -> Result<Qcow2Head> {
    let mut bytes = read_start(store, HEAD_PROBE, file_len)?;
    let header = match Header::parse(&bytes, file_len) {
        Err(ParseError { kind: ParseErrorKind::Truncated { .. }, .. }) if bytes.len() == HEAD_PROBE => {
            // A header longer than any tool writes; it ends with its cluster at the latest.
            bytes = read_start(store, HEADER_MAX, file_len)?;
            Header::parse(&bytes, file_len)?
        }
        parsed => parsed?,
    };
    let name = header.backing_file.map(|name| {
        let start = usize::try_from(name.offset.get()).expect("within the first cluster");
        start..start + name.len as usize
    });
    let end = name.as_ref().map_or(header.extensions_end(), |name| name.end);
    if end > bytes.len() {
        bytes = read_start(store, end, file_len)?;
    }
    let extensions_end = header.extensions_end().min(bytes.len());
    let extensions = Extensions::parse(&bytes, header.header_length as usize, extensions_end)?;
    let backing_name = name.map(|name| backing_name(&bytes, name)).transpose()?;
    let backing_format = extensions.backing_format().map(str::to_owned);
    let bitmaps = extensions.bitmaps().map(<[u8]>::to_vec);
    let snapshot = SnapshotInfo::find(&extensions).map(<[u8]>::to_vec);
    Ok(Qcow2Head { header, backing_name, backing_format, bitmaps, snapshot })
}

fn backing_name(bytes: &[u8], place: std::ops::Range<usize>) -> Result<String, ParseError> {
    let fail = |kind| ParseError { field: "backing file name", offset: place.start as u64, kind };
    let (needed, have) = (place.end as u64, bytes.len() as u64);
    let name = bytes.get(place.clone()).ok_or_else(|| fail(ParseErrorKind::Truncated { needed, have }))?;
    let name = std::str::from_utf8(name).map_err(|_| fail(ParseErrorKind::NotUtf8))?;
    if name.contains('\0') { Err(fail(ParseErrorKind::ContainsNul)) } else { Ok(name.to_owned()) }
}

fn read_start(store: &dyn Store, len: usize, file_len: u64) -> Result<Vec<u8>> {
    let mut bytes = vec![0; len.min(usize::try_from(file_len).unwrap_or(usize::MAX))];
    store.read_exact(&mut bytes, HostOffset::ZERO).while_trying("read the header")?;
    Ok(bytes)
}

/// Path and format of the file below, as the header names it.
pub(crate) fn backing_of(path: &Path, head: Option<&Qcow2Head>) -> Result<Option<(PathBuf, Option<Format>)>> {
    let Some(head) = head else { return Ok(None) };
    let Some(name) = &head.backing_name else { return Ok(None) };
    let parse = || -> Result<(PathBuf, Option<Format>)> {
        let plain = plain_name(name)?;
        let format = match head.backing_format.as_deref() {
            None => None,
            Some("qcow2") => Some(Format::Qcow2),
            Some("raw" | "file" | "host_device") => Some(Format::Raw),
            Some(other) => return Err(ErrorKind::BackingFormat { name: other.to_owned() }.into()),
        };
        Ok((directory_of(path).join(plain), format))
    };
    parse().map(Some).map_err(|error| error.in_file(path))
}

/// The file name in a backing name, which QEMU also lets be a URL or a JSON object.
pub(crate) fn plain_name(name: &str) -> Result<&str> {
    if let Some(plain) = name.strip_prefix("file:") {
        return Ok(plain);
    }
    let refuse = |feature| Err(ErrorKind::BackingName { name: name.to_owned(), feature }.into());
    if name.starts_with("json:") {
        return refuse("a json: description");
    }
    // As in QEMU, a colon before the first slash ends the name of a protocol.
    let first_part = name.split('/').next().unwrap_or(name);
    if first_part.contains(':') { refuse("a protocol other than file:") } else { Ok(name) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_plain_file_names_pass() {
        assert_eq!(plain_name("base.qcow2").unwrap(), "base.qcow2");
        assert_eq!(plain_name("dir/a:b").unwrap(), "dir/a:b");
        assert_eq!(plain_name("file:/x/base").unwrap(), "/x/base");
        for bad in ["json:{\"driver\":\"nbd\"}", "nbd://host/x", "ssh:host", "https://host/img"] {
            let error = plain_name(bad).unwrap_err().to_string();
            assert!(error.contains(&format!("{bad:?}")) && error.contains("not supported"), "{error}");
        }
    }
}
