//! The benchmark of moves that follow their guests, small, with a real guest.

use xtask::bench::migrate::Part;

use crate::bench_migrate::measured;

#[test]
fn transactions_of_a_guest_are_counted_with_and_without_a_move() {
    assert_eq!(measured(Part::Guest).rows.len(), 5);
}
