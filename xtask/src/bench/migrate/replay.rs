//! Guests replay their traces on one disk while their images are read by moves: in virtual time, request by request.

use std::collections::VecDeque;
use std::time::Duration;

use vmstrata_migrate::follow::{
    Allowed, BlockCache, Control, Flight, Kind, Next, Order, Ratio, Reads, Scheduler, Turns,
};
use vmstrata_types::{GuestOffset, GuestRange};

use super::disk::{CAPACITY, Disk};
use super::trace::Trace;

/// What memory keeps for a guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Cached {
    Nothing,
    /// What the guest reads and writes: a plain cache.
    Guest,
    /// What the move reads as well.
    All,
}

/// How images are moved.
#[derive(Clone, Copy, Debug)]
pub(super) struct How {
    pub(super) order: Order,
    pub(super) chunk: u64,
    /// Bytes that are read while no guest waits.
    pub(super) idle: u64,
    pub(super) ratio: Ratio,
    pub(super) cached: Cached,
    /// Bytes of each guest's cache.
    pub(super) cache: usize,
    /// What the guest reads or writes is sent, and not read again.
    pub(super) takes_guests: bool,
    /// The factor of the latency controller.
    pub(super) factor: Option<f64>,
    /// Bytes of a move until it is another one's turn; with 0, after each chunk.
    pub(super) quantum: u64,
    pub(super) at_once: bool,
}

impl How {
    /// As QEMU does: from the beginning to the end.
    pub(super) const STANDARD: Self = Self {
        order: Order::Sequential,
        chunk: 1 << 20,
        idle: 1 << 20,
        ratio: Ratio::new(2),
        cached: Cached::Nothing,
        cache: 256 << 20,
        takes_guests: false,
        factor: None,
        quantum: 0,
        at_once: true,
    };
    /// IOFollow, in the paper's setting.
    pub(super) const FOLLOW: Self = Self {
        order: Order::Nearest,
        cached: Cached::All,
        takes_guests: true,
        quantum: 64 << 20,
        ..Self::STANDARD
    };
}

/// What became of one run.
#[derive(Debug, Default)]
pub(super) struct Outcome {
    /// Response times in seconds, by guest and number of its request.
    pub(super) responses: Vec<Vec<f64>>,
    /// Bytes that moves read, and those that they had from guests.
    pub(super) read: u64,
    pub(super) from_guests: u64,
    /// Requests of guests that memory answered.
    pub(super) hits: usize,
    /// Bytes of each move when the first one was over.
    pub(super) shares: Vec<u64>,
    pub(super) time: Duration,
    /// Of it, what the disk worked.
    pub(super) busy: Duration,
}

struct Request {
    vm: usize,
    number: usize,
    came: Duration,
    range: GuestRange,
    kind: Kind,
    flight: Option<Flight>,
}

struct Vm {
    /// Where its image begins on the disk.
    base: u64,
    first: usize,
    came: usize,
    cache: Option<BlockCache>,
    scheduler: Scheduler,
    control: Option<Control>,
    moved: u64,
    is_over: bool,
}

enum Work {
    Guest(Request),
    Chunk { vm: usize, next: Next, flight: Option<Flight>, began: Duration },
}

struct Replay<'a> {
    trace: &'a Trace,
    how: Option<How>,
    vms: Vec<Vm>,
    turns: Turns,
    waiting: VecDeque<Request>,
    /// Of each guest.
    requests_max: usize,
    disk: Disk,
    now: Duration,
    out: Outcome,
}

/// Guests without a move, until each has made so many requests.
pub(super) fn without(trace: &Trace, guests: usize, requests: usize) -> Outcome {
    let mut replay = Replay::new(trace, guests, None);
    replay.requests_max = requests;
    while replay.vms.iter().any(|vm| vm.came < requests) || !replay.waiting.is_empty() {
        replay.step();
    }
    replay.out.time = replay.now;
    replay.out
}

/// Guests whose images are moved, until that is over.
pub(super) fn moving(trace: &Trace, guests: usize, how: How) -> Outcome {
    let mut replay = Replay::new(trace, guests, Some(how));
    while replay.vms.iter().any(|vm| !vm.is_over) {
        replay.step();
    }
    replay.out.time = replay.now;
    replay.out
}

impl<'a> Replay<'a> {
    fn new(trace: &'a Trace, guests: usize, how: Option<How>) -> Self {
        let of = how.unwrap_or(How::STANDARD);
        let image = GuestRange::new(GuestOffset::ZERO, trace.image);
        let vm = |number: usize| Vm {
            // Images lie in equal parts of the disk, and their guests are at different parts of the trace.
            base: CAPACITY / guests as u64 * number as u64 / 4096 * 4096,
            first: trace.requests.len() / guests * number,
            came: 0,
            cache: (of.cached != Cached::Nothing).then(|| BlockCache::new(of.cache)),
            scheduler: Scheduler::new(of.order, of.chunk, [image]),
            control: of.factor.map(|factor| Control::new(factor, of.chunk, Duration::ZERO)),
            moved: 0,
            is_over: false,
        };
        let turns =
            Turns::new(of.ratio, Reads { chunk: of.chunk, idle: of.idle }, of.quantum, &vec![1.0; guests]);
        Self {
            trace,
            how,
            vms: (0..guests).map(vm).collect(),
            turns,
            waiting: VecDeque::new(),
            requests_max: usize::MAX,
            disk: Disk::default(),
            now: Duration::ZERO,
            out: Outcome { responses: vec![Vec::new(); guests], ..Outcome::default() },
        }
    }

    fn next_arrival(&self) -> (Duration, usize) {
        let at = |(number, vm): (usize, &Vm)| {
            let is_done = vm.came == self.requests_max;
            (if is_done { Duration::MAX } else { self.trace.request(vm.first, vm.came).0 }, number)
        };
        self.vms.iter().enumerate().map(at).min().expect("there is a guest")
    }

    /// Has the disk do one thing, or time pass until there is one.
    fn step(&mut self) {
        self.come();
        let (chunk, not_before) = self.next_chunk();
        let work = chunk.or_else(|| self.waiting.pop_front().map(Work::Guest));
        let Some(work) = work else {
            self.now = self.next_arrival().0.min(not_before);
            return;
        };
        let (vm, at, len) = match &work {
            Work::Guest(request) => {
                // From the first byte that memory lacks to the last one.
                let missing = self.missing(request.vm, request.range);
                (request.vm, missing.start, missing.len)
            }
            Work::Chunk { vm, next, .. } => (*vm, next.range.start, next.range.len),
        };
        let began = self.now;
        self.now = self.disk.serve(began, self.vms[vm].base + at.get(), len);
        self.out.busy += self.now - began;
        // Who came meanwhile waits, and sees what it was that the disk did.
        self.come();
        match work {
            Work::Guest(request) => self.end_guest(request, true),
            Work::Chunk { vm, next, flight, began } => self.end_chunk(vm, next, flight, began),
        }
    }

    /// Requests come, and are answered from memory or wait.
    fn come(&mut self) {
        loop {
            let (at, vm) = self.next_arrival();
            if at > self.now {
                return;
            }
            let number = self.vms[vm].came;
            let request = self.trace.request(self.vms[vm].first, number).1;
            self.vms[vm].came += 1;
            self.out.responses[vm].push(0.0);
            let cache = self.vms[vm].cache.as_mut();
            let flight = cache.map(|cache| cache.begin(request.kind, request.range));
            let request = Request { vm, number, came: at, range: request.range, kind: request.kind, flight };
            if self.is_in_memory(&request) {
                // It came while the disk did something else.
                let now = std::mem::replace(&mut self.now, at);
                self.end_guest(request, false);
                self.now = now;
            } else {
                self.waiting.push_back(request);
            }
        }
    }

    fn missing(&mut self, vm: usize, range: GuestRange) -> GuestRange {
        let (mut start, mut end) = (range.start, range.end());
        let pieces = self.vms[vm].cache.as_mut().map_or_else(Vec::new, |cache| cache.read(range));
        for piece in &pieces {
            if piece.range.start == start {
                start = piece.range.end();
            }
        }
        for piece in pieces.iter().rev() {
            if piece.range.end() == end && piece.range.start > start {
                end = piece.range.start;
            }
        }
        GuestRange::new(start, end.get().saturating_sub(start.get()))
    }

    fn is_in_memory(&mut self, request: &Request) -> bool {
        request.kind == Kind::Read && self.missing(request.vm, request.range).len == 0
    }

    fn end_guest(&mut self, request: Request, is_at_device: bool) {
        let Request { vm: number, range, kind, came, .. } = request;
        let vm = &mut self.vms[number];
        self.out.responses[number][request.number] = (self.now - came).as_secs_f64();
        if let Some((cache, flight)) = vm.cache.as_mut().zip(request.flight) {
            cache.end(flight, is_at_device, true, 1);
        }
        vm.scheduler.guest(kind, range, is_at_device);
        if let Some(control) = &mut vm.control {
            control.guest(kind, came, self.now);
        }
        if is_at_device {
            self.turns.guest_served(number);
        } else {
            self.out.hits += 1;
        }
        if self.how.is_some_and(|how| how.takes_guests) {
            self.out.from_guests += vm.scheduler.sent(range);
            self.end_move(number);
        }
    }

    /// The next chunk of a move that may read, or when one may.
    fn next_chunk(&mut self) -> (Option<Work>, Duration) {
        let Some(how) = self.how else { return (None, Duration::MAX) };
        let most = self.turns.allowed(self.waiting.len());
        if most == 0 {
            return (None, Duration::MAX);
        }
        let mut not_before = Duration::MAX;
        let mut allowed = vec![0; self.vms.len()];
        for (vm, allowed) in self.vms.iter_mut().zip(&mut allowed).filter(|(vm, _)| !vm.is_over) {
            match vm.control.as_mut().map(|control| control.allowed(self.now)) {
                None => *allowed = most,
                Some(Allowed::Bytes(bytes)) => *allowed = bytes.min(most),
                Some(Allowed::NotBefore(time)) => not_before = not_before.min(time),
            }
            if !how.at_once {
                break;
            }
        }
        let Some(vm) = self.turns.next(|vm| allowed[vm] > 0) else { return (None, not_before) };
        let number = vm;
        let vm = &mut self.vms[number];
        let next = vm.scheduler.next(allowed[number]).expect("a move that is not over");
        let flight = vm.cache.as_mut().map(|cache| cache.begin(Kind::Read, next.range));
        if let Some(control) = &mut vm.control {
            control.began(next.range.len);
        }
        (Some(Work::Chunk { vm: number, next, flight, began: self.now }), not_before)
    }

    fn end_chunk(&mut self, number: usize, next: Next, flight: Option<Flight>, began: Duration) {
        let Next { range, follows } = next;
        let vm = &mut self.vms[number];
        self.turns.moved(number, range.len);
        vm.moved += range.len;
        self.out.read += range.len;
        let keeps = self.how.is_some_and(|how| how.cached == Cached::All);
        if let Some((cache, flight)) = vm.cache.as_mut().zip(flight) {
            cache.end(flight, keeps, true, u64::from(follows));
        }
        if let Some(control) = &mut vm.control {
            control.ended(range.len, began, self.now);
        }
        // What it brought answers those that wait.
        for _ in 0..self.waiting.len() {
            let request = self.waiting.pop_front().expect("so many wait");
            if request.vm == number && self.is_in_memory(&request) {
                self.end_guest(request, false);
            } else {
                self.waiting.push_back(request);
            }
        }
        self.end_move(number);
    }

    fn end_move(&mut self, number: usize) {
        let vm = &mut self.vms[number];
        if vm.is_over || vm.scheduler.left() > 0 {
            return;
        }
        vm.is_over = true;
        if self.out.shares.is_empty() {
            self.out.shares = self.vms.iter().map(|vm| vm.moved).collect();
        }
    }
}
