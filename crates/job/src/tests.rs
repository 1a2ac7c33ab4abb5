use std::sync::mpsc;
use std::thread::JoinHandle;

use super::*;

/// Work of three steps that wait for the test.
struct Steps {
    left: u64,
    gate: mpsc::Receiver<Step>,
    /// Receives a message when a step begins.
    begun: mpsc::Sender<()>,
}

impl Work for Steps {
    type Action = u64;
    type Error = String;

    fn total(&self) -> u64 {
        3
    }

    fn select(&mut self) -> Result<Next<u64>, String> {
        Ok(if self.left > 0 { Next::Step(self.left) } else { Next::End })
    }

    fn apply(&mut self, action: u64, _: u64) -> Result<Step, String> {
        assert_eq!(action, self.left, "what was selected is what is applied");
        self.left -= 1;
        let _ = self.begun.send(());
        self.gate.recv().map_err(|_| "the gate is gone".to_owned())
    }
}

struct Running {
    job: std::sync::Arc<Job>,
    gate: mpsc::Sender<Step>,
    begun: mpsc::Receiver<()>,
    thread: JoinHandle<Result<bool, String>>,
}

/// Begins a job; its first step is under way.
fn start(limit: Option<u64>) -> Running {
    let (gate, open) = mpsc::channel();
    let (tell, begun) = mpsc::channel();
    let job = std::sync::Arc::new(Job::new(3, limit));
    let shared = std::sync::Arc::clone(&job);
    let thread = std::thread::spawn(move || shared.run(Steps { left: 3, gate: open, begun: tell }, |_| {}));
    begun.recv_timeout(Duration::from_secs(10)).expect("the first step begins");
    Running { job, gate, begun, thread }
}

fn step(bytes: u64) -> Step {
    Step { bytes, ..Step::default() }
}

/// What is not seen in this time does not happen.
const NEVER: Duration = Duration::from_millis(50);

#[test]
fn progress_is_the_sum_of_the_steps() {
    let Running { job, gate, thread, .. } = start(None);
    assert_eq!((job.progress().total, job.progress().left()), (3, None));
    gate.send(step(10)).unwrap();
    gate.send(Step { failure: Some("damaged".to_owned()), freed_bytes: 7, ..Step::default() }).unwrap();
    gate.send(step(5)).unwrap();
    let result = thread.join().unwrap();
    assert_eq!(result, Ok(true));
    job.end(result);
    let progress = job.progress();
    assert_eq!((progress.state, progress.done, progress.failures), (State::Done, 3, 1));
    assert_eq!((progress.did.bytes, progress.did.freed_bytes), (15, 7));
    assert_eq!(progress.did.failure.as_deref(), Some("damaged"));
}

#[test]
fn the_time_left_is_in_proportion_to_the_steps() {
    let mut progress = Job::new(10, None).progress();
    (progress.done, progress.lately) = (4, (2, Duration::from_secs(4)));
    assert_eq!(progress.left(), Some(Duration::from_secs(12)));
    progress.state = State::Done;
    assert_eq!(progress.left(), None);
}

#[test]
fn the_time_left_follows_from_the_rate_of_late() {
    let began = Instant::now();
    let mut lately = Lately::new(began);
    let (mut done, mut now) = (0, began);
    let mut per_step = |lately: &mut Lately, steps, seconds| {
        for _ in 0..steps {
            now += Duration::from_secs(seconds);
            done += 1;
            lately.stepped(done, now);
        }
        let (steps, took) = lately.get(done, now);
        took.as_secs_f64() / steps as f64
    };
    assert_eq!(per_step(&mut lately, 100, 1), 1.0);
    // It is slowed: half a minute later that is all there is.
    assert!(per_step(&mut lately, 2, 10) > 1.0);
    assert_eq!(per_step(&mut lately, 3, 10), 10.0);
    // Very slow steps, too, are counted.
    assert_eq!(per_step(&mut lately, 3, 1000), 1000.0);
    assert_eq!(per_step(&mut lately, 100, 1), 1.0);
}

#[test]
fn a_paused_job_stands_still_until_it_is_resumed() {
    let Running { job, gate, begun, thread } = start(None);
    job.change(Change::Pause);
    (0..3).for_each(|_| gate.send(step(0)).unwrap());
    // The step that was under way may end, no other begins.
    begun.recv_timeout(NEVER).unwrap_err();
    assert_eq!(job.progress().state, State::Paused);
    job.change(Change::Resume);
    assert_eq!(thread.join().unwrap(), Ok(true));
}

#[test]
fn a_cancelled_job_ends_after_its_step() {
    let Running { job, gate, thread, .. } = start(None);
    job.change(Change::Cancel);
    gate.send(step(1)).unwrap();
    let result = thread.join().unwrap();
    assert_eq!((&result, job.progress().done), (&Ok(false), 1));
    job.end(result);
    job.change(Change::Resume);
    assert_eq!(job.progress().state, State::Cancelled, "what has ended stays as it is");
}

#[test]
fn an_error_ends_a_job_with_its_words() {
    let Running { job, gate, thread, .. } = start(None);
    drop(gate);
    job.end(thread.join().unwrap());
    let progress = job.progress();
    assert_eq!((progress.state, progress.did.failure.as_deref()), (State::Failed, Some("the gate is gone")));
}

#[test]
fn a_limited_job_waits_until_the_limit_is_lifted() {
    let Running { job, gate, begun, thread } = start(Some(1));
    (0..3).for_each(|_| gate.send(step(1000)).unwrap());
    // A thousand seconds are not over.
    begun.recv_timeout(NEVER).unwrap_err();
    assert_eq!(job.progress().done, 1);
    job.change(Change::Limit(None));
    assert_eq!(thread.join().unwrap(), Ok(true));
}

/// Waits first, and then ends.
struct Waits(Option<Instant>);

impl Work for Waits {
    type Action = ();
    type Error = ();

    fn total(&self) -> u64 {
        0
    }

    fn select(&mut self) -> Result<Next<()>, ()> {
        Ok(self.0.take().map_or(Next::End, Next::WaitUntil))
    }

    fn apply(&mut self, (): (), _: u64) -> Result<Step, ()> {
        Err(())
    }
}

#[test]
fn work_that_waits_is_asked_again_at_its_time_or_cancelled() {
    let soon = Instant::now() + Duration::from_millis(20);
    assert_eq!(Job::new(0, None).run(Waits(Some(soon)), |_| {}), Ok(true));
    assert!(Instant::now() >= soon);
    let job = Job::new(0, None);
    let far = Instant::now() + Duration::from_secs(1000);
    assert_eq!(job.run(Waits(Some(far)), |job| job.change(Change::Cancel)), Ok(false));
}
