//! Snapshots in HDFS, beside its own NameNode and DataNodes: kept as often as asked for, found again, verified and repaired.
#![cfg(feature = "hdfs")]

use std::sync::Arc;

use crate::hdfs::Cluster;
use crate::vault_support::{Guest, Known, Repositories, assert_reads, new_snapshot, open, policy, save};
use hdfs_native::client::FileStatus;
use hdfs_native::sync::{Client, ClientBuilder};
use vmstrata_memory::vault::{Deleted, Health, ObjectId, OneDevice, Policy, Vault, VaultError};
use vmstrata_memory::{Frame, PageClass};
use vmstrata_repo::Address;

/// Some 4 MiB of each class that is stored, so that objects have several blocks.
fn guest(seed: u64) -> Guest {
    Guest::new(4096, |page| {
        let class = if page % 2 == 0 { PageClass::Critical } else { PageClass::Clean };
        Known { class, seed: seed * 10_000 + page + 1 }
    })
}

fn strict(critical: u8, clean: u8) -> Policy {
    Policy { one_device: OneDevice::Refuse, extent_pages: 16, ..policy(critical, clean) }
}

fn open_vault(addresses: &str) -> Result<Arc<Vault>, VaultError> {
    let addresses: Vec<String> = Address::split_list(addresses).into_iter().map(str::to_owned).collect();
    Vault::open_at(&addresses)
}

fn vault(addresses: &str) -> Arc<Vault> {
    open_vault(addresses).expect("opens")
}

fn health(vault: &Vault) -> Vec<Health> {
    vault.verify(&[], |_, _| ()).expect("verifies")
}

fn client(cluster: &Cluster) -> Client {
    ClientBuilder::new().with_url(format!("hdfs://127.0.0.1:{}", cluster.port)).build().expect("a client")
}

/// What lies in a directory, holds left out.
fn files(client: &Client, dir: &str) -> Vec<FileStatus> {
    let all = client.list_status(dir, false).expect("lists");
    all.into_iter().filter(|file| !file.isdir).collect()
}

#[test]
fn snapshots_are_kept_in_hdfs() {
    let mut cluster = Cluster::start(4);
    let repository = cluster.repository("/v");
    let client = client(&cluster);
    kept_as_asked(&mut cluster, &repository, &client);
    an_object_is_compacted_with_as_many_replicas(&repository, &client);
    replicas_that_were_taken_away_are_asked_for_again(&mut cluster, &repository, &client);
    who_only_reads_needs_no_hold(&mut cluster, &repository);
    hdfs_and_directories_share_a_snapshot(&mut cluster);
    a_repository_must_be_there(&mut cluster);
    an_unreachable_namenode_is_an_error(&mut cluster, &repository);
}

fn kept_as_asked(cluster: &mut Cluster, repository: &str, client: &Client) {
    let vault = vault(repository);
    let first = save(&vault, &guest(1), "1", strict(3, 1));
    for file in files(client, "/v") {
        let copies = if file.path.ends_with(".clean") { 1 } else { 3 };
        assert_eq!((file.replication, file.blocksize), (Some(copies), Some(1 << 20)), "{}", file.path);
        let blocks = cluster.blocks(&file.path);
        assert!(file.path.ends_with(".snapshot") || blocks.len() > 2, "{}: {blocks:?}", file.path);
        assert!(blocks.iter().all(|block| block.nodes.len() == copies as usize), "{blocks:?}");
    }
    assert_eq!(files(client, "/v").len(), 3);
    assert_reads(&open(&vault, "1").expect("opens"), &guest(1), 1, false);
    assert!(health(&vault).iter().all(Health::is_complete), "{:?}", health(&vault));

    let mut changed = guest(1);
    changed.pages.insert(Frame::new(0), Known { class: PageClass::Critical, seed: 7_000_000 });
    let second = save(&vault, &changed, "2", strict(3, 1));
    assert_eq!((second.stats.stored_critical, second.stats.stored_clean), (1, 0));
    assert_eq!(vault.list().expect("lists").len(), 2);
    assert!(matches!(vault.delete(&[first.id]), Ok(Deleted::Collected(_))));
    assert_reads(&open(&vault, "2").expect("opens"), &changed, 1, false);
    assert!(matches!(vault.delete(&[second.id]), Ok(Deleted::Collected(gone)) if gone.objects == 3));
    assert_eq!(files(client, "/v").len(), 0);
    assert_eq!(client.list_status("/v/.holds", true).expect("lists").len(), 0);
}

fn an_object_is_compacted_with_as_many_replicas(repository: &str, client: &Client) {
    let vault = vault(repository);
    let first = save(&vault, &guest(1), "1", strict(3, 1));
    let mut changed = guest(5);
    let kept = guest(1).pages.into_iter().enumerate().filter(|(at, _)| at % 10 < 2);
    changed.pages.extend(kept.map(|(_, page)| page));
    let second = save(&vault, &changed, "2", strict(3, 1));
    let lengths = || -> usize { files(client, "/v").iter().map(|file| file.length).sum() };
    let before = lengths();
    let Ok(Deleted::Collected(gone)) = vault.delete(&[first.id]) else { panic!("nobody else uses it") };
    assert_eq!((gone.objects, gone.compacted), (0, 2));
    assert_eq!(gone.bytes as usize, before - lengths());
    let object = client.get_file_info(&format!("/v/{}.critical", first.id)).expect("is there");
    assert_eq!(object.replication, Some(3));
    assert!(health(&vault).iter().all(Health::is_complete), "{:?}", health(&vault));
    assert_reads(&open(&vault, "2").expect("opens"), &changed, 1, false);
    assert!(matches!(vault.delete(&[second.id]), Ok(Deleted::Collected(_))));
    assert_eq!(files(client, "/v").len(), 0);
    assert_eq!(client.list_status("/v/.holds", true).expect("lists").len(), 0);
}

/// A repository that replicates counts as the copies it is asked for now, not as those it was asked for once.
fn replicas_that_were_taken_away_are_asked_for_again(
    cluster: &mut Cluster,
    repository: &str,
    client: &Client,
) {
    let vault = vault(repository);
    let saved = save(&vault, &guest(2), "1", strict(3, 1));
    let critical = format!("/v/{}.critical", saved.id);
    cluster.ask(&format!("replicate {critical} 1"));
    let found = health(&vault);
    assert!(found[0].is_whole() && !found[0].is_complete(), "{found:?}");
    assert!(found[0].problems.iter().any(|problem| problem.contains("1 whole of 3")), "{found:?}");
    let again = save(&vault, &guest(2), "2", strict(3, 1));
    assert_eq!((again.stats.stored_critical, again.stats.stored_clean), (2048, 0));
    let repaired = vault.repair(&[], OneDevice::Refuse).expect("repairs");
    assert_eq!(repaired.made.len(), 1, "{repaired:?}");
    assert!(repaired.health.iter().all(Health::is_complete), "{repaired:?}");
    assert_eq!(client.get_file_info(&critical).expect("is there").replication, Some(3));
    assert_reads(&open(&vault, "1").expect("opens"), &guest(2), 1, false);
}

/// In safe mode a NameNode answers and changes nothing.
fn who_only_reads_needs_no_hold(cluster: &mut Cluster, repository: &str) {
    cluster.ask("safe-mode on");
    let vault = vault(repository);
    assert_reads(&open(&vault, "2").expect("opens"), &guest(2), 1, false);
    let refused = vault.begin(new_snapshot(&guest(3), "3", strict(3, 1))).expect_err("safe mode");
    assert!(
        format!("{refused}: {:?}", std::error::Error::source(&refused)).contains("safe mode"),
        "{refused:?}"
    );
    cluster.ask("safe-mode off");
}

/// HDFS has room for all copies, so a directory beside it gets none, and each is told from the other.
fn hdfs_and_directories_share_a_snapshot(cluster: &mut Cluster) {
    let dirs = Repositories::new(1);
    let repository = cluster.repository("/mixed");
    let both = vault(&format!("{repository}:{}", dirs.paths()[0].display()));
    let saved = save(&both, &guest(4), "1", strict(3, 1));
    assert!(dirs.is_empty(), "three copies have room in HDFS");
    let alone = vault(&repository);
    assert_reads(&open(&alone, "1").expect("opens"), &guest(4), 1, false);
    let refused =
        vault(&dirs.paths()[0].display().to_string()).begin(new_snapshot(&guest(4), "2", strict(3, 1)));
    assert!(matches!(refused, Err(VaultError::TooFewRepositories { wanted: 3, found: 1 })), "{refused:?}");
    assert!(matches!(both.delete(&[saved.id]), Ok(Deleted::Collected(_))));
}

fn a_repository_must_be_there(cluster: &mut Cluster) {
    let missing = format!("hdfs://127.0.0.1:{}/missing", cluster.port);
    let refused = Address::parse(&missing)
        .and_then(|address| address.open(ObjectId::is_name))
        .expect_err("there is no such directory");
    assert_eq!(refused.kind(), std::io::ErrorKind::NotFound);
}

fn an_unreachable_namenode_is_an_error(cluster: &mut Cluster, repository: &str) {
    let held = vault(repository);
    let snapshot = open(&held, "2").expect("opens");
    cluster.ask("stop-namenode");
    let listed = held.list().expect_err("there is no NameNode");
    assert!(matches!(&listed, VaultError::Repository(error) if error.action == "listing"), "{listed:?}");
    let opened = open_vault(repository).expect_err("there is no NameNode");
    assert!(matches!(&opened, VaultError::Repository(error) if error.action == "opening"), "{opened:?}");
    // Where the blocks are is known, and the DataNodes are there.
    assert_reads(&snapshot, &guest(2), 1, false);
    cluster.ask("start-namenode");
    drop(snapshot);
    assert_reads(&open(&vault(repository), "2").expect("opens"), &guest(2), 1, false);
}

#[test]
fn what_is_no_directory_of_hdfs_is_no_repository() {
    let opened = |address: &str| open_vault(address).expect_err("no repository").to_string();
    assert!(opened("hdfs://127.0.0.1:1").contains("parsing"));
    let refused = Address::parse("hdfs://127.0.0.1:1/v")
        .and_then(|address| address.open(ObjectId::is_name))
        .expect_err("nobody listens");
    assert_eq!(refused.kind(), std::io::ErrorKind::ConnectionRefused);
}
