//! An NBD client with several requests in flight on one connection: fixed newstyle, simple or structured replies.
//!
//! The socket does not block. While a request cannot be sent, answers are taken, so that neither side waits for the other.

use std::collections::HashMap;
use std::io::{self, Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, ensure};

use super::export::{Ask, Export, Reply, Request};
use super::stamp::SECTOR;
use super::wait;

/// The longest that the handshake may take.
const PATIENCE: Duration = Duration::from_secs(60);

const OPTION_STRUCTURED: u32 = 8;
const OPTION_GO: u32 = 7;
const REPLY_ACK: u32 = 1;
const REPLY_INFO: u32 = 3;
const SIMPLE: u32 = 0x6744_6698;
const CHUNK: u32 = 0x668e_33ef;
const FLAG_DONE: u16 = 1;
const COMMAND_FUA: u16 = 1;
const COMMAND_NO_HOLE: u16 = 2;
/// Bits of the transmission flags that a writable export of vmstrata has: flush, FUA, trim, write-zeroes.
const EXPECTED: u16 = 1 << 2 | 1 << 3 | 1 << 5 | 1 << 6;

/// See the module documentation.
#[derive(Debug)]
pub(super) struct Nbd {
    socket: UnixStream,
    sectors: u64,
    /// Not sent yet.
    out: Vec<u8>,
    /// Received and not understood yet.
    received: Vec<u8>,
    in_flight: HashMap<u64, InFlight>,
}

#[derive(Debug)]
struct InFlight {
    offset: u64,
    /// Where a read's data goes.
    data: Vec<u8>,
    is_read: bool,
    error: u32,
}

impl Nbd {
    /// Takes the export `name`.
    ///
    /// # Errors
    /// When the server does not answer, or answers otherwise than it should.
    pub(super) fn connect(path: &Path, name: &str, structured: bool) -> Result<Self> {
        let socket = UnixStream::connect(path).with_context(|| path.display().to_string())?;
        socket.set_read_timeout(Some(PATIENCE))?;
        socket.set_write_timeout(Some(PATIENCE))?;
        let mut nbd =
            Self { socket, sectors: 0, out: Vec::new(), received: Vec::new(), in_flight: HashMap::new() };
        let greeting = nbd.take::<18>()?;
        ensure!(greeting[..16] == *b"NBDMAGICIHAVEOPT", "no NBD server: {greeting:?}");
        nbd.socket.write_all(&3u32.to_be_bytes())?;
        if structured {
            let replies = nbd.option(OPTION_STRUCTURED, &[])?;
            ensure!(replies.iter().all(|(kind, _)| *kind == REPLY_ACK), "no structured replies: {replies:?}");
        }
        let length = (name.len() as u32).to_be_bytes();
        let replies = nbd.option(OPTION_GO, &[&length[..], name.as_bytes(), &[0, 0]].concat())?;
        let info = replies.iter().find(|(kind, data)| *kind == REPLY_INFO && data.starts_with(&[0, 0]));
        let (_, info) = info.with_context(|| format!("export {name}: {replies:?}"))?;
        let size = u64::from_be_bytes(info.get(2..10).context("a size")?.try_into()?);
        let flags = u16::from_be_bytes(info.get(10..12).context("flags")?.try_into()?);
        ensure!(flags & EXPECTED == EXPECTED, "the export lacks commands: flags {flags:#x}");
        nbd.sectors = size / SECTOR as u64;
        nbd.socket.set_nonblocking(true)?;
        Ok(nbd)
    }

    fn take<const N: usize>(&mut self) -> io::Result<[u8; N]> {
        let mut bytes = [0; N];
        self.socket.read_exact(&mut bytes)?;
        Ok(bytes)
    }

    fn option(&mut self, option: u32, data: &[u8]) -> Result<Vec<(u32, Vec<u8>)>> {
        let head = [&b"IHAVEOPT"[..], &option.to_be_bytes(), &(data.len() as u32).to_be_bytes(), data];
        self.socket.write_all(&head.concat())?;
        let mut replies = Vec::new();
        loop {
            let head = self.take::<20>()?;
            let kind = u32::from_be_bytes(head[12..16].try_into()?);
            let mut data = vec![0; u32::from_be_bytes(head[16..].try_into()?) as usize];
            self.socket.read_exact(&mut data)?;
            ensure!(
                kind & 1 << 31 == 0,
                "option {option}: error {kind:#x}: {}",
                String::from_utf8_lossy(&data)
            );
            replies.push((kind, data));
            if kind == REPLY_ACK {
                return Ok(replies);
            }
        }
    }

    /// Sends what waits and receives what is there, once it can do either, or the time is up.
    fn pump(&mut self, time: Duration) -> io::Result<()> {
        wait::for_socket(&self.socket, !self.out.is_empty(), time)?;
        match self.socket.write(&self.out) {
            Ok(sent) => _ = self.out.drain(..sent),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(error) => return Err(error),
        }
        let mut part = [0; 64 << 10];
        loop {
            match self.socket.read(&mut part) {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(count) => self.received.extend_from_slice(&part[..count]),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(()),
                Err(error) => return Err(error),
            }
        }
    }

    /// Takes all whole messages out of what was received.
    fn understand(&mut self) -> io::Result<Vec<Reply>> {
        let mut replies = Vec::new();
        let mut at = 0;
        while let Some((length, done)) = self.message(at)? {
            at += length;
            replies.extend(done);
        }
        self.received.drain(..at);
        Ok(replies)
    }

    /// The message at `at`: its length, and the request that it ends; `None` if it is not whole yet.
    fn message(&mut self, at: usize) -> io::Result<Option<(usize, Option<Reply>)>> {
        let bytes = &self.received[at..];
        let Some(magic) = bytes.get(..4) else { return Ok(None) };
        match u32::from_be_bytes(magic.try_into().expect("four bytes")) {
            SIMPLE => {
                let Some(head) = bytes.get(4..16) else { return Ok(None) };
                let error = u32::from_be_bytes(head[..4].try_into().expect("four bytes"));
                let cookie = u64::from_be_bytes(head[4..].try_into().expect("eight bytes"));
                let request = self.in_flight.get_mut(&cookie).ok_or_else(|| strange("an unknown cookie"))?;
                let mut length = 16;
                if request.is_read && error == 0 {
                    length += request.data.len();
                    let Some(data) = bytes.get(16..length) else { return Ok(None) };
                    request.data.copy_from_slice(data);
                }
                request.error = error;
                Ok(Some((length, self.end(cookie))))
            }
            CHUNK => {
                let Some(head) = bytes.get(4..20) else { return Ok(None) };
                let flags = u16::from_be_bytes(head[..2].try_into().expect("two bytes"));
                let kind = u16::from_be_bytes(head[2..4].try_into().expect("two bytes"));
                let cookie = u64::from_be_bytes(head[4..12].try_into().expect("eight bytes"));
                let length = 20 + u32::from_be_bytes(head[12..].try_into().expect("four bytes")) as usize;
                let Some(payload) = bytes.get(20..length) else { return Ok(None) };
                let request = self.in_flight.get_mut(&cookie).ok_or_else(|| strange("an unknown cookie"))?;
                request.chunk(kind, payload)?;
                let done = if flags & FLAG_DONE != 0 { self.end(cookie) } else { None };
                Ok(Some((length, done)))
            }
            _ => Err(strange("a reply without magic")),
        }
    }

    fn end(&mut self, cookie: u64) -> Option<Reply> {
        let request = self.in_flight.remove(&cookie)?;
        let result = if request.error == 0 { Ok(request.data) } else { Err(request.error) };
        Some(Reply { slot: cookie as usize, result })
    }
}

impl InFlight {
    fn chunk(&mut self, kind: u16, payload: &[u8]) -> io::Result<()> {
        let word = |at: usize| -> io::Result<u64> {
            let bytes = payload.get(at..at + 8).ok_or_else(|| strange("a short chunk"))?;
            Ok(u64::from_be_bytes(bytes.try_into().expect("eight bytes")))
        };
        let part = |from: u64, length: usize| {
            let start = from.checked_sub(self.offset)? as usize;
            Some(start..start.checked_add(length)?)
        };
        match kind {
            0 => Ok(()),
            1 => {
                let range = part(word(0)?, payload.len() - 8).ok_or_else(|| strange("data elsewhere"))?;
                let to = self.data.get_mut(range).ok_or_else(|| strange("data past the end of a read"))?;
                to.copy_from_slice(&payload[8..]);
                Ok(())
            }
            2 => {
                let length = payload.get(8..12).ok_or_else(|| strange("a short chunk"))?;
                let length = u32::from_be_bytes(length.try_into().expect("four bytes"));
                let range = part(word(0)?, length as usize).ok_or_else(|| strange("a hole elsewhere"))?;
                self.data.get_mut(range).ok_or_else(|| strange("a hole past the end of a read"))?.fill(0);
                Ok(())
            }
            _ if kind & 1 << 15 != 0 => {
                let error = payload.get(..4).ok_or_else(|| strange("a short chunk"))?;
                self.error = u32::from_be_bytes(error.try_into().expect("four bytes")).max(1);
                Ok(())
            }
            _ => Err(strange("a chunk of an unknown kind")),
        }
    }
}

fn strange(what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, format!("NBD: {what}"))
}

impl Export for Nbd {
    fn submit(&mut self, slot: usize, request: &Request, data: &[u8]) -> io::Result<()> {
        let command: u16 = match request.ask {
            Ask::Read => 0,
            Ask::Write => 1,
            Ask::Flush => 3,
            Ask::Trim => 4,
            Ask::Zero { .. } => 6,
        };
        let mut flags = if request.fua { COMMAND_FUA } else { 0 };
        if request.ask == (Ask::Zero { unmap: false }) {
            flags |= COMMAND_NO_HOLE;
        }
        let is_read = request.ask == Ask::Read;
        // What the server does not answer must not look like zeros.
        let found = if is_read { vec![0xee; request.range.bytes()] } else { Vec::new() };
        let in_flight = InFlight { offset: request.range.offset(), data: found, is_read, error: 0 };
        self.in_flight.insert(slot as u64, in_flight);
        self.out.extend(0x2560_9513u32.to_be_bytes());
        self.out.extend(flags.to_be_bytes());
        self.out.extend(command.to_be_bytes());
        self.out.extend((slot as u64).to_be_bytes());
        self.out.extend(request.range.offset().to_be_bytes());
        self.out.extend((request.range.bytes() as u32).to_be_bytes());
        self.out.extend(data);
        self.pump(Duration::ZERO)
    }

    fn replies(&mut self, wait: Duration) -> io::Result<Vec<Reply>> {
        let replies = self.understand()?;
        if !replies.is_empty() {
            return Ok(replies);
        }
        let pumped = self.pump(wait);
        let replies = self.understand()?;
        // What came before the end counts.
        if replies.is_empty() { pumped.map(|()| replies) } else { Ok(replies) }
    }

    fn sectors(&self) -> u64 {
        self.sectors
    }

    fn has_fua(&self) -> bool {
        true
    }
}
