//! Heads of replies in the transmission phase: everything before a payload.

use super::{EXTENDED_REPLY_MAGIC, Errno, SIMPLE_REPLY_MAGIC, STRUCTURED_REPLY_MAGIC};

/// Which messages client and server agreed on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Style {
    /// Compact requests, simple replies.
    #[default]
    Simple,
    /// Compact requests, structured replies.
    Structured,
    /// Extended requests, extended replies.
    Extended,
}

impl Style {
    /// Whether replies come in chunks.
    pub const fn is_chunked(self) -> bool {
        !matches!(self, Self::Simple)
    }

    /// Whether headers have 64-bit lengths.
    pub const fn is_extended(self) -> bool {
        matches!(self, Self::Extended)
    }
}

/// The request a reply belongs to, as far as its head repeats it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReplyTo {
    /// The client's name for the request.
    pub cookie: u64,
    /// The request's offset, which extended replies repeat.
    pub offset: u64,
}

/// A chunk's type.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u16)]
pub enum ChunkKind {
    /// Nothing but the end of the reply.
    None = 0,
    /// Bytes of the export.
    OffsetData = 1,
    /// A range that reads as zeros.
    OffsetHole = 2,
    /// Extents with 32-bit lengths.
    BlockStatus = 5,
    /// Extents with 64-bit lengths.
    BlockStatusExt = 6,
    /// The request failed.
    Error = 0x8001,
    /// The request failed at an offset.
    ErrorOffset = 0x8002,
}

/// `NBD_REPLY_FLAG_DONE`: the last chunk of a reply.
pub const REPLY_FLAG_DONE: u16 = 1;

/// The bytes of a reply before its payload.
#[derive(Clone, Copy)]
pub struct Head {
    bytes: [u8; Self::CAPACITY],
    len: u8,
}

impl Head {
    /// The longest: an extended header, then an error with its offset (46 bytes), rounded up.
    const CAPACITY: usize = 48;

    /// A simple reply; `len` bytes of data may follow where `error` is `None`.
    pub fn simple(to: ReplyTo, error: Option<Errno>) -> Self {
        let mut head = Self::empty();
        head.put(&SIMPLE_REPLY_MAGIC.to_be_bytes());
        head.put(&error.map_or(0, Errno::get).to_be_bytes());
        head.put(&to.cookie.to_be_bytes());
        head
    }

    /// The end of a reply that carries nothing.
    pub fn done(style: Style, to: ReplyTo) -> Self {
        match style {
            Style::Simple => Self::simple(to, None),
            _ => Self::chunk(style, to, ChunkKind::None, true, 0),
        }
    }

    /// `len` bytes of the export from `at` follow.
    pub fn data(style: Style, to: ReplyTo, at: u64, len: usize, done: bool) -> Self {
        let mut head = Self::chunk(style, to, ChunkKind::OffsetData, done, 8 + len as u64);
        head.put(&at.to_be_bytes());
        head
    }

    /// `len` bytes of the export from `at` are zeros.
    pub fn hole(style: Style, to: ReplyTo, at: u64, len: u32, done: bool) -> Self {
        let mut head = Self::chunk(style, to, ChunkKind::OffsetHole, done, 12);
        head.put(&at.to_be_bytes());
        head.put(&len.to_be_bytes());
        head
    }

    /// `len` bytes of extents follow.
    pub fn block_status(style: Style, to: ReplyTo, len: usize, done: bool) -> Self {
        let kind = if style.is_extended() { ChunkKind::BlockStatusExt } else { ChunkKind::BlockStatus };
        Self::chunk(style, to, kind, done, len as u64)
    }

    /// The request failed; a message of `message_len` bytes follows in chunked styles.
    ///
    /// # Panics
    /// For a message longer than the protocol allows.
    pub fn error(style: Style, to: ReplyTo, error: Errno, message_len: usize) -> Self {
        if style == Style::Simple {
            return Self::simple(to, Some(error));
        }
        assert!(message_len <= super::MAX_STRING, "messages are short");
        let mut head = Self::chunk(style, to, ChunkKind::Error, true, 6 + message_len as u64);
        head.put(&error.get().to_be_bytes());
        head.put(&(message_len as u16).to_be_bytes());
        head
    }

    /// The part of a read that begins at `at` failed; other parts may be sent before and after.
    pub fn error_at(style: Style, to: ReplyTo, error: Errno, at: u64, done: bool) -> Self {
        let mut head = Self::chunk(style, to, ChunkKind::ErrorOffset, done, 14);
        head.put(&error.get().to_be_bytes());
        head.put(&0u16.to_be_bytes());
        head.put(&at.to_be_bytes());
        head
    }

    /// The bytes to send.
    pub fn as_bytes(&self) -> &[u8] {
        &self.bytes[..usize::from(self.len)]
    }

    fn empty() -> Self {
        Self { bytes: [0; Self::CAPACITY], len: 0 }
    }

    fn chunk(style: Style, to: ReplyTo, kind: ChunkKind, done: bool, payload_len: u64) -> Self {
        let mut head = Self::empty();
        let flags = if done { REPLY_FLAG_DONE } else { 0 };
        let magic = if style.is_extended() { EXTENDED_REPLY_MAGIC } else { STRUCTURED_REPLY_MAGIC };
        head.put(&magic.to_be_bytes());
        head.put(&flags.to_be_bytes());
        head.put(&(kind as u16).to_be_bytes());
        head.put(&to.cookie.to_be_bytes());
        if style.is_extended() {
            head.put(&to.offset.to_be_bytes());
            head.put(&payload_len.to_be_bytes());
        } else {
            assert!(style.is_chunked(), "simple replies have no chunks");
            let len = u32::try_from(payload_len).expect("payloads are bounded far below 4 GiB");
            head.put(&len.to_be_bytes());
        }
        head
    }

    fn put(&mut self, bytes: &[u8]) {
        let at = usize::from(self.len);
        self.bytes[at..at + bytes.len()].copy_from_slice(bytes);
        self.len += bytes.len() as u8;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TO: ReplyTo = ReplyTo { cookie: 0x0102_0304_0506_0708, offset: 0x1000 };

    #[test]
    fn simple_reply_is_sixteen_bytes() {
        let head = Head::error(Style::Simple, TO, Errno::NoSpc, 0);
        let expected = [0x67, 0x44, 0x66, 0x98, 0, 0, 0, 28, 1, 2, 3, 4, 5, 6, 7, 8];
        assert_eq!(head.as_bytes(), expected);
        assert_eq!(Head::done(Style::Simple, TO).as_bytes()[4..8], [0; 4]);
    }

    #[test]
    fn structured_data_counts_its_offset_into_the_length() {
        let head = Head::data(Style::Structured, TO, 0x2000, 512, true);
        let bytes = head.as_bytes();
        assert_eq!(bytes[..8], [0x66, 0x8e, 0x33, 0xef, 0, 1, 0, 1]);
        assert_eq!(bytes[16..20], 520u32.to_be_bytes());
        assert_eq!(bytes[20..], 0x2000u64.to_be_bytes());
    }

    #[test]
    fn extended_hole_repeats_the_requests_offset() {
        let head = Head::hole(Style::Extended, TO, 0x3000, 7, false);
        let bytes = head.as_bytes();
        assert_eq!(bytes[..8], [0x6e, 0x8a, 0x27, 0x8c, 0, 0, 0, 2]);
        assert_eq!(bytes[16..24], 0x1000u64.to_be_bytes());
        assert_eq!(bytes[24..32], 12u64.to_be_bytes());
        assert_eq!(bytes[32..], [&0x3000u64.to_be_bytes()[..], &7u32.to_be_bytes()].concat());
    }

    #[test]
    fn the_longest_head_fits() {
        let head = Head::error_at(Style::Extended, TO, Errno::Io, 9, true);
        assert_eq!(head.as_bytes().len(), 46);
        assert_eq!(head.as_bytes()[32..36], 5u32.to_be_bytes());
    }

    #[test]
    fn block_status_uses_the_type_of_its_style() {
        let kind = |style| {
            let head = Head::block_status(style, TO, 24, true);
            u16::from_be_bytes([head.as_bytes()[6], head.as_bytes()[7]])
        };
        assert_eq!(kind(Style::Structured), ChunkKind::BlockStatus as u16);
        assert_eq!(kind(Style::Extended), ChunkKind::BlockStatusExt as u16);
    }
}
