//! Which values each sector may hold, by what was asked for and what was answered.
//!
//! A sector has a history, oldest first. Writes never overlap a write in flight to the same sector (the load draws others),
//! so at most the last entry of a history is in flight.
//!
//! ```text
//!   history of a sector:   [ 12 done ] [ 15 done ] [ zeros maybe ] [ 19 in flight ]
//!                            ▲           └──────────── what a read may find ──────┘
//!                            └ last value before the last flush: with the journal lost, all of these may be found
//! ```
//!
//! - *done*: the request was answered without an error; older entries cannot be read any more.
//! - *maybe*: it was a discard, or it failed, or its answer never came. The entry took effect or did not, sector by sector.
//! - A quiet read settles the doubt: what it found is a new entry that is done.
//! - A flush covers what was answered before it was asked for. Entries older than the last one covered are dropped when a
//!   history is next looked at.

use std::collections::HashMap;

use super::history::{Entry, Fate, History, Tick};
use super::stamp::{self, Found, SECTOR, Value};
use super::trail::{Event, Trail};
use super::view::{Sectors, View, Wrong};

/// Values below are those of layers that were there before the load.
const FIRST_TICK: u64 = 1 << 32;

/// What a request that changes sectors does to them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Change {
    Write,
    /// To zeros.
    Zero,
    /// To zeros, or not.
    Trim,
}

/// A change in flight. It ends in [`Model::done`] or [`Model::doubt`].
#[derive(Debug)]
pub(super) struct Claim {
    id: u64,
    pub(super) change: Change,
    pub(super) range: Sectors,
    pub(super) value: Value,
}

impl Claim {
    /// What a write sends; nothing for other changes.
    pub(super) fn data(&self) -> Vec<u8> {
        if self.change != Change::Write {
            return Vec::new();
        }
        let mut data = vec![0; self.range.bytes()];
        stamp::fill(&mut data, self.range.start, self.value);
        data
    }
}

/// What a read that began at some time, or a snapshot, may find.
#[derive(Debug)]
pub(super) struct Watch {
    id: u64,
    pub(super) range: Sectors,
    view: View,
}

/// What is left of a journal after a kill.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Journal {
    Kept,
    Lost,
}

/// See the module documentation.
#[derive(Debug)]
pub(super) struct Model {
    sectors: Vec<History>,
    /// Where changes may be drawn; the disk is longer while it is being made smaller.
    limit: u64,
    tick: u64,
    flushed: Tick,
    claims: HashMap<u64, (Sectors, Value)>,
    /// Of each, what begins meanwhile.
    watches: HashMap<u64, (Sectors, Vec<(Sectors, Value)>)>,
    pub(super) trail: Trail,
}

impl Model {
    /// A disk whose sectors hold `values`, all on stable storage.
    pub(super) fn new(values: impl IntoIterator<Item = Value>) -> Self {
        let sectors: Vec<History> = values.into_iter().map(History::of).collect();
        let limit = sectors.len() as u64;
        Self {
            sectors,
            limit,
            tick: FIRST_TICK,
            flushed: Tick(1),
            claims: HashMap::new(),
            watches: HashMap::new(),
            trail: Trail::default(),
        }
    }

    /// Sectors of the disk.
    pub(super) fn len(&self) -> u64 {
        self.sectors.len() as u64
    }

    /// The end of what changes and reads may be drawn from.
    pub(super) fn limit(&self) -> u64 {
        self.limit
    }

    /// Keeps new requests below `limit`.
    pub(super) fn set_limit(&mut self, limit: u64) {
        self.limit = limit.min(self.len());
    }

    fn next(&mut self) -> Tick {
        self.tick += 1;
        Tick(self.tick)
    }

    /// Begins to change `range`; `None` while a change to a part of it is in flight.
    pub(super) fn claim(&mut self, range: Sectors, change: Change) -> Option<Claim> {
        assert!(range.end() <= self.len(), "{range:?} passes the end of the disk");
        if self.claims.values().any(|(other, _)| other.overlaps(range)) {
            return None;
        }
        let id = self.next().0;
        let value = if change == Change::Write { Value(id) } else { Value::ZEROS };
        self.claims.insert(id, (range, value));
        let flushed = self.flushed;
        for history in self.of(range) {
            history.prune(flushed);
            history.0.push(Entry { value, fate: Fate::InFlight });
        }
        for (watched, meanwhile) in self.watches.values_mut().filter(|(watched, _)| watched.overlaps(range)) {
            let start = watched.start.max(range.start);
            meanwhile.push((Sectors::new(start, watched.end().min(range.end()) - start), value));
        }
        self.trail.push(Event::Begun { id, change, range });
        Some(Claim { id, change, range, value })
    }

    /// Whether nothing in flight touches `range`.
    pub(super) fn is_free(&self, range: Sectors) -> bool {
        let claimed = self.claims.values().any(|(other, _)| other.overlaps(range));
        !claimed && !self.watches.values().any(|(other, _)| other.overlaps(range))
    }

    fn of(&mut self, range: Sectors) -> &mut [History] {
        &mut self.sectors[range.start as usize..range.end() as usize]
    }

    /// The change was answered without an error; `is_stable`: it is on stable storage (FUA).
    pub(super) fn done(&mut self, claim: Claim, is_stable: bool) {
        let now = self.next();
        self.claims.remove(&claim.id);
        let fate = if claim.change == Change::Trim { Fate::Maybe } else { Fate::Done(now) };
        for history in self.of(claim.range) {
            history.settle(fate);
            if is_stable && fate != Fate::Maybe {
                history.keep_last();
            }
        }
        self.trail.push(Event::Done { id: claim.id, is_stable });
    }

    /// The change failed, or its answer never came.
    pub(super) fn doubt(&mut self, claim: Claim) {
        self.claims.remove(&claim.id);
        self.of(claim.range).iter_mut().for_each(|history| history.settle(Fate::Maybe));
        self.trail.push(Event::Doubtful { id: claim.id });
    }

    /// Begins a flush.
    pub(super) fn flush(&mut self) -> Tick {
        self.next()
    }

    /// The flush that began at `asked` was answered without an error.
    pub(super) fn flushed(&mut self, asked: Tick) {
        self.flushed = self.flushed.max(asked);
        self.trail.push(Event::Flushed { asked: asked.0 });
    }

    /// Begins a read of `range`, or whatever else is to be judged by what happens from now on.
    pub(super) fn watch(&mut self, range: Sectors) -> Watch {
        assert!(range.end() <= self.len(), "{range:?} passes the end of the disk");
        let mut view = View { start: range.start, ..View::default() };
        for (sector, history) in (range.start..).zip(self.of(range)) {
            let current = history.current();
            view.first.push(current[0].value);
            let others = current[1..].iter().filter(|entry| entry.fate != Fate::InFlight);
            view.more.extend(others.map(|entry| (sector, entry.value)));
        }
        let in_flight = self.claims.values().filter(|(other, _)| other.overlaps(range));
        let meanwhile: Vec<(Sectors, Value)> = in_flight.copied().collect();
        let id = self.next().0;
        self.watches.insert(id, (range, meanwhile));
        Watch { id, range, view }
    }

    /// Ends a watch: what it may have found from its begin until now.
    pub(super) fn viewed(&mut self, mut watch: Watch) -> View {
        watch.view.meanwhile =
            self.watches.remove(&watch.id).map(|(_, meanwhile)| meanwhile).unwrap_or_default();
        watch.view
    }

    /// A read found `bytes`. Where nothing was in flight meanwhile, what it found settles any doubt.
    ///
    /// # Errors
    /// The first sector with a value that it may not hold.
    pub(super) fn read(&mut self, watch: Watch, bytes: &[u8]) -> Result<(), Wrong> {
        let range = watch.range;
        let view = self.viewed(watch);
        view.check_beside(range.start, bytes)?;
        let now = self.next();
        let quiet = (range.start..).zip(bytes.chunks(SECTOR)).filter(|(sector, _)| view.is_quiet(*sector));
        for (sector, bytes) in quiet {
            let history = &mut self.sectors[sector as usize];
            let current = history.current();
            if current.len() == 1 && view.first[(sector - range.start) as usize] == current[0].value {
                continue;
            }
            let found = stamp::read(bytes, sector);
            let allowed: Vec<Value> = current.iter().map(|entry| entry.value).collect();
            match found {
                // Another read may have settled the doubt otherwise.
                Found::Value(value) if allowed.contains(&value) => {
                    if allowed.len() > 1 {
                        history.0.push(Entry { value, fate: Fate::Done(now) });
                        self.trail.push(Event::Settled { at: now.0, sector, value });
                    }
                }
                _ => return Err(Wrong { sector, found, allowed }),
            }
        }
        Ok(())
    }

    /// The server was killed, and no change is in flight any more. With the journal lost, each sector may hold whatever it
    /// held since the last flush.
    pub(super) fn killed(&mut self, journal: Journal) {
        assert!(self.claims.is_empty(), "what is in flight at a kill is doubtful: say so first");
        self.watches.clear();
        self.trail.push(Event::Killed { at: self.tick, journal });
        if journal == Journal::Kept {
            return;
        }
        let flushed = self.flushed;
        self.sectors.iter_mut().for_each(|history| history.lose(flushed));
    }

    /// The disk has another size: what is new holds zeros, on stable storage.
    pub(super) fn resize(&mut self, sectors: u64) {
        self.sectors.resize(sectors as usize, History::of(Value::ZEROS));
        self.limit = sectors;
        self.trail.push(Event::Resized { at: self.tick, sectors });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn disk(sectors: u64) -> Model {
        Model::new((0..sectors).map(|_| Value::ZEROS))
    }

    fn bytes(range: Sectors, value: Value) -> Vec<u8> {
        let mut bytes = vec![0; range.bytes()];
        stamp::fill(&mut bytes, range.start, value);
        bytes
    }

    fn write(model: &mut Model, range: Sectors) -> Value {
        let claim = model.claim(range, Change::Write).unwrap();
        let value = claim.value;
        model.done(claim, false);
        value
    }

    fn doubtful(model: &mut Model, range: Sectors, change: Change) -> Value {
        let claim = model.claim(range, change).unwrap();
        let value = claim.value;
        model.doubt(claim);
        value
    }

    fn reads(model: &mut Model, range: Sectors, value: Value) -> Result<(), Wrong> {
        let watch = model.watch(range);
        model.read(watch, &bytes(range, value))
    }

    const ONE: Sectors = Sectors::new(3, 1);

    #[test]
    fn a_stale_sector_is_reported() {
        let mut model = disk(8);
        let old = write(&mut model, Sectors::new(2, 4));
        let new = write(&mut model, ONE);
        let watch = model.watch(Sectors::new(2, 4));
        let wrong = model.read(watch, &bytes(Sectors::new(2, 4), old)).unwrap_err();
        assert_eq!(wrong, Wrong { sector: 3, found: Found::Value(old), allowed: vec![new] });
        assert_eq!(
            wrong.to_string(),
            format!("sector 3: found {old}, allowed {new}"),
            "the message names the sector and both values"
        );
    }

    #[test]
    fn a_read_beside_a_write_may_find_either_value_and_none_else() {
        let mut model = disk(8);
        let stale = write(&mut model, ONE);
        let old = write(&mut model, ONE);
        let watch = |model: &mut Model| model.watch(ONE);
        let (before, claim) = (watch(&mut model), model.claim(ONE, Change::Write).unwrap());
        let (during, new) = (watch(&mut model), claim.value);
        let third = watch(&mut model);
        model.done(claim, false);
        assert!(model.read(before, &bytes(ONE, old)).is_ok());
        assert!(model.read(during, &bytes(ONE, new)).is_ok());
        assert!(model.read(third, &bytes(ONE, stale)).is_err());
        assert!(reads(&mut model, ONE, old).is_err(), "the write is done");
    }

    #[test]
    fn a_sector_is_torn_only_while_it_is_written() {
        let mut model = disk(8);
        let old = write(&mut model, ONE);
        let claim = model.claim(ONE, Change::Write).unwrap();
        let mut torn = bytes(ONE, claim.value);
        torn[..256].copy_from_slice(&bytes(ONE, old)[..256]);
        let beside = model.watch(ONE);
        model.done(claim, false);
        let quiet = model.watch(ONE);
        assert!(model.read(beside, &torn).is_ok());
        assert!(model.read(quiet, &torn).is_err());
    }

    #[test]
    fn a_quiet_read_settles_a_doubt() {
        let mut model = disk(8);
        let old = write(&mut model, ONE);
        let new = doubtful(&mut model, ONE, Change::Write);
        assert!(reads(&mut model, ONE, new).is_ok());
        assert!(reads(&mut model, ONE, old).is_err(), "a value that came and went");
        assert!(reads(&mut model, ONE, new).is_ok());
    }

    #[test]
    fn a_discard_leaves_the_value_or_zeros() {
        let mut model = disk(8);
        let stale = write(&mut model, ONE);
        let old = write(&mut model, ONE);
        let claim = model.claim(ONE, Change::Trim).unwrap();
        model.done(claim, false);
        assert!(reads(&mut model, ONE, stale).is_err());
        assert!(reads(&mut model, ONE, old).is_ok());
        assert!(reads(&mut model, ONE, Value::ZEROS).is_err(), "the discard did nothing, as was seen");
    }

    #[test]
    fn a_kept_journal_keeps_all_that_was_answered() {
        let mut model = disk(8);
        let old = write(&mut model, ONE);
        write(&mut model, ONE);
        model.killed(Journal::Kept);
        assert!(reads(&mut model, ONE, old).is_err());
        let mut model = disk(8);
        let old = write(&mut model, ONE);
        doubtful(&mut model, ONE, Change::Zero);
        model.killed(Journal::Kept);
        assert!(reads(&mut model, ONE, old).is_ok());
    }

    #[test]
    fn a_lost_journal_keeps_what_was_flushed_and_no_older_value() {
        for found in 0..4 {
            let mut model = disk(8);
            let stale = write(&mut model, ONE);
            let stable = write(&mut model, ONE);
            let asked = model.flush();
            let late = write(&mut model, ONE);
            model.flushed(asked);
            let last = write(&mut model, ONE);
            model.killed(Journal::Lost);
            let value = [stale, stable, late, last][found];
            assert_eq!(reads(&mut model, ONE, value).is_ok(), found > 0, "{found}");
        }
    }

    #[test]
    fn what_was_asked_for_after_a_flush_began_is_not_covered_by_it() {
        let mut model = disk(8);
        let old = write(&mut model, ONE);
        let claim = model.claim(ONE, Change::Write).unwrap();
        let asked = model.flush();
        model.done(claim, false);
        model.flushed(asked);
        model.killed(Journal::Lost);
        assert!(reads(&mut model, ONE, old).is_ok());
    }

    #[test]
    fn a_stable_write_needs_no_flush() {
        let mut model = disk(8);
        let old = write(&mut model, ONE);
        let claim = model.claim(ONE, Change::Write).unwrap();
        let new = claim.value;
        model.done(claim, true);
        model.killed(Journal::Lost);
        assert!(reads(&mut model, ONE, new).is_ok());
        assert!(reads(&mut model, ONE, old).is_err());
    }

    #[test]
    fn a_snapshot_holds_what_was_there_and_perhaps_what_was_in_flight() {
        let mut model = disk(8);
        let all = Sectors::new(0, 8);
        let old = write(&mut model, all);
        let in_flight = model.claim(ONE, Change::Write).unwrap();
        let new = in_flight.value;
        let watch = model.watch(all);
        let during = write(&mut model, Sectors::new(5, 1));
        model.done(in_flight, false);
        let view = model.viewed(watch);
        let after = write(&mut model, all);
        let mut image = bytes(all, old);
        assert!(view.check(0, &image).is_ok());
        stamp::fill(&mut image[3 * SECTOR..4 * SECTOR], 3, new);
        stamp::fill(&mut image[5 * SECTOR..6 * SECTOR], 5, during);
        assert!(view.check(0, &image).is_ok());
        stamp::fill(&mut image[6 * SECTOR..7 * SECTOR], 6, after);
        assert_eq!(view.check(0, &image).unwrap_err().sector, 6);
    }

    #[test]
    fn changes_of_one_sector_wait_for_each_other() {
        let mut model = disk(8);
        let claim = model.claim(Sectors::new(0, 4), Change::Write).unwrap();
        assert!(model.claim(ONE, Change::Trim).is_none());
        assert!(model.claim(Sectors::new(4, 4), Change::Zero).is_some());
        model.done(claim, false);
        assert!(model.claim(ONE, Change::Trim).is_some());
    }

    #[test]
    fn a_disk_that_was_made_smaller_and_larger_holds_zeros_there() {
        let mut model = disk(8);
        let old = write(&mut model, Sectors::new(6, 1));
        model.resize(4);
        model.resize(8);
        assert!(reads(&mut model, Sectors::new(6, 1), old).is_err());
        assert!(reads(&mut model, Sectors::new(6, 1), Value::ZEROS).is_ok());
    }
}
