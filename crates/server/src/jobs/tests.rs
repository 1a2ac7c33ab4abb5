use std::sync::mpsc;

use vmstrata_api::JobState;

use super::*;

/// Work whose steps wait for the test.
#[derive(Debug)]
struct Steps {
    left: u64,
    gate: mpsc::Receiver<Step>,
    /// Told when a step begins.
    begun: mpsc::Sender<()>,
}

impl Work for Steps {
    type Action = u64;
    const KIND: &'static str = "steps";
    const UNIT: &'static str = "steps";

    fn total(&self) -> u64 {
        self.left
    }

    fn select(&mut self) -> Result<Option<u64>, Error> {
        Ok((self.left > 0).then_some(self.left))
    }

    fn apply(&mut self, action: u64) -> Result<Step, Error> {
        assert_eq!(action, self.left, "what was selected is what is applied");
        self.left -= 1;
        let _ = self.begun.send(());
        self.gate.recv().map_err(|_| Error::Ending)
    }
}

fn jobs() -> Arc<Jobs> {
    let events = broadcast::Sender::new(16);
    let audit = Audit::new(events.clone(), None).unwrap();
    Arc::new(Jobs::new(events, audit))
}

/// Begins a job; its first step is under way.
fn start(jobs: &Arc<Jobs>, disk: &str, limit: Option<u64>) -> (u64, mpsc::Sender<Step>) {
    let (open, gate) = mpsc::channel();
    let (begun, steps) = mpsc::channel();
    let status =
        jobs.reserve(disk).unwrap().start(limit, ChangedBy::Server, Steps { left: 3, gate, begun }).unwrap();
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
    const KIND: &'static str = "panics";
    const UNIT: &'static str = "steps";

    fn total(&self) -> u64 {
        1
    }

    fn select(&mut self) -> Result<Option<()>, Error> {
        Ok(Some(()))
    }

    fn apply(&mut self, (): ()) -> Result<Step, Error> {
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
    let id = jobs.reserve("a").unwrap().start(None, ChangedBy::Server, Panics(dropped)).unwrap().id;
    wait_for(&jobs, id, "the end", |status| status.state.is_ended());
    jobs.end(None);
    is_dropped.try_recv().expect("what it held is let go");
    let status = jobs.status(id).unwrap();
    assert_eq!(status.state, JobState::Failed);
    assert!(status.error.unwrap().contains("defect"));
}

#[test]
fn a_paused_job_stands_still_until_it_is_resumed() {
    let jobs = jobs();
    let (id, open) = start(&jobs, "a", None);
    jobs.change(id, JobChange::Pause {}).unwrap();
    for _ in 0..3 {
        open.send(step(0)).unwrap();
    }
    // The step that was under way may end, no other begins.
    std::thread::sleep(Duration::from_millis(50));
    let paused = jobs.status(id).unwrap();
    assert!(paused.state == JobState::Paused && paused.done <= 1, "{paused:?}");
    jobs.change(id, JobChange::Resume {}).unwrap();
    wait_for(&jobs, id, "the end", |status| status.state == JobState::Done);
}

#[test]
fn a_cancelled_job_ends_after_its_step_and_frees_its_place() {
    let jobs = jobs();
    let (id, open) = start(&jobs, "a", None);
    let again = jobs.reserve::<Steps>("a");
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
    let slot = jobs.reserve::<Steps>("a").unwrap();
    let again = jobs.reserve::<Steps>("a");
    assert!(matches!(again, Err(Error::JobExists { .. })), "{again:?}");
    let others: Vec<_> =
        (1..JOBS_MAX).map(|disk| jobs.reserve::<Steps>(&disk.to_string()).unwrap()).collect();
    let more = jobs.reserve::<Steps>("more");
    assert!(matches!(more, Err(Error::TooManyJobs { .. })), "{more:?}");
    drop((slot, others));
    start(&jobs, "a", None);
}

#[test]
fn an_error_ends_a_job_with_its_words() {
    let jobs = jobs();
    let (id, open) = start(&jobs, "a", None);
    drop(open);
    let status = wait_for(&jobs, id, "the end", |status| status.state == JobState::Failed);
    assert_eq!(status.error.as_deref(), Some("the server is ending"));
}

#[test]
fn a_limited_job_waits_and_can_be_let_loose() {
    let jobs = jobs();
    let (id, open) = start(&jobs, "a", Some(1));
    for _ in 0..3 {
        open.send(step(1000)).unwrap();
    }
    wait_for(&jobs, id, "the first step", |status| status.done == 1);
    std::thread::sleep(Duration::from_millis(50));
    assert_eq!(jobs.status(id).unwrap().done, 1, "a thousand seconds are not over");
    jobs.change(id, JobChange::Limit { bytes_per_second: None }).unwrap();
    wait_for(&jobs, id, "the end", |status| status.state == JobState::Done);
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
    let more = jobs.reserve::<Steps>("more");
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
