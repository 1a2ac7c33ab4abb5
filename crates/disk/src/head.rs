//! The header of one file of a chain, and the name in it of the file below.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};

use vmstrata_qcow2::extension::magic;
use vmstrata_qcow2::probe::PROBE_LEN;
use vmstrata_qcow2::{Extensions, Header, ImageFormat, ParseError, ParseErrorKind, SnapshotInfo};
use vmstrata_store::Store;
use vmstrata_types::HostOffset;

use crate::error::{ErrorKind, IoContext as _, Result};
use crate::json_name::{self, Below, Described};
use crate::names::Format;
use crate::opener::directory_of;
use crate::window::SECTOR;

/// The header of a qcow2 file with what follows it.
#[derive(Debug)]
pub(crate) struct Qcow2Head {
    pub(crate) header: Header,
    pub(crate) backing_name: Option<OsString>,
    pub(crate) backing_format: Option<String>,
    /// The bitmaps extension.
    pub(crate) bitmaps: Option<Vec<u8>>,
    /// What it says of the layer below as a snapshot.
    pub(crate) snapshot: Option<Vec<u8>>,
    /// Whether it has an extension that only vmstrata writes.
    pub(crate) is_ours: bool,
    /// The name under which its own state is valid, if under no other.
    pub(crate) valid_as: Option<OsString>,
}

/// Bytes read at first: enough for the header and extensions that tools write.
const HEAD_PROBE: usize = 4096;
/// The largest cluster.
const HEADER_MAX: usize = 2 << 20;
const MAGIC: &[u8; 4] = b"QFI\xfb";

/// The header if the file starts like a qcow2 image; `None` for a raw file.
///
/// # Errors
/// [`ErrorKind::Foreign`] for an image of another format; a header that cannot be used; whatever the host reports.
pub(crate) fn probe(store: &dyn Store, file_len: u64) -> Result<Option<Qcow2Head>> {
    match image_format(store, file_len)? {
        Some(ImageFormat::Qcow2) => read_head(store, file_len).map(Some),
        Some(format) => Err(ErrorKind::Foreign { format }.into()),
        None => Ok(None),
    }
}

/// What the file looks like; `None` for bytes that are no image of a known format: a raw disk.
///
/// # Errors
/// Whatever the host reports.
pub(crate) fn image_format(store: &dyn Store, file_len: u64) -> Result<Option<ImageFormat>> {
    let mut bytes = [0; PROBE_LEN];
    store.read_padded(&mut bytes, HostOffset::ZERO).while_trying("read the first bytes")?;
    let Some(end) = file_len.checked_sub(PROBE_LEN as u64) else { return Ok(ImageFormat::of_start(&bytes)) };
    if let Some(format) = ImageFormat::of_start(&bytes) {
        return Ok(Some(format));
    }
    store.read_padded(&mut bytes, HostOffset::new(end)).while_trying("read the last bytes")?;
    Ok(ImageFormat::of_end(&bytes))
}

/// Whether the file starts like a qcow2 image.
pub(crate) fn has_magic(store: &dyn Store) -> Result<bool> {
    let mut magic = [0; 4];
    store.read_padded(&mut magic, HostOffset::ZERO).while_trying("read the first bytes")?;
    Ok(&magic == MAGIC)
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
    let is_ours = extensions.items.iter().any(|extension| magic::is_ours(extension.magic()));
    let dropped = extensions.items.iter().find(|item| item.magic() == magic::DROPPED);
    let valid_as = dropped.map(|item| OsStr::from_bytes(item.data()).to_owned());
    Ok(Qcow2Head { header, backing_name, backing_format, bitmaps, snapshot, is_ours, valid_as })
}

/// The backing file's name, also of images that cannot be used otherwise: those with features that are not supported, or
/// with a header that is damaged elsewhere.
///
/// # Errors
/// A file that cannot be read, a name with a zero byte.
pub(crate) fn backing_text(store: &dyn Store, file_len: u64) -> Result<Option<OsString>> {
    let mut fields = [0; 20];
    store.read_padded(&mut fields, HostOffset::ZERO).while_trying("read the first bytes")?;
    let start = usize::try_from(u64::from_be_bytes(fields[8..16].try_into().expect("eight bytes")))
        .unwrap_or(usize::MAX);
    let len = u32::from_be_bytes(fields[16..20].try_into().expect("four bytes")) as usize;
    if &fields[..4] != MAGIC || start == 0 || len == 0 {
        return Ok(None);
    }
    let end = start.saturating_add(len).min(HEADER_MAX);
    let bytes = read_start(store, end, file_len)?;
    Ok(Some(backing_name(&bytes, start..start.saturating_add(len))?))
}

fn backing_name(bytes: &[u8], place: std::ops::Range<usize>) -> Result<OsString, ParseError> {
    let fail = |kind| ParseError { field: "backing file name", offset: place.start as u64, kind };
    let (needed, have) = (place.end as u64, bytes.len() as u64);
    let name = bytes.get(place.clone()).ok_or_else(|| fail(ParseErrorKind::Truncated { needed, have }))?;
    if name.contains(&0) {
        Err(fail(ParseErrorKind::ContainsNul))
    } else {
        Ok(OsStr::from_bytes(name).to_owned())
    }
}

fn read_start(store: &dyn Store, len: usize, file_len: u64) -> Result<Vec<u8>> {
    let mut bytes = vec![0; len.min(usize::try_from(file_len).unwrap_or(usize::MAX))];
    store.read_exact(&mut bytes, HostOffset::ZERO).while_trying("read the header")?;
    Ok(bytes)
}

/// Path and format of the file below, as the header names it.
pub(crate) fn backing_of(path: &Path, head: Option<&Qcow2Head>) -> Result<Option<(PathBuf, Option<Format>)>> {
    Ok(described_backing(path, head)?.map(|backing| (backing.path, backing.format)))
}

/// The file below, as the header describes it.
pub(crate) fn described_backing(path: &Path, head: Option<&Qcow2Head>) -> Result<Option<Described>> {
    let Some(head) = head else { return Ok(None) };
    let Some(name) = &head.backing_name else { return Ok(None) };
    let parse = || -> Result<Described> {
        let described = resolve_name(path, name)?;
        let format = match head.backing_format.as_deref() {
            _ if described.format.is_some() => described.format,
            None => None,
            Some("qcow2") => Some(Format::Qcow2),
            Some("raw" | "file" | "host_device") => Some(Format::Raw),
            Some(other) => return Err(ErrorKind::BackingFormat { name: other.to_owned() }.into()),
        };
        Ok(Described { format, ..described })
    };
    parse().map(Some).map_err(|error| error.in_file(path))
}

/// What a backing name in the image at `image` leads to. A plain one is relative to the image's directory.
pub(crate) fn resolve_name(image: &Path, name: &OsStr) -> Result<Described> {
    match name.as_bytes().strip_prefix(b"json:") {
        Some(description) => json_name::parse(description),
        None => Ok(Described {
            path: directory_of(image).join(plain_name(name)?),
            format: None,
            window: None,
            below: Below::AsStored,
        }),
    }
}

/// The file name in a backing name that is no description; QEMU lets it also be a URL.
pub(crate) fn plain_name(name: &OsStr) -> Result<&OsStr> {
    let bytes = name.as_bytes();
    if let Some(plain) = bytes.strip_prefix(b"file:") {
        return Ok(OsStr::from_bytes(plain));
    }
    let refuse = |feature: &str| {
        let name = name.to_string_lossy().into_owned();
        Err(ErrorKind::BackingName { name, feature: feature.to_owned() }.into())
    };
    if bytes.starts_with(b"json:") {
        return refuse("a json: description");
    }
    // As in QEMU, a colon before the first slash ends the name of a protocol.
    let end = bytes.iter().position(|byte| b":/".contains(byte));
    if end.is_some_and(|end| bytes[end] == b':') { refuse("a protocol other than file:") } else { Ok(name) }
}

/// The disk that a raw file of so many bytes is.
pub(crate) fn raw_size(file_len: u64) -> u64 {
    file_len.next_multiple_of(SECTOR)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_plain_file_names_pass() {
        let plain_name = |name: &'static str| plain_name(name.as_ref());
        assert_eq!(plain_name("base.qcow2").unwrap(), "base.qcow2");
        assert_eq!(plain_name("dir/a:b").unwrap(), "dir/a:b");
        assert_eq!(plain_name("file:/x/base").unwrap(), "/x/base");
        for bad in ["json:{\"driver\":\"nbd\"}", "nbd://host/x", "ssh:host", "https://host/img"] {
            let error = plain_name(bad).unwrap_err().to_string();
            assert!(error.contains(&format!("{bad:?}")) && error.contains("not supported"), "{error}");
        }
    }
}
