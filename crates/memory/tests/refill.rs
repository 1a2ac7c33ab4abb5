//! Pages that lie on the guest's disks come back from there, and only if they are what they were.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use crate::vault_support::{Guest, Known, Repositories, bytes, new_snapshot, open, policy};
use vmstrata_memory::disk::ReadDisk;
use vmstrata_memory::hide::Clear;
use vmstrata_memory::refill::Refiller;
use vmstrata_memory::restore::lazy::{Lazily, LazyMemory, Left, PageError, prepare};
use vmstrata_memory::restore::{Filled, fill};
use vmstrata_memory::vault::{Closing, DiskPiece, DiskState, Refill, Snapshot, Want};
use vmstrata_memory::{Frame, PAGE_BYTES, PageClass, Physical};

/// Page 0 is critical, and has the words that hide the others; those are all clean, and on one of two disks by turns.
const PAGES: u64 = 300;

fn piece(page: u64) -> DiskPiece {
    let disk = u16::try_from(page % 2).unwrap();
    // Backwards, and what is on the disk is the page's first half: zeros follow.
    DiskPiece { disk, offset: (PAGES - page) * PAGE_BYTES as u64, len: PAGE_BYTES as u16 / 2 }
}

fn guest() -> Guest {
    let class = |page| if page == 0 { PageClass::Critical } else { PageClass::Clean };
    Guest::new(PAGES, |page| Known { class: class(page), seed: page + 1 })
}

fn disks(guest: &Guest) -> [File; 2] {
    let disks = [(); 2].map(|()| tempfile::tempfile().unwrap());
    for ((_, page), number) in guest.pages.iter().zip(0..) {
        let DiskPiece { disk, offset, len } = piece(number);
        disks[usize::from(disk)].write_all_at(&bytes(page.seed)[..len.into()], offset).unwrap();
    }
    disks
}

fn save(repositories: &Repositories, guest: &Guest) -> Snapshot {
    let vault = repositories.vault();
    let mut writer = vault.begin(new_snapshot(guest, "refilled", policy(1, 1))).unwrap();
    let mut hiding = Vec::new();
    for ((frame, page), number) in guest.pages.iter().zip(0..) {
        if page.class == PageClass::Critical {
            writer.page(*frame, page.class, &bytes(page.seed)).unwrap();
            continue;
        }
        let refill = Refill::new(&bytes(page.seed), vec![piece(number)]).hot(number % 10 == 0);
        writer.refill(*frame, refill).unwrap();
        hiding.push((*frame, [Clear { at: Physical::new(number * 4), mask: u32::MAX.into() }]));
    }
    let disk = |name: &str| DiskState::new(name, "refilled");
    let disks = ["a", "b"].map(disk).to_vec();
    writer.finish(Closing { disks, hiding: hiding.into_iter().collect(), ..Closing::default() }).unwrap();
    open(&vault, "refilled").unwrap()
}

/// Fills a file, and checks that each page is either there or hidden; returns the numbers of those that are hidden.
fn restore(snapshot: &Snapshot, guest: &Guest, disks: [Option<&File>; 2]) -> Vec<u64> {
    let handle =
        |disk: Option<&File>| disk.map(|file| Box::new(file.try_clone().unwrap()) as Box<dyn ReadDisk>);
    let refiller = Refiller::new(snapshot.refill().unwrap(), disks.map(handle).into());
    let memory = tempfile::tempfile().unwrap();
    let len = guest.layout.bytes();
    memory.set_len(len).unwrap();
    let filled =
        fill(snapshot, Want::All, Some(&refiller), vec![(memory.try_clone().unwrap(), len)]).unwrap();
    let mut first = [0; PAGE_BYTES];
    memory.read_exact_at(&mut first, 0).unwrap();
    let mut hidden = Vec::new();
    for (page, number) in guest.pages.values().zip(0..PAGES).skip(1) {
        let mut there = [0; PAGE_BYTES];
        memory.read_exact_at(&mut there, number * PAGE_BYTES as u64).unwrap();
        let word = &first[number as usize * 4..][..4];
        if word == [0; 4] {
            assert!(there == [0; PAGE_BYTES], "page {number} is hidden, and not empty");
            hidden.push(number);
        } else {
            assert!(there == bytes(page.seed), "page {number} is not what it was");
            assert_eq!(word, &bytes(1)[number as usize * 4..][..4]);
        }
    }
    assert_eq!((filled.refilled, filled.hidden), (PAGES - 1 - hidden.len() as u64, hidden.len() as u64));
    hidden
}

#[test]
fn pages_come_back_from_the_disks_or_are_hidden() {
    let (repositories, guest) = (Repositories::new(1), guest());
    let disks = disks(&guest);
    let snapshot = save(&repositories, &guest);
    assert_eq!(restore(&snapshot, &guest, [Some(&disks[0]), Some(&disks[1])]), [0; 0]);
    let odd: Vec<u64> = (1..PAGES).filter(|page| page % 2 == 1).collect();
    assert_eq!(restore(&snapshot, &guest, [Some(&disks[0]), None]), odd);
    assert_eq!(restore(&snapshot, &guest, [None, None]).len() as u64, PAGES - 1);
    // One byte of a page is another now, and the disk ends before others.
    disks[0].write_all_at(&[0xff], piece(100).offset + 7).unwrap();
    disks[1].set_len(piece(9).offset + 5).unwrap();
    assert_eq!(restore(&snapshot, &guest, [Some(&disks[0]), Some(&disks[1])]), [1, 3, 5, 7, 9, 100]);
    // Disks that were swapped have none of the pages.
    assert_eq!(restore(&snapshot, &guest, [Some(&disks[1]), Some(&disks[0])]).len() as u64, PAGES - 1);
}

#[test]
fn a_page_that_is_not_on_disk_is_left_to_be_hidden() {
    let (repositories, guest) = (Repositories::new(1), guest());
    let snapshot = save(&repositories, &guest);
    let refiller = Refiller::new(snapshot.refill().unwrap(), Vec::new());
    let critical = Frame::new(0);
    let frames = [critical, Frame::new(1), Frame::new(1 << 40)];
    let missing = refiller.pages(&frames, None, |_, _| panic!("a page from nowhere")).unwrap();
    assert_eq!(missing, frames);
}

/// A disk that can be made to fail.
struct Flaky(File, Arc<AtomicBool>);

impl ReadDisk for Flaky {
    fn read_at(&self, offset: u64, into: &mut [u8]) -> io::Result<()> {
        if self.1.load(Ordering::Relaxed) {
            return Err(io::ErrorKind::TimedOut.into());
        }
        ReadDisk::read_at(&self.0, offset, into)
    }

    fn check(&self, offset: u64, len: u64) -> io::Result<()> {
        self.0.check(offset, len)
    }
}

/// A guest that is restored lazily from its disks.
struct Lazy {
    _repositories: Repositories,
    guest: Guest,
    disks: [File; 2],
    fails: Arc<AtomicBool>,
    memory: LazyMemory,
    filled: Filled,
}

impl Lazy {
    /// With so many seconds for the cache before the guest runs; `change` is what happens to the disks before that.
    fn new(seconds: u64, refill_later: bool, change: impl FnOnce(&mut [Option<File>; 2])) -> Self {
        let (repositories, guest) = (Repositories::new(1), guest());
        let disks = disks(&guest);
        let snapshot = save(&repositories, &guest);
        let mut left = disks.each_ref().map(|disk| Some(disk.try_clone().unwrap()));
        change(&mut left);
        let fails = Arc::new(AtomicBool::new(false));
        let flaky = |disk: Option<File>| {
            disk.map(|file| Box::new(Flaky(file, Arc::clone(&fails))) as Box<dyn ReadDisk>)
        };
        let snapshot = Arc::new(snapshot);
        let of_table = Arc::clone(&snapshot);
        let refiller = Refiller::new(of_table.refill().unwrap(), left.map(flaky).into());
        let cache_time = Duration::from_secs(seconds);
        let lazily = Lazily { want: Want::All, cache_time, refill_later, patience: Duration::ZERO };
        let local = tempfile::tempfile().unwrap();
        let (memory, filled) =
            prepare(repositories.vault(), snapshot, Some(refiller), local, lazily).unwrap();
        Self { _repositories: repositories, guest, disks, fails, memory, filled }
    }

    fn page(&self, number: u64) -> Result<[u8; PAGE_BYTES], PageError> {
        let mut page = [0; PAGE_BYTES];
        self.memory.read(number * PAGE_BYTES as u64, &mut page).map(|()| page)
    }

    /// Whether the guest is told that it has the page.
    fn is_hidden(&self, number: u64) -> bool {
        let word = &self.page(0).unwrap()[number as usize * 4..][..4];
        word == [0; 4]
    }

    /// Checks that each page is there, but for those that are hidden; returns their numbers.
    fn hidden(&self) -> Vec<u64> {
        let hidden: Vec<u64> = (1..PAGES).filter(|&number| self.is_hidden(number)).collect();
        for (page, number) in self.guest.pages.values().zip(0..).skip(1) {
            let right = if hidden.contains(&number) { [0; PAGE_BYTES] } else { bytes(page.seed) };
            assert!(self.page(number).unwrap() == right, "page {number}");
        }
        assert_eq!(self.filled.hidden, hidden.len() as u64);
        hidden
    }
}

/// With time the whole cache comes from the disks before the guest runs; without any, all of it is hidden.
#[test]
fn a_guest_that_runs_first_has_what_there_was_time_for() {
    for (seconds, has_cache) in [(600, true), (0, false)] {
        let lazy = Lazy::new(seconds, false, |_| ());
        let count = |is: bool| if is { PAGES - 1 } else { 0 };
        let expected =
            Filled { pages: count(has_cache), refilled: count(has_cache), hidden: count(!has_cache) };
        assert_eq!(lazy.filled, expected);
        assert_eq!(lazy.memory.left().pages, 1);
        assert_eq!(lazy.hidden().len() as u64, count(!has_cache));
    }
}

#[test]
fn cache_that_was_not_read_in_time_is_read_while_the_guest_runs() {
    let lazy = Lazy::new(0, true, |_| ());
    assert_eq!((lazy.filled.hidden, lazy.memory.left().of), (0, PAGES));
    // It is read along with its neighbours on the disk, which hold half a page each: one by one, here.
    assert!(lazy.page(9).unwrap() == bytes(10));
    assert_eq!(lazy.memory.left().pages, PAGES - 1);
    assert!(lazy.memory.fill(None, &AtomicBool::new(false), |_| ()));
    lazy.fails.store(true, Ordering::Relaxed);
    assert_eq!(lazy.hidden(), [0; 0], "the disks are not needed any more");
}

/// What the guest needs for sure comes first, then what it is likely to need.
#[test]
fn hot_cache_is_read_before_other_cache() {
    let lazy = Lazy::new(0, true, |_| ());
    let (hot, stop) = (PAGES / 10 - 1, AtomicBool::new(false));
    let tell = |left: Left| stop.store(left.of - left.pages == 1 + hot, Ordering::Relaxed);
    assert!(!lazy.memory.fill(None, &stop, tell));
    lazy.fails.store(true, Ordering::Relaxed);
    let here: Vec<u64> = (0..PAGES).filter(|&number| lazy.page(number).is_ok()).collect();
    assert_eq!(here, (0..PAGES).step_by(10).collect::<Vec<_>>());
}

/// What is missing when the guest starts can still be hidden.
#[test]
fn cache_whose_place_cannot_be_read_is_hidden() {
    let odd: Vec<u64> = (1..PAGES).filter(|page| page % 2 == 1).collect();
    assert_eq!(Lazy::new(0, true, |disks| disks[1] = None).hidden(), odd);
    let short = |disks: &mut [Option<File>; 2]| {
        disks[1].as_ref().unwrap().set_len(piece(9).offset + 5).unwrap();
    };
    assert_eq!(Lazy::new(0, true, short).hidden(), [1, 3, 5, 7, 9]);
    // It was read, and is not what it was.
    let changed = |disks: &mut [Option<File>; 2]| {
        disks[0].as_ref().unwrap().write_all_at(&[0xff], piece(100).offset + 7).unwrap();
    };
    assert_eq!(Lazy::new(600, true, changed).hidden(), [100]);
}

/// The guest would read the same had the page been hidden.
#[test]
fn cache_that_changed_on_disk_is_what_the_disk_has() {
    let lazy = Lazy::new(0, true, |_| ());
    lazy.disks[0].write_all_at(&[0xee], piece(100).offset + 7).unwrap();
    let mut changed = bytes(101);
    changed[7] = 0xee;
    assert!(lazy.page(100).unwrap() == changed && lazy.page(102).unwrap() == bytes(103));
}

#[test]
fn a_disk_that_fails_loses_no_cache() {
    let lazy = Lazy::new(0, true, |_| ());
    lazy.fails.store(true, Ordering::Relaxed);
    let lost = lazy.page(7).map(drop);
    assert!(
        matches!(&lost, Err(PageError::Lost { tried, .. }) if tried[0].contains("timed out")),
        "{lost:?}"
    );
    assert!(!lazy.memory.fill(None, &AtomicBool::new(false), |_| ()));
    lazy.fails.store(false, Ordering::Relaxed);
    assert!(lazy.memory.fill(None, &AtomicBool::new(false), |_| ()));
    assert_eq!(lazy.hidden(), [0; 0]);
}
