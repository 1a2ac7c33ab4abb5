//! What the workers, the disturbances and the judges of a round share.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use anyhow::Error;

use super::config::Config;
use super::export::Ask;
use super::model::Model;
use super::place::Place;
use super::trail::Event;

/// What was done, for the line of a round.
#[derive(Debug, Default)]
pub(super) struct Counts {
    pub(super) reads: AtomicU64,
    pub(super) writes: AtomicU64,
    pub(super) trims: AtomicU64,
    pub(super) zeroes: AtomicU64,
    pub(super) flushes: AtomicU64,
    /// Requests that failed while there was no room.
    pub(super) refused: AtomicU64,
    /// Requests whose answer a kill has kept.
    pub(super) lost: AtomicU64,
}

impl Counts {
    pub(super) fn count(&self, ask: Ask) {
        let counter = match ask {
            Ask::Read => &self.reads,
            Ask::Write => &self.writes,
            Ask::Trim => &self.trims,
            Ask::Zero { .. } => &self.zeroes,
            Ask::Flush => &self.flushes,
        };
        counter.fetch_add(1, Ordering::Relaxed);
    }

    /// All requests that were answered.
    pub(super) fn requests(&self) -> u64 {
        [&self.reads, &self.writes, &self.trims, &self.zeroes, &self.flushes]
            .iter()
            .map(|counter| counter.load(Ordering::Relaxed))
            .sum()
    }
}

/// What workers, disturbances and judges of a round share.
#[derive(Debug)]
pub(super) struct Shared {
    pub(super) config: Config,
    pub(super) place: Place,
    pub(super) counts: Counts,
    model: Mutex<Model>,
    /// No new requests; a worker ends when it has its answers.
    pub(super) stop: AtomicBool,
    /// A kill is coming: connections may end.
    pub(super) kill: AtomicBool,
    /// The server is dead: no answer comes any more.
    pub(super) dead: AtomicBool,
    /// Whether a file system was filled, and how often that has changed.
    full: AtomicBool,
    full_changes: AtomicU64,
    failure: Mutex<Option<Error>>,
    failed: Condvar,
}

impl Shared {
    pub(super) fn new(config: Config, place: Place, model: Model) -> Self {
        Self {
            config,
            place,
            counts: Counts::default(),
            model: Mutex::new(model),
            stop: AtomicBool::new(false),
            kill: AtomicBool::new(false),
            dead: AtomicBool::new(false),
            full: AtomicBool::new(false),
            full_changes: AtomicU64::new(0),
            failure: Mutex::new(None),
            failed: Condvar::new(),
        }
    }

    pub(super) fn model(&self) -> MutexGuard<'_, Model> {
        self.model.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Puts a note into the trail.
    pub(super) fn note(&self, text: String) {
        self.model().trail.push(Event::Note(text));
    }

    /// The first failure is the one that is told.
    pub(super) fn fail(&self, error: Error) {
        let mut failure = self.failure.lock().unwrap_or_else(PoisonError::into_inner);
        failure.get_or_insert(error);
        self.stop.store(true, Ordering::SeqCst);
        self.failed.notify_all();
    }

    /// # Errors
    /// What a worker failed with.
    pub(super) fn check(&self) -> anyhow::Result<()> {
        let mut failure = self.failure.lock().unwrap_or_else(PoisonError::into_inner);
        failure.take().map_or(Ok(()), Err)
    }

    /// Lets the workers work for a while.
    ///
    /// # Errors
    /// As soon as one of them fails, with that.
    pub(super) fn rest(&self, time: Duration) -> anyhow::Result<()> {
        let failure = self.failure.lock().unwrap_or_else(PoisonError::into_inner);
        let waited = self.failed.wait_timeout_while(failure, time, |failure| failure.is_none());
        let (mut failure, _) = waited.unwrap_or_else(PoisonError::into_inner);
        failure.take().map_or(Ok(()), Err)
    }

    /// Begins a life of the server.
    pub(super) fn begin(&self) {
        for flag in [&self.stop, &self.kill, &self.dead] {
            flag.store(false, Ordering::SeqCst);
        }
    }

    /// No new requests.
    pub(super) fn stop(&self) {
        self.stop.store(true, Ordering::SeqCst);
    }

    /// A kill is coming.
    pub(super) fn expect_kill(&self) {
        self.kill.store(true, Ordering::SeqCst);
    }

    /// The server is dead.
    pub(super) fn died(&self) {
        self.dead.store(true, Ordering::SeqCst);
    }

    /// From now on requests may fail, or they may not.
    pub(super) fn set_full(&self, full: bool) {
        self.full.store(full, Ordering::SeqCst);
        self.full_changes.fetch_add(1, Ordering::SeqCst);
    }

    /// Whether what began when there had been `changes` changes may have met a full file system.
    pub(super) fn met_full(&self, changes: u64) -> bool {
        self.full.load(Ordering::SeqCst) || self.full_changes() != changes || self.place.images.is_scarce()
    }

    pub(super) fn full_changes(&self) -> u64 {
        self.full_changes.load(Ordering::SeqCst)
    }
}
