//! Tiered disks whose repository is in an object store.
#![cfg(feature = "s3")]

use crate::s3::{Store, with_keys};
use crate::support::far::{
    Far, another_host_takes_it_over_after_a_kill, clones_stand_on_a_named_state,
    its_states_are_named_read_and_gone_back_to, of_racing_claims_one_publishes_at_a_time, tier,
    what_needs_a_directory_is_refused_by_name, who_serves_it_and_was_taken_over_is_fenced,
};
use crate::support::server::Server;
use crate::support::wait_until;

#[test]
fn a_disk_is_published_in_s3() {
    with_keys("tier_s3::a_disk_is_published_in_s3", || {
        let store = Store::start();
        let far = Far::new(store.repository("vms/web"));
        let second = another_host_takes_it_over_after_a_kill(&far);
        its_states_are_named_read_and_gone_back_to(&far, &second);
        clones_stand_on_a_named_state(&far, &second);
        let second = guests_go_on_while_the_store_says_nothing(&far, second, &store);
        who_serves_it_and_was_taken_over_is_fenced(&far, second);
        what_needs_a_directory_is_refused_by_name(&far);
        of_racing_claims_one_publishes_at_a_time(&store.repository("race"));
        let left: Vec<_> = store.keys().into_iter().filter(|key| key.contains("/.new/")).collect();
        assert!(left.is_empty(), "{left:?}");
    });
}

/// And a server that was killed meanwhile goes on with what it had not published.
fn guests_go_on_while_the_store_says_nothing(far: &Far, server: Server, store: &Store) -> Server {
    store.stop();
    far.write(&server, "write -P 7 16M 1M");
    wait_until("the write is seen", || tier(&server)["unpublished_seconds"].is_u64());
    let args = far.args("b");
    let runtime = server.crash();
    store.go_on();
    let server = Server::start_in(runtime, &args.each_ref().map(String::as_str));
    far.assert_served(&server);
    server.ask_ok(["tier", "sync", "web"]);
    far.assert_published("", &far.model);
    server
}
