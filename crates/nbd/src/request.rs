//! Requests of the transmission phase.

use super::{CommandFlags, DecodeError, EXTENDED_REQUEST_MAGIC, Fields, REQUEST_MAGIC};

/// What a request asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Command {
    /// Bytes of the export.
    Read,
    /// New bytes, carried behind the request.
    Write,
    /// The end of the session; no reply.
    Disconnect,
    /// Everything written so far onto stable storage.
    Flush,
    /// A range that is no longer needed.
    Trim,
    /// A range that will be read soon.
    Cache,
    /// A range to become zeros.
    WriteZeroes,
    /// The contexts' answers about a range.
    BlockStatus,
    /// Anything else, `RESIZE` among it.
    Unknown(u16),
}

impl Command {
    /// From the value on the wire.
    pub const fn from_wire(value: u16) -> Self {
        match value {
            0 => Self::Read,
            1 => Self::Write,
            2 => Self::Disconnect,
            3 => Self::Flush,
            4 => Self::Trim,
            5 => Self::Cache,
            6 => Self::WriteZeroes,
            7 => Self::BlockStatus,
            other => Self::Unknown(other),
        }
    }

    /// The value on the wire.
    pub const fn to_wire(self) -> u16 {
        match self {
            Self::Read => 0,
            Self::Write => 1,
            Self::Disconnect => 2,
            Self::Flush => 3,
            Self::Trim => 4,
            Self::Cache => 5,
            Self::WriteZeroes => 6,
            Self::BlockStatus => 7,
            Self::Unknown(other) => other,
        }
    }
}

/// A request as the client sent it; nothing but the magic number is checked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request {
    /// Modifiers; bits without a name are kept.
    pub flags: CommandFlags,
    /// What is asked for.
    pub command: Command,
    /// The client's name for the request, given back in every reply to it.
    pub cookie: u64,
    /// First byte concerned.
    pub offset: u64,
    /// Bytes concerned, or bytes of payload: see [`Request::payload_len`].
    pub length: u64,
}

impl Request {
    /// Bytes of a compact request.
    pub const COMPACT_SIZE: usize = 28;
    /// Bytes of an extended request.
    pub const EXTENDED_SIZE: usize = 32;

    /// Bytes of a request, by whether extended headers were agreed on.
    pub const fn size(extended: bool) -> usize {
        if extended { Self::EXTENDED_SIZE } else { Self::COMPACT_SIZE }
    }

    /// Reads the request at the front of `bytes`.
    ///
    /// # Errors
    /// [`DecodeError::Length`] with fewer bytes than [`Request::size`], [`DecodeError::BadMagic`] when the
    /// stream is out of step: nothing that follows can be made sense of.
    pub fn decode(bytes: &[u8], extended: bool) -> Result<Self, DecodeError> {
        let expected = if extended { EXTENDED_REQUEST_MAGIC } else { REQUEST_MAGIC };
        let mut fields = Fields(bytes);
        let magic = fields.u32()?;
        if magic != expected {
            return Err(DecodeError::BadMagic { found: magic.into(), expected: expected.into() });
        }
        Ok(Self {
            flags: CommandFlags::from_bits_retain(fields.u16()?),
            command: Command::from_wire(fields.u16()?),
            cookie: fields.u64()?,
            offset: fields.u64()?,
            length: if extended { fields.u64()? } else { fields.u32()?.into() },
        })
    }

    /// Appends the request to `into`; clients in tests and tools use it.
    ///
    /// # Panics
    /// When a compact request is longer than 32 bits can say.
    pub fn encode(&self, extended: bool, into: &mut Vec<u8>) {
        let magic = if extended { EXTENDED_REQUEST_MAGIC } else { REQUEST_MAGIC };
        into.extend(magic.to_be_bytes());
        into.extend(self.flags.bits().to_be_bytes());
        into.extend(self.command.to_wire().to_be_bytes());
        into.extend(self.cookie.to_be_bytes());
        into.extend(self.offset.to_be_bytes());
        if extended {
            into.extend(self.length.to_be_bytes());
        } else {
            into.extend(u32::try_from(self.length).expect("a 32-bit length").to_be_bytes());
        }
    }

    /// Bytes that follow the request.
    ///
    /// A write always carries a payload; with extended headers the flag says it for every other command. (It should for writes,
    /// too; the client of QEMU 10 does not set it.)
    pub fn payload_len(&self, extended: bool) -> u64 {
        let says_so = extended && self.flags.contains(CommandFlags::PAYLOAD_LEN);
        if says_so || self.command == Command::Write { self.length } else { 0 }
    }
}

/// Payload of a `BLOCK_STATUS`: which contexts to answer for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StatusFilter<'a> {
    /// Bytes asked about.
    pub effect_len: u64,
    ids: &'a [u8],
}

impl<'a> StatusFilter<'a> {
    /// Reads a payload of 8 + 4n bytes.
    ///
    /// # Errors
    /// [`DecodeError::Length`] for any other length.
    pub fn decode(payload: &'a [u8]) -> Result<Self, DecodeError> {
        let mut fields = Fields(payload);
        let effect_len = fields.u64()?;
        if !fields.0.len().is_multiple_of(4) {
            return Err(DecodeError::Length);
        }
        Ok(Self { effect_len, ids: fields.0 })
    }

    /// The contexts asked for, by the numbers they were given when they were selected.
    pub fn context_ids(&self) -> impl Iterator<Item = u32> + 'a {
        let (ids, _) = self.ids.as_chunks();
        ids.iter().map(|id| u32::from_be_bytes(*id))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn requests_survive_the_round_trip(
            flags: u16, command: u16, cookie: u64, offset: u64, length: u32, extended: bool
        ) {
            let request = Request {
                flags: CommandFlags::from_bits_retain(flags),
                command: Command::from_wire(command),
                cookie,
                offset,
                length: u64::from(length) << if extended { 30 } else { 0 },
            };
            let mut bytes = Vec::new();
            request.encode(extended, &mut bytes);
            prop_assert_eq!(bytes.len(), Request::size(extended));
            prop_assert_eq!(Request::decode(&bytes, extended), Ok(request));
            let is_bad_magic = matches!(Request::decode(&bytes, !extended), Err(DecodeError::BadMagic { .. }));
            prop_assert!(is_bad_magic, "the two kinds of request must not be mistaken for one another");
        }

        #[test]
        fn decoders_take_any_bytes(data in proptest::collection::vec(any::<u8>(), 0..64), extended: bool) {
            let _ = Request::decode(&data, extended);
            if let Ok(filter) = StatusFilter::decode(&data) {
                prop_assert_eq!(filter.context_ids().count() * 4 + 8, data.len());
            }
        }
    }

    #[test]
    fn writes_have_a_payload_and_what_the_flag_says_it_of_in_extended_headers() {
        let write = Request {
            flags: CommandFlags::empty(),
            command: Command::Write,
            cookie: 0,
            offset: 0,
            length: 512,
        };
        assert_eq!((write.payload_len(false), write.payload_len(true)), (512, 512));
        let trim = Request { flags: CommandFlags::PAYLOAD_LEN, command: Command::Trim, ..write };
        assert_eq!(trim.payload_len(true), 512);
        assert_eq!(trim.payload_len(false), 0);
    }
}
