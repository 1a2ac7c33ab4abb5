//! Holds in an object store: against each other, lost, and left by processes that are gone.
#![cfg(feature = "s3")]

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::s3::{Store, with_keys};
use crate::suite::is_tested;
use vmstrata_repo::{Address, Held, Hold, ObjectName, Repository, Result};

const OVER: &str = "vmstrata hold 1\nserial 9\nover\n";

fn name(text: &str) -> ObjectName {
    ObjectName::new(text).expect("a name")
}

fn write(repository: &dyn Repository, name: &ObjectName) -> Result<()> {
    let mut object = repository.replace(name, 1)?;
    object.write(b"bytes")?;
    object.sync()?;
    object.finish()
}

/// A store with a repository of which each process has its own.
struct Case {
    store: Store,
}

impl Case {
    fn open(&self) -> Arc<dyn Repository> {
        Address::parse(&self.store.repository("v"))
            .and_then(|address| address.open(is_tested))
            .expect("opens")
    }

    fn holds(&self) -> Vec<String> {
        self.store.keys_in("v", ".holds/")
    }

    /// What a hold says.
    fn read(&self, hold: &str) -> String {
        self.store.ask("GET", &format!("/vms/v/{hold}"))
    }

    fn write(&self, hold: &str, text: &str) {
        self.store.send("PUT", &format!("/vms/v/{hold}"), text);
    }

    fn has(&self, object: &str) -> bool {
        !self.store.keys_in("v", object).is_empty()
    }
}

fn hold(repository: &dyn Repository, how: Hold) -> Option<Held> {
    repository.hold(how).expect("asks")
}

fn in_a_store(test: &str, body: impl FnOnce(&Case)) {
    with_keys(&format!("holds_s3::{test}"), || body(&Case { store: Store::start() }));
}

#[test]
fn who_deletes_is_alone_and_holds_are_no_objects() {
    in_a_store("who_deletes_is_alone_and_holds_are_no_objects", |case| {
        let (one, two) = (case.open(), case.open());
        let shared = [hold(&*one, Hold::Write), hold(&*two, Hold::Read), hold(&*one, Hold::Write)];
        assert_eq!((case.holds().len(), one.list("").expect("lists")), (2, vec![]));
        assert!(hold(&*one, Hold::AloneOrNot).is_none() && hold(&*two, Hold::AloneOrNot).is_none());
        drop(shared);
        let alone = hold(&*one, Hold::AloneOrNot);
        assert!(alone.is_some() && hold(&*two, Hold::AloneOrNot).is_none());
        let waiting = std::thread::spawn(move || drop(hold(&*two, Hold::Write)));
        drop(alone);
        waiting.join().expect("gets it");
        assert!(hold(&*one, Hold::Alone).is_some());
        assert_eq!(case.holds(), [""; 0]);
    });
}

#[test]
fn a_hold_that_is_written_anew_lasts() {
    in_a_store("a_hold_that_is_written_anew_lasts", |case| {
        let (one, two) = (case.open(), case.open());
        let _held = hold(&*one, Hold::Write);
        let [name] = &case.holds()[..] else { panic!("one holds it") };
        case.store.pass(120);
        let (first, deadline) = (case.read(name), Instant::now() + Duration::from_secs(60));
        while case.read(name) == first {
            assert!(Instant::now() < deadline, "it is never written anew");
            std::thread::sleep(Duration::from_millis(100));
        }
        assert!(hold(&*two, Hold::AloneOrNot).is_none());
        write(&*one, &self::name("object")).expect("still holds it");
    });
}

/// As a process that was stopped for minutes.
#[test]
fn who_lost_a_hold_publishes_and_deletes_nothing() {
    in_a_store("who_lost_a_hold_publishes_and_deletes_nothing", |case| {
        let (one, two) = (case.open(), case.open());
        let (small, large) = (name("small"), name("large"));
        for name in [&small, &large] {
            write(&*two, name).expect("writes");
        }
        for how in [Hold::Write, Hold::Alone] {
            let held = hold(&*one, how);
            let mut objects =
                [one.replace(&small, 1).expect("begins"), one.create_new(&name("new"), 1).expect("begins")];
            objects[0].write(&[7; 100]).expect("takes");
            objects[1].write(&vec![7; 33 << 20]).expect("takes");
            objects.iter_mut().for_each(|object| object.sync().expect("flushes"));
            let ended = (0..100).any(|_| {
                case.store.pass(120);
                hold(&*two, Hold::AloneOrNot).is_some()
            });
            assert!(ended, "it expires");
            for object in objects {
                let refused = object.finish().expect_err("its hold is gone");
                assert!(refused.source.to_string().contains("hold on it was lost"), "{refused:?}");
            }
            if how == Hold::Alone {
                let refused = one.delete(&large).expect_err("its hold is gone");
                assert!(refused.source.to_string().contains("hold on it was lost"), "{refused:?}");
            }
            assert_eq!(two.names("").expect("lists"), [large.clone(), small.clone()]);
            assert_eq!(two.open(&small).expect("opens").len(), 5, "{how:?}");
            drop(held);
            let _again = hold(&*one, how);
            write(&*one, &small).expect("holds it again");
        }
        assert_eq!(case.store.keys_in("v", "."), [""; 0], "nothing is left");
    });
}

/// What a holder asked the store for may come late. Who ends its hold sees to it that it does not.
#[test]
fn what_was_begun_in_a_hold_that_is_over_is_brought_to_an_end() {
    in_a_store("what_was_begun_in_a_hold_that_is_over_is_brought_to_an_end", |case| {
        let one = case.open();
        let [old, kept] = ["old", "kept"].map(name);
        for name in [&old, &kept] {
            write(&*one, name).expect("writes");
        }
        let begun = case.store.ask("POST", "/vms/v/late?uploads");
        let upload = begun.split("<UploadId>").nth(1).and_then(|rest| rest.split('<').next()).expect("an id");
        case.store.send("PUT", &format!("/vms/v/late?partNumber=1&uploadId={upload}"), "late");
        assert!(case.store.ask("GET", "/vms?uploads").contains(upload));
        case.write(".new/alone-1.2", "unfinished");
        case.write(".new/alone-12.3", "another's");
        case.write(".holds/alone-1", &format!("{OVER}publish late {upload}\ndelete old\ndelete gone\n"));
        let _held = hold(&*one, Hold::Write);
        assert_eq!(one.names("").expect("lists"), [kept]);
        assert!(!case.store.ask("GET", "/vms?uploads").contains(upload), "it can be completed no more");
        assert!(!case.has(".new/alone-1.") && case.has(".new/alone-12.3") && !case.has(".holds/alone-"));
        assert_eq!(one.sweep().expect("sweeps").objects, 1);
    });
}

#[test]
fn a_hold_that_is_not_understood_is_in_the_way() {
    in_a_store("a_hold_that_is_not_understood_is_in_the_way", |case| {
        case.write(".holds/alone-1", "vmstrata hold 2\n");
        case.store.pass(120);
        let refused = case.open().hold(Hold::Write).err().expect("is not ended");
        assert!(
            refused.source.to_string().contains(".holds/alone-1 is no hold that is known"),
            "{refused:?}"
        );
    });
}

/// A version that the holder gave up comes after all, in the place of the one before.
#[test]
fn a_late_version_of_its_own_does_not_end_a_hold() {
    in_a_store("a_late_version_of_its_own_does_not_end_a_hold", |case| {
        let one = case.open();
        let _held = hold(&*one, Hold::Write);
        let [own] = &case.holds()[..] else { panic!("one holds it") };
        case.write(own, "vmstrata hold 1\nserial 0\ndelete other\n");
        write(&*one, &name("object")).expect("holds it");
        case.write(own, OVER);
        write(&*one, &name("other")).expect_err("another process ended it");
        assert_eq!(one.names("").expect("lists"), [name("object")]);
    });
}

#[test]
fn a_store_that_cannot_refuse_is_not_held() {
    in_a_store("a_store_that_cannot_refuse_is_not_held", |case| {
        for (ignored, told) in [("If-Match", "it ignores If-Match"), ("abort", "an upload that was aborted")]
        {
            let store = Case { store: Store::start() };
            store.store.ignore(ignored);
            for how in [Hold::Read, Hold::Write, Hold::AloneOrNot] {
                let refused = store.open().hold(how).err().expect("cannot be held");
                assert!(refused.source.to_string().contains(told), "{refused:?}");
            }
        }
        assert!(hold(&*case.open(), Hold::AloneOrNot).is_some());
    });
}
