//! Snapshots are written, read back, share pages, and go.

use std::sync::Arc;

use crate::vault_support::{
    Guest, Known, Repositories, assert_reads, bytes, flip, is_lost, new_snapshot, open, policy, save, save_at,
};
use rand::SeedableRng;
use rand::rngs::SmallRng;
use vmstrata_memory::hide::Clear;
use vmstrata_memory::vault::{
    Closing, Collected, Deleted, DiskPiece, DiskState, OneDevice, Page, Policy, Refill, VaultError, Want,
    Which,
};
use vmstrata_memory::{Frame, PAGE_BYTES, PageClass, Physical};

const CRITICAL: PageClass = PageClass::Critical;
const CLEAN: PageClass = PageClass::Clean;

fn guest(seed: u64) -> Guest {
    Guest::random(200, &mut SmallRng::seed_from_u64(seed))
}

fn all_critical(count: u64) -> Guest {
    Guest::new(count, |page| Known { class: CRITICAL, seed: page + 1 })
}

#[test]
fn a_snapshot_reads_back() {
    for (repositories, critical, clean) in [(1, 1, 1), (1, 1, 0), (3, 3, 1), (3, 3, 0), (3, 2, 2)] {
        let repositories = Repositories::new(repositories);
        let guest = guest(7);
        let saved = save(&repositories.vault(), &guest, "1", policy(critical, clean));
        let vault = repositories.vault();
        let snapshot = open(&vault, "1").unwrap();
        assert_reads(&snapshot, &guest, clean, false);
        assert_eq!(snapshot.blob("state"), Some(&b"1"[..]));
        assert_eq!(snapshot.blob("other"), None);
        assert!(snapshot.problems().is_empty());
        let stats = snapshot.info().stats;
        assert_eq!((stats.pages, stats.bytes_critical), (200, saved.stats.bytes_critical));
        let content = stats.stored_critical + stats.stored_clean + stats.same_critical + stats.same_clean;
        let rest = stats.free + stats.zero_critical + stats.zero_clean + stats.dropped;
        assert_eq!(content + rest, 200);
        assert!(stats.same_critical > 0 && (clean == 0) == (stats.stored_clean == 0));
    }
}

#[test]
fn what_is_said_of_a_snapshot_reads_back() {
    let repositories = Repositories::new(1);
    let vault = repositories.vault();
    let guest = Guest::new(4, |page| Known { class: if page == 1 { CLEAN } else { CRITICAL }, seed: page });
    let mut writer = vault.begin(new_snapshot(&guest, "mon", policy(1, 1))).unwrap();
    let piece = DiskPiece { disk: 0, offset: 1 << 20, len: 4096 };
    for (frame, page) in &guest.pages {
        match page.class {
            PageClass::Clean => writer.refill(*frame, Refill::new(&bytes(page.seed), vec![piece])).unwrap(),
            _ => writer.page(*frame, page.class, &bytes(page.seed)).unwrap(),
        }
    }
    let clear = Clear { at: Physical::new(0x1000), mask: 4 };
    let closing = Closing {
        taken_ns: 5,
        labels: vec![("job".into(), "nightly".into())],
        disks: vec![DiskState::new("web.qcow2", "mon")],
        hiding: [(Frame::new(1), [clear])].into_iter().collect(),
        ..Closing::default()
    };
    let saved = writer.finish(closing.clone()).unwrap();
    let snapshot = vault.snapshot(&"web".parse().unwrap()).unwrap();
    let info = snapshot.info();
    assert_eq!((info.id, info.title().as_str(), info.taken_ns), (saved.id, "web@mon", 5));
    assert_eq!((&info.labels, &info.disks, &info.layout), (&closing.labels, &closing.disks, &guest.layout));
    assert_eq!(snapshot.hiding().unwrap(), &closing.hiding);
    let [(frame, refill)] = snapshot.refill().unwrap() else { panic!("one page") };
    assert!(refill.pieces[..] == [piece] && refill.is(&bytes(1)) && !refill.is(&bytes(2)));
    assert_eq!(*frame, Frame::new(1));
    assert_eq!(snapshot.read_page(Frame::new(1), &mut [0; PAGE_BYTES]).unwrap(), Page::Lost);
    assert_eq!((info.stats.refilled, info.stats.clean), (1, 1));
}

#[test]
fn pages_must_be_given_once_each() {
    let repositories = Repositories::new(1);
    let vault = repositories.vault();
    let guest = all_critical(4);
    let begin = || vault.begin(new_snapshot(&guest, "mon", policy(1, 1))).unwrap();
    let mut writer = begin();
    writer.free(Frame::new(0)).unwrap();
    let twice = writer.page(Frame::new(0), CRITICAL, &bytes(1)).unwrap_err().to_string();
    assert!(twice.contains("frame 0x0") && twice.contains("twice"), "{twice}");
    assert!(writer.page(Frame::new(2), CRITICAL, &bytes(1)).is_err(), "the hole");
    writer.page(Frame::new(1), CRITICAL, &bytes(1)).unwrap();
    let missing = writer.finish(Closing::default());
    assert!(
        matches!(missing, Err(VaultError::Incomplete { missing: 2, first }) if first == Frame::new(1 << 20)),
        "{missing:?}"
    );
    drop(begin());
    assert!(repositories.is_empty(), "{:?}", repositories.files());
}

#[test]
fn a_name_is_taken_once() {
    let repositories = Repositories::new(1);
    let vault = repositories.vault();
    let guest = all_critical(4);
    let mut late = vault.begin(new_snapshot(&guest, "1", policy(1, 1))).unwrap();
    guest.give(&mut late).unwrap();
    let first = save(&vault, &guest, "1", policy(1, 1));
    assert!(matches!(late.finish(Closing::default()), Err(VaultError::Exists { .. })));
    let again = vault.begin(new_snapshot(&guest, "1", policy(1, 1)));
    assert!(matches!(again, Err(VaultError::Exists { .. })));
    assert_eq!(vault.list().unwrap().len(), 1);
    assert_eq!(open(&vault, "1").unwrap().info().id, first.id);
    assert_eq!(repositories.files()[0].len(), 2, "{:?}", repositories.files());
}

#[test]
fn copies_on_one_device_must_be_allowed() {
    let repositories = Repositories::new(3);
    let vault = repositories.vault();
    let guest = all_critical(2);
    let begin = |copies, one_device| {
        let policy = Policy { one_device, ..policy(copies, 1) };
        vault.begin(new_snapshot(&guest, "1", policy)).map(drop)
    };
    let refused = begin(3, OneDevice::Refuse).unwrap_err().to_string();
    assert!(refused.contains("share a device"), "{refused}");
    assert!(matches!(
        begin(4, OneDevice::Allow),
        Err(VaultError::TooFewRepositories { wanted: 4, found: 3 })
    ));
    begin(3, OneDevice::Allow).unwrap();
    begin(1, OneDevice::Refuse).unwrap();
}

/// What an incremental snapshot is for: it costs what changed.
#[test]
fn unchanged_pages_are_not_stored_again() {
    let repositories = Repositories::new(2);
    let vault = repositories.vault();
    let mut guest = guest(1);
    let first = save(&vault, &guest, "1", policy(2, 1));
    let again = save(&vault, &guest, "2", policy(2, 1));
    let stored = again.stats.stored_critical + again.stats.stored_clean;
    assert_eq!((stored, again.stats.bytes_critical, again.stats.bytes_clean), (0, 0, 0));
    let frame = *guest.pages.keys().next().unwrap();
    guest.pages.insert(frame, Known { class: CRITICAL, seed: 1000 });
    let third = save(&vault, &guest, "3", policy(2, 1));
    assert_eq!((third.stats.stored_critical, third.stats.stored_clean), (1, 0));
    let snapshot = open(&vault, "3").unwrap();
    assert_reads(&snapshot, &guest, 1, false);
    assert_eq!(snapshot.info().parent, Some(again.id));
    assert!(first.stats.older_critical == 0 && third.stats.older_critical > 0);
}

/// The point of the store: what is shared never has fewer copies than what it stands for asks for.
#[test]
fn critical_pages_are_never_served_by_fewer_copies() {
    let repositories = Repositories::new(3);
    let vault = repositories.vault();
    let once = Guest::new(8, |page| Known { class: CLEAN, seed: page + 1 });
    save(&vault, &once, "1", policy(3, 1));
    let needed = all_critical(8);
    // Clean pages of one copy, then critical ones of two, are no use to critical ones of three.
    assert_eq!(save(&vault, &needed, "2", policy(2, 1)).stats.stored_critical, 8);
    assert_eq!(save(&vault, &needed, "3", policy(3, 1)).stats.stored_critical, 8);
    assert_eq!(save(&vault, &needed, "4", policy(3, 1)).stats.stored_critical, 0);
    // The other way round is fine.
    let clean_again = save(&vault, &once, "5", policy(3, 1));
    assert_eq!((clean_again.stats.stored_clean, clean_again.stats.older_clean), (0, 8));
    assert_reads(&open(&vault, "5").unwrap(), &once, 1, false);
}

#[test]
fn pages_whose_copies_are_gone_are_stored_again() {
    let repositories = Repositories::new(3);
    let guest = all_critical(8);
    save(&repositories.vault(), &guest, "1", policy(3, 1));
    let critical = |name: &&String| name.ends_with(".critical");
    let name = repositories.files()[1].iter().find(critical).unwrap().clone();
    std::fs::remove_file(repositories.dirs[1].path().join(name)).unwrap();
    assert_eq!(save(&repositories.vault(), &guest, "2", policy(3, 1)).stats.stored_critical, 8);
}

#[test]
fn any_one_copy_will_do() {
    let guest = guest(3);
    for lost in [[0, 1], [1, 2], [0, 2]] {
        let repositories = Repositories::new(3);
        save(&repositories.vault(), &guest, "1", policy(3, 1));
        for repository in lost {
            std::fs::remove_dir_all(repositories.dirs[repository].path()).unwrap();
        }
        let vault = repositories.vault();
        assert_eq!(vault.missing().len(), 2);
        assert_reads(&open(&vault, "1").unwrap(), &guest, 1, true);
    }
}

#[test]
fn a_lost_page_is_an_error_that_says_where_it_was_looked_for() {
    let repositories = Repositories::new(2);
    let guest = all_critical(8);
    let saved = save(&repositories.vault(), &guest, "1", policy(2, 1));
    for dir in &repositories.dirs {
        // In the first extent.
        flip(&dir.path().join(format!("{}.critical", saved.id)), 64 + 100);
    }
    let snapshot = open(&repositories.vault(), "1").unwrap();
    let mut page = [0; PAGE_BYTES];
    let (lost, fine): (Vec<Frame>, Vec<Frame>) =
        guest.pages.keys().partition(|frame| snapshot.read_page(**frame, &mut page).is_err());
    assert_eq!((lost.len(), fine.len()), (4, 4), "an extent has four pages");
    let error = snapshot.read_page(lost[0], &mut page).unwrap_err();
    let said = error.to_string();
    let dirs = repositories.paths();
    assert!(is_lost(&error) && said.contains("web@1") && said.contains(&lost[0].to_string()), "{said}");
    assert!(dirs.iter().all(|dir| said.contains(dir.to_str().unwrap())), "{said}");
    assert!(is_lost(&snapshot.stream(Want::All, |_, _| Ok(())).unwrap_err()));
    assert_eq!(snapshot.problems().len(), 2);
}

#[test]
fn clean_pages_may_be_lost_and_need_not_be_read() {
    let repositories = Repositories::new(2);
    let guest =
        Guest::new(40, |page| Known { class: if page % 2 == 0 { CLEAN } else { CRITICAL }, seed: page });
    let saved = save(&repositories.vault(), &guest, "1", policy(2, 1));
    let clean: Vec<Frame> =
        guest.pages.iter().filter(|(_, page)| page.class == CLEAN).map(|(frame, _)| *frame).collect();
    let snapshot = open(&repositories.vault(), "1").unwrap();
    // The first page is zeros, which need not be read to be known.
    assert_eq!(snapshot.stream(Want::Critical, |_, _| Ok(())).unwrap(), clean[1..]);
    for dir in &repositories.dirs {
        let _ = std::fs::remove_file(dir.path().join(format!("{}.clean", saved.id)));
    }
    let snapshot = open(&repositories.vault(), "1").unwrap();
    assert_reads(&snapshot, &guest, 1, true);
    assert_eq!(snapshot.stream(Want::All, |_, _| Ok(())).unwrap(), clean[1..]);
    assert!(!snapshot.problems().is_empty());
}

#[test]
fn deleting_keeps_what_others_need() {
    let repositories = Repositories::new(2);
    let vault = repositories.vault();
    let mut guests = vec![guest(1)];
    for step in 1..4 {
        let mut next = guests[step - 1].clone();
        let mut rng = SmallRng::seed_from_u64(step as u64);
        next.pages.values_mut().step_by(5).for_each(|page| *page = Guest::random_page(&mut rng));
        guests.push(next);
    }
    let ids: Vec<_> = (0..)
        .zip(&guests)
        .map(|(at, guest)| save(&vault, guest, &format!("{at}"), policy(2, 1)).id)
        .collect();
    for gone in [0, 2, 1, 3] {
        let reader = open(&vault, &gone.to_string()).unwrap();
        assert_eq!(vault.delete(&[ids[gone]]).unwrap(), Deleted::Later, "a reader is there");
        assert_reads(&reader, &guests[gone], 1, false);
        drop(reader);
        assert!(matches!(vault.collect().unwrap(), Deleted::Collected(_)));
        for listed in vault.list().unwrap() {
            let info = listed.info.unwrap();
            let snapshot = vault.snapshot(&Which::Id(info.id)).unwrap();
            assert_reads(&snapshot, &guests[info.name.parse::<usize>().unwrap()], 1, false);
        }
    }
    assert!(repositories.is_empty(), "{:?}", repositories.files());
    assert!(matches!(vault.delete(&[ids[0]]), Err(VaultError::NotFound(_))));
}

#[test]
fn nothing_is_collected_while_a_repository_or_its_needs_are_unknown() {
    let repositories = Repositories::new(2);
    let vault = repositories.vault();
    let guest = all_critical(8);
    let first = save(&vault, &guest, "1", policy(2, 1));
    let second = save(&vault, &guest, "2", policy(2, 1));
    for dir in &repositories.dirs {
        flip(&dir.path().join(format!("{}.snapshot", second.id)), 70);
    }
    assert!(matches!(vault.delete(&[first.id]), Err(VaultError::NeedsUnknown(_))));
    assert!(repositories.files()[0].contains(&format!("{}.critical", first.id)), "the second one needs it");
    assert!(matches!(vault.delete(&[second.id]).unwrap(), Deleted::Collected(Collected { objects: 4, .. })));
    assert!(repositories.is_empty());
    let third = save(&vault, &guest, "3", policy(2, 1));
    let gone = repositories.paths()[0].with_extension("gone");
    let with_gone =
        vmstrata_memory::vault::Vault::open_directories(&[repositories.paths()[1].clone(), gone]).unwrap();
    assert!(matches!(with_gone.delete(&[third.id]), Err(VaultError::Unreachable(_))));
    assert_eq!(vault.list().unwrap()[0].metadata_copies, 2);
}

#[test]
fn snapshots_are_found_by_name_id_and_age() {
    let repositories = Repositories::new(1);
    let vault = repositories.vault();
    let guest = all_critical(2);
    let ids: Vec<_> =
        ["10", "30", "20"].map(|name| save(&vault, &guest, name, policy(1, 1)).id).into_iter().collect();
    let names: Vec<_> =
        vault.list().unwrap().iter().map(|listed| listed.info.as_ref().unwrap().name.clone()).collect();
    assert_eq!(names, ["30", "20", "10"]);
    for (text, id) in [("web@10", 0), ("web", 1), (ids[2].to_string().as_str(), 2)] {
        assert_eq!(vault.find_id(&text.parse().unwrap()).unwrap(), ids[id], "{text}");
    }
    for text in ["web@40", "db", "db@10", &"0".repeat(32)] {
        assert!(matches!(vault.find_id(&text.parse().unwrap()), Err(VaultError::NotFound(_))), "{text}");
    }
    assert!("a/b".parse::<Which>().is_err() && "web@".parse::<Which>().is_err());
}

#[test]
fn writers_work_side_by_side() {
    let repositories = Repositories::new(2);
    let vault = repositories.vault();
    let guests: Vec<Guest> = (0..4).map(guest).collect();
    std::thread::scope(|scope| {
        for (at, guest) in guests.iter().enumerate() {
            let vault = Arc::clone(&vault);
            scope.spawn(move || save_at(&vault, guest, &at.to_string(), policy(2, 1), at as u64).unwrap());
        }
    });
    for (at, guest) in guests.iter().enumerate() {
        assert_reads(&open(&vault, &at.to_string()).unwrap(), guest, 1, false);
    }
}
