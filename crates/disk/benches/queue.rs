//! What a request costs that an observer sees, and how long requests take while others wait for absent bytes.
//!
//! Two ways at a time, by turns, in one process: medians of five rounds. The first way twice shows what the machine adds.

#[path = "../tests/common/mod.rs"]
mod common;

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use common::elsewhere::{self, CHUNK, CHUNKS};
use common::io::{Client, segments_of};
use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};
use vmstrata_disk::{Disk, IoObserver, IoQueue, Op, Request};
use vmstrata_store::{AlignedBuf, SegmentVec};
use vmstrata_types::{GuestOffset, GuestRange};

const ROUNDS: usize = 5;
const ROUND: Duration = Duration::from_millis(500);
const DEPTH: usize = 32;
const LEN: u64 = 4096;
/// Requests that wait for absent bytes meanwhile.
const WAITING: u64 = 512;

/// Counts what begins and ends.
#[derive(Debug, Default)]
struct Counter {
    begun: AtomicU64,
    ended: AtomicU64,
}

impl IoObserver for Counter {
    fn begin(&self, _: Op, _: GuestRange) {
        self.begun.fetch_add(1, Ordering::Relaxed);
    }
    fn end(&self, _: Op, _: GuestRange, _: &vmstrata_disk::Result<()>) {
        self.ended.fetch_add(1, Ordering::Relaxed);
    }
}

/// Random reads of the second half of the base, which is here.
struct Reader {
    queue: IoQueue,
    /// The memory that `segments` names.
    _buffers: Vec<AlignedBuf>,
    segments: Vec<SegmentVec<'static>>,
    rng: SmallRng,
}

/// Of one round: the time a request took of the thread, and the time until it ended, in the 99th percentile; nanoseconds.
struct Round {
    each: f64,
    p99: f64,
}

impl Reader {
    fn new(disk: &Arc<Disk>) -> Self {
        let mut buffers: Vec<_> = (0..DEPTH).map(|_| AlignedBuf::zeroed(LEN as usize)).collect();
        let segments = buffers.iter_mut().map(segments_of).collect();
        let queue = IoQueue::new(Arc::clone(disk), DEPTH as u32).expect("a queue");
        Self { queue, _buffers: buffers, segments, rng: SmallRng::seed_from_u64(1) }
    }

    fn round(&mut self) -> Round {
        let (mut ended, mut times) = (Vec::new(), Vec::new());
        let mut begun = [Instant::now(); DEPTH];
        let mut free: VecDeque<usize> = (0..DEPTH).collect();
        let start = Instant::now();
        while start.elapsed() < ROUND {
            while let Some(slot) = free.pop_front() {
                let chunk = self.rng.random_range(CHUNKS / 2..CHUNKS);
                let at = chunk * CHUNK + self.rng.random_range(0..CHUNK / LEN) * LEN;
                let range = GuestRange::new(GuestOffset::new(at), LEN);
                begun[slot] = Instant::now();
                let segments = self.segments[slot].clone();
                self.queue.push(Request { op: Op::Read, range, segments, token: slot as u64 });
            }
            self.queue.submit();
            self.queue.wait(&[], None);
            self.queue.reap(&mut ended);
            let now = Instant::now();
            for done in ended.drain(..) {
                done.result.expect("a read");
                times.push((now - begun[done.token as usize]).as_nanos() as f64);
                free.push_back(done.token as usize);
            }
        }
        let each = start.elapsed().as_nanos() as f64 / times.len() as f64;
        while self.queue.in_flight() > 0 {
            self.queue.wait(&[], None);
            self.queue.reap(&mut ended);
        }
        times.sort_by(f64::total_cmp);
        Round { each, p99: times[times.len() * 99 / 100] }
    }
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// Rounds of both ways by turns: the median of what `figure` takes from each, of the first, of the second, and of their ratios.
fn by_turns(
    reader: &mut Reader,
    mut prepare: impl FnMut(bool),
    figure: impl Fn(&Round) -> f64,
) -> (f64, f64, f64) {
    let mut measured = |second| {
        prepare(second);
        figure(&reader.round())
    };
    let pairs: Vec<(f64, f64)> = (0..ROUNDS).map(|_| (measured(false), measured(true))).collect();
    let of = |take: fn(&(f64, f64)) -> f64| median(pairs.iter().map(take).collect());
    (of(|pair| pair.0), of(|pair| pair.1), of(|pair| pair.1 / pair.0))
}

fn main() {
    let (_dir, elsewhere, disk) = elsewhere::disk();
    elsewhere.here.lock().expect("no panic").fill(true);
    let mut reader = Reader::new(&disk);
    reader.round();

    let (first, second, ratio) = by_turns(&mut reader, |_| (), |round| round.each);
    println!("a read, twice:                  {first:7.0} / {second:7.0} ns  {ratio:.3}");
    let observe = |on: bool| disk.observe(on.then(|| Arc::new(Counter::default()) as Arc<dyn IoObserver>));
    let (first, second, ratio) = by_turns(&mut reader, observe, |round| round.each);
    println!("a read, alone / observed:       {first:7.0} / {second:7.0} ns  {ratio:.3}");
    disk.observe(None);

    let (first, second, ratio) = by_turns(&mut reader, |_| (), |round| round.p99);
    println!("p99, twice:                     {first:7.0} / {second:7.0} ns  {ratio:.3}");
    let mut others = Client::new(&disk, WAITING as u32);
    let wait = |on: bool| {
        elsewhere.here.lock().expect("no panic")[..WAITING as usize].fill(!on);
        if on {
            (0..WAITING).for_each(|chunk| _ = others.push(Op::Read, chunk * CHUNK, LEN, None));
            others.submit();
            common::wait_until("all to wait", || elsewhere.waiting() == WAITING as usize);
        } else {
            elsewhere.answer();
            others.drain();
        }
    };
    let (first, second, ratio) = by_turns(&mut reader, wait, |round| round.p99);
    println!("p99, alone / 512 others wait:   {first:7.0} / {second:7.0} ns  {ratio:.3}");
    elsewhere.answer();
    others.drain();
}
