//! Work by several threads, of which each job has a part that is done in the order of the jobs, by one thread at a time.

use std::sync::mpsc::{RecvTimeoutError, channel};
use std::thread;

use parking_lot::{Condvar, Mutex};
use vmstrata_disk::{Error, Result};

use crate::fault::BackupFault;
use crate::pipeline::{Crew, TICK};

/// Whose turn it is.
#[derive(Debug, Default)]
struct Line {
    state: Mutex<State>,
    moved: Condvar,
}

#[derive(Debug, Default)]
struct State {
    /// The number of the job whose turn it is.
    next: u64,
    has_failed: bool,
    error: Option<Error>,
}

impl Line {
    /// Ends all of it: those that wait for their turn go.
    fn fail(&self, error: Option<Error>) {
        let mut state = self.state.lock();
        if !state.has_failed {
            (state.has_failed, state.error) = (true, error);
        }
        self.moved.notify_all();
    }
}

/// The turn of one job.
#[derive(Debug)]
pub(crate) struct Turn<'a> {
    line: &'a Line,
    number: u64,
}

impl Turn<'_> {
    /// Waits until all earlier jobs have had theirs, and does `part`. All jobs take their turn, or none does.
    ///
    /// # Errors
    /// Those of `part`; [`BackupFault::Stopped`] when another job has failed.
    pub(crate) fn take<T>(self, part: impl FnOnce() -> Result<T>) -> Result<T> {
        let mut state = self.line.state.lock();
        while state.next != self.number && !state.has_failed {
            self.line.moved.wait(&mut state);
        }
        if state.has_failed {
            return Err(BackupFault::Stopped.into());
        }
        drop(state);
        let done = part()?;
        self.line.state.lock().next += 1;
        self.line.moved.notify_all();
        Ok(done)
    }
}

/// Ends the others where a thread panics: its turn would never come.
struct Ends<'a>(&'a Line);

impl Drop for Ends<'_> {
    fn drop(&mut self) {
        if thread::panicking() {
            self.0.fail(None);
        }
    }
}

/// Runs `work` on each job by the crew, each thread with a `scratch` of its own. `watch` is asked on this thread, now and then, whether
/// to go on.
///
/// # Errors
/// The first error of any of them.
pub(crate) fn in_turns<J: Send, S>(
    crew: &Crew,
    jobs: impl Iterator<Item = Result<J>> + Send,
    scratch: impl Fn() -> Result<S> + Sync,
    work: impl Fn(J, &mut S, Turn<'_>) -> Result<()> + Sync,
    mut watch: impl FnMut() -> Result<()>,
) -> Result<()> {
    let (line, jobs) = (Line::default(), Mutex::new((0..).zip(jobs)));
    let run_all = || -> Result<()> {
        let mut scratch = scratch()?;
        loop {
            // Held while a job is made, so that no later one is numbered first.
            let mut jobs = jobs.lock();
            if line.state.lock().has_failed {
                return Ok(());
            }
            let Some((number, job)) = jobs.next() else { return Ok(()) };
            drop(jobs);
            work(job?, &mut scratch, Turn { line: &line, number })?;
        }
    };
    // Nothing is sent: the last thread that ends closes it.
    let (ended, all_ended) = channel::<()>();
    thread::scope(|scope| {
        for number in 0..crew.threads() {
            let (ended, run_all, line) = (ended.clone(), &run_all, &line);
            let run = move || {
                let _ended = ended;
                let _ends = Ends(line);
                if let Err(error) = run_all() {
                    line.fail(Some(error));
                    crew.stop();
                }
            };
            match thread::Builder::new().spawn_scoped(scope, run) {
                Ok(_) => {}
                Err(error) if number == 0 => return Err(Error::no_thread(error)),
                // Fewer do it, too.
                Err(_) => break,
            }
        }
        drop(ended);
        while all_ended.recv_timeout(TICK) == Err(RecvTimeoutError::Timeout) {
            if let Err(error) = watch() {
                line.fail(Some(error));
                crew.stop();
            }
        }
        Ok(())
    })?;
    line.state.into_inner().error.map_or_else(watch, Err)
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU64, Ordering};
    use std::time::{Duration, Instant};

    use vmstrata_disk::ErrorKind;

    use super::*;

    fn closed() -> Error {
        ErrorKind::Closed.into()
    }

    fn run(
        jobs: impl Iterator<Item = Result<u64>> + Send,
        work: impl Fn(u64, Turn<'_>) -> Result<()> + Sync,
    ) -> Result<()> {
        in_turns(&Crew::new(3, None), jobs, || Ok(()), |job, (), turn| work(job, turn), || Ok(()))
    }

    #[test]
    fn turns_come_in_the_order_of_the_jobs() {
        let taken = Mutex::new(Vec::new());
        run((0..500).map(Ok), |job, turn| {
            // Some are long in coming.
            let until = Instant::now() + Duration::from_micros(job * 7919 % 300);
            while Instant::now() < until {}
            turn.take(|| {
                taken.lock().push(job);
                Ok(())
            })
        })
        .unwrap();
        assert!(taken.into_inner().into_iter().eq(0..500));
    }

    #[test]
    fn an_error_anywhere_ends_it_and_is_the_one_that_is_told() {
        let is_closed = |done: Result<()>| matches!(done.unwrap_err().kind(), ErrorKind::Closed);
        let fail_at = |at: u64| move |job: u64| if job == at { Err(closed()) } else { Ok(()) };
        let jobs = (0..50).map(|job| if job == 20 { Err(closed()) } else { Ok(job) });
        assert!(is_closed(run(jobs, |_, turn| turn.take(|| Ok(())))), "in the making of a job");
        let early = run((0..50).map(Ok), |job, turn| {
            fail_at(20)(job)?;
            turn.take(|| Ok(()))
        });
        assert!(is_closed(early), "before a turn");
        assert!(is_closed(run((0..50).map(Ok), |job, turn| turn.take(|| fail_at(20)(job)))), "in a turn");
        let late = run((0..50).map(Ok), |job, turn| turn.take(|| Ok(())).and_then(|()| fail_at(49)(job)));
        assert!(is_closed(late), "after the last turn");
    }

    #[test]
    fn the_watcher_stops_what_has_no_end() {
        let done = AtomicU64::new(0);
        let watch = || if done.load(Ordering::Relaxed) > 1000 { Err(closed()) } else { Ok(()) };
        let work = |_, (): &mut (), turn: Turn<'_>| {
            done.fetch_add(1, Ordering::Relaxed);
            turn.take(|| Ok(()))
        };
        let stopped = in_turns(&Crew::new(2, None), (0u64..).map(Ok), || Ok(()), work, watch);
        assert!(matches!(stopped.unwrap_err().kind(), ErrorKind::Closed));
    }

    #[test]
    #[should_panic(expected = "a scoped thread panicked")]
    fn a_panic_leaves_no_thread_waiting_for_its_turn() {
        let _ = run((0..50).map(Ok), |job, turn| {
            assert!(job != 20);
            turn.take(|| Ok(()))
        });
    }
}
