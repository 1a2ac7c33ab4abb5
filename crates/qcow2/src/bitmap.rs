//! Persistent bitmaps: the directory, and which clusters each bitmap holds.
//!
//! vmstrata does not maintain bitmaps (a writer clears [`crate::Autoclear::BITMAPS`] unless it does), but while
//! the extension is there its clusters are referenced: whoever counts references walks directory and tables.
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
    /// 1 for dirty tracking, the only one defined.
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
    /// An entry cut short, reserved flags, a name that is too long or missing, a table off a cluster boundary
    /// or past the end of the file, bytes left over.
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
            let (bitmap, len) = parse_entry(bytes, self.directory_offset + at as u64, header, file_len)?;
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
}

/// One directory entry and the bytes it takes, padding included.
fn parse_entry(
    bytes: &[u8],
    start: HostOffset,
    header: &Header,
    file_len: u64,
) -> Result<(Bitmap, usize), ParseError> {
    let fail = |field, within, kind| Err(ParseError::new(field, (start + within).get(), kind));
    let have = bytes.len() as u64;
    if bytes.len() < MIN_ENTRY_LEN {
        let kind = ParseErrorKind::Truncated { needed: MIN_ENTRY_LEN as u64, have };
        return fail("bitmap directory entry", 0, kind);
    }
    let (name_len, extra_len) = (be16(bytes, 18), be32(bytes, 20));
    if name_len == 0 || name_len > MAX_NAME_LEN {
        let kind = ParseErrorKind::OutOfRange { value: name_len.into(), min: 1, max: MAX_NAME_LEN.into() };
        return fail("bitmap name_size", 18, kind);
    }
    let name_at = MIN_ENTRY_LEN + extra_len as usize;
    let end = name_at + name_len as usize;
    if bytes.len() < pad8(end) {
        let kind = ParseErrorKind::Truncated { needed: pad8(end) as u64, have };
        return fail("bitmap directory entry", 0, kind);
    }
    let Some(flags) = BitmapFlags::from_bits(be32(bytes, 12)) else {
        let bits = be32(bytes, 12) & !BitmapFlags::all().bits();
        return fail("bitmap flags", 12, ParseErrorKind::Reserved { bits: bits.into() });
    };
    let (table_offset, table_size) = (HostOffset::new(be64(bytes, 0)), be32(bytes, 8));
    let table_len = u64::from(table_size) * ENTRY_LEN;
    if let Some(kind) = misplaced(table_offset, table_len, header.cluster_bits, file_len) {
        return fail("bitmap_table_offset", 0, kind);
    }
    let name = String::from_utf8_lossy(&bytes[name_at..end]).into_owned();
    let bitmap =
        Bitmap { table_offset, table_size, flags, kind: bytes[16], granularity_bits: bytes[17], name };
    Ok((bitmap, pad8(end)))
}

/// What is wrong with `len` bytes at `offset`, if anything.
fn misplaced(offset: HostOffset, len: u64, bits: ClusterBits, file_len: u64) -> Option<ParseErrorKind> {
    if !offset.is_aligned(bits) {
        return Some(ParseErrorKind::Misaligned { value: offset.get(), alignment: bits.size() });
    }
    if len > 0 && offset == HostOffset::ZERO {
        return Some(ParseErrorKind::Overlaps { other: "header" });
    }
    let end = offset.get().saturating_add(len);
    if len > 0 && end > file_len {
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
