//! What of a repository may be deleted.
//!
//! A process deletes what was there when it claimed the disk, and what its own heads named, once no head from the floor on and no
//! pin names it. Three rules make a delete safe however late it happens:
//!
//! - **The floor.** A head is kept until it has not been the newest for [`KEEP`], by the clock of the process that publishes. Then a new head
//!   says that it is not: its floor is above. Floors only rise, so that what no head from the floor on names will be in none again, but
//!   for objects that were never named.
//! - **Objects that were never named** may be a shipment of another process, to be named by its next head. That process has claimed the disk, so
//!   what was listed *before* this one claimed it, or before it published, is no such shipment: its own head could not have followed.
//!   This process's own shipments are not in its list until a head of its own names them.
//! - **Pins.** Who pins a state makes the pin first and then looks which head is the newest. If that one keeps the state, a head that does not
//!   is created after the pin, and its process looks at the pins after that.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

use vmstrata_store::Planted;

use crate::head::{Head, HeadNumber, ObjectId};
use crate::look::KEEP;
use crate::pin::Pin;

/// What the process that publishes knows of heads and layers.
#[derive(Debug)]
pub(crate) struct Retention {
    /// How long heads are kept that are not the newest any more.
    keep: Duration,
    /// Its heads, from the floor on, with a time when each was the newest, since the host's boot.
    heads: VecDeque<(HeadNumber, Duration)>,
    /// What they name.
    named: BTreeMap<HeadNumber, Vec<ObjectId>>,
    /// Layers that are there, as far as it is to delete them.
    known: BTreeSet<ObjectId>,
}

impl Retention {
    /// Of a process that has claimed the disk with this head, and saw these layers before.
    pub(crate) fn new(claim: &Head, layers: impl Iterator<Item = ObjectId>, now: Duration) -> Self {
        let mut new =
            Self { keep: KEEP, heads: VecDeque::new(), named: BTreeMap::new(), known: layers.collect() };
        new.published(claim, now);
        new
    }

    /// From now on, heads are kept for so long, at least for [`KEEP`].
    pub(crate) fn keep(&mut self, time: Duration) {
        self.keep = time.max(KEEP);
    }

    /// The process has published this head, and it was the newest now.
    pub(crate) fn published(&mut self, head: &Head, now: Duration) {
        let objects: Vec<ObjectId> = head.epoch.objects().map(|object| object.id).collect();
        self.known.extend(&objects);
        self.named.insert(head.number, objects);
        self.heads.push_back((head.number, now));
        self.named = self.named.split_off(&head.floor);
        self.heads.retain(|(number, _)| *number >= head.floor);
    }

    /// The floor of a head that is published now, if it is higher than those before.
    pub(crate) fn floor(&self, now: Duration) -> Option<HeadNumber> {
        let keep = if Planted::Hasty.is_there() { Duration::ZERO } else { self.keep };
        let old = self.heads.iter().rev().find(|(_, newest)| now.saturating_sub(*newest) >= keep);
        old.map(|(number, _)| *number)
    }

    /// What no head from `floor` on names. Nothing, while that is a head of another process.
    pub(crate) fn unnamed(&self, floor: HeadNumber) -> BTreeSet<ObjectId> {
        if self.heads.front().is_none_or(|(first, _)| *first > floor) {
            return BTreeSet::new();
        }
        let named: BTreeSet<&ObjectId> = self.named.range(floor..).flat_map(|(_, named)| named).collect();
        self.known.iter().filter(|id| !named.contains(id)).copied().collect()
    }

    /// Has the process delete a layer that no head names or will name.
    pub(crate) fn discard(&mut self, id: ObjectId) {
        self.known.insert(id);
    }

    /// The layer is deleted.
    pub(crate) fn deleted(&mut self, id: ObjectId) {
        self.known.remove(&id);
    }
}

/// Takes what pinned epochs need out of what no head names.
pub(crate) fn unpinned(mut unnamed: BTreeSet<ObjectId>, pins: &[Pin]) -> BTreeSet<ObjectId> {
    for object in pins.iter().flat_map(|pin| pin.epoch.objects()) {
        unnamed.remove(&object.id);
    }
    unnamed
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::head::{DiskState, EpochNumber, Object, OwnerId};

    const SECOND: Duration = Duration::from_secs(1);

    /// The head after `below` with these layers.
    fn next(below: &Head, retention: &Retention, layers: &[ObjectId], now: Duration) -> Head {
        let object =
            |id: &ObjectId| Object { id: *id, bytes: 1, stored: 1, blake3: blake3::hash(b""), zeros: 0 };
        let mut head = Head::after(Some(below), below.owner);
        head.epoch.number = EpochNumber::NONE.next();
        let objects = layers.iter().map(object).collect();
        head.epoch.disks = vec![DiskState { name: "web".to_owned(), size: 1, objects }];
        head.floor = retention.floor(now).unwrap_or(head.floor);
        head
    }

    #[test]
    fn a_layer_may_go_ten_minutes_after_the_last_head_that_named_it() {
        let [left, merged, result] = [(); 3].map(|()| ObjectId::draw());
        let claim = Head::after(None, OwnerId::draw());
        let mut retention = Retention::new(&claim, [left].into_iter(), SECOND);
        let first = next(&claim, &retention, &[merged], 2 * SECOND);
        retention.published(&first, 2 * SECOND);
        let second = next(&first, &retention, &[result], 3 * SECOND);
        retention.published(&second, 3 * SECOND);
        assert_eq!(retention.unnamed(second.floor), BTreeSet::from([left]));
        let early = next(&second, &retention, &[result], 3 * SECOND + KEEP - Duration::from_nanos(1));
        assert_eq!(early.floor, first.number);
        let late = next(&second, &retention, &[result], 3 * SECOND + KEEP);
        assert_eq!(late.floor, second.number);
        retention.published(&late, 3 * SECOND + KEEP);
        assert_eq!(retention.unnamed(late.floor), BTreeSet::from([left, merged]));
        retention.deleted(left);
        assert_eq!(retention.unnamed(late.floor), BTreeSet::from([merged]));
    }

    #[test]
    fn heads_are_kept_for_longer_if_that_is_asked_for() {
        let claim = Head::after(None, OwnerId::draw());
        let mut retention = Retention::new(&claim, [].into_iter(), SECOND);
        for (asked, kept) in [(SECOND, KEEP), (2 * KEEP, 2 * KEEP)] {
            retention.keep(asked);
            assert_eq!(retention.floor(SECOND + kept - Duration::from_nanos(1)), None);
            assert_eq!(retention.floor(SECOND + kept), Some(claim.number));
        }
    }

    #[test]
    fn nothing_may_go_while_heads_of_another_process_are_kept() {
        let (left, first) = (ObjectId::draw(), Head::after(None, OwnerId::draw()));
        let claim = Head::after(Some(&first), OwnerId::draw());
        let mut retention = Retention::new(&claim, [left].into_iter(), SECOND);
        assert_eq!(retention.unnamed(claim.floor), BTreeSet::new());
        let late = next(&claim, &retention, &[], SECOND + KEEP);
        assert_eq!(late.floor, claim.number);
        retention.published(&late, SECOND + KEEP);
        assert_eq!(retention.unnamed(late.floor), BTreeSet::from([left]));
    }
}
