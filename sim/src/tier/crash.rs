//! What a NAS leaves that died: the newest whole head must name a state of the disk, at an epoch that was cut.
//!
//! Of a NAS that keeps its promises, all is there that a process believes it published or pinned. One that promises nothing may have
//! lost the newest heads, or what they name. Who takes the disk over must then get the newest state that is whole, and be told; or
//! nothing, and be told.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::sync::{Arc, Mutex, PoisonError};

use vmstrata_repo::{
    Capabilities, DeviceId, Error, NewObject, ObjectInfo, ObjectName, ObjectReader, Repository, Result, Swept,
};
use vmstrata_tier::{Claim, Epoch, Head, HeadNumber, Object, Publisher};

use super::{Book, Entry, Layer, Ledger, OwnerId, PinId, State, fail};
use crate::kernel::inside;
use crate::nas::{Directory, Export};
use crate::random::hash;
use crate::shared::Kind;
use crate::tasks::TASKS;

/// A directory that a NAS would have left, and what processes believed then.
#[derive(Debug)]
pub struct Crashed {
    left: Directory,
    export: Export,
    acknowledged: BTreeSet<HeadNumber>,
    pins: BTreeMap<PinId, Epoch>,
}

impl Ledger {
    /// The NAS might have died now.
    pub fn crash(&self, left: Directory, export: Export) {
        let mut book = self.book();
        let (acknowledged, pins) = (book.acknowledged.clone(), book.pins.clone());
        let crashed = Crashed { left, export, acknowledged, pins };
        book.crashed.push(crashed);
    }

    /// Judges what the NAS would have left.
    pub fn judge_crashes(&self) {
        let crashed = inside(|| std::mem::take(&mut self.book().crashed));
        for crashed in crashed {
            let names = crashed.left.iter().flat_map(|(name, bytes)| [name.as_bytes(), bytes]);
            let hashed = names.fold(0, hash);
            inside(|| TASKS.note(Kind::Crashed, [hashed, 0, 0, 0], 0, &[]));
            self.judge(&crashed);
        }
    }

    fn judge(&self, crashed: &Crashed) {
        let taken = Publisher::claim(Arc::new(Left::of(&crashed.left)), OwnerId::draw(), Claim::TakeOver);
        inside(|| {
            let book = self.book();
            let judged = match crashed.export {
                Export::Sync | Export::Flushed => book.judge_kept(crashed),
                Export::Async => Ok(()),
            };
            judged.and_then(|()| book.judge_taken(crashed, taken)).unwrap_or_else(|why| {
                fail(&format!("a crash of a NAS of kind {:?} leaves {why}", crashed.export))
            });
        });
    }
}

impl Book {
    /// Whether all is there that processes believe to be.
    fn judge_kept(&self, crashed: &Crashed) -> std::result::Result<(), String> {
        let newest = crashed.newest();
        if newest < crashed.acknowledged.last().copied() {
            return Err(format!("{newest:?}, and {:?} were published", crashed.acknowledged));
        }
        if let Some(newest) = newest.map(|number| crashed.head(number)).transpose()? {
            // Of others, the next one may be there, and not they.
            for number in crashed.acknowledged.range(newest.floor..=newest.number) {
                crashed.state(&crashed.head(*number)?.epoch)?;
            }
        }
        for (pin, epoch) in &crashed.pins {
            let name = pin.name();
            let _ = crashed.left.get(name.as_str()).ok_or(format!("no {name}"))?;
            crashed.state(epoch)?;
        }
        Ok(())
    }

    /// Whether who takes the disk over gets the newest state that is whole.
    fn judge_taken(
        &self,
        crashed: &Crashed,
        taken: vmstrata_tier::Result<Publisher>,
    ) -> std::result::Result<(), String> {
        let whole = |entry: &&Entry| {
            crashed.head(entry.head.number).is_ok_and(|head| head == entry.head)
                && crashed.state(&entry.head.epoch).is_ok()
        };
        let newest = self.log.iter().rev().find(whole);
        match (taken, newest) {
            (Ok(publisher), Some(newest)) if publisher.head().epoch == newest.head.epoch => {
                let state = crashed.state(&newest.head.epoch)?;
                (state == newest.state)
                    .then_some(())
                    .ok_or(format!("{state:x?}, and it was {:x?}", newest.state))
            }
            (Err(_), None) => Ok(()),
            (Ok(publisher), newest) => {
                Err(format!("{:?}, which was taken over, not {newest:?}", publisher.head()))
            }
            (Err(error), Some(newest)) => Err(format!("{newest:?}, and it cannot be taken over: {error}")),
        }
    }
}

impl Crashed {
    fn newest(&self) -> Option<HeadNumber> {
        self.left.keys().filter_map(|name| HeadNumber::of(name)).max()
    }

    fn head(&self, number: HeadNumber) -> std::result::Result<Head, String> {
        let name = number.name();
        let bytes = self.left.get(name.as_str()).ok_or(format!("no {name}"))?;
        Head::decode(number, bytes).map_err(|why| format!("{name}: {why}"))
    }

    /// What an epoch reads.
    fn state(&self, epoch: &Epoch) -> std::result::Result<State, String> {
        let mut state = State::default();
        for object in epoch.objects() {
            self.layer(object)?.apply(&mut state);
        }
        Ok(state)
    }

    fn layer(&self, object: &Object) -> std::result::Result<Layer, String> {
        let (name, companion) = (object.id.layer_name(), object.id.companion_name());
        let bytes = self.left.get(name.as_str()).filter(|bytes| blake3::hash(bytes) == object.blake3);
        let list = self.left.get(companion.as_str()).filter(|list| list[..] == *object.blake3.as_bytes());
        let _ = list.ok_or(format!("{companion} other than it was, or none"))?;
        bytes.and_then(|bytes| Layer::decode(bytes)).ok_or(format!("{name} other than it was, or none"))
    }
}

/// A repository in a directory that a NAS has left.
#[derive(Clone, Debug)]
struct Left(Arc<Mutex<BTreeMap<ObjectName, Arc<Vec<u8>>>>>);

impl Left {
    fn of(left: &Directory) -> Self {
        let objects = left.iter().filter(|(name, _)| vmstrata_tier::is_object_name(name));
        let named = |(name, bytes): (&String, &Vec<u8>)| {
            (ObjectName::new(name).expect("an object's name"), Arc::new(bytes.clone()))
        };
        Self(Arc::new(Mutex::new(objects.map(named).collect())))
    }

    fn with<T>(&self, run: impl FnOnce(&mut BTreeMap<ObjectName, Arc<Vec<u8>>>) -> T) -> T {
        run(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

impl Repository for Left {
    fn describe(&self) -> String {
        "what the NAS left".to_owned()
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities {
            conditional_create: true,
            rename: false,
            read_back: true,
            early_read_back: false,
            max_copies: 1,
            ranged_reads: true,
            free_space: false,
            holds: false,
        }
    }

    fn device(&self) -> DeviceId {
        DeviceId(0)
    }

    fn list(&self, prefix: &str) -> Result<Vec<ObjectInfo>> {
        let info = |(name, bytes): (&ObjectName, &Arc<Vec<u8>>)| {
            let len = bytes.len() as u64;
            ObjectInfo { name: name.clone(), len, allocated: len, copies: 1 }
        };
        Ok(self.with(|objects| {
            objects.iter().filter(|(name, _)| name.as_str().starts_with(prefix)).map(info).collect()
        }))
    }

    fn create_new(&self, name: &ObjectName, _copies: u8) -> Result<Box<dyn NewObject>> {
        Ok(Box::new(NewLeft { left: self.clone(), name: name.clone(), bytes: Vec::new() }))
    }

    fn replace(&self, name: &ObjectName, _copies: u8) -> Result<Box<dyn NewObject>> {
        Err(Error::of_object(self.describe(), "replacing", name)(io::ErrorKind::Unsupported.into()))
    }

    fn open(&self, name: &ObjectName) -> Result<Box<dyn ObjectReader>> {
        let found = self.with(|objects| objects.get(name).cloned()).ok_or(io::ErrorKind::NotFound.into());
        let bytes = found.map_err(Error::of_object(self.describe(), "opening", name))?;
        Ok(Box::new(LeftReader { name: name.clone(), bytes }))
    }

    fn delete(&self, name: &ObjectName) -> Result<()> {
        self.with(|objects| objects.remove(name));
        Ok(())
    }

    fn sweep(&self) -> Result<Swept> {
        Ok(Swept::default())
    }
}

struct NewLeft {
    left: Left,
    name: ObjectName,
    bytes: Vec<u8>,
}

impl NewObject for NewLeft {
    fn write(&mut self, bytes: &[u8]) -> Result<()> {
        self.bytes.extend(bytes);
        Ok(())
    }

    fn sync(&mut self) -> Result<()> {
        Ok(())
    }

    fn read_back(&self) -> Result<Box<dyn ObjectReader>> {
        Ok(Box::new(LeftReader { name: self.name.clone(), bytes: Arc::new(self.bytes.clone()) }))
    }

    fn finish(self: Box<Self>) -> Result<()> {
        let Self { left, name, bytes } = *self;
        let is_there = left.with(|objects| match objects.contains_key(&name) {
            true => true,
            false => objects.insert(name.clone(), Arc::new(bytes)).is_some(),
        });
        let refused = Error::of_object(left.describe(), "finishing", &name);
        if is_there { Err(refused(io::ErrorKind::AlreadyExists.into())) } else { Ok(()) }
    }
}

struct LeftReader {
    name: ObjectName,
    bytes: Arc<Vec<u8>>,
}

impl ObjectReader for LeftReader {
    fn len(&self) -> u64 {
        self.bytes.len() as u64
    }

    fn read_at(&self, at: u64, into: &mut [u8]) -> Result<()> {
        let from = usize::try_from(at).ok().and_then(|at| self.bytes.get(at..at + into.len()));
        let past = || io::Error::from(io::ErrorKind::UnexpectedEof);
        into.copy_from_slice(from.ok_or_else(past).map_err(Error::of_read(
            "what the NAS left",
            &self.name,
            at,
        ))?);
        Ok(())
    }
}
