//! A repository on a NAS, which hosts reach over the network.
//!
//! ```text
//!   RemoteRepository (a host's handle) ── request ──► Network ──► Server ──► names ──► objects
//!            ▲ reply, or an error after TIMEOUT_NS ──── Network ◄────┘  unfinished: uploads
//! ```
//!
//! The server alone decides what happens, in one step for each request. A handle sends each request once: after `TimedOut` it has
//! happened, or not, or happens later. An object is uploaded in parts and gets its name when the server has all of them. The
//! NAS does not fail, but one part in [`CORRUPT_ONE_IN`] is kept wrong.
//!
//! A host lists a directory in two pieces, and may pause before any call. It may take an answer from what it heard before
//! ([`Remembered`]), as over a network file system, and its process dies at a call ([`DEAD`]), which may have been sent.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use vmstrata_repo::{
    Capabilities, DeviceId, Error, NewObject, ObjectInfo, ObjectName, ObjectReader, Repository, Result, Swept,
};

use vmstrata_tier::KEEP;

use crate::kernel::inside;
use crate::network::{Host, Network};
use crate::random::hash;
use crate::tasks::TASKS;

/// How long a handle waits for a reply.
const TIMEOUT_NS: u64 = 10_000_000;
/// How long a host pauses, at most: longer than anything is kept.
pub const PAUSE_NS_MAX: u64 = 3 * KEEP.as_nanos() as u64;
/// How long the server works on a request, at most.
const SERVICE_NS_MAX: u64 = 500_000;
/// One part of an upload in so many is kept with a wrong byte.
pub const CORRUPT_ONE_IN: u64 = 60;
/// One lookup in so many is answered from what the host heard before, if it heard anything.
const STALE_ONE_IN: u64 = 4;
/// What a process that has died gets instead of an answer.
pub const DEAD: io::ErrorKind = io::ErrorKind::ConnectionAborted;
/// Names the repository in messages.
const NAS: &str = "nas";

/// Bytes, which an event names by their hash.
#[derive(Clone)]
struct Bytes(Vec<u8>);

impl fmt::Debug for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} bytes {:016x}", self.0.len(), hash(0, &self.0))
    }
}

/// An upload, by a number of the host's own.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Upload(u64);

/// An object, whatever its name leads to now.
#[derive(Clone, Copy, Debug)]
struct Version(usize);

#[derive(Debug)]
enum Request {
    List { prefix: String, half: bool },
    Part { upload: Upload, at: usize, bytes: Bytes },
    ReadBack { upload: Upload },
    Finish { upload: Upload, len: usize, name: ObjectName, replaces: bool },
    Open { name: ObjectName },
    Read { version: Version, at: u64, len: usize },
    Delete { name: ObjectName },
    Sweep,
}

#[derive(Debug)]
enum Reply {
    Done,
    Objects(Vec<ObjectInfo>),
    Opened { version: Version, len: u64 },
    Bytes(Bytes),
    Swept(Swept),
}

#[derive(Debug)]
enum Body {
    Request(Request),
    Reply(io::Result<Reply>),
}

/// A request or its reply, which has the number of the host's call.
#[derive(Debug)]
pub struct Message {
    call: u64,
    body: Body,
}

/// A fault of the server that the seeds have to find.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// A new object takes the place of another.
    Overwrite,
    /// A new object is its first half for a moment.
    HalfObject,
}

impl Fault {
    /// All of them.
    pub const ALL: [Self; 2] = [Self::Overwrite, Self::HalfObject];
}

#[derive(Debug, Default)]
struct Store {
    uploads: BTreeMap<(Host, Upload), Vec<u8>>,
    names: BTreeMap<ObjectName, Version>,
    /// Every object that ever was, as readers of one may go on.
    versions: Vec<Vec<u8>>,
    /// What became of names, in this order.
    changes: Vec<Change>,
}

/// A name that leads to something else now.
#[derive(Clone, Debug)]
pub struct Change {
    pub time_ns: u64,
    pub name: ObjectName,
    /// The object's bytes; without, it is gone.
    pub bytes: Option<Vec<u8>>,
}

impl Store {
    fn object(&self, version: Version) -> &[u8] {
        &self.versions[version.0]
    }

    fn name(&mut self, name: &ObjectName, bytes: Vec<u8>) {
        self.names.insert(name.clone(), Version(self.versions.len()));
        self.changed(name, Some(bytes.clone()));
        self.versions.push(bytes);
    }

    fn changed(&mut self, name: &ObjectName, bytes: Option<Vec<u8>>) {
        self.changes.push(Change { time_ns: TASKS.now_ns.get(), name: name.clone(), bytes });
    }

    fn opened(&self, version: Version) -> Reply {
        Reply::Opened { version, len: self.object(version).len() as u64 }
    }

    /// A directory is read in pieces, and in no order of names.
    fn list(&self, prefix: &str, half: bool) -> Vec<ObjectInfo> {
        let is_in = |name: &str| name.starts_with(prefix) && (hash(0, name.as_bytes()) & 1 == 1) == half;
        let named = self.names.iter().filter(|(name, _)| is_in(name.as_str()));
        let info = |(name, &version): (&ObjectName, &Version)| {
            let len = self.object(version).len() as u64;
            ObjectInfo { name: name.clone(), len, allocated: len, copies: 1 }
        };
        named.map(info).collect()
    }
}

/// The NAS, one of the hosts.
#[derive(Debug)]
pub struct Server {
    network: Arc<Network<Message>>,
    host: Host,
    fault: Option<Fault>,
    store: Mutex<Store>,
}

impl Server {
    pub fn new(network: Arc<Network<Message>>, host: Host, fault: Option<Fault>) -> Self {
        Self { network, host, fault, store: Mutex::default() }
    }

    fn store(&self) -> MutexGuard<'_, Store> {
        self.store.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Answers requests, beside other tasks that do.
    pub fn serve(&self) -> ! {
        loop {
            let received = self.network.receive(self.host, None);
            let Some((from, Message { call, body: Body::Request(request) })) = received else {
                continue;
            };
            inside(|| TASKS.sleep(TASKS.random.below(SERVICE_NS_MAX)));
            let reply = self.answer(from, request);
            self.network.send(self.host, from, Message { call, body: Body::Reply(reply) });
        }
    }

    fn answer(&self, from: Host, request: Request) -> io::Result<Reply> {
        let mut store = self.store();
        match request {
            Request::List { prefix, half } => Ok(Reply::Objects(store.list(&prefix, half))),
            Request::Part { upload, at, bytes } => {
                let unfinished = store.uploads.entry((from, upload)).or_default();
                if unfinished.len() != at {
                    return Err(io::ErrorKind::InvalidInput.into());
                }
                unfinished.extend(bytes.0);
                if inside(|| TASKS.random.one_in(CORRUPT_ONE_IN))
                    && let Some(byte) = unfinished.last_mut()
                {
                    *byte ^= 1;
                }
                Ok(Reply::Done)
            }
            Request::ReadBack { upload } => {
                let bytes = store.uploads.get(&(from, upload)).ok_or(io::ErrorKind::NotFound)?.clone();
                let version = Version(store.versions.len());
                store.versions.push(bytes);
                Ok(store.opened(version))
            }
            Request::Finish { upload, len, name, replaces } => {
                let bytes = store.uploads.remove(&(from, upload)).unwrap_or_default();
                if bytes.len() != len {
                    return Err(io::ErrorKind::InvalidInput.into());
                }
                let overwrites = replaces || self.fault == Some(Fault::Overwrite);
                if !overwrites && store.names.contains_key(&name) {
                    return Err(io::ErrorKind::AlreadyExists.into());
                }
                if self.fault == Some(Fault::HalfObject) {
                    store.name(&name, bytes[..len / 2].to_vec());
                    drop(store);
                    inside(|| TASKS.sleep(SERVICE_NS_MAX));
                    store = self.store();
                }
                store.name(&name, bytes);
                Ok(Reply::Done)
            }
            Request::Open { name } => {
                let version = *store.names.get(&name).ok_or(io::ErrorKind::NotFound)?;
                Ok(store.opened(version))
            }
            Request::Read { version, at, len } => {
                let range = at as usize..at as usize + len;
                let bytes = store.object(version).get(range).ok_or(io::ErrorKind::UnexpectedEof)?;
                Ok(Reply::Bytes(Bytes(bytes.to_vec())))
            }
            Request::Delete { name } => {
                if store.names.remove(&name).is_some() {
                    store.changed(&name, None);
                }
                Ok(Reply::Done)
            }
            Request::Sweep => {
                let gone = std::mem::take(&mut store.uploads);
                let bytes = gone.values().map(|bytes| bytes.len() as u64).sum();
                Ok(Reply::Swept(Swept { objects: gone.len(), bytes }))
            }
        }
    }

    /// What became of names since there were so many changes.
    pub fn changes(&self, since: usize) -> Vec<Change> {
        self.store().changes[since..].to_vec()
    }
}

/// The calls of a process, of which it makes one at a time.
#[derive(Debug)]
struct Calls {
    /// The last one.
    number: u64,
    /// At which the process dies.
    dies_at: u64,
    /// Before one in so many calls it pauses.
    pauses_one_in: u64,
}

/// What a host heard, and takes for true although it may not be any more.
#[derive(Debug, Default)]
struct Remembered {
    lists: BTreeMap<String, Vec<ObjectInfo>>,
    absent: BTreeSet<ObjectName>,
}

/// A process's side of its calls.
#[derive(Debug)]
struct Client {
    network: Arc<Network<Message>>,
    host: Host,
    server: Host,
    /// Locked while a call lasts.
    calls: Mutex<Calls>,
    uploads: Mutex<u64>,
    remembered: Mutex<Remembered>,
}

impl Client {
    /// Sends a request, and waits for its reply for [`TIMEOUT_NS`].
    fn call(&self, request: Request) -> io::Result<Reply> {
        let mut calls = self.calls.lock().unwrap_or_else(PoisonError::into_inner);
        calls.number += 1;
        if TASKS.random.one_in(calls.pauses_one_in) {
            thread::sleep(Duration::from_nanos(TASKS.random.below(PAUSE_NS_MAX)));
        }
        if calls.number > calls.dies_at || calls.number == calls.dies_at && TASKS.random.one_in(2) {
            return Err(DEAD.into());
        }
        let call = &calls.number;
        self.network.send(self.host, self.server, Message { call: *call, body: Body::Request(request) });
        let until_ns = TASKS.now_ns.get() + TIMEOUT_NS;
        while let Some((_, message)) = self.network.receive(self.host, Some(until_ns)) {
            match message.body {
                Body::Reply(reply) if message.call == *call && *call < calls.dies_at => return reply,
                // Too late: its call has failed.
                _ => {}
            }
        }
        if calls.number == calls.dies_at {
            return Err(DEAD.into());
        }
        Err(io::Error::new(io::ErrorKind::TimedOut, "no reply; it may have happened, or happen later"))
    }

    /// Reads the object that the server opened.
    fn reader(
        self: &Arc<Self>,
        name: &ObjectName,
        reply: io::Result<Reply>,
    ) -> io::Result<Box<dyn ObjectReader>> {
        match reply {
            Ok(Reply::Opened { version, len }) => {
                let (client, name) = (self.clone(), name.clone());
                Ok(Box::new(RemoteReader { client, name, version, len }))
            }
            other => Err(refused(other)),
        }
    }
}

/// The repository as one host sees it; see the module documentation.
#[derive(Clone, Debug)]
pub struct RemoteRepository(Arc<Client>);

impl RemoteRepository {
    /// For the process with this number on its host, which dies at the last of so many calls, and pauses before one in so many.
    pub fn new(
        network: Arc<Network<Message>>,
        [host, server]: [Host; 2],
        process: u32,
        calls: u64,
        pauses_one_in: u64,
    ) -> Self {
        // No two processes of a host have calls of one number: a reply to a dead one is nobody's.
        let before = u64::from(process) << 32;
        let calls = Mutex::new(Calls { number: before, dies_at: before + calls, pauses_one_in });
        let (uploads, remembered) = (Mutex::new(before), Mutex::default());
        Self(Arc::new(Client { network, host, server, calls, uploads, remembered }))
    }

    fn remembered(&self) -> MutexGuard<'_, Remembered> {
        self.0.remembered.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn is_stale(&self) -> bool {
        TASKS.random.one_in(STALE_ONE_IN)
    }

    fn begin(&self, name: &ObjectName, copies: u8, replaces: bool) -> Result<Box<dyn NewObject>> {
        if copies != 1 {
            return Err(Error::of_object(NAS, "creating", name)(io::ErrorKind::Unsupported.into()));
        }
        let mut uploads = self.0.uploads.lock().unwrap_or_else(PoisonError::into_inner);
        *uploads += 1;
        let (client, name) = (self.0.clone(), name.clone());
        Ok(Box::new(RemoteNewObject { client, name, replaces, upload: Upload(*uploads), len: 0 }))
    }
}

impl Repository for RemoteRepository {
    fn describe(&self) -> String {
        NAS.to_owned()
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities {
            conditional_create: true,
            rename: false,
            read_back: true,
            early_read_back: true,
            max_copies: 1,
            ranged_reads: true,
            free_space: false,
            holds: false,
        }
    }

    fn device(&self) -> DeviceId {
        DeviceId(self.0.server.0.into())
    }

    fn list(&self, prefix: &str) -> Result<Vec<ObjectInfo>> {
        if let Some(heard) = self.remembered().lists.get(prefix)
            && self.is_stale()
        {
            return Ok(heard.clone());
        }
        let mut listed = Vec::new();
        for half in [false, true] {
            match self.0.call(Request::List { prefix: prefix.to_owned(), half }) {
                Ok(Reply::Objects(objects)) => listed.extend(objects),
                other => return Err(Error::of(NAS, "listing")(refused(other))),
            }
        }
        self.remembered().lists.insert(prefix.to_owned(), listed.clone());
        Ok(listed)
    }

    fn create_new(&self, name: &ObjectName, copies: u8) -> Result<Box<dyn NewObject>> {
        self.begin(name, copies, false)
    }

    fn replace(&self, name: &ObjectName, copies: u8) -> Result<Box<dyn NewObject>> {
        self.begin(name, copies, true)
    }

    fn open(&self, name: &ObjectName) -> Result<Box<dyn ObjectReader>> {
        let is_absent = self.remembered().absent.contains(name) && self.is_stale();
        let reply = if is_absent {
            Err(io::ErrorKind::NotFound.into())
        } else {
            self.0.call(Request::Open { name: name.clone() })
        };
        if reply.as_ref().is_err_and(|error| error.kind() == io::ErrorKind::NotFound) {
            self.remembered().absent.insert(name.clone());
        }
        self.0.reader(name, reply).map_err(Error::of_object(NAS, "opening", name))
    }

    fn delete(&self, name: &ObjectName) -> Result<()> {
        let reply = self.0.call(Request::Delete { name: name.clone() });
        done(reply).map_err(Error::of_object(NAS, "deleting", name))
    }

    fn sweep(&self) -> Result<Swept> {
        match self.0.call(Request::Sweep) {
            Ok(Reply::Swept(swept)) => Ok(swept),
            other => Err(Error::of(NAS, "sweeping")(refused(other))),
        }
    }
}

/// What the server said instead of what the request asks for.
fn refused(reply: io::Result<Reply>) -> io::Error {
    reply.map_or_else(|error| error, |reply| io::Error::other(format!("the server answers {reply:?}")))
}

fn done(reply: io::Result<Reply>) -> io::Result<()> {
    match reply {
        Ok(Reply::Done) => Ok(()),
        other => Err(refused(other)),
    }
}

/// An object while it is uploaded.
struct RemoteNewObject {
    client: Arc<Client>,
    name: ObjectName,
    replaces: bool,
    upload: Upload,
    len: usize,
}

impl NewObject for RemoteNewObject {
    fn write(&mut self, bytes: &[u8]) -> Result<()> {
        let part = Request::Part { upload: self.upload, at: self.len, bytes: Bytes(bytes.to_vec()) };
        done(self.client.call(part)).map_err(Error::of_object(NAS, "writing", &self.name))?;
        self.len += bytes.len();
        Ok(())
    }

    /// The NAS has the parts that it acknowledged, and does not fail.
    fn sync(&mut self) -> Result<()> {
        Ok(())
    }

    fn read_back(&self) -> Result<Box<dyn ObjectReader>> {
        let reply = self.client.call(Request::ReadBack { upload: self.upload });
        self.client.reader(&self.name, reply).map_err(Error::of_object(NAS, "reading back", &self.name))
    }

    fn finish(self: Box<Self>) -> Result<()> {
        let Self { client, name, replaces, upload, len } = *self;
        let failed = Error::of_object(NAS, "finishing", &name);
        done(client.call(Request::Finish { upload, len, name: name.clone(), replaces })).map_err(failed)
    }
}

/// An object opened for reading.
struct RemoteReader {
    client: Arc<Client>,
    name: ObjectName,
    version: Version,
    len: u64,
}

impl ObjectReader for RemoteReader {
    fn len(&self) -> u64 {
        self.len
    }

    fn read_at(&self, at: u64, into: &mut [u8]) -> Result<()> {
        match self.client.call(Request::Read { version: self.version, at, len: into.len() }) {
            Ok(Reply::Bytes(bytes)) if bytes.0.len() == into.len() => {
                into.copy_from_slice(&bytes.0);
                Ok(())
            }
            other => Err(Error::of_read(NAS, &self.name, at)(refused(other))),
        }
    }
}
