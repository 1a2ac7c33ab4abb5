//! A repository fails at every operation in turn: older snapshots stay whole, and nothing half is listed.

use crate::vault_support;
use std::io::ErrorKind;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use crate::vault_support::fault::{Effect, Plan, faulty};
use crate::vault_support::{
    Guest, Repositories, assert_reads, leave_dead_pages, open, policy, save, save_at,
};
use rand::SeedableRng;
use rand::rngs::SmallRng;
use vmstrata_memory::vault::{Compact, Deleted, Health, OneDevice, Policy, Result, Vault, Which};

const EFFECTS: [Effect; 3] =
    [Effect::Once(ErrorKind::StorageFull), Effect::Once(ErrorKind::Other), Effect::Dead];

/// One thread, so that operations come in one order.
fn one_thread() -> Policy {
    Policy { threads: 1, ..policy(2, 1) }
}

struct Case {
    repositories: Repositories,
    old: Guest,
    new: Guest,
}

impl Case {
    fn new() -> Self {
        let old = Guest::random(16, &mut SmallRng::seed_from_u64(1));
        let mut new = old.clone();
        let mut rng = SmallRng::seed_from_u64(2);
        new.pages.values_mut().step_by(3).for_each(|page| *page = Guest::random_page(&mut rng));
        let repositories = Repositories::new(2);
        save(&repositories.vault(), &old, "1", one_thread());
        Self { repositories, old, new }
    }

    fn faulty(&self, at: usize, effect: Effect) -> (Arc<Vault>, Arc<Plan>) {
        let plan = Plan::new(at, effect);
        (Vault::open(faulty(self.repositories.repositories(), &plan)), plan)
    }

    /// Older snapshots are whole, what is listed is whole, and nothing is left that nobody needs.
    fn check(&self, at: usize, effect: Effect) {
        let vault = self.repositories.vault();
        let health = vault.verify(&[], |_, _| ()).expect("verifies");
        assert!(health.iter().all(Health::is_whole), "{at} {effect:?}: {health:?}");
        assert_reads(&open(&vault, "1").expect("the older one"), &self.old, 1, false);
        if let Ok(new) = open(&vault, "2") {
            assert_reads(&new, &self.new, 1, false);
        }
        assert!(matches!(vault.collect(), Ok(Deleted::Collected(_))), "{at} {effect:?}");
        let listed = vault.list().expect("lists");
        let most = listed.len() * 3;
        assert!(
            self.repositories.files().iter().all(|files| files.len() <= most),
            "{at}: {:?}",
            self.repositories.files()
        );
        save(&vault, &self.new, "3", one_thread());
        assert_reads(&open(&vault, "3").expect("a new one"), &self.new, 1, false);
    }
}

/// Runs `work` with a fault at every operation it asks for, until it asks for no more.
fn at_every_operation(
    work: impl Fn(&Arc<Vault>, &Case) -> Result<()>,
    after: impl Fn(&Case, &Result<()>, Effect),
) {
    for effect in EFFECTS {
        for at in 0.. {
            let case = Case::new();
            let (vault, plan) = case.faulty(at, effect);
            let done = work(&vault, &case);
            drop(vault);
            after(&case, &done, effect);
            case.check(at, effect);
            if plan.asked.load(Ordering::SeqCst) <= at {
                done.expect("no fault, no failure");
                assert!(at > 5, "{at} operations cannot be all");
                break;
            }
        }
    }
}

#[test]
fn a_snapshot_is_taken_or_it_is_not_there() {
    at_every_operation(
        |vault, case| save_at(vault, &case.new, "2", one_thread(), 2).map(drop),
        |case, done, effect| {
            let is_there = open(&case.repositories.vault(), "2").is_ok();
            // When repositories are gone for good after the name was given in one of them, it cannot be taken back.
            let is_expected = is_there == done.is_ok() || (is_there && effect == Effect::Dead);
            assert!(is_expected, "{done:?} {is_there}");
        },
    );
}

#[test]
fn deleting_harms_no_other_snapshot() {
    at_every_operation(
        |vault, case| {
            save(&case.repositories.vault(), &case.new, "2", one_thread());
            let id = vault.find_id(&Which::Named { guest: "web".to_owned(), name: "2".to_owned() })?;
            vault.delete(&[id]).map(drop)
        },
        |_, _, _| (),
    );
}

#[test]
fn a_repair_that_fails_makes_nothing_worse() {
    at_every_operation(
        |vault, case| {
            case.repositories.lose_copies(0);
            vault.repair(&[], OneDevice::Allow).map(drop)
        },
        |case, _, _| {
            // One more go, now that the repository works, mends what is left.
            let repaired = case.repositories.vault().repair(&[], OneDevice::Allow).expect("repairs");
            assert!(repaired.health.iter().all(Health::is_complete), "{repaired:?}");
        },
    );
}

/// Also when a device writes something else than it was given.
#[test]
fn a_gc_that_fails_loses_no_page_and_the_next_one_finishes() {
    for effect in EFFECTS.into_iter().chain([Effect::Garble]) {
        for at in 0.. {
            let (repositories, guest) =
                (Repositories::new(2), Guest::random(16, &mut SmallRng::seed_from_u64(1)));
            leave_dead_pages(&repositories, &guest, &one_thread());
            let plan = Plan::new(at, effect);
            let done =
                Vault::open(faulty(repositories.repositories(), &plan)).gc(Compact::All, &mut |_, _| ());
            let vault = repositories.vault();
            let health = vault.verify(&[], |_, _| ()).expect("verifies");
            let is_as_before = effect != Effect::Garble || health.iter().all(Health::is_complete);
            assert!(is_as_before && health.iter().all(Health::is_whole), "{at} {effect:?}: {health:?}");
            assert_reads(&open(&vault, "1").expect("opens"), &guest, 1, false);
            vault.gc(Compact::All, &mut |_, _| ()).expect("compacts");
            assert!(repositories.are_alike(), "{at} {effect:?}");
            assert_eq!(vault.collectable(Compact::All).expect("looks").compact, []);
            assert_reads(&open(&vault, "1").expect("opens"), &guest, 1, false);
            if plan.asked.load(Ordering::SeqCst) <= at {
                done.expect("no fault, no failure");
                assert!(at > 20, "{at} operations cannot be all");
                break;
            }
        }
    }
}

/// One failure never costs a page: there is another copy.
#[test]
fn reading_goes_on_with_another_copy() {
    let case = Case::new();
    let mut guest = case.old.clone();
    // Clean pages have one copy only.
    guest.pages.retain(|_, page| page.class != vmstrata_memory::PageClass::Clean);
    for at in 0.. {
        let (vault, plan) = case.faulty(at, Effect::Once(ErrorKind::Other));
        let snapshot = open(&vault, "1").expect("opens");
        for (frame, page) in &guest.pages {
            let mut read = [0; vmstrata_memory::PAGE_BYTES];
            snapshot.read_page(*frame, &mut read).expect("reads");
            let is_free = page.class == vmstrata_memory::PageClass::Free;
            assert!(is_free || read == vault_support::bytes(page.seed), "{at} {frame}");
        }
        if plan.asked.load(Ordering::SeqCst) <= at {
            assert!(at > 10);
            break;
        }
    }
}
