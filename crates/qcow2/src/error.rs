//! What can be wrong with bytes that claim to be a qcow2 image.
//!
//! One error type for every parser: the engine adds the file's path and passes it on. The field carries the
//! name the specification gives it, so that it can be looked up there.

use thiserror::Error;

/// A field of an image that this crate refuses, where it lies in the file, and why.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("{field} at byte {offset:#x}: {kind}")]
pub struct ParseError {
    /// The field, named as in the specification.
    pub field: &'static str,
    /// Where the field starts, in bytes from the start of the file.
    pub offset: u64,
    /// What is wrong with it.
    pub kind: ParseErrorKind,
}

impl ParseError {
    pub(crate) fn new(field: &'static str, offset: u64, kind: ParseErrorKind) -> Self {
        Self { field, offset, kind }
    }
}

/// Why a field is refused.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum ParseErrorKind {
    /// The first four bytes are not `QFI\xfb`.
    #[error("not a qcow2 image (magic {found:#010x})")]
    BadMagic {
        /// The first four bytes, big-endian.
        found: u32,
    },
    /// Neither version 2 nor version 3.
    #[error("qcow2 version {found} is not supported, only 2 and 3 are")]
    UnsupportedVersion {
        /// The version the header claims.
        found: u32,
    },
    /// The structure goes on after the bytes that are there.
    #[error("cut short: {needed} bytes needed, {have} there")]
    Truncated {
        /// Bytes the structure needs, counted from its own start.
        needed: u64,
        /// Bytes that were there.
        have: u64,
    },
    /// A number outside the range it may have.
    #[error("{value} is not in {min}..={max}")]
    OutOfRange {
        /// The number found.
        value: u64,
        /// Lowest value allowed.
        min: u64,
        /// Highest value allowed.
        max: u64,
    },
    /// An offset that is not a multiple of what it must be.
    #[error("offset {value:#x} is not a multiple of {alignment}")]
    Misaligned {
        /// The offset found.
        value: u64,
        /// Bytes it must be a multiple of.
        alignment: u64,
    },
    /// A structure that reaches past the end of the file.
    #[error("reaches to byte {end:#x}, the file ends at {file_len:#x}")]
    PastEndOfFile {
        /// The first byte after the structure (saturating).
        end: u64,
        /// The file's length in bytes.
        file_len: u64,
    },
    /// Two structures on the same bytes.
    #[error("lies over the {other}")]
    Overlaps {
        /// The other structure.
        other: &'static str,
    },
    /// The L1 table does not reach to the end of the disk.
    #[error("{have} entries cannot map the whole disk, which needs {needed}")]
    TableTooSmall {
        /// Entries the table has.
        have: u64,
        /// Entries the disk's size asks for.
        needed: u64,
    },
    /// Incompatible feature bits no one has told us about.
    #[error("unknown incompatible feature bits {bits:#x}{}", list(.names))]
    UnknownFeatures {
        /// The unknown bits.
        bits: u64,
        /// Their names, where the image's own feature name table gives them, lowest bit first.
        names: Vec<String>,
    },
    /// A feature we know and do not do.
    #[error("unsupported feature: {feature}")]
    Unsupported {
        /// The feature, in words.
        feature: &'static str,
    },
    /// The compression type and the incompatible bit that announces it disagree.
    #[error("compression type {value} with the incompatible bit {}", if *.bit_set { "set" } else { "clear" })]
    CompressionBit {
        /// The compression type found (0 also where the header is too short to hold one).
        value: u8,
        /// Whether incompatible bit 3 is set.
        bit_set: bool,
    },
    /// Bits that must be zero are not.
    #[error("reserved bits {bits:#x} are set")]
    Reserved {
        /// The bits at fault.
        bits: u64,
    },
    /// A string that is not UTF-8 where only ASCII names make sense.
    #[error("not valid UTF-8")]
    NotUtf8,
    /// A name with a zero byte in it: other tools would stop reading there and open another file.
    #[error("contains a zero byte")]
    ContainsNul,
}

/// `": a, b"`, or nothing for no names.
fn list(names: &[String]) -> String {
    if names.is_empty() { String::new() } else { format!(" ({})", names.join(", ")) }
}
