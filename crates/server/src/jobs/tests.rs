use std::sync::mpsc;

use vmstrata_job::{Next, Step};

use super::*;

const STEPS: Kind = Kind { name: "steps", unit: "steps", removes_files: false, yields: false };

/// Work whose steps wait for the test.
#[derive(Debug)]
struct Steps {
    left: u64,
    gate: mpsc::Receiver<Step>,
    /// Told when a step begins.
    begun: mpsc::Sender<()>,
}

impl Work for Steps {
    type Action = ();
    type Error = Error;

    fn total(&self) -> u64 {
        3
    }

    fn select(&mut self) -> Result<Next<()>, Error> {
        Ok(if self.left > 0 { Next::Step(()) } else { Next::End })
    }

    fn apply(&mut self, (): (), _: u64) -> Result<Step, Error> {
        self.left -= 1;
        let _ = self.begun.send(());
        self.gate.recv().map_err(|_| Error::Ending)
    }
}

fn jobs() -> Arc<Jobs> {
    let events = broadcast::Sender::new(16);
    let audit = Audit::new(events.clone(), None).unwrap();
    Arc::new(Jobs::new(events, audit, Arc::default()))
}

/// Begins a job; its first step is under way.
fn start(jobs: &Arc<Jobs>, disk: &str, limit: Option<u64>) -> (u64, mpsc::Sender<Step>) {
    let (open, gate) = mpsc::channel();
    let (begun, steps) = mpsc::channel();
    let status = jobs
        .reserve(&STEPS, disk)
        .unwrap()
        .start(limit, ChangedBy::Server, Steps { left: 3, gate, begun })
        .unwrap();
    assert_eq!((status.state, status.total), (JobState::Running, 3));
    steps.recv_timeout(Duration::from_secs(10)).expect("the first step begins");
    (status.id, open)
}

fn wait_for(jobs: &Jobs, id: u64, what: &str, holds: impl Fn(&JobStatus) -> bool) -> JobStatus {
    let start = Instant::now();
    loop {
        let status = jobs.status(id).unwrap();
        if holds(&status) {
            return status;
        }
        assert!(start.elapsed() < Duration::from_secs(10), "{what}: {status:?}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

fn step(bytes: u64) -> Step {
    Step { bytes, ..Step::default() }
}

#[test]
fn a_job_runs_to_its_end_and_tells_of_it() {
    let jobs = jobs();
    let mut events = jobs.events.subscribe();
    let (id, open) = start(&jobs, "a", None);
    open.send(step(10)).unwrap();
    open.send(Step { failure: Some("damaged".to_owned()), ..Step::default() }).unwrap();
    open.send(step(5)).unwrap();
    let status = wait_for(&jobs, id, "the end", |status| status.state == JobState::Done);
    assert_eq!((status.done, status.bytes, status.failures), (3, 15, 1));
    assert_eq!(status.error.as_deref(), Some("damaged"));
    let (mut told, mut changes) = (Vec::new(), Vec::new());
    while let Ok(event) = events.try_recv() {
        match event {
            Event::Job { job } => told.push(job.state),
            Event::Changed { change } => {
                changes.push((change.change, change.by, change.bytes, change.outcome))
            }
            other => panic!("{other:?}"),
        }
    }
    assert_eq!(changes, [("steps".to_owned(), ChangedBy::Server, Some(15), Outcome::Done)]);
    assert_eq!((told.first(), told.last()), (Some(&JobState::Running), Some(&JobState::Done)));
}

/// Work that fails as only a defect does, with something open.
struct Panics(mpsc::Sender<()>);

impl Work for Panics {
    type Action = ();
    type Error = Error;

    fn total(&self) -> u64 {
        1
    }

    fn select(&mut self) -> Result<Next<()>, Error> {
        Ok(Next::Step(()))
    }

    fn apply(&mut self, (): (), _: u64) -> Result<Step, Error> {
        panic!("a defect that a test has put here")
    }
}

impl Drop for Panics {
    fn drop(&mut self) {
        self.0.send(()).unwrap();
    }
}

#[test]
fn a_job_that_panics_has_failed_and_nobody_waits_for_it() {
    let jobs = jobs();
    let (dropped, is_dropped) = mpsc::channel();
    let id = jobs.reserve(&STEPS, "a").unwrap().start(None, ChangedBy::Server, Panics(dropped)).unwrap().id;
    wait_for(&jobs, id, "the end", |status| status.state.is_ended());
    jobs.end(None);
    is_dropped.try_recv().expect("what it held is let go");
    let status = jobs.status(id).unwrap();
    assert_eq!(status.state, JobState::Failed);
    assert!(status.error.unwrap().contains("defect"));
}

#[test]
fn a_cancelled_job_ends_after_its_step_and_frees_its_place() {
    let jobs = jobs();
    let (id, open) = start(&jobs, "a", None);
    let again = jobs.reserve(&STEPS, "a");
    assert!(matches!(again, Err(Error::JobExists { .. })), "{again:?}");
    jobs.change(id, JobChange::Cancel {}).unwrap();
    open.send(step(1)).unwrap();
    let status = wait_for(&jobs, id, "the end", |status| status.state.is_ended());
    assert!(status.state == JobState::Cancelled && status.done <= 1, "{status:?}");
    // What has ended stays as it is.
    assert_eq!(jobs.change(id, JobChange::Resume {}).unwrap().state, JobState::Cancelled);
    start(&jobs, "a", None);
}

#[test]
fn a_place_is_taken_before_the_work_is_made_and_free_again_when_it_is_not() {
    let jobs = jobs();
    let slot = jobs.reserve(&STEPS, "a").unwrap();
    let again = jobs.reserve(&STEPS, "a");
    assert!(matches!(again, Err(Error::JobExists { .. })), "{again:?}");
    let others: Vec<_> = (1..JOBS_MAX).map(|disk| jobs.reserve(&STEPS, &disk.to_string()).unwrap()).collect();
    let more = jobs.reserve(&STEPS, "more");
    assert!(matches!(more, Err(Error::TooManyJobs { .. })), "{more:?}");
    drop((slot, others));
    start(&jobs, "a", None);
}

#[test]
fn ending_waits_for_the_jobs_of_the_disk_and_leaves_the_others() {
    let jobs = jobs();
    let (one, open_one) = start(&jobs, "one", None);
    let (two, _open_two) = start(&jobs, "two", Some(1));
    let ending = Arc::clone(&jobs);
    let ender = std::thread::spawn(move || ending.end(Some("one")));
    wait_for(&jobs, one, "cancelling", |status| status.state == JobState::Cancelling);
    assert!(!ender.is_finished(), "a step is under way");
    open_one.send(step(0)).unwrap();
    ender.join().unwrap();
    assert!(jobs.status(one).unwrap().state.is_ended());
    assert_eq!(jobs.status(two).unwrap().state, JobState::Running);
}

#[test]
fn jobs_are_bounded_and_old_ones_forgotten() {
    let jobs = jobs();
    let gates: Vec<_> = (0..JOBS_MAX).map(|disk| start(&jobs, &disk.to_string(), None)).collect();
    let more = jobs.reserve(&STEPS, "more");
    assert!(matches!(more, Err(Error::TooManyJobs { .. })), "{more:?}");
    for (id, gate) in gates {
        drop(gate);
        wait_for(&jobs, id, "a place", |status| status.state.is_ended());
    }
    for round in 0..ENDED_KEPT {
        let (id, open) = start(&jobs, "again", None);
        drop(open);
        wait_for(&jobs, id, &format!("round {round}"), |status| status.state.is_ended());
    }
    assert!(jobs.list().len() <= ENDED_KEPT + 1, "{} are kept", jobs.list().len());
}
