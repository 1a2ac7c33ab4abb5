//! A directory of HDFS does what every kind of repository must do.
#![cfg(feature = "hdfs")]

mod hdfs;
mod suite;

use hdfs::Cluster;
use vmstrata_repo::{HdfsRepository, Repository};

#[test]
fn a_directory_of_hdfs_is_a_repository() {
    let mut cluster = Cluster::start(1);
    let mut open = |dir: &str| {
        let address = cluster.repository(dir);
        HdfsRepository::open(&address, suite::is_tested).expect("opens")
    };
    suite::test_kind(&open("/kind"));
    // Each with a client of its own, as other processes have.
    let racers = [open("/race"), open("/race"), open("/race")];
    suite::test_race(&racers.each_ref().map(|racer| racer as &dyn Repository), 20);
}
