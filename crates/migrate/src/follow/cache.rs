//! What a move has read, kept in memory for its guest (IOFollow, Algorithm 2).
//!
//! [`BlockCache`] says which bytes of the disk lie where in an arena of the caller, and which may leave. It tells by sectors what it has: a
//! sector is there while its bytes in the arena are those that a read of the disk would return.
//!
//! So a request is shown when it begins and when it ends. A write takes its sectors out when it begins. What two requests did to the same
//! bytes at the same time is not kept, if one of them is a write: a read may have either bytes, and the order of two writes is not known.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use vmstrata_types::{GuestOffset, GuestRange};

use super::Kind;
use super::left::Left;

const SECTOR: u64 = 512;
/// What one bit for each sector tells of.
const BLOCK: u64 = 128 * SECTOR;
/// Uses that count.
const USES_MAX: u64 = 4;
/// Blocks with at least this liveness are expected to be used.
const WANTED: u64 = 1 << 62;

/// Bytes of the arena, from here on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place(pub usize);

/// A part of a request, and where the arena has its bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Piece {
    /// Bytes of the disk.
    pub range: GuestRange,
    /// Where they lie.
    pub place: Place,
}

/// A request between its beginning and its end.
#[derive(Debug)]
#[must_use = "a request that never ends keeps its bytes out of the cache"]
pub struct Flight(u64);

#[derive(Debug)]
struct Flying {
    kind: Kind,
    range: GuestRange,
    /// Of the range: what the cache may keep.
    sound: Left,
}

#[derive(Clone, Copy, Debug)]
struct Block {
    /// Number of its place in the arena.
    slot: usize,
    /// A bit for each sector that is there.
    sectors: u128,
    uses: u64,
    is_sent: bool,
    liveness: u64,
}

/// See the module documentation. Takes O(log n) for each block of 64 KiB.
#[derive(Debug)]
pub struct BlockCache {
    blocks: HashMap<u64, Block>,
    /// The first one leaves first.
    by_liveness: BTreeSet<(u64, u64)>,
    free: Vec<usize>,
    slots: u64,
    /// Grows with each block that is put in or used: an age is a difference of these. `[is_wanted]`.
    now: [u64; 2],
    flights: BTreeMap<u64, Flying>,
    last_flight: u64,
}

impl BlockCache {
    /// A cache in an arena of so many bytes, in whole blocks of 64 KiB.
    pub fn new(arena: usize) -> Self {
        let slots = arena / BLOCK as usize;
        Self {
            blocks: HashMap::new(),
            by_liveness: BTreeSet::new(),
            free: (0..slots).rev().collect(),
            slots: slots as u64,
            now: [0; 2],
            flights: BTreeMap::new(),
            last_flight: 0,
        }
    }

    /// Where the bytes of a range lie that are there, in order (`READBLOCK`). They are the guest's to read until the cache is changed.
    pub fn read(&mut self, range: GuestRange) -> Vec<Piece> {
        let mut pieces: Vec<Piece> = Vec::new();
        for (number, part) in blocks_of(range) {
            let Some(block) = self.blocks.get(&number).copied() else { continue };
            let mut is_used = false;
            for piece in sectors_of(part).filter(|(sector, _)| block.sectors >> sector & 1 == 1) {
                is_used = true;
                let (_, range) = piece;
                let place = Place(block.slot * BLOCK as usize + (range.start.get() % BLOCK) as usize);
                match pieces.last_mut() {
                    Some(last)
                        if last.range.end() == range.start
                            && last.place.0 + last.range.len as usize == place.0 =>
                    {
                        last.range.len += range.len;
                    }
                    _ => pieces.push(Piece { range, place }),
                }
            }
            if is_used {
                self.update(number, |block| block.uses = (block.uses + 1).min(USES_MAX));
            }
        }
        pieces
    }

    /// A request begins: a read of the guest or of the move, or a write.
    pub fn begin(&mut self, kind: Kind, range: GuestRange) -> Flight {
        let mut sound: Left = [range].into_iter().collect();
        for other in self.flights.values_mut() {
            if kind == Kind::Write || other.kind == Kind::Write {
                sound.remove(other.range);
                other.sound.remove(range);
            }
        }
        if kind == Kind::Write {
            for (number, part) in blocks_of(range) {
                if let Some(block) = self.blocks.get_mut(&number) {
                    sectors_of(part).for_each(|(sector, _)| block.sectors &= !(1 << sector));
                }
            }
        }
        self.last_flight += 1;
        self.flights.insert(self.last_flight, Flying { kind, range, sound });
        Flight(self.last_flight)
    }

    /// A request has ended (`WRITEBLOCK`, `PUTBLOCK`). Of one that is `kept`, returns what the caller copies to the arena before it does anything
    /// else with the cache. `is_sent` says whether the move has its bytes; `likely` uses are expected soon, beyond those that were seen.
    pub fn end(&mut self, flight: Flight, kept: bool, is_sent: bool, likely: u64) -> Vec<Piece> {
        let Some(flying) = self.flights.remove(&flight.0).filter(|_| kept && self.slots > 0) else {
            return Vec::new();
        };
        let mut pieces = Vec::new();
        let mut at = flying.range.start;
        while let Some(run) = flying.sound.after(at) {
            at = run.end();
            // Whole sectors only.
            let start = run.start.get().next_multiple_of(SECTOR);
            let end = run.end().get() / SECTOR * SECTOR;
            if start < end {
                let whole = GuestRange::new(GuestOffset::new(start), end - start);
                pieces.extend(blocks_of(whole).map(|(number, part)| self.put(number, part, is_sent, likely)));
            }
        }
        // A block that came in with the same request may have gone again.
        pieces.retain(|piece: &Piece| {
            let block = self.blocks.get(&(piece.range.start.get() / BLOCK));
            block.is_some_and(|block| block.slot == piece.place.0 / BLOCK as usize)
        });
        pieces
    }

    fn put(&mut self, number: u64, part: GuestRange, is_sent: bool, likely: u64) -> Piece {
        if !self.blocks.contains_key(&number) {
            let slot = self.free.pop().unwrap_or_else(|| self.evict());
            let liveness = 0;
            self.blocks
                .insert(number, Block { slot, sectors: 0, uses: likely.min(USES_MAX), is_sent, liveness });
            self.by_liveness.insert((liveness, number));
        }
        self.update(number, |block| {
            block.is_sent |= is_sent;
            sectors_of(part).for_each(|(sector, _)| block.sectors |= 1 << sector);
        });
        let slot = self.blocks[&number].slot;
        let place = Place(slot * BLOCK as usize + (part.start.get() % BLOCK) as usize);
        Piece { range: part, place }
    }

    /// The move has the bytes of these blocks: they may leave earlier.
    pub fn sent(&mut self, range: GuestRange) {
        for (number, _) in blocks_of(range) {
            if self.blocks.contains_key(&number) {
                self.update(number, |block| block.is_sent = true);
            }
        }
    }

    /// Changes a block that is there, and ranks it anew. One that the move has and that nobody is expected to use leaves before all others; these
    /// rank by their age, their uses, and whether the move would have to read them again.
    fn update(&mut self, number: u64, change: impl FnOnce(&mut Block)) {
        let block = self.blocks.get_mut(&number).expect("a block that is there");
        self.by_liveness.remove(&(block.liveness, number));
        change(block);
        let is_wanted = block.uses > 0 || !block.is_sent;
        let now = &mut self.now[usize::from(is_wanted)];
        *now += 1;
        let credit = block.uses + if block.is_sent { 0 } else { USES_MAX };
        block.liveness = *now + if is_wanted { WANTED + credit * self.slots / 2 } else { 0 };
        self.by_liveness.insert((block.liveness, number));
    }

    fn evict(&mut self) -> usize {
        let (_, number) = self.by_liveness.pop_first().expect("a full cache has blocks");
        self.blocks.remove(&number).expect("a block that is ranked").slot
    }
}

/// The blocks of a range, and the part of it in each.
fn blocks_of(range: GuestRange) -> impl Iterator<Item = (u64, GuestRange)> {
    let (start, end) = (range.start.get(), range.end().get());
    (start / BLOCK..end.div_ceil(BLOCK)).map(move |number| {
        let (from, to) = (start.max(number * BLOCK), end.min((number + 1) * BLOCK));
        (number, GuestRange::new(GuestOffset::new(from), to - from))
    })
}

/// The sectors of a part of one block, numbered in the block, and the bytes in each.
fn sectors_of(part: GuestRange) -> impl Iterator<Item = (u64, GuestRange)> {
    let (start, end) = (part.start.get(), part.end().get());
    (start / SECTOR..end.div_ceil(SECTOR)).map(move |sector| {
        let (from, to) = (start.max(sector * SECTOR), end.min((sector + 1) * SECTOR));
        (sector % (BLOCK / SECTOR), GuestRange::new(GuestOffset::new(from), to - from))
    })
}

#[cfg(test)]
mod tests {
    use rand::rngs::SmallRng;
    use rand::{Rng as _, SeedableRng as _};

    use super::*;

    const DISK: u64 = 40 * BLOCK;

    /// A disk, its cache, and requests that are under way.
    struct Model {
        rng: SmallRng,
        disk: Vec<u8>,
        cache: BlockCache,
        arena: Vec<u8>,
        flights: Vec<(Flight, Kind, GuestRange, Vec<u8>)>,
        hits: u64,
    }

    impl Model {
        fn range(&mut self) -> GuestRange {
            let len = if self.rng.random_bool(0.2) { 3 * BLOCK } else { 5000 };
            let start = self.rng.random_range(0..DISK);
            let (start, len) = (start, self.rng.random_range(0..=len.min(DISK - start)));
            if self.rng.random_bool(0.5) {
                return GuestRange::new(GuestOffset::new(start), len);
            }
            let (start, end) = (start / SECTOR * SECTOR, (start + len).next_multiple_of(SECTOR).min(DISK));
            GuestRange::new(GuestOffset::new(start), end - start)
        }

        fn bytes(range: GuestRange) -> std::ops::Range<usize> {
            range.start.get() as usize..range.end().get() as usize
        }

        fn begin(&mut self) {
            let range = self.range();
            let kind = if self.rng.random_bool(0.4) { Kind::Write } else { Kind::Read };
            let flight = self.cache.begin(kind, range);
            let mut bytes = vec![0; range.len as usize];
            match kind {
                // What a read sees is decided at any instant while it is under way.
                Kind::Read => bytes.copy_from_slice(&self.disk[Self::bytes(range)]),
                Kind::Write => bytes.fill(self.rng.random()),
            }
            if kind == Kind::Write && self.rng.random_bool(0.5) {
                self.disk[Self::bytes(range)].copy_from_slice(&bytes);
            }
            self.flights.push((flight, kind, range, bytes));
        }

        fn end(&mut self) {
            let at = self.rng.random_range(0..self.flights.len());
            let (flight, kind, range, mut bytes) = self.flights.swap_remove(at);
            if kind == Kind::Write && self.rng.random_bool(0.5) {
                self.disk[Self::bytes(range)].copy_from_slice(&bytes);
            }
            if kind == Kind::Read && self.rng.random_bool(0.5) {
                bytes.copy_from_slice(&self.disk[Self::bytes(range)]);
            }
            // A write that failed may have left either bytes.
            let kept = self.rng.random_bool(0.9);
            if kind == Kind::Write && kept {
                self.disk[Self::bytes(range)].copy_from_slice(&bytes);
            }
            let (sent, likely) = (self.rng.random(), self.rng.random_range(0..2));
            for piece in self.cache.end(flight, kept, sent, likely) {
                let from = (piece.range.start - range.start) as usize;
                let len = piece.range.len as usize;
                self.arena[piece.place.0..][..len].copy_from_slice(&bytes[from..from + len]);
            }
        }

        fn read(&mut self) {
            let range = self.range();
            for piece in self.cache.read(range) {
                assert!(range.start <= piece.range.start && piece.range.end() <= range.end());
                let cached = &self.arena[piece.place.0..][..piece.range.len as usize];
                assert!(cached == &self.disk[Self::bytes(piece.range)], "a stale byte in {}", piece.range);
                self.hits += piece.range.len;
            }
        }
    }

    #[test]
    fn no_byte_is_stale() {
        for arena in [0, BLOCK, 7 * BLOCK, 64 * BLOCK] {
            let mut model = Model {
                rng: SmallRng::seed_from_u64(5),
                disk: vec![0; DISK as usize],
                cache: BlockCache::new(arena as usize),
                arena: vec![0xee; arena as usize],
                flights: Vec::new(),
                hits: 0,
            };
            for _ in 0..30_000 {
                match model.rng.random_range(0..3) {
                    0 if model.flights.len() < 6 => model.begin(),
                    1 if !model.flights.is_empty() => model.end(),
                    _ => model.read(),
                }
                assert!(model.cache.blocks.len() as u64 * BLOCK <= arena);
                assert_eq!(model.cache.blocks.len(), model.cache.by_liveness.len());
            }
            assert!(arena == 0 || model.hits > 0);
        }
    }

    fn put(cache: &mut BlockCache, block: u64, is_sent: bool) {
        let range = GuestRange::new(GuestOffset::new(block * BLOCK), BLOCK);
        let flight = cache.begin(Kind::Read, range);
        assert_eq!(cache.end(flight, true, is_sent, 0).len(), 1);
    }

    fn has(cache: &BlockCache, block: u64) -> bool {
        cache.blocks.contains_key(&block)
    }

    #[test]
    fn what_is_sent_old_and_unused_leaves_first() {
        let mut cache = BlockCache::new(4 * BLOCK as usize);
        put(&mut cache, 0, false);
        (1..4).for_each(|block| put(&mut cache, block, true));
        cache.read(GuestRange::new(GuestOffset::new(BLOCK), 1));
        put(&mut cache, 4, true);
        put(&mut cache, 5, true);
        assert!(has(&cache, 0) && has(&cache, 1) && !has(&cache, 2) && !has(&cache, 3));
        cache.sent(GuestRange::new(GuestOffset::ZERO, BLOCK));
        (6..9).for_each(|block| put(&mut cache, block, true));
        assert!(!has(&cache, 0) && has(&cache, 1), "once sent it is as any other");
        for block in 9..40 {
            put(&mut cache, block, true);
            cache.read(GuestRange::new(GuestOffset::new(block * BLOCK), 1));
        }
        assert!(!has(&cache, 1), "others are used, and it is not");
    }

    #[test]
    fn a_write_while_a_chunk_is_in_flight_leaves_a_gap() {
        let mut cache = BlockCache::new(16 * BLOCK as usize);
        let range = |start, len| GuestRange::new(GuestOffset::new(start), len);
        let chunk = cache.begin(Kind::Read, range(0, 4 * BLOCK));
        let write = cache.begin(Kind::Write, range(BLOCK + 100, 1000));
        assert_eq!(cache.end(write, true, true, 0), [], "the chunk may bring either bytes");
        cache.end(chunk, true, true, 0).iter().for_each(drop);
        let there: Vec<GuestRange> =
            cache.read(range(0, 4 * BLOCK)).iter().map(|piece| piece.range).collect();
        let total: u64 = there.iter().map(|range| range.len).sum();
        assert_eq!(total, 4 * BLOCK - 3 * SECTOR, "{there:?}");
        let write = cache.begin(Kind::Write, range(BLOCK, 1536));
        assert_eq!(cache.end(write, true, true, 0).len(), 1, "written bytes are kept");
        let there: u64 = cache.read(range(0, 4 * BLOCK)).iter().map(|piece| piece.range.len).sum();
        assert_eq!(there, 4 * BLOCK);
    }
}
