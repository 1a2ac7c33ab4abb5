//! The ring against a plain driver, well-behaved and otherwise.

use std::fs::File;

use proptest::prelude::*;
use vmstrata_store::{Segment, copy_from_slice, copy_to_slice};

use super::super::inflight::InflightRegion;
use super::super::memory::{RegionInfo, tests::memfd};
use super::super::shared_file::SharedFile;
use super::*;

#[allow(unreachable_pub, reason = "shared with the tests of the whole export")]
#[path = "../../../tests/vhost_common/driver.rs"]
mod driver;
use driver::{Descriptor, Driver, GUEST_BASE, INDIRECT, NEXT, USER_BASE, WRITE, header};

const MEMORY_LEN: u64 = 1 << 20;
/// Where tests put what rings point to, as an offset.
const DATA: u64 = 0x8_0000;

struct Bench {
    driver: Driver,
    memory: Arc<GuestMemory>,
    event_idx: bool,
}

fn info(offset: u64, len: u64) -> RegionInfo {
    RegionInfo { guest: GUEST_BASE + offset, len, user: USER_BASE + offset, file_offset: offset }
}

impl Bench {
    fn new(size: u16, start: u16, event_idx: bool) -> Self {
        let file = memfd(MEMORY_LEN);
        let twin = file.try_clone().unwrap();
        // Two regions that touch, so that buffers can cross from one into the other.
        let split = DATA + 0x1000;
        let memory =
            GuestMemory::default().with_region(info(0, split), SharedFile::new(file).unwrap()).unwrap();
        let rest = info(split, MEMORY_LEN - split);
        let memory = memory.with_region(rest, SharedFile::new(twin.try_clone().unwrap()).unwrap()).unwrap();
        Self { driver: Driver::new(twin, size, 0, start), memory: Arc::new(memory), event_idx }
    }

    fn ring(&self, start: u16) -> Ring {
        self.ring_with(None, start)
    }

    fn ring_with(&self, inflight: Option<InflightQueue>, start: u16) -> Ring {
        let layout = RingLayout {
            size: self.driver.size,
            descriptors: USER_BASE + self.driver.descriptors(),
            available: USER_BASE + self.driver.available(),
            used: USER_BASE + self.driver.used(),
            event_idx: self.event_idx,
            indirect: true,
        };
        Ring::new(layout, Arc::clone(&self.memory), inflight, start).unwrap()
    }

    /// Offers a read of `len` bytes whose chain starts at `head`.
    fn offer_read(&mut self, head: u16, sector: u64, len: u32) {
        let at = DATA + u64::from(head) * 64;
        self.driver.write(at, &header(0, sector));
        let guest = GUEST_BASE + at;
        self.driver.set_chain(head, &[(guest, 16, 0), (guest + 0x4000, len, WRITE), (guest + 32, 1, WRITE)]);
        self.driver.offer(head);
    }
}

fn lens(segments: &[Segment<'_>]) -> Vec<usize> {
    segments.iter().map(Segment::len).collect()
}

/// What the ring says to one chain at head 0, made by `make`.
fn verdict(make: impl FnOnce(&mut Driver)) -> Result<Option<Chain>, RingError> {
    let mut bench = Bench::new(8, 0, true);
    make(&mut bench.driver);
    // A ring dropped with a request in flight keeps its memory mapped for good, which the caller relies on.
    bench.ring(0).next()
}

#[test]
fn a_request_comes_in_and_its_answer_goes_out() {
    let mut bench = Bench::new(8, 65535, true);
    bench.offer_read(3, 77, 512);
    bench.driver.set_used_event(65535);
    let mut ring = bench.ring(65535);
    let chain = ring.next().unwrap().unwrap();
    assert_eq!(chain.header, header(0, 77));
    assert_eq!((chain.head, chain.readable_len, chain.writable_len, chain.descriptors), (3, 0, 512, 3));
    assert_eq!((ring.in_flight(), ring.next_available()), (1, 0));
    copy_from_slice(&chain.writable, &[7; 512]);
    assert!(ring.next().unwrap().is_none());
    ring.answer(3, 0, 512);
    assert_eq!(bench.driver.next_used(), None, "not before publish");
    assert!(ring.publish());
    assert_eq!(bench.driver.next_used(), Some((3, 513)));
    assert_eq!(bench.driver.read(DATA + 3 * 64 + 0x4000, 512), [7; 512]);
    assert_eq!(bench.driver.read(DATA + 3 * 64 + 32, 1), [0]);
    assert_eq!(ring.in_flight(), 0);
}

#[test]
fn what_waits_is_counted_across_the_end_of_the_index() {
    let mut bench = Bench::new(16, 65534, true);
    for head in [0, 3] {
        bench.offer_read(head, 0, 512);
    }
    let mut ring = bench.ring(65534);
    assert_eq!(ring.waiting(), 2);
    assert!(ring.next().unwrap().is_some());
    bench.offer_read(6, 0, 512);
    assert_eq!(ring.waiting(), 2, "one is taken, another has come");
    while ring.next().unwrap().is_some() {}
    assert_eq!((ring.waiting(), ring.in_flight()), (0, 3));
    [0, 3, 6].into_iter().for_each(|head| ring.refuse(head, 1));
    assert_eq!(ring.waiting(), 0, "what is answered does not wait");
}

#[test]
fn any_layout_of_header_data_and_status_is_understood() {
    let guest = GUEST_BASE + DATA;
    // Header in two pieces, the second with data; data and status in one buffer; an empty buffer between.
    let chain = verdict(|driver| {
        driver.write(DATA, &header(1, 5));
        driver.write(DATA + 16, b"data to write");
        driver.set_chain(0, &[(guest, 4, 0), (guest + 4, 25, 0), (guest, 0, 0), (guest + 100, 33, WRITE)]);
        driver.offer(0);
    });
    let chain = chain.unwrap().unwrap();
    assert_eq!(chain.header, header(1, 5));
    let mut data = [0; 13];
    copy_to_slice(&chain.readable, &mut data);
    assert_eq!(&data, b"data to write");
    assert_eq!((chain.writable_len, lens(&chain.writable)), (32, vec![32]));
}

#[test]
fn buffers_may_cross_from_one_region_into_the_next() {
    let edge = GUEST_BASE + DATA + 0x1000;
    let chain = verdict(|driver| {
        let guest = GUEST_BASE + DATA;
        driver.set_chain(0, &[(guest, 16, 0), (edge - 100, 300, WRITE), (guest + 16, 1, WRITE)]);
        driver.offer(0);
    });
    let chain = chain.unwrap().unwrap();
    assert_eq!(chain.writable_len, 300);
    assert_eq!(chain.writable.iter().map(Segment::len).sum::<usize>(), 300);
}

#[test]
fn indirect_tables_are_followed_also_after_direct_descriptors() {
    let guest = GUEST_BASE + DATA;
    // The table is deliberately not aligned.
    let table = DATA + 0x203;
    let chain = verdict(|driver| {
        driver.write(DATA, &header(0, 9));
        driver.write_table(table, &[(guest + 0x800, 512, WRITE), (guest + 64, 1, WRITE)]);
        driver.set_chain(0, &[(guest, 16, 0), (GUEST_BASE + table, 32, INDIRECT)]);
        driver.offer(0);
    });
    let chain = chain.unwrap().unwrap();
    assert_eq!((chain.header, chain.writable_len, chain.descriptors), (header(0, 9), 512, 3));
}

#[test]
fn rings_and_chains_that_break_the_rules_are_refused() {
    let guest = GUEST_BASE + DATA;
    let table = GUEST_BASE + DATA + 0x200;
    let whole = [(guest, 16, 0), (guest + 64, 1, WRITE)];
    let chain = |buffers: &[(u64, u32, u16)]| {
        verdict(|driver| {
            driver.set_chain(0, buffers);
            driver.offer(0);
        })
        .err()
    };
    let table_of = |len: u32, entries: &[(u64, u32, u16)]| {
        verdict(|driver| {
            driver.write_table(table - GUEST_BASE, entries);
            driver.set_chain(0, &[(table, len, INDIRECT)]);
            driver.offer(0);
        })
        .err()
    };
    assert_eq!(chain(&whole), None);
    assert_eq!(table_of(32, &whole), None);
    let jump = verdict(|driver| driver.set_available_index(9)).err();
    assert_eq!(jump, Some(RingError::AvailableIndex { ahead: 9, size: 8 }));
    let outside = verdict(|driver| driver.offer(8)).err();
    assert_eq!(outside, Some(RingError::HeadOutside { head: 8, size: 8 }));
    let unmapped = GUEST_BASE + MEMORY_LEN - 8;
    assert_eq!(chain(&[(unmapped, 16, 0)]), Some(RingError::Unmapped { guest: unmapped + 8 }));
    assert_eq!(chain(&[(u64::MAX - 3, 16, 0)]), Some(RingError::Unmapped { guest: u64::MAX - 3 }));
    assert_eq!(chain(&[(guest, 16, WRITE), (guest, 16, 0)]), Some(RingError::Order));
    assert_eq!(chain(&[(guest, 15, 0), whole[1]]), Some(RingError::Truncated { readable: 15, writable: 1 }));
    assert_eq!(chain(&[(guest, 16, 0)]), Some(RingError::Truncated { readable: 16, writable: 0 }));
    assert_eq!(chain(&[(table, 32, INDIRECT | NEXT)]), Some(RingError::Indirect { len: 32 }));
    assert_eq!(table_of(0, &whole), Some(RingError::Indirect { len: 0 }));
    assert_eq!(table_of(33, &whole), Some(RingError::Indirect { len: 33 }));
    assert_eq!(table_of(16 * 1025, &whole), Some(RingError::Indirect { len: 16 * 1025 }));
    assert_eq!(table_of(16, &[(table, 16, INDIRECT)]), Some(RingError::Indirect { len: 16 }));
    assert_eq!(table_of(16, &whole), Some(RingError::DescriptorOutside { next: 1, len: 1 }));
}

#[test]
fn loops_end() {
    let guest = GUEST_BASE + DATA;
    let looped = |flags, next| {
        verdict(|driver| {
            driver.set_descriptor(0, Descriptor { guest, len: 1, flags: NEXT, next: 1 });
            driver.set_descriptor(1, Descriptor { guest, len: 1, flags, next });
            driver.offer(0);
        })
        .err()
    };
    assert_eq!(looped(NEXT, 0), Some(RingError::ChainTooLong { limit: 8 }));
    assert_eq!(looped(NEXT, 9), Some(RingError::DescriptorOutside { next: 9, len: 8 }));
    // An indirect descriptor whose table is the ring's own, where it finds itself.
    let own = verdict(|driver| {
        let guest = GUEST_BASE + driver.descriptors();
        driver.set_descriptor(0, Descriptor { guest, len: 16, flags: INDIRECT, next: 0 });
        driver.offer(0);
    });
    assert_eq!(own.err(), Some(RingError::Indirect { len: 16 }));
}

#[test]
fn a_head_in_flight_cannot_be_offered_again() {
    let mut bench = Bench::new(8, 0, false);
    bench.offer_read(0, 0, 512);
    bench.offer_read(0, 0, 512);
    let mut ring = bench.ring(0);
    assert!(ring.next().unwrap().is_some());
    assert_eq!(ring.next().err(), Some(RingError::HeadBusy { head: 0 }));
    ring.answer(0, 0, 512);
    ring.publish();
}

#[test]
fn without_event_idx_flags_say_who_wants_to_hear() {
    let mut bench = Bench::new(8, 0, false);
    let mut ring = bench.ring(0);
    let mut answer_one = |bench: &mut Bench, interrupts: bool| {
        bench.driver.write(bench.driver.available(), &u16::from(!interrupts).to_le_bytes());
        bench.offer_read(0, 0, 512);
        let head = ring.next().unwrap().unwrap().head;
        ring.answer(head, 0, 0);
        ring.publish()
    };
    assert!(answer_one(&mut bench, false), "the first answer is always told");
    assert!(!answer_one(&mut bench, false));
    assert!(answer_one(&mut bench, true));
    let mut ring = bench.ring(3);
    ring.disable_kicks();
    assert_eq!(bench.driver.used_flags(), NO_NOTIFY);
    assert!(!ring.enable_kicks());
    assert_eq!(bench.driver.used_flags(), 0);
    bench.offer_read(0, 0, 512);
    assert!(ring.enable_kicks(), "made available before the flag was seen");
}

#[test]
fn with_event_idx_kicks_are_asked_for_at_the_next_entry() {
    let mut bench = Bench::new(8, 65534, true);
    let mut ring = bench.ring(65534);
    assert!(!ring.enable_kicks());
    assert_eq!(bench.driver.available_event(), 65534);
    bench.offer_read(0, 0, 512);
    let head = ring.next().unwrap().unwrap().head;
    assert!(!ring.enable_kicks());
    assert_eq!(bench.driver.available_event(), 65535);
    ring.answer(head, 0, 0);
    ring.publish();
}

/// What a driver and a device do next.
#[derive(Clone, Debug)]
enum Step {
    Offer,
    Take,
    /// Answers the request at this position of those in flight.
    Answer(prop::sample::Index),
    Publish,
    /// The device is killed and another one takes over.
    Restart,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        4 => Just(Step::Offer),
        4 => Just(Step::Take),
        4 => any::<prop::sample::Index>().prop_map(Step::Answer),
        3 => Just(Step::Publish),
        1 => Just(Step::Restart),
    ];
    prop::collection::vec(step, 1..300)
}

/// The plain model: who has which request.
struct Model {
    bench: Bench,
    ring: Ring,
    region: File,
    size: u16,
    free: Vec<u16>,
    offered: VecDeque<u16>,
    /// Taken by a device that was killed, not yet by its successor.
    orphaned: VecDeque<u16>,
    taken: Vec<u16>,
    answered: Vec<u16>,
    published: Vec<u16>,
    used_event: u16,
}

impl Model {
    fn new(size: u16, start: u16, event_idx: bool) -> Self {
        let bench = Bench::new(size, start, event_idx);
        let region = InflightRegion::create_file(1, size).unwrap();
        let ring = bench.ring_with(Some(Self::inflight(&region, size)), start);
        let free = (0..size / 3).rev().map(|slot| slot * 3).collect();
        let (offered, orphaned, taken, answered, published) = Default::default();
        let used_event = start;
        Self { bench, ring, region, size, free, offered, orphaned, taken, answered, published, used_event }
    }

    fn inflight(file: &File, size: u16) -> InflightQueue {
        let range = (0, InflightRegion::size(1, size));
        let region = InflightRegion::attach(file.try_clone().unwrap(), range, 1, size, size).unwrap();
        InflightQueue::new(Arc::new(region), 0, size).unwrap()
    }

    fn step(&mut self, step: Step) {
        match step {
            Step::Offer => {
                if let Some(head) = self.free.pop() {
                    self.bench.offer_read(head, head.into(), 512);
                    self.offered.push_back(head);
                }
            }
            Step::Take => {
                let expected = self.orphaned.pop_front().or_else(|| self.offered.pop_front());
                let head = self.ring.next().unwrap().map(|chain| {
                    assert_eq!(chain.header, header(0, chain.head.into()));
                    chain.head
                });
                assert_eq!(head, expected);
                self.taken.extend(head);
            }
            Step::Answer(index) if !self.taken.is_empty() => {
                let head = self.taken.remove(index.index(self.taken.len()));
                self.ring.answer(head, 0, u32::from(head));
                self.answered.push(head);
            }
            Step::Answer(_) => {}
            Step::Publish => self.publish(),
            Step::Restart => self.restart(),
        }
        assert_eq!(usize::from(self.ring.in_flight()), self.taken.len());
    }

    /// The driver sees exactly what was answered, in that order, and is called if it asked to be.
    fn publish(&mut self) {
        let before = self.bench.driver.used_index();
        let owed = self.ring.call_owed;
        let called = self.ring.publish();
        let passed = self.answered.iter().enumerate();
        let passed = passed.map(|(step, _)| before.wrapping_add(step as u16)).any(|at| at == self.used_event);
        if !self.answered.is_empty() && self.bench.event_idx {
            assert_eq!(called, passed || owed);
        }
        for head in self.answered.drain(..) {
            assert_eq!(self.bench.driver.next_used(), Some((head, u32::from(head) + 1)));
            self.published.push(head);
        }
        assert_eq!(self.bench.driver.next_used(), None);
        self.free.append(&mut self.published);
        // The driver asks to hear of an answer some way ahead.
        self.used_event = self.bench.driver.used_index().wrapping_add(self.free.len() as u16 % 4);
        self.bench.driver.set_used_event(self.used_event);
    }

    /// What was answered but not published is forgotten, and comes again with what was taken.
    fn restart(&mut self) {
        self.ring.in_flight = 0;
        let mut expected = std::mem::take(&mut self.taken);
        expected.append(&mut self.answered);
        expected.extend(self.orphaned.drain(..));
        let inflight = Self::inflight(&self.region, self.size);
        // The base a frontend gives after a crash is not to be relied on.
        self.ring = self.bench.ring_with(Some(inflight), 12345);
        self.orphaned = self.ring.unanswered.clone();
        let mut found: Vec<u16> = self.orphaned.iter().copied().collect();
        found.sort_unstable();
        expected.sort_unstable();
        assert_eq!(found, expected);
    }
}

impl Drop for Model {
    fn drop(&mut self) {
        self.ring.in_flight = 0;
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn requests_are_neither_lost_nor_doubled(
        steps in steps(),
        start in prop_oneof![Just(0u16), Just(65530), any::<u16>()],
        event_idx in any::<bool>(),
        size in prop_oneof![Just(8u16), Just(32)],
    ) {
        let mut model = Model::new(size, start, event_idx);
        steps.into_iter().for_each(|step| model.step(step));
    }

    /// Whatever is in guest memory, taking requests ends, in time and without harm.
    #[test]
    fn garbage_is_refused_or_bounded(
        seed in prop::collection::vec(any::<u8>(), 512),
        addresses in prop::collection::vec((0..MEMORY_LEN + 64, any::<u16>(), 0u16..12), 8),
        ahead in 0u16..10,
    ) {
        let bench = Bench::new(8, 0, true);
        bench.driver.write(DATA, &seed);
        bench.driver.write(bench.driver.available() + 4, &seed[..16]);
        for (index, &(offset, len, flags)) in addresses.iter().enumerate() {
            let (guest, next) = (GUEST_BASE + offset, len % 9);
            let flags = if flags < 8 { flags } else { NEXT };
            bench.driver.set_descriptor(index as u16, Descriptor { guest, len: len.into(), flags, next });
        }
        // Heads that exist, so that chains are walked.
        (0..8u64).for_each(|slot| bench.driver.write(bench.driver.available() + 4 + 2 * slot, &[slot as u8, 0]));
        bench.driver.set_available_index(ahead);
        let mut ring = bench.ring(0);
        let mut taken = 0;
        while let Ok(Some(chain)) = ring.next() {
            prop_assert!(chain.writable_len < 1 << 26);
            ring.answer(chain.head, 2, 0);
            taken += 1;
        }
        ring.publish();
        prop_assert!(taken <= 8);
    }
}
