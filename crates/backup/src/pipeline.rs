//! Work by several threads, with results in the order of the jobs, and a bound on what is under way.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, RecvTimeoutError, Sender, bounded};
use parking_lot::Mutex;
use vmstrata_disk::{Error, Result};
use vmstrata_job::Bucket;

/// Jobs under way or done and not taken, for each thread.
const AHEAD: usize = 2;
/// How long a wait lasts before the caller is asked whether to go on.
pub(crate) const TICK: Duration = Duration::from_millis(50);

/// Who works, and how fast.
#[derive(Debug)]
pub(crate) struct Crew {
    threads: usize,
    bucket: Mutex<Bucket>,
    stopped: AtomicBool,
}

impl Crew {
    /// `threads` threads, or for 0 enough to keep a cold disk busy, and all processors; together no faster than
    /// `per_second` bytes a second.
    pub(crate) fn new(threads: usize, per_second: Option<u64>) -> Self {
        let threads = match threads {
            0 => std::thread::available_parallelism().map_or(4, usize::from).clamp(4, 16),
            asked => asked.min(64),
        };
        let bucket = Bucket::new(per_second.filter(|rate| *rate > 0), Instant::now());
        Self { threads, bucket: Mutex::new(bucket), stopped: AtomicBool::new(false) }
    }

    /// How many threads work.
    pub(crate) fn threads(&self) -> usize {
        self.threads
    }

    /// The work has failed: nothing waits for the rate any more.
    pub(crate) fn stop(&self) {
        self.stopped.store(true, Ordering::Relaxed);
    }

    /// Waits until `bytes` more may be read, or the work has failed.
    pub(crate) fn wait(&self, bytes: u64) {
        let due = {
            let (mut bucket, now) = (self.bucket.lock(), Instant::now());
            // Paid for before, so that the limit holds from the first byte.
            bucket.take(bytes, now);
            now + bucket.wait(now)
        };
        while !self.stopped.load(Ordering::Relaxed)
            && let Some(left) = due.checked_duration_since(Instant::now())
        {
            std::thread::sleep(left.min(TICK));
        }
    }
}

/// Runs `work` on each job by the crew, and `take` on each result, in the order of the jobs, on this thread; `take` gets
/// nothing, and may end it all, when a result is long in coming.
///
/// # Errors
/// The first error of either; jobs under way are finished first.
pub(crate) fn in_order<J: Send, R: Send>(
    crew: &Crew,
    mut jobs: impl Iterator<Item = J>,
    work: impl Fn(J) -> Result<R> + Sync,
    mut take: impl FnMut(Option<R>) -> Result<()>,
) -> Result<()> {
    let (send, receive) = bounded::<(J, Sender<Result<R>>)>(crew.threads * AHEAD);
    std::thread::scope(|scope| {
        for number in 0..crew.threads {
            let (receive, work) = (receive.clone(), &work);
            let run = move || {
                for (job, reply) in receive {
                    // After an error there is no receiver.
                    let _ = reply.send(work(job));
                }
            };
            match std::thread::Builder::new().spawn_scoped(scope, run) {
                Ok(_) => {}
                Err(error) if number == 0 => return Err(Error::no_thread(error)),
                // Fewer do it, too.
                Err(_) => break,
            }
        }
        drop(receive);
        // Dropped at the end of this closure, which ends the threads.
        let send = send;
        let mut waiting: VecDeque<Receiver<Result<R>>> = VecDeque::new();
        let mut run = || -> Result<()> {
            loop {
                while waiting.len() < crew.threads * AHEAD {
                    let Some(job) = jobs.next() else { break };
                    let (reply, result) = bounded(1);
                    send.send((job, reply)).expect("the threads live as long as this sender");
                    waiting.push_back(result);
                }
                let Some(result) = waiting.pop_front() else { return Ok(()) };
                let result = receive_one(&result, || take(None))?;
                take(Some(result))?;
            }
        };
        let done = run();
        crew.stopped.store(done.is_err(), Ordering::Relaxed);
        done
    })
}

/// Waits for a result, asking now and then whether to go on.
fn receive_one<R>(result: &Receiver<Result<R>>, mut idle: impl FnMut() -> Result<()>) -> Result<R> {
    loop {
        match result.recv_timeout(TICK) {
            Ok(result) => return result,
            Err(RecvTimeoutError::Timeout) => idle()?,
            Err(RecvTimeoutError::Disconnected) => unreachable!("every job is answered"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use vmstrata_disk::ErrorKind;

    #[test]
    fn results_come_in_the_order_of_the_jobs() {
        let mut taken = Vec::new();
        let work = |job: u64| {
            std::thread::sleep(Duration::from_micros(job * 7919 % 500));
            Ok(job * 2)
        };
        in_order(&Crew::new(3, None), 0..200, work, |result| {
            taken.extend(result);
            Ok(())
        })
        .unwrap();
        assert_eq!(taken, (0..200).map(|job| job * 2).collect::<Vec<_>>());
    }

    #[test]
    fn an_error_on_either_side_ends_it() {
        let crew = Crew::new(2, None);
        let fail = |at: u64| move |job: u64| if job == at { Err(ErrorKind::Closed.into()) } else { Ok(job) };
        assert!(in_order(&crew, 0..50, fail(20), |_| Ok(())).is_err());
        assert!(in_order(&crew, 0..50, Ok, |job| job.map_or(Ok(()), |job| fail(20)(job).map(drop))).is_err());
        assert!(in_order(&crew, 0..50, fail(99), |_| Ok(())).is_ok());
    }

    #[test]
    fn a_rate_is_kept_by_all_threads_together() {
        let crew = Crew::new(4, Some(100_000));
        let started = Instant::now();
        let work = |_| {
            crew.wait(1000);
            Ok(())
        };
        in_order(&crew, 0..6, work, |_| Ok(())).unwrap();
        assert!(started.elapsed() >= Duration::from_millis(50), "{:?}", started.elapsed());
    }

    #[test]
    fn a_slow_job_can_be_stopped_at_once() {
        let crew = Crew::new(2, Some(1));
        let started = Instant::now();
        let work = |_| {
            crew.wait(1000);
            Ok(())
        };
        let stopped = in_order(&crew, 0..6, work, |result: Option<()>| match result {
            Some(()) => Ok(()),
            None => Err(ErrorKind::Closed.into()),
        });
        assert!(stopped.is_err() && started.elapsed() < Duration::from_secs(10), "{:?}", started.elapsed());
    }
}
