//! A directory of HDFS does what every kind of repository must do.
#![cfg(feature = "hdfs")]

mod hdfs;
mod suite;

use hdfs::Cluster;
use vmstrata_repo::Address;

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
}
