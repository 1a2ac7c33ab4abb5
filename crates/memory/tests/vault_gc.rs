//! The space of deleted snapshots is given back.

use crate::vault_support::{Guest, Known, Repositories, assert_reads, leave_dead_pages, open, policy, save};
use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};
use vmstrata_memory::PageClass;
use vmstrata_memory::vault::{Collected, Compact, Deleted, Health, Policy, Vault};

/// As snapshots are kept by default, in one copy.
fn by_default() -> Policy {
    Policy { critical_copies: 1, ..Policy::default() }
}

/// A guest that changes pages all over its memory.
struct Busy {
    guest: Guest,
    rng: SmallRng,
}

impl Busy {
    fn new(pages: u64) -> Self {
        let guest = Guest::new(pages, |page| Known { class: PageClass::Critical, seed: page + 1 });
        Self { guest, rng: SmallRng::seed_from_u64(1) }
    }

    /// Changes so many of a hundred pages.
    fn work(&mut self, percent: u32) {
        for page in self.guest.pages.values_mut() {
            if self.rng.random_ratio(percent, 100) {
                page.seed = self.rng.random_range(1 << 20..u64::MAX);
            }
        }
    }
}

/// Bytes of a new vault with these states.
fn fresh(guests: &[Guest]) -> u64 {
    let repositories = Repositories::new(1);
    (0..)
        .zip(guests)
        .for_each(|(at, guest)| _ = save(&repositories.vault(), guest, &format!("{at}"), by_default()));
    repositories.allocated()
}

fn delete(vault: &Vault, names: &[String]) -> Collected {
    let ids: Vec<_> = names.iter().map(|name| open(vault, name).unwrap().info().id).collect();
    match vault.delete(&ids).unwrap() {
        Deleted::Collected(collected) => collected,
        Deleted::Later => panic!("nobody else uses the vault"),
    }
}

fn assert_all_read(vault: &Vault, guests: &[(String, Guest)]) {
    assert!(vault.verify(&[], |_, _| ()).unwrap().iter().all(Health::is_complete));
    guests.iter().for_each(|(name, guest)| assert_reads(&open(vault, name).unwrap(), guest, 1, false));
}

#[test]
fn a_pruned_vault_is_at_most_a_third_larger_than_a_fresh_one() {
    for percent in [1, 5, 25] {
        let (repositories, mut busy) = (Repositories::new(1), Busy::new(1000));
        let vault = repositories.vault();
        let mut guests = Vec::new();
        for at in 0..40 {
            save(&vault, &busy.guest, &at.to_string(), by_default());
            guests.push((at.to_string(), busy.guest.clone()));
            busy.work(percent);
        }
        let kept = guests.split_off(38);
        let names: Vec<String> = guests.into_iter().map(|(name, _)| name).collect();
        let before = repositories.allocated();
        let freed = delete(&vault, &names).bytes;
        assert_eq!(freed, before - repositories.allocated());
        assert_all_read(&vault, &kept);
        let (used, fresh) =
            (repositories.allocated(), fresh(&kept.into_iter().map(|(_, guest)| guest).collect::<Vec<_>>()));
        assert!(used * 10 <= fresh * 13, "{percent} %: {used} bytes, fresh {fresh}");
    }
}

/// As `vm snapshot --every` with `--keep last=10` of a guest that changes 1 to 5 of 100 pages in between. The fresh vault makes the
/// same snapshots full: while those that are kept lie on both sides of a full one, a vault has two whole memories.
#[test]
fn after_200_snapshots_with_retention_a_vault_is_as_small_as_a_fresh_one() {
    let (repositories, mut busy) = (Repositories::new(1), Busy::new(1500));
    let vault = repositories.vault();
    let mut kept: Vec<(String, Guest, bool)> = Vec::new();
    for at in 0..200 {
        let saved = save(&vault, &busy.guest, &at.to_string(), by_default());
        kept.push((at.to_string(), busy.guest.clone(), saved.is_full));
        if kept.len() > 10 {
            delete(&vault, &[kept.remove(0).0]);
        }
        busy.work(1 + at % 5);
    }
    let fresh = Repositories::new(1);
    for (name, guest, is_full) in &kept {
        let full_every = if *is_full { 1 } else { Policy::FULL_EVERY };
        save(&fresh.vault(), guest, name, Policy { full_every, ..by_default() });
    }
    let (used, fresh) = (repositories.allocated(), fresh.allocated());
    assert!(used * 10 <= fresh * 13, "{used} bytes, fresh {fresh}");
    let guests: Vec<(String, Guest)> = kept.into_iter().map(|(name, guest, _)| (name, guest)).collect();
    assert_all_read(&vault, &guests);
}

#[test]
fn gc_compacts_what_could_not_be_while_the_vault_was_in_use() {
    let repositories = Repositories::new(2);
    let guest = Guest::random(40, &mut SmallRng::seed_from_u64(3));
    leave_dead_pages(&repositories, &guest, &policy(2, 1));
    let vault = repositories.vault();
    let (before, plan) = (repositories.allocated(), vault.collectable(Compact::Worthwhile).unwrap());
    assert!(!plan.compact.is_empty() && repositories.allocated() == before, "{plan:?}");
    let reader = open(&vault, "1").unwrap();
    assert_eq!(vault.gc(Compact::All, &mut |_, _| ()).unwrap(), Deleted::Later);
    drop(reader);
    let Deleted::Collected(collected) = vault.gc(Compact::Worthwhile, &mut |_, _| ()).unwrap() else {
        panic!("nobody else uses the vault")
    };
    assert_eq!(collected.compacted, plan.compact.len());
    assert_eq!(collected.bytes, before - repositories.allocated());
    // What it said is about what it did.
    assert!(collected.bytes.abs_diff(plan.bytes) < before / 10, "{collected:?} {plan:?}");
    assert_all_read(&vault, &[("1".to_owned(), guest)]);
    assert_eq!(
        vault.gc(Compact::Worthwhile, &mut |_, _| ()).unwrap(),
        Deleted::Collected(Collected::default())
    );
}

#[test]
fn writing_a_snapshot_frees_what_was_deleted_while_the_vault_was_in_use() {
    let repositories = Repositories::new(1);
    let guest = Guest::new(40, |page| Known { class: PageClass::Critical, seed: page + 1 });
    leave_dead_pages(&repositories, &guest, &policy(1, 1));
    let vault = repositories.vault();
    assert!(!vault.collectable(Compact::Worthwhile).unwrap().compact.is_empty());
    save(&vault, &guest, "2", policy(1, 1));
    assert_eq!(vault.collectable(Compact::All).unwrap().compact, []);
    assert_all_read(&vault, &[("1".to_owned(), guest.clone()), ("2".to_owned(), guest)]);
}

#[test]
fn a_snapshot_shares_pages_with_a_compacted_object() {
    let repositories = Repositories::new(2);
    let guest = Guest::new(40, |page| Known { class: PageClass::Critical, seed: page + 1 });
    leave_dead_pages(&repositories, &guest, &policy(2, 1));
    let vault = repositories.vault();
    vault.gc(Compact::All, &mut |_, _| ()).unwrap();
    assert_eq!(save(&vault, &guest, "2", policy(2, 1)).stats.stored_critical, 0);
    // What was given back is stored again.
    let around = Guest::around(&guest);
    assert_eq!(save(&vault, &around, "3", policy(2, 1)).stats.stored_critical, 80);
    assert_all_read(&vault, &[("2".to_owned(), guest), ("3".to_owned(), around)]);
}

/// A repository that was compacted by itself has let go of pages that snapshots in other repositories need.
#[test]
fn a_page_that_one_repository_gave_back_is_read_from_another() {
    let repositories = Repositories::new(2);
    let guest = Guest::new(40, |page| Known { class: PageClass::Critical, seed: page + 1 });
    let around = Guest::around(&guest);
    let vault = repositories.vault();
    let first = save(&vault, &around, "0", policy(2, 1));
    save(&vault, &guest, "1", policy(2, 1));
    let other = save(&vault, &around, "2", policy(2, 1));
    // The first repository knows nothing of "0" and "2" any more.
    let paths = repositories.paths();
    for id in [first.id, other.id] {
        std::fs::remove_file(paths[0].join(format!("{id}.snapshot"))).unwrap();
    }
    let alone = Vault::open_directories(&paths[..1]).unwrap();
    let Deleted::Collected(collected) = alone.gc(Compact::All, &mut |_, _| ()).unwrap() else {
        panic!("in use")
    };
    assert_eq!(collected.compacted, 1);
    assert_reads(&open(&vault, "2").unwrap(), &around, 1, false);
    let health = vault.verify(&[other.id], |_, _| ()).unwrap();
    assert!(health[0].is_whole() && !health[0].is_complete(), "{health:?}");
    let repaired = vault.repair(&[], vmstrata_memory::vault::OneDevice::Allow).unwrap();
    assert!(repaired.health.iter().all(Health::is_complete), "{repaired:?}");
    assert!(repositories.are_alike());
    assert_reads(&open(&alone, "2").unwrap(), &around, 1, false);
}
