//! Deleting snapshots from the middle, on a thread of its own.
//!
//! A command that fails may have been cut short by a kill, or by a snapshot that froze what it copied into: what became of
//! it is read from the files. One that makes no headway for long is an error.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::{JoinHandle, sleep};
use std::time::{Duration, Instant};

use anyhow::{Result, anyhow, ensure};
use rand::rngs::SmallRng;
use rand::{Rng as _, SeedableRng as _};

use super::disk::Disk;
use super::progress::{Progress, Who};

/// Most snapshots that one command deletes.
const AT_ONCE: usize = 12;
/// The newest ones stay: they are what is being taken.
const NEWEST: usize = 4;
/// With fewer, nothing is deleted any more.
pub(super) const LEFT_MIN: usize = NEWEST + AT_ONCE + 1;
/// The longest without a delete.
const HEADWAY: Duration = Duration::from_secs(300);

/// See the module documentation.
#[derive(Debug)]
pub(super) struct Deleter {
    thread: JoinHandle<Result<Deleted>>,
    shared: Arc<Shared>,
}

#[derive(Debug, Default)]
struct Shared {
    /// How many are gone.
    done: AtomicUsize,
    stop: AtomicBool,
}

/// What was done in the end.
#[derive(Debug, Default)]
pub(super) struct Deleted {
    pub(super) names: Vec<String>,
    /// How often a command failed.
    pub(super) cut_short: usize,
}

impl Deleted {
    fn so_far(&self, of: usize, at_once: usize) -> String {
        format!("{} of {of} deletes, {} cut short, {at_once} at once", self.names.len(), self.cut_short)
    }
}

impl Deleter {
    /// Begins to delete `count` snapshots of `disk`.
    pub(super) fn start(disk: Disk, count: usize, seed: u64, progress: Progress) -> Self {
        let shared = Arc::new(Shared::default());
        let own = Arc::clone(&shared);
        let mut random = SmallRng::seed_from_u64(seed ^ 0xde1e7e);
        let thread = std::thread::spawn(move || {
            let deleted = delete_all(&disk, count, &mut random, &own, &progress);
            progress.done(Who::Deleter);
            deleted
        });
        Self { thread, shared }
    }

    /// Snapshots deleted so far.
    pub(super) fn done(&self) -> usize {
        self.shared.done.load(Ordering::Relaxed)
    }

    /// Makes sure that it has not ended early.
    ///
    /// # Errors
    /// When it has; [`Deleter::end`] says why.
    pub(super) fn check(&self) -> Result<()> {
        ensure!(
            !self.thread.is_finished() || self.shared.stop.load(Ordering::Relaxed),
            "deleting has failed"
        );
        Ok(())
    }

    /// Waits for its end.
    ///
    /// # Errors
    /// What made it end early.
    pub(super) fn end(self) -> Result<Deleted> {
        self.thread.join().map_err(|_| anyhow!("deleting panicked"))?
    }
}

fn delete_all(
    disk: &Disk,
    count: usize,
    random: &mut SmallRng,
    shared: &Shared,
    progress: &Progress,
) -> Result<Deleted> {
    let mut deleted = Deleted::default();
    let mut headway = Instant::now();
    loop {
        let left = count - deleted.names.len();
        if left == 0 {
            shared.stop.store(true, Ordering::Relaxed);
            return Ok(deleted);
        }
        ensure!(headway.elapsed() < HEADWAY, "no snapshot was deleted for {HEADWAY:?}");
        let names = disk.names()?;
        let chosen = choose(&names, left, random);
        if chosen.is_empty() {
            sleep(Duration::from_millis(200));
            headway = Instant::now();
            continue;
        }
        progress.now(Who::Deleter, deleted.so_far(count, chosen.len()));
        let words: Vec<&str> = [&["delete"][..], &chosen].concat();
        if !disk.ask(&words).status()?.success() {
            deleted.cut_short += 1;
            // Until the server is back.
            sleep(Duration::from_millis(300));
        }
        let after = disk.names()?;
        let is_gone = |name: &&&str| !after.iter().any(|other| other == **name);
        deleted.names.extend(chosen.iter().filter(is_gone).map(|name| (*name).to_owned()));
        if shared.done.swap(deleted.names.len(), Ordering::Relaxed) < deleted.names.len() {
            headway = Instant::now();
        }
    }
}

/// A few snapshots from the middle of `names`, which are the newest first: neighbours mostly.
fn choose<'a>(names: &'a [String], most: usize, random: &mut SmallRng) -> Vec<&'a str> {
    let Some(middle) = names.get(NEWEST..).filter(|_| names.len() > LEFT_MIN) else { return Vec::new() };
    let count = random.random_range(1..=AT_ONCE).min(most).min(names.len() - LEFT_MIN);
    let start = random.random_range(0..=middle.len() - count);
    let neighbours = &middle[start..start + count];
    // Now and then one stays in between, and falls into a range of its own.
    neighbours.iter().filter(|_| count < 3 || random.random_range(0..8) > 0).map(String::as_str).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_deleted_is_never_among_the_newest_and_never_too_much() {
        let names: Vec<String> = (0..40).map(|number| format!("s{number}")).collect();
        let mut random = SmallRng::seed_from_u64(1);
        let mut largest = 0;
        for most in (1..200).chain([3; 50]) {
            let chosen = choose(&names, most, &mut random);
            assert!(chosen.len() <= most.min(AT_ONCE));
            assert!(chosen.iter().all(|name| !names[..NEWEST].iter().any(|newest| newest == name)));
            largest = largest.max(chosen.len());
        }
        assert!(largest > 6, "{largest} at once");
        assert!(choose(&names[..NEWEST + AT_ONCE], 5, &mut random).is_empty(), "some history stays");
    }
}
