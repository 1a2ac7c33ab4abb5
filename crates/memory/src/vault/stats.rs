//! What a snapshot holds, what it costs, and what each cause saved.

use serde::{Deserialize, Serialize};

use crate::address::PAGE_BYTES;

/// Counts of one snapshot, taken while it was written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Stats {
    /// Pages of the machine.
    pub pages: u64,
    /// Pages that were free.
    pub free: u64,
    /// Pages of clean cache, whatever became of them.
    pub clean: u64,
    /// Critical pages of zeros.
    pub zero_critical: u64,
    /// Clean pages of zeros.
    pub zero_clean: u64,
    /// Clean pages that are to be read again from the guest's disk.
    pub refilled: u64,
    /// Clean pages that are not kept.
    pub dropped: u64,
    /// Critical pages that this snapshot had already.
    pub same_critical: u64,
    /// Clean pages that this snapshot had already.
    pub same_clean: u64,
    /// Critical pages that older snapshots had.
    pub older_critical: u64,
    /// Clean pages that older snapshots had.
    pub older_clean: u64,
    /// Critical pages written.
    pub stored_critical: u64,
    /// Clean pages written.
    pub stored_clean: u64,
    /// Bytes of one copy of the object with critical pages, without those of metadata.
    pub bytes_critical: u64,
    /// Bytes of one copy of the object with clean pages.
    pub bytes_clean: u64,
    /// Bytes that one copy of the metadata added; without those of its own object where it is read from that.
    pub bytes_metadata: u64,
    /// Copies of critical pages and metadata.
    pub copies_critical: u64,
    /// Copies of clean pages.
    pub copies_clean: u64,
}

/// Against as many full copies as there are of critical pages: bytes that each cause saved, one after another in this
/// order, so that `full` less all of them is `used`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Savings {
    /// Bytes of that many full copies.
    pub full: u64,
    /// Bytes that the snapshot added to the store, all copies.
    pub used: u64,
    /// Free pages are not stored.
    pub free: u64,
    /// Clean pages are read again from the guest's disk.
    pub refill: u64,
    /// Clean pages are kept in fewer copies, or not at all.
    pub clean: u64,
    /// Pages of zeros are not stored.
    pub zero: u64,
    /// Pages that are the same are stored once, within the snapshot.
    pub dedup: u64,
    /// Pages that older snapshots have are not stored again.
    pub older: u64,
    /// Compression; less than 0 where headers and metadata cost more than it saved.
    pub zstd: i64,
}

impl Stats {
    /// All copies of all objects that the snapshot added to the store, in bytes.
    pub fn used(&self) -> u64 {
        let critical = (self.bytes_critical + self.bytes_metadata).saturating_mul(self.copies_critical);
        critical.saturating_add(self.bytes_clean.saturating_mul(self.copies_clean))
    }

    /// What each cause saved.
    pub fn savings(&self) -> Savings {
        let bytes = |pages: u64, copies: u64| pages.saturating_mul(PAGE_BYTES as u64).saturating_mul(copies);
        let (all, clean) = (self.copies_critical, self.copies_clean);
        let kept = self.clean.saturating_sub(self.refilled + self.dropped);
        let mut savings = Savings {
            full: bytes(self.pages, all),
            used: self.used(),
            free: bytes(self.free, all),
            refill: bytes(self.refilled, all),
            clean: bytes(self.dropped, all).saturating_add(bytes(kept, all.saturating_sub(clean))),
            zero: bytes(self.zero_critical, all).saturating_add(bytes(self.zero_clean, clean)),
            dedup: bytes(self.same_critical, all).saturating_add(bytes(self.same_clean, clean)),
            older: bytes(self.older_critical, all).saturating_add(bytes(self.older_clean, clean)),
            zstd: 0,
        };
        let stored = bytes(self.stored_critical, all).saturating_add(bytes(self.stored_clean, clean));
        savings.zstd = stored as i64 - savings.used as i64;
        savings
    }

    /// Adds what a thread counted of its pages.
    pub(super) fn add(&mut self, part: &Self) {
        self.dropped += part.dropped;
        self.same_critical += part.same_critical;
        self.same_clean += part.same_clean;
        self.older_critical += part.older_critical;
        self.older_clean += part.older_clean;
        self.stored_critical += part.stored_critical;
        self.stored_clean += part.stored_clean;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_causes_add_up() {
        let page = PAGE_BYTES as u64;
        let stats = Stats {
            pages: 100,
            free: 20,
            clean: 30,
            zero_critical: 5,
            zero_clean: 1,
            refilled: 10,
            dropped: 2,
            same_critical: 4,
            same_clean: 3,
            older_critical: 6,
            older_clean: 2,
            stored_critical: 35,
            stored_clean: 12,
            bytes_critical: 20 * page,
            bytes_clean: 6 * page,
            bytes_metadata: 100,
            copies_critical: 3,
            copies_clean: 1,
        };
        let saved = stats.savings();
        assert_eq!((saved.full, saved.used), (300 * page, 66 * page + 300));
        let causes = saved.free + saved.refill + saved.clean + saved.zero + saved.dedup + saved.older;
        assert_eq!(saved.full as i64 - causes as i64 - saved.zstd, saved.used as i64);
        assert_eq!((saved.free, saved.refill, saved.clean), (60 * page, 30 * page, 42 * page));
    }
}
