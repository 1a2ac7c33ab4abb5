//! Whether copying up at once is worth a try: more and more seldom while the host has nothing in memory.

use std::sync::atomic::{AtomicU32, Ordering};

/// After this many misses in a row, and after more, one in 1,024 first writes still tries.
const MISSES_MAX: u32 = 10;

/// Whether what lies below is worth asking for: backs off while the last tries found nothing.
#[derive(Debug, Default)]
pub(crate) struct Backoff {
    /// In a row.
    misses: AtomicU32,
    /// First writes that do not try before the next one that does.
    passes: AtomicU32,
}

impl Backoff {
    /// Counts a first write; true if it should try. (Writers that count at the same time may count as one.)
    pub(crate) fn tries(&self) -> bool {
        let left = self.passes.load(Ordering::Relaxed);
        if left > 0 {
            self.passes.store(left - 1, Ordering::Relaxed);
        }
        left == 0
    }

    pub(crate) fn found(&self, it_was_there: bool) {
        let misses = if it_was_there { 0 } else { self.misses.load(Ordering::Relaxed) + 1 };
        self.misses.store(misses.min(MISSES_MAX), Ordering::Relaxed);
        self.passes.store((1 << misses.min(MISSES_MAX)) - 1, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn misses_in_a_row_make_tries_rarer_and_one_hit_brings_them_back() {
        let backoff = Backoff::default();
        let passed = |backoff: &Backoff| (0..).take_while(|_| !backoff.tries()).count();
        for misses in 1..=12 {
            assert!(
                backoff.tries() || passed(&backoff) == (1 << (misses - 1).min(MISSES_MAX)) - 2,
                "{misses}"
            );
            backoff.found(false);
        }
        assert_eq!(passed(&backoff), 1023);
        backoff.found(true);
        assert!((0..100).all(|_| backoff.tries()), "it is there");
    }
}
