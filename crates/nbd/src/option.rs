//! Options: what a client asks for before it chooses an export, and the replies.

use super::{DecodeError, Fields, MAX_STRING, OPTION_MAGIC, OPTION_REPLY_MAGIC, check_string};

/// Longest option data the server reads into memory: room for a name and some contexts at their longest.
pub const MAX_OPTION_DATA: usize = 64 << 10;

/// What a client may ask for during the handshake.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OptionKind {
    /// Take an export; no reply can be given but its size (the old way).
    ExportName,
    /// End the session.
    Abort,
    /// Name all exports.
    List,
    /// Go on over TLS.
    StartTls,
    /// Describe an export.
    Info,
    /// Describe an export and take it.
    Go,
    /// Use structured replies.
    StructuredReply,
    /// Name the metadata contexts of an export.
    ListMetaContext,
    /// Select metadata contexts of an export.
    SetMetaContext,
    /// Use 32-byte headers with 64-bit lengths.
    ExtendedHeaders,
    /// Anything else.
    Unknown(u32),
}

impl OptionKind {
    /// From the value on the wire.
    pub const fn from_wire(value: u32) -> Self {
        match value {
            1 => Self::ExportName,
            2 => Self::Abort,
            3 => Self::List,
            5 => Self::StartTls,
            6 => Self::Info,
            7 => Self::Go,
            8 => Self::StructuredReply,
            9 => Self::ListMetaContext,
            10 => Self::SetMetaContext,
            11 => Self::ExtendedHeaders,
            other => Self::Unknown(other),
        }
    }

    /// The value on the wire.
    pub const fn to_wire(self) -> u32 {
        match self {
            Self::ExportName => 1,
            Self::Abort => 2,
            Self::List => 3,
            Self::StartTls => 5,
            Self::Info => 6,
            Self::Go => 7,
            Self::StructuredReply => 8,
            Self::ListMetaContext => 9,
            Self::SetMetaContext => 10,
            Self::ExtendedHeaders => 11,
            Self::Unknown(other) => other,
        }
    }
}

/// The head of an option: 16 bytes, then `len` bytes of data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OptionHeader {
    /// What is asked for.
    pub kind: OptionKind,
    /// Bytes of data that follow; not yet checked against any limit.
    pub len: u32,
}

impl OptionHeader {
    /// Bytes on the wire.
    pub const SIZE: usize = 16;

    /// Reads the head of an option.
    ///
    /// # Errors
    /// [`DecodeError::BadMagic`]: nothing that follows can be made sense of.
    pub fn decode(bytes: &[u8; Self::SIZE]) -> Result<Self, DecodeError> {
        let mut fields = Fields(bytes);
        let magic = fields.u64()?;
        if magic != OPTION_MAGIC {
            return Err(DecodeError::BadMagic { found: magic, expected: OPTION_MAGIC });
        }
        Ok(Self { kind: OptionKind::from_wire(fields.u32()?), len: fields.u32()? })
    }
}

/// Data of `INFO` and `GO`: an export, and what to tell of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InfoQuery<'a> {
    /// The export; empty for the default one.
    pub export: &'a str,
    /// The client asks for the canonical name.
    pub wants_name: bool,
    /// The client asks for the description.
    pub wants_description: bool,
    /// The client asks for the block sizes, and thereby promises to keep to them.
    pub wants_block_size: bool,
}

/// `NBD_INFO_EXPORT`.
pub const INFO_EXPORT: u16 = 0;
/// `NBD_INFO_NAME`.
pub const INFO_NAME: u16 = 1;
/// `NBD_INFO_DESCRIPTION`.
pub const INFO_DESCRIPTION: u16 = 2;
/// `NBD_INFO_BLOCK_SIZE`.
pub const INFO_BLOCK_SIZE: u16 = 3;

impl<'a> InfoQuery<'a> {
    /// Reads the data of an `INFO` or `GO`; items this server does not know are left out.
    ///
    /// # Errors
    /// Where lengths disagree or the name is no string.
    pub fn decode(data: &'a [u8]) -> Result<Self, DecodeError> {
        let mut fields = Fields(data);
        let export = fields.string()?;
        let mut query = Self { export, wants_name: false, wants_description: false, wants_block_size: false };
        for _ in 0..fields.u16()? {
            match fields.u16()? {
                INFO_NAME => query.wants_name = true,
                INFO_DESCRIPTION => query.wants_description = true,
                INFO_BLOCK_SIZE => query.wants_block_size = true,
                _ => {}
            }
        }
        fields.finish()?;
        Ok(query)
    }
}

/// Data of `LIST_META_CONTEXT` and `SET_META_CONTEXT`: an export, and queries against its contexts.
#[derive(Clone, Copy, Debug)]
pub struct ContextQuery<'a> {
    /// The export; empty for the default one.
    pub export: &'a str,
    /// How many queries there are.
    pub count: u32,
    queries: &'a [u8],
}

impl<'a> ContextQuery<'a> {
    /// Reads and checks the whole of the data.
    ///
    /// # Errors
    /// Where lengths disagree or a string is none.
    pub fn decode(data: &'a [u8]) -> Result<Self, DecodeError> {
        let mut fields = Fields(data);
        let export = fields.string()?;
        let count = fields.u32()?;
        let queries = fields.0;
        // Each query is at least its length field, so a lying count ends with the data.
        for _ in 0..count {
            fields.string()?;
        }
        fields.finish()?;
        Ok(Self { export, count, queries })
    }

    /// The queries in the client's order.
    pub fn queries(&self) -> impl Iterator<Item = &'a str> {
        let mut fields = Fields(self.queries);
        (0..self.count).map_while(move |_| fields.string().ok())
    }
}

/// Data of `EXPORT_NAME`: all of it is the name.
///
/// # Errors
/// [`DecodeError::BadString`] when it is none.
pub fn decode_export_name(data: &[u8]) -> Result<&str, DecodeError> {
    check_string(data)
}

/// What a reply to an option says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum ReplyKind {
    /// Done, or accepted.
    Ack = 1,
    /// One export of the list.
    Server = 2,
    /// One item about an export.
    Info = 3,
    /// One metadata context.
    MetaContext = 4,
    /// The option is not known here.
    ErrUnsup = 0x8000_0001,
    /// The operator forbids it.
    ErrPolicy = 0x8000_0002,
    /// The option's data or its moment is wrong.
    ErrInvalid = 0x8000_0003,
    /// TLS must come first.
    ErrTlsReqd = 0x8000_0005,
    /// There is no such export.
    ErrUnknown = 0x8000_0006,
    /// The server is going away.
    ErrShutdown = 0x8000_0007,
    /// The option is longer than the server reads.
    ErrTooBig = 0x8000_0009,
    /// Extended headers were agreed on already and win.
    ErrExtHeaderReqd = 0x8000_000a,
}

/// The 20 bytes before the data of an option reply.
pub fn encode_reply_header(option: OptionKind, reply: ReplyKind, len: usize) -> [u8; 20] {
    assert!(len <= MAX_OPTION_DATA + 2 * MAX_STRING, "option replies are short");
    let mut bytes = [0; 20];
    bytes[..8].copy_from_slice(&OPTION_REPLY_MAGIC.to_be_bytes());
    bytes[8..12].copy_from_slice(&option.to_wire().to_be_bytes());
    bytes[12..16].copy_from_slice(&(reply as u32).to_be_bytes());
    bytes[16..].copy_from_slice(&(len as u32).to_be_bytes());
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn string(text: &str) -> Vec<u8> {
        [&(text.len() as u32).to_be_bytes()[..], text.as_bytes()].concat()
    }

    #[test]
    fn option_numbers_survive_the_round_trip() {
        for value in (0..20).chain([u32::MAX]) {
            assert_eq!(OptionKind::from_wire(value).to_wire(), value);
        }
    }

    #[test]
    fn info_query_reads_name_and_items() {
        let mut data = string("web");
        data.extend([0, 3, 0, 3, 0x77, 0x77, 0, 2]);
        let query = InfoQuery::decode(&data).unwrap();
        assert_eq!(query.export, "web");
        assert!(query.wants_block_size && query.wants_description && !query.wants_name);
        assert_eq!(
            InfoQuery::decode(&data[..data.len() - 1]),
            Err(DecodeError::Length),
            "an item is cut off"
        );
        data.push(0);
        assert_eq!(InfoQuery::decode(&data), Err(DecodeError::Length), "bytes after the last item");
    }

    #[test]
    fn context_query_refuses_counts_that_lie() {
        let mut data = string("web");
        data.extend(2u32.to_be_bytes());
        data.extend(string("base:"));
        data.extend(string("vmstrata:layer"));
        let query = ContextQuery::decode(&data).unwrap();
        assert_eq!(query.queries().collect::<Vec<_>>(), ["base:", "vmstrata:layer"]);
        for count in [1, 3, u32::MAX] {
            data[7..11].copy_from_slice(&u32::to_be_bytes(count));
            assert_eq!(ContextQuery::decode(&data).unwrap_err(), DecodeError::Length);
        }
    }

    #[test]
    fn an_option_without_its_magic_is_refused() {
        let mut bytes = [0; 16];
        bytes[..8].copy_from_slice(&OPTION_MAGIC.to_be_bytes());
        bytes[11] = 7;
        bytes[15] = 9;
        assert_eq!(OptionHeader::decode(&bytes), Ok(OptionHeader { kind: OptionKind::Go, len: 9 }));
        bytes[0] ^= 1;
        assert!(matches!(OptionHeader::decode(&bytes), Err(DecodeError::BadMagic { .. })));
    }

    proptest! {
        #[test]
        fn decoders_take_any_bytes(data in proptest::collection::vec(any::<u8>(), 0..200)) {
            let _ = InfoQuery::decode(&data);
            if let Ok(query) = ContextQuery::decode(&data) {
                prop_assert_eq!(query.queries().count(), query.count as usize);
            }
            let _ = decode_export_name(&data);
        }
    }
}
