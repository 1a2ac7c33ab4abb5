//! A directory of an NFSv3 server as a repository, without a mount.
//!
//! ```text
//!   create ──► .NAME.ID.new ──► WRITE, unstable, several at a time ──► COMMIT: one verifier for all ──► LINK or RENAME
//! ```
//!
//! Blocks of zeros are left as holes. A server that restarts may lose what it has not committed, and its write verifier changes then: the
//! object fails, and is written anew by whoever wants it. Nothing is called again after a lost answer, so that `EEXIST` means another's
//! object.

use std::collections::VecDeque;
use std::io;
use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use nfs3_client::nfs3_types::nfs3::{
    COMMIT3args, CREATE3args, FSINFO3args, FSSTAT3args, GETATTR3args, LINK3args, LOOKUP3args, Nfs3Option,
    READ3args, READ3resok, READDIR3args, READDIRPLUS3args, REMOVE3args, RENAME3args, SETATTR3args,
    WRITE3args, WRITE3resok, cookieverf3, createhow3, diropargs3, fattr3, filename3, ftype3, nfs_fh3, sattr3,
    stable_how, writeverf3,
};
use nfs3_client::nfs3_types::xdr_codec::Opaque;
use parking_lot::Mutex;
use vmstrata_repo::{
    Capabilities, DeviceId, Error, NameRule, NewObject, ObjectInfo, ObjectName, ObjectReader, Repository,
    Result, Swept, draw_id,
};

use super::link::{self, Answer, CALLS, Link, now};

const UNFINISHED: &str = ".new";
/// Zeros become holes in pieces of this size.
const BLOCK: usize = 4096;
/// The most bytes of a read or a write, as of Linux's client.
const PIECE_MAX: u32 = 1 << 20;
/// Bytes of a directory listed at a time.
const LISTED: u32 = 512 << 10;
/// Pieces of one object on their way.
const IN_FLIGHT: usize = 8;

/// A repository on an NFSv3 server.
#[derive(Debug)]
pub struct NfsRepository {
    shared: Arc<Shared>,
    names: NameRule,
    device: DeviceId,
}

/// What a repository has in common with its objects.
#[derive(Debug)]
struct Shared {
    link: Link,
    address: String,
    dir: nfs_fh3,
    /// The most bytes of a read, and of a write.
    read_max: u32,
    write_max: u32,
    written: AtomicU64,
}

impl NfsRepository {
    /// The repository in the exported directory `path` of `server`, of objects with these names. Connections are made in the network
    /// namespace of the calling thread.
    ///
    /// # Errors
    /// When there is no such directory, or the server does not answer.
    pub fn open(server: IpAddr, path: &str, names: NameRule) -> Result<Self> {
        let address = format!("nfs://{server}{path}");
        Self::mount(server, path, &address, names).map_err(Error::of(address, "opening"))
    }

    fn mount(server: IpAddr, path: &str, address: &str, names: NameRule) -> io::Result<Self> {
        let (dir, link) = (link::mount(server, path)?, Link::new(server)?);
        let asked = FSINFO3args { fsroot: dir.clone() };
        let limits = link.ask(move |client| now(client.fsinfo(&asked)))?;
        let asked = GETATTR3args { object: dir.clone() };
        let about = link.ask(move |client| now(client.getattr(&asked)))?.obj_attributes;
        let (read_max, write_max) = (limits.rtmax.min(PIECE_MAX), limits.wtmax.min(PIECE_MAX));
        let (address, written) = (address.to_owned(), AtomicU64::new(0));
        let shared = Arc::new(Shared { link, address, dir, read_max, write_max, written });
        Ok(Self { shared, names, device: DeviceId(about.fsid) })
    }

    /// Bytes of objects that were sent to the server.
    pub fn written_bytes(&self) -> u64 {
        self.shared.written.load(Ordering::Relaxed)
    }

    /// For `map_err`.
    fn failed<'a>(&'a self, action: &'static str) -> impl FnOnce(io::Error) -> Error + 'a {
        Error::of(&self.shared.address, action)
    }

    /// For `map_err`.
    fn failed_at<'a>(
        &'a self,
        action: &'static str,
        name: &'a ObjectName,
    ) -> impl FnOnce(io::Error) -> Error + 'a {
        Error::of_object(&self.shared.address, action, name)
    }

    /// The object of a file of this name, if it can be one of this repository.
    fn object(&self, file_name: &str) -> Option<ObjectName> {
        ObjectName::new(file_name).ok().filter(|name| (self.names)(name.as_str()))
    }

    fn is_unfinished(&self, file_name: &str) -> bool {
        unfinished_object(file_name).is_some_and(|name| self.object(name).is_some())
    }

    fn begin(&self, name: &ObjectName, copies: u8, replaces: bool) -> io::Result<NewFile> {
        name.check(self.names)?;
        self.capabilities().check_copies(copies)?;
        // Drawn, so that no other has it, also of an earlier try.
        let unfinished = format!(".{name}.{:032x}{UNFINISHED}", draw_id());
        let attributes = sattr3 { mode: Nfs3Option::Some(0o600), ..sattr3::default() };
        let asked =
            CREATE3args { where_: self.shared.place(&unfinished), how: createhow3::GUARDED(attributes) };
        let created = self.shared.link.ask(move |client| now(client.create(&asked)))?;
        let file = match created.obj {
            Nfs3Option::Some(file) => file,
            Nfs3Option::None => self.shared.look_up(&unfinished)?.0,
        };
        let (shared, name, pending) = (Arc::clone(&self.shared), name.clone(), VecDeque::new());
        let state = State::Writing;
        Ok(NewFile {
            shared,
            name,
            unfinished,
            file,
            replaces,
            len: 0,
            data_end: 0,
            pending,
            held: None,
            verifier: None,
            state,
        })
    }

    /// The names in the directory, each with what is known of its file.
    fn entries(&self, with_attributes: bool) -> io::Result<Vec<(String, Option<fattr3>)>> {
        let (mut found, mut cookie, mut cookieverf) = (Vec::new(), 0, cookieverf3::default());
        loop {
            let dir = self.shared.dir.clone();
            let (page, verifier, is_end) = if with_attributes {
                let asked = READDIRPLUS3args { dir, cookie, cookieverf, dircount: LISTED, maxcount: LISTED };
                let listed = self.shared.link.ask(move |client| now(client.readdirplus(&asked)))?;
                let entries = listed.reply.entries.into_inner().into_iter();
                let known = |entry: Nfs3Option<fattr3>| match entry {
                    Nfs3Option::Some(about) => Some(about),
                    Nfs3Option::None => None,
                };
                let page = entries.map(|entry| (entry.name, entry.cookie, known(entry.name_attributes)));
                (page.collect::<Vec<_>>(), listed.cookieverf, listed.reply.eof)
            } else {
                let asked = READDIR3args { dir, cookie, cookieverf, count: LISTED };
                let listed = self.shared.link.ask(move |client| now(client.readdir(&asked)))?;
                let entries = listed.reply.entries.into_inner().into_iter();
                let page = entries.map(|entry| (entry.name, entry.cookie, None));
                (page.collect(), listed.cookieverf, listed.reply.eof)
            };
            let is_empty = page.is_empty();
            for (name, next, about) in page {
                cookie = next;
                if let Ok(name) = String::from_utf8(name.0.into_owned()) {
                    found.push((name, about));
                }
            }
            if is_end || is_empty {
                return Ok(found);
            }
            cookieverf = verifier;
        }
    }

    fn objects(&self, prefix: &str) -> io::Result<Vec<ObjectInfo>> {
        let mut objects = Vec::new();
        for (name, about) in self.entries(true)? {
            let Some(name) = self.object(&name).filter(|name| name.as_str().starts_with(prefix)) else {
                continue;
            };
            let about = match about {
                Some(about) => about,
                None => match self.shared.look_up(name.as_str()) {
                    Ok((_, about)) => about,
                    // Deleted since its name was read.
                    Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
                    Err(error) => return Err(error),
                },
            };
            objects.push(ObjectInfo { name, len: about.size, allocated: about.used, copies: 1 });
        }
        Ok(objects)
    }

    fn remove_unfinished(&self) -> io::Result<Swept> {
        let mut swept = Swept::default();
        for (name, _) in self.entries(false)? {
            if self.is_unfinished(&name) {
                let bytes = self.shared.look_up(&name).map_or(0, |(_, about)| about.used);
                self.shared.remove(&name)?;
                swept += Swept { objects: 1, bytes };
            }
        }
        Ok(swept)
    }

    fn available_bytes(&self) -> io::Result<u64> {
        let asked = FSSTAT3args { fsroot: self.shared.dir.clone() };
        Ok(self.shared.link.ask(move |client| now(client.fsstat(&asked)))?.abytes)
    }
}

/// The name of the object that a file of this name was to become.
fn unfinished_object(file_name: &str) -> Option<&str> {
    let (name, id) = file_name.strip_prefix('.')?.strip_suffix(UNFINISHED)?.rsplit_once('.')?;
    (id.len() == 32 && id.bytes().all(|byte| byte.is_ascii_hexdigit())).then_some(name)
}

impl Shared {
    fn place(&self, name: &str) -> diropargs3<'static> {
        diropargs3 { dir: self.dir.clone(), name: filename3::from(name.as_bytes().to_vec()) }
    }

    fn look_up(&self, name: &str) -> io::Result<(nfs_fh3, fattr3)> {
        let asked = LOOKUP3args { what: self.place(name) };
        let found = self.link.ask(move |client| now(client.lookup(&asked)))?;
        let about = match found.obj_attributes {
            Nfs3Option::Some(about) => about,
            Nfs3Option::None => {
                let asked = GETATTR3args { object: found.object.clone() };
                self.link.ask(move |client| now(client.getattr(&asked)))?.obj_attributes
            }
        };
        Ok((found.object, about))
    }

    /// Removes a file; one that is not there is removed.
    fn remove(&self, name: &str) -> io::Result<()> {
        let asked = REMOVE3args { object: self.place(name) };
        match self.link.ask(move |client| now(client.remove(&asked))) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
            _ => Ok(()),
        }
    }

    fn rename(&self, from: &str, to: &str) -> io::Result<()> {
        let asked = RENAME3args { from: self.place(from), to: self.place(to) };
        self.link.ask(move |client| now(client.rename(&asked))).map(drop)
    }
}

impl Repository for NfsRepository {
    fn describe(&self) -> String {
        self.shared.address.clone()
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities {
            conditional_create: true,
            rename: true,
            read_back: true,
            early_read_back: true,
            max_copies: 1,
            ranged_reads: true,
            free_space: true,
            holds: false,
        }
    }

    fn device(&self) -> DeviceId {
        self.device
    }

    fn free_bytes(&self) -> Result<u64> {
        self.available_bytes().map_err(self.failed("asking for room"))
    }

    fn list(&self, prefix: &str) -> Result<Vec<ObjectInfo>> {
        self.objects(prefix).map_err(self.failed("listing"))
    }

    fn names(&self, prefix: &str) -> Result<Vec<ObjectName>> {
        let entries = self.entries(false).map_err(self.failed("listing"))?;
        let names = entries.iter().filter_map(|(name, _)| self.object(name));
        Ok(names.filter(|name| name.as_str().starts_with(prefix)).collect())
    }

    fn create_new(&self, name: &ObjectName, copies: u8) -> Result<Box<dyn NewObject>> {
        Ok(Box::new(self.begin(name, copies, false).map_err(self.failed_at("creating", name))?))
    }

    fn replace(&self, name: &ObjectName, copies: u8) -> Result<Box<dyn NewObject>> {
        Ok(Box::new(self.begin(name, copies, true).map_err(self.failed_at("creating", name))?))
    }

    fn open(&self, name: &ObjectName) -> Result<Box<dyn ObjectReader>> {
        let opened = self.shared.look_up(name.as_str()).and_then(|(file, about)| match about.type_ {
            ftype3::NF3REG => Ok(OpenFile::new(&self.shared, name, file, about.size)),
            _ => Err(io::Error::new(io::ErrorKind::InvalidData, format!("{name} is not a regular file"))),
        });
        Ok(Box::new(opened.map_err(self.failed_at("opening", name))?))
    }

    fn delete(&self, name: &ObjectName) -> Result<()> {
        let removed = name.check(self.names).and_then(|()| self.shared.remove(name.as_str()));
        removed.map_err(self.failed_at("deleting", name))
    }

    fn rename(&self, from: &ObjectName, to: &ObjectName) -> Result<()> {
        let checked = from.check(self.names).and_then(|()| to.check(self.names));
        let renamed = checked.and_then(|()| self.shared.rename(from.as_str(), to.as_str()));
        renamed.map_err(self.failed_at("renaming", from))
    }

    fn sweep(&self) -> Result<Swept> {
        self.remove_unfinished().map_err(self.failed("sweeping"))
    }
}

struct NewFile {
    shared: Arc<Shared>,
    name: ObjectName,
    unfinished: String,
    file: nfs_fh3,
    /// Whether it takes the place of an object of its name.
    replaces: bool,
    /// Bytes that were added, and those up to the end of the last that are not zeros.
    len: u64,
    data_end: u64,
    /// The first piece of data, until there is another: that of a small object is written stable, as Linux does.
    held: Option<(u64, Vec<u8>)>,
    /// Writes that were not answered, each with its length.
    pending: VecDeque<(u32, Answer<WRITE3resok>)>,
    /// Of the server's run that has all that was written.
    verifier: Option<writeverf3>,
    state: State,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Writing,
    Synced,
    /// Bytes may be missing.
    Failed,
    Renamed,
}

impl NewFile {
    /// For `map_err`.
    fn failed<'a>(&'a self, action: &'static str) -> impl FnOnce(io::Error) -> Error + 'a {
        Error::of_object(&self.shared.address, action, &self.name)
    }

    /// Does something to the file. After a failure nothing else does: what was written may be torn.
    fn step(&mut self, then: State, step: impl FnOnce(&mut Self) -> io::Result<()>) -> io::Result<()> {
        if self.state == State::Failed {
            return Err(io::Error::other("writing it failed before"));
        }
        self.state = State::Failed;
        step(self)?;
        self.state = then;
        Ok(())
    }

    /// Starts to write what is not zeros.
    fn add(&mut self, bytes: &[u8]) -> io::Result<()> {
        let is_hole = |block: &[u8]| block.len() == BLOCK && block.iter().all(|byte| *byte == 0);
        let blocks: Vec<&[u8]> = bytes.chunks(BLOCK).collect();
        let mut at = 0;
        for run in blocks.chunk_by(|one, next| is_hole(one) == is_hole(next)) {
            let len: usize = run.iter().map(|block| block.len()).sum();
            if !is_hole(run[0]) {
                self.add_data(&bytes[at..at + len], self.len + at as u64)?;
            }
            at += len;
        }
        self.len += bytes.len() as u64;
        Ok(())
    }

    fn add_data(&mut self, bytes: &[u8], at: u64) -> io::Result<()> {
        let piece_max = self.shared.write_max as usize;
        for (number, piece) in bytes.chunks(piece_max).enumerate() {
            let at = at + (number * piece_max) as u64;
            if std::mem::replace(&mut self.data_end, at + piece.len() as u64) == 0 {
                self.held = Some((at, piece.to_vec()));
                continue;
            }
            self.start_held()?;
            self.start(at, piece.to_vec(), stable_how::UNSTABLE)?;
        }
        Ok(())
    }

    fn start_held(&mut self) -> io::Result<()> {
        let Some((at, piece)) = self.held.take() else { return Ok(()) };
        self.start(at, piece, stable_how::UNSTABLE)
    }

    fn start(&mut self, offset: u64, piece: Vec<u8>, stable: stable_how) -> io::Result<()> {
        let count = piece.len() as u32;
        // As of a mount: so many calls, small ones too.
        let bytes =
            |pending: &VecDeque<(u32, _)>| pending.iter().map(|(len, _)| u64::from(*len)).sum::<u64>();
        let most = IN_FLIGHT as u64 * u64::from(self.shared.write_max);
        while self.pending.len() == CALLS || bytes(&self.pending) + u64::from(count) > most {
            self.take_answer()?;
        }
        let asked = WRITE3args { file: self.file.clone(), offset, count, stable, data: Opaque::owned(piece) };
        let answer = self.shared.link.start(move |client| now(client.write(&asked)));
        self.pending.push_back((count, answer));
        self.shared.written.fetch_add(count.into(), Ordering::Relaxed);
        Ok(())
    }

    /// Has the server have all bytes, also where they end with a hole.
    fn complete(&mut self) -> io::Result<()> {
        self.start_held()?;
        while !self.pending.is_empty() {
            self.take_answer()?;
        }
        if self.len > self.data_end {
            let new_attributes = sattr3 { size: Nfs3Option::Some(self.len), ..sattr3::default() };
            let asked = SETATTR3args { object: self.file.clone(), new_attributes, guard: Nfs3Option::None };
            self.shared.link.ask(move |client| now(client.setattr(&asked)))?;
            self.data_end = self.len;
        }
        Ok(())
    }

    /// Waits for the oldest write.
    fn take_answer(&mut self) -> io::Result<()> {
        let Some((len, answer)) = self.pending.pop_front() else { return Ok(()) };
        let written = answer.wait()?;
        if written.count != len {
            return Err(io::Error::new(io::ErrorKind::WriteZero, "the server wrote a part only"));
        }
        self.check_verifier(written.verf)
    }

    /// Refuses answers of two runs of the server: what the first had not committed may be lost.
    fn check_verifier(&mut self, verifier: writeverf3) -> io::Result<()> {
        if *self.verifier.get_or_insert(verifier) == verifier {
            return Ok(());
        }
        Err(io::Error::other("the server was started anew, and may have lost what was written before"))
    }

    fn flush(&mut self) -> io::Result<()> {
        if self.state == State::Synced {
            return Ok(());
        }
        self.step(State::Synced, |file| {
            let is_stable = file.pending.is_empty() && file.verifier.is_none();
            if let Some((at, piece)) = file.held.take_if(|_| is_stable) {
                file.start(at, piece, stable_how::FILE_SYNC)?;
                return file.complete();
            }
            file.complete()?;
            let asked = COMMIT3args { file: file.file.clone(), offset: 0, count: 0 };
            let committed = file.shared.link.ask(move |client| now(client.commit(&asked)))?;
            file.check_verifier(committed.verf)
        })
    }

    fn publish(&mut self) -> io::Result<()> {
        self.flush()?;
        if self.replaces {
            self.shared.rename(&self.unfinished, self.name.as_str())?;
            self.state = State::Renamed;
            return Ok(());
        }
        // Of several that link to one name, one does; the others get `EEXIST`.
        let asked = LINK3args { file: self.file.clone(), link: self.shared.place(self.name.as_str()) };
        self.shared.link.ask(move |client| now(client.link(&asked))).map(drop)
    }
}

impl NewObject for NewFile {
    fn write(&mut self, bytes: &[u8]) -> Result<()> {
        self.step(State::Writing, |file| file.add(bytes)).map_err(self.failed("writing"))
    }

    /// The server has all bytes; whether it keeps them, the verifier of the commit tells.
    fn write_out(&mut self) -> Result<()> {
        self.step(State::Writing, Self::complete).map_err(self.failed("writing"))
    }

    fn sync(&mut self) -> Result<()> {
        self.flush().map_err(self.failed("flushing"))
    }

    fn read_back(&self) -> Result<Box<dyn ObjectReader>> {
        Ok(Box::new(OpenFile::new(&self.shared, &self.name, self.file.clone(), self.len)))
    }

    fn finish(mut self: Box<Self>) -> Result<()> {
        self.publish().map_err(self.failed("publishing"))
    }
}

impl Drop for NewFile {
    fn drop(&mut self) {
        if self.state != State::Renamed {
            // What cannot be removed now is swept later.
            let _ = self.shared.remove(&self.unfinished);
        }
    }
}

struct OpenFile {
    shared: Arc<Shared>,
    name: ObjectName,
    file: nfs_fh3,
    len: u64,
    ahead: Mutex<Ahead>,
}

/// What is read before it is asked for, by who reads from front to back.
#[derive(Default)]
struct Ahead {
    /// Where the last read ended.
    next: u64,
    /// By where they begin.
    pieces: VecDeque<(u64, u32, Answer<READ3resok<'static>>)>,
}

impl OpenFile {
    fn new(shared: &Arc<Shared>, name: &ObjectName, file: nfs_fh3, len: u64) -> Self {
        Self { shared: Arc::clone(shared), name: name.clone(), file, len, ahead: Mutex::default() }
    }

    fn start(&self, at: u64, len: u32) -> Answer<READ3resok<'static>> {
        let asked = READ3args { file: self.file.clone(), offset: at, count: len };
        self.shared.link.start(move |client| now(client.read(&asked)))
    }

    /// Fills `into` from `at` on, piece by piece; has as many more on their way for who goes on where the last read ended.
    fn read_range(&self, at: u64, into: &mut [u8]) -> io::Result<()> {
        let end = at.checked_add(into.len() as u64).filter(|end| *end <= self.len);
        let end = end.ok_or(io::ErrorKind::UnexpectedEof)?;
        let piece_max = u64::from(self.shared.read_max);
        // Others may read at the same time, and not from front to back.
        let mut ahead = self.ahead.try_lock();
        let goes_on = at > 0 && ahead.as_ref().is_some_and(|ahead| ahead.next == at);
        let (mut pieces, until) = match &mut ahead {
            Some(ahead) if goes_on => {
                (std::mem::take(&mut ahead.pieces), self.len.min(end + IN_FLIGHT as u64 * piece_max))
            }
            _ => (VecDeque::new(), end),
        };
        let mut from = pieces.back().map_or(at, |(at, len, _)| at + u64::from(*len));
        while from < until {
            let len = (until - from).min(piece_max) as u32;
            pieces.push_back((from, len, self.start(from, len)));
            from += u64::from(len);
        }
        let mut left = into;
        while !left.is_empty() {
            let (_, len, answer) = pieces.pop_front().expect("started above");
            let read = answer.wait()?.data;
            if read.len() != len as usize {
                return Err(io::Error::new(io::ErrorKind::UnexpectedEof, "the server read a part only"));
            }
            let (now, later) = left.split_at_mut(read.len().min(left.len()));
            now.copy_from_slice(&read[..now.len()]);
            left = later;
            if now.len() < read.len() {
                // The next one begins within this piece, whose rest is not kept.
                pieces.clear();
            }
        }
        if let Some(ahead) = &mut ahead {
            **ahead = Ahead { next: end, pieces };
        }
        Ok(())
    }
}

impl ObjectReader for OpenFile {
    fn len(&self) -> u64 {
        self.len
    }

    fn read_at(&self, at: u64, into: &mut [u8]) -> Result<()> {
        self.read_range(at, into).map_err(Error::of_read(&self.shared.address, &self.name, at))
    }
}
