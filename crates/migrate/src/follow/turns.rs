//! Whose turn it is at a device: guests before moves in a ratio, and moves in fair shares (IOFollow 4.3.3).

use std::time::Duration;

/// Requests of guests that are served before one of a move.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ratio(u32);

impl Ratio {
    /// `guests` to 1.
    pub const fn new(guests: u32) -> Self {
        Self(guests)
    }
}

/// How much of a move is read at a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reads {
    /// Bytes in the move's turn, while guests wait.
    pub chunk: u64,
    /// Bytes while none waits: a guest that comes then waits for the rest of them.
    pub idle: u64,
}

/// The moves of one device. Each is one unit with its guest: the move of the guest that the device works for goes on, so that its head stays
/// there, until another one is behind by more than the quantum.
#[derive(Debug)]
pub struct Turns {
    ratio: Ratio,
    reads: Reads,
    /// Requests of guests since the last one of a move.
    served: u32,
    quantum: f64,
    /// Where the device is.
    at: usize,
    guests: Vec<Guest>,
}

#[derive(Clone, Copy, Debug)]
struct Guest {
    weight: f64,
    /// Bytes that it was given / its weight. One that wants nothing falls back no further than the others.
    given: f64,
}

impl Turns {
    /// For moves of these weights. `quantum` is in bytes of a move of weight 1; with 0 the moves take turns after each chunk.
    ///
    /// # Panics
    /// When a weight is not above 0.
    pub fn new(ratio: Ratio, reads: Reads, quantum: u64, weights: &[f64]) -> Self {
        assert!(weights.iter().all(|weight| *weight > 0.0), "a weight is above 0");
        let guests = weights.iter().map(|weight| Guest { weight: *weight, given: 0.0 }).collect();
        Self { ratio, reads, served: 0, quantum: quantum as f64, at: 0, guests }
    }

    /// The device served a request of a guest.
    pub fn guest_served(&mut self, guest: usize) {
        self.served = self.served.saturating_add(1);
        self.at = guest;
    }

    /// Bytes that a move may read now, while `waiting` requests of guests wait for the device; 0 in the guests' turn.
    pub fn allowed(&self, waiting: usize) -> u64 {
        match waiting {
            0 => self.reads.idle,
            _ if self.served >= self.ratio.0 => self.reads.chunk,
            _ => 0,
        }
    }

    /// The guest whose move reads next, of those that `wants`. The caller then says what it read with [`Turns::moved`].
    pub fn next(&mut self, wants: impl Fn(usize) -> bool) -> Option<usize> {
        let wanting = || (0..self.guests.len()).filter(|guest| wants(*guest));
        let least = wanting().min_by(|a, b| self.guests[*a].given.total_cmp(&self.guests[*b].given))?;
        let floor = self.guests[least].given;
        let goes_on = wants(self.at) && self.guests[self.at].given <= floor + self.quantum;
        let guest = if goes_on && self.quantum > 0.0 { self.at } else { least };
        for idle in 0..self.guests.len() {
            if !wants(idle) {
                self.guests[idle].given = self.guests[idle].given.max(floor);
            }
        }
        Some(guest)
    }

    /// A guest's move was given the device for so many bytes.
    pub fn moved(&mut self, guest: usize, bytes: u64) {
        self.served = 0;
        self.at = guest;
        self.guests[guest].given += bytes as f64 / self.guests[guest].weight;
    }
}

/// Who has a frozen layer.
#[derive(Clone, Copy, Debug)]
pub struct Holder {
    /// Requests that wait for it.
    pub in_flight: u32,
    /// What one took lately.
    pub latency: Duration,
}

/// The holder that answers soonest, so that a layer which several have is read from the idlest; the first of equal ones.
pub fn idlest(holders: &[Holder]) -> Option<usize> {
    let waits = |holder: &Holder| holder.latency * (holder.in_flight + 1);
    (0..holders.len()).min_by_key(|at| waits(&holders[*at]))
}

#[cfg(test)]
mod tests {
    use rand::rngs::SmallRng;
    use rand::{Rng as _, SeedableRng as _};

    use super::*;

    const READS: Reads = Reads { chunk: 1 << 20, idle: 128 << 10 };

    #[test]
    fn guests_go_first_as_the_ratio_says() {
        let mut turns = Turns::new(Ratio::new(2), READS, 0, &[1.0]);
        assert_eq!(turns.allowed(0), READS.idle);
        let mut said = Vec::new();
        for _ in 0..6 {
            said.push(turns.allowed(1));
            if turns.allowed(1) > 0 { turns.moved(0, 1) } else { turns.guest_served(0) }
        }
        assert_eq!(said, [0, 0, READS.chunk, 0, 0, READS.chunk]);
    }

    #[test]
    fn moves_share_by_weight_within_a_quantum_and_a_chunk() {
        let (quantum, chunk) = (16 << 20, 1 << 20);
        let weights = [1.0, 2.0, 4.0, 1.0];
        let mut rng = SmallRng::seed_from_u64(4);
        let mut turns = Turns::new(Ratio::new(2), READS, quantum, &weights);
        let mut bytes = [0_u64; 4];
        for _ in 0..100_000 {
            // The device is mostly at one guest's.
            turns.guest_served(if rng.random_bool(0.8) { 0 } else { rng.random_range(0..4) });
            let guest = turns.next(|_| true).unwrap();
            let len = rng.random_range(1..=chunk);
            turns.moved(guest, len);
            bytes[guest] += len;
            let shares: Vec<f64> =
                bytes.iter().zip(weights).map(|(bytes, weight)| *bytes as f64 / weight).collect();
            let (least, most) = shares.iter().fold((f64::MAX, 0_f64), |(a, b), x| (a.min(*x), b.max(*x)));
            assert!(most - least <= (quantum + chunk) as f64, "{shares:?}");
        }
    }

    #[test]
    fn a_move_that_waited_takes_no_more_than_its_share_afterwards() {
        let mut turns = Turns::new(Ratio::new(2), READS, 0, &[1.0, 1.0]);
        for _ in 0..100 {
            assert_eq!(turns.next(|guest| guest == 0), Some(0));
            turns.moved(0, 1);
        }
        let mut given = [0; 2];
        for _ in 0..10 {
            let guest = turns.next(|_| true).unwrap();
            turns.moved(guest, 1);
            given[guest] += 1;
        }
        assert_eq!(given, [5, 5]);
        assert_eq!(turns.next(|_| false), None);
    }

    #[test]
    fn a_layer_is_read_from_the_idlest_holder() {
        let holder = |in_flight, ms| Holder { in_flight, latency: Duration::from_millis(ms) };
        assert_eq!(idlest(&[holder(3, 1), holder(0, 3), holder(0, 5)]), Some(1));
        assert_eq!(idlest(&[holder(0, 2), holder(0, 2)]), Some(0));
        assert_eq!(idlest(&[]), None);
    }
}
