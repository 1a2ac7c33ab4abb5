//! An export of an NBD server as a store: many threads' requests on one connection, which are answered in any order.
//!
//! ```text
//!   caller ── request, bytes ──► socket                 one caller sends at a time
//!     ▲                             │
//!     └── result ◄── by cookie ◄── reader thread        the only one that reads
//! ```
//!
//! Nothing is sent twice. A connection that breaks stays broken: what the server had not yet brought to stable storage may be lost, and the caller
//! must learn that. Simple replies are enough: a read is answered whole or not at all.

use std::collections::HashMap;
use std::fmt;
use std::fs::File;
use std::io::{self, Read as _, Write as _};
use std::net::{TcpStream, ToSocketAddrs as _};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use parking_lot::Mutex;
use rustix::net::sockopt::{Timeout, set_socket_keepalive, set_socket_timeout, set_tcp_nodelay};
use rustix::net::{Shutdown, shutdown};
use vmstrata_store::{Access, Segment, Slices, Store, copy_from_slice, copy_to_slice, total_len};
use vmstrata_types::HostOffset;

use crate::option::{INFO_BLOCK_SIZE, INFO_EXPORT, OptionKind, ReplyKind};
use crate::request::{Command, Request};
use crate::uri::{Place, Uri};
use crate::{
    ClientFlags, CommandFlags, Errno, Fields, HandshakeFlags, INIT_MAGIC, MAX_PAYLOAD, OPTION_MAGIC,
    OPTION_REPLY_MAGIC, SIMPLE_REPLY_MAGIC, TransmissionFlags,
};

/// For how long a server may be silent before the first request.
const GREETING: Duration = Duration::from_secs(10);
/// Longest answer to an option.
const ANSWER_MAX: u32 = 64 << 10;
/// Bytes of a request: a longer one is cut up, and its parts are under way together.
const PART: u32 = 1 << 20;
/// The same of those that carry no bytes.
const ZERO_PART: u64 = 1 << 30;
/// Blocks that a guest's requests consist of.
const SECTOR: u32 = 512;

/// See the module documentation.
pub struct Client {
    uri: Uri,
    size: u64,
    flags: TransmissionFlags,
    part: u32,
    socket: Arc<File>,
    sending: Mutex<()>,
    waiting: Arc<Waiting>,
    cookie: AtomicU64,
    reader: Option<JoinHandle<()>>,
}

/// The bytes that were asked for, or none.
type Answer = io::Result<Vec<u8>>;

/// What has been asked for, and not answered.
#[derive(Debug, Default)]
struct Waiting(Mutex<Asked>);

#[derive(Debug, Default)]
struct Asked {
    /// Bytes that the answer carries, and who waits for it.
    requests: HashMap<u64, (usize, SyncSender<Answer>)>,
    broken: Option<String>,
}

impl Client {
    /// Takes an export.
    ///
    /// # Errors
    /// A server that cannot be reached, has no such export, or one that a disk cannot lie on.
    pub fn connect(uri: &Uri) -> io::Result<Self> {
        Self::connect_for(uri, Access::ReadWrite)
    }

    /// The same; for reading alone any export will do.
    ///
    /// # Errors
    /// As there.
    pub fn connect_for(uri: &Uri, access: Access) -> io::Result<Self> {
        let socket = Arc::new(reach(&uri.place)?);
        set_socket_timeout(&socket, Timeout::Recv, Some(GREETING))?;
        set_socket_timeout(&socket, Timeout::Send, Some(GREETING))?;
        let found = Greeting { socket: &socket }.take(&uri.export).map_err(of_greeting)?;
        set_socket_timeout(&socket, Timeout::Recv, None)?;
        set_socket_timeout(&socket, Timeout::Send, None)?;
        let refused = |why: &str| Err(io::Error::new(io::ErrorKind::Unsupported, why.to_owned()));
        let writes = access == Access::ReadWrite;
        if writes && found.flags.contains(TransmissionFlags::READ_ONLY) {
            return refused("the export is read-only");
        }
        if writes && !found.flags.contains(TransmissionFlags::SEND_FLUSH) {
            return refused("the server cannot flush: nothing would tell what is on stable storage");
        }
        if found.block_min > SECTOR {
            return refused("the export takes no requests of 512 bytes");
        }
        let waiting = Arc::new(Waiting::default());
        let (from, to) = (Arc::clone(&socket), Arc::clone(&waiting));
        let reader =
            thread::Builder::new().name("nbd-client".to_owned()).spawn(move || to.read_all(&from))?;
        Ok(Self {
            uri: uri.clone(),
            size: found.size,
            flags: found.flags,
            part: PART.min(found.payload_max),
            socket,
            sending: Mutex::new(()),
            waiting,
            cookie: AtomicU64::new(1),
            reader: Some(reader),
        })
    }

    /// Bytes of the export.
    pub fn size(&self) -> u64 {
        self.size
    }

    /// Sends a request, with its bytes. The answer comes by the receiver.
    fn send(&self, request: Request, payload: &[Segment<'_>], answer: usize) -> io::Result<Receiver<Answer>> {
        let cookie = self.cookie.fetch_add(1, Ordering::Relaxed);
        let (done, result) = sync_channel(1);
        {
            let mut asked = self.waiting.0.lock();
            if let Some(why) = &asked.broken {
                return Err(broken(why));
            }
            asked.requests.insert(cookie, (answer, done));
        }
        let mut message = Vec::with_capacity(Request::COMPACT_SIZE + total_len(payload));
        Request { cookie, ..request }.encode(false, &mut message);
        let head = message.len();
        message.resize(head + total_len(payload), 0);
        copy_to_slice(payload, &mut message[head..]);
        let _sending = self.sending.lock();
        if let Err(error) = (&*self.socket).write_all(&message) {
            // The server would take what comes next for the rest of this.
            self.waiting.fail(&error.to_string());
            let _ = shutdown(&self.socket, Shutdown::Both);
        }
        Ok(result)
    }

    /// Carries a command out on a range, cut into parts of at most `most` bytes.
    fn each(
        &self,
        command: Command,
        at: HostOffset,
        len: u64,
        most: u64,
        segments: Option<&[Segment<'_>]>,
    ) -> io::Result<()> {
        let mut slices = segments.map(Slices::new);
        let mut parts = Vec::new();
        let mut done = 0;
        while done < len {
            let part = (len - done).min(most);
            let bytes =
                slices.as_mut().map(|slices| slices.take(done as usize, part as usize)).unwrap_or_default();
            let request = Request {
                flags: CommandFlags::empty(),
                command,
                cookie: 0,
                offset: at.get() + done,
                length: part,
            };
            let (payload, answer) = match command {
                Command::Read => (&[][..], part as usize),
                _ => (&*bytes, 0),
            };
            parts.push((self.send(request, payload, answer)?, bytes.clone()));
            done += part;
        }
        for (part, into) in parts {
            let bytes = answered(&part)?;
            if command == Command::Read {
                copy_from_slice(&into, &bytes);
            }
        }
        Ok(())
    }
}

fn answered(part: &Receiver<Answer>) -> Answer {
    part.recv().unwrap_or_else(|_| Err(broken("its thread has ended")))
}

fn broken(why: &str) -> io::Error {
    io::Error::new(io::ErrorKind::BrokenPipe, format!("the connection to the NBD server is broken: {why}"))
}

impl Store for Client {
    fn read_segments(&self, segments: &[Segment<'_>], at: HostOffset) -> io::Result<usize> {
        let len = (total_len(segments) as u64).min(self.size.saturating_sub(at.get()));
        self.each(Command::Read, at, len, self.part.into(), Some(segments))?;
        Ok(len as usize)
    }

    fn write_segments(&self, segments: &[Segment<'_>], at: HostOffset) -> io::Result<()> {
        self.each(Command::Write, at, total_len(segments) as u64, self.part.into(), Some(segments))
    }

    fn flush(&self) -> io::Result<()> {
        let request = Request {
            flags: CommandFlags::empty(),
            command: Command::Flush,
            cookie: 0,
            offset: 0,
            length: 0,
        };
        answered(&self.send(request, &[], 0)?).map(drop)
    }

    fn punch_hole(&self, at: HostOffset, len: u64) -> io::Result<()> {
        if !self.flags.contains(TransmissionFlags::SEND_WRITE_ZEROES) {
            return Err(io::ErrorKind::Unsupported.into());
        }
        let len = len.min(self.size.saturating_sub(at.get()));
        self.each(Command::WriteZeroes, at, len, ZERO_PART, None)
    }

    fn len(&self) -> io::Result<u64> {
        Ok(self.size)
    }

    fn set_len(&self, len: u64) -> io::Result<()> {
        if len == self.size { Ok(()) } else { Err(io::ErrorKind::Unsupported.into()) }
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        let bye = Request {
            flags: CommandFlags::empty(),
            command: Command::Disconnect,
            cookie: 0,
            offset: 0,
            length: 0,
        };
        let mut message = Vec::new();
        bye.encode(false, &mut message);
        let _ = set_socket_timeout(&self.socket, Timeout::Send, Some(Duration::from_secs(1)));
        let _ = (&*self.socket).write_all(&message);
        let _ = shutdown(&self.socket, Shutdown::Both);
        let _ = self.reader.take().expect("it ends once").join();
    }
}

impl fmt::Debug for Client {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Client({}, {} bytes)", self.uri, self.size)
    }
}

impl Waiting {
    /// Reads answers until the connection ends.
    fn read_all(&self, socket: &File) {
        let error = loop {
            if let Err(error) = self.read_one(socket) {
                break error;
            }
        };
        self.fail(&error.to_string());
    }

    fn read_one(&self, mut socket: &File) -> io::Result<()> {
        let mut head = [0; 16];
        socket.read_exact(&mut head)?;
        let mut fields = Fields(&head);
        let (magic, error, cookie) = (fields.u32()?, fields.u32()?, fields.u64()?);
        if magic != SIMPLE_REPLY_MAGIC {
            return Err(unexpected("an answer that is none"));
        }
        let asked = self.0.lock().requests.remove(&cookie);
        let (len, done) = asked.ok_or_else(|| unexpected("an answer to nothing that was asked for"))?;
        if error != 0 {
            let _ = done.send(Err(Errno::error_of(error)));
            return Ok(());
        }
        let mut bytes = vec![0; len];
        let read = socket.read_exact(&mut bytes);
        let told = read.as_ref().map(|()| bytes).map_err(|error| broken(&error.to_string()));
        let _ = done.send(told);
        read
    }

    fn fail(&self, why: &str) {
        let mut asked = self.0.lock();
        let why = asked.broken.get_or_insert_with(|| why.to_owned()).clone();
        for (_, (_, done)) in asked.requests.drain() {
            let _ = done.send(Err(broken(&why)));
        }
    }
}

impl Errno {
    /// What a server's error is called here.
    fn error_of(value: u32) -> io::Error {
        let known = [
            Self::Perm,
            Self::Io,
            Self::NoMem,
            Self::Inval,
            Self::NoSpc,
            Self::Overflow,
            Self::NotSup,
            Self::Shutdown,
        ];
        // These have the numbers that Linux gives them.
        let is_known = known.iter().any(|errno| errno.get() == value);
        io::Error::from_raw_os_error(if is_known { value.cast_signed() } else { libc::EIO })
    }
}

impl From<crate::DecodeError> for io::Error {
    fn from(error: crate::DecodeError) -> Self {
        Self::new(io::ErrorKind::InvalidData, error)
    }
}

/// One that lets a single client in has the others wait.
fn of_greeting(error: io::Error) -> io::Error {
    let is_late = error.kind() == io::ErrorKind::WouldBlock;
    let late = || {
        io::Error::new(
            io::ErrorKind::TimedOut,
            "the NBD server has not greeted in 10 s: does it serve another client?",
        )
    };
    if is_late { late() } else { error }
}

fn unexpected(what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, format!("the NBD server sent {what}"))
}

fn reach(place: &Place) -> io::Result<File> {
    let socket: OwnedFd = match place {
        Place::Unix(path) => UnixStream::connect(path)?.into(),
        Place::Tcp(host, port) => {
            let mut tried = Err(io::Error::new(io::ErrorKind::NotFound, "the host's name leads nowhere"));
            for address in (host.as_str(), *port).to_socket_addrs()? {
                tried = TcpStream::connect_timeout(&address, GREETING);
                if tried.is_ok() {
                    break;
                }
            }
            let socket: OwnedFd = tried?.into();
            set_tcp_nodelay(&socket, true)?;
            set_socket_keepalive(&socket, true)?;
            socket
        }
    };
    Ok(File::from(socket))
}

/// The conversation before the first request.
struct Greeting<'a> {
    socket: &'a File,
}

struct Found {
    size: u64,
    flags: TransmissionFlags,
    block_min: u32,
    payload_max: u32,
}

impl Greeting<'_> {
    fn take(&self, export: &str) -> io::Result<Found> {
        let hello = self.read(18)?;
        let mut fields = Fields(&hello);
        if (fields.u64()?, fields.u64()?) != (INIT_MAGIC, OPTION_MAGIC) {
            return Err(unexpected("no greeting of a newstyle server"));
        }
        let flags = HandshakeFlags::from_bits_truncate(fields.u16()?);
        if !flags.contains(HandshakeFlags::FIXED_NEWSTYLE) {
            return Err(unexpected("an old greeting: it cannot say what its exports are"));
        }
        let mut answer = ClientFlags::FIXED_NEWSTYLE;
        answer.set(ClientFlags::NO_ZEROES, flags.contains(HandshakeFlags::NO_ZEROES));
        let mut message = answer.bits().to_be_bytes().to_vec();
        message.extend(OPTION_MAGIC.to_be_bytes());
        message.extend(OptionKind::Go.to_wire().to_be_bytes());
        let name = export.as_bytes();
        message.extend((name.len() as u32 + 8).to_be_bytes());
        message.extend((name.len() as u32).to_be_bytes());
        message.extend(name);
        message.extend(1u16.to_be_bytes());
        message.extend(INFO_BLOCK_SIZE.to_be_bytes());
        let mut socket = self.socket;
        socket.write_all(&message)?;
        self.found()
    }

    /// Reads the answers to `GO`.
    fn found(&self) -> io::Result<Found> {
        let (mut export, mut block_min, mut payload_max) = (None, 1, MAX_PAYLOAD);
        loop {
            let head = self.read(20)?;
            let mut fields = Fields(&head);
            let (magic, _, kind, len) = (fields.u64()?, fields.u32()?, fields.u32()?, fields.u32()?);
            if magic != OPTION_REPLY_MAGIC || len > ANSWER_MAX {
                return Err(unexpected("an answer to an option that is none"));
            }
            let data = self.read(len as usize)?;
            let mut fields = Fields(&data);
            match kind {
                _ if kind == ReplyKind::Ack as u32 => break,
                _ if kind == ReplyKind::Info as u32 => match fields.u16()? {
                    INFO_EXPORT => export = Some((fields.u64()?, fields.u16()?)),
                    INFO_BLOCK_SIZE => {
                        (block_min, _, payload_max) = (fields.u32()?, fields.u32()?, fields.u32()?)
                    }
                    _ => {}
                },
                _ if kind & ERROR != 0 => {
                    let why = String::from_utf8_lossy(&data[..data.len().min(256)]).into_owned();
                    return Err(io::Error::new(io::ErrorKind::NotFound, refusal(kind, &why)));
                }
                _ => {}
            }
        }
        let (size, flags) = export.ok_or_else(|| unexpected("nothing of the export's size"))?;
        Ok(Found {
            size,
            flags: TransmissionFlags::from_bits_truncate(flags),
            block_min,
            payload_max: payload_max.clamp(SECTOR, MAX_PAYLOAD),
        })
    }

    fn read(&self, len: usize) -> io::Result<Vec<u8>> {
        let mut bytes = vec![0; len];
        let mut socket = self.socket;
        socket.read_exact(&mut bytes)?;
        Ok(bytes)
    }
}

/// The bit that replies to options have which are errors.
const ERROR: u32 = 1 << 31;

fn refusal(kind: u32, why: &str) -> String {
    let known = [
        (ReplyKind::ErrUnsup, "the NBD server does not know what was asked for"),
        (ReplyKind::ErrInvalid, "the NBD server does not know what was asked for"),
        (ReplyKind::ErrPolicy, "the NBD server forbids it"),
        (ReplyKind::ErrTlsReqd, "the NBD server asks for TLS, which cannot be had here"),
        (ReplyKind::ErrUnknown, "the NBD server has no such export"),
        (ReplyKind::ErrShutdown, "the NBD server is going away"),
    ];
    let what = known.iter().find(|(known, _)| *known as u32 == kind);
    let what = what.map_or("the NBD server refuses", |(_, what)| what);
    if why.is_empty() { what.to_owned() } else { format!("{what}: {why}") }
}
