//! The storage of a NAS: a directory, its files, and what is left of them when the NAS dies.
//!
//! ```text
//!   request ──► what all hosts see ── commit, flush, time ──► what is stable
//!                       └──────── crash: any part of the difference ──► a directory
//! ```
//!
//! What is stable when, an [`Export`] says. Of the rest, a crash leaves what the seed says: of each file's changes some, and of each
//! some bytes or zeros; of the names that changed those up to one, or any.

use std::collections::BTreeMap;
use std::fmt;

use libc::c_int;
use vmstrata_repo::ObjectName;
use vmstrata_tier::is_object_name;

use crate::random::{Random, hash};
use crate::repository::{CORRUPT_ONE_IN, Change};
use crate::shared::Kind;
use crate::tasks::TASKS;

/// How long a NAS that promises nothing keeps what it was told in memory.
const ASYNC_NS: u64 = 60_000_000_000;

/// What a NAS promises.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Export {
    /// A name is stable when it is answered, bytes are once they are committed: NFS.
    Sync,
    /// A name is stable once its directory was flushed: a local file system, or that of a cluster.
    Flushed,
    /// Nothing is, for [`ASYNC_NS`], whatever was answered: NFS with `async`.
    Async,
}

/// A fault of the NAS that the seeds have to find.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// A link takes the place of another.
    Overwrite,
    /// A commit is answered, and does nothing.
    Uncommitted,
    /// So is a flush of the directory.
    Unflushed,
    /// A host reads what it wrote from its memory, although told not to.
    KeptPages,
}

impl Fault {
    /// All of them.
    pub const ALL: [Self; 4] = [Self::Overwrite, Self::Uncommitted, Self::Unflushed, Self::KeptPages];
}

/// A file, as NFS handles name it: whatever its name is now.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct FileNumber(pub u64);

/// A change of a file.
#[derive(Clone)]
pub enum Edit {
    Write { at: usize, bytes: Vec<u8> },
    SetLen(usize),
}

impl fmt::Debug for Edit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Write { at, bytes } => write!(f, "write {} at {at} {:016x}", bytes.len(), hash(0, bytes)),
            Self::SetLen(len) => write!(f, "set length {len}"),
        }
    }
}

impl Edit {
    pub fn apply(&self, to: &mut Vec<u8>) {
        match self {
            Self::Write { at, bytes } => {
                to.resize(to.len().max(at + bytes.len()), 0);
                to[*at..at + bytes.len()].copy_from_slice(bytes);
            }
            Self::SetLen(len) => to.resize(*len, 0),
        }
    }

    /// Of a write, the length arrives, and a part of the bytes.
    fn tear(&self, to: &mut Vec<u8>, random: &Random) {
        if let Self::Write { at, bytes } = self {
            to.resize(to.len().max(at + bytes.len()), 0);
            let kept = random.below(bytes.len() as u64 + 1) as usize;
            to[*at..at + kept].copy_from_slice(&bytes[..kept]);
        }
    }
}

/// What a host asks of the NAS.
#[derive(Clone, Debug)]
pub enum Request {
    Lookup(String),
    /// Whether the file is there, and its length.
    Attributes(FileNumber),
    Create(String),
    Edit(FileNumber, Edit),
    Commit(FileNumber),
    Read(FileNumber),
    Link(FileNumber, String),
    Rename(String, String),
    Remove(String),
    /// A directory is read in pieces, and in no order of names.
    List {
        half: bool,
    },
    FlushNames,
}

impl Request {
    pub fn changes(&self) -> bool {
        !matches!(self, Self::Lookup(_) | Self::Attributes(_) | Self::Read(_) | Self::List { .. })
    }
}

/// What the NAS says.
#[derive(Clone, Debug)]
pub enum Reply {
    Done,
    File(FileNumber, usize),
    /// Its boot: what was written under another one may be lost.
    Verifier(u64),
    Bytes(Vec<u8>),
    Names(Vec<String>),
}

#[derive(Debug, Default)]
struct File {
    bytes: Vec<u8>,
    stable: Vec<u8>,
    /// What is not stable, and since when.
    edits: Vec<(u64, Edit)>,
    /// The NAS has kept a byte of it wrong.
    is_corrupt: bool,
}

impl File {
    /// What was done before a moment is stable.
    fn settle(&mut self, before_ns: u64) {
        let young = self.edits.iter().position(|(since_ns, _)| *since_ns >= before_ns);
        let old = self.edits.drain(..young.unwrap_or(self.edits.len()));
        old.for_each(|(_, edit)| edit.apply(&mut self.stable));
    }

    fn after_crash(&self, sure_before_ns: u64, random: &Random) -> Vec<u8> {
        let (mut bytes, how) = (self.stable.clone(), random.below(4));
        for (since_ns, edit) in &self.edits {
            match how {
                _ if *since_ns < sure_before_ns => edit.apply(&mut bytes),
                0 => {}
                1 => edit.apply(&mut bytes),
                _ => match random.below(3) {
                    0 => {}
                    1 => edit.apply(&mut bytes),
                    _ => edit.tear(&mut bytes, random),
                },
            }
        }
        bytes
    }
}

/// A name that leads to something else, or to nothing.
#[derive(Debug)]
struct Naming {
    since_ns: u64,
    name: String,
    file: Option<FileNumber>,
}

type Names = BTreeMap<String, FileNumber>;

/// What names lead to.
pub type Directory = BTreeMap<String, Vec<u8>>;

fn apply(naming: &Naming, to: &mut Names) {
    match naming.file {
        Some(file) => drop(to.insert(naming.name.clone(), file)),
        None => drop(to.remove(&naming.name)),
    }
}

/// See the module documentation.
#[derive(Debug)]
pub struct Nas {
    pub export: Export,
    pub fault: Option<Fault>,
    /// Every file that ever was.
    files: BTreeMap<FileNumber, File>,
    names: Names,
    stable_names: Names,
    namings: Vec<Naming>,
    verifier: u64,
    changes: Vec<Change>,
}

impl Nas {
    pub fn new(export: Export, fault: Option<Fault>) -> Self {
        Self {
            export,
            fault,
            files: BTreeMap::new(),
            names: Names::new(),
            stable_names: Names::new(),
            namings: Vec::new(),
            verifier: 0,
            changes: Vec::new(),
        }
    }

    /// What became of names of objects since there were so many changes.
    pub fn changes(&self, since: usize) -> Vec<Change> {
        self.changes[since..].to_vec()
    }

    /// Does what a host asks for; `is_late` if it was done before.
    ///
    /// # Errors
    /// The number of the error.
    pub fn execute(&mut self, request: &Request, is_late: bool) -> Result<Reply, c_int> {
        let now_ns = TASKS.now_ns.get();
        if self.export == Export::Async {
            self.settle(now_ns.saturating_sub(ASYNC_NS));
        }
        match request {
            Request::Lookup(name) => {
                let file = *self.names.get(name).ok_or(libc::ENOENT)?;
                Ok(Reply::File(file, self.files[&file].bytes.len()))
            }
            Request::Attributes(file) => Ok(Reply::File(*file, self.file(*file)?.bytes.len())),
            Request::Create(name) => {
                if self.names.contains_key(name) {
                    return Err(libc::EEXIST);
                }
                let file = FileNumber(2 + self.files.len() as u64);
                self.files.insert(file, File::default());
                self.name(name, Some(file));
                Ok(Reply::File(file, 0))
            }
            Request::Edit(file, edit) => {
                let is_object = self.objects(*file).next().is_some();
                let verifier = self.verifier;
                let at_file = self.file(*file)?;
                if is_late && at_file.is_corrupt {
                    // What is wrong stays wrong: the same bytes again are no repair.
                    return Ok(Reply::Verifier(verifier));
                }
                let mut edit = edit.clone();
                if let Edit::Write { bytes, .. } = &mut edit
                    && !is_late
                    && !is_object
                    && TASKS.random.one_in(CORRUPT_ONE_IN)
                    && let Some(byte) = bytes.last_mut()
                {
                    *byte ^= 1;
                    at_file.is_corrupt = true;
                }
                let before = is_object.then(|| at_file.bytes.clone());
                edit.apply(&mut at_file.bytes);
                at_file.edits.push((now_ns, edit));
                if before.is_some_and(|before| before != self.files[file].bytes) {
                    self.changed(*file);
                }
                Ok(Reply::Verifier(self.verifier))
            }
            Request::Commit(file) => {
                let is_done = self.export != Export::Async && self.fault != Some(Fault::Uncommitted);
                let at_file = self.file(*file)?;
                if is_done {
                    at_file.settle(u64::MAX);
                }
                Ok(Reply::Verifier(self.verifier))
            }
            Request::Read(file) => Ok(Reply::Bytes(self.file(*file)?.bytes.clone())),
            Request::Link(file, name) => {
                self.file(*file)?;
                if self.names.contains_key(name) && self.fault != Some(Fault::Overwrite) {
                    return Err(libc::EEXIST);
                }
                self.name(name, Some(*file));
                Ok(Reply::Done)
            }
            Request::Rename(from, to) => {
                let file = *self.names.get(from).ok_or(libc::ENOENT)?;
                self.name(from, None);
                self.name(to, Some(file));
                Ok(Reply::Done)
            }
            Request::Remove(name) => {
                if !self.names.contains_key(name) {
                    return Err(libc::ENOENT);
                }
                self.name(name, None);
                Ok(Reply::Done)
            }
            Request::List { half } => {
                let is_in = |name: &&String| (hash(0, name.as_bytes()) & 1 == 1) == *half;
                Ok(Reply::Names(self.names.keys().filter(is_in).cloned().collect()))
            }
            Request::FlushNames => {
                if self.export != Export::Async && self.fault != Some(Fault::Unflushed) {
                    self.settle_names(u64::MAX);
                }
                Ok(Reply::Done)
            }
        }
    }

    /// The file, if it has a name.
    fn file(&mut self, file: FileNumber) -> Result<&mut File, c_int> {
        if !self.names.values().any(|named| *named == file) {
            return Err(libc::ESTALE);
        }
        self.files.get_mut(&file).ok_or(libc::ESTALE)
    }

    /// The names of objects that the file has.
    fn objects(&self, file: FileNumber) -> impl Iterator<Item = &String> {
        self.names
            .iter()
            .filter(move |(name, named)| **named == file && is_object_name(name))
            .map(|(name, _)| name)
    }

    fn name(&mut self, name: &str, file: Option<FileNumber>) {
        let naming = Naming { since_ns: TASKS.now_ns.get(), name: name.to_owned(), file };
        apply(&naming, &mut self.names);
        self.namings.push(naming);
        if self.export == Export::Sync {
            self.settle_names(u64::MAX);
        }
        if is_object_name(name) {
            self.change(name, file);
        }
    }

    /// An object's bytes are others.
    fn changed(&mut self, file: FileNumber) {
        let names: Vec<String> = self.objects(file).cloned().collect();
        names.iter().for_each(|name| self.change(name, Some(file)));
    }

    fn change(&mut self, name: &str, file: Option<FileNumber>) {
        let bytes = file.map(|file| self.files[&file].bytes.clone());
        let name = ObjectName::new(name).expect("checked before");
        self.changes.push(Change { time_ns: TASKS.now_ns.get(), name, bytes });
    }

    fn settle_names(&mut self, before_ns: u64) {
        let young = self.namings.iter().position(|naming| naming.since_ns >= before_ns);
        let old = self.namings.drain(..young.unwrap_or(self.namings.len()));
        old.for_each(|naming| apply(&naming, &mut self.stable_names));
    }

    fn settle(&mut self, before_ns: u64) {
        self.settle_names(before_ns);
        self.files.values_mut().for_each(|file| file.settle(before_ns));
    }

    /// What a crash now may leave.
    pub fn after_crash(&self, random: &Random) -> Directory {
        let sure_before_ns = match self.export {
            Export::Async => TASKS.now_ns.get().saturating_sub(random.below(ASYNC_NS)),
            Export::Sync | Export::Flushed => 0,
        };
        // File systems with a journal keep the order of names.
        let is_in_order = self.export == Export::Async || random.one_in(2);
        let kept = random.below(self.namings.len() as u64 + 1) as usize;
        let mut names = self.stable_names.clone();
        for (place, naming) in self.namings.iter().enumerate() {
            let is_kept = if is_in_order { place < kept } else { random.one_in(2) };
            if is_kept || naming.since_ns < sure_before_ns {
                apply(naming, &mut names);
            }
        }
        let bytes = |file: &FileNumber| self.files[file].after_crash(sure_before_ns, random);
        names.iter().map(|(name, file)| (name.clone(), bytes(file))).collect()
    }

    /// The NAS dies, and starts again, while its hosts go on.
    pub fn restart(&mut self, random: &Random) {
        assert_eq!(self.export, Export::Sync, "hosts write again what was not committed, and nothing else");
        self.verifier += 1;
        TASKS.note(Kind::Call, [0; 4], 0, &[b"the NAS starts anew"]);
        let mut changed = Vec::new();
        for (number, file) in self.files.iter_mut().filter(|(_, file)| !file.edits.is_empty()) {
            let bytes = file.after_crash(0, random);
            file.edits.clear();
            file.stable = bytes.clone();
            if std::mem::replace(&mut file.bytes, bytes) != file.bytes {
                changed.push(*number);
            }
        }
        changed.into_iter().for_each(|file| self.changed(file));
    }
}
