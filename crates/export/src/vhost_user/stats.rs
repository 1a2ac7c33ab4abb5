//! Counters of what an export did. Each I/O thread counts in its own set, so counting costs a plain add.

use std::sync::atomic::{AtomicU64, Ordering};

/// Declares the live counters and the snapshot of their sums with the same fields.
macro_rules! counters {
    ($($(#[$doc:meta])* $name:ident,)*) => {
        /// What an export did since it was bound.
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        pub struct Stats {
            $($(#[$doc])* pub $name: u64,)*
        }

        /// The counters of one I/O thread; only that thread adds to them.
        #[derive(Debug, Default)]
        pub(super) struct Counters {
            $(pub(super) $name: Counter,)*
        }

        impl Counters {
            /// Adds these counters to `sum`.
            pub(super) fn add_to(&self, sum: &mut Stats) {
                $(sum.$name += self.$name.0.load(Ordering::Relaxed);)*
            }
        }
    };
}

counters! {
    /// Requests taken from rings, of all kinds.
    requests,
    /// Requests answered with an error.
    errors,
    /// Bytes asked for by read requests.
    read_bytes,
    /// Bytes brought by write requests.
    written_bytes,
    /// Notifications from drivers.
    kicks,
    /// Notifications to drivers.
    calls,
    /// Times a thread found work by looking, without being notified.
    polls,
    /// Times a thread went to sleep.
    sleeps,
}

/// A counter with one writer.
#[derive(Debug, Default)]
pub(super) struct Counter(AtomicU64);

impl Counter {
    /// Adds `count`; to be called by the one thread that owns the counter.
    #[inline]
    pub(super) fn add(&self, count: u64) {
        self.0.store(self.0.load(Ordering::Relaxed).wrapping_add(count), Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sums_are_over_all_threads() {
        let threads = [Counters::default(), Counters::default()];
        threads[0].requests.add(2);
        threads[1].requests.add(3);
        threads[1].kicks.add(1);
        let mut sum = Stats::default();
        threads.iter().for_each(|counters| counters.add_to(&mut sum));
        assert_eq!(sum, Stats { requests: 5, kicks: 1, ..Stats::default() });
    }
}
