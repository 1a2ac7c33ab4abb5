//! A client that does exactly what it is told, and decodes replies without the server's code.

use std::collections::HashMap;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use vmstrata_export::nbd::protocol::CommandFlags;
use vmstrata_export::nbd::protocol::request::{Command, Request};

pub use vmstrata_export::nbd::protocol::reply::Style;

pub const OPTION_REPLY_MAGIC: u64 = 0x0003_e889_0455_65a9;
pub const ACK: u32 = 1;
pub const REP_ERR: u32 = 1 << 31;
pub const CONTEXTS: [&str; 2] = ["base:allocation", "vmstrata:layer"];

/// A connection to a server.
pub struct Client {
    pub socket: UnixStream,
    pub style: Style,
    pub flags: u16,
    pub size: u64,
    next_cookie: u64,
    sent: HashMap<u64, Request>,
}

/// One message of a reply; a simple reply counts as a chunk of type 0 (or 1 with data).
#[derive(Clone, Debug)]
pub struct Chunk {
    pub cookie: u64,
    pub kind: u16,
    pub is_done: bool,
    pub error: u32,
    pub payload: Vec<u8>,
}

impl Client {
    /// Connects and exchanges flags.
    pub fn connect(socket: &Path) -> Self {
        let mut client = Self::connect_raw(socket);
        let greeting = client.take(18);
        assert_eq!(greeting[..16], *b"NBDMAGICIHAVEOPT");
        assert_eq!(greeting[16..], [0, 3], "fixed newstyle, no zeroes");
        client.socket.write_all(&3u32.to_be_bytes()).unwrap();
        client
    }

    /// Connects and says nothing.
    pub fn connect_raw(socket: &Path) -> Self {
        let socket = UnixStream::connect(socket).unwrap();
        socket.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        socket.set_write_timeout(Some(Duration::from_secs(20))).unwrap();
        Self { socket, style: Style::Simple, flags: 0, size: 0, next_cookie: 1, sent: HashMap::new() }
    }

    /// Connects and takes an export.
    pub fn open(socket: &Path, export: &str, style: Style) -> Self {
        let mut client = Self::connect(socket);
        client.set_style(style);
        if style != Style::Simple {
            let replies = client.option(10, &context_query(export, &CONTEXTS));
            assert_eq!(replies.len(), 3, "two contexts and an ACK: {replies:?}");
        }
        client.go(export);
        client
    }

    pub fn set_style(&mut self, style: Style) {
        let option = match style {
            Style::Simple => return,
            Style::Structured => 8,
            Style::Extended => 11,
        };
        assert_eq!(self.option(option, &[]), [(ACK, vec![])]);
        self.style = style;
    }

    /// Takes an export by GO.
    pub fn go(&mut self, export: &str) {
        let replies = self.option(7, &info_query(export, &[3]));
        assert_eq!(replies.last().unwrap().0, ACK, "{replies:?}");
        let (_, info) = replies.iter().find(|(kind, data)| *kind == 3 && data[..2] == [0, 0]).unwrap();
        self.size = u64::from_be_bytes(info[2..10].try_into().unwrap());
        self.flags = u16::from_be_bytes(info[10..12].try_into().unwrap());
    }

    pub fn send_option(&mut self, option: u32, data: &[u8]) {
        let head = [&b"IHAVEOPT"[..], &option.to_be_bytes(), &(data.len() as u32).to_be_bytes(), data];
        self.socket.write_all(&head.concat()).unwrap();
    }

    /// Sends an option and returns all replies to it.
    pub fn option(&mut self, option: u32, data: &[u8]) -> Vec<(u32, Vec<u8>)> {
        self.send_option(option, data);
        let mut replies = Vec::new();
        loop {
            let head = self.take(20);
            assert_eq!(head[..8], OPTION_REPLY_MAGIC.to_be_bytes());
            assert_eq!(head[8..12], option.to_be_bytes());
            let kind = u32::from_be_bytes(head[12..16].try_into().unwrap());
            let data = self.take(u32::from_be_bytes(head[16..].try_into().unwrap()) as usize);
            replies.push((kind, data));
            if kind == ACK || kind & REP_ERR != 0 {
                return replies;
            }
        }
    }

    /// Sends a request and returns its cookie. In extended style, a payload sets its flag and the length.
    pub fn send(&mut self, command: Command, flags: CommandFlags, offset: u64, length: u64) -> u64 {
        self.send_with(command, flags, offset, length, &[])
    }

    pub fn send_with(
        &mut self,
        command: Command,
        flags: CommandFlags,
        offset: u64,
        length: u64,
        payload: &[u8],
    ) -> u64 {
        let cookie = self.next_cookie;
        self.next_cookie += 1;
        let request = Request { flags, command, cookie, offset, length };
        let mut bytes = Vec::new();
        request.encode(self.style.is_extended(), &mut bytes);
        bytes.extend(payload);
        self.socket.write_all(&bytes).unwrap();
        self.sent.insert(cookie, request);
        cookie
    }

    pub fn send_write(&mut self, offset: u64, data: &[u8], fua: bool) -> u64 {
        let mut flags = if fua { CommandFlags::FUA } else { CommandFlags::empty() };
        flags.set(CommandFlags::PAYLOAD_LEN, self.style.is_extended());
        self.send_with(Command::Write, flags, offset, data.len() as u64, data)
    }

    /// The next message, of whatever reply.
    pub fn chunk(&mut self) -> Chunk {
        let magic = u32::from_be_bytes(self.take(4).try_into().unwrap());
        match magic {
            0x6744_6698 => {
                assert!(!self.style.is_extended(), "extended headers allow no simple replies");
                self.simple_reply()
            }
            0x668e_33ef => {
                assert_eq!(self.style, Style::Structured);
                let head = self.take(16);
                let len = u32::from_be_bytes(head[12..].try_into().unwrap());
                self.structured(&head[..12], len.into())
            }
            0x6e8a_278c => {
                assert_eq!(self.style, Style::Extended);
                let head = self.take(28);
                let cookie = u64::from_be_bytes(head[4..12].try_into().unwrap());
                let offset = u64::from_be_bytes(head[12..20].try_into().unwrap());
                assert_eq!(offset, self.sent[&cookie].offset, "the request's offset comes back");
                let len = u64::from_be_bytes(head[20..].try_into().unwrap());
                self.structured(&head[..12], len)
            }
            other => panic!("a reply with magic {other:#x}"),
        }
    }

    fn simple_reply(&mut self) -> Chunk {
        let head = self.take(12);
        let error = u32::from_be_bytes(head[..4].try_into().unwrap());
        let cookie = u64::from_be_bytes(head[4..].try_into().unwrap());
        let request = self.sent[&cookie];
        let has_data = request.command == Command::Read && error == 0;
        assert!(!has_data || self.style == Style::Simple, "structured reads come in chunks");
        let mut payload = Vec::new();
        if has_data {
            payload.extend(request.offset.to_be_bytes());
            payload.extend(self.take(request.length as usize));
        }
        Chunk { cookie, kind: has_data.into(), is_done: true, error, payload }
    }

    fn structured(&mut self, head: &[u8], len: u64) -> Chunk {
        assert!(len < 40 << 20, "a chunk of {len} bytes");
        let kind = u16::from_be_bytes([head[2], head[3]]);
        let payload = self.take(len as usize);
        let error = if kind & 0x8000 != 0 { u32::from_be_bytes(payload[..4].try_into().unwrap()) } else { 0 };
        assert!(kind & 0x8000 == 0 || error != 0, "an error of 0");
        let cookie = u64::from_be_bytes(head[4..12].try_into().unwrap());
        Chunk { cookie, kind, is_done: head[1] & 1 != 0, error, payload }
    }

    /// All chunks of a reply; other replies must not come in between.
    pub fn reply(&mut self, cookie: u64) -> Result<Vec<Chunk>, u32> {
        let mut chunks = Vec::new();
        loop {
            let chunk = self.chunk();
            assert_eq!(chunk.cookie, cookie);
            let is_done = chunk.is_done;
            chunks.push(chunk);
            if is_done {
                break;
            }
        }
        self.sent.remove(&cookie);
        match chunks.iter().find(|chunk| chunk.error != 0) {
            Some(chunk) => Err(chunk.error),
            None => Ok(chunks),
        }
    }

    /// Sends a request without payload and waits for its reply.
    pub fn call(
        &mut self,
        command: Command,
        flags: CommandFlags,
        offset: u64,
        length: u64,
    ) -> Result<Vec<Chunk>, u32> {
        let cookie = self.send(command, flags, offset, length);
        self.reply(cookie)
    }

    pub fn read(&mut self, offset: u64, length: u64) -> Result<Vec<u8>, u32> {
        let chunks = self.call(Command::Read, CommandFlags::empty(), offset, length)?;
        Ok(assemble(&chunks, offset, length))
    }

    pub fn write(&mut self, offset: u64, data: &[u8]) -> Result<(), u32> {
        let cookie = self.send_write(offset, data, false);
        self.reply(cookie).map(drop)
    }

    pub fn flush(&mut self) -> Result<(), u32> {
        self.call(Command::Flush, CommandFlags::empty(), 0, 0).map(drop)
    }

    /// Exactly `len` bytes.
    pub fn take(&mut self, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        self.socket.read_exact(&mut bytes).unwrap();
        bytes
    }

    /// Whether the server has hung up, after whatever it still had to say.
    pub fn is_hung_up(&mut self) -> bool {
        let mut scratch = [0; 4096];
        loop {
            match self.socket.read(&mut scratch) {
                Ok(0) => return true,
                Ok(_) => {}
                Err(error) => return error.kind() == std::io::ErrorKind::ConnectionReset,
            }
        }
    }
}

/// Puts the chunks of a read together; they must cover it once, without overlap.
pub fn assemble(chunks: &[Chunk], offset: u64, length: u64) -> Vec<u8> {
    let mut data = vec![0; length as usize];
    let mut covered = 0;
    for chunk in chunks {
        if chunk.kind == 0 {
            continue;
        }
        let at = (u64::from_be_bytes(chunk.payload[..8].try_into().unwrap()) - offset) as usize;
        covered += match chunk.kind {
            1 => {
                let bytes = &chunk.payload[8..];
                data[at..at + bytes.len()].copy_from_slice(bytes);
                bytes.len()
            }
            2 => {
                let len = u32::from_be_bytes(chunk.payload[8..].try_into().unwrap()) as usize;
                assert!(at + len <= data.len());
                len
            }
            other => panic!("chunk type {other} in a read"),
        };
    }
    assert_eq!(covered as u64, length, "all bytes, each once");
    data
}

/// The extents of a block status chunk, of either style: its context and (length, status).
pub fn extents(chunk: &Chunk) -> (u32, Vec<(u64, u64)>) {
    let word = |bytes: &[u8]| bytes.iter().fold(0, |sum, byte| sum << 8 | u64::from(*byte));
    let id = word(&chunk.payload[..4]) as u32;
    match chunk.kind {
        5 => (id, chunk.payload[4..].chunks(8).map(|item| (word(&item[..4]), word(&item[4..]))).collect()),
        6 => {
            let items: Vec<_> =
                chunk.payload[8..].chunks(16).map(|item| (word(&item[..8]), word(&item[8..]))).collect();
            assert_eq!(word(&chunk.payload[4..8]), items.len() as u64, "the count matches");
            (id, items)
        }
        other => panic!("chunk type {other} in a block status"),
    }
}

pub fn string(text: &str) -> Vec<u8> {
    [&(text.len() as u32).to_be_bytes()[..], text.as_bytes()].concat()
}

/// Data of INFO and GO.
pub fn info_query(export: &str, items: &[u16]) -> Vec<u8> {
    let mut data = string(export);
    data.extend((items.len() as u16).to_be_bytes());
    items.iter().for_each(|item| data.extend(item.to_be_bytes()));
    data
}

/// Data of LIST_META_CONTEXT and SET_META_CONTEXT.
pub fn context_query(export: &str, queries: &[&str]) -> Vec<u8> {
    let mut data = string(export);
    data.extend((queries.len() as u32).to_be_bytes());
    queries.iter().for_each(|query| data.extend(string(query)));
    data
}
