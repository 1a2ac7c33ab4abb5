//! Work shared by threads.

use std::iter;
use std::panic::resume_unwind;
use std::thread;

/// Runs `work` on so many threads, of which this one is the first; on fewer where the host has no more. Returns what each made
/// of it.
///
/// # Panics
/// When `work` does.
pub fn on_threads<T: Send>(threads: usize, work: impl Fn() -> T + Sync) -> Vec<T> {
    thread::scope(|scope| {
        let start = |_| thread::Builder::new().spawn_scoped(scope, &work).ok();
        let others: Vec<_> = (1..threads).map_while(start).collect();
        let own = work();
        let joined =
            others.into_iter().map(|other| other.join().unwrap_or_else(|panic| resume_unwind(panic)));
        iter::once(own).chain(joined).collect()
    })
}
