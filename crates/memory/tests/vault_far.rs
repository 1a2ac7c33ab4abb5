//! Vaults whose repository is no directory of this host, whichever kind it is of: writers that are stalled or killed, and writers that
//! meet who deletes.

use std::collections::BTreeSet;
use std::os::unix::process::ExitStatusExt;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::vault_support::fault::{Effect, Plan, faulty};
use crate::vault_support::{Guest, assert_reads, new_snapshot, open, policy, save, save_at};
use rand::SeedableRng;
use rand::rngs::SmallRng;
use vmstrata_memory::vault::{Closing, Deleted, Health, ObjectId, ObjectKind, Policy, Vault, Which};
use vmstrata_repo::{Address, Hold, Repository};

/// Where repositories are.
pub(crate) trait Far: Send + Sync {
    /// The address of the one in a directory.
    fn repository(&self, dir: &str) -> String;

    /// All holds that are there expire; those that come, too, or not.
    fn expire(&self);

    /// Holds last from now on.
    fn expire_no_more(&self);

    /// Everything in a directory, unfinished objects and holds too.
    fn all_files(&self, dir: &str) -> Vec<String>;
}

fn repository(address: &str) -> Arc<dyn Repository> {
    Address::parse(address).and_then(|address| address.open(ObjectId::is_name)).expect("opens")
}

/// With a client of its own, as another process has.
pub(crate) fn vault(address: &str) -> Arc<Vault> {
    Vault::open(vec![repository(address)])
}

fn small(seed: u64) -> Guest {
    Guest::random(16, &mut SmallRng::seed_from_u64(seed))
}

/// Two copies of all, where they are kept: closing a file of HDFS with one would wait for the DataNode's report.
fn one_thread(address: &str) -> Policy {
    let copies = repository(address).capabilities().max_copies.min(2);
    Policy { threads: 1, ..policy(copies, copies) }
}

pub(crate) fn holds_keep_writers_and_who_deletes_apart(far: &Arc<dyn Far>) {
    who_deletes_is_alone(far);
    a_stalled_writer_cannot_publish(far);
    a_stalled_collector_cannot_delete(far);
    collecting_at_any_moment_harms_no_snapshot(far);
    writers_race_with_who_deletes(far);
}

fn who_deletes_is_alone(far: &Arc<dyn Far>) {
    let address = far.repository("/holds");
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
    assert_eq!(far.all_files("/holds"), [""; 0]);
}

/// A process that was stopped does not know that its hold is gone: the repository does.
fn a_stalled_writer_cannot_publish(far: &Arc<dyn Far>) {
    let address = far.repository("/stalled");
    let (stalled, other) = (vault(&address), vault(&address));
    let mut writer = stalled.begin(new_snapshot(&small(1), "1", one_thread(&address))).expect("begins");
    small(1).give(&mut writer).expect("takes");
    far.expire();
    assert!(matches!(other.collect(), Ok(Deleted::Collected(_))));
    let refused = writer.finish(Closing::default()).expect_err("its hold is gone");
    let told = std::error::Error::source(&refused).expect("has a cause").to_string();
    assert!(told.contains("hold on it was lost"), "{told}");
    assert_eq!(other.list().expect("lists").len(), 0);
    far.expire_no_more();
    save(&stalled, &small(1), "1", one_thread(&address));
    assert_reads(&open(&other, "1").expect("opens"), &small(1), 1, false);
}

fn a_stalled_collector_cannot_delete(far: &Arc<dyn Far>) {
    let address = far.repository("/collector");
    let saved = save(&vault(&address), &small(1), "1", one_thread(&address));
    let (stalled, other) = (repository(&address), repository(&address));
    let alone = stalled.hold(Hold::AloneOrNot).expect("asks").expect("no other hold");
    far.expire();
    let shared = other.hold(Hold::Write).expect("takes over");
    let name = ObjectId { owner: saved.id, kind: ObjectKind::Critical };
    let refused = stalled.delete(&name.into()).expect_err("its hold is gone").source.to_string();
    assert!(refused.contains("hold on it was lost"), "{refused}");
    drop((shared, alone));
    assert_reads(&open(&vault(&address), "1").expect("opens"), &small(1), 1, false);
    far.expire_no_more();
}

/// Before each step of a writer in turn another deletes what it can: an older snapshot, and what is not needed. While the
/// writer's hold lasts it waits; once that has expired the writer fails. What is listed is whole, always.
fn collecting_at_any_moment_harms_no_snapshot(far: &Arc<dyn Far>) {
    for expired in [false, true] {
        let (mut saved, mut refused) = (0, 0);
        for at in 0.. {
            let address = far.repository(&format!("/race-{expired}-{at}"));
            let older = save(&vault(&address), &small(1), "1", one_thread(&address)).id;
            if expired {
                far.expire();
            }
            let (other, far_too) = (vault(&address), Arc::clone(far));
            let delete = move || {
                if expired {
                    far_too.expire();
                }
                other.delete(&[older]).expect("deletes");
            };
            let plan = Plan::meanwhile(at, delete);
            let writing = Vault::open(faulty(vec![repository(&address)], &plan));
            let done = save_at(&writing, &small(1), "2", one_thread(&address), 2);
            far.expire_no_more();
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

fn writers_race_with_who_deletes(far: &Arc<dyn Far>) {
    let address = far.repository("/race");
    let saved = AtomicUsize::new(0);
    let write = |writer: u64| {
        let vault = vault(&address);
        for round in 0..5u64 {
            let name = (writer * 100 + round + 1).to_string();
            save(&vault, &small(round % 2), &name, one_thread(&address));
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
    let left: BTreeSet<String> = far.all_files("/race").into_iter().collect();
    assert_eq!(left, needed, "what is not needed is gone");
}

/// What the child of [`a_killed_writer_leaves_a_whole_snapshot_or_none`] does: `KILL_AT` is "STEP REPOSITORY".
pub(crate) fn child() {
    let Ok(case) = std::env::var("KILL_AT") else { return };
    let (step, address) = case.split_once(' ').expect("a step and a repository");
    let plan = Plan::new(step.parse().expect("a number"), Effect::Kill);
    let vault = Vault::open(faulty(vec![repository(address)], &plan));
    save_at(&vault, &small(2), "2", one_thread(address), 2).expect("saves");
}

/// kill -9 at every operation: what was begun is not listed, is in no one's way once its hold expired, and goes. `child` is the test
/// that calls [`child`].
pub(crate) fn a_killed_writer_leaves_a_whole_snapshot_or_none(far: &Arc<dyn Far>, child: &str) {
    for step in 0.. {
        far.expire_no_more();
        let dir = format!("/killed-{step}");
        let address = far.repository(&dir);
        save(&vault(&address), &small(1), "1", one_thread(&address));
        let status = Command::new(std::env::current_exe().expect("this test"))
            .args(["--exact", child])
            .env("KILL_AT", format!("{step} {address}"))
            .stdout(Stdio::null())
            .status()
            .expect("runs");
        assert!(status.success() || status.signal() == Some(9), "{step}: {status}");
        far.expire();
        let vault = vault(&address);
        assert_reads(&open(&vault, "1").expect("the older one"), &small(1), 1, false);
        if let Ok(new) = open(&vault, "2") {
            assert_reads(&new, &small(2), 1, false);
        }
        assert!(matches!(vault.collect(), Ok(Deleted::Collected(_))), "{step}");
        let most = vault.list().expect("lists").len() * 3;
        let left = far.all_files(&dir);
        assert!(left.len() <= most, "{step}: {left:?}");
        if status.success() {
            assert!(step > 10, "{step} steps");
            return;
        }
    }
}
