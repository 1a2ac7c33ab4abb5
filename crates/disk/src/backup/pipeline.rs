//! Work by several threads, with results in the order of the jobs, and a bound on what is under way.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, Sender, bounded};

use crate::error::Result;

/// Jobs under way or done and not taken, for each thread.
const AHEAD: usize = 2;

/// How many threads to use when `asked` (0 for no wish): enough to keep a cold disk busy, and all processors.
pub(super) fn threads(asked: usize) -> usize {
    match asked {
        0 => std::thread::available_parallelism().map_or(4, usize::from).clamp(4, 16),
        asked => asked.min(64),
    }
}

/// Runs `work` on each job by `threads` threads, and `take` on each result, in the order of the jobs, on this one.
///
/// # Errors
/// The first error of either; jobs under way are finished first.
pub(super) fn in_order<J: Send, R: Send>(
    threads: usize,
    mut jobs: impl Iterator<Item = Result<J>>,
    work: impl Fn(J) -> Result<R> + Sync,
    mut take: impl FnMut(R) -> Result<()>,
) -> Result<()> {
    let (send, receive) = bounded::<(J, Sender<Result<R>>)>(threads * AHEAD);
    std::thread::scope(|scope| {
        for _ in 0..threads {
            let (receive, work) = (receive.clone(), &work);
            scope.spawn(move || {
                for (job, reply) in receive {
                    // Nobody waits for it any more after an error.
                    let _ = reply.send(work(job));
                }
            });
        }
        drop(receive);
        let send = send;
        let mut waiting: VecDeque<Receiver<Result<R>>> = VecDeque::new();
        loop {
            while waiting.len() < threads * AHEAD {
                let Some(job) = jobs.next().transpose()? else { break };
                let (reply, result) = bounded(1);
                send.send((job, reply)).expect("the threads live as long as this sender");
                waiting.push_back(result);
            }
            let Some(result) = waiting.pop_front() else { return Ok(()) };
            take(result.recv().expect("every job is answered")?)?;
        }
    })
}

/// Holds a job to a rate.
#[derive(Debug)]
pub(super) struct Pace {
    started: Instant,
    bytes: u64,
    per_second: Option<u64>,
}

impl Pace {
    pub(super) fn new(per_second: Option<u64>) -> Self {
        Self { started: Instant::now(), bytes: 0, per_second }
    }

    /// Waits until `bytes` more may be read.
    pub(super) fn wait(&mut self, bytes: u64) {
        let Some(rate) = self.per_second.filter(|rate| *rate > 0) else { return };
        let due = Duration::from_secs_f64(self.bytes as f64 / rate as f64);
        std::thread::sleep(due.saturating_sub(self.started.elapsed()));
        self.bytes += bytes;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::ErrorKind;

    #[test]
    fn results_come_in_the_order_of_the_jobs() {
        let mut taken = Vec::new();
        let work = |job: u64| {
            std::thread::sleep(Duration::from_micros(job * 7919 % 500));
            Ok(job * 2)
        };
        let jobs = (0..200).map(Ok);
        in_order(3, jobs, work, |result| {
            taken.push(result);
            Ok(())
        })
        .unwrap();
        assert_eq!(taken, (0..200).map(|job| job * 2).collect::<Vec<_>>());
    }

    #[test]
    fn an_error_anywhere_ends_it() {
        let fail = |at: u64| move |job: u64| if job == at { Err(ErrorKind::Closed.into()) } else { Ok(job) };
        assert!(in_order(2, (0..50).map(Ok), fail(20), |_| Ok(())).is_err());
        assert!(in_order(2, (0..50).map(Ok), Ok, |job| fail(20)(job).map(drop)).is_err());
        assert!(in_order(2, (0..50).map(fail(20)), Ok, |_: u64| Ok(())).is_err());
        assert!(in_order(2, (0..50).map(Ok), fail(99), |_| Ok(())).is_ok());
    }

    #[test]
    fn a_rate_is_kept() {
        let mut pace = Pace::new(Some(100_000));
        for _ in 0..5 {
            pace.wait(1000);
        }
        assert!(pace.started.elapsed() >= Duration::from_millis(40));
    }
}
