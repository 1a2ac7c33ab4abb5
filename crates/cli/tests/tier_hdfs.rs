//! Tiered disks whose repository is in HDFS, beside its own NameNode and DataNodes.
#![cfg(feature = "hdfs")]

use crate::hdfs::Cluster;
use crate::support::far::{
    Far, another_host_takes_it_over_after_a_kill, clones_stand_on_a_named_state,
    its_states_are_named_read_and_gone_back_to, of_racing_claims_one_publishes_at_a_time, tier,
    what_needs_a_directory_is_refused_by_name, who_serves_it_and_was_taken_over_is_fenced,
};
use crate::support::server::Server;
use crate::support::wait_until;

#[test]
fn a_disk_is_published_in_hdfs() {
    let mut cluster = Cluster::start(3);
    let far = Far::new(cluster.repository("/vms/web"));
    let second = another_host_takes_it_over_after_a_kill(&far);
    assert!(cluster.blocks("/vms/web/head-000000000003").iter().all(|block| block.nodes.len() == 3));
    its_states_are_named_read_and_gone_back_to(&far, &second);
    clones_stand_on_a_named_state(&far, &second);
    let second = guests_go_on_while_the_namenode_changes_nothing(&far, second, &mut cluster);
    who_serves_it_and_was_taken_over_is_fenced(&far, second);
    what_needs_a_directory_is_refused_by_name(&far);
    of_racing_claims_one_publishes_at_a_time(&cluster.repository("/race"));
}

/// And a server that was killed meanwhile goes on with what it had not published.
fn guests_go_on_while_the_namenode_changes_nothing(
    far: &Far,
    server: Server,
    cluster: &mut Cluster,
) -> Server {
    cluster.ask("safe-mode on");
    far.write(&server, "write -P 7 16M 1M");
    let refused = server.ask_err(["tier", "sync", "web"]);
    assert!(refused.contains("safe mode"), "{refused}");
    assert_eq!(tier(&server)["state"], "stalled");
    far.write(&server, "write -P 8 20M 1M");
    cluster.ask("safe-mode off");
    wait_until("it is published again", || tier(&server)["state"] == "publishing");
    far.write(&server, "write -P 10 24M 1M");
    let args = far.args("b");
    let server = Server::start_in(server.crash(), &args.each_ref().map(String::as_str));
    far.assert_served(&server);
    server.ask_ok(["tier", "sync", "web"]);
    far.assert_published("", &far.model);
    server
}
