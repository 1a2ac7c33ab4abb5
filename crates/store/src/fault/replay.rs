//! What a crash leaves of a store.
//!
//! Place in the data flow: after a test, turns a [`super::FaultPlan`]'s log into the content that a store
//! may have after a crash at any moment of it.
//!
//! The rule (a medium may reorder, and persists whole sectors of 512 bytes): each sector holds what one of the
//! operations on it left, from the last one that is known to be on stable storage to the newest one issued; so does the
//! length. A flush makes those operations stable that had completed when it was issued. After a
//! *failed* flush, what it should have made stable is in doubt for ever: kernels drop it and report success
//! the next time.

use std::collections::HashMap;

use super::{Moment, Operation, Record, StoreId};

/// Bytes that are persisted whole or not at all.
const SECTOR: u64 = 512;

/// What died.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CrashKind {
    /// The process: what had completed stays.
    Process,
    /// The host: what had been flushed stays.
    Power,
}

/// Which of the changes in doubt made it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Survivors {
    /// None of them.
    None,
    /// All of them.
    All,
    /// A choice for each sector, the same for the same seed.
    Seeded(u64),
}

/// A crash.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Crash {
    /// What died.
    pub kind: CrashKind,
    /// When: operations issued later never happened.
    pub at: Moment,
    /// What became of the changes in doubt.
    pub survivors: Survivors,
}

/// A place whose content survives on its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Place {
    Sector(u64),
    Length,
}

/// The changes to one place.
#[derive(Clone, Copy, Default)]
struct History {
    changes: u32,
    /// How many of them, counted from the first, must be there.
    stable: u32,
    /// How many of them are there after the crash.
    survived: u32,
    applied: u32,
}

impl Crash {
    /// What is left of store `store`, which held `base` when `log` began.
    pub fn image(&self, base: &[u8], log: &[Record], store: StoreId) -> Vec<u8> {
        let records: Vec<&Record> = log.iter().filter(|record| record.store == store).collect();
        let happened: Vec<&Record> =
            records.iter().copied().filter(|record| record.issued <= self.at).collect();
        let flushes: Vec<&Record> =
            records.iter().copied().filter(|record| record.operation == Operation::Flush).collect();
        let mut image = Image { bytes: base.to_vec(), len: base.len() as u64 };
        let mut histories: HashMap<Place, History> = HashMap::new();
        let top = happened.iter().map(|record| end(&record.operation)).fold(image.len, u64::max);
        for record in &happened {
            let stable = self.is_stable(record, &flushes);
            for place in places(&record.operation, top) {
                let history = histories.entry(place).or_default();
                history.changes += 1;
                if stable {
                    history.stable = history.changes;
                }
            }
        }
        for (place, history) in &mut histories {
            history.survived = self.choose(*place, store, *history);
        }
        for record in &happened {
            for place in places(&record.operation, top) {
                let history = histories.get_mut(&place).expect("seen in the first pass");
                history.applied += 1;
                if history.applied <= history.survived {
                    image.apply(place, &record.operation);
                }
            }
        }
        image.finish()
    }

    /// Whether the effect of `change` is certain to have survived; `flushes` are in the order of their issue.
    fn is_stable(&self, change: &Record, flushes: &[&Record]) -> bool {
        let Some(completed) = change.completed.filter(|completed| *completed <= self.at) else {
            return false;
        };
        if self.kind == CrashKind::Process {
            return true;
        }
        let first_after = flushes.partition_point(|flush| flush.issued <= completed);
        flushes.get(first_after).and_then(|flush| flush.completed).is_some_and(|flushed| flushed <= self.at)
    }

    fn choose(&self, place: Place, store: StoreId, history: History) -> u32 {
        match self.survivors {
            Survivors::None => history.stable,
            Survivors::All => history.changes,
            Survivors::Seeded(seed) => {
                let place = match place {
                    Place::Sector(sector) => sector,
                    Place::Length => u64::MAX,
                };
                let random = mix(mix(mix(seed) ^ u64::from(store.0)) ^ place);
                history.stable + (random % u64::from(history.changes - history.stable + 1)) as u32
            }
        }
    }
}

/// One round of SplitMix64.
fn mix(value: u64) -> u64 {
    let mut value = value.wrapping_add(0x9e37_79b9_7f4a_7c15);
    value = (value ^ (value >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    value = (value ^ (value >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    value ^ (value >> 31)
}

/// The last byte that an operation can give content to.
fn end(operation: &Operation) -> u64 {
    match operation {
        // An empty write past the end does not move it.
        Operation::Write { at, bytes } if !bytes.is_empty() => at.get() + bytes.len() as u64,
        Operation::SetLen { len } => *len,
        Operation::Write { .. } | Operation::PunchHole { .. } | Operation::Flush => 0,
    }
}

/// Everything that an operation changes, below `top`.
fn places(operation: &Operation, top: u64) -> impl Iterator<Item = Place> {
    let (start, stop, length) = match operation {
        Operation::Write { at, bytes } => (at.get(), at.get() + bytes.len() as u64, !bytes.is_empty()),
        Operation::PunchHole { at, len } => (at.get(), at.get().saturating_add(*len), false),
        Operation::SetLen { len } => (*len, u64::MAX, true),
        Operation::Flush => (0, 0, false),
    };
    let stop = stop.min(top);
    let sectors = if start < stop { start / SECTOR..stop.div_ceil(SECTOR) } else { 0..0 };
    sectors.map(Place::Sector).chain(length.then_some(Place::Length))
}

/// The content being put together; bytes past `len` do not count until the length covers them.
struct Image {
    bytes: Vec<u8>,
    len: u64,
}

impl Image {
    fn apply(&mut self, place: Place, operation: &Operation) {
        let Place::Sector(sector) = place else {
            self.len = match operation {
                Operation::SetLen { len } => *len,
                other => self.len.max(end(other)),
            };
            return;
        };
        let (first, last) = (sector * SECTOR, (sector + 1) * SECTOR);
        if (self.bytes.len() as u64) < last {
            self.bytes.resize(last as usize, 0);
        }
        match operation {
            Operation::Write { at, bytes } => {
                let (from, to) = (at.get().max(first), (at.get() + bytes.len() as u64).min(last));
                let part = &bytes[(from - at.get()) as usize..(to - at.get()) as usize];
                self.bytes[from as usize..to as usize].copy_from_slice(part);
            }
            Operation::PunchHole { at, len } => {
                let (from, to) = (at.get().max(first), at.get().saturating_add(*len).min(last));
                self.bytes[from as usize..to as usize].fill(0);
            }
            Operation::SetLen { len } => self.bytes[(*len).max(first) as usize..last as usize].fill(0),
            Operation::Flush => {}
        }
    }

    fn finish(mut self) -> Vec<u8> {
        self.bytes.resize(self.len as usize, 0);
        self.bytes
    }
}
