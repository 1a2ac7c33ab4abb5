//! How far apart two processors of this machine are.
//!
//! The host of a virtual machine runs its processors on whatever cores are free, and moves them: to two cores that share a
//! cache, or to two that do not. Memory that one of them has written reaches the other in a quarter of the time or less where
//! they share one, and a guest and its server pass each other memory all the time. So the same work takes another time from
//! one second to the next, whoever serves the disk.
//!
//! Here one thread on each of two processors, which other threads cannot keep from running, pass a number back and forth now and
//! then, and note how long that took.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::watcher;

/// How often is looked.
const STEP: Duration = Duration::from_millis(20);
/// Times that the number goes there and back in one look.
const ROUNDS: u64 = 64;
/// Times that a thread looks for the other's answer before it gives up: some 100 µs. The other one may just not run.
const LOOKS_MAX: u32 = 100_000;

/// A watch that is kept until [`Distances::end`].
#[derive(Debug)]
pub struct Distances {
    stop: Arc<AtomicBool>,
    asker: JoinHandle<Vec<Distance>>,
    answerer: JoinHandle<Vec<Distance>>,
}

/// What was seen at one time.
#[derive(Clone, Copy, Debug)]
pub struct Distance {
    /// When.
    pub at: Instant,
    /// How long a number took from one processor to the other and back.
    pub round_trip: Duration,
}

/// The number, with nothing else near that would move with it.
#[derive(Debug, Default)]
#[repr(align(128))]
struct Ball(AtomicU64);

impl Distances {
    /// Begins to look.
    ///
    /// # Errors
    /// With fewer than two processors, or where this process may not have threads of real-time priority.
    pub fn watch() -> io::Result<Self> {
        if std::thread::available_parallelism()?.get() < 2 {
            return Err(io::Error::new(io::ErrorKind::Unsupported, "there is one processor only"));
        }
        let (stop, ball, start) = (Arc::new(AtomicBool::new(false)), Arc::<Ball>::default(), Instant::now());
        let thread = |processor: usize, side: fn(&Ball, u64) -> Option<Duration>| {
            let (stop, ball) = (Arc::clone(&stop), Arc::clone(&ball));
            watcher::spawn(processor, move || look(&stop, start, |turn| side(&ball, turn)))
        };
        let (asker, answerer) = (thread(0, ask)?, thread(1, answer)?);
        Ok(Self { stop, asker, answerer })
    }

    /// What was seen, in the order of time.
    ///
    /// # Panics
    /// When a thread that watched has panicked.
    pub fn end(self) -> Vec<Distance> {
        self.stop.store(true, Ordering::Relaxed);
        let _ = self.answerer.join().expect("it only looks");
        self.asker.join().expect("it only looks")
    }
}

/// Does its part at every step, which both threads count from the same `start`.
fn look(stop: &AtomicBool, start: Instant, part: impl Fn(u64) -> Option<Duration>) -> Vec<Distance> {
    let mut seen = Vec::new();
    while !stop.load(Ordering::Relaxed) {
        let turn = (start.elapsed().as_nanos() / STEP.as_nanos()) as u64 + 1;
        let at = start + Duration::from_nanos(turn * STEP.as_nanos() as u64);
        std::thread::sleep(at.saturating_duration_since(Instant::now()));
        seen.extend(part(turn).map(|round_trip| Distance { at, round_trip }));
    }
    seen
}

/// The one who begins; the time of a round trip.
fn ask(ball: &Ball, turn: u64) -> Option<Duration> {
    let first = turn * 4 * ROUNDS;
    // Until the other one is there, nothing is timed.
    pass(ball, first, first + 1)?;
    let start = Instant::now();
    (1..=ROUNDS).try_for_each(|round| pass(ball, first + 2 * round, first + 2 * round + 1))?;
    Some(start.elapsed() / ROUNDS as u32)
}

/// Shows one number and waits for the next.
fn pass(ball: &Ball, number: u64, next: u64) -> Option<()> {
    ball.0.store(number, Ordering::Release);
    (0..LOOKS_MAX).find(|_| ball.0.load(Ordering::Acquire) == next).map(drop)
}

/// The other one.
fn answer(ball: &Ball, turn: u64) -> Option<Duration> {
    let first = turn * 4 * ROUNDS;
    for round in 0..=ROUNDS {
        let number = first + 2 * round;
        (0..LOOKS_MAX).find(|_| ball.0.load(Ordering::Acquire) == number)?;
        ball.0.store(number + 1, Ordering::Release);
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_number_goes_back_and_forth_in_less_than_a_switch_of_threads_takes() {
        let Ok(distances) = Distances::watch() else { return };
        std::thread::sleep(Duration::from_millis(300));
        let seen = distances.end();
        assert!(seen.is_sorted_by_key(|distance| distance.at));
        let shortest = seen.iter().map(|distance| distance.round_trip).min().unwrap();
        assert!((Duration::from_nanos(5)..Duration::from_micros(5)).contains(&shortest), "{shortest:?}");
    }

    #[test]
    fn nobody_waits_for_ever() {
        let ball = Ball::default();
        assert_eq!(ask(&ball, 1), None);
        assert_eq!(answer(&ball, 2), None);
    }
}
