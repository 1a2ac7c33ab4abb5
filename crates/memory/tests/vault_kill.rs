//! kill -9 at every operation on a repository: the store is whole, and what was left is collected.
//!
//! Each case runs in a child process, which is this test binary again: it kills itself at its n-th operation.

use std::os::unix::process::ExitStatusExt as _;
use std::path::PathBuf;
use std::process::Command;

use crate::vault_support::fault::{Effect, Plan, faulty};
use crate::vault_support::{
    Guest, Repositories, assert_reads, leave_dead_pages, open, policy, save, save_at,
};
use rand::SeedableRng;
use rand::rngs::SmallRng;
use vmstrata_memory::vault::{Compact, Deleted, Health, ObjectId, OneDevice, Policy, Vault, Which};
use vmstrata_repo::{DirectoryRepository, Repository};

fn guest(seed: u64) -> Guest {
    Guest::random(16, &mut SmallRng::seed_from_u64(seed))
}

fn one_thread() -> Policy {
    Policy { threads: 1, ..policy(2, 1) }
}

/// What the child does: `KILL_AT` is "OPERATION STEP REPOSITORY REPOSITORY".
#[test]
fn child() {
    let Ok(case) = std::env::var("KILL_AT") else { return };
    let words: Vec<&str> = case.split(' ').collect();
    let open_repository = |path: &&str| -> std::sync::Arc<dyn Repository> {
        std::sync::Arc::new(
            DirectoryRepository::open(&PathBuf::from(path), ObjectId::is_name).expect("opens"),
        )
    };
    let plan = Plan::new(words[1].parse().expect("a number"), Effect::Kill);
    let vault = Vault::open(faulty(words[2..].iter().map(open_repository).collect(), &plan));
    match words[0] {
        "save" => drop(save_at(&vault, &guest(2), "2", one_thread(), 2).expect("saves")),
        "delete" => {
            let id = vault.find_id(&Which::Newest("web".to_owned())).expect("finds");
            vault.delete(&[id]).expect("deletes");
        }
        "gc" => drop(vault.gc(Compact::All, &mut |_, _| ()).expect("compacts")),
        "repair" => drop(vault.repair(&[], OneDevice::Allow).expect("repairs")),
        other => panic!("{other}"),
    }
}

/// Runs the operation until its n-th step; false when it has fewer.
fn killed_at(operation: &str, step: usize, repositories: &Repositories) -> bool {
    let paths: Vec<String> = repositories.paths().iter().map(|path| path.display().to_string()).collect();
    let status = Command::new(std::env::current_exe().expect("this test"))
        .args(["--exact", "vault_kill::child"])
        .env("KILL_AT", format!("{operation} {step} {}", paths.join(" ")))
        .stdout(std::process::Stdio::null())
        .status()
        .expect("runs");
    assert!(status.success() || status.signal() == Some(9), "{operation} {step}: {status}");
    !status.success()
}

/// A child that another thread is about to start has this process's locks for a moment.
fn collect(vault: &Vault) {
    for _ in 0..500 {
        if matches!(vault.collect().expect("collects"), Deleted::Collected(_)) {
            return;
        }
        std::thread::sleep(std::time::Duration::from_millis(10));
    }
    panic!("the vault is in use");
}

fn kill_everywhere(operation: &str, prepare: impl Fn(&Repositories), after: impl Fn(&Repositories)) {
    for step in 0.. {
        let repositories = Repositories::new(2);
        save(&repositories.vault(), &guest(1), "1", one_thread());
        prepare(&repositories);
        let was_killed = killed_at(operation, step, &repositories);
        let vault = repositories.vault();
        let health = vault.verify(&[], |_, _| ()).expect("verifies");
        assert!(health.iter().all(Health::is_whole), "{operation} {step}: {health:?}");
        assert_reads(&open(&vault, "1").expect("the older one"), &guest(1), 1, false);
        if let Ok(new) = open(&vault, "2") {
            assert_reads(&new, &guest(2), 1, false);
        }
        after(&repositories);
        collect(&vault);
        // Pages may lie in the two objects of a deleted snapshot, too.
        let most = vault.list().expect("lists").len() * 3 + 2;
        assert!(
            repositories.files().iter().all(|files| files.len() <= most),
            "{step}: {:?}",
            repositories.files()
        );
        if !was_killed {
            assert!(step > 10, "{operation} has only {step} steps");
            return;
        }
    }
}

#[test]
fn a_killed_writer_leaves_a_whole_snapshot_or_none() {
    kill_everywhere("save", |_| (), |_| ());
}

#[test]
fn a_killed_delete_harms_no_other() {
    kill_everywhere(
        "delete",
        |repositories| _ = save(&repositories.vault(), &guest(2), "2", one_thread()),
        |_| (),
    );
}

#[test]
fn a_killed_repair_can_be_done_again() {
    kill_everywhere(
        "repair",
        |repositories| repositories.lose_copies(1),
        |repositories| {
            let repaired = repositories.vault().repair(&[], OneDevice::Allow).expect("repairs");
            assert!(repaired.health.iter().all(Health::is_complete), "{repaired:?}");
        },
    );
}

#[test]
fn a_killed_gc_loses_no_page_and_the_next_one_finishes() {
    kill_everywhere(
        "gc",
        |repositories| {
            let vault = repositories.vault();
            vault.delete(&[open(&vault, "1").expect("opens").info().id]).expect("deletes");
            leave_dead_pages(repositories, &guest(1), &one_thread());
        },
        |repositories| {
            collect(&repositories.vault());
            assert!(repositories.are_alike());
            let left = repositories.vault().collectable(Compact::Worthwhile).expect("looks");
            assert!(left.compact.is_empty(), "{left:?}");
            let health = repositories.vault().verify(&[], |_, _| ()).expect("verifies");
            assert!(health.iter().all(Health::is_complete), "{health:?}");
        },
    );
}
