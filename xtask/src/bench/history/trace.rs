//! What became of every request of a guest.

use std::time::Duration;

/// Longer than any request takes; a server that is silent for longer ends the run.
const LATENCY_MAX: Duration = Duration::from_secs(60);

/// A completed request: times in nanoseconds, as there are many.
#[derive(Clone, Copy, Debug)]
struct Request {
    end: u64,
    latency: u64,
}

impl Request {
    fn new(start: Duration, end: Duration) -> Self {
        Self { end: end.as_nanos() as u64, latency: (end - start).as_nanos() as u64 }
    }

    fn start(self) -> Duration {
        Duration::from_nanos(self.end - self.latency)
    }

    fn end(self) -> Duration {
        Duration::from_nanos(self.end)
    }

    fn latency(self) -> Duration {
        Duration::from_nanos(self.latency)
    }
}

/// All requests of a guest, as they completed.
#[derive(Debug)]
pub(super) struct Trace {
    requests: Vec<Request>,
}

impl Trace {
    /// None yet, with memory set aside for so many.
    pub(super) fn with_capacity(requests: usize) -> Self {
        Self { requests: Vec::with_capacity(requests) }
    }

    /// Adds the request that completed last.
    #[inline]
    pub(super) fn push(&mut self, start: Duration, end: Duration) {
        self.requests.push(Request::new(start, end));
    }

    /// Requests completed between two moments.
    pub(super) fn completed(&self, from: Duration, to: Duration) -> usize {
        self.first_after(to) - self.first_after(from)
    }

    /// Requests completed in the `second` after `at`, over those in the one before.
    pub(super) fn change(&self, at: Duration, second: Duration) -> f64 {
        self.completed(at, at + second) as f64 / self.completed(at - second, at) as f64
    }

    /// The longest latency among requests that were under way at some time between two moments, and ended.
    pub(super) fn longest(&self, from: Duration, to: Duration) -> Duration {
        let later = &self.requests[self.first_after(from)..];
        let near = later.iter().take_while(|request| request.end() <= to + LATENCY_MAX);
        let under_way = near.filter(|request| request.start() < to);
        under_way.map(|request| request.latency()).max().unwrap_or_default()
    }

    /// The latency that `part` of the requests completed between two moments keep, such as 0.99; `None` if there were none.
    pub(super) fn percentile(&self, part: f64, from: Duration, to: Duration) -> Option<Duration> {
        let window = &self.requests[self.first_after(from)..self.first_after(to)];
        let mut latencies: Vec<Duration> = window.iter().map(|request| request.latency()).collect();
        let rank = (latencies.len() as f64 * part).ceil() as usize;
        let place = rank.checked_sub(1).filter(|place| *place < latencies.len())?;
        Some(*latencies.select_nth_unstable(place).1)
    }

    fn first_after(&self, moment: Duration) -> usize {
        self.requests.partition_point(|request| request.end() <= moment)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ms(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    /// One request every 10 ms, one of which hangs from 100 to 160 ms.
    fn trace() -> Trace {
        let quick = |index: u64| Request::new(ms(10 * index), ms(10 * index + 2));
        let mut requests: Vec<Request> = (0..10).map(quick).collect();
        requests.push(Request::new(ms(100), ms(160)));
        requests.extend((16..40).map(quick));
        Trace { requests }
    }

    #[test]
    fn a_request_counts_where_it_was_under_way() {
        let trace = trace();
        assert_eq!(trace.longest(ms(0), ms(95)), ms(2));
        assert_eq!(trace.longest(ms(110), ms(111)), ms(60));
        assert_eq!(trace.longest(ms(95), ms(105)), ms(60));
        assert_eq!(trace.longest(ms(170), ms(300)), ms(2));
    }

    #[test]
    fn percentiles_are_of_what_completed_in_the_window() {
        let trace = trace();
        assert_eq!(trace.percentile(0.99, ms(0), ms(95)), Some(ms(2)));
        assert_eq!(trace.percentile(0.5, ms(0), ms(400)), Some(ms(2)));
        assert_eq!(trace.percentile(0.99, ms(0), ms(400)), Some(ms(60)), "one of 35");
        assert_eq!(trace.percentile(0.9, ms(0), ms(400)), Some(ms(2)));
        assert_eq!(trace.percentile(0.99, ms(103), ms(150)), None);
    }

    #[test]
    fn completions_of_a_window() {
        let trace = trace();
        assert_eq!(trace.completed(ms(0), ms(100)), 10);
        assert_eq!(trace.completed(ms(100), ms(155)), 0);
        assert_eq!(trace.change(ms(205), ms(20)), 1.0);
        assert_eq!(trace.change(ms(100), ms(60)), 1.0 / 6.0);
    }
}
