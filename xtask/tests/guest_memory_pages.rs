//! Page classes of real guests, read from outside, against what their kernels say in `/proc/kpageflags`, and against their disks.
//!
//! The machine's own Debian kernel by default; `VMSTRATA_GUEST_SUITES="bullseye trixie trixie-backports"` adds those of
//! other suites, fetched from the same mirror.

use std::collections::HashSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use tempfile::TempDir;
use vmstrata_memory::capture::{Machine, processor};
use vmstrata_memory::disk::ReadDisk;
use vmstrata_memory::introspect::{Cause, FilePages, Pages};
use vmstrata_memory::qmp::Qmp;
use vmstrata_memory::{Frame, Introspection, PAGE_BYTES, PageClass, Ram, refill};
use xtask::guest::census::{Census, Reported};
use xtask::guest::packages::{self, Kernel};
use xtask::guest::{BOOT_MAX, suites};

/// Pages that may change between the guest's report and its being paused: what ends the report is itself a process.
const CHANGES_MAX: usize = 512;
const BOOTS_MAX: u32 = 4;
/// The smallest block that the guest's file systems have.
const BLOCK: usize = 1024;

mod flag {
    pub(crate) const LOCKED: u64 = 1;
    pub(crate) const UPTODATE: u64 = 1 << 3;
    pub(crate) const DIRTY: u64 = 1 << 4;
    pub(crate) const LRU: u64 = 1 << 5;
    pub(crate) const SLAB: u64 = 1 << 7;
    pub(crate) const WRITEBACK: u64 = 1 << 8;
    pub(crate) const BUDDY: u64 = 1 << 10;
    pub(crate) const ANONYMOUS: u64 = 1 << 12;
    pub(crate) const SWAP_BACKED: u64 = 1 << 14;
    /// What no clean page has.
    pub(crate) const NOT_CLEAN: u64 = LOCKED | DIRTY | SLAB | WRITEBACK | BUDDY | ANONYMOUS | SWAP_BACKED;
    /// What every clean page has.
    pub(crate) const CLEAN: u64 = UPTODATE | LRU;
}

#[test]
fn guest_pages_are_what_its_kernel_says() {
    let target = xtask::bench::server::vmstrata();
    let dir = target.ancestors().nth(2).unwrap().join("guest");
    let kernels = suites::kernels(&dir).unwrap();
    let lock = packages::lock(&dir).unwrap();
    let busybox = packages::busybox(&dir).unwrap();
    drop(lock);
    for kernel in &kernels {
        judge(kernel, &busybox);
    }
}

/// An emulated processor crashes newer kernels now and then while they boot; one that has come up must come through.
fn boot(kernel: &Kernel, busybox: &Path) -> (TempDir, Census) {
    for _ in 0..BOOTS_MAX {
        let dir = tempfile::tempdir_in("/dev/shm").unwrap();
        match Census::boot(kernel, busybox, dir.path(), BOOT_MAX) {
            Ok(census) => return (dir, census),
            Err(error) => assert!(!format!("{error:#}").contains("guest: up"), "{error:#}"),
        }
    }
    panic!("{kernel:?} does not boot");
}

fn judge(kernel: &Kernel, busybox: &Path) {
    let (dir, census) = boot(kernel, busybox);
    let mut qmp = Qmp::connect(&census.qmp(), Duration::from_secs(20)).unwrap();
    qmp.tell("stop", serde_json::json!({})).unwrap();
    let ram = Machine::inspect(&mut qmp).unwrap().open().unwrap();
    let running = processor(&mut qmp).unwrap();
    let note = running.note(&ram).expect("the kernel's data lead to its note");
    let (release, pages) = match Introspection::of(&ram, Some(running)) {
        Introspection::Read { release, pages } => (release, pages),
        Introspection::Unreadable(reason) => panic!("{kernel:?}: {reason}"),
    };
    assert_eq!(note.release(), release);
    let reported = census.reported().unwrap();
    no_page_is_wrongly_clean(&release, &pages, &reported);
    free_pages_are_the_allocators(&release, &pages, &reported);
    clean_pages_are_on_the_disks(&release, &pages, &ram, &census);
    clean_pages_are_found_on_their_disks(&release, &pages, &ram, &census);
    every_clean_page_can_be_hidden(&pages, &ram);
    drop((census, dir));
}

fn count(pages: &Pages, wanted: &[Cause]) -> usize {
    pages.causes.iter().filter(|(_, cause)| wanted.contains(cause)).count()
}

fn no_page_is_wrongly_clean(release: &str, pages: &Pages, reported: &[Reported]) {
    let (mut clean, mut missed) = (0, 0);
    for ((frame, class), page) in pages.classes.iter().zip(reported) {
        let may_be =
            page.flags & flag::CLEAN == flag::CLEAN && page.flags & flag::NOT_CLEAN == 0 && page.mapped == 0;
        match class {
            PageClass::Clean => {
                assert!(may_be, "{release}: {frame} is called clean, the kernel says {page:x?}");
                clean += 1;
            }
            _ => missed += usize::from(may_be),
        }
    }
    let [dirty, mapped, shared] =
        [Cause::DirtyCache, Cause::MappedCache, Cause::Shmem].map(|cause| count(pages, &[cause]));
    eprintln!(
        "{release}: {clean} clean, {missed} that might be, {dirty} dirty, {mapped} mapped, {shared} tmpfs"
    );
    assert!(clean > 9000 && missed * 100 < clean, "{release}: {missed} clean pages missed, {clean} found");
    assert!(
        dirty > 900 && mapped > 300 && shared > 900,
        "{release}: nothing there that could be called clean by mistake"
    );
}

fn free_pages_are_the_allocators(release: &str, pages: &Pages, reported: &[Reported]) {
    let (mut free, mut wrong, mut missed) = (0, 0, 0);
    for ((_, class), page) in pages.classes.iter().zip(reported) {
        match (class == PageClass::Free, page.flags & flag::BUDDY != 0) {
            (true, true) => free += 1,
            (true, false) => wrong += 1,
            (false, true) => missed += 1,
            (false, false) => {}
        }
    }
    eprintln!("{release}: {free} free, {wrong} freed and {missed} taken since the report");
    assert!(
        free > 20_000 && wrong < CHANGES_MAX && missed < CHANGES_MAX,
        "{release}: {free} {wrong} {missed}"
    );
}

/// Each block of each clean page is a block of one of the disks: what reading again would bring.
fn clean_pages_are_on_the_disks(release: &str, pages: &Pages, ram: &dyn Ram, census: &Census) {
    let disks: Vec<Vec<u8>> = census.disks().iter().map(|path| fs::read(path).unwrap()).collect();
    let blocks: HashSet<&[u8]> = disks.iter().flat_map(|disk| disk.chunks_exact(BLOCK)).collect();
    let read = |frame: Frame| {
        let mut page = [0; PAGE_BYTES];
        ram.read(frame.start().unwrap(), &mut page).unwrap();
        page
    };
    for (frame, _) in pages.classes.iter().filter(|(_, class)| *class == PageClass::Clean) {
        let stale = read(frame).chunks_exact(BLOCK).any(|block| !blocks.contains(block));
        assert!(!stale, "{release}: {frame} ({:?}) is on no disk", pages.causes.get(frame));
    }
    for origin in &pages.origins {
        let name = &pages.disks[origin.disk.0 as usize].name;
        let disk = &disks[usize::from(name.as_bytes()[2] - b'a')];
        let (within, len) = (usize::from(origin.within_page), usize::from(origin.len));
        let there = &disk[usize::try_from(origin.offset).unwrap()..][..len];
        assert_eq!(&read(origin.frame)[within..within + len], there, "{release}: {origin:?}");
    }
    // Pages that were read whole need no buffer heads, and tell nothing.
    let located = pages.origins.len();
    eprintln!("{release}: {located} blocks of {} ext4 pages located", count(pages, &[Cause::CleanExt4]));
    assert!(located > 2000, "{release}: {located}");
}

/// What needs no copy: pages that are where the guest's file systems say.
fn clean_pages_are_found_on_their_disks(release: &str, pages: &Pages, ram: &dyn Ram, census: &Census) {
    let open = |path: PathBuf| Some(Box::new(fs::File::open(path).unwrap()) as Box<dyn ReadDisk>);
    // Not in the guest's order: the disks are known by what is on them.
    let disks: Vec<_> = census.disks().into_iter().rev().map(open).collect();
    let found = refill::find(ram, pages, &disks);
    let shares = ["vda", "vdb", "vdc"].map(|name| {
        let disk = pages.disks.iter().position(|disk| disk.name == name).unwrap();
        let is_on = |folio: &&FilePages| pages.devices[folio.device.0 as usize].disk.0 as usize == disk;
        let (mut all, mut there) = (0, 0);
        for folio in pages.files.iter().filter(is_on) {
            let frames = (0..u64::from(folio.pages)).map(|page| Frame::new(folio.first.get() + page));
            there += frames.filter(|frame| found.get(*frame).is_some()).count();
            all += folio.pages as usize;
        }
        eprintln!("{release}: {name}: {there} of {all} clean pages are found on disk");
        there as f64 / all as f64
    });
    assert!(shares[0] > 0.95 && shares[1] > 0.95, "{release}: ext4: {shares:?}");
    // XFS keeps what it has not yet written back where nobody finds it.
    assert!(shares[2] > 0.2, "{release}: xfs: {shares:?}");
}

fn every_clean_page_can_be_hidden(pages: &Pages, ram: &dyn Ram) {
    let clean = pages.classes.iter().filter(|(_, class)| *class == PageClass::Clean);
    for (frame, _) in clean {
        let hide = pages.hiding.of(frame).expect("a clean page is in a folio that can be hidden");
        for clear in hide.clears {
            let holder = Frame::of(clear.at);
            assert_eq!(pages.classes.get(holder), PageClass::Critical, "what hides {frame} lies in {holder}");
            let mut word = [0; 8];
            ram.read(clear.at, &mut word).unwrap();
            assert_ne!(u64::from_le_bytes(word) & clear.mask, 0, "{frame}: nothing to clear at {}", clear.at);
        }
    }
}
