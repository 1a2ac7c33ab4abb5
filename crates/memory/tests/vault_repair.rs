//! Damage of every kind is found, and mended while a copy is left.

use std::path::PathBuf;

use crate::vault_support::{Guest, Known, Repositories, assert_reads, flip, open, policy, save};
use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};
use vmstrata_memory::PageClass;
use vmstrata_memory::vault::{Health, OneDevice, Vault, VaultError, Which};

fn guest() -> Guest {
    Guest::random(60, &mut SmallRng::seed_from_u64(4))
}

fn verify(vault: &Vault) -> Vec<Health> {
    vault.verify(&[], |_, _| ()).expect("verifies")
}

fn files(repositories: &Repositories) -> Vec<PathBuf> {
    let names = repositories.files();
    let paths = repositories.paths();
    let join = |(repository, names): (&PathBuf, &Vec<String>)| {
        names.iter().map(|name| repository.join(name)).collect::<Vec<_>>()
    };
    paths.iter().zip(&names).flat_map(join).collect()
}

fn snapshot_of(repositories: &Repositories) -> Vec<(PathBuf, Vec<u8>)> {
    files(repositories).into_iter().map(|path| (path.clone(), std::fs::read(path).expect("reads"))).collect()
}

#[test]
fn what_is_whole_is_left_alone() {
    let repositories = Repositories::new(3);
    save(&repositories.vault(), &guest(), "1", policy(3, 1));
    let before = snapshot_of(&repositories);
    let vault = repositories.vault();
    assert!(verify(&vault).iter().all(Health::is_complete), "{:?}", verify(&vault));
    assert_eq!(vault.repair(&[], OneDevice::Allow).unwrap().made, [""; 0]);
    assert_eq!(snapshot_of(&repositories), before);
}

/// One bit of any object, wherever it is: it is found, and mended to the byte.
#[test]
fn a_flipped_bit_anywhere_is_found_and_mended() {
    let repositories = Repositories::new(2);
    let guest = guest();
    save(&repositories.vault(), &guest, "1", policy(2, 2));
    let before = snapshot_of(&repositories);
    let mut rng = SmallRng::seed_from_u64(1);
    for (path, bytes) in &before {
        let ends = [0, 12, 40, 63, 64, 70, bytes.len() - 1, bytes.len() - 30, bytes.len() - 60];
        for at in ends.into_iter().chain((0..20).map(|_| rng.random_range(0..bytes.len()))) {
            flip(path, at);
            let vault = repositories.vault();
            let found = verify(&vault);
            let said = found[0].problems.join("\n");
            assert!(found[0].is_whole() && said.contains(path.to_str().unwrap()), "{path:?} {at}: {said}");
            assert_eq!((found[0].lost_critical, found[0].lost_clean), (0, 0));
            assert_reads(&open(&vault, "1").unwrap(), &guest, 2, false);
            let repaired = vault.repair(&[], OneDevice::Allow).unwrap();
            assert_eq!(repaired.made, [path.to_str().unwrap()]);
            assert!(repaired.health[0].is_complete());
            assert!(std::fs::read(path).unwrap() == *bytes, "{path:?} {at}");
        }
    }
    assert!(snapshot_of(&repositories) == before);
}

#[test]
fn a_lost_repository_is_filled_again() {
    let repositories = Repositories::new(3);
    let guest = guest();
    let mut names = Vec::new();
    for name in ["1", "2"] {
        save(&repositories.vault(), &guest, name, policy(3, 3));
        names.push(name);
    }
    let before = snapshot_of(&repositories);
    for name in &repositories.files()[1] {
        std::fs::remove_file(repositories.dirs[1].path().join(name)).unwrap();
    }
    let vault = repositories.vault();
    let found = verify(&vault);
    assert!(found.iter().all(|health| health.is_whole() && !health.is_complete()), "{found:?}");
    let repaired = vault.repair(&[], OneDevice::Allow).unwrap();
    assert!(repaired.health.iter().all(Health::is_complete), "{repaired:?}");
    assert!(snapshot_of(&repositories) == before);
    assert_reads(&open(&vault, "2").unwrap(), &guest, 3, false);
}

/// Each copy has lost something, and together they have everything.
#[test]
fn copies_mend_each_other() {
    let repositories = Repositories::new(3);
    let guest = guest();
    let saved = save(&repositories.vault(), &guest, "1", policy(3, 0));
    let name = format!("{}.critical", saved.id);
    let before = snapshot_of(&repositories);
    let len = std::fs::read(repositories.dirs[0].path().join(&name)).unwrap().len();
    for (dir, at) in repositories.dirs.iter().zip([100, len / 2, len - 5]) {
        flip(&dir.path().join(&name), at);
    }
    let vault = repositories.vault();
    assert!(verify(&vault)[0].is_whole());
    assert_reads(&open(&vault, "1").unwrap(), &guest, 0, false);
    assert_eq!(vault.repair(&[], OneDevice::Allow).unwrap().made.len(), 3);
    assert!(snapshot_of(&repositories) == before);
}

/// All tails gone: extents are found one after another, and the tails made again.
#[test]
fn an_object_without_a_tail_is_still_read() {
    let repositories = Repositories::new(2);
    let guest = guest();
    let saved = save(&repositories.vault(), &guest, "1", policy(2, 1));
    let before = snapshot_of(&repositories);
    for dir in &repositories.dirs {
        let path = dir.path().join(format!("{}.critical", saved.id));
        let len = std::fs::read(&path).unwrap().len();
        flip(&path, len - 40);
    }
    let vault = repositories.vault();
    let found = verify(&vault);
    assert!(found[0].is_whole() && found[0].problems.len() >= 2, "{found:?}");
    assert_reads(&open(&vault, "1").unwrap(), &guest, 1, false);
    assert!(vault.repair(&[], OneDevice::Allow).unwrap().health[0].is_complete());
    assert!(snapshot_of(&repositories) == before);
}

#[test]
fn what_no_copy_has_is_counted_and_the_newest_whole_one_is_named() {
    let repositories = Repositories::new(2);
    let guest = |seed: u64| {
        Guest::new(8, move |page| Known { class: PageClass::Critical, seed: seed * 100 + page + 1 })
    };
    let ids: Vec<_> =
        (1..=4).map(|at| save(&repositories.vault(), &guest(at), &at.to_string(), policy(2, 1)).id).collect();
    for (id, kind, at) in [(ids[3], "critical", 100), (ids[2], "snapshot", 50)] {
        for dir in &repositories.dirs {
            flip(&dir.path().join(format!("{id}.{kind}")), at);
        }
    }
    let vault = repositories.vault();
    // What cannot be named comes first.
    let found = verify(&vault);
    assert_eq!((found[0].id, &found[0].title), (ids[2], &None));
    assert_eq!((found[1].id, found[1].lost_critical, found[1].is_whole()), (ids[3], 4, false));
    assert!(found[2..].iter().all(Health::is_complete));
    let before = |which: &Which| vault.newest_whole_before(which).unwrap().map(|info| info.title());
    let named = |name: &str| Which::Named { guest: "web".to_owned(), name: name.to_owned() };
    // With its pages lost; with all that is known of it lost, by name and by id; the newest, which may be any.
    for lost in [Which::Id(ids[3]), named("4"), named("3"), Which::Id(ids[2]), named("2.5")] {
        assert_eq!(before(&lost).as_deref(), Some("web@2"), "{lost}");
    }
    assert_eq!(before(&Which::Id(ids[1])).as_deref(), Some("web@1"));
    assert_eq!(before(&Which::Id(ids[0])), None);
    assert_eq!(before(&Which::Newest("db".to_owned())), None);
    let unreadable = vault.snapshot(&named("3")).unwrap_err();
    assert!(matches!(&unreadable, VaultError::Unreadable { lost, .. } if *lost == [ids[2]]), "{unreadable}");
    // A newer one than what is lost is the newest all the same.
    assert_eq!(vault.find_id(&Which::Newest("web".to_owned())).unwrap(), ids[3]);
    let error = vault.snapshot(&Which::Id(ids[2])).unwrap_err();
    assert!(matches!(&error, VaultError::MetadataLost { tried, .. } if tried.len() == 2), "{error}");
    let repaired = vault.repair(&[], OneDevice::Allow).unwrap();
    assert_eq!(repaired.made, [""; 0]);
}
