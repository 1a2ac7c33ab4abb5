//! The scheduler of a simulated process: one of its threads runs at a time, and the seed says which.
//!
//! Tasks are real threads. Each sleeps on a word of its own, its baton, until the one that runs hands over to it. They hand over
//! in system calls and, now and then, when they allocate. Time is a number: steps make it go on, and where no task is ready it
//! jumps to the earliest moment that one waits for.
//!
//! Invariant: all of this is used by the running task alone; to hand over is a futex wake, which orders memory.

use std::cell::Cell;
use std::sync::atomic::{AtomicU32, Ordering};

use crate::network::Host;
use crate::random::Random;
use crate::shared::{Event, Kind, Shared};
use crate::syscall;

/// Threads alive at a time.
pub const TASKS_MAX: usize = 128;
/// What the clock shows when a seed begins, since 1970: any time will do.
pub const EPOCH_NS: u64 = 1_800_000_000_000_000_000;

/// What a task waits for, beside a moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum On {
    Time,
    Futex(usize),
    /// Something to read from a descriptor that is not a file.
    Descriptor,
    /// A message to a host.
    Message(Host),
    /// The end of a thread.
    End(libc::pthread_t),
}

/// When the process dies, if it has not ended by then.
#[derive(Clone, Copy, Debug)]
pub enum Death {
    AtStep(u64),
    /// Steps in which files change.
    AtChange(u64),
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum State {
    Free,
    Ready,
    Waits(On),
}

struct Task {
    state: Cell<State>,
    until_ns: Cell<u64>,
    timed_out: Cell<bool>,
    baton: AtomicU32,
}

/// A thread that has begun and was neither joined nor detached.
#[derive(Clone, Copy)]
struct Thread {
    id: libc::pthread_t,
    has_ended: bool,
}

/// See the module documentation.
pub struct Tasks {
    tasks: [Task; TASKS_MAX],
    threads: [Cell<Option<Thread>>; TASKS_MAX],
    running: Cell<usize>,
    /// The thread whose task has ended last: it must be gone before another does anything.
    ending: Cell<Option<usize>>,
    pub now_ns: Cell<u64>,
    steps: Cell<u64>,
    changes: Cell<u64>,
    death: Cell<Death>,
    pub random: Random,
    /// The running task goes on, where it can, but once in so many steps.
    patience: Cell<u64>,
    shared: Cell<Option<Shared>>,
}

// SAFETY: the running task alone uses it; see the module documentation.
unsafe impl Sync for Tasks {}

pub static TASKS: Tasks = Tasks::new();

impl Tasks {
    const fn new() -> Self {
        Self {
            tasks: [const {
                Task {
                    state: Cell::new(State::Free),
                    until_ns: Cell::new(u64::MAX),
                    timed_out: Cell::new(false),
                    baton: AtomicU32::new(0),
                }
            }; TASKS_MAX],
            threads: [const { Cell::new(None) }; TASKS_MAX],
            running: Cell::new(0),
            ending: Cell::new(None),
            now_ns: Cell::new(0),
            steps: Cell::new(0),
            changes: Cell::new(0),
            death: Cell::new(Death::AtStep(u64::MAX)),
            random: Random::new(0),
            patience: Cell::new(1),
            shared: Cell::new(None),
        }
    }

    /// The calling thread becomes the first task.
    pub fn begin(&self, shared: Shared, seed: u64, now_ns: u64, death: Death) {
        self.shared.set(Some(shared));
        self.random.seed(seed);
        self.now_ns.set(now_ns);
        self.death.set(death);
        self.patience.set(*self.random.pick(&[1, 2, 8]));
        self.tasks[0].state.set(State::Ready);
    }

    pub fn shared(&self) -> Shared {
        self.shared.get().expect("set when the process began")
    }

    /// The number of the running task.
    pub fn running(&self) -> usize {
        self.running.get()
    }

    /// Notes what the running task did; returns the event's number.
    pub fn note(&self, kind: Kind, args: [u64; 4], result: i64, data: &[&[u8]]) -> u64 {
        let (task, time_ns) = (self.running.get() as u32, self.now_ns.get());
        self.shared().append(&Event { kind, task, time_ns, args, result, data_len: 0 }, data)
    }

    /// Ends the process: what it knows is true, or the test fails.
    pub fn fail(&self, text: &str) -> ! {
        self.note(Kind::Failed, [0; 4], 0, &[text.as_bytes()]);
        syscall::exit(1)
    }

    /// Ends the process where the seed says so.
    pub fn die(&self) -> ! {
        self.note(Kind::Died, [0; 4], 0, &[]);
        syscall::exit(0)
    }

    /// A step; true if the process must die in it.
    pub fn step(&self) -> bool {
        self.now_ns.set(self.now_ns.get() + 200 + self.random.below(4000));
        self.steps.set(self.steps.get() + 1);
        matches!(self.death.get(), Death::AtStep(last) if last <= self.steps.get())
    }

    /// A step that changes files or makes changes last; true if the process must die in it.
    pub fn change(&self) -> bool {
        self.changes.set(self.changes.get() + 1);
        self.step() || matches!(self.death.get(), Death::AtChange(last) if last <= self.changes.get())
    }

    /// As [`Tasks::step`]; then another task may run.
    pub fn pass(&self) {
        if self.step() {
            self.die();
        }
        if self.patience.get() == 1 || self.random.one_in(self.patience.get()) {
            self.hand_over();
        }
    }

    /// Lets time pass: other tasks run meanwhile.
    pub fn sleep(&self, ns: u64) {
        self.wait(On::Time, Some(self.now_ns.get() + ns));
    }

    /// Waits for something, until a moment; true if that came first.
    pub fn wait(&self, on: On, until_ns: Option<u64>) -> bool {
        if self.step() {
            self.die();
        }
        let me = &self.tasks[self.running.get()];
        me.until_ns.set(until_ns.unwrap_or(u64::MAX));
        me.timed_out.set(false);
        me.state.set(State::Waits(on));
        self.hand_over();
        me.timed_out.get()
    }

    /// Wakes up to `most` tasks that wait for `on`, in any order; returns how many.
    pub fn wake(&self, on: On, most: usize) -> usize {
        let first = self.random.below(TASKS_MAX as u64) as usize;
        let (before, after) = self.tasks.split_at(first);
        let waiting = after.iter().chain(before).filter(|task| task.state.get() == State::Waits(on));
        waiting.take(most).map(|task| task.state.set(State::Ready)).count()
    }

    fn hand_over(&self) {
        let before = self.running.get();
        let next = self.next();
        if next == before {
            return;
        }
        let is_ended = self.tasks[before].state.get() == State::Free;
        self.running.set(next);
        let baton = &self.tasks[next].baton;
        baton.store(1, Ordering::Release);
        syscall::futex_wake(baton);
        if !is_ended {
            self.wait_for_baton(before);
        }
    }

    /// The task that runs next. None is ever: then all wait for each other.
    fn next(&self) -> usize {
        loop {
            let (now, mut earliest, mut ready) = (self.now_ns.get(), u64::MAX, 0);
            for task in &self.tasks {
                if let State::Waits(_) = task.state.get() {
                    if task.until_ns.get() <= now {
                        task.timed_out.set(true);
                        task.state.set(State::Ready);
                    } else {
                        earliest = earliest.min(task.until_ns.get());
                    }
                }
                ready += u64::from(task.state.get() == State::Ready);
            }
            if ready > 0 {
                let chosen = self.random.below(ready) as usize;
                let mut all = (0..TASKS_MAX).filter(|&task| self.tasks[task].state.get() == State::Ready);
                return all.nth(chosen).expect("as many as were counted");
            }
            if earliest == u64::MAX {
                self.fail("all threads wait for each other");
            }
            self.now_ns.set(earliest);
        }
    }

    /// For a thread that is not running: returns when it is.
    pub fn wait_for_baton(&self, task: usize) {
        let baton = &self.tasks[task].baton;
        while baton.swap(0, Ordering::Acquire) == 0 {
            syscall::futex_wait(baton, 0);
        }
        self.ending.take().into_iter().for_each(syscall::wait_for_end);
    }

    /// A place for a thread that is about to begin.
    pub fn add(&self) -> usize {
        let free = self.tasks.iter().position(|task| task.state.get() == State::Free);
        let task = free.unwrap_or_else(|| self.fail("too many threads"));
        self.tasks[task].state.set(State::Ready);
        task
    }

    /// The thread could not begin.
    pub fn remove(&self, task: usize) {
        self.tasks[task].state.set(State::Free);
    }

    fn thread(&self, id: libc::pthread_t) -> Option<&Cell<Option<Thread>>> {
        self.threads.iter().find(|thread| thread.get().is_some_and(|thread| thread.id == id))
    }

    /// The thread has begun; somebody may join it.
    pub fn begun(&self, id: libc::pthread_t) {
        let free = || self.threads.iter().find(|thread| thread.get().is_none());
        let place = self.thread(id).or_else(free).unwrap_or_else(|| self.fail("too many threads"));
        place.set(Some(Thread { id, has_ended: false }));
    }

    /// Nobody joins the thread any more.
    pub fn forget(&self, id: libc::pthread_t) {
        if let Some(thread) = self.thread(id) {
            thread.set(None);
        }
    }

    /// Returns once the thread has ended.
    pub fn join(&self, id: libc::pthread_t) {
        if self.thread(id).and_then(Cell::get).is_some_and(|thread| !thread.has_ended) {
            self.wait(On::End(id), None);
        }
    }

    /// The running task ends; the next one runs when its thread is gone.
    pub fn end(&self, id: libc::pthread_t) {
        if let Some(thread) = self.thread(id) {
            thread.set(Some(Thread { id, has_ended: true }));
        }
        self.wake(On::End(id), usize::MAX);
        self.tasks[self.running.get()].state.set(State::Free);
        self.ending.set(Some(syscall::thread()));
        self.hand_over();
    }
}
