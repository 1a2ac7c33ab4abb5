//! How much a move has in flight, so that its guest's latency stays within a factor of what it is without the move.
//!
//! The move stops for a while now and then, and the guest's requests of that time are the base. Both times alternate, so that a guest whose load
//! changes is compared with itself. The window then shrinks or grows by how much of the allowed excess is used.
//!
//! Reads and writes are compared apart, as a store may answer one from memory and not the other; the worse one counts. A guest without
//! requests says nothing: the window stays as it is.

use std::collections::VecDeque;
use std::time::Duration;

use super::Kind;

/// Bytes of a read below which it is not made smaller: there are gaps between reads instead.
const READ_MIN: u64 = 128 << 10;
/// The window that is kept in any case, so that a move ends.
const WINDOW_MIN: f64 = (READ_MIN / 64) as f64;
/// Requests of a guest in a turn with the move, and in one without.
const TURN: [usize; 2] = [32, 128];
/// The longest turn without the move, for a guest that has few requests.
const PAUSE_MAX: Duration = Duration::from_secs(1);
/// Latencies that are compared: the last ones.
const KEPT: usize = 512;
/// So many are needed.
const SAMPLES_MIN: usize = 32;
/// What one turn may change the window by.
const CHANGE: (f64, f64) = (0.8, 1.1);

/// Latencies of one kind, in seconds.
#[derive(Debug, Default)]
struct Sample(VecDeque<f64>);

impl Sample {
    fn add(&mut self, latency: Duration) {
        if self.0.len() == KEPT {
            self.0.pop_front();
        }
        self.0.push_back(latency.as_secs_f64());
    }

    /// The mean, and what 99 of 100 do not exceed; nothing of too few.
    fn mean_and_p99(&self) -> Option<[f64; 2]> {
        if self.0.len() < SAMPLES_MIN {
            return None;
        }
        let mut sorted: Vec<f64> = self.0.iter().copied().collect();
        sorted.sort_by(f64::total_cmp);
        let mean = sorted.iter().sum::<f64>() / sorted.len() as f64;
        Some([mean, sorted[(sorted.len() - 1) * 99 / 100]])
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Turn {
    Without,
    With,
}

/// What a move may read now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Allowed {
    /// At most so many bytes.
    Bytes(u64),
    /// Nothing before this time, or before a request or a read has ended.
    NotBefore(Duration),
}

/// See the module documentation.
#[derive(Debug)]
pub struct Control {
    factor: f64,
    /// Bytes in flight on average.
    window: f64,
    window_max: f64,
    /// `[turn][kind]`.
    latencies: [[Sample; 2]; 2],
    turn: Turn,
    turn_began: Duration,
    /// Requests of this turn.
    requests: usize,
    in_flight: u64,
    /// When the gap after the last read ends.
    gap_ends: Duration,
}

impl Control {
    /// The guest's mean and p99 may be `factor` times what they are without the move, which has at most `window_max` bytes in flight. It begins
    /// now, with a turn without the move.
    ///
    /// # Panics
    /// When the factor is not above 1.
    pub fn new(factor: f64, window_max: u64, now: Duration) -> Self {
        assert!(factor > 1.0, "the guest's latency may grow");
        let window_max = window_max.max(READ_MIN) as f64;
        Self {
            factor,
            window: READ_MIN as f64,
            window_max,
            latencies: Default::default(),
            turn: Turn::Without,
            turn_began: now,
            requests: 0,
            in_flight: 0,
            gap_ends: now,
        }
    }

    /// Bytes in flight on average, as allowed at this time.
    pub fn window(&self) -> u64 {
        self.window as u64
    }

    /// What the move may read now.
    pub fn allowed(&mut self, now: Duration) -> Allowed {
        if self.turn == Turn::Without {
            let ends = self.turn_began + PAUSE_MAX;
            if self.requests < TURN[0] && now < ends {
                return Allowed::NotBefore(ends);
            }
            self.begin(Turn::With, now);
        }
        if self.turn_is_over() {
            return Allowed::NotBefore(Duration::MAX);
        }
        let free = (self.window as u64).max(READ_MIN).saturating_sub(self.in_flight);
        match free {
            _ if now < self.gap_ends => Allowed::NotBefore(self.gap_ends),
            0..READ_MIN => Allowed::NotBefore(Duration::MAX),
            free => Allowed::Bytes(free),
        }
    }

    /// The move reads so many bytes from now on.
    pub fn began(&mut self, bytes: u64) {
        self.in_flight += bytes;
    }

    /// A read of the move has ended.
    pub fn ended(&mut self, bytes: u64, began: Duration, now: Duration) {
        self.in_flight -= bytes;
        // A window below the smallest read is that one, and the time without it.
        let gap = (READ_MIN as f64 / self.window - 1.0).max(0.0) * (bytes as f64 / READ_MIN as f64).min(1.0);
        self.gap_ends = now + now.saturating_sub(began).mul_f64(gap);
        self.end_turn(now);
    }

    /// A request of the guest has ended.
    pub fn guest(&mut self, kind: Kind, began: Duration, now: Duration) {
        // One that was under way when the turns changed belongs to none.
        if began < self.turn_began {
            return;
        }
        self.latencies[self.turn as usize][kind as usize].add(now.saturating_sub(began));
        self.requests += 1;
        self.end_turn(now);
    }

    fn turn_is_over(&self) -> bool {
        self.turn == Turn::With && self.requests >= TURN[1]
    }

    /// Once what the move reads has ended, its turn is over.
    fn end_turn(&mut self, now: Duration) {
        if self.turn_is_over() && self.in_flight == 0 {
            self.adjust();
            self.begin(Turn::Without, now);
        }
    }

    fn begin(&mut self, turn: Turn, now: Duration) {
        (self.turn, self.turn_began, self.requests) = (turn, now, 0);
    }

    fn adjust(&mut self) {
        let [without, with] = &self.latencies;
        let ratios = without.iter().zip(with).filter_map(|(without, with)| {
            let (without, with) = (without.mean_and_p99()?, with.mean_and_p99()?);
            Some((with[0] / without[0]).max(with[1] / without[1]))
        });
        let Some(worst) = ratios.max_by(f64::total_cmp) else { return };
        // Small near the aim, as the samples reach back over several turns.
        let change = ((self.factor - 1.0) / (worst - 1.0).max(1e-6)).powf(0.25);
        self.window = (self.window * change.clamp(CHANGE.0, CHANGE.1)).clamp(WINDOW_MIN, self.window_max);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    fn us(us: u64) -> Duration {
        Duration::from_micros(us)
    }

    /// A device whose latencies rise once more than `knee` bytes are in flight on average.
    struct Device {
        control: Control,
        now: Duration,
        knee: [f64; 2],
        requests: u64,
    }

    impl Device {
        fn new(factor: f64, knee: [u64; 2]) -> Self {
            let control = Control::new(factor, 64 * MIB, Duration::ZERO);
            Self { control, now: Duration::ZERO, knee: knee.map(|knee| knee as f64), requests: 0 }
        }

        /// The guest has so many requests, or is silent for so many ms; the move reads what it may.
        fn run(&mut self, requests: usize, silent_ms: u64) {
            for step in 0..requests as u64 + silent_ms {
                let began = self.now;
                let mut reads = Vec::new();
                while let Allowed::Bytes(bytes) = self.control.allowed(self.now) {
                    self.control.began(bytes);
                    reads.push(bytes);
                }
                self.now += us(1000);
                let is_moving = !reads.is_empty();
                for bytes in reads {
                    self.control.ended(bytes, began, self.now);
                }
                if step >= requests as u64 {
                    continue;
                }
                self.requests += 1;
                let kind = if self.requests.is_multiple_of(2) { Kind::Read } else { Kind::Write };
                let window = if is_moving { self.control.window } else { 0.0 };
                let slower = 1.0 + (window / self.knee[kind as usize] - 1.0).max(0.0);
                let latency = us(400 + self.requests * 7919 % 200).mul_f64(slower);
                self.control.guest(kind, began, began + latency);
            }
        }
    }

    #[test]
    fn the_window_comes_to_the_knee_from_both_sides() {
        for window in [READ_MIN, 60 * MIB] {
            let mut device = Device::new(1.5, [4 * MIB, 4 * MIB]);
            device.control.window = window as f64;
            device.run(20_000, 0);
            let found = device.control.window() as f64 / (6 * MIB) as f64;
            assert!((0.8..1.25).contains(&found), "{found}");
        }
    }

    #[test]
    fn it_backs_off_when_latencies_rise() {
        let mut device = Device::new(1.5, [4 * MIB, 4 * MIB]);
        device.run(20_000, 0);
        let before = device.control.window();
        device.knee = [MIB as f64, MIB as f64];
        device.run(5_000, 0);
        assert!(device.control.window() < before / 3, "{} of {before}", device.control.window());
    }

    #[test]
    fn the_worse_of_reads_and_writes_counts() {
        let mut device = Device::new(1.5, [64 * MIB, MIB]);
        device.run(20_000, 0);
        assert!(device.control.window() < 2 * MIB, "{}", device.control.window());
    }

    #[test]
    fn silence_is_no_health() {
        let mut device = Device::new(1.5, [4 * MIB, 4 * MIB]);
        device.run(0, 60_000);
        assert_eq!(device.control.window(), READ_MIN, "without a request");
        device.run(3_000, 0);
        let before = device.control.window();
        device.run(0, 60_000);
        assert_eq!(device.control.window(), before);
        assert!(
            matches!(device.control.allowed(device.now), Allowed::Bytes(_)),
            "the move goes on meanwhile"
        );
    }

    #[test]
    fn a_small_window_has_gaps() {
        let mut control = Control::new(1.1, MIB, Duration::ZERO);
        control.window = READ_MIN as f64 / 4.0;
        let mut now = PAUSE_MAX;
        assert_eq!(control.allowed(now), Allowed::Bytes(READ_MIN));
        control.began(READ_MIN);
        assert_eq!(control.allowed(now), Allowed::NotBefore(Duration::MAX));
        now += us(1000);
        control.ended(READ_MIN, PAUSE_MAX, now);
        assert_eq!(control.allowed(now), Allowed::NotBefore(now + us(3000)));
        assert_eq!(control.allowed(now + us(3000)), Allowed::Bytes(READ_MIN));
    }
}
