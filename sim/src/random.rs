//! Numbers from a seed (SplitMix64).

use std::cell::Cell;

/// See the module documentation.
#[derive(Debug)]
pub struct Random(Cell<u64>);

impl Random {
    pub const fn new(seed: u64) -> Self {
        Self(Cell::new(seed))
    }

    pub fn seed(&self, seed: u64) {
        self.0.set(seed);
    }

    pub fn next(&self) -> u64 {
        self.0.set(self.0.get().wrapping_add(0x9e37_79b9_7f4a_7c15));
        mix(self.0.get())
    }

    /// Less than `end`.
    pub fn below(&self, end: u64) -> u64 {
        self.next() % end
    }

    pub fn one_in(&self, times: u64) -> bool {
        self.below(times) == 0
    }

    pub fn pick<'a, T>(&self, from: &'a [T]) -> &'a T {
        &from[self.below(from.len() as u64) as usize]
    }
}

/// Scatters the bits of a number.
pub fn mix(value: u64) -> u64 {
    let value = (value ^ (value >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let value = (value ^ (value >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    value ^ (value >> 31)
}

/// A hash of bytes, to compare two runs by.
pub fn hash(seed: u64, bytes: &[u8]) -> u64 {
    let (words, rest) = bytes.as_chunks::<8>();
    let hash = words.iter().fold(seed, |hash, word| mix(hash.rotate_left(5) ^ u64::from_le_bytes(*word)));
    rest.iter().fold(hash, |hash, byte| mix(hash.rotate_left(5) ^ u64::from(*byte)))
}
