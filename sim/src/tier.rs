//! A run of several hosts that publish one disk in one repository, by the rules of `vmstrata-tier`: they claim it from each other,
//! and publish epochs, over a bad network, on a NAS that keeps wrong bytes now and then. Their processes die at any call,
//! and are started again.
//!
//! After each success and at the end, what is on the NAS is looked at. Invariants: the heads have all numbers from the first on,
//! and never change; each is a claim, with the epoch of the head before it and the next generation, or the next epoch of the same
//! process; each names objects that are there, whole and as they were shipped; what a process believes it published is there.

use std::collections::BTreeMap;
use std::io::ErrorKind;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use vmstrata_repo::Repository;
use vmstrata_tier::{
    Claim, Epoch, Error, Generation, Head, HeadNumber, Object, OwnerId, Publisher, Result, ship,
};

use crate::kernel::inside;
use crate::network::{Host, LATE_NS, Network, Weather};
use crate::random::Random;
use crate::repository::{DEAD, Fault, RemoteRepository, Server};
use crate::tasks::TASKS;

/// The host that is the NAS; the others publish.
const NAS: Host = Host(0);
/// Tasks of the NAS that answer requests.
const SERVERS: usize = 2;
/// Hosts that publish, processes of each, epochs of a process, and calls before one dies, at most.
const HOSTS_MAX: u64 = 3;
const PROCESSES_MAX: u64 = 4;
const EPOCHS_MAX: u64 = 4;
const CALLS_MAX: u64 = 80;
/// Bytes of a part of an upload, and parts of a layer, at most.
const PART: usize = 40;
const PARTS_MAX: u64 = 3;

fn fail(text: &str) -> ! {
    inside(|| TASKS.fail(text))
}

/// What all processes believe that they published, beside what is there.
struct Ledger {
    server: Arc<Server>,
    seen: Mutex<BTreeMap<HeadNumber, Head>>,
}

impl Ledger {
    /// A process believes that it published this head.
    fn enter(&self, head: &Head) {
        inside(|| {
            self.check();
            let seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
            if seen.get(&head.number) != Some(head) {
                fail(&format!("{head:?} was published, and there is {:?}", seen.get(&head.number)));
            }
        });
    }

    /// Looks at all that is there.
    fn check(&self) {
        let objects: BTreeMap<String, Vec<u8>> = self.server.objects().into_iter().collect();
        let mut seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
        let mut heads = BTreeMap::new();
        for (name, bytes) in &objects {
            let Some(number) = HeadNumber::of(name) else { continue };
            let head = Head::decode(number, bytes).unwrap_or_else(|why| fail(&format!("{name}: {why}")));
            heads.insert(number, head);
        }
        for (number, head) in &*seen {
            if heads.get(number) != Some(head) {
                fail(&format!("{number} was {head:?} and is {:?}", heads.get(number)));
            }
        }
        let (mut number, mut below) = (HeadNumber::FIRST, None);
        for (found, head) in &heads {
            if *found != number {
                fail(&format!("{found} is there, and not {number}"));
            }
            check_follows(below, head);
            head.epoch.objects.iter().for_each(|object| check_object(&objects, object));
            (number, below) = (found.next(), Some(head));
        }
        *seen = heads;
    }
}

fn check_follows(below: Option<&Head>, head: &Head) {
    let (generation, owner, epoch) = match below {
        None => (Generation::NONE, None, &Epoch::NONE),
        Some(below) => (below.generation, Some(below.owner), &below.epoch),
    };
    let is_claim = head.generation > generation && head.epoch == *epoch;
    let is_next = head.generation == generation
        && Some(head.owner) == owner
        && head.epoch.number == epoch.number.next()
        && head.epoch.objects.starts_with(&epoch.objects);
    if !is_claim && !is_next {
        fail(&format!("{head:?} follows {below:?}"));
    }
}

fn check_object(objects: &BTreeMap<String, Vec<u8>>, object: &Object) {
    let name = object.id.layer_name();
    let whole = |bytes: &Vec<u8>| bytes.len() as u64 == object.bytes && blake3::hash(bytes) == object.blake3;
    if !objects.get(name.as_str()).is_some_and(whole) {
        fail(&format!("a head names {name}, which is not there, or not whole, or not right"));
    }
}

/// Why a process ends before its time.
enum End {
    Died,
    /// It was fenced, or may not claim the disk.
    Refused,
}

/// A process of a host.
struct Process {
    repository: Arc<dyn Repository>,
    owner: OwnerId,
    ledger: Arc<Ledger>,
    random: Random,
}

impl Process {
    fn pause(&self) {
        thread::sleep(Duration::from_micros(self.random.below(8_000)));
    }

    /// Does it until it has an answer.
    fn ask<T>(&self, mut what: impl FnMut() -> Result<T>) -> std::result::Result<T, End> {
        loop {
            match what() {
                Ok(answer) => return Ok(answer),
                Err(Error::Fenced { .. } | Error::NoHead { .. }) => return Err(End::Refused),
                Err(Error::Corrupt { .. }) => {}
                Err(Error::Repository(error)) if error.kind() == DEAD => return Err(End::Died),
                Err(Error::Repository(error)) => match error.kind() {
                    // No answer, or a part of an upload was lost.
                    ErrorKind::TimedOut | ErrorKind::InvalidInput => {}
                    // An old answer, to the first question or to the second.
                    ErrorKind::NotFound | ErrorKind::AlreadyExists => {}
                    _ => fail(&format!("{error}: {}", error.source)),
                },
                Err(error) => fail(&error.to_string()),
            }
            self.pause();
        }
    }

    fn run(&self) -> std::result::Result<(), End> {
        let claim = *self.random.pick(&[Claim::First, Claim::Resume, Claim::TakeOver]);
        let claimed = self.ask(|| Publisher::claim(self.repository.clone(), self.owner, claim));
        let mut publisher = claimed?;
        self.ledger.enter(publisher.head());
        for _ in 0..self.random.below(EPOCHS_MAX + 1) {
            self.pause();
            let mut epoch = publisher.head().epoch.clone();
            epoch.number = epoch.number.next();
            epoch.time_ns = TASKS.now_ns.get();
            epoch.objects.push(self.ship()?);
            self.ask(|| publisher.publish(epoch.clone()))?;
            self.ledger.enter(publisher.head());
        }
        Ok(())
    }

    fn ship(&self) -> std::result::Result<Object, End> {
        let layer = self.random.next().to_le_bytes().repeat(PART / 8);
        let parts = 1 + self.random.below(PARTS_MAX);
        self.ask(|| ship(&*self.repository, 0, |shipment| (0..parts).try_for_each(|_| shipment.put(&layer))))
    }
}

/// Runs the processes of a host, one after the other.
fn live(
    host: Host,
    network: &Arc<Network<crate::repository::Message>>,
    ledger: &Arc<Ledger>,
    random: &Random,
) {
    let mut owner = OwnerId::draw();
    for number in 0..1 + random.below(PROCESSES_MAX) as u32 {
        let calls = if random.one_in(2) { u64::from(u32::MAX) } else { 1 + random.below(CALLS_MAX) };
        let repository = RemoteRepository::new(network.clone(), host, NAS, number, calls);
        let (repository, ledger) = (Arc::new(repository), ledger.clone());
        let process = Process { repository, owner, ledger, random: Random::new(random.next()) };
        match process.run() {
            Ok(()) | Err(End::Died) => {}
            // Its copy of the disk is another one from now on.
            Err(End::Refused) => owner = OwnerId::draw(),
        }
        process.pause();
    }
}

/// Runs the hosts: never returns.
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
    let ledger = Arc::new(Ledger { server, seen: Mutex::default() });
    let hosts = (1..=hosts).map(|host| {
        let (network, ledger, random) = (network.clone(), ledger.clone(), Random::new(random.next()));
        thread::spawn(move || live(Host(host), &network, &ledger, &random))
    });
    let hosts: Vec<_> = hosts.collect();
    hosts.into_iter().for_each(|host| host.join().expect("no panic"));
    // By then the last late message has arrived.
    thread::sleep(Duration::from_nanos(2 * LATE_NS.end));
    inside(|| ledger.check());
    inside(|| TASKS.die())
}
