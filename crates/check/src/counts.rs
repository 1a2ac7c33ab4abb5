//! How often each host cluster is referenced, and as what: one byte per cluster.
//!
//! ```text
//!    7           6       5      4        0
//!  ┌───────────┬───────┬──────┬───────────┐
//!  │ exclusive │ table │ data │ references│   31 references: the number is in the overflow map
//!  └───────────┴───────┴──────┴───────────┘
//! ```
//!
//! Place in the data flow: [`super::roots`] and [`super::entries`] add every reference they meet, from several threads;
//! [`super::compare`] and [`super::repair`] read. Pages of counters come into being when something in them is referenced, so that a
//! sparse or hostile file costs what it really references; past the memory limit counting stops and says so.
//!
//! Invariant: additions commute, so the result does not depend on the order of threads.

use std::collections::HashMap;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};

use parking_lot::Mutex;

/// What a cluster is used as; discriminants are flags of a counter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Use {
    /// Guest data, plain or compressed. May be shared by many entries.
    Data = 0x20,
    /// An L2 table. May be shared by the L1 tables of snapshots.
    Table = 0x40,
    /// Anything else, which never shares a cluster with anything.
    Exclusive = 0x80,
}

/// Counters in a page.
pub(crate) const PAGE: u64 = 4096;
const REFERENCES: u8 = 0x1f;

/// References to one cluster.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Count {
    pub(crate) references: u64,
    uses: u8,
}

impl Count {
    /// Whether the cluster is used as `what`, among others perhaps.
    pub(crate) fn is(self, what: Use) -> bool {
        self.uses & what as u8 != 0
    }

    /// Whether things share the cluster that never may, whatever its refcount.
    pub(crate) fn overlaps(self) -> bool {
        self.uses.count_ones() > 1 || self.is(Use::Exclusive) && self.references > 1
    }
}

/// Counters of [`PAGE`] clusters, once one of them is referenced.
type Page = OnceLock<Box<[AtomicU8]>>;

/// Reference counts of all clusters of a file.
#[derive(Debug)]
pub(crate) struct Counts {
    clusters: u64,
    pages: Vec<Page>,
    overflow: Mutex<HashMap<u64, u64>>,
    bytes: AtomicU64,
    bytes_max: u64,
    exhausted: AtomicBool,
}

impl Counts {
    /// Counters for `clusters` clusters, all zero, which may grow to `bytes_max` bytes.
    pub(crate) fn new(clusters: u64, bytes_max: u64) -> Self {
        let pages = (0..clusters.div_ceil(PAGE)).map(|_| OnceLock::new()).collect();
        let (bytes, exhausted) = (AtomicU64::new(0), AtomicBool::new(false));
        Self { clusters, pages, overflow: Mutex::default(), bytes, bytes_max, exhausted }
    }

    /// Clusters there are counters for.
    pub(crate) fn clusters(&self) -> u64 {
        self.clusters
    }

    /// Whether the memory limit was reached, so that counts are missing.
    pub(crate) fn is_exhausted(&self) -> bool {
        self.exhausted.load(Ordering::Relaxed)
    }

    /// Adds `weight` references to `cluster`.
    ///
    /// # Panics
    /// When the cluster is out of range.
    pub(crate) fn add(&self, cluster: u64, weight: u64, what: Use) {
        let page = &self.pages[(cluster / PAGE) as usize];
        let Some(page) = page.get().map(|page| &**page).or_else(|| self.make(page)) else { return };
        let counter = &page[(cluster % PAGE) as usize];
        let mut old = counter.load(Ordering::Relaxed);
        loop {
            let sum = u64::from(old & REFERENCES) + weight;
            let full = sum >= u64::from(REFERENCES);
            let new = (old & !REFERENCES) | what as u8 | if full { REFERENCES } else { sum as u8 };
            match counter.compare_exchange_weak(old, new, Ordering::Relaxed, Ordering::Relaxed) {
                Ok(_) if full => {
                    // From the first overflow on the map holds the whole number.
                    let more = if old & REFERENCES == REFERENCES { weight } else { sum };
                    let mut overflow = self.overflow.lock();
                    let references = overflow.entry(cluster).or_default();
                    *references = references.saturating_add(more);
                    return;
                }
                Ok(_) => return,
                Err(now) => old = now,
            }
        }
    }

    #[cold]
    fn make<'a>(&self, page: &'a Page) -> Option<&'a [AtomicU8]> {
        if self.bytes.fetch_add(PAGE, Ordering::Relaxed) + PAGE > self.bytes_max {
            self.exhausted.store(true, Ordering::Relaxed);
            return page.get().map(|page| &**page);
        }
        Some(page.get_or_init(|| (0..PAGE).map(|_| AtomicU8::new(0)).collect()))
    }

    /// The references to `cluster`; none outside the range.
    pub(crate) fn get(&self, cluster: u64) -> Count {
        let page = self.pages.get((cluster / PAGE) as usize).and_then(OnceLock::get);
        page.map_or(Count::default(), |page| self.decode(cluster, &page[(cluster % PAGE) as usize]))
    }

    fn decode(&self, cluster: u64, counter: &AtomicU8) -> Count {
        let value = counter.load(Ordering::Relaxed);
        let references = match value & REFERENCES {
            REFERENCES => self.overflow.lock()[&cluster],
            few => few.into(),
        };
        Count { references, uses: value & !REFERENCES }
    }

    /// Whether any cluster of the page that holds `cluster` is referenced, or may be.
    pub(crate) fn has_page(&self, cluster: u64) -> bool {
        self.pages.get((cluster / PAGE) as usize).is_some_and(|page| page.get().is_some())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_go_past_what_a_byte_holds() {
        let counts = Counts::new(10_000, 1 << 20);
        for weight in [1, 29, 1, 1, 1000, u64::from(u32::MAX)] {
            counts.add(9_999, weight, Use::Data);
        }
        assert_eq!(counts.get(9_999).references, 1032 + u64::from(u32::MAX));
        assert_eq!(counts.get(9_998), Count::default());
        assert_eq!(counts.get(1 << 40), Count::default());
        assert!(counts.has_page(9_000) && !counts.has_page(0));
    }

    #[test]
    fn threads_add_up() {
        let counts = Counts::new(64, 1 << 20);
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| (0..64_000).for_each(|n| counts.add(n % 64, 1, Use::Data)));
            }
        });
        assert!((0..64).all(|cluster| counts.get(cluster).references == 4_000));
    }

    #[test]
    fn only_data_and_l2_tables_may_be_shared_and_only_among_themselves() {
        let counts = Counts::new(8, 1 << 20);
        for (cluster, uses) in [
            (0, &[Use::Data, Use::Data][..]),
            (1, &[Use::Table, Use::Table]),
            (2, &[Use::Exclusive]),
            (3, &[Use::Data, Use::Table]),
            (4, &[Use::Exclusive, Use::Exclusive]),
            (5, &[Use::Exclusive, Use::Data]),
        ] {
            uses.iter().for_each(|&what| counts.add(cluster, 1, what));
        }
        let overlapping: Vec<_> = (0..8).filter(|&cluster| counts.get(cluster).overlaps()).collect();
        assert_eq!(overlapping, [3, 4, 5]);
    }

    #[test]
    fn the_memory_limit_stops_counting() {
        let counts = Counts::new(1 << 20, 2 * PAGE);
        (0..4).for_each(|page| counts.add(page * PAGE, 1, Use::Data));
        assert!(counts.is_exhausted());
        assert_eq!((0..4).filter(|&page| counts.has_page(page * PAGE)).count(), 2);
    }
}
