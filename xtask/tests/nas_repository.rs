//! A directory of a real NFS server does what every kind of repository must do.

use crate::suite;
use std::fs;
use std::net::IpAddr;

use vmstrata_repo::{ObjectName, Repository};
use xtask::nas::{Nas, NfsRepository};

fn open(nas: &Nas, dir: &str) -> NfsRepository {
    let (server, path) = nas.address(1, dir);
    fs::create_dir_all(&path).unwrap();
    NfsRepository::open(IpAddr::V4(server), &path, suite::is_tested).unwrap()
}

fn nas() -> Option<Nas> {
    if let Err(why) = xtask::nas::check() {
        eprintln!("not tested: {why}");
        return None;
    }
    Some(Nas::start(1).unwrap())
}

#[test]
fn a_directory_of_an_nfs_server_is_a_repository() {
    let Some(nas) = nas() else { return };
    nas.network().enter_host(1).unwrap();
    let repository = open(&nas, "kind");
    suite::test_kind(&repository);
    assert_eq!(fs::read_dir(nas.export().join("kind")).unwrap().count(), 0, "unfinished objects are left");

    let racers = [open(&nas, "race"), open(&nas, "race"), open(&nas, "race")];
    suite::test_race(&racers.each_ref().map(|racer| racer as &dyn Repository), 20);
}

#[test]
fn an_object_that_a_restarted_server_may_have_lost_fails() {
    let Some(nas) = nas() else { return };
    nas.network().enter_host(1).unwrap();
    let (repository, name) = (open(&nas, "restart"), ObjectName::new("one").unwrap());
    let piece = vec![7; 3 << 20];
    let mut object = repository.create_new(&name, 1).unwrap();
    object.write(&piece).unwrap();
    nas.crash().unwrap();
    nas.boot().unwrap();
    let failed = object.write(&piece).and_then(|()| object.sync());
    failed.expect_err("the verifier has changed, or the connection is gone");
    drop(object);

    let mut again = repository.create_new(&name, 1).unwrap();
    again.write(&piece).unwrap();
    again.finish().unwrap();
    let mut read = vec![0; piece.len()];
    repository.open(&name).unwrap().read_at(0, &mut read).unwrap();
    assert!(read == piece);
    repository.sweep().unwrap();
    assert_eq!(fs::read_dir(nas.export().join("restart")).unwrap().count(), 1);
}
