//! A network in virtual time between hosts, each a group of tasks of the one process.
//!
//! ```text
//!   send ──► lost? partitioned? ──► in flight until its time ──► partitioned? ──► receive
//! ```
//!
//! A message arrives whole and once, or not at all. Messages overtake each other, and the sender learns nothing of their fate. The
//! seed draws delays, losses and partitions; all are events.

use std::fmt::Debug;
use std::ops::Range;
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::kernel::inside;
use crate::shared::Kind;
use crate::tasks::{On, TASKS};

/// A host, by its number; the first is 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Host(pub u32);

/// How bad a network is: one message in so many meets it.
#[derive(Clone, Copy, Debug)]
pub struct Weather {
    pub lost_one_in: u64,
    /// Takes up to `late_ns_max`.
    pub late_one_in: u64,
    /// Longer than senders wait.
    pub late_ns_max: u64,
    /// Finds two hosts, any two, partitioned from now on, for [`PARTITION_NS`].
    pub partition_one_in: u64,
}

const DELAY_NS: Range<u64> = 50_000..2_000_000;
const LATE_NS_MIN: u64 = 20_000_000;
const PARTITION_NS: Range<u64> = 1_000_000..300_000_000;

/// A message that has not arrived.
#[derive(Debug)]
struct Flight<M> {
    number: u64,
    from: Host,
    to: Host,
    arrives_ns: u64,
    message: M,
}

/// Two hosts that cannot reach each other, the lower number first.
#[derive(Debug)]
struct Partition {
    hosts: [Host; 2],
    until_ns: u64,
}

#[derive(Debug)]
struct State<M> {
    weather: Weather,
    sent: u64,
    flights: Vec<Flight<M>>,
    partitions: Vec<Partition>,
}

/// See the module documentation.
#[derive(Debug)]
pub struct Network<M> {
    hosts: u32,
    /// Locked by the running task between two hand-overs: nobody ever waits for it.
    state: Mutex<State<M>>,
}

impl Weather {
    /// In which messages are neither lost nor late.
    pub const CALM: Self = Self {
        lost_one_in: u64::MAX,
        late_one_in: u64::MAX,
        late_ns_max: u64::MAX,
        partition_one_in: u64::MAX,
    };
}

impl<M: Debug> Network<M> {
    /// Between `hosts` hosts, two at least.
    pub fn new(hosts: u32, weather: Weather) -> Self {
        assert!(hosts >= 2);
        let state = State { weather, sent: 0, flights: Vec::new(), partitions: Vec::new() };
        Self { hosts, state: Mutex::new(state) }
    }

    fn state(&self) -> MutexGuard<'_, State<M>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Ends the bad weather for good.
    pub fn calm(&self) {
        let mut state = self.state();
        state.weather = Weather::CALM;
        state.partitions.clear();
    }

    /// Sends a message, which may not arrive.
    pub fn send(&self, from: Host, to: Host, message: M) {
        assert!(from != to && from.0.max(to.0) < self.hosts);
        inside(|| {
            let mut state = self.state();
            state.sent += 1;
            let number = state.sent;
            let text = format!("{message:?}");
            TASKS.note(Kind::Sent, [number, from.0.into(), to.0.into(), 0], 0, &[text.as_bytes()]);
            if TASKS.random.one_in(state.weather.partition_one_in) {
                state.part(self.hosts);
            }
            if TASKS.random.one_in(state.weather.lost_one_in) || state.are_parted(from, to) {
                TASKS.note(Kind::Lost, [number, from.0.into(), to.0.into(), 0], 0, &[]);
            } else {
                let is_late = TASKS.random.one_in(state.weather.late_one_in);
                let delay_ns = if is_late { LATE_NS_MIN..state.weather.late_ns_max } else { DELAY_NS };
                let arrives_ns = TASKS.now_ns.get() + within(delay_ns);
                state.flights.push(Flight { number, from, to, arrives_ns, message });
            }
            drop(state);
            TASKS.wake(On::Message(to), usize::MAX);
            TASKS.pass();
        });
    }

    /// Waits for a message to `host`, until a moment; returns it and its sender.
    pub fn receive(&self, host: Host, until_ns: Option<u64>) -> Option<(Host, M)> {
        inside(|| {
            loop {
                let mut state = self.state();
                let next = state.next(host);
                if let Some(place) =
                    next.filter(|&place| state.flights[place].arrives_ns <= TASKS.now_ns.get())
                {
                    let Flight { number, from, message, .. } = state.flights.swap_remove(place);
                    let is_lost = state.are_parted(from, host);
                    let kind = if is_lost { Kind::Lost } else { Kind::Received };
                    TASKS.note(kind, [number, from.0.into(), host.0.into(), 0], 0, &[]);
                    if is_lost {
                        continue;
                    }
                    return Some((from, message));
                }
                if until_ns.is_some_and(|until| until <= TASKS.now_ns.get()) {
                    return None;
                }
                let arrives_ns = next.map(|place| state.flights[place].arrives_ns);
                drop(state);
                TASKS.wait(On::Message(host), arrives_ns.into_iter().chain(until_ns).min());
            }
        })
    }
}

impl<M> State<M> {
    /// Parts two hosts for a while.
    fn part(&mut self, hosts: u32) {
        let first = TASKS.random.below(hosts.into()) as u32;
        let second = (first + 1 + TASKS.random.below(u64::from(hosts) - 1) as u32) % hosts;
        let until_ns = TASKS.now_ns.get() + within(PARTITION_NS);
        let (low, high) = (first.min(second), first.max(second));
        TASKS.note(Kind::Partition, [low.into(), high.into(), until_ns, 0], 0, &[]);
        self.partitions.push(Partition { hosts: [Host(low), Host(high)], until_ns });
    }

    fn are_parted(&mut self, one: Host, other: Host) -> bool {
        self.partitions.retain(|partition| partition.until_ns > TASKS.now_ns.get());
        self.partitions.iter().any(|partition| partition.hosts == [one.min(other), one.max(other)])
    }

    /// The place of the message that arrives first.
    fn next(&self, host: Host) -> Option<usize> {
        let to_host = self.flights.iter().enumerate().filter(|(_, flight)| flight.to == host);
        to_host.min_by_key(|(_, flight)| (flight.arrives_ns, flight.number)).map(|(place, _)| place)
    }
}

fn within(range: Range<u64>) -> u64 {
    range.start + TASKS.random.below(range.end - range.start)
}
