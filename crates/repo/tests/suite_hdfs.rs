//! A directory of HDFS does what every kind of repository must do.
#![cfg(feature = "hdfs")]

use crate::suite;
use std::io::ErrorKind;
use std::time::{Duration, Instant};

use crate::hdfs::Cluster;
use vmstrata_repo::{Address, ObjectName, Repository};

#[test]
fn a_directory_of_hdfs_is_a_repository() {
    let mut cluster = Cluster::start(1);
    let mut open = |dir: &str| {
        let address = cluster.repository(dir);
        Address::parse(&address).and_then(|address| address.open(suite::is_tested)).expect("opens")
    };
    suite::test_kind(open("/kind").as_ref());
    // Each with a client of its own, as other processes have.
    let racers = [open("/race"), open("/race"), open("/race")];
    suite::test_race(&racers.each_ref().map(AsRef::as_ref), 20);
    let [one, other] = [open("/swept"), open("/swept")];
    what_a_lost_writer_began_is_swept(&mut cluster, one.as_ref(), other.as_ref());
}

/// It cannot finish that, and may begin again.
fn what_a_lost_writer_began_is_swept(cluster: &mut Cluster, one: &dyn Repository, other: &dyn Repository) {
    let [first, second] = ["first", "second"].map(|name| ObjectName::new(name).expect("a name"));
    let mut begun = one.create_new(&first, 1).expect("begins");
    begun.write(b"bytes").expect("writes");
    assert_eq!(other.sweep().expect("sweeps").objects, 0, "it is there");
    cluster.ask("expire now");
    // The NameNode may take a moment to close its file.
    let deadline = Instant::now() + Duration::from_secs(60);
    while other.sweep().expect("sweeps").objects == 0 {
        assert!(Instant::now() < deadline, "it never expires");
        std::thread::yield_now();
    }
    cluster.ask("expire later");
    let late = begun.sync().and_then(|()| begun.finish()).expect_err("it is gone");
    assert!(other.open(&first).is_err_and(|error| error.kind() == ErrorKind::NotFound), "{late}");
    let again = (0..2).find_map(|_| one.create_new(&second, 1).ok()).expect("begins again");
    again.finish().expect("finishes");
    assert_eq!(other.names("").expect("lists"), [second]);
}
