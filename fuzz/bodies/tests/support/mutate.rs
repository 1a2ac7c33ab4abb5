//! Damage to seeds: flips, splices, lengths, and the numbers that programs get wrong.

use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};

const INTERESTING: [u64; 16] =
    [0, 1, 2, 8, 9, 16, 63, 64, 512, 0x7fff, 0xffff, 0x7fff_ffff, 0xffff_ffff, 1 << 62, 1 << 63, u64::MAX];
/// Inputs grow no longer than this.
const LEN_MAX: usize = 256 << 10;
/// Most metadata of a small image, and of anything else, lies below.
const HOT: usize = 1024;

/// An endless source of damaged seeds.
pub struct Mutator {
    rng: SmallRng,
    seeds: Vec<Vec<u8>>,
}

impl Mutator {
    pub fn new(seed: u64, seeds: Vec<Vec<u8>>) -> Self {
        Self { rng: SmallRng::seed_from_u64(seed), seeds }
    }

    /// One more.
    pub fn next(&mut self) -> Vec<u8> {
        let mut input = self.seeds[self.rng.random_range(0..self.seeds.len())].clone();
        for _ in 0..self.rng.random_range(1..6) {
            self.damage(&mut input);
        }
        input.truncate(LEN_MAX);
        input
    }

    fn place(&mut self, input: &[u8]) -> usize {
        let end = if self.rng.random() { input.len().min(HOT) } else { input.len() };
        self.rng.random_range(0..end.max(1))
    }

    fn damage(&mut self, input: &mut Vec<u8>) {
        let at = self.place(input);
        match self.rng.random_range(0..7) {
            0 if !input.is_empty() => input[at] ^= 1 << self.rng.random_range(0..8),
            1 if !input.is_empty() => input[at] = self.rng.random(),
            2 => self.number(input, at),
            3 => self.splice(input, at),
            4 => input.truncate(at),
            5 => {
                let more = self.rng.random_range(1..64);
                let insert: Vec<u8> = (0..more).map(|_| self.rng.random()).collect();
                input.splice(at.min(input.len())..at.min(input.len()), insert);
            }
            _ => {
                let len = self.rng.random_range(0..64).min(input.len() - at.min(input.len()));
                input.drain(at.min(input.len())..at.min(input.len()) + len);
            }
        }
    }

    /// A number of any width, in either order, mostly where one may be.
    fn number(&mut self, input: &mut [u8], at: usize) {
        let width = [1, 2, 4, 8][self.rng.random_range(0..4)];
        let value = INTERESTING[self.rng.random_range(0..INTERESTING.len())];
        let value = value.wrapping_add(self.rng.random_range(0..3)).wrapping_sub(1);
        let at = if self.rng.random_range(0..4) > 0 { at & !(width - 1) } else { at };
        let bytes = if self.rng.random() { value.to_be_bytes() } else { value.swap_bytes().to_be_bytes() };
        let bytes = if bytes[0] == 0 { &bytes[8 - width..] } else { &bytes[..width] };
        if let Some(place) = input.get_mut(at..at + width) {
            place.copy_from_slice(bytes);
        }
    }

    /// Some bytes of a seed over, or into, this one.
    fn splice(&mut self, input: &mut Vec<u8>, at: usize) {
        let from = self.seeds[self.rng.random_range(0..self.seeds.len())].clone();
        let start = self.place(&from);
        let len = self.rng.random_range(1..129).min(from.len() - start.min(from.len()));
        let bytes = &from[start.min(from.len())..][..len];
        let at = at.min(input.len());
        let end = if self.rng.random() { at } else { (at + len).min(input.len()) };
        input.splice(at..end, bytes.iter().copied());
    }
}
