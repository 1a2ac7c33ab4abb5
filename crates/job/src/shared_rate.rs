//! One rate for several jobs, which write in turn.
//!
//! A job takes a turn for the bytes that its next step may write. The step begins once time has paid for all turns that were taken before
//! it. So what all jobs write together keeps to the rate from the first byte, and no job starves.

use std::num::NonZeroU64;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use crate::bucket::step_bytes;

/// Bytes that a step may write at least: a move cannot write fewer at a time.
const STEP_BYTES_MIN: u64 = 64 << 10;
/// The longest wait, in seconds: a longer one would overflow an `Instant`.
const WAIT_S_MAX: f64 = 3e7;

/// See the module documentation.
#[derive(Debug)]
pub struct SharedRate {
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    rate: Option<NonZeroU64>,
    /// Bytes for which turns were taken, and those of them that are paid for, as of then. Time that no turn needs is not saved up.
    taken: f64,
    paid: f64,
    paid_at: Instant,
}

impl State {
    fn pay(&mut self, now: Instant) {
        let time = now.saturating_duration_since(self.paid_at).as_secs_f64();
        let paid = self.rate.map_or(f64::INFINITY, |rate| self.paid + rate.get() as f64 * time);
        self.paid = paid.min(self.taken);
        self.paid_at = self.paid_at.max(now);
    }

    fn step_bytes(&self) -> u64 {
        step_bytes(self.rate.map(NonZeroU64::get)).max(STEP_BYTES_MIN)
    }
}

impl SharedRate {
    /// So many bytes a second; `None` for any number.
    pub fn new(rate: Option<NonZeroU64>, now: Instant) -> Self {
        Self { state: Mutex::new(State { rate, taken: 0.0, paid: 0.0, paid_at: now }) }
    }

    /// Bytes a second; `None` for any number.
    pub fn rate(&self) -> Option<NonZeroU64> {
        self.state.lock().rate
    }

    /// Changes the rate, also for turns that were taken.
    pub fn set_rate(&self, rate: Option<NonZeroU64>, now: Instant) {
        let mut state = self.state.lock();
        state.pay(now);
        state.rate = rate;
    }
}

/// What one job has of a shared rate: turns.
#[derive(Debug)]
pub struct RateShare {
    rate: Arc<SharedRate>,
    next: Option<Turn>,
}

#[derive(Debug)]
struct Turn {
    /// It begins once so many bytes are paid for.
    after: f64,
    bytes: u64,
}

impl RateShare {
    /// Those of a job that begins.
    pub fn new(rate: Arc<SharedRate>) -> Self {
        Self { rate, next: None }
    }

    /// How long to wait before the next step, which writes `most` bytes at most. As the rate may change meanwhile, a job asks again now
    /// and then.
    pub fn wait(&mut self, most: u64, now: Instant) -> Duration {
        let mut state = self.rate.state.lock();
        state.pay(now);
        let Some(rate) = state.rate else { return Duration::ZERO };
        let turn = self.next.get_or_insert_with(|| {
            let bytes = most.clamp(STEP_BYTES_MIN, state.step_bytes());
            let turn = Turn { after: state.taken, bytes };
            state.taken += bytes as f64;
            turn
        });
        let left = (turn.after - state.paid) / rate.get() as f64;
        Duration::from_secs_f64(left.clamp(0.0, WAIT_S_MAX))
    }

    /// Bytes that a step may write that begins now.
    pub fn step_bytes(&self) -> u64 {
        let most = self.next.as_ref().map_or(u64::MAX, |turn| turn.bytes);
        most.min(self.rate.state.lock().step_bytes())
    }

    /// Notes that a step has written so many bytes. If it has written none, its turn is the next step's, which need not wait.
    pub fn wrote(&mut self, bytes: u64, now: Instant) {
        if bytes == 0 {
            return;
        }
        let turn_bytes = self.next.take().map_or(0, |turn| turn.bytes);
        let mut state = self.rate.state.lock();
        state.pay(now);
        // What it has not used, the others need not wait for; what it has written beyond, they wait for, too.
        state.paid = (state.paid + turn_bytes as f64 - bytes as f64).min(state.taken);
    }
}

/// The others need not wait for a turn that is given up.
impl Drop for RateShare {
    fn drop(&mut self) {
        let Some(turn) = self.next.take() else { return };
        let mut state = self.rate.state.lock();
        state.paid = (state.paid + turn.bytes as f64).min(state.taken);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    fn rate(bytes: u64) -> Option<NonZeroU64> {
        NonZeroU64::new(bytes)
    }

    /// Jobs that share a rate, in virtual time.
    struct Jobs {
        shared: Arc<SharedRate>,
        now: Instant,
        jobs: Vec<Job>,
    }

    struct Job {
        share: RateShare,
        written: u64,
        /// When its last step ends; until then it asks for nothing.
        busy_until: Instant,
        step_time: Duration,
    }

    impl Jobs {
        fn new(count: u32, bytes: Option<NonZeroU64>) -> Self {
            let now = Instant::now();
            let shared = Arc::new(SharedRate::new(bytes, now));
            let mut jobs = Self { shared, now, jobs: Vec::new() };
            (0..count).for_each(|number| jobs.begin(Duration::from_micros(u64::from(number) * 300)));
            jobs
        }

        fn begin(&mut self, step_time: Duration) {
            let share = RateShare::new(Arc::clone(&self.shared));
            self.jobs.push(Job { share, written: 0, busy_until: self.now, step_time });
        }

        fn written(&self) -> u64 {
            self.jobs.iter().map(|job| job.written).sum()
        }

        /// Has all do steps that write what they may, or `odd` bytes more. Calls `look` after each step.
        fn run(&mut self, time: Duration, odd: u64, mut look: impl FnMut(&Self)) {
            let end = self.now + time;
            loop {
                let now = self.now;
                let begins = |job: &mut Job| match job.busy_until {
                    until if until > now => until,
                    _ => now + job.share.wait(MIB, now),
                };
                let begins: Vec<Instant> = self.jobs.iter_mut().map(begins).collect();
                let (first, at) = begins.into_iter().enumerate().min_by_key(|(_, at)| *at).unwrap();
                if at >= end {
                    return self.now = end;
                }
                if at > now {
                    // The others ask again then, too.
                    self.now = at;
                    continue;
                }
                let job = &mut self.jobs[first];
                let bytes = job.share.step_bytes().min(MIB) + odd;
                job.share.wrote(bytes, now);
                job.written += bytes;
                job.busy_until = now + job.step_time;
                look(self);
            }
        }
    }

    #[test]
    fn jobs_share_a_rate_evenly_and_keep_to_it_from_the_first_byte() {
        for (count, bytes, odd) in [(1, 10 * MIB, 0), (3, 10 * MIB, 4096), (64, 64 << 10, 0), (5, 1 << 30, 1)]
        {
            let mut jobs = Jobs::new(count, rate(bytes));
            let began = jobs.now;
            let step = (bytes / 10).clamp(STEP_BYTES_MIN, MIB) + odd;
            jobs.run(Duration::from_secs(200), odd, |jobs| {
                let allowed = (jobs.now - began).as_secs_f64() * bytes as f64;
                let written = jobs.written() as f64;
                assert!(written <= allowed + step as f64 + 1.0, "{written} of {allowed} bytes");
            });
            let all = jobs.written() as f64 / (200.0 * bytes as f64);
            assert!(all > 0.99, "{count} jobs use {all} of the rate");
            let of = |job: &Job| job.written;
            let (least, most) = (jobs.jobs.iter().map(of).min(), jobs.jobs.iter().map(of).max());
            assert!(most.unwrap() - least.unwrap() <= 2 * step, "{least:?} to {most:?} bytes");
        }
    }

    #[test]
    fn a_changed_rate_holds_at_once_for_those_that_wait() {
        let mut jobs = Jobs::new(4, rate(100 * MIB));
        jobs.run(Duration::from_secs(1), 0, |_| {});
        let low = 128 << 10;
        jobs.shared.set_rate(rate(low), jobs.now);
        let (changed, before) = (jobs.now, jobs.written());
        jobs.run(Duration::from_secs(300), 0, |jobs| {
            let allowed = (jobs.now - changed).as_secs_f64() * low as f64;
            let written = (jobs.written() - before) as f64;
            assert!(written <= allowed + STEP_BYTES_MIN as f64 + 1.0, "{written} of {allowed} bytes");
        });
        let written = jobs.written() - before;
        assert!(written > 299 * low - 4 * MIB, "{written} bytes in 300 s");
        jobs.shared.set_rate(rate(100 * MIB), jobs.now);
        let before = jobs.written();
        jobs.run(Duration::from_secs(1), 0, |_| {});
        let written = jobs.written() - before;
        assert!((98 * MIB..=101 * MIB).contains(&written), "{written} bytes in a second");
    }

    #[test]
    fn a_rate_that_is_lifted_ends_the_waiting_and_one_that_is_set_counts_what_is_under_way() {
        let mut jobs = Jobs::new(2, rate(64 << 10));
        let now = jobs.now;
        let waits = |jobs: &mut Jobs| jobs.jobs.iter_mut().map(|job| job.share.wait(MIB, now)).max();
        assert_eq!(waits(&mut jobs), Some(Duration::from_secs(1)));
        jobs.shared.set_rate(None, now);
        assert_eq!(waits(&mut jobs), Some(Duration::ZERO));
        // Both have begun a step without limit when there is one again.
        jobs.jobs.iter_mut().for_each(|job| job.share.wrote(MIB, now));
        assert_eq!(waits(&mut jobs), Some(Duration::ZERO));
        assert_eq!(jobs.jobs[0].share.step_bytes(), u64::MAX);
        jobs.shared.set_rate(rate(MIB), now);
        jobs.jobs.iter_mut().for_each(|job| job.share.wrote(MIB, now));
        let wait = jobs.jobs[0].share.wait(MIB, now).as_secs_f64();
        assert!((1.99..2.01).contains(&wait), "{wait}");
    }

    #[test]
    fn steps_that_write_nothing_do_not_wait_for_others() {
        let mut jobs = Jobs::new(2, rate(64 << 10));
        let now = jobs.now;
        let [looks, writes] = &mut jobs.jobs[..] else { panic!("there are two") };
        assert_eq!(looks.share.wait(MIB, now), Duration::ZERO);
        assert_eq!(writes.share.wait(MIB, now), Duration::from_secs(1));
        looks.share.wrote(0, now);
        assert_eq!(looks.share.wait(MIB, now), Duration::ZERO);
        // It ends, and gives its turn up.
        jobs.jobs.remove(0);
        assert_eq!(jobs.jobs[0].share.wait(MIB, now), Duration::ZERO);
    }

    #[test]
    fn a_job_that_stands_still_holds_up_no_other() {
        let mut jobs = Jobs::new(3, rate(MIB));
        let now = jobs.now;
        jobs.jobs.iter_mut().for_each(|job| assert!(job.share.wait(MIB, now) <= Duration::from_secs(1)));
        // It is paused, and keeps its turn.
        let paused = jobs.jobs.remove(0);
        jobs.run(Duration::from_secs(100), 0, |_| {});
        assert!(jobs.written() > 99 * MIB, "{} bytes", jobs.written());
        drop(paused);
    }
}
