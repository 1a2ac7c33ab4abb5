//! The metadata cache: pages of 512 words, shared by every disk of the process, in one fixed byte budget.
//!
//! ```text
//!   key = owner | page ──hash──► set of 8 ways: tag, version, frame ──► frame: 512 words
//! ```
//!
//! Two kinds of owner put pages here: a frozen map ([`crate::map`], words are [`crate::entry::MapEntry`]) and an
//! active layer ([`crate::active`], words are its L2 entries). The cache knows neither; a miss only costs time.
//!
//! Lookups take no lock. Each way is a seqlock: its version is odd while its page is replaced, and a reader that
//! saw the version change starts over. One word is updated in place with a plain atomic store, so a lookup sees
//! the old or the new word; two words of one entry change under the version, so a lookup sees both or asks again. Fills and updates of one set exclude each other by the set's mutex (a leaf lock).
//!
//! Frames are handed out one after another, those of dropped pages first, so a small working set stays small in memory;
//! the budget is never passed, because there are no more frames than fit.

mod owner;

use std::io;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering, fence};

use parking_lot::Mutex;
use vmstrata_store::prefetch;

use crate::error::{Error, Result};

/// Words in a page: 4 KiB of 8-byte entries.
pub(crate) const PAGE_WORDS: usize = 512;
/// log2 of [`PAGE_WORDS`].
pub(crate) const PAGE_SHIFT: u32 = 9;
/// Bytes of a page's words.
pub(crate) const PAGE_BYTES: usize = PAGE_WORDS * 8;

const WAYS: usize = 8;
/// Words of a page, and what a way costs beside them.
const FRAME_COST: u64 = PAGE_BYTES as u64 + 8 + 4 + 4 + 1;
const MIN_SETS: usize = 4;
/// 512 GiB of pages: frame numbers stay well inside 32 bits.
const MAX_SETS: usize = 1 << 24;
const PAGE_BITS: u32 = 44;
/// Looks at an entry of two words before its page counts as missing.
const PAIR_TRIES: usize = 4;

/// Names a page: its owner and its number there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PageKey(u64);

impl PageKey {
    /// Owners that can exist in the life of a process (20 bits; 0 is not used, so that no key is 0).
    pub(crate) const MAX_OWNER: u32 = (1 << (64 - PAGE_BITS)) - 1;
    /// Pages that an owner can have, in each of two levels.
    pub(crate) const MAX_PAGES: u64 = 1 << (PAGE_BITS - 1);

    /// # Panics
    /// When owner or page is out of range: disks too large for the cache are refused when they are opened.
    pub(crate) fn new(owner: u32, page: u64) -> Self {
        assert!(owner != 0 && owner <= Self::MAX_OWNER && page < Self::MAX_PAGES, "page key out of range");
        Self(u64::from(owner) << PAGE_BITS | page)
    }

    /// The owner's page of the same number in its second level.
    pub(crate) fn in_second_level(self) -> Self {
        Self(self.0 | Self::MAX_PAGES)
    }

    /// Fibonacci hashing, then a multiplication instead of a division to get below `sets`: neighbouring pages
    /// of one owner land in different sets, and the number of sets need not be a power of two.
    fn set(self, sets: usize) -> usize {
        let hash = self.0.wrapping_mul(0x9E37_79B9_7F4A_7C15);
        ((u128::from(hash) * sets as u128) >> 64) as usize
    }
}

pub(crate) use owner::{Owner, Owners};

/// See the module documentation.
pub(crate) struct PageCache {
    /// Key of the page in each way; 0 when it holds none. `[set * WAYS + way]`
    tags: Box<[AtomicU64]>,
    /// Seqlock version of each way; odd while the page is replaced.
    versions: Box<[AtomicU32]>,
    /// Frame of each way, plus one; 0 while it has none.
    frames: Box<[AtomicU32]>,
    /// Set by lookups, cleared by the clock hand: a page in use gets a second chance.
    referenced: Box<[AtomicBool]>,
    /// `[frame][word]`; untouched frames cost no memory.
    words: Box<[AtomicU64]>,
    /// Clock hand of each set; the lock orders fills and updates of the set.
    hands: Box<[Mutex<u8>]>,
    frames_used: AtomicU32,
    /// Frames without a way; they have memory.
    spare: Mutex<Vec<u32>>,
    /// Pages put in: each was missed by someone, or read ahead.
    fills: AtomicU64,
}

impl std::fmt::Debug for PageCache {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "PageCache({} of {} pages)", self.pages_used(), self.tags.len())
    }
}

fn zeroed<T: bytemuck::Zeroable>(len: usize) -> Result<Box<[T]>> {
    bytemuck::try_zeroed_slice_box(len).map_err(|()| {
        let action =
            "set the metadata cache aside (a smaller --metadata-cache or a higher limit, ulimit -v, helps)";
        Error::io(action, io::ErrorKind::OutOfMemory.into())
    })
}

impl PageCache {
    /// A cache that never holds more than `budget_bytes` (at least 32 pages, 128 KiB).
    ///
    /// # Errors
    /// A host that does not give this process as much address space.
    pub(crate) fn new(budget_bytes: u64) -> Result<Self> {
        let ways = usize::try_from(budget_bytes / FRAME_COST).unwrap_or(usize::MAX);
        let sets = (ways / WAYS).clamp(MIN_SETS, MAX_SETS);
        let ways = sets * WAYS;
        Ok(Self {
            tags: zeroed(ways)?,
            versions: zeroed(ways)?,
            frames: zeroed(ways)?,
            referenced: (0..ways).map(|_| AtomicBool::new(false)).collect(),
            words: zeroed(ways * PAGE_WORDS)?,
            hands: (0..sets).map(|_| Mutex::new(0)).collect(),
            frames_used: AtomicU32::new(0),
            spare: Mutex::default(),
            fills: AtomicU64::new(0),
        })
    }

    /// Pages that fit.
    pub(crate) fn capacity_pages(&self) -> u64 {
        self.tags.len() as u64
    }

    /// Pages put in so far.
    pub(crate) fn fills(&self) -> u64 {
        self.fills.load(Ordering::Relaxed)
    }

    /// Pages that have memory.
    pub(crate) fn pages_used(&self) -> u64 {
        u64::from(self.frames_used.load(Ordering::Relaxed))
    }

    fn ways(&self, key: PageKey) -> std::ops::Range<usize> {
        let first = key.set(self.hands.len()) * WAYS;
        first..first + WAYS
    }

    /// The word at `slot` of the page, or `None` when the page is not here (or is being replaced).
    #[inline]
    pub(crate) fn get(&self, key: PageKey, slot: usize) -> Option<u64> {
        self.words_at(key, slot).map(|[word]| word)
    }

    /// The two words at `slot`, an even number, of the page.
    #[inline]
    pub(crate) fn get_pair(&self, key: PageKey, slot: usize) -> Option<[u64; 2]> {
        // A page of which an entry changes is there a moment later.
        (0..PAIR_TRIES).find_map(|_| self.words_at(key, slot))
    }

    #[inline]
    fn words_at<const N: usize>(&self, key: PageKey, slot: usize) -> Option<[u64; N]> {
        for way in self.ways(key) {
            let version = self.versions[way].load(Ordering::Acquire);
            if self.tags[way].load(Ordering::Relaxed) != key.0 {
                continue;
            }
            let frame = self.frames[way].load(Ordering::Relaxed) as usize;
            if version & 1 == 1 || frame == 0 {
                return None;
            }
            // Acquire: whoever sees an updated L2 entry also sees what was done before it was published.
            let first = (frame - 1) * PAGE_WORDS + (slot & (PAGE_WORDS - 1));
            let words = std::array::from_fn(|word| self.words[first + word].load(Ordering::Acquire));
            fence(Ordering::Acquire);
            if self.versions[way].load(Ordering::Relaxed) != version {
                return None;
            }
            if !self.referenced[way].load(Ordering::Relaxed) {
                self.referenced[way].store(true, Ordering::Relaxed);
            }
            return Some(words);
        }
        None
    }

    /// Has the processor fetch the word at `slot` of the page, if it is here, for [`PageCache::get`].
    #[inline]
    pub(crate) fn prefetch(&self, key: PageKey, slot: usize) {
        let way = self.ways(key).find(|way| self.tags[*way].load(Ordering::Relaxed) == key.0);
        let frame = way.map_or(0, |way| self.frames[way].load(Ordering::Relaxed) as usize);
        if frame > 0 {
            prefetch(&raw const self.words[(frame - 1) * PAGE_WORDS + (slot & (PAGE_WORDS - 1))]);
        }
    }

    /// Whether the page is here now.
    pub(crate) fn contains(&self, key: PageKey) -> bool {
        self.get(key, 0).is_some()
    }

    /// Puts a page in, replacing the one of its set that was not looked up for longest.
    ///
    /// # Panics
    /// When `words` is not a page.
    pub(crate) fn fill(&self, key: PageKey, words: &[u64]) {
        assert_eq!(words.len(), PAGE_WORDS, "a page has {PAGE_WORDS} words");
        self.fills.fetch_add(1, Ordering::Relaxed);
        let ways = self.ways(key);
        let mut hand = self.hands[ways.start / WAYS].lock();
        let way = ways
            .clone()
            .find(|&way| self.tags[way].load(Ordering::Relaxed) == key.0)
            .or_else(|| ways.clone().find(|&way| self.tags[way].load(Ordering::Relaxed) == 0))
            .unwrap_or_else(|| self.victim(ways.start, &mut hand));
        // Before the fence: who sees words of this page in a frame that had another one sees that other one's end, too.
        let frame = match self.frames[way].load(Ordering::Relaxed) {
            0 => self.take_frame(),
            frame => frame,
        };
        let version = self.versions[way].load(Ordering::Relaxed);
        self.versions[way].store(version.wrapping_add(1), Ordering::Relaxed);
        fence(Ordering::Release);
        self.frames[way].store(frame, Ordering::Relaxed);
        let first = (frame as usize - 1) * PAGE_WORDS;
        for (cell, &word) in self.words[first..first + PAGE_WORDS].iter().zip(words) {
            cell.store(word, Ordering::Relaxed);
        }
        self.tags[way].store(key.0, Ordering::Relaxed);
        self.referenced[way].store(true, Ordering::Relaxed);
        self.versions[way].store(version.wrapping_add(2), Ordering::Release);
    }

    /// Second-chance replacement inside one set.
    fn victim(&self, first: usize, hand: &mut u8) -> usize {
        loop {
            let way = first + usize::from(*hand);
            *hand = (*hand + 1) % WAYS as u8;
            if !self.referenced[way].swap(false, Ordering::Relaxed) {
                return way;
            }
        }
    }

    /// Copies the page's words; false when it is not here (or is replaced meanwhile).
    pub(crate) fn copy(&self, key: PageKey, words: &mut [u64; PAGE_WORDS]) -> bool {
        let Some(way) = self.ways(key).find(|way| self.tags[*way].load(Ordering::Relaxed) == key.0) else {
            return false;
        };
        let version = self.versions[way].load(Ordering::Acquire);
        let frame = self.frames[way].load(Ordering::Relaxed) as usize;
        // The tag may have changed before the version was looked at.
        if version & 1 == 1 || frame == 0 || self.tags[way].load(Ordering::Relaxed) != key.0 {
            return false;
        }
        let first = (frame - 1) * PAGE_WORDS;
        for (word, cell) in words.iter_mut().zip(&self.words[first..first + PAGE_WORDS]) {
            // Acquire, as in `get`.
            *word = cell.load(Ordering::Acquire);
        }
        fence(Ordering::Acquire);
        let is_same = self.versions[way].load(Ordering::Relaxed) == version;
        if is_same {
            self.referenced[way].store(true, Ordering::Relaxed);
        }
        is_same
    }

    /// Changes one word of the page if the page is here.
    pub(crate) fn update(&self, key: PageKey, slot: usize, word: u64) {
        let ways = self.ways(key);
        let _hand = self.hands[ways.start / WAYS].lock();
        for way in ways {
            if self.tags[way].load(Ordering::Relaxed) == key.0 {
                let frame = self.frames[way].load(Ordering::Relaxed) as usize;
                self.words[(frame - 1) * PAGE_WORDS + slot].store(word, Ordering::Release);
            }
        }
    }

    /// Changes the two words at `slot` of the page if the page is here.
    pub(crate) fn update_pair(&self, key: PageKey, slot: usize, words: [u64; 2]) {
        let ways = self.ways(key);
        let _hand = self.hands[ways.start / WAYS].lock();
        for way in ways {
            if self.tags[way].load(Ordering::Relaxed) == key.0 {
                let version = self.versions[way].load(Ordering::Relaxed);
                self.versions[way].store(version.wrapping_add(1), Ordering::Relaxed);
                fence(Ordering::Release);
                let first = (self.frames[way].load(Ordering::Relaxed) as usize - 1) * PAGE_WORDS + slot;
                for (cell, word) in self.words[first..first + 2].iter().zip(words) {
                    cell.store(word, Ordering::Release);
                }
                self.versions[way].store(version.wrapping_add(2), Ordering::Release);
            }
        }
    }

    /// Drops every page of some owners; they must not be used any more.
    pub(crate) fn forget(&self, is_one: impl Fn(u32) -> bool) {
        for (set, hand) in self.hands.iter().enumerate() {
            let _hand = hand.lock();
            for way in set * WAYS..(set + 1) * WAYS {
                let tag = self.tags[way].load(Ordering::Relaxed);
                if tag != 0 && is_one((tag >> PAGE_BITS) as u32) {
                    self.empty(way);
                }
            }
        }
    }

    /// Drops a page; the next to ask for it makes it again.
    pub(crate) fn forget_page(&self, key: PageKey) {
        let mut ways = self.ways(key);
        let _hand = self.hands[ways.start / WAYS].lock();
        if let Some(way) = ways.find(|&way| self.tags[way].load(Ordering::Relaxed) == key.0) {
            self.empty(way);
        }
    }

    /// Under the lock of the way's set.
    fn empty(&self, way: usize) {
        let version = self.versions[way].load(Ordering::Relaxed);
        self.versions[way].store(version.wrapping_add(1), Ordering::Relaxed);
        fence(Ordering::Release);
        self.tags[way].store(0, Ordering::Relaxed);
        let frame = self.frames[way].swap(0, Ordering::Relaxed);
        self.versions[way].store(version.wrapping_add(2), Ordering::Release);
        self.spare.lock().push(frame);
    }

    /// A frame, plus one.
    fn take_frame(&self) -> u32 {
        let spare = self.spare.lock().pop();
        spare.unwrap_or_else(|| self.frames_used.fetch_add(1, Ordering::Relaxed) + 1)
    }
}

#[cfg(test)]
mod tests;
