//! Making an image stand on another backing file, by one sector's write.
//!
//! The header's first sector says where the backing file's name lies, and is where the list of extensions starts. What does
//! not fit into it is written first, to a place in the header's cluster that the old header does not use, and flushed; then
//! the first sector is written, which leads there.
//!
//! ```text
//!   old   │ fields, backing format, index │ snapshot, feature names, end, name │                      │
//!   body  │             "                 │                "                   │ snapshot', ..., name'│
//!   new   │ fields', backing format', index', padding ────────────────────────►│          "           │
//!         └─ sector 0 ────────────────────┘
//! ```
//!
//! The padding is a header extension that no one knows: it leads over what the old header used. The next time, that
//! space is free, and the padding leads back.
//!
//! Invariant: whatever a power failure leaves, the image has the old backing file with the old record of it, or the
//! new with the new.

use std::ffi::OsString;
use std::ops::Range;
use std::os::unix::ffi::OsStrExt as _;

use vmstrata_qcow2::extension::magic;
use vmstrata_qcow2::header::{MAX_BACKING_NAME_LEN, field};
use vmstrata_qcow2::index::IndexLink;
use vmstrata_qcow2::{Extension, Extensions, Header};
use vmstrata_store::Store;
use vmstrata_types::HostOffset;

use super::MergeFault;
use crate::error::{IoContext as _, Result};
use crate::layer::Format;

/// A sector is written whole or not at all.
const SECTOR: usize = 512;
const RECORD_HEADER: usize = 8;

/// What an image is to stand on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Below {
    pub(crate) name: OsString,
    pub(crate) format: Format,
    /// What is known of it as a snapshot.
    pub(crate) record: Option<Vec<u8>>,
}

/// The writes that make an image stand on something else.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Relink {
    /// Goes first, where nothing is.
    body: Option<(usize, Vec<u8>)>,
    name: Range<usize>,
    /// The extensions in the first sector, from `extensions_at` on.
    extensions: Vec<u8>,
    extensions_at: usize,
}

impl Relink {
    /// Finds out how the image in `store` can come to stand on `below`, or on nothing.
    ///
    /// # Errors
    /// [`MergeFault::NoRoom`]; a header that cannot be read.
    pub(crate) fn plan(store: &dyn Store, header: &Header, below: Option<&Below>) -> Result<Self> {
        Self::plan_with(store, header, below, |_| {})
    }

    /// The same with other extensions, those aside that are about the layer below or the index.
    ///
    /// # Errors
    /// As [`Relink::plan`].
    pub(super) fn plan_with(
        store: &dyn Store,
        header: &Header,
        below: Option<&Below>,
        change: impl FnOnce(&mut Extensions),
    ) -> Result<Self> {
        let mut cluster = vec![0; header.cluster_bits.size() as usize];
        store.read_padded(&mut cluster, HostOffset::ZERO).while_trying("read the header")?;
        let mut extensions = header.extensions(&cluster)?;
        change(&mut extensions);
        let used = used(&cluster, header);
        let planned = Self::fitting(header, &extensions, below, &used, true);
        Ok(planned
            .or_else(|| Self::fitting(header, &extensions, below, &used, false))
            .ok_or(MergeFault::NoRoom)?)
    }

    /// The writes, with or without the names of features, which are only advice.
    fn fitting(
        header: &Header,
        old: &Extensions,
        below: Option<&Below>,
        used: &[Range<usize>],
        names: bool,
    ) -> Option<Self> {
        let name = below.map_or(&[][..], |below| below.name.as_bytes());
        if name.len() > MAX_BACKING_NAME_LEN as usize
            || below.is_some() && (name.is_empty() || name.contains(&0))
        {
            return None;
        }
        let (first, rest) = extensions(old, below, names);
        let extensions_at = header.header_length as usize;
        let cluster = header.cluster_bits.size() as usize;
        let whole = Extensions { items: [&first.items[..], &rest.items[..]].concat() }.encode();
        if extensions_at + whole.len() + name.len() <= SECTOR {
            let name_at = extensions_at + whole.len();
            let extensions = [&whole, name].concat();
            return Some(Self { body: None, name: name_at..name_at + name.len(), extensions, extensions_at });
        }
        let first = without_end(first.encode());
        let padding_at = extensions_at + first.len();
        let body = [&rest.encode(), name].concat();
        let body_at = free_place(used, padding_at + RECORD_HEADER, body.len(), cluster)?;
        if padding_at + RECORD_HEADER > SECTOR {
            return None;
        }
        let skipped = (body_at - padding_at - RECORD_HEADER) as u32;
        let extensions = [&first[..], &magic::PADDING.to_be_bytes(), &skipped.to_be_bytes()].concat();
        let name_at = body_at + body.len() - name.len();
        Some(Self {
            body: Some((body_at, body)),
            name: name_at..name_at + name.len(),
            extensions,
            extensions_at,
        })
    }

    /// Writes what goes first, where nothing is; returns whether there is anything. To be flushed.
    ///
    /// # Errors
    /// A host that cannot write: nothing has changed.
    pub(crate) fn write_body(&self, store: &dyn Store) -> Result<bool> {
        let Some((at, body)) = &self.body else { return Ok(false) };
        let at = HostOffset::new(*at as u64);
        store.write_all(body, at).while_trying("write the header").map_err(|error| error.at(at))?;
        Ok(true)
    }

    /// Writes the first sector, which makes the change. No one else writes the header meanwhile.
    ///
    /// # Errors
    /// A host that cannot read or write: the image stands on the one or on the other.
    pub(crate) fn write_sector(&self, store: &dyn Store) -> Result<()> {
        let mut sector = [0; SECTOR];
        store.read_exact(&mut sector, HostOffset::ZERO).while_trying("read the header")?;
        let len = self.name.len() as u32;
        let name_at = if len == 0 { 0 } else { self.name.start as u64 };
        put(&mut sector, field::BACKING_FILE_OFFSET, &name_at.to_be_bytes());
        put(&mut sector, field::BACKING_FILE_SIZE, &len.to_be_bytes());
        sector[self.extensions_at..].fill(0);
        sector[self.extensions_at..self.extensions_at + self.extensions.len()]
            .copy_from_slice(&self.extensions);
        store.write_all(&sector, HostOffset::ZERO).while_trying("write the header")
    }
}

/// Where in the cluster, past the first sector and a multiple of 8 bytes from `from` on, nothing else lies in `len` bytes.
fn free_place(used: &[Range<usize>], from: usize, len: usize, cluster: usize) -> Option<usize> {
    let past = used.iter().map(|range| range.end).max().unwrap_or(0);
    [SECTOR, past].into_iter().find_map(|wanted| {
        let at = from + wanted.saturating_sub(from).next_multiple_of(8);
        let end = at + len;
        let free = used.iter().all(|range| range.end <= at.max(SECTOR) || range.start >= end);
        (at >= SECTOR && end < cluster && free).then_some(at)
    })
}

fn put(sector: &mut [u8; SECTOR], at: u64, bytes: &[u8]) {
    sector[at as usize..at as usize + bytes.len()].copy_from_slice(bytes);
}

/// The new extensions: those that go first, and the rest.
fn extensions(old: &Extensions, below: Option<&Below>, names: bool) -> (Extensions, Extensions) {
    let (mut first, mut rest) = (Extensions::default(), Extensions::default());
    if let Some(below) = below {
        first.items.push(Extension::BackingFormat(below.format.to_string()));
    }
    for extension in &old.items {
        match extension.magic() {
            magic::BACKING_FORMAT | magic::SNAPSHOT | magic::PADDING => {}
            magic::INDEX => {
                let data = IndexLink::encode(None).to_vec();
                first.items.push(Extension::Unknown { magic: magic::INDEX, data });
            }
            magic::FEATURE_NAMES if !names => {}
            _ => rest.items.push(extension.clone()),
        }
    }
    if let Some(data) = below.and_then(|below| below.record.clone()) {
        rest.items.insert(0, Extension::Unknown { magic: magic::SNAPSHOT, data });
    }
    (first, rest)
}

fn without_end(mut encoded: Vec<u8>) -> Vec<u8> {
    encoded.truncate(encoded.len() - RECORD_HEADER);
    encoded
}

/// What the header uses of its cluster, the fields aside. Of padding only its first bytes are.
fn used(cluster: &[u8], header: &Header) -> Vec<Range<usize>> {
    let mut used = Vec::new();
    let word = |at: usize| u32::from_be_bytes(*cluster[at..].first_chunk().expect("within the cluster"));
    let (mut at, end) = (header.header_length as usize, header.extensions_end());
    while end.saturating_sub(at) >= RECORD_HEADER {
        let (magic, len) = (word(at), word(at + 4) as usize);
        let data = if magic == magic::END { 0 } else { len.next_multiple_of(8) };
        used.push(at..at + RECORD_HEADER + if magic == magic::PADDING { 0 } else { data });
        if magic == magic::END {
            break;
        }
        at += RECORD_HEADER + data;
    }
    if let Some(name) = header.backing_file {
        let start = name.offset.get() as usize;
        used.push(start..start + name.len as usize);
    }
    used
}

#[cfg(test)]
mod tests;
