//! A part of a bucket does what every kind of repository must do.
#![cfg(feature = "s3")]

use std::io::ErrorKind;
use std::sync::Arc;

use crate::s3::{Store, with_keys};
use crate::suite;
use vmstrata_repo::{Address, Hold, ObjectName, Repository};

fn open(address: &str) -> Arc<dyn Repository> {
    Address::parse(address).and_then(|address| address.open(suite::is_tested)).expect("opens")
}

#[test]
fn a_part_of_a_bucket_is_a_repository() {
    with_keys("suite_s3::a_part_of_a_bucket_is_a_repository", || {
        let store = Store::start();
        let open = |dir: &str| open(&store.repository(dir));
        suite::test_kind(open("kind").as_ref());
        suite::test_objects(open("kind").as_ref());
        // Each with a client of its own, as other processes have.
        let racers = [open("race"), open("race"), open("race")];
        suite::test_race(&racers.each_ref().map(AsRef::as_ref), 20);
        let [one, other] = [open("kind"), open("kind")];
        what_has_many_parts_is_put_together(one.as_ref());
        what_is_being_written_is_not_swept(one.as_ref(), other.as_ref(), &store);
        what_takes_a_place_is_not_mixed_with_what_had_it(one.as_ref());
        let held = one.hold(Hold::Write).expect("holds");
        one.delete(&name("large")).expect("deletes");
        what_has_many_parts_is_put_together(one.as_ref());
        drop(held);
        let is_other = |key: &String| !key.starts_with("race/head-");
        assert_eq!(store.keys().into_iter().filter(is_other).collect::<Vec<_>>(), ["kind/large"]);
    });
}

fn name(text: &str) -> ObjectName {
    ObjectName::new(text).expect("a name")
}

/// More than is sent, and copied, at once.
fn what_has_many_parts_is_put_together(repository: &dyn Repository) {
    let bytes: Vec<u8> = (0..70_000_001_u64).map(|at| (at.wrapping_mul(0x9e37_79b9) >> 16) as u8).collect();
    let mut object = repository.create_new(&name("large"), 1).expect("begins");
    bytes.chunks(5_000_000).try_for_each(|part| object.write(part)).expect("takes");
    object.sync().expect("flushes");
    let mut read = vec![0; bytes.len()];
    object.read_back().and_then(|back| back.read_at(0, &mut read)).expect("reads");
    assert!(read == bytes);
    object.finish().expect("finishes");
    read.fill(0);
    repository.open(&name("large")).and_then(|object| object.read_at(0, &mut read)).expect("reads");
    assert!(read == bytes);
    let mut second = repository.create_new(&name("large"), 1).expect("begins");
    second.write(&bytes).expect("takes");
    assert_eq!(second.finish().expect_err("is not new").kind(), ErrorKind::AlreadyExists);
}

/// A sweep leaves a recent upload alone. An upload whose unfinished file was deleted fails to finish.
fn what_is_being_written_is_not_swept(one: &dyn Repository, other: &dyn Repository, store: &Store) {
    for is_removed in [false, true] {
        let mut object = one.create_new(&name("slow"), 1).expect("begins");
        object.write(&vec![1; 33 << 20]).and_then(|()| object.sync()).expect("writes");
        assert_eq!(other.sweep().expect("sweeps").objects, 0);
        if is_removed {
            let unfinished = store.keys().into_iter().find(|key| key.contains("/.new/")).expect("lies there");
            store.ask("DELETE", &format!("/vms/{unfinished}"));
            let late = object.finish().expect_err("it is gone");
            assert_eq!(late.kind(), ErrorKind::NotFound, "{late}: {}", late.source);
            assert!(other.open(&name("slow")).is_err_and(|error| error.kind() == ErrorKind::NotFound));
        } else {
            object.finish().expect("finishes");
            one.delete(&name("slow")).expect("deletes");
        }
    }
}

fn what_takes_a_place_is_not_mixed_with_what_had_it(repository: &dyn Repository) {
    let make = |byte: u8| {
        let mut object = repository.replace(&name("one"), 1).expect("begins");
        object.write(&[byte; 100]).expect("takes");
        object.finish().expect("finishes");
    };
    make(1);
    let first = repository.open(&name("one")).expect("opens");
    make(2);
    let late = first.read_at(0, &mut [0; 10]).expect_err("it was replaced");
    assert_eq!(late.source.to_string(), "it was replaced by another");
    repository.delete(&name("one")).expect("deletes");
    let gone = first.read_at(0, &mut [0; 10]).expect_err("it was deleted");
    assert_eq!(gone.kind(), ErrorKind::NotFound);
}

#[test]
fn a_bucket_that_is_not_there_is_not_found() {
    with_keys("suite_s3::a_bucket_that_is_not_there_is_not_found", || {
        let store = Store::start();
        let address = store.repository("web").replace("//vms/", "//other/");
        let refused = Address::parse(&address).and_then(|address| address.open(suite::is_tested)).err();
        assert_eq!(refused.map(|error| error.kind()), Some(ErrorKind::NotFound));
    });
}
