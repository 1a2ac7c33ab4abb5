//! The NBD protocol: its wire format, an export of a server as a [`vmstrata_store::Store`], and disks that lie there.
//!
//! ```text
//!   option, request, reply   bytes to structs and back: no I/O, no allocation; the server side lives in `export`
//!   uri ─► client            an export that is open: requests of many threads on one connection
//!           files            an opener that knows such addresses beside files
//! ```
//!
//! Everything in the wire format is big-endian. Decoders take what a peer sent as it came: they never panic, and look at no byte twice.
//! They are public so that fuzz targets can call them.
//!
//! Source: `doc/proto.md` and `doc/uri.md` of the NBD project, and its branch `extension-ext-header`.

mod client;
mod files;
pub mod option;
pub mod reply;
pub mod request;
mod uri;

pub use client::Client;
pub use files::Files;
pub use uri::{Place, Uri, UriError};

/// First eight bytes a server sends, `NBDMAGIC`.
pub const INIT_MAGIC: u64 = 0x4e42_444d_4147_4943;
/// Opens the newstyle handshake and every option, `IHAVEOPT`.
pub const OPTION_MAGIC: u64 = 0x4948_4156_454f_5054;
/// Opens every reply to an option.
pub const OPTION_REPLY_MAGIC: u64 = 0x0003_e889_0455_65a9;
/// Opens a compact request.
pub const REQUEST_MAGIC: u32 = 0x2560_9513;
/// Opens an extended request.
pub const EXTENDED_REQUEST_MAGIC: u32 = 0x21e4_1c71;
/// Opens a simple reply.
pub const SIMPLE_REPLY_MAGIC: u32 = 0x6744_6698;
/// Opens a chunk of a structured reply.
pub const STRUCTURED_REPLY_MAGIC: u32 = 0x668e_33ef;
/// Opens a chunk of an extended reply.
pub const EXTENDED_REPLY_MAGIC: u32 = 0x6e8a_278c;

/// Longest string of the protocol (export names, context names, messages), in bytes.
pub const MAX_STRING: usize = 4096;
/// Longest payload of a write, and of a read that must be answered in one piece, in bytes: what every client may rely on.
pub const MAX_PAYLOAD: u32 = 32 << 20;

bitflags::bitflags! {
    /// What the server offers before any option.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct HandshakeFlags: u16 {
        /// Options may be refused with an error and tried again.
        const FIXED_NEWSTYLE = 1 << 0;
        /// The padding after `EXPORT_NAME` may be left out.
        const NO_ZEROES = 1 << 1;
    }
}

bitflags::bitflags! {
    /// What the client accepts of [`HandshakeFlags`].
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct ClientFlags: u32 {
        /// The client understands replies to options.
        const FIXED_NEWSTYLE = 1 << 0;
        /// The client wants no padding after `EXPORT_NAME`.
        const NO_ZEROES = 1 << 1;
    }
}

bitflags::bitflags! {
    /// What an export can do.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct TransmissionFlags: u16 {
        /// Always set.
        const HAS_FLAGS = 1 << 0;
        /// Writing commands are refused.
        const READ_ONLY = 1 << 1;
        /// `FLUSH` is supported.
        const SEND_FLUSH = 1 << 2;
        /// The FUA flag is supported.
        const SEND_FUA = 1 << 3;
        /// The export is a spinning disk.
        const ROTATIONAL = 1 << 4;
        /// `TRIM` is supported.
        const SEND_TRIM = 1 << 5;
        /// `WRITE_ZEROES` is supported.
        const SEND_WRITE_ZEROES = 1 << 6;
        /// Reads may ask not to be cut up.
        const SEND_DF = 1 << 7;
        /// A flush on one connection covers all connections.
        const CAN_MULTI_CONN = 1 << 8;
        /// `RESIZE` is supported.
        const SEND_RESIZE = 1 << 9;
        /// `CACHE` is supported.
        const SEND_CACHE = 1 << 10;
        /// `WRITE_ZEROES` may ask to be refused where it would be slow.
        const SEND_FAST_ZERO = 1 << 11;
        /// `BLOCK_STATUS` may carry a list of the contexts asked for.
        const BLOCK_STATUS_PAYLOAD = 1 << 12;
    }
}

bitflags::bitflags! {
    /// Modifiers of one request.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct CommandFlags: u16 {
        /// Reply only once what was written is on stable storage.
        const FUA = 1 << 0;
        /// Zeros must stay allocated.
        const NO_HOLE = 1 << 1;
        /// Answer a read with one chunk of data.
        const DF = 1 << 2;
        /// One extent for each context is enough.
        const REQ_ONE = 1 << 3;
        /// Fail rather than zero at the speed of a write.
        const FAST_ZERO = 1 << 4;
        /// The length is that of a payload (extended headers only).
        const PAYLOAD_LEN = 1 << 5;
        const _ = !0;
    }
}

/// The error values a reply may carry; the protocol allows no others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Errno {
    /// Not permitted: a write to a read-only export.
    Perm = 1,
    /// The disk could not be read or written.
    Io = 5,
    /// The server is out of memory.
    NoMem = 12,
    /// The request makes no sense, or reads past the end.
    Inval = 22,
    /// No space left, or a write past the end.
    NoSpc = 28,
    /// Too long to be answered in one piece.
    Overflow = 75,
    /// A fast zero would not be fast.
    NotSup = 95,
    /// The server is going away.
    Shutdown = 108,
}

impl Errno {
    /// The protocol's value for an `errno` of the system.
    pub fn from_os(errno: i32) -> Self {
        match errno {
            libc::EPERM | libc::EROFS | libc::EACCES => Self::Perm,
            libc::ENOMEM => Self::NoMem,
            libc::EINVAL | libc::ENOTSUP | libc::EOVERFLOW => Self::Inval,
            libc::ENOSPC | libc::EDQUOT | libc::EFBIG => Self::NoSpc,
            libc::ESHUTDOWN => Self::Shutdown,
            _ => Self::Io,
        }
    }

    /// The value on the wire.
    pub const fn get(self) -> u32 {
        self as u32
    }
}

/// What makes a client's bytes undecodable.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DecodeError {
    /// A message does not begin with the magic number its place asks for.
    #[error("magic {found:#x} where {expected:#x} belongs")]
    BadMagic {
        /// What the client sent.
        found: u64,
        /// What belongs there.
        expected: u64,
    },
    /// Lengths inside a message disagree with the length of the message.
    #[error("a length field does not match the length of its message")]
    Length,
    /// A string is longer than [`MAX_STRING`], holds a NUL, or is not UTF-8.
    #[error("a string is too long, holds a NUL, or is not UTF-8")]
    BadString,
}

/// Cuts fields off the front of a message.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Fields<'a>(pub(crate) &'a [u8]);

impl<'a> Fields<'a> {
    pub(crate) fn bytes(&mut self, len: usize) -> Result<&'a [u8], DecodeError> {
        let (head, rest) = self.0.split_at_checked(len).ok_or(DecodeError::Length)?;
        self.0 = rest;
        Ok(head)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], DecodeError> {
        let (head, rest) = self.0.split_first_chunk().ok_or(DecodeError::Length)?;
        self.0 = rest;
        Ok(*head)
    }

    pub(crate) fn u16(&mut self) -> Result<u16, DecodeError> {
        self.array().map(u16::from_be_bytes)
    }

    pub(crate) fn u32(&mut self) -> Result<u32, DecodeError> {
        self.array().map(u32::from_be_bytes)
    }

    pub(crate) fn u64(&mut self) -> Result<u64, DecodeError> {
        self.array().map(u64::from_be_bytes)
    }

    /// A string after its 32-bit length.
    pub(crate) fn string(&mut self) -> Result<&'a str, DecodeError> {
        let len = self.u32()? as usize;
        if len > self.0.len() {
            return Err(DecodeError::Length);
        }
        check_string(self.bytes(len)?)
    }

    pub(crate) fn finish(self) -> Result<(), DecodeError> {
        if self.0.is_empty() { Ok(()) } else { Err(DecodeError::Length) }
    }
}

/// The text of a string field.
///
/// # Errors
/// [`DecodeError::BadString`] where the protocol does not allow it.
pub fn check_string(bytes: &[u8]) -> Result<&str, DecodeError> {
    let text = std::str::from_utf8(bytes).map_err(|_| DecodeError::BadString)?;
    if text.len() > MAX_STRING || text.contains('\0') { Err(DecodeError::BadString) } else { Ok(text) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn system_errors_map_to_the_protocols_few() {
        assert_eq!(Errno::from_os(libc::EROFS), Errno::Perm);
        assert_eq!(Errno::from_os(libc::EDQUOT), Errno::NoSpc);
        assert_eq!(Errno::from_os(libc::EBADMSG), Errno::Io);
        assert_eq!(Errno::from_os(libc::EOPNOTSUPP), Errno::Inval, "95 is reserved for fast zeroes");
        assert_eq!(Errno::Shutdown.get(), 108);
    }

    #[test]
    fn strings_end_where_the_protocol_says() {
        assert_eq!(check_string(b"web"), Ok("web"));
        assert_eq!(check_string(&[b'a'; MAX_STRING]).map(str::len), Ok(MAX_STRING));
        assert_eq!(check_string(&[b'a'; MAX_STRING + 1]), Err(DecodeError::BadString));
        assert_eq!(check_string(b"a\0b"), Err(DecodeError::BadString));
        assert_eq!(check_string(&[0xff]), Err(DecodeError::BadString));
    }

    #[test]
    fn a_string_longer_than_its_message_is_a_length_error() {
        let mut fields = Fields(&[0, 0, 0, 4, b'a', b'b']);
        assert_eq!(fields.string(), Err(DecodeError::Length));
        let mut fields = Fields(&[0xff, 0xff, 0xff, 0xff, b'a']);
        assert_eq!(fields.string(), Err(DecodeError::Length));
    }
}
