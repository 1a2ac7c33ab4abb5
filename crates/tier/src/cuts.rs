//! The epochs that a host's copy has as layers, of each of its disks.
//!
//! ```text
//!              epoch 5   6   7   8
//!   log           │      │   │   │      5 is published, 6 and 8 are pending
//!   data          │      │       │      7 is torn: its process ended, or failed, between the disks
//! ```
//!
//! An epoch is a state only if all disks have it: they were then cut at one instant. What a disk has of a torn one is merged away, and the
//! next epoch has what it held.

use std::collections::BTreeSet;
use std::path::PathBuf;

use crate::head::EpochNumber;

/// A layer of a disk on this host that is an epoch.
#[derive(Clone, Debug)]
pub(crate) struct Cut {
    pub(crate) number: EpochNumber,
    pub(crate) layer: PathBuf,
    pub(crate) time_ns: u64,
    pub(crate) size: u64,
}

/// See the module documentation.
#[derive(Debug)]
pub(crate) struct Cuts {
    /// Oldest first. `[disk][cut]`
    disks: Vec<Vec<Cut>>,
    torn: BTreeSet<EpochNumber>,
    /// What was published when the process began.
    begun: EpochNumber,
}

impl Cuts {
    /// Those that a process finds which begins when the epoch `begun` is published.
    pub(crate) fn new(disks: Vec<Vec<Cut>>, begun: EpochNumber) -> Self {
        let mut new = Self { disks, torn: BTreeSet::new(), begun };
        let numbers = new.disks.iter().flatten().map(|cut| cut.number);
        let torn = numbers.filter(|number| *number > begun && new.of(*number).count() < new.disks.len());
        new.torn = torn.collect();
        new
    }

    /// The newest epoch, on this host or published.
    pub(crate) fn newest(&self) -> EpochNumber {
        let last = self.disks.iter().filter_map(|cuts| Some(cuts.last()?.number));
        last.chain(self.torn.last().copied()).fold(self.begun, EpochNumber::max)
    }

    /// The epochs above one that all disks have, oldest first.
    pub(crate) fn above(&self, published: EpochNumber) -> Vec<EpochNumber> {
        let numbers = self.disks[0].iter().map(|cut| cut.number);
        numbers.filter(|number| *number > published && !self.torn.contains(number)).collect()
    }

    /// What the disks have of an epoch, in their order.
    pub(crate) fn of(&self, number: EpochNumber) -> impl Iterator<Item = &Cut> {
        self.disks.iter().filter_map(move |cuts| cuts.iter().find(|cut| cut.number == number))
    }

    /// The epochs of a disk, oldest first.
    pub(crate) fn of_disk(&self, disk: usize) -> &[Cut] {
        &self.disks[disk]
    }

    /// All disks were cut: their layers, in their order.
    pub(crate) fn add(&mut self, cuts: impl Iterator<Item = Cut>) {
        self.disks.iter_mut().zip(cuts).for_each(|(all, cut)| all.push(cut));
    }

    /// They were to be cut, and some may not have been.
    pub(crate) fn failed(&mut self, number: EpochNumber) {
        self.torn.insert(number);
    }

    /// What a disk has now.
    pub(crate) fn relist(&mut self, disk: usize, cuts: Vec<Cut>) {
        self.disks[disk] = cuts;
    }

    /// What a disk has of torn epochs.
    pub(crate) fn torn_of(&self, disk: usize) -> Vec<EpochNumber> {
        let numbers = self.disks[disk].iter().map(|cut| cut.number);
        numbers.filter(|number| self.torn.contains(number)).collect()
    }

    /// Whether there are torn epochs.
    pub(crate) fn is_torn(&self) -> bool {
        !self.torn.is_empty()
    }

    /// No disk has anything of these any more.
    pub(crate) fn mended(&mut self, torn: &BTreeSet<EpochNumber>) {
        self.torn.retain(|number| !torn.contains(number));
    }

    /// The torn epochs.
    pub(crate) fn torn(&self) -> &BTreeSet<EpochNumber> {
        &self.torn
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn number(count: u64) -> EpochNumber {
        (0..count).fold(EpochNumber::NONE, |number, _| number.next())
    }

    fn cut(count: u64) -> Cut {
        Cut { number: number(count), layer: PathBuf::new(), time_ns: 0, size: 0 }
    }

    fn numbers(numbers: impl IntoIterator<Item = EpochNumber>) -> Vec<u64> {
        numbers.into_iter().map(EpochNumber::get).collect()
    }

    #[test]
    fn an_epoch_that_a_disk_lacks_is_no_state_unless_it_is_published() {
        let cuts = |numbers: &[u64]| numbers.iter().map(|number| cut(*number)).collect();
        let mut found = Cuts::new(vec![cuts(&[4, 5, 6, 7, 8]), cuts(&[5, 6, 8, 9])], number(5));
        assert_eq!(numbers(found.above(number(5))), [6, 8]);
        assert_eq!((numbers(found.torn_of(0)), numbers(found.torn_of(1))), (vec![7], vec![9]));
        assert_eq!(found.newest(), number(9));
        found.failed(number(10));
        assert_eq!(found.newest(), number(10));
        found.relist(0, cuts(&[5, 6, 8]));
        found.relist(1, cuts(&[5, 6, 8]));
        let torn = found.torn().clone();
        found.mended(&torn);
        assert!(!found.is_torn());
        found.add([cut(9), cut(9)].into_iter());
        assert_eq!(numbers(found.above(number(6))), [8, 9]);
        assert_eq!(found.of(number(9)).count(), 2);
    }
}
