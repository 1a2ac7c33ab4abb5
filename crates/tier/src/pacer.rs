//! How fast guests may write so that what they write is published within the window.
//!
//! Epochs are shipped one at a time. What is written meanwhile is dirty, is cut off when the wire is free, and is published once that is
//! shipped, too:
//!
//! ```text
//!   first write          now             free         published
//!   ────┼─────────────────┼───────────────┼────────────────┼────►   t
//!       └── age of dirty ─┘└─ remaining ──┘└ dirty / rate ─┘        all three together: at most the window
//! ```
//!
//! The wire's rate, in bytes that guests wrote a second of shipping, is measured: so a guest that overwrites what it wrote is not
//! slowed for bytes that are never shipped. From it follows how many bytes may be dirty at most when the wire is free, and guests have until
//! then to write what is left of that. To half of the window no single epoch may come: else short and long ones would alternate for ever.
//!
//! Nothing here waits or looks at a clock. Seconds are `f64`, bytes are as guests count them.

/// Of the window, what is aimed at: looks and reactions take time.
const AIM: f64 = 0.8;
/// Of the window, when a cut is due that nothing is known about.
const DUE: f64 = 0.85;
/// So many bytes tell how fast the wire is, whatever was known before.
const TELLING: f64 = 4_194_304.0;
/// Of an epoch, what has to be moved to tell how long the rest takes.
const BEGUN: f64 = 0.03;
/// A guest is never slowed below this part of the wire's rate.
const LEAST: f64 = 0.125;

/// An epoch that is being shipped.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Ship {
    /// Seconds since it began.
    pub(crate) elapsed: f64,
    /// What guests wrote for it.
    pub(crate) bytes: f64,
    /// The part of it that has been moved, 0 to 1.
    pub(crate) part: f64,
}

/// What there is to be seen of a disk.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Seen {
    /// Bytes that guests have written since the last cut.
    pub(crate) dirty: f64,
    /// Seconds since the first of these writes.
    pub(crate) age: f64,
    pub(crate) ship: Option<Ship>,
    /// Bytes a second that guests have written lately.
    pub(crate) guest: f64,
    /// Seconds until it is looked at again.
    pub(crate) tick: f64,
}

/// See the module documentation.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Pacer {
    window: f64,
    /// Seconds that an epoch takes however little it has.
    fixed: f64,
    rate: Option<f64>,
    /// Whether guests are slowed.
    is_on: bool,
}

impl Pacer {
    pub(crate) fn new(window: f64) -> Self {
        Self { window, fixed: 0.0, rate: None, is_on: false }
    }

    /// Bytes of guests that a second of shipping publishes, once that is known.
    pub(crate) fn rate(&self) -> Option<f64> {
        self.rate
    }

    /// An epoch of so many bytes was published in so many seconds.
    pub(crate) fn took(&mut self, bytes: f64, seconds: f64) {
        let is_small = bytes < TELLING / 4.0;
        let fixed = if is_small { (self.fixed + seconds) / 2.0 } else { self.fixed.min(seconds) };
        self.fixed = fixed.min(self.window / 4.0);
        let sample = bytes / self.moving(seconds);
        self.rate = match self.rate {
            None => (!is_small).then_some(sample),
            Some(rate) if sample > rate => Some((rate + sample) / 2.0),
            // Of a small epoch that took long, something else was slow.
            Some(rate) if bytes >= TELLING.min(rate * self.window / 10.0) => Some(sample),
            known => known,
        };
    }

    /// Of the seconds that an epoch takes, those in which bytes are moved.
    fn moving(&self, seconds: f64) -> f64 {
        (seconds - self.fixed).max(seconds / 2.0).max(0.001)
    }

    fn expected(&self, bytes: f64) -> f64 {
        self.fixed + self.rate.map_or(0.0, |rate| bytes / rate)
    }

    /// Whether what is dirty has to be cut off now to be published in time, or to learn how fast the wire is.
    pub(crate) fn is_due(&self, dirty: f64, age: f64) -> bool {
        let teaches = self.rate.is_none() && dirty >= 4.0 * TELLING;
        teaches || age + 2.0 * self.expected(dirty) >= DUE * self.window
    }

    /// Seconds that the ship takes still, and the rate that it tells.
    fn progress(&self, ship: Ship) -> (f64, Option<f64>) {
        let Ship { elapsed, bytes, part } = ship;
        let told = (part >= BEGUN).then(|| elapsed / part);
        let known = self.rate.map(|_| self.expected(bytes));
        let total = told.or(known).unwrap_or(2.0 * elapsed).max(1.1 * elapsed);
        let is_late = known.is_some_and(|known| known < total) || known.is_none() && told.is_some();
        let rate = (bytes >= TELLING && is_late).then(|| bytes / self.moving(total));
        (total - elapsed, rate.or(self.rate))
    }

    /// Bytes a second that guests may write; `None` for any number.
    pub(crate) fn pace(&mut self, seen: &Seen) -> Option<u64> {
        let (remaining, rate) = seen.ship.map_or((0.0, self.rate), |ship| self.progress(ship));
        let paced = rate.map(|rate| {
            let aim = AIM * self.window;
            // While the wire is free, a cut that becomes due helps more than a slow guest.
            let in_time = if seen.ship.is_some() { aim - seen.age - remaining } else { aim };
            let left = in_time.min(aim / 2.0) - self.fixed;
            let until = remaining.max(2.0 * seen.tick);
            ((rate * left - seen.dirty) / until).max(rate * LEAST)
        });
        // A guest that does not come near its pace needs none.
        let near = if self.is_on { 4.0 } else { 2.0 };
        let paced = paced.filter(|pace| *pace < near * seen.guest);
        self.is_on = paced.is_some();
        paced.map(|pace| pace as u64)
    }
}

/// Divides a pace among the disks of a group: each gets what its guest can use, up to an equal part, and what is left evenly.
pub(crate) fn shares(pace: f64, guests: &[f64]) -> Vec<f64> {
    let count = guests.len() as f64;
    // One that is slowed, or that begins to write, has twice as much at each look.
    let usable = |disk: usize| (2.0 * guests[disk]).max(pace * LEAST / count);
    let mut order: Vec<usize> = (0..guests.len()).collect();
    order.sort_by(|&one, &other| usable(one).total_cmp(&usable(other)));
    let (mut shares, mut left) = (vec![0.0; guests.len()], pace);
    for (number, disk) in order.into_iter().enumerate() {
        shares[disk] = usable(disk).min(left / (count - number as f64));
        left -= shares[disk];
    }
    shares.iter_mut().for_each(|share| *share += left / count);
    shares
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn disks_that_write_share_the_pace_and_it_is_used_up() {
        let of = |guests: &[f64]| shares(80.0, guests);
        assert_eq!(of(&[1000.0]), [80.0]);
        assert_eq!(of(&[1000.0, 1000.0]), [40.0, 40.0]);
        assert_eq!(of(&[1000.0, 5.0]), [70.0, 10.0]);
        assert_eq!(of(&[0.0, 1000.0]), [5.0, 75.0]);
        assert_eq!(of(&[10.0, 10.0]), [40.0, 40.0]);
        let some = of(&[1.0, 2.0, 30.0, 400.0]);
        assert!((some.iter().sum::<f64>() - 80.0).abs() < 0.001 && some.iter().all(|share| *share > 0.0));
    }

    const MIB: f64 = 1_048_576.0;

    /// A host whose guest writes as fast as it may, in virtual time.
    struct Host {
        pacer: Pacer,
        tick: f64,
        /// The truth: bytes a second, and seconds an epoch takes beside.
        wire: f64,
        fixed: f64,
        now: f64,
        dirty: f64,
        since: Option<f64>,
        /// Of what is shipped: the first write, when it began and ends, its bytes.
        ship: Option<(f64, f64, f64, f64)>,
        published: f64,
        /// The greatest age at which something was published.
        oldest: f64,
    }

    impl Host {
        fn new(window: f64, wire: f64, fixed: f64) -> Self {
            let (pacer, tick) = (Pacer::new(window), (window / 20.0).min(0.25));
            let (now, dirty, published, oldest) = (0.0, 0.0, 0.0, 0.0);
            Self { pacer, tick, wire, fixed, now, dirty, since: None, ship: None, published, oldest }
        }

        /// One tick of a guest that would write so many bytes a second. Returns how many it did.
        fn step(&mut self, guest: f64) -> f64 {
            let ship = self.ship.map(|(_, begun, ends, bytes)| {
                let elapsed = self.now - begun;
                Ship { elapsed, bytes, part: elapsed / (ends - begun) }
            });
            let age = self.since.map_or(0.0, |since| self.now - since);
            let seen = Seen { dirty: self.dirty, age, ship, guest, tick: self.tick };
            let pace = self.pacer.pace(&seen).map_or(guest, |pace| guest.min(pace as f64));
            if pace > 0.0 {
                self.since.get_or_insert(self.now);
                self.dirty += pace * self.tick;
            }
            self.now += self.tick;
            if let Some((since, begun, ends, bytes)) = self.ship.filter(|ship| ship.2 <= self.now) {
                self.pacer.took(bytes, ends - begun);
                self.oldest = self.oldest.max(ends - since);
                self.published += bytes;
                self.ship = None;
            }
            let is_full = self.dirty >= 1024.0 * MIB;
            let is_due = |since: &f64| is_full || self.pacer.is_due(self.dirty, self.now - since);
            if self.ship.is_none()
                && let Some(since) = self.since.filter(is_due)
            {
                let takes = self.fixed + self.dirty / self.wire;
                self.ship = Some((since, self.now, self.now + takes, self.dirty));
                (self.since, self.dirty) = (None, 0.0);
            }
            pace
        }

        fn run(&mut self, seconds: f64, guest: f64) {
            let until = self.now + seconds;
            while self.now < until {
                self.step(guest);
            }
        }

        /// What is published in a time, of what the wire could take, after the age that is reached has been forgotten.
        fn measure(&mut self, seconds: f64, guest: f64) -> f64 {
            (self.published, self.oldest) = (0.0, 0.0);
            self.run(seconds, guest);
            self.published / seconds / self.wire
        }
    }

    #[test]
    fn a_guest_that_is_faster_than_the_wire_is_published_within_the_window_at_the_wires_rate() {
        for window in [1.0, 5.0, 30.0, 600.0] {
            for (wire, fixed) in [(100.0, 0.02), (100.0, 0.1), (8.0, 0.1), (1000.0, 0.01)] {
                for faster in [1.5, 5.0, 50.0] {
                    let mut host = Host::new(window, wire * MIB, fixed);
                    host.run(20.0 * window + 60.0, faster * wire * MIB);
                    let share = host.measure(50.0 * window, faster * wire * MIB);
                    let case = format!("window {window}, wire {wire}, fixed {fixed}, guest {faster} times");
                    assert!(host.oldest <= window, "{case}: published after {} s", host.oldest);
                    assert!(share > 0.65, "{case}: {share} of the wire");
                }
            }
        }
    }

    #[test]
    fn a_guest_that_is_slower_than_the_wire_is_not_slowed() {
        for window in [1.0, 30.0] {
            let mut host = Host::new(window, 100.0 * MIB, 0.05);
            for number in 0..2000 {
                // After idle times, and in bursts that the window holds.
                let burst = 8.0 * MIB * window / host.tick;
                let guest = if number % 100 == 99 { burst } else { 4096.0 };
                assert!(host.step(guest) >= guest, "window {window}, tick {number}");
            }
            assert!(host.oldest <= window);
        }
    }

    #[test]
    fn after_a_long_outage_the_age_returns_to_the_window() {
        let mut host = Host::new(30.0, 100.0 * MIB, 0.1);
        host.run(300.0, 500.0 * MIB);
        // Ten minutes at full speed.
        (host.since, host.dirty) = (Some(host.now - 600.0), 600.0 * 200.0 * MIB);
        // To ship that, and what is written meanwhile at an eighth of the rate, and so on.
        host.run(1200.0 + 150.0 + 60.0, 500.0 * MIB);
        let share = host.measure(600.0, 500.0 * MIB);
        assert!(host.oldest <= 30.0 && share > 0.8, "{} s, {share}", host.oldest);
    }

    #[test]
    fn a_wire_that_becomes_slower_is_noticed_while_the_epoch_is_shipped() {
        let mut host = Host::new(30.0, 100.0 * MIB, 0.1);
        host.run(300.0, 500.0 * MIB);
        host.wire /= 10.0;
        host.run(600.0, 500.0 * MIB);
        let share = host.measure(600.0, 500.0 * MIB);
        assert!(host.oldest <= 30.0 && share > 0.8, "{} s, {share}", host.oldest);
    }

    #[test]
    fn a_small_epoch_that_took_long_slows_nobody() {
        let mut host = Host::new(30.0, 100.0 * MIB, 0.1);
        host.run(300.0, 50.0 * MIB);
        host.pacer.took(4096.0, 9.0);
        let rate = host.pacer.rate().unwrap();
        assert!(rate > 50.0 * MIB, "{rate}");
    }
}
