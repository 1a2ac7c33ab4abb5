//! What the disks of a host share on their way to repositories: bytes a second, and whose turn it is to ship.
//!
//! Each piece of an object passes the wire, in the order in which they come, so that disks that ship at the same time get equal parts of
//! its rate. Of the disks with repositories on one device, [`SHIPS_MAX`] ship at a time, the others wait for their turn: many epochs at once
//! would all be late.

use std::collections::{BTreeMap, VecDeque};
use std::num::NonZeroU64;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};
use vmstrata_repo::DeviceId;

use crate::meter::Meter;

/// Disks that ship to one device at a time.
const SHIPS_MAX: usize = 2;
/// Seconds' worth that passes at once: clocks and sleeps are no more exact.
const AT_ONCE: f64 = 0.05;
/// Bytes that are written at once, at least and at most: the more, the fewer of them are on their way to a far repository.
const PIECE: [usize; 2] = [64 << 10, 1 << 20];

/// See the module documentation.
#[derive(Debug)]
pub struct Wire {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug)]
struct State {
    rate: Option<NonZeroU64>,
    /// Bytes that have passed and are not paid for; leaks at the rate.
    level: f64,
    leaked_at: Instant,
    /// Tickets: the next one, and that of the piece that passes next.
    next: u64,
    passing: u64,
    /// Those that ship to a device, and wait to, in their order.
    ships: BTreeMap<DeviceId, VecDeque<(u64, Arc<Meter>)>>,
}

impl Default for Wire {
    /// One without limit.
    fn default() -> Self {
        Self::new(None)
    }
}

impl Wire {
    /// The lowest rate: a piece of an object does not take for ever.
    pub const RATE_MIN: u64 = 64 << 10;

    /// One that lets so many bytes a second through, or any number.
    pub fn new(rate: Option<NonZeroU64>) -> Self {
        let (leaked_at, ships) = (Instant::now(), BTreeMap::new());
        let state = State { rate, level: 0.0, leaked_at, next: 0, passing: 0, ships };
        Self { state: Mutex::new(state), changed: Condvar::new() }
    }

    /// Bytes a second; `None` for any number.
    pub fn rate(&self) -> Option<NonZeroU64> {
        self.state.lock().rate
    }

    /// Changes the rate, also for what waits.
    pub fn set_rate(&self, rate: Option<NonZeroU64>) {
        let mut state = self.state.lock();
        state.leak();
        state.rate = rate;
        state.level = state.level.min(0.0);
        self.changed.notify_all();
    }

    /// Bytes that pass at a time.
    pub(crate) fn piece(&self) -> usize {
        let [least, most] = PIECE;
        self.rate().map_or(most, |rate| ((rate.get() as f64 * AT_ONCE) as usize).clamp(least, most))
    }

    /// Waits until so many bytes may pass.
    pub(crate) fn pass(&self, bytes: u64) {
        let mut state = self.state.lock();
        let own = state.next;
        state.next += 1;
        loop {
            state.leak();
            match state.rate {
                _ if state.passing < own => self.changed.wait(&mut state),
                Some(rate) if state.level > 0.0 => {
                    let wait = Duration::from_secs_f64(state.level / rate.get() as f64);
                    self.changed.wait_for(&mut state, wait);
                }
                _ => break,
            }
        }
        if state.rate.is_some() {
            state.level += bytes as f64;
        }
        state.passing += 1;
        self.changed.notify_all();
    }

    /// Waits for the turn to ship to a device, as `meter` tells of it; `None` once it is no use, which [`Wire::wake`] has it look at.
    pub(crate) fn turn(
        self: &Arc<Self>,
        device: DeviceId,
        meter: &Arc<Meter>,
        is_over: impl Fn() -> bool,
    ) -> Option<Turn> {
        let mut state = self.state.lock();
        let own = state.next_ship(device, meter);
        let turn = Turn { wire: Arc::clone(self), device, own };
        while state.place_of(device, own) >= SHIPS_MAX {
            if is_over() {
                drop(state);
                return None;
            }
            self.changed.wait(&mut state);
        }
        drop(state);
        Some(turn)
    }

    /// For how long all of those whose turn it is to ship to a device have had no answer.
    pub(crate) fn silence(&self, device: DeviceId) -> Option<Duration> {
        let state = self.state.lock();
        let ships = state.ships.get(&device)?.iter().take(SHIPS_MAX);
        let silences: Option<Vec<Duration>> = ships.map(|(_, meter)| meter.silence()).collect();
        silences?.into_iter().min()
    }

    /// Has those that wait for their turn look whether it is still of use.
    pub(crate) fn wake(&self) {
        let _state = self.state.lock();
        self.changed.notify_all();
    }
}

impl State {
    fn leak(&mut self) {
        let now = Instant::now();
        let rate = self.rate.map_or(0.0, |rate| rate.get() as f64);
        let leaked = rate * now.saturating_duration_since(self.leaked_at).as_secs_f64();
        self.level = (self.level - leaked).max(-rate * AT_ONCE);
        self.leaked_at = now;
    }

    /// Adds a ship at the end of its device's.
    fn next_ship(&mut self, device: DeviceId, meter: &Arc<Meter>) -> u64 {
        let ships = self.ships.entry(device).or_default();
        let own = ships.back().map_or(0, |(last, _)| last + 1);
        ships.push_back((own, Arc::clone(meter)));
        own
    }

    fn place_of(&self, device: DeviceId, own: u64) -> usize {
        self.ships[&device]
            .iter()
            .position(|(ship, _)| *ship == own)
            .expect("it stays until its turn is dropped")
    }
}

/// Leave to ship, until it is dropped.
#[derive(Debug)]
pub(crate) struct Turn {
    wire: Arc<Wire>,
    device: DeviceId,
    own: u64,
}

impl Drop for Turn {
    fn drop(&mut self) {
        let mut state = self.wire.state.lock();
        let ships = state.ships.get_mut(&self.device).expect("it has this one");
        ships.retain(|(ship, _)| *ship != self.own);
        if ships.is_empty() {
            state.ships.remove(&self.device);
        }
        self.wire.changed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::sync::mpsc;

    use super::*;

    const PIECE: u64 = 64 << 10;

    fn rate(bytes: u64) -> Option<NonZeroU64> {
        NonZeroU64::new(bytes)
    }

    #[test]
    fn pieces_pass_at_the_rate_and_those_of_two_disks_in_turn() {
        let wire = Wire::new(rate(16 << 20));
        let (order, passed) = mpsc::channel();
        let began = Instant::now();
        std::thread::scope(|scope| {
            for disk in 0..2 {
                let (wire, order) = (&wire, order.clone());
                scope.spawn(move || {
                    for _ in 0..64 {
                        wire.pass(PIECE);
                        order.send(disk).unwrap();
                    }
                });
            }
        });
        // 8 MiB, of which a twentieth of a second's worth passed at once.
        assert!(began.elapsed() >= Duration::from_millis(400), "{:?}", began.elapsed());
        drop(order);
        let mut lead: i64 = 0;
        for disk in passed.iter().take(100) {
            lead += if disk == 0 { 1 } else { -1 };
            assert!(lead.abs() < 32, "one disk has the wire for itself");
        }
    }

    #[test]
    fn a_rate_that_is_lifted_ends_the_waiting() {
        let wire = Wire::new(rate(1));
        wire.pass(PIECE);
        std::thread::scope(|scope| {
            scope.spawn(|| wire.pass(PIECE));
            while wire.state.lock().next < 2 {
                std::thread::yield_now();
            }
            wire.set_rate(None);
        });
        assert_eq!(wire.rate(), None);
    }

    #[test]
    fn two_ship_to_a_device_at_a_time_and_another_device_does_not_wait() {
        let wire = Arc::new(Wire::default());
        let [nas, other] = [DeviceId(1), DeviceId(2)];
        let (no, meter) = (|| false, Arc::new(Meter::new()));
        let first = wire.turn(nas, &meter, no).unwrap();
        let _second = wire.turn(nas, &meter, no).unwrap();
        let _elsewhere = wire.turn(other, &meter, no).unwrap();
        let is_over = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let gives_up =
                scope.spawn(|| wire.turn(nas, &meter, || is_over.load(Ordering::SeqCst)).is_none());
            while wire.state.lock().ships[&nas].len() < 3 {
                std::thread::yield_now();
            }
            is_over.store(true, Ordering::SeqCst);
            wire.wake();
            assert!(gives_up.join().unwrap());
            let waits = scope.spawn(|| wire.turn(nas, &meter, no).is_some());
            while wire.state.lock().ships[&nas].len() < 3 {
                std::thread::yield_now();
            }
            drop(first);
            assert!(waits.join().unwrap());
        });
    }
    #[test]
    fn a_device_is_silent_when_all_that_ship_to_it_have_no_answer() {
        let (wire, nas) = (Arc::new(Wire::default()), DeviceId(1));
        let [stuck, other] = [Arc::new(Meter::new()), Arc::new(Meter::new())];
        assert_eq!(wire.silence(nas), None);
        let _first = wire.turn(nas, &stuck, || false).unwrap();
        stuck.ask(|| {
            assert!(wire.silence(nas).is_some());
            let _second = wire.turn(nas, &other, || false).unwrap();
            assert_eq!(wire.silence(nas), None);
        });
    }
}
