//! Giving back the pages of deleted snapshots that lie in objects of which others are needed.
//!
//! An object is written anew with only the pages that are needed ([`rewrite`]), and takes the place of the old one in each of
//! its repositories, in one step. Killed between two repositories, the copies differ, and each has all that is needed; the next
//! collection makes them alike. Only who holds all repositories alone compacts.
//!
//! An object whose own snapshot is there is needed wholly, so only those of deleted snapshots are looked at.

use std::collections::BTreeSet;

use super::bytes::Malformed;
use super::copies::{ObjectCopies, OpenCopy};
use super::error::Result;
use super::live::PageSet;
use super::name::ObjectId;
use super::object::{self, Hash};
use super::place::Share;
use super::rewrite::rewrite;
use super::survey::Survey;
use super::{Listed, Vault};
use crate::address::PAGE_BYTES;

/// An object is not written anew for less.
const LEAST_BYTES: u64 = 4096;
/// Objects of which a larger share is not needed are compacted, in percent.
const MOST_DEAD: u64 = 50;
/// Of what the vault needs, in percent: with more that is not needed, other objects are compacted as well.
const MOST_DEAD_OF_ALL: u64 = 20;

/// Which objects are compacted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Compact {
    /// Those of which less than half is needed. While what is not needed is more than a fifth of what is, also those with
    /// the largest share of it.
    #[default]
    Worthwhile,
    /// All that get smaller.
    All,
}

/// An object of which something is not needed.
#[derive(Debug)]
pub(super) struct Candidate {
    pub(super) name: ObjectId,
    shares: Vec<Share>,
    needed: PageSet,
    /// Bytes of all copies that are needed.
    live: u64,
    /// Bytes of all copies that are not.
    pub(super) dead: u64,
    /// Of the copy that has most of them, bytes and percent.
    most_dead: (u64, u64),
    /// Whether its copies are the same bytes.
    is_alike: bool,
}

impl Vault {
    /// The objects that are to be compacted, among those that are `used`.
    ///
    /// # Errors
    /// [`super::VaultError::NeedsUnknown`].
    pub(super) fn due(
        &self,
        survey: &Survey,
        listed: &[Listed],
        used: &BTreeSet<ObjectId>,
        which: Compact,
    ) -> Result<Vec<Candidate>> {
        let is_asked = |name: &ObjectId| !survey.has_snapshot(name.owner);
        let (asked, whole): (Vec<ObjectId>, Vec<_>) = used.iter().partition(|name| is_asked(name));
        if asked.is_empty() {
            return Ok(Vec::new());
        }
        let mut needs = self.needs_of_all(survey, listed, |name| is_asked(&name))?;
        let candidate = |name| self.candidate(survey, name, needs.remove(&name).unwrap_or_default());
        let candidates = asked.into_iter().filter_map(candidate).collect();
        let whole = whole.into_iter().flat_map(|name| survey.copies(name)).map(|copy| copy.len).sum();
        Ok(choose(candidates, whole, which))
    }

    /// `None` when a copy is damaged: that is a repair's business.
    fn candidate(&self, survey: &Survey, name: ObjectId, needed: PageSet) -> Option<Candidate> {
        let object = ObjectCopies::open(self, survey, name);
        if !object.unopened.is_empty() {
            return None;
        }
        let (mut live, mut dead, mut most_dead) = (0, 0, (0, 0));
        let mut ends = BTreeSet::new();
        for copy in &object.copies {
            ends.insert(object::ends(name, copy.reader.as_ref()).ok()?);
            let (needed, not) = measure(name, copy, &needed).ok()?;
            (live, dead) = (live + needed, dead + not);
            most_dead = most_dead.max((not, not * 100 / (needed + not).max(1)));
        }
        let shares = survey.copies(name).iter();
        let shares = shares.map(|copy| Share { repository: copy.repository, copies: copy.copies }).collect();
        Some(Candidate { name, shares, needed, live, dead, most_dead, is_alike: ends.len() < 2 })
    }

    /// Compacts objects, the smallest first, so that there is room for larger ones. Returns how many. `progress` gets the
    /// bytes done and of all.
    ///
    /// # Errors
    /// What the repositories say; the object that failed is as it was, or in some of its repositories compacted.
    pub(super) fn compact(
        &self,
        survey: &Survey,
        mut due: Vec<Candidate>,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<usize> {
        due.sort_by_key(|candidate| candidate.live);
        let all = due.iter().map(|candidate| candidate.live).sum();
        let (mut done, mut count) = (0, 0);
        for Candidate { name, shares, needed, live, .. } in due {
            progress(done, all);
            let object = ObjectCopies::open(self, survey, name);
            match rewrite(self, &object, &needed, &shares)? {
                Some(copies) => {
                    copies.publish()?;
                    count += 1;
                }
                None => {
                    tracing::warn!("{name}: not compacted, as no copy has all that is needed of it: verify")
                }
            }
            done += live;
        }
        Ok(count)
    }
}

/// Bytes of a copy that are needed, and that are not. A page that was given back before costs nothing.
fn measure(name: ObjectId, copy: &OpenCopy, needed: &PageSet) -> Result<(u64, u64), Malformed> {
    let table = copy.table.as_ref().map_err(|malformed| *malformed)?;
    let (hashes, zeros) = (object::hashes(name, copy.reader.as_ref())?, object::hash(&[0; PAGE_BYTES]));
    let (mut live, mut dead, mut first) = (0, 0, 0);
    for (number, place) in (0..).zip(&table.extents) {
        let hashes = hashes.get(first..first + usize::from(place.pages)).unwrap_or_default();
        first += hashes.len();
        let stored = hashes.iter().filter(|hash| **hash != zeros).count() as u64;
        let needed = u64::from(needed.places(number).count_ones()).min(stored);
        let bytes = u64::from(place.len) + stored * size_of::<Hash>() as u64;
        let kept = bytes * needed / stored.max(1);
        (live, dead) = (live + kept, dead + bytes - kept);
    }
    Ok((live, dead))
}

/// Those that are to be compacted, in a vault that needs `whole` bytes of other objects.
fn choose(mut candidates: Vec<Candidate>, whole: u64, which: Compact) -> Vec<Candidate> {
    candidates.sort_by_key(|candidate| std::cmp::Reverse(candidate.most_dead.1));
    let live: u64 = whole + candidates.iter().map(|candidate| candidate.live).sum::<u64>();
    let mut dead: u64 = candidates.iter().map(|candidate| candidate.dead).sum();
    candidates.retain(|candidate| {
        let (bytes, percent) = candidate.most_dead;
        let is_much = percent > MOST_DEAD || dead * 100 > live * MOST_DEAD_OF_ALL;
        let is_worth_it = bytes >= LEAST_BYTES && (which == Compact::All || is_much);
        let is_due = is_worth_it || !candidate.is_alike;
        dead -= if is_due { candidate.dead } else { 0 };
        is_due
    });
    candidates
}

#[cfg(test)]
mod tests {
    use super::super::name::{ObjectKind, SnapshotId};
    use super::*;

    fn candidate(live: u64, dead: u64, is_alike: bool) -> Candidate {
        let name = ObjectId { owner: SnapshotId::from_bytes([1; 16]), kind: ObjectKind::Critical };
        let most_dead = (dead, dead * 100 / (live + dead));
        let (shares, needed) = Default::default();
        Candidate { name, shares, needed, live, dead, most_dead, is_alike }
    }

    fn chosen(candidates: Vec<Candidate>, whole: u64, which: Compact) -> Vec<u64> {
        choose(candidates, whole, which).iter().map(|candidate| candidate.dead).collect()
    }

    const KIB: u64 = 1024;

    #[test]
    fn an_object_is_compacted_when_less_than_half_of_it_is_needed() {
        let both = || vec![candidate(60 * KIB, 40 * KIB, true), candidate(40 * KIB, 60 * KIB, true)];
        assert_eq!(chosen(both(), 1000 * KIB, Compact::Worthwhile), [60 * KIB]);
        assert_eq!(chosen(both(), 1000 * KIB, Compact::All), [60 * KIB, 40 * KIB]);
    }

    #[test]
    fn a_vault_with_much_that_is_not_needed_compacts_more() {
        let all = vec![candidate(80 * KIB, 20 * KIB, true), candidate(60 * KIB, 40 * KIB, true)];
        // Of 140 KiB that are needed a fifth is 28.
        assert_eq!(chosen(all, 0, Compact::Worthwhile), [40 * KIB]);
    }

    #[test]
    fn copies_that_differ_are_made_alike_and_little_is_left_alone() {
        let all = || vec![candidate(0, KIB, true), candidate(100, 10, false)];
        assert_eq!(chosen(all(), 0, Compact::Worthwhile), [10]);
        assert_eq!(chosen(all(), 0, Compact::All), [10]);
    }
}
