//! What a disk may hold: for each sector, the writes whose bytes it may have.
//!
//! Both the simulated process and the simulator keep one: the process tells of each [`Deed`] before and after, in the log, and the
//! simulator catches up when the process is dead.
//!
//! A sector holds what some write left, never a mixture. It is not a write that was surely overwritten: another one began after its
//! end, and has itself ended before the read began. After a crash, a write in flight may have happened or not; after a power
//! failure that is so of all writes but those before a flush that has ended.

use std::collections::BTreeMap;

/// Bytes of a sector.
pub const SECTOR: usize = 512;

/// What guests do to the disk, as the log has it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u64)]
pub enum Deed {
    /// A write begins: its number, first sector, sectors. Number 0 writes zeros.
    Write,
    /// As above, of zeros.
    Zero,
    /// As above, of a discard: what is whole clusters reads as zeros, and the rest is left.
    Discard,
    /// A flush begins: its number.
    Flush,
    /// What began under this number has ended, and is on stable storage: number, whether it asked for that.
    Ended,
    /// The whole disk was read after it was opened: a stamp for each sector.
    Seen,
    /// A snapshot is about to be taken: its number.
    Snapshot,
    /// The snapshot was read: its number, a stamp for each sector.
    SnapshotSeen,
    /// A snapshot is about to be dropped: its number.
    Drop,
    /// A disk is about to be made that is as a snapshot is: its number, and the snapshot's.
    Clone,
    /// The disk is about to be taken back to a snapshot: number of the write that this is, and of the snapshot.
    Revert,
    /// The disk was closed: all that has ended is on stable storage.
    Closed,
    /// The disk takes no more writes: what is not on stable storage may be lost.
    Failed,
}

impl Deed {
    const ALL: [Self; 13] = [
        Self::Write,
        Self::Zero,
        Self::Discard,
        Self::Flush,
        Self::Ended,
        Self::Seen,
        Self::Snapshot,
        Self::SnapshotSeen,
        Self::Drop,
        Self::Clone,
        Self::Revert,
        Self::Closed,
        Self::Failed,
    ];

    pub fn of(number: u64) -> Self {
        Self::ALL[number as usize]
    }
}

/// A write to one sector.
#[derive(Clone, Copy, Debug)]
struct Write {
    /// The number in each word of it; 0 for zeros.
    stamp: u64,
    /// Of the deed.
    number: u64,
    begun: u64,
    ended: Option<u64>,
    is_stable: bool,
    /// Whether it happens to the sector at all.
    is_sure: bool,
}

/// Where a state of the disk is kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Keeps {
    /// In a layer below the disk.
    Snapshot,
    /// In a disk of its own.
    Clone,
}

/// A state of the disk that is kept.
#[derive(Clone, Debug)]
struct Snapshot {
    keeps: Keeps,
    begun: u64,
    ended: Option<u64>,
    /// What it holds, once it was read, and when that was.
    stamps: Option<Vec<u64>>,
    seen: Option<u64>,
    /// Whether it may be gone.
    is_dropped: bool,
}

/// See the module documentation.
#[derive(Clone, Debug)]
pub struct History {
    clock: u64,
    sectors: Vec<Vec<Write>>,
    /// When flushes began that have not ended.
    flushes: BTreeMap<u64, u64>,
    snapshots: BTreeMap<u64, Snapshot>,
    /// Whether the power has failed since the disk was read.
    lost_power: bool,
    /// Whether the disk has failed.
    has_failed: bool,
    /// Whether it had when it was used last, so that its journal may be gone.
    pub had_failed: bool,
}

/// A state that is kept.
#[derive(Clone, Copy, Debug)]
pub struct State {
    pub number: u64,
    pub keeps: Keeps,
    /// It was made, and not dropped.
    pub must_be_there: bool,
    /// It was read before.
    pub is_known: bool,
}

/// What a look at the disk, or at a state of it, may find.
#[derive(Clone, Copy, Debug)]
pub struct Look {
    /// Writes that had ended by then are seen.
    from: u64,
    /// Those that began later are not.
    until: u64,
}

impl History {
    /// Of a disk of zeros.
    pub fn new(sectors: usize) -> Self {
        let zeros = Write { stamp: 0, number: 0, begun: 0, ended: Some(0), is_stable: true, is_sure: true };
        Self {
            clock: 1,
            sectors: vec![vec![zeros]; sectors],
            flushes: BTreeMap::new(),
            snapshots: BTreeMap::new(),
            lost_power: false,
            has_failed: false,
            had_failed: false,
        }
    }

    /// The number of a deed that begins now.
    pub fn next(&self) -> u64 {
        self.clock + 1
    }

    /// A look that begins now, and goes on for as long as it takes.
    pub fn look(&self) -> Look {
        Look { from: self.clock, until: u64::MAX }
    }

    /// The states that are kept, or may be.
    pub fn states(&self) -> Vec<State> {
        let state = |(&number, snapshot): (&u64, &Snapshot)| State {
            number,
            keeps: snapshot.keeps,
            must_be_there: snapshot.ended.is_some() && !snapshot.is_dropped,
            is_known: snapshot.stamps.is_some(),
        };
        self.snapshots.iter().map(state).collect()
    }

    /// Whether what was read of a snapshot is what the disk held when it was taken.
    ///
    /// # Errors
    /// What is wrong.
    pub fn check_snapshot(&self, number: u64, stamps: &[u64]) -> Result<(), String> {
        let Snapshot { begun, ended, stamps: known, .. } = &self.snapshots[&number];
        match known {
            Some(known) => match known.iter().zip(stamps).position(|(known, found)| known != found) {
                Some(at) => Err(format!("sector {at} holds write {}, and held {}", stamps[at], known[at])),
                None => Ok(()),
            },
            None => {
                let look = Look { from: *begun, until: ended.unwrap_or(u64::MAX) };
                self.check(0, stamps, look)
            }
        }
    }

    /// Whether sectors from `first` on may hold what was read of them.
    ///
    /// # Errors
    /// The first that may not, and what it may hold.
    pub fn check(&self, first: usize, stamps: &[u64], look: Look) -> Result<(), String> {
        let wrong = (first..).zip(stamps).find(|&(sector, &stamp)| !self.allows(sector, stamp, look));
        wrong.map_or(Ok(()), |(sector, stamp)| {
            let writes = &self.sectors[sector];
            let mut allowed: Vec<u64> = writes.iter().map(|write| write.stamp).collect();
            allowed.retain(|&stamp| self.allows(sector, stamp, look));
            Err(format!("sector {sector} holds write {stamp}, but may hold {allowed:?}: {writes:?}"))
        })
    }

    /// Takes note of a deed.
    pub fn enter(&mut self, deed: Deed, args: [u64; 3], stamps: &[u64]) {
        self.clock += 1;
        let now = self.clock;
        let [number, first, second] = args;
        let may_happen = !self.has_failed;
        let mut begin = |stamp, is_sure| {
            let is_sure = is_sure && may_happen;
            for sector in &mut self.sectors[first as usize..(first + second) as usize] {
                sector.push(Write { stamp, number, begun: now, ended: None, is_stable: false, is_sure });
            }
        };
        match deed {
            Deed::Write => begin(number, true),
            Deed::Zero => begin(0, true),
            Deed::Discard => begin(0, false),
            Deed::Flush => drop(self.flushes.insert(number, now)),
            Deed::Ended => self.end(number, first != 0),
            Deed::Seen => self.seen(stamps),
            Deed::Snapshot => {
                let (keeps, begun) = (Keeps::Snapshot, now);
                let snapshot =
                    Snapshot { keeps, begun, ended: None, stamps: None, seen: None, is_dropped: false };
                self.snapshots.insert(number, snapshot);
            }
            Deed::Clone => {
                let clone = Snapshot { keeps: Keeps::Clone, ended: None, ..self.snapshots[&first].clone() };
                self.snapshots.insert(number, clone);
            }
            Deed::SnapshotSeen => {
                let snapshot = self.snapshots.get_mut(&number).expect("taken before it is read");
                snapshot.stamps = Some(stamps.to_vec());
                snapshot.seen = Some(now);
            }
            Deed::Drop => {
                if let Some(snapshot) = self.snapshots.get_mut(&number) {
                    snapshot.is_dropped = true;
                }
            }
            Deed::Revert => {
                let stamps = self.snapshots[&first].stamps.as_ref().expect("read before");
                for (sector, &stamp) in self.sectors.iter_mut().zip(stamps) {
                    let write =
                        Write { stamp, number, begun: now, ended: None, is_stable: false, is_sure: true };
                    sector.push(write);
                }
                let newer = self.snapshots.range_mut(first + 1..).map(|(_, newer)| newer);
                newer
                    .filter(|newer| newer.keeps == Keeps::Snapshot)
                    .for_each(|newer| newer.is_dropped = true);
            }
            Deed::Closed => self.flushed(now),
            Deed::Failed => {
                self.has_failed = true;
                self.doubt();
            }
        }
    }

    fn end(&mut self, number: u64, is_stable: bool) {
        let now = self.clock;
        if let Some(begun) = self.flushes.remove(&number) {
            return self.flushed(begun);
        }
        if let Some(snapshot) = self.snapshots.get_mut(&number) {
            // What it holds is on stable storage with it.
            snapshot.ended = Some(now);
            let begun = snapshot.begun;
            return self.flushed(begun);
        }
        let ended = self.sectors.iter_mut().flatten().filter(|write| write.number == number);
        ended.for_each(|write| (write.ended, write.is_stable) = (Some(now), write.is_stable || is_stable));
    }

    /// All writes that ended before a moment are on stable storage, and with them the snapshots that the disk stands on.
    fn flushed(&mut self, begun: u64) {
        let stood_on = |snapshot: &&mut Snapshot| {
            snapshot.keeps == Keeps::Snapshot && snapshot.seen.is_some_and(|seen| seen < begun)
        };
        for snapshot in self.snapshots.values_mut().filter(stood_on) {
            snapshot.ended.get_or_insert(self.clock);
        }
        let writes = self.sectors.iter_mut().flatten();
        writes
            .filter(|write| write.ended.is_some_and(|ended| ended < begun))
            .for_each(|write| write.is_stable = true);
    }

    /// The process is dead: what was in flight may be there or not.
    pub fn lose_process(&mut self) {
        self.clock += 1;
        self.had_failed |= std::mem::take(&mut self.has_failed);
        self.flushes.clear();
        for write in self.sectors.iter_mut().flatten().filter(|write| write.ended.is_none()) {
            (write.ended, write.is_sure) = (Some(self.clock), false);
        }
    }

    /// The host is dead: so may be all that is not stable.
    pub fn lose_power(&mut self) {
        self.lose_process();
        self.doubt();
        self.lost_power = true;
    }

    /// What is not stable may be lost.
    fn doubt(&mut self) {
        let writes = self.sectors.iter_mut().flatten();
        writes.filter(|write| !write.is_stable).for_each(|write| write.is_sure = false);
    }

    /// What was read at the beginning of a life is what the disk holds. After a power failure that is stable; else other writes
    /// since the last flush may yet come back with one.
    fn seen(&mut self, stamps: &[u64]) {
        let now = self.clock;
        let is_stable = std::mem::take(&mut self.lost_power);
        self.had_failed = false;
        for (sector, &stamp) in self.sectors.iter_mut().zip(stamps) {
            if is_stable {
                sector.clear();
            }
            let stable = sector.iter().filter(|write| write.is_stable && write.is_sure);
            let newest = stable.map(|write| write.begun).max().unwrap_or(0);
            sector.retain(|write| write.ended.is_none_or(|ended| ended >= newest));
            sector.push(Write { stamp, number: 0, begun: now, ended: Some(now), is_stable, is_sure: true });
        }
        self.snapshots.retain(|_, snapshot| snapshot.stamps.is_some() && !snapshot.is_dropped);
    }

    fn allows(&self, sector: usize, stamp: u64, look: Look) -> bool {
        let writes = &self.sectors[sector];
        let is_overwritten = |write: &Write| {
            writes.iter().any(|other| {
                other.is_sure
                    && other.ended.is_some_and(|ended| ended <= look.from)
                    && write.ended.is_some_and(|ended| ended < other.begun)
            })
        };
        let mut same = writes.iter().filter(|write| write.stamp == stamp && write.begun < look.until);
        same.any(|write| !is_overwritten(write))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A disk of one sector; write 1 was flushed, write 2 was not, write 3 is in flight.
    fn history() -> History {
        let mut history = History::new(1);
        for (deed, number) in [
            (Deed::Write, 1),
            (Deed::Ended, 1),
            (Deed::Flush, 10),
            (Deed::Ended, 10),
            (Deed::Write, 2),
            (Deed::Ended, 2),
            (Deed::Write, 3),
        ] {
            let args = if deed == Deed::Write { [number, 0, 1] } else { [number, 0, 0] };
            history.enter(deed, args, &[]);
        }
        history
    }

    fn allowed(history: &History) -> Vec<u64> {
        (0..4).filter(|&stamp| history.check(0, &[stamp], history.look()).is_ok()).collect()
    }

    #[test]
    fn a_read_finds_the_last_completed_write_or_one_in_flight() {
        assert_eq!(allowed(&history()), [2, 3]);
    }

    #[test]
    fn a_kill_loses_at_most_what_is_in_flight() {
        let mut history = history();
        history.lose_process();
        assert_eq!(allowed(&history), [2, 3]);
        history.enter(Deed::Seen, [0; 3], &[3]);
        assert_eq!(allowed(&history), [3]);
        history.lose_power();
        assert_eq!(allowed(&history), [1, 2, 3], "nothing was flushed since");
    }

    #[test]
    fn a_power_failure_loses_at_most_what_was_not_flushed() {
        let mut history = history();
        history.lose_power();
        assert_eq!(allowed(&history), [1, 2, 3]);
        history.enter(Deed::Seen, [0; 3], &[1]);
        history.lose_power();
        assert_eq!(allowed(&history), [1], "what a failure left is stable");
    }
}
