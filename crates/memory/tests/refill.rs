//! Pages that lie on the guest's disks come back from there, and only if they are what they were.

mod vault_support;

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::time::Duration;

use vault_support::{Guest, Homes, Known, bytes, new_snapshot, open, policy};
use vmstrata_memory::disk::ReadDisk;
use vmstrata_memory::refill::Refiller;
use vmstrata_memory::restore::lazy::{Lazily, prepare};
use vmstrata_memory::restore::{Filled, fill};
use vmstrata_memory::vault::{Closing, DiskPiece, DiskState, Hiding, Mask, Refill, Snapshot, Want};
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

fn save(homes: &Homes, guest: &Guest) -> Snapshot {
    let vault = homes.vault();
    let mut writer = vault.begin(new_snapshot(guest, "refilled", policy(1, 1))).unwrap();
    let mut hiding = Vec::new();
    for ((frame, page), number) in guest.pages.iter().zip(0..) {
        if page.class == PageClass::Critical {
            writer.page(*frame, page.class, &bytes(page.seed)).unwrap();
            continue;
        }
        writer.refill(*frame, Refill::new(&bytes(page.seed), vec![piece(number)])).unwrap();
        hiding.push((*frame, vec![Mask { at: Physical::new(number * 4), width: 4, clear: u32::MAX.into() }]));
    }
    let disk = |name: &str| DiskState { disk: name.to_owned(), snapshot: "refilled".to_owned() };
    let disks = ["a", "b"].map(disk).to_vec();
    writer.finish(Closing { disks, hiding: Hiding::new(hiding), ..Closing::default() }).unwrap();
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
    let (homes, guest) = (Homes::new(1), guest());
    let disks = disks(&guest);
    let snapshot = save(&homes, &guest);
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
    let (homes, guest) = (Homes::new(1), guest());
    let snapshot = save(&homes, &guest);
    let refiller = Refiller::new(snapshot.refill().unwrap(), Vec::new());
    let critical = Frame::new(0);
    let frames = [critical, Frame::new(1), Frame::new(1 << 40)];
    let missing = refiller.pages(&frames, None, |_, _| panic!("a page from nowhere")).unwrap();
    assert_eq!(missing, frames);
}

/// With time the whole cache comes from the disks before the guest runs; without any, all of it is hidden.
#[test]
fn a_guest_that_runs_first_has_what_there_was_time_for() {
    let (homes, guest) = (Homes::new(1), guest());
    let disks = disks(&guest);
    let snapshot = Arc::new(save(&homes, &guest));
    for (seconds, has_cache) in [(600, true), (0, false)] {
        let handle = |disk: &File| Some(Box::new(disk.try_clone().unwrap()) as Box<dyn ReadDisk>);
        let refiller = Refiller::new(snapshot.refill().unwrap(), disks.iter().map(handle).collect());
        let cache_time = Duration::from_secs(seconds);
        let lazily = Lazily { want: Want::All, cache_time, patience: Duration::ZERO };
        let local = tempfile::tempfile().unwrap();
        let (vault, snapshot) = (homes.vault(), Arc::clone(&snapshot));
        let (memory, filled) = prepare(vault, snapshot, Some(&refiller), local, lazily).unwrap();
        let count = |is: bool| if is { PAGES - 1 } else { 0 };
        let expected =
            Filled { pages: count(has_cache), refilled: count(has_cache), hidden: count(!has_cache) };
        assert_eq!(filled, expected);
        for (page, number) in guest.pages.values().zip(0..).skip(1) {
            let (mut there, mut word) = ([0; PAGE_BYTES], [0; 4]);
            memory.read(number * PAGE_BYTES as u64, &mut there).unwrap();
            memory.read(number * 4, &mut word).unwrap();
            let right = if has_cache { bytes(page.seed) } else { [0; PAGE_BYTES] };
            assert!(there == right && (word == [0; 4]) != has_cache, "page {number}");
        }
    }
}
