//! Header extensions: typed records between the header and the backing file name.
//!
//! Each record is a 4-byte type, a 4-byte length, that many bytes, and padding to a multiple of 8; type 0 ends
//! the list. Records we do not know are kept byte for byte and in order, as the specification asks of tools that
//! rewrites a header.
//!
//! Invariants: parsing reads only between `start` and `end`, and keeps no more bytes than lie there.

use std::borrow::Cow;

use crate::bytes::{be32, pad8};
use crate::error::{ParseError, ParseErrorKind};

/// Record types.
pub mod magic {
    /// End of the list.
    pub const END: u32 = 0;
    /// Format of the backing file.
    pub const BACKING_FORMAT: u32 = 0xe279_2aca;
    /// Names of feature bits.
    pub const FEATURE_NAMES: u32 = 0x6803_f857;
    /// Persistent bitmaps.
    pub const BITMAPS: u32 = 0x2385_2875;
    /// Where the LUKS header lies.
    pub const ENCRYPTION_HEADER: u32 = 0x0537_be77;
    /// Name of the external data file.
    pub const EXTERNAL_DATA_NAME: u32 = 0x4441_5441;
    /// Where the index of the chain lies: `VMSX`, ours ([`crate::index::IndexLink`]).
    pub const INDEX: u32 = 0x564d_5358;
    /// What is known of the snapshot below: `VMSN`, ours ([`crate::snapshot_info::SnapshotInfo`]).
    pub const SNAPSHOT: u32 = 0x564d_534e;
    /// The file name under which the layer's own state will be valid again: `VMSD`, ours. Until then it is being dropped, and
    /// right only below the layers above it.
    pub const DROPPED: u32 = 0x564d_5344;
    /// Bytes to be passed over: `VMSP`, ours.
    pub const PADDING: u32 = 0x564d_5350;

    /// Whether it is a type that only vmstrata writes: the first three letters are `VMS`.
    pub const fn is_ours(magic: u32) -> bool {
        magic >> 8 == SNAPSHOT >> 8
    }
}

/// Longest backing format name that QEMU accepts.
pub const MAX_BACKING_FORMAT_LEN: usize = 15;

const RECORD_HEADER: usize = 8;

/// One header extension.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Extension {
    /// Name of the backing file's format, `qcow2` or `raw` mostly.
    BackingFormat(String),
    /// Names for feature bits.
    FeatureNames(FeatureNames),
    /// The bitmaps extension's bytes; [`crate::bitmap::BitmapsExtension::parse`] reads them.
    Bitmaps(Vec<u8>),
    /// Pointer to the encryption header, as found.
    EncryptionHeader(Vec<u8>),
    /// Name of the external data file, as found.
    ExternalDataName(Vec<u8>),
    /// A type this crate does not know.
    Unknown {
        /// The type.
        magic: u32,
        /// Its bytes, without padding.
        data: Vec<u8>,
    },
}

impl Extension {
    /// The record's type.
    pub fn magic(&self) -> u32 {
        match self {
            Self::BackingFormat(_) => magic::BACKING_FORMAT,
            Self::FeatureNames(_) => magic::FEATURE_NAMES,
            Self::Bitmaps(_) => magic::BITMAPS,
            Self::EncryptionHeader(_) => magic::ENCRYPTION_HEADER,
            Self::ExternalDataName(_) => magic::EXTERNAL_DATA_NAME,
            Self::Unknown { magic, .. } => *magic,
        }
    }

    /// The record's bytes, without type, length and padding.
    pub fn data(&self) -> &[u8] {
        match self {
            Self::BackingFormat(name) => name.as_bytes(),
            Self::FeatureNames(names) => &names.0,
            Self::Bitmaps(data)
            | Self::EncryptionHeader(data)
            | Self::ExternalDataName(data)
            | Self::Unknown { data, .. } => data,
        }
    }

    fn parse(magic: u32, data: &[u8], at: u64) -> Result<Self, ParseError> {
        Ok(match magic {
            magic::BACKING_FORMAT => Self::BackingFormat(backing_format(data, at)?),
            magic::FEATURE_NAMES => Self::FeatureNames(FeatureNames(data.to_vec())),
            magic::BITMAPS => Self::Bitmaps(data.to_vec()),
            magic::ENCRYPTION_HEADER => Self::EncryptionHeader(data.to_vec()),
            magic::EXTERNAL_DATA_NAME => Self::ExternalDataName(data.to_vec()),
            _ => Self::Unknown { magic, data: data.to_vec() },
        })
    }
}

fn backing_format(data: &[u8], at: u64) -> Result<String, ParseError> {
    let fail = |kind| ParseError::new("backing file format name", at, kind);
    if data.len() > MAX_BACKING_FORMAT_LEN {
        let (value, max) = (data.len() as u64, MAX_BACKING_FORMAT_LEN as u64);
        return Err(fail(ParseErrorKind::OutOfRange { value, min: 0, max }));
    }
    // QEMU reads the name up to a zero byte.
    let name = data.split(|&byte| byte == 0).next().unwrap_or_default();
    String::from_utf8(name.to_vec()).map_err(|_| fail(ParseErrorKind::NotUtf8))
}

/// The header extensions of an image, in the order they are stored.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Extensions {
    /// The records.
    pub items: Vec<Extension>,
}

impl Extensions {
    /// Reads the extensions in `first_cluster[start..end]`: `start` is the header's length, `end` the offset of
    /// the backing file name or the cluster's size ([`crate::Header::extensions_end`]).
    ///
    /// As QEMU has it, the list may also end by running out of room, and of one known type twice the last counts.
    ///
    /// # Errors
    /// A record that reaches past `end`, a backing format name that is too long or no text, or fewer bytes than `end`.
    pub fn parse(first_cluster: &[u8], start: usize, end: usize) -> Result<Self, ParseError> {
        let have = first_cluster.len();
        if have < end {
            let kind = ParseErrorKind::Truncated { needed: end as u64, have: have as u64 };
            return Err(ParseError::new("header extensions", start as u64, kind));
        }
        let mut found = Self::default();
        let mut at = start;
        while end.saturating_sub(at) >= RECORD_HEADER {
            let magic = be32(first_cluster, at);
            if magic == magic::END {
                break;
            }
            let len = be32(first_cluster, at + 4) as usize;
            let room = end - at - RECORD_HEADER;
            if len > room {
                let kind = ParseErrorKind::OutOfRange { value: len as u64, min: 0, max: room as u64 };
                return Err(ParseError::new("header extension length", at as u64 + 4, kind));
            }
            let data = &first_cluster[at + RECORD_HEADER..][..len];
            found.put(Extension::parse(magic, data, (at + RECORD_HEADER) as u64)?);
            at += RECORD_HEADER + pad8(len);
        }
        Ok(found)
    }

    fn put(&mut self, extension: Extension) {
        let is_known = !matches!(extension, Extension::Unknown { .. });
        match self.items.iter_mut().find(|other| is_known && other.magic() == extension.magic()) {
            Some(earlier) => *earlier = extension,
            None => self.items.push(extension),
        }
    }

    /// The records and the end mark, padded, ready to follow a header.
    pub fn encode(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(self.encoded_len());
        for extension in &self.items {
            let data = extension.data();
            out.extend_from_slice(&extension.magic().to_be_bytes());
            out.extend_from_slice(&(data.len() as u32).to_be_bytes());
            out.extend_from_slice(data);
            out.resize(pad8(out.len()), 0);
        }
        out.resize(out.len() + RECORD_HEADER, 0);
        out
    }

    /// Bytes of [`Extensions::encode`].
    pub fn encoded_len(&self) -> usize {
        let records = self.items.iter().map(|extension| RECORD_HEADER + pad8(extension.data().len()));
        records.sum::<usize>() + RECORD_HEADER
    }

    /// The backing file's format, where the image names it. An empty name names none.
    pub fn backing_format(&self) -> Option<&str> {
        self.items.iter().find_map(|extension| match extension {
            Extension::BackingFormat(name) if !name.is_empty() => Some(name.as_str()),
            _ => None,
        })
    }

    /// The bytes of the bitmaps extension.
    pub fn bitmaps(&self) -> Option<&[u8]> {
        self.items.iter().find_map(|extension| match extension {
            Extension::Bitmaps(data) => Some(data.as_slice()),
            _ => None,
        })
    }

    /// The image's own names for feature bits.
    pub fn feature_names(&self) -> Option<&FeatureNames> {
        self.items.iter().find_map(|extension| match extension {
            Extension::FeatureNames(names) => Some(names),
            _ => None,
        })
    }
}

/// Which of the header's three bit fields a feature name speaks of.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum FeatureKind {
    /// Incompatible features.
    Incompatible,
    /// Compatible features.
    Compatible,
    /// Autoclear features.
    Autoclear,
}

/// The feature name table: 48-byte records of kind, bit and name.
///
/// It is advice for error messages only, so nothing in it can be wrong: records that make no sense are skipped.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FeatureNames(Vec<u8>);

impl FeatureNames {
    const RECORD: usize = 48;
    const NAME: usize = Self::RECORD - 2;

    /// A table of these names; each is cut to 46 bytes.
    pub fn new<'a>(names: impl IntoIterator<Item = (FeatureKind, u8, &'a str)>) -> Self {
        let mut table = Vec::new();
        for (kind, bit, name) in names {
            let start = table.len();
            table.extend_from_slice(&[kind as u8, bit]);
            table.extend_from_slice(&name.as_bytes()[..name.len().min(Self::NAME)]);
            table.resize(start + Self::RECORD, 0);
        }
        Self(table)
    }

    /// The features this crate knows, for new images.
    pub fn known() -> Self {
        use FeatureKind::{Autoclear, Compatible, Incompatible};
        Self::new([
            (Incompatible, 0, "dirty bit"),
            (Incompatible, 1, "corrupt bit"),
            (Incompatible, 2, "external data file"),
            (Incompatible, 3, "compression type"),
            (Incompatible, 4, "extended L2 entries"),
            (Compatible, 0, "lazy refcounts"),
            (Autoclear, 0, "bitmaps"),
            (Autoclear, 1, "raw external data"),
        ])
    }

    /// The name of a bit, cleaned of control characters so that it can go into a message.
    pub fn name(&self, kind: FeatureKind, bit: u8) -> Option<Cow<'_, str>> {
        let wanted = [kind as u8, bit];
        let record = self.0.as_chunks::<{ Self::RECORD }>().0.iter().find(|record| record[..2] == wanted)?;
        let name = &record[2..];
        let len = name.iter().position(|&byte| byte == 0).unwrap_or(name.len());
        let name = String::from_utf8_lossy(&name[..len]);
        Some(if name.contains(char::is_control) { name.replace(char::is_control, "?").into() } else { name })
    }
}

#[cfg(test)]
mod tests;
