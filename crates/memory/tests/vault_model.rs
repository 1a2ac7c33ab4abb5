//! Random operations on a store, against a plain map of what every snapshot must read as.

use std::collections::BTreeMap;

use crate::vault_support::{Guest, Repositories, assert_reads, open, policy, save};
use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};
use vmstrata_memory::vault::{Compact, Deleted, Health, OneDevice, Result, SnapshotId, Vault};

const REPOSITORIES: usize = 4;

/// What a snapshot must read as, and how many copies it has.
struct Kept {
    id: SnapshotId,
    guest: Guest,
    critical_copies: u8,
    clean_copies: u8,
}

struct Model {
    rng: SmallRng,
    repositories: Repositories,
    kept: BTreeMap<String, Kept>,
    guest: Guest,
    next: u64,
}

impl Model {
    fn new(seed: u64) -> Self {
        let mut rng = SmallRng::seed_from_u64(seed);
        let guest = Guest::random(24, &mut rng);
        Self { rng, repositories: Repositories::new(REPOSITORIES), kept: BTreeMap::new(), guest, next: 1 }
    }

    fn save(&mut self) {
        for page in self.guest.pages.values_mut() {
            if self.rng.random_bool(0.2) {
                *page = Guest::random_page(&mut self.rng);
            }
        }
        let critical_copies = self.rng.random_range(1..=3);
        let clean_copies = self.rng.random_range(0..=critical_copies.min(2));
        let name = self.next.to_string();
        self.next += 1;
        let id =
            save(&self.repositories.vault(), &self.guest, &name, policy(critical_copies, clean_copies)).id;
        let guest = self.guest.clone();
        self.kept.insert(name, Kept { id, guest, critical_copies, clean_copies });
    }

    fn any(&mut self) -> Option<String> {
        let at = self.rng.random_range(0..self.kept.len().max(1));
        self.kept.keys().nth(at).cloned()
    }

    fn delete(&mut self) {
        let Some(name) = self.any() else { return };
        let id = self.kept.remove(&name).expect("kept").id;
        self.frees(|vault| vault.delete(&[id]));
    }

    /// Compacts all of the vault, or of one repository without the others.
    fn gc(&mut self) {
        let paths = self.repositories.paths();
        let repository = self.rng.random_range(0..=paths.len());
        let gc = |vault: &Vault| vault.gc(Compact::All, &mut |_, _| ());
        match paths.get(repository..=repository) {
            Some(alone) => _ = gc(&Vault::open_directories(alone).expect("opens")).expect("compacts"),
            None => self.frees(gc),
        }
    }

    /// What is said to be freed is what `du` says.
    fn frees(&self, work: impl Fn(&Vault) -> Result<Deleted>) {
        let before = self.repositories.allocated();
        let Deleted::Collected(collected) = work(&self.repositories.vault()).expect("works") else {
            panic!("the vault is in use");
        };
        assert_eq!(collected.bytes, before - self.repositories.allocated());
    }

    /// Loses a repository, and makes it again from the others. What had one copy there is gone.
    fn lose_repository(&mut self) {
        let repository = self.rng.random_range(0..REPOSITORIES);
        let path = self.repositories.dirs[repository].path();
        std::fs::remove_dir_all(path).expect("removes");
        std::fs::create_dir(path).expect("makes");
        let vault = self.repositories.vault();
        let health = vault.repair(&[], OneDevice::Allow).expect("repairs").health;
        let listed: Vec<SnapshotId> = health.iter().map(|health| health.id).collect();
        self.kept.retain(|name, kept| {
            let is_there = listed.contains(&kept.id);
            assert!(is_there || kept.critical_copies == 1, "{name} had {} copies", kept.critical_copies);
            is_there
        });
        for health in &health {
            let only_clean = health.problems.iter().all(|problem| problem.contains(".clean"));
            assert!(health.is_whole() && only_clean, "{health:?}");
        }
    }

    /// Every snapshot reads as it should, also from any one of its repositories.
    fn check(&mut self, may_lose: bool) {
        let vault = self.repositories.vault();
        assert_eq!(vault.list().expect("lists").len(), self.kept.len());
        for (name, kept) in &self.kept {
            assert_reads(&open(&vault, name).expect("opens"), &kept.guest, kept.clean_copies, may_lose);
        }
        for path in self.repositories.paths() {
            let alone = vmstrata_memory::vault::Vault::open_directories(&[path]).expect("opens");
            for listed in alone.list().expect("lists") {
                let name = listed.info.expect("metadata").name;
                let kept = &self.kept[&name];
                assert_reads(&open(&alone, &name).expect("opens"), &kept.guest, kept.clean_copies, true);
            }
            let health: Vec<Health> = alone.verify(&[], |_, _| ()).expect("verifies");
            assert!(health.iter().all(Health::is_whole), "{health:?}");
        }
    }
}

#[test]
fn a_store_is_what_a_plain_map_is() {
    for seed in 0..3 {
        let mut model = Model::new(seed);
        let mut has_lost = false;
        for _ in 0..16 {
            match model.rng.random_range(0..10) {
                0..6 => model.save(),
                6..8 => model.delete(),
                8 => model.gc(),
                _ => {
                    model.lose_repository();
                    has_lost = true;
                }
            }
            model.check(has_lost);
        }
        while !model.kept.is_empty() {
            model.delete();
        }
        assert!(model.repositories.is_empty(), "{seed}: {:?}", model.repositories.files());
    }
}
