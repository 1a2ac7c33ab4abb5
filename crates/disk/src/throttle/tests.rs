use vmstrata_store::SegmentVec;
use vmstrata_types::{GuestOffset, GuestRange};

use super::*;

fn request(op: Op, len: u64) -> Request {
    Request { op, range: GuestRange::new(GuestOffset::ZERO, len), segments: SegmentVec::new(), token: 0 }
}

const WRITE: Op = Op::Write { fua: false };

/// Pushes as many as are let through in `seconds`, each as soon as it is; returns how many.
fn passed(throttle: &Throttle, op: Op, len: u64, from: Instant, seconds: u64) -> u64 {
    let (mut now, mut count) = (from, 0);
    while now < from + Duration::from_secs(seconds) {
        match throttle.admit(&request(op, len), now) {
            Ok(()) => count += 1,
            Err(until) => {
                assert!(until > now, "it has to wait, and not at all");
                now = until;
            }
        }
    }
    count
}

fn throttle(now: Instant, limits: Limits) -> Throttle {
    Throttle::new(limits, Pace::Free, now).unwrap()
}

fn limit(rate: u64, max: Option<u64>, seconds: Option<u64>) -> Option<Limit> {
    Some(Limit::new(rate, max, seconds).unwrap())
}

#[test]
fn a_limit_lets_its_rate_through() {
    let now = Instant::now();
    for (rate, bytes) in [(1, 4096), (100, 512), (50_000, 1 << 20)] {
        let throttle = throttle(now, Limits { iops_total: limit(rate, None, None), ..Limits::default() });
        let count = passed(&throttle, Op::Read, bytes, now, 20);
        assert!((20 * rate..=20 * rate + rate / 10 + 1).contains(&count), "{count} of {rate} a second");
    }
    let throttle = throttle(now, Limits { bps_write: limit(1 << 20, None, None), ..Limits::default() });
    let count = passed(&throttle, WRITE, 65536, now, 10);
    assert!((160..=162).contains(&count), "{count} pieces of 64 KiB");
}

#[test]
fn a_request_larger_than_a_seconds_worth_passes_and_is_paid_for() {
    let now = Instant::now();
    let throttle = throttle(now, Limits { bps_total: limit(1000, None, None), ..Limits::default() });
    assert_eq!(throttle.admit(&request(WRITE, 10_000), now), Ok(()));
    let until = throttle.admit(&request(Op::Read, 1), now).unwrap_err();
    let waits = until - now;
    assert!((9.8..10.0).contains(&waits.as_secs_f64()), "{waits:?}");
    assert_eq!(throttle.admit(&request(Op::Read, 1), until), Ok(()));
}

#[test]
fn no_wait_is_longer_than_a_clock_can_tell() {
    let now = Instant::now();
    let throttle = throttle(now, Limits { bps_read: limit(1, None, None), ..Limits::default() });
    assert_eq!(throttle.admit(&request(Op::Prefetch, u64::MAX), now), Ok(()));
    let waits = throttle.admit(&request(Op::Read, 1), now).unwrap_err() - now;
    assert_eq!(waits.as_secs(), Limit::SECONDS_MAX);
}

#[test]
fn a_burst_is_let_through_once_and_again_after_a_rest() {
    let now = Instant::now();
    let iops_total = limit(100, Some(1000), Some(5));
    let throttle = throttle(now, Limits { iops_total, ..Limits::default() });
    let second = |number| now + Duration::from_secs(number);
    // 5,000 at 1,000 a second; meanwhile 100 a second leak.
    let first = passed(&throttle, Op::Read, 512, now, 1);
    assert!((1000..=1101).contains(&first), "{first} in the first second");
    passed(&throttle, Op::Read, 512, second(1), 9);
    let later = passed(&throttle, Op::Read, 512, second(10), 10);
    assert!((1000..=1001).contains(&later), "{later} in 10 s after the burst");
    let rested = passed(&throttle, Op::Read, 512, second(80), 1);
    assert!((1000..=1101).contains(&rested), "{rested} in a second after a rest");
}

#[test]
fn limits_count_what_they_are_for() {
    let now = Instant::now();
    let full = |limits: Limits, op: Op| {
        [Op::Read, WRITE].map(|other| {
            let throttle = throttle(now, limits);
            assert_eq!(throttle.admit(&request(op, 1 << 20), now), Ok(()), "nothing was before it");
            throttle.admit(&request(other, 1), now).is_err()
        })
    };
    let one = limit(1, None, None);
    let iops = Limits { iops_total: one, ..Limits::default() };
    let iops_read = Limits { iops_read: one, ..Limits::default() };
    let iops_write = Limits { iops_write: one, ..Limits::default() };
    let bps = Limits { bps_total: one, ..Limits::default() };
    let bps_read = Limits { bps_read: one, ..Limits::default() };
    let bps_write = Limits { bps_write: one, ..Limits::default() };
    let zeroes = Op::WriteZeroes { unmap: true, fua: false };
    for (limits, op, waits) in [
        (iops, Op::Read, [true, true]),
        (iops, Op::Discard, [true, true]),
        (iops, Op::Flush, [false, false]),
        (iops_read, Op::Read, [true, false]),
        (iops_read, WRITE, [false, false]),
        (iops_write, zeroes, [false, true]),
        (iops_write, Op::Prefetch, [false, false]),
        (bps, WRITE, [true, true]),
        (bps, Op::Discard, [false, false]),
        (bps_read, Op::Prefetch, [true, false]),
        (bps_write, WRITE, [false, true]),
        (bps_write, Op::Read, [false, false]),
    ] {
        assert_eq!(full(limits, op), waits, "{limits:?} after {op:?}");
    }
}

#[test]
fn a_flush_never_waits_for_a_limit() {
    let now = Instant::now();
    let throttle = throttle(now, Limits { iops_total: limit(1, None, None), ..Limits::default() });
    assert_eq!(throttle.admit(&request(WRITE, 512), now), Ok(()));
    assert!(throttle.admit(&request(WRITE, 512), now).is_err());
    assert_eq!(throttle.admit(&request(Op::Flush, 0), now), Ok(()));
}

#[test]
fn numbers_that_make_no_limit_are_refused() {
    assert!(Throttle::new(Limits::default(), Pace::Free, Instant::now()).is_none());
    for (rate, max, seconds, error) in [
        (0, None, None, LimitError::Rate),
        (Limit::RATE_MAX + 1, None, None, LimitError::Rate),
        (10, Some(9), None, LimitError::Max),
        (10, Some(Limit::RATE_MAX + 1), None, LimitError::Max),
        (10, None, Some(1), LimitError::Length),
        (10, Some(10), Some(0), LimitError::Length),
        (10, Some(10), Some(Limit::SECONDS_MAX + 1), LimitError::Length),
    ] {
        assert_eq!(Limit::new(rate, max, seconds), Err(error), "{rate} {max:?} {seconds:?}");
    }
    for parts in [(1, None, None), (10, Some(10), None), (10, Some(20), Some(Limit::SECONDS_MAX))] {
        assert_eq!(Limit::new(parts.0, parts.1, parts.2).unwrap().parts(), parts);
    }
}

#[test]
fn a_pace_holds_writes_beside_the_limits_and_leaves_those_as_they_are() {
    let now = Instant::now();
    let limits = Limits { iops_total: limit(100, None, None), ..Limits::default() };
    let throttle = Throttle::new(limits, Pace::BytesPerSecond(1 << 20), now).unwrap();
    let count = passed(&throttle, WRITE, 65536, now, 10);
    assert!((160..=162).contains(&count), "{count} pieces of 64 KiB");
    let (now, second) = (now + Duration::from_secs(11), Duration::from_secs(1));
    // Reads use the limit up.
    while throttle.admit(&request(Op::Read, 512), now).is_ok() {}
    throttle.set_pace(Pace::Stopped);
    let until = throttle.admit(&request(Op::Discard, 4096), now).unwrap_err();
    assert!(until - now > Duration::from_secs(3600));
    assert_eq!(throttle.admit(&request(Op::Flush, 0), now), Ok(()));
    throttle.set_pace(Pace::Free);
    assert!(throttle.admit(&request(WRITE, 512), now).is_err());
    assert_eq!(throttle.admit(&request(WRITE, 512), now + second), Ok(()));
}

#[test]
fn a_faster_pace_shortens_the_wait_and_a_slower_one_does_not_stop() {
    let now = Instant::now();
    let waits = |throttle: &Throttle| {
        throttle.admit(&request(WRITE, 1), now).map_or_else(|until| (until - now).as_secs_f64(), |()| 0.0)
    };
    let throttle = Throttle::new(Limits::default(), Pace::BytesPerSecond(1000), now).unwrap();
    assert_eq!(throttle.admit(&request(WRITE, 10_000), now), Ok(()));
    throttle.set_pace(Pace::BytesPerSecond(1));
    assert!((9.8..10.0).contains(&waits(&throttle)), "{}", waits(&throttle));
    throttle.set_pace(Pace::BytesPerSecond(1000));
    assert!(waits(&throttle) <= 0.0);
}
