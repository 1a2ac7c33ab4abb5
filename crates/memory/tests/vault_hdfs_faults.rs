//! Snapshots in HDFS when DataNodes are lost, writers are killed, and writers meet who deletes.
#![cfg(feature = "hdfs")]

use crate::vault_support;
use std::collections::BTreeSet;
use std::os::unix::process::ExitStatusExt;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::hdfs::Cluster;
use crate::vault_support::fault::{Effect, Plan, faulty};
use crate::vault_support::{Guest, Known, assert_reads, new_snapshot, open, policy, save, save_at};
use hdfs_native::sync::{Client, ClientBuilder};
use rand::SeedableRng;
use rand::rngs::SmallRng;
use vmstrata_memory::vault::{Closing, Deleted, Health, ObjectId, ObjectKind, Page, Policy, Vault, Which};
use vmstrata_memory::{PAGE_BYTES, PageClass};
use vmstrata_repo::{Address, Hold, Repository};

fn repository(address: &str) -> Arc<dyn Repository> {
    Address::parse(address).and_then(|address| address.open(ObjectId::is_name)).expect("opens")
}

/// With a client of its own, as another process has.
fn vault(address: &str) -> Arc<Vault> {
    Vault::open(vec![repository(address)])
}

fn small(seed: u64) -> Guest {
    Guest::random(16, &mut SmallRng::seed_from_u64(seed))
}

/// Two copies of all: closing a file with one would wait for the DataNode's report.
fn one_thread() -> Policy {
    Policy { threads: 1, ..policy(2, 2) }
}

/// Lets all holds expire at once, or none.
fn let_holds_expire(cluster: &mut Cluster, at_once: bool) {
    cluster.ask(if at_once { "expire now" } else { "expire late" });
    std::thread::sleep(std::time::Duration::from_millis(5));
}

fn client(cluster: &Cluster) -> Client {
    ClientBuilder::new().with_url(format!("hdfs://127.0.0.1:{}", cluster.port)).build().expect("a client")
}

/// Everything in a directory, unfinished objects too.
fn all_files(client: &Client, dir: &str) -> Vec<String> {
    let all = client.list_status(dir, true).expect("lists");
    all.into_iter().filter(|file| !file.isdir).map(|file| file.path).collect()
}

#[test]
fn what_one_datanode_had_alone_is_lost_and_nothing_else() {
    let mut cluster = Cluster::start(4);
    let address = cluster.repository("/v");
    let guest = Guest::new(4096, |page| {
        let class = if page % 2 == 0 { PageClass::Critical } else { PageClass::Clean };
        Known { class, seed: page + 1 }
    });
    let vault = vault(&address);
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
    let back = self::vault(&address);
    assert_reads(&open(&back, "1").expect("opens"), &guest, 1, false);
    assert!(back.verify(&[], |_, _| ()).expect("verifies").iter().all(Health::is_whole));
}

/// The client replaces it in blocks that are begun, and fails where a new block begins at a DataNode that is gone.
fn a_datanode_stops_under_a_writer(cluster: &mut Cluster, address: &str) {
    let guest = Guest::new(2048, |page| Known { class: PageClass::Critical, seed: 2_000_000 + page });
    let vault = vault(address);
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

#[test]
fn holds_keep_writers_and_who_deletes_apart() {
    let mut cluster = Cluster::start(2);
    who_deletes_is_alone(&mut cluster);
    a_stalled_writer_cannot_publish(&mut cluster);
    a_stalled_collector_cannot_delete(&mut cluster);
    collecting_at_any_moment_harms_no_snapshot(&mut cluster);
    writers_race_with_who_deletes(&mut cluster);
}

fn who_deletes_is_alone(cluster: &mut Cluster) {
    let address = cluster.repository("/holds");
    let (one, two) = (repository(&address), repository(&address));
    let held = |repository: &Arc<dyn Repository>, how| repository.hold(how).expect("asks");
    let shared = [held(&one, Hold::Write), held(&two, Hold::Write), held(&one, Hold::Write)];
    assert!(held(&one, Hold::AloneOrNot).is_none() && held(&two, Hold::AloneOrNot).is_none());
    drop(shared);
    let alone = held(&one, Hold::AloneOrNot);
    assert!(alone.is_some() && held(&two, Hold::AloneOrNot).is_none());
    let waiting = std::thread::spawn(move || drop(two.hold(Hold::Write).expect("waits")));
    drop(alone);
    waiting.join().expect("gets it");
    assert!(held(&one, Hold::Alone).is_some());
    assert_eq!(all_files(&client(cluster), "/holds"), [""; 0]);
}

/// A process that was stopped does not know that its hold is gone: HDFS does.
fn a_stalled_writer_cannot_publish(cluster: &mut Cluster) {
    let address = cluster.repository("/stalled");
    let (stalled, other) = (vault(&address), vault(&address));
    let mut writer = stalled.begin(new_snapshot(&small(1), "1", one_thread())).expect("begins");
    small(1).give(&mut writer).expect("takes");
    let_holds_expire(cluster, true);
    assert!(matches!(other.collect(), Ok(Deleted::Collected(_))));
    let refused = writer.finish(Closing::default()).expect_err("its hold is gone");
    let told = std::error::Error::source(&refused).expect("has a cause").to_string();
    assert!(told.contains("hold on it was lost"), "{told}");
    assert_eq!(other.list().expect("lists").len(), 0);
    let_holds_expire(cluster, false);
    save(&stalled, &small(1), "1", one_thread());
    assert_reads(&open(&other, "1").expect("opens"), &small(1), 1, false);
}

fn a_stalled_collector_cannot_delete(cluster: &mut Cluster) {
    let address = cluster.repository("/collector");
    let saved = save(&vault(&address), &small(1), "1", one_thread());
    let (stalled, other) = (repository(&address), repository(&address));
    let alone = stalled.hold(Hold::AloneOrNot).expect("asks").expect("nobody else does");
    let_holds_expire(cluster, true);
    let shared = other.hold(Hold::Write).expect("takes over");
    let name = ObjectId { owner: saved.id, kind: ObjectKind::Critical };
    let refused = stalled.delete(&name.into()).expect_err("its hold is gone").source.to_string();
    assert!(refused.contains("hold on it was lost"), "{refused}");
    drop((shared, alone));
    assert_reads(&open(&vault(&address), "1").expect("opens"), &small(1), 1, false);
    let_holds_expire(cluster, false);
}

/// Before each step of a writer in turn another deletes what it can: an older snapshot, and what is not needed. While the
/// writer's hold lasts it waits; once that has expired the writer fails. What is listed is whole, always.
fn collecting_at_any_moment_harms_no_snapshot(cluster: &mut Cluster) {
    for expired in [false, true] {
        let (mut saved, mut refused) = (0, 0);
        for at in 0.. {
            let address = cluster.repository(&format!("/race-{expired}-{at}"));
            let older = save(&vault(&address), &small(1), "1", one_thread()).id;
            let_holds_expire(cluster, expired);
            let other = vault(&address);
            let delete = move || _ = other.delete(&[older]).expect("deletes");
            let plan = Plan::meanwhile(at, delete);
            let writing = Vault::open(faulty(vec![repository(&address)], &plan));
            let done = save_at(&writing, &small(1), "2", one_thread(), 2);
            let_holds_expire(cluster, false);
            *(if done.is_ok() { &mut saved } else { &mut refused }) += 1;
            drop(writing);
            let vault = vault(&address);
            assert_eq!(open(&vault, "2").is_ok(), done.is_ok(), "{expired} {at}: {done:?}");
            if done.is_ok() {
                assert_reads(&open(&vault, "2").expect("opens"), &small(1), 1, false);
            }
            let health = vault.verify(&[], |_, _| ()).expect("verifies");
            assert!(health.iter().all(Health::is_complete), "{expired} {at}: {health:?}");
            if plan.asked.load(Ordering::SeqCst) <= at {
                assert!(at > 10, "{at} steps");
                break;
            }
        }
        assert!(saved > 0 && (refused > 0) == expired, "{saved} saved, {refused} refused");
    }
}

fn writers_race_with_who_deletes(cluster: &mut Cluster) {
    let address = cluster.repository("/race");
    let saved = AtomicUsize::new(0);
    let write = |writer: u64| {
        let vault = vault(&address);
        for round in 0..5u64 {
            let name = (writer * 100 + round + 1).to_string();
            save(&vault, &small(round % 2), &name, one_thread());
            saved.fetch_add(1, Ordering::SeqCst);
        }
    };
    std::thread::scope(|scope| {
        let writers = [scope.spawn(|| write(1)), scope.spawn(|| write(2))];
        let deleting = vault(&address);
        let mut deleted = 0;
        while !writers.iter().all(std::thread::ScopedJoinHandle::is_finished) {
            let found = deleting.find_id(&Which::Newest("web".to_owned()));
            if let Ok(id) = found
                && deleted + 2 < saved.load(Ordering::SeqCst)
            {
                deleting.delete(&[id]).expect("deletes");
                deleted += 1;
            }
        }
    });
    let vault = vault(&address);
    assert!(matches!(vault.collect(), Ok(Deleted::Collected(_))));
    let health = vault.verify(&[], |_, _| ()).expect("verifies");
    assert!(!health.is_empty() && health.iter().all(Health::is_complete), "{health:?}");
    // A snapshot's pages may lie in an object of one that is deleted.
    let listed = vault.list().expect("lists");
    let needed = listed.iter().flat_map(|listed| {
        let metadata = ObjectId { owner: listed.id, kind: ObjectKind::Metadata };
        let objects = &listed.info.as_ref().expect("is whole").objects;
        objects.values().map(|object| object.name).chain([metadata])
    });
    let needed: BTreeSet<String> = needed.map(|name| format!("/race/{name}")).collect();
    let left: BTreeSet<String> = all_files(&client(cluster), "/race").into_iter().collect();
    assert_eq!(left, needed, "what is not needed is gone");
}

/// What the child of the next test does: `KILL_AT` is "STEP REPOSITORY".
#[test]
fn child() {
    let Ok(case) = std::env::var("KILL_AT") else { return };
    let (step, address) = case.split_once(' ').expect("a step and a repository");
    let plan = Plan::new(step.parse().expect("a number"), Effect::Kill);
    let vault = Vault::open(faulty(vec![repository(address)], &plan));
    save_at(&vault, &small(2), "2", one_thread(), 2).expect("saves");
}

/// kill -9 at every operation: what was begun is not listed, is in nobody's way once its lease expired, and goes.
#[test]
fn a_killed_writer_leaves_a_whole_snapshot_or_none() {
    let mut cluster = Cluster::start(2);
    let client = client(&cluster);
    for step in 0.. {
        let_holds_expire(&mut cluster, false);
        let dir = format!("/killed-{step}");
        let address = cluster.repository(&dir);
        save(&vault(&address), &small(1), "1", one_thread());
        let status = Command::new(std::env::current_exe().expect("this test"))
            .args(["--exact", "vault_hdfs_faults::child"])
            .env("KILL_AT", format!("{step} {address}"))
            .stdout(Stdio::null())
            .status()
            .expect("runs");
        assert!(status.success() || status.signal() == Some(9), "{step}: {status}");
        let_holds_expire(&mut cluster, true);
        let vault = vault(&address);
        assert_reads(&open(&vault, "1").expect("the older one"), &small(1), 1, false);
        if let Ok(new) = open(&vault, "2") {
            assert_reads(&new, &small(2), 1, false);
        }
        assert!(matches!(vault.collect(), Ok(Deleted::Collected(_))), "{step}");
        let most = vault.list().expect("lists").len() * 3;
        let left = all_files(&client, &dir);
        assert!(left.len() <= most, "{step}: {left:?}");
        if status.success() {
            assert!(step > 10, "{step} steps");
            return;
        }
    }
}
