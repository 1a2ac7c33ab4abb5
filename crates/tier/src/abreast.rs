//! Work for a repository that is far, several items at a time.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

/// Runs `run` for each item, on so many threads at most, in any order, until it returns false for one.
pub(crate) fn each<T: Sync>(items: &[T], threads: usize, run: impl Fn(&T) -> bool + Sync) {
    let next = AtomicUsize::new(0);
    let work = || {
        while let Some(item) = items.get(next.fetch_add(1, Ordering::Relaxed)) {
            if !run(item) {
                next.store(items.len(), Ordering::Relaxed);
            }
        }
    };
    thread::scope(|scope| {
        for _ in 1..threads.min(items.len()) {
            // Without it, the others do its part.
            let _ = thread::Builder::new().name("abreast".to_owned()).spawn_scoped(scope, work);
        }
        work();
    });
}

/// What `there` makes on a thread of its own, and `here` on this one.
pub(crate) fn beside<A: Send, B>(there: impl Fn() -> A + Copy + Send, here: impl FnOnce() -> B) -> (A, B) {
    thread::scope(|scope| {
        let other = thread::Builder::new().name("abreast".to_owned()).spawn_scoped(scope, there);
        let made = here();
        // Without the thread, afterwards.
        (other.map_or_else(|_| there(), |other| other.join().expect("does not panic")), made)
    })
}
