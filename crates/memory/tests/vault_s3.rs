//! Snapshots in an object store: found again, compacted and repaired, when writers are killed, and when writers meet who deletes.
#![cfg(feature = "s3")]

use std::sync::Arc;

use crate::s3::{Store, with_keys};
use crate::vault_far::{self, Far};
use crate::vault_support::{Guest, Known, Repositories, assert_reads, open, policy, save};
use vmstrata_memory::vault::{Deleted, Health, OneDevice, Policy, Vault};
use vmstrata_memory::{Frame, PageClass};

/// A store for the tests of all far repositories.
struct S3(Store);

impl S3 {
    fn start() -> Arc<dyn Far> {
        Arc::new(Self(Store::start()))
    }
}

impl Far for S3 {
    fn repository(&self, dir: &str) -> String {
        self.0.repository(dir.trim_start_matches('/'))
    }

    fn expire(&self) {
        self.0.pass(120);
    }

    fn expire_no_more(&self) {}

    fn all_files(&self, dir: &str) -> Vec<String> {
        let keys = self.0.keys_in(dir.trim_start_matches('/'), "");
        keys.into_iter().map(|key| format!("{dir}/{key}")).collect()
    }
}

#[test]
fn holds_keep_writers_and_who_deletes_apart() {
    with_keys("vault_s3::holds_keep_writers_and_who_deletes_apart", || {
        vault_far::holds_keep_writers_and_who_deletes_apart(&S3::start());
    });
}

/// What the next test runs.
#[test]
fn child() {
    vault_far::child();
}

#[test]
fn a_killed_writer_leaves_a_whole_snapshot_or_none() {
    with_keys("vault_s3::a_killed_writer_leaves_a_whole_snapshot_or_none", || {
        vault_far::a_killed_writer_leaves_a_whole_snapshot_or_none(&S3::start(), "vault_s3::child");
    });
}

/// Some 4 MiB of each class that is stored.
fn guest(seed: u64) -> Guest {
    Guest::new(4096, |page| {
        let class = if page % 2 == 0 { PageClass::Critical } else { PageClass::Clean };
        Known { class, seed: seed * 10_000 + page + 1 }
    })
}

fn strict() -> Policy {
    Policy { one_device: OneDevice::Refuse, extent_pages: 16, ..policy(1, 1) }
}

fn assert_complete(vault: &Vault) {
    let health = vault.verify(&[], |_, _| ()).expect("verifies");
    assert!(!health.is_empty() && health.iter().all(Health::is_complete), "{health:?}");
}

#[test]
fn snapshots_are_kept_in_s3() {
    with_keys("vault_s3::snapshots_are_kept_in_s3", || {
        let far = S3::start();
        let vault = vault_far::vault(&far.repository("/v"));
        let first = save(&vault, &guest(1), "1", strict());
        assert_eq!(far.all_files("/v").len(), 3);
        assert_reads(&open(&vault, "1").expect("opens"), &guest(1), 1, false);
        // A fifth of its pages are those of the first.
        let mut changed = guest(5);
        let kept = guest(1).pages.into_iter().enumerate().filter(|(at, _)| at % 10 < 2);
        changed.pages.extend(kept.map(|(_, page)| page));
        let second = save(&vault, &changed, "2", strict());
        assert!(second.stats.stored_critical < 2048, "{second:?}");
        let Ok(Deleted::Collected(gone)) = vault.delete(&[first.id]) else { panic!("nobody else uses it") };
        assert_eq!((gone.objects, gone.compacted), (0, 2));
        assert_complete(&vault);
        assert_reads(&open(&vault, "2").expect("opens"), &changed, 1, false);
        what_was_lost_is_made_again_beside_a_directory(&far);
        assert!(matches!(vault.delete(&[second.id]), Ok(Deleted::Collected(gone)) if gone.objects == 4));
        assert_eq!(far.all_files("/v"), [""; 0]);
    });
}

/// A copy in the store and one in a directory.
fn what_was_lost_is_made_again_beside_a_directory(far: &Arc<dyn Far>) {
    let dirs = Repositories::new(1);
    let both = [far.repository("/mixed"), dirs.paths()[0].display().to_string()];
    let vault = Vault::open_at(&both).expect("opens");
    let mut guest = guest(4);
    guest.pages.insert(Frame::new(0), Known { class: PageClass::Critical, seed: 7_000_000 });
    let saved = save(&vault, &guest, "1", Policy { one_device: OneDevice::Refuse, ..policy(2, 1) });
    dirs.lose_copies(0);
    assert_reads(&open(&vault, "1").expect("opens"), &guest, 1, false);
    let repaired = vault.repair(&[], OneDevice::Refuse).expect("repairs");
    assert!(!repaired.made.is_empty() && repaired.health.iter().all(Health::is_complete), "{repaired:?}");
    assert_complete(&vault);
    assert!(matches!(vault.delete(&[saved.id]), Ok(Deleted::Collected(_))));
    assert_eq!(far.all_files("/mixed"), [""; 0]);
}
