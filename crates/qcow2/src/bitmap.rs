//! Persistent bitmaps: the directory, and which clusters each bitmap holds.
//!
//! vmstrata does not maintain bitmaps (a writer clears [`crate::Autoclear::BITMAPS`] unless it does), but while
//! the extension is there its clusters are referenced: a count of references walks directory and tables.
//!
//! Source: the specification, "Bitmaps extension" and "Bitmaps".

use vmstrata_types::{ClusterBits, HostOffset};

use crate::bytes::{be16, be32, be64, pad8};
use crate::entry::{EntryError, OFFSET_MASK};
use crate::error::{ParseError, ParseErrorKind};
use crate::geometry::ENTRY_LEN;
use crate::header::Header;

/// Most bitmaps in an image, QEMU's limit.
pub const MAX_BITMAPS: u32 = 65_535;
/// Most bytes of a bitmap directory, QEMU's limit.
pub const MAX_DIRECTORY_LEN: u64 = 1024 * MAX_BITMAPS as u64;
/// Most bytes of a bitmap's name, QEMU's limit.
pub const MAX_NAME_LEN: u16 = 1023;

/// Most bytes of a bitmap's clusters, QEMU's limit; bounds the bitmap table as well.
pub const MAX_BITMAP_LEN: u64 = 512 << 20;
/// The one type of bitmap there is.
pub const DIRTY_TRACKING: u8 = 1;
/// Granularities QEMU handles: 512 B to 2 GiB.
pub const GRANULARITY_BITS: std::ops::RangeInclusive<u8> = 9..=31;

const EXTENSION_LEN: usize = 24;
const MIN_ENTRY_LEN: usize = 24;

bitflags::bitflags! {
    /// State of a bitmap.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
    pub struct BitmapFlags: u32 {
        /// Not saved properly; its content is not to be trusted.
        const IN_USE = 1 << 0;
        /// Must track every write to the disk.
        const AUTO = 1 << 1;
        /// May be used by those who do not know its extra data.
        const EXTRA_DATA_COMPATIBLE = 1 << 2;
    }
}

/// The bitmaps header extension: where the directory lies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BitmapsExtension {
    /// Bitmaps in the directory, at least 1.
    pub count: u32,
    /// Bytes of the directory.
    pub directory_len: u64,
    /// Start of the directory.
    pub directory_offset: HostOffset,
}

/// An entry of the bitmap directory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Bitmap {
    /// Start of the bitmap table.
    pub table_offset: HostOffset,
    /// Entries of 8 bytes in the bitmap table.
    pub table_size: u32,
    /// State.
    pub flags: BitmapFlags,
    /// [`DIRTY_TRACKING`], the only one defined.
    pub kind: u8,
    /// Base-2 logarithm of the guest bytes one bit stands for.
    pub granularity_bits: u8,
    /// Name; bytes that are no UTF-8 are replaced.
    pub name: String,
}

impl BitmapsExtension {
    /// Parses the extension's `data`, which starts at byte `at` of the file.
    ///
    /// # Errors
    /// A wrong length, reserved bytes in use, no or too many bitmaps, a directory that is too small or large
    /// for them, off a cluster boundary, or past the end of the file.
    pub fn parse(data: &[u8], at: u64, header: &Header, file_len: u64) -> Result<Self, ParseError> {
        let fail = |field, within, kind| Err(ParseError::new(field, at + within, kind));
        if data.len() != EXTENSION_LEN {
            let (value, len) = (data.len() as u64, EXTENSION_LEN as u64);
            return fail("bitmaps extension", 0, ParseErrorKind::OutOfRange { value, min: len, max: len });
        }
        let count = be32(data, 0);
        if count == 0 || count > MAX_BITMAPS {
            let kind = ParseErrorKind::OutOfRange { value: count.into(), min: 1, max: MAX_BITMAPS.into() };
            return fail("nb_bitmaps", 0, kind);
        }
        if be32(data, 4) != 0 {
            return fail("bitmaps reserved", 4, ParseErrorKind::Reserved { bits: be32(data, 4).into() });
        }
        let directory_len = be64(data, 8);
        let min = u64::from(count) * MIN_ENTRY_LEN as u64;
        if directory_len < min || directory_len > MAX_DIRECTORY_LEN {
            let kind = ParseErrorKind::OutOfRange { value: directory_len, min, max: MAX_DIRECTORY_LEN };
            return fail("bitmap_directory_size", 8, kind);
        }
        let directory_offset = HostOffset::new(be64(data, 16));
        match misplaced(directory_offset, directory_len, header.cluster_bits, file_len) {
            Some(kind) => fail("bitmap_directory_offset", 16, kind),
            None => Ok(Self { count, directory_len, directory_offset }),
        }
    }

    /// Parses the directory, whose `directory_len` bytes are `directory`.
    ///
    /// # Errors
    /// An entry cut short, reserved flags or types, a granularity, name or table size out of range, a table off
    /// a cluster boundary or past the end of the file, bytes left over.
    pub fn parse_directory(
        &self,
        directory: &[u8],
        header: &Header,
        file_len: u64,
    ) -> Result<Vec<Bitmap>, ParseError> {
        let mut bitmaps = Vec::new();
        let mut at = 0;
        for _ in 0..self.count {
            let bytes = directory.get(at..).unwrap_or_default();
            let entry = Entry { bytes, at: self.directory_offset + at as u64 };
            let (bitmap, len) = entry.parse(header, file_len)?;
            bitmaps.push(bitmap);
            at += len;
        }
        if at as u64 != self.directory_len {
            let kind =
                ParseErrorKind::OutOfRange { value: self.directory_len, min: at as u64, max: at as u64 };
            return Err(ParseError::new("bitmap_directory_size", self.directory_offset.get(), kind));
        }
        Ok(bitmaps)
    }

    /// Says of every bitmap that its content is not to be trusted, as one must who writes to the disk and does not
    /// keep them.
    ///
    /// # Panics
    /// When `directory` is not one that [`BitmapsExtension::parse_directory`] accepted.
    pub fn mark_in_use(&self, directory: &mut [u8]) {
        let mut at = 0;
        for _ in 0..self.count {
            let flags = be32(directory, at + 12) | BitmapFlags::IN_USE.bits();
            directory[at + 12..at + 16].copy_from_slice(&flags.to_be_bytes());
            let name_at = MIN_ENTRY_LEN + be32(directory, at + 20) as usize;
            at += pad8(name_at + be16(directory, at + 18) as usize);
        }
    }
}

/// Bytes from the start of one directory entry on, and where that is in the file.
struct Entry<'a> {
    bytes: &'a [u8],
    at: HostOffset,
}

impl Entry<'_> {
    fn fail<T>(&self, field: &'static str, within: u64, kind: ParseErrorKind) -> Result<T, ParseError> {
        Err(ParseError::new(field, (self.at + within).get(), kind))
    }

    fn need(&self, len: usize) -> Result<(), ParseError> {
        let (needed, have) = (len as u64, self.bytes.len() as u64);
        if have < needed {
            return self.fail("bitmap directory entry", 0, ParseErrorKind::Truncated { needed, have });
        }
        Ok(())
    }

    fn in_range(
        &self,
        field: &'static str,
        within: u64,
        value: u64,
        min: u64,
        max: u64,
    ) -> Result<(), ParseError> {
        if value < min || value > max {
            return self.fail(field, within, ParseErrorKind::OutOfRange { value, min, max });
        }
        Ok(())
    }

    /// The bitmap and the bytes its entry takes, padding included.
    fn parse(&self, header: &Header, file_len: u64) -> Result<(Bitmap, usize), ParseError> {
        self.need(MIN_ENTRY_LEN)?;
        let bytes = self.bytes;
        self.in_range("bitmap name_size", 18, be16(bytes, 18).into(), 1, MAX_NAME_LEN.into())?;
        let name_at = MIN_ENTRY_LEN + be32(bytes, 20) as usize;
        let end = name_at + be16(bytes, 18) as usize;
        self.need(pad8(end))?;
        let Some(flags) = BitmapFlags::from_bits(be32(bytes, 12)) else {
            let bits = be32(bytes, 12) & !BitmapFlags::all().bits();
            return self.fail("bitmap flags", 12, ParseErrorKind::Reserved { bits: bits.into() });
        };
        let (kind, granularity_bits) = (bytes[16], bytes[17]);
        self.in_range("bitmap type", 16, kind.into(), DIRTY_TRACKING.into(), DIRTY_TRACKING.into())?;
        let (min, max) = (*GRANULARITY_BITS.start(), *GRANULARITY_BITS.end());
        self.in_range("bitmap granularity_bits", 17, granularity_bits.into(), min.into(), max.into())?;
        let (table_offset, table_size) = self.table(header, file_len)?;
        let name = String::from_utf8_lossy(&bytes[name_at..end]).into_owned();
        Ok((Bitmap { table_offset, table_size, flags, kind, granularity_bits, name }, pad8(end)))
    }

    fn table(&self, header: &Header, file_len: u64) -> Result<(HostOffset, u32), ParseError> {
        let (offset, size) = (HostOffset::new(be64(self.bytes, 0)), be32(self.bytes, 8));
        self.in_range("bitmap_table_size", 8, size.into(), 1, MAX_BITMAP_LEN >> header.cluster_bits.get())?;
        match misplaced(offset, u64::from(size) * ENTRY_LEN, header.cluster_bits, file_len) {
            Some(kind) => self.fail("bitmap_table_offset", 0, kind),
            None => Ok((offset, size)),
        }
    }
}

/// What is wrong with a structure of `len` bytes at `offset`, if anything.
fn misplaced(offset: HostOffset, len: u64, bits: ClusterBits, file_len: u64) -> Option<ParseErrorKind> {
    if !offset.is_aligned(bits) {
        return Some(ParseErrorKind::Misaligned { value: offset.get(), alignment: bits.size() });
    }
    if offset == HostOffset::ZERO {
        return Some(ParseErrorKind::Overlaps { other: "header" });
    }
    let end = offset.get().saturating_add(len);
    if end > file_len {
        return Some(ParseErrorKind::PastEndOfFile { end, file_len });
    }
    None
}

/// Decodes a bitmap table entry: the cluster it holds, `None` when the bits are all zeros or all ones.
///
/// # Errors
/// Reserved bits or an offset off a cluster boundary.
pub const fn decode_table_entry(
    raw: u64,
    cluster_bits: ClusterBits,
) -> Result<Option<HostOffset>, EntryError> {
    let offset = HostOffset::new(raw & OFFSET_MASK);
    let all_ones_flag = if offset.get() == 0 { 1 } else { 0 };
    let bits = raw & !OFFSET_MASK & !all_ones_flag;
    if bits != 0 {
        return Err(EntryError::Reserved { raw, bits });
    }
    if !offset.is_aligned(cluster_bits) {
        return Err(EntryError::Misaligned { raw, offset });
    }
    Ok(if offset.get() == 0 { None } else { Some(offset) })
}

#[cfg(test)]
mod tests;
