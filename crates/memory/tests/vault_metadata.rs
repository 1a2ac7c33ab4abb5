//! What is known of a snapshot costs what changed, and is kept as safely as what the guest needs.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::vault_support::{Guest, Known, Repositories, bytes, flip, new_snapshot, open, policy};
use vmstrata_memory::hide::Clear;
use vmstrata_memory::vault::{
    Closing, DiskPiece, DiskState, ObjectId, OneDevice, Policy, Refill, Saved, Snapshot, Vault, VaultError,
};
use vmstrata_memory::{Frame, PAGE_BYTES, PageClass, Physical};

/// 8 pieces of each table: what is critical lies between clean pages that the guest's disk has.
const PAGES: u64 = 8 * 1024;

fn guest() -> Guest {
    Guest::new(PAGES, |page| match page % 8 {
        0..3 => Known { class: PageClass::Critical, seed: page + 1 },
        3..7 => Known { class: PageClass::Clean, seed: page + 1 },
        _ => Known { class: PageClass::Free, seed: 0 },
    })
}

fn policy_of(copies: u8) -> Policy {
    Policy { extent_pages: 32, ..policy(copies, copies) }
}

fn clear(frame: Frame) -> Clear {
    Clear { at: Physical::new(frame.get() * 64), mask: 8 }
}

/// Saves a snapshot whose clean pages all lie on the guest's disk.
fn save(vault: &Arc<Vault>, guest: &Guest, name: &str, policy: Policy) -> Saved {
    let mut writer = vault.begin(new_snapshot(guest, name, policy)).expect("begins");
    let mut hiding = Vec::new();
    for (frame, page) in &guest.pages {
        if page.class == PageClass::Clean {
            let piece = DiskPiece { disk: 0, offset: page.seed << 12, len: 4096 };
            writer.refill(*frame, Refill::new(&bytes(page.seed), vec![piece])).expect("takes");
            hiding.push((*frame, [clear(*frame)]));
        } else {
            writer.page(*frame, page.class, &bytes(page.seed)).expect("takes");
        }
    }
    let closing = Closing {
        taken_ns: name.parse().expect("a number"),
        disks: vec![DiskState::new("a", "1")],
        hiding: hiding.into_iter().collect(),
        blobs: BTreeMap::from([("state".to_owned(), vec![7; 100_000])]),
        ..Closing::default()
    };
    writer.finish(closing).expect("saves")
}

fn assert_critical(snapshot: &Snapshot, guest: &Guest) {
    for (frame, page) in guest.pages.iter().filter(|(_, page)| page.class == PageClass::Critical) {
        let mut read = [0; PAGE_BYTES];
        snapshot.read_page(*frame, &mut read).expect("reads");
        assert!(read == bytes(page.seed), "{frame}");
    }
}

fn change(guest: &mut Guest, page: usize, class: PageClass, seed: u64) {
    *guest.pages.values_mut().nth(page).expect("a page") = Known { class, seed };
}

#[test]
fn a_snapshot_of_an_unchanged_guest_adds_little_metadata() {
    let repositories = Repositories::new(1);
    let vault = repositories.vault();
    let first = save(&vault, &guest(), "1", policy_of(1));
    for name in ["2", "3"] {
        let stats = save(&vault, &guest(), name, policy_of(1)).stats;
        assert_eq!(stats.bytes_critical, 0);
        assert!(stats.bytes_metadata < 1024, "{} of {}", stats.bytes_metadata, first.stats.bytes_metadata);
    }
    assert!(first.stats.bytes_metadata > 50_000, "{}", first.stats.bytes_metadata);
    assert_eq!(
        repositories.files()[0].len(),
        4,
        "no object of pages but the first: {:?}",
        repositories.files()
    );
}

/// Every table is cut into pieces, and only those that speak of the page are written again.
#[test]
fn one_changed_page_costs_one_piece_of_a_table() {
    let repositories = Repositories::new(1);
    let vault = repositories.vault();
    let mut guest = guest();
    let first = save(&vault, &guest, "1", policy_of(1));
    change(&mut guest, 4000, PageClass::Critical, 1_000_000);
    let words = save(&vault, &guest, "2", policy_of(1)).stats;
    assert_eq!(words.stored_critical, 1);
    change(&mut guest, 4003, PageClass::Clean, 2_000_000);
    let claims = save(&vault, &guest, "3", policy_of(1)).stats;
    let (all, page) = (first.stats.bytes_metadata, PAGE_BYTES as u64);
    // 512 claims of 16 bytes of hash and some more, in three pages.
    for (stats, most) in [(words, page), (claims, 3 * page)] {
        assert!(stats.bytes_metadata < most && most < all / 4, "{} of {all}", stats.bytes_metadata);
    }
    let snapshot = open(&vault, "3").unwrap();
    let is_new = |(frame, refill): &&(Frame, Refill)| {
        let seed = guest.pages[frame].seed;
        refill.is(&bytes(seed)) && refill.pieces[0].offset == seed << 12
    };
    assert_eq!(snapshot.refill().unwrap().iter().filter(is_new).count() as u64, PAGES / 2);
}

/// Else all that is said of unchanged pages would change with them.
#[test]
fn an_object_keeps_its_number_while_it_is_used() {
    let repositories = Repositories::new(1);
    let vault = repositories.vault();
    let mut guest = guest();
    let mut before: BTreeMap<ObjectId, u16> = BTreeMap::new();
    for step in 1..=6u64 {
        // One page, then most: some objects are no longer used, and their numbers are free.
        let changed = if step == 4 { PAGES as usize } else { 1 };
        (0..changed).step_by(8).for_each(|page| {
            change(&mut guest, page + step as usize % 3, PageClass::Critical, step * 1_000_000 + page as u64);
        });
        save(&vault, &guest, &step.to_string(), policy_of(1));
        let snapshot = open(&vault, &step.to_string()).unwrap();
        let now: BTreeMap<ObjectId, u16> =
            snapshot.info().objects.iter().map(|(number, object)| (object.name, *number)).collect();
        let stays = |(name, number): &(&ObjectId, &u16)| now.get(*name) == Some(*number);
        assert!(step == 1 || before.iter().any(|object| stays(&object)), "{step}: {before:?} {now:?}");
        let moved = before.iter().find(|object| !stays(object) && now.contains_key(object.0));
        assert_eq!(moved, None, "{step}");
        assert_critical(&snapshot, &guest);
        before = now;
    }
}

/// Damage where the tables lie, in both copies: nothing is restored from what is left, and it has a name.
#[test]
fn metadata_of_which_no_copy_is_left_is_named_as_lost() {
    let repositories = Repositories::new(2);
    let vault = repositories.vault();
    let mut guest = guest();
    let first = save(&vault, &guest, "1", policy_of(2));
    change(&mut guest, 0, PageClass::Critical, 1_000_000);
    let second = save(&vault, &guest, "2", policy_of(2));
    // The second has one extent with a page of the guest, and one with pages of tables.
    let object =
        |repository: usize| repositories.dirs[repository].path().join(format!("{}.critical", second.id));
    let at = second.stats.bytes_critical as usize - 40 - 16;
    flip(&object(0), at);
    assert_eq!(open(&vault, "2").unwrap().problems().len(), 1, "the other copy is read");
    flip(&object(1), at);
    let lost = open(&vault, "2").unwrap_err();
    let said = lost.to_string();
    assert!(matches!(lost, VaultError::MetadataLost { id, .. } if id == second.id), "{said}");
    assert!(said.contains("snapshot web@2: its metadata is lost"), "{said}");
    assert!((0..2).all(|repository| said.contains(object(repository).to_str().unwrap())), "{said}");
    let health = vault.verify(&[second.id, first.id], |_, _| ()).unwrap();
    assert_eq!((health[0].title.as_deref(), health[0].lost_critical), (Some("web@2"), 0));
    assert!(health[0].lost_metadata > 0 && !health[0].is_whole(), "{health:?}");
    assert!(health[1].is_complete(), "{health:?}");
    assert_eq!(vault.repair(&[], OneDevice::Allow).unwrap().made, [""; 0]);
    // The next one does not build on what is lost.
    save(&vault, &guest, "3", policy_of(2));
    assert!(vault.verify(&[], |_, _| ()).unwrap()[0].is_whole());
    assert_critical(&open(&vault, "3").unwrap(), &guest);
}

#[test]
fn large_tables_are_read_when_they_are_asked_for() {
    let repositories = Repositories::new(1);
    let vault = repositories.vault();
    save(&vault, &guest(), "1", policy_of(1));
    let mut guest = guest();
    change(&mut guest, 3, PageClass::Free, 0);
    let second = save(&vault, &guest, "2", policy_of(1));
    let object = repositories.dirs[0].path().join(format!("{}.critical", second.id));
    let snapshot = open(&vault, "2").unwrap();
    let len = std::fs::metadata(&object).unwrap().len() as usize;
    std::fs::write(&object, vec![0; len]).unwrap();
    assert_critical(&snapshot, &guest);
    assert!(matches!(snapshot.hiding(), Err(VaultError::MetadataLost { .. })));
    assert!(matches!(snapshot.refill(), Err(VaultError::MetadataLost { .. })));
}
