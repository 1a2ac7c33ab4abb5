//! A file's pages, read in place.
//!
//! Place in the data flow: an I/O thread of `disk` copies what it was asked for out of the host's page cache itself, without
//! a system call, when it has read the same pages through its [`crate::Ring`] before:
//!
//! ```text
//!   read ──► View::prefetch ──► View::read: a copy out of the page cache
//!              │ false: not known to be there (the host is asked once, for 64 pages at a time)
//!              └──► Ring ──► it is there now ──► View::note
//! ```
//!
//! Reading through the ring costs the kernel a few cache lines of every file that it meets (the file, its inode, its
//! directory entry, the root of its pages), and with a thousand layers each of those is a miss. A mapping has none of that:
//! what is left is the processor's own walk to the page. Whoever has several reads to make asks for all of them with
//! [`View::prefetch`] before the first copy, and the processor makes those walks side by side.
//!
//! Invariants:
//! - What [`View::read`] has copied when it returns true are the file's bytes: memory that was put in the place of a
//!   mapping lost ([`Guard`]) is never taken for them.
//! - Nothing past the end of the file is touched: a view reads as far as the file reached when the view was taken. A
//!   mapping has room for a file that grows, and [`View::grown`] reads on in it.
//! - A page is noted only if there is room for the page table that maps it: with blocks of 4 KiB all over long files, as layers
//!   with subclusters are, those tables take more than anything else of this process.
//! - Pages are noted, not held: the host may take them back at any time. The read that meets such a page waits for the
//!   disk on the spot; the caller notices by its thread's [`major_faults`], and calls [`View::forget`].

use std::os::fd::BorrowedFd;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering, fence};
use std::sync::{Arc, LazyLock};

use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};
use vmstrata_types::HostOffset;

use crate::arena::address_for;
use crate::guard::{Guard, is_any_lost};
use crate::{Segment, prefetch, total_len};

/// What a bit stands for; no larger than any host's page.
const PAGE: u64 = 4096;
/// What a word of bits stands for.
const WORD: u64 = PAGE * 64;

/// What a page table speaks for, in words of bits, on most processors.
const TABLE_WORDS: usize = 8;
/// Of the pages of the host's memory, the part that page tables of all views take at most.
const TABLES_PART: usize = 1024;

/// Page tables that views may still need, by the words that they speak for: short files share one.
fn tables_left() -> &'static AtomicUsize {
    static LEFT: LazyLock<AtomicUsize> = LazyLock::new(|| {
        // SAFETY: takes no pointer.
        let pages = unsafe { libc::sysconf(libc::_SC_PHYS_PAGES) };
        AtomicUsize::new(usize::try_from(pages).unwrap_or(0) / TABLES_PART * TABLE_WORDS)
    });
    &LEFT
}

/// `f_type` of the file systems whose files are viewed: those that answer from this host's own memory and disks. A page
/// that the host took back is waited for by whoever touches it, and nobody should wait so for a network, or for a
/// program.
const LOCAL: [i64; 6] = [
    0xEF53,      // ext4, and ext2, ext3
    0x5846_5342, // XFS
    0x9123_683E, // Btrfs
    0xF2F5_2010, // F2FS
    0xCA45_1A4E, // bcachefs
    0x0102_1994, // tmpfs
];

/// Whether a file lies on such a file system.
pub(crate) fn is_local(file: BorrowedFd<'_>) -> bool {
    // The type is a number of 32 bits whatever integer the C library keeps it in.
    rustix::fs::fstatfs(file).is_ok_and(|found| LOCAL.contains(&(found.f_type & 0xFFFF_FFFF)))
}

/// Longer files are not viewed: what is noted of one takes a bit for each of its pages, and that is
/// looked through when it is forgotten.
const LEN_MAX: u64 = 1 << 40;

/// What [`View::prefetch`] brings near: by then the processor has seen that a copy reads on.
const LINES_AHEAD: usize = 4;
/// Bytes that come near together on most processors.
const LINE: usize = 64;

/// Unmapped at a time: whoever maps something meanwhile waits.
const UNMAPPED_MAX: usize = 64 << 20;

/// See the module documentation. Copies share the mapping; what a read needs of it is at hand in each.
#[derive(Clone, Debug)]
pub struct View {
    start: NonNull<u8>,
    /// Bytes in the file when the view was taken.
    len: u64,
    /// The mapping's words.
    noted: NonNull<AtomicU64>,
    mapping: Arc<Mapping>,
}

// SAFETY: the pointers lead into the mapping that the view keeps, which is only read, by raw copies, and to atomics.
unsafe impl Send for View {}
// SAFETY: as above.
unsafe impl Sync for View {}

#[derive(Debug)]
struct Mapping {
    // Dropped before the memory is unmapped: see `drop`.
    guard: Option<Guard>,
    start: NonNull<u8>,
    len: usize,
    /// A bit for each page: whether it was in memory.
    noted: Box<[AtomicU64]>,
    /// For each word: whether the host was asked which of its pages are in memory.
    asked: Box<[AtomicBool]>,
    /// Whether it is asked at all.
    asks: AtomicBool,
    /// For each page table: whether it was taken from those left.
    tables: Box<[AtomicBool]>,
    tables_left: &'static AtomicUsize,
}

impl Mapping {
    /// Whether there is a page table for the pages of a word, or room for one.
    fn has_table(&self, word: usize) -> bool {
        let table = word / TABLE_WORDS;
        if self.tables[table].load(Ordering::Relaxed) {
            return true;
        }
        let words = self.words_of(table);
        let take = |left: usize| left.checked_sub(words);
        let is_taken = self.tables_left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, take).is_ok();
        // Another thread may have been faster.
        if is_taken && self.tables[table].swap(true, Ordering::Relaxed) {
            self.tables_left.fetch_add(words, Ordering::Relaxed);
        }
        is_taken
    }

    /// Words of this mapping that a page table speaks for.
    fn words_of(&self, table: usize) -> usize {
        TABLE_WORDS.min(self.noted.len() - table * TABLE_WORDS)
    }
}

// SAFETY: the address is only used to ask for its pages and to unmap it, once.
unsafe impl Send for Mapping {}
// SAFETY: as above; all else in a shared mapping is atomics.
unsafe impl Sync for Mapping {}

impl Drop for Mapping {
    fn drop(&mut self) {
        self.guard = None;
        for from in (0..self.len).step_by(UNMAPPED_MAX) {
            let piece = self.start.as_ptr().wrapping_add(from).cast();
            // SAFETY: of what was mapped in `View::new` with this length; every view is gone, and with it every reader.
            if let Err(errno) = unsafe { munmap(piece, UNMAPPED_MAX.min(self.len - from)) } {
                debug_assert!(false, "cannot unmap a file: {errno}");
            }
        }
        let taken = (0..self.tables.len()).filter(|table| self.tables[*table].load(Ordering::Relaxed));
        let words = taken.map(|table| self.words_of(table)).sum();
        self.tables_left.fetch_add(words, Ordering::Relaxed);
    }
}

impl View {
    /// Maps `file`, which has `len` bytes and may grow to `room`; `None` when they are too many, or the host or this process has no room for another
    /// mapping. Only the owner of a file is told which of its pages are in memory; for others each must be noted.
    pub(crate) fn new(file: BorrowedFd<'_>, len: u64, room: u64, is_owner: bool) -> Option<Self> {
        Self::with_tables(file, (len, room), is_owner, tables_left())
    }

    fn with_tables(
        file: BorrowedFd<'_>,
        (len, room): (u64, u64),
        is_owner: bool,
        tables_left: &'static AtomicUsize,
    ) -> Option<Self> {
        let room = room.min(LEN_MAX);
        let size = usize::try_from(room).ok().filter(|_| (1..=room).contains(&len))?;
        let words = room.div_ceil(WORD) as usize;
        // SAFETY: a new mapping, wherever there is room.
        let start = unsafe { mmap(address_for(size), size, ProtFlags::READ, MapFlags::SHARED, file, 0) };
        let start = NonNull::new(start.ok()?.cast::<u8>())?;
        let (noted, asked) = (zeroed(words), zeroed(words));
        // Where pages are larger, the host's answer has fewer of them than there are bits.
        let asks = is_owner && rustix::param::page_size() as u64 == PAGE;
        let (asks, tables) = (asks.into(), zeroed(words.div_ceil(TABLE_WORDS)));
        let mut mapping = Mapping { guard: None, start, len: size, noted, asked, asks, tables, tables_left };
        // SAFETY: the whole mapping, which is only read by raw copies, and which lives longer than the guard.
        mapping.guard = Some(unsafe { Guard::of_pages(start.as_ptr(), size) }?);
        let noted = NonNull::from(&mapping.noted[0]);
        Some(Self { start, len, noted, mapping: Arc::new(mapping) })
    }

    /// The same where the file has `len` bytes by now; `None` when the mapping has no room for them.
    pub(crate) fn grown(&self, len: u64) -> Option<Self> {
        if len > self.mapping.len as u64 {
            return None;
        }
        // The host was asked for its first pages only.
        self.mapping.asked[((self.len - 1) / WORD) as usize].store(false, Ordering::Relaxed);
        Some(Self { len, ..self.clone() })
    }

    /// Whether all bytes up to `end` can be read from it.
    #[inline]
    pub fn reaches(&self, end: HostOffset) -> bool {
        end.get() <= self.len
    }

    /// Copies the bytes at `at` into all of `segments`, if the host has them in memory as far as is known; false when the
    /// segments must be filled in another way.
    #[inline]
    pub fn read(&self, segments: &[Segment<'_>], at: HostOffset) -> bool {
        let len = total_len(segments) as u64;
        let in_memory = |(word, bits)| self.is_noted(word, bits) || self.ask(word, bits);
        if self.is_lost() || !self.has(at.get(), len) || !words(at.get(), len).all(in_memory) {
            return false;
        }
        let mut from = at.get() as usize;
        for segment in segments {
            let bytes = self.start.as_ptr().wrapping_add(from);
            // SAFETY: inside the mapping, as `has` found; the segment's maker promised mapped, writable memory.
            unsafe { segment.address().copy_from(bytes, segment.len()) };
            from += segment.len();
        }
        // After the copy, which may have gone on with other memory than the file's.
        fence(Ordering::SeqCst);
        !self.is_lost()
    }

    /// Has the processor fetch what [`View::read`] will look at first of `len` bytes at `at`, without waiting for it.
    #[inline]
    pub fn prefetch(&self, at: HostOffset, len: usize) {
        let at = at.get() as usize;
        prefetch(self.noted.as_ptr().wrapping_add(at / WORD as usize));
        let from = self.start.as_ptr().wrapping_add(at);
        (0..len.min(LINES_AHEAD * LINE)).step_by(LINE).for_each(|line| prefetch(from.wrapping_add(line)));
    }

    #[inline]
    fn is_lost(&self) -> bool {
        is_any_lost() && self.mapping.guard.as_ref().is_some_and(Guard::is_lost)
    }

    /// `len` bytes at `at` were read from the file a moment ago: the host has them in memory.
    pub fn note(&self, at: HostOffset, len: u64) {
        if self.has(at.get(), len) {
            let new = words(at.get(), len).filter(|(word, bits)| !self.is_noted(*word, *bits));
            new.filter(|(word, _)| self.mapping.has_table(*word)).for_each(|(word, bits)| {
                self.mapping.noted[word].fetch_or(bits, Ordering::Relaxed);
            });
        }
    }

    /// Forgets what was noted; from then on only pages that are noted again are read. To be called when the host has taken
    /// some back: what it says when asked does not last.
    pub fn forget(&self) {
        self.mapping.asks.store(false, Ordering::Relaxed);
        for word in &self.mapping.noted {
            // Words that were never written have no memory, and need none now.
            if word.load(Ordering::Relaxed) != 0 {
                word.store(0, Ordering::Relaxed);
            }
        }
    }

    fn has(&self, at: u64, len: u64) -> bool {
        len > 0 && at.checked_add(len).is_some_and(|end| end <= self.len)
    }

    #[inline]
    fn is_noted(&self, word: usize, bits: u64) -> bool {
        let word = self.noted.as_ptr().wrapping_add(word);
        // SAFETY: the word of a page within the mapping's length, which has one for each.
        let noted = unsafe { &*word };
        noted.load(Ordering::Relaxed) & bits == bits
    }

    /// Asks the host, once, which of the pages around it has in memory; whether those of `bits` are.
    #[cold]
    fn ask(&self, word: usize, bits: u64) -> bool {
        let Mapping { start, len, noted, asked, asks, .. } = &*self.mapping;
        let may_ask = asks.load(Ordering::Relaxed) && self.mapping.has_table(word);
        if !may_ask || asked[word].swap(true, Ordering::Relaxed) {
            return false;
        }
        let mut pages = [0; 64];
        let from = word * WORD as usize;
        let begin = start.as_ptr().wrapping_add(from);
        let some = (len - from).min(WORD as usize);
        // SAFETY: a part of the mapping that begins at a page, and a byte for each page in it.
        let told = unsafe { libc::mincore(begin.cast(), some, pages.as_mut_ptr()) };
        if told == 0 {
            let found = (0..64).filter(|page| pages[*page] & 1 == 1).fold(0, |found, page| found | 1 << page);
            noted[word].fetch_or(found, Ordering::Relaxed);
        }
        self.is_noted(word, bits)
    }
}

/// `len` atomics, all zero, which take no memory before they are written.
fn zeroed<T: Zero>(len: usize) -> Box<[T]> {
    let zeros = Box::new_zeroed_slice(len);
    // SAFETY: as the trait promises.
    unsafe { zeros.assume_init() }
}

/// # Safety
/// All bytes zero are a value of the type.
unsafe trait Zero {}
// SAFETY: an atomic has the layout of its value, and zero is one.
unsafe impl Zero for AtomicU64 {}
// SAFETY: as above; zero is `false`.
unsafe impl Zero for AtomicBool {}

/// The words of the pages that hold a range, each with the bits that belong to it.
#[inline]
fn words(at: u64, len: u64) -> impl Iterator<Item = (usize, u64)> {
    let (first, last) = (at / PAGE, (at + len - 1) / PAGE);
    (first / 64..=last / 64).map(move |word| {
        let from = first.max(word * 64) % 64;
        let to = last.min(word * 64 + 63) % 64;
        (word as usize, (u64::MAX << from) & (u64::MAX >> (63 - to)))
    })
}

/// How often this thread has waited for a page that was not in memory.
pub fn major_faults() -> i64 {
    let mut usage = std::mem::MaybeUninit::<libc::rusage>::zeroed();
    // SAFETY: the kernel fills the whole structure, for which zeros are valid as well.
    unsafe { libc::getrusage(libc::RUSAGE_THREAD, usage.as_mut_ptr()) };
    // SAFETY: zeroed, and filled if the call succeeded.
    unsafe { usage.assume_init() }.ru_majflt
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd as _;

    use super::*;

    #[test]
    fn no_more_page_tables_are_needed_than_are_left() {
        const TABLE: u64 = WORD * TABLE_WORDS as u64;
        let file = tempfile::tempfile().unwrap();
        file.set_len(3 * TABLE).unwrap();
        let left: &'static AtomicUsize = Box::leak(Box::new(AtomicUsize::new(2 * TABLE_WORDS)));
        let view = |len| View::with_tables(file.as_fd(), (len, len), false, left).unwrap();
        let reads = |view: &View, table: u64| {
            let at = HostOffset::new(table * TABLE);
            view.note(at, PAGE);
            view.read(&[Segment::from_mut(&mut [1; PAGE as usize])], at)
        };
        let one = view(3 * TABLE);
        assert!(reads(&one, 2) && reads(&one, 0) && reads(&one, 2), "there is room for two");
        assert!(!reads(&one, 1) && !reads(&view(PAGE), 0));
        drop(one);
        let (one, short) = (view(2 * TABLE), view(PAGE));
        assert!(reads(&one, 0) && reads(&short, 0));
        assert_eq!(left.load(Ordering::Relaxed), TABLE_WORDS - 1, "a short file shares a table");
        drop((one, short));
        assert_eq!(left.load(Ordering::Relaxed), 2 * TABLE_WORDS);
    }
}
