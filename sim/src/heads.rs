//! A run of several hosts that publish their layers in one repository, as numbered heads: `head-000001` is the first.
//!
//! A host reads the newest head and creates the next one, unless another host was first. After an error it reads the head: its own
//! create may have happened, or happens later. While no head has that number, it tries again with the same content; once one
//! has, no late create of that number can happen any more.
//!
//! Before it publishes a layer, a host replaces its mark, the object that says which layer it publishes. A late replace may bring back an
//! older one.
//!
//! Invariants: a head never changes; it is read whole; a host believes that it published a layer only where the head holds
//! it; a layer is in one head; a head that was published is listed from then on.

use std::collections::BTreeMap;
use std::io::ErrorKind;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use vmstrata_repo::{NewObject, ObjectName, Repository, Result};

use crate::kernel::inside;
use crate::network::{Host, LATE_NS, Network, Weather};
use crate::random::{Random, mix};
use crate::repository::{Fault, RemoteRepository, Server};
use crate::tasks::TASKS;

/// The host that is the NAS; the others publish.
const NAS: Host = Host(0);
/// Tasks of the NAS that answer requests.
const SERVERS: usize = 2;
/// Hosts that publish, and the layers of each, at most.
const HOSTS_MAX: u64 = 4;
const LAYERS_MAX: u64 = 6;
/// Begins the names of heads.
const PREFIX: &str = "head-";
/// Bytes of a part of an upload.
const PART: usize = 160;

/// The number of a head.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Head(u64);

impl Head {
    fn name(self) -> ObjectName {
        ObjectName::new(&format!("{PREFIX}{:06}", self.0)).expect("a name")
    }

    fn of(name: &ObjectName) -> Self {
        let number = name.as_str().strip_prefix(PREFIX).and_then(|number| number.parse().ok());
        Self(number.unwrap_or_else(|| fail(&format!("{name} is no head"))))
    }
}

/// A layer of a host: what a head holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Layer {
    host: Host,
    number: u32,
}

impl Layer {
    fn word(self) -> u64 {
        u64::from(self.host.0) << 32 | u64::from(self.number)
    }

    /// Its word over and over, as often as the word says.
    fn bytes(self) -> Vec<u8> {
        let words = 2 + mix(self.word()) as usize % 60;
        self.word().to_le_bytes().repeat(words)
    }

    /// The layer of an object's bytes.
    fn of(name: &ObjectName, bytes: &[u8]) -> Self {
        let word = bytes.first_chunk().map_or(0, |word| u64::from_le_bytes(*word));
        let layer = Self { host: Host((word >> 32) as u32), number: word as u32 };
        if layer.bytes() != bytes {
            fail(&format!("{name} is not whole: {} bytes of {layer:?}", bytes.len()));
        }
        layer
    }
}

fn fail(text: &str) -> ! {
    inside(|| TASKS.fail(text))
}

/// What all hosts saw and believe.
#[derive(Default)]
struct Ledger {
    seen: BTreeMap<Head, Layer>,
    published: BTreeMap<Head, Layer>,
}

impl Ledger {
    /// A host has read a head.
    fn see(&mut self, head: Head, layer: Layer) {
        let before = *self.seen.entry(head).or_insert(layer);
        if before != layer {
            fail(&format!("{} held {before:?} and holds {layer:?}", head.name()));
        }
        if let Some((other, _)) = self.seen.iter().find(|&(&other, &seen)| other != head && seen == layer) {
            fail(&format!("{} and {} hold {layer:?}", other.name(), head.name()));
        }
    }

    /// The host of the layer believes that it published it.
    fn publish(&mut self, head: Head, layer: Layer) {
        if let Some(other) = self.published.insert(head, layer) {
            fail(&format!("{} was published as {other:?} and as {layer:?}", head.name()));
        }
        self.see(head, layer);
    }

    fn newest(&self) -> Head {
        self.published.last_key_value().map_or(Head(0), |(&head, _)| head)
    }
}

/// A host that publishes.
struct Publisher {
    host: Host,
    repository: RemoteRepository,
    ledger: Arc<Mutex<Ledger>>,
    fault: Option<Fault>,
    random: Random,
}

impl Publisher {
    fn ledger(&self) -> MutexGuard<'_, Ledger> {
        self.ledger.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn has(&self, fault: Fault) -> bool {
        self.fault == Some(fault)
    }

    fn run(&self) {
        for number in 0..1 + self.random.below(LAYERS_MAX) as u32 {
            let layer = Layer { host: self.host, number };
            self.ask(|| self.upload(self.repository.replace(&self.mark(), 1)?, layer));
            while !self.publish(layer) {}
            self.pause();
        }
    }

    fn pause(&self) {
        thread::sleep(Duration::from_micros(self.random.below(8_000)));
    }

    /// Does it until it has an answer; `None` when there is no such object.
    fn ask<T>(&self, mut what: impl FnMut() -> Result<T>) -> Option<T> {
        loop {
            match what() {
                Ok(answer) => return Some(answer),
                Err(error) if error.kind() == ErrorKind::NotFound => return None,
                Err(error) if error.kind() == ErrorKind::TimedOut => self.pause(),
                Err(error) => fail(&error.to_string()),
            }
        }
    }

    /// Publishes the layer as the next head; false if another host was first.
    fn publish(&self, layer: Layer) -> bool {
        let must_be_there = self.ledger().newest();
        let heads = self.ask(|| self.repository.list(PREFIX)).unwrap_or_default();
        let newest = heads.iter().map(|head| Head::of(&head.name)).max().unwrap_or(Head(0));
        if newest < must_be_there {
            fail(&format!("{} was published, and {} is the newest", must_be_there.name(), newest.name()));
        }
        if newest > Head(0) && self.read_head(newest).is_none() {
            fail(&format!("{} was listed and is not there", newest.name()));
        }
        let head = Head(newest.0 + 1);
        loop {
            let is_mine = match self.create(head, layer) {
                Ok(()) => true,
                Err(_) if self.has(Fault::TrustedError) => false,
                Err(error) if error.kind() == ErrorKind::AlreadyExists && self.has(Fault::TrustedRefusal) => {
                    false
                }
                Err(error) if matches!(error.kind(), ErrorKind::TimedOut | ErrorKind::AlreadyExists) => {
                    match self.read_head(head) {
                        Some(found) => found == layer,
                        None if self.has(Fault::TrustedAbsence) => false,
                        None => continue,
                    }
                }
                Err(error) => fail(&error.to_string()),
            };
            if is_mine {
                self.ledger().publish(head, layer);
            }
            return is_mine;
        }
    }

    fn create(&self, head: Head, layer: Layer) -> Result<()> {
        self.upload(self.repository.create_new(&head.name(), 1)?, layer)
    }

    fn upload(&self, mut object: Box<dyn NewObject>, layer: Layer) -> Result<()> {
        layer.bytes().chunks(PART).try_for_each(|part| object.write(part))?;
        object.finish()
    }

    /// The name of its mark.
    fn mark(&self) -> ObjectName {
        ObjectName::new(&format!("mark-{}", self.host.0)).expect("a name")
    }

    /// Deletes its mark, which nothing can bring back any more.
    fn unmark(&self) {
        let name = self.mark();
        let layer = self.read(&name).unwrap_or_else(|| fail(&format!("{name} is not there")));
        if layer.host != self.host {
            fail(&format!("{name} holds {layer:?}"));
        }
        self.ask(|| self.repository.delete(&name));
    }

    fn read_head(&self, head: Head) -> Option<Layer> {
        let layer = self.read(&head.name())?;
        self.ledger().see(head, layer);
        Some(layer)
    }

    /// The layer that an object holds, in two reads.
    fn read(&self, name: &ObjectName) -> Option<Layer> {
        let object = self.ask(|| self.repository.open(name))?;
        let mut bytes = vec![0; object.len() as usize];
        let (low, high) = bytes.split_at_mut(object.len() as usize / 2);
        self.ask(|| object.read_at(0, &mut *low))?;
        self.ask(|| object.read_at(low.len() as u64, &mut *high))?;
        Some(Layer::of(name, &bytes))
    }
}

/// Runs the hosts, then compares what they believe with what the NAS has: never returns.
pub fn run(seed: u64, fault: Option<Fault>) -> ! {
    let random = Random::new(seed);
    let weather = Weather {
        lost_one_in: *random.pick(&[5, 20, 100]),
        late_one_in: *random.pick(&[5, 20, 100]),
        partition_one_in: *random.pick(&[20, 100, 400]),
    };
    let hosts = 2 + random.below(HOSTS_MAX - 1) as u32;
    let network = Arc::new(Network::new(1 + hosts, weather));
    let server = Arc::new(Server::new(network.clone(), NAS, fault));
    for _ in 0..SERVERS {
        let server = server.clone();
        thread::spawn(move || server.serve());
    }
    let ledger = Arc::new(Mutex::new(Ledger::default()));
    let publishers = (1..=hosts).map(|host| {
        let (host, ledger) = (Host(host), ledger.clone());
        let repository = RemoteRepository::new(network.clone(), host, NAS);
        let random = Random::new(random.next());
        let publisher = Publisher { host, repository, ledger, fault, random };
        thread::spawn(move || {
            publisher.run();
            publisher
        })
    });
    let publishers: Vec<_> = publishers.collect();
    let publishers: Vec<Publisher> =
        publishers.into_iter().map(|publisher| publisher.join().expect("no panic")).collect();
    // By then the last late message has arrived.
    thread::sleep(Duration::from_nanos(2 * LATE_NS.end));
    publishers[0].ask(|| publishers[0].repository.sweep());
    publishers.iter().for_each(Publisher::unmark);
    if server.has_unfinished() {
        fail("an unfinished object is left");
    }
    let there = server.objects().into_iter().map(|(name, bytes)| (Head::of(&name), Layer::of(&name, &bytes)));
    let (there, ledger) = (there.collect::<BTreeMap<_, _>>(), publishers[0].ledger());
    if there != ledger.published {
        fail(&format!("the hosts published {:?}, and there is {there:?}", ledger.published));
    }
    inside(|| TASKS.die())
}
