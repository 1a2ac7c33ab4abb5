//! Runs of sectors, and the values that each of them may hold.

use std::fmt;

use super::stamp::{self, Found, SECTOR, Value};

/// A run of sectors.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Sectors {
    pub(super) start: u64,
    pub(super) count: u64,
}

impl Sectors {
    pub(super) const fn new(start: u64, count: u64) -> Self {
        Self { start, count }
    }

    pub(super) const fn end(self) -> u64 {
        self.start + self.count
    }

    pub(super) const fn has(self, sector: u64) -> bool {
        self.start <= sector && sector < self.end()
    }

    pub(super) const fn overlaps(self, other: Self) -> bool {
        self.start < other.end() && other.start < self.end()
    }

    /// Offset in bytes.
    pub(super) const fn offset(self) -> u64 {
        self.start * SECTOR as u64
    }

    /// Length in bytes.
    pub(super) const fn bytes(self) -> usize {
        self.count as usize * SECTOR
    }
}

/// The values that a range of sectors may hold.
#[derive(Clone, Debug, Default)]
pub(super) struct View {
    pub(super) start: u64,
    /// One of each sector's values.
    pub(super) first: Vec<Value>,
    /// All others.
    pub(super) more: Vec<(u64, Value)>,
    /// What was in flight, or began meanwhile.
    pub(super) meanwhile: Vec<(Sectors, Value)>,
}

impl View {
    /// Sectors that it speaks of.
    pub(super) fn len(&self) -> u64 {
        self.first.len() as u64
    }

    /// Whether a read beside a change may have found this: the host copies neither in one step, so words of both may meet in
    /// a sector.
    fn may_be_torn(&self, sector: u64, bytes: &[u8]) -> bool {
        let mut words: Vec<u64> = self.allowed(sector).iter().map(|value| value.0).collect();
        words.push(sector);
        stamp::words(bytes).all(|word| words.contains(&word))
    }

    /// Whether nothing was in flight there.
    pub(super) fn is_quiet(&self, sector: u64) -> bool {
        !self.meanwhile.iter().any(|(range, _)| range.has(sector))
    }

    fn allowed(&self, sector: u64) -> Vec<Value> {
        let mut values = vec![self.first[(sector - self.start) as usize]];
        values.extend(self.more.iter().filter(|(of, _)| *of == sector).map(|(_, value)| *value));
        values.extend(self.meanwhile.iter().filter(|(range, _)| range.has(sector)).map(|(_, value)| *value));
        values
    }

    /// Checks the sectors in `bytes`, which begin at `sector`, and were read when nothing was in flight.
    ///
    /// # Errors
    /// The first sector with a value that it may not hold.
    pub(super) fn check(&self, sector: u64, bytes: &[u8]) -> Result<(), Wrong> {
        self.check_with(sector, bytes, |_, _| false)
    }

    /// As [`View::check`], of a read that ran beside the changes.
    pub(super) fn check_beside(&self, sector: u64, bytes: &[u8]) -> Result<(), Wrong> {
        self.check_with(sector, bytes, |sector, bytes| {
            !self.is_quiet(sector) && self.may_be_torn(sector, bytes)
        })
    }

    fn check_with(
        &self,
        sector: u64,
        bytes: &[u8],
        excuse: impl Fn(u64, &[u8]) -> bool,
    ) -> Result<(), Wrong> {
        for (sector, bytes) in (sector..).zip(bytes.chunks(SECTOR)) {
            let found = stamp::read(bytes, sector);
            let first = self.first[(sector - self.start) as usize];
            let is_right = |value: Value| value == first || self.allowed(sector).contains(&value);
            if !matches!(found, Found::Value(value) if is_right(value)) && !excuse(sector, bytes) {
                return Err(Wrong { sector, found, allowed: self.allowed(sector) });
            }
        }
        Ok(())
    }
}

/// A sector that holds what it may not.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Wrong {
    pub(super) sector: u64,
    pub(super) found: Found,
    pub(super) allowed: Vec<Value>,
}

impl fmt::Display for Wrong {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let allowed: Vec<String> = self.allowed.iter().map(Value::to_string).collect();
        write!(f, "sector {}: found {}, allowed {}", self.sector, self.found, allowed.join(" or "))
    }
}

impl std::error::Error for Wrong {}
