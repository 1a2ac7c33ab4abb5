//! A run of several hosts that publish one disk in one repository, by the rules of `vmstrata-tier`: they claim it from each other,
//! publish epochs, merge and delete layers, and pin states, over a bad network, on a NAS that keeps wrong bytes now and then. Their
//! processes pause, for longer than anything is kept, die at any call, and are started again.
//!
//! Invariants, of which a [`Ledger`] judges every change of a name on the NAS:
//!
//! - The heads that have a number above all before are one log. Each is a claim, with the epoch of the head before it and the next
//!   generation, or the next epoch of the same process, or the same epoch with other layers.
//! - Each names layers that are there, whole and as they were shipped; by the names in them they are one chain, and it reads as the disk
//!   was at that epoch.
//! - What a process believes it published is such a head. Heads made at a number that is free again are nobody's.
//! - The newest head, heads that were the newest within [`KEEP`], and what they and pins name stay there.
//! - In the end, a process that has the repository alone leaves no layer that nothing names.
//!
//! The NAS is a server of objects ([`run_network`]), or a directory that hosts have mounted ([`run_mount`]). That one may die at any
//! request: what it may leave is judged, too (`crash`).

mod crash;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::io::ErrorKind;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use vmstrata_repo::{DirectoryRepository, Repository};
use vmstrata_tier::{
    Claim, DiskState, Epoch, EpochNumber, Error, Generation, Head, HeadNumber, KEEP, Merge, Object, ObjectId,
    OwnerId, Pin, PinId, Publisher, Purpose, Result, is_object_name, ship, states,
};

use crate::kernel::inside;
use crate::mount::{self, Crashes, Way};
use crate::nas::{self, Export, Nas};
use crate::network::{Host, Network, Weather};
use crate::random::Random;
use crate::repository::{Change, DEAD, Fault, Message, PAUSE_NS_MAX, RemoteRepository, Server};
use crate::tasks::TASKS;
use crash::Crashed;

/// The host that is the NAS; the others publish or read.
const NAS: Host = Host(0);
/// Tasks of the NAS that answer requests.
const SERVERS: usize = 2;
/// Hosts, processes of each, steps of a process, and calls before one dies, at most.
const HOSTS_MAX: u64 = 3;
const PROCESSES_MAX: u64 = 4;
/// How often a reader pauses, at least: before one call of so many.
const READER_PAUSES_ONE_IN: u64 = 8;
const STEPS_MAX: u64 = 16;
const CALLS_MAX: u64 = 200;
/// Blocks of the disk.
const BLOCKS: usize = 6;
/// How long a process waits for what a host believes of a mount to change, at most.
const PATIENCE_NS: u64 = 20_000_000_000;
/// One request in so many at which the NAS might die is judged, with so many losses.
const CRASHES_ONE_IN: u64 = 8;
const LOSSES: u64 = 4;
/// Bytes of a part of an upload.
const PART: usize = 64;

/// The stamp of the last write to each block.
type State = [u64; BLOCKS];

fn fail(text: &str) -> ! {
    inside(|| TASKS.fail(text))
}

/// What a layer says.
#[derive(Debug, Default)]
struct Layer {
    below: Option<ObjectId>,
    stamps: BTreeMap<usize, u64>,
}

impl Layer {
    fn encode(&self) -> Vec<u8> {
        let mut text = self.below.map_or_else(|| "-".to_owned(), |below| below.to_string());
        self.stamps.iter().for_each(|(block, stamp)| write!(text, " {block}:{stamp:x}").expect("a string"));
        text.into_bytes()
    }

    fn decode(bytes: &[u8]) -> Option<Self> {
        let mut words = std::str::from_utf8(bytes).ok()?.split(' ');
        let below = words.next()?.parse().ok();
        let stamp = |word: &str| {
            let (block, stamp) = word.split_once(':')?;
            Some((block.parse().ok()?, u64::from_str_radix(stamp, 16).ok()?))
        };
        Some(Self { below, stamps: words.map(stamp).collect::<Option<_>>()? })
    }

    fn apply(&self, state: &mut State) {
        self.stamps.iter().for_each(|(block, stamp)| state[*block] = *stamp);
    }
}

/// A head that was the newest.
#[derive(Debug)]
struct Entry {
    head: Head,
    state: State,
    superseded_ns: Option<u64>,
}

#[derive(Default)]
struct Book {
    changes: usize,
    objects: BTreeMap<String, Vec<u8>>,
    log: Vec<Entry>,
    /// What the disk was when a process cut an epoch.
    cut: BTreeMap<(Generation, OwnerId, EpochNumber), State>,
    pins: BTreeMap<PinId, Epoch>,
    /// Heads that a process believes it published.
    acknowledged: BTreeSet<HeadNumber>,
    /// What the NAS would have left.
    crashed: Vec<Crashed>,
}

/// What became of names on the NAS since there were so many changes.
type Changes = dyn Fn(usize) -> Vec<Change> + Send + Sync;

/// What is on the NAS, and what processes believe of it.
struct Ledger {
    changes: Box<Changes>,
    book: Mutex<Book>,
}

impl Ledger {
    fn new(changes: impl Fn(usize) -> Vec<Change> + Send + Sync + 'static) -> Self {
        Self { changes: Box::new(changes), book: Mutex::default() }
    }

    /// The book, up to now.
    fn book(&self) -> MutexGuard<'_, Book> {
        let mut book = self.book.lock().unwrap_or_else(PoisonError::into_inner);
        for change in (self.changes)(book.changes) {
            book.changes += 1;
            book.change(change);
        }
        book
    }

    /// A process believes that it published this head.
    fn enter(&self, head: &Head) {
        inside(|| {
            let mut book = self.book();
            let found = book.log.iter().find(|entry| entry.head.number == head.number);
            if found.is_none_or(|entry| entry.head != *head) {
                fail(&format!("{head:?} was published, and there is {found:?}"));
            }
            book.acknowledged.insert(head.number);
        });
    }

    fn cut(&self, head: &Head, epoch: EpochNumber, state: State) {
        inside(|| self.book().cut.insert((head.generation, head.owner, epoch), state));
    }

    /// A process believes that it pinned an epoch, which so reads.
    fn pinned(&self, pin: &Pin) {
        inside(|| {
            let mut book = self.book();
            if !book.log.iter().any(|entry| entry.head.epoch == pin.epoch) {
                fail(&format!("{pin:?} is of no epoch"));
            }
            book.read(&pin.epoch);
            book.pins.insert(pin.id, pin.epoch.clone());
        });
    }

    fn released(&self, pin: &Pin) {
        inside(|| self.book().pins.remove(&pin.id));
    }

    fn state(&self, epoch: &Epoch) -> State {
        inside(|| {
            let book = self.book();
            book.log.iter().find(|entry| entry.head.epoch == *epoch).expect("of a head").state
        })
    }

    fn is_newest(&self, head: &Head) -> bool {
        inside(|| self.book().log.last().is_some_and(|entry| entry.head == *head))
    }

    /// A process has deleted all that it could while nothing else happened.
    fn check_swept(&self) {
        inside(|| {
            let book = self.book();
            let Some(newest) = book.log.last() else { return };
            let kept = book.log.iter().filter(|entry| entry.head.number >= newest.head.floor);
            let mut named: BTreeSet<ObjectId> =
                kept.flat_map(|entry| entry.head.epoch.objects()).map(|object| object.id).collect();
            for (name, bytes) in &book.objects {
                if PinId::of(name).is_some() {
                    let text = String::from_utf8_lossy(bytes);
                    named.extend(text.split('"').filter_map(|word| word.parse::<ObjectId>().ok()));
                }
            }
            for name in book.objects.keys() {
                let is_dead = ObjectId::of(name).is_some_and(|id| !named.contains(&id))
                    || HeadNumber::of(name).is_some_and(|number| number < newest.head.floor);
                if is_dead {
                    fail(&format!("{name} is left"));
                }
            }
        });
    }
}

impl Book {
    fn change(&mut self, change: Change) {
        let name = change.name.to_string();
        match change.bytes {
            Some(bytes) => {
                if self.objects.insert(name.clone(), bytes.clone()).is_some() {
                    fail(&format!("{name} changed"));
                }
                let newest = self.log.last().map(|entry| entry.head.number);
                if let Some(number) = HeadNumber::of(&name).filter(|number| Some(*number) > newest) {
                    let head = Head::decode(number, &bytes);
                    self.published(
                        head.unwrap_or_else(|why| fail(&format!("{name}: {why}"))),
                        change.time_ns,
                    );
                }
            }
            None => {
                self.objects.remove(&name);
                self.deleted(&name, change.time_ns);
            }
        }
    }

    /// A head came above all others.
    fn published(&mut self, head: Head, time_ns: u64) {
        let state = self.read(&head.epoch);
        let none = (HeadNumber::FIRST, Generation::NONE, None, &Epoch::NONE, State::default());
        let (number, generation, owner, epoch, before) = self.log.last().map_or(none, |entry| {
            let head = &entry.head;
            (head.number.next(), head.generation, Some(head.owner), &head.epoch, entry.state)
        });
        let is_claim = head.generation > generation && head.epoch == *epoch;
        let is_same_process = head.generation == generation && Some(head.owner) == owner;
        let is_merge = is_same_process
            && Epoch { disks: Vec::new(), ..head.epoch.clone() }
                == Epoch { disks: Vec::new(), ..epoch.clone() };
        let is_next = is_same_process && head.epoch.number == epoch.number.next();
        let floor = self.log.last().map_or(HeadNumber::FIRST, |entry| entry.head.floor);
        if head.number != number || head.floor < floor || !(is_claim || is_merge || is_next) {
            fail(&format!("{head:?} follows {:?}", self.log.last()));
        }
        let expected = if is_next {
            self.cut.get(&(head.generation, head.owner, head.epoch.number)).copied()
        } else {
            Some(before)
        };
        if expected != Some(state) {
            fail(&format!("{head:?} reads {state:x?}, and was {expected:x?}"));
        }
        if let Some(last) = self.log.last_mut() {
            last.superseded_ns = Some(time_ns);
        }
        self.log.push(Entry { head, state, superseded_ns: None });
    }

    /// What an epoch reads, by the names in its layers.
    fn read(&self, epoch: &Epoch) -> State {
        let (mut state, mut below) = (State::default(), None);
        for object in epoch.objects() {
            let name = object.id.layer_name();
            let whole =
                |bytes: &&Vec<u8>| bytes.len() as u64 == object.bytes && blake3::hash(bytes) == object.blake3;
            let found = self.objects.get(name.as_str()).filter(whole).and_then(|bytes| Layer::decode(bytes));
            let Some(layer) = found else {
                fail(&format!("{name} of epoch {} is not there, or not whole, or not right", epoch.number))
            };
            if layer.below != below {
                fail(&format!("{name} stands on {:?}, not on {below:?}", layer.below));
            }
            // Of a layer of one chunk, the digest is that of the whole.
            let name = object.id.companion_name();
            if self.objects.get(name.as_str()).is_none_or(|list| list[..] != *object.blake3.as_bytes()) {
                fail(&format!("{name} of epoch {} is not there, or not right", epoch.number));
            }
            layer.apply(&mut state);
            below = Some(object.id);
        }
        state
    }

    fn deleted(&self, name: &str, time_ns: u64) {
        let keep_ns = KEEP.as_nanos() as u64;
        let is_kept = |entry: &&Entry| entry.superseded_ns.is_none_or(|then| then + keep_ns > time_ns);
        let number = HeadNumber::of(name);
        let layer = ObjectId::of(name);
        let names = |epoch: &Epoch| epoch.objects().any(|object| Some(object.id) == layer);
        if let Some(entry) = self
            .log
            .iter()
            .rev()
            .take_while(is_kept)
            .find(|entry| Some(entry.head.number) == number || names(&entry.head.epoch))
        {
            fail(&format!("{name} was deleted, and {:?} needs it", entry.head));
        }
        if let Some((pin, _)) = self.pins.iter().find(|(_, epoch)| names(epoch)) {
            fail(&format!("{name} was deleted, and pin {pin} needs it"));
        }
    }
}

/// The layers of the only disk.
fn chain_of(epoch: &Epoch) -> &[Object] {
    epoch.disks.first().map_or(&[], |disk| &disk.objects)
}

/// Why a process ends before its time.
enum End {
    Died,
    /// It was fenced, or may not claim the disk, or what it reads is gone.
    Refused,
}

type Asked<T> = std::result::Result<T, End>;

/// A process of a host.
struct Process {
    repository: Arc<dyn Repository>,
    owner: OwnerId,
    ledger: Arc<Ledger>,
    random: Random,
    /// How long it waits before it tries again, at most.
    patience_ns: u64,
}

impl Process {
    fn pause(&self) {
        thread::sleep(Duration::from_micros(self.random.below(8_000)));
    }

    /// Mostly short, as all hosts would be gone before anything is old else.
    fn pause_long(&self) {
        if self.random.one_in(3) {
            thread::sleep(Duration::from_nanos(self.random.below(PAUSE_NS_MAX / 2)));
        }
        self.pause();
    }

    /// Does it until it has an answer.
    fn ask<T>(&self, mut what: impl FnMut() -> Result<T>) -> Asked<T> {
        loop {
            if let Some(answer) = self.try_it(what())? {
                return Ok(answer);
            }
        }
    }

    /// The answer, if it is one.
    fn try_it<T>(&self, what: Result<T>) -> Asked<Option<T>> {
        match what {
            Ok(answer) => return Ok(Some(answer)),
            Err(Error::Fenced { .. } | Error::NoHead { .. } | Error::NotKept { .. }) => {
                return Err(End::Refused);
            }
            Err(Error::Corrupt { .. } | Error::OldListing { .. }) => {}
            Err(Error::Repository(error)) if error.kind() == DEAD => return Err(End::Died),
            Err(Error::Repository(error)) => match error.kind() {
                // No answer, or a part of an upload was lost.
                ErrorKind::TimedOut | ErrorKind::InvalidInput => {}
                // An old answer, to the first question or to the second.
                ErrorKind::NotFound | ErrorKind::AlreadyExists => {}
                // Another process has swept an unfinished object away.
                ErrorKind::StaleNetworkFileHandle => {}
                _ => fail(&format!("{error}: {}", error.source)),
            },
            Err(error) => fail(&error.to_string()),
        }
        thread::sleep(Duration::from_nanos(self.random.below(self.patience_ns)));
        Ok(None)
    }

    /// Publishes, merges, deletes.
    fn run(&self) -> Asked<()> {
        let mut publisher = loop {
            match self.claim(*self.random.pick(&[Claim::First, Claim::Resume, Claim::TakeOver])) {
                Err(End::Refused) if !self.random.one_in(4) => {}
                claimed => break claimed?,
            }
        };
        let claimed = publisher.head().clone();
        let mut state = self.read(chain_of(&claimed.epoch), || self.ledger.is_newest(&claimed))?;
        let mut merge: Option<Merge> = None;
        for _ in 0..self.random.below(STEPS_MAX + 1) {
            self.pause_long();
            let chain = chain_of(&publisher.head().epoch).to_vec();
            match self.random.below(6) {
                0 | 1 => {
                    self.ask(|| publisher.sweep())?;
                    self.ledger.enter(publisher.head());
                }
                2 | 3 if merge.is_some() || chain.len() > 1 => {
                    let from = self.random.below(chain.len() as u64) as usize;
                    let under_way = merge.take().unwrap_or_else(|| Merge::new(&chain, from));
                    merge = self.merge(&mut publisher, under_way, state)?;
                }
                _ => {
                    let written = 1 + self.random.below(2);
                    let blocks = (0..written).map(|_| self.random.below(BLOCKS as u64) as usize);
                    let stamps: BTreeMap<usize, u64> =
                        blocks.map(|block| (block, self.random.next())).collect();
                    let layer = Layer { below: chain.last().map(|object| object.id), stamps };
                    layer.apply(&mut state);
                    let mut epoch = publisher.head().epoch.clone();
                    epoch.number = epoch.number.next();
                    epoch.time_ns = TASKS.now_ns.get();
                    let shipped = self.ship(&layer)?;
                    match &mut epoch.disks[..] {
                        [disk] => disk.objects.push(shipped),
                        _ => {
                            let size = BLOCKS as u64;
                            epoch.disks =
                                vec![DiskState { name: "disk".to_owned(), size, objects: vec![shipped] }];
                        }
                    }
                    self.ledger.cut(publisher.head(), epoch.number, state);
                    while self.try_it(publisher.publish(epoch.clone()))?.is_none() {
                        if self.random.one_in(4) {
                            self.try_it(publisher.sweep())?;
                        }
                    }
                    self.ledger.enter(publisher.head());
                }
            }
        }
        Ok(())
    }

    fn claim(&self, claim: Claim) -> Asked<Publisher> {
        let publisher = self.ask(|| Publisher::claim(self.repository.clone(), self.owner, claim))?;
        self.ledger.enter(publisher.head());
        Ok(publisher)
    }

    /// A step of a merge; the merge, unless that was its end.
    fn merge(&self, publisher: &mut Publisher, mut merge: Merge, state: State) -> Asked<Option<Merge>> {
        let head = publisher.head().clone();
        let left = merge.left(chain_of(&head.epoch));
        if !left.is_empty() {
            let below = merge.below();
            let mut stamps = BTreeMap::new();
            if below.is_some() {
                for object in left {
                    stamps.extend(self.layer(object, || self.ledger.is_newest(&head))?.stamps);
                }
            } else {
                stamps.extend(state.into_iter().enumerate().filter(|(_, stamp)| *stamp != 0));
            }
            let result = self.ship(&Layer { below, stamps })?;
            merge.merged(left.len(), result);
            return Ok(Some(merge));
        }
        if self.random.one_in(4) {
            merge.results().iter().for_each(|result| publisher.discard(result.id));
        } else {
            let mut epoch = head.epoch.clone();
            epoch.disks[0].objects = merge.finish(chain_of(&head.epoch));
            self.ask(|| publisher.publish(epoch.clone()))?;
            self.ledger.enter(publisher.head());
        }
        Ok(None)
    }

    fn ship(&self, layer: &Layer) -> Asked<Object> {
        let bytes = layer.encode();
        self.ask(|| {
            ship(&*self.repository, 0, |shipment| bytes.chunks(PART).try_for_each(|part| shipment.put(part)))
        })
    }

    /// Reads a layer, as long as it must be there.
    fn layer(&self, object: &Object, must_be: impl Fn() -> bool) -> Asked<Layer> {
        let bytes = self.ask(|| {
            let read = || {
                let reader = self.repository.open(&object.id.layer_name())?;
                let mut bytes = vec![0; reader.len() as usize];
                reader.read_at(0, &mut bytes)?;
                Ok(bytes)
            };
            match read() {
                Err(Error::Repository(error)) if error.kind() == ErrorKind::NotFound && !must_be() => {
                    Ok(None)
                }
                read => read.map(Some),
            }
        })?;
        let bytes = bytes.ok_or(End::Refused)?;
        Ok(Layer::decode(&bytes).unwrap_or_else(|| fail("a layer that is none")))
    }

    fn read(&self, chain: &[Object], must_be: impl Fn() -> bool) -> Asked<State> {
        let mut state = State::default();
        for object in chain {
            self.layer(object, &must_be)?.apply(&mut state);
        }
        Ok(state)
    }

    /// Pins states, and reads them.
    fn visit(&self) -> Asked<()> {
        for _ in 0..self.random.below(STEPS_MAX / 2) {
            self.pause_long();
            let mut wanted = None;
            if self.random.one_in(2)
                && let Some(kept) = self.try_it(states(&*self.repository))?
                && !kept.is_empty()
            {
                wanted = Some(self.random.pick(&kept).epoch.number);
            }
            let visit = Purpose::Reader("a visit".to_owned());
            let mut pin = match self.try_it(Pin::make(&*self.repository, wanted, &visit)) {
                Err(End::Refused) | Ok(None) => continue,
                Ok(Some(pin)) => pin,
                Err(died) => return Err(died),
            };
            self.ledger.pinned(&pin);
            if self.random.one_in(2) {
                match self.try_it(pin.again(&*self.repository, &visit)) {
                    Err(End::Refused) | Ok(None) => {}
                    Ok(Some(second)) => {
                        self.ledger.pinned(&second);
                        let first = std::mem::replace(&mut pin, second);
                        self.ledger.released(&first);
                        self.ask(|| first.release(&*self.repository))?;
                    }
                    Err(died) => return Err(died),
                }
            }
            if self.random.one_in(2) {
                thread::sleep(Duration::from_nanos(self.random.below(PAUSE_NS_MAX)));
            }
            let state = self.read(chain_of(&pin.epoch), || true)?;
            if state != self.ledger.state(&pin.epoch) {
                fail(&format!("{pin:?} reads {state:x?}"));
            }
            self.ledger.released(&pin);
            self.ask(|| pin.release(&*self.repository))?;
        }
        Ok(())
    }

    /// Has the repository alone, and tidies it up.
    fn tidy(&self) -> Asked<()> {
        let mut publisher = self.claim(Claim::TakeOver)?;
        thread::sleep(2 * KEEP);
        self.ask(|| publisher.sweep())?;
        self.ledger.enter(publisher.head());
        self.ledger.check_swept();
        Ok(())
    }
}

/// How hosts reach the NAS.
#[derive(Clone)]
enum Reach {
    Network(Arc<Network<Message>>),
    Mount,
}

/// What a run's hosts have in common.
#[derive(Clone)]
struct Scene {
    reach: Reach,
    ledger: Arc<Ledger>,
    pauses_one_in: u64,
}

impl Scene {
    fn process(&self, host: Host, number: u32, calls: u64, owner: OwnerId, random: Random) -> Process {
        let (repository, patience_ns): (Arc<dyn Repository>, _) = match &self.reach {
            Reach::Network(network) => {
                let hosts = [host, NAS];
                let remote = RemoteRepository::new(network.clone(), hosts, number, calls, self.pauses_one_in);
                (Arc::new(remote), 8_000_000)
            }
            Reach::Mount => {
                let process = mount::Process { host, number };
                inside(|| mount::start(process, calls, self.pauses_one_in));
                let path = PathBuf::from(process.to_string());
                (Arc::new(DirectoryRepository::open(&path, is_object_name).expect("mounted")), PATIENCE_NS)
            }
        };
        Process { repository, owner, ledger: self.ledger.clone(), random, patience_ns }
    }

    /// Runs the processes of a host, one after the other.
    fn live(&self, host: Host, random: &Random) {
        let mut owner = OwnerId::draw();
        let is_reader = host.0 > 1 && random.one_in(2);
        // What a reader pins is deleted only if it pauses while it makes the pin.
        let pauses_one_in =
            if is_reader { self.pauses_one_in.min(READER_PAUSES_ONE_IN) } else { self.pauses_one_in };
        let scene = Self { pauses_one_in, ..self.clone() };
        for number in 0..1 + random.below(PROCESSES_MAX) as u32 {
            let calls = if random.one_in(2) { u64::from(u32::MAX) } else { 1 + random.below(CALLS_MAX) };
            let process = scene.process(host, number, calls, owner, Random::new(random.next()));
            match if is_reader { process.visit() } else { process.run() } {
                Ok(()) | Err(End::Died) => {}
                // Its copy of the disk is another one from now on.
                Err(End::Refused) => owner = OwnerId::draw(),
            }
            process.pause_long();
        }
    }

    /// Runs hosts 1 to `hosts`, and then one that has the NAS alone; never returns.
    fn run(&self, hosts: u32, random: &Random, calm: impl FnOnce()) -> ! {
        let threads = (1..=hosts).map(|host| {
            let (scene, random) = (self.clone(), Random::new(random.next()));
            thread::spawn(move || scene.live(Host(host), &random))
        });
        let threads: Vec<_> = threads.collect();
        threads.into_iter().for_each(|host| host.join().expect("no panic"));
        // By then the last late message has arrived.
        thread::sleep(Duration::from_nanos(2 * PAUSE_NS_MAX));
        calm();
        let (number, random) = (PROCESSES_MAX as u32, Random::new(random.next()));
        let last = self.process(Host(1), number, u64::from(u32::MAX), OwnerId::draw(), random);
        let _ = last.tidy();
        inside(|| drop(self.ledger.book()));
        self.ledger.judge_crashes();
        inside(|| TASKS.die())
    }
}

fn weather(random: &Random) -> Weather {
    Weather {
        lost_one_in: *random.pick(&[10, 30, 100]),
        late_one_in: *random.pick(&[20, 50, 200]),
        late_ns_max: *random.pick(&[400_000_000, PAUSE_NS_MAX]),
        partition_one_in: *random.pick(&[100, 400, 1000]),
    }
}

/// Runs hosts with a server of objects: never returns.
pub fn run_network(seed: u64, fault: Option<Fault>) -> ! {
    let random = Random::new(seed);
    let weather = weather(&random);
    let pauses_one_in = *random.pick(&[20, 50, u64::MAX]);
    let hosts = 2 + random.below(HOSTS_MAX - 1) as u32;
    let network = Arc::new(Network::new(1 + hosts, weather));
    let server = Arc::new(Server::new(network.clone(), NAS, fault));
    for _ in 0..SERVERS {
        let server = server.clone();
        thread::spawn(move || server.serve());
    }
    let ledger = Arc::new(Ledger::new(move |since| server.changes(since)));
    let scene = Scene { reach: Reach::Network(network.clone()), ledger, pauses_one_in };
    scene.run(hosts, &random, || network.calm())
}

/// Runs hosts that have mounted a directory: never returns.
pub fn run_mount(seed: u64, fault: Option<nas::Fault>) -> ! {
    let random = Random::new(seed);
    let way = Way {
        weather: weather(&random),
        is_soft: random.one_in(4),
        restarts_one_in: *random.pick(&[50, 500, u64::MAX]),
    };
    let pauses_one_in = *random.pick(&[30, 100, u64::MAX]);
    let hosts = 2 + random.below(HOSTS_MAX) as u32;
    let export = *random.pick(&[Export::Sync, Export::Flushed, Export::Async]);
    let ledger = Arc::new(Ledger::new(|since| mount::nas(|nas| nas.changes(since))));
    let judged = ledger.clone();
    let crashes = Crashes {
        one_in: CRASHES_ONE_IN,
        each: LOSSES,
        judge: Arc::new(move |left| judged.crash(left, export)),
    };
    inside(|| mount::begin(Nas::new(export, fault), way, hosts, crashes));
    let scene = Scene { reach: Reach::Mount, ledger, pauses_one_in };
    scene.run(hosts, &random, || inside(mount::calm))
}
