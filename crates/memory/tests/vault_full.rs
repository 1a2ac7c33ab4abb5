//! Each so many-th snapshot of a guest is full, so that damage to one object is bounded.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::vault_support::{Guest, Known, Repositories, assert_reads, new_snapshot, open, policy, save};
use vmstrata_memory::PageClass;
use vmstrata_memory::vault::{Closing, NewSnapshot, ObjectId, Policy, Saved, Vault};

fn every(full_every: u32) -> Policy {
    Policy { full_every, ..policy(1, 1) }
}

/// Of two contents by turns; in all steps some pages are new.
fn guest(step: u64) -> Guest {
    Guest::new(40, |page| {
        let class = if page % 3 == 0 { PageClass::Clean } else { PageClass::Critical };
        let seed = match page {
            0..4 => 1000 * step + page + 1,
            4..20 => 100 * (step % 2) + page + 1,
            _ => page + 1,
        };
        Known { class, seed }
    })
}

fn save_as(vault: &Arc<Vault>, of: &str, guest: &Guest, policy: Policy) -> Saved {
    let new = NewSnapshot { guest: of.to_owned(), ..new_snapshot(guest, "1", policy) };
    let mut writer = vault.begin(new).expect("begins");
    guest.give(&mut writer).expect("takes");
    writer.finish(Closing::default()).expect("saves")
}

#[test]
fn a_damaged_object_touches_as_many_snapshots_as_lie_between_full_ones() {
    for (full_every, steps) in [(3, [0, 1, 2, 0, 1, 2, 0]), (1, [0; 7]), (0, [0, 1, 2, 3, 4, 5, 6])] {
        let repositories = Repositories::new(1);
        let vault = repositories.vault();
        let mut users: BTreeMap<ObjectId, u32> = BTreeMap::new();
        for (step, name) in steps.into_iter().zip(1u64..) {
            let saved = save(&vault, &guest(name), &name.to_string(), every(full_every));
            let snapshot = open(&vault, &name.to_string()).unwrap();
            let info = snapshot.info();
            assert_eq!((info.step, info.is_full(), saved.is_full), (step, step == 0, step == 0), "{name}");
            let is_own = info.objects.values().all(|object| object.name.owner == info.id);
            assert_eq!(is_own, info.is_full(), "{name}");
            info.objects.values().for_each(|object| *users.entry(object.name).or_default() += 1);
        }
        let most = users.values().max().copied().unwrap();
        assert!(full_every == 0 && most == 7 || most == full_every, "{full_every}: {users:?}");
    }
}

#[test]
fn a_full_snapshot_outlives_all_older_objects() {
    let repositories = Repositories::new(1);
    let vault = repositories.vault();
    let ids: Vec<_> =
        (1..=4).map(|step| save(&vault, &guest(step), &step.to_string(), every(3)).id).collect();
    for id in &ids[..3] {
        for kind in ["critical", "clean"] {
            std::fs::remove_file(repositories.dirs[0].path().join(format!("{id}.{kind}"))).unwrap();
        }
    }
    assert!(open(&vault, "3").is_err());
    assert_reads(&open(&vault, "4").unwrap(), &guest(4), 1, false);
}

/// A clone shares with its template until it has a full snapshot; later it finds no objects of other guests again.
#[test]
fn only_the_first_snapshot_of_a_guest_builds_on_other_guests() {
    let repositories = Repositories::new(1);
    let vault = repositories.vault();
    let template = save_as(&vault, "template", &guest(1), every(2));
    let clone = save_as(&vault, "clone", &guest(1), every(2));
    assert!(template.is_full && !clone.is_full && clone.stats.stored_critical == 0);
    assert!(save(&vault, &guest(1), "1", every(1)).is_full, "each one is to be full");
    save(&vault, &guest(2), "2", every(1));
    let third = save(&vault, &guest(1), "3", every(24));
    assert!(!third.is_full && third.stats.stored_critical > 0, "the template and the first have all of it");
}
