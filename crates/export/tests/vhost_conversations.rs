//! Random conversations: well-formed messages in any order with any fields, over memory full of noise.
//!
//! `VMSTRATA_SEED=N` replays one.

use std::fs::File;
use std::io::Read;
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::time::Duration;

use crate::vhost_common::driver::{Driver, GUEST_BASE, USER_BASE};
use crate::vhost_common::frontend::{Connection, Guest, MEMORY_LEN, event, offer};
use crate::vhost_common::{Served, options};
use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};
use vmm_sys_util::eventfd::EventFd;
use vmm_sys_util::sock_ctrl_msg::ScmSocket;

const CONVERSATIONS: u64 = 150;
const MESSAGES: usize = 60;
const SIZE: u16 = 16;
/// Every protocol feature that is offered: without them most messages are refused.
const PROTOCOL_FEATURES: u64 = 1 | 1 << 1 | 1 << 3 | 1 << 9 | 1 << 12 | 1 << 13 | 1 << 15;

struct Talker {
    rng: SmallRng,
    socket: UnixStream,
    guest: Guest,
    driver: Driver,
    events: [EventFd; 2],
}

impl Talker {
    fn say(&self, request: u32, body: &[u8], fds: &[RawFd]) -> bool {
        let header = [request, 1, body.len() as u32].map(u32::to_ne_bytes).concat();
        self.socket.send_with_fds(&[&header, body], fds).is_ok_and(|sent| sent == 12 + body.len())
    }

    /// A number that is often right.
    fn usually(&mut self, right: u64) -> u64 {
        match self.rng.random_range(0..60) {
            0 => self.rng.random(),
            1 => right.wrapping_add(self.rng.random_range(0..5)),
            2 => 0,
            _ => right,
        }
    }

    fn index(&mut self) -> u32 {
        self.usually(0) as u32 % 4
    }

    fn pair(&mut self, value: u64) -> Vec<u8> {
        let (index, value) = (self.index(), self.usually(value) as u32);
        [index.to_ne_bytes(), value.to_ne_bytes()].concat()
    }

    fn longs(&mut self, values: &[u64]) -> Vec<u8> {
        values.iter().flat_map(|&value| self.usually(value).to_ne_bytes()).collect()
    }

    fn region(&mut self) -> Vec<u8> {
        self.longs(&[GUEST_BASE, MEMORY_LEN, USER_BASE, 0])
    }

    /// One message, with what usually belongs to it; whether it could be sent.
    fn message(&mut self) -> bool {
        let memory = self.guest.memory.as_raw_fd();
        let event = self.events[self.rng.random_range(0..2)].as_raw_fd();
        match self.rng.random_range(0..16) {
            0 => self.say(1, &[], &[]),
            1 => {
                let features = self.longs(&[1 << 30 | 1 << 32 | 1 << 29 | 1 << 28 | 1 << 9]);
                self.say(2, &features, &[])
            }
            2 | 3 => {
                let table = [1u32.to_ne_bytes().to_vec(), vec![0; 4], self.region()].concat();
                self.say(5, &table, &[memory])
            }
            4 => {
                let size = self.pair(SIZE.into());
                self.say(8, &size, &[])
            }
            5 | 6 => {
                let (descriptors, used, available) =
                    (self.driver.descriptors(), self.driver.used(), self.driver.available());
                let flags = (u64::from(self.rng.random::<bool>())) << 32 | u64::from(self.index());
                let parts = [descriptors, used, available].map(|at| USER_BASE + at);
                let log = GUEST_BASE + used;
                let body =
                    [flags.to_ne_bytes().to_vec(), self.longs(&[parts[0], parts[1], parts[2], log])].concat();
                self.say(9, &body, &[])
            }
            7 => {
                let base = self.pair(0);
                self.say(10, &base, &[])
            }
            8 => {
                let which = self.pair(0);
                self.say(11, &which, &[])
            }
            9 | 10 => {
                let index = u64::from(self.index());
                let request = [12, 12, 13, 14][self.rng.random_range(0..4)];
                self.say(request, &index.to_ne_bytes(), &[event])
            }
            11 => {
                let enable = self.pair(1);
                self.say(18, &enable, &[])
            }
            12 => {
                let size = u64::from(SIZE) << 16 | 1;
                let inflight = self.longs(&[4096, 0, size]);
                self.say(32, &inflight, &[memory])
            }
            13 => {
                let (request, region) = ([37, 38][self.rng.random_range(0..2)], self.region());
                let fds = [memory];
                self.say(request, &[vec![0; 8], region].concat(), if request == 37 { &fds } else { &[] })
            }
            14 => {
                let log = self.longs(&[1 << 16, 0]);
                self.say(6, &log, &[memory])
            }
            _ => self.scribble(),
        }
    }

    /// Noise in guest memory, or requests, and a kick.
    fn scribble(&mut self) -> bool {
        let memory: &File = &self.guest.memory;
        if self.rng.random_range(0..6) == 0 {
            let at = self.rng.random_range(0..2048);
            let noise: Vec<u8> = (0..64).map(|_| self.rng.random()).collect();
            memory.write_all_at(&noise, at).unwrap();
        } else {
            let kind = [0, 1, 4, 8, 11, 13, 99][self.rng.random_range(0..7)];
            offer(&mut self.driver, self.rng.random_range(0..5), kind, self.rng.random_range(0..4096), 4096);
        }
        self.events.iter().for_each(|event| event.write(1).unwrap());
        true
    }
}

/// Half of the conversations begin with a queue that runs, the others with nothing but the features.
fn converse(served: &Served, seed: u64) {
    let mut guest = Guest::new(SIZE);
    let rng = SmallRng::seed_from_u64(seed);
    let mut talker = if seed.is_multiple_of(2) {
        let Connection { driver, kick, call, socket, .. } = guest.connect(&served.socket());
        Talker { rng, socket, guest, driver, events: [kick, call] }
    } else {
        let driver = Driver::new(guest.memory.try_clone().unwrap(), SIZE, 0, 0);
        let socket = UnixStream::connect(served.socket()).unwrap();
        Talker { rng, socket, guest, driver, events: [event(), event()] }
    };
    if seed % 2 == 1 {
        talker.say(1, &[], &[]);
        talker.say(16, &PROTOCOL_FEATURES.to_ne_bytes(), &[]);
        talker.say(2, &(1u64 << 30 | 1 << 32).to_ne_bytes(), &[]);
    }
    for _ in 0..MESSAGES {
        if !talker.message() {
            break;
        }
    }
    // Read replies until the server has nothing more to say, so that all messages were handled.
    talker.socket.set_read_timeout(Some(Duration::from_millis(2))).unwrap();
    while talker.socket.read(&mut [0; 4096]).is_ok_and(|len| len > 0) {}
}

#[test]
fn no_conversation_harms_the_server() {
    let served = Served::qcow2(1 << 20, options(2, 1));
    let replay = std::env::var("VMSTRATA_SEED").ok().map(|seed| seed.parse::<u64>().unwrap());
    let seeds = replay.map_or(0..CONVERSATIONS, |seed| seed..seed + 1);
    for seed in seeds {
        converse(&served, seed);
    }
    let mut guest = Guest::new(64);
    let mut connection = guest.connect(&served.socket());
    let data = [0x5a; 512];
    connection.driver.write(Connection::data_at(0), &data);
    assert_eq!(connection.write(0, &data), 0);
    assert_eq!(connection.read(0, 512), data);
    let stats = served.server().stats();
    assert!(stats.requests > 100, "too few conversations got as far as a request: {stats:?}");
}
