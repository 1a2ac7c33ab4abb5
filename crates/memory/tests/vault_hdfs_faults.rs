//! Snapshots in HDFS when DataNodes are lost, writers are killed, and writers meet who deletes.
#![cfg(feature = "hdfs")]

use crate::{vault_far, vault_support};
use std::sync::Arc;

use crate::hdfs::Cluster;
use crate::vault_far::Far;
use crate::vault_support::{Guest, Known, assert_reads, new_snapshot, open, policy, save};
use hdfs_native::sync::{Client, ClientBuilder};
use parking_lot::Mutex;
use vmstrata_memory::vault::{Closing, Health, Page, Policy};
use vmstrata_memory::{PAGE_BYTES, PageClass};

fn client(cluster: &Cluster) -> Client {
    ClientBuilder::new().with_url(format!("hdfs://127.0.0.1:{}", cluster.port)).build().expect("a client")
}

#[test]
fn what_one_datanode_had_alone_is_lost_and_nothing_else() {
    let mut cluster = Cluster::start(4);
    let address = cluster.repository("/v");
    let guest = Guest::new(4096, |page| {
        let class = if page % 2 == 0 { PageClass::Critical } else { PageClass::Clean };
        Known { class, seed: page + 1 }
    });
    let vault = vault_far::vault(&address);
    let saved = save(&vault, &guest, "1", Policy { extent_pages: 16, ..policy(3, 1) });
    let blocks = cluster.blocks(&format!("/v/{}.clean", saved.id));
    let victim = blocks[1].nodes[0].clone();
    let before = open(&vault, "1").expect("opens");
    cluster.ask(&format!("stop-datanode {victim}"));

    // Both who had it open and who opens it now.
    for snapshot in [before, open(&vault, "1").expect("opens")] {
        assert_reads(&snapshot, &guest, 1, true);
        let lost = guest.pages.keys().filter(|frame| {
            let read = snapshot.read_page(**frame, &mut [0; PAGE_BYTES]);
            matches!(read, Ok(Page::Lost))
        });
        let lost = lost.count();
        // Wherever its header and its table were: what lay elsewhere is found.
        let (_, of_pages) = blocks.split_last().expect("many");
        let had_all = of_pages.iter().all(|block| block.nodes[0] == victim);
        assert!(lost > 100 && (had_all || lost < 2048), "{lost} of 2048: {blocks:?}");
        assert!(!snapshot.problems().is_empty());
    }
    let health = vault.verify(&[], |_, _| ()).expect("verifies");
    assert!(health[0].is_whole() && health[0].lost_clean > 100 && !health[0].is_complete(), "{health:?}");
    assert_eq!(health[0].lost_critical, 0);
    cluster.ask("notice-stopped");
    // A repair makes nothing of what is nowhere, and new snapshots can be taken.
    let repaired = vault.repair(&[], Default::default()).expect("repairs");
    assert_eq!((repaired.made.len(), repaired.health[0].lost_clean), (0, health[0].lost_clean));
    let other = Guest::new(64, |page| Known { class: PageClass::Critical, seed: 1_000_000 + page });
    save(&vault, &other, "2", policy(3, 1));
    assert_reads(&open(&vault, "2").expect("opens"), &other, 1, false);

    cluster.ask("start-datanodes");
    a_datanode_stops_under_a_writer(&mut cluster, &address);
    let back = vault_far::vault(&address);
    assert_reads(&open(&back, "1").expect("opens"), &guest, 1, false);
    assert!(back.verify(&[], |_, _| ()).expect("verifies").iter().all(Health::is_whole));
}

/// The client replaces it in blocks that are begun, and fails where a new block begins at a DataNode that is gone.
fn a_datanode_stops_under_a_writer(cluster: &mut Cluster, address: &str) {
    let guest = Guest::new(2048, |page| Known { class: PageClass::Critical, seed: 2_000_000 + page });
    let vault = vault_far::vault(address);
    let mut writer = vault.begin(new_snapshot(&guest, "3", policy(3, 1))).expect("begins");
    let mut stop = Some(cluster.blocks(&format!("/v/{}.snapshot", vault.list().expect("lists")[0].id)));
    let given = guest.pages.iter().enumerate().try_for_each(|(at, (frame, page))| {
        if at == 1000
            && let Some(blocks) = stop.take()
        {
            cluster.ask(&format!("stop-datanode {}", blocks[0].nodes[0]));
        }
        writer.page(*frame, page.class, &vault_support::bytes(page.seed))
    });
    let done = given.and_then(|()| writer.finish(Closing::default()));
    assert_eq!(done.is_ok(), open(&vault, "3").is_ok(), "{done:?}");
    if done.is_ok() {
        assert_reads(&open(&vault, "3").expect("opens"), &guest, 1, false);
    }
    cluster.ask("start-datanodes");
}

/// A cluster for the tests of all far repositories.
struct Hdfs {
    cluster: Mutex<Cluster>,
    client: Client,
}

impl Hdfs {
    fn start() -> Arc<dyn Far> {
        let cluster = Cluster::start(2);
        let client = client(&cluster);
        Arc::new(Self { cluster: Mutex::new(cluster), client })
    }
}

impl Far for Hdfs {
    fn repository(&self, dir: &str) -> String {
        self.cluster.lock().repository(dir)
    }

    fn expire(&self) {
        self.cluster.lock().ask("expire now");
        std::thread::sleep(std::time::Duration::from_millis(5));
    }

    fn expire_no_more(&self) {
        self.cluster.lock().ask("expire late");
        std::thread::sleep(std::time::Duration::from_millis(5));
    }

    fn all_files(&self, dir: &str) -> Vec<String> {
        let all = self.client.list_status(dir, true).expect("lists");
        all.into_iter().filter(|file| !file.isdir).map(|file| file.path).collect()
    }
}

#[test]
fn holds_keep_writers_and_who_deletes_apart() {
    vault_far::holds_keep_writers_and_who_deletes_apart(&Hdfs::start());
}

/// What the next test runs.
#[test]
fn child() {
    vault_far::child();
}

#[test]
fn a_killed_writer_leaves_a_whole_snapshot_or_none() {
    vault_far::a_killed_writer_leaves_a_whole_snapshot_or_none(&Hdfs::start(), "vault_hdfs_faults::child");
}
