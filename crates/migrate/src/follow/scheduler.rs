//! What a move reads next (IOFollow, Algorithm 1).

use std::collections::{BTreeSet, HashMap, VecDeque};

use vmstrata_types::{GuestOffset, GuestRange};

use super::Kind;
use super::left::Left;

/// In what order a move reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Order {
    /// What lies nearest to the place that guest or move used last, and goes on from there if that is left: a disk then need not seek.
    Nearest,
    /// The chunks that the guest uses most, so that the cache has them.
    HotFirst,
    /// What the guest has not written, then the chunks that it writes least: what changes again is sent late.
    ColdFirst,
    /// What follows the guest's last request, up to a chunk, as the guest reads on there; else what lies far from all that it used: the rest of
    /// its working set is read when the guest comes by, and then serves it from the cache. What is left of that comes last. A guest that
    /// does not come back to where it was is not followed.
    Predicted,
    /// From the beginning to the end, as QEMU does.
    Sequential,
}

impl Order {
    /// All of them.
    pub const ALL: [Self; 5] =
        [Self::Nearest, Self::HotFirst, Self::ColdFirst, Self::Predicted, Self::Sequential];

    /// Whether regions that the guest uses come last.
    fn puts_off(self) -> bool {
        matches!(self, Self::ColdFirst | Self::Predicted)
    }
}

/// Chunks of a region that belongs to the working set once the guest has used a part of it.
const REGION_CHUNKS: u64 = 16;

/// Requests of which a guest's locality is known.
const RECENT: usize = 256;
/// A guest that comes back less often than this is not followed.
const COMES_BACK_MIN: f64 = 0.25;

/// What the guest does in one region.
#[derive(Clone, Copy, Debug, Default)]
struct Uses {
    all: u64,
    writes: u64,
    /// Number of the last one, among all of the guest.
    last: u64,
}

/// What a move reads next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Next {
    /// Bytes of the disk.
    pub range: GuestRange,
    /// They lie within a chunk of what the guest used last: it may use them soon.
    pub follows: bool,
}

/// Gives out what is to be read, each byte once. A decision takes O(log n).
#[derive(Debug)]
pub struct Scheduler {
    order: Order,
    chunk: u64,
    /// Bytes of a region, of which the order knows what the guest does there: a chunk or several.
    region: u64,
    left: Left,
    /// Where the device was used last.
    head: GuestOffset,
    /// Where the guest's last request ended.
    guest: Option<GuestOffset>,
    /// What may be read for it ahead.
    ahead: Option<GuestRange>,
    /// Chunks of its last requests, and the part of its requests that came back to one of them.
    recent: VecDeque<u64>,
    comes_back: f64,
    uses: HashMap<u64, Uses>,
    used: u64,
    /// The regions that the order prefers, or puts off, by rank. Those of which nothing is left go when they are met.
    ranked: BTreeSet<(u64, u64)>,
    /// What is left of regions that are not ranked, for orders that put ranked ones off.
    cold: Left,
}

impl Scheduler {
    /// For all of `image`, in chunks of at most `chunk` bytes.
    ///
    /// # Panics
    /// When `chunk` is 0.
    pub fn new(order: Order, chunk: u64, image: impl IntoIterator<Item = GuestRange>) -> Self {
        assert!(chunk > 0, "a chunk has bytes");
        let left: Left = image.into_iter().collect();
        let cold = if order.puts_off() { left.clone() } else { Left::default() };
        let region = if order == Order::Predicted { chunk * REGION_CHUNKS } else { chunk };
        Self {
            order,
            chunk,
            region,
            left,
            head: GuestOffset::ZERO,
            guest: None,
            ahead: None,
            recent: VecDeque::with_capacity(RECENT),
            comes_back: 1.0,
            uses: HashMap::new(),
            used: 0,
            ranked: BTreeSet::new(),
            cold,
        }
    }

    /// Bytes that are not given out.
    pub fn left(&self) -> u64 {
        self.left.bytes()
    }

    /// The guest's request is at the device, or was answered from memory: then the device stays where it was.
    pub fn guest(&mut self, kind: Kind, range: GuestRange, is_at_device: bool) {
        if range.len == 0 {
            return;
        }
        self.guest = Some(range.end());
        if is_at_device {
            self.head = range.end();
        }
        if self.order == Order::Predicted {
            self.look_ahead(range, is_at_device);
        }
        for region in range.start.get() / self.region..=(range.end().get() - 1) / self.region {
            self.use_region(kind, region);
        }
    }

    /// A guest that comes back to where it was is followed; from memory, only once it comes near the end of what was read for it.
    fn look_ahead(&mut self, range: GuestRange, is_at_device: bool) {
        let chunk = range.start.get() / self.chunk;
        let is_back = self.recent.contains(&chunk);
        self.comes_back += (f64::from(u8::from(is_back)) - self.comes_back) / 64.0;
        if self.recent.len() == RECENT {
            self.recent.pop_front();
        }
        self.recent.push_back(chunk);
        if self.comes_back < COMES_BACK_MIN {
            self.ahead = None;
            return;
        }
        let reach = if is_at_device { self.chunk } else { self.chunk / 2 };
        let next = self.guest.and_then(|at| Some((at, self.left.after(at)?)));
        if let Some((_, next)) = next.filter(|(at, next)| next.start - *at < reach) {
            self.ahead = Some(GuestRange::new(next.start, next.len.min(self.chunk)));
        }
    }

    fn use_region(&mut self, kind: Kind, region: u64) {
        let ranks = match self.order {
            Order::Nearest | Order::Sequential => return,
            Order::HotFirst | Order::Predicted => true,
            Order::ColdFirst => kind == Kind::Write,
        };
        self.used += 1;
        let uses = self.uses.entry(region).or_default();
        let before = *uses;
        uses.all += 1;
        uses.writes += u64::from(kind == Kind::Write);
        uses.last = self.used;
        let now = *uses;
        if !ranks || self.left_in(region).is_none() {
            return;
        }
        self.ranked.remove(&(self.rank(before), region));
        self.ranked.insert((self.rank(now), region));
        let whole = self.range_of(region);
        self.cold.remove(whole);
    }

    /// The lowest is read first.
    fn rank(&self, uses: Uses) -> u64 {
        match self.order {
            Order::ColdFirst => uses.writes,
            Order::Predicted => uses.last,
            _ => u64::MAX - uses.all,
        }
    }

    fn range_of(&self, region: u64) -> GuestRange {
        GuestRange::new(GuestOffset::new(region * self.region), self.region)
    }

    /// The first of what is left in a region.
    fn left_in(&self, region: u64) -> Option<GuestRange> {
        let whole = self.range_of(region);
        let found = self.left.after(whole.start).filter(|run| run.start < whole.end())?;
        Some(GuestRange::new(found.start, found.len.min(whole.end() - found.start)))
    }

    /// The move has these bytes from a request of the guest. Returns how many it need not read: none where it reads what lies before and after
    /// them, as a seek over them costs more than they do.
    pub fn sent(&mut self, range: GuestRange) -> u64 {
        let begins = self.left.before(range.start).is_none_or(|run| run.end() < range.start);
        let ends = self.left.after(range.end()).is_none_or(|run| run.start > range.end());
        if begins || ends { self.take(range) } else { 0 }
    }

    fn take(&mut self, range: GuestRange) -> u64 {
        self.cold.remove(range);
        self.left.remove(range)
    }

    /// The move reads these bytes, too; or again, as reading failed, or the guest has written them.
    pub fn add(&mut self, range: GuestRange) {
        self.left.insert(range);
        if self.order.puts_off() {
            self.cold.insert(range);
        }
    }

    /// Gives out what to read next, at most `most` bytes of it, and no more than a chunk; `None` once all is given out.
    pub fn next(&mut self, most: u64) -> Option<Next> {
        let most = most.clamp(1, self.chunk);
        let found = match self.order {
            Order::Nearest => self.nearest(),
            Order::Sequential => self.left.after(GuestOffset::ZERO),
            Order::HotFirst => self.ranked_first(),
            Order::Predicted => self.ahead().or_else(|| self.put_off()),
            Order::ColdFirst => self.put_off(),
        };
        let found = found.or_else(|| self.left.after(GuestOffset::ZERO))?;
        let range = GuestRange::new(found.start, found.len.min(most));
        let (start, end) = (range.start.get(), range.end().get());
        let is_near =
            |guest: GuestOffset| start <= guest.get() + self.chunk && guest.get() <= end + self.chunk;
        let follows = self.guest.is_some_and(is_near);
        self.take(range);
        self.head = range.end();
        Some(Next { range, follows })
    }

    /// The same in whole chunks, counted from 0, of an image of whole chunks: all of the one that it would read next.
    pub fn next_chunk(&mut self) -> Option<Next> {
        let Next { range, follows } = self.next(1)?;
        let start = range.start.get() / self.chunk * self.chunk;
        let range = GuestRange::new(GuestOffset::new(start), self.chunk);
        self.take(range);
        self.head = range.end();
        Some(Next { range, follows })
    }

    /// From the head on, or the chunk before it: a read goes forward.
    fn nearest(&self) -> Option<GuestRange> {
        let after = self.left.after(self.head);
        let before = self.left.before(self.head).map(|run| {
            let len = run.len.min(self.chunk);
            GuestRange::new(GuestOffset::new(run.end().get() - len), len)
        });
        match (after, before) {
            (Some(after), Some(before)) if self.head - before.start < after.start - self.head => Some(before),
            (after, before) => after.or(before),
        }
    }

    fn ahead(&mut self) -> Option<GuestRange> {
        let ahead = self.ahead?;
        let next = self.left.after(ahead.start).filter(|next| next.start < ahead.end());
        if next.is_none() {
            self.ahead = None;
        }
        next.map(|next| GuestRange::new(next.start, next.len.min(ahead.end() - next.start)))
    }

    fn put_off(&mut self) -> Option<GuestRange> {
        self.cold.after(GuestOffset::ZERO).or_else(|| self.ranked_first())
    }

    /// What is left in the first ranked region.
    fn ranked_first(&mut self) -> Option<GuestRange> {
        while let Some(&(rank, region)) = self.ranked.first() {
            let found = self.left_in(region);
            if found.is_some() {
                return found;
            }
            self.ranked.remove(&(rank, region));
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use rand::rngs::SmallRng;
    use rand::{Rng as _, SeedableRng as _};

    use super::*;

    const KIB: u64 = 1 << 10;
    const SIZE: u64 = 4096 * KIB;
    const CHUNK: u64 = 64 * KIB;

    fn range(start: u64, len: u64) -> GuestRange {
        GuestRange::new(GuestOffset::new(start), len)
    }

    #[test]
    fn every_chunk_is_given_out_once_in_each_order() {
        for order in Order::ALL {
            let mut rng = SmallRng::seed_from_u64(3);
            let mut scheduler =
                Scheduler::new(order, CHUNK, [range(0, SIZE / 2), range(SIZE / 2 + CHUNK, CHUNK)]);
            let mut given = Vec::new();
            while let Some(Next { range: next, .. }) = scheduler.next_chunk() {
                assert_eq!((next.start.get() % CHUNK, next.len), (0, CHUNK));
                given.push(next.start.get() / CHUNK);
                let guest = range(rng.random_range(0..1023) * 4 * KIB, 4 * KIB);
                scheduler.guest(Kind::Read, guest, rng.random_bool(0.7));
            }
            given.sort_unstable();
            let half = SIZE / 2 / CHUNK;
            assert!(given.into_iter().eq((0..half).chain([half + 1])), "{order:?}");
        }
    }

    #[test]
    fn every_byte_is_given_out_once_in_each_order() {
        for order in Order::ALL {
            let mut rng = SmallRng::seed_from_u64(2);
            let mut scheduler = Scheduler::new(order, CHUNK, [range(0, SIZE)]);
            let mut given = vec![0_u8; (SIZE / KIB) as usize];
            let mut give = |range: GuestRange| {
                let blocks = range.start.get() / KIB..range.end().get() / KIB;
                blocks.for_each(|block| given[block as usize] += 1);
            };
            let mut again = 0;
            while let Some(Next { range: next, .. }) = scheduler.next(CHUNK >> rng.random_range(0..4)) {
                assert!(next.len > 0 && next.len <= CHUNK);
                if again < 20 && rng.random_bool(0.1) {
                    again += 1;
                    scheduler.add(next);
                } else {
                    give(next);
                }
                let guest = range(rng.random_range(0..1023) * 4 * KIB, 4 * KIB);
                let kind = if rng.random_bool(0.3) { Kind::Write } else { Kind::Read };
                scheduler.guest(kind, guest, rng.random_bool(0.7));
                let before = scheduler.left();
                let asked = range(next.end().get() % SIZE, KIB);
                if rng.random_bool(0.2) && scheduler.sent(asked) > 0 {
                    assert_eq!(before - scheduler.left(), KIB);
                    give(asked);
                }
            }
            assert_eq!(scheduler.left(), 0);
            assert!(given.iter().all(|times| *times == 1), "{order:?}");
        }
    }

    #[test]
    fn what_the_guest_used_is_left_out_where_that_saves_a_read() {
        let mut scheduler = Scheduler::new(Order::Sequential, CHUNK, [range(0, SIZE)]);
        assert_eq!(scheduler.sent(range(CHUNK, KIB)), 0, "a hole");
        assert_eq!(scheduler.sent(range(0, KIB)), KIB);
        assert_eq!(scheduler.sent(range(SIZE - KIB, KIB)), KIB);
        assert_eq!(scheduler.left(), SIZE - 2 * KIB);
    }

    #[test]
    fn nearest_is_what_a_search_of_all_starts_finds() {
        let mut rng = SmallRng::seed_from_u64(3);
        let mut scheduler = Scheduler::new(Order::Nearest, CHUNK, [range(0, SIZE)]);
        let mut is_left = vec![true; (SIZE / KIB) as usize];
        loop {
            let head = rng.random_range(1..SIZE / KIB);
            scheduler.guest(Kind::Read, range((head - 1) * KIB, KIB), true);
            // From the head on, or the chunk that ends where what is left before it ends.
            let after = (head..SIZE / KIB).find(|block| is_left[*block as usize]);
            let before = (0..head).rfind(|block| is_left[*block as usize]).map(|last| {
                let mut first = last;
                while first > 0 && is_left[first as usize - 1] && last - first + 1 < CHUNK / KIB {
                    first -= 1;
                }
                first
            });
            let starts = [after, before].into_iter().flatten();
            let least = starts.map(|block| block.abs_diff(head)).min();
            let Some(Next { range: next, .. }) = scheduler.next(CHUNK) else {
                assert_eq!(least, None);
                break;
            };
            assert_eq!(Some((next.start.get() / KIB).abs_diff(head)), least);
            for block in next.start.get() / KIB..next.end().get() / KIB {
                assert!(std::mem::take(&mut is_left[block as usize]));
            }
        }
    }

    /// The chunks in the order in which they are given out, after a guest wrote chunk 3 once, 5 twice, and read 9 three times.
    fn chunks(order: Order) -> Vec<u64> {
        let mut scheduler = Scheduler::new(order, CHUNK, [range(0, 12 * CHUNK)]);
        for (kind, chunk) in [
            (Kind::Read, 9),
            (Kind::Read, 9),
            (Kind::Read, 9),
            (Kind::Write, 5),
            (Kind::Write, 5),
            (Kind::Write, 3),
        ] {
            scheduler.guest(kind, range(chunk * CHUNK, 4 * KIB), true);
        }
        std::iter::from_fn(|| scheduler.next(CHUNK)).map(|next| next.range.start.get() / CHUNK).collect()
    }

    #[test]
    fn orders_rank_chunks_by_what_the_guest_does_there() {
        assert_eq!(chunks(Order::HotFirst), [9, 5, 3, 0, 1, 2, 4, 6, 7, 8, 10, 11]);
        assert_eq!(chunks(Order::ColdFirst), [0, 1, 2, 4, 6, 7, 8, 9, 10, 11, 3, 5]);
        assert_eq!(chunks(Order::Sequential), (0..12).collect::<Vec<_>>());
    }

    #[test]
    fn the_working_set_is_read_as_the_guest_comes_by() {
        let region = REGION_CHUNKS * CHUNK;
        let mut scheduler = Scheduler::new(Order::Predicted, CHUNK, [range(0, 3 * region)]);
        scheduler.guest(Kind::Read, range(region, 4 * KIB), true);
        let next = Next { range: range(region + 4 * KIB, CHUNK / 2), follows: true };
        assert_eq!(scheduler.next(CHUNK / 2), Some(next));
        assert_eq!(scheduler.sent(range(region, 4 * KIB)), 4 * KIB);
        // From memory, and far from the end of what was read ahead.
        scheduler.guest(Kind::Read, range(region + 2 * KIB, KIB), false);
        let next = Next { range: range(region + 4 * KIB + CHUNK / 2, CHUNK / 2), follows: true };
        assert_eq!(scheduler.next(CHUNK), Some(next));
        let rest: Vec<Next> = std::iter::from_fn(|| scheduler.next(CHUNK)).collect();
        let regions = rest.chunk_by(|a, b| a.range.start.get() / region == b.range.start.get() / region);
        let regions: Vec<u64> = regions.map(|run| run[0].range.start.get() / region).collect();
        assert_eq!(regions, [0, 2, 1], "what the guest did not use, then the rest");
    }
}
