use std::sync::Arc;

use super::*;

#[test]
fn what_queues_counted_outlives_them() {
    let set = Arc::new(StatsSet::default());
    let mut first = set.join();
    let mut second = set.join();
    let begun = first.begin(Op::Read, 4096);
    first.end(begun, true);
    let begun = second.begin(Op::Write { fua: true }, 512);
    second.end(begun, false);
    let before = set.sum();
    drop(first);
    assert_eq!(set.sum(), before);
    drop(second);
    assert_eq!(set.sum(), before);
    assert_eq!((before.requests_of(Kind::Read), before.bytes_of(Kind::Read)), (1, 4096));
    assert_eq!((before.requests_of(Kind::Write), before.errors[Kind::Write as usize]), (1, 1));
    assert!(set.queues.lock().live.is_empty(), "queues that are gone are forgotten");
}

#[test]
fn one_in_thirteen_is_timed_and_what_is_slow_anyway_always() {
    let set = Arc::new(StatsSet::default());
    let mut queue = set.join();
    for _ in 0..130 {
        let begun = queue.begin(Op::Read, 1);
        queue.end(begun, true);
        let begun = queue.begin(Op::Flush, 99);
        queue.end(begun, true);
    }
    let sum = set.sum();
    assert_eq!(sum.read_latency.iter().sum::<u64>(), 10);
    assert_eq!(sum.other_latency.iter().sum::<u64>(), 130);
    assert_eq!(sum.bytes_of(Kind::Flush), 0, "a flush has no range");
}

#[test]
fn latencies_fall_below_their_bucket_s_bound_and_not_below_the_one_before() {
    for nanos in [0, 1, 1023, 1024, 2047, 2048, 1_000_000, 16_777_216_000, u64::MAX] {
        let bucket = latency_bucket(Duration::from_nanos(nanos));
        let time = Duration::from_nanos(nanos);
        assert!(DiskStats::latency_bound(bucket).is_none_or(|bound| time < bound), "{nanos}");
        let below = bucket.checked_sub(1).and_then(DiskStats::latency_bound);
        assert!(below.is_none_or(|bound| time >= bound), "{nanos}");
    }
    assert_eq!(latency_bucket(Duration::MAX), LATENCY_BUCKETS - 1);
    assert_eq!(DiskStats::latency_bound(0), Some(Duration::from_nanos(1024)));
}

#[test]
fn depths_share_buckets_by_powers_of_two() {
    let buckets: Vec<usize> = [0, 1, 2, 3, 4, 7, 8, 65_535].map(depth_bucket).to_vec();
    assert_eq!(buckets, [0, 1, 2, 2, 3, 3, 4, 16]);
    assert_eq!(depth_bucket(u16::MAX), DEPTH_BUCKETS - 1);
}
