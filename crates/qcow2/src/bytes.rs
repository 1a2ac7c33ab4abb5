//! Big-endian numbers at byte positions, for parsers that have checked the length before.

/// The two bytes at `at`.
///
/// # Panics
/// When `bytes` ends before them.
pub(crate) fn be16(bytes: &[u8], at: usize) -> u16 {
    u16::from_be_bytes([bytes[at], bytes[at + 1]])
}

/// The four bytes at `at`.
///
/// # Panics
/// When `bytes` ends before them.
pub(crate) fn be32(bytes: &[u8], at: usize) -> u32 {
    u32::from_be_bytes(*bytes[at..].first_chunk().expect("length checked by the caller"))
}

/// The eight bytes at `at`.
///
/// # Panics
/// When `bytes` ends before them.
pub(crate) fn be64(bytes: &[u8], at: usize) -> u64 {
    u64::from_be_bytes(*bytes[at..].first_chunk().expect("length checked by the caller"))
}

/// `len` rounded up to the multiple of 8 that every variable-length record of the format is padded to.
pub(crate) const fn pad8(len: usize) -> usize {
    len.next_multiple_of(8)
}
