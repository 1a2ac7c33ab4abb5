//! A memory that is read while its guest runs: what it reads is the snapshot or what was written since, never anything else.

use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use crate::vault_support::fault::{Effect, Plan, faulty};
use crate::vault_support::{Guest, Known, Repositories, bytes, flip, new_snapshot, open, policy, save};
use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};
use vmstrata_memory::BoxError;
use vmstrata_memory::hide::Clear;
use vmstrata_memory::restore::lazy::{
    Give, Lazily, LazyMemory, MemoryFile, Mounted, PageError, PageSource, detach, prepare,
};
use vmstrata_memory::restore::{Filled, RestoreError};
use vmstrata_memory::vault::{Closing, Deleted, Vault, Want};
use vmstrata_memory::{Frame, PAGE_BYTES, PageClass};

const ALL: Lazily = Lazily {
    want: Want::All,
    cache_time: Duration::from_secs(600),
    refill_later: false,
    patience: Duration::ZERO,
};
const PAGE: u64 = PAGE_BYTES as u64;

fn guest(seed: u64) -> Guest {
    Guest::random(120, &mut SmallRng::seed_from_u64(seed))
}

fn lazy(vault: &Arc<Vault>, lazily: Lazily) -> Result<(LazyMemory, Filled), RestoreError> {
    let snapshot = Arc::new(open(vault, "1")?);
    prepare(Arc::clone(vault), snapshot, None, tempfile::tempfile()?, lazily)
}

/// The guest's memory, its blocks one after the other; free pages are zeros.
fn image(guest: &Guest) -> Vec<u8> {
    let page = |page: &Known| bytes(if page.class == PageClass::Free { 0 } else { page.seed });
    guest.pages.values().flat_map(page).collect()
}

/// A guest that needs all of its pages, no two of them the same.
fn needy() -> Guest {
    Guest::new(120, |page| Known { class: PageClass::Critical, seed: page + 1 })
}

/// The repository's object of critical pages.
fn object(repositories: &Repositories) -> PathBuf {
    let name = repositories.files()[0].iter().find(|name| name.ends_with(".critical")).cloned();
    repositories.dirs[0].path().join(name.expect("critical pages"))
}

fn read(memory: &LazyMemory, at: u64, len: usize) -> Result<Vec<u8>, PageError> {
    let mut bytes = vec![0xee; len];
    memory.read(at, &mut bytes)?;
    Ok(bytes)
}

/// Reads, writes and discards at random, with the background at work, against a plain array.
#[test]
fn a_memory_is_the_snapshot_and_what_was_written_since() {
    for seed in 0..20 {
        let (repositories, guest) = (Repositories::new(1), guest(seed));
        save(&repositories.vault(), &guest, "1", policy(1, 1));
        let (memory, filled) = lazy(&repositories.vault(), ALL).unwrap();
        assert_eq!(filled.hidden, 0);
        let mut plain = image(&guest);
        let stop = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| while !memory.fill(Some(4 << 20), &stop, |_| ()) {});
            let mut rng = SmallRng::seed_from_u64(seed);
            for _ in 0..150 {
                let at = rng.random_range(0..plain.len());
                let len = rng.random_range(0..=(plain.len() - at).min(5 * PAGE_BYTES));
                match rng.random_range(0..4) {
                    0 => {
                        let fill = rng.random();
                        plain[at..at + len].fill(fill);
                        memory.write(at as u64, &vec![fill; len]).unwrap();
                    }
                    1 => {
                        plain[at..at + len].fill(0);
                        memory.discard(at as u64, len as u64).unwrap();
                    }
                    _ => {
                        assert!(read(&memory, at as u64, len).unwrap() == plain[at..at + len], "{at} {len}");
                    }
                }
            }
        });
        assert_eq!(memory.left().pages, 0);
        assert!(read(&memory, 0, plain.len()).unwrap() == plain, "seed {seed}");
        assert!(matches!(read(&memory, plain.len() as u64, 1), Err(PageError::Range { .. })));
    }
}

#[test]
fn a_page_is_read_with_its_extent_and_nothing_else_is() {
    let (repositories, guest) =
        (Repositories::new(1), Guest::new(64, |page| Known { class: PageClass::Critical, seed: page + 1 }));
    save(&repositories.vault(), &guest, "1", policy(1, 1));
    let (memory, _) = lazy(&repositories.vault(), ALL).unwrap();
    assert_eq!((memory.left().pages, memory.left().of), (64, 64));
    read(&memory, 9 * PAGE, 1).unwrap();
    // Extents of these tests have 4 pages.
    assert_eq!(memory.left().pages, 60);
}

/// When all is here the snapshot is let go, and can be deleted.
#[test]
fn the_vault_is_needed_until_all_is_here_and_not_after() {
    let (repositories, guest) = (Repositories::new(2), guest(7));
    let saved = save(&repositories.vault(), &guest, "1", policy(2, 1));
    let (memory, _) = lazy(&repositories.vault(), ALL).unwrap();
    let stop = AtomicBool::new(true);
    assert!(!memory.fill(None, &stop, |_| ()), "told to stop");
    stop.store(false, Ordering::Relaxed);
    let mut told = Vec::new();
    assert!(memory.fill(None, &stop, |left| told.push(left.pages)));
    assert!(told.is_sorted_by(|one, other| one > other) && told.last() == Some(&0), "{told:?}");
    assert!(matches!(repositories.vault().delete(&[saved.id]).unwrap(), Deleted::Collected(_)));
    assert!(repositories.is_empty());
    assert!(read(&memory, 0, memory.bytes() as usize).unwrap() == image(&guest));
}

/// Pages of cache that were not read before the guest runs are zeros, and what says that the guest has them is cleared.
#[test]
fn cache_that_was_not_read_is_hidden() {
    let repositories = Repositories::new(1);
    let class = |page| if page % 3 == 0 { PageClass::Clean } else { PageClass::Critical };
    let guest = Guest::new(60, |page| Known { class: class(page), seed: page + 1 });
    let frames: Vec<Frame> = guest.pages.keys().copied().collect();
    // What hides page n lies in the page after it.
    let clear = |number: usize| {
        let at = frames[number + 1].start().unwrap().checked_add(number as u64 * 7).unwrap();
        Clear { at, mask: 0x8000_0001 }
    };
    let hidden = (0..60).filter(|page| page % 3 == 0).map(|page| (frames[page], [clear(page)]));
    let mut writer = repositories.vault().begin(new_snapshot(&guest, "1", policy(1, 1))).unwrap();
    guest.give(&mut writer).unwrap();
    let closing = Closing { taken_ns: 1, hiding: hidden.collect(), ..Closing::default() };
    writer.finish(closing).unwrap();
    let mut plain = image(&guest);
    for page in (0..60).step_by(3) {
        let at = (page + 1) * PAGE_BYTES + page * 7;
        let word = u32::from_le_bytes(plain[at..at + 4].try_into().unwrap()) & !0x8000_0001;
        plain[at..at + 4].copy_from_slice(&word.to_le_bytes());
        plain[page * PAGE_BYTES..][..PAGE_BYTES].fill(0);
    }
    let none = Lazily { cache_time: Duration::ZERO, ..ALL };
    for lazily in [none, Lazily { want: Want::Critical, ..ALL }] {
        let (memory, filled) = lazy(&repositories.vault(), lazily).unwrap();
        assert_eq!((filled.hidden, filled.pages), (20, 0));
        assert!(read(&memory, 0, plain.len()).unwrap() == plain);
        assert_eq!(memory.left(), vmstrata_memory::restore::lazy::Left { pages: 0, of: 40, lost: 0 });
    }
}

#[test]
fn cache_that_nothing_hides_is_an_error_before_the_guest_runs() {
    let (repositories, guest) = (Repositories::new(1), guest(3));
    save(&repositories.vault(), &guest, "1", policy(1, 1));
    let refused = lazy(&repositories.vault(), Lazily { cache_time: Duration::ZERO, ..ALL });
    assert!(matches!(refused, Err(RestoreError::Unhidden { .. })));
}

/// A repository fails at each operation in turn: another copy is read.
#[test]
fn a_repository_that_fails_at_any_operation_costs_nothing_while_another_has_a_copy() {
    let (repositories, guest) = (Repositories::new(2), guest(5));
    save(&repositories.vault(), &guest, "1", policy(2, 2));
    let plain = image(&guest);
    for at in 0.. {
        let plan = Plan::new(at, Effect::Dead);
        let mut both = repositories.repositories();
        let bad = faulty(vec![both.remove(0)], &plan);
        let vault = Vault::open(bad.into_iter().chain(both).collect());
        let (memory, filled) = lazy(&vault, ALL).unwrap();
        assert_eq!(filled.hidden, 0, "{at}");
        assert!(read(&memory, 0, plain.len()).unwrap() == plain, "{at}");
        if plan.asked.load(Ordering::Relaxed) < at {
            return;
        }
    }
}

/// What cannot be read is an error each time, never zeros; what can is right, and when the repository is back all is.
#[test]
fn the_only_repository_lost_and_found_again() {
    let (repositories, guest) = (Repositories::new(1), needy());
    save(&repositories.vault(), &guest, "1", policy(1, 1));
    let plain = image(&guest);
    let (memory, _) = lazy(&repositories.vault(), ALL).unwrap();
    read(&memory, 0, PAGE_BYTES).unwrap();
    let path = repositories.dirs[0].path();
    let objects: Vec<_> = repositories.files()[0].iter().map(|name| path.join(name)).collect();
    let kept: Vec<Vec<u8>> = objects.iter().map(|object| std::fs::read(object).unwrap()).collect();
    for object in &objects {
        // Open files must notice too.
        File::options().write(true).open(object).unwrap().set_len(0).unwrap();
        std::fs::remove_file(object).unwrap();
    }
    for _ in 0..2 {
        let lost = read(&memory, 80 * PAGE, PAGE_BYTES).map(drop);
        assert!(matches!(&lost, Err(PageError::Lost { tried, .. }) if !tried.is_empty()), "{lost:?}");
    }
    assert!(!memory.fill(None, &AtomicBool::new(false), |_| ()));
    assert_eq!((memory.left().pages, memory.left().lost), (116, 116));
    assert!(read(&memory, 0, 4 * PAGE_BYTES).unwrap() == plain[..4 * PAGE_BYTES]);
    for (object, bytes) in objects.iter().zip(&kept) {
        std::fs::write(object, bytes).unwrap();
    }
    assert!(memory.fill(None, &AtomicBool::new(false), |_| ()));
    assert!(read(&memory, 0, plain.len()).unwrap() == plain);
    assert_eq!(memory.left().lost, 0);
}

/// A page that cannot be read for a moment is waited for.
#[test]
fn a_page_is_tried_again_while_there_is_patience() {
    let (repositories, guest) = (Repositories::new(1), needy());
    save(&repositories.vault(), &guest, "1", policy(1, 1));
    let patient = Lazily { patience: Duration::from_secs(600), ..ALL };
    let (memory, _) = lazy(&repositories.vault(), patient).unwrap();
    let object = object(&repositories);
    let kept = std::fs::read(&object).unwrap();
    File::options().write(true).open(&object).unwrap().set_len(0).unwrap();
    std::thread::scope(|scope| {
        let reader = scope.spawn(|| read(&memory, 80 * PAGE, PAGE_BYTES).unwrap());
        std::thread::sleep(Duration::from_millis(100));
        std::fs::write(&object, &kept).unwrap();
        assert!(reader.join().unwrap() == bytes(81));
    });
}

#[test]
fn a_flipped_bit_is_never_given_to_the_guest() {
    let guest = needy();
    for copies in [1, 2] {
        let repositories = Repositories::new(copies.into());
        save(&repositories.vault(), &guest, "1", policy(copies, copies));
        let object = object(&repositories);
        let len = std::fs::metadata(&object).unwrap().len() as usize;
        let mut lost = 0;
        for at in (0..len).step_by(len / 60) {
            flip(&object, at);
            let (memory, _) = lazy(&repositories.vault(), ALL).unwrap();
            for page in 0..120 {
                match read(&memory, page * PAGE, PAGE_BYTES) {
                    Ok(read) => assert!(read == bytes(page + 1), "{at} {page}"),
                    Err(error) => assert!(matches!(error, PageError::Lost { .. }), "{at}: {error}"),
                }
            }
            lost += memory.left().lost;
            flip(&object, at);
        }
        assert_eq!(lost > 0, copies == 1, "{copies} copies: {lost} pages lost");
    }
}

/// Pages that are read from elsewhere, such as the guest's disk.
#[derive(Debug)]
struct Elsewhere(Guest);

impl PageSource for Elsewhere {
    fn read(&self, frame: Frame, give: &mut Give<'_>) -> Result<(), BoxError> {
        match self.0.pages.get(&frame) {
            Some(page) if page.seed % 2 == 1 => Ok(give(frame, &bytes(page.seed))?),
            Some(_) => Err(io::Error::from(io::ErrorKind::TimedOut).into()),
            None => Ok(()),
        }
    }
}

/// Sources are asked in the order they were added, the first that a page has first.
#[test]
fn pages_come_from_several_sources() {
    let class = PageClass::Critical;
    let guest = Guest::new(16, |page| Known { class, seed: page + 1 });
    let wrong = Guest::new(16, |_| Known { class, seed: 99 });
    let frames: Vec<Frame> = guest.pages.keys().copied().collect();
    let local = tempfile::tempfile().unwrap();
    let mut memory = LazyMemory::new(local, &guest.layout, Duration::ZERO).unwrap();
    memory.add(Arc::new(Elsewhere(guest.clone())), frames[..8].iter().copied());
    memory.add(Arc::new(Elsewhere(wrong)), frames.iter().copied());
    assert_eq!(memory.left().of, 16);
    for page in 0..16 {
        let seed = if page < 8 && page % 2 == 0 { page + 1 } else { 99 };
        assert!(read(&memory, page * PAGE, PAGE_BYTES).unwrap() == bytes(seed), "{page}");
    }
}

/// Through the kernel: two files, read and written, also after the mount was taken out of sight.
#[test]
fn mounted_files_are_the_memory() {
    let (repositories, guest) = (Repositories::new(1), guest(19));
    save(&repositories.vault(), &guest, "1", policy(1, 1));
    let mut plain = image(&guest);
    let memory = Arc::new(lazy(&repositories.vault(), ALL).unwrap().0);
    let file = |name: &str, pages: u64| MemoryFile { name: name.to_owned(), bytes: pages * PAGE };
    let files = vec![file("low", 50), file("high", 70)];
    let dir = tempfile::tempdir().unwrap();
    let at = dir.path().join("memory");
    let mut mounted = Mounted::new(Arc::clone(&memory), files, &at).unwrap();
    let open = |name: &str| File::options().read(true).write(true).open(at.join(name));
    let (mut low, mut high) = (open("low").unwrap(), open("high").unwrap());
    assert_eq!((low.metadata().unwrap().len(), high.metadata().unwrap().len()), (50 * PAGE, 70 * PAGE));
    assert!(open("other").is_err());
    let link = dir.path().join("link");
    std::os::unix::fs::symlink(&at, &link).unwrap();
    assert!(detach(&link).is_err() && open("low").is_ok());
    mounted.detach().unwrap();
    assert!(!at.exists());
    high.seek(SeekFrom::Start(5000)).unwrap();
    high.write_all(&[7; 9000]).unwrap();
    plain[50 * PAGE_BYTES + 5000..][..9000].fill(7);
    let mut all = Vec::new();
    low.read_to_end(&mut all).unwrap();
    high.rewind().unwrap();
    high.read_to_end(&mut all).unwrap();
    assert!(all == plain);
    high.sync_all().unwrap();
    assert!(read(&memory, 0, plain.len()).unwrap() == plain);
}
