//! How a snapshot is to be kept.

use super::error::{Result, VaultError};
use super::extent::MAX_PAGES;

/// What to do when copies would lie on one device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OneDevice {
    /// Refuse: such copies are lost together.
    #[default]
    Refuse,
    /// Write them all the same.
    Allow,
}

/// How a snapshot is to be kept (PARS §4.2, Table 2).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Policy {
    /// Copies of metadata and of pages that the guest cannot live without; 1 to 16.
    pub critical_copies: u8,
    /// Copies of clean cache; up to `critical_copies`, 0 for none.
    pub clean_copies: u8,
    /// Whether copies may share a device.
    pub one_device: OneDevice,
    /// Whether pages that the store has already are not stored again.
    pub dedup: bool,
    /// Each so many-th snapshot of a guest is full: it needs no object of an older one. Those between build on one another,
    /// and the first of a guest on other guests'. So a damaged object touches at most so many of a guest's snapshots. 0: none
    /// need be full, and pages are looked for in all that the store has.
    pub full_every: u32,
    /// Compression level of zstd, -7 to 19.
    pub level: i32,
    /// Pages compressed together, 1 to 64: more shrink further, fewer are quicker to read one of.
    pub extent_pages: usize,
    /// Threads that compress and write; 0: one for each processor.
    pub threads: usize,
    /// Bytes of pages that may wait for those threads.
    pub buffer_bytes: usize,
}

impl Default for Policy {
    fn default() -> Self {
        Self {
            critical_copies: 3,
            clean_copies: 1,
            one_device: OneDevice::Refuse,
            dedup: true,
            full_every: Self::FULL_EVERY,
            level: 1,
            extent_pages: 32,
            threads: 0,
            buffer_bytes: 64 << 20,
        }
    }
}

impl Policy {
    /// The most copies of anything.
    pub const MAX_COPIES: u8 = 16;

    /// [`Self::full_every`] unless told otherwise: a quarter of a day of snapshots each 15 minutes, a day of hourly ones.
    pub const FULL_EVERY: u32 = 24;

    /// Checks the limits.
    pub(super) fn check(&self) -> Result<()> {
        let within = |what, value: i64, least: i64, most: i64| {
            if (least..=most).contains(&value) {
                Ok(())
            } else {
                Err(VaultError::Limit { what, value, least, most })
            }
        };
        let (critical, clean) = (i64::from(self.critical_copies), i64::from(self.clean_copies));
        let extent_pages = i64::try_from(self.extent_pages).unwrap_or(i64::MAX);
        let threads = i64::try_from(self.threads).unwrap_or(i64::MAX);
        within("the number of critical copies", critical, 1, Self::MAX_COPIES.into())?;
        within("the number of clean copies", clean, 0, critical)?;
        within("the compression level", self.level.into(), -7, 19)?;
        within("the number of pages in an extent", extent_pages, 1, MAX_PAGES as i64)?;
        within("the number of threads", threads, 0, 256)
    }

    /// Threads to start.
    pub(super) fn crew(&self) -> usize {
        match self.threads {
            0 => std::thread::available_parallelism().map_or(2, usize::from).min(64),
            asked => asked,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_hold_at_and_past_their_edges() {
        let fits = |change: fn(&mut Policy)| {
            let mut policy = Policy::default();
            change(&mut policy);
            policy.check().is_ok()
        };
        assert!(fits(|policy| (policy.critical_copies, policy.clean_copies) = (16, 16)));
        assert!(fits(|policy| (policy.critical_copies, policy.clean_copies) = (1, 0)));
        assert!(!fits(|policy| policy.critical_copies = 0));
        assert!(!fits(|policy| policy.critical_copies = 17));
        assert!(!fits(|policy| policy.clean_copies = 4));
        assert!(fits(|policy| policy.level = -7) && fits(|policy| policy.level = 19));
        assert!(!fits(|policy| policy.level = -8) && !fits(|policy| policy.level = 20));
        assert!(fits(|policy| policy.extent_pages = 1) && fits(|policy| policy.extent_pages = 64));
        assert!(!fits(|policy| policy.extent_pages = 0) && !fits(|policy| policy.extent_pages = 65));
    }
}
